"""A federation over NVFLARE, with its certificates, on this machine: the numbers of one process."""

import json
import shutil
import tempfile
import time

import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.network.flare_kit import IDLE, write_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bash") is None, reason="NVFLARE's kits start by bash"),
]
pytest.importorskip("nvflare", reason="NVFLARE is not installed (the extra nvflare)")

import flare_study
from flare_place import SERVER, SITES, USER, Place

from numpyro_fed.network import Flare


@pytest.fixture(scope="module")
def place():
    with tempfile.TemporaryDirectory(prefix="nf-", dir="/tmp") as folder:
        with Place(folder, JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu") as found:
            found.start_all()
            yield found


@pytest.fixture(scope="module")
def engine(place):
    with Flare(place.kit(USER), SITES, patience=120) as found:
        yield found


def federation(engine, **options):
    names = vars(flare_study)
    return nf.Federation(engine, names=names, patience=120, **options)


def check(found, double_of=flare_study.figures, **options):
    """The numbers of a list of data in this process."""
    expected = double_of(flare_study.numbers(), **options)
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
    listened = []

    def kill():
        place.kill_silo(1)
        place.start_silo(1)
        place.wait_for_silos()
        listened.append(time.monotonic())

    job = engine._job
    there = federation(Killing(engine, 6, kill))
    found = flare_study.figures(there)
    check(found)
    assert listened
    assert engine._job is job


def test_a_server_that_was_killed_is_followed_by_a_new_job(place, engine, double, tmp_path):
    def kill():
        place.kill_nvflare(SERVER)
        place.start_nvflare(SERVER)

    job = engine._job
    check(flare_study.figures(federation(Killing(engine, 6, kill), state=tmp_path)))
    assert engine._job.id != job.id


def median(engine, size, times):
    message, taken = np.random.default_rng(0).bytes(size), []
    for _ in range(times):
        began = time.perf_counter()
        engine.send(0, message, 60)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def test_an_exchange_takes_little_time(engine):
    """Of bytes that the silo refuses as no message; the goals are 0.03 s and 0.6 s alone."""
    median(engine, 10_000, 5)
    assert median(engine, 10_000, 20) < 0.3
    assert median(engine, 10_000_000, 3) < 6


def test_code_is_refused(place, engine, tmp_path):
    """A job that brings code, and one that names a class that is not allowed."""

    def ended(folder):
        id_ = engine._command("submit_job", str(folder))
        until = time.monotonic() + 60
        while not (status := engine._status(nf.network.flare._Job(id_, ""))).startswith("FIN"):
            assert time.monotonic() < until, status
            time.sleep(0.5)
        return f"{engine._command('get_job_meta', id_)}"

    write_job(tmp_path / "code", SITES, "key", IDLE)
    custom = tmp_path / "code" / "relay" / "custom"
    custom.mkdir()
    (custom / "theirs.py").write_text("print('code of a stranger')\n")
    assert "BYOC not permitted" in ended(tmp_path / "code")
