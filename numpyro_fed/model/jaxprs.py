"""Programs as JAX has traced them, read in one way whatever the version of JAX.

JAX promises little about the inside of a program, and changes it from version to version. This
module alone knows it, by the attributes of JAX's objects rather than their classes, and by what an
operation means rather than its parameters where that is enough. ``tests/test_jaxprs.py`` shows what
it expects of the JAX that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr


class Program(NamedTuple):
    """A traced program: its operations, and the values of its constants."""

    jaxpr: Any
    consts: Sequence[Any]


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


def traced(fn: Callable, /, *args: Any) -> Program:
    """The program of a function at these arguments; nothing is computed."""
    return opened(jax.make_jaxpr(fn)(*args))


def opened(program: Any) -> Program:
    """One of JAX's own programs; from JAX 0.12 on that is one object, and was two before."""
    return Program(getattr(program, "jaxpr", program), getattr(program, "consts", ()))


def programs(eqn: Any) -> list[Program]:
    """The programs inside of an operation."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                found.append(opened(each))
    return found


def called(eqn: Any) -> Program | None:
    """The one program that an operation calls as it stands, on its operands; None for others."""
    inner = programs(eqn)
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    (program,) = inner
    alike = len(program.jaxpr.invars) == len(eqn.invars)
    return program if alike and len(program.jaxpr.outvars) == len(eqn.outvars) else None


def scan(eqn: Any) -> Scan | None:
    """An operation as a scan; None for others.

    A sequence is what has an axis more outside of the body than inside.
    """
    if eqn.primitive.name != "scan":
        return None
    (body,) = programs(eqn)
    num_carry = len(eqn.outvars) - _sequences(eqn.outvars, body.jaxpr.outvars)
    num_consts = len(eqn.invars) - num_carry - _sequences(eqn.invars, body.jaxpr.invars)
    return Scan(body, num_consts, num_carry, eqn.params["length"], eqn.params["reverse"])


def _sequences(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True))


def branches(eqn: Any) -> list[Program] | None:
    """The branches of an operation that chooses one by its first operand; None for others."""
    return programs(eqn) if eqn.primitive.name == "cond" else None


def constants(program: Program) -> Iterator[Any]:
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


def _read(jaxpr: Any, consts: Sequence[Any]) -> dict[Any, Any]:
    """The constants that a program reads, by their variables."""
    read = {id(v) for vs in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in vs}
    return {v: c for v, c in zip(jaxpr.constvars, consts, strict=True) if id(v) in read}
