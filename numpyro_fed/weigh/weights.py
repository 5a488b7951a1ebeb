"""Importance weights: Pareto smoothing, k-hat, and draws anew by weight.

Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto smoothed importance sampling*, Journal of
Machine Learning Research 25. A generalised Pareto distribution is fitted to the largest weights;
its shape is k-hat, which says how far these can be relied on.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.rounds.keys import generator

# Log weight, less the largest, below which a draw weighs nothing: e^-100 is 4e-44, which
# changes no average.
NEGLIGIBLE = -100.0
SMOOTHED_FROM = 1 / 3  # k-hat: lighter tails are left as they are (Vehtari et al. 2024)

# What an error says of silos whose answers give no draw any weight.
NO_WEIGHTS = (
    "the importance weights are NaN, or all zero, at {}. Fit for more rounds, or look at the data "
    "and the supports of the sites there."
)

Draws = TypeVar("Draws", np.ndarray, Array)


class Weights(NamedTuple):
    """Normalised weights of draws, and the k-hat of their tail.

    ``values`` (n,): They sum to one.
    ``pareto_k``: Infinite where a few draws have all the weight, or are too few to tell.
    """

    values: np.ndarray
    pareto_k: float

    @classmethod
    def of(cls, log_weights: np.ndarray) -> Weights:
        """Return the weights of draws (n,), Pareto-smoothed unless k-hat is too large."""
        log_weights = np.array(log_weights, np.float64)
        smoothed, k_hat = smooth_tail(log_weights)
        # Smoothing replaces the largest weights by quantiles of the fitted tail. A few large
        # weights among equal ones, those of a mode that the guide has missed, would disappear.
        for candidate in (smoothed, log_weights):
            log_w = candidate - candidate.max()
            values = np.where(log_w > NEGLIGIBLE, np.exp(log_w), 0.0)
            values = values / values.sum()
            share = float(1 / (values**2).sum() / len(values))
            pareto_k = k_hat
            if math.isnan(k_hat):  # 0 for even weights and infinity for a few
                pareto_k = 0.0 if share > 0.99 else math.inf
            if pareto_k <= max_k_hat(len(values)):
                break
        return cls(values, pareto_k)

    @property
    def ess(self) -> float:
        """The effective number of draws."""
        return float(1 / (self.values**2).sum())

    @property
    def reliable(self) -> bool:
        """Whether averages with these weights converge as they should."""
        return self.pareto_k <= max_k_hat(len(self.values))


def max_k_hat(num_draws: int) -> float:
    """Return the largest k-hat for which so many draws are enough (Vehtari et al. 2024)."""
    return min(1 - 1 / math.log10(max(num_draws, 11)), 0.7)


def smooth_tail(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Return log weights (n,) with a Pareto-smoothed tail, less the largest of all, and its k-hat.

    It is algorithm 1 of Vehtari et al. (2024). k-hat is infinite for fewer than 25 weights, and NaN
    where a tail has no generalised Pareto fit.
    """
    log_weights = log_weights - log_weights.max()
    n = len(log_weights)
    tail = min(max(int(3 * np.sqrt(n)), 5), n // 5)
    if tail < 5:
        return log_weights, math.inf
    order = np.argsort(log_weights, kind="stable")
    largest = np.exp(log_weights[order[-tail:]])
    cut = np.exp(log_weights[order[-tail - 1]])
    if largest[-1] - cut < np.finfo(float).tiny:
        return log_weights, 0.0
    k, scale = fit_pareto(largest - cut)
    if not k >= SMOOTHED_FROM:
        return log_weights, k
    beyond = -np.log1p(-(np.arange(tail) + 0.5) / tail)  # standard exponential quantiles
    quantiles = cut + scale * np.expm1(k * beyond) / k
    log_weights[order[-tail:]] = np.log(np.minimum(quantiles, largest[-1]))
    return log_weights, k


def fit_pareto(x: np.ndarray) -> tuple[float, float]:
    """Return shape and scale of the generalised Pareto distribution of sorted draws (n,).

    The posterior mean of Zhang and Stephens (2009) over a grid; the shape with the prior of Vehtari
    et al. (2024) at 0.5.
    """
    n = len(x)
    grid = np.arange(1, 31 + int(np.sqrt(n))) - 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        theta = 1 / x[-1] + (1 - np.sqrt((len(grid)) / grid)) / (3 * x[int(n / 4 + 0.5) - 1])
        shapes = np.log1p(-theta[:, None] * x).mean(1)
        log_like = n * (np.log(-theta / shapes) - shapes - 1)
        log_like = np.where(np.isnan(log_like), -np.inf, log_like)
        weights = np.exp(log_like - log_like.max())
        best = float(weights @ theta / weights.sum())
        shape = float(np.log1p(-best * x).mean())
    return (n * shape + 5) / (n + 10), -shape / best


def replace_weightless(z: Draws, weights: np.ndarray) -> Draws:
    """Return the draws ``z`` (n, dim) with the heaviest one in the place of all without weight.

    Draws without weight may lie so far out that they overflow on their own support, and infinity
    times a weight of zero is NaN.
    """
    xp = np if isinstance(z, np.ndarray) else jnp
    return xp.where((weights > 0)[:, None], z, z[weights.argmax()])


def systematic_resample(key: Array, weights: np.ndarray, n: int) -> np.ndarray:
    """Return the indices (n,) of a systematic resample by weights (num_draws,), in random order."""
    random = generator(key)
    points = (np.arange(n) + random.random()) / n
    chosen = np.searchsorted(np.cumsum(weights), points * weights.sum())
    return random.permutation(np.minimum(chosen, len(weights) - 1))
