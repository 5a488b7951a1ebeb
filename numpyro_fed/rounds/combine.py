"""Replies of silos added up or gathered, and messages divided among participants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import Numbers, namespace
from numpyro_fed.rounds.exchange import Combine, Down, Replies, Reply, Up


def combine(how: Combine, stacks: Sequence[Reply[Up]], order: Numbers | None = None) -> Replies[Up]:
    """Return the replies of all stacks as one: summed, or gathered in ``order``.

    Leaves of ``stacks`` are (n, ...) for a bucket of n participants; ``order`` (k,) lists positions
    in their concatenation. Of NumPy's arrays it is computed by NumPy.
    """
    # A reply without a weight counts as 1.
    weights: list[Any] = [
        namespace(reply.ok).ones(jnp.shape(reply.ok))
        if isinstance(reply.weight, tuple)
        else jnp.asarray(reply.weight)
        for reply in stacks
    ]
    if how is Combine.GATHER:
        index = slice(None) if order is None else order
        triples = [(reply.up, reply.ok, w) for reply, w in zip(stacks, weights, strict=True)]
        return Replies(*jax.tree.map(lambda *a: namespace(a[0]).concatenate(a)[index], *triples))

    def total(reply: Reply[Up], weight: Array) -> Up:
        def weighted(a: Array) -> Array:
            # Integers count something, silos or rows, and add up without weights.
            if isinstance(reply.weight, tuple) or not jnp.issubdtype(a.dtype, jnp.inexact):
                return a.sum(0)
            return (a * jnp.expand_dims(weight.astype(a.dtype), range(1, a.ndim))).sum(0)

        return jax.tree.map(weighted, reply.up)

    totals = [total(*pair) for pair in zip(stacks, weights, strict=True)]
    sums = [weight.sum() for weight in weights]
    up = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals)
    weight = sum(sums[1:], sums[0])
    # A number as the others, so that over several devices one sum carries all of them.
    bad = sum(
        (namespace(reply.ok).sum(~reply.ok, dtype=weight.dtype) for reply in stacks), 0 * weight
    )
    return Replies(up, bad == 0, weight)


def for_participants(scatter: object, down: Down, index: Array | int) -> Down:
    """Return the message for participants ``index``: leaves marked in ``scatter`` are indexed."""
    one = partial(jax.tree.map, lambda a: a[index])
    return jax.tree.map(lambda scattered, all_: one(all_) if scattered else all_, scatter, down)
