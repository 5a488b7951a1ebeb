"""Particles at the posterior, and the disagreement of their islands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.tempered import (
    NUM_ISLANDS,
    Swarm,
)
from numpyro_fed.results.corrected import Corrected, sampler_of
from numpyro_fed.results.importance import integration_of
from numpyro_fed.results.moments import moments
from numpyro_fed.results.rounding import Rounding
from numpyro_fed.results.rows import Result
from numpyro_fed.results.saving import SavedWords

# Standard error, in sds, up to which means and sds count as known. It is estimated from four
# islands alone, and the largest of all coordinates is looked at, which is about twice the true one.
MAX_ERROR = 0.05
MIN_KEPT = 3  # times that particles must have been kept
# Memory above which they count as standing still: islands would agree for no good reason, as where
# a posterior's neck is too narrow for their steps.
MAX_MEMORY = 0.5
# A gap between particles that separates modes, as a multiple of the spreads on both its sides, and
# the share of the particles on both sides, at least. The largest gap among a thousand draws from a
# normal distribution, without the outer 2 % of them, is a tenth of this.
GAP, MIN_SHARE = 1.0, 0.02
MAX_MODES = 8


@dataclass(frozen=True, eq=False)
class Particles(Corrected):
    """Particles at the posterior, with the disagreement of their islands.

    Attributes
    ----------
    reached : float
        The power ``b`` of the path of densities: 1 at the posterior.
    num_kept : int
        How often particles were kept there.
    memory : float
        How much the particles that were kept last still have of where they came to the posterior
        (:func:`memory_of`).
    """

    reached: float = 0.0
    num_kept: int = 0
    memory: float = 1.0

    @property
    def reliable(self) -> bool:
        """Whether the particles came to the posterior, and have moved there."""
        return self.reached >= 1 and self.num_kept >= MIN_KEPT and self.memory <= MAX_MEMORY

    @property
    def spreads_known(self) -> bool:
        """Whether islands agree, since particles have no weights whose tails could be heavy."""
        return self.monte_carlo_error <= MAX_ERROR

    @property
    def trusted(self) -> bool:
        """Whether means and sds are right to a tenth of an sd."""
        return self.reliable and self.spreads_known and self.precise

    @property
    def doubt(self) -> str:
        """Return the reason why the particles are not :attr:`trusted`; empty where they are."""
        if self.trusted:
            return ""
        if not self.precise:
            return self._rounding.words(self._sites)
        if self.reached < 1:
            return f"the particles came to {self.reached:.2g} of the way to the posterior"
        if not self.reliable:
            return "the particles have not moved enough at the posterior"
        return f"islands of particles differ: means and sds are known to {self._error_in_words} sd"

    @property
    def _error_in_words(self) -> str:
        return f"{self.monte_carlo_error:.2g}"

    @property
    def figures(self) -> str:
        """Return the numbers that a verdict rests on, in words."""
        return (
            f"{len(self.weights):,} particles, whose {NUM_ISLANDS} islands agree on means and sds "
            f"to {self._error_in_words} sd"
        )

    def saved_words(self) -> SavedWords:
        """Return the form in which a file keeps the particles; ``from_file`` reads it."""
        saved = super().saved_words()
        more = dict(reached=self.reached, num_kept=self.num_kept, memory=self.memory)
        return replace(saved, words={**saved.words, **more})

    @classmethod
    def from_file(
        cls, result: Result, arrays: Mapping[str, np.ndarray], words: Mapping[str, Any]
    ) -> Self:
        """Return the particles of a fit from the arrays of :meth:`saved_words` in a file."""
        made = super().from_file(result, arrays, words)
        names = ("reached", "num_kept", "memory")
        return replace(made, **{name: words[name] for name in names})

    def report(self) -> str:
        """Return in words whether to trust the particles."""
        evidence = "" if self.log_evidence is None else f", log evidence {self.log_evidence:.2f}"
        words = (
            f"{len(self.weights)} particles on {NUM_ISLANDS} islands{evidence}, "
            f"{self.num_exchanges} exchanges. "
        )
        if self.trusted:
            return (
                f"{words}The posterior of the globals can be trusted: islands agree on means and "
                f"sds to {self._error_in_words} sd."
            )
        return f"{words}Do not trust this posterior: {self.doubt}."


def particles_of(key: Array, fit: Result, swarm: Swarm) -> Particles:
    """Return the particles that were kept, or those on their way, with their quality."""
    built = fit._fit
    num_kept = int(swarm.num_kept)
    number = swarm.here.z.shape[0]
    kept = np.asarray(swarm.kept)[:num_kept]
    if not num_kept:
        kept = np.asarray(swarm.here.z)[None]
    z = kept.reshape(-1, kept.shape[2])
    even = np.full(len(z), 1 / len(z))
    # Kept particles have densities of this size.
    log_p = jnp.tile(swarm.here.log_p, len(z) // number)
    computed = moments(z, even, np.ones(len(z), bool))
    by_island = kept.reshape(len(kept), NUM_ISLANDS, -1, kept.shape[2])
    islands = by_island.swapaxes(0, 1).reshape(NUM_ISLANDS, -1, kept.shape[2])
    last = kept[-1]
    memory = memory_of(np.asarray(swarm.arrived), last) if num_kept else 1.0
    computed = computed._replace(error=disagreement(islands, computed.sd), tail=0.0)
    integration = integration_of(fit, None)
    evidence = float(jax.nn.logsumexp(swarm.log_evidence) - math.log(NUM_ISLANDS))
    return Particles(
        log_evidence=evidence if float(swarm.b) >= 1 else None,
        ess=float(len(z) if num_kept else number),
        pareto_k=0.0,
        weights=even,
        result=fit,
        _key=jax.random.fold_in(key, 1),
        _moments=computed,
        _rounding=Rounding.of(z, even, log_p, computed.mean, computed.sd),
        z_G=jnp.asarray(z),
        _posterior=sampler_of(built, integration),
        num_exchanges=int(swarm.exchanges),
        integration=integration,
        reached=float(swarm.b),
        num_kept=num_kept,
        memory=memory,
    )


def memory_of(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest correlation of a coordinate with its earlier value, within modes.

    Both are (n, dim). Particles do not pass between modes that lie far apart, and need not: their
    numbers there are right by weight. So correlations are those of the distances from the mean of
    each mode, among the particles that were there before.
    """
    mode_after, mode_before = np.split(modes_apart(np.concatenate([after, before])), 2)
    products = np.zeros((3, after.shape[1]))
    for mode in np.unique(mode_after):
        stayed = (mode_after == mode) & (mode_before == mode)
        if stayed.any():
            x, y = (a[stayed] - a[stayed].mean(0) for a in (before, after))
            products += np.stack([(x * y).sum(0), (x**2).sum(0), (y**2).sum(0)])
    scale = np.sqrt(products[1] * products[2])
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(scale > 0, products[0] / scale, 1.0).max(initial=0.0))


