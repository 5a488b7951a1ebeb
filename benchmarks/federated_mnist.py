"""Digits over silos each of which has mostly one: networks that differ between silos.

Section 4.1 of Hassan, Salomone and Mengersen (2023, arXiv 2302.03314), Table 1. Of MNIST's 60,000
images each of 10 or 50 silos gets as many as the others, nine in ten of them of one digit, and test
images in the same proportions. Two networks of 64 hidden units (ReLU) share strength between silos:

- the hierarchical network: weights of the first layer are ``mu + sigma eps[j]`` at silo j, ``mu``
  and ``sigma`` unknown, those of the second each silo's own;
- FedPop with a posterior for all of it: one first layer, each silo's second one from a population
  of them.

Compared are SFVI, SFVI-Avg and PVI, whose silos answer one after the other. Guides are independent
normals, as in the paper. A silo draws 128 of its rows for each step, where the paper takes all.

    python benchmarks/federated_mnist.py --json mnist.json --plot mnist.png
    python benchmarks/federated_mnist.py --silos 50 --json mnist50.json

The data are those of ``federated_data.py``. ``--quick`` shows that everything runs, on few rows
and with few hidden units.
"""

import argparse
import time
import warnings
from dataclasses import replace

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from federated_data import load_mnist, split_majority
from numpyro.infer import init_to_uniform
from record import table_row, write

import numpyro_fed as nf

PIXELS, DIGITS = 784, 10
METHODS = "SFVI", "SFVI-Avg", "PVI"
LOCALS, LOCAL_RATE = 4, 1e-3  # rounds after SFVI-Avg on locals alone, and Adam's steps there
DRAWS = 20  # of the weights, for predictions
GUIDE = nf.guides.Structured(
    globals="diagonal",
    locals="diagonal",
    couple_mean=False,
    couple_scale=False,
    # hidden units are alike until something tells them apart
    init_loc_fn=init_to_uniform(radius=0.1),
    init_scale=0.02,
)


def normal(*shape):
    return dist.Normal(0, 1).expand(shape).to_event(len(shape))


def images(first, second, x, y):
    """The rows of a silo with these weights."""
    with nf.silo_plate("image", x.shape[0]):
        logits = jax.nn.relu(x @ first) @ second
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def hierarchical(hidden):
    """Both layers differ between silos, the first around a common one."""

    def model(x, y=None):
        mu = numpyro.sample("mu", normal(PIXELS, hidden))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with nf.silo_plate("silo", 1):
            eps = numpyro.sample("eps", normal(PIXELS, hidden))
            second = numpyro.sample("second", normal(hidden, DIGITS))
        first = numpyro.deterministic("first", mu + sigma * eps[0])
        images(first, second[0], x, y)

    return model


def fedpop(hidden):
    """One first layer; the second one of each silo is from a population."""

    def model(x, y=None):
        first = numpyro.sample("first", normal(PIXELS, hidden))
        mu = numpyro.sample("mu", normal(hidden, DIGITS))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with nf.silo_plate("silo", 1):
            eps = numpyro.sample("eps", normal(hidden, DIGITS))
        second = numpyro.deterministic("second", mu + sigma * eps[0])
        images(first, second, x, y)

    return model


MODELS = {"hierarchical": hierarchical, "FedPop": fedpop}
PAPER = {  # means of test accuracy (sds over silos)
    (10, "hierarchical, SFVI"): "97.5 (0.50) %",
    (10, "hierarchical, SFVI-Avg"): "96.6 (0.68) %",
    (10, "FedPop, SFVI"): "97.5 (0.46) %",
    (10, "FedPop, SFVI-Avg"): "97.0 (0.62) %",
    (50, "hierarchical, SFVI"): "96.0 (1.03) %",
    (50, "hierarchical, SFVI-Avg"): "93.6 (1.68) %",
    (50, "FedPop, SFVI"): "96.2 (1.05) %",
    (50, "FedPop, SFVI-Avg"): "94.2 (1.33) %",
}


@jax.jit
def accuracy(first, second, x, y):
    """In per cent, of predictions averaged over draws of the weights (draws, ...)."""

    def predict(weights):
        first, second = weights
        return jax.nn.softmax(jax.nn.relu(x @ first) @ second)

    averaged = jax.lax.map(predict, (first, second)).mean(0)
    return 100 * (averaged.argmax(-1) == y).mean()


def scores(result, tests):
    """Of each silo on its own test images."""
    found = []
    for j, test in enumerate(tests):
        draws = result.sample_posterior(jax.random.key(2), DRAWS, silo=j)
        second = draws["second"].reshape(DRAWS, -1, DIGITS)
        found.append(float(accuracy(draws["first"], second, test["x"], test["y"])))
    return found


