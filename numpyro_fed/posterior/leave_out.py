r"""How well others predict each silo, and each row: what is left out, by exchanges or at rows.

The server has draws :math:`z_G^s` with the weights :math:`w_s` that make them draws of the
posterior. A silo draws the latents :math:`u^s` of its outer plates (a hospital's effect) given
each, and integrates out those of the rows themselves. Row ``i`` takes its own likelihood out of the
draws (Vehtari, Gelman and Gabry 2017),

.. math::
    v_s \propto w_s \,/\, p(y_i \mid z_G^s, u^s), \qquad
    p(y_i \mid y_{-i}) = \sum_s v_s \, p(y_i \mid z_G^s, u^s),

and smooths the tail of the ratios. What a silo sends are sums over its rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import elpd_data
from numpyro_fed.basics.errors import DataError, optional
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data.silo_data import SiloData, names_or_numbers
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.posterior.built import Built
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.exchange import Combine, Exchange, key_as_noise
from numpyro_fed.rounds.keys import generator
from numpyro_fed.rounds.names import LEAVE_OUT, LOO
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.search.expand import shape
from numpyro_fed.text.row_checks import refuse_coupled_rows, refuse_parameters_of_rows
from numpyro_fed.weigh.integration import Integration
from numpyro_fed.weigh.log_likelihoods import (
    log_likelihoods,
    log_likelihoods_of_rows,
    shape_of_draws,
)

NOT_FINITE = "the log predictive density is not finite at {}."
# Nats below the largest ratio at which another one counts as so small: the exponential of twice as
# much is no zero in single precision.
FAR = 40.0
NOT_KNOWN = 1e3  # the shape of a tail that cannot be fitted: a few ratios, or equal ones
MAX_K = 0.7  # shape of a tail above which ratios are not known (Vehtari et al. 2024)


class LeaveOutDown(NamedTuple):
    """The server's message: draws as in a correction, and their log weights (n,)."""

    draws: GlobalDraws
    log_weights: Array


class LeftOut(NamedTuple):
    """A silo's reply about its rows, given those of all others.

    ``log_density`` (): The log predictive density of its rows.
    ``pareto_k`` (): The shape of the tail of the ratios.
    ``shift`` (): How far the mean of a global moves without the silo, the farthest one, in
        posterior sds.
    """

    log_density: Array
    pareto_k: Array
    shift: Array


def without(log_weights: Array, values: Array) -> tuple[Array, Array, Array]:
    """Take a part with log likelihoods ``values`` (n,) out of draws with log weights (n,).

    Return the log weights without it, whose tail is smoothed, and which sum to one; the log
    predictive density of the part (); and the Pareto k-hat of the tail ().
    """
    from blackjax.diagnostics import psis_weights  # here: its import starts JAX's backend

    counts = (log_weights > -jnp.inf) & (values > -jnp.inf)
    ratios = jnp.where(counts, log_weights - values, -jnp.inf)
    # The exponentials of a tail must be numbers. Ratios far below the largest hardly count, but
    # they stand where the silo's own likelihood may be e^1000 times as large.
    near = jnp.maximum(ratios, ratios.max() - FAR)
    smoothed, k = psis_weights(near)
    known = jnp.isfinite(k) & jnp.isfinite(smoothed).all()
    log_v = jax.nn.log_softmax(jnp.where(known, smoothed, near)) + (ratios - near)
    density = jax.nn.logsumexp(jnp.where(counts, log_v + values, -jnp.inf))
    return log_v, density, jnp.where(known, k, NOT_KNOWN)


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
    names : tuple of str
        The names of silos; empty where they have none.
    """

    log_density: np.ndarray
    pareto_k: np.ndarray
    shift: np.ndarray
    num_exchanges: int = 1
    reason: str = ""
    names: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The sum of all log densities, by which models are compared; not known if one is not."""
        return float(self.log_density.sum())

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the numbers of silos whose rows of the table are not known, as few draws say."""
        return tuple(np.flatnonzero(~(self.pareto_k <= MAX_K)).tolist())

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each silo."""
        columns = {name: getattr(self, name) for name in ("log_density", "pareto_k", "shift")}
        columns["known"] = self.pareto_k <= MAX_K
        index = self.names or None
        return optional("pandas").DataFrame(columns, index=index).rename_axis("silo")

    def __str__(self) -> str:
        who = names_or_numbers(self.names, len(self.shift))
        width = max(6, *map(len, who))
        lines = [f"{'silo':>{width}} {'log density':>12} {'k-hat':>7} {'shift':>7}"]
        for j, (density, k, shift) in enumerate(
            zip(self.log_density, self.pareto_k, self.shift, strict=True)
        ):
            mark = "  not known" if j in self.unknown else ""
            lines.append(f"{who[j]:>{width}} {density:12.2f} {k:7.2f} {shift:7.2f}{mark}")
        unknown = ", ".join(who[j] for j in self.unknown)
        mark = f"  not known, for it counts silo {unknown}" if unknown else ""
        lines.append(f"{'total':>{width}} {self.total:12.2f}{mark}")
        return "\n".join(lines)

    __repr__ = __str__


