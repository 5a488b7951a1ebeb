"""PSIS-LOO by row: how well all other rows predict each one, smoothed where the rows are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Exchange
from numpyro_fed.algorithms.importance.likelihood import Integration
from numpyro_fed.algorithms.importance.loo import (
    MAX_K,
    LeaveOutDown,
    LeftOut,
    RowScores,
    RowSums,
    Scores,
    leave_out,
    loo,
    row_scores,
)
from numpyro_fed.algorithms.sfvi import down_of
from numpyro_fed.errors import DataError, optional
from numpyro_fed.model.row_checks import refuse_coupled_rows, refuse_parameters_of_rows
from numpyro_fed.programs import jit_once
from numpyro_fed.results.arviz import elpd_data
from numpyro_fed.results.base import Built
from numpyro_fed.results.rows import Result
from numpyro_fed.runtime.noise import generator

NOT_FINITE = "the log predictive density is not finite at {}."


@dataclass(frozen=True, eq=False)
class LeaveOut:
    """A table of what the others say of each silo; it prints as one.

    Attributes
    ----------
    log_density : array (num_silos,)
        The log predictive density of a silo's rows given those of all others,
        ``log p(y_j | y_-j)``.
    pareto_k : array (num_silos,)
        The shape of the tail of the ratios; above 0.7 the other two numbers are not known.
    shift : array (num_silos,)
        How far the mean of a global moves when the silo is left out, the farthest one, in posterior
        standard deviations.
    num_exchanges : int
    reason : str
        Why no further draws could be made where a row is not known; empty if there is no reason.
    """

    log_density: np.ndarray
    pareto_k: np.ndarray
    shift: np.ndarray
    num_exchanges: int = 1
    reason: str = ""

    @property
    def total(self) -> float:
        """The sum of all log densities, by which models are compared; not known if one is not."""
        return float(self.log_density.sum())

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the silos whose numbers are not known, since a few draws carry the ratios."""
        return tuple(np.flatnonzero(~(self.pareto_k <= MAX_K)).tolist())

    def better_of(self, other: LeaveOut, silos: Sequence[int]) -> LeaveOut:
        """Return the table with some silos' rows from another one, where its tails are lighter.

        The exchanges of both count.
        """
        taken = np.isin(np.arange(len(self.pareto_k)), silos) & ~(self.pareto_k <= other.pareto_k)
        return LeaveOut(
            np.where(taken, other.log_density, self.log_density),
            np.where(taken, other.pareto_k, self.pareto_k),
            np.where(taken, other.shift, self.shift),
            self.num_exchanges + other.num_exchanges,
        )

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each silo."""
        columns = {name: getattr(self, name) for name in ("log_density", "pareto_k", "shift")}
        columns["known"] = self.pareto_k <= MAX_K
        return optional("pandas").DataFrame(columns).rename_axis("silo")

    def __str__(self) -> str:
        lines = [f"{'silo':>6} {'log density':>12} {'k-hat':>7} {'shift':>7}"]
        for j, (density, k, shift) in enumerate(
            zip(self.log_density, self.pareto_k, self.shift, strict=True)
        ):
            mark = "  not known" if j in self.unknown else ""
            lines.append(f"{j:6d} {density:12.2f} {k:7.2f} {shift:7.2f}{mark}")
        unknown = ", ".join(str(j) for j in self.unknown)
        mark = f"  not known, for it counts silo {unknown}" if unknown else ""
        lines.append(f"{'total':>6} {self.total:12.2f}{mark}")
        return "\n".join(lines)

    __repr__ = __str__


def leaving_out(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange that leaves silos out, which silos elsewhere build from its settings."""
    integration = Integration(settings["inner_draws"], settings["nodes"])
    fm, guide = built.model, built.guide
    return leave_out(
        fm,
        guide,
        integration.likelihood(fm, guide),
        built.algorithm,
        settings["num_draws"],
        settings["batch_size"],
        json.dumps(dict(settings)),
        little=little,
    )


def table_of(
    key: Array, result: Result, integration: Integration, z_G: np.ndarray, log_weights: np.ndarray
) -> LeaveOut:
    """Return the table by draws (n, dim) with log weights (n,), in one exchange."""
    fit, n = result._fit, len(log_weights)
    question = fit.question("leave out", leaving_out, integration, n)
    draws = down_of(fit.guide, result.shared, jnp.asarray(z_G))
    found: LeftOut = result.ask_once(
        question, LeaveOutDown(draws, jnp.asarray(log_weights)), key, NOT_FINITE
    )
    density, k, shift = (np.asarray(a, np.float64) for a in found)
    return LeaveOut(density, k, shift)


# Draws of the posterior that rows are left out of, at most and at least. Densities of 2,000 draws
# are right to 0.02 nats as a rule.
MOST_DRAWS, LEAST_DRAWS = 4_000, 500
MOST_NUMBERS = 2e8  # draws x rows of a silo, which stand in memory at once: 1.6 GB
MESSAGE = "the log likelihoods of the rows are not finite at {}."


class RowsOfSilo(NamedTuple):
    """The log predictive densities of a silo's rows, and the shapes of their tails (rows,)."""

    log_density: np.ndarray
    pareto_k: np.ndarray


