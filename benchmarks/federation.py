"""Messages between a server and silos: how long they take, and what faults and strangers do.

Four parts, each with a table:

- ``times``: an exchange of 10 kB and of 10 MB over Unix sockets with each silo in a process of its
  own, and ten silos of which each waits for 0.2 s.
- ``storms``: runs of five methods over silos in this process, whose messages are lost, doubled,
  cut, late, swapped or of another run by a seed, and whose silos and server are restarted from
  their folders. Every run must end with the bits of a run without faults, or with an error that
  names a silo. Of asynchronous PVI, whose numbers depend on the order of arrival, the sum of the
  silos' factors is compared with what their visits must have put in: the model is conjugate.
- ``strangers``: random, cut and changed messages, and changed plans, at a silo. Each must be
  answered or refused in words.
- ``lies``: replies of a silo that are not of the agreed shapes. Each must be refused by the silo's
  number before it touches the state.

Run it from anywhere::

    python benchmarks/federation.py --json federation.json
    python benchmarks/federation.py --parts times strangers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row
from record import write as write_record

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.network import InMemory, Sockets
from numpyro_fed.network.engines import listen
from numpyro_fed.rounds import federation as engine_of
from numpyro_fed.rounds.messages import ACCEPT, Question, read, write

KEY = jax.random.key(0)
FREE = nf.Policy(min_silos=1, min_rows=1, parameters_per_row=1e9, max_places=10**9, max_draws=10**9)
CHANCES = {
    "lost": 0.05,
    "reply lost": 0.05,
    "doubled": 0.05,
    "late": 0.05,
    "swapped": 0.02,
    "another run": 0.02,
    "cut": 0.005,
    "restart": 0.01,
    "server": 0.01,
}


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 2), obs=y)


def wide(y):
    """Many globals, of which a silo sends a gradient in each round."""
    z = numpyro.sample("z", dist.Normal(0, 1).expand([y.shape[-1]]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(z, 1).to_event(1), obs=y)


methods = {
    "SFVI": (nf.SFVI(model, start=None), 6),
    "SFVI-Avg": (nf.SFVIAvg(model, start=None, local_steps=3), 2),
    "PVI, sequential": (nf.PVI(model, start=None, schedule="sequential"), 2),
    "PVI, synchronous": (nf.PVI(model, start=None, schedule="synchronous"), 3),
    "PVI, asynchronous": (nf.PVI(model, start=None, schedule="asynchronous"), 4),
}
NAMES = {"model": model, "wide": wide}


def silos_of(data: Sequence[Any], folder: Path | None = None) -> list[nf.Silo]:
    states = [None if folder is None else folder / str(j) for j in range(len(data))]
    return [
        nf.Silo(d, names=NAMES, policy=FREE, state=s) for d, s in zip(data, states, strict=True)
    ]


def rows(num_silos: int = 3) -> list[dict[str, np.ndarray]]:
    r = np.random.default_rng(0)
    return [dict(y=r.normal(3, 2, 8)) for _ in range(num_silos)]


# --- times -----------------------------------------------------------------------------------


def serve(path: str, columns: int, delay: float) -> None:
    """Answer as a silo with two rows, each time after a while."""
    silo = nf.Silo(dict(y=np.ones((2, columns), np.float32)), names=NAMES, policy=FREE)

    def answer(message: bytes) -> bytes:
        if Question.of(read(message).head).run:
            time.sleep(delay)
        return silo.answer(message)

    listen(path, answer).serve_forever()


def seconds_a_round(columns: int, num_silos: int, delay: float, rounds: int) -> float:
    """Return the median seconds of a round of SFVI, each an exchange with all silos, warm."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        paths = [f"{folder}/{j}" for j in range(num_silos)]
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        processes = [subprocess.Popen([*command, path, str(columns), str(delay)]) for path in paths]
        try:
            there = nf.Federation(Sockets(paths), names=NAMES, patience=300)
            method = nf.SFVI(wide, start=None, guide=nf.guides.MeanField())
            stamps: list[float] = []
            method.run(
                KEY,
                rounds,
                there,
                progress_bar=False,
                every=1,
                callback=lambda result: stamps.append(time.perf_counter()),
            )
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return float(np.median(np.diff(stamps)[2:]))


