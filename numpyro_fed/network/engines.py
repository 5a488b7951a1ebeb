"""Engines that carry bytes: in one process, over Unix sockets, and as files that people carry.

Only the user who runs the silo can open its socket or its folder.
"""

from __future__ import annotations

import glob
import os
import shutil
import socketserver
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from numpyro_fed.basics.errors import DataError, FederatedWarning
from numpyro_fed.basics.files import private_folder, write_atomically
from numpyro_fed.rounds.envelopes import signed_message
from numpyro_fed.rounds.messages import is_refusal, read
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

    in_process = True  # nobody is on the way

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
    ``path``. A question stands in it as ``basel-003-mode-1f2e3d4c.request``; at the site
    ``numpyro-fed show`` says what is in it, ``numpyro-fed answer`` writes
    ``basel-003-mode-1f2e3d4c.reply``, and that file comes back to the folder. The digits are those
    of who asks what, so that several studies may share a folder. The script goes on, and may be
    stopped and started with the same ``Federation(state=...)``: replies that came in between are
    found. Files of questions that are answered end in ``.done``.

    Parameters
    ----------
    path : str or Path
    sites : sequence of str, optional
        The names of the silos' folders, in the order of the silos; missing ones are made. By
        default all folders below ``path``, in the order of their names, but for hidden ones.
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
        found = (f for f in path.glob("*") if f.is_dir() and not f.name.startswith("."))
        self._every, self._folders = every, [path / site for site in sites] or sorted(found)
        self.num_silos = len(self._folders)
        self._taken, self._warned = dict[Path, threading.Thread](), set[Path]()
        if not self._folders:
            raise DataError(
                f"there is no folder of a silo in {path}: name the sites, Folder(path, ['Basel', "
                "'Bern']), or make one folder for each."
            )

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return the reply that somebody puts beside the file with a message."""
        folder, until = self._folders[silo], time.monotonic() + timeout
        request = self._asked(folder, message)
        if request is None:
            request = self._new(folder, message)
        reply, size = request.with_suffix(".reply"), -1
        while (content := _whole(reply)) is None:
            if time.monotonic() + self._every > until:
                raise TimeoutError(f"no reply to {request} yet")
            self._warn_of_others(folder)
            now = reply.stat().st_size if reply.exists() else -1
            if now == size != -1:  # nobody copies it any more
                self._warn(reply, "is damaged, or was cut on its way: copy it again")
            size = now
            time.sleep(self._every)
        self._taken[request] = threading.current_thread()
        _done(request)
        if is_refusal(content):  # one in plain words is no answer to be found again
            _done(reply)
        return content

    def _asked(self, folder: Path, message: bytes) -> Path | None:
        """Return the file with a question that was asked before, unless its reply was of no use."""
        for request in _requests(folder, f"-{_ending(message)}"):
            reply = request.with_suffix(".reply")
            if request.exists() or (reply.exists() and not _is_done(request)):
                return request
            # Who has it and asks again has a reason. A thread that goes on after a script was
            # stopped may have taken what this one waits for.
            is_mine = self._taken.get(request) is threading.current_thread()
            if reply.exists() and not is_mine:
                words = "was read before. If it is a refusal, remove it and begin again"
                self._warn(reply, f"{words}: the site is asked once more")
                return request
        return None

    def _new(self, folder: Path, message: bytes) -> Path:
        """Write a question to a new file, and put those away that are answered."""
        before = _requests(folder)
        for one in before:
            if _is_done(one) and one.with_suffix(".reply").exists():
                _done(one.with_suffix(".reply"))
        numbers = (one.name.removeprefix(f"{folder.name}-").partition("-")[0] for one in before)
        number = 1 + max((int(n) for n in numbers if n.isdecimal()), default=0)
        request = folder / f"{folder.name}-{number:03}-{_ending(message)}.request"
        write_atomically(request, lambda stream: stream.write(message))
        return request

    def _warn_of_others(self, folder: Path) -> None:
        """Warn of replies in the folder of another site."""
        for reply in folder.glob("*.reply"):
            if not reply.name.startswith(f"{folder.name}-"):
                self._warn(reply, "is not of this site: put it into the folder of its own")

    def _warn(self, file: Path, words: str) -> None:
        """Say once what is wrong with a file."""
        if file not in self._warned:
            self._warned.add(file)
            warnings.warn(f"{file} {words}.", category=FederatedWarning, stacklevel=3)


def _ending(message: bytes) -> str:
    """Return how the name of a question's file ends: what is asked, and digits of who asks it."""
    found = signed_message(message)
    # A message that is signed again is the same question.
    question, asked = (message, message) if found is None else (found[1], found[0].asked(found[1]))
    name = "".join(c if c.isalnum() else "-" for c in read(question).head["exchange"])
    return f"{name}-{sha256(asked).hexdigest()[:8]}"


def _requests(folder: Path, ending: str = "") -> list[Path]:
    """Return the files of questions, also those whose reply alone is there, or that are done."""
    files = folder.glob(f"{glob.escape(folder.name)}-[0-9]*{ending}.re*")
    names = {file.name.removesuffix(".done").rpartition(".")[0] for file in files}
    return [folder / f"{name}.request" for name in sorted(names)]


def _is_done(file: Path) -> bool:
    return file.with_name(f"{file.name}.done").exists()


def _done(file: Path) -> None:
    """Mark a file as used."""
    done = file.with_name(f"{file.name}.done")
    try:
        file.replace(done)
    except FileNotFoundError:  # somebody has moved the question to where it is answered
        done.touch()


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
