"""One exchange with all silos for the free energy of PVI's posterior; no state changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax import Array

from numpyro_fed.algorithms.base import AskSilos, Exchange, key_as_noise, stacked_reply
from numpyro_fed.algorithms.expand import shape
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import ServerState, SiloState
from numpyro_fed.expfam.base import Natural
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.programs import jit_once

EVALUATION = "evaluation"  # the name of the exchange


class Posterior(NamedTuple):
    """The server's message: shared parameters, and the sum of all factors."""

    theta: Theta
    total: Natural


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The question to silos for their expected log likelihoods, and the free energy by it."""

    server: Server
    silo: Silo

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange."""

        def expect(noise: Array, down: Posterior, state: SiloState, data: SiloData) -> Array:
            # As in a visit; the silo's own state may be older.
            silo = self.silo
            posterior = silo.parts.aggregate(silo.prior(down.theta), down.total)
            return silo.expected_log_lik(noise, down.theta, posterior, state, data)[0]

        def messages() -> tuple[Posterior, Any]:
            first = jax.eval_shape(self.server.init, jax.random.key(0))
            return Posterior(first.params.theta, first.total), shape()

        return Exchange(
            EVALUATION,
            stacked_reply(expect, little=True),
            silo_noise=key_as_noise,
            stacked=True,
            like=messages,
        )

    def free_energy(self, ask: AskSilos, key: Array, state: ServerState) -> float:
        """Return the free energy of the posterior, in one exchange."""
        log_lik = ask(self.exchange, Posterior(state.params.theta, state.total))
        kl = jit_once(self.server.kl_to_prior)(key, state.params.theta, state.params.guide)
        return float(log_lik) - float(kl)
