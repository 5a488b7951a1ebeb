"""What any pytree of arrays can be asked."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

Tree = TypeVar("Tree")


def all_finite(tree: object) -> Array:
    """Return whether every number of a tree is finite."""
    leaves = [jnp.isfinite(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.ones(1, bool), *leaves]).all()


def drop_weak_types(tree: Tree) -> Tree:
    """Return the same numbers without weak types, as a loop's state or a program's input needs."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.asarray(a).dtype), tree)


def where(which: Array, one: Tree, other: Tree) -> Tree:
    """Return one of two trees, or of each entry one."""
    return jax.tree.map(partial(jnp.where, which), one, other)


def double(tree: Tree) -> Tree:
    """Return the same numbers in double precision, as NumPy arrays."""

    def one(leaf: ArrayLike) -> np.ndarray:
        a = np.asarray(leaf)
        return a.astype(np.float64) if a.dtype.kind == "f" else a

    return jax.tree.map(one, tree)


def fresh(a: np.ndarray) -> Array:
    """Return a NumPy array in the current precision: of one that a live trace has closed over, JAX
    would take that trace's.
    """
    return jnp.asarray(a.copy())
