"""What a benchmark measured, as a record that a page of the documentation draws as a table.

A record says which command ran, on which day, on which machine and by which versions. Its rows are
the few numbers that a reader asks for, each beside what it is compared with and what was aimed at;
``details`` are all numbers of the script. A script writes one record to the file of ``--json``:

    write(path, [table_row("six cities, exchanges", 5, target="at most 7")], details=report)

A file of ``benchmarks/results`` is a list of such records, each with a name and a title, and its
page under ``docs/results`` draws it. A new record goes in the place of the one that it replaces.
Cells are numbers or text, in which ``**missed**`` is bold. ``also`` of a row is its line in the
first table of all results. A record may have ``heads`` of its own for the columns of its table.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
FIELDS = ("command", "date", "machine", "versions", "rows", "details")
CELLS = ("what", "ours", "reference", "target")
PACKAGES = ("jax", "numpyro", "numpyro_fed")


def table_row(
    what: str, ours: object, reference: object = "", target: object = "", unit: str = ""
) -> dict[str, Any]:
    """Return a line of the table; numbers are given a unit when they are drawn."""
    line = {"what": what, "ours": ours, "reference": reference, "target": target}
    return line | ({"unit": unit} if unit else {})


def distance(error: float, ratios: Sequence[float]) -> str:
    """Return the worst error of a mean and the range of the ratios of sds, as a cell."""
    return f"{error:.3f} sd, {min(ratios):.3f} to {max(ratios):.3f}"


def machine() -> str:
    """Return the machine in words: cores, processor, load, and the accelerator if there is one."""
    import jax

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    device = jax.devices()[0]
    beside = "" if device.platform == "cpu" else f", {device.device_kind}"
    return f"{cores} cores of {name}{beside}{load}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def command() -> str:
    """Return the command that runs, without the file of ``--json``."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def write(path: str | Path, rows: list[dict[str, Any]], *, details: object) -> None:
    """Write the record of this run."""
    record = {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "details": details,
    }
    _check(record, f"the record of {sys.argv[0]}")
    # NaN is none of JSON's numbers: what is not known is null.
    plain = json.loads(json.dumps(record, default=float), parse_constant=lambda name: None)
    Path(path).write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n")


def read(page: str) -> list[dict[str, Any]]:
    """Return the records of a page; an error says which file or field is missing."""
    file = RESULTS / f"{page}.json"
    if not file.is_file():
        raise ValueError(f"there is no file {file}.")
    records = json.loads(file.read_text())
    for number, record in enumerate(records):
        _check(record, f"record {number} of {file.name}")
        if not {"name", "title"} <= set(record):
            raise ValueError(f"record {number} of {file.name} has no name or no title.")
    return records


def _check(record: dict[str, Any], where: str) -> None:
    """Raise an error unless all fields are there."""
    lacking = [f"{where} has no {name}" for name in FIELDS if name not in record]
    for number, line in enumerate(record.get("rows", [])):
        lacking += [f"row {number} of {where} has no {name}" for name in CELLS if name not in line]
    if not record.get("rows"):
        lacking.append(f"{where} has no rows")
    if lacking:
        raise ValueError("; ".join(lacking) + ".")
