"""The reference: NUTS on the exact joint log density of all silos' rows.

The density is evaluated bucket by bucket, vectorised over silos, as in federated runs. Positions
hold the real rows of all silos in one array for each plate; indices distribute them over the
buckets' padded silos.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_fed import html
from numpyro_fed.after.base import AfterFit
from numpyro_fed.after.run import WhichSilo, chosen_silos
from numpyro_fed.algorithms.base import Shared
from numpyro_fed.errors import ConvergenceWarning, DataError, ModelError, positive_int
from numpyro_fed.frame import identity
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData, SiloInput, Sizes, signature
from numpyro_fed.model.facts import Facts, facts_of
from numpyro_fed.model.handlers import local_name
from numpyro_fed.model.hosts import read_all
from numpyro_fed.model.layout import lay_out
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.padding import Bucket, grouped, stacked
from numpyro_fed.model.sites import Site
from numpyro_fed.precision import is_double
from numpyro_fed.reference.starts import Position, Shapes, good_starts, some_from_prior, uniform
from numpyro_fed.results.arviz import chains_to_arviz, to_arviz
from numpyro_fed.results.rounding import Rounding
from numpyro_fed.results.rows import Result
from numpyro_fed.trees import Tree

Draws = TypeVar("Draws", np.ndarray, Array)
Made = TypeVar("Made")

# Samples of each chain from which run_nuts warns by itself: shorter runs are trials, which would
# always be warned of.
MIN_SAMPLES = 500
# Largest split R-hat of chains that agree. The usual bounds are 1.01 and 1.1 (Vehtari et al. 2021;
# Gelman, Rubin 1992). The error below is the stricter test of chains that agree.
MAX_RHAT = 1.05
# Largest standard error of a mean or sd, in posterior sds: that of 400 effective draws.
MAX_ERROR = 0.05
# Largest share of divergent transitions. Single ones occur in sound runs; one in 200 and more show
# a region that the chains do not enter.
MAX_DIVERGENT = 0.005
# A spread below this share of the mean is rounding: such elements are constants, as the first row
# of a Cholesky factor is.
ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class PooledFit:
    """The model of a pooled run, with what was compiled for it."""

    model: FederatedModel
    facts: Facts
    double: bool
    compiled: dict[Hashable, Any] = field(default_factory=dict)

    def cached(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return the object of this name, made at its first use."""
        if name not in self.compiled:
            self.compiled[name] = make()
        made: Made = self.compiled[name]
        return made


