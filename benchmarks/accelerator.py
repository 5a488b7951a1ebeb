"""Time of steps on an accelerator, against the same steps by hand and against the CPU.

Timed is what JAX takes by default: an accelerator, or the CPU if there is none. Each of these runs
in turns with the same step by hand, for this one model in plain JAX and Optax, with as many draws,
rows and parameters, in one compiled ``lax.scan``:

- a round of SFVI: logistic regression, 8 silos of 20,000 rows and 50 covariates, mean-field guide;
  in the compiled loop alone, and in a call of ``SFVI.run`` that has compiled before, where data
  come from the host on both sides;
- a synchronous round of PVI on the same data: 192 steps of Adam at each silo, with 1,000 rows and 4
  draws each, one draw for the evidence, and no check whether a visit has converged;
- a round of SFVI for a Bayesian neural network on scikit-learn's digits (1,797 images of 64 pixels,
  10 silos, 200 hidden units); random images of that size without scikit-learn;
- a training step of ``SigmaPrior.fit``, as in ``benchmarks/sigma_training.py``.

The table has medians, also of the turns' ratios. By hand, noise is drawn before the scan, and rows
are one array; the regression is also tried with a gradient for each silo, and the faster counts.
Then come two calls of ``nf.fit``, in double precision, for a Poisson regression with a random
intercept for each row. The first compiles, unless JAX keeps programs in a folder. They are compared
with the CPU alone: nobody would write all of that by hand.

Beside an accelerator, a process of its own does the same on the CPU, with fewer rounds, while this
one waits; the last column is ours there over ours here. The file of ``--json`` is written after
each part, so that a run that is cut off leaves what it has found.

Run it with nothing else running; it takes a few minutes::

    python benchmarks/accelerator.py --json accelerator.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import sigma_training
from pvi_step import CLASSES, HIDDEN, logistic, logistic_by_hand, network, network_by_hand, rows
from record import machine, table_row, write
from sfvi_vs_pooled import alternate, federated

import numpyro_fed as nf

KEY = jax.random.key(0)
OPTIM = optax.adam(1e-2)  # that of ``federated``
TARGET = 1.2
COLUMNS = ("ours", "by_hand", "ratio", "target")
ON_THE_CPU = ("cpu_ours", "cpu_by_hand", "cpu_ratio", "cpu_over_accelerator")
Silos = list[dict[str, Any]]
Row = dict[str, Any]


class Work(NamedTuple):
    """The sizes of the data, and how much is run; steps, batch and draws are those of PVI."""

    silos: int = 8
    rows: int = 20_000
    covariates: int = 50
    rounds: int = 1_024
    rounds_network: int = 384
    steps: int = 192
    batch: int = 1_000
    draws: int = 4
    images: int = 1_797
    repeats: int = 7
    repeats_sigma: int = 3


# Multiples of 64: we draw the noise of 64 rounds or steps at once, also where fewer are left.
ON_ACCELERATOR = Work()
# The sizes are the same. A round takes milliseconds here, so that fewer of them are as exact.
ON_CPU = Work(rounds=192, rounds_network=64, repeats=3)
QUICK = Work(2, 40, 3, 4, 2, 4, 8, 2, 40, 1)


def line(what: str, turns: Sequence[Sequence[float]], rounds: int = 1) -> Row:
    """A line of the table, from seconds of each turn: ours, by hand, perhaps in another way."""
    ours, *ways = turns
    hand = min(ways, key=median)
    return {
        "what": what,
        "unit": "ms",
        "ours": 1e3 * median(ours) / rounds,
        "by_hand": 1e3 * median(hand) / rounds,
        "ratio": median(a / b for a, b in zip(ours, hand, strict=True)),
        "target": TARGET,
        "rounds": rounds,
    }


def sfvi_by_hand(log_lik: Callable, dim: int, rounds: int) -> Callable[..., Any]:
    """A compiled function of a key, x and y: so many steps on the bound, all rows in each."""

    def loss(params: Any, eps: Any, x: Any, y: Any) -> Any:
        z = params["loc"] + jnp.exp(params["log_scale"]) * eps
        fixed = jax.lax.stop_gradient(params)  # the gradient sticks the landing, as ours does
        residual = (z - fixed["loc"]) * jnp.exp(-fixed["log_scale"])
        log_q = -0.5 * (residual**2).sum() - fixed["log_scale"].sum()
        return log_q + 0.5 * (z**2).sum() - log_lik(z, x, y).sum()

    @jax.jit
    def run(key: Any, x: Any, y: Any) -> Any:
        def step(carry: Any, eps: Any) -> Any:
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, eps, x, y)
            updates, state = OPTIM.update(gradient, state)
            return (optax.apply_updates(params, updates), state), value

        params = {"loc": jnp.zeros(dim), "log_scale": jnp.full(dim, math.log(0.1))}
        noise = jax.random.normal(key, (rounds, dim))
        return jax.lax.scan(step, (params, OPTIM.init(params)), noise)

    return run


def stacked(silos: Silos) -> list[np.ndarray]:
    """x and y with an axis of silos."""
    return [np.stack([silo[name] for silo in silos]) for name in ("x", "y")]


def together(z: Any, x: Any, y: Any) -> Any:
    """Log likelihood of the rows of all silos, as one array."""
    return logistic_by_hand(z, x.reshape(-1, x.shape[-1]), y.ravel())


def by_silo(z: Any, x: Any, y: Any) -> Any:
    """The same with a copy of z for each silo, so that each has a gradient of its own."""
    return jax.vmap(logistic_by_hand)(jnp.broadcast_to(z, (len(x), len(z))), x, y)


def regression(work: Work, silos: Silos) -> list[Row]:
    what = f"SFVI round, regression, {work.silos} silos of {work.rows:,} x {work.covariates}"
    n, data = work.rounds, stacked(silos)
    hands = [sfvi_by_hand(f, work.covariates, n) for f in (together, by_silo)]
    x, y = map(jnp.asarray, data)
    _, loop = federated(logistic, silos, 1)
    runs = [lambda: loop(n), *(partial(hand, KEY, x, y) for hand in hands)]
    found = [line(what, alternate(runs, work.repeats), n)]
    sfvi = nf.SFVI(logistic, optim=OPTIM, guide=nf.guides.MeanField(), start=None)

    def call() -> Any:
        with warnings.catch_warnings():  # a benchmark need not settle
            warnings.simplefilter("ignore", nf.ConvergenceWarning)
            return sfvi.run(KEY, n, silos, progress_bar=False).state

    runs = [call, *(lambda hand=hand: hand(KEY, *map(jnp.array, data)) for hand in hands)]
    return [*found, line("the same in a call of SFVI.run", alternate(runs, work.repeats), n)]


def pvi(work: Work, silos: Silos) -> list[Row]:
    steps = f"{work.steps} steps of {work.batch:,} rows x {work.draws} draws"
    what = f"PVI round, the same regression, {steps}"
    local = nf.local.Optax(
        optim=OPTIM,
        steps=work.steps,
        num_particles=work.draws,
        batch_size=work.batch,
        tolerance=math.inf,  # no check of convergence, whose number of gradients is not fixed
    )
    settings = dict(schedule="synchronous", family="diagonal", evidence_draws=1, start=None)
    method = nf.PVI(logistic, local=local, **settings)
    fit, held = method._compiled_for(silos, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    runs = [lambda: fit.runtime.advance(KEY, state, held.batches, 1), pvi_by_hand(work, silos)]
    return [line(what, alternate(runs, work.repeats))]


def pvi_by_hand(work: Work, silos: Silos) -> Callable[[], Any]:
    """One synchronous round from the prior."""
    x, y = map(jnp.asarray, stacked(silos))
    silo_count, n, dim = x.shape
    batch, draws = work.batch, work.draws

    def log_lik(z: Any, x: Any, y: Any) -> Any:
        """Of all rows, averaged over draws z (draws, dim)."""
        return jax.vmap(logistic_by_hand, (0, None, None))(z, x, y).sum(1).mean()

    def loss(psi: Any, cavity: Any, noise: Any, x: Any, y: Any) -> Any:
        eps, which = noise
        loc, scale = psi["loc"], jnp.exp(psi["log_scale"])
        expected = n / batch * log_lik(loc + scale * eps, x[which], y[which])
        energy = (cavity[0] * loc + cavity[1] * (loc**2 + scale**2)).sum()
        return -(expected + energy + psi["log_scale"].sum())

    def visit(key: Any, eta: Any, factor: Any, x: Any, y: Any) -> Any:
        """The change of a silo's factor, and its expected log likelihood before."""
        for_eps, for_rows, for_evidence = jax.random.split(key, 3)
        cavity = jax.tree.map(jnp.subtract, eta, factor)
        variance = -0.5 / eta[1]
        mean, sd = variance * eta[0], jnp.sqrt(variance)
        evidence = log_lik(mean + sd * jax.random.normal(for_evidence, (1, dim)), x, y)
        psi = {"loc": mean, "log_scale": jnp.minimum(jnp.log(sd), math.log(0.1))}

        def step(carry: Any, noise: Any) -> Any:
            psi, state = carry
            value, gradient = jax.value_and_grad(loss)(psi, cavity, noise, x, y)
            updates, state = OPTIM.update(gradient, state)
            return (optax.apply_updates(psi, updates), state), value

        noise = (
            jax.random.normal(for_eps, (work.steps, draws, dim)),
            jax.random.randint(for_rows, (work.steps, batch), 0, n),
        )
        (psi, _), _ = jax.lax.scan(step, (psi, OPTIM.init(psi)), noise)
        precision = jnp.exp(-2 * psi["log_scale"])
        found = (precision * psi["loc"], -0.5 * precision)
        return jax.tree.map(lambda a, b, c: a - b - c, found, cavity, factor), evidence

    @jax.jit
    def round_(key: Any, eta: Any, factors: Any, x: Any, y: Any) -> Any:
        keys = jax.random.split(key, silo_count)
        changes, evidence = jax.vmap(visit, (0, None, 0, 0, 0))(keys, eta, factors, x, y)
        damped = jax.tree.map(lambda a: a / silo_count, changes)
        factors = jax.tree.map(jnp.add, factors, damped)
        return jax.tree.map(lambda a, b: a + b.sum(0), eta, damped), factors, evidence.sum()

    eta = jnp.zeros(dim), jnp.full(dim, -0.5)
    factors = jax.tree.map(lambda a: jnp.zeros((silo_count, dim)), eta)
    return lambda: round_(KEY, eta, factors, x, y)


