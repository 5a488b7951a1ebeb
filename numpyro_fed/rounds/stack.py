"""The types that all runtimes share: the state of a run, stacks of silos of one shape, logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from numpyro_fed.basics.programs import on_all_devices
from numpyro_fed.basics.trees import Tree, drop_weak_types
from numpyro_fed.data.batches import Bucket
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.rounds.exchange import FederatedAlgorithm, Info, Round
from numpyro_fed.rounds.noise import schedule_key

# The compiled loop writes its log into an array of fixed length, the most rounds of one call. A
# longer one takes memory in every run, however short; a shorter one returns to Python more often.
CHUNK = 1024
# Visits that one call can log, about: 4 MB an array of one number a visit.
VISITS = 2**20
# Rounds for which noise is drawn at once. One draw for many rounds costs less than many small ones:
# a round with 100 of 10,000 silos took 2.36 times as long as one of 100 silos before, 2.02 times
# now (docs/results/speed.md). More rounds at once were tried and gained nothing (compilation.md).
BLOCK = 64
# Numbers that are drawn at once, about, which bounds the memory: 4 MB in single precision.
NOISE = 2**20


class Schedule(NamedTuple):
    """The rule by which silos take part in steps, as pure functions.

    A run in which all silos take part in every round has no schedule. Under a schedule every silo
    must take part some time, or its data count for nothing.
    """

    steps: int  # updates of the server in a round
    size: int  # participants of each update
    # The first carry, by a key: arrays that are handed on from round to round in a run's state.
    init: Callable[[Array], Any]
    # (key, round, carry, change) -> (who, carry): the silos that take part in each step of a round,
    # (steps, size) int, distinct within a step. ``change`` (num_silos,) is the last ``Info.change``
    # of a step in which a silo took part alone, infinite before the first. The key is the same in
    # all rounds.
    visits: Callable[[Array, Array, Any, Array], tuple[Array, Any]]
    num_silos: int
    # Whether ``visits`` reads neither the carry nor ``change``, so that the participants of many
    # rounds can be drawn ahead.
    ahead: bool = False
    # Whether replies are used one by one in the order in which they come, by the real clock. Then
    # nobody calls ``visits``, and silos must be in processes of their own.
    by_arrival: bool = False


Stacks = tuple[Any, ...]  # silos' states, stacked in each bucket
Planned = tuple[Any, Array]  # the carry of a schedule, and each silo's last ``change``
Watch = Callable[[Any], Any]  # a silo's new state -> the part of it that is logged
ServerData = SiloData | Array | None  # a vertical model's response, or draws that a round weighs


class State(NamedTuple):
    """The state of a run: everything that it needs to go on."""

    round: Array  # () int: rounds done so far
    server: Any
    silos: Stacks  # one stack of silo states for each bucket
    # The carry of the schedule, and each silo's last ``Info.change``; empty where all silos take
    # part in every round.
    schedule: Any = ()


class Batch(NamedTuple):
    """The silos of one bucket as the input of a program: their numbers (n,), their data stacked.

    Over several devices there may be more rows of data than silos: the first silos come once more,
    so that all devices have as many, and what they reply is dropped.
    """

    silos: Array
    data: SiloData

    def padded(self, tree: Tree) -> Tree:
        """Return a tree of all silos' arrays (n, ...) with as many rows as the data have."""
        leaves, size = jax.tree.leaves(self.data), len(self.silos)
        rows = len(leaves[0]) if leaves else size
        if rows == size:
            return tree
        return jax.tree.map(lambda a: a[jnp.arange(rows) % size], tree)

    def real(self, tree: Tree) -> Tree:
        """Return the same without the rows beyond the silos."""
        size = len(self.silos)
        if all(len(a) == size for a in jax.tree.leaves(tree)):
            return tree
        return jax.tree.map(lambda a: a[:size], tree)


Batches = tuple[Batch, ...]


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
# (key, server, silos, batches, server_data) -> both new states, the server's report, and which
# replies were good (silos,).
Single = Callable[..., tuple[Any, Stacks, Info, Array]]


