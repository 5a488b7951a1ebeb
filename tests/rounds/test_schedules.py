"""Schedules: who takes part when, and runtimes in which only those do."""

import heapq
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mark_slow, slow_but
from laid_open import times_compiled

from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds import compiled_loop, schedules
from numpyro_fed.rounds.compiled_loop import compiled_runtime
from numpyro_fed.rounds.exchange import Combine, Exchange, FederatedAlgorithm, Info, Reply, Round
from numpyro_fed.rounds.keys import exchange_key, server_key, silo_key
from numpyro_fed.rounds.plain_loop import plain_runtime
from numpyro_fed.rounds.runtime import run_rounds
from numpyro_fed.rounds.schedules import Asynchronous, Random, Sequential
from numpyro_fed.rounds.silos import on_device

KEY = jax.random.key(0)
SILOS = 5
SECONDS = (1.0, 2.0, 0.5, 4.0, 1.0)
OWN_ORDER = (4, 0, 1, 4, 2, 3)
SCHEDULES = {
    "fixed": Sequential().build(SILOS),
    "random": Sequential("random").build(SILOS),
    "own order": Sequential(OWN_ORDER).build(SILOS),
    "two": Random(2).build(SILOS),
    "all five": Random(SILOS).build(SILOS),
    "asynchronous": Asynchronous(SECONDS).build(SILOS),
}


def planned(schedule, rounds, key=KEY):
    """Who is visited in each step of so many rounds, (rounds, steps, size)."""

    def one(carry, round_):
        who, carry = schedule.visits(key, round_, carry)
        return carry, who

    return np.asarray(jax.lax.scan(one, schedule.init(key), jnp.arange(rounds))[1])


# --- what a schedule promises ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["fixed", "random"])
def test_each_silo_takes_part_once_a_round_in_turn(order):
    who = planned(Sequential(order).build(SILOS), 6)
    assert who.shape == (6, SILOS, 1)
    np.testing.assert_array_equal(np.sort(who[..., 0], 1), np.tile(np.arange(SILOS), (6, 1)))
    assert (len(np.unique(who, axis=0)) > 1) == (order == "random")
    if order != "random":
        np.testing.assert_array_equal(who[0, :, 0], np.arange(SILOS))


def test_an_order_of_ones_own_is_followed():
    who = planned(Sequential(OWN_ORDER).build(SILOS), 2)
    np.testing.assert_array_equal(who[..., 0], [OWN_ORDER, OWN_ORDER])


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_any_set_of_silos_is_as_likely_at_random(size):
    rounds = 3_000
    who = planned(Random(size).build(SILOS), rounds)
    assert who.shape == (rounds, 1, size)
    sets = who[:, 0]
    assert (np.diff(sets, axis=1) > 0).all()
    assert (sets >= 0).all()
    assert (sets < SILOS).all()
    _, counts = np.unique(sets, axis=0, return_counts=True)
    expected = rounds / len(counts)
    assert len(counts) == {1: 5, 2: 10, 4: 5, 5: 1}[size]
    assert (((counts - expected) ** 2).sum() / expected) < 30  # chi-square, 9 degrees at most


def heap_order(duration, events):
    """The order of events by a heap of finishing times, in double precision."""
    jobs = [0] * SILOS
    heap = [(duration(j, 0), j) for j in range(SILOS)]
    heapq.heapify(heap)
    order = []
    for _ in range(events):
        now, silo = heapq.heappop(heap)
        order.append(silo)
        jobs[silo] += 1
        heapq.heappush(heap, (now + duration(silo, jobs[silo]), silo))
    return order


def tenfold(key, silo):
    return (1.0 + 9.0 * (silo == 3)) * jax.random.uniform(key, minval=0.5, maxval=1.5)


