"""A silo's data: read once from what the user passes, checked, and named array by array.

``SiloData`` is a pytree of arrays beside static Python values, so that silos of one signature share
one compiled program.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.experimental.multihost_utils import process_allgather
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.tables import (
    SiloInput,
    as_dict,
    check_columns,
    column_names,
    is_frame,
    model_arguments,
)

Sizes = dict[str, int]  # the number of rows of each silo plate
Skeleton = str | list[Any]  # a tree in JSON: a name, or [type of node, contents]
NUMBERED = re.compile(r"\bsilo (\d+)\b")  # how errors call a silo that has no name
HEAD = "head"  # the name of the array with all that is no array, as JSON

# The least sd of a column, in gaps between neighbouring numbers of single precision. Rounding adds
# a uniform error of sd gap / sqrt(12) = 0.29 gaps to each value. At an sd of ten gaps it is 3 % of
# the column's sd; columns with less would lose more, and are refused.
GAPS = 10.0

Made = TypeVar("Made")
Listed = TypeVar("Listed")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiloData:
    """The data of one silo, or of a stack of silos of one shape: a pytree."""

    # the array-valued keyword arguments of the model. Arrays inside of a dict or a list have
    # names such as "x.age" and "x.0"
    arrays: dict[str, Any]
    # for each silo plate that was padded: which rows are real. Plates that were not padded
    # are left out
    masks: dict[str, Any] = field(default_factory=dict)
    # how often each row of a silo plate counts, if a minibatch stands for all rows
    weights: dict[str, Any] = field(default_factory=dict, kw_only=True)
    # Python ints, bools, strings and None by name: part of the program, not of its input
    static: tuple[tuple[str, Any], ...] = field(default=(), metadata={"static": True})
    # the structure of arguments that are trees, and the names of their leaves
    treedef: tuple[PyTreeDef, tuple[str, ...]] | None = field(
        default=None, metadata={"static": True}
    )
    # the arrays in which NaN stands for an outcome that is missing, here or at another silo
    missing: tuple[str, ...] = field(default=(), kw_only=True, metadata={"static": True})
    # the names of the columns of arrays that come from DataFrames
    columns: tuple[tuple[str, tuple[str, ...]], ...] = field(
        default=(), kw_only=True, metadata={"static": True}
    )

    @property
    def leaves(self) -> dict[str, Any]:
        """Return all arrays and Python values by name."""
        return {**self.arrays, **dict(self.static)}

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model."""
        if self.treedef is None:
            return self.leaves
        tree, names = self.treedef
        return jax.tree.unflatten(tree, [self.leaves[name] for name in names])

    @property
    def described(self) -> dict[str, Any]:
        """Return the arguments as shown in messages: the shapes of arrays, and plain values."""
        return {k: getattr(v, "shape", v) for k, v in self.kwargs.items()}

    def named_tree(self) -> Any:
        """Return the keyword arguments with the name of each leaf in its place."""
        if self.treedef is None:
            return {name: name for name in self.leaves}
        return jax.tree.unflatten(*self.treedef)

    def masked(self, plate: str, rows: Array) -> Array:
        """Return ``rows`` (size, ...) of one plate with exactly zero in the padded rows."""
        if plate not in self.masks:
            return rows
        mask = self.masks[plate]
        return jnp.where(mask.reshape(mask.shape + (1,) * (rows.ndim - 1)), rows, 0.0)

    def total(self, rows: Mapping[str, Array]) -> Array:
        """Return the sum of the terms of all rows, {plate: (size,)}, each as often as it counts."""
        sums = (self.weights.get(p, 1.0) * terms.sum() for p, terms in rows.items())
        return sum(sums, jnp.zeros(()))


class ReadSilos(Sequence[SiloData]):
    """The data of all silos, read once, with a cache of what was built for each text: a pytree.

    ``names`` are the silos' names; empty where they have none.
    """

    def __init__(self, silos: Iterable[SiloData], names: tuple[str, ...] = ()):
        self._silos, self.names = tuple(silos), names
        # By id, since a text may not be hashable. The text is kept as well: as long as it lives,
        # no other object can have its id.
        self._by_text: dict[int, tuple[Callable[..., Any], Any]] = {}

    def __len__(self) -> int:
        return len(self._silos)

    def __getitem__(self, i: Any) -> Any:
        return self._silos[i]

    def once(self, text: Callable[..., Any], make: Callable[[], Made]) -> Made:
        """Return what ``make`` returns, computed once for each text."""
        if id(text) not in self._by_text:
            self._by_text[id(text)] = text, make()
        made: Made = self._by_text[id(text)][1]
        return made