def modes_apart(z: np.ndarray) -> np.ndarray:
    """Return a number for the mode of each particle (n,), by gaps along coordinates."""
    modes = np.zeros(len(z), int)
    least = max(int(MIN_SHARE * len(z)), 2)
    for new in range(1, MAX_MODES):
        gaps = [_widest_gap(z, modes == mode, least) for mode in range(new)]
        cut = max(gaps, key=lambda gap: gap.width)
        if cut.width <= GAP:
            break
        modes[cut.inside & (z[:, cut.coordinate] > cut.place)] = new
    return modes


class _Gap(NamedTuple):
    """A gap along a coordinate, its width a multiple of the spreads on both its sides."""

    width: float
    coordinate: int
    place: float
    inside: np.ndarray


def _widest_gap(z: np.ndarray, inside: np.ndarray, least: int) -> _Gap:
    """Return the widest gap among the particles ``inside``, with ``least`` of them on each side."""
    widest = _Gap(0.0, 0, 0.0, inside)
    if inside.sum() < 2 * least:
        return widest
    ordered = np.sort(z[inside], axis=0)
    number = len(ordered)
    places = np.arange(least, number - least + 1)  # particles on the left of each gap
    for coordinate in range(z.shape[1]):
        x = ordered[:, coordinate]
        i = places[np.argmax(x[places] - x[places - 1])] if len(places) else 0
        spread = x[:i].std() + x[i:].std()
        width = (x[i] - x[i - 1]) / spread if spread > 0 else 0.0
        if width > widest.width:
            widest = _Gap(float(width), coordinate, float(x[i - 1] + x[i]) / 2, inside)
    return widest


def disagreement(islands: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return standard errors (2, dim) of mean and sd, in sds, from islands (4, n, dim)."""
    scale = np.where(sd > 0, sd, 1.0)
    means, sds = islands.mean(1) / scale, islands.std(1) / scale
    found = np.stack([m.std(0, ddof=1) for m in (means, sds)]) / math.sqrt(len(islands))
    return np.where(np.isfinite(found) & (sd > 0), found, np.inf)
