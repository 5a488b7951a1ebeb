"""A map whose areas are at several silos: sudden infant deaths in North Carolina, 1974 to 1978.

100 counties in four parts, each a silo. Deaths are Poisson, given births, the share of births that
are not white, and an effect of each county under a proper autoregression (CAR), which ties all of
them together. The true model is fitted by NUTS on all data; SFVI fits it over silos with a
prior in its place in which silos are independent given what they share: the exact separators,
independent blocks, a shared part of low rank, and a SIGMA prior, deterministic and auxiliary
(Hassan, Bon, Semenova, Mira and Mengersen 2024, arXiv 2405.16055, section 4.2).

    NUMPYRO_FED_DATA=... python examples/sigma_map.py --plot map --json map.json

Without the folder (``nc_sids.npz``: ``sids74``, ``births74``, ``nonwhite74``, ``lonlat``,
``edges_CR85``) a square map of 100 areas and simulated counts take its place. ``--plot`` is the
start of two figures' names: what each fit makes of the map, and means against NUTS's (Figures 6 and
7 of the paper). ``--quick`` trains and draws little.
"""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

FOLDER = "NUMPYRO_FED_DATA"


def north_carolina(path):
    """Adjacency, places, deaths, births and the share of births that are not white."""
    with np.load(path) as d:
        n, edges = len(d["sids74"]), d["edges_CR85"]
        W = np.zeros((n, n))
        W[edges[:, 0], edges[:, 1]] = W[edges[:, 1], edges[:, 0]] = 1
        share = d["nonwhite74"] / d["births74"]
        return W, d["lonlat"], d["sids74"], d["births74"].astype(np.float32), share


def square(side=10, seed=0):
    """The same of a square map, simulated."""
    r, (i, j) = np.random.default_rng(seed), np.divmod(np.arange(side**2), side)
    W = (abs(i[:, None] - i) + abs(j[:, None] - j) == 1).astype(float)
    births, share = r.lognormal(7.7, 0.8, side**2), r.uniform(0, 0.6, side**2)
    effect = np.linalg.cholesky(np.linalg.inv(10 * (np.diag(W.sum(1)) - 0.95 * W)))
    rate = np.exp(-6.7 + 1.8 * share + effect @ r.normal(size=side**2))
    places = np.stack([j, i], 1).astype(float)
    return W, places, r.poisson(births * rate), births.astype(np.float32), share


def quarters(places):
    """Areas of four silos: west to east, and each half south to north."""
    half = places[:, 0] > np.median(places[:, 0])
    of = 2 * half.astype(int)
    for h in (0, 1):
        mine = np.flatnonzero(half == h)
        of[mine] += places[mine, 1] > np.median(places[mine, 1])
    return [np.flatnonzero(of == j) for j in range(4)]


def text(W):
    """The true model of a map."""

    def model(area, births, share, deaths=None):
        b = numpyro.sample("b", dist.Normal(-6, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        alpha = numpyro.sample("alpha", dist.Beta(4, 1))
        tau = numpyro.sample("tau", dist.Gamma(2, 0.2))
        theta = numpyro.sample("theta", dist.CAR(0.0, alpha, tau, W))
        with nf.silo_plate("county", area.shape[0]):
            rate = births * jnp.exp(b + slope * share + theta[area])
            numpyro.sample("deaths", dist.Poisson(rate), obs=deaths)

    return model


def of_silos(result, areas, draws, name="theta"):
    """Draws of all effects, each silo's at the same draws of what silos share."""
    found = [result.sample_posterior(jax.random.key(2), draws, silo=j) for j in range(len(areas))]
    theta = np.zeros((draws, sum(map(len, areas))))
    for own, sites in zip(areas, found, strict=True):
        theta[:, own] = np.asarray(sites[name])[:, own]
    return theta


def compared(theta, reference):
    """Means in NUTS's standard deviations, and ratios of these, over all areas."""
    sd = reference.std(0)
    off = (theta.mean(0) - reference.mean(0)) / sd
    return {
        "rmse": float(np.sqrt(np.mean(off**2))),
        "worst": float(abs(off).max()),
        "sd_ratio": float((theta.std(0) / sd).mean()),
    }


def by_nuts(model, silos, draws):
    """Draws of the true model on all data, and the fewest effective ones."""
    pooled = {k: np.concatenate([s[k] for s in silos]) for k in silos[0]}
    kernel = numpyro.infer.NUTS(model, target_accept_prob=0.9)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), **pooled)
    samples = mcmc.get_samples()
    ess = [
        np.min(numpyro.diagnostics.effective_sample_size(np.asarray(v)[None]))
        for v in samples.values()
    ]
    return np.asarray(samples["theta"]), float(min(ess))


