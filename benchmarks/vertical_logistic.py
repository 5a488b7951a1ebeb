"""Logistic regression whose columns are at several clients: three models, against NUTS.

Synthetic data as in Hassan, Sutton, Mira and Mengersen (2024), section 5.1: 500 rows, 20 standard
normal covariates, a standard normal added to each row's linear predictor; two clients with ten
columns each, or ten with two. The model as it is written is fitted by the exact split, in which
clients send their predictors, and corrected by importance weights; the augmented and the
power-likelihood model, in which they send noisy ones, by mean-field and amortised guides. All are
compared with NUTS on the model as it is written.

    python benchmarks/vertical_logistic.py --plot vertical.png --json vertical.json

``--nuts`` runs NUTS on the augmented and the power-likelihood models as well, ``--quick`` shows the
same with few rows and draws.
"""

import argparse
import time
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from record import distance, table_row, write

import numpyro_fed as nf

GUIDES = ("mean_field", "amortised")
BEGIN = dict(start="mode")  # all fits begin at one place; it takes predictors without noise


def predictor(x):
    """At a client: its columns and its coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    return x @ beta


def model(xs, y=None):
    """Table 1 of the paper, left."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", predictor, xs)
    with numpyro.plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + eta), obs=y)


def simulate(rows, covariates, clients, seed=0):
    """Columns of each client, and the response."""
    r = np.random.default_rng(seed)
    x, beta = r.normal(size=(rows, covariates)).astype(np.float32), r.normal(size=covariates)
    eta = x @ beta + 0.3 + r.normal(size=rows)
    y = (r.uniform(size=rows) < 1 / (1 + np.exp(-eta))).astype(np.int32)
    return np.split(x, clients, axis=1), y


