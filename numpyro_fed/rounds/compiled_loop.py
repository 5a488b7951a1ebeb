"""The compiled runtime: rounds in one loop, silos of one shape side by side.

A call of ``advance`` is one XLA program: a ``while_loop`` over rounds whose number is an input, and
in each round a ``vmap`` over each bucket of silos. Where participants do not depend on what a round
computes, they and the noise are drawn for a block of rounds at once, and a loop over blocks stands
outside. Elsewhere noise is drawn step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import jit_once, readable, warn_of_slow_additions
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.exchange import (
    Down,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Server,
    Silo,
    Up,
    combine,
    for_participants,
)
from numpyro_fed.rounds.keys import exchange_key, init_keys, participant_keys, server_key, silo_key
from numpyro_fed.rounds.runtime import Log, RunStatus, Runtime, Single, State
from numpyro_fed.rounds.schedules import Schedule, chunk_of, init_schedule, visits
from numpyro_fed.rounds.silos import Batches, ServerData, Stacks, Watch, in_order, num_silos
from numpyro_fed.rounds.step import (
    Answers,
    RoundNoise,
    StepDone,
    Transport,
    step,
    transport_of_stacks,
)

# Rounds for which noise is drawn at once. One draw for many rounds costs less than many small ones:
# a round with 100 of 10,000 silos took 2.36 times as long as one of 100 silos before, 2.02 times
# now (docs/results/speed.md). More rounds at once were tried and gained nothing.
BLOCK = 64
# Numbers that are drawn at once, about, which bounds the memory: 4 MB in single precision.
NOISE = 2**20

Positions = tuple[Array, Array]  # each silo's bucket and its row there, (silos,) each
Participants = Array | tuple[()]  # who takes part; empty where everyone does
# The carries of the loops over rounds and over the steps of a round begin with a number.
RoundsSoFar = tuple[Array, State, Log, RunStatus]
StepsSoFar = tuple[Array, Any, Stacks, Log, RunStatus]


def compiled_runtime(
    algorithm: FederatedAlgorithm[Server, Silo],
    schedule: Schedule | None = None,
    *,
    quick: bool = False,
) -> Runtime:
    """Return the runtime of all silos in this process: a loop over rounds, a map over silos.

    The program is compiled once for a set of shapes; the number of rounds is an input. Without a
    schedule all silos take part in every round. With one, the cost of a round is that of its
    participants: their states are gathered from the stacks and scattered back. With ``quick`` the
    program is compiled in less than half of the time and runs slower, which pays for few rounds.
    """
    warn_of_slow_additions()
    jit = jit_once if quick else jax.jit

    @jit
    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)
        first = jax.vmap(
            lambda j, data: algorithm.init_silo(jax.random.fold_in(key_silos, j), data)
        )
        silos = tuple(b.real(first(b.padded(b.silos), b.data)) for b in batches)
        carry = init_schedule(schedule, key, num_silos(batches))
        server = algorithm.init_server(key_server)
        return readable(drop_weak_types(State(jnp.zeros((), jnp.int32), server, silos, carry)))

    advance = jit(partial(_advance, algorithm, schedule))
    return Runtime(init, advance, single, transport_of_stacks, chunk_of(schedule))


def single(round_: Round) -> Single:
    """Return one round with every silo, compiled quickly."""

    @jit_once
    def run(
        key: Array, server: object, silos: Stacks, batches: Batches, server_data: ServerData = None
    ) -> StepDone[Stacks]:
        noise = _noise_of_all(round_, key, jnp.zeros(1, jnp.int32), silos, batches)
        noise = jax.tree.map(lambda a: a[0], noise)
        who, order = jnp.arange(num_silos(batches)), in_order(batches)
        transport = _transport_to_all(batches, order, None)
        done = step(round_, transport, noise, server, silos, who, server_data)
        return readable(drop_weak_types(done._replace(good=done.good[order])))

    return run


def _noise_of_all(
    round_: Round, key: Array, numbers: Array, silos: Stacks, batches: Batches
) -> RoundNoise:
    """Return the server's noise (steps, ...), and by exchange and bucket that of all silos."""
    size = len(round_.exchanges)
    ends = np.cumsum([len(b.silos) for b in batches])[:-1]
    all_silos, server_noise, silo_noises = jnp.concatenate([b.silos for b in batches]), None, []

    def of_bucket(exchange: Exchange[Silo, Down, Up], keys: Array, states: Silo) -> Any:
        # The noise's shape depends on that of a state alone, so the first silo's serves for all.
        some_state = jax.tree.map(lambda a: a[0], states)
        # Steps and silos are one axis here: XLA compiles one batched draw sooner than a nested one.
        noise = jax.vmap(exchange.silo_noise, (0, None))(keys.reshape(-1), some_state)
        return jax.tree.map(lambda a: a.reshape(*keys.shape, *a.shape[1:]), noise)

    for e, exchange in enumerate(round_.exchanges):
        exchange_keys = jax.vmap(lambda i, e=e: exchange_key(key, i, e, size))(numbers)
        server, silo = jax.vmap(participant_keys, (0, None))(exchange_keys, all_silos)
        silo_noises.append(
            list(map(partial(of_bucket, exchange), jnp.split(silo, ends, axis=1), silos))
        )
        server_noise = jax.vmap(round_.noise)(server) if e == 0 else server_noise
    return server_noise, silo_noises


