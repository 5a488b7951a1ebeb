"""The check that indices among a silo's data are in range.

Of an index that is out of range JAX neither raises nor warns: it reads or writes another entry, or
none. The check interprets the traced text (its jaxpr) operation by operation, and adds a
``checkify.check`` before each gather, scatter or slice whose index depends on data. Labels tell
which do (:mod:`numpyro_fed.text.jaxprs`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify
from jax.extend.core import Literal
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_fed.basics.errors import DataError
from numpyro_fed.basics.programs import TRACING, compiled_method, jit_once
from numpyro_fed.data.silo_data import SiloData, read_one
from numpyro_fed.text.jaxprs import (
    Labels,
    Program,
    branches,
    called_program,
    labels_of,
    output_labels,
    run_operation,
    scan,
    scan_body_labels,
    trace_program,
    type_of,
)
from numpyro_fed.text.silo_plate import feasible

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var


@dataclass(frozen=True, eq=False)
class IndexCheck:
    """The index check ``(j, data) -> None`` of a text, for unpadded data of silo ``j``.

    It is compiled once for each shape of silos, and not at all if the text indexes nothing by data.
    """

    rows: Callable[[SiloData], Any]  # what the text computes of data
    owner: str = "silo {}"
    _indexes: dict[tuple[Hashable, ...], bool] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, j: int, data: SiloData) -> None:
        """Raise the error of an index that is out of range."""
        # Data of one kind are read by a text in the same way, whatever their sizes.
        like = data.static, tuple((k, a.dtype, np.ndim(a)) for k, a in data.arrays.items())
        if like not in self._indexes:
            try:
                shapes = jax.tree.leaves(jax.eval_shape(self.errors, data))
            except Exception:
                # checkify refuses some primitives. A model must not fail for a check of its data.
                shapes = []
            self._indexes[like] = bool(shapes)
        if not self._indexes[like] or not (error := self.errors(data).get()):
            return
        # An array is to blame if the check passes once it is zero.
        blamed = ""
        for name, a in data.arrays.items():
            if a.dtype.kind in "iu":
                without = replace(data, arrays={**data.arrays, name: np.zeros_like(a)})
                if not self.errors(without).get():
                    blamed += f" The array '{name}' holds {a.min()} to {a.max()} there."
        where = error.splitlines()[0].removesuffix(" (`check` failed)")
        raise DataError(
            f"{self.owner.format(j)}: {where}{blamed} Indices must count from 0 within each silo, "
            "up to one less than the length of what they index: renumber them, for example by "
            "np.unique(ids, return_inverse=True)[1]. Where one out of range is meant, say what it "
            "reads: table.at[h].get(mode='fill', fill_value=0.0, wrap_negative_indices=False)."
        )

    @compiled_method(jit_once)
    def errors(self, data: SiloData) -> Any:
        """Run the text with a check before each operation whose index depends on data."""

        # Other indices are not checked: libraries use harmless ones that are out of range.
        def watched(data: SiloData) -> None:
            arrays = jax.tree.leaves(data)
            _run(trace_program(self.rows, data), arrays, [frozenset({"data"})] * len(arrays))

        return checkify.checkify(watched, errors=checkify.user_checks)(data)[0]


def new_data_check(model: Callable[..., Any], silo: int | None) -> Callable[..., None]:
    """Return the index check of new data, outcomes of which may be missing, for ``model(...)``."""

    def values(data: SiloData) -> dict[str, Any]:
        with TRACING, handlers.block(), feasible():
            trace = handlers.trace(handlers.seed(model, 0)).get_trace(**data.kwargs)
        return {n: s["value"] for n, s in trace.items() if s["type"] == "sample"}

    check = IndexCheck(values, "new data" if silo is None else "new data of silo {}")

    def check_arguments(*args: object, **kwargs: object) -> None:
        try:
            arguments = inspect.signature(model).bind(*args, **kwargs).arguments
            leaves = jax.tree.leaves(arguments)
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
            data = None if traced else read_one("new data", arguments, may_miss=True)
        except (TypeError, DataError):
            return
        if data is not None:
            # Predictive calls the text inside of a trace; the check must run at once all the same.
            with jax.ensure_compile_time_eval():
                check(silo or 0, data)

    return check_arguments


def _run(program: Program, values: Sequence[ArrayLike], labels: Sequence[Labels]) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *values), strict=True))
    by_variable = dict(zip(jaxpr.invars, labels, strict=True))

    def read(variable: Var | Literal) -> Any:
        return variable.val if isinstance(variable, Literal) else env[variable]

    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        operands = [labels_of(by_variable, v) for v in eqn.invars]
        index = _wrapped_index(eqn, producer)
        if index is not None and labels_of(by_variable, index):
            lowest = jnp.min(read(index), initial=0)
            words = "index {i} counts from the end, as pandas writes -1 for what is missing."
            checkify.check(lowest >= 0, words, i=lowest)
        env |= zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], operands), strict=True)
        by_variable |= zip(eqn.outvars, output_labels(eqn, operands), strict=True)
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: JaxprEqn, values: list[Any], labels: Sequence[Labels]) -> Sequence[Any]:
    """Return the outputs of one operation; calls, scans and branches are interpreted as well."""
    if (program := called_program(eqn)) is not None:
        return _run(program, values, labels)
    if (loop := scan(eqn)) is not None:
        inside = scan_body_labels(loop, labels)

        def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            out = _run(loop.body, [*values[: loop.num_consts], *carry, *x], inside)
            return out[: loop.num_carry], out[loop.num_carry :]

        xs = values[loop.carry.stop :]
        carry, ys = jax.lax.scan(step, values[loop.carry], xs, loop.length, loop.reverse)
        return [*carry, *ys]
    if (choices := branches(eqn)) is not None:
        runs = [
            lambda *operands, chosen=choice: _run(chosen, operands, labels[1:])
            for choice in choices
        ]
        return jax.lax.switch(values[0], runs, *values[1:])

    _check_indices(eqn, values, labels)
    return run_operation(eqn, values)


def _wrapped_index(eqn: JaxprEqn, producer: Mapping[Var, JaxprEqn]) -> Var | None:
    """Return the index that an operation wraps if it is negative; None for other operations."""
    # JAX writes ``x[i]`` as ``select_n(i < 0, i, i + n)`` before the gather, after which -1 is an
    # index like any other. The pattern is recognised here, while ``i`` is still at hand.
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    condition, index, other = eqn.invars
    if isinstance(condition, Literal) or isinstance(index, Literal) or isinstance(other, Literal):
        return None
    if condition not in producer or other not in producer:
        return None
    below, wrapped = producer[condition], producer[other]
    if (below.primitive.name, wrapped.primitive.name) != ("lt", "add"):
        return None
    compared, zero = below.invars
    counts = compared is index is wrapped.invars[0] and type_of(index).dtype.kind in "iu"
    return index if counts and isinstance(zero, Literal) and np.all(zero.val == 0) else None


def _check_indices(eqn: JaxprEqn, values: Sequence[Any], labels: Sequence[Labels]) -> None:
    """Check indices that depend on data, unless the text says what one out of range reads."""
    name, params = eqn.primitive.name, eqn.params
    if not name.startswith(("dynamic_slice", "dynamic_update_slice", "gather", "scatter")):
        return
    lengths = np.array(jnp.shape(values[0]))
    if name == "dynamic_slice" and any(labels[1:]):
        index, largest = jnp.stack(values[1:]), lengths - np.array(params["slice_sizes"])
    elif name == "dynamic_update_slice" and any(labels[2:]):
        index, largest = jnp.stack(values[2:]), lengths - np.array(jnp.shape(values[1]))
    elif name.startswith(("gather", "scatter")) and labels[1]:
        if params.get("mode") == GatherScatterMode.CLIP:
            return
        fill, dtype = params.get("fill_value"), type_of(eqn.outvars[0]).dtype
        if fill is not None and dtype.kind != "b":
            # JAX's own fill values are NaN and the least integer (the greatest if unsigned). Any
            # other value was chosen by the author of the text.
            bounds = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else None
            if fill not in bounds if bounds else not np.isnan(fill):
                return
        numbers = params["dimension_numbers"]
        # A window of some size starts at each index, and must end within the axis as well.
        if name == "gather":
            sizes, axes = np.array(params["slice_sizes"]), np.array(numbers.start_index_map)
        else:
            sizes, axes = np.ones_like(lengths), np.array(numbers.scatter_dims_to_operand_dims)
            single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
            window = [i for i in range(len(lengths)) if i not in single]
            sizes[window] = np.array(jnp.shape(values[2]))[list(numbers.update_window_dims)]
        index, largest, lengths = values[1], (lengths - sizes)[axes], lengths[axes]
    else:
        return
    bad = ((index < 0) | (index > largest)).ravel()
    # A message of checkify holds scalars only: the first bad index stands for all.
    first = bad.argmax()
    checkify.check(
        ~bad.any(),
        "index {i} is out of range for an axis of length {n}.",
        i=index.ravel()[first],
        n=jnp.broadcast_to(lengths, index.shape).ravel()[first],
    )
