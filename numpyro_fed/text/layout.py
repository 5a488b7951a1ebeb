"""The layout of silos for compiled programs: split, checked, padded if harmless, bucketed."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from numpyro_fed.basics.errors import DataError, ModelWarning
from numpyro_fed.data.padding import Bucket, bucket, padded_keys
from numpyro_fed.data.silo_data import (
    ReadSilos,
    SiloData,
    SiloInput,
    SilosInput,
    Sizes,
    read,
    read_one,
)
from numpyro_fed.data.tables import as_dict, column_names
from numpyro_fed.text.facts import skeleton, unflatten_skeleton
from numpyro_fed.text.jaxprs import NONE, Labels, labels_by_name, propagate_labels, trace_program
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.split import split
from numpyro_fed.text.values import IndexCheck, Supports

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

HEAD = "head"  # the name of the array with all that is no array, as JSON


def read_all(silos: SilosInput, model: Callable[..., Any] | None = None) -> ReadSilos:
    """Return the data of the silos of all processes of a program, read and checked."""
    if isinstance(silos, ReadSilos) or jax.process_count() == 1:
        return read(silos, model)
    own = _packed(silos)
    longest = int(process_allgather(np.array(len(own))).max())
    room = np.zeros(longest, np.uint8)
    room[: len(own)] = np.frombuffer(own, np.uint8)
    everyones, columns = [], []
    for part in process_allgather(room):
        with np.load(io.BytesIO(part.tobytes()), allow_pickle=False) as file:
            head = json.loads(file[HEAD].tobytes())
            if "error" in head:
                raise DataError(head["error"])
            for j, (silo, names) in enumerate(zip(head["silos"], head["names"], strict=True)):
                arrays = {name: file[f"{j}/{i}"] for i, name in enumerate(names)}
                everyones.append(unflatten_skeleton(silo["tree"], {**arrays, **silo["static"]}))
                columns.append({name: tuple(of) for name, of in silo["columns"].items()})
    return read(everyones, model, columns)


def _packed(silos: Sequence[SiloInput]) -> bytes:
    """Return the silos of this process, or the error about them, as bytes."""
    head: dict[str, Any]
    try:
        owners = [f"silo {j} of process {jax.process_index()}" for j in range(len(silos))]
        columns = [column_names(s) for s in silos]
        plain = [as_dict(owner, s) for owner, s in zip(owners, silos, strict=True)]
        found = [read_one(owner, s, may_miss=True) for owner, s in zip(owners, plain, strict=True)]
        if odd := next((s for s in plain if not _is_plain(s)), None):
            raise DataError(
                f"over several processes arguments are dicts with names, lists and tuples, got "
                f"{jax.tree.structure(odd)} in process {jax.process_index()}."
            )
    except Exception as error:  # of whatever kind: the other processes wait for an answer
        head, arrays = {"error": f"{type(error).__name__}: {error}"}, dict[str, Any]()
    else:
        names = [list(s.arrays) for s in found]
        of_silos = [
            {"tree": skeleton(s.named_tree()), "static": dict(s.static), "columns": of_silo}
            for s, of_silo in zip(found, columns, strict=True)
        ]
        head = {"silos": of_silos, "names": names}
        arrays = {
            f"{j}/{i}": s.arrays[n] for j, s in enumerate(found) for i, n in enumerate(names[j])
        }
    file = io.BytesIO()
    np.savez(file, **{HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays})
    return file.getvalue()


def _is_plain(tree: object) -> bool:
    """Return whether a tree has the same nodes after it was written as JSON."""
    if type(tree) is dict:
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) is list or type(tree) is tuple:
        return all(_is_plain(part) for part in tree)
    return not isinstance(tree, dict | list | tuple)


class Layout(NamedTuple):
    """A split model and its checks: all that depends on the shapes of data, not on their values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    rows: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: Supports  # the check of observed values
    # the arrays of each silo plate whose rows must not read each other's data
    separable: dict[str, tuple[str, ...]]

    @property
    def plates_of_arrays(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.rows.items()
        }

    def arrange(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
        """Check the values of silos of these shapes, and return them in buckets.

        Padded and unpadded densities are compared at a random point. A model in which rows read
        each other's latents fails that comparison; the silos then stay unpadded, bucketed by
        their sizes, and a warning says so.
        """
        # A site in two silo plates has no row of its own that could be padded.
        buckets = bucket(silos, self.sizes, may_pad=not self.model.structure.nested)
        # Supports first: outside of them densities are NaN or infinite, and row checks compare
        # nothing there.
        for b in buckets:
            self.supports.check(b)
        for j, silo in enumerate(silos):
            self.check_indices(j, silo)
        apart = self.separable if summaries else {}
        harmless = [self.checks.harmless_padding(b, silos, self.rows, apart) for b in buckets]
        if all(harmless):
            return buckets
        warnings.warn(
            "the model's log density changes when a silo's rows are padded by copies of its first "
            "row and masked (does it summarise its rows, as x.mean(0) does, or does a row "
            "read another row's latents? check_decomposition tells). The silos stay "
            "unpadded: one program is compiled for each distinct size. To avoid this, compute such "
            "summaries before the run and pass them as data.",
            category=ModelWarning,
            stacklevel=4,
        )
        return bucket(silos, self.sizes, may_pad=False)


def layout_of(model: Callable[..., Any], silos: Sequence[SiloData]) -> Layout:
    """Return the layout of a model at silos of these shapes, cached with silos that were read."""
    if isinstance(silos, ReadSilos):
        return silos.once(model, partial(layout_of, model, tuple(silos)))
    fm = split(model, silos)
    sizes = tuple(fm.sizes(s) for s in silos)
    rows = padded_keys(silos, sizes)
    apart, supports = separable(fm, silos, sizes, rows), Supports(fm.traces, "silo {}")
    return Layout(fm, sizes, rows, RowChecks(fm), IndexCheck(fm.terms_at_zero), supports, apart)


def lay_out(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.arrange`."""
    layout = layout_of(model, silos)
    return layout, layout.arrange(silos, summaries=summaries)


def separable(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    rows: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the arrays of each silo plate that hold its rows, ``{plate: names}``.

    ``rows`` has the plate of each array that is as long as a silo plate at every silo. A plate is
    left out if its rows cannot be separated: if a site stands in two silo plates at once, if the
    text does not run with one row less (an adjacency matrix), or if it joins rows by an index among
    the data (the sum over the members of a group).
    """
    by_plate: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.structure.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in rows.items() if p == plate]
        alike = len({size[plate] for size in sizes}) == 1
        if sizes[j][plate] < 2 or not plate_follows_arrays(fm, silos[j], keys, plate):
            continue
        if alike:
            # With one size at all silos, an array may be as long as the plate by chance. It then
            # runs as well without being shortened, and is not an array of rows.
            keys = [
                k
                for k in keys
                if not plate_follows_arrays(fm, silos[j], [x for x in keys if x != k], plate)
            ]
        if keys and not _joined_by_index(fm, silos[j], keys):
            by_plate[plate] = tuple(keys)
    return by_plate


def plate_follows_arrays(
    fm: FederatedModel, silo: SiloData, keys: Sequence[str], plate: str
) -> bool:
    """Return whether the plate is one row shorter when these arrays are, and the text runs."""
    size = fm.sizes(silo)[plate]
    cut = replace(silo, arrays={k: a[:-1] if k in keys else a for k, a in silo.arrays.items()})
    less = tuple((k, v - 1 if type(v) is int and v == size else v) for k, v in silo.static)
    # The plate's size may be an integer among the arguments, which is one less, too.
    for shorter in (cut, replace(cut, static=less)) if keys else ():
        try:
            sizes = fm.sizes(shorter)
            jax.eval_shape(fm.terms_at_zero, shorter)
        except (TypeError, ValueError, IndexError):
            continue
        if sizes[plate] == size - 1:
            return True
    return False


def _joined_by_index(fm: FederatedModel, silo: SiloData, keys: Sequence[str]) -> bool:
    """Return whether an integer array among the data indexes what is computed from these arrays."""
    integers = frozenset(k for k, a in silo.arrays.items() if a.dtype.kind in "iu")
    if not integers:
        return False
    rows, joined = frozenset(keys), list[bool]()

    def visit(eqn: JaxprEqn, operands: Sequence[Labels]) -> None:
        if (name := eqn.primitive.name) == "dynamic_slice":
            index, indexed = NONE.union(*operands[1:]), operands[0]
        elif name == "gather" or name.startswith("scatter"):
            # A segment sum is a scatter whose updates are the rows.
            index, indexed = operands[1], operands[0].union(*operands[2:])
        else:
            return
        joined.append(bool(index and index <= integers and indexed & rows))

    program = trace_program(
        lambda arrays: fm.terms_at_zero(replace(silo, arrays=arrays)), silo.arrays
    )
    propagate_labels(program.jaxpr, labels_by_name(silo.arrays), visit)
    return any(joined)
