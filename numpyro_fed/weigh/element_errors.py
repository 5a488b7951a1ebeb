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
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from scipy.special import ndtri

from numpyro_fed.basics.trees import EntryNames, elements
from numpyro_fed.text.site_table import Site
from numpyro_fed.weigh.weights import fit_pareto


class Moments(NamedTuple):
    r"""The weighted moments of each unconstrained coordinate, from weights ``w`` that sum to one.

    The same draws serve for the fit, which has weight :math:`u_i`, so that the standard errors of
    its distance are those of self-normalised weights with :math:`w_i - u_i` in the place of
    :math:`w_i` (:mod:`.element_errors`): it is known much better than either.

    ``shift`` (2, dim): Mean and sd of the fit less these, in sds.
    ``shift_error`` (2, dim): Its standard errors; infinite where all draws that count coincide.
    """

    mean: np.ndarray
    sd: np.ndarray
    shift: np.ndarray
    shift_error: np.ndarray


def moments(
    z: np.ndarray, weights: np.ndarray, from_guide: np.ndarray, of_fit: np.ndarray | None = None
) -> Moments:
    """Return weighted moments of draws (n, dim); ``from_guide`` (n,) marks the guide's.

    Or these are further draws ``of_fit`` (m, dim), which have no weight.
    """
    if of_fit is not None:
        from_guide = np.repeat([False, True], [len(z), len(of_fit)])
        z, weights = np.concatenate([z, of_fit]), np.append(weights, np.zeros(len(of_fit)))
    z = np.asarray(z, np.float64)
    # Moments are taken about the guide's mean: about zero, means of 10^8 would cancel.
    centre = z[from_guide].mean(0)
    z = z - centre
    fit_weights = from_guide / from_guide.sum()
    with np.errstate(all="ignore"):  # a draw of no weight may be infinite
        mean = weights @ z
        sd = np.sqrt(weights @ (z - mean) ** 2)
        scale = np.where(sd > 0, sd, 1.0)
        standard = (z - mean) / scale
        fit_sd = np.sqrt(fit_weights @ (z - fit_weights @ z) ** 2)
        shift = np.stack([(fit_weights @ z - mean) / scale, (fit_sd - sd) / scale])
        terms = np.stack([standard, (standard**2 - (sd > 0)) / 2])
        error = np.sqrt(np.einsum("n,mnd->md", (fit_weights - weights) ** 2, terms**2))
    known = np.isfinite(mean) & np.isfinite(sd) & (sd > 0)
    return Moments(mean + centre, sd, shift, np.where(known, error, np.inf))


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

    ``names``: Such as ``"beta[1]"``. Elements that are constant, as the diagonal of a correlation,
        have no entry, nor have elements of deterministic sites after the first hundred.
    ``latent`` (m,) bool: Whether an element is of a latent, and not of a deterministic site.
    ``error`` (3, m): Standard errors: of the mean and the sd in sds, and the larger one of mean and
        sd of the normal scores. Infinite where they cannot be told.
    ``shape`` (2, m): The tails' shapes of the terms of the mean and of the variance.
    ``tail_index`` (m,): The index of the posterior's heavier tail, infinite for an element that has
        none. NaN for an element that is no number at some draw.
    ``is_power`` (m,): Whether that tail was seen far out to fall as a power.
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
        labels: EntryNames | None = None,
        bounded: Collection[str] = (),
    ) -> ElementErrors:
        """Return the errors of draws {site: (n, ...)} with weights (n,) that sum to one.

        Those of particles are the disagreement of ``islands`` (4, n / 4), their places. Values of
        the sites ``bounded`` lie between two numbers: a tail of their terms is one of the weights.
        """
        of_latents = {k: v for k, v in draws.items() if k in latents}
        names, values = elements({**of_latents, **draws}, labels)
        sizes = {k: int(np.prod(np.shape(v)[1:])) for k, v in of_latents.items()}
        number = sum(sizes.values())
        within = [k in bounded for k, size in sizes.items() for _ in range(size)]
        names, values = names[: number + MOST_FUNCTIONS], values[:, : number + MOST_FUNCTIONS]
        latent = np.arange(len(names)) < number
        w, columns = weights[weights > 0], [x[weights > 0] for x in values.T]
        varies = np.array([len(w) < 2 or not (x == x[0]).all() for x in columns], bool)
        found = [_one_element(x, w, islands) for x, v in zip(columns, varies, strict=True) if v]
        table = np.array(found, float).reshape(-1, 7).T
        if bounded and len(w) > 1:
            has_bounds = np.append(within, np.zeros(len(names) - number, bool))[varies]
            of_weights = tail_shape(np.log(w))
            table[3:5] = np.where(has_bounds, np.minimum(table[3:5], of_weights), table[3:5])
        return cls(
            tuple(name for name, v in zip(names, varies, strict=True) if v),
            latent[varies],
            table[:3],
            table[3:5],
            table[5],
            table[6].astype(bool),
        )

    def known(self, bound: float) -> np.ndarray:
        """Return whether each mean and sd (2, m) is known to a standard error of ``bound`` sds."""
        error, light = self.error[:2], self.shape <= FINITE_TAIL
        heavy = (self.shape <= CONVERGENT_TAIL) & (error <= SHARE_OF_HEAVY * bound)
        return (error <= bound) & (light | heavy)

    def lacks_draws(self, bound: float, limit: float) -> np.ndarray:
        """Return whether an element is not known by its errors alone, up to ``limit``, (2, m)."""
        light = self.shape <= FINITE_TAIL
        return self.unknown(bound) & light & (self.error[:2] <= limit)

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
        of_tails = self.shape > CONVERGENT_TAIL
        for order, cases, error, far in zip(ORDERS, unknown, self.error, of_tails, strict=False):
            if cases.any():
                worst = error[cases].max()
                known = f"is known to {worst:.2g} sd only"
                if worst <= bound or np.isinf(worst):
                    known = "rests on a few draws far out"
                elif far[cases].any():  # then the error itself comes out too small
                    known = f"is known to {worst:.2g} sd at best, and rests on a few draws far out"
                found.append(f"the {order} of {self._sites(cases)} {known}")
        return " and ".join(found)

    def _sites(self, chosen: np.ndarray) -> str:
        """Return the names of the chosen elements, the first three of many."""
        names = [f"'{name}'" for name, c in zip(self.names, chosen, strict=True) if c]
        more = f" and {len(names) - 3} more" if len(names) > 4 else ""
        return ", ".join(names[:3] if more else names) + more


