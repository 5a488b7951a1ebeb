"""Sums that nobody sees: the results of plain sums, from messages that tell no silo's numbers."""

import json
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from problems import cut
from sent_otherwise import chi_squared
from test_federation import Storm

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError, ReplyError, SumError
from numpyro_fed.basics.files import Store, read_record
from numpyro_fed.network import InMemory
from numpyro_fed.network.silo_sums import SecureSums, Session
from numpyro_fed.privacy.masks import Greeting, KeyPair
from numpyro_fed.rounds.messages import Question, read, write
from numpyro_fed.rounds.secure_sums import MASKED, SUM, SummedGroups, Terms

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (16, 16, 12)
ALIKE = (16, 16, 16)  # their programs are compiled once for a cache on the disk
FREE = {"min_rows": 1, "parameters_per_row": 10.0}


def plain(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def normal(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 2), obs=y)


SFVI = nf.SFVI(plain, start=None, optim=optax.sgd(1e-3))
PVI = nf.PVI(normal, start=None, schedule="synchronous")
NAMES = {"plain": plain, "normal": normal, "sfvi": SFVI}


def numbers(sizes=ALIKE):
    return cut({"y": np.random.default_rng(1).normal(3, 2, sum(sizes))}, sizes)


def silos_of(data, folder=None, policy=None, **options):
    policy = nf.Policy(**FREE | (policy or {}))
    states = [None if folder is None else folder / f"silo-{j}" for j in range(len(data))]
    options = {"names": NAMES, "policy": policy} | options
    return [nf.Silo(d, state=s, **options) for d, s in zip(data, states, strict=True)]


class Listening(InMemory):
    """An engine that keeps what crosses, and hands messages and replies on as functions say."""

    def __init__(self, silos, down=None, up=None):
        super().__init__([silo.answer for silo in silos])
        self.crossed, self.down, self.up = [], down, up

    def send(self, silo, message, timeout):
        if self.down:
            message = self.down(silo, message)
        reply = super().send(silo, message, timeout)
        if self.up:
            reply = self.up(silo, message, reply)
        self.crossed.append((silo, message, reply))
        return reply

    @property
    def masked(self):
        """The questions for sums and their replies."""
        return [c for c in self.crossed if SUM in read(c[1]).head]


def secure(engine, **options):
    return nf.Federation(engine, names=NAMES, secure_sum=True, **options)


def over(silos, **options):
    return secure(Listening(silos), **options)


# --- the results -----------------------------------------------------------------------------


METHODS = {
    "steps": (SFVI, 10),
    "sfvi": (nf.SFVI(plain), 10),
    "pvi": (nf.PVI(plain, schedule="synchronous"), 3),
    "three at random": (nf.PVI(normal, start=None, schedule=nf.schedules.Random(3)), 3),
    "weighted": (nf.SFVIAvg(plain, local_steps=3, aggregate="average"), 2),
}


@pytest.mark.parametrize(
    "name",
    ["steps", *(pytest.param(n, marks=pytest.mark.slow) for n in METHODS if n != "steps")],
)
def test_sums_give_the_numbers_of_plain_replies(name, double):
    (method, rounds), data = METHODS[name], numbers((*SIZES, 12))
    there = over(silos_of(data))
    found = method.run(KEY, rounds, there, **QUIET)
    engine = Listening(silos_of(data))
    expected = method.run(KEY, rounds, nf.Federation(engine, names=NAMES), **QUIET)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    a, b = (r.sample_posterior(KEY, 5) for r in (found, expected))
    for site in a:
        np.testing.assert_allclose(a[site], b[site], rtol=1e-8)
    evidence = [nf.importance_correct(KEY, r, 500).log_evidence for r in (found, expected)]
    np.testing.assert_allclose(*evidence, rtol=1e-9)


@pytest.mark.slow
def test_the_mode_is_that_of_plain_replies(double):
    found, expected = (nf.find_mode(KEY, plain, s) for s in (over(silos_of(numbers())), numbers()))
    np.testing.assert_allclose(found.z_G, expected.z_G, rtol=1e-8)
    np.testing.assert_allclose(found.curvature, expected.curvature, rtol=1e-8)


