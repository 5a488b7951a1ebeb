"""The engine of NVFLARE without NVFLARE: what it says of its kit, and which silos it asks."""

import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor import certificate, greet, keep

from numpyro_fed.network import Flare, flare

SITES = ("hospital-1", "hospital-2", "hospital-3")


@pytest.fixture
def kit(tmp_path):
    """A user's kit, and a server that does TLS with whoever comes."""
    startup, server = tmp_path / "kit" / "startup", tmp_path / "server"
    startup.mkdir(parents=True)
    server.mkdir()
    ca = certificate("study")
    keep(startup, "rootCA", ca, with_key=False)
    keep(startup, "client", certificate("analyst@university.org", ca))
    keep(server, "rootCA", ca, with_key=False)
    keep(server, "server", certificate("localhost", ca))
    with socket.create_server(("localhost", 0)) as listening:
        where = {"host": "localhost", "port": listening.getsockname()[1], "scheme": "http"}
        admin = {"admin": {"username": "analyst@university.org", **where}}
        (startup / "fed_admin.json").write_text(json.dumps(admin))
        threading.Thread(target=greet, args=(listening, server), daemon=True).start()
        yield startup.parent
        listening.shutdown(socket.SHUT_RDWR)


def no_session(*args):
    raise RuntimeError("cannot connect to server for 10.0 seconds")


def of_another_ca(startup):
    ca = certificate("study")
    keep(startup, "rootCA", ca, with_key=False)
    keep(startup, "client", certificate("analyst@university.org", ca))


def expired(startup):
    keep(startup, "client", certificate("analyst@university.org", begin=-9, end=-2))


def another_host(startup):
    file = startup / "fed_admin.json"
    file.write_text(file.read_text().replace("localhost", "fl.nowhere.invalid"))


def nothing(startup):
    pass


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (of_another_ca, "the certificate at localhost:.* is not one of the kit's CA"),
        (expired, "(?s)has expired on.*client.crt was not issued by the kit's rootCA.pem"),
        (another_host, "the name fl.nowhere.invalid does not resolve"),
        (nothing, "for 10.0 seconds$"),
    ],
)
def test_the_first_error_says_what_is_wrong_with_the_kit(kit, monkeypatch, fault, words):
    api = SimpleNamespace(new_secure_session=no_session)
    monkeypatch.setattr("numpyro_fed.network.flare.optional", lambda *names: api)
    fault(kit / "startup")
    with pytest.raises(ConnectionError, match="cannot connect to server") as found:
        Flare(kit, ["hospital-1"])
    found.match(words)


class Session:
    """A session with a server whose sites are all there, and which starts each job at once.

    ``asked`` are the messages to the hub.
    """

    def __init__(self, sites):
        self.sites, self.asked, self.jobs = list(sites), [], []
        self.api = SimpleNamespace(get_cell=lambda: self)

    def get_system_info(self):
        now = time.time()
        found = [SimpleNamespace(name=name, last_connect_time=now) for name in self.sites]
        return SimpleNamespace(client_info=found)

    def submit_job(self, folder):
        self.jobs.append(json.loads((Path(folder) / "meta.json").read_text()))
        return f"job-{len(self.jobs)}"

    def get_job_meta(self, job):
        return {"status": "RUNNING"}

    def abort_job(self, job):
        pass

    def close(self):
        pass


@pytest.fixture
def session(monkeypatch):
    """A session in the place of NVFLARE, whose hub replies with the site's name and the message."""
    found = Session(SITES)

    def ask(self, job, asked, timeout=0.0):
        found.asked.append(asked)
        site = self.sites[asked["silo"]] if "silo" in asked else ""
        return found.reply(site, asked) if site else {}

    found.reply = lambda site, asked: {"reply": site.encode() + asked["message"]}
    api = SimpleNamespace(new_secure_session=lambda *names: found)
    monkeypatch.setattr(flare, "optional", lambda *names: api)
    monkeypatch.setattr(Flare, "_ask", ask)
    monkeypatch.setattr(flare, "LOOK", 0.01)
    return found


