"""Files that are whole or absent, and that only their owner can read; records as JSON texts.

What is kept (replies, states, keys, logs, results) tells of the data. Files are made with the mode
600 and folders with 700, whatever the process's umask is.
"""

from __future__ import annotations

import copy
import glob
import json
import os
import secrets
import sqlite3
import stat
import struct
import sys
import time
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from numpyro_fed.basics.errors import DataError, FederatedWarning, SavedStateError

if sys.platform != "win32":
    import fcntl

Record = TypeVar("Record")
DESCRIPTION = "description.json"  # the member of an npz that describes its arrays
KEPT = "kept.sqlite"  # the file of a store
# The names in a folder that versions before that file have made.
BEFORE = "ledger", "methods", "keys", "session", "replies"
LOCK = ".lock"  # the file in a folder by which one process has it for itself
# The modes of what is made, and the bits by which others, and all users, may do something.
OWNER_ALONE, OWNER_ALONE_IN_FOLDER, OTHERS, ALL = 0o600, 0o700, 0o077, 0o007
# Seconds after which a temporary file counts as left behind by a process that was killed. A save
# takes seconds; with less than its time a slow save of another process would lose its file.
OLD = 3_600.0
# The errors that zipfile and NumPy raise for files that are cut off, changed, or something else.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


def private_folder(path: str | Path) -> Path:
    """Return a folder that only its owner can open; it is made with its parents if it is missing.

    A folder that is there already and that others can open is refused, and left as it is, since it
    may have been meant for more than what this package keeps.
    """
    folder = Path(path)
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        with suppress(FileExistsError):
            one.mkdir(mode=OWNER_ALONE_IN_FOLDER)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if os.name == "posix" and mode & OTHERS:
        raise SavedStateError(
            f"others on this machine can open the folder {folder} (its mode is {mode:o}), and what "
            f"is kept there tells of the data. Run 'chmod 700 {folder}' if they are not meant to, "
            "or name a folder that is not there yet."
        )
    return folder


class FolderLock:
    """The use of a folder by one object of one process, and by no other; it is made if missing.

    The operating system's lock ends with the process, however that ends. Where another object of
    the same process begins to use the folder, as in a notebook's cell that is run again, it takes
    the folder over. If another process uses it, that is a SavedStateError.
    """

    def __init__(self, folder: str | Path):
        self._folder = os.path.realpath(private_folder(folder))
        known = _LOCKS.get(self._folder)
        self._lock = _LOCKS[self._folder] = known or _ProcessLock(self._folder)
        self._number = self._lock.count = self._lock.count + 1

    def check(self) -> None:
        """Raise an error if the folder has been taken over, or this process is a copy (a fork)."""
        if self._lock.count != self._number or self._lock.process != os.getpid():
            raise SavedStateError(
                f"the folder {self._folder} is used by another object or a copy of this process "
                "since, and two that count and keep would each know half. Go on with that one."
            )


class _ProcessLock:
    """The operating system's lock of a folder, for all of this process."""

    def __init__(self, folder: str):
        self.count, self.process = 0, os.getpid()
        file = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, OWNER_ALONE)
        weakref.finalize(self, os.close, file)
        try:
            if sys.platform != "win32":  # which has no such lock
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SavedStateError(
                f"the folder {folder} cannot be locked ({error.strerror}): another process uses "
                "it, a silo or a script that still runs. End that one, or give another folder."
            ) from error
        except OSError as error:
            raise SavedStateError(
                f"the folder {folder} cannot be locked ({error.strerror}): its file system has no "
                "locks, so that two processes could use it at once. Give a folder on a local disk."
            ) from error


# By folder; a lock is let go where no object of this process uses it.
_LOCKS: weakref.WeakValueDictionary[str, _ProcessLock] = weakref.WeakValueDictionary()


