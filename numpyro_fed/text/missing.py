"""Missing values (NaN) in the arguments of a text: whether they can reach a density or a value.

An outcome may be missing, and whatever the text itself asks about by ``jnp.isnan``. So NaN must not
reach a density or a value: wherever it could, a ``where`` must stand before that takes another
value where ``isnan`` holds, as ``jnp.nan_to_num`` does. This is found by following the arguments
through the program. A comparison, say ``x > 3``, is no such question: it reads NaN as a no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import Literal

from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.jaxprs import CALLS, ELEMENTWISE, as_program, called_program, type_of
from numpyro_fed.text.trace import ARRAY, DENSITY, OBSERVED, VALUE, Trace

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn


class Place(NamedTuple):
    """An argument, and the axis of it that each axis of a value follows.

    An axis of one entry follows none. ``axes`` is None where elements have been mixed or moved.
    """

    name: str
    axes: tuple[int | None, ...] | None

    def along(self, axes: Sequence[int | None]) -> Place:
        """Return the place of a value whose axes are these axes of the one that is here."""
        if self.axes is None:
            return self
        return Place(self.name, tuple(None if i is None else self.axes[i] for i in axes))


# Operations whose result has the elements of the operand, in some shape.
SAME_ELEMENTS = frozenset(
    {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "stop_gradient", "transpose"}
)
Places = frozenset[Place]
NOWHERE: Places = frozenset()


class Holds(NamedTuple):
    """The arguments whose NaN may be in an array of the program, and what the array says of it.

    ``nan``: Arguments whose NaN may be in it.
    ``itself``: The argument that it is, element by element, in some shape.
    ``yes_seen, no_seen``: Of booleans, arguments that are no NaN where it is True, or False.
    """

    nan: Places = NOWHERE
    itself: Places = NOWHERE
    yes_seen: Places = NOWHERE
    no_seen: Places = NOWHERE

    def shaped(self, axes: Sequence[int | None] | None) -> Holds:
        """Return the same in another shape, whose axes are these axes of it; None if unknown."""
        if axes is None:  # two arrays of unknown order need not have the same one
            return Holds(frozenset(Place(place.name, None) for place in self.nan))
        return Holds(*(frozenset(place.along(axes) for place in places) for places in self))


def nan_reaches(jaxpr: Jaxpr, inputs: Sequence[Holds]) -> list[Holds]:
    """Return what the outputs of a program hold, given what its inputs do."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        given = [Holds() if isinstance(v, Literal) else known.get(v, Holds()) for v in eqn.invars]
        known |= zip(eqn.outvars, _of_operation(eqn, given), strict=True)
    return [Holds() if isinstance(v, Literal) else known.get(v, Holds()) for v in jaxpr.outvars]


def _of_operation(eqn: JaxprEqn, given: Sequence[Holds]) -> list[Holds]:
    name = eqn.primitive.name
    if name in CALLS and (program := called_program(eqn)) is not None:
        return nan_reaches(program.jaxpr, given)
    shapes = [type_of(v).shape for v in eqn.invars]
    if name in SAME_ELEMENTS:
        return [given[0].shaped(_axes(eqn, shapes[0]))]
    if name == "convert_element_type":
        # NaN as a whole number is some number, of which nobody can ask any more.
        stays = np.issubdtype(eqn.params["new_dtype"], np.floating)
        return [given[0] if stays else given[0]._replace(itself=NOWHERE)]
    rank = len(type_of(eqn.outvars[0]).shape)
    if name not in ELEMENTWISE or any(s and len(s) != rank for s in shapes):
        # Whatever else it computes, elements of several places may be in it.
        return [Holds(_all_nan(given)).shaped(None)] * len(eqn.outvars)
    # Numbers among the operands are read at each element.
    given = [g.shaped([None] * rank) if not s else g for g, s in zip(given, shapes, strict=True)]
    if name == "is_finite":
        return [Holds(given[0].nan - given[0].itself, yes_seen=given[0].itself)]
    if name in ("ne", "eq") and len({id(v) for v in eqn.invars}) == 1:
        seen, rest = given[0].itself, given[0].nan - given[0].itself
        return [Holds(rest, no_seen=seen) if name == "ne" else Holds(rest, yes_seen=seen)]
    nan, (first, *others) = _all_nan(given), given
    if name == "not":
        return [Holds(nan, yes_seen=first.no_seen, no_seen=first.yes_seen)]
    if name == "xor" and isinstance(eqn.invars[1], Literal) and np.all(eqn.invars[1].val):
        return [Holds(nan, yes_seen=first.no_seen, no_seen=first.yes_seen)]
    if name == "and" and others:
        return [Holds(nan, yes_seen=first.yes_seen | others[0].yes_seen)]
    if name == "or" and others:
        return [Holds(nan, no_seen=first.no_seen | others[0].no_seen)]
    if name == "select_n" and len(others) == 2:
        no, yes = others[0].nan - first.no_seen, others[1].nan - first.yes_seen
        return [Holds(first.nan | no | yes)]
    return [Holds(nan)]


