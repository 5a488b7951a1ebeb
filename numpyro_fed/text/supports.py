"""Supports of observed sites: whether they hold what was observed, and their words for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution, constraints

from numpyro_fed.text.silo_plate import silo_frames

AnyArray = Array | np.ndarray
WRAPPERS = dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution
# Constraints that compare numbers and do nothing else.
PLAIN = (constraints.real, constraints.boolean)
BOUNDED = {
    type(c)
    for c in (
        *(constraints.positive, constraints.nonnegative, constraints.nonnegative_integer),
        *(constraints.unit_interval, constraints.interval(0, 1)),
        constraints.integer_interval(0, 1),
    )
}


WITHIN_BOUNDS = tuple(
    type(c)
    for c in (
        *(constraints.unit_interval, constraints.interval(0, 1), constraints.open_interval(0, 1)),
        *(constraints.simplex, constraints.circular, constraints.sphere),
        *(constraints.corr_cholesky, constraints.corr_matrix),
    )
)

Observed = tuple[AnyArray, AnyArray, AnyArray]  # as :func:`observed_at` returns them


class SiteSupport(NamedTuple):
    """The description of a site's distribution for messages, and for a check by NumPy alone."""

    name: str  # the name of the distribution
    takes: str  # the values of its support, in words
    remedy: str  # A sentence about what to do; it may be empty
    # the silo plates that the site is in, and their dims in the batch
    plates: tuple[tuple[str, int], ...]
    whole: bool  # whether the support has whole numbers only
    # the argument that the site observes as it is, where the support's bounds are but plain
    # numbers, so that NumPy can tell what is inside; else empty
    argument: str = ""
    support: constraints.Constraint | None = None  # None if it has all values
    event_dim: int = 0  # how many axes of a value belong to one event of the support
    rest: int = 0  # how many axes more belong to one event of the site

    def observed(self, value: np.ndarray) -> Observed:
        """Return what :func:`observed_at` returns, of the argument's value."""
        inside, edge = map(np.asarray, _closed(self.support, value, self.event_dim, np))
        axes = tuple(range(inside.ndim - self.rest, inside.ndim))
        return value, np.all(inside, axes), np.any(edge, axes)


def site_support(site: dict[str, Any], arguments: Mapping[str, Any]) -> SiteSupport:
    """Return the description of a site of a trace, whose text was run with these arguments."""
    fn, value, rest, masked = site["fn"], site["value"], 0, False
    argument = next((name for name, a in arguments.items() if a is value), "")
    shape, expected = jnp.shape(value), fn.batch_shape + fn.event_shape
    plain = bool(argument) and jnp.broadcast_shapes(shape, expected) == shape
    while isinstance(fn, WRAPPERS):
        masked |= isinstance(fn, dist.MaskedDistribution) and fn._mask is not True
        rest += fn.reinterpreted_batch_ndims if isinstance(fn, dist.Independent) else 0
        fn = fn.base_dist
    name, support = type(fn).__name__, _support_of(fn)
    name = {"BernoulliProbs": "Bernoulli", "BernoulliLogits": "Bernoulli"}.get(name, name)
    takes, remedy = _words(support)
    if name.startswith("Categorical"):
        name, remedy = "Categorical", "Categories count from 0. "
    if isinstance(fn, dist.Beta):
        remedy = "(y * (n - 1) + 0.5) / n moves 0 and 1 of n values inside. "
    plates = tuple((f.name, f.dim) for f in silo_frames(site) or site["cond_indep_stack"])
    found = SiteSupport(name, takes, remedy, plates, bool(getattr(support, "is_discrete", False)))
    if masked or not plain or not _is_plain(support):
        return found
    return found._replace(argument=argument, support=support, event_dim=fn.event_dim, rest=rest)


def observed_at(site: dict[str, Any]) -> Observed:
    """Return observed values (batch shape, event shape), and whether each is possible, by element.

    The second value (batch shape) says whether one is in the support or on its edge, or masked; the
    third whether it is on the edge.
    """
    fn, value = site["fn"], jnp.asarray(site["value"])
    whole = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape + fn.event_shape)
    value = jnp.broadcast_to(value, whole)
    batch = whole[: len(whole) - fn.event_dim]
    inside, edge = _in_support(fn, value)
    return value, jnp.broadcast_to(inside, batch), jnp.broadcast_to(edge, batch)


