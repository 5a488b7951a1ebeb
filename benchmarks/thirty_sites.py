"""Thirty hospitals over NVFLARE: one dies, one is slow, one has a wrong clock.

A server and the sites with certificates (mTLS) on the loopback device, each with processes of its
own; the silos live in four processes, each with a socket of its own. The model is a logistic
regression with an effect of each hospital. In the first fit a site dies once all have described
their data, and ``nf.fit`` begins again without it (``missing="leave_out"``). Then a second
analyst's process is played: a new job begins without the dead site, and the fit is made again. The
numbers of the first fit are compared with those of a list of the others' data in this process.

    python benchmarks/thirty_sites.py [--json report.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from flare_place import ANALYST, SERVER, USER, Place, of_folder
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.network import Flare
from numpyro_fed.network.engines import listen, short_folder
from numpyro_fed.network.flare import allow
from numpyro_fed.rounds.federation import Federation

ROWS, COLUMNS = 200, 4
PROCESSES = 2  # that the silos without a fault live in
KEY = jax.random.key(0)
DIES_BEFORE = "accept", 1  # an exchange, and how many of its name there are by then


def model(x: Any, hospital: Any, y: Any = None) -> None:
    """A logistic regression with an effect of each hospital."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        effect = numpyro.sample("effect", dist.Normal(mean, sd))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + effect[hospital]), obs=y)


def rows(number: int) -> dict[str, np.ndarray]:
    """Return the patients of a hospital, by its number."""
    r = np.random.default_rng(number)
    x = r.normal(size=(ROWS, COLUMNS))
    logits = x @ np.linspace(-1, 1, COLUMNS) + r.normal(-0.5, 0.7)
    y = (r.random(ROWS) < 1 / (1 + np.exp(-logits))).astype(float)
    return {"x": x, "hospital": np.zeros(ROWS, int), "y": y}


# --- a process with silos --------------------------------------------------------------------


def serve(folder: Path, delay: float, clock: float, numbers: Sequence[int]) -> None:
    """Answer as some silos, each answer ``delay`` seconds late, by a clock that is off."""
    if clock:
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + clock
        time.time_ns = lambda: right_ns() + int(clock * 1e9)
    servers = []
    for number in numbers:
        site = site_of(number)
        silo = nf.Silo(
            rows(number),
            names={"model": model},
            policy=nf.Policy(requesters=(ANALYST.fingerprint,), min_silos=3),
            state=folder / f"{site}.state",
        )

        def answer(message: bytes, silo: nf.Silo = silo) -> bytes:
            reply = silo.answer(message)
            time.sleep(delay)
            return reply

        servers.append(listen(folder / f"{site}.sock", answer))
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()


def site_of(number: int) -> str:
    """Return the name of a site."""
    return f"hospital-{number + 1}"


# --- all sites -------------------------------------------------------------------------------


class Sites(Place):
    """A place with many sites, whose kits are opened in this process, which takes less time."""

    def allow(self, name: str, *options: str) -> None:
        """Let the NVFLARE of a kit run the relay alone."""
        allow(self.kit(name), self.folder / options[1] if options else None)

    def start_silos(self, name: str, numbers: Sequence[int], delay: float, clock: float) -> None:
        """Start a process with some silos."""
        words = map(str, (self.folder, delay, clock, *numbers))
        self.start(name, [sys.executable, str(Path(__file__).resolve()), "--serve", *words])


class Memory(threading.Thread):
    """The largest memory that processes of each kind have had, in MB; swap is not looked at."""

    def __init__(self, place: Sites):
        super().__init__(daemon=True)
        self.place, self.peak, self.ended = place, dict[str, float](), threading.Event()

    def run(self) -> None:
        """Look every few seconds."""
        while not self.ended.wait(3.0):
            self.look()

    def look(self) -> None:
        """Look once."""
        import psutil

        found = {"the analyst": [psutil.Process()]}
        found |= self.jobs("the server", SERVER) | self.jobs("a site", site_of(0))
        processes = [p.pid for name, p in self.place.processes.items() if name.startswith("silos")]
        found["a process with silos"] = [psutil.Process(pid) for pid in processes]
        for name, of_it in found.items():
            for process in of_it:
                try:
                    size = process.memory_info().rss / 1e6
                except psutil.NoSuchProcess:
                    continue
                self.peak[name] = round(max(size, self.peak.get(name, 0.0)), 1)

    def jobs(self, whose: str, name: str) -> dict[str, list[Any]]:
        """Return the processes of NVFLARE at a party, and those of its jobs, apart."""
        found = of_folder(self.place.kit(name))
        in_job = [p for p in found if "_process" in " ".join(p.cmdline())]
        return {f"{whose}, its job": in_job, whose: [p for p in found if p not in in_job]}


