"""The draws of NUTS from the joint posterior of all silos, and the data behind them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_fed.after.arviz import (
    LOG_LIKELIHOOD,
    POSTERIOR,
    Coords,
    Dims,
    Labels,
    Named,
    chains_to_arviz,
    groups_to_arviz,
)
from numpyro_fed.after.own_rows import (
    SiloAtDraws,
    WhichSilo,
    chosen_silos,
    outcomes_and_rows,
    parameters_of,
    silo_number,
    values_at,
)
from numpyro_fed.after.predict import SEEN, compiled
from numpyro_fed.after.predict import Draws as Values
from numpyro_fed.basics.errors import DataError, ModelError, optional, positive_int
from numpyro_fed.basics.programs import TRACING, in_precision_of_object
from numpyro_fed.basics.trees import EntryNames
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.accurate_densities import log_prob
from numpyro_fed.posterior.averages import SumOverRows
from numpyro_fed.posterior.leave_out import MAX_K, Loo, RowsOfSilo, RowSums
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.site_at_rows import SiteAtRows
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.rounds.states import Shared
from numpyro_fed.text.handlers import local_name
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts
from numpyro_fed.text.row_checks import refuse_parameters_of_rows
from numpyro_fed.weigh.log_likelihoods import plates_of_rows

Draws = TypeVar("Draws", np.ndarray, Array)
Made = TypeVar("Made")

ROWS = "rows"

# Largest split R-hat of chains that agree. The usual bounds are 1.01 and 1.1 (Vehtari et al. 2021;
# Gelman, Rubin 1992). The error below is the stricter test of chains that agree.
MAX_RHAT = 1.05
# Largest standard error of a mean or sd, in posterior sds: that of 400 effective draws.
MAX_ERROR = 0.05
# Largest share of divergent transitions. Single ones occur in sound runs; one in 200 and more show
# a region that the chains do not enter.
MAX_DIVERGENT = 0.005
# A spread below this share of the mean is rounding: such elements are constants, as the first row
# of a Cholesky factor is.
ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class PooledRun:
    """A pooled run as questions after a fit ask for it: model, data, parameters, programs.

    ``z_G`` (n, dim) are the draws of the globals, unconstrained, chains joined.
    """

    model: FederatedModel
    facts: Facts
    double: bool
    _silos: Silos
    shared: Shared
    private: Sequence[dict[str, Any]]
    z_G: np.ndarray
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    mark: None = None  # no silo is in another process

    @property
    def _fit(self) -> PooledRun:
        return self

    def cached(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return the object of this name, made at its first use."""
        if name not in self.compiled:
            self.compiled[name] = make()
        made: Made = self.compiled[name]
        return made

    @property
    def num_silos(self) -> int:
        """Return the number of silos."""
        return len(self._silos.data)

    def _hosted(self, silo: int) -> Silos:
        return self._silos

    def silo_params(self, silo: int | str) -> dict[str, Any]:
        """Return a silo's private parameters on their supports."""
        silo = silo_number(silo, self)
        self._silos.place(silo)
        return self._fit.model.constrain_theta(self.private[silo])


