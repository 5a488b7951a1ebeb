"""The command ``numpyro-fed``: a study over silos in processes of this machine."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.network import cli
from numpyro_fed.network.cli import main
from numpyro_fed.network.engines import listen, short_folder

STUDY = """
import jax, numpyro, numpyro.distributions as dist, numpyro_fed as nf


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def main(silos):
    for rounds in (1, 2):
        result = nf.PVI(model, start=None).run(
            jax.random.key(0), rounds, silos, progress_bar=False
        )
        print("mean", float(result.posterior()["mu"].mean), flush=True)
"""
DATA = """
import os
import numpy as np


def silo():
    number = int(os.environ.get("NUMPYRO_FED_SILO", 0))
    return dict(y=np.random.default_rng(number).normal(3, 1, 10 + number))
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(STUDY)
    (tmp_path / "hospital.py").write_text(DATA)
    return tmp_path


def command(*words):
    return [sys.executable, "-m", "numpyro_fed.network.cli", *words]


def exact():
    y = np.concatenate([np.random.default_rng(j).normal(3, 1, 10 + j) for j in range(2)])
    return y.sum() / (len(y) + 0.01)


@pytest.mark.slow
def test_a_rehearsal_goes_on_from_its_folder(study):
    words = ("try", "study.py", "--silos", "2", "--data", "hospital.py:silo", "--state", "state")
    first, again = (
        subprocess.run(command(*words), capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert again.stdout == first.stdout
    assert abs(float(first.stdout.split()[-1]) - exact()) < 1e-4
    # Each process finds the programs that it has compiled in the folder of what it keeps.
    for kept in ("state", "state/silo-0", "state/silo-1"):
        assert list((study / kept / "programs").iterdir()), kept
        assert (study / kept / "programs").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_silo_that_is_killed_is_started_again(study):
    """Between two exchanges: the script waits for it, and its new process goes on."""
    with short_folder() as folder:
        sockets = [f"{folder}/{j}.sock" for j in range(2)]

        def start(j):
            words = ("silo", "study.py", "--data", "hospital.py:silo", "--socket", sockets[j])
            environment = {**os.environ, "NUMPYRO_FED_SILO": str(j)}
            options = ("--state", f"silo-{j}", "--anyone")
            return subprocess.Popen(command(*words, *options), env=environment)

        processes = [start(j) for j in range(2)]
        script = subprocess.Popen(
            command("run", "study.py", "--sockets", *sockets, "--patience", "200"),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            script.stdout.readline()
            processes[1].send_signal(signal.SIGKILL)
            processes[1].wait()
            time.sleep(0.5)
            processes[1] = start(1)
            last, _ = script.communicate(timeout=300)
        finally:
            for process in (script, *processes):
                process.kill()
                process.wait()
    assert script.returncode == 0
    assert abs(float(last.split()[-1]) - exact()) < 1e-4


def test_a_socket_is_its_users_or_a_groups_too():
    import grp  # which only a Unix has

    group = grp.getgrgid(os.getgid()).gr_name
    with short_folder() as folder:
        for name, mode in ((None, 0o600), (group, 0o660)):
            with listen(f"{folder}/s", bytes, name):
                assert os.stat(f"{folder}/s").st_mode & 0o777 == mode


def test_what_is_wrong_with_a_study_is_said(study, capsys):
    (study / "other.py").write_text("x = 1")
    (study / "policy.toml").write_text("min_row = 3")
    silo = ["silo", "study.py", "--socket", "s", "--anyone", "--data"]
    for words, told in (
        (["try", "other.py", "--silos", "1", "--data", "hospital.py:silo"], "no function main"),
        ([*silo, "hospital.py"], "expected file.py:function"),
        ([*silo, "hospital.py:silos"], "no function silos()"),
        ([*silo, "hospital.py:silo", "--policy", "policy.toml"], "unknown key 'min_row'"),
        ([silo[0], *silo[1:4], "--data", "hospital.py:silo"], "nobody may ask this silo"),
    ):
        assert main(words) == 1
        assert told in capsys.readouterr().err


def test_an_error_is_told_with_its_notes(monkeypatch, capsys):
    """As where a silo cannot be left out under sums."""

    def raise_with_note(args):
        error = ModelError("a silo is away")
        error.add_note("and why the others do not go on")
        raise error

    monkeypatch.setattr(cli, "allow_kit", raise_with_note)
    assert main(["allow", "kit"]) == 1
    assert "numpyro-fed: a silo is away\nand why the others do not go on" in capsys.readouterr().err
