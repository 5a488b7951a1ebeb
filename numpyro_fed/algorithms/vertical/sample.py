"""The question by which all parties draw their latents jointly; each keeps its own draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    AskSilos,
    Exchange,
    Reply,
    Sampled,
    key_as_noise,
    stacked_visit,
)
from numpyro_fed.guides.structured import GuideConfig
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.vertical import latents_of, prior_draw
from numpyro_fed.programs import compiled_method
from numpyro_fed.trees import all_finite

PRIOR_DRAWS = 500  # for the median and spread of hyperparameters
# Least spread with which their guide starts: a prior of a single value would have none, and the log
# of its spread would be infinite.
MIN_SPREAD = 1e-6


class PinnedLatents(NamedTuple):
    """Fixed values (dim,) of hyperparameters, unconstrained, during the search for a mode.

    ``place`` is the median of their prior. ``spread`` is the spread of the prior, at most one, with
    which their guide starts. All other latents have zero and one.
    """

    place: Array
    spread: Array


class PartyType(NamedTuple):
    """The clients of one shape.

    ``model`` is their part of the model, ``resolved`` their guide's configuration. ``above`` says
    which coordinates are hyperparameters: the prior of other latents depends on them.
    """

    model: FederatedModel
    resolved: GuideConfig
    above: tuple[bool, ...]

    def pin(self, key: Array, data: SiloData) -> PinnedLatents:
        """Return the fixed values of hyperparameters; zeros if the prior has no draws."""
        unpinned = PinnedLatents(jnp.zeros(self.model.dim), jnp.ones(self.model.dim))
        if not any(self.above):
            return unpinned
        keys = jax.random.split(key, PRIOR_DRAWS)
        try:
            draws = jax.vmap(lambda key: prior_draw(self.model, key, data))(keys)
        except NotImplementedError:  # flat priors
            return unpinned
        low, place, high = jnp.quantile(draws, jnp.array([0.16, 0.5, 0.84]), axis=0)
        spread = jnp.clip(0.5 * (high - low), MIN_SPREAD, 1.0)
        is_pinned = jnp.array(self.above, bool) & jnp.isfinite(place) & jnp.isfinite(spread)
        return PinnedLatents(
            *(jnp.where(is_pinned, a, b) for a, b in zip((place, spread), unpinned, strict=True))
        )

    def below(self, z: Array, pinned: PinnedLatents) -> tuple[Array, Array]:
        """Return a point with hyperparameters at their fixed values, and a log density.

        That is normal around the fixed values. It takes the place of these latents' own density: a
        scale and the effects under it have no joint mode but where the scale is zero.
        """
        # Static: clients without such latents have a smaller program.
        if not any(self.above):
            return z, jnp.zeros(())
        is_pinned = jnp.array(self.above, bool)
        standardised = jnp.where(is_pinned, (z - pinned.place) / pinned.spread, 0.0)
        return jnp.where(is_pinned, pinned.place, z), -0.5 * jnp.sum(standardised**2)


SAMPLE = "sample"  # the name of the exchange
AT_ONCE = 64  # draws whose values are computed side by side; more of them use more memory


class OwnDraws(NamedTuple):
    """A client's part of the model, its parameters, and unconstrained draws (n, dim)."""

    model: FederatedModel
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
        values = jax.lax.map(lambda z: latents_of(model, theta, z, data), z, batch_size=AT_ONCE)
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
