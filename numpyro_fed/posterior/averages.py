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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.random import fold_in
from numpyro import handlers

from numpyro_fed.after.predict import mean_of
from numpyro_fed.after.questions import Questions
from numpyro_fed.basics.errors import DataError, ModelError, is_number, optional, positive_int
from numpyro_fed.basics.programs import TRACING, in_precision_of_object, map_in_batches
from numpyro_fed.data.padding import arrays_with_rows
from numpyro_fed.data.silo_data import SiloData, names_or_numbers
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.guides.silo_bounds import AtDraw
from numpyro_fed.posterior.built import FEW_TERMS, Built
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.rounds.exchange import Combine, Exchange, key_as_noise
from numpyro_fed.rounds.names import AVERAGE, CALIBRATION
from numpyro_fed.rounds.progress import shows
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.search.expand import shape
from numpyro_fed.text.handlers import OBSERVED, UNOBSERVED, without_outcomes
from numpyro_fed.text.log_density import FederatedModel, outcomes_at
from numpyro_fed.text.plan import Facts
from numpyro_fed.text.silo_plate import silo_plate_of
from numpyro_fed.text.trace import ARRAY, VALUE
from numpyro_fed.text.trace import OBSERVED as OBSERVED_VALUE
from numpyro_fed.weigh.log_likelihoods import at_draws, shape_of_draws, with_globals