def _in_support(fn: Distribution, value: Array) -> tuple[AnyArray, AnyArray]:
    """Return whether a value is in the support, and whether on its edge, in the batch shape."""
    if isinstance(fn, dist.MaskedDistribution):
        inside, edge = _in_support(fn.base_dist, value)
        return inside | ~jnp.asarray(fn._mask), edge & jnp.asarray(fn._mask)
    if isinstance(fn, dist.Independent):
        inside, edge = _in_support(fn.base_dist, value)
        axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        return jnp.all(inside, axes), jnp.any(edge, axes)
    if isinstance(fn, dist.ExpandedDistribution):
        return _in_support(fn.base_dist, value)
    return _closed(_support_of(fn), value, fn.event_dim, jnp)


def _closed(
    support: constraints.Constraint | None, value: AnyArray, event_dim: int, xp: ModuleType
) -> tuple[AnyArray, AnyArray]:
    """Return whether a value is in a support or on its edge, and whether on it."""
    nothing = xp.zeros(value.shape[: value.ndim - event_dim], bool)
    if support is None:
        return ~nothing, nothing
    try:
        discrete = support.is_discrete
        value = value if discrete else value.astype(jnp.result_type(float, value))
        inside = xp.asarray(support(value), bool)
    except (NotImplementedError, TypeError, ValueError):
        # The constraint cannot be evaluated: the value is left to the density.
        return ~nothing, nothing
    if discrete:
        return inside, nothing
    # A value is on the edge if the support changes within two units in the last place of single
    # precision: data often come in it, whatever precision is computed in. 1e-30 is a step from 0.
    single = float(np.finfo(np.float32).eps)
    step = xp.maximum(1e-30, 2 * single * xp.abs(value)).astype(value.dtype)
    below, above = (xp.asarray(support(v), bool) for v in (value - step, value + step))
    closed = inside | below | above
    return closed, closed & ~(inside & below & above)


def _support_of(fn: Distribution) -> constraints.Constraint | None:
    """Return the support of a distribution; None if it is not declared, or is all angles."""
    # An angle beyond (-pi, pi) is one within it: circular densities are periodic.
    try:
        support = fn.support
    except (NotImplementedError, AssertionError):
        return None
    return None if support is constraints.circular else support


def _is_plain(support: constraints.Constraint | None) -> bool:
    """Return whether a support is one of plain numbers, whose check NumPy can do as it stands."""
    if isinstance(support, constraints.independent):
        return _is_plain(support.base_constraint)
    bounds = (getattr(support, name, 0) for name in ("lower_bound", "upper_bound"))
    known = support is None or support in PLAIN or type(support) in BOUNDED
    return known and all(isinstance(b, int | float | np.number) for b in bounds)


def has_bounds(support: object) -> bool:
    """Return whether all values of a support lie between two numbers."""
    if isinstance(support, constraints.independent):
        return has_bounds(support.base_constraint)
    return isinstance(support, WITHIN_BOUNDS)


def bounds_of(support: object) -> tuple[float, float]:
    """Return the numbers between which all values of a support lie; infinite without a bound."""
    if isinstance(support, constraints.independent):
        return bounds_of(support.base_constraint)
    low, high = getattr(support, "lower_bound", -np.inf), getattr(support, "upper_bound", np.inf)
    whole = np.ndim(low) == np.ndim(high) == 0
    return (float(low), float(high)) if whole else (-np.inf, np.inf)


def _words(support: constraints.Constraint | None) -> tuple[str, str]:
    """Return the values of a support in words, and a remedy for other values."""
    simplex = "Divide them by their sum: y / y.sum(-1, keepdims=True). "
    known: list[tuple[Any, str, str]] = [
        (constraints.boolean, "0 and 1", "Outcomes coded 1 and 2 become 0 and 1 by y - 1. "),
        (constraints.nonnegative_integer, "whole numbers from 0", ""),
        (constraints.positive_integer, "whole numbers from 1", ""),
        (constraints.positive, "numbers above 0", ""),
        (constraints.nonnegative, "numbers from 0", ""),
        (constraints.unit_interval, "numbers between 0 and 1", ""),
        (constraints.simplex, "parts that sum to 1", simplex),
        (constraints.real, "finite numbers", "Look at what is computed of the data there. "),
    ]
    for constraint, words, remedy in known:
        if support is constraint:
            return words, remedy
    bounds = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    plain = not any(isinstance(b, jax.core.Tracer) or np.asarray(b).ndim for b in bounds)
    if isinstance(support, type(constraints.integer_interval(0, 1))):
        if plain:
            return f"whole numbers from {bounds[0]} to {bounds[1]}", ""
        return "whole numbers from 0 to the total count of the row", ""
    if isinstance(support, type(constraints.interval(0, 1))) and plain:
        return f"numbers between {bounds[0]} and {bounds[1]}", ""
    return f"values of the support {type(support).__name__.lstrip('_')}", ""
