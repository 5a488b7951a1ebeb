"""What a method makes of a text whose silos hold rows: pure functions, and what crosses in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round
from numpyro_fed.algorithms.pvi.families import Globals
from numpyro_fed.algorithms.pvi.states import Settings
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.objectives import SiloBound
from numpyro_fed.results.run import BuiltRun
from numpyro_fed.runtime.schedule import Schedule


class Factors(NamedTuple):
    """All that a fit by factors knows besides: their family, its settings, one more evaluation.

    ``loss`` and ``divergence`` say whether it is under a loss in the place of the log density, and
    under a divergence other than KL.
    """

    globals: Globals
    settings: Settings
    conjugate: bool
    loss: bool
    divergence: bool
    evaluation: Round


class Start(NamedTuple):
    """The rounds by which a run begins.

    Attributes
    ----------
    search : FederatedAlgorithm
        For the mode.
    around : Round or None
        A look around, where a prior is flat; None where globals are too many for it.
    begin : Round
        From the search's states to the first ones.
    effects : (c,) int array
        Coordinates that the search integrates out.
    """

    search: FederatedAlgorithm[Any, Any]
    around: Round | None
    begin: Round
    effects: np.ndarray


@runtime_checkable
class Searched(Protocol):
    """A mode that a search has found."""

    num_exchanges: int
    converged: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Built(BuiltRun):
    """All that a method makes of a text whose silos hold rows.

    Attributes
    ----------
    model, guide, without_start
    schedule : Schedule or None
        None where all silos take part in every round.
    draws : dict of str to int
        ``K`` for each silo plate that has latents.
    factors : Factors or None
    start : Start or None
        None where a run begins at ``algorithm``'s own first state.
    """

    model: FederatedModel
    without_start: Callable[[], tuple[Plan, Built]] | None = None
    guide: Guide
    schedule: Schedule[Any] | None = None
    draws: dict[str, int] = field(default_factory=dict)
    factors: Factors | None = None
    start: Start | None = None

    @cached_property
    def bound(self) -> SiloBound:
        """Return a silo's term of the bound."""
        return SiloBound(self.model, self.guide, self.draws)

    @property
    def first(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states come first."""
        return self.algorithm if self.start is None else self.start.search

    @property
    def searching(self) -> tuple[Round, ...]:
        """Return the rounds that find where to start."""
        if self.start is None:
            return ()
        looks = () if self.start.around is None else (self.start.around,)
        return (self.start.search.round, *looks, self.start.begin)

    @property
    def further(self) -> tuple[Round, ...]:
        """Return the evaluation of a fit by factors."""
        return () if self.factors is None else (self.factors.evaluation,)

    def visits(self, num_silos: int) -> int:
        """Return how many visits all silos together receive in a round."""
        return num_silos if self.schedule is None else self.schedule.steps * self.schedule.size

    @property
    def around(self) -> Round | None:
        """Return the look around that follows a search, where a prior is flat."""
        return self.start.around if self.start is not None and self.model.improper else None

    @property
    def paths(self) -> tuple[tuple[Round, ...], ...]:
        """Return the rounds before the first one; by itself the look around, if there is one."""
        if self.start is None:
            return (self.opening,)
        path = (self.start.search.round, self.start.begin, *self.algorithm.opening)
        return (path,) if self.around is None else (path, (self.around,))

    def exchanged_before(self, start: object) -> dict[str, int]:
        """Return how often each exchange took place before the first round of a run that began at
        ``start``, and not at the state of another run.
        """
        times = {round_.name: 1 for round_ in self.algorithm.opening}
        if self.start is None or not isinstance(start, Searched):
            return {x.name: 0 for x in self.searching} | times
        looked = self.around is not None and start.converged
        times |= {self.start.begin.name: 1}
        if self.start.around is not None:
            times |= {self.start.around.name: int(looked)}
        number = start.num_exchanges - 1 - int(looked)
        return times | {x.name: number for x in self.start.search.round.exchanges}
