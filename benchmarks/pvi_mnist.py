"""A Bayesian neural network on MNIST over silos that hold different digits.

The network of Ashman et al. (2022), section 5.3: 784-200-10 with ReLU, a mean-field Gaussian over
its 159,010 weights, priors of variance 1. Its rows are spread over 10 silos alike, or over 100
silos of two digits each. Silos answer one after the other (sequential) or all at once and damped
(synchronous); mean-field VI on all rows, by the same local optimiser, is what they could reach.

    python benchmarks/pvi_mnist.py --plot pvi_mnist.png --json pvi_mnist.json

Long work on the rows of one silo prunes the network: a hidden unit that these rows do not pay for
goes back to the prior. The paper's remedy is a start with a small variance, and early stopping of
the local work once the expected log likelihood no longer rises. Both are on here; sequential PVI
is also run without early stopping. A unit counts as pruned when the posterior of its ten outgoing
weights is close to the prior: a mean divergence (KL) of less than half a nat, where it is 3 at the
start.

The hidden units of this network are alike until something tells them apart. In a synchronous
round the noise of each silo's own steps would do so in as many ways as there are silos, and their
average would undo it. The prior's means are therefore not 0 but random, at most a tenth of a prior
standard deviation from it, and the same for everyone.

The data are those of ``federated_data.py``. The mortality data of the paper's section 5.2 are
given out to credentialed users only, and are left out. ``--quick`` shows that everything runs, on
few rows and with few hidden units, and without the run that does not stop early.
"""

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from federated_data import load_mnist, split_homogeneous, split_two_classes
from record import table_row, write

import numpyro_fed as nf

START_SCALE = 1e-3**0.5  # standard deviation at a silo's first visit
PATIENCE = 4  # twentieths of a visit's steps without a better expected log likelihood
PRUNED = 0.5  # nats for each outgoing weight
DRAWS = 20  # of the weights, for predictions


class Split(NamedTuple):
    """How rows are spread, and what a silo does at a visit."""

    cut: Callable
    clients: int
    batch: int
    rate: float
    steps: int
    rounds: int


class Method(NamedTuple):
    """How silos take turns, and whether they stop early."""

    schedule: str
    early: bool = True


SPLITS = {
    "homogeneous": Split(split_homogeneous, 10, batch=256, rate=5e-3, steps=400, rounds=10),
    "two_digits": Split(split_two_classes, 100, batch=200, rate=5e-3, steps=40, rounds=9),
}
LONG = "sequential, no early stopping"
METHODS = {
    "sequential": Method("sequential"),
    LONG: Method("sequential", early=False),
    "synchronous": Method("synchronous"),
}
POOLED = Split(lambda x, y, *_: [dict(x=x, y=y)], 1, batch=256, rate=5e-3, steps=400, rounds=15)
QUICK = dict(batch=16, steps=10, rounds=2)


def network(hidden, seed=0):
    """The model: a network with one hidden layer, for images x (row, pixel) and digits y (row,)."""
    r = np.random.default_rng(seed)
    shapes = dict(w1=(784, hidden), b1=(hidden,), w2=(hidden, 10), b2=(10,))
    means = {name: r.uniform(-0.1, 0.1, s).astype(np.float32) for name, s in shapes.items()}

    def model(x, y=None):
        weights = {
            name: numpyro.sample(name, dist.Normal(mean, 1).to_event(mean.ndim))
            for name, mean in means.items()
        }
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits(weights, x)), obs=y)

    return model


def logits(weights, x):
    """What the network says of images x (row, pixel), for one draw of its weights."""
    hidden = jax.nn.relu(x @ weights["w1"] + weights["b1"])
    return hidden @ weights["w2"] + weights["b2"]


@jax.jit
def scores(draws, x, y):
    """Error in per cent, and mean log likelihood, of predictions averaged over draws."""
    each = jax.lax.map(lambda weights: jax.nn.log_softmax(logits(weights, x)), draws)
    averaged = jax.nn.logsumexp(each, 0) - jnp.log(len(each))
    wrong = averaged.argmax(-1) != y
    return 100 * wrong.mean(), jnp.take_along_axis(averaged, y[:, None], 1).mean()


def divergence(result, model):
    """For each hidden unit, the mean KL divergence of its outgoing weights from their prior."""
    prior = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(np.zeros((1, 784)))
    q, p = (d.base_dist for d in (result.posterior()["w2"], prior["w2"]["fn"]))
    return np.asarray(dist.kl_divergence(q, p)).mean(1)


