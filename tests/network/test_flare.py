"""A federation over NVFLARE, with its certificates, on this machine: the numbers of one process."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import flare_study
import jax
import numpy as np
import pytest
from flare_place import ANALYST, SERVER, SITES, USER, Place

import numpyro_fed as nf
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.network import Flare, InMemory
from numpyro_fed.network.engines import short_folder
from numpyro_fed.network.flare import DENIED, EXECUTOR, RELAY, allow, denied, write_job
from numpyro_fed_relay import Pending

KEY = jax.random.key(0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None,
        reason="NVFLARE is not installed (the extra nvflare)",
    ),
    # Of what NVFLARE stands on.
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated"),
]


@pytest.fixture(scope="module")
def place():
    with short_folder() as folder, Place(folder, JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu") as found:
        found.start_all()
        yield found


@pytest.fixture(scope="module")
def engine(place):
    with Flare(place.kit(USER), SITES, patience=120) as found:
        yield found


def federation(engine, **options):
    common = dict(names=vars(flare_study), patience=120, key=ANALYST, secure_sum=False)
    return nf.Federation(engine, **common | options)


def check(found):
    """Compare with the numbers of a list of data in this process."""
    expected = flare_study.figures(flare_study.numbers())
    for method, numbers in expected.items():
        np.testing.assert_allclose(found[method]["losses"], numbers["losses"], rtol=1e-12)
        for site, draws in numbers["posterior"].items():
            np.testing.assert_allclose(found[method]["posterior"][site], draws, rtol=1e-12)


def test_the_command_prints_the_numbers_of_one_process(place, double, tmp_path):
    printed = place.analyse(tmp_path)
    check(json.loads(printed))
    assert json.loads((tmp_path / "sites.json").read_text()) == list(SITES)
    # All replies are there: nobody is asked again.
    before = place.log("silo of hospital-1")
    assert place.analyse(tmp_path) == printed
    assert place.log("silo of hospital-1") == before


class Killing:
    """An engine that does something before its n-th message to silo 1."""

    def __init__(self, engine, at, what):
        self.engine, self.left, self.what = engine, at, what
        self.num_silos = engine.num_silos

    def send(self, silo, message, timeout):
        if silo == 1:
            self.left -= 1
            if self.left == 0:
                self.what()
        return self.engine.send(silo, message, timeout)


def test_a_silo_that_was_killed_goes_on_in_the_same_job(place, engine, double):
    replied = []

    def kill():
        """While the others of the exchange are asked; the message waits for the new process."""
        place.kill_silo(1)
        place.start_silo(1)
        with pytest.raises(ConnectionError, match=r"hospital-2.*no process answers"):
            engine.send(1, b"message", 10)
        place.wait_for_silos()
        began = time.monotonic()
        engine.send(1, b"message", 15)
        replied.append(time.monotonic() - began)

    job = engine._job
    check(flare_study.figures(federation(Killing(engine, 6, kill))))
    assert replied[0] < 15
    assert engine._job is job


def test_a_server_that_was_killed_is_followed_by_a_new_job(place, engine, double, tmp_path):
    def kill():
        place.kill_nvflare(SERVER)
        place.start_nvflare(SERVER)

    job = engine._job
    check(flare_study.figures(federation(Killing(engine, 6, kill), state=tmp_path)))
    assert engine._job.id != job.id


class Absent(InMemory):
    """Silos in this process, of which silo 1 does not answer while it is gone."""

    gone = False

    def send(self, silo, message, timeout):
        if silo == 1 and self.gone:
            raise ConnectionRefusedError
        return super().send(silo, message, timeout)


def test_a_site_may_be_away_in_three_of_eight_rounds(place, engine, double):
    def run(engine, leave, come_back):
        """The result of a run in whose rounds 2, 3 and 4 silo 1 is away."""
        there = federation(engine)

        def callback(result):
            if len(result.losses) == 2:
                leave()
                there.patience = 2.0
            elif len(result.losses) == 5:
                come_back()
                there.patience = 120.0

        method = nf.PVI(flare_study.plain, start=None, schedule="synchronous")
        return method.run(KEY, 8, there, progress_bar=False, callback=callback, every=1)

    def come_back():
        place.start_silo(1)
        place.wait_for_silos()

    job = engine._job
    found = run(engine, lambda: place.kill_silo(1), come_back)
    data = flare_study.numbers()
    free = nf.Policy(min_rows=1, parameters_per_row=10.0, secure_sum=False)
    silos = [nf.Silo(d, names=vars(flare_study), policy=free) for d in data]
    here = Absent([silo.answer for silo in silos])
    expected = run(here, lambda: setattr(here, "gone", True), lambda: setattr(here, "gone", False))
    assert (found.status[:, 0, 1] == 5).tolist() == [False] * 2 + [True] * 3 + [False] * 3
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    np.testing.assert_array_equal(found.status, expected.status)
    assert engine._job is job


def median(engine, size, times):
    """Seconds for a message and a reply of this size."""
    message, taken = np.random.default_rng(0).bytes(size), []
    for _ in range(times):
        began = time.perf_counter()
        assert engine.send(2, message, 60) == message
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def test_an_exchange_takes_little_time(place, engine):
    """Alone on a machine it is 0.02 s and 0.5 s; here others may run beside."""
    place.kill_silo(2)
    place.start_echo(2)
    try:
        place.wait_for_silos()
        median(engine, 10_000, 5)
        assert median(engine, 10_000, 20) < 0.2
        assert median(engine, 10_000_000, 3) < 4
    finally:
        place.kill_silo(2)
        place.start_silo(2)


def ended(engine, folder):
    """What NVFLARE says of a job once it has ended."""
    job = engine._command("submit_job", str(folder))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        meta = engine._command("get_job_meta", job)
        if str(meta["status"]).startswith(("FINISHED", "FAILED")):
            return f"{meta}"
        time.sleep(0.5)
    raise AssertionError(f"{meta}")


ANALYST_PROCESS = """
import sys, time
from numpyro_fed.network import flare

