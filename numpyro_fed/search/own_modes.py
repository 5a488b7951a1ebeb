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

What these steps have in common with those of the search itself (:mod:`.newton`) is at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.search.expand import Expand, Expansion, Prior, SearchState
from numpyro_fed.search.mode_search import MAX_PROMISE_PER_DIM
from numpyro_fed.text.site_table import Rows

# Steps of a silo. From zero the six cities take 16. A Poisson rate that is far too high comes down
# by a factor of e in a step, and with raw covariates of 10^5 a search began at e^113.
MAX_STEPS = 150
# Predicted gain, in nats, at which a silo stops: the search goes on from there.
MIN_STEP_GAIN = 1e-2
DAMPING = 1e-2  # at the start, for curvatures scaled to one: almost a full Newton step
MAX_DAMPING = 1e8  # steps are 1e-8 of a unit: rounding decides whether they gain
# Least eigenvalue of a parabola, of the largest: a direction that a silo knows nothing about still
# has the prior's share, and one that its own rows leave flat must not draw the sum far away.
MIN_EIGENVALUE = 1e-6
# The least length of a step along a direction in which the density curves upwards, in sds as if it
# curved downwards as much: from a symmetric point, as equal means of two clusters, a gradient alone
# leads away too slowly. It gains 4 nats, which rounding of a log density of 10^6 does not hide.
KICK = 3.0
LEAST_PROMISE = 1.0  # nats by the gradient alone, below which a point may be a saddle
UPWARDS = 0.1  # of a coordinate's curvature: in a valley along which little changes signs are noise


class AtOwnModes(NamedTuple):
    """A silo's message: the negative Hessian (n, n), ``b`` (n,), and 1, for each start.

    All are zero where its climb came to no mode, at which another step promises little, so that the
    sum of the last counts silos.
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
) -> tuple[AtOwnModes, np.ndarray, Rows]:
    """Return what silos say where their damped Newton climbs from places (silos, starts, n) end.

    With it come their log likelihoods there (silos, starts), and the modes of their rows.
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
    b = (A @ expansion.x[..., None])[..., 0] + expansion.gradient
    told = where_at(arrived, A, 0.0), where_at(arrived, b, 0.0), arrived.astype(A.dtype)
    return AtOwnModes(*told), log_likelihood, z_L


def slopes_off_saddles(curvature: Curvature[np.ndarray], gradient: np.ndarray) -> np.ndarray:
    """Return the slopes (..., n) along eigenvectors, lengthened at a saddle in upward directions.

    It is a saddle where the gradient (..., n) alone promises less than :data:`LEAST_PROMISE`, and
    directions are upward along which the density clearly curves upwards.
    """
    values, slope = curvature.values, curvature.along(gradient)
    size = np.maximum(np.abs(values), UPWARDS)
    at_rest = 0.5 * (slope**2 / size).sum(-1, keepdims=True) < LEAST_PROMISE
    least = np.where((values < -UPWARDS) & at_rest, KICK * np.sqrt(np.abs(values)), 0.0)
    # The sign of a slope near zero is rounding's. That of a fixed vector is the same at all silos.
    fixed = (1.0 + np.arange(values.shape[-1])) @ curvature.vectors
    sign = np.where(np.abs(slope) < least, fixed, slope)
    return np.where(sign < 0, -1.0, 1.0) * np.maximum(np.abs(slope), least)


def is_finite(expansion: Expansion[np.ndarray]) -> np.ndarray:
    """Return whether all numbers of expansions (silos, starts, ...) are finite."""
    flat = [np.isfinite(a).reshape(*expansion.value.shape, -1).all(-1) for a in expansion]
    return np.asarray(np.logical_and.reduce(flat))


def where_at(condition: np.ndarray, one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """Return one or the other array (silos, starts, ...) by a condition (silos, starts)."""
    return np.where(condition.reshape(*condition.shape, *[1] * (np.ndim(one) - 2)), one, other)
