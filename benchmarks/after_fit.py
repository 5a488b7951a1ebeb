"""What is asked after the fit, against refits by NUTS and against simulated truth.

- ``coverage``: registries drawn from the prior, each fitted; 90 % predictive intervals of new
  patients at known and at new hospitals, and how often they hold the outcome.
- ``planted``: registries in which the outcomes of one silo are shifted by two sds; how often
  ``disagreement()`` has that silo first.
- ``left_out``: ``leave_out`` and ``loo`` against NUTS without that silo, or without that row, on
  the six cities in nine silos, a logistic registry with an effect of each hospital, and counts.
- ``changed``: exchanges and errors of ``add`` and ``remove`` against fits of the same silos anew.

    python benchmarks/after_fit.py --parts coverage,planted,left_out,changed --json after_fit.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from few_messages import in_silos, registry, unconstrained
from record import distance, machine, table_row, write
from scipy.special import expit, gammaln, logsumexp

import numpyro_fed as nf

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import six_cities

KEY = jax.random.key(0)
QUIET: dict[str, Any] = {"progress_bar": False}
SIZES = (15, 20, 25, 30, 40, 60)
NUM_NEW = 5  # hospitals of a registry that took no part
# Nodes of the integrals by which NUTS's draws are judged.
NODES = 41
Draws = dict[str, np.ndarray]


def patients(x: Any, hospital: Any, n_hospitals: int, y: Any = None) -> None:
    """Declare a linear regression with an effect of each hospital."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    tau, sigma = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("tau", "sigma"))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta + u[hospital], sigma), obs=y)


def counts(x: Any, y: Any = None) -> None:
    """Declare a Poisson regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)


def hospital_of(r: np.random.Generator, n: int, truth: dict[str, Any]) -> dict[str, Any]:
    """Return a hospital of ``patients``, with an effect of its own."""
    x = np.stack([np.ones(n), r.normal(0, 1, n)], 1)
    mean = x @ truth["beta"] + r.normal(0, truth["tau"])
    return dict(x=x, hospital=np.zeros(n, int), n_hospitals=1, y=r.normal(mean, truth["sigma"]))


def drawn(r: np.random.Generator) -> dict[str, Any]:
    """Return globals of ``patients`` from their prior."""
    return dict(beta=r.normal(size=2), tau=abs(r.normal()), sigma=abs(r.normal()))


def coverage(number: int) -> dict[str, Any]:
    """Return the share of outcomes of new patients within 90 % intervals."""
    known, new, trusted = [], [], []
    for i in range(number):
        r = np.random.default_rng(i)
        truth = drawn(r)
        all_silos = [hospital_of(r, n + 1, truth) for n in SIZES]
        # The last patient of each is the new one.
        silos = [{**s, **{k: s[k][:-1] for k in ("x", "hospital", "y")}} for s in all_silos]
        fitted = nf.fit(jax.random.key(i), patients, silos, **QUIET)
        trusted.append(fitted.trusted)
        for j, silo in enumerate(all_silos):
            row = dict(x=silo["x"][-1:], hospital=np.zeros(1, int), n_hospitals=1)
            known.append(holds(fitted, row, silo["y"][-1], j))
        for _ in range(NUM_NEW):
            silo = hospital_of(r, 1, truth)
            row = {k: silo[k] for k in ("x", "hospital", "n_hospitals")}
            new.append(holds(fitted, row, silo["y"][0], "new"))
    # Intervals of one registry share its globals: its share is one number.
    shares = {"known": np.reshape(known, (number, -1)), "new": np.reshape(new, (number, -1))}
    found: dict[str, Any] = {"registries": number, "trusted": float(np.mean(trusted))}
    for name, hits in shares.items():
        found[name] = float(hits.mean())
        found[f"{name}_error"] = float(hits.mean(1).std() / np.sqrt(number))
    return found


def holds(fitted: nf.Posterior, row: dict[str, Any], outcome: float, silo: int | str) -> bool:
    """Return whether the 90 % interval of a new patient holds the outcome."""
    y = np.asarray(fitted.predict(jax.random.key(1), row, silo=silo, n=1_000)["y"])[:, 0]
    low, high = np.quantile(y, [0.05, 0.95])
    return bool(low <= outcome <= high)


def planted(number: int) -> dict[str, Any]:
    """Return how often a silo whose outcomes are shifted is the first that disagrees."""
    first, flagged = [], []
    for i in range(number):
        r = np.random.default_rng(i)
        truth = dict(beta=r.normal(size=2), tau=0.0, sigma=1.0)
        silos = [hospital_of(r, n, truth) for n in SIZES]
        liar = int(r.integers(len(SIZES)))
        silos[liar]["y"] = silos[liar]["y"] + 2.0
        data = [{"x": s["x"], "y": s["y"]} for s in silos]
        table = nf.fit(jax.random.key(i), linear, data, **QUIET).disagreement()
        first.append(int(np.argmin(table.conflict)) == liar)
        flagged.append(liar in table.flagged)
    return {"simulations": number, "first": sum(first), "flagged": sum(flagged)}


def linear(x: Any, y: Any = None) -> None:
    """Declare a linear regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def of_counts(draws: Draws, silo: dict[str, Any]) -> np.ndarray:
    """Return the log density (draws, rows) of counts."""
    eta = draws["beta"] @ np.asarray(silo["x"], float).T
    return silo["y"] * eta - np.exp(eta) - gammaln(silo["y"] + 1)


