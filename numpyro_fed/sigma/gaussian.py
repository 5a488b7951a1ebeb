r"""Gaussian fields as a site's distribution has them: covariances of parts of all entries.

A field whose density is given by its covariance is cut out of that. Of autoregressions of areas one
eigendecomposition serves all hyperparameters: with :math:`D^{-1/2} W D^{-1/2} = U \Lambda U'`, the
covariance of a proper CAR, whose precision is :math:`\tau (D - \alpha W)`, is
:math:`\tau^{-1} D^{-1/2} U (I - \alpha \Lambda)^{-1} U' D^{-1/2}`, and with
:math:`D - W = U \Lambda U'` that of Leroux's is
:math:`\tau^{-1} U (I - \alpha I + \alpha \Lambda)^{-1} U'`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.linalg
from jax import Array
from numpyro.distributions import Distribution

from numpyro_fed import linalg
from numpyro_fed.errors import ModelError
from numpyro_fed.model.feasible import unwrapped
from numpyro_fed.sigma.fields import Leroux
from numpyro_fed.trees import fresh

JITTER = 10  # units in the last place of the largest variance, for each entry


class Spectrum(NamedTuple):
    """Eigenvalues (n,), those of the smoothest directions last, vectors (n, n), ``D^{-1/2} U`` for
    a CAR, and the adjacency (n, n) that they are of.
    """

    values: np.ndarray
    vectors: np.ndarray
    adjacency: np.ndarray

    @classmethod
    def of(cls, fn: Distribution, site: str) -> Spectrum | None:
        """Return the spectrum in double precision; None for what is no autoregression of areas."""
        W = adjacency_of(fn, site)
        if W is None:
            return None
        if isinstance(unwrapped(fn), Leroux):
            values, vectors = scipy.linalg.eigh(np.diag(W.sum(1)) - W)
            return cls(values[::-1].clip(0), vectors[:, ::-1], W)
        scale = 1 / np.sqrt(W.sum(1))
        values, vectors = scipy.linalg.eigh(W * scale * scale[:, None])
        return cls(values, scale[:, None] * vectors, W)


class Dense(NamedTuple):
    """A field by its covariance (n, n)."""

    loc: Array
    cov: Array

    def among(self, rows: Array, there: Array) -> Array:
        """Return the covariance of some entries; others are standard and independent."""
        both = there & there[:, None]
        return jnp.where(both, self.cov[rows[:, None], rows], jnp.eye(len(rows)))

    def roots(self, basis: np.ndarray) -> Array:
        """Return (n, rank): what ``basis' theta``, as standard normals, says of all entries."""
        V = jnp.asarray(basis.copy(), self.cov.dtype)
        KV = self.cov @ V
        L = linalg.cholesky(lifted(V.T @ KV))
        return linalg.solve(L, KV.T).T

    def of_normals(self, noise: Array) -> Array:
        """Return draws (..., n), which are what standard normals (..., n) make of themselves."""
        return self.loc + noise @ linalg.cholesky(self.cov).T


class Spectral(NamedTuple):
    """A field by its variances (n,) along fixed directions (n, n), the smoothest last."""

    loc: Array
    variances: Array
    vectors: np.ndarray

    def among(self, rows: Array, there: Array) -> Array:
        """Return the covariance of some entries; others are standard and independent."""
        U = jnp.where(there[:, None], fresh(self.vectors)[rows], 0.0)
        return (U * self.variances) @ U.T + jnp.diag(jnp.where(there, 0.0, 1.0))

    def roots(self, basis: np.ndarray) -> Array:
        """Return roots of the smoothest eigenvectors, as many as the basis has columns."""
        rank = basis.shape[1]
        return fresh(self.vectors[:, -rank:]) * jnp.sqrt(self.variances[-rank:])

    def of_normals(self, noise: Array) -> Array:
        """Return draws (..., n) of standard normals (..., n), each by one product with a matrix."""
        return self.loc + (noise * jnp.sqrt(self.variances)) @ fresh(self.vectors).T


Field = Dense | Spectral