@dataclass(frozen=True, eq=False)
class PooledRun:
    """The data and parameters of a pooled run, as questions after a fit ask for them."""

    _fit: PooledFit
    silos: Sequence[SiloData]
    sizes: Sequence[Sizes]
    buckets: Sequence[Bucket]
    shared: Shared
    private: Sequence[dict[str, Any]]

    @property
    def num_silos(self) -> int:
        """Return the number of silos."""
        return len(self.silos)

    def place(self, silo: int) -> int:
        """Return a silo's number; raise an error if there is none."""
        if not 0 <= silo < self.num_silos:
            raise IndexError(
                f"there is no silo {silo}: they are numbered 0 to {self.num_silos - 1}."
            )
        return silo

    @property
    def data_here(self) -> Sequence[SiloData]:
        """Return the data of all silos."""
        return self.silos

    def data_of(self, silo: int) -> SiloData:
        """Return a silo's data."""
        return self.silos[self.place(silo)]

    def sizes_of(self, silo: int) -> Sizes:
        """Return the rows of each plate at a silo."""
        return self.sizes[self.place(silo)]

    def bucket_of(self, silo: int) -> Bucket:
        """Return the silos that were padded to one shape with a silo."""
        return next(b for b in self.buckets if self.place(silo) in b.silos)

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters on their supports."""
        return self._fit.model.constrain_theta(self.private[self.place(silo)])


@dataclass(frozen=True, eq=False)
class NutsResult(AfterFit):
    """The draws of NUTS from the joint posterior of all silos.

    Attributes
    ----------
    globals : dict of str to array (num_chains, num_samples, ...)
        Global latent and deterministic sites on their own supports.
    divergences : int
        Divergent transitions after warm-up.
    """

    globals: dict[str, np.ndarray] = field(repr=False)
    divergences: int
    _locals: Callable[[], dict[str, np.ndarray]] = field(repr=False)
    _rounded: str = field(default="", repr=False)  # why the precision does not hold the posterior
    _run: PooledRun | None = field(default=None, repr=False)

    @property
    def run_behind(self) -> PooledRun:
        """Return the data and parameters of the run."""
        if self._run is None:
            raise DataError("these draws have no data with them.")
        return self._run

    @property
    def correction_behind(self) -> str:
        """Return why there are no weighted draws."""
        return "NUTS keeps no log likelihoods of silos: ask a fit of nf.fit for it"

    @property
    def silos(self) -> Any:
        """Refuse to tell the influence of silos, which is known of fits alone."""
        raise ModelError(f"the influence of silos is not known: {self.correction_behind}.")

    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Return ``n`` of the draws at random; each once, as long as there are enough of them.

        With ``silo`` also that silo's latents, or those of several silos side by side, as
        :meth:`Result.sample_posterior` has them.
        """
        positive_int("n", n)
        joined = {k: _join_chains(v) for k, v in self.globals.items()}
        run = self.run_behind
        silos = [] if silo is None else [run.place(j) for j in chosen_silos(silo, run.num_silos)]
        local = [s for s in run._fit.model.sites if s.kind == "latent" and s.plate is not None]
        if silo is not None:
            samples = self.samples
            for s in local:
                parts = [samples[local_name(j, s.name)] for j in silos]
                joined[s.name] = np.concatenate(parts, 1 + (s.axis or 0))
        total = self.num_chains * max(len(v[0]) for v in self.globals.values())
        index = jax.random.choice(key, total, (n,), replace=n > total)
        return {name: jnp.asarray(value)[index] for name, value in joined.items()}

    def to_arviz(
        self, key: Array | None = None, num_samples: int = 1_000, *, silo: WhichSilo | None = None
    ) -> Any:
        """Return the draws as an ArviZ object, with their chains; with ``silo``, ``num_samples``.

        Needs the extra ``examples``.
        """
        if silo is not None:
            return to_arviz(partial(self.sample_posterior, silo=silo), key, num_samples)
        return chains_to_arviz(self.globals)

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        """Return all sites on their supports, chains joined; ``b`` of silo j is ``silo_{j}/b``."""
        joined = {k: _join_chains(v) for k, v in self.globals.items()}
        return joined | self._locals()

    @cached_property
    def monte_carlo_error(self) -> float:
        """Return the largest standard error of a global's mean or sd, in posterior sds.

        It is computed from the effective draws of each element and of its squared deviation, and of
        the logs of elements that are positive in all draws. It is infinite if chains do not agree
        (split R-hat above 1.05), and if draws are useless: if some are NaN, all are equal, every
        transition diverged, or an sd is a few gaps between floating-point numbers.
        """
        if self._unusable or self._rounded:
            return float(np.inf)
        worst = 0.0
        for draws in self.globals.values():
            flat = np.asarray(draws, np.float64).reshape(*draws.shape[:2], -1)
            # A scale shows only in its log whether the chains know the neck of a funnel: near zero
            # its own values hardly differ.
            positive = (flat > 0).all((0, 1))
            flat = np.concatenate([flat, np.log(flat[..., positive])], -1)
            mean, sd = flat.mean((0, 1)), flat.std((0, 1))
            # (x**2 - 1) / 2 of a standardised x has the standard error of log sd.
            standard = ((flat - mean) / np.where(sd > 0, sd, 1))[..., sd > ROUNDING * abs(mean)]
            for values in (standard, (standard**2 - 1) / 2):
                if not values.size:
                    continue
                ess, rhat = effective_sample_size(values), split_gelman_rubin(values)
                error = values.std((0, 1)) / np.sqrt(ess)
                worst = max(worst, np.where(rhat <= MAX_RHAT, error, np.inf).max())
        return float(worst)

    @property
    def _unusable(self) -> bool:
        """Return whether draws of globals are NaN, or do not move."""
        if not self.globals:
            return False
        draws = [np.asarray(v) for v in self.globals.values()]
        if self._diverges or any(np.isnan(v).any() for v in draws):
            return True
        return not any(_varies(v) for v in draws)

    @property
    def _diverges(self) -> bool:
        """Return whether every transition diverged."""
        return self.divergences >= self._transitions > 0

    @property
    def _transitions(self) -> int:
        """Return the number of transitions after warm-up, of all chains; 0 without globals."""
        return math.prod(next(iter(self.globals.values())).shape[:2]) if self.globals else 0

    @property
    def num_chains(self) -> int:
        """Return the number of chains."""
        return len(next(iter(self.globals.values()))) if self.globals else 1

    @property
    def accurate(self) -> bool:
        """Return whether divergences are few and Monte Carlo errors small.

        The chains then know the mode that they are in; there may be others.
        """
        total = self._transitions or 1
        return self.divergences <= MAX_DIVERGENT * total and self.monte_carlo_error <= MAX_ERROR

    @property
    def trusted(self) -> bool:
        """Return whether these draws can serve as the reference.

        They can if they are :attr:`accurate` and come from at least two chains, which agree. A
        single chain that stays in one of several modes looks accurate.
        """
        return self.accurate and self.num_chains > 1

    def report(self) -> str:
        """Say in words whether these draws can be trusted."""
        error = self.monte_carlo_error
        if self._diverges:
            known = "that is every transition, so that the draws say nothing"
        elif self._rounded:
            known = self._rounded
        elif np.isinf(error):
            known = "the chains do not agree (or stand still): run more of them, and longer"
        else:
            known = f"means and sds of the globals are known to {error:.2g} sd"
        verdict = "They can be trusted."
        if self.accurate and not self.trusted:
            verdict = (
                "They can be trusted as far as one chain can tell; num_chains=2 or more would show "
                "whether there are other modes."
            )
        elif not self.accurate:
            verdict = (
                f"They are no reference (at most {MAX_ERROR} sd and {MAX_DIVERGENT:.1%} divergent "
                "transitions are): take more num_samples, a higher target_accept_prob, or "
                "another form of the model."
            )
        return f"{self.divergences} divergent transitions; {known}. {verdict}"

    def _repr_html_(self) -> str:
        return html.words(self.report())

    def ess(self) -> dict[str, np.ndarray]:
        """Return the effective sample size of each element of global sites; NaN for constants."""
        with np.errstate(invalid="ignore"):
            return {k: np.asarray(effective_sample_size(v)) for k, v in self.globals.items()}


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
    backend: str = "numpyro",
    params: Result | None = None,
    start: StartingPoint | None = None,
    target_accept_prob: float = 0.8,
    progress_bar: bool = True,
) -> NutsResult:
    """Run NUTS on the joint density of all silos, for comparison if data may be pooled.

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
    backend : {"numpyro", "blackjax"}
        The library whose NUTS is run. BlackJAX's uses its window adaptation.
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
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {sorted(_BACKENDS)}.")
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
    to_globals: Callable[[Array], Array] = _identity
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
    draws, divergences = _BACKENDS[backend](
        key_run, log_density, first, num_warmup, num_samples, target_accept_prob, progress_bar
    )
    draws = {**draws, "z_G": to_globals(draws["z_G"])}
    constrain = jax.jit(jax.vmap(jax.vmap(fm.constrain_global, (None, 0)), (None, 0)))
    globals_ = {k: np.asarray(v) for k, v in constrain(shared, draws["z_G"]).items()}

    def local_sites() -> dict[str, np.ndarray]:
        flat = jax.tree.map(_join_chains, draws)
        return _local_sites(fm, read, sizes, flat, [{**shared, **theta} for theta in private])

    words = _rounded(_join_chains(np.asarray(draws["z_G"])), fm.named("latent"))
    shared_part = Shared(shared, {}, identity((fm.dim,)))
    run = PooledRun(
        PooledFit(fm, facts_of(fm, read[0], sizes[0]), is_double()),
        read,
        sizes,
        buckets,
        shared_part,
        private,
    )
    result = NutsResult(globals_, int(divergences), local_sites, words, run)
    if num_samples >= MIN_SAMPLES and not result.accurate:
        warnings.warn(f"NUTS: {result.report()}", category=ConvergenceWarning, stacklevel=2)
    return result


def _varies(draws: np.ndarray) -> bool:
    """Return whether any element of a site (chains, n, ...) varies by more than rounding."""
    mean, sd = draws.mean((0, 1), dtype=np.float64), draws.std((0, 1), dtype=np.float64)
    return bool((sd > ROUNDING * abs(mean)).any())


def _rounded(z_G: np.ndarray, latents: Sequence[Site]) -> str:
    """Return why draws (n, dim) are too coarse in their precision, in words; empty if not."""
    if not z_G.size:
        return ""
    exact = z_G.astype(np.float64)
    rounding = Rounding(str(z_G.dtype), exact.mean(0), exact.std(0), 0.0)
    return "" if rounding.fine else f"{rounding.words(latents)} ({rounding.remedy})"


def _identity(z_G: Array) -> Array:
    return z_G


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


def _join_chains(draws: Draws) -> Draws:
    return draws.reshape(draws.shape[0] * draws.shape[1], *draws.shape[2:])


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


def _numpyro(
    key: Array,
    log_density: Callable[[Position], Array],
    start: Position,
    num_warmup: int,
    num_samples: int,
    target_accept_prob: float,
    progress_bar: bool,
) -> tuple[Position, Array]:
    """Return draws, leaves (chains, samples, ...), and the number of divergences by NumPyro."""
    num_chains = len(start["z_G"])
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
    first = start if num_chains > 1 else jax.tree.map(lambda a: a[0], start)
    mcmc.run(key, init_params=first, extra_fields=("diverging",))
    draws = mcmc.get_samples(group_by_chain=True)
    return draws, mcmc.get_extra_fields()["diverging"].sum()


def _blackjax(
    key: Array,
    log_density: Callable[[Position], Array],
    start: Position,
    num_warmup: int,
    num_samples: int,
    target_accept_prob: float,
    progress_bar: bool,
) -> tuple[Position, Array]:
    """Return draws, leaves (chains, samples, ...), and the number of divergences by BlackJAX."""
    import blackjax  # here: its import starts JAX's backend

    def chain(key: Array, start: Position) -> tuple[Position, Array]:
        key_warmup, key_sample = jax.random.split(key)
        warmup = blackjax.window_adaptation(
            blackjax.nuts, log_density, target_acceptance_rate=target_accept_prob
        )
        (state, parameters), _ = warmup.run(key_warmup, start, num_warmup)
        kernel = blackjax.nuts(log_density, **parameters)

        def step(state: Any, key: Array) -> tuple[Any, tuple[Position, Array]]:
            state, info = kernel.step(key, state)
            return state, (state.position, info.is_divergent)

        _, draws = jax.lax.scan(step, state, jax.random.split(key_sample, num_samples))
        return draws

    keys = jax.random.split(key, len(start["z_G"]))
    draws, divergent = jax.jit(jax.vmap(chain))(keys, start)
    return draws, divergent.sum()


_BACKENDS = {"numpyro": _numpyro, "blackjax": _blackjax}