def of_patients(draws: Draws, silo: dict[str, Any], u: np.ndarray) -> np.ndarray:
    """Return the log density (draws, patients) of a hospital with the effects ``u`` (draws,)."""
    eta = draws["beta"] @ silo["x"].T + u[:, None]
    return -np.logaddexp(0, (1 - 2 * silo["y"]) * eta)


def of_hospital(draws: Draws, silo: dict[str, Any]) -> np.ndarray:
    """Return the log density (draws, 1) of a hospital, its effect integrated out."""
    eta, tau, y = draws["beta"] @ silo["x"].T, draws["tau"], silo["y"]
    u = np.zeros(len(eta))
    for _ in range(30):  # Newton's method to the effect's own mode, where the nodes stand
        p = expit(eta + u[:, None])
        curvature = (p * (1 - p)).sum(1) + 1 / tau**2
        u += ((y - p).sum(1) - u / tau**2) / curvature
    sd = curvature**-0.5
    terms = []
    for node, log_weight in hermite():
        z = u + sd * node
        density = of_patients(draws, silo, z).sum(1) - 0.5 * (z / tau) ** 2 - np.log(tau)
        terms.append(density + log_weight + 0.5 * node**2 + np.log(sd))
    return logsumexp(terms, 0)[:, None]


def of_children(draws: Draws, silo: dict[str, Any]) -> np.ndarray:
    """Return the log density (draws, children) of visits, a child's intercept integrated out."""
    eta = np.einsum("sk,cvk->scv", draws["beta"], np.asarray(silo["x"], float))
    sign, sd = 2 * np.asarray(silo["y"], float) - 1, np.exp(-draws["omega"])
    terms = [
        -np.logaddexp(0, -sign * (eta + (sd * node)[:, None, None])).sum(2) + log_weight
        for node, log_weight in hermite()
    ]
    return logsumexp(terms, 0)


def hermite() -> list[tuple[float, float]]:
    """Return nodes and log weights of a standard normal."""
    t, w = np.polynomial.hermite_e.hermegauss(NODES)
    return list(zip(t, np.log(w / w.sum()), strict=True))


def small_registry() -> list[dict[str, Any]]:
    """Return hospitals of 10 to 200 patients, with raw covariates."""
    r, silos = np.random.default_rng(0), []
    for n in (10, 40, 60, 100, 150, 200):
        x = np.stack([np.ones(n), r.uniform(30, 90, n), r.integers(0, 2, n)], 1)
        eta = x @ [-3, 0.04, 0.3] + r.normal(0, 0.7)
        y = r.binomial(1, expit(eta))
        silos.append(dict(x=x, hospital=np.zeros(n, int), n_hospitals=1, y=y))
    return silos


