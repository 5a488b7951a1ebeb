r"""The start of a vertical run: the mode of all parties' latents, and how parties depend there.

The search for the mode is a nonlinear conjugate gradient method, preconditioned by each party's own
Newton step. It needs no columns of others (:meth:`VerticalSearch.climb`).

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

In coordinates in which each party's own curvature is one, the curvature of the joint density is

.. math::
    P = \sum_p T_p' (-\nabla^2 \log p_p) T_p
    + \Big(\sum_p J_p T_p\Big)' \mathrm{diag}(h) \Big(\sum_p J_p T_p\Big),

with ``T_p`` a root of the party's own covariance. Along directions of small curvature, changes of
one party are compensated by others. They are found by a locally optimal block method (Knyazev
2001), and a Newton step along them leads on (:meth:`VerticalSearch.look_along_basis`):

1. every party holds its rows of a random basis, and sends the change of its predictor along each
   basis vector; the server receives the sum over parties;
2. the server solves the small eigenvalue problem, and sends the combinations of the basis;
3. where the basis does not span all directions, residuals become its other half. For these the
   server sends the change of the likelihood's slope along each direction. A client can infer from
   it which columns the others' predictors span.

With eigenvalues :math:`\lambda` and eigenvectors ``U``, the joint covariance is
:math:`\tau T (I + V V') T'` with :math:`V = U\, \mathrm{diag}(\sqrt{1 / (\tau \lambda) - 1})`.
``tau`` is one over the largest eigenvalue if all are known, and one otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import compiled_method, jit_once
from numpyro_fed.basics.trees import AnyArray, all_finite, namespace, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature, Gaussian, identity
from numpyro_fed.rounds.exchange import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Round,
    Visit,
    key_as_noise,
)
from numpyro_fed.rounds.names import BEGIN_AT_MODE, BEGIN_AT_ZERO, SPREAD, TRY, TURN
from numpyro_fed.rounds.stacks import StackedExchange, stacked_visit
from numpyro_fed.rounds.states import Private, Shared
from numpyro_fed.search.expand import shape
from numpyro_fed.text.vertical import init_theta
from numpyro_fed.vertical.algorithm import VFLAlgorithm
from numpyro_fed.vertical.curvature import (
    Along,
    BeginMessage,
    ClientSearch,
    JointCurvature,
    NoModeError,
    PartyExpansion,
    PartySearch,
    Point,
    RitzValues,
    ServerSearch,
    Slopes,
    Trial,
    TrialReply,
    accepted,
    diagonal_curvature,
    finite,
    moved,
    newton_step,
    positive,
    products,
    real,
    ritz_vectors,
    root_of,
)
from numpyro_fed.vertical.parties import ClientState, PartyParams, PartyType, ServerState

# Rounds of a cycle of the search, at most. A search takes some 10 to 60 exchanges as a rule; a run
# begins where the rounds end, so that fewer would only begin it farther off.
MAX_ROUNDS = 60
# Cycles of the search: each but the first begins with a Newton step of all parties together.
MAX_CYCLES = 5
# Nats that a further Newton step may promise at the end of the search: it would move the mode by
# less than a twentieth of an sd.
LITTLE_GAIN = 1e-3
MIN_GAIN = 1e-3, 1e-6  # nats that the plane promises, and share of the log density: the end
QUIET_ROUNDS = 2  # such rounds in a row
# Exchanges for the basis: if it spans all directions, and if not. A complete basis needs one, and
# two more refine the Rayleigh quotients; the block method converges over several.
COMPLETE, OTHERWISE = 3, 10
# Newton steps of the server by itself, and the shares of a step that are tried.
OWN_STEPS, SHARES = 30, tuple(2.0**-i for i in range(12))
PLANE_STEPS = 10  # of Newton's method in the plane, at the server: two numbers, so they are cheap


ServerPoint: TypeAlias = Point[np.ndarray]
InPlane = tuple[Array, Array, Array]  # a point (2,), its height and the damping


@dataclass(frozen=True, eq=False)
class VerticalSearch:
    """The search, and the first states of a run, as a plain program of questions to clients."""

    vertical: VFLAlgorithm  # without a basis (a width of zero) nothing is searched for
    server_like: SiloData  # shapes of the server's data

    @np.errstate(all="ignore")  # of points that are too far
    def run(
        self, ask: AskSilos, key: Array, state: ServerSearch, data: SiloData
    ) -> tuple[ServerState, float]:
        """Return the server's first state of a run, and the log density where it begins.

        Clients have their first states then. Numbers that are not finite are a NoModeError.
        """
        v, state = self.vertical, jax.tree.map(np.asarray, state)
        combine, tau = None, np.ones(())
        if v.basis_width:
            state, best, joint = self.mode(ask, state, data)
            slopes = Slopes(np.array(True), best.slope, best.curvature)
            if v.rank:
                combine, tau = self.shared_directions(joint)
        else:
            # The server starts at the mode of its own latents, for a sum of zero.
            total = np.zeros(v.model.shape, jnp.result_type(float))
            best = self._at(state, total, data)
            for _ in range(OWN_STEPS if len(state.z) else 0):
                move = newton_step(best.by_zz, best.by_z)
                for share in SHARES:
                    trial = state._replace(z=state.z + share * move)
                    found = self._at(trial, total, data)
                    if found.value > best.value:
                        state, best = trial, found
                        break
                else:
                    break
            # Clients start at zero, with the curvature that follows from their noise.
            slopes = Slopes(np.array(True), total, np.full_like(total, (v.rho or np.inf) ** -2))
        *_, begin = self.exchanges.values()
        ask(begin, real(BeginMessage(slopes, combine, tau)))
        root = root_of(best.by_zz)
        server = self._first_state(key, real(state), real(root), real(combine), real(tau))
        if not finite(server):
            raise NoModeError
        return server, float(best.value)

    def mode(
        self, ask: AskSilos, state: ServerSearch, data: SiloData
    ) -> tuple[ServerSearch, ServerPoint, JointCurvature]:
        """Return the server's state and its log density at the mode, and the curvature there."""
        v, width = self.vertical, self.vertical.basis_width
        pull = np.zeros((0 if self.is_complete else width, *v.model.shape))
        number: np.ndarray = np.zeros((), np.int32)
        ritz = RitzValues(number, np.eye(width), np.ones(width), pull)
        newton, turned = np.zeros(width), np.zeros_like(state.basis)
        joint = JointCurvature(ritz, turned, newton, np.eye(v.rank), np.inf)
        state, best = self.climb(ask, state, None, joint.newton, data)
        for cycle in range(MAX_CYCLES):
            if cycle:
                state, best = self.climb(ask, state, best, joint.newton, data)
            # The first estimate of the curvature begins at nothing and takes several exchanges;
            # later ones begin at the last one.
            for _ in range(1 if cycle else COMPLETE if self.is_complete else OTHERWISE):
                state, joint = self.look_along_basis(ask, state, best, joint, data)
            # Steps that each party preconditions by itself are slow along ridges on which parties
            # compensate for each other. The Newton step of all parties shows how far the mode is.
            if joint.gain <= LITTLE_GAIN:
                break
        return state, best, joint

    def climb(
        self,
        ask: AskSilos,
        state: ServerSearch,
        best: ServerPoint | None,
        newton: np.ndarray,
        data: SiloData,
    ) -> tuple[ServerSearch, ServerPoint]:
        """Return the server's state where conjugate gradients end, from a step along the basis."""
        ab, quiet, rounds = np.zeros(2), 0, 0
        while best is None or (rounds < MAX_ROUNDS and quiet < QUIET_ROUNDS):
            trial, rounds = Trial(ab, newton), rounds + 1
            tried: TrialReply[np.ndarray] = ask(self.exchanges[TRY], real(trial))
            state = moved(state, trial)
            found = self._at(accepted(state), tried.predictor, data)
            found = found._replace(value=found.value + tried.log_p)
            better = finite(found)
            if best is None and not better:
                raise NoModeError
            if best is not None:
                rounding = 1e-6 * abs(best.value) if quiet else 0.0
                better = better and bool(found.value >= best.value - rounding)
            if best is None or better:
                state, best = accepted(state), found
            slopes = Slopes(np.array(better), best.slope, best.curvature)
            along: Along[np.ndarray] = ask(self.exchanges[TURN], slopes)
            state = state._replace(direction=newton_step(best.by_zz, best.by_z))
            in_plane = self._in_plane(real(state), real(best.total), real(along), data)
            at_best, gain = jax.tree.map(np.asarray, in_plane)
            # After a step that was rejected, a quarter of it is tried: the quadratic model of the
            # plane was wrong there, and would give the same point again.
            ab, newton = at_best if better else 0.25 * ab, np.zeros_like(newton)
            no_gain = better and gain < MIN_GAIN[0] + MIN_GAIN[1] * abs(best.value)
            quiet = quiet + 1 if no_gain else 0
            if not np.isfinite(ab).all():
                raise NoModeError
        return state, best

    def look_along_basis(
        self,
        ask: AskSilos,
        state: ServerSearch,
        best: ServerPoint,
        last: JointCurvature,
        data: SiloData,
    ) -> tuple[ServerSearch, JointCurvature]:
        """Return the server's state, and the curvature along the next basis."""
        ritz, T = last.ritz, root_of(best.by_zz)
        slopes = Slopes(np.array(True), best.slope, best.curvature, ritz)
        up: Along[np.ndarray] = ask(self.exchanges[SPREAD], real(slopes))
        basis = self._next_basis(state.basis, ritz, lambda new: last.turned)
        state = state._replace(basis=basis, directions=T @ basis)
        changes = self._changes(real(state), real(best.total), real(up.predictor), data)
        change_z, change_total = jax.tree.map(np.asarray, changes)
        curvature = (
            (change_z @ state.directions).T + up.curvature + products(up.predictor, change_total)
        )
        slope = (
            state.directions.T @ best.by_z
            + up.slope
            + products(up.predictor, best.slope[None])[:, 0]
        )
        combine, curvatures = ritz_vectors(up.gram + basis.T @ basis, curvature)
        along = combine.T @ slope
        newton = along / positive(curvatures)
        pull = np.tensordot(combine.T[: len(ritz.pull)], change_total, 1)
        found = RitzValues(ritz.looks + np.int32(1), combine, curvatures, pull)
        if not finite(found):
            raise NoModeError
        angles = (combine.T @ (basis.T @ state.anchor + up.anchor))[: self.vertical.rank]
        turned, gain = T.T @ change_z.T @ combine, float(0.5 * along @ newton)
        return state, JointCurvature(found, turned, combine @ newton, angles, gain)

    def shared_directions(self, joint: JointCurvature) -> tuple[np.ndarray, np.ndarray]:
        """Return the combinations of the basis that make shares in the shared noise, and tau."""
        v, curvatures, tau = self.vertical, positive(joint.ritz.curvatures), np.ones(())
        # A rank of one less than the number of latents is enough: the direction of the largest
        # eigenvalue has no share in the shared noise, since tau is one over that.
        if self.is_complete and v.rank >= v.dim - 1:
            tau = np.asarray(1 / curvatures.max())
        size = np.sqrt(np.maximum(1 / (tau * curvatures) - 1, 0.0))[: v.rank]
        # The shared noise may be rotated without changing the guide. This rotation brings V close
        # to the anchor (a Procrustes problem): eigenvectors of nearly equal eigenvalues depend on
        # rounding, and without it so would the draws.
        left, _, right = np.linalg.svd(size[:, None] * joint.angles)
        return joint.ritz.combine[:, : v.rank] * size @ (left @ right), tau

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[ClientSearch, ClientSearch]:
        """Return first states and exchanges, as other parties know them."""
        v = self.vertical
        return FederatedAlgorithm(
            lambda key: self._init(v.server, key, v.zeros_at_server(self.server_like)),
            lambda key, data: self._init(v.type_of(data), key, data),
            Round(tuple(self.exchanges.values())),
            lambda state: Shared(state.theta, {}, identity(state.z.shape)),
            lambda state: Private(state.theta, {}),
            server_like=self.server_like,
        )

    @property
    def is_complete(self) -> bool:
        """Return whether the basis spans all directions."""
        return self.vertical.basis_width > self.vertical.dim

    @cached_property
    def exchanges(self) -> dict[str, Exchange[Any, Any, Any]]:
        """Return the exchanges by name, the last one begins the run."""
        v, total = self.vertical, shape(*self.vertical.model.shape)
        width, rank = v.basis_width, v.rank
        yes: Any = jax.ShapeDtypeStruct((), bool)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        slopes = Slopes(yes, total, total)
        to_begin = BeginMessage(slopes, shape(width, rank) if rank and width else None, shape())
        begin = StackedExchange(
            BEGIN_AT_MODE if width else BEGIN_AT_ZERO,
            stacked_visit(self.first, little=True),
            silo_noise=key_as_noise,
            messages=lambda: (to_begin, ()),
        )
        if not width:
            return {begin.name: begin}

        in_plane = Along(shape(2, *v.model.shape), shape(2), shape(2, 2))
        square = shape(width, width)
        in_basis = Along(
            shape(width, *v.model.shape), shape(width), square, square, shape(width, rank)
        )
        pull = shape(0 if self.is_complete else width, *v.model.shape)
        ritz = RitzValues(number, square, shape(width), pull)

        def asking(name: str, silo: Visit[Any, Any, Any], *like: object) -> Exchange[Any, Any, Any]:
            # A point that is too far for a client is a failed step, which the server sees.
            visit = stacked_visit(silo, little=True)
            return StackedExchange(name, visit, lenient=True, messages=lambda: (like[0], like[1]))

        trial, tried = Trial(shape(2), shape(width)), TrialReply(total, shape())
        asked = (
            asking(TRY, self.try_point, trial, tried),
            asking(TURN, self.turn, slopes, in_plane),
            asking(SPREAD, self.along_basis, slopes._replace(ritz=ritz), in_basis),
            begin,
        )
        return {exchange.name: exchange for exchange in asked}

    def _init(self, party: PartyType, key: Array, data: SiloData) -> ClientSearch:
        v, dim = self.vertical, party.model.dim
        key_pin, key_theta, key_basis = jax.random.split(key, 3)
        pinned = party.pin(key_pin, data)
        zeros, basis = jnp.zeros(dim), jax.random.normal(key_basis, (dim, v.basis_width))
        return PartySearch(
            theta=init_theta(party.model, key_theta, data),
            pinned=pinned,
            z=pinned.value,
            direction=zeros,
            last=zeros,
            step=zeros,
            basis=basis,
            directions=jnp.zeros_like(basis),
            anchor=basis[:, : v.rank],
        )

    def try_point(
        self, noise: object, down: Trial[Array], state: ClientSearch, data: SiloData
    ) -> tuple[Reply[TrialReply[Array]], ClientSearch]:
        """Send a client's predictor and log density at the trial point."""
        state = moved(state, down)
        tried = TrialReply(*self._density(state, data, state.z + state.step))
        return Reply(tried, all_finite(tried)), state

    def turn(
        self, noise: object, down: Slopes[Array], state: ClientSearch, data: SiloData
    ) -> tuple[Reply[Along[Array]], ClientSearch]:
        """Take the next direction at a client, and send the changes in the plane."""
        state = where(down.better, accepted(state), state)
        local = self._local(state, data, down)
        state = state._replace(direction=newton_step(local.curvature, local.slope))
        up = self._along(state, data, local, jnp.stack([state.direction, state.last], 1))
        return Reply(up, all_finite(up)), state

    def along_basis(
        self, noise: object, down: Slopes[Array], state: ClientSearch, data: SiloData
    ) -> tuple[Reply[Along[Array]], ClientSearch]:
        """Take a client's rows of the next basis, and send the changes along it."""
        local = self._local(state, data, down)
        T = root_of(local.curvature)

        def rows(basis: Array) -> Array:
            _, vjp = jax.vjp(lambda z: self._density(state, data, z)[0], state.z)
            pulled = jax.vmap(lambda pull: vjp(pull)[0])(down.ritz.pull)
            return (pulled @ T).T - T.T @ local.own_hessian @ T @ basis

        basis = self._next_basis(state.basis, down.ritz, rows)
        after = state._replace(basis=basis, directions=T @ basis)
        up = self._along(after, data, local, after.directions)
        up = up._replace(gram=basis.T @ basis, anchor=basis.T @ after.anchor)
        return Reply(up, all_finite(up)), after

    def first(
        self, noise: Array, down: BeginMessage[Array], state: ClientSearch, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        """Take a client's first state of a run."""
        v, root = self.vertical, root_of(self._local(state, data, down.at_best).curvature)
        party, (centre, _) = v.type_of(data), self._density(state, data, state.z)
        start = self._start(party, state, root, down.combine, down.tau, noise)
        after = v.client_state(party, centre, *start)
        return Reply((), all_finite(after)), after

    def _next_basis(
        self, basis: AnyArray, ritz: RitzValues[AnyArray], rows: Callable[[AnyArray], AnyArray]
    ) -> AnyArray:
        """Return a party's rows of the next basis; ``rows`` gives those of ``P`` times a basis."""
        width, xp = self.vertical.basis_width, namespace(basis)
        new = basis @ ritz.combine
        if not self.is_complete:
            half = width // 2
            residual = rows(new) - new * ritz.curvatures
            new = xp.concatenate([new[:, : width - half], residual[:, :half]], 1)
        return xp.where(ritz.looks == 0, basis, new)

    def _density(self, state: ClientSearch, data: SiloData, z: Array) -> tuple[Array, Array]:
        """Return a client's predictor, and its own log density, at its latents ``z``."""
        party = self.vertical.type_of(data)
        point, log_pinned = party.at_pinned(z, state.pinned)
        g, own_log_p = self.vertical.model.predict(party.model, state.theta, point, data)
        return g, own_log_p + log_pinned

    def _local(self, state: ClientSearch, data: SiloData, at_best: Slopes[Array]) -> PartyExpansion:
        density = partial(self._density, state, data)
        return PartyExpansion.at(density, state.z, at_best.slope, at_best.curvature)

    def _along(
        self, state: ClientSearch, data: SiloData, local: PartyExpansion, directions: Array
    ) -> Along[Array]:
        """Return what a client says of some directions (dim, k)."""
        predict = partial(self._density, state, data)
        change = jax.vmap(lambda d: jax.jvp(predict, (state.z,), (d,))[1][0])(directions.T)
        curvature = -directions.T @ local.own_hessian @ directions
        return Along(change, directions.T @ local.own_slope, curvature)

    def _start(
        self,
        party: PartyType,
        state: ClientSearch,
        root: Array,
        combine: Array | None,
        tau: Array,
        key: Array,
    ) -> tuple[Array, PartyParams, Gaussian]:
        """Return a key for the rest of a party's first state, its parameters, and their frame."""
        v, z, coupling = self.vertical, jnp.asarray(state.z), None
        if v.rank:
            coupling = v.random_coupling(key, len(z)) if combine is None else state.basis @ combine
            root = jnp.sqrt(tau) * root
        key_guide, key_state = jax.random.split(key)
        return key_state, *party.standard_normal(key_guide, state.theta, z, root, coupling)

    def _log_p(self, state: ClientSearch, data: SiloData, z: Array, total: Array) -> Array:
        """Return the server's log density at its latents and a sum."""
        v = self.vertical
        point, log_pinned = v.server.at_pinned(z, state.pinned)
        return sum(v.model.log_server(state.theta, point, total, data), log_pinned)

    def _at(self, state: ServerSearch, total: np.ndarray, data: SiloData) -> ServerPoint:
        return jax.tree.map(np.asarray, self._expand(real(state), real(total), data))

    @compiled_method(jit_once)
    def _expand(self, state: ClientSearch, total: Array, data: SiloData) -> Point[Array]:
        """Return the log density at the server's best point and a sum."""
        log_p, z = partial(self._log_p, state, data), state.z
        value, slope = jax.value_and_grad(log_p, 1)(z, total)
        curvature = diagonal_curvature(lambda total: log_p(z, total), total)
        by_z, by_zz = jnp.zeros(0), jnp.zeros((0, 0))
        if z.size:
            by_z, by_zz = jax.grad(log_p)(z, total), -jax.hessian(log_p)(z, total)
        return Point(value, total, slope, curvature, by_z, by_zz)

    @compiled_method(jit_once)
    def _in_plane(
        self, state: ClientSearch, total: Array, up: Along[Array], data: SiloData
    ) -> tuple[Array, Array]:
        """Return the best point (2,) of the plane near zero, and its gain over zero.

        It is found by damped Newton steps, from the full Newton direction (1, 0) if that is better.
        """
        plane = jnp.stack([state.direction, state.last])

        def log_p_at(ab: Array) -> Array:
            own_log_p = ab @ up.slope - 0.5 * ab @ up.curvature @ ab
            total_at = total + jnp.tensordot(ab, up.predictor, 1)
            return self._log_p(state, data, state.z + ab @ plane, total_at) + own_log_p

        def step(carry: InPlane, _: None) -> tuple[InPlane, None]:
            ab, value, damping = carry
            slope, hessian = jax.grad(log_p_at)(ab), jax.hessian(log_p_at)(ab)
            curvature = Curvature.of(-hessian)
            size = jnp.maximum(jnp.abs(curvature.values + damping), 1e-4)
            trial = ab + replace(curvature, values=size).solve(slope)
            trial_value = log_p_at(trial)
            better = jnp.isfinite(trial_value) & (trial_value > value) & jnp.isfinite(trial).all()
            ab, value = jnp.where(better, trial, ab), jnp.where(better, trial_value, value)
            return (ab, value, jnp.where(better, 0.2 * damping, 5 * damping + 0.01)), None

        first = jnp.array([1.0, 0.0])
        at_zero, at_first = log_p_at(jnp.zeros(2)), log_p_at(first)
        usable = jnp.isfinite(at_first) & (at_first > at_zero)
        value = jnp.where(usable, at_first, at_zero)
        begun = jnp.where(usable, first, 0.0), value, jnp.array(0.0)
        (ab, value, _), _ = jax.lax.scan(step, begun, length=PLANE_STEPS)
        return ab, value - at_zero

    @compiled_method(jit_once)
    def _changes(
        self, state: ClientSearch, total: Array, along: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return minus the changes of the slopes in latents and in the sum along the basis."""
        slopes, at = jax.grad(partial(self._log_p, state, data), (0, 1)), (state.z, total)
        change = jax.vmap(lambda *towards: jax.jvp(slopes, at, towards)[1])
        return jax.tree.map(jnp.negative, change(state.directions.T, along))

    @compiled_method(jit_once)
    def _first_state(
        self, key: Array, state: ClientSearch, root: Array, combine: Array | None, tau: Array
    ) -> ServerState:
        """Return the server's first state of a run."""
        v = self.vertical
        return v.server_state(*self._start(v.server, state, root, combine, tau, key))
