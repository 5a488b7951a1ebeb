"""The doctor names the cause of each fault, and finds nothing wrong where nothing is."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.files import FolderLock
from numpyro_fed.network import PrivateKey
from numpyro_fed.network.cli import main
from numpyro_fed.network.doctor import check_folder, check_policy, check_socket, versions
from numpyro_fed.network.engines import listen, short_folder
from numpyro_fed.network.flare import EXECUTOR, RELAY
from numpyro_fed.network.kit import check_clock, check_kit, kit_of

STUDY = """
import jax, numpyro, numpyro.distributions as dist, numpyro_fed as nf


def of_columns(x):
    return x.sum(-1)


def model(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)


def main(silos):
    nf.fit(jax.random.key(0), model, silos)
"""
DATA = """
import numpy as np, pandas as pd


def silo():
    rng = np.random.default_rng(0)
    x = pd.DataFrame(dict(age=rng.normal(size=30), city=[0.0, 1.0, None] * 10))
    return dict(x=x.fillna(0.0), y=rng.normal(size=30))


def raising():
    raise RuntimeError("the row of Smith")


def lacking():
    return dict(y=np.zeros(30))


def few():
    return dict(x=np.zeros((3, 1)), y=np.zeros(3))
"""


# --- a place where nothing is wrong ----------------------------------------------------------


def certificate(name, issuer=None, begin=-1, end=365):
    """A certificate and its private key, of an issuer or of itself, valid for days from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    of, signing = (subject, key) if issuer is None else (issuer[0].subject, issuer[1])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(of, subject, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now + timedelta(begin)).not_valid_after(now + timedelta(end))
    made = made.add_extension(x509.BasicConstraints(issuer is None, None), critical=True)
    return made.sign(signing, hashes.SHA256()), key


def keep(folder, name, signed, with_key=True):
    from cryptography.hazmat.primitives import serialization as s

    certificate, key = signed
    ending = "crt" if with_key else "pem"
    (folder / f"{name}.{ending}").write_bytes(certificate.public_bytes(s.Encoding.PEM))
    if with_key:
        form = s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()
        (folder / f"{name}.key").write_bytes(key.private_bytes(*form))
        (folder / f"{name}.key").chmod(0o600)


def greet(listening, folder):
    """Do TLS with whoever comes, as NVFLARE's server does, until the socket is closed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        try:
            with context.wrap_socket(connection, server_side=True) as tls:
                tls.recv(1_000)
                tls.sendall(f"HTTP/1.1 404\r\nDate: {formatdate(usegmt=True)}\r\n\r\n".encode())
        except OSError:
            connection.close()


def serve(server):
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A site with its kit, a server that listens, a silo at a socket, and all files."""
    monkeypatch.chdir(tmp_path)
    for name in ("study.py", "hospital.py"):
        (tmp_path / name).write_text(STUDY if name == "study.py" else DATA)
    startup, local = tmp_path / "kit" / "startup", tmp_path / "kit" / "local"
    startup.mkdir(parents=True)
    local.mkdir()
    ca = certificate("study")
    keep(startup, "rootCA", ca, with_key=False)
    keep(startup, "client", certificate("hospital-1", ca))
    server = tmp_path / "server"
    server.mkdir()
    keep(server, "rootCA", ca, with_key=False)
    keep(server, "server", certificate("localhost", ca))
    key = PrivateKey.generate()
    key.save(tmp_path / "key")
    with short_folder() as folder, socket.create_server(("localhost", 0)) as listening:
        path = f"{folder}/s"
        here = SimpleNamespace(folder=tmp_path, startup=startup, local=local, ca=ca, key=key)
        here.port, here.socket = listening.getsockname()[1], path
        here.say_where = lambda host, port: (startup / "fed_client.json").write_text(
            json.dumps({"servers": [{"service": {"target": f"{host}:{port}", "scheme": "http"}}]})
        )
        here.say_where("localhost", here.port)
        (local / "resources.json").write_text(json.dumps({"class_allow_list": [EXECUTOR, RELAY]}))
        (local / "numpyro_fed.json").write_text(json.dumps({"socket": path}))
        here.rules = f'requesters = ["{key.fingerprint}"]\naudit = "audit.jsonl"\n'
        here.rules += 'peers = ["a key"]\n'
        (tmp_path / "policy.toml").write_text(here.rules)
        (tmp_path / "state").mkdir(mode=0o700)
        policy = nf.Policy.from_toml("policy.toml")
        silo = nf.Silo(dict(y=np.zeros(9)), names={}, policy=policy, state="state")
        (tmp_path / "versions").write_text("".join(f"{n} {v}\n" for n, v in versions().items()))
        threading.Thread(target=greet, args=(listening, server), daemon=True).start()
        silos = listen(path, silo.answer)
        serve(silos)
        yield here
        silos.shutdown()
        silos.server_close()
        # A thread that waits for a connection does not see that the socket was closed.
        listening.shutdown(socket.SHUT_RDWR)


