"""The search for what is not finite in a model: the site, the silo and the row.

It is made where no start of a search has finite numbers. The density is evaluated at a few general
points of unconstrained space, with its derivatives by site.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.padding import padded_keys
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.binding import Rows, Theta
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import hashed_normals
from numpyro_fed.text.traces import DENSITY, UNGUARDED

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
                "taken. Put a harmless number in its place, jnp.where(zero, 1.0, rate), and mask "
                "the row: numpyro.handlers.mask(mask=~zero)"
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
        terms = _terms(fm, of_silo, z_G, fm.init_local(key, silo), silo, guarded=False)
        # Minus infinity is a density of zero, as outside of a support that a latent bounds.
        return {name: rows < jnp.inf for name, rows in terms.items()}

    for j, silo in silos:
        for name, rows in jax.device_get(numbers(silo)).items():
            if not rows.all():
                owner = fm.traces.at(silo).owners[name]
                site = next(s for s in fm.sites if s.name == owner)
                if site.plate is None:
                    return NotFinite(site.name, None, None, False)
                return NotFinite(site.name, j, int(np.argmin(rows)), False)
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
    key, sizes = jax.random.key(0), fm.sizes(silo)
    theta = {**fm.init_theta(key), **fm.init_private(key, silo)}

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
    keys = [k for k, p in padded_keys([silo], [sizes]).items() if p == plate]
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
