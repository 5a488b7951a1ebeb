"""Checks of a startup kit of NVFLARE: its certificates, the way to its server, and the clock."""

from __future__ import annotations

import email.utils
import json
import os
import re
import socket
import ssl
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpyro_fed.basics.errors import ModelError, optional
from numpyro_fed.network.check import OK, WARNING, WRONG, Check, Checks

# The file of a kit that names the server, by whose kit it is.
FILES = {"site": "fed_client.json", "server": "fed_server.json", "user": "fed_admin.json"}
SECONDS = 5.0  # to wait for a connection, and for the server's words
SOON = 30  # days before its end in which a certificate is warned about
CLOCK = 120.0  # seconds by which two clocks may differ; messages are numbered by theirs
RENEW = "Make a new request, have it signed, and package it (docs: Between hospitals, Certificates)"
GREETING = b"GET / HTTP/1.1\r\nHost: doctor\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Kit:
    """A startup kit: whose it is, and where its server is."""

    folder: Path
    role: str  # "site", "server" or "user"
    host: str
    port: int
    scheme: str

    def file(self, name: str) -> Path:
        """Return a file of its folder startup."""
        return self.folder / "startup" / name

    @property
    def own(self) -> tuple[Path, Path]:
        """Return the files with its certificate and its private key."""
        name = "server" if self.role == "server" else "client"
        return self.file(f"{name}.crt"), self.file(f"{name}.key")


def check_kit(folder: Path, silo: Path | None = None) -> Checks:
    """Yield what is wrong with a kit, with the way to its server, and with the clock.

    A site's relay must know the socket of its ``silo``.
    """
    try:
        kit = kit_of(folder)
    except ModelError as error:
        yield Check("kit", WRONG, str(error))
        return
    yield Check("kit", OK, f"of a {kit.role}; its server is {kit.host}:{kit.port}")
    yield from check_certificates(kit)
    yield from check_allowed(kit, silo)
    date = yield from check_server(kit)
    yield check_clock(kit, date)


def kit_of(folder: Path) -> Kit:
    """Return the kit in a folder, of a site, the server or a user."""
    for role, name in FILES.items():
        file = folder / "startup" / name
        if not file.exists():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if role == "user":
                place = found["admin"]
                host, port = place["host"], place["port"]
            else:
                place = found["servers"][0]["service"]
                host, _, port = place["target"].rpartition(":")
            return Kit(folder, role, host, int(port), place.get("scheme", ""))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(f"{file} does not say where the server is. {RENEW}.") from error
    raise ModelError(f"{folder} is no startup kit: startup/ has none of {list(FILES.values())}.")


def check_certificates(kit: Kit) -> Checks:
    """Yield what is wrong with the certificates of a kit and with its private key."""
    x509: Any = optional("cryptography.x509", "privacy")
    serialization: Any = optional("cryptography.hazmat.primitives.serialization", "privacy")
    file, key_file = kit.own
    loaded: list[Any] = []
    for one in (kit.file("rootCA.pem"), file, key_file):
        try:
            content = one.read_bytes()
            loaded.append(
                serialization.load_pem_private_key(content, None)
                if one is key_file
                else x509.load_pem_x509_certificate(content)
            )
        except OSError as error:
            yield Check("certificates", WRONG, f"{one} cannot be read ({error.strerror}). {RENEW}.")
            return
        except (ValueError, TypeError):
            yield Check("certificates", WRONG, f"{one} is damaged. Copy it again, or: {RENEW}.")
            return
    root, own, private = loaded
    for one, where in ((root, "of the CA"), (own, "of this kit")):
        yield dates_of(f"certificate {where}", one)
    issuer = own.issuer.rfc4514_string()
    try:
        own.verify_directly_issued_by(root)
        yield Check("CA", OK, f"the certificate was issued by the kit's rootCA.pem ({issuer})")
    # The library has an error of its own for another name, another key, another kind of key.
    except Exception:
        words = f"{file.name} was not issued by the kit's rootCA.pem: it says {issuer}, and may be "
        yield Check("CA", WRONG, f"{words}of another study or an earlier CA. {RENEW}.")
    if private.public_key() != own.public_key():
        words = f"{key_file.name} does not belong to {file.name}: it is the key of another request."
        yield Check("private key", WRONG, f"{words} Package again with the --request-dir of yours.")
    elif os.name == "posix" and key_file.stat().st_mode & 0o077:
        words = f"others on this machine can read {key_file}. Run 'chmod 600 {key_file}'"
        yield Check("private key", WRONG, f"{words}; if they may have read it: {RENEW}.")
    else:
        yield Check("private key", OK, "belongs to the certificate, and is for its owner alone")


