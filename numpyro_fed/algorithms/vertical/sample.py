"""The exchange in which all parties draw their latents jointly; each keeps its own draws."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round, Sampled, Shared
from numpyro_fed.algorithms.vertical.base import (
    ClientState,
    PartyState,
    PartyType,
    ServerState,
    Vertical,
)
from numpyro_fed.guides import coupling
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.vertical import PartyModel
from numpyro_fed.trees import all_finite

SAMPLE = "sample"  # the name of the exchange
AT_ONCE = 64  # draws whose values are computed side by side; more of them use more memory


def values_at(party_model: PartyModel, theta: dict[str, Any], z: Array, data: SiloData) -> Sampled:
    """Return a party's latents on their own supports, at unconstrained draws (n, dim)."""
    return Sampled(jax.lax.map(lambda z: party_model.values(theta, z, data), z, batch_size=AT_ONCE))


def sample_settings(n: int) -> str:
    """Return the settings of the exchange, from which any party builds it."""
    return json.dumps({"num_draws": n})


def sample(v: Vertical, n: int) -> Round:
    """Return the round in which all parties draw their latents ``n`` times.

    It leads from states of a vertical algorithm to :class:`Sampled` at each client, and to
    unconstrained draws (n, dim) at the server. The server sends the shared noise.
    """

    def draw_latents(
        kind: PartyType, party: Shared | PartyState, noise: Array, xi: Array | None
    ) -> Array:
        guide, V = party.guide, party.guide.get("coupling")
        draw = partial(coupling.draw_in, party.frame, v.guide(kind).globals, guide["latents"], V)
        return jax.vmap(draw)(noise, xi)[0]

    def silo(
        noise: Array, down: Array | None, state: ClientState, data: SiloData
    ) -> tuple[Reply[tuple[()]], Sampled]:
        kind, private = v.kind(data), v.private(state, data)
        z = draw_latents(kind, private, noise, down)
        sampled = values_at(kind.model, private.theta, z, data)
        return Reply((), all_finite(sampled)), sampled

    def run(state: ServerState, noise: tuple[Array, Array | None], ask: Ask) -> tuple[Array, Info]:
        server_eps, shared = noise
        xi = v.xi(state.params.shared, shared)
        ask(SAMPLE, xi)
        z = draw_latents(v.server, v.shared(state), server_eps, xi)
        return z, Info(jnp.zeros(()), all_finite(z))

    silo_noise, settings = partial(v.client_draws, n=n), sample_settings(n)
    exchange = Exchange(SAMPLE, silo, silo_noise=silo_noise, settings=settings)
    return Round((exchange,), run, partial(v.server_draws, n=n))
