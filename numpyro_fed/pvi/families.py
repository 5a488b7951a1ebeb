"""The exponential family of a model's globals, and the prior's natural parameters in it.

A family is chosen for each site from the model's text: log densities of the prior are evaluated at
points of many scales, and a family fits where they are affine in its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to, transforms

from numpyro_fed.basics.errors import ModelError, one_of
from numpyro_fed.basics.programs import double_precision, jit_double
from numpyro_fed.basics.trees import double
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural, Ordinary, Product
from numpyro_fed.numerics.gaussian import FULL_COVARIANCE_UP_TO
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Site, Theta

# The largest departure from an affine function, in nats: an absolute part and one relative to the
# size of the terms. Double precision leaves some 1e-15 of that size for each operation; a function
# that is affine up to 1e-6 nats gives the same posterior.
NATS = 1e-6
ROUNDING = 1e-10


# Rounding errors, in units of eps times the size of all terms, that a likelihood of few rows may
# have. Of many rows they add up as a random walk, by the square root of the number.
ROUNDINGS = 8
GAUSSIAN = "gaussian"

# Numbers in all test points together, 32 MB in double precision: a model of a million globals is
# tested at fewer points.
POINTS = 2**22
NEAR = 16  # test points close to a density


class Globals(NamedTuple):
    """The family of the globals, as pure functions.

    ``family``: A product: one joint Gaussian over all sites that take it, named ``"gaussian"``, and
        one member by name for each other site.
    ``prior``, ``theta -> eta``: Natural parameters of the prior.
    ``marginals``, ``eta -> {site: Distribution}``: Each site's marginal on its own support.
    ``points`` (n, dim), ``reach`` (dim,): Where a likelihood is tested for conjugacy, and the
        largest test value of each global.
    ``prior_outside``, ``(theta, z) -> () or None``: The part of the log prior that is outside of
        the family; ``prior`` then leaves it out.
    """

    family: Product
    prior: Callable[[dict[str, Any]], Natural]
    marginals: Callable[[Natural], dict[str, dist.Distribution]]
    points: np.ndarray
    reach: np.ndarray
    prior_outside: Callable[[dict[str, Any], Array], Array] | None = None


class Density(NamedTuple):
    """A density to test for a family: its logarithm is a sum of ``terms``.

    It is tested at ``points`` (n, dim), whose coordinates are at most ``reach`` (dim,).
    """

    terms: Callable[[Array], Array]
    family: Product
    points: np.ndarray
    reach: np.ndarray


def globals_of(fm: FederatedModel, spec: str | Mapping[str, str], prior: str = "exact") -> Globals:
    """Choose a family for each global site: one in whose statistics its log prior is affine.

    ``spec`` is the covariance of the joint Gaussian, ``"auto"`` (full up to 300 dimensions),
    ``"full"`` or ``"diagonal"``; or families by site, with the covariance under ``"covariance"``. A
    prior outside every family that its site can take is refused as a ModelError, or, by
    ``prior="factor"``, left to the server's own factor. A model without globals is refused, too.
    """
    # The families that the user asks for by site, and the covariance of the Gaussian.
    chosen = dict(spec) if isinstance(spec, Mapping) else {"covariance": spec}
    covariance = chosen.pop("covariance", "auto")
    sites = fm.named("latent")
    if not sites:
        raise ModelError(
            "the model has no global latents, so that silos share nothing to infer. Use SFVI, "
            "which also learns parameters, or move what is shared out of the silo_plate."
        )
    one_of("family", covariance, "auto", "full", "diagonal")
    if unknown := set(chosen) - {s.name for s in sites}:
        raise ValueError(
            f"family names {sorted(unknown)}, but the global sites are "
            f"{sorted(s.name for s in sites)}."
        )
    for s in sites:
        if s.name in chosen and chosen[s.name] not in _candidates(s):
            raise ValueError(
                f"family of '{s.name}' is {chosen[s.name]!r}: on the support {s.support} expected "
                f"one of {_candidates(s)}."
            )
    if covariance == "auto":
        covariance = "full" if fm.dim <= FULL_COVARIANCE_UP_TO else "diagonal"
    reach, points = _reach_and_points(fm)
    kinds, family, eta, outside = _choose(fm, chosen, covariance, prior, points, reach)
    learned = bool(fm.named("param")) and not outside
    fixed = jax.tree.map(np.asarray, eta)

    def prior_inside(theta: dict[str, Any]) -> Natural:
        # With parameters the prior's natural parameters are a function of them, and are fitted in
        # the program. Without, they are constants, fitted once in double precision.
        if learned:
            return family.fit(lambda z: fm.log_prior(theta, z) - family.log_base(z))
        return jax.tree.map(lambda a: jnp.asarray(a.copy()), fixed)  # or JAX keeps a precision

    def log_outside(theta: dict[str, Any], z: Array) -> Array:
        known = expfam.inner(prior_inside(theta), family.statistics(z))
        return fm.log_prior(theta, z) - family.log_base(z) - known

    def marginals(eta: Natural) -> dict[str, dist.Distribution]:
        found = {}
        for site in fm.named("latent"):
            place, shape = slice(site.start, site.stop), site.shape
            if kinds[site.name] != GAUSSIAN:
                found[site.name] = family.marginal(eta, place, shape, site.event_dim)
                continue
            bijection = biject_to(fm.structure.supports[site.name])
            z = family.marginal(eta, place, shape, bijection.domain.event_dim)
            found[site.name] = _on_support(z, bijection)
        return found

    prior_outside = log_outside if outside else None
    return Globals(family, prior_inside, marginals, points, reach, prior_outside)


def _choose(
    fm: FederatedModel,
    chosen: dict[str, str],
    covariance: str,
    prior: str,
    points: np.ndarray,
    reach: np.ndarray,
) -> tuple[dict[str, str], Product, Natural, list[str]]:
    """Return the family of each site, their product, the prior in it, and sites outside of it."""
    # A site's family is the one that the user asks for. Else it is the Gaussian, if the whole prior
    # is Gaussian; and else the first candidate that contains the site's own prior. Natural
    # parameters of the prior's part in the family follow, and the sites whose prior is not in it.
    sites, theta = fm.named("latent"), generic_parameters(fm)
    other_sites = np.random.default_rng(2).normal(size=fm.dim)

    def alone(site: Site, kind: str) -> Density:
        """Return the prior of a site, all others at fixed values, and its family."""
        place = slice(site.start, site.stop)

        def term(z: Array) -> Array:
            at = jnp.asarray(other_sites).at[place].set(z)
            return fm.prior_terms(theta, at)[site.name][None]

        member = _member(site, kind, covariance)
        family = expfam.product({kind: (np.arange(member.dim), member)})
        return Density(term, family, points[:, place], reach[place])

    def of_site(name: str, family: Product) -> Density:
        """Return the terms of a site's log prior, relative to the base measure."""
        site = next((s for s in sites if s.name == name), None)

        def terms(z: Array) -> Array:
            found = [family.log_base(z), fm.prior_terms(theta, z)[name]]
            if site is not None:
                member = _member(site, kinds[name], covariance)
                found.append(-member.log_base(z[site.start : site.stop]))
            return jnp.stack(found)

        return Density(terms, family, points, reach)

    # Single precision could not tell an affine function from one that is nearly so.
    with double_precision():
        kinds = {s.name: chosen.get(s.name, GAUSSIAN) for s in sites}
        family = _product(sites, kinds, covariance)
        pairs = [
            (s, kind)
            for s in sites
            for kind in ([chosen[s.name]] if s.name in chosen else _candidates(s))
        ]
        each = [alone(*pair) for pair in pairs]
        # Where a site has other candidates the whole is hardly Gaussian: one program for both.
        many = len({s.name for s, _ in pairs}) < len(pairs)
        whole = Density(
            lambda z: jnp.stack(list(fm.prior_terms(theta, z).values())), family, points, reach
        )
        (eta, affine), *fits = _fit_densities([whole, *(each if many else [])])
        if affine:
            return kinds, family, eta, []
        # Not all Gaussian: each site by itself, with all others at fixed values. Then all sites
        # together, since priors may be coupled in a way that no product of families holds.
        found: dict[str, str] = {}
        for (site, kind), (_, affine) in zip(pairs, fits or _fit_densities(each), strict=True):
            if affine:
                found.setdefault(site.name, kind)
        if prior == "exact" and (none := [s for s in sites if s.name not in found]):
            raise _outside_error(none[0], covariance)
        kinds = {s.name: found.get(s.name, kinds[s.name]) for s in sites}
        family = _product(sites, kinds, covariance)
        names = list(jax.eval_shape(fm.prior_terms, theta, np.zeros(fm.dim)))
        fits = _fit_densities([of_site(name, family) for name in names])
        outside = [name for name, (_, affine) in zip(names, fits, strict=True) if not affine]
        if outside and prior == "exact":
            raise _coupled_error(outside[0], covariance)
        # Natural parameters are linear in a log density: those of a sum are the sum.
        inside = [eta for name, (eta, _) in zip(names, fits, strict=True) if name not in outside]
        nothing = jax.tree.map(np.zeros_like, fits[0][0])
        eta = jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), nothing, *inside)
    return kinds, family, eta, outside


