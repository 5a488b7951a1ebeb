"""Whether rows stand alone: padding, minibatches, coupled rows and summaries, on silos' own values.

Padding, minibatches, row-wise bounds and the decomposition itself all rest on one property: the log
density term of a row reads the data and latents of that row alone. Structure does not decide it:
``x @ beta`` reads one row and ``x - x.mean(0)`` reads all. For most texts their operations show
that rows are apart (:mod:`numpyro_fed.text.jaxprs`). For others some rows of a silo get other
latents or other data at a general point, all terms are computed anew, and the terms of the rows
that were left alone must be equal up to rounding. All changes of a silo run in one program, which
is compiled once for each set of shapes; the answer is taken anew for each run's own data.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtri

from numpyro_fed.basics.errors import CoupledRowsError, ModelError
from numpyro_fed.basics.programs import compiled_method, jit_once
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.jaxprs import same_but_for_sizes
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows
from numpyro_fed.text.trace import DENSITY, Trace

# Relative, between two programs of single precision: XLA may order a row's sums differently in
# each, and a dependence on other rows changes terms by far more.
TOLERANCE = 1e-4
# Changes are vectorised until about so many rows are computed side by side. More of them cost
# memory (four megabytes for each array of one number a row), fewer cost time.
ROWS_AT_ONCE = 2**20
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

Terms = Callable[[Rows, SiloData], Rows]
Silo = tuple[Rows, SiloData]  # latents and data
# Silo plates, each with the arrays that hold its rows.
Apart = tuple[tuple[str, tuple[str, ...]], ...]


class ChangedRow(NamedTuple):
    """The first row whose term changed although its own latents and data did not, if any."""

    changed: Array  # whether there is one; the other fields mean nothing otherwise
    row: Array
    before: Array
    after: Array


ByPlate = dict[str, ChangedRow]


class CheckResult(NamedTuple):
    """The first silo in which rows do not stand alone, and the row if it is known."""

    plate: str
    silo: int  # its number in the user's list
    changed: ChangedRow | None = None  # the row whose term changed, if the check names one

    @classmethod
    def of(cls, plate: str, silos: Sequence[int], found: ChangedRow | Array) -> CheckResult | None:
        """Return that of a stack, from each silo's changed row or bool (silos,); None if alone."""
        rows = found if isinstance(found, ChangedRow) else None
        changed = np.asarray(found if rows is None else rows.changed)
        if not changed.any():
            return None
        i = int(changed.argmax())
        # On the host: indexing arrays on the device would compile a program for it.
        return cls(plate, silos[i], rows and ChangedRow(*(a[i] for a in jax.device_get(rows))))

    def words(self) -> str:
        """Return the beginning of a message about the row whose term changed."""
        where = f"silo {self.silo}, silo_plate '{self.plate}': the term of "
        if self.changed is None:
            return f"{where}a row"
        row, before, after = map(float, self.changed[1:])
        return f"{where}row {row:.0f} went from {before:.6g} to {after:.6g}"


