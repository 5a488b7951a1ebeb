"""Silos of one shape: rows padded by copies and masked, silos stacked into buckets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from numpyro_fed.model.data import SiloData, Sizes, signature

T = TypeVar("T")


class Bucket(NamedTuple):
    """Silos that share one shape, stacked along a leading axis."""

    silos: tuple[int, ...]  # their numbers in the user's list
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each of them
    data: SiloData  # every leaf has a leading axis of len(silos)


def padded_keys(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> dict[str, str]:
    """The silo plate of each array that holds rows: ``{key: plate}``.

    An array is padded along axis 0 if and only if its length equals the size of one and the same
    silo plate at every silo that holds it.
    """
    rows = {}
    for key in {key: None for s in silos for key in s.arrays}:
        at = [(s.arrays[key], n) for s, n in zip(silos, sizes, strict=True) if key in s.arrays]
        for plate in sizes[0]:
            if all(a.ndim and len(a) == n[plate] for a, n in at):
                rows[key] = plate
                break
    return rows


def padded_plates(rows: dict[str, str], sizes: Sequence[Sizes]) -> set[str]:
    """The silo plates that grow with the padded arrays: theirs, and all of the same sizes."""
    return {
        plate
        for plate in sizes[0]
        if any(all(size[plate] == size[p] for size in sizes) for p in rows.values())
    }


def pad(
    data: SiloData, rows: dict[str, str], plates: set[str], sizes: Sizes, target: Sizes
) -> SiloData:
    """Pad one silo to ``target`` rows by copies of its first row, and mask the copies."""
    arrays = {
        key: np.concatenate([a, np.repeat(a[:1], target[rows[key]] - len(a), axis=0)])
        if key in rows
        else a
        for key, a in data.arrays.items()
    }
    masks = {p: np.arange(target[p]) < sizes[p] for p in sorted(plates)}
    return replace(data, arrays=arrays, masks=masks)


def bucket(
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    *,
    may_pad: bool = True,
    waste: float = 2.0,
) -> list[Bucket]:
    """Group silos by static values and unpadded axes, pad each group to one shape, stack it.

    Within a group, silos are further divided by size, into as few buckets as keep the padded rows
    within ``waste`` times those that are really there: memory grows with rows and not with the
    largest silo, and every bucket is a program to compile.
    """
    rows = padded_keys(silos, sizes) if may_pad else {}
    plates = padded_plates(rows, sizes)

    def shape_of(j: int) -> tuple[Hashable, ...]:
        cut = {k: a[:1] if k in rows else a for k, a in silos[j].arrays.items()}
        unpadded = tuple((p, n) for p, n in sizes[j].items() if p not in plates)
        return (*signature(replace(silos[j], arrays=cut)), unpadded)

    groups = grouped(range(len(silos)), shape_of)
    if rows:
        split_groups = []
        for group in groups:
            largest = [max(sizes[j][p] for p in plates) for j in group]
            which = dict(zip(group, few_groups(largest, waste), strict=True))
            split_groups += grouped(group, which.__getitem__)
        groups = split_groups
    return [_stack(group, silos, sizes, rows, plates) for group in groups]


def few_groups(lengths: Sequence[int], waste: float) -> list[int]:
    """A group for each length: as few as keep the sum of the groups' maxima within ``waste``.

    By dynamic programming over lengths in descending order, of which a group is a run; where there
    are very many, in steps of a 512th of the largest.
    """
    step = -(-max(lengths) // 512)
    coarse = -(-np.asarray(lengths) // step) * step
    u, counts = np.unique(coarse, return_counts=True)
    u, until = u[::-1], np.concatenate([[0], np.cumsum(counts[::-1])])
    run = np.triu(u[:, None] * (until[None, 1:] - until[:-1, None]).astype(float))
    run[np.tril_indices(len(u), -1)] = np.inf  # run[i, j]: padded rows of lengths i to j
    best, begins = run[0], [np.zeros(len(u), int)]
    while best[-1] > waste * coarse.sum():
        each = np.concatenate([[np.inf], best[:-1]])[:, None] + run
        begins.append(each.argmin(0))
        best = each.min(0)
    last, limits = len(u) - 1, []
    for begin in reversed(begins):
        limits.append(u[begin[last]])
        last = begin[last] - 1
    return np.searchsorted(limits, coarse).tolist()


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, in the order in which they come."""
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
    if all(sizes[j] == target for j in group):
        members = [silos[j] for j in group]
    else:
        members = [pad(silos[j], rows, plates, sizes[j], target) for j in group]
    return Bucket(tuple(group), tuple(sizes[j] for j in group), stacked(members))


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one structure and shape as one, with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def padded(buckets: Sequence[Bucket]) -> bool:
    """Whether any silo is."""
    return any(b.data.masks for b in buckets)


def one_by_one(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> list[Bucket]:
    """Each silo as a bucket of its own, unpadded."""
    return [_stack([j], silos, sizes, {}, set()) for j in range(len(silos))]
