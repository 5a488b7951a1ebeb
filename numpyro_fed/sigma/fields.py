"""Gaussian fields for models: covariances of points, and Leroux's autoregression of areas."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.linalg
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.trees import fresh
from numpyro_fed.numerics import linalg
from numpyro_fed.text.silo_plate import unwrapped

__all__ = ["Leroux", "matern", "rbf"]


def __dir__() -> list[str]:
    return __all__


Scalar = float | Array
# Share of the variance added to the diagonal. The smallest eigenvalues of a smooth field are below
# the rounding of single precision, and its Cholesky factor would be NaN without it. The field gets
# noise with an sd of 0.01 of its own.
JITTER = 1e-4


def rbf(
    x: ArrayLike, length_scale: Scalar, variance: Scalar = 1.0, jitter: float = JITTER
) -> Array:
    r"""Return the squared exponential covariance of points.

    .. math::
        k(x, x') = \sigma^2 \exp\Big(-\frac{|x - x'|^2}{2 \ell^2}\Big)

    Parameters
    ----------
    x : array (n,) or (n, d)
        Points.
    length_scale, variance : float
        In the units of ``x``, and of the field squared.
    jitter : float
        Added to the diagonal, as a share of the variance.

    Returns
    -------
    array (n, n)

    Examples
    --------
    >>> import numpy as np, numpyro_fed as nf
    >>> cov = nf.fields.rbf(np.array([0.0, 1.0]), 1.0)
    >>> [round(float(c), 3) for c in cov[0]]
    [1.0, 0.607]
    """
    cov = variance * jnp.exp(-0.5 * _squares(x) / length_scale**2)
    return cov + jitter * variance * jnp.eye(len(cov))


def matern(
    x: ArrayLike,
    length_scale: Scalar,
    variance: Scalar = 1.0,
    *,
    nu: float = 1.5,
    jitter: float = JITTER,
) -> Array:
    r"""Return the Matern covariance of points, for :math:`\nu` of 0.5, 1.5 or 2.5.

    .. math::
        k = \sigma^2 e^{-r}, \quad \sigma^2 (1 + r) e^{-r}, \quad
        \sigma^2 (1 + r + r^2 / 3) e^{-r}, \qquad r = \sqrt{2 \nu} |x - x'| / \ell

    Parameters
    ----------
    x, length_scale, variance, jitter
        As for :func:`rbf`.
    nu : {0.5, 1.5, 2.5}

    Returns
    -------
    array (n, n)

    References
    ----------
    Rasmussen, Williams (2006), Gaussian Processes for Machine Learning, equations 4.14 and 4.17.

    Examples
    --------
    >>> import numpy as np, numpyro_fed as nf
    >>> cov = nf.fields.matern(np.array([0.0, 1.0]), 1.0, nu=0.5)
    >>> [round(float(c), 3) for c in cov[0]]
    [1.0, 0.368]
    """
    squares = _squares(x)
    apart = squares > 0
    # Both arms of a where are differentiated. The inner one keeps zero away from the root, whose
    # derivative there is infinite, and infinity times zero is NaN.
    r = jnp.where(apart, jnp.sqrt(jnp.where(apart, 2 * nu * squares, 1.0)), 0.0) / length_scale
    shapes: dict[float, Scalar] = {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}
    if nu not in shapes:
        raise ValueError(f"nu={nu!r}: expected 0.5, 1.5 or 2.5.")
    cov = variance * shapes[nu] * jnp.exp(-r)
    return cov + jitter * variance * jnp.eye(len(cov))


def _squares(x: ArrayLike) -> Array:
    points = jnp.asarray(x)
    points = points[:, None] if points.ndim == 1 else points
    return ((points[:, None] - points) ** 2).sum(-1)


class Leroux(Distribution):
    r"""Leroux's autoregression of areas: between independence and an intrinsic autoregression.

    .. math::
        \theta \sim N\big(\mu, [\tau ((1 - \alpha) I + \alpha (D - W))]^{-1}\big)

    An area without neighbours has the variance :math:`1 / (\tau (1 - \alpha))`.

    Parameters
    ----------
    loc : float or array (n,)
    correlation : float
        :math:`\alpha`, between 0 and 1.
    conditional_precision : float
        :math:`\tau`.
    adj_matrix : array (n, n)
        Symmetric; 1 for neighbours, 0 otherwise.

    References
    ----------
    Leroux, Lei, Breslow (2000), in Statistical Models in Epidemiology, the Environment, and
    Clinical Trials.

    Examples
    --------
    >>> import jax, numpy as np, numpyro_fed as nf
    >>> edges = np.eye(3, k=1) + np.eye(3, k=-1)
    >>> field = nf.fields.Leroux(0.0, 0.5, 1.0, edges)
    >>> field.sample(jax.random.key(0), (2,)).shape
    (2, 3)
    """

    arg_constraints: ClassVar = {
        "loc": constraints.real_vector,
        "correlation": constraints.unit_interval,
        "conditional_precision": constraints.positive,
    }
    support = constraints.real_vector
    reparametrized_params: ClassVar = ["loc", "correlation", "conditional_precision"]
    pytree_data_fields = ("loc", "correlation", "conditional_precision", "adj_matrix")

    def __init__(
        self,
        loc: ArrayLike,
        correlation: Scalar,
        conditional_precision: Scalar,
        adj_matrix: Array | np.ndarray,
        *,
        validate_args: bool | None = None,
    ):
        shape = np.shape(adj_matrix)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise DataError(f"the adjacency has the shape {shape}: expected a square.")
        (self.loc,) = promote_shapes(jnp.asarray(loc), shape=shape[:1])
        self.correlation, self.conditional_precision = correlation, conditional_precision
        self.adj_matrix = adj_matrix
        super().__init__((), shape[:1], validate_args=validate_args)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.loc, self.event_shape)

    @property
    def precision_matrix(self) -> Array:
        W = jnp.asarray(self.adj_matrix)
        laplacian = jnp.diag(W.sum(1)) - W
        independent = (1 - self.correlation) * jnp.eye(len(W))
        return self.conditional_precision * (independent + self.correlation * laplacian)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        L = linalg.cholesky(self.precision_matrix)
        noise = jax.random.normal(key, (*sample_shape, *self.event_shape))
        # With precision Q = L L', a solve with L' gives covariance L^-T L^-1 = Q^-1.
        deviations = linalg.solve(L, noise.reshape(-1, len(L)).T, transposed=True).T
        return self.mean + deviations.reshape(noise.shape)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        W = jnp.asarray(self.adj_matrix)
        deviation, alpha, tau = value - self.mean, self.correlation, self.conditional_precision
        quadratic = ((1 - alpha + alpha * W.sum(1)) * deviation**2).sum(-1)
        quadratic -= alpha * (deviation * (deviation @ W)).sum(-1)
        # One eigendecomposition serves all alpha: D - W and the precision have one eigenbasis.
        # By NumPy if the map is known before a run: its program then holds the numbers, and does
        # not decompose the matrix in each evaluation. The least eigenvalue is 0, and negative by
        # rounding.
        values: Array | np.ndarray
        if isinstance(A := self.adj_matrix, np.ndarray):
            values = np.linalg.eigvalsh(np.diag(A.sum(1)) - A).clip(0)
        else:
            values = linalg.eigh(jnp.diag(W.sum(1)) - W)[0].clip(0)
        log_det = jnp.log(tau * (1 - alpha + alpha * values)).sum()
        return 0.5 * (log_det - tau * quadratic - len(W) * jnp.log(2 * jnp.pi))


# Units in the last place of the largest variance, for each entry of the matrix. The backward error
# of a Cholesky factor of n entries is about n units, which a tenth of this would only just cover.
# Much more would show as noise in the field.
UNITS = 10


class Spectrum(NamedTuple):
    r"""The eigendecomposition of a map of areas with the adjacency W, which serves all alpha.

    A proper CAR has the precision :math:`\tau (D - \alpha W)`. With
    :math:`D^{-1/2} W D^{-1/2} = U \Lambda U'` its covariance is
    :math:`\tau^{-1} D^{-1/2} U (I - \alpha \Lambda)^{-1} U' D^{-1/2}`. With
    :math:`D - W = U \Lambda U'` the covariance of Leroux's autoregression is
    :math:`\tau^{-1} U (I - \alpha I + \alpha \Lambda)^{-1} U'`. ``values`` are those of the
    smoothest directions last, and ``vectors`` (n, n) are ``U``; ``D^{-1/2} U`` for a CAR.
    """

    values: np.ndarray
    vectors: np.ndarray

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
            return cls(values[::-1].clip(0), vectors[:, ::-1])
        scale = 1 / np.sqrt(W.sum(1))
        values, vectors = scipy.linalg.eigh(W * scale * scale[:, None])
        return cls(values, scale[:, None] * vectors)


class DenseField(NamedTuple):
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


class SpectralField(NamedTuple):
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


Field = DenseField | SpectralField


def field_of(fn: Distribution, site: str, spectrum: Spectrum | None) -> Field:
    """Return a site's distribution as a field. Autoregressions of areas need their spectrum."""
    fn = unwrapped(fn)
    if isinstance(fn, dist.MultivariateNormal):
        return DenseField(jnp.broadcast_to(fn.loc, fn.event_shape), fn.covariance_matrix)
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
    return SpectralField(loc, 1 / (fn.conditional_precision * precisions), spectrum.vectors)


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
    jitter = UNITS * jnp.finfo(cov.dtype).eps * len(cov) * largest
    return cov + jitter * jnp.eye(len(cov), dtype=cov.dtype)