@pytest.mark.slow
def test_a_fit_is_that_of_plain_replies(double):
    there = over(silos_of(numbers()))
    found, expected = (nf.fit(KEY, plain, s, **QUIET) for s in (there, numbers()))
    assert found.trusted
    a, b = (f.sample_posterior(KEY, 200) for f in (found, expected))
    for site in a:
        np.testing.assert_allclose(a[site], b[site], rtol=1e-6)
    with pytest.raises(SumError, match="needs the reply of each silo"):
        _ = found.silos


def columns_of(xs):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([xs.shape[-1]]).to_event(1))
    return xs @ beta


def vertical(xs, y=None):
    eta = nf.client_sum("client", columns_of, xs)
    with numpyro.plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


@pytest.mark.slow
def test_predictors_of_clients_are_added_up(double):
    r = np.random.default_rng(2)
    xs, y = [r.normal(size=(12, p)) for p in (2, 1)], r.poisson(1.0, 12)
    names = {"vertical": vertical}
    silos = silos_of(xs, names=names)
    there = nf.Federation(Listening(silos), names=names, secure_sum=True)
    found, expected = (nf.VFL(vertical).run(KEY, 4, x, y, **QUIET) for x in (there, xs))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)


# --- what crosses ----------------------------------------------------------------------------


def test_no_number_of_a_silo_is_in_its_messages():
    """All that leaves a silo: facts, public keys, masked words, and whether numbers are good."""
    engine = Listening(silos_of(numbers()))
    SFVI.run(KEY, 10, secure(engine), **QUIET)
    assert len(engine.masked) == 30
    plain_engine = Listening(silos_of(numbers()))
    SFVI.run(KEY, 10, nf.Federation(plain_engine, names=NAMES), **QUIET)
    words = b""
    for silo, _, reply in engine.masked:
        head, arrays = read(reply)
        assert head == {}
        assert {name: a.dtype for name, a in arrays.items()} == {MASKED: np.uint64, "ok": bool}
        words += arrays[MASKED].tobytes()
        # As many bytes for each number, whatever it is; and none as it stands in a plain reply.
        replies = [
            r
            for j, m, r in plain_engine.crossed
            if read(m).head["exchange"] == "sfvi" and j == silo
        ]
        assert len(replies) == 10
        for plain_reply in replies:
            for a in read(plain_reply).arrays.values():
                if a.dtype.kind == "f":
                    assert not any(n.tobytes() in reply for n in a.ravel() if n)
    assert abs(chi_squared(words)) < 6
    for _, message, reply in engine.crossed:
        if SUM not in read(message).head:
            assert read(reply).arrays == {}


@pytest.mark.slow
def test_the_same_run_has_other_messages_each_time():
    runs = []
    for _ in range(2):
        engine = Listening(silos_of(numbers()))
        losses = SFVI.run(KEY, 10, secure(engine), **QUIET).losses
        runs.append((losses, [read(r).arrays[MASKED] for _, _, r in engine.masked]))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    same = [(a == b).mean() for a, b in zip(runs[0][1], runs[1][1], strict=True)]
    assert max(same) == 0


def test_a_sum_of_fewer_messages_is_no_number():
    """The server leaves a silo out: what is left is random, and found."""
    silos, kept = silos_of(numbers()), {}

    def up(silo, message, reply):
        if SUM in read(message).head and silo == 2:
            # In its place the reply of silo 1, as a server that wants the others' would use it.
            return kept[1]
        kept[silo] = reply
        return reply

    with pytest.raises(SumError, match="sum of the replies to the exchange 'sfvi' is refused"):
        SFVI.run(KEY, 1, secure(Listening(silos, up=up), at_once=1), **QUIET)


def changed(reply, place, word):
    head, arrays = read(reply)
    arrays[MASKED] = words = arrays[MASKED].copy()
    words.reshape(-1)[place] += np.uint64(word)
    return write(arrays, head)


@pytest.mark.slow
def test_a_word_that_is_changed_is_found_if_the_sum_is_out_of_range():
    def up(place, word):
        return lambda silo, message, reply: (
            changed(reply, place, word) if silo == 1 and SUM in read(message).head else reply
        )

    # In the first word of a number, and in its last.
    far, near = (Listening(silos_of(numbers()), up=up(*at)) for at in ((0, 3 << 61), (6, 1)))
    with pytest.raises(SumError, match="'sfvi' is refused: 1 of"):
        SFVI.run(KEY, 1, secure(far), **QUIET)
    # What stays in the range is not found: sums have no authentication.
    assert len(SFVI.run(KEY, 1, secure(near), **QUIET).losses) == 1