jax.tree_util.register_pytree_node(
    ReadSilos,
    lambda silos: (silos[:], silos.names),
    lambda names, silos: ReadSilos(silos, names),
)

# What a user passes as all silos: a list, or a dict by the names of silos.
SilosInput: TypeAlias = Sequence[SiloInput] | Mapping[str, SiloInput] | ReadSilos


def signature(data: SiloData) -> tuple[Hashable, ...]:
    """Return shapes, dtypes and static values of data: one program is compiled for each."""
    return (
        data.static,
        data.treedef,
        data.missing,
        tuple((k, a.shape, str(a.dtype)) for k, a in data.arrays.items()),
        tuple((k, m.shape) for k, m in data.masks.items()),
    )


def read_all(silos: SilosInput, model: Callable[..., Any] | None = None) -> ReadSilos:
    """Return the data of the silos of all processes of a program, read and checked."""
    if isinstance(silos, ReadSilos) or jax.process_count() == 1:
        return read(silos, model)
    # This process's own silos, or the error about them, as bytes.
    head: dict[str, Any] = {"silos": []}
    arrays: dict[str, Any] = {}
    try:
        process, names, held = f"process {jax.process_index()}", names_of(silos), listed(silos)
        found = [
            read_one(f"{label(j, names)} of {process}", s, may_miss=True)
            for j, s in enumerate(held)
        ]
        if odd := next((s for s in found if not _is_plain(s.kwargs)), None):
            raise DataError(
                "over several processes arguments are dicts with names, lists and tuples, got "
                f"{jax.tree.structure(odd.kwargs)} in {process}."
            )
    except Exception as error:  # of whatever kind: the other processes wait for an answer
        head = {"error": f"{type(error).__name__}: {error}"}
    else:
        for j, s in enumerate(found):
            tree, kept = skeleton(s.named_tree()), {"static": dict(s.static), "names": [*s.arrays]}
            name = names[j] if names else None
            head["silos"].append({"name": name, "tree": tree, "columns": dict(s.columns), **kept})
            arrays |= {f"{j}/{i}": a for i, a in enumerate(s.arrays.values())}
    packed = io.BytesIO()
    np.savez(packed, **{HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})
    own = packed.getvalue()
    longest = int(process_allgather(np.array(len(own))).max())
    room = np.zeros(longest, np.uint8)
    room[: len(own)] = np.frombuffer(own, np.uint8)
    everyones, columns, everyones_names = list[Any](), [], list[Any]()
    for part in process_allgather(room):
        with np.load(io.BytesIO(part.tobytes()), allow_pickle=False) as file:
            head = json.loads(file[HEAD].tobytes())
            if "error" in head:
                raise DataError(head["error"])
            for j, silo in enumerate(head["silos"]):
                arrays = {name: file[f"{j}/{i}"] for i, name in enumerate(silo["names"])}
                everyones.append(unflatten_skeleton(silo["tree"], {**arrays, **silo["static"]}))
                columns.append({name: tuple(of) for name, of in silo["columns"].items()})
                everyones_names.append(silo["name"])
    named = [name for name in everyones_names if name is not None]
    if not named:
        return read(everyones, model, columns)
    if len(named) < len(everyones):
        raise DataError("silos have names in some processes alone: name all of them, or none.")
    pairs = zip(checked_names(named), everyones, strict=True)
    return read(dict(pairs), model, columns)


