"""Predictions of a posterior: for new data, for the rows of the fit, and from the prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from numpyro_fed.after.own_rows import Asked, OwnRows, latents_apart
from numpyro_fed.after.predict import (
    SEEN,
    Programs,
    check_means,
    check_plates,
    global_latents,
    observer,
    outer_latents,
    predictor,
    read_new,
    refuse_private_parameters,
    with_blocks,
)
from numpyro_fed.after.run import NEW, OWN_ROWS, Run, WhichSilo, check_name, silo_number
from numpyro_fed.errors import ModelError, positive_int
from numpyro_fed.model.indices import new_data_check


class Drawn(Protocol):
    """A posterior whose latents can be drawn."""

    @property
    def run_behind(self) -> Run:
        """Return the run that it rests on."""

    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Return draws of the globals, and of silos' latents."""


def predict(
    drawn: Drawn, key: Array, new: Mapping[str, Any] | None, silo: int | str, n: int, *, mean: bool
) -> Any:
    """Return predictive draws (n, ...) of outcomes, or of their means."""
    positive_int("n", n)
    run = drawn.run_behind
    programs = programs_of(run, mean=mean)
    found: Any
    if new is not None:
        found = _for_new(drawn, key, new, silo, n, programs)
    elif silo == NEW:
        raise ValueError("pass new data to predict for, or silo='own rows'.")
    else:
        if isinstance(silo, str):
            check_name(silo, OWN_ROWS)
        silos = range(run.num_silos) if isinstance(silo, str) else [silo_number(silo)]
        parts = OwnRows(run, programs, at_own_rows(drawn, key, silos, n)).values()
        found = parts if isinstance(silo, str) else parts[0]
    if mean:
        check_means(run._fit.model, found)
    return found


def _for_new(
    drawn: Drawn, key: Array, new: Mapping[str, Any], silo: int | str, n: int, programs: Programs
) -> dict[str, Array]:
    """Return predictive draws for new data, of a silo or of a new one."""
    if silo == OWN_ROWS:
        raise ValueError('silo="own rows" predicts for the rows of the fit: pass no new data.')
    run, model = drawn.run_behind, drawn.run_behind._fit.model
    if isinstance(silo, str):
        check_name(silo)
        number, latents = None, global_latents(model)
    else:
        number, latents = silo_number(silo), [*global_latents(model), *outer_latents(model)]
    own = None if number is None else run.data_of(number)
    data = read_new(model, with_blocks(model, new, number, own), run._fit.facts, run.data_here)
    refuse_private_parameters(model)
    if number is not None:
        check_plates(model, data, number, run.sizes_of(number))
    new_data_check(model.text, number)(**data.kwargs)
    # The latents are those that sample_posterior draws with the same key.
    draws = drawn.sample_posterior(key, n, silo=number)
    given = {name: draws[name] for name in latents if name in draws}
    key_new = jax.random.fold_in(jax.random.fold_in(key, 2), 0 if number is None else 1 + number)
    return jax.block_until_ready(programs.many(key_new, parameters_of(run, number), given, data))


def prior_predict(run: Run, key: Array, new: Mapping[str, Any] | None, n: int) -> Any:
    """Return predictive draws (n, ...) from the prior, for new data or for the rows of the fit."""
    positive_int("n", n)
    model = run._fit.model
    prior = drawn_from_prior(run, jax.random.fold_in(key, 0), n)
    if prior is None:
        raise ModelError("the prior of the globals cannot be drawn from.")
    latents = {name: prior[name] for name in global_latents(model)}
    programs = programs_of(run)
    if new is not None:
        refuse_private_parameters(model)
        new = with_blocks(model, new, None, None)
        data = read_new(model, new, run._fit.facts, run.data_here)
        new_data_check(model.text, None)(**new)
        key_new, parameters = jax.random.fold_in(key, 1), parameters_of(run, None)
        return jax.block_until_ready(programs.many(key_new, parameters, latents, data))
    asked = [
        Asked(j, jax.random.fold_in(key, 1 + j), parameters_of(run, j), latents)
        for j in range(run.num_silos)
    ]
    return OwnRows(run, programs, asked).values()


def at_own_rows(drawn: Drawn, key: Array, silos: Sequence[int], n: int) -> list[Asked]:
    """Return silos with draws of all latents, those of ``sample_posterior`` with that key."""
    run = drawn.run_behind
    key_new = jax.random.fold_in(key, 2)
    draws = drawn.sample_posterior(key, n, silo=list(silos))
    return [
        Asked(j, jax.random.fold_in(key_new, 1 + j), parameters_of(run, j), latents)
        for j, latents in zip(silos, latents_apart(run, draws, silos), strict=True)
    ]


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
    parts = OwnRows(run, programs, asked).values()
    return np.concatenate([np.asarray(found[site]) for found in parts], axis)


def outcomes_and_rows(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return outcomes of silos in this process by site, and which rows have them, by ``SEEN``."""
    programs = run._fit.cached("outcomes", lambda: observer(run._fit.model))
    asked = [Asked(j, jax.random.key(0), {}, {}) for j in silos]
    found = OwnRows(run, programs, asked).values()
    return [{name: np.asarray(value)[0] for name, value in part.items()} for part in found]


def outcomes_of_silos(run: Run, silos: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Return the outcomes of the rows of some silos in this process, by site."""
    return [
        {name: value for name, value in part.items() if not name.startswith(SEEN)}
        for part in outcomes_and_rows(run, silos)
    ]
