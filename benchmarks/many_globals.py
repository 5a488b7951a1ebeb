"""Full covariances of many globals, against NUTS: SFVI, and PVI after one and three rounds.

Logistic regression, 2,000 rows in 10 silos, every method with its defaults. The globals' Gaussian
has a full covariance up to 300 dimensions, 45,150 parameters, and each of them takes Adam's steps.

    python benchmarks/many_globals.py --json many_globals.json
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from pvi_step import logistic
from record import distance, machine, table_row, write

import numpyro_fed as nf

KEY = jax.random.key(0)


def made_up(n: int, dim: int, silos: int) -> list[dict[str, np.ndarray]]:
    """Rows of ``dim`` covariates, and labels of a regression on them."""
    r = np.random.default_rng(0)
    x, w = r.normal(size=(n, dim)), r.normal(size=dim) / np.sqrt(dim)
    y = r.binomial(1, 1 / (1 + np.exp(-x @ w)))
    cut = (np.split(a.astype(np.float32), silos) for a in (x, y))
    return [dict(x=a, y=b) for a, b in zip(*cut, strict=True)]


def measure(dim: int, n: int, rounds: int, draws: int) -> list[dict[str, Any]]:
    """Every method's seconds, compilation included, and its distance from NUTS."""
    silos, quiet = made_up(n, dim, 10), dict(progress_bar=False)
    optim = optax.adam(optax.cosine_decay_schedule(1e-2, rounds, 0.01))
    methods = {
        f"SFVI, {rounds:,} rounds": (nf.SFVI(logistic, optim=optim, start=None), rounds),
        "PVI, 1 round": (nf.PVI(logistic, start=None), 1),
        "PVI, 3 rounds": (nf.PVI(logistic, start=None), 3),
    }
    began = time.perf_counter()
    nuts = nf.run_nuts(KEY, logistic, silos, num_samples=draws, **quiet)
    seconds, effective = time.perf_counter() - began, float(np.min(nuts.ess()["w"]))
    print(f"{dim} globals: NUTS {seconds:.0f} s, at least {effective:.0f} effective draws")
    fits = []
    for name, (method, times) in methods.items():
        began = time.perf_counter()
        result = method.run(KEY, times, silos, **quiet)
        seconds = time.perf_counter() - began
        site = nf.compare(result, nuts).to_dict()["sites"]["w"]
        error, ratio = float(np.max(site["mean_error_sd"])), site["sd_ratio"]
        low, high = float(np.min(ratio)), float(np.max(ratio))
        print(
            f"  {name}: {seconds:.0f} s; worst error {error:.2f} sd, ratios {low:.2f} to {high:.2f}"
        )
        fit = dict(globals=dim, fit=name, seconds=seconds, mean_error_sd=error)
        fits.append(fit | dict(sd_ratio=[low, high], nuts_ess=effective))
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    dims, *settings = ((4,), 60, 50, 50) if args.quick else ((100, 300), 2_000, 5_000, 4_000)
    fits = [fit for dim in dims for fit in measure(dim, *settings)]
    print(machine())
    if args.json:
        rows = [
            table_row(
                f"{fit['globals']} globals, {fit['fit']}",
                f"{distance(fit['mean_error_sd'], fit['sd_ratio'])}, {fit['seconds']:.0f} s",
                f"NUTS, at least {fit['nuts_ess']:,.0f} effective draws",
            )
            for fit in fits
        ]
        write(args.json, rows, details={"machine": machine(), "fits": fits})


if __name__ == "__main__":
    main()