def dates_of(name: str, certificate: Any) -> Check:
    """Return whether a certificate is valid now, and for how long."""
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    who = certificate.subject.rfc4514_string()
    if end < now:
        return Check(name, WRONG, f"{who} has expired on {end:%Y-%m-%d}. {RENEW}.")
    if begin > now:
        words = f"{who} is valid from {begin:%Y-%m-%d %H:%M} UTC on, and this clock says "
        return Check(name, WRONG, f"{words}{now:%Y-%m-%d %H:%M}. Set the clock.")
    days = (end - now).days
    if days < SOON:
        return Check(name, WARNING, f"{who} ends in {days} days ({end:%Y-%m-%d}). {RENEW}.")
    return Check(name, OK, f"{who}, until {end:%Y-%m-%d}")


def check_allowed(kit: Kit, silo: Path | None) -> Checks:
    """Yield whether a kit runs the relay of this package alone, which knows the silo's socket."""
    if kit.role == "user":
        return
    where = f" --socket {silo or 'PATH'}" if kit.role == "site" else ""
    remedy = f"Run 'numpyro-fed allow {kit.folder}{where}'."
    allowed = local(kit, "resources.json").get("class_allow_list", [])
    known = local(kit, "numpyro_fed.json").get("socket")
    if not any(name.startswith("numpyro_fed_relay.") for name in allowed):
        words = "NVFLARE is not told to run the relay of numpyro_fed and nothing else"
        yield Check("jobs", WRONG, f"{words}. {remedy}")
    elif silo is not None and kit.role == "site" and known != str(silo.resolve()):
        yield Check("jobs", WRONG, f"the relay looks for the silo at {known}. {remedy}")
    else:
        yield Check("jobs", OK, "NVFLARE runs the relay of numpyro_fed and nothing else")


