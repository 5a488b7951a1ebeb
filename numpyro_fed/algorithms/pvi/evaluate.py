"""One exchange with every silo that changes nothing: the free energy of PVI's posterior."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies, Reply
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import (
    SCATTERED,
    Down,
    Parts,
    ServerState,
    Settings,
    SiloState,
)
from numpyro_fed.model.data import SiloData


def evaluation(parts: Parts, settings: Settings) -> Exchange:
    """Build the exchange; a silo sends its expected log likelihood."""
    server, silo = Server(parts, settings), Silo(parts, settings)

    def expect(
        noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Array], SiloState]:
        posterior = parts.aggregate(parts.globals.prior(down.theta), down.total)
        log_lik, _ = silo.expected_log_lik(noise, down.theta, posterior, state, data)
        return Reply(log_lik, jnp.isfinite(log_lik)), state

    def add_up(
        state: ServerState, memo: Any, replies: Replies[Array], server_data: Any
    ) -> tuple[ServerState, Info]:
        (key, _), params = memo, state.params
        loss = server.kl_to_prior(key, params["theta"], params["guide"]) - replies.up
        return state, Info(loss, replies.ok)

    return Exchange(
        server.broadcast,
        expect,
        add_up,
        name="evaluation",
        server_noise=server.noise,
        silo_noise=silo.noise,
        scatter=Down(*SCATTERED),
    )
