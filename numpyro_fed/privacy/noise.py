"""Noise that protects: from the operating system, and from no key that a server sends."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback
from scipy.special import ndtri

# Sums with noise are rounded to multiples of the noise's sd times this. The last digits of a
# floating-point number tell which numbers were added to it (Mironov 2012); a grid hides them.
GRID = 2.0**-12


def normals(shape: tuple[int, ...]) -> np.ndarray:
    """Return standard normals in double precision, by the inverse of their CDF.

    A number takes 64 bits of the operating system, of which one is the sign: in single precision
    whole stretches of the tails would never occur, and a sum that falls into one tells itself.
    """
    bits = np.frombuffer(os.urandom(8 * int(np.prod(shape, dtype=np.int64))), np.uint64)
    tail = ((bits >> np.uint64(11)).astype(float) + 0.5) * 2.0**-54  # in (0, 1/2)
    sign = np.where(bits & np.uint64(1), 1.0, -1.0)
    return (sign * -ndtri(tail)).reshape(shape)


def noisy(total: Array, sd: Array) -> Array:
    """Return an array with Gaussian noise of this sd added, rounded to a grid.

    It can be compiled. Noise is added and rounded in double precision whatever that of the array,
    on the host. Under ``vmap`` each silo has noise of its own, since its own ``total`` is an
    argument of the callback: without an argument that is mapped the callback would be called once
    for all. Words of 32 bits cross, since a callback does not know the precision of its call.
    """
    sd = jnp.broadcast_to(jnp.asarray(sd, total.dtype), total.shape)
    words = _as_words(total)
    like = jax.ShapeDtypeStruct(words.shape, words.dtype)
    kind = np.dtype(total.dtype)
    found = io_callback(partial(_noisy_words, kind), like, words, _as_words(sd))
    return jax.lax.bitcast_convert_type(found, total.dtype).reshape(total.shape)


def _as_words(numbers: Array) -> Array:
    return jax.lax.bitcast_convert_type(numbers, jnp.uint32)


def _noisy_words(kind: np.dtype, total: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return the words of numbers with noise, from the words of numbers and sds."""
    exact, scale = (
        np.ascontiguousarray(np.asarray(words, np.uint32)).view(kind).astype(float)
        for words in (total, sd)
    )
    grid = scale * GRID
    with np.errstate(all="ignore"):
        found = np.round((exact + scale * normals(exact.shape)) / grid) * grid
        return found.astype(kind).view(np.uint32).reshape(np.shape(total))
