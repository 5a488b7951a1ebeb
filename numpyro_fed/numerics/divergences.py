r"""Divergences between two members of an exponential family, by their natural parameters.

A divergence is any function ``D(family, eta_q, eta_p) -> ()`` that is zero where ``q = p`` and
positive elsewhere; it is written ``D(q || p)``, with ``p`` the prior or cavity. One that does not
know every family has a ``check(family)``, which refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.errors import GuideError, positive_number
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural

__all__ = ["KL", "AlphaRenyi", "FisherRao", "ReverseKL", "WeightedKL"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class KL:
    r"""The Kullback-Leibler divergence, that of Bayes' rule.

    .. math::
        KL(q \| p) = \mathbb{E}_q[\log q(z) - \log p(z)]

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import divergences, expfam
    >>> family = expfam.gaussian(1)
    >>> q = family.natural({"loc": jnp.array([2.0]), "log_scale": jnp.zeros(1)})
    >>> p = family.natural({"loc": jnp.zeros(1), "log_scale": jnp.zeros(1)})
    >>> float(divergences.KL()(family, q, p))
    2.0
    """

    def __call__(self, family: Family[Any], eta_q: Natural, eta_p: Natural) -> Array:
        return family.kl(eta_q, eta_p)


@dataclass(frozen=True)
class ReverseKL:
    r"""The Kullback-Leibler divergence the other way round.

    .. math::
        KL(p \| q) = \mathbb{E}_p[\log p(z) - \log q(z)]
    """

    def __call__(self, family: Family[Any], eta_q: Natural, eta_p: Natural) -> Array:
        return family.kl(eta_p, eta_q)


@dataclass(frozen=True)
class WeightedKL:
    r"""A multiple of the Kullback-Leibler divergence.

    .. math::
        D(q \| p) = w \, KL(q \| p)

    It has the same posterior as likelihoods to the power ``1 / w`` under ``KL``. Knoblauch et al.
    and FedGVI write ``1/w`` for the factor: their ``w`` is ``1 / weight``.

    Parameters
    ----------
    weight : float
        Positive; below 1 trusts the prior or cavity less.
    """

    weight: float

    def __post_init__(self) -> None:
        positive_number("weight", self.weight)
        object.__setattr__(self, "weight", float(self.weight))

    def __call__(self, family: Family[Any], eta_q: Natural, eta_p: Natural) -> Array:
        return self.weight * family.kl(eta_q, eta_p)


@dataclass(frozen=True)
class AlphaRenyi:
    r"""Renyi's alpha-divergence, in the scaling of Knoblauch et al.

    .. math::
        D(q \| p) &= \frac{1}{\alpha (\alpha - 1)} \log \int q(z)^\alpha p(z)^{1-\alpha} \, dz \\
        &= \frac{A(\eta_m) - \alpha A(\eta_q) - (1 - \alpha) A(\eta_p)}{\alpha (\alpha - 1)}
        = \frac{KL(m \| p)}{\alpha} + \frac{KL(m \| q)}{1 - \alpha},
        \quad \eta_m = \alpha \eta_q + (1 - \alpha) \eta_p

    The limits are ``KL(q || p)`` at ``alpha = 1`` and ``KL(p || q)`` at 0. Renyi's own divergence
    is ``alpha`` times this one, and its limit at 0 is zero. It is computed by the last form, which
    does not cancel far from zero.

    Parameters
    ----------
    alpha : float
        Positive and not 1. Above 1 the integral need not exist: the divergence is infinite where
        ``eta_m`` is improper.

    References
    ----------
    Knoblauch, Jewson, Damoulas (2022), JMLR 23(132). Mildner et al. (2025), arXiv 2502.00846.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import divergences, expfam
    >>> family = expfam.gaussian(1)
    >>> q = family.natural({"loc": jnp.array([2.0]), "log_scale": jnp.zeros(1)})
    >>> p = family.natural({"loc": jnp.zeros(1), "log_scale": jnp.zeros(1)})
    >>> round(float(divergences.AlphaRenyi(0.5)(family, q, p)), 4)  # equal scales: as KL
    2.0
    """

    alpha: float

    def __post_init__(self) -> None:
        positive_number("alpha", self.alpha)
        if self.alpha == 1:
            raise ValueError("alpha must not be 1. The limit there is KL().")
        object.__setattr__(self, "alpha", float(self.alpha))

    def __call__(self, family: Family[Any], eta_q: Natural, eta_p: Natural) -> Array:
        alpha = self.alpha
        mixed = jax.tree.map(lambda q, p: alpha * q + (1 - alpha) * p, eta_q, eta_p)
        exists = alpha < 1 or family.proper(mixed)
        # An improper member would give NaN, also in the gradient of the branch that is not taken.
        mixed = jax.tree.map(lambda m, q: jnp.where(exists, m, q), mixed, eta_q)
        to_p, to_q = family.kl(mixed, eta_p), family.kl(mixed, eta_q)
        return jnp.where(exists, to_p / alpha + to_q / (1 - alpha), jnp.inf)


@dataclass(frozen=True)
class FisherRao:
    r"""The Fisher-Rao (geodesic) distance between diagonal Gaussians, or its square.

    .. math::
        d(q, p)^2 = \sum_i \Big( 2 \sqrt2 \, \operatorname{arsinh} \sqrt{t_i} \Big)^2, \quad
        t_i = \frac{(m_{q,i} - m_{p,i})^2}{8\, s_{q,i} s_{p,i}}
        + \sinh^2\Big(\tfrac12 \log \frac{s_{q,i}}{s_{p,i}}\Big)

    Near ``q = p`` the square is ``2 KL(q || p)``, and the distance its square root.

    Parameters
    ----------
    squared : bool
        Whether to take the square, which is smooth. The distance itself, as in FedGVI, has a kink
        at ``q = p``, where this gradient is zero, a subgradient. Like any norm it may keep ``q`` at
        ``p`` against weak data.

    Raises
    ------
    GuideError
        From ``check``, for a family that is no diagonal Gaussian and no product of such.

    References
    ----------
    Pinele, Strapasson, Costa (2020), "The Fisher-Rao Distance between Multivariate Normal
    Distributions", the univariate form written with arsinh. Mildner et al. (2025), arXiv
    2502.00846.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import divergences, expfam
    >>> family = expfam.gaussian(1)
    >>> q = family.natural({"loc": jnp.zeros(1), "log_scale": jnp.ones(1)})
    >>> p = family.natural({"loc": jnp.zeros(1), "log_scale": jnp.zeros(1)})
    >>> round(float(divergences.FisherRao()(family, q, p)), 4)  # sqrt(2) |log s_q / s_p|
    1.4142
    """

    squared: bool = False

    def check(self, family: Family[Any]) -> None:
        """Raise an error for a family that is no diagonal Gaussian and no product of such."""

        psi = jax.eval_shape(lambda: family.ordinary(family.fit(lambda z: -0.5 * jnp.sum(z**2))))
        _diagonal_gaussians(psi, family.name)

    def __call__(self, family: Family[Any], eta_q: Natural, eta_p: Natural) -> Array:
        q, p = (_diagonal_gaussians(family.ordinary(e), family.name) for e in (eta_q, eta_p))
        square = jnp.zeros(())
        for one, other in zip(q, p, strict=True):
            a, b = one["log_scale"], other["log_scale"]
            # By log scales: a product of scales of 1e-30 would be zero in single precision.
            shift = (one["loc"] - other["loc"]) * jnp.exp(-0.5 * (a + b))
            t = shift**2 / 8 + jnp.sinh(0.5 * (a - b)) ** 2
            square += 8 * _squared_arsinh_of_root(t).sum()
        if self.squared:
            return square
        # The gradient of a square root at zero is infinite, and ``where`` would make NaN of it.
        differ = square > 0
        return jnp.where(differ, jnp.sqrt(jnp.where(differ, square, 1.0)), 0.0)


def _squared_arsinh_of_root(t: Array) -> Array:
    """Return ``arsinh(sqrt(t))^2``, by its series near zero, where it is smooth."""
    is_small = t < 1e-4  # the next term of the series is 4 t^4 / 35, 1e-13 of the first one
    away_from_zero = jnp.where(is_small, 1.0, t)
    return jnp.where(
        is_small, t - t**2 / 3 + 8 * t**3 / 45, jnp.arcsinh(jnp.sqrt(away_from_zero)) ** 2
    )


def _diagonal_gaussians(psi: Mapping[str, Any], name: str) -> list[Mapping[str, Array]]:
    """Return the members of a product, each with its ``loc`` and ``log_scale``."""
    if any(isinstance(part, Mapping) for part in psi.values()):
        return [m for key, part in psi.items() for m in _diagonal_gaussians(part, key)]
    if psi.keys() == {"loc", "log_scale"}:
        return [psi]
    kind = "a full covariance" if "below" in psi else f"the parameters {sorted(psi)}"
    raise GuideError(
        f"FisherRao has a closed form for diagonal Gaussians, but the family '{name}' has {kind}. "
        "Choose the diagonal Gaussian family, or another divergence such as AlphaRenyi(0.5)."
    )
