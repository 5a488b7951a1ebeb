r"""Averages over the rows of all silos, and how well outcomes are predicted, as sums over silos.

At draws :math:`z^s` of the posterior a silo evaluates a site of the text at each of its rows, with
some arguments changed, and sends the sums over its rows:

.. math::
    a^s = \frac{1}{n} \sum_j \sum_i f(z^s_G, z^s_{L_{ji}}, \tilde x_{ji}).

The draws of a silo's latents are those given its own data, and do not see what is changed.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.random import fold_in

from numpyro_fed.after.questions import Questions
from numpyro_fed.basics.errors import DataError, ModelError, positive_int
from numpyro_fed.basics.programs import in_precision_of_object, map_in_batches
from numpyro_fed.data.silo_data import SiloData, names_or_numbers
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.posterior.built import FEW_TERMS, Built
from numpyro_fed.posterior.calibration import (
    NUM_BINS,
    Calibration,
    Predicted,
    calibration_exchange,
    predicted_rows,
)
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.site_at_rows import (
    SiteAtRows,
    checked_changes,
    checked_site,
    sum_exchange,
)
from numpyro_fed.rounds.exchange import Exchange
from numpyro_fed.rounds.names import AVERAGE, CALIBRATION
from numpyro_fed.rounds.progress import shows
from numpyro_fed.search.expand import shape
from numpyro_fed.weigh.log_likelihoods import at_draws, shape_of_draws, with_globals

NOT_FINITE = "the averages are not finite at {}."
SILO = "silo"  # what averages are by, where they are those of each silo
# Draws x rows of a silo that are computed side by side: more of them leave a core's own memory.
ROWS_AT_ONCE = 2**16


class AveragesOverRows(Questions):
    """The questions to a posterior whose answers are sums over the rows of silos."""

    @property
    @abstractmethod
    def sampler(self) -> Sampler:
        """Return the functions by which locals are drawn."""

    @shows("average")
    @in_precision_of_object
    def average(
        self,
        key: Array,
        site: str,
        changes: Mapping[str, Any] | None = None,
        *,
        by: str | None = None,
        num_groups: int = 0,
        num_draws: int = 1_000,
    ) -> Any:
        r"""Return draws of a site's average over the rows of all silos, under changed arguments.

        .. math::
            a^s = \frac 1n \sum_j \sum_i f(z^s, \tilde x_{ji})

        With a treatment set to 1 and to 0 the difference of two averages is its effect on all
        patients, standardised over their covariates (the g-formula); with a list of times, a curve
        of the share that survives them.

        Parameters
        ----------
        key : jax.Array
            Draws of all latents are the same for the same key.
        site : str
            A ``numpyro.deterministic`` in the silo plate, or an outcome, of which it is the mean.
        changes : dict, optional
            Arguments of the model that become one number at all rows, ``{"treated": 1.0}``, or
            each number of a list, ``{"treated": [0, 1]}`` (or ``[False, True]``); of a matrix a
            column, by its number or name: ``{"x": {"treated": 1.0}}``. Several lists go together,
            entry by entry.
        by : str, optional
            An argument of whole numbers from 0 on, which groups the rows; or ``"silo"``, for an
            average of each silo, which secure sums cannot tell.
        num_groups : int
            How many groups there are, over all silos; only with an argument as ``by``.
        num_draws : int

        Returns
        -------
        Average
            Draws ``(num_draws, *shape)`` of the average, or ``(num_draws, num_groups, *shape)``,
            where ``shape`` is that of the site at one row, behind the numbers of a list if there is
            one; ``numpy.asarray`` of it has the draws.

        Raises
        ------
        DataError
            For a site or an argument that does not exist; for groups without rows.
        ModelError
            For a site that has no rows.

        Notes
        -----
        One exchange, in which a silo sends sums over its rows, which secure sums hide. A silo in
        another process refuses groups of fewer rows than its policy's ``min_count``. Latents of
        silos and rows are drawn given their data as they are. The average is over the rows of the
        fit, and not over a population from which they come.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(t, x, y):
        ...     b = numpyro.sample("b", dist.Normal(0, 2).expand([3]).to_event(1))
        ...     with nf.silo_plate("row", len(t)):
        ...         p = numpyro.deterministic("p", jax.nn.sigmoid(b[0] + b[1] * t + b[2] * x))
        ...         numpyro.sample("y", dist.Bernoulli(p), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = []
        >>> for n in (200, 100):
        ...     t, x = rng.integers(0, 2, n), rng.normal(size=n)
        ...     silos.append(dict(t=t, x=x, y=rng.binomial(1, 1 / (1 + np.exp(1 - 2 * t - x)))))
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> p = np.asarray(fitted.average(jax.random.key(1), "p", {"t": [0, 1]}))
        >>> bool(0.2 < (p[:, 1] - p[:, 0]).mean() < 0.5)
        True
        """
        self._warn_of_doubt()
        positive_int("num_draws", num_draws)
        run, fit = self.run_behind, self.run_behind._fit
        checked_site(fit.model, site, ("deterministic", "observed"))
        of_silos = by == SILO and by not in {a.name for a in fit.facts.arguments}
        if of_silos and num_groups in (0, run.num_silos):
            by, num_groups = None, 0
        if by is not None and by not in {a.name for a in fit.facts.arguments if a.dtype[0] in "iu"}:
            raise DataError(f"by='{by}' is no argument of whole numbers that all silos have.")
        plates = {a.name: a.plates for a in fit.facts.arguments}
        own = next(s.plate for s in fit.model.sites if s.name == site)
        if by is not None and own not in plates[by]:
            raise DataError(f"by='{by}' groups rows of {plates[by]}, and '{site}' is of '{own}'.")
        if (by is None) != (num_groups == 0) or num_groups < 0:
            raise ValueError(
                f"by={by!r}, num_groups={num_groups}: pass both, or none of them. Groups are coded "
                "from 0 on at all silos, and num_groups is the largest code and one."
            )
        changed = checked_changes(fit.facts, changes or {})
        settings = {"site": site, "changes": changed, "by": by, "num_groups": int(num_groups)}
        settings |= {"by_silo": True} if of_silos else {}
        up: RowTotals = self._asked(key, num_draws, AVERAGES, settings)
        rows, totals = np.asarray(up.rows, float), np.asarray(up.totals, float)
        names: tuple[str, ...] = ()
        if of_silos:
            rows, totals = rows[:, 0], np.moveaxis(totals[:, :, 0], 0, 1)
            names = names_or_numbers(run._silos.names, run.num_silos)
        elif by:
            names = tuple(f"{by}={g}" for g in range(num_groups))
        if left_out := float(np.sum(up.left_out)):
            raise DataError(
                f"by='{by}': {left_out:.0f} rows have codes beyond 0 to {num_groups - 1}."
            )
        if not rows.all():
            where = f"by='{by or SILO}': the groups {np.flatnonzero(rows == 0).tolist()} have"
            raise DataError(f"{where if names else 'the silos have'} no rows to average over.")
        draws = totals / rows.reshape(-1, *[1] * (totals.ndim - 2))
        return Average(draws if names else draws[:, 0], rows if names else rows[0], names)

    @shows("calibrate")
    @in_precision_of_object
    def calibration(
        self,
        key: Array,
        site: str | None = None,
        *,
        by_silo: bool = False,
        min_count: int = 5,
        num_draws: int = 500,
    ) -> Any:
        r"""Return how often a binary outcome was 1 where so high a probability was predicted.

        The probability of a row is the mean of the posterior's draws. It has seen the row's own
        outcome, which matters where rows have latents of their own, or parameters are many.

        Parameters
        ----------
        key : jax.Array
        site : str, optional
            The outcome; it can be left out if there is one.
        by_silo : bool
            Whether to tell silos apart, which secure sums cannot: then a second table has a line
            for each of them.
        min_count : int
            The least number of rows of a bin: a bin of fewer joins the next one at its silo. A silo
            in another process answers for the ``min_count`` of its policy alone: answers for two of
            them would differ by single rows.
        num_draws : int

        Returns
        -------
        Calibration
            A table that prints, by groups of rows in the order of what was predicted, with
            ``.auc`` over pairs of rows of one silo, and how many these are.

        Raises
        ------
        DataError
            For an outcome that does not exist.
        ModelError
            For one that is not binary.

        Notes
        -----
        One exchange, in which a silo sends numbers of rows by bin.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(x, y):
        ...     b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        ...     with nf.silo_plate("row", len(x)):
        ...         numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = []
        >>> for x in rng.normal(size=(2, 200)):
        ...     silos.append(dict(x=x, y=rng.binomial(1, 1 / (1 + np.exp(-2 * x)))))
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> table = fitted.calibration(jax.random.key(1))
        >>> bool(0.8 < table.auc < 0.95), list(table.to_frame().columns)
        (True, ['rows', 'predicted', 'observed'])
        """
        self._warn_of_doubt()
        positive_int("num_draws", num_draws)
        run = self.run_behind
        fm = run._fit.model
        outcomes = [s.name for s in fm.sites if s.kind == "observed" and s.plate is not None]
        if site is None and len(outcomes) != 1:
            raise ModelError(f"the model has the outcomes {outcomes}: say which, site=.")
        site = site or outcomes[0]
        checked_site(fm, site, ("observed",))
        kind = fm.traces.at(fm.silo).supports.get(site)
        if kind is None or kind.name != "Bernoulli":
            raise ModelError(
                f"the outcome '{site}' is not binary ({kind.name if kind else 'summed out'}): of "
                "others plot_check shows how well they are predicted."
            )
        settings = {"site": site, "by_silo": by_silo, "min_count": min_count}
        up: Predicted = self._asked(key, num_draws, CALIBRATIONS, settings)
        rows = np.asarray(up.rows, float).reshape(-1, 2, NUM_BINS)
        sums = np.asarray(up.probabilities, float).reshape(-1, NUM_BINS)
        names = names_or_numbers(run._silos.names, run.num_silos) if by_silo else ()
        return Calibration(rows, sums, np.asarray(up.pairs, float).reshape(-1, 2), names)

    def _asked(
        self, key: Array, num_draws: int, question: SumOverRows, settings: Mapping[str, Any]
    ) -> Any:
        """Return the silos' replies to a question about a site at draws of the posterior."""
        run = self.run_behind
        if run._fit.built.protected:  # by noise, which these sums would not have
            raise ModelError(run._fit.built.protected)
        sampler, z_G = self.sampler, self.unconstrained(key, num_draws)
        fit = run._fit
        at_rows = SiteAtRows(fit.model, settings["site"], settings.get("changes", {}))
        settings = {**settings, **sampler.settings, "num_draws": num_draws, "shape": at_rows.shape}
        words = json.dumps(settings)
        little = num_draws * sum(n for _, n in fit.plan.total) <= FEW_TERMS
        exchange = fit.cached(
            (question.name, words),
            lambda: question.exchange(fit.built, json.loads(words), little=little),
        )
        down = GlobalDraws.of(fit.guide, run.shared, jnp.asarray(z_G))
        return run.ask_once(exchange, down, key, NOT_FINITE)


@dataclass(frozen=True, eq=False)
class Average:
    """Draws of an average over the rows of all silos; it prints as a mean with an interval.

    ``numpy.asarray`` of it are the draws, so that differences and ratios of two averages with the
    same key are those of the same draws of the latents.

    Attributes
    ----------
    draws : array (n, ...)
        Draws of the average; with groups (n, groups, ...).
    rows : array () or (groups,)
        The number of rows behind it.
    names : tuple of str
        The groups, such as the silos; empty without groups.
    """

    draws: np.ndarray
    rows: np.ndarray
    names: tuple[str, ...] = ()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.draws, dtype=dtype)

    def __str__(self) -> str:
        if self.names:
            parts = zip(self.names, np.moveaxis(self.draws, 1, 0), self.rows, strict=True)
            return "\n".join(f"{name}: {Average(draws, rows)}" for name, draws, rows in parts)
        low, high = np.quantile(self.draws, [0.05, 0.95], axis=0)
        numbers = zip(*(np.ravel(a) for a in (self.draws.mean(0), low, high)), strict=True)
        words = [f"{m:.4g} (90 % interval {a:.4g} to {b:.4g})" for m, a, b in numbers]
        return f"{', '.join(words)}, over {self.rows:.0f} rows"

    __repr__ = __str__