def fit(model, silos, split, method, test, seed):
    """Run PVI round by round, and measure after each of them."""
    local = nf.local.Optax(
        optim=optax.adam(split.rate),
        steps=split.steps,
        num_particles=1,
        batch_size=split.batch,
        patience=PATIENCE if method.early else None,
    )
    pvi = nf.PVI(
        model,
        schedule=method.schedule,
        family="diagonal",
        local=local,
        start_scale=START_SCALE,
        evidence_draws=1,
        start=None,
    )
    key, state, sent, wrong = jax.random.key(seed), None, 0, Counter()
    history = {m: [] for m in ("communications", "error", "log_likelihood", "pruned", "damping")}
    began, measuring = time.perf_counter(), 0.0
    for r in range(split.rounds):
        result = pvi.run(key, 1, silos, init_state=state, progress_bar=False)
        state, sent = result.state, sent + result.communications
        wrong.update(result.rejections)
        paused = time.perf_counter()
        error, log_lik = scores(result.sample_posterior(jax.random.key(r), DRAWS), *test)
        pruned = (divergence(result, model) < PRUNED).sum()
        now = (sent, error, log_lik, pruned, result.damping.min())
        for measures, value in zip(history.values(), now, strict=True):
            measures.append(float(value))
        measuring += time.perf_counter() - paused
        line = f"{sent:6d} replies: error {error:5.2f} %, log likelihood {log_lik:.4f}"
        print(f"  {line}, {pruned} units pruned", flush=True)
    seconds = time.perf_counter() - began - measuring
    print(f"  {seconds:.0f} s;", ", ".join(f"{n} {what}" for what, n in wrong.items()))
    return {**history, "seconds": seconds, "rejections": dict(wrong)}


def cut_down(split, clients):
    """The same split for ``--quick``."""
    return split._replace(clients=clients, **QUICK)


def lines(report):
    """The rows of the record: where each fit ends."""

    def line(what, run, reference):
        end = {m: run[m][-1] for m in ("communications", "error", "log_likelihood", "pruned")}
        words = "{error:.2f} %, {log_likelihood:.3f}, {pruned:.0f} units pruned".format(**end)
        return table_row(f"{what}, {end['communications']:.0f} replies", words, reference)

    fits = [(name, each, run) for name in SPLITS for each, run in report.get(name, {}).items()]
    pooled = f"{report['pooled']['error'][-1]:.2f} %, pooled VI"
    rows = [line(f"{name}, {each}", run, pooled) for name, each, run in fits]
    return [line("pooled VI", report["pooled"], ""), *rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--rounds", type=int, help="for each method, over the silos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw the measures against communications")
    parser.add_argument("--quick", action="store_true", help="few rows and hidden units")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*see result.report")  # the counts are printed

    x, y, *test = load_mnist()
    x, y = (x[:500], y[:500]) if args.quick else (x, y)
    model = network(8 if args.quick else 200, args.seed)
    pooled = cut_down(POOLED, 1) if args.quick else POOLED
    print("mean-field VI on all rows")
    report = {"pooled": fit(model, pooled.cut(x, y), pooled, METHODS[LONG], test, args.seed)}
    for name in args.splits:
        split = cut_down(SPLITS[name], 5) if args.quick else SPLITS[name]
        silos = split.cut(x, y, split.clients, seed=args.seed)
        split = split._replace(rounds=args.rounds or split.rounds)
        report[name] = {}
        for label, method in METHODS.items():
            if args.quick and label == LONG:
                continue
            print(f"{name}: {label}")
            report[name][label] = fit(model, silos, split, method, test, args.seed)
    if args.json:
        write(args.json, lines(report), details=report)
    if args.plot:
        plot(report).savefig(args.plot, dpi=100)


def plot(report):
    """Error and log likelihood against communications, and pruning against rounds."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    titles = {"homogeneous": "10 silos alike", "two_digits": "100 silos of two digits"}
    names = [name for name in titles if name in report]
    size = dict(figsize=(12, 0.6 + 3.2 * len(names)), squeeze=False, layout="constrained")
    figure, axes = plt.subplots(len(names), 3, **size)
    lines = {}
    for row, name in zip(axes, names, strict=True):
        for label, run in report[name].items():
            color = "C1" if "synchronous" in label else "C0"
            style = dict(color=color, marker=".", linestyle=":" if label == LONG else "-")
            sent, rounds = run["communications"], np.arange(len(run["pruned"])) + 1
            lines[label] = row[0].plot(sent, run["error"], **style)[0]
            row[1].plot(sent, -np.array(run["log_likelihood"]), **style)
            row[2].plot(rounds, run["pruned"], **style)
        reached = [report["pooled"][measure][-1] for measure in ("error", "log_likelihood")]
        for axis, value in zip(row, reached, strict=False):
            lines["VI on all rows"] = axis.axhline(abs(value), color="0.3", linestyle="--")
        row[0].set(yscale="log", ylabel="test error (%)")
        row[1].set(yscale="log", ylabel="minus test log likelihood", title=titles[name])
        row[2].set(ylabel="pruned hidden units", xlabel="rounds", ylim=(-2, 80))
        for axis in row[:2]:
            axis.set(xlabel="communications", xlim=(0, None))
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
        for axis in row:
            axis.spines[["top", "right"]].set_visible(False)
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    main()