flare.IDLE, flare.SIGN = 10.0, 2.0
engine = flare.Flare(sys.argv[1], sys.argv[2:], patience=120)
print(engine._job.id, flush=True)
time.sleep(600)
"""


def test_a_job_ends_soon_after_its_analyst_was_killed(place, engine):
    """It does not end while that process lives and says nothing for three times as long."""

    def status():
        return str(engine._command("get_job_meta", job)["status"])

    command = [sys.executable, "-c", ANALYST_PROCESS, str(place.kit(USER)), *SITES]
    with subprocess.Popen(
        command, cwd=place.folder, env=place.environment, stdout=subprocess.PIPE, text=True
    ) as analyst:
        try:
            job = next(line for line in map(str.strip, analyst.stdout) if line)
            time.sleep(30)
            assert status() == "RUNNING"
        finally:
            analyst.kill()
    began = time.monotonic()
    while status() == "RUNNING":
        assert time.monotonic() - began < 40
        time.sleep(0.5)
    assert "COMPLETED" in status()


def test_a_site_refuses_a_job_with_code(place, engine, tmp_path):
    write_job(tmp_path, SITES, "key")
    custom = tmp_path / "relay" / "custom"
    custom.mkdir()
    (custom / "theirs.py").write_text("print('a stranger's code')\n")
    said = ended(engine, tmp_path)
    assert re.search("hospital-1: .*BYOC not permitted", said)
    assert "COMPLETED" not in said


def test_a_site_refuses_a_class_that_is_not_allowed(place, engine, tmp_path):
    write_job(tmp_path, SITES, "key")
    file = tmp_path / "relay" / "config" / "config_fed_client.json"
    job = json.loads(file.read_text())
    job["components"][0]["path"] = "nvflare.app_common.np.np_trainer.NPTrainer"
    file.write_text(json.dumps(job))
    assert "COMPLETED" not in ended(engine, tmp_path)
    assert "NPTrainer' at config path" in place.log("nvflare of hospital-1")


def test_a_strangers_message_is_not_passed_on(engine):
    """Of a party of the federation that does not know the job's key."""
    job = engine._job
    stranger = type(job)(job.id, "another key")
    assert (
        "key is not" in engine._ask(stranger, {"silo": 0, "ticket": "1", "message": b"m"})["lost"]
    )