def some_counts() -> list[dict[str, Any]]:
    """Return counts of five silos, with a raw covariate."""
    r, silos = np.random.default_rng(0), []
    for n in (10, 25, 40, 60, 30):
        x = np.stack([np.ones(n), r.uniform(30, 80, n)], 1)
        silos.append(dict(x=x, y=r.poisson(np.exp(x @ [0.2, 0.02]))))
    return silos


# Model, silos, log density of a silo's rows, and of rows given what NUTS knows of their hospital.
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "six cities": (six_cities.model, partial(in_silos, 9), of_children),
    "registry": (registry, small_registry, of_hospital),
    "counts": (counts, some_counts, of_counts),
}


def pooled(model: Any, silos: list[dict[str, Any]]) -> Draws:
    """Return NUTS's draws of all sites, on the pooled data."""
    start = nf.find_mode(KEY, model, silos, **QUIET)
    steps: dict[str, Any] = dict(num_warmup=500, num_samples=1_000, num_chains=2)
    found = nf.run_nuts(KEY, model, silos, start=start, **steps, **QUIET).samples
    return {name: np.asarray(value, float) for name, value in found.items()}


def without_row(silos: list[dict[str, Any]], j: int, i: int) -> list[dict[str, Any]]:
    """Return the silos without row ``i`` of silo ``j``."""
    kept = {
        k: np.delete(v, i, 0) if np.ndim(v) and k != "n_hospitals" else v
        for k, v in silos[j].items()
    }
    return [kept if k == j else silo for k, silo in enumerate(silos)]


