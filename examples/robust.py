"""One of five silos has recorded part of its outcomes in another unit: PVI, and FedGVI.

Five silos hold 60 rows each of a linear regression. At the last one, every second outcome is 2.2
times too large. ``nf.PVI`` believes every row. ``nf.FedGVI`` puts a robust loss, the density power
loss, in the place of minus the log likelihood: a row far from the line then hardly counts.

    python examples/robust.py --plot robust.png --json robust.json

Data are simulated. ``--quick`` takes few rounds and steps.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(x, y=None):
    """Outcomes ``y`` (row,) on a line, given ``x`` (row,)."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 10))
    slope = numpyro.sample("slope", dist.Normal(0, 10))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 2))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + slope * x, jnp.exp(log_sigma)), obs=y)


INTERCEPT, SLOPE, SIGMA = 2.0, 1.0, 1.0
FACTOR = 2.2  # of wrong outcomes


def simulate(rows=60, silos=5, seed=0):
    """What silos hold, and which rows of each are wrong."""
    rng = np.random.default_rng(seed)
    held, wrong = [], []
    for j in range(silos):
        x = rng.uniform(0, 10, rows)
        y = INTERCEPT + SLOPE * x + SIGMA * rng.normal(size=rows)
        wrong.append((j == silos - 1) & (np.arange(rows) % 2 == 0))
        held.append(dict(x=x, y=np.where(wrong[-1], FACTOR * y, y)))
    return held, wrong


COLORS = {"PVI": "C1", "FedGVI": "C0"}


def plot(silos, wrong, fits):
    """Rows with the fitted lines, and the posterior of the slope."""
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained"
    )
    x, y = (np.concatenate([silo[name] for silo in silos]) for name in ("x", "y"))
    wrong, grid = np.concatenate(wrong), np.linspace(0, 10, 50)
    left.plot(x[~wrong], y[~wrong], ".", color="0.7", label="right outcomes, five silos")
    left.plot(x[wrong], y[wrong], "x", color="C3", label="wrong outcomes, one silo")
    left.plot(grid, INTERCEPT + SLOPE * grid, "k:", label="true line")
    slopes = np.linspace(0.8 * SLOPE, max(d["slope"].max() for d in fits.values()), 300)
    for name, draws in fits.items():
        lines = draws["intercept"][:, None] + draws["slope"][:, None] * grid
        low, high = np.quantile(lines, (0.025, 0.975), axis=0)
        left.plot(grid, lines.mean(0), color=COLORS[name], label=f"{name}, mean and 95 %")
        left.fill_between(grid, low, high, color=COLORS[name], alpha=0.3, linewidth=0)
        right.plot(slopes, gaussian_kde(draws["slope"])(slopes), color=COLORS[name], label=name)
    right.axvline(SLOPE, color="k", linestyle=":", label="true slope")
    left.set(xlabel="x", ylabel="y")
    right.set(xlabel="slope", ylabel="posterior density", yticks=[], ylim=(0, None))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle("Wrong rows of one silo pull PVI off the true line; FedGVI stays on it")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the lines")
    parser.add_argument("--quick", action="store_true", help="few rounds and steps")
    args = parser.parse_args()
    rounds = 2 if args.quick else 10
    silos, wrong = simulate()

    local = nf.local.Optax(steps=200 if args.quick else 500)
    methods = {
        "PVI": nf.PVI(model, local=local),
        "FedGVI": nf.FedGVI(model, loss=nf.losses.beta_loss(1.5), local=local),
    }
    fits, report = {}, {}
    for name, method in methods.items():
        result = method.run(jax.random.key(0), rounds, silos, progress_bar=False)
        draws = result.sample_posterior(jax.random.key(1), 4_000)
        fits[name] = {site: np.asarray(values) for site, values in draws.items()}
        report[name] = {s: [float(v.mean()), float(v.std())] for s, v in fits[name].items()}
        line = ", ".join(f"{s} {mean:.2f} +- {sd:.2f}" for s, (mean, sd) in report[name].items())
        print(f"{name:6} {line}")
    print(f"true   intercept {INTERCEPT}, slope {SLOPE}, log_sigma {np.log(SIGMA)}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(silos, wrong, fits).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