def doctor(capsys, *words, data="silo", **other):
    """The status of the command with all options, and its lines."""
    options = dict(study="study.py", policy="policy.toml", state="state", kit="kit", key="key")
    options |= dict(data=f"hospital.py:{data}", versions="versions") | other
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    status = main(["doctor", *arguments, *words])
    return status, capsys.readouterr().out


def test_a_clean_place_gives_nothing_wrong(place, capsys):
    status, said = doctor(capsys, socket=place.socket, folder="state")
    lines = [line for line in said.splitlines() if not line.startswith("ok ")]
    assert lines == [f"0 wrong, 0 warnings, {said.count(chr(10)) - 1} ok"]
    assert status == 0
    for words in (
        "localhost:",
        "'x.city': Float64, 30, 0 missing",
        "fits the data: 2 globals",
        "refused a message without sense",
        "within 120 s of the server's",
        "0 lines, each follows",
    ):
        assert words in said


# --- faults ----------------------------------------------------------------------------------


def expired(place, patch):
    keep(place.startup, "client", certificate("hospital-1", place.ca, begin=-9, end=-2))


def not_yet_valid(place, patch):
    keep(place.startup, "client", certificate("hospital-1", place.ca, begin=2))


def of_another_ca(place, patch):
    keep(place.startup, "client", certificate("hospital-1", certificate("study")))


def of_another_request(place, patch):
    keep(place.startup, "other", certificate("hospital-1", place.ca))
    (place.startup / "other.key").replace(place.startup / "client.key")


def readable_key(place, patch):
    (place.startup / "client.key").chmod(0o644)


def another_server(place, patch):
    keep(place.startup, "rootCA", certificate("study"), with_key=False)


def closed_port(place, patch):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    place.say_where("localhost", port)


def no_name(place, patch):
    place.say_where("fl.nowhere.invalid", 8002)


def another_socket(place, patch):
    (place.local / "numpyro_fed.json").write_text(json.dumps({"socket": "/other"}))


def open_folder(place, patch):
    (place.folder / "state").chmod(0o755)


def full_disk(place, patch):
    patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))


def unknown_key(place, patch):
    (place.folder / "policy.toml").write_text(f"{place.rules}min_row = 3\n")


def another_requester(place, patch):
    (place.folder / "key").unlink()
    PrivateKey.generate().save(place.folder / "key")


def unlike_versions(place, patch):
    file = place.folder / "versions"
    file.write_text(file.read_text().replace("numpyro_fed 0", "numpyro_fed 9"))


def unlike_jax(place, patch):
    file = place.folder / "versions"
    file.write_text(file.read_text().replace("\njax ", "\njax 9"))


def open_key(place, patch):
    (place.folder / "key").chmod(0o640)


def broken_audit(place, patch):
    (place.folder / "audit.jsonl").write_text('{"line": 1, "before": "x"}\n')


def cut_audit(place, patch):
    (place.folder / "audit.jsonl").write_text("")
    nf.Silo({}, names={}, state="state")._store.put({"audit": b'[7, ""]'})


def study_raises(place, patch):
    (place.folder / "study.py").write_text("import numpyro_fed\n1 / 0")


def nothing(place, patch):
    pass


