"""Maps whose areas are at several silos: infant deaths in North Carolina, and the US counties.

Every area has an effect under a proper autoregression (CAR), which ties all areas together. SFVI
and PVI fit the model over silos with a prior in the place of the true one in which silos are
independent given what they share: the exact separators, independent blocks, a shared part of low
rank, and a SIGMA prior, deterministic and auxiliary (Hassan, Bon, Semenova, Mira and Mengersen
2024, arXiv 2405.16055, section 4.2).

``--map sids`` (the default): 100 counties of North Carolina in four parts, each a silo. Deaths from
1974 to 1978 are Poisson, given births and the share of births that are not white. The reference is
NUTS on the true model and all data.

``--map counties``: the 3,109 contiguous counties of the US, 49 states as silos, in the place of the
paper's areas of Australia. As in the paper, values are a draw of the prior with noise of 0.5, and
the reference is the exact posterior, over a grid of the smoothing parameter.

    NUMPYRO_FED_DATA=... python benchmarks/sigma_map.py --plot sids --json sids.json
    NUMPYRO_FED_DATA=... python benchmarks/sigma_map.py --map counties --plot us --json us.json

The folder holds ``nc_sids.npz`` (``sids74``, ``births74``, ``nonwhite74``, ``lonlat``,
``edges_CR85``) and ``us_counties.npz`` (``state``, ``state_names``, ``contiguous``, ``edges``).
Without it a square map of 100 areas (25 with ``--quick``) and simulated counts take the place of
North Carolina.
``--plot`` is the start of the figures' names: maps of what each fit makes of the effects, where
places are known, and means against the reference's (Figures 6 and 7 of the paper). ``--quick``
trains and draws little, for two of the priors; of the counties it takes New England.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write

import numpyro_fed as nf

FOLDER = "NUMPYRO_FED_DATA"
NEW_ENGLAND = ("CT", "MA", "ME", "NH", "RI", "VT")
NOISE = 0.5  # of the counties' values
METHODS = {"SFVI": nf.SFVI, "PVI": nf.PVI}


class Map(NamedTuple):
    """A model of a map and its data: places of areas (areas, 2) or None, the areas of each silo."""

    model: Callable
    places: np.ndarray | None
    areas: list
    silos: list
    reference: Callable  # means and standard deviations, and what else is known of them


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


def sids(draws, side):
    """Deaths of infants in North Carolina, or a simulated map."""
    file = Path(os.environ.get(FOLDER, "")) / "nc_sids.npz"
    W, places, deaths, births, share = north_carolina(file) if file.is_file() else square(side)
    areas = quarters(places)

    def model(area, births, share, deaths=None):
        b = numpyro.sample("b", dist.Normal(-6, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        alpha = numpyro.sample("alpha", dist.Beta(4, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        theta = numpyro.sample("theta", dist.CAR(0.0, alpha, 1.0, W))
        with nf.silo_plate("county", area.shape[0]):
            rate = births * jnp.exp(b + slope * share + scale * theta[area])
            numpyro.sample("deaths", dist.Poisson(rate), obs=deaths)

    silos = [
        dict(area=own, births=births[own], share=share[own], deaths=deaths[own]) for own in areas
    ]
    return Map(model, places, areas, silos, lambda: by_nuts(model, silos, draws))


def counties(states=None, seed=0):
    """Values of the counties of some states, or of all contiguous ones."""
    file = Path(os.environ.get(FOLDER, "")) / "us_counties.npz"
    if not file.is_file():
        raise SystemExit("say by NUMPYRO_FED_DATA in which folder us_counties.npz lies")
    with np.load(file) as d:
        kept = d["contiguous"]
        if states:
            kept = kept & np.isin(d["state_names"][d["state"]], states)
        edges = (np.cumsum(kept) - 1)[d["edges"][kept[d["edges"]].all(1)]]
        state = d["state"][kept]
    W = np.zeros((len(state), len(state)))
    W[edges[:, 0], edges[:, 1]] = W[edges[:, 1], edges[:, 0]] = 1
    r, precision = np.random.default_rng(seed), np.diag(W.sum(1)) - 0.9 * W
    theta = np.linalg.solve(np.linalg.cholesky(precision).T, r.normal(size=len(W)))
    y = theta + NOISE * r.normal(size=len(W))
    areas = [np.flatnonzero(state == j) for j in np.unique(state)]

    def model(area, y=None):
        logit = numpyro.sample("logit_phi", dist.Normal(0, np.sqrt(2)))
        theta = numpyro.sample("theta", dist.CAR(0.0, jax.nn.sigmoid(logit), 1.0, W))
        with nf.silo_plate("county", area.shape[0]):
            numpyro.sample("y", dist.Normal(theta[area], NOISE), obs=y)

    silos = [dict(area=own, y=y[own]) for own in areas]
    return Map(model, None, areas, silos, lambda: exact(W, y))


def exact(W, y):
    """The counties' posterior, over a grid of the smoothing parameter's logit."""
    degrees, scale = W.sum(1), 1 / np.sqrt(W.sum(1))
    eigenvalues = np.linalg.eigvalsh(W * scale * scale[:, None])
    parts = []
    for logit in np.linspace(-4, 7, 34):
        phi = 1 / (1 + np.exp(-logit))
        cov = np.linalg.inv(np.diag(degrees + 1 / NOISE**2) - phi * W)
        mean = cov @ y / NOISE**2
        log_p = 0.5 * np.log1p(-phi * eigenvalues).sum() + 0.5 * np.linalg.slogdet(cov)[1]
        log_p += 0.5 * mean @ y / NOISE**2 - logit**2 / 4
        parts.append((log_p, mean, np.diag(cov)))
    log_p, means, variances = (np.array(p) for p in zip(*parts, strict=True))
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    mean = weights @ means
    return mean, np.sqrt(weights @ (variances + (means - mean) ** 2)), {}


def of_silos(result, areas, draws):
    """Draws of all effects, each silo's at the same draws of what silos share."""
    found = [result.sample_posterior(jax.random.key(2), draws, silo=j) for j in range(len(areas))]
    theta = np.zeros((draws, sum(map(len, areas))))
    for own, sites in zip(areas, found, strict=True):
        theta[:, own] = effects(sites)[:, own]
    return theta


