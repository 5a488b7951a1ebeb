"""PSIS-LOO by row of draws of NUTS: log likelihoods of rows at all latents, smoothed by ArviZ."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_fed.after.own_rows import Asked, OwnRows
from numpyro_fed.after.predict import SEEN, At, Draws, Programs, compiled
from numpyro_fed.after.predictions import outcomes_and_rows, parameters_of
from numpyro_fed.after.run import Run
from numpyro_fed.algorithms.importance.loo import MAX_K, RowSums, plates_of_rows
from numpyro_fed.errors import MissingExtraError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.densities import log_prob
from numpyro_fed.model.handlers import local_name
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.row_checks import refuse_parameters_of_rows
from numpyro_fed.results.arviz import LOG_LIKELIHOOD, POSTERIOR, Named, chains_to_arviz
from numpyro_fed.results.loo import Loo, RowsOfSilo
from numpyro_fed.tracing import TRACING

ROWS = "rows"


def rows_left_out(
    run: Run, chains: Mapping[str, np.ndarray], samples: Mapping[str, np.ndarray], worth: int
) -> Loo:
    """Return the table of draws (chains, n, ...) of the globals, worth so many effective draws.

    ``samples`` has the draws of all sites, chains joined.

    Raises
    ------
    ModelError
        If rows have parameters of their own.
    MissingExtraError
        If ArviZ is not installed.
    """
    try:
        import arviz
    except ImportError as error:
        raise MissingExtraError("arviz", "examples") from error
    refuse_parameters_of_rows(run._fit.model)
    by_plate = log_likelihoods(run, samples)
    values = [np.concatenate(list(of_silo.values()), 1) for of_silo in by_plate]
    joined = np.concatenate(values, 1)
    shape = next(iter(chains.values())).shape[:2] if chains else (1, len(joined))
    posterior = {k: Named(v) for k, v in chains.items()} or {ROWS: Named(np.zeros(shape))}
    by_chain = joined.reshape(*shape, joined.shape[1])
    density_of = {"y": Named(by_chain, (ROWS,))}
    data = chains_to_arviz({POSTERIOR: posterior, LOG_LIKELIHOOD: density_of})
    with warnings.catch_warnings():
        # Of k-hats above 0.7, which the table counts.
        warnings.simplefilter("ignore", UserWarning)
        found = arviz.loo(data, pointwise=True, reff=None if chains else 1.0)
    early = arviz.__version__.startswith("0.")
    density = np.asarray(found["loo_i"] if early else found["elpd_i"], np.float64)
    k = np.asarray(found["pareto_k"], np.float64)
    p_loo = float(found["p_loo"] if early else found["p"])
    ends = np.cumsum([v.shape[1] for v in values])[:-1]
    parts = (np.split(a, ends) for a in (density, k))
    silos = tuple(RowsOfSilo(*part) for part in zip(*parts, strict=True))
    total = density.sum()
    bad = (~(k <= MAX_K)).sum()
    sums = RowSums(*map(jnp.asarray, (total, (density**2).sum(), total + p_loo, bad, len(k))))
    return Loo.of(sums, worth, 0, silos)


def log_likelihoods(run: Run, samples: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the log likelihoods {plate: (draws, rows)} of each silo's rows with an outcome."""
    fm, silos = run._fit.model, range(run.num_silos)
    programs: Programs = run._fit.cached(ROWS, lambda: compiled(_terms(fm)))
    shared: dict[str, Any] = {s.name: samples[s.name] for s in fm.named("latent")}
    local = [s.name for s in fm.sites if s.kind == "latent" and s.plate is not None]
    asked = [
        Asked(
            j,
            jax.random.key(0),
            parameters_of(run, j),
            shared | {name: samples[local_name(j, name)] for name in local},
        )
        for j in silos
    ]
    plate_of = {SEEN + s.name: s.plate for s in fm.sites if s.kind == "observed"}
    values = []
    parts = OwnRows(run, programs, asked).values()
    for rows, outcomes in zip(parts, outcomes_and_rows(run, silos), strict=True):
        kept = {}
        for plate in plates_of_rows(fm):
            seen = [outcomes[name] for name, p in plate_of.items() if p == plate]
            terms = np.asarray(rows[plate])
            kept[plate] = terms[:, np.any(seen, 0)] if seen else terms
        values.append(kept)
    return values


def _terms(fm: FederatedModel) -> At:
    """Return the function to the log likelihood of each row, by plate."""
    plates = plates_of_rows(fm)
    sites = [s for s in fm.sites if s.kind in ("observed", "factor") and s.plate in plates]

    def at(key: Array, values: Draws, data: SiloData) -> dict[str, Array]:
        text = handlers.seed(handlers.substitute(fm.text, data=dict(values)), key)
        with TRACING, handlers.block():
            trace = handlers.trace(text).get_trace(**data.kwargs)
        sizes = fm.sizes(data)
        found = {plate: jnp.zeros(sizes[plate]) for plate in plates}
        for s in sites:
            frames = {f.name: f.dim for f in trace[s.name]["cond_indep_stack"]}
            plate = str(s.plate)
            rows = jnp.moveaxis(log_prob(trace[s.name]), frames[plate], 0)
            found[plate] += rows.reshape(len(rows), -1).sum(1)
        return found

    return at