@pytest.mark.parametrize("seconds", [SECONDS, tenfold], ids=["means", "a function"])
def test_events_come_in_the_order_of_a_plain_simulation(seconds):
    rounds = 40
    jobs = jnp.arange(rounds * SILOS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))
    each = [keys(jax.random.fold_in(KEY, j), jobs) for j in range(SILOS)]
    if callable(seconds):
        drawn = [jax.vmap(seconds, (0, None))(k, j) for j, k in enumerate(each)]
    else:
        drawn = [
            s * jax.vmap(jax.random.exponential)(k) for s, k in zip(seconds, each, strict=True)
        ]
    drawn = np.asarray(drawn, np.float64)
    who = planned(Asynchronous(seconds).build(SILOS), rounds)
    assert who.shape == (rounds, SILOS, 1)
    order = heap_order(lambda j, job: drawn[j, job], rounds * SILOS)
    np.testing.assert_array_equal(who.ravel(), order)
    assert np.unique(order).size == SILOS


def test_the_clock_keeps_its_digits():
    """After millions of seconds, silos whose jobs take one second still take turns."""
    schedule = Asynchronous(lambda key, silo: jnp.float32(1.0)).build(2)
    clock = schedule.init(KEY)
    late = (clock[0] + 2.0**25, clock[1])
    who, clock = schedule.visits(KEY, 0, late)
    assert sorted(who[:, 0].tolist()) == [0, 1]
    np.testing.assert_array_equal(clock[0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sequential().build(0), "num_silos .* 0"),
        (lambda: Sequential("sorted").build(3), "order='sorted': .*'fixed', 'random'"),
        (lambda: Sequential([0, 2]).build(4), "silo 1, 3"),
        (lambda: Sequential([]).build(20), r"silo 0, 1, 2, .*, 8, 9, \.\.\. \(20 of them\)"),
        (lambda: Sequential([0, 1, 2]).build(2), "order holds 2, .* 0 to 1"),
        (lambda: Sequential([0.0, 1.0]).build(2), "order .*silo numbers"),
        (lambda: Random(4).build(3), "size=4 .* 3. Take between 1 and 3"),
        (lambda: Random(0).build(3), "size .* 0"),
        (lambda: Asynchronous([1.0, 2.0]).build(3), r"for each of 3 silos, got shape \(2,\)"),
        (lambda: Asynchronous(["a", "b"]).build(2), "one positive number"),
        (lambda: Asynchronous([1.0, 0.0, 2.0]).build(3), "got 0.0 at silo 1"),
        (lambda: Asynchronous([1.0, np.inf]).build(2), "got inf at silo 1"),
        (lambda: Asynchronous(lambda key, silo: silo / 1.0).build(2), "got 0.0 at silo 0"),
        (lambda: Asynchronous(lambda key, silo: jnp.ones(3)).build(2), r"got shape \(2, 3\)"),
    ],
)
def test_what_cannot_work_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- runtimes --------------------------------------------------------------------------------


class Down(NamedTuple):
    total: Any
    own: Any


class Held(NamedTuple):
    visits: Any
    replies: Any
    seen: Any


class Server(NamedTuple):
    counts: Any
    total: Any


def toy(how=Combine.SUM, limit=1_000, exchanges=1):
    """Silos reply with their data and what they drew; the server counts and sums.

    It is content until somebody has been visited more than ``limit`` times.
    """

    def silo(noise, down, state, data):
        up = data.arrays["y"].sum() + 0.01 * noise
        seen = jnp.stack([down.own["who"], down.own["both"].sum().astype(float), down.total])
        return Reply(up, jnp.array(True)), Held(state.visits + 1, state.replies + up, seen)

    def run(state, noise, ask):
        who, up = ask.who, 0.0
        for i in range(exchanges):
            own = {"who": 10.0 * who, "both": jnp.stack([who, who], 1)}
            up = up + ask(f"toy {i}", Down(state.total, own)).up
        each = up if how is Combine.GATHER else up[None]
        counts = state.counts.at[who].add(1)
        after = Server(counts, state.total + each.sum())
        report = {"drawn": noise, "up": up}
        return after, Info(each.sum(), counts.max() <= limit, report)

    def exchange(i):
        return Exchange(
            f"toy {i}",
            silo,
            silo_noise=lambda key, state: jax.random.normal(key),
            combine=how,
            scatter=Down(total=False, own=True),
        )

    return FederatedAlgorithm(
        lambda key: Server(jnp.zeros(SILOS, int), jnp.zeros(())),
        lambda key, data: Held(jnp.array(0), jnp.zeros(()), jnp.zeros(3)),
        Round(tuple(map(exchange, range(exchanges))), run, jax.random.normal),
        None,
        None,
        watch=lambda state: {"visits": state.visits, "replies": state.replies},
    )


