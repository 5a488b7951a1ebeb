r"""Gaussian fields of sites: covariances of some entries, low-rank factors and draws.

A multivariate normal is held by its covariance (``Dense``). An autoregression of areas is held by
one eigendecomposition, which serves all hyperparameters (``Spectral``). A proper CAR has the
precision :math:`\tau (D - \alpha W)`. With :math:`D^{-1/2} W D^{-1/2} = U \Lambda U'` its
covariance is :math:`\tau^{-1} D^{-1/2} U (I - \alpha \Lambda)^{-1} U' D^{-1/2}`. With
:math:`D - W = U \Lambda U'` the covariance of Leroux's autoregression is
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
from numpyro_fed.model.primitives import unwrapped
from numpyro_fed.sigma.fields import Leroux
from numpyro_fed.trees import fresh

# Units in the last place of the largest variance, for each entry of the matrix. The backward error
# of a Cholesky factor of n entries is about n units, which a tenth of this would only just cover.
# Much more would show as noise in the field.
JITTER = 10


class Spectrum(NamedTuple):
    """The eigendecomposition of a map of areas with this adjacency (n, n).

    ``values`` (n,) are eigenvalues, those of the smoothest directions last, and ``vectors`` (n, n)
    eigenvectors ``U``; ``D^{-1/2} U`` for a CAR.
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
        # The smoothest directions have the most variance: small eigenvalues of D - W, large ones of
        # the scaled W.
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

    def covariance_of(self, rows: Array, present: Array) -> Array:
        """Return the covariance of some entries (rows, rows); absent ones are standard normals."""
        both = present & present[:, None]
        return jnp.where(both, self.cov[rows[:, None], rows], jnp.eye(len(rows)))

    def loadings(self, basis: np.ndarray) -> Array:
        """Return the regression of all entries on ``basis' theta``, standardised, (n, rank)."""
        # K V L^-T with V' K V = L L': the mean of theta given L^-1 V' theta, which is standard.
        V = jnp.asarray(basis.copy(), self.cov.dtype)
        KV = self.cov @ V
        L = linalg.cholesky(add_jitter(V.T @ KV))
        return linalg.solve(L, KV.T).T

    def from_normals(self, noise: Array) -> Array:
        """Return draws (..., n) from standard normals (..., n)."""
        return self.loc + noise @ linalg.cholesky(self.cov).T


class Spectral(NamedTuple):
    """A field by its variances (n,) along the columns of a fixed matrix (n, n), smoothest last."""

    loc: Array
    variances: Array
    vectors: np.ndarray

    def covariance_of(self, rows: Array, present: Array) -> Array:
        """Return the covariance of some entries (rows, rows); absent ones are standard normals."""
        U = jnp.where(present[:, None], fresh(self.vectors)[rows], 0.0)
        return (U * self.variances) @ U.T + jnp.diag(jnp.where(present, 0.0, 1.0))

    def loadings(self, basis: np.ndarray) -> Array:
        """Return the smoothest directions times their sds, (n, rank) with the basis' rank."""
        rank = basis.shape[1]
        return fresh(self.vectors[:, -rank:]) * jnp.sqrt(self.variances[-rank:])

    def from_normals(self, noise: Array) -> Array:
        """Return draws (..., n) from standard normals (..., n), by one product with a matrix."""
        return self.loc + (noise * jnp.sqrt(self.variances)) @ fresh(self.vectors).T


Field = Dense | Spectral


def field_of(fn: Distribution, site: str, spectrum: Spectrum | None) -> Field:
    """Return a site's distribution as a field. Autoregressions of areas need their spectrum."""
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
    W = W.astype(float)
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
    if not isinstance(fn, Leroux) and (W.sum(1) <= 0).any():
        raise ModelError(
            f"area {np.flatnonzero(W.sum(1) <= 0)[0]} of '{site}' has no neighbour (an island), "
            "and a CAR gives it no variance. Join it to the nearest area, or take it out of the "
            "site and give it an effect of its own, or take nf.fields.Leroux."
        )
    return W


def add_jitter(cov: Array, whole: Array | None = None) -> Array:
    """Return a covariance (n, n) with as much added to its diagonal as rounding may have taken.

    If it is what is left of the covariance ``whole`` after a subtraction, rounding is relative to
    the variances of ``whole``.
    """
    largest = jnp.diagonal(cov if whole is None else whole).max()
    jitter = JITTER * jnp.finfo(cov.dtype).eps * len(cov) * largest
    return cov + jitter * jnp.eye(len(cov), dtype=cov.dtype)