def times(quick: bool) -> list[dict[str, Any]]:
    cases = [
        ("10 kB, 3 silos", 1_250, 3, 0.0, 0.03),
        ("10 MB, 3 silos", 1_250_000, 3, 0.0, 0.6),
        ("one silo that waits 0.2 s", 10, 1, 0.2, None),
        ("ten silos that wait 0.2 s", 10, 10, 0.2, 0.4),
    ]
    rounds = 6 if quick else 25
    found = []
    for what, columns, num_silos, delay, target in cases[: 1 if quick else None]:
        seconds = seconds_a_round(columns, num_silos, delay, rounds)
        found.append({"what": what, "seconds": seconds, "target": target})
    return found


# --- storms ----------------------------------------------------------------------------------


class ServerKilled(BaseException):
    """The end of the server's process, at a message."""


class Storm:
    """An engine with faults by a seed; ``other`` are messages of another run."""

    def __init__(self, data: Sequence[Any], folder: Path, other: Sequence[bytes]):
        self.data, self.folder, self.other = data, folder, other
        self.silos, self.num_silos, self.faults = silos_of(data, folder), len(data), Counter[str]()
        self.begin(0)

    def begin(self, seed: int) -> None:
        self.random, self.seen = np.random.default_rng(seed), list[tuple[int, bytes]]()

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        names, chances = zip(*CHANCES.items(), strict=True)
        fault = str(self.random.choice(["", *names], p=[1 - sum(chances), *chances]))
        self.faults[fault] += 1
        if fault == "lost":
            raise TimeoutError
        if fault == "server":
            raise ServerKilled
        if fault == "swapped":
            self.silos[(silo + 1) % self.num_silos].answer(message)
        if fault == "another run":
            self.silos[silo].answer(self.other[self.random.integers(len(self.other))])
        if fault == "cut":
            self.silos[silo].answer(message[: len(message) // 2])
            raise ConnectionResetError
        if fault == "restart":
            self.silos[silo] = silos_of(self.data, self.folder)[silo]
        if fault == "late" and self.seen:
            j, earlier = self.seen[self.random.integers(len(self.seen))]
            self.silos[j].answer(earlier)
        reply = self.silos[silo].answer(message)
        self.seen.append((silo, message))
        if fault == "doubled" and self.silos[silo].answer(message) != reply:
            raise RuntimeError("another reply to the same message")
        if fault == "reply lost":
            raise ConnectionResetError
        return reply


@precision(double=True)
def storms(seeds: int) -> list[dict[str, Any]]:
    engine_of.FIRST_WAIT = 1e-4
    nf.cache_programs(tempfile.mkdtemp())  # restarts compile anew
    found = []
    for name, (method, rounds) in methods.items():
        data, ends = rows(), Counter[str]()
        calm_engine = Heard(silos_of(data))
        there = nf.Federation(calm_engine, names=NAMES, at_once=1)
        calm = method.run(KEY, rounds, there, progress_bar=False)
        with tempfile.TemporaryDirectory() as folder:
            storm = Storm(data, Path(folder), calm_engine.heard)
            for seed in range(seeds):  # silos stay, and servers come and go
                storm.begin(seed)
                try:
                    result = until_done(method, rounds, storm, Path(folder) / f"server-{seed}")
                    ends["right" if as_it_should(result, calm, name, data) else "wrong"] += 1
                except nf.SilosError as error:
                    ends[f"ended: {error}"[:100]] += 1
        faults = storm.faults
        faults.pop("", None)
        found.append({"what": name, "runs": seeds, **ends, "faults": dict(faults)})
    return found


class Heard(InMemory):
    """An engine that keeps the messages that it carries."""

    def __init__(self, silos: Sequence[nf.Silo]):
        super().__init__([silo.answer for silo in silos])
        self.heard: list[bytes] = []

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        self.heard.append(message)
        return super().send(silo, message, timeout)


def until_done(method: Any, rounds: int, storm: Storm, state: Path) -> Any:
    """Return the result of a run whose server is started anew from its folder when it is killed."""
    while True:
        try:
            there = nf.Federation(storm, names=NAMES, at_once=1, state=state, secure_sum=False)
            return method.run(KEY, rounds, there, progress_bar=False)
        except ServerKilled:
            continue


def as_it_should(result: Any, calm: Any, name: str, data: Sequence[Any]) -> bool:
    """Return whether a run has the bits of the calm one, or the sum of its silos' factors."""
    if name != "PVI, asynchronous":
        pairs = jax.tree.map(np.array_equal, result.params, calm.params)
        return bool(np.array_equal(result.losses, calm.losses) and all(jax.tree.leaves(pairs)))
    # A damped visit of one of three silos takes a third of the way to its own factor.
    share = 1 - (2 / 3) ** np.bincount(result.visits.ravel(), minlength=len(data))
    precisions = [0.01, *(s * len(d["y"]) / 4 for s, d in zip(share, data, strict=True))]
    means = [0.0, *(s * d["y"].sum() / 4 for s, d in zip(share, data, strict=True))]
    precision = sum(precisions)
    found = result.posterior()["mu"]
    error = [found.mean - sum(means) / precision, found.variance - 1 / precision]
    return bool(np.abs(error).max() < 1e-12)


# --- strangers -------------------------------------------------------------------------------


def strangers(number: int, plans: int) -> list[dict[str, Any]]:
    """Return what a silo did with damaged messages and changed plans."""
    heard: list[bytes] = []

    class Listening(InMemory):
        def send(self, silo: int, message: bytes, timeout: float) -> bytes:
            if silo == 0:
                heard.append(message)
            return super().send(silo, message, timeout)

    silos = silos_of(rows())
    there = nf.Federation(Listening([s.answer for s in silos]), names=NAMES, at_once=1)
    methods["SFVI"][0].run(KEY, 3, there, progress_bar=False)
    silo, r = silos[0], np.random.default_rng(0)
    kinds: dict[str, Callable[[bytearray], bytes]] = {
        "random bytes": lambda good: r.bytes(r.integers(0, 400)),
        "cut": lambda good: bytes(good[: r.integers(len(good))]),
        "three bytes changed": lambda good: _changed(good, r, 3),
        "two messages spliced": lambda good: bytes(good[: r.integers(len(good))] + heard[-1]),
    }
    found = []
    tracemalloc.start()
    for kind, damage in kinds.items():
        outcomes = Counter[str]()
        for _ in range(number // len(kinds)):
            head, _ = read(silo.answer(damage(bytearray(heard[r.integers(len(heard))]))))
            outcomes["refused" if "error" in head else "answered"] += 1
        found.append({"what": kind, **outcomes})
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    accept = next(m for m in heard if read(m).head["exchange"] == ACCEPT)
    settings = json.loads(read(accept).head["settings"])
    outcomes = Counter[str]()
    for i in range(plans):
        # A silo that has described its data, and has not accepted a plan yet.
        fresh = silos_of(rows())[0]
        fresh.answer(heard[0])
        plan = bytearray(settings["plan"].encode())
        for _ in range(1 + i % 3):
            place = r.integers(len(plan))
            # Always another character: a plan that is the same is accepted, and rightly.
            plan[place] = 32 + (plan[place] - 32 + r.integers(1, 95)) % 95
        changed = json.dumps({**settings, "plan": plan.decode()})
        question = Question.of(read(accept).head)._replace(settings=changed)
        head, _ = read(fresh.answer(write({}, question.head())))
        outcomes["refused" if "error" in head else "accepted"] += 1
    found.append({"what": "changed plans", **outcomes})
    found.append({"what": "peak memory, MiB", "answered": peak})
    return found


def _changed(good: bytearray, r: np.random.Generator, number: int) -> bytes:
    for _ in range(number):
        good[r.integers(len(good))] = r.integers(256)
    return bytes(good)


# --- lies ------------------------------------------------------------------------------------


def malformed(reply: bytes) -> dict[str, bytes]:
    """Return replies that no honest silo sends, made of a good one."""
    arrays = read(reply).arrays
    made: dict[str, bytes] = {
        "empty": b"",
        "text": b"no arrays",
        "cut": reply[: len(reply) // 2],
        "longer": reply + b"0",
        "without arrays": write({}),
        "one more array": write({**arrays, "reply.extra": np.zeros(1)}),
        "a weight": write({**arrays, "reply.weight": np.array(5.0)}),
        "an unknown error": write({}, {"error": "SystemExit", "words": "x" * 10_000}),
    }
    for name, a in arrays.items():
        changed = {
            "missing": None,
            "one axis more": np.asarray(a)[None],
            "in double": np.asarray(a, np.float64) if a.dtype == np.float32 else None,
            "as ints": np.zeros(a.shape, np.int64),
            "as bytes": np.zeros(a.shape, np.uint8),
            "twice as long": np.zeros((2, *a.shape), a.dtype),
            "of length 0": np.zeros((0,), a.dtype),
        }
        if np.issubdtype(a.dtype, np.floating):
            changed |= {
                "NaN": np.full(a.shape, np.nan, a.dtype),
                "infinite": np.full(a.shape, np.inf, a.dtype),
            }
        for how, value in changed.items():
            rest = {k: v for k, v in arrays.items() if k != name}
            if how == "missing" or value is not None:
                made[f"{name} {how}"] = write(rest if value is None else {**rest, name: value})
    return made


def lies(quick: bool) -> list[dict[str, Any]]:
    found = []
    for name, (method, _) in methods.items():
        silos, last = silos_of(rows()), dict[str, bytes]()

        class Lying(InMemory):
            spoilt: bytes | None = None

            def send(
                self, silo: int, message: bytes, timeout: float, last: dict[str, bytes] = last
            ) -> bytes:
                reply = super().send(silo, message, timeout)
                question = Question.of(read(message).head)
                arrays = read(reply).arrays
                if silo == 1 and question.run and arrays:
                    last["reply"] = reply
                    if self.spoilt is not None:
                        return self.spoilt
                return reply

        engine = Lying([s.answer for s in silos])
        there = nf.Federation(engine, names=NAMES, patience=5)
        method.run(KEY, 1, there, progress_bar=False)
        outcomes, missed = Counter[str](), []
        cases = malformed(last["reply"])
        for what, reply in list(cases.items())[: 5 if quick else None]:
            engine.spoilt = reply
            try:
                method.run(KEY, 1, there, progress_bar=False)
            except (nf.DataError, nf.ModelError, nf.NonFiniteError) as error:
                named = "silo 1" in str(error)
                outcomes["named" if named else "refused"] += 1
                if not named:
                    missed.append(what)
            else:
                outcomes["accepted"] += 1
                missed.append(what)
        found.append({"what": name, **outcomes, "not named": missed})
    return found


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = [
        table_row(r["what"], f"{r['seconds']:.3f} s", "", f"{r['target']} s" if r["target"] else "")
        for r in report.get("times", [])
    ]
    for r in report.get("storms", []):
        faults = f"{sum(r['faults'].values()):,} faults"
        rows.append(
            table_row(f"storms, {r['what']}: runs right", r.get("right", 0), faults, r["runs"])
        )
    for r in report.get("strangers", []):
        if "MiB" in r["what"]:
            rows.append(table_row(f"strangers: {r['what']}", f"{r['answered']:.2f}"))
            continue
        words = ", ".join(f"{number:,} {kind}" for kind, number in r.items() if kind != "what")
        rows.append(table_row(f"strangers: {r['what']}", words))
    for r in report.get("lies", []):
        number = sum(r.get(kind, 0) for kind in ("named", "refused", "accepted"))
        rows.append(
            table_row(
                f"malformed replies, {r['what']}: named by silo", r.get("named", 0), "", number
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["times", "storms", "strangers", "lies"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--seeds", type=int, default=200, help="of storms, for each method")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        path, columns, delay = args.serve
        serve(path, int(columns), float(delay))
    warnings.simplefilter("ignore")
    small = args.quick
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "times": lambda: times(small),
        "storms": lambda: storms(1 if small else args.seeds),
        "strangers": lambda: strangers(200 if small else 100_000, 3 if small else 200),
        "lies": lambda: lies(small),
    }
    report: dict[str, Any] = {"jax": jax.__version__}
    for name in args.parts:
        report[name] = parts[name]()
        print(name)
        for row in report[name]:
            print("  ", ", ".join(f"{k} {v}" for k, v in row.items()))
        if args.json:
            write_record(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
