"""Noise that protects: from the operating system, and from no key that a server sends."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback
from jax.scipy.special import ndtri

# Sums with noise are rounded to multiples of the noise's sd times this. The last digits of a
# floating-point number tell which numbers were added to it (Mironov 2012); a grid hides them.
GRID = 2.0**-12


def random_bits(shape: tuple[int, ...]) -> np.ndarray:
    """Return random words of 32 bits (*shape) from the operating system."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(os.urandom(4 * count), np.uint32).reshape(shape)


def normals_of(bits: Array) -> Array:
    """Return standard normals (...) of random words (..., 2), by the inverse of their CDF."""
    high, low = bits[..., 0], bits[..., 1]
    # A bit is the sign, and the others a number in (0, 1/2) that the precision holds exactly.
    sign = jnp.where(low & 1, 1.0, -1.0)
    if jnp.result_type(float) == jnp.float64:
        tail = (high.astype(float) * 2.0**20 + (low >> 12).astype(float) + 0.5) * 2.0**-53
    else:
        tail = ((high >> 10).astype(float) + 0.5) * 2.0**-23
    return sign * -ndtri(tail)


def noisy(total: Array, sd: Array) -> Array:
    """Return an array with Gaussian noise of this sd added, rounded to a grid.

    It can be compiled. Under ``vmap`` each silo has noise of its own, since its own ``total`` is an
    argument of the callback: without an argument that is mapped the callback would be called once
    for all. It returns words of 32 bits, since a callback does not know the precision of its call.
    """
    shape = (*total.shape, 2)
    words = jax.ShapeDtypeStruct(shape, jnp.uint32)
    bits = io_callback(lambda total: random_bits(shape), words, total)
    grid = sd * GRID
    return jnp.round((total + sd * normals_of(bits)) / grid) * grid
