"""The reference: NUTS on the exact joint log density of all silos' rows.

The density is evaluated bucket by bucket, vectorised over silos, as in federated runs. Positions
hold the real rows of all silos in one array for each plate; indices distribute them over the
buckets' padded silos.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS

from numpyro_fed.basics.errors import ConvergenceWarning, ModelError, positive_int
from numpyro_fed.basics.programs import is_double
from numpyro_fed.data.padding import Bucket, grouped, stacked
from numpyro_fed.data.silo_data import SiloData, SilosInput, Sizes, read_all, signature
from numpyro_fed.numerics.gaussian import identity
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.sampler import draw_keys
from numpyro_fed.reference.nuts_result import NutsResult, PooledRun, join_chains
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.mode import Mode
from numpyro_fed.text.handlers import local_name
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import facts_of
from numpyro_fed.text.site_table import Rows
from numpyro_fed.weigh.element_errors import Rounding

# Samples of each chain from which run_nuts warns by itself: shorter runs are trials, which would
# always be warned of.
MIN_SAMPLES = 500


TRIES = 100  # draws of a chain's start, as many as in NumPyro's find_valid_initial_params

Position = dict[str, Any]  # {"z_G": (dim,), "z_L": {plate: (rows of all silos, dim)}}
Shapes = Mapping[str, tuple[int, ...] | Mapping[str, tuple[int, ...]]]


def run_nuts(
    key: Array,
    model: Callable[..., object],
    silos: SilosInput,
    *,
    num_warmup: int = 1_000,
    num_samples: int = 1_000,
    num_chains: int = 1,
    params: Result | None = None,
    start: Mode | None = None,
    target_accept_prob: float = 0.8,
    progress_bar: bool = True,
) -> NutsResult:
    """Run NumPyro's NUTS on the joint density of all silos, for comparison if data may be pooled.

    The density is the one that federated methods use, vectorised over silos. Its program does not
    grow with their number, as that of :func:`numpyro_fed.handlers.joint` does.

    Parameters
    ----------
    key : jax.Array
    model : callable
        A model with :class:`~numpyro_fed.silo_plate`.
    silos : list of dict
        The data of each silo.
    num_warmup, num_samples, num_chains : int
        Steps of warm-up and samples of each chain, and the number of chains, which run side by
        side. With several chains every other one starts at a draw from the prior, so that they can
        disagree if the posterior has several modes.
    params : Result, optional
        A fit whose values of every ``numpyro.param`` are used. Without it they keep their initial
        values, as in NumPyro.
    start : Mode, optional
        From :func:`numpyro_fed.find_mode`: the globals start at draws from the normal distribution
        there, and NUTS moves in coordinates in which that is standard. On unscaled data the usual
        starts, in (-2, 2) unconstrained, may be too far off, and a diagonal mass matrix may not
        do.
    target_accept_prob : float
    progress_bar : bool
        NumPyro's progress bar, and whether questions to the result that take long show it.

    Returns
    -------
    NutsResult

    Warns
    -----
    ConvergenceWarning
        If the draws cannot serve as a reference (:meth:`NutsResult.report`).

    Raises
    ------
    ModelError
        If density or gradient are not finite at a hundred random starts, with the sites at fault.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0, 5.0]))]
    >>> nuts = nf.run_nuts(jax.random.key(0), model, silos, num_warmup=200, num_samples=500,
    ...                    progress_bar=False)
    >>> nuts.samples["mu"].shape
    (500,)
    """
    for name, value in (("num_samples", num_samples), ("num_chains", num_chains)):
        positive_int(name, value)
    read = read_all(silos, model)
    if params is not None and params.num_silos != len(read):
        raise ValueError(
            f"params comes from a fit of {params.num_silos} silos, but there are {len(read)} here. "
            "Pass the silos that it was fitted to."
        )
    layout, buckets = layout_and_buckets(model, read)
    fm, sizes = layout.model, layout.sizes
    shared, private = _parameters(fm, read, params)
    key_init, key_run = jax.random.split(key)
    rows = {p.name: sum(size[p.name] for size in sizes) for p in fm.plates}
    of_plates = {p.name: (num_chains, rows[p.name], p.dim) for p in fm.plates}
    shapes: Shapes = {"z_G": (num_chains, fm.dim), "z_L": of_plates}
    if start is not None:
        # The covariance has shared parameters first; the globals are its last coordinates. The
        # log-determinant of L is constant and left out.
        L = jnp.asarray(np.linalg.cholesky(start.covariance[-fm.dim :, -fm.dim :]))
        centre = jnp.asarray(start.z_G)

    def to_globals(z: Array) -> Array:
        return z if start is None else centre + z @ L.T

    log_density = _joint_density(fm, sizes, buckets, shared, private, to_globals)

    def draw(key: Array) -> Position:
        position = uniform(key, shapes)
        if start is not None:
            position["z_G"] = jax.random.normal(key, position["z_G"].shape)
        return position

    first = good_starts(key_init, draw, fm, log_density)
    # With a mode given, all chains explore that mode.
    if start is None and num_chains > 1:
        first = some_from_prior(key_init, fm, log_density, first)
    kernel = NUTS(
        potential_fn=lambda position: -log_density(position), target_accept_prob=target_accept_prob
    )
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    # NumPyro takes the start of a single chain without an axis of chains.
    init = first if num_chains > 1 else jax.tree.map(lambda a: a[0], first)
    mcmc.run(key_run, init_params=init, extra_fields=("diverging",))
    divergences = mcmc.get_extra_fields()["diverging"].sum()
    draws = mcmc.get_samples(group_by_chain=True)
    draws = {**draws, "z_G": to_globals(draws["z_G"])}
    constrain = jax.jit(jax.vmap(jax.vmap(fm.constrain_global, (None, 0)), (None, 0)))
    globals_ = {k: np.asarray(v) for k, v in constrain(shared, draws["z_G"]).items()}

    z_G, rounded = join_chains(np.asarray(draws["z_G"])), ""
    if z_G.size:
        exact = z_G.astype(np.float64)
        rounding = Rounding(str(z_G.dtype), exact.mean(0), exact.std(0), 0.0)
        if not rounding.fine:
            rounded = f"{rounding.words(fm.named('latent'))} ({rounding.remedy})"
    run = PooledRun(
        model=fm,
        facts=facts_of(fm, read[0], sizes[0]),
        double=is_double(),
        _silos=Silos(tuple(read), tuple(buckets), (), read.names),
        shared=Shared(shared, {}, identity((fm.dim,))),
        private=private,
        z_G=z_G,
    )
    thetas = [{**shared, **theta} for theta in private]
    local_sites = cache(partial(_local_sites, fm, read, sizes, draws, thetas))
    result = NutsResult(
        globals_, int(divergences), local_sites, rounded, run, shows_progress=progress_bar
    )
    if num_samples >= MIN_SAMPLES and not result.accurate:
        warnings.warn(f"NUTS: {result.report()}", category=ConvergenceWarning, stacklevel=2)
    return result


def uniform(key: Array, shapes: Shapes) -> Position:
    """Return starts with coordinates uniform in (-2, 2), as NumPyro's ``init_to_uniform``."""
    # Not zeros: at effects of zero the density of their scale rises towards the funnel's neck.
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.uniform(k, s, minval=-2, maxval=2) for k, s in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, draws)


