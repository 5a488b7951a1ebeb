"""The model as pure log densities in unconstrained space (``FederatedModel``).

Each function evaluates a part of the text's trace (:mod:`numpyro_fed.text.traces`), or runs the
text with latents and parameters substituted. The global functions need no data: they stand on
placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    biject_to,
)
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import init_to_sample

from numpyro_fed.basics.programs import TRACING, compiled_method, jit_once
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.numerics.accurate_densities import log_prob, no_more_than_finite
from numpyro_fed.text.handlers import OBSERVED, UNOBSERVED
from numpyro_fed.text.jaxprs import Labels, provenance
from numpyro_fed.text.membership import member_index
from numpyro_fed.text.site_table import Plate, Rows, Site, Structure, Theta, sum_rows, unpack
from numpyro_fed.text.supports import bounds_of, has_bounds
from numpyro_fed.text.trace import DENSITY, INITIAL, LATENT, PARAMETER, VALUE, Trace
from numpyro_fed.text.traces import Traces, run_text

PRIOR_DRAWS = 512  # at least, of which callers take as many as they ask for


@dataclass(frozen=True, eq=False)
class FederatedModel:
    r"""A model as pure functions in unconstrained space.

    For any partition of the rows over silos the joint log density is

    .. math::
        \log p(z_G, z_L, y; \theta) = \texttt{log\_prior}(\theta, z_G)
        + \sum_{j} \sum_{\text{plates}} \sum_i \texttt{log\_silo}(\theta, z_G, z_{L_j}, y_j)_i,

    log-determinants of the bijections to unconstrained space included. ``z_G`` is one vector
    (dim,), ``z_L`` is ``{plate: (rows, dim)}``, and ``theta`` has the shared parameters and, where
    a silo's data are an argument, the silo's private ones.

    Attributes
    ----------
    traces : Traces
        The structure and the programs of the text, at all signatures of data.
    silo : SiloData
        The data of one silo, whose shapes the global functions take.
    outer : frozenset of str
        The silo plates whose latents sites of other silo plates read.
    below : dict of str to str
        The silo plates whose rows belong to rows of another one, as visits to patients, each with
        that plate (:mod:`numpyro_fed.text.membership`).
    without_kinks : FederatedModel or None
        The model with kinks rounded off (:mod:`numpyro_fed.text.handlers`), if it has any.
    networks : dict of str to callable
        Further shared parameters by name, each with what returns its initial value from a key.
    """

    traces: Traces
    silo: SiloData
    outer: frozenset[str] = frozenset()
    below: Mapping[str, str] = field(default_factory=dict)
    without_kinks: FederatedModel | None = None
    networks: Mapping[str, Callable[[Array], Any]] = field(default_factory=dict)

    @property
    def text(self) -> Callable[..., Any]:
        """Return the text of the model."""
        return self.traces.model

    @cached_property
    def structure(self) -> Structure:
        """Return the structure of the text at one silo."""
        return self.traces.at(self.silo).structure

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the site table."""
        return self.structure.sites

    @cached_property
    def dim(self) -> int:
        """Return the length of the flat vector ``z_G`` of global latents."""
        return max([s.stop for s in self.named("latent")], default=0)

    @cached_property
    def plates(self) -> tuple[Plate, ...]:
        """Return the silo plates, in the order in which the model enters them."""
        width = dict.fromkeys(self.structure.sizes, 0)
        for site in self.sites:
            if site.kind == "latent" and site.plate is not None:
                width[site.plate] = max(width[site.plate], site.stop)
        return tuple(Plate(p, dim, p in self.outer) for p, dim in width.items())

    @cached_property
    def outer_plates(self) -> tuple[str, ...]:
        """Return the plates with latents above those of other plates, or read by several rows."""
        joined = {*self.below.values()}
        return tuple(p.name for p in self.plates if p.dim and p.outer and p.name not in joined)

    @cached_property
    def row_plates(self) -> tuple[str, ...]:
        """Return the other plates with latents: their rows are independent given the others."""
        return tuple(p.name for p in self.plates if p.dim and p.name not in self.outer_plates)

    @cached_property
    def covariates(self) -> frozenset[str]:
        """Return the observed parts of sites by ``obs_mask`` whose missing values others read."""
        trace, names = self.traces.at(self.silo), {s.name for s in self.sites}
        found = set()
        for name in (n.removesuffix(UNOBSERVED) for n in names if n.endswith(UNOBSERVED)):
            own, latent = {name, name + OBSERVED, name + UNOBSERVED}, name + UNOBSERVED
            others = (s for s in self.sites if s.name not in own and s.kind != "deterministic")
            summed = trace.summed.get(latent, frozenset())
            if own <= names and any(
                s.name in summed or latent in trace.site_reads(s, LATENT) for s in others
            ):
                found.add(name + OBSERVED)
        return frozenset(found)

    @cached_property
    def improper(self) -> tuple[str, ...]:
        """Return the latents without a proper prior."""
        masked = self.structure.masked.items()
        return (*(name for name, everywhere in masked if everywhere), *self.structure.improper)

    @cached_property
    def not_drawable(self) -> frozenset[str]:
        """Return the latents whose draws may not agree with their density, if they can be drawn."""
        at = self.structure
        return frozenset({*at.masked, *at.improper, *at.foreign})

    @cached_property
    def draws_local(self) -> bool:
        """Return whether local latents can be drawn from their prior given the globals."""
        local = {s.name for s in self.sites if s.kind == "latent" and s.plate is not None}
        # Given the discrete latents that are summed out they have another density.
        mixed = frozenset[str]().union(*self.traces.at(self.silo).summed.values())
        return not local & (self.not_drawable | mixed)

    @cached_property
    def discrete(self) -> tuple[str, ...]:
        """Return the discrete latents of rows, which are summed out of all densities."""
        return tuple(s.name for s in self.sites if s.kind == "discrete")

    def draw_local(self, key: Array, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Draw the latents of the silo plates that are not in ``z_L``; those in ``z_L`` stay."""
        given = [s for s in self.sites if s.plate is None or s.plate in z_L]
        trace = run_text(self.text, unpack(given, z_G, z_L), theta, data, key)
        drawn = packed([s for s in self.sites if s.plate not in (None, *z_L)], trace)
        return {**z_L, **{str(plate): z for plate, z in drawn.items()}}

    def log_prior_of_local(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Return the log density of such draws {plate: (rows,)}, scales and factors aside."""
        values, total = unpack(self.sites, z_G, z_L), dict[str, Array]()
        trace = run_text(self.text, values, theta, data)
        for s in self.sites:
            if s.kind == "latent" and s.plate is not None:
                terms = sum_rows(_rows_first(s, _log_density(trace[s.name], values[s.name])))
                total[s.plate] = total.get(s.plate, 0.0) + terms
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    @cached_property
    def global_prior(self) -> GlobalPrior:
        """Return the distributions of globals given other globals."""
        return GlobalPrior(self)

    @cached_property
    def template(self) -> SiloData:
        """Return placeholders for data, on which the global functions run the text.

        Local latents are zeros there. No placeholder reaches a result: ``split`` has refused texts
        in which global sites depend on data or local latents.
        """
        if not self.traces.split:  # a party of a vertical model, whose sites may read its data
            return self.silo
        # The functions take them as arguments of jit, so that they stay abstract and nothing of
        # the silo's part of the text is computed.
        return jax.tree.map(np.zeros_like, self.silo)

    @cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the entries of global latents, ``infer={"labels": ...}``."""
        return {s.name: s.labels for s in self.sites if s.labels}

    @cached_property
    def bounded(self) -> frozenset[str]:
        """Return the global latents whose values lie between two numbers, as those of a beta."""
        supports = self.structure.supports
        return frozenset(s.name for s in self.named("latent") if has_bounds(supports[s.name]))

    @cached_property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return the numbers between which values of global latents lie, by site."""
        supports = self.structure.supports
        return {s.name: bounds_of(supports[s.name]) for s in self.named("latent")}

    @property
    def smoothed(self) -> FederatedModel:
        """Return the model without kinks, for searches that use curvature."""
        return self.without_kinks or self

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """Return the sites of one kind at one level: ``plate`` or, when None, the globals."""
        return tuple(s for s in self.sites if s.kind == kind and s.plate == plate)

    def sizes(self, data: SiloData) -> Sizes:
        """Return the size of each silo plate at a silo, padded rows included."""
        return self.traces.at(data).structure.sizes

    # Traced once for each set of shapes: programs evaluate it a dozen times, and to go through its
    # operations takes longer than to repeat what JAX has put together.
    @compiled_method(partial(jax.jit, inline=True))
    def log_silo(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Return one number for each row of each silo plate, {plate: (rows,)}; 0 where padded.

        ``z_L`` needs no entry for plates without latents.
        """
        total: Rows = {}
        trace = self.traces.at(data)
        wanted, latents = trace.outputs_of(DENSITY, local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays)
        for (_, name), density in found.items():
            plate = str(trace.terms[name].plate)
            total[plate] = total.get(plate, 0.0) + trace.terms[name].rows(density)
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    @compiled_method(partial(jax.jit, inline=True))
    def log_grouped(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        """Return the same, with the terms of rows that belong to another one added to its own."""
        total, trace = self.log_silo(theta, z_G, z_L, data), self.traces.at(data)
        for plate, of in self.below.items():
            rows = data.weights.get(plate, 1.0) * total.pop(plate)
            member = member_index(trace, plate, of, data.arrays)
            total[of] = total[of].at[member].add(rows)
        return total

    def outcome_terms(
        self, theta: Mapping[str, Any], trace: Mapping[str, Any], data: SiloData
    ) -> Rows:
        """Return the terms of outcomes alone {plate: (rows,)}, discrete latents summed out.

        They are those at the latents of a run of the text, with parameters on their supports.
        """
        z, at = packed(self.sites, trace), self.traces.at(data)
        z_L = self.zero_latents(data) | {str(p): rows for p, rows in z.items() if p is not None}
        named = (s.name for s in self.sites if s.kind == "param")
        raw = {n: biject_to(self.structure.supports[n]).inv(theta[n]) for n in named}
        outcomes = [s for s in self.sites if s.kind in ("observed", "factor") and s.plate]
        wanted = [(DENSITY, s.name) for s in outcomes]
        latents = at.unpacked(z.get(None, jnp.zeros(0)), z_L)
        total: Rows = {}
        for (_, name), density in at.at(wanted, raw, latents, data.arrays).items():
            plate = str(at.terms[name].plate)
            total[plate] = total.get(plate, 0.0) + at.terms[name].rows(density)
        return total

    def terms_at_zero(self, data: SiloData) -> Rows:
        """Return the terms of all rows of a silo, {plate: (rows,)}, at latents of zero."""
        theta, z_L = self.initial_parameters(data), self.zero_latents(data)
        return self.log_silo(theta, jnp.zeros(self.dim), z_L, data)

    @property
    def _globally(self) -> Trace:
        """Return the trace of the global functions, in the current precision."""
        # In two precisions at once, the carry of a scan would change its dtype.
        real = jnp.result_type(float)
        shapes = {
            name: jax.ShapeDtypeStruct(a.shape, real if a.dtype.kind == "f" else a.dtype)
            for name, a in self.silo.arrays.items()
        }
        return self.traces.at(replace(self.silo, arrays=shapes))

    @compiled_method()
    def prior_terms(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        """Return what each global site adds to ``log_prior``, {site: ()}."""
        return self._globally.globals_at(theta, z_G)[0]

    def log_prior(self, theta: Theta, z_G: Array) -> Array:
        """Return the log density () of the global sites; it needs no data."""
        return sum(self.prior_terms(theta, z_G).values(), jnp.zeros(()))

    @compiled_method()
    def constrain_global(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        """Return global latents and deterministic sites on their own supports, {site: value}."""
        return self._globally.globals_at(theta, z_G)[1]

    def constrain_local(
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array | None = None
    ) -> dict[str, Array]:
        """Return local latents and deterministic sites on their own supports, {site: value}.

        ``key`` draws the discrete latents from their posterior given all others.
        """
        trace = self.traces.at(data)
        wanted, latents = trace.outputs_of(VALUE, local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays, draw=key)
        return {name: value for (_, name), value in found.items()}

    def constrain_theta(self, theta: Theta) -> Theta:
        """Return parameters on their own supports."""
        return {
            name: value
            if name in self.networks
            else biject_to(self.structure.supports[name])(value)
            for name, value in theta.items()
        }

    def init_theta(self, key: Array) -> Theta:
        """Return initial values of the shared parameters, unconstrained."""
        theta = self._init_theta(key) if self.named("param") else {}
        if self.networks:
            keys = jax.random.split(jax.random.fold_in(key, 1), len(self.networks))
            pairs = zip(self.networks.items(), keys, strict=True)
            theta = {**theta, **{name: init(k) for (name, init), k in pairs}}
        return theta

    @compiled_method()
    def _init_theta(self, key: Array) -> Theta:
        trace = self._globally
        found = trace.at(trace.outputs_of(INITIAL, local=False), {}, {}, {}, key)
        return {name: value for (_, name), value in found.items()}

    def init_private(self, key: Array, data: SiloData) -> Theta:
        """Return initial values of the parameters inside silo plates, unconstrained."""
        trace = self.traces.at(data)
        found = trace.at(trace.outputs_of(INITIAL, local=True), {}, {}, data.arrays, key)
        return {name: value for (_, name), value in found.items()}

    def initial_parameters(self, data: SiloData) -> Theta:
        """Return initial values of all parameters that a silo's terms read, by one fixed key."""
        key = jax.random.key(0)
        return {**self.init_theta(key), **self.init_private(key, data)}

    def init_global(self, key: Array, init_loc_fn: Callable[..., Any] | None = None) -> Array:
        """Return a start (dim,) by one of NumPyro's ``init_to_...`` functions; zeros when None."""
        if init_loc_fn is None:
            return jnp.zeros(self.dim)
        return self._init_global(key, init_loc_fn, self.template)

    @compiled_method(static_argnums=1)
    def _init_global(self, key: Array, init_loc_fn: Callable[..., Any], data: SiloData) -> Array:
        return self._start(key, data, init_loc_fn, self.named("latent")).get(None, jnp.zeros(0))

    def init_local(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any] | None = None
    ) -> Rows:
        """Return a start of the local latents, in the same way."""
        rows = self.zero_latents(data)
        if init_loc_fn is None:
            return rows
        local = [s for s in self.sites if s.plate is not None]
        found = self._start(key, data, init_loc_fn, local)
        return rows | {str(plate): z for plate, z in found.items()}

    def _start(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any], sites: Iterable[Site]
    ) -> dict[str | None, Array]:
        """Return the starting values of some latents by ``init_loc_fn``, as :func:`packed`."""
        text = handlers.substitute(handlers.seed(self.text, key), substitute_fn=init_loc_fn)
        with TRACING:
            found = packed(sites, handlers.trace(text).get_trace(**data.kwargs))
        return {plate: z.astype(jnp.result_type(float)) for plate, z in found.items()}

    def zero_latents(self, data: SiloData) -> Rows:
        """Return zeros for the local latents of a silo, {plate: (rows, dim)}."""
        sizes = self.sizes(data)
        return {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in self.plates}

    def draw_prior(self, key: Array | int, n: int) -> ArrayLike | None:
        """Return draws (n, dim) of the globals from their prior; None if one cannot be sampled."""
        try:
            if isinstance(key, jax.core.Tracer):
                return self._draw_prior(key, n)
            # A few draws are the first of many, so that one program serves all who ask for some.
            return np.asarray(self._draw_prior(key, max(n, PRIOR_DRAWS)))[:n]
        except NotImplementedError:
            return None

    @compiled_method(jit_once, static_argnums=1)
    def _draw_prior(self, key: Array | int, n: int) -> Array:
        is_seed = jnp.issubdtype(jnp.result_type(key), jnp.integer)
        keys = jax.random.split(jax.random.key(key) if is_seed else key, n)
        return jax.vmap(lambda key: self.init_global(key, init_to_sample))(keys)


