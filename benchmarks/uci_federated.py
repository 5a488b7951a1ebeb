"""Bayesian logistic regression over ten clients: partitioned variational inference and others.

Section 5.1 and Figure 4 of Ashman et al. (2022), arXiv 2202.12275, on the UCI data sets adult, bank
and credit: weights with the prior N(0, 1), the intercept's included, a Gaussian posterior with a
diagonal covariance, and ten clients among whom the training rows are split evenly (A), or in
different numbers and with different shares of the classes (B).

    python benchmarks/uci_federated.py --plot uci_federated.png --json uci_federated.json

measures the error and the mean log-likelihood of the test rows after each round, against the
number of replies that clients have sent. Variational inference on the union of the clients' rows,
by NumPyro's own SVI, is what all methods aim at; the median ratio of their standard deviations to
its tells who is overconfident. ``federated_data.py`` says where the data come from. ``--quick``
shows three methods on one small data set, with too few rounds and steps to judge by.

The predictive is MacKay's approximation, sigmoid(mu.x / sqrt(1 + pi v / 8)) with the variance v of
w.x; the paper prints it without the division by 8, which its authors' code has.
"""

import argparse
import time
import warnings
from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from federated_data import SPLIT_B, load_tabular, split_clients
from numpyro.infer import SVI, TraceMeanField_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDiagonalNormal
from record import table_row, write

import numpyro_fed as nf

CLIENTS = 10
TARGET = {"error": 0.5, "log_likelihood": 0.005}  # of sequential PVI after the last round
LABELS = {
    "sequential": "PVI, sequential",
    "synchronous": "PVI, synchronous",
    "global_vi": "global VI",
    "bcm_same": "BCM, same",
    "bcm_split": "BCM, split",
    "vcl": "VCL",
    "streaming_vb": "streaming VB",
}
QUICK = ["sequential", "global_vi", "bcm_same"]
HEADER = (
    "                   replies  error (%)  log-lik. (nats)  less pooled VI  sd ratio   seconds"
)
LINE = "{:18s}{:>8} {:10.2f} {:16.4f} {:>15} {:>9} {:9.1f}"


def model(x, y=None):
    """The text that all methods run, the pooled one included."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def methods(rounds, quick):
    """Each method, and the rounds after which it is measured.

    Global VI is one natural-gradient step at every client in each round, with a step of 0.2 of
    which the server takes a tenth. This is ``nf.GlobalVI(model, rate=0.02)``, but that improper
    steps are halved instead of left out; they are many while the posterior is wide as the prior.
    """
    local = nf.local.Optax(steps=100 if quick else 300, num_particles=8)
    common = dict(family="diagonal", local=local, evidence_draws=1)
    step = nf.local.NaturalGradient(rate=0.2, steps=1, num_particles=32)
    gradient = common | dict(local=step, start_scale=None)
    every, more = range(1, rounds + 1), range(1, 3 * rounds + 1)
    spaced = np.unique(np.geomspace(1, 100 * rounds, 25).astype(int))
    return {
        "sequential": (nf.PVI(model, **common, start=None), every),
        "synchronous": (nf.PVI(model, schedule="synchronous", **common, start=None), more),
        "global_vi": (nf.PVI(model, schedule="synchronous", **gradient, start=None), spaced),
        "bcm_same": (nf.BCM(model, **common), [1]),
        "bcm_split": (nf.BCM(model, split=True, **common), [1]),
        "vcl": (nf.VCL(model, **common), [1]),
        "streaming_vb": (nf.StreamingVB(model, **common), every),
    }


def with_intercept(x):
    """A column of ones on the right."""
    return np.hstack([x, np.ones((len(x), 1), x.dtype)])


def measure(mean, variance, x, y):
    """Test error in per cent, and mean test log-likelihood in nats."""
    mean, variance, x = (np.asarray(a, np.float64) for a in (mean, variance, x))
    logits = x @ mean / np.sqrt(1 + np.pi / 8 * (x**2 @ variance))
    error = 100 * np.mean((logits > 0) != (y == 1))
    return float(error), float(np.mean(-np.logaddexp(0, np.where(y == 1, -logits, logits))))


def follow(method, at, key, silos, test):
    """Run to each of the given rounds in turn, and measure the posterior there.

    Returns what was measured, and the last posterior.
    """
    began, state, done = time.perf_counter(), None, 0
    curve = dict(communications=[], error=[], log_likelihood=[])
    troubled, replies = {}, 0
    for stop in at:
        result = run_on(method, key, int(stop) - done, silos, state)
        state, done = result.state, int(stop)
        replies += result.communications
        q = result.posterior()["w"]
        point = (replies, *measure(q.mean, q.variance, *test))
        for name, value in zip(curve, point, strict=True):
            curve[name].append(value)
        for what, count in result.rejections.items():
            troubled[what] = troubled.get(what, 0) + count
    return curve | troubled | dict(seconds=time.perf_counter() - began), q


def run_on(method, key, rounds, silos, state):
    """Some more rounds; what went wrong in them is counted, and not warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*see result.report")
        return method.run(key, rounds, silos, init_state=state, progress_bar=False)


