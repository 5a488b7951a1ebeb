"""Checks of a model on the values that silos hold: padding, minibatches, coupled rows, summaries.

Structure alone does not decide whether rows are independent: ``x @ beta`` reads one row and
``x - x.mean(0)`` reads all. For most texts their operations show that rows are apart
(:mod:`numpyro_fed.model.row_axes`). For others each check evaluates the model at a general point,
changes rows (:mod:`numpyro_fed.model.audit`) and compares terms. Its program is compiled once for
each set of shapes; the answer is taken anew for each run's own data.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.errors import CoupledRowsError, ModelError
from numpyro_fed.model.audit import (
    ROWS_AT_ONCE,
    ChangedRow,
    Perturbation,
    SiloChange,
    changed_terms,
    default_rtol,
    first_changed_rows,
    hashed_integers,
    hashed_normals,
    row_groups,
    terms_agree,
)
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.padding import Bucket
from numpyro_fed.model.row_axes import same_but_for_sizes
from numpyro_fed.model.traces import DENSITY, Trace
from numpyro_fed.programs import compiled_method, jit_once

# Ways of filling padded rows whose terms must agree: the first row, the last, all in turn, and
# random ones. A text that reads padded rows would have to give the same number for all four.
PADDINGS = 4
# How often half of the rows are replaced. The halves come in pairs of complements, so that every
# row is left alone twice, and each time another row's data stand in the other half.
SUMMARIES = 4
# How far terms may move from those at zero, as a multiple, so that one sees in them what other rows
# change. Where they move further, these shares of a coordinate of the general point are tried.
MODERATE = 100.0
SHARES = np.array([1, 1e-3, 1e-6, 1e-9, 1e-12], np.float32)

# Silo plates, each with the arrays that hold its rows, and what is found at each.
Apart = tuple[tuple[str, tuple[str, ...]], ...]
ByPlate = dict[str, ChangedRow]


class CheckResult(NamedTuple):
    """The answer of a check, and the first silo and row for which it is yes."""

    answer: bool
    plate: str
    silo: int = -1  # its number in the user's list
    changed: ChangedRow | None = None  # the row whose term changed, if the check names one

    @classmethod
    def of(cls, plate: str, silos: Sequence[int], found: ChangedRow | Array) -> CheckResult:
        """Return the result for a stack of silos, from each silo's changed row or bool (silos,)."""
        rows = found if isinstance(found, ChangedRow) else None
        changed = np.asarray(found if rows is None else rows.changed)
        if not changed.any():
            return cls(False, plate)
        i = int(changed.argmax())
        # On the host: indexing arrays on the device would compile a program for it.
        first = rows and ChangedRow(*(a[i] for a in jax.device_get(rows)))
        return cls(True, plate, silos[i], first)

    def words(self) -> str:
        """Return the beginning of a message about the row whose term changed."""
        where = f"silo {self.silo}, silo_plate '{self.plate}': the term of "
        if self.changed is None:
            return f"{where}a row"
        first = self.changed
        row, before, after = int(first.row), float(first.before), float(first.after)
        return f"{where}row {row} went from {before:.6g} to {after:.6g}"


