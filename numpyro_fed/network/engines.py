"""Engines that carry bytes on one machine: in one process, and over Unix sockets.

Only the user who runs the silo can open its socket.
"""

from __future__ import annotations

import os
import socketserver
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from numpyro_fed_relay import LENGTH, receive, relay

# Seconds that a silo waits for the rest of a message that has begun.
STALLED = 60.0
# Bytes of a message at most: a longer one is dropped unread.
MAX_BYTES = 512 << 20
# Bytes of the name of a Unix socket at most, on Linux; macOS has four fewer.
MAX_NAME = 103


class InMemory:
    """An engine whose silos are functions of this process, such as :meth:`numpyro_fed.Silo.answer`.

    Parameters
    ----------
    answers : sequence of (bytes -> bytes)
    """

    def __init__(self, answers: Sequence[Callable[[bytes], bytes]]):
        self._answers = list(answers)
        self.num_silos = len(self._answers)

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        return self._answers[silo](message)


class Sockets:
    """An engine that reaches each silo by a Unix socket (``numpyro-fed silo --socket``).

    Parameters
    ----------
    paths : sequence of str or Path
        The socket of each silo.
    """

    def __init__(self, paths: Sequence[str | Path]):
        self._paths = [Path(path) for path in paths]
        self.num_silos = len(self._paths)

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        return relay(self._paths[silo], message, timeout)


def listen(path: str | Path, answer: Callable[[bytes], bytes]) -> socketserver.BaseServer:
    """Return a server at a socket that only this user can open; ``serve_forever()`` runs it."""
    path = Path(path)
    if len(os.fsencode(path)) > MAX_NAME:
        raise ValueError(
            f"the socket's name {path} has more than {MAX_NAME} bytes, which the system cannot "
            "take. Give a shorter one as --socket."
        )
    path.unlink(missing_ok=True)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(STALLED)
            try:
                length = int.from_bytes(receive(self.request, LENGTH), "little")
                if length > MAX_BYTES:
                    return
                reply = answer(receive(self.request, length))
                self.request.settimeout(None)
                self.request.sendall(len(reply).to_bytes(LENGTH, "little") + reply)
            except OSError:  # whoever asked has gone, and asks again
                return

    before = os.umask(0o177)
    try:
        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    finally:
        os.umask(before)
    server.daemon_threads = True
    return server


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder whose name is short enough for the sockets in it."""
    return tempfile.TemporaryDirectory(prefix="nf-", dir="/tmp" if Path("/tmp").is_dir() else None)