def pooled_vi(key, silos, test, steps):
    """Mean-field inference on all rows in one place by NumPyro, with nothing of ours but the text.

    Returns what was measured, and the posterior. ``gain`` is what the last tenth of the steps
    gained on the tenth before, with the standard error of that, in nats of the bound.
    """
    began = time.perf_counter()
    x, y = (np.concatenate([silo[name] for silo in silos]) for name in ("x", "y"))
    guide = AutoDiagonalNormal(model, init_loc_fn=init_to_median, init_scale=0.05)
    optim = optax.adam(optax.cosine_decay_schedule(0.05, steps))
    svi = SVI(model, guide, optim, TraceMeanField_ELBO(num_particles=8))
    found = svi.run(key, steps, x, y, progress_bar=False)
    q = guide.get_posterior(found.params)
    error, log_likelihood = measure(q.mean, q.variance, *test)
    before, after = np.split(-np.asarray(found.losses[-2 * (steps // 10) :], np.float64), 2)
    gain = after.mean() - before.mean()
    spread = np.sqrt((before.var() + after.var()) / len(after))
    found = dict(
        error=error,
        log_likelihood=log_likelihood,
        elbo=float(after.mean()),
        gain=[float(gain), float(spread)],
        seconds=time.perf_counter() - began,
    )
    return found, q


def compare(name, split, chosen, rounds, seed, quick):
    """The chosen methods on one data set and split, and how far from the pooled fit they end."""
    data = load_tabular(name, seed=seed)
    beta, kappa = {"A": (0.0, 0.0), "B": SPLIT_B[name]}[split]
    silos = [
        dict(x=with_intercept(silo["x"]), y=silo["y"])
        for silo in split_clients(data.x_train, data.y_train, CLIENTS, beta, kappa, seed)
    ]
    test = with_intercept(data.x_test), data.y_test
    key = jax.random.key(seed)
    pooled, reference = pooled_vi(key, silos, test, 300 if quick else 3_000)
    report = dict(rows=[len(silo["y"]) for silo in silos], test_rows=len(test[1]), pooled=pooled)
    print(
        f"\n{name}, split {split}: {sum(report['rows'])} rows to learn from, {len(test[1])} to test"
    )
    print(HEADER)
    own = pooled["error"], pooled["log_likelihood"]
    print(LINE.format("pooled VI", "", *own, "", "", pooled["seconds"]))
    report["methods"] = {}
    for each, (method, at) in methods(rounds, quick).items():
        if each not in chosen:
            continue
        found, q = follow(method, at, key, silos, test)
        last = {m: found[m][-1] for m in TARGET}
        gap = {m: last[m] - pooled[m] for m in TARGET}
        ratio = float(np.median(np.sqrt(q.variance / reference.variance)))
        met = all(abs(gap[m]) <= most for m, most in TARGET.items())
        report["methods"][each] = found | dict(difference=gap, sd_ratio=ratio, target_met=met)
        gaps = "{error:+.2f} {log_likelihood:+.4f}".format(**gap)
        replies, seconds = found["communications"][-1], found["seconds"]
        print(LINE.format(LABELS[each], replies, *last.values(), gaps, f"{ratio:.2f}", seconds))
    return report


def plot(reports):
    """Error and log-likelihood against replies, as Figure 4 of the paper."""
    import matplotlib.pyplot as plt

    columns = [(name, split) for name in reports for split in reports[name]]
    size = (2 + 2.1 * len(columns), 5)
    figure, axes = plt.subplots(
        2, len(columns), figsize=size, squeeze=False, sharex="col", layout="constrained"
    )
    for column, (name, split) in enumerate(columns):
        report = reports[name][split]
        for axis, measured in zip(axes[:, column], TARGET, strict=True):
            lines = draw(axis, report, measured)
        axes[0, column].set_title(f"{name}, split {split}")
        axes[1, column].set_xlabel("communications (replies)")
    axes[0, 0].set_ylabel("test error (%)")
    axes[1, 0].set_ylabel("test log-likelihood (nats)")
    figure.legend(handles=lines, loc="outside upper center", ncols=5, frameon=False)
    return figure


def draw(axis, report, measured):
    """One panel: a line for each method, a mark where there is one point; pooled VI dashed."""
    lines = []
    for name, found in report["methods"].items():
        i = list(LABELS).index(name)
        x, y = found["communications"], found[measured]
        style = dict(color=f"C{i}", label=LABELS[name], linewidth=1.4)
        style |= dict(marker="sDX^"[i % 4], linestyle="none") if len(x) == 1 else {}
        lines += axis.plot(x, y, **style)
    pooled, near = report["pooled"][measured], TARGET[measured]
    band = dict(color="0.93", linewidth=0, label="as near to it as PVI should come")
    dashes = dict(color="black", linestyle="--", linewidth=1, label="VI, all rows pooled")
    lines.append(axis.axhline(pooled, **dashes))
    lines.append(axis.axhspan(pooled - near, pooled + near, **band))
    axis.set_xscale("log")
    axis.set_ylim(*window(report, measured))
    axis.spines[["top", "right"]].set_visible(False)
    return lines


def window(report, measured):
    """What to show: every method but global VI, whose first steps are far off, and pooled VI."""
    pooled, near = report["pooled"][measured], TARGET[measured]
    shown = [pooled - near, pooled + near]
    for name, found in report["methods"].items():
        shown += found[measured][-1:] if name == "global_vi" else found[measured]
    margin = 0.08 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=list(SPLIT_B), help="by default all three")
    parser.add_argument("--splits", nargs="+", choices=["A", "B"], help="by default both")
    parser.add_argument("--methods", nargs="+", choices=list(LABELS), help="by default all")
    parser.add_argument("--rounds", type=int, default=10, help="passes over the clients")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.add_argument("--plot", metavar="FILE", help="draw error and log-likelihood")
    parser.add_argument("--quick", action="store_true", help="credit, split A, two short rounds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.data or (["credit"] if args.quick else list(SPLIT_B))
    splits = args.splits or (["A"] if args.quick else ["A", "B"])
    chosen = args.methods or (QUICK if args.quick else list(LABELS))
    rounds = 2 if args.quick else args.rounds
    run = partial(compare, chosen=chosen, rounds=rounds, seed=args.seed, quick=args.quick)
    reports = {name: {split: run(name, split) for split in splits} for name in names}
    if "sequential" in chosen:
        verdict(reports)
    if args.json:
        write(args.json, lines(reports), details=reports)
    if args.plot:
        plot(reports).savefig(args.plot, dpi=100)


GAP = "{log_likelihood:+.4f} nats, {error:+.2f} points"


def lines(reports):
    """The rows of the record: the differences to pooled VI."""
    rows = []
    for name, by_split in reports.items():
        for split, report in by_split.items():
            own = "{log_likelihood:.4f} nats, {error:.2f} %".format(**report["pooled"])
            for each, found in report["methods"].items():
                gap = GAP.format(**found["difference"])
                target = "0.005 nats, 0.5 points" if each == "sequential" else ""
                what = f"{name} {split}, {LABELS[each]}"
                rows.append(table_row(what, gap, f"pooled VI: {own}", target))
    return rows


def verdict(reports):
    """Whether sequential PVI comes near enough to pooled VI, in words."""
    print("\nsequential PVI within {error} points and {log_likelihood} nats:".format(**TARGET))
    for name, by_split in reports.items():
        for split, report in by_split.items():
            met = report["methods"]["sequential"]["target_met"]
            print(f"{name}, split {split}: {'yes' if met else 'no'}")


if __name__ == "__main__":
    main()
