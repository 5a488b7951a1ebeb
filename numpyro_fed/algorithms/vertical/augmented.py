r"""Algorithm 1 of Hassan, Sutton, Mira and Mengersen 2024 (arXiv 2405.04043), and the exact split.

In each round

1. every client draws its latents and its part of the sum, and sends the part: its auxiliary
   variables :math:`z_j` or, in the exact split, its predictor :math:`g_j` itself;
2. the server, which receives the sum alone, draws its own latents, takes its step, and sends the
   gradient of the log likelihood with respect to the sum;
3. every client takes its step. The gradient with respect to the sum is also the one with respect
   to each part (equations 11 to 13).

The paper's server receives each :math:`z_j`. A sum is enough, and secure aggregation may form it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round
from numpyro_fed.algorithms.vertical.base import (
    ClientDraw,
    ClientParams,
    ClientState,
    PartyParams,
    ServerNoise,
    ServerState,
    SumMessage,
    Vertical,
)
from numpyro_fed.guides import coupling
from numpyro_fed.guides.coupling import CouplingStats
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

DRAW, STEP = "draw", "step"  # the names of the exchanges


class Down(NamedTuple):
    """A message of the server for a draw: the shared noise, and the indices of the round's rows."""

    xi: Array | None
    rows: Array | None


class Up(NamedTuple):
    """A client's message: its part of the sum, its term of the bound, and its coupling statistics.

    ``tie`` is the client's :class:`CouplingStats`, None where parties are independent.
    """

    part: Array
    own: Array
    tie: Any


class Stepped(NamedTuple):
    """A client's message after its step.

    It has the gradient with respect to the shared noise, and whether the client's guide has
    converged (0 or 1): the sum over clients counts them.
    """

    by_xi: Array | None
    resting: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Augmented(Vertical):
    """Algorithm 1 as pure functions; without ``rho`` it is the exact split."""

    @property
    def rounds(self) -> Round:
        """Return the round of a run."""
        return Round((self.drawing, self.stepping), self.round, self.server_noise)

    @property
    def drawing(self) -> Exchange[ClientState, Down, Up]:
        """Return the exchange in which clients draw their latents and parts of the sum."""

        def silo(
            noise: tuple[Array, Array | None], down: Down, state: ClientState, data: SiloData
        ) -> tuple[Reply[Up], ClientState]:
            state = state._replace(noise=noise, rows=down.rows, xi=down.xi)
            client_draw = self.draw(state.params, down.xi, state, data)
            V = self.coupling_of(self.kind(data), state.params.own)
            tie = None if V is None else CouplingStats(client_draw.b, V.T @ V)
            up = Up(client_draw.part, client_draw.own, tie)
            return Reply(up, all_finite(up)), state

        return Exchange(DRAW, silo, silo_noise=self.noise_of)

    @property
    def stepping(self) -> Exchange[ClientState, SumMessage, Stepped]:
        """Return the exchange in which clients take their steps.

        Replies say whether clients have converged, and have the gradient with respect to the shared
        noise, by which the server updates that noise's guide.
        """

        def silo_noise(key: Array, state: ClientState) -> Array | None:
            keys = jax.random.split(key, self.local_steps - 1)
            return jax.vmap(lambda key: self.noise_of(key, state)[0])(keys) if len(keys) else None

        return Exchange(STEP, self.step, silo_noise=silo_noise)

    def round(self, state: ServerState, noise: ServerNoise, ask: Ask) -> tuple[ServerState, Info]:
        """Ask clients for their parts of the sum, take a step, and send the gradient in the sum."""
        # ``pull`` carries all parties' gradients in the shared noise back to the parameters of its
        # guide, which only the server has.
        xi, pull = jax.vjp(lambda shared: self.xi(shared, noise.xi), state.params.shared)
        up: Up = ask(DRAW, Down(xi, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)

        def bound(params: PartyParams, xi: Array | None, sent: SumMessage) -> Array:
            return self.bound(params, noise.eps, xi, sent, up.tie, state, data)

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

    def bound(
        self,
        params: PartyParams,
        eps: Array,
        xi: Array | None,
        sent: SumMessage,
        tie: CouplingStats | None,
        state: ServerState,
        data: SiloData,
    ) -> Array:
        """Return the server's term of the bound, given the sum of the clients' parts.

        ``tie`` has the sums over clients of their coupling statistics.
        """
        guide = self.guide(self.server).globals
        eta, V = params.guide, self.coupling_of(self.server, params)

        def one_particle(eps: Array, xi: Array | None, sent: SumMessage) -> Array:
            z, log_q, b = coupling.draw_in(state.frame, guide, eta, V, eps, xi)
            prior, likelihood = self.model.log_server(params.theta, z, sent.part, data)
            value = prior - log_q + self.share * likelihood
            if V is None or b is None or tie is None:
                return value
            A = jax.lax.stop_gradient(V.T @ V) + tie.A
            return value - coupling.log_ratio(state.params.shared, sent.b + b, A)

        return jax.vmap(one_particle)(eps, xi, sent).mean()

    def step(
        self, noise: Array | None, down: SumMessage, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        return self.client_steps(noise, state, data, jnp.zeros_like(down.part), down)

    def client_steps(
        self,
        noise: Array | None,
        state: ClientState,
        data: SiloData,
        slope_g: Array,
        down: SumMessage,
    ) -> tuple[Reply[Stepped], ClientState]:
        """Take a client's steps, given the gradients in its predictor and its part of the sum."""

        def draw(params: ClientParams, xi: Array | None) -> ClientDraw:
            return self.draw(params, xi, state, data)

        # The derivatives of the first draw cannot be kept from one exchange to the next, so the
        # draw is repeated from the noise in the state.
        client_draw, pull = jax.vjp(draw, state.params, state.xi)
        slopes = ClientDraw(slope_g, down.part, jnp.ones_like(client_draw.own), down.b)
        gradient, by_xi = pull(slopes)
        after = self.ascend(state, "own", gradient.own)
        if self.auxiliary is not None:
            after = self.ascend(after, "auxiliary", gradient.auxiliary)

        def local_step(state: ClientState, eps: Array) -> tuple[ClientState, None]:
            gradient = jax.grad(self.bound_at_fixed_part)(
                state.params.own, eps, client_draw.part, state, data
            )
            return self.ascend(state, "own", gradient), None

        if noise is not None:
            after, _ = jax.lax.scan(local_step, after, noise)
        course = convergence.update(
            state.course, jnp.zeros(()), after.params.own, whitened=self.from_start
        )
        up = Stepped(by_xi, convergence.settled(course).astype(jnp.result_type(float)))
        return Reply(up, all_finite((gradient, by_xi))), after._replace(course=course)
