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
from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info, Replies, Reply
from numpyro_fed.algorithms.vertical.base import (
    ClientState,
    Drawn,
    Sent,
    ServerNoise,
    ServerState,
    Vertical,
)
from numpyro_fed.guides import coupling
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Down(NamedTuple):
    """What clients need for a draw: the noise that all share, and the rows that take part."""

    xi: Any
    rows: Any


class Up(NamedTuple):
    """What a client sends: its part of the sum, its own term of the bound, and what ties it to
    other parties.
    """

    part: Array
    own: Array
    tie: Any


class Stepped(NamedTuple):
    """What a client says of its step: the gradient with respect to the noise that all share, and
    whether its guide has come to rest (0 or 1).
    """

    by_xi: Any
    resting: Array


def augmented(v: Vertical, server_like: SiloData, local_steps: int = 1) -> FederatedAlgorithm:
    """Build the algorithm; without ``v.rho`` it is the exact split.

    ``server_like`` has the shapes of what the server holds. ``local_steps`` are steps of a client
    in a round, all but the first with its auxiliary variables where they are (section 5.3).
    """

    def init_server(key: Array) -> ServerState:
        return v.init_server(key, server_like)

    def broadcast(
        noise: ServerNoise, state: ServerState, who: Array, server_data: Any
    ) -> tuple[Down, ServerNoise]:
        return Down(v.xi(state.params["shared"], noise.xi), noise.rows), noise

    def server(
        state: ServerState, memo: ServerNoise, replies: Replies[Up], server_data: SiloData
    ) -> tuple[ServerState, Info]:
        data, guide = v.some(server_data, memo.rows), v.guide(v.server).globals
        xi = v.xi(state.params["shared"], memo.xi)

        def bound(own: dict[str, Any], xi: Any, sent: Sent) -> Array:
            eta, V = v.placed(v.server, own, state.reference)

            def one(eps: Any, xi: Any, sent: Sent) -> Array:
                z, log_q, b = coupling.draw(guide, eta, V, eps, xi)
                prior, likelihood = v.model.log_server(own["theta"], z, sent.part, data)
                value = prior - log_q + v.share * likelihood
                if V is None:
                    return value
                A = jax.lax.stop_gradient(V.T @ V) + replies.up.tie.A
                return value - coupling.log_ratio(state.params["shared"], sent.b + b, A)

            return jax.vmap(one)(memo.eps, xi, sent).mean()

        up = replies.up
        sums = Sent(up.part, up.tie.b if v.rank else ())
        value, (gradient, by_xi, slope) = jax.value_and_grad(bound, (0, 1, 2))(
            state.params["own"], xi, sums
        )
        after = v.ascend(state, "own", gradient)
        total = value + up.own
        course = settling.follow(state.course, -total, after.params, standard=v.from_reference)
        after = after._replace(course=course, noise=memo, sent=slope, by_xi=by_xi)
        return after, Info(-total, replies.ok & all_finite((total, gradient, by_xi, slope)))

    def step(
        noise: Any, down: Sent, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        return stepped(v, noise, state, data, jnp.zeros_like(down.part), down)

    exchanges = drawing(v, broadcast, server), stepping(v, step, local_steps)
    return FederatedAlgorithm(
        init_server,
        v.init_client,
        exchanges,
        v.shared,
        v.own,
        done=v.done,
    )


def drawing(v: Vertical, broadcast: Any, server: Any) -> Exchange:
    """The exchange in which clients draw."""

    def silo(
        noise: Any, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        state = state._replace(noise=noise, rows=down.rows, xi=down.xi)
        drawn = v.draw(state.params, down.xi, state, data)
        tie: Any = ()
        if v.rank:
            _, V = v.placed(v.kind(data), state.params["own"], state.reference)
            tie = coupling.Tie(drawn.b, V.T @ V)
        up = Up(drawn.z, drawn.own, tie)
        return Reply(up, all_finite(up)), state

    return Exchange(
        broadcast,
        silo,
        server,
        name="draw",
        server_noise=v.server_noise,
        silo_noise=v.noise_of,
    )


def stepping(v: Vertical, step: Any, local_steps: int) -> Exchange:
    """The exchange in which clients take their steps: down goes what the server has kept for it;
    back come whether they are at rest, and the gradient with respect to the noise that all share,
    by which the server moves the guide of that.
    """

    def broadcast(
        noise: Any, state: ServerState, who: Array, server_data: Any
    ) -> tuple[Sent, tuple[()]]:
        return state.sent, ()

    def server(
        state: ServerState, memo: Any, replies: Replies[Stepped], server_data: Any
    ) -> tuple[ServerState, Info]:
        after = state._replace(resting=replies.up.resting)
        if v.rank:
            _, pull = jax.vjp(lambda shared: v.xi(shared, state.noise.xi), state.params["shared"])
            (gradient,) = pull(state.by_xi + replies.up.by_xi)
            after = v.ascend(after, "shared", gradient)
        return after, Info(jnp.zeros(()), replies.ok)

    def silo_noise(key: Array, state: ClientState) -> Any:
        keys = jax.random.split(key, local_steps - 1)
        return jax.vmap(lambda key: v.noise_of(key, state)[0])(keys) if local_steps > 1 else ()

    return Exchange(broadcast, step, server, name="step", silo_noise=silo_noise)


def stepped(
    v: Vertical, noise: Any, state: ClientState, data: SiloData, of_g: Array, down: Sent
) -> tuple[Reply[Stepped], ClientState]:
    """A client's steps, given the gradient with respect to its predictor and to what it sent."""

    def draw(params: dict[str, Any], xi: Any) -> Any:
        return v.draw(params, xi, state, data)

    drawn, pull = jax.vjp(draw, state.params, state.xi)
    gradient, by_xi = pull(Drawn(of_g, down.part, jnp.ones_like(drawn.own), down.b))
    after = v.ascend(state, "own", gradient["own"])
    if v.auxiliary is not None:
        after = v.ascend(after, "auxiliary", gradient["auxiliary"])

    def one(state: ClientState, eps: Any) -> tuple[ClientState, None]:
        gradient = jax.grad(v.at_fixed)(state.params["own"], eps, drawn.z, state, data)
        return v.ascend(state, "own", gradient), None

    if jax.tree.leaves(noise):
        after, _ = jax.lax.scan(one, after, noise)
    course = settling.follow(
        state.course, jnp.zeros(()), after.params["own"], standard=v.from_reference
    )
    up = Stepped(by_xi, settling.settled(course).astype(jnp.result_type(float)))
    return Reply(up, all_finite((gradient, by_xi))), after._replace(course=course)
