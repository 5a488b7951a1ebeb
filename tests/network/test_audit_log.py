"""The audit log: what it says, how it is checked, and what no accident makes wrong for ever."""

import gzip
import json
import re
import socket

import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import Store
from numpyro_fed.network import InMemory, PrivateKey
from numpyro_fed.network import audit as audit_module
from numpyro_fed.network.audit import LAST, AuditLog, check_audit
from numpyro_fed.network.cli import main
from numpyro_fed.network.doctor import check_audit_log
from numpyro_fed.network.engines import short_folder

ANALYST = PrivateKey(bytes([1]) * 32)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "audit.jsonl"


def written(file, number, store=None):
    """A log with lines more than before, and where its silo keeps the last one."""
    store = store or Store(None)
    log = AuditLog(str(file), store)
    for _ in range(number):
        log.add({"why": "x" * 50})
    return store


def closed(file, monkeypatch, number=6):
    """A log of several files."""
    monkeypatch.setattr(audit_module, "LARGEST", 300)
    return written(file, number)


def test_it_says_who_asked_and_why_not_and_cannot_be_changed(file):
    rules = dict(audit=str(file), columns=("y",), min_rows=1, requesters=(ANALYST.fingerprint,))
    data = dict(y=np.arange(9.0))
    here = nf.Silo(data, names={}, policy=nf.Policy(**rules), study="files")
    there = nf.Federation(InMemory([here.answer]), key=ANALYST, study="files")
    nf.moments(there, ["y"])
    with pytest.raises(ModelError):
        nf.levels(there, ["x"])
    here.answer(b"nothing that can be read")
    told, no, strange = map(json.loads, file.read_text().splitlines())
    assert told["requester"] == no["requester"] == ANALYST.fingerprint
    assert (told["study"], told["refused"], told["why"]) == ("files", False, "")
    assert "'x' is not among" in no["why"]
    assert "cannot be read" in strange["why"]
    assert check_audit(file).number == 3
    assert not check_audit(file).remarks
    lines = file.read_text().splitlines(keepends=True)
    for wrong in (
        [lines[0].replace('"moments"', '"levels"'), *lines[1:]],
        [lines[0], lines[2]],
        [lines[1], lines[0], lines[2]],
        [lines[0], lines[0], *lines[1:]],
        [lines[0], '{"why": "put in between"}\n', *lines[1:]],
        [lines[0], lines[1][:40] + "\n", lines[2]],
    ):
        file.write_text("".join(wrong))
        with pytest.raises(DataError, match="does not follow"):
            check_audit(file)


def test_it_goes_on_in_another_file(file, monkeypatch):
    closed(file, monkeypatch)
    assert len(list(file.parent.glob("audit.jsonl.*"))) > 1
    assert check_audit(file).number == 6
    assert not check_audit(file).remarks


# --- accidents, after which it goes on -------------------------------------------------------


def killed(file, monkeypatch):
    store = written(file, 2)
    before = store.get(LAST)
    written(file, 1, store)
    store.put({LAST: before})  # the process ended before it noted its last line
    written(file, 2, store)


def another_folder(file, monkeypatch):
    one, other = written(file, 2), Store(None)
    for store in (other, one, other):
        written(file, 1, store)


def earlier_version(file, monkeypatch):
    file.write_text('{"time": "2026-01-01", "why": ""}\n' * 2)
    written(file, 5)


def full_disk(file, monkeypatch):
    store = written(file, 3)
    with open(file, "a") as stream:
        stream.write('{"time": "2026-')
    written(file, 1, store)


def without_its_end(file, monkeypatch):
    store = written(file, 4)
    file.write_bytes(file.read_bytes()[:-1])
    written(file, 1, store)


def torn_at_the_beginning(file, monkeypatch):
    store = closed(file, monkeypatch, 4)
    file.rename(file.with_name("audit.jsonl.4"))
    file.write_text('{"time": "2026-')
    written(file, 1, store)


def taken_away(file, monkeypatch):
    closed(file, monkeypatch, 5)
    min(file.parent.glob("audit.jsonl.*")).unlink()


def rotated(file, monkeypatch):
    store = written(file, 3)
    with gzip.open(file.with_name("audit.jsonl.1.gz"), "wb") as stream:
        stream.write(file.read_bytes())
    file.unlink()
    written(file, 2, store)


