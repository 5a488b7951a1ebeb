r"""Log densities that rounding does not spoil, and that are never NaN or infinite above.

Some of NumPyro's log densities are differences of large numbers. A negative binomial of dispersion
:math:`\phi` computes :math:`\log\Gamma(y + \phi) - \log\Gamma(\phi)`, which for
:math:`\phi = e^{40}` is off by hundreds of nats, and too high: a search or a draw that comes there
takes it for a mode. :func:`log_prob` computes these differences by themselves:

.. math::
    \log\frac{\Gamma(a + k)}{\Gamma(a)} = a \log(1 + k / a) + k \log(a + k) - k + s(a) - s(a + k),
    \qquad s(a) = a \log a - a - \log\Gamma(a)
    = \tfrac12 \log\frac a{2 \pi} - \tfrac1{12 a} + \tfrac1{360 a^3} - \dots

A gamma density of rate :math:`b`, of which beta and Dirichlet densities are made, is computed from
the ratio :math:`r` of a value to its mean:

.. math::
    \log p(y) = a (\log r - r + 1) - \log y + s(a), \qquad r = \frac{b y}a

Others have a value, but no gradient: a Poisson density of rate 0 at 0, say. And far out most of
them are infinite or NaN, where what is computed of a latent overflows. There a model has no density
that could be computed, which counts as none.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln, log_ndtr
from jax.typing import ArrayLike
from numpyro.distributions import Distribution
from numpyro.distributions.util import clamp_probs, tri_logabsdet, validate_sample

from numpyro_fed.numerics.linalg import solve

LARGE = 10.0  # from here on the series of the logarithm of the gamma function is exact
# Its coefficients: Bernoulli numbers B_2n / (2 n (2 n - 1)), for the powers 1, 3, 5 ... of 1 / x.
SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
# Coefficients of artanh(s) / s^3 from the constant on, in powers of s^2, without that of 1 / s^2.
ARTANH = tuple(1 / (2 * n + 3) for n in range(9))
SOFTPLUS_TERMS = 17  # of the series of artanh(s) / s, for s up to a third
# Width of an interval, in sds, below which the normal density in it is a parabola.
NARROW = 1e-2

LogProb = Callable[[Any, Any], Array]


def log_prob(site: Mapping[str, Any], *, guarded: bool = True) -> Array:
    """Return the log probability of each element of a site's batch; it may be NaN unguarded."""
    fn, value = accurate(site["fn"]), site["value"]
    found = jnp.asarray(fn.log_prob(value, *filter(None, [site["intermediates"]])))
    if site["scale"] is not None:
        found = site["scale"] * found
    return no_more_than_finite(found) if guarded else found


def no_more_than_finite(log_p: Array) -> Array:
    """Return log densities, minus infinity where one is NaN or infinite above."""
    return jnp.where(log_p < jnp.inf, log_p, -jnp.inf)


def accurate(fn: Distribution) -> Distribution:
    """Return a distribution with accurate log densities, its parts' too; itself if it has them."""
    found: dict[str, Any] = {}
    for name, part in vars(fn).items():
        if isinstance(part, Distribution):
            if (better := accurate(part)) is not part:
                found[name] = better
        elif isinstance(part, list | tuple) and any(isinstance(p, Distribution) for p in part):
            found[name] = [accurate(p) if isinstance(p, Distribution) else p for p in part]
    # The class whose density it is: one of the user's own keeps its own.
    owner = next(c for c in type(fn).__mro__ if c in ACCURATE or "log_prob" in vars(c))
    if not found and owner not in ACCURATE:
        return fn
    new = copy.copy(fn)
    vars(new).update(found)
    if owner in ACCURATE:
        vars(new)["log_prob"] = partial(validate_sample(ACCURATE[owner]), new)
    return new


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _stirling(order: int, a: Array) -> Array:
    r"""Return :math:`s(a) = a \log a - a - \log\Gamma(a)`, or its derivative of this ``order``.

    By its series for large ``a``. Smaller ones are taken there by the recurrence of the gamma
    function. Every derivative is one formula, which compiles in a tenth of the time that those of
    the digamma function take.
    """
    is_large = a >= LARGE
    small = jnp.where(is_large, 1.0, a)
    x = jnp.where(is_large, a, small + LARGE)
    sign = (-1.0) ** order
    # Powers 1, 3, 5 ... of 1 / x, differentiated as often.
    numbers = [c * math.prod(range(2 * i + 1, 2 * i + 1 + order)) for i, c in enumerate(SERIES)]
    inverse = 1 / x
    remainder = jnp.full_like(x, numbers[-1])
    for number in numbers[-2::-1]:
        remainder = number + remainder * inverse**2
    steps = small[..., None] + jnp.arange(LARGE, dtype=x.dtype)
    if order == 0:
        leading, product = 0.5 * jnp.log(x / (2 * math.pi)), jnp.log(steps.prod(-1))
    else:
        factor = -sign * math.factorial(order - 1)
        leading, product = 0.5 * factor * inverse**order, factor * (steps**-order).sum(-1)
    at_x = leading - sign * remainder * inverse ** (order + 1)
    ends = _entropy(order, small) - _entropy(order, small + LARGE)
    return at_x + jnp.where(is_large, 0.0, product + ends)


