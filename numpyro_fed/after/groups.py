"""The groups of an ArviZ object beside the posterior: predictions, densities, and the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import (
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    POSTERIOR,
    ROW,
    Labels,
    Named,
    axis_name,
    to_arviz,
)
from numpyro_fed.after.own_rows import (
    ALL,
    OWN_ROWS,
    Run,
    WhichSilo,
    chosen_silos,
    drawn_from_prior,
    outcomes_and_rows,
)
from numpyro_fed.after.predict import SEEN
from numpyro_fed.after.questions import Questions
from numpyro_fed.after.sensitivity import log_prior_on_supports
from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.precision import precision
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data.batches import arrays_with_rows
from numpyro_fed.sfvi.algorithm import down_of
from numpyro_fed.text.log_density import axes_of
from numpyro_fed.text.row_checks import refuse_coupled_rows
from numpyro_fed.weigh.integration import Integration
from numpyro_fed.weigh.log_likelihoods import log_likelihoods_of_rows, plates_of_rows

GROUPS = (
    POSTERIOR,
    "prior",
    "posterior_predictive",
    "prior_predictive",
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    "observed_data",
    "constant_data",
)
SILO = "silo"


Group = dict[str, Named]


def groups_to_arviz(
    posterior: Questions,
    key: Array | None,
    num_samples: int,
    *,
    silo: WhichSilo | None,
    groups: Sequence[str] | str,
    labels: Labels,
    worth: float = math.inf,
    num_chains: int = 1,
    attributes: Mapping[str, float | str] | None = None,
) -> Any:
    """Return draws of a posterior, and further groups of the same draws, for ArviZ."""
    everything = groups == ALL
    if isinstance(groups, str) and not everything:
        raise ValueError(
            f"groups={groups!r}: expected '{ALL}' or a list of names from {list(GROUPS)}, got a "
            f"word. Pass groups=[{groups!r}] for one group."
        )
    asked = list(GROUPS if everything else groups)
    if unknown := [name for name in asked if name not in GROUPS]:
        raise ValueError(
            f"groups={asked}: '{unknown[0]}' is none of {list(GROUPS)}. Pass some of these, "
            f"or groups='{ALL}'."
        )
    asked = [name for name in asked if name != POSTERIOR]

    def sample(key: Array, n: int) -> dict[str, Any]:
        draws = posterior.sample_posterior(key, n, silo=silo)
        if silo is None:
            return dict(draws)
        # The rows of latents are numbered over all silos, from 0 on: an effect of each hospital
        # has the hospital's number. Axes have the names of plates.
        run, found = posterior.run_behind, dict[str, Any](draws)
        for s in run._fit.model.sites:
            if s.kind != "latent" or s.plate is None or s.name not in draws:
                continue
            values, along = np.asarray(draws[s.name]), s.axis or 0
            axis, numbers = axis_name(s.plate, ()), np.arange(values.shape[1 + along])
            if silo != ALL:
                chosen = chosen_silos(silo, run.num_silos)
                sizes = [run._hosted(j).sizes_of(j)[s.plate] for j in range(max(chosen) + 1)]
                ends = np.cumsum([0, *sizes])
                numbers = np.concatenate([np.arange(ends[j], ends[j + 1]) for j in chosen])
            axes = [*(f"{s.name}_dim_{i}" for i in range(along)), axis]
            found[s.name] = Named(values, tuple(axes), {axis: numbers})
        return found

    def more(key: Array, n: int) -> dict[str, Group]:
        found: dict[str, Group] = {}
        with precision(double=posterior.double):
            for group in asked:
                try:
                    values = _values(posterior, key, n, group)
                except (DataError, ModelError):
                    if not everything:
                        raise
                    continue
                if values or not everything:
                    found[group] = values
        return found

    return to_arviz(
        sample,
        key,
        num_samples,
        worth=worth,
        num_chains=num_chains,
        attributes=attributes,
        more=more if asked else None,
        labels=labels,
    )


def _values(posterior: Questions, key: Array, n: int, group: str) -> Group:
    """Return the values of one group, without an axis of chains."""
    run = posterior.run_behind
    if group == "prior":
        prior = drawn_from_prior(run, jax.random.fold_in(key, 0), n)
        return {} if prior is None else {k: Named(np.asarray(v)) for k, v in prior.items()}
    if group == LOG_PRIOR:
        z_G = posterior.unconstrained(key, n)
        found = log_prior_on_supports(run._fit.model, run.shared.theta, z_G)
        return {"globals": Named(found)}
    rows = Rows(run)
    if group == "posterior_predictive":
        return rows.joined(posterior.predict(key, silo=OWN_ROWS, n=n), 1)
    if group == "prior_predictive":
        return rows.joined(posterior.prior_predict(key, n=n), 1)
    if group == LOG_LIKELIHOOD:
        return rows.densities(posterior.log_likelihoods(key, n))
    return rows.joined(rows.found, 0) if group == "observed_data" else rows.constants()


class Rows:
    """The rows of all silos of this process that have an outcome, side by side, plate by plate.

    ``sizes`` are the rows of each plate at each silo, ``plates`` the plate of each outcome,
    ``single`` whether that is one for all, ``axes`` the plate along each axis of an outcome (empty
    where there is none), ``found`` the outcomes of each silo and which rows have them, ``taken``
    the names of sites and arguments, which no axis may have.
    """

    def __init__(self, run: Run) -> None:
        fm, hosted, silos = run._fit.model, run._hosted(0), range(run.num_silos)
        self.data, self.sizes = hosted.data, [hosted.sizes_of(j) for j in silos]
        self.plates = {s.name: str(s.plate) for s in fm.sites if s.kind == "observed" and s.plate}
        self.single = len(set(self.plates.values())) <= 1
        self.axes = axes_of(fm, hosted.data[0])
        self.found = outcomes_and_rows(run, silos)
        self.taken = {s.name for s in fm.sites} | set(hosted.data[0].arrays)

    def axis_name(self, plate: str) -> str:
        """Return the name of the axis that runs along a plate."""
        of_rows = plate in self.plates.values()
        name = ROW if self.single and of_rows else plate
        return axis_name(name, self.taken)

    def seen(self, silo: int, plate: str) -> np.ndarray:
        """Return which rows of a plate have any outcome (rows,) at a silo."""
        each = [self.found[silo][SEEN + name] for name, p in self.plates.items() if p == plate]
        return np.asarray(np.any(each, 0))

    def joined(self, parts: Sequence[Mapping[str, Any]], first: int) -> Group:
        """Return outcomes, or their predictions, of all silos with rows along axis ``first``."""
        values = {}
        for name, plate in self.plates.items():
            axes = self.axes[name]
            axis = first + axes.index(plate)
            kept = [
                np.moveaxis(np.asarray(part[name]), axis, first).compress(
                    self.seen(j, plate), first
                )
                for j, part in enumerate(parts)
            ]
            ordered = [plate, *(p for p in axes if p != plate)]
            names = [self.axis_name(p) if p else f"{name}_dim_{i}" for i, p in enumerate(ordered)]
            values[name] = Named(np.concatenate(kept, first), tuple(names))
        return values

    def densities(self, parts: Sequence[Mapping[str, np.ndarray]]) -> Group:
        """Return the log likelihoods (n, rows) of all silos, by outcome where a plate has one."""
        values = {}
        for plate in parts[0]:
            names = [name for name, p in self.plates.items() if p == plate]
            several = "rows" if self.single else f"rows of {plate}"
            name = names[0] if len(names) == 1 else several
            joined = np.concatenate([part[plate] for part in parts], 1)
            values[name] = Named(joined, (self.axis_name(plate) if names else f"{plate}_dim",))
        return values

    def constants(self) -> Group:
        """Return the number of each row's silo, and arguments of the model with so many rows."""
        found: dict[str, Named] = {}
        of_key = arrays_with_rows(self.data, self.sizes)
        for plate in dict.fromkeys(self.plates.values()):
            seen = [self.seen(j, plate) for j in range(len(self.data))]
            axis = (self.axis_name(plate),)
            numbers = np.repeat(np.arange(len(seen)), [int(s.sum()) for s in seen])
            found[SILO if self.single else f"{SILO} of {plate}"] = Named(numbers, axis)
            same = [p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes)]
            for name in self.data[0].arrays:
                values = [np.asarray(d.arrays[name]) for d in self.data if name in d.arrays]
                shapes = {v.shape[1:] for v in values}
                if of_key.get(name) not in same or len(values) < len(seen) or len(shapes) > 1:
                    continue
                kept = [v[s] for v, s in zip(values, seen, strict=True)]
                found.setdefault(name, Named(np.concatenate(kept), axis))
        return found


