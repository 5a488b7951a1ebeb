"""Noise that protects: from the operating system, and from no key that a server sends."""

from __future__ import annotations

import os

import numpy as np
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
    """Return an array with Gaussian noise of this sd added, rounded to a grid."""
    grid = sd * GRID
    with np.errstate(all="ignore"):
        return np.asarray(np.round((total + sd * normals(total.shape)) / grid) * grid)
