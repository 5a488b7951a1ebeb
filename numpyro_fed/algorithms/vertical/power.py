r"""Algorithm 2 of Hassan, Sutton, Mira and Mengersen 2024 (arXiv 2405.04043): power likelihoods.

The likelihood at client ``j`` sees :math:`g_j + \sum_{k \ne j} z_k`, to the power :math:`1/J`.
Clients send their :math:`z_j`; the server sends their sum and draws of its own latents; clients
answer with their term and its gradient with respect to that argument, :math:`v_j`; the server sends
the sum of these, from which client ``j`` has :math:`\sum_{k \ne j} v_k`, the gradient with respect
to its :math:`z_j` (equations 14 to 17).

The paper sends all :math:`z_j` and a gradient for each of them; since a likelihood sees others'
auxiliary variables through their sum alone, sums are enough in both exchanges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info, Replies, Reply
from numpyro_fed.algorithms.vertical.augmented import Down as Rows
from numpyro_fed.algorithms.vertical.augmented import Stepped, drawing, stepped, stepping
from numpyro_fed.algorithms.vertical.augmented import Up as Drawn
from numpyro_fed.algorithms.vertical.base import (
    ClientState,
    Sent,
    ServerNoise,
    ServerState,
    Vertical,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Down(NamedTuple):
    """The sum of auxiliary variables, the server's parameters and draws of its latents."""

    total: Array
    theta: dict[str, Any]
    z: Array


class Up(NamedTuple):
    """A client's term, its gradient with respect to what the likelihood sees, and to the server's
    parameters and draws.
    """

    term: Array
    slope: Array
    theta: dict[str, Any]
    z: Array


def power(
    v: Vertical, num_clients: int, server_like: SiloData, local_steps: int = 1
) -> FederatedAlgorithm:
    """Build the algorithm; clients hold the server's arrays as ``shared``."""
    guide = v.guide(v.server).globals

    def init_server(key: Array) -> ServerState:
        return v.init_server(key, server_like)

    def choose(
        noise: ServerNoise, state: ServerState, who: Array, server_data: Any
    ) -> tuple[Rows, ServerNoise]:
        return Rows((), noise.rows), noise

    def gathered(
        state: ServerState, memo: Any, replies: Replies[Drawn], server_data: SiloData
    ) -> tuple[ServerState, Info]:
        after = state._replace(noise=memo, sent=Sent(replies.up.part, ()), own=replies.up.own)
        return after, Info(jnp.zeros(()), replies.ok & all_finite(replies.up))

    def draw(
        params: dict[str, Any], reference: Any, eps: Any, data: SiloData
    ) -> tuple[Array, Array]:
        """Draws of the server's latents, and its own term of the bound."""
        eta, _ = v.placed(v.server, params, reference)
        z, log_q = jax.vmap(guide.draw, (None, 0))(eta, eps)

        def own(z: Array) -> Array:
            total = jnp.zeros(v.shape[1:])
            return v.model.log_server(params["theta"], z, total, data)[0]

        return z, (jax.vmap(own)(z) - log_q).mean()

    def tell(noise: Any, state: ServerState, who: Array, server_data: Any) -> tuple[Down, Any]:
        theta, eta, *_ = v.shared(state)
        z, _ = jax.vmap(guide.draw, (None, 0))(eta["latents"], state.noise.eps)
        return Down(state.sent.part, theta, z), ()

    def likelihood(
        noise: Any, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        drawn = v.draw(state.params, (), state, data)
        held = v.some(data, state.rows)
        at_server = SiloData(dict(held.kwargs["shared"]))
        seen = drawn.g + down.total - drawn.z

        def term(theta: Any, z: Array, seen: Array) -> Array:
            def one(z: Array, seen: Array) -> Array:
                return v.model.log_server(theta, z, seen, at_server)[1]

            return v.share * jax.vmap(one)(z, seen).mean() / num_clients

        value, (theta, z, slope) = jax.value_and_grad(term, (0, 1, 2))(down.theta, down.z, seen)
        up = Up(value, slope, theta, z)
        return Reply(up, all_finite(up)), state._replace(slope=slope)

    def update(
        state: ServerState, memo: Any, replies: Replies[Up], server_data: SiloData
    ) -> tuple[ServerState, Info]:
        data, up = v.some(server_data, state.noise.rows), replies.up
        (_, value), pull = jax.vjp(
            lambda own: draw(own, state.reference, state.noise.eps, data), state.params["own"]
        )
        (gradient,) = pull((up.z, jnp.ones_like(value)))
        theta = jax.tree.map(jnp.add, gradient["theta"], up.theta)
        after = v.ascend(state, "own", {**gradient, "theta": theta})
        loss = -(value + up.term + state.own)
        course = settling.follow(state.course, loss, after.params, standard=v.from_reference)
        after = after._replace(course=course, sent=Sent(up.slope, ()))
        return after, Info(loss, replies.ok & all_finite((loss, gradient, up.slope)))

    def step(
        noise: Any, down: Sent, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        others = down._replace(part=down.part - state.slope)
        return stepped(v, noise, state, data, state.slope, others)

    exchanges = (
        drawing(v, choose, gathered),
        Exchange(tell, likelihood, update, name="likelihood"),
        stepping(v, step, local_steps),
    )
    return FederatedAlgorithm(
        init_server,
        v.init_client,
        exchanges,
        v.shared,
        v.own,
        done=v.done,
    )
