"""Whether a fit ever stands still: a hundred fits of five models with latents, on few cores.

With jaxlib 0.10 a program with several stacks of matrices side by side can stop XLA's pool of
threads for ever (``numerics/linalg.py`` and ``basics/threads.py`` of the package say why). Each
model is fitted again and again, with new data each time, in a child process without any variable
set that says something of threads: the search for the mode, a round of PVI from there, and the
importance correction. A child that has used no processor time for a while stands still; it is
counted, ended, and another one does what is left.

On 2 and on 4 cores, as ``taskset`` gives them; where the machine has fewer, a pool of so many
threads stands in for them by ``PJRT_NPROC``, which the output says. ``--pool`` does so in any case:
what is then tested is the programs alone, without the larger pool that is made at import::

    python benchmarks/never_hangs.py --fits 10 --cores 2 4 --json never_hangs.json
    python benchmarks/never_hangs.py --fits 10 --cores 2 4 --pool
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from record import table_row, write

import numpyro_fed as nf

VARIABLES = "PJRT_NPROC", "NPROC", "XLA_FLAGS"  # that would say how many threads there are
STILL = 20.0  # seconds without any processor time, after which a child stands still
COLUMNS = 3
OUTCOMES = 6


def intercepts(x: Any, y: Any = None) -> None:
    """Counts, with an intercept for each row."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with nf.silo_plate("row", len(x)):
        u = numpyro.sample("u", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ b + u)), obs=y)


def hospitals(x: Any, hospital: Any, n_hospitals: int, y: Any = None) -> None:
    """Effects of a few hospitals a silo on all columns."""
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([COLUMNS]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([COLUMNS]).to_event(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(jnp.zeros(COLUMNS), tau).to_event(1))
    with nf.silo_plate("patient", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=(x * (mu + u[hospital])).sum(-1)), obs=y)


def patients(x: Any, hospital: Any, n_hospitals: int, y: Any = None) -> None:
    """The same, with a latent for each patient too."""
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(jnp.zeros(COLUMNS), tau[0]).to_event(1))
    with nf.silo_plate("patient", len(x)):
        v = numpyro.sample("v", dist.Normal(0, tau[1]))
        rate = jnp.exp((x * (mu + u[hospital])).sum(-1) + v)
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def outcomes(x: Any, y: Any = None) -> None:
    """Several counts a row, with a latent for each of them."""
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([OUTCOMES]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    shared = dist.Normal(mu, tau * jnp.ones(OUTCOMES)).to_event(1)
    with nf.silo_plate("row", len(x)):
        u = numpyro.sample("u", shared)
        rate = jnp.exp(u + 0.3 * u.mean(-1, keepdims=True))
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)


def correlated(x: Any, y: Any = None) -> None:
    """Effects of each row whose covariance the text makes, by LKJ's distribution."""
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([COLUMNS]).to_event(1))
    root = tau[:, None] * numpyro.sample("corr", dist.LKJCholesky(COLUMNS, 2.0))
    with nf.silo_plate("row", len(x)):
        b = numpyro.sample("b", dist.MultivariateNormal(mu, scale_tril=root))
        rate = jnp.exp((x * b).sum(-1))[:, None] * jnp.ones(2)
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)


class Text(NamedTuple):
    """A model, the numbers of counts in a row's outcome, and whether rows are in hospitals."""

    model: Callable[..., None]
    counts: tuple[int, ...] = ()
    grouped: bool = False
    binary: bool = False


MODELS = {
    "intercepts": Text(intercepts),
    "hospitals": Text(hospitals, grouped=True, binary=True),
    "patients": Text(patients, grouped=True),
    "outcomes": Text(outcomes, counts=(OUTCOMES,)),
    "correlated": Text(correlated, counts=(2,)),
}
SIZES = ((30, 2), (40, 3), (50, 4), (60, 5))  # rows and hospitals of each silo