@_stirling.defjvp
def _(order: int, at: tuple[Array], change: tuple[Array]) -> tuple[Array, Array]:
    return _stirling(order, *at), _stirling(order + 1, *at) * change[0]


def _entropy(order: int, x: Array) -> Array:
    """Return ``x log(x) - x``, or its derivative of this ``order``."""
    if order == 0:
        return x * (jnp.log(x) - 1)
    if order == 1:
        return jnp.log(x)
    return (-1.0) ** order * math.factorial(order - 2) * x ** (1 - order)


def log_rising(a: Array, k: ArrayLike) -> Array:
    """Return the log of gamma(a + k) / gamma(a), for ``a`` above and ``k`` not below zero."""
    ends = _stirling(0, a) - _stirling(0, a + k)
    return a * jnp.log1p(k / a) + k * (jnp.log(a + k) - 1) + ends


@jax.custom_jvp
def softplus(x: Array) -> Array:
    r"""Return :math:`\log(1 + e^x)` by a series, which is computed for several ``x`` at once.

    With :math:`t = e^{-|x|}` and :math:`s = t / (2 + t)`, at most 1/3, it is
    :math:`\max(x, 0) + 2 \operatorname{artanh} s`. XLA computes a logarithm in double precision
    for one number after the other, and all that stands in one loop with it: the density of a binary
    outcome took five times as long.
    """
    t = jnp.exp(-jnp.abs(x))
    s = t / (2 + t)
    square, series = s * s, jnp.full_like(s, 1 / (2 * SOFTPLUS_TERMS - 1))
    for n in range(SOFTPLUS_TERMS - 2, -1, -1):
        series = 1 / (2 * n + 1) + series * square
    return jnp.maximum(x, 0.0) + 2 * s * series


softplus.defjvps(lambda change, _, x: jax.nn.sigmoid(x) * change)


def times_log(k: Array, x: ArrayLike) -> Array:
    """Return ``k log(x)``, with the value and the derivatives 0 where ``k`` is 0."""
    return jnp.where(k == 0, 0.0, k * jnp.log(jnp.where(k == 0, 1.0, x)))


def _formula(names: str, f: Callable[..., Array]) -> LogProb:
    """Return the log density that is ``f`` of a value and of these parameters, all as floats."""

    def log_density(d: Distribution, value: ArrayLike) -> Array:
        numbers = (value, *(getattr(d, name) for name in names.split()))
        return f(*(jnp.asarray(v, jnp.result_type(v, float)) for v in numbers))

    return log_density


def _log_choices(n: Array, y: Array) -> Array:
    return gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)


@jax.custom_jvp
def _log_ratio(a: Array, rate: Array, y: Array) -> Array:
    """Return ``log(r) - (r - 1)`` for ``r = rate y / a``, without large terms near 1."""
    u = (rate * y - a) / a
    is_near = jnp.abs(u) < 0.2
    near_u = jnp.where(is_near, u, 0.0)
    # log(1 + u) is 2 artanh(s), of which the part linear in u is taken away.
    s = near_u / (2 + near_u)
    near = 2 * s**3 * jnp.polyval(jnp.asarray(ARTANH[::-1], s.dtype), s**2) - near_u * s
    return jnp.where(is_near, near, jnp.log(rate) - jnp.log(a) + jnp.log(y) - u)


@_log_ratio.defjvp
def _(at: tuple[Array, ...], change: tuple[Array, ...]) -> tuple[Array, Array]:
    (a, rate, y), (of_a, of_rate, of_y) = at, change
    return _log_ratio(*at), (a - rate * y) / a * (of_rate / rate + of_y / y - of_a / a)


def _log_gamma_density(a: Array, rate: Array, y: Array) -> Array:
    """Return the log density of a gamma distribution."""
    return a * _log_ratio(a, rate, y) - jnp.log(y) + _stirling(0, a)