def test_a_reply_of_another_shape_names_the_silo():
    def up(silo, message, reply):
        if silo == 1 and SUM in read(message).head:
            return write({MASKED: np.zeros((1, 3), np.uint64), "ok": np.array(True)})
        return reply

    with pytest.raises(ReplyError, match="silo 1 to the exchange 'sfvi' holds"):
        SFVI.run(KEY, 1, secure(Listening(silos_of(numbers()), up=up)), **QUIET)


# --- keys ------------------------------------------------------------------------------------


def test_a_server_that_puts_its_own_key_in_is_found_by_pinned_peers(tmp_path):
    prints = tuple(s.fingerprint for s in silos_of(numbers(), tmp_path))
    assert len(set(prints)) == 3
    pinned = silos_of(numbers(), tmp_path, {"peers": prints})
    assert tuple(s.fingerprint for s in pinned) == prints
    assert len(SFVI.run(KEY, 1, over(pinned), **QUIET).losses) == 1

    stranger = silos_of(numbers())[0]

    def up(silo, message, reply):
        head = read(message).head
        return stranger.answer(message) if silo == 2 and head["exchange"] == "keys" else reply

    with pytest.raises(
        RefusedError, match=r"silo 0 refuses 'peers': the key .* not among the peers"
    ):
        SFVI.run(KEY, 1, secure(Listening(pinned, up=up)), **QUIET)


def test_silos_that_are_told_different_keys_form_no_sum():
    others = silos_of(numbers())
    greetings = {}

    def up(silo, message, reply):
        if read(message).head["exchange"] == "keys":
            greetings[silo] = read(others[silo].answer(message)).head["keys"]
        return reply

    def down(silo, message):
        head, arrays = read(message)
        if head["exchange"] == "peers" and silo == 0:
            settings = json.loads(head["settings"])
            settings["keys"][2] = greetings[2]
            return write(arrays, {**head, "settings": json.dumps(settings)})
        return message

    with pytest.raises(SumError, match="different lists of keys"):
        SFVI.run(KEY, 1, secure(Listening(silos_of(numbers()), down, up)), **QUIET)


@pytest.mark.parametrize(
    ("change", "words"),
    slow_but(
        [
            (
                lambda s: s | {"keys": s["keys"][:1], "number": 0},
                "each of 2 to 255|own at its place",
            ),
            (lambda s: s | {"keys": [s["keys"][0]] * 3}, "different keys|own at its place"),
            (lambda s: s | {"keys": "all"}, "something else than a list of silos' keys"),
            (lambda s: s | {"number": 3}, "own at its place"),  # of silos 0 to 2
            (lambda s: s | {"session": "other"}, "no keys of this session"),
            (lambda s: s | {"keys": [*s["keys"][:2], '["00", "11"]']}, "no public key"),
        ],
        3,
        4,
    ),
)
def test_lists_of_keys_that_are_none_are_refused(change, words):
    def down(silo, message):
        head, arrays = read(message)
        if head["exchange"] != "peers":
            return message
        return write(arrays, {**head, "settings": json.dumps(change(json.loads(head["settings"])))})

    with pytest.raises(ModelError, match=f"refuses 'peers': .*({words})"):
        SFVI.run(KEY, 1, secure(Listening(silos_of(numbers()), down)), **QUIET)


@pytest.mark.parametrize("name", ["s" * 101, 5, None])
def test_a_session_has_a_name_of_up_to_a_hundred_letters(name):
    sums = SecureSums(nf.Policy(), Store(None))
    assert sums.greet({"session": "s" * 100}) == sums.greet({"session": "s" * 100})
    with pytest.raises(DataError, match="as its session, where a text is expected"):
        sums.greet({"session": name})


# --- masks are used once ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked():
    """Silos after two rounds, and the last question for a sum to silo 0."""
    silos = silos_of(numbers())
    engine = Listening(silos)
    SFVI.run(KEY, 2, secure(engine, at_once=1), **QUIET)
    return silos, engine.masked


