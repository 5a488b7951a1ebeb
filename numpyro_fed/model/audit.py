"""Tests of a model text by perturbation: does a row's term depend on other rows?

Padding, minibatches, row-wise bounds and the decomposition itself all rest on one property: the log
density term of a row reads the data and latents of that row alone. It is tested on values. Some
rows of a silo get other latents or other data (:class:`SiloChange`), all terms are computed anew,
and the terms of the rows that were left alone must be equal up to rounding.

All changes of a silo run in one program, by ``lax.map`` over a stack of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.jaxprs import NONE, Labels, labels_by_name, propagate_labels, trace_program
from numpyro_fed.model.log_density import FederatedModel

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Relative, between two programs of single precision: XLA may order a row's sums differently in
# each, and a dependence on other rows changes terms by far more.
TOLERANCE = 1e-4
# Changes are vectorised until about so many rows are computed side by side. More of them cost
# memory (four megabytes for each array of one number a row), fewer cost time.
ROWS_AT_ONCE = 2**20
T = TypeVar("T")


class SiloChange(NamedTuple):
    """A change of a silo's latents and data, by silo plate. Plates that it does not name stay."""

    steps: Mapping[str, Array]  # added to the latents of the rows
    source: Mapping[str, Array]  # the row from which each row takes its data
    # whether latents and masks are taken from source, too. Rows that it does not name are
    # then left out
    cut: bool = False

    def of(self, z_L: Rows, data: SiloData, keys: Mapping[str, str]) -> tuple[Rows, SiloData]:
        """Return the changed latents and data; ``keys`` has the plate of each array of rows."""
        arrays = {k: self._rows(keys.get(k), a) for k, a in data.arrays.items()}
        if self.cut:
            z_L = {p: self._rows(p, z) for p, z in z_L.items()}
            data = replace(data, masks={p: self._rows(p, mask) for p, mask in data.masks.items()})
        z_L = {p: z + self.steps[p] if p in self.steps else z for p, z in z_L.items()}
        return z_L, replace(data, arrays=arrays)

    def _rows(self, plate: str | None, array: Array) -> Array:
        return array if plate is None or plate not in self.source else array[self.source[plate]]


def changed_terms(
    terms: Callable[[Rows, SiloData], Rows],
    silo: tuple[Rows, SiloData],
    keys: Mapping[str, str],
    change: Callable[[T], SiloChange],
    ways: T,
    at_once: int | None = None,
) -> Rows:
    """Return the terms of a silo's rows after each of several changes, {plate: (ways, rows)}.

    ``silo`` has latents and data. ``ways`` is a stack of anything, of which ``change`` makes one
    change each; ``at_once`` of them are computed side by side.
    """
    return jax.lax.map(lambda way: terms(*change(way).of(*silo, keys)), ways, batch_size=at_once)


def terms_agree(after: Array, before: Array, rtol: float = TOLERANCE) -> Array:
    """Return whether terms are the same up to rounding, elementwise; infinities must be equal."""
    # The 1 keeps the tolerance absolute near zero, where a log density may cross.
    near = jnp.abs(after - before) <= rtol * (1 + jnp.abs(before))
    return jnp.where(jnp.isfinite(after) & jnp.isfinite(before), near, after == before)


class ChangedRow(NamedTuple):
    """The first row whose term changed although its own latents and data did not, if any."""

    changed: Array  # whether there is one; the other fields mean nothing otherwise
    row: Array
    before: Array
    after: Array


class Perturbation(NamedTuple):
    """A series of changes of some rows of one plate, either of their latents or of their data."""

    plate: str
    # bool array (times, rows): the rows that change each time. A NumPy array if there are
    # steps
    some: Array | np.ndarray
    steps: Array | None = None  # added to the latents of these rows
    source: Array | None = None  # the rows from which these rows take their data


