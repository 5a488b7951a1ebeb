"""The mode of the posterior, found over silos."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round
from numpyro_fed.algorithms.mode import (
    AWAY,
    ROUNDINGS,
    Search,
    Shape,
    curvature_check,
    effects_of,
    highest,
    mode,
    unravelled,
    unraveller,
)
from numpyro_fed.algorithms.mode_wide import WideState, wide_mode
from numpyro_fed.errors import ModelError, NonFiniteError, positive_int
from numpyro_fed.model import data as silo_data
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.layout import lay_out
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.row_checks import RowChecks, coupled_rows
from numpyro_fed.programs import jit_once
from numpyro_fed.results.base import Fit
from numpyro_fed.results.built import Start
from numpyro_fed.runtime.drive import drive, failed_silos
from numpyro_fed.runtime.progress import Progress
from numpyro_fed.runtime.simulation import simulation
from numpyro_fed.runtime.stack import Batches, Runtime, State, init_schedule, on_device
from numpyro_fed.trees import drop_weak_types

MOST = {"mode": 100, "wide": 300}  # places that a start tries
SEARCHED_UP_TO = 300  # shared parameters and globals, by Newton's method
SEARCH = "search"  # under which a fit keeps its runtime
OPENING, SEARCHING = 2**31 - 2, 2**31 - 1  # in the place of a round's number, in keys
APART = 3.0  # standard deviations, from which on two modes are two
UNFELT = 1e-5  # of a coordinate's curvature: a share of the silos that is none
ALMOST = 0.5  # nats for each coordinate, about which a place may be off a mode
FALL = 0.1  # nats: a normal density has fallen by 4.5 there


MANY_EFFECTS = (
    f"above {SEARCHED_UP_TO} globals effects are not integrated out, and together with a scale "
    "that is a global, too, they have no mode"
)


class NoStartError(Exception):
    """Why a run cannot start at the mode."""

    @property
    def warning(self) -> str:
        """Return it in words, for who asked for the run."""
        return f"{self}: the run starts at zero in unconstrained space, as start=None does."


class LocalMode(NamedTuple):
    """One of several modes: where, with the negative Hessian there, and Laplace's evidence."""

    z_G: np.ndarray
    curvature: np.ndarray
    log_evidence: float


@dataclass(frozen=True, eq=False)
class Mode:
    r"""The highest point of the posterior density that was found, unconstrained.

    The density is that of the globals whose prior depends on no other; effects whose prior does (as
    ``b ~ Normal(mu, tau)`` outside of silo plates) are at their own mode given those, and
    integrated out by Laplace's method: of an effect and its scale together there may be no mode.

    Attributes
    ----------
    sites : dict
        Global latents and deterministic sites there, on their own supports.
    theta : dict
        Shared parameters there.
    z_G : (dim,) array
        The globals, unconstrained; the mode is that of their density in this space.
    curvature : (n, n) or (n,) array
        The negative Hessian of the log density there, of shared parameters and then ``z_G``; its
        diagonal alone above 300 of them.
    log_evidence : float or None
        Laplace's approximation, :math:`\ell(\hat z) + \tfrac d2 \log 2\pi - \tfrac12 \log\det A`,
        of ``d`` globals with the negative Hessian ``A`` of their log density :math:`\ell`, shared
        parameters as they are; None where a direction is open, or only a diagonal is known.
    num_exchanges : int
        Messages that each silo sent.
    converged : bool
        Whether another step of Newton's method would gain next to nothing, from a place from which
        the density falls in every direction, as one more exchange has seen.
    values : (starts,) array
        The log density at the best place of each start.
    names : tuple of str
        Of the ``n`` coordinates, such as ``"beta[1]"``.
    flat : tuple of str
        Directions in which the density does not fall: where there is no curvature, or where the
        density has hardly fallen three standard deviations away. Combinations of coordinates, such
        as ``"+0.71 beta[0] -0.71 beta[1]"``, each in units of its own curvature.
    others : tuple of LocalMode
        Other modes at which some of the starts came to rest, three standard deviations and more
        from here, by Laplace's evidence.
    """

    sites: dict[str, np.ndarray]
    theta: dict[str, Any]
    z_G: np.ndarray = field(repr=False)
    curvature: np.ndarray = field(repr=False)
    log_evidence: float | None
    num_exchanges: int
    converged: bool
    values: np.ndarray = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    flat: tuple[str, ...] = field(repr=False)
    others: tuple[LocalMode, ...] = field(default=(), repr=False)

    @cached_property
    def covariance(self) -> np.ndarray:
        """The inverse of ``curvature``, (n, n), or (n,) where that is a diagonal."""
        return 1 / self.curvature if self.curvature.ndim == 1 else np.linalg.inv(self.curvature)


