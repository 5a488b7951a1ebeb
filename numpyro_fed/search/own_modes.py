r"""The first exchange of a search for the mode: each silo climbs to a mode of its own.

Silo ``j`` of ``J`` maximises its share of the posterior,

.. math::
    \ell_j(x) = \log p(y_j \mid x) + \tfrac1J \log p(x),

by Newton's method with a damping (Levenberg and Marquardt), from the place that the server sends.
It replies with the parabola at the place :math:`x_j` where it stops: the negative Hessian
:math:`A_j`, made positive, and :math:`b_j = A_j x_j + \nabla \ell_j(x_j)`. The server adds them up,
and the search goes on from the highest point of the sum,

.. math::
    x = \Big(\sum_j A_j\Big)^{-1} \sum_j b_j .

That is one-shot averaging of the silos' posteriors by their precisions, and where all are normal it
is the mode. Here it is only where the search begins. Steps of a silo cost no exchange. Silos of one
process climb side by side, so that a step of all of them is one call of the search's program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.search.expand import Expand, Expansion, Prior, SearchState
from numpyro_fed.search.mode_search import MAX_PROMISE_PER_DIM
from numpyro_fed.search.newton_steps import (
    DAMPING,
    MAX_DAMPING,
    MIN_EIGENVALUE,
    is_finite,
    slopes_off_saddles,
    where_at,
)
from numpyro_fed.text.sites import Rows

# Steps of a silo. From zero the six cities take 16. A Poisson rate that is far too high comes down
# by a factor of e in a step, and with raw covariates of 10^5 a search began at e^113.
MAX_STEPS = 150
# Predicted gain, in nats, at which a silo stops: the search goes on from there.
MIN_STEP_GAIN = 1e-2


class OwnModes(NamedTuple):
    """The places at which climbs of silos have ended, for each start.

    ``expansion``: The silo's share of the posterior there.
    ``log_likelihood`` (silos, starts): Its log likelihood.
    ``modes_of_rows``: Those of its latents, given the place.
    ``arrived`` (silos, starts) bool: Whether it is a mode, where another step promises little.
    """

    expansion: Expansion[np.ndarray]
    log_likelihood: np.ndarray
    modes_of_rows: Rows
    arrived: np.ndarray

    def parabolas(self) -> Parabola:
        """Return the messages, zeros of silos that came to no mode."""
        A = Curvature.of(self.expansion.curvature).positive(MIN_EIGENVALUE).matrix()
        b = (A @ self.expansion.x[..., None])[..., 0] + self.expansion.gradient
        where = self.arrived
        return Parabola(where_at(where, A, 0.0), where_at(where, b, 0.0), where.astype(A.dtype))


class Parabola(NamedTuple):
    """A silo's message: the negative Hessian (n, n), ``b`` (n,), and 1, for each start.

    All are zero where its climb came to no mode, so that the sum of the last counts silos.
    """

    A: np.ndarray
    b: np.ndarray
    arrived: np.ndarray


def climb_to_own_modes(
    expand: Expand,
    prior: Prior,
    prior_share: float,
    places: np.ndarray,
    state: SearchState,
    data: SiloData,
    *,
    fixed: int = 0,
) -> OwnModes:
    """Return where damped Newton climbs of silos end, from places (silos, starts, n).

    ``prior_share`` is a silo's of the ``prior``, which has no effects. The ``fixed`` first
    coordinates stay as they are.
    """
    shape, n = places.shape[:2], places.shape[-1]

    def expand_shares(
        places: np.ndarray, least: np.ndarray | float, state: SearchState
    ) -> tuple[Expansion[np.ndarray], np.ndarray, Rows]:
        """Return the silos' shares of the posterior, their log likelihoods, and the rows' modes."""
        # Modes move where the share is ``least`` or above.
        none = np.zeros((len(places) * shape[1], 0, 0), places.dtype)
        all_of_prior = prior(none, places.reshape(-1, n))
        of_prior = [prior_share * a.reshape(*shape, *a.shape[1:]) for a in all_of_prior[1:]]
        needed = (least - of_prior[0]).astype(places.dtype)
        up, modes = expand(places, needed, state, data)
        value, g, A = (a + b for a, b in zip(up, of_prior, strict=True))
        g[..., :fixed] = A[..., :fixed] = A[..., :fixed, :] = 0.0
        return Expansion(places, value, g, A), up.value, modes

    expansion, log_likelihood, z_L = expand_shares(places, -np.inf, state)
    damping, going = np.full(shape, DAMPING), np.ones(shape, bool)
    for _ in range(MAX_STEPS):
        curvature = Curvature.of(expansion.curvature)
        pull = slopes_off_saddles(curvature, expansion.gradient)
        step = pull / (np.abs(curvature.values) + damping[..., None])
        moved = expansion.x + curvature.across(step) * going[..., None]
        least = np.where(going, expansion.value, np.inf)
        trial, trial_log_likelihood, z_L = expand_shares(
            moved.astype(places.dtype), least, state._replace(z_L=z_L)
        )
        better = going & is_finite(trial) & (trial.value >= expansion.value)
        kept = (where_at(better, a, b) for a, b in zip(trial, expansion, strict=True))
        expansion = Expansion(*kept)
        log_likelihood = np.where(better, trial_log_likelihood, log_likelihood)
        damping = damping * np.where(better, 0.2, 10.0)
        going = going & (damping < MAX_DAMPING) & ((pull * step).sum(-1) > MIN_STEP_GAIN)
        if not going.any():
            break
    A = Curvature.of(expansion.curvature).positive(MIN_EIGENVALUE).matrix()
    promise = 0.5 * (expansion.gradient * Curvature.of(A).solve(expansion.gradient)).sum(-1)
    arrived = is_finite(expansion) & (promise <= MAX_PROMISE_PER_DIM * n)
    return OwnModes(expansion, log_likelihood, z_L, arrived)
