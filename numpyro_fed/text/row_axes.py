"""Which rows of its inputs each row of a traced program reads.

Rows lie along one axis of an array. An operation *keeps rows apart* if its results have rows along
an axis, too, and each of them reads only the row of the same number: a sum over another axis does,
``x - x.mean(0)`` does not. What is found so is proven for all values. Where an operation is not
known, nothing is, and the values have to be tried (:mod:`numpyro_fed.text.row_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from jax.extend.core import Literal

from numpyro_fed.text.jaxprs import (
    CALLS,
    ELEMENTWISE,
    OF_MATRICES,
    REDUCTIONS,
    Program,
    branches,
    called_program,
    pruned,
    scan,
    shape_of,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var

    Atom = Var | Literal

# The axis along which a value has rows; None if it reads no row, MIXED if it may read several.
Axis = int | None
MIXED = -1

# What runs along one axis, which is the parameter of this name.
ALONG = {
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
}


def row_axes(program: Program, axes: Sequence[Axis]) -> list[Axis]:
    """Return along which axis each output of a program has rows, given those of its inputs."""
    found = dict(zip(program.jaxpr.invars, axes, strict=True))

    def axis_of(atom: Atom) -> Axis:
        return None if isinstance(atom, Literal) else found.get(atom)

    for eqn in program.jaxpr.eqns:
        found |= zip(eqn.outvars, _results(eqn, [axis_of(v) for v in eqn.invars]), strict=True)
    return [axis_of(v) for v in program.jaxpr.outvars]


class Lookups(NamedTuple):
    """A program that reads rows of some inputs by an index alone, such as ``effects[group]``.

    ``rest`` is the program with what it looks up as further inputs, which have rows along ``axes``,
    and ``used`` the other inputs that it still has. ``indices`` are the programs (n, 1) of the
    indices, each with the inputs that it has.
    """

    rest: Program
    used: list[bool]
    axes: list[int]
    indices: list[tuple[Program, list[bool]]]


def lookups(program: Program, axes: Sequence[Axis]) -> Lookups | None:
    """Return a program's lookups in inputs with rows along ``axes``; None if it reads them else."""
    jaxpr = program.jaxpr
    found, kept, made, of_rows = dict(zip(jaxpr.invars, axes, strict=True)), [], [], []
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        own = [None if isinstance(v, Literal) else found.get(v) for v in eqn.invars]
        is_gather = eqn.primitive.name == "gather" and own[0] is not None
        if is_gather and (index := _index_of_rows(eqn, own, producer)) is not None:
            made.append(eqn)
            of_rows.append(index)
        else:
            kept.append(eqn)
            found |= zip(eqn.outvars, _results(eqn, own), strict=True)
    if not made:
        return None
    results = [eqn.outvars[0] for eqn in made]
    places = [
        next(i for i in range(len(shape_of(v))) if i not in eqn.params["dimension_numbers"][0])
        for eqn, v in zip(made, results, strict=True)
    ]
    whole = Program(jaxpr.replace(invars=[*jaxpr.invars, *results], eqns=kept), program.consts)
    rest, used = pruned(whole, [True] * len(jaxpr.outvars))
    given, looked_up = used[: len(axes)], used[len(axes) :]
    if any(is_used and axis is not None for is_used, axis in zip(given, axes, strict=True)):
        return None
    indices = [
        pruned(Program(jaxpr.replace(outvars=[index]), program.consts), [True]) for index in of_rows
    ]
    return Lookups(rest, given, list(compress(places, looked_up)), indices)


def _index_of_rows(
    eqn: JaxprEqn, axes: Sequence[Axis], producer: Mapping[Var, JaxprEqn]
) -> Atom | None:
    """Return the indices (n, 1) by which a gather reads one row each; None if it reads more."""
    numbers, (row, index), indices = eqn.params["dimension_numbers"], axes, eqn.invars[1]
    looked_in = tuple(numbers.start_index_map)
    plain = not numbers.operand_batching_dims and looked_in == tuple(numbers.collapsed_slice_dims)
    if not plain or index is not None or row not in looked_in or len(shape_of(indices)) != 2:
        return None
    whole = [n for i, n in enumerate(shape_of(eqn.invars[0])) if i not in looked_in]
    if whole != [n for i, n in enumerate(eqn.params["slice_sizes"]) if i not in looked_in]:
        return None
    if len(looked_in) == 1:
        return indices
    # As of ``effects[group, 1]``: a column of indices for each axis.
    joined = None if isinstance(indices, Literal) else producer.get(indices)
    if joined is None or joined.primitive.name != "concatenate":
        return None
    columns = joined.invars
    alike = len(columns) == len(looked_in) and all(shape_of(v)[1:] == (1,) for v in columns)
    return columns[looked_in.index(row)] if alike and joined.params["dimension"] == 1 else None


