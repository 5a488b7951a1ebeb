r"""Losses of one observation, for generalised Bayesian inference.

A loss replaces minus the log density of an observation. It is any function
``loss(distribution, value)`` that returns one number for each element of the distribution's batch;
:func:`numpyro_fed.handlers.generalised` puts it into a model. The losses of this module tend to the
log loss in a limit, where their additive constants vanish, and are zero where a distribution is
masked. An event, as ``to_event`` makes it, is one observation: its density is the product over its
coordinates, so that a single outlying coordinate discounts the whole event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln, logsumexp
from jax.typing import ArrayLike
from numpyro.distributions import Distribution
from numpyro.distributions.util import sum_rightmost

from numpyro_fed.basics.errors import ModelError, is_number
from numpyro_fed.numerics.accurate_densities import accurate
from numpyro_fed.numerics.gaussian import LOG_2PI

__all__ = ["beta_loss", "gamma_loss", "generalised_cross_entropy", "log_loss"]


def __dir__() -> list[str]:
    return __all__


# Power integrals of counts are a sum of _TERMS up to a variance of _SWITCH, and beyond it the
# trapezoidal rule at _POINTS, in sds of the power. With a variance of 64 the sum covers all counts,
# or ten sds on both sides; the rule's points reach from -6.4 to 9.6 sds, since rare counts are
# skewed to the right.
# For the rule's error at a step of 0.8 sds see log_power_integral.
_SWITCH = 64
_TERMS = np.arange(160)
_STEP = 0.8
_POINTS = _STEP * np.arange(-8, 13)


@dataclass(frozen=True, repr=False)
class _LogLoss:
    """Minus the log density, whose posterior is the ordinary one."""

    def __call__(self, distribution: Distribution, value: ArrayLike) -> Array:
        return -jnp.asarray(accurate(distribution).log_prob(value))

    def __repr__(self) -> str:
        return "log_loss"


log_loss = _LogLoss()
"""Minus the log density, which is ordinary Bayesian inference."""


@dataclass(frozen=True)
class beta_loss:
    r"""The beta (density-power) loss.

    .. math::
        \ell(p, y) = -\frac{p(y)^{\beta-1} - 1}{\beta - 1}
        + \frac1\beta \Big(\int p(x)^\beta \, dx - 1\Big)

    The first term is at most ``1 / (beta - 1)``, however far out a value is.

    The constants ``1 / (beta - 1)`` and ``-1 / beta`` are this package's: they change no
    posterior, and with them the log loss is the limit at ``beta = 1``. With the density-power
    parameter ``a = beta - 1`` of Basu et al., the loss is their ``int p^(1+a) - (1 + 1/a) p(y)^a``
    divided by ``1 + a``, up to the constants.

    Parameters
    ----------
    beta : float
        Above 1; 1.1 to 1.5 are common, and larger is more robust and less efficient.

    Raises
    ------
    ModelError
        When called with a distribution whose power integral is not built in: see
        ``numpyro_fed.numerics.losses.log_power_integral``.

    References
    ----------
    Basu, Harris, Hjort, Jones (1998). Knoblauch, Jewson, Damoulas (2022), JMLR 23(132). Mildner
    et al. (2025), arXiv 2502.00846.

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from numpyro_fed.numerics.losses import beta_loss, log_loss
    >>> robust = beta_loss(1.5)
    >>> [round(float(robust(dist.Normal(0, 1), y)), 3) for y in (0.0, 10.0, 100.0)]
    [0.414, 1.677, 1.677]
    >>> round(float(log_loss(dist.Normal(0, 1), 100.0)), 3)
    5000.919
    """

    beta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", _above_one("beta", self.beta))

    def __call__(self, distribution: Distribution, value: ArrayLike) -> Array:
        power = self.beta - 1
        log_integral = log_power_integral(distribution, self.beta)
        log_p = accurate(distribution).log_prob(value)
        return -jnp.expm1(power * log_p) / power + jnp.expm1(log_integral) / self.beta


@dataclass(frozen=True)
class gamma_loss:
    r"""The gamma loss, that of the pseudo-spherical score.

    .. math::
        \ell(p, y) = -\frac{\gamma}{\gamma - 1}
        \Big( \frac{p(y)^{\gamma-1}}{\big(\int p(x)^\gamma\, dx\big)^{(\gamma-1)/\gamma}} - 1 \Big)

    It is at most ``gamma / (gamma - 1)``, however far out a value is. The constant in it is this
    package's: it changes no posterior, and with it the log loss is the limit at ``gamma = 1``.

    Parameters
    ----------
    gamma : float
        Above 1.

    Raises
    ------
    ModelError
        When called with a distribution whose power integral is not built in.

    References
    ----------
    Fujisawa, Eguchi (2008); Hung et al. (2018). Knoblauch, Jewson, Damoulas (2022), JMLR 23(132).

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from numpyro_fed.numerics.losses import gamma_loss
    >>> [round(float(gamma_loss(1.5)(dist.Normal(0, 1), y)), 3) for y in (0.0, 10.0, 100.0)]
    [0.637, 3.0, 3.0]
    """

    gamma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _above_one("gamma", self.gamma))

    def __call__(self, distribution: Distribution, value: ArrayLike) -> Array:
        power = self.gamma - 1
        log_integral = log_power_integral(distribution, self.gamma)
        log_p = accurate(distribution).log_prob(value)
        return -jnp.expm1(power * (log_p - log_integral / self.gamma)) * self.gamma / power


@dataclass(frozen=True)
class generalised_cross_entropy:
    r"""The generalised cross entropy, for discrete distributions.

    .. math::
        \ell(p, y) = \frac{1 - p(y)^\delta}{\delta}

    Parameters
    ----------
    delta : float
        In (0, 1]. The limit at 0 is the log loss; 1 is one minus the probability, as of the mean
        absolute error.

    Raises
    ------
    ModelError
        When called with a distribution that is not discrete.

    References
    ----------
    Zhang, Sabuncu (2018), "Generalized Cross Entropy Loss for Training Deep Neural Networks with
    Noisy Labels", equation 6.

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from numpyro_fed.numerics.losses import generalised_cross_entropy
    >>> loss = generalised_cross_entropy(0.5)
    >>> [round(float(loss(dist.Bernoulli(logits=8.0), y)), 3) for y in (1, 0)]
    [0.0, 1.963]
    """

    delta: float

    def __post_init__(self) -> None:
        if not (is_number(self.delta) and 0 < self.delta <= 1):
            raise ValueError(
                f"delta must be a number in (0, 1], got {self.delta!r}. Its limit at 0 is log_loss."
            )
        object.__setattr__(self, "delta", float(self.delta))

    def __call__(self, distribution: Distribution, value: ArrayLike) -> Array:
        if not getattr(distribution.support, "is_discrete", False):
            inside = distribution
            while hasattr(inside, "base_dist"):
                inside = inside.base_dist
            raise ModelError(
                f"generalised_cross_entropy is for discrete distributions, got "
                f"{type(inside).__name__}. Use beta_loss or gamma_loss."
            )
        log_p = jnp.asarray(accurate(distribution).log_prob(value))
        return -jnp.expm1(self.delta * log_p) / self.delta


def log_power_integral(distribution: Distribution, power: float) -> Array:
    r"""Return the log of the sum or integral of a density to a power.

    .. math::
        \log \int p(x)^b \, dx

    It knows Bernoulli, Categorical, Binomial, Poisson and Normal, also after ``expand``,
    ``to_event`` and ``mask``. A product of densities has the product of the integrals; a masked
    density has the integral 1.

    For a Poisson and a Binomial the relative error is below 1e-8 in double precision. Up to a
    variance of 64 it is a sum of at most 160 terms. Beyond that it is the trapezoidal rule for the
    integral over real ``x``, with steps of 0.8 standard deviations of ``p^b``. The sum and the
    integral differ by ``2 exp(-2 pi^2 variance / b)``, relative, and the integral and the rule by
    ``2 exp(-2 pi^2 / 0.64)``.

    Parameters
    ----------
    distribution : Distribution
    power : float
        ``b``, at least 1.

    Returns
    -------
    array of the distribution's batch shape

    Raises
    ------
    ModelError
        For any other distribution; for a Poisson or a Binomial and a power above 64.

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from numpyro_fed.numerics.losses import log_power_integral
    >>> round(float(log_power_integral(dist.Bernoulli(0.5), 2.0)), 4)  # log(0.25 + 0.25)
    -0.6931
    """
    # By the exact type: a subclass may have another density.
    kind, d = type(distribution), distribution
    if kind in (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution):
        inside = log_power_integral(d.base_dist, power)
        if kind is dist.ExpandedDistribution:
            return jnp.broadcast_to(inside, d.batch_shape)
        if kind is dist.Independent:
            return sum_rightmost(inside, d.reinterpreted_batch_ndims)
        return jnp.where(d._mask, inside, 0.0)
    if kind in (dist.BernoulliLogits, dist.BernoulliProbs):
        logits = jnp.asarray(d.logits)
        return jnp.logaddexp(-power * jax.nn.softplus(logits), -power * jax.nn.softplus(-logits))
    if kind in (dist.CategoricalLogits, dist.CategoricalProbs):
        return logsumexp(power * jax.nn.log_softmax(d.logits), axis=-1)
    if kind is dist.Normal:
        log_width = jnp.log(d.scale) + 0.5 * LOG_2PI
        return jnp.broadcast_to((1 - power) * log_width - 0.5 * math.log(power), d.batch_shape)
    if kind not in (dist.Poisson, dist.BinomialLogits, dist.BinomialProbs):
        raise ModelError(
            f"the integral of the density of {kind.__name__} to a power is not built in, as it is "
            "for Bernoulli, Categorical, Binomial, Poisson and Normal. Give a loss of your own: a "
            "function loss(distribution, value) with one number for each element of the batch."
        )
    if power > _SWITCH:
        raise ModelError(
            f"the power integral of {kind.__name__} is accurate up to a power of {_SWITCH}, got "
            f"{power}."
        )
    if kind is not dist.Poisson:
        return _binomial(d, power)
    rate = jnp.asarray(d.rate, jnp.result_type(float))
    k = jnp.asarray(_TERMS, rate.dtype)
    few = jnp.clip(rate, jnp.finfo(rate.dtype).tiny, _SWITCH)[..., None]
    log_sum = logsumexp(power * (k * jnp.log(few) - gammaln(k + 1) - few), axis=-1)
    # The rule for many: at ``k = many (1 + u)``, ``log p`` is ``-many u^2 r(u)`` + series, in which
    # nothing cancels for large rates, where ``k log(rate) - log k!`` would.
    many = jnp.maximum(rate, _SWITCH)
    t = jnp.asarray(_POINTS, rate.dtype) / math.sqrt(power)
    u = t / jnp.sqrt(many)[..., None]
    k = many[..., None] * (1 + u)
    log_p = -(t**2) * _deviance(u) - 0.5 * (LOG_2PI + jnp.log(k)) - _stirling(k)
    log_step = math.log(_STEP) + 0.5 * jnp.log(many / power)
    return jnp.where(rate < _SWITCH, log_sum, logsumexp(power * log_p, axis=-1) + log_step)


def _binomial(d: dist.BinomialLogits | dist.BinomialProbs, power: float) -> Array:
    n, p = jnp.broadcast_arrays(jnp.asarray(d.total_count), jnp.asarray(d.probs))
    many = n * p * (1 - p) > _SWITCH
    # Both branches are computed, under ``where``. Each gets harmless arguments where the other one
    # counts, so that neither overflows there and makes the gradient NaN.
    # The sum over all counts if there are few, else over those near the mean.
    mean, terms = jnp.where(many, 0.0, n * p), len(_TERMS)
    if not isinstance(d.total_count, jax.core.Tracer):
        terms = min(terms, int(np.max(d.total_count, initial=0)) + 1)
    last = jnp.maximum(n - terms + 1, 0)
    first = jnp.clip(jnp.floor(mean).astype(n.dtype) - terms // 2, 0, last)
    k = first + jnp.arange(terms, dtype=n.dtype).reshape(-1, *(1 for _ in d.batch_shape))
    log_p = accurate(d).log_prob(jnp.minimum(k, n))
    log_sum = logsumexp(jnp.where(k <= n, power * log_p, -jnp.inf), axis=0)
    # The rule, as for a Poisson, by deviances of successes and of failures.
    p = jnp.where(many, jnp.minimum(p, 1 - p), 0.5)
    n = jnp.where(many, n, 4 * _SWITCH)
    mean, mean_failures = (n * p)[..., None], (n * (1 - p))[..., None]
    t = jnp.asarray(_POINTS, mean.dtype) / math.sqrt(power)
    scale = jnp.sqrt(mean * (1 - p)[..., None])
    k, failures = mean + t * scale, mean_failures - t * scale
    deviance = t**2 * (
        (1 - p)[..., None] * _deviance(t * scale / mean)
        + p[..., None] * _deviance(-t * scale / mean_failures)
    )
    log_width = 0.5 * (LOG_2PI + jnp.log(k) + jnp.log(failures / n[..., None]))
    stirling = _stirling(k) + _stirling(failures) - _stirling(n[..., None])
    log_step = jnp.log(_STEP * scale[..., 0]) - 0.5 * math.log(power)
    log_rule = logsumexp(-power * (deviance + log_width + stirling), axis=-1) + log_step
    return jnp.where(many, log_rule, log_sum)


def _stirling(k: Array) -> Array:
    """Return the remainder of Stirling's formula for ``log k!``, by its series."""
    return (1 / 12 - (1 / 360 - 1 / (1260 * k**2)) / k**2) / k


def _deviance(u: Array) -> Array:
    """Return ``((1 + u) log(1 + u) - u) / u^2``, by its series near zero."""
    is_small = jnp.abs(u) < 0.05
    away_from_zero = jnp.where(is_small, 1.0, u)
    coefficients = jnp.asarray([1 / ((n + 1) * (n + 2)) for n in range(8, -1, -1)], u.dtype)
    series = jnp.polyval(coefficients, -u)
    return jnp.where(
        is_small,
        series,
        ((1 + away_from_zero) * jnp.log1p(away_from_zero) - away_from_zero) / away_from_zero**2,
    )


def _above_one(name: str, value: object) -> float:
    if not (is_number(value) and 1 < value < math.inf):
        raise ValueError(
            f"{name} must be a number above 1, got {value!r}. The limit at 1 is log_loss."
        )
    return float(value)
