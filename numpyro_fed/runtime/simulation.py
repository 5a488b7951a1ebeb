"""The compiled runtime: rounds in one loop, silos of one shape side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

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
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.programs import jit_once
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.runtime.noise import (
    exchange_key,
    init_keys,
    participant_keys,
    server_key,
    silo_key,
)
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import (
    BLOCK,
    NOISE,
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
    in_order,
    init_schedule,
    visits,
)
from numpyro_fed.runtime.step import Answers, Noise, Transport, step
from numpyro_fed.trees import Tree, drop_weak_types

Places = tuple[Array, Array]
OfBuckets = Noise[list[Any]]
Where = TypeVar("Where")
Drawn = TypeVar("Drawn")
Visitors = Array | tuple[()]  # who takes part; empty where everyone does
Steps = tuple[Array, Any, Stacks, Array, Log, RunStatus]  # how far the steps of a round have come
Course = tuple[Array, State, Log, RunStatus]  # how far rounds have come


def simulation(
    algorithm: FederatedAlgorithm[Server, Silo],
    schedule: Schedule[Carry] | None = None,
    *,
    quick: bool = False,
) -> Runtime:
    """Run all silos in this process, as one program: a loop over rounds, a map over silos.

    The program is compiled once for a set of shapes; the number of rounds is an input. Without a
    schedule everyone takes part in every round. With one, a round costs what its participants
    cost: their states are taken out of the stacks and put back in place. ``quick`` is for what runs
    a few rounds: compiled in less than half of the time, and slower after it.
    """
    jit = jit_once if quick else jax.jit

    @jit
    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)

        def one(silo: Array, data: SiloData) -> Silo:
            return algorithm.init_silo(jax.random.fold_in(key_silos, silo), data)

        silos = tuple(jax.vmap(one)(b.silos, b.data) for b in batches)
        carry = init_schedule(schedule, key, _count(batches))
        server = algorithm.init_server(key_server)
        return drop_weak_types(State(jnp.zeros((), jnp.int32), server, silos, carry))

    chunk = chunk_of(schedule)
    if schedule is None:
        advance = _in_blocks(algorithm, _everyone(algorithm), chunk)
    elif schedule.ahead and schedule.steps == 1:
        advance = _in_blocks(algorithm, _some_ahead(algorithm, schedule), chunk)
    else:
        advance = _step_by_step(algorithm, schedule)
    return Runtime(init, jit(advance), single, chunk, partial(single, jit=jit_once))


def single(round_: Round, jit: Callable[..., Callable[..., Any]] = jax.jit) -> Single:
    """Return one round with every silo, compiled."""

    @jit
    def run(
        key: Array, server: object, silos: Stacks, batches: Batches, server_data: ServerData = None
    ) -> tuple[Any, Stacks, Info, Array]:
        noise = _noise_of(round_, key, jnp.zeros(1, jnp.int32), silos, batches)
        noise = jax.tree.map(lambda a: a[0], noise)
        who, order = jnp.arange(_count(batches)), in_order(batches)
        reach = _reach_everyone(batches, order, None)
        server, silos, info, good, _ = step(round_, reach, noise, server, silos, who, server_data)
        return server, silos, info, good[order]

    return run


def _noise_of(
    round_: Round, key: Array, numbers: Array, silos: Stacks, batches: Batches
) -> OfBuckets:
    """Return all noise of some steps, along the first axis.

    The server's, and for each exchange that of each bucket. Steps and silos are one axis where it
    is drawn, which is compiled sooner than two.
    """
    size = len(round_.exchanges)
    ends = np.cumsum([len(b.silos) for b in batches])[:-1]
    everyone, of_server, of_silos = jnp.concatenate([b.silos for b in batches]), None, []

    def bucket(exchange: Exchange[Silo, Down, Up], keys: Array, states: Silo) -> Any:
        some = jax.tree.map(lambda a: a[0], states)
        noise = jax.vmap(exchange.silo_noise, (0, None))(keys.reshape(-1), some)
        return jax.tree.map(lambda a: a.reshape(*keys.shape, *a.shape[1:]), noise)

    for e, exchange in enumerate(round_.exchanges):
        mine = jax.vmap(lambda i, e=e: exchange_key(key, i, e, size))(numbers)
        server, silo = jax.vmap(participant_keys, (0, None))(mine, everyone)
        parts = zip(jnp.split(silo, ends, axis=1), silos, strict=True)
        of_silos.append([bucket(exchange, keys, states) for keys, states in parts])
        of_server = jax.vmap(round_.noise)(server) if e == 0 else of_server
    return Noise(of_server, of_silos)


def _reach_everyone(
    batches: Batches, order: Array, watch: Watch | None
) -> Transport[list[Any], Stacks]:
    """Reach all silos of a bucket side by side, bucket after bucket.

    ``order`` is that of the silos' numbers, sorted out once and not in each round; which replies
    were good is told bucket after bucket.
    """

    def reach(
        exchange: Exchange[Silo, Down, Up], noise: list[Any], down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        replies, after = [], []
        for eps, batch, states in zip(noise, batches, silos, strict=True):
            axes = (0, _axes(exchange), 0, 0)
            sent = slices(exchange.scatter, down, batch.silos)
            reply, states = jax.vmap(exchange.visit, axes)(eps, sent, states, batch.data)
            replies.append(reply)
            after.append(states)
        watched = [jax.vmap(watch)(states) for states in after] if watch else [()]
        seen = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *watched)
        good = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies, order), good, tuple(after), seen)

    return reach


class Rounds(NamedTuple, Generic[Where, Drawn]):
    """Rounds of one step whose participants and noise are drawn for many of them at once.

    Attributes
    ----------
    places : batches -> pytree
        Where the silos stand, found once.
    draw : (key, numbers, state, batches) -> pytree, leaves (rounds, ...)
        What rounds are drawn from.
    one : (drawn, state, batches, places, server_data) -> (State, Info, who, good, seen)
        A round; ``who`` is empty where everyone takes part.
    by_number : (places, who, good) -> (silos,) bool
        Which replies were good, by number.
    """

    places: Callable[[Batches], Where]
    draw: Callable[[Array, Array, State, Batches], Drawn]
    one: Callable[
        [Drawn, State, Batches, Where, ServerData], tuple[State, Info, Visitors, Array, Any]
    ]
    by_number: Callable[[Where, Visitors, Array], Array]


def _in_blocks(
    algorithm: FederatedAlgorithm[Server, Silo], rounds: Rounds[Where, Drawn], chunk: int
) -> Advance:
    """Draw for a block of rounds, run them, and so on."""
    one_round = jax.jit(rounds.one, inline=True)  # traced once, though asked for its shapes too

    def advance(
        key: Array,
        state: State,
        batches: Batches,
        n: int,
        server_data: ServerData = None,
        stop: bool = False,
    ) -> tuple[State, Log, RunStatus]:
        places = rounds.places(batches)
        one = jax.eval_shape(rounds.draw, key, state.round[None], state, batches)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), one)
        block = max(1, min(BLOCK, NOISE // max(_size(shapes), 1)))
        inputs = (shapes, state, batches, places, server_data)
        _, info, who, good, seen = jax.eval_shape(one_round, *inputs)
        log = _log(chunk, 1, info, who, seen)

        def go_on(carry: Course) -> Array:
            i, state, _, ended = carry
            return (i < n) & _goes_on(algorithm, state.server, ended, stop)

        def one_block(carry: Course) -> Course:
            first, state, _, _ = carry
            drawn = rounds.draw(key, state.round + jnp.arange(block), state, batches)

            def go_on_here(carry: Course) -> Array:
                return (carry[0] - first < block) & go_on(carry)

            def body(carry: Course) -> Course:
                i, state, log, _ = carry
                here = jax.tree.map(lambda a: a[i - first], drawn)
                state, info, who, good, seen = one_round(here, state, batches, places, server_data)
                return i + 1, state, _write(log, i, 0, info, who, seen), RunStatus(info.ok, good)

            return jax.lax.while_loop(go_on_here, body, carry)

        ended = RunStatus(jnp.array(True), jnp.ones(good.shape, bool))
        start = (jnp.zeros((), jnp.int32), state, log, ended)
        i, state, log, ended = jax.lax.while_loop(go_on, one_block, start)
        last = jax.tree.map(lambda a: a[jnp.maximum(i - 1, 0), 0], log.visits)
        return state, log, ended._replace(replies=rounds.by_number(places, last, ended.replies))

    return advance


def _everyone(algorithm: FederatedAlgorithm[Server, Silo]) -> Rounds[Array, OfBuckets]:
    """Return rounds of all silos."""
    round_, watch = algorithm.round, algorithm.watch

    def draw(key: Array, numbers: Array, state: State, batches: Batches) -> OfBuckets:
        return _noise_of(round_, key, numbers, state.silos, batches)

    def one(
        noise: OfBuckets, state: State, batches: Batches, order: Array, server_data: ServerData
    ) -> tuple[State, Info, Visitors, Array, Any]:
        who, reach = jnp.arange(_count(batches)), _reach_everyone(batches, order, watch)
        server, silos, info, good, seen = step(
            round_, reach, noise, state.server, state.silos, who, server_data
        )
        return State(state.round + 1, server, silos), info, (), good, seen

    return Rounds(in_order, draw, one, lambda order, who, good: good[order])


def _some_ahead(
    algorithm: FederatedAlgorithm[Server, Silo], schedule: Schedule[Carry]
) -> Rounds[Places, tuple[Array, Noise[Any]]]:
    """Return rounds of one step, of those whom a schedule names that is known ahead."""
    round_, watch = algorithm.round, algorithm.watch

    def draw(
        key: Array, numbers: Array, state: State, batches: Batches
    ) -> tuple[Array, Noise[Any]]:
        def one_round(number: Array) -> tuple[Array, Noise[Any]]:
            (who,), _ = visits(schedule, key, number, state.schedule)
            return who, _noise_of_some(round_, key, number, who, state.silos)

        return jax.vmap(one_round)(numbers)

    def one(
        drawn: tuple[Array, Noise[Any]],
        state: State,
        batches: Batches,
        places: Places,
        server_data: ServerData,
    ) -> tuple[State, Info, Visitors, Array, Any]:
        who, noise = drawn
        server, silos, info, good, seen = step(
            round_,
            _ReachParticipants(batches, places, watch),
            noise,
            state.server,
            state.silos,
            who,
            server_data,
        )
        carry, change = state.schedule
        if schedule.size == 1:
            change = change.at[who[0]].set(info.change)
        return State(state.round + 1, server, silos, (carry, change)), info, who, good, seen

    def by_number(places: Places, who: Visitors, good: Array) -> Array:
        return jnp.ones(len(places[0]), bool).at[who].set(good)

    return Rounds(_places, draw, one, by_number)


def _noise_of_some(
    round_: Round, key: Array, number: Array, who: Array, silos: Stacks
) -> Noise[Any]:
    """Return the noise of one step for its participants (k,), and the server's.

    Of several buckets, whose noise differs in shape, it is the participants' keys.
    """
    size = len(round_.exchanges)
    mine = [exchange_key(key, number, e, size) for e in range(size)]

    def one(exchange: Exchange[Silo, Down, Up], mine: Array) -> Any:
        keys = jax.vmap(partial(silo_key, mine))(who)
        if len(silos) > 1:
            return keys
        state = jax.tree.map(lambda a: a[0], silos[0])
        return jax.vmap(exchange.silo_noise, (0, None))(keys, state)

    of_silos = [one(x, key) for x, key in zip(round_.exchanges, mine, strict=True)]
    return Noise(round_.noise(server_key(mine[0])), of_silos)


def _step_by_step(
    algorithm: FederatedAlgorithm[Server, Silo], schedule: Schedule[Carry]
) -> Advance:
    """Return the loop over rounds of those whom the schedule names, step by step."""
    round_, chunk = algorithm.round, chunk_of(schedule)
    steps, size = schedule.steps, schedule.size

    @partial(jax.jit, inline=True)
    def one_step(
        key: Array,
        number: Array,
        who: Array,
        server: object,
        silos: Stacks,
        batches: Batches,
        places: Places,
        server_data: ServerData,
    ) -> tuple[Any, Stacks, Info, Array, Any]:
        noise = _noise_of_some(round_, key, number, who, silos)
        reach = _ReachParticipants(batches, places, algorithm.watch)
        return step(round_, reach, noise, server, silos, who, server_data)

    def advance(
        key: Array,
        state: State,
        batches: Batches,
        n: int,
        server_data: ServerData = None,
        stop: bool = False,
    ) -> tuple[State, Log, RunStatus]:
        places, every = _places(batches), jnp.ones(_count(batches), bool)

        def go_on(carry: Course) -> Array:
            i, (_, server, *_), _, ended = carry
            return (i < n) & _goes_on(algorithm, server, ended, stop)

        def one_round(carry: Course) -> Course:
            i, (done, server, silos, (_, change)), log, _ = carry
            who, plan = visits(schedule, key, done, carry[1].schedule)

            def go_on_here(carry: Steps) -> Array:
                return (carry[0] < steps) & carry[-1].ok

            def one(carry: Steps) -> Steps:
                s, server, silos, change, log, ended = carry
                number = done * steps + s
                here = (key, number, who[s], server, silos, batches, places, server_data)
                server, silos, info, good, seen = one_step(*here)
                if size == 1:
                    change = change.at[who[s, 0]].set(info.change)
                log = _write(log, i, s, info, who[s], seen)
                ended = RunStatus(info.ok, ended.replies.at[who[s]].set(good))
                return s + 1, server, silos, change, log, ended

            none = jnp.zeros((), jnp.int32)
            first = (none, server, silos, change, log, RunStatus(jnp.array(True), every))
            last = jax.lax.while_loop(go_on_here, one, first)
            _, server, silos, change, log, ended = last
            return i + 1, State(done + 1, server, silos, (plan, change)), log, ended

        who = jax.ShapeDtypeStruct((size,), jnp.int32)
        here = (key, state.round, who, state.server, state.silos, batches, places, server_data)
        _, _, info, _, seen = jax.eval_shape(one_step, *here)
        log = _log(chunk, steps, info, who, seen)
        start = (jnp.zeros((), jnp.int32), state, log, RunStatus(jnp.array(True), every))
        _, state, log, ended = jax.lax.while_loop(go_on, one_round, start)
        return state, log, ended

    return advance


def _goes_on(
    algorithm: FederatedAlgorithm[Server, Silo],
    server: Server,
    ended: RunStatus,
    stop: Array | bool,
) -> Array:
    """Return whether there is another round: the last one may be kept, and it was not the end."""
    return ended.ok & ~(stop & algorithm.done(server)) if algorithm.done else ended.ok


@dataclass(frozen=True, eq=False)
class _ReachParticipants:
    """A way to reach those that are named: side by side where there is one bucket, else in turns.

    Noise (k, ...) is as :func:`_noise_of_some` makes it.
    """

    batches: Batches
    places: Places
    watch: Watch | None

    def __call__(
        self, exchange: Exchange[Any, Down, Up], noise: Drawn, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        size = len(who)

        def one(silos: Stacks, i: Array | int) -> tuple[Stacks, tuple[Reply[Up], Any]]:
            sent, own = slices(exchange.scatter, down, i), jax.tree.map(lambda a: a[i], noise)
            reply, silos, seen = self.alone(exchange, own, sent, who[i], silos)
            return silos, (reply, seen)

        if size > 1 and len(self.batches) == 1:
            replies, silos, seen = self.side_by_side(exchange, noise, down, who, silos)
        elif size == 1:
            silos, answer = one(silos, 0)
            replies, seen = jax.tree.map(lambda a: a[None], answer)
        else:
            silos, (replies, seen) = jax.lax.scan(one, silos, jnp.arange(size))
        return Answers(combine(exchange.combine, [replies]), replies.ok, silos, seen)

    def visit(
        self,
        exchange: Exchange[Silo, Down, Up],
        noise: Any,
        down: Down,
        state: Silo,
        data: SiloData,
    ) -> tuple[Reply[Up], Silo, Any]:
        """Return a silo's reply, its state afterwards, and what is watched of that."""
        if len(self.batches) > 1:
            noise = exchange.silo_noise(noise, state)
        reply, state = exchange.visit(noise, down, state, data)
        return drop_weak_types((reply, state, self.watch(state) if self.watch else ()))

    def side_by_side(
        self, exchange: Exchange[Any, Down, Up], noise: Drawn, down: Down, who: Array, silos: Stacks
    ) -> tuple[Reply[Up], Stacks, Any]:
        """Visit participants from the only bucket, mapped."""
        (stack,), (batch,) = silos, self.batches
        at = self.places[1][who]
        states, data = jax.tree.map(lambda a: a[at], (stack, batch.data))
        visit = jax.vmap(partial(self.visit, exchange), (0, _axes(exchange), 0, 0))
        replies, states, seen = visit(noise, down, states, data)
        stack = jax.tree.map(lambda a, new: a.at[at].set(new), stack, states)
        return replies, (stack,), seen

    def alone(
        self, exchange: Exchange[Any, Down, Up], noise: Drawn, down: Down, j: Array, silos: Stacks
    ) -> tuple[Reply[Up], Stacks, Any]:
        """Visit participant ``j``, from whichever bucket.

        Of each other bucket some silo's state is taken out and put back as it is, so that no
        stack passes through the conditional.
        """
        batches, (bucket_of, place_of) = self.batches, self.places
        at = [jnp.clip(place_of[j], 0, len(b.silos) - 1) for b in batches]
        before = tuple(_take(stack, i) for stack, i in zip(silos, at, strict=True))

        def in_bucket(b: int) -> Callable[[Drawn, Down, Stacks], tuple[Reply[Up], Stacks, Any]]:
            def branch(noise: Drawn, down: Down, states: Stacks) -> tuple[Reply[Up], Stacks, Any]:
                data = _take(batches[b].data, at[b])
                reply, state, seen = self.visit(exchange, noise, down, states[b], data)
                return reply, (*states[:b], state, *states[b + 1 :]), seen

            return branch

        branches = [in_bucket(b) for b in range(len(batches))]
        reply, after, seen = jax.lax.switch(bucket_of[j], branches, noise, down, before)
        silos = tuple(_put(*args) for args in zip(silos, after, at, strict=True))
        return reply, silos, seen


