"""Models that people bring, on raw scales: one call with defaults against NUTS on the pooled data.

Seventeen models on simulated data, in silos of unequal sizes: random intercepts and slopes with an
LKJ correlation in six hospitals; negative binomial counts; Weibull survival with right
censoring; eight schools, centred and not; a two-parameter logistic test of 30 items, the pupils in
silos; a state-space model for each patient; 50 covariates under a horseshoe; patients in hospitals
on a raw scale (three levels); Poisson counts with an offset; and those of ``more_models.py``: two
Gaussian processes, a mixture, Weibull frailty, zero-inflated counts, ordinal grades, correlated
residuals.

    python benchmarks/user_models.py --json user_models.json

For each: worst error of a mean in NUTS's sds, range of the ratios of sds, over all globals, and
the verdict. ``--models slopes,schools`` takes some.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from more_models import MODELS as MORE
from more_models import Silos, cut
from numpyro.contrib.control_flow import scan
from record import distance, table_row, write

import numpyro_fed as nf


def slopes(hospital, n_hospitals, x, y=None):
    """Random intercepts and slopes with an LKJ correlation: blood pressure by age."""
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([20.0, 1.0])).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(10.0))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    effect = u @ (tau[:, None] * root).T
    with nf.silo_plate("patient", x.shape[0]):
        mean = beta[0] + effect[hospital, 0] + (beta[1] + effect[hospital, 1]) * (x - 50)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def slopes_data(r: np.random.Generator) -> Silos:
    silos = []
    for sizes in ((40, 60), (30, 50), (45, 35)):
        hospital = np.repeat(np.arange(2), sizes)
        x = r.uniform(20, 80, len(hospital))
        u = r.multivariate_normal([0, 0], [[64, 1.2], [1.2, 0.09]], 2)
        mean = 120 + u[hospital, 0] + (0.5 + u[hospital, 1]) * (x - 50)
        y = mean + 9 * r.normal(size=len(x))
        silos.append(dict(hospital=hospital, n_hospitals=2, x=x, y=y))
    return silos


def counts(x, exposure, y=None):
    """Negative binomial counts with an offset."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([3]).to_event(1))
    phi = numpyro.sample("phi", dist.Gamma(2.0, 0.1))
    with nf.silo_plate("row", x.shape[0]):
        mean = jnp.exp(x @ beta + jnp.log(exposure))
        numpyro.sample("y", dist.NegativeBinomial2(mean, phi), obs=y)


def counts_data(r: np.random.Generator) -> Silos:
    n = 300
    x = np.stack([np.ones(n), r.normal(40, 12, n), r.integers(0, 2, n)], 1)
    exposure = r.uniform(100, 5000, n)
    mean = np.exp(x @ [-6.0, 0.03, 0.5]) * exposure
    y = r.poisson(mean * r.gamma(3, 1 / 3, n))
    return cut(dict(x=x, exposure=exposure, y=y), 150, 240)


def survival(x, t, event, y=None):
    """Weibull survival in days, censored on the right."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([3]).to_event(1))
    shape = numpyro.sample("shape", dist.HalfNormal(3.0))
    with nf.silo_plate("row", x.shape[0]):
        scale = jnp.exp(x @ beta)
        log_hazard = jnp.log(shape / scale) + (shape - 1) * jnp.log(t / scale)
        numpyro.factor("y", jnp.where(event, log_hazard, 0.0) - (t / scale) ** shape)


def survival_data(r: np.random.Generator) -> Silos:
    n = 250
    x = np.stack([np.ones(n), r.normal(60, 10, n), r.integers(0, 2, n)], 1)
    t = np.exp(x @ [9.0, -0.04, 0.4]) * r.weibull(1.4, n)
    end = r.uniform(200, 2000, n)
    return cut(dict(x=x, t=np.minimum(t, end), event=t < end), 120, 200)


EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(effect, error):
    """Eight schools, centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with nf.silo_plate("school", effect.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, error), obs=effect)


