r"""The search for the mode of all parties' latents, without sharing columns.

It is a nonlinear conjugate gradient method, preconditioned by each party's own Newton step. Every
round has two exchanges.

1. The server sends two numbers, a point in the plane of the last two directions. Clients reply with
   their predictors and own log densities at the point, which are added up. The server accepts the
   point if it is better.
2. The server sends slope and curvature of the log likelihood with respect to the sum,
   :math:`r = \nabla_\eta \log p` and :math:`h = -\mathrm{diag}\, \nabla_\eta^2 \log p`. Client
   ``j`` with Jacobian :math:`J_j` computes the direction

.. math::
    d_j = \big(J_j' \mathrm{diag}(h) J_j - \nabla^2 \log p(\theta_j)\big)^{-1}
    \big(J_j' r + \nabla \log p(\theta_j)\big)

and replies with the changes of its predictor along it and along the last step. From the sums of
these the server finds the best point of the plane, which is exact for linear predictors. At the end
the inverse of that matrix is the covariance with which a client's guide starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Replies,
    Reply,
    Round,
    Shared,
)
from numpyro_fed.algorithms.vertical.base import PinnedLatents, Vertical
from numpyro_fed.algorithms.vertical.curvature import (
    Function,
    Local,
    at_point,
    diagonal_curvature,
    newton_step,
)
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Curvature
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite, where

PLANE_STEPS = 10  # of Newton's method in the plane, at the server: two numbers, so they are cheap
MIN_GAIN = 1e-3, 1e-6  # nats that the plane promises, and share of the log density: the end
QUIET_ROUNDS = 2  # such rounds in a row

Newton = tuple[Array, Array, Array]  # a point, its height and the damping


class Basis(NamedTuple):
    """A party's rows of a basis for directions of all parties' latents.

    ``rows`` is (dim, width). ``directions`` (dim, width) are the same in the latents' own units.
    ``anchor`` (dim, rank) has the first columns of the first basis, and never changes.
    """

    rows: Array
    directions: Array
    anchor: Array

    @classmethod
    def random(cls, key: Array, dim: int, v: Vertical) -> Basis:
        """Return a random first basis."""
        rows = jax.random.normal(key, (dim, v.width))
        return cls(rows, jnp.zeros_like(rows), rows[:, : v.rank])


class Spread(NamedTuple):
    """The server's findings on the basis, besides those that it sends (``ritz``).

    ``turned`` (dim, width) are its own rows of the curvature times the directions, ``newton``
    (width,) is a step along them to try, and ``angles`` (rank, rank) are products of the best
    directions with the anchor.
    """

    ritz: RitzValues
    turned: Array
    newton: Array
    angles: Array


class Server(NamedTuple):
    """The server's state of the search.

    ``z`` is the best point so far. ``direction`` and ``last`` span the plane, and ``ab`` is the
    point in it that is tried next. ``total`` is the sum of all predictors at the best point;
    ``slope`` and ``curvature`` are those of the log likelihood with respect to it. Before the
    search the curvature is that of an auxiliary variable. ``pinned`` says where latents above
    others stay.
    """

    theta: dict[str, Any]
    pinned: PinnedLatents
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
    basis: Basis
    spread: Spread


class RitzValues(NamedTuple):
    """The server's findings on the basis, which it sends.

    ``looks`` counts exchanges. ``combine`` (width, width) has the combinations of the basis, and
    ``curvatures`` (width,) the curvatures along them, smallest first. ``pull`` (width, rows, ...)
    is minus the change of the slope with respect to the sum along each; it is empty if the basis
    spans all directions. ``gain`` is the predicted gain of a Newton step along them, in nats.
    """

    looks: Array
    combine: Array
    curvatures: Array
    pull: Array
    gain: Array


class Client(NamedTuple):
    """A client's state of the search: the best point, the plane, the trial step and the basis."""

    theta: dict[str, Any]
    pinned: PinnedLatents
    z: Array
    direction: Array
    last: Array
    step: Array
    basis: Basis


class TrialPoint(NamedTuple):
    """The point to try: coordinates in the plane (2,), and a step along the basis (width,)."""

    ab: Array
    newton: Array


class Tried(NamedTuple):
    """A client's message on a trial point: its predictor, and its own log density."""

    predictor: Array
    own: Array


