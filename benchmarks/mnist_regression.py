"""Digits by multinomial regression whose prior scales are learned: few rounds or many.

Section S3.2 of Hassan, Salomone and Mengersen (2023, arXiv 2302.03314), Table S1 and Figure S2.
MNIST's images are dealt out evenly, 200 to each of 25 silos or 10,000 to each of 5; weights and
intercepts have normal priors, whose scales are parameters that maximise the bound (empirical
Bayes). Guides are independent normals, as in the paper. Compared are each silo alone, SFVI-Avg in
one round and in many, SFVI, and PVI.

    python benchmarks/mnist_regression.py --json regression.json --plot regression.png
    python benchmarks/mnist_regression.py --silos 5 --rows 10000 --json regression5.json

Silos with more than 200 rows draw 200 of them for each step, where the paper takes all. ``--plot``
draws the bound by SFVI from scratch and from a result of SFVI-Avg in five rounds.

The data are those of ``federated_data.py``. ``--quick`` shows that everything runs.
"""

import argparse
import time
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from federated_data import load_mnist
from record import table_row, write

import numpyro_fed as nf

PIXELS, DIGITS = 784, 10
BATCH = 200
DRAWS = 20  # of the weights, for predictions
METHODS = "alone", "SFVI-Avg", "SFVI", "PVI"
GUIDE = nf.guides.Structured(globals="diagonal", init_scale=0.05)


def regression(x, y=None):
    """Images (n, 784) and digits (n,)."""
    positive = dist.constraints.positive
    sigma_w = numpyro.param("sigma_W", 1.0, constraint=positive)
    sigma_b = numpyro.param("sigma_b", 1.0, constraint=positive)
    weights = numpyro.sample("W", dist.Normal(0, sigma_w).expand([PIXELS, DIGITS]).to_event(2))
    offsets = numpyro.sample("b", dist.Normal(0, sigma_b).expand([DIGITS]).to_event(1))
    with nf.silo_plate("image", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ weights + offsets), obs=y)


@jax.jit
def accuracy(weights, offsets, x, y):
    """In per cent, of predictions averaged over draws (draws, ...)."""
    predict = jax.vmap(lambda w, b: jax.nn.softmax(x @ w + b))
    return 100 * (predict(weights, offsets).mean(0).argmax(-1) == y).mean()


def scores(result, train, test):
    """On training and on test images."""
    draws = result.sample_posterior(jax.random.key(2), DRAWS)
    return [float(accuracy(draws["W"], draws["b"], *rows)) for rows in (train, test)]


def adam(steps, rate):
    return optax.adam(optax.cosine_decay_schedule(rate, steps, 0.02))


