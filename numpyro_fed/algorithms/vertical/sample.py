"""One exchange in which all parties draw their latents together, each keeping its own draws."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies, Reply, Sampled
from numpyro_fed.algorithms.vertical.base import ClientState, ServerState, Vertical
from numpyro_fed.guides import coupling
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.vertical import Half
from numpyro_fed.trees import all_finite

AT_ONCE = 64  # draws whose values are computed together


def values_at(half: Half, theta: dict[str, Any], z: Array, data: SiloData) -> Sampled:
    """A party's latents on their own supports, at unconstrained draws (n, dim)."""
    return Sampled(jax.lax.map(lambda z: half.values(theta, z, data), z, batch_size=AT_ONCE))


def sample_name(n: int) -> str:
    """From which any party builds the exchange."""
    return json.dumps({"sample": n})


def sample(v: Vertical, n: int) -> Exchange:
    """Build the exchange, from states of a vertical algorithm to :class:`Sampled` at each client
    and unconstrained draws (n, dim) at the server, who sends the noise that parties share.
    """

    def drawn(guide: Any, params: Any, noise: Any, xi: Any) -> Array:
        draw = partial(coupling.draw, guide.globals, params["latents"], params.get("coupling"))
        return jax.vmap(draw)(noise, xi)[0]

    def broadcast(
        noise: Any, state: ServerState, who: Array, server_data: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        xi = v.xi(state.params["shared"], noise[1])
        return xi, (noise[0], xi)

    def silo(
        noise: Any, down: Any, state: ClientState, data: SiloData
    ) -> tuple[Reply[tuple[()]], Sampled]:
        kind, private = v.kind(data), v.private(state, data)
        z = drawn(v.guide(kind), private.guide, noise, down)
        sampled = values_at(kind.half, private.theta, z, data)
        return Reply((), all_finite(sampled)), sampled

    def server(
        state: ServerState, memo: Any, replies: Replies, server_data: Any
    ) -> tuple[Array, Info]:
        z = drawn(v.guide(v.server), v.shared(state).guide, *memo)
        return z, Info(jnp.zeros(()), replies.ok & all_finite(z))

    return Exchange(
        broadcast,
        silo,
        server,
        name=sample_name(n),
        server_noise=partial(v.server_draws, n=n),
        silo_noise=partial(v.client_draws, n=n),
    )
