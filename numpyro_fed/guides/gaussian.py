"""Gaussian guides as functions of their parameters and explicit standard noise."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed import linalg
from numpyro_fed.gaussian import Gaussian, as_matrix, standard_normal, unit_lower
from numpyro_fed.guides.base import GlobalGuide, GuideParams


@dataclass(frozen=True)
class _GaussianGuide(GlobalGuide):
    """What Gaussian guides share: normals as noise, and a density that sticks the landing.

    In the ``log_q`` of a draw the parameters are stopped (Roeder, Wu and Duvenaud 2017), which
    leaves its value alone.
    """

    init_scale: float
    density_everywhere = True

    def place(self, eta: GuideParams, noise: Array) -> Array:
        """Return the draw (dim,) that this noise makes."""
        return Gaussian.of(eta).draw(noise)

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.normal(key, (n, self.dim))

    def init(self, key: Array, loc: Array) -> GuideParams:
        return {"loc": loc, "log_scale": jnp.full(self.dim, jnp.log(self.init_scale))}

    def draw(self, eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        z = self.place(eta, noise)
        return z, self.log_density(stop_gradient(eta), z)

    def centre(self, eta: GuideParams) -> Array:
        return eta["loc"]

    def log_density(self, eta: GuideParams, z: Array) -> Array:
        return Gaussian.of(eta).log_density(z)

    def moved(self, eta: GuideParams, step: GuideParams) -> GuideParams:
        return Gaussian.of(eta).then(Gaussian.of(step)).params()


@dataclass(frozen=True)
class Diagonal(_GaussianGuide):
    """Independent normals."""

    has_standard_noise = True

    def standard_noise(self, eta: GuideParams, z: Array) -> Array:
        return Gaussian.of(eta).standardise(z)

    def around(self, key: Array, loc: Array, root: Array) -> GuideParams:
        return {"loc": loc, "log_scale": _conditional_log_scale(root)}


@dataclass(frozen=True)
class Full(_GaussianGuide):
    """A Gaussian with any covariance."""

    has_standard_noise = True

    def standard_noise(self, eta: GuideParams, z: Array) -> Array:
        return Gaussian.of(eta).standardise(z)

    def init(self, key: Array, loc: Array) -> GuideParams:
        return {**super().init(key, loc), "below": jnp.zeros(self.dim * (self.dim - 1) // 2)}

    def around(self, key: Array, loc: Array, root: Array) -> GuideParams:
        return Gaussian.of_root(loc, as_matrix(root)).params()


@dataclass(frozen=True)
class Skewed(_GaussianGuide):
    r"""A full covariance whose scales depend on the coordinates before them, in an ``order``.

    With :math:`\varepsilon` standard normal and ``P`` the permutation to that order,

    .. math::
        P z = P m + T \big(e^{s + D \varepsilon / \sqrt{d - 1}} \odot \varepsilon\big),

    ``T`` unit lower triangular and ``D`` strictly lower triangular: coefficients that spread as a
    scale does, and effects under theirs. With ``D = 0`` it is :class:`Full`.
    """

    order: tuple[int, ...]
    has_standard_noise = True

    @property
    def _order(self) -> np.ndarray:
        return np.array(self.order, np.int32)  # which JAX reads alike in either precision

    def _ordered(self, eta: GuideParams) -> Gaussian:
        """Return the Gaussian with ``D = 0``, its coordinates in order."""
        return Gaussian.of({**eta, "loc": eta["loc"][self._order]})

    def _back(self, ordered: Array) -> Array:
        """Return a vector in the order of ``z``, from one in order."""
        return ordered[np.argsort(self._order).astype(np.int32)]

    def _coupling(self, eta: GuideParams) -> Array:
        share = max(self.dim - 1, 1) ** -0.5
        return share * jnp.tril(eta["scale_coupling"], -1)

    def init(self, key: Array, loc: Array) -> GuideParams:
        below = jnp.zeros(self.dim * (self.dim - 1) // 2)
        D = jnp.zeros((self.dim, self.dim))
        return {**super().init(key, loc), "below": below, "scale_coupling": D}

    def place(self, eta: GuideParams, noise: Array) -> Array:
        q = self._ordered(eta)
        q = q._replace(log_scale=q.log_scale + self._coupling(eta) @ noise)
        return eta["loc"] + self._back(q.scaled(noise))

    def _inverted(self, eta: GuideParams, z: Array) -> tuple[Array, Array]:
        """Return the noise of which ``z`` is the draw, and the log-scales given it."""
        q, D = self._ordered(eta), self._coupling(eta)
        off = q._replace(log_scale=jnp.zeros(self.dim)).standardise(z[self._order])

        def one(noise: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
            i, x, s, D_i = row
            log_scale = s + D_i @ noise
            return noise.at[i].set(x * jnp.exp(-log_scale)), log_scale

        rows = (jnp.arange(self.dim), off, q.log_scale, D)
        return jax.lax.scan(one, jnp.zeros_like(z), rows)

    def standard_noise(self, eta: GuideParams, z: Array) -> Array:
        return self._inverted(eta, z)[0]

    def log_density(self, eta: GuideParams, z: Array) -> Array:
        noise, log_scales = self._inverted(eta, z)
        return standard_normal(noise).sum() - log_scales.sum()

    def around(self, key: Array, loc: Array, root: Array) -> GuideParams:
        parts = Gaussian.of_root(loc, linalg.root_of(as_matrix(root)[self._order])).params()
        return {**parts, "scale_coupling": jnp.zeros((self.dim, self.dim))}

    def moved(self, eta: GuideParams, step: GuideParams) -> GuideParams:
        after = self._ordered(eta).then(self._ordered(step)).params()
        D = eta["scale_coupling"] + step["scale_coupling"]
        return {**after, "loc": self._back(after["loc"]), "scale_coupling": D}

    def draw(self, eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        """Stick the landing: the noise as a function of ``z`` alone, by its derivative there."""
        z, fixed = self.place(eta, noise), stop_gradient(eta)
        D, T = self._coupling(fixed), unit_lower(fixed["below"], self.dim)
        scale = jnp.exp(fixed["log_scale"] + D @ noise)
        slope = T @ (scale[:, None] * (jnp.eye(self.dim) + noise[:, None] * D))
        at = noise + linalg.solve(slope, (z - stop_gradient(z))[self._order])
        return z, standard_normal(at).sum() - (fixed["log_scale"] + D @ at).sum()


@dataclass(frozen=True)
class LowRank(_GaussianGuide):
    """A Gaussian with covariance ``W W' + diag(exp(2 s))``, with ``W`` of ``rank`` columns."""

    rank: int

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.normal(key, (n, self.dim + self.rank))

    def _factor(self, key: Array) -> Array:
        return 0.1 * jax.random.normal(key, (self.dim, self.rank))

    def init(self, key: Array, loc: Array) -> GuideParams:
        return {**super().init(key, loc), "factor": self.init_scale * self._factor(key)}

    def place(self, eta: GuideParams, noise: Array) -> Array:
        own, shared = noise[: self.dim], noise[self.dim :]
        return eta["loc"] + jnp.exp(eta["log_scale"]) * own + eta["factor"] @ shared

    def log_density(self, eta: GuideParams, z: Array) -> Array:
        """Return it by Woodbury's formula, with :math:`L L' = I + W' e^{-2 s} W`."""
        scale = jnp.exp(eta["log_scale"])
        off, W = (z - eta["loc"]) / scale, eta["factor"] / scale[:, None]
        L = linalg.cholesky(jnp.eye(self.rank) + W.T @ W)
        shared = linalg.solve(L, W.T @ off)
        log_det = eta["log_scale"].sum() + jnp.log(jnp.diagonal(L)).sum()
        return standard_normal(off).sum() + 0.5 * (shared**2).sum() - log_det

    def around(self, key: Array, loc: Array, root: Array) -> GuideParams:
        log_scale = _conditional_log_scale(root)
        factor = jnp.exp(log_scale)[:, None] * self._factor(key)
        return {"loc": loc, "log_scale": log_scale, "factor": factor}

    def moved(self, eta: GuideParams, step: GuideParams) -> GuideParams:
        own = {name: eta[name] for name in ("loc", "log_scale")}
        factor = eta["factor"] + jnp.exp(eta["log_scale"])[:, None] * step["factor"]
        return {**super().moved(own, step), "factor": factor}


def _conditional_log_scale(root: Array) -> Array:
    """Return log standard deviations of each coordinate given all others.

    ``root`` is a Cholesky factor of the covariance, or these standard deviations themselves.
    """
    if root.ndim == 1:
        return jnp.log(root)
    inverse = linalg.solve(root, jnp.eye(len(root)))
    return -0.5 * jnp.log((inverse**2).sum(0))
