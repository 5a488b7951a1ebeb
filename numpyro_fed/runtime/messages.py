"""Messages between processes: named arrays in NumPy's ``npz`` format, without pickle."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.errors import DataError
from numpyro_fed.trees import Tree


def write(arrays: Mapping[str, ArrayLike]) -> bytes:
    """Return named arrays as the bytes of an ``npz`` file."""
    file = io.BytesIO()
    named: dict[str, Any] = {name: np.asarray(a) for name, a in arrays.items()}
    np.savez(file, **named)
    return file.getvalue()


def read(message: bytes) -> dict[str, np.ndarray]:
    """Return the named arrays of a message that :func:`write` made.

    Raises
    ------
    DataError
        For bytes that are no arrays in NumPy's ``npz`` format.
    """
    try:
        with np.load(io.BytesIO(message), allow_pickle=False) as arrays:
            return dict(arrays)
    # Damaged bytes make NumPy, zipfile, zlib and struct raise errors of many types.
    except Exception as error:
        raise DataError(
            f"a message cannot be read: {len(message)} bytes that are no arrays in NumPy's npz "
            "format. SiloNode and ServerNode make them, and nothing on the way may change them."
        ) from error


def pack(prefix: str, tree: object) -> dict[str, Array]:
    """Return the leaves of a tree by name: ``prefix`` and the path in the tree."""
    return {
        prefix + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def unpack(prefix: str, like: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """Return the tree that was packed, of the structure, shapes and dtypes of ``like``.

    Raises
    ------
    DataError
        For an array that is missing, or has another shape or dtype.
    """
    leaves = []
    for path, expected in jax.tree.leaves_with_path(like):
        name = prefix + jax.tree_util.keystr(path)
        array = arrays.get(name)
        # Checked before JAX sees it: another shape would be broadcast or compiled without a word.
        if array is None or (array.shape, array.dtype) != (expected.shape, expected.dtype):
            came = "nothing" if array is None else f"{array.dtype}{array.shape}"
            raise DataError(
                f"a message holds {came} as '{name}', where {expected.dtype}{expected.shape} was "
                "agreed. Both sides must have built from the same plan, in the same precision."
            )
        leaves.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
