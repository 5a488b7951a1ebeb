"""Transforms of silos' replies, as Optax has transforms of gradients.

A silo commits the reply that it has really sent, after the transform. So an invariant of the
messages (in PVI: the silos' factors sum to the server's total) holds under any transform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import (
    Down,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Server,
    Silo,
    Up,
    no_noise,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import Tree


class ReplyTransform(NamedTuple):
    """A transform of ``Reply.up``, applied at the silo just before it is sent.

    Attributes
    ----------
    apply : (noise, up) -> up
    noise : key -> noise
    """

    apply: Callable[[Any, Any], Any]
    noise: Callable[[Array], Any] = no_noise


def clip_by_global_norm(max_norm: float) -> ReplyTransform:
    """Scale a reply down to a Euclidean norm of ``max_norm``, over all of its real numbers.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed.algorithms import reply_transforms
    >>> reply_transforms.clip_by_global_norm(1.0).apply((), {"change": jnp.array([3.0, 4.0])})
    {'change': Array([0.6, 0.8], dtype=float32)}
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}.")

    def apply(noise: object, up: Tree) -> Tree:
        norm = optax.tree_utils.tree_norm(jax.tree.map(_real, up))
        # A reply of zeros would divide by zero, and a NaN scale would spoil it.
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
        return jax.tree.map(lambda a: a * scale.astype(a.dtype) if _is_real(a) else a, up)

    return ReplyTransform(apply)


def round_to_grid(step: float) -> ReplyTransform:
    """Round all real numbers of a reply to multiples of ``step``, as secure aggregation needs.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed.algorithms import reply_transforms
    >>> reply_transforms.round_to_grid(0.5).apply((), {"change": jnp.array([0.7, 1.9])})
    {'change': Array([0.5, 2. ], dtype=float32)}
    """
    if not step > 0:
        raise ValueError(f"step must be positive, got {step}.")

    def apply(noise: object, up: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.round(a / step) * step if _is_real(a) else a, up)

    return ReplyTransform(apply)


def chain(*transforms: ReplyTransform) -> ReplyTransform:
    """Return the transform that applies these one after the other."""

    def noise(key: Array) -> list[Any]:
        return [t.noise(jax.random.fold_in(key, i)) for i, t in enumerate(transforms)]

    def apply(noise: list[Any], up: Tree) -> Tree:
        for eps, transform in zip(noise, transforms, strict=True):
            up = transform.apply(eps, up)
        return up

    return ReplyTransform(apply, noise)


def transformed(
    algorithm: FederatedAlgorithm[Server, Silo], transform: ReplyTransform
) -> FederatedAlgorithm[Server, Silo]:
    """Return the algorithm with a transform of all replies of its round.

    Opening rounds are not transformed.
    """

    def wrap(exchange: Exchange[Silo, Down, Up]) -> Exchange[Silo, Down, Up]:
        def silo_noise(key: Array, state: Silo) -> tuple[Any, Any]:
            silo_key, sending = jax.random.split(key)
            return exchange.silo_noise(silo_key, state), transform.noise(sending)

        def silo(
            noise: tuple[Any, Any], down: Down, state: Silo, data: SiloData
        ) -> tuple[Reply[Up], Any]:
            silo_key, sending = noise
            reply, draft = exchange.silo(silo_key, down, state, data)
            return reply._replace(up=transform.apply(sending, reply.up)), draft

        return exchange._replace(silo=silo, silo_noise=silo_noise)

    sending = tuple(map(wrap, algorithm.round.exchanges))
    return algorithm._replace(round=replace(algorithm.round, exchanges=sending))


def _is_real(a: Array) -> bool:
    # Counts, statuses and keys are no numbers to be clipped or rounded.
    return jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)


def _real(a: Array) -> Array:
    return a if _is_real(a) else jnp.zeros(())
