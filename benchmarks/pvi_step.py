"""Time of a client's gradient step in PVI against hand-written JAX.

Both sides maximise the same local free energy of a mean-field Gaussian by Adam on minibatches drawn
from the same data, for the same number of steps, client after client. The hand-written loops are
what one would write for these two models alone: the likelihood as a matrix product, the divergence
in closed form, one ``lax.scan``. They take turns; the table shows medians. Ours includes everything
that a visit does besides its steps: the cavity, the expected log likelihood, the server's update.

Run it with nothing else running::

    python benchmarks/pvi_step.py --json pvi_step.json
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
from record import machine, table_row, write
from sfvi_vs_pooled import alternate

import numpyro_fed as nf

KEY = jax.random.key(0)
HIDDEN, CLASSES = 200, 10


def logistic(x, y=None):
    """Logistic regression."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def network(x, y=None):
    """A Bayesian neural network with one hidden layer."""
    d = x.shape[1]
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([d, HIDDEN]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([HIDDEN]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([HIDDEN, CLASSES]).to_event(2))
    b2 = numpyro.sample("b2", dist.Normal(0, 1).expand([CLASSES]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def logistic_by_hand(z, x, y):
    """Log likelihood of each row, z (dim,)."""
    logits = x @ z
    return y * logits - jnp.logaddexp(0, logits)


def network_by_hand(z, x, y):
    """Log likelihood of each row, z (dim,)."""
    d = x.shape[1]
    sizes = np.cumsum([d * HIDDEN, HIDDEN, HIDDEN * CLASSES])
    w1, b1, w2, b2 = jnp.split(z, sizes)
    hidden = jax.nn.relu(x @ w1.reshape(d, HIDDEN) + b1)
    logits = jax.nn.log_softmax(hidden @ w2.reshape(HIDDEN, CLASSES) + b2)
    return jnp.take_along_axis(logits, y[:, None], 1)[:, 0]


def rows(clients: int, n: int, d: int, classes: int) -> list[dict[str, np.ndarray]]:
    """Clients of ``n`` rows."""
    r = np.random.default_rng(0)
    x = r.normal(size=(clients, n, d)).astype(np.float32)
    score = x @ r.normal(size=(d, classes)) / d**0.5
    y = score.argmax(-1).astype(np.int32) if classes > 2 else (score[..., 0] > 0).astype(np.float32)
    return [dict(x=a, y=b) for a, b in zip(x, y, strict=True)]


def by_hand(
    log_lik: Callable, silos: list, dim: int, steps: int, batch: int, samples: int, ahead: bool
) -> Callable[[], Any]:
    """PVI's clients one after the other; ``ahead`` draws the noise of all steps at once."""
    x, y = (jnp.stack([s[k] for s in silos]) for k in ("x", "y"))
    n, optim = x.shape[1], optax.adam(1e-2)

    def loss(psi: Any, cavity: Any, noise: Any, x: Any, y: Any) -> Any:
        eps, index = noise
        loc, scale = psi["loc"], jnp.exp(psi["log_scale"])
        each = jax.vmap(log_lik, (0, None, None))(loc + scale * eps, x[index], y[index])
        entropy = psi["log_scale"].sum()
        energy = (cavity[0] * loc).sum() + (cavity[1] * (loc**2 + scale**2)).sum()
        return -(each.sum(1).mean() * n / batch + energy + entropy)

    def draw(key: Any) -> Any:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (samples, dim)), jax.random.randint(two, (batch,), 0, n)

    def client(eta: Any, data: Any) -> tuple[Any, None]:
        key, x, y, factor = data
        cavity = jax.tree.map(jnp.subtract, eta, factor)
        variance = -0.5 / eta[1]
        psi = {"loc": variance * eta[0], "log_scale": jnp.minimum(0.5 * jnp.log(variance), -2.3)}
        keys = jax.random.split(key, steps)

        def step(carry: Any, noise: Any) -> tuple[Any, None]:
            psi, state = carry
            gradient = jax.grad(loss)(psi, cavity, noise if ahead else draw(noise), x, y)
            updates, state = optim.update(gradient, state)
            return (optax.apply_updates(psi, updates), state), None

        noise = jax.vmap(draw)(keys) if ahead else keys
        (psi, _), _ = jax.lax.scan(step, (psi, optim.init(psi)), noise)
        precision = jnp.exp(-2 * psi["log_scale"])
        return (precision * psi["loc"], -0.5 * precision), None

    @jax.jit
    def one_pass(key: Any, x: Any, y: Any) -> Any:
        eta = (jnp.zeros(dim), jnp.full(dim, -0.5))
        factors = jax.tree.map(lambda a: jnp.zeros((len(x), *a.shape)), eta)
        return jax.lax.scan(client, eta, (jax.random.split(key, len(x)), x, y, factors))[0]

    return lambda: one_pass(KEY, x, y)


def ours(model: Callable, silos: list, steps: int, batch: int, samples: int) -> Callable[[], Any]:
    """One sequential round."""
    pvi = nf.PVI(
        model,
        family="diagonal",
        local=nf.local.Optax(
            optim=optax.adam(1e-2), steps=steps, batch_size=batch, num_particles=samples
        ),
        evidence_draws=1,
        start=None,
    )
    fit, held = pvi._compiled_for(silos, "simulation")
    state = fit.runtime.init(KEY, held.batches)
    return lambda: fit.runtime.advance(KEY, state, held.batches, 1)


def compare(
    what: str, target: float, model: Any, hand: Any, silos: list, dim: int, quick: bool, **s: int
) -> dict[str, Any]:
    runs = [
        ours(model, silos, **s),
        by_hand(hand, silos, dim, **s, ahead=False),
        by_hand(hand, silos, dim, **s, ahead=True),
    ]
    steps = s["steps"] * len(silos)
    times = [median(t) for t in alternate(runs if dim < 1_000 else runs[:2], 1 if quick else 7)]
    each = [1e3 * t / steps for t in times]
    return {
        "what": what,
        "ours_ms": each[0],
        "by_hand_ms": each[1],
        "by_hand_ahead_ms": each[2] if len(each) > 2 else None,
        "ratio": each[0] / min(each[1:]),
        "target": target,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    args = parser.parse_args()
    q = args.quick
    small = dict(steps=20 if q else 1_000, batch=128, samples=10)
    large = dict(steps=2 if q else 50, batch=512, samples=1)
    d = 20 if q else 784
    dim = d * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    what = "logistic regression, 20,000 x 50 in 10 clients, batch 128, 10 samples"
    clients = rows(10, 200 if q else 2_000, 50, 2)
    table = [compare(what, 1.3, logistic, logistic_by_hand, clients, 50, q, **small)]
    what = "BNN 784-200-10, 2 clients of 6,000, batch 512, 1 sample"
    clients = rows(2, 600 if q else 6_000, d, CLASSES)
    table.append(compare(what, 1.2, network, network_by_hand, clients, dim, q, **large))
    for row in table:
        hand = ", ".join(f"{row[k]:.4f}" for k in ("by_hand_ms", "by_hand_ahead_ms") if row[k])
        print(f"{row['what']}: ours {row['ours_ms']:.4f} ms a step, by hand {hand}, ", end="")
        print(f"ratio {row['ratio']:.2f} (target {row['target']})")
    print(machine())
    if args.json:
        found = [
            table_row(
                f"a step of PVI, {r['what']}",
                f"{r['ours_ms']:.3f} ms, ratio {r['ratio']:.2f}",
                f"{r['ours_ms'] / r['ratio']:.3f} ms by hand",
                f"ratio at most {r['target']}",
            )
            for r in table
        ]
        write(args.json, found, details={"machine": machine(), "steps": table})


if __name__ == "__main__":
    main()
