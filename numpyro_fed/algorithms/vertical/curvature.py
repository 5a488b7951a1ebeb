"""Slopes and curvatures of a party's log density, and Newton steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.gaussian import Curvature
from numpyro_fed.trees import AnyArray

Function = Callable[[Array], Array]
LEAST = 1e-6  # least curvature of a direction, as a share of the largest


class Local(NamedTuple):
    """A client's second-order expansion of the log density at a point.

    The rows' part has the slope and curvature that the server sent. ``own_slope`` and
    ``own_hessian`` are those of the client's own part.
    """

    slope: Array
    curvature: Array
    own_slope: Array
    own_hessian: Array

    @classmethod
    def at(
        cls, predict: Function, own_log_p: Function, z: Array, slope: Array, curvature: Array
    ) -> Local:
        """Return the expansion at ``z`` (dim,), by the predictor's Jacobian (Gauss-Newton)."""
        # Forward mode: a client has fewer latents than rows.
        J = jax.jacfwd(predict)(z).reshape(slope.size, z.size)
        own_slope, own_hessian = jax.grad(own_log_p)(z), jax.hessian(own_log_p)(z)
        rows = J.T @ (jnp.ravel(curvature)[:, None] * J)
        return cls(J.T @ jnp.ravel(slope) + own_slope, rows - own_hessian, own_slope, own_hessian)

    def newton(self) -> Array:
        """Return the Newton direction, uphill."""
        return newton_step(self.curvature, self.slope)

    def root(self) -> Array:
        """Return a Cholesky factor of the inverse curvature."""
        return root_of(self.curvature)


def at_point(log_density: Function, z: Array) -> tuple[Array, Array]:
    """Return slope (dim,) and curvature (dim, dim) of a log density at a point."""
    if not z.size:
        return jnp.zeros(0), jnp.zeros((0, 0))
    return jax.grad(log_density)(z), -jax.hessian(log_density)(z)


def newton_step(curvature: AnyArray, slope: AnyArray) -> AnyArray:
    """Return the Newton direction, uphill."""
    return Curvature.of(curvature).positive(LEAST).solve(slope)


def root_of(curvature: AnyArray) -> AnyArray:
    """Return a lower triangular root (dim, dim) of the inverse curvature."""
    return Curvature.of(curvature).positive(LEAST).root_of_inverse()


def diagonal_curvature(fn: Function, total: Array) -> Array:
    """Return minus the diagonal of the Hessian in the sum, at least zero, with the sum's shape.

    Rows must not interact: one product with the Hessian then gives a whole column of the sum.
    """
    columns = total.reshape(len(total), -1)

    def slope(columns: Array) -> Array:
        return jax.grad(fn)(columns.reshape(total.shape)).reshape(columns.shape)

    def diagonal_column(k: Array) -> Array:
        tangent = jnp.zeros_like(columns).at[:, k].set(1.0)
        return jax.jvp(slope, (columns,), (tangent,))[1][:, k]

    found = jax.lax.map(diagonal_column, jnp.arange(columns.shape[1]))
    return jnp.maximum(-found.T.reshape(total.shape), 0.0)
