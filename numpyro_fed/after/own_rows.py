"""A model's text at the rows of the fit: silos of many sizes share one program.

A silo is padded to the shape of its bucket by copies of its first row, as the run has padded it.
What is predicted for its own rows must not change by that: it is compared at one draw, with other
rows in the place of the copies, and with the silo as it is. Where it changes (an average over rows
that the text keeps by ``numpyro.deterministic``, say) silos stay as they are, and one program is
compiled for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.predict import Draws, Programs
from numpyro_fed.after.run import Run
from numpyro_fed.model.audit import default_rtol
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.padding import padded_keys

# Sizes up to which each has its own program: the comparison compiles two small ones.
FEW_SIZES = 2
# Ways to fill padded rows: the first row, the last one, and all in turn.
WAYS = 3


class Asked(NamedTuple):
    """A silo whose rows are predicted, with its noise, parameters and draws of latents.

    Attributes
    ----------
    silo : int
    key : jax.Array
    theta : dict
        Shared and private parameters on their supports.
    latents : dict of str to array (n, ...)
    """

    silo: int
    key: Array
    theta: Draws
    latents: Draws

    @property
    def first_draw(self) -> Asked:
        """Return the same with one draw of the latents."""
        return self._replace(latents={name: value[:1] for name, value in self.latents.items()})


@dataclass(frozen=True, eq=False)
class Padding:
    """The rows that a silo's data and latents are padded with.

    Attributes
    ----------
    sizes, target : dict of str to int
        The rows of each padded plate, before and after.
    rows : dict of str to str
        The plate of each array that holds rows.
    axes : dict of str to (plate, axis)
        The same of latents, with the axis of rows in a draw's value.
    """

    sizes: Sizes
    target: Sizes
    rows: dict[str, str]
    axes: dict[str, tuple[str, int]]

    def of(self, asked: Asked, data: SiloData, way: int = 0) -> tuple[Draws, SiloData]:
        """Return latents and data, padded in one of the :data:`WAYS`."""
        source = {plate: self._source(plate, way) for plate in self.target}
        arrays = {
            k: np.asarray(a)[source[self.rows[k]]] if self.rows.get(k) in source else a
            for k, a in data.arrays.items()
        }
        latents: dict[str, Any] = {k: np.asarray(value) for k, value in asked.latents.items()}
        for name, (plate, axis) in self.axes.items():
            if name in latents:
                latents[name] = latents[name].take(source[plate], 1 + axis)
        return latents, replace(data, arrays=arrays)

    def _source(self, plate: str, way: int) -> np.ndarray:
        """Return the row from which each row is taken."""
        n, row = self.sizes[plate], np.arange(self.target[plate])
        return np.where(row < n, row, (0 * row, 0 * row + n - 1, row % n)[way])


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The rows of some silos of a run, and the programs that run a text there."""

    run: Run
    programs: Programs
    asked: Sequence[Asked]

    def values(self) -> list[dict[str, Array]]:
        """Return the values of sites (n, ...) at each of the silos."""
        return [self._at(asked, self._paddings.get(asked.silo)) for asked in self.asked]

    def _at(self, asked: Asked, padding: Padding | None) -> dict[str, Array]:
        data, many = self.run.data_of(asked.silo), self.programs.many
        if padding is None:
            return jax.block_until_ready(many(asked.key, asked.theta, asked.latents, data))
        shapes = self._shapes(asked)
        found = jax.block_until_ready(many(asked.key, asked.theta, *padding.of(asked, data)))
        # On the host: a slice on the device is a program for each size.
        return {
            name: jnp.asarray(_cut(np.asarray(value), (len(value), *shapes[name])))
            for name, value in found.items()
        }

    def _shapes(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        """Return the shape of each site's value at a silo as it is."""
        first = asked.first_draw
        one, data = self.programs.one, self.run.data_of(asked.silo)
        found = jax.eval_shape(one, first.key, first.theta, first.latents, data)
        return {name: value.shape for name, value in found.items()}

    @cached_property
    def _paddings(self) -> dict[int, Padding]:
        """Return how silos are padded, by number; silos that must not be are left out."""
        fm, silos = self.run._fit.model, self.run.data_here
        private = any(s.kind == "param" and s.plate is not None for s in fm.sites)
        if private or len(self.asked) <= FEW_SIZES:
            return {}
        sizes = [self.run.sizes_of(j) for j in range(self.run.num_silos)]
        rows = padded_keys(silos, sizes)
        groups: dict[tuple[int, ...], list[Asked]] = {}
        for asked in self.asked:
            groups.setdefault(self.run.bucket_of(asked.silo).silos, []).append(asked)
        found: dict[int, Padding] = {}
        for group in groups.values():
            masks = self.run.bucket_of(group[0].silo).data.masks
            target = {plate: mask.shape[1] for plate, mask in masks.items()}
            if len({tuple(sizes[a.silo].items()) for a in group}) <= FEW_SIZES or not target:
                continue
            axes = {
                s.name: (s.plate, s.axis or 0)
                for s in fm.sites
                if s.kind == "latent" and s.plate in target
            }
            paddings = {a.silo: Padding(sizes[a.silo], target, rows, axes) for a in group}
            # The silo with the fewest rows has the most padding.
            most = min(group, key=lambda a: sum(sizes[a.silo].values()))
            if all(self._harmless(a, paddings[a.silo], whole=a is most) for a in group):
                found |= paddings
        return found

    def _harmless(self, asked: Asked, padding: Padding, *, whole: bool) -> bool:
        """Return whether nothing that is predicted for a silo's own rows depends on padded ones.

        With ``whole`` the silo as it is is compared, too, which compiles a program of its size.
        """
        first, data, shapes = asked.first_draw, self.run.data_of(asked.silo), self._shapes(asked)

        def value(latents: Draws, data: SiloData) -> dict[str, np.ndarray]:
            found = self.programs.one(first.key, first.theta, latents, data)
            return {name: _cut(np.asarray(a), shapes[name]) for name, a in found.items()}

        padded = [value(*padding.of(first, data, way)) for way in range(WAYS)]
        others = [*padded[1:], *([value(first.latents, data)] if whole else [])]
        return all(_agree(padded[0], other) for other in others)


def latents_apart(run: Run, draws: Draws, silos: Sequence[int]) -> list[dict[str, Any]]:
    """Return the latents of each silo from draws in which those of several stand side by side."""
    fm = run._fit.model
    shared = {s.name: draws[s.name] for s in fm.named("latent")}
    own = [s for s in fm.sites if s.kind == "latent" and s.plate is not None]
    # On the host: a slice on the device is a program for each size.
    values = {s.name: np.asarray(draws[s.name]) for s in own}
    places = dict.fromkeys(values, 0)
    parts = []
    for j in silos:
        latents: dict[str, Any] = dict(shared)
        for s in own:
            first = places[s.name]
            places[s.name] = last = first + run.sizes_of(j)[s.plate or ""]
            latents[s.name] = values[s.name].take(range(first, last), 1 + (s.axis or 0))
        parts.append(latents)
    return parts


def _cut(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return value[tuple(map(slice, shape))] if value.ndim == len(shape) else value


def _agree(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Return whether values are the same up to rounding."""
    rtol = default_rtol()
    return one.keys() == other.keys() and all(
        a.shape == other[name].shape
        and np.allclose(a, other[name], rtol=rtol, atol=rtol, equal_nan=True)
        for name, a in one.items()
    )
