"""The search for the mode of the posterior over silos, and the start of runs at it.

The search is that of :mod:`numpyro_fed.search.newton`, or of :mod:`.newton_wide` for many globals.
Here its result is judged, from which a run may start (:mod:`numpyro_fed.methods.start`):

1. Search, from one or several places side by side.
2. Check that the curvature at the best place is that of the posterior (:func:`curvature_usable`).
3. ``find_mode``, and runs with flat priors, check by one exchange more that the density falls in
   all directions (:func:`_flat_directions`).
4. A run takes its first states from the mode by one round (``StartRounds.begin``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import ConvergenceWarning, ModelError, ModelWarning, NonFiniteError
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.basics.trees import element_name
from numpyro_fed.data.padding import Bucket
from numpyro_fed.rounds.keys import generator
from numpyro_fed.rounds.progress import Progress, progress_of
from numpyro_fed.rounds.runtime import Runtime
from numpyro_fed.rounds.silos import Batches, Stacks
from numpyro_fed.rounds.step import Conversation
from numpyro_fed.search.curvature_check import CHECK_DISTANCES, CurvatureCheck, Shape
from numpyro_fed.search.expand import ROUNDING_UNITS, SiloState, effects_of, unraveller
from numpyro_fed.search.influence import Factors, SiloPull
from numpyro_fed.search.mode import MODES_APART, LocalMode, Mode, OneCopy, distance
from numpyro_fed.search.newton import MIN_GAIN_NEAR, ModeSearch, Search, best_start
from numpyro_fed.search.newton_wide import WideSearch
from numpyro_fed.search.own_modes import OwnModes
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.not_finite import first_not_finite
from numpyro_fed.text.row_checks import RowChecks, coupled_rows

# Shared parameters and globals, up to which silos send Hessians, of 300 x 300 numbers at most. The
# same limit holds for full covariances of the globals.
SEARCHED_UP_TO = 300
# Share of the silos in a coordinate's curvature that counts as none. A likelihood with a kink
# (Laplace) has none but by rounding; then the prior alone would say how far the posterior reaches.
NO_SHARE = 1e-5
# Nats for each coordinate that another Newton step may promise. A place half a nat off is one sd
# off, from where a run finds its way; farther off the curvature may be that of another region.
MAX_GAIN = 0.5
# Nats by which a density must have fallen three sds from the mode, where a normal density has
# fallen by 4.5. A heavy tail falls by less than normal; an open direction does not fall at all.
MIN_FALL = 0.1


MANY_EFFECTS = (
    f"above {SEARCHED_UP_TO} globals effects are not integrated out, and together with a scale "
    "that is a global, too, they have no mode"
)


def search_for(
    key: Array,
    fm: FederatedModel,
    search: ModeSearch | WideSearch,
    runtime: Runtime,
    batches: Batches,
    *,
    max_exchanges: int,
    progress_bar: bool,
) -> Mode:
    """Return the mode that a search finds, once its curvature has been checked."""
    found, ask = search_end(key, search, runtime, batches, max_exchanges, progress_bar)
    if not found.known.any():
        raise not_found_error(fm, batches, ask.number, len(found.known), ask.unusable)
    shape, effects = None, effects_of(fm)
    if isinstance(search, ModeSearch):
        shape = CurvatureCheck(fm, effects, search.num_starts).ask(ask, found)
    mode = mode_of_search(fm, found, shape, ask.number, effects)
    if mode.flat:
        warnings.warn(
            f"the log density does not fall along {' and '.join(mode.flat)} (unconstrained, each "
            "in units of its own curvature): data and prior leave it open there, as where two "
            "classes can be told apart without error, or single precision does. Give it a proper "
            "prior, leave out a column that others add up to, or "
            "run in double precision (jax.config.update('jax_enable_x64', True)).",
            category=ModelWarning,
            stacklevel=3,
        )
    elif not mode.converged:
        warnings.warn(
            f"the search had not come to a mode in {mode.num_exchanges} exchanges: run in double "
            "precision (jax.config.update('jax_enable_x64', True)), in which smaller gains can be "
            "told from rounding; try several starts; or allow more by max_exchanges.",
            category=ConvergenceWarning,
            stacklevel=3,
        )
    return mode


def search_end(
    key: Array,
    search: ModeSearch | WideSearch,
    runtime: Runtime,
    batches: Batches,
    max_exchanges: int,
    progress_bar: bool | Progress,
    near: np.ndarray | None = None,
) -> tuple[Search[np.ndarray], Conversation]:
    """Return where a search has ended, and the questions to silos so far, with their states."""
    first = runtime.init(key, batches)
    ask = Conversation(runtime.transport(batches), key, search.num_silos, first.silos)
    random, progress = generator(key), progress_of(progress_bar)
    shown = partial(progress.step, 1)
    with progress.under_way(True, max_exchanges):
        if isinstance(search, WideSearch):
            return search.run(ask, search.starts(key, random), max_exchanges, shown), ask
        starts = search.starts(key, random)
        # Effects and their scale together have no mode that a silo could climb to.
        if not len(search.effects):
            OwnModes(search).begin(ask, starts)
        if near is not None:
            for start in starts:
                start.min_gain = MIN_GAIN_NEAR
            # The other half begins where it did: other data may have modes where there were none.
            for start, place in zip(starts[: -(-len(starts) // 2)], near, strict=False):
                start.trial, start.metric = np.asarray(place, start.trial.dtype), None
                start.done = start.left = False
        return search.run(ask, starts, max_exchanges, shown), ask


def factors_at_mode(
    fm: FederatedModel, search: Search[np.ndarray], stacks: Stacks, batches: Batches
) -> Factors | None:
    """Return what each silo in this process has said of its likelihood at the end of a search.

    It is None for silos in other processes, and where one came to no mode of its own.
    """
    if search.best.curvature.ndim < 3 or not all(isinstance(s, SiloState) for s in stacks):
        return None
    i, num_theta = int(best_start(search)), search.best.x.shape[1] - fm.dim
    order = np.argsort(np.concatenate([np.asarray(b.silos) for b in batches]))

    def of_silos(leaf: Callable[[SiloState], Array]) -> np.ndarray:
        return np.concatenate([np.asarray(leaf(stack), np.float64) for stack in stacks])[order]

    value = of_silos(lambda s: s.place.value[:, i])
    g, A = of_silos(lambda s: s.place.gradient[:, i]), of_silos(lambda s: s.place.curvature[:, i])
    tops = of_silos(lambda s: s.top.max(1))
    if (tops <= np.finfo(search.best.value.dtype).min).any():
        return None
    total = (np.asarray(a[i], np.float64) for a in search.best[2:])
    prior_g, prior_A = (a - parts.sum(0) for a, parts in zip(total, (g, A), strict=True))
    gains = np.maximum(tops - value, 0.0)
    told = SiloPull(g[:, num_theta:], A[:, num_theta:, num_theta:], gains)
    return Factors(told, prior_g[num_theta:], prior_A[num_theta:, num_theta:])


def curvature_usable(fm: FederatedModel, search: Search[Any]) -> bool:
    """Return whether the curvature at the best place is that of the posterior.

    If the search has not come to rest, silos must have a share in the curvature of each coordinate:
    of a likelihood with a kink only the prior has curvature. And another Newton step must promise
    little.
    """
    i = int(best_start(search))
    x, value, g, A = (np.asarray(a[i], float) for a in search.best)
    if A.ndim == 1:
        return True
    diagonal = np.abs(np.diagonal(A))
    if search.rests[i]:
        return bool((diagonal > 0).all())
    unravel = unraveller(fm)
    of_prior = jit_once(jax.hessian(lambda x: fm.smoothed.log_prior(*unravel(x))))(search.best.x[i])
    of_silos = np.diagonal(A) + np.diagonal(np.asarray(of_prior, float))
    if (np.abs(of_silos) <= NO_SHARE * diagonal).any():
        return False
    # In units of each coordinate's own curvature, so
    # that eigenvalues can be compared with rounding.
    eps = ROUNDING_UNITS * np.finfo(search.best.x.dtype).eps
    unit = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    values, V = np.linalg.eigh(A / unit / unit[:, None])
    if values.min() <= eps * len(x):
        return False
    gain = 0.5 * ((V.T @ (g / unit)) ** 2 / values).sum()
    return bool(gain <= max(MAX_GAIN * len(x), 10 * eps * abs(value)))


def at_silos(silos: tuple[int, ...]) -> str:
    """Return in words which silos' numbers were not finite, if that is known."""
    return f" (those of silo {', '.join(map(str, silos))} were not)" if silos else ""


