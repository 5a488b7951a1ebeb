"""What a round of PVI costs when few of many silos take part.

Logistic regression; 10 participants a round at random out of 1,000 silos, against all of 10 silos,
which have as many rows each. The two take turns, so that whatever else the machine does falls on
both; the table shows medians. A round should cost what its participants cost.

Run it with nothing else running::

    python benchmarks/pvi_rounds.py --json pvi_rounds.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import optax
from pvi_step import logistic, rows
from record import machine, table_row, write
from sfvi_vs_pooled import alternate

import numpyro_fed as nf

KEY = jax.random.key(0)


def rounds_of(silos: list[dict[str, Any]], schedule: Any, steps: int, n: int) -> Callable[[], Any]:
    """``n`` rounds over some silos."""
    local = nf.local.Optax(optim=optax.adam(1e-2), steps=steps)
    pvi = nf.PVI(logistic, schedule=schedule, local=local, evidence_draws=4, start=None)
    fit, held = pvi._compiled_for(silos, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    return lambda: fit.runtime.advance(KEY, state, held.batches, n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--rows", type=int, default=200, help="of each silo")
    args = parser.parse_args()
    many, steps, n, repeats = (30, 5, 1, 1) if args.quick else (1_000, 100, 5, 11)
    silos = rows(many, args.rows, 20, 2)
    what = {
        f"{many:,} silos, 10 take part": rounds_of(silos, nf.schedules.Random(10), steps, n),
        "10 silos, all take part at random": rounds_of(
            silos[:10], nf.schedules.Random(10), steps, n
        ),
        "10 silos, synchronous": rounds_of(silos[:10], "synchronous", steps, n),
    }
    times = alternate(list(what.values()), repeats)
    each = {name: 1e3 * median(t) / n for name, t in zip(what, times, strict=True)}
    first, second, third = each.values()
    ratios = {"to at random": first / second, "to synchronous": first / third}
    for name, ms in each.items():
        print(f"{name}: {ms:.2f} ms a round")
    print(f"ratio {ratios['to at random']:.2f} and {ratios['to synchronous']:.2f} (target 1.3)")
    print(machine())
    if args.json:
        report = {"machine": machine(), "rounds_ms": each, "ratios": ratios, "target": 1.3}
        (name, ours), *others = each.items()
        found = [
            table_row(
                f"a round, {name}", f"{ours:.2f} ms", f"{ms:.2f} ms: {other}", "ratio at most 1.3"
            )
            for other, ms in others
        ]
        write(args.json, found, details=report)


if __name__ == "__main__":
    main()