@dataclass(frozen=True, eq=False)
class RowChecks:
    """The question whether rows stand alone, of one model. Silos come in stacks of one shape."""

    model: FederatedModel
    # answers that were computed of values, kept as long as the data
    _answers: dict[tuple[Hashable, ...], CheckResult | None] = field(
        default_factory=dict, init=False, repr=False
    )

    def trace(self, b: Bucket) -> Trace:
        """Return the trace of the model at the shape of a bucket's silos."""
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), b.data)
        return self.model.traces.at(one, f"silo {b.silos[0]}")

    def reads_others(self, b: Bucket, plate: str) -> CheckResult | None:
        """Return where rows of a plate read latents of others, by the trace or by values."""
        if self.trace(b).rows_apart(plate, ()):
            return None
        cache_key = id(b.data), plate
        if cache_key not in self._answers:
            found = self.coupled(plate, b.data)
            # Dropped together with the data: an id may then belong to another object.
            weakref.finalize(b.data, self._answers.pop, cache_key, None)
            self._answers[cache_key] = CheckResult.of(plate, b.silos, found)
        return self._answers[cache_key]

    def harmless_padding(
        self,
        b: Bucket,
        silos: Sequence[SiloData],
        rows: Mapping[str, str],
        apart: Mapping[str, tuple[str, ...]],
    ) -> bool:
        """Return whether the padding of a bucket changes nothing.

        Refused is a text in which a row reads the data of other rows of its silo: it is another
        model when the same rows are split into other silos. It is not refused if rows read each
        other's latents as well: they are then one process of the silo (a time series). ``rows`` has
        the plate of each array of rows, and ``apart`` the arrays of plates that can be tried.
        """
        harmless, found = True, ByPlate()
        # The silo with the fewest rows has the most padding.
        most = min(range(len(b.silos)), key=lambda i: sum(b.sizes[i].values()))
        original = silos[b.silos[most]]
        try:
            trace = self.trace(b)
            pairs = tuple(pair for pair in apart.items() if not trace.rows_apart(*pair))
            if b.data.masks and not self._padding_is_unread(b, rows, original):
                plates = tuple(sorted(rows.items()))
                same, found = self.padding(b.data, plates, pairs, original, most)
                harmless = bool(same)
        except ValueError:  # the text does not run at padded shapes
            harmless, pairs = False, tuple(apart.items())
        if pairs and not found:
            found = self.summaries(pairs, b.data)
        for plate, names in pairs:
            result = CheckResult.of(plate, b.silos, found[plate])
            if result is not None and self.reads_others(b, plate) is None:
                raise ModelError(summary_message(result, names))
        return harmless

    def _padding_is_unread(self, b: Bucket, rows: Mapping[str, str], original: SiloData) -> bool:
        """Return whether traces show that padding changes nothing; where not, values may."""
        # No row reads padded ones, and the text says the same at the sizes of the silo itself.
        trace, sizes = self.trace(b), self.model.sizes(original)
        padded = {p: mask.shape[1] for p, mask in b.data.masks.items()}
        if any(trace.structure.sizes[p] != n for p, n in padded.items()):
            return False
        arrays = {p: [k for k, q in rows.items() if q == p] for p in padded}
        if not all(trace.rows_apart(p, arrays[p], alone=True) for p in padded):
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
        dim, shares = self.model.dim, jnp.asarray(SHARES)
        general, terms = 0.3 * hashed_normals(1, dim), partial(self.terms, z_L=z_L, data=data)
        at_zero = jnp.concatenate(list(terms(jnp.zeros(dim)).values()))

        def is_moderate(z_G: Array) -> Array:
            moved = jnp.abs(jnp.concatenate(list(terms(z_G).values())) - at_zero)
            return (moved <= MODERATE * (1 + jnp.abs(at_zero))).all()

        def largest(z_G: Array) -> Array:
            """Return the largest share of a point with moderate terms; all of it if none has."""
            return shares[jax.lax.map(lambda share: is_moderate(share * z_G), shares).argmax()]

        def smaller() -> Array:
            each = jax.lax.map(
                lambda i: largest(jnp.zeros(dim).at[i].set(general[i])), jnp.arange(dim)
            )
            # Together they would add up to what none of them reaches.
            z_G = general * each / dim
            return z_G * largest(z_G)

        # Where not even zero has finite terms, no other point would show more.
        enough = is_moderate(general) | ~jnp.isfinite(at_zero).all()
        return jax.lax.cond(enough, lambda: general, smaller) if dim else general

    def terms(self, z_G: Array, z_L: Rows, data: SiloData, like: SiloData | None = None) -> Rows:
        """Return the terms of all rows, with the initial parameters at ``like`` or ``data``."""
        theta = self.model.initial_parameters(data if like is None else like)
        return self.model.log_silo(theta, z_G, z_L, data)

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
            def refilled(way: Array) -> Rows:
                """Return the terms with padded rows filled in one of the ways, latents included."""
                steps, source = {}, {}
                for p, mask in data.masks.items():
                    n, row = mask.sum(), jnp.arange(len(mask))
                    random = hashed_integers(1, len(mask)) % n
                    which = [way == 0, way == 1, way == 2]
                    copied = jnp.select(which, [0, n - 1, row % n], random)
                    source[p] = jnp.where(mask, row, copied)
                    steps[p] = jnp.where(mask, 0.0, way)[:, None]
                return self.terms(z_G, *changed((z_L, data), dict(rows), steps, source))

            z_L = self.latents(data)
            z_G = self.globals_at(z_L, data)
            each = jax.lax.map(refilled, jnp.arange(PADDINGS))
            same = [terms_agree(v, v[0]) for v in each.values()]
            found = {p: v[0] for p, v in each.items()}
            summaries = self._summaries(apart, data, z_G)
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

            def cut(rows: Array) -> Rows:
                source = dict.fromkeys(plates, rows)
                return terms(*changed((z_L, data), plate_of, {}, source, cut=True))

            parts = jax.lax.map(cut, some)
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
            _, (found,) = first_changed_rows(terms, (z_L, data), {}, [perturbation], rtol, at_once)
            return found[plate].changed

        return jax.lax.map(reads_others, stack)

    @compiled_method(jit_once, static_argnums=0)
    def summaries(self, apart: Apart, stack: SiloData) -> ByPlate:
        """Return the first row of each silo whose term reads the data of other rows, by plate.

        ``apart`` has pairs of a plate and its arrays. Half of the rows of these take the data of
        another row. The terms of the other half change if the text reads a summary such as
        ``x.mean(0)``.
        """

        return jax.lax.map(partial(self._summaries, apart), stack)

    def _summaries(self, apart: Apart, data: SiloData, z_G: Array | None = None) -> ByPlate:
        z_L, perturbations = self.latents(data), []
        z_G = self.globals_at(z_L, data) if z_G is None else z_G
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
        _, each = first_changed_rows(terms, (z_L, data), plate_of, perturbations, default_rtol())
        return {plate: found[plate] for (plate, _), found in zip(apart, each, strict=True)}


