"""Replies are put together here before the server sees them, and what it sends is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Combine, Replies, Reply


def combine(how: Combine, stacks: Sequence[Reply], order: Array | None = None) -> Replies:
    """Put stacks of replies together, in ``order`` where they are gathered."""
    if how is Combine.SUM:
        parts = [_weighted(reply) for reply in stacks]
        up = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *(total for total, _ in parts))
        weight = sum((w for _, w in parts[1:]), parts[0][1])
        return Replies(up, jnp.concatenate([reply.ok for reply in stacks]).all(), weight)
    which = slice(None) if order is None else order
    each = [(reply.up, reply.ok, _weights(reply)) for reply in stacks]
    return Replies(*jax.tree.map(lambda *parts: jnp.concatenate(parts)[which], *each))


def _weights(stack: Reply) -> Array:
    """The weight of each reply of a stack; of one that has none, 1."""
    if isinstance(stack.weight, tuple):
        return jnp.ones(jnp.shape(stack.ok))
    return jnp.asarray(stack.weight)


def _weighted(stack: Reply) -> tuple[Any, Array]:
    """The sum of a stack of replies, counts as they are; the sum of the weights."""
    weight = _weights(stack)
    if isinstance(stack.weight, tuple):
        return jax.tree.map(lambda a: a.sum(0), stack.up), weight.sum()

    def total(a: Array) -> Array:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a.sum(0)
        return (a * jnp.expand_dims(weight.astype(a.dtype), range(1, a.ndim))).sum(0)

    return jax.tree.map(total, stack.up), weight.sum()


def slices(scatter: Any, down: Any, which: Any) -> Any:
    """Of each leaf of ``Down`` that has an axis of participants the part of some or one."""

    def part(scattered: bool, leaves: Any) -> Any:
        return jax.tree.map(lambda a: a[which], leaves) if scattered else leaves

    return jax.tree.map(part, scatter, down)