TOTALS = np.array([3.0, 1.0, 5.0, 2.0, 4.0], np.float32)
LENGTHS = (2, 3, 3, 2, 2)
RUNTIMES = {
    "one bucket": (compiled_runtime, [(0, 1, 2, 3, 4)]),
    "buckets": (compiled_runtime, [(0, 3, 4), (2, 1)]),
    "host": (plain_runtime, [(j,) for j in range(SILOS)]),
}


def batches_of(groups):
    """Silos whose data add up to ``TOTALS``, at their own lengths or all at the longest."""
    made = []
    for group in groups:
        y = np.zeros((len(group), max(LENGTHS[j] for j in group)), np.float32)
        y[:, 0] = TOTALS[list(group)]
        made.append(Bucket(group, ({},) * len(group), SiloData({"y": y})))
    return on_device(made)


@cache
def runner(name, where, **settings):
    make, groups = RUNTIMES[where]
    schedule = SCHEDULES[name] if name else None
    return make(toy(**settings), schedule), batches_of(groups), groups


@cache
def run(name, where, rounds=4, **settings):
    """A run, and the silos' states in the order of their numbers."""
    runtime, batches, groups = runner(name, where, **settings)
    ran = run_rounds(runtime, KEY, runtime.init(KEY, batches), batches, rounds, False)
    order = np.argsort(np.concatenate(groups))
    return ran, jax.tree.map(lambda *a: np.concatenate(a)[order], *ran.state.silos)


@cache
def by_hand(name, rounds):
    """Visits, replies (rounds, steps, size) and the server's noise, by the rules written down."""
    schedule, key = SCHEDULES[name], schedules.schedule_key(KEY)
    carry, visits, replies, drawn = schedule.init(key), [], [], []
    plan = jax.jit(schedule.visits)
    for r in range(rounds):
        who, carry = plan(key, r, carry)
        for s, participants in enumerate(np.asarray(who)):
            mine = exchange_key(KEY, r * schedule.steps + s, 0, 1)
            keys = [silo_key(mine, j) for j in participants]
            up = TOTALS[participants] + 0.01 * np.array([jax.random.normal(k) for k in keys])
            visits.append(participants)
            replies.append(up)
            drawn.append(jax.random.normal(server_key(mine)))
    shape = (rounds, schedule.steps)
    return [np.asarray(a).reshape(*shape, *np.shape(a)[1:]) for a in (visits, replies, drawn)]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *slow_but([(name, "one bucket") for name in SCHEDULES], 0, 3),
        *slow_but(
            [("two", "buckets"), ("asynchronous", "buckets"), ("two", "host"), ("random", "host")],
            3,
        ),
    ],
)
def test_participants_get_their_slices_and_the_log_has_what_they_did(name, where):
    visits, replies, drawn = by_hand(name, 4)
    ran, silos = run(name, where)
    log = ran.log
    np.testing.assert_array_equal(log.visits, visits)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    close(ran.losses, replies.sum((1, 2)))
    close(log.reports["drawn"], drawn)
    close(log.reports["up"], replies.sum(2))
    counts = np.bincount(visits.ravel(), minlength=SILOS)
    np.testing.assert_array_equal(ran.state.server.counts, counts)
    np.testing.assert_array_equal(silos.visits, counts)
    close(ran.state.server.total, replies.sum())
    so_far, sums = np.zeros(SILOS, int), np.zeros(SILOS)
    for who, up, times, totals in zip(
        *(a.reshape(-1, a.shape[-1]) for a in (visits, replies)),
        *(log.watched[k].reshape(-1, visits.shape[-1]) for k in ("visits", "replies")),
        strict=True,
    ):
        so_far[who] += 1
        sums[who] += up
        np.testing.assert_array_equal(times, so_far[who])
        close(totals, sums[who])
    close(silos.replies, sums)
    here = counts > 0
    numbers = np.arange(SILOS)[here]
    np.testing.assert_array_equal(silos.seen[here, :2].T, [10 * numbers, 2 * numbers])
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(log))
    assert int(ran.state.round) == 4


