"""The exponential family of a model's globals: which one, the prior in it, what is conjugate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to, transforms

from numpyro_fed import expfam
from numpyro_fed.data import SiloData
from numpyro_fed.errors import ModelError
from numpyro_fed.expfam import Family
from numpyro_fed.sites import Site
from numpyro_fed.split import FederatedModel

FULL_UP_TO = 300
TOLERANCE = 1e-8  # of a remainder, relative, in double precision
POINTS = 2**22  # numbers, at most, in all points at which a function is looked at
GAUSSIAN = "gaussian"

Eta = dict[str, Any]


class Globals(NamedTuple):
    """The family of the globals, as pure functions.

    Attributes
    ----------
    family : Family
        A product: one joint Gaussian over all sites that take it, named ``"gaussian"``, and one
        member by name for each other site.
    prior : theta -> eta
        Natural parameters of the prior.
    marginals : eta -> {site: Distribution}
        Each site's marginal on its own support.
    rest : (theta, z) -> () or None
        What of the log prior is outside of the family; ``prior`` then leaves it out.
    """

    family: Family
    prior: Callable[[dict[str, Any]], Eta]
    marginals: Callable[[Eta], dict[str, dist.Distribution]]
    rest: Callable[[dict[str, Any], Array], Array] | None = None


def globals_of(fm: FederatedModel, spec: str | Mapping[str, str], prior: str = "exact") -> Globals:
    """Choose a family for each global site, by what the model's prior is affine in.

    Parameters
    ----------
    fm : FederatedModel
    spec : {"auto", "full", "diagonal"} or dict
        Covariance of the joint Gaussian; ``"auto"`` is full up to 300 dimensions. A dict chooses
        by site among ``"gaussian"``, ``"gamma"``, ``"beta"`` and ``"dirichlet"``, with the
        covariance under ``"covariance"``.
    prior : {"exact", "factor"}
        Whether to refuse what is outside of the family, or to leave it to a factor.

    Returns
    -------
    Globals

    Raises
    ------
    ModelError
        For a model without globals, and for a prior outside every family that its site can take.
    """
    chosen = dict(spec) if isinstance(spec, Mapping) else {"covariance": spec}
    covariance = chosen.pop("covariance", "auto")
    sites = fm.named("latent")
    if not sites:
        raise ModelError(
            "the model has no global latents, so that silos share nothing to infer. Use SFVI, "
            "which also learns parameters, or move what is shared out of the silo_plate."
        )
    if flat := [s.name for s in sites if s.name in fm.flat]:
        raise ModelError(
            f"the prior of the global site '{flat[0]}' is flat (its mask is False everywhere), and "
            "so improper: there is no posterior before the first visit. Give it a proper prior, "
            "however wide, such as dist.Normal(0, 100); or use SFVI."
        )
    if covariance not in ("auto", "full", "diagonal"):
        raise ValueError(f"family={covariance!r}: expected 'auto', 'full' or 'diagonal'.")
    if unknown := set(chosen) - {s.name for s in sites}:
        raise ValueError(
            f"family names {sorted(unknown)}, but the global sites are "
            f"{sorted(s.name for s in sites)}."
        )
    if covariance == "auto":
        covariance = "full" if fm.dim <= FULL_UP_TO else "diagonal"
    with jax.enable_x64(True):
        theta = _general(fm)
        kinds = {s.name: _asked(s, chosen.get(s.name)) or GAUSSIAN for s in sites}
        family = _product(sites, kinds, covariance)
        eta = _fit(lambda z: fm.log_prior(theta, z), family)
        outside: list[str] = []
        if not affine(lambda z: fm.log_prior(theta, z), family, eta):
            kinds = {
                s.name: _kind(s, chosen.get(s.name), covariance, fm, theta, prior) for s in sites
            }
            family = _product(sites, kinds, covariance)
            members = {s.name: (s, _member(s, kinds[s.name], covariance)) for s in sites}

            def of(names: Sequence[str]) -> Callable[[Array], Array]:
                return _terms(fm, theta, members, family, names)

            names = list(fm.prior_terms(theta, jnp.zeros(fm.dim)))
            outside = [n for n in names if not affine(of([n]), family, _fit(of([n]), family))]
            if outside and prior == "exact":
                raise _coupled(outside[0], covariance)
            eta = _fit(of([n for n in names if n not in outside]), family)
    learned = bool(fm.named("param")) and not outside
    fixed = jax.tree.map(np.asarray, eta)

    def inside(theta: dict[str, Any]) -> Eta:
        if learned:
            return family.fit(lambda z: fm.log_prior(theta, z) - family.log_base(z))
        return jax.tree.map(jnp.asarray, fixed)

    def rest(theta: dict[str, Any], z: Array) -> Array:
        known = expfam.inner(inside(theta), family.statistics(z))
        return fm.log_prior(theta, z) - family.log_base(z) - known

    def marginals(eta: Eta) -> dict[str, dist.Distribution]:
        return _marginals(fm, sites, kinds, family, eta)

    return Globals(family, inside, marginals, rest if outside else None)


def _terms(
    fm: FederatedModel,
    theta: dict[str, Any],
    members: Mapping[str, tuple[Site, Family]],
    family: Family,
    names: Sequence[str],
) -> Callable[[Array], Array]:
    """The log prior of some sites, over the base measure of the others."""

    def f(z: Array) -> Array:
        terms, total = fm.prior_terms(theta, z), family.log_base(z)
        for name in names:
            total += terms[name]
            if name in members:
                site, member = members[name]
                total -= member.log_base(z[site.start : site.stop])
        return total

    return f


def affine(f: Callable[[Array], Array], family: Family, eta: Eta) -> bool:
    """Whether ``f(z) - log h(z)`` is ``<eta, T(z)>`` up to a constant, in double precision.

    Looked at in more random points than there are statistics, as far as memory allows; an
    analytic remainder that is not constant shows in almost every one of them.
    """

    @jax.jit
    def several(z: Array) -> tuple[Array, Array]:
        return jax.vmap(lambda z: _remainder(f, family, eta, z))(z)

    return _constant(several, family, _count(eta))


def conjugate(fm: FederatedModel, chosen: Globals, stacks: Sequence[SiloData]) -> bool:
    """Whether every silo's log likelihood is affine in the statistics; silos come in stacks.

    Parameters without a prior are looked at in a general place, too.
    """
    if any(p.dim for p in fm.plates) or any(s.kind == "param" and s.plate for s in fm.sites):
        return False
    family = chosen.family
    with jax.enable_x64(True):
        theta = _general(fm)

        def of(data: SiloData) -> Callable[[Array], Array]:
            f = log_likelihood(fm, theta, data)
            return lambda z: f(z) + family.log_base(z)

        def fit(data: SiloData) -> Eta:
            return family.fit(lambda z: of(data)(z) - family.log_base(z))

        def at(data: SiloData, eta: Eta, z: Array) -> tuple[Array, Array]:
            return _remainder(of(data), family, eta, z)

        for stack in map(_double, stacks):
            eta = jax.jit(jax.vmap(fit))(stack)
            every = jax.jit(jax.vmap(jax.vmap(at, (0, 0, None)), (None, None, 0)))
            one = jax.tree.map(lambda a: a[0], eta)
            if not _constant(partial(every, stack, eta), family, _count(one)):
                return False
    return True


def _remainder(
    f: Callable[[Array], Array], family: Family, eta: Eta, z: Array
) -> tuple[Array, Array]:
    value = f(z) - family.log_base(z)
    return value, value - expfam.inner(eta, family.statistics(z))


def _constant(
    several: Callable[[Array], tuple[Array, Array]], family: Family, statistics: int
) -> bool:
    """Whether a remainder, of values of which there may be several a point, is constant."""
    largest = max(2, POINTS // max(family.dim, 1))
    points, batch, first = min(statistics + 2, largest), min(64, largest), None
    for i in range(-(-points // batch)):
        z = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (batch, family.dim))
        values, remainder = map(np.asarray, several(z))
        first = remainder[0] if first is None else first
        scale = 1 + np.abs(values).max(0) + np.abs(values - remainder).max(0)
        if not (np.abs(remainder - first).max(0) <= TOLERANCE * scale).all():
            return False
    return True


def _count(eta: Eta) -> int:
    """How many statistics a family has, at most."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(eta))