def timed(before: Callable[[list[str]], None]) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    """Note how long each exchange takes, and do something before each; return notes and an end."""
    exchanges: list[dict[str, Any]] = []
    federation: Any = Federation
    ask = federation.ask

    def noted(self: Any, who: Any, messages: Any, exchange: str) -> list[bytes]:
        note = {"exchange": exchange, "silos": len(who), "bytes": max(map(len, messages))}
        exchanges.append(note)
        before([note["exchange"] for note in exchanges])
        began = time.perf_counter()
        try:
            return ask(self, who, messages, exchange)
        except nf.SilosError as error:
            note["without"] = f"{error}"
            raise
        finally:
            note["seconds"] = round(time.perf_counter() - began, 3)

    def end() -> None:
        federation.ask = ask

    federation.ask = noted
    return exchanges, end


def fit(
    engine: Flare, patience: float, log: Path, before: Callable[[list[str]], None]
) -> tuple[dict[str, Any], Any]:
    """Fit over all silos, and say how it went."""
    exchanges, end = timed(before)
    options: dict[str, Any] = dict(missing="leave_out", patience=patience, key=ANALYST, log=log)
    there = Federation(
        engine,
        names={"model": model},
        silo_names=engine.sites,
        **options,
    )
    began = time.perf_counter()
    try:
        fitted = nf.fit(KEY, model, there, progress_bar=False)
    finally:
        end()
    sent = [json.loads(line) for line in log.read_text().splitlines()]
    answered = [line for line in sent if "away" not in line]
    whole = [note["seconds"] for note in exchanges if "without" not in note]
    found = {
        "seconds": round(time.perf_counter() - began, 1),
        "trusted": fitted.trusted,
        "verdict": fitted.verdict,
        "exchanges": len(exchanges),
        "seconds of an exchange, median": float(np.median(whole)),
        "seconds of a message, median by silo": {
            site: round(float(np.median([m["seconds"] for m in answered if m["silo"] == j])), 3)
            for j, site in enumerate(engine.sites)
            if any(m["silo"] == j for m in answered)
        },
        "bytes to a silo, at most": max(line["sent"] for line in sent),
        "bytes from a silo, at most": max(line["received"] for line in answered),
        "each": exchanges,
    }
    return found, fitted


def measure(num_sites: int, patience: float, delay: float, clock: float) -> dict[str, Any]:
    """Return all that is measured."""
    sites = [site_of(j) for j in range(num_sites)]
    slow, off, dies = num_sites - 3, num_sites - 2, num_sites - 1
    ordinary = [*range(slow), dies]
    report: dict[str, Any] = {"sites": num_sites, "delay": delay, "clock": clock}
    with short_folder() as folder, Sites(folder, sites=sites) as place:
        began = time.perf_counter()
        for part in range(PROCESSES):
            place.start_silos(f"silos {part}", ordinary[part::PROCESSES], 0.0, 0.0)
        place.start_silos("silos that are slow", [slow], delay, 0.0)
        place.start_silos("silos of another clock", [off], 0.0, clock)
        place.wait_for_silos()
        report["seconds until the silos listen"] = round(time.perf_counter() - began, 1)
        memory = Memory(place)
        memory.start()
        began = time.perf_counter()
        for name in (SERVER, *sites):
            place.start_nvflare(name)
        with Flare(place.kit(USER), sites, patience=600, wait_for_sites=30.0) as engine:
            report["seconds until the job runs"] = round(time.perf_counter() - began, 1)
            say(report)
            job, dead = engine._job, list[str]()

            def die(names: list[str]) -> None:
                name, number = DIES_BEFORE
                if names[-1] == name and names.count(name) == number and not dead:
                    dead.append(sites[dies])
                    place.kill_nvflare(sites[dies])

            first, fitted = fit(engine, patience, place.folder / "first.jsonl", die)
            report["a site dies"] = first | {"the same job": engine._job is job}
            say(first)
        began = time.perf_counter()
        with Flare(place.kit(USER), sites, patience=600, wait_for_sites=10.0) as engine:
            report["seconds until a job runs without a site"] = round(
                time.perf_counter() - began, 1
            )
            report["without"] = sorted(engine._job.without) if engine._job else []
            second, _ = fit(engine, 40.0, place.folder / "second.jsonl", lambda names: None)
            report["without a site"] = second
            say(second)
            memory.look()
            memory.ended.set()
        report["MB at most"] = memory.peak
    others = [rows(number) for number in range(num_sites) if number != dies]
    here = nf.fit(KEY, model, others, progress_bar=False)
    report["trusted in one process"] = here.trusted
    report["largest difference to one process, in sds"] = difference(fitted, here)
    return report


