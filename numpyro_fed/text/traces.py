"""The traces of a model: its structure, and one program that answers questions about it.

The program (a jaxpr) holds all that a text computes at one signature of a silo's data, in one
precision; the text is run once for each. Its inputs are the silo's arrays, a key, parameters and
latents, and its outputs are log densities and values by site. Every question is a part of it: some
outputs, without the operations that these do not need, or the labels of what they depend on.

Latents are unconstrained. The log-determinant of each bijection is added to the text as a
``numpyro.factor`` named ``_{site}_log_det``, in the silo plate of its site, so that it is counted
in the rows that it belongs to.

Latents have no shapes before the text runs. Each comes into being where it is sampled, as the
result of an operation without operands, which is made an input of the program afterwards. A latent
in the body of a scan or a branch cannot become one so. Such a text is run a second time, with
inputs of the shapes that the first run has found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.extend.core import Primitive
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import TRACING, is_double
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.numerics.accurate_densities import log_prob, no_more_than_finite
from numpyro_fed.text.jaxprs import (
    MIXED,
    NONE,
    Labels,
    Program,
    as_program,
    propagate_labels,
    pruned,
    row_axes,
    run_program,
    type_of,
    with_inputs_of,
)
from numpyro_fed.text.silo_plate import feasible, silo_plate_of
from numpyro_fed.text.site_table import (
    NamesApart,
    Rows,
    Site,
    Structure,
    Theta,
    check_shapes,
    model_errors,
    read_trace,
    sum_rows,
    unpack,
)
from numpyro_fed.text.supports import SiteSupport, observed_at, site_support

# What a program says of a site, and what it is said of: the keys of its outputs.
Output = tuple[str, str]
# The log density of each element of the batch, and the same where it may be NaN or infinite above
# (:mod:`.densities`); the value of a latent or a deterministic site; the initial value of a
# parameter, unconstrained; what is observed, and whether its support has it.
DENSITY, UNGUARDED, VALUE, INITIAL = "density", "unguarded", "value", "initial"
OBSERVED, INSIDE, EDGE = "observed", "inside", "edge"
# The kinds of a program's inputs.
ARRAY, THE_KEY, PARAMETER, LATENT = "array", "key", "parameter", "latent"


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
    ) -> dict[Output, Any]:
        """Return some outputs; parameters that are left out have their initial values."""
        if any(i.kind == PARAMETER and i.name not in theta for i in self.part(wanted)[1]):
            names = {name for kind, name in self.outputs if kind == INITIAL}
            outputs = [(INITIAL, name) for name in names]
            initial = self.at(outputs, dict.fromkeys(names), {}, arrays)
            theta = {**{name: value for (_, name), value in initial.items()}, **theta}
        given = {ARRAY: arrays, PARAMETER: theta, LATENT: latents, THE_KEY: {"": key}}

        def operand(one: Input) -> ArrayLike:
            value = given[one.kind].get(one.name)
            if one.kind == THE_KEY:
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


@dataclass(frozen=True, eq=False)
class Traces:
    """The traces of one model, for all signatures of data and both precisions."""

    model: Callable[..., Any]
    split: bool = True  # whether a model without a silo plate is refused
    _by_shapes: dict[tuple[Hashable, ...], Trace] = field(
        default_factory=dict, init=False, repr=False
    )

    def at(self, data: SiloData, owner: str = "silo 0") -> Trace:
        """Return the trace at the shapes of the data of ``owner``, which errors name."""
        arrays = {
            name: jax.ShapeDtypeStruct(a.shape, canonicalize_dtype(a.dtype))
            for name, a in data.arrays.items()
        }
        silo = replace(data, arrays=arrays, masks={}, weights={})  # all that the text sees
        seen = is_double(), signature(silo)
        with TRACING:
            if seen not in self._by_shapes:
                self._by_shapes[seen] = _traced(self.model, silo, owner, split=self.split)
            return self._by_shapes[seen]


class _Run:
    """One run of a text, with unknowns in the place of its parameters and latents."""

    def __init__(self, model: Callable[..., Any], silo: SiloData, *, split: bool):
        self.model, self.silo, self.split = model, silo, split
        # (theta, latents); if None, they are made as the text asks for them.
        self.given: tuple[Theta, dict[str, Array]] | None = None
        self.made: list[tuple[str, str, int]] = []  # (kind, name, leaf)
        self.initial: Theta = {}  # the parameters' values, unconstrained
        self.structure = Structure((), {}, False, {}, {})
        self.terms: dict[str, SiteRows] = {}
        self.supports: dict[str, SiteSupport] = {}

    def __call__(
        self,
        arrays: dict[str, Array],
        key: Array,
        given: tuple[Theta, dict[str, Array]] | None = None,
    ) -> dict[Output, Any]:
        """Return the outputs of the program."""
        self.given = given
        text = handlers.seed(handlers.substitute(self.model, substitute_fn=self._unknown), key)
        self.around = feasible()
        # Blocked, since handlers around whoever asks must not get these messages.
        with handlers.block(), self.around:
            trace = NamesApart(text).get_trace(**replace(self.silo, arrays=arrays).kwargs)
        latents = given[1] if given else [name for kind, name, _ in self.made if kind == LATENT]
        own = {f"_{name}_log_det" for name in latents}
        without = {name: site for name, site in trace.items() if name not in own}
        self.structure = read_trace(without, self.split)
        check_shapes(without, self.silo.arrays)

        found: dict[Output, Any] = {(INITIAL, n): value for n, value in self.initial.items()}
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            frames = {f.name: f.dim for f in site["cond_indep_stack"]}
            plate = silo_plate_of(site)
            dim = 0 if plate is None else frames[plate]
            self.terms[name] = SiteRows(plate, dim, site["fn"].batch_shape)
            found[UNGUARDED, name] = log_prob(site, guarded=False)
            found[DENSITY, name] = no_more_than_finite(found[UNGUARDED, name])
        for s in self.structure.sites:
            site = trace[s.name]
            if s.kind in ("latent", "deterministic"):
                found[VALUE, s.name] = site["value"]
            if s.kind == "observed" and site["value"] is not None:
                value, inside, edge = observed_at(site)
                found[OBSERVED, s.name] = value
                found[INSIDE, s.name], found[EDGE, s.name] = inside, edge
                self.supports[s.name] = site_support(site, arrays)
        return found

    def _unknown(self, site: dict[str, Any]) -> Any:
        """Return the value of a parameter or a latent."""
        name = site["name"]
        if site["type"] == "param":
            bijection = biject_to(site["kwargs"].get("constraint", constraints.real))
            self.initial[name] = bijection.inv(site["fn"](*site["args"], **site["kwargs"]))
            if self.given:
                return bijection(self.given[0][name])
            leaves, tree = jax.tree.flatten(self.initial[name])
            made = [
                self._make(PARAMETER, name, i, jnp.shape(leaf), jnp.result_type(leaf))
                for i, leaf in enumerate(leaves)
            ]
            return bijection(jax.tree.unflatten(tree, made))
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if self.given:
            return constrained(site, self.given[1][name]) if name in self.given[1] else None
        # A second site of this name is refused once it is in the trace.
        if self.around.inside or (LATENT, name, 0) in self.made:
            return None
        fn = site["fn"]
        if fn.support is None or fn.support.is_discrete:
            return None
        try:
            bijection = biject_to(fn.support)
        except NotImplementedError:
            return None
        shape = bijection.inverse_shape(fn.shape(site["kwargs"]["sample_shape"]))
        return constrained(site, self._make(LATENT, name, 0, tuple(shape), jnp.result_type(float)))

    def _make(
        self, kind: str, name: str, leaf: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> Array:
        self.made.append((kind, name, leaf))
        return _unknown.bind(place=len(self.made) - 1, shape=shape, dtype=dtype)


# An unknown number or array, as it stands in a program before it has become one of its inputs.
_unknown = Primitive("unknown")


@_unknown.def_abstract_eval
def _shape_of_unknown(
    *, place: int, shape: tuple[int, ...], dtype: np.dtype
) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype)


def _traced(model: Callable[..., Any], silo: SiloData, owner: str, *, split: bool) -> Trace:
    """Return the trace of a model at a silo whose arrays are shapes."""
    run, key = _Run(model, silo, split=split), jax.eval_shape(lambda: jax.random.key(0))
    with model_errors(owner, silo):
        closed, out = jax.make_jaxpr(run, return_shape=True)(silo.arrays, key)
        program, places = with_inputs_of(as_program(closed), _unknown.name)
        unknown = [run.made[place] for place in places]
        structure = run.structure
        asked = {name for kind, name, _ in run.made if kind == LATENT}
        latents = {s.name for s in structure.sites if s.kind == "latent"}
        if len(unknown) < len(run.made) or asked != latents:
            # The shapes that the run has found, both unconstrained.
            theta = {name: value for (kind, name), value in out.items() if kind == INITIAL}
            given = (
                theta,
                {
                    s.name: jax.ShapeDtypeStruct(s.whole(structure.sizes), jnp.result_type(float))
                    for s in structure.sites
                    if s.kind == "latent"
                },
            )
            closed, out = jax.make_jaxpr(run, return_shape=True)(silo.arrays, key, given)
            program = as_program(closed)
            paths = zip((PARAMETER, LATENT), given, strict=True)
            unknown = [spot for kind, tree in paths for spot in _spots(kind, tree)]
    spots = [*_spots(ARRAY, silo.arrays), (THE_KEY, "", 0), *unknown]
    inputs = tuple(
        Input(*spot, jax.ShapeDtypeStruct(type_of(v).shape, type_of(v).dtype))
        for spot, v in zip(spots, program.jaxpr.invars, strict=True)
    )
    outputs = tuple(path[0].key for path, _ in jax.tree.leaves_with_path(out))
    trees = {output: jax.tree.structure(value) for output, value in out.items()}
    return Trace(structure, run.terms, run.supports, program, inputs, outputs, trees)


def _spots(kind: str, tree: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return what the leaves of a dict are, in the order of JAX: their kind, name and number."""
    leaves = {name: len(jax.tree.leaves(tree[name])) for name in sorted(tree)}
    return [(kind, name, i) for name, n in leaves.items() for i in range(n)]


