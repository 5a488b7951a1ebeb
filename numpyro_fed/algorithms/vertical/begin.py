r"""Where a vertical run begins: the mode of all parties' latents, found without sharing columns.

Nonlinear conjugate gradients, preconditioned by each party's own Newton step. Every round has two
exchanges. In the first, clients move along the plane of their last two directions, by two numbers
that the server says, and send their predictors there and their own log densities, summed up; the
server accepts a point that is better. In the second the server sends slope and curvature of the log
likelihood with respect to the sum, :math:`r = \nabla_\eta \log p`,
:math:`h = -\mathrm{diag}\, \nabla_\eta^2 \log p`; client ``j`` with Jacobian :math:`J_j` has the
direction

.. math::
    d_j = \big(J_j' \mathrm{diag}(h) J_j - \nabla^2 \log p(\theta_j)\big)^{-1}
    \big(J_j' r + \nabla \log p(\theta_j)\big)

and sends how its predictor changes along it and along the last step. From these sums the server
finds the best point of the plane, which for linear predictors is exact. At the end the inverse of
that matrix is the covariance from which a client's guide begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Replies,
    Reply,
    Shared,
)
from numpyro_fed.algorithms.vertical.base import ClientState, ServerState, Vertical
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

PLANE_STEPS = 10  # of Newton's method in the plane, at the server
STILL = 1e-3, 1e-6  # nats that the plane promises, and share of the log density: the end
QUIET = 2  # such rounds in a row
LEAST = 1e-6  # of a curvature, relative


class Server(NamedTuple):
    """The server's part of the search.

    ``z`` is the best point so far, ``direction`` and ``last`` span the plane, ``ab`` is the place
    there to be tried; ``total``, ``slope`` and ``curvature`` are of the sum at the best point.
    """

    theta: dict[str, Any]
    z: Array
    direction: Array
    last: Array
    ab: Array
    better: Array
    value: Array
    total: Array
    slope: Array
    curvature: Array
    quiet: Array


class Client(NamedTuple):
    """A client's part: the best point, the plane, and the point that is being tried."""

    theta: dict[str, Any]
    z: Array
    direction: Array
    last: Array
    step: Array


class Tried(NamedTuple):
    """What a client sends of a point: its predictor and its own log density."""

    predictor: Array
    own: Array


class Told(NamedTuple):
    """What the server sends of the sum: whether the point was better, slope and curvature there."""

    better: Array
    slope: Array
    curvature: Array


class Along(NamedTuple):
    """What a client sends of its plane: how its predictor changes along both directions (2, rows,
    ...), slope (2,) and curvature (2, 2) of its own log density.
    """

    predictor: Array
    slope: Array
    curvature: Array


