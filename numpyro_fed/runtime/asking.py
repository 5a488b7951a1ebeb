"""How a plain program at the server asks silos: one exchange after the other, with their states."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Down, Exchange, Reply, Up
from numpyro_fed.runtime.noise import exchange_key, silo_key
from numpyro_fed.runtime.stack import Batches, Stacks
from numpyro_fed.runtime.step import Answers, Transport, combine
from numpyro_fed.trees import all_finite


class Asked:
    """The questions of a program to all silos so far: a callable that asks the next one.

    Attributes
    ----------
    silos : tuple of pytree
        The silos' states.
    number : int
        The number of exchanges.
    unusable : tuple of int
        The silos whose last reply could not be used.
    """

    def __init__(
        self, transport: Transport[Array, Stacks], key: Array, num_silos: int, silos: Stacks
    ):
        self._transport, self._key = transport, key
        self._who: Any = np.arange(num_silos)
        self.silos, self.number, self.unusable = silos, 0, tuple[int, ...]()

    def __call__(self, exchange: Exchange[Any, Down, Up], down: Down) -> Up:
        """Return the replies' ``up`` as NumPy arrays, added up or gathered."""
        key = exchange_key(self._key, self.number, 0, 1)
        answers = self._transport(exchange, key, down, self._who, self.silos)
        self.silos = answers.silos
        self.number += 1
        self.unusable = tuple(np.flatnonzero(~np.asarray(answers.ok)).tolist())
        up: Up = jax.tree.map(np.asarray, answers.replies.up)
        return up


def transport_of_stacks(batches: Batches) -> Transport[Any, Stacks]:
    """Return the transport to silos of this process, whose part of the exchange is stacked."""
    numbers = np.concatenate([np.asarray(b.silos) for b in batches])

    def transport(
        exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Any, silos: Stacks
    ) -> Answers[Stacks]:
        replies, after = [], []
        for batch, states in zip(batches, silos, strict=True):
            states = batch.padded(states)
            keys = exchange.silo_noise(noise, states)
            if not isinstance(keys, tuple):
                keys = _keys_of(noise, batch.padded(np.asarray(batch.silos)))
            answer = exchange.silo(keys, down, states, batch.data)
            reply, states = batch.real(answer)
            replies.append(checked(exchange, reply))
            after.append(states)
        order = np.argsort(numbers)
        ok = np.concatenate([reply.ok for reply in replies])[order]
        return Answers(combine(exchange.combine, replies, order), ok, tuple(after))

    return transport


@jax.jit
def _keys_of(key: Array, silos: Array) -> Array:
    """Return the keys (n,) of silos in an exchange."""
    return jax.vmap(partial(silo_key, key))(silos)


def checked(exchange: Exchange[Any, Any, Up], reply: Reply[Up]) -> Reply[Up]:
    """Return the replies of a stack of silos, checked as by :meth:`Exchange.checked`.

    Numbers are sent in the precision of this moment, whatever a silo has computed in.
    """
    real = jnp.result_type(float)
    as_agreed = jax.tree.map(lambda a: a.astype(real) if a.dtype.kind == "f" else a, reply.up)
    reply = reply._replace(up=as_agreed)
    if exchange.usable is all_finite:
        leaves = [np.isfinite(a).reshape(len(a), -1).all(1) for a in jax.tree.leaves(reply.up)]
        usable = np.logical_and.reduce(leaves)
    else:
        silos = range(len(np.asarray(reply.ok)))
        each = (jax.tree.map(lambda a, i=i: a[i], reply.up) for i in silos)
        usable = np.array([bool(exchange.usable(up)) for up in each])
    ok: np.ndarray = np.asarray(reply.ok) & usable
    if exchange.lenient:
        return reply._replace(ok=ok)
    zeroed = jax.tree.map(
        lambda a: np.where(ok.reshape(-1, *[1] * (a.ndim - 1)), a, np.zeros_like(a)), reply.up
    )
    return reply._replace(up=zeroed, ok=ok)
