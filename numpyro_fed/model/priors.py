"""Conditional priors: the distributions of latents given the latents above them, without data.

``LocalPrior`` draws a silo's latents given the globals. ``GlobalPrior`` finds funnels among the
globals, such as effects under a common scale, and draws the effects anew given the scale. Both run
the text itself with some latents substituted, and read the rest off the trace. Importance
correction uses them as proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
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
from numpyro_fed.programs import TRACING, compiled_method

# Labels beside names of sites; the space keeps them apart from any of these.
DATA, KEY = " data", " key"


@dataclass(frozen=True, eq=False)
class LocalPrior:
    """The conditional prior of a silo's latents given the globals."""

    text: Callable[..., Any]
    sites: tuple[Site, ...]

    def draw(self, key: Array, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Draw the latents of the silo plates that are not in ``z_L``; those in ``z_L`` stay."""
        trace = self._trace(theta, z_G, z_L, data, key)
        by_plate: dict[str, list[Array]] = {}
        for s in self.sites:
            if s.kind == "latent" and s.plate not in (None, *z_L):
                value = biject_to(trace[s.name]["fn"].support).inv(trace[s.name]["value"])
                by_plate.setdefault(str(s.plate), []).append(_rows_first(s, value))
        return {**z_L, **{plate: jnp.concatenate(parts, 1) for plate, parts in by_plate.items()}}

    def log_density(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Return the log density of these draws, {plate: (rows,)}.

        A ``scale`` handler and factors do not count: they change the model's density, but not what
        the text draws.
        """
        # All latents have values here: the key decides nothing.
        trace = self._trace(theta, z_G, z_L, data, jax.random.key(0))
        values, total = unpack(self.sites, z_G, z_L), dict[str, Array]()
        for s in self.sites:
            if s.kind == "latent" and s.plate is not None:
                terms = sum_rows(_rows_first(s, _log_density(trace[s.name], values[s.name])))
                total[s.plate] = total.get(s.plate, 0.0) + terms
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    def _trace(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array) -> Any:
        given = [s for s in self.sites if s.plate is None or s.plate in z_L]
        return _trace(self.text, unpack(given, z_G, z_L), theta, data, key)


class Funnel(NamedTuple):
    """Global latents (children) whose prior depends on the same other globals (setters)."""

    children: tuple[Site, ...]
    setters: tuple[Site, ...]


@dataclass(frozen=True, eq=False)
class GlobalPrior:
    """The conditional priors of global latents given other globals."""

    traces: Traces  # those of the text, which runs on placeholders for data
    sites: tuple[Site, ...]
    silo: SiloData  # the placeholders
    local: dict[str, tuple[int, int]]  # the shape of each silo plate's latents, (rows, dim)
    not_drawable: Collection[str]  # the latents whose distribution cannot be drawn from

    @cached_property
    def latents(self) -> tuple[Site, ...]:
        """Return the global latents."""
        return tuple(s for s in self.sites if s.kind == "latent" and s.plate is None)

    def draw(self, key: Array, theta: Theta, z_G: Array, children: tuple[Site, ...]) -> Array:
        """Return ``z_G`` with some latents drawn anew given all others, which stay."""
        return self._draw(key, theta, z_G, self.silo, children)

    def log_density(self, theta: Theta, z_G: Array, children: tuple[Site, ...]) -> Array:
        """Return the log density () of some latents, as :meth:`draw` draws them.

        A ``scale`` handler and factors in the text do not count.
        """
        return self._density(theta, z_G, self.silo, children)

    @cached_property
    def drawable(self) -> bool:
        """Return whether the text can draw all global latents."""
        names = {s.name for s in self.latents}
        return not names & set(self.not_drawable) and self._drawn(given=()) == names

    @cached_property
    def setters(self) -> dict[str, Labels]:
        """Return for each global latent the other globals and parameters that its prior reads."""
        trace, found = self.traces.at(self.silo), dict[str, Labels]()
        for name in (s.name for s in self.latents):
            of_density = DENSITY, name
            reads = trace.reads(of_density, LATENT) | trace.reads(of_density, PARAMETER)
            found[name] = reads - {name}
        return found

    @cached_property
    def funnels(self) -> tuple[Funnel, ...]:
        """Return all funnels whose children can all be drawn."""
        names = {s.name for s in self.latents}
        setters = {name: by & names for name, by in self.setters.items() if by & names}
        if not setters:
            return ()
        # Groups of children, connected if they share a setter or if one sets the other.
        groups: list[set[str]] = []
        for name, by in setters.items():
            linked = [
                g for g in groups if any(by & {c, *setters[c]} or name in setters[c] for c in g)
            ]
            groups = [g for g in groups if g not in linked] + [{name}.union(*linked)]
        drawn, funnels = self._drawn(given=names - set(setters)), []
        for group in groups:
            if group <= drawn and not group & set(self.not_drawable):
                above = frozenset[str]().union(*(setters[name] for name in group)) - group
                parts = (tuple(s for s in self.latents if s.name in g) for g in (group, above))
                funnels.append(Funnel(*parts))
        return tuple(funnels)

    def _drawn(self, given: Collection[str]) -> set[str]:
        """Return the globals that the text draws where only those ``given`` have values."""
        names = [s.name for s in self.latents]
        dim = max([s.stop for s in self.latents], default=0)
        values, data = self._given(jnp.zeros(dim), self.silo)
        values = {n: value for n, value in values.items() if n not in names or n in given}

        # A latent counts only if its value comes from the key: a handler (condition, substitute)
        # may have fixed it in the text, and then it cannot be drawn anew.
        def sampled(**inputs: Any) -> dict[str, Array]:
            silo = replace(data, arrays=inputs[DATA])
            trace = _trace(self.traces.model, values, {}, silo, inputs[KEY])
            return {name: trace[name]["value"] for name in names}

        sources = provenance(sampled, **{DATA: data.arrays, KEY: jax.random.key(0)})
        return {name for name in names if KEY in sources[name]}

    def _given(self, z_G: Array, silo: SiloData) -> tuple[dict[str, Array], SiloData]:
        """Return the latents, zeros for those of rows, and placeholders in the same precision."""
        # In two precisions at once, the carry of a scan would change its dtype.
        real = z_G.dtype
        data = jax.tree.map(lambda a: a.astype(real) if a.dtype.kind == "f" else a, silo)
        z_L = {plate: jnp.zeros(shape, real) for plate, shape in self.local.items()}
        return unpack(self.sites, z_G, z_L), data

    @compiled_method(static_argnums=4)
    def _draw(
        self, key: Array, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        # A latent without a value is sampled by the text.
        for s in children:
            del values[s.name]
        trace = _trace(self.traces.model, values, theta, data, key)
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
        trace = _trace(self.traces.model, values, theta, data, jax.random.key(0))
        terms = (_log_density(trace[s.name], values[s.name]).sum() for s in children)
        return sum(terms, jnp.zeros(()))


def _trace(
    model: Callable[..., Any], values: Mapping[str, Array], theta: Theta, data: SiloData, key: Array
) -> Any:
    text = handlers.seed(bind(model, dict(values), theta), key)
    with TRACING:
        return handlers.trace(text).get_trace(**data.kwargs)


def _rows_first(s: Site, value: Array) -> Array:
    rows_first = jnp.moveaxis(value, s.axis or 0, 0)
    return rows_first.reshape(len(rows_first), -1)


def _log_density(site: dict[str, Any], unconstrained: Array) -> Array:
    """Return a latent's log density in unconstrained space, in the shape of its batch."""
    fn, value = site["fn"], site["value"]
    batch = jnp.ndim(value) - fn.event_dim
    log_det = biject_to(fn.support).log_abs_det_jacobian(unconstrained, value)
    log_p = log_prob({**site, "scale": None}) + sum_rightmost(log_det, jnp.ndim(log_det) - batch)
    return jnp.broadcast_to(no_more_than_finite(log_p), jnp.shape(value)[:batch])
