"""Whether a silo's numbers can be what the model says: the site, the silo and the row if not.

What is observed must lie in its support. A site is checked if its support and mask depend on data
alone. One whose bounds are latents (``Uniform(0, theta)``) is left to its density. On the edge of a
support, as 0 and 1 are for a beta distribution, the density decides: it is evaluated at a few
points.

Where no start of a search has finite numbers, the density is evaluated at a few general points of
unconstrained space, with its derivatives by site, and the first that is not finite is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError
from numpyro_fed.basics.programs import compiled_method, jit_once
from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.padding import Bucket, arrays_with_rows
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import hashed_normals
from numpyro_fed.text.site_table import Rows, Theta
from numpyro_fed.text.supports import Observed, SiteSupport
from numpyro_fed.text.trace import (
    ARRAY,
    DENSITY,
    EDGE,
    INSIDE,
    LATENT,
    OBSERVED,
    PARAMETER,
    UNGUARDED,
)
from numpyro_fed.text.traces import Traces
from numpyro_fed.text.vertical import TOTAL, VerticalModel

# Points at which the density on an edge is evaluated: latents and parameters at 0, 0.5 and 1. The
# value is refused only if the density is zero at all of them. A beta's density at 0, for example,
# is zero for a parameter above 1 and not for one below.
EDGE_POINTS = 3


@dataclass(frozen=True, eq=False)
class SupportCheck:
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

        each = jax.lax.map(finite, jnp.linspace(0.0, 1.0, EDGE_POINTS))
        return {name: found.any(0) for name, found in each.items()}

    @classmethod
    def of_server(cls, model: VerticalModel) -> SupportCheck:
        """Return the check of the server of a vertical model, which holds the response."""
        total = jax.ShapeDtypeStruct(model.shape, model.dtype)
        return cls(model.server.traces, "the server", total)

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
                self._refuse(b, name, np.asarray(value), ~np.asarray(inside), "")
        # Densities are compiled only if they are needed.
        if any(edge.any() for _, _, edge in observed.values()):
            for name, possible in self.densities_at_edges(b.data).items():
                value, _, edge = observed[name]
                if (bad := np.asarray(edge) & ~np.asarray(possible)).any():
                    why = " and has no density at the edge"
                    self._refuse(b, name, np.asarray(value), bad, why)

    def _checked_sites(self, stack: SiloData) -> dict[str, SiteSupport]:
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


# Points at which all must fail: at one, a number may not be finite by chance. They are near zero,
# where a search begins.
POINTS, SPREAD = 3, 0.1


class NotFinite(NamedTuple):
    """The first site whose density or derivatives are not finite, silo by silo."""

    site: str
    silo: int | None  # None for a global site, and where the row is not known
    row: int | None
    is_gradient: bool  # whether the density itself is finite

    def __str__(self) -> str:
        where = "" if self.silo is None else f", silo {self.silo}"
        where += "" if self.row is None else f", row {self.row}"
        if self.is_gradient:
            return (
                f"site '{self.site}'{where}: the log density is finite, but its derivatives are "
                "not, at any point that was tried. So it is where the text takes a root, a power "
                "or a logarithm of 0, as of a rate or a probability that is 0 by design or of a "
                "weight of 0 in a mixture, and in a branch of jnp.where that is computed and not "
                "taken. Put a harmless number in its place, jnp.where(zero, 1.0, rate), and where "
                "the outcome is certain then, mask the row: numpyro.handlers.mask(mask=~zero)"
            )
        return (
            f"site '{self.site}'{where}: the log density is not finite, at any point that was "
            "tried near 0 of unconstrained space. Look at what the text computes of the data "
            "there, as a logarithm or a root of negative numbers, and at the site's support"
        )


def first_not_finite(fm: FederatedModel, silos: Iterable[tuple[int, SiloData]]) -> NotFinite | None:
    """Return the first site whose density or derivatives are not finite; None if there is none."""
    plate_of = {s.name: s.plate for s in fm.sites}
    find = jax.jit(partial(_finite, fm))
    for j, silo in silos:
        finite, derivatives = jax.device_get(find(silo))
        for name, rows in finite.items():
            site = fm.traces.at(silo).owners[name]
            number = None if plate_of[site] is None else j
            if not rows.all():
                row = None if number is None else int(np.argmin(rows))
                return NotFinite(site, number, row, False)
            if not derivatives[name]:
                row = None if number is None else _first_row(fm, name, str(plate_of[site]), silo)
                return NotFinite(site, number, row, True)
    return None


def first_without_density(
    fm: FederatedModel, theta: Theta, z_G: Array, silos: Iterable[tuple[int, SiloData]]
) -> NotFinite | None:
    """Return the first site whose density is NaN or infinite above at ``z_G`` (dim,), if any."""

    @jax.jit
    def numbers(silo: SiloData) -> dict[str, Array]:
        key = jax.random.key(0)
        of_silo = {**theta, **fm.init_private(key, silo)}
        terms = _terms(fm, of_silo, z_G, fm.zero_latents(silo), silo, guarded=False)
        # Minus infinity is a density of zero, as outside of a support that a latent bounds.
        return {name: rows < jnp.inf for name, rows in terms.items()}

    plate_of = {s.name: s.plate for s in fm.sites}
    for j, silo in silos:
        for name, rows in jax.device_get(numbers(silo)).items():
            if not rows.all():
                site = fm.traces.at(silo).owners[name]
                local = plate_of[site] is not None
                row = int(np.argmin(rows)) if local else None
                return NotFinite(site, j if local else None, row, False)
    return None


def _terms(
    fm: FederatedModel, theta: Theta, z_G: Array, z_L: Rows, silo: SiloData, *, guarded: bool = True
) -> dict[str, Array]:
    """Return the log probability of each site, of local ones row by row (rows,)."""
    trace, kind = fm.traces.at(silo), DENSITY if guarded else UNGUARDED
    latents = trace.unpacked(z_G, z_L)
    values = trace.at([(kind, name) for name in trace.terms], theta, latents, silo.arrays)
    found = {}
    for (_, name), value in values.items():
        term = trace.terms[name]
        if term.plate is None:
            found[name] = value.sum()[None]
        else:
            found[name] = silo.masked(term.plate, term.rows(value))
    return found


def _finite(fm: FederatedModel, silo: SiloData) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return by site whether each row's term (rows,) and all derivatives () are finite somewhere.

    The derivatives are the gradient and its own derivative in one direction.
    """
    theta, sizes = fm.initial_parameters(silo), fm.sizes(silo)

    def total(z: tuple[Array, Rows], name: str) -> Array:
        return _terms(fm, theta, z[0], z[1], silo)[name].sum()

    each = []
    for point in range(POINTS):
        z_G = SPREAD * jnp.roll(hashed_normals(1, fm.dim), point)
        z_L = {p.name: SPREAD * hashed_normals(2, sizes[p.name], p.dim) for p in fm.plates}
        terms, z = _terms(fm, theta, z_G, z_L, silo), (z_G, z_L)
        rows = {name: jnp.isfinite(values) for name, values in terms.items()}
        # A search needs the curvature as well: one direction, in which all latents move. Site by
        # site: a derivative of infinity in one times a weight of zero would be NaN in all.
        derivatives = {
            name: all_finite(jax.jvp(jax.grad(partial(total, name=name)), (z,), (z,)))
            for name in rows
        }
        each.append((rows, derivatives))
    return jax.tree.map(lambda *found: jnp.stack(found).any(0), *each)


def _first_row(fm: FederatedModel, site: str, plate: str, silo: SiloData) -> int | None:
    """Return the first row without which derivatives of a site would be finite, if one is found."""
    sizes = fm.sizes(silo)
    size = sizes[plate]
    keys = [k for k, p in arrays_with_rows([silo], [sizes]).items() if p == plate]
    real = np.asarray(silo.masks.get(plate, np.ones(size, bool)))

    @jax.jit
    def is_bad(source: Array) -> Array:
        arrays = {**silo.arrays, **{k: jnp.asarray(silo.arrays[k])[source] for k in keys}}
        return ~_finite(fm, replace(silo, arrays=arrays))[1][site]

    # All rows are filled with copies of some of them, of half as many at each step.
    rows = np.flatnonzero(real)
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if is_bad(np.resize(half, size)) else rows[len(rows) // 2 :]
    return int(rows[0]) if is_bad(np.resize(rows, size)) else None
