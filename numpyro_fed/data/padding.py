"""Rows of silos padded to one shape, so that silos of similar size share a compiled program.

Padded silos are stacked in buckets. Their rows are padded by copies of the silo's first row and
masked. Not by zeros: a likelihood may be infinite there (``log(0)``), and a masked infinity still
makes gradients NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from numpyro_fed.data.silo_data import SiloData, Sizes, signature

T = TypeVar("T")
# Padded rows that are taken before another shape is compiled, whatever their share. A shape takes
# two seconds to compile, and thirty where hospitals have two effects each; 4,000 draws over so many
# rows take one.
FEW_ROWS = 2_000
# Every bucket is a program to compile, and every padded row is memory and time. With a waste of 2
# both stay within a factor of two of their least. With 1 each size would be a bucket, and without a
# limit one large silo would set the size of all.
WASTE = 2.0


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
) -> list[Bucket]:
    """Return the silos in buckets: grouped by shape, padded to one shape and stacked.

    Static values and axes that cannot be padded must be equal in a bucket. Silos that agree in
    these are divided by size, into as few buckets as possible with at most :data:`WASTE` times as
    many padded rows as there are real ones, or :data:`FEW_ROWS` in all.
    """
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
            group_of = dict(zip(group, group_lengths(largest), strict=True))
            split_groups += grouped(group, group_of.__getitem__)
        groups = split_groups
    buckets = []
    for group in groups:
        target = {p: max(sizes[j][p] for j in group) for p in sizes[0]}
        members = [silos[j] for j in group]
        if any(sizes[j] != target for j in group):
            for i, j in enumerate(group):
                sources = {p: source_rows(sizes[j][p], target[p]) for p in set(rows.values())}
                arrays = padded_arrays(silos[j].arrays, rows, sources)
                masks = {p: np.arange(target[p]) < sizes[j][p] for p in sorted(plates)}
                members[i] = replace(silos[j], arrays=arrays, masks=masks)
        buckets.append(Bucket(tuple(group), tuple(sizes[j] for j in group), stacked(members)))
    return buckets


def group_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the number of a group for each length, for as few groups as possible.

    Every length is padded to the largest of its group; the sum of padded lengths must be at most
    :data:`WASTE` times the sum of lengths, or :data:`FEW_ROWS`. In the best partition each group is
    a run of the sorted lengths. Dynamic programming finds it: ``best[j]`` is the least sum of
    padded lengths for the ``j + 1`` greatest distinct lengths in k groups, and k grows until the
    sum is small enough.
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
    while best[-1] > max(WASTE * coarse.sum(), FEW_ROWS):
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


class Filling(Enum):
    """The row that padded rows are copies of: the first one, the last one, or each in turn."""

    FIRST = "first"
    LAST = "last"
    IN_TURN = "in turn"


def source_rows(size: int, target: int, filling: Filling = Filling.FIRST) -> np.ndarray:
    """Return the row of ``size`` real ones that each of ``target`` rows is, or is a copy of."""
    row = np.arange(target)
    if filling is Filling.IN_TURN:
        return row % size
    return np.where(row < size, row, 0 if filling is Filling.FIRST else size - 1)


def padded_arrays(
    arrays: Mapping[str, Any], rows: Mapping[str, str], sources: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return arrays whose rows are taken from ``sources`` of their plate, and others as they are.

    ``rows`` has the silo plate of each array that holds rows.
    """
    return {
        key: np.asarray(a)[sources[rows[key]]] if rows.get(key) in sources else a
        for key, a in arrays.items()
    }


def stacked(trees: Sequence[Any]) -> Any:
    """Return trees of one structure and shape stacked along a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def one_by_one(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> list[Bucket]:
    """Return each silo in a bucket of its own, unpadded."""
    pairs = enumerate(zip(silos, sizes, strict=True))
    return [Bucket((j,), (size,), stacked([silo])) for j, (silo, size) in pairs]