@pytest.mark.parametrize(
    ("fault", "options", "state", "words"),
    [
        (expired, {}, "wrong", "CN=hospital-1 has expired on"),
        (not_yet_valid, {}, "wrong", "Set the clock"),
        (of_another_ca, {}, "wrong", "was not issued by the kit's rootCA.pem"),
        (of_another_request, {}, "wrong", "client.key does not belong to client.crt"),
        (readable_key, {}, "wrong", "others on this machine can read"),
        (another_server, {}, "wrong", "is not one of the kit's CA"),
        (closed_port, {}, "wrong", "nobody listens at localhost:"),
        (no_name, {}, "wrong", "the name fl.nowhere.invalid does not resolve"),
        (another_socket, {"socket": "/nowhere"}, "wrong", "looks for the silo at /other"),
        (open_folder, {}, "wrong", "Run 'chmod 700 state'"),
        (full_disk, {}, "wrong", "the disk of state is full: 5 MB are free"),
        (unknown_key, {}, "wrong", "unknown key 'min_row'"),
        (another_requester, {}, "wrong", "is not among its requesters"),
        (unlike_versions, {}, "wrong", "All parties install the same one"),
        (unlike_jax, {}, "warning", "last digits of results may differ"),
        (open_key, {}, "wrong", "others on this machine can open the key"),
        (broken_audit, {}, "wrong", "line 1 of audit.jsonl does not follow"),
        (cut_audit, {}, "wrong", "0 lines and the silo has written 7"),
        (study_raises, {}, "wrong", "study.py cannot be loaded: division by zero"),
        (nothing, {"data": "raising"}, "wrong", "raised RuntimeError in"),
        (nothing, {"data": "silos"}, "wrong", "no function silos()"),
        (nothing, {"data": "lacking"}, "wrong", "model: the data lack ['x']"),
        (nothing, {"data": "few"}, "wrong", "3 rows are fewer than min_rows"),
        (nothing, {"socket": "/tmp/nobody/is/here"}, "wrong", "no silo has been started"),
        (nothing, {"socket": "/tmp/" + "x" * 100}, "wrong", "105 bytes, and the system takes"),
    ],
)
def test_a_fault_is_named_by_its_cause(place, monkeypatch, capsys, fault, options, state, words):
    fault(place, monkeypatch)
    status, said = doctor(capsys, **options)
    found = [line for line in said.splitlines() if words in line]
    assert [line.split()[0] for line in found] == [state], said
    assert status == (state == "wrong")
    assert "Smith" not in said  # what a row says


def test_a_server_that_does_not_take_the_certificate(place, capsys):
    expired(place, None)
    _, said = doctor(capsys)
    assert "does not take this kit's certificate" in said


def test_a_service_without_tls_is_no_server(place, capsys):
    with socket.create_server(("localhost", 0)) as other:
        place.say_where("localhost", other.getsockname()[1])

        def answer():
            connection, _ = other.accept()
            connection.sendall(b"220 mail")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        status, said = doctor(capsys)
    assert status == 1
    assert "there is no TLS with it" in said


def test_a_socket_at_which_nobody_listens():
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{folder}/s")
        (found,) = check_socket(Path(folder) / "s")
    assert found.state == "wrong"
    assert "nobody listens" in found.words


def test_a_process_that_answers_everything_is_no_silo():
    with short_folder() as folder:
        path = Path(folder) / "s"
        echo = listen(path, lambda message: message)
        serve(echo)
        (found,) = check_socket(path)
        echo.shutdown()
        echo.server_close()
    assert found.state == "wrong"
    assert "is no silo" in found.words


def test_whoever_uses_a_folder_is_seen(tmp_path):
    tmp_path.chmod(0o700)
    lock = FolderLock(tmp_path)
    (held,) = check_folder("state", tmp_path)
    assert "in use by a process" in held.words
    del lock
    (free,) = check_folder("state", tmp_path)
    assert "in use by no process" in free.words
    (absent,) = check_folder("state", tmp_path / "later")
    assert absent.state == "ok"


def test_what_is_strange_in_a_policy_is_a_warning(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text("secure_sum = true\nmax_places = 30\n")
    found = list(check_policy(file, None, None))
    assert [check.state for check in found] == ["warning"] * 3
    for check, words in zip(found, ("nobody may ask", "max_places", "without peers"), strict=True):
        assert words in check.words


def test_a_clock_before_its_kit_is_warned_about(place, monkeypatch):
    kit = kit_of(place.folder / "kit")
    assert check_clock(kit, None).state == "ok"
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert "before the kit was made" in check_clock(kit, None).words
    assert "1,000 s behind the server's" in check_clock(kit, 1e9 + 1_000).words


def test_a_folder_that_is_no_kit(tmp_path):
    (found,) = check_kit(tmp_path)
    assert "is no startup kit" in found.words


def test_the_command_says_its_options_and_prints_versions(capsys):
    done = subprocess.run(
        [sys.executable, "-m", "numpyro_fed.network.cli", "doctor", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert all(f"--{name}" in done.stdout for name in ("kit", "socket", "write-versions"))
    assert main(["doctor", "--write-versions"]) == 0
    assert capsys.readouterr().out.count("\n") == 7