def reason_or_raise(fm: FederatedModel, batches: Batches) -> str:
    """Return in words which density is not finite near zero, or what to try if none is known."""
    silos = [
        (int(j), jax.tree.map(lambda a, i=i: np.asarray(a[i]), batch.data))
        for batch in batches
        for i, j in enumerate(batch.silos)
        if batch.data.arrays
    ]
    found = first_not_finite(fm, silos)
    if found is not None and found.is_gradient:
        raise ModelError(f"{found}.")
    advice = "Double precision (jax.config.update('jax_enable_x64', True)) may help"
    return str(found) if found else advice


def not_found_error(
    fm: FederatedModel, batches: Batches, exchanges: int, starts: int, silos: tuple[int, ...]
) -> NonFiniteError:
    """Return the error for a search that has found no place, after so many exchanges."""
    return NonFiniteError(
        "no place was found at which the log density, its gradient and its Hessian are finite"
        f"{at_silos(silos)}, from {starts} starts in {exchanges} exchanges. More starts "
        f"(starts=8) may find one. {reason_or_raise(fm, batches)}.",
        result=None,
        round=exchanges,
        silos=silos,
    )


def _flat_directions(
    shape: Shape, drops: np.ndarray, min_drop: float, names: Sequence[str]
) -> tuple[str, ...]:
    """Return the directions in which the density does not fall, as combinations of ``names``.

    ``drops`` are the falls of the log density at 30, 3 and 1 sds on both sides of each axis of the
    curvature.
    """
    farther, far, near = drops.reshape(len(CHECK_DISTANCES), 2, -1)
    # Where the density is not finite at three sds, the
    # fall at one sd decides: of a parabola, a ninth.
    flat = np.where(
        np.isnan(far),
        ~(near >= min_drop * (CHECK_DISTANCES[2] / CHECK_DISTANCES[1]) ** 2),
        far < min_drop,
    )
    # Where the curvature is below what this precision can tell, three of its sds are not far
    # enough, and a direction that falls at 30 is not open.
    flat &= ~((farther >= min_drop) & (shape.values <= shape.threshold))
    # Along an angle three of its sds may be most of a turn, where the density has risen again.
    angles = np.isfinite(shape.periods)
    flat &= ~((np.abs(shape.axes[angles]).max(0, initial=0.0) > 0.2) & (near >= min_drop / 9))
    directions = []
    for k, axis in enumerate(shape.axes.T):
        if flat[:, k].any():
            signed = -axis if flat[1, k] and not flat[0, k] else axis
            parts = zip(signed, names, strict=True)
            directions.append(" ".join(f"{w:+.2f} {name}" for w, name in parts if abs(w) > 0.2))
    return tuple(directions)