def coupled_rows(
    checks: RowChecks, buckets: Sequence[Bucket], draws: Mapping[str, int] | None = None
) -> CheckResult | None:
    """Return where rows read each other's latents; None if nowhere (or no silo is here).

    Outer plates, weighted as a whole, are not checked, nor plates of which one draw is taken.
    """
    for p in checks.model.plates:
        if not p.outer and (p.dim if draws is None else draws.get(p.name, 1) > 1):
            results = (checks.reads_others(b, p.name) for b in buckets)
            if (found := next(filter(None, results), None)) is not None:
                return found
    return None


def check_rows_apart(
    checks: RowChecks, draws: Mapping[str, int], buckets: Sequence[Bucket]
) -> None:
    """Refuse several weighted draws for each row if rows read each other's latents."""
    if (found := coupled_rows(checks, buckets, draws)) is not None:
        raise CoupledRowsError(
            f"{found.words()} reads latents of other rows (as b - b.mean() does), so that its own "
            f"{draws[found.plate]} weighted draws cannot be told from theirs. Use ELBO(), or "
            "inner_draws=1 in importance_correct (compare takes what it returns), which need no "
            "independent rows; or put what rows share outside of the silo_plate, or in an outer "
            "silo_plate."
        )


def refuse_coupled_rows(checks: RowChecks, buckets: Sequence[Bucket], who_needs: str) -> None:
    """Raise an error for rows that read each other's latents; ``"particles need"`` others."""
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


class Perturbation(NamedTuple):
    """A series of changes of some rows of one plate, either of their latents or of their data."""

    plate: str
    # bool array (times, rows): the rows that change each time. A NumPy array if there are
    # steps
    some: Array | np.ndarray
    steps: Array | None = None  # added to the latents of these rows
    source: Array | None = None  # the rows from which these rows take their data


def first_changed_rows(
    terms: Terms,
    silo: Silo,
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

    def after(way: tuple[Array, dict[str, Array], dict[str, Array]]) -> Rows:
        # The first entry gives the stack its length where there is no perturbation at all.
        _, stepped, source = way
        moved = {p: steps[p] * some[:, None] for p, some in stepped.items()}
        return terms(*changed(silo, keys, moved, source))

    ways = jnp.arange(total), which, source
    rows, each = jax.lax.map(after, ways, batch_size=at_once), list[dict[str, ChangedRow]]()
    for m, start in zip(perturbations, starts, strict=True):
        each.append({})
        for p, stack in rows.items():
            before, found = stack[0], stack[start : start + len(m.some)]
            may_change = jnp.asarray(m.some if p == m.plate else False)
            finite = jnp.isfinite(before) | jnp.isfinite(found)
            wrong = ~terms_agree(found, before, rtol) & finite & ~may_change
            time, row = jnp.unravel_index(wrong.argmax(), wrong.shape)
            each[-1][p] = ChangedRow(wrong.any(), row, before[row], found[time, row])
    return {p: stack[0] for p, stack in rows.items()}, each


def changed(
    silo: Silo,
    plate_of: Mapping[str, str],
    steps: Mapping[str, Array],
    source: Mapping[str, Array],
    *,
    cut: bool = False,
) -> Silo:
    """Return a silo whose rows have their latents moved by ``steps``, and data of other rows.

    ``source`` has the row from which each row of a plate takes its data; ``plate_of`` the plate of
    each array of rows. With ``cut`` latents and masks come from there, too, and rows that it does
    not name are left out.
    """
    z_L, data = silo

    def rows(plate: str | None, array: Array) -> Array:
        return array if plate is None or plate not in source else array[source[plate]]

    arrays = {k: rows(plate_of.get(k), a) for k, a in data.arrays.items()}
    if cut:
        z_L = {p: rows(p, z) for p, z in z_L.items()}
        data = replace(data, masks={p: rows(p, mask) for p, mask in data.masks.items()})
    z_L = {p: z + steps[p] if p in steps else z for p, z in z_L.items()}
    return z_L, replace(data, arrays=arrays)


def terms_agree(after: Array, before: Array, rtol: float = TOLERANCE) -> Array:
    """Return whether terms are the same up to rounding, elementwise; infinities must be equal."""
    # The 1 keeps the tolerance absolute near zero, where a log density may cross.
    near = jnp.abs(after - before) <= rtol * (1 + jnp.abs(before))
    return jnp.where(jnp.isfinite(after) & jnp.isfinite(before), near, after == before)


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