def _reach_and_points(fm: FederatedModel) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest test value (dim,) of each global, and fixed test points (n, dim)."""
    # Up to there a bijection is precise: exp(30) is an ordinary number, and at 14 a sigmoid is
    # 1 - 8e-7, whose difference from one still has half of the digits of double precision.
    reach = np.full(fm.dim, np.inf)
    for site in fm.named("latent"):
        bijection = _elementwise(biject_to(fm.structure.supports[site.name]))
        if not isinstance(bijection, transforms.IdentityTransform):
            exact = isinstance(bijection, transforms.ExpTransform)
            reach[site.start : site.stop] = 30.0 if exact else 14.0
    # A fixed seed: all parties, and later runs, must come to the same decision.
    r = np.random.default_rng(1)
    levels = np.repeat(10.0 ** np.arange(-2, 7), 4)[:, None]
    scale = np.concatenate([levels + np.zeros(fm.dim), 10 ** r.uniform(-2, 6, (20, fm.dim))])
    around_zero = np.minimum(scale, reach / 3) * r.normal(size=scale.shape)
    drawn = fm.draw_prior(1, 16)
    from_prior = np.zeros((0, fm.dim)) if drawn is None else np.nan_to_num(drawn)
    points = r.permutation(np.concatenate([from_prior, around_zero]))
    return reach, np.clip(points, -reach, reach)[: max(16, POINTS // max(fm.dim, 1))]


def _points_near(family: Product, reach: np.ndarray, eta: Natural) -> tuple[Array, Array]:
    """Return a density's centre (dim,), and points (16, dim) some sds from it."""
    # Where ``eta`` leaves a Gaussian flat, its points are as far away as the bijection is precise.
    # Points that are not finite, of an improper density, become zero.
    furthest = np.minimum(reach, 1e6)
    width = jnp.where(jnp.arange(NEAR) % 2, 1.0, 3.0)[:, None]
    centres, points = {}, {}
    for name, (_, member) in family.members.items():
        noise = width * np.random.default_rng(2).normal(size=(NEAR, member.dim))
        if name == GAUSSIAN:

            def bowl(z: Array, far: np.ndarray = furthest[family.places[name]]) -> Array:
                return -0.5 * ((z / far) ** 2).sum()

            psi = member.ordinary(jax.tree.map(jnp.add, eta[name], member.fit(bowl)))
            points[name] = jax.vmap(member.draw, (None, 0))(psi, noise)
            centres[name] = member.centre(psi)
        else:
            centres[name] = member.centre(member.ordinary(eta[name]))
            points[name] = centres[name] + 0.3 * noise

    def join(parts: dict[str, Array]) -> Array:
        z = family.join(parts)
        return jnp.clip(jnp.where(jnp.isfinite(z), z, 0.0), -reach, reach)

    return join(centres), jax.vmap(join)(points)


