"""Time of a training step of a learnt prior against the same step written by hand.

A Gaussian process on 100 points of three silos, as in ``benchmarks/sigma_gp.py``: networks, batch,
fresh draws of the prior and optimiser are those of ``nf.SigmaPrior.fit``'s defaults; by hand they
are arrays and products of matrices over the whole batch. The two take turns; the table shows
medians. The last column is the share of our step that drawing the prior takes.

    python benchmarks/sigma_training.py --json sigma_training.json
"""

from __future__ import annotations

import argparse
import time
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

import numpyro_fed as nf

X = np.linspace(0, 1, 100)
BLOCKS = [np.flatnonzero(np.digitize(X, (0.34, 0.67)) == j) for j in range(3)]
CHUNK = 500  # steps in one call
BATCH, EACH, SHARED, LOCAL, WIDTH, WIDTH_LOCAL, MIXING = 128, 8, 10, 5, 64, 16, 32
NOISE = 0.2


def kernel(phi: jax.Array) -> jax.Array:
    return jnp.exp(-((X[:, None] - X) ** 2) / (2 * phi**2)) + 1e-4 * jnp.eye(len(X))


def model() -> None:
    phi = numpyro.sample("phi", dist.Uniform(0.2, 1.0))
    numpyro.sample("theta", dist.MultivariateNormal(0.0, kernel(phi)))


def ours(steps: int) -> tuple[float, float]:
    """Seconds of a step, and the share that draws take."""
    prior = nf.SigmaPrior.fit(
        jax.random.key(0), model, "theta", BLOCKS, num_steps=steps, z_global=SHARED,
        progress_bar=False,
    )  # fmt: skip
    return prior.times["step"], prior.times["drawing"]


def linear(key: jax.Array, *shape: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, shape) / np.sqrt(shape[-2]), "b": jnp.zeros(shape[-1])}


