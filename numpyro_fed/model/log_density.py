"""The model as pure log densities in unconstrained space (``FederatedModel``).

Each function evaluates a part of the text's trace (:mod:`numpyro_fed.model.trace`), or runs the
text with latents and parameters substituted. The global functions need no data: they stand on
placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_sample

from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.priors import GlobalPrior, LocalPrior
from numpyro_fed.model.sites import Plate, Site, Structure
from numpyro_fed.model.trace import Trace
from numpyro_fed.model.traces import Traces
from numpyro_fed.programs import TRACING, compiled_method, jit_once

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
    without_kinks : FederatedModel or None
        The model with kinks rounded off (:mod:`numpyro_fed.model.sites`), if it has any.
    networks : dict of str to callable
        Further shared parameters by name, each with what returns its initial value from a key.
    """

    traces: Traces
    silo: SiloData
    outer: frozenset[str] = frozenset()
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
    def improper(self) -> tuple[str, ...]:
        """Return the latents without a proper prior."""
        masked = self.structure.masked.items()
        return (*(name for name, everywhere in masked if everywhere), *self.structure.improper)

    @cached_property
    def _not_drawable(self) -> frozenset[str]:
        at = self.structure
        return frozenset({*at.masked, *at.improper, *at.foreign})

    @cached_property
    def local_prior(self) -> LocalPrior | None:
        """Return the distribution of local latents given the globals.

        None if a local latent has no proper prior, is masked, or has a distribution of the user's
        own, whose draws may not agree with its density.
        """
        local = (s for s in self.sites if s.kind == "latent" and s.plate is not None)
        if any(s.name in self._not_drawable for s in local):
            return None
        return LocalPrior(self.text, self.sites)

    @cached_property
    def global_prior(self) -> GlobalPrior:
        """Return the distributions of globals given other globals."""
        local = {p.name: (self.structure.sizes[p.name], p.dim) for p in self.plates}
        return GlobalPrior(self.traces, self.sites, self.template, local, self._not_drawable)

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
        """Return one number for each row of each silo plate, {plate: (rows,)}; 0 where padded."""
        total: Rows = {}
        trace = self.traces.at(data)
        wanted, latents = trace.densities(local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays)
        for (_, name), density in found.items():
            plate = str(trace.terms[name].plate)
            total[plate] = total.get(plate, 0.0) + trace.terms[name].rows(density)
        return {plate: data.masked(plate, rows) for plate, rows in total.items()}

    def terms_at_zero(self, data: SiloData) -> Rows:
        """Return the terms of all rows of a silo, {plate: (rows,)}, at latents of zero."""
        key = jax.random.key(0)
        theta = {**self.init_theta(key), **self.init_private(key, data)}
        return self.log_silo(theta, jnp.zeros(self.dim), self.init_local(key, data), data)

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
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData
    ) -> dict[str, Array]:
        """Return local latents and deterministic sites on their own supports, {site: value}."""
        trace = self.traces.at(data)
        wanted, latents = trace.values(local=True), trace.unpacked(z_G, z_L)
        found = trace.at(wanted, theta, latents, data.arrays)
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
        found = trace.at(trace.initial(local=False), {}, {}, {}, key)
        return {name: value for (_, name), value in found.items()}

    def init_private(self, key: Array, data: SiloData) -> Theta:
        """Return initial values of the parameters inside silo plates, unconstrained."""
        trace = self.traces.at(data)
        found = trace.at(trace.initial(local=True), {}, {}, data.arrays, key)
        return {name: value for (_, name), value in found.items()}

    def init_global(self, key: Array, init_loc_fn: Callable[..., Any] | None = None) -> Array:
        """Return a start (dim,) by one of NumPyro's ``init_to_...`` functions; zeros when None."""
        if init_loc_fn is None:
            return jnp.zeros(self.dim)
        return self._init_global(key, init_loc_fn, self.template)

    @compiled_method(static_argnums=1)
    def _init_global(self, key: Array, init_loc_fn: Callable[..., Any], data: SiloData) -> Array:
        values = [jnp.ravel(v) for _, v in self._start(key, data, init_loc_fn, None)]
        return jnp.concatenate([jnp.zeros(0), *values])

    def init_local(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any] | None = None
    ) -> Rows:
        """Return a start of the local latents, in the same way."""
        size = self.sizes(data)
        rows = {p.name: jnp.zeros((size[p.name], p.dim)) for p in self.plates}
        if init_loc_fn is None:
            return rows
        for p in self.plates:
            for s, value in self._start(key, data, init_loc_fn, p.name):
                value = jnp.moveaxis(value, s.axis or 0, 0).reshape(size[p.name], -1)
                rows[p.name] = rows[p.name].at[:, s.start : s.stop].set(value)
        return rows

    def _start(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any], plate: str | None
    ) -> list[tuple[Site, Array]]:
        """Return the unconstrained starting values of one level's latents by ``init_loc_fn``."""
        text = handlers.substitute(handlers.seed(self.text, key), substitute_fn=init_loc_fn)
        with TRACING:
            trace = handlers.trace(text).get_trace(**data.kwargs)
        sites = self.named("latent", plate)
        fns, values = ([trace[s.name][k] for s in sites] for k in ("fn", "value"))
        inverse = [biject_to(f.support).inv(v) for f, v in zip(fns, values, strict=True)]
        return list(zip(sites, inverse, strict=True))

    def draw_prior(self, key: Array | int, n: int) -> ArrayLike | None:
        """Return draws (n, dim) of the globals from their prior; None if one cannot be sampled.

        ``key`` may be a seed: to make a key of it would take a program of its own.
        """
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
