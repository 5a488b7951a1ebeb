"""One trace of a text: its structure, and the program that answers questions about it.

The program (a jaxpr) holds all that a text computes at one signature of a silo's data, in one
precision. Its inputs are the silo's arrays, a key, parameters and latents, and its outputs are log
densities and values by site. Every question is a part of it: some outputs, without the operations
that these do not need, or the labels of what they depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.text.jaxprs import (
    NONE,
    Labels,
    Program,
    propagate_labels,
    pruned,
    run_program,
    type_of,
)
from numpyro_fed.text.row_axes import MIXED, row_axes
from numpyro_fed.text.site_table import Rows, Site, Structure, Theta, sum_rows, unpack
from numpyro_fed.text.supports import SiteSupport

# What a program says of a site, and what it is said of: the keys of its outputs.
Output = tuple[str, str]
# The log density of each element of the batch, and the same where it may be NaN or infinite above
# (:mod:`.densities`); the value of a latent or a deterministic site; the initial value of a
# parameter, unconstrained; what is observed, and whether its support has it.
DENSITY, UNGUARDED, VALUE, INITIAL = "density", "unguarded", "value", "initial"
OBSERVED, INSIDE, EDGE = "observed", "inside", "edge"
# Beside discrete latents, until they are summed out: the scale, and the log density without it.
SCALE, UNSCALED = "scale", "unscaled"
# The kinds of a program's inputs. Of discrete latents it is the key by which they are drawn.
ARRAY, THE_KEY, PARAMETER, LATENT = "array", "key", "parameter", "latent"
DISCRETE, DRAW = "discrete", "draw"


class Input(NamedTuple):
    """An input of a program: its kind, the array, parameter or latent, and its place in a tree."""

    kind: str
    name: str
    leaf: int
    shape: jax.ShapeDtypeStruct


class SiteRows(NamedTuple):
    """A sample site's place among the rows: its silo plate, that plate's dim, the batch's shape."""

    plate: str | None
    dim: int
    batch_shape: tuple[int, ...]

    def rows(self, density: Array) -> Array:
        """Return what each row of the silo plate (rows,) adds to the site's log density."""
        # A log density may lack axes of the batch along which it is constant; each row counts all
        # the same.
        shape = jnp.broadcast_shapes(jnp.shape(density), self.batch_shape)
        return sum_rows(jnp.moveaxis(jnp.broadcast_to(density, shape), self.dim, 0))


