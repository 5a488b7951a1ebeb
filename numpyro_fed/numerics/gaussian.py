r"""Gaussian numerics: means and roots, natural parameters, and curvatures made positive definite.

A covariance is written :math:`S = L L'` with :math:`L = T\, \mathrm{diag}(e^s)`: ``T`` is unit
lower triangular and ``s`` holds log-scales (Hassan et al. 2023, section 3; Tan, Bhaskaran and Nott
2020). Guides, exponential families, factors, proposals and starts use this module.

A *frame* is a Gaussian, too: the origin and the units of the coordinates ``u`` in which a run
works, :math:`z = m + L u`. Its mean is the start of a run, and its root the spread of the posterior
that is expected there. Algorithms work with guides of ``u``, in which the posterior is about
standard, whatever the units of the data. A start at the mode and a start at an earlier result
differ in their frames only. Without a start the frame is the standard normal, and ``u`` is ``z``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.util import vec_to_tril_matrix

from numpyro_fed.basics.trees import AnyArray, Tree, namespace
from numpyro_fed.numerics import linalg

LOG_2PI = math.log(2 * math.pi)
# Globals up to which their covariance is full by default. A visit's steps in PVI cost the square of
# their number (3 ms each at 300, docs/results/pvi.md).
FULL_COVARIANCE_UP_TO = 300

# GPUs and TPUs multiply float32 matrices in fewer digits by default, and a covariance needs all.
dot = partial(jnp.matmul, precision="highest")


class Gaussian(NamedTuple):
    r"""A Gaussian :math:`N(m, L L')`, or a stack of them; it is a pytree.

    ``loc`` (..., dim) is the mean, ``log_scale`` (..., dim) the logarithm ``s`` of the diagonal of
    ``L``, and ``unit`` (..., dim, dim) ``T``, None for independent coordinates.
    """

    loc: Array
    log_scale: Array
    unit: Array | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Array]) -> Gaussian:
        """Return the Gaussian with these parameters of a guide or a family.

        They are ``"loc"`` and ``"log_scale"`` (..., dim), and for a full covariance ``"below"``
        (..., dim * (dim - 1) / 2): the numbers below the diagonal of ``T`` row by row, times
        ``sqrt(dim - 1)``. Optimisers like Adam move every parameter by about the same amount.
        Without this factor, the inverse of a triangular matrix after hundreds of such moves is not
        finite: at 100 globals every reply of PVI was lost (docs/results/pvi.md).
        """
        loc, below = params["loc"], params.get("below")
        unit = None if below is None else unit_lower(below, loc.shape[-1])
        return cls(loc, params["log_scale"], unit)

    @classmethod
    def of_root(cls, loc: Array, root: Array) -> Gaussian:
        """Return the Gaussian with a Cholesky factor (..., dim, dim), or standard deviations."""
        if _is_diagonal(loc, root):
            return cls(loc, jnp.log(root))
        scale = jnp.diagonal(root, axis1=-2, axis2=-1)
        return cls(loc, jnp.log(scale), root / scale[..., None, :])

    @classmethod
    def of_precision(cls, loc: Array, precision: Array) -> Gaussian:
        """Return the Gaussian with a precision matrix (..., dim, dim), or precisions (..., dim)."""
        if _is_diagonal(loc, precision):
            return cls(loc, -0.5 * jnp.log(precision))
        return cls.of_root(loc, linalg.cholesky_of_inverse(precision))

    @classmethod
    def of_natural(cls, first: Array, second: Array) -> Gaussian:
        r"""Return the Gaussian with natural parameters :math:`(\Lambda m, -\Lambda / 2)`."""
        if _is_diagonal(first, second):
            precision = -2 * second
            return cls.of_precision(first / precision, precision)
        # The root of the covariance comes from that of the precision by one triangular solve. To
        # invert the precision and then factor the inverse would lose digits twice.
        L = linalg.cholesky_of_inverse(-2 * symmetric(second))
        return cls.of_root(_times(L, _times(jnp.swapaxes(L, -1, -2), first)), L)

    def params(self) -> dict[str, Array]:
        """Return the parameters that :meth:`from_params` takes."""
        params = {"loc": self.loc, "log_scale": self.log_scale}
        if self.unit is None:
            return params
        dim = self.unit.shape[-1]
        rows, columns = np.tril_indices(dim, -1)
        return {**params, "below": self.unit[..., rows, columns] * math.sqrt(max(dim - 1, 1))}

    @property
    def scale(self) -> Array:
        """The diagonal of ``L`` (..., dim)."""
        return jnp.exp(self.log_scale)

    @property
    def root(self) -> Array:
        """``L`` (..., dim, dim); its diagonal (..., dim) where coordinates are independent."""
        return self.scale if self.unit is None else self.unit * self.scale[..., None, :]

    @property
    def sd(self) -> Array:
        """The standard deviation of each coordinate (..., dim)."""
        return self.scale if self.unit is None else jnp.linalg.norm(self.root, axis=-1)

    @property
    def covariance(self) -> Array:
        """The covariance matrix, or the variances of independent coordinates."""
        L = self.root
        return L**2 if self.unit is None else dot(L, jnp.swapaxes(L, -1, -2))

    def natural(self) -> tuple[Array, Array]:
        r"""Return the natural parameters :math:`(\Lambda m, -\Lambda / 2)`."""
        if self.unit is None:
            precision = jnp.exp(-2 * self.log_scale)
            return precision * self.loc, -0.5 * precision
        K = self.inverse_root()
        K_transposed = jnp.swapaxes(K, -1, -2)
        return _times(K_transposed, _times(K, self.loc)), -0.5 * symmetric(dot(K_transposed, K))

    def inverse_root(self) -> Array:
        """Return the inverse of :attr:`root`."""
        L = self.root
        return 1 / L if self.unit is None else linalg.solve(L, jnp.eye(L.shape[-1]))

    def draw(self, noise: Array) -> Array:
        r"""Return :math:`m + L \varepsilon` for standard normal ``noise`` (..., dim)."""
        scaled = self.scale * noise
        return self.loc + (scaled if self.unit is None else _times(self.unit, scaled))

    def times(self, columns: Array) -> Array:
        """Return ``L`` times matrices (..., dim, k)."""
        if self.unit is None:
            return self.scale[..., None] * columns
        return dot(self.root, columns)

    def solve(self, columns: Array) -> Array:
        """Return the inverse of ``L`` times matrices (..., dim, k)."""
        if self.unit is None:
            return columns / self.scale[..., None]
        return linalg.solve(self.unit, columns) / self.scale[..., None]

    def standardise(self, z: Array) -> Array:
        r"""Return :math:`L^{-1} (z - m)`, the noise whose draw is ``z`` (..., dim)."""
        offset = z - self.loc
        if self.unit is not None:
            offset = linalg.solve(self.unit, offset[..., None])[..., 0]
        return offset / self.scale

    def log_density(self, z: Array) -> Array:
        """Return the log density (...) at ``z`` (..., dim)."""
        return (standard_normal(self.standardise(z)) - self.log_scale).sum(-1)

    def entropy(self) -> Array:
        """Return the entropy (...)."""
        return (self.log_scale + 0.5 * (1 + LOG_2PI)).sum(-1)

    def kl(self, other: Gaussian) -> Array:
        """Return the divergence ``KL(self || other)`` (...); both are diagonal, or both full."""
        if (self.unit is None) != (other.unit is None):
            raise TypeError("one Gaussian has a full covariance, and the other one has none.")
        log_ratio = self.log_scale - other.log_scale
        shift = (other.standardise(self.loc) ** 2).sum(-1)
        # expm1: for nearly equal scales the trace less the dimension would cancel.
        from_scales = (0.5 * jnp.expm1(2 * log_ratio) - log_ratio).sum(-1)
        if self.unit is None:
            return from_scales + 0.5 * shift
        below = jnp.tril(linalg.solve(other.root, self.root), -1)
        return from_scales + 0.5 * ((below**2).sum((-1, -2)) + shift)

    @property
    def log_det(self) -> Array:
        """The log determinant of ``L`` (...)."""
        return self.log_scale.sum(-1)

    def compose(self, step: Gaussian) -> Gaussian:
        """Return the Gaussian that is ``step`` in the coordinates in which this one is standard."""
        after = Gaussian(self.draw(step.loc), self.log_scale + step.log_scale, self.unit)
        if step.unit is None:
            return after
        # L L_step = T (D T_step D^-1) D D_step, with D and D_step the scales. The middle factor is
        # unit lower triangular, so no new factorisation is needed.
        log_ratio = self.log_scale[..., :, None] - self.log_scale[..., None, :]
        unit = step.unit * jnp.exp(jnp.tril(log_ratio, -1))
        return after._replace(unit=unit if self.unit is None else dot(self.unit, unit))


@dataclass(frozen=True)
class Curvature(Generic[AnyArray]):
    r"""The eigendecomposition of a symmetric matrix, scaled by its own diagonal.

    .. math::
        A = D V \mathrm{diag}(\lambda) V' D, \qquad D_{ii} = \sqrt{|A_{ii}|}

    Coordinates are scaled by their own curvature first, so that their units do not matter. ``unit``
    (..., dim) is the diagonal of ``D``, 1 where the curvature is zero; ``values`` (..., dim) are in
    ascending order, and ``vectors`` (..., dim, dim) ``V``, in columns.
    """

    unit: AnyArray
    values: AnyArray
    vectors: AnyArray

    @classmethod
    def of(cls, A: AnyArray, unit: AnyArray | None = None) -> Curvature[AnyArray]:
        """Return the decomposition of ``A`` (..., dim, dim); NaN where it is not finite."""
        xp = namespace(A)
        if unit is None:
            diagonal = xp.abs(xp.diagonal(A, axis1=-2, axis2=-1))
            unit = xp.sqrt(xp.where(diagonal > 0, diagonal, 1.0))
        # eigh's absolute error is eps of the largest eigenvalue. After scaling the diagonal is one,
        # and small curvatures of coordinates in small units keep their digits.
        scaled = A / unit[..., None, :] / unit[..., None]
        if isinstance(scaled, np.ndarray):
            finite = np.asarray(np.isfinite(scaled).all((-2, -1)))[..., None]
            safe = np.where(finite[..., None], scaled, np.eye(scaled.shape[-1]))
            found = np.linalg.eigh(safe)
            return cls(unit, np.where(finite, found.eigenvalues, np.nan), found.eigenvectors)
        values, vectors = linalg.eigh(scaled)
        return cls(unit, values, vectors)  # type: ignore[arg-type]  # no NumPy array here

    def positive(self, least: AnyArray | float) -> Curvature[AnyArray]:
        """Return the decomposition with absolute eigenvalues, at least ``least`` of the largest.

        The largest counts as at least one. Steps by absolute values lead away from saddles (Dauphin
        et al. 2014). The bound is for directions that are flat up to rounding.
        """
        xp = namespace(self.values)
        size = xp.abs(self.values)
        largest = xp.maximum(size.max(-1, keepdims=True, initial=0.0), 1.0)
        return replace(self, values=xp.maximum(size, least * largest))

    def matrix(self) -> AnyArray:
        """Return ``A`` (..., dim, dim)."""
        scaled = self.unit[..., None] * self.vectors
        return (scaled * self.values[..., None, :]) @ scaled.swapaxes(-1, -2)

    def along(self, b: AnyArray) -> AnyArray:
        """Return the components (..., dim) of ``b / unit`` along the eigenvectors."""
        return ((b / self.unit)[..., None, :] @ self.vectors)[..., 0, :]

    def across(self, u: AnyArray) -> AnyArray:
        """Return the vector (..., dim) with components ``u`` along the eigenvectors, over units."""
        return (self.vectors @ u[..., None])[..., 0] / self.unit

    def solve(self, b: AnyArray) -> AnyArray:
        """Return the solutions ``x`` (..., dim) of ``A x = b``."""
        return self.across(self.along(b) / self.values)

    def root_of_inverse(self) -> AnyArray:
        """Return the Cholesky factor (dim, dim) of the inverse; eigenvalues must be positive."""
        return root_of(self.vectors / self.values**0.5 / self.unit[:, None])


def root_of(M: AnyArray) -> AnyArray:
    """Return a lower triangular root of :math:`M M'`, for a matrix ``M`` (d, k)."""
    if not isinstance(M, np.ndarray):
        return linalg.root_of(M)
    _, R = np.linalg.qr(M.T)
    return (R * np.where(np.diagonal(R) < 0, -1.0, 1.0)[:, None]).T


def _is_diagonal(loc: Array, spread: Array) -> bool:
    """Return whether a root or a precision is one number for each coordinate."""
    if spread.shape == loc.shape:
        return True
    if spread.shape != (*loc.shape, *loc.shape[-1:]):
        raise ValueError(f"a spread of shape {spread.shape} does not go with means {loc.shape}.")
    return False


def _times(matrix: Array, vector: Array) -> Array:
    """Return matrices (..., dim, dim) times vectors (..., dim)."""
    return jnp.einsum("...ij,...j->...i", matrix, vector, precision="highest")


def unit_lower(below: Array, dim: int) -> Array:
    """Return unit lower triangular matrices (..., dim, dim) with ``below / sqrt(dim - 1)``."""
    if dim < 2:
        return jnp.broadcast_to(jnp.eye(dim), (*below.shape[:-1], dim, dim))
    return vec_to_tril_matrix(below / math.sqrt(dim - 1), diagonal=-1) + jnp.eye(dim)


def standard_normal(x: Array) -> Array:
    """Return the log density of the standard normal distribution at each number of ``x``."""
    return -0.5 * (x * x + LOG_2PI)


def symmetric(A: Array) -> Array:
    """Return the symmetric part of matrices (..., dim, dim)."""
    return 0.5 * (A + jnp.swapaxes(A, -1, -2))


def as_matrix(root: Array) -> Array:
    """Return a Cholesky factor (dim, dim) from one, or from standard deviations (dim,)."""
    return jnp.diag(root) if root.ndim == 1 else root


class Frame(NamedTuple):
    """The frames of the shared parameters and of the globals.

    ``theta`` has independent normals for each array of the shared parameters, unconstrained; it is
    ``()`` without a frame, where coordinates are the parameters themselves. ``globals`` is in the
    order of coordinates in which the globals' guide works.
    """

    theta: Any
    globals: Gaussian

    @classmethod
    def identity(cls, dim: int) -> Frame:
        """Return the frame that changes no coordinate, for ``dim`` globals."""
        return cls((), identity((dim,)))

    def parameters(self, steps: Tree) -> Tree:
        """Return the shared parameters at coordinates ``steps``."""
        # Without a frame there is nothing to map over: ``()`` does not match the parameters' tree.
        if self.theta == ():
            return steps
        return jax.tree.map(
            lambda frame, step: frame.draw(step),
            self.theta,
            steps,
            is_leaf=lambda leaf: isinstance(leaf, Gaussian),
        )


class Coordinates(NamedTuple):
    """The globals ``u`` (..., dim) in their frame, for local guides that depend on them.

    ``centre`` (dim,) is that of the globals' guide in the frame, from which local guides measure.
    """

    u: Array
    centre: Array

    @property
    def offset(self) -> Array:
        """The offset (..., dim) of the globals from the centre."""
        return self.u - self.centre


def identity(shape: tuple[int, ...]) -> Gaussian:
    """Return the frame that changes nothing: independent standard normals of this shape."""
    return Gaussian(jnp.zeros(shape), jnp.zeros(shape))
