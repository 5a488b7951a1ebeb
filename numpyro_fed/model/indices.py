"""The check that what a silo's data index exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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

from numpyro_fed.errors import DataError
from numpyro_fed.model.data import SiloData, kind, read_one
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.jaxprs import (
    Labels,
    Program,
    Scan,
    branches,
    called,
    entering_scan,
    labels_of,
    scan,
    through,
    traced,
    type_of,
)
from numpyro_fed.programs import jit_once
from numpyro_fed.tracing import TRACING

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var


def index_check(fm: FederatedModel) -> Callable[[int, SiloData], None]:
    """A check that what a silo's data index exists: ``(j, data) -> None``, for unpadded data.

    JAX itself is silent: an index out of range reads or writes another place, or none. The check
    raises a DataError with the number of the silo. It is compiled once for each shape of silos, and
    not at all where the text indexes nothing by data. Where the text says itself what becomes of an
    index out of range (``mode="clip"``, a ``fill_value``), that holds.
    """
    return _check(fm.terms_at_zero, "silo {}")


def new_data_check(model: Callable[..., Any], silo: int | None) -> Callable[..., None]:
    """A check of new data, for which a text predicts: it is called as the text is.

    Latents are drawn from their priors, so that outcomes that are to be predicted may be missing.
    Arguments that are no data of a silo are left alone.
    """

    def values(data: SiloData) -> dict[str, Any]:
        with TRACING, handlers.block(), feasible():
            trace = handlers.trace(handlers.seed(model, 0)).get_trace(**data.kwargs)
        return {n: s["value"] for n, s in trace.items() if s["type"] == "sample"}

    check = _check(values, "new data" if silo is None else "new data of silo {}")

    def check_arguments(*args: object, **kwargs: object) -> None:
        try:
            given = inspect.signature(model).bind(*args, **kwargs).arguments
            within = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
            data = None if within else read_one("new data", given)
        except (TypeError, DataError):
            return
        if data is not None:
            with jax.ensure_compile_time_eval():  # within a program of Predictive's
                check(silo or 0, data)

    return check_arguments


def _check(rows: Callable[[SiloData], Any], owner: str) -> Callable[[int, SiloData], None]:
    known: dict[tuple[Hashable, ...], bool] = {}

    @jit_once
    def errors(data: SiloData) -> Any:
        return checkify.checkify(partial(_watched, rows), errors=checkify.user_checks)(data)[0]

    def check(j: int, data: SiloData) -> None:
        of = kind(data)
        if of not in known:
            known[of] = _checkable(partial(_watched, rows), data)
        if known[of] and (found := errors(data).get()):
            raise DataError(_message(owner.format(j), data, found, errors))

    return check


def _checkable(watched: Callable[[SiloData], None], data: SiloData) -> bool:
    """Whether data index anything, by operations that checkify knows."""
    try:
        checked = checkify.checkify(watched, errors=checkify.user_checks)
        return bool(jax.tree.leaves(jax.eval_shape(checked, data)[0]))
    except Exception:
        return False


def _watched(rows: Callable[[SiloData], Any], data: SiloData) -> None:
    """Run the text, with a check wherever data reach an index.

    Indices that do not depend on data are left alone: libraries use harmless ones out of range.
    """
    arrays = jax.tree.leaves(data)
    _run(traced(rows, data), arrays, [frozenset({"data"})] * len(arrays))


def _run(program: Program, values: Sequence[ArrayLike], labels: Sequence[Labels]) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *values), strict=True))
    known = dict(zip(jaxpr.invars, labels, strict=True))

    def read(variable: Var | Literal) -> Any:
        return variable.val if isinstance(variable, Literal) else env[variable]

    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        into = [labels_of(known, v) for v in eqn.invars]
        if (index := _counted_from_the_end(eqn, made)) is not None and labels_of(known, index):
            lowest = jnp.min(read(index), initial=0)
            words = "index {i} counts from the end, as pandas writes -1 for what is missing."
            checkify.check(lowest >= 0, words, i=lowest)
        env |= zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], into), strict=True)
        known |= zip(eqn.outvars, through(eqn, into), strict=True)
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: JaxprEqn, values: list[Any], labels: Sequence[Labels]) -> Sequence[Any]:
    """One operation, looked into where it is a call or a scan."""
    if (program := called(eqn)) is not None:
        return _run(program, values, labels)
    if (loop := scan(eqn)) is not None:
        return _scan(loop, values, entering_scan(loop, labels))
    if (choices := branches(eqn)) is not None:
        return _cond(choices, values, labels)

    if _indexed_by_data(eqn, labels):
        index, largest, lengths = _ranges(eqn, values)
        bad = ((index < 0) | (index > largest)).ravel()
        first = bad.argmax()
        checkify.check(
            ~bad.any(),
            "index {i} is out of range for an axis of length {n}.",
            i=index.ravel()[first],
            n=jnp.broadcast_to(lengths, index.shape).ravel()[first],
        )
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def _scan(loop: Scan, values: list[Any], labels: Sequence[Labels]) -> list[Any]:
    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        out = _run(loop.body, [*values[: loop.num_consts], *carry, *x], labels)
        return out[: loop.num_carry], out[loop.num_carry :]

    xs = values[loop.carry.stop :]
    carry, ys = jax.lax.scan(step, values[loop.carry], xs, loop.length, loop.reverse)
    return [*carry, *ys]


def _cond(choices: list[Program], values: list[Any], labels: Sequence[Labels]) -> list[Any]:
    def branch(program: Program) -> Callable[..., list[Any]]:
        return lambda *operands: _run(program, operands, labels[1:])

    return jax.lax.switch(values[0], [branch(program) for program in choices], *values[1:])


def _counted_from_the_end(eqn: JaxprEqn, made: Mapping[Var, JaxprEqn]) -> Var | None:
    """The index that JAX adds an axis's length to where it is negative; None in other places."""
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    condition, index, other = eqn.invars
    if isinstance(condition, Literal) or isinstance(index, Literal) or isinstance(other, Literal):
        return None
    if condition not in made or other not in made:
        return None
    below, wrapped = made[condition], made[other]
    if (below.primitive.name, wrapped.primitive.name) != ("lt", "add"):
        return None
    compared, zero = below.invars
    counts = compared is index is wrapped.invars[0] and type_of(index).dtype.kind in "iu"
    return index if counts and isinstance(zero, Literal) and np.all(zero.val == 0) else None


