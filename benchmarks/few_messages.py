"""How many messages, effective draws and seconds ``nf.fit`` takes on models with latents.

The six cities in 2 and in 18 silos; a registry of six hospitals with 10 to 5,000 patients, raw
covariates and an effect for each hospital; another with two correlated effects, on the intercept
and on sex. Each is fitted in a process that has compiled nothing,
then again with another key. NUTS sees all rows. Errors are of means, in NUTS's sds; ratios of sds;
the worst over all globals, unconstrained.

    python benchmarks/few_messages.py --json few_messages.json

``--models six2,registry`` takes some; ``--quick`` takes a short NUTS. ``--rounds`` measures instead
1,000 rounds of SFVI and 4 of PVI by default, on the registry and on Poisson counts with an effect
for each row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import distance, table_row, write

import numpyro_fed as nf

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import six_cities

SIZES = (10, 60, 200, 800, 2_000, 5_000)


def registry(x: Any, hospital: Any, n_hospitals: int, y: Any = None) -> None:
    """Whether a patient is readmitted; an effect for each hospital."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + u[hospital]), obs=y)


def pair_registry(x: Any, hospital: Any, n_hospitals: int, y: Any = None) -> None:
    """The same with two correlated effects of each hospital, on the intercept and on sex."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.MultivariateNormal(0, scale_tril=tau[:, None] * root))
    with nf.silo_plate("patient", x.shape[0]):
        eta = x @ beta + u[hospital, 0] + u[hospital, 1] * x[:, 3]
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def hospitals(slope: float = 0.0) -> list[dict[str, Any]]:
    """One silo for each hospital: age in years, a value of about 90, sex, days in hospital."""
    r = np.random.default_rng(0)
    silos = []
    slopes = slope * np.random.default_rng(1).normal(0, 1, len(SIZES))
    for n, u, v in zip(SIZES, r.normal(0, 0.7, len(SIZES)), slopes, strict=True):
        columns = (
            r.uniform(30, 90, n),
            r.lognormal(4.5, 0.3, n),
            r.integers(0, 2, n),
            r.gamma(2, 4, n),
        )
        x = np.stack([np.ones(n), *columns], 1)
        p = 1 / (1 + np.exp(-(x @ [-4, 0.04, 0.008, 0.3, 0.05] + u + v * x[:, 3])))
        y = r.binomial(1, p)
        silos.append(dict(x=x, hospital=np.zeros(n, int), n_hospitals=1, y=y))
    return silos


def in_silos(number: int) -> list[dict[str, np.ndarray]]:
    """The 537 children in silos of about equal sizes."""
    sizes = np.diff(np.linspace(0, 537, number + 1).astype(int))
    return six_cities.silos(tuple(sizes))


def counts(x: Any, y: Any = None) -> None:
    """Counts with more variance than a Poisson distribution has: an effect for each row."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with nf.silo_plate("row", x.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x + u)), obs=y)


def count_silos() -> list[dict[str, np.ndarray]]:
    """Three silos of 30, 80 and 190 rows."""
    r = np.random.default_rng(3)
    silos = []
    for n in (30, 80, 190):
        x = r.normal(0, 1, n)
        silos.append(dict(x=x, y=r.poisson(np.exp(1.0 + 0.5 * x + r.normal(0, 0.8, n)))))
    return silos


MODELS: dict[str, Any] = {
    "six2": (six_cities.model, lambda: six_cities.silos()),
    "six18": (six_cities.model, lambda: in_silos(18)),
    "registry": (registry, hospitals),
    "pair": (pair_registry, lambda: hospitals(0.5)),
}
BY_ROUNDS: dict[str, Any] = {"registry": MODELS["registry"], "counts": (counts, count_silos)}


