"""Gamma, Beta and Dirichlet families: the priors of conjugate models."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.nn import log_sigmoid, logsumexp
from jax.scipy.special import digamma, gammaln, polygamma

from numpyro_fed.numerics.expfam.family import Family, Index, Natural, Ordinary, Statistics

# Fits take derivatives at z = -8 and 8. Farther out single precision loses 1 - sigmoid(z); closer
# to zero the two slopes are less different, and their difference has fewer digits.
_FAR = 8.0
# Log concentration above which the logarithm of a Gamma variable is drawn as normal (about 1.2e6).
_NORMAL = 14.0
_EULER_GAMMA = 0.5772156649015329


def gamma(shape: tuple[int, ...] = ()) -> Family[Array]:
    r"""Return the family of Gamma variables ``x = exp(z)``, shapes ``alpha``, rates ``beta``.

    .. math::
        T(z) = (\log x, x), \quad \eta = (\alpha - 1, -\beta), \quad h = \prod x

    Poisson and exponential likelihoods of a rate ``x``, and that of a normal's precision, are
    affine in ``T``.

    Parameters
    ----------
    shape : tuple of int
        ``eta`` is ``{"log": shape, "linear": shape}``; ``psi`` is ``{"log_concentration",
        "log_rate"}`` of that shape.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.gamma(())
    >>> prior = family.natural({"log_concentration": jnp.log(2.0), "log_rate": jnp.log(1.0)})
    >>> count = family.fit(lambda z: 5 * z[0] - jnp.exp(z[0]))          # Poisson, y = 5
    >>> posterior = {name: prior[name] + count[name] for name in prior}
    >>> q = family.marginal(posterior, slice(0, 1), ())
    >>> round(float(q.concentration), 4), round(float(q.rate), 4)
    (7.0, 2.0)
    """
    return Gamma(math.prod(shape), shape)


def beta(shape: tuple[int, ...] = ()) -> Family[Array]:
    r"""Return the family of independent Beta variables ``x = 1 / (1 + exp(-z))``.

    .. math::
        T(z) = (\log x, \log(1 - x)), \quad \eta = (a - 1, b - 1), \quad h = \prod x (1 - x)

    A Dirichlet of two categories. Bernoulli, binomial and geometric likelihoods of a probability
    ``x`` are affine in ``T``.

    Parameters
    ----------
    shape : tuple of int
        ``eta`` is ``{"log": (*shape, 2)}``, first ``a - 1``, then ``b - 1``; ``psi`` is
        ``{"log_concentration": (*shape, 2)}``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.beta(())
    >>> family.moments(family.ordinary({"log": jnp.zeros(2)}))["log"]   # E[log x], x uniform
    Array([-1., -1.], dtype=float32)
    """
    return Simplex(math.prod(shape), shape, 2, number=True)


def dirichlet(batch_shape: tuple[int, ...], k: int) -> Family[Array]:
    r"""Return the family of Dirichlet vectors ``x`` of ``k`` categories, by stick-breaking.

    .. math::
        T(z) = \log x, \quad \eta = \alpha - 1, \quad h = \prod_i x_i

    Categorical and multinomial likelihoods of the probabilities ``x`` are affine in ``T``.

    Parameters
    ----------
    batch_shape : tuple of int
    k : int
        ``eta`` is ``{"log": (*batch_shape, k)}``, ``psi`` is ``{"log_concentration":
        (*batch_shape, k)}``; ``z`` has ``k - 1`` numbers for each ``x``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.dirichlet((), 3)
    >>> eta = {"log": jnp.array([1.0, 2.0, 3.0])}
    >>> family.marginal(eta, slice(0, 2), (2,), event_dim=1).concentration
    Array([2., 3., 4.], dtype=float32)
    """
    return Simplex(math.prod(batch_shape) * (k - 1), batch_shape, k)


@dataclass(frozen=True)
class _OverSupport(Family[Array]):
    """The base class of families whose distribution is over ``x``, and whose noise is keys."""

    @abstractmethod
    def distribution(self, eta: Natural) -> dist.Distribution:
        """Return NumPyro's distribution of ``x``."""

    def noise(self, key: Array, n: int) -> Array:
        return jax.random.split(key, n)

    def kl(self, eta_q: Natural, eta_p: Natural) -> Array:
        return dist.kl_divergence(self.distribution(eta_q), self.distribution(eta_p)).sum()

    def marginal(
        self, eta: Natural, index: Index, shape: tuple[int, ...], event_dim: int = 0
    ) -> dist.Distribution:
        if not np.array_equal(np.arange(self.dim)[index], np.arange(self.dim)):
            raise ValueError(
                f"a {self.name} family has no marginal for a part of its {self.dim} numbers."
            )
        q = self.distribution(eta)
        return q.to_event(event_dim - q.event_dim)


