"""Whether observed values lie in the supports of their distributions, at each silo."""

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
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.jaxprs import provenance
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.primitives import silo_frames
from numpyro_fed.model.sites import Site
from numpyro_fed.model.vertical import TOTAL, VerticalModel
from numpyro_fed.programs import compiled_method, jit_once

POINTS = 3  # at which a density is looked at on the edge of its support


class Seen(NamedTuple):
    """The observed values of a site, and where they lie; all have the site's batch shape first."""

    value: Array  # with the axes of the event besides
    inside: Array  # whether the support or its edge holds the value, or a mask leaves it out
    edge: Array  # whether it lies on the edge, as 0 and 1 do of a Beta's: the density decides


class SupportKind(NamedTuple):
    """The words of a message about a site."""

    name: str  # of its distribution
    takes: str  # the values that this takes
    remedy: str
    plates: tuple[tuple[str, int], ...]  # the silo plates around it, their dimensions in the batch
    whole: bool  # whether it takes whole numbers only


At = Callable[[SiloData, Any], tuple[dict[str, Array], dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class Supports:
    """The check of a model's observed values, compiled once for each shape of silos.

    ``at(data, point)`` returns the density and the message of each site where all latents are one
    number. A site is judged where its support and masks depend on data alone: one whose bounds are
    latents or parameters (``Uniform(0, theta)``) is left to its density.
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
    def observed_values(self, stack: SiloData) -> dict[str, Seen]:
        """Return the observed values of a stack of parties, and where they lie."""
        return jax.vmap(self._seen)(stack)

    @compiled_method(jit_once)
    def densities_at_edges(self, stack: SiloData) -> dict[str, Array]:
        """Return whether the density of each value can be positive."""
        return jax.vmap(self._possible)(stack)

    @classmethod
    def of_silos(cls, fm: FederatedModel) -> Supports:
        """Return the check of a model whose rows are split over silos."""

        def at(data: SiloData, point: Array | float) -> Any:
            key, sizes = jax.random.key(0), fm.sizes(data)
            theta = _moved({**fm.init_theta(key), **fm.init_private(key, data)}, point)
            z_L = {p.name: jnp.full((sizes[p.name], p.dim), point) for p in fm.plates}
            return trace_at(fm.text, fm.sites, theta, jnp.full(fm.dim, point), z_L, data)

        return cls(fm.sites, at, "silo {}")

    @classmethod
    def of_server(cls, model: VerticalModel) -> Supports:
        """Return the check of the server of a vertical model, which holds the response."""
        half = model.server

        def at(data: SiloData, point: Array | float) -> Any:
            total = jnp.full(model.shape, point, model.dtype)
            whole = replace(data, arrays={**data.arrays, TOTAL: total})
            theta = _moved(half.init_theta(jax.random.key(0), whole), point)
            return half.log_probs(theta, jnp.full(half.dim, point), whole)

        return cls(half.sites, at, "the server")

    def check(self, b: Bucket) -> None:
        """Refuse a value that its distribution cannot have, by silo, site, row and value."""
        if not self._judged(jax.tree.map(lambda a: a[0], b.data)):
            return
        seen = jax.tree.map(np.asarray, self.observed_values(b.data))
        for name, found in seen.items():
            if not found.inside.all():
                self._refuse(b, name, found.value, ~found.inside, "")
        if any(found.edge.any() for found in seen.values()):
            for name, possible in self.densities_at_edges(b.data).items():
                bad = seen[name].edge & ~np.asarray(possible)
                if bad.any():
                    why = " and has no density at the edge"
                    self._refuse(b, name, seen[name].value, bad, why)

    def _judged(self, data: SiloData) -> dict[str, SupportKind]:
        """The observed sites whose supports and masks depend on data alone."""
        if (of := kind(data)) not in self._known:
            kinds: dict[str, SupportKind] = {}

            def run(arrays: dict[str, Any], point: Array) -> dict[str, Array]:
                at = SiloData(arrays, static=data.static, treedef=data.treedef)
                trace = self.at(at, point)[1]
                kinds.update({n: _kind_of(trace[n]) for n in self._observed})
                return {n: _seen_at(trace[n]).inside for n in self._observed}

            labels = provenance(run, arrays=data.arrays, point=jnp.zeros(()))
            self._known[of] = {n: kinds[n] for n in kinds if "point" not in labels[n]}
        return self._known[of]

    def _seen(self, data: SiloData) -> dict[str, Seen]:
        trace = self.at(data, 0.0)[1]
        return {n: _seen_at(trace[n]) for n in self._judged(data)}

    def _possible(self, data: SiloData) -> dict[str, Array]:
        """Whether the density of each value is a positive number at one of a few points."""

        def finite(point: Array) -> dict[str, Array]:
            terms = self.at(data, point)[0]
            return {n: jnp.isfinite(terms[n]) for n in self._judged(data)}

        each = jax.lax.map(finite, jnp.linspace(0.0, 1.0, POINTS))
        return {n: found.any(0) for n, found in each.items()}

    def _refuse(self, b: Bucket, name: str, values: np.ndarray, bad: np.ndarray, why: str) -> None:
        i, *place = (int(k) for k in np.argwhere(bad)[0])
        silo = jax.tree.map(lambda a: a[i], b.data)
        judged, real = self._judged(silo)[name], bad[i]
        for plate, dim in judged.plates:
            mask = silo.masks.get(plate, np.array(True))
            real = real & mask.reshape(mask.shape + (1,) * (mask.ndim * (-dim - 1)))
        count = int(real.sum())
        row = place[judged.plates[0][1] if judged.plates else 0] if place else 0
        found = values[(i, *place)]
        value = np.array2string(found, precision=9 if why else 6, threshold=8)
        remedy = judged.remedy
        if why and not remedy and (found % 1).any():
            remedy = "Single precision may round a bound to a number beyond it: clip to the bound. "
        if judged.whole and (found % 1).any():
            remedy = "A term of numbers that are not whole is a numpyro.factor. "
        others = f", the first of {count} such values" if count > 1 else ""
        owner = self.owner.format(b.silos[i])
        raise DataError(
            f"{owner}, site '{name}': the observed value {value} of row {row}{others} is "
            f"impossible: {judged.name} takes {judged.takes}{why}. {remedy}Leave out what is "
            "missing by a boolean array in the data and numpyro.handlers.mask around the site."
        )


def _moved(theta: Theta, point: Array | float) -> Theta:
    """Parameters as they are, but as values that depend on the point, like latents."""
    nothing = 0.0 * jnp.asarray(point)
    return {name: jax.tree.map(lambda a: a + nothing, value) for name, value in theta.items()}


def alone(data: SiloData) -> Bucket:
    """The data of one party as a bucket."""
    return Bucket((0,), ({},), jax.tree.map(lambda a: np.asarray(a)[None], data))


def _seen_at(site: dict[str, Any]) -> Seen:
    fn, value = site["fn"], jnp.asarray(site["value"])
    whole = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape + fn.event_shape)
    value = jnp.broadcast_to(value, whole)
    batch = whole[: len(whole) - fn.event_dim]
    inside, edge = _inside(fn, value)
    return Seen(value, jnp.broadcast_to(inside, batch), jnp.broadcast_to(edge, batch))


def _inside(fn: Distribution, value: Array) -> tuple[Array, Array]:
    """Whether a value lies in the support, and on its edge; without what is masked."""
    if isinstance(fn, dist.MaskedDistribution):
        inside, edge = _inside(fn.base_dist, value)
        return inside | ~jnp.asarray(fn._mask), edge & jnp.asarray(fn._mask)
    if isinstance(fn, dist.Independent):
        inside, edge = _inside(fn.base_dist, value)
        axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        return inside.all(axes), edge.any(axes)
    if isinstance(fn, dist.ExpandedDistribution):
        return _inside(fn.base_dist, value)
    batch = value.shape[: value.ndim - fn.event_dim]
    support, nothing = _support_of(fn), jnp.zeros(batch, bool)
    if support is None:
        return ~nothing, nothing
    try:
        discrete = support.is_discrete
        value = value if discrete else value.astype(jnp.result_type(float, value))
        inside = _holds(support, value)
    except (NotImplementedError, TypeError, ValueError):
        return ~nothing, nothing  # it does not say what it holds
    if discrete:
        return inside, nothing
    single = jnp.finfo(jnp.float32).eps  # in which data often come, whatever is computed in
    step = jnp.maximum(1e-30, 2 * single * jnp.abs(value))
    below, above = _holds(support, value - step), _holds(support, value + step)
    closed = inside | below | above
    return closed, closed & ~(inside & below & above)


def _support_of(fn: Distribution) -> constraints.Constraint | None:
    """The support; None where a distribution does not say it, or takes all angles."""
    try:
        support = fn.support
    except (NotImplementedError, AssertionError):
        return None
    return None if support is constraints.circular else support


def _holds(support: constraints.Constraint, value: Array) -> Array:
    return jnp.asarray(support(value), bool)


def _kind_of(site: dict[str, Any]) -> SupportKind:
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
    """The values of a support in words, and what to do about others."""
    whole = "Divide them by their sum: y / y.sum(-1, keepdims=True). "
    known: list[tuple[Any, str, str]] = [
        (constraints.boolean, "0 and 1", "Outcomes coded 1 and 2 become 0 and 1 by y - 1. "),
        (constraints.nonnegative_integer, "whole numbers from 0", ""),
        (constraints.positive_integer, "whole numbers from 1", ""),
        (constraints.positive, "numbers above 0", ""),
        (constraints.nonnegative, "numbers from 0", ""),
        (constraints.unit_interval, "numbers between 0 and 1", ""),
        (constraints.simplex, "parts that sum to 1", whole),
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
