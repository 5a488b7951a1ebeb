"""Do draws that chose a mixture, and are weighed by it, know a posterior as well as they say?

Five hospitals of 4 to 300 patients, a logistic regression with an effect of the hospital. A fit
matches mixtures to its weighted draws, and weighs all draws so far by all mixtures together. A
draw that was weighed by a mixture it had a part in would count too little where it is far out: so
it is weighed by one matched without it. Further draws from the mixtures have had no part in any:
their averages are those of the posterior, but for their own noise.

Printed are the sd of the intercept and the 95 % quantile of the sd of the hospitals' effects, by
the fit's own draws and by as many further ones, over several seeds.

    python benchmarks/matched_draws.py --seeds 9 --json matched_draws.json
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write

import numpyro_fed as nf
from numpyro_fed.posterior.importance import correct_from

SIZES, EFFECTS = (300, 180, 120, 60, 4), (0.0, 0.4, -0.4, 0.2, -0.2)


def hospitals():
    """Return what each hospital holds: covariates of its patients, and who died."""
    rng = np.random.default_rng(20261)
    silos = []
    for n, effect in zip(SIZES, EFFECTS, strict=True):
        stage = np.eye(4)[rng.integers(0, 3 if n == 60 else 4, n)][:, 1:]  # one lacks a stage
        treated, male = rng.integers(0, 2, n), rng.integers(0, 2, n)
        age, lab = rng.normal(62, 12, n), rng.normal(7.5, 1, n)
        x = np.column_stack([treated, age - 62, lab - 7.5, stage, male])
        logits = effect - 0.6 + x @ [-0.8, 0.04, 0.5, 0.3, 0.7, 1.2, 0.3]
        silos.append(dict(x=x, y=rng.binomial(1, 1 / (1 + np.exp(-logits)))))
    return silos


def model(x, y=None):
    """A logistic regression with an effect of the hospital."""
    a = numpyro.sample("a", dist.Normal(0, 2.5))
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([7]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + x @ b + u[0]), obs=y)


def numbers(fm, theta, z_G, log_weights):
    """Return the intercept's sd and the 95 % quantile of the effects' sd, by weighted draws."""
    counts = np.isfinite(log_weights)
    sites = jax.vmap(lambda z: fm.constrain_global(theta, z))(z_G[counts])
    a, tau = (np.asarray(sites[name], float) for name in ("a", "tau"))
    w = np.exp(log_weights[counts] - log_weights[counts].max())
    w, order = w / w.sum(), np.argsort(tau)
    quantile = tau[order][np.searchsorted(np.cumsum(w[order]), 0.95)]
    return float(np.sqrt(w @ (a - w @ a) ** 2)), float(quantile)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    args = parser.parse_args()
    silos, found = hospitals(), []
    for seed in range(args.seeds):
        fit = nf.fit(jax.random.key(seed), model, silos, progress_bar=False)
        if fit.pool is None or len(fit.pool.mixtures) < 2:
            print(seed, "is enough without a match:", fit.verdict)
            continue
        n, result = len(fit.pool.z_G), fit.result
        both = correct_from(jax.random.key(1_000 + seed), result, n, None, None, earlier=fit)
        fm, theta, of = result._fit.model, result.shared.theta, both.log_weights
        new = len(both.pool.z_G) - n  # they stand before the fit's own
        own = numbers(fm, theta, both.z_G[new:], of[new:])
        further = numbers(fm, theta, both.z_G[:new], of[:new])
        print(seed, "own draws", np.round(own, 3), "further ones", np.round(further, 3), flush=True)
        found.append([own, further])
    if not found:
        return
    own, further = np.array(found).mean(0)
    names = ("sd of the intercept", "95 % quantile of the effects' sd")
    rows = [
        table_row(name, f"{a:.3f}, {100 * (a / b - 1):+.1f} %", f"{b:.3f}, further draws")
        for name, a, b in zip(names, own, further, strict=True)
    ]
    for row in rows:
        print(f"{row['what']}: {row['ours']} from {row['reference']}")
    if args.json:
        write(args.json, rows, details={"found": found})


if __name__ == "__main__":
    main()