@dataclass(frozen=True)
class Gamma(_OverSupport):
    """Independent Gamma variables: see :func:`gamma`."""

    shape: tuple[int, ...]
    name = "gamma"

    def distribution(self, eta: Natural) -> dist.Distribution:
        return dist.Gamma(eta["log"] + 1, -eta["linear"])

    def statistics(self, z: Array) -> Statistics:
        z = z.reshape(self.shape)
        return {"log": z, "linear": jnp.exp(z)}

    def log_base(self, z: Array) -> Array:
        return jnp.sum(z)

    def log_partition(self, eta: Natural) -> Array:
        alpha, beta = eta["log"] + 1, -eta["linear"]
        return jnp.sum(gammaln(alpha) - alpha * jnp.log(beta))

    def ordinary(self, eta: Natural) -> Ordinary:
        return {"log_concentration": jnp.log1p(eta["log"]), "log_rate": jnp.log(-eta["linear"])}

    def natural(self, psi: Ordinary) -> Natural:
        return {"log": jnp.expm1(psi["log_concentration"]), "linear": -jnp.exp(psi["log_rate"])}

    def moments(self, psi: Ordinary) -> Statistics:
        log_alpha, log_beta = psi["log_concentration"], psi["log_rate"]
        return {
            "log": digamma(jnp.exp(log_alpha)) - log_beta,
            "linear": jnp.exp(log_alpha - log_beta),
        }

    def from_mean(self, mu: Statistics) -> Natural:
        # Newton steps for 1 / alpha, whose root is log(alpha) - digamma(alpha) = gap (Minka 2002,
        # "Estimating a Gamma distribution"). His closed-form start is within 1.5 %; each step
        # squares the error, so six are plenty.
        gap = jnp.log(mu["linear"]) - mu["log"]

        def step(_: int, alpha: Array) -> Array:
            miss = jnp.log(alpha) - digamma(alpha) - gap
            return 1 / (1 / alpha + miss / (alpha - alpha**2 * polygamma(1, alpha)))

        start = (3 - gap + jnp.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
        alpha = lax.fori_loop(0, 6, step, start)
        return {"log": alpha - 1, "linear": -alpha / mu["linear"]}

    def draw(self, psi: Ordinary, noise: Array) -> Array:
        z = _log_gamma(noise, psi["log_concentration"]) - psi["log_rate"]
        return z.reshape(self.dim)

    def centre(self, psi: Ordinary) -> Array:
        return (psi["log_concentration"] - psi["log_rate"]).reshape(self.dim)

    def mean_and_sd(self, psi: Ordinary) -> tuple[Array, Array]:
        alpha = jnp.exp(psi["log_concentration"]).reshape(self.dim)
        mean = digamma(alpha) - psi["log_rate"].reshape(self.dim)
        return mean, jnp.sqrt(polygamma(1, alpha))

    def fit(self, f: Callable[[Array], Array]) -> Natural:
        below, above = (
            jax.grad(f)(jnp.full(self.dim, z, float)).reshape(self.shape) for z in (-_FAR, _FAR)
        )
        # For f(z) = a z + b exp(z) the slope is a + b exp(z): slopes at two points give both.
        slope = (above - below) / (math.exp(_FAR) - math.exp(-_FAR))
        return {"log": below - slope * math.exp(-_FAR), "linear": slope}

    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Statistics:
        g = jax.grad(f)(self.ordinary(eta))
        by_alpha, by_rate = g["log_concentration"], g["log_rate"]
        alpha = eta["log"] + 1
        excess = _excess(alpha)
        return {
            "log": (by_alpha + by_rate) / excess,
            "linear": eta["linear"] * (polygamma(1, alpha) * by_rate + by_alpha / alpha) / excess,
        }


@dataclass(frozen=True)
class Simplex(_OverSupport):
    """Dirichlet vectors of ``k`` probabilities by stick-breaking: see :func:`dirichlet`.

    Of Beta variables (:func:`beta`) the event is one ``number``, the first of two probabilities.
    """

    batch_shape: tuple[int, ...]
    k: int
    number: bool = False

    @property
    def name(self) -> str:
        return "beta" if self.number else "dirichlet"

    def distribution(self, eta: Natural) -> dist.Distribution:
        a = eta["log"] + 1
        return dist.Beta(a[..., 0], a[..., 1]) if self.number else dist.Dirichlet(a)

    def balance(self) -> Array:
        """Return the shifts (k - 1,) with which ``z = 0`` is the uniform vector, as in NumPyro."""
        # At each call: JAX keeps a NumPy constant in the precision in which it first met it.
        return jnp.log(jnp.arange(self.k - 1, 0, -1, float))

    def from_logs(self, logs: Array) -> Array:
        """Return the flat ``z`` of the ``x`` whose logarithms are ``logs`` up to a constant."""
        rest = lax.cumlogsumexp(logs, axis=len(self.batch_shape), reverse=True)[..., 1:]
        return (logs[..., :-1] - rest + self.balance()).reshape(self.dim)

    def statistics(self, z: Array) -> Statistics:
        z = z.reshape(*self.batch_shape, self.k - 1) - self.balance()
        rest = jnp.cumsum(log_sigmoid(-z), axis=-1)
        first = log_sigmoid(z) + jnp.concatenate([jnp.zeros_like(z[..., :1]), rest[..., :-1]], -1)
        return {"log": jnp.concatenate([first, rest[..., -1:]], -1)}

    def log_base(self, z: Array) -> Array:
        return self.statistics(z)["log"].sum()

    def log_partition(self, eta: Natural) -> Array:
        a = eta["log"] + 1
        return gammaln(a).sum() - gammaln(a.sum(-1)).sum()

    def ordinary(self, eta: Natural) -> Ordinary:
        return {"log_concentration": jnp.log1p(eta["log"])}

    def natural(self, psi: Ordinary) -> Natural:
        return {"log": jnp.expm1(psi["log_concentration"])}

    def moments(self, psi: Ordinary) -> Statistics:
        a = jnp.exp(psi["log_concentration"])
        return {"log": digamma(a) - digamma(a.sum(-1, keepdims=True))}

    def from_mean(self, mu: Statistics) -> Natural:
        # Solve digamma(a) - digamma(sum(a)) = g, by Newton steps for the sum s: it is the root of
        # sum_i digamma^-1(g_i + digamma(s)) - s. That function is concave and the start is above
        # its root, so that the steps decrease to it.
        g = mu["log"]

        def parts(s: Array) -> Array:
            # The inverse of digamma: five Newton steps from Minka's start reach fourteen digits
            # ("Estimating a Dirichlet distribution", 2000, appendix C).
            y = g + digamma(s)
            first = jnp.where(y >= -2.22, jnp.exp(y) + 0.5, -1 / (y + _EULER_GAMMA))
            return lax.fori_loop(0, 5, lambda _, x: x - (digamma(x) - y) / polygamma(1, x), first)

        def step(_: int, s: Array) -> Array:
            a = parts(s)
            slope = polygamma(1, s) * (1 / polygamma(1, a)).sum(-1, keepdims=True) - 1
            return s - (a.sum(-1, keepdims=True) - s) / slope

        start = 0.5 * self.k / -jnp.expm1(logsumexp(g, axis=-1, keepdims=True))
        return {"log": parts(lax.fori_loop(0, 12, step, start)) - 1}

    def draw(self, psi: Ordinary, noise: Array) -> Array:
        return self.from_logs(_log_gamma(noise, psi["log_concentration"]))

    def centre(self, psi: Ordinary) -> Array:
        return self.from_logs(psi["log_concentration"])

    def mean_and_sd(self, psi: Ordinary) -> tuple[Array, Array]:
        a = jnp.exp(psi["log_concentration"])
        first, rest = a[..., :-1], jnp.cumsum(a[..., ::-1], -1)[..., -2::-1]
        mean = digamma(first) - digamma(rest) + self.balance()
        sd = jnp.sqrt(polygamma(1, first) + polygamma(1, rest))
        return mean.reshape(self.dim), sd.reshape(self.dim)

    def fit(self, f: Callable[[Array], Array]) -> Natural:
        balance, k = self.balance(), self.k
        low = jnp.broadcast_to(balance - _FAR, (*self.batch_shape, k - 1))
        last_high = low.at[..., -1].set(balance[-1] + _FAR)
        everywhere, last = (
            jax.grad(f)(z.reshape(self.dim)).reshape(low.shape) for z in (low, last_high)
        )
        slopes = jnp.concatenate([everywhere, last[..., -1:]], -1)
        # With p and q = 1 - p the parts of the stick, d/dz_i of <a, log x> is
        # p a_i - q (a_{i+1} + ... + a_k) where z_i is low, and with p and q exchanged where it is
        # high, as the last one is in the last row.
        p, q = (1 / (1 + math.exp(s * _FAR)) for s in (-1, 1))
        by_log_x = p * np.eye(k) - q * np.triu(np.ones((k, k)), 1)
        by_log_x[-1] = 0.0
        by_log_x[-1, -2:] = q, -p
        return {"log": jnp.matmul(slopes, np.linalg.inv(by_log_x).T, precision="highest")}

    def dual_gradient(self, f: Callable[[Ordinary], Array], eta: Natural) -> Statistics:
        # The Fisher matrix is diagonal plus rank one, and is inverted by Sherman and Morrison's
        # formula. ``gap`` is its denominator, written without the cancellation of large ``a``.
        a = eta["log"] + 1
        own, total = polygamma(1, a), a.sum(-1, keepdims=True)
        g = jax.grad(f)({"log_concentration": jnp.log(a)})["log_concentration"] / (a * own)
        gap = (_excess(a) / own).sum(-1, keepdims=True) - _excess(total) / polygamma(1, total)
        return {"log": g + g.sum(-1, keepdims=True) / (gap * own)}


def _log_gamma(key: Array, log_alpha: Array) -> Array:
    """Return draws of the logarithm of Gamma variables with rate 1, of the shape of ``log_alpha``.

    At concentrations above a million they are drawn as normals: their skewness is below a
    thousandth, and the derivative of an exact draw takes seconds.
    """
    exact = jax.random.loggamma(key, jnp.exp(jnp.minimum(log_alpha, _NORMAL)))
    scale = jnp.exp(-0.5 * jnp.maximum(log_alpha, _NORMAL))
    epsilon = jax.random.normal(key, log_alpha.shape, log_alpha.dtype)
    normal = log_alpha - 0.5 * scale**2 + scale * epsilon
    return jnp.where(log_alpha > _NORMAL, normal, exact)


def _excess(x: Array) -> Array:
    """Return ``x trigamma(x) - 1``, by its series above 16, where the difference would cancel."""
    large = jnp.maximum(x, 16.0)
    series = (0.5 + (1 / 6 - (1 / 30 - 1 / (42 * large**2)) / large**2) / large) / large
    return jnp.where(x > 16.0, series, x * polygamma(1, x) - 1)
