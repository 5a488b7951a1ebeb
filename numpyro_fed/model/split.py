"""From model text to pure log densities in unconstrained space."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_sample

from numpyro_fed.errors import ModelError
from numpyro_fed.model.binding import Rows, Theta, sum_rows, trace_at
from numpyro_fed.model.data import SiloData, Sizes, signature
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.handlers import localised
from numpyro_fed.model.jaxprs import Identity, needed, provenance, traced
from numpyro_fed.model.kinks import rounded
from numpyro_fed.model.padding import padded_keys
from numpyro_fed.model.primitives import silo_plate_of
from numpyro_fed.model.priors import GlobalPrior, LocalPrior, local_prior
from numpyro_fed.model.sites import (
    Plate,
    Site,
    Structure,
    check_same_sites,
    held,
    structure,
    structures,
)
from numpyro_fed.programs import compiled_method, jit_once
from numpyro_fed.tracing import TRACING


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
    sites : tuple of Site
    plates : tuple of Plate
        In the order in which the model enters them.
    dim : int
        Length of the flat vector ``z_G`` of global latents.
    nested : bool
        Whether a site stands in two silo plates at once.
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
        The same for what is local.
    constrain_theta : theta -> theta
        Parameters on their own supports.
    init_theta : key -> theta
        Initial values of the shared parameters, unconstrained.
    init_private : (key, data) -> theta
        Initial values of the parameters inside silo plates, unconstrained.
    init_global : (key, init_loc_fn) -> z_G
        A starting point by one of NumPyro's ``init_to_...`` functions; zeros when None.
    init_local : (key, data, init_loc_fn) -> z_L
        The same for the local latents.
    sizes : data -> {plate: size}
        The size of each silo plate at a silo, padded rows included.
    supports : dict
        The support of each global latent and the constraint of each parameter.
    flat : tuple of str
        The latents without a proper prior.
    local_prior : LocalPrior or None
        None where a local latent has none, is masked, or has a distribution of the user's own,
        which may not draw what its density says.
    global_prior : GlobalPrior
    smooth : FederatedModel or None
        Of the text with kinks rounded off (:mod:`numpyro_fed.model.kinks`), if there are any.
    """

    text: Callable[..., Any]
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
    sizes: Callable[[SiloData], Sizes]
    supports: dict[str, Any]
    global_prior: GlobalPrior
    flat: tuple[str, ...] = ()
    local_prior: LocalPrior | None = None
    smooth: Any = None

    @property
    def rounded(self) -> FederatedModel:
        """Without kinks, for what reads curvature."""
        return self.smooth or self

    def draw_prior(self, key: Array, n: int) -> Array | None:
        """Unconstrained draws (n, dim) of the globals from their prior.

        None where some distribution of the prior cannot be drawn from.
        """

        @jit_once
        def draws(key: Array) -> Array:
            keys = jax.random.split(key, n)
            return jax.vmap(lambda key: self.init_global(key, init_to_sample))(keys)

        try:
            return draws(key)
        except NotImplementedError:
            return None

    def terms_at_zero(self, data: SiloData) -> Rows:
        """Return the terms of all rows of a silo, {plate: (size,)}, all latents at zero."""
        key, sizes = jax.random.key(0), self.sizes(data)
        theta = {**self.init_theta(key), **self.init_private(key, data)}
        z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in self.plates}
        return self.log_silo(theta, jnp.zeros(self.dim), z_L, data)

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """The sites of one kind at one level: ``plate`` or, when None, the globals."""
        return tuple(s for s in self.sites if s.kind == kind and s.plate == plate)


