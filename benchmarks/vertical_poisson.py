"""Cancer counts of areas whose covariates are at two registries: a multilevel Poisson regression.

Synthetic data as in Hassan, Sutton, Mira and Mengersen (2024), section 5.2: 2,000 areas, five
levels of remoteness, two clients with two covariates each, whose coefficients differ from level to
level and have a mean and a spread of their own there. Populations of 250 to 350 are the offset.
NUTS and mean-field inference on pooled data are set against the exact split, in which clients send
their predictors, and the augmented model, in which they send noisy ones.

    python benchmarks/vertical_poisson.py --plot poisson.png --json poisson.json

``--nuts`` runs NUTS on the augmented models as well, ``--quick`` shows the same with few areas and
rounds.
"""

import argparse
import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from record import distance, table_row, write

import numpyro_fed as nf

LEVELS = 5
SHOWN = {"mu": "mean of the slopes", "beta": "slope"}  # at level 0, first covariate, client 0


def predictor(held):
    """At a client: covariates of each area, and its level of remoteness."""
    covariates = held["x"].shape[-1]
    with numpyro.plate("covariate", covariates, dim=-1), numpyro.plate("level", LEVELS, dim=-2):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        beta = numpyro.sample("beta", dist.Normal(mu, sigma))
    return (held["x"] * beta[held["level"]]).sum(-1)


def integrated(held):
    """The same with the means integrated out, without the funnel in which NUTS gets stuck."""
    covariates = held["x"].shape[-1]
    with numpyro.plate("covariate", covariates, dim=-1), numpyro.plate("level", LEVELS, dim=-2):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        beta = numpyro.sample("beta", dist.Normal(0, jnp.sqrt(1 + sigma**2)))
    return (held["x"] * beta[held["level"]]).sum(-1)


def model(clients, log_population, y=None, predictor=predictor):
    """The multilevel model of the paper's section 5.2."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", predictor, clients)
    with numpyro.plate("area", eta.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(b + log_population + eta)), obs=y)


def simulate(areas, seed=0):
    """The model's arguments, and the values of all latents that made them: moderate ones, so that
    areas have some 5 to 200 cases. Draws of the priors would mean up to ten million.
    """
    r = np.random.default_rng(seed)
    values = {"b": np.array(-2.0)}
    for j in range(2):
        mu, sigma = 0.5 * r.normal(size=(LEVELS, 2)), np.full((LEVELS, 2), 0.3)
        beta = mu + sigma * r.normal(size=(LEVELS, 2))
        values |= {f"client_{j}/{n}": a for n, a in dict(mu=mu, sigma=sigma, beta=beta).items()}
    level = r.integers(0, LEVELS, areas)
    clients = [
        {"x": r.normal(size=(areas, 2)).astype(np.float32), "level": level} for _ in range(2)
    ]
    log_population = np.log(r.integers(250, 351, areas)).astype(np.float32)
    given = numpyro.handlers.substitute(model, values)
    seeded = numpyro.handlers.seed(given, jax.random.key(seed))
    y = numpyro.handlers.trace(seeded).get_trace(clients, log_population)["y"]["value"]
    return (clients, log_population, np.asarray(y, np.int32)), values


def sampled(text, args, draws):
    """NUTS on a text of the integrated model: draws, with means drawn given all else, and the
    effective number of draws of the slowest coordinate.
    """
    text = partial(text, predictor=integrated)
    mcmc = MCMC(NUTS(text), num_warmup=draws, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), *args)
    found = {n: a for n, a in mcmc.get_samples(group_by_chain=True).items() if n[-2:] != "/z"}
    ess = min(float(effective_sample_size(np.asarray(a)).min()) for a in found.values())
    found = {name: np.asarray(a)[0] for name, a in found.items()}
    r = np.random.default_rng(0)
    for j in range(2):
        sigma, beta = found[f"client_{j}/sigma"], found[f"client_{j}/beta"]
        spread = np.sqrt(sigma**2 / (1 + sigma**2))
        found[f"client_{j}/mu"] = beta / (1 + sigma**2) + spread * r.normal(size=beta.shape)
    return found, ess


def mean_field(args, rounds, draws):
    """NumPyro's own variational inference on pooled data."""
    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, rounds)), Trace_ELBO())
    fit = svi.run(jax.random.key(1), rounds, *args, progress_bar=False)
    return guide.sample_posterior(jax.random.key(2), fit.params, sample_shape=(draws,))


def compared(draws, reference):
    """Of each kind of latent, the worst error of a mean in sds and the range of ratios of sds."""
    found = {}
    for name, value in reference.items():
        value, mine = np.asarray(value), np.asarray(draws[name])
        error = float((np.abs(mine.mean(0) - value.mean(0)) / value.std(0)).max())
        ratios = mine.std(0) / value.std(0)
        before = found.get(name.split("/")[-1], {"error": 0.0, "ratios": [np.inf, -np.inf]})
        low, high = before["ratios"]
        found[name.split("/")[-1]] = {
            "error": max(error, before["error"]),
            "ratios": [min(low, float(ratios.min())), max(high, float(ratios.max()))],
        }
    return found


