r"""Algorithm 2 of Hassan, Sutton, Mira and Mengersen 2024 (arXiv 2405.04043): power likelihoods.

The likelihood at client ``j`` has the argument :math:`g_j + \sum_{k \ne j} z_k`, and the power
:math:`1/J`. In each round

1. clients send their :math:`z_j`;
2. the server sends the sum of these, and draws of its own latents;
3. clients reply with their term and its gradient :math:`v_j` with respect to the argument;
4. the server sends the sum of these. Client ``j`` subtracts its own and has
   :math:`\sum_{k \ne j} v_k`, the gradient with respect to its :math:`z_j` (equations 14 to 17).

The paper sends all :math:`z_j`, and a gradient for each of them. A likelihood depends on the
others' auxiliary variables by their sum alone, so sums are enough in both exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round
from numpyro_fed.algorithms.vertical.augmented import (
    DRAW,
    STEP,
    Stepped,
    Vertical,
)
from numpyro_fed.algorithms.vertical.augmented import Down as Rows
from numpyro_fed.algorithms.vertical.augmented import Up as Drawn
from numpyro_fed.algorithms.vertical.base import (
    ClientState,
    PartyParams,
    ServerNoise,
    ServerState,
    SumMessage,
)
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

LIKELIHOOD = "likelihood"  # the name of the exchange


class Down(NamedTuple):
    """A message of the server: the sum of auxiliary variables, its parameters and latents."""

    total: Array
    theta: dict[str, Any]
    z: Array


class Up(NamedTuple):
    """A client's message: its likelihood term, and gradients of it."""

    term: Array
    slope: Array  # with respect to the likelihood's argument
    theta: dict[str, Any]  # with respect to the server's parameters, and to its draws
    z: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Power(Vertical):
    """Algorithm 2 as pure functions; clients hold the server's arrays as ``shared``."""

    power: bool = True

    @property
    def rounds(self) -> Round:
        """Return the round of a run."""
        likelihood = Exchange(LIKELIHOOD, self.likelihood)
        return Round((self.drawing, likelihood, self.stepping), self.round, self.server_noise)

    def draw_server(
        self, params: PartyParams, frame: Gaussian, eps: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return draws of the server's latents, and its own term of the bound."""
        _, z, log_q = self.guide(self.server).globals.draws(frame, params.guide, eps)

        def own_log_p(z: Array) -> Array:
            total = jnp.zeros(self.shape[1:])
            return self.model.log_server(params.theta, z, total, data)[0]

        return z, (jax.vmap(own_log_p)(z) - log_q).mean()

    def likelihood(
        self, noise: object, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        drawn = self.draw(state.params, None, state, data)
        batch = self.take_rows(data, state.rows)
        at_server = SiloData(dict(batch.kwargs["shared"]))
        argument = drawn.g + down.total - drawn.part

        def term(theta: dict[str, Any], z: Array, argument: Array) -> Array:
            def one_particle(z: Array, argument: Array) -> Array:
                return self.model.log_server(theta, z, argument, at_server)[1]

            return self.share * jax.vmap(one_particle)(z, argument).mean() / self.num_clients

        value, (theta, z, slope) = jax.value_and_grad(term, (0, 1, 2))(down.theta, down.z, argument)
        up = Up(value, slope, theta, z)
        return Reply(up, all_finite(up)), state._replace(slope=slope)

    def round(self, state: ServerState, noise: ServerNoise, ask: Ask) -> tuple[ServerState, Info]:
        clients: Drawn = ask(DRAW, Rows(None, noise.rows)).up
        data = self.take_rows(ask.server_data, noise.rows)
        (z, value), pull = jax.vjp(
            lambda server_params: self.draw_server(server_params, state.frame, noise.eps, data),
            state.params.own,
        )
        up: Up = ask(LIKELIHOOD, Down(clients.part, self.shared(state).theta, z)).up
        (gradient,) = pull((up.z, jnp.ones_like(value)))
        theta = jax.tree.map(jnp.add, gradient.theta, up.theta)
        after = self.ascend(state, "own", gradient._replace(theta=theta))
        loss = -(value + up.term + clients.own)
        course = convergence.update(state.course, loss, after.params, whitened=self.from_start)
        stepped: Stepped = ask(STEP, SumMessage(up.slope, None)).up
        after = after._replace(course=course, resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, up.slope)))
