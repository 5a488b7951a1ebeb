r"""Curvature with noise: what can be told from the noise, and what is computed with the rest.

The spectrum of a symmetric matrix of noise with sd :math:`s` ends at :math:`s \sqrt{2d}`.
Eigenvalues below this edge cannot be told from noise; there columns count as uncorrelated. Above
the edge they are shrunk as those of a matrix with a few large ones (Benaych-Georges and Nadakuditi
2011).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed import linalg


class Spectrum(NamedTuple):
    """The eigenvectors ``V`` (d, d) of a curvature with noise, and its eigenvalues without.

    Attributes
    ----------
    V : (d, d)
    curved : (d,)
        Eigenvalues as of the matrix without noise.
    damped : (d,)
        The same for a step: positive, and not below what noise may hide.
    undetermined : () int
        The number of directions whose curvature could not be told from noise.
    """

    V: Array
    curved: Array
    damped: Array
    undetermined: Array

    @classmethod
    def of(cls, H: Array, edge: Array) -> Spectrum:
        """Return the spectrum of ``H`` (d, d), where that of the noise ends at ``edge``."""
        e, V = linalg.eigh(H)
        above = jnp.where(e > edge, 0.5 * (e + jnp.sqrt(jnp.maximum(e**2 - edge**2, 0.0))), 0.0)
        apart = (V**2 * jnp.maximum(jnp.diagonal(H), 0.0)[:, None]).sum(0)
        curved = jnp.maximum(above, jnp.minimum(edge / 2, apart))
        # Where the density curves upwards, a step as long as if it curved as much downwards.
        damped = jnp.maximum(jnp.where(e < -edge, -e, above), edge / 2)
        return cls(V, curved, damped, (e <= edge).sum().astype(jnp.int32))


def root_with_prior(V: Array, curved: Array, P: Array) -> Array:
    """Return the root (d, d) of the precision ``V diag(curved) V' + P P'``.

    Directions may differ by more than single precision tells apart in the sum itself, which then
    has no root: an effect under a small scale beside one that neither data nor prior know.
    """
    return linalg.root_of(jnp.concatenate([V * jnp.sqrt(curved), P], axis=1))


def times_inverse(root: Array, g: Array) -> Array:
    """Return the inverse of ``root root'`` times a vector (d,), for lower triangular ``root``."""
    return linalg.solve(root, linalg.solve(root, g), transposed=True)


def root_of_inverse(root: Array, L: Array) -> Array:
    """Return the root of the covariance in the frame ``L`` (d, d) of a precision's root (d, d)."""
    return linalg.root_of(linalg.solve(root, L.T).T)


def as_vector(matrix: Array) -> Array:
    """Return a symmetric matrix as a vector of the same length (Frobenius)."""
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))


def as_symmetric(vector: Array, d: int) -> Array:
    """Return the matrix (d, d) of :func:`as_vector`."""
    rows, columns = np.triu_indices(d)
    halved = vector / np.where(rows == columns, 2.0, math.sqrt(2))
    half = jnp.zeros((d, d)).at[rows, columns].set(halved)
    return half + half.T