class SlopeMessage(NamedTuple):
    """A message of the server: whether the trial was accepted, slope and curvature in the sum."""

    better: Array
    slope: Array
    curvature: Array


class Along(NamedTuple):
    """A client's message on its plane.

    ``predictor`` (2, rows, ...) is the change of its predictor along both directions; ``slope``
    (2,) and ``curvature`` (2, 2) are those of its own log density.
    """

    predictor: Array
    slope: Array
    curvature: Array


@dataclass(frozen=True, eq=False)
class VerticalSearch:
    """The search as pure functions.

    Attributes
    ----------
    vertical : Vertical
    server_like : SiloData
        Shapes of the server's data.
    """

    vertical: Vertical
    server_like: SiloData

    def algorithm(self) -> FederatedAlgorithm[Server, Client]:
        """Return the search as pure functions."""
        exchanges = (
            Exchange("try", self.try_point, lenient=True),
            Exchange("turn", self.find_direction),
        )
        return FederatedAlgorithm(
            self.init_server,
            self.init_client,
            Round(exchanges, self.round),
            lambda state: Shared(state.theta, {}, identity(state.z.shape)),
            lambda state: Private(state.theta, {}),
            done=lambda state: state.quiet >= QUIET_ROUNDS,
            server_like=self.server_like,
        )

    def init_server(self, key: Array) -> Server:
        v, model = self.vertical, self.vertical.model
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.server_like)
        party_model, sum_ = v.server.model, jnp.zeros(model.shape)
        given, zeros_z = model.with_total(zeros, sum_), jnp.zeros(party_model.dim)
        key_pin, key_theta, key_basis = jax.random.split(key, 3)
        pinned = v.server.pin(key_pin, given)
        ritz = RitzValues(
            looks=jnp.zeros((), jnp.int32),
            combine=jnp.eye(v.width),
            curvatures=jnp.ones(v.width),
            pull=jnp.zeros((0 if v.complete else v.width, *model.shape)),
            gain=jnp.zeros(()),
        )
        return Server(
            theta=party_model.init_theta(key_theta, given),
            pinned=pinned,
            z=pinned.place,
            direction=zeros_z,
            last=zeros_z,
            ab=jnp.zeros(2),
            better=jnp.array(True),
            # Any first point is better. Minus infinity would make differences of values NaN.
            value=jnp.array(-jnp.finfo(sum_.dtype).max),
            total=sum_,
            slope=sum_,
            curvature=jnp.full(model.shape, 0.0 if v.rho is None else v.rho**-2),
            quiet=jnp.zeros((), jnp.int32),
            basis=Basis.random(key_basis, party_model.dim, v),
            spread=Spread(
                ritz,
                turned=jnp.zeros((party_model.dim, v.width)),
                newton=jnp.zeros(v.width),
                angles=jnp.eye(v.rank),
            ),
        )

    def init_client(self, key: Array, data: SiloData) -> Client:
        v, kind = self.vertical, self.vertical.kind(data)
        key_pin, key_theta, key_basis = jax.random.split(key, 3)
        party_model, pinned, zeros_z = (
            kind.model,
            kind.pin(key_pin, data),
            jnp.zeros(kind.model.dim),
        )
        return Client(
            theta=party_model.init_theta(key_theta, data),
            pinned=pinned,
            z=pinned.place,
            direction=zeros_z,
            last=zeros_z,
            step=zeros_z,
            basis=Basis.random(key_basis, party_model.dim, v),
        )

    def try_point(
        self, noise: object, down: TrialPoint, state: Client, data: SiloData
    ) -> tuple[Reply[Tried], Client]:
        step = step_of(down, state)
        tried = Tried(*client_density(self.vertical, state, data)(state.z + step))
        return Reply(tried, all_finite(tried)), state._replace(step=step)

    def accept_or_reject(self, state: Server, replies: Replies[Tried], data: SiloData) -> Server:
        """Return the state after a trial: its best point is the better one of both."""
        total, step = replies.up.predictor, step_of(trial_point(state), state)
        z = state.z + step

        def log_p(total: Array) -> Array:
            return server_density(self.vertical, state, data)(z, total)

        value = log_p(total) + replies.up.own
        slope, curvature = jax.grad(log_p)(total), diagonal_curvature(log_p, total)
        finite = replies.ok & all_finite((value, slope, curvature))
        rounding = 1e-6 * jnp.abs(state.value)
        better = finite & (value >= state.value - jnp.where(state.quiet > 0, rounding, 0.0))
        tried = state._replace(
            z=z, last=step, value=value, total=total, slope=slope, curvature=curvature
        )
        best = where(better, tried, state)
        spread = best.spread._replace(newton=jnp.zeros_like(state.spread.newton))
        return best._replace(better=better, spread=spread)

    def find_direction(
        self, noise: object, down: SlopeMessage, state: Client, data: SiloData
    ) -> tuple[Reply[Along], Client]:
        moved = state._replace(z=state.z + state.step, last=state.step)
        state = where(down.better, moved, state)

        predict, own_log_p = client_functions(self.vertical, state, data)
        local = Local.at(predict, own_log_p, state.z, down.slope, down.curvature)
        plane = jnp.stack([local.newton(), state.last])
        along = jax.vmap(lambda d: jax.jvp(predict, (state.z,), (d,))[1])(plane)
        up = Along(along, plane @ local.own_slope, plane @ local.own_hessian @ plane.T)
        return Reply(up, all_finite(up)), state._replace(direction=plane[0])

    def plan_step(self, state: Server, up: Along, data: SiloData) -> Server:
        """Return the state with the next point in the plane."""
        log_p = server_density(self.vertical, state, data)
        slope, curvature = at_point(lambda z: log_p(z, state.total), state.z)
        direction = newton_step(curvature, slope)
        plane = jnp.stack([direction, state.last])

        def log_p_at(ab: Array) -> Array:
            total = state.total + jnp.tensordot(ab, up.predictor, 1)
            own_log_p = ab @ up.slope + 0.5 * ab @ up.curvature @ ab
            return log_p(state.z + ab @ plane, total) + own_log_p

        ab, gain = _maximise_in_plane(log_p_at)
        # After a step that was rejected, a quarter of it is tried: the quadratic model of the plane
        # was wrong there, and would give the same point again.
        ab = jnp.where(state.better, ab, 0.25 * state.ab)
        no_gain = (gain < MIN_GAIN[0] + MIN_GAIN[1] * jnp.abs(state.value)) & state.better
        quiet = jnp.where(no_gain, state.quiet + 1, 0)
        return state._replace(direction=direction, ab=ab, quiet=quiet)

    def round(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        tried = ask("try", trial_point(state))
        best = self.accept_or_reject(state, tried, ask.server_data)
        along: Along = ask("turn", slope_message(best)).up
        after = self.plan_step(best, along, ask.server_data)
        return after, Info(-best.value, all_finite(after.ab))


def trial_point(state: Server) -> TrialPoint:
    """Return the point to be tried next."""
    return TrialPoint(state.ab, state.spread.newton)


def step_of(down: TrialPoint, state: Server | Client) -> Array:
    """Return a party's own step (dim,) from the best point to the trial point."""
    plane = down.ab[0] * state.direction + down.ab[1] * state.last
    return plane + state.basis.directions @ down.newton


def client_density(
    v: Vertical, state: Client, data: SiloData
) -> Callable[[Array], tuple[Array, Array]]:
    """Return a client's predictor and its own log density, as a function of its latents."""
    kind = v.kind(data)

    def density_at(z: Array) -> tuple[Array, Array]:
        point, log_pinned = kind.below(z, state.pinned)
        g, own_log_p = v.model.predict(kind.model, state.theta, point, data)
        return g, own_log_p + log_pinned

    return density_at


def client_functions(v: Vertical, state: Client, data: SiloData) -> tuple[Function, Function]:
    """Return a client's predictor, and its own log density, as two functions of its latents."""
    density = client_density(v, state, data)
    return lambda z: density(z)[0], lambda z: density(z)[1]


def server_density(v: Vertical, state: Server, data: SiloData) -> Callable[[Array, Array], Array]:
    """Return the server's log density, as a function of its latents and the sum."""

    def density_at(z: Array, total: Array) -> Array:
        point, log_pinned = v.server.below(z, state.pinned)
        own_log_p, likelihood = v.model.log_server(state.theta, point, total, data)
        return own_log_p + likelihood + log_pinned

    return density_at


def slope_message(state: Server) -> SlopeMessage:
    """Return the server's message on its best point."""
    return SlopeMessage(state.better, state.slope, state.curvature)


def _maximise_in_plane(fn: Function) -> tuple[Array, Array]:
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
