"""Posteriors as ArviZ objects, for its versions before 1 and since.

Beside draws there are further groups: predictions, densities, and the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.after.own_rows import (
    Run,
    WhichSilo,
    chosen_silos,
    drawn_from_prior,
    outcomes_and_rows,
)
from numpyro_fed.after.predict import SEEN
from numpyro_fed.after.questions import Questions
from numpyro_fed.after.sensitivity import log_prior_on_supports
from numpyro_fed.basics.errors import DataError, ModelError, optional
from numpyro_fed.basics.programs import precision
from numpyro_fed.data.padding import arrays_with_rows
from numpyro_fed.data.silo_data import ALL, OWN_ROWS
from numpyro_fed.text.log_density import axes_of

POSTERIOR, LOG_LIKELIHOOD, LOG_PRIOR = "posterior", "log_likelihood", "log_prior"
ROW = "row"  # the name of the axis of rows
CONSTANT_DATA = "constant_data"
OF_DATA = "observed_data", CONSTANT_DATA  # groups without draws
OF_DRAWS = "chain", "draw"

Coords = Mapping[str, Collection[object]]
Dims = Mapping[str, Sequence[str]]
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


class Named(NamedTuple):
    """Values of a variable of a group, with the names of their axes after that of draws.

    ArviZ names axes that are not there. ``numbers`` are the coordinates of an axis, if known.
    """

    values: np.ndarray
    axes: tuple[str, ...] = ()
    numbers: Mapping[str, np.ndarray] = {}


class Labels(NamedTuple):
    """The names that a user gives to axes and their elements, as for ``arviz.from_numpyro``."""

    coords: Coords
    dims: Dims

    @classmethod
    def of(cls, coords: Coords | None, dims: Dims | None) -> Labels:
        """Return the labels that a user has passed; None stands for none."""
        coords, dims = coords or {}, dims or {}
        for argument, given in (("coords", coords), ("dims", dims)):
            for name, value in given.items():
                if isinstance(value, str) or not hasattr(value, "__len__"):
                    what = "a word" if isinstance(value, str) else type(value).__name__
                    raise ValueError(
                        f"{argument}={{{name!r}: {value!r}}}: expected a list, got {what}: pass "
                        f"{argument}={{{name!r}: [{value!r}]}}."
                    )
        return cls(coords, dims)


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
    n, key = _number_and_key(num_samples, worth, key)
    draws = posterior.sample_posterior(key, n, silo=silo)
    named = {name: Named(np.asarray(value)) for name, value in draws.items()}
    # The rows of latents are numbered over all silos, from 0 on: an effect of each hospital has the
    # hospital's number. Axes have the names of plates.
    for s in () if silo is None else posterior.run_behind._fit.model.sites:
        if not s.is_local_latent or s.name not in draws:
            continue
        values, along = named[s.name].values, s.axis or 0
        axis, numbers = axis_name(s.plate), np.arange(values.shape[1 + along])
        if silo is not None and silo != ALL:
            run = posterior.run_behind
            chosen = chosen_silos(silo, run)
            sizes = [run._hosted(j).sizes_of(j)[s.plate] for j in range(max(chosen) + 1)]
            ends = np.cumsum([0, *sizes])
            numbers = np.concatenate([np.arange(ends[j], ends[j + 1]) for j in chosen])
        axes = *(f"{s.name}_dim_{i}" for i in range(along)), axis
        named[s.name] = Named(values, axes, {axis: numbers})
    found = {POSTERIOR: named}
    for group in [name for name in asked if name != POSTERIOR]:
        try:
            with precision(double=posterior.double):
                of_group = _values(posterior, key, n, group)
        except (DataError, ModelError):
            if not everything:
                raise
            continue
        if of_group or not everything:
            found[group] = of_group
    return chains_to_arviz(found, labels, num_chains=num_chains, attributes=attributes)


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
        return axis_name(ROW if self.single and of_rows else plate, self.taken)

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


def axis_name(name: str, taken: Collection[str] = ()) -> str:
    """Return the name of an axis, which is that of no variable: ArviZ takes none."""
    return f"{name}_dim" if name in taken or name in OF_DRAWS else name


def to_arviz(
    sample: Callable[[Array, int], Mapping[str, Any]],
    key: Array | None,
    num_samples: int,
    *,
    worth: float,
    attributes: Mapping[str, float | str] | None,
    labels: Labels,
) -> Any:
    """Return the draws ``sample(key, n)``, {site: (n, *shape)}, as an ArviZ object.

    The weighted draws behind them are ``worth`` so many even ones.
    """
    n, key = _number_and_key(num_samples, worth, key)
    named = {name: Named(np.asarray(value)) for name, value in sample(key, n).items()}
    return chains_to_arviz({POSTERIOR: named}, labels, attributes=attributes)


def _number_and_key(num_samples: int, worth: float, key: Array | None) -> tuple[int, Array]:
    """Return how many draws ArviZ gets, at most as many as they are worth, and their key."""
    # Draws that are resampled by weights repeat, and ArviZ counts a repeated draw as several.
    return max(1, int(min(num_samples, worth))), jax.random.key(0) if key is None else key


def chains_to_arviz(
    groups: Mapping[str, Group],
    labels: Labels | None = None,
    *,
    num_chains: int = 1,
    attributes: Mapping[str, float | str] | None = None,
) -> Any:
    """Return groups as ArviZ's ``DataTree``, or its ``InferenceData`` before ArviZ 1.

    Draws (n, ...) are those of ``num_chains`` chains, one after the other. ``attributes`` are those
    of the group ``"posterior"``, which is one of them.
    """
    arviz = optional("arviz")
    early = arviz.__version__.startswith("0.")
    data: Any = None
    labels = labels or Labels.of(None, None)
    # An argument may have the name of a latent, but has rows.
    others = {k: v for k, v in labels.dims.items() if k not in groups[POSTERIOR]}
    # One group at a time: a variable has other axes in each.
    for group, values in groups.items():
        chained = dict(values)
        if group not in OF_DATA:
            for name, (draws, *_) in values.items():
                by_chain = draws.reshape(num_chains, -1, *draws.shape[1:])
                chained[name] = values[name]._replace(values=by_chain)
        whole = {group: {k: v.values for k, v in chained.items()}}
        here = labels._replace(dims=others) if group == CONSTANT_DATA else labels
        axes: dict[str, Any] = axes_in(group, chained, here)
        if early and group == LOG_PRIOR:  # a group that from_dict does not know there
            data.add_groups(whole, **axes)
            continue
        # ArviZ 1 takes a dict of groups, and keyword arguments no longer.
        arguments: dict[str, Any] = {**whole, **axes}
        found = arviz.from_dict(**arguments) if early else arviz.from_dict(whole, **axes)
        if data is None:
            data = found
        elif early:
            data.extend(found)
        else:
            data[group] = found[group]
    data[POSTERIOR].attrs.update(attributes or {})
    return data


def axes_in(group: str, values: Mapping[str, Named], labels: Labels) -> dict[str, dict[str, Any]]:
    """Return the names of axes, and their coordinates, in a group: ``dims`` and ``coords``."""

    def in_words(names: Sequence[str], shape: Sequence[int]) -> str:
        found = [f"'{name}' ({size})" for name, size in zip(names, shape, strict=True)]
        words = f"{len(found)} axes, {' and '.join(found)},"
        return words if found else "no axes but those of draws"

    dims: dict[str, list[str]] = {}
    coords: dict[str, np.ndarray] = {}
    for name, value in values.items():
        shape = value.values.shape[0 if group in OF_DATA else len(OF_DRAWS) :]
        chosen = list(labels.dims.get(name, ()))
        if group == LOG_LIKELIHOOD:  # of a row as a whole, whatever the axes of its outcome
            chosen = chosen[: len(shape)]
        # Versions of ArviZ name the other axes differently.
        own = [*value.axes, *(f"{name}_dim_{i}" for i in range(len(value.axes), len(shape)))]
        # One name for a hospital's effects might be meant for the effects: it is the hospitals'.
        of_plate = group == POSTERIOR and value.axes and chosen != own[: len(chosen)]
        if len(chosen) > len(shape) or (of_plate and len(value.axes) < len(own) > len(chosen)):
            rest = [word for word in chosen if word not in OF_DRAWS][: len(own)]
            meant = [*own[: len(own) - len(rest)], *rest]
            raise ValueError(
                f"dims={{{name!r}: {chosen}}}: '{name}' has {in_words(own, shape)} in the group "
                f"'{group}', and {len(chosen)} came. "
                + (f"Pass dims={{{name!r}: {meant}}}." if own else f"Leave out '{name}'.")
            )
        dims[name] = named = [*chosen, *own[len(chosen) :]]
        for i, (axis, size) in enumerate(zip(named, shape, strict=True)):
            if axis not in labels.coords:
                coords |= {axis: value.numbers[axis]} if axis in value.numbers else {}
                continue
            coords[axis] = np.asarray(labels.coords[axis])
            if (number := len(coords[axis])) != size:
                other = shape.index(number) if number in shape and axis != own[i] else i
                meant = [*own[:other], axis, *own[other + 1 :]]
                raise ValueError(
                    f"coords={{{axis!r}: ...}}: expected {size} values, since '{name}' has "
                    f"{in_words(named, shape)} in the group '{group}', and got {number}. "
                    + ("Pass as many." if other == i else f"Pass dims={{{name!r}: {meant}}}.")
                )
    # ArviZ takes no variable of an axis's name.
    renamed = {axis: f"{axis}_dim" for axis in values}
    return {
        "dims": {k: [renamed.get(axis, axis) for axis in v] for k, v in dims.items() if v},
        "coords": {renamed.get(axis, axis): v for axis, v in coords.items()},
    }


def elpd_data(values: np.ndarray, k: np.ndarray, *, p: float, num_draws: int) -> Any:
    """Return log predictive densities (n,) of parts of the data as ArviZ's ``ELPDData``.

    ``k`` (n,) are the shapes of tails, and ``p`` is the effective number of parameters.
    """
    arviz, xarray = optional("arviz"), optional("xarray")
    n, good_k = len(values), 0.7
    pointwise, tails = (
        xarray.DataArray(a, dims="row", coords={"row": np.arange(n)}, name=name)
        for a, name in ((values, "loo_i"), (k, "pareto_k"))
    )
    elpd, se = float(values.sum()), float(np.sqrt(n * np.var(values)))
    heavy = bool((k > good_k).any())
    early = arviz.__version__.startswith("0.")
    names = ("elpd_loo", "p_loo", "loo_i") if early else ("elpd", "p", "elpd_i")
    fields = {  # the printing of early versions goes by the order
        names[0]: elpd,
        "se": se,
        names[1]: p,
        "n_samples": num_draws,
        "n_data_points": n,
        "warning": heavy,
        names[2]: pointwise,
        "pareto_k": tails,
        "scale": "log",
        "good_k": good_k,
    }
    if early:
        return arviz.ELPDData(data=list(fields.values()), index=list(fields))
    from arviz_stats.utils import ELPDDataLOO

    return ELPDDataLOO(**fields)
