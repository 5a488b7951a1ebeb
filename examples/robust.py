"""One of five silos has coded its outcome the wrong way round: PVI, and its robust form FedGVI.

Five silos hold 150 rows each of a logistic regression. At the last one, zeros and ones have changed
places. ``nf.PVI`` believes every label. ``nf.FedGVI`` puts the density power loss in the place of
minus the log likelihood: rows that the rest of the data contradicts then weigh little.

    python examples/robust.py --plot robust.png --json robust.json

Data are simulated. ``--quick`` takes few rounds and steps.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(x, y=None):
    """Outcomes ``y`` (row,), given covariates ``x`` (row, 2)."""
    bias = numpyro.sample("bias", dist.Normal(0, 2))
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([2]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=bias + x @ slopes), obs=y)


NAMES = ("intercept", "slope 1", "slope 2")
TRUE = (-0.5, 2.0, -1.5)


def simulate(rows=150, silos=5, seed=0):
    """What silos hold, with correct outcomes."""
    rng = np.random.default_rng(seed)
    held = []
    for _ in range(silos):
        x = rng.normal(size=(rows, 2)).astype(np.float32)
        p = 1 / (1 + np.exp(-TRUE[0] - x @ TRUE[1:]))
        held.append(dict(x=x, y=(rng.uniform(size=rows) < p).astype(np.float32)))
    return held


def coefficients(result):
    """Draws (draws, 3) of the intercept and the slopes."""
    draws = result.sample_posterior(jax.random.key(1), 4_000)
    return np.column_stack([draws["bias"], draws["slopes"]])


def plot(fits):
    """Marginal densities of the three coefficients."""
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    styles = (dict(color="0.6", linestyle="--"), dict(color="C1"), dict(color="C0"))
    every = np.concatenate(list(fits.values()))
    for i, axis in enumerate(axes):
        grid = np.linspace(every[:, i].min(), every[:, i].max(), 300)
        for (fit, draws), style in zip(fits.items(), styles, strict=True):
            axis.plot(grid, gaussian_kde(draws[:, i])(grid), label=fit, **style)
        axis.axvline(TRUE[i], color="k", linewidth=0.8, label="true value")
        axis.set(xlabel=NAMES[i], yticks=[], ylim=(0, None))
        axis.spines[["left", "top", "right"]].set_visible(False)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle("One silo of five is miscoded: PVI shrinks the slopes, FedGVI hardly does")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the posteriors")
    parser.add_argument("--quick", action="store_true", help="few rounds and steps")
    args = parser.parse_args()
    rounds = 2 if args.quick else 10
    clean = simulate()
    miscoded = [*clean[:-1], clean[-1] | dict(y=1 - clean[-1]["y"])]

    local = nf.local.Optax(steps=100 if args.quick else 500)
    pvi = nf.PVI(model, local=local)
    robust = nf.FedGVI(model, loss=nf.losses.beta_loss(1.5), local=local)
    runs = {
        "PVI, all silos correct": (pvi, clean),
        "PVI, one silo miscoded": (pvi, miscoded),
        "FedGVI, one silo miscoded": (robust, miscoded),
    }
    fits = {}
    for name, (method, silos) in runs.items():
        result = method.run(jax.random.key(0), rounds, silos, progress_bar=False)
        fits[name] = coefficients(result)
        mean, sd = fits[name].mean(0), fits[name].std(0)
        print(f"{name:26} {np.round(mean, 2)} +- {np.round(sd, 2)}, true {np.array(TRUE)}")
    if args.json:
        report = {
            name: {"mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist()}
            for name, draws in fits.items()
        }
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(fits).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
