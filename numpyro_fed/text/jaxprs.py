"""Traced programs (jaxprs): their parts, what depends on what, which rows read which, and sameness.

JAX promises little about the inside of a jaxpr, and changes it from version to version. What knows
its parts stands here. It relies on attributes of JAX's objects rather than on their classes, and on
what an operation means rather than on its parameters where that is enough.
``tests/text/test_jaxprs.py`` shows what it expects of the JAX that is installed.

Dependences are found by labels. Each input of a program carries a set of labels. An operation's
outputs carry all labels of its inputs; calls, branches and scans are entered, so that the outputs
of one scan can have different labels. Nothing is computed.

Rows lie along one axis of an array. An operation *keeps rows apart* if its results have rows along
an axis, too, and each of them reads only the row of the same number: a sum over another axis does,
``x - x.mean(0)`` does not. What is found so is proven for all values. Where an operation is not
known, nothing is, and the values have to be tried (:mod:`numpyro_fed.text.row_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.typing import ArrayLike

from numpyro_fed.data.silo_data import array_bytes

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

    Atom = Var | Literal
    Visitor = Callable[[JaxprEqn, Sequence["Labels"]], None]

Labels = frozenset[str]
NONE: Labels = frozenset()


class Program(NamedTuple):
    """A traced program: its operations, and the values of its constants."""

    jaxpr: Jaxpr
    consts: Sequence[ArrayLike]


class Scan(NamedTuple):
    """A scan. Its inputs are, in this order, constants, the carry and sequences.

    Its outputs are the last step's carry and sequences. The inputs and outputs of its body are in
    the same order.
    """

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool

    @property
    def carry(self) -> slice:
        """Return the positions of the carry among the inputs."""
        return slice(self.num_consts, self.num_consts + self.num_carry)


def trace_program(fn: Callable[..., Any], /, *args: object) -> Program:
    """Return the program of a function at arguments of these shapes; nothing is computed."""
    return as_program(jax.make_jaxpr(fn)(*args))


def as_program(program: object) -> Program:
    """Return a jaxpr of JAX's, closed or open, as a :class:`Program`."""
    # Up to JAX 0.11 a ClosedJaxpr wraps a Jaxpr; from 0.12 on one object has constants as well.
    jaxpr: Any = getattr(program, "jaxpr", program)
    return Program(jaxpr, getattr(program, "consts", ()))


def inner_programs(eqn: JaxprEqn) -> list[Program]:
    """Return the programs among an operation's parameters."""
    # Parameters are searched by type, since each primitive has another name for its programs
    # (jaxpr, call_jaxpr, branches).
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                found.append(as_program(item))
    return found


def calls_back(program: Program) -> bool:
    """Return whether a program calls Python functions while it runs."""
    return any(
        "callback" in eqn.primitive.name or any(map(calls_back, inner_programs(eqn)))
        for eqn in program.jaxpr.eqns
    )


def called_program(eqn: JaxprEqn) -> Program | None:
    """Return the program that ``jit``, ``checkpoint`` and the like call; None for others."""
    inner = inner_programs(eqn)
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    # An operation whose operands are not the program's inputs, one for one, is left opaque.
    (program,) = inner
    alike = len(program.jaxpr.invars) == len(eqn.invars)
    return program if alike and len(program.jaxpr.outvars) == len(eqn.outvars) else None


def scan(eqn: JaxprEqn) -> Scan | None:
    """Return an operation as a :class:`Scan`; None for other operations."""
    if eqn.primitive.name != "scan":
        return None
    # The counts are read off the ranks, by what a scan means, rather than off its parameters: a
    # sequence has one axis more outside of the body than inside.
    (body,) = inner_programs(eqn)
    pairs = (eqn.outvars, body.jaxpr.outvars), (eqn.invars, body.jaxpr.invars)
    stacked, items = (
        sum(type_of(a).ndim > type_of(b).ndim for a, b in zip(*pair, strict=True)) for pair in pairs
    )
    num_carry = len(eqn.outvars) - stacked
    num_consts = len(eqn.invars) - num_carry - items
    return Scan(body, num_consts, num_carry, eqn.params["length"], eqn.params["reverse"])


def type_of(variable: Atom) -> Any:
    """Return the shape and dtype of a variable, as JAX has them."""
    return variable.aval


def branches(eqn: JaxprEqn) -> list[Program] | None:
    """Return the branches of a ``cond``, whose first operand chooses; None for others."""
    return inner_programs(eqn) if eqn.primitive.name == "cond" else None


