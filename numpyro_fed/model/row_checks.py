"""What the values of silos say about a model: questions, compiled once for a set of shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import CoupledRowsError, ModelError
from numpyro_fed.model.audit import (
    NUMBERS,
    Change,
    Move,
    Moved,
    close,
    default_rtol,
    first_moved,
    groups,
    normal,
    perturbed,
    scrambled,
)
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.padding import Bucket
from numpyro_fed.programs import compiled_method, jit_once

PADDINGS = 4  # ways of filling padded rows that must agree
SUMMARIES = 4  # times that half of the rows are replaced by others


class CheckResult(NamedTuple):
    """The answer to a question about rows of silos, and where it is yes first."""

    answer: bool
    plate: str
    silo: int = -1  # its number in the user's list
    moved: Moved | None = None  # the row whose term is moved

    @classmethod
    def of(cls, plate: str, silos: Sequence[int], found: Moved | Array) -> CheckResult:
        """Read what was found at each silo of a stack: whether a term is moved, and which."""
        which = found if isinstance(found, Moved) else None
        moved = np.asarray(found if which is None else which.moved)
        if not moved.any():
            return cls(False, plate)
        i = int(moved.argmax())
        first = which and Moved(*(a[i] for a in jax.device_get(which)))  # which compiles nothing
        return cls(True, plate, silos[i], first)

    def words(self) -> str:
        """Return the beginning of a message about the row whose term is moved."""
        where = f"silo {self.silo}, silo_plate '{self.plate}': the term of "
        if self.moved is None:
            return f"{where}a row"
        row, before, after = int(self.moved.row), float(self.moved.before), float(self.moved.after)
        return f"{where}row {row} went from {before:.6g} to {after:.6g}"


@dataclass(frozen=True, eq=False)
class RowChecks:
    """Questions about the values that silos hold. Silos come in stacks of one shape.

    All look at the model at one random point, in programs that are compiled once for each shape.
    """

    model: FederatedModel
    _known: dict[tuple[Hashable, ...], CheckResult] = field(
        default_factory=dict, init=False, repr=False
    )

    def ask(
        self, question: Callable[..., Moved | Array], b: Bucket, plate: str, *keys: str
    ) -> CheckResult:
        """Ask :meth:`coupled` or :meth:`summary`; an answer is kept as long as its data."""
        about = id(b.data), question, plate, keys
        if about not in self._known:
            found = question(plate, *([keys] if keys else []), b.data)
            weakref.finalize(b.data, self._known.pop, about, None)
            self._known[about] = CheckResult.of(plate, b.silos, found)
        return self._known[about]

    def latents(self, data: SiloData) -> Rows:
        """Return the latents at which a silo is looked at, {plate: (rows, dim)}."""
        sizes = self.model.sizes(data)
        return {
            p.name: 0.3 * normal(i, sizes[p.name], p.dim)
            for i, p in enumerate(self.model.plates, start=2)
        }

    def terms(self, z_L: Rows, data: SiloData, like: SiloData | None = None) -> Rows:
        """Return the terms of all rows, with private parameters as they start at ``like``."""
        fm, key = self.model, jax.random.key(0)
        private = fm.init_private(key, data if like is None else like)
        theta = {**fm.init_theta(key), **private}
        return fm.log_silo(theta, 0.3 * normal(1, fm.dim), z_L, data)

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
            def refilled(way: Array) -> Change:
                """Return a change that fills padded rows with other real ones, latents moved."""
                steps, source = {}, {}
                for p, mask in data.masks.items():
                    n, place = mask.sum(), jnp.arange(len(mask))
                    random = scrambled(1, len(mask)) % n
                    which = [way == 0, way == 1, way == 2]
                    copied = jnp.select(which, [0, n - 1, place % n], random)
                    source[p] = jnp.where(mask, place, copied)
                    steps[p] = jnp.where(mask, 0.0, way)[:, None]
                return Change(steps, source)

            ways, z_L = jnp.arange(PADDINGS), self.latents(data)
            each = perturbed(self.terms, (z_L, data), dict(rows), refilled, ways)
            same = [close(v, v[0]) for v in each.values()]
            return jnp.stack([s.all() for s in same]).all(), {p: v[0] for p, v in each.items()}

        same, found = jax.lax.map(agree, stack)
        own = self.model.sizes(original)
        expected = self.terms({p: z[: own[p]] for p, z in self.latents(first).items()}, original)
        equal = [close(found[p][i, : len(v)], v).all() for p, v in expected.items()]
        return same.all() & jnp.stack(equal).all()

    @compiled_method(jit_once, static_argnums=(0, 1))
    def minibatch(self, plates: tuple[str, ...], keys: tuple[str, ...], stack: SiloData) -> Array:
        """Return whether rows of plates that are cut together stand on their own, () bool.

        The terms of some of them must be the same without the other rows of the arrays ``keys``,
        and those of other plates, too.
        """
        n = stack.arrays[keys[0]].shape[1]
        half = np.arange(0, n, 2)
        others = np.sort(np.random.default_rng(0).permutation(n)[: len(half)])
        some, of = jnp.stack([half, others]), dict.fromkeys(keys, plates[0])

        def stand_alone(data: SiloData) -> Array:
            def left(rows: Array) -> Change:
                return Change({}, dict.fromkeys(plates, rows), cut=True)

            z_L, terms = self.latents(data), partial(self.terms, like=data)
            whole, parts = terms(z_L, data), perturbed(terms, (z_L, data), of, left, some)
            expected = {p: a[some] if p in plates else a for p, a in whole.items()}
            return jnp.stack([close(parts[p], expected[p]).all() for p in whole]).all()

        return jax.lax.map(stand_alone, stack).all()

    @compiled_method(jax.jit, static_argnums=0)
    def coupled(self, plate: str, stack: SiloData) -> Array:
        """Return whether a row's term reads latents of other rows of the plate, (silos,) bool."""

        def one(data: SiloData) -> Array:
            z_L = self.latents(data)
            size, dim = z_L[plate].shape
            move = Move(plate, groups(size), steps=1 + normal(0, size, dim))
            at_once, rtol = max(1, NUMBERS // size), default_rtol()
            return first_moved(self.terms, (z_L, data), {}, [move], rtol, at_once)[1][0][
                plate
            ].moved

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
            half = [scrambled(i, size) % 2 == 0 for i in range(1, 1 + SUMMARIES // 2)]
            some = jnp.stack([*half, *(~h for h in half)]) & real
            sources = [place * 0, place * 0 + n - 1, place * 0 + n // 2, scrambled(0, size) % n]
            move, of = Move(plate, some, source=jnp.stack(sources)), dict.fromkeys(keys, plate)
            terms = partial(self.terms, like=data)
            return first_moved(terms, (z_L, data), of, [move], default_rtol())[1][0][plate]

        return jax.lax.map(one, stack)


def check_rows_apart(
    fm: FederatedModel, asks: RowChecks, draws: Mapping[str, int], buckets: Sequence[Bucket]
) -> None:
    """Refuse several weighted draws for each row where rows read each other's latents.

    Above rows of another plate nothing is refused: there a silo is weighed as a whole.
    """
    plates = [p.name for p in fm.plates if draws.get(p.name, 1) > 1 and not p.outer]
    if (found := _coupled(asks, plates, buckets)) is not None:
        raise CoupledRowsError(
            f"{found.words()} reads latents of other rows (as b - b.mean() does), so that its own "
            f"{draws[found.plate]} weighted draws cannot be told from theirs. Use ELBO(), or "
            "inner_draws=1 in importance_correct (compare takes what it returns), which need no "
            "independent rows; or put what rows share outside of the silo_plate, or in an outer "
            "silo_plate."
        )


def check_summaries(
    asks: RowChecks, keys: Mapping[str, tuple[str, ...]], buckets: Sequence[Bucket]
) -> None:
    """Refuse a text in which a row reads the data of other rows of its silo.

    Such a text says one thing of all rows together and another of the same rows cut into silos.
    Nothing is refused where rows read each other's latents, too: these are one process of the silo.
    ``keys`` has the arrays of each silo plate whose rows can be told apart.
    """
    for plate, names in keys.items():
        for b in buckets:
            found = asks.ask(asks.summary, b, plate, *names)
            if found.answer and not asks.ask(asks.coupled, b, plate).answer:
                raise ModelError(summarised(found, names))


def summarised(found: CheckResult, keys: Sequence[str]) -> str:
    """The message where a row reads the data of others."""
    return (
        f"{found.words()} when only data of other rows, in {list(keys)}, were replaced by those of "
        "yet others. The same rows cut into other silos are then another model: compute what sums "
        "up rows (x.mean(0), say) before the run, over all silos, and pass it as data. Where the "
        "rows of a silo belong together (a time series, the strata of a partial likelihood), make "
        "them one row: with silo_plate('silo', 1), .to_event(1) of y[None], or "
        "numpyro.factor('l', terms.sum()[None])."
    )


def coupled_rows(asks: RowChecks, buckets: Sequence[Bucket]) -> CheckResult | None:
    """The verdict on the first silo and plate where rows read each other's latents, if any."""
    plates = [p.name for p in asks.model.plates if p.dim and not p.outer]
    return _coupled(asks, plates, buckets)


def _coupled(
    asks: RowChecks, plates: Sequence[str], buckets: Sequence[Bucket]
) -> CheckResult | None:
    each = (asks.ask(asks.coupled, b, plate) for plate in plates for b in buckets)
    return next((verdict for verdict in each if verdict.answer), None)
