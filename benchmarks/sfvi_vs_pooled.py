"""Time of one SFVI iteration against one of NumPyro's SVI on the pooled data.

Both sides use a mean-field normal guide, ``optax.adam(1e-2)``, the same number of particles and the
same data, and run the same number of iterations inside one compiled loop. They take turns, so that
whatever else the machine does falls on both; the table shows medians. Then whole calls of ``run``
on the six cities, compiled before, with the search for the mode at which they begin, against the
same number of pooled iterations. Last, the time to lower and compile the loop for 1,000 silos
against 2 silos of the same shape.

Run it from anywhere, with nothing else running::

    python benchmarks/sfvi_vs_pooled.py
    python benchmarks/sfvi_vs_pooled.py --repeats 31 --json speed.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from from_examples import load_example
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from record import machine, table_row, write

import numpyro_fed as nf

KEY = jax.random.key(0)


def poisson(group, n_groups, x, y=None):
    """Counts with one random intercept for each group of rows."""
    b0 = numpyro.sample("b0", dist.Normal(0, 5))
    b1 = numpyro.sample("b1", dist.Normal(0, 5))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 1))
    with nf.silo_plate("group", n_groups):
        u = numpyro.sample("u", dist.Normal(0, jnp.exp(log_sigma)))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b0 + x * b1 + u[group])), obs=y)


def poisson_silos(silos: int, rows: int = 100) -> list[dict[str, Any]]:
    r = np.random.default_rng(silos)
    made = []
    for _ in range(silos):
        x = r.normal(size=rows).astype(np.float32)
        y = r.poisson(np.exp(0.5 + 0.3 * x + 0.5 * r.normal())).astype(np.float32)
        made.append(dict(group=np.zeros(rows, np.int32), n_groups=1, x=x, y=y))
    return made


def poisson_pooled(silos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = len(silos[0]["x"])
    return dict(
        group=np.repeat(np.arange(len(silos), dtype=np.int32), rows),
        n_groups=len(silos),
        x=np.concatenate([s["x"] for s in silos]),
        y=np.concatenate([s["y"] for s in silos]),
    )


def federated(
    model: Callable, silos: Sequence[dict[str, Any]], particles: int
) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """SFVI's compiled loop: how to compile it, and how to run it for some iterations."""
    sfvi = nf.SFVI(
        model,
        optim=optax.adam(1e-2),
        guide=nf.guides.MeanField(),
        num_particles=particles,
        start=None,
    )
    fit, held = sfvi._compiled_for(silos, "simulation")
    state = fit.runtime.init(KEY, held.batches)

    def compile_(n: int) -> Any:
        return fit.runtime.advance.lower(KEY, state, held.batches, n).compile()

    def run(n: int) -> Any:
        return fit.runtime.advance(KEY, state, held.batches, n)

    return compile_, run


def pooled(model: Callable, data: dict[str, Any], particles: int) -> Callable[[int], Any]:
    """NumPyro's SVI in ``lax.scan``, with the data as an argument of the program."""
    arrays = {k: jnp.asarray(v) for k, v in data.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in data.items() if k not in arrays}

    def text(**arrays):
        return model(**arrays, **static)

    svi = SVI(text, AutoNormal(text), optax.adam(1e-2), Trace_ELBO(num_particles=particles))
    state = svi.init(KEY, **arrays)

    def many(n: int, state: Any, arrays: dict[str, Any]) -> Any:
        return jax.lax.scan(lambda s, _: svi.update(s, **arrays), state, None, length=n)

    compiled = jax.jit(many, static_argnums=0)
    return lambda n: compiled(n, state, arrays)


