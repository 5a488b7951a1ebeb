r"""Algorithms 1 and 2 of Hassan, Sutton, Mira and Mengersen 2024, and the exact split.

*Scalable Vertical Federated Learning via Data Augmentation and Amortized Inference*, arXiv
2405.04043.

In each round of Algorithm 1

1. every client draws its latents and its part of the sum, and sends the part: its auxiliary
   variables :math:`z_j` or, in the exact split, its predictor :math:`g_j` itself;
2. the server, which receives the sum alone, draws its own latents, takes its step, and sends the
   gradient of the log likelihood with respect to the sum;
3. every client takes its step. The gradient with respect to the sum is also the one with respect
   to each part (equations 11 to 13).

In Algorithm 2 the likelihood at client ``j`` has the argument :math:`g_j + \sum_{k \ne j} z_k`,
and the power :math:`1/J`. In each round

1. clients send their :math:`z_j`;
2. the server sends the sum of these, and draws of its own latents;
3. clients reply with their term and its gradient :math:`v_j` with respect to the argument;
4. the server sends the sum of these. Client ``j`` subtracts its own and has
   :math:`\sum_{k \ne j} v_k`, the gradient with respect to its :math:`z_j` (equations 14 to 17).

The paper sends all :math:`z_j`, and a gradient for each of them. A likelihood depends on the
others' auxiliary variables by their sum alone, so sums are enough, and secure aggregation may form
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.guides.global_guides import Full, GlobalGuide, GuideParams
from numpyro_fed.guides.structured import Guide, build_resolved
from numpyro_fed.numerics.gaussian import Gaussian, identity
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply, Round, Shared
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.vertical import init_theta
from numpyro_fed.vertical import coupling
from numpyro_fed.vertical.auxiliary_guide import AuxiliaryGuide, RowInfo
from numpyro_fed.vertical.coupling import CouplingStats
from numpyro_fed.vertical.parties import (
    ClientDraw,
    ClientParams,
    ClientState,
    Parties,
    PartyParams,
    PartyStart,
    PartyState,
    PartyType,
    ServerNoise,
    ServerParams,
    ServerState,
    SumMessage,
)

# Standard deviation of the first random shares in the shared noise, where a run does not start at
# the mode: small against one, so that parties start almost independent.
COUPLING_SD = 0.1
DRAW, LIKELIHOOD, STEP = "draw", "likelihood", "step"  # the names of the exchanges


class Down(NamedTuple):
    """A message of the server for a draw: the shared noise, and the indices of the round's rows."""

    xi: Array | None
    rows: Array | None


class Up(NamedTuple):
    """A client's message: its part of the sum, and its term of the bound."""

    part: Array
    own: Array
    tie: Any  # its :class:`CouplingStats`, None where parties are independent


class Stepped(NamedTuple):
    """A client's message after its step."""

    by_xi: Array | None  # the gradient with respect to the shared noise
    resting: Array  # whether its guide has converged (0 or 1): the sum over clients counts them


class AtServer(NamedTuple):
    """A message of the server: the sum of auxiliary variables, its parameters and latents."""

    total: Array
    theta: dict[str, Any]
    z: Array