def rotated_after_a_kill(file, monkeypatch):
    written(file, 3)
    file.rename(file.with_name("audit.jsonl.1"))
    written(file, 2)  # by a folder that knows of no line


@pytest.mark.parametrize(
    ("happens", "remark"),
    [
        (killed, ""),
        (another_folder, ""),
        (earlier_version, "2 lines are of an earlier version"),
        (full_disk, "line 4 of .* is torn"),
        (without_its_end, ""),
        (torn_at_the_beginning, "line 1 of .* is torn"),
        (taken_away, "are missing, which stood in a file before"),
        (rotated, "the lines from 1 to 3 are missing"),
        (rotated_after_a_kill, ""),
    ],
)
def test_an_accident_is_named_and_the_log_goes_on(happens, remark, file, monkeypatch, capsys):
    happens(file, monkeypatch)
    found = check_audit(file)
    assert found.number == 5
    assert len(found.remarks) == bool(remark)
    assert all(re.search(remark, words) for words in found.remarks)
    assert main(["audit", str(file), "--check"]) == 0
    assert ("But " in capsys.readouterr().err) == bool(remark)
    # A line that is changed is found there, too.
    written(file, 1)
    lines = file.read_text().splitlines(keepends=True)
    lines[-2] = lines[-2].replace("xxx", "yyy", 1)
    file.write_text("".join(lines))
    with pytest.raises(DataError, match="does not follow"):
        check_audit(file)


def test_lines_that_are_cut_off_or_changed_at_the_end_are_found(tmp_path, file):
    state = tmp_path / "state"
    store = written(file, 4, Store(state))
    whole, last = file.read_text().splitlines(keepends=True), store.get(LAST)

    def said():
        return [(check.state, check.words) for check in check_audit_log(str(file), state)]

    assert said() == [("ok", "4 lines, each follows from the one before")]
    for wrong, words in (
        (whole[:3], "has 3 lines and the silo has written 4"),
        ([*whole[:3], whole[3].replace("xxx", "yyy", 1)], "is not the one that the silo"),
        ([*whole[:3], whole[3][:50]], "is not the one that the silo"),
    ):
        file.write_text("".join(wrong))
        (found,) = said()
        assert found[0] == "wrong"
        assert words in found[1]
        # Nor does it help that the silo goes on.
        written(file, 1, store)
        with pytest.raises(DataError, match="does not follow"):
            check_audit(file)
        store.put({LAST: last})
    file.write_text("".join([*whole, whole[0][:9]]))
    assert [state for state, _ in said()] == ["warning", "ok"]


def test_a_log_is_printed_without_what_moves_a_cursor(file, capsys):
    written(file, 1)
    with open(file, "a") as stream:
        stream.write("\x1b[2J")
    assert main(["audit", str(file)]) == 0
    told = capsys.readouterr()
    assert "\\x1b[2J" in told.out
    assert "\x1b" not in told.out
    assert "line 2 of" in told.err
    assert main(["audit", str(file.with_name("another")), "--check"]) == 1


def test_a_silo_whose_log_cannot_be_written_does_not_start(tmp_path):
    nf.Silo({}, names={}, policy=nf.Policy(audit=str(tmp_path / "audit.jsonl")))
    with pytest.raises(ModelError, match="make its folder"):
        nf.Silo({}, names={}, policy=nf.Policy(audit=str(tmp_path / "none" / "audit.jsonl")))


# --- the system's log ------------------------------------------------------------------------


def test_the_systems_log_takes_each_line_or_the_silo_refuses(monkeypatch):
    with short_folder() as folder:
        path = f"{folder}/log"
        monkeypatch.setattr(audit_module, "SOCKETS", (path,))
        with pytest.raises(ModelError, match="needs the log of the system"):
            nf.Silo({}, names={}, policy=nf.Policy(audit="syslog"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(path)
            log = AuditLog("syslog", Store(None))
            for _ in range(2):
                log.add({"why": ""})
            for number in (1, 2):
                line = listening.recv(10_000).decode()
                assert json.loads(line[line.index("{") :].rstrip("\0"))["line"] == number
        with pytest.raises(ConnectionRefusedError):
            log.add({"why": ""})
        here = nf.Silo({}, names={}, policy=nf.Policy(audit="syslog"))
        assert b"audit log cannot be written" in here.answer(b"")