def schools_apart(effect, error):
    """Eight schools, not centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with nf.silo_plate("school", effect.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z, error), obs=effect)


def schools_data(r: np.random.Generator) -> Silos:
    return cut(dict(effect=EFFECTS, error=ERRORS), 3, 6)


def items(y):
    """Two parameters for each of 30 items; pupils in silos."""
    n = y.shape[1]
    difficulty = numpyro.sample("difficulty", dist.Normal(0, 3).expand([n]).to_event(1))
    discrimination = numpyro.sample("discrimination", dist.LogNormal(0, 1).expand([n]).to_event(1))
    with nf.silo_plate("pupil", y.shape[0]):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
        logits = discrimination * (ability[:, None] - difficulty)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def items_data(r: np.random.Generator) -> Silos:
    ability, difficulty = r.normal(size=(400, 1)), r.normal(0, 1, 30)
    logits = r.lognormal(0, 0.3, 30) * (ability - difficulty)
    return cut(dict(y=(r.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))) * 1.0), 150, 320)


def states(y):
    """A random walk for each patient, seen with error, at ten visits."""
    level = numpyro.sample("level", dist.Normal(100, 50))
    walk = numpyro.sample("walk", dist.HalfNormal(10.0))
    error = numpyro.sample("error", dist.HalfNormal(10.0))
    with nf.silo_plate("patient", y.shape[0]):
        first = numpyro.sample("first", dist.Normal(level, 20.0))

        def visit(before, seen):
            state = numpyro.sample("state", dist.Normal(before, walk))
            numpyro.sample("y", dist.Normal(state, error), obs=seen)
            return state, None

        scan(visit, first, jnp.asarray(y).T)


def states_data(r: np.random.Generator) -> Silos:
    state = 110 + 20 * r.normal(size=(40, 1)) + np.cumsum(3 * r.normal(size=(40, 8)), 1)
    return cut(dict(y=state + 5 * r.normal(size=state.shape)), 15, 32)


def horseshoe(x, y=None):
    """Fifty covariates, most of them without effect."""
    p = x.shape[1]
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    lam = numpyro.sample("lam", dist.HalfCauchy(1.0).expand([p]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([p]).to_event(1))
    beta = numpyro.deterministic("beta", z * lam * tau)
    sigma = numpyro.sample("sigma", dist.HalfNormal(5.0))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def horseshoe_data(r: np.random.Generator) -> Silos:
    x = r.normal(size=(300, 50))
    y = x[:, :4] @ [3.0, -2.0, 1.5, 1.0] + 2 * r.normal(size=300)
    return cut(dict(x=x, y=y), 140, 240)


def three_levels(hospital, n_hospitals, x, y=None):
    """Visits of patients in hospitals, blood pressure by weight in kilograms."""
    beta = numpyro.sample("beta", dist.Normal(0, 1000).expand([2]).to_event(1))
    between = numpyro.sample("between", dist.HalfNormal(20.0))
    within = numpyro.sample("within", dist.HalfNormal(20.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(20.0))
    with nf.silo_plate("hospital", n_hospitals):
        h = numpyro.sample("h", dist.Normal(0, between))
    with nf.silo_plate("patient", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(h[hospital][:, None], within))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(beta[0] + beta[1] * x + b, sigma), obs=y)


def three_levels_data(r: np.random.Generator) -> Silos:
    silos = []
    for sizes in ((20, 30, 25), (15, 22, 28, 20), (30, 24, 18)):
        hospital = np.repeat(np.arange(len(sizes)), sizes)
        h = 6 * r.normal(size=len(sizes))
        x = r.normal(75, 14, (len(hospital), 1)) + r.normal(0, 2, (len(hospital), 4))
        b = (h[hospital] + 8 * r.normal(size=len(hospital)))[:, None]
        y = 90 + 0.6 * x + b + 5 * r.normal(size=x.shape)
        silos.append(dict(hospital=hospital, n_hospitals=len(sizes), x=x, y=y))
    return silos


def poisson(x, exposure, y=None):
    """Poisson counts with an offset, raw covariates."""
    beta = numpyro.sample("beta", dist.Normal(0, 100).expand([3]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + jnp.log(exposure))), obs=y)


def poisson_data(r: np.random.Generator) -> Silos:
    n = 400
    x = np.stack([np.ones(n), r.normal(55, 12, n), r.lognormal(10, 0.6, n)], 1)
    exposure = r.uniform(500, 50_000, n)
    y = r.poisson(np.exp(x @ [-9.0, 0.02, 1e-5]) * exposure)
    return cut(dict(x=x, exposure=exposure, y=y), 180, 300)


MODELS: dict[str, tuple[Callable, Callable[[np.random.Generator], Silos]]] = {
    "slopes": (slopes, slopes_data),
    "counts": (counts, counts_data),
    "survival": (survival, survival_data),
    "schools": (schools, schools_data),
    "schools_apart": (schools_apart, schools_data),
    "items": (items, items_data),
    "states": (states, states_data),
    "horseshoe": (horseshoe, horseshoe_data),
    "three_levels": (three_levels, three_levels_data),
    "poisson": (poisson, poisson_data),
    **MORE,
}


def one(name: str, warmup: int, samples: int) -> dict[str, Any]:
    model, data = MODELS[name]
    silos = data(np.random.default_rng(7))
    began = time.perf_counter()
    fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
    fitted.sample_posterior(jax.random.key(1), 1_000)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    settings = dict(num_warmup=warmup, num_samples=samples, progress_bar=False)
    settings |= dict(target_accept_prob=0.95, start=fitted.mode)
    nuts = nf.run_nuts(jax.random.key(2), model, silos, **settings)
    table = nf.compare(fitted, nuts).to_dict()["sites"]
    known = {k: v for k, v in table.items() if k in fitted.sample_posterior(jax.random.key(3), 2)}
    errors = np.concatenate([np.ravel(v["mean_error_sd"]) for v in known.values()])
    ratios = np.concatenate([np.ravel(v["sd_ratio"]) for v in known.values()])
    errors, ratios = errors[np.isfinite(errors)], ratios[np.isfinite(ratios) & (ratios > 0)]
    return dict(
        mean_error_sd=float(errors.max()),
        sd_ratio=[float(ratios.min()), float(ratios.max())],
        trusted=fitted.trusted,
        verdict=fitted.verdict,
        exchanges=fitted.num_exchanges,
        seconds=seconds,
        nuts_seconds=time.perf_counter() - began,
        nuts_effective_draws=float(min(np.min(v) for v in nuts.ess().values())),
    )


def lines(report: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for name, r in report.items():
        words = f"{distance(r['mean_error_sd'], r['sd_ratio'])}, {r['exchanges']} exchanges"
        words += ", doubted" * (not r["trusted"])
        nuts = f"NUTS, {r['nuts_effective_draws']:,.0f} effective draws"
        rows.append(table_row(name, words, nuts, "0.1 sd, 0.9 to 1.1"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="some of them, with commas between; else all")
    parser.add_argument("--quick", action="store_true", help="few draws of NUTS")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    warmup, samples = (100, 100) if args.quick else (1_000, 10_000)
    names = args.models.split(",") if args.models else list(MODELS)
    report = {}
    print(f"{'model':14} error (sd)  sd ratios    trusted  exchanges  seconds (NUTS)")
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            report[name] = r = one(name, warmup, samples)
        low, high = r["sd_ratio"]
        print(
            f"{name:14} {r['mean_error_sd']:10.3f}  {low:.3f} {high:.3f}  "
            f"{'yes' if r['trusted'] else 'no':7}  {r['exchanges']:9}  {r['seconds']:7.1f} "
            f"({r['nuts_seconds']:.1f}; {r['nuts_effective_draws']:.0f} effective)",
            flush=True,
        )
        print(f"    {r['verdict']}", flush=True)
    if args.json:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
