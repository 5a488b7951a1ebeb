"""Rounds of PVI, BayesADMM and FedLap until the posterior is right, over unlike silos.

Logistic regression at six hospitals of 40 to 250 patients, whose covariates have other centres and
spreads at each. Each method begins at the prior unless its name says otherwise. After each round
the largest error of a mean is taken, in sds of the pooled posterior, and that of an sd. The table
has the first round from which on means are right to 0.1 sd and sds to a tenth, and both errors
after the last round. The pooled posterior is that of ``nf.fit``, corrected by many draws.

    python benchmarks/admm_rounds.py --json admm_rounds.json
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import machine, table_row, write

import numpyro_fed as nf

KEY = jax.random.key(0)


def model(x: Any, y: Any = None) -> None:
    """Logistic regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def hospitals() -> list[dict[str, np.ndarray]]:
    """Return six unlike silos."""
    r, silos = np.random.default_rng(0), []
    for j, n in enumerate((40, 60, 80, 120, 180, 250)):
        x = np.column_stack([np.ones(n), r.normal((j - 2.5) / 2, 0.4 + 0.2 * j, (n, 3))])
        p = 1 / (1 + np.exp(-x @ [-0.5, 0.8, -0.6, 0.3]))
        silos.append(dict(x=x, y=r.binomial(1, p).astype(float)))
    return silos


METHODS = {
    "PVI, sequential": nf.PVI(model, local=nf.local.LBFGS(), start=None),
    "PVI, synchronous": nf.PVI(model, local=nf.local.LBFGS(), schedule="synchronous", start=None),
    "PVI, sequential, from the mode": nf.PVI(model, local=nf.local.LBFGS()),
    "BayesADMM, rho=1/6": nf.BayesADMM(model),
    "BayesADMM, rho=0.5": nf.BayesADMM(model, rho=0.5),
    "BayesADMM, rho=1": nf.BayesADMM(model, rho=1.0),
    "FedLap, full": nf.FedLap(model),
    "FedLap, full, rho=1": nf.FedLap(model, rho=1.0),
    "FedLap, full, sequential": nf.FedLap(model, schedule="sequential"),
    "FedLap, diagonal": nf.FedLap(model, covariance="diagonal"),
    "FedLap, fixed": nf.FedLap(model, covariance="fixed"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    silos, rounds, draws = hospitals(), 2 if args.quick else 60, 4_000 if args.quick else 200_000
    fit = nf.fit(KEY, model, silos, progress_bar=False)
    pooled = nf.importance_correct(KEY, fit, num_draws=draws, progress_bar=False)
    beta = np.asarray(pooled.sample_posterior(KEY, draws)["beta"])
    exact = beta.mean(0), beta.std(0)
    print(f"nf.fit: {fit.num_exchanges} exchanges, trusted: {fit.trusted}")
    rows = []
    for name, method in list(METHODS.items())[:: 4 if args.quick else 1]:
        errors: list[tuple[float, float]] = []

        def note(result: Any, errors: list[tuple[float, float]] = errors) -> None:
            q = result.posterior()["beta"]
            mean, sd = np.asarray(q.mean), np.sqrt(np.asarray(q.variance))
            errors.append(
                (np.abs((mean - exact[0]) / exact[1]).max(), np.abs(sd / exact[1] - 1).max())
            )

        options = dict(progress_bar=False, runtime="quick", callback=note, every=1)
        result = method.run(KEY, rounds, silos, **options)
        far = np.flatnonzero([max(error) >= 0.1 for error in errors])
        first = 1 if not len(far) else int(far[-1]) + 2
        reached = str(first) if first <= len(errors) else f"not in {len(errors)}"
        row = dict(what=name, rounds=reached, mean=errors[-1][0], sd=errors[-1][1])
        rows.append({**row, "settled": result.settled, "went_wrong": result.rejections})
        print(f"{name:32s} {reached:>10s} {row['mean']:7.3f} {row['sd']:7.1%} {result.rejections}")
    if args.json:
        found = [
            table_row(row["what"], row["rounds"], f"{row['mean']:.3f} sd", f"{row['sd']:.1%}")
            for row in rows
        ]
        write(args.json, found, details={"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