NOT_FINITE = "the averages are not finite at {}."
ROWS_AT_ONCE = 2**21  # draws x rows of a silo that are computed side by side
# Outcomes are counted by their predicted log odds, in so many bins from -LIMIT to LIMIT.
LIMIT, NUM_BINS = 10.0, 400


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
        patients, standardised over their covariates (the g-formula); with a time, the share that
        survives it.

        Parameters
        ----------
        key : jax.Array
            Draws of all latents are the same for the same key.
        site : str
            A ``numpyro.deterministic`` in the silo plate, or an outcome, of which it is the mean.
        changes : dict, optional
            Arguments of the model that become one number at all rows, ``{"treated": 1.0}``; of a
            matrix a column, by its number or name: ``{"x": {"treated": 1.0}}``.
        by : str, optional
            An argument of whole numbers from 0 on, which groups the rows.
        num_groups : int
            How many groups there are, over all silos; only with ``by``.
        num_draws : int

        Returns
        -------
        Average
            Draws ``(num_draws, *shape)`` of the average, or ``(num_draws, num_groups, *shape)``,
            where ``shape`` is that of the site at one row; ``numpy.asarray`` of it has the draws.

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
        >>> treated, not_treated = (
        ...     np.asarray(fitted.average(jax.random.key(1), "p", {"t": t})) for t in (1, 0)
        ... )
        >>> bool(0.2 < (treated - not_treated).mean() < 0.5)
        True
        """
        self._warn_of_doubt()
        positive_int("num_draws", num_draws)
        fit = self.run_behind._fit
        checked_site(fit.model, site, ("deterministic", "observed"))
        if by is not None and by not in {a.name for a in fit.facts.arguments if a.dtype[0] in "iu"}:
            raise DataError(f"by='{by}' is no argument of whole numbers that all silos have.")
        plates = {a.name: a.plates for a in fit.facts.arguments}
        own = next(s.plate for s in fit.model.sites if s.name == site)
        if by is not None and own not in plates[by]:
            raise DataError(f"by='{by}' groups rows of {plates[by]}, and '{site}' is of '{own}'.")
        if (by is None) != (num_groups == 0) or num_groups < 0:
            raise ValueError(f"by={by!r}, num_groups={num_groups}: pass both, or none of them.")
        changed = checked_changes(fit.facts, changes or {})
        settings = {"site": site, "changes": changed, "by": by, "num_groups": int(num_groups)}
        up: RowTotals = self._asked(key, num_draws, AVERAGE, average_exchange, settings)
        rows = np.asarray(up.rows, float)
        if float(up.left_out):
            raise DataError(
                f"by='{by}': {float(up.left_out):.0f} rows have codes beyond 0 to {num_groups - 1}."
            )
        if not rows.all():
            where = f"by='{by}': the groups {np.flatnonzero(rows == 0).tolist()} have"
            raise DataError(f"{where if by else 'the silos have'} no rows to average over.")
        draws = np.asarray(up.totals, float) / rows.reshape(-1, *[1] * (up.totals.ndim - 2))
        return Average(draws if by else draws[:, 0], rows if by else rows[0])

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
            Whether to tell silos apart, which secure sums cannot.
        min_count : int
            The least number of rows of a bin: a bin of fewer joins the next one at its silo. A silo
            in another process answers for the ``min_count`` of its policy alone: answers for two of
            them would differ by single rows.
        num_draws : int

        Returns
        -------
        Calibration
            A table that prints, by groups of rows in the order of what was predicted, with
            ``.auc`` over pairs of rows of one silo.

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
        up: Predicted = self._asked(key, num_draws, CALIBRATION, calibration_exchange, settings)
        rows = np.asarray(up.rows, float).reshape(-1, 2, NUM_BINS)
        sums = np.asarray(up.probabilities, float).reshape(-1, NUM_BINS)
        names = names_or_numbers(run._silos.names, run.num_silos) if by_silo else ()
        return Calibration(rows, sums, np.asarray(up.pairs, float).reshape(-1, 2), names)

    def _asked(
        self,
        key: Array,
        num_draws: int,
        name: str,
        build: Callable[..., Exchange[Any, Any, Any]],
        settings: Mapping[str, Any],
    ) -> Any:
        """Return the silos' replies to a question about a site at draws of the posterior."""
        run = self.run_behind
        if run._fit.built.protected:  # by noise, which these sums would not have
            raise ModelError(run._fit.built.protected)
        sampler, z_G = self.sampler, self.unconstrained(key, num_draws)
        fit, site, changes = run._fit, settings["site"], settings.get("changes", {})
        at_rows = SiteAtRows(fit.built, sampler, site, changes)
        of_text = partial(at_rows.of_text, jax.random.key(0), {})
        own = jax.eval_shape(of_text, fit.model.silo).shape[1:]
        settings = {**settings, **sampler.settings, "num_draws": num_draws, "shape": own}
        words = json.dumps(settings)
        little = num_draws * sum(n for _, n in fit.plan.total) <= FEW_TERMS
        exchange = fit.cached(
            (name, words), lambda: build(fit.built, json.loads(words), little=little)
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
    """

    draws: np.ndarray
    rows: np.ndarray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.draws, dtype=dtype)

    def __str__(self) -> str:
        low, high = np.quantile(self.draws, [0.05, 0.95], axis=0)
        numbers = zip(*(np.ravel(a) for a in (self.draws.mean(0), low, high)), strict=True)
        words = [f"{m:.4g} (90 % interval {a:.4g} to {b:.4g})" for m, a, b in numbers]
        return f"{', '.join(words)}, over {np.sum(self.rows):.0f} rows"

    __repr__ = __str__


class RowTotals(NamedTuple):
    """A silo's reply: sums of a site (n, groups, ...), rows (groups,), and rows in no group ()."""

    totals: Array
    rows: Array
    left_out: Array


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


@dataclass(frozen=True, eq=False)
class SiteAtRows:
    """The values of a text's site at the rows of a silo, some arguments of which are changed.

    ``changes`` {argument: number, or {column: number}} are made at all rows.
    """

    built: Built
    sampler: Sampler
    site: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def at(self, key: Array, given: AtDraw, data: SiloData) -> Array:
        """Return the values (rows, ...) at one draw of the globals; of an outcome its means."""
        fm, theta = self.built.model, given.theta
        z_L = fm.zero_latents(data) | self.sampler.bound.sample(key, given)
        sites = fm.constrain_global(theta, given.z_G)
        sites |= fm.constrain_local(theta, given.z_G, z_L, data, fold_in(key, 3))
        drawn = {s.name for s in fm.sites if s.kind in ("latent", "discrete")}
        values = fm.constrain_theta(theta) | {n: v for n, v in sites.items() if n in drawn}
        return self.of_text(key, values, data)

    def of_text(self, key: Array, values: Mapping[str, Array], data: SiloData) -> Array:
        """Return them at these values of latents and parameters; others are drawn by the key."""
        fm, changed = self.built.model, replace(data, arrays=self._changed(data.arrays))
        # Other outcomes are as they are, a covariate that the text models among them.
        kept = [s.name for s in fm.sites if s.kind == "observed" and s.name != self.site]

        def run(values: Mapping[str, Array]) -> dict[str, Any]:
            text = handlers.substitute(without_outcomes(fm.text, kept), data=dict(values))
            with TRACING, handlers.block():
                found: dict[str, Any] = handlers.trace(handlers.seed(text, key)).get_trace(
                    **changed.kwargs
                )
            return found

        trace = run(values)
        if overwritten := self._overwritten(data):
            observed = {n: trace[n.removesuffix(UNOBSERVED) + OBSERVED] for n in overwritten}
            trace = run({**values, **{n: site["value"] for n, site in observed.items()}})
        site = trace[self.site]
        value = mean_of(site) if site["type"] == "sample" else jnp.asarray(site["value"])
        return jnp.moveaxis(value, self._axis(site, value, data), 0)

    def _overwritten(self, data: SiloData) -> list[str]:
        """Return the latents of missing covariates (``obs_mask``) that a change decides over."""
        trace = self.built.model.traces.at(data)
        covariates = (name.removesuffix(OBSERVED) for name in self.built.model.covariates)
        return [
            name + UNOBSERVED
            for name in covariates
            if trace.reads((OBSERVED_VALUE, name + OBSERVED), ARRAY) & {*self.changes}
        ]

    @property
    def plate(self) -> str:
        """Return the silo plate of the site."""
        return next(str(s.plate) for s in self.built.model.sites if s.name == self.site)

    def _axis(self, site: Mapping[str, Any], value: Array, data: SiloData) -> int:
        """Return the axis of a value along which rows are."""
        dim = next(f.dim for f in site["cond_indep_stack"] if f.name == silo_plate_of(dict(site)))
        if site["type"] == "sample":
            return value.ndim - site["fn"].event_dim + dim
        sizes = self.built.model.sizes(data)
        trace, rows = self.built.model.traces.at(data), arrays_with_rows([data], [sizes])
        own = [name for name, plate in rows.items() if plate == self.plate]
        axis = trace.axis_of_rows((VALUE, self.site), self.plate, own)
        if axis is not None:
            return axis
        number = sizes[self.plate]
        axes = [value.ndim + dim, *range(value.ndim)]
        found = [i for i in axes if i >= 0 and value.shape[i] == number]
        if not found:
            raise ModelError(
                f"the site '{self.site}' has the shape {value.shape}, and no axis for the {number} "
                f"rows of silo_plate '{self.plate}', over which it could be averaged."
            )
        return found[0]

    def _changed(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        found = dict(arrays)
        for name, change in self.changes.items():
            old = found[name]
            if isinstance(change, Mapping):
                for column, number in change.items():
                    old = _as(old, number).at[:, int(column)].set(number)
                found[name] = old
            else:
                found[name] = jnp.full_like(_as(old, change), change)
        return found


def _as(array: Array, number: float) -> Array:
    """Return an array in a dtype that holds a number."""
    whole = float(number).is_integer()
    return array if whole or array.dtype.kind == "f" else array.astype(jnp.result_type(float))


def average_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos tell sums of a site over their rows."""
    fm, n, by = built.model, settings["num_draws"], settings["by"]
    at_rows = SiteAtRows(built, built.sampler(settings), settings["site"], settings["changes"])
    number = max(settings["num_groups"], 1)

    def silo(key: Array, down: GlobalDraws, state: object, data: SiloData) -> RowTotals:
        given = at_draws(built.algorithm, down, state, data)
        rows = fm.sizes(data)[at_rows.plate]
        counts = data.masked(at_rows.plate, jnp.ones(rows))[:, None]
        whole = counts.sum()
        if by:
            counts = counts * jax.nn.one_hot(data.arrays[by], number, dtype=counts.dtype)

        def at(draw: tuple[Array, Array, Array]) -> Array:
            i, z_G, u = draw
            values = at_rows.at(fold_in(key, i), with_globals(given, z_G, u), data)
            flat = values.reshape(len(values), -1)
            # What does not count may be no number.
            flat = jnp.where(counts.any(1)[:, None], flat, 0.0)
            return (counts.T @ flat).reshape(number, *values.shape[1:])

        draws = jnp.arange(n), down.z_G, given.coordinates.u
        size = max(1, min(n, ROWS_AT_ONCE // max(rows, 1)))
        return RowTotals(map_in_batches(at, draws, size), counts.sum(0), whole - counts.sum())

    def messages() -> tuple[GlobalDraws, RowTotals]:
        down = shape_of_draws(built.guide, built.algorithm, (n, fm.dim))
        return down, RowTotals(shape(n, number, *settings["shape"]), shape(number), shape())

    return _exchange(AVERAGE, silo, messages, settings, little=little)


def calibration_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos count their outcomes by probability, by bins."""
    fm, n, name = built.model, settings["num_draws"], settings["site"]
    at_rows = SiteAtRows(built, built.sampler(settings), name)

    def silo(key: Array, down: GlobalDraws, state: object, data: SiloData) -> Predicted:
        given = at_draws(built.algorithm, down, state, data)

        def add(total: Array, draw: tuple[Array, Array, Array]) -> tuple[Array, None]:
            i, z_G, u = draw
            return total + at_rows.at(fold_in(key, i), with_globals(given, z_G, u), data), None

        rows = fm.sizes(data)[at_rows.plate]
        draws = jnp.arange(n), down.z_G, given.coordinates.u
        outcome = outcomes_at(fm, data)[name]
        start = jnp.zeros((rows, *settings["shape"]))
        p = jax.lax.scan(add, start, draws)[0].ravel() / n
        axis = outcome.axes.index(at_rows.plate)
        y, elements = (jnp.moveaxis(a, axis, 0) for a in (outcome.value, outcome.elements))
        real = data.masked(at_rows.plate, jnp.ones(rows)) > 0
        counts = elements & real.reshape(-1, *[1] * (y.ndim - 1))
        # So many rows, of which each may have several outcomes.
        least = settings["min_count"] * max(1, y.size // max(rows, 1))
        return binned(p, y.ravel(), counts.ravel(), least)

    def messages() -> tuple[GlobalDraws, Predicted]:
        down = shape_of_draws(built.guide, built.algorithm, (n, fm.dim))
        return down, Predicted(shape(2, NUM_BINS), shape(NUM_BINS), shape(2))

    return _exchange(CALIBRATION, silo, messages, settings, little=little)


def _exchange(
    name: str,
    silo: Callable[[Array, GlobalDraws, Any, SiloData], Any],
    messages: Callable[[], tuple[Any, Any]],
    settings: Mapping[str, Any],
    *,
    little: bool,
) -> Exchange[Any, Any, Any]:
    return StackedExchange(
        name,
        stacked_reply(silo, little=little),
        combine=Combine.GATHER if settings.get("by_silo") else Combine.SUM,
        silo_noise=key_as_noise,
        settings=json.dumps(dict(settings)),
        messages=messages,
    )


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
        """Return the table, a line for each group of about as many rows; of one silo if asked."""
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
                lines.append((number, sums[own].sum() / number, rows[1, own].sum() / number))
        return optional("pandas").DataFrame(lines, columns=["rows", "predicted", "observed"])

    def __str__(self) -> str:
        table = self.to_frame().round({"rows": 0, "predicted": 3, "observed": 3})
        of_silos = [
            f"{name} {higher / number:.3f}"
            for name, (higher, number) in zip(self.names, self.pairs, strict=False)
            if number
        ]
        more = f" ({', '.join(of_silos)})" if of_silos else ""
        return f"{table.to_string(index=False)}\nAUC {self.auc:.3f}{more}"

    __repr__ = __str__


def checked_changes(facts: Facts, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of arguments, columns by number; raise an error for what is not there."""
    arguments, columns = {a.name: a for a in facts.arguments}, dict(facts.columns)
    found: dict[str, Any] = {}
    for name, change in changes.items():
        if name not in arguments:
            raise DataError(
                f"changes: '{name}' is no array that all silos have. They have {[*arguments]}."
            )
        of_columns = change if isinstance(change, Mapping) else {None: change}
        known, width = columns.get(name, ()), arguments[name].shape[:1]
        numbers: dict[Any, float] = {}
        for column, number in of_columns.items():
            if not is_number(number):
                raise DataError(
                    f"changes: '{name}' becomes {number!r}, and must become one number at all rows."
                )
            place = known.index(column) if column in known else column
            if place is not None and not (width and place in range(width[0])):
                raise DataError(
                    f"changes: '{name}' has no column {column!r}. Its columns are "
                    f"{list(known) or list(range(*width)) if width else 'none: it is one column'}."
                )
            numbers[place] = float(number)
        found[name] = numbers.get(None, {str(place): v for place, v in numbers.items()})
    return found


def checked_site(fm: FederatedModel, name: str, kinds: Sequence[str]) -> None:
    """Raise an error for a site that is none of these kinds in a silo plate."""
    known = [s.name for s in fm.sites if s.kind in kinds and s.plate is not None]
    if name not in known:
        raise DataError(f"{name!r} is no site that rows have a value of: the model has {known}.")
