"""Starting positions of the chains of NUTS: random, with finite log density and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import ModelError
from numpyro_fed.model.log_density import FederatedModel

TRIES = 100  # draws of a chain's start, as many as in NumPyro's find_valid_initial_params

Position = dict[str, Any]  # {"z_G": (dim,), "z_L": {plate: (rows of all silos, dim)}}
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | Mapping[str, Shape]]  # the shapes of a position's arrays
Draw = Callable[[Array], Position]


def uniform(key: Array, shapes: Shapes) -> Position:
    """Return starts with coordinates uniform in (-2, 2), as NumPyro's ``init_to_uniform``."""
    # Not zeros: at effects of zero the density of their scale rises towards the funnel's neck.
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.uniform(k, s, minval=-2, maxval=2) for k, s in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, draws)


def good_starts(
    key: Array, draw: Draw, fm: FederatedModel, log_density: Callable[[Position], Array]
) -> Position:
    """Return starts of all chains with finite log density and gradient, leaves (chains, ...).

    A density can be finite at a point where its gradient is not: ``sqrt(exp(-x**2))`` underflows to
    zero far out, where the derivative of the root is infinite. A chain that starts there never
    moves.

    Parameters
    ----------
    key : jax.Array
    draw : key -> Position
        Draws the starts of all chains, leaves (chains, ...). A chain whose start is not finite
        takes its start from a later draw, of at most a hundred.
    fm : FederatedModel
        The model, for the names of sites in errors.
    log_density : Position -> ()

    Raises
    ------
    ModelError
        If a chain has no finite start, with the sites whose derivatives are not finite.
    """
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    start = draw(key)
    for i in range(1, TRIES):
        if (finite := _finite(*value_and_grad(start))).all():
            return start
        start = jax.tree.map(
            lambda old, new, finite=finite: jnp.where(
                finite.reshape(-1, *[1] * (old.ndim - 1)), old, new
            ),
            start,
            draw(jax.random.fold_in(key, i)),
        )
    value, gradient = value_and_grad(start)
    if (finite := _finite(value, gradient)).all():
        return start
    chain = int(np.argmin(finite))
    raise _no_start(fm, float(value[chain]), jax.tree.map(lambda a: a[chain], gradient))


def some_from_prior(
    key: Array, fm: FederatedModel, log_density: Callable[[Position], Array], start: Position
) -> Position:
    """Return the starts, with the globals of every other chain drawn from the prior.

    Starts that are all near zero may be in one mode, and chains could not disagree. A start stays
    as it is if the prior cannot be sampled, or if density or gradient at its draw are not finite.
    """
    chains = len(start["z_G"])
    prior_draws = fm.draw_prior(jax.random.fold_in(key, 1), chains)
    if prior_draws is None:
        return start
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    finite = _finite(*value_and_grad({**start, "z_G": prior_draws}))
    chosen = (jnp.arange(chains) % 2 == 1) & finite
    return {**start, "z_G": jnp.where(chosen[:, None], prior_draws, start["z_G"])}


def _finite(value: Array, gradient: Position) -> Array:
    """Return for each chain whether its density and all derivatives are finite, bool (chains,)."""
    leaves = [jnp.isfinite(a).reshape(len(value), -1).all(1) for a in jax.tree.leaves(gradient)]
    return jnp.stack([jnp.isfinite(value), *leaves]).all(0)


def _no_start(fm: FederatedModel, value: float, gradient: Position) -> ModelError:
    """Return the error for a chain without a finite start, from its last density and gradient."""
    advice = "Look at the data and the supports of the sites"
    if not np.isfinite(value):
        return ModelError(
            "the joint log density is not finite at a random start in unconstrained space, nor at "
            f"{TRIES - 1} others: it is {value:g} at the last. {advice}."
        )
    bad = {"": ~np.isfinite(gradient["z_G"])}
    bad |= {p: ~np.isfinite(g).all(0) for p, g in gradient["z_L"].items()}
    names = [
        f"'{site.name}'"
        for site in fm.sites
        if site.kind == "latent" and bad[site.plate or ""][site.start : site.stop].any()
    ]
    return ModelError(
        "the joint log density is finite at a random start in unconstrained space, but its "
        f"gradient is not, for {', '.join(names)}, nor is it at {TRIES - 1} others: no chain could "
        "move. The text may take a root or a logarithm of what underflows to zero; write it on the "
        f"log scale, or add a small number before the root. {advice}."
    )
