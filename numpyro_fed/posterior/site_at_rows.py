"""The values of a text's site at the rows of a silo, where some arguments are changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.random import fold_in
from numpyro import handlers

from numpyro_fed.after.predict import mean_of
from numpyro_fed.basics.errors import DataError, ModelError, is_number
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.padding import arrays_with_rows
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.guides.silo_bounds import AtDraw
from numpyro_fed.posterior.sampler import Sampler
from numpyro_fed.rounds.exchange import Combine, Exchange, key_as_noise
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.text.handlers import OBSERVED, UNOBSERVED, without_outcomes
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts
from numpyro_fed.text.silo_plate import silo_plate_of
from numpyro_fed.text.trace import ARRAY, VALUE
from numpyro_fed.text.trace import OBSERVED as OBSERVED_VALUE


@dataclass(frozen=True, eq=False)
class SiteAtRows:
    """The values of a text's site at the rows of a silo, some arguments of which are changed.

    ``changes`` {argument: number, or {column: number}} are made at all rows. Where they are lists
    of numbers, values are those at each of them.
    """

    model: FederatedModel
    site: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def at(self, sampler: Sampler, key: Array, given: AtDraw, data: SiloData) -> Array:
        """Return the values (rows, ...) at one draw of the globals; of an outcome its means.

        Under lists of changes they are (rows, points, ...).
        """
        fm, theta = self.model, given.theta
        z_L = fm.zero_latents(data) | sampler.bound.sample(key, given)
        sites = fm.constrain_global(theta, given.z_G)
        sites |= fm.constrain_local(theta, given.z_G, z_L, data, fold_in(key, 3))
        drawn = {s.name for s in fm.sites if s.kind in ("latent", "discrete")}
        values = fm.constrain_theta(theta) | {n: v for n, v in sites.items() if n in drawn}
        return self.of_text(key, values, data)

    def of_text(self, key: Array, values: Mapping[str, Array], data: SiloData) -> Array:
        """Return them at these values of latents and parameters; others are drawn by the key."""
        if (number := num_points(self.changes)) is None:
            return self._at_point(key, values, data, 0)
        at = partial(self._at_point, key, values, data)
        return jnp.moveaxis(jax.lax.map(at, jnp.arange(number)), 0, 1)

    def _at_point(
        self, key: Array, values: Mapping[str, Array], data: SiloData, point: Array | int
    ) -> Array:
        """Return them under one of the changes, by its number."""
        fm, changed = self.model, replace(data, arrays=self._changed(data.arrays, point))
        # Other outcomes are as they are, a covariate that the text models among them.
        kept = [s.name for s in fm.sites if s.kind == "observed" and s.name != self.site]

        def run(values: Mapping[str, Array]) -> dict[str, Any]:
            text = handlers.substitute(without_outcomes(fm.text, kept), data=dict(values))
            with TRACING, handlers.block():
                found: dict[str, Any] = handlers.trace(handlers.seed(text, key)).get_trace(
                    **changed.kwargs
                )
            return found

        trace = run(values)
        if overwritten := self._overwritten(data):
            observed = {n: trace[n.removesuffix(UNOBSERVED) + OBSERVED] for n in overwritten}
            trace = run({**values, **{n: site["value"] for n, site in observed.items()}})
        site = trace[self.site]
        value = mean_of(site) if site["type"] == "sample" else jnp.asarray(site["value"])
        return jnp.moveaxis(value, self._axis(site, value, data), 0)

    def _overwritten(self, data: SiloData) -> list[str]:
        """Return the latents of missing covariates (``obs_mask``) that a change decides over."""
        trace = self.model.traces.at(data)
        covariates = (name.removesuffix(OBSERVED) for name in self.model.covariates)
        return [
            name + UNOBSERVED
            for name in covariates
            if trace.reads((OBSERVED_VALUE, name + OBSERVED), ARRAY) & {*self.changes}
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values at one row."""
        found = jax.eval_shape(partial(self.of_text, jax.random.key(0), {}), self.model.silo)
        return tuple(found.shape[1:])

    @property
    def plate(self) -> str:
        """Return the silo plate of the site."""
        return next(str(s.plate) for s in self.model.sites if s.name == self.site)

    def _axis(self, site: Mapping[str, Any], value: Array, data: SiloData) -> int:
        """Return the axis of a value along which rows are."""
        dim = next(f.dim for f in site["cond_indep_stack"] if f.name == silo_plate_of(dict(site)))
        if site["type"] == "sample":
            return value.ndim - site["fn"].event_dim + dim
        sizes = self.model.sizes(data)
        trace, rows = self.model.traces.at(data), arrays_with_rows([data], [sizes])
        own = [name for name, plate in rows.items() if plate == self.plate]
        axis = trace.axis_of_rows((VALUE, self.site), self.plate, own)
        if axis is not None:
            return axis
        number = sizes[self.plate]
        axes = [value.ndim + dim, *range(value.ndim)]
        found = [i for i in axes if i >= 0 and value.shape[i] == number]
        if not found:
            raise ModelError(
                f"the site '{self.site}' has the shape {value.shape}, and no axis for the {number} "
                f"rows of silo_plate '{self.plate}', over which it could be averaged."
            )
        return found[0]

    def _changed(self, arrays: Mapping[str, Array], point: Array | int) -> dict[str, Array]:
        """Return the arrays under one of the changes, by its number."""
        found = dict(arrays)
        for name, change in self.changes.items():
            old = found[name]
            if isinstance(change, Mapping):
                for column, numbers in change.items():
                    old = _as(old, numbers)
                    old = old.at[:, int(column)].set(_number(numbers, point, old))
                found[name] = old
            else:
                old = _as(old, change)
                found[name] = jnp.full_like(old, _number(change, point, old))
        return found


