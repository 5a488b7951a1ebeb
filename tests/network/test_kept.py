"""What silos and analysts keep: for its owner alone, for one process at a time, and for good."""

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import warnings

import jax
import models
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.errors import FederatedWarning, SavedStateError
from numpyro_fed.basics.files import (
    KEPT,
    LOCK,
    FolderLock,
    log_privately,
    private_folder,
    read_npz,
    write_npz,
)
from numpyro_fed.network.cli import main
from numpyro_fed.network.engines import InMemory
from numpyro_fed.privacy.budget import PrivacyWarning

KEY, level = jax.random.key(0), models.level()
NAMES = {"level": level}


@pytest.fixture
def open_umask():
    """A process whose new files all may read and write."""
    before = os.umask(0)
    yield
    os.umask(before)


def silo(state=None, **rules):
    policy = nf.Policy(min_rows=1, parameters_per_row=1.0, min_silos=1, **rules)
    return nf.Silo(dict(y=np.arange(9.0)), names=NAMES, policy=policy, state=state)


def federation(*silos, **options):
    return nf.Federation(InMemory([one.answer for one in silos]), names=NAMES, **options)


def run(there, **options):
    return nf.PVI(level, start=None, **options).run(KEY, 1, there, progress_bar=False)


def open_to_others(folder):
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    return [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]


# --- for its owner alone ---------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_kept_is_for_its_owner_alone(tmp_path, open_umask):
    kept = tmp_path / "a" / "kept"
    audit = kept / "audit.jsonl"
    here = silo(kept / "silo", audit=str(audit))
    assert here.fingerprint
    result = run(federation(here, state=kept / "server"))
    result.save(kept / "result")
    names = {path.name for path in kept.rglob("*")}
    assert {KEPT, f"{KEPT}-wal", "log.jsonl", "audit.jsonl", "result.npz"} <= names
    assert open_to_others(kept.parent) == []


def test_a_folder_that_others_can_open_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for make in (silo, lambda state: federation(silo(), state=state)):
        with pytest.raises(SavedStateError, match=r"others .*mode is 755.*chmod 700 "):
            make(tmp_path / "open")
    (tmp_path / "open").chmod(0o700)
    silo(tmp_path / "open")


@pytest.mark.parametrize("name", ["ledger", "replies"])
def test_a_folder_of_an_earlier_version_is_not_taken_for_an_empty_one(tmp_path, name):
    folder = private_folder(tmp_path / "state")
    (folder / name).write_bytes(b"{}")
    for make in (silo, lambda state: federation(silo(), state=state)):
        with pytest.raises(SavedStateError, match="written by an earlier version"):
            make(folder)


def test_a_damaged_file_is_refused(tmp_path):
    folder = private_folder(tmp_path / "state")
    (folder / KEPT).write_bytes(b"no database" * 100)
    with pytest.raises(SavedStateError, match=r"kept\.sqlite cannot be read"):
        silo(folder)


def test_a_log_that_others_can_read_is_closed_to_them(tmp_path):
    (tmp_path / "log").write_text("before\n")
    (tmp_path / "log").chmod(0o644)
    log_privately(tmp_path / "log", {"silo": 1})
    before, after = (tmp_path / "log").read_text().splitlines()
    assert before == "before"
    assert list(json.loads(after)) == ["time", "silo"]
    assert open_to_others(tmp_path) == []
    (tmp_path / "log").chmod(0o640)  # for auditors
    log_privately(tmp_path / "log", {})
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o640
    log_privately(os.devnull, {})


@pytest.mark.slow
def test_a_log_of_another_user_is_written_with_a_warning(tmp_path, monkeypatch):
    def refused(file, mode):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "log").touch()
    (tmp_path / "log").chmod(0o646)
    monkeypatch.setattr(os, "fchmod", refused)
    here = silo(audit=str(tmp_path / "log"))
    with pytest.warns(FederatedWarning, match=r"all users .* can open .*log, .*chmod o="):
        run(federation(here))
    assert (tmp_path / "log").read_text().count("\n") > 2


def test_a_file_is_never_open_to_others(tmp_path, open_umask, monkeypatch):
    """Not even before it takes its name."""
    seen, replace = [], os.replace

    def noted(part, file):
        seen.append(stat.S_IMODE(os.stat(part).st_mode))
        replace(part, file)

    monkeypatch.setattr(os, "replace", noted)
    write_npz(tmp_path / "a", {"x": np.ones(2)}, {})
    assert seen == [0o600]
    for path in ("a", "a.npz"):  # the path that was given, or the file's own name
        assert read_npz(tmp_path / path)[0]["x"].tolist() == [1, 1]


