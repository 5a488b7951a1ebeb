"""What the outputs of a function depend on, followed through its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from numpyro_fed.model.jaxprs import Scan, branches, called, opened, scan

Labels = frozenset[str]


def provenance(fn: Callable, /, **inputs: Any) -> Any:
    """The names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    As ``numpyro.ops.provenance``, except that the outputs of a scan are told apart. Nothing is
    computed.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    labels = [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]
    return jax.tree.unflatten(jax.tree.structure(out), follow(opened(program).jaxpr, labels))


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
    if (loop := scan(eqn)) is not None:
        labels = entering_scan(loop, into)
        out = follow(loop.body.jaxpr, labels)
        return [*labels[loop.carry], *out[loop.num_carry :]]
    if (program := called(eqn)) is not None:
        return follow(program.jaxpr, into)
    if (choices := branches(eqn)) is not None:
        which, *operands = into
        outs = [follow(program.jaxpr, operands) for program in choices]
        return [which.union(*labels) for labels in zip(*outs, strict=True)]
    return [frozenset[str]().union(*into)] * len(eqn.outvars)


def entering_scan(loop: Scan, into: Sequence[Labels]) -> list[Labels]:
    """Of the inputs of a scan's body: what one step carries on reaches all steps after it."""
    labels = list(into)
    while True:
        out = follow(loop.body.jaxpr, labels)[: loop.num_carry]
        carry = [a | b for a, b in zip(labels[loop.carry], out, strict=True)]
        if carry == labels[loop.carry]:
            return labels
        labels[loop.carry] = carry
