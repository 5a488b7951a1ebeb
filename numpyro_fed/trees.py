"""What any pytree of arrays can be asked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def all_finite(tree: Any) -> Array:
    """Whether every number of a tree is finite."""
    leaves = [jnp.isfinite(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate([jnp.ones(1, bool), *leaves]).all()


def strong(tree: Any) -> Any:
    """The same numbers without weak types, as a loop's state or a program's input must be."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.asarray(a).dtype), tree)


def double(tree: Any) -> Any:
    """The same numbers in double precision, as NumPy arrays."""

    def one(a: Any) -> Any:
        a = np.asarray(a)
        return a.astype(np.float64) if a.dtype.kind == "f" else a

    return jax.tree.map(one, tree)


def fresh(a: np.ndarray) -> Array:
    """A NumPy array in the current precision: of one that a live trace has closed over, JAX would
    take that trace's.
    """
    return jnp.asarray(a.copy())
