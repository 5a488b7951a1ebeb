"""Slopes and curvatures of a party's log density, Newton steps, and the messages of the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.trees import AnyArray
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.vertical.parties import PinnedLatents

PARALLEL = 1e-5  # relative Gram eigenvalue below which basis vectors count as dependent

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
        cls,
        density: Callable[[Array], tuple[Array, Array]],
        z: Array,
        slope: Array,
        curvature: Array,
    ) -> PartyExpansion:
        """Return the expansion at ``z`` (dim,), by the predictor's Jacobian (Gauss-Newton).

        ``density`` returns the predictor, and the client's own log density.
        """

        def own_log_p(z: Array) -> Array:
            return density(z)[1]

        # Forward mode: a client has fewer latents than rows.
        J = jax.jacfwd(lambda z: density(z)[0])(z).reshape(slope.size, z.size)
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


def newton_step(curvature: AnyArray, slope: AnyArray) -> AnyArray:
    """Return the Newton direction, uphill."""
    return Curvature.of(curvature).positive(LEAST).solve(slope)


def root_of(curvature: AnyArray) -> AnyArray:
    """Return a lower triangular root (dim, dim) of the inverse curvature."""
    return Curvature.of(curvature).positive(LEAST).root_of_inverse()


def diagonal_curvature(fn: Callable[[Array], Array], total: Array) -> Array:
    """Return minus the diagonal of the Hessian in the sum, at least zero, with the sum's shape.

    Rows must not interact: one product with the Hessian then gives a whole column of the sum.
    """
    columns = total.reshape(len(total), -1)
    slope = jax.grad(lambda columns: fn(columns.reshape(total.shape)))

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


def real(tree: object) -> Any:
    """Return numbers in the precision of this moment, in which they are sent and computed with."""
    kinds = {"f": jnp.result_type(float)}
    return jax.tree.map(lambda a: np.asarray(a, kinds.get(np.asarray(a).dtype.kind)), tree)


def finite(tree: object) -> bool:
    """Return whether all numbers of a tree are finite."""
    return all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(tree))


class PartySearch(NamedTuple, Generic[AnyArray]):
    """A party's state of the search: arrays of NumPy at the server, of JAX at a client."""

    theta: dict[str, Any]
    pinned: PinnedLatents
    z: AnyArray  # the best point so far
    direction: AnyArray  # with ``last`` it spans the plane of the next step
    last: AnyArray
    step: AnyArray  # leads to the point that is tried
    basis: AnyArray  # (dim, width) its rows of a basis for directions of all parties' latents
    directions: AnyArray  # the same in the latents' own units
    anchor: AnyArray  # (dim, rank) the first columns of the first basis


ServerSearch: TypeAlias = PartySearch[np.ndarray]
ClientSearch: TypeAlias = PartySearch[Array]


class Trial(NamedTuple, Generic[AnyArray]):
    """The point to try: coordinates in the plane (2,), and a step along the basis (width,)."""

    ab: AnyArray
    newton: AnyArray


def moved(state: PartySearch[AnyArray], trial: Trial[AnyArray]) -> PartySearch[AnyArray]:
    """Return the party with its own step (dim,) from the best point to the trial point."""
    plane = trial.ab[0] * state.direction + trial.ab[1] * state.last
    return state._replace(step=plane + state.directions @ trial.newton)


def accepted(state: PartySearch[AnyArray]) -> PartySearch[AnyArray]:
    """Return the party with the trial point as its best one."""
    return state._replace(z=state.z + state.step, last=state.step)


class TrialReply(NamedTuple, Generic[AnyArray]):
    """A client's message on a trial point: its predictor, and its own log density."""

    predictor: AnyArray
    log_p: AnyArray


class Slopes(NamedTuple, Generic[AnyArray]):
    """A message of the server: whether the trial was accepted, slope and curvature in the sum.

    Where the basis is improved, ``ritz`` has the findings on it (:class:`RitzValues`).
    """

    better: AnyArray  # () bool
    slope: AnyArray
    curvature: AnyArray
    ritz: Any = ()


class Along(NamedTuple, Generic[AnyArray]):
    """A client's message on some directions: the two of its plane, or those of its basis."""

    predictor: AnyArray  # (k, rows, ...) the change of its predictor along each
    slope: AnyArray  # (k,) of its own log density
    curvature: AnyArray  # (k, k)
    gram: Any = ()  # (k, k) products of its rows of a basis
    anchor: Any = ()  # (k, rank) those with its rows of the anchor


class RitzValues(NamedTuple, Generic[AnyArray]):
    """The server's findings on the basis, which it sends."""

    looks: AnyArray  # counts exchanges
    combine: AnyArray  # (width, width) combinations of the basis
    curvatures: AnyArray  # (width,) along these, smallest first
    # (width, rows, ...) minus the change of the slope with respect to the sum along each; empty if
    # the basis spans all directions
    pull: AnyArray


class BeginMessage(NamedTuple, Generic[AnyArray]):
    """A message of the server at the start of a run."""

    at_best: Slopes[AnyArray]
    combine: Any  # (width, rank) makes the shares in the shared noise of the basis
    tau: AnyArray


class JointCurvature(NamedTuple):
    """The server's findings on the basis, besides those that it sends (``ritz``)."""

    ritz: RitzValues[np.ndarray]
    turned: np.ndarray  # (dim, width) its own rows of the curvature times the directions
    newton: np.ndarray  # (width,) a step along them to try, whose gain is ``gain`` nats
    angles: np.ndarray  # (rank, rank) products of the best directions with the anchor
    gain: float