def effects(sites):
    """Of areas, in units of what is observed."""
    theta = np.asarray(sites["theta"])
    return np.asarray(sites["scale"])[:, None] * theta if "scale" in sites else theta


def compared(theta, mean, sd):
    """Means in the reference's standard deviations, and ratios of these, over all areas."""
    off = (theta.mean(0) - mean) / sd
    return {
        "rmse": float(np.sqrt(np.mean(off**2))),
        "worst": float(abs(off).max()),
        "sd_ratio": float((theta.std(0) / sd).mean()),
    }


def by_nuts(model, silos, draws):
    """Means and standard deviations of effects under the true model, on all data."""
    pooled = {k: np.concatenate([s[k] for s in silos]) for k in silos[0]}
    kernel = numpyro.infer.NUTS(model, target_accept_prob=0.9)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), **pooled)
    samples = mcmc.get_samples()
    found = effects(samples)
    every = {**samples, "effect": found}
    ess = min(
        float(np.min(numpyro.diagnostics.effective_sample_size(np.asarray(v)[None])))
        for v in every.values()
    )
    return found.mean(0), found.std(0), {"ess": ess}


def plot(path, places, areas, reference, fits):
    """Maps of the effects, and each fit's means against the reference's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (mean, _), first = reference, next(iter(fits))[1]
    if places is not None:
        maps = {prior: theta.mean(0) for (prior, method), theta in fits.items() if method == first}
        shown = {"reference": mean, **maps}
        columns = -(-len(shown) // 2)
        figure, axes = plt.subplots(
            2, columns, figsize=(3.2 * columns, 4.6), squeeze=False, layout="constrained"
        )
        top = abs(mean).max()
        for axis, (name, value) in zip(axes.flat, shown.items(), strict=False):
            for own, mark in zip(areas, "os^D", strict=True):
                x, y = places[own].T
                image = axis.scatter(
                    x, y, c=value[own], marker=mark, s=22, cmap="RdBu_r", vmin=-top, vmax=top
                )
            axis.set_title(name, fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        figure.colorbar(image, ax=axes, label="posterior mean of the effect")
        figure.suptitle(f"{first}; a symbol a silo", fontsize=9)
        figure.savefig(f"{path}_effects.png", dpi=130)

    priors, methods = (list(dict.fromkeys(names)) for names in zip(*fits, strict=True))
    figure, axes = plt.subplots(
        len(methods), len(priors), figsize=(2.4 * len(priors), 2.3 * len(methods) + 0.4),
        squeeze=False, sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    ends = mean.min(), mean.max()
    for (prior, method), theta in fits.items():
        axis = axes[methods.index(method), priors.index(prior)]
        axis.plot(ends, ends, color="0.7", lw=0.8)
        axis.plot(mean, theta.mean(0), ".", ms=3)
    for axis, prior in zip(axes[0], priors, strict=True):
        axis.set_title(prior, fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("reference's mean")
    for axis, method in zip(axes[:, 0], methods, strict=True):
        axis.set_ylabel(f"mean by {method}")
    figure.savefig(f"{path}_means.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", choices=("sids", "counties"), default="sids")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="NAME", help="draw NAME_effects.png and NAME_means.png")
    parser.add_argument("--steps", type=int, default=20_000, help="of the training")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    args = parser.parse_args()
    steps, draws = (30, 40) if args.quick else (args.steps, 4_000)
    rounds = {"SFVI": 10 if args.quick else 3_000, "PVI": 1 if args.quick else 5}
    if args.map == "sids":
        here = sids(draws, 5) if args.quick else sids(5 * draws, 10)
        rank, sizes = (5, dict(z_global=10)) if args.quick else (20, dict(z_global=50))
    else:
        here = counties(NEW_ENGLAND if args.quick else None)
        rank, sizes = (20 if args.quick else 150), dict(z_global=20 if args.quick else 100)
    began = time.perf_counter()
    mean, sd, said = here.reference()
    numbers = {"reference": {"seconds": time.perf_counter() - began, **said}}
    print(f"reference ({numbers['reference']['seconds']:.0f} s) {said}", flush=True)
    held = dict(model_kwargs=here.silos[0])
    began = time.perf_counter()
    sigma = nf.SigmaPrior.fit(
        jax.random.key(1), here.model, "theta", here.areas, num_steps=steps, width=128,
        progress_bar=False, **sizes, **held,
    )  # fmt: skip
    numbers["training"] = {"seconds": time.perf_counter() - began, **sigma.times}
    print(f"SIGMA prior ({numbers['training']['seconds']:.0f} s)")
    print(sigma.check(jax.random.key(3), num_draws=min(draws, 2_000)), flush=True)
    closed = here.model, "theta", here.areas
    priors = {
        "separators": nf.SeparatorPrior.fit(*closed, **held),
        "low rank and blocks": nf.LowRankPrior.fit(*closed, rank=rank, **held),
        "independent blocks": nf.BlockPrior.fit(*closed, **held),
        "SIGMA, auxiliary": sigma,
        "SIGMA, deterministic": sigma.deterministic,
    }
    if args.quick:
        priors = {name: priors[name] for name in ("low rank and blocks", "SIGMA, auxiliary")}
    fits = {}
    for prior_name, prior in priors.items():
        federated = nf.handlers.substitute_prior(here.model, {"theta": prior})
        for method in args.methods:
            began, name = time.perf_counter(), f"{prior_name}, {method}"
            # A few rounds, to see that it runs, are not worth a search for the mode.
            fit = METHODS[method](federated, start=None if args.quick else "mode")
            result = fit.run(jax.random.key(4), rounds[method], here.silos, progress_bar=False)
            theta = fits[prior_name, method] = of_silos(result, here.areas, draws)
            seconds = time.perf_counter() - began
            found = numbers[name] = compared(theta, mean, sd) | {"seconds": seconds}
            print(
                f"{name:27} ({seconds:.0f} s): rmse {found['rmse']:.3f} sd, worst "
                f"{found['worst']:.3f}, sd ratio {found['sd_ratio']:.3f}",
                flush=True,
            )
    if args.json:
        lines = [
            table_row(f"{name}: rmse, worst, ratio of sds", words)
            for name, r in numbers.items()
            if "rmse" in r
            for words in [f"{r['rmse']:.3f}, {r['worst']:.3f} sd, {r['sd_ratio']:.3f}"]
        ]
        write(args.json, lines, details=numbers)
    if args.plot:
        plot(args.plot, here.places, here.areas, (mean, sd), fits)


if __name__ == "__main__":
    main()