def shown(numbers):
    """A line of a table."""
    parts = (
        f"{name} {n['error']:.3f} sd, {n['ratios'][0]:.3f} to {n['ratios'][1]:.3f}"
        for name, n in sorted(numbers.items())
    )
    return "; ".join(parts)


LOOKS = {
    "NUTS": dict(color="0.75", lw=5, label="NUTS, pooled"),
    "mean field": dict(color="C0", ls="--", label="NumPyro's mean field, pooled"),
    "exact split": dict(color="black", lw=1.2, label="exact split"),
    "augmented": dict(color="C1", label="augmented, amortised"),
    "NUTS, augmented": dict(color="C1", ls=":", label="augmented, NUTS"),
}


def plot(path, samples, truth, rhos):
    """Marginals of one mean and of one slope, as Figure 4 of the paper: a column for each ``rho``.
    Peaks above that of NUTS are cut off.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(rhos), figsize=(4.5 * len(rhos), 6.2), squeeze=False)
    for row, (site, words) in zip(axes, SHOWN.items(), strict=True):
        for axis, rho in zip(row, rhos, strict=True):
            for look, style in LOOKS.items():
                name = f"{look}, rho {rho:g}" if "augmented" in look else look
                if name not in samples:
                    continue
                values = np.asarray(samples[name][f"client_0/{site}"])[:, 0, 0]
                density, edges = np.histogram(values, 50, density=True)
                axis.plot((edges[1:] + edges[:-1]) / 2, density, **style)
                if name == "NUTS":
                    top, middle, spread = 1.3 * density.max(), values.mean(), values.std()
            width = 4 if site == "mu" else 6
            axis.axvline(truth[f"client_0/{site}"][0, 0], color="C3", lw=0.8, label="true value")
            axis.set(
                title=f"rho = {rho:g}",
                xlabel=f"{words} of client 0's first covariate, level 0",
                xlim=(middle - width * spread, middle + width * spread),
                ylim=(0, top),
            )
        row[0].set_ylabel("posterior density")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw a mean's and a slope's marginals")
    parser.add_argument("--nuts", action="store_true", help="NUTS on the augmented models, too")
    parser.add_argument("--quick", action="store_true", help="fewer areas, rounds and draws")
    args = parser.parse_args()
    draws, rounds, areas = (200, 1_000, 100) if args.quick else (4_000, 5_000, 2_000)
    rhos = (1.0,) if args.quick else (1.0, 2.0)
    warnings.simplefilter("ignore")
    held, truth = simulate(areas)
    began, samples = time.perf_counter(), {}
    samples["NUTS"], ess = sampled(model, held, draws)
    numbers = {"NUTS": {"seconds": time.perf_counter() - began, "ess": ess}}
    print(f"NUTS ({numbers['NUTS']['seconds']:.0f} s): {ess:.0f} effective draws", flush=True)

    def note(name, found, began):
        samples[name] = found
        seconds = time.perf_counter() - began
        numbers[name] = compared(found, samples["NUTS"]) | {"seconds": seconds}
        by_site = {k: n for k, n in numbers[name].items() if k != "seconds"}
        print(f"{name} ({seconds:.0f} s): {shown(by_site)}", flush=True)

    began = time.perf_counter()
    note("mean field", mean_field(held, rounds, draws), began)
    settings = {"exact split": {}} | {
        f"augmented, rho {rho:g}": dict(rho=rho, auxiliary="amortised", start="mode")
        for rho in rhos
    }
    for name, setting in settings.items():
        began = time.perf_counter()
        result = nf.VFL(model, **setting).run(jax.random.key(1), rounds, *held, progress_bar=False)
        note(name, result.sample_posterior(jax.random.key(2), draws), began)
        if not setting:
            fixed = nf.importance_correct(jax.random.key(3), result, 2 * draws)
            print(fixed)
    if args.nuts:
        for rho in rhos:
            began = time.perf_counter()
            text = nf.handlers.augment(model, rho)
            found, ess = sampled(text, held, draws)
            note(f"NUTS, augmented, rho {rho:g}", found, began)
            print(f"{ess:.0f} effective draws")
    if args.json:
        words = {"b": "intercept", "beta": "slopes", "mu": "their means", "sigma": "their scales"}
        rows = [
            table_row(f"{name}: {words[site]}", distance(r["error"], r["ratios"]), "NUTS")
            for name, found in numbers.items()
            for site, r in found.items()
            if site in words
        ]
        write(args.json, rows, details=numbers)
    if args.plot:
        plot(args.plot, samples, truth, rhos)


if __name__ == "__main__":
    main()
