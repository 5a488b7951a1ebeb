r"""Curvature with noise: what can be told from the noise, and what is computed with the rest.

The spectrum of a symmetric matrix of noise with sd :math:`s` ends at :math:`s \sqrt{2d}`.
Eigenvalues below this edge cannot be told from noise; there columns count as uncorrelated. Above
the edge they are shrunk as those of a matrix with a few large ones (Benaych-Georges and Nadakuditi
2011).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from numpyro_fed.gaussian import root_of


class Spectrum(NamedTuple):
    """The eigenvectors ``V`` (d, d) of a curvature with noise, and its eigenvalues without.

    ``V`` (d, d).
    ``curved`` (d,): Eigenvalues as of the matrix without noise.
    ``damped`` (d,): The same for a step: positive, and not below what noise may hide.
    ``undetermined``: The number of directions whose curvature could not be told from noise.
    """

    V: np.ndarray
    curved: np.ndarray
    damped: np.ndarray
    undetermined: int

    @classmethod
    def of(cls, H: np.ndarray, edge: float) -> Spectrum:
        """Return the spectrum of ``H`` (d, d), where that of the noise ends at ``edge``."""
        e, V = np.linalg.eigh(H)
        above = np.where(e > edge, 0.5 * (e + np.sqrt(np.maximum(e**2 - edge**2, 0.0))), 0.0)
        apart = (V**2 * np.maximum(np.diagonal(H), 0.0)[:, None]).sum(0)
        curved = np.maximum(above, np.minimum(edge / 2, apart))
        # Where the density curves upwards, a step as long as if it curved as much downwards.
        damped = np.maximum(np.where(e < -edge, -e, above), edge / 2)
        return cls(V, curved, damped, int((e <= edge).sum()))


def root_with_prior(V: np.ndarray, curved: np.ndarray, P: np.ndarray) -> np.ndarray:
    """Return the root (d, d) of the precision ``V diag(curved) V' + P P'``.

    Directions may differ by more than a sum of matrices keeps apart, which then has no root: an
    effect under a small scale beside one that neither data nor prior know.
    """
    return root_of(np.column_stack([V * np.sqrt(curved), P]))


def times_inverse(root: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the inverse of ``root root'`` times a vector (d,), for lower triangular ``root``."""
    solve = partial(solve_triangular, root, lower=True, check_finite=False)
    found: np.ndarray = solve(solve(g), trans=1)
    return found


def as_vector(matrices: np.ndarray) -> np.ndarray:
    """Return symmetric matrices (..., d, d) as vectors of the same length (Frobenius)."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    scaled: np.ndarray = matrices[..., rows, columns] * np.where(rows == columns, 1.0, 2**0.5)
    return scaled


def as_symmetric(vector: np.ndarray, d: int) -> np.ndarray:
    """Return the matrix (d, d) of :func:`as_vector`."""
    rows, columns = np.triu_indices(d)
    half = np.zeros((d, d))
    half[rows, columns] = vector / np.where(rows == columns, 2.0, 2**0.5)
    return half + half.T
