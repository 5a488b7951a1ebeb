"""The pure functions that a method builds for silos with rows, and the rounds that begin a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round
from numpyro_fed.algorithms.mode import ModeSearch
from numpyro_fed.algorithms.pvi.families import Globals
from numpyro_fed.algorithms.pvi.states import Settings
from numpyro_fed.bounds import Bound, bound_of
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.objectives import ELBO, Objective
from numpyro_fed.results.base import BuiltRun
from numpyro_fed.runtime.schedule import Schedule


class Factors(NamedTuple):
    """The parts that PVI and its family have besides those of all methods.

    Attributes
    ----------
    globals : Globals
        The exponential family of the globals.
    settings : Settings
    conjugate : bool
        Whether the likelihood is conjugate to the family.
    loss, divergence : bool
        Whether a loss stands in the place of the log density, and whether a divergence is not KL.
    evaluation : Round
        The round that evaluates the expected log likelihood at the posterior.
    """

    globals: Globals
    settings: Settings
    conjugate: bool
    loss: bool
    divergence: bool
    evaluation: Round


class StartRounds(NamedTuple):
    """The rounds by which a run begins.

    Attributes
    ----------
    search : FederatedAlgorithm
        For the mode: its first states and exchanges.
    mode : ModeSearch or None
        The program that asks these exchanges; None where there are too many globals for Hessians.
    curvature_round : Round or None
        Checks that the density falls in all directions from the mode, which a run does where a
        prior is flat; None where there are too many globals for it.
    begin : Round
        Leads from the states of the search to the first states of the run.
    effects : (c,) int array
        Coordinates that the search integrates out.
    """

    search: FederatedAlgorithm[Any, Any]
    mode: ModeSearch | None
    curvature_round: Round | None
    begin: Round
    effects: np.ndarray


@runtime_checkable
class Searched(Protocol):
    """The mode at which a search ended."""

    num_exchanges: int
    converged: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Built(BuiltRun):
    """All that a method builds from a model whose silos hold rows.

    Attributes
    ----------
    model, guide, objective, without_start
    schedule : Schedule or None
        None where all silos take part in every round.
    draws : dict of str to int
        ``K`` for each silo plate that has latents, or its nodes of quadrature.
    factors : Factors or None
    start : StartRounds or None
        None where a run begins at ``algorithm``'s own first state.
    protected : str
        Why silos answer no exchange but those of the run; empty where they do.
    """

    model: FederatedModel
    without_start: Callable[[], tuple[Plan, Built]] | None = None
    guide: Guide
    objective: Objective = field(default_factory=ELBO)
    schedule: Schedule[Any] | None = None
    draws: dict[str, int] = field(default_factory=dict)
    factors: Factors | None = None
    start: StartRounds | None = None
    protected: str = ""

    @cached_property
    def bound(self) -> Bound:
        """Return a silo's term of the objective, from which its locals are drawn."""
        return bound_of(self.model, self.guide, self.objective)

    @property
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states a run begins with."""
        return self.algorithm if self.start is None else self.start.search

    @property
    def search_rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the search for a start."""
        if self.start is None:
            return ()
        checks = () if self.start.curvature_round is None else (self.start.curvature_round,)
        return (*self.start.search.opening, self.start.search.round, *checks, self.start.begin)

    @property
    def later_rounds(self) -> tuple[Round, ...]:
        """Return the evaluation of PVI, if silos answer it, or no round."""
        return () if self.factors is None or self.protected else (self.factors.evaluation,)

    def visits(self, num_silos: int) -> int:
        """Return the number of visits in a round, over all silos."""
        return num_silos if self.schedule is None else self.schedule.steps * self.schedule.size

    @property
    def curvature_round(self) -> Round | None:
        """Return the check of the curvature that follows a search, if a prior is flat."""
        return (
            self.start.curvature_round if self.start is not None and self.model.improper else None
        )

    @property
    def start_paths(self) -> tuple[tuple[Round, ...], ...]:
        """Return the rounds before the first one; the check of the curvature is its own path."""
        if self.start is None:
            return (self.opening,)
        search = self.start.search
        path = (*search.opening, search.round, self.start.begin, *self.algorithm.opening)
        return (path,) if self.curvature_round is None else (path, (self.curvature_round,))

    def exchanged_before(self, start: object) -> dict[str, int]:
        """Return how often each exchange took place before the first round, by name.

        ``start`` is where the run began; it did not go on from the state of another run.
        """
        times = {round_.name: 1 for round_ in self.algorithm.opening}
        if self.start is None or not isinstance(start, Searched):
            return {x.name: 0 for x in self.search_rounds} | times
        checked = self.curvature_round is not None and start.converged
        opening = self.start.search.opening
        times |= {r.name: 1 for r in (*opening, self.start.begin)}
        if self.start.curvature_round is not None:
            times |= {self.start.curvature_round.name: int(checked)}
        # A mode counts all exchanges: the opening of its search, the search, the check, and the one
        # that begins the run.
        num_search = start.num_exchanges - len(opening) - 1 - int(checked)
        return times | {x.name: num_search for x in self.start.search.round.exchanges}
