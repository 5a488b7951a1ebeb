"""Which row of one silo plate each row of another belongs to: the patient of each visit.

Where the rows of a plate have no latents of their own, and each looks up the latents of one row of
another plate by an index among the data (``effects[patient]``), their terms are a part of that
row's term: a patient's visits are the patient's data. The patients are then independent rows with
latents, whatever their visits. That it is so is shown by the traced program, for all values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.text.jaxprs import (
    MIXED,
    NONE,
    Labels,
    Lookups,
    Program,
    lookups,
    propagate_labels,
    row_axes,
    run_program,
    same_but_for_sizes,
    type_of,
)
from numpyro_fed.text.trace import ARRAY, DENSITY, LATENT, Input, Output, Trace

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def plates_below(traces: Iterable[Trace], outer: Collection[str]) -> dict[str, str]:
    """Return for each silo plate whose rows belong to rows of another one the name of that plate.

    ``outer`` are the plates whose latents sites of other plates read. A plate stays outer if any of
    these sites reads its latents otherwise at one of the silos.
    """
    found: dict[str, str] = {}
    for of in sorted(outer):
        below: set[str] | None = None
        for trace in dict.fromkeys(traces):
            sites = (s for s in trace.structure.sites if s.plate and s.kind != "deterministic")
            readers = {str(s.plate) for s in sites if of in trace.plates_read(s)} - {of}
            if trace.structure.nested or not trace.rows_apart(of, ()):
                readers = set()
            readers = readers if all(_belongs(trace, p, of) for p in readers) else set()
            below = readers if below in (None, readers) else set()
        found |= dict.fromkeys(sorted(below or ()), of)
    return found


def member_index(trace: Trace, plate: str, of: str, arrays: Mapping[str, Array]) -> Array:
    """Return the row of the plate ``of`` that each row of a plate belongs to, (rows,) ints."""
    program, inputs = trace.part(_densities(trace, plate))
    found = _looked_up(trace, program, inputs, of)
    if found is None:
        raise ValueError(f"rows of '{plate}' belong to no row of '{of}'.")
    index, used = found.indices[0]
    leaves = [
        jnp.asarray(jax.tree.leaves(arrays[one.name])[one.leaf], one.shape.dtype)
        for one, is_used in zip(inputs, used, strict=True)
        if is_used
    ]
    return run_program(index, leaves)[0][:, 0]


def _densities(trace: Trace, plate: str) -> list[Output]:
    """Return the log densities of the sites of a plate."""
    named = ((DENSITY, name) for name, term in trace.terms.items() if term.plate == plate)
    return [output for output in named if output in trace.trees]


def _looked_up(
    trace: Trace, program: Program, inputs: Sequence[Input], plate: str
) -> Lookups | None:
    """Return how a program looks the latents of a plate up."""
    places = {s.name: s.axis or 0 for s in trace.structure.sites if s.plate == plate}
    return lookups(program, [places.get(i.name) if i.kind == LATENT else None for i in inputs])


def _belongs(trace: Trace, plate: str, of: str) -> bool:
    """Return whether the rows of a plate belong to rows of another one."""
    if any(s.is_local_latent and s.plate == plate for s in trace.structure.sites):
        return False
    wanted = _densities(trace, plate)
    program, inputs = trace.part(wanted)
    found = _looked_up(trace, program, inputs, of)
    if found is None:
        return False
    first, first_used = found.indices[0]
    for index, used in found.indices:
        own = [one for one, is_used in zip(inputs, used, strict=True) if is_used]
        same = used == first_used and same_but_for_sizes(index, first, {})
        if not same or any(one.kind != ARRAY for one in own):
            return False
    kept = [one for one, is_used in zip(inputs, found.used, strict=True) if is_used]
    if _reads_by_index(found, kept):
        return False
    outputs = (output for output in trace.outputs if output in set(wanted))
    axes = row_axes(found.rest, [*[None] * len(kept), *found.axes])
    for (_, name), axis, variable in zip(outputs, axes, found.rest.jaxpr.outvars, strict=True):
        own_axis = axis not in (None, MIXED) and axis - len(type_of(variable).shape)
        if axis is not None and own_axis != trace.terms[name].dim:
            return False
    return True


def _reads_by_index(found: Lookups, inputs: Sequence[Input]) -> bool:
    """Return whether rows look up other latents, too: those of a second group that crosses."""
    labels = [frozenset({one.kind}) if one.kind in (ARRAY, LATENT) else NONE for one in inputs]
    crossed = list[bool]()

    def visit(eqn: JaxprEqn, operands: Sequence[Labels]) -> None:
        if eqn.primitive.name in ("gather", "dynamic_slice"):
            by_data = any(ARRAY in label for label in operands[1:])
            crossed.append(by_data and LATENT in operands[0])

    propagate_labels(found.rest.jaxpr, [*labels, *[NONE] * len(found.axes)], visit)
    return any(crossed)