def split(model: Callable[..., Any], silos: Sequence[SiloData]) -> FederatedModel:
    """Split a model's trace at its silo plates.

    Parameters
    ----------
    model : callable
        A NumPyro model with ``silo_plate``.
    silos : sequence of SiloData
        What the silos hold (:func:`numpyro_fed.model.data.read`).

    Returns
    -------
    FederatedModel

    Raises
    ------
    ModelError
        Without a silo plate; for a global site, observed ones included, that depends on a local
        latent, on data or on what differs between silos, such as their numbers of rows; for
        randomness outside of sample sites; for discrete latents, supports without a bijection,
        mutable sites; for sites that differ between silos; and when the model itself raises.
    """
    found = structures(model, silos)
    for j, other in enumerate(found):
        check_same_sites(found[0], other, j)
    if any(s.kind == "deterministic" and s.plate is None for s in found[0].sites):
        text = localised(model, silos[0].kwargs)
        if text is not model:
            model, found = text, structures(text, silos)
    _warn_masked(found[0])
    _warn_fields(found[0])
    smallest = min(range(len(silos)), key=lambda j: sum(a.size for a in silos[j].arrays.values()))
    at, silo = found[smallest], silos[smallest]
    fm = _Text(model, at, silo).federated()
    if at.kinked:
        fm = fm._replace(smooth=_Text(rounded(model), at, silo).federated())
    reaches = _dependence(fm, model, silos[smallest])
    _check_reaches(fm, reaches)
    _check_observed(at, silo)
    _check_globals(model, fm, silos, [s.sizes for s in found])
    plates = [
        p._replace(
            outer=p.dim > 0
            and any(
                p.name in reaches[s.name]
                for s in fm.sites
                if s.plate not in (None, p.name) and s.kind != "deterministic"
            )
        )
        for p in fm.plates
    ]
    smooth = fm.smooth and fm.smooth._replace(plates=tuple(plates))
    return fm._replace(plates=tuple(plates), smooth=smooth)


def _check_observed(found: Structure, silo: SiloData) -> None:
    """Refuse a text that says nothing about data: its posterior would be its prior."""
    if any(s.kind in ("observed", "factor") and s.plate for s in found.sites):
        return
    latents = [s for s in found.sites if s.kind == "latent" and s.plate]
    alike = [s for s in latents if s.name in silo.leaves] or latents
    named = " or ".join(f"'{s.name}' (silo_plate '{s.plate}')" for s in alike)
    missing = [name for name, value in silo.static if value is None]
    raise ModelError(
        "no site in a silo_plate is observed, so that the posterior would be the prior: "
        + (f"was obs= forgotten at {named}? " if named else "there is no site in a silo_plate. ")
        + (f"A silo holds None for {missing}. " if missing else "")
        + "Pass the data as numpyro.sample(..., obs=y), or add a numpyro.factor. "
        "Draws from the prior are numpyro.infer.Predictive's."
    )


def _warn_masked(found: Structure) -> None:
    for name, everywhere in found.masked.items():
        warnings.warn(
            f"the prior of the latent site '{name}' is flat (its mask is False everywhere), and so "
            "improper: unless the data determine it, its posterior is improper, too, and a bound "
            "can grow for ever. Give it a proper prior, however wide, such as dist.Normal(0, 100)."
            if everywhere
            else f"the latent site '{name}' is masked: where the mask is False it has no prior, so "
            "that its posterior is improper and a bound can grow for ever. Mask only the observed "
            "site (obs_mask adds such a latent; give a mask to numpyro.handlers.mask instead).",
            stacklevel=3,
        )


def _warn_fields(found: Structure) -> None:
    for name in found.fields:
        warnings.warn(
            f"the prior of '{name}' ties all of its entries together, so that it is fitted as one "
            "large global latent, which all silos share. nf.handlers.substitute_prior puts a prior "
            "in its place in which silos are independent given what they share: "
            "nf.SeparatorPrior, nf.LowRankPrior, nf.BlockPrior, nf.SigmaPrior.",
            stacklevel=3,
        )


