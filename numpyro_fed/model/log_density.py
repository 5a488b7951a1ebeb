"""The model as pure log densities in unconstrained space (``FederatedModel``).

``ModelText`` holds the text with its structure at one silo and defines these functions. Each of
them substitutes latents and parameters in the text, traces it and reads log probabilities or values
off the trace. The global functions need no data: they run the text on placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_sample

from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.priors import GlobalPrior, LocalPrior, local_prior
from numpyro_fed.model.sites import Plate, Site, Structure
from numpyro_fed.model.trace import Trace
from numpyro_fed.model.traces import Traces
from numpyro_fed.programs import compiled_method, jit_once
from numpyro_fed.tracing import TRACING

PRIOR_DRAWS = 512  # at least, of which callers take as many as they ask for


class FederatedModel(NamedTuple):
    r"""A model as pure functions in unconstrained space.

    For any partition of the rows over silos the joint log density is

    .. math::
        \log p(z_G, z_L, y; \theta) = \texttt{log\_prior}(\theta, z_G)
        + \sum_{j} \sum_{\text{plates}} \sum_i \texttt{log\_silo}(\theta, z_G, z_{L_j}, y_j)_i,

    log-determinants of the bijections to unconstrained space included.

    Attributes
    ----------
    text : callable
        The model's text.
    traces : Traces
        Its structure and programs, at all signatures of data.
    sites : tuple of Site
    plates : tuple of Plate
        In the order in which the model enters them.
    dim : int
        Length of the flat vector ``z_G`` of global latents.
    nested : bool
        Whether a site is in two silo plates at once.
    log_prior : (theta, z_G) -> ()
        Needs no data.
    prior_terms : (theta, z_G) -> {site: ()}
        What each global site, its log-determinant included, adds to ``log_prior``.
    log_silo : (theta, z_G, z_L, data) -> {plate: (size,)}
        One number for each row of each silo plate; ``z_L`` is ``{plate: (size, dim)}``. Zero in
        padded rows. ``theta`` carries the shared and the silo's private parameters.
    constrain_global : (theta, z_G) -> {site: value}
        Global latents and deterministic sites on their own supports.
    constrain_local : (theta, z_G, z_L, data) -> {site: value}
        Local latents and deterministic sites on their own supports.
    constrain_theta : theta -> theta
        Parameters on their own supports.
    init_theta : key -> theta
        Initial values of the shared parameters, unconstrained.
    init_private : (key, data) -> theta
        Initial values of the parameters inside silo plates, unconstrained.
    init_global : (key, init_loc_fn) -> z_G
        A starting point by one of NumPyro's ``init_to_...`` functions; zeros when None.
    init_local : (key, data, init_loc_fn) -> z_L
        A starting point of the local latents, in the same way.
    draw_prior : (key or seed, n) -> (n, dim) or None
        Unconstrained draws of the globals from their prior; None if some distribution of it cannot
        be sampled. To make a key of a seed would take a program of its own.
    sizes : data -> {plate: size}
        The size of each silo plate at a silo, padded rows included.
    supports : dict
        The support of each global latent and the constraint of each parameter.
    global_prior : GlobalPrior
        The distributions of globals given other globals.
    improper : tuple of str
        The latents without a proper prior.
    local_prior : LocalPrior or None
        The distribution of local latents given the globals. None if a local latent has no proper
        prior, is masked, or has a distribution of the user's own, whose draws may not agree with
        its density.
    without_kinks : FederatedModel or None
        The model with kinks rounded off (:mod:`numpyro_fed.model.kinks`), if it has any.
    """

    text: Callable[..., Any]
    traces: Traces
    sites: tuple[Site, ...]
    plates: tuple[Plate, ...]
    dim: int
    nested: bool
    log_prior: Callable[[Theta, Array], Array]
    prior_terms: Callable[[Theta, Array], dict[str, Array]]
    log_silo: Callable[[Theta, Array, Rows, SiloData], Rows]
    constrain_global: Callable[[Theta, Array], dict[str, Array]]
    constrain_local: Callable[[Theta, Array, Rows, SiloData], dict[str, Array]]
    constrain_theta: Callable[[Theta], Theta]
    init_theta: Callable[[Array], Theta]
    init_private: Callable[[Array, SiloData], Theta]
    init_global: Callable[..., Array]
    init_local: Callable[..., Rows]
    draw_prior: Callable[[Array | int, int], ArrayLike | None]
    sizes: Callable[[SiloData], Sizes]
    supports: dict[str, Any]
    global_prior: GlobalPrior
    improper: tuple[str, ...] = ()
    local_prior: LocalPrior | None = None
    without_kinks: Any = None

    @property
    def smoothed(self) -> FederatedModel:
        """Return the model without kinks, for searches that use curvature."""
        return self.without_kinks or self

    def terms_at_zero(self, data: SiloData) -> Rows:
        """Return the terms of all rows of a silo, {plate: (size,)}, at latents of zero."""
        key, sizes = jax.random.key(0), self.sizes(data)
        theta = {**self.init_theta(key), **self.init_private(key, data)}
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in self.plates}
        return self.log_silo(theta, jnp.zeros(self.dim), z_L, data)

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """Return the sites of one kind at one level: ``plate`` or, when None, the globals."""
        return tuple(s for s in self.sites if s.kind == kind and s.plate == plate)


@dataclass(frozen=True, eq=False)
class ModelText:
    """A model's text and its structure at one silo. Its methods are the functions of a model."""

    traces: Traces
    silo: SiloData

    @cached_property
    def structure(self) -> Structure:
        return self.traces.at(self.silo).structure

    @cached_property
    def latents(self) -> list[Site]:
        return [s for s in self.structure.sites if s.kind == "latent"]

    @cached_property
    def dim(self) -> int:
        return max([s.stop for s in self.latents if s.plate is None], default=0)

    @cached_property
    def plates(self) -> tuple[Plate, ...]:
        width = dict.fromkeys(self.structure.sizes, 0)
        for site in self.latents:
            if site.plate is not None:
                width[site.plate] = max(width[site.plate], site.stop)
        return tuple(Plate(p, dim, False) for p, dim in width.items())

    @cached_property
    def template(self) -> SiloData:
        """Return placeholders for data, on which the global functions run the text.

        Local latents are zeros there. No placeholder reaches a result: ``split`` has refused texts
        in which global sites depend on data or local latents.
        """
        # The functions take them as arguments of jit, so that they stay abstract and nothing of
        # the silo's part of the text is computed.
        return jax.tree.map(np.zeros_like, self.silo)

    def placeholder(self, dtype: DTypeLike, silo: SiloData) -> tuple[SiloData, Rows]:
        """Return the placeholders and zeros as local latents, in the dtype of the globals."""
        # In two precisions at once, the carry of a scan would change its dtype.
        data = jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, silo)
        return data, {
            p.name: jnp.zeros((self.structure.sizes[p.name], p.dim), dtype) for p in self.plates
        }

    # Traced once for each set of shapes: programs evaluate it a dozen times, and to go through its
    # operations takes longer than to repeat what JAX has put together.
    @compiled_method(partial(jax.jit, inline=True))
    def log_silo(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        total: Rows = {}
        trace = self.traces.at(data)
        wanted, latents = trace.densities(local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays)
        for (_, name), density in found.items():
            plate = str(trace.terms[name].plate)
            total[plate] = total.get(plate, 0.0) + trace.terms[name].rows(density)
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    @property
    def globally(self) -> Trace:
        """Return the trace of the global functions, in the current precision."""
        # In two precisions at once, the carry of a scan would change its dtype.
        real = jnp.result_type(float)

        def shape(a: Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, real if a.dtype.kind == "f" else a.dtype)

        return self.traces.at(replace(self.silo, arrays=jax.tree.map(shape, self.silo.arrays)))

    @compiled_method()
    def prior_terms(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        return self.globally.globals_at(theta, z_G)[0]

    def log_prior(self, theta: Theta, z_G: Array) -> Array:
        return sum(self.prior_terms(theta, z_G).values(), jnp.zeros(()))

    def constrain_local(
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData
    ) -> dict[str, Array]:
        trace = self.traces.at(data)
        wanted, latents = trace.values(local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays)
        return {name: value for (_, name), value in found.items()}

    @compiled_method()
    def constrain_global(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        return self.globally.globals_at(theta, z_G)[1]

    def constrain_theta(self, theta: Theta) -> Theta:
        return {
            name: biject_to(self.structure.supports[name])(value) for name, value in theta.items()
        }

    def init_theta(self, key: Array) -> Theta:
        shared = any(s.kind == "param" and s.plate is None for s in self.structure.sites)
        return self._init_theta(key) if shared else {}

    @compiled_method()
    def _init_theta(self, key: Array) -> Theta:
        trace = self.globally
        found = trace.at(trace.initial(local=False), {}, {}, {}, key)
        return {name: value for (_, name), value in found.items()}

    def init_private(self, key: Array, data: SiloData) -> Theta:
        trace = self.traces.at(data)
        found = trace.at(trace.initial(local=True), {}, {}, data.arrays, key)
        return {name: value for (_, name), value in found.items()}

    def _start(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any], plate: str | None
    ) -> list[tuple[Site, Array]]:
        """Return the unconstrained starting values of one level's latents by ``init_loc_fn``."""
        text = handlers.substitute(handlers.seed(self.traces.model, key), substitute_fn=init_loc_fn)
        with TRACING:
            trace = handlers.trace(text).get_trace(**data.kwargs)
        sites = [s for s in self.latents if s.plate == plate]
        fns, values = ([trace[s.name][k] for s in sites] for k in ("fn", "value"))
        inverse = [biject_to(f.support).inv(v) for f, v in zip(fns, values, strict=True)]
        return list(zip(sites, inverse, strict=True))

    def init_global(self, key: Array, init_loc_fn: Callable[..., Any] | None = None) -> Array:
        if init_loc_fn is None:
            return jnp.zeros(self.dim)
        return self._init_global(key, init_loc_fn, self.template)

    @compiled_method(static_argnums=1)
    def _init_global(self, key: Array, init_loc_fn: Callable[..., Any], data: SiloData) -> Array:
        values = [jnp.ravel(v) for _, v in self._start(key, data, init_loc_fn, None)]
        return jnp.concatenate([jnp.zeros(0), *values])

    def draw_prior(self, key: Array | int, n: int) -> ArrayLike | None:
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

    def sizes(self, data: SiloData) -> Sizes:
        return self.traces.at(data).structure.sizes

    def init_local(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any] | None = None
    ) -> Rows:
        size = self.sizes(data)
        rows = {p.name: jnp.zeros((size[p.name], p.dim)) for p in self.plates}
        if init_loc_fn is None:
            return rows
        for p in self.plates:
            for s, value in self._start(key, data, init_loc_fn, p.name):
                value = jnp.moveaxis(value, s.axis or 0, 0).reshape(size[p.name], -1)
                rows[p.name] = rows[p.name].at[:, s.start : s.stop].set(value)
        return rows

    def federated(self) -> FederatedModel:
        """Return the model as pure functions."""
        at = self.structure
        not_drawable = {*at.masked, *at.improper, *at.foreign}
        no_prior = any(s.name in not_drawable for s in self.latents if s.plate is not None)
        return FederatedModel(
            text=self.traces.model,
            traces=self.traces,
            sites=at.sites,
            plates=self.plates,
            dim=self.dim,
            nested=at.nested,
            log_prior=self.log_prior,
            prior_terms=self.prior_terms,
            log_silo=self.log_silo,
            constrain_global=self.constrain_global,
            constrain_local=self.constrain_local,
            constrain_theta=self.constrain_theta,
            init_theta=self.init_theta,
            init_private=self.init_private,
            init_global=self.init_global,
            init_local=self.init_local,
            draw_prior=self.draw_prior,
            sizes=self.sizes,
            supports=at.supports,
            improper=(
                *(name for name, everywhere in at.masked.items() if everywhere),
                *at.improper,
            ),
            local_prior=None if no_prior else local_prior(self.traces.model, at.sites),
            global_prior=GlobalPrior(
                self.traces, at.sites, self.template, self.placeholder, frozenset(not_drawable)
            ),
        )
