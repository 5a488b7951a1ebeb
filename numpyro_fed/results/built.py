"""The pure functions that a method builds for silos with rows, and the rounds that begin a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round, asked_directly
from numpyro_fed.algorithms.curvature_check import CurvatureCheck
from numpyro_fed.algorithms.mode import ModeSearch
from numpyro_fed.algorithms.mode_wide import WideSearch
from numpyro_fed.algorithms.pvi.families import Globals
from numpyro_fed.algorithms.pvi.states import Settings
from numpyro_fed.bounds import Bound, bound_of
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.objectives import ELBO, Objective
from numpyro_fed.results.base import BuiltRun
from numpyro_fed.results.mode import Mode
from numpyro_fed.runtime.schedule import Schedule


class Factors(NamedTuple):
    """The parts that PVI and its family have besides those of all methods.

    ``conjugate`` says whether the likelihood is conjugate to the family of the globals, ``loss``
    whether a loss stands in the place of the log density, ``divergence`` whether one is not KL.
    ``evaluation`` is the round that evaluates the expected log likelihood at the posterior.
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
    search : ModeSearch or WideSearch
        For the mode; the second where there are too many globals for Hessians.
    algorithm : FederatedAlgorithm
        Its first states and exchanges.
    check : CurvatureCheck or None
        Whether the density falls in all directions from the mode, which a run asks where a prior is
        flat; None where there are too many globals for it.
    begin : Round
        Leads from the states of the search to the first states of the run.
    effects : (c,) int array
        Coordinates that the search integrates out.
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
        return () if self.factors is None or self.protected else (self.factors.evaluation,)

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
