"""A map over four silos: areas at a border depend on areas of another silo.

Each of 64 areas has cases of a disease, and an effect that is tied to its neighbours' (a proper
autoregression, CAR). Four silos hold 16 areas each, and none can evaluate its part of that prior.
``nf.SeparatorPrior`` puts an exact prior in its place: areas at borders are shared, and interiors
are independent given these. ``nf.SFVI`` fits the result; NUTS runs the true model on all data.

    python examples/map.py --plot map.png --json map.json

Data are simulated. ``--quick`` takes 16 areas, few rounds and draws.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import numpyro_fed as nf


def map_of(neighbours):
    """The model of a map whose areas have these neighbours (area, area)."""

    def model(area, expected, cases=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        alpha = numpyro.sample("alpha", dist.Beta(4, 1))  # how strongly neighbours are tied
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        theta = numpyro.sample("theta", dist.CAR(0.0, alpha, 1.0, neighbours))  # the whole map
        with nf.silo_plate("area", area.shape[0]):
            rate = expected * jnp.exp(b + scale * theta[area])
            numpyro.sample("cases", dist.Poisson(rate), obs=cases)

    return model


def simulate(side, seed=0):
    """Neighbours on a square map, the areas of four silos, and what each silo holds."""
    rng = np.random.default_rng(seed)
    i, j = np.divmod(np.arange(side**2), side)
    neighbours = (abs(i[:, None] - i) + abs(j[:, None] - j) == 1).astype(float)
    precision = np.diag(neighbours.sum(1)) - 0.98 * neighbours
    effect = np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=side**2))
    expected = rng.uniform(5, 25, side**2)
    cases = rng.poisson(expected * np.exp(0.8 * effect))
    quarter = 2 * (i >= side // 2) + (j >= side // 2)
    areas = [np.flatnonzero(quarter == q) for q in range(4)]
    return neighbours, areas, [dict(area=a, expected=expected[a], cases=cases[a]) for a in areas]


def log_risks(draws):
    """Draws of the log relative risk of all areas (draws, area)."""
    b, scale, theta = (np.asarray(draws[name]) for name in ("b", "scale", "theta"))
    return b[:, None] + scale[:, None] * theta


def plot(panels, side):
    """Maps of relative risks, with the borders of silos."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.9), layout="constrained")
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        grid = values.reshape(side, side)
        image = axis.imshow(grid, cmap="RdBu_r", vmin=-1.6, vmax=1.6)
        axis.axhline(side / 2 - 0.5, color="k", linewidth=1)
        axis.axvline(side / 2 - 0.5, color="k", linewidth=1)
        axis.set(title=name, xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, label="log relative risk", shrink=0.9)
    figure.suptitle("The map of four silos (middle) is NUTS's map of all data (right)")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the maps")
    parser.add_argument("--quick", action="store_true", help="fewer areas, rounds and draws")
    args = parser.parse_args()
    side, rounds, draws = (4, 500, 200) if args.quick else (8, 2_000, 2_000)
    neighbours, areas, silos = simulate(side)
    model = map_of(neighbours)

    prior = nf.SeparatorPrior.fit(model, "theta", areas, model_kwargs=silos[0])
    federated = nf.handlers.substitute_prior(model, {"theta": prior})
    began = time.perf_counter()
    sfvi = nf.SFVI(federated, start=None if args.quick else "mode")
    result = sfvi.run(jax.random.key(0), rounds, silos)
    print(f"nf.SFVI: {time.perf_counter() - began:.0f} s, compilation included")
    found = np.zeros((draws, side**2))
    for j, own in enumerate(areas):  # the same key: the same draws of what silos share
        at_silo = result.sample_posterior(jax.random.key(1), draws, silo=j)
        found[:, own] = log_risks(at_silo)[:, own]

    pooled = {name: np.concatenate([silo[name] for silo in silos]) for name in silos[0]}
    kernel = NUTS(model, target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_warmup=draws // 2, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(2), **pooled)
    nuts = log_risks(mcmc.get_samples())

    error = (found.mean(0) - nuts.mean(0)) / nuts.std(0)
    ratio = float(np.mean(found.std(0) / nuts.std(0)))
    report = {"rmse": float(np.sqrt(np.mean(error**2))), "worst": float(abs(error).max())}
    report["sd_ratio"] = ratio
    print(
        f"means of areas against NUTS: {report['rmse']:.3f} posterior sd off (root mean square), "
        f"{report['worst']:.3f} at worst; mean ratio of sds {ratio:.3f}"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    if args.plot:
        observed = np.zeros(side**2)
        for silo in silos:
            observed[silo["area"]] = np.log((silo["cases"] + 0.5) / silo["expected"])
        panels = {"observed": observed, "nf.SFVI over silos": found.mean(0)}
        plot(panels | {"NUTS, all data": nuts.mean(0)}, side).savefig(args.plot, dpi=110)


if __name__ == "__main__":
    main()