def find_mode(
    key: Array,
    model: Callable[..., Any],
    silos: Sequence[Mapping[str, Any]],
    *,
    starts: int = 1,
    max_exchanges: int = 200,
    progress_bar: bool = False,
) -> Mode:
    r"""Find the mode of the globals' posterior density, each silo's own latents integrated out.

    By a damped Newton method: each silo sends its log likelihood with gradient and Hessian, its
    latents integrated by Laplace's method, and the server adds them up. Nothing has to be scaled.
    Above 300 shared parameters and globals silos send gradients, and the server takes steps of
    L-BFGS in coordinates that the Hessian's diagonal scales, which takes hundreds of exchanges.

    Parameters
    ----------
    key : jax.Array
        For the places where further starts begin.
    model, silos
        As for :class:`numpyro_fed.SFVI`.
    starts : int
        Searches side by side, in one program: the first from zero in unconstrained space, the
        others from draws of the prior, or standard normals where it cannot be drawn from.
    max_exchanges : int
        Exchanges, at most.
    progress_bar : bool

    Returns
    -------
    Mode

    Raises
    ------
    ModelError
        For a model with parameters inside silo plates, or without anything that silos share.
    NonFiniteError
        If no place was found at which density, gradient and Hessian are finite.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1000))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 5), obs=y)
    >>> silos = [dict(y=np.array([990.0, 1000.0])), dict(y=np.array([1010.0, 1020.0]))]
    >>> found = nf.find_mode(jax.random.key(0), model, silos)
    >>> round(float(found.sites["mu"])), found.converged
    (1005, True)
    """
    positive_int("starts", starts)
    positive_int("max_exchanges", max_exchanges)
    layout, buckets = lay_out(model, silo_data.read(silos, model))
    fm, batches = layout.model, on_device(buckets)
    _check(fm)
    if (coupled := coupling_reason(fm, layout.checks, buckets)) is not None:
        raise ModelError(f"{coupled}. Put what rows share outside of the silo_plate.")
    wide = unravelled(fm) > SEARCHED_UP_TO
    effects = effects_of(fm)
    if wide and len(effects):
        raise ModelError(
            f"{MANY_EFFECTS}. Put the effects into a silo_plate, where they are local."
        )
    runtime = simulation(wide_mode(fm, starts) if wide else mode(fm, starts, effects=effects))
    state = runtime.init(key, batches)
    run = drive(runtime, key, state, batches, max_exchanges, progress_bar, stop=True, search=True)
    search = jax.tree.map(np.asarray, run.state.server)
    if not search.known.any():
        raise _not_found(int(run.state.round), starts, run.unusable)
    shape, exchanges = None, int(run.state.round)
    if not wide:
        looked = runtime.single(curvature_check(fm, effects))
        shape, *_ = looked(key, run.state.server, run.state.silos, batches)
        shape, exchanges = jax.tree.map(np.asarray, shape), exchanges + 1
    found = _mode(fm, search, shape, exchanges, effects)
    _warn(found)
    return found


