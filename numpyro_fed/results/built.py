"""What a method builds for silos with rows: pure functions, and these with a runtime, a *fit*."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round, asked_directly
from numpyro_fed.algorithms.curvature_check import CurvatureCheck
from numpyro_fed.algorithms.importance.likelihood import Integration
from numpyro_fed.algorithms.mode import ModeSearch
from numpyro_fed.algorithms.mode_wide import WideSearch
from numpyro_fed.algorithms.pvi.server import PartitionedVI
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import Sizes
from numpyro_fed.model.facts import Facts, Plan
from numpyro_fed.model.fingerprint import fingerprint
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.row_checks import RowChecks
from numpyro_fed.objectives import ELBO, Bound, Objective, bound_of
from numpyro_fed.precision import is_double, precision
from numpyro_fed.results.base import BuiltRun, CompiledMethod, Silos
from numpyro_fed.results.mode import Mode
from numpyro_fed.results.sampler import Sampler
from numpyro_fed.results.saving import Provenance
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import Runtime

# Numbers of a batch of draws, for each site of the rows: a few arrays of them fit into a core's own
# memory (L2). The six cities took half the time that batches of a megabyte of numbers took.
IN_BATCH = 2**15
# Draws of a batch, at least, if it then has no more numbers than MOST_IN_BATCH. On a CPU, with
# 200,000 logistic rows, a draw in batches of 4 or 8 took half the time that it took alone, and in
# those of 32 more again.
LEAST, MOST_IN_BATCH = 4, 2**23
# Terms (draws x rows x evaluations) up to which a program is compiled with few optimisations:
# running it takes less time than optimising it would. Half or twice of it only moves that point.
FEW_TERMS = 2e7

Made = TypeVar("Made")


class StartRounds(NamedTuple):
    """The rounds by which a run begins.

    ``search`` is that for the mode (wide where there are too many globals for Hessians), with the
    first states and exchanges of ``algorithm``. ``check`` sees whether the density falls in all
    directions from the mode, where a prior is flat; None with too many globals for it. ``begin``
    leads from the states of the search to the first ones of the run. The search integrates out the
    coordinates ``effects`` (c,).
    """

    search: ModeSearch | WideSearch
    algorithm: FederatedAlgorithm[Any, Any]
    check: CurvatureCheck | None
    begin: Round
    effects: np.ndarray

    @property
    def checks(self) -> tuple[Round, ...]:
        """Return the exchange of the check, if there is one, as other parties know it."""
        return () if self.check is None else (Round((self.check.exchange,), asked_directly),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Built(BuiltRun):
    """All that a method builds from a model whose silos hold rows.

    ``schedule`` is None where all silos take part in every round. ``draws`` has ``K`` for each silo
    plate that has latents, or its nodes of quadrature. ``start`` is None where a run begins at
    ``algorithm``'s own first state. ``factors`` is PVI's algorithm. ``protected``
    says why silos answer no exchange but those of the run; empty where they do.
    """

    model: FederatedModel
    without_start: Callable[[], tuple[Plan, Built]] | None = None
    guide: Guide
    objective: Objective = field(default_factory=ELBO)
    schedule: Schedule[Any] | None = None
    draws: dict[str, int] = field(default_factory=dict)
    factors: PartitionedVI | None = None
    start: StartRounds | None = None
    protected: str = ""

    @cached_property
    def bound(self) -> Bound:
        """Return a silo's term of the objective, from which its locals are drawn."""
        return bound_of(self.model, self.guide, self.objective)

    @property
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states a run begins with."""
        return self.algorithm if self.start is None else self.start.algorithm

    @property
    def search_rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the search for a start."""
        if self.start is None:
            return ()
        opening, search = self.start.algorithm.opening, self.start.algorithm.round
        return (*opening, search, *self.start.checks, self.start.begin)

    @property
    def later_rounds(self) -> tuple[Round, ...]:
        """Return the evaluation of PVI, if silos answer it, or no round."""
        if self.factors is None or self.protected:
            return ()
        return (Round((self.factors.evaluation,), asked_directly),)

    def visits(self, num_silos: int) -> int:
        """Return the number of visits in a round, over all silos."""
        return num_silos if self.schedule is None else self.schedule.steps * self.schedule.size

    @property
    def start_paths(self) -> tuple[tuple[Round, ...], ...]:
        """Return the rounds before the first one; the check of the curvature is its own path."""
        if self.start is None:
            return (self.opening,)
        search = self.start.algorithm
        path = (*search.opening, search.round, self.start.begin, *self.algorithm.opening)
        return (path, self.start.checks) if self.model.improper and self.start.checks else (path,)

    def exchanged_before(self, start: object) -> dict[str, int]:
        """Return how often each exchange took place before the first round, by name.

        ``start`` is where the run began; it did not go on from the state of another run.
        """
        times = {round_.name: 1 for round_ in self.algorithm.opening}
        if self.start is None or not isinstance(start, Mode):
            return {x.name: 0 for x in self.search_rounds} | times
        checked = bool(self.model.improper and self.start.checks and start.converged)
        opening = self.start.algorithm.opening
        times |= {r.name: 1 for r in (*opening, self.start.begin)}
        times |= {check.name: int(checked) for check in self.start.checks}
        # A mode counts all exchanges: the opening of its search, the search, the check, and the one
        # that begins the run.
        num_search = start.num_exchanges - len(opening) - 1 - int(checked)
        return times | {x.name: num_search for x in self.start.algorithm.round.exchanges}