def log_likelihood(
    run: Any, integration: Integration, key: Array, z_G: Array
) -> list[dict[str, np.ndarray]]:
    """Return the log likelihoods {plate: (n, rows)} of the rows of each silo at draws (n, dim).

    Their own latents are integrated out; those of outer plates (a hospital's effect) are drawn at
    each draw of the globals.
    """
    fit, n = run._fit, len(z_G)
    refuse_coupled_rows(fit.checks, run._silos.buckets, "log likelihoods of rows need")
    likelihood = integration.likelihood(fit.model, fit.guide)
    size = fit.batch_size(integration, n)
    values = fit.cached(
        ("rows", n, str(integration)),
        lambda: jit_once(log_likelihoods_of_rows(fit.model, likelihood, fit.algorithm, size)),
    )
    down = down_of(fit.guide, run.shared, jnp.asarray(z_G))
    parts = []
    for j in range(run.num_silos):
        data = run._silos.at(j, [batch.data for batch in run._silos.batches])
        key_silo, state = jax.random.fold_in(key, j), run._silo_state(j)
        found, counts = jax.block_until_ready(values(key_silo, down, state, data))
        by_plate, first = {}, 0
        for plate in plates_of_rows(fit.model):
            rows = slice(first, first := first + fit.model.sizes(data)[plate])
            by_plate[plate] = np.asarray(found)[:, rows][:, np.asarray(counts)[rows]]
        parts.append(by_plate)
    return parts