def pruned(program: Program, outputs: Sequence[bool]) -> tuple[Program, list[bool]]:
    """Return the program of some outputs without dead code, and which inputs it still has."""
    jaxpr, used = dce_jaxpr(program.jaxpr, list(outputs))
    # By id: literals among the operands cannot be hashed.
    read = {id(v) for vs in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in vs}
    kept = [
        pair for pair in zip(jaxpr.constvars, program.consts, strict=True) if id(pair[0]) in read
    ]
    places, values = [v for v, _ in kept], [c for _, c in kept]
    if hasattr(jaxpr, "consts"):
        return as_program(jaxpr.replace(constvars=places, consts=values)), used
    return Program(jaxpr.replace(constvars=places), values), used


def with_inputs_of(program: Program, primitive: str) -> tuple[Program, list[int]]:
    """Return a program with results of a primitive as further inputs, and their ``place``."""
    jaxpr = program.jaxpr
    made = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == primitive]
    others = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != primitive]
    inputs = [*jaxpr.invars, *(eqn.outvars[0] for eqn in made)]
    places = [eqn.params["place"] for eqn in made]
    return Program(jaxpr.replace(invars=inputs, eqns=others), program.consts), places


def run_program(program: Program, operands: Sequence[ArrayLike]) -> list[Array]:
    """Return the outputs of a program, operation by operation."""
    jaxpr: Any = program.jaxpr
    closed = jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, list(program.consts))
    return jaxpr_as_fun(closed)(*operands)


def run_inlined(program: Program, operands: Sequence[ArrayLike]) -> list[Array]:
    """Return the same with the operations of compiled calls as the program's own.

    Traced once more, it is one program without calls. What has derivatives of its own stays a call.
    """
    jaxpr = program.jaxpr
    found: dict[Var, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    found |= zip(jaxpr.invars, operands, strict=True)

    def read(variable: Atom) -> Any:
        return variable.val if isinstance(variable, Literal) else found[variable]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        called = called_program(eqn) if eqn.primitive.name in ("jit", "pjit") else None
        found |= zip(
            eqn.outvars,
            run_operation(eqn, values) if called is None else run_inlined(called, values),
            strict=True,
        )
    return [read(v) for v in jaxpr.outvars]


def run_operation(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Array]:
    """Return the outputs of one operation at values of its operands."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def provenance(fn: Callable[..., Any], /, **inputs: object) -> Any:
    """Return the names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    Unlike in ``numpyro.ops.provenance`` the outputs of a scan are told apart.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    by_name = [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]
    labels = propagate_labels(as_program(program).jaxpr, by_name)
    return jax.tree.unflatten(jax.tree.structure(out), labels)


def propagate_labels(
    jaxpr: Jaxpr, labels: Sequence[Labels], visit: Visitor | None = None
) -> list[Labels]:
    """Return the labels of a program's outputs, given those of its inputs.

    ``visit`` is called with each operation and the labels of its operands, for the operations of
    inner programs as well.
    """
    by_variable = dict(zip(jaxpr.invars, labels, strict=True))
    for eqn in jaxpr.eqns:
        operands = [labels_of(by_variable, v) for v in eqn.invars]
        if visit is not None:
            visit(eqn, operands)
        by_variable |= zip(eqn.outvars, output_labels(eqn, operands, visit), strict=True)
    return [labels_of(by_variable, v) for v in jaxpr.outvars]


def labels_of(by_variable: Mapping[Var, Labels], variable: Atom) -> Labels:
    """Return the labels of a variable; literals and constants of the program have none."""
    return NONE if isinstance(variable, Literal) else by_variable.get(variable, NONE)


def output_labels(
    eqn: JaxprEqn, operands: Sequence[Labels], visit: Visitor | None = None
) -> list[Labels]:
    """Return the labels of one operation's outputs, given those of its operands."""
    if (loop := scan(eqn)) is not None:
        labels = scan_body_labels(loop, operands)
        out = propagate_labels(loop.body.jaxpr, labels, visit)
        return [*labels[loop.carry], *out[loop.num_carry :]]
    if (program := called_program(eqn)) is not None:
        return propagate_labels(program.jaxpr, operands, visit)
    if (choices := branches(eqn)) is not None:
        which, *rest = operands
        outs = [propagate_labels(program.jaxpr, rest, visit) for program in choices]
        # The index that chooses reaches every output, whichever branch is taken.
        return [which.union(*labels) for labels in zip(*outs, strict=True)]
    # Every other operation, a while loop among them, is opaque: all reaches all.
    return [NONE.union(*operands)] * len(eqn.outvars)


def scan_body_labels(loop: Scan, operands: Sequence[Labels]) -> list[Labels]:
    """Return the labels of the inputs of a scan's body, over all of its steps."""
    labels = list(operands)
    # What one step carries reaches all steps after it. Labels only grow, and there are finitely
    # many, so that the iteration ends: after as many turns as the carry has entries, at most.
    while True:
        out = propagate_labels(loop.body.jaxpr, labels)[: loop.num_carry]
        carry = [a | b for a, b in zip(labels[loop.carry], out, strict=True)]
        if carry == labels[loop.carry]:
            return labels
        labels[loop.carry] = carry


# The axis along which a value has rows; None if it reads no row, MIXED if it may read several.
Axis = int | None
MIXED = -1

ELEMENTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt"}
    | {"bessel_i0e", "bessel_i1e", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh"}
    | {"digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge"}
    | {"gt", "igamma", "igammac", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "lt"}
    | {"logistic", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "polygamma", "pow"}
    | {"reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n"}
    | {"sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
    | {"zeta"}
)
REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"}
    | {"reduce_sum"}
)
# What runs along one axis, which is the parameter of this name.
ALONG = {
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
}
CALLS = frozenset(
    {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}
    | {"custom_vjp_call_jaxpr", "remat", "remat2"}
)
# Of matrices in the last two axes.
OF_MATRICES = frozenset({"cholesky", "triangular_solve"})


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
        next(i for i in range(len(_shape(v))) if i not in eqn.params["dimension_numbers"][0])
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
    if not plain or index is not None or row not in looked_in or len(_shape(indices)) != 2:
        return None
    whole = [n for i, n in enumerate(_shape(eqn.invars[0])) if i not in looked_in]
    if whole != [n for i, n in enumerate(eqn.params["slice_sizes"]) if i not in looked_in]:
        return None
    if len(looked_in) == 1:
        return indices
    # As of ``effects[group, 1]``: a column of indices for each axis.
    joined = None if isinstance(indices, Literal) else producer.get(indices)
    if joined is None or joined.primitive.name != "concatenate":
        return None
    columns = joined.invars
    alike = len(columns) == len(looked_in) and all(_shape(v)[1:] == (1,) for v in columns)
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
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    others = any(a is not None for a in axes[1:])
    if name == "dot_general":
        return _product(eqn, axes)
    if name == "gather":
        return _gathered(eqn, axes)
    if name in ELEMENTWISE:
        # An operand of rank 0 or with an axis of size 1 is repeated.
        with_rows = [_shape(v) for v, a in zip(eqn.invars, axes, strict=True) if a is not None]
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
        ranks = {len(_shape(v)) for v in (*eqn.invars, *eqn.outvars)}
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


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(type_of(atom), "shape", ()))


