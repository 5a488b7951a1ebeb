"""The audit log of a silo: a line of JSON for each message, each with the hash of the one before.

A line that was changed, dropped or put in between does not fit to the next one. Only the last lines
of a file can be cut off unseen: their number stands in the silo's folder of states, too.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from numpyro_fed.basics.errors import DataError
from numpyro_fed.basics.files import Store, log_privately

SYSLOG = "syslog"  # in the place of a file's name: the log of the system
LARGEST = 10_000_000  # bytes after which a file is closed, and another one begun
LAST = "audit"  # the name under which a silo keeps the number and the hash of the last line


class AuditLog:
    """The audit log of a silo, in a file or in the system's log.

    ``where`` is the name of a file or "syslog". The number and the hash of the last line are in
    ``store``.
    """

    def __init__(self, where: str, store: Store):
        self._where, self._store = where, store
        self._system: logging.Logger | None = None
        if where == SYSLOG:
            self._system = logging.getLogger("numpyro_fed.audit")
            self._system.propagate = False
            if not self._system.handlers:
                address = "/dev/log" if os.path.exists("/dev/log") else ("localhost", 514)
                self._system.addHandler(logging.handlers.SysLogHandler(address))
                self._system.setLevel(logging.INFO)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line; an OSError if it cannot be written."""
        number, before = json.loads(self._store.get(LAST) or b'[0, ""]')
        chained = {"line": number + 1, "before": before, **entry}
        if self._system is not None:
            line = json.dumps(chained)
            self._system.info("numpyro_fed %s", line)
        else:
            file = Path(self._where)
            if file.is_file() and file.stat().st_size > LARGEST:
                os.replace(file, file.with_name(f"{file.name}.{number}"))
            line = log_privately(file, chained)
        last = json.dumps([number + 1, sha256(line.encode()).hexdigest()])
        self._store.put({LAST: last.encode()})


def lines_kept(store: Store) -> int:
    """Return how many lines a silo has written to its audit log."""
    number, _ = json.loads(store.get(LAST) or b'[0, ""]')
    return number


def check_audit(file: Path) -> int:
    """Return the number of lines of an audit log and its closed files, if they follow each other.

    Raises
    ------
    DataError
        Naming the first line that does not fit to the one before.
    """
    closed = [f for f in file.parent.glob(f"{file.name}.*") if f.suffix[1:].isdigit()]
    files = [*sorted(closed, key=lambda f: int(f.suffix[1:])), file]
    before, number = "", 0
    for one in (f for f in files if f.exists()):
        for place, line in enumerate(one.read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
                fits = (entry["line"], entry["before"]) == (number + 1, before)
            except (ValueError, KeyError, TypeError):
                fits = False
            if not fits:
                raise DataError(
                    f"line {place} of {one} does not follow from the one before: a line was "
                    "changed, dropped or added, there or just before."
                )
            before, number = sha256(line.encode()).hexdigest(), number + 1
    return number