def _log(chunk: int, steps: int, info: Info, who: object, watched: object) -> Log:
    """Return room for what rounds report."""

    def room(a: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros((chunk, steps, *a.shape), a.dtype)

    return Log(jnp.zeros(chunk), *jax.tree.map(room, (info.report, who, watched)))


def _write(
    log: Log, i: Array, step: Array | int, info: Info, who: Visitors, watched: object
) -> Log:
    """Put what step ``step`` of round ``i`` reports in its place."""

    def put(room: Array, a: Array) -> Array:
        return room.at[i, step].set(a)

    losses = log.losses.at[i].add(info.loss)
    return Log(losses, *jax.tree.map(put, tuple(log[1:]), (info.report, who, watched)))


def _places(batches: Batches) -> Places:
    """Return each silo's bucket, and its place there."""
    sizes = [len(b.silos) for b in batches]
    order = in_order(batches)
    bucket = jnp.repeat(jnp.arange(len(batches)), jnp.array(sizes), total_repeat_length=sum(sizes))
    place = jnp.concatenate([jnp.arange(n) for n in sizes])
    return bucket[order], place[order]


def _take(stack: Tree, i: Array) -> Tree:
    return jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False), stack)


def _put(stack: Tree, one: Tree, i: Array) -> Tree:
    return jax.tree.map(
        lambda a, new: jax.lax.dynamic_update_index_in_dim(a, new, i, 0), stack, one
    )


def _axes(exchange: Exchange[Silo, Down, Up]) -> Any:
    return jax.tree.map(lambda scattered: 0 if scattered else None, exchange.scatter)


def _count(batches: Batches) -> int:
    return sum(len(b.silos) for b in batches)


def _size(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
