"""The Gaussian family, with a diagonal or a full covariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.util import vec_to_tril_matrix

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.expfam.family import Family, Index, Natural, Ordinary, Statistics
from numpyro_fed.numerics.gaussian import LOG_2PI, Gaussian, dot, symmetric


def gaussian(dim: int, covariance: str = "diagonal") -> Family[Array]:
    r"""Return the family of Gaussians with a diagonal or a full covariance.

    .. math::
        T(z) = (z, z z'), \quad \eta = (\Lambda m, -\tfrac12 \Lambda), \quad h = 1

    Parameters
    ----------
    dim : int
    covariance : {"diagonal", "full"}
        ``eta`` is ``{"first": (dim,), "second": (dim,) or (dim, dim)}``; the diagonal family has
        the squares of ``z`` and the diagonal of ``-Lambda / 2``. ``psi`` is ``{"loc": (dim,),
        "log_scale": (dim,)}`` and, where full, ``"below"``, the ``dim * (dim - 1) / 2`` numbers
        below the diagonal of ``T`` row by row, times ``sqrt(dim - 1)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.gaussian(2)
    >>> eta = family.fit(lambda z: -jnp.sum((z - 3.0) ** 2))
    >>> eta["second"]
    Array([-1., -1.], dtype=float32)
    >>> family.ordinary(eta)["loc"]
    Array([3., 3.], dtype=float32)
    """
    if covariance not in ("diagonal", "full"):
        raise ValueError(f"covariance must be 'diagonal' or 'full', got {covariance!r}.")
    return GaussianFamily(dim, covariance == "full")


@dataclass(frozen=True)
class GaussianFamily(Family[Array]):
    """Gaussians with independent coordinates, or (``full``) with any covariance."""

    full: bool = False
    name = "gaussian"
    of_normals = True

    def statistics(self, z: Array) -> Statistics:
        return {"first": z, "second": jnp.outer(z, z) if self.full else z**2}

    def increment(self, z: Array, u: Array) -> Statistics:
        if not self.full:
            return {"first": u, "second": u * (2 * z + u)}
        # z z' changes by u z' + z u' + u u': twice the symmetric part of u (z + u / 2)'.
        across = jnp.outer(u, z + 0.5 * u)
        return {"first": u, "second": across + across.T}

    def log_base(self, z: Array) -> Array:
        return jnp.zeros(())

    def log_partition(self, eta: Natural) -> Array:
        if not self.full:
            precision = -2 * eta["second"]
            return 0.5 * jnp.sum(eta["first"] ** 2 / precision - jnp.log(precision) + LOG_2PI)
        q = Gaussian.of_natural(**eta)
        w = dot(eta["first"], q.root)  # L^{-1} m
        return 0.5 * (jnp.sum(w**2) + self.dim * LOG_2PI) + q.log_scale.sum()

    def ordinary(self, eta: Natural) -> Ordinary:
        return Gaussian.of_natural(**eta).params()

    def natural(self, psi: Ordinary) -> Natural:
        first, second = Gaussian.from_params(psi).natural()
        return {"first": first, "second": second}

    def moments(self, psi: Ordinary) -> Statistics:
        q, outer = Gaussian.from_params(psi), self.statistics(psi["loc"])["second"]
        return {"first": q.loc, "second": q.covariance + outer}

    def from_mean(self, mu: Statistics) -> Natural:
        if not self.full:
            precision = 1 / (mu["second"] - mu["first"] ** 2)
            return {"first": precision * mu["first"], "second": -0.5 * precision}
        covariance = symmetric(mu["second"]) - jnp.outer(mu["first"], mu["first"])
        first, second = Gaussian.of_root(mu["first"], linalg.cholesky(covariance)).natural()
        return {"first": first, "second": second}

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.normal(key, (n, self.dim))

    def draw(self, psi: Ordinary, noise: Array) -> Array:
        return Gaussian.from_params(psi).draw(noise)

    def centre(self, psi: Ordinary) -> Array:
        return psi["loc"]

    def mean_and_sd(self, psi: Ordinary) -> tuple[Array, Array]:
        q = Gaussian.from_params(psi)
        return q.loc, q.sd

    def entropy(self, psi: Ordinary) -> Array:
        return Gaussian.from_params(psi).entropy()

    def log_density(self, eta: Natural, z: Array) -> Array:
        return Gaussian.of_natural(**eta).log_density(z)

    def kl(self, eta_q: Natural, eta_p: Natural) -> Array:
        return Gaussian.of_natural(**eta_q).kl(Gaussian.of_natural(**eta_p))

    def proper(self, eta: Natural) -> Array:
        psi = self.ordinary(eta)
        mean, sd = self.mean_and_sd(psi)
        fine = all_finite((eta, psi)) & (jnp.isfinite(mean) & jnp.isfinite(sd) & (sd > 0)).all()
        if not self.full:
            return fine
        # The precision is factored from both ends. Near singular matrices in single precision one
        # of the two factorisations may succeed by rounding.
        return all_finite(linalg.cholesky(-2 * symmetric(eta["second"]))) & fine

    def fit(self, f: Callable[[Array], Array]) -> Natural:
        zero = jnp.zeros(self.dim)
        if not self.full:
            # A function of this family has a diagonal Hessian: times ones it is the diagonal.
            first, curvature = jax.jvp(jax.grad(f), (zero,), (jnp.ones(self.dim),))
            return {"first": first, "second": 0.5 * curvature}

        # Value and Jacobian of the gradient in one program; at zero ``first`` is the gradient.
        curvature, first = jax.jacfwd(lambda z: (g := jax.grad(f)(z), g), has_aux=True)(zero)
        return {"first": first, "second": 0.5 * symmetric(curvature)}

    def from_derivatives(self, z: Array, gradient: Array, curvature: Array) -> Natural:
        if not self.full:
            diagonal = jnp.diagonal(curvature)
            return {"first": gradient + diagonal * z, "second": -0.5 * diagonal}
        A = symmetric(curvature)
        return {"first": gradient + dot(A, z), "second": -0.5 * A}

    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Statistics:
        if not self.full:
            psi = self.ordinary(eta)
            g = jax.grad(f)(psi)
            # In mean parameters: E[z] at fixed E[z^2] also changes the variance.
            by_variance = 0.5 * g["log_scale"] * jnp.exp(-2 * psi["log_scale"])
            return {"first": g["loc"] - 2 * by_variance * psi["loc"], "second": by_variance}
        q = Gaussian.of_natural(**eta)
        g = jax.grad(f)(q.params())
        # The gradient in the covariance is L^-T (L' G L) L^-1: two solves, and no inverse.
        half = linalg.solve(q.root, _by_covariance(q, g), transposed=True)
        by_covariance = symmetric(linalg.solve(q.root, half.T, transposed=True))
        return {"first": g["loc"] - 2 * dot(by_covariance, q.loc), "second": by_covariance}

    def move(self, psi: Ordinary, gradient: Statistics) -> Array:
        if not self.full:
            by_mean = gradient["loc"] * jnp.exp(psi["log_scale"])
            return jnp.concatenate([by_mean, 0.5 * gradient["log_scale"]])
        q = Gaussian.from_params(psi)
        L, variance = q.root, jnp.sum(q.root**2, -1)
        mean = dot(L, dot(gradient["loc"], L))
        widened = jnp.sum(dot(L, _by_covariance(q, gradient)) * L, -1)
        return jnp.concatenate([mean / jnp.sqrt(variance), widened / variance])

    def standard(self, psi: Ordinary) -> Ordinary:
        return jax.tree.map(jnp.zeros_like, psi)

    def composed(self, psi: Ordinary, step: Ordinary) -> Ordinary:
        return Gaussian.from_params(psi).compose(Gaussian.from_params(step)).params()

    def to_coordinates_of(self, psi: Ordinary, eta: Natural) -> Natural:
        if not self.full:
            scale = jnp.exp(psi["log_scale"])
            slope = eta["first"] + 2 * eta["second"] * psi["loc"]
            return {"first": scale * slope, "second": scale**2 * eta["second"]}
        L, second = Gaussian.from_params(psi).root, symmetric(eta["second"])
        slope = eta["first"] + 2 * dot(second, psi["loc"])
        return {"first": dot(slope, L), "second": symmetric(dot(L.T, dot(second, L)))}

    def from_coordinates_of(self, psi: Ordinary, eta: Natural) -> Natural:
        if not self.full:
            scale = jnp.exp(psi["log_scale"])
            second = eta["second"] / scale**2
            return {"first": eta["first"] / scale - 2 * second * psi["loc"], "second": second}
        K = Gaussian.from_params(psi).inverse_root()
        second = symmetric(dot(K.T, dot(eta["second"], K)))
        return {"first": dot(eta["first"], K) - 2 * dot(second, psi["loc"]), "second": second}

    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int = 0
    ) -> dist.Distribution:
        if not self.full:
            parts = {name: leaf[index].reshape(shape) for name, leaf in eta.items()}
            q = Gaussian.of_natural(**parts)
            return dist.Normal(q.loc, q.scale).to_event(event_dim)
        q = Gaussian.of_natural(**eta)
        loc, rows = q.loc[index].reshape(shape), q.root[index]
        if event_dim == 0:
            return dist.Normal(loc, jnp.linalg.norm(rows, axis=-1).reshape(shape))
        blocks = rows.reshape(*shape, self.dim)
        covariance = dot(blocks, jnp.swapaxes(blocks, -1, -2))
        return dist.MultivariateNormal(loc, covariance).to_event(event_dim - 1)


def _by_covariance(q: Gaussian, gradient: Statistics) -> Array:
    """Return ``L' G L`` for the gradient ``G`` in the covariance, from that in the parameters."""
    dim, L = q.loc.shape[-1], q.root
    if dim < 2:
        by_root = jnp.diag(gradient["log_scale"] / q.scale)
    else:
        below = vec_to_tril_matrix(gradient["below"], diagonal=-1) * math.sqrt(dim - 1) / q.scale
        own = gradient["log_scale"] - jnp.sum(below * L, 0)
        by_root = below + jnp.diag(own / q.scale)
    # By Murray 2016, "Differentiation of the Cholesky decomposition", section 4. To factor the
    # covariance again would lose as many digits as its condition number has.
    P = jnp.tril(dot(L.T, by_root))
    return 0.5 * (P + P.T - jnp.diag(jnp.diagonal(P)))


def rounding(eta: Natural) -> float:
    """Return the largest move of a Gaussian by rounding its natural parameters, in sds.

    It is the largest move of a mean or a log standard deviation in eight random roundings, each of
    which changes every number by one unit in the last place. A sum of many factors has lost several
    times as much.
    """
    eps = jnp.finfo(eta["first"].dtype).eps
    first, second = (np.asarray(eta[name], float) for name in ("first", "second"))
    r, worst = np.random.default_rng(0), 0.0
    try:
        covariance = None if second.ndim == 1 else np.linalg.inv(-(second + second.T))
    except np.linalg.LinAlgError:
        return np.inf
    for _ in range(8):
        by_first = eps * r.choice([-1.0, 1.0], first.shape) * first
        by_second = eps * r.choice([-1.0, 1.0], second.shape) * second
        if covariance is None:
            variance = -0.5 / second
            moved = variance * (by_first + 2 * by_second * variance * first)
            widened = variance * by_second
        else:
            variance, mean = np.diagonal(covariance), covariance @ first
            change = by_second + by_second.T
            moved = covariance @ (by_first + change @ mean)
            widened = 0.5 * ((covariance @ change) * covariance).sum(1) / variance
        worst = max(worst, np.abs(moved / np.sqrt(np.abs(variance))).max(), np.abs(widened).max())
    return float(worst)
