"""Functions of any pytree of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

Tree = TypeVar("Tree")
# Arrays of either library: a server's own few numbers are NumPy's, what depends on a text is JAX's.
Numbers = np.ndarray | Array
AnyArray = TypeVar("AnyArray", np.ndarray, Array)


def namespace(a: Numbers) -> ModuleType:
    """Return NumPy for its own arrays, and JAX's for others."""
    return np if isinstance(a, np.ndarray) else jnp


def all_finite(tree: object) -> Array:
    """Return whether every number of a tree is finite, () bool."""
    leaves = [jnp.isfinite(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.ones(1, bool), *leaves]).all()


def drop_weak_types(tree: Tree) -> Tree:
    """Return the same numbers without weak types.

    A weak type in a loop's first state fails to match the last one; in an input it compiles anew.
    """
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.asarray(a).dtype), tree)


def where(condition: Array, one: Tree, other: Tree) -> Tree:
    """Return ``jnp.where(condition, one, other)`` for each pair of leaves of two trees."""
    return jax.tree.map(partial(jnp.where, condition), one, other)


def double(tree: Tree) -> Tree:
    """Return the same numbers in double precision, as NumPy arrays."""
    return jax.tree.map(
        lambda a: a.astype(np.float64) if a.dtype.kind == "f" else a,
        jax.tree.map(np.asarray, tree),
    )


def fresh(a: np.ndarray) -> Array:
    """Return a copy of a NumPy array as a JAX array in the current precision."""
    # Without the copy JAX reuses the constant of a live trace that has closed over this array, in
    # the precision of that trace.
    return jnp.asarray(a.copy())


EntryNames = Mapping[str, Sequence[str]]  # names of the entries along the last axis of a site


def element_name(site: str, index: tuple[int, ...], labels: EntryNames | None = None) -> str:
    """Return the name of an element, such as ``"beta[1]"``, or ``"beta[age]"`` with labels."""
    entries, own = list(map(str, index)), (labels or {}).get(site, ())
    if entries and index[-1] < len(own):
        entries[-1] = own[index[-1]]
    return f"{site}[{', '.join(entries)}]" if index else site


def elements(
    draws: Mapping[str, Array | np.ndarray], labels: EntryNames | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of all elements, such as ``"beta[1]"``, and draws (n, k) of them."""
    names: list[str] = []
    columns: list[np.ndarray] = []
    for site, value in draws.items():
        array = np.asarray(value, np.float64)
        for index in np.ndindex(array.shape[1:]):
            names.append(element_name(site, index, labels))
            columns.append(array[(slice(None), *index)])
    n = len(next(iter(draws.values()))) if draws else 0
    return tuple(names), np.stack(columns, 1) if columns else np.zeros((n, 0))


Params = TypeVar("Params")


def ascend(
    optim: optax.GradientTransformation, gradient: Params, opt_state: optax.OptState, params: Params
) -> tuple[Params, optax.OptState]:
    """Take one optimiser step up the bound, and return parameters and optimiser state."""
    # Optax minimises.
    descent = jax.tree.map(jnp.negative, gradient)
    updates, opt_state = optim.update(descent, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
