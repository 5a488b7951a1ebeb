"""Memory and time of SFVI with many silos: 1,000 silos of 1,000 rows and 20 covariates.

A logistic regression with one intercept for each silo, a million rows in all, fitted by the default
guide. Reports seconds for one iteration, the loss at the start and at the end, and the peak memory
of the whole process, which is to stay below 2 GiB; for ten thousand silos below 4 GiB.

With ``--devices`` the silos are spread over so many devices, which a CPU pretends to have; the
report then has the all-reduces in the program of a round, and the losses for a comparison.

Run it from anywhere::

    python benchmarks/scale.py
    python benchmarks/scale.py --silos 10000 --iterations 20
    python benchmarks/scale.py --devices 4 --json scale.json
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from record import table_row, write

import numpyro_fed as nf

TARGET_GIB = 2.0


def model(x, y=None):
    """Logistic regression with one intercept for all rows of a silo."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[-1]]).to_event(1))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 1))
    with nf.silo_plate("silo", 1):
        u = numpyro.sample("u", dist.Normal(0, jnp.exp(log_sigma)))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + u[0]), obs=y)


def simulate(silos: int, rows: int, covariates: int = 20) -> list[dict[str, Any]]:
    r = np.random.default_rng(0)
    beta = r.normal(size=covariates).astype(np.float32) / np.sqrt(covariates)
    made = []
    for _ in range(silos):
        x = r.standard_normal((rows, covariates), dtype=np.float32)
        logits = x @ beta + 0.7 * r.normal()
        made.append(dict(x=x, y=(r.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)))
    return made


def peak_gib() -> float:
    """Largest memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--silos", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=1_000, help="of each silo")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--devices", type=int, help="spread the silos over so many devices")
    args = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={args.devices}"
    if args.devices and flag not in os.environ.get("XLA_FLAGS", ""):
        # JAX reads the number once, before anything is computed: start again with it.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    silos, rows, rounds = args.silos, args.rows, args.iterations
    if args.quick:
        silos, rows, rounds = 20, 50, 10
    imported = peak_gib()
    data = simulate(silos, rows)
    with_data = peak_gib()
    sfvi = nf.SFVI(model, optim=optax.adam(0.02), start=None)
    began = time.perf_counter()
    first = sfvi.run(jax.random.key(0), 1, data, progress_bar=False)
    first_call = time.perf_counter() - began
    losses, state, seconds = [first.losses], first.state, []
    del first  # a result holds its silos' data on the device
    for _ in range(2):
        began = time.perf_counter()
        result = sfvi.run(
            jax.random.key(0), rounds // 2, data, init_state=state, progress_bar=False
        )
        seconds.append((time.perf_counter() - began) / (rounds // 2))
        losses.append(result.losses)
        beta = result.sample_posterior(jax.random.key(1), 1_000)["beta"].mean(0)
        state, advance, batches = result.state, result._fit.runtime.advance, result._silos.batches
        peak = peak_gib()
        lowered = advance.lower(jax.random.key(0), state, batches, rounds // 2)
        del result, batches
    program = lowered.compile().as_text()
    losses = np.concatenate(losses)
    truth = np.random.default_rng(0).normal(size=20).astype(np.float32) / np.sqrt(20)
    report = {
        "silos": silos,
        "rows": rows,
        "covariates": data[0]["x"].shape[1],
        "data_gib": sum(a.nbytes for s in data for a in s.values()) / 2**30,
        "iterations": len(losses),
        "seconds_first_call": first_call,
        "seconds_per_iteration": min(seconds),
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-10:].mean()),
        "largest_error_of_beta": float(abs(beta - truth).max()),
        "peak_gib_after_imports": imported,
        "peak_gib_after_data": with_data,
        "peak_gib": peak,
        "target_gib": TARGET_GIB if silos < 10_000 else 2 * TARGET_GIB,
        "devices": len(jax.devices()),
        "all_reduces": program.count(" all-reduce("),
        "losses": losses.tolist(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "jax": jax.__version__,
    }
    for name, value in report.items():
        if name == "losses":
            continue
        print(f"{name:>24}  {value:.4g}" if isinstance(value, float) else f"{name:>24}  {value}")
    if args.json:
        what = f"{silos:,} silos of {rows:,} rows"
        lines = [
            table_row(f"{what}: peak memory", f"{peak:.2f} GiB", "", f"{report['target_gib']} GiB"),
            table_row(f"{what}: an iteration", f"{1e3 * min(seconds):.1f} ms"),
            table_row(f"{what}: all-reduces in a program", report["all_reduces"]),
        ]
        write(args.json, lines, details=report)


if __name__ == "__main__":
    main()
