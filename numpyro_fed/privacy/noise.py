"""Noise that protects: from the operating system, and from no key that a server sends."""

from __future__ import annotations

import os
from collections.abc import Callable

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


def noisy(total: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return an array with Gaussian noise of this sd added, rounded to a grid; on the host."""
    grid = sd * GRID
    with np.errstate(all="ignore"):
        return np.asarray(np.round((total + sd * normals(total.shape)) / grid) * grid)


def in_double(f: Callable[..., np.ndarray], like: jax.ShapeDtypeStruct, *arrays: Array) -> Array:
    """Return ``f(*arrays)``, computed on the host in double precision, in the dtype of ``like``.

    It can be compiled. What is told is then what ``f`` computes, and not what a compiler makes of
    it: fused into one loop a number may be computed twice, with other rounding. Under ``vmap`` each
    silo has noise of its own, since its own arrays are arguments of the callback: without an
    argument that is mapped the callback would be called once for all. Words of 32 bits cross, since
    a callback does not know the precision of its call.
    """
    kinds = [np.dtype(a.dtype) for a in arrays]
    out = jax.eval_shape(_as_words, like)

    def on_host(*words: np.ndarray) -> np.ndarray:
        numbers = (
            np.ascontiguousarray(np.asarray(w, np.uint32)).view(kind).reshape(a.shape).astype(float)
            for w, kind, a in zip(words, kinds, arrays, strict=True)
        )
        found = np.broadcast_to(f(*numbers), like.shape).astype(like.dtype)
        return np.ascontiguousarray(found).reshape(-1).view(np.uint32).reshape(out.shape)

    words = io_callback(on_host, out, *(_as_words(a) for a in arrays))
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)


def _as_words(numbers: Array) -> Array:
    return jax.lax.bitcast_convert_type(numbers, jnp.uint32)
