"""SOUL for vertical models: the method ``SOUL`` and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import optax

from numpyro_fed.algorithms.vertical.soul import Soul
from numpyro_fed.errors import positive_int
from numpyro_fed.methods.sfvi import default_optimiser
from numpyro_fed.methods.vertical import VerticalMethod
from numpyro_fed.model.clients import positive_rho
from numpyro_fed.model.data import signature
from numpyro_fed.model.roles import VerticalSplit
from numpyro_fed.results.vertical import SOULResult, VerticalResult


@dataclass(frozen=True)
class SOUL(VerticalMethod[SOULResult]):
    r"""Langevin draws of clients' latents, with auxiliary variables at their mode (SOUL).

    .. math::
        \hat z = \arg\max_z \log p(y, z), \qquad
        \theta_j \sim p(\theta_j \mid \hat z, y)

    for the augmented model, or with ``likelihood="power"`` the other one
    (:class:`~numpyro_fed.VFL`). The server's latents and parameters are at their mode, too. Since
    ``z`` is fixed, posteriors are narrower than those of the model: given ``z``, a linear predictor
    with ``n`` rows has a variance of the order of :math:`\rho^2 / n`, whatever the response says.

    A client sends its mode :math:`\hat z_j` without added noise: it is the predictor at the
    client's draws, moved by up to some :math:`\rho` towards the response. The draws are made with a
    key that only the client knows. Do not count on ``rho`` to hide a predictor here.

    Parameters
    ----------
    model : callable
        A NumPyro model with one :func:`~numpyro_fed.client_sum`.
    rho : float
        Standard deviation of the auxiliary variables, in the units of the predictor.
    likelihood : {"augmented", "power"}
    share_response : bool
        Whether clients know the response and what else the server holds.
    optim : optax.GradientTransformation, optional
        The optimiser of auxiliary variables, in units of ``rho``, and of the server. By default
        Adam whose step decays from 0.03.
    num_steps : int
        Langevin steps of each client in a round.
    step_size : float
        The size of a Langevin step, in coordinates in which a client's curvature under ``rho`` is
        one. Variances come out too large by half of it.
    num_kept : int
        The number of draws that a client keeps, the last ones, one of each round.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, Appendix A; De Bortoli, Durmus,
    Pereyra, Vidal (2021), Statistics and Computing 31. Unlike there, the server sees sums over
    clients instead of each client's part.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    ...     return x @ beta
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(200, 1)), rng.normal(size=(200, 2))]
    >>> y = 2 * xs[0][:, 0] + rng.normal(size=200)
    >>> result = nf.SOUL(model, rho=1.0).run(jax.random.key(0), 1_000, xs, y, progress_bar=False)
    >>> draws = result.sample_posterior(jax.random.key(1), 500)
    >>> bool(abs(draws["client_0/beta"].mean() - 2) < 0.3), draws["client_1/beta"].shape
    (True, (500, 2))
    """

    kind: ClassVar[type[VerticalResult]] = SOULResult

    rho: float = field(kw_only=True)
    optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    num_steps: int = field(default=20, kw_only=True)
    step_size: float = field(default=0.05, kw_only=True)
    num_kept: int = field(default=1_000, kw_only=True)

    def __post_init__(self) -> None:
        positive_rho(self.rho)
        positive_int("num_steps", self.num_steps)
        positive_int("num_kept", self.num_kept)
        if not 0 < self.step_size < 2:
            raise ValueError(
                f"step_size={self.step_size!r}: Langevin steps are stable between 0 and 2, and "
                "nearly right below 0.2."
            )
        super().__post_init__()

    @property
    def hides_by_noise(self) -> bool:
        return True

    def parties(self, roles: VerticalSplit) -> Soul:
        """Return a model that is split over clients, with their chains."""
        pairs = zip(roles.model.clients, roles.clients, strict=True)
        return Soul(
            model=roles.model,
            kinds={signature(data): party_model for party_model, data in pairs},
            rho=self.rho,
            optim=self.optim or default_optimiser(),
            num_steps=self.num_steps,
            step_size=self.step_size,
            num_kept=self.num_kept,
            power=self.likelihood == "power",
        )

    def settings_of(self, v: Soul) -> dict[str, Any]:
        """Return the settings that a saved state must agree with."""
        names = "rho", "likelihood", "num_steps", "step_size", "num_kept"
        return {name: getattr(self, name) for name in names}
