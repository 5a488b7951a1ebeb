"""The compiled runtime: rounds in one loop, silos of one shape side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Info
from numpyro_fed.data import SiloData
from numpyro_fed.runtime.base import (
    CHUNK,
    Batch,
    Runtime,
    State,
    combine,
    init_keys,
    server_key,
    silo_key,
)


def simulation(algorithm: FederatedAlgorithm) -> Runtime:
    """Run all silos in this process, as one program: a loop over rounds, a map over silos.

    The program is compiled once for a set of shapes; the number of rounds is an input.
    """

    @jax.jit
    def init_silos(key: Array, batches: tuple[Batch, ...]) -> tuple[Any, ...]:
        def one(silo: Array, data: SiloData) -> Any:
            return algorithm.init_silo(jax.random.fold_in(key, silo), data)

        return tuple(jax.vmap(one)(b.silos, b.data) for b in batches)

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        key_server, key_silos = init_keys(key)
        server = jax.tree.map(jnp.asarray, algorithm.init_server(key_server))
        return State(jnp.zeros((), jnp.int32), server, init_silos(key_silos, batches))

    def one_round(key: Array, state: State, batches: tuple[Batch, ...]) -> tuple[State, Info]:
        round_, server, silos = state
        for e, exchange in enumerate(algorithm.exchanges):
            key_server = server_key(key, round_, e)
            down = exchange.broadcast(key_server, server)

            def ask(batch: Batch, states: Any, e: int = e, down: Any = down) -> tuple[Any, Any]:
                exchange = algorithm.exchanges[e]
                keys = jax.vmap(lambda j: silo_key(key, round_, e, j))(batch.silos)
                if exchange.scatter:
                    down = jax.tree.map(lambda a: a[batch.silos], down)
                axes = (0, 0 if exchange.scatter else None, 0, 0)
                return jax.vmap(exchange.silo, axes)(keys, down, states, batch.data)

            answers = [ask(*pair) for pair in zip(batches, silos, strict=True)]
            replies = [up for up, _ in answers]
            silos = tuple(states for _, states in answers)
            combined = combine(exchange.combine, replies, batches)
            server, info = exchange.server(key_server, server, combined)
        return State(round_ + 1, server, silos), info

    @jax.jit
    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, Array, Array]:
        def go_on(carry: tuple) -> Array:
            i, _, _, ok = carry
            return (i < n) & ok

        def body(carry: tuple) -> tuple:
            i, state, losses, _ = carry
            state, info = one_round(key, state, batches)
            return i + 1, state, losses.at[i].set(info.loss), info.ok

        start = (jnp.zeros((), jnp.int32), state, jnp.zeros(CHUNK), jnp.array(True))
        _, state, losses, ok = jax.lax.while_loop(go_on, body, start)
        return state, losses, ok

    return Runtime(init, advance)
