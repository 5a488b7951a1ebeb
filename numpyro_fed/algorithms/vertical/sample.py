"""The question by which all parties draw their latents jointly; each keeps its own draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from numpyro_fed.algorithms.base import (
    AskSilos,
    Exchange,
    Reply,
    Sampled,
    key_as_noise,
    stacked_visit,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.vertical import PartyModel
from numpyro_fed.programs import compiled_method
from numpyro_fed.trees import all_finite

SAMPLE = "sample"  # the name of the exchange
AT_ONCE = 64  # draws whose values are computed side by side; more of them use more memory


class OwnDraws(NamedTuple):
    """A client's part of the model, its parameters, and unconstrained draws (n, dim)."""

    model: PartyModel
    theta: dict[str, Any]
    z: Array


class CanDraw(Protocol):
    """A vertical model with its guides or its chains, from whose states parties draw."""

    def server_draws(self, key: Array, state: Any, n: int) -> tuple[Any, Array]:
        """Return the noise that the server sends, and its draws (n, dim)."""

    def client_draws(self, key: Array, sent: Any, state: Any, data: SiloData, n: int) -> OwnDraws:
        """Return a client's draws."""

    def sent_like(self, n: int) -> Any:
        """Return the shapes of what the server sends."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """The question to clients for ``num_draws`` draws, which leave :class:`Sampled` there."""

    parties: CanDraw
    num_draws: int

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange, in which the server sends the shared noise."""
        return Exchange(
            SAMPLE,
            stacked_visit(self.silo, little=True),
            silo_noise=key_as_noise,
            settings=json.dumps({"num_draws": self.num_draws}),
            stacked=True,
            like=lambda: (self.parties.sent_like(self.num_draws), ()),
        )

    def silo(
        self, noise: Array, down: Any, state: Any, data: SiloData
    ) -> tuple[Reply[tuple[()]], Sampled]:
        model, theta, z = self.parties.client_draws(noise, down, state, data, self.num_draws)
        values = jax.lax.map(lambda z: model.values(theta, z, data), z, batch_size=AT_ONCE)
        return Reply((), all_finite(values)), Sampled(values)

    @compiled_method()
    def of_server(self, key: Array, state: Any) -> tuple[Any, Array]:
        """Return the noise that the server sends, and its unconstrained draws (n, dim)."""
        return self.parties.server_draws(key, state, self.num_draws)

    def run(self, ask: AskSilos, key: Array, state: Any, data: SiloData) -> Array:
        """Return the server's unconstrained draws (n, dim), once clients have theirs."""
        sent, z = self.of_server(key, state)
        ask(self.exchange, sent)
        return z