def plot(path, places, areas, reference, fits):
    """Maps of the effects, and how far each fit's are from NUTS's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {"NUTS": reference, **fits}
    columns = -(-len(shown) // 2)
    figure, axes = plt.subplots(2, columns, figsize=(3.2 * columns, 4.6), squeeze=False)
    top = abs(reference.mean(0)).max()
    marks = "os^D"
    for axis, (name, theta) in zip(axes.flat, shown.items(), strict=False):
        for own, mark in zip(areas, marks, strict=True):
            x, y = places[own].T
            image = axis.scatter(
                x, y, c=theta.mean(0)[own], marker=mark, s=22, cmap="RdBu_r", vmin=-top, vmax=top
            )
        axis.set_title(name, fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    figure.colorbar(image, ax=axes, label="posterior mean of the effect (log rate)")
    figure.suptitle("A symbol a silo", fontsize=9)
    figure.savefig(f"{path}_effects.png", dpi=130, bbox_inches="tight")

    figure, axis = plt.subplots(figsize=(8, 3.6))
    off = [(theta.mean(0) - reference.mean(0)) / reference.std(0) for theta in fits.values()]
    axis.boxplot(off, orientation="horizontal", tick_labels=list(fits))
    axis.axvline(0, color="0.7", lw=0.8)
    axis.set_xlabel("posterior mean less NUTS's, in its standard deviations")
    figure.tight_layout()
    figure.savefig(f"{path}_means.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="NAME", help="draw NAME_effects.png and NAME_means.png")
    parser.add_argument("--steps", type=int, default=20_000, help="of the training")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    args = parser.parse_args()
    steps, rounds, draws = (30, 10, 40) if args.quick else (args.steps, 3_000, 4_000)
    file = Path(os.environ.get(FOLDER, "")) / "nc_sids.npz"
    W, places, deaths, births, share = north_carolina(file) if file.is_file() else square()
    areas, model = quarters(places), text(W)
    silos = [
        dict(area=own, births=births[own], share=share[own], deaths=deaths[own]) for own in areas
    ]
    began = time.perf_counter()
    reference, ess = by_nuts(model, silos, draws)
    numbers = {"NUTS": {"seconds": time.perf_counter() - began, "ess": ess}}
    print(f"NUTS ({numbers['NUTS']['seconds']:.0f} s): {ess:.0f} effective draws", flush=True)
    held = dict(model_kwargs=silos[0])
    began = time.perf_counter()
    sigma = nf.SigmaPrior.fit(
        jax.random.key(1), model, "theta", areas, num_steps=steps, z_global=50, noise=0.3,
        width=128, progress_bar=False, **held,
    )  # fmt: skip
    numbers["training"] = {"seconds": time.perf_counter() - began, **sigma.times}
    print(f"SIGMA prior ({numbers['training']['seconds']:.0f} s)")
    print(sigma.check(jax.random.key(3), num_draws=min(draws, 2_000)), flush=True)
    priors = {
        "separators": nf.SeparatorPrior.fit(model, "theta", areas, **held),
        "low rank and blocks": nf.LowRankPrior.fit(model, "theta", areas, rank=20, **held),
        "independent blocks": nf.BlockPrior.fit(model, "theta", areas, **held),
        "SIGMA, auxiliary": sigma,
        "SIGMA, deterministic": sigma.deterministic,
    }
    fits = {}
    for name, prior in priors.items():
        began = time.perf_counter()
        federated = nf.handlers.substitute_prior(model, {"theta": prior})
        result = nf.SFVI(federated).run(jax.random.key(4), rounds, silos, progress_bar=False)
        fits[name] = of_silos(result, areas, draws)
        seconds = time.perf_counter() - began
        numbers[name] = compared(fits[name], reference) | {"seconds": seconds}
        found = numbers[name]
        print(
            f"{name:22} ({seconds:.0f} s): rmse {found['rmse']:.3f} sd, worst "
            f"{found['worst']:.3f}, sd ratio {found['sd_ratio']:.3f}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as out:
            json.dump(numbers, out, indent=1)
    if args.plot:
        plot(args.plot, places, areas, reference, fits)


if __name__ == "__main__":
    main()
