"""Steps of Newton's method that leave a saddle, where the gradient alone would take long."""

from __future__ import annotations

import numpy as np

from numpyro_fed.gaussian import Curvature

# The least length of a step along a direction in which the density curves upwards, in sds as if it
# curved downwards as much: from a symmetric point, as equal means of two clusters, a gradient alone
# leads away too slowly. It gains 4 nats, which rounding of a log density of 10^6 does not hide.
KICK = 3.0
LEAST_PROMISE = 1.0  # nats by the gradient alone, below which a point may be a saddle
UPWARDS = 0.1  # of a coordinate's curvature: in a valley along which little changes signs are noise


def kicked(curvature: Curvature[np.ndarray], gradient: np.ndarray) -> np.ndarray:
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