class Runtime(NamedTuple):
    """An algorithm with a way to run it."""

    init: Callable[[Array, Batches], State]
    # It runs up to ``n`` rounds, and stops after the first one that is not ok, and with ``stop``
    # where the algorithm is done.
    advance: Advance
    # Any single round with all silos, from any states, compiled.
    single: Callable[[Round], Single]
    # Batches -> Transport: the way of a plain program's questions to the silos.
    transport: Callable[[Batches], Any]
    chunk: int  # rounds that one call of ``advance`` can log, at most
    # The same as ``single`` for little work, compiled quickly where the runtime can do so.
    quick: Callable[[Round], Single]
    # For the shapes of a state alone, where ``init`` has effects outside of this process.
    like: Callable[[Array, Batches], State] | None = None
    # The state from which a new run goes on where another one has ended. By default
    # it is the same; silos in other processes begin a new run there.
    go_on: Callable[[State], State] = lambda state: state


def on_device(buckets: Sequence[Bucket]) -> Batches:
    """Return the buckets as batches on the device, or spread over all devices of the process.

    With several devices the silos of a bucket are divided among them, over all processes of the
    program. Where the number of silos is no multiple of that of devices, the first silos come once
    more (:class:`Batch`). A single silo has its data on each device. Programs follow their data: a
    sum over silos is an all-reduce.
    """
    # On a CPU JAX may otherwise share memory with the user's arrays, which may change in place.
    host = [(np.asarray(b.silos, np.int32), b.data) for b in buckets]
    devices = jax.devices()
    if len(devices) == 1:
        return tuple(Batch(*batch) for batch in jax.device_put(host, may_alias=False))
    undivided, divided = on_all_devices(P()), on_all_devices(P("silo"))
    batches = []
    for silos, data in host:
        size = len(silos)
        rows = size if size == 1 else -(-size // len(devices)) * len(devices)
        data = jax.tree.map(lambda a: np.asarray(a)[np.arange(rows) % size], data)  # noqa: B023
        placed = _placed(data, undivided if size == 1 else divided)
        batches.append(Batch(_placed(silos, undivided), placed))
    return tuple(batches)


def _placed(tree: object, sharding: NamedSharding) -> Any:
    """Return arrays on devices; a process that has all of an array copies its own part alone."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding, may_alias=False)
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda i: np.array(a[i])), tree
    )


def chunk_of(schedule: Schedule | None) -> int:
    """Return how many rounds one call of ``advance`` can log."""
    if schedule is None:
        return CHUNK
    return max(1, min(CHUNK, VISITS // (schedule.steps * schedule.size)))


def init_schedule(schedule: Schedule | None, key: Array, num_silos: int) -> tuple[()] | Planned:
    """Return the first ``State.schedule`` of a run."""
    if schedule is None:
        return ()
    if schedule.num_silos != num_silos:
        raise ValueError(
            f"the schedule is for {schedule.num_silos} silos, but there are {num_silos}. Build it "
            "for as many silos as are passed to run."
        )
    return schedule.init(schedule_key(key)), jnp.full(num_silos, jnp.inf)


def visits(schedule: Schedule, key: Array, round: Array, state: Planned) -> tuple[Array, Any]:
    """Return who takes part in each step (steps, size), and the schedule's next carry."""
    who, carry = schedule.visits(schedule_key(key), round, *state)
    if jnp.shape(who) != (schedule.steps, schedule.size):
        raise ValueError(
            f"the schedule's visits have shape {jnp.shape(who)}: expected (steps, size) = "
            f"{(schedule.steps, schedule.size)}."
        )
    return jnp.asarray(who, jnp.int32), drop_weak_types(carry)


def num_silos(batches: Batches) -> int:
    """Return the number of silos in all buckets."""
    return sum(len(b.silos) for b in batches)


def in_order(batches: Sequence[Batch]) -> Array:
    """Return the positions (silos,) of silos 0, 1, ... in the concatenation of all buckets."""
    numbers = jnp.concatenate([b.silos for b in batches])
    return jnp.zeros_like(numbers).at[numbers].set(jnp.arange(len(numbers), dtype=numbers.dtype))


AnyAlgorithm = FederatedAlgorithm[Any, Any]


class PlanSize(NamedTuple):
    """The size of a plan, as a silo's owner sees it."""

    num_silos: int
    num_rows: int  # the rows of this silo
    num_parameters: int  # globals and shared parameters, or a client's own latents
    delta: float = 0.0  # the probability with which the bound of a budget of privacy may fail
    # The noise multiplier of a Gaussian release that tells as much as all exchanges of a run; 0 for
    # a method without a budget.
    multiplier: float = 0.0
    # The unit that the budget is for, and which data are neighbours: ``"row add"``.
    protects: str = ""
    # Whether a silo's reply has a share of the noise alone, so that it must be seen in a sum over
    # all silos.
    shares_noise: bool = False


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