def _results(eqn: JaxprEqn, axes: Sequence[Axis]) -> Sequence[Axis]:
    """Return the axes of an operation's results."""
    if all(axis is None for axis in axes):
        return [None] * len(eqn.outvars)
    mixed = [MIXED] * len(eqn.outvars)
    if MIXED in axes or not eqn.outvars:
        return mixed
    # A reduction has a program as well, for two values.
    if eqn.primitive.name in CALLS and (program := called_program(eqn)) is not None:
        return row_axes(program, axes)
    if (choices := branches(eqn)) is not None:
        if axes[0] is not None:
            return mixed
        each = [row_axes(choice, axes[1:]) for choice in choices]
        return [_common(found) for found in zip(*each, strict=True)]
    if (loop := scan(eqn)) is not None:
        items = [_without(axis, 0) for axis in axes[loop.carry.stop :]]
        inside = [*axes[: loop.carry.stop], *items]
        if MIXED in items:
            return mixed
        # What the first steps carry may have no rows yet: each turn adds some, or none is added.
        for _ in range(1 + loop.num_carry):
            out = row_axes(loop.body, inside)
            carry = [_common(pair) for pair in zip(inside[loop.carry], out, strict=False)]
            if carry == inside[loop.carry]:
                stacked = [a if a in (None, MIXED) else a + 1 for a in out[loop.num_carry :]]
                return [*carry, *stacked]
            inside[loop.carry] = carry
        return mixed
    return [_result(eqn, axes)] * len(eqn.outvars)


def _result(eqn: JaxprEqn, axes: Sequence[Axis]) -> Axis:
    """Return the axis of an operation's results; MIXED for operations that are not known."""
    name, params, axis = eqn.primitive.name, eqn.params, axes[0]
    common = next(iter(known)) if len(known := {a for a in axes if a is not None}) == 1 else MIXED
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    others = any(a is not None for a in axes[1:])
    if name == "dot_general":
        return _product(eqn, axes)
    if name == "gather":
        return _gathered(eqn, axes)
    if name in ELEMENTWISE:
        # An operand of rank 0 or with an axis of size 1 is repeated.
        with_rows = [shape_of(v) for v, a in zip(eqn.invars, axes, strict=True) if a is not None]
        alike = all(len(s) == len(new) and s[common] == new[common] for s in with_rows)
        return common if alike else MIXED
    if name in ALONG:
        return MIXED if common == params[ALONG[name]] else common
    if name == "stack" and common != MIXED:
        return common + (common >= params["axis"])
    # The columns of B in A X = B, or the rows in X A = B, have a solution each.
    free = len(new) - (1 if params.get("left_side") else 2)
    if name == "triangular_solve" and axis is None and common == free:
        return common
    if name in OF_MATRICES:
        ranks = {len(shape_of(v)) for v in (*eqn.invars, *eqn.outvars)}
        return common if len(ranks) == 1 and common < min(ranks) - 2 else MIXED
    if axis is None:
        return MIXED
    if name in REDUCTIONS:
        return _without(axis, *params["axes"])
    if name == "squeeze":
        return _without(axis, *params["dimensions"])
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "rev":
        return MIXED if axis in params["dimensions"] else axis
    if name in ("slice", "dynamic_slice"):
        return axis if old[axis] == new[axis] and not others else MIXED
    if name == "pad":
        kept = tuple(params["padding_config"][axis]) == (0, 0, 0)
        return axis if kept and axes[1] is None else MIXED
    if name == "broadcast_in_dim":
        to = int(params["broadcast_dimensions"][axis])
        return to if new[to] == old[axis] else MIXED
    if name == "reshape" and params.get("dimensions") is None:
        before = math.prod(old[:axis])
        same = (j for j, n in enumerate(new) if n == old[axis] and math.prod(new[:j]) == before)
        return next(same, MIXED)
    return MIXED


def _common(axes: Sequence[Axis]) -> Axis:
    """Return the one axis of several values, those without rows aside; MIXED if there are two."""
    known = {axis for axis in axes if axis is not None}
    return MIXED if len(known) > 1 else next(iter(known), None)


def _without(axis: Axis, *gone: int) -> Axis:
    """Return an axis after others are gone; MIXED if it is one of them."""
    if axis is None or axis == MIXED:
        return axis
    return MIXED if axis in gone else axis - sum(g < axis for g in gone)


def _product(eqn: JaxprEqn, axes: Sequence[Axis]) -> Axis:
    contracted, batch = eqn.params["dimension_numbers"]
    if any(a is not None and a in dims for a, dims in zip(axes, contracted, strict=True)):
        return MIXED
    places: list[Axis] = []
    free_before = len(batch[0])
    for axis, operand, used, dims in zip(axes, eqn.invars, contracted, batch, strict=True):
        free = [i for i in range(len(shape_of(operand))) if i not in (*used, *dims)]
        if axis is not None:
            place = list(dims).index(axis) if axis in dims else free_before + free.index(axis)
            places.append(place)
        free_before += len(free)
    return _common(places)


def _gathered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Axis:
    operand, index = axes
    numbers = eqn.params["dimension_numbers"]
    rank = len(shape_of(eqn.outvars[0]))
    of_index = [i for i in range(rank) if i not in numbers.offset_dims]
    batching = tuple(numbers.operand_batching_dims)
    if operand is None:
        return of_index[index] if index is not None and index < len(of_index) else MIXED
    if operand in batching:
        own = numbers.start_indices_batching_dims[batching.index(operand)]
        return of_index[own] if index in (None, own) else MIXED
    whole = eqn.params["slice_sizes"][operand] == shape_of(eqn.invars[0])[operand]
    if index is not None or not whole or operand in numbers.collapsed_slice_dims:
        return MIXED
    gone = (*numbers.collapsed_slice_dims, *batching)
    return numbers.offset_dims[operand - sum(g < operand for g in gone)]