@pytest.mark.parametrize("name", ["two", "asynchronous"])
def test_participants_are_sent_what_the_server_had_before_their_step(name):
    visits, replies, _ = by_hand(name, 4)
    _, silos = run(name, "buckets")
    before = np.cumsum(np.append(0.0, replies.sum(2).ravel()))
    last = {j: s for s, who in enumerate(visits.reshape(-1, visits.shape[-1])) for j in who}
    for j, s in last.items():
        np.testing.assert_allclose(silos.seen[j, 2], before[s], rtol=1e-5)


@pytest.mark.parametrize("where", RUNTIMES)
def test_gathered_replies_stand_in_the_order_of_the_participants(where):
    _, replies, _ = by_hand("two", 4)
    ran, _ = run("two", where, how=Combine.GATHER)
    np.testing.assert_allclose(ran.log.reports["up"], replies, rtol=1e-5)


def test_everyone_by_a_schedule_is_everyone_without_one():
    (one, a), (two, b) = run("all five", "one bucket"), run(None, "one bucket")
    jax.tree.map(np.testing.assert_array_equal, (one.losses, a), (two.losses, b))
    np.testing.assert_array_equal(one.log.reports["up"], two.log.reports["up"])
    assert two.log.visits == ()
    assert two.state.schedule == ()


@pytest.mark.parametrize("where", ["buckets", "host"])
def test_without_a_schedule_everyone_is_logged_in_the_order_of_their_numbers(where):
    (one, a), (two, b) = run(None, "one bucket"), run(None, where)
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, (one.losses, one.log, a), (two.losses, two.log, b))
    assert two.log.watched["replies"].shape == (4, 1, SILOS)
    assert (np.argsort(two.log.watched["replies"][0, 0]) == np.argsort(TOTALS)).all()


def test_steps_with_two_exchanges():
    ran, silos = run("random", "buckets", exchanges=2)
    again, same = run("random", "host", exchanges=2)
    np.testing.assert_array_equal(silos.visits, np.full(SILOS, 8))
    np.testing.assert_array_equal(ran.log.visits, again.log.visits)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5), (silos, ran.losses), (same, again.losses)
    )
    assert len(np.unique(ran.log.reports["drawn"])) == 4 * SILOS


@pytest.mark.parametrize("where", ["buckets", "host"])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_bad_reply_in_any_exchange_ends_the_round_that_forgets_to_look(where, lenient):
    """``run`` never reads ``replies.ok``: that is the runtime's business."""
    make, groups = RUNTIMES[where]
    algorithm, batches = toy(exchanges=2), batches_of(groups)
    first, last = algorithm.round.exchanges

    def silo(noise, down, state, data):
        reply, after = first.silo(noise, down, state, data)
        return reply._replace(ok=data.arrays["y"].sum() != TOTALS[2]), after

    bad = replace(first, silo=silo, lenient=lenient)
    runtime = make(algorithm._replace(round=replace(algorithm.round, exchanges=(bad, last))))
    state, _, ended = runtime.advance(KEY, runtime.init(KEY, batches), batches, 3)
    np.testing.assert_array_equal(ended.replies, np.arange(SILOS) != 2)
    assert bool(ended.ok) == lenient
    assert int(state.round) == (3 if lenient else 1)


