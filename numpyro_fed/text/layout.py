"""A model's layout at silos: what depends on the shapes of their data, and their padded buckets.

It tells which arrays hold the rows of which silo plate, and whether rows can be separated or drawn.
Values are checked when silos are put in buckets, which are padded where that changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from numpyro_fed.basics.errors import GuideError, ModelWarning
from numpyro_fed.data.minibatches import CutPlates, Minibatches
from numpyro_fed.data.padding import Bucket, bucket
from numpyro_fed.data.silo_data import ReadSilos, SiloData, Sizes
from numpyro_fed.text.indices import IndexCheck
from numpyro_fed.text.jaxprs import NONE, Labels, propagate_labels
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.split import split_with_rows
from numpyro_fed.text.trace import ARRAY, DENSITY, Trace
from numpyro_fed.text.values import SupportCheck

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

WHOLE = "Use batch_size=None."


class Layout(NamedTuple):
    """A split model and its checks: all that depends on the shapes of data, not on their values."""

    model: FederatedModel
    sizes: tuple[Sizes, ...]  # the true size of each silo plate at each silo
    plate_of_array: dict[str, str]  # the silo plate of each array that holds rows
    checks: RowChecks
    # (silo, data) -> None: the index check of one silo's values
    check_indices: Callable[[int, SiloData], None]
    supports: SupportCheck  # the check of observed values
    # the arrays of each silo plate whose rows can be separated, and must not read each other's data
    separable_rows: dict[str, tuple[str, ...]]

    @property
    def possible_plates(self) -> dict[str, tuple[str, ...]]:
        """Return for each array of rows the silo plates that are as long at every silo."""
        return {
            key: tuple(p for p in self.sizes[0] if all(n[p] == n[plate] for n in self.sizes))
            for key, plate in self.plate_of_array.items()
        }

    def checked_buckets(self, silos: Sequence[SiloData], *, summaries: bool = True) -> list[Bucket]:
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
        apart = self.separable_rows if summaries else {}
        harmless = [
            self.checks.harmless_padding(b, silos, self.plate_of_array, apart) for b in buckets
        ]
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
    fm, sizes, plate_of_array = split_with_rows(model, silos)
    return Layout(
        fm,
        sizes,
        plate_of_array,
        RowChecks(fm),
        IndexCheck(fm.terms_at_zero),
        SupportCheck(fm.traces, "silo {}"),
        separable_rows(fm, silos, sizes, plate_of_array),
    )


def layout_and_buckets(
    model: Callable[..., Any], silos: Sequence[SiloData], *, summaries: bool = True
) -> tuple[Layout, list[Bucket]]:
    """Split the model and bucket the silos; see :meth:`Layout.checked_buckets`."""
    layout = layout_of(model, silos)
    return layout, layout.checked_buckets(silos, summaries=summaries)


def separable_rows(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    plate_of_array: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the arrays of each silo plate that hold its rows, ``{plate: names}``.

    A plate is left out if its rows cannot be separated: if a site stands in two silo plates at
    once, if the text does not run with one row less (an adjacency matrix), or if it joins rows by
    an index among the data (the sum over the members of a group).
    """
    by_plate: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.structure.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in plate_of_array.items() if p == plate]
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
        if keys and not _joined_by_index(fm.traces.at(silos[j]), silos[j], keys):
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
            if fm.sizes(shorter)[plate] == size - 1:
                return True
        except (TypeError, ValueError, IndexError):
            continue
    return False


def _joined_by_index(trace: Trace, silo: SiloData, keys: Sequence[str]) -> bool:
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

    program, inputs = trace.part(trace.outputs_of(DENSITY, local=True))
    labels = [frozenset({one.name}) if one.kind == ARRAY else NONE for one in inputs]
    propagate_labels(program.jaxpr, labels, visit)
    return any(joined)


def minibatches_of_plates(
    fm: FederatedModel, possible_plates: Mapping[str, tuple[str, ...]], size: int
) -> Minibatches:
    """Return minibatches of ``size`` rows of all plates that can be cut.

    ``possible_plates`` has for each array the plates that are as long at every silo.
    """
    if fm.structure.nested:
        raise GuideError(
            f"batch_size={size}: a site stands in two silo plates at once, so that rows cannot be "
            f"drawn. Put its rows in long form, in one silo_plate. {WHOLE}"
        )
    cut: dict[tuple[str, ...], list[str]] = {}
    for plate in (p.name for p in fm.plates if not p.outer):
        arrays = tuple(sorted(key for key, plates in possible_plates.items() if plate in plates))
        if arrays:
            cut.setdefault(arrays, []).append(plate)
    if not cut:
        names = ", ".join(f"'{p.name}'" for p in fm.plates)
        raise GuideError(
            f"batch_size={size}: no array has as many rows as a silo_plate with nothing below it "
            f"({names}), so that none can be drawn. Take the plate's size from an array's shape. "
            f"{WHOLE}"
        )
    return Minibatches(size, tuple(CutPlates(tuple(ps), arrays) for arrays, ps in cut.items()))