def search(v: Vertical, server_like: SiloData) -> FederatedAlgorithm:
    """Build the search."""
    model = v.model

    def init_server(key: Array) -> Server:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), server_like)
        half, sum_ = v.server.half, jnp.zeros(model.shape)
        z = jnp.zeros(half.dim)
        return Server(
            theta=half.init_theta(key, model.with_total(zeros, sum_)),
            z=z,
            direction=z,
            last=z,
            ab=jnp.zeros(2),
            better=jnp.array(True),
            value=jnp.array(-jnp.finfo(sum_.dtype).max),
            total=sum_,
            slope=sum_,
            curvature=sum_,
            quiet=jnp.zeros((), jnp.int32),
        )

    def init_client(key: Array, data: SiloData) -> Client:
        half = v.kind(data).half
        z = jnp.zeros(half.dim)
        return Client(half.init_theta(key, data), z, z, z, z)

    def place(noise: Any, state: Server, who: Array, server_data: Any) -> tuple[Array, Any]:
        return state.ab, ()

    def go(noise: Any, down: Array, state: Client, data: SiloData) -> tuple[Reply[Tried], Client]:
        step = down[0] * state.direction + down[1] * state.last
        tried = Tried(*model.predict(v.kind(data).half, state.theta, state.z + step, data))
        return Reply(tried, all_finite(tried)), state._replace(step=step)

    def judge(
        state: Server, memo: Any, replies: Replies[Tried], server_data: SiloData
    ) -> tuple[Server, Info]:
        total, step = replies.up.predictor, state.ab[0] * state.direction + state.ab[1] * state.last
        z = state.z + step

        def likelihood(total: Array) -> Array:
            return model.log_server(state.theta, z, total, server_data)[1]

        own, value = model.log_server(state.theta, z, total, server_data)
        value = own + value + replies.up.own
        slope = jax.grad(likelihood)(total)
        curvature = _diagonal(likelihood, total)
        fine = replies.ok & all_finite((value, slope, curvature))
        noise = 1e-6 * jnp.abs(state.value)
        better = fine & (value >= state.value - jnp.where(state.quiet > 0, noise, 0.0))
        tried = state._replace(
            z=z, last=step, value=value, total=total, slope=slope, curvature=curvature
        )
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), tried, state)
        return best._replace(better=better), Info(-best.value, jnp.array(True))

    def turn(noise: Any, down: Told, state: Client, data: SiloData) -> tuple[Reply[Along], Client]:
        moved = state._replace(z=state.z + state.step, last=state.step)
        state = jax.tree.map(lambda a, b: jnp.where(down.better, a, b), moved, state)

        predict, own = _functions(v, state, data)
        local = _Local.at(predict, own, state.z, down)
        plane = jnp.stack([local.newton(), state.last])
        along = jax.vmap(lambda d: jax.jvp(predict, (state.z,), (d,))[1])(plane)
        up = Along(along, plane @ local.own_slope, plane @ local.own_hessian @ plane.T)
        return Reply(up, all_finite(up)), state._replace(direction=plane[0])

    def aim(
        state: Server, memo: Any, replies: Replies[Along], server_data: SiloData
    ) -> tuple[Server, Info]:
        slope, curvature = _at_server(v, state, server_data)
        direction = _newton(curvature, slope)
        plane = jnp.stack([direction, state.last])

        def at(ab: Array) -> Array:
            z = state.z + ab @ plane
            total = state.total + jnp.tensordot(ab, replies.up.predictor, 1)
            own, likelihood = model.log_server(state.theta, z, total, server_data)
            own = own + ab @ replies.up.slope + 0.5 * ab @ replies.up.curvature @ ab
            return own + likelihood

        ab, gain = _best(at)
        # A step that made things worse is tried again, at a quarter, where it is not yet small.
        ab = jnp.where(state.better, ab, 0.25 * state.ab)
        still = (gain < STILL[0] + STILL[1] * jnp.abs(state.value)) & state.better
        quiet = jnp.where(still, state.quiet + 1, 0)
        after = state._replace(direction=direction, ab=ab, quiet=quiet)
        return after, Info(jnp.zeros(()), replies.ok & all_finite(ab))

    exchanges = (
        Exchange(place, go, judge, name="try"),
        Exchange(_tell, turn, aim, name="turn"),
    )
    return FederatedAlgorithm(
        init_server,
        init_client,
        exchanges,
        lambda state: Shared(state.theta, {}),
        lambda state: Private(state.theta, {}),
        done=lambda state: state.quiet >= QUIET,
    )


