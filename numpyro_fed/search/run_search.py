"""A search for the mode, from its first exchange to its end, and whether a run may begin there.

The search is that of :mod:`.newton`, or of :mod:`.lbfgs` for many globals. Its end is judged here
(:func:`curvature_usable`), and by one exchange more in :mod:`.mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import ModelError, NonFiniteError
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data.padding import Bucket
from numpyro_fed.rounds.keys import generator
from numpyro_fed.rounds.progress import Progress, progress_of
from numpyro_fed.rounds.runtime import Runtime
from numpyro_fed.rounds.silos import Batches, Stacks
from numpyro_fed.rounds.step import Conversation
from numpyro_fed.search.expand import ROUNDING_UNITS, SearchState, unravelled
from numpyro_fed.search.influence import Factors, SiloPull
from numpyro_fed.search.mode_search import MAX_PROMISE_PER_DIM, BestPoints, ModeSearch, best_start
from numpyro_fed.search.newton import NewtonSearch
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks, coupled_rows
from numpyro_fed.text.values import first_not_finite

# Share of the silos in a coordinate's curvature that counts as none. A likelihood with a kink
# (Laplace) has none but by rounding; then the prior alone would say how far the posterior reaches.
NO_SHARE = 1e-5


def run_search(
    key: Array,
    search: ModeSearch[Any, Any],
    runtime: Runtime,
    batches: Batches,
    max_exchanges: int,
    progress_bar: bool | Progress,
    places: np.ndarray | None = None,
) -> tuple[BestPoints[np.ndarray], Conversation]:
    """Return where a search has ended, and the questions to silos so far, with their states.

    Half of the ascents of a Newton search begin at ``places`` (k, n), if they are given.
    """
    first = runtime.init(key, batches)
    ask = Conversation(runtime.transport(batches), key, search.num_silos, first.silos)
    progress = progress_of(progress_bar)
    with progress.under_way(True, max_exchanges):
        ascents = search.first_ascents(key, generator(key))
        if isinstance(search, NewtonSearch):
            search.begin_at_own_modes(ask, ascents, places)
        return search.run(ask, ascents, max_exchanges, partial(progress.step, 1)), ask


def factors_at_mode(
    fm: FederatedModel, search: BestPoints[np.ndarray], stacks: Stacks, batches: Batches
) -> Factors | None:
    """Return what each silo in this process has said of its likelihood at the end of a search.

    It is None for silos in other processes, and where one came to no mode of its own.
    """
    if search.best.curvature.ndim < 3 or not all(isinstance(s, SearchState) for s in stacks):
        return None
    i, num_theta = int(best_start(search)), search.best.x.shape[1] - fm.dim
    order = np.argsort(np.concatenate([np.asarray(b.silos) for b in batches]))

    def of_silos(leaf: Callable[[SearchState], Array]) -> np.ndarray:
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


def curvature_usable(fm: FederatedModel, search: BestPoints[Any]) -> bool:
    """Return whether the curvature at the best place is that of the posterior.

    If the search has not come to a mode, silos must have a share in the curvature of each
    coordinate: of a likelihood with a kink only the prior has curvature. And another Newton step
    must promise little.
    """
    i = int(best_start(search))
    x, value, g, A = (np.asarray(a[i], float) for a in search.best)
    if A.ndim == 1:
        return True
    diagonal = np.abs(np.diagonal(A))
    if search.at_mode[i]:
        return bool((diagonal > 0).all())
    log_prior = jax.hessian(lambda x: fm.smoothed.log_prior(*unravelled(fm, x)))
    of_prior = jit_once(log_prior)(search.best.x[i])
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
    return bool(gain <= max(MAX_PROMISE_PER_DIM * len(x), 10 * eps * abs(value)))


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


def coupling_reason(checks: RowChecks, buckets: Sequence[Bucket]) -> str | None:
    """Return in words why Laplace's method cannot be used row by row; None if it can."""
    if (rows := coupled_rows(checks, buckets)) is None:
        return None
    return (
        f"{rows.words()} reads latents of other rows, so that the silo's latents cannot be "
        "integrated row by row in a search for the mode"
    )
