"""The clients of one shape, or the server, and what a search holds fixed of their latents."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.guides.structured import GuideConfig
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.vertical import PartyModel

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

    model: PartyModel
    resolved: GuideConfig
    above: tuple[bool, ...]

    def pin(self, key: Array, data: SiloData) -> PinnedLatents:
        """Return the fixed values of hyperparameters; zeros if the prior has no draws."""
        unpinned = PinnedLatents(jnp.zeros(self.model.dim), jnp.ones(self.model.dim))
        if not any(self.above):
            return unpinned
        keys = jax.random.split(key, PRIOR_DRAWS)
        try:
            draws = jax.vmap(lambda key: self.model.draw_prior(key, data))(keys)
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
