"""What methods for rows and for columns share: rounds that are run, results, saved fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from jax import Array

from numpyro_fed.errors import CallbackError, Interrupted, NonFiniteError, positive_int
from numpyro_fed.results.run import FederatedRun, Ready, Silos
from numpyro_fed.results.saving import load_state
from numpyro_fed.runtime.drive import Failure, Run, Watcher, drive
from numpyro_fed.runtime.host import host
from numpyro_fed.runtime.progress import Progress
from numpyro_fed.runtime.simulation import simulation
from numpyro_fed.runtime.stack import Runtime, ServerData, State

QUICK = partial(simulation, quick=True)
RUNTIMES: dict[str, Callable[..., Runtime]] = {
    "simulation": simulation,
    "quick": QUICK,
    "host": host,
}
SEARCHES: dict[str, Callable[..., Runtime]] = {**RUNTIMES, "simulation": QUICK}

Outcome = TypeVar("Outcome", bound=FederatedRun[Any])


@dataclass(frozen=True)
class RunOptions(Generic[Outcome]):
    """How a run goes on from its first state: for how long, and who looks at it.

    The fields are what :meth:`SFVI.run` documents under these names.
    """

    num_rounds: int
    server_data: ServerData
    progress_bar: bool | Progress
    stop: str | None
    callback: Callable[[Outcome], object] | None = None
    every: int = 100

    def __post_init__(self) -> None:
        positive_int("num_rounds", self.num_rounds)
        positive_int("every", self.every)
        if self.stop not in (None, "converged"):
            raise ValueError(f"stop={self.stop!r}: expected 'converged' or None.")


class FederatedMethod(ABC, Generic[Ready, Outcome]):
    """A federated method whose silos may hold rows or columns."""

    @property
    @abstractmethod
    def hides_by_noise(self) -> bool:
        """Whether silos add noise to what they send, of a key that they keep to themselves."""

    @abstractmethod
    def result_of(
        self, run: Run, fit: Ready, hosted: Silos | None, *, quiet: bool = False
    ) -> Outcome:
        """Return the result of a run; ``run.log`` is None for what was loaded.

        ``quiet`` is about one that goes on.
        """

    def sends_unhidden(self, name: str) -> bool:
        """Return whether an exchange sends without noise what noise hides elsewhere."""
        return False

    def finished(
        self, run: Run, fit: Ready, hosted: Silos | None, start: object, *, quiet: bool = False
    ) -> Outcome:
        """Return the result of a run that began at ``start``."""
        result = self.result_of(run, fit, hosted, quiet=quiet)
        return replace(result, start=start, ended=run.ended)

    def _loaded(
        self, path: str | Path, fit: Ready, hosted: Silos, part: str = ""
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return one of the runs of a file, by its name there, and what else is said of it."""
        like, made = fit.initial_state(hosted), fit.provenance(hosted)
        losses, state, said = load_state(path, fit.description(), like, made, part)
        return self.result_of(Run(state, losses, None, None), fit, hosted), said

    def _run_rounds(
        self,
        fit: Ready,
        hosted: Silos | None,
        key: Array,
        state: State,
        start: object,
        course: RunOptions[Outcome],
    ) -> Outcome:
        """Run rounds and return their result, or raise with it."""
        callback = course.callback

        def look(run: Run) -> bool:
            return _called(callback, self.finished(run, fit, hosted, start, quiet=True))

        run = drive(
            fit.runtime,
            key,
            state,
            () if hosted is None else hosted.batches,
            course.num_rounds,
            course.progress_bar,
            course.server_data,
            stop=course.stop is not None,
            watcher=None if callback is None else Watcher(look, course.every),
            keep=True,
        )
        quiet = run.ended == "interrupted"
        return _result_or_error(self.finished(run, fit, hosted, start, quiet=quiet), run)


def _result_or_error(result: Outcome, run: Run) -> Outcome:
    """Return the result, or raise an error that carries it."""
    if run.ended == "interrupted":
        rounds = int(run.state.round)
        raise Interrupted(
            f"interrupted; the last finished round is {rounds}. What was computed is in the "
            "error's .result: error.result.save(path) keeps it, and "
            "run(..., init_state=error.result.state) goes on.",
            result=result,
        )
    if run.failure is None:
        return result
    if run.refused is not None:
        run.refused.result = result
        raise run.refused
    raise _non_finite(result, run.failure)


def _non_finite(result: FederatedRun[Any], failure: Failure) -> NonFiniteError:
    where = f"at silo {', '.join(map(str, failure.silos))}" if failure.silos else "at the server"
    return NonFiniteError(
        f"the bound turned NaN or infinite in round {failure.round}, {where}. The last good state "
        "is in the error's .result. A smaller step, gradient clipping (optax.chain("
        "optax.clip_by_global_norm(10.0), ...)), more particles or float64 usually help; otherwise "
        "look at the data and the supports of the sites there.",
        result=result,
        round=failure.round,
        silos=failure.silos,
    )


def _called(callback: Callable[[Outcome], object] | None, result: Outcome) -> bool:
    """Return what a callback says: whether the run should end."""
    try:
        return bool(callback and callback(result))
    except Exception as error:
        rounds = int(result.state.round)
        raise CallbackError(
            f"the callback raised {type(error).__name__} after round {rounds}: {error}. What it "
            "was shown is in the error's .result; run(..., init_state=error.result.state) goes on.",
            result=result,
        ) from error
