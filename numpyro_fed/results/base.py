"""Base classes of what methods build, compile and return, for silos with rows or columns.

:class:`BuiltRun` has the pure functions of a method, :class:`CompiledMethod` adds a runtime, and
:class:`FederatedRun` is the result of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
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
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.padding import Bucket
from numpyro_fed.results.arviz import Coords, Dims, Labels, to_arviz
from numpyro_fed.results.saving import Provenance, SavedRun, SavedWords, save
from numpyro_fed.runtime.messages import BEGINNINGS, GO_ON, Crossings, crossings
from numpyro_fed.runtime.stack import Batches, Runtime, ServerData, Single, Stacks, State
from numpyro_fed.runtime.step import Asked
from numpyro_fed.runtime.supervise import failed_silos
from numpyro_fed.trees import Tree

# Batches of rounds in each quarter of a run, whose means show how noisy the bound is. Rounds are
# correlated, so that single losses would show too little noise; fewer batches estimate it badly.
NUM_BATCHES = 5


class Silos(NamedTuple):
    """The silos of a run: their data as read, in buckets, and on the device.

    Of silos in other processes there is one batch without data, and nothing else.
    """

    data: tuple[SiloData, ...]
    buckets: tuple[Bucket, ...]
    batches: Batches

    @property
    def elsewhere(self) -> bool:
        """Return whether the silos are in other processes."""
        return not self.data

    def place(self, silo: int) -> tuple[int, int]:
        """Return the number of a silo's bucket and the silo's row in it."""
        for b, bucket in enumerate(self.buckets):
            if silo in bucket.silos:
                return b, bucket.silos.index(silo)
        raise IndexError(f"there is no silo {silo}: they are numbered 0 to {len(self.data) - 1}.")

    def at(self, silo: int, stacks: Sequence[Tree]) -> Tree:
        """Return a silo's part of trees that are stacked by bucket."""
        b, i = self.place(silo)
        return jax.tree.map(lambda a: a[i], stacks[b])

    def data_of(self, silo: int) -> SiloData:
        """Return a silo's data, as they were read."""
        self.place(silo)
        return self.data[silo]

    def sizes_of(self, silo: int) -> Sizes:
        """Return the rows of each plate at a silo."""
        b, i = self.place(silo)
        return self.buckets[b].sizes[i]


@dataclass(frozen=True, eq=False, kw_only=True)
class BuiltRun(ABC):
    """All that a method builds from a model and a plan: pure functions, without data.

    ``without_start`` builds the same for a run whose search has found no mode; None without a
    search.
    """

    algorithm: FederatedAlgorithm[Any, Any]
    without_start: Callable[[], tuple[Any, BuiltRun]] | None = None

    def __post_init__(self) -> None:
        rounds = (*self.opening, self.algorithm.round, *self.later_rounds)
        times = Counter(exchange.name for round_ in rounds for exchange in round_.exchanges)
        # A silo in another process knows what it is asked for by the name alone.
        taken = sorted(name for name, n in times.items() if n > 1 or name in (*BEGINNINGS, GO_ON))
        if taken:
            raise ValueError(
                f"the exchange {taken[0]!r} shares its name with another one of the method or with "
                "a message by which a run begins. Give each exchange a name of its own."
            )

    @property
    @abstractmethod
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states a run begins with: that of a search, or of the run."""

    @property
    @abstractmethod
    def search_rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the search for a start."""

    @property
    def opening(self) -> tuple[Round, ...]:
        """Return the rounds before the algorithm's own first one."""
        return (*self.search_rounds, *self.algorithm.opening)

    @property
    def later_rounds(self) -> tuple[Round, ...]:
        """Return the rounds that may follow a run, such as an evaluation."""
        return ()

    @property
    def start_paths(self) -> tuple[tuple[Round, ...], ...]:
        """Return the sequences of rounds that may come before the algorithm's first one."""
        return (self.opening,)

    def messages(
        self, data: SiloData, server_data: ServerData = None, *, silo: str = "silo"
    ) -> Crossings:
        """Return all arrays that cross between the server and a silo, each exchange once."""
        starts = [("start", self.first_algorithm, path) for path in self.start_paths]
        runs = [*starts, ("round", self.algorithm, (self.algorithm.round,))]
        tables = [crossings(*one, data, server_data, silo=silo) for one in runs]
        return tables[0]._replace(rows=tuple(row for part in tables for row in part.rows))

    def round_of(self, name: str) -> tuple[Round, FederatedAlgorithm[Any, Any]]:
        """Return the round that declares the exchange ``name``, and the algorithm of its states."""
        for round_ in (*self.opening, self.algorithm.round, *self.later_rounds):
            if name in {x.name for x in round_.exchanges}:
                searches = round_.name in {x.name for x in self.search_rounds}
                return round_, self.first_algorithm if searches else self.algorithm
        raise unknown_exchange(name)