def _one_element(x: np.ndarray, w: np.ndarray, islands: np.ndarray | None) -> tuple[float, ...]:
    """Return an element's three errors, two shapes, tail index, and if that is of a power."""
    if np.isnan(x).any() or len(w) < 2:
        return *(np.inf,) * 5, np.nan if np.isnan(x).any() else np.inf, False
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
        return np.inf, np.inf, score_error, np.inf, np.inf, 0.0, True
    standard = (x - mean) / sd
    with np.errstate(divide="ignore"):
        log_w, log_x = np.log(w), np.log(np.abs(standard))
    shape = tail_shape(log_w + log_x), tail_shape(log_w + 2 * log_x)
    tail = min(_tail(side[side > 0], w[side > 0]) for side in (x, -x))
    return *_errors(standard, w, islands), score_error, *shape, *tail


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
    return fit_pareto(above)[0] if len(above) >= 5 else 0.0


def _tail(distance: np.ndarray, w: np.ndarray) -> tuple[float, bool]:
    """Return the index of the tail of draws at these distances (n,), and if far out it is a power.

    They lie on one side of the median. The index is the slope of the log of the mass beyond a
    distance over the log of the distance. A tail that falls faster than any power, as that of a
    log-normal distribution, has a larger index farther out.
    """
    order = np.argsort(-distance)
    log_distance, w = np.log(distance[order]), w[order]
    beyond = np.cumsum(w)
    effective = np.maximum.accumulate(beyond**2 / np.maximum(np.cumsum(w**2), 1e-300))
    far, near, nearest = np.searchsorted(effective, [FAR_DRAWS, NEAR_DRAWS, NEAREST_DRAWS])
    nearest = min(nearest, np.searchsorted(beyond, OF_TAIL), len(w) - 1)
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


