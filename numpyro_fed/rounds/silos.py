"""The silos of a run: in stacks of one shape, and on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from numpyro_fed.basics.programs import on_accelerator, on_all_devices
from numpyro_fed.basics.trees import Numbers, Tree
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData, Sizes

Stacks = tuple[Any, ...]  # silos' states, stacked in each bucket
Watch = Callable[[Any], Any]  # a silo's new state -> the part of it that is logged
ServerData = SiloData | Array | None  # a vertical model's response, or draws that a round weighs


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


def _entry(i: int, stack: Numbers) -> Numbers:
    """Return an entry of a stack, which NumPy takes without a program where it can."""
    if isinstance(stack, np.ndarray) or on_accelerator() or not stack.is_fully_addressable:
        return stack[i]
    is_key = jnp.issubdtype(stack.dtype, jax.dtypes.extended)
    return stack[i] if is_key else np.asarray(stack)[i]


def num_silos(batches: Batches) -> int:
    """Return the number of silos in all buckets."""
    return sum(len(b.silos) for b in batches)


def in_order(batches: Sequence[Batch]) -> Array:
    """Return the positions (silos,) of silos 0, 1, ... in the concatenation of all buckets."""
    numbers = jnp.concatenate([b.silos for b in batches])
    return jnp.zeros_like(numbers).at[numbers].set(jnp.arange(len(numbers), dtype=numbers.dtype))


class Silos(NamedTuple):
    """The silos of a run: their data as read, in buckets, and on the device.

    Of silos in other processes there is one batch without data, and nothing else but their names,
    if they have any.
    """

    data: tuple[SiloData, ...]
    buckets: tuple[Bucket, ...]
    batches: Batches
    names: tuple[str, ...] = ()

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
        return jax.tree.map(partial(_entry, i), stacks[b])

    def data_of(self, silo: int) -> SiloData:
        """Return a silo's data, as they were read."""
        self.place(silo)
        return self.data[silo]

    def sizes_of(self, silo: int) -> Sizes:
        """Return the rows of each plate at a silo."""
        b, i = self.place(silo)
        return self.buckets[b].sizes[i]