def begin(
    fit: Fit,
    key: Array,
    batches: Batches,
    runtime_of: Callable[[FederatedAlgorithm[Any, Any]], Runtime],
    buckets: Sequence[Bucket] = (),
    progress_bar: bool | Progress = False,
) -> tuple[State, Mode | None]:
    """Return the first state of a run that starts at the mode, and the mode.

    Raises
    ------
    NoStartError
        Where nothing is finite, no curvature tells how far the posterior reaches, or rows read each
        other's latents.
    ModelError
        Naming the directions in which the posterior is improper, where a prior is flat.
    """
    fm, start = fit.model, fit.built.start
    if start is None:
        return opened(fit, key, fit.runtime.init(key, batches), batches), None
    if (coupled := coupling_reason(fm, fit.checks, buckets)) is not None:
        raise NoStartError(coupled)
    if start.curvature_round is None and len(start.effects):
        raise NoStartError(MANY_EFFECTS)
    search = start.search
    runtime = fit.cached(SEARCH, lambda: runtime_of(search))
    key_search, key_begin = jax.random.split(jax.random.fold_in(key, SEARCHING))
    state = runtime.init(key_search, batches)
    most = max(MOST.values()) + 2
    run = drive(runtime, key_search, state, batches, most, progress_bar, stop=True, search=True)
    unusable = run.unusable
    if run.refused is not None:
        raise run.refused
    found_at, exchanges = jax.tree.map(np.asarray, run.state.server), int(run.state.round) + 1
    if found_at.known.any() and not _usable(fm, found_at):
        raise NoStartError(
            "no mode to start from was found at which curvature tells how far the posterior "
            "reaches, as where a likelihood has a kink (Laplace)"
        )
    if found_at.known.any():
        found = _mode(fm, found_at, None, exchanges, start.effects)
        if fm.improper and start.curvature_round is not None and found.converged:
            looked = fit.quick_round(start.curvature_round, runtime)
            shape, *_ = looked(key_begin, run.state.server, run.state.silos, batches)
            shape = jax.tree.map(np.asarray, shape)
            found = _mode(fm, found_at, shape, exchanges + 1, start.effects)
            if found.flat:
                raise _improper(fm, found.flat)
        begun = fit.quick_round(start.begin, runtime)
        server, silos, info, good = begun(key_begin, run.state.server, run.state.silos, batches)
        unusable = failed_silos(good, (), ())
        if info.ok:
            carry = init_schedule(fit.built.schedule, key, fit.plan.num_silos)
            zero = jnp.zeros((), jnp.int32)
            state = drop_weak_types(State(zero, server, silos, carry))
            return opened(fit, key, state, batches), found
    if fm.improper:
        raise _not_found(exchanges, 1, unusable)
    raise NoStartError(
        "no mode to start from was found where log density, gradient and Hessian are finite"
        f"{_which(unusable)}. Double precision (jax.config.update('jax_enable_x64', True)) may help"
    )


def opened(fit: Fit, key: Array, state: State, batches: Batches) -> State:
    """Return the state after the rounds with which the algorithm itself opens."""
    key = jax.random.fold_in(key, OPENING)
    for round_ in fit.built.algorithm.opening:
        once = fit.quick_round(round_)
        server, silos, info, good = once(key, state.server, state.silos, batches)
        if not bool(info.ok):
            bad = failed_silos(good, (), ())
            raise NonFiniteError(
                f"what silos say before the first round (exchange '{round_.name}') is not finite"
                f"{_which(bad)}. Look at the data there.",
                result=None,
                round=0,
                silos=bad,
            )
        state = drop_weak_types(state._replace(server=server, silos=silos))
    return state


def _usable(fm: FederatedModel, search: Search | WideState) -> bool:
    """Whether the curvature at the best place is that of the posterior around there.

    Where the search has not come to rest, the silos must have their share in it: of a likelihood
    with a kink only the prior curves.
    """
    i = int(highest(search))
    x, value, g, A = (np.asarray(a[i], float) for a in search.best)
    if A.ndim == 1:
        return True
    diagonal = np.abs(np.diagonal(A))
    if search.rests[i]:
        return bool((diagonal > 0).all())
    unravel = unraveller(fm)
    of_prior = jit_once(jax.hessian(lambda x: fm.smoothed.log_prior(*unravel(x))))(search.best.x[i])
    of_silos = np.diagonal(A) + np.diagonal(np.asarray(of_prior, float))
    if (np.abs(of_silos) <= UNFELT * diagonal).any():
        return False
    eps = ROUNDINGS * np.finfo(search.best.x.dtype).eps
    unit = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    values, V = np.linalg.eigh(A / unit / unit[:, None])
    if values.min() <= eps * len(x):
        return False
    gain = 0.5 * ((V.T @ (g / unit)) ** 2 / values).sum()
    return bool(gain <= max(ALMOST * len(x), 10 * eps * abs(value)))


