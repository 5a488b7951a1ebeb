"""Rows of silos in the shapes of compiled programs: padded in buckets, or drawn in minibatches.

Silos of similar size get one shape and are stacked. Their rows are padded by copies of the silo's
first row and masked. Not by zeros: a likelihood may be infinite there (``log(0)``), and a masked
infinity still makes gradients NaN.

Minibatches are drawn outside of the model, by index. A subsampling plate of NumPyro draws a
permutation in a sequential loop, which made a step 13 to 20 times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.silo_data import SiloData, Sizes, signature

T = TypeVar("T")
# Padded rows that are taken before another shape is compiled, whatever their share. A shape takes
# two seconds to compile, and thirty where hospitals have two effects each; 4,000 draws over so many
# rows take one.
FEW_ROWS = 2_000


class Bucket(NamedTuple):
    """Silos that share one shape, stacked along a leading axis."""

    silos: tuple[int, ...]  # the silos' numbers in the user's list
    sizes: tuple[Sizes, ...]  # the true size of each silo plate, silo by silo
    data: SiloData  # every leaf has a leading axis of len(silos)


def arrays_with_rows(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> dict[str, str]:
    """Return the silo plate of each array that is as long as it at every silo that has both."""
    rows = {}
    for key in {key: None for s in silos for key in s.arrays}:
        arrays = [(s.arrays[key], n) for s, n in zip(silos, sizes, strict=True) if key in s.arrays]
        for plate in sizes[0]:
            if all(a.ndim and len(a) == n[plate] for a, n in arrays):
                rows[key] = plate
                break
    return rows


def bucket(
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    *,
    may_pad: bool = True,
    waste: float = 2.0,
) -> list[Bucket]:
    """Return the silos in buckets: grouped by shape, padded to one shape and stacked.

    Static values and axes that cannot be padded must be equal in a bucket. Silos that agree in
    these are divided by size, into as few buckets as possible with at most ``waste`` times as many
    padded rows as there are real ones, or :data:`FEW_ROWS` in all.
    """
    # Every bucket is a program to compile, and every padded row is memory and time. With a waste
    # of 2 both stay within a factor of two of their least. With 1 each size would be a bucket, and
    # without a limit one large silo would set the size of all.
    rows = arrays_with_rows(silos, sizes) if may_pad else {}
    # Padded are the plates of arrays, and others of the same sizes.
    plates = {
        plate
        for plate in sizes[0]
        if any(all(size[plate] == size[p] for size in sizes) for p in rows.values())
    }

    def shape_of(j: int) -> tuple[Hashable, ...]:
        cut = {k: a[:1] if k in rows else a for k, a in silos[j].arrays.items()}
        unpadded = tuple((p, n) for p, n in sizes[j].items() if p not in plates)
        return (*signature(replace(silos[j], arrays=cut)), unpadded)

    groups = grouped(range(len(silos)), shape_of)
    if rows:
        split_groups = []
        for group in groups:
            largest = [max(sizes[j][p] for p in plates) for j in group]
            group_of = dict(zip(group, group_lengths(largest, waste), strict=True))
            split_groups += grouped(group, group_of.__getitem__)
        groups = split_groups
    return [_stack(group, silos, sizes, rows, plates) for group in groups]


def group_lengths(lengths: Sequence[int], waste: float) -> list[int]:
    """Return the number of a group for each length, for as few groups as possible.

    Every length is padded to the largest of its group; the sum of padded lengths must be at most
    ``waste`` times the sum of lengths, or :data:`FEW_ROWS`. In the best partition each group is a
    run of the sorted lengths. Dynamic programming finds it: ``best[j]`` is the least sum of padded
    lengths for the ``j + 1`` greatest distinct lengths in k groups, and k grows until the sum is
    small enough.
    """
    # The table has the square of the number of distinct lengths. Lengths are rounded up to a 512th
    # of the largest, which keeps it to a quarter of a million entries.
    step = -(-max(lengths) // 512)
    coarse = -(-np.asarray(lengths) // step) * step
    distinct, counts = np.unique(coarse, return_counts=True)
    distinct, until = distinct[::-1], np.concatenate([[0], np.cumsum(counts[::-1])])
    # run[i, j]: the padded rows if the i-th to j-th lengths, in descending order, are one group.
    run = np.triu(distinct[:, None] * (until[None, 1:] - until[:-1, None]).astype(float))
    run[np.tril_indices(len(distinct), -1)] = np.inf
    best, begins = run[0], [np.zeros(len(distinct), int)]
    while best[-1] > max(waste * coarse.sum(), FEW_ROWS):
        sums = np.concatenate([[np.inf], best[:-1]])[:, None] + run
        begins.append(sums.argmin(0))
        best = sums.min(0)
    last, limits = len(distinct) - 1, []
    for begin in reversed(begins):
        limits.append(distinct[begin[last]])
        last = begin[last] - 1
    return np.searchsorted(limits, coarse).tolist()


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return items grouped by key, in the order in which they come."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _stack(
    group: Sequence[int],
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    rows: dict[str, str],
    plates: set[str],
) -> Bucket:
    target = {p: max(sizes[j][p] for j in group) for p in sizes[0]}
    members = [silos[j] for j in group]
    if any(sizes[j] != target for j in group):
        # Each silo is padded to the target by masked copies of its first row.
        for i, j in enumerate(group):
            arrays = dict(silos[j].arrays)
            for key, plate in rows.items():
                if key in arrays:
                    a = arrays[key]
                    more = np.repeat(a[:1], target[plate] - len(a), axis=0)
                    arrays[key] = np.concatenate([a, more])
            masks = {p: np.arange(target[p]) < sizes[j][p] for p in sorted(plates)}
            members[i] = replace(silos[j], arrays=arrays, masks=masks)
    return Bucket(tuple(group), tuple(sizes[j] for j in group), stacked(members))


def stacked(trees: Sequence[Any]) -> Any:
    """Return trees of one structure and shape stacked along a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def one_by_one(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> list[Bucket]:
    """Return each silo in a bucket of its own, unpadded."""
    return [_stack([j], silos, sizes, {}, set()) for j in range(len(silos))]


class CutPlates(NamedTuple):
    """Silo plates of one size that are cut together, and the arrays that hold their rows."""

    plates: tuple[str, ...]
    arrays: tuple[str, ...]


class MinibatchNoise(NamedTuple):
    """The noise of a silo's step: for its rows' latents, and for the choice of rows if any."""

    rows: Any
    which: Array | None = None


@dataclass(frozen=True)
class Minibatches:
    r"""Minibatches of ``B`` rows, drawn by index with replacement.

    Each row that is drawn counts :math:`n / B` times, if the silo has ``n`` rows in the plate. The
    weighted sum over the minibatch is then an unbiased estimate of the sum over all rows:

    .. math::
        \sum_{i=1}^{n} f_i = \mathbb{E} \Big[\frac{n}{B} \sum_{b=1}^{B} f_{i_b}\Big].

    A silo with at most ``B`` rows takes each of them once. Outer plates (hospitals above patients)
    are not cut.
    """

    size: int  # B, the same for each group of plates
    cut: tuple[CutPlates, ...]  # the groups of plates that are cut

    @property
    def plates(self) -> tuple[str, ...]:
        """Return the silo plates that are cut."""
        return tuple(plate for rows in self.cut for plate in rows.plates)

    def noise(self, key: Array) -> Array:
        """Return the noise by which rows are drawn, (groups, B) of 32 bits."""
        return jax.random.bits(key, (len(self.cut), self.size), "uint32")

    def sizes(self, sizes: Sizes) -> Sizes:
        """Return the number of rows of each plate in a minibatch, given those of the silo."""
        return {p: min(n, self.size) if p in self.plates else n for p, n in sizes.items()}

    def draw(self, noise: Array, data: SiloData) -> tuple[SiloData, dict[str, Array]]:
        """Return a minibatch of a silo's data, and the rows (B,) of each plate that was cut."""
        arrays, masks, weights = dict(data.arrays), dict(data.masks), dict(data.weights)
        places: dict[str, Array] = {}
        for rows, bits in zip(self.cut, noise, strict=True):
            length = len(arrays[rows.arrays[0]])
            if length <= self.size:
                continue
            real = data.masks.get(rows.plates[0])
            n = jnp.asarray(length if real is None else real.sum())
            # A padded silo may have fewer than B real rows in an array that is longer: it takes
            # these in order, and masks the rest.
            all_fit, in_order = n <= self.size, jnp.arange(self.size)
            # 32 random bits modulo n: no row is more likely than another by more than n / 2**32.
            random = (bits % n.astype(jnp.uint32)).astype(jnp.int32)
            index = jnp.where(all_fit, in_order, random)
            arrays |= {key: jnp.asarray(arrays[key])[index] for key in rows.arrays}
            for plate in rows.plates:
                masks[plate] = ~all_fit | (in_order < n)
                weights[plate] = jnp.where(all_fit, 1.0, n / self.size)
                places[plate] = index
        return replace(data, arrays=arrays, masks=masks, weights=weights), places


def draw_minibatch(
    minibatches: Minibatches | None, noise: Array | None, data: SiloData
) -> tuple[SiloData, dict[str, Array]]:
    """Return a minibatch and its rows by plate; all data and {} if there are no minibatches."""
    if minibatches is None or noise is None:
        return data, {}
    return minibatches.draw(noise, data)


def rows_at(tree: Mapping[str, Any], places: Mapping[str, Array]) -> dict[str, Any]:
    """Return the parts of ``{plate: tree with leading axis of rows}`` at a minibatch's rows."""
    return {
        plate: jax.tree.map(lambda a, i=places[plate]: a[i], part) if plate in places else part
        for plate, part in tree.items()
    }