def _indexed_by_data(eqn: JaxprEqn, labels: Sequence[Labels]) -> bool:
    """Whether data reach an index, and the text leaves open what one out of range means."""
    name = eqn.primitive.name
    if name == "dynamic_slice":
        return any(labels[1:])
    if name == "dynamic_update_slice":
        return any(labels[2:])
    if name != "gather" and not name.startswith("scatter"):
        return False
    return bool(labels[1]) and not _deliberate(eqn)


def _ranges(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[Array, np.ndarray, np.ndarray]:
    """The places that an operation reads or writes, the last that it may, lengths of the axes."""
    name, params, lengths = eqn.primitive.name, eqn.params, np.array(jnp.shape(values[0]))
    if name == "dynamic_slice":
        return jnp.stack(values[1:]), lengths - np.array(params["slice_sizes"]), lengths
    if name == "dynamic_update_slice":
        return jnp.stack(values[2:]), lengths - np.array(jnp.shape(values[1])), lengths
    numbers = params["dimension_numbers"]
    if name == "gather":
        sizes, axes = np.array(params["slice_sizes"]), np.array(numbers.start_index_map)
    else:
        sizes, axes = np.ones_like(lengths), np.array(numbers.scatter_dims_to_operand_dims)
        single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [i for i in range(len(lengths)) if i not in single]
        sizes[window] = np.array(jnp.shape(values[2]))[list(numbers.update_window_dims)]
    return values[1], (lengths - sizes)[axes], lengths[axes]


def _deliberate(eqn: JaxprEqn) -> bool:
    """Whether the text says what is read out of range, other than what JAX itself fills in."""
    fill, dtype = eqn.params.get("fill_value"), type_of(eqn.outvars[0]).dtype
    if eqn.params.get("mode") == GatherScatterMode.CLIP:
        return True
    if fill is None or dtype.kind == "b":
        return False
    if dtype.kind in "iu":
        return fill not in (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return not np.isnan(fill)


def _message(owner: str, data: SiloData, found: str, errors: Callable[[SiloData], Any]) -> str:
    """Say what is out of range; the array to blame is one without which nothing is."""

    def without(name: str) -> SiloData:
        return replace(data, arrays={**data.arrays, name: np.zeros_like(data.arrays[name])})

    blamed = [
        f" The array '{name}' holds {a.min()} to {a.max()} there."
        for name, a in data.arrays.items()
        if a.dtype.kind in "iu" and not errors(without(name)).get()
    ]
    where = found.splitlines()[0].removesuffix(" (`check` failed)")
    return (
        f"{owner}: {where}{''.join(blamed)} Indices must count from 0 within each silo, up to one "
        "less than the length of what they index: renumber them, for example by "
        "np.unique(ids, return_inverse=True)[1]. Where one out of range is meant, say what it "
        "reads: table.at[h].get(mode='fill', fill_value=0.0, wrap_negative_indices=False)."
    )
