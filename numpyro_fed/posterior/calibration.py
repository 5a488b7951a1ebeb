"""How well outcomes are predicted: counts by predicted probability, as sums over silos' rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.random import fold_in

from numpyro_fed.basics.errors import optional
from numpyro_fed.data.silo_data import ALL, SiloData
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.posterior.built import Built
from numpyro_fed.posterior.site_at_rows import SiteAtRows, sum_exchange
from numpyro_fed.rounds.exchange import Exchange
from numpyro_fed.rounds.names import CALIBRATION
from numpyro_fed.search.expand import shape
from numpyro_fed.text.log_density import outcomes_at
from numpyro_fed.weigh.log_likelihoods import at_draws, shape_of_draws, with_globals

# Outcomes are counted by their predicted log odds, in so many bins from -LIMIT to LIMIT.
LIMIT, NUM_BINS = 10.0, 400


class Predicted(NamedTuple):
    """A silo's reply about how well its outcomes are predicted.

    ``rows`` (2, bins): The numbers of rows with outcome 0 and 1.
    ``probabilities`` (bins,): The sums of the probabilities predicted for them.
    ``pairs`` (2,): Of pairs of rows with outcome 0 and 1 the number in which the latter was
        predicted higher, ties by half, and the number of all.
    """

    rows: Array
    probabilities: Array
    pairs: Array


def calibration_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos count their outcomes by probability, by bins."""
    fm, n = built.model, settings["num_draws"]
    at_rows, sampler = SiteAtRows(fm, settings["site"]), built.sampler(settings)

    def silo(key: Array, down: GlobalDraws, state: object, data: SiloData) -> Predicted:
        given = at_draws(built.algorithm, down, state, data)

        def values_at(draw: tuple[Array, Array, Array]) -> Array:
            i, z_G, u = draw
            return at_rows.at(sampler, fold_in(key, i), with_globals(given, z_G, u), data)

        draws = jnp.arange(n), down.z_G, given.coordinates.u
        return predicted_rows(at_rows, settings, data, values_at, draws)

    def messages() -> tuple[GlobalDraws, Predicted]:
        down = shape_of_draws(built.guide, built.algorithm, (n, fm.dim))
        return down, Predicted(shape(2, NUM_BINS), shape(NUM_BINS), shape(2))

    return sum_exchange(CALIBRATION, silo, messages, settings, little=little)