class Gradients(NamedTuple):
    """A client's message: its likelihood term, and gradients of it."""

    term: Array
    slope: Array  # with respect to the likelihood's argument
    theta: dict[str, Any]  # with respect to the server's parameters, and to its draws
    z: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Vertical(Parties):
    """Algorithm 1, or 2 with ``power``, as pure functions; without ``rho`` it is the exact split.

    Under the power likelihood clients hold the server's arrays as ``shared``.
    """

    server: PartyType
    kinds: Mapping[Any, PartyType]  # types of clients, by the signature of their data
    spec: Any  # the user's guide for clients; ``server_spec`` is that for the server's latents
    server_spec: Any
    auxiliary: AuxiliaryGuide | None
    num_particles: int = 1
    batch_size: int | None = None  # rows in a round
    from_start: bool = False  # whether a run starts at a point that is searched first
    width: int = 0  # of the basis in which the dependence between parties is found
    # Steps of a client in a round; after the first, auxiliary variables stay fixed (section 5.3).
    local_steps: int = 1

    @property
    def rounds(self) -> Round:

        def draw(
            noise: tuple[Array, Array | None], down: Down, state: ClientState, data: SiloData
        ) -> tuple[Reply[Up], ClientState]:
            state = state._replace(noise=noise, rows=down.rows, xi=down.xi)
            client_draw = self.draw(state.params, down.xi, state, data)
            V = self.coupling_of(self.kind(data), state.params.own)
            tie = None if V is None else CouplingStats(client_draw.b, V.T @ V)
            up = Up(client_draw.part, client_draw.own, tie)
            return Reply(up, all_finite(up)), state

        def noise_of_steps(key: Array, state: ClientState) -> Array | None:
            keys = jax.random.split(key, self.local_steps - 1)
            return jax.vmap(lambda key: self.noise_of(key, state)[0])(keys) if len(keys) else None

        drawing = Exchange(DRAW, draw, silo_noise=self.noise_of)
        stepping = Exchange(STEP, self.step, silo_noise=noise_of_steps)
        if not self.power:
            return Round((drawing, stepping), self.round, self.server_noise)
        likelihood = Exchange(LIKELIHOOD, self.likelihood)
        return Round((drawing, likelihood, stepping), self.power_round, self.server_noise)

    def round(self, state: ServerState, noise: ServerNoise, ask: Ask) -> tuple[ServerState, Info]:
        """Ask clients for their parts of the sum, take a step, and send the gradient in the sum."""
        # ``pull`` carries all parties' gradients in the shared noise back to the parameters of its
        # guide, which only the server has.
        xi, pull = jax.vjp(lambda shared: self.xi(shared, noise.xi), state.params.shared)
        up: Up = ask(DRAW, Down(xi, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)

        def bound(params: PartyParams, xi: Array | None, sent: SumMessage) -> Array:
            """Return the server's term of the bound, given the sum of the clients' parts."""
            guide = self.guide(self.server).globals
            eta, V = params.guide, self.coupling_of(self.server, params)

            def one_particle(eps: Array, xi: Array | None, sent: SumMessage) -> Array:
                z, log_q, b = coupling.draw_in(state.frame, guide, eta, V, eps, xi)
                prior, likelihood = self.model.log_server(params.theta, z, sent.part, data)
                value = prior - log_q + self.share * likelihood
                if V is None or b is None:
                    return value
                A = jax.lax.stop_gradient(V.T @ V) + up.tie.A
                return value - coupling.log_ratio(state.params.shared, sent.b + b, A)

            return jax.vmap(one_particle)(noise.eps, xi, sent).mean()

        sums = SumMessage(up.part, up.tie.b if self.rank else None)
        value, (gradient, by_xi, slope) = jax.value_and_grad(bound, (0, 1, 2))(
            state.params.own, xi, sums
        )
        after = self.ascend(state, "own", gradient)
        total = value + up.own
        course = convergence.update(state.course, -total, after.params, whitened=self.from_start)
        stepped: Stepped = ask(STEP, slope).up
        after = after._replace(course=course, resting=stepped.resting)
        if self.rank:
            after = self.ascend(after, "shared", pull(by_xi + stepped.by_xi)[0])
        return after, Info(-total, all_finite((total, gradient, by_xi, slope)))

    def likelihood(
        self, noise: object, down: AtServer, state: ClientState, data: SiloData
    ) -> tuple[Reply[Gradients], ClientState]:
        drawn = self.draw(state.params, None, state, data)
        batch = self.take_rows(data, state.rows)
        at_server = SiloData(dict(batch.kwargs["shared"]))
        argument = drawn.g + down.total - drawn.part

        def term(theta: dict[str, Any], z: Array, argument: Array) -> Array:
            def one_particle(z: Array, argument: Array) -> Array:
                return self.model.log_server(theta, z, argument, at_server)[1]

            return self.share * jax.vmap(one_particle)(z, argument).mean() / self.num_clients

        value, (theta, z, slope) = jax.value_and_grad(term, (0, 1, 2))(down.theta, down.z, argument)
        up = Gradients(value, slope, theta, z)
        return Reply(up, all_finite(up)), state._replace(slope=slope)

    def power_round(
        self, state: ServerState, noise: ServerNoise, ask: Ask
    ) -> tuple[ServerState, Info]:
        """Ask clients for their auxiliary variables, then for their likelihoods, and step."""
        clients: Up = ask(DRAW, Down(None, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)

        def drawn(own: PartyParams) -> tuple[Array, Array]:
            """Return draws of the server's latents, and its own term of the bound."""
            _, z, log_q = self.guide(self.server).globals.draws(state.frame, own.guide, noise.eps)
            total = jnp.zeros(self.shape[1:])
            log_p = jax.vmap(lambda z: self.model.log_server(own.theta, z, total, data)[0])(z)
            return z, (log_p - log_q).mean()

        (z, value), pull = jax.vjp(drawn, state.params.own)
        up: Gradients = ask(LIKELIHOOD, AtServer(clients.part, self.shared(state).theta, z)).up
        (gradient,) = pull((up.z, jnp.ones_like(value)))
        theta = jax.tree.map(jnp.add, gradient.theta, up.theta)
        after = self.ascend(state, "own", gradient._replace(theta=theta))
        loss = -(value + up.term + clients.own)
        course = convergence.update(state.course, loss, after.params, whitened=self.from_start)
        stepped: Stepped = ask(STEP, SumMessage(up.slope, None)).up
        after = after._replace(course=course, resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, up.slope)))

    def step(
        self, noise: Array | None, down: SumMessage, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        """Take a client's steps, given the gradients in its predictor and its part of the sum."""
        slope_g, slope_part = jnp.zeros_like(down.part), down.part
        if self.power:
            # Its likelihood depends on its own predictor, not on its own auxiliary variables.
            slope_g, slope_part = state.slope, down.part - state.slope

        def draw(params: ClientParams, xi: Array | None) -> ClientDraw:
            return self.draw(params, xi, state, data)

        # The derivatives of the first draw cannot be kept from one exchange to the next, so the
        # draw is repeated from the noise in the state.
        client_draw, pull = jax.vjp(draw, state.params, state.xi)
        slopes = ClientDraw(slope_g, slope_part, jnp.ones_like(client_draw.own), down.b)
        gradient, by_xi = pull(slopes)
        after = self.ascend(state, "own", gradient.own)
        if self.auxiliary is not None:
            after = self.ascend(after, "auxiliary", gradient.auxiliary)

        kind, batch = self.kind(data), self.take_rows(data, state.rows)
        guide = self.guide(kind).globals

        def at_fixed_part(own: PartyParams, eps: Array) -> Array:
            """Return the client's term of the bound, its auxiliary variables as they are."""

            def one_particle(eps: Array, part: Array) -> Array:
                z, log_q, _ = coupling.draw_in(state.frame, guide, own.guide, None, eps, None)
                g, prior = self.model.predict(kind.model, own.theta, z, batch)
                return prior - log_q + self.share * self.log_noise(part, g)

            return jax.vmap(one_particle)(eps, client_draw.part).mean()

        def local_step(state: ClientState, eps: Array) -> tuple[ClientState, None]:
            return self.ascend(state, "own", jax.grad(at_fixed_part)(state.params.own, eps)), None

        if noise is not None:
            after, _ = jax.lax.scan(local_step, after, noise)
        course = convergence.update(
            state.course, jnp.zeros(()), after.params.own, whitened=self.from_start
        )
        up = Stepped(by_xi, convergence.settled(course).astype(jnp.result_type(float)))
        return Reply(up, all_finite((gradient, by_xi))), after._replace(course=course)

    @property
    def rows(self) -> int:
        """Return how many rows take part in a round."""
        return self.batch_size or self.model.rows

    @property
    def dim(self) -> int:
        """Return the number of all parties' latents, without auxiliary variables."""
        return sum(party.dim for party in self.model.parties)

    @property
    def complete(self) -> bool:
        """Return whether the basis spans all directions."""
        return self.width > self.dim

    @property
    def share(self) -> float:
        """Return the weight of rows' terms: all rows over those of a minibatch."""
        return self.model.rows / self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape (particles, rows, ...) of a client's part of the sum."""
        return (self.num_particles, self.rows, *self.model.shape[1:])

    def kind(self, data: SiloData) -> PartyType:
        """Return the type of the clients that hold data of this shape."""
        return self.kinds[signature(data)]

    def guide(self, kind: PartyType, data: SiloData | None = None) -> Guide:
        """Return the guide of a party's latents; its start may depend on the party's data."""
        spec = self.server_spec if kind is self.server else self.spec
        party_model = kind.model if data is None else replace(kind.model, silo=data)
        return build_resolved(spec, kind.resolved, party_model)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        key_theta, key_guide, key_coupling, key_sharing = jax.random.split(key, 4)
        given = self.zeros_at_server(data)
        theta = init_theta(self.server.model, key_theta, given)
        if self.from_start:
            return self.server_at(key_guide, theta)
        eta = self.guide(self.server, given).init_global(key_guide)
        dim = self.server.model.dim
        party_params = PartyParams(self.random_coupling(key_coupling, dim), eta, theta)
        return self._server_state(key_sharing, party_params, identity((dim,)))

    def server_at(
        self, key: Array, theta: dict[str, Any], start: PartyStart | None = None
    ) -> ServerState:
        """Return the server's state at the start of a run, at zero if there is none."""
        key_guide, key_sharing = jax.random.split(key)
        party_params, frame = self._initial_params(key_guide, self.server, theta, start)
        return self._server_state(key_sharing, party_params, frame)

    def _initial_params(
        self, key: Array, kind: PartyType, theta: dict[str, Any], start: PartyStart | None
    ) -> tuple[PartyParams, Gaussian]:
        """Return a party's first parameters, a standard normal in a frame, and the frame."""
        guide, dim = self.guide(kind).globals, kind.model.dim
        nothing = jnp.zeros((dim, self.rank)) if self.rank else None
        z, root, share = start or (jnp.zeros(dim), jnp.eye(dim), nothing)
        eta = guide.init(key, jnp.zeros(dim), 1.0)
        return PartyParams(share, eta, theta), guide.frame(z, root)

    def _server_state(self, key: Array, party_params: PartyParams, frame: Gaussian) -> ServerState:
        zeros = jnp.zeros(self.rank)
        shared = self.sharing.init(key, zeros) if self.rank else {}
        return self.first_server(ServerParams(party_params, shared), frame)

    def random_coupling(self, key: Array, dim: int) -> Array | None:
        """Return a small random share (dim, rank) in the shared noise.

        At zero the gradient would be zero as well, and parties would stay independent.
        """
        return COUPLING_SD * jax.random.normal(key, (dim, self.rank)) if self.rank else None

    @property
    def sharing(self) -> GlobalGuide[Array]:
        """Return the guide of the shared noise, which starts as a standard normal."""
        return Full(self.rank, 1.0)

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        key_theta, key_guide, key_coupling, key_state = jax.random.split(key, 4)
        kind = self.kind(data)
        theta = init_theta(kind.model, key_theta, data)
        if self.from_start:
            centre = jnp.zeros(self.model.shape)
            return self.client_at(key_guide, data, theta, None, centre)
        eta = self.guide(kind, data).init_global(key_guide)
        dim = kind.model.dim
        party_params = PartyParams(self.random_coupling(key_coupling, dim), eta, theta)
        return self._client_state(key_state, kind, party_params, identity((dim,)), jnp.zeros(()))

    def client_at(
        self,
        key: Array,
        data: SiloData,
        theta: dict[str, Any],
        start: PartyStart | None,
        centre: Array,
    ) -> ClientState:
        """Return a client's state at the start of a run; ``centre`` is its predictor there."""
        kind = self.kind(data)
        key_guide, key_state = jax.random.split(key)
        party_params, frame = self._initial_params(key_guide, kind, theta, start)
        # A centre as long as the rows is kept only by guides that use it.
        centre_or_zero = (
            centre if self.auxiliary is not None and self.auxiliary.centred else jnp.zeros(())
        )
        return self._client_state(key_state, kind, party_params, frame, centre_or_zero)

    def _client_state(
        self,
        key: Array,
        kind: PartyType,
        party_params: PartyParams,
        frame: Gaussian,
        centre: Array,
    ) -> ClientState:
        key_aux, key_noise = jax.random.split(key)
        # A placeholder with the shapes of the noise of a round.
        eps = self.guide(kind).globals.noise(key_noise, self.num_particles)
        psi = {} if self.auxiliary is None else self.auxiliary.init(key_aux)
        params = ClientParams(psi, party_params)
        return ClientState(
            params=params,
            opt_state=self.init_optim(params),
            course=convergence.init(party_params),
            noise=(eps, None if self.auxiliary is None else jnp.zeros(self.shape)),
            rows=None if self.batch_size is None else jnp.zeros(self.rows, jnp.int32),
            xi=jnp.zeros((self.num_particles, self.rank)) if self.rank else None,
            slope=jnp.zeros(self.shape) if self.power else None,
            frame=frame,
            centre=centre,
        )

    def coupling_of(self, kind: PartyType, party_params: PartyParams) -> Array | None:
        """Return the coefficients (dim, rank) of the shared noise in a party's guide, or None."""
        V = party_params.coupling
        # Without a start, V is in units of the standard noise already.
        if V is None or not self.from_start:
            return V
        return coupling.from_frame_units(self.guide(kind).globals, party_params.guide, V)

    def server_noise(self, key: Array) -> ServerNoise:
        """Return the noise of a round: of the server's latents, the shared one, and its rows."""
        key_draw, key_shared, key_rows = jax.random.split(key, 3)
        eps = self.guide(self.server).globals.noise(key_draw, self.num_particles)
        xi = self.sharing.noise(key_shared, self.num_particles) if self.rank else None
        if self.batch_size is None:
            return ServerNoise(eps, xi, None)
        # With replacement, by the server: all parties need the same rows.
        rows = jax.random.randint(key_rows, (self.rows,), 0, self.model.rows, jnp.int32)
        return ServerNoise(eps, xi, rows)

    def xi(self, shared: GuideParams, noise: Array | None) -> Array | None:
        """Return the shared noise, (draws, rank), from standard normals."""
        if noise is None:
            return None
        return jax.vmap(self.sharing.draw, (None, 0))(shared, noise)[0]

    def server_noise_of(self, key: Array, n: int) -> tuple[Array, Array | None]:
        """Return noise for ``n`` draws of the server's latents, and of the shared noise."""
        key_draw, key_shared = jax.random.split(key)
        eps = self.guide(self.server).globals.noise(key_draw, n)
        return eps, self.sharing.noise(key_shared, n) if self.rank else None

    def client_noise_of(self, key: Array, state: ClientState, n: int) -> Array:
        """Return noise for ``n`` draws of a client's latents."""
        return jax.random.normal(key, (n, *state.noise[0].shape[1:]))

    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[Array | None, Array]:
        eps, shared = self.server_noise_of(key, n)
        xi = self.xi(state.params.shared, shared)
        return xi, self._draws(self.server, self.shared(state), eps, xi)

    def client_draws(
        self, key: Array, sent: Array | None, state: ClientState, data: SiloData, n: int
    ) -> tuple[FederatedModel, dict[str, Any], Array]:
        kind, private = self.kind(data), self.private(state, data)
        z = self._draws(kind, private, self.client_noise_of(key, state, n), sent)
        return kind.model, private.theta, z

    def _draws(
        self, kind: PartyType, party: Shared | PartyState, noise: Array, xi: Array | None
    ) -> Array:
        guide, V = party.guide, party.guide.get("coupling")
        draw = partial(coupling.draw_in, party.frame, self.guide(kind).globals, guide["latents"], V)
        return jax.vmap(draw)(noise, xi)[0]

    def noise_of(self, key: Array, state: ClientState) -> tuple[Array, Array | None]:
        """Return new standard normals with the shapes of the noise in a client's state."""
        key_draw, key_z = jax.random.split(key)
        eps, tau = state.noise
        new = jax.random.normal(key_draw, eps.shape)
        return new, None if tau is None else jax.random.normal(key_z, tau.shape)

    def take_rows(self, data: SiloData, rows: Array | None) -> SiloData:
        """Return the data of the round's rows."""
        return data if rows is None else self.model.take(data, rows)

    def draw(
        self, params: ClientParams, xi: Array | None, state: ClientState, data: SiloData
    ) -> ClientDraw:
        """Return a client's draws, from the noise in its state and the shared noise ``xi``."""
        kind, data_here = self.kind(data), self.take_rows(data, state.rows)
        guide = self.guide(kind).globals
        psi, row_info = params.auxiliary, self.row_info(state, data_here)
        eta, V = params.own.guide, self.coupling_of(kind, params.own)
        # Parameters of all rows are the client's state; the round uses those of its rows.
        if self.auxiliary is not None and state.rows is not None:
            psi = self.auxiliary.take_rows(psi, state.rows)

        def one_particle(eps: Array, tau: Array | None, xi: Array | None) -> ClientDraw:
            z, log_q, b = coupling.draw_in(state.frame, guide, eta, V, eps, xi)
            g, log_p = self.model.predict(kind.model, params.own.theta, z, data_here)
            if self.auxiliary is None or tau is None:
                return ClientDraw(g, g, log_p - log_q, b)
            part, log_q_part = self.auxiliary.draw(psi, g, row_info, tau)
            log_ratio = self.log_noise(part, g) - log_q_part
            return ClientDraw(g, part, log_p - log_q + self.share * log_ratio, b)

        eps, tau = state.noise
        drawn = jax.vmap(one_particle)(eps, tau, xi)
        return drawn._replace(own=drawn.own.mean())

    def log_noise(self, part: Array, g: Array) -> Array:
        """Return the log density of auxiliary variables given the predictor."""
        return dist.Normal(g, self.rho).log_prob(part).sum()

    def row_info(self, state: ClientState, data: SiloData) -> RowInfo:
        """Return the inputs of the auxiliary variables' guide for the round's rows.

        The response's columns (rows, k) are those that clients have; k may be 0.
        """
        centre = state.centre
        if state.rows is not None and centre.ndim:
            centre = centre[state.rows]
        shared = data.kwargs.get("shared") or {}
        columns_known = [shared[n] for n in self.model.response if n in shared]
        columns = [y.reshape(len(y), -1) for y in columns_known if jnp.shape(y)[:1] == (self.rows,)]
        return RowInfo(centre, jnp.concatenate([jnp.zeros((self.rows, 0)), *columns], 1))

    def shared(self, state: ServerState) -> Shared:
        party_params, shared = state.params
        coupled = (
            {"coupling": self.coupling_of(self.server, party_params), "shared": shared}
            if self.rank
            else {}
        )
        return Shared(party_params.theta, {"latents": party_params.guide, **coupled}, state.frame)

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        """Return a client's parameters and guides."""
        psi, party_params = state.params
        coupled = {"coupling": self.coupling_of(self.kind(data), party_params)} if self.rank else {}
        guide = {"latents": party_params.guide, **({"auxiliary": psi} if psi else {}), **coupled}
        return PartyState(party_params.theta, guide, state.frame)

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        """Return a party's guides in units of its latents; ``data`` is None at the server."""
        kind = self.server if data is None else self.kind(data)
        guide, latents = self.guide(kind).globals, party.guide["latents"]
        return {**party.guide, "latents": guide.in_z(party.frame, latents)}
