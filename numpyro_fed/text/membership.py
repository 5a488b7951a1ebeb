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
    NONE,
    Labels,
    Program,
    propagate_labels,
    run_program,
    same_but_for_sizes,
    type_of,
)
from numpyro_fed.text.row_axes import MIXED, lookups, row_axes
from numpyro_fed.text.trace import ARRAY, DENSITY, LATENT, Input, Trace

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def plates_below(traces: Iterable[Trace], outer: Collection[str]) -> dict[str, str]:
    """Return for each silo plate whose rows belong to rows of another one the name of that plate.

    ``outer`` are the plates whose latents sites of other plates read. A plate stays outer if any of
    these sites reads its latents otherwise at one of the silos.
    """
    distinct, found = dict.fromkeys(traces), dict[str, str]()
    for of in sorted(outer):
        first, *others = (_readers_below(trace, of) for trace in distinct)
        if all(other == first for other in others):
            found |= dict.fromkeys(sorted(first), of)
    return found


def member_index(trace: Trace, plate: str, of: str, arrays: Mapping[str, Array]) -> Array:
    """Return the row of the plate ``of`` that each row of a plate belongs to, (rows,) ints."""
    found = _index(trace, plate, of)
    if found is None:
        raise ValueError(f"the text's form depends on sizes: is the '{of}' of '{plate}' an index?")
    index, inputs = found
    leaves = (
        jnp.asarray(jax.tree.leaves(arrays[one.name])[one.leaf], one.shape.dtype) for one in inputs
    )
    # A row beyond the range reads the last one, or a constant that the text names: then the place
    # of its term does not matter.
    last = trace.structure.sizes[of] - 1
    return jnp.clip(run_program(index, list(leaves))[0][:, 0], 0, last)


def _readers_below(trace: Trace, of: str) -> frozenset[str]:
    """Return the plates whose rows belong to rows of a plate; none if another one reads it, too."""
    sites = [s for s in trace.structure.sites if s.plate and s.kind != "deterministic"]
    readers = frozenset(str(s.plate) for s in sites if of in trace.plates_read(s)) - {of}
    apart = not trace.structure.nested and trace.rows_apart(of, ())
    belong = apart and all(_index(trace, plate, of) is not None for plate in readers)
    return readers if belong else frozenset()


def _index(trace: Trace, plate: str, of: str) -> tuple[Program, Sequence[Input]] | None:
    """Return the program (rows, 1) of the index by which a plate's rows look one row of another up.

    And the arrays that it reads. It is None where the rows belong to none, as far as the program
    shows.
    """
    sites = trace.structure.sites
    if any(s.is_local_latent and s.plate == plate for s in sites):
        return None
    named = ((DENSITY, name) for name, term in trace.terms.items() if term.plate == plate)
    wanted = {output for output in named if output in trace.trees}
    program, inputs = trace.part(wanted)
    places = {s.name: s.axis or 0 for s in sites if s.plate == of}
    found = lookups(program, [places.get(i.name) if i.kind == LATENT else None for i in inputs])
    if found is None or _reads_more(trace, found.rest, _kept(inputs, found.used), plate, of):
        return None
    (first, first_used), *others = found.indices
    alike = all(used == first_used and same_but_for_sizes(p, first, {}) for p, used in others)
    read = _kept(inputs, first_used)
    if not alike or any(one.kind != ARRAY for one in read):
        return None
    axes = row_axes(found.rest, [*[None] * sum(found.used), *found.axes])
    outputs = (output for output in trace.outputs if output in wanted)
    for (_, name), axis, variable in zip(outputs, axes, found.rest.jaxpr.outvars, strict=True):
        own = axis not in (None, MIXED) and axis - len(type_of(variable).shape)
        if axis is not None and own != trace.terms[name].dim:
            return None
    return first, read


def _kept(inputs: Sequence[Input], used: Sequence[bool]) -> list[Input]:
    return [one for one, is_used in zip(inputs, used, strict=True) if is_used]


def _reads_more(trace: Trace, rest: Program, inputs: Sequence[Input], plate: str, of: str) -> bool:
    """Return whether rows of a plate read latents of a third one with several rows: they cross.

    One that has a single row at this silo may have several at another: it must not be looked up by
    data, either.
    """
    plates = {s.name: s.plate for s in trace.structure.sites if s.is_local_latent}
    sites = [s for s in trace.structure.sites if s.plate == plate and s.kind != "deterministic"]
    others = frozenset[str]().union(*(trace.plates_read(s) for s in sites)) - {of}
    if any(trace.structure.sizes[p] > 1 for p in others):
        return True
    labels = [
        frozenset({one.kind})
        if one.kind == ARRAY or (one.kind == LATENT and plates.get(one.name) in others)
        else NONE
        for one in inputs
    ]
    crossed = list[bool]()

    def visit(eqn: JaxprEqn, operands: Sequence[Labels]) -> None:
        if eqn.primitive.name in ("gather", "dynamic_slice"):
            by_data = any(ARRAY in label for label in operands[1:])
            crossed.append(by_data and LATENT in operands[0])

    more = [NONE] * (len(rest.jaxpr.invars) - len(inputs))
    propagate_labels(rest.jaxpr, [*labels, *more], visit)
    return any(crossed)
