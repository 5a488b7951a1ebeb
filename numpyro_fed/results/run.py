"""What all methods build, run and return, whether silos hold rows or columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    FederatedAlgorithm,
    Info,
    Round,
    Shared,
    unknown_exchange,
)
from numpyro_fed.errors import DataError, NonFiniteError, SavedStateError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import Bucket
from numpyro_fed.results.arviz import to_arviz
from numpyro_fed.results.recognise import Provenance
from numpyro_fed.results.saving import SavedRun, SavedWords, save
from numpyro_fed.runtime.crossing import Crossings, crossings
from numpyro_fed.runtime.drive import failed_silos
from numpyro_fed.runtime.stack import Batches, Runtime, ServerData, Single, Stacks, State
from numpyro_fed.trees import Tree

BATCHES = 5  # of rounds, whose means show how noisy a bound is


class Silos(NamedTuple):
    """The data that silos hold: as read, in buckets, and on the device."""

    data: tuple[SiloData, ...]
    buckets: tuple[Bucket, ...]
    batches: Batches

    def place(self, silo: int) -> tuple[int, int]:
        """Return the bucket that holds a silo, and its place there."""
        for b, bucket in enumerate(self.buckets):
            if silo in bucket.silos:
                return b, bucket.silos.index(silo)
        raise IndexError(f"there is no silo {silo}: they are numbered 0 to {len(self.data) - 1}.")

    def at(self, silo: int, stacks: Sequence[Tree]) -> Tree:
        """Return what belongs to a silo, of what is stacked in buckets."""
        b, i = self.place(silo)
        return jax.tree.map(lambda a: a[i], stacks[b])


@dataclass(frozen=True, eq=False, kw_only=True)
class BuiltRun(ABC):
    """All that a method makes of a text and a plan: pure functions, and nobody's data.

    Attributes
    ----------
    algorithm : FederatedAlgorithm
    without_start : () -> (plan, BuiltRun)
        Builds the same for a run that does not begin at a mode, where a search has found none;
        None where no search is made.
    """

    algorithm: FederatedAlgorithm[Any, Any]
    without_start: Callable[[], tuple[Any, BuiltRun]] | None = None

    @property
    @abstractmethod
    def first(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states come first: a search's, or the run's own."""

    @property
    @abstractmethod
    def searching(self) -> tuple[Round, ...]:
        """Return the rounds that find where to start."""

    @property
    def opening(self) -> tuple[Round, ...]:
        """Return the rounds before the algorithm's own first one."""
        return (*self.searching, *self.algorithm.opening)

    @property
    def further(self) -> tuple[Round, ...]:
        """Return the rounds that are asked for after a run."""
        return ()

    @property
    def paths(self) -> tuple[tuple[Round, ...], ...]:
        """Return the rounds before the algorithm's own first one, as they may follow each other."""
        return (self.opening,)

    def messages(
        self, data: SiloData, server_data: ServerData = None, *, silo: str = "silo"
    ) -> Crossings:
        """Return all that crosses between the server and a silo, one exchange of each kind."""
        starts = [("start", self.first, path) for path in self.paths]
        each = [*starts, ("round", self.algorithm, (self.algorithm.round,))]
        found = [crossings(*one, data, server_data, silo=silo) for one in each]
        return found[0]._replace(rows=tuple(row for part in found for row in part.rows))

    def sender(self, round_: Round) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm from whose states a round starts."""
        searches = round_.name in {x.name for x in self.searching}
        return self.first if searches else self.algorithm

    def round_of(self, name: str) -> Round:
        """Return the round that has this exchange.

        Raises
        ------
        ModelError
            Where none has.
        """
        for round_ in (*self.opening, self.algorithm.round, *self.further):
            if name in {x.name for x in round_.exchanges}:
                return round_
        raise unknown_exchange(name)


Built = TypeVar("Built", bound=BuiltRun)
Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledMethod(ABC, Generic[Built]):
    """A method that was built for silos of certain shapes, ready to run.

    Attributes
    ----------
    built : BuiltRun
    runtime : Runtime
    compiled : dict
        What was compiled besides, by what it is for.
    """

    built: Built
    runtime: Runtime
    compiled: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm that is run."""
        return self.built.algorithm

    @abstractmethod
    def made(self, held: Silos) -> Provenance:
        """Return by what model and data are recognised in a file."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""

    def compiled_round(self, round_: Round) -> Single:
        """Return a single round, compiled once for each name."""
        return self.cached(("single", round_.name), lambda: self.runtime.single(round_))

    def quick_round(self, round_: Round, runtime: Runtime | None = None) -> Single:
        """Return a single round that is little work, compiled once for each name.

        By another ``runtime`` than that of the run where one is given, as a search's.
        """
        return self.cached(round_.name, lambda: (runtime or self.runtime).quick(round_))

    def cached(self, name: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return what was made under a name, made where it is asked for first."""
        if name not in self.compiled:
            self.compiled[name] = make()
        return self.compiled[name]

    def initial_state(self, silos: Silos) -> State:
        """Return a first state, for its structure."""
        return self.runtime.init(jax.random.key(0), silos.batches)

    def check_state(self, state: object, silos: Silos) -> State:
        """Return ``state`` itself, if it is one of this fit."""
        expected = jax.eval_shape(self.runtime.init, jax.random.key(0), silos.batches)
        if not isinstance(state, State):
            raise TypeError(f"init_state must be a result's .state, got {type(state).__name__}.")
        shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), x) for x in (state, expected)]
        if shapes[0] != shapes[1]:
            raise SavedStateError(
                "init_state comes from another model, guide, optimiser, runtime, precision or "
                "layout of silos. Pass the .state of a run with the same settings and silos."
            )
        return state


