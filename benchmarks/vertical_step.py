"""Time of a round of vertical inference against pooled inference, and as rows grow.

First a round of each vertical algorithm against one ``SVI.update`` of NumPyro on the same model
and pooled data, all with mean-field normal guides, ``optax.adam(1e-2)`` and one particle: the exact
split against the model as it is written, the others against ``nf.handlers.augment`` and
``nf.handlers.power_likelihood``. Then a round with minibatches of 512 rows, of ten thousand and of
a million. All run as one compiled loop and take turns; the table shows medians.

Run it with nothing else running::

    python benchmarks/vertical_step.py --json vertical_step.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from record import machine, write
from sfvi_vs_pooled import alternate, lines, table

import numpyro_fed as nf

KEY = jax.random.key(0)
RHO = 1.0


def predictor(x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    return x @ beta


def model(xs, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    eta = nf.client_sum("client", predictor, xs)
    with numpyro.plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b + eta), obs=y)


def simulate(rows: int, covariates: int, clients: int) -> tuple[list[np.ndarray], np.ndarray]:
    r = np.random.default_rng(rows)
    x = r.normal(size=(rows, covariates)).astype(np.float32)
    eta = x @ r.normal(size=covariates).astype(np.float32)
    y = (r.uniform(size=rows) < 1 / (1 + np.exp(-eta))).astype(np.int32)
    return np.split(x, clients, axis=1), y


def vertical(data: tuple, **settings: Any) -> Callable[[int], Any]:
    """The compiled loop of a vertical method."""
    vfl = nf.VFL(model, optim=optax.adam(1e-2), start=None, rank=0, **settings)
    fit, held = vfl._compiled_for(data, {}, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    return lambda n: fit.runtime.advance(KEY, state, held.batches, n, fit.server_data)


def pooled(text: Callable, data: tuple) -> Callable[[int], Any]:
    """NumPyro's SVI in ``lax.scan``, with the data as an argument of the program."""
    arrays = jax.tree.map(jnp.asarray, data)
    svi = SVI(text, AutoNormal(text), optax.adam(1e-2), Trace_ELBO())
    state = svi.init(KEY, *arrays)

    def many(n: int, state: Any, arrays: Any) -> Any:
        return jax.lax.scan(lambda s, _: svi.update(s, *arrays), state, None, length=n)

    compiled = jax.jit(many, static_argnums=0)
    return lambda n: compiled(n, state, arrays)


def measured(
    what: str, ours: Callable[[int], Any], other: Callable[[int], Any], rounds: int, repeats: int
) -> dict[str, Any]:
    """A line of the table, printed as soon as it is there."""
    runs = [lambda run=run: run(rounds) for run in (ours, other)]
    a, b = (median(times) for times in alternate(runs, repeats))
    row = {
        "what": what,
        "unit": "ms",
        "ours": 1e3 * a / rounds,
        "pooled": 1e3 * b / rounds,
        "ratio": a / b,
        "target": 1.3,
    }
    print(table([row]).splitlines()[1], flush=True)
    return row


def against_pooled(
    rounds: int, repeats: int, rows: int, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    guide = nf.guides.MeanField()
    cases: list[tuple[str, dict[str, Any], Callable]] = [
        ("exact split", {}, model),
        ("augmented", dict(rho=RHO), nf.handlers.augment(model, RHO)),
        (
            "power likelihood",
            dict(rho=RHO, likelihood="power", share_response=True),
            nf.handlers.power_likelihood(model, RHO),
        ),
    ]
    found = []
    for clients in numbers:
        data = simulate(rows, 20, clients)
        for name, settings, text in cases:
            if settings:
                settings = settings | dict(auxiliary="mean_field")
            ours = vertical(data, guide=guide, server_guide=guide, **settings)
            what = f"{name}, {clients} clients, {rows} rows"
            found.append(measured(what, ours, pooled(text, data), rounds, repeats))
    return found


def as_rows_grow(rounds: int, repeats: int, many: int, few: int) -> list[dict[str, Any]]:
    found = []
    settings = {"exact split": {}, "augmented": dict(rho=RHO, auxiliary="amortised")}
    for name, chosen in settings.items():
        size = min(512, few)
        runs = [vertical(simulate(n, 20, 2), batch_size=size, **chosen) for n in (many, few)]
        what = f"{name}, minibatches of {size}: {many:,} rows / {few:,} rows"
        found.append(measured(what, *runs, rounds, repeats))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--repeats", type=int, default=11, help="turns of each side")
    args = parser.parse_args()
    rounds, repeats = (3, 1) if args.quick else (500, args.repeats)
    rows, many, few = (20, 64, 32) if args.quick else (500, 1_000_000, 10_000)
    rounds_found = against_pooled(rounds, repeats, rows, (2,) if args.quick else (2, 10))
    growth = as_rows_grow(rounds, repeats, many, few)
    print(table([*rounds_found, *growth]))
    print("In the last two lines, 'ours' is with the many rows and 'pooled' with the few.")
    print(machine())
    if args.json:
        report = {"machine": machine(), "rounds": rounds_found, "rows": growth}
        write(args.json, lines([*rounds_found, *growth]), details=report)


if __name__ == "__main__":
    main()
