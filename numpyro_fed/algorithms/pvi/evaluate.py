"""One exchange with all silos for the free energy of PVI's posterior; no state changes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round, key_as_noise
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import (
    SCATTERED,
    Down,
    ServerState,
    SiloState,
)
from numpyro_fed.model.data import SiloData

EVALUATION = "evaluation"  # the name of the exchange


def evaluation(server: Server, silo: Silo) -> Round:
    """Return the round; its loss is minus the free energy, and silos send expected likelihoods."""

    def expect(
        noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Array], SiloState]:
        # The posterior from the message, as in a visit; the silo's own state may be older.
        posterior = silo.parts.aggregate(silo.prior(down.theta), down.total)
        log_lik, _ = silo.expected_log_lik(noise, down.theta, posterior, state, data)
        return Reply(log_lik, jnp.isfinite(log_lik)), state

    def run(state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        log_lik = ask(EVALUATION, server.message(state, ask.who)).up
        params = state.params
        loss = server.kl_to_prior(noise, params.theta, params.guide) - log_lik
        return state, Info(loss, jnp.array(True))

    exchange = Exchange(EVALUATION, expect, silo_noise=key_as_noise, scatter=Down(*SCATTERED))
    return Round((exchange,), run, key_as_noise)
