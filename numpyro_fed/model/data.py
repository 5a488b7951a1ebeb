"""What a silo holds: checked, padded to common shapes, masked and stacked into buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from numpyro_fed.errors import DataError

Sizes = dict[str, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiloData:
    """The data of one silo, or of a stack of silos of one shape: a pytree.

    Attributes
    ----------
    arrays : dict of str to array
        The array-valued keyword arguments of the model. Those within a dict or a list have names
        such as ``"x.age"`` and ``"x.0"``.
    masks : dict of str to bool array of shape (size,)
        For each silo plate that was padded: which rows are real. Plates that were not padded
        are left out.
    static : tuple of (str, value)
        Python ints, bools, strings and None: part of the program, not of its input.
    form : (PyTreeDef, names), optional
        How arguments that are trees are put together again from what has these names.
    """

    arrays: dict[str, Any]
    masks: dict[str, Any] = field(default_factory=dict)
    static: tuple[tuple[str, Any], ...] = field(default=(), metadata={"static": True})
    form: tuple[PyTreeDef, tuple[str, ...]] | None = field(default=None, metadata={"static": True})

    @property
    def leaves(self) -> dict[str, Any]:
        """All arrays and Python values by name."""
        return {**self.arrays, **dict(self.static)}

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the model."""
        if self.form is None:
            return self.leaves
        tree, names = self.form
        return jax.tree.unflatten(tree, [self.leaves[name] for name in names])

    def named_tree(self) -> Any:
        """The keyword arguments with the name of each leaf in its place."""
        if self.form is None:
            return {name: name for name in self.leaves}
        return jax.tree.unflatten(*self.form)

    def keep(self, plate: str, rows: Array) -> Array:
        """``rows`` (size, ...) of one plate with exactly zero in the padded rows."""
        if plate not in self.masks:
            return rows
        mask = self.masks[plate]
        return jnp.where(mask.reshape(mask.shape + (1,) * (rows.ndim - 1)), rows, 0.0)


class Bucket(NamedTuple):
    """Silos that share one shape, stacked along a leading axis."""

    silos: tuple[int, ...]  # their numbers in the user's list
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each of them
    data: SiloData  # every leaf has a leading axis of len(silos)


def read(silos: Sequence[Mapping[str, Any]]) -> list[SiloData]:
    """Check the user's list of dicts and turn each into a :class:`SiloData` of NumPy arrays.

    Raises
    ------
    DataError
        For an empty list, silos with different keys, dtypes or numbers of axes, NaN or infinity,
        or a value that is not an array, a number, a string, None or a tree of these.
    """
    if isinstance(silos, Mapping) or not isinstance(silos, Sequence):
        raise DataError(
            "silos must be a list with one dict of keyword arguments for each silo, "
            f"got {type(silos).__name__}. For a single silo pass a list with one dict."
        )
    if not silos:
        raise DataError("the list of silos is empty: pass one dict of arrays for each silo.")
    read_silos = [_read_one(j, silo) for j, silo in enumerate(silos)]
    _check_alike(read_silos)
    return read_silos


def _read_one(j: int, silo: Mapping[str, Any]) -> SiloData:
    if not isinstance(silo, Mapping):
        raise DataError(f"silo {j} must be a dict of keyword arguments, got {type(silo).__name__}.")
    paths, tree = tree_flatten_with_path(dict(silo), is_leaf=_is_leaf)
    names = tuple(keystr(path, simple=True, separator=".") for path, _ in paths)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"silo {j}: {twice} name two values each. Rename one of them.")
    arrays: dict[str, np.ndarray] = {}
    static: list[tuple[str, Any]] = []
    for name, (_, value) in zip(names, paths, strict=True):
        if isinstance(value, np.bool_ | np.integer):
            value = value.item()
        if value is None or isinstance(value, bool | int | str):
            static.append((name, value))
        else:
            arrays[name] = _read_array(j, name, value)
    nested = any(len(path) > 1 for path, _ in paths) or len(names) < len(silo)
    return SiloData(arrays, {}, tuple(static), (tree, names) if nested else None)


def _is_leaf(value: Any) -> bool:
    """Lists of numbers, however deep, are arrays; a list with arrays in it is a tree."""
    return value is None or (type(value) in (list, tuple) and _all_numbers(value))


def _all_numbers(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_all_numbers, value))
    return value is not None and not isinstance(value, dict) and getattr(value, "ndim", 0) == 0


def _read_array(j: int, name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"silo {j}, '{name}': expected an array of numbers, got {type(value).__name__} "
            f"with dtype {array.dtype}. Convert it to a numeric array first."
        )
    original, array = array, array.astype(canonicalize_dtype(array.dtype), copy=False)
    if array.dtype.kind in "iu" and not np.array_equal(original, array):
        raise DataError(
            f"silo {j}, '{name}': whole numbers beyond the range of {array.dtype}. Make them "
            "smaller (an index from 0, say), or enable double precision by "
            "jax.config.update('jax_enable_x64', True)."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise DataError(
            f"silo {j}, '{name}': {bad} of {array.size} values are NaN or infinite. Mark "
            "missing rows by a mask array in the data and numpyro.handlers.mask around the "
            "site, and put any finite number in their place."
        )
    return array


def _check_alike(silos: Sequence[SiloData]) -> None:
    """The same names everywhere, and for each one kind of value; None may stand for any."""
    expected = silos[0].leaves.keys()
    first: dict[str, tuple[int, Any]] = {}
    for j, silo in enumerate(silos):
        if silo.leaves.keys() != expected:
            raise DataError(
                f"silo {j} has the keys {sorted(silo.leaves)} but silo 0 has {sorted(expected)}. "
                "Every silo must hold the same keyword arguments; None says that one is missing."
            )
        for name, value in silo.leaves.items():
            if value is not None:
                _check_kind(name, j, value, *first.setdefault(name, (j, value)))


def _check_kind(name: str, j: int, value: Any, i: int, other: Any) -> None:
    if isinstance(value, np.ndarray) != isinstance(other, np.ndarray):
        raise DataError(
            f"silo {j}, '{name}': an array at one silo and a plain Python value at another "
            f"(silo {i} has {other!r:.40}). Use the same kind of value everywhere."
        )
    if not isinstance(value, np.ndarray):
        return
    if value.dtype != other.dtype:
        raise DataError(
            f"silo {j}, '{name}' has dtype {value.dtype} but silo {i} has {other.dtype}. "
            f"Convert one of them, for example with .astype('{other.dtype}')."
        )
    if value.ndim != other.ndim:
        raise DataError(
            f"silo {j}, '{name}' has shape {value.shape} but silo {i} has {other.shape}. Sizes "
            "may differ between silos, but not the number of axes."
        )


def signature(data: SiloData) -> tuple:
    """Shapes, dtypes and static values: what a program is compiled for."""
    return (
        data.static,
        data.form,
        tuple((k, a.shape, str(a.dtype)) for k, a in data.arrays.items()),
        tuple((k, m.shape) for k, m in data.masks.items()),
    )


def padded_keys(silos: Sequence[SiloData], sizes: Sequence[Sizes]) -> dict[str, str]:
    """Which arrays are rows of which silo plate: ``{key: plate}``.

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

    def shape_of(j: int) -> tuple:
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


def grouped(items: Any, key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items with equal keys together, in the order in which they come."""
    groups: dict[Any, list[Any]] = {}
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