def _transport_to_all(
    batches: Batches, order: Array, watch: Watch | None
) -> Transport[list[Any], Stacks]:
    """Return the transport to all silos: each bucket is mapped, one bucket after the other."""

    def transport(
        exchange: Exchange[Silo, Down, Up], noise: list[Any], down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        replies, after = [], []
        for eps, batch, states in zip(noise, batches, silos, strict=True):
            axes = (0, _axes(exchange), 0, 0)
            eps, states = batch.padded((eps, states))
            sent = for_participants(exchange.scatter, down, batch.padded(batch.silos))
            answer = jax.vmap(exchange.visit, axes)(eps, sent, states, batch.data)
            reply, states = batch.real(answer)
            replies.append(reply)
            after.append(states)
        by_bucket = [jax.vmap(watch)(states) for states in after] if watch else [()]
        watched = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *by_bucket)
        # In the order of buckets: it is put into that of silos after the last round alone.
        good = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies, order), good, tuple(after), watched)

    return transport


def _advance(
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule | None,
    key: Array,
    state: State,
    batches: Batches,
    n: int,
    server_data: ServerData = None,
    stop: bool = False,
) -> tuple[State, Log, RunStatus]:
    """Run up to ``n`` rounds, as :class:`Runtime` says; all silos take part without a schedule."""
    done, size = algorithm.done, num_silos(batches)
    ahead = schedule is None or (schedule.ahead and schedule.steps == 1)
    order: Any = in_order(batches)
    if schedule is not None:
        # Each silo's bucket (silos,), and its row in that bucket (silos,).
        sizes = [len(b.silos) for b in batches]
        numbers = jnp.arange(len(batches))
        bucket = jnp.repeat(numbers, jnp.array(sizes), total_repeat_length=size)
        place = jnp.concatenate([jnp.arange(n) for n in sizes])
        order = bucket[order], place[order]
    # The inlined jit keeps its trace: eval_shape and the loop's body share one.
    one_step = jax.jit(partial(_step, algorithm), inline=True)
    draw = partial(_draw, algorithm.round, schedule, key, batches)
    rest = batches, order, server_data
    first = jax.eval_shape(draw, state.round[None], state)
    drawn = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), first)
    _, _, info, good, watched = jax.eval_shape(one_step, drawn, state.server, state.silos, *rest)
    # An empty log of as many rounds as one call can log, from the shapes of a report.
    room = chunk_of(schedule), 1 if schedule is None else schedule.steps
    reported = info.report, drawn[0], watched
    empty = jax.tree.map(lambda a: jnp.zeros((*room, *a.shape), a.dtype), reported)
    # Few rounds a block where a round's noise is large: the block stands in memory at once.
    drawn_at_once = sum(a.size for a in jax.tree.leaves(first))
    block = max(1, min(BLOCK, NOISE // max(drawn_at_once, 1)))

    def continues(so_far: RoundsSoFar) -> Array:
        i, state, _, status = so_far
        # The last round may be kept, and the algorithm is not done.
        return (i < n) & (status.ok & ~(stop & done(state.server)) if done else status.ok)

    def one_block(so_far: RoundsSoFar) -> RoundsSoFar:
        begun, state, *_ = so_far
        drawn = draw(state.round + jnp.arange(block), state)

        def body(so_far: RoundsSoFar) -> RoundsSoFar:
            i, state, log, _ = so_far
            of_round = jax.tree.map(lambda a: a[i - begun], drawn)
            server, silos, info, good, watched = one_step(
                of_round, state.server, state.silos, *rest
            )
            state = State(state.round + 1, server, silos, state.schedule)
            log = _write(log, i, 0, info, of_round[0], watched)
            return i + 1, state, log, RunStatus(info.ok, good)

        return jax.lax.while_loop(
            lambda so_far: (so_far[0] - begun < block) & continues(so_far), body, so_far
        )

    status = RunStatus(jnp.array(True), jnp.ones(good.shape if ahead else size, bool))
    start = jnp.zeros((), jnp.int32), state, Log(jnp.zeros(room[0]), *empty), status
    if schedule is not None and not ahead:
        one_round = partial(_run_steps, algorithm.round, schedule, one_step, key, rest)
        return readable(jax.lax.while_loop(continues, one_round, start)[1:])
    i, state, log, status = jax.lax.while_loop(continues, one_block, start)
    if schedule is None:
        return readable((state, log, status._replace(replies=status.replies[order])))
    # Participants of the last round; of row 0, whose replies count as good, if none was run.
    last = log.visits[jnp.maximum(i - 1, 0), 0]
    replies = jnp.ones(size, bool).at[last].set(status.replies)
    return readable((state, log, status._replace(replies=replies)))


def _draw(
    round_: Round,
    schedule: Schedule | None,
    key: Array,
    batches: Batches,
    numbers: Array,
    state: State,
) -> tuple[Participants, RoundNoise]:
    """Return participants and noise of the first steps of rounds, leaves (rounds, ...)."""
    if schedule is None:
        return (), _noise_of_all(round_, key, numbers, state.silos, batches)

    def one_round(number: Array) -> tuple[Array, RoundNoise]:
        who = visits(schedule, key, number, state.schedule)[0][0]
        return who, _noise_of_participants(round_, key, number, who, state.silos)

    return jax.vmap(one_round)(numbers)


def _step(
    algorithm: FederatedAlgorithm[Any, Any],
    drawn: tuple[Participants, RoundNoise],
    server: object,
    silos: Stacks,
    batches: Batches,
    order: Any,
    server_data: ServerData,
) -> StepDone[Stacks]:
    """Run a step with its participants and its noise."""
    who, noise = drawn
    transport_of: Any = _transport_to_some
    if isinstance(who, tuple):
        who, transport_of = jnp.arange(num_silos(batches)), _transport_to_all
    transport = transport_of(batches, order, algorithm.watch)
    return step(algorithm.round, transport, noise, server, silos, who, server_data)


def _run_steps(
    round_: Round,
    schedule: Schedule,
    one_step: Callable[..., Any],
    key: Array,
    rest: tuple[Batches, Any, ServerData],
    so_far: RoundsSoFar,
) -> RoundsSoFar:
    """Run a round of several steps, or one whose participants the last round has decided."""
    i, state, log, _ = so_far
    who, carry = visits(schedule, key, state.round, state.schedule)

    def body(steps: StepsSoFar) -> StepsSoFar:
        s, server, silos, log, status = steps
        number = state.round * len(who) + s
        noise = _noise_of_participants(round_, key, number, who[s], silos)
        server, silos, info, good, watched = one_step((who[s], noise), server, silos, *rest)
        log = _write(log, i, s, info, who[s], watched)
        return s + 1, server, silos, log, RunStatus(info.ok, status.replies.at[who[s]].set(good))

    status = RunStatus(jnp.array(True), jnp.ones(num_silos(rest[0]), bool))
    first = jnp.zeros((), jnp.int32), state.server, state.silos, log, status
    _, server, silos, log, status = jax.lax.while_loop(
        lambda steps: (steps[0] < len(who)) & steps[-1].ok, body, first
    )
    return i + 1, State(state.round + 1, server, silos, carry), log, status


def _noise_of_participants(
    round_: Round, key: Array, number: Array, who: Array, silos: Stacks
) -> RoundNoise:
    """Return the noise of one step for the server and for its participants ``who`` (k,)."""
    size = len(round_.exchanges)
    exchange_keys = [exchange_key(key, number, e, size) for e in range(size)]
    noises: list[Any] = [jax.vmap(partial(silo_key, key))(who) for key in exchange_keys]
    # Noise of silos in different buckets differs in shape, and which bucket a participant is in is
    # known at run time only: with several buckets their keys stand for it.
    if len(silos) == 1:
        state = jax.tree.map(lambda a: a[0], silos[0])
        draws = [jax.vmap(exchange.silo_noise, (0, None)) for exchange in round_.exchanges]
        noises = [draw(keys, state) for draw, keys in zip(draws, noises, strict=True)]
    return round_.noise(server_key(exchange_keys[0])), noises


def _transport_to_some(
    batches: Batches, positions: Positions, watch: Watch | None
) -> Transport[Any, Stacks]:
    """Return the transport to some silos: mapped where there is one bucket, else one by one."""
    bucket_of, place_of = positions
    take = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0)

    def visit(
        exchange: Exchange[Silo, Down, Up], noise: Any, down: Down, state: Silo, data: SiloData
    ) -> tuple[Reply[Up], Silo, Any]:
        """Return a silo's reply, its next state, and what is watched of that state."""
        if len(batches) > 1:
            noise = exchange.silo_noise(noise, state)
        reply, state = exchange.visit(noise, down, state, data)
        return drop_weak_types((reply, state, watch(state) if watch else ()))

    def transport(
        exchange: Exchange[Any, Down, Up], noise: object, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        def body(silos: Stacks, i: Array | int) -> tuple[Stacks, tuple[Reply[Up], Any]]:
            """Visit participant ``i``, from whichever bucket."""
            sent = for_participants(exchange.scatter, down, i)
            eps, j = jax.tree.map(lambda a: a[i], noise), who[i]
            # From each other bucket one silo's state is taken out and put back unchanged. XLA
            # copies what passes through a conditional. With one state of each bucket as the
            # operand, instead of the stacks, a visit costs the same for ten silos as for ten
            # thousand.
            at = [jnp.clip(place_of[j], 0, len(b.silos) - 1) for b in batches]
            before = tuple(
                jax.tree.map(partial(take, index=i), a) for a, i in zip(silos, at, strict=True)
            )

            def in_bucket(
                b: int, eps: object, sent: Down, states: Stacks
            ) -> tuple[Reply[Up], Stacks, Any]:
                data = jax.tree.map(partial(take, index=at[b]), batches[b].data)
                reply, state, watched = visit(exchange, eps, sent, states[b], data)
                return reply, (*states[:b], state, *states[b + 1 :]), watched

            branches = [partial(in_bucket, b) for b in range(len(batches))]
            reply, after, watched = jax.lax.switch(bucket_of[j], branches, eps, sent, before)
            silos = tuple(
                jax.tree.map(partial(put, index=i), stack, one)
                for stack, one, i in zip(silos, after, at, strict=True)
            )
            return silos, (reply, watched)

        if len(who) > 1 and len(batches) == 1:
            # In one map: gather their states, run, scatter them back.
            (stack,), (batch,) = silos, batches
            at = place_of[who]
            states, data = jax.tree.map(lambda a: a[at], (stack, batch.data))
            visits = jax.vmap(partial(visit, exchange), (0, _axes(exchange), 0, 0))
            replies, states, watched = visits(noise, down, states, data)
            silos = (jax.tree.map(lambda a, new: a.at[at].set(new), stack, states),)
        elif len(who) == 1:  # without the loop around a single visit
            silos, answer = body(silos, 0)
            replies, watched = jax.tree.map(lambda a: a[None], answer)
        else:
            silos, (replies, watched) = jax.lax.scan(body, silos, jnp.arange(len(who)))
        return Answers(combine(exchange.combine, [replies]), replies.ok, silos, watched)

    return transport


def _write(
    log: Log, i: Array, step: Array | int, info: Info, who: Participants, watched: object
) -> Log:
    """Return the log with the report of step ``step`` of round ``i``; losses of steps add up."""
    losses, reported = log.losses.at[i].add(info.loss), (info.report, who, watched)
    rooms = jax.tree.map(lambda room, a: room.at[i, step].set(a), tuple(log[1:]), reported)
    return Log(losses, *rooms)


def _axes(exchange: Exchange[Silo, Down, Up]) -> Any:
    return jax.tree.map(lambda scattered: 0 if scattered else None, exchange.scatter)
