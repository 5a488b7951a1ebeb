"""The plain host loop: the same functions, silo by silo, for debugging and as the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm
from numpyro_fed.runtime.base import (
    CHUNK,
    Batch,
    Runtime,
    State,
    combine,
    exchange_key,
    init_keys,
    server_key,
    silo_key,
    strong,
)


def host(algorithm: FederatedAlgorithm) -> Runtime:
    """Run the silos one after the other from Python, each at its own size, without padding.

    Every function is compiled on its own; under ``jax.disable_jit()`` all of it is ordinary
    Python, in which a debugger can stop. Expects one silo in each batch.
    """
    init_server, init_silo = jax.jit(algorithm.init_server), jax.jit(algorithm.init_silo)
    steps = [
        (e, x, jax.jit(x.silo_noise), jax.jit(x.broadcast), jax.jit(x.silo), jax.jit(x.server))
        for e, x in enumerate(algorithm.exchanges)
    ]

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        key_server, key_silos = init_keys(key)
        silos = []
        for silo, data in map(_only, batches):
            silos.append(_stack(init_silo(jax.random.fold_in(key_silos, silo), data)))
        server, states = strong((init_server(key_server), tuple(silos)))
        return State(jnp.zeros((), jnp.int32), server, states)

    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, np.ndarray, bool]:
        losses, ok = np.zeros(CHUNK), True
        for i in range(n):
            round_, server, silos = state
            for e, exchange, noise, broadcast, ask, answer in steps:
                key_exchange = exchange_key(key, round_, e, len(steps))
                down, memo = broadcast(exchange.server_noise(server_key(key_exchange)), server)
                replies, after = [], []
                for batch, states in zip(batches, silos, strict=True):
                    silo, data = _only(batch)
                    sent = jax.tree.map(lambda a, j=silo: a[j], down) if exchange.scatter else down
                    eps = noise(silo_key(key_exchange, silo), _only(states))
                    up, new = ask(eps, sent, _only(states), data)
                    replies.append(_stack(up))
                    after.append(_stack(new))
                silos = tuple(after)
                combined = combine(exchange.combine, replies, batches)
                server, info = answer(server, memo, combined)
            state = State(round_ + 1, server, silos)
            losses[i], ok = float(info.loss), bool(info.ok)
            if not ok:
                break
        return state, losses, ok

    return Runtime(init, advance)


def _only(stack: Any) -> Any:
    return jax.tree.map(lambda a: a[0], stack)


def _stack(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[None], tree)
