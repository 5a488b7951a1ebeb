"""What a method builds from a model and a plan, and what it compiles for silos of certain shapes.

:class:`Built` has the pure functions of a method, for silos that hold rows or columns, and
:class:`CompiledMethod` the programs made of them. The result of a run keeps it as ``_fit``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from numpyro_fed.basics.errors import SavedStateError
from numpyro_fed.basics.programs import is_double, precision
from numpyro_fed.data.silo_data import SiloData, Sizes, signature
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.objectives import ELBO, Objective
from numpyro_fed.guides.silo_bounds import bound_of
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.posterior.saving import MethodSpec, Provenance
from numpyro_fed.pvi.server import PartitionedVI
from numpyro_fed.rounds.exchange import FederatedAlgorithm, Round, unknown_exchange
from numpyro_fed.rounds.messages import BEGINNINGS, GO_ON, WITHOUT_START, Crossings, crossings
from numpyro_fed.rounds.runtime import Runtime, Single, State
from numpyro_fed.rounds.schedules import Schedule
from numpyro_fed.rounds.silos import ServerData, Silos
from numpyro_fed.search.mode import CurvatureCheck, Mode
from numpyro_fed.search.mode_search import ModeSearch
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts, Plan
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.vertical.parties import VerticalAlgorithm
from numpyro_fed.vertical.search import VerticalSearch
from numpyro_fed.weigh.integration import Integration

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
    leads from the states of the search to the first ones of the run.
    """

    search: ModeSearch[Any, Any]
    algorithm: FederatedAlgorithm[Any, Any]
    check: CurvatureCheck | None
    begin: Round

    @property
    def checks(self) -> tuple[Round, ...]:
        """Return the exchange of the check, if there is one, as other parties know it."""
        return () if self.check is None else (Round((self.check.exchange,)),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Built:
    """All that a method builds from a model and a plan: pure functions, without data.

    ``schedule`` is None where all silos take part in every round. ``draws`` has ``K`` for each silo
    plate that has latents, or its nodes of quadrature. ``start`` is None where a run begins at
    ``algorithm``'s own first state; ``without_start`` builds the same for a run whose search has
    found no mode. ``protected`` says why silos answer no exchange but those of the run; empty where
    they do. Where clients hold columns, ``parties`` has the models and guides of all of them,
    ``model`` and ``guide`` are the server's, and ``settings`` are those that a saved state must
    agree with.
    """

    model: FederatedModel
    guide: Guide
    algorithm: FederatedAlgorithm[Any, Any]
    without_start: Callable[[], tuple[Plan, Built]] | None = None
    objective: Objective = field(default_factory=ELBO)
    schedule: Schedule | None = None
    draws: dict[str, int] = field(default_factory=dict)
    factors: PartitionedVI | None = None
    start: StartRounds | None = None
    protected: str = ""
    parties: VerticalAlgorithm | None = None
    search: VerticalSearch | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = Counter(exchange.name for round_ in self.rounds for exchange in round_.exchanges)
        # A silo in another process knows what it is asked for by the name alone.
        taken = sorted(name for name, n in times.items() if n > 1 or name in (*BEGINNINGS, GO_ON))
        if taken:
            raise ValueError(
                f"the exchange {taken[0]!r} shares its name with another one of the method or with "
                "a message by which a run begins. Give each exchange a name of its own."
            )

    @cached_property
    def row_checks(self) -> RowChecks:
        """Return the question whether rows stand alone, of the model."""
        return RowChecks(self.model)

    @property
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states a run begins with: that of a search, or of the run."""
        begun = self.start or self.search
        return self.algorithm if begun is None else begun.algorithm

    @property
    def search_rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the search for a start."""
        if self.start is None:
            return () if self.search is None else (self.search.algorithm.round,)
        opening, search = self.start.algorithm.opening, self.start.algorithm.round
        return (*opening, search, *self.start.checks, self.start.begin)

    @property
    def opening(self) -> tuple[Round, ...]:
        """Return the rounds before the algorithm's own first one."""
        return (*self.search_rounds, *self.algorithm.opening)

    def sampler(self, settings: Mapping[str, Any]) -> Sampler:
        """Return the sampling functions of a fit, or of a correction from its settings.

        Locals are drawn by a silo's term of the objective, or as the correction integrates them.
        """
        if "nodes" not in settings:
            bound = bound_of(self.model, self.guide, self.objective)
            return Sampler(self.model, self.guide, bound)
        integration = Integration.of(settings)
        bound = integration.bound(self.model, self.guide)
        return Sampler(self.model, self.guide, bound, integration.settings)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return all rounds of a run, and the evaluation of PVI, if silos answer it."""
        rounds = (*self.opening, self.algorithm.round)
        if self.factors is None or self.protected:
            return rounds
        return (*rounds, Round((self.factors.evaluation,)))

    def opening_exchanges(self, start: object) -> dict[str, int]:
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

    def messages(
        self, data: SiloData, server_data: ServerData = None, *, silo: str = "silo"
    ) -> Crossings:
        """Return all arrays that cross between the server and a silo, each exchange once."""
        path, first = self.opening, self.first_algorithm
        if self.start is not None:
            search = self.start.algorithm
            path = (*search.opening, search.round, self.start.begin, *self.algorithm.opening)
        runs = [("start", first, path), ("round", self.algorithm, (self.algorithm.round,))]
        # The check of the curvature is a path of its own.
        if self.start is not None and self.start.checks and self.model.improper:
            runs.insert(1, ("start", first, self.start.checks))
        tables = [crossings(*one, data, server_data, silo=silo) for one in runs]
        return tables[0]._replace(rows=tuple(row for part in tables for row in part.rows))

    def round_of(self, name: str) -> tuple[Round, FederatedAlgorithm[Any, Any]]:
        """Return the round that declares the exchange ``name``, and the algorithm of its states."""
        for round_ in self.rounds:
            if name in {x.name for x in round_.exchanges}:
                searches = round_.name in {x.name for x in self.search_rounds}
                return round_, self.first_algorithm if searches else self.algorithm
        raise unknown_exchange(name)


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledMethod:
    """A method that was built for silos of certain shapes, ready to run.

    ``reach(algorithm, schedule, begin=)`` makes runtimes, and ``checks`` are those on the values of
    the data. ``sizes`` are the rows of each plate at each silo, ``recipe`` how to rebuild the
    method from a file: none of these for silos elsewhere, which know the method by the id
    ``asked_as``. ``server_data`` are the server's where clients hold columns. ``compiled`` has
    further compiled functions, by a name for what they do.
    """

    built: Built
    runtime: Runtime
    plan: Plan
    reach: Callable[..., Runtime]
    checks: RowChecks
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    double: bool = field(default_factory=is_double)
    sizes: tuple[Sizes, ...] = ()
    recipe: MethodSpec | None = None
    asked_as: str = ""
    server_data: SiloData | None = None

    @property
    def algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm that is run."""
        return self.built.algorithm

    def quick_round(self, round_: Round, runtime: Runtime | None = None) -> Single:
        """Return a single round for little work, compiled quickly and once for each name.

        ``runtime`` is another one than the run's, such as that of the search.
        """
        return self.cached(round_.exchanges[0].id, lambda: (runtime or self.runtime).single(round_))

    def cached(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return the object of this name, made at its first use."""
        if name not in self.compiled:
            self.compiled[name] = make()
        return self.compiled[name]

    def check_state(self, state: object, silos: Silos) -> State:
        """Return ``state`` itself; raise an error if it does not fit the method and silos."""
        like = self.runtime.like or self.runtime.init
        expected = jax.eval_shape(like, jax.random.key(0), silos.batches)
        if not isinstance(state, State):
            raise TypeError(f"init_state must be a result's .state, got {type(state).__name__}.")
        shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), x) for x in (state, expected)]
        if shapes[0] != shapes[1]:
            raise SavedStateError(
                "init_state comes from another model, guide, optimiser, runtime, precision or "
                "layout of silos. Pass the .state of a run with the same settings and silos."
            )
        return state

    @cached_property
    def sampler(self) -> Sampler:
        """Return the compiled sampling functions of the fit."""
        return self.built.sampler({})

    @cached_property
    def without_start(self) -> CompiledMethod | None:
        """Return the fit of runs that found no mode to begin at, if a mode is searched for."""
        if (build := self.built.without_start) is None:
            return None
        plan, built = build()
        runtime = self.reach(built.algorithm, built.schedule, begin=WITHOUT_START)
        return replace(self, plan=plan, built=built, runtime=runtime, compiled={})

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
            **integration.settings,
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

    def description(self) -> dict[str, Any]:
        """Return the settings, sites and sizes that a saved state must agree with."""
        if self.built.parties is None:
            sites = {s.name: [s.kind, s.plate, list(s.shape), s.support] for s in self.model.sites}
            settings = {**self.plan.chosen, "draws": self.built.draws}
            return {"settings": settings, "sites": sites, "sizes": list(self.sizes)}
        whole = self.built.parties.model
        return {
            "settings": self.built.settings,
            "sites": {n: [s.kind, list(s.shape), s.support] for n, s in whole.sites.items()},
            "rows": whole.rows,
            "static": [repr(self.plan.facts.static)],
        }

    def provenance(self, hosted: Silos) -> Provenance:
        """Return the fingerprints by which a file recognises model and data."""
        source = "" if self.recipe is None else self.recipe.source
        data, parties, server = hosted.data, self.built.parties, self.server_data
        named = {f"silo {j}": silo for j, silo in enumerate(data)}
        if parties is not None and server is not None:
            named = {f"client {j}": client for j, client in enumerate(data)} | {
                "the server": server
            }

        def made() -> str:
            if parties is None or server is None:
                return fingerprint(self.model, data)
            whole, total = parties.model, np.zeros(parties.model.shape, parties.model.dtype)
            pairs = [(whole.server, whole.with_total(server, total))]
            pairs += zip(whole.clients, data, strict=True)
            by_shape = {(party, signature(held)): held for party, held in pairs}
            return " ".join(fingerprint(party, [d]) for (party, _), d in by_shape.items())

        def text() -> str:
            # Half a second of tracing, needed once for a fit whose arguments keep their shapes.
            with precision(double=self.double):
                return self.cached("text", made)

        return Provenance(text, source, named)
