"""What runtimes share: the state of a run, keys, and how replies are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Combine
from numpyro_fed.data import Bucket, SiloData

CHUNK = 1024  # rounds that one call of the compiled loop can report
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
    """

    round: Array
    server: Any
    silos: tuple[Any, ...]


class Batch(NamedTuple):
    """The silos of one bucket as input of a program: their numbers (n,) and stacked data."""

    silos: Array
    data: SiloData


class Runtime(NamedTuple):
    """An algorithm, ready to run.

    Attributes
    ----------
    init : (key, batches) -> State
    advance : (key, state, batches, n) -> (State, losses, ok)
        Run up to ``n`` rounds, ``CHUNK`` at most; ``losses`` (CHUNK,) holds one number a round.
        Stops after the first round that is not ok.
    """

    init: Callable[[Array, tuple[Batch, ...]], State]
    advance: Callable[[Array, State, tuple[Batch, ...], int], tuple[State, Any, Any]]


def on_device(buckets: Sequence[Bucket]) -> tuple[Batch, ...]:
    """Put buckets on the device."""
    return tuple(Batch(jnp.asarray(b.silos), jax.tree.map(jnp.asarray, b.data)) for b in buckets)


def strong(tree: Any) -> Any:
    """The same numbers without weak types: the state after a round would be another program's."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.asarray(a).dtype), tree)


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


def combine(how: Combine, replies: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Put stacked replies, one stack for each bucket, together as the exchange asks."""
    if how is Combine.SUM:
        totals = [jax.tree.map(lambda a: a.sum(0), up) for up in replies]
        return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals)
    order = jnp.argsort(jnp.concatenate([b.silos for b in batches]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *replies)