def methods(steps, rounds, pvi_rounds, batch, rate):
    """By name, a method and its number of rounds."""
    common = dict(guide=GUIDE, batch_size=batch, start=None)
    local = max(1, steps // rounds)
    visit = nf.local.Optax(
        optim=optax.adam(rate), steps=max(1, steps // pvi_rounds), batch_size=batch, num_particles=1
    )
    down = optax.cosine_decay_schedule(rate, steps, 0.05)
    return {
        "SFVI": (lambda model: nf.SFVI(model, optim=optax.adam(down), **common), steps),
        "SFVI-Avg": (
            lambda model: nf.SFVIAvg(
                model, local_steps=local, weights="even", optim=optax.adam(down), **common
            ),
            rounds,
        ),
        "PVI": (
            lambda model: nf.PVI(
                model, family="diagonal", guide=GUIDE, local=visit, start=None, start_scale=0.02
            ),
            pvi_rounds,
        ),
    }


def measured(name, result, tests, rounds, began):
    """What a run has reached, in how many rounds since it began; it is printed, too."""
    seconds, found = time.perf_counter() - began, scores(result, tests)
    down, up = result.communication.total
    print(
        f"{name:30} {np.mean(found):5.1f} % ({np.std(found):.2f}), "
        f"{rounds} rounds, {seconds:.0f} s, {(down + up) / 1e9:.2g} GB",
        flush=True,
    )
    return {
        "accuracy": float(np.mean(found)),
        "sd": float(np.std(found)),
        "accuracies": found,
        "rounds": rounds,
        "seconds": seconds,
        "bytes_down": down,
        "bytes_up": up,
    }


def plot(report):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for i, row in enumerate(report.values()):
        found = np.array(row["accuracies"])
        axis.plot(np.full(len(found), i) + np.linspace(-0.2, 0.2, len(found)), found, ".", ms=5)
        axis.plot([i - 0.3, i + 0.3], [found.mean()] * 2, color="0.3", lw=1)
    axis.set_xticks(range(len(report)), [name.replace(", ", "\n") for name in report])
    axis.set_ylabel("test accuracy of a silo, %")
    axis.set_title("a dot a silo, a line their mean", fontsize=9)
    return figure


def lines(report, silos):
    """The rows of the record, beside the paper's numbers."""
    return [
        table_row(
            f"{silos} silos, {name}, {r['rounds']} rounds",
            f"{r['accuracy']:.1f} ({r['sd']:.2f}) %",
            PAPER.get((silos, name), ""),
            "the paper's less one sd" if (silos, name) in PAPER else "",
        )
        for name, r in report.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--silos", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=5_000, help="of each silo, in all")
    parser.add_argument("--rounds", type=int, default=20, help="of SFVI-Avg")
    parser.add_argument("--pvi-rounds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=3e-3, help="Adam's first step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the accuracies of silos")
    parser.add_argument("--quick", action="store_true", help="few rows and hidden units")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*see result.report|.*still rising")
    data = load_mnist()
    if args.quick:
        data = data._replace(x_train=data.x_train[:500], y_train=data.y_train[:500])
        args.steps, args.rounds, args.pvi_rounds = 20, 2, 2
    silos, tests = split_majority(data, args.silos, seed=args.seed)
    report = {}
    for model_name in args.models:
        model = MODELS[model_name](4 if args.quick else 64)
        batch = 8 if args.quick else 128
        table = methods(args.steps, args.rounds, args.pvi_rounds, batch, args.rate)
        for name, (method, rounds) in ((name, table[name]) for name in args.methods):
            began = time.perf_counter()
            fit = method(model)
            result = fit.run(jax.random.key(args.seed), rounds, silos, progress_bar=False)
            report[f"{model_name}, {name}"] = measured(name, result, tests, rounds, began)
            if name != "SFVI-Avg":
                continue
            optim = optax.adam(optax.constant_schedule(LOCAL_RATE))
            alone = replace(fit, locals_only=True, optim=optim)
            # The paper has no such rounds, and these stand in a row of their own.
            result = alone.run(
                jax.random.key(1), LOCALS, silos, init_state=result.state, progress_bar=False
            )
            name = f"{name}, then {LOCALS} rounds of locals"
            report[f"{model_name}, {name}"] = measured(name, result, tests, rounds + LOCALS, began)
    if args.json:
        write(args.json, lines(report, args.silos), details=report)
    if args.plot:
        plot(report).savefig(args.plot, dpi=130)


if __name__ == "__main__":
    main()