def words(reply):
    return read(reply).head.get("words", "")


def with_(message, number=None, terms=None):
    """A question with another number of its own, and other terms of its sum."""
    head, arrays = read(message)
    before = read_record(Terms, head[SUM])._asdict()
    head |= {SUM: json.dumps(before | (terms or {}))}
    return write(arrays, head | ({"number": str(number)} if number else {}))


def test_each_sum_has_masks_of_its_own():
    terms = [Terms("s.0", 1, (0, 1)), Terms("s.0", 2, (0, 1)), Terms("s.0", 1, (0, 1, 2))]
    purposes = {t.purpose(s, name, "") for t in terms for s in "st" for name in "ab"}
    assert len(purposes) == 12
    # The same at all silos, which know the session by names of their own.
    assert Terms("s.1", 1, (0, 1)).purpose("s", "a", "") == terms[0].purpose("s", "a", "")
    assert terms[0].purpose("s", "a", "one question") != terms[0].purpose("s", "a", "another")


def test_masks_of_silos_that_were_asked_different_things_do_not_cancel():
    """Else a server would ask all but one for noise that is nearly none."""

    def lies(silo, message):
        head, arrays = read(message)
        if silo == 0 or SUM not in head:
            return message
        name = next(n for n, a in arrays.items() if n.startswith("down") and a.dtype.kind == "f")
        return write({**arrays, name: arrays[name] * np.float32(0.5)}, head)

    engine = Listening(silos_of(numbers()), down=lies)
    with pytest.raises(SumError, match="3 of 3 numbers are out of the range"):
        SFVI.run(KEY, 1, secure(engine), **QUIET)


def test_a_question_that_comes_twice_has_the_same_reply(asked):
    silos, crossed = asked
    silo, message, reply = crossed[-1]
    assert silos[silo].answer(message) == reply


def test_masks_of_a_sum_hide_one_reply(asked):
    """What would tell a reply: other numbers, or another group, under masks that were used."""
    silos, crossed = asked
    silo, message, _ = crossed[-1]
    number = int(Question.of(read(message).head).number)
    late = next(m for j, m, _ in crossed if j == silo)
    refused = {
        "in one over": with_(message, terms={"number": 9}),
        "comes after sum 2": late,
        "another reply was sent under the masks": with_(message, number + 1),
        "sum 0 comes after": with_(message, terms={"number": 0}),
        "no keys of this session": with_(message, terms={"session": "another"}),
        "at least 3": with_(message, terms={"number": 9, "group": [silo]}),
        "expected are numbers": with_(message, terms={"number": 9, "group": [0, 7]}),
        "in order": with_(message, terms={"number": 9, "group": [2, 0]}),
        "names session": with_(message, terms={"number": "9"}),
    }
    for why, one in refused.items():
        assert re.search(why, words(silos[silo].answer(one))), why


def test_a_plain_reply_is_refused_once_masks_are_agreed(asked):
    silos, crossed = asked
    silo, message, _ = crossed[-1]
    head, arrays = read(message)
    del head[SUM]
    assert "send masked replies alone" in words(silos[silo].answer(write(arrays, head)))
    guarded = silos_of(numbers(), policy={"secure_sum": True})
    with pytest.raises(ModelError, match=r"masks alone .*secure_sum=True"):
        SFVI.run(KEY, 1, nf.Federation(Listening(guarded), names=NAMES), **QUIET)
    assert len(SFVI.run(KEY, 1, over(guarded), **QUIET).losses) == 1


# --- silos that are away ---------------------------------------------------------------------