def field_of(fn: Distribution, site: str, spectrum: Spectrum | None) -> Field:
    """Return a site's distribution as a field; of areas with its spectrum."""
    fn = unwrapped(fn)
    if isinstance(fn, dist.MultivariateNormal):
        return Dense(jnp.broadcast_to(fn.loc, fn.event_shape), fn.covariance_matrix)
    if not isinstance(fn, dist.CAR | Leroux):
        raise ModelError(
            f"'{site}' is a {type(fn).__name__}: closed forms are known for MultivariateNormal, "
            "CAR and Leroux. nf.SigmaPrior learns others from draws."
        )
    if spectrum is None:
        raise ModelError(
            f"'{site}' is a {type(fn).__name__} here, and was none where the prior was fitted: fit "
            "one anew."
        )
    loc, alpha = jnp.broadcast_to(fn.loc, fn.event_shape), fn.correlation
    values = fresh(spectrum.values)
    precisions = 1 - alpha + alpha * values if isinstance(fn, Leroux) else 1 - alpha * values
    return Spectral(loc, 1 / (fn.conditional_precision * precisions), spectrum.vectors)


def precision_of(fn: Distribution, W: Array) -> Array:
    """Return the precision of an autoregression of areas (n, n)."""
    alpha, degrees = fn.correlation, W.sum(1)
    own = 1 - alpha + alpha * degrees if isinstance(fn, Leroux) else degrees
    return fn.conditional_precision * (jnp.diag(own) - alpha * W)


def adjacency_of(fn: Distribution, site: str) -> np.ndarray | None:
    """Return the adjacency of an autoregression of areas, checked; None for other distributions."""
    fn = unwrapped(fn)
    if not isinstance(fn, dist.CAR | Leroux):
        return None
    try:
        dense: Any = fn.adj_matrix
        W = np.asarray(dense.toarray() if hasattr(dense, "toarray") else dense)
    except jax.errors.TracerArrayConversionError as error:
        raise ModelError(
            f"the adjacency of '{site}' is computed from latents, so that nothing of it can be "
            "known before a run. Give numbers."
        ) from error
    return checked_adjacency(W.astype(float), site, islands=isinstance(fn, Leroux))


def same_areas(fn: Distribution, site: str, adjacency: np.ndarray) -> None:
    """Refuse areas with other neighbours than those that a prior was fitted to."""
    if np.array_equal(np.asarray(adjacency_of(fn, site)), adjacency):
        return
    raise ModelError(
        f"the areas of '{site}' have other neighbours here than where its prior was fitted: fit "
        "one anew."
    )


def checked_adjacency(W: np.ndarray, site: str, *, islands: bool) -> np.ndarray:
    """Return what is symmetric, without loops, and without islands where these have no variance."""
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise ModelError(f"the adjacency of '{site}' has the shape {W.shape}: expected a square.")
    if (W != W.T).any():
        i, j = np.argwhere(W != W.T)[0]
        raise ModelError(
            f"the adjacency of '{site}' is not symmetric: {W[i, j]} from {i} to {j}, {W[j, i]} "
            "back. Take W + W.T > 0, say."
        )
    if np.diagonal(W).any():
        raise ModelError(
            f"area {np.flatnonzero(np.diagonal(W))[0]} of '{site}' is its own neighbour: put zeros "
            "on the diagonal of the adjacency."
        )
    if not islands and (W.sum(1) <= 0).any():
        raise ModelError(
            f"area {np.flatnonzero(W.sum(1) <= 0)[0]} of '{site}' has no neighbour (an island), "
            "and a CAR gives it no variance. Join it to the nearest area, or take it out of the "
            "site and give it an effect of its own, or take nf.fields.Leroux."
        )
    return W


def lifted(cov: Array, of: Array | None = None) -> Array:
    """Add what rounding may have taken from the diagonal, where it is the rest of another one."""
    top = jnp.diagonal(cov if of is None else of).max()
    lift = JITTER * jnp.finfo(cov.dtype).eps * len(cov) * top
    return cov + lift * jnp.eye(len(cov), dtype=cov.dtype)
