"""The groups of an ArviZ object beside the posterior: predictions, densities, and the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.base import OWN_ROWS, AfterFit
from numpyro_fed.after.sensitivity import log_prior_on_supports
from numpyro_fed.algorithms.importance.integration import Integration
from numpyro_fed.algorithms.importance.loo import log_likelihoods_of_rows
from numpyro_fed.algorithms.sfvi import down_of
from numpyro_fed.errors import ModelError
from numpyro_fed.model.outcomes import Outcome, outcomes_at
from numpyro_fed.model.row_checks import refuse_coupled_rows
from numpyro_fed.precision import precision
from numpyro_fed.programs import jit_once
from numpyro_fed.results.batches import batch_size

POSTERIOR = "posterior"
GROUPS = (
    POSTERIOR,
    "prior",
    "posterior_predictive",
    "prior_predictive",
    "log_likelihood",
    "log_prior",
    "observed_data",
    "constant_data",
)
SILO = "silo"


class Drawn(Protocol):
    """A posterior whose draws of the globals are known in unconstrained space."""

    @property
    def run_behind(self) -> Any: ...

    @property
    def integration(self) -> Integration: ...

    def unconstrained(self, key: Array, n: int) -> Array:
        """Return the draws (n, dim) behind ``sample_posterior(key, n)``."""


def check_groups(groups: Sequence[str]) -> None:
    """Raise an error for groups that are not known."""
    if unknown := [name for name in groups if name not in GROUPS]:
        raise ValueError(f"groups={list(groups)}: '{unknown[0]}' is none of {list(GROUPS)}.")


def more_groups(
    fit: AfterFit, drawn: Drawn, key: Array, n: int, groups: Sequence[str]
) -> dict[str, dict[str, np.ndarray]]:
    """Return the groups beside the posterior, {group: {name: values}}, without an axis of chains.

    ``key`` and ``n`` are those of the posterior's draws, to which predictions and densities belong.
    """
    with precision(double=fit.double):
        return {group: _values(fit, drawn, key, n, group) for group in groups if group != POSTERIOR}


def _values(fit: AfterFit, drawn: Drawn, key: Array, n: int, group: str) -> dict[str, np.ndarray]:
    """Return the values of one group."""
    if group == "prior":
        prior = fit._drawn_from_prior(jax.random.fold_in(key, 0), n)
        return {} if prior is None else {k: np.asarray(v) for k, v in prior.items()}
    if group == "posterior_predictive":
        return side_by_side(fit, fit.predict(key, silo=OWN_ROWS, n=n))
    if group == "prior_predictive":
        return side_by_side(fit, fit.prior_predict(key, n=n))
    if group == "log_likelihood":
        # ArviZ takes no variable of an axis's name, which "row" is.
        names = outcomes_of(fit)
        name = names[0] if len(names) == 1 else "rows"
        return {name: log_likelihood(drawn, key, n)}
    if group == "log_prior":
        run = drawn.run_behind
        z_G = drawn.unconstrained(key, n)
        return {"globals": log_prior_on_supports(run._fit.model, run.shared.theta, z_G)}
    return outcomes(fit) if group == "observed_data" else constants(fit)


def outcomes_of(fit: AfterFit) -> list[str]:
    """Return the names of the outcomes of rows, all of one plate.

    Raises
    ------
    ModelError
        If outcomes are of several plates, whose rows have no axis in common.
    """
    sites = fit.run_behind._fit.model.sites
    found = [s for s in sites if s.kind == "observed" and s.plate is not None]
    plates = sorted({str(s.plate) for s in found})
    if len(plates) > 1:
        raise ModelError(
            f"outcomes are of the rows of {plates}, and ArviZ's groups have one axis of rows: take "
            "predict(), loo() and sample_posterior() for each."
        )
    return [s.name for s in found]


def outcomes_by_silo(fit: AfterFit) -> list[dict[str, Outcome]]:
    """Return the outcomes of each silo in this process."""
    run = fit.run_behind
    return [outcomes_at(run._fit.model, run.data_of(j)) for j in range(run.num_silos)]


def side_by_side(fit: AfterFit, parts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the predictions of all silos (n, rows, ...), of rows that have an outcome."""
    joined: dict[str, np.ndarray] = {}
    silos = outcomes_by_silo(fit)
    for name in outcomes_of(fit):
        kept = [
            np.moveaxis(np.asarray(p[name]), 1 + o[name].axis, 1)[:, np.asarray(o[name].seen)]
            for p, o in zip(parts, silos, strict=True)
        ]
        joined[name] = np.concatenate(kept, 1)
    return joined


def outcomes(fit: AfterFit) -> dict[str, np.ndarray]:
    """Return the outcomes (rows, ...) of rows that have one; NaN for parts that are missing."""
    joined: dict[str, np.ndarray] = {}
    silos = outcomes_by_silo(fit)
    for name in outcomes_of(fit):
        found = [fit.outcomes_of(j)[name] for j in range(len(silos))]
        kept = [
            np.moveaxis(value, o[name].axis, 0)[np.asarray(o[name].seen)]
            for value, o in zip(found, silos, strict=True)
        ]
        joined[name] = np.concatenate(kept)
    return joined


def constants(fit: AfterFit) -> dict[str, np.ndarray]:
    """Return the number of each row's silo, and the arguments of the model that have so many rows.

    Arguments that hold outcomes are among them.
    """
    run, names = fit.run_behind, outcomes_of(fit)
    seen = [np.asarray(o[names[0]].seen) for o in outcomes_by_silo(fit)]
    found = {SILO: np.repeat(np.arange(run.num_silos), [int(s.sum()) for s in seen])}
    data = [run.data_of(j).arrays for j in range(run.num_silos)]
    for name in data[0]:
        values = [np.asarray(d[name]) for d in data]
        if all(v.ndim and len(v) == len(s) for v, s in zip(values, seen, strict=True)):
            kept = [v[s] for v, s in zip(values, seen, strict=True)]
            if len({v.shape[1:] for v in kept}) == 1:
                found[name] = np.concatenate(kept)
    return found


def log_likelihood(drawn: Drawn, key: Array, n: int) -> np.ndarray:
    """Return the log likelihood (n, rows) of the rows of all silos, their own latents integrated.

    Latents of outer plates (a hospital's effect) are drawn at each draw of the globals.
    """
    run, integration = drawn.run_behind, drawn.integration
    fit = run._fit
    if fit.checks is not None:
        refuse_coupled_rows(fit.checks, run._silos.buckets, "log likelihoods of rows need")
    likelihood = integration.likelihood(fit.model, fit.guide)
    size = batch_size(fit, integration, n)
    values = fit.cached(
        ("rows", n, str(integration)),
        lambda: jit_once(log_likelihoods_of_rows(fit.model, likelihood, fit.algorithm, size)),
    )
    down = down_of(fit.guide, run.shared, jnp.asarray(drawn.unconstrained(key, n)))
    parts = []
    for j in range(run.num_silos):
        data = run._silos.at(j, [batch.data for batch in run._silos.batches])
        found, counts = values(jax.random.fold_in(key, j), down, run._silo_state(j), data)
        parts.append(np.asarray(found)[:, np.asarray(counts)])
    return np.concatenate(parts, 1)
