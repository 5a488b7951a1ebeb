"""Engines that carry bytes: in one process, over Unix sockets, and as files that people carry.

Only the user who runs the silo can open its socket or its folder.
"""

from __future__ import annotations

import os
import shutil
import socketserver
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from numpyro_fed.basics.errors import DataError
from numpyro_fed.basics.files import private_folder, write_atomically
from numpyro_fed.rounds.envelopes import MESSAGE
from numpyro_fed.rounds.messages import read
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


class Folder:
    """An engine that writes each question to a file, and waits for a file with the reply.

    For sites that let only files through, after a person has looked. Each silo has a folder below
    ``path``. A question stands in it as ``003-mode-1f2e3d.request``; at the site ``numpyro-fed
    show`` says what is in it, ``numpyro-fed answer`` writes ``003-mode-1f2e3d.reply``, and that
    file comes back to the folder. Then both are renamed, and the script goes on. It may be stopped
    and started with the same ``Federation(state=...)``: replies that came in between are found.

    Parameters
    ----------
    path : str or Path
    sites : sequence of str, optional
        The names of the silos' folders, in the order of the silos; missing ones are made. By
        default all folders below ``path``, in the order of their names.
    every : float
        Seconds between two looks for a reply.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     Folder(path, ["Basel", "Bern"]).num_silos
    2
    """

    def __init__(self, path: str | Path, sites: Sequence[str] = (), *, every: float = 1.0):
        path = Path(path)
        for site in sites:
            private_folder(path / site)
        named = [path / site for site in sites]
        self._every, self._folders = every, named or sorted(f for f in path.glob("*") if f.is_dir())
        self.num_silos = len(self._folders)
        if not self._folders:
            raise DataError(
                f"there is no folder of a silo in {path}: name the sites, Folder(path, ['Basel', "
                "'Bern']), or make one folder for each."
            )

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return the reply that somebody puts beside the file with a message."""
        folder, until = self._folders[silo], time.monotonic() + timeout
        arrays = read(message).arrays
        # A message that is signed again is the same question.
        question = arrays[MESSAGE].tobytes() if MESSAGE in arrays else message
        name = "".join(c if c.isalnum() else "-" for c in read(question).head["exchange"])
        ending = f"{name}-{sha256(question).hexdigest()[:8]}"
        waiting = sorted(folder.glob(f"[0-9]*-{ending}.request"))
        if not waiting:
            number = 1 + sum(1 for _ in folder.glob("*.request*"))
            waiting = [folder / f"{number:03}-{ending}.request"]
            write_atomically(waiting[0], lambda stream: stream.write(message))
        request, reply = waiting[0], waiting[0].with_suffix(".reply")
        while (content := _whole(reply)) is None:
            if time.monotonic() + self._every > until:
                raise TimeoutError(f"no reply to {request} yet")
            time.sleep(self._every)
        for file in (request, reply):
            file.rename(file.with_name(f"{file.name}.done"))
        return content


def _whole(file: Path) -> bytes | None:
    """Return what is in a file; None while it is not there, or somebody still copies it."""
    try:
        content = file.read_bytes()
        read(content)
    except (FileNotFoundError, DataError):
        return None
    return content


def listen(
    path: str | Path, answer: Callable[[bytes], bytes], group: str | None = None
) -> socketserver.BaseServer:
    """Return a server at a socket that only this user can open; ``serve_forever()`` runs it.

    Where a ``group`` is named, its users can open the socket, too: a relay that is another user.
    """
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
    if group is not None:
        shutil.chown(path, group=group)
        path.chmod(0o660)
    server.daemon_threads = True
    return server


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder whose name is short enough for the sockets in it."""
    return tempfile.TemporaryDirectory(prefix="nf-", dir="/tmp" if Path("/tmp").is_dir() else None)
