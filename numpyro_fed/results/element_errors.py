r"""How well weighted draws know the globals as a user sees them: means, sds and quantiles.

An average of ``h`` over draws with weights :math:`w_i` that sum to one has the standard error
:math:`\sqrt{\sum_i w_i^2 (h_i - m)^2}` (Owen 2013, "Monte Carlo theory, methods and examples",
section 9.2), if its terms :math:`w_i |h_i - m|` have a tail of finite variance: a generalised
Pareto shape below a half (Vehtari et al. 2024, section 2.4, on tails of other functions than the
weights). The same with :math:`(h_i - m)^2` holds for a variance.

A posterior on its own scale may have no mean or no sd, as that of a half-Cauchy scale with few
groups. Its density then falls as a power of ``h``, by the index of its tail: moments of this order
and above are infinite. Draws still know its quantiles. Their errors are those of mean and sd of
the normal scores :math:`\Phi^{-1}(F(h_i))`, which depend on ranks alone and are sds where the
posterior is normal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from jax import Array
from scipy.special import ndtri

from numpyro_fed.after.sensitivity import elements

# Shape of the tail of terms below which their average has a finite standard error, and that up to
# which averages still converge as they should in a few thousand draws (Vehtari et al. 2024). In
# between, estimated errors come out too small: a smaller one is asked for. Without that, three of
# 100 corrections of one random model were trusted and wrong (docs/results/never_wrong.md).
FINITE_TAIL, CONVERGENT_TAIL = 0.5, 0.7
SHARE_OF_HEAVY = 2 / 3
# Effective draws beyond the far and the near end of the piece of a tail whose slope is its index,
# and beyond the end of the piece before it, which begins in the outermost OF_TAIL of the mass.
FAR_DRAWS, NEAR_DRAWS, NEAREST_DRAWS, OF_TAIL = 25, 100, 400, 0.02
# Order of a moment, as a share of the index of a tail, from which on it counts as infinite: the
# index of a half-Cauchy's posterior, a whole number, is known to a tenth.
CLOSE = 0.9
# Mass beyond the far end, from which on a tail can be told, and how much larger the index of the
# far piece may be than that of the one before it, if it is that of a power.
DEEP, STEADY = 1e-4, 1.12
FAR = 100.0  # log terms so far below the largest are no part of a tail, and are cut off
# Largest value: draws that overflow on their support count as so large. And the farthest place, in
# units of the middle half of the draws.
LARGEST, FARTHEST = 1e300, 1e150
# Elements of deterministic sites that are looked at: each takes a millisecond for 4,000 draws.
MOST_FUNCTIONS = 100
ORDERS = ("mean", "sd")


class ElementErrors(NamedTuple):
    """The errors of the globals' means, sds and quantiles, element by element.

    Attributes
    ----------
    names : tuple of str
        Such as ``"beta[1]"``. Elements that are constant, as the diagonal of a correlation, have no
        entry, nor have elements of deterministic sites after the first hundred.
    latent : (m,) bool
        Whether an element is of a latent, and not of a deterministic site.
    error : (3, m)
        Standard errors: of the mean and the sd in sds, and the larger one of mean and sd of the
        normal scores. Infinite where they cannot be told.
    shape : (2, m)
        The tails' shapes of the terms of the mean and of the variance.
    tail_index : (m,)
        The index of the posterior's heavier tail, infinite for an element that has none. NaN for an
        element that is no number at some draw.
    is_power : (m,)
        Whether that tail was seen far out to fall as a power.
    """

    names: tuple[str, ...]
    latent: np.ndarray
    error: np.ndarray
    shape: np.ndarray
    tail_index: np.ndarray
    is_power: np.ndarray

    @classmethod
    def of(
        cls,
        draws: Mapping[str, Array | np.ndarray],
        latents: Collection[str],
        weights: np.ndarray,
        islands: np.ndarray | None = None,
    ) -> ElementErrors:
        """Return the errors of draws {site: (n, ...)} with weights (n,) that sum to one.

        Those of particles are the disagreement of ``islands`` (4, n / 4), their places.
        """
        of_latents = {k: v for k, v in draws.items() if k in latents}
        names, values = elements({**of_latents, **draws})
        number = sum(int(np.prod(np.shape(v)[1:])) for v in of_latents.values())
        names, values = names[: number + MOST_FUNCTIONS], values[:, : number + MOST_FUNCTIONS]
        latent = np.arange(len(names)) < number
        counts = weights > 0
        w, columns, moves = weights[counts], [], []
        for values_of_one in values.T:
            x = values_of_one[counts]
            moves.append(len(x) < 2 or not (x == x[0]).all())
            columns += [_column(x, w, islands)] * moves[-1]
        error, shape, tail = (
            np.array([c[i] for c in columns]).reshape(len(columns), size).T
            for i, size in enumerate([3, 2, 2])
        )
        kept = tuple(name for name, m in zip(names, moves, strict=True) if m)
        return cls(kept, latent[np.array(moves, bool)], error, shape, tail[0], tail[1] > 0)

    def known(self, bound: float) -> np.ndarray:
        """Return whether each mean and sd (2, m) is known to a standard error of ``bound`` sds."""
        error, light = self.error[:2], self.shape <= FINITE_TAIL
        heavy = (self.shape <= CONVERGENT_TAIL) & (error <= SHARE_OF_HEAVY * bound)
        return (error <= bound) & (light | heavy)

    @property
    def infinite(self) -> np.ndarray:
        """Return whether each mean and sd (2, m) does not exist, as far as the tail can tell."""
        order = np.array([[1.0], [2.0]])
        return (CLOSE * self.tail_index <= order) & self.is_power

    def unknown(self, bound: float) -> np.ndarray:
        """Return whether each mean and sd (2, m) exists, as far as known, and is not known."""
        return ~(self.known(bound) | self.infinite)

    def words(self, bound: float) -> str:
        """Return in words which elements have no mean or sd, or an unknown one; empty if none."""
        no_number = np.isnan(self.tail_index)
        found = []
        if no_number.any():
            found.append(f"{self._sites(no_number)} cannot be computed at some draws")
        infinite, unknown = self.infinite, self.unknown(bound) & ~no_number
        for cases in (infinite, unknown):
            cases[1] &= ~cases[0]  # what is said of a mean is not said again of its sd
        for order, cases in zip(ORDERS, infinite, strict=True):
            if cases.any():
                verb = "has" if cases.sum() == 1 else "have"
                index = f"tails of index {self.tail_index[cases].min():.1f}"
                found.append(f"{self._sites(cases)} {verb} no {order} ({index})")
        for order, cases, error in zip(ORDERS, unknown, self.error, strict=False):
            if cases.any():
                worst = error[cases].max()
                known = f"is known to {worst:.2g} sd only"
                if worst <= bound or np.isinf(worst):
                    known = "rests on a few draws far out"
                found.append(f"the {order} of {self._sites(cases)} {known}")
        return " and ".join(found)

    def _sites(self, chosen: np.ndarray) -> str:
        """Return the names of the chosen elements, the first three of many."""
        names = [f"'{name}'" for name, c in zip(self.names, chosen, strict=True) if c]
        more = f" and {len(names) - 3} more" if len(names) > 4 else ""
        return ", ".join(names[:3] if more else names) + more


def _column(
    x: np.ndarray, w: np.ndarray, islands: np.ndarray | None
) -> tuple[tuple[float, ...], ...]:
    """Return the errors (3,), the shapes (2,), index and kind of the tail of one element (n,)."""
    if np.isnan(x).any():
        return (np.inf,) * 3, (np.inf,) * 2, (np.nan, False)
    if len(w) < 2:
        return (np.inf,) * 3, (np.inf,) * 2, (np.inf, False)
    x = np.clip(x, -LARGEST, LARGEST)
    order = np.argsort(x, kind="stable")
    below = np.cumsum(w[order])
    scores = np.empty(len(x))
    scores[order] = ndtri(np.clip(below - w[order] / 2, 1e-300, 1 - 1e-16))
    score_error = max(_errors(scores, w, islands))
    places = np.minimum(np.searchsorted(below, [0.25, 0.5, 0.75]), len(x) - 1)
    low, median, high = x[order[places]]
    # In units of the middle half, and no farther than a square can hold.
    x = (x - median) / (high - low if high > low else np.abs(x - median).max() or 1.0)
    x = np.clip(x, -FARTHEST, FARTHEST)
    mean = w @ x
    sd = np.sqrt(w @ (x - mean) ** 2)
    if not sd > 0:
        return (np.inf, np.inf, score_error), (np.inf, np.inf), (0.0, True)
    standard = (x - mean) / sd
    with np.errstate(divide="ignore"):
        log_w, log_x = np.log(w), np.log(np.abs(standard))
    shapes = [tail_shape(log_w + power * log_x) for power in (1, 2)]
    tail = min(_tail(side[side > 0], w[side > 0]) for side in (x, -x))
    return (*_errors(standard, w, islands), score_error), tuple(shapes), tail


def _errors(standard: np.ndarray, w: np.ndarray, islands: np.ndarray | None) -> tuple[float, float]:
    """Return the standard errors of mean and sd of standardised draws (n,)."""
    if islands is not None:
        mean, sd = disagreement(standard[islands][..., None], np.ones(1))[:, 0]
        return float(mean), float(sd)
    with np.errstate(over="ignore", invalid="ignore"):  # of draws that are next to infinite
        found = [np.sqrt(w**2 @ f**2) for f in (standard, (standard**2 - 1) / 2)]
    mean, sd = np.nan_to_num(found, nan=np.inf)
    return float(mean), float(sd)


def disagreement(islands: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return standard errors (2, dim) of mean and sd, in sds, from islands (4, n, dim)."""
    scale = np.where(sd > 0, sd, 1.0)
    means, sds = islands.mean(1) / scale, islands.std(1) / scale
    found = np.stack([m.std(0, ddof=1) for m in (means, sds)]) / math.sqrt(len(islands))
    return np.where(np.isfinite(found) & (sd > 0), found, np.inf)