class Leaves(Listening):
    """An engine whose silos are away, each for the sums of some numbers; replies may be lost."""

    def __init__(self, silos, away, lost=False):
        super().__init__(silos)
        self.away, self.lost = away, lost

    def send(self, silo, message, timeout):
        text = read(message).head.get(SUM)
        gone = text is not None and read_record(Terms, text).number in self.away.get(silo, ())
        if gone and not self.lost:
            raise ConnectionRefusedError
        reply = super().send(silo, message, timeout)
        if gone:
            raise ConnectionResetError
        return reply


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sum_without_a_silo_has_other_masks(lost, double):
    data = numbers((16,) * 4)
    engine = Leaves(silos_of(data), {1: {1}}, lost)
    there = secure(engine, patience=0.02, at_once=1)
    found = PVI.run(KEY, 2, there, **QUIET)

    class Plain(Listening):
        def send(self, silo, message, timeout):
            question = Question.of(read(message).head)
            first = getattr(self, "first", message)
            if silo == 1 and question.exchange == "pvi" and first == message:
                self.first = first
                raise ConnectionRefusedError
            return super().send(silo, message, timeout)

    without = nf.Federation(Plain(silos_of(data)), names=NAMES, patience=0.02, at_once=1)
    expected = PVI.run(KEY, 2, without, **QUIET)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    of_silo = [(m, r) for j, m, r in engine.masked if j == 0]
    terms = [read_record(Terms, read(m).head[SUM]) for m, _ in of_silo]
    assert [t.group for t in terms] == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]
    first, again = (read(r).arrays[MASKED] for _, r in of_silo[:2])
    assert not (first == again).any()
    # The same question but for the terms: the silo computes its reply once.
    numbers_ = [Question.of(read(m).head).number for m, _ in of_silo]
    assert numbers_[0] == numbers_[1] < numbers_[2]


REWEIGHTED = dict(patience=0.02, missing="reweight")


def test_a_sum_has_the_silos_that_policies_ask_for():
    silos = silos_of(numbers((16,) * 4), policy={"min_silos": 4})
    with pytest.raises(RefusedError, match=r"'sfvi': a sum over 3 silos .*at least 4"):
        SFVI.run(KEY, 1, secure(Leaves(silos, {1: {1}}), **REWEIGHTED), **QUIET)


@pytest.mark.parametrize(
    ("method", "away"),
    slow_but([(SFVI, {1: {1}}), (SFVI, {1: {1}, 2: {1}}), (PVI, {1: {1}})], 0),
)
def test_two_silos_that_are_left_of_three_are_not_asked(method, away):
    """Rounds of PVI go on without a silo, and SFVI reweights; a sum over two hides too little."""
    engine = Leaves(silos_of(numbers()), away)
    words = (
        f"over {3 - len(away)} silos of 3, without silo 1.* where .* over 3 to 255.*wait for those"
    )
    with pytest.raises(SumError, match=words):
        method.run(KEY, 1, secure(engine, **REWEIGHTED), **QUIET)
    groups = [read_record(Terms, read(m).head[SUM]).group for _, m, _ in engine.masked]
    assert set(groups) == {(0, 1, 2)}


def test_a_server_that_lies_gets_no_sums_over_each_two_of_three():
    """Of the sums over silos 0 and 1, 0 and 2, and 1 and 2 each reply could be told."""
    silos = silos_of(numbers())
    engine = Listening(silos)
    SFVI.run(KEY, 1, secure(engine, at_once=1), **QUIET)
    first = {silo: message for silo, message, _ in engine.masked}
    for number, pair in enumerate(((0, 1), (0, 2), (1, 2)), 2):
        for j in pair:
            terms = {"number": number, "group": list(pair)}
            asked = with_(first[j], 100 + number, terms)
            assert "in those over at least 3" in words(silos[j].answer(asked))


@pytest.mark.parametrize(
    ("plan", "told", "peers", "least"),
    [(2, 2, (), 2), (3, 2, (), 3), (2, 3, (), 3), (2, 2, ("a", "b"), 3), (2, 2, ("a", "own"), 2)],
)
def test_a_sum_hides_among_three_where_a_plan_a_session_or_peers_are_three(
    plan, told, peers, least
):
    pairs = [(KeyPair.generate(), KeyPair.generate()) for _ in range(told)]
    keys = tuple(Greeting(identity.public, fresh.public) for identity, fresh in pairs)
    store = Store(None)
    store.put({"identity": pairs[0][0].private})
    peers = tuple(keys[0].fingerprint if peer == "own" else peer for peer in peers)
    sums = SecureSums(nf.Policy(peers=peers), store)
    sums._keep("s.0", Session(pairs[0][1].private.hex(), "s", 0, keys))
    if least == 2:
        sums.check(Terms("s.0", 1, (0, 1)), plan)
    else:
        with pytest.raises(ModelError, match="at least 3"):
            sums.check(Terms("s.0", 1, (0, 1)), plan)


