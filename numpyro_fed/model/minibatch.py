"""Some of a silo's rows at a time: which plates are cut, and how much the rows then count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.errors import GuideError
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.federated import FederatedModel

WHOLE = "Use batch_size=None."


class Rows(NamedTuple):
    """Silo plates of one size, whose rows are cut together, and the arrays that hold these."""

    plates: tuple[str, ...]
    arrays: tuple[str, ...]


class Noise(NamedTuple):
    """The noise of a silo's step: for its rows' latents, and for which rows are drawn, if any."""

    rows: Any
    which: Array | None = None


@dataclass(frozen=True)
class Minibatches:
    r"""Rows drawn by number, with replacement, outside of the text.

    A row of a plate that is cut counts :math:`n / B` times, ``n`` being the silo's number of rows
    there, so that the sum over those drawn has the expectation of the sum over all:

    .. math::
        \sum_{i=1}^{n} f_i = \mathbb{E} \Big[\frac{n}{B} \sum_{b=1}^{B} f_{i_b}\Big].

    A silo with no more than ``B`` rows takes each of them once. Plates above the rows of others
    (hospitals above patients) stay whole.

    Attributes
    ----------
    size : int
        ``B``, of each group of plates.
    cut : tuple of Rows
    """

    size: int
    cut: tuple[Rows, ...]

    @classmethod
    def of(
        cls, fm: FederatedModel, plates_of: Mapping[str, tuple[str, ...]], size: int
    ) -> Minibatches:
        """Choose what is cut, given which arrays are as long as which plates at every silo.

        Raises
        ------
        GuideError
            For a text none of whose plates can be cut.
        """
        if fm.nested:
            raise GuideError(
                f"batch_size={size}: a site stands in two silo plates at once, so that rows cannot "
                f"be drawn. Put its rows in long form, in one silo_plate. {WHOLE}"
            )
        cut: list[Rows] = []
        for plate in (p.name for p in fm.plates if not p.outer):
            arrays = tuple(sorted(key for key, plates in plates_of.items() if plate in plates))
            if not arrays:
                continue
            same = next((rows for rows in cut if rows.arrays == arrays), None)
            if same is None:
                cut.append(Rows((plate,), arrays))
            else:
                cut[cut.index(same)] = Rows((*same.plates, plate), arrays)
        if not cut:
            names = ", ".join(f"'{p.name}'" for p in fm.plates)
            raise GuideError(
                f"batch_size={size}: no array has as many rows as a silo_plate with nothing below "
                f"it ({names}), so that none can be drawn. Take the plate's size from an array's "
                f"shape. {WHOLE}"
            )
        return cls(size, tuple(cut))

    @property
    def plates(self) -> tuple[str, ...]:
        """The silo plates that are cut."""
        return tuple(plate for rows in self.cut for plate in rows.plates)

    def noise(self, key: Array) -> Array:
        """Return the noise by which rows are drawn, (groups, B) of 32 bits."""
        return jax.random.bits(key, (len(self.cut), self.size), "uint32")

    def sizes(self, sizes: Sizes) -> Sizes:
        """How many rows there are of each plate in a minibatch."""
        return {p: min(n, self.size) if p in self.plates else n for p, n in sizes.items()}

    def draw(self, noise: Array, data: SiloData) -> tuple[SiloData, dict[str, Array]]:
        """A silo's data in a minibatch, and for each plate that was cut which rows these are."""
        arrays, masks, weights = dict(data.arrays), dict(data.masks), dict(data.weights)
        places: dict[str, Array] = {}
        for rows, bits in zip(self.cut, noise, strict=True):
            length = len(arrays[rows.arrays[0]])
            if length <= self.size:
                continue
            real = data.masks.get(rows.plates[0])
            n = jnp.asarray(length if real is None else real.sum())
            all_fit, in_order = n <= self.size, jnp.arange(self.size)
            drawn = (bits % n.astype(jnp.uint32)).astype(jnp.int32)
            which = jnp.where(all_fit, in_order, drawn)
            arrays |= {key: jnp.asarray(arrays[key])[which] for key in rows.arrays}
            for plate in rows.plates:
                masks[plate] = ~all_fit | (in_order < n)
                weights[plate] = jnp.where(all_fit, 1.0, n / self.size)
                places[plate] = which
        return replace(data, arrays=arrays, masks=masks, weights=weights), places


def drawn(
    minibatches: Minibatches | None, noise: Array | None, data: SiloData
) -> tuple[SiloData, dict[str, Array]]:
    """A minibatch and its places, or all data where none is drawn."""
    if minibatches is None or noise is None:
        return data, {}
    return minibatches.draw(noise, data)


def rows_at(tree: Mapping[str, Any], places: Mapping[str, Array]) -> dict[str, Any]:
    """Take what belongs to the rows of a minibatch from what belongs to all rows of each plate."""
    return {
        plate: jax.tree.map(lambda a, at=places[plate]: a[at], own) if plate in places else own
        for plate, own in tree.items()
    }
