"""The engine of NVFLARE without NVFLARE: what it says of its kit, and which silos it asks."""

import json
import socket
import threading
from types import SimpleNamespace

import pytest
from test_doctor import certificate, greet, keep

from numpyro_fed.network import Flare


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
