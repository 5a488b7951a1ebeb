"""The check that observed values lie in the supports of their distributions, silo by silo.

A site is checked if its support and mask depend on data alone. One whose bounds are latents
(``Uniform(0, theta)``) is left to its density. On the edge of a support, as 0 and 1 are for a beta
distribution, the density decides: it is evaluated at a few points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution, constraints

from numpyro_fed.errors import DataError
from numpyro_fed.model.binding import Theta, trace_at
from numpyro_fed.model.data import SiloData, kind
from numpyro_fed.model.jaxprs import provenance
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.primitives import silo_frames
from numpyro_fed.model.sites import Site
from numpyro_fed.model.vertical import TOTAL, VerticalModel
from numpyro_fed.programs import compiled_method, jit_once

# Points at which the density on an edge is evaluated: latents and parameters at 0, 0.5 and 1. The
# value is refused only if the density is zero at all of them. A beta's density at 0, for example,
# is zero for a parameter above 1 and not for one below.
POINTS = 3


class ObservedValues(NamedTuple):
    """The observed values of a site, and whether its support has them.

    Attributes
    ----------
    value : array (batch shape, event shape)
    inside : bool array (batch shape)
        Whether the value is in the support or on its edge, or masked.
    edge : bool array (batch shape)
        Whether the value is on the edge of the support.
    """

    value: Array
    inside: Array
    edge: Array


class SupportKind(NamedTuple):
    """The description of a site's distribution for messages.

    Attributes
    ----------
    name : str
        The name of the distribution.
    takes : str
        The values of its support, in words.
    remedy : str
        A sentence about what to do; it may be empty.
    plates : tuple of (str, int)
        The silo plates that the site is in, and their dims in the batch.
    whole : bool
        Whether the support has whole numbers only.
    """

    name: str
    takes: str
    remedy: str
    plates: tuple[tuple[str, int], ...]
    whole: bool


At = Callable[[SiloData, Any], tuple[dict[str, Array], dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class Supports:
    """The check of a model's observed values, compiled once for each shape of silos.

    Attributes
    ----------
    sites : sequence of Site
    at : (data, point) -> (log probabilities, trace)
        Runs the text with every latent and parameter at one number, ``point``.
    owner : str
        The party's name in messages, with ``{}`` for a silo's number.
    """

    sites: Sequence[Site]
    at: At
    owner: str
    _known: dict[tuple[Hashable, ...], dict[str, SupportKind]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def _observed(self) -> list[str]:
        return [s.name for s in self.sites if s.kind == "observed"]

    @compiled_method(jit_once)
    def observed_values(self, stack: SiloData) -> dict[str, ObservedValues]:
        """Return the observed values of a stack of parties, by site."""
        return jax.vmap(self._observed_values)(stack)

    @compiled_method(jit_once)
    def densities_at_edges(self, stack: SiloData) -> dict[str, Array]:
        """Return whether the density of each value can be positive, by site."""
        return jax.vmap(self._has_density)(stack)

    @classmethod
    def of_silos(cls, fm: FederatedModel) -> Supports:
        """Return the check of a model whose rows are split over silos."""

        def at(data: SiloData, point: Array | float) -> Any:
            key, sizes = jax.random.key(0), fm.sizes(data)
            theta = _depending_on({**fm.init_theta(key), **fm.init_private(key, data)}, point)
            z_L = {p.name: jnp.full((sizes[p.name], p.dim), point) for p in fm.plates}
            return trace_at(fm.text, fm.sites, theta, jnp.full(fm.dim, point), z_L, data)

        return cls(fm.sites, at, "silo {}")

    @classmethod
    def of_server(cls, model: VerticalModel) -> Supports:
        """Return the check of the server of a vertical model, which holds the response."""
        party = model.server

        def at(data: SiloData, point: Array | float) -> Any:
            total = jnp.full(model.shape, point, model.dtype)
            whole = replace(data, arrays={**data.arrays, TOTAL: total})
            theta = _depending_on(party.init_theta(jax.random.key(0), whole), point)
            return party.log_probs(theta, jnp.full(party.dim, point), whole)

        return cls(party.sites, at, "the server")

    def check(self, b: Bucket) -> None:
        """Refuse an observed value that its distribution cannot have; the error says where."""
        if not self._checked_sites(jax.tree.map(lambda a: a[0], b.data)):
            return
        observed = jax.tree.map(np.asarray, self.observed_values(b.data))
        for name, site in observed.items():
            if not site.inside.all():
                self._refuse(b, name, site.value, ~site.inside, "")
        # Densities are compiled only if they are needed.
        if any(site.edge.any() for site in observed.values()):
            for name, possible in self.densities_at_edges(b.data).items():
                bad = observed[name].edge & ~np.asarray(possible)
                if bad.any():
                    why = " and has no density at the edge"
                    self._refuse(b, name, observed[name].value, bad, why)

    def _checked_sites(self, data: SiloData) -> dict[str, SupportKind]:
        """Return the observed sites whose supports and masks depend on data alone."""
        if (data_kind := kind(data)) not in self._known:
            kinds: dict[str, SupportKind] = {}

            def run(arrays: dict[str, Any], point: Array) -> dict[str, Array]:
                at = SiloData(arrays, static=data.static, treedef=data.treedef)
                trace = self.at(at, point)[1]
                kinds.update({n: _support_kind(trace[n]) for n in self._observed})
                return {n: _observed_at(trace[n]).inside for n in self._observed}

            labels = provenance(run, arrays=data.arrays, point=jnp.zeros(()))
            self._known[data_kind] = {n: kinds[n] for n in kinds if "point" not in labels[n]}
        return self._known[data_kind]

    def _observed_values(self, data: SiloData) -> dict[str, ObservedValues]:
        trace = self.at(data, 0.0)[1]
        return {n: _observed_at(trace[n]) for n in self._checked_sites(data)}

    def _has_density(self, data: SiloData) -> dict[str, Array]:
        """Return whether the density of each value is positive and finite at one of the points."""

        def finite(point: Array) -> dict[str, Array]:
            terms = self.at(data, point)[0]
            return {n: jnp.isfinite(terms[n]) for n in self._checked_sites(data)}

        each = jax.lax.map(finite, jnp.linspace(0.0, 1.0, POINTS))
        return {n: found.any(0) for n, found in each.items()}

    def _refuse(self, b: Bucket, name: str, values: np.ndarray, bad: np.ndarray, why: str) -> None:
        i, *index = (int(k) for k in np.argwhere(bad)[0])
        silo = jax.tree.map(lambda a: a[i], b.data)
        site, real = self._checked_sites(silo)[name], bad[i]
        # Padded rows are copies of a row: they must not be counted.
        for plate, dim in site.plates:
            mask = silo.masks.get(plate, np.array(True))
            real = real & mask.reshape(mask.shape + (1,) * (mask.ndim * (-dim - 1)))
        count = int(real.sum())
        row = index[site.plates[0][1] if site.plates else 0] if index else 0
        observed = values[(i, *index)]
        # With nine digits a value next to an edge does not look like the edge itself.
        value = np.array2string(observed, precision=9 if why else 6, threshold=8)
        remedy = site.remedy
        if why and not remedy and (observed % 1).any():
            remedy = "Single precision may round a bound to a number beyond it: clip to the bound. "
        if site.whole and (observed % 1).any():
            remedy = "A term of numbers that are not whole is a numpyro.factor. "
        others = f", the first of {count} such values" if count > 1 else ""
        owner = self.owner.format(b.silos[i])
        raise DataError(
            f"{owner}, site '{name}': the observed value {value} of row {row}{others} is "
            f"impossible: {site.name} takes {site.takes}{why}. {remedy}Leave out what is "
            "missing by a boolean array in the data and numpyro.handlers.mask around the site."
        )


def _depending_on(theta: Theta, point: Array | float) -> Theta:
    """Return the same parameters, but as functions of the point, as latents are.

    A support whose bounds are parameters then has the point's label, and is not checked.
    """
    nothing = 0.0 * jnp.asarray(point)
    return {name: jax.tree.map(lambda a: a + nothing, value) for name, value in theta.items()}


def as_bucket(data: SiloData) -> Bucket:
    """Return the data of one party as a bucket of its own."""
    return Bucket((0,), ({},), jax.tree.map(lambda a: np.asarray(a)[None], data))


def _observed_at(site: dict[str, Any]) -> ObservedValues:
    fn, value = site["fn"], jnp.asarray(site["value"])
    whole = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape + fn.event_shape)
    value = jnp.broadcast_to(value, whole)
    batch = whole[: len(whole) - fn.event_dim]
    inside, edge = _in_support(fn, value)
    return ObservedValues(value, jnp.broadcast_to(inside, batch), jnp.broadcast_to(edge, batch))


def _in_support(fn: Distribution, value: Array) -> tuple[Array, Array]:
    """Return whether a value is in the support, and whether on its edge, in the batch shape.

    Masked values count as in the support and not on the edge.
    """
    if isinstance(fn, dist.MaskedDistribution):
        inside, edge = _in_support(fn.base_dist, value)
        return inside | ~jnp.asarray(fn._mask), edge & jnp.asarray(fn._mask)
    if isinstance(fn, dist.Independent):
        inside, edge = _in_support(fn.base_dist, value)
        axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        return inside.all(axes), edge.any(axes)
    if isinstance(fn, dist.ExpandedDistribution):
        return _in_support(fn.base_dist, value)
    batch = value.shape[: value.ndim - fn.event_dim]
    support, nothing = _support_of(fn), jnp.zeros(batch, bool)
    if support is None:
        return ~nothing, nothing
    try:
        discrete = support.is_discrete
        value = value if discrete else value.astype(jnp.result_type(float, value))
        inside = _holds(support, value)
    except (NotImplementedError, TypeError, ValueError):
        # The constraint cannot be evaluated: the value is left to the density.
        return ~nothing, nothing
    if discrete:
        return inside, nothing
    # A value is on the edge if the support changes within two units in the last place of single
    # precision: data often come in it, whatever precision is computed in. 1e-30 is a step from 0.
    single = jnp.finfo(jnp.float32).eps
    step = jnp.maximum(1e-30, 2 * single * jnp.abs(value))
    below, above = _holds(support, value - step), _holds(support, value + step)
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


def _holds(support: constraints.Constraint, value: Array) -> Array:
    return jnp.asarray(support(value), bool)


def _support_kind(site: dict[str, Any]) -> SupportKind:
    fn = site["fn"]
    wrappers = dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    name = type(fn).__name__
    name = {"BernoulliProbs": "Bernoulli", "BernoulliLogits": "Bernoulli"}.get(name, name)
    takes, remedy = _words(_support_of(fn))
    if name.startswith("Categorical"):
        name, remedy = "Categorical", "Categories count from 0. "
    if isinstance(fn, dist.Beta):
        remedy = "(y * (n - 1) + 0.5) / n moves 0 and 1 of n values inside. "
    plates = tuple((f.name, f.dim) for f in silo_frames(site) or site["cond_indep_stack"])
    return SupportKind(
        name, takes, remedy, plates, bool(getattr(_support_of(fn), "is_discrete", False))
    )


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
