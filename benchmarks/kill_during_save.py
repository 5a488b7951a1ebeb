"""Kill a process that saves a fit again and again: what is on the disk afterwards?

A child saves a state of a few megabytes, numbered, as fast as it can; it is killed (SIGKILL) at a
random time, and the file is loaded: it must be whole, and the last save that the child said was
done, or the one that it was at. The next child goes on over the same file.

    python benchmarks/kill_during_save.py --kills 1000
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.posterior.saving import SavedRun, SavedWords, save
from numpyro_fed.rounds.runtime import State

NUMBER = struct.Struct("q")


def written(number: int, size: int) -> tuple[SavedWords, SavedRun]:
    """A fit all of whose arrays and words say its number."""
    full = np.full(size, float(number))
    state = State(np.int64(number), {"loc": full}, ({"scale": full},))
    draws = {"mu": np.full(1_000, float(number))}
    run = {"settings": {"number": number}}, np.full(100, float(number)), state
    return SavedWords("Result", {"verdict": str(number), "trusted": None}, draws), run


def child(path: Path, first: int, size: int, done: int) -> None:
    """Save for ever, and say each save that is done."""
    number = first
    while True:
        save(path, *written(number, size), None)
        os.write(done, NUMBER.pack(number))
        number += 1


def killed(path: Path, first: int, size: int, seconds: float) -> int | None:
    """The last number that a child said it had saved before it was killed."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX has no backend yet, and no threads
        pid = os.fork()
    if not pid:
        try:
            child(path, first, size, writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    whole = len(told) - len(told) % NUMBER.size
    return NUMBER.unpack(told[whole - NUMBER.size : whole])[0] if whole else None


def found(path: Path) -> int:
    """The number of the save that the file holds; an error unless all of it says so."""
    saved = nf.load(path)
    number = int(saved.verdict)
    arrays = [saved.losses, saved.draws["mu"]]
    with np.load(f"{path}.npz") as members:
        arrays += [members[name] for name in members if name.startswith("state")]
    if not all((a == number).all() for a in arrays) or saved.settings != {"number": number}:
        raise nf.SavedStateError(f"the file says number {number}, and its arrays say others.")
    return number


def trial(kills: int, size: int, longest: float, seed: int) -> dict[str, Any]:
    """Counts of what was found after each kill."""
    rng = np.random.default_rng(seed)
    counts = {"kills": kills, "last": 0, "next": 0, "lost": 0, "saves": 0, "cut_short": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit"
        save(path, *written(0, size), None)
        number = 0
        for _ in range(kills):
            said = killed(path, number + 1, size, rng.uniform(0, longest))
            last = number if said is None else said
            counts["saves"] += last - number
            for part in Path(folder).glob(".*.part"):  # cut short, and of no use
                counts["cut_short"] += 1
                part.unlink()
            try:
                number = found(path)
            except (nf.SavedStateError, OSError, ValueError) as error:
                counts["lost"] += 1
                counts["first_error"] = counts.get("first_error", str(error).replace(folder, ""))
                save(path, *written(last, size), None)
                number = last
                continue
            counts["last"] += number == last
            counts["next"] += number == last + 1
            counts["lost"] += number not in (last, last + 1)
    return counts


def _whole(report: dict[str, Any]) -> str:
    return f"{report['last']}, {report['next']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--numbers", type=int, default=200_000, help="in each array of the state")
    parser.add_argument("--longest", type=float, default=0.1, help="seconds until a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = trial(args.kills, args.numbers, args.longest, args.seed)
    print(", ".join(f"{name} {value}" for name, value in report.items()))
    if args.json:
        rows = [
            table_row("saved files lost", report["lost"], f"of {report['kills']} kills", 0),
            table_row("the last save that the child said was done, or the next", _whole(report)),
        ]
        write(args.json, rows, details=report)


if __name__ == "__main__":
    main()
