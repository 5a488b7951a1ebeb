"""Who may ask a silo: signatures that hold for one silo, study and moment, and studies approved."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from cases import slow_but

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError, ReplyError
from numpyro_fed.basics.files import canonical
from numpyro_fed.methods.method import PlanSize
from numpyro_fed.network import InMemory, PrivateKey, cli
from numpyro_fed.network.cli import main
from numpyro_fed.network.refusals import refusal_of
from numpyro_fed.network.requesters import APPROVED, REFUSED, Study, keep_study, studies
from numpyro_fed.rounds.envelopes import ENVELOPE, SIGNATURE, is_sealed, signed_message
from numpyro_fed.rounds.messages import read, write

KEY, level = jax.random.key(0), models.level()
ANALYST, STRANGER = (PrivateKey(bytes([i]) * 32) for i in (1, 2))
DATA = [dict(y=np.arange(9.0) + j) for j in range(2)]


def silo(data=DATA[0], state=None, study="", **rules):
    rules = dict(min_rows=1, parameters_per_row=1.0, requesters=(ANALYST.fingerprint,)) | rules
    return nf.Silo(
        data, names={"level": level}, policy=nf.Policy(**rules), state=state, study=study
    )


def federation(silos, heard=None, key=ANALYST, **options):
    """Silos in this process; ``heard`` gets (silo, message, reply), as a relay would."""

    def listening(j, answer):
        def wrapped(message):
            reply = answer(message)
            if heard is not None:
                heard.append((j, message, reply))
            return reply

        return wrapped

    answers = [listening(j, one.answer) for j, one in enumerate(silos)]
    return nf.Federation(InMemory(answers), names={"level": level}, key=key, **options)


def run(there):
    result = nf.PVI(level, start=None).run(KEY, 1, there, progress_bar=False)
    return float(result.posterior()["mu"].mean)


@pytest.fixture(scope="module")
def asked():
    """Two silos that were asked by the analyst, and all that a relay has heard."""
    silos, heard = [silo(data, study="here") for data in DATA], []
    found = run(federation(silos, heard, study="here"))
    return silos, heard, found


def test_signed_questions_have_the_answers_of_plain_ones(asked):
    anyone = [silo(data, requesters=()) for data in DATA]
    assert asked[2] == run(federation(anyone, key=None))
    # Who does not ask for signatures reads them.
    assert nf.moments(federation(anyone), ["y"]).mean["y"] == 4.5


def test_whoever_carries_a_reply_cannot_read_it(asked):
    for _, message, reply in asked[1]:
        said, content = read(reply).head, read(reply).arrays["sealed"].tobytes()
        assert set(said) == {"silo", "ephemeral", SIGNATURE}
        envelope, said_to = signed_message(message)
        plain, _ = ANALYST.opened(reply, envelope, said_to)
        assert not any(plain[i : i + 8] in content for i in range(0, len(plain) - 8, 8))
        with pytest.raises(DataError, match="not sealed for the key that asked"):
            STRANGER.opened(reply, envelope, said_to)
        # Nor is it the answer to the same question in another session, or of another silo.
        for other in (replace(envelope, session="another"), replace(envelope, silo=9)):
            with pytest.raises(DataError, match="not sealed"):
                ANALYST.opened(reply, other, said_to)


def refused(one, message):
    """Whether a silo refuses a message, and spends nothing."""
    before = one._ledger.kept
    reply = one.answer(message)
    assert one._ledger.kept == before
    if is_sealed(reply):  # to the analyst, whose signature it is
        reply, _ = ANALYST.opened(reply, *signed_message(message))
    head, arrays = read(reply)
    return "error" in head and not arrays


def forged(message, other):
    """A message as an attacker would change it, by name."""
    envelope, said = signed_message(message)
    head, arrays = read(message)
    text = canonical(replace(envelope, count=envelope.count + 10**15))
    changed = bytearray(said)
    changed[-1] ^= 1
    flipped = {"message": np.frombuffer(bytes(changed), np.uint8)}
    silent = dict.fromkeys((ENVELOPE, SIGNATURE), "")

    def by(key, **changes):
        return key.request(said, replace(envelope, count=envelope.count + 1, **changes))

    own = dict(requester=STRANGER.public, replies_to=STRANGER._replies_to)
    return {
        "doubled": message,
        "without its envelope": said,
        "by another key": by(STRANGER, **own),
        "with another number": write(arrays, head | {ENVELOPE: text}),
        "with the signature of another message": write(
            arrays, head | {SIGNATURE: read(other).head[SIGNATURE]}
        ),
        "with another content": write(flipped, head),
        "with an empty signature": write(arrays, head | silent),
        "of another study": by(ANALYST, study="there"),
        "of an earlier moment": ANALYST.request(said, replace(envelope, count=1)),
        "of a later day": ANALYST.request(said, replace(envelope, count=10**30)),
        "cut off": message[:-1],
        "in the analyst's name": by(STRANGER),
        "for another silo": by(ANALYST, to=STRANGER.public),
        "for another number": by(ANALYST, silo=7),
        "with no key for replies": by(ANALYST, replies_to="00" * 32),
        "of a session without end": by(ANALYST, session="0" * 65),
    }


def test_nobody_else_is_answered_and_nothing_is_spent(asked):
    """None of more than 200 tries: forged, changed, doubled, old, of another study or silo."""
    silos, heard, _ = asked
    tries = 0
    for (j, message, _), (_, other, _) in zip(heard, heard[1:] + heard[:1], strict=True):
        for name, wrong in forged(message, other).items():
            for one in silos:
                assert refused(one, wrong), (j, name)
                tries += 1
        # What was signed for one silo is no question at another one, once both are known.
        if signed_message(message)[0].to:
            assert refused(silos[1 - j], message)
    assert tries >= 200


def test_a_message_that_was_lost_is_signed_anew_and_computed_once(asked):
    silos, lost = [silo(data) for data in DATA], set()

    class Losing(InMemory):
        """Each reply is lost once, and each message comes once more when it is old."""

        def send(self, silo, message, timeout):
            reply = super().send(silo, message, timeout)
            said = signed_message(message)[1]
            if (silo, said) not in lost:
                lost.add((silo, said))
                raise ConnectionError("lost")
            assert refused(silos[silo], message)
            return reply

    there = nf.Federation(
        Losing([one.answer for one in silos]), names={"level": level}, key=ANALYST
    )
    assert run(there) == asked[2]
    assert silos[0]._ledger.kept["places"] == asked[0][0]._ledger.kept["places"]


def test_a_reply_of_another_silo_is_refused():
    one, two = silo(), silo()
    answers = iter([one.answer, two.answer])
    there = nf.Federation(InMemory([lambda message: next(answers)(message)]), key=ANALYST)
    nf.moments(there, ["y"])
    with pytest.raises((ReplyError, RefusedError), match=r"another silo"):
        nf.levels(there, ["y"])


def test_files_of_studies_are_compared():
    with pytest.raises(ModelError, match="the study's files differ"):
        run(federation([silo(study="here")], study="there"))


def test_one_key_is_asked_for_and_kept_closed(tmp_path, capsys):
    file = tmp_path / "kept" / "key"
    assert main(["key", "--file", str(file)]) == 0
    line = capsys.readouterr().out
    assert main(["key", "--file", str(file)]) == 0
    assert (
        capsys.readouterr().out == line == f'requesters = ["{PrivateKey.load(file).fingerprint}"]\n'
    )
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o644)
    with pytest.raises(ModelError, match="chmod 600"):
        PrivateKey.load(file)
    with pytest.raises(ValueError, match="a fingerprint is 'SHA256:'"):
        nf.Policy(requesters=("me",))


# --- studies that wait for their owner -------------------------------------------------------


def test_a_study_waits_for_its_owner(tmp_path, capsys):
    state = tmp_path / "state"

    def asks(key=ANALYST):
        here = silo(state=state, study="files", approve="ask", requesters=())
        return nf.moments(federation([here], key=key, study="files"), ["y"]).mean["y"]

    with pytest.raises(ModelError, match="waits for the silo's owner") as error:
        asks()
    id_ = studies(nf.Silo(DATA[0], names={}, state=state)._store)[0].id
    assert f"numpyro-fed approve {id_}" in str(error.value)
    words = ["--state", str(state)]
    assert main(["requests", *words]) == 0
    listed = capsys.readouterr().out
    assert ANALYST.fingerprint in listed
    assert "pending" in listed
    assert "moments: counts" in listed
    assert main(["approve", id_, "--until", "2999-12-31", *words]) == 0
    assert asks() == 4
    with pytest.raises(ModelError, match="waits"):  # it is another study who asks it for
        asks(STRANGER)
    assert main(["approve", id_, "--until", "2001-01-01", *words]) == 1  # over already
    store = nf.Silo(DATA[0], names={}, state=state)._store
    keep_study(store, replace(studies(store)[0], until=1.0))
    with pytest.raises(ModelError, match="waits"):
        asks()
    assert main(["refuse", id_, *words]) == 0
    with pytest.raises(ModelError, match="has refused"):
        asks()
    assert main(["approve", "0" * 12, "--until", "2999-12-31", *words]) == 1


def test_a_study_ends_when_its_owner_says_so(tmp_path, asked):
    """Also in the middle of a run, whose plan was accepted before."""
    rules = dict(state=tmp_path / "state", approve="ask", study="here")
    here = silo(**rules)
    study = Study(ANALYST.fingerprint, "here", APPROVED, time.time() + 60)
    keep_study(here._store, study)
    there = federation([here, silo(DATA[1])], study="here")
    assert run(there) == asked[2]
    keep_study(here._store, replace(study, state=REFUSED))
    with pytest.raises(ModelError, match="has refused"):
        nf.PVI(level, start=None).run(KEY, 1, there, progress_bar=False)


def test_a_text_reads_no_other_columns_and_few_persons_are_not_told():
    of_y = dict(y=np.arange(9.0), patient=[1, 1, 1, 2, 2, 2, 3, 3, 3])
    there = federation([silo(of_y, columns=("y",))])
    assert nf.moments(there, ["y"]).mean["y"] == 4
    with pytest.raises(ModelError, match="'patient' is not among the columns"):
        nf.levels(there, ["patient"])
    there = federation([silo(of_y | dict(age=np.arange(9.0)), columns=("y",))])
    with pytest.raises(ModelError, match="'age' is not among the columns"):
        nf.moments(there)
    for number in (3, 4):
        there = federation([silo(of_y, person="patient", min_persons=number)])
        if number == 3:
            assert nf.moments(there, ["y"]).mean["y"] == 4
        else:
            with pytest.raises(ModelError, match="fewer persons"):
                nf.moments(there, ["y"])


# --- sums by default -------------------------------------------------------------------------


class Far(InMemory):
    """An engine to silos that are not in this process."""

    in_process = False


def three(key=ANALYST, secure_sum=None, **rules):
    silos = [silo(dict(y=np.arange(9.0) + j), **rules) for j in range(3)]
    engine = Far([one.answer for one in silos])
    return nf.Federation(engine, names={"level": level}, key=key, secure_sum=secure_sum, at_once=1)


def test_three_silos_elsewhere_send_sums_that_nobody_sees():
    there = three()
    assert there.secure_sum
    assert there.of([0, 1]).secure_sum
    assert not federation([silo(), silo(), silo()]).secure_sum  # in this process
    engine = Far([one.answer for one in (silo(), silo())])
    assert not nf.Federation(engine).secure_sum  # of two each could take its own part off
    found = nf.fit(KEY, level, there, progress_bar=False)
    here = nf.fit(KEY, level, [dict(y=np.arange(9.0) + j) for j in range(3)], progress_bar=False)
    np.testing.assert_allclose(found.summary(), here.summary(), rtol=1e-6)
    # What is told silo by silo by its own rules goes on.
    assert nf.moments(there, ["y"]).mean["y"] == 5


def test_more_silos_than_a_sum_can_hold_send_no_single_replies_unasked():
    engine = Far([silo().answer] * 256)
    with pytest.raises(ModelError, match=r"256 silos.*holds 255.*secure_sum=False"):
        nf.Federation(engine)
    assert not nf.Federation(engine, secure_sum=False).secure_sum
    # Nor does a silo believe a plan of so many.
    size = PlanSize(num_silos=256, num_rows=100, num_parameters=2)
    with pytest.raises(ModelError, match="single replies are asked for in a plan of 256 silos"):
        nf.Policy().check_single_replies(size)
    nf.Policy(secure_sum=False).check_single_replies(size)


@pytest.mark.parametrize("scale", slow_but([1e-15, 1e-9, 1.0, 3e5, 2e12], 0, 4))
def test_sums_hold_raw_columns(scale):
    """Curvatures are sums of squares: of grams, 1e-30, and of milliseconds since 1970, 1e26."""

    def line(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 10 / scale))
        with nf.silo_plate("row", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)

    r = np.random.default_rng(0)
    data = [dict(x=scale * r.normal(size=90), y=r.normal(size=90)) for _ in range(3)]
    silos = [nf.Silo(d, names={"line": line}) for d in data]
    there = nf.Federation(Far([one.answer for one in silos]), names={"line": line}, at_once=1)
    found, here = (nf.fit(KEY, line, s, progress_bar=False) for s in (there, data))
    assert there.secure_sum
    np.testing.assert_allclose(found.summary().iloc[:, :2], here.summary().iloc[:, :2], rtol=1e-5)


def test_a_method_that_comes_with_its_plan_waits_for_the_owner(tmp_path):
    here, heard = silo(approve="ask", state=tmp_path), []
    there = federation([here, silo()], heard)
    with pytest.raises(ModelError, match="waits for the silo's owner"):
        nf.fit(KEY, level, there, progress_bar=False)
    (study,) = studies(here._store)
    keep_study(here._store, Study(study.requester, study.study, APPROVED, time.time() + 60))
    assert nf.fit(KEY, level, there, progress_bar=False).trusted
    keep_study(here._store, Study(study.requester, study.study, REFUSED))
    other = federation([here, silo()])
    with pytest.raises(ModelError, match="has refused this study"):
        other.accept(other.describe({"model": "level"})[0], "{}")
    (study,) = studies(here._store)
    assert any(what.startswith("SFVI of level") for what in study.costs)


def begun(there):
    """A run without a round: its plan is accepted, or refused."""
    return nf.SFVI(level, start=None).run(KEY, 0, there, progress_bar=False)


def test_single_replies_of_three_silos_need_their_owners_consent():
    with pytest.raises(ModelError, match="secure_sum = false in the policy"):
        begun(three(secure_sum=False))
    # A server that lies has a plan of two: an owner who has named two others does not believe it.
    assert begun(federation([silo(), silo()])).num_silos
    with pytest.raises(ModelError, match="secure_sum = false in the policy"):
        begun(federation([silo(peers=("one", "another")), silo()]))
    silos = [silo(dict(y=np.arange(9.0) + j), secure_sum=False) for j in range(3)]
    assert begun(federation(silos)).num_silos
    # Whose silo asks for no signature answers whoever may open its socket.
    assert begun(three(key=None, secure_sum=False, requesters=())).num_silos


# --- signs of life ---------------------------------------------------------------------------


def test_a_silo_says_that_it_lives_and_what_it_was_asked(tmp_path, monkeypatch):
    one, file, told = silo(), tmp_path / "health.json", []

    def after_a_while(seconds):
        told.append(json.loads(file.read_text()))
        file.chmod(0o640)
        if len(told) == 1:
            nf.moments(federation([one, silo()]), ["y"])
            with pytest.raises(ReplyError):
                nf.moments(federation([one, silo()], key=STRANGER), ["y"])
        else:
            raise StopIteration

    # In that module alone: other threads of a test process sleep, too.
    monkeypatch.setattr(cli, "time", SimpleNamespace(time=time.time, sleep=after_a_while))
    with pytest.raises(StopIteration):
        cli.tell_health(one, file)
    first, second = told
    assert first["last_message"] is None
    assert first["alive"] <= second["last_message"] <= second["alive"]
    assert (second["answered"], second["refused"]) == (1, 1)
    assert second["left"]["places"] == 5_000
    assert file.stat().st_mode & 0o777 == 0o640


# --- what a refusal tells --------------------------------------------------------------------


def test_a_refusal_counts_no_rows_and_calls_the_silo_by_its_place():
    wrong = dict(y=np.array([np.inf, *range(8)]))
    there = federation([silo(), silo(wrong)])
    with pytest.raises(DataError, match="silo 1 refuses 'describe': this silo, 'y': some of the"):
        there.describe({"model": "level"})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "silo 0, site 'y': the observed value -1.303157 of row 3, the first of 83 such values "
            "is impossible",
            "this silo, site 'y': the outcome is impossible",
        ),
        ("the term of row 0 went from -2.47867 to -2.34886 when", "the term of a row changed when"),
        ("at silo 0, which holds {'y': (137,)}", "at this silo, which holds {'y': (...)}"),
        ("'x': 3 of 1,200 values are missing", "'x': some of the values are missing"),
        ("'row' of 137 at dim -1, of 1,200, -13 or 137.5", "'row' of n at dim -1, of n, n or n"),
        (
            "12kg, 3e5x, 1_234, -.5 and 1e+20 of x12 at dim -12",
            "n, n, n, n and n of x12 at dim -12",
        ),
        ("outcomes 1 and 2 become 0 and 1 by y - 1", "outcomes 1 and 2 become 0 and 1 by y - 1"),
    ],
)
def test_a_refusal_tells_no_number_of_the_data(said, told):
    assert read(refusal_of(DataError(said))).head == {"error": "DataError", "words": told}


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("numpyro_fed.rounds.federation.VERSION", "99.0")
    with pytest.raises(ModelError, match=r"numpyro_fed 99\.0 asks, and this silo has "):
        federation([silo()]).describe({"model": "level"})


def test_a_text_of_who_asks_comes_back_as_it_was():
    """It tells nothing: were lengths of the data left out of it, it would tell these."""
    there = federation([silo(), silo()])
    with pytest.raises(ModelError, match="no method '7 8 9 10 11'"):
        there.describe({"model": "level", "method": "7 8 9 10 11", "settings": {}})


def test_a_refusal_of_a_study_that_waits_tells_nothing_of_the_data(tmp_path):
    """Also where its text does not fit the data: their shapes are in the error."""

    def other(x, y):
        return x

    policy = nf.Policy(approve="ask", min_rows=1)
    here = nf.Silo(DATA[0], names={"other": other}, policy=policy)
    there = nf.Federation(InMemory([here.answer]), names={"other": other}, key=ANALYST)
    with pytest.raises(ModelError, match="waits for the silo's owner") as error:
        there.describe({"model": "other"})
    assert "9" not in str(error.value).partition("approve")[0]


# --- what somebody on the way, or another requester, can do ----------------------------------


def test_a_refusal_that_nobody_has_signed_is_not_the_silos():
    words = {"error": "DataError", "words": "your key has expired: send it to me\n"}
    there = nf.Federation(InMemory([lambda message: write({}, words)]), key=ANALYST)
    with pytest.raises(ReplyError, match=r"or somebody on the way, .*'your key has expired.*\\n'"):
        nf.moments(there, ["y"])


def test_a_silo_is_known_by_the_fingerprint_that_its_site_has_told():
    one, two = silo(), silo()
    told = [one.fingerprint_of_replies]
    for here, match in ((one, None), (two, r"silo_keys names SHA256:")):
        there = nf.Federation(InMemory([here.answer]), key=ANALYST, silo_keys=told)
        if match is None:
            assert nf.moments(there, ["y"]).mean["y"] == 4
        else:
            with pytest.raises(ReplyError, match=match):
                nf.moments(there, ["y"])
    with pytest.raises(DataError, match="silo_keys has 2 entries"):
        nf.Federation(InMemory([one.answer]), silo_keys=told * 2)


def test_what_one_requester_has_begun_no_other_one_asks():
    both = (ANALYST.fingerprint, STRANGER.fingerprint)
    silos, heard = [silo(data, requesters=both) for data in DATA], []
    run(federation(silos, heard))
    one = silos[0]
    for j, message, _ in heard:
        envelope, said = signed_message(message)
        if j or not envelope.to:
            continue
        to = one._requesters.key.public
        theirs = STRANGER.envelope("", "b" * 24, envelope.count, 0, to)
        reply, _ = STRANGER.opened(one.answer(STRANGER.request(said, theirs)), theirs, said)
        assert "another requester has described" in read(reply).head["words"]


def test_a_clock_that_is_set_back_ends_no_study(tmp_path, monkeypatch):
    here = silo(state=tmp_path / "silo")
    nf.moments(federation([here], state=tmp_path / "analyst"), ["y"])
    before = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr("numpyro_fed.rounds.federation.time.time_ns", lambda: before)
    there = federation([here], state=tmp_path / "analyst")
    nf.moments(there, ["y"])  # from the journal
    assert there.describe({"model": "level"})


def test_an_owners_no_is_not_undone_by_the_next_question(tmp_path, monkeypatch):
    here = silo(approve="ask", study="here")
    keep_study(here._store, Study(ANALYST.fingerprint, "here", APPROVED, time.time() + 60))
    there = federation([here], study="here")
    nf.moments(there, ["y"])
    keep_study(here._store, Study(ANALYST.fingerprint, "here", REFUSED))
    for columns in (["y"], ["x"]):
        with pytest.raises(ModelError, match="has refused"):
            nf.levels(there, columns)
    assert studies(here._store)[0].state == REFUSED
    assert set(studies(here._store)[0].costs) == {"moments", "levels"}


def test_the_last_question_may_be_answered_again_by_hand(asked):
    heard = []
    here = silo()
    nf.moments(federation([here], heard), ["y"])
    (_, message, reply) = heard[0]
    envelope, said = signed_message(message)
    assert refused(here, message)
    again = here.answer(message, again=True)
    assert ANALYST.opened(again, envelope, said) == ANALYST.opened(reply, envelope, said)


def test_what_has_come_is_kept_when_another_silo_stays_away(tmp_path):
    calls = {0: 0, 1: 0}
    silos = [silo(data) for data in DATA]

    class Away(InMemory):
        is_away = True

        def send(self, silo, message, timeout):
            calls[silo] += 1
            if silo and self.is_away:
                raise ReplyError("is refused", silo=1, exchange="moments")
            return super().send(silo, message, timeout)

    engine = Away([one.answer for one in silos])
    options = dict(key=ANALYST, state=tmp_path / "analyst")
    with pytest.raises(ReplyError):
        nf.moments(nf.Federation(engine, **options), ["y"])
    while not nf.Federation(engine, **options)._journal._waiting[0]:
        time.sleep(0.01)
    engine.is_away = False
    before = calls[0]
    assert nf.moments(nf.Federation(engine, **options), ["y"]).mean["y"] == 4.5
    assert (calls[0] - before, before) == (0, 1)


def test_a_text_that_takes_no_person_is_fitted_under_a_rule_of_persons():
    data = [d | dict(patient=np.arange(9) // 3) for d in DATA]
    rules = dict(person="patient", min_persons=3, columns=("y",))
    asks = {"model": "level"}
    _, facts = federation([silo(d, **rules) for d in data]).describe(asks)
    assert facts == federation([silo(d) for d in DATA]).describe(asks)[1]
    with pytest.raises(ModelError, match="fewer persons"):
        federation([silo(d, **rules | dict(min_persons=4)) for d in data]).describe(asks)
    with pytest.raises(ModelError, match="'y' is not among the columns"):
        federation([silo(d, columns=("x",)) for d in DATA]).describe(asks)


@pytest.mark.parametrize(
    ("columns", "allowed"),
    [(("x",), True), (("x.age", "x.hiv"), True), (("age", "hiv"), True), (("x.age",), False)],
)
def test_columns_of_a_frame_are_listed_by_name_or_as_a_whole(columns, allowed):
    frame = pd.DataFrame(dict(age=np.arange(9.0), hiv=np.arange(9) % 2.0))
    there = federation([silo(dict(x=frame), columns=columns)])
    if allowed:
        assert nf.moments(there, ["x"]).mean["x"].tolist() == [4, 4 / 9]
    else:
        with pytest.raises(ModelError, match=r"'x\.hiv' is not among the columns"):
            nf.moments(there, ["x"])