def _general(fm: FederatedModel) -> dict[str, Any]:
    """Parameters in a general place: at the first ones a model may be simpler than elsewhere."""
    r = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: a + r.normal(size=a.shape), _double(fm.init_theta(jax.random.key(0)))
    )


def log_likelihood(fm: FederatedModel, theta: Any, data: SiloData) -> Callable[[Array], Array]:
    """A silo's log likelihood as a function of the globals, for a model without local latents."""
    z_L = {plate: jnp.zeros((size, 0)) for plate, size in fm.sizes(data).items()}

    def f(z: Array) -> Array:
        rows = fm.log_silo(theta, z, z_L, data)
        return sum((v.sum() for v in rows.values()), jnp.zeros(()))

    return f


def _fit(f: Callable[[Array], Array], family: Family) -> Eta:
    """Natural parameters of a density, compiled: far quicker than one operation at a time."""
    return jax.jit(lambda: family.fit(lambda z: f(z) - family.log_base(z)))()


def _candidates(site: Site) -> list[str]:
    elementwise = {"Positive": ["gamma"], "UnitInterval": ["beta"], "Simplex": ["dirichlet"]}
    return [GAUSSIAN, *elementwise.get(site.support.split("^")[0], [])]


def _member(site: Site, kind: str, covariance: str) -> Family:
    if kind == GAUSSIAN:
        return expfam.gaussian(site.stop - site.start, covariance)
    if kind == "gamma":
        return expfam.gamma(site.shape)
    if kind == "beta":
        return expfam.beta(site.shape)
    return expfam.dirichlet(site.shape[:-1], site.shape[-1] + 1)