# Gaps between neighbouring numbers that an sd must have: with fewer, rounding
# makes a percent of it or more. With it none of 500 models with offsets and
# scales up to 1e9 is wrong in silence (docs/results/never_wrong.md).
SPACINGS = 50.0
# Effective draws below which an sd is not judged: it may be small by chance.
FEW = 10.0
# Nats by which rounding may move a log weight, so that an sd stays right to a percent.
NATS = 0.1


class Rounding(NamedTuple):
    """The size of rounding errors in weighted draws.

    ``dtype`` is the precision in which the draws and their densities were computed. ``mean`` and
    ``sd`` (dim,) are moments of the draws, sds infinite with too few effective ones. Rounding moves
    a log weight by about ``nats``: the precision's machine epsilon times the largest log density,
    in size, of a draw that counts. ``no_density`` says in words which density is NaN or infinite at
    many draws of the fit.
    """

    dtype: str
    mean: np.ndarray
    sd: np.ndarray
    nats: float
    no_density: str = ""

    @classmethod
    def of(
        cls,
        z: Array | np.ndarray,
        weights: np.ndarray,
        log_weights: np.ndarray,
        mean: np.ndarray,
        sd: np.ndarray,
    ) -> Rounding:
        """Return the rounding of draws ``z`` (n, dim), from their weights, mean and sd (dim,)."""
        dtype = np.dtype(z.dtype)
        known = 1 / (weights**2).sum() >= FEW
        sd = sd if known else np.full_like(sd, np.inf)
        size = np.abs(np.asarray(log_weights, np.float64)[weights > 0])
        nats = float(np.finfo(dtype).eps * size[np.isfinite(size)].max(initial=0.0))
        return cls(str(dtype), mean, sd, nats)

    @property
    def gap(self) -> np.ndarray:
        """The distance from each mean (dim,) to the next number of this precision."""
        return np.spacing(np.abs(self.mean).astype(self.dtype)).astype(np.float64)

    @property
    def lost(self) -> np.ndarray:
        """Whether each coordinate's sd (dim,) is too few gaps wide; no where it is not known."""
        return self.sd < SPACINGS * self.gap

    @property
    def fine(self) -> bool:
        """Whether rounding changes neither draws nor weights by more than a percent of an sd.

        And draws of the fit have densities, with few exceptions.
        """
        return not self.lost.any() and self.nats <= NATS and not self.no_density

    def words(self, sites: Sequence[Site]) -> str:
        """Return in words what rounding spoils; ``sites`` name the coordinates."""
        if self.no_density:
            return self.no_density
        name = {"float32": "single", "float64": "double"}.get(self.dtype, self.dtype)
        if self.lost.any():
            place = int(np.argmin(self.sd / self.gap))
            site = next(s.name for s in sites if s.start <= place < s.stop)
            why = (
                f"'{site}' has an sd of {self.sd[place]:.2g} about {self.mean[place]:.4g} "
                f"(unconstrained), where numbers are {self.gap[place]:.2g} apart"
            )
        else:
            why = f"log densities are so large that rounding moves them by {self.nats:.2g} nats"
        return f"{name} precision cannot hold it: {why}"

    @property
    def remedy(self) -> str:
        """Return the remedy, as a sentence."""
        if self.no_density:
            return (
                "Look at what the text computes there, as the logarithm, the root or the rate of a "
                "number below zero: give the latent a support on which all of it is defined, or "
                "compute it on the log scale."
            )
        double = (
            "Compute in double precision (numpyro_fed.fit does by default, for the rest "
            "jax.config.update('jax_enable_x64', True)), or subtract"
        )
        return (
            f"{double if self.dtype != 'float64' else 'Subtract'} a round number near their mean "
            "from columns and outcomes, the same at every silo, and let parameters measure from "
            "there."
        )
