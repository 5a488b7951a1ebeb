r"""Algorithm 1 of Hassan, Sutton, Mira and Mengersen 2024 (arXiv 2405.04043), and the exact split.

Each round, every client draws its parameters and what it adds to the sum, and sends that: its
auxiliary variables :math:`z_j` or, in the exact split, its predictor :math:`g_j` itself. The
server, which sees the sum alone, draws its own latents, takes its step, and sends the gradient of
the log likelihood with respect to the sum, which is the one with respect to each client's part
(equations 11 to 13).

The paper's server receives each :math:`z_j`; a sum is enough, so that secure aggregation may form
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import (
    Exchange,
    FederatedAlgorithm,
    Info,
    Replies,
    Reply,
    ascend,
)
from numpyro_fed.algorithms.vertical.base import ClientState, ServerState, Vertical
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Up(NamedTuple):
    """What a client sends: its part of the sum, and its own term of the bound."""

    part: Array
    own: Array


def augmented(v: Vertical, server_like: SiloData, local_steps: int = 1) -> FederatedAlgorithm:
    """Build the algorithm; without ``v.rho`` it is the exact split.

    ``server_like`` has the shapes of what the server holds. ``local_steps`` are steps of a client
    in a round, all but the first with its auxiliary variables where they are (section 5.3).
    """

    def init_server(key: Array) -> ServerState:
        return v.init_server(key, server_like)

    def broadcast(noise: Any, state: ServerState, who: Array, server_data: Any) -> tuple[Any, Any]:
        return noise[1], noise

    def server(
        state: ServerState, memo: Any, replies: Replies[Up], server_data: SiloData
    ) -> tuple[ServerState, Info]:
        eps, rows = memo
        data, guide = v.some(server_data, rows), v.guide(v.server).globals

        def bound(params: dict[str, Any], total: Array) -> Array:
            eta = v.placed(v.server, params["guide"], state.reference)

            def one(eps: Any, total: Array) -> Array:
                z, log_q = guide.draw(eta, eps)
                own, likelihood = v.model.log_server(params["theta"], z, total, data)
                return own - log_q + v.share * likelihood

            return jax.vmap(one)(eps, total).mean()

        value, (gradient, slope) = jax.value_and_grad(bound, (0, 1))(state.params, replies.up.part)
        params, opt_state = ascend(v.optim, gradient, state.opt_state, state.params)
        total = value + replies.up.own
        course = settling.follow(state.course, -total, params, standard=v.from_mode)
        after = state._replace(
            params=params, opt_state=opt_state, course=course, noise=memo, sent=slope
        )
        return after, Info(-total, replies.ok & all_finite((total, gradient, slope)))

    def step(
        noise: Any, down: Array, state: ClientState, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        return stepped(v, noise, state, data, jnp.zeros_like(down), down)

    exchanges = drawing(v, broadcast, server), stepping(v, step, local_steps)
    return FederatedAlgorithm(
        init_server,
        v.init_client,
        exchanges,
        v.shared,
        v.private,
        done=lambda state: settling.settled(state.course),
    )


def drawing(v: Vertical, broadcast: Any, server: Any) -> Exchange:
    """The exchange in which clients draw: down go the rows that take part."""

    def silo(
        noise: Any, down: Any, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        state = state._replace(noise=noise, rows=down)
        _, z, own = v.draw(state.params, state, data)
        return Reply(Up(z, own), all_finite((z, own))), state

    return Exchange(
        broadcast,
        silo,
        server,
        name="draw",
        server_noise=v.server_noise,
        silo_noise=v.noise_of,
    )


def stepping(v: Vertical, step: Any, local_steps: int) -> Exchange:
    """The exchange in which clients take their steps: down goes what the server has kept for it,
    and nothing comes back.
    """

    def broadcast(
        noise: Any, state: ServerState, who: Array, server_data: Any
    ) -> tuple[Array, tuple[()]]:
        return state.sent, ()

    def server(
        state: ServerState, memo: Any, replies: Replies, server_data: Any
    ) -> tuple[ServerState, Info]:
        return state, Info(jnp.zeros(()), replies.ok)

    def silo_noise(key: Array, state: ClientState) -> Any:
        keys = jax.random.split(key, local_steps - 1)
        return jax.vmap(lambda key: v.noise_of(key, state)[0])(keys) if local_steps > 1 else ()

    return Exchange(broadcast, step, server, name="step", silo_noise=silo_noise)


def stepped(
    v: Vertical, noise: Any, state: ClientState, data: SiloData, of_g: Array, of_z: Array
) -> tuple[Reply[tuple[()]], ClientState]:
    """A client's steps, given the gradient with respect to its predictor and to its part."""

    def draw(params: dict[str, Any]) -> Any:
        return v.draw(params, state, data)

    drawn, pull = jax.vjp(draw, state.params)
    (gradient,) = pull(drawn._replace(g=of_g, z=of_z, own=jnp.ones_like(drawn.own)))
    after = v.ascend(state, "own", gradient["own"])
    if v.auxiliary is not None:
        after = v.ascend(after, "auxiliary", gradient["auxiliary"])

    def one(state: ClientState, eps: Any) -> tuple[ClientState, None]:
        gradient = jax.grad(v.at_fixed)(state.params["own"], eps, drawn.z, state, data)
        return v.ascend(state, "own", gradient), None

    if jax.tree.leaves(noise):
        after, _ = jax.lax.scan(one, after, noise)
    return Reply((), all_finite(gradient)), after
