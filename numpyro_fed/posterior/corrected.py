"""A fit whose draws were weighed by the joint density of all silos, with what it rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import Distribution, biject_to

from numpyro_fed.after.own_rows import WhichSilo
from numpyro_fed.after.sensitivity import PriorSensitivity, log_prior_on_supports, slopes
from numpyro_fed.basics.errors import ModelError, NonFiniteError
from numpyro_fed.basics.programs import in_precision_of_object
from numpyro_fed.basics.trees import elements
from numpyro_fed.posterior.built import CompiledMethod
from numpyro_fed.posterior.leave_out import LeaveOut, Loo, rows_left_out, silos_left_out
from numpyro_fed.posterior.posterior import Posterior, Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.weighted_draws import WeightedDraws
from numpyro_fed.rounds.progress import shows
from numpyro_fed.rounds.runtime import State
from numpyro_fed.search.influence import SiloTable, Whitened
from numpyro_fed.text.site_table import Site
from numpyro_fed.weigh.element_errors import ElementErrors, Moments, Rounding, moments
from numpyro_fed.weigh.integration import Integration
from numpyro_fed.weigh.mixture import NUM_PARTS, mixture_at
from numpyro_fed.weigh.proposals import Pool
from numpyro_fed.weigh.weights import Weights, systematic_resample

# Draws where the posterior without a silo may be, an exchange of them, and the share of those that
# look beyond, as in nf.fit, which has compiled both.
MORE_DRAWS, WIDER = 4_000, 0.16
AT_ONCE = 4_000  # draws that are brought to their supports at a time
LEFT_OUT = 1_000  # effective draws that silos are left out of: densities are right to 0.03 nats
PREFIX = "correction/"  # of the names of its arrays in a file


@dataclass(frozen=True, eq=False)
class Corrected(Posterior, WeightedDraws[Result]):
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
    _sampler: Sampler = field(repr=False)
    integration: Integration = field(repr=False)
    log_weights: np.ndarray = field(repr=False)
    log_joint: np.ndarray | None = field(default=None, repr=False)
    pool: Pool | None = field(default=None, repr=False)

    @property
    def run_behind(self) -> Result:
        """Return the fit that was corrected."""
        return self.result

    @property
    def state(self) -> State:
        """Return the state of the fit, from which ``run(..., init_state=)`` goes on."""
        return self.result.state

    @property
    def sampler(self) -> Sampler:
        """Return the functions by which locals are drawn, from their density given the globals."""
        return self._sampler

    @property
    def correction(self) -> Corrected:
        """Return the correction itself."""
        return self

    @shows("draw")
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
            chosen = systematic_resample(random.fold_in(key, 0), self.weights, n)
            return {site: jax.device_put(np.asarray(a)[chosen]) for site, a in self.draws.items()}
        z_G = self.unconstrained(key, n)
        return self.result.sites_at(jax.random.fold_in(key, 1), z_G, silo, self.sampler)

    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the unconstrained globals (n, dim) behind ``sample_posterior(key, n)``."""
        chosen = systematic_resample(random.fold_in(key, 0), self.weights, n)
        return jax.device_put(self.z_G[chosen])

    @cached_property
    def samples(self) -> dict[str, Array]:
        """Return draws of the globals, resampled by their weights, as many as were weighed."""
        return self.sample_posterior(self._key, len(self.weights))

    @cached_property
    @in_precision_of_object
    def draws(self) -> dict[str, Array]:
        """Return draws of the globals on their own supports, to be weighted by ``weights``."""
        return on_supports(self.sampler, self.result, self.z_G)

    @in_precision_of_object
    def with_priors(self, priors: Mapping[str, Distribution]) -> Corrected:
        r"""Return the posterior under other priors of some globals, with no exchange.

        The draws :math:`z^s` get the weights

        .. math::
            w_s' \propto w_s \prod_g \frac{p'(z_g^s)}{p(z_g^s)}.

        Parameters
        ----------
        priors : dict of str to Distribution
            NumPyro distributions of the shape of the site's value, which depend on no other site.

        Returns
        -------
        Corrected
            With a verdict of its own: where the draws lie elsewhere than the new posterior, k-hat
            says so, and a fit with these priors in the text is needed.

        Raises
        ------
        ModelError
            For a site that is no global latent, and a prior of another shape or support.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = [dict(y=np.array([2.0, 3.0])), dict(y=np.array([4.0]))]
        >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
        >>> other = fitted.with_priors({"mu": dist.Normal(0, 1)})
        >>> bool(other.trusted), bool(abs(other.weights @ other.draws["mu"] - 9 / 4) < 0.05)
        (True, True)
        """
        fm, theta = self.result._fit.model, self.result.shared.theta
        known = {s.name: s for s in fm.named("latent")}
        draws, change = self.draws, np.zeros(len(self.weights))
        own = jax.vmap(fm.prior_terms, (None, 0))(theta, jnp.asarray(self.z_G))
        for name, prior in priors.items():
            if name not in known:
                raise ModelError(f"'{name}' is no global of the model, which has {[*known]}.")
            site, value = known[name], jnp.asarray(draws[name])
            bijection = biject_to(fm.structure.supports[name])
            z = jnp.asarray(self.z_G)[:, site.start : site.stop].reshape(-1, *site.shape)
            log_det = jax.vmap(bijection.log_abs_det_jacobian)(z, value)
            try:
                log_p = jax.vmap(prior.log_prob)(value)
                inside = jax.vmap(prior.support)(value)
            except (TypeError, ValueError) as error:
                raise ModelError(
                    f"'{name}' has the shape {value.shape[1:]}, and the prior {prior} another one: "
                    f"{error}"
                ) from error
            whole = len(self.weights), *prior.shape()
            if whole != value.shape:
                raise ModelError(
                    f"'{name}' has the shape {value.shape[1:]}, and its prior {prior.shape()}. "
                    "Expand it: prior.expand([n]).to_event(1)."
                )
            terms = (np.asarray(a, float).reshape(len(change), -1) for a in (log_p, log_det))
            new = sum(a.sum(1) for a in terms)
            new = np.where(np.asarray(inside).reshape(len(change), -1).all(1), new, -np.inf)
            change += new - np.asarray(own[name], float)
        log_weights = self.log_weights + change
        if not np.isfinite(log_weights).any():
            raise ModelError("no draw has a density under these priors: put them into the text.")
        weights, latents = Weights.of(log_weights), set(known)
        found = moments(
            self.z_G, weights.values, np.zeros(0, bool), self.result.many_draws_of_globals()
        )
        words = f"k-hat {weights.pareto_k:.2f}, {weights.ess:,.0f} draws count"
        return replace(
            self,
            log_evidence=None,
            ess=weights.ess,
            pareto_k=weights.pareto_k,
            weights=weights.values,
            _key=random.fold_in(self._key, 6),
            _moments=found,
            _rounding=Rounding.of(self.z_G, weights.values, log_weights, found.mean, found.sd),
            errors=ElementErrors.of(
                draws, latents, weights.values, labels=fm.labels, bounded=fm.bounded
            ),
            log_weights=log_weights,
            log_joint=None,
            pool=None,
            stages=(*self.stages, Stage(f"other priors of {[*priors]}", words, None)),
            call=None,
        )

    @cached_property
    def silos(self) -> SiloTable:
        """Return how far each silo moves the posterior, as :attr:`numpyro_fed.Result.silos` does.

        The place is the mean of the weighted draws.
        """
        return self.result.silos_at(self.weights @ self.z_G)

    @property
    def known_doubt(self) -> str:
        """Return why the correction is not to be trusted."""
        return "" if self.trusted else self.verdict_in_words

    def __str__(self) -> str:
        return self.verdict if self.stages else self.report()

    @property
    def _advice(self) -> str:
        if not self.stages:
            return super()._advice
        more = "importance_correct(key, fitted, num_draws=100_000)"
        if self.reliable:
            return f"{more}, or more max_exchanges"
        if self.many_draws_count:
            return more
        return (
            "effects as scale times a standard normal or the other way round, a prior that holds "
            "what the data leave open, more max_exchanges, or NUTS on pooled data where that is "
            "allowed"
        )

    @cached_property
    @in_precision_of_object
    def left_out(self) -> LeaveOut:
        """Return the table of :meth:`leave_out`, computed once."""
        few = self._number_left_out
        first = table = self._left_out_by(few)
        if not table.unknown:
            return table
        from numpyro_fed.posterior.importance import correct_from

        # Draws around the posteriors without the silos whose rows are not known. It takes an
        # exchange in which silos tell gradient and Hessian of their log likelihoods, and two more
        # for each NUM_PARTS silos.
        try:
            mean = self.weights @ self.z_G
            whitened = Whitened.of(self.result.factors_at(mean))
            table = replace(table, num_exchanges=table.num_exchanges + 1)
            # With the new draws as many as before, for which the exchange is compiled.
            earlier = self._some(few - MORE_DRAWS if few > MORE_DRAWS else few)
            for i in range(0, len(first.unknown), NUM_PARTS):
                silos = first.unknown[i : i + NUM_PARTS]
                moves, covariances = zip(*(whitened.without(j) for j in silos), strict=True)
                own = mixture_at([mean + move for move in moves], list(covariances))
                key = random.fold_in(self._key, 3)
                more = correct_from(
                    key, self.result, MORE_DRAWS, None, own, wider=WIDER, earlier=earlier
                )
                found = more._left_out_by(len(more.weights))
                # Rows of these silos are taken from it where its tails are lighter.
                taken = np.isin(np.arange(len(table.pareto_k)), silos)
                taken &= ~(table.pareto_k <= found.pareto_k)
                sent = more.num_exchanges - (self.num_exchanges if self.pool else 0)
                table = replace(
                    table,
                    log_density=np.where(taken, found.log_density, table.log_density),
                    pareto_k=np.where(taken, found.pareto_k, table.pareto_k),
                    shift=np.where(taken, found.shift, table.shift),
                    num_exchanges=table.num_exchanges + found.num_exchanges + sent,
                )
        # Silos need not tell their parabolas, or cannot: then some rows stay unknown.
        except (ModelError, NonFiniteError) as error:
            return replace(first, reason=str(error))
        return table

    @cached_property
    @in_precision_of_object
    def rows_left_out(self) -> Loo:
        """Return the table of :meth:`loo`, computed once."""
        key = random.fold_in(self._key, 4)
        z_G, log_weights = self._as_weighed
        return rows_left_out(key, self.result, self.integration, z_G, log_weights)

    @cached_property
    @in_precision_of_object
    def prior_answers(self) -> PriorSensitivity:
        """Return the table of :meth:`prior_sensitivity`, computed once."""
        if self.log_joint is None:
            raise ModelError(
                "these draws have no densities (they have other priors than the text, or are of a "
                "file of an earlier release): fit anew."
            )
        fm, theta = self.result._fit.model, self.result.shared.theta
        chosen = systematic_resample(random.fold_in(self._key, 5), self.weights, len(self.weights))
        z_G = self.z_G[chosen]
        names, values = elements(self.sampler.constrain_globals(theta, z_G), fm.labels)
        moves = (values != values[:1]).any(0)  # the diagonal of a correlation answers to nothing
        names, values = tuple(n for n, m in zip(names, moves, strict=True) if m), values[:, moves]
        whole = np.asarray(jax.vmap(fm.log_prior, (None, 0))(theta, z_G), np.float64)
        log_likelihood = self.log_joint[chosen] - whole
        log_prior = log_prior_on_supports(fm, theta, z_G)
        return PriorSensitivity(names, slopes(values, log_prior), slopes(values, log_likelihood))

    @property
    def _number_left_out(self) -> int:
        """Return how many draws silos are left out of: so many that a thousand of them count."""
        number = len(self.weights)
        enough = math.ceil(LEFT_OUT / self.effective_share / MORE_DRAWS) * MORE_DRAWS
        return number if number % MORE_DRAWS else min(number, enough)

    @in_precision_of_object
    def _left_out_by(self, number: int) -> LeaveOut:
        """Return the table of silos left out of so many draws."""
        key = random.fold_in(self._key, 2)
        return silos_left_out(key, self.result, self.integration, *self._some(number)._as_weighed)

    def _some(self, number: int) -> Corrected:
        """Return the correction by some of its draws, any of each proposal's."""
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
                log_own=pool.log_own[:, some],
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
        """Return the draws (n, dim) as they were weighed, and their log weights (n,)."""
        # Draws that weigh nothing in the posterior may weigh much without a silo or a row. Where
        # they are not known, these are the draws with weight.
        if self.pool is not None:
            return self.pool.z_G, self.log_weights
        return self.z_G, np.where(self.weights > 0, self.log_weights, -np.inf)

    @property
    def _sites(self) -> tuple[Site, ...]:
        return self.result._fit.model.named("latent")

    @property
    def _for_arviz(self) -> tuple[float, dict[str, float | str]]:
        return self.ess, {**self.attributes, **super()._for_arviz[1]}

    def saved_words(self, draws: int | None = None) -> SavedWords:
        """Return the form in which a file keeps the correction; ``from_file`` reads it."""
        saved = WeightedDraws.saved_words(self)
        key = random.key_data(self._key)
        errors = self.errors._asdict()
        names = errors.pop("names")
        found = dict(self._moments._asdict(), z_G=self.z_G, weights=self.weights, key=key, **errors)
        if self.log_joint is not None:
            found["log_joint"] = self.log_joint
        arrays = {f"{PREFIX}{name}": np.asarray(value) for name, value in found.items()}
        more = {
            **self.integration.settings,
            "num_exchanges": self.num_exchanges,
            "elements": names,
            "keys": str(random.key_impl(self._key)),
            "rounding": {k: getattr(self._rounding, k) for k in ("dtype", "nats", "no_density")},
        }
        return replace(saved, words={**saved.words, **more}, arrays=arrays)

    @classmethod
    def from_file(
        cls, result: Result, arrays: Mapping[str, np.ndarray], words: Mapping[str, Any]
    ) -> Self:
        """Return the correction of a fit from the arrays of :meth:`saved_words` in a file."""
        fit = result._fit
        integration = Integration.of(words)
        stored = {k.removeprefix(PREFIX): a for k, a in arrays.items() if k.startswith(PREFIX)}
        saved_moments = Moments(*(stored[name] for name in Moments._fields))
        with np.errstate(divide="ignore"):
            log_weights = np.log(stored["weights"])
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
            _sampler=sampler_of(fit, integration),
            _sent=words["num_exchanges"],
            integration=integration,
            log_weights=log_weights,
            log_joint=stored.get("log_joint"),
        )


def on_supports(sampler: Sampler, result: Result, z_G: np.ndarray) -> dict[str, Array]:
    """Return draws (n, dim) of the globals on the supports of their sites."""
    theta = result.shared.theta
    # In parts of one size, which is compiled once, however many draws there are.
    parts = [
        sampler.constrain_globals(theta, jax.device_put(z_G[i : i + AT_ONCE]))
        for i in range(0, max(len(z_G), 1), AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    # In NumPy: JAX would compile a program for each number of draws.
    together = {site: np.concatenate([part[site] for part in parts]) for site in parts[0]}
    return jax.device_put(together)


def sampler_of(fit: CompiledMethod, integration: Integration) -> Sampler:
    """Return the sampling functions, with locals drawn by weight."""
    settings = json.dumps(integration.settings)
    return fit.cached(("sampler", settings), lambda: fit.built.sampler(integration.settings))