def _asked(site: Site, asked: str | None) -> str | None:
    """The family that the user asked for, if the site can have it."""
    if asked is not None and asked not in _candidates(site):
        raise ValueError(
            f"family of '{site.name}' is {asked!r}: on the support {site.support} expected one of "
            f"{_candidates(site)}."
        )
    return asked


def _kind(
    site: Site,
    asked: str | None,
    covariance: str,
    fm: FederatedModel,
    theta: dict[str, Any],
    prior: str,
) -> str:
    """The first family that the site's prior is in; if none is and none need be, the Gaussian."""
    rest = jax.random.normal(jax.random.key(2), (fm.dim,))

    def f(z: Array) -> Array:
        return fm.prior_terms(theta, rest.at[site.start : site.stop].set(z))[site.name]

    for kind in [asked] if asked else _candidates(site):
        family = _member(site, kind, covariance)
        if affine(f, family, _fit(f, family)):
            return kind
    if prior == "factor":
        return asked or GAUSSIAN
    raise _outside(site, covariance)


def _outside(site: Site, covariance: str) -> ModelError:
    instead = {
        "Positive": "dist.Gamma (also Exponential), or dist.LogNormal",
        "UnitInterval": "dist.Beta (also Uniform(0, 1))",
        "Simplex": "dist.Dirichlet",
    }.get(site.support.split("^")[0], "dist.Normal")
    full = "" if covariance == "full" else ", family='full' if it is a Gaussian with correlations"
    return ModelError(
        f"the prior of the global site '{site.name}' (support {site.support}) is outside of the "
        f"families in which its factors live. Use {instead}{full}, or prior='factor', which gives "
        "the server a factor for it; or SFVI, which takes any prior."
    )


def _coupled(name: str, covariance: str) -> ModelError:
    full = "" if covariance == "full" else " family='full' if it is linear and Gaussian,"
    return ModelError(
        f"the prior of the global site '{name}' depends on other global sites in a way that "
        f"the family cannot hold. Use{full} prior='factor', which gives the server a factor for "
        "it, or a non-centred form (numpyro.handlers.reparam with LocScaleReparam(0)) in which the "
        "sites are independent; or SFVI, which takes any prior."
    )


def _product(sites: Sequence[Site], kinds: Mapping[str, str], covariance: str) -> Family:
    members: dict[str, tuple[Any, Family]] = {}

    def place(s: Site) -> np.ndarray:
        """In int32, which JAX reads alike in either precision; a family is used in both."""
        return np.arange(s.start, s.stop, dtype=np.int32)

    joint = [place(s) for s in sites if kinds[s.name] == GAUSSIAN]
    if joint:
        places = np.concatenate(joint)
        members[GAUSSIAN] = (places, expfam.gaussian(len(places), covariance))
    for s in sites:
        if kinds[s.name] != GAUSSIAN:
            members[s.name] = (place(s), _member(s, kinds[s.name], covariance))
    return expfam.product(members)


def _double(tree: Any) -> Any:
    """The same numbers in double precision."""

    def one(a: Any) -> Any:
        a = np.asarray(a)
        return a.astype(np.float64) if a.dtype.kind == "f" else a

    return jax.tree.map(one, tree)


def _marginals(
    fm: FederatedModel, sites: Sequence[Site], kinds: Mapping[str, str], family: Family, eta: Eta
) -> dict[str, dist.Distribution]:
    def of(site: Site) -> dist.Distribution:
        place = slice(site.start, site.stop)
        found = expfam.marginal(family, eta, place, site.shape, site.event_dim)
        return _on_support(found, fm.supports[site.name]) if kinds[site.name] == GAUSSIAN else found

    return {site.name: of(site) for site in sites}


def _on_support(z: dist.Distribution, support: Any) -> dist.Distribution:
    """What a Gaussian in unconstrained space is on the support of its site."""
    bijection = biject_to(support)
    elementwise = bijection
    while isinstance(elementwise, transforms.IndependentTransform):
        elementwise = elementwise.base_transform
    if isinstance(elementwise, transforms.IdentityTransform):
        return z
    independent = z.base_dist if isinstance(z, dist.Independent) else z
    if isinstance(elementwise, transforms.ExpTransform) and isinstance(independent, dist.Normal):
        return dist.LogNormal(independent.loc, independent.scale).to_event(z.event_dim)
    return dist.TransformedDistribution(z, bijection)
