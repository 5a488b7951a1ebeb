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
2001), and a Newton step along them leads on (:meth:`VerticalSearch.spread`):

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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import compiled_method, jit_once
from numpyro_fed.basics.trees import AnyArray, all_finite, namespace, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import identity
from numpyro_fed.rounds.exchange import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Private,
    Reply,
    Round,
    Shared,
    StackedExchange,
    key_as_noise,
    stacked_visit,
)
from numpyro_fed.search.expand import shape
from numpyro_fed.text.vertical import init_theta
from numpyro_fed.vertical.algorithm import Vertical
from numpyro_fed.vertical.curvature import (
    Function,
    NoModeError,
    PartyExpansion,
    at_point,
    diagonal_curvature,
    finite,
    maximise_in_plane,
    newton_step,
    positive,
    products,
    real,
    ritz_vectors,
    root_of,
)
from numpyro_fed.vertical.parties import (
    ClientState,
    PartyStart,
    PartyType,
    PinnedLatents,
    ServerState,
)

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


Either = Any  # an array, of NumPy at the server and of JAX at a client


class Party(NamedTuple):
    """A party's state of the search."""

    theta: dict[str, Any]
    pinned: PinnedLatents
    z: Either  # the best point so far
    direction: Either  # with ``last`` it spans the plane of the next step
    last: Either
    step: Either  # leads to the point that is tried
    basis: Either  # (dim, width) its rows of a basis for directions of all parties' latents
    directions: Either  # the same in the latents' own units
    anchor: Either  # (dim, rank) the first columns of the first basis

    def moved(self, trial: Trial) -> Party:
        """Return the party with its own step (dim,) from the best point to the trial point."""
        plane = trial.ab[0] * self.direction + trial.ab[1] * self.last
        return self._replace(step=plane + self.directions @ trial.newton)

    def accepted(self) -> Party:
        """Return the party with the trial point as its best one."""
        return self._replace(z=self.z + self.step, last=self.step)


class Trial(NamedTuple):
    """The point to try: coordinates in the plane (2,), and a step along the basis (width,)."""

    ab: Either
    newton: Either


class Tried(NamedTuple):
    """A client's message on a trial point: its predictor, and its own log density."""

    predictor: Either
    own: Either


class Slopes(NamedTuple):
    """A message of the server: whether the trial was accepted, slope and curvature in the sum.

    Where the basis is improved, ``ritz`` has the findings on it (:class:`RitzValues`).
    """

    better: Either
    slope: Either
    curvature: Either
    ritz: Any = ()


class Along(NamedTuple):
    """A client's message on some directions: the two of its plane, or those of its basis."""

    predictor: Either  # (k, rows, ...) the change of its predictor along each
    slope: Either  # (k,) of its own log density
    curvature: Either  # (k, k)
    gram: Any = ()  # (k, k) products of its rows of a basis
    anchor: Any = ()  # (k, rank) those with its rows of the anchor


class RitzValues(NamedTuple):
    """The server's findings on the basis, which it sends."""

    looks: Either  # counts exchanges
    combine: Either  # (width, width) combinations of the basis
    curvatures: Either  # (width,) along these, smallest first
    # (width, rows, ...) minus the change of the slope with respect to the sum along each; empty if
    # the basis spans all directions
    pull: Either


class ToBegin(NamedTuple):
    """A message of the server at the start of a run."""

    at_best: Slopes
    combine: Any  # (width, rank) makes the shares in the shared noise of the basis
    tau: Either


class Point(NamedTuple):
    """The server's log density at a point of its latents and a sum, with its derivatives."""

    value: Either
    total: Either
    slope: Either  # of the log likelihood with respect to the sum, of its shape
    curvature: Either
    by_z: Either  # (dim,) slope and (dim, dim) curvature in its own latents
    by_zz: Either


class Spread(NamedTuple):
    """The server's findings on the basis, besides those that it sends (``ritz``)."""

    ritz: RitzValues
    turned: np.ndarray  # (dim, width) its own rows of the curvature times the directions
    newton: np.ndarray  # (width,) a step along them to try, whose gain is ``gain`` nats
    angles: np.ndarray  # (rank, rank) products of the best directions with the anchor
    gain: float