def unconstrained(draws: dict[str, Any]) -> np.ndarray:
    """The globals as columns (n, dim), tau by its logarithm, a root of a correlation by atanh."""
    columns = {k: np.log(v) if k == "tau" else v for k, v in draws.items()}
    if "root" in columns:
        columns["root"] = np.arctanh(np.asarray(columns["root"], float)[:, 1, 0])
    return np.column_stack([np.asarray(columns[k], float) for k in sorted(columns)])


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Return what one model took, in this process."""
    model, make = MODELS[name]
    silos, found = make(), {}
    for call in ("first", "second"):
        wall, cpu = time.perf_counter(), time.process_time()
        fitted = nf.fit(jax.random.key(len(found)), model, silos, progress_bar=False)
        found |= {
            f"{call}_seconds": time.perf_counter() - wall,
            f"{call}_cpu": time.process_time() - cpu,
            f"{call}_exchanges": fitted.num_exchanges,
            f"{call}_trusted": fitted.trusted,
        }
    share = fitted.corrected.ess / len(fitted.corrected.weights)
    draws = unconstrained(fitted.sample_posterior(jax.random.key(1), 100_000))
    wall, cpu = time.perf_counter(), time.process_time()
    short, full = dict(num_warmup=50, num_samples=50), dict(num_samples=2_500, num_chains=4)
    steps = short if quick else full
    nuts = nf.run_nuts(jax.random.key(2), model, silos, progress_bar=False, **steps)
    found |= dict(nuts_seconds=time.perf_counter() - wall, nuts_cpu=time.process_time() - cpu)
    merged = {k: np.reshape(v, (-1, *np.shape(v)[2:])) for k, v in nuts.globals.items()}
    reference = unconstrained(merged)
    sd = reference.std(0)
    ratios = draws.std(0) / sd
    error = np.abs(draws.mean(0) - reference.mean(0)) / sd
    return found | dict(
        share=share, error=error.max(), ratios=[ratios.min(), ratios.max()], model=name
    )


def measure_rounds(quick: bool) -> list[dict[str, Any]]:
    """Return the errors of SFVI and PVI with their defaults, in this process."""
    steps = dict(num_warmup=50, num_samples=50) if quick else dict(num_samples=2_500, num_chains=4)
    rows = []
    for name, (model, make) in BY_ROUNDS.items():
        silos = make()
        nuts = nf.run_nuts(jax.random.key(2), model, silos, progress_bar=False, **steps)
        merged = {k: np.reshape(v, (-1, *np.shape(v)[2:])) for k, v in nuts.globals.items()}
        reference = unconstrained(merged)
        sd = reference.std(0)
        for method, rounds in ((nf.SFVI(model), 1_000), (nf.PVI(model), 4)):
            result = method.run(jax.random.key(0), rounds, silos, progress_bar=False)
            draws = unconstrained(result.sample_posterior(jax.random.key(1), 100_000))
            error = np.abs(draws.mean(0) - reference.mean(0)) / sd
            ratios = draws.std(0) / sd
            row = dict(model=name, method=type(method).__name__, rounds=rounds, error=error.max())
            rows.append(row | dict(ratios=[ratios.min(), ratios.max()]))
            print(
                f"{name:9} {row['method']:5} {rounds:5} rounds, error {error.max():.3f} sd, ratios "
                f"{ratios.min():.3f} to {ratios.max():.3f}",
                flush=True,
            )
    return rows


def lines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for r in found:
        error = distance(r["error"], r["ratios"])
        if "method" in r:
            what = f"{r['model']}: {r['method']}, {r['rounds']} rounds"
            rows.append(table_row(what, error, "NUTS", "0.1 sd, 0.9 to 1.1"))
            continue
        number = f"{r['first_exchanges']} and {r['second_exchanges']}"
        rows.append(table_row(f"{r['model']}: exchanges, two calls", number, "", "at most 10"))
        words = f"{error}, {r['share']:.0%} of the draws count"
        rows.append(table_row(f"{r['model']}: error", words, "NUTS", "0.1 sd, 0.9 to 1.1"))
        seconds = f"{r['first_cpu']:.1f} and {r['second_cpu']:.1f} s of CPU"
        nuts = f"{r['nuts_cpu']:.1f} s, NUTS"
        rows.append(table_row(f"{r['model']}: two calls", seconds, nuts))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", action="store_true", help="SFVI and PVI in the place of nf.fit")
    parser.add_argument("--one", action="store_true", help="the model in this process, as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.models, args.quick), default=float))
        return
    if args.rounds:
        rows = measure_rounds(args.quick)
        if args.json:
            write(args.json, lines(rows), details=rows)
        return
    rows = []
    print("model     exchanges  effective  error (sd)  sd ratios    seconds     CPU        NUTS")
    for name in args.models.split(","):
        command = [sys.executable, __file__, "--one", "--models", name]
        command += ["--quick"] if args.quick else []
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(r := json.loads(done.stdout.splitlines()[-1]))
        print(
            f"{name:9} {r['first_exchanges']:3}, {r['second_exchanges']:3}   {r['share']:8.0%}  "
            f"{r['error']:9.3f}  {r['ratios'][0]:.3f} {r['ratios'][1]:.3f}  "
            f"{r['first_seconds']:5.1f}, {r['second_seconds']:4.1f}  "
            f"{r['first_cpu']:5.1f}, {r['second_cpu']:4.1f}  "
            f"{r['nuts_seconds']:.1f} ({r['nuts_cpu']:.1f} CPU)",
            flush=True,
        )
    if args.json:
        write(args.json, lines(rows), details=rows)


if __name__ == "__main__":
    main()
