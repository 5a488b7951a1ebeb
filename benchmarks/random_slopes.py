"""Correlated effects of hospitals, ``(1 + treat | hospital)`` of lme4: ``nf.fit`` and NUTS.

Twenty data sets of a logistic regression with two or three correlated effects of each of 2 to 30
hospitals, one of which has four patients, without and with five further covariates in raw units.
For each: exchanges, CPU seconds of a first and of a second call (another key), memory (the most of
the process so far), and how far means and sds are from those of a long run of NUTS, on the scale of
the sites. NUTS gets the text in the form that suits it, covariates in sds about their means, and
effects as their root times standard normals: else it has divergences, and is no reference.

    python benchmarks/random_slopes.py --sets 0:20 --nuts 4000 --json random_slopes.json
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "1")  # CPU seconds of one core

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import distance, table_row, write

import numpyro_fed as nf

HOSPITALS = (6, 2, 3, 10, 30)
COVARIATES = (0, 5)
DRAWS = 20_000  # of each posterior, for means and sds


class Study(NamedTuple):
    """A text, the same in the form for NUTS, and what each hospital holds."""

    model: Callable[..., None]
    for_nuts: Callable[..., None]
    silos: list[dict[str, Any]]
    words: str


def study(number: int) -> Study:
    """Return the data set of a number: its size, its effects and covariates follow from it."""
    rng = np.random.default_rng([11, number])
    effects = 2 + (number // 10) % 2
    hospitals, covariates = HOSPITALS[number // 2 % 5], COVARIATES[number % 2]
    sizes = [*rng.integers(40, 240, hospitals - 1), 4]
    tau = rng.uniform(0.2, 0.8, effects)
    slope = rng.normal(0, 0.5, covariates)
    silos = []
    for n in sizes:
        z = np.ones((n, effects))
        z[:, 1:] = rng.integers(0, 2, (n, effects - 1))
        raw = rng.normal(size=(n, covariates))
        units = np.array([[50, 12], [120, 18], [27, 5], [1e4, 4e3], [0.02, 0.005]])[:covariates]
        eta = -0.3 + z @ (tau * rng.normal(size=effects)) - 0.6 * z[:, 1] + raw @ slope
        x = np.concatenate([z[:, 1:], units[:, 0] + raw * units[:, 1]], 1)
        y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
        silos.append(dict(z=z, x=x, h=np.zeros(n, int), H=1, y=y))

    def model(z: Any, x: Any, h: Any, H: int, y: Any = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 50))
        b = numpyro.sample("b", dist.Normal(0, 50).expand([x.shape[1]]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([effects]).to_event(1))
        L = numpyro.sample("L", dist.LKJCholesky(effects, 2.0))
        with nf.silo_plate("hospital", H):
            root = tau[:, None] * L
            u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(effects), scale_tril=root))
        with nf.silo_plate("patient", len(h)):
            eta = a + x @ b + (u[h] * z).sum(-1)
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    rows = np.concatenate([silo["x"] for silo in silos])
    centre, unit = rows.mean(0), np.where(rows.std(0) > 0, rows.std(0), 1.0)

    def for_nuts(z: Any, x: Any, h: Any, H: int, y: Any = None) -> None:
        # A prior of 50 sds is as flat as one of 200,000, in which a chain loses its way.
        spread = np.minimum(50 * unit, 50.0)
        slopes = numpyro.sample("slopes", dist.Normal(0, spread).to_event(1))
        b = numpyro.deterministic("b", slopes / unit)
        level = numpyro.sample("level", dist.Normal(b @ centre, 50))
        numpyro.deterministic("a", level - b @ centre)
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([effects]).to_event(1))
        L = numpyro.sample("L", dist.LKJCholesky(effects, 2.0))
        with nf.silo_plate("hospital", H):
            u = numpyro.sample("u_std", dist.Normal().expand([effects]).to_event(1))
            u = u @ (tau[:, None] * L).T
        with nf.silo_plate("patient", len(h)):
            eta = level + ((x - centre) / unit) @ slopes + (u[h] * z).sum(-1)
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    words = f"{effects} effects, {hospitals} hospitals, {covariates} covariates, {sum(sizes)} rows"
    return Study(model, for_nuts, silos, words)


def timed(work: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, float]:
    """Return what a call returns, and its seconds of CPU time."""
    began = time.process_time()
    found = work(*args, **settings, progress_bar=False)
    return found, round(time.process_time() - began, 1)


def moments(draws: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of all globals that vary, (n,) each."""
    flat = [np.asarray(draws[name], float).reshape(DRAWS, -1) for name in ("a", "b", "tau", "L")]
    of_all = np.concatenate(flat, 1)
    sd = of_all.std(0)
    return of_all.mean(0)[sd > 1e-12], sd[sd > 1e-12]


def lines(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for r in records:
        words = f"{r['exchanges']} exchanges, {r['seconds'][0]} and {r['seconds'][1]} s"
        if "mean_error" in r:
            words += f", {distance(r['mean_error'], r['ratios'])}"
        words += ", doubted" * (not r["trusted"])
        nuts = f"NUTS, {r['nuts_seconds']} s, error {r['nuts_error']}" if "nuts_error" in r else ""
        rows.append(table_row(r["words"], words, nuts, "14 exchanges, half of NUTS's time"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="0:20")
    parser.add_argument("--nuts", type=int, default=0, help="draws of NUTS in a chain, of two")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    records = []
    for number in range(*map(int, args.sets.split(":"))):
        model, for_nuts, silos, words = study(number)
        fitted, first = timed(nf.fit, jax.random.key(0), model, silos)
        _, second = timed(nf.fit, jax.random.key(1), model, silos)
        record = dict(
            number=number,
            words=words,
            trusted=fitted.trusted,
            exchanges=fitted.num_exchanges,
            seconds=[first, second],
            gigabytes=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            verdict=fitted.verdict,
        )
        if args.nuts:
            settings = dict(
                num_warmup=1_000, num_samples=args.nuts, num_chains=2, target_accept_prob=0.95
            )
            nuts, seconds = timed(nf.run_nuts, jax.random.key(2), for_nuts, silos, **settings)
            ours, theirs = (
                moments(posterior.sample_posterior(jax.random.key(3), DRAWS))
                for posterior in (fitted, nuts)
            )
            record |= dict(
                nuts_seconds=seconds,
                nuts_error=round(nuts.monte_carlo_error, 3),
                mean_error=round(float((abs(ours[0] - theirs[0]) / theirs[1]).max()), 3),
                ratios=[round(float(f(ours[1] / theirs[1])), 3) for f in (min, max)],
            )
        records.append(record)
        print({k: v for k, v in record.items() if k != "verdict"}, flush=True)
        if args.json:
            write(args.json, lines(records), details=records)


if __name__ == "__main__":
    main()
