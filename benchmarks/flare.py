"""Over NVFLARE: seconds of an exchange by size, and until a run goes on after a death.

A server and three sites with certificates (mTLS) on the loopback device; in the place of silos,
processes that reply with what they are told, so that no time is that of a model. Then ``nf.fit`` of
the six cities over three sites, against the same in one process, both warm.

    python benchmarks/flare.py [--json report.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from flare_place import ANALYST, SERVER, SITES, USER, Place, of_folder
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.network import Flare
from numpyro_fed.network.engines import short_folder
from numpyro_fed.network.study_files import load_file
from numpyro_fed.rounds.federation import FIRST_WAIT, LONGEST_WAIT

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "six_cities.py"
SIX_CITIES = (180, 179, 178)  # children at each site
SIZES = (100, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)


def exchange(engine: Flare, message: bytes) -> None:
    """Ask all silos at once, each again until it replies, as a federation does."""

    def ask(silo: int) -> bytes:
        wait = FIRST_WAIT
        while True:
            try:
                return engine.send(silo, message, 600.0)
            except OSError:
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    with ThreadPoolExecutor(engine.num_silos) as pool:
        for reply in pool.map(ask, range(engine.num_silos)):
            if reply != message:
                raise RuntimeError("the reply is not the message")


def seconds(engine: Flare, size: int, *, all_silos: bool) -> float:
    """The median of several exchanges, with one silo or with all at once."""
    message, taken = np.random.default_rng(0).bytes(size), []
    for _ in range(3 if size > 1_000_000 else 15):
        began = time.perf_counter()
        if all_silos:
            exchange(engine, message)
        else:
            engine.send(0, message, 600.0)
        taken.append(time.perf_counter() - began)
    return round(float(np.median(taken)), 4)


def jobs_of(place: Place, name: str) -> list:
    """The processes of jobs at the server or a site."""
    words = ("runner_process", "worker_process")
    return [p for p in of_folder(place.kit(name)) if any(w in " ".join(p.cmdline()) for w in words)]


def after(engine: Flare, fault: Callable[[], object]) -> dict[str, object]:
    """What follows a death: seconds until all silos have replied, and whether the job is another.

    The first exchange is under way when it happens: each silo takes three seconds to reply.
    """
    job = engine._job
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(exchange, engine, b"wait 3 " + os.urandom(10))
        time.sleep(1)
        began = time.perf_counter()
        fault()
        under_way.result()
    taken = time.perf_counter() - began
    return {"seconds": round(taken, 1), "new_job": engine._job is not job}


def deaths(place: Place, engine: Flare) -> dict[str, dict[str, object]]:
    """Kill what can die, one after the other."""

    def silo() -> None:
        place.kill_silo(1)
        place.start_echo(1)

    def site() -> None:
        place.kill_nvflare(SITES[1])
        place.start_nvflare(SITES[1])

    def site_for_a_while() -> None:
        place.kill_nvflare(SITES[1])
        time.sleep(60)
        place.start_nvflare(SITES[1])

    def server() -> None:
        place.kill_nvflare(SERVER)
        place.start_nvflare(SERVER)

    def jobs(name: str) -> Callable[[], None]:
        def kill() -> None:
            for process in jobs_of(place, name):
                process.kill()

        return kill

    faults = {
        "silo, started again at once": silo,
        "job process of a site": jobs(SITES[0]),
        "a site, started again at once": site,
        "a site, started again after 60 s": site_for_a_while,
        "job process of the server": jobs(SERVER),
        "the server, started again at once": server,
        "the analyst's session": lambda: engine._session.close(),
    }
    found = {}
    for name, fault in faults.items():
        found[name] = after(engine, fault)
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def fits() -> dict[str, object]:
    """Seconds of ``nf.fit`` over three sites and in one process, warm."""
    # A benchmark has the same name as the example.
    six_cities = load_file(EXAMPLE)
    data = [
        "import os",
        "from numpyro_fed.network.study_files import load_file",
        "def silo():",
        f"    silos = load_file({str(EXAMPLE)!r}).silos({SIX_CITIES})",
        "    return silos[int(os.environ['NUMPYRO_FED_SILO'])]",
    ]
    with short_folder() as folder:
        file = Path(folder) / "data.py"
        file.write_text("\n".join(data))
        with Place(folder, EXAMPLE, file) as place:
            place.start_all()
            with Flare(place.kit(USER), SITES, patience=300) as engine:
                there = nf.Federation(
                    engine, names={"model": six_cities.model}, patience=300, key=ANALYST
                )
                silos = {"over three sites": there, "in one process": six_cities.silos(SIX_CITIES)}
                taken: dict[str, list[float]] = {name: [] for name in silos}
                for key in range(6):
                    for name, where in silos.items():
                        began = time.perf_counter()
                        fitted = nf.fit(
                            jax.random.key(key), six_cities.model, where, progress_bar=False
                        )
                        taken[name].append(time.perf_counter() - began)
    # The first call compiles.
    medians = {name: float(np.median(times[1:])) for name, times in taken.items()}
    allowed = 1.5 * medians["in one process"] + 0.03 * fitted.num_exchanges
    return {"seconds": medians, "all": taken, "exchanges": fitted.num_exchanges, "allowed": allowed}


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    targets = {10_000: "0.03 s", 10_000_000: "0.6 s"}
    rows = [
        table_row(
            f"an exchange of {r['bytes']:,} bytes, one silo and three",
            f"{r['one_silo']:.3f} and {r['three_silos']:.3f} s",
            target=targets.get(r["bytes"], ""),
        )
        for r in report["exchange"]
    ]
    for name, seconds in report.get("after_the_death_of", {}).items():
        rows.append(table_row(f"goes on after the death of: {name}", str(seconds), unit="s"))
    if fits := report.get("nf.fit of the six cities"):
        where = fits["seconds"]
        words = f"{where['over three sites']:.1f} s over three sites"
        one = f"{where['in one process']:.1f} s in one process"
        rows.append(table_row("nf.fit of the six cities", words, one, f"{fits['allowed']:.1f} s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file for the report")
    parser.add_argument("--quick", action="store_true", help="small messages, and no deaths")
    args = parser.parse_args()
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)
    with short_folder() as folder, Place(folder) as place:
        place.start_all(place.start_echo)
        began = time.perf_counter()
        with Flare(place.kit(USER), SITES, patience=300) as engine:
            report: dict[str, Any] = {"job_starts": round(time.perf_counter() - began, 1)}
            engine.send(0, b"first", 60.0)
            sizes = SIZES[:3] if args.quick else SIZES
            report["exchange"] = [
                {
                    "bytes": size,
                    "one_silo": seconds(engine, size, all_silos=False),
                    "three_silos": seconds(engine, size, all_silos=True),
                }
                for size in sizes
            ]
            if not args.quick:
                report["after_the_death_of"] = deaths(place, engine)
    if not args.quick:
        report["nf.fit of the six cities"] = fits()
    print(json.dumps(report, indent=2))
    if args.json is not None:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