class MethodSpec(NamedTuple):
    """A record from which the method of a fit can be rebuilt, given the model.

    ``method`` is the name of its class, ``settings`` what is not the default, as JSON, ``lost``
    settings that JSON cannot hold (an optimiser, a function), ``source`` a hash of the model's
    source.
    """

    method: str
    settings: dict[str, Any]
    lost: tuple[str, ...]
    runtime: str
    source: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Fit(CompiledMethod[Built]):
    """A method that was built for silos that hold rows.

    ``sizes`` are the rows of each plate at each silo, ``checks`` those on the values of the data,
    ``recipe`` how to rebuild the method from a file: none of these for silos elsewhere, for which
    ``reach(algorithm, schedule, begin=)`` makes runtimes, and which know the method by the id
    ``asked_as``.
    """

    plan: Plan
    double: bool = field(default_factory=is_double)
    sizes: tuple[Sizes, ...] = ()
    checks: RowChecks | None = None
    recipe: MethodSpec | None = None
    reach: Callable[..., Runtime] | None = None
    asked_as: str = ""

    @cached_property
    def sampler(self) -> Sampler:
        """Return the compiled sampling functions of the fit."""
        return Sampler(self.model, self.guide, self.built.bound)

    def without_start(
        self, runtime_of: Callable[[FederatedAlgorithm[Any, Any], Schedule[Any] | None], Runtime]
    ) -> Fit | None:
        """Return the fit of runs that found no mode to begin at; None if no mode is searched for.

        It is built at its first use, with the runtime that ``runtime_of`` makes.
        """
        if (build := self.built.without_start) is None:
            return None
        if (found := self.compiled.get("without a start")) is None:
            plan, built = build()
            runtime = runtime_of(built.algorithm, built.schedule)
            found = replace(self, plan=plan, built=built, runtime=runtime, compiled={})
            self.compiled["without a start"] = found
        return cast(Fit, found)

    def batch_size(self, integration: Integration, num_draws: int) -> int:
        """Return how many draws of the globals a silo evaluates its likelihood at side by side."""
        rows = sum(n for _, n in self.plan.largest)  # silos are computed one after the other
        numbers = max(rows * integration.terms_at_once(self.model), 1)
        size = max(IN_BATCH // numbers, min(LEAST, MOST_IN_BATCH // numbers), 1)
        return min(num_draws, 2 ** int(math.log2(size)))

    def question(
        self,
        kind: str,
        build: Callable[..., Made],
        integration: Integration,
        num_draws: int,
        **more: int,
    ) -> Made:
        """Return a question about so many draws of the globals, made once for each settings.

        ``build(built, settings, little=)`` makes it, also at silos elsewhere; with ``little`` work
        optimising its program would take longer than running it.
        """
        settings = {
            "inner_draws": dict(integration.draws),
            "nodes": integration.nodes,
            "num_draws": num_draws,
            **more,
            "batch_size": self.batch_size(integration, num_draws),
        }
        terms = num_draws * sum(n for _, n in self.plan.total)
        little = terms * integration.work_of_row(self.model) <= FEW_TERMS
        name = kind, json.dumps(settings)
        return self.cached(name, lambda: build(self.built, settings, little=little))

    @property
    def facts(self) -> Facts:
        """Return what all silos have in common."""
        return self.plan.facts

    @property
    def model(self) -> FederatedModel:
        """Return the model, split over server and silos."""
        return self.built.model

    @property
    def guide(self) -> Guide:
        """Return the guide of globals and locals."""
        return self.built.guide

    @property
    def factors(self) -> PartitionedVI | None:
        """Return the algorithm of PVI, with its families and settings; None for others."""
        return self.built.factors

    def description(self) -> dict[str, Any]:
        """Return the settings, sites and sizes that a saved state must agree with."""
        return {
            "settings": {**self.plan.chosen, "draws": self.built.draws},
            "sites": {
                s.name: [s.kind, s.plate, list(s.shape), s.support] for s in self.model.sites
            },
            "sizes": list(self.sizes),
        }

    def provenance(self, hosted: Silos) -> Provenance:
        """Return the fingerprints by which a file recognises model and data."""

        def text() -> str:
            with precision(double=self.double):
                return self.cached("text", lambda: fingerprint(self.model, hosted.data))

        source = "" if self.recipe is None else self.recipe.source
        return Provenance(text, source, {f"silo {j}": data for j, data in enumerate(hosted.data)})