Ready = TypeVar("Ready", bound=CompiledMethod[Any])


@dataclass(frozen=True, eq=False)
class FederatedRun(ABC, Generic[Ready]):
    """The result of a run: losses, the last state, and what can be asked of them.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the bound, one number for each round of this run.
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    ended : {"rounds", "converged", "callback", "failure", "interrupted"}
        Why there are no more rounds.
    start : optional
        Where the run began, if that was at a mode or at another result.
    """

    losses: np.ndarray = field(repr=False)
    state: State = field(repr=False)
    _fit: Ready = field(repr=False)
    _silos: Silos | None = field(default=None, repr=False)  # of a run in one process
    ended: str = field(default="rounds", kw_only=True)
    start: Any = field(default=None, repr=False, kw_only=True)

    ELSEWHERE: ClassVar[str]  # what to say where a silo's own numbers are not in this process
    PARTY: ClassVar[str] = "silo"

    @property
    @abstractmethod
    def num_parties(self) -> int:
        """Return how many silos or clients took part."""

    @abstractmethod
    def sample_posterior(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the fitted posterior."""

    @property
    def shared(self) -> Shared:
        """Return shared parameters, unconstrained, and the globals' guide, known to all."""
        return self._fit.algorithm.shared(self.state.server)

    def _held(self, silo: int) -> Silos:
        """Return what silos hold, if it is in this process."""
        if self._silos is None:
            raise DataError(self.ELSEWHERE.format(silo))
        return self._silos

    def _silo_state(self, silo: int) -> Any:
        """Return a silo's state."""
        return self._held(silo).at(silo, self.state.silos)

    @property
    def _batches(self) -> Batches:
        """Return what silos of this process hold, for a round that they are asked in."""
        return () if self._silos is None else self._silos.batches

    def _asked(
        self, round_: Single, key: Array, words: str, given: ServerData = None
    ) -> tuple[Any, Stacks, Info]:
        """Return the states of server and silos after one more round, and what it reports.

        Raises
        ------
        NonFiniteError
            In these ``words``, with who is at fault in the place of ``{}``.
        """
        state, batches = self.state, self._batches
        server, silos, info, good = round_(key, state.server, state.silos, batches, given)
        if not bool(info.ok):
            bad = failed_silos(good, silos, batches)
            where = f"{self.PARTY} {', '.join(map(str, bad))}" if bad else "the server"
            number = int(state.round)
            raise NonFiniteError(words.format(where), result=self, round=number, silos=bad)
        return server, silos, info

    @property
    def settled(self) -> bool:
        """Whether the bound had stopped rising by the end of this run, as far as its noise shows.

        The last quarter of the rounds gains no more than 0.1 nat on the quarter before, or than
        three standard errors, from means of batches of rounds. Too few rounds to tell are not
        settled.
        """
        return bound_settled(self.losses)

    def _course(self) -> str:
        if self.ended == "converged":
            return f"{len(self.losses)} rounds; the run had come to rest."
        end = "had settled" if self.settled else "was still rising, or they are too few to tell"
        return f"{len(self.losses)} rounds; the bound {end}."

    def to_arviz(self, key: Array | None = None, num_samples: int = 1_000) -> Any:
        """Return posterior draws for ArviZ: a ``DataTree``, or ``InferenceData`` before ArviZ 1.

        Needs the extra ``examples``.
        """
        return to_arviz(self.sample_posterior, key, num_samples)

    def save(self, path: str | Path, *, draws: int = 0) -> None:
        """Write the fit to ``path.npz``: its state and a description, no data and no pickle.

        The file is whole or not there: a save that is cut short leaves the one before as it is.
        Read it back with :meth:`numpyro_fed.SFVI.load` or :func:`numpyro_fed.load`, which refuse
        another model and other data; for that the file has a digest of each silo's arrays, keyed
        by random bytes of its own. It also holds what silos keep to themselves, of a run in one
        process: give it to nobody who may not see that.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        draws : int
            Draws of what all may know that go into the file, for those who have neither the model
            nor the data.
        """
        words = {"ended": self.ended, "verdict": self._course(), "trusted": None}
        drawn = self.sample_posterior(jax.random.key(0), draws) if draws else {}
        save(path, SavedWords(type(self).__name__, words, drawn), self.saved_run(), self.made())

    def saved_run(self) -> SavedRun:
        """Return the run as it goes into a file."""
        return SavedRun(self._fit.description(), self.losses, self.state)

    def made(self) -> Provenance | None:
        """Return by what model and data are recognised; None where silos are elsewhere."""
        return None if self._silos is None else self._fit.made(self._silos)


def bound_settled(losses: np.ndarray | Sequence[float]) -> bool:
    """Return whether the last quarter of a course gains nothing on the quarter before.

    See :attr:`FederatedRun.settled`.
    """
    quarter = len(losses) // 4
    if quarter < 2 * BATCHES:
        return False
    size = quarter // BATCHES
    last = np.asarray(losses, np.float64)[-2 * BATCHES * size :]
    before, after = last.reshape(2, BATCHES, size).mean(2)
    error = np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / BATCHES)
    return bool(before.mean() - after.mean() <= max(0.1, 3 * error))
