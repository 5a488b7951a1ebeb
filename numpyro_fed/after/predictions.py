"""Predictions of a run's model: at the rows of the fit, and from the prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.after.own_rows import Asked, values_at
from numpyro_fed.after.predict import SEEN, Draws, Programs, compiled, global_latents, predictor
from numpyro_fed.after.run import Run
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import outcomes_at


def programs_of(run: Run, *, mean: bool = False) -> Programs:
    """Return the programs that predict outcomes, or the means of their distributions."""
    fit = run._fit
    found: Programs = fit.cached(("predict", mean), lambda: predictor(fit.model, mean=mean))
    return found


def parameters_of(run: Run, silo: int | None) -> dict[str, Any]:
    """Return the shared parameters on their supports, and a silo's private ones."""
    shared = run._fit.model.constrain_theta(run.shared.theta)
    private = {} if silo is None else run.silo_params(silo)
    return {**shared, **{k: v for k, v in private.items() if k != "guide"}}


def drawn_from_prior(run: Run, key: Array, n: int) -> dict[str, Array] | None:
    """Return draws of the globals from their prior; None if they cannot be drawn."""
    fm, theta = run._fit.model, run.shared.theta
    z_G = None if fm.improper else fm.draw_prior(key, n)
    if z_G is None:
        return None
    return jax.jit(jax.vmap(fm.constrain_global, (None, 0)))(theta, z_G)


def drawn_given_globals(run: Run, key: Array, draws: Mapping[str, Array], site: str) -> np.ndarray:
    """Return draws of a latent of all silos from its prior given draws of the globals."""
    fm = run._fit.model
    given = {name: draws[name] for name in global_latents(fm)}
    programs = run._fit.cached("latents", lambda: predictor(fm, ("latent",)))
    axis = next(1 + (s.axis or 0) for s in fm.sites if s.name == site)
    asked = [
        Asked(j, jax.random.fold_in(key, j), parameters_of(run, j), given)
        for j in range(run.num_silos)
    ]
    parts = values_at(run, programs, asked)
    return np.concatenate([np.asarray(found[site]) for found in parts], axis)


def outcomes_and_rows(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return outcomes of silos in this process by site, and which rows have them, by ``SEEN``.

    An outcome has NaN for what is missing. No latent is read.
    """
    fm = run._fit.model

    def at(key: Array, values: Draws, data: SiloData) -> dict[str, Array]:
        found = outcomes_at(fm, data)
        seen = {SEEN + name: outcome.seen for name, outcome in found.items()}
        return {name: outcome.value for name, outcome in found.items()} | seen

    programs = run._fit.cached("outcomes", lambda: compiled(at))
    found = values_at(run, programs, [Asked(j, jax.random.key(0), {}, {}) for j in silos])
    return [{name: np.asarray(value)[0] for name, value in part.items()} for part in found]


def outcomes_of_silos(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return the outcomes of the rows of some silos in this process, by site."""
    return [
        {name: value for name, value in part.items() if not name.startswith(SEEN)}
        for part in outcomes_and_rows(run, silos)
    ]