@dataclass(frozen=True, eq=False)
class Trace:
    """A model at one signature of a silo's data, in one precision."""

    structure: Structure
    terms: dict[str, SiteRows]  # all sample sites, the log-determinants of latents among them
    supports: dict[str, SiteSupport]  # the observed sites
    program: Program
    inputs: tuple[Input, ...]
    # A key for each output of the program; values that are trees have several
    outputs: tuple[Output, ...]
    trees: dict[Output, Any]
    # the sites whose densities read each discrete latent, which is summed out of them
    summed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _parts: dict[frozenset[Output], tuple[Program, tuple[Input, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def part(self, wanted: Collection[Output]) -> tuple[Program, tuple[Input, ...]]:
        """Return the program of some outputs, without dead code, and its inputs."""
        if (key := frozenset(wanted)) not in self._parts:
            program, used = pruned(self.program, [output in key for output in self.outputs])
            kept = (one for one, is_used in zip(self.inputs, used, strict=True) if is_used)
            self._parts[key] = program, tuple(kept)
        return self._parts[key]

    def at(
        self,
        wanted: Collection[Output],
        theta: Theta,
        latents: Mapping[str, Array],
        arrays: Mapping[str, Array],
        key: Array | None = None,
        draw: Array | None = None,
    ) -> dict[Output, Any]:
        """Return some outputs; parameters that are left out have their initial values.

        ``key`` is the key of the text's own randomness, ``draw`` that of discrete latents.
        """
        if any(i.kind == PARAMETER and i.name not in theta for i in self.part(wanted)[1]):
            names = {name for kind, name in self.outputs if kind == INITIAL}
            outputs = [(INITIAL, name) for name in names]
            initial = self.at(outputs, dict.fromkeys(names), {}, arrays)
            theta = {**{name: value for (_, name), value in initial.items()}, **theta}
        given = {
            ARRAY: arrays,
            PARAMETER: theta,
            LATENT: latents,
            THE_KEY: {"": key},
            DRAW: {"": draw},
        }

        def operand(one: Input) -> ArrayLike:
            value = given[one.kind].get(one.name)
            if one.kind in (THE_KEY, DRAW):
                return jax.random.key(0) if value is None else value
            if value is None:
                return jnp.zeros(one.shape.shape, one.shape.dtype)
            return jnp.asarray(jax.tree.leaves(value)[one.leaf], one.shape.dtype)

        return self.run(wanted, operand)

    def run(
        self, wanted: Collection[Output], operand: Callable[[Input], ArrayLike]
    ) -> dict[Output, Any]:
        """Return some outputs, with an operand for each input that they need."""
        program, inputs = self.part(wanted)
        found = run_program(program, list(map(operand, inputs)))
        by_output: dict[Output, list[Array]] = {output: [] for output in wanted}
        kept = (output for output in self.outputs if output in by_output)
        for output, value in zip(kept, found, strict=True):
            by_output[output].append(value)
        return {o: jax.tree.unflatten(self.trees[o], leaves) for o, leaves in by_output.items()}

    @cached_property
    def _labels(self) -> dict[Output, Labels]:
        labels = [frozenset({f"{one.kind} {one.name}"}) for one in self.inputs]
        reached = propagate_labels(self.program.jaxpr, labels)
        found: dict[Output, Labels] = {}
        for output, sources in zip(self.outputs, reached, strict=True):
            found[output] = found.get(output, NONE) | sources
        return found

    def reads(self, output: Output, kind: str) -> frozenset[str]:
        """Return the names of the inputs of a kind that reach an output."""
        split = (label.partition(" ") for label in self._labels[output])
        return frozenset(name for of_kind, _, name in split if of_kind == kind)

    def readers(self, array: str) -> set[str]:
        """Return the sites whose densities or values an array reaches."""
        outputs = [o for o in dict.fromkeys(self.outputs) if o[0] in (DENSITY, VALUE)]
        return {self.owners.get(o[1], o[1]) for o in outputs if array in self.reads(o, ARRAY)}

    def site_reads(self, site: Site, kind: str) -> frozenset[str]:
        """Return the names of the inputs of a kind that a site's density depends on.

        Of a deterministic site it is the value, and of a parameter the initial value.
        """
        of = {"deterministic": VALUE, "param": INITIAL}.get(site.kind, DENSITY)
        outputs = (o for o in self.trees if o[0] == of and self.owners.get(o[1], o[1]) == site.name)
        return frozenset[str]().union(*(self.reads(output, kind) for output in outputs))

    def plates_read(self, site: Site) -> frozenset[str]:
        """Return the silo plates whose latents a site reads."""
        read = self.site_reads(site, LATENT)
        return frozenset(s.plate for s in self.structure.sites if s.plate and s.name in read)

    def rows_apart(self, plate: str, arrays: Collection[str], *, alone: bool = False) -> bool:
        """Return whether the program shows that each row of a silo plate reads no other row.

        What rows read are their latents and these ``arrays``. With ``alone`` the rows of other
        plates read none of them, either. Where it is False nothing is known.
        """
        places = {s.name: s.axis or 0 for s in self.structure.sites if s.plate == plate}
        wanted = self.outputs_of(DENSITY, local=True)
        program, inputs = self.part(wanted)
        rows = {ARRAY: dict.fromkeys(arrays, 0), LATENT: places}
        axes = row_axes(program, [rows.get(one.kind, {}).get(one.name) for one in inputs])
        kept = (output for output in self.outputs if output in set(wanted))
        for (_, name), axis, variable in zip(kept, axes, program.jaxpr.outvars, strict=True):
            term = self.terms[name]
            rank = len(type_of(variable).shape)
            own = axis not in (None, MIXED) and axis - rank == term.dim
            of_plate = term.plate == plate
            if axis is not None and not (own and of_plate) and (alone or of_plate):
                return False
        return not any(s.kind == "param" and s.plate is not None for s in self.structure.sites)

    def axis_of_rows(self, output: Output, plate: str, arrays: Collection[str]) -> int | None:
        """Return the axis of an output along which each row of a plate reads itself alone.

        It is None where the program does not show it. ``arrays`` hold rows of the plate.
        """
        places = {s.name: s.axis or 0 for s in self.structure.sites if s.plate == plate}
        program, inputs = self.part([output])
        rows = {ARRAY: dict.fromkeys(arrays, 0), LATENT: places}
        axes = row_axes(program, [rows.get(one.kind, {}).get(one.name) for one in inputs])
        return axes[0] if len(axes) == 1 and axes[0] != MIXED else None

    @cached_property
    def owners(self) -> dict[str, str]:
        """Return the site to which each density belongs: log-determinants belong to latents."""
        latents = (s.name for s in self.structure.sites if s.kind == "latent")
        owner = {f"_{name}_log_det": name for name in latents}
        return {name: owner.get(name, name) for name in self.terms}

    def globals_at(self, theta: Theta, z_G: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the log density of each global site, {site: ()}, and their values on supports."""
        wanted = [o for kind in (DENSITY, VALUE) for o in self.outputs_of(kind, local=False)]
        terms, values = dict[str, Array](), dict[str, Array]()
        for (kind, name), value in self.at(wanted, theta, self.unpacked(z_G), {}).items():
            if kind == VALUE:
                values[name] = value
            else:
                site = self.owners[name]
                terms[site] = terms.get(site, jnp.zeros(())) + value.sum()
        return terms, values

    def unpacked(self, z_G: Array, z_L: Rows | None = None) -> dict[str, Array]:
        """Return the latents by site, those of rows only if they are given."""
        local = z_L is not None
        sites = [s for s in self.structure.sites if local or s.plate is None]
        return unpack(sites, z_G, z_L or {})

    def outputs_of(self, kind: str, *, local: bool) -> list[Output]:
        """Return the outputs of one kind that are of local or of global sites, in their order."""
        plates = {s.name: s.plate for s in self.structure.sites}
        if kind == DENSITY:
            plates = {name: term.plate for name, term in self.terms.items()}
        named = ((kind, name) for name, plate in plates.items() if (plate is not None) == local)
        return [output for output in named if output in self.trees]