def read(
    silos: SilosInput,
    model: Callable[..., Any] | None = None,
    columns: Sequence[Mapping[str, tuple[str, ...]]] | None = None,
) -> ReadSilos:
    """Read and check the user's list of dicts, each into a :class:`SiloData` of NumPy arrays.

    DataFrames and their columns become arrays, and a silo that is a DataFrame the dict of its
    columns; ``columns`` are their names at each silo, where they became arrays elsewhere. NaN is
    read as a missing value: whether it is one of an outcome, which alone may be missing, the
    model's text says (:mod:`numpyro_fed.text.split`). Data that were read already are returned
    as they are. A model with a method ``of_silos`` adds arrays of its own to each silo's data, such
    as the number of the silo's block of a site.
    """
    if isinstance(silos, ReadSilos):
        return silos
    arguments = model_arguments(model)
    names, held = names_of(silos), listed(silos)
    owners = [label(j, names) for j in range(len(held))]
    plain = [as_dict(*pair, arguments) for pair in zip(owners, held, strict=True)]
    first: dict[str, tuple[str, tuple[str, ...]]] = {}
    for owner, named in zip(owners, columns or map(column_names, held), strict=True):
        for name, own in named.items():
            before, expected = first.setdefault(name, (owner, own))
            check_columns(owner, name, own, expected, before)
    agreed = tuple(sorted((name, own) for name, (_, own) in first.items()))
    all_data = with_model_data(model, plain)
    pairs = zip(owners, all_data, strict=True)
    found = [_read_plain(owner, silo, may_miss=True) for owner, silo in pairs]
    # Whole numbers that are missing at some silo are floats there, beside NaN. They become floats
    # at the silos that have all of them, so that all silos hold the same kind.
    missing = tuple(sorted({name for silo in found for name in silo.missing}))
    for arrays in (silo.arrays for silo in found):
        for name in filter(arrays.__contains__, missing):
            floats = arrays[name].astype(jnp.result_type(float))
            if np.array_equal(floats, arrays[name]):
                arrays[name] = floats
    _check_alike(found, owners)
    kept = (replace(silo, missing=missing, columns=agreed) for silo in found)
    return ReadSilos(kept, names)


def read_one(owner: str, data: SiloInput, *, may_miss: bool = False) -> SiloData:
    """Read and check one party's data, of ``owner`` in errors; NaN only if numbers ``may_miss``."""
    columns = tuple(sorted(column_names(data).items()))
    return replace(_read_plain(owner, as_dict(owner, data), may_miss=may_miss), columns=columns)


# Words that stand where a silo is asked for, and mean none of them, or several.
NEW, OWN_ROWS, ALL = "new", "own rows", "all"


def names_of(silos: object) -> tuple[str, ...]:
    """Return the names of silos that come as a dict by their names; empty if they have none."""
    if not isinstance(silos, Mapping) or not silos:
        return ()
    if not all(map(is_held, silos.values())):
        return ()  # the data of one silo, which are refused
    return checked_names(tuple(silos))


def checked_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return the names of silos; raise an error for one that is none, or comes twice."""
    for name in names:
        if not isinstance(name, str) or name in ("", NEW, OWN_ROWS, ALL):
            raise DataError(
                f"{name!r} cannot be the name of a silo: expected a text that is not empty, and "
                f"none of '{NEW}', '{OWN_ROWS}' and '{ALL}', which mean something else."
            )
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise DataError(f"two silos have the name {twice[0]!r}: give each silo a name of its own.")
    return tuple(map(str, names))


def names_or_numbers(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the names of silos, or their numbers as text if they have no names."""
    return names or tuple(map(str, range(number)))


def is_held(value: object) -> bool:
    """Return whether a value may be what a silo holds."""
    return isinstance(value, Mapping) or is_frame(value)


def label(j: int, names: Sequence[str]) -> str:
    """Return how messages call a silo: by its name, or by its number if silos have no names."""
    return f"silo '{names[j]}'" if names else f"silo {j}"


@contextmanager
def by_their_names(silos: object) -> Iterator[None]:
    """Enter a call in whose errors silos are called by their names, if they have some."""
    try:
        yield
    except Exception as error:
        names = getattr(silos, "silo_names", ()) or names_of(silos)
        if names and error.args and isinstance(error.args[0], str):

            def name(found: re.Match[str]) -> str:
                j = int(found[1])
                return label(j, names) if j < len(names) else found[0]

            error.args = (NUMBERED.sub(name, error.args[0]), *error.args[1:])
        raise


def listed(
    silos: Sequence[Listed] | Mapping[str, Listed],
    held: str = "one dict of keyword arguments for each silo",
) -> Sequence[Listed]:
    """Return silos, once they are a list of what each holds."""
    if names_of(silos) and isinstance(silos, Mapping):
        return list(silos.values())
    if isinstance(silos, Mapping) and any(map(is_held, silos.values())):
        name, odd = next((n, one) for n, one in silos.items() if not is_held(one))
        raise DataError(
            f"silo {name!r} must be a dict of keyword arguments or a DataFrame, got "
            f"{type(odd).__name__}. For a single silo pass a list with one dict."
        )
    if isinstance(silos, Mapping) or not isinstance(silos, Sequence):
        raise DataError(
            f"silos must be a list with {held}, got {type(silos).__name__}. For a single silo pass "
            "a list with one dict. A dict has what each silo holds by the silo's name."
        )
    if not silos:
        raise DataError("the list of silos is empty: pass one dict of arrays for each silo.")
    return silos


