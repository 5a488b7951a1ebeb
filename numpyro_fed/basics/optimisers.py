"""Steps of Optax's optimisers up a bound."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

Params = TypeVar("Params")


def ascend(
    optim: optax.GradientTransformation, gradient: Params, opt_state: optax.OptState, params: Params
) -> tuple[Params, optax.OptState]:
    """Take one optimiser step up the bound, and return parameters and optimiser state."""
    # Optax minimises.
    descent = jax.tree.map(jnp.negative, gradient)
    updates, opt_state = optim.update(descent, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