Built = TypeVar("Built", bound=BuiltRun)
Cached = TypeVar("Cached")


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledMethod(ABC, Generic[Built]):
    """A method that was built for silos of certain shapes, ready to run.

    ``compiled`` has further compiled functions, by a name for what they do.
    """

    built: Built
    runtime: Runtime
    compiled: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm that is run."""
        return self.built.algorithm

    @abstractmethod
    def provenance(self, hosted: Silos) -> Provenance:
        """Return the fingerprints by which a file recognises model and data."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Return the settings and sites that a saved state must agree with."""

    def compiled_round(self, round_: Round) -> Single:
        """Return a single round, compiled once for each name."""
        return self.cached(("single", round_.id), lambda: self.runtime.single(round_))

    def quick_round(self, round_: Round, runtime: Runtime | None = None) -> Single:
        """Return a single round for little work, compiled quickly and once for each name.

        ``runtime`` is another one than the run's, such as that of the search.
        """
        return self.cached(round_.id, lambda: (runtime or self.runtime).quick(round_))

    def cached(self, name: Hashable, make: Callable[[], Cached]) -> Cached:
        """Return the object of this name, made at its first use."""
        if name not in self.compiled:
            self.compiled[name] = make()
        return self.compiled[name]

    def initial_state(self, silos: Silos) -> State:
        """Return some first state, whose structure and shapes all states have."""
        return self.runtime.init(jax.random.key(0), silos.batches)

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
        The start of the run, if that was a mode or another result.
    """

    losses: np.ndarray = field(repr=False)
    state: State = field(repr=False)
    _fit: Ready = field(repr=False)
    _silos: Silos = field(repr=False)
    ended: str = field(default="rounds", kw_only=True)
    start: Any = field(default=None, repr=False, kw_only=True)

    ELSEWHERE: ClassVar[str]  # what to say where a silo's own numbers are not in this process
    PARTY: ClassVar[str] = "silo"

    @property
    @abstractmethod
    def num_parties(self) -> int:
        """Return the number of silos or clients."""

    @abstractmethod
    def sample_posterior(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the fitted posterior."""

    @property
    def shared(self) -> Shared:
        """Return the part of the server's state that all parties may know.

        It holds shared parameters, unconstrained, and the guide of the globals.
        """
        return self._fit.algorithm.shared(self.state.server)

    def _hosted(self, silo: int) -> Silos:
        """Return the silos' data; raise an error if silos are in other processes."""
        if self._silos.elsewhere:
            raise DataError(self.ELSEWHERE.format(silo))
        return self._silos

    def _silo_state(self, silo: int) -> Any:
        """Return a silo's state."""
        return self._hosted(silo).at(silo, self.state.silos)

    def _run_round_once(
        self, round_: Single, key: Array, message: str, server_data: ServerData = None
    ) -> tuple[Any, Stacks, Info]:
        """Run one more round, and return the states of server and silos and the report.

        An error has the text ``message``, in which ``{}`` stands for the party at fault.
        """
        state, batches = self.state, self._silos.batches
        server, silos, info, good = jax.block_until_ready(
            round_(key, state.server, state.silos, batches, server_data)
        )
        if not bool(info.ok):
            raise self.unusable(message, failed_silos(good, silos, batches))
        return server, silos, info

    def _asking(self, key: Array) -> Asked:
        """Return the function that asks all silos, whose states stay as they are."""
        transport = self._fit.runtime.transport(self._silos.batches)
        return Asked(transport, key, self.num_parties, self.state.silos)

    def unusable(self, message: str, silos: tuple[int, ...] = ()) -> NonFiniteError:
        """Return the error for numbers that cannot be used, of silos or of the server."""
        where = f"{self.PARTY} {', '.join(map(str, silos))}" if silos else "the server"
        number = int(self.state.round)
        return NonFiniteError(message.format(where), result=self, round=number, silos=silos)

    @property
    def settled(self) -> bool:
        """Whether the bound had stopped rising by the end of this run, as far as its noise shows.

        The last quarter of the rounds gains no more than 0.1 nat on the quarter before, or than
        three standard errors, from means of batches of rounds. Too few rounds to tell are not
        settled.
        """
        quarter = len(self.losses) // 4
        # A batch has at least two rounds, so that 40 rounds are the fewest that can be judged.
        if quarter < 2 * NUM_BATCHES:
            return False
        size = quarter // NUM_BATCHES
        last = np.asarray(self.losses, np.float64)[-2 * NUM_BATCHES * size :]
        previous, after = last.reshape(2, NUM_BATCHES, size).mean(2)
        # At least 0.1 nat: a bound may be so quiet that
        # three of its standard errors are next to nothing.
        error = np.sqrt((previous.var(ddof=1) + after.var(ddof=1)) / NUM_BATCHES)
        return bool(previous.mean() - after.mean() <= max(0.1, 3 * error))

    def _run_summary(self) -> str:
        if self.ended == "converged":
            return f"{len(self.losses)} rounds; the run had come to rest."
        end = "had settled" if self.settled else "was still rising, or they are too few to tell"
        return f"{len(self.losses)} rounds; the bound {end}."

    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as an ArviZ object.

        It is a ``DataTree``, or an ``InferenceData`` before ArviZ 1. ``dims`` and ``coords`` name
        axes and their elements, as for ``arviz.from_numpyro``. Needs the extra ``examples``.
        """
        labels = Labels.of(coords, dims)
        return to_arviz(self.sample_posterior, key, num_samples, labels=labels)

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
            The number of draws of the globals that go into the file, for readers who have neither
            the model nor the data.
        """
        words = {"ended": self.ended, "verdict": self._run_summary(), "trusted": None}
        drawn = self.sample_posterior(jax.random.key(0), draws) if draws else {}
        save(
            path, SavedWords(type(self).__name__, words, drawn), self.saved_run(), self.provenance()
        )

    def saved_run(self) -> SavedRun:
        """Return the run in the form in which a file keeps it."""
        return self._fit.description(), self.losses, self.state

    def provenance(self) -> Provenance | None:
        """Return the fingerprints of model and data; None if silos are in other processes."""
        return None if self._silos.elsewhere else self._fit.provenance(self._silos)
