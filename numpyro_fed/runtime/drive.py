"""Drive a runtime for a number of rounds, with a progress bar, and stop at the last good state."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.errors import ReplyError
from numpyro_fed.programs import jit_once
from numpyro_fed.runtime.progress import Progress, progress_of
from numpyro_fed.runtime.stack import Batches, Log, Runtime, ServerData, Stacks, State
from numpyro_fed.trees import all_finite

REFRESH = 0.25  # seconds between updates of the progress bar
LOST = 2.0  # seconds of work, about, that Ctrl-C may cost a run without one
FIRST = 64  # rounds of such a run, after which it is known how long they take


class Failure(NamedTuple):
    """The round that was not ok, and the silos whose own reply could not be used."""

    round: int
    silos: tuple[int, ...]


class Run(NamedTuple):
    """The last good state, the losses of the rounds that led there, and what stopped the run.

    ``log`` is all that these rounds report, as NumPy arrays; None where it was not kept. ``ended``
    says why there are no more: ``"rounds"``, ``"converged"``, ``"callback"``, ``"failure"`` or
    ``"interrupted"``.
    ``unusable`` are the silos whose reply in the last round could not be used: a search goes on.
    ``refused`` is what was wrong with a reply that was not even taken.
    """

    state: State
    losses: np.ndarray
    failure: Failure | None
    log: Log | None
    ended: str = "rounds"
    unusable: tuple[int, ...] = ()
    refused: ReplyError | None = None


class Watcher(NamedTuple):
    """A listener that looks at a run every so many rounds, and may end it by saying True."""

    look: Callable[[Run], bool | None]
    every: int


def drive(
    runtime: Runtime,
    key: Array,
    state: State,
    batches: Batches,
    num_rounds: int,
    progress_bar: bool | Progress,
    server_data: ServerData = None,
    *,
    stop: bool = False,
    watcher: Watcher | None = None,
    keep: bool = False,
    search: bool = False,
) -> Run:
    """Run ``num_rounds`` rounds from ``state``; with ``stop``, until the algorithm is done.

    ``search`` says that they are exchanges of a search for the mode, to whoever is shown the
    progress.

    Rounds are run in chunks of one compiled program. Since a round is a function of the key, its
    number and the state, a chunk that fails is simply run again up to the round before. A step can
    also spoil parameters while its bound is still finite, so the state is looked at as well.

    With ``keep`` a ``KeyboardInterrupt`` ends the run at the last good state, and ``ended`` says
    so; a second one gets through.
    """
    logs: list[Log] = []
    done, failure, ended, begin = 0, None, "rounds", state.round
    unusable: tuple[int, ...] = ()
    refused: ReplyError | None = None

    def so_far() -> Run:
        if not logs:  # interrupted in the first rounds
            none = np.zeros(0, np.float32)
            return Run(state, none, failure, None, ended, unusable, refused)
        rounds = int(state.round) - int(begin)  # an interrupt may have come between log and state
        log = jax.tree.map(lambda *parts: np.concatenate(parts)[:rounds], *logs)
        return Run(state, log.losses, failure, log, ended, unusable, refused)

    progress = progress_of(progress_bar)
    n, seconds_each = (1, REFRESH) if progress.shows else (FIRST, LOST)
    with _Interruption(keep) as interruption, progress.under_way(search, num_rounds):
        while done < num_rounds and failure is None:
            n = min(n, runtime.chunk, num_rounds - done)
            if watcher is not None:
                n = min(n, watcher.every - done % watcher.every)
            began = time.perf_counter()
            try:
                after, log, last = runtime.advance(key, state, batches, n, server_data, stop)
            except ReplyError as error:
                failure, ended = Failure(int(state.round), (error.silo,)), "failure"
                unusable, refused = (error.silo,), error
                break
            if int(after.round) > int(state.round):
                unusable = failed_silos(last.replies, (), ())
            while n and not (last.ok and _all_finite(after, batches)):
                bad = failed_silos(last.replies, after.silos, batches)
                failure, ended = Failure(int(after.round) - 1, bad), "failure"
                n = failure.round - int(state.round)
                after, _, last = runtime.advance(key, state, batches, n, server_data, stop)
            asked, n = n, int(after.round) - int(state.round)
            if n or not logs:  # a run of no rounds may not know what rounds report
                logs.append(jax.tree.map(partial(_first, n), log))
            state, done = after, done + n
            if n:
                progress.step(n, -float(logs[-1].losses.mean()))
            if n < asked:
                ended = "converged"
                break
            if watcher is not None and n and done % watcher.every == 0 and watcher.look(so_far()):
                ended = "callback"
                break
            if n:
                seconds = time.perf_counter() - began
                n = (
                    min(2 * n, runtime.chunk)
                    if seconds < seconds_each
                    else max(1, int(n * seconds_each / seconds))
                )
    if interruption.came:
        failure, ended = None, "interrupted"
    return so_far()


class _Interruption:
    """A block that Ctrl-C leaves quietly, if it is to; ``came`` says whether it did."""

    def __init__(self, quietly: bool):
        self._quietly, self.came = quietly, False

    def __enter__(self) -> _Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.came = self._quietly and kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came


def _first(n: int, a: ArrayLike) -> np.ndarray:
    return np.asarray(a)[:n]


class _Finite(NamedTuple):
    """Whether all of the server's state is finite, and of each silo's, by bucket."""

    server: Array
    silos: tuple[Array, ...]


@jit_once
def _finite(server: object, silos: Stacks, numbers: tuple[Array, ...]) -> _Finite:
    def each(stack: object, numbers: Array) -> Array:
        size = len(numbers)
        leaves = [jnp.isfinite(a).reshape(size, -1).all(1) for a in jax.tree.leaves(stack)]
        return jnp.stack([jnp.ones(size, bool), *leaves]).all(0)

    stacks = tuple(each(stack, n) for stack, n in zip(silos, numbers, strict=True))
    return _Finite(all_finite(server), stacks)


def _all_finite(state: State, batches: Batches) -> bool:
    server, silos = _finite(state.server, state.silos, tuple(b.silos for b in batches))
    return bool(server) and all(np.asarray(s).all() for s in silos)


def failed_silos(replies: ArrayLike, silos: Stacks, batches: Batches) -> tuple[int, ...]:
    """Return the silos whose last reply was not good, or whose state is not finite."""
    bad = set(np.flatnonzero(~np.asarray(replies)).tolist())
    numbers = tuple(b.silos for b in batches)
    for silo, fine in zip(numbers, _finite((), silos, numbers).silos, strict=True):
        bad.update(np.asarray(silo)[~np.asarray(fine)].tolist())
    return tuple(sorted(bad))
