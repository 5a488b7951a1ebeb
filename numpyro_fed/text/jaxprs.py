"""Traced programs (jaxprs): their parts, what depends on what, and whether two are the same.

JAX promises little about the inside of a jaxpr, and changes it from version to version. What knows
its parts stands here, and in :mod:`numpyro_fed.text.row_axes`. It relies on attributes of JAX's
objects rather than on their classes, and on what an operation means rather than on its parameters
where that is enough. ``tests/text/test_jaxprs.py`` shows what it expects of the JAX that is
installed.

Dependences are found by labels. Each input of a program carries a set of labels. An operation's
outputs carry all labels of its inputs; calls, branches and scans are entered, so that the outputs
of one scan can have different labels. Nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


# Operations of one kind, by their names.
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
CALLS = frozenset(
    {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}
    | {"custom_vjp_call_jaxpr", "remat", "remat2"}
)
# Of matrices in the last two axes.
OF_MATRICES = frozenset({"cholesky", "triangular_solve"})


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return a variable's shape."""
    return tuple(getattr(type_of(atom), "shape", ()))


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
    old, new = ([shape_of(v) for v in (*eqn.invars[:1], *eqn.outvars[:1])] for eqn in both)
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
        return all(shape_of(a) == shape_of(b) for a, b in pairs)
    operands = zip(first.invars, second.invars, used, strict=False)
    return all(
        [shape_of(a)[i] for i in one] == [shape_of(b)[i] for i in other]
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