class Funnel(NamedTuple):
    """Global latents (children) whose prior depends on the same other globals (setters)."""

    children: tuple[Site, ...]
    setters: tuple[Site, ...]


@dataclass(frozen=True, eq=False)
class GlobalPrior:
    """The conditional priors of global latents given other globals, by runs of the text itself."""

    model: FederatedModel

    def draw(self, key: Array, theta: Theta, z_G: Array, children: tuple[Site, ...]) -> Array:
        """Return ``z_G`` with some latents drawn anew given all others, which stay."""
        return self._draw(key, theta, z_G, self.model.template, children)

    @compiled_method(static_argnums=4)
    def _draw(
        self, key: Array, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        # A latent without a value is sampled by the text.
        for s in children:
            del values[s.name]
        trace = run_text(self.model.text, values, theta, data, key)
        for s in children:
            z_G = z_G.at[s.start : s.stop].set(packed([s], trace)[None])
        return z_G

    def log_density(self, theta: Theta, z_G: Array, children: tuple[Site, ...]) -> Array:
        """Return the log density () of these draws, scales and factors aside."""
        return self._density(theta, z_G, self.model.template, children)

    @compiled_method(static_argnums=3)
    def _density(
        self, theta: Theta, z_G: Array, silo: SiloData, children: tuple[Site, ...]
    ) -> Array:
        values, data = self._given(z_G, silo)
        trace = run_text(self.model.text, values, theta, data)
        terms = (_log_density(trace[s.name], values[s.name]).sum() for s in children)
        return sum(terms, jnp.zeros(()))

    def _given(self, z_G: Array, silo: SiloData) -> tuple[dict[str, Array], SiloData]:
        """Return the latents, zeros for those of rows, and placeholders in the same precision."""
        # In two precisions at once, the carry of a scan would change its dtype.
        fm, real = self.model, z_G.dtype
        data = jax.tree.map(lambda a: a.astype(real) if a.dtype.kind == "f" else a, silo)
        z_L = {p.name: jnp.zeros((fm.structure.sizes[p.name], p.dim), real) for p in fm.plates}
        return unpack(fm.sites, z_G, z_L), data

    @cached_property
    def drawable(self) -> bool:
        """Return whether the text can draw all global latents."""
        names = {s.name for s in self.model.named("latent")}
        return not names & self.model.not_drawable and self._drawn(given=()) == names

    @cached_property
    def setters(self) -> dict[str, Labels]:
        """Return for each global latent the other globals and parameters that its prior reads."""
        trace, found = self.model.traces.at(self.model.silo), dict[str, Labels]()
        for name in (s.name for s in self.model.named("latent")):
            of_density = DENSITY, name
            reads = trace.reads(of_density, LATENT) | trace.reads(of_density, PARAMETER)
            found[name] = reads - {name}
        return found

    @cached_property
    def funnels(self) -> tuple[Funnel, ...]:
        """Return all funnels whose children can all be drawn."""
        latents = self.model.named("latent")
        names = {s.name for s in latents}
        setters = {name: by & names for name, by in self.setters.items() if by & names}
        if not setters:
            return ()
        # Groups of children, connected if they share a setter or if one sets the other.
        groups: list[set[str]] = []
        for name, by in setters.items():
            linked = [
                g for g in groups if any(by & {c, *setters[c]} or name in setters[c] for c in g)
            ]
            groups = [g for g in groups if g not in linked] + [{name}.union(*linked)]
        drawn, funnels = self._drawn(given=names - set(setters)), []
        for group in groups:
            if group <= drawn and not group & self.model.not_drawable:
                above = frozenset[str]().union(*(setters[name] for name in group)) - group
                parts = (tuple(s for s in latents if s.name in g) for g in (group, above))
                funnels.append(Funnel(*parts))
        return tuple(funnels)

    def _drawn(self, given: Collection[str]) -> set[str]:
        """Return the globals that the text draws where only those ``given`` have values."""
        names = [s.name for s in self.model.named("latent")]
        values, data = self._given(jnp.zeros(self.model.dim), self.model.template)
        values = {n: value for n, value in values.items() if n not in names or n in given}

        # A latent counts only if its value comes from the key: a handler (condition, substitute)
        # may have fixed it in the text, and then it cannot be drawn anew.
        def sampled(arrays: dict[str, Array], key: Array) -> dict[str, Array]:
            trace = run_text(self.model.text, values, {}, replace(data, arrays=arrays), key)
            return {name: trace[name]["value"] for name in names}

        sources = provenance(sampled, arrays=data.arrays, key=jax.random.key(0))
        return {name for name in names if "key" in sources[name]}


def packed(sites: Iterable[Site], trace: Mapping[str, Any]) -> dict[str | None, Array]:
    """Return latents of a trace, unconstrained: globals (dim,) under None, rows by silo plate."""
    found: dict[str | None, list[Array]] = {}
    for s in sites:
        if s.kind == "latent":
            value = biject_to(trace[s.name]["fn"].support).inv(trace[s.name]["value"])
            part = jnp.ravel(value) if s.plate is None else _rows_first(s, value)
            found.setdefault(s.plate, []).append(part)
    return {plate: jnp.concatenate(parts, -1) for plate, parts in found.items()}


def _rows_first(s: Site, value: Array) -> Array:
    rows_first = jnp.moveaxis(value, s.axis or 0, 0)
    return rows_first.reshape(len(rows_first), -1)


def _log_density(site: dict[str, Any], unconstrained: Array) -> Array:
    """Return a latent's log density in unconstrained space, in the shape of its batch."""
    fn, value = site["fn"], site["value"]
    batch = jnp.ndim(value) - fn.event_dim
    log_det = biject_to(fn.support).log_abs_det_jacobian(unconstrained, value)
    log_p = log_prob({**site, "scale": None}) + sum_rightmost(log_det, jnp.ndim(log_det) - batch)
    return jnp.broadcast_to(no_more_than_finite(log_p), jnp.shape(value)[:batch])


class Outcome(NamedTuple):
    """An observed site at a silo."""

    plate: str
    value: Array  # with NaN for what is missing
    axes: tuple[str, ...]  # the plate along each axis; empty where there is none
    elements: Array  # bool, in the shape of the value: whether it is neither missing nor masked

    @property
    def seen(self) -> Array:
        """Return which rows (rows,) have any element that counts."""
        rows = self.axes.index(self.plate)
        return self.elements.any(tuple(i for i in range(self.elements.ndim) if i != rows))


def outcomes_at(fm: FederatedModel, data: SiloData) -> dict[str, Outcome]:
    """Return the observed sites in silo plates; padded rows count as seen."""
    theta = fm.initial_parameters(data)
    # What is observed depends on no latent: a prior that cannot be drawn from is none the worse.
    values = unpack(fm.sites, jnp.zeros(fm.dim), fm.zero_latents(data))
    with TRACING, handlers.block():
        trace = run_text(fm.text, values, theta, data)
    found = {}
    for s in fm.sites:
        if s.kind != "observed" or s.plate is None or s.name not in trace:
            continue
        message = trace[s.name]
        value, fn = jnp.asarray(message["value"]), message["fn"]
        frames = {f.name: f.dim for f in message["cond_indep_stack"]}
        batch, elements = value.ndim - fn.event_dim, _unmasked(fn, value.shape)
        if "missing" in message:
            elements &= ~message["missing"]
            value = jnp.where(message["missing"], jnp.nan, value)
        named = {batch + dim: name for name, dim in frames.items()}
        axes = tuple(named.get(i, "") for i in range(value.ndim))
        found[s.name] = Outcome(s.plate, value, axes, elements)
    return found


def _unmasked(fn: Distribution, shape: tuple[int, ...]) -> Array:
    """Return which elements of a value of this shape no mask of its distribution leaves out."""
    if isinstance(fn, Independent | ExpandedDistribution):
        return _unmasked(fn.base_dist, shape)
    if not isinstance(fn, MaskedDistribution):
        return jnp.ones(shape, bool)
    mask = jnp.asarray(fn._mask)
    mask = mask.reshape(mask.shape + (1,) * fn.event_dim)
    return _unmasked(fn.base_dist, shape) & mask


def axes_of(fm: FederatedModel, data: SiloData) -> dict[str, tuple[str, ...]]:
    """Return the plate along each axis of each outcome's value; empty where there is none."""
    found: dict[str, tuple[str, ...]] = {}
    jax.eval_shape(
        lambda data: found.update({n: o.axes for n, o in outcomes_at(fm, data).items()}), data
    )
    return found