@dataclass(frozen=True, eq=False)
class Loo:
    """Expected log predictive density of rows, each left out in turn; prints as a table.

    Attributes
    ----------
    elpd : float
        The sum of ``log p(y_i | y_-i)`` over all rows.
    se : float
        Its standard error, as a sum over rows that might have been others.
    p_loo : float
        By how much it is below the fit to the rows: the effective number of parameters.
    num_rows, num_bad : int
        All rows, and those with a Pareto k-hat above 0.7, whose density is not known.
    num_draws : int
        The effective number of the draws behind it.
    num_exchanges : int
    silos : tuple of RowsOfSilo or None
        The same row by row, for each silo; None for silos in other processes, where they stay.
    """

    elpd: float
    se: float
    p_loo: float
    num_rows: int
    num_bad: int
    num_draws: int
    num_exchanges: int
    silos: tuple[RowsOfSilo, ...] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        sums: RowSums,
        num_draws: int,
        num_exchanges: int,
        silos: tuple[RowsOfSilo, ...] | None = None,
    ) -> Loo:
        """Return the table from sums over all rows."""
        total, squares, of_fit, bad, rows = (float(a) for a in sums)
        se = math.sqrt(rows * max(squares / rows - (total / rows) ** 2, 0.0))
        counts = round(rows), round(bad), num_draws, num_exchanges
        return cls(total, se, of_fit - total, *counts, silos)

    def to_arviz(self) -> Any:
        """Return it as ArviZ's ``ELPDData``, row by row, for ``arviz.compare`` and plots of k-hat.

        Raises
        ------
        DataError
            For silos in other processes, whose rows' numbers stay there.
        """
        if self.silos is None:
            raise DataError("silos in other processes keep what is known of each row.")
        rows, k = (np.concatenate(parts) for parts in zip(*self.silos, strict=True))
        return elpd_data(rows, k, p=self.p_loo, num_draws=self.num_draws)

    def __str__(self) -> str:
        bad = f"{self.num_bad} of {self.num_rows} rows have a k-hat above {MAX_K}"
        what = f"elpd {self.elpd:.1f} (standard error {self.se:.1f}), p_loo {self.p_loo:.1f}"
        doubt = ", and are not known" if self.num_bad else ""
        return f"{what}; {bad}{doubt}."

    __repr__ = __str__


def loo_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange that leaves rows out, which silos elsewhere build from its settings."""
    n = settings["num_draws"]
    scores = _scores(built, settings)
    return loo(built.model, built.guide, scores, built.algorithm, n, json.dumps(dict(settings)))


def _scores(built: Built, settings: Mapping[str, Any]) -> Scores:
    integration = Integration(settings["inner_draws"], settings["nodes"])
    likelihood = integration.likelihood(built.model, built.guide)
    return row_scores(built.model, likelihood, built.algorithm, settings["batch_size"])


def rows_left_out(
    key: Array, result: Result, integration: Integration, z_G: np.ndarray, log_weights: np.ndarray
) -> Loo:
    """Return the table by draws (n, dim) of the posterior with log weights (n,).

    In one process nothing crosses; with silos in others it takes one exchange.
    """
    fit, n = result._fit, len(z_G)
    # As many draws as a silo has room for, and any of them: a resample would hide a heavy tail.
    rows = max((n for _, n in result.plan.total), default=1) / max(result.num_silos, 1)
    if result.sizes:
        rows = max(max(size.values(), default=1) for size in result.sizes)
    room = int(np.clip(MOST_NUMBERS / max(rows, 1), LEAST_DRAWS, MOST_DRAWS))
    if room < n:
        some = generator(key).permutation(n)[:room]
        n, z_G, log_weights = room, z_G[some], log_weights[some]
    refuse_parameters_of_rows(fit.model)
    refuse_coupled_rows(fit.checks, result._silos.buckets, "leaving rows out needs")
    w = np.exp(log_weights - log_weights.max())
    worth = int(w.sum() ** 2 / (w**2).sum())
    draws = down_of(fit.guide, result.shared, jnp.asarray(z_G))
    down = LeaveOutDown(draws, jnp.asarray(log_weights))
    if result._silos.elsewhere:
        question = fit.question("loo", loo_exchange, integration, n)
        sums: RowSums = result.ask_once(question, down, key, MESSAGE)
        return Loo.of(sums, worth, 1)
    scores = fit.question(
        "loo",
        lambda built, settings, little: (jit_once if little else jax.jit)(_scores(built, settings)),
        integration,
        n,
    )
    silos, total = [], RowSums(*np.zeros(len(RowSums._fields)))
    for j in range(result.num_silos):
        data = result._silos.at(j, [batch.data for batch in result._silos.batches])
        state = result._silo_state(j)
        found: RowScores = jax.block_until_ready(
            scores(jax.random.fold_in(key, j), down, state, data)
        )
        counts = np.asarray(found.counts)
        silos.append(RowsOfSilo(*(np.asarray(a, float)[counts] for a in found[:2])))
        total = jax.tree.map(np.add, total, RowSums.of(found))
    return Loo.of(total, worth, 0, tuple(silos))
