r"""How the posterior answers to a stronger or weaker prior or likelihood, by power-scaling.

With a part :math:`p(z)` of the joint density raised to the power :math:`\alpha`, draws of the
posterior have the weights :math:`p(z^s)^{\alpha - 1}`. How far the marginal of a global moves
is the cumulative Jensen-Shannon distance :math:`D` between the two distribution functions
(Nguyen and Vreeken 2015), and its sensitivity is the slope (Kallioinen et al. 2024)

.. math::
    \tfrac12 \Big(\frac{D(1.01)}{\log_2 1.01} - \frac{D(0.99)}{\log_2 0.99}\Big).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from numpyro_fed.basics.errors import optional
from numpyro_fed.basics.programs import map_in_batches
from numpyro_fed.search.expand import effects_of
from numpyro_fed.text.log_density import FederatedModel

POWERS = (0.99, 1.01)
# Slope above which a marginal answers to the prior, or below which it does not to the likelihood
# (Kallioinen et al. 2024).
THRESHOLD = 0.05
CONFLICT = "prior and data in conflict"
STRONG = "strong prior or weak data"


@dataclass(frozen=True, eq=False)
class PriorSensitivity:
    """The slopes of all elements of the globals; prints as a table.

    Attributes
    ----------
    names : tuple of str
        Such as ``"beta[1]"``.
    prior, likelihood : array (n,)
        How far the marginal moves for a stronger or weaker prior or likelihood. Above 0.05 it
        answers.
    """

    names: tuple[str, ...]
    prior: np.ndarray
    likelihood: np.ndarray

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Return in words what the slopes of each element say; empty if there is nothing to say."""
        answers = zip(self.prior > THRESHOLD, self.likelihood > THRESHOLD, strict=True)
        return tuple((CONFLICT if data else STRONG) if prior else "" for prior, data in answers)

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each element."""
        columns = {"prior": self.prior, "likelihood": self.likelihood, "diagnosis": self.diagnosis}
        return optional("pandas").DataFrame(columns, index=list(self.names))

    def __str__(self) -> str:
        width = max([6, *map(len, self.names)])
        lines = [f"{'':{width}} {'prior':>7} {'likelihood':>11}"]
        lines += [
            f"{name:{width}} {prior:7.3f} {data:11.3f}  {words}".rstrip()
            for name, prior, data, words in zip(
                self.names, self.prior, self.likelihood, self.diagnosis, strict=True
            )
        ]
        return "\n".join(lines)

    __repr__ = __str__


def log_prior_on_supports(fm: FederatedModel, theta: Mapping[str, Array], z_G: Array) -> np.ndarray:
    """Return the log prior density (n,) of globals at draws (n, dim), on their own supports.

    Latents whose prior depends on other globals (effects under a scale) do not count: what is
    scaled is the prior at the top.
    """
    effects = set(effects_of(fm).tolist())
    num_theta = sum(np.size(a) for a in jax.tree.leaves(dict(theta)))
    top = [s for s in fm.named("latent") if num_theta + s.start not in effects]

    @jax.jit
    def log_prior(z: Array) -> Array:
        terms = fm.prior_terms(dict(theta), z)
        total = jnp.zeros(())
        for s in top:
            bijection = biject_to(fm.structure.supports[s.name])
            u = z[s.start : s.stop].reshape(s.shape)
            # The terms are densities in unconstrained space.
            log_det = bijection.log_abs_det_jacobian(u, bijection(u))
            total += terms[s.name] - jnp.sum(log_det)
        return total

    return np.asarray(map_in_batches(log_prior, z_G, 256), np.float64)


def slopes(values: np.ndarray, log_part: np.ndarray) -> np.ndarray:
    """Return the slope of each column of draws (n, k) of the posterior, scaled by a part (n,).

    The draws weigh the same: the distance is one in units of their range, to which weighted draws
    far out would add.
    """
    found = np.zeros(values.shape[1])
    even = np.full(len(values), 1 / len(values))
    for power in POWERS:
        log_w = (power - 1) * log_part
        scaled = np.exp(log_w - log_w.max())
        scaled /= scaled.sum()
        distances = np.array([_distance(column, even, scaled) for column in values.T])
        found += distances / abs(np.log2(power)) / 2
    return found


def _distance(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> float:
    """Return the cumulative Jensen-Shannon distance of draws (n,) with two weights (n,)."""
    largest = 0.0
    for signed in (x, -x):  # the larger one of both: a sign does not matter
        order = np.argsort(signed)
        width = np.diff(signed[order])
        P, Q = (np.cumsum(a[order])[:-1] for a in (w, v))
        size, total = width @ (P + Q), 0.0
        if not size > 0:
            continue
        for F, G in ((P, Q), (Q, P)):
            with np.errstate(divide="ignore", invalid="ignore"):
                terms = np.where(F > 0, F * np.log2(F / ((P + Q) / 2)), 0.0)
            total += max(float(width @ terms + width @ (G - F) / (2 * np.log(2))), 0.0)
        largest = max(largest, float(np.sqrt(total) / np.sqrt(size)))
    return largest
