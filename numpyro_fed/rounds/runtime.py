"""What runs rounds: a runtime, and the loop around it.

The loop runs chunks of rounds under a progress bar, and stops at the last good state. A round is a
function of the key, its number and the state. So a chunk in which something fails is run again from
its first state, up to the round before the failure, and no state is kept for each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import SilosError
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.basics.trees import all_finite
from numpyro_fed.rounds.exchange import Round
from numpyro_fed.rounds.progress import Progress, progress_of
from numpyro_fed.rounds.silos import Batches, ServerData, Stacks
from numpyro_fed.rounds.step import StepDone, Transport

# Seconds between updates of the progress bar. Each is a return from the compiled loop to Python,
# whose cost is felt in short rounds if there are many more of them.
REFRESH = 0.25
# Seconds of work, about, that Ctrl-C may cost a run without a bar: the rounds of a chunk are lost.
# More would lose more, less would return to Python more often.
MAX_SECONDS_LOST = 2.0
# Rounds in the first chunk of a run without a bar; their time sets the length of the next ones.
FIRST_CHUNK = 64


class State(NamedTuple):
    """The state of a run: everything that it needs to go on."""

    round: Array  # () int: rounds done so far
    server: Any
    silos: Stacks  # one stack of silo states for each bucket
    schedule: Any = ()  # the carry of the schedule, if there is one


class Log(NamedTuple):
    """The reports of rounds; a round has one step, or as many as its schedule says."""

    losses: Any  # (rounds,): the sum of ``Info.loss`` over the steps of a round
    reports: Any = ()  # pytree, leaves (rounds, steps, ...): ``Info.report``
    visits: Any = ()  # (rounds, steps, size) int, or (): who took part; empty where all silos do
    watched: Any = ()  # (rounds, steps, size): what is watched of each participant's new state


class RunStatus(NamedTuple):
    """The outcome of the last round that was run."""

    ok: Any  # () bool: whether it may be kept
    replies: Any  # (silos,) bool: which replies were good; true for a silo that took no part


class EndedError(Exception):
    """The signal that a run ends within a round: its last good state, and the silos at fault.

    Its cause is the error that ended it; there is none for a reply that cannot be used. Silos have
    no earlier state any more.
    """

    def __init__(self, state: State, silos: tuple[int, ...]):
        super().__init__(f"the run ends within a round, at silos {silos}")
        self.state, self.silos = state, silos


# (key, state, batches, n, server_data, stop) -> the last state, the log of the rounds, the outcome
# of the last one.
Advance = Callable[..., tuple[State, Log, RunStatus]]
# (key, server, silos, batches, server_data) -> what a step with all silos has led to.
Single = Callable[..., StepDone[Stacks]]


class Runtime(NamedTuple):
    """An algorithm with a way to run it."""

    init: Callable[[Array, Batches], State]
    # It runs up to ``n`` rounds, and stops after the first one that is not ok, and with ``stop``
    # where the algorithm is done.
    advance: Advance
    # Any single round with all silos, from any states, compiled quickly where that can be done.
    single: Callable[[Round], Single]
    # Batches -> Transport: the way of a plain program's questions to the silos.
    transport: Callable[[Batches], Transport[Array, Stacks]]
    chunk: int  # rounds that one call of ``advance`` can log, at most
    # For the shapes of a state alone, where ``init`` has effects outside of this process.
    like: Callable[[Array, Batches], State] | None = None
    # The state from which a new run goes on where another one has ended. By default
    # it is the same; silos in other processes begin a new run there.
    go_on: Callable[[State], State] = lambda state: state


class RunOutcome(NamedTuple):
    """The outcome of a number of rounds."""

    state: State  # the last good state
    losses: np.ndarray  # (rounds,) array: minus the bound in each of the rounds that led there
    # The round that stopped the run, if one was not ok, and silos whose reply could not be used.
    failure: tuple[int, tuple[int, ...]] | None
    log: Log | None  # the reports of these rounds, as NumPy arrays; None where they were not kept
    # {"rounds", "converged", "callback", "failure", "interrupted"}: why there are no more rounds.
    ended: str = "rounds"
    # The error of a silo that refused, did not answer, or whose reply was not as agreed.
    refused: SilosError | None = None


def run_rounds(
    runtime: Runtime,
    key: Array,
    state: State,
    batches: Batches,
    num_rounds: int,
    progress_bar: bool | Progress,
    server_data: ServerData = None,
    *,
    stop: bool = False,
    callback: Callable[[RunOutcome], bool] | None = None,
    every: int = 100,
) -> RunOutcome:
    """Run ``num_rounds`` rounds from ``state``, or fewer.

    With ``stop`` they end where the algorithm is done, and where ``callback``, which is called
    after each ``every`` rounds, returns True. A ``KeyboardInterrupt`` ends the run at the last good
    state, with ``ended`` set to ``"interrupted"``; a second one is raised.
    """
    logs: list[Log] = []
    done, failure, ended, begin = 0, None, "rounds", state.round
    refused: SilosError | None = None

    def run_so_far() -> RunOutcome:
        if not logs:  # Ctrl-C came in the first chunk
            none = np.zeros(0, np.float32)
            return RunOutcome(state, none, failure, None, ended, refused)
        # Ctrl-C may have come between the log and the state: rounds of the log that the state does
        # not know are cut off.
        rounds = int(state.round) - int(begin)
        log = jax.tree.map(lambda *parts: np.concatenate(parts)[:rounds], *logs)
        return RunOutcome(state, log.losses, failure, log, ended, refused)

    progress = progress_of(progress_bar)
    n, seconds_each = (1, REFRESH) if progress.shows else (FIRST_CHUNK, MAX_SECONDS_LOST)
    try:
        with progress.under_way(False, num_rounds):
            while done < num_rounds and failure is None:
                n = min(n, runtime.chunk, num_rounds - done)
                if callback is not None:
                    n = min(n, every - done % every)
                started = time.perf_counter()
                try:
                    after, log, last = jax.block_until_ready(
                        runtime.advance(key, state, batches, n, server_data, stop)
                    )
                except (SilosError, EndedError) as error:
                    cause: BaseException | None = error
                    if isinstance(error, EndedError):
                        state, cause = error.state, error.__cause__
                    if cause is not None and not isinstance(cause, SilosError):
                        raise cause from None
                    failure, ended, refused = (int(state.round), error.silos), "failure", cause
                    break
                # A step can spoil parameters while its bound is still finite, so that the state is
                # checked as well. Then the chunk is run again up to the round before; that round's
                # state may be spoilt in turn, which is why this is a loop.
                while n and not (last.ok and _all_finite(after, batches)):
                    bad = failed_silos(last.replies, after.silos, batches)
                    failure, ended = (int(after.round) - 1, bad), "failure"
                    n = failure[0] - int(state.round)
                    after, _, last = runtime.advance(key, state, batches, n, server_data, stop)
                requested, n = n, int(after.round) - int(state.round)
                # Of no rounds the empty log is kept: it has the structure of the reports.
                if n or not logs:
                    logs.append(jax.tree.map(partial(_first, n), log))
                state, done = after, done + n
                if n:
                    progress.step(n, -float(logs[-1].losses.mean()))
                if n < requested:
                    ended = "converged"
                    break
                looks = n and done % every == 0
                if callback is not None and looks and callback(run_so_far()):
                    ended = "callback"
                    break
                # Processes of one program need not take the same time, and run the same rounds.
                alone = jax.process_count() == 1
                seconds = time.perf_counter() - started if alone else 0.0
                n = (
                    min(2 * n, runtime.chunk)
                    if seconds < seconds_each
                    else max(1, int(n * seconds_each / seconds))
                )
    except KeyboardInterrupt:
        failure, ended = None, "interrupted"
    return run_so_far()


def _first(n: int, a: ArrayLike) -> np.ndarray:
    return np.asarray(a)[:n]


# One program for all leaves of all states: the check runs after every chunk, and a program for each
# leaf would cost more than the check.
@jit_once
def _finite(
    server: object, silos: Stacks, numbers: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """Return whether the server's state is finite, and each silo's (n,) by bucket."""
    stacks = []
    for stack, size in zip(silos, map(len, numbers), strict=True):
        leaves = [jnp.isfinite(a).reshape(size, -1).all(1) for a in jax.tree.leaves(stack)]
        stacks.append(jnp.stack([jnp.ones(size, bool), *leaves]).all(0))
    return all_finite(server), tuple(stacks)


def _all_finite(state: State, batches: Batches) -> bool:
    server, silos = _finite(state.server, state.silos, tuple(b.silos for b in batches))
    return bool(server) and all(np.asarray(s).all() for s in silos)


def failed_silos(replies: ArrayLike, silos: Stacks, batches: Batches) -> tuple[int, ...]:
    """Return the silos whose last reply was not good, or whose state is not finite."""
    bad = set(np.flatnonzero(~np.asarray(replies)).tolist())
    if silos:
        numbers = tuple(b.silos for b in batches)
        for silo, fine in zip(numbers, _finite((), silos, numbers)[1], strict=True):
            bad.update(np.asarray(silo)[~np.asarray(fine)].tolist())
    return tuple(sorted(bad))
