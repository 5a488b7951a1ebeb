"""The traces of a model: its text is run once for each signature of data and each precision.

What a text computes becomes one program (:mod:`numpyro_fed.model.trace`), of which latents are
inputs. They have no shapes before the text runs. Each comes into being where it is sampled, as the
result of an operation without operands, which is made an input of the program afterwards. A latent
in the body of a scan or a branch cannot become one so. Such a text is run a second time, with
inputs of the shapes that the first run has found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.extend.core import Primitive
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.primitives import Messenger

from numpyro_fed.model.binding import Theta, constrained, unpack
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.densities import log_prob, no_more_than_finite
from numpyro_fed.model.jaxprs import as_program, type_of, with_inputs_of
from numpyro_fed.model.primitives import feasible, inside_control_flow, silo_plate_of
from numpyro_fed.model.sites import NamesApart, Structure, check_shapes, model_errors, read_trace
from numpyro_fed.model.supports import SupportKind, observed_at, support_kind
from numpyro_fed.model.trace import (
    ARRAY,
    DENSITY,
    EDGE,
    INITIAL,
    INSIDE,
    LATENT,
    OBSERVED,
    PARAMETER,
    THE_KEY,
    UNGUARDED,
    VALUE,
    Input,
    Output,
    Term,
    Trace,
)
from numpyro_fed.precision import is_double
from numpyro_fed.programs import TRACING


@dataclass(frozen=True, eq=False)
class Traces:
    """The traces of one model, for all signatures of data and both precisions."""

    model: Callable[..., Any]
    split: bool = True  # whether a model without a silo plate is refused
    _known: dict[tuple[Hashable, ...], Trace] = field(default_factory=dict, init=False, repr=False)

    def at(self, data: SiloData, owner: str = "silo 0") -> Trace:
        """Return the trace at the shapes of the data of ``owner``, which errors name."""
        arrays = {
            name: jax.ShapeDtypeStruct(a.shape, canonicalize_dtype(a.dtype))
            for name, a in data.arrays.items()
        }
        silo = replace(data, arrays=arrays, masks={}, weights={})  # all that the text sees
        seen = is_double(), signature(silo)
        with TRACING:
            if seen not in self._known:
                self._known[seen] = _traced(self.model, silo, owner, split=self.split)
            return self._known[seen]


class _Run:
    """One run of a text, with unknowns in the place of its parameters and latents."""

    def __init__(self, model: Callable[..., Any], silo: SiloData, *, split: bool):
        self.model, self.silo, self.split = model, silo, split
        # (theta, latents); if None, they are made as the text asks for them.
        self.given: tuple[Theta, dict[str, Array]] | None = None
        self.made: list[tuple[str, str, int]] = []  # (kind, name, leaf)
        self.initial: Theta = {}  # the parameters' values, unconstrained
        self.structure = Structure((), {}, False, {}, {})
        self.terms: dict[str, Term] = {}
        self.supports: dict[str, SupportKind] = {}

    def __call__(
        self,
        arrays: dict[str, Array],
        key: Array,
        given: tuple[Theta, dict[str, Array]] | None = None,
    ) -> dict[Output, Any]:
        """Return the outputs of the program."""
        self.given = given
        self.bodies = _Bodies(handlers.substitute(self.model, substitute_fn=self._unknown))
        text = handlers.seed(self.bodies, key)
        # Blocked, since handlers around whoever asks must not get these messages.
        with handlers.block(), feasible():
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
            self.terms[name] = Term(plate, dim, site["fn"].batch_shape)
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
                self.supports[s.name] = support_kind(site, arrays)
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
            made = [self._make(PARAMETER, name, i, leaf) for i, leaf in enumerate(leaves)]
            return bijection(jax.tree.unflatten(tree, made))
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if self.given:
            return constrained(site, self.given[1][name]) if name in self.given[1] else None
        # A second site of this name is refused once it is in the trace.
        if self.bodies.inside or (LATENT, name, 0) in self.made:
            return None
        fn = site["fn"]
        if fn.support is None or fn.support.is_discrete:
            return None
        try:
            bijection = biject_to(fn.support)
        except NotImplementedError:
            return None
        shape = bijection.inverse_shape(fn.shape(site["kwargs"]["sample_shape"]))
        like = jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(float))
        return constrained(site, self._make(LATENT, name, 0, like))

    def _make(self, kind: str, name: str, leaf: int, like: Any) -> Array:
        self.made.append((kind, name, leaf))
        place = len(self.made) - 1
        return _unknown.bind(place=place, shape=jnp.shape(like), dtype=jnp.result_type(like))


class _Bodies(Messenger):
    """Note while the body of a scan or a branch runs, which NumPyro traces by itself."""

    inside = False

    def process_message(self, msg: dict[str, Any]) -> None:
        inside_control_flow(msg, self._noted)

    def _noted(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object) -> Any:
            outside, self.inside = self.inside, True
            try:
                return body(*args)
            finally:
                self.inside = outside

        return run


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
            real, ends = jnp.result_type(float), dict[str | None, int]()
            for s in structure.sites:
                if s.kind == "latent":
                    ends[s.plate] = max(s.stop, ends.get(s.plate, 0))
            z_G = jax.ShapeDtypeStruct((ends.get(None, 0),), real)
            z_L = {
                p: jax.ShapeDtypeStruct((n, ends.get(p, 0)), real)
                for p, n in structure.sizes.items()
            }
            theta = {name: value for (kind, name), value in out.items() if kind == INITIAL}
            given = theta, jax.eval_shape(partial(unpack, structure.sites), z_G, z_L)
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