def left_out(name: str, num_rows: int) -> dict[str, Any]:
    """Return the errors of ``leave_out`` for each silo, and of ``loo`` for some rows."""
    model, make, of_silo = MODELS[name]
    silos = make()
    begin = time.process_time()
    fitted = nf.fit(KEY, model, silos, **QUIET)
    seconds = {"fit": time.process_time() - begin}
    begin = time.process_time()
    table = fitted.leave_out()
    seconds["leave_out"], begin = time.process_time() - begin, time.process_time()
    rows = fitted.loo()
    seconds["loo"] = time.process_time() - begin
    whole = global_columns(pooled(model, silos))
    errors, moves = [], []
    for j, silo in enumerate(silos):
        draws = pooled(model, silos[:j] + silos[j + 1 :])
        density = logsumexp(of_silo(draws, silo).sum(1)) - np.log(len(draws["beta"]))
        errors.append(table.log_density[j] - density)
        columns = global_columns(draws)
        shift = np.abs(columns.mean(0) - whole.mean(0)) / whole.std(0)
        moves.append(table.shift[j] - shift.max())
    r, of_rows = np.random.default_rng(0), []
    known = [(j, i) for j, s in enumerate(rows.silos) for i in np.flatnonzero(s.pareto_k < 0.7)]
    # The ones with the heaviest tails, and as many at random.
    known.sort(key=lambda at: -rows.silos[at[0]].pareto_k[at[1]])
    chosen = known[: num_rows // 2]
    chosen += [known[i] for i in r.choice(len(known), num_rows - len(chosen), replace=False)]
    for j, i in chosen:
        draws = pooled(model, without_row(silos, j, i))
        row = {k: v[i : i + 1] if np.ndim(v) else v for k, v in silos[j].items()}
        if name == "registry":
            values = of_patients(draws, row, draws[f"silo_{j}/u"][:, 0])
        else:
            values = of_silo(draws, row)
        density = logsumexp(values[:, 0]) - np.log(len(values))
        of_rows.append(rows.silos[j].log_density[i] - density)
    return dict(
        model=name,
        silos=len(silos),
        unknown=len(table.unknown),
        exchanges=table.num_exchanges,
        error=float(np.abs(np.array(errors)).max()),
        move_error=float(np.abs(np.array(moves)).max()),
        rows=len(of_rows),
        bad_rows=rows.num_bad,
        row_error=float(np.abs(of_rows).max()),
        cpu_seconds=seconds,
    )


def global_columns(draws: Draws) -> np.ndarray:
    """Return the globals as columns, unconstrained."""
    return unconstrained({k: v for k, v in draws.items() if "/" not in k})


def changed(name: str) -> list[dict[str, Any]]:
    """Return exchanges and errors of adding the last silo, and of removing it and the first."""
    model, make, _ = MODELS[name]
    silos = make()
    whole, all_but_last, all_but_first = (
        nf.fit(KEY, model, silos[cut], **QUIET)
        for cut in (slice(None), slice(None, -1), slice(1, None))
    )
    calls: list[tuple[str, nf.Posterior, Callable[[], nf.Posterior]]] = [
        ("add the last", whole, lambda: all_but_last.add(jax.random.key(1), silos[-1])),
        ("remove the last", all_but_last, lambda: whole.remove(jax.random.key(2), len(silos) - 1)),
        ("remove the first", all_but_first, lambda: whole.remove(jax.random.key(3), 0)),
    ]
    found: list[dict[str, Any]] = []
    for what, anew, call in calls:
        begin = time.perf_counter()
        fitted = call()
        seconds = time.perf_counter() - begin
        one, other = (
            unconstrained(f.sample_posterior(jax.random.key(5), 20_000)) for f in (fitted, anew)
        )
        sd, ratios = other.std(0), one.std(0) / other.std(0)
        found.append(
            dict(
                model=name,
                what=what,
                exchanges=fitted.num_exchanges,
                of_new_fit=anew.num_exchanges,
                trusted=fitted.trusted,
                error=float((np.abs(one.mean(0) - other.mean(0)) / sd).max()),
                ratios=[float(ratios.min()), float(ratios.max())],
                seconds=seconds,
            )
        )
    return found


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for name in ("known", "new") if "coverage" in report else ():
        found = report["coverage"]
        share = f"{found[name]:.1%} (error {found[f'{name}_error']:.1%})"
        what = f"90 % intervals of patients of {name} hospitals that hold the outcome"
        rows.append(table_row(what, share, "90 %", "88 to 92 %"))
    if "planted" in report:
        found = report["planted"]
        of = f"{found['first']} of {found['simulations']}"
        rows.append(table_row("a shifted silo is the first that disagrees", of, "", "95 %"))
    for r in report.get("left_out", []):
        error = f"silo {r['error']:.3f}, row {r['row_error']:.3f} nats"
        what = f"{r['model']}: left out, worst error"
        rows.append(table_row(what, error, "NUTS without it", "0.1 nats"))
    for r in (r for found in report.get("changed", []) for r in found):
        ours = f"{r['exchanges']} exchanges, {distance(r['error'], r['ratios'])}"
        anew = f"{r['of_new_fit']} exchanges, a fit anew"
        rows.append(table_row(f"{r['model']}: {r['what']}", ours, anew, "4 exchanges, 0.1 sd"))
    return rows


def main() -> None:
    """Measure, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="coverage,planted,left_out,changed")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    parts, report = args.parts.split(","), {"machine": machine()}
    models = ["counts"] if args.quick else args.models.split(",")
    if "coverage" in parts:
        report["coverage"] = coverage(2 if args.quick else 200)
        print(report["coverage"], flush=True)
    if "planted" in parts:
        report["planted"] = planted(2 if args.quick else 100)
        print(report["planted"], flush=True)
    for part, run in (("changed", changed), ("left_out", partial(left_out, num_rows=8))):
        if part not in parts:
            continue
        report[part] = []
        for name in models:
            found = run(name)
            report[part].append(found)
            print(json.dumps(found), flush=True)
    if args.json:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