@dataclass(frozen=True, eq=False)
class RowChecks:
    """The checks of one model. Silos come in stacks of one shape.

    All of them evaluate the model at one general point of each silo.
    """

    model: FederatedModel
    _known: dict[tuple[Hashable, ...], CheckResult] = field(
        default_factory=dict, init=False, repr=False
    )

    def trace(self, b: Bucket) -> Trace:
        """Return the trace of the model at the shape of a bucket's silos."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), b.data)
        return self.model.traces.at(one, f"silo {b.silos[0]}")

    def reads_others(self, b: Bucket, plate: str) -> CheckResult:
        """Return whether rows of a plate read latents of others, by the trace or :meth:`coupled`.

        Values are tried once for a bucket.
        """
        if self.trace(b).rows_apart(plate, ()):
            return CheckResult(False, plate)
        cache_key = id(b.data), plate
        if cache_key not in self._known:
            found = self.coupled(plate, b.data)
            # Dropped together with the data: an id may then belong to another object.
            weakref.finalize(b.data, self._known.pop, cache_key, None)
            self._known[cache_key] = CheckResult.of(plate, b.silos, found)
        return self._known[cache_key]

    def padding_is_apart(self, b: Bucket, rows: Mapping[str, str], original: SiloData) -> bool:
        """Return whether traces show that padding changes nothing; where it is False, values may.

        No row reads padded ones, and the text says the same at the sizes of ``original``.
        """
        trace, sizes = self.trace(b), self.model.sizes(original)
        padded = {p: mask.shape[1] for p, mask in b.data.masks.items()}
        if any(trace.structure.sizes[p] != n for p, n in padded.items()):
            return False
        if not all(
            trace.rows_apart(p, [k for k, q in rows.items() if q == p], alone=True) for p in padded
        ):
            return False
        unpadded = self.model.traces.at(original)
        first, second = (t.part(t.outputs_of(DENSITY, local=True))[0] for t in (unpadded, trace))
        return same_but_for_sizes(first, second, {sizes[p]: n for p, n in padded.items()})

    def latents(self, data: SiloData) -> Rows:
        """Return the latents at which a silo's terms are computed, {plate: (rows, dim)}."""
        sizes = self.model.sizes(data)
        # An sd of 0.3 keeps exponentials and probabilities of unconstrained latents moderate:
        # further out a likelihood may be flat, and would depend on nothing.
        return {
            p.name: 0.3 * hashed_normals(i, sizes[p.name], p.dim)
            for i, p in enumerate(self.model.plates, start=2)
        }

    def globals_at(self, z_L: Rows, data: SiloData) -> Array:
        """Return a point (dim,) of the globals at which a silo's terms are moderate.

        Beside a column of large numbers terms overflow or are huge, and what other rows change in
        them is lost. Then each coordinate is the largest that by itself moves no term far.
        """
        dim = self.model.dim
        general = 0.3 * hashed_normals(1, dim)
        flat = lambda z_G: jnp.concatenate(list(self.terms(z_G, z_L, data).values()))  # noqa: E731
        at_zero, shares = flat(jnp.zeros(dim)), jnp.asarray(SHARES)

        def is_moderate(z_G: Array) -> Array:
            moved = jnp.abs(flat(z_G) - at_zero)
            return (moved <= MODERATE * (1 + jnp.abs(at_zero))).all()

        def largest(z_G: Array) -> Array:
            """Return the largest share of a point with moderate terms; all of it if none has."""
            return shares[jax.lax.map(lambda share: is_moderate(share * z_G), shares).argmax()]

        def smaller() -> Array:
            alone = lambda i: jnp.zeros(dim).at[i].set(general[i])  # noqa: E731
            each = jax.lax.map(lambda i: largest(alone(i)), jnp.arange(dim))
            # Together they would add up to what none of them reaches.
            z_G = general * each / dim
            return z_G * largest(z_G)

        # Where not even zero has finite terms, no other point would show more.
        enough = is_moderate(general) | ~jnp.isfinite(at_zero).all()
        return jax.lax.cond(enough, lambda: general, smaller) if dim else general

    def terms(self, z_G: Array, z_L: Rows, data: SiloData, like: SiloData | None = None) -> Rows:
        """Return the terms of all rows at globals (dim,), {plate: (rows,)}.

        Private parameters have their initial values at ``like``, by default at ``data``: these may
        depend on data, which a check replaces.
        """
        fm, key = self.model, jax.random.key(0)
        private = fm.init_private(key, data if like is None else like)
        theta = {**fm.init_theta(key), **private}
        return fm.log_silo(theta, z_G, z_L, data)

    @compiled_method(jit_once, static_argnums=(1, 2))
    def padding(
        self,
        stack: SiloData,
        rows: tuple[tuple[str, str], ...],
        apart: Apart,
        original: SiloData,
        i: int,
    ) -> tuple[Array, ByPlate]:
        """Return whether padding changes nothing, () bool, and what :meth:`summaries` returns.

        The terms of real rows must not depend on what padded rows hold, and those of the ``i``-th
        silo must equal those of ``original``, the same silo unpadded. ``rows`` has pairs of an
        array's name and its plate; ``apart`` is that of :meth:`summaries`. Both questions are
        answered in one program.
        """
        first = jax.tree.map(lambda a: a[0], stack)
        sizes = self.model.sizes(first)
        if any(mask.shape[1] != sizes[p] for p, mask in stack.masks.items()):
            raise ValueError("the plates do not grow with the arrays that are padded.")

        def agree(data: SiloData) -> tuple[Array, Rows, Array, ByPlate]:
            def refilled(way: Array) -> SiloChange:
                """Return the change that fills padded rows in one of the ways, latents included."""
                steps, source = {}, {}
                for p, mask in data.masks.items():
                    n, row = mask.sum(), jnp.arange(len(mask))
                    random = hashed_integers(1, len(mask)) % n
                    which = [way == 0, way == 1, way == 2]
                    copied = jnp.select(which, [0, n - 1, row % n], random)
                    source[p] = jnp.where(mask, row, copied)
                    steps[p] = jnp.where(mask, 0.0, way)[:, None]
                return SiloChange(steps, source)

            ways, z_L = jnp.arange(PADDINGS), self.latents(data)
            z_G = self.globals_at(z_L, data)
            terms = partial(self.terms, z_G)
            each = changed_terms(terms, (z_L, data), dict(rows), refilled, ways)
            same = [terms_agree(v, v[0]) for v in each.values()]
            found = {p: v[0] for p, v in each.items()}
            summaries = self._summaries(apart, z_G, z_L, data)
            return jnp.stack([s.all() for s in same]).all(), found, z_G, summaries

        same, padded, z_G, summaries = jax.lax.map(agree, stack)
        size = self.model.sizes(original)
        z_L = {p: z[: size[p]] for p, z in self.latents(first).items()}
        expected = self.terms(z_G[i], z_L, original)
        equal = [terms_agree(padded[p][i, : len(v)], v).all() for p, v in expected.items()]
        return same.all() & jnp.stack(equal).all(), summaries

    @compiled_method(jit_once, static_argnums=(0, 1))
    def minibatch(self, plates: tuple[str, ...], keys: tuple[str, ...], stack: SiloData) -> Array:
        """Return whether rows can be drawn in minibatches without changing their terms, () bool.

        ``plates`` are cut together, with the arrays ``keys``. The terms of half of their rows must
        be the same without the other half, and the terms of other plates must not change.
        """
        n = stack.arrays[keys[0]].shape[1]
        # Every second row, and a random half: neither blocks nor stripes of rows go unnoticed.
        half = np.arange(0, n, 2)
        others = np.sort(np.random.default_rng(0).permutation(n)[: len(half)])
        some, plate_of = jnp.stack([half, others]), dict.fromkeys(keys, plates[0])

        def independent(data: SiloData) -> Array:
            z_L = self.latents(data)
            terms = partial(self.terms, self.globals_at(z_L, data), like=data)
            whole = terms(z_L, data)
            parts = changed_terms(
                terms,
                (z_L, data),
                plate_of,
                lambda rows: SiloChange({}, dict.fromkeys(plates, rows), cut=True),
                some,
            )
            expected = {p: a[some] if p in plates else a for p, a in whole.items()}
            return jnp.stack([terms_agree(parts[p], expected[p]).all() for p in whole]).all()

        return jax.lax.map(independent, stack).all()

    @compiled_method(jax.jit, static_argnums=0)
    def coupled(self, plate: str, stack: SiloData) -> Array:
        """Return whether a row's term reads latents of other rows of the plate, (silos,) bool."""

        def reads_others(data: SiloData) -> Array:
            z_L = self.latents(data)
            size, dim = z_L[plate].shape
            # Steps about 1, not about 0: a step that is nearly zero would show nothing.
            steps = 1 + hashed_normals(0, size, dim)
            at_once, rtol = max(1, ROWS_AT_ONCE // size), default_rtol()
            perturbation = Perturbation(plate, row_groups(size), steps=steps)
            terms = partial(self.terms, self.globals_at(z_L, data))
            _, (changed,) = first_changed_rows(
                terms, (z_L, data), {}, [perturbation], rtol, at_once
            )
            return changed[plate].changed

        return jax.lax.map(reads_others, stack)

    @compiled_method(jit_once, static_argnums=0)
    def summaries(self, apart: Apart, stack: SiloData) -> ByPlate:
        """Return the first row of each silo whose term reads the data of other rows, by plate.

        ``apart`` has pairs of a plate and its arrays. Half of the rows of these take the data of
        another row. The terms of the other half change if the text reads a summary such as
        ``x.mean(0)``.
        """

        def first_rows(data: SiloData) -> ByPlate:
            z_L = self.latents(data)
            return self._summaries(apart, self.globals_at(z_L, data), z_L, data)

        return jax.lax.map(first_rows, stack)

    def _summaries(self, apart: Apart, z_G: Array, z_L: Rows, data: SiloData) -> ByPlate:
        perturbations = []
        for plate, _ in apart:
            size = len(z_L[plate])
            row, real = jnp.arange(size), data.masks.get(plate, jnp.ones(size, bool))
            n = real.sum()
            half = [hashed_integers(i, size) % 2 == 0 for i in range(1, 1 + SUMMARIES // 2)]
            some = jnp.stack([*half, *(~h for h in half)]) & real
            # The first row, the last, the middle one, and random ones: a mean or a maximum that
            # one of them leaves as it was changes by another.
            sources = [row * 0, row * 0 + n - 1, row * 0 + n // 2, hashed_integers(0, size) % n]
            perturbations.append(Perturbation(plate, some, source=jnp.stack(sources)))
        if not perturbations:
            return {}
        plate_of = {key: plate for plate, keys in apart for key in keys}
        terms = partial(self.terms, z_G, like=data)
        _, changed = first_changed_rows(terms, (z_L, data), plate_of, perturbations, default_rtol())
        return {plate: found[plate] for (plate, _), found in zip(apart, changed, strict=True)}


def check_rows_apart(
    checks: RowChecks, draws: Mapping[str, int], buckets: Sequence[Bucket]
) -> None:
    """Refuse several weighted draws for each row if rows read each other's latents.

    Outer plates are not checked: their silos are weighted as a whole.
    """
    if (found := coupled_rows(checks, buckets, draws)) is not None:
        raise CoupledRowsError(
            f"{found.words()} reads latents of other rows (as b - b.mean() does), so that its own "
            f"{draws[found.plate]} weighted draws cannot be told from theirs. Use ELBO(), or "
            "inner_draws=1 in importance_correct (compare takes what it returns), which need no "
            "independent rows; or put what rows share outside of the silo_plate, or in an outer "
            "silo_plate."
        )


def refuse_summaries(
    checks: RowChecks, b: Bucket, apart: Mapping[str, tuple[str, ...]], found: ByPlate
) -> None:
    """Refuse a text in which a row reads the data of other rows of its silo.

    Such a text is another model when the same rows are split into other silos. It is not refused
    if rows read each other's latents as well: they are then one process of the silo (a time
    series). ``apart`` has the arrays that hold the rows of each silo plate, and ``found`` what
    :meth:`RowChecks.summaries` has found.
    """
    for plate, names in apart.items():
        result = CheckResult.of(plate, b.silos, found[plate])
        if result.answer and not checks.reads_others(b, plate).answer:
            raise ModelError(summary_message(result, names))


def summary_message(found: CheckResult, keys: Sequence[str]) -> str:
    """Return the message about a row that reads the data of other rows."""
    return (
        f"{found.words()} when only data of other rows, in {list(keys)}, were replaced by those of "
        "yet others. The same rows cut into other silos are then another model: compute what sums "
        "up rows (x.mean(0), say) before the run, over all silos, and pass it as data. Where the "
        "rows of a silo belong together (a time series, the strata of a partial likelihood), make "
        "them one row: with silo_plate('silo', 1), .to_event(1) of y[None], or "
        "numpyro.factor('l', terms.sum()[None])."
    )


def coupled_rows(
    checks: RowChecks, buckets: Sequence[Bucket], draws: Mapping[str, int] | None = None
) -> CheckResult | None:
    """Return the first result that finds rows reading each other's latents; None if none does.

    Outer plates are not checked, nor with ``draws`` those of which one draw is taken.
    """
    for p in (p for p in checks.model.plates if not p.outer):
        if p.dim if draws is None else draws.get(p.name, 1) > 1:
            results = (checks.reads_others(b, p.name) for b in buckets)
            if (found := next((result for result in results if result.answer), None)) is not None:
                return found
    return None


def refuse_coupled_rows(checks: RowChecks, buckets: Sequence[Bucket], who_needs: str) -> None:
    """Raise an error for rows that read each other's latents.

    ``who_needs`` ends the sentence on what needs rows that do not: ``"particles need"``.
    """
    if (rows := coupled_rows(checks, buckets)) is not None:
        raise CoupledRowsError(
            f"{rows.words()} reads latents of other rows, so that they cannot be integrated row by "
            f"row, which {who_needs}."
        )


def refuse_parameters_of_rows(fm: FederatedModel) -> None:
    """Raise an error for parameters of silos or rows, by which rows cannot be left out."""
    own = [s.name for s in fm.sites if s.kind == "param" and s.plate is not None]
    if own:
        raise ModelError(
            f"rows cannot be left out: '{own[0]}' is a parameter of silos or rows, which was "
            "fitted to the very rows. Make it a latent."
        )
