"""The result of a run over silos that hold rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.after.own_rows import WhichSilo, chosen_silos, silo_number
from numpyro_fed.basics.errors import ModelError, NonFiniteError
from numpyro_fed.basics.programs import filled, first_draws, in_precision_of_object
from numpyro_fed.data.silo_data import ALL, SiloData, Sizes
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.posterior.at_silo import told_by_silos
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.run import Communication, FederatedRun, communication
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.saving import SavedRun, SavedWords
from numpyro_fed.rounds.exchange import Exchange, Up
from numpyro_fed.rounds.names import INFLUENCE
from numpyro_fed.rounds.progress import shows
from numpyro_fed.rounds.remote import Mark
from numpyro_fed.rounds.states import Private
from numpyro_fed.search.influence import MOST_GLOBALS, Factors, Influence, SiloTable, table_of
from numpyro_fed.search.mode import Mode
from numpyro_fed.search.start_point import MIN_CURVATURE_OFF_MODE, min_curvature
from numpyro_fed.text.indices import new_data_check
from numpyro_fed.text.plan import Plan
from numpyro_fed.text.row_checks import refuse_coupled_rows
from numpyro_fed.text.site_table import Theta

# Draws whose mean is the place at which silos are compared: within 2 % of an sd of the mean.
MEAN_DRAWS = 4_000
# Draws of the globals that show a fit's moments, and that a file of nf.fit keeps.
MANY = 4_000


@dataclass(frozen=True, eq=False)
class Result(Posterior, FederatedRun):
    """A federated fit of a model whose silos hold rows.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the bound, one number for each round of this run.
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    ended : {"rounds", "converged", "callback", "failure", "interrupted"}
        Why there are no more rounds.
    start : Mode, Carried or None
        The mode at which the run began, or the parts that it took over from another result.
    """

    # Exchanges before the first round, by name, of a run that was loaded: its start is not in the
    # file.
    _opening_of_file: Mapping[str, int] | None = field(default=None, repr=False, kw_only=True)
    # The correction by which nf.fit judged it, or why there is none.
    _checked: Any = field(default=None, repr=False, kw_only=True)

    ELSEWHERE = (
        "silo {} holds its own latents and parameters, and the server knows nothing of them. Ask "
        "there (Silo.predict, by draws_for_silo of this result), or run all silos in one process."
    )

    @property
    def num_globals(self) -> int:
        """Return the length of the flat vector of global latents."""
        return self._fit.model.dim

    @property
    def sizes(self) -> list[Sizes]:
        """Return the rows of each plate at each silo; empty for silos in other processes."""
        return list(self._fit.sizes)

    @property
    def run_behind(self) -> Result:
        """Return the run itself."""
        return self

    @property
    def posterior(self) -> Self:
        """Return the result itself, which is the posterior of the run and answers all questions."""
        return self

    @property
    def correction(self) -> Any:
        """Return the fit's correction, or the reason, in words, why there is none."""
        return self.certificate

    @property
    def num_exchanges(self) -> int:
        """Return the number of messages that each silo sent for it, about."""
        own = len(self.losses) * len(self._fit.algorithm.round.exchanges)
        return self._sent or own + sum(self._opening_exchanges.values())

    @property
    def log_evidence(self) -> Any:
        """Return the estimate of ``log p(y)`` by the fit's correction; None without one."""
        return None if self.corrected is None else self.corrected.log_evidence

    @property
    def mark(self) -> Mark | None:
        """Return the references to the states of silos in other processes; None in this one."""
        return self.state.silos[0] if self._silos.elsewhere else None

    @property
    def sampler(self) -> Sampler:
        """Return the functions by which locals are drawn, from the fit's guide or bound."""
        return self._fit.sampler

    @property
    def plan(self) -> Plan:
        """Return the plan from which server and silos built the algorithm."""
        return self._fit.plan

    @property
    @in_precision_of_object
    def communication(self) -> Communication:
        """Return the bytes that this run has sent down to the silos and up; prints as a table.

        A run that goes on from another's state counts its own rounds alone.
        """
        data = self.plan.template() if self._silos.elsewhere else self._silos.data[0]
        rounds, opening = len(self.losses), self._opening_exchanges
        return communication(self._fit.built, data, self.num_silos, rounds, opening)

    @property
    def _opening_exchanges(self) -> Mapping[str, int]:
        """Return how often each exchange took place before the first round of this run."""
        if self._opening_of_file is not None:
            return self._opening_of_file
        # The state counts all rounds: more of them than losses are those of the run before.
        goes_on = int(self.state.round) > len(self.losses)
        return {} if goes_on else self._fit.built.opening_exchanges(self.start)

    @cached_property
    @in_precision_of_object
    def certificate(self) -> Any:
        """Return the fit's importance correction with default settings, computed once.

        It is a :class:`numpyro_fed.Corrected`, or the reason, in words, why there is none.
        """
        if self._checked is not None:
            return self._checked
        from numpyro_fed.posterior.importance import importance_correct

        try:
            return importance_correct(jax.random.key(0), self)
        except (ValueError, NonFiniteError) as error:
            return str(error)

    @cached_property
    def silos(self) -> SiloTable:
        """Return how far each silo moves the posterior, and which ones contradict the others.

        In one exchange each silo sends gradient and Hessian of its log likelihood at the
        posterior's mean, its own latents integrated out, and how much higher the log likelihood is
        at the silo's own mode. They are not added up: the server sees those of each silo. Computed
        once.

        Raises
        ------
        ModelError
            For a model without globals, or with more than 300, or whose rows read each other's
            latents, so that they cannot be integrated row by row.
        NonFiniteError
            If gradient or Hessian are not finite at a silo.

        Examples
        --------
        The outcomes of the last silo are in other units:

        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 100))
        ...     with nf.silo_plate("row", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = [dict(y=np.array(y)) for y in ([5.1, 6.0], [6.2, 5.5, 6.0], [60.0, 53.0])]
        >>> result = nf.PVI(model).run(jax.random.key(0), 1, silos, progress_bar=False)
        >>> result.silos.flagged
        (2,)
        """
        draws, _ = self.draw_globals(jax.random.key(0), MEAN_DRAWS)
        return self.silos_at(np.asarray(draws).mean(0))

    def silos_at(self, z_G: np.ndarray) -> SiloTable:
        """Return the influence of each silo at a place (num_globals,) of the globals."""
        has_outer = bool(self._fit.model.outer_plates)
        return replace(table_of(self.factors_at(z_G), has_outer), names=self._silos.names)

    @in_precision_of_object
    def factors_at(self, z_G: np.ndarray) -> Factors:
        """Return the parabolas of the silos' log likelihoods at a place (num_globals,)."""
        fit = self._fit
        if not 0 < fit.model.dim <= MOST_GLOBALS:
            raise ModelError(
                f"the model has {fit.model.dim} globals, and the influence of silos is known for 1 "
                f"to {MOST_GLOBALS} of them."
            )
        refuse_coupled_rows(fit.checks, self._silos.buckets, "the influence of silos needs")
        make = partial(Influence, fit.model, fit.built.algorithm, self.num_silos)
        question = fit.cached(INFLUENCE, make)
        words = "gradient or Hessian at the posterior's mean are not finite at {}."
        ask = partial(self.ask_once, key=jax.random.key(0), message=words)
        factors: Factors = question.ask(ask, self.shared, z_G)
        return factors

    def ask_once(
        self, exchange: Exchange[Any, Any, Up], down: object, key: Array, message: str
    ) -> Up:
        """Return the silos' replies to a question that leaves their states as they are.

        An error has the text ``message``, in which ``{}`` stands for the silos at fault.
        """
        ask = self._asking(key)
        up = ask(exchange, down)
        if ask.unusable:
            raise self.unusable(message, ask.unusable)
        return up

    @property
    def trusted(self) -> bool:
        """Whether means and sds of the globals are right to a tenth of an sd.

        The importance correction judges, without pooled data: its weights have no heavy tail,
        and its means and sds agree with those of the fit (:attr:`Corrected.fit_trusted`).
        """
        correction = self.certificate
        sound = not isinstance(correction, str) and bool(correction.fit_trusted)
        return sound and not (self.missed or self.interrupted)

    @property
    def verdict_in_words(self) -> str:
        """Return in words whether to trust the posterior."""
        return super().verdict_in_words if self.stages else self.report()

    def report(self, *, certificate: bool = True) -> str:
        """Return in words how the run ended and whether the fit can be trusted.

        With ``certificate=False``, which saves an exchange, it is only how the run ended.
        """
        if not certificate:
            return self._summary
        correction = self.certificate
        words = (
            f"No certificate: {correction}" if isinstance(correction, str) else correction.report()
        )
        return f"{self._summary}\n{words}"

    @property
    def _summary(self) -> str:
        """Return in words how the run ended, and which silos had no say."""
        return " ".join(filter(None, (self._run_summary(), self.remarks)))

    @property
    @in_precision_of_object
    def params(self) -> dict[str, Any]:
        """Return shared parameters on their supports, and the globals' guide as ``"guide"``."""
        shared = self.shared
        guide = self._fit.guide.globals.in_z(shared.frame, shared.guide)
        return {**self._fit.model.constrain_theta(shared.theta), "guide": guide}

    @in_precision_of_object
    def silo_params(self, silo: int | str) -> dict[str, Any]:
        """Return a silo's private parameters on their supports, and its guide as ``"guide"``.

        By quadrature the guide is not fitted: it is where the search for rows' modes begins.
        """
        silo = silo_number(silo, self)
        private = self._fit.model.constrain_theta(self.private_parameters(silo))
        return {**private, "guide": self.private(silo).guide}

    @in_precision_of_object
    def private_parameters(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters, unconstrained, without entries of padded rows."""
        data = self._hosted(silo).data_of(silo)
        shapes = jax.eval_shape(self._fit.model.init_private, jax.random.key(0), data)
        private: dict[str, Any] = self.private(silo).theta
        return jax.tree.map(lambda a, s: a[tuple(map(slice, s.shape))], private, shapes)

    @in_precision_of_object
    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Draw from the fitted posterior.

        Parameters
        ----------
        key : jax.Array
        n : int
            Number of draws, the leading axis of every site.
        silo : int, str, list of these, or "all", optional
            Also draw the locals of this silo, known by its number or name, each given the same
            globals that come without it. Under a locally enhanced bound they are resampled by their
            weights. With ``"all"``, or a list,
            latents of several silos stand side by side: an effect of each hospital has the shape
            ``(n, hospitals)``, and draws are those of each silo alone. Of silos in other processes
            ``"all"`` has the latents that rows share (a hospital's effect), and nothing of rows.

        Returns
        -------
        dict of str to array
            Latent and deterministic sites on their own supports. Parameters without a prior
            (``numpyro.param``) are in ``params``.

        Raises
        ------
        DataError
            For a silo in another process, whose latents are its own.
        RefusedError
            With ``"all"``, if the owner of a silo does not allow to tell them
            (:class:`Policy`, ``tell_latents``). It names the silo.

        Notes
        -----
        ``"all"`` over silos in other processes takes one exchange, ``"outer latents"``: the server
        sees each silo's draws, and how many rows its outer plates have.
        """
        z_G, _ = self.draw_globals(key, n)
        return self.sites_at(jax.random.fold_in(key, 1), z_G, silo, self._fit.sampler)

    @shows("draw")
    @in_precision_of_object
    def sites_at(
        self, key: Array, z_G: Array, silo: WhichSilo | None, sampler: Sampler
    ) -> dict[str, Array]:
        """Return all sites at draws of the globals (n, dim), silos' locals drawn given them."""
        shared, fit = self.shared, self._fit
        sites = first_draws(sampler.constrain_globals(shared.theta, filled(z_G)), len(z_G))
        if silo is None:
            return sites
        every = isinstance(silo, str) and silo == ALL
        if every and self._silos.elsewhere:
            return sites | told_by_silos(self, key, z_G, sampler)
        coords = sampler.coordinates(shared, z_G)

        def draw(j: int, *unpadded: tuple[Theta, SiloData]) -> dict[str, Array]:
            hosted = self._hosted(j)
            data = hosted.at(j, [bucket.data for bucket in hosted.buckets])
            # A key for each silo: its draws are independent
            # of those of other silos at the same globals.
            key_silo = jax.random.fold_in(key, j)
            private = self.private(j)
            return sampler.draw_silo(key_silo, shared.theta, private, z_G, coords, data, *unpadded)

        if not every and (isinstance(silo, str) or not isinstance(silo, Sequence)):
            j = silo_number(silo, self, ALL)
            own = {**shared.theta, **self.private_parameters(j)}
            return sites | draw(j, (own, self._hosted(j).data[j]))
        silos = chosen_silos(silo, self)
        for j in silos:
            self._hosted(j).place(j)  # all are there, before any is drawn
        parts = {j: draw(j) for j in silos}
        for s in fit.model.sites:
            if s.is_local_latent:
                axis = 1 + (s.axis or 0)
                rows = {j: range(self._silos.sizes_of(j)[str(s.plate)]) for j in parts}
                real = [np.asarray(parts[j][s.name]).take(rows[j], axis) for j in silos]
                sites[s.name] = jax.device_put(np.concatenate(real, axis))
        return sites

    @in_precision_of_object
    def draw_globals(self, key: Array, n: int) -> tuple[Array, Array]:
        """Return unconstrained draws (n, dim) of the globals, and the guide's log density (n,)."""
        return self._fit.sampler.draw_globals(jax.random.fold_in(key, 0), self.shared, n)

    @in_precision_of_object
    def many_draws_of_globals(self) -> np.ndarray:
        """Return draws (4_000, dim) of the globals, always the same: the fit's moments."""
        start = self.start
        if len(self.losses) or not isinstance(start, Mode) or start.curvature.ndim == 1:
            return np.asarray(self.draw_globals(jax.random.key(0), MANY)[0])
        # Where the fit stands at its mode nothing has to be compiled for it.
        A = start.curvature[-self._fit.model.dim :, -self._fit.model.dim :]
        least = min_curvature(start.z_G) if start.converged else MIN_CURVATURE_OFF_MODE
        root = Curvature.of(A).positive(least).root_of_inverse()
        normal = np.random.default_rng(0).standard_normal((MANY, len(A)))
        return (start.z_G + normal @ root.T).astype(start.z_G.dtype)

    def private(self, silo: int) -> Private:
        """Return the part of a silo's state that never leaves it, padded rows included."""
        return self._fit.algorithm.private(self._silo_state(silo))

    @property
    def guide(self) -> Callable[..., None]:
        """Return the globals' posterior as a NumPyro guide, for ``numpyro.infer.Predictive``.

        ``Predictive(model, guide=result.guide, params=result.params, num_samples=100)`` draws the
        globals from it, and whatever is local (to new rows, say) from the model.
        """
        return self.guide_at(None)

    def guide_at(self, silo: int | None) -> Callable[..., None]:
        """Return the posterior of the globals and one silo's locals as a NumPyro guide."""
        latents = {
            s.name
            for s in self._fit.model.sites
            if s.kind in ("latent", "discrete") and (s.plate is None or silo is not None)
        }
        check = new_data_check(self._fit.model.text, silo)

        def guide(*args: object, **kwargs: object) -> None:
            check(*args, **kwargs)
            key = numpyro.prng_key()
            # Deterministic sites are computed by running the
            # model, whose sites no outer handler may see.
            with numpyro.handlers.block():
                drawn = self.sample_posterior(key, 1, silo=silo)
            for name, value in drawn.items():
                if name in latents:
                    point = dist.Delta(value[0], event_dim=jnp.ndim(value[0]))
                    numpyro.sample(name, point)

        return guide

    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the unconstrained globals (n, dim) behind ``sample_posterior(key, n)``."""
        return self.draw_globals(key, n)[0]

    def saved_words(self, draws: int | None) -> SavedWords:
        """Return the form in which a file keeps the posterior, with so many draws of the globals.

        If ``nf.fit`` led here its correction is in it.
        """
        number = (MANY if self.stages else 0) if draws is None else draws
        drawn = self.sample_posterior(jax.random.key(0), number) if number else {}
        kind = type(self).__name__
        if self._checked is None or isinstance(self._checked, str):
            words = {"ended": self.ended, "verdict": self._summary, "trusted": None}
            words |= {"remarks": self.remarks} if self.remarks else {}
            return SavedWords(kind, words, drawn)
        return replace(self._checked.saved_words(None), kind=kind, draws=drawn, weights=None)

    def saved_runs(self) -> tuple[Result, dict[str, SavedRun]]:
        """Return the run that a file rests on, and others by name."""
        correction = self.corrected if self.stages else None
        if correction is None or correction.result.state is self.state:
            return self, {}
        # The correction rests on another fit than the best one: the file keeps both.
        return correction.result, {"best": self.saved_run()}

    def saved_run(self) -> SavedRun:
        """Return the run in the form in which a file keeps it."""
        recipe = {} if self._fit.recipe is None else self._fit.recipe._asdict()
        description = {
            **self._fit.description(),
            "before": dict(self._opening_exchanges),
            "recipe": {k: v for k, v in recipe.items() if k != "source"} or None,
        }
        return description, self.losses, self.state
