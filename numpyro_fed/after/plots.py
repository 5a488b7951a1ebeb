"""Figures of a posterior: what is drawn for them, and of which sites and silos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from numpyro_fed.after import pictures
from numpyro_fed.after.own_rows import OwnRows
from numpyro_fed.after.predict import global_latents, outer_latents
from numpyro_fed.after.predictions import (
    Drawn,
    at_own_rows,
    drawn_from_prior,
    drawn_given_globals,
    outcomes_of_silos,
    programs_of,
)
from numpyro_fed.after.run import ALL, OWN_ROWS, check_name, rows_of, silo_number
from numpyro_fed.after.sensitivity import elements
from numpyro_fed.errors import ModelError


def marginals(drawn: Drawn, sites: Sequence[str] | None, n: int) -> Any:
    """Return a figure of the densities of globals, each over that of its prior."""
    run = drawn.run_behind
    chosen = global_latents(run._fit.model) if sites is None else list(sites)
    draws = drawn.sample_posterior(jax.random.key(0), n)
    if unknown := [name for name in chosen if name not in draws]:
        raise ModelError(f"'{unknown[0]}' is no global of the model, which has {list(draws)}.")
    names, values = elements({name: draws[name] for name in chosen})
    if not names:
        raise ModelError("the model has no globals to plot.")
    prior = drawn_from_prior(run, jax.random.key(1), n)
    before = None if prior is None else elements({name: prior[name] for name in chosen})[1]
    return pictures.marginals(names, values, before)


def silos_side_by_side(drawn: Drawn, site: str | None, n: int, names: Sequence[str] | None) -> Any:
    """Return a figure of silos' own latents: means with 50 and 90 % intervals, in order."""
    run = drawn.run_behind
    fm = run._fit.model
    known = [s.name for s in fm.sites if s.kind == "latent" and s.plate is not None]
    site = next(iter([*outer_latents(fm), *known]), None) if site is None else site
    if site is None or site not in known:
        raise ModelError(f"{site!r} is no latent of silos: the model has {known}.")
    silos = pictures.labels_of(run.num_silos, names)
    run.data_of(0)  # before silos elsewhere are asked for what cannot be shown
    draws = drawn.sample_posterior(jax.random.key(0), n, silo=ALL)
    before = drawn_given_globals(run, jax.random.key(1), draws, site)
    axis = next(1 + (s.axis or 0) for s in fm.sites if s.name == site)
    values, prior = (np.moveaxis(np.asarray(a, np.float64), axis, 1) for a in (draws[site], before))
    rows = [rows_of(run, fm, site, j) for j in range(run.num_silos)]
    return pictures.caterpillar(site, values, prior, pictures.labels_of_rows(silos, rows))


def predictive_check(drawn: Drawn, silo: int | str, n: int, names: Sequence[str] | None) -> Any:
    """Return a figure of outcomes over those that the fit predicts for the same rows."""
    run = drawn.run_behind
    labels = pictures.labels_of(run.num_silos, names)
    chosen = list(range(len(labels)))
    if isinstance(silo, str):
        check_name(silo, OWN_ROWS)
    else:
        chosen = [silo_number(silo)]
    silos = chosen[: pictures.MOST_PANELS]
    asked = at_own_rows(drawn, jax.random.key(0), silos, n)
    seen = outcomes_of_silos(run, silos)
    predicted = OwnRows(run, programs_of(run), asked).values()
    return pictures.checks(seen, predicted, [labels[j] for j in chosen])