def mode_of_search(
    fm: FederatedModel,
    search: Search[Any],
    shape: Shape | None,
    num_exchanges: int,
    effects: np.ndarray,
) -> Mode:
    """Return the mode at the end of a search."""
    i, names, copy = int(best_start(search)), coordinate_names(fm), None
    curvature = np.asarray(search.best.curvature[i], float)
    value, flat = float(search.best.value[i]), tuple[str, ...]()
    x, _, gradient, metric = (np.asarray(a[i]) for a in search.best)
    if metric.ndim == 2 and search.rests[i]:
        # A last step of Newton's method, at most a hundredth of an sd long, needs no exchange:
        # gradient and curvature at the point are known.
        unit = np.sqrt(np.maximum(np.diagonal(metric), np.finfo(float).tiny))
        values, axes = np.linalg.eigh(metric / unit / unit[:, None])
        if values.min() > ROUNDING_UNITS * len(x) * np.finfo(x.dtype).eps:
            x = x + (axes @ (axes.T @ (gradient / unit) / values) / unit).astype(x.dtype)
    theta, z_G = unraveller(fm)(x)
    if shape is not None:
        # A fall within rounding of the density itself is no fall.
        rounding = ROUNDING_UNITS * np.finfo(search.best.x.dtype).eps * abs(value)
        flat = _flat_directions(
            shape, value - np.asarray(shape.densities), max(MIN_FALL, rounding), names
        )
        periods = np.asarray(shape.periods, float)[len(x) - fm.dim :]
        copy = OneCopy(z_G, periods) if np.isfinite(periods).any() else None
    evidence = None if flat else _log_evidence(fm, value, curvature, effects)
    sites = jax.tree.map(np.asarray, fm.constrain_global(theta, jax.device_put(z_G)))
    return Mode(
        sites=sites,
        theta=jax.tree.map(np.asarray, fm.constrain_theta(theta)),
        z_G=z_G,
        curvature=curvature,
        log_evidence=evidence,
        num_exchanges=num_exchanges,
        converged=bool(search.rests[i]) and not flat,
        values=np.where(search.known, search.best.value, -np.inf),
        names=names,
        flat=flat,
        others=_other_modes(fm, search, i, effects, copy),
        copy=copy,
    )