def generic_parameters(fm: FederatedModel) -> dict[str, Any]:
    """Return general values of theta: at its first values, often zero, a model may be simpler."""
    if not fm.named("param"):
        return {}
    r = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: a + r.normal(size=a.shape), double(fm.init_theta(jax.random.key(0)))
    )


def _fit_densities(densities: Sequence[Density]) -> list[tuple[Natural, bool]]:
    """Return natural parameters of each density, and whether they describe it exactly."""
    # All densities are tested in one program: compiling one for each site takes much longer.

    @jit_double
    def fit_all(points: list[Array]) -> list[tuple[Natural, Array]]:
        found = []
        for (terms, family, _, reach), at in zip(densities, points, strict=True):

            def over_base(
                z: Array, terms: Callable[[Array], Array] = terms, family: Product = family
            ) -> Array:
                return jnp.append(terms(z), -family.log_base(z))

            found.append(_fitted(over_base, family, reach, at))
        return found

    return [(eta, bool(affine)) for eta, affine in fit_all([d.points for d in densities])]


def _fitted(
    rows: Callable[[Array], Array],
    family: Product,
    reach: np.ndarray,
    points: Array,
    prior: Natural | None = None,
) -> tuple[Natural, Array]:
    """Return ``eta``, and whether a sum of ``rows`` is ``<eta, T(z)>`` plus a constant.

    In double precision a few points at every scale are enough: a term that is not affine either
    grows with the distance, or shows close to the density, or to its product with a prior.
    """
    eta = family.fit(lambda z: rows(z).sum())
    around = eta if prior is None else jax.tree.map(jnp.add, prior, eta)
    centre, close = _points_near(family, reach, around)
    departure_at = partial(departure, rows, family, eta, centre)
    nats, size = jax.lax.map(departure_at, jnp.concatenate([points, close]), batch_size=4)
    return eta, (jnp.isfinite(nats) & (jnp.abs(nats) <= NATS + ROUNDING * size)).all()