def _dirichlet(x: Array, a: Array) -> Array:
    # Independent gamma variables of one rate have shares that do not depend on their total.
    total, one = a.sum(-1), x.sum(-1)
    shares = _log_gamma_density(a, total[..., None], x).sum(-1)
    # The sum of x is one. Off the simplex the derivatives go on as those of x ** (a - 1).
    beyond = total * (one - jax.lax.stop_gradient(one))
    return shares - _stirling(0, total) + beyond


def _multivariate_student_t(d: dist.MultivariateStudentT, value: ArrayLike) -> Array:
    n, df = d.scale_tril.shape[-1], jnp.asarray(d.df, jnp.result_type(d.df, float))
    at_centre = -tri_logabsdet(d.scale_tril) - 0.5 * n * math.log(2 * math.pi)
    away = jnp.asarray(value - d.loc)[..., None]
    squared = (solve(d.scale_tril, away) ** 2).sum((-2, -1))
    ratio = log_rising(0.5 * df, 0.5 * n) - 0.5 * n * jnp.log(0.5 * df)
    return at_centre + ratio - 0.5 * (df + n) * jnp.log1p(squared / df)


def _bernoulli_probs(y: Array, p: Array) -> Array:
    p = clamp_probs(p)
    return times_log(y, p) + _times_log1m(1 - y, p)


def _binomial_probs(y: Array, n: Array, p: Array) -> Array:
    p = clamp_probs(p)
    return _log_choices(n, y) + times_log(y, p) + _times_log1m(n - y, p)


def _times_log1m(k: Array, p: Array) -> Array:
    """Return ``k log(1 - p)``, with the value and the derivatives 0 where ``k`` is 0."""
    return k * jnp.log1p(-jnp.where(k == 0, 0.0, p))


def _poisson(d: dist.Poisson, value: ArrayLike) -> Array:
    if d.is_sparse:
        return jnp.asarray(dist.Poisson.log_prob(d, value))
    dense = _formula("rate", lambda y, rate: times_log(y, rate) - gammaln(y + 1) - rate)
    return dense(d, value)


def _ordered_logistic(d: dist.OrderedLogistic, value: ArrayLike) -> Array:
    # The difference of two logistic functions of a and b is that of a, times that of -b, times
    # 1 - exp(b - a).
    beyond = d.cutpoints - d.predictor[..., None]
    ends = jnp.zeros((*beyond.shape[:-1], 1), beyond.dtype)
    below = jnp.concatenate([-softplus(-beyond), ends], -1)
    above = jnp.concatenate([ends, -softplus(beyond)], -1)
    between = jnp.concatenate([ends, jnp.log(-jnp.expm1(-jnp.diff(beyond))), ends], -1)
    logs = below + above + between
    batch = jnp.broadcast_shapes(jnp.shape(value), logs.shape[:-1])
    index = jnp.broadcast_to(jnp.asarray(value, int), batch)[..., None]
    logs = jnp.broadcast_to(logs, (*batch, logs.shape[-1]))
    return jnp.take_along_axis(logs, index, -1)[..., 0]


def _truncated_on_one_side(
    d: dist.LeftTruncatedDistribution | dist.RightTruncatedDistribution, value: ArrayLike
) -> Array:
    base, left = d.base_dist, isinstance(d, dist.LeftTruncatedDistribution)
    if not isinstance(base, dist.Normal):
        kind = dist.LeftTruncatedDistribution if left else dist.RightTruncatedDistribution
        return jnp.asarray(kind.log_prob(d, value))
    inside = base.loc - d.low if left else d.high - base.loc
    return jnp.asarray(base.log_prob(value)) - log_ndtr(inside / base.scale)


def _truncated(d: dist.TwoSidedTruncatedDistribution, value: ArrayLike) -> Array:
    base = d.base_dist
    if not isinstance(base, dist.Normal):
        return jnp.asarray(dist.TwoSidedTruncatedDistribution.log_prob(d, value))
    width = (d.high - d.low) / base.scale
    middle = 0.5 * (d.high + d.low) - base.loc
    # Mirrored to the side below the mean, where probabilities are small and not nearly one.
    middle = -jnp.abs(middle / base.scale)
    narrow = width * (1 - middle) < NARROW
    below, above = (middle + s * jnp.where(narrow, 1.0, 0.5 * width) for s in (-1, 1))
    log_above = log_ndtr(above)
    log_mass = log_above + jnp.log(-jnp.expm1(log_ndtr(below) - log_above))
    curved = jnp.log1p((middle**2 - 1) * jnp.where(narrow, width, 0.0) ** 2 / 24)
    log_narrow = jnp.log(width) - 0.5 * (middle**2 + math.log(2 * math.pi)) + curved
    return jnp.asarray(base.log_prob(value)) - jnp.where(narrow, log_narrow, log_mass)