def _other_modes(
    fm: FederatedModel, search: Search[Any], best: int, effects: np.ndarray, copy: OneCopy | None
) -> tuple[LocalMode, ...]:
    """Return the modes of other starts than the best one, each once, in order of their evidence."""
    num_theta = search.best.x.shape[1] - fm.dim
    modes: list[LocalMode] = []
    for i in (best, *np.flatnonzero(search.known & search.rests).tolist()):
        curvature = np.asarray(search.best.curvature[i], float)
        evidence = _log_evidence(fm, float(search.best.value[i]), curvature, effects)
        if evidence is not None:
            place = np.asarray(search.best.x[i][num_theta:])
            place = place if copy is None else copy.copy_of(place)
            modes.append(LocalMode(place, curvature[num_theta:, num_theta:], evidence))
    distinct = modes[:1]
    for p in sorted(modes[1:], key=lambda p: -p.log_evidence):
        if all(distance(q, p.z_G[None])[0] > MODES_APART for q in distinct):
            distinct.append(p)
    return tuple(distinct[1:])


def _log_evidence(
    fm: FederatedModel, value: float, curvature: np.ndarray, effects: np.ndarray
) -> float | None:
    """Return Laplace's evidence at a mode with log density ``value``; None for a diagonal.

    Effects are integrated out of ``value`` already: their share of the determinant is taken out.
    """
    if curvature.ndim == 1:
        return None
    num_theta = len(curvature) - fm.dim
    number = fm.dim - len(effects)
    log_det = np.linalg.slogdet(curvature[num_theta:, num_theta:])[1]
    log_det -= np.linalg.slogdet(curvature[np.ix_(effects, effects)])[1]
    return float(value + 0.5 * (number * np.log(2 * np.pi) - log_det))


def coupling_reason(checks: RowChecks, buckets: Sequence[Bucket]) -> str | None:
    """Return in words why Laplace's method cannot be used row by row; None if it can."""
    if (rows := coupled_rows(checks, buckets)) is None:
        return None
    return (
        f"{rows.words()} reads latents of other rows, so that the silo's latents cannot be "
        "integrated row by row in a search for the mode"
    )


def coordinate_names(fm: FederatedModel) -> tuple[str, ...]:
    """Return the names of the search's coordinates: shared parameters, then globals."""
    theta = jax.eval_shape(lambda: fm.init_theta(jax.random.key(0)))
    sites = [(name, theta[name].shape) for name in sorted(theta)]
    sites += [(site.name, site.shape) for site in fm.named("latent")]
    return tuple(element_name(name, i) for name, shape in sites for i in np.ndindex(shape))
