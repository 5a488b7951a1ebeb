"""The plain host loop: the same functions, silo by silo, for debugging and as the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Info
from numpyro_fed.model.data import stacked
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import (
    Batch,
    Log,
    Runtime,
    State,
    chunk_of,
    combine,
    exchange_key,
    fold,
    init_keys,
    init_schedule,
    server_key,
    silo_key,
    slices,
    visits,
)
from numpyro_fed.trees import strong


def host(algorithm: FederatedAlgorithm, schedule: Schedule | None = None) -> Runtime:
    """Run the silos one after the other from Python, each at its own size, without padding.

    Every function is compiled on its own; under ``jax.disable_jit()`` all of it is ordinary
    Python, in which a debugger can stop. Expects one silo in each batch.
    """
    init_server, init_silo = jax.jit(algorithm.init_server), jax.jit(algorithm.init_silo)
    exchanges = [
        (e, x, jax.jit(x.silo_noise), jax.jit(x.broadcast), jax.jit(x.silo), jax.jit(x.server))
        for e, x in enumerate(algorithm.exchanges)
    ]
    watch = jax.jit(algorithm.watch or (lambda state: ()))
    who_when = jax.jit(partial(visits, schedule)) if schedule else None

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        key_server, key_silos = init_keys(key)
        silos = []
        for silo, data in map(_only, batches):
            silos.append(_stack(init_silo(jax.random.fold_in(key_silos, silo), data)))
        server, states, carry = strong(
            (init_server(key_server), tuple(silos), init_schedule(schedule, key, len(batches)))
        )
        return State(jnp.zeros((), jnp.int32), server, states, carry)

    def one_step(
        key: Array, number: Array, who: np.ndarray, state: State, batches: tuple[Batch, ...]
    ) -> tuple[State, Info, list[Any]]:
        where = {int(b.silos[0]): i for i, b in enumerate(batches)}
        server, silos, infos = state.server, list(state.silos), []
        for e, exchange, noise, broadcast, ask, answer in exchanges:
            mine = exchange_key(key, number, e, len(exchanges))
            drawn = exchange.server_noise(server_key(mine))
            down, memo = broadcast(drawn, server, jnp.asarray(who, jnp.int32))
            replies = []
            for i, j in enumerate(who.tolist()):
                silo, data = _only(batches[where[j]])
                before = _only(silos[where[j]])
                sent = slices(exchange.scatter, down, i)
                up, after = ask(noise(silo_key(mine, silo), before), sent, before, data)
                replies.append(_stack(up))
                silos[where[j]] = _stack(after)
            server, info = answer(server, memo, combine(exchange.combine, replies))
            infos.append(info)
        watched = [watch(_only(silos[where[j]])) for j in who.tolist()]
        return state._replace(server=server, silos=tuple(silos)), fold(infos), watched

    def one_round(
        key: Array, state: State, batches: tuple[Batch, ...]
    ) -> tuple[State, float, bool, Any]:
        plan, change = (np.arange(len(batches))[None], ()), None
        if who_when is not None:
            plan, change = who_when(key, state.round, state.schedule), state.schedule[1]
        loss, ok, rows = 0.0, True, []
        for s, who in enumerate(np.asarray(plan[0])):
            number = state.round * len(plan[0]) + s
            state, info, watched = one_step(key, number, who, state, batches)
            if change is not None and len(who) == 1:
                change = change.at[who[0]].set(info.change)
            rows.append(jax.tree.map(np.asarray, (info.report, who, stacked(watched))))
            loss, ok = loss + float(info.loss), bool(info.ok)
            if not ok:  # such a round is not kept, nor is its row
                rows += rows[-1:] * (len(plan[0]) - len(rows))
                break
        carry = () if change is None else (plan[1], change)
        return state._replace(round=state.round + 1, schedule=carry), loss, ok, stacked(rows)

    def advance(
        key: Array, state: State, batches: tuple[Batch, ...], n: int
    ) -> tuple[State, Log, bool]:
        losses: list[float] = []
        rows: list[Any] = []
        ok = True
        while len(rows) < n and ok:
            state, loss, ok, row = one_round(key, state, batches)
            losses.append(loss)
            rows.append(row)
        reports, seen, watched = stacked(rows) if rows else ((), (), ())
        return state, Log(np.array(losses), reports, seen if schedule else (), watched), ok

    return Runtime(init, advance, chunk_of(schedule))


def _only(stack: Any) -> Any:
    return jax.tree.map(lambda a: a[0], stack)


def _stack(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[None], tree)
