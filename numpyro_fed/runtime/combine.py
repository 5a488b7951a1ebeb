"""Replies are combined here before the server sees them, and its messages are split by silo."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Combine, Down, Replies, Reply, Up
from numpyro_fed.trees import AnyArray, Numbers, Tree, namespace


def combine(how: Combine, stacks: Sequence[Reply[Up]], order: Numbers | None = None) -> Replies[Up]:
    """Return the replies of all stacks as one: summed, or gathered in ``order``.

    Leaves of ``stacks`` are (n, ...) for a bucket of n participants; ``order`` (k,) lists positions
    in their concatenation. Of NumPy's arrays it is computed by NumPy.
    """
    if how is Combine.SUM:
        parts = [_weighted_sum(reply) for reply in stacks]
        up = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *(total for total, _ in parts))
        weight = sum((w for _, w in parts[1:]), parts[0][1])
        # A number as the others, so that over several devices one sum carries all of them.
        bad = sum(
            (namespace(reply.ok).sum(~reply.ok, dtype=weight.dtype) for reply in stacks),
            0 * weight,
        )
        return Replies(up, bad == 0, weight)
    index = slice(None) if order is None else order
    triples = [(reply.up, reply.ok, _weights(reply)) for reply in stacks]

    def gathered(*leaves: AnyArray) -> AnyArray:
        return namespace(leaves[0]).concatenate(leaves)[index]

    return Replies(*jax.tree.map(gathered, *triples))


def _weights(stack: Reply[Up]) -> Array:
    """Return the weight of each reply of a stack (n,); 1 where the exchange has no weights."""
    if isinstance(stack.weight, tuple):
        return namespace(stack.ok).ones(jnp.shape(stack.ok))
    return jnp.asarray(stack.weight)


def _weighted_sum(stack: Reply[Up]) -> tuple[Up, Array]:
    """Return the weighted sum of a stack of replies, and the sum of the weights ()."""
    weight = _weights(stack)
    if isinstance(stack.weight, tuple):
        return jax.tree.map(lambda a: a.sum(0), stack.up), weight.sum()

    def total(a: Array) -> Array:
        # Integers count something, silos or rows, and add up without weights.
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return a.sum(0)
        return (a * jnp.expand_dims(weight.astype(a.dtype), range(1, a.ndim))).sum(0)

    return jax.tree.map(total, stack.up), weight.sum()


def for_participants(scatter: object, down: Down, index: Array | int) -> Down:
    """Return the message for participants ``index``: leaves marked in ``scatter`` are indexed."""

    def part(scattered: bool, leaves: Tree) -> Tree:
        return jax.tree.map(lambda a: a[index], leaves) if scattered else leaves

    return jax.tree.map(part, scatter, down)
