"""Two clients hold different columns of the same patients: one logistic regression.

A registry has six measurements of 400 patients, a hospital four others, and the server knows who
died. ``nf.VFL`` fits the model as it is written: a client sends its part of the linear predictor,
one number a patient. One more exchange, the importance correction, says whether the posterior can
be trusted. NUTS on all columns in one place is the reference.

    python examples/columns.py --plot columns.png --json columns.json

Data are simulated. ``--quick`` takes fewer rounds and draws.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_fed as nf


def predictor(x):
    """A client's share of the linear predictor (patient,), from its own columns."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    return x @ beta


def model(xs, died=None):
    """Deaths (patient,), given the columns of each client."""
    b = numpyro.sample("b", dist.Normal(0, 2))
    eta = nf.client_sum("client", predictor, xs)  # sites client_0/beta and client_1/beta
    with numpyro.plate("patient", eta.shape[0]):
        numpyro.sample("died", dist.Bernoulli(logits=b + eta), obs=died)


def simulate(rows=400, sizes=(6, 4), seed=0):
    """Columns of each client, which are correlated across clients, and deaths."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(rows, 1))
    xs = [0.6 * common + 0.8 * rng.normal(size=(rows, p)) for p in sizes]
    logits = -0.5 + sum(x @ rng.normal(0, 0.7, x.shape[1]) for x in xs)
    return xs, (rng.uniform(size=rows) < 1 / (1 + np.exp(-logits))).astype(int)


def coefficients(draws):
    """Draws (draws, coefficient): the intercept, then the columns of each client."""
    return np.column_stack([draws["b"], draws["client_0/beta"], draws["client_1/beta"]])


def plot(fits, names):
    """Posterior intervals of all coefficients, a row for each."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 5.2), layout="constrained")
    styles = {
        "NUTS, all columns in one place": dict(color="0.6", linewidth=6, alpha=0.7),
        "nf.VFL": dict(color="C0", linewidth=1.5),
        "nf.VFL, corrected": dict(color="C1", linewidth=1.5),
    }
    at = -np.arange(len(names))
    for shift, (name, style) in zip((0, 0.14, -0.14), styles.items(), strict=True):
        low, middle, high = np.quantile(fits[name], (0.025, 0.5, 0.975), axis=0)
        axis.hlines(at + shift, low, high, label=name, **style)
        axis.plot(middle, at + shift, "o", color=style["color"], markersize=4)
    axis.axvline(0, color="0.8", zorder=0)
    axis.set(yticks=at, yticklabels=names, xlabel="coefficient, 95 % interval")
    axis.set_title("Clients that keep their columns get the intervals of the whole table")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the coefficients")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and draws")
    args = parser.parse_args()
    rounds, draws = (50, 400) if args.quick else (1_000, 4_000)
    xs, died = simulate()

    vfl = nf.VFL(model)
    began = time.perf_counter()
    result = vfl.run(jax.random.key(0), rounds, xs, died)  # prints what crosses, too
    print(f"nf.VFL: {time.perf_counter() - began:.0f} s, compilation included")
    corrected = nf.importance_correct(jax.random.key(1), result, draws)
    print(corrected.report())

    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(2), xs, died)
    fits = {
        "NUTS, all columns in one place": coefficients(mcmc.get_samples()),
        "nf.VFL": coefficients(result.sample_posterior(jax.random.key(3), draws)),
        "nf.VFL, corrected": coefficients(corrected.sample_posterior(jax.random.key(3), draws)),
    }
    names = ["intercept", *(f"registry {i + 1}" for i in range(6))]
    names += [f"hospital {i + 1}" for i in range(4)]
    nuts, *others = fits.values()
    report = {}
    for name, found in zip(list(fits)[1:], others, strict=True):
        error = np.abs(found.mean(0) - nuts.mean(0)) / nuts.std(0)
        ratio = found.std(0) / nuts.std(0)
        report[name] = {"error": float(error.max()), "ratios": [ratio.min(), ratio.max()]}
        print(
            f"{name}: at most {error.max():.3f} posterior sd from NUTS in a mean, "
            f"ratios of sds {ratio.min():.3f} to {ratio.max():.3f}"
        )
    if args.json:
        report |= {"trusted": corrected.trusted, "effective_draws": corrected.ess}
        Path(args.json).write_text(json.dumps(report, indent=1, default=float))
    if args.plot:
        plot(fits, names).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