PAPER = {  # train and test accuracy, Table S1
    (25, 200, "alone"): "73.0, 51.5 %",
    (25, 200, "SFVI-Avg(50000)"): "65.7, 63.9 %",
    (25, 200, "SFVI-Avg(1000)"): "71.3, 69.3 %",
    (25, 200, "SFVI"): "83.8, 84.0 %",
    (5, 10_000, "alone"): "88.7, 86.8 %",
    (5, 10_000, "SFVI-Avg(50000)"): "90.4, 90.4 %",
    (5, 10_000, "SFVI-Avg(1000)"): "90.1, 90.2 %",
    (5, 10_000, "SFVI"): "90.7, 90.8 %",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--silos", type=int, default=25)
    parser.add_argument("--rows", type=int, default=200, help="of a silo")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=50_000, help="of each silo, in all")
    parser.add_argument("--rounds", type=int, default=50, help="of SFVI-Avg")
    parser.add_argument("--pvi-rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.01, help="Adam's first step")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw bounds from scratch and from averages")
    parser.add_argument("--quick", action="store_true", help="few rows and steps")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*see result.report|.*still rising")
    if args.quick:
        args.silos, args.rows, args.steps, args.rounds, args.pvi_rounds = 3, 20, 20, 2, 1
    data = load_mnist()
    chosen = np.random.default_rng(0).permutation(len(data.y_train))[: args.silos * args.rows]
    x, y = data.x_train[chosen], data.y_train[chosen]
    silos = [dict(x=x[j :: args.silos], y=y[j :: args.silos]) for j in range(args.silos)]
    test = data.x_test, data.y_test
    common = dict(guide=GUIDE, start=None, batch_size=BATCH if args.rows > BATCH else None)

    def sfvi(start=None, steps=args.steps):
        return nf.SFVI(regression, optim=adam(steps, args.rate), **common | dict(start=start))

    def averaging(rounds):
        local = args.steps // rounds
        return nf.SFVIAvg(
            regression, local_steps=local, optim=adam(args.steps, args.rate), **common
        )

    report = {}

    def run(name, method, rounds, held=silos, train=(x, y)):
        began = time.perf_counter()
        result = method.run(jax.random.key(0), rounds, held, progress_bar=False)
        jax.block_until_ready(result.losses)
        on_train, on_test = scores(result, train, test)
        row = dict(train=on_train, test=on_test, rounds=rounds)
        return result, row | dict(seconds=time.perf_counter() - began)

    def keep(name, row):
        report[name] = row
        print(
            f"{name:22} {row['train']:5.1f} % train, {row['test']:5.1f} % test, "
            f"{row['rounds']} rounds, {row['seconds']:.0f} s",
            flush=True,
        )

    if "alone" in args.methods:
        method = sfvi()
        rows = [
            run("alone", method, args.steps, [silo], (silo["x"], silo["y"]))[1] for silo in silos
        ]
        mean = {k: float(np.mean([row[k] for row in rows])) for k in ("train", "test")}
        keep("alone", mean | dict(rounds=0, seconds=sum(row["seconds"] for row in rows)))
    if "SFVI-Avg" in args.methods:
        for rounds in (1, args.rounds):
            name = f"SFVI-Avg({args.steps // rounds})"
            keep(name, run(name, averaging(rounds), rounds)[1])
    if "SFVI" in args.methods:
        keep("SFVI", run("SFVI", sfvi(), args.steps)[1])
    if "PVI" in args.methods:
        visit = nf.local.Optax(
            optim=optax.adam(args.rate),
            steps=20 if args.quick else 500,
            batch_size=common["batch_size"],
        )
        pvi = nf.PVI(regression, family="diagonal", local=visit, theta_optim=optax.adam(0.05))
        keep("PVI", run("PVI", pvi, args.pvi_rounds)[1])
    if args.json:
        rows = [
            table_row(
                f"{args.silos} x {args.rows}, {name}, {r['rounds']} rounds: train, test",
                f"{r['train']:.1f}, {r['test']:.1f} %",
                paper,
                "the paper's less 0.5 points" if paper else "",
            )
            for name, r in report.items()
            for paper in [PAPER.get((args.silos, args.rows, name), "")]
        ]
        write(args.json, rows, details=report)
    if args.plot:
        steps = args.steps // 5
        first = averaging(args.rounds).run(jax.random.key(0), 5, silos, progress_bar=False)
        curves = {
            "from scratch": sfvi(steps=steps),
            "from 5 rounds of SFVI-Avg": sfvi(first, steps),
        }
        runs = {
            name: method.run(jax.random.key(1), steps, silos, progress_bar=False).losses
            for name, method in curves.items()
        }
        plot({name: smoothed(losses) for name, losses in runs.items()}).savefig(args.plot, dpi=130)


def smoothed(losses):
    """Steps, and the bound there averaged over a hundredth of them."""
    each = max(1, len(losses) // 100)
    bound = -np.asarray(losses)[: len(losses) // each * each].reshape(-1, each).mean(1)
    return each * (np.arange(len(bound)) + 0.5), bound


def plot(curves):
    """The bound over steps, and in words when it came near its end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    end = max(bound[-1] for _, bound in curves.values())
    for name, (steps, bound) in curves.items():
        axis.plot(steps, bound, label=name)
        near = [int(steps[np.argmax(bound > (1 + share) * end)]) for share in (0.1, 0.02)]
        print(f"{name}: within 10 % of the end after {near[0]} steps, within 2 % after {near[1]}")
    axis.set(xlabel="steps of SFVI", ylabel="bound (ELBO), nats", ylim=(1.5 * end, None))
    axis.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