class Store:
    """Named bytes that outlive the process, in one file of SQLite; each is there whole, or not.

    A name belongs to a room of the store, so that what has nothing to do with each other may have
    the same names. What was put is on the disk once :meth:`put` returns, all of it or nothing, and
    what was dropped is overwritten. The folder is made if it is missing (:func:`private_folder`);
    without one all ends with the process.

    Examples
    --------
    >>> replies = Store(None).room("replies")
    >>> replies.put({"a": b"1", "b": b"2", "c": b"3"})
    >>> replies.trim(2), replies.names(), replies.get("b")
    (['a'], ['b', 'c'], b'2')
    """

    def __init__(self, folder: str | Path | None):
        self._room, file = "", ":memory:"
        if folder is not None:
            path = private_folder(folder) / KEPT
            if not path.exists() and any((path.parent / name).exists() for name in BEFORE):
                raise SavedStateError(
                    f"the folder {folder} was written by an earlier version, in files that this "
                    "one does not read. Keep it, end the study with that version, or give another "
                    "folder, and a policy that allows what is left."
                )
            # SQLite gives the files beside it the same mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ALONE))
            file = str(path)
        try:
            # Whoever has a store uses it in one thread at a time.
            self._database = sqlite3.connect(file, check_same_thread=False, factory=_Database)
            for setting in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
                self._database.execute(f"PRAGMA {setting}")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS kept "
                "(room TEXT, name TEXT, content BLOB, PRIMARY KEY (room, name))"
            )
        except sqlite3.DatabaseError as error:
            raise _damaged(Path(file), error) from error

    def room(self, name: str) -> Store:
        """Return the same store with the names of a room."""
        other = copy.copy(self)
        other._room = name
        return other

    def put(self, contents: Mapping[str, bytes]) -> None:
        """Keep bytes under their names, in the place of those before."""
        rows = [(self._room, *pair) for pair in contents.items()]
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", rows)

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a name; None if there are none."""
        asked = "SELECT content FROM kept WHERE room = ? AND name = ?"
        found = self._database.execute(asked, (self._room, name)).fetchone()
        return None if found is None else bytes(found[0])

    def names(self) -> list[str]:
        """Return all names, the one that was put first at the beginning."""
        asked = "SELECT name FROM kept WHERE room = ? ORDER BY rowid"
        return [name for (name,) in self._database.execute(asked, (self._room,))]

    def trim(self, number: int) -> list[str]:
        """Drop all names but the last ones, so many, and return those that were dropped."""
        names = self.names()
        dropped = names[: len(names) - min(number, len(names))]
        with self._database:
            rows = [(self._room, name) for name in dropped]
            self._database.executemany("DELETE FROM kept WHERE room = ? AND name = ?", rows)
        return dropped


class _Database(sqlite3.Connection):
    """A connection that closes itself where nobody uses it any more."""

    def __del__(self) -> None:
        self.close()


def log_privately(file: str | Path, entry: Mapping[str, Any]) -> str:
    """Add time and entry as a line of JSON to a file only its owner can read; return the line.

    A file that is open to all users is closed to all but its owner, with a warning if it cannot be,
    as where it belongs to another user. One that is open to a group alone stays so: its owner has
    chosen that, for auditors.
    """
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **entry})
    opener = partial(os.open, mode=OWNER_ALONE)
    with open(file, "ab", opener=opener) as stream:
        mode = os.fstat(stream.fileno()).st_mode
        # Not what stands for no file, such as /dev/stderr.
        if os.name == "posix" and stat.S_ISREG(mode) and mode & ALL:
            try:
                os.fchmod(stream.fileno(), OWNER_ALONE)
            except PermissionError:
                warnings.warn(
                    f"all users of this machine can open {file}, and this process may not close "
                    "it, since another user owns it. Ask that one to run 'chmod o=' on it.",
                    category=FederatedWarning,
                    stacklevel=2,
                )
        stream.write(f"{line}\n".encode())
    return line


def write_atomically(file: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that at any time its name stands for a whole file, the new or the old one.

    Only its owner can read it. ``write`` gets the stream of a temporary file in the same folder,
    which takes the name once it is on the disk. A process that is killed in between leaves the
    temporary file ``.name.*.part`` behind; a save an hour later removes it.
    """
    file = Path(os.path.realpath(file))  # os.replace would put a file in the place of a link
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    opener = partial(os.open, mode=OWNER_ALONE)
    try:
        with open(part, "x+b", opener=opener) as stream:
            write(stream)
            # On the disk before it takes the name: otherwise a loss of power may leave it empty.
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    # What killed processes have left behind, if it is old enough.
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                left.unlink()
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            # The new name must outlive a loss of power, too. Some network file systems cannot.
            with suppress(OSError):
                os.fsync(folder)
        finally:
            os.close(folder)


def write_npz(
    path: str | Path, arrays: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> None:
    """Write ``path.npz`` atomically: arrays by name, and a description as JSON, without pickle."""
    text = json.dumps(description, indent=1, sort_keys=True) + "\n"

    def write(stream: IO[bytes]) -> None:
        # NumPy's stubs take keywords for allow_pickle.
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        with zipfile.ZipFile(stream, "a") as archive:
            archive.writestr(DESCRIPTION, text)

    write_atomically(npz(path), write)


def read_npz(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the description of a file of :func:`write_npz`, with their dtypes."""
    file = npz(path)
    if not file.exists():
        raise SavedStateError(f"there is no file {file}: give the path that save was given.")
    try:
        with np.load(file, allow_pickle=False) as members:
            arrays = dict(members)
        return arrays, dict(json.loads(bytes(arrays.pop(DESCRIPTION))))
    except DAMAGE as error:
        raise _damaged(file, error) from error


def npz(path: str | Path) -> Path:
    """Return the file name of a path that was given to a ``save``, with its ending or without."""
    # with_suffix would cut a part of a name such as "fit.2026" off.
    path = Path(path)
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


def _damaged(file: Path, error: Exception) -> SavedStateError:
    return SavedStateError(
        f"{file} cannot be read, it is damaged or not complete ({error}). Copy it again from "
        "where it was saved, or run the fit again."
    )


def canonical(value: object) -> str:
    """Return the JSON of a value or a dataclass, the same text for equal values."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def read_record(kind: type[Record], text: str | bytes) -> Record:
    """Return the record in a text that :func:`canonical` has made; refuse all other texts.

    ``kind`` is a dataclass or a NamedTuple, whose fields are numbers, texts, other records, tuples
    and dicts of these, or one of these and None.
    """
    try:
        return _typed(kind, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"a text names {', '.join(get_type_hints(kind))} of {kind.__name__}, but this one says "
            f"{text!r:.100}. All parties must run the same version."
        ) from error


def _typed(kind: object, value: object) -> Any:
    """Return a value of JSON as a type says."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _typed(parts[0], value)
    if origin is tuple:
        every = parts[1:] == (Ellipsis,)
        if not isinstance(value, list) or (not every and len(value) != len(parts)):
            raise TypeError("something else than a list")
        return tuple(_typed(parts[0 if every else i], v) for i, v in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _typed(parts[1], v) for name, v in value.items()}
    if kind is Any:
        return value
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, tuple)):
        types = get_type_hints(kind)
        named = dict(zip(types, value, strict=True)) if isinstance(value, list) else value
        if not isinstance(named, dict) or named.keys() != types.keys():
            raise TypeError("other fields")
        return kind(**{name: _typed(types[name], v) for name, v in named.items()})
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r:.100} in the place of {kind}")
    return value