def departure(
    rows: Callable[[Array], Array], family: Family[Any], eta: Natural, centre: Array, z: Array
) -> tuple[Array, Array]:
    """Return the departure of a sum of ``rows`` from ``<eta, T>`` between two points, in nats.

    The second value is the size of the terms, for an allowance for rounding. Differences are taken
    row by row, so that little cancels where the two points are close.
    """
    at_z, at_centre = rows(z), rows(centre)
    linear = jax.tree.map(jnp.multiply, eta, family.increment(centre, z - centre))
    linear_terms = [part.ravel() for part in jax.tree.leaves(linear)]
    size = sum(jnp.abs(part).sum() for part in [at_z, at_centre, *linear_terms])
    return (at_z - at_centre).sum() - sum(part.sum() for part in linear_terms), jnp.asarray(size)


def _product(sites: Sequence[Site], kinds: Mapping[str, str], covariance: str) -> Product:
    """Return the product of one joint Gaussian, and one member for each other site."""
    members: dict[str, tuple[np.ndarray, Family[Any]]] = {}
    # In int32, which JAX reads alike in either precision.
    places = {s.name: np.arange(s.start, s.stop, dtype=np.int32) for s in sites}
    joint = [places[s.name] for s in sites if kinds[s.name] == GAUSSIAN]
    if joint:
        together = np.concatenate(joint)
        members[GAUSSIAN] = (together, expfam.gaussian(len(together), covariance))
    for s in sites:
        if kinds[s.name] != GAUSSIAN:
            members[s.name] = (places[s.name], _member(s, kinds[s.name], covariance))
    return expfam.product(members)


def _on_support(z: dist.Distribution, bijection: transforms.Transform) -> dist.Distribution:
    """Return the distribution on the site's support of a Gaussian in unconstrained space."""
    elementwise = _elementwise(bijection)
    if isinstance(elementwise, transforms.IdentityTransform):
        return z
    independent = z.base_dist if isinstance(z, dist.Independent) else z
    if isinstance(elementwise, transforms.ExpTransform) and isinstance(independent, dist.Normal):
        return dist.LogNormal(independent.loc, independent.scale).to_event(z.event_dim)
    return dist.TransformedDistribution(z, bijection)


