"""Where the chains of NUTS start: at places from which a gradient leads on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import ModelError
from numpyro_fed.model.federated import FederatedModel

TRIES = 100  # draws of a chain's start, as many as NumPyro's find_valid_initial_params takes

Position = dict[str, Any]  # {"z_G": (dim,), "z_L": {plate: (rows of all silos, dim)}}
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | Mapping[str, Shape]]  # of a position's arrays
Draw = Callable[[Array], Position]


def uniform(key: Array, shapes: Shapes) -> Position:
    """Return starts in (-2, 2), as NumPyro's: zeros would start a hierarchy in its funnel."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.uniform(k, s, minval=-2, maxval=2) for k, s in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, draws)


def good_starts(
    key: Array, draw: Draw, fm: FederatedModel, log_density: Callable[[Position], Array]
) -> Position:
    """Return starts of all chains at which the log density and each of its derivatives are finite.

    A density can be finite where its gradient is not: ``sqrt(exp(-x**2))`` underflows to zero far
    out, where the derivative of the root is infinite. A chain that starts there never moves.

    Parameters
    ----------
    key : jax.Array
    draw : key -> Position
        Starts of all chains, leaves (chains, ...). A chain whose start will not do takes the one
        of a later draw, of at most a hundred.
    fm : FederatedModel
        For the names of the sites.
    log_density : Position -> ()

    Raises
    ------
    ModelError
        Where no start will do, with the sites whose derivatives are not finite.
    """
    look = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    start = draw(key)
    for i in range(1, TRIES):
        if (fine := _fine(*look(start))).all():
            return start
        start = jax.tree.map(
            lambda old, new, fine=fine: jnp.where(
                fine.reshape(-1, *[1] * (old.ndim - 1)), old, new
            ),
            start,
            draw(jax.random.fold_in(key, i)),
        )
    value, gradient = look(start)
    if (fine := _fine(value, gradient)).all():
        return start
    chain = int(np.argmin(fine))
    raise _no_start(fm, float(value[chain]), jax.tree.map(lambda a: a[chain], gradient))


def some_from_prior(
    key: Array, fm: FederatedModel, log_density: Callable[[Position], Array], start: Position
) -> Position:
    """Return starts of which every other one has its globals from the prior.

    Starts that all lie near zero may share a mode. It is not done where the prior cannot be drawn
    from, or where density or gradient there are not finite.
    """
    chains = len(start["z_G"])
    drawn = fm.draw_prior(jax.random.fold_in(key, 1), chains)
    if drawn is None:
        return start
    look = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    fine = _fine(*look({**start, "z_G": drawn}))
    chosen = (jnp.arange(chains) % 2 == 1) & fine
    return {**start, "z_G": jnp.where(chosen[:, None], drawn, start["z_G"])}


def _fine(value: Array, gradient: Position) -> Array:
    """Return for each chain whether the density and each derivative there are finite, (chains,)."""
    leaves = [jnp.isfinite(a).reshape(len(value), -1).all(1) for a in jax.tree.leaves(gradient)]
    return jnp.stack([jnp.isfinite(value), *leaves]).all(0)


def _no_start(fm: FederatedModel, value: float, gradient: Position) -> ModelError:
    """Return why no chain can start, by the density and the gradient at the last place."""
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