def good_starts(
    key: Array,
    draw: Callable[[Array], Position],
    fm: FederatedModel,
    log_density: Callable[[Position], Array],
) -> Position:
    """Return starts of all chains with finite log density and gradient, leaves (chains, ...).

    ``draw(key)`` returns starts of all chains. A density can be finite where its gradient is not:
    ``sqrt(exp(-x**2))`` underflows to zero far out, where the derivative of the root is infinite,
    and a chain that starts there never moves.
    """
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    start = draw(key)
    for i in range(1, TRIES):
        if (finite := _finite(*value_and_grad(start))).all():
            return start
        start = jax.tree.map(
            lambda old, new, finite=finite: jnp.where(
                finite.reshape(-1, *[1] * (old.ndim - 1)), old, new
            ),
            start,
            draw(jax.random.fold_in(key, i)),
        )
    value, gradient = value_and_grad(start)
    if (finite := _finite(value, gradient)).all():
        return start
    chain, advice = int(np.argmin(finite)), "Look at the data and the supports of the sites"
    if not np.isfinite(value[chain]):
        raise ModelError(
            "the joint log density is not finite at a random start in unconstrained space, nor at "
            f"{TRIES - 1} others: it is {float(value[chain]):g} at the last. {advice}."
        )
    bad = {"": ~np.isfinite(gradient["z_G"][chain])}
    bad |= {p: ~np.isfinite(g[chain]).all(0) for p, g in gradient["z_L"].items()}
    names = [
        f"'{site.name}'"
        for site in fm.sites
        if site.kind == "latent" and bad[site.plate or ""][site.start : site.stop].any()
    ]
    raise ModelError(
        "the joint log density is finite at a random start in unconstrained space, but its "
        f"gradient is not, for {', '.join(names)}, nor is it at {TRIES - 1} others: no chain could "
        "move. The text may take a root or a logarithm of what underflows to zero; write it on the "
        f"log scale, or add a small number before the root. {advice}."
    )


def some_from_prior(
    key: Array, fm: FederatedModel, log_density: Callable[[Position], Array], start: Position
) -> Position:
    """Return the starts, with the globals of every other chain drawn from the prior.

    Starts that are all near zero may be in one mode, and chains could not disagree. A start stays
    as it is if the prior cannot be sampled, or if density or gradient at its draw are not finite.
    """
    chains = len(start["z_G"])
    prior_draws = fm.draw_prior(jax.random.fold_in(key, 1), chains)
    if prior_draws is None:
        return start
    value_and_grad = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    finite = _finite(*value_and_grad({**start, "z_G": prior_draws}))
    chosen = (jnp.arange(chains) % 2 == 1) & finite
    return {**start, "z_G": jnp.where(chosen[:, None], prior_draws, start["z_G"])}


