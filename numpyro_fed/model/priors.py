"""Conditional priors: the distributions of latents given the latents above them, without data.

``LocalPrior`` draws a silo's latents given the globals. ``GlobalPrior`` finds funnels among the
globals, such as effects under a common scale, and draws the effects anew given the scale. Both run
the text itself with some latents substituted, and read the rest off the trace. Importance
correction uses them as proposals.
"""

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

from numpyro_fed.model.binding import Rows, Theta, bind, sum_rows, unpack
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.densities import log_prob, no_more_than_finite
from numpyro_fed.model.jaxprs import Labels, provenance
from numpyro_fed.model.sites import Site
from numpyro_fed.model.trace import DENSITY, LATENT, PARAMETER
from numpyro_fed.model.traces import Traces
from numpyro_fed.programs import compiled_method
from numpyro_fed.tracing import TRACING


class LocalPrior(NamedTuple):
    """The conditional prior of a silo's latents given the globals."""

    # (key, theta, z_G, z_L, data) -> {plate: (rows, dim)}: draws the latents of the silo
    # plates that are not in z_L; those in z_L stay
    draw: Callable[[Array, Theta, Array, Rows, SiloData], Rows]
    # (theta, z_G, z_L, data) -> {plate: (rows,)}: the log density of these draws. A scale
    # handler and factors do not count: they change the model's density, but not what the text
    # draws
    log_density: Callable[[Theta, Array, Rows, SiloData], Rows]