class RowTotals(NamedTuple):
    """A silo's reply: sums of a site (n, groups, ...), rows (groups,), and rows in no group ()."""

    totals: Array
    rows: Array
    left_out: Array


def row_totals(
    at_rows: SiteAtRows,
    settings: Mapping[str, Any],
    data: SiloData,
    values_at: Callable[[Any], Array],
    draws: Any,
) -> RowTotals:
    """Return a silo's sums of a site that is ``values_at(draw)`` (rows, ...) at each draw."""
    n, by, number = settings["num_draws"], settings["by"], max(settings["num_groups"], 1)
    rows = at_rows.model.sizes(data)[at_rows.plate]
    counts = data.masked(at_rows.plate, jnp.ones(rows))[:, None]
    whole = counts.sum()
    if by:
        counts = counts * jax.nn.one_hot(data.arrays[by], number, dtype=counts.dtype)

    def at(draw: Any) -> Array:
        values = values_at(draw)
        flat = values.reshape(len(values), -1)
        # What does not count may be no number.
        flat = jnp.where(counts.any(1)[:, None], flat, 0.0)
        return (counts.T @ flat).reshape(number, *values.shape[1:])

    size = max(1, min(n, ROWS_AT_ONCE // max(rows, 1)))
    return RowTotals(map_in_batches(at, draws, size), counts.sum(0), whole - counts.sum())


def average_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos tell sums of a site over their rows."""
    fm, n = built.model, settings["num_draws"]
    at_rows = SiteAtRows(fm, settings["site"], settings["changes"])
    sampler, number = built.sampler(settings), max(settings["num_groups"], 1)

    def silo(key: Array, down: GlobalDraws, state: object, data: SiloData) -> RowTotals:
        given = at_draws(built.algorithm, down, state, data)

        def values_at(draw: tuple[Array, Array, Array]) -> Array:
            i, z_G, u = draw
            return at_rows.at(sampler, fold_in(key, i), with_globals(given, z_G, u), data)

        draws = jnp.arange(n), down.z_G, given.coordinates.u
        return row_totals(at_rows, settings, data, values_at, draws)

    def messages() -> tuple[GlobalDraws, RowTotals]:
        down = shape_of_draws(built.guide, built.algorithm, (n, fm.dim))
        return down, RowTotals(shape(n, number, *settings["shape"]), shape(number), shape())

    return sum_exchange(AVERAGE, silo, messages, settings, little=little)


class SumOverRows(NamedTuple):
    """A question whose answer is a sum over rows: its exchange, and what a silo computes in it.

    ``of_silo(at_rows, settings, data, values_at, draws)`` is the reply of a silo at draws, where a
    site has the values ``values_at(draw)`` (rows, ...).
    """

    name: str
    exchange: Callable[..., Exchange[Any, Any, Any]]
    of_silo: Callable[..., Any]


AVERAGES = SumOverRows(AVERAGE, average_exchange, row_totals)
CALIBRATIONS = SumOverRows(CALIBRATION, calibration_exchange, predicted_rows)
