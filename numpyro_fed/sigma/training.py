"""The training of a SIGMA prior by its evidence bound (arXiv 2405.16055), and its check.

Each step takes fresh draws of the true prior, so that there is no data set to overfit. Steps run in
compiled loops of ``CHUNK`` steps. Afterwards draws are compared with those of the true prior, by
covariances and an energy distance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm.auto import tqdm

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import ModelError, NonFiniteError
from numpyro_fed.sigma.fields import DenseField, field_of
from numpyro_fed.sigma.true_prior import Draws, Scales, TruePrior
from numpyro_fed.text.substitution import Blocks

if TYPE_CHECKING:
    from numpyro_fed.sigma.networks import Networks

Trained = tuple[list[Array], optax.OptState]
# Steps in one compiled call, half a second at 1 ms a step (docs/results/sigma.md): the progress bar
# moves twice a second and a divergence is seen soon. Fewer would make calls themselves count.
CHUNK = 500
# Steps whose draws are timed alone, for the share of drawing in a step: some 10 ms in all.
TIMED = 20


class Training(NamedTuple):
    """The settings of a training."""

    num_steps: int
    batch_size: int  # draws in each step
    draws_per_phi: int  # of these, that share their hyperparameters
    noise: float  # the decoder's standard deviation, in those of the prior


class DrawAndNoise(NamedTuple):
    """One draw of the true prior, and the noise of its bound, standard normals."""

    theta: Array  # (entries,) standardised
    phi: Array  # (hyper,) as the networks take them
    eps_G: Array  # (z_global,); without an encoder those that the draw is made of
    eps_L: Array  # (blocks, z_local)


def minus_bound(
    networks: Networks, at: DrawAndNoise, table: Array, present: Array, noise: float
) -> Array:
    """Return minus the evidence bound () of one draw (equation 8).

    ``table`` has the blocks' entries and ``present`` says which are no padding, both (blocks,
    largest). Without an encoder the shared latents are the normals that the draw is made of.
    """
    z_G, kl_global = at.eps_G, jnp.zeros(())
    if networks.encoder is not None:
        mean, log_variance = networks.encode(at.theta, at.phi)
        z_G = mean + jnp.exp(0.5 * log_variance) * at.eps_G
        kl_global = _kl(mean, log_variance)
    blocks = jnp.arange(len(table))

    def decode(block: Array, eps: Array) -> tuple[Array, Array]:
        mean, log_variance = networks.encode_local(block, z_G, at.phi)
        z_L = mean + jnp.exp(0.5 * log_variance) * eps
        return networks.decode(block, z_G, z_L, at.phi), _kl(mean, log_variance)

    decoded, kl_local = jax.vmap(decode)(blocks, at.eps_L)
    error = jnp.where(present, jnp.append(at.theta, 0.0)[table] - decoded, 0.0)
    log_norm = present.sum() * jnp.log(noise * jnp.sqrt(2 * jnp.pi))
    return 0.5 * jnp.sum((error / noise) ** 2) + log_norm + kl_global + kl_local.sum()


def _kl(mean: Array, log_variance: Array) -> Array:
    """Return the KL divergence () of a diagonal normal from the standard one."""
    return 0.5 * jnp.sum(mean**2 + jnp.exp(log_variance) - 1 - log_variance)


def training_draws(true_prior: TruePrior, scales: Scales, settings: Training, key: Array) -> Draws:
    """Return a step's hyperparameters (batch, hyper) and draws (batch, entries), standardised."""
    # Several draws share hyperparameters, since a covariance's Cholesky factor costs more than the
    # draws from it; it is computed once for each phi.
    n, each = settings.batch_size, settings.draws_per_phi
    phi, theta, noise = true_prior.draw(key, -(-n // each), each)
    parts = jax.vmap(scales.standardised)(theta, phi), noise
    phi = jnp.repeat(jax.vmap(scales.ranks)(phi), each, 0)[:n]
    theta, noise = jax.tree.map(lambda a: a.reshape(-1, true_prior.size)[:n], parts)
    return phi, theta, noise


def weights_of(networks: Networks) -> list[Array]:
    """Return the arrays that are trained; other leaves, such as activations, are not."""
    return [a for a in jax.tree.leaves(networks) if hasattr(a, "dtype")]


def with_weights(networks: Networks, weights: Iterable[Array]) -> Networks:
    """Return the networks with other arrays."""
    rest = iter(weights)
    return jax.tree.map(lambda a: next(rest) if hasattr(a, "dtype") else a, networks)


def train(
    key: Array,
    networks: Networks,
    true_prior: TruePrior,
    blocks: Blocks,
    scales: Scales,
    settings: Training,
    optim: optax.GradientTransformation,
    progress_bar: bool,
) -> tuple[Networks, np.ndarray, dict[str, float]]:
    """Return the trained networks, the losses (steps,), and the times that the training took."""
    table = jnp.asarray(blocks.table)
    present = table < blocks.size
    sizes = networks.sizes

    def loss(weights: list[Array], batch: DrawAndNoise) -> Array:
        at, noise = with_weights(networks, weights), settings.noise
        bound = partial(minus_bound, at, table=table, present=present, noise=noise)
        return jax.vmap(bound)(batch).mean()

    def step(carry: Trained, key: Array) -> tuple[Trained, Array]:
        weights, opt_state = carry
        for_draws, for_G, for_L = jax.random.split(key, 3)
        phi, theta, eps_G = training_draws(true_prior, scales, settings, for_draws)
        if eps_G is None or networks.encoder is not None:
            eps_G = jax.random.normal(for_G, (len(theta), sizes.z_global))
        eps_L = jax.random.normal(for_L, (len(theta), blocks.number, sizes.z_local))
        value, gradient = jax.value_and_grad(loss)(weights, DrawAndNoise(theta, phi, eps_G, eps_L))
        updates, opt_state = optim.update(gradient, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), value

    @partial(jax.jit, static_argnums=2)
    def advance(carry: Trained, first: Array, number: int) -> tuple[Trained, Array]:
        # Keys by the number of the step: the training does not depend on the size of a chunk.
        keys = jax.vmap(partial(jax.random.fold_in, key))(first + jnp.arange(number))
        return jax.lax.scan(step, carry, keys)

    weights = weights_of(networks)
    carry: Trained = (weights, optim.init(weights))
    losses: list[np.ndarray] = []
    began = compiled = time.perf_counter()
    with tqdm(total=settings.num_steps, disable=not progress_bar, desc="SIGMA prior") as bar:
        while (done := sum(map(len, losses))) < settings.num_steps:
            number = min(CHUNK, settings.num_steps - done)
            carry, values = advance(carry, jnp.asarray(done), number)
            losses.append(np.asarray(values))
            if done == 0:
                # The first chunk compiles; the time of a step is that of all later ones.
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
    timed = settings.num_steps - len(losses[0])
    step_time = (time.perf_counter() - compiled) / timed if timed else float("nan")
    times = {
        "seconds": seconds,
        "step": step_time,
        "drawing": _drawing_share(key, true_prior, scales, settings, step_time),
    }
    return with_weights(networks, carry[0]), np.concatenate(losses), times


def _drawing_share(
    key: Array, true_prior: TruePrior, scales: Scales, settings: Training, step: float
) -> float:
    """Return the share of drawing in the seconds of a step; NaN if these are NaN."""
    if not np.isfinite(step):
        return float("nan")
    keys = jax.random.split(key, TIMED)
    draws = jax.jit(partial(jax.lax.map, partial(training_draws, true_prior, scales, settings)))
    jax.block_until_ready(draws(keys))
    began = time.perf_counter()
    jax.block_until_ready(draws(keys))
    return (time.perf_counter() - began) / TIMED / step


# The hyperparameters at which priors are compared, as quantiles of the training's: a learnt prior
# is best in the middle of their range and worst near its ends (docs/results/sigma.md).
QUANTILES = 0.1, 0.5, 0.9
# Draws of each prior in the energy distance. Its time grows with their square.
COMPARED = 300
# Permutations for its p-value, which is at least 1 / 201 with so many.
PERMUTATIONS = 200


class CheckRow(NamedTuple):
    """The comparison at one setting of the hyperparameters.

    Attributes
    ----------
    phi : dict
        The hyperparameters.
    within, across : float
        Mean absolute difference of covariances, over pairs of entries in one block and in two, in
        units of the site's mean variance.
    variance : float
        Mean ratio of marginal variances to the true ones.
    jump : float
        Ratio of mean variances of the differences between neighbouring entries in two blocks.
    energy, p_value : float
        Energy distance of draws (Szekely and Rizzo 2013) and its permutation p-value.
    """

    phi: dict[str, Any]
    within: float
    across: float
    variance: float
    jump: float
    energy: float
    p_value: float


class PriorCheck(NamedTuple):
    """The comparison of a learnt prior with the true one, at several hyperparameters.

    Attributes
    ----------
    rows : tuple of CheckRow
    draws : tuple of arrays (draws, entries)
        Draws of the learnt prior, for each row.
    true, found : tuple of arrays (entries, entries)
        Covariances of the true and of the learnt prior, for each row.
    """

    rows: tuple[CheckRow, ...]
    draws: tuple[np.ndarray, ...]
    true: tuple[np.ndarray, ...]
    found: tuple[np.ndarray, ...]

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the table: names of columns, and a row for each setting of the hyperparameters."""
        head = ("hyperparameters", "within", "across", "variance", "jump", "energy", "p")
        at = [
            ", ".join(f"{name}={float(np.mean(v)):.3g}" for name, v in row.phi.items())
            for row in self.rows
        ]
        numbers = [[f"{x:.3f}" for x in row[1:]] for row in self.rows]
        return [head, *((phi, *row) for phi, row in zip(at, numbers, strict=True))]

    def __str__(self) -> str:
        line = "{:28} {:>8} {:>8} {:>9} {:>7} {:>8} {:>6}"
        return "\n".join(line.format(phi[:28], *row) for phi, *row in self._cells())

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        return display.html_table(head, lines)


def compare_draws(
    key: Array,
    true_prior: TruePrior,
    sample: Callable[[Array, int, Mapping[str, Any]], Array],
    block_of: np.ndarray,
    at: Sequence[Mapping[str, Any]] | None,
    num_draws: int,
) -> PriorCheck:
    """Return the comparison of a learnt prior, ``sample(key, n, phi)``, with the true one."""
    if at is None:
        drawn = jax.vmap(true_prior.draw_phi)(jax.random.split(key, 1_000))
        at = [
            {name: np.quantile(np.asarray(v), q, axis=0) for name, v in drawn.items()}
            for q in (QUANTILES if drawn else QUANTILES[:1])
        ]
    compared = []
    apart = block_of[:, None] != block_of
    for i, phi in enumerate(at):
        for_learnt, for_true, for_test = jax.random.split(jax.random.fold_in(key, i), 3)
        learnt = np.asarray(sample(for_learnt, num_draws, phi))
        true_draws = np.asarray(true_prior.draws_with_noise(for_true, phi, num_draws)[1])
        cov = np.cov(learnt.T)
        try:
            known = field_of(true_prior.distribution(phi), true_prior.site, true_prior.spectrum)
        except ModelError:  # no Gaussian: by its draws
            true = np.cov(true_draws.T)
        else:
            true = (
                np.asarray(known.cov, float)
                if isinstance(known, DenseField)
                else (known.vectors * np.asarray(known.variances)) @ known.vectors.T
            )
        unit = np.diagonal(true).mean()
        error = abs(cov - true) / unit
        borders = np.flatnonzero(block_of[1:] != block_of[:-1])
        # Var(a - b) of neighbours in two blocks: the variance of the jump of draws at borders.
        jumps = [
            c[borders, borders] + c[borders + 1, borders + 1] - 2 * c[borders, borders + 1]
            for c in (cov, true)
        ]
        energy, p_value = energy_test(for_test, learnt[:COMPARED], true_draws[:COMPARED])
        compared.append(
            (
                CheckRow(
                    dict(phi),
                    float(error[~apart].mean()),
                    float(error[apart].mean()) if apart.any() else 0.0,
                    float((np.diagonal(cov) / np.diagonal(true)).mean()),
                    float(jumps[0].mean() / jumps[1].mean()) if len(borders) else 1.0,
                    energy,
                    p_value,
                ),
                learnt,
                true,
                cov,
            )
        )
    rows, draws, true_covs, covs = zip(*compared, strict=True)
    return PriorCheck(rows, draws, true_covs, covs)


def energy_test(key: Array, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the energy distance of two samples (draws, entries), and its permutation p-value."""
    both = np.concatenate([a, b]).astype(float)
    squares = (both**2).sum(1)
    # Differences of squares may be negative by rounding.
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * both @ both.T, 0))
    sign = np.repeat([1.0 / len(a), -1.0 / len(b)], [len(a), len(b)])

    # 2 E|X - Y| - E|X - X'| - E|Y - Y'| as one quadratic form: a permutation only changes signs.
    def energy(order: np.ndarray) -> float:
        s = sign[order]
        return float(-s @ distances @ s)

    observed = energy(np.arange(len(both)))
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    permuted = [energy(rng.permutation(len(both))) for _ in range(PERMUTATIONS)]
    return observed, float((1 + np.sum(np.array(permuted) >= observed)) / (1 + PERMUTATIONS))
