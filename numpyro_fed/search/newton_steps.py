"""Directions of Newton's method off saddles, at silos and at the server alike.

A silo that climbs to its own mode (:mod:`.own_modes`) and the search of all (:mod:`.newton`) take
damped steps along the eigenvectors of the curvature. What both need of a step is here, and of NumPy
arrays with leading axes (silos, starts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.search.expand import Expansion

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
