"""The reference: NUTS on the exact joint log density of all silos' rows.

The density is evaluated bucket by bucket, vectorised over silos, as in federated runs. Positions
hold the real rows of all silos in one array for each plate; indices distribute them over the
buckets' padded silos.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS

from numpyro_fed.algorithms.base import Shared
from numpyro_fed.errors import ConvergenceWarning, positive_int
from numpyro_fed.frame import identity
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData, SiloInput, Sizes, signature
from numpyro_fed.model.facts import facts_of
from numpyro_fed.model.handlers import local_name
from numpyro_fed.model.hosts import read_all
from numpyro_fed.model.layout import lay_out
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.padding import Bucket, grouped, stacked
from numpyro_fed.model.sites import Site
from numpyro_fed.precision import is_double
from numpyro_fed.reference.nuts_result import NutsResult, PooledFit, PooledRun, join_chains
from numpyro_fed.reference.starts import Position, Shapes, good_starts, some_from_prior, uniform
from numpyro_fed.results.rounding import Rounding
from numpyro_fed.results.rows import Result
from numpyro_fed.trees import Tree

# Samples of each chain from which run_nuts warns by itself: shorter runs are trials, which would
# always be warned of.
MIN_SAMPLES = 500


class StartingPoint(Protocol):
    """A point with a covariance, at which globals can start: a :class:`numpyro_fed.Mode`."""

    z_G: np.ndarray

    @property
    def covariance(self) -> np.ndarray:
        """Return the covariance of shared parameters and globals."""


def run_nuts(
    key: Array,
    model: Callable[..., object],
    silos: Sequence[SiloInput],
    *,
    num_warmup: int = 1_000,
    num_samples: int = 1_000,
    num_chains: int = 1,
    params: Result | None = None,
    start: StartingPoint | None = None,
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
        NumPyro's progress bar.

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
        If density or gradient are not finite at any of a hundred random starts, with the sites
        whose gradient is not.

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
    layout, buckets = lay_out(model, read)
    fm, sizes = layout.model, layout.sizes
    shared, private = _parameters(fm, read, params)
    log_density = _joint_density(fm, sizes, buckets, shared, private)
    key_init, key_run = jax.random.split(key)
    totals = {p.name: sum(size[p.name] for size in sizes) for p in fm.plates}
    shapes: Shapes = {
        "z_G": (num_chains, fm.dim),
        "z_L": {p.name: (num_chains, totals[p.name], p.dim) for p in fm.plates},
    }
    to_globals: Callable[[Array], Array] | None = None
    if start is not None:
        to_globals, log_density = _whitened(start, fm.dim, log_density)

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
    if to_globals is not None:
        draws = {**draws, "z_G": to_globals(draws["z_G"])}
    constrain = jax.jit(jax.vmap(jax.vmap(fm.constrain_global, (None, 0)), (None, 0)))
    globals_ = {k: np.asarray(v) for k, v in constrain(shared, draws["z_G"]).items()}

    @cache
    def local_sites() -> dict[str, np.ndarray]:
        flat = jax.tree.map(join_chains, draws)
        return _local_sites(fm, read, sizes, flat, [{**shared, **theta} for theta in private])

    words = _rounded(join_chains(np.asarray(draws["z_G"])), fm.named("latent"))
    shared_part = Shared(shared, {}, identity((fm.dim,)))
    run = PooledRun(
        PooledFit(fm, facts_of(fm, read[0], sizes[0]), is_double()),
        read,
        sizes,
        buckets,
        shared_part,
        private,
        join_chains(np.asarray(draws["z_G"])),
    )
    result = NutsResult(globals_, int(divergences), local_sites, words, run)
    if num_samples >= MIN_SAMPLES and not result.accurate:
        warnings.warn(f"NUTS: {result.report()}", category=ConvergenceWarning, stacklevel=2)
    return result


def _rounded(z_G: np.ndarray, latents: Sequence[Site]) -> str:
    """Return why draws (n, dim) are too coarse in their precision, in words; empty if not."""
    if not z_G.size:
        return ""
    exact = z_G.astype(np.float64)
    rounding = Rounding(str(z_G.dtype), exact.mean(0), exact.std(0), 0.0)
    return "" if rounding.fine else f"{rounding.words(latents)} ({rounding.remedy})"


def _whitened(
    start: StartingPoint, dim: int, log_density: Callable[[Position], Array]
) -> tuple[Callable[[Array], Array], Callable[[Position], Array]]:
    """Return ``u -> z_G = m + L u``, and the log density of ``u`` and locals, up to a constant."""
    # The covariance has shared parameters first; the globals are its last coordinates. The
    # log-determinant of L is constant and left out.
    L = jnp.asarray(np.linalg.cholesky(start.covariance[-dim:, -dim:]))
    centre = jnp.asarray(start.z_G)

    def to_globals(u: Array) -> Array:
        return centre + u @ L.T

    def log_density_of_u(position: Position) -> Array:
        return log_density({**position, "z_G": to_globals(position["z_G"])})

    return to_globals, log_density_of_u


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
) -> Callable[[Position], Array]:
    """Return the log density of positions, which hold the real rows of all silos in their order."""
    offsets = _offsets(sizes)
    indices: list[dict[str, Any]] = []
    data, thetas = [], []
    init_private = jax.jit(jax.vmap(fm.init_private, (None, 0)))
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
        thetas.append(_fill(init, [private[j] for j in b.silos]))

    def log_density(position: Position) -> Array:
        z_G, z_L = position["z_G"], position["z_L"]

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


def _fill(padded: Tree, values: Sequence[Tree]) -> Tree:
    """Return the silos' private parameters stacked, each in the leading part of a padded array."""

    def fill(room: Array, *parts: Array) -> Array:
        filled = np.array(room)
        for i, part in enumerate(parts):
            filled[i, ...][tuple(slice(n) for n in part.shape)] = part
        return jnp.asarray(filled)

    return jax.tree.map(fill, padded, *values)


def _local_sites(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    draws: Position,
    thetas: Sequence[dict[str, Any]],
) -> dict[str, np.ndarray]:
    """Return the local sites on their own supports, {``silo_{j}/site``: (draws, ...)}."""
    # Silos of one shape are computed side by side, unpadded: nothing has to be cut off.
    offsets = _offsets(sizes)
    constrain = jax.jit(jax.vmap(jax.vmap(fm.constrain_local, (None, 0, 0, None)), (0, None, 0, 0)))
    sites: dict[str, np.ndarray] = {}
    for group in grouped(range(len(silos)), lambda j: (signature(silos[j]), *sizes[j].items())):
        z_L: Rows = {
            p: jnp.stack([draws["z_L"][p][:, offsets[p][j] : offsets[p][j] + n] for j in group])
            for p, n in sizes[group[0]].items()
        }
        theta, data = (stacked([x[j] for j in group]) for x in (thetas, silos))
        values = jax.tree.map(np.asarray, constrain(theta, draws["z_G"], z_L, data))
        sites |= {local_name(j, k): v[i] for i, j in enumerate(group) for k, v in values.items()}
    return sites


def _offsets(sizes: Sequence[Sizes]) -> dict[str, np.ndarray]:
    """Return the index of each silo's first row among the rows of all silos, by plate."""
    return {p: np.cumsum([0, *(size[p] for size in sizes)]).astype(int) for p in sizes[0]}
