"""How often ``result.silos`` flags a silo whose numbers are wrong, and how often an honest one.

Federations of ten silos of 20 to 300 rows, raw covariates: a linear regression, a logistic one, and
counts with an effect of each hospital. In each a silo at random tells of coefficients that are off
by a number of standard errors of its own estimate (its outcomes are drawn with them). Columns: the
share of federations without any lie in which some silo is flagged; and by the size of the lie the
share in which the liar is flagged, and in which an honest silo is flagged beside it.

    python benchmarks/influence.py --json influence.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import machine, table_row, write

import numpyro_fed as nf

KEY = jax.random.key(0)
SIZES = (20, 30, 40, 50, 60, 80, 100, 150, 200, 300)
BETA = np.array([-4.0, 0.05, 0.04])  # intercept, age, body mass index


def linear(x: Any, y: Any = None) -> None:
    """Declare a linear regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def logistic(x: Any, y: Any = None) -> None:
    """Declare a logistic regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def counts(x: Any, y: Any = None) -> None:
    """Declare a Poisson regression with an effect of each hospital."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + u[0])), obs=y)


def draw_linear(r: np.random.Generator, eta: np.ndarray) -> np.ndarray:
    """Return outcomes around a predictor."""
    return r.normal(eta, 2.0)


def draw_logistic(r: np.random.Generator, eta: np.ndarray) -> np.ndarray:
    """Return outcomes of yes or no."""
    return (r.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(np.int32)


def draw_counts(r: np.random.Generator, eta: np.ndarray) -> np.ndarray:
    """Return counts, with an effect of the hospital."""
    return r.poisson(np.exp(np.clip(eta + r.normal(0, 0.4), -20, 8))).astype(np.int32)


# The information of a row, given the predictor.
INFORMATION: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda eta: np.full(len(eta), 0.25),
    "logistic": lambda eta: 0.25 / np.cosh(eta / 2) ** 2,
    "counts": lambda eta: np.exp(eta),
}
MODELS = {
    "linear": (linear, draw_linear),
    "logistic": (logistic, draw_logistic),
    "counts": (counts, draw_counts),
}


def federation(name: str, r: np.random.Generator, liar: int, lie: float) -> list[dict[str, Any]]:
    """Return silos of which one tells of coefficients that are ``lie`` standard errors off."""
    draw, silos = MODELS[name][1], []
    for j, n in enumerate(SIZES):
        x = np.stack([np.ones(n), r.normal(62, 14, n), r.normal(27, 4, n)], 1)
        beta = BETA.copy()
        if j == liar:
            weights = INFORMATION[name](x @ beta)
            root = np.linalg.cholesky(np.linalg.inv(x.T @ (weights[:, None] * x)))
            direction = r.normal(size=3)
            beta += lie * root @ (direction / np.linalg.norm(direction))
        silos.append({"x": x.astype(np.float32), "y": draw(r, x @ beta)})
    return silos


def flagged(name: str, number: int, lie: float) -> tuple[float, float]:
    """Return the share of federations with the liar flagged, and with an honest silo flagged."""
    method, r = nf.SFVI(MODELS[name][0]), np.random.default_rng(round(lie))
    found, wrongly = [], []
    for _ in range(number):
        liar = int(r.integers(len(SIZES))) if lie else -1
        silos = federation(name, r, liar, lie)
        table = method.run(KEY, 0, silos, progress_bar=False).silos
        found.append(liar in table.flagged)
        wrongly.append(any(j != liar for j in table.flagged))
    return float(np.mean(found)), float(np.mean(wrongly))


def lines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for r in found:
        lie, liar, honest = r["lie"], f"{r['flagged']:.1%}", f"{r['honest_flagged']:.1%}"
        if not lie:
            rows.append(table_row(f"{r['model']}, no lie: some silo flagged", honest, "", "1 %"))
            continue
        target = "95 %" if lie == 10 else ""
        beside = f"{honest}: an honest one beside it"
        what = f"{r['model']}, a lie of {lie:.0f} standard errors: flagged"
        rows.append(table_row(what, liar, beside, target))
    return rows


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    number, lies = (2, [10.0]) if args.quick else (200, [0.0, 5.0, 10.0, 20.0])
    names = ["linear"] if args.quick else list(MODELS)
    rows = []
    for name in names:
        for lie in lies:
            found, wrongly = flagged(name, number, lie)
            rows.append({"model": name, "lie": lie, "flagged": found, "honest_flagged": wrongly})
            print(f"{name:10} {lie:5.0f} {found:6.3f} {wrongly:6.3f}", flush=True)
    if args.json:
        write(args.json, lines(rows), details={"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