def _log_survival(d: Distribution, value: ArrayLike) -> Array | None:
    """Return the log of the probability beyond a value; None where it has no formula here."""
    if isinstance(d, dist.Exponential):
        return jnp.asarray(-d.rate * value)
    if isinstance(d, dist.Weibull):
        return jnp.asarray(-((value / d.scale) ** d.concentration))
    if isinstance(d, dist.Normal):
        return log_ndtr((d.loc - value) / d.scale)
    if isinstance(d, dist.LogNormal):
        return log_ndtr((d.loc - jnp.log(value)) / d.scale)
    return None


def _right_censored(d: dist.RightCensoredDistribution, value: ArrayLike) -> Array:
    # NumPyro's log of one minus a rounded probability ends at -16 in single precision.
    beyond = _log_survival(d.base_dist, value)
    if beyond is None:
        return jnp.asarray(dist.RightCensoredDistribution.log_prob(d, value))
    return jnp.where(d.censored, beyond, jnp.asarray(d.base_dist.log_prob(value)))


# By the class that defines the density in NumPyro. Negative binomials by their mean are
# gamma-Poisson distributions; a beta distribution is made of a Dirichlet, and an inverse gamma of a
# gamma distribution.
ACCURATE: dict[type, LogProb] = {
    # A mean of zero is an infinite rate.
    dist.GammaPoisson: _formula(
        "concentration rate",
        lambda y, a, rate: (
            log_rising(a, y)
            - gammaln(y + 1)
            + (-a * jnp.log1p(1 / rate) - y * jnp.log1p(jnp.where(y == 0, 1.0, rate)))
        ),
    ),
    dist.NegativeBinomialProbs: _formula(
        "total_count probs",
        lambda y, n, p: log_rising(n, y) - gammaln(y + 1) + _times_log1m(n, p) + times_log(y, p),
    ),
    dist.NegativeBinomialLogits: _formula(
        "total_count logits",
        lambda y, n, logits: (
            log_rising(n, y)
            - gammaln(y + 1)
            + (-n * softplus(logits) - y * softplus(jnp.where(y == 0, 0.0, -logits)))
        ),
    ),
    dist.BetaBinomial: _formula(
        "concentration1 concentration0 total_count",
        lambda y, a, b, n: (
            _log_choices(n, y) + log_rising(a, y) + log_rising(b, n - y) - log_rising(a + b, n)
        ),
    ),
    dist.BetaNegativeBinomial: _formula(
        "concentration1 concentration0 n",
        lambda y, a, b, n: (
            log_rising(n, y)
            - gammaln(y + 1)
            + (log_rising(a, y) + log_rising(b, n) - log_rising(a + b, n + y))
        ),
    ),
    dist.DirichletMultinomial: _formula(
        "concentration",
        lambda y, a: (
            (log_rising(a, y) - gammaln(y + 1)).sum(-1)
            + gammaln(y.sum(-1) + 1)
            - log_rising(a.sum(-1), y.sum(-1))
        ),
    ),
    dist.Gamma: _formula("concentration rate", lambda y, a, rate: _log_gamma_density(a, rate, y)),
    dist.Dirichlet: _formula("concentration", _dirichlet),
    dist.StudentT: _formula(
        "df loc scale",
        lambda y, df, loc, scale: (
            log_rising(0.5 * df, 0.5)
            - 0.5 * jnp.log(math.pi * df)
            - jnp.log(scale)
            - 0.5 * (df + 1) * jnp.log1p(((y - loc) / scale) ** 2 / df)
        ),
    ),
    dist.MultivariateStudentT: _multivariate_student_t,
    dist.BernoulliLogits: _formula("logits", lambda y, logits: y * logits - softplus(logits)),
    dist.BernoulliProbs: _formula("probs", _bernoulli_probs),
    dist.BinomialLogits: _formula(
        "total_count logits",
        lambda y, n, logits: _log_choices(n, y) + y * logits - n * softplus(logits),
    ),
    dist.BinomialProbs: _formula("total_count probs", _binomial_probs),
    dist.GeometricProbs: _formula("probs", lambda y, p: jnp.log(p) + _times_log1m(y, p)),
    dist.Poisson: _poisson,
    dist.MultinomialProbs: _formula(
        "probs total_count",
        lambda y, p, n: gammaln(n + 1) + (times_log(y, p) - gammaln(y + 1)).sum(-1),
    ),
    dist.OrderedLogistic: _ordered_logistic,
    dist.LeftTruncatedDistribution: _truncated_on_one_side,
    dist.RightTruncatedDistribution: _truncated_on_one_side,
    dist.TwoSidedTruncatedDistribution: _truncated,
    dist.RightCensoredDistribution: _right_censored,
}