def _improper(fm: FederatedModel, open: Sequence[str]) -> ModelError:
    return ModelError(
        f"the posterior is improper: it does not fall along {' and '.join(open)} (unconstrained, "
        f"each in units of its own curvature), where the prior of '{fm.improper[0]}' is flat. "
        "Give it "
        "a proper prior, or leave out a column that others add up to. Where columns are merely "
        "alike, double precision (jax.config.update('jax_enable_x64', True)) tells them apart."
    )


def _which(silos: tuple[int, ...]) -> str:
    """Return whose numbers those are that are not finite, if that is known."""
    return f" (those of silo {', '.join(map(str, silos))} were not)" if silos else ""


def _not_found(exchanges: int, starts: int, silos: tuple[int, ...]) -> NonFiniteError:
    return NonFiniteError(
        "no place was found at which the log density, its gradient and its Hessian are finite"
        f"{_which(silos)}, from {starts} starts in {exchanges} exchanges. In double precision "
        "(jax.config.update('jax_enable_x64', True)) they may be, or from more starts "
        "(starts=8); or look at the data and the supports of the sites.",
        result=None,
        round=exchanges,
        silos=silos,
    )


def _check(fm: FederatedModel) -> None:
    if private := [s.name for s in fm.sites if s.kind == "param" and s.plate is not None]:
        raise ModelError(
            f"the parameter '{private[0]}' is inside a silo_plate: it has no mode that silos "
            "share. Put it outside, or give it a prior by numpyro.sample."
        )
    if not fm.dim and not fm.named("param"):
        raise ModelError(
            "the model has neither global latents nor shared parameters, so that there is nothing "
            "to search over. Move what silos share out of the silo_plate."
        )


def _open(shape: Shape, falls: np.ndarray, least: float, names: Sequence[str]) -> tuple[str, ...]:
    """The directions in which a density is open that falls so much at the places (12 n,).

    Where it is NaN, it is looked at nearer. What falls farther out alone is not open: where the
    curvature is below what this precision can tell, the look is not far enough.
    """
    farther, far, near = falls.reshape(len(AWAY), 2, -1)
    hardly = np.where(np.isnan(far), ~(near >= least * (AWAY[2] / AWAY[1]) ** 2), far < least)
    hardly &= ~((farther >= least) & (shape.values <= shape.threshold))
    found = []
    for k, axis in enumerate(shape.axes.T):
        if hardly[:, k].any():
            signed = -axis if hardly[1, k] and not hardly[0, k] else axis
            parts = zip(signed, names, strict=True)
            found.append(" ".join(f"{w:+.2f} {name}" for w, name in parts if abs(w) > 0.2))
    return tuple(found)


def _mode(
    fm: FederatedModel,
    search: Search | WideState,
    shape: Shape | None,
    num_exchanges: int,
    effects: np.ndarray,
) -> Mode:
    """``shape`` is None where nobody has looked around."""
    i, names = int(highest(search)), _names(fm)
    theta, z_G = unraveller(fm)(search.best.x[i])
    curvature = np.asarray(search.best.curvature[i], float)
    value, flat = float(search.best.value[i]), tuple[str, ...]()
    if shape is not None:
        rounding = ROUNDINGS * np.finfo(search.best.x.dtype).eps * abs(value)
        flat = _open(shape, value - np.asarray(shape.densities), max(FALL, rounding), names)
    evidence = None if flat else _log_evidence(fm, value, curvature, effects)
    sites = jax.tree.map(np.asarray, fm.constrain_global(theta, z_G))
    return Mode(
        sites=sites,
        theta=jax.tree.map(np.asarray, fm.constrain_theta(theta)),
        z_G=np.asarray(z_G),
        curvature=curvature,
        log_evidence=evidence,
        num_exchanges=num_exchanges,
        converged=bool(search.rests[i]) and not flat,
        values=np.where(search.known, search.best.value, -np.inf),
        names=names,
        flat=flat,
        others=_others(fm, search, i, effects),
    )