def sampled(text, xs, y, draws):
    """NUTS on any text."""
    mcmc = MCMC(NUTS(text), num_warmup=draws // 10, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), xs, y)
    return mcmc.get_samples()


def compared(draws, reference):
    """Worst error of a mean in sds, and the range of the ratios of sds."""
    errors, ratios = [], []
    for name, value in reference.items():
        value, mine = np.asarray(value), np.asarray(draws[name])
        errors.append(np.abs(mine.mean(0) - value.mean(0)) / value.std(0))
        ratios.append(mine.std(0) / value.std(0))
    errors, ratios = (np.concatenate([np.ravel(a) for a in each]) for each in (errors, ratios))
    return {"error": float(errors.max()), "ratios": [float(ratios.min()), float(ratios.max())]}


def fitted(xs, y, rounds, **settings):
    """A run with defaults, its posterior, and what it took."""
    began = time.perf_counter()
    result = nf.VFL(model, **settings).run(jax.random.key(1), rounds, xs, y, progress_bar=False)
    seconds = time.perf_counter() - began
    bound = -float(result.losses[-len(result.losses) // 4 :].mean())
    return result, {"seconds": seconds, "bound": bound}


def settings_of(rhos, quick):
    """By name, all that is fitted."""
    yield "exact split", {}
    if quick:
        yield (
            f"augmented, rho {rhos[0]}, amortised",
            dict(rho=rhos[0], auxiliary="amortised", **BEGIN),
        )
        return
    for rho in rhos:
        for guide in GUIDES:
            yield f"augmented, rho {rho}, {guide}", dict(rho=rho, auxiliary=guide, **BEGIN)
        for guide in GUIDES:
            power = dict(rho=rho, auxiliary=guide, likelihood="power", share_response=True)
            yield f"power, rho {rho}, {guide}", power | BEGIN


def measured(clients, args, draws, rounds, rhos):
    """All fits for one number of clients: numbers and draws by name."""
    xs, y = simulate(100 if args.quick else 500, 20, clients)
    began = time.perf_counter()
    reference = sampled(model, xs, y, draws)
    found = {"NUTS": {"seconds": time.perf_counter() - began}}
    samples, key = {"NUTS": reference}, jax.random.key(2)
    if args.nuts:
        for rho in rhos:
            for handler in (nf.handlers.augment, nf.handlers.power_likelihood):
                name = f"NUTS, {handler.__name__}, rho {rho}"
                samples[name] = sampled(handler(model, rho), xs, y, draws)
                found[name] = compared(samples[name], reference)
                print(f"{clients:2d} clients, {name}: {shown(found[name])}", flush=True)
    for name, settings in settings_of(rhos, args.quick):
        result, numbers = fitted(xs, y, rounds, **settings)
        samples[name] = result.sample_posterior(key, 2 * draws)
        found[name] = numbers | compared(samples[name], reference)
        print(f"{clients:2d} clients, {name}: {shown(found[name])}", flush=True)
        if not settings:
            fixed = nf.importance_correct(jax.random.key(3), result, 2 * draws)
            samples[f"{name}, corrected"] = fixed.sample_posterior(key, 2 * draws)
            found[f"{name}, corrected"] = compared(samples[f"{name}, corrected"], reference) | {
                "pareto_k": fixed.pareto_k,
                "ess": fixed.ess,
            }
            print(f"{clients:2d} clients, corrected: {shown(found[f'{name}, corrected'])}. {fixed}")
    return found, samples


def shown(numbers):
    """A line of a table."""
    low, high = numbers["ratios"]
    return f"{numbers['error']:.3f} sd, ratios {low:.3f} to {high:.3f}"


STYLES = {
    "NUTS": dict(color="0.75", lw=5, label="NUTS, model as it is written"),
    "exact split": dict(color="black", lw=1.2, label="exact split"),
    "augmented, mean_field": dict(color="C0", ls="--", label="augmented, mean field"),
    "augmented, amortised": dict(color="C0", label="augmented, amortised"),
    "power, mean_field": dict(color="C1", ls="--", label="power likelihood, mean field"),
    "power, amortised": dict(color="C1", label="power likelihood, amortised"),
}


def plot(path, samples, rhos):
    """Marginals of one coefficient, as Figures 2(b) and 3(b) of the paper: a row for each number of
    clients, a column for each ``rho``. Peaks above three times that of NUTS are cut off.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4 * len(rhos), 2.6 * len(samples) + 0.8)
    figure, axes = plt.subplots(len(samples), len(rhos), figsize=size, squeeze=False)
    for row, (clients, by_name) in zip(axes, samples.items(), strict=True):
        for axis, rho in zip(row, rhos, strict=True):
            for style, look in STYLES.items():
                model, _, guide = style.partition(", ")
                name = f"{model}, rho {rho}, {guide}" if guide else model
                if name not in by_name:
                    continue
                values = np.asarray(by_name[name]["client_0/beta"])[:, 0]
                density, edges = np.histogram(values, 60, density=True)
                axis.plot((edges[1:] + edges[:-1]) / 2, density, **look)
                if style == "NUTS":
                    top, middle, spread = 3 * density.max(), values.mean(), values.std()
            axis.set(
                title=f"{clients} clients, rho = {rho:g}",
                xlim=(middle - 6 * spread, middle + 6 * spread),
                ylim=(0, top),
            )
            axis.set_xlabel("first coefficient of the first client")
        row[0].set_ylabel("posterior density")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.8 / size[1], 1, 1))
    figure.savefig(path, dpi=120)


TARGETS = {
    "exact split": "0.1 sd, 0.93 to 1.07",
    "exact split, corrected": "0.05 sd, 0.95 to 1.05",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the marginals of one coefficient")
    parser.add_argument("--nuts", action="store_true", help="NUTS on the other two models, too")
    parser.add_argument("--quick", action="store_true", help="fewer rows, rounds, draws, settings")
    args = parser.parse_args()
    draws, rounds = (200, 20) if args.quick else (10_000, 1_000)
    numbers, samples = {}, {}
    warnings.simplefilter("ignore")
    rhos = (1.0,) if args.quick else (0.5, 1.0, 2.0)
    for clients in (2,) if args.quick else (2, 10):
        found, drawn = measured(clients, args, draws, rounds, rhos)
        numbers[clients], samples[clients] = found, drawn
    if args.json:
        rows = [
            table_row(
                f"{clients} clients, {name}", distance(r["error"], r["ratios"]), "NUTS", target
            )
            for clients, found in numbers.items()
            for name, r in found.items()
            if "error" in r
            for target in [TARGETS.get(name, "")]
        ]
        write(args.json, rows, details=numbers)
    if args.plot:
        plot(args.plot, samples, rhos)


if __name__ == "__main__":
    main()