def alternate(runs: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each run, taking turns, after one turn that does not count."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds.append(time.perf_counter() - began)
    return times


def cases() -> list[tuple[str, float, Callable, list[dict[str, Any]], dict[str, Any], int]]:
    """What, target, model, silos, pooled data, particles."""
    six = load_example("six_cities")
    x, y = six.six_cities()
    children, two, single = dict(x=x, y=y), six.silos(), six.silos([1] * len(x))
    rows = [
        ("six cities, 2 silos (300 and 237 children)", 0.7, six.model, two, children, 1),
        ("six cities, 537 silos of one child", 1.5, six.model, single, children, 1),
    ]
    for n in (5, 50):
        silos = poisson_silos(n)
        what = f"Poisson, {n} silos x 100 rows, 5 particles"
        rows.append((what, 1.0, poisson, silos, poisson_pooled(silos), 5))
    return rows


def iteration_times(iterations: int, repeats: int, which: slice) -> list[dict[str, Any]]:
    rows = []
    for what, target, model, silos, data, particles in cases()[which]:
        _, ours = federated(model, silos, particles)
        theirs = pooled(model, data, particles)
        runs = [lambda run=run: run(iterations) for run in (ours, theirs)]
        a, b = alternate(runs, repeats)
        each = sorted(s / t for s, t in zip(a, b, strict=True))
        rows.append(
            {
                "what": what,
                "unit": "ms",
                "ours": 1e3 * median(a) / iterations,
                "pooled": 1e3 * median(b) / iterations,
                "ratio": median(a) / median(b),
                "ratio_quartiles": [each[len(each) // 4], each[-1 - len(each) // 4]],
                "target": target,
            }
        )
    return rows


def run_times(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of whole runs of SFVI on the six cities, and of pooled iterations."""
    six = load_example("six_cities")
    x, y = six.six_cities()
    silos, theirs = six.silos(), pooled(six.model, dict(x=x, y=y), 1)
    found = []
    for name, guide, target in (
        ("mean field", nf.guides.MeanField(), 0.7),
        ("default guide", None, 1.4),
    ):
        sfvi = nf.SFVI(six.model, guide=guide)

        def ours(sfvi: Any = sfvi) -> Any:
            return sfvi.run(KEY, rounds, silos, progress_bar=False).state

        a, b = map(median, alternate([ours, lambda: theirs(rounds)], repeats))
        what = f"{rounds:,} rounds with the search, {name}"
        found.append(
            {"what": what, "unit": "s", "ours": a, "pooled": b, "ratio": a / b, "target": target}
        )
    return found


def compile_times(many: int, repeats: int) -> dict[str, Any]:
    def compile_one(silos: int) -> float:
        compile_, _ = federated(poisson, poisson_silos(silos), 5)
        began = time.perf_counter()
        compile_(1)
        return time.perf_counter() - began

    counts = (many, 2)
    times: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(repeats):
        for n in counts:
            times[n].append(compile_one(n))
    a, b = (median(times[n]) for n in counts)
    return {
        "what": f"compiling SFVI's loop: {many:,} silos / 2 silos",
        "unit": "s",
        "ours": a,
        "pooled": b,
        "ratio": a / b,
        "target": 1.5,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ("what", "ours", "pooled", "ratio", "target")
    cells = [
        (
            r["what"],
            f"{r['ours']:.3f} {r['unit']}",
            f"{r['pooled']:.3f} {r['unit']}",
            f"{r['ratio']:.2f}",
            f"<= {r['target']}",
        )
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(z))
        for z in (tuple(zip(line, widths, strict=True)) for line in (header, *cells))
    )


def lines(timed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a record of times against a reference."""
    return [
        table_row(
            r["what"],
            f"{r['ours']:.3f} {r['unit']}, ratio {r['ratio']:.2f}",
            f"{r['pooled']:.3f} {r['unit']}",
            f"ratio at most {r['target']}",
        )
        for r in timed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--repeats", type=int, default=21, help="turns of each side")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    which = slice(1) if args.quick else slice(None)
    rows = iteration_times(10 if args.quick else 1_000, repeats, which)
    runs = run_times(10 if args.quick else 3_000, 1 if args.quick else 5)
    compiled = compile_times(20 if args.quick else 1_000, 1 if args.quick else 3)
    print(table([*rows, *runs, compiled]))
    print("In the last line, 'pooled' is the time for 2 silos.")
    print(machine())
    if args.json:
        report = {"machine": machine(), "iterations": rows, "runs": runs, "compilation": compiled}
        write(args.json, lines([*rows, *runs, compiled]), details=report)


if __name__ == "__main__":
    main()
