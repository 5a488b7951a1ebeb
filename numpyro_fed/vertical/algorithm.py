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

Algorithm 2 has the power likelihood: at client ``j`` with the argument
:math:`g_j + \sum_{k \ne j} z_k`, to the power :math:`1/J`. In each round

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
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.guides.global_guides import Full, GlobalGuide, GuideParams
from numpyro_fed.numerics.gaussian import Gaussian, identity
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply, Round
from numpyro_fed.rounds.names import DRAW, STEP
from numpyro_fed.rounds.states import Shared
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.vertical import init_theta
from numpyro_fed.vertical.guides import AuxiliaryGuide, CouplingStats, draw_in, log_ratio
from numpyro_fed.vertical.parties import (
    AtServer,
    ClientDraw,
    ClientParams,
    ClientState,
    Down,
    Gradients,
    PartyParams,
    PartyState,
    PartyType,
    ServerNoise,
    ServerParams,
    ServerState,
    Stepped,
    Sums,
    Up,
    VerticalAlgorithm,
    server_arrays,
)

# Standard deviation of the first random shares in the shared noise, where a run does not start at
# the mode: small against one, so that parties start almost independent.
COUPLING_SD = 0.1
LIKELIHOOD = "likelihood"  # the name of the exchange in which clients evaluate theirs


