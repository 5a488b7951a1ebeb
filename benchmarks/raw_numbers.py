"""Offsets, scales and numbers of rows as people have them: is anything wrong in silence?

Each case is a model with an exact answer, whose data have an offset and a scale between 1e-8 and
1e9, drawn at random, and 10 to a million rows at two silos. One call of
:func:`numpyro_fed.fit` with defaults, in a process of single precision, is held against it:

- ``level``: mean and log sd of a normal distribution;
- ``slope``: intercept and slope of a line over a covariate with this offset and scale;
- ``clusters``: the mean of two clusters, 10^4 known sds apart;
- ``counts``: a log rate, with exposures of this scale;
- ``odds``: a logistic regression over a covariate with this offset and scale, a hundred rows at
  least.

An outcome is one of

- ``right``: every mean within 0.1 sd, every ratio of sds in [0.9, 1.1];
- ``right, said``: that too, although the verdict says not to trust it;
- ``said``: not right, and the verdict says so;
- ``refused``: an error of the package, in words;
- ``crashed``: any other exception;
- ``wrong``: not right, and trusted.

    python benchmarks/raw_numbers.py --cases 500 --out raw_numbers.jsonl
    python benchmarks/raw_numbers.py --out raw_numbers.jsonl --table

A run goes on where the file ends. Cases of the same model and number of rows share one program.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write

import numpyro_fed as nf

ROWS = {10: 0.25, 100: 0.25, 1_000: 0.2, 10_000: 0.15, 100_000: 0.1, 1_000_000: 0.05}
WIDE = 1e12  # the sd of priors of locations
DRAWS = 20_000

Exact = dict[str, tuple[float, float]]  # mean and sd by coordinate


def level(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, WIDE))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 15))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def slope(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1e18))
    b = numpyro.sample("b", dist.Normal(0, WIDE))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * x, 1.0), obs=y)


def clusters(y: Any, sd: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, WIDE * 1e4))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sd), obs=y)


def counts(exposure: Any, y: Any) -> None:
    rate = numpyro.sample("rate", dist.Normal(0, 50))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(rate)), obs=y)


def odds(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1e18))
    b = numpyro.sample("b", dist.Normal(0, WIDE))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


class Case(NamedTuple):
    """One data set: which model, and its exact posterior, each coordinate less an origin."""

    model: str
    rows: int
    offset: float
    scale: float
    data: dict[str, np.ndarray]
    exact: Exact
    origin: dict[str, float]


def by_quadrature(log_density: Callable[[np.ndarray], np.ndarray], mode: float, sd: float) -> Any:
    """Points, and weights that sum to one, of a density of one coordinate."""
    at = mode + sd * np.linspace(-12, 12, 4_001)
    logs = log_density(at)
    weights = np.exp(logs - logs.max())
    return at, weights / weights.sum()


def level_case(r: np.random.Generator, n: int, offset: float, scale: float) -> Case:
    y = offset + scale * r.normal(size=n)
    origin = float(y.mean())
    own = (y - origin).astype(np.longdouble)
    mean = float(own.mean())
    squares = float(((own - own.mean()) ** 2).sum())
    spread = 0.5 * np.log(squares / n) if squares > 0 else -400.0

    def log_density(log_sigma: np.ndarray) -> np.ndarray:
        terms = -(n - 1) * log_sigma - 0.5 * squares * np.exp(-2 * log_sigma)
        return terms - 0.5 * (log_sigma / 15) ** 2

    at, w = by_quadrature(log_density, spread, max((2 * n) ** -0.5, 0.02) if n < 99 else n**-0.5)
    middle = w @ at
    exact = {
        "mu": (mean, float(np.sqrt(w @ np.exp(2 * at) / n))),
        "log sigma": (float(middle), float(np.sqrt(w @ (at - middle) ** 2))),
    }
    return Case("level", n, offset, scale, {"y": y}, exact, {"mu": origin, "log sigma": 0.0})


def slope_case(r: np.random.Generator, n: int, offset: float, scale: float) -> Case:
    x = offset + scale * r.uniform(size=n)
    origin = float(x.mean())
    own = (x - origin).astype(np.longdouble)
    y = 3 + 2 * np.asarray(own / scale, float) + r.normal(size=n)
    own, centre = own - own.mean(), own.mean()
    squares = (own**2).sum()
    b = (own * y).sum() / squares if squares > 0 else np.longdouble(0)
    away = np.longdouble(origin) + centre
    a = y.mean() - b * away
    exact = {
        "b": (0.0, float(squares**-0.5) if squares > 0 else np.inf),
        "a": (0.0, float(np.sqrt(1 / n + away**2 / squares)) if squares > 0 else np.inf),
    }
    return Case("slope", n, offset, scale, {"x": x, "y": y}, exact, {"a": float(a), "b": float(b)})


def clusters_case(r: np.random.Generator, n: int, offset: float, scale: float) -> Case:
    y = offset + scale * (1e4 * r.binomial(1, 0.5, n) + r.normal(size=n))
    origin = float(y.mean())
    mean = float((y - origin).astype(np.longdouble).mean())
    data = {"y": y, "sd": np.full(n, scale)}
    exact = {"mu": (mean, scale / n**0.5)}
    return Case("clusters", n, offset, scale, data, exact, {"mu": origin})


def counts_case(r: np.random.Generator, n: int, offset: float, scale: float) -> Case:
    exposure = scale * r.uniform(0.5, 1.5, n)
    y = r.poisson(3 * exposure / scale) * 1.0
    total, at_risk = y.sum(), exposure.sum()

    def log_density(rate: np.ndarray) -> np.ndarray:
        return total * rate - at_risk * np.exp(rate) - 0.5 * (rate / 50) ** 2

    at, w = by_quadrature(log_density, np.log(total / at_risk), total**-0.5)
    mean = w @ at
    exact = {"rate": (0.0, float(np.sqrt(w @ (at - mean) ** 2)))}
    data = {"exposure": exposure, "y": y}
    return Case("counts", n, offset, scale, data, exact, {"rate": float(mean)})


def odds_case(r: np.random.Generator, n: int, offset: float, scale: float) -> Case:
    n = max(n, 100)
    x = offset + scale * r.integers(0, 50, n) / 50
    origin = float(x.mean())
    own = np.asarray((x - origin).astype(np.longdouble) / scale, float)
    y = r.binomial(1, 1 / (1 + np.exp(-0.5 - 2 * own)))
    # Rows of one covariate are a binomial outcome.
    level, row = np.unique(own, return_inverse=True)
    columns = np.stack([np.ones(len(level)), level])
    ones, all_ = np.bincount(row, y), np.bincount(row)
    mode = np.zeros(2)
    for _ in range(30):
        p = 1 / (1 + np.exp(-mode @ columns))
        precision = (columns * all_ * p * (1 - p)) @ columns.T
        if len(level) == 1:
            break
        mode += np.linalg.solve(precision, columns @ (ones - all_ * p))
    k = np.longdouble(origin) / scale  # the intercept is that at a covariate of zero
    if len(level) == 1:
        found = {"b": (0.0, np.inf), "a": (0.0, np.inf)}
        return Case("odds", n, offset, scale, {"x": x, "y": y}, found, {"a": 0.0, "b": 0.0})
    root = np.linalg.cholesky(np.linalg.inv(precision))
    grid = np.stack(np.meshgrid(*[np.linspace(-9, 9, 181)] * 2)).reshape(2, -1)
    eta = (mode[:, None] + root @ grid).T @ columns
    logs = eta @ ones - np.logaddexp(0, eta) @ all_
    w = np.exp(logs - logs.max())
    w /= w.sum()
    middle, slope = mode[:, None] + root @ grid
    intercept = middle - slope * k
    mean, of_slope = w @ intercept, w @ slope
    exact = {
        "b": (0.0, float(np.sqrt(w @ (slope - of_slope) ** 2) / scale)),
        "a": (0.0, float(np.sqrt(w @ (intercept - mean) ** 2))),
    }
    centre = {"a": float(mean), "b": float(of_slope / scale)}
    return Case("odds", n, offset, scale, {"x": x, "y": y}, exact, centre)


MODELS = {"level": level, "slope": slope, "clusters": clusters, "counts": counts, "odds": odds}
CASES = {
    "level": level_case,
    "slope": slope_case,
    "clusters": clusters_case,
    "counts": counts_case,
    "odds": odds_case,
}


def case(seed: int, i: int) -> Case:
    """The case of a number, at random."""
    r = np.random.default_rng([seed, i])
    n = int(r.choice(list(ROWS), p=list(ROWS.values())))
    scale = 10 ** r.uniform(-8, 9)
    offset = r.choice([-1, 1]) * 10 ** r.uniform(-8, 9) if r.random() < 0.9 else 0.0
    return list(CASES.values())[i % len(CASES)](r, n, float(offset), float(scale))


def outcome(case: Case, key: Any) -> dict[str, Any]:
    """Fit a case, and hold it against its exact answer."""
    cut = int(0.4 * case.rows)
    silos = [{k: a[part] for k, a in case.data.items()} for part in (slice(cut), slice(cut, None))]
    begun, said = time.perf_counter(), ""
    off, ratios = [np.inf], [np.inf]
    try:
        fitted = nf.fit(key, MODELS[case.model], silos, progress_bar=False)
        draws = fitted.sample_posterior(jax.random.key(1), DRAWS)
    except (nf.DataError, nf.ModelError, nf.NonFiniteError) as error:
        what, said = "refused", str(error)
    except Exception as error:  # whatever it is, it is an outcome
        what, said = "crashed", f"{type(error).__name__}: {error}"
    else:
        off, ratios = [], []
        for name, (mean, sd) in case.exact.items():
            z = np.asarray(draws[name.removeprefix("log ")], np.float64)
            z = (np.log(z) if name.startswith("log ") else z) - case.origin[name]
            off.append(abs(z.mean() - mean) / sd)
            ratios.append(z.std() / sd)
        right = max(off) < 0.1 and min(ratios) > 0.9 and max(ratios) < 1.1
        what = ("right" if fitted.trusted else "right, said") if right else "said"
        what, said = ("wrong" if what == "said" and fitted.trusted else what), fitted.verdict
    seconds = time.perf_counter() - begun
    found = {"off": float(max(off)), "ratios": [float(min(ratios)), float(max(ratios))]}
    shown = {k: getattr(case, k) for k in ("model", "rows", "offset", "scale")}
    return {**shown, "outcome": what, **found, "seconds": round(seconds, 1), "said": said}


def table(found: list[dict[str, Any]]) -> None:
    """Count the outcomes of cases."""
    for by in ("model", "rows"):
        for value in sorted({f[by] for f in found}):
            counted = Counter(f["outcome"] for f in found if f[by] == value)
            print(f"{value!s:>10}", dict(counted))
    print(f"{len(found):>10}", dict(Counter(f["outcome"] for f in found)))


def lines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for name in (*CASES, "all"):
        counts = Counter(f["outcome"] for f in found if name in (f["model"], "all"))
        words = "; ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
        if words:
            target = "0 wrong, 0 crashed"
            rows.append(table_row(name, words, f"exact, {counts.total()} cases", target))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-rows", type=int, default=max(ROWS))
    parser.add_argument("--models", nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("raw_numbers.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if not args.table:
        done = args.out.read_text().splitlines() if args.out.exists() else []
        known = {json.loads(line)["case"] for line in done}
        numbers = [i for i in range(args.cases) if i not in known]
        cases = [(c.model, c.rows, i) for i in numbers for c in (case(args.seed, i),)]
        for name, rows, i in sorted(cases):
            if rows > args.most_rows or name not in args.models:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = outcome(case(args.seed, i), jax.random.key(i))
            with args.out.open("a") as file:
                file.write(json.dumps({"case": i, **found}) + "\n")
    found = [json.loads(line) for line in args.out.read_text().splitlines()]
    table(found)
    if args.json:
        write(args.json, lines(found), details=found)


if __name__ == "__main__":
    main()