@pytest.mark.slow
def test_a_reply_is_sent_again_as_often_as_the_policy_allows():
    data, away = numbers((16,) * 5), {3: {1}, 2: {2}}
    found = PVI.run(KEY, 1, secure(Leaves(silos_of(data), away), patience=0.02), **QUIET)
    assert len(found.losses) == 1
    once = silos_of(data, policy={"sums_again": 1})
    with pytest.raises(RefusedError, match=r"under 2 masks already, as often .*sums_again"):
        PVI.run(KEY, 1, secure(Leaves(once, away), patience=0.02), **QUIET)


@pytest.mark.slow
def test_a_sum_that_waits_is_completed_with_the_same_masks(double):
    silos = silos_of(numbers())
    fit = PVI.run(KEY, 1, nf.Federation(InMemory([s.answer for s in silos]), names=NAMES), **QUIET)
    engine = Leaves(silos, {})
    there = secure(engine, patience=0.02)
    run = PVI.run(KEY, 1, there, **QUIET)
    engine.away = {1: {2}}
    with pytest.raises(nf.SiloAwayError, match="silo 1"):
        nf.importance_correct(KEY, run, 100)
    engine.away = {}
    again = nf.importance_correct(KEY, run, 100)
    np.testing.assert_allclose(
        again.log_evidence, nf.importance_correct(KEY, fit, 100).log_evidence, rtol=1e-9
    )
    asked = [(j, read_record(Terms, read(m).head[SUM]).number) for j, m, _ in engine.masked]
    assert sorted(asked) == [(j, n) for j in range(3) for n in (1, 2)]


@pytest.mark.slow
def test_a_script_and_silos_that_restart_go_on(tmp_path):
    """Both sides are built anew between two rounds, from their folders."""
    method = SFVI
    calm = method.run(KEY, 4, over(silos_of(numbers())), **QUIET)
    sums = []
    for rounds in (2, 4):
        engine = Listening(silos_of(numbers(), tmp_path))
        there = secure(engine, state=tmp_path / "server")
        found = method.run(KEY, rounds, there, **QUIET)
        sums += [
            read_record(Terms, read(m).head[SUM]).number for j, m, _ in engine.masked if j == 0
        ]
    np.testing.assert_array_equal(found.losses, calm.losses)
    assert sums == [1, 2, 3, 4]
    assert all(a < b for a, b in pairwise(sums))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps", "three at random"])
def test_a_storm_changes_no_bit_of_a_sum(name, tmp_path, monkeypatch):
    """Messages that are lost, doubled, late or cut, and silos that restart."""
    monkeypatch.setattr("numpyro_fed.rounds.federation.FIRST_WAIT", 1e-4)
    (method, rounds), data = METHODS[name], numbers((16,) * 4)
    calm = method.run(KEY, rounds, over(silos_of(data)), **QUIET)
    faults = 0
    for seed in range(2):
        engine = Storm(seed, lambda seed=seed: silos_of(data, tmp_path / str(seed)))
        found = method.run(KEY, rounds, secure(engine, at_once=1), **QUIET)
        np.testing.assert_array_equal(found.losses, calm.losses)
        faults += engine.faults
    assert faults > 3


# --- what is no sum --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (nf.PVI(normal, start=None), "'pvi' would be over one silo"),
        pytest.param(
            nf.PVI(normal, start=None, schedule="asynchronous"),
            "'pvi' would be over one silo",
            marks=pytest.mark.slow,
        ),
        (nf.SFVIAvg(normal, start=None), "needs the reply of each silo by itself"),
    ],
)
def test_what_needs_single_replies_is_refused_before_anything_is_asked(method, words):
    engine = Listening(silos_of(numbers()))
    with pytest.raises(SumError, match=words):
        method.run(KEY, 1, secure(engine), **QUIET)
    assert {read(m).head["exchange"] for _, m, _ in engine.crossed} <= {"describe"}