def run_text(
    model: Callable[..., Any],
    values: Mapping[str, Array],
    theta: Theta,
    data: SiloData,
    key: Array | None = None,
) -> dict[str, Any]:
    """Return NumPyro's trace of a text at these unconstrained latents and parameters.

    Others come from the key.
    """

    def substitute(site: dict[str, Any]) -> Any:
        name = site["name"]
        if site["type"] == "param" and name in theta:
            return biject_to(site["kwargs"].get("constraint", constraints.real))(theta[name])
        if site["type"] != "sample" or site["is_observed"] or name not in values:
            return None
        return constrained(site, values[name])

    text = handlers.substitute(model, substitute_fn=substitute)
    text = handlers.seed(text, jax.random.key(0) if key is None else key)
    with TRACING:
        trace: dict[str, Any] = handlers.trace(text).get_trace(**data.kwargs)
    return trace


def constrained(site: dict[str, Any], unconstrained: Array) -> Array:
    """Return a latent's value, whose log-determinant becomes a factor of the text that runs."""
    bijection = biject_to(site["fn"].support)
    # NumPyro asks for one step's value in the body of a scan; ours are stacked over all steps.
    step = site["infer"].get("_scan_current_index")
    if step is not None:
        unconstrained = unconstrained[step]
        shape = bijection.inverse_shape(site["kwargs"]["sample_shape"] + tuple(site["fn"].shape()))
        if unconstrained.size != math.prod(shape):
            raise ModelError(
                f"site '{site['name']}' has the shape {unconstrained.shape} at one step of a scan, "
                f"where {shape} was expected. A scan in the body of another one is not supported: "
                "write one of them as a Python loop."
            )
        unconstrained = unconstrained.reshape(shape)
    value = bijection(unconstrained)
    # The identity returns its argument itself, and needs no factor.
    if value is not unconstrained:
        log_det = bijection.log_abs_det_jacobian(unconstrained, value)
        batch_dim = jnp.ndim(value) - len(site["fn"].event_shape)
        # One number for each element of the batch, as log_prob has: rows must not be summed.
        log_det = sum_rightmost(log_det, jnp.ndim(log_det) - batch_dim)
        numpyro.factor(f"_{site['name']}_log_det", log_det)
    return value
