"""How long a first answer takes: CPU seconds of a fresh process, programs, and runs of the text.

Each work is done in a process of its own, on one core (``NPROC=1``): imports, ``nf.fit`` and 2,000
draws, then the same again with another key. NUTS sees all rows: 1,000 draws after 1,000. Printed
are the CPU seconds of both calls and of NUTS, how many programs a first call compiles and how often
it runs the user's text, and its seconds of tracing, lowering and compiling.

    python benchmarks/first_answer.py --works readme,six,t1,slopes --json first_answer.json

``--works`` takes some of: readme, six, t1, slopes, rows (10^6 of them), silos (500). ``--no-nuts``
leaves NUTS out. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from few_messages import registry
from record import table_row, write

import numpyro_fed as nf

HERE = Path(__file__).resolve().parent
Work = tuple[Callable[..., None], list[dict[str, Any]]]


def regression(x: Any, y: Any = None) -> None:
    """State the README's regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 1000).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(10))
    with nf.silo_plate("patient", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def readme() -> Work:
    """Return the README's regression: three silos of 60 to 120 rows."""
    rng, silos = np.random.default_rng(0), []
    for n, low in ((90, 20), (60, 35), (120, 50)):
        age, income = rng.uniform(low, low + 40, n), rng.lognormal(10, 0.7, n)
        x = np.stack([np.ones(n), age, income], 1)
        silos.append(dict(x=x, y=x @ [90, 0.6, -2e-4] + 12 * rng.normal(size=n)))
    return regression, silos


def six() -> Work:
    """Return the six cities study in two silos."""
    sys.path.append(str(HERE.parent / "examples"))
    import six_cities

    return six_cities.model, six_cities.silos()


def t1() -> Work:
    """Return five hospitals of 12 to 3,000 patients with eight raw covariates."""
    rng, silos = np.random.default_rng(4), []
    for n in (12, 100, 400, 1_200, 3_000):
        age, income = rng.uniform(20, 90, n), rng.lognormal(10, 0.7, n)
        rest = rng.normal(size=(n, 5)) * [1, 10, 0.1, 100, 1]
        x = np.column_stack([np.ones(n), age, income, rest])
        eta = -3 + 0.03 * age - 5e-6 * income + 0.3 * rest[:, 0] + 0.7 * rng.normal()
        y = rng.binomial(1, 1 / (1 + np.exp(-eta)))
        silos.append(dict(x=x, hospital=np.zeros(n, int), n_hospitals=1, y=y))
    return registry, silos


def effects(t: Any, h: Any, H: int, y: Any = None) -> None:
    """State a logistic regression with ``(1 + treat | hospital)``."""
    a, e = numpyro.sample("a", dist.Normal(0, 1.5)), numpyro.sample("e", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("L", dist.LKJCholesky(2, 2.0))
    with nf.silo_plate("hospital", H):
        spread = dist.MultivariateNormal(jnp.zeros(2), scale_tril=tau[:, None] * root)
        u = numpyro.sample("u", spread)
    with nf.silo_plate("patient", len(t)):
        logits = a + u[h, 0] + (e + u[h, 1]) * t
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def slopes() -> Work:
    """Return six hospitals of 4 to 220 patients, two correlated effects of each."""
    rng, silos = np.random.default_rng(11), []
    sizes, a_of, b_of = (
        (220, 140, 90, 60, 180, 4),
        (0.3, -0.4, 0.5, 0.0, -0.2, 0.1),
        (0.1, -0.2, 0.3, -0.3, 0.9, 0.0),
    )
    for n, a, b in zip(sizes, a_of, b_of, strict=True):
        t = rng.integers(0, 2, n) * 1.0
        y = rng.binomial(1, 1 / (1 + np.exp(0.3 - a - (-0.6 + b) * t)))
        silos.append(dict(t=t, h=np.zeros(n, int), H=1, y=y))
    return effects, silos


def logistic(x: Any, y: Any = None) -> None:
    """State a logistic regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([x.shape[-1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def _logistic_silos(number: int, rows: int, columns: int) -> Work:
    rng, silos = np.random.default_rng(0), []
    beta = rng.normal(size=columns) / np.sqrt(columns)
    for _ in range(number):
        x = rng.normal(size=(rows, columns))
        silos.append(dict(x=x, y=rng.binomial(1, 1 / (1 + np.exp(-x @ beta)))))
    return logistic, silos


def rows() -> Work:
    """Return a logistic regression of 10^6 rows and 20 columns in five silos."""
    return _logistic_silos(5, 200_000, 20)


def silos() -> Work:
    """Return a logistic regression of 500 silos of 40 rows and 5 columns."""
    return _logistic_silos(500, 40, 5)


WORKS = dict(readme=readme, six=six, t1=t1, slopes=slopes, rows=rows, silos=silos)


def measured(name: str) -> dict[str, Any]:
    """Return what the first and the second call of a work take, in this process."""
    model, data = WORKS[name]()
    programs, runs = [0], [0]
    seconds = dict.fromkeys(("trace", "lower", "compile"), 0.0)
    kinds = {"jaxpr_trace": "trace", "jaxpr_to_mlir": "lower", "backend_compile": "compile"}

    def listen(event: str, duration: float, **_: object) -> None:
        for part, kind in kinds.items():
            if part in event:
                seconds[kind] += duration
        programs[0] += event.endswith("backend_compile_duration")

    @wraps(model)
    def counted(**arguments: Any) -> None:
        runs[0] += 1
        model(**arguments)

    jax.monitoring.register_event_duration_secs_listener(listen)
    calls = []
    for key in range(2):
        begin = time.process_time()
        fitted = nf.fit(jax.random.key(key), counted, data, progress_bar=False)
        fitted.sample_posterior(jax.random.key(10 + key), 2_000)
        calls.append(time.process_time() - (begin if key else 0.0))  # imports count
        if not key:
            first = dict(
                trusted=fitted.trusted,
                exchanges=fitted.num_exchanges,
                programs=programs[0],
                runs_of_the_text=runs[0],
                **{f"{kind}_s": round(s, 1) for kind, s in seconds.items()},
            )
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    ess = None if fitted.corrected is None else round(fitted.corrected.ess)
    return {
        "work": name,
        "first_s": round(calls[0], 1),
        "second_s": round(calls[1], 2),
        **first,
        "ess": ess,
        "megabytes": megabytes,
    }


def nuts(name: str) -> float:
    """Return the CPU seconds of NUTS on all rows, in this process, imports included."""
    model, data = WORKS[name]()
    with jax.enable_x64(True):
        nf.run_nuts(jax.random.key(0), model, data, num_warmup=1_000, num_samples=1_000)
    return time.process_time()


def _alone(name: str, what: str) -> Any:
    """Return what a fresh process prints of a work."""
    command = [sys.executable, __file__, "--one", name, "--what", what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def lines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the record."""
    rows = []
    for r in found:
        nuts = f"{r['nuts_s']} s, NUTS" if "nuts_s" in r else ""
        seconds = f"{r['first_s']} and {r['second_s']} s of CPU"
        rows.append(table_row(f"{r['work']}: a first and a second call", seconds, nuts))
        rows.append(table_row(f"{r['work']}: programs, runs of the text", _counted(r), "", "12, 6"))
    return rows


def _counted(found: dict[str, Any]) -> str:
    return f"{found['programs']}, {found['runs_of_the_text']}"


def main() -> None:
    """Measure all works, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default="readme,six,t1,slopes")
    parser.add_argument("--no-nuts", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("fit", "nuts"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one) if args.what == "fit" else nuts(args.one)))
        return
    found = []
    for name in args.works.split(","):
        one = _alone(name, "fit")
        if not args.no_nuts and name not in ("rows", "silos"):
            one["nuts_s"] = round(_alone(name, "nuts"), 1)
        print(one, flush=True)
        found.append(one)
    if args.json:
        write(args.json, lines(found), details=found)


if __name__ == "__main__":
    main()
