"""Posteriors of posteriordb, nothing scaled: what defaults make of them.

Three data sets and, for fourteen posteriors, means and sds of Stan's gold-standard draws. Rows are
sorted by the first column after the ones and cut at 50 and 80 %, so that the three silos are
unlike. Methods: ``mode``, the normal distribution at the mode with the inverse of the curvature
there, in unconstrained space; ``sfvi``, 1,000 rounds; ``pvi``, 3 rounds; ``fit``, one call. Errors
are of the mean, in the reference's sds, and ratios of sds, the worst over all globals.

    python benchmarks/posteriordb.py --data posteriordb_some.npz --method pvi --json pvi.json
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import distance, table_row, write

import numpyro_fed as nf

DRAWS = 100_000
Columns = Mapping[str, np.ndarray]


def model(x: Any, y: Any = None, *, half_cauchy: bool) -> None:
    """A regression; the coefficients are flat, and so is sigma where it is not half-Cauchy."""
    real, positive = dist.constraints.real_vector, dist.constraints.positive
    beta = numpyro.sample("beta", dist.ImproperUniform(real, (), (x.shape[-1],)))
    flat = dist.ImproperUniform(positive, (), ())
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5) if half_cauchy else flat)
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def interaction(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    return [a, b, a * b]


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean()


def standardised(x: np.ndarray) -> np.ndarray:
    return centred(x) / (2 * x.std(ddof=1))


def logs(d: Columns) -> list[np.ndarray]:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    return [*(np.log(d[name]) for name in names), d["group"]]


def volume(d: Columns) -> np.ndarray:
    return np.log(d["diam1"] * d["diam2"] * d["canopy_height"])


def area(d: Columns) -> np.ndarray:
    return np.log(d["diam1"] * d["diam2"])


def shape(d: Columns) -> np.ndarray:
    return np.log(d["diam1"] / d["diam2"])


KIDS: dict[str, Callable[[Columns], list[np.ndarray]]] = {
    "kidscore_momhs": lambda d: [d["mom_hs"]],
    "kidscore_momiq": lambda d: [d["mom_iq"]],
    "kidscore_momhsiq": lambda d: [d["mom_hs"], d["mom_iq"]],
    "kidscore_interaction": lambda d: interaction(d["mom_hs"], d["mom_iq"]),
    "kidscore_interaction_c": lambda d: interaction(centred(d["mom_hs"]), centred(d["mom_iq"])),
    "kidscore_interaction_c2": lambda d: interaction(d["mom_hs"] - 0.5, d["mom_iq"] - 100),
    "kidscore_interaction_z": lambda d: interaction(
        standardised(d["mom_hs"]), standardised(d["mom_iq"])
    ),
    "kidscore_mom_work": lambda d: [d["mom_work"] == k for k in (2, 3, 4)],
}
SHRUBS: dict[str, Callable[[Columns], list[np.ndarray]]] = {
    "mesquite": lambda d: [
        d[name] for name in ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    ],
    "logmesquite": logs,
    "logmesquite_logvolume": lambda d: [volume(d)],
    "logmesquite_logva": lambda d: [volume(d), area(d), d["group"]],
    "logmesquite_logvas": lambda d: [
        *(volume(d), area(d), shape(d)),
        *(np.log(d["total_height"]), np.log(d["density"]), d["group"]),
    ],
    "logmesquite_logvash": lambda d: [
        *(volume(d), area(d), shape(d)),
        *(np.log(d["total_height"]), d["group"]),
    ],
}
HALF_CAUCHY = ("kidscore_momhs", "kidscore_momiq", "kidscore_momhsiq", "kidscore_interaction")


def silos_of(data: Mapping[str, np.ndarray], name: str) -> list[dict[str, Any]]:
    """Three unlike silos."""
    of_kids = name in KIDS
    table = "mesquite" if not of_kids else "kidiq"
    table += "_with_mom_work" if name == "kidscore_mom_work" else ""
    start = f"{table}__"
    d = {k.removeprefix(start): data[k].astype(float) for k in data if k.startswith(start)}
    y = d["kid_score"] if of_kids else d["weight"] if name == "mesquite" else np.log(d["weight"])
    columns = (KIDS if of_kids else SHRUBS)[name](d)
    x = np.column_stack([np.ones(len(y)), *columns]).astype(float)
    order, n = np.argsort(x[:, 1], kind="stable"), len(y)
    parts = np.split(order, [round(0.5 * n), round(0.8 * n)])
    return [dict(x=x[i], y=y[i], half_cauchy=name in HALF_CAUCHY) for i in parts]


def against(data: Mapping[str, np.ndarray], name: str, draws: np.ndarray) -> dict[str, Any]:
    """Worst error of a mean, and the range of the ratios of sds."""
    mean, sd = (data[f"reference__{name}__{k}"] for k in ("mean", "sd"))
    ratio = draws.std(0) / sd
    return dict(
        mean_error_sd=float(np.abs((draws.mean(0) - mean) / sd).max()),
        sd_ratio=[float(ratio.min()), float(ratio.max())],
    )


def of_sites(sites: Mapping[str, Any]) -> np.ndarray:
    return np.column_stack([sites["beta"], sites["sigma"]])


def by_mode(silos: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
    found = nf.find_mode(jax.random.key(0), model, silos)
    z = np.random.default_rng(0).multivariate_normal(found.z_G, found.covariance, DRAWS)
    draws = np.column_stack([z[:, :-1], np.exp(z[:, -1])])
    return draws, dict(exchanges=found.num_exchanges, trusted=found.converged)


def by_sfvi(silos: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
    result = nf.SFVI(model).run(jax.random.key(0), 1_000, silos, progress_bar=False)
    return _of(result, 1_000)


def by_pvi(silos: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
    result = nf.PVI(model).run(jax.random.key(0), 3, silos, progress_bar=False)
    return _of(result, 3)


def _of(result: nf.Result, rounds: int) -> tuple[np.ndarray, dict[str, Any]]:
    draws = of_sites(result.sample_posterior(jax.random.key(1), DRAWS))
    return draws, dict(exchanges=result.start.num_exchanges + rounds, trusted=result.settled)


def by_fit(silos: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
    fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
    draws = of_sites(fitted.sample_posterior(jax.random.key(1), DRAWS))
    error = fitted.corrected.monte_carlo_error
    what = dict(exchanges=fitted.num_exchanges, trusted=fitted.trusted, monte_carlo_error=error)
    return draws, what | dict(verdict=fitted.verdict)


METHODS = dict(mode=by_mode, sfvi=by_sfvi, pvi=by_pvi, fit=by_fit)


def lines(report: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record: how many are right, then each."""
    errors = [
        r["mean_error_sd"] < 0.1 and min(r["sd_ratio"]) > 0.9 and max(r["sd_ratio"]) < 1.1
        for r in report.values()
    ]
    rows = [table_row("posteriors that are right", sum(errors), f"of {len(errors)}", len(errors))]
    for name, r in report.items():
        error = distance(r["mean_error_sd"], r["sd_ratio"])
        words = f"{error}, {r['exchanges']} exchanges" + ", doubted" * (not r["trusted"])
        rows.append(table_row(name, words, "Stan's draws", "0.1 sd, 0.9 to 1.1"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="posteriordb_some.npz")
    parser.add_argument("--method", choices=METHODS, default="fit")
    parser.add_argument("--posteriors", help="some of them, with commas between; else all")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    data = dict(np.load(args.data))
    report = {}
    print(f"{'posterior':24} exchanges  error (sd)  sd ratios     seconds")
    names = args.posteriors.split(",") if args.posteriors else [*KIDS, *SHRUBS]
    for name in names:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            draws, what = METHODS[args.method](silos_of(data, name))
        seconds = time.perf_counter() - began
        report[name] = r = what | dict(seconds=seconds) | against(data, name, draws)
        low, high = r["sd_ratio"]
        mark = "" if r["trusted"] else "  not settled, or not trusted"
        print(
            f"{name:24} {r['exchanges']:9}  {r['mean_error_sd']:10.3f}  {low:.3f} {high:.3f}"
            f"  {r['seconds']:8.1f}{mark}",
            flush=True,
        )
    if args.json:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
