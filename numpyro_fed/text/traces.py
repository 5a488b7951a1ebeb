"""The traces of a model: a text is run once at each signature of a silo's data and precision.

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
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.extend.core import Primitive
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import TRACING, is_double
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.numerics.accurate_densities import log_prob, no_more_than_finite
from numpyro_fed.text.discrete import FiniteSupport, finite_support, summed_out
from numpyro_fed.text.handlers import unmasked
from numpyro_fed.text.jaxprs import as_program, type_of, with_inputs_of
from numpyro_fed.text.silo_plate import feasible, silo_plate_of
from numpyro_fed.text.site_table import (
    NamesApart,
    Structure,
    Theta,
    check_shapes,
    model_errors,
    read_trace,
)
from numpyro_fed.text.supports import SiteSupport, observed_at, site_support
from numpyro_fed.text.trace import (
    ARRAY,
    DENSITY,
    DISCRETE,
    EDGE,
    INITIAL,
    INSIDE,
    LATENT,
    OBSERVED,
    PARAMETER,
    SCALE,
    THE_KEY,
    UNGUARDED,
    UNSCALED,
    VALUE,
    Input,
    Output,
    SiteRows,
    Trace,
)


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
        # If None, they are made as the text asks for them.
        self.given: Unknowns | None = None
        self.made: list[tuple[str, str, int]] = []  # (kind, name, leaf)
        self.discrete: dict[str, FiniteSupport] = {}  # the latents that are summed out
        self.scales: dict[str, Any] = {}  # of sample sites that are scaled
        self.initial: Theta = {}  # the parameters' values, unconstrained
        self.structure = Structure((), {}, False, {}, {})
        self.terms: dict[str, SiteRows] = {}
        self.supports: dict[str, SiteSupport] = {}

    def __call__(
        self,
        arrays: dict[str, Array],
        key: Array,
        given: Unknowns | None = None,
    ) -> dict[Output, Any]:
        """Return the outputs of the program."""
        self.given = given
        text = handlers.seed(handlers.substitute(self.model, substitute_fn=self._unknown), key)
        self.around = feasible()
        # Blocked, since handlers around whoever asks must not get these messages.
        with handlers.block(), self.around:
            trace = NamesApart(text).get_trace(**replace(self.silo, arrays=arrays).kwargs)
        made = [name for kind, name, _ in self.made if kind == LATENT]
        latents = given.latents if given else made
        own = {f"_{name}_log_det" for name in latents}
        without = {name: site for name, site in trace.items() if name not in own}
        self.structure = read_trace(without, self.split, self.discrete)
        check_shapes(without, self.silo.arrays)

        found: dict[Output, Any] = {(INITIAL, n): value for n, value in self.initial.items()}
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            frames = {f.name: f.dim for f in site["cond_indep_stack"]}
            plate = silo_plate_of(site)
            dim = 0 if plate is None else frames[plate]
            self.terms[name] = SiteRows(plate, dim, site["fn"].batch_shape)
            if name in self.discrete:
                # Where it is masked nobody reads it: its own prior sums to one.
                site = {**site, "fn": unmasked(site["fn"])}
            if self.discrete and site["scale"] is not None:
                self.scales[name] = site["scale"]
                found[SCALE, name] = jnp.asarray(site["scale"])
                found[UNSCALED, name] = log_prob({**site, "scale": None}, guarded=False)
            found[UNGUARDED, name] = log_prob(site, guarded=False)
            found[DENSITY, name] = no_more_than_finite(found[UNGUARDED, name])
        for s in self.structure.sites:
            site = trace[s.name]
            if s.kind in ("latent", "discrete", "deterministic"):
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
                return bijection(self.given.theta[name])
            leaves, tree = jax.tree.flatten(self.initial[name])
            made = [
                self._make(PARAMETER, name, i, jnp.shape(leaf), jnp.result_type(leaf))
                for i, leaf in enumerate(leaves)
            ]
            return bijection(jax.tree.unflatten(tree, made))
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if self.given:
            if name in self.given.discrete:
                return self.given.discrete[name]
            latents = self.given.latents
            return constrained(site, latents[name]) if name in latents else None
        # A second site of this name is refused once it is in the trace.
        if self.around.inside or {(LATENT, name, 0), (DISCRETE, name, 0)} & set(self.made):
            return None
        fn = site["fn"]
        if fn.support is None or fn.support.is_discrete:
            support = finite_support(site) if self.split and silo_plate_of(site) else None
            if support is None:
                return None
            self.discrete[name] = support
            return self._make(DISCRETE, name, 0, support.shape, support.values.dtype)
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


class Unknowns(NamedTuple):
    """Parameters and latents, unconstrained, and discrete latents of a run; or their shapes."""

    theta: Theta
    latents: dict[str, Array]
    discrete: dict[str, Array]


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
            shape, real = jax.ShapeDtypeStruct, jnp.result_type(float)
            sites = [s for s in structure.sites if s.kind == "latent"]
            of_sites: Any = {s.name: shape(s.whole(structure.sizes), real) for s in sites}
            discrete = run.discrete.items()
            of_discrete: Any = {n: shape(own.shape, own.values.dtype) for n, own in discrete}
            given = Unknowns(theta, of_sites, of_discrete)
            closed, out = jax.make_jaxpr(run, return_shape=True)(silo.arrays, key, given)
            program = as_program(closed)
            paths = zip((PARAMETER, LATENT, DISCRETE), given, strict=True)
            unknown = [spot for kind, tree in paths for spot in _spots(kind, tree)]
    spots = [*_spots(ARRAY, silo.arrays), (THE_KEY, "", 0), *unknown]
    inputs = tuple(
        Input(*spot, jax.ShapeDtypeStruct(type_of(v).shape, type_of(v).dtype))
        for spot, v in zip(spots, program.jaxpr.invars, strict=True)
    )
    outputs = tuple(path[0].key for path, _ in jax.tree.leaves_with_path(out))
    trees = {output: jax.tree.structure(value) for output, value in out.items()}
    trace = Trace(structure, run.terms, run.supports, program, inputs, outputs, trees)
    if not run.discrete:
        return trace
    with model_errors(owner, silo):
        return summed_out(trace, run.discrete, run.scales)


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