def _elementwise(bijection: transforms.Transform) -> transforms.Transform:
    """Return the bijection of one event, without the wrappers for independent axes."""
    while isinstance(bijection, transforms.IndependentTransform):
        bijection = bijection.base_transform
    return bijection


def _candidates(site: Site) -> list[str]:
    # The Gaussian first: one joint covariance over all sites that take it.
    elementwise = {"Positive": ["gamma"], "UnitInterval": ["beta"], "Simplex": ["dirichlet"]}
    return [GAUSSIAN, *elementwise.get(site.support.split("^")[0], [])]


def _member(site: Site, kind: str, covariance: str) -> Family[Any]:
    if kind == GAUSSIAN:
        return expfam.gaussian(site.stop - site.start, covariance)
    if kind == "gamma":
        return expfam.gamma(site.shape)
    if kind == "beta":
        return expfam.beta(site.shape)
    return expfam.dirichlet(site.shape[:-1], site.shape[-1] + 1)


def _outside_error(site: Site, covariance: str) -> ModelError:
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


def _coupled_error(name: str, covariance: str) -> ModelError:
    full = "" if covariance == "full" else " family='full' if it is linear and Gaussian,"
    return ModelError(
        f"the prior of the global site '{name}' depends on other global sites in a way that "
        f"the family cannot hold. Use{full} prior='factor', which gives the server a factor for "
        "it, or a non-centred form (numpyro.handlers.reparam with LocScaleReparam(0)) in which the "
        "sites are independent; or SFVI, which takes any prior."
    )


def conjugacy(fm: FederatedModel, chosen: Globals) -> Callable[[Sequence[SiloData]], bool]:
    """Return a function that says of stacks of silos whether their likelihoods are conjugate."""
    # Latents of rows, and private parameters, would have to be integrated out or fitted first.
    if any(p.dim for p in fm.plates) or any(s.kind == "param" and s.plate for s in fm.sites):
        return lambda stacks: False
    family = chosen.family
    theta = generic_parameters(fm)

    @jit_double
    def all_affine(stack: SiloData, points: Array) -> Array:
        fixed = family, chosen.reach, points, chosen.prior(theta)
        return jax.vmap(lambda data: _fitted(row_terms(fm, theta, data), *fixed)[1])(stack).all()

    def is_conjugate(stacks: Sequence[SiloData]) -> bool:
        with double_precision():
            return all(all_affine(double(stack), chosen.points) for stack in stacks)

    return is_conjugate


def row_terms(fm: FederatedModel, theta: Theta, data: SiloData) -> Callable[[Array], Array]:
    """Return the rows' log likelihoods (n,) as a function of the globals, without locals."""
    return lambda z: jnp.concatenate([jnp.zeros(0), *fm.log_silo(theta, z, {}, data).values()])


def misfit(
    rows: Callable[[Array], Array],
    family: Family[Any],
    eta: Natural,
    start: Ordinary,
    num_rows: int,
    psi: Ordinary,
) -> Array:
    """Return the largest departure of a likelihood from ``<eta, T>``, in nats, beyond rounding."""
    centre = family.centre(psi)
    draws = jax.vmap(family.draw, (None, 0))
    z = draws(psi, family.noise(jax.random.key(0), 8))
    start_draws = draws(start, family.noise(jax.random.key(1), 4))
    start_draws = jnp.where(jnp.isfinite(start_draws), start_draws, centre)  # a prior may be flat
    departure_at = partial(departure, rows, family, eta, centre)
    nats, size = jax.vmap(departure_at)(jnp.concatenate([z, start_draws]))
    # Rounding within a row is about as large as the effect of rounding the globals.
    within_rows = jnp.linalg.norm(jax.jvp(rows, (centre,), (centre,))[1])
    eps = max(ROUNDINGS, 2 * math.sqrt(num_rows)) * jnp.finfo(centre.dtype).eps
    rounding = eps * (size + within_rows)
    return (jnp.abs(nats) - rounding).max()
