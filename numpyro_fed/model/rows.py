"""Which arrays are rows of a silo plate for certain, and whether rows stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.dependence import Labels, entering_scan, labels_of, through
from numpyro_fed.model.jaxprs import branches, called, scan, traced
from numpyro_fed.model.split import FederatedModel, Rows


def separable(
    fm: FederatedModel,
    silos: Sequence[SiloData],
    sizes: Sequence[Sizes],
    rows: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """The arrays of each silo plate whose rows can be told apart: ``{plate: names}``.

    A plate is left out where nobody can say what its rows would be on their own: where a site
    stands in two silo plates at once, where the text does not run with a row less (an adjacency
    matrix), or where it joins rows by an index among the data (the sum over the members of a
    group).

    Parameters
    ----------
    fm : FederatedModel
    silos, sizes : sequence
        What silos hold, and the size of each silo plate there.
    rows : dict
        Which arrays are as long as which silo plate, at every silo.
    """
    found: dict[str, tuple[str, ...]] = {}
    for plate in sizes[0] if not fm.nested else ():
        j = max(range(len(silos)), key=lambda j: sizes[j][plate])
        keys = [key for key, p in rows.items() if p == plate]
        alike = len({size[plate] for size in sizes}) == 1
        if sizes[j][plate] < 2 or not follows(fm, silos[j], keys, plate):
            continue
        if alike:  # others may be as long as the rows by chance
            keys = [
                k for k in keys if not follows(fm, silos[j], [x for x in keys if x != k], plate)
            ]
        if keys and not _joined_by_index(fm, silos[j], keys):
            found[plate] = tuple(keys)
    return found


def follows(fm: FederatedModel, silo: SiloData, keys: Sequence[str], plate: str) -> bool:
    """Whether the text runs when these arrays are a row shorter, and the plate is so, too.

    Where the plate's size is a number among the arguments, with that number one less.
    """
    size = fm.sizes(silo)[plate]
    cut = replace(silo, arrays={k: a[:-1] if k in keys else a for k, a in silo.arrays.items()})
    less = tuple((k, v - 1 if type(v) is int and v == size else v) for k, v in silo.static)
    for shorter in (cut, replace(cut, static=less)) if keys else ():
        try:
            sizes = fm.sizes(shorter)
            jax.eval_shape(partial(_terms, fm), shorter)
        except (TypeError, ValueError, IndexError):
            continue
        if sizes[plate] == size - 1:
            return True
    return False


def _terms(fm: FederatedModel, data: SiloData) -> Rows:
    """The terms of all rows of a silo, all latents at zero."""
    key, sizes = jax.random.key(0), fm.sizes(data)
    theta = {**fm.init_theta(key), **fm.init_private(key, data)}
    z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    return fm.log_silo(theta, jnp.zeros(fm.dim), z_L, data)


def _joined_by_index(fm: FederatedModel, silo: SiloData, keys: Sequence[str]) -> bool:
    """Whether rows' own numbers are looked up, or added up, by whole numbers among the data."""
    whole = frozenset(k for k, a in silo.arrays.items() if a.dtype.kind in "iu")
    if not whole:
        return False

    def run(arrays: dict[str, Any]) -> Rows:
        return _terms(fm, replace(silo, arrays=arrays))

    program = traced(run, silo.arrays)
    names = [frozenset({path[0].key}) for path, _ in jax.tree.leaves_with_path(silo.arrays)]
    return _looks_up(program.jaxpr, names, frozenset(keys), whole)


def _looks_up(jaxpr: Any, labels: Sequence[Labels], rows: Labels, whole: Labels) -> bool:
    known = dict(zip(jaxpr.invars, labels, strict=True))
    for eqn in jaxpr.eqns:
        into, name = [labels_of(known, v) for v in eqn.invars], eqn.primitive.name
        if name == "gather" or name.startswith("scatter") or name == "dynamic_slice":
            index = into[1] if name != "dynamic_slice" else frozenset[str]().union(*into[1:])
            read = into[0].union(*into[2:]) if name != "dynamic_slice" else into[0]
            if index and index <= whole and read & rows:
                return True
        inner, operands = [], into
        if (loop := scan(eqn)) is not None:
            inner, operands = [loop.body], entering_scan(loop, into)
        elif (choices := branches(eqn)) is not None:
            inner, operands = choices, into[1:]
        elif (program := called(eqn)) is not None:
            inner = [program]
        if any(_looks_up(each.jaxpr, operands, rows, whole) for each in inner):
            return True
        known |= zip(eqn.outvars, through(eqn, into), strict=True)
    return False
