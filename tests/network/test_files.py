"""Rounds by files: what a site writes, what the script takes, and what it says of all others."""

import threading
import time
import warnings

import jax
import models
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, FederatedWarning, ModelError
from numpyro_fed.network import Folder, PrivateKey
from numpyro_fed.network.audit import check_audit
from numpyro_fed.network.cli import main
from numpyro_fed.network.owner import answer_files, end_of, words_of
from numpyro_fed.network.requesters import REFUSED, keep_study, studies
from numpyro_fed.rounds.envelopes import ENVELOPE, SEALED, SIGNATURE, signed_message
from numpyro_fed.rounds.messages import MOMENTS, Question, read, refusal, write

KEY, level = jax.random.key(0), models.level()
ANALYST, OTHER, STRANGER = (PrivateKey(bytes([i]) * 32) for i in (1, 2, 3))
DATA = [dict(y=np.arange(9.0) + 100 * j) for j in range(2)]
SITES = ["basel", "bern"]


def silo(data=DATA[0], state=None, study="", **rules):
    both = ANALYST.fingerprint, OTHER.fingerprint
    rules = dict(min_rows=1, parameters_per_row=1.0, requesters=both) | rules
    policy = nf.Policy(**rules)
    return nf.Silo(data, names={"level": level}, policy=policy, state=state, study=study)


def asks(path, sites=("basel",), what=nf.moments, key=ANALYST, patience=0.05, **options):
    """Ask once, and return the mean of y; a ConnectionError while a file is waited for."""
    folder = Folder(path / "files", sites, every=0.01)
    return what(nf.Federation(folder, key=key, patience=patience, **options), ["y"])


def names(path, site="basel", ending=""):
    return sorted(f.name for f in (path / "files" / site).glob(f"*{ending}"))


@pytest.fixture
def waiting(tmp_path):
    """A question that waits for its reply, and its silo."""
    with pytest.raises(ConnectionError):
        asks(tmp_path, state=tmp_path / "analyst")
    return next((tmp_path / "files" / "basel").glob("*.request"))


def again(path):
    return asks(path, state=path / "analyst").mean["y"]


# --- the whole -------------------------------------------------------------------------------


