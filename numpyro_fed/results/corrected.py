"""A fit whose draws were weighed by the joint density of all silos, with what it rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.after.base import AfterFit
from numpyro_fed.after.run import WhichSilo
from numpyro_fed.after.sensitivity import (
    PriorSensitivity,
    elements,
    log_prior_on_supports,
    slopes,
)
from numpyro_fed.algorithms.importance.integration import Integration
from numpyro_fed.algorithms.importance.proposals import (
    NUM_PARTS,
    Mixture,
)
from numpyro_fed.errors import ModelError, NonFiniteError
from numpyro_fed.model.sites import Site
from numpyro_fed.precision import in_precision_of_object
from numpyro_fed.results.arviz import Coords, Dims, Labels
from numpyro_fed.results.at_silo import SendsDraws
from numpyro_fed.results.element_errors import ElementErrors
from numpyro_fed.results.groups import groups_to_arviz, log_likelihood
from numpyro_fed.results.influence import SiloTable, Whitened
from numpyro_fed.results.leave_out import LeaveOut, table_of
from numpyro_fed.results.loo import Loo, number_of_draws, rows_left_out
from numpyro_fed.results.mixture import mixture_at
from numpyro_fed.results.mode import OneCopy
from numpyro_fed.results.moments import Moments
from numpyro_fed.results.posterior import Posterior, posterior
from numpyro_fed.results.rounding import Rounding
from numpyro_fed.results.rows import Fit, Result
from numpyro_fed.results.saving import SavedWords
from numpyro_fed.results.weighted import (
    Weighted,
    systematic,
)
from numpyro_fed.runtime.noise import generator

# Draws where the posterior without a silo may be, an exchange of them, and the share of those that
# look beyond, as in nf.fit, which has compiled both.
MORE_DRAWS, WIDER = 4_000, 0.16
AT_ONCE = 4_000  # draws that are brought to their supports at a time
LEFT_OUT = 1_000  # effective draws that silos are left out of: densities are right to 0.03 nats
PREFIX = "correction/"  # of the names of its arrays in a file


class Pool(NamedTuple):
    """Draws from mixtures as they were weighed, to which further draws can be added.

    Attributes
    ----------
    z_G : (n, dim)
        The draws as they were weighed. Those of a correction have others in the place of draws
        without weight.
    log_joint : (n,)
        The log joint density of all silos at each draw, its locals integrated out.
    from_own : (n,) bool
        Whether a draw is from a mixture itself, and not from the wider parts around it.
    mixtures : tuple of Mixture
    wider : tuple of float
        The share of wider parts around each.
    numbers : tuple of int
        The number of draws that come from each of these and its wider parts.
    copy : OneCopy or None
        Where a density that repeats was weighed.
    """

    z_G: np.ndarray
    log_joint: np.ndarray
    from_own: np.ndarray
    mixtures: tuple[Mixture, ...]
    wider: tuple[float, ...]
    numbers: tuple[int, ...]
    copy: OneCopy | None = None

    @property
    def sources(self) -> list[tuple[Mixture, float]]:
        """Return each mixture with the share of its wider parts."""
        return list(zip(self.mixtures, self.wider, strict=True))


@dataclass(frozen=True, eq=False)
class Corrected(Weighted[Result], AfterFit, SendsDraws):
    """An importance-corrected fit of silos that hold rows.

    Attributes
    ----------
    log_evidence : float or None
        Estimate of ``log p(y)``; None under a loss, where there is none.
    ess : float
        Effective number of draws.
    pareto_k : float
        Shape of the weights' tail: the smaller the better (:attr:`Corrected.reliable`).
    weights : array (num_draws,)
        Smoothed weights, which sum to one.
    result : Result
        The fit that was corrected.
    z_G : array (num_draws, dim)
        The draws, unconstrained.
    num_exchanges : int
        Messages that each silo sent for it.
    integration : Integration
        How silos integrated their own latents.
    log_weights : array (num_draws,)
        The log weights before they were smoothed and normalised; of a loaded correction those that
        were.
    log_joint : array (num_draws,) or None
        The log joint density of all silos at each draw of any weight; None for a file of an earlier
        release.
    pool : Pool or None
        The draws as they were weighed, if they came from mixtures; None for the fit's guide.
    """

    z_G: np.ndarray = field(repr=False)
    _posterior: Posterior = field(repr=False)
    num_exchanges: int
    integration: Integration = field(repr=False)
    log_weights: np.ndarray = field(repr=False)
    log_joint: np.ndarray | None = field(default=None, repr=False)
    pool: Pool | None = field(default=None, repr=False)

    @property
    def run_behind(self) -> Result:
        """Return the fit that was corrected."""
        return self.result

    @property
    def sampler(self) -> Posterior:
        """Return the functions by which locals are drawn, from their density given the globals."""
        return self._posterior

    @property
    def doubt_of_all(self) -> str:
        """Return why the correction is not to be trusted."""
        return "" if self.trusted else str(self.doubt)

    @property
    def correction_behind(self) -> Corrected:
        """Return the correction itself."""
        return self

    @cached_property
    @in_precision_of_object
    def left_out(self) -> LeaveOut:
        """Return the table of :meth:`leave_out`, computed once."""
        table = self._left_out_by(self._number_left_out)
        try:
            return self._with_more_draws(table) if table.unknown else table
        # Silos need not tell their parabolas, or cannot: then some rows stay unknown.
        except (ModelError, NonFiniteError) as error:
            return replace(table, reason=str(error))

    @cached_property
    @in_precision_of_object
    def rows_left_out(self) -> Loo:
        """Return the table of :meth:`loo`, computed once."""
        key = random.fold_in(self._key, 4)
        z_G, log_weights = self._as_weighed
        n = number_of_draws(self.result)
        if n < len(log_weights):  # any of them: a resample would hide a heavy tail
            some = generator(key).permutation(len(log_weights))[:n]
            z_G, log_weights = z_G[some], log_weights[some]
        return rows_left_out(key, self.result, self.integration, z_G, log_weights)

    @cached_property
    @in_precision_of_object
    def prior_answers(self) -> PriorSensitivity:
        """Return the table of :meth:`prior_sensitivity`, computed once."""
        if self.log_joint is None:
            raise ModelError(
                "a file of an earlier release has no densities of its draws: fit anew."
            )
        fm, theta = self.result._fit.model, self.result.shared.theta
        chosen = systematic(random.fold_in(self._key, 5), self.weights, len(self.weights))
        z_G = self.z_G[chosen]
        names, values = elements(self._posterior.constrain_globals(theta, z_G))
        moves = (values != values[:1]).any(0)  # the diagonal of a correlation answers to nothing
        names, values = tuple(n for n, m in zip(names, moves, strict=True) if m), values[:, moves]
        whole = np.asarray(jax.vmap(fm.log_prior, (None, 0))(theta, z_G), np.float64)
        log_likelihood = self.log_joint[chosen] - whole
        log_prior = log_prior_on_supports(fm, theta, z_G)
        return PriorSensitivity(names, slopes(values, log_prior), slopes(values, log_likelihood))

    def _with_more_draws(self, table: LeaveOut) -> LeaveOut:
        """Return the table with rows that were not known by draws around posteriors without them.

        It takes an exchange in which silos tell gradient and Hessian of their log likelihoods, and
        two more for each :data:`NUM_PARTS` silos.
        """
        mean = self.weights @ self.z_G
        whitened = Whitened.of(self.result.factors_at(mean))
        table = replace(table, num_exchanges=table.num_exchanges + 1)
        unknown, few = table.unknown, self._number_left_out
        # With the new draws as many as before, for which the exchange is compiled.
        before = self._some(few - MORE_DRAWS if few > MORE_DRAWS else few)
        for first in range(0, len(unknown), NUM_PARTS):
            silos = unknown[first : first + NUM_PARTS]
            more = before._with_draws_without(silos, mean, whitened)
            found = more._left_out_by(len(more.weights))
            sent = more.num_exchanges - (self.num_exchanges if self.pool else 0)
            found = replace(found, num_exchanges=found.num_exchanges + sent)
            table = table.better_of(found, silos)
        return table

    @property
    def _number_left_out(self) -> int:
        """Return how many draws silos are left out of: so many that a thousand of them count."""
        number = len(self.weights)
        enough = math.ceil(LEFT_OUT / self.share / MORE_DRAWS) * MORE_DRAWS
        return number if number % MORE_DRAWS else min(number, enough)

    @in_precision_of_object
    def _left_out_by(self, number: int) -> LeaveOut:
        """Return the table of silos left out of so many draws."""
        key = random.fold_in(self._key, 2)
        return table_of(key, self.result, self.integration, *self._some(number)._as_weighed)

    def _some(self, number: int) -> Corrected:
        """Return the correction by some of its draws, any of each proposal's.

        They keep their weights: a resample would hide a heavy tail.
        """
        whole = len(self.weights)
        if number >= whole:
            return self
        numbers = (whole,) if self.pool is None else self.pool.numbers
        parts = [number * n // whole for n in numbers]
        parts[int(np.argmax(numbers))] += number - sum(parts)
        r = np.random.default_rng(0)
        chosen = [np.sort(r.permutation(n)[:k]) for n, k in zip(numbers, parts, strict=True)]
        firsts = np.cumsum([0, *numbers[:-1]])
        some = np.concatenate([first + i for first, i in zip(firsts, chosen, strict=True)])
        pool = self.pool
        if pool is not None:
            pool = pool._replace(
                z_G=pool.z_G[some],
                log_joint=pool.log_joint[some],
                from_own=pool.from_own[some],
                numbers=tuple(parts),
            )
        return replace(
            self,
            z_G=self.z_G[some],
            weights=self.weights[some] / self.weights[some].sum(),
            log_weights=self.log_weights[some],
            log_joint=None if self.log_joint is None else self.log_joint[some],
            pool=pool,
        )

    @property
    def _as_weighed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the draws (n, dim) as they were weighed, and their log weights (n,).

        Draws that weigh nothing in the posterior may weigh much without a silo or a row. Where they
        are not known, these are the draws with weight.
        """
        if self.pool is not None:
            return self.pool.z_G, self.log_weights
        return self.z_G, np.where(self.weights > 0, self.log_weights, -np.inf)

    def _with_draws_without(
        self, silos: Sequence[int], mean: np.ndarray, whitened: Whitened
    ) -> Corrected:
        """Return the correction with more draws, from where the posterior without a silo may be."""
        moves, covariances = zip(*(whitened.without(j) for j in silos), strict=True)
        own = mixture_at([mean + move for move in moves], list(covariances))
        key = random.fold_in(self._key, 3)
        more: Corrected = self.result._fit.correct_from(
            key, self.result, MORE_DRAWS, None, own, wider=WIDER, before=self
        )
        return more

    @property
    def _sites(self) -> tuple[Site, ...]:
        return self.result._fit.model.named("latent")

    @property
    def figures(self) -> str:
        """Return the numbers that a verdict rests on, in words."""
        return (
            f"{self.ess:,.0f} effective draws, Pareto k-hat {self.pareto_k:.2f}, "
            f"Monte Carlo error of means and sds at most {self.monte_carlo_error:.2g} sd"
        )

    @property
    def double(self) -> bool:
        """Whether the draws were computed in double precision."""
        return self.result.double

    @cached_property
    @in_precision_of_object
    def draws(self) -> dict[str, Array]:
        """Return draws of the globals on their own supports, to be weighted by ``weights``."""
        return on_supports(self._posterior, self.result, self.z_G)

    def saved_words(self) -> SavedWords:
        """Return the form in which a file keeps the correction; ``from_file`` reads it."""
        saved = super().saved_words()
        key = random.key_data(self._key)
        errors = self.errors._asdict()
        names = errors.pop("names")
        found = dict(self._moments._asdict(), z_G=self.z_G, weights=self.weights, key=key, **errors)
        if self.log_joint is not None:
            found["log_joint"] = self.log_joint
        arrays = {f"{PREFIX}{name}": np.asarray(value) for name, value in found.items()}
        more = {
            "inner_draws": dict(self.integration.draws),
            "nodes": self.integration.nodes,
            "num_exchanges": self.num_exchanges,
            "elements": names,
            "keys": str(random.key_impl(self._key)),
            "rounding": {
                "dtype": self._rounding.dtype,
                "nats": self._rounding.nats,
                "no_density": self._rounding.no_density,
            },
        }
        return replace(saved, words={**saved.words, **more}, arrays=arrays)

    @classmethod
    def from_file(
        cls, result: Result, arrays: Mapping[str, np.ndarray], words: Mapping[str, Any]
    ) -> Self:
        """Return the correction of a fit from the arrays of :meth:`saved_words` in a file."""
        fit = result._fit
        integration = Integration(dict(words["inner_draws"]), words["nodes"])
        stored = {k.removeprefix(PREFIX): a for k, a in arrays.items() if k.startswith(PREFIX)}
        saved_moments = Moments(*(stored[name] for name in Moments._fields))
        errors = (stored[name] for name in ElementErrors._fields[1:])
        return cls(
            log_evidence=words["log_evidence"],
            ess=words["ess"],
            pareto_k=words["pareto_k"],
            weights=stored["weights"],
            result=result,
            _key=random.wrap_key_data(jnp.asarray(stored["key"]), impl=words["keys"]),
            _moments=saved_moments,
            errors=ElementErrors(tuple(words["elements"]), *errors),
            accuracy=words["accuracy"],
            _rounding=Rounding(mean=saved_moments.mean, sd=saved_moments.sd, **words["rounding"]),
            z_G=stored["z_G"],
            _posterior=sampler_of(fit, integration),
            num_exchanges=words["num_exchanges"],
            integration=integration,
            log_weights=_log(stored["weights"]),
            log_joint=stored.get("log_joint"),
        )

    @cached_property
    def silos(self) -> SiloTable:
        """Return how far each silo moves the posterior, as :attr:`numpyro_fed.Result.silos` does.

        The place is the mean of the weighted draws.
        """
        return self.result.silos_at(self.weights @ self.z_G)

    @cached_property
    def samples(self) -> dict[str, Array]:
        """Return draws of the globals, resampled by their weights, as many as were weighed."""
        return self.sample_posterior(self._key, len(self.weights))

    @in_precision_of_object
    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Draw from the corrected posterior; with ``silo``, also that silo's locals.

        Globals are resampled by their weights. Locals are drawn anew at them: under quadrature
        from their conditional density on a grid around its mode (64 cells for one latent, which
        reach six standard deviations), else each from ``inner_draws`` draws by weight, which is
        exact as their number grows.
        """
        if silo is None:
            chosen = self._resampled(key, n)
            return {site: jax.device_put(np.asarray(a)[chosen]) for site, a in self.draws.items()}
        z_G = self.unconstrained(key, n)
        return self.result.sites_at(jax.random.fold_in(key, 1), z_G, silo, self._posterior)

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
        """Return corrected draws as an ArviZ object.

        It is a ``DataTree``, or an ``InferenceData`` before ArviZ 1. There are at most as many
        draws as the weighted draws are worth, so that ``arviz.ess`` is about true. The group
        ``posterior`` has the attributes ``ess``, ``pareto_k`` and ``verdict``. Needs the extra
        ``examples``.

        Parameters
        ----------
        key : jax.Array, optional
        num_samples : int
        silo : int, list of int, or "all", optional
            As in :meth:`sample_posterior`. A latent of a silo plate has an axis with the plate's
            name, and its rows are numbered over all silos: effects of hospitals have the numbers of
            these.
        groups : list of str, or "all", optional
            Further groups: ``"prior"``, ``"posterior_predictive"``, ``"prior_predictive"`` and
            ``"log_likelihood"`` of the rows of all silos side by side, ``"log_prior"``,
            ``"observed_data"``, and ``"constant_data"`` with the number of each row's silo. Only
            ``"prior"`` and ``"log_prior"`` are known without the silos' rows in this process.
            ``"all"`` has every group that can be had, and so the rows themselves if they are here;
            one that would be refused (log likelihoods of rows that read each other's latents, draws
            from a flat prior, rows in other processes) is left out without a word.
        coords : dict of str to list, optional
            The names of the elements along an axis, as for ``arviz.from_numpyro``:
            ``coords={"city": levels["city"]}``.
        dims : dict of str to list of str, optional
            The names of the axes of a variable, without those of chains and draws, in all groups
            that have it: ``dims={"of_city": ["city"]}``. Names of no variable are ignored. The axis
            of a silo plate comes first, and is named, too: ``dims={"u": ["hospital", "effect"]}``.

        Raises
        ------
        ValueError
            For groups that are not known, and names that do not fit the shape of a variable.

        Notes
        -----
        Rows run along the axis ``"row"``, the first one of an outcome; where outcomes are of
        several silo plates, along axes with the names of these, and the numbers of silos are
        ``"silo of PLATE"``. Other plates around an outcome name their axes, too. ArviZ takes no
        axis with the name of a variable: such an axis, and its ``coords``, get ``"_dim"``, and so
        do axes of rows that have the name of an argument.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(city, y=None):
        ...     of_city = numpyro.sample("of_city", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(of_city[city], 1), obs=y)
        >>> silos = [dict(city=np.array([0, 1, 1]), y=np.array([1.0, 4.0, y])) for y in (3.0, 5.0)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> data = fitted.to_arviz(groups="all", dims={"of_city": ["city"]},
        ...                        coords={"city": ["Basel", "Bern"]})
        >>> data["posterior"]["of_city"].sel(city="Bern").mean().round().item()
        4.0
        >>> data["log_likelihood"]["y"].dims
        ('chain', 'draw', 'row')
        """
        return groups_to_arviz(
            self,
            self,
            partial(log_likelihood, self),
            key,
            num_samples,
            silo=silo,
            groups=groups,
            labels=Labels.of(coords, dims),
            worth=self.ess,
            attributes=self._attributes,
        )

    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the unconstrained globals (n, dim) behind ``sample_posterior(key, n)``."""
        return jax.device_put(self.z_G[self._resampled(key, n)])

    def _resampled(self, key: Array, n: int) -> np.ndarray:
        return systematic(random.fold_in(key, 0), self.weights, n)


def on_supports(sampler: Posterior, result: Result, z_G: np.ndarray) -> dict[str, Array]:
    """Return draws (n, dim) of the globals on the supports of their sites."""
    theta = result.shared.theta
    # In parts of one size, which is compiled once, however many draws there are.
    parts = [
        sampler.constrain_globals(theta, z_G[i : i + AT_ONCE])
        for i in range(0, max(len(z_G), 1), AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    # In NumPy: JAX would compile a program for each number of draws.
    together = {site: np.concatenate([part[site] for part in parts]) for site in parts[0]}
    return jax.device_put(together)


def _log(weights: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(weights)


def sampler_of(fit: Fit, integration: Integration) -> Posterior:
    """Return the sampling functions, with locals drawn by weight."""

    def make() -> Posterior:
        bound = integration.bound(fit.model, fit.guide)
        return posterior(fit.model, fit.guide, bound, integration)

    settings = json.dumps([dict(integration.draws), integration.nodes])
    return fit.cached(("sampler", settings), make)