def test_a_silo_refuses_to_mask_what_is_not_added_up():
    """A server that lies about it gets nothing."""
    silos = silos_of(numbers())
    engine = Listening(silos)
    run = SFVI.run(KEY, 0, secure(engine), **QUIET)
    before = len(engine.crossed)
    with pytest.raises(SumError, match="needs the reply of each silo"):
        _ = run.silos
    assert len(engine.crossed) == before


# --- sums over other silos -------------------------------------------------------------------


FOUR = (16,) * 4


def test_no_two_sums_differ_by_a_silo():
    """The difference of sums over a part and the whole would be the reply of a silo."""
    engine = Listening(silos_of(numbers(FOUR)))
    there = secure(engine, at_once=1)
    SFVI.run(KEY, 1, there.of([0, 1, 2]), **QUIET)
    before = len(engine.masked)
    with pytest.raises(SumError, match=r"over 4 silos: .* reply of one silo.*Federation\.of"):
        SFVI.run(KEY, 1, there, **QUIET)
    assert len(engine.masked) == before
    for silos, hide in (((0, 1, 2), True), ((2, 0, 1), True), ((1, 2, 3), False), ((0, 1), False)):
        assert there.hides_with(silos) == hide


def test_parts_of_parts_and_combinations_of_sums_count():
    groups = SummedGroups(9)
    groups.add((0, 1, 2, 3))
    groups.add((4, 5, 6, 7))
    # In the union each part is known; and silo 8 is all that is new in the sum over nine.
    assert groups.hide_with(range(8))
    assert not groups.hide_with(range(9))
    assert not groups.hide_with((1, 2, 3))
    assert not groups.hide_with((0, 1))
    assert groups.hide_with((0, 1, 2, 3))
    there = secure(Listening(silos_of(numbers(FOUR))))
    part = there.of([3, 2, 1])
    part.of([1, 0, 2]).sum_terms([0, 1, 2])
    assert not there.hides_with(range(4))
    assert part.hides_with(range(3))
    many = SummedGroups(255)
    many.add(range(200))
    assert many.hide_with(range(203))
    assert not many.hide_with(range(202))
    assert SummedGroups(2).hide_with((0, 1))


@pytest.mark.slow
def test_rounds_that_go_on_without_a_silo_do_not_end_what_follows(double):
    """PVI without a silo for a round, and then the weights of draws over all."""
    engine = Leaves(silos_of(numbers(FOUR)), {1: {1}})
    found = PVI.run(KEY, 2, secure(engine, patience=0.02), **QUIET)
    groups = {read_record(Terms, read(m).head[SUM]).group for _, m, _ in engine.masked}
    assert groups == {(0, 1, 2, 3), (0, 2, 3)}
    assert np.isfinite(nf.importance_correct(KEY, found, 100).log_evidence)


class Away(Listening):
    in_process, away = False, True

    def send(self, silo, message, timeout):
        if silo == 3 and self.away:
            raise ConnectionRefusedError
        return super().send(silo, message, timeout)


def test_a_silo_that_was_left_out_and_is_back_is_not_told_by_a_second_fit(double):
    engine = Away(silos_of(numbers(FOUR)))
    there = nf.Federation(engine, names=NAMES, missing="leave_out", patience=0.02, at_once=1)
    with pytest.warns(nf.ConvergenceWarning, match="no answer from silo 3"):
        found = nf.fit(KEY, normal, there, **QUIET)
    assert found.silo_names == ("0", "1", "2")
    assert there.hides_with([0, 1, 2])  # again without it the sums are over the same silos
    engine.away = False
    with pytest.raises(SumError, match=r"the reply of one silo.*Federation\.of"):
        nf.fit(KEY, normal, there, **QUIET)


def test_a_fit_of_sums_is_not_made_again_with_or_without_a_silo(double):
    engine = Listening(silos_of(numbers(FOUR)))
    fitted = nf.fit(KEY, normal, secure(engine, at_once=1), **QUIET)
    before = len(engine.crossed)
    with pytest.raises(DataError, match=r"without silo 3: .*secure_sum=False.*policy"):
        fitted.remove(KEY, 3)
    more = secure(Listening(silos_of(numbers((16,) * 5))), at_once=1)
    with pytest.raises(DataError, match=r"with silo 4: .*its own reply.*secure_sum=False"):
        fitted.add(KEY, more)
    assert len(engine.crossed) == before
