r"""Local optimisers of PVI: a silo's work between two messages.

Each of them maximises a silo's local free energy (Ashman et al. 2022, equation 2 and Algorithm 1)

.. math::
    \mathcal{F}_m(q) = \mathbb{E}_q\big[\log p(y_m \mid z)\big]
    - \mathrm{KL}\big(q \,\|\, q_{\setminus m}\big),

where the cavity :math:`q_{\setminus m}` is the posterior without the silo's own factor. Where the
silo has local latents, a bound by its local guide replaces the log likelihood.
"""

from numpyro_fed.local.gradient import LBFGS, Optax
from numpyro_fed.local.natural import ClosedForm, NaturalGradient, PowerEP

__all__ = ["LBFGS", "ClosedForm", "NaturalGradient", "Optax", "PowerEP"]


def __dir__() -> list[str]:
    return __all__
