"""Traced programs (jaxprs): their constants, their dependences, and whether two are the same.

JAX promises little about the inside of a jaxpr, and changes it from version to version. No other
module reads jaxprs directly. This one relies on attributes of JAX's objects rather than on their
classes, and on what an operation means rather than on its parameters where that is enough.
``tests/test_jaxprs.py`` shows what it expects of the JAX that is installed.

Dependences are found by labels. Each input of a program carries a set of labels. An operation's
outputs carry all labels of its inputs; calls, branches and scans are entered, so that the outputs
of one scan can have different labels. Nothing is computed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

    Atom = Var | Literal
    Visitor = Callable[[JaxprEqn, Sequence["Labels"]], None]

Labels = frozenset[str]
NONE: Labels = frozenset()
# A jaxpr that is printed shows functions by their address, which differs between processes.
ADDRESS = re.compile(r"0x[0-9a-f]+")


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


# What stands for a value in the text: a digest of all that led to it, or a constant and its type.
Said = str | tuple[ArrayLike, str]


class Written:
    """A program's operations as text, and the numbers that they read, in their order.

    The text has no name, no address and no number with a fraction, so that it is the same in all
    processes with this version of JAX. Numbers are given apart, since a constant that was computed
    (an inverse, an exponential) differs between machines in its last digits. Calls are entered:
    what they are named, and in which order they take what they close over, does not matter.
    """

    def __init__(self, program: Program):
        self.numbers = list[ArrayLike]()
        inputs = [f"{i}:{_shape(v)}" for i, v in enumerate(program.jaxpr.invars)]
        self.words = " ".join(map(self._said, self._outputs(program, inputs)))

    def _outputs(self, program: Program, inputs: Sequence[Said]) -> list[Said]:
        """Return what a program's outputs are, as digests of all that led to them."""
        known: dict[int, Said] = dict(zip(map(id, program.jaxpr.invars), inputs, strict=True))
        for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True):
            known[id(variable)] = (value, _shape(variable))

        def found(atom: Atom) -> Said:
            return (atom.val, _shape(atom)) if isinstance(atom, Literal) else known[id(atom)]

        for eqn in program.jaxpr.eqns:
            results = self._results(eqn, [found(v) for v in eqn.invars])
            known |= zip(map(id, eqn.outvars), results, strict=True)
        return [found(v) for v in program.jaxpr.outvars]

    def _results(self, eqn: JaxprEqn, operands: Sequence[Said]) -> Sequence[Said]:
        """Return what an operation's results are."""
        if (program := called_program(eqn)) is not None:
            return self._outputs(program, operands)
        # NumPyro's scan and cond return the parts of a distribution in the order of a set, which
        # is another in each process: an output is known by what leads to it, not by its place.
        if (choices := branches(eqn)) is not None:
            which = self._said(operands[0])
            by_branch = [self._outputs(p, operands[1:]) for p in choices]
            outputs = zip(*by_branch, strict=True)
            return [_digest("cond", which, *map(self._said, one)) for one in outputs]
        if (loop := scan(eqn)) is not None:
            consts, items = operands[: loop.num_consts], operands[loop.carry.stop :]
            carried = self._inputs("carry", operands[loop.carry])
            inside = [*consts, *carried, *(_digest("item", self._said(one)) for one in items)]
            results = self._outputs(loop.body, inside)
            steps, stacked = f"{loop.length} {loop.reverse}", results[loop.num_carry :]
            carry_of = _digest(*map(self._said, results[: loop.num_carry]))
            last = [_digest("last", steps, carry_of, f"{i}") for i in range(loop.num_carry)]
            return last + [
                _digest("stacked", steps, carry_of, one) if isinstance(one, str) else one
                for one in stacked
            ]
        if eqn.primitive.name == "while":
            ends, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = self._inputs("carry", operands[ends + body :])
            goes_on = [*operands[:ends], *carry]
            step = [*operands[ends : ends + body], *carry]
            programs = as_program(eqn.params["cond_jaxpr"]), as_program(eqn.params["body_jaxpr"])
            pairs = zip(programs, (goes_on, step), strict=True)
            parts = [_digest(*map(self._said, self._outputs(*pair))) for pair in pairs]
        else:
            # Parameters as text, without programs, functions and other objects.
            settings = []
            for name, value in sorted(eqn.params.items()):
                items = value if isinstance(value, tuple | list) else (value,)
                objects = (callable(i) or hasattr(getattr(i, "jaxpr", i), "eqns") for i in items)
                if not any(objects) and not ADDRESS.search(repr(value)):
                    settings.append(f"{name}={value!r}")
            parts = [" ".join(settings), *map(self._said, operands)]
            for program in inner_programs(eqn):
                inputs = [f"in {i}:{_shape(v)}" for i, v in enumerate(program.jaxpr.invars)]
                parts.append(_digest(*map(self._said, self._outputs(program, inputs))))
        whole = _digest(eqn.primitive.name, *parts)
        return [_digest(whole, f"{i}:{_shape(v)}") for i, v in enumerate(eqn.outvars)]

    def _inputs(self, kind: str, operands: Sequence[Said]) -> list[str]:
        return [_digest(kind, f"{i}", self._said(one)) for i, one in enumerate(operands)]

    def _said(self, one: Said) -> str:
        """Return what stands for a value in the text; a number is noted wherever it is read."""
        if isinstance(one, str):
            return one
        value, shape = one
        self.numbers.append(value)
        return f"number {shape}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _shape(variable: Atom) -> str:
    aval = type_of(variable)
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}"


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
    kept = _read(jaxpr, program.consts)
    places, values = list(kept), list(kept.values())
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


def _read(jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> dict[Var, ArrayLike]:
    """Return the constants that a program reads, by variable."""
    # By id: literals among the operands cannot be hashed.
    read = {id(v) for vs in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in vs}
    return {v: c for v, c in zip(jaxpr.constvars, consts, strict=True) if id(v) in read}


def provenance(fn: Callable[..., Any], /, **inputs: object) -> Any:
    """Return the names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    Unlike in ``numpyro.ops.provenance`` the outputs of a scan are told apart.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    labels = propagate_labels(as_program(program).jaxpr, labels_by_name(inputs))
    return jax.tree.unflatten(jax.tree.structure(out), labels)


def labels_by_name(inputs: Mapping[str, object]) -> list[Labels]:
    """Return the label of each leaf of a dict: the key that it belongs to."""
    return [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]


def propagate_labels(
    jaxpr: Jaxpr,
    labels: Sequence[Labels],
    visit: Visitor | None = None,
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
    eqn: JaxprEqn,
    operands: Sequence[Labels],
    visit: Visitor | None = None,
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