def difference(fitted: Any, here: Any) -> float:
    """Return the largest difference of two posteriors' means, in sds of the second."""
    found = []
    ours, theirs = (one.sample_posterior(KEY, 2_000) for one in (fitted, here))
    for name in ("beta", "mean", "sd"):
        a, b = np.asarray(ours[name]), np.asarray(theirs[name])
        found.append(np.abs(a.mean(0) - b.mean(0)) / b.std(0))
    return float(max(np.max(one) for one in found))


def say(found: dict[str, Any]) -> None:
    """Print what was found so far."""
    short = {name: value for name, value in found.items() if name != "each"}
    print(json.dumps(short, indent=1), file=sys.stderr, flush=True)


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    first, second, memory = report["a site dies"], report["without a site"], report["MB at most"]
    ends = report["seconds until the job runs"], report["seconds until a job runs without a site"]
    found = [
        table_row("NVFLARE's processes start, and a job over all sites runs", f"{ends[0]:.0f} s"),
        table_row("another job begins without the dead site", f"{ends[1]:.0f} s"),
    ]
    dies = "a site dies once all have described their data"
    for name, one in ((dies, first), ("without it from the start", second)):
        lost = [note["seconds"] for note in one["each"] if "without" in note]
        words = f"{one['seconds']:.0f} s, {sum(lost):.0f} s of it waiting for the dead site; "
        words += f"{one['exchanges']} exchanges; {'' if one['trusted'] else '**not** '}trusted"
        found.append(table_row(f"`nf.fit`, {name}", words))
    apart = f"{report['largest difference to one process, in sds']:.0e} sd"
    found.append(table_row("means of the first, against one process, at most", apart))
    medians = [
        (
            one["seconds of an exchange, median"],
            float(np.median(list(one["seconds of a message, median by silo"].values()))),
        )
        for one in (first, second)
    ]
    words = " and ".join(f"{whole:.1f} s" for whole, _ in medians)
    slow = f"{report['delay']:g} s: the slow silo's own"
    found.append(table_row("an exchange in these fits, median", words, slow))
    words = " and ".join(f"{part:.1f} s" for _, part in medians)
    found.append(table_row("a message and its reply in it, median of the silos", words))
    for party in ("the server", "a site"):
        words = f"{memory[party]:.0f} MB, and {memory[f'{party}, its job']:.0f} MB of its job"
        found.append(table_row(f"memory of NVFLARE at {party}, at most", words))
    words = f"{memory['the analyst']:.0f} MB"
    return [*found, table_row("memory of the analyst's process, at most", words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file for the report")
    parser.add_argument("--sites", type=int, default=30)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for the dead site")
    parser.add_argument("--delay", type=float, default=3.0, help="seconds of the slow silo")
    parser.add_argument("--clock", type=float, default=-3600.0, help="seconds of the wrong clock")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        folder, delay, clock, *numbers = args.serve
        serve(Path(folder), float(delay), float(clock), list(map(int, numbers)))
        return
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    logging.getLogger("jax").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    report = measure(args.sites, args.patience, args.delay, args.clock)
    print(json.dumps(report, indent=2))
    if args.json is not None:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
