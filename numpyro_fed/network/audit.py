"""The audit log of a silo: a line of JSON for each message, each with the hash of the one before.

A line that was changed, dropped or put in between does not fit to the next one. Last lines that are
cut off are found by the silo's folder of states, which has the number and the hash of the last one.
A process that is killed and a full disk leave a line that is torn: the next one has the hash of it.
"""

from __future__ import annotations

import glob
import json
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import OWNER_ALONE, Store, log_privately

if sys.platform != "win32":
    import fcntl

SYSLOG = "syslog"  # in the place of a file's name: the log of the system
SOCKETS = "/dev/log", "/var/run/syslog"  # where Linux and macOS have it
LARGEST = 10_000_000  # bytes after which a file is closed, and another one begun
END = 1 << 16  # bytes at the end of a file, among which its last lines are looked for
LAST = "audit"  # the name under which a silo keeps the number and the hash of its last line


class Last(NamedTuple):
    """The number and the hash of a last line."""

    number: int = 0
    hash: str = ""


@dataclass(frozen=True)
class Audit:
    """An audit log whose lines follow each other."""

    last: Last
    remarks: tuple[str, ...]  # what is strange, and no sign of a change

    @property
    def number(self) -> int:
        """Return the number of the last line."""
        return self.last.number


class AuditLog:
    """The audit log of a silo, in a file or in the system's log.

    ``where`` is the name of a file or "syslog". Silos may share a file.

    Raises
    ------
    ModelError
        If the system has no log, or the file cannot be written.
    """

    def __init__(self, where: str, store: Store):
        self._where, self._store = where, store
        self._system = _system_log() if where == SYSLOG else None
        file = Path(where).absolute()
        if self._system is None and not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ModelError(
                f"the audit log {where} cannot be written, and this silo answers nothing without: "
                "make its folder, which the silo's user may write to, or give another place."
            )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line; an OSError if it cannot be written."""
        last, file = last_kept(self._store), Path(self._where)
        if self._system is not None:
            line = json.dumps(_chained(last, entry))
            record = {"msg": f"numpyro_fed {line}", "levelname": "INFO"}
            self._system.emit(logging.makeLogRecord(record))
        elif file.exists() and not file.is_file():  # such as /dev/stderr
            line = log_privately(file, _chained(last, entry))
        else:
            with _alone(file.absolute().parent):
                last = max(last, _last_of(file), key=itemgetter(0))
                line = self._add_to_file(file, last, entry)
        kept = json.dumps([last.number + 1, sha256(line.encode()).hexdigest()])
        self._store.put({LAST: kept.encode()})

    def _add_to_file(self, file: Path, last: Last, entry: Mapping[str, Any]) -> str:
        """Add the line after the last one to a file, on the disk once this returns."""
        if file.exists() and file.stat().st_size > LARGEST:
            os.replace(file, file.with_name(f"{file.name}.{last.number}"))
        with open(file, "a+b", opener=partial(os.open, mode=OWNER_ALONE)) as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # the last line is torn
                    stream.write(b"\n")
                    stream.flush()
            line = log_privately(file, _chained(last, entry))
            os.fsync(stream.fileno())
        return line


def last_kept(store: Store) -> Last:
    """Return the number and the hash of the last line that a silo has written."""
    return Last(*json.loads(store.get(LAST) or b'[0, ""]'))


def check_audit(file: Path) -> Audit:
    """Return what is in an audit log and its closed files, if their lines follow each other.

    Raises
    ------
    DataError
        Naming the first line that does not fit to the one before.
    """
    files = sorted(_files(file), key=lambda one: next(_numbers(one), 0))
    last, remarks, earlier = Last(), list[str](), 0
    for one in files:
        begun = False
        for place, line in enumerate(_lines(one), 1):
            entry, name = _entry(line), f"line {place} of {one}"
            if entry is None:
                remarks.append(f"{name} is torn: the process or the disk ended in it")
            elif not begun and "before" not in entry:
                earlier += 1
                continue
            elif not begun and _number_in(entry) > last.number + 1:
                missing = f"the lines from {last.number + 1} to {entry['line'] - 1}"
                remarks.append(f"{missing} are missing, which stood in a file before {one}")
            elif (entry.get("line"), entry.get("before")) != (last.number + 1, last.hash):
                raise DataError(
                    f"{name} does not follow from the one before: a line was changed, dropped or "
                    "added, there or just before."
                )
            if entry is not None or begun:
                begun = True
                number = last.number + 1 if entry is None else entry["line"]
                last = Last(number, sha256(line).hexdigest())
    if earlier:
        remarks.append(f"{earlier} lines are of an earlier version, which nothing chains")
    return Audit(last, tuple(remarks))


def _chained(last: Last, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of the line that follows the last one."""
    return {"line": last.number + 1, "before": last.hash, **entry}


def _files(file: Path) -> list[Path]:
    """Return the files of an audit log, the closed ones and those of logrotate as well."""
    beside = file.parent.glob(f"{glob.escape(file.name)}[.-]*")
    closed = [one for one in beside if one.name[len(file.name) + 1 :].isdecimal()]
    return [*closed, *([file] if file.is_file() else [])]


def _last_of(file: Path) -> Last:
    """Return the last line of a log; one that has none yet goes on with those of closed files."""
    found = _end_of(file) if file.exists() else Last()
    return (
        found if found.number else max(map(_end_of, _files(file)), key=itemgetter(0), default=found)
    )


def _end_of(file: Path) -> Last:
    """Return the last line of a file; of number 0 if none has one."""
    size = file.stat().st_size
    for beginning in (max(size - END, 0), 0):
        lines = _lines(file, beginning)
        for torn, line in enumerate(reversed(lines)):
            if number := _number_in(_entry(line) or {}):
                return Last(number + torn, sha256(lines[-1]).hexdigest())
    return Last()


def _numbers(file: Path) -> Iterator[int]:
    """Yield the numbers of the lines that have one."""
    return filter(None, (_number_in(_entry(line) or {}) for line in _lines(file)))


def _number_in(entry: Mapping[str, Any]) -> int:
    """Return the number in a line, or 0."""
    number = entry.get("line")
    return number if isinstance(number, int) and "before" in entry else 0


def _lines(file: Path, beginning: int = 0) -> list[bytes]:
    """Return the lines of a file, also one without an end."""
    with open(file, "rb") as stream:
        stream.seek(beginning)
        lines = stream.read().split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None for one that is torn."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes that write to a log in the same folder waiting."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _SystemLog(logging.handlers.SysLogHandler):
    """The system's log, which says so where it does not take a line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error again."""
        error = sys.exc_info()[1]
        raise error if isinstance(error, OSError) else OSError(f"the system's log: {error}")


def _system_log() -> _SystemLog:
    """Return the system's log."""
    found = next((one for one in SOCKETS if os.path.exists(one)), None)
    if found is None:
        raise ModelError(
            f'audit = "{SYSLOG}" needs the log of the system, and there is neither '
            f"{' nor '.join(SOCKETS)}. Give the name of a file."
        )
    return _SystemLog(found)