def test_a_relay_answers_the_server_alone():
    from numpyro_fed_relay.flare import Relay

    def ask(caller):
        return Relay().exchange("1", b"message", 1.0, context=SimpleNamespace(caller=caller))

    assert "nobody but the server" in ask("hospital-3")["lost"]
    assert "no file local/numpyro_fed.json" in ask("server")["away"]


def test_what_takes_long_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("numpyro_fed_relay.HOLD", 0.01)
    pending, begun, done = Pending(2), [], threading.Event()

    def make():
        begun.append(1)
        done.wait(10)
        return {"reply": b"reply"}

    # A message that is sent again waits for the same answer.
    assert pending.answer("a", make) == pending.answer("a", make) == {"computes": True}
    assert pending.answer("a", None) == {"computes": True}
    done.set()
    monkeypatch.setattr("numpyro_fed_relay.HOLD", 10.0)
    assert pending.answer("a", None) == {"reply": b"reply"}
    assert begun == [1]
    # It was asked for, and is not kept.
    assert "lost" in pending.answer("a", None)
    assert "lost" in pending.answer("b", None)


def test_a_kit_is_opened_for_the_relay_alone(place, tmp_path):
    kit = place.kit("hospital-1")
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == [EXECUTOR, RELAY]
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert all(role[right] == "none" for role in rights.values() for right in DENIED)
    assert rights["project_admin"]["view"] == "any"
    assert denied({"one": "any", "two": {"view": "o:site"}})["one"]["view"] == "any"
    server = (place.kit(SERVER) / "local" / "resources.json").read_text()
    assert "/tmp/nvflare" not in server
    for name, socket in ((SERVER, tmp_path / "a"), ("hospital-1", None)):
        with pytest.raises(ModelError, match="--socket belongs"):
            allow(place.kit(name), socket)
    with pytest.raises(ModelError, match="no startup kit"):
        allow(tmp_path, None)
    with pytest.raises(ModelError, match="no startup kit of a user"):
        Flare(kit)


def test_a_site_that_is_lost_does_not_block_the_others(place, double):
    """A job goes on without it, another one begins without it, and a third takes it in again.

    It stands last: a job that needs all sites, as that of the other tests, ends with the site.
    """
    lost, data = SITES[2], flare_study.numbers()
    there = dict(patience=60.0, missing="leave_out")
    expected = nf.fit(KEY, flare_study.plain, data[:2], progress_bar=False)
    options = dict(patience=120, wait_for_sites=5.0)

    def check_fit(engine):
        with pytest.warns(nf.ConvergenceWarning, match="silo 2"):
            found = nf.fit(KEY, flare_study.plain, federation(engine, **there), progress_bar=False)
        assert "Without an answer from silo 2" in found.verdict
        np.testing.assert_allclose(found.log_weights, expected.log_weights, rtol=1e-9, atol=1e-9)

    with Flare(place.kit(USER), SITES, **options) as engine:
        job = engine._job
        place.kill_nvflare(lost)
        try:
            check_fit(engine)
            assert engine._job is job
        except BaseException:
            place.start_nvflare(lost)
            raise
    try:
        with Flare(place.kit(USER), SITES, **options) as engine:
            assert engine._job.without == {lost}
            check_fit(engine)
            place.start_nvflare(lost)
            until = time.monotonic() + 90
            while engine._job.without:
                assert time.monotonic() < until
                with suppress(ConnectionError):
                    engine.send(2, b"message", 60)
                time.sleep(1)
            assert engine._job.without == set()
            for silo in range(3):
                assert engine.send(silo, b"message", 60)
    finally:
        if f"nvflare of {lost}" not in place.processes:
            place.start_nvflare(lost)