def _product(eqn: JaxprEqn, axes: Sequence[Axis]) -> Axis:
    contracted, batch = eqn.params["dimension_numbers"]
    if any(a is not None and a in dims for a, dims in zip(axes, contracted, strict=True)):
        return MIXED
    places: list[Axis] = []
    free_before = len(batch[0])
    for axis, operand, used, dims in zip(axes, eqn.invars, contracted, batch, strict=True):
        free = [i for i in range(len(_shape(operand))) if i not in (*used, *dims)]
        if axis is not None:
            place = list(dims).index(axis) if axis in dims else free_before + free.index(axis)
            places.append(place)
        free_before += len(free)
    return _common(places)


def _gathered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Axis:
    operand, index = axes
    numbers = eqn.params["dimension_numbers"]
    rank = len(_shape(eqn.outvars[0]))
    of_index = [i for i in range(rank) if i not in numbers.offset_dims]
    batching = tuple(numbers.operand_batching_dims)
    if operand is None:
        return of_index[index] if index is not None and index < len(of_index) else MIXED
    if operand in batching:
        own = numbers.start_indices_batching_dims[batching.index(operand)]
        return of_index[own] if index in (None, own) else MIXED
    whole = eqn.params["slice_sizes"][operand] == _shape(eqn.invars[0])[operand]
    if index is not None or not whole or operand in numbers.collapsed_slice_dims:
        return MIXED
    gone = (*numbers.collapsed_slice_dims, *batching)
    return numbers.offset_dims[operand - sum(g < operand for g in gone)]


# Operations whose results at a row are the same among more rows.
OF_ANY_SIZE = ELEMENTWISE - {"integer_pow"}
OF_ANY_SIZE |= {"broadcast_in_dim", "iota", "squeeze", "stack", "transpose"}
# Parameters that are sizes of axes.
SIZES = frozenset({"limit_indices", "new_sizes", "shape", "sizes", "slice_sizes"})


