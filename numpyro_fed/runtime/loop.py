"""Drive a runtime for a number of rounds, with a progress bar, and stop at the last good state."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from numpyro_fed.runtime.stack import Batch, Log, Runtime, State

REFRESH = 0.25  # seconds between updates of the progress bar


class Failure(NamedTuple):
    """The round that was not ok, and the silos whose own reply was not finite."""

    round: int
    silos: tuple[int, ...]


class Run(NamedTuple):
    """The last good state, the losses of the rounds that led there, and what stopped the run.

    ``log`` is all that these rounds report, as NumPy arrays; None where it was not kept.
    """

    state: State
    losses: np.ndarray
    failure: Failure | None
    log: Log | None


def drive(
    runtime: Runtime,
    key: Array,
    state: State,
    batches: tuple[Batch, ...],
    num_rounds: int,
    progress_bar: bool,
) -> Run:
    """Run ``num_rounds`` rounds from ``state``.

    Rounds are run in chunks of one compiled program. Since a round is a function of the key, its
    number and the state, a chunk that fails is simply run again up to the round before. A step can
    also spoil parameters while its bound is still finite, so the state is looked at as well.
    """
    logs: list[Log] = []
    done, failure = 0, None
    n = 1 if progress_bar else runtime.chunk
    with tqdm(total=num_rounds, disable=not progress_bar) as bar:
        while done < num_rounds and failure is None:
            n = min(n, runtime.chunk, num_rounds - done)
            began = time.perf_counter()
            after, log, ok = runtime.advance(key, state, batches, n)
            while n and not (ok and _finite(after)):
                failure = Failure(int(after.round) - 1, failed_silos(after, batches))
                n = failure.round - int(state.round)
                after, _, ok = runtime.advance(key, state, batches, n)
            logs.append(jax.tree.map(partial(_first, n), log))
            state, done = after, done + n
            if progress_bar and n:
                bar.update(n)
                bar.set_postfix_str(f"bound: {-logs[-1].losses.mean():.4f}", refresh=False)
                seconds = time.perf_counter() - began
                n = (
                    min(2 * n, runtime.chunk)
                    if seconds < REFRESH
                    else max(1, int(n * REFRESH / seconds))
                )
    log = jax.tree.map(lambda *parts: np.concatenate(parts), *logs)
    return Run(state, log.losses, failure, log)


def _first(n: int, a: Any) -> np.ndarray:
    return np.asarray(a)[:n]


@jax.jit
def _finite_each(stack: Any) -> Array:
    """For each silo of a bucket whether all of its state is finite."""
    leaves = [jnp.isfinite(a).reshape(len(a), -1).all(1) for a in jax.tree.leaves(stack)]
    return jnp.stack(leaves).all(0)


def _finite(state: State) -> bool:
    server = jax.tree.map(lambda a: a[None], state.server)
    return all(bool(_finite_each(stack).all()) for stack in (server, *state.silos))


def failed_silos(state: State, batches: tuple[Batch, ...]) -> tuple[int, ...]:
    """The silos whose last reply, or whose state, is not finite."""
    bad: list[int] = []
    for batch, silos in zip(batches, state.silos, strict=True):
        fine = np.asarray(silos.ok) & np.asarray(_finite_each(silos))
        bad += np.asarray(batch.silos)[~fine].tolist()
    return tuple(sorted(bad))
