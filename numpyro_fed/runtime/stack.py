"""What runtimes share: the state of a run, keys, and how replies are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Combine, Info
from numpyro_fed.model.data import Bucket, SiloData
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.trees import strong

CHUNK = 1024  # rounds, at most, that one call of the compiled loop can log
VISITS = 2**20  # visits, about, that one call can log
BLOCK = 64  # rounds, at most, for which noise is drawn at once
NOISE = 2**20  # numbers, about, that are drawn at once


class State(NamedTuple):
    """Everything that a run needs to go on.

    Attributes
    ----------
    round : () int
        Rounds done so far.
    server : pytree
    silos : tuple of pytree
        One stack of silo states for each bucket.
    schedule : tuple
        What the schedule carries on, and each silo's last ``Info.change``; empty where everyone
        takes part in every round.
    """

    round: Array
    server: Any
    silos: tuple[Any, ...]
    schedule: Any = ()


class Batch(NamedTuple):
    """The silos of one bucket as input of a program: their numbers (n,) and stacked data."""

    silos: Array
    data: SiloData


class Log(NamedTuple):
    """What rounds report. A round has one step, or as many as its schedule says.

    Attributes
    ----------
    losses : (rounds,)
        The sum of ``Info.loss`` over the steps of a round.
    reports : pytree, leaves (rounds, steps, ...)
        ``Info.report``.
    visits : (rounds, steps, size) int, or ()
        Who took part; empty where everyone does.
    watched : pytree, leaves (rounds, steps, size)
        ``FederatedAlgorithm.watch`` of each participant's new state.
    """

    losses: Any
    reports: Any = ()
    visits: Any = ()
    watched: Any = ()


class Runtime(NamedTuple):
    """An algorithm, ready to run.

    Attributes
    ----------
    init : (key, batches) -> State
    advance : (key, state, batches, n) -> (State, Log, ok)
        Run up to ``n`` rounds, ``chunk`` at most. Stops after the first round that is not ok.
    chunk : int
        Rounds that one call can log.
    """

    init: Callable[[Array, tuple[Batch, ...]], State]
    advance: Callable[[Array, State, tuple[Batch, ...], int], tuple[State, Log, Any]]
    chunk: int = CHUNK


def on_device(buckets: Sequence[Bucket]) -> tuple[Batch, ...]:
    """Put buckets on the device."""
    return tuple(Batch(jnp.asarray(b.silos), jax.tree.map(jnp.asarray, b.data)) for b in buckets)


def exchange_key(key: Array, round: Array | int, exchange: int, exchanges: int) -> Array:
    """The key of one exchange of a round; ``fold_in(key, round)`` where a round has one."""
    return jax.random.fold_in(key, round * exchanges + exchange)


def server_key(key_exchange: Array) -> Array:
    """The server's key for an exchange."""
    return jax.random.fold_in(key_exchange, 0)


def silo_key(key_exchange: Array, silo: Array) -> Array:
    """A silo's key for an exchange: never another silo's, never the server's."""
    return jax.random.fold_in(key_exchange, 1 + silo)


def init_keys(key: Array) -> tuple[Array, Array]:
    """Keys for the first states of the server and of the silos, apart from those of all rounds."""
    first, second = jax.random.split(jax.random.fold_in(key, np.uint32(2**32 - 1)))
    return first, second


def schedule_key(key: Array) -> Array:
    """The key of a run's schedule, apart from those of all rounds and of the first states."""
    return jax.random.fold_in(key, np.uint32(2**32 - 2))


def chunk_of(schedule: Schedule | None) -> int:
    """How many rounds one call can log."""
    if schedule is None:
        return CHUNK
    return max(1, min(CHUNK, VISITS // (schedule.steps * schedule.size)))


def init_schedule(schedule: Schedule | None, key: Array, num_silos: int) -> Any:
    """The schedule's part of the first state."""
    if schedule is None:
        return ()
    if schedule.num_silos != num_silos:
        raise ValueError(
            f"the schedule is for {schedule.num_silos} silos, but there are {num_silos}. Build it "
            "for as many silos as are passed to run."
        )
    return schedule.init(schedule_key(key)), jnp.full(num_silos, jnp.inf)


def visits(schedule: Schedule, key: Array, round: Array, state: Any) -> tuple[Array, Any]:
    """Who takes part in each step of a round (steps, size), and what the schedule carries on."""
    who, carry = schedule.visits(schedule_key(key), round, *state)
    if jnp.shape(who) != (schedule.steps, schedule.size):
        raise ValueError(
            f"the schedule's visits have shape {jnp.shape(who)}: expected (steps, size) = "
            f"{(schedule.steps, schedule.size)}."
        )
    return jnp.asarray(who, jnp.int32), strong(carry)


def slices(scatter: Any, down: Any, which: Any) -> Any:
    """Of each leaf of ``Down`` that has an axis of participants the part of some or one."""

    def part(scattered: bool, leaves: Any) -> Any:
        return jax.tree.map(lambda a: a[which], leaves) if scattered else leaves

    return jax.tree.map(part, scatter, down)


def combine(how: Combine, replies: Sequence[Any], order: Array | None = None) -> Any:
    """Put stacks of replies together as the exchange asks, in ``order`` where they are gathered."""
    if how is Combine.SUM:
        totals = [jax.tree.map(lambda a: a.sum(0), up) for up in replies]
        return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals)
    which = slice(None) if order is None else order
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[which], *replies)


def fold(infos: Sequence[Info]) -> Info:
    """What the exchanges of one step report, as one: it may be kept if each of them may.

    Losses and changes add up; reports are a tuple by exchange where there are several.
    """
    if len(infos) == 1:
        return infos[0]
    loss = sum((info.loss for info in infos[1:]), infos[0].loss)
    change = sum((info.change for info in infos[1:]), infos[0].change)
    ok = jnp.stack([jnp.asarray(info.ok) for info in infos]).all()
    return Info(loss, ok, change, tuple(info.report for info in infos))


def in_order(batches: Sequence[Batch]) -> Array:
    """Where the silos stand in the buckets, one after the other, in the order of their numbers."""
    return jnp.argsort(jnp.concatenate([b.silos for b in batches]))
