"""What a silo's values say about a model: checks that are compiled once for a set of shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri

from numpyro_fed.errors import CoupledRowsError, ModelError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.split import FederatedModel, Rows
from numpyro_fed.programs import compiled_method, jit_once

TOLERANCE = 1e-4  # between two programs
PADDINGS = 4  # ways of filling padded rows that must agree
SUMMARIES = 4  # times that half of the rows are replaced by others
NUMBERS = 2**20  # rows, about, that are looked at side by side


class Moved(NamedTuple):
    """The first row whose term changed although it should not have: was there one, and which."""

    moved: Array
    row: Array
    before: Array
    after: Array


@dataclass(frozen=True, eq=False)
class Checks:
    """Questions about the values that silos hold. Silos come in stacks of one shape.

    All look at the model at one random point, in programs that are compiled once for each shape.

    Attributes
    ----------
    model : FederatedModel
    """

    model: FederatedModel

    def latents(self, data: SiloData) -> Rows:
        """Return the latents at which a silo is looked at, {plate: (rows, dim)}."""
        sizes = self.model.sizes(data)
        return {
            p.name: 0.3 * _normal(i, sizes[p.name], p.dim)
            for i, p in enumerate(self.model.plates, start=2)
        }

    def terms(self, z_L: Rows, data: SiloData, like: SiloData | None = None) -> Rows:
        """Return the terms of all rows, with private parameters as they start at ``like``."""
        fm, key = self.model, jax.random.key(0)
        private = fm.init_private(key, data if like is None else like)
        theta = {**fm.init_theta(key), **private}
        return fm.log_silo(theta, 0.3 * _normal(1, fm.dim), z_L, data)

    @compiled_method(jit_once, static_argnums=1)
    def padding(
        self, stack: SiloData, rows: tuple[tuple[str, str], ...], original: SiloData, i: int
    ) -> Array:
        """Return whether padding changes nothing, () bool.

        The terms of real rows must stay as they are whatever padded rows hold, and those of the
        ``i``-th silo must be those of ``original``, which is not padded. ``rows`` says which arrays
        are rows of which plate, as a tuple of pairs.
        """
        first = jax.tree.map(lambda a: a[0], stack)
        sizes = self.model.sizes(first)
        if any(mask.shape[1] != sizes[p] for p, mask in stack.masks.items()):
            return jnp.array(False)

        def agree(data: SiloData) -> tuple[Array, Rows]:
            ways = jnp.arange(PADDINGS)
            each = jax.lax.map(partial(self._terms_when_filled, dict(rows), data), ways)
            same = [_close(v, v[0]) for v in each.values()]
            return jnp.stack([s.all() for s in same]).all(), {p: v[0] for p, v in each.items()}

        same, found = jax.lax.map(agree, stack)
        own = self.model.sizes(original)
        expected = self.terms({p: z[: own[p]] for p, z in self.latents(first).items()}, original)
        equal = [_close(found[p][i, : len(v)], v).all() for p, v in expected.items()]
        return same.all() & jnp.stack(equal).all()

    def _terms_when_filled(self, of: Mapping[str, str], data: SiloData, way: Array) -> Rows:
        """Return the terms when padded rows are copies of other real rows, their latents moved."""
        source, z_L = {}, self.latents(data)
        for p, mask in data.masks.items():
            n, place = mask.sum(), jnp.arange(len(mask))
            random = _scrambled(1, len(mask)) % n
            copied = jnp.select([way == 0, way == 1, way == 2], [0, n - 1, place % n], random)
            source[p] = jnp.where(mask, place, copied)
            z_L[p] += jnp.where(mask, 0.0, way)[:, None]
        arrays = {k: a[source[of[k]]] if k in of else a for k, a in data.arrays.items()}
        return self.terms(z_L, replace(data, arrays=arrays))

    @compiled_method(jit_once, static_argnums=(0, 1))
    def minibatch(self, plates: tuple[str, ...], keys: tuple[str, ...], stack: SiloData) -> Array:
        """Return whether rows of plates that are cut together stand on their own, () bool.

        The terms of some of them must be the same without the other rows of the arrays ``keys``,
        and those of other plates, too.
        """
        n = stack.arrays[keys[0]].shape[1]
        half = np.arange(0, n, 2)
        others = np.sort(np.random.default_rng(0).permutation(n)[: len(half)])

        def stand_alone(data: SiloData) -> Array:
            z_L = self.latents(data)
            whole = self.terms(z_L, data)

            def same(some: Array) -> Array:
                def cut(rows: Rows) -> Rows:
                    return {p: a[some] if p in plates else a for p, a in rows.items()}

                arrays = {k: a[some] if k in keys else a for k, a in data.arrays.items()}
                part = replace(data, arrays=arrays, masks=cut(data.masks))
                found, expected = self.terms(cut(z_L), part, like=data), cut(whole)
                return jnp.stack([_close(found[p], expected[p]).all() for p in whole]).all()

            return jax.lax.map(same, jnp.stack([half, others])).all()

        return jax.lax.map(stand_alone, stack).all()

    @compiled_method(jax.jit, static_argnums=0)
    def coupled(self, plate: str, stack: SiloData) -> Array:
        """Return whether a row's term reads latents of other rows of the plate, (silos,) bool."""

        def one(data: SiloData) -> Array:
            z_L = self.latents(data)
            size, dim = z_L[plate].shape
            noise, some = 1 + _normal(0, size, dim), groups(size)

            def when(moved: Array) -> Array:
                there = z_L[plate] + noise * moved[:, None]
                return self.terms({**z_L, plate: there}, data)[plate]

            moves = jnp.concatenate([jnp.zeros((1, size), bool), some])
            rows = jax.lax.map(when, moves, batch_size=max(1, NUMBERS // size))
            return first_moved(rows[0], rows[1:], some, default_rtol()).moved

        return jax.lax.map(one, stack)

    @compiled_method(jit_once, static_argnums=(0, 1))
    def summary(self, plate: str, keys: tuple[str, ...], stack: SiloData) -> Moved:
        """Return which row's term moves with the data of other rows, of each silo.

        The rows of the arrays ``keys`` that belong to other rows of the plate are replaced by each
        other, which moves a term where the text reads ``x.mean(0)``.
        """

        def one(data: SiloData) -> Moved:
            z_L = self.latents(data)
            size = len(z_L[plate])
            place, real = jnp.arange(size), data.masks.get(plate, jnp.ones(size, bool))
            n = real.sum()
            half = [_scrambled(i, size) % 2 == 0 for i in range(1, 1 + SUMMARIES // 2)]
            some = jnp.stack([jnp.zeros(size, bool), *half, *(~h for h in half)]) & real
            sources = [place, place * 0, place * 0 + n - 1, place * 0 + n // 2]
            source = jnp.stack([*sources, _scrambled(0, size) % n])

            def when(i: Array) -> Array:
                index = jnp.where(some[i], source[i], place)
                arrays = {k: a[index] if k in keys else a for k, a in data.arrays.items()}
                return self.terms(z_L, replace(data, arrays=arrays), like=data)[plate]

            rows = jax.lax.map(when, jnp.arange(1 + SUMMARIES))
            return first_moved(rows[0], rows[1:], some[1:] | ~real, default_rtol())

        return jax.lax.map(one, stack)


def _normal(i: int, *shape: int) -> Array:
    """Return standard normals, the ``i``-th of many such arrays."""
    return ndtri((_scrambled(i, math.prod(shape)) + 0.5) * 2.0**-23).reshape(shape)


def _close(a: Array, b: Array) -> Array:
    return jnp.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def first_moved(before: Array, after: Array, may_move: Any, rtol: float) -> Moved:
    """Compare the terms of rows (rows,) with those after some moves (moves, rows)."""
    finite = jnp.isfinite(before) | jnp.isfinite(after)
    still = jnp.abs(after - before) <= rtol * (1 + jnp.abs(before))
    wrong = ~still & finite & ~jnp.asarray(may_move)
    move, row = jnp.unravel_index(wrong.argmax(), wrong.shape)
    return Moved(wrong.any(), row, before[row], after[move, row])


def default_rtol() -> float:
    """What rounding may change in one program."""
    return 1e-10 if jnp.zeros(()).dtype == np.float64 else 1e-5


def groups(n: int) -> np.ndarray:
    """Rows to move at a time: all of them, and those whose number has a certain bit set or not.

    The numbers of two rows differ in some bit, so 2 log2(n) groups tell every pair apart.
    """
    bits = np.arange(n) >> np.arange((n - 1).bit_length())[:, None] & 1 == 1
    return np.concatenate([np.ones((1, n), bool), bits, ~bits])


def check_rows_apart(
    fm: FederatedModel, asks: Checks, draws: Mapping[str, int], buckets: Sequence[Bucket]
) -> None:
    """Refuse several weighted draws for each row where rows read each other's latents.

    Raises
    ------
    ModelError
        Naming the silo and the plate. Above rows of another plate nothing is refused: there a
        silo is weighed as a whole.
    """
    for plate in (p.name for p in fm.plates if draws.get(p.name, 1) > 1 and not p.outer):
        for b in buckets:
            coupled = np.asarray(asks.coupled(plate, b.data))
            if coupled.any():
                raise CoupledRowsError(
                    f"silo {b.silos[int(coupled.argmax())]}, silo_plate '{plate}': the term of a "
                    "row reads latents of other rows (as b - b.mean() does), so that its own "
                    f"{draws[plate]} weighted draws cannot be told from theirs. Use ELBO(), or "
                    "inner_draws=1 in importance_correct (compare takes what it returns), which "
                    "need no independent rows; or put what rows share outside of the silo_plate, "
                    "or in an outer silo_plate."
                )


def check_summaries(
    asks: Checks, keys: Mapping[str, tuple[str, ...]], buckets: Sequence[Bucket]
) -> None:
    """Refuse a text in which a row reads the data of other rows of its silo.

    Such a text says one thing of all rows together and another of the same rows cut into silos.
    Nothing is refused where rows read each other's latents, too: these are one process of the silo.

    Parameters
    ----------
    asks : Checks
    keys : dict
        The arrays of each silo plate whose rows can be told apart.
    buckets : sequence of Bucket

    Raises
    ------
    ModelError
        Naming silo, plate and arrays.
    """
    for plate, names in keys.items():
        for b in buckets:
            found = jax.tree.map(np.asarray, asks.summary(plate, names, b.data))
            if found.moved.any() and not np.asarray(asks.coupled(plate, b.data)).any():
                i = int(found.moved.argmax())
                first = Moved(*(a[i] for a in found))
                raise ModelError(summarised(first, b.silos[i], plate, names))


def summarised(found: Moved, silo: int, plate: str, keys: Sequence[str]) -> str:
    """What to say where a row reads the data of others."""
    return (
        f"silo {silo}, silo_plate '{plate}': the term of row {int(found.row)} went from "
        f"{float(found.before):.6g} to {float(found.after):.6g} when only data of other rows, in "
        f"{list(keys)}, were replaced by those of yet others. The same rows cut into other silos "
        "are then another model: compute what sums up rows (x.mean(0), say) before the run, over "
        "all silos, and pass it as data. Where the rows of a silo belong together (a time "
        "series, the strata of a partial likelihood), make them one row: with "
        "silo_plate('silo', 1), .to_event(1) of y[None], or numpyro.factor('l', terms.sum()[None])."
    )


def coupled_rows(
    fm: FederatedModel, asks: Checks, buckets: Sequence[Bucket]
) -> tuple[int, str] | None:
    """A silo, and a plate of it where rows read each other's latents."""
    for plate in (p.name for p in fm.plates if p.dim and not p.outer):
        for b in buckets:
            coupled = np.asarray(asks.coupled(plate, b.data))
            if coupled.any():
                return b.silos[int(coupled.argmax())], plate
    return None


def _scrambled(i: int, n: int) -> Array:
    """The ``i``-th sequence of whole numbers (n,) below 2**23 that are as good as random.

    A hash by xor-shifts and multiplications compiles in a fraction of ``jax.random``'s time.
    """
    x = jnp.arange(1, n + 1, dtype=jnp.uint32) + np.uint32(i * 0x9E3779B9 % 2**32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return ((x ^ (x >> 16)) >> 9).astype(jnp.int32)