def in_cond(ask):
    return jax.lax.cond(ask.who[0] >= 0, lambda: ask("toy 0", ()).up, lambda: 0.0)


def in_scan(ask):
    return jax.lax.scan(lambda up, _: (ask("toy 0", ()).up, None), 0.0, None, length=1)[0]


def in_grad(ask):
    return jax.grad(lambda x: ask("toy 0", ()).up * x)(1.0)


@pytest.mark.parametrize("how", [in_cond, in_scan, in_grad])
@pytest.mark.parametrize("make", [compiled_runtime, plain_runtime])
def test_a_round_that_asks_inside_of_a_transformation_is_refused_in_words(make, how):
    def run(state, noise, ask):
        return state, Info(how(ask), jnp.array(True))

    with pytest.raises(TypeError, match=r"'toy 0' .*ask first"):
        one_round(make, run)


@pytest.mark.parametrize("make", [compiled_runtime, plain_runtime])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], "without .*'toy 0'"),
        (["other"], "'other' after 0"),
        (["toy 0", "toy 0"], "'toy 0' after 1"),
    ],
)
def test_a_round_asks_for_each_exchange_once_in_order(make, asked, words):
    def run(state, noise, ask):
        for name in asked:
            ask(name, ())
        return state, Info(jnp.zeros(()), jnp.array(True))

    with pytest.raises(TypeError, match=words):
        one_round(make, run)


def test_a_round_that_catches_its_questions_sends_nothing_else():
    """Or what it returns would go to the silos in the place of a message."""

    def run(state, noise, ask):
        try:
            up = ask("toy 0", ()).up
        except BaseException:
            up = 0.0
        return state, Info(jnp.asarray(up), jnp.array(True))

    with pytest.raises(TypeError, match="exception"):
        one_round(plain_runtime, run)


@pytest.mark.parametrize("names", [(), ("a", "b", "a")])
def test_exchanges_of_a_round_have_names_of_their_own(names):
    exchanges = tuple(Exchange(name, lambda *args: args) for name in names)
    with pytest.raises(ValueError, match="name of its own"):
        Round(exchanges, lambda state, noise, ask: (state, None))


def one_round(make, run):
    """A step of another round in which silos reply with their data."""

    def silo(noise, down, state, data):
        return Reply(data.arrays["y"].sum(), jnp.array(True)), state

    batches = batches_of([(j,) for j in range(SILOS)])
    runtime = make(toy()._replace(round=Round((Exchange("toy 0", silo),), run)))
    return runtime.advance(KEY, runtime.init(KEY, batches), batches, 1)


# --- going on, and stopping ------------------------------------------------------------------