def globals_at(
    model: Callable[..., Any],
    sites: Sequence[Site],
    theta: Theta,
    z_G: Array,
    z_L: Rows,
    data: SiloData,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Log density of each global site, its log-determinant included, and values of all."""
    probabilities, trace = trace_at(model, sites, theta, z_G, z_L, data)
    owner, terms = _owners(sites), dict[str, Array]()
    for name, value in probabilities.items():
        if silo_plate_of(trace[name]) is None:
            site = owner.get(name, name)
            terms[site] = terms.get(site, jnp.zeros(())) + value.sum()
    shown = ("latent", "deterministic")
    values = {s.name: trace[s.name]["value"] for s in sites if s.plate is None and s.kind in shown}
    return terms, values


def _owners(sites: Sequence[Site]) -> dict[str, str]:
    """The latent that a factor with a log-determinant belongs to."""
    return {f"_{s.name}_log_det": s.name for s in sites if s.kind == "latent"}


@dataclass(frozen=True, eq=False)
class _Text:
    """A model's text, traced at one silo: the functions of a :class:`FederatedModel`."""

    model: Callable[..., Any]
    at: Structure
    silo: SiloData

    @cached_property
    def latents(self) -> list[Site]:
        return [s for s in self.at.sites if s.kind == "latent"]

    @cached_property
    def dim(self) -> int:
        return max([s.stop for s in self.latents if s.plate is None], default=0)

    @cached_property
    def plates(self) -> tuple[Plate, ...]:
        def width(plate: str) -> int:
            return max([s.stop for s in self.latents if s.plate == plate], default=0)

        return tuple(Plate(p, width(p), False) for p in self.at.sizes)

    @cached_property
    def template(self) -> SiloData:
        """Placeholders for data: the global functions run the text on them and on zeros as latents.

        Inside of jit, so that they stay abstract. None of them reaches the result:
        ``_check_reaches`` has made sure.
        """
        return jax.tree.map(np.zeros_like, self.silo)

    def placeholder(self, dtype: DTypeLike, silo: SiloData) -> tuple[SiloData, Rows]:
        """Return them in the type in which the globals come, or a scan would carry two types."""
        data = jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, silo)
        return data, {p.name: jnp.zeros((self.at.sizes[p.name], p.dim), dtype) for p in self.plates}

    def log_silo(self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        total: Rows = {}
        values, trace = trace_at(self.model, self.at.sites, theta, z_G, z_L, data)
        for name, value in values.items():
            site = trace[name]
            if plate := silo_plate_of(site):
                shape = jnp.broadcast_shapes(jnp.shape(value), site["fn"].batch_shape)
                value = jnp.broadcast_to(value, shape)
                frame = next(f for f in site["cond_indep_stack"] if f.name == plate)
                total[plate] = total.get(plate, 0.0) + sum_rows(jnp.moveaxis(value, frame.dim, 0))
        return {plate: data.keep(plate, rows) for plate, rows in total.items()}

    def prior_terms(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        return self._prior_terms(theta, z_G, self.template)

    @compiled_method()
    def _prior_terms(self, theta: Theta, z_G: Array, data: SiloData) -> dict[str, Array]:
        data, z_L = self.placeholder(z_G.dtype, data)
        return globals_at(self.model, self.at.sites, theta, z_G, z_L, data)[0]

    def log_prior(self, theta: Theta, z_G: Array) -> Array:
        return sum(self.prior_terms(theta, z_G).values(), jnp.zeros(()))

    def _constrain(
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData, *, local: bool
    ) -> dict[str, Array]:
        _, trace = trace_at(self.model, self.at.sites, theta, z_G, z_L, data)
        return {
            s.name: trace[s.name]["value"]
            for s in self.at.sites
            if s.kind in ("latent", "deterministic") and (s.plate is not None) == local
        }

    def constrain_local(
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData
    ) -> dict[str, Array]:
        return self._constrain(theta, z_G, z_L, data, local=True)

    def constrain_global(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        return self._constrain_global(theta, z_G, self.template)

    @compiled_method()
    def _constrain_global(self, theta: Theta, z_G: Array, data: SiloData) -> dict[str, Array]:
        data, z_L = self.placeholder(z_G.dtype, data)
        return self._constrain(theta, z_G, z_L, data, local=False)

    def constrain_theta(self, theta: Theta) -> Theta:
        return {name: biject_to(self.at.supports[name])(value) for name, value in theta.items()}

    def _parameters(self, key: Array, data: SiloData, *, local: bool) -> Theta:
        params = [s for s in self.at.sites if s.kind == "param" and (s.plate is not None) == local]
        if not params:
            return {}
        with TRACING, feasible():
            trace = handlers.trace(handlers.seed(self.model, key)).get_trace(**data.kwargs)
        at = {s.name: trace[s.name]["value"] for s in params}
        return {name: biject_to(self.at.supports[name]).inv(value) for name, value in at.items()}

    def init_theta(self, key: Array) -> Theta:
        shared = any(s.kind == "param" and s.plate is None for s in self.at.sites)
        own = jax.jit(partial(self._parameters, local=False))
        return own(key, self.template) if shared else {}

    def init_private(self, key: Array, data: SiloData) -> Theta:
        return self._parameters(key, data, local=True)

    def _start(
        self, key: Array, data: SiloData, init_loc_fn: Callable[..., Any], plate: str | None
    ) -> list[tuple[Site, Array]]:
        """Return where one of NumPyro's functions puts the latents of one level, unconstrained."""
        text = handlers.substitute(handlers.seed(self.model, key), substitute_fn=init_loc_fn)
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

    def sizes(self, data: SiloData) -> Sizes:
        return structure(self.model, data, "silo 0").sizes

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
        at = self.at
        without = {*at.masked, *at.improper, *at.foreign}
        no_prior = any(s.name in without for s in self.latents if s.plate is not None)
        return FederatedModel(
            text=self.model,
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
            sizes=self.sizes,
            supports=at.supports,
            flat=(*(name for name, everywhere in at.masked.items() if everywhere), *at.improper),
            local_prior=None if no_prior else local_prior(self.model, at.sites),
            global_prior=GlobalPrior(
                self.model, at.sites, self.template, self.placeholder, frozenset(without)
            ),
        )


def _dependence(
    fm: FederatedModel, model: Callable[..., Any], silo: SiloData
) -> dict[str, set[str | None]]:
    """The silo plates, by name, whose latents reach each site's density or value; None for data.

    Randomness that is no sample site goes by the name ``KEY``.
    """
    sizes = fm.sizes(silo)
    z_L = {p.name: np.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    labels = {f"rows of {p.name}": p.name for p in fm.plates}

    def run(data: dict[str, Array], theta: Theta, key: Array, **rows: Array) -> dict[str, Any]:
        at = replace(silo, arrays=data)
        named = {labels[label]: value for label, value in rows.items()}
        values, trace = trace_at(model, fm.sites, theta, jnp.zeros(fm.dim), named, at, key)
        fixed = {s.name: trace[s.name]["value"] for s in fm.sites if s.kind == "deterministic"}
        return {**values, **fixed}

    def initial(data: dict[str, Array]) -> Theta:
        at = replace(silo, arrays=data)
        with TRACING, feasible():
            trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(**at.kwargs)
        return {s.name: trace[s.name]["value"] for s in fm.sites if s.kind == "param"}

    key = jax.random.key(0)
    theta = jax.eval_shape(lambda key: {**fm.init_theta(key), **fm.init_private(key, silo)}, key)
    rows = {label: z_L[plate] for label, plate in labels.items()}
    found = provenance(run, data=silo.arrays, theta=theta, key=key, **rows)
    found |= provenance(initial, data=silo.arrays)
    names, owner = {**labels, "data": None, "key": KEY}, _owners(fm.sites)
    reaches: dict[str, set[str | None]] = {}
    for site, value in found.items():
        sources = {names[label] for leaf in jax.tree.leaves(value) for label in leaf & set(names)}
        reaches.setdefault(owner.get(site, site), set()).update(sources)
    return reaches


KEY = "numpyro.prng_key()"


def _check_reaches(fm: FederatedModel, reaches: dict[str, set[str | None]]) -> None:
    for site in fm.sites:
        name, sources = site.name, reaches[site.name]
        if KEY in sources:
            raise ModelError(
                f"the site '{name}' depends on randomness that is no latent: on "
                "numpyro.prng_key(), or on a site in the body of a scan inside a "
                "numpyro.handlers.scope. It would be the same in every round. Draw it by "
                "numpyro.sample, outside of that scope, or before the run and pass it as data."
            )
        if site.plate is not None or not sources:
            continue
        if None in sources and site.kind == "observed":
            raise ModelError(
                f"site '{name}' is observed outside of every silo_plate, and depends on data, "
                f"which the server does not have. Put '{name}' inside the silo_plate of the rows "
                "that it belongs to."
            )
        if None in sources:
            raise ModelError(
                f"the global site '{name}' depends on data, which the server does not have. "
                f"Put '{name}' inside a silo_plate, or make it depend on globals alone."
            )
        plate = sorted(str(s) for s in sources)[0]
        raise ModelError(
            f"the global site '{name}' depends on latents of silo_plate '{plate}', which "
            f"never leave their silo. Put '{name}' inside a silo_plate."
        )


def _check_globals(
    model: Callable[..., Any], fm: FederatedModel, silos: Sequence[SiloData], sizes: Sequence[Sizes]
) -> None:
    """Refuse global sites that change with what differs between silos, numbers of rows included.

    Where all silos are alike, one with a row more stands for others.
    """
    distinct: dict[tuple[Hashable, ...], int] = {}
    for j, silo in enumerate(silos):
        distinct.setdefault(signature(silo), j)
    z_G, theta = np.random.default_rng(0).normal(size=fm.dim), fm.init_theta(jax.random.key(0))

    def seen(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> dict[str, Array]:
        terms, values = globals_at(model, fm.sites, theta, z_G, z_L, data)
        density = {f"log density:{name}": value for name, value in terms.items()}
        return density | {f"value:{name}": value for name, value in values.items()}

    def arguments(
        silo: SiloData, size: Sizes
    ) -> tuple[Theta, np.ndarray, dict[str, np.ndarray], SiloData]:
        return theta, z_G, {p.name: np.zeros((size[p.name], p.dim)) for p in fm.plates}, silo

    def program(at: tuple[Any, ...]) -> Identity:
        return Identity.of(needed(traced(seen, *at)))

    def compare(silo: SiloData, size: Sizes, who: str) -> None:
        here = arguments(silo, size)
        if program(here).same(expected):
            return
        mine, theirs = (jax.jit(seen)(*at) for at in (here, first))
        for name, value in mine.items():
            if np.shape(value) != np.shape(theirs[name]) or not np.allclose(
                value, theirs[name], rtol=1e-5, atol=1e-5, equal_nan=True
            ):
                raise ModelError(_differs(name, value, theirs[name], who, silo, silos[0]))

    first = arguments(silos[0], sizes[0])
    expected = program(first)
    for j in list(distinct.values())[1:]:
        compare(silos[j], sizes[j], f"silo {j}")
    if len(distinct) == 1:
        for longer in _with_a_row_more(silos[0], sizes[0], padded_keys(silos, sizes)):
            try:
                size = fm.sizes(longer)
                jax.eval_shape(seen, *arguments(longer, size))
            except Exception:  # the text has it that this array goes with something else
                continue
            compare(longer, size, "a silo with a row more")


def _with_a_row_more(silo: SiloData, size: Sizes, rows: dict[str, str]) -> list[SiloData]:
    """The silo with one more row, plate by plate."""
    longer = []
    for plate in size:
        keys = [k for k, p in rows.items() if p == plate]
        more = {k: np.concatenate([silo.arrays[k], silo.arrays[k][:1]]) for k in keys}
        if more and size[plate]:
            longer.append(replace(silo, arrays={**silo.arrays, **more}))
    return longer


def _differs(
    name: str, here: Array, there: Array, who: str, silo: SiloData, other: SiloData
) -> str:
    what, _, site = name.partition(":")
    mine, theirs = _differences(silo, other)

    def shown(value: Array) -> str:
        return np.array2string(np.ravel(value)[:4], precision=6, separator=", ").strip("[]")

    subject = f"the prior of the global site '{site}'"
    if what == "value":
        subject = f"the value of the global site '{site}' at one point of unconstrained space"
    return (
        f"{subject} differs between silos: its {what} at one point is {shown(here)} at {who}, "
        f"which holds {mine}, but {shown(there)} at silo 0, which holds {theirs}. It must not "
        "depend on numbers of rows or Python values that differ. Pass one number to all silos "
        "(that of all rows together, say), or let only local sites depend on it."
    )


def _differences(a: SiloData, b: SiloData) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data of two silos in words, where they differ."""
    here, there = held(a), held(b)
    keys = [k for k in here if here[k] != there[k]]
    return {k: here[k] for k in keys}, {k: there[k] for k in keys}
