"""The distributions of latents given those above them, as the text draws them, data not seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.util import compute_log_probs

from numpyro_fed.model.binding import Rows, Theta, bind, sum_rows, unpack
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.jaxprs import Labels, provenance
from numpyro_fed.model.sites import Site
from numpyro_fed.programs import compiled_method
from numpyro_fed.tracing import TRACING


class LocalPrior(NamedTuple):
    """The distribution of a silo's latents given the globals, before its data are looked at."""

    # (key, theta, z_G, z_L, data): latents (rows, dim) of all silo plates, those in z_L as given
    draw: Callable[[Array, Theta, Array, Rows, SiloData], Rows]
    # of what is drawn, (rows,): without the scale or factors that the text puts around it
    log_density: Callable[[Theta, Array, Rows, SiloData], Rows]


def local_prior(model: Callable[..., Any], sites: Sequence[Site]) -> LocalPrior:
    """Read the local latents' distributions off the text."""
    local = [s for s in sites if s.kind == "latent" and s.plate is not None]

    def traced(theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array) -> dict[str, Any]:
        given = [s for s in sites if s.plate is None or s.plate in z_L]
        text = bind(model, unpack(given, z_G, z_L), theta)
        with TRACING:
            return handlers.trace(handlers.seed(text, key)).get_trace(**data.kwargs)

    def rows_of(s: Site, value: Array) -> Array:
        moved = jnp.moveaxis(value, s.axis or 0, 0)
        return moved.reshape(len(moved), -1)

    def draw(key: Array, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        trace = traced(theta, z_G, z_L, data, key)
        drawn: dict[str, list[Array]] = {}
        for s in local:
            if s.plate not in z_L:
                site = trace[s.name]
                unconstrained = biject_to(site["fn"].support).inv(site["value"])
                drawn.setdefault(str(s.plate), []).append(rows_of(s, unconstrained))
        return {**z_L, **{plate: jnp.concatenate(parts, 1) for plate, parts in drawn.items()}}

    def log_density(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        trace = traced(theta, z_G, z_L, data, jax.random.key(0))
        at, total = unpack(local, z_G, z_L), dict[str, Array]()
        for s in local:
            rows = sum_rows(rows_of(s, _log_density(trace[s.name], at[s.name])))
            total[str(s.plate)] = total.get(str(s.plate), 0.0) + rows
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    return LocalPrior(draw, log_density)


class Funnel(NamedTuple):
    """Global latents whose prior the same others set, and these."""

    children: tuple[Site, ...]
    setters: tuple[Site, ...]


@dataclass(frozen=True, eq=False)
class GlobalPrior:
    """The prior of those global latents whose prior other globals set, given these.

    Read off the text, which runs on placeholders for data.
    """

    model: Callable[..., Any]
    sites: Sequence[Site]
    silo: SiloData  # placeholders for data
    # of the type of the globals, with local latents
    placeholder: Callable[[DTypeLike, SiloData], tuple[SiloData, Rows]]
    without: Collection[str]  # latents that have no distribution that could be drawn from

    def draw(self, key: Array, theta: Theta, z_G: Array, funnel: Funnel) -> Array:
        """Return ``z_G`` with the children of a funnel drawn anew, all others as they are."""
        return self._draw(key, theta, z_G, self.silo, funnel.children)

    def log_density(self, theta: Theta, z_G: Array, funnel: Funnel) -> Array:
        """Return the log density of what :meth:`draw` draws.

        Without the scale or factors that the text puts around it.
        """
        return self._density(theta, z_G, self.silo, funnel.children)

    @cached_property
    def _latents(self) -> list[Site]:
        return [s for s in self.sites if s.kind == "latent" and s.plate is None]

    def _trace(self, values: dict[str, Array], theta: Theta, data: SiloData, key: Array) -> Any:
        text = handlers.seed(bind(self.model, values, theta), key)
        with TRACING:
            return handlers.trace(text).get_trace(**data.kwargs)

    def _given(self, z_G: Array, silo: SiloData) -> tuple[dict[str, Array], SiloData]:
        data, z_L = self.placeholder(z_G.dtype, silo)
        return unpack(self.sites, z_G, z_L), data

    @cached_property
    def funnels(self) -> tuple[Funnel, ...]:
        """All funnels of which every child has a distribution that can be drawn from."""
        latents = self._latents
        zeros = jnp.zeros(max([s.stop for s in latents], default=0))
        values, data = self._given(zeros, self.silo)
        own = {s.name: values.pop(s.name) for s in latents}

        def densities(**inputs: Any) -> dict[str, Array]:
            at = replace(data, arrays=inputs.pop(DATA))
            text = handlers.seed(bind(self.model, {**values, **inputs}, {}), 0)
            with TRACING:
                return compute_log_probs(text, (), at.kwargs, {}, sum_log_prob=False)[0]

        labels = provenance(densities, **own, **{DATA: data.arrays})
        setters = {s.name: labels[s.name] & (set(own) - {s.name}) for s in latents}

        def drawn(**inputs: Any) -> dict[str, Array]:
            at = replace(data, arrays=inputs[DATA])
            roots = {name: own[name] for name in own if not setters[name]}
            trace = self._trace({**values, **roots}, {}, at, inputs[KEY])
            return {name: trace[name]["value"] for name in own}

        keyed = provenance(drawn, **{DATA: data.arrays, KEY: jax.random.key(0)})
        found = []
        for names in _together({name: by for name, by in setters.items() if by}):
            if all(name not in self.without and KEY in keyed[name] for name in names):
                above = frozenset[str]().union(*(setters[name] for name in names)) - names
                children = tuple(s for s in latents if s.name in names)
                found.append(Funnel(children, tuple(s for s in latents if s.name in above)))
        return tuple(found)

    @compiled_method(static_argnums=4)
    def _draw(
        self, key: Array, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        for s in children:
            del values[s.name]
        trace = self._trace(values, theta, data, key)
        for s in children:
            site = trace[s.name]
            unconstrained = biject_to(site["fn"].support).inv(site["value"])
            z_G = z_G.at[s.start : s.stop].set(unconstrained.ravel())
        return z_G

    @compiled_method(static_argnums=3)
    def _density(
        self, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        trace = self._trace(values, theta, data, jax.random.key(0))
        terms = (_log_density(trace[s.name], values[s.name]).sum() for s in children)
        return sum(terms, jnp.zeros(()))


def _together(setters: Mapping[str, Labels]) -> list[set[str]]:
    """Groups of children: two are in one if they share a setter, or if one sets the other."""
    groups: list[set[str]] = []
    for child, by in setters.items():
        near = [g for g in groups if any(by & {c, *setters[c]} or child in setters[c] for c in g)]
        groups = [g for g in groups if g not in near] + [{child}.union(*near)]
    return groups


DATA, KEY = " data", " key"  # no names of sites


def _log_density(site: dict[str, Any], unconstrained: Array) -> Array:
    """A latent's log density in unconstrained space, one number for each of its batch."""
    fn, value = site["fn"], site["value"]
    batch = jnp.ndim(value) - fn.event_dim
    log_det = biject_to(fn.support).log_abs_det_jacobian(unconstrained, value)
    log_p = fn.log_prob(value) + sum_rightmost(log_det, jnp.ndim(log_det) - batch)
    return jnp.broadcast_to(log_p, jnp.shape(value)[:batch])