def identical(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fixed", "one bucket"),
        ("two", "one bucket"),
        ("asynchronous", "buckets"),
        ("random", "host"),
    ],
)
def test_two_runs_are_one_and_chunks_do_not_matter(name, where):
    whole, _ = run(name, where)
    runtime, batches, _ = runner(name, where)
    a = run_rounds(runtime, KEY, runtime.init(KEY, batches), batches, 1, False)
    b = run_rounds(runtime._replace(chunk=2), KEY, a.state, batches, 3, False)
    identical(b.state, whole.state)
    parts = jax.tree.map(lambda *p: np.concatenate(p), a.log, b.log)
    identical(parts, whole.log)
    identical(parts.losses, whole.losses)
    if where != "host":
        assert times_compiled(runtime.advance) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "where", "exchanges"),
    mark_slow(
        [(1, "one bucket", 1), (2, "buckets", 1), (1, "buckets", 2), (2, "one bucket", 2)],
        [(1, "one bucket", 1), (2, "one bucket", 2)],
    ),
)
def test_what_is_drawn_ahead_is_what_would_be_drawn_step_by_step(where, size, exchanges):
    """Over more rounds than one block has, in two calls, of which the first ends within one."""
    schedule, found = Random(size).build(SILOS), []
    assert schedule.ahead
    batches = batches_of(RUNTIMES[where][1])
    for ahead in (True, False):
        runtime = compiled_runtime(toy(exchanges=exchanges), schedule._replace(ahead=ahead))
        state = runtime.init(KEY, batches)
        state, first, _ = runtime.advance(KEY, state, batches, 3)
        found.append((first, *runtime.advance(KEY, state, batches, compiled_loop.BLOCK + 3)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *found)


def test_a_call_logs_fewer_rounds_where_a_round_has_many_visits():
    assert compiled_runtime(toy()).chunk == schedules.CHUNK == 1024
    assert compiled_runtime(toy(), Sequential().build(SILOS)).chunk == 1024
    assert compiled_runtime(toy(), Sequential().build(10_000)).chunk == 104
    assert plain_runtime(toy(), Random(2**21).build(2**21)).chunk == 1


@pytest.mark.parametrize("where", RUNTIMES)
def test_a_run_stops_at_the_step_that_is_not_ok(where):
    ran, silos = run("own order", where, limit=2)
    assert ran.failure == (1, ())  # silo 4, twice a round, for the third time
    assert int(ran.state.round) == 1
    np.testing.assert_array_equal(silos.visits, [1, 1, 1, 1, 2])
    assert ran.log.visits.shape == (1, 6, 1)
    runtime, batches, _ = runner("own order", where, limit=2)
    after, _, ended = runtime.advance(KEY, ran.state, batches, 3)
    assert not ended.ok
    np.testing.assert_array_equal(after.server.counts, [1, 1, 1, 1, 3])


@pytest.mark.parametrize("make", [compiled_runtime, plain_runtime])
def test_a_schedule_must_be_for_as_many_silos_as_there_are(make):
    batches = batches_of(RUNTIMES["host"][1])
    with pytest.raises(ValueError, match=r"4 silos, .* 5"):
        make(toy(), Sequential().build(4)).init(KEY, batches)


# --- what a round costs ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("buckets", "exchanges"), [(1, 2), (2, 1)])
def test_stacks_stay_in_place_while_rounds_run(buckets, exchanges):
    """A stack is copied once a call, not in each step: a step has no room for another one."""
    size, width = 60 // buckets, 10_000
    groups = [tuple(range(b * size, (b + 1) * size)) for b in range(buckets)]
    batches = on_device(
        [
            Bucket(g, ({},) * size, SiloData({"y": np.zeros((size, 2 + b), np.float32)}))
            for b, g in enumerate(groups)
        ]
    )
    algorithm = toy(exchanges=exchanges)._replace(watch=None)
    runtime = compiled_runtime(algorithm, Random(2).build(60))
    state = runtime.init(KEY, batches)
    wide = tuple(s._replace(replies=jnp.zeros((size, width))) for s in state.silos)
    program = runtime.advance.lower(KEY, state._replace(silos=wide), batches, 3).compile()
    room = program.memory_analysis().temp_size_in_bytes
    assert 4 * width <= room < 4 * width * size / 2
    loops, _, entry = program.as_text().rpartition("\nENTRY")
    copies = re.compile(rf"= f32\[{size},{width}\]\S* copy\(")
    assert copies.search(entry)
    assert not copies.search(loops)


@pytest.mark.parametrize(("name", "where"), [("two", "buckets"), ("random", "host")])
def test_a_second_run_compiles_nothing(name, where, compiled):
    runtime, batches, _ = runner(name, where)

    def go(key, rounds):
        return run_rounds(runtime, key, runtime.init(key, batches), batches, rounds, False)

    go(KEY, 1)
    other = jax.random.key(1)
    compiled.clear()
    ran = go(other, 3)
    assert compiled == []
    assert ran.log.visits.shape[0] == 3