def test_rounds_by_files_are_those_of_one_process(tmp_path):
    """Files go to and fro while the script runs; it stops in between, and goes on."""
    done = []
    silos = [silo(data, state=tmp_path / f"state of {j}") for j, data in enumerate(DATA)]

    def script(patience):
        folder = Folder(tmp_path / "files", SITES, every=0.01)
        options = dict(names={"level": level}, key=ANALYST, state=tmp_path / "analyst")
        there = nf.Federation(folder, patience=patience, **options)
        result = nf.PVI(level, start=None).run(KEY, 1, there, progress_bar=False)
        done.append(float(result.posterior()["mu"].mean))

    with pytest.raises(ConnectionError):
        script(patience=0.05)  # nobody answers
    (first,) = (tmp_path / "files" / "bern").glob("*.request")
    assert first.name.startswith("bern-001-describe-")
    said = words_of("a file", first.read_bytes())
    assert f"signed by {ANALYST.fingerprint}" in said
    assert "asks for 'describe'" in said
    thread = threading.Thread(target=script, args=(60.0,))
    thread.start()
    while thread.is_alive():
        for one, site in zip(silos, SITES, strict=True):
            answer_files(one, tmp_path / "files" / site)
        time.sleep(0.01)
    here = nf.PVI(level, start=None).run(KEY, 1, DATA, progress_bar=False)
    assert done == [float(here.posterior()["mu"].mean)]
    files = names(tmp_path, "bern")
    # The last reply stays, by which a script that was stopped just then goes on.
    assert [name for name in files if not name.endswith(".done")] == names(
        tmp_path, "bern", ".reply"
    )
    assert len(names(tmp_path, "bern", ".reply")) == 1
    reply = next((tmp_path / "files" / "bern").glob("*.reply.done")).read_bytes()
    assert "says that it is signed by the silo" in words_of("a file", reply)
    numbers = [int(name.split("-")[1]) for name in names(tmp_path, "bern", ".request.done")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_folder_without_silos_is_refused(tmp_path):
    with pytest.raises(DataError, match="no folder of a silo"):
        Folder(tmp_path)
    for name in (".sync", "basel"):
        (tmp_path / name).mkdir()
    assert Folder(tmp_path).num_silos == 1


# --- the site's side -------------------------------------------------------------------------


def test_a_study_that_waits_gets_no_reply_until_it_is_approved(waiting, tmp_path, capsys):
    state = tmp_path / "silo"
    here = silo(state=state, approve="ask")
    with pytest.raises(DataError, match="1 of 1 files got no reply"):
        answer_files(here, waiting.parent)
    (study,) = studies(here._store)
    told = capsys.readouterr().err
    assert f"numpyro-fed approve {study.id} --until DATE --state {state}" in told
    assert names(tmp_path) == [waiting.name]
    assert main(["approve", study.id, "--until", "2999-12-31", "--state", str(state)]) == 0
    assert "approved until 2999-12-31" in capsys.readouterr().out
    assert answer_files(here, waiting.parent) == [waiting.with_suffix(".reply")]
    assert again(tmp_path) == 4


def test_a_study_that_is_refused_gets_a_reply(waiting, tmp_path):
    here = silo(approve="ask")
    with pytest.raises(DataError):
        answer_files(here, waiting)
    (study,) = studies(here._store)
    keep_study(here._store, type(study)(study.requester, study.study, REFUSED))
    answer_files(here, waiting)
    with pytest.raises(ModelError, match="has refused"):
        again(tmp_path)


def test_a_reply_that_was_lost_is_made_again(waiting, tmp_path, capsys):
    here = silo()
    for _ in range(2):
        (reply,) = answer_files(here, waiting)
        reply.unlink()
    reply.write_bytes(b"")
    assert answer_files(here, waiting) == []
    assert "Remove it to answer again" in capsys.readouterr().err


def test_a_day_that_is_over_approves_nothing():
    assert time.strftime("%Y-%m-%d", time.localtime(end_of("2099-12-31"))) == "2099-12-31"
    assert end_of(time.strftime("%Y-%m-%d")) > time.time() - 1
    for day, words in (("2001-01-01", "is over"), ("tomorrow", "a date such as")):
        with pytest.raises(ModelError, match=words):
            end_of(day)


def test_bad_files_stop_no_others_and_are_in_the_audit_log(waiting, tmp_path, capsys):
    audit = tmp_path / "audit.jsonl"
    good, folder = waiting.read_bytes(), waiting.parent
    head, arrays = read(good)
    envelope, message = signed_message(good)
    other = read(STRANGER.request(message, envelope)).head[SIGNATURE]
    (folder / "basel-000-forged.request").write_bytes(write(arrays, {**head, SIGNATURE: other}))
    (folder / "basel-000-\x1b[2Jhalf.request").write_bytes(good[:-3])
    with pytest.raises(DataError, match="2 of 3 files got no reply"):
        answer_files(silo(audit=str(audit)), folder)
    told = capsys.readouterr()
    assert "forged.request: no reply was written. the signature" in told.err
    assert "half.request: no reply was written. a message cannot be read" in told.err
    assert "\x1b" not in told.err + told.out
    assert check_audit(audit).number == 3
    assert names(tmp_path, ending=".reply") == [f"{waiting.stem}.reply"]


def test_a_stranger_hears_why(tmp_path):
    with pytest.raises(ConnectionError):
        asks(tmp_path, key=STRANGER, state=tmp_path / "analyst")
    answer_files(silo(), tmp_path / "files" / "basel")
    with pytest.raises(ValueError, match="is not among those"):
        asks(tmp_path, key=STRANGER, state=tmp_path / "analyst")
    # Once the owner has added it, it is another question.
    with pytest.raises(ConnectionError):
        asks(tmp_path, key=STRANGER, state=tmp_path / "analyst")
    answer_files(silo(requesters=(STRANGER.fingerprint,)), tmp_path / "files" / "basel")
    assert asks(tmp_path, key=STRANGER, state=tmp_path / "analyst").mean["y"] == 4


# --- the analyst's side ----------------------------------------------------------------------


def test_studies_and_analysts_share_a_folder(tmp_path):
    mine = dict(state=tmp_path / "mine", study="one")
    theirs = dict(state=tmp_path / "theirs", study="one", key=OTHER)
    another = dict(state=tmp_path / "another", study="another")
    for options in (mine, theirs, another):
        with pytest.raises(ConnectionError):
            asks(tmp_path, SITES, **options)
    assert len(names(tmp_path, ending=".request")) == 3
    for j, site in enumerate(SITES):
        answer_files(silo(DATA[j], study="one"), tmp_path / "files" / site)
    for options in (mine, theirs):
        assert asks(tmp_path, SITES, **options).mean["y"] == 54
    with pytest.raises(ModelError, match="files differ"):
        asks(tmp_path, SITES, **another)


def test_a_reply_in_the_folder_of_another_site_is_not_taken(tmp_path):
    options = dict(state=tmp_path / "analyst", sites=SITES)
    with pytest.raises(ConnectionError):
        asks(tmp_path, **options)
    first, second = (tmp_path / "files" / site for site in SITES)
    (ours,), (theirs,) = (answer_files(silo(DATA[j]), f) for j, f in enumerate((first, second)))
    ours.rename(second / ours.name)
    theirs.rename(first / theirs.name)
    with (
        pytest.warns(FederatedWarning, match="is not of this site"),
        pytest.raises(ConnectionError),
    ):
        asks(tmp_path, **options)
    (second / ours.name).rename(ours)
    (first / theirs.name).rename(theirs)
    assert asks(tmp_path, **options).mean["y"] == 54


def test_a_reply_that_was_cut_is_named_once(waiting, tmp_path):
    (reply,) = answer_files(silo(), waiting)
    whole = reply.read_bytes()
    reply.write_bytes(whole[:-2])
    cut = pytest.warns(FederatedWarning, match="was cut on its way")
    with cut as told, pytest.raises(ConnectionError):
        again(tmp_path)
    assert len(told) == 1
    reply.write_bytes(whole)
    assert again(tmp_path) == 4


def test_a_reply_is_found_again_and_one_without_use_asked_for_once_more(waiting, tmp_path):
    """A thread has taken it as the script was stopped; then the analyst removes it."""
    answer_files(silo(), waiting)
    folder = Folder(tmp_path / "files", every=0.01)
    first = folder.send(0, waiting.read_bytes(), 1.0)
    assert names(tmp_path) == [f"{waiting.stem}.reply", f"{waiting.name}.done"]
    with pytest.warns(FederatedWarning, match="was read before"):
        assert again(tmp_path) == 4
    message = (waiting.parent / f"{waiting.name}.done").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Whoever was told asks again for a reason.
        with pytest.raises(TimeoutError):
            folder.send(0, message, 0.05)
    assert names(tmp_path, ending=".request") == [waiting.name.replace("001", "002")]
    assert names(tmp_path, ending=".reply.done") == [f"{waiting.stem}.reply.done"]
    assert first == (waiting.parent / f"{waiting.stem}.reply.done").read_bytes()


def test_a_thread_of_a_stopped_script_takes_nothing_away(waiting, tmp_path):
    """As where a notebook's cell is interrupted, and run again with the same engine."""
    folder, came = Folder(tmp_path / "files", every=0.01), []
    message = waiting.read_bytes()
    thread = threading.Thread(target=lambda: came.append(folder.send(0, message, 60.0)))
    thread.start()
    answer_files(silo(), waiting)
    thread.join()
    with pytest.warns(FederatedWarning, match="was read before"):
        assert folder.send(0, message, 1.0) == came[0]


def test_a_question_may_be_moved_to_its_site(waiting, tmp_path):
    there = tmp_path / "stick"
    there.mkdir()
    moved = waiting.replace(there / waiting.name)
    (reply,) = answer_files(silo(), moved)
    reply.replace(waiting.with_suffix(".reply"))
    assert again(tmp_path) == 4


# --- what is shown ---------------------------------------------------------------------------


def test_show_verifies_what_it_says_and_moves_no_cursor(waiting, tmp_path, capsys):
    wild = "\x1b[2J\n  signed by SHA256:"
    for content, words in (
        (write({wild: np.zeros(3)}, Question(wild, wild).head()), "\\x1b[2J\\n  signed by"),
        (write({}, {"error": "DataError", "words": wild}), "a refusal: \\x1b"),
        (write({SEALED: np.zeros(3, np.uint8)}), "does not say which silo"),
        (write({SEALED: np.zeros(3)}, {"silo": wild}), "does not say which silo"),
        (waiting.read_bytes(), f"signed by {ANALYST.fingerprint}"),
    ):
        told = words_of(f"a file{wild}", content)
        assert words in told
        assert "\x1b" not in told
        assert "\n  signed by SHA256:" not in told.replace(f"signed by {ANALYST.fingerprint}", "")
    assert "..." in words_of("x", write({}, Question(MOMENTS, "x" * 9_999).head()))
    head, arrays = read(waiting.read_bytes())
    for content in (
        b"",
        b"x" * 99,
        write(arrays, head | {SIGNATURE: "00"}),
        write({}, {ENVELOPE: ""}),
    ):
        file = tmp_path / "x"
        file.write_bytes(content)
        assert main(["show", str(file)]) == 1
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
    assert main(["show", str(tmp_path / "nothing")]) == 1
    assert main(["show", str(tmp_path)]) == 1
    assert "a refusal: no" in words_of("x", refusal(DataError("no")))


def test_an_in_memory_silo_does_not_answer_anybody_without_a_word(tmp_path, capsys):
    (tmp_path / "a_study.py").write_text("")
    (tmp_path / "a_site.py").write_text("def data():\n    return {}\n")
    words = ["silo", str(tmp_path / "a_study.py"), "--data", f"{tmp_path / 'a_site.py'}:data"]
    assert main([*words, "--socket", str(tmp_path / "s"), "--in-memory"]) == 1
    assert "nobody may ask this silo" in capsys.readouterr().err