def digits(images: int) -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's digits between 0 and 1, or random images and labels of their shapes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        r = np.random.default_rng(0)
        x, y = r.integers(0, 17, (1_797, 64)), r.integers(0, CLASSES, 1_797)
    else:
        x, y = load_digits(return_X_y=True)
    return (x[:images] / 16).astype(np.float32), y[:images].astype(np.int32)


def neural_network(work: Work) -> list[Row]:
    x, y = digits(work.images)
    parts = (np.array_split(a, 10) for a in (x, y))
    silos = [dict(x=a, y=b) for a, b in zip(*parts, strict=True)]
    what = f"SFVI round, BNN 64-{HIDDEN}-{CLASSES}, 10 silos, {len(x):,} digits"
    dim = x.shape[1] * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    _, loop = federated(network, silos, 1)
    n = work.rounds_network
    hand = sfvi_by_hand(network_by_hand, dim, n)
    runs = [lambda: loop(n), partial(hand, KEY, jnp.asarray(x), jnp.asarray(y))]
    return [line(what, alternate(runs, work.repeats), n)]


def sigma(work: Work) -> list[Row]:
    hand, mine, theirs = sigma_training.by_hand(), [], []
    for _ in range(work.repeats_sigma):
        # The first chunk of a training compiles and does not count.
        mine.append(sigma_training.ours(2 * sigma_training.CHUNK)[0])
        theirs.append(hand(sigma_training.CHUNK))
    return [line("training step of SigmaPrior.fit, 100 points", [mine, theirs])]


