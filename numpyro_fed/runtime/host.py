"""The plain host loop: the same functions, silo by silo, for debugging and as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    Down,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Server,
    Silo,
    Up,
    as_drafted,
)
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.runtime.noise import exchange_key, init_keys, server_key, silo_key
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import (
    Advance,
    Batches,
    Log,
    RunStatus,
    Runtime,
    ServerData,
    Single,
    Stacks,
    State,
    Watch,
    chunk_of,
    init_schedule,
    visits,
)
from numpyro_fed.runtime.step import Answers, Noise, Transport, in_parts, step
from numpyro_fed.trees import Tree, drop_weak_types


def host(
    algorithm: FederatedAlgorithm[Server, Silo], schedule: Schedule[Carry] | None = None
) -> Runtime:
    """Run the silos one after the other from Python, each at its own size, without padding.

    Every function is compiled on its own; under ``jax.disable_jit()`` all of it is ordinary
    Python, in which a debugger can stop. Expects one silo in each batch.
    """
    init_server, init_silo = jax.jit(algorithm.init_server), jax.jit(algorithm.init_silo)
    watch = jax.jit(algorithm.watch or (lambda state: ()))

    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)
        silos = []
        for silo, data in map(_only, batches):
            silos.append(_stack(init_silo(jax.random.fold_in(key_silos, silo), data)))
        server, states, carry = drop_weak_types(
            (init_server(key_server), tuple(silos), init_schedule(schedule, key, len(batches)))
        )
        return State(jnp.zeros((), jnp.int32), server, states, carry)

    round_, reaching = compiled(algorithm.round), partial(_reach, watch=watch)
    advance = rounds(round_, schedule, len, reaching, done=algorithm.done)
    return Runtime(init, advance, single, chunk_of(schedule))


def rounds(
    round_: Round,
    schedule: Schedule[Carry] | None,
    num_silos: Callable[[Batches], int],
    reach_of: Callable[[Batches], Transport[Array, Stacks]],
    done: Callable[[Server], Array] | None = None,
) -> Advance:
    """Return a plain loop over rounds and their steps, whoever asks the silos."""
    who_when = jax.jit(partial(visits, schedule)) if schedule else None

    def one_round(
        key: Array, state: State, batches: Batches, server_data: ServerData
    ) -> tuple[State, float, RunStatus, Any]:
        size = num_silos(batches)
        plan, change = (np.arange(size)[None], ()), None
        if who_when is not None:
            plan, change = who_when(key, state.round, state.schedule), state.schedule[1]
        loss, ok, good, rows = 0.0, True, np.ones(size, bool), []
        server, silos, reach = state.server, state.silos, reach_of(batches)
        for s, who in enumerate(np.asarray(plan[0])):
            noise = _noise(round_, key, state.round * len(plan[0]) + s)
            server, silos, info, good[who], seen = step(
                round_, reach, noise, server, silos, jnp.asarray(who, jnp.int32), server_data
            )
            if change is not None and len(who) == 1:
                change = change.at[who[0]].set(info.change)
            rows.append(jax.tree.map(np.asarray, (info.report, who, seen)))
            loss, ok = loss + float(info.loss), bool(info.ok)
            if not ok:  # such a round is not kept, nor is its row
                rows += rows[-1:] * (len(plan[0]) - len(rows))
                break
        carry = () if change is None else (plan[1], change)
        return (
            State(state.round + 1, server, silos, carry),
            loss,
            RunStatus(ok, good),
            stacked(rows),
        )

    def advance(
        key: Array,
        state: State,
        batches: Batches,
        n: int,
        server_data: ServerData = None,
        stop: bool = False,
    ) -> tuple[State, Log, RunStatus]:
        losses: list[float] = []
        logged: list[Any] = []
        ended = RunStatus(True, np.ones(num_silos(batches), bool))
        while len(logged) < n and ended.ok and not (stop and done and done(state.server)):
            state, loss, ended, row = one_round(key, state, batches, server_data)
            losses.append(loss)
            logged.append(row)
        reports, seen, watched = stacked(logged) if logged else ((), (), ())
        return state, Log(np.array(losses), reports, seen if schedule else (), watched), ended

    return advance


def single(round_: Round) -> Single:
    """Return one round with every silo, one after the other."""
    return alone(compiled(round_), len, partial(_reach, watch=lambda state: ()))


def alone(
    round_: Round,
    num_silos: Callable[[Batches], int],
    reach_of: Callable[[Batches], Transport[Array, Stacks]],
) -> Single:
    """Return one round with every silo, whoever asks them."""

    def run(
        key: Array, server: object, silos: Stacks, batches: Batches, server_data: ServerData = None
    ) -> tuple[Any, Stacks, Info, Array]:
        noise, who = _noise(round_, key, 0), jnp.arange(num_silos(batches))
        reach = reach_of(batches)
        server, silos, info, good, _ = step(round_, reach, noise, server, silos, who, server_data)
        return server, silos, info, good

    return run


def _noise(round_: Round, key: Array, number: Array | int) -> Noise[Array]:
    """Return the server's noise, and for each exchange the key from which silos draw theirs."""
    size = len(round_.exchanges)
    keys = [exchange_key(key, number, e, size) for e in range(size)]
    return Noise(round_.noise(server_key(keys[0])), keys)


def _reach(batches: Batches, watch: Watch) -> Transport[Array, Stacks]:
    """Reach one participant after the other; ``noise`` is the key of the exchange."""
    where = {int(b.silos[0]): i for i, b in enumerate(batches)}

    def reach(
        exchange: Exchange[Silo, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        after, replies, seen = list(silos), list[Reply[Up]](), []
        for i, j in enumerate(np.asarray(who).tolist()):
            silo, data = _only(batches[where[j]])
            before = _only(silos[where[j]])
            eps = exchange.silo_noise(silo_key(noise, silo), before)
            sent = slices(exchange.scatter, down, i)
            reply, state = exchange.silo(eps, sent, before, data)
            replies.append(_stack(reply))
            seen.append(watch(state))
            after[where[j]] = _stack(state)
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, tuple(after), stacked(seen))

    return reach


def compiled(round_: Round) -> Round:
    """Return the same round, each part of it compiled."""
    exchanges = tuple(map(compiled_visit, round_.exchanges))
    return replace(in_parts(round_), exchanges=exchanges)


def compiled_visit(exchange: Exchange[Silo, Down, Up]) -> Exchange[Silo, Down, Up]:
    """Return the same exchange, a silo's part of it compiled.

    Its ``silo`` is the whole visit: the reply that it returns is checked and the draft is the
    silo's next state, so that nothing is left to commit.
    """
    visit, noise = jax.jit(exchange.visit), jax.jit(exchange.silo_noise)
    return exchange._replace(silo=visit, commit=as_drafted, silo_noise=noise)


def _only(stack: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], stack)


def _stack(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)
