"""Replies are put together here before the server sees them, and what it sends is taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Combine, Down, Replies, Reply, Up
from numpyro_fed.trees import Tree


def combine(how: Combine, stacks: Sequence[Reply[Up]], order: Array | None = None) -> Replies[Up]:
    """Put stacks of replies together, in ``order`` where they are gathered."""
    if how is Combine.SUM:
        parts = [_weighted(reply) for reply in stacks]
        up = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *(total for total, _ in parts))
        weight = sum((w for _, w in parts[1:]), parts[0][1])
        return Replies(up, jnp.concatenate([reply.ok for reply in stacks]).all(), weight)
    which = slice(None) if order is None else order
    each = [(reply.up, reply.ok, _weights(reply)) for reply in stacks]
    return Replies(*jax.tree.map(lambda *parts: jnp.concatenate(parts)[which], *each))


def _weights(stack: Reply[Up]) -> Array:
    """Return the weight of each reply of a stack; of one that has none, 1."""
    if isinstance(stack.weight, tuple):
        return jnp.ones(jnp.shape(stack.ok))
    return jnp.asarray(stack.weight)


def _weighted(stack: Reply[Up]) -> tuple[Up, Array]:
    """Return the sum of a stack of replies, counts as they are; the sum of the weights."""
    weight = _weights(stack)
    if isinstance(stack.weight, tuple):
        return jax.tree.map(lambda a: a.sum(0), stack.up), weight.sum()

    def total(a: Array) -> Array:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a.sum(0)
        return (a * jnp.expand_dims(weight.astype(a.dtype), range(1, a.ndim))).sum(0)

    return jax.tree.map(total, stack.up), weight.sum()


def slices(scatter: object, down: Down, which: Array | int) -> Down:
    """Return what some participants get, or one: parts of leaves that have an axis of them."""

    def part(scattered: bool, leaves: Tree) -> Tree:
        return jax.tree.map(lambda a: a[which], leaves) if scattered else leaves

    return jax.tree.map(part, scatter, down)
