"""Time of SFVI's steps by minibatches, and with some of many silos.

With mean-field guides, Adam and one particle. First, of a logistic regression on 20 covariates, a
step with 128 of 20,000 rows at each silo, against the same step written by hand in JAX, with random
gathers: on the globals alone, and with a normal latent for each row. Then, of these and of a
network, a round with 100 of 10,000 silos of 20 rows, against one with 100 silos that all take part.
All run as one compiled loop and take turns; the table shows medians.

Run it with nothing else running::

    python benchmarks/minibatches.py --json minibatches.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from record import machine, write
from sfvi_vs_pooled import alternate, lines, table

import numpyro_fed as nf

KEY = jax.random.key(0)
COVARIATES = 20
OPTIM = optax.adam(1e-3)
GUIDE = nf.guides.Structured(globals="diagonal", couple_mean=False, couple_scale=False)


def model(x, y, latents=False):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([COVARIATES]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1)) if latents else 0.0
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + u), obs=y)


def network(x, y, latents=False):
    """Fifty hidden units."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([COVARIATES, 50]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([50]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ w) @ v), obs=y)


def simulate(silos: int, rows: int, latents: bool) -> list[dict[str, Any]]:
    r = np.random.default_rng(rows)
    beta = r.normal(size=COVARIATES).astype(np.float32)
    found = []
    for _ in range(silos):
        x = r.normal(size=(rows, COVARIATES)).astype(np.float32)
        y = (r.uniform(size=rows) < 1 / (1 + np.exp(-x @ beta))).astype(np.int32)
        found.append(dict(x=x, y=y, latents=latents))
    return found


def federated(
    silos: list[dict[str, Any]], text: Callable = model, **settings: Any
) -> Callable[[int], Any]:
    """The compiled loop of SFVI."""
    sfvi = nf.SFVI(text, guide=GUIDE, optim=OPTIM, start=None, **settings)
    fit, held = sfvi._compiled_for(silos, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    return lambda n: fit.runtime.advance(KEY, state, held.batches, n)


def by_hand(silos: list[dict[str, Any]], size: int) -> Callable[[int], Any]:
    """The same steps, without anything that federated inference needs but sums over silos."""
    latents = silos[0]["latents"]
    x, y = (jnp.stack([jnp.asarray(s[k]) for s in silos]) for k in ("x", "y"))
    number, rows = y.shape
    stop = jax.lax.stop_gradient

    def normal(z: Any, loc: Any, log_scale: Any) -> Any:
        """Log density, without its constant."""
        return -0.5 * ((z - loc) * jnp.exp(-log_scale)) ** 2 - log_scale

    def likelihood(own: Any, beta: Any, x: Any, y: Any, key: Any) -> Any:
        for_rows, for_noise = jax.random.split(key)
        which = jax.random.randint(for_rows, (size,), 0, rows)
        logits, terms = x[which] @ beta, 0.0
        if latents:
            loc, log_scale = own["loc"][which], own["log_scale"][which]
            u = loc + jnp.exp(log_scale) * jax.random.normal(for_noise, (size,))
            terms = -0.5 * u**2 - normal(u, stop(loc), stop(log_scale))
            logits = logits + u
        terms += y[which] * logits - jnp.logaddexp(0.0, logits)
        return rows / size * terms.sum()

    def loss(params: Any, keys: Any, eps: Any) -> Any:
        loc, log_scale = params["loc"], params["log_scale"]
        beta = loc + jnp.exp(log_scale) * eps
        own = jax.vmap(likelihood, (0, None, 0, 0, 0))(params["own"], beta, x, y, keys).sum()
        return -(own - 0.5 * beta @ beta - normal(beta, stop(loc), stop(log_scale)).sum())

    def step(carry: Any, i: Any) -> Any:
        params, opt_state = carry
        for_eps, for_silos = jax.random.split(jax.random.fold_in(KEY, i))
        eps = jax.random.normal(for_eps, (COVARIATES,))
        keys = jax.random.split(for_silos, number)
        value, gradient = jax.value_and_grad(loss)(params, keys, eps)
        updates, opt_state = OPTIM.update(gradient, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    def pair(*shape: int) -> dict[str, Any]:
        return {"loc": jnp.zeros(shape), "log_scale": jnp.full(shape, -2.0)}

    own = pair(number, rows) if latents else {"loc": jnp.zeros((number, 0))}
    params = pair(COVARIATES) | {"own": own}
    state = params, OPTIM.init(params)
    many = jax.jit(lambda n, s: jax.lax.scan(step, s, jnp.arange(n)), static_argnums=0)
    return lambda n: many(n, state)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--repeats", type=int, default=11, help="turns of each side")
    args = parser.parse_args()
    rounds, repeats = (3, 1) if args.quick else (300, args.repeats)
    rows, size = (40, 8) if args.quick else (20_000, 128)
    found = []
    for latents in (False, True):
        for number in (1, 10):
            silos = simulate(number, rows, latents)
            words = f"{size} of {rows:,} rows{', latents' * latents}, {number} silos"
            ours, other = federated(silos, batch_size=size), by_hand(silos, size)
            found.append(measured(words, ours, other, rounds, repeats))
    many, few = (20, 4) if args.quick else (10_000, 100)
    cases = ("regression", model, False), ("with latents", model, True), ("network", network, False)
    for name, text, latents in cases:
        silos = simulate(many, 20, latents)
        some = federated(silos, text, schedule=nf.schedules.Random(few))
        words = f"{few} of {many:,} silos, {name} / {few} silos"
        found.append(measured(words, some, federated(silos[:few], text), rounds, repeats))
    print(table(found))
    print("'pooled' is the step by hand, and in the last two lines the round with few silos.")
    print(machine())
    if args.json:
        write(args.json, lines(found), details={"machine": machine(), "steps": found})


if __name__ == "__main__":
    main()
