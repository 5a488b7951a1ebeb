"""Who may ask a silo: signatures that hold for one silo, study and moment, and studies approved."""

import json
import threading
import time
from dataclasses import replace

import jax
import models
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError, RefusedError, ReplyError
from numpyro_fed.network import Folder, InMemory, PrivateKey
from numpyro_fed.network.audit import check_audit
from numpyro_fed.network.cli import main
from numpyro_fed.network.owner import answer_files, words_of
from numpyro_fed.network.requesters import APPROVED, REFUSED, Study, keep_study, studies
from numpyro_fed.rounds.envelopes import ENVELOPE, SIGNATURE, signed_message
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
        assert b"mu" not in content
        with pytest.raises(DataError, match="not sealed for the key that asked"):
            STRANGER.opened(reply, signed_message(message)[1])


def refused(one, message):
    """Whether a silo refuses a message in plain words, and spends nothing."""
    before = one._ledger.kept
    head, arrays = read(one.answer(message))
    assert one._ledger.kept == before
    return "error" in head and not arrays


def forged(message, other):
    """A message as an attacker would change it, by name."""
    envelope, said = signed_message(message)
    head, arrays = read(message)
    later = replace(envelope, count=envelope.count + 10**15)
    text = json.dumps(later.__dict__, sort_keys=True, separators=(",", ":"))
    settings = (envelope.study, envelope.session, later.count, envelope.to)
    changed = bytearray(said)
    changed[-1] ^= 1
    flipped = {"message": np.frombuffer(bytes(changed), np.uint8)}
    silent = dict.fromkeys((ENVELOPE, SIGNATURE), "")
    return {
        "doubled": message,
        "without its envelope": said,
        "by another key": STRANGER.request(said, *settings),
        "with another number": write(arrays, head | {ENVELOPE: text}),
        "with the signature of another message": write(
            arrays, head | {SIGNATURE: read(other).head[SIGNATURE]}
        ),
        "with another content": write(flipped, head),
        "with an empty signature": write(arrays, head | silent),
        "of another study": ANALYST.request(said, "there", *settings[1:]),
        "of an earlier moment": ANALYST.request(said, *settings[:2], 1, envelope.to),
        "for no silo": ANALYST.request(b"head" + said, *settings[:3], ""),
        "cut off": message[:-1],
        "in the analyst's name": write(
            arrays, head | {SIGNATURE: read(STRANGER.request(said, *settings)).head[SIGNATURE]}
        ),
        "for another silo": ANALYST.request(said, *settings[:3], STRANGER.public),
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
    assert main(["approve", id_, "--until", "2001-01-01", *words]) == 0
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


# --- the audit log ---------------------------------------------------------------------------


def test_an_audit_log_says_who_asked_and_why_not_and_cannot_be_changed(tmp_path):
    file = tmp_path / "audit.jsonl"
    here = silo(audit=str(file), columns=("y",), study="files")
    there = federation([here], study="files")
    nf.moments(there, ["y"])
    with pytest.raises(ModelError):
        nf.levels(there, ["x"])
    here.answer(b"nothing that can be read")
    told, no, strange = map(json.loads, file.read_text().splitlines())
    assert told["requester"] == no["requester"] == ANALYST.fingerprint
    assert (told["study"], told["refused"], told["why"]) == ("files", False, "")
    assert "'x' is not among" in no["why"]
    assert "cannot be read" in strange["why"]
    assert check_audit(file) == 3
    lines = file.read_text().splitlines(keepends=True)
    for wrong in (
        [lines[0].replace('"moments"', '"levels"'), *lines[1:]],
        [lines[0], lines[2]],
        [lines[1], lines[0], lines[2]],
        [lines[0], lines[0], *lines[1:]],
    ):
        file.write_text("".join(wrong))
        with pytest.raises(DataError, match="does not follow"):
            check_audit(file)


def test_an_audit_log_goes_on_in_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr("numpyro_fed.network.audit.LARGEST", 1_000)
    file = tmp_path / "audit.jsonl"
    here = silo(audit=str(file))
    for _ in range(5):
        here.answer(b"")
    assert len(list(tmp_path.glob("audit.jsonl.*"))) >= 1
    assert check_audit(file) == 5


# --- rounds by files -------------------------------------------------------------------------


def test_rounds_by_files_are_those_of_one_process(tmp_path, asked):
    """Files go to and fro while the script runs; it stops in between, and goes on."""
    sites, done = ["Basel", "Bern"], []
    silos = [silo(data, state=tmp_path / f"state of {j}") for j, data in enumerate(DATA)]

    def script(patience):
        there = nf.Federation(
            Folder(tmp_path / "files", sites, every=0.01),
            names={"level": level},
            key=ANALYST,
            state=tmp_path / "analyst",
            patience=patience,
        )
        done.append(run(there))

    with pytest.raises(ConnectionError):
        script(patience=0.05)  # nobody answers
    first = {site: list((tmp_path / "files" / site).glob("*.request")) for site in sites}
    assert all(len(files) == 1 for files in first.values())
    said = words_of("a file", first["Bern"][0].read_bytes())
    assert ANALYST.fingerprint in said
    assert "asks for 'describe'" in said
    thread = threading.Thread(target=script, args=(60.0,))
    thread.start()
    while thread.is_alive():
        for one, site in zip(silos, sites, strict=True):
            answer_files(one, tmp_path / "files" / site)
        time.sleep(0.01)
    assert done == [asked[2]]
    files = sorted(f.name for f in (tmp_path / "files" / "Bern").iterdir())
    assert all(name.endswith(".done") for name in files)
    reply = next((tmp_path / "files" / "Bern").glob("*.reply.done"))
    assert "sealed" in words_of("a file", reply.read_bytes())
    assert len(files) == 2 * len({signed_message(m)[1] for j, m, _ in asked[1] if j == 1})


def test_a_folder_without_silos_is_refused(tmp_path):
    with pytest.raises(DataError, match="no folder of a silo"):
        Folder(tmp_path)


# --- what a refusal tells --------------------------------------------------------------------


def test_a_refusal_counts_no_rows_and_calls_the_silo_by_its_place():
    wrong = dict(y=np.array([np.inf, *range(8)]))
    there = federation([silo(), silo(wrong)])
    with pytest.raises(DataError, match="silo 1 refuses 'describe': this silo, 'y': some of the"):
        there.describe({"model": "level"})


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("numpyro_fed.rounds.federation.VERSION", "99.0")
    with pytest.raises(ModelError, match=r"numpyro_fed 99\.0 asks, and this silo has "):
        federation([silo()]).describe({"model": "level"})