def _finite(value: Array, gradient: Position) -> Array:
    """Return for each chain whether its density and all derivatives are finite, bool (chains,)."""
    leaves = [jnp.isfinite(a).reshape(len(value), -1).all(1) for a in jax.tree.leaves(gradient)]
    return jnp.stack([jnp.isfinite(value), *leaves]).all(0)


def _parameters(
    fm: FederatedModel, silos: Sequence[SiloData], result: Result | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the shared parameters, and each silo's private ones, unconstrained."""
    if result is not None:
        private = [result.private_parameters(j) for j in range(len(silos))]
        return result.shared.theta, private
    key = jax.random.key(0)
    init_private = jax.jit(fm.init_private)
    return fm.init_theta(key), [init_private(key, silo) for silo in silos]


def _joint_density(
    fm: FederatedModel,
    sizes: Sequence[Sizes],
    buckets: Sequence[Bucket],
    shared: dict[str, Any],
    private: Sequence[dict[str, Any]],
    to_globals: Callable[[Array], Array] | None = None,
) -> Callable[[Position], Array]:
    """Return the log density of positions, which hold the real rows of all silos in their order."""
    offsets = _offsets(sizes)
    indices: list[dict[str, Any]] = []
    data, thetas = [], []
    init_private = jax.jit(jax.vmap(fm.init_private, (None, 0)))

    def fill(room: Array, *parts: Array) -> Array:
        """Return private parameters stacked, each in the leading part of a padded array."""
        filled = np.array(room)
        for i, part in enumerate(parts):
            filled[i, ...][tuple(slice(n) for n in part.shape)] = part
        return jnp.asarray(filled)

    for b in buckets:
        padded = fm.sizes(jax.tree.map(lambda a: a[0], b.data))
        # A padded row reads the latents of its silo's last real row; its terms are masked.
        indices.append(
            {
                p: np.stack(
                    [
                        offsets[p][j] + np.minimum(np.arange(width), size[p] - 1)
                        for j, size in zip(b.silos, b.sizes, strict=True)
                    ]
                )
                for p, width in padded.items()
            }
        )
        data.append(jax.tree.map(jnp.asarray, b.data))
        init = init_private(jax.random.key(0), data[-1])
        thetas.append(jax.tree.map(fill, init, *(private[j] for j in b.silos)))

    def log_density(position: Position) -> Array:
        z_G, z_L = position["z_G"], position["z_L"]
        if to_globals is not None:
            z_G = to_globals(z_G)

        def log_silo(theta: dict[str, Any], index: dict[str, Any], silo: SiloData) -> Array:
            rows = fm.log_silo(
                {**shared, **theta}, z_G, {p: z_L[p][i] for p, i in index.items()}, silo
            )
            return sum((v.sum() for v in rows.values()), jnp.zeros(()))

        total = fm.log_prior(shared, z_G)
        for theta, index, silo in zip(thetas, indices, data, strict=True):
            total += jax.vmap(log_silo)(theta, index, silo).sum()
        return total

    return log_density


def _local_sites(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    draws: Position,
    thetas: Sequence[dict[str, Any]],
) -> dict[str, np.ndarray]:
    """Return the local sites on their own supports, {``silo_{j}/site``: (draws, ...)}."""
    # Silos of one shape are computed side by side, unpadded: nothing has to be cut off.
    offsets, draws = _offsets(sizes), jax.tree.map(join_chains, draws)
    # Discrete latents are drawn given all others, by keys of each silo.
    number = len(draws["z_G"]) if fm.discrete else 0
    keys = [draw_keys(jax.random.key(j), number) for j in range(len(silos) if number else 0)]
    of_draws = jax.vmap(fm.constrain_local, (None, 0, 0, None, 0 if fm.discrete else None))
    constrain = jax.jit(jax.vmap(of_draws, (0, None, 0, 0, 0 if fm.discrete else None)))
    sites: dict[str, np.ndarray] = {}
    for group in grouped(range(len(silos)), lambda j: (signature(silos[j]), *sizes[j].items())):
        z_L: Rows = {
            p: jnp.stack([draws["z_L"][p][:, offsets[p][j] : offsets[p][j] + n] for j in group])
            for p, n in sizes[group[0]].items()
        }
        theta, data = (stacked([x[j] for j in group]) for x in (thetas, silos))
        own = jnp.stack([keys[j] for j in group]) if fm.discrete else None
        values = jax.tree.map(np.asarray, constrain(theta, draws["z_G"], z_L, data, own))
        sites |= {local_name(j, k): v[i] for i, j in enumerate(group) for k, v in values.items()}
    return sites


def _offsets(sizes: Sequence[Sizes]) -> dict[str, np.ndarray]:
    """Return the index of each silo's first row among the rows of all silos, by plate."""
    return {p: np.cumsum([0, *(size[p] for size in sizes)]).astype(int) for p in sizes[0]}