@dataclass(frozen=True, eq=False)
class VerticalSearch:
    """The search, and the first states of a run, as a plain program of questions to clients."""

    vertical: Vertical  # without a basis (a ``width`` of zero) nothing is searched for
    server_like: SiloData  # shapes of the server's data

    @cached_property
    def exchanges(self) -> tuple[Exchange[Any, Any, Any], ...]:
        """Return the exchanges by which a search asks, the last one begins the run."""
        v, sum_ = self.vertical, self.vertical.model.shape
        width, rank = v.width, v.rank
        yes: Any = jax.ShapeDtypeStruct((), bool)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        slopes = Slopes(yes, shape(*sum_), shape(*sum_))
        pull = shape(0 if v.complete else width, *sum_)
        ritz = RitzValues(number, shape(width, width), shape(width), pull)
        basis = Along(
            *(shape(width, *sum_), shape(width), shape(width, width)),
            *(shape(width, width), shape(width, rank)),
        )

        def exchange(name: str, silo: Any, *like: Any, **options: Any) -> Exchange[Any, Any, Any]:
            visit = stacked_visit(silo, little=True)
            # A point that is too far for a client is a failed step, which the server sees.
            options = {"lenient": True, "messages": lambda: like, **options}
            return StackedExchange(name, visit, **options)

        to_begin = ToBegin(slopes, shape(width, rank) if rank and width else None, shape())
        begin = self.first, to_begin, ()
        if not width:
            return (exchange("begin at zero", *begin, lenient=False, silo_noise=key_as_noise),)
        tried = Tried(shape(*sum_), shape())
        in_plane = Along(shape(2, *sum_), shape(2), shape(2, 2))
        return (
            exchange("try", self.try_point, Trial(shape(2), shape(width)), tried),
            exchange("turn", self.turn, slopes, in_plane),
            exchange("spread", self.along_basis, slopes._replace(ritz=ritz), basis),
            exchange("begin at the mode", *begin, lenient=False, silo_noise=key_as_noise),
        )

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[Party, Party]:
        """Return first states and exchanges, as other parties know them."""
        v = self.vertical
        return FederatedAlgorithm(
            lambda key: self._init(v.server, key, v.zeros_at_server(self.server_like)),
            lambda key, data: self._init(v.kind(data), key, data),
            Round(self.exchanges),
            lambda party: Shared(party.theta, {}, identity(party.z.shape)),
            lambda party: Private(party.theta, {}),
            server_like=self.server_like,
        )

    def _init(self, kind: PartyType, key: Array, data: SiloData) -> Party:
        v, dim = self.vertical, kind.model.dim
        key_pin, key_theta, key_basis = jax.random.split(key, 3)
        theta, pinned = init_theta(kind.model, key_theta, data), kind.pin(key_pin, data)
        zeros, basis = jnp.zeros(dim), jax.random.normal(key_basis, (dim, v.width))
        anchor = basis[:, : v.rank]
        return Party(
            theta, pinned, pinned.place, zeros, zeros, zeros, basis, jnp.zeros_like(basis), anchor
        )

    def _functions(self, party: Party, data: SiloData) -> tuple[Function, Function]:
        """Return a client's predictor, and its own log density, as functions of its latents."""
        kind = self.vertical.kind(data)

        def density_at(z: Array) -> tuple[Array, Array]:
            point, log_pinned = kind.below(z, party.pinned)
            g, own_log_p = self.vertical.model.predict(kind.model, party.theta, point, data)
            return g, own_log_p + log_pinned

        return lambda z: density_at(z)[0], lambda z: density_at(z)[1]

    def _local(self, party: Party, data: SiloData, at_best: Slopes) -> PartyExpansion:
        predict, own_log_p = self._functions(party, data)
        return PartyExpansion.at(predict, own_log_p, party.z, at_best.slope, at_best.curvature)

    def _along(
        self, party: Party, data: SiloData, local: PartyExpansion, directions: Array
    ) -> Along:
        """Return what a client says of some directions (dim, k)."""
        predict = self._functions(party, data)[0]
        change = jax.vmap(lambda d: jax.jvp(predict, (party.z,), (d,))[1])(directions.T)
        curvature = -directions.T @ local.own_hessian @ directions
        return Along(change, directions.T @ local.own_slope, curvature)

    def try_point(
        self, noise: object, down: Trial, party: Party, data: SiloData
    ) -> tuple[Reply[Tried], Party]:
        party = party.moved(down)
        tried = Tried(*(f(party.z + party.step) for f in self._functions(party, data)))
        return Reply(tried, all_finite(tried)), party

    def turn(
        self, noise: object, down: Slopes, party: Party, data: SiloData
    ) -> tuple[Reply[Along], Party]:
        party = where(down.better, party.accepted(), party)
        local = self._local(party, data, down)
        party = party._replace(direction=newton_step(local.curvature, local.slope))
        up = self._along(party, data, local, jnp.stack([party.direction, party.last], 1))
        return Reply(up, all_finite(up)), party

    def along_basis(
        self, noise: object, down: Slopes, party: Party, data: SiloData
    ) -> tuple[Reply[Along], Party]:
        local = self._local(party, data, down)
        T = root_of(local.curvature)

        def rows(basis: Array) -> Array:
            _, vjp = jax.vjp(self._functions(party, data)[0], party.z)
            pulled = jax.vmap(lambda pull: vjp(pull)[0])(down.ritz.pull)
            return (pulled @ T).T - T.T @ local.own_hessian @ T @ basis

        basis = self._next_basis(party.basis, down.ritz, rows)
        party = party._replace(basis=basis, directions=T @ basis)
        up = self._along(party, data, local, party.directions)
        up = up._replace(gram=basis.T @ basis, anchor=basis.T @ party.anchor)
        return Reply(up, all_finite(up)), party

    def _next_basis(
        self, basis: AnyArray, ritz: RitzValues, rows: Callable[[AnyArray], AnyArray]
    ) -> AnyArray:
        """Return a party's rows of the next basis; ``rows`` gives those of ``P`` times a basis."""
        v, xp = self.vertical, namespace(basis)
        new = basis @ ritz.combine
        if not v.complete:
            half = v.width // 2
            residual = rows(new) - new * ritz.curvatures
            new = xp.concatenate([new[:, : v.width - half], residual[:, :half]], 1)
        return xp.where(ritz.looks == 0, basis, new)

    def first(
        self, noise: Array, down: ToBegin, party: Party, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        root = root_of(self._local(party, data, down.at_best).curvature)
        start = self._start(party, root, down.combine, down.tau, noise)
        centre = self._functions(party, data)[0](party.z)
        after = self.vertical.client_at(noise, data, party.theta, start, centre)
        return Reply((), all_finite(after)), after

    def _start(
        self, party: Party, root: Array, combine: Array | None, tau: Array, key: Array
    ) -> PartyStart:
        """Return the start of a party's guide."""
        v, z = self.vertical, jnp.asarray(party.z)
        if not v.rank:
            return z, root, None
        coupling = v.random_coupling(key, len(z)) if combine is None else party.basis @ combine
        return z, jnp.sqrt(tau) * root, coupling

    def _log_p(self, party: Party, data: SiloData) -> Callable[[Array, Array], Array]:
        """Return the server's log density, as a function of its latents and the sum."""
        v = self.vertical

        def density_at(z: Array, total: Array) -> Array:
            point, log_pinned = v.server.below(z, party.pinned)
            return sum(v.model.log_server(party.theta, point, total, data), log_pinned)

        return density_at

    @compiled_method(jit_once)
    def _expand(self, party: Party, total: Array, data: SiloData) -> Point:
        """Return the log density at a party's best point and a sum."""
        log_p, z = self._log_p(party, data), party.z
        value, slope = jax.value_and_grad(log_p, 1)(z, total)
        curvature = diagonal_curvature(lambda total: log_p(z, total), total)
        return Point(value, total, slope, curvature, *at_point(lambda z: log_p(z, total), z))

    @compiled_method(jit_once)
    def _in_plane(
        self, party: Party, total: Array, up: Along, data: SiloData
    ) -> tuple[Array, Array]:
        """Return the best point (2,) of the plane, and its gain."""
        log_p, plane = self._log_p(party, data), jnp.stack([party.direction, party.last])

        def log_p_at(ab: Array) -> Array:
            own_log_p = ab @ up.slope - 0.5 * ab @ up.curvature @ ab
            total_at = total + jnp.tensordot(ab, up.predictor, 1)
            return log_p(party.z + ab @ plane, total_at) + own_log_p

        return maximise_in_plane(log_p_at)

    @compiled_method(jit_once)
    def _changes(
        self, party: Party, total: Array, along: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return minus the changes of the slopes in latents and in the sum along the basis."""
        slopes = jax.grad(self._log_p(party, data), (0, 1))

        def change(by_z: Array, by_total: Array) -> tuple[Array, Array]:
            changed = jax.jvp(slopes, (party.z, total), (by_z, by_total))[1]
            return jax.tree.map(jnp.negative, changed)

        return jax.vmap(change)(party.directions.T, along)

    @compiled_method(jit_once)
    def _first_state(
        self, key: Array, party: Party, root: Array, combine: Array | None, tau: Array
    ) -> ServerState:
        """Return the server's first state of a run."""
        start = self._start(party, root, combine, tau, key)
        return self.vertical.server_at(key, party.theta, start)

    @np.errstate(all="ignore")  # of points that are too far
    def run(
        self, ask: AskSilos, key: Array, party: Party, data: SiloData
    ) -> tuple[ServerState, float]:
        """Return the server's first state of a run, and the log density where it begins.

        Clients have their first states then. Numbers that are not finite are a NoModeError.
        """
        v, sum_ = self.vertical, np.zeros(self.vertical.model.shape, jnp.result_type(float))
        party = jax.tree.map(np.asarray, party)
        combine: np.ndarray | None = None
        tau = np.ones(())
        if v.width:
            party, best, spread = self.mode(ask, party, data)
            slopes = Slopes(np.array(True), best.slope, best.curvature)
            if v.rank:
                curvatures = positive(spread.ritz.curvatures)
                # A rank of one less than the number of latents is enough: the direction of the
                # largest eigenvalue has no share in the shared noise, since tau is one over that.
                if v.complete and v.rank >= v.dim - 1:
                    tau = np.asarray(1 / curvatures.max())
                size = np.sqrt(np.maximum(1 / (tau * curvatures) - 1, 0.0))[: v.rank]
                # The shared noise may be rotated without changing the guide. This rotation brings
                # V close to the anchor (a Procrustes problem): eigenvectors of nearly equal
                # eigenvalues depend on rounding, and without it so would the draws.
                left, _, right = np.linalg.svd(size[:, None] * spread.angles)
                combine = spread.ritz.combine[:, : v.rank] * size @ (left @ right)
        else:
            # Clients start at zero, and the server at the mode of its own latents for such a sum.
            best = self._at(party, sum_, data)
            for _ in range(OWN_STEPS if len(party.z) else 0):
                move, value = newton_step(best.by_zz, best.by_z), best.value
                for share in SHARES:
                    trial = party._replace(z=party.z + share * move)
                    found = self._at(trial, sum_, data)
                    if found.value > value:
                        party, best = trial, found
                        break
                else:
                    break
            slopes = Slopes(np.array(True), sum_, np.full_like(sum_, (v.rho or np.inf) ** -2))
        ask(self.exchanges[-1], real(ToBegin(slopes, combine, tau)))
        root = root_of(best.by_zz)
        server = self._first_state(key, real(party), real(root), real(combine), real(tau))
        if not finite(server):
            raise NoModeError
        return server, float(best.value)

    def mode(self, ask: AskSilos, party: Party, data: SiloData) -> tuple[Party, Point, Spread]:
        """Return the server's state and its log density at the mode, and the curvature there."""
        v, width = self.vertical, self.vertical.width
        pull = np.zeros((0 if v.complete else width, *v.model.shape))
        ritz = RitzValues(np.zeros((), np.int32), np.eye(width), np.ones(width), pull)
        spread = Spread(ritz, np.zeros_like(party.basis), np.zeros(width), np.eye(v.rank), np.inf)
        party, best = self.climb(ask, party, None, spread.newton, data)
        for cycle in range(MAX_CYCLES):
            if cycle:
                party, best = self.climb(ask, party, best, spread.newton, data)
            # The first estimate of the curvature begins at nothing and takes several exchanges;
            # later ones begin at the last one.
            for _ in range(1 if cycle else COMPLETE if v.complete else OTHERWISE):
                party, spread = self.spread(ask, party, best, spread, data)
            # Steps that each party preconditions by itself are slow along ridges on which parties
            # compensate for each other. The Newton step of all parties shows how far the mode is.
            if spread.gain <= LITTLE_GAIN:
                break
        return party, best, spread

    def climb(
        self,
        ask: AskSilos,
        party: Party,
        best: Point | None,
        newton: np.ndarray,
        data: SiloData,
    ) -> tuple[Party, Point]:
        """Return the server's state where conjugate gradients end, from a step along the basis."""
        ab, quiet, rounds = np.zeros(2), 0, 0
        while best is None or (rounds < MAX_ROUNDS and quiet < QUIET_ROUNDS):
            trial, rounds = Trial(ab, newton), rounds + 1
            tried: Tried = ask(self.exchanges[0], real(trial))
            party = party.moved(trial)
            found = self._at(party.accepted(), tried.predictor, data)
            found = found._replace(value=found.value + tried.own)
            better = finite(found)
            if best is None and not better:
                raise NoModeError
            if best is not None:
                rounding = 1e-6 * abs(best.value) if quiet else 0.0
                better = better and bool(found.value >= best.value - rounding)
            if best is None or better:
                party, best = party.accepted(), found
            slopes = Slopes(np.array(better), best.slope, best.curvature)
            along: Along = ask(self.exchanges[1], slopes)
            party = party._replace(direction=newton_step(best.by_zz, best.by_z))
            in_plane = self._in_plane(real(party), real(best.total), real(along), data)
            at_best, gain = jax.tree.map(np.asarray, in_plane)
            # After a step that was rejected, a quarter of it is tried: the quadratic model of the
            # plane was wrong there, and would give the same point again.
            ab, newton = at_best if better else 0.25 * ab, np.zeros_like(newton)
            no_gain = better and gain < MIN_GAIN[0] + MIN_GAIN[1] * abs(best.value)
            quiet = quiet + 1 if no_gain else 0
            if not np.isfinite(ab).all():
                raise NoModeError
        return party, best

    def spread(
        self, ask: AskSilos, party: Party, best: Point, before: Spread, data: SiloData
    ) -> tuple[Party, Spread]:
        """Return the server's state and its findings after a look along the basis."""
        ritz, T = before.ritz, root_of(best.by_zz)
        slopes = Slopes(np.array(True), best.slope, best.curvature, ritz)
        up: Along = ask(self.exchanges[2], real(slopes))
        basis = self._next_basis(party.basis, ritz, lambda new: before.turned)
        directions = T @ basis
        party = party._replace(basis=basis, directions=directions)
        changes = self._changes(real(party), real(best.total), real(up.predictor), data)
        change_z, change_total = jax.tree.map(np.asarray, changes)
        curvature = (change_z @ directions).T + up.curvature + products(up.predictor, change_total)
        slope = directions.T @ best.by_z + up.slope + products(up.predictor, best.slope[None])[:, 0]
        combine, curvatures = ritz_vectors(up.gram + basis.T @ basis, curvature)
        along = combine.T @ slope
        newton = along / positive(curvatures)
        pull = np.tensordot(combine.T[: len(ritz.pull)], change_total, 1)
        after = RitzValues(ritz.looks + np.int32(1), combine, curvatures, pull)
        if not finite(after):
            raise NoModeError
        angles = (combine.T @ (basis.T @ party.anchor + up.anchor))[: self.vertical.rank]
        turned, gain = T.T @ change_z.T @ combine, float(0.5 * along @ newton)
        return party, Spread(after, turned, combine @ newton, angles, gain)

    def _at(self, party: Party, total: Either, data: SiloData) -> Point:
        return jax.tree.map(np.asarray, self._expand(real(party), real(total), data))
