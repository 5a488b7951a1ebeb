"""The training of a SIGMA prior: fresh draws in each step, one compiled loop."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm.auto import tqdm

from numpyro_fed.errors import NonFiniteError
from numpyro_fed.model.substitution import Blocks
from numpyro_fed.sigma.source import Draws, Scales, Source

if TYPE_CHECKING:
    from numpyro_fed.sigma.networks import Networks

Trained = tuple[list[Array], optax.OptState]
CHUNK = 500  # steps in one call
TIMED = 20  # steps' draws, of which the time is taken


class Settings(NamedTuple):
    """Steps, draws in each, how many of them at the same hyperparameters, the decoder's noise."""

    num_steps: int
    batch_size: int
    draws_per_phi: int
    noise: float


class Step(NamedTuple):
    """One draw: standardised entries (entries,), hyperparameters (hyper,), and standard normals,
    of a prior without an encoder those of which the draw is made.
    """

    theta: Array
    phi: Array
    eps_G: Array
    eps_L: Array


def minus_bound(networks: Networks, at: Step, table: Array, there: Array, noise: float) -> Array:
    """Return minus the evidence bound of one draw (equation 8).

    Without an encoder what is shared is what the draw was made of.
    """
    z_G, kl_global = at.eps_G, jnp.zeros(())
    if networks.encoder is not None:
        mean, log_variance = networks.encode(at.theta, at.phi)
        z_G = mean + jnp.exp(0.5 * log_variance) * at.eps_G
        kl_global = _kl(mean, log_variance)
    blocks = jnp.arange(len(table))

    def of_block(block: Array, eps: Array) -> tuple[Array, Array]:
        mean, log_variance = networks.encode_local(block, z_G, at.phi)
        z_L = mean + jnp.exp(0.5 * log_variance) * eps
        return networks.decode(block, z_G, z_L, at.phi), _kl(mean, log_variance)

    decoded, kl_local = jax.vmap(of_block)(blocks, at.eps_L)
    off = jnp.where(there, jnp.append(at.theta, 0.0)[table] - decoded, 0.0)
    fit = 0.5 * jnp.sum((off / noise) ** 2) + there.sum() * jnp.log(noise * jnp.sqrt(2 * jnp.pi))
    return fit + kl_global + kl_local.sum()


def _kl(mean: Array, log_variance: Array) -> Array:
    """Return the divergence of a normal from the standard one."""
    return 0.5 * jnp.sum(mean**2 + jnp.exp(log_variance) - 1 - log_variance)


def drawn(source: Source, scales: Scales, settings: Settings, key: Array) -> Draws:
    """Return a step's hyperparameters (batch, hyper) and entries (batch, entries), standardised,
    and the standard normals (batch, entries) that these are made of.
    """
    n, each = settings.batch_size, settings.draws_per_phi
    phi, theta, noise = source.draw(key, -(-n // each), each)
    own = jax.vmap(scales.standardised)(theta, phi), noise
    phi = jnp.repeat(jax.vmap(scales.uniform)(phi), each, 0)[:n]
    return Draws(phi, *jax.tree.map(lambda a: a.reshape(-1, source.size)[:n], own))


def train(
    key: Array,
    networks: Networks,
    source: Source,
    blocks: Blocks,
    scales: Scales,
    settings: Settings,
    optim: optax.GradientTransformation,
    progress_bar: bool,
) -> tuple[Networks, np.ndarray, dict[str, float]]:
    """Return the trained networks, the losses, and what the training took."""
    is_array = [hasattr(a, "dtype") for a in jax.tree.leaves(networks)]
    leaves, tree = jax.tree.flatten(networks)
    weights = [a for a, there in zip(leaves, is_array, strict=True) if there]
    table = jnp.asarray(blocks.table)
    there = table < blocks.size
    sizes = networks.sizes

    def whole(weights: list[Array]) -> Networks:
        ours = iter(weights)
        pairs = zip(leaves, is_array, strict=True)
        return jax.tree.unflatten(tree, [next(ours) if there else a for a, there in pairs])

    def loss(weights: list[Array], batch: Step) -> Array:
        one = partial(minus_bound, whole(weights), table=table, there=there, noise=settings.noise)
        return jax.vmap(one)(batch).mean()

    def step(carry: Trained, key: Array) -> tuple[Trained, Array]:
        weights, opt_state = carry
        for_draws, for_G, for_L = jax.random.split(key, 3)
        phi, theta, eps_G = drawn(source, scales, settings, for_draws)
        if eps_G is None or networks.encoder is not None:
            eps_G = jax.random.normal(for_G, (len(theta), sizes.z_global))
        eps_L = jax.random.normal(for_L, (len(theta), blocks.number, sizes.z_local))
        value, gradient = jax.value_and_grad(loss)(weights, Step(theta, phi, eps_G, eps_L))
        updates, opt_state = optim.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), value

    @partial(jax.jit, static_argnums=2)
    def advance(carry: Trained, first: Array, number: int) -> tuple[Trained, Array]:
        keys = jax.vmap(partial(jax.random.fold_in, key))(first + jnp.arange(number))
        return jax.lax.scan(step, carry, keys)

    carry: Trained = (weights, optim.init(weights))
    losses: list[np.ndarray] = []
    began = compiled = time.perf_counter()
    with tqdm(total=settings.num_steps, disable=not progress_bar, desc="SIGMA prior") as bar:
        while (done := sum(map(len, losses))) < settings.num_steps:
            number = min(CHUNK, settings.num_steps - done)
            carry, values = advance(carry, jnp.asarray(done), number)
            losses.append(np.asarray(values))
            if done == 0:
                compiled = time.perf_counter()
            if not np.isfinite(losses[-1]).all():
                at = done + int(np.argmin(np.isfinite(losses[-1])))
                raise NonFiniteError(
                    f"the training diverged: the bound is NaN or infinite in step {at}. Take "
                    "smaller steps (optim=), more noise= in the decoder, or a narrower range.",
                    result=None,
                    round=at,
                    silos=(),
                )
            bar.update(number)
            bar.set_postfix(loss=f"{losses[-1].mean():.2f}")
    seconds = time.perf_counter() - began
    rest = settings.num_steps - len(losses[0])
    each = (time.perf_counter() - compiled) / rest if rest else float("nan")
    times = {
        "seconds": seconds,
        "step": each,
        "drawing": _share(key, source, scales, settings, each),
    }
    return whole(carry[0]), np.concatenate(losses), times


def _share(key: Array, source: Source, scales: Scales, settings: Settings, each: float) -> float:
    """Return the share of a step's time that drawing takes; NaN for trainings too short to tell."""
    if not np.isfinite(each):
        return float("nan")
    keys = jax.random.split(key, TIMED)
    draws = jax.jit(partial(jax.lax.map, partial(drawn, source, scales, settings)))
    jax.block_until_ready(draws(keys))
    began = time.perf_counter()
    jax.block_until_ready(draws(keys))
    return (time.perf_counter() - began) / TIMED / each
