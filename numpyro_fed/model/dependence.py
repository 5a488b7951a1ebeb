"""What the outputs of a function depend on, followed through its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

Labels = frozenset[str]


def provenance(fn: Callable, /, **inputs: Any) -> Any:
    """The names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    As ``numpyro.ops.provenance``, except that the outputs of a scan are told apart. Nothing is
    computed.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    labels = [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]
    return jax.tree.unflatten(jax.tree.structure(out), follow(program.jaxpr, labels))


def follow(jaxpr: Any, labels: Sequence[Labels]) -> list[Labels]:
    """The labels of a program's outputs from those of its inputs."""
    known = dict(zip(jaxpr.invars, labels, strict=True))
    for eqn in jaxpr.eqns:
        into = [labels_of(known, v) for v in eqn.invars]
        known |= zip(eqn.outvars, through(eqn, into), strict=True)
    return [labels_of(known, v) for v in jaxpr.outvars]


def labels_of(known: dict[Any, Labels], variable: Any) -> Labels:
    """None for what is a number, or a constant of the program."""
    return frozenset() if isinstance(variable, Literal) else known.get(variable, frozenset())


def through(eqn: Any, into: Sequence[Labels]) -> list[Labels]:
    """The labels of one operation's outputs."""
    inner = programs(eqn)
    if eqn.primitive.name == "scan":
        labels = entering_scan(eqn, into)
        out = follow(inner[0].jaxpr, labels)
        first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        return [*labels[first : first + carried], *out[carried:]]
    if (program := called(eqn)) is not None:
        return follow(program.jaxpr, into)
    if eqn.primitive.name == "cond":
        which, *operands = into
        branches = [follow(program.jaxpr, operands) for program in inner]
        return [which.union(*labels) for labels in zip(*branches, strict=True)]
    return [frozenset[str]().union(*into)] * len(eqn.outvars)


def entering_scan(eqn: Any, into: Sequence[Labels]) -> list[Labels]:
    """Of the inputs of a scan's body: what one step carries on reaches all steps after it."""
    (body,), labels = programs(eqn), list(into)
    first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    place = slice(first, first + carried)
    while True:
        out = follow(body.jaxpr, labels)[:carried]
        carry = [a | b for a, b in zip(labels[place], out, strict=True)]
        if carry == labels[place]:
            return labels
        labels[place] = carry


class Program(NamedTuple):
    """A program inside of an operation."""

    jaxpr: Any
    consts: Sequence[Any]


def programs(eqn: Any) -> list[Program]:
    """The programs inside of an operation."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                found.append(Program(jaxpr, getattr(each, "consts", ())))
    return found


def called(eqn: Any) -> Program | None:
    """The one program that an operation calls as it stands, on its operands; None for others."""
    inner = programs(eqn)
    if len(inner) != 1 or eqn.primitive.name in ("scan", "while", "cond"):
        return None
    (program,) = inner
    alike = len(program.jaxpr.invars) == len(eqn.invars)
    return program if alike and len(program.jaxpr.outvars) == len(eqn.outvars) else None
