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
from numpy.typing import ArrayLike

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.search.expand import Expand, Expansion, Prior, SearchState
from numpyro_fed.text.sites import Rows

# Steps of a silo. From zero the six cities take 16. A Poisson rate that is far too high comes down
# by a factor of e in a step, and with raw covariates of 10^5 a search began at e^113.
MAX_STEPS = 150
MIN_GAIN = 1e-2  # predicted gain, in nats, at which a silo stops: the search goes on from there
# Nats for each coordinate that another step may promise where a climb has ended; with more it ended
# somewhere else than at a mode, and its parabola says nothing about the sum's.
MAX_GAIN = 0.5
DAMPING = 1e-2  # at the start, for curvatures scaled to one
MAX_DAMPING = 1e8  # steps are then too small to be worth trying
# Least eigenvalue of a parabola, of the largest: a direction that a silo knows nothing about still
# has the prior's share, and one that its own rows leave flat must not draw the sum far away.
MIN_EIGENVALUE = 1e-6
# The least length of a step along a direction in which the density curves upwards, in sds as if it
# curved downwards as much: from a symmetric point, as equal means of two clusters, a gradient alone
# leads away too slowly. It gains 4 nats, which rounding of a log density of 10^6 does not hide.
KICK = 3.0
LEAST_PROMISE = 1.0  # nats by the gradient alone, below which a point may be a saddle
UPWARDS = 0.1  # of a coordinate's curvature: in a valley along which little changes signs are noise


class OwnModes(NamedTuple):
    """The places at which climbs of silos have ended, for each start.

    ``place``: The silo's share of the posterior there.
    ``likelihood`` (silos, starts): Its log likelihood.
    ``modes_of_rows``: Those of its latents, given the place.
    ``arrived`` (silos, starts) bool: Whether it is a mode, where another step promises little.
    """

    place: Expansion[np.ndarray]
    likelihood: np.ndarray
    modes_of_rows: Rows
    arrived: np.ndarray

    def parabolas(self) -> Parabola:
        """Return the messages, zeros of silos that came to no mode."""
        A = Curvature.of(self.place.curvature).positive(MIN_EIGENVALUE).matrix()
        b = (A @ self.place.x[..., None])[..., 0] + self.place.gradient
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
    share: float,
    places: np.ndarray,
    state: SearchState,
    data: SiloData,
    *,
    fixed: int = 0,
) -> OwnModes:
    """Return where damped Newton climbs of silos end, from places (silos, starts, n).

    ``share`` is a silo's of the ``prior``, which has no effects. The ``fixed`` first coordinates
    stay as they are.
    """
    side, n = places.shape[:2], places.shape[-1]

    def at(
        places: np.ndarray, least: np.ndarray | float, state: SearchState
    ) -> tuple[Expansion[np.ndarray], np.ndarray, Rows]:
        """Return the silos' shares of the posterior, their log likelihoods, and the rows' modes."""
        # Modes move where the share is ``least`` or above.
        none = np.zeros((len(places) * side[1], 0, 0), places.dtype)
        all_of_prior = prior(none, places.reshape(-1, n))
        of_prior = [share * a.reshape(*side, *a.shape[1:]) for a in all_of_prior[1:]]
        needed = (least - of_prior[0]).astype(places.dtype)
        up, modes = expand(places, needed, state, data)
        value, g, A = (a + b for a, b in zip(up, of_prior, strict=True))
        g[..., :fixed] = A[..., :fixed] = A[..., :fixed, :] = 0.0
        return Expansion(places, value, g, A), up.value, modes

    place, likelihood, z_L = at(places, -np.inf, state)
    damping, going = np.full(side, DAMPING), np.ones(side, bool)
    for _ in range(MAX_STEPS):
        curvature = Curvature.of(place.curvature)
        pull = slopes_off_saddles(curvature, place.gradient)
        u = pull / (np.abs(curvature.values) + damping[..., None])
        moved = place.x + curvature.across(u) * going[..., None]
        least = np.where(going, place.value, np.inf)
        trial, of_rows, z_L = at(moved.astype(places.dtype), least, state._replace(z_L=z_L))
        better = going & _finite(trial) & (trial.value >= place.value)
        place = Expansion(*(where_at(better, a, b) for a, b in zip(trial, place, strict=True)))
        likelihood = np.where(better, of_rows, likelihood)
        damping = damping * np.where(better, 0.2, 10.0)
        going = going & (damping < MAX_DAMPING) & ((pull * u).sum(-1) > MIN_GAIN)
        if not going.any():
            break
    A = Curvature.of(place.curvature).positive(MIN_EIGENVALUE).matrix()
    promise = 0.5 * (place.gradient * Curvature.of(A).solve(place.gradient)).sum(-1)
    return OwnModes(place, likelihood, z_L, _finite(place) & (promise <= MAX_GAIN * n))


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
    side = np.where(np.abs(slope) < least, fixed, slope)
    return np.where(side < 0, -1.0, 1.0) * np.maximum(np.abs(slope), least)


def _finite(place: Expansion[np.ndarray]) -> np.ndarray:
    """Return whether all numbers of expansions (silos, starts, ...) are finite."""
    flat = [np.isfinite(a).reshape(*place.value.shape, -1).all(-1) for a in place]
    return np.asarray(np.logical_and.reduce(flat))


def where_at(condition: np.ndarray, one: ArrayLike, other: ArrayLike) -> np.ndarray:
    """Return one or the other array (silos, starts, ...) by a condition (silos, starts)."""
    return np.where(condition.reshape(*condition.shape, *[1] * (np.ndim(one) - 2)), one, other)