def _all_nan(given: Iterable[Holds]) -> Places:
    return NOWHERE.union(*(g.nan for g in given))


def _axes(eqn: JaxprEqn, shape: Sequence[int]) -> list[int | None] | None:
    """Return the axis of the operand that each axis of the result follows; None if unknown."""
    name, result = eqn.primitive.name, type_of(eqn.outvars[0]).shape
    if name == "transpose":
        return list(eqn.params["permutation"])
    if name == "broadcast_in_dim":
        to = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
        return [
            i if (i := to.get(j)) is not None and shape[i] > 1 else None for j in range(len(result))
        ]
    # Axes of one entry come and go; the others stay in their order, or are mixed.
    wide = [i for i, size in enumerate(shape) if size > 1]
    if [shape[i] for i in wide] != [size for size in result if size > 1]:
        return None
    along = iter(wide)
    return [next(along) if size > 1 else None for size in result]


def check_missing(
    missing: Sequence[str], silos: Sequence[SiloData], traces_of_silos: Sequence[Trace]
) -> None:
    """Refuse NaN in arguments that the text reads without asking where they are missing."""
    for name in missing:
        having = [(j, s.arrays[name]) for j, s in enumerate(silos) if name in s.arrays]
        first, _ = having[0]
        trace = traces_of_silos[first]
        if sites := sorted(_readers(trace, name)):
            j, array = next((p for p in having if np.isnan(p[1]).any()), having[0])
            raise DataError(
                f"silo {j}, '{name}': {int(np.isnan(array).sum())} of {array.size} values are "
                f"missing (NaN), and the site '{sites[0]}' reads '{name}'. Only outcomes may be "
                "missing: arguments that the text passes to obs= as they are, and reads nowhere "
                f"else. Of a covariate give it a distribution, numpyro.sample('{name}', ..., "
                f"obs={name}, obs_mask=~jnp.isnan({name})), and read the value that this returns; "
                "or leave out the rows, or fill in a number that you can defend. Of an outcome "
                "that the text computes (obs=jnp.log(y)) compute it before the run, or put any "
                "finite number in the place of NaN and `with numpyro.handlers.mask(mask=seen):` "
                "around the site, with a boolean array seen in the data."
            )
        whole = [site for site, one in trace.supports.items() if one.whole]
        if not any(name in trace.reads((OBSERVED, site), ARRAY) for site in whole):
            continue
        for j, array in having:
            if (odd := array[~np.isnan(array) & (array % 1 != 0)]).size:
                raise DataError(
                    f"silo {j}, '{name}': the outcome takes whole numbers, got {odd[0]:g}. Mend "
                    "it, or pass NaN where it is missing."
                )


def nan_in(fn: Callable[[Array], Any], array: Array | np.ndarray) -> Any:
    """Return whether NaN of an array may reach each output of ``fn``: a pytree like its outputs."""
    closed, out = jax.make_jaxpr(fn, return_shape=True)(array)
    found = nan_reaches(as_program(closed).jaxpr, [_whole("", np.shape(array))])
    return jax.tree.unflatten(jax.tree.structure(out), [bool(holds.nan) for holds in found])


def _whole(name: str, shape: Sequence[int]) -> Holds:
    """Return what an argument holds: itself."""
    place = Place(name, tuple(i if size > 1 else None for i, size in enumerate(shape)))
    return Holds(frozenset({place}), frozenset({place}))


def _readers(trace: Trace, name: str) -> set[str]:
    """Return the sites whose densities or values NaN of an argument may reach."""
    wanted = [output for output in trace.trees if output[0] in (DENSITY, VALUE)]
    program, inputs = trace.part(wanted)
    held = [
        _whole(name, one.shape.shape) if (one.kind, one.name) == (ARRAY, name) else Holds()
        for one in inputs
    ]
    kept = [output for output in trace.outputs if output in set(wanted)]
    found = nan_reaches(program.jaxpr, held)
    return {
        trace.owners.get(site, site)
        for (_, site), holds in zip(kept, found, strict=True)
        if holds.nan
    }
