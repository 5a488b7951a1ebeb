"""Steps of Newton's method that leave a saddle, where the gradient alone would take long."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

# The least length of a step along a direction in which the density curves upwards, in sds as if it
# curved downwards as much: from a symmetric point, as equal means of two clusters, a gradient alone
# leads away too slowly. It gains 4 nats, which rounding of a log density of 10^6 does not hide.
KICK = 3.0
LEAST_PROMISE = 1.0  # nats by the gradient alone, below which a point may be a saddle
UPWARDS = 0.1  # of a coordinate's curvature: in a valley along which little changes signs are noise


def kicked(values: Array, V: Array, gradient: Array) -> Array:
    """Return the slopes (n,) along eigenvectors, lengthened at a saddle in upward directions.

    It is a saddle where the gradient alone promises less than :data:`LEAST_PROMISE`, and directions
    are upward along which the density clearly curves upwards. Curvature, with eigenvalues
    ``values`` (n,) and eigenvectors ``V`` (n, n), and gradient (n,) are scaled.
    """
    slope = V.T @ gradient
    at_rest = 0.5 * (slope**2 / jnp.maximum(jnp.abs(values), UPWARDS)).sum() < LEAST_PROMISE
    least = jnp.where((values < -UPWARDS) & at_rest, KICK * jnp.sqrt(jnp.abs(values)), 0.0)
    # The sign of a slope near zero is rounding's. That of a fixed vector is the same at all silos.
    side = jnp.where(jnp.abs(slope) < least, V.T @ (1.0 + jnp.arange(len(values))), slope)
    return jnp.where(side < 0, -1.0, 1.0) * jnp.maximum(jnp.abs(slope), least)