def made_up(text: Text, seed: int) -> list[dict[str, Any]]:
    """Data of four silos."""
    r = np.random.default_rng(seed)
    silos = []
    for n, number in SIZES:
        x = np.column_stack([np.ones(n), 0.5 * r.normal(size=(n, COLUMNS - 1))]).astype(np.float32)
        hospital = np.arange(n) % number
        effects = x @ np.array([0.2, 0.5, -0.3]) + 0.5 * r.normal(size=number)[hospital]
        rate = effects.reshape(-1, *[1] * len(text.counts)) + np.zeros((n, *text.counts))
        y = r.binomial(1, 1 / (1 + np.exp(-rate))) if text.binary else r.poisson(np.exp(rate))
        silo = {"x": x, "y": y.astype(np.float32)}
        silos.append(
            {**silo, "hospital": hospital, "n_hospitals": number} if text.grouped else silo
        )
    return silos


def fit_again(name: str, first: int, last: int) -> None:
    """Fit a model with data of these seeds, and say of each when it is done: what a child does."""
    text = MODELS[name]
    method = nf.PVI(text.model)  # which keeps its programs
    warnings.simplefilter("ignore")  # of fits that are cut short
    for seed in range(first, last):
        key, silos = jax.random.key(seed), made_up(text, seed)
        result = method.run(key, 1, silos, progress_bar=False)
        corrected = nf.importance_correct(key, result, 128, 16)
        jax.block_until_ready(corrected.weights)
        print(seed, flush=True)


def used(process: int) -> int:
    """Processor time of a process and all its threads so far, in ticks of its machine."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def watched(command: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """How many fits a child has done, and whether it then stood still."""
    with tempfile.TemporaryFile("w+") as done:
        child = subprocess.Popen(command, env=env, stdout=done)
        before, since = -1, time.monotonic()
        still = False
        while child.poll() is None and not still:
            time.sleep(1.0)
            now = used(child.pid)
            if now > before + 1:
                before, since = now, time.monotonic()
            still = time.monotonic() - since > STILL
        if still:
            child.kill()
        child.wait()
        done.seek(0)
        number = len(done.read().split())
    if child.returncode and not still:
        raise SystemExit(f"a child ended with code {child.returncode}: see its error above.")
    return number, still


def measure(name: str, fits: int, number: int, pool: bool, cache: str | None) -> dict[str, Any]:
    """Fits of a model on so many cores, and how many of them stood still.

    Children compile as by default, into a cache of their own; or, without one, as this process.
    """
    env = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    if cache is None:
        env["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    else:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    own = sorted(os.sched_getaffinity(0))
    pool = pool or number > len(own)
    if pool:
        env["PJRT_NPROC"] = str(number)
    prefix = [] if pool else ["taskset", "-c", ",".join(map(str, own[:number]))]
    began, done, still = time.monotonic(), 0, 0
    while done + still < fits:
        rest = ["--child", name, str(done + still), str(fits)]
        more, stood = watched([*prefix, sys.executable, __file__, *rest], env)
        done, still = done + more, still + stood
    where = f"a pool of {number} threads on {len(own)} cores" if pool else f"{number} cores"
    seconds = time.monotonic() - began
    print(f"{name}, {where}: {done} fits done, {still} stood still, {seconds:.0f} s", flush=True)
    return {"model": name, "where": where, "done": done, "still": still, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fits", type=int, default=10, help="of each model on each machine")
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pool", action="store_true", help="of threads, by PJRT_NPROC")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="one fit of one model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, first, last = options.child
        return fit_again(name, int(first), int(last))
    if options.quick:
        options.fits, options.cores, options.models = 1, [2], ["intercepts"]
    with tempfile.TemporaryDirectory() as cache:
        runs = [
            measure(name, options.fits, number, options.pool, None if options.quick else cache)
            for number in options.cores
            for name in options.models
        ]
    done, still = (sum(run[what] for run in runs) for what in ("done", "still"))
    print(f"{done + still} fits, of which {still} stood still")
    if options.json:
        rows = [
            table_row(
                f"{r['model']}, {r['where']}: fits that hang", r["still"], f"of {r['done']}", 0
            )
            for r in runs
        ]
        write(options.json, rows, details={"runs": runs, "still": still})


if __name__ == "__main__":
    main()
