"""What depends on the values of a silo's data and is looked at before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.lax import GatherScatterMode

from numpyro_fed.data import SiloData
from numpyro_fed.dependence import Labels, follow
from numpyro_fed.errors import DataError
from numpyro_fed.split import FederatedModel, Rows


def index_check(fm: FederatedModel) -> Callable[[int, SiloData], None]:
    """A check that what a silo's data index exists: ``(j, data) -> None``, for unpadded data.

    JAX itself is silent: an index out of range reads or writes another place, or none. The check
    is compiled once for each shape of silos; not at all where the text indexes nothing by data,
    or says itself what becomes of an index out of range (``mode="clip"``, a ``fill_value``).

    Parameters
    ----------
    fm : FederatedModel

    Returns
    -------
    callable
        It raises a DataError for an index out of range, with the number of the silo.
    """
    known: dict[tuple, bool] = {}
    rows = partial(_rows, fm)

    @jax.jit
    def errors(data: SiloData) -> Any:
        return checkify.checkify(rows, errors=checkify.index_checks)(data)[0]

    def check(j: int, data: SiloData) -> None:
        kind = (data.static, tuple((k, a.dtype, a.ndim) for k, a in data.arrays.items()))
        if kind not in known:
            known[kind] = _indexes_by_data(rows, data) and _checkable(errors, data)
        if known[kind] and (found := errors(data).get()):
            raise DataError(_message(j, data, found, errors))

    return check


def _checkable(errors: Callable[[SiloData], Any], data: SiloData) -> bool:
    """Whether checkify knows all operations of the text."""
    try:
        jax.eval_shape(errors, data)
    except Exception:
        return False
    return True


def _rows(fm: FederatedModel, data: SiloData) -> Rows:
    """The terms of all rows of a silo, at zeros."""
    key, sizes = jax.random.key(0), fm.sizes(data)
    theta = {**fm.init_theta(key), **fm.init_private(key, data)}
    z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    return fm.log_silo(theta, jnp.zeros(fm.dim), z_L, data)


def _indexes_by_data(rows: Callable[[SiloData], Rows], data: SiloData) -> bool:
    """Whether data reach an index, and the text leaves open what one out of range means."""
    program = jax.make_jaxpr(rows)(data).jaxpr
    found: list[bool] = []

    def visit(eqn: Any, labels: Sequence[Labels]) -> None:
        name = eqn.primitive.name
        first = 2 if name == "dynamic_update_slice" else 1
        last = 2 if name == "gather" or name.startswith("scatter") else None
        if name in _INDEXING and any(labels[first:last]):
            found.append(not _deliberate(eqn))

    follow(program, [frozenset({"data"})] * len(program.invars), visit)
    return bool(found) and all(found)


def _deliberate(eqn: Any) -> bool:
    """Whether the text says what is read out of range, other than what JAX itself fills in."""
    fill, dtype = eqn.params.get("fill_value"), eqn.outvars[0].aval.dtype
    if eqn.params.get("mode") == GatherScatterMode.CLIP:
        return True
    if fill is None or dtype.kind == "b":
        return False
    if dtype.kind in "iu":
        return fill not in (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return not np.isnan(fill)


_INDEXING = {
    *("gather", "dynamic_slice", "dynamic_update_slice"),
    *("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"),
    *("scatter-min", "scatter_min", "scatter-max", "scatter_max"),
}


def _message(j: int, data: SiloData, found: str, errors: Callable[[SiloData], Any]) -> str:
    """What is out of range; the array to blame is one without which nothing is."""

    def without(name: str) -> SiloData:
        return replace(data, arrays={**data.arrays, name: np.zeros_like(data.arrays[name])})

    blamed = [
        f" The array '{name}' holds {a.min()} to {a.max()} there."
        for name, a in data.arrays.items()
        if a.dtype.kind in "iu" and not errors(without(name)).get()
    ]
    return (
        f"silo {j}: {found.splitlines()[0].strip()}{''.join(blamed)} Indices must count from 0 "
        "within each silo, up to one less than the length of what they index: renumber them, for "
        "example by np.unique(ids, return_inverse=True)[1]."
    )
