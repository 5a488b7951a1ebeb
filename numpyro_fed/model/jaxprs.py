"""Programs as JAX has traced them: what is in them, what depends on what, which are the same.

JAX promises little about the inside of a program, and changes it from version to version. This
module alone knows it, by the attributes of JAX's objects rather than their classes, and by what an
operation means rather than its parameters where that is enough. ``tests/test_jaxprs.py`` shows what
it expects of the JAX that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.typing import ArrayLike

from numpyro_fed.model.data import written

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

    Atom = Var | Literal
    See = Callable[[JaxprEqn, Sequence["Labels"]], None]

Labels = frozenset[str]
NONE: Labels = frozenset()
ADDRESS = re.compile(r"0x[0-9a-f]+")


class Program(NamedTuple):
    """A traced program: its operations, and the values of its constants."""

    jaxpr: Jaxpr
    consts: Sequence[ArrayLike]


class Scan(NamedTuple):
    """A scan: its inputs are constants, what one step carries to the next, and sequences.

    Its outputs are what the last step carries, and sequences; those of its body, and the body's
    inputs, are in the same order.
    """

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool

    @property
    def carry(self) -> slice:
        """The places of what is carried, among the inputs."""
        return slice(self.num_consts, self.num_consts + self.num_carry)


class Identity(NamedTuple):
    """Tells a program from others, by its operations in words and all numbers that it reads."""

    words: str
    numbers: tuple[ArrayLike, ...]

    @classmethod
    def of(cls, program: Program) -> Identity:
        """Read a program, without the addresses of objects in memory."""
        return cls(ADDRESS.sub("", str(program.jaxpr)), tuple(constants(program)))

    def same(self, other: Identity) -> bool:
        """Return whether two programs compute the same in the same way."""
        if self.words != other.words or len(self.numbers) != len(other.numbers):
            return False
        pairs = zip(self.numbers, other.numbers, strict=True)
        return all(a is b or written(a) == written(b) for a, b in pairs)


def traced(fn: Callable[..., Any], /, *args: object) -> Program:
    """The program of a function at these arguments; nothing is computed."""
    return opened(jax.make_jaxpr(fn)(*args))


def opened(program: object) -> Program:
    """One of JAX's own programs; from JAX 0.12 on that is one object, and was two before."""
    jaxpr: Any = getattr(program, "jaxpr", program)
    return Program(jaxpr, getattr(program, "consts", ()))


def programs(eqn: JaxprEqn) -> list[Program]:
    """The programs inside of an operation."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                found.append(opened(each))
    return found


def called(eqn: JaxprEqn) -> Program | None:
    """The one program that an operation calls as it stands, on its operands; None for others."""
    inner = programs(eqn)
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    (program,) = inner
    alike = len(program.jaxpr.invars) == len(eqn.invars)
    return program if alike and len(program.jaxpr.outvars) == len(eqn.outvars) else None


def scan(eqn: JaxprEqn) -> Scan | None:
    """An operation as a scan; None for others.

    A sequence is what has an axis more outside of the body than inside.
    """
    if eqn.primitive.name != "scan":
        return None
    (body,) = programs(eqn)
    num_carry = len(eqn.outvars) - _sequences(eqn.outvars, body.jaxpr.outvars)
    num_consts = len(eqn.invars) - num_carry - _sequences(eqn.invars, body.jaxpr.invars)
    return Scan(body, num_consts, num_carry, eqn.params["length"], eqn.params["reverse"])


def _sequences(outside: Sequence[Atom], inside: Sequence[Atom]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(type_of(a).ndim > type_of(b).ndim for a, b in pairs)


def type_of(variable: Atom) -> Any:
    """The shape and dtype of a variable, as JAX has them."""
    return variable.aval


def branches(eqn: JaxprEqn) -> list[Program] | None:
    """The branches of an operation that chooses one by its first operand; None for others."""
    return programs(eqn) if eqn.primitive.name == "cond" else None


def constants(program: Program) -> Iterator[ArrayLike]:
    """All numbers and arrays that a program reads, those of programs within it included."""
    yield from _read(program.jaxpr, program.consts).values()
    for eqn in program.jaxpr.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for inner in programs(eqn):
            yield from constants(inner)


def needed(program: Program) -> Program:
    """A program without what its outputs do not need, constants included."""
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    kept = _read(jaxpr, program.consts)
    places, values = list(kept), list(kept.values())
    if hasattr(jaxpr, "consts"):
        return opened(jaxpr.replace(constvars=places, consts=values))
    return Program(jaxpr.replace(constvars=places), values)


def _read(jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> dict[Var, ArrayLike]:
    """The constants that a program reads, by their variables."""
    read = {id(v) for vs in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in vs}
    return {v: c for v, c in zip(jaxpr.constvars, consts, strict=True) if id(v) in read}


def provenance(fn: Callable[..., Any], /, **inputs: object) -> Any:
    """The names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    As ``numpyro.ops.provenance``, except that the outputs of a scan are told apart. Nothing is
    computed.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    labels = follow(opened(program).jaxpr, labels_by_name(inputs))
    return jax.tree.unflatten(jax.tree.structure(out), labels)


def labels_by_name(inputs: Mapping[str, object]) -> list[Labels]:
    """The label of each leaf of a dict: the key under which it stands."""
    return [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]


def follow(
    jaxpr: Jaxpr,
    labels: Sequence[Labels],
    see: See | None = None,
) -> list[Labels]:
    """Follow labels through a program, from its inputs to its outputs.

    ``see`` is shown each operation, and the labels of what goes into it; those of the programs
    inside of others, too.
    """
    known = dict(zip(jaxpr.invars, labels, strict=True))
    for eqn in jaxpr.eqns:
        into = [labels_of(known, v) for v in eqn.invars]
        if see is not None:
            see(eqn, into)
        known |= zip(eqn.outvars, through(eqn, into, see), strict=True)
    return [labels_of(known, v) for v in jaxpr.outvars]


def labels_of(known: Mapping[Var, Labels], variable: Atom) -> Labels:
    """The labels of a variable: none for what is a number, or a constant of the program."""
    return NONE if isinstance(variable, Literal) else known.get(variable, NONE)


def through(
    eqn: JaxprEqn,
    into: Sequence[Labels],
    see: See | None = None,
) -> list[Labels]:
    """The labels of one operation's outputs."""
    if (loop := scan(eqn)) is not None:
        labels = entering_scan(loop, into)
        out = follow(loop.body.jaxpr, labels, see)
        return [*labels[loop.carry], *out[loop.num_carry :]]
    if (program := called(eqn)) is not None:
        return follow(program.jaxpr, into, see)
    if (choices := branches(eqn)) is not None:
        which, *operands = into
        outs = [follow(program.jaxpr, operands, see) for program in choices]
        return [which.union(*labels) for labels in zip(*outs, strict=True)]
    return [NONE.union(*into)] * len(eqn.outvars)


def entering_scan(loop: Scan, into: Sequence[Labels]) -> list[Labels]:
    """The labels of a scan's body's inputs: what a step carries on reaches all steps after it."""
    labels = list(into)
    while True:
        out = follow(loop.body.jaxpr, labels)[: loop.num_carry]
        carry = [a | b for a, b in zip(labels[loop.carry], out, strict=True)]
        if carry == labels[loop.carry]:
            return labels
        labels[loop.carry] = carry
