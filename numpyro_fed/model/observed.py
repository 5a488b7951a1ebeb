"""The check that observed values lie in the supports of their distributions, silo by silo.

A site is checked if its support and mask depend on data alone. One whose bounds are latents
(``Uniform(0, theta)``) is left to its density. On the edge of a support, as 0 and 1 are for a beta
distribution, the density decides: it is evaluated at a few points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import DataError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.supports import Observed, SupportKind
from numpyro_fed.model.traces import (
    ARRAY,
    DENSITY,
    EDGE,
    INSIDE,
    LATENT,
    OBSERVED,
    PARAMETER,
    Traces,
)
from numpyro_fed.model.vertical import TOTAL, VerticalModel
from numpyro_fed.programs import compiled_method, jit_once

# Points at which the density on an edge is evaluated: latents and parameters at 0, 0.5 and 1. The
# value is refused only if the density is zero at all of them. A beta's density at 0, for example,
# is zero for a parameter above 1 and not for one below.
POINTS = 3


@dataclass(frozen=True, eq=False)
class Supports:
    """The check of a model's observed values, compiled once for each shape of silos."""

    traces: Traces
    owner: str  # the party's name in messages, with {} for a silo's number
    # the shape of the sum TOTAL that the data of a vertical model's server lack
    total: jax.ShapeDtypeStruct | None = None

    @compiled_method(jit_once)
    def observed_values(self, stack: SiloData) -> dict[str, Observed]:
        """Return the observed values of a stack of parties, by site, where they are not plain."""
        names = [name for name, site in self._checked_sites(stack).items() if not site.argument]
        kinds = OBSERVED, INSIDE, EDGE
        at = jax.vmap(lambda data: self._at(data, 0.0, names, kinds))(stack)
        return {n: (at[OBSERVED, n], at[INSIDE, n], at[EDGE, n]) for n in names}

    @compiled_method(jit_once)
    def densities_at_edges(self, stack: SiloData) -> dict[str, Array]:
        """Return whether the density of each value is positive and finite at one of the points."""
        names = list(self._checked_sites(stack))

        def finite(point: Array) -> dict[str, Array]:
            found = jax.vmap(lambda data: self._at(data, point, names, [DENSITY]))(stack)
            return {name: jnp.isfinite(density) for (_, name), density in found.items()}

        each = jax.lax.map(finite, jnp.linspace(0.0, 1.0, POINTS))
        return {name: found.any(0) for name, found in each.items()}

    @classmethod
    def of_server(cls, model: VerticalModel) -> Supports:
        """Return the check of the server of a vertical model, which holds the response."""
        total = jax.ShapeDtypeStruct(model.shape, model.dtype)
        return cls(Traces(model.server.text, split=False), "the server", total)

    def _at(
        self, data: SiloData, point: Array | float, names: Iterable[str], kinds: Sequence[str]
    ) -> dict[tuple[str, str], Array]:
        """Return what is wanted of some sites, with each latent at one number, ``point``."""
        data = self._whole(data, point)
        trace = self.traces.at(data)
        unknown = (i for i in trace.inputs if i.kind == LATENT)
        latents = {i.name: jnp.full(i.shape.shape, point, i.shape.dtype) for i in unknown}
        wanted = [(kind, name) for name in names for kind in kinds]
        return trace.at(wanted, {}, latents, data.arrays)

    def _whole(self, data: SiloData, point: Array | float = 0.0) -> SiloData:
        if self.total is None or TOTAL in data.arrays:
            return data
        total = jnp.full(self.total.shape, point, self.total.dtype)
        return replace(data, arrays={**data.arrays, TOTAL: total})

    def check(self, b: Bucket) -> None:
        """Refuse an observed value that its distribution cannot have; the error says where."""
        sites = self._checked_sites(b.data)
        observed = {
            name: kind.observed(np.asarray(b.data.arrays[kind.argument]))
            for name, kind in sites.items()
            if kind.argument
        }
        if len(observed) < len(sites):
            observed |= jax.tree.map(np.asarray, self.observed_values(b.data))
        for name, (value, inside, _) in observed.items():
            if not inside.all():
                self._refuse(b, name, value, ~inside, "")
        # Densities are compiled only if they are needed.
        if any(edge.any() for _, _, edge in observed.values()):
            for name, possible in self.densities_at_edges(b.data).items():
                value, _, edge = observed[name]
                if (bad := edge & ~np.asarray(possible)).any():
                    self._refuse(b, name, value, bad, " and has no density at the edge")

    def _checked_sites(self, stack: SiloData) -> dict[str, SupportKind]:
        """Return the observed sites whose supports and masks depend on data alone."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
        trace = self.traces.at(self._whole(one))
        known = {}
        for name, kind in trace.supports.items():
            inside = INSIDE, name
            unknown = trace.reads(inside, LATENT) | trace.reads(inside, PARAMETER)
            if not unknown and (self.total is None or TOTAL not in trace.reads(inside, ARRAY)):
                known[name] = kind
        return known

    def _refuse(self, b: Bucket, name: str, values: np.ndarray, bad: np.ndarray, why: str) -> None:
        i, *index = (int(k) for k in np.argwhere(bad)[0])
        site, real = self._checked_sites(b.data)[name], bad[i]
        # Padded rows are copies of a row: they must not be counted.
        for plate, dim in site.plates:
            mask = b.data.masks[plate][i] if plate in b.data.masks else np.array(True)
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


def as_bucket(data: SiloData) -> Bucket:
    """Return the data of one party as a bucket of its own."""
    return Bucket((0,), ({},), jax.tree.map(lambda a: np.asarray(a)[None], data))
