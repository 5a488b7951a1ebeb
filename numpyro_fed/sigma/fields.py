"""Fields to write models with: covariances of points, and an autoregression beside NumPyro's."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample

from numpyro_fed import linalg
from numpyro_fed.errors import DataError

__all__ = ["Leroux", "matern", "rbf"]


def __dir__() -> list[str]:
    return __all__


Scalar = float | Array
JITTER = 1e-4  # of the variance: what a smooth field in single precision needs


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
    return _on_diagonal(variance * jnp.exp(-0.5 * _squares(x) / length_scale**2), variance, jitter)


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
    # The derivative of a root at zero would be infinite.
    r = jnp.where(apart, jnp.sqrt(jnp.where(apart, 2 * nu * squares, 1.0)), 0.0) / length_scale
    shapes: dict[float, Scalar] = {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}
    if nu not in shapes:
        raise ValueError(f"nu={nu!r}: expected 0.5, 1.5 or 2.5.")
    return _on_diagonal(variance * shapes[nu] * jnp.exp(-r), variance, jitter)


def _squares(x: ArrayLike) -> Array:
    points = jnp.asarray(x)
    points = points[:, None] if points.ndim == 1 else points
    return ((points[:, None] - points) ** 2).sum(-1)


def _on_diagonal(cov: Array, variance: Scalar, jitter: float) -> Array:
    return cov + jitter * variance * jnp.eye(len(cov))


class Leroux(Distribution):
    r"""Leroux's autoregression of areas: a mixture of independence and an intrinsic one.

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
        own = (1 - self.correlation) * jnp.eye(len(W))
        return self.conditional_precision * (own + self.correlation * laplacian)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        L = linalg.cholesky(self.precision_matrix)
        noise = jax.random.normal(key, (*sample_shape, *self.event_shape))
        off = linalg.solve(L, noise.reshape(-1, len(L)).T, transposed=True).T
        return self.mean + off.reshape(noise.shape)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        W = jnp.asarray(self.adj_matrix)
        off, alpha, tau = value - self.mean, self.correlation, self.conditional_precision
        quadratic = ((1 - alpha + alpha * W.sum(1)) * off**2).sum(-1)
        quadratic -= alpha * (off * (off @ W)).sum(-1)
        values = eigenvalues(self.adj_matrix)
        log_det = jnp.log(tau * (1 - alpha + alpha * values)).sum()
        return 0.5 * (log_det - tau * quadratic - len(W) * jnp.log(2 * jnp.pi))


def eigenvalues(adjacency: Array | np.ndarray) -> Array | np.ndarray:
    """Return those of the Laplacian ``D - W``, by NumPy where it is known before a run."""
    if isinstance(adjacency, np.ndarray):
        return np.linalg.eigvalsh(np.diag(adjacency.sum(1)) - adjacency).clip(0)
    W = jnp.asarray(adjacency)
    return linalg.eigh(jnp.diag(W.sum(1)) - W)[0].clip(0)