def apply(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def weights(key: jax.Array) -> Any:
    """Those of the networks, written by hand."""
    k = jax.random.split(key, 20)
    n, largest, blocks = len(X), max(map(len, BLOCKS)), len(BLOCKS)
    inner = SHARED + 1
    return {
        "encoder": [linear(k[0], n + 1, WIDTH), linear(k[1], WIDTH, WIDTH)],
        "heads": [linear(k[2], WIDTH, SHARED), linear(k[3], WIDTH, SHARED)],
        "decoder": [linear(k[4], inner, WIDTH), linear(k[5], WIDTH, WIDTH)],
        "local": [
            linear(k[6], blocks, inner, WIDTH_LOCAL),
            linear(k[7], blocks, WIDTH_LOCAL, WIDTH_LOCAL),
            linear(k[8], blocks, WIDTH_LOCAL, LOCAL),
            linear(k[9], blocks, WIDTH_LOCAL, LOCAL),
        ],
        "out": linear(k[10], blocks, WIDTH + LOCAL + 1, largest),
        "inward": 0.1 * jax.random.normal(k[11], (n, SHARED)),
        "log_variance": jnp.zeros(SHARED),
        "outward": 0.1 * jax.random.normal(k[12], (blocks, SHARED, largest)),
        "mix_in": [linear(k[13], 1, MIXING), linear(k[14], MIXING, SHARED**2)],
        "mix_out": [linear(k[15], 1, MIXING), linear(k[16], MIXING, SHARED**2)],
    }


def mixed(layers: Any, z: jax.Array, phi: jax.Array) -> jax.Array:
    matrix = apply(layers[1], jnp.tanh(apply(layers[0], phi))).reshape(-1, SHARED, SHARED)
    return z + jnp.einsum("bij,bj->bi", matrix, z)


def kl(mean: jax.Array, log_variance: jax.Array) -> jax.Array:
    return 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum()


def loss(w: Any, theta: jax.Array, phi: jax.Array, eps_G: jax.Array, eps_L: jax.Array) -> jax.Array:
    """Minus the bound of a batch, on average."""
    hidden = apply(
        w["encoder"][1], jax.nn.relu(apply(w["encoder"][0], jnp.concatenate([theta, phi], 1)))
    )
    mean = apply(w["heads"][0], hidden) + mixed(w["mix_in"], theta @ w["inward"], phi)
    log_variance = apply(w["heads"][1], hidden) + w["log_variance"]
    z_G = mean + jnp.exp(log_variance / 2) * eps_G
    given = jnp.concatenate([z_G, phi], 1)
    first, second, at, spread = w["local"]

    def every(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x @ layer["w"] + layer["b"]

    local = every(second, jax.nn.relu(every(first, given[None])))
    mean_L, log_variance_L = every(at, local), every(spread, local)
    z_L = mean_L + jnp.exp(log_variance_L / 2) * eps_L
    hidden = apply(w["decoder"][1], jax.nn.relu(apply(w["decoder"][0], given)))
    both = jnp.concatenate([jnp.stack([hidden] * len(z_L)), z_L, jnp.stack([phi] * len(z_L))], 2)
    out = every(w["out"], both) + mixed(w["mix_out"], z_G, phi)[None] @ w["outward"]
    fit = sum(((theta[:, own] - out[j, :, : len(own)]) ** 2).sum() for j, own in enumerate(BLOCKS))
    return (0.5 * fit / NOISE**2 + kl(mean, log_variance) + kl(mean_L, log_variance_L)) / len(theta)


def by_hand() -> Callable[[int], float]:
    """Seconds of a step, of a number of steps."""
    optim = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        w, state = carry
        k = jax.random.split(key, 4)
        phi = jax.random.uniform(k[0], (BATCH // EACH,), minval=0.2, maxval=1.0)
        roots = jnp.linalg.cholesky(jax.vmap(kernel)(phi))
        noise = jax.random.normal(k[1], (BATCH // EACH, EACH, len(X)))
        theta = jnp.einsum("pij,pej->pei", roots, noise).reshape(BATCH, -1)
        rank = jnp.repeat((phi - 0.6) / 0.23, EACH)[:, None]
        eps_G = jax.random.normal(k[2], (BATCH, SHARED))
        eps_L = jax.random.normal(k[3], (len(BLOCKS), BATCH, LOCAL))
        value, gradient = jax.value_and_grad(loss)(w, theta, rank, eps_G, eps_L)
        updates, state = optim.update(gradient, state, w)
        return (optax.apply_updates(w, updates), state), value

    @jax.jit
    def advance(carry: Any, key: jax.Array) -> Any:
        return jax.lax.scan(step, carry, jax.random.split(key, CHUNK))

    first = jax.jit(weights)(jax.random.key(1))
    carry: Any = (first, optim.init(first))
    carry, _ = jax.block_until_ready(advance(carry, jax.random.key(2)))

    def run(steps: int) -> float:
        began = time.perf_counter()
        for i in range(max(steps // CHUNK, 1)):
            jax.block_until_ready(advance(carry, jax.random.key(i)))
        return (time.perf_counter() - began) / CHUNK / max(steps // CHUNK, 1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="one turn of few steps")
    args = parser.parse_args()
    steps, turns = (2 * CHUNK, 1) if args.quick else (3_000, 5)
    hand, mine, theirs, shares = by_hand(), [], [], []
    for _ in range(turns):
        seconds, share = ours(steps)
        mine.append(seconds)
        shares.append(share)
        theirs.append(hand(steps))
    found = {
        "ours_ms": 1e3 * median(mine),
        "by_hand_ms": 1e3 * median(theirs),
        "ratio": median(m / t for m, t in zip(mine, theirs, strict=True)),
        "drawing": median(shares),
        "target": 1.2,
    }
    print(
        f"a step: {found['ours_ms']:.2f} ms, by hand {found['by_hand_ms']:.2f} ms, ratio "
        f"{found['ratio']:.2f} (at most {found['target']}); drawing {100 * found['drawing']:.0f} %"
    )
    print(machine())
    if args.json:
        words = f"{found['ours_ms']:.2f} ms, ratio {found['ratio']:.2f}"
        by_hand_ms = f"{found['by_hand_ms']:.2f} ms by hand"
        rows = [
            table_row("a training step", words, by_hand_ms, f"ratio at most {found['target']}"),
            table_row("share of it that draws the prior", f"{found['drawing']:.0%}"),
        ]
        write(args.json, rows, details=found | {"machine": machine()})


if __name__ == "__main__":
    main()
