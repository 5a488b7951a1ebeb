"""Fit one model of wheezing over two silos of children, and compare it with NUTS on all data.

537 children were examined for wheezing at the ages of 7, 8, 9 and 10; the mothers of 187 smoked
(Fitzmaurice and Laird 1993). Two silos hold 300 and 237 children. ``nf.fit`` finds the posterior of
the five globals without pooling rows. NUTS sees all rows, or those of one silo alone.

    python examples/six_cities.py --plot six_cities.png --json six_cities.json

``--all`` compares SFVI, SFVI-Avg, PVI and their corrections as well (benchmarks/six_cities.py).
``--quick`` takes 270 of the children and few draws.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(x, y=None):
    """Wheezing ``y`` (child, visit), given covariates ``x`` (child, visit, covariate)."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]).to_event(1))  # global
    omega = numpyro.sample("omega", dist.Normal(0, 10))  # global
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))  # local: one for each child
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


LABELS = ("intercept", "smoking", "age", "smoking x age", "omega")

# Children with each pattern of wheezing, 0000 to 1111 in the order of the ages 7, 8, 9, 10.
COUNTS = {
    0: [237, 10, 15, 4, 16, 2, 7, 3, 24, 3, 3, 2, 6, 2, 5, 11],  # mother does not smoke
    1: [118, 6, 8, 2, 11, 1, 6, 4, 7, 3, 3, 1, 4, 2, 4, 7],  # mother smokes
}


def six_cities():
    """Covariates (537, 4, 4) and wheezing (537, 4); the children in a fixed random order."""
    patterns = (np.arange(16)[:, None] >> np.array([3, 2, 1, 0])) & 1
    smoking = np.repeat([0, 1], [sum(COUNTS[0]), sum(COUNTS[1])])
    y = np.concatenate([np.repeat(patterns, COUNTS[s], axis=0) for s in (0, 1)])
    age = np.array([-2, -1, 0, 1])  # years from 9
    columns = np.broadcast_arrays(1, smoking[:, None], age, smoking[:, None] * age)
    order = np.random.default_rng(0).permutation(len(y))
    return np.stack(columns, -1)[order].astype(np.float32), y[order].astype(np.float32)


def silos(sizes=(300, 237)):
    """The children, or the first of them, in silos of these sizes."""
    x, y = (array[: sum(sizes)] for array in six_cities())
    cuts = np.cumsum(sizes)[:-1]
    return [dict(x=a, y=b) for a, b in zip(np.split(x, cuts), np.split(y, cuts), strict=True)]


def marginals(draws):
    """Draws of the five globals, an array (draws, 5)."""
    return np.column_stack([draws["beta"], draws["omega"]])


def plot(federated, pooled, alone):
    """Marginal densities of the five globals."""
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, axes = plt.subplots(1, 5, figsize=(13, 3.3), layout="constrained")
    for i, (axis, label) in enumerate(zip(axes, LABELS, strict=True)):
        grid = pooled[:, i].mean() + pooled[:, i].std() * np.linspace(-5, 5, 300)

        def density(draws, i=i, grid=grid):  # one bandwidth for all curves
            return gaussian_kde(draws[:, i], bw_method=0.25)(grid)

        axis.fill_between(grid, density(pooled), color="0.8", label="NUTS, all data")
        for j, draws in enumerate(alone):
            style = dict(color=f"C{j + 1}", linestyle=":", label=f"NUTS, silo {j} alone")
            axis.plot(grid, density(draws), **style)
        axis.plot(grid, density(federated), color="C0", label="nf.fit, two silos")
        axis.set(xlabel=label, yticks=[], ylim=(0, None))
        axis.spines[["left", "top", "right"]].set_visible(False)
    axes[0].set_ylabel("posterior density")
    legend = axes[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        "Two silos that share no row (blue) find the posterior of all data (grey). "
        "One silo alone (dotted) does not."
    )
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the marginal posteriors")
    parser.add_argument("--quick", action="store_true", help="fewer children and draws")
    parser.add_argument("--all", action="store_true", help="all methods: --averages adds SFVI-Avg")
    args, others = parser.parse_known_args()
    if args.all:
        script = Path(__file__).resolve().parents[1] / "benchmarks" / "six_cities.py"
        options = [option for option in sys.argv[1:] if option != "--all"]
        sys.exit(subprocess.run([sys.executable, script, *options]).returncode)
    if others:
        parser.error(f"unknown options {' '.join(others)}; some need --all")
    both = silos((150, 120) if args.quick else (300, 237))
    warmup, samples = (200, 400) if args.quick else (1_000, 5_000)  # of each of two chains

    seconds = {}

    def timed(name, run, *positional, **keywords):
        began = time.perf_counter()
        result = run(*positional, **keywords)
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.0f} s, compilation included", flush=True)
        return result

    def nuts(key, data):
        steps = dict(num_warmup=warmup, num_samples=samples, num_chains=2)
        return nf.run_nuts(jax.random.key(key), model, data, start=fitted.mode, **steps)

    fitted = timed("nf.fit", nf.fit, jax.random.key(0), model, both)
    print(fitted.verdict)
    reference = timed("NUTS, all data", nuts, 1, both)
    alone = [timed(f"NUTS, silo {j} alone", nuts, 2 + j, [silo]) for j, silo in enumerate(both)]
    comparison = nf.compare(fitted, reference)
    print(f"\n{comparison}")
    if args.json:
        report = {"verdict": fitted.verdict, "trusted": fitted.trusted, "seconds": seconds}
        report |= {"comparison": comparison.to_dict(), "nuts": reference.report()}
        Path(args.json).write_text(json.dumps(report, indent=1, default=np.ndarray.tolist))
    if args.plot:
        draws = fitted.sample_posterior(jax.random.key(9), 10_000)
        parts = [marginals(nuts.samples) for nuts in alone]
        plot(marginals(draws), marginals(reference.samples), parts).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
