"""Which arrays hold the rows of which silo plate, and whether rows can be separated or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.data.minibatches import CutPlates, Minibatches
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.text.jaxprs import (
    NONE,
    Labels,
    propagate_labels,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.traces import ARRAY, DENSITY, Trace

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


WHOLE = "Use batch_size=None."


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