def intercepts(x, y=None):
    """Poisson regression with a random intercept for each row."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with nf.silo_plate("row", x.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, sigma))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + u)), obs=y)


def counts(silos: int, n: int) -> Silos:
    r, made = np.random.default_rng(0), []
    for _ in range(silos):
        x = np.stack([np.ones(n), r.normal(size=n)], 1)
        y = r.poisson(np.exp(x @ [1.0, 0.5] + 0.7 * r.normal(size=n)))
        made.append(dict(x=x, y=y.astype(float)))
    return made


def fits(what: str, model: Callable, silos: Silos) -> list[Row]:
    found = []
    for call in ("first", "second"):
        began = time.perf_counter()
        fitted = nf.fit(KEY, model, silos, progress_bar=False)
        seconds = time.perf_counter() - began
        found.append(
            {
                "what": f"nf.fit, {what}, {call} call",
                "unit": "s",
                "ours": seconds,
                "trusted": fitted.trusted,
            }
        )
    return found


def run_on_cpu(report: dict[str, Any], quick: bool) -> list[Row]:
    """Add the report of this script in a process that has the CPU alone; no lines of its own."""
    # A process of its own: with a default device in this one, programs that are kept by shapes,
    # and checks of the device's memory, would still be those of the accelerator.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cpu.json"
        command = [sys.executable, __file__, "--json", str(file), *["--quick"] * quick]
        subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        report["on_cpu"] = json.loads(file.read_text())["details"]
    return []


def with_cpu(row: Row, cpu: Sequence[Row]) -> Row:
    """The line with the times on the CPU, where they are known."""
    for other in (r for r in cpu if r["what"] == row["what"]):
        row = row | {f"cpu_{k}": other[k] for k in COLUMNS[:3] if k in other}
        row["cpu_over_accelerator"] = other["ours"] / row["ours"]
    return row


def table(found: Sequence[Row]) -> str:
    keys = [key for key in COLUMNS + ON_THE_CPU if any(key in row for row in found)]

    def cell(row: Row, key: str) -> str:
        if key not in row:
            return ""
        if key == "target":
            return f"<= {row[key]}"
        is_time = key.endswith(("ours", "by_hand"))
        return f"{row[key]:.3f} {row['unit']}" if is_time else f"{row[key]:.2f}"

    names = [k.replace("cpu", "CPU").replace("_over_", " / ").replace("_", " ") for k in keys]
    lines = [["what", *names], *([r["what"], *(cell(r, key) for key in keys)] for r in found)]
    first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([what.ljust(first), *(w.rjust(n) for w, n in zip(cells, rest, strict=True))])
        for what, *cells in lines
    )


def lines(found: Sequence[Row]) -> list[Row]:
    """Return the rows of the record."""

    def beside(r: Row) -> str:
        words = [f"{r['by_hand']:.3f} {r['unit']} by hand"] if "by_hand" in r else []
        if "cpu_ours" in r:
            words.append(f"{r['cpu_ours']:.3f} {r['unit']} on the CPU")
        return ", ".join(words)

    return [
        table_row(
            r["what"],
            f"{r['ours']:.3f} {r['unit']}",
            beside(r),
            f"at most {r['target']} of by hand" if "target" in r else "",
        )
        for r in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs, without SIGMA")
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", args.quick)
    device = jax.devices()[0]
    accelerated = device.platform != "cpu"
    print(machine(), flush=True)
    work = QUICK if args.quick else ON_ACCELERATOR if accelerated else ON_CPU
    silos = rows(work.silos, work.rows, work.covariates, 2)
    report: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    report |= {"rows": [], "failed": [], "on_cpu": {"rows": []}}

    def run(name: str, part: Callable[[], list[Row]]) -> None:
        try:
            report["rows"] += part()
        except Exception:  # the other parts do not need this one
            traceback.print_exc()
            report["failed"].append(name)
        report["rows"] = [with_cpu(row, report["on_cpu"]["rows"]) for row in report["rows"]]
        report["machine"] = machine()
        if args.json:
            write(args.json, lines(report["rows"]), details=report)

    run("regression", lambda: regression(work, silos))
    run("PVI", lambda: pvi(work, silos))
    run("network", lambda: neural_network(work))
    if not args.quick:  # its first call compiles more than all other parts
        run("SIGMA", lambda: sigma(work))
    print(table(report["rows"]), flush=True)
    if accelerated:  # before nf.fit here, of whose time nothing is known on a new device
        run("CPU", lambda: run_on_cpu(report, args.quick))
    if args.quick:
        run("fit", lambda: fits("the regression", logistic, silos))
    else:
        run("fit", lambda: fits("4 silos of 500 rows with intercepts", intercepts, counts(4, 500)))
    print(table(report["rows"]))
    print(machine())
    sys.exit(bool(report["failed"]))


if __name__ == "__main__":
    main()
