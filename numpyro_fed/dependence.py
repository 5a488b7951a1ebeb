"""What the outputs of a function depend on, followed through its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

Labels = frozenset[str]
Visit = Callable[[Any, Sequence[Labels]], None]


def provenance(fn: Callable, **inputs: Any) -> Any:
    """The names of the inputs that reach each output of ``fn``: a pytree like its outputs.

    As ``numpyro.ops.provenance``, except that the outputs of a scan are told apart. Nothing is
    computed.
    """
    program, out = jax.make_jaxpr(lambda inputs: fn(**inputs), return_shape=True)(inputs)
    labels = [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(inputs)]
    return jax.tree.unflatten(jax.tree.structure(out), follow(program.jaxpr, labels))


def follow(jaxpr: Any, labels: Sequence[Labels], visit: Visit | None = None) -> list[Labels]:
    """The labels of a program's outputs from those of its inputs.

    ``visit`` is called for each operation, inner programs' included, with the labels of its
    operands.
    """
    known = dict(zip(jaxpr.invars, labels, strict=True))

    def read(variable: Any) -> Labels:
        return frozenset() if isinstance(variable, Literal) else known.get(variable, frozenset())

    for eqn in jaxpr.eqns:
        into = [read(v) for v in eqn.invars]
        if visit is not None:
            visit(eqn, into)
        known |= zip(eqn.outvars, _through(eqn, into, visit), strict=True)
    return [read(v) for v in jaxpr.outvars]


def _through(eqn: Any, into: Sequence[Labels], visit: Visit | None) -> list[Labels]:
    """The labels of one operation's outputs."""
    inner = list(_programs(eqn.params))
    if eqn.primitive.name == "scan":
        return _through_scan(eqn.params, into, visit)
    if len(inner) == 1 and eqn.primitive.name != "while":
        (program,) = inner
        if len(program.invars) == len(into) and len(program.outvars) == len(eqn.outvars):
            return follow(program, into, visit)
    if eqn.primitive.name == "cond":
        which, *operands = into
        branches = [follow(program, operands, visit) for program in inner]
        return [which.union(*labels) for labels in zip(*branches, strict=True)]
    together = frozenset[str]().union(*into)
    for program in inner:
        follow(program, [together] * len(program.invars), visit)
    return [together] * len(eqn.outvars)


def _through_scan(params: Any, into: Sequence[Labels], visit: Visit | None) -> list[Labels]:
    """What a step carries on reaches the steps after it."""
    body, consts, carried = params["jaxpr"].jaxpr, params["num_consts"], params["num_carry"]
    labels, place = list(into), slice(consts, consts + carried)
    while True:
        out = follow(body, labels, visit)
        carry = [a | b for a, b in zip(labels[place], out[:carried], strict=True)]
        if carry == labels[place]:
            return [*carry, *out[carried:]]
        labels[place] = carry


def _programs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield program