@dataclass(frozen=True, eq=False, kw_only=True)
class VFLAlgorithm(VerticalAlgorithm):
    """Algorithm 1 as pure functions; without ``rho`` it is the exact split."""

    server: PartyType
    client_types: Mapping[Any, PartyType]  # by the signature of a client's data
    auxiliary: AuxiliaryGuide | None
    num_particles: int = 1
    batch_size: int | None = None  # rows in a round
    from_start: bool = False  # whether a run starts at a point that is searched first
    basis_width: int = 0  # of the basis in which the dependence between parties is found
    # Steps of a client in a round; after the first, auxiliary variables stay fixed (section 5.3).
    local_steps: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape (particles, rows, ...) of a client's part of the sum."""
        num_rows = self.batch_size or self.model.rows
        return (self.num_particles, num_rows, *self.model.shape[1:])

    @property
    def row_weight(self) -> float:
        """Return the weight of rows' terms: all rows over those of a minibatch."""
        return self.model.rows / self.shape[1]

    @property
    def dim(self) -> int:
        """Return the number of all parties' latents, without auxiliary variables."""
        return sum(party.dim for party in self.model.parties)

    @property
    def all_types(self) -> tuple[PartyType, ...]:
        """Return the server, and all types of clients."""
        return self.server, *self.client_types.values()

    def type_of(self, data: SiloData) -> PartyType:
        """Return the type of the clients that hold data of this shape."""
        return self.client_types[signature(data)]

    def take_rows(self, data: SiloData, rows: Array | None) -> SiloData:
        """Return the data of the round's rows."""
        return data if rows is None else self.model.take(data, rows)

    @property
    def shared_noise_guide(self) -> GlobalGuide[Array]:
        """Return the guide of the shared noise, which starts as a standard normal."""
        return Full(self.rank, 1.0)

    def coupling_of(self, party: PartyType, params: PartyParams) -> Array | None:
        """Return the coefficients (dim, rank) of the shared noise in a party's guide, or None."""
        coupling, guide, eta = params.coupling, party.guide, params.guide
        # Without a start they are in units of the standard noise already.
        if coupling is None or not self.from_start:
            return coupling
        # Parameters have them in units of the frame: so the guide may change its own spread without
        # changing the covariance that it has with others.
        centre = guide.draw(eta, jnp.zeros(len(coupling)))[0]
        push = partial(jax.jvp, lambda u: guide.standard_noise(eta, u), (centre,))
        return jax.vmap(lambda v: push((v,))[1], 1, 1)(coupling)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        return self.server_state(*self._first_params(self.server, key, self.zeros_at_server(data)))

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        party, centre = self.type_of(data), jnp.zeros(self.model.shape if self.from_start else ())
        return self.client_state(party, centre, *self._first_params(party, key, data))

    def _first_params(
        self, party: PartyType, key: Array, data: SiloData
    ) -> tuple[Array, PartyParams, Gaussian]:
        """Return a key for the rest of a party's first state, its parameters, and their frame."""
        key_theta, key_guide, key_coupling, key_state = jax.random.split(key, 4)
        theta, dim = init_theta(party.model, key_theta, data), party.model.dim
        if not self.from_start:
            eta = party.guide_at(data).init_global(key_guide)
            coupling = self.random_coupling(key_coupling, dim)
            return key_state, PartyParams(coupling, eta, theta), identity((dim,))
        # No other start was found.
        key_guide, key_state = jax.random.split(key_guide)
        zeros, coupling = jnp.zeros(dim), jnp.zeros((dim, self.rank)) if self.rank else None
        return key_state, *party.standard_normal(key_guide, theta, zeros, jnp.eye(dim), coupling)

    def server_state(self, key: Array, own: PartyParams, frame: Gaussian) -> ServerState:
        """Return the server's state at the start of a run."""
        noise_guide = self.shared_noise_guide.init(key, jnp.zeros(self.rank)) if self.rank else {}
        return self.first_server(ServerParams(own, noise_guide), frame)

    def client_state(
        self, party: PartyType, centre: Array, key: Array, own: PartyParams, frame: Gaussian
    ) -> ClientState:
        """Return a client's state at the start of a run; ``centre`` is its predictor there."""
        key_aux, key_noise = jax.random.split(key)
        # A placeholder with the shapes of the noise of a round.
        eps = party.guide.noise(key_noise, self.num_particles)
        params = ClientParams({} if self.auxiliary is None else self.auxiliary.init(key_aux), own)
        # A centre as long as the rows is kept only by guides that use it.
        uses_centre = self.auxiliary is not None and not self.auxiliary.hidden
        return ClientState(
            params=params,
            opt_state=self.init_optim(params),
            course=convergence.init(own),
            noise=(eps, None if self.auxiliary is None else jnp.zeros(self.shape)),
            rows=None if self.batch_size is None else jnp.zeros(self.shape[1], jnp.int32),
            xi=jnp.zeros((self.num_particles, self.rank)) if self.rank else None,
            frame=frame,
            centre=centre if uses_centre else jnp.zeros(()),
            slope=jnp.zeros(self.shape) if self.power else None,
        )

    def random_coupling(self, key: Array, dim: int) -> Array | None:
        """Return a small random share (dim, rank) in the shared noise.

        At zero the gradient would be zero as well, and parties would stay independent.
        """
        return COUPLING_SD * jax.random.normal(key, (dim, self.rank)) if self.rank else None

    @property
    def round(self) -> Round:
        drawing = Exchange(DRAW, self.answer_draw, silo_noise=self.new_draw_noise)
        stepping = Exchange(STEP, self.answer_step, silo_noise=self.local_step_noise)
        return Round((drawing, stepping), self.server_round, self.round_noise)

    def round_noise(self, key: Array) -> ServerNoise:
        """Return the noise of the server in a round, and the indices of the round's rows."""
        key_draw, key_shared, key_rows = jax.random.split(key, 3)
        eps = self.server.guide.noise(key_draw, self.num_particles)
        xi = self.shared_noise_guide.noise(key_shared, self.num_particles) if self.rank else None
        if self.batch_size is None:
            return ServerNoise(eps, xi, None)
        # With replacement, by the server: all parties need the same rows.
        num_rows = self.shape[1]
        rows = jax.random.randint(key_rows, (num_rows,), 0, self.model.rows, jnp.int32)
        return ServerNoise(eps, xi, rows)

    def new_draw_noise(self, key: Array, state: ClientState) -> tuple[Array, Array | None]:
        """Return new standard normals with the shapes of the noise in a client's state."""
        key_draw, key_z = jax.random.split(key)
        eps, tau = state.noise
        new = jax.random.normal(key_draw, eps.shape)
        return new, None if tau is None else jax.random.normal(key_z, tau.shape)

    def local_step_noise(self, key: Array, state: ClientState) -> Array | None:
        """Return the noise of a client's steps after the first one of a round."""
        keys = jax.random.split(key, self.local_steps - 1)
        return jax.vmap(lambda key: self.new_draw_noise(key, state)[0])(keys) if len(keys) else None

    def answer_draw(
        self, noise: tuple[Array, Array | None], down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        """Draw a client's latents and its part of the sum, and send the part."""
        state = state._replace(noise=noise, rows=down.rows, xi=down.xi)
        drawn = self.client_draw(state.params, down.xi, state, data)
        coupling = self.coupling_of(self.type_of(data), state.params.own)
        stat, stats = drawn.coupling_stat, None
        if coupling is not None and stat is not None:
            stats = CouplingStats(stat, coupling.T @ coupling)
        up = Up(drawn.part, drawn.term, stats)
        return Reply(up, all_finite(up)), state

    def server_round(
        self, state: ServerState, noise: ServerNoise, ask: Ask
    ) -> tuple[ServerState, Info]:
        """Ask clients for their parts of the sum, take a step, and send the gradient in the sum."""
        # ``pull`` carries all parties' gradients in the shared noise back to the parameters of its
        # guide, which only the server has.
        noise_guide = state.params.shared
        xi, pull = jax.vjp(lambda guide: self.draw_shared_noise(guide, noise.xi), noise_guide)
        up: Up = ask(DRAW, Down(xi, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)

        def server_term(params: PartyParams, xi: Array | None, sums: Sums) -> Array:
            """Return the server's term of the bound, given the sum of the clients' parts."""
            guide, eta = self.server.guide, params.guide
            coupling = self.coupling_of(self.server, params)

            def one_particle(eps: Array, xi: Array | None, sums: Sums) -> Array:
                z, log_q, stat = draw_in(state.frame, guide, eta, coupling, eps, xi)
                prior, likelihood = self.model.log_server(params.theta, z, sums.part, data)
                value = prior - log_q + self.row_weight * likelihood
                if coupling is None or stat is None or sums.b is None or up.coupling is None:
                    return value
                A = jax.lax.stop_gradient(coupling.T @ coupling) + up.coupling.A
                return value - log_ratio(noise_guide, sums.b + stat, A)

            return jax.vmap(one_particle)(noise.eps, xi, sums).mean()

        sums = Sums(up.part, None if up.coupling is None else up.coupling.b)
        value, (gradient, by_xi, slope) = jax.value_and_grad(server_term, (0, 1, 2))(
            state.params.own, xi, sums
        )
        after = self.ascend(state, "own", gradient)
        bound = value + up.term
        course = convergence.update(state.course, -bound, after.params, whitened=self.from_start)
        stepped: Stepped = ask(STEP, slope).up
        after = after._replace(course=course, resting=stepped.resting)
        if self.rank:
            after = self.ascend(after, "shared", pull(by_xi + stepped.by_xi)[0])
        return after, Info(-bound, all_finite((bound, gradient, by_xi, slope)))

    def answer_step(
        self, noise: Array | None, down: Sums, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        """Take a client's steps, given the gradients in its predictor and its part of the sum."""
        # The derivatives of the first draw cannot be kept from one exchange to the next, so the
        # draw is repeated from the noise in the state.
        drawn, pull = jax.vjp(
            lambda params, xi: self.client_draw(params, xi, state, data), state.params, state.xi
        )
        # Under the power likelihood a client's term depends on its own predictor, and not on its
        # own auxiliary variables.
        slope_g = state.slope if self.power else jnp.zeros_like(down.part)
        slopes = ClientDraw(slope_g, down.part - slope_g, jnp.ones_like(drawn.term), down.b)
        gradient, by_xi = pull(slopes)
        after = self.ascend(state, "own", gradient.own)
        if self.auxiliary is not None:
            after = self.ascend(after, "auxiliary", gradient.auxiliary)

        party, batch = self.type_of(data), self.take_rows(data, state.rows)

        def at_fixed_part(own: PartyParams, eps: Array) -> Array:
            """Return the client's term of the bound, its auxiliary variables as they are."""

            def one_particle(eps: Array, part: Array) -> Array:
                z, log_q, _ = draw_in(state.frame, party.guide, own.guide, None, eps, None)
                g, prior = self.model.predict(party.model, own.theta, z, batch)
                log_part = dist.Normal(g, self.rho).log_prob(part).sum()
                return prior - log_q + self.row_weight * log_part

            return jax.vmap(one_particle)(eps, drawn.part).mean()

        if noise is not None:
            slope = jax.grad(at_fixed_part)
            after, _ = jax.lax.scan(
                lambda at, eps: (self.ascend(at, "own", slope(at.params.own, eps)), None),
                after,
                noise,
            )
        course = convergence.update(
            state.course, jnp.zeros(()), after.params.own, whitened=self.from_start
        )
        up = Stepped(by_xi, convergence.settled(course).astype(jnp.result_type(float)))
        return Reply(up, all_finite((gradient, by_xi))), after._replace(course=course)

    def client_draw(
        self, params: ClientParams, xi: Array | None, state: ClientState, data: SiloData
    ) -> ClientDraw:
        """Return a client's draws, from the noise in its state and the shared noise ``xi``."""
        party, batch = self.type_of(data), self.take_rows(data, state.rows)
        psi, known, num_rows = params.auxiliary, state.centre, self.shape[1]
        eta, coupling = params.own.guide, self.coupling_of(party, params.own)
        if self.auxiliary is not None and self.auxiliary.hidden:
            # The response's columns (rows, k) are those that clients have; k may be 0.
            at_server = server_arrays(batch)
            responses = [at_server[n] for n in self.model.response if n in at_server]
            columns = [y.reshape(len(y), -1) for y in responses if jnp.shape(y)[:1] == (num_rows,)]
            known = jnp.concatenate([jnp.zeros((num_rows, 0)), *columns], 1)
        elif self.auxiliary is not None and state.rows is not None:
            # Parameters of all rows are the client's state; the round uses those of its rows.
            psi = jax.tree.map(lambda a: a[state.rows], psi)
            known = known[state.rows] if known.ndim else known

        def one_particle(eps: Array, tau: Array | None, xi: Array | None) -> ClientDraw:
            z, log_q, stat = draw_in(state.frame, party.guide, eta, coupling, eps, xi)
            g, log_p = self.model.predict(party.model, params.own.theta, z, batch)
            if self.auxiliary is None or tau is None:
                return ClientDraw(g, g, log_p - log_q, stat)
            part, log_q_part = self.auxiliary.draw(psi, g, known, tau)
            log_part = dist.Normal(g, self.rho).log_prob(part).sum() - log_q_part
            return ClientDraw(g, part, log_p - log_q + self.row_weight * log_part, stat)

        eps, tau = state.noise
        drawn = jax.vmap(one_particle)(eps, tau, xi)
        return drawn._replace(term=drawn.term.mean())

    def draw_shared_noise(self, noise_guide: GuideParams, noise: Array | None) -> Array | None:
        """Return the shared noise, (draws, rank), from standard normals."""
        if noise is None:
            return None
        return jax.vmap(self.shared_noise_guide.draw, (None, 0))(noise_guide, noise)[0]

    def shared(self, state: ServerState) -> Shared:
        own, noise_guide = state.params
        guide: dict[str, Any] = {"latents": own.guide}
        if self.rank:
            guide |= {"coupling": self.coupling_of(self.server, own), "shared": noise_guide}
        return Shared(own.theta, guide, state.frame)

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        psi, own = state.params
        guide: dict[str, Any] = {"latents": own.guide}
        if psi:
            guide |= {"auxiliary": psi}
        if self.rank:
            guide |= {"coupling": self.coupling_of(self.type_of(data), own)}
        return PartyState(own.theta, guide, state.frame)

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        guide = (self.server if data is None else self.type_of(data)).guide
        return {**party.guide, "latents": guide.in_z(party.frame, party.guide["latents"])}

    def server_noise(self, key: Array, state: ServerState, n: int) -> tuple[Array, Array | None]:
        """Return noise for ``n`` draws of the server's latents, and the shared noise."""
        key_draw, key_shared = jax.random.split(key)
        noise = self.shared_noise_guide.noise(key_shared, n) if self.rank else None
        eps = self.server.guide.noise(key_draw, n)
        return eps, self.draw_shared_noise(state.params.shared, noise)

    def client_noise(self, key: Array, state: ClientState, n: int) -> Array:
        """Return noise for ``n`` draws of a client's latents."""
        return jax.random.normal(key, (n, *state.noise[0].shape[1:]))

    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[Array | None, Array]:
        eps, xi = self.server_noise(key, state, n)
        return xi, _latents(self.server, self.shared(state), eps, xi)

    def client_draws(
        self, key: Array, sent: Array | None, state: ClientState, data: SiloData, n: int
    ) -> tuple[FederatedModel, dict[str, Any], Array]:
        party, private = self.type_of(data), self.private(state, data)
        z = _latents(party, private, self.client_noise(key, state, n), sent)
        return party.model, private.theta, z


def _latents(
    party: PartyType, fitted: Shared | PartyState, noise: Array, xi: Array | None
) -> Array:
    """Return draws (n, dim) of a party's latents."""
    eta, coupling = fitted.guide["latents"], fitted.guide.get("coupling")
    draw = partial(draw_in, fitted.frame, party.guide, eta, coupling)
    return jax.vmap(draw)(noise, xi)[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class PowerVFL(VFLAlgorithm):
    """Algorithm 2 as pure functions: clients hold the server's arrays and evaluate likelihoods."""

    power: bool = True  # clients keep ``slope`` in their states

    @property
    def round(self) -> Round:
        usual = super().round
        drawing, stepping = usual.exchanges
        asked = drawing, Exchange(LIKELIHOOD, self.answer_likelihood), stepping
        return replace(usual, exchanges=asked)

    def server_round(
        self, state: ServerState, noise: ServerNoise, ask: Ask
    ) -> tuple[ServerState, Info]:
        """Ask clients for their auxiliary variables, then for their likelihoods, and step."""
        drawn: Up = ask(DRAW, Down(None, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)

        def latents(own: PartyParams) -> tuple[Array, Array]:
            """Return draws of the server's latents, and its own term of the bound."""
            _, z, log_q = self.server.guide.draws(state.frame, own.guide, noise.eps)
            total = jnp.zeros(self.shape[1:])
            log_p = jax.vmap(lambda z: self.model.log_server(own.theta, z, total, data)[0])(z)
            return z, (log_p - log_q).mean()

        (z, value), pull = jax.vjp(latents, state.params.own)
        up: Gradients = ask(LIKELIHOOD, AtServer(drawn.part, self.shared(state).theta, z)).up
        (gradient,) = pull((up.z, jnp.ones_like(value)))
        theta = jax.tree.map(jnp.add, gradient.theta, up.theta)
        after = self.ascend(state, "own", gradient._replace(theta=theta))
        loss = -(value + up.term + drawn.term)
        course = convergence.update(state.course, loss, after.params, whitened=self.from_start)
        stepped: Stepped = ask(STEP, Sums(up.slope, None)).up
        after = after._replace(course=course, resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, up.slope)))

    def answer_likelihood(
        self, noise: object, down: AtServer, state: ClientState, data: SiloData
    ) -> tuple[Reply[Gradients], ClientState]:
        """Send a client's likelihood at its own predictor and the others' auxiliary variables."""
        drawn = self.client_draw(state.params, None, state, data)
        batch = self.take_rows(data, state.rows)
        at_server = SiloData(server_arrays(batch))
        argument = drawn.g + down.total - drawn.part

        def term(theta: dict[str, Any], z: Array, argument: Array) -> Array:
            log_p = jax.vmap(lambda z, g: self.model.log_server(theta, z, g, at_server)[1])
            return self.row_weight * log_p(z, argument).mean() / len(self.model.clients)

        value, (theta, z, slope) = jax.value_and_grad(term, (0, 1, 2))(down.theta, down.z, argument)
        up = Gradients(value, slope, theta, z)
        return Reply(up, all_finite(up)), state._replace(slope=slope)