def first_changed_rows(
    terms: Callable[[Rows, SiloData], Rows],
    silo: tuple[Rows, SiloData],
    keys: Mapping[str, str],
    perturbations: Sequence[Perturbation],
    rtol: float,
    at_once: int | None = None,
) -> tuple[Rows, list[dict[str, ChangedRow]]]:
    """Return a silo's terms, and for each perturbation the first row of each plate that it changes.

    The terms are {plate: (rows,)}. The rows that are perturbed themselves do not count, nor do
    terms that are finite neither before nor after.
    """
    sizes = {p: len(z) for p, z in silo[0].items()}
    # All perturbations are one stack, so that the text is compiled once. Its entry 0 changes
    # nothing: both sides of the comparison then come from one program, with the same rounding.
    *starts, total = np.cumsum([1, *(len(m.some) for m in perturbations)]).tolist()

    which, source = dict[str, Array](), dict[str, Array]()
    for m, start in zip(perturbations, starts, strict=True):
        row, stop = jnp.arange(sizes[m.plate]), start + len(m.some)
        if m.source is None:
            stepped = np.zeros((total, len(row)), bool)
            stepped[start:stop] = m.some
            which[m.plate] = jnp.asarray(stepped)
        else:
            unchanged = [jnp.tile(row, (n, 1)) for n in (start, total - stop)]
            replaced = jnp.where(m.some, m.source, row)
            source[m.plate] = jnp.concatenate([unchanged[0], replaced, unchanged[1]])
    steps = {m.plate: m.steps for m in perturbations if m.steps is not None}

    def change(way: tuple[Array, dict[str, Array], dict[str, Array]]) -> SiloChange:
        # The first entry gives the stack its length where there is no perturbation at all.
        _, stepped, source = way
        return SiloChange({p: steps[p] * some[:, None] for p, some in stepped.items()}, source)

    def compare(before: Array, after: Array, may_change: ArrayLike) -> ChangedRow:
        finite = jnp.isfinite(before) | jnp.isfinite(after)
        wrong = ~terms_agree(after, before, rtol) & finite & ~jnp.asarray(may_change)
        time, row = jnp.unravel_index(wrong.argmax(), wrong.shape)
        return ChangedRow(wrong.any(), row, before[row], after[time, row])

    ways = jnp.arange(total), which, source
    rows = changed_terms(terms, silo, keys, change, ways, at_once)
    original = {p: stack[0] for p, stack in rows.items()}
    return original, [
        {
            p: compare(original[p], after[i : i + len(m.some)], m.some if p == m.plate else False)
            for p, after in rows.items()
        }
        for m, i in zip(perturbations, starts, strict=True)
    ]


def default_rtol() -> float:
    """Return the relative change of a term that rounding explains, within one program."""
    # About a hundred times the machine epsilon in single precision, and more in double: sums over
    # a row's events lose some digits. A dependence on other rows changes terms by far more.
    return 1e-10 if jnp.zeros(()).dtype == np.float64 else 1e-5


def row_groups(n: int) -> np.ndarray:
    """Return groups of rows to perturb together, bool (groups, n).

    They are all rows, and for each bit the rows whose number has it set, and those that have not.
    The numbers of two rows differ in some bit, so that for every pair of rows some group perturbs
    one and leaves the other: 1 + 2 log2(n) changes test all pairs.
    """
    bits = np.arange(n) >> np.arange((n - 1).bit_length())[:, None] & 1 == 1
    return np.concatenate([np.ones((1, n), bool), bits, ~bits])


def hashed_integers(i: int, n: int) -> Array:
    """Return the ``i``-th sequence of pseudorandom integers (n,) below 2**23.

    They are a hash of a counter, by xor-shifts and multiplications. It compiles in a fraction of
    the time of ``jax.random``, and these programs run once.
    """
    # 0x9E3779B9 is 2**32 over the golden ratio: sequences start far apart. The other constants
    # are those of a 32-bit finaliser ("lowbias32"), every bit of whose result depends on all.
    x = jnp.arange(1, n + 1, dtype=jnp.uint32) + np.uint32(i * 0x9E3779B9 % 2**32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return ((x ^ (x >> 16)) >> 9).astype(jnp.int32)


def hashed_normals(i: int, *shape: int) -> Array:
    """Return the ``i``-th of a series of arrays of standard normals."""
    # The half keeps the argument away from 0, where the quantile is infinite. 23 bits are what
    # single precision holds next to 1.
    return ndtri((hashed_integers(i, math.prod(shape)) + 0.5) * 2.0**-23).reshape(shape)


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
    """Return whether the plate is one row shorter when these arrays are, and the text runs.

    If the plate's size is an integer among the arguments, that integer is one less, too.
    """
    size = fm.sizes(silo)[plate]
    cut = replace(silo, arrays={k: a[:-1] if k in keys else a for k, a in silo.arrays.items()})
    less = tuple((k, v - 1 if type(v) is int and v == size else v) for k, v in silo.static)
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