def local_prior(model: Callable[..., Any], sites: Sequence[Site]) -> LocalPrior:
    """Return the conditional prior of the local latents of a text."""
    local = [s for s in sites if s.kind == "latent" and s.plate is not None]

    def traced(theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array) -> dict[str, Any]:
        given = [s for s in sites if s.plate is None or s.plate in z_L]
        text = bind(model, unpack(given, z_G, z_L), theta)
        with TRACING:
            return handlers.trace(handlers.seed(text, key)).get_trace(**data.kwargs)

    def rows_of(s: Site, value: Array) -> Array:
        rows_first = jnp.moveaxis(value, s.axis or 0, 0)
        return rows_first.reshape(len(rows_first), -1)

    def draw(key: Array, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        trace = traced(theta, z_G, z_L, data, key)
        by_plate: dict[str, list[Array]] = {}
        for s in local:
            if s.plate not in z_L:
                site = trace[s.name]
                unconstrained = biject_to(site["fn"].support).inv(site["value"])
                by_plate.setdefault(str(s.plate), []).append(rows_of(s, unconstrained))
        return {**z_L, **{plate: jnp.concatenate(parts, 1) for plate, parts in by_plate.items()}}

    def log_density(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        # All latents have values here: the key decides nothing.
        trace = traced(theta, z_G, z_L, data, jax.random.key(0))
        values, total = unpack(local, z_G, z_L), dict[str, Array]()
        for s in local:
            terms = sum_rows(rows_of(s, _log_density(trace[s.name], values[s.name])))
            total[str(s.plate)] = total.get(str(s.plate), 0.0) + terms
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    return LocalPrior(draw, log_density)


class Funnel(NamedTuple):
    """Global latents (children) whose prior depends on the same other globals (setters)."""

    children: tuple[Site, ...]
    setters: tuple[Site, ...]


@dataclass(frozen=True, eq=False)
class GlobalPrior:
    """The conditional priors of global latents given other globals."""

    traces: Traces  # those of the text, which runs on placeholders for data
    sites: Sequence[Site]
    silo: SiloData  # the placeholders
    # (dtype, silo) -> (silo, z_L): casts them to the dtype of the globals and adds zeros as
    # local latents
    placeholder: Callable[[DTypeLike, SiloData], tuple[SiloData, Rows]]
    not_drawable: Collection[str]  # the latents whose distribution cannot be drawn from

    def draw(self, key: Array, theta: Theta, z_G: Array, funnel: Funnel) -> Array:
        """Return ``z_G`` with the children of a funnel drawn anew, all others as they are."""
        return self._draw(key, theta, z_G, self.silo, funnel.children)

    def log_density(self, theta: Theta, z_G: Array, funnel: Funnel) -> Array:
        """Return the log density () of the children, as :meth:`draw` draws them.

        A ``scale`` handler and factors in the text do not count.
        """
        return self._density(theta, z_G, self.silo, funnel.children)

    @cached_property
    def drawable(self) -> bool:
        """Return whether the text can draw all global latents."""
        values, data = self._given(jnp.zeros(self._dim), self.silo)
        for s in self._latents:
            del values[s.name]

        # A handler (condition, substitute) may have fixed a value, which then is no draw.
        def sampled(**inputs: Any) -> dict[str, Array]:
            silo = replace(data, arrays=inputs[DATA])
            trace = self._trace(values, {}, silo, inputs[KEY])
            return {s.name: trace[s.name]["value"] for s in self._latents}

        if any(s.name in self.not_drawable for s in self._latents):
            return False
        sources = provenance(sampled, **{DATA: data.arrays, KEY: jax.random.key(0)})
        return all(KEY in sources[s.name] for s in self._latents)

    def draw_all(self, key: Array, theta: Theta) -> Array:
        """Return a draw (dim,) of all global latents, where they are :attr:`drawable`."""
        zeros = jnp.zeros(self._dim)
        return self._draw(key, theta, zeros, self.silo, tuple(self._latents))

    def log_density_all(self, theta: Theta, z_G: Array) -> Array:
        """Return the log density () of all global latents, as :meth:`draw_all` draws them."""
        return self._density(theta, z_G, self.silo, tuple(self._latents))

    @property
    def _dim(self) -> int:
        return max([s.stop for s in self._latents], default=0)

    @cached_property
    def _latents(self) -> list[Site]:
        return [s for s in self.sites if s.kind == "latent" and s.plate is None]

    def _trace(self, values: dict[str, Array], theta: Theta, data: SiloData, key: Array) -> Any:
        text = handlers.seed(bind(self.traces.model, values, theta), key)
        with TRACING:
            return handlers.trace(text).get_trace(**data.kwargs)

    def _given(self, z_G: Array, silo: SiloData) -> tuple[dict[str, Array], SiloData]:
        data, z_L = self.placeholder(z_G.dtype, silo)
        return unpack(self.sites, z_G, z_L), data

    @cached_property
    def setters(self) -> dict[str, Labels]:
        """Return for each global latent the other globals and parameters that its prior reads."""
        trace = self.traces.at(self.silo)

        def read(name: str) -> Labels:
            return trace.reads((DENSITY, name), LATENT) | trace.reads((DENSITY, name), PARAMETER)

        return {s.name: read(s.name) - {s.name} for s in self._latents}

    @cached_property
    def funnels(self) -> tuple[Funnel, ...]:
        """Return all funnels whose children can all be drawn."""
        latents = self._latents
        names = {s.name for s in latents}
        setters = {name: by & names for name, by in self.setters.items()}
        if not any(setters.values()):
            return ()
        values, data = self._given(jnp.zeros(self._dim), self.silo)
        global_values = {name: values.pop(name) for name in names}

        # A child counts only if its value comes from the key: a handler (condition, substitute)
        # may have fixed it in the text, and then it cannot be drawn anew.
        def sampled(**inputs: Any) -> dict[str, Array]:
            silo = replace(data, arrays=inputs[DATA])
            roots = {name: value for name, value in global_values.items() if not setters[name]}
            trace = self._trace({**values, **roots}, {}, silo, inputs[KEY])
            return {name: trace[name]["value"] for name in global_values}

        sources = provenance(sampled, **{DATA: data.arrays, KEY: jax.random.key(0)})
        funnels = []
        for group in _connected({name: by for name, by in setters.items() if by}):
            if all(name not in self.not_drawable and KEY in sources[name] for name in group):
                above = frozenset[str]().union(*(setters[name] for name in group)) - group
                children = tuple(s for s in latents if s.name in group)
                funnels.append(Funnel(children, tuple(s for s in latents if s.name in above)))
        return tuple(funnels)

    @compiled_method(static_argnums=4)
    def _draw(
        self, key: Array, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        # A latent without a value is sampled by the text.
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


def _connected(setters: Mapping[str, Labels]) -> list[set[str]]:
    """Return groups of children, connected if they share a setter or if one sets the other."""
    groups: list[set[str]] = []
    for child, by in setters.items():
        linked = [g for g in groups if any(by & {c, *setters[c]} or child in setters[c] for c in g)]
        groups = [g for g in groups if g not in linked] + [{child}.union(*linked)]
    return groups


# Labels beside names of sites; the space keeps them apart from any of these.
DATA, KEY = " data", " key"


def _log_density(site: dict[str, Any], unconstrained: Array) -> Array:
    """Return a latent's log density in unconstrained space, in the shape of its batch."""
    fn, value = site["fn"], site["value"]
    batch = jnp.ndim(value) - fn.event_dim
    log_det = biject_to(fn.support).log_abs_det_jacobian(unconstrained, value)
    log_p = log_prob({**site, "scale": None}) + sum_rightmost(log_det, jnp.ndim(log_det) - batch)
    return jnp.broadcast_to(no_more_than_finite(log_p), jnp.shape(value)[:batch])
