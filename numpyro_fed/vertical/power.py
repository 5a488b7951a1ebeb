r"""Algorithm 2 of Hassan, Sutton, Mira and Mengersen 2024: the power likelihood.

Algorithm 1 and the reference are in :mod:`numpyro_fed.vertical.algorithm`. Here the likelihood at
client ``j`` has the argument :math:`g_j + \sum_{k \ne j} z_k`, and the power :math:`1/J`. In each
round

1. clients send their :math:`z_j`;
2. the server sends the sum of these, and draws of its own latents;
3. clients reply with their term and its gradient :math:`v_j` with respect to the argument;
4. the server sends the sum of these. Client ``j`` subtracts its own and has
   :math:`\sum_{k \ne j} v_k`, the gradient with respect to its :math:`z_j` (equations 14 to 17).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply
from numpyro_fed.rounds.names import DRAW, STEP
from numpyro_fed.vertical.algorithm import (
    Down,
    ServerNoise,
    Stepped,
    SumGradients,
    Up,
    VFLAlgorithm,
)
from numpyro_fed.vertical.parties import (
    ClientState,
    PartyParams,
    PartyType,
    ServerState,
    server_arrays,
)

LIKELIHOOD = "likelihood"  # the name of the exchange in which clients evaluate theirs


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
class PowerVFL(VFLAlgorithm):
    """Algorithm 2 as pure functions: clients hold the server's arrays and evaluate likelihoods."""

    power: bool = True  # clients keep ``slope`` in their states

    @property
    def exchanges(self) -> tuple[Exchange[Any, Any, Any], ...]:
        drawing, stepping = super().exchanges
        return drawing, Exchange(LIKELIHOOD, self.answer_likelihood), stepping

    def _client_state(
        self, key: Array, party: PartyType, own: PartyParams, frame: Gaussian, centre: Array
    ) -> ClientState:
        state = super()._client_state(key, party, own, frame, centre)
        return state._replace(slope=jnp.zeros(self.shape))

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
        stepped: Stepped = ask(STEP, SumGradients(up.slope, None)).up
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
            def one_particle(z: Array, argument: Array) -> Array:
                return self.model.log_server(theta, z, argument, at_server)[1]

            return self.row_weight * jax.vmap(one_particle)(z, argument).mean() / self.num_clients

        value, (theta, z, slope) = jax.value_and_grad(term, (0, 1, 2))(down.theta, down.z, argument)
        up = Gradients(value, slope, theta, z)
        return Reply(up, all_finite(up)), state._replace(slope=slope)

    def client_slopes(self, slope: Array, state: ClientState) -> tuple[Array, Array]:
        # Its likelihood depends on its own predictor, not on its own auxiliary variables.
        return state.slope, slope - state.slope