def tail_shape(log_terms: np.ndarray) -> float:
    """Return the generalised Pareto shape of the upper tail of terms (n,), by their logs.

    The tail has as many terms as that of Pareto-smoothed weights; 0 where there is none.
    """
    log_terms = np.maximum(log_terms - log_terms.max(), -FAR)
    number = int(min(0.2 * len(log_terms), 3 * np.sqrt(len(log_terms))))
    if number < 5:
        return 0.0
    last = np.sort(log_terms)[-number - 1 :]
    above = np.exp(last[1:]) - np.exp(last[0])
    above = above[above > 0]
    return pareto_fit(above)[0] if len(above) >= 5 else 0.0


def pareto_fit(x: np.ndarray) -> tuple[float, float]:
    """Return shape and scale of a generalised Pareto distribution, from its sorted draws.

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


def _tail(distance: np.ndarray, w: np.ndarray) -> tuple[float, bool]:
    """Return the index of a tail, and whether it is a power that was measured far out.

    ``distance`` (n,) is that of draws on one side from the median. The index is the slope of the
    log of the mass beyond a distance over the log of the distance. A tail that falls faster than
    any power, as that of a log-normal distribution, has a larger index farther out.
    """
    order = np.argsort(-distance)
    log_distance, w = np.log(distance[order]), w[order]
    beyond = np.cumsum(w)
    effective = np.maximum.accumulate(beyond**2 / np.maximum(np.cumsum(w**2), 1e-300))
    far, near, nearest = np.searchsorted(effective, [FAR_DRAWS, NEAR_DRAWS, NEAREST_DRAWS])
    nearest = min(nearest, np.searchsorted(beyond, OF_TAIL))
    if near < len(w):  # closer by than draws that are as far as can be
        near = max(near, np.searchsorted(-log_distance, -log_distance[far], side="right"))
    if near >= len(w):
        return np.inf, False

    def slope(i: int, j: int) -> float:
        return float(np.log(beyond[j] / beyond[i]) / (log_distance[i] - log_distance[j]))

    index = slope(far, near)
    if beyond[far] > DEEP or not nearest > near or not log_distance[near] > log_distance[nearest]:
        return index, False
    return index, index <= STEADY * slope(near, nearest)
