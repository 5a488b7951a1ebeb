"""The fit of a model to silos that hold rows, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Private
from numpyro_fed.errors import NonFiniteError
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import Sizes
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.fingerprint import fingerprint
from numpyro_fed.model.indices import new_data_check
from numpyro_fed.model.row_checks import RowChecks
from numpyro_fed.precision import in_own_precision, is_double, precision
from numpyro_fed.results.arviz import to_arviz
from numpyro_fed.results.built import Built, Factors
from numpyro_fed.results.communication import Communication, communication
from numpyro_fed.results.posterior import Posterior, posterior, real_rows
from numpyro_fed.results.recognise import Provenance
from numpyro_fed.results.run import CompiledMethod, FederatedRun, Silos
from numpyro_fed.results.saving import SavedRun
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import Runtime


class MethodSpec(NamedTuple):
    """A record of how the method of a fit can be had again, from its class and the model.

    Attributes
    ----------
    method : str
        Its class.
    settings : dict
        Those that are not the default, JSON.
    lost : tuple of str
        Settings that JSON cannot hold: an optimiser, a function.
    runtime : str
    source : str
        A hash of the model's source.
    """

    method: str
    settings: dict[str, Any]
    lost: tuple[str, ...]
    runtime: str
    source: str

    def description(self) -> dict[str, Any]:
        """Return it as a file keeps it."""
        return {name: value for name, value in self._asdict().items() if name != "source"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit(CompiledMethod[Built]):
    """A method that was built for silos that hold rows.

    ``certify`` is the importance correction of a result, ``(key, result) -> Corrected``; ``double``
    says whether it computes in double precision. Of silos in other processes it knows neither the
    sizes nor how to ask about their values, and has no recipe.
    """

    plan: Plan
    certify: Callable[..., Any]
    double: bool = field(default_factory=is_double)
    sizes: tuple[Sizes, ...] = ()
    checks: RowChecks | None = None
    recipe: MethodSpec | None = None

    @cached_property
    def posterior(self) -> Posterior:
        """Return the compiled sampling functions of the fit."""
        return posterior(self.model, self.guide, self.built.bound)

    def without_start(
        self, runtime_of: Callable[[FederatedAlgorithm[Any, Any], Schedule[Any] | None], Runtime]
    ) -> Fit | None:
        """Return the fit of runs that found no mode to begin at; None where none is sought.

        It is built where it is first asked for, with a runtime by ``runtime_of``.
        """
        if (build := self.built.without_start) is None:
            return None

        def make() -> Fit:
            plan, built = build()
            runtime = runtime_of(built.algorithm, built.schedule)
            return replace(self, plan=plan, built=built, runtime=runtime, compiled={})

        return self.cached("without a start", make)

    @property
    def model(self) -> FederatedModel:
        """Return the text, split over server and silos."""
        return self.built.model

    @property
    def guide(self) -> Guide:
        """Return the guide of globals and locals."""
        return self.built.guide

    @property
    def draws(self) -> dict[str, int]:
        """Return ``K`` for each silo plate that has latents."""
        return self.built.draws

    @property
    def factors(self) -> Factors | None:
        """Return all that a fit by factors knows besides."""
        return self.built.factors

    def description(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return {
            "settings": {**self.plan.chosen, "draws": self.draws},
            "sites": {
                s.name: [s.kind, s.plate, list(s.shape), s.support] for s in self.model.sites
            },
            "sizes": list(self.sizes),
        }

    def made(self, held: Silos) -> Provenance:
        """Return by what model and data are recognised in a file."""

        def text() -> str:
            with precision(double=self.double):
                return self.cached("text", lambda: fingerprint(self.model, held.data))

        source = "" if self.recipe is None else self.recipe.source
        return Provenance(text, source, {f"silo {j}": data for j, data in enumerate(held.data)})


@dataclass(frozen=True, eq=False)
class Result(FederatedRun[Fit]):
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
        The mode at which the run began, or what it took over from another result.
    """

    _before: Mapping[str, int] | None = field(default=None, repr=False, kw_only=True)  # of a file

    ELSEWHERE = (
        "silo {} holds its own latents and parameters, and the server knows nothing of them. Ask "
        "there, or run all silos in one process."
    )

    @property
    def double(self) -> bool:
        """Whether the fit was computed in double precision."""
        return self._fit.double

    @property
    def num_silos(self) -> int:
        """Return how many silos took part."""
        return self._fit.plan.num_silos

    @property
    def num_parties(self) -> int:
        """Return the number of silos."""
        return self.num_silos

    @property
    def num_globals(self) -> int:
        """Return the length of the flat vector of global latents."""
        return self._fit.model.dim

    @property
    def sizes(self) -> list[Sizes]:
        """Return the rows of each silo plate at each silo, of a run in one process."""
        return list(self._fit.sizes)

    @property
    def plan(self) -> Plan:
        """Return the plan from which server and silos have built."""
        return self._fit.plan

    @property
    @in_own_precision
    def communication(self) -> Communication:
        """Return what this run has cost in bytes down to the silos and up; prints as a table.

        Of a run that goes on from another's state, what it has cost itself.
        """
        data = self.plan.template() if self._silos is None else self._silos.data[0]
        rounds, number, before = len(self.losses), self.num_silos, self._exchanged_before
        return communication(self._fit.built, data, number, rounds, before)

    @property
    def _exchanged_before(self) -> Mapping[str, int]:
        """Return how often each exchange took place before the first round of this run."""
        if self._before is not None:
            return self._before
        goes_on = int(self.state.round) > len(self.losses)
        return {} if goes_on else self._fit.built.exchanged_before(self.start)

    @cached_property
    @in_own_precision
    def certificate(self) -> Any:
        """Return the fit's importance correction with default settings, computed once.

        A :class:`numpyro_fed.Corrected`, or in words why there is none.
        """
        try:
            return self._fit.certify(jax.random.key(0), self)
        except (ValueError, NonFiniteError) as error:
            return str(error)

    @property
    def trusted(self) -> bool:
        """Whether means and sds of the globals are right to a tenth of an sd.

        Judged by the importance correction, with no pooled data: its weights have no heavy tail,
        and its means and sds are those of the fit (:attr:`Corrected.fit_trusted`).
        """
        return not isinstance(self.certificate, str) and self.certificate.fit_trusted

    def report(self, *, certificate: bool = True) -> str:
        """Say in words how the run ended and whether the fit can be trusted.

        Without the ``certificate``, which takes an exchange, only how the run ended.
        """
        if not certificate:
            return self._course()
        found = self.certificate
        words = f"No certificate: {found}" if isinstance(found, str) else found.report()
        return f"{self._course()}\n{words}"

    @property
    @in_own_precision
    def params(self) -> dict[str, Any]:
        """Shared parameters on their own supports, by name; the globals' guide as ``"guide"``."""
        shared = self.shared
        guide = self._fit.guide.globals.in_z(shared.frame, shared.guide)
        return {**self._fit.model.constrain_theta(shared.theta), "guide": guide}

    @in_own_precision
    def silo_params(self, silo: int) -> dict[str, Any]:
        """Silo ``j``'s private parameters on their own supports, and its guide as ``"guide"``."""
        private = self._fit.model.constrain_theta(self.private_parameters(silo))
        return {**private, "guide": self.private(silo).guide}

    @in_own_precision
    def private_parameters(self, silo: int) -> dict[str, Any]:
        """Silo ``j``'s private parameters, unconstrained."""
        return self._real_private(silo, self.private(silo).theta)

    @in_own_precision
    def sample_posterior(self, key: Array, n: int, *, silo: int | None = None) -> dict[str, Array]:
        """Draw from the fitted posterior.

        Parameters
        ----------
        key : jax.Array
        n : int
            Number of draws, the leading axis of every site.
        silo : int, optional
            Also draw this silo's locals, each given the same globals that come without it. Under a
            locally enhanced bound they are resampled by their weights.

        Returns
        -------
        dict of str to array
            Latent and deterministic sites on their own supports.
        """
        z_G, _ = self.draw_globals(key, n)
        return self.sites_at(jax.random.fold_in(key, 1), z_G, silo, self._fit.posterior)

    @in_own_precision
    def sites_at(
        self, key: Array, z_G: Array, silo: int | None, posterior: Posterior
    ) -> dict[str, Array]:
        """Sites at given draws of the globals (n, dim); a silo's locals are drawn given these."""
        sites = posterior.constrain_globals(self.shared.theta, z_G)
        if silo is None:
            return sites
        return sites | self._sample_locals(key, z_G, silo, posterior)

    @in_own_precision
    def draw_globals(self, key: Array, n: int) -> tuple[Array, Array]:
        """Unconstrained draws ``z_G`` (n, dim) and their log densities (n,) under the guide."""
        return self._fit.posterior.draw_globals(jax.random.fold_in(key, 0), self.shared, n)

    def _sample_locals(
        self, key: Array, z_G: Array, silo: int, posterior: Posterior
    ) -> dict[str, Array]:
        held = self._held(silo)
        shared, private = self.shared, self.private(silo)
        padded = held.at(silo, [batch.data for batch in held.batches])
        theta = {**shared.theta, **private.theta}
        seen = private.recentred(posterior.coordinates(shared, z_G))
        key = jax.random.fold_in(key, silo)
        z_L = posterior.draw_locals(key, theta, private.guide, z_G, seen, padded)
        z_L = real_rows(z_L, self._fit.sizes[silo], len(z_G))
        theta = {**shared.theta, **self._real_private(silo, private.theta)}
        data = held.data[silo]
        return posterior.constrain_locals(theta, z_G, z_L, data)

    def private(self, silo: int) -> Private:
        """Return what never leaves of a silo's state, padded rows included."""
        return self._fit.algorithm.private(self._silo_state(silo))

    def _real_private(self, silo: int, private: dict[str, Any]) -> dict[str, Any]:
        """Return private parameters without what belongs to padded rows."""
        key, data = jax.random.key(0), self._held(silo).data[silo]
        shapes = jax.eval_shape(self._fit.model.init_private, key, data)
        return jax.tree.map(lambda a, s: a[tuple(map(slice, s.shape))], private, shapes)

    @property
    def guide(self) -> Callable[..., None]:
        """The globals' posterior as a NumPyro guide, for ``numpyro.infer.Predictive``.

        ``Predictive(model, guide=result.guide, params=result.params, num_samples=100)`` draws the
        globals from it, and whatever is local (to new rows, say) from the model.
        """
        return self._as_guide(lambda key: self.sample_posterior(key, 1), None)

    def guide_at(self, silo: int) -> Callable[..., None]:
        """The posterior of the globals and of one silo's locals as a NumPyro guide."""
        return self._as_guide(lambda key: self.sample_posterior(key, 1, silo=silo), silo)

    def _as_guide(
        self, draw: Callable[[Array], dict[str, Array]], silo: int | None
    ) -> Callable[..., None]:
        latents = {
            s.name
            for s in self._fit.model.sites
            if s.kind == "latent" and (s.plate is None or silo is not None)
        }

        check = new_data_check(self._fit.model.text, silo)

        def guide(*args: object, **kwargs: object) -> None:
            check(*args, **kwargs)
            key = numpyro.prng_key()
            with numpyro.handlers.block():  # drawing runs the model's text, which nobody is to see
                drawn = draw(key)
            for name, value in drawn.items():
                if name in latents:
                    point = dist.Delta(value[0], event_dim=jnp.ndim(value[0]))
                    numpyro.sample(name, point)

        return guide

    def to_arviz(
        self, key: Array | None = None, num_samples: int = 1_000, *, silo: int | None = None
    ) -> Any:
        """Return posterior draws for ArviZ: a ``DataTree``, or ``InferenceData`` before ArviZ 1.

        Needs the extra ``examples``.
        """
        return to_arviz(partial(self.sample_posterior, silo=silo), key, num_samples)

    def saved_run(self) -> SavedRun:
        """Return the run as it goes into a file."""
        recipe = self._fit.recipe
        description = {
            **self._fit.description(),
            "before": dict(self._exchanged_before),
            "recipe": None if recipe is None else recipe.description(),
        }
        return SavedRun(description, self.losses, self.state)
