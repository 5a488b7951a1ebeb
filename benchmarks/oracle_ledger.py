"""What came of each model of the oracle, so that its hours can be spread over days and machines.

A CSV with a line for each model: its number, the commit that it was run on, and for each method a
letter for each of the ten sets of data,

    r right | a right, said (a false alarm) | s said | f refused | c crashed | w wrong | - not run
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LETTERS = {
    "right": "r",
    "right, said": "a",
    "said": "s",
    "refused": "f",
    "crashed": "c",
    "wrong": "w",
}
NONE = "-"
Records = Mapping[tuple[int, int, str], Mapping[str, Any]]


def enter(path: Path, records: Records, methods: Iterable[str], sets: int, commit: str) -> None:
    """Write the models of ``records`` that are finished into the file, in place of older lines."""
    lines = {int(line["model"]): line for line in read(path)}
    for model in sorted({model for model, _, _ in records}):
        done = {method: _letters(records, model, method, sets) for method in methods}
        lines[model] = dict(model=str(model), commit=commit) | done
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, ["model", "commit", *methods], restval="", lineterminator="\n")
        out.writeheader()
        out.writerows(lines[model] for model in sorted(lines))


def _letters(records: Records, model: int, method: str, sets: int) -> str:
    outcomes = (records.get((model, i, method), {}).get("outcome") for i in range(sets))
    letters = "".join(NONE if o is None else LETTERS[o] for o in outcomes)
    return letters if letters.strip(NONE) else ""


def read(path: Path) -> list[dict[str, str]]:
    """The file's lines; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def counts(lines: Iterable[Mapping[str, str]]) -> dict[str, Counter[str]]:
    """How often each method came to each outcome."""
    names = {letter: outcome for outcome, letter in LETTERS.items()}
    found: dict[str, Counter[str]] = {}
    for line in lines:
        for method in line.keys() - {"model", "commit"}:
            seen = Counter(names[letter] for letter in line[method] if letter != NONE)
            found[method] = found.get(method, Counter()) + seen
    return found


def commits(lines: Iterable[Mapping[str, str]]) -> dict[str, list[int]]:
    """The models that were run on each commit."""
    found: dict[str, list[int]] = {}
    for line in lines:
        found.setdefault(line["commit"], []).append(int(line["model"]))
    return found
