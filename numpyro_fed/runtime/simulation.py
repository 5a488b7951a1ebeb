"""The compiled runtime: rounds in one loop, silos of one shape side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import (
    BLOCK,
    NOISE,
    Batch,
    Log,
    Runtime,
    State,
    chunk_of,
    combine,
    exchange_key,
    fold,
    in_order,
    init_keys,
    init_schedule,
    server_key,
    silo_key,
    slices,
    visits,
)
from numpyro_fed.trees import strong

Places = tuple[Array, Array]
Advance = Callable[[Array, State, tuple[Batch, ...], int], tuple[State, Log, Array]]


def simulation(algorithm: FederatedAlgorithm, schedule: Schedule | None = None) -> Runtime:
    """Run all silos in this process, as one program: a loop over rounds, a map over silos.

    The program is compiled once for a set of shapes; the number of rounds is an input. Without a
    schedule everyone takes part in every round. With one, a round costs what its participants
    cost: their states are taken out of the stacks and put back in place.
    """

    @jax.jit
    def init_silos(key: Array, batches: tuple[Batch, ...]) -> tuple[Any, ...]:
        def one(silo: Array, data: SiloData) -> Any:
            return algorithm.init_silo(jax.random.fold_in(key, silo), data)

        return tuple(jax.vmap(one)(b.silos, b.data) for b in batches)

    init_server = jax.jit(algorithm.init_server)

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        key_server, key_silos = init_keys(key)
        server, silos = init_server(key_server), init_silos(key_silos, batches)
        carry = init_schedule(schedule, key, _count(batches))
        server, silos, carry = strong((server, silos, carry))
        return State(jnp.zeros((), jnp.int32), server, silos, carry)

    advance = _everyone(algorithm) if schedule is None else _scheduled(algorithm, schedule)
    return Runtime(init, advance, chunk_of(schedule))


def _everyone(algorithm: FederatedAlgorithm) -> Advance:
    """All silos in every round, one step each; noise is drawn for many rounds at once."""
    exchanges, watch, chunk = algorithm.exchanges, algorithm.watch, chunk_of(None)

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

    @partial(jax.jit, inline=True)  # traced once, though it is also asked for its shapes
    def one_round(noise: list, state: State, batches: tuple[Batch, ...]) -> tuple[State, Info, Any]:
        round_, server, silos, _ = state
        who, order, infos = jnp.arange(_count(batches)), in_order(batches), []
        for exchange, (for_server, for_buckets) in zip(exchanges, noise, strict=True):
            down, memo = exchange.broadcast(for_server, server, who)
            answers = [
                _ask(exchange, eps, slices(exchange.scatter, down, batch.silos), batch, states)
                for eps, batch, states in zip(for_buckets, batches, silos, strict=True)
            ]
            silos = tuple(states for _, states in answers)
            combined = combine(exchange.combine, [up for up, _ in answers], order)
            server, info = exchange.server(server, memo, combined)
            infos.append(info)
        watched = [jax.vmap(watch)(states) for states in silos] if watch else [()]
        together = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *watched)
        return State(round_ + 1, server, silos), fold(infos), together

    @jax.jit
    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, Log, Array]:
        shapes = jax.eval_shape(noise_of, key, state.round, state, batches)
        block = max(1, min(BLOCK, NOISE // max(_size(shapes), 1)))
        _, info, watched = jax.eval_shape(one_round, shapes, state, batches)
        log = _log(chunk, 1, info, watched)

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
                i, state, log, _ = carry
                here = jax.tree.map(lambda a: a[i - first], noise)
                state, info, watched = one_round(here, state, batches)
                return i + 1, state, _write(log, i, 0, info, watched), info.ok

            return jax.lax.while_loop(go_on_here, body, carry)

        start = (jnp.zeros((), jnp.int32), state, log, jnp.array(True))
        _, state, log, ok = jax.lax.while_loop(go_on, one_block, start)
        return state, log, ok

    return advance


def _ask(exchange: Exchange, noise: Any, down: Any, batch: Batch, states: Any) -> tuple[Any, Any]:
    """All silos of a bucket side by side."""
    return jax.vmap(exchange.silo, (0, _axes(exchange), 0, 0))(noise, down, states, batch.data)


def _scheduled(algorithm: FederatedAlgorithm, schedule: Schedule) -> Advance:
    """Those that the schedule names, step by step."""
    exchanges, watch, chunk = algorithm.exchanges, algorithm.watch, chunk_of(schedule)
    steps, size = schedule.steps, schedule.size

    def visit(exchange: Exchange, key: Array, down: Any, state: Any, data: SiloData) -> tuple:
        up, state = exchange.silo(exchange.silo_noise(key, state), down, state, data)
        return strong((up, state, watch(state) if watch else ()))

    def side_by_side(
        exchange: Exchange,
        keys: Array,
        down: Any,
        who: Array,
        silos: Any,
        batches: Any,
        places: Places,
    ) -> tuple[Any, Any, Any]:
        """Participants from the only bucket, mapped."""
        (stack,), (batch,) = silos, batches
        at = places[1][who]
        states, data = jax.tree.map(lambda a: a[at], (stack, batch.data))
        axes = (0, _axes(exchange), 0, 0)
        up, states, seen = jax.vmap(partial(visit, exchange), axes)(keys, down, states, data)
        stack = jax.tree.map(lambda a, new: a.at[at].set(new), stack, states)
        return up, (stack,), seen

    def alone(
        exchange: Exchange,
        key: Array,
        down: Any,
        silo: Array,
        silos: Any,
        batches: Any,
        places: Places,
    ) -> tuple[Any, Any, Any]:
        """One participant, from whichever bucket.

        Of each other bucket some silo's state is taken out and put back as it is, so that no
        stack passes through the conditional.
        """
        bucket_of, place_of = places
        at = [jnp.clip(place_of[silo], 0, len(b.silos) - 1) for b in batches]
        before = tuple(_take(stack, i) for stack, i in zip(silos, at, strict=True))

        def in_bucket(b: int) -> Callable[[Array, Any, Any], tuple[Any, Any, Any]]:
            def branch(key: Array, down: Any, states: Any) -> tuple[Any, Any, Any]:
                data = _take(batches[b].data, at[b])
                up, state, seen = visit(exchange, key, down, states[b], data)
                return up, (*states[:b], state, *states[b + 1 :]), seen

            return branch

        branches = [in_bucket(b) for b in range(len(batches))]
        up, after, seen = jax.lax.switch(bucket_of[silo], branches, key, down, before)
        silos = tuple(_put(*args) for args in zip(silos, after, at, strict=True))
        return up, silos, seen

    def ask(
        exchange: Exchange,
        keys: Array,
        down: Any,
        who: Array,
        silos: Any,
        batches: Any,
        places: Places,
    ) -> tuple[Any, Any, Any]:
        """The participants' replies, the silos' states, and what is watched of participants."""
        if size > 1 and len(batches) == 1:
            return side_by_side(exchange, keys, down, who, silos, batches, places)

        def one(silos: Any, i: Array | int) -> tuple[Any, Any]:
            sent = slices(exchange.scatter, down, i)
            up, silos, seen = alone(exchange, keys[i], sent, who[i], silos, batches, places)
            return silos, (up, seen)

        if size == 1:
            silos, answers = one(silos, 0)
            up, seen = jax.tree.map(lambda a: a[None], answers)
        else:
            silos, (up, seen) = jax.lax.scan(one, silos, jnp.arange(size))
        return up, silos, seen

    @partial(jax.jit, inline=True)
    def one_step(
        key: Array, number: Array, who: Array, server: Any, silos: Any, batches: Any, places: Places
    ) -> tuple[Any, Any, Info, Any]:
        infos = []
        for e, exchange in enumerate(exchanges):
            mine = exchange_key(key, number, e, len(exchanges))
            down, memo = exchange.broadcast(exchange.server_noise(server_key(mine)), server, who)
            keys = jax.vmap(partial(silo_key, mine))(who)
            up, silos, seen = ask(exchange, keys, down, who, silos, batches, places)
            server, info = exchange.server(server, memo, combine(exchange.combine, [up]))
            infos.append(info)
        return server, silos, fold(infos), seen

    @jax.jit
    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, Log, Array]:
        places = _places(batches)

        def go_on(carry: tuple) -> Array:
            i, _, _, ok = carry
            return (i < n) & ok

        def one_round(carry: tuple) -> tuple:
            i, (round_, server, silos, (_, change)), log, _ = carry
            who, plan = visits(schedule, key, round_, carry[1].schedule)
            log = log._replace(visits=log.visits.at[i].set(who))

            def go_on_here(carry: tuple) -> Array:
                return (carry[0] < steps) & carry[-1]

            def step(carry: tuple) -> tuple:
                s, server, silos, change, log, _ = carry
                number = round_ * steps + s
                here = (key, number, who[s], server, silos)
                server, silos, info, seen = one_step(*here, batches, places)
                if size == 1:
                    change = change.at[who[s, 0]].set(info.change)
                return s + 1, server, silos, change, _write(log, i, s, info, seen), info.ok

            first = (jnp.zeros((), jnp.int32), server, silos, change, log, jnp.array(True))
            last = jax.lax.while_loop(go_on_here, step, first)
            _, server, silos, change, log, ok = last
            return i + 1, State(round_ + 1, server, silos, (plan, change)), log, ok

        who = jax.ShapeDtypeStruct((size,), jnp.int32)
        step = (key, state.round, who, state.server, state.silos, batches, places)
        *_, info, seen = jax.eval_shape(one_step, *step)
        log = _log(chunk, steps, info, seen)
        log = log._replace(visits=jnp.zeros((chunk, steps, size), jnp.int32))
        start = (jnp.zeros((), jnp.int32), state, log, jnp.array(True))
        _, state, log, ok = jax.lax.while_loop(go_on, one_round, start)
        return state, log, ok

    return advance


def _log(chunk: int, steps: int, info: Info, watched: Any) -> Log:
    """Room for what rounds report."""

    def room(a: Any) -> Array:
        return jnp.zeros((chunk, steps, *a.shape), a.dtype)

    return Log(jnp.zeros(chunk), *jax.tree.map(room, (info.report, (), watched)))


def _write(log: Log, i: Array, step: Array | int, info: Info, watched: Any) -> Log:
    """Put what step ``step`` of round ``i`` reports in its place."""

    def put(room: Array, a: Array) -> Array:
        return room.at[i, step].set(a)

    losses = log.losses.at[i].add(info.loss)
    reports, watched = jax.tree.map(put, (log.reports, log.watched), (info.report, watched))
    return Log(losses, reports, log.visits, watched)


def _places(batches: tuple[Batch, ...]) -> Places:
    """For each silo its bucket, and its place there."""
    sizes = [len(b.silos) for b in batches]
    order = in_order(batches)
    bucket = jnp.repeat(jnp.arange(len(batches)), jnp.array(sizes), total_repeat_length=sum(sizes))
    place = jnp.concatenate([jnp.arange(n) for n in sizes])
    return bucket[order], place[order]


def _take(stack: Any, i: Array) -> Any:
    return jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False), stack)


def _put(stack: Any, one: Any, i: Array) -> Any:
    return jax.tree.map(
        lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0), stack, one
    )


def _axes(exchange: Exchange) -> Any:
    return jax.tree.map(lambda scattered: 0 if scattered else None, exchange.scatter)


def _count(batches: tuple[Batch, ...]) -> int:
    return sum(len(b.silos) for b in batches)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
