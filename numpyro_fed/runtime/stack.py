"""What runtimes share: the state of a run, stacks of silos of one shape, logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Info, Round
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import Bucket
from numpyro_fed.runtime.noise import schedule_key
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.trees import drop_weak_types

CHUNK = 1024  # rounds, at most, that one call of the compiled loop can log
VISITS = 2**20  # visits, about, that one call can log
BLOCK = 64  # rounds, at most, for which noise is drawn at once
NOISE = 2**20  # numbers, about, that are drawn at once


Stacks = tuple[Any, ...]  # of silos' states, one for each bucket
Planned = tuple[Carry, Array]  # what a schedule carries on, and each silo's last ``change``
Watch = Callable[[Any], Any]  # what is logged of a silo's new state
ServerData = SiloData | Array | None  # of a vertical model, or draws that a round is to weigh


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
    silos: Stacks
    schedule: Any = ()


class Batch(NamedTuple):
    """The silos of one bucket as input of a program: their numbers (n,) and stacked data."""

    silos: Array
    data: SiloData


Batches = tuple[Batch, ...]


class Log(NamedTuple):
    """A record of what rounds report; a round has one step, or as many as its schedule says.

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


class RunStatus(NamedTuple):
    """A record of how rounds ended: whether the last one may be kept, and which replies were good.

    That is (silos,) by number, and true where a silo had no part in the last one.
    """

    ok: Any
    replies: Any


class Advance(Protocol):
    """Run up to ``n`` rounds; stops after the first one that is not ok, and with ``stop`` where the
    algorithm is done.
    """

    def __call__(
        self,
        key: Array,
        state: State,
        batches: Batches,
        n: int,
        server_data: ServerData = None,
        stop: bool = False,
    ) -> tuple[State, Log, RunStatus]:
        """Return the last state, what the rounds report, and how they ended."""


class Single(Protocol):
    """Run one round with every silo, from any states."""

    def __call__(
        self,
        key: Array,
        server: object,
        silos: Stacks,
        batches: Batches,
        server_data: ServerData = None,
    ) -> tuple[Any, Stacks, Info, Array]:
        """Return states afterwards, the server's report, and which replies were good, by number."""


class Runtime(NamedTuple):
    """An algorithm, ready to run.

    Attributes
    ----------
    init : (key, batches) -> State
    advance : Advance
    single : round -> Single
        Any single round, compiled.
    chunk : int
        Rounds that one call of ``advance`` can log, at most.
    soon : round -> Single, optional
        The same, for little work: compiled in less than half of the time, and slower after it.
    """

    init: Callable[[Array, Batches], State]
    advance: Advance
    single: Callable[[Round], Single]
    chunk: int = CHUNK
    soon: Callable[[Round], Single] | None = None

    def once(self, round_: Round) -> Single:
        """Return a single round that is little work, compiled."""
        return (self.soon or self.single)(round_)


def on_device(buckets: Sequence[Bucket]) -> Batches:
    """Put buckets on the device."""
    host = [(np.asarray(b.silos, np.int32), b.data) for b in buckets]
    return tuple(Batch(*batch) for batch in jax.device_put(host, may_alias=False))


def chunk_of(schedule: Schedule[Any] | None) -> int:
    """Return how many rounds one call can log."""
    if schedule is None:
        return CHUNK
    return max(1, min(CHUNK, VISITS // (schedule.steps * schedule.size)))


def init_schedule(
    schedule: Schedule[Carry] | None, key: Array, num_silos: int
) -> tuple[()] | Planned[Carry]:
    """Return the schedule's part of the first state."""
    if schedule is None:
        return ()
    if schedule.num_silos != num_silos:
        raise ValueError(
            f"the schedule is for {schedule.num_silos} silos, but there are {num_silos}. Build it "
            "for as many silos as are passed to run."
        )
    return schedule.init(schedule_key(key)), jnp.full(num_silos, jnp.inf)


def visits(
    schedule: Schedule[Carry], key: Array, round: Array, state: Planned[Carry]
) -> tuple[Array, Carry]:
    """Return who takes part in each step (steps, size), and what the schedule carries on."""
    who, carry = schedule.visits(schedule_key(key), round, *state)
    if jnp.shape(who) != (schedule.steps, schedule.size):
        raise ValueError(
            f"the schedule's visits have shape {jnp.shape(who)}: expected (steps, size) = "
            f"{(schedule.steps, schedule.size)}."
        )
    return jnp.asarray(who, jnp.int32), drop_weak_types(carry)


def in_order(batches: Sequence[Batch]) -> Array:
    """Return the places of silos 0, 1, ... among those of all buckets, one after the other."""
    numbers = jnp.concatenate([b.silos for b in batches])
    return jnp.zeros_like(numbers).at[numbers].set(jnp.arange(len(numbers), dtype=numbers.dtype))
