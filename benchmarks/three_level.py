"""A three-level model in a federation, against NUTS: eight hospitals, patients, visits.

Eight simulated silos, each one hospital with 10 to 80 patients, in one of two models. In ``once``
each patient is measured once, with normal errors around the effect of the hospital. In ``visits``
each is seen six times, in a logistic regression with an effect of the hospital and one of the
patient. All effects are centred and their standard deviations unknown. Eight hospitals say little
about theirs, so the posterior is skewed, and independent or joint normals fall short. The four
globals are compared with those of NUTS:

* the ELBO with the default guide, and the bound locally enhanced at the hospital plate;
* the latter, importance-corrected in one more exchange;
* for reference NumPyro's ``AutoMultivariateNormal`` over all latents, with the data pooled.

Errors of means are in posterior sds of NUTS. Targets are widened by twice the Monte Carlo error of
NUTS: ``2 / sqrt(ESS)`` for means and ``2 / sqrt(2 ESS)`` for ratios of sds.

Run it from anywhere (some minutes)::

    python benchmarks/three_level.py
    python benchmarks/three_level.py --model visits --json visits.json --plot visits.png
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from record import distance, table_row, write

import numpyro_fed as nf

PATIENTS = (10, 15, 25, 35, 45, 55, 65, 80)
VISITS = 6
MU, BETA, TAU, TAU_B, SIGMA = -0.5, 0.8, 0.7, 1.0, 1.0
TARGETS = {  # largest error of a mean, smallest and largest ratio of sds
    "LocallyEnhanced": (0.15, 0.80, np.inf),
    "LocallyEnhanced, corrected": (0.10, 0.92, 1.08),
}


def once(x, y=None):
    """One hospital per silo: one outcome (patients,) of each of its patients."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu + u[0] + beta * x, sigma), obs=y)


def visits(x, y=None):
    """One hospital per silo: visits (patients, 6) of its patients."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    tau_b = numpyro.sample("tau_b", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, tau_b))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=mu + u[0] + b + beta * x), obs=y)


def simulate_once(patients: tuple[int, ...]) -> list[dict[str, Any]]:
    r = np.random.default_rng(8)
    silos = []
    for n in patients:
        x = r.normal(size=n)
        y = MU + TAU * r.normal() + BETA * x + SIGMA * r.normal(size=n)
        silos.append(dict(x=x.astype(np.float32), y=y.astype(np.float32)))
    return silos


def simulate_visits(patients: tuple[int, ...]) -> list[dict[str, Any]]:
    r = np.random.default_rng(8)
    silos = []
    for n in patients:
        x = r.normal(size=(n, VISITS))
        effects = TAU * r.normal() + TAU_B * r.normal(size=(n, 1))
        logits = MU + effects + BETA * x
        y = r.random(x.shape) < 1 / (1 + np.exp(-logits))
        silos.append(dict(x=x.astype(np.float32), y=y.astype(np.float32)))
    return silos


MODELS = {
    "once": (once, simulate_once, ("mu", "beta", "tau", "sigma")),
    "visits": (visits, simulate_visits, ("mu", "beta", "tau", "tau_b")),
}


def decaying_adam(rate: float, rounds: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, rounds, 0.01))


def full_rank(model: Callable, silos: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Pooled: a multivariate normal over globals and locals alike."""
    joint = nf.handlers.joint(model, silos)
    guide = AutoMultivariateNormal(joint)
    svi = SVI(joint, guide, decaying_adam(0.01, steps), Trace_ELBO())
    fit = svi.run(jax.random.key(4), steps, progress_bar=False)
    return guide.sample_posterior(jax.random.key(5), fit.params, sample_shape=(20_000,))


def measure(
    draws: dict[str, Any], nuts: dict[str, Any], weights: np.ndarray | None = None
) -> dict[str, dict[str, float]]:
    """Error of the mean in sds and ratio of sds, for each global."""
    found = {}
    for k in nuts:
        z = np.asarray(draws[k], np.float64)
        mean = np.average(z, weights=weights)
        sd = np.sqrt(np.average((z - mean) ** 2, weights=weights))
        reference = np.asarray(nuts[k], np.float64)
        found[k] = {
            "mean_error_sd": float(abs(mean - reference.mean()) / reference.std()),
            "sd_ratio": float(sd / reference.std()),
        }
    return found


def met(name: str, found: dict[str, dict[str, float]], ess: dict[str, float]) -> bool | None:
    """Whether a fit meets its targets, widened by the error of NUTS; None where it has none."""
    if name not in TARGETS:
        return None
    error, low, high = TARGETS[name]
    return all(
        v["mean_error_sd"] <= error + 2 * ess[k] ** -0.5
        and low - 2 * (2 * ess[k]) ** -0.5 <= v["sd_ratio"] <= high + 2 * (2 * ess[k]) ** -0.5
        for k, v in found.items()
    )


def lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for name, found in report["fits"].items():
        sites = found["sites"].values()
        error = max(v["mean_error_sd"] for v in sites)
        words = f"{distance(error, [v['sd_ratio'] for v in sites])}, {found['seconds']:.0f} s"
        target = "{} sd, {} to {}".format(*TARGETS[name]) if name in TARGETS else ""
        rows.append(table_row(f"{report['model']}, {name}", words, "NUTS", target))
    fixed = report["correction"]
    share = f"{fixed['ess'] / fixed['draws']:.0%}, {fixed['pareto_k']:.2f}"
    return [*rows, table_row("effective draws, k-hat of the correction", share)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--plot", type=Path, help="write the marginals of the corrected fit here")
    parser.add_argument("--model", choices=list(MODELS), default="once")
    parser.add_argument("--rounds", type=int, default=4_000, help="rounds of SFVI")
    parser.add_argument("--rate", type=float, default=0.03, help="first step of Adam")
    parser.add_argument("--hospital", type=int, default=20, help="draws at the hospital plate")
    parser.add_argument("--patient", type=int, default=20, help="draws for each patient")
    args = parser.parse_args()
    quick = args.quick
    model, simulate, names = MODELS[args.model]
    rounds = 10 if quick else args.rounds
    silos = simulate((4, 6) if quick else PATIENTS)
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = run()
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
        return value

    def sfvi(objective: Any) -> Any:
        # A few rounds, to see that it runs, are not worth a search for the mode.
        settings = dict(objective=objective, start=None if quick else "mode")
        method = nf.SFVI(model, optim=decaying_adam(args.rate, rounds), **settings)
        return method.run(jax.random.key(1), rounds, silos, progress_bar=False)

    nuts = timed(
        "NUTS",
        lambda: nf.run_nuts(
            jax.random.key(0),
            model,
            silos,
            num_warmup=20 if quick else 1_000,
            num_samples=20 if quick else 3_000,
            num_chains=1 if quick else 4,
            target_accept_prob=0.9,
            progress_bar=False,
        ),
    )
    reference = {k: nuts.globals[k].reshape(-1) for k in names}
    ess = {k: float(v) for k, v in nuts.ess().items()}

    elbo = timed("ELBO", lambda: sfvi(nf.ELBO()))
    draws, inner_draws = {"hospital": args.hospital}, {"hospital": 4 if quick else 100}
    if args.model == "visits":
        draws["patient"] = args.patient
        inner_draws = {"hospital": 4, "patient": 2} if quick else {"hospital": 20, "patient": 10}
    enhanced_bound = nf.LocallyEnhanced(draws)
    enhanced = timed("LocallyEnhanced", lambda: sfvi(enhanced_bound))
    fixed = timed(
        "LocallyEnhanced, corrected",
        lambda: nf.importance_correct(
            jax.random.key(2),
            enhanced,
            num_draws=50 if quick else 4_000,
            inner_draws=inner_draws,
        ),
    )
    key = jax.random.key(3)
    fits = {
        "ELBO": measure(elbo.sample_posterior(key, 20_000), reference),
        "LocallyEnhanced": measure(enhanced.sample_posterior(key, 20_000), reference),
        "LocallyEnhanced, corrected": measure(fixed.draws, reference, fixed.weights),
    }
    if not quick:
        pooled = timed("pooled full-rank", lambda: full_rank(model, silos, 15_000))
        fits["pooled full-rank"] = measure(pooled, reference)
    report = {
        "fits": {
            name: {"sites": found, "seconds": seconds[name], "target_met": met(name, found, ess)}
            for name, found in fits.items()
        },
        "nuts": {
            "ess": ess,
            "mean": {k: float(v.mean()) for k, v in reference.items()},
            "sd": {k: float(v.std()) for k, v in reference.items()},
            "divergences": nuts.divergences,
            "seconds": seconds["NUTS"],
        },
        "correction": {
            "pareto_k": fixed.pareto_k,
            "ess": fixed.ess,
            "draws": len(fixed.weights),
            "reliable": bool(fixed.reliable),
        },
        "rounds": rounds,
        "model": args.model,
        "draws": draws,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "jax": jax.__version__,
    }
    print(f"{'error of the mean in sds / ratio of sds':<40}" + "".join(f"{k:>15}" for k in names))
    for name, found in fits.items():
        cells = (f"{found[k]['mean_error_sd']:.3f} / {found[k]['sd_ratio']:.3f}" for k in names)
        verdict = {True: "met", False: "missed", None: ""}[report["fits"][name]["target_met"]]
        text = f"{name} ({seconds[name]:.0f} s)"
        print(f"{text:<40}" + "".join(f"{c:>15}" for c in cells) + f"  {verdict}")
    mean, sd = report["nuts"]["mean"], report["nuts"]["sd"]
    cells = (f"{mean[k]:.2f} ({sd[k]:.2f})" for k in names)
    text = f"NUTS, mean (sd) ({seconds['NUTS']:.0f} s)"
    print(f"{text:<40}" + "".join(f"{c:>15}" for c in cells))
    print(f"{'NUTS, effective draws':<40}" + "".join(f"{ess[k]:>15.0f}" for k in names))
    print(f"NUTS: {nuts.divergences} divergent transitions")
    print(fixed.report())
    if args.plot:
        nf.compare(fixed, nuts).plot(label="federated, corrected").savefig(args.plot, dpi=150)
    if args.json:
        write(args.json, lines(report), details=report)


if __name__ == "__main__":
    main()
