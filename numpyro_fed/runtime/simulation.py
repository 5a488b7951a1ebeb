"""The compiled runtime: rounds in one loop, silos of one shape side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info
from numpyro_fed.data import SiloData
from numpyro_fed.runtime.base import (
    BLOCK,
    CHUNK,
    NOISE,
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


def simulation(algorithm: FederatedAlgorithm) -> Runtime:
    """Run all silos in this process, as one program: a loop over rounds, a map over silos.

    The program is compiled once for a set of shapes; the number of rounds is an input.
    """

    @jax.jit
    def init_silos(key: Array, batches: tuple[Batch, ...]) -> tuple[Any, ...]:
        def one(silo: Array, data: SiloData) -> Any:
            return algorithm.init_silo(jax.random.fold_in(key, silo), data)

        return tuple(jax.vmap(one)(b.silos, b.data) for b in batches)

    init_server = jax.jit(algorithm.init_server)

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        key_server, key_silos = init_keys(key)
        server, silos = strong((init_server(key_server), init_silos(key_silos, batches)))
        return State(jnp.zeros((), jnp.int32), server, silos)

    exchanges = algorithm.exchanges

    def noise_of(key: Array, round_: Array, state: State, batches: tuple[Batch, ...]) -> list:
        """All noise of one round: for each exchange the server's, and that of each bucket."""
        drawn = []
        for e, exchange in enumerate(exchanges):
            mine = exchange_key(key, round_, e, len(exchanges))
            buckets = [
                jax.vmap(exchange.silo_noise)(jax.vmap(partial(silo_key, mine))(b.silos), states)
                for b, states in zip(batches, state.silos, strict=True)
            ]
            drawn.append((exchange.server_noise(server_key(mine)), buckets))
        return drawn

    def one_round(noise: list, state: State, batches: tuple[Batch, ...]) -> tuple[State, Info]:
        round_, server, silos = state
        for exchange, (for_server, for_buckets) in zip(exchanges, noise, strict=True):
            down, memo = exchange.broadcast(for_server, server)
            answers = [
                _ask(exchange, eps, down, batch, states)
                for eps, batch, states in zip(for_buckets, batches, silos, strict=True)
            ]
            silos = tuple(states for _, states in answers)
            combined = combine(exchange.combine, [up for up, _ in answers], batches)
            server, info = exchange.server(server, memo, combined)
        return State(round_ + 1, server, silos), info

    @jax.jit
    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, Array, Array]:
        size = _size(jax.eval_shape(noise_of, key, state.round, state, batches))
        block = max(1, min(BLOCK, NOISE // max(size, 1)))

        def go_on(carry: tuple) -> Array:
            i, _, _, ok = carry
            return (i < n) & ok

        def one_block(carry: tuple) -> tuple:
            first, state, _, _ = carry
            rounds = state.round + jnp.arange(block)
            noise = jax.vmap(noise_of, (None, 0, None, None))(key, rounds, state, batches)

            def go_on_here(carry: tuple) -> Array:
                return (carry[0] - first < block) & go_on(carry)

            def body(carry: tuple) -> tuple:
                i, state, losses, _ = carry
                here = jax.tree.map(lambda a: a[i - first], noise)
                state, info = one_round(here, state, batches)
                return i + 1, state, losses.at[i].set(info.loss), info.ok

            return jax.lax.while_loop(go_on_here, body, carry)

        start = (jnp.zeros((), jnp.int32), state, jnp.zeros(CHUNK), jnp.array(True))
        _, state, losses, ok = jax.lax.while_loop(go_on, one_block, start)
        return state, losses, ok

    return Runtime(init, advance)


def _ask(exchange: Exchange, noise: Any, down: Any, batch: Batch, states: Any) -> tuple[Any, Any]:
    """All silos of a bucket side by side."""
    if exchange.scatter:
        down = jax.tree.map(lambda a: a[batch.silos], down)
    axes = (0, 0 if exchange.scatter else None, 0, 0)
    return jax.vmap(exchange.silo, axes)(noise, down, states, batch.data)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