@dataclass(frozen=True, eq=False)
class NutsResult(Posterior):
    """The draws of NUTS from the joint posterior of all silos.

    Attributes
    ----------
    globals : dict of str to array (num_chains, num_samples, ...)
        Global latent and deterministic sites on their own supports.
    divergences : int
        Divergent transitions after warm-up.
    """

    globals: dict[str, np.ndarray] = field(repr=False)
    divergences: int
    _locals: Callable[[], dict[str, np.ndarray]] = field(repr=False)
    _rounded: str = field(default="", repr=False)  # why the precision does not hold the posterior
    _run: PooledRun | None = field(default=None, repr=False)
    _in_order: bool = field(default=False, repr=False)  # draws are all of them, for any key
    shows_progress: bool = field(default=True, repr=False)  # of calls that take long

    @property
    def run_behind(self) -> PooledRun:
        """Return the data and parameters of the run."""
        if self._run is None:
            raise DataError("these draws have no data with them.")
        return self._run

    @property
    def entry_names(self) -> EntryNames:
        """Return the names that the text gives to entries of latents; none without a model."""
        return {} if self._run is None else super().entry_names

    @property
    def correction(self) -> str:
        """Return why there are no weighted draws."""
        return "NUTS keeps no log likelihoods of silos: ask a fit of nf.fit for it"

    @property
    def verdict(self) -> str:
        """Return in words whether these draws can be trusted."""
        return self.report()

    @property
    def sampler(self) -> Sampler:
        """Refuse to draw locals given globals, since NUTS has drawn both together."""
        raise DataError("NUTS has drawn all latents: sample_posterior(key, n, silo=...) has them.")

    def saved_words(self, draws: int | None) -> SavedWords:
        """Refuse to save, which ArviZ does."""
        raise DataError("draws of NUTS are kept by ArviZ: to_arviz().to_netcdf(path).")

    def loo(self) -> Loo:
        r"""Return how well all other rows predict each row, by ArviZ's PSIS-LOO of these draws.

        Rows are those of :meth:`Posterior.loo`, with which :func:`numpyro_fed.compare_models`
        compares them. The likelihood of a row is that given all latents, its own included, where
        a fit integrates these out: both estimate the same densities, and tails are heavier here
        where rows have latents.

        Returns
        -------
        Loo
            With ``.elpd``, ``.se``, ``.num_bad``, and ``.silos`` row by row. Computed once.

        Raises
        ------
        ModelError
            If silos or rows have parameters of their own, which were fitted to the very rows.
        MissingExtraError
            If ArviZ is not installed.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 2), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(y=rng.normal(3, 2, 20)) for _ in range(3)]
        >>> nuts = nf.run_nuts(jax.random.key(0), model, silos, num_warmup=200, num_samples=400,
        ...                    progress_bar=False)
        >>> table = nuts.loo()
        >>> table.num_rows, table.num_bad, round(table.p_loo)
        (60, 0, 1)
        """
        return self._rows_left_out

    @cached_property
    @in_precision_of_object
    def _rows_left_out(self) -> Loo:
        arviz, run = optional("arviz"), self.run_behind
        effective = [float(np.nanmin(e)) for e in self.ess().values() if np.isfinite(e).any()]
        refuse_parameters_of_rows(run._fit.model)
        by_silo = self._log_likelihoods(self.samples)
        values = [np.concatenate(list(by_plate.values()), 1) for by_plate in by_silo]
        joined = np.concatenate(values, 1)
        draws = self.sites_of(None) or {ROWS: np.zeros(len(joined))}
        posterior = {k: Named(v) for k, v in draws.items()}
        groups = {POSTERIOR: posterior, LOG_LIKELIHOOD: {"y": Named(joined, (ROWS,))}}
        data = chains_to_arviz(groups, num_chains=self.num_chains)
        with warnings.catch_warnings():
            # Of k-hats above 0.7, which the table counts.
            warnings.simplefilter("ignore", UserWarning)
            found = arviz.loo(data, pointwise=True, reff=None if self.globals else 1.0)
        early = arviz.__version__.startswith("0.")
        density = np.asarray(found["loo_i"] if early else found["elpd_i"], np.float64)
        k = np.asarray(found["pareto_k"], np.float64)
        p_loo = float(found["p_loo"] if early else found["p"])
        ends = np.cumsum([v.shape[1] for v in values])[:-1]
        parts = (np.split(a, ends) for a in (density, k))
        silos = tuple(RowsOfSilo(*part) for part in zip(*parts, strict=True))
        total, bad = density.sum(), (~(k <= MAX_K)).sum()
        sums = total, (density**2).sum(), total + p_loo, bad, len(k)
        worth = int(min([self.num_draws, *effective]))
        return Loo.of(RowSums(*map(jnp.asarray, sums)), worth, 0, silos)

    def _log_likelihoods(self, samples: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return log likelihoods {plate: (n, rows)} of silos' rows with an outcome."""
        run, fm = self.run_behind, self.run_behind._fit.model
        plates = plates_of_rows(fm)
        sites = [s for s in fm.sites if s.kind in ("observed", "factor") and s.plate in plates]

        def at(key: Array, values: Values, data: SiloData) -> dict[str, Array]:
            text = handlers.seed(handlers.substitute(fm.text, data=dict(values)), key)
            with TRACING, handlers.block():
                trace = handlers.trace(text).get_trace(**data.kwargs)
            sizes = fm.sizes(data)
            found = {plate: jnp.zeros(sizes[plate]) for plate in plates}
            if fm.discrete:  # a row's likelihood is the sum over their values
                return found | fm.outcome_terms(values, trace, data)
            for s in sites:
                frames = {f.name: f.dim for f in trace[s.name]["cond_indep_stack"]}
                plate = str(s.plate)
                rows = jnp.moveaxis(log_prob(trace[s.name]), frames[plate], 0)
                found[plate] += rows.reshape(len(rows), -1).sum(1)
            return found

        programs = run._fit.cached(ROWS, lambda: compiled(at))
        at_draws = self._at_silos(jax.random.key(0), samples)
        plate_of = {SEEN + s.name: s.plate for s in fm.sites if s.kind == "observed"}
        values = []
        parts = values_at(run, programs, at_draws)
        outcomes = outcomes_and_rows(run, range(run.num_silos))
        for rows, seen_at in zip(parts, outcomes, strict=True):
            kept = {}
            for plate in plates:
                seen = [seen_at[name] for name, p in plate_of.items() if p == plate]
                terms = np.asarray(rows[plate])
                kept[plate] = terms[:, np.any(seen, 0)] if seen else terms
            values.append(kept)
        return values

    def _at_silos(self, key: Array, samples: Mapping[str, np.ndarray]) -> list[SiloAtDraws]:
        """Return all silos at some of the draws of all latents."""
        run, fm = self.run_behind, self.run_behind._fit.model
        shared: dict[str, Any] = {s.name: samples[s.name] for s in fm.named("latent")}
        local = [s.name for s in fm.sites if s.is_local_latent]
        found = []
        for j in range(run.num_silos):
            latents = shared | {name: samples[local_name(j, name)] for name in local}
            found.append(SiloAtDraws(j, jax.random.fold_in(key, j), parameters_of(run, j), latents))
        return found

    def _asked(
        self, key: Array, num_draws: int, question: SumOverRows, settings: Mapping[str, Any]
    ) -> Any:
        """Return the sums over rows at ``sample_posterior(key, num_draws)``, all latents drawn."""
        run, places = self.run_behind, self._places(key, num_draws)
        at_rows = SiteAtRows(run.model, settings["site"], settings.get("changes", {}))
        settings = {**settings, "num_draws": num_draws, "shape": at_rows.shape}

        @jax.jit
        def of_silo(key: Array, theta: Values, latents: Values, data: SiloData) -> Any:
            def values_at(draw: tuple[Array, Values]) -> Array:
                i, values = draw
                return at_rows.of_text(jax.random.fold_in(key, i), {**theta, **values}, data)

            draws = jnp.arange(num_draws), dict(latents)
            return question.of_silo(at_rows, settings, data, values_at, draws)

        replies = [
            of_silo(at.key, at.theta, at.latents, run._silos.data[at.silo])
            for at in self._at_silos(key, {k: v[places] for k, v in self.samples.items()})
        ]
        combine = np.stack if settings.get("by_silo") else partial(np.sum, axis=0)
        return jax.tree.map(lambda *a: combine([np.asarray(x) for x in a]), *replies)

    @property
    def silos(self) -> Any:
        """Refuse to tell the influence of silos, which is known of fits alone."""
        raise ModelError(f"the influence of silos is not known: {self.correction}.")

    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Return ``n`` of the draws at random; each once, as long as there are enough of them.

        With ``silo`` also that silo's latents, or those of several silos side by side, as
        :meth:`Result.sample_posterior` has them.
        """
        positive_int("n", n)
        index = self._places(key, n)
        return {name: jnp.asarray(value)[index] for name, value in self.sites_of(silo).items()}

    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the unconstrained globals (n, dim) behind ``sample_posterior(key, n)``."""
        return jnp.asarray(self.run_behind.z_G)[self._places(key, n)]

    def sites_of(self, silo: WhichSilo | None) -> dict[str, np.ndarray]:
        """Return all draws, chains joined, of the globals and of latents of silos, as asked for."""
        joined = {k: join_chains(v) for k, v in self.globals.items()}
        if silo is None:
            return joined
        run = self.run_behind
        silos, samples = chosen_silos(silo, run), self.samples
        for j in silos:
            run._silos.place(j)
        for s in run._fit.model.sites:
            if s.is_local_latent:
                parts = [samples[local_name(j, s.name)] for j in silos]
                joined[s.name] = np.concatenate(parts, 1 + (s.axis or 0))
        return joined

    @property
    def num_draws(self) -> int:
        """Return the number of draws of all chains."""
        return self._transitions or len(next(iter(self.samples.values()), ()))

    def _places(self, key: Array, n: int) -> np.ndarray | slice:
        """Return the places of ``n`` draws at random, or of all."""
        if self._in_order:
            return slice(None)
        total = self.num_draws
        return np.asarray(jax.random.choice(key, total, (n,), replace=n > total))

    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        silo: WhichSilo | None = None,
        groups: Sequence[str] | str = (),
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return the draws as an ArviZ object, with their chains; with ``silo``, ``num_samples``.

        Needs the extra ``examples``.

        Parameters
        ----------
        key : jax.Array, optional
        num_samples : int
            The number of draws with ``silo``, at random and in one chain; else there are all.
        silo : int, list of int, or "all", optional
            As in :meth:`sample_posterior`.
        groups, coords, dims : optional
            Further groups, and names, as :meth:`Posterior.to_arviz` has them. The log likelihoods
            of rows are those at all latents, as in :meth:`loo`.
        """
        return groups_to_arviz(
            replace(self, _in_order=silo is None),
            key,
            self.num_draws if silo is None else num_samples,
            silo=silo,
            groups=groups,
            labels=Labels.of(coords, dims),
            num_chains=self.num_chains if silo is None else 1,
        )

    def log_likelihoods(self, key: Array, n: int) -> list[dict[str, np.ndarray]]:
        """Return log likelihoods {plate: (n, rows)} of silos at ``sample_posterior(key, n)``.

        They are those at all latents.
        """
        places = self._places(key, n)
        return self._log_likelihoods({k: v[places] for k, v in self.samples.items()})

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        """Return all sites on their supports, chains joined; ``b`` of silo j is ``silo_{j}/b``."""
        return self.sites_of(None) | self._locals()

    @cached_property
    def monte_carlo_error(self) -> float:
        """Return the largest standard error of a global's mean or sd, in posterior sds.

        It is computed from the effective draws of each element and of its squared deviation, and of
        the logs of elements that are positive in all draws. It is infinite if chains do not agree
        (split R-hat above 1.05), and if draws are useless: if some are NaN, all are equal, every
        transition diverged, or an sd is a few gaps between floating-point numbers.
        """
        exact = [np.asarray(v, np.float64) for v in self.globals.values()]
        still = [(v.std((0, 1)) <= ROUNDING * abs(v.mean((0, 1)))).all() for v in exact]
        no_number = any(np.isnan(v).any() for v in exact)
        all_diverge = self.divergences >= self._transitions > 0
        if self._rounded or (exact and (all_diverge or no_number or all(still))):
            return float(np.inf)
        worst = 0.0
        for draws in self.globals.values():
            flat = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
            # A scale shows only in its log whether the chains know the neck of a funnel: near zero
            # its own values hardly differ.
            positive = (flat > 0).all((0, 1))
            flat = np.concatenate([flat, np.log(flat[..., positive])], -1)
            mean, sd = flat.mean((0, 1)), flat.std((0, 1))
            # (x**2 - 1) / 2 of a standardised x has the standard error of log sd.
            standard = ((flat - mean) / np.where(sd > 0, sd, 1))[..., sd > ROUNDING * abs(mean)]
            for values in (standard, (standard**2 - 1) / 2):
                if not values.size:
                    continue
                ess, rhat = effective_sample_size(values), split_gelman_rubin(values)
                error = values.std((0, 1)) / np.sqrt(ess)
                worst = max(worst, np.where(rhat <= MAX_RHAT, error, np.inf).max())
        return float(worst)

    @property
    def _transitions(self) -> int:
        """Return the number of transitions after warm-up, of all chains; 0 without globals."""
        return math.prod(next(iter(self.globals.values())).shape[:2]) if self.globals else 0

    @property
    def num_chains(self) -> int:
        """Return the number of chains."""
        return len(next(iter(self.globals.values()))) if self.globals else 1

    @property
    def accurate(self) -> bool:
        """Return whether divergences are few and Monte Carlo errors small.

        The chains then know the mode that they are in; there may be others.
        """
        total = self._transitions or 1
        return self.divergences <= MAX_DIVERGENT * total and self.monte_carlo_error <= MAX_ERROR

    @property
    def trusted(self) -> bool:
        """Return whether these draws can serve as the reference.

        They can if they are :attr:`accurate` and come from at least two chains, which agree. A
        single chain that stays in one of several modes looks accurate.
        """
        return self.accurate and self.num_chains > 1

    def report(self) -> str:
        """Say in words whether these draws can be trusted."""
        error = self.monte_carlo_error
        if self.divergences >= self._transitions > 0:
            certainty = "that is every transition, so that the draws say nothing"
        elif self._rounded:
            certainty = self._rounded
        elif np.isinf(error):
            certainty = "the chains do not agree (or stand still): run more of them, and longer"
        else:
            certainty = f"means and sds of the globals are known to {error:.2g} sd"
        verdict = "They can be trusted."
        if self.accurate and not self.trusted:
            verdict = (
                "They can be trusted as far as one chain can tell; num_chains=2 or more would show "
                "whether there are other modes."
            )
        elif not self.accurate:
            verdict = (
                f"They are no reference (at most {MAX_ERROR} sd and {MAX_DIVERGENT:.1%} divergent "
                "transitions are): take more num_samples, a higher target_accept_prob, or "
                "another form of the model."
            )
        return f"{self.divergences} divergent transitions; {certainty}. {verdict}"

    def ess(self) -> dict[str, np.ndarray]:
        """Return the effective sample size of each element of global sites; NaN for constants."""
        with np.errstate(invalid="ignore"):
            return {k: np.asarray(effective_sample_size(v)) for k, v in self.globals.items()}


def join_chains(draws: Draws) -> Draws:
    """Return draws (chains, n, ...) with the chains one after the other."""
    return draws.reshape(draws.shape[0] * draws.shape[1], *draws.shape[2:])