def leave_out_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which each silo tells what the others say of it (:class:`LeftOut`)."""
    integration = Integration.of(settings)
    fm, guide, n = built.model, built.guide, settings["num_draws"]
    likelihood = integration.likelihood(fm, guide)
    evaluate = partial(log_likelihoods, likelihood, built.algorithm, n, settings["batch_size"])

    def silo(noise: Array, down: LeaveOutDown, state: object, data: SiloData) -> LeftOut:
        z_G, values = down.draws.z_G, evaluate(noise, down.draws, state, data)
        log_v, log_density, pareto_k = without(down.log_weights, values)
        w, v = jax.nn.softmax(down.log_weights), jnp.exp(log_v)
        mean = w @ z_G
        sd = jnp.sqrt(w @ jnp.square(z_G - mean))
        shift = jnp.abs(v @ z_G - mean) / jnp.where(sd > 0, sd, 1.0)
        return LeftOut(log_density, pareto_k, shift.max(initial=0.0))

    return StackedExchange(
        LEAVE_OUT,
        stacked_reply(silo, little=little),
        combine=Combine.GATHER,
        silo_noise=key_as_noise,
        settings=json.dumps(dict(settings)),
        messages=lambda: (
            LeaveOutDown(shape_of_draws(guide, built.algorithm, (n, fm.dim)), shape(n)),
            LeftOut(shape(), shape(), shape()),
        ),
    )


def silos_left_out(
    key: Array, result: Result, integration: Integration, z_G: np.ndarray, log_weights: np.ndarray
) -> LeaveOut:
    """Return the table by draws (n, dim) with log weights (n,), in one exchange."""
    fit, n = result._fit, len(log_weights)
    question = fit.question(LEAVE_OUT, leave_out_exchange, integration, n)
    draws = GlobalDraws.of(fit.guide, result.shared, jnp.asarray(z_G))
    found: LeftOut = result.ask_once(
        question, LeaveOutDown(draws, jnp.asarray(log_weights)), key, NOT_FINITE
    )
    density, k, shift = (np.asarray(a, np.float64) for a in found)
    return LeaveOut(density, k, shift, names=result._silos.names)


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


class RowSums(NamedTuple):
    """A silo's reply: sums over its rows.

    ``log_density, squares`` (): Log predictive densities, and their squares.
    ``of_fit`` (): Logs of mean likelihoods under the posterior.
    ``num_bad`` (): The number of rows whose density is not known.
    ``num_rows`` ().
    """

    log_density: Array
    squares: Array
    of_fit: Array
    num_bad: Array
    num_rows: Array

    @classmethod
    def of(cls, density: Array, k: Array, of_fit: Array, counts: Array) -> RowSums:
        """Return the sums over the rows of a silo, by their scores (rows,)."""
        bad = (~(k <= MAX_K)).astype(of_fit.dtype)
        parts = density, density**2, of_fit, bad, jnp.ones_like(of_fit)
        return cls(*(jnp.where(counts, part, 0.0).sum() for part in parts))


def loo_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos tell the sums of their rows' scores (:class:`RowSums`)."""
    n, fitted, scores = settings["num_draws"], built.algorithm, _scores(built, settings)
    return StackedExchange(
        LOO,
        stacked_reply(lambda *of_silo: RowSums.of(*scores(*of_silo)), little=True),
        silo_noise=key_as_noise,
        settings=json.dumps(dict(settings)),
        messages=lambda: (
            LeaveOutDown(shape_of_draws(built.guide, fitted, (n, built.model.dim)), shape(n)),
            RowSums(*[shape()] * len(RowSums._fields)),
        ),
    )


def _scores(
    built: Built, settings: Mapping[str, Any]
) -> Callable[[Array, LeaveOutDown, Any, SiloData], tuple[Array, Array, Array, Array]]:
    """Return the function ``(key, down, silo_state, data)`` to the scores of a silo's rows.

    They are, all (rows,): the log predictive density without the row, the shape of the tail, the
    log of the mean likelihood under the posterior, which has seen the row, and whether it counts:
    padded rows and those without an outcome do not.
    """
    integration = Integration.of(settings)
    likelihood = integration.likelihood(built.model, built.guide)
    row_values = partial(
        log_likelihoods_of_rows, built.model, likelihood, built.algorithm, settings["batch_size"]
    )

    def scores(
        key: Array, down: LeaveOutDown, state: object, data: SiloData
    ) -> tuple[Array, Array, Array, Array]:
        values, counts = row_values(key, down.draws, state, data)
        _, log_density, pareto_k = jax.vmap(without, (None, 1))(down.log_weights, values)
        log_w = jax.nn.log_softmax(down.log_weights)
        of_fit = jax.nn.logsumexp(values + log_w[:, None], 0)
        return log_density, pareto_k, of_fit, counts

    return scores


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
    draws = GlobalDraws.of(fit.guide, result.shared, jnp.asarray(z_G))
    down = LeaveOutDown(draws, jnp.asarray(log_weights))
    if result._silos.elsewhere:
        question = fit.question(LOO, loo_exchange, integration, n)
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
        found = jax.block_until_ready(scores(jax.random.fold_in(key, j), down, state, data))
        log_density, pareto_k, _, counts = (np.asarray(a) for a in found)
        silos.append(RowsOfSilo(*(a.astype(float)[counts] for a in (log_density, pareto_k))))
        total = jax.tree.map(np.add, total, RowSums.of(*found))
    return Loo.of(total, worth, 0, tuple(silos))
