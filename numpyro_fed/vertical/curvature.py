"""Slopes and curvatures of a party's log density, and Newton steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.trees import AnyArray
from numpyro_fed.numerics.gaussian import Curvature

PLANE_STEPS = 10  # of Newton's method in the plane, at the server: two numbers, so they are cheap
PARALLEL = 1e-5  # relative Gram eigenvalue below which basis vectors count as dependent

Newton = tuple[Array, Array, Array]  # a point, its height and the damping
Function = Callable[[Array], Array]
LEAST = 1e-6  # least curvature of a direction, as a share of the largest


class NoModeError(Exception):
    """The signal that no start was found at which all numbers are finite."""


class PartyExpansion(NamedTuple):
    """A client's second-order expansion of the log density at a point."""

    slope: Array  # of rows, as the server sent it, and of the client's own part
    curvature: Array
    own_slope: Array  # of the client's own part
    own_hessian: Array

    @classmethod
    def at(
        cls, predict: Function, own_log_p: Function, z: Array, slope: Array, curvature: Array
    ) -> PartyExpansion:
        """Return the expansion at ``z`` (dim,), by the predictor's Jacobian (Gauss-Newton)."""
        # Forward mode: a client has fewer latents than rows.
        J = jax.jacfwd(predict)(z).reshape(slope.size, z.size)
        own_slope, own_hessian = jax.grad(own_log_p)(z), jax.hessian(own_log_p)(z)
        rows = J.T @ (jnp.ravel(curvature)[:, None] * J)
        return cls(J.T @ jnp.ravel(slope) + own_slope, rows - own_hessian, own_slope, own_hessian)


class Point(NamedTuple, Generic[AnyArray]):
    """The server's log density at a point of its latents and a sum, with its derivatives."""

    value: AnyArray
    total: AnyArray
    slope: AnyArray  # of the log likelihood with respect to the sum, of its shape
    curvature: AnyArray
    by_z: AnyArray  # (dim,) slope and (dim, dim) curvature in its own latents
    by_zz: AnyArray


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


def positive(curvatures: np.ndarray) -> np.ndarray:
    """Return absolute curvatures, at least eps, so that they can be divided by."""
    return np.maximum(np.abs(curvatures), np.finfo(curvatures.dtype).eps)


def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the inner products (n, m) of all pairs of ``a`` (n, ...) and ``b`` (m, ...)."""
    return a.reshape(len(a), -1) @ b.reshape(len(b), -1).T


def ritz_vectors(gram: np.ndarray, curvature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Ritz vectors of a basis, as combinations (width, width), and their curvatures.

    They are orthonormal, smallest curvature first. Columns beyond the rank of the basis are zero,
    with a curvature of one.
    """
    own = Curvature.of(gram)
    independent = own.values > PARALLEL * own.values.max()
    shrink = np.where(independent, 1 / np.sqrt(own.values), 0.0)
    whiten = own.vectors / own.unit[:, None] * shrink
    projected = whiten.T @ curvature @ whiten
    if not np.isfinite(projected).all():
        raise NoModeError
    # Dependent basis vectors get a curvature above all real ones, so that eigh sorts them last.
    last = 10 * (1 + np.abs(projected).max())
    projected = 0.5 * (projected + projected.T) + np.diag(np.where(independent, 0.0, last))
    curvatures, rotation = np.linalg.eigh(projected)
    combine, is_real = whiten @ rotation, curvatures < 0.9 * last
    # Rayleigh quotients: eigh's small eigenvalues have the rounding errors of the largest.
    size = np.where(is_real, ((gram @ combine) * combine).sum(0), 1.0)
    return combine, np.where(is_real, ((curvature @ combine) * combine).sum(0) / size, 1.0)


def maximise_in_plane(fn: Function) -> tuple[Array, Array]:
    """Return the maximum (2,) near zero of a function of two numbers, and the gain over zero.

    It is found by damped Newton steps, from the full Newton direction (1, 0) if that is better.
    """
    first = jnp.array([1.0, 0.0])

    def step(carry: Newton, _: None) -> tuple[Newton, None]:
        ab, value, damping = carry
        slope, hessian = jax.grad(fn)(ab), jax.hessian(fn)(ab)
        curvature = Curvature.of(-hessian)
        size = jnp.maximum(jnp.abs(curvature.values + damping), 1e-4)
        trial = ab + replace(curvature, values=size).solve(slope)
        trial_value = fn(trial)
        better = jnp.isfinite(trial_value) & (trial_value > value) & jnp.isfinite(trial).all()
        ab, value = jnp.where(better, trial, ab), jnp.where(better, trial_value, value)
        return (ab, value, jnp.where(better, 0.2 * damping, 5 * damping + 0.01)), None

    at_zero = fn(jnp.zeros(2))
    at_first = fn(first)
    usable = jnp.isfinite(at_first) & (at_first > at_zero)
    ab = jnp.where(usable, first, 0.0)
    value = jnp.where(usable, at_first, at_zero)
    (ab, value, _), _ = jax.lax.scan(step, (ab, value, jnp.array(0.0)), length=PLANE_STEPS)
    return ab, value - at_zero


def real(tree: object) -> Any:
    """Return numbers in the precision of this moment, in which they are sent and computed with."""
    dtype = jnp.result_type(float)

    def cast(a: ArrayLike) -> np.ndarray:
        return np.asarray(a, dtype if np.asarray(a).dtype.kind == "f" else None)

    return jax.tree.map(cast, tree)


def finite(tree: object) -> bool:
    """Return whether all numbers of a tree are finite."""
    return all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(tree))