def _keeps_sizes(first: JaxprEqn, second: JaxprEqn) -> bool:
    """Return whether an operation cannot tell how many rows there are in two programs."""
    name, both = first.primitive.name, (first, second)
    if name in OF_ANY_SIZE or name in CALLS or name == "cond":
        return True
    if name == "integer_pow":
        return bool(first.params == second.params)
    if name == "scan":
        return bool(first.params["length"] == second.params["length"])
    # The shapes of the first operand and of the first result.
    old, new = ([_shape(v) for v in (*eqn.invars[:1], *eqn.outvars[:1])] for eqn in both)
    if name == "reshape":
        # One axis of another size, if any, stays whole behind the same axes.
        changed, moved = (
            [i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
            for pair in zip(old, new, strict=True)
        )
        if len(changed) != 1 or len(moved) != 1:
            return not changed and not moved
        (i,), (j,) = changed, moved
        kept = (old[0][i], new[0][i]) == (old[1][j], new[1][j])
        return kept and math.prod(old[0][:i]) == math.prod(old[1][:j])
    if name == "gather":
        # A part of an axis of another size might be its end.
        wholes = zip(old[0], new[0], *(eqn.params["slice_sizes"] for eqn in both), strict=True)
        return all((a == b and p == q) or (p, q) == (a, b) for a, b, p, q in wholes)
    if name == "slice":
        strided = (e.params["strides"] not in (None, (1,) * len(old[0])) for e in both)
        wholes = zip(*old, *new, strict=True)
        return not any(strided) and all(a == c or (a, c) == (b, d) for a, b, c, d in wholes)
    used: list[Any] = []
    if name in REDUCTIONS:
        used = [(first.params["axes"], second.params["axes"])]
    elif name == "dot_general":
        used = list(zip(*(eqn.params["dimension_numbers"][0] for eqn in both), strict=True))
    elif name == "concatenate":
        used = [tuple([eqn.params["dimension"]] for eqn in both)] * len(first.invars)
    else:
        pairs = zip((*first.invars, *first.outvars), (*second.invars, *second.outvars), strict=True)
        return all(_shape(a) == _shape(b) for a, b in pairs)
    operands = zip(first.invars, second.invars, used, strict=False)
    return all(
        [_shape(a)[i] for i in one] == [_shape(b)[i] for i in other]
        for a, b, (one, other) in operands
    )


def same_but_for_sizes(first: Program, second: Program, sizes: Mapping[int, int]) -> bool:
    """Return whether two programs do the same, to arrays of other sizes.

    ``sizes`` has for each size of an axis in the first program that in the second. Numbers that
    the programs read are equal: a mean that divides by a number of rows is not the same, nor is a
    sum along an axis of another size, if only of ones.
    """
    place: dict[Atom, Atom] = {}

    def alike(a: object, b: object, of_sizes: bool) -> bool:
        """Return whether two parameters of an operation say the same."""
        if hasattr(getattr(a, "jaxpr", a), "eqns"):
            inner = hasattr(getattr(b, "jaxpr", b), "eqns")
            return inner and same_but_for_sizes(as_program(a), as_program(b), sizes)
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            pairs = zip(a, b, strict=False)
            return len(a) == len(b) and all(alike(x, y, of_sizes) for x, y in pairs)
        if isinstance(a, int) and isinstance(b, int):
            return a == b or (of_sizes and sizes.get(a) == b)
        if isinstance(a, np.ndarray):
            return np.array_equal(a, np.asarray(b))
        # Rules of derivatives are functions: what they are the rules of is compared.
        rules = all(callable(f) or hasattr(f, "call_wrapped") for f in (a, b))
        return bool(a == b) or rules

    def same_type(a: Atom, b: Atom) -> bool:
        one, other = type_of(a), type_of(b)
        return one.dtype == other.dtype and alike(tuple(one.shape), tuple(other.shape), True)

    def same_atom(a: Atom, b: Atom) -> bool:
        if isinstance(a, Literal) and isinstance(b, Literal):
            return bool(np.all(a.val == b.val))
        if isinstance(a, Literal) or isinstance(b, Literal):
            return False
        return place.get(a) is b

    one, other = first.jaxpr, second.jaxpr
    if len(one.eqns) != len(other.eqns) or len(first.consts) != len(second.consts):
        return False
    constants = zip(first.consts, second.consts, strict=True)
    if not all(a is b or array_bytes(a) == array_bytes(b) for a, b in constants):
        return False
    for a, b in zip(one.constvars, other.constvars, strict=True):
        if not same_type(a, b):
            return False
        place[a] = b
    place |= zip(one.invars, other.invars, strict=True)
    for x, y in zip(one.eqns, other.eqns, strict=True):
        operands = zip(x.invars, y.invars, strict=False)
        same = x.primitive is y.primitive and len(x.invars) == len(y.invars)
        if not same or len(x.outvars) != len(y.outvars) or x.params.keys() != y.params.keys():
            return False
        if not all(same_atom(a, b) for a, b in operands) or not _keeps_sizes(x, y):
            return False
        if not all(alike(x.params[p], y.params[p], p in SIZES) for p in x.params):
            return False
        for a, b in zip(x.outvars, y.outvars, strict=True):
            if not same_type(a, b):
                return False
            place[a] = b
    outputs = zip(one.outvars, other.outvars, strict=True)
    return all(same_atom(a, b) for a, b in outputs)