def with_model_data(
    model: Callable[..., Any] | None, silos: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the silos' data with the arrays that the model adds to them, if it adds any."""
    # The model may be wrapped in handlers (.fn) and in functools.partial (.func).
    while model is not None:
        if hasattr(model, "of_silos"):
            return model.of_silos(silos)
        model = getattr(model, "fn", None) or getattr(model, "func", None)
    return silos


def _read_plain(owner: str, data: object, *, may_miss: bool) -> SiloData:
    """Read and check the data of a party that holds no DataFrames."""
    if not isinstance(data, Mapping):
        raise DataError(f"{owner} must be a dict of keyword arguments, got {type(data).__name__}.")
    paths, tree = tree_flatten_with_path(dict(data), is_leaf=is_leaf)
    names = tuple(keystr(path, simple=True, separator=".") for path, _ in paths)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"{owner}: {twice} name two values each. Rename one of them.")
    arrays: dict[str, np.ndarray] = {}
    static: list[tuple[str, Any]] = []
    missing: list[str] = []
    for name, (_, value) in zip(names, paths, strict=True):
        if isinstance(value, np.bool_ | np.integer):
            value = value.item()
        if value is None or isinstance(value, bool | int | str):
            static.append((name, value))
        else:
            array = arrays[name] = _read_array(owner, name, value)
            if array.dtype.kind != "f" or np.isfinite(array).all():
                continue
            if not may_miss or np.isinf(array).any():
                raise DataError(
                    f"{owner}, '{name}': {(~np.isfinite(array)).sum()} of {array.size} values are "
                    "NaN or infinite. Mark missing rows by a mask array in the data and "
                    "numpyro.handlers.mask around the site, and put any finite number in their "
                    "place."
                )
            missing.append(name)
    nested = any(len(path) > 1 for path, _ in paths) or len(names) < len(data)
    trees = (tree, names) if nested else None
    return SiloData(arrays, {}, tuple(static), trees, missing=tuple(missing))


def is_leaf(value: object) -> bool:
    """Return whether a value is a leaf: None, or a list of numbers; one of arrays is a tree."""
    if not isinstance(value, list | tuple) or type(value) not in (list, tuple):
        return value is None
    return all(
        is_leaf(part)
        if type(part) in (list, tuple)
        else part is not None and not isinstance(part, dict) and getattr(part, "ndim", 0) == 0
        for part in value
    )


def _read_array(owner: str, name: str, value: object) -> np.ndarray:
    if np.ma.is_masked(value):
        masked = np.ma.getmaskarray(np.ma.asarray(value))
        raise DataError(
            f"{owner}, '{name}': a masked array, of which {masked.sum()} of {masked.size} values "
            "are masked. A model would read the numbers behind the "
            f"mask. Pass {name}.filled(0) (any number that can be observed), and a boolean array "
            f"seen=~numpy.ma.getmaskarray({name}) besides; then write "
            "`with numpyro.handlers.mask(mask=seen):` around the observed site."
        )
    array = np.asarray(value)
    if array.dtype.kind in "Mm":
        raise DataError(
            f"{owner}, '{name}': expected an array of numbers, got dates or durations "
            f"({array.dtype}). A date is no number until somebody says in which unit and from "
            f"which day on: make it one, such as days ({name} - numpy.datetime64('2020-01-01')) / "
            "numpy.timedelta64(1, 'D')."
        )
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{owner}, '{name}': expected an array of numbers, got {type(value).__name__} "
            f"with dtype {array.dtype.type.__name__}. Convert it to a numeric array first."
        )
    original, array = array, array.astype(canonicalize_dtype(array.dtype), copy=False)
    if array.dtype.kind == "f":
        # Narrower floats are widened to the default precision, in which parameters are.
        array = array.astype(np.result_type(array, jnp.result_type(float)), copy=False)
    # JAX would cut integers to 32 bits in silence, and an id of 2**32 would become 0.
    if array.dtype.kind in "iu" and not np.array_equal(original, array):
        raise DataError(
            f"{owner}, '{name}': whole numbers beyond the range of {array.dtype}. Make them "
            "smaller (an index from 0, say), or enable double precision by "
            "jax.config.update('jax_enable_x64', True)."
        )
    narrower = array.dtype.kind == "f" and array.dtype.itemsize < original.dtype.itemsize
    if not narrower or not array.size or np.isinf(array).any():
        return array
    # A column is refused if rounding to single precision loses a part of its spread.
    rows = original.reshape(-1, original.shape[-1] if original.ndim > 1 else 1)
    narrow, present = array.reshape(rows.shape), ~np.isnan(rows)
    if not present.all():
        # What is missing stands at the first number that is there: it adds nothing to a spread.
        first = rows[present.argmax(0), np.arange(rows.shape[1])]
        rows = np.where(present, rows, np.where(np.isnan(first), 0.0, first))
        narrow = np.where(present, narrow, rows.astype(narrow.dtype))
    # About the first row: the square of a large mean would cancel digits of the sd.
    sd = np.std(rows - rows[:1], axis=0)
    largest = np.abs(narrow).max(0, initial=0.0)
    gap = np.spacing(largest).astype(np.float64)
    # Values that single precision holds exactly, such as counts, lose nothing however dense.
    rounded = np.abs(narrow - rows).max(0, initial=0.0) > 0
    # A column of ones that was computed holds 1 + 1e-16: it is constant, and stays so.
    varies = sd > 64 * np.finfo(rows.dtype).eps * largest
    lost = rounded & varies & (sd < GAPS * gap)
    if lost.any():
        column = int(lost.argmax())
        where = f"column {column} of '{name}'" if original.ndim > 1 else f"'{name}'"
        centre = float(rows[:, column].mean())
        raise DataError(
            f"{owner}, {where}: values near {centre:.6g} with an sd of {sd[column]:.2g}, but "
            f"numbers of single precision are {gap[column]:.2g} apart there, so that most of what "
            f"they say would be lost. Subtract one number from this column at every silo (such as "
            f"{centre:.3g}), or enable double precision by jax.config.update('jax_enable_x64', "
            "True), as numpyro_fed.fit does by itself."
        )
    return array