def _others(
    fm: FederatedModel, search: Search | WideState, best: int, effects: np.ndarray
) -> tuple[LocalMode, ...]:
    """Modes of other starts than the best, each once, the most evident first."""
    own = search.best.x.shape[1] - fm.dim

    def peak(i: int) -> LocalMode | None:
        curvature = np.asarray(search.best.curvature[i], float)
        value = float(search.best.value[i])
        evidence = _log_evidence(fm, value, curvature, effects)
        if evidence is None:
            return None
        return LocalMode(np.asarray(search.best.x[i][own:]), curvature[own:, own:], evidence)

    at_rest = np.flatnonzero(search.known & search.rests)
    peaks = [p for i in (best, *at_rest) if (p := peak(int(i))) is not None]
    apart = peaks[:1]
    for p in sorted(peaks[1:], key=lambda p: -p.log_evidence):
        if all(distance(q, p.z_G[None])[0] > APART for q in apart):
            apart.append(p)
    return tuple(apart[1:])


def distance(peak: LocalMode, z_G: np.ndarray) -> np.ndarray:
    """How far draws (n, dim) are from a peak, in its standard deviations."""
    away = np.asarray(z_G, float) - peak.z_G
    return np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", away, peak.curvature, away), 0.0))


def _log_evidence(
    fm: FederatedModel, value: float, curvature: np.ndarray, effects: np.ndarray
) -> float | None:
    """Return Laplace's evidence over the globals with density ``value``; None for a diagonal."""
    if curvature.ndim == 1:
        return None
    own = len(curvature) - fm.dim
    number = fm.dim - len(effects)
    log_det = np.linalg.slogdet(curvature[own:, own:])[1]
    log_det -= np.linalg.slogdet(curvature[np.ix_(effects, effects)])[1]
    return float(value + 0.5 * (number * np.log(2 * np.pi) - log_det))


def start_rounds(
    kind: str, fm: FederatedModel, starts: int, init_loc_fn: Callable[..., Any] | None, begin: Round
) -> Start:
    """Return how a run starts that begins at the mode by a round."""
    if kind == "wide":
        search = wide_mode(fm, starts, init_loc_fn, most=MOST[kind])
        return Start(search, None, begin, effects_of(fm))
    effects = effects_of(fm)
    search = mode(fm, starts, init_loc_fn, effects=effects, most=MOST[kind])
    return Start(search, curvature_check(fm, effects), begin, effects)


def coupling_reason(
    fm: FederatedModel, asks: RowChecks | None, buckets: Sequence[Bucket]
) -> str | None:
    """Say why Laplace's method cannot be used row by row, if it cannot."""
    found = None if asks is None else coupled_rows(asks, buckets)
    if found is None:
        return None
    return (
        f"{found.words()} reads latents of other rows, so that the silo's latents cannot be "
        "integrated row by row in a search for the mode"
    )


def _names(fm: FederatedModel) -> tuple[str, ...]:
    """Return names of the coordinates of the search: shared parameters, then globals."""

    def each(name: str, shape: tuple[int, ...]) -> list[str]:
        places = np.ndindex(shape)
        return [name + (f"[{', '.join(map(str, place))}]" if place else "") for place in places]

    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    params = [n for name in sorted(theta) for n in each(name, theta[name].shape)]
    return (*params, *(n for site in fm.named("latent") for n in each(site.name, site.shape)))


def _warn(found: Mode) -> None:
    if found.flat:
        warnings.warn(
            f"the log density does not fall along {' and '.join(found.flat)} (unconstrained, each "
            "in units of its own curvature): data and prior leave it open there, as where two "
            "classes can be told apart without error, or single precision does. Give it a proper "
            "prior, leave out a column that others add up to, or "
            "run in double precision (jax.config.update('jax_enable_x64', True)).",
            stacklevel=3,
        )
    elif not found.converged:
        warnings.warn(
            f"the search had not come to a mode in {found.num_exchanges} exchanges: run in double "
            "precision (jax.config.update('jax_enable_x64', True)), in which smaller gains can be "
            "told from rounding; try several starts; or allow more by max_exchanges.",
            stacklevel=3,
        )