# --- for one process at a time ---------------------------------------------------------------

HOLD = """
    import sys, time
    from numpyro_fed.basics.files import FolderLock
    use = FolderLock(sys.argv[1])
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def held_elsewhere(tmp_path):
    """A folder that another process uses, and that process."""
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path / "state")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield tmp_path / "state", process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_folder_is_used_by_one_process(held_elsewhere, caplog):
    """The server hears it without the folder's path, which tells of the machine."""
    folder, process = held_elsewhere
    with pytest.raises(nf.RefusedError, match="this silo cannot use its folder") as refused:
        run(federation(silo(folder)))
    assert str(folder.parent) not in str(refused.value)
    assert re.search(rf"{folder} cannot be locked .*another process uses it", caplog.text)
    with pytest.raises(SavedStateError, match="another process uses it"):
        federation(silo(), state=folder)
    process.kill()
    process.wait()
    assert (folder / LOCK).exists()  # left behind, and no lock
    run(federation(silo(folder)))


def test_a_file_that_a_text_does_not_find_is_not_named_to_the_server(caplog):
    def reads(y):
        np.loadtxt("/srv/jane/table")

    here = nf.Silo(dict(y=np.arange(9.0)), names={"reads": reads})
    there = nf.Federation(InMemory([here.answer]), names={"reads": reads})
    with pytest.raises(nf.ModelError, match="FileNotFoundError at the silo") as refused:
        nf.PVI(reads).run(KEY, 1, there, progress_bar=False)
    assert "jane" not in str(refused.value)
    assert "/srv/jane/table" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def refused(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(SavedStateError, match=r"file system has no locks.*on a local disk"):
        FolderLock(tmp_path / "state")


@pytest.mark.slow
def test_the_command_refuses_a_folder_that_another_process_uses(
    held_elsewhere, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text("def model(y): ...\ndef main(silos): ...\n")
    (tmp_path / "hospital.py").write_text("def silo():\n    return dict(y=[1.0])\n")
    (tmp_path / "nf.sock").touch()
    words = ["silo", "study.py", "--data", "hospital.py:silo", "--socket", "nf.sock"]
    words.append("--anyone")
    assert main([*words, "--state", "state"]) == 1
    assert "another process uses it" in capsys.readouterr().err
    assert (tmp_path / "nf.sock").exists()  # that of the other process
    # By default what is kept is beside the socket.
    (tmp_path / "nf.sock.state").symlink_to("state")
    assert main(words) == 1
    assert "another process uses it" in capsys.readouterr().err


def test_a_new_silo_takes_the_folder_over_with_all_that_was_spent(tmp_path):
    first = silo(tmp_path / "state", max_places=2)
    then = silo(tmp_path / "state", max_places=2)  # before the first one has counted
    run(federation(first))
    assert nf.moments(federation(then), ["y"]).mean["y"] == 4
    assert then._ledger.left["places"] == 1
    with pytest.raises(SavedStateError, match="used by another object"):
        first.hold()
    with pytest.raises(nf.RefusedError, match="this silo cannot use its folder"):
        nf.moments(federation(first), ["y"])


def test_a_copy_of_the_process_does_not_answer(tmp_path, monkeypatch):
    use = FolderLock(tmp_path / "state")
    use.check()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(SavedStateError, match="a copy of this process"):
        use.check()


# --- for good --------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [{"max_epsilon": 1.0}, {"max_places": 9}, {"max_draws": 9}])
def test_limits_without_a_folder_are_warned_of(rules, tmp_path):
    with pytest.warns(PrivacyWarning, match=rf"\({next(iter(rules))}\).*Give Silo\(state=\.\.\.\)"):
        silo(**rules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silo()
        silo(tmp_path / "state", **rules)


def test_a_budget_of_privacy_refuses_what_is_told_without_noise(tmp_path):
    there = federation(silo(tmp_path / "state", max_epsilon=3.0))
    words = r"silo 0 .*epsilon of 3 \(max_epsilon\), and .* without noise.*privacy=nf\.Privacy"
    for ask in (run, nf.moments, lambda there: nf.levels(there, ["y"])):
        with pytest.raises(nf.ModelError, match=words):
            ask(there)
    with pytest.raises(nf.ModelError, match=words):
        nf.fit(KEY, level, there, progress_bar=False)


@pytest.mark.parametrize("name", ["secure_sum", "in_order", "tell_latents"])
def test_a_rule_that_is_true_or_false_is_no_text(name):
    with pytest.raises(ValueError, match=f"{name} must be true or false, got 'false'"):
        nf.Policy(exchanges=("mode",), **{name: "false"})