def beginning(v: Vertical) -> Exchange:
    """Build the exchange from the states of the search to those of a run."""

    def silo(
        noise: Any, down: Told, state: Client, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        predict, own = _functions(v, state, data)
        local = _Local.at(predict, own, state.z, down)
        centre = predict(state.z)
        after = v.client_at(noise, data, state.theta, state.z, local.root(), centre)
        return Reply((), all_finite(after)), after

    def server(
        state: Server, memo: Any, replies: Replies, server_data: SiloData
    ) -> tuple[ServerState, Info]:
        root = _root(_at_server(v, state, server_data)[1])
        after = v.server_at(memo, state.theta, state.z, root)
        return after, Info(-state.value, replies.ok & all_finite(after))

    def own_key(key: Array, *state: Any) -> Array:
        return key

    return Exchange(
        _tell, silo, server, name="begin at the mode", server_noise=own_key, silo_noise=own_key
    )


def _tell(noise: Any, state: Server, who: Array, server_data: Any) -> tuple[Told, Any]:
    return Told(state.better, state.slope, state.curvature), noise


def _functions(
    v: Vertical, state: Client, data: SiloData
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """A client's predictor and its own log density, as functions of its latents."""

    def at(z: Array) -> tuple[Array, Array]:
        return v.model.predict(v.kind(data).half, state.theta, z, data)

    return lambda z: at(z)[0], lambda z: at(z)[1]


def _at_server(v: Vertical, state: Server, data: SiloData) -> tuple[Array, Array]:
    """Slope and curvature of the log density with respect to the server's latents."""

    def joint(z: Array) -> Array:
        own, likelihood = v.model.log_server(state.theta, z, state.total, data)
        return own + likelihood

    if not v.server.half.dim:
        return jnp.zeros(0), jnp.zeros((0, 0))
    return jax.grad(joint)(state.z), -jax.hessian(joint)(state.z)


class _Local(NamedTuple):
    """A client's log density around a point, that of the rows with fixed slope and curvature."""

    slope: Array
    curvature: Array
    own_slope: Array
    own_hessian: Array

    @classmethod
    def at(cls, predict: Callable, own: Callable, z: Array, told: Told) -> _Local:
        """By a Jacobian, and derivatives of the own log density."""
        J = jax.jacfwd(predict)(z).reshape(told.slope.size, z.size)
        own_slope, own_hessian = jax.grad(own)(z), jax.hessian(own)(z)
        rows = J.T @ (jnp.ravel(told.curvature)[:, None] * J)
        slope = J.T @ jnp.ravel(told.slope) + own_slope
        return cls(slope, rows - own_hessian, own_slope, own_hessian)

    def newton(self) -> Array:
        """The Newton direction, uphill."""
        return _newton(self.curvature, self.slope)

    def root(self) -> Array:
        """A Cholesky factor of the inverse curvature."""
        return _root(self.curvature)


def _spectrum(curvature: Array) -> tuple[Array, Array, Array]:
    """Scales (dim,), eigenvalues and vectors of a curvature in these scales, made positive."""
    diagonal = jnp.abs(jnp.diagonal(curvature))
    scale = jax.lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1.0))
    values, vectors = jnp.linalg.eigh(curvature * scale * scale[:, None])
    least = LEAST * jnp.maximum(jnp.abs(values).max(initial=0.0), 1.0)
    return scale, jnp.maximum(jnp.abs(values), least), vectors


def _newton(curvature: Array, slope: Array) -> Array:
    scale, values, vectors = _spectrum(curvature)
    return scale * (vectors @ ((vectors.T @ (scale * slope)) / values))


def _root(curvature: Array) -> Array:
    """A lower triangular root of the inverse."""
    scale, values, vectors = _spectrum(curvature)
    half = (scale[:, None] * vectors) * jax.lax.rsqrt(values)
    R = jnp.linalg.qr(half.T, mode="r").T
    return R * jnp.where(jnp.diagonal(R) < 0, -1.0, 1.0)


def _diagonal(fn: Any, total: Array) -> Array:
    """Minus the diagonal of the Hessian, none of it negative, for rows that stand alone."""
    columns = total.reshape(len(total), -1)

    def slope(columns: Array) -> Array:
        return jax.grad(fn)(columns.reshape(total.shape)).reshape(columns.shape)

    def one(k: Array) -> Array:
        tangent = jnp.zeros_like(columns).at[:, k].set(1.0)
        return jax.jvp(slope, (columns,), (tangent,))[1][:, k]

    found = jax.lax.map(one, jnp.arange(columns.shape[1]))
    return jnp.maximum(-found.T.reshape(total.shape), 0.0)


def _best(fn: Any) -> tuple[Array, Array]:
    """The highest of a function of two numbers near zero, by damped Newton steps, and its gain."""
    first = jnp.array([1.0, 0.0])

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        ab, value, damping = carry
        slope, hessian = jax.grad(fn)(ab), jax.hessian(fn)(ab)
        size = jnp.abs(jnp.diagonal(hessian)) + jnp.finfo(ab.dtype).tiny
        scale = jax.lax.rsqrt(size)
        A = -hessian * scale * scale[:, None] + damping * jnp.eye(2)
        values, vectors = jnp.linalg.eigh(A)
        inverse = (vectors / jnp.maximum(jnp.abs(values), 1e-4)) @ vectors.T
        trial = ab + scale * (inverse @ (scale * slope))
        found = fn(trial)
        better = jnp.isfinite(found) & (found > value) & jnp.isfinite(trial).all()
        ab, value = jnp.where(better, trial, ab), jnp.where(better, found, value)
        return (ab, value, jnp.where(better, 0.2 * damping, 5 * damping + 0.01)), None

    start = fn(jnp.zeros(2))
    at_first = fn(first)
    usable = jnp.isfinite(at_first) & (at_first > start)
    ab = jnp.where(usable, first, 0.0)
    value = jnp.where(usable, at_first, start)
    (ab, value, _), _ = jax.lax.scan(step, (ab, value, jnp.array(0.0)), length=PLANE_STEPS)
    return ab, value - start
