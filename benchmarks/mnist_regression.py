"""Digits by multinomial regression whose prior scales are learned: few rounds or many.

Section S3.2 of Hassan, Salomone and Mengersen (2023, arXiv 2302.03314), Table S1 and Figure S2.
MNIST's images are dealt out evenly, 200 to each of 25 silos or 10,000 to each of 5; weights and
intercepts have normal priors, whose scales are parameters that maximise the bound (empirical
Bayes). Guides are independent normals, as in the paper. Compared are each silo alone, SFVI-Avg in
one round and in many, SFVI, and PVI.

    python benchmarks/mnist_regression.py --json regression.json
    python benchmarks/mnist_regression.py --silos 5 --rows 10000 --json regression5.json

    python benchmarks/mnist_regression.py --methods --plot regression.png --json start.json

Silos with more than 200 rows draw 200 of them for each step, where the paper takes all.
``--plot`` draws the bound by SFVI from scratch and from a result of SFVI-Avg in five rounds of
1,000 steps, as the paper's Figure S2, for several steps of Adam, of which the paper does not say
its own, and several seeds.

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
SCRATCH, AVERAGED = "from scratch", "from 5 rounds of SFVI-Avg"
RATES = 1e-2, 1e-3, 1e-4  # of Adam, in the figure
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
    """Steps that become smaller, down to a fiftieth."""
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
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=50_000, help="of each silo, in all")
    parser.add_argument("--rounds", type=int, default=50, help="of SFVI-Avg")
    parser.add_argument("--pvi-rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.01, help="Adam's first step")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw Figure S2")
    parser.add_argument("--seeds", type=int, default=3, help="of the figure")
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

    def sfvi():
        return nf.SFVI(regression, optim=adam(args.steps, args.rate), **common)

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
        own = [
            run("alone", method, args.steps, [silo], (silo["x"], silo["y"]))[1] for silo in silos
        ]
        mean = {k: float(np.mean([row[k] for row in own])) for k in ("train", "test")}
        keep("alone", mean | dict(rounds=0, seconds=sum(row["seconds"] for row in own)))
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
    if args.plot:
        found, runs = figure_s2(args, silos, common["batch_size"])
        rows += found
        plot(runs).savefig(args.plot, dpi=130)
    if args.json:
        write(args.json, rows, details=report)


def courses(silos, rate, seed, steps, rounds, local_steps, batch_size):
    """The bounds in all steps of SFVI, from scratch and from a result of SFVI-Avg, by Adam."""
    common = dict(guide=GUIDE, optim=optax.adam(rate), batch_size=batch_size)
    averaging = nf.SFVIAvg(regression, local_steps=local_steps, start=None, **common)
    first = averaging.run(jax.random.key(seed), rounds, silos, progress_bar=False)
    starts = {SCRATCH: None, AVERAGED: first}
    return {
        name: smoothed(
            nf.SFVI(regression, start=start, **common)
            .run(jax.random.key(100 + seed), steps, silos, progress_bar=False)
            .losses
        )
        for name, start in starts.items()
    }


def smoothed(losses):
    """Steps, and the bound there averaged over a two hundredth of them."""
    each = max(1, len(losses) // 200)
    bound = -np.asarray(losses)[: len(losses) // each * each].reshape(-1, each).mean(1)
    return each * (np.arange(len(bound)) + 0.5), bound


def steps_until(course, end, share):
    """Steps until the bound is within a share of its end; infinite where it does not come there."""
    steps, bound = course
    there = bound > (1 + share) * end
    return float(steps[np.argmax(there)]) if there.any() else np.inf


def figure_s2(args, silos, batch_size):
    """Steps of SFVI from a start at SFVI-Avg, against those from scratch: rows, and the courses."""
    quick = dict(steps=20, rounds=1, local_steps=2)
    sizes = quick if args.quick else dict(steps=args.steps, rounds=5, local_steps=1_000)
    rows, found = [], {}
    for rate in RATES[:1] if args.quick else RATES:
        runs = [courses(silos, rate, s, batch_size=batch_size, **sizes) for s in range(args.seeds)]
        ends = [max(bound[-1] for _, bound in run.values()) for run in runs]
        words = {}
        for name in (SCRATCH, AVERAGED):
            until = [
                [steps_until(run[name], end, share) for share in (0.1, 0.02)]
                for run, end in zip(runs, ends, strict=True)
            ]
            words[name] = ", ".join(f"{n:,.0f}" for n in np.median(until, 0))
        what = f"{args.silos} x {args.rows}, Adam {rate:g}: steps to within 10 %, 2 % of the end"
        print(f"{what}: {words[AVERAGED]}; from scratch {words[SCRATCH]}", flush=True)
        rows.append(table_row(what, words[AVERAGED], f"{words[SCRATCH]}, from scratch"))
        found[rate] = runs
    return rows, found


def plot(found):
    """The bound over steps, a panel for each step of Adam, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(found), figsize=(1.2 + 2.9 * len(found), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (rate, runs) in zip(axes[0], found.items(), strict=True):
        for run in runs:
            for color, (name, (steps, bound)) in enumerate(run.items()):
                label = name if run is runs[0] else None
                axis.plot(steps, bound, color=f"C{color}", lw=1, label=label)
        end = max(bound[-1] for run in runs for _, bound in run.values())
        axis.set(
            title=f"Adam, {rate:g}", xlabel="steps of SFVI", xscale="log", ylim=(2 * end, None)
        )
    axes[0, 0].set_ylabel("bound (ELBO), nats")
    axes[0, 0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
