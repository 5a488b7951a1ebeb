"""How a text is put to the test: a silo is changed, and the terms of rows are looked at again."""

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
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.jaxprs import NONE, Labels, follow, labels_by_name, traced

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

TOLERANCE = 1e-4  # between two programs
NUMBERS = 2**20  # rows, about, that are looked at side by side
T = TypeVar("T")


class Change(NamedTuple):
    """Another silo made of one, by silo plate; plates that are left out stay as they are."""

    steps: Mapping[str, Array]  # what is added to the latents of rows
    source: Mapping[str, Array]  # the rows whose data stand in the places of rows
    cut: bool = False  # whether latents and masks are theirs, too: all other rows are left out

    def of(self, z_L: Rows, data: SiloData, keys: Mapping[str, str]) -> tuple[Rows, SiloData]:
        """Return latents and data; ``keys`` says which arrays are rows of which plate."""
        arrays = {k: self._rows(keys.get(k), a) for k, a in data.arrays.items()}
        if self.cut:
            z_L = {p: self._rows(p, z) for p, z in z_L.items()}
            data = replace(data, masks={p: self._rows(p, mask) for p, mask in data.masks.items()})
        z_L = {p: z + self.steps[p] if p in self.steps else z for p, z in z_L.items()}
        return z_L, replace(data, arrays=arrays)

    def _rows(self, plate: str | None, held: Array) -> Array:
        return held if plate is None or plate not in self.source else held[self.source[plate]]


def perturbed(
    terms: Callable[[Rows, SiloData], Rows],
    silo: tuple[Rows, SiloData],
    keys: Mapping[str, str],
    change: Callable[[T], Change],
    ways: T,
    at_once: int | None = None,
) -> Rows:
    """The terms {plate: (ways, rows)} of a silo, its latents and data, after each of some changes.

    ``change`` makes one of what ``ways`` is a stack of; ``at_once`` are looked at side by side.
    """

    def after(way: T) -> Rows:
        return terms(*change(way).of(*silo, keys))

    return jax.lax.map(after, ways, batch_size=at_once)


def close(after: Array, before: Array, rtol: float = TOLERANCE) -> Array:
    """Whether terms of rows are the same, up to rounding; what is infinite must stay so."""
    near = jnp.abs(after - before) <= rtol * (1 + jnp.abs(before))
    return jnp.where(jnp.isfinite(after) & jnp.isfinite(before), near, after == before)


class Moved(NamedTuple):
    """The first row whose term changed although it should not have: was there one, and which."""

    moved: Array
    row: Array
    before: Array
    after: Array


class Move(NamedTuple):
    """A move of some rows of a plate at a time: of their latents, or to the data of other rows."""

    plate: str
    some: Array | np.ndarray  # which rows are moved each time (times, rows); NumPy's with steps
    steps: Array | None = None  # what is added to their latents (rows, dim)
    source: Array | None = None  # whose data they are given (times, rows)


def first_moved(
    terms: Callable[[Rows, SiloData], Rows],
    silo: tuple[Rows, SiloData],
    keys: Mapping[str, str],
    moves: Sequence[Move],
    rtol: float,
    at_once: int | None = None,
) -> tuple[Rows, list[dict[str, Moved]]]:
    """The terms of a silo, and for each move the first row of each plate that it changes.

    Rows that are moved themselves do not count, nor terms that are finite neither before nor after.
    """
    sizes = {p: len(z) for p, z in silo[0].items()}
    *starts, total = np.cumsum([1, *(len(m.some) for m in moves)]).tolist()

    which, source = dict[str, Array](), dict[str, Array]()
    for m, start in zip(moves, starts, strict=True):
        place, stop = jnp.arange(sizes[m.plate]), start + len(m.some)
        if m.source is None:
            moved = np.zeros((total, len(place)), bool)
            moved[start:stop] = m.some
            which[m.plate] = jnp.asarray(moved)
        else:
            still = [jnp.tile(place, (n, 1)) for n in (start, total - stop)]
            replaced = jnp.where(m.some, m.source, place)
            source[m.plate] = jnp.concatenate([still[0], replaced, still[1]])
    steps = {m.plate: m.steps for m in moves if m.steps is not None}

    def change(way: tuple[Array, dict[str, Array], dict[str, Array]]) -> Change:
        _, moved, source = way
        return Change({p: steps[p] * some[:, None] for p, some in moved.items()}, source)

    def compare(before: Array, after: Array, may_move: ArrayLike) -> Moved:
        finite = jnp.isfinite(before) | jnp.isfinite(after)
        wrong = ~close(after, before, rtol) & finite & ~jnp.asarray(may_move)
        time, row = jnp.unravel_index(wrong.argmax(), wrong.shape)
        return Moved(wrong.any(), row, before[row], after[time, row])

    ways = jnp.arange(total), which, source
    rows = perturbed(terms, silo, keys, change, ways, at_once)
    first = {p: each[0] for p, each in rows.items()}
    return first, [
        {
            p: compare(first[p], each[i : i + len(m.some)], m.some if p == m.plate else False)
            for p, each in rows.items()
        }
        for m, i in zip(moves, starts, strict=True)
    ]