def local(kit: Kit, name: str) -> dict[str, Any]:
    """Return what stands in a file of the kit's folder local; nothing if there is none."""
    try:
        return dict(json.loads((kit.folder / "local" / name).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def check_server(kit: Kit) -> Generator[Check, None, float | None]:
    """Yield whether the server is reached, and is the one of the kit; return its clock's time."""
    name, where, date = "server", f"{kit.host}:{kit.port}", None
    try:
        socket.getaddrinfo(kit.host, kit.port, type=socket.SOCK_STREAM)
    except OSError as error:
        words = f"the name {kit.host} does not resolve ({error.strerror}). Ask for its entry in the"
        yield Check(name, WRONG, f"{words} DNS, or put it into /etc/hosts.")
        return None
    proxies = [f"{n}_proxy={u}" for n, u in urllib.request.getproxies().items() if n != "no"]
    if proxies and not urllib.request.proxy_bypass(kit.host):
        # Read in NVFLARE 2.9: aiohttp is not told to trust the environment, and gRPC does.
        caught = f"NVFLARE by {kit.scheme} may go there. Set no_proxy={kit.host}"
        words = "NVFLARE calls the server past it" if kit.scheme == "http" else caught
        yield Check("proxy", OK if kit.scheme == "http" else WARNING, f"{proxies[0]}: {words}.")
    try:
        connection = socket.create_connection((kit.host, kit.port), SECONDS)
    except ConnectionRefusedError:
        at_server = kit.role == "server"
        words = f"nobody listens at {where}: " + (
            "start the server by its start.sh."
            if at_server
            else "the server is not started, or a firewall refuses. Ask the server's IT."
        )
        yield Check(name, WARNING if at_server else WRONG, words)
        return None
    except OSError as error:
        why = (
            f"no answer within {SECONDS:g} s" if isinstance(error, TimeoutError) else error.strerror
        )
        words = f"{where} is not reached ({why}): a firewall may drop it. Have outgoing TCP to"
        yield Check(name, WRONG, f"{words} {where} let through, past any proxy.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # as NVFLARE: the CA of a study signs for its server alone
    try:
        context.load_verify_locations(kit.file("rootCA.pem"))
        context.load_cert_chain(*kit.own)
    except (OSError, ValueError):  # of which the check of certificates has said why
        connection.close()
        yield Check(name, WARNING, f"{where} is reached; TLS needs the kit's certificates in order")
        return None
    try:
        with connection, context.wrap_socket(connection, server_hostname=kit.host) as tls:
            said, why = greeted(tls)
            date = http_date(said)
            if why and (kit.scheme == "http" or "ALERT" in why):
                yield refused(where, why)
            else:
                words = f"{where} is reached, and its certificate is of the kit's CA"
                yield Check(name, OK, f"{words} ({tls.version()})")
    except ssl.SSLCertVerificationError as error:
        words = f"the certificate at {where} is not one of the kit's CA ({error.verify_message})"
        yield Check(name, WRONG, f"{words}: another study's server, or something that breaks TLS.")
    except OSError as error:
        why = reason_of(error)
        words = f"{where} is reached, and there is no TLS with it ({why}): another service listens"
        if "ALERT" in why:  # by which the other side says what it thinks of us
            yield refused(where, why)
        else:
            yield Check(name, WRONG, f"{words}, or a firewall cuts TLS. Ask the server's IT.")
    return date


def greeted(tls: ssl.SSLSocket) -> tuple[bytes, str]:
    """Return what a server says to a greeting, and why it says nothing; it may take its time.

    With TLS 1.3 a server looks at our certificate after the handshake, and ends the connection.
    """
    try:
        tls.sendall(GREETING)
        said = tls.recv(4_096)
        return said, "" if said else "it ends the connection"
    except TimeoutError:
        return b"", ""
    except OSError as error:
        return b"", reason_of(error)


def reason_of(error: OSError) -> str:
    """Return the few words that an error of a connection has for its reason."""
    return getattr(error, "reason", None) or error.strerror or type(error).__name__


def refused(where: str, why: str) -> Check:
    """Return the line about a server that does not believe the kit's certificate."""
    words = f"{where} is reached, and does not take this kit's certificate ({why}): it is of"
    return Check(
        "server", WRONG, f"{words} another CA, or not valid by the server's clock. {RENEW}."
    )


def http_date(said: bytes) -> float | None:
    """Return the seconds since 1970 of the date in a reply of HTTP; None without one."""
    found = re.search(rb"(?im)^date: *([^\r\n]+)", said)
    try:
        return found and email.utils.parsedate_to_datetime(found[1].decode()).timestamp()
    except ValueError:
        return None


def check_clock(kit: Kit, date: float | None) -> Check:
    """Return whether the clock agrees with the server's, or is at least not before the kit."""
    now, name = time.time(), "clock"
    if date is not None:
        off = now - date
        if abs(off) <= CLOCK:
            return Check(name, OK, f"within {CLOCK:g} s of the server's")
        words = (
            f"{abs(off):,.0f} s {'ahead of' if off > 0 else 'behind'} the server's. Set it by NTP"
        )
        return Check(name, WARNING, f"{words}: certificates and numbers of messages depend on it.")
    made = max(f.stat().st_mtime for f in kit.file("").iterdir())
    if now < made - CLOCK:
        when = datetime.fromtimestamp(made, UTC)
        return Check(name, WARNING, f"before the kit was made ({when:%Y-%m-%d}). Set it by NTP.")
    return Check(name, OK, "after the kit was made; the server's was not seen")