def _as(array: Array, numbers: float | list[float]) -> Array:
    """Return an array in a dtype that holds numbers."""
    whole = all(float(n).is_integer() for n in np.ravel(numbers))
    return array if whole or array.dtype.kind == "f" else array.astype(jnp.result_type(float))


def _number(numbers: float | list[float], point: Array | int, like: Array) -> Array:
    """Return the number at a point, in the dtype of an array."""
    found = jnp.asarray(numbers, like.dtype)
    return found[point] if found.ndim else found


def num_points(changes: Mapping[str, Any]) -> int | None:
    """Return how many numbers there are in lists of changes; None if there is no list."""
    each = [n for c in changes.values() for n in (c.values() if isinstance(c, Mapping) else [c])]
    return next((len(n) for n in each if isinstance(n, list)), None)


def checked_changes(facts: Facts, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of arguments, columns by number; raise an error for what is not there."""
    arguments, columns = {a.name: a for a in facts.arguments}, dict(facts.columns)
    found: dict[str, Any] = {}
    for name, change in changes.items():
        if name not in arguments:
            raise DataError(
                f"changes: '{name}' is no array that all silos have. They have {[*arguments]}."
            )
        of_columns = change if isinstance(change, Mapping) else {None: change}
        known, width = columns.get(name, ()), arguments[name].shape[:1]
        numbers: dict[Any, float | list[float]] = {}
        for column, number in of_columns.items():
            each = np.ravel(number).tolist() if np.ndim(number) == 1 else [number]
            each = [int(n) if isinstance(n, bool | np.bool_) else n for n in each]
            if not each or not all(map(is_number, each)):
                text = any(isinstance(n, str) for n in each)
                code = (
                    " The number of a text is its code: of a formula, its place from 0 on among "
                    f"formula.agreed.levels.names['{name}']."
                )
                raise DataError(
                    f"changes: '{name}' becomes {number!r}, and must be one number at all rows, "
                    f"or each of a list of numbers.{code if text else ''}"
                )
            place = known.index(column) if column in known else column
            if place is not None and not (width and place in range(width[0])):
                raise DataError(
                    f"changes: '{name}' has no column {column!r}. Its columns are "
                    f"{list(known) or list(range(*width)) if width else 'none: it is one column'}."
                )
            numbers[place] = list(map(float, each)) if np.ndim(number) else float(number)
        found[name] = numbers.get(None, {str(place): v for place, v in numbers.items()})
    lists = [v for c in found.values() for v in (c.values() if isinstance(c, Mapping) else [c])]
    lengths = {len(v) for v in lists if isinstance(v, list)}
    if len(lengths) > 1:
        raise DataError(f"changes: lists are of the lengths {sorted(lengths)}, and must be of one.")
    return found


def checked_site(fm: FederatedModel, name: str, kinds: Sequence[str]) -> None:
    """Raise an error for a site that is none of these kinds in a silo plate."""
    known = [s.name for s in fm.sites if s.kind in kinds and s.plate is not None]
    if name not in known:
        raise DataError(f"{name!r} is no site that rows have a value of: the model has {known}.")


def sum_exchange(
    name: str,
    silo: Callable[[Array, GlobalDraws, Any, SiloData], Any],
    messages: Callable[[], tuple[Any, Any]],
    settings: Mapping[str, Any],
    *,
    little: bool,
) -> Exchange[Any, Any, Any]:
    """Return an exchange in which silos send sums; by silo if the settings say so."""
    return StackedExchange(
        name,
        stacked_reply(silo, little=little),
        combine=Combine.GATHER if settings.get("by_silo") else Combine.SUM,
        silo_noise=key_as_noise,
        settings=json.dumps(dict(settings)),
        messages=messages,
    )