def predicted_rows(
    at_rows: SiteAtRows,
    settings: Mapping[str, Any],
    data: SiloData,
    values_at: Callable[[Any], Array],
    draws: Any,
) -> Predicted:
    """Return a silo's outcomes by their mean probability over draws, ``values_at(draw)`` each."""
    fm, plate = at_rows.model, at_rows.plate

    def add(total: Array, draw: Any) -> tuple[Array, None]:
        return total + values_at(draw), None

    rows = fm.sizes(data)[plate]
    outcome = outcomes_at(fm, data)[at_rows.site]
    start = jnp.zeros((rows, *settings["shape"]))
    p = jax.lax.scan(add, start, draws)[0].ravel() / settings["num_draws"]
    axis = outcome.axes.index(plate)
    y, elements = (jnp.moveaxis(a, axis, 0) for a in (outcome.value, outcome.elements))
    real = data.masked(plate, jnp.ones(rows)) > 0
    counts = elements & real.reshape(-1, *[1] * (y.ndim - 1))
    # So many rows, of which each may have several outcomes.
    least = settings["min_count"] * max(1, y.size // max(rows, 1))
    return binned(p, y.ravel(), counts.ravel(), least)


def binned(p: Array, y: Array, counts: Array, least: int) -> Predicted:
    """Return the numbers of rows by outcome and log odds; a bin of few rows joins the next ones.

    Bins that are joined are told in the bin of their mean log odds.
    """
    odds = jnp.clip(jnp.log(p) - jnp.log1p(-p), -LIMIT, LIMIT)

    def bin_of(odds: Array) -> Array:
        place = jnp.floor((odds + LIMIT) / (2 * LIMIT) * NUM_BINS)
        return jnp.clip(place, 0, NUM_BINS - 1).astype(int)

    index = bin_of(odds)
    # The numbers of rows up to each bin: where a bin joins the next one they move up as a whole.
    of_bin = jnp.zeros(NUM_BINS).at[index].add(1.0 * counts)

    def join(held: Array, own: Array) -> tuple[Array, Array]:
        full = held + own >= least
        return jnp.where(full, 0.0, held + own), full

    _, ends = jax.lax.scan(join, jnp.zeros(()), of_bin)
    # The bin in which a row is told: the first one from its own on that is full. What is left over
    # at the end joins the last that was.
    numbers = jnp.where(ends, jnp.arange(NUM_BINS), NUM_BINS)
    following = jax.lax.cummin(numbers, reverse=True)
    last = jnp.max(jnp.where(ends, jnp.arange(NUM_BINS), 0))
    joined = jnp.minimum(following, last)[index]
    number, total = (
        jnp.zeros(NUM_BINS).at[joined].add(jnp.where(counts, values, 0.0))
        for values in (jnp.ones_like(odds), odds)
    )
    told = bin_of(total / jnp.where(number > 0, number, 1.0))[joined]
    code = jnp.where(counts, y, 0.0).astype(int)  # what is missing is no number
    rows = jnp.zeros((2, NUM_BINS)).at[code, told].add(1.0 * counts)
    probabilities = jnp.zeros(NUM_BINS).at[told].add(jnp.where(counts, p, 0.0))
    zeros = jnp.sort(jnp.where(counts & (code == 0), p, jnp.inf))
    below = sum(jnp.searchsorted(zeros, p, side=side) for side in ("left", "right")) / 2
    ones = counts & (code == 1)
    total = (counts & (code == 0)).sum() * ones.sum()
    pairs = jnp.stack([jnp.where(ones, below, 0.0).sum(), 1.0 * total])
    return Predicted(rows, probabilities, pairs)


@dataclass(frozen=True, eq=False)
class Calibration:
    """How often an outcome was 1 where it was predicted so often; prints as a table.

    Attributes
    ----------
    rows : array (silos, 2, bins)
        The numbers of rows with outcome 0 and 1, by bins of the predicted log odds; without
        ``by_silo`` of all silos together.
    probabilities : array (silos, bins)
        The sums of the probabilities predicted for them.
    pairs : array (silos, 2)
        Of pairs of rows of one silo, with outcome 0 and 1, the number in which the latter was
        predicted higher, and the number of all.
    names : tuple of str
        The silos; empty if all are together.
    num_groups : int
        The number of lines of the table.
    """

    rows: np.ndarray
    probabilities: np.ndarray
    pairs: np.ndarray
    names: tuple[str, ...]
    num_groups: int = 10

    @cached_property
    def auc(self) -> float:
        """The share of pairs of rows of one silo in which outcome 1 was predicted higher."""
        higher, number = self.pairs.sum(0)
        return float(higher / number) if number else float("nan")

    def to_frame(self, silo: int | str | None = None) -> Any:
        """Return the table, a line for each group of about as many rows; of one silo if asked.

        With ``silo="all"`` it has a line for each silo, with the AUC and the number of its pairs.
        """
        frame = optional("pandas").DataFrame
        if silo == ALL:
            number, ones = self.rows.sum((1, 2)).astype(int), self.rows[:, 1].sum(1)
            higher, pairs = self.pairs.T
            with np.errstate(invalid="ignore", divide="ignore"):
                numbers = self.probabilities.sum(1) / number, ones / number, higher / pairs
            columns = dict(zip(("predicted", "observed", "AUC"), numbers, strict=True))
            table = {"rows": number, **columns, "pairs": pairs.astype(int)}
            return frame(table, index=self.names or None).rename_axis("silo")
        rows, sums = (a.sum(0) for a in (self.rows, self.probabilities))
        if silo is not None:
            j = self.names.index(silo) if isinstance(silo, str) else silo
            rows, sums = self.rows[j], self.probabilities[j]
        of_bin = rows.sum(0)
        before = np.cumsum(of_bin) - of_bin / 2
        group = np.minimum(before / max(of_bin.sum(), 1) * self.num_groups, self.num_groups - 1)
        lines = []
        for g in range(self.num_groups):
            own = (group.astype(int) == g) & (of_bin > 0)
            if number := of_bin[own].sum():
                lines.append((int(number), sums[own].sum() / number, rows[1, own].sum() / number))
        return frame(lines, columns=["rows", "predicted", "observed"])

    def __str__(self) -> str:
        parts = [self.to_frame().round(3).to_string(index=False)]
        if self.names:
            parts.append(self.to_frame(ALL).round(3).to_string())
        pairs = self.pairs[:, 1].sum()
        return "\n".join([*parts, f"AUC {self.auc:.3f}, of {pairs:,.0f} pairs of rows of one silo"])

    __repr__ = __str__