def _check_alike(silos: Sequence[SiloData], owners: Sequence[str]) -> None:
    """Refuse silos with other names or kinds of values than others; None may stand for any."""
    expected = silos[0].leaves.keys()
    first: dict[str, tuple[str, Any]] = {}
    for owner, silo in zip(owners, silos, strict=True):
        if silo.leaves.keys() != expected:
            raise DataError(
                f"{owner} has the keys {sorted(silo.leaves)} but {owners[0]} has "
                f"{sorted(expected)}. Every silo must hold the same keyword arguments; None says "
                "that one is missing."
            )
        for name, value in silo.leaves.items():
            if value is None:
                continue
            before, other = first.setdefault(name, (owner, value))
            if isinstance(value, np.ndarray) != isinstance(other, np.ndarray):
                raise DataError(
                    f"{owner}, '{name}': an array at one silo and a plain Python value at another "
                    f"({before} has {other!r:.40}). Use the same kind of value everywhere."
                )
            if not isinstance(value, np.ndarray):
                continue
            if value.dtype != other.dtype:
                common = jnp.promote_types(value.dtype, other.dtype)
                pair = ((owner, value), (before, other))
                who = [one for one, a in pair if a.dtype != common]
                raise DataError(
                    f"{owner}, '{name}' has dtype {value.dtype} but {before} has {other.dtype}. "
                    f"Convert '{name}' of {' and '.join(who)} with .astype('{common}'), which "
                    "holds both."
                )
            if value.ndim != other.ndim:
                raise DataError(
                    f"{owner}, '{name}' has shape {value.shape} but {before} has {other.shape}. "
                    "Sizes may differ between silos, but not the number of axes."
                )


def _is_plain(tree: object) -> bool:
    """Return whether a tree has the same nodes after it was written as JSON."""
    if type(tree) is dict:
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) is list or type(tree) is tuple:
        return all(_is_plain(part) for part in tree)
    return not isinstance(tree, dict | list | tuple)


def skeleton(tree: object) -> Any:
    """Return a tree of names in a form for JSON: each node as [type, contents]."""
    if isinstance(tree, dict):
        return ["dict", {k: skeleton(v) for k, v in tree.items()}]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, [skeleton(v) for v in tree]]
    return tree


def unflatten_skeleton(skeleton: Skeleton, leaves: Mapping[str, Any]) -> Any:
    """Return the tree that a skeleton describes, with leaves in the place of their names."""
    if isinstance(skeleton, str):
        return leaves[skeleton]
    kind, parts = skeleton
    unflatten = partial(unflatten_skeleton, leaves=leaves)
    if kind == "dict":
        return {k: unflatten(v) for k, v in parts.items()}
    return (tuple if kind == "tuple" else list)(map(unflatten, parts))


def array_bytes(value: ArrayLike) -> bytes:
    """Return the dtype, shape and numbers of an array as bytes, for comparison and hashes."""
    if isinstance(value, Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