def default_rtol() -> float:
    """The share by which rounding may change a term within one program."""
    return 1e-10 if jnp.zeros(()).dtype == np.float64 else 1e-5


def groups(n: int) -> np.ndarray:
    """Rows to move at a time: all of them, and those whose number has a certain bit set or not.

    The numbers of two rows differ in some bit, so 2 log2(n) groups tell every pair apart.
    """
    bits = np.arange(n) >> np.arange((n - 1).bit_length())[:, None] & 1 == 1
    return np.concatenate([np.ones((1, n), bool), bits, ~bits])


def scrambled(i: int, n: int) -> Array:
    """The ``i``-th sequence of whole numbers (n,) below 2**23 that are as good as random.

    A hash by xor-shifts and multiplications compiles in a fraction of ``jax.random``'s time.
    """
    x = jnp.arange(1, n + 1, dtype=jnp.uint32) + np.uint32(i * 0x9E3779B9 % 2**32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return ((x ^ (x >> 16)) >> 9).astype(jnp.int32)


def normal(i: int, *shape: int) -> Array:
    """The ``i``-th of many arrays of standard normals."""
    return ndtri((scrambled(i, math.prod(shape)) + 0.5) * 2.0**-23).reshape(shape)


def separable(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    rows: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """The arrays of each silo plate whose rows can be told apart: ``{plate: names}``.

    ``rows`` says which arrays are as long as which silo plate, at every silo. A plate is left out
    where nobody can say what its rows would be on their own: where a site stands in two silo plates
    at once, where the text does not run with a row less (an adjacency matrix), or where it joins
    rows by an index among the data (the sum over the members of a group).
    """
    found: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in rows.items() if p == plate]
        alike = len({size[plate] for size in sizes}) == 1
        if sizes[j][plate] < 2 or not follows(fm, silos[j], keys, plate):
            continue
        if alike:  # others may be as long as the rows by chance
            keys = [
                k for k in keys if not follows(fm, silos[j], [x for x in keys if x != k], plate)
            ]
        if keys and not _joined_by_index(fm, silos[j], keys):
            found[plate] = tuple(keys)
    return found


def follows(fm: FederatedModel, silo: SiloData, keys: Sequence[str], plate: str) -> bool:
    """Whether the text runs when these arrays are a row shorter, and the plate is so, too.

    Where the plate's size is a number among the arguments, with that number one less.
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
    """Whether rows' own numbers are looked up, or added up, by whole numbers among the data."""
    whole = frozenset(k for k, a in silo.arrays.items() if a.dtype.kind in "iu")
    if not whole:
        return False
    rows, joined = frozenset(keys), list[bool]()

    def see(eqn: JaxprEqn, into: Sequence[Labels]) -> None:
        if (name := eqn.primitive.name) == "dynamic_slice":
            index, read = NONE.union(*into[1:]), into[0]
        elif name == "gather" or name.startswith("scatter"):
            index, read = into[1], into[0].union(*into[2:])
        else:
            return
        joined.append(bool(index and index <= whole and read & rows))

    program = traced(lambda arrays: fm.terms_at_zero(replace(silo, arrays=arrays)), silo.arrays)
    follow(program.jaxpr, labels_by_name(silo.arrays), see)
    return any(joined)