def test_an_engine_gives_signs_of_life_until_it_is_closed(kit, session, monkeypatch):
    monkeypatch.setattr(flare, "SIGN", 0.01)
    with Flare(kit, SITES) as engine:
        time.sleep(0.2)
        assert len(session.asked) > 5
        assert engine._signs.is_alive()
    assert not engine._signs.is_alive()
    assert session.asked.count({"end": True}) == 1
    number = len(session.asked)
    time.sleep(0.1)
    assert len(session.asked) == number


def test_an_engine_that_nobody_has_any_more_gives_no_signs_of_life(kit, session, monkeypatch):
    monkeypatch.setattr(flare, "SIGN", 0.01)
    engine = Flare(kit, SITES)
    signs = engine._signs
    del engine
    signs.join(5)
    assert not signs.is_alive()


# --- sites that are away ---------------------------------------------------------------------


def relays(job):
    return job["deploy_map"]["relay"]


def test_a_job_waits_for_all_sites(kit, session):
    session.sites = list(SITES[:2])
    with pytest.raises(TimeoutError, match="not connected to NVFLARE: hospital-3"):
        Flare(kit, SITES, patience=0.1)
    session.sites = list(SITES)
    with Flare(kit, SITES):
        assert session.jobs[0]["mandatory_clients"] == list(SITES)
        assert session.jobs[0]["min_clients"] == 3


def test_a_job_begins_without_a_site_that_is_away(kit, session):
    session.sites = list(SITES[:2])
    began = time.monotonic()
    with Flare(kit, SITES, wait_for_sites=0.2) as engine:
        assert time.monotonic() - began > 0.15
        assert relays(session.jobs[0]) == list(SITES[:2])
        assert session.jobs[0]["min_clients"] == 2
        assert session.jobs[0]["mandatory_clients"] == []
        assert engine.num_silos == 3
        assert engine.send(1, b"m", 9) == b"hospital-2m"
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="hospital-3 is not connected"):
            engine.send(2, b"m", 9)
        # A new job does not wait for it again.
        engine._job = None
        assert engine.send(1, b"m", 9) == b"hospital-2m"
        assert time.monotonic() - began < 0.15
        # It is taken in when it is back.
        session.sites = list(SITES)
        assert engine.send(2, b"m", 9) == b"hospital-3m"
        assert [len(relays(job)) for job in session.jobs] == [2, 2, 3]


def test_a_job_does_not_begin_with_half_of_the_sites(kit, session):
    session.sites = list(SITES[:1])
    with pytest.raises(TimeoutError, match="hospital-2, hospital-3"):
        Flare(kit, SITES, wait_for_sites=0.0, patience=0.2)
    assert not session.jobs


def test_others_have_half_of_the_time_of_a_message(kit, session):
    with Flare(kit, SITES, wait_for_sites=60.0) as engine:
        session.sites, engine._job = list(SITES[:2]), None
        assert engine.send(0, b"m", 0.4) == b"hospital-1m"


def lost(session):
    """Let the hub lose hospital-3 for longer than a site is patient."""
    replies = session.reply

    def reply(site, asked):
        away = site == "hospital-3" and len(session.jobs) == 1
        return {"lost": "gone", "silent": 100.0} if away else replies(site, asked)

    session.reply = reply


@pytest.mark.parametrize("wait_for_sites", [None, 60.0])
def test_a_site_that_is_lost_ends_the_job_of_those_who_need_all(kit, session, wait_for_sites):
    lost(session)
    with Flare(kit, SITES, wait_for_sites=wait_for_sites) as engine:
        session.sites, job = list(SITES[:2]), engine._job
        with pytest.raises(ConnectionError, match="hospital-3: gone"):
            engine.send(2, b"m", 9)
        assert engine._job is (None if wait_for_sites is None else job)
        if wait_for_sites is not None:
            assert engine.send(1, b"m", 9) == b"hospital-2m"
            # Connected again, it is reached by a new job.
            session.sites = list(SITES)
            with pytest.raises(ConnectionError, match="hospital-3: gone"):
                engine.send(2, b"m", 9)
            assert engine.send(2, b"m", 9) == b"hospital-3m"
            assert len(session.jobs) == 2
