r"""The proposal of the importance correction: the fitted guide, and wider distributions.

A guide that is too narrow, or that sits in one of several modes, gives weights that look perfect at
its own draws. So half of the draws come from wider distributions, and all are weighed by the
density of the mixture (Hesterberg 1995; Owen and Zhou 2000, "Safe and effective importance
sampling"), with fixed numbers of draws from each part:

.. math::
    q_{\text{mix}} = \alpha_0\, q + \sum_{k} \alpha_k\, t_3(\bar m, (s_k L)(s_k L)')
    + \sum_{k} \alpha_k\, \tfrac1d \sum_j t_{10}(\bar m, (s_k^{(j)} L)(s_k^{(j)} L)')
    + \alpha_p\, t_3(m_p, \mathrm{diag}(s_p^2))
    + \sum_{c,\, l} \alpha_c\, t_3(\bar m, (S_{cl} L)(S_{cl} L)')_{-c}\, p(z_c \mid z_{-c}),

with mean :math:`\bar m` and a root ``L`` of the covariance of ``q``, and median :math:`m_p` and
spread :math:`s_p` of the prior. :math:`s_k^{(j)}` stretches the direction of coordinate ``j``
alone. A weight is then bounded wherever one of the parts covers the
posterior. A mode that the guide never visits shows as few draws of large weight.

The last parts are for the necks of funnels, such as ``beta ~ Normal(0, tau)`` for a small ``tau``.
There is one for each group of latents :math:`z_c` whose prior depends on the same other latents
(its setters). The part draws the setters from a wider distribution around the guide, by
:math:`S_{cl}`, the remaining latents as wide as the guide, and :math:`z_c` from its prior given
these.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from scipy import stats
from scipy.stats import qmc

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import Shared
from numpyro_fed.expfam.base import Eps
from numpyro_fed.guides.base import GlobalGuide
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.priors import Funnel
from numpyro_fed.model.sites import Site

# Share of the draws from wider distributions. A perfect guide loses at most a factor of two in
# effective draws; a smaller share shows a missed mode by fewer draws.
SHARE = 0.5
SCALES = (2.5, 8.0, 25.0)  # times the guide's own: each about three times the one before
# Times as wide as the fit in one coordinate at a time. A scale's logarithm has a tail that falls as
# an exponential and not as a normal density; in four dimensions and more the parts above, wide in
# all coordinates at once, are too thin there.
STRETCHES = (3.0, 10.0)
NECKS = 0.5  # number of draws from all necks together, as a multiple of those wider draws
# Scales of a funnel's setters. A log scale at 8 sds moves its children's spread by exp(8 sds); a
# wider part would take draws from these two.
NECK_SCALES = (2.5, 8.0)
# Degrees of freedom of the t distributions. Three is the least whole number with a finite
# variance, so their tails are heavier than those of almost any posterior.
FREEDOM = 3
# The same for the parts of a mixture that stands in the place of a guide. On a registry of four
# hospitals k-hat of the first weighing was 0.4 to 0.8 with eight, and 0.8 with a normal
# distribution; fewer lose more effective draws, the more dimensions there are.
OWN_FREEDOM = 10
TINY = 1e-12  # from zero and one, where quantiles are infinite
NUM_PARTS = 4  # of a mixture: with eight, k-hat came out larger, with two fewer draws counted
FULL_UP_TO = 100  # latents; beyond it the covariance of the draws is taken as diagonal
PRIOR_DRAWS = 512  # for quantiles of the prior, which need not be exact

Noise = TypeVar("Noise")


class Place(NamedTuple):
    """The mean (dim,) and a lower triangular root (dim, dim) of the covariance of draws."""

    centre: Array
    root: Array


class StandardPoints(NamedTuple):
    """Points (n, dim) of a standard Student t, and uniform numbers (n,) that choose parts."""

    eps: np.ndarray
    part: np.ndarray

    @classmethod
    def of(cls, key: Array, n: int, dim: int) -> StandardPoints:
        """Return points that fill space more evenly than independent ones (Sobol, scrambled).

        Averages over them have smaller errors, which are still zero on average (Owen 1997).
        """
        seed = int(jax.random.bits(key))
        with warnings.catch_warnings():  # they need not be a power of two
            warnings.simplefilter("ignore", UserWarning)
            u = qmc.Sobol(dim + 2, seed=seed).random(n)
        u = np.clip(u, TINY, 1 - TINY)
        shrunk = np.sqrt(stats.chi2.ppf(u[:, -2], OWN_FREEDOM) / OWN_FREEDOM)
        return cls(stats.norm.ppf(u[:, :dim]) / shrunk[:, None], u[:, -1])


class Bends(NamedTuple):
    r"""Powers that make tails of coordinates normal, one on each side of zero.

    A coordinate ``u`` of width ``s`` on its side becomes
    :math:`v = \pm k\, ((1 + |u| / s)^p - 1)` with :math:`k = 1 / (2^p - 1)`, so that :math:`s` goes
    to one. A tail that falls as an exponential, as that of the log of a scale towards zero, is
    normal after it with ``p`` near a half. With a power and a width of one nothing is bent.

    Attributes
    ----------
    width, power : (2, dim)
        Below zero, and above.
    """

    width: Array
    power: Array

    @classmethod
    def none(cls, dim: int) -> Bends:
        """Return powers that bend nothing."""
        return cls(jnp.ones((2, dim)), jnp.ones((2, dim)))

    def straight(self, u: Array) -> tuple[Array, Array]:
        """Return bent coordinates (..., dim) of ``u``, and the log determinant (...)."""
        s, p, k = self._on_side_of(u)
        far = jnp.log1p(jnp.abs(u) / s)
        v = jnp.where(p == 1, jnp.abs(u) / s, k * jnp.expm1(p * far))
        return jnp.sign(u) * v, (jnp.log(k * p / s) + (p - 1) * far).sum(-1)

    def back(self, v: Array) -> Array:
        """Return the coordinates (..., dim) that are bent to ``v``."""
        s, p, k = self._on_side_of(v)
        far = jnp.where(p == 1, jnp.abs(v), jnp.expm1(jnp.log1p(jnp.abs(v) / k) / p))
        return jnp.sign(v) * s * far

    def _on_side_of(self, u: Array) -> tuple[Array, Array, Array]:
        """Return width, power and the factor ``k`` on the side of each coordinate (..., dim)."""
        s, p = (jnp.where(u < 0, of_sides[0], of_sides[1]) for of_sides in self)
        return s, p, 1 / jnp.expm1(p * math.log(2))


class Mixture(NamedTuple):
    """A mixture of Student t distributions of bent coordinates, in the place of the guide.

    Attributes
    ----------
    log_shares : (K,)
        Minus infinity for a part without weight.
    centres : (K, dim)
    roots : (K, dim, dim)
        Lower triangular roots of the scale matrices.
    frame : Place
        Coordinates are whitened by it before they are bent.
    bends : Bends
    """

    log_shares: Array
    centres: Array
    roots: Array
    frame: Place
    bends: Bends

    @classmethod
    def straight(cls, log_shares: Array, centres: Array, roots: Array) -> Mixture:
        """Return the mixture of the coordinates themselves."""
        dim = centres.shape[1]
        return cls(log_shares, centres, roots, Place(jnp.zeros(dim), jnp.eye(dim)), Bends.none(dim))

    @property
    def place(self) -> Place:
        """Return the mean of all parts, and a root of their covariance, as if nothing were bent."""
        shares = jnp.exp(self.log_shares)
        mean = shares @ self.centres
        away = (self.centres - mean)[..., None]
        columns = jnp.sqrt(shares)[:, None, None] * jnp.concatenate([self.roots, away], -1)
        root = linalg.root_of(jnp.concatenate(list(columns), -1))
        return Place(self.frame.centre + self.frame.root @ mean, self.frame.root @ root)

    def at(self, standard: StandardPoints) -> Array:
        """Return draws (n, dim), from points of the standard Student t and of its parts."""
        part = jnp.searchsorted(jnp.cumsum(jnp.exp(self.log_shares)), standard.part)
        part = jnp.minimum(part, len(self.log_shares) - 1)
        bent = self.centres[part] + (self.roots[part] @ standard.eps[..., None])[..., 0]
        return self.frame.centre + self.bends.back(bent) @ self.frame.root.T

    def log_prob(self, z: Array) -> Array:
        """Return the log density at ``z`` (dim,)."""
        u = linalg.solve(self.frame.root, z - self.frame.centre)
        bent, log_det = self.bends.straight(u)
        parts = [
            _log_student(centre, root, OWN_FREEDOM, bent)
            for centre, root in zip(self.centres, self.roots, strict=True)
        ]
        log_det -= jnp.log(jnp.diagonal(self.frame.root)).sum()
        return jax.nn.logsumexp(self.log_shares + jnp.stack(parts)) + log_det


class Proposal(NamedTuple, Generic[Noise]):
    """A mixture of a guide and wider distributions.

    Attributes
    ----------
    own : int
        The number of draws from the guide; they come first.
    noise : key -> noise
    draw : (Shared, noise) -> (z_G, log_density)
        All draws (n, dim), and the log density of the mixture at each (n,).
    """

    own: int
    noise: Callable[[Array], Noise]
    draw: Callable[[Shared, Noise], tuple[Array, Array]]


class Part(NamedTuple):
    """A wider part of the mixture: draws (key, n) -> (n, dim), and its log density at a point."""

    sample: Callable[[Array, int], Array]
    log_prob: Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class WideParts:
    """The wider parts of a proposal: how many draws come from each, and their distributions.

    Attributes
    ----------
    model : FederatedModel
    spread : pair of (dim,) arrays, or None
        The prior's median and spread.
    num_own : int
        The number of draws that are left for what the parts are wider than.
    numbers : tuple of int
        The number of draws from each part.
    """

    model: FederatedModel
    spread: tuple[np.ndarray, np.ndarray] | None
    num_own: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, fm: FederatedModel, num_draws: int, share: float) -> WideParts:
        """Return the parts of a proposal with so many draws, a ``share`` of them wider."""
        # Properties of the text, the same for all parties and all fits.
        spread, funnels = prior_spread(fm), fm.global_prior.funnels
        num_wide = len(SCALES) + len(STRETCHES) + (spread is not None)
        wide = [int(share * num_draws / num_wide)] * num_wide
        necks = [int(NECKS * share * num_draws / len(funnels)) for _ in funnels]
        return cls(fm, spread, num_draws - sum(wide + necks), (*wide, *necks))

    def parts(self, theta: Theta, place: Place) -> list[Part]:
        """Return the parts around a place, in the order of :attr:`numbers`."""
        centre, L = place
        parts = [_student(centre, s * L) for s in SCALES]
        parts += [_stretched(centre, L, s) for s in STRETCHES]
        if self.spread is not None:
            parts.append(_student(jnp.asarray(self.spread[0]), jnp.diag(self.spread[1])))
        funnels = self.model.global_prior.funnels
        return parts + [_neck(self.model, funnel, theta, centre, L) for funnel in funnels]

    def sample(self, key: Array, theta: Theta, place: Place) -> Array:
        """Return draws of all parts (sum(numbers), dim), part after part."""
        keys = jax.random.split(key, len(self.numbers))
        drawn = zip(self.parts(theta, place), keys, self.numbers, strict=True)
        empty = jnp.zeros((0, self.model.dim))
        return jnp.concatenate([empty, *(part.sample(key, n) for part, key, n in drawn if n)])

    def log_density(self, log_own: Array, theta: Theta, place: Place, z: Array) -> Array:
        """Return the log density (m,) of the whole proposal at ``z`` (m, dim).

        ``log_own`` (m,) is that of what the parts are wider than.
        """
        used = [
            (part, n) for part, n in zip(self.parts(theta, place), self.numbers, strict=True) if n
        ]
        densities = jnp.stack([log_own, *(jax.vmap(part.log_prob)(z) for part, _ in used)])
        numbers = jnp.array([self.num_own, *(n for _, n in used)])
        log_shares = jnp.log(numbers / numbers.sum())
        return jax.nn.logsumexp(log_shares[:, None] + densities, axis=0)


def proposal(
    fm: FederatedModel, guide: GlobalGuide[Eps], num_draws: int, share: float = SHARE
) -> Proposal[Any]:
    """Return the mixture; the guide alone, if its density is known at its own draws only."""

    def draw_own(shared: Shared, noise: Eps) -> tuple[Array, Array]:
        return guide.draws(shared.frame, shared.guide, noise)[1:]

    if not share or not fm.dim or not guide.density_everywhere:
        return Proposal(num_draws, lambda key: guide.noise(key, num_draws), draw_own)
    wide = WideParts.of(fm, num_draws, share)

    def noise(key: Array) -> tuple[Eps, Array]:
        key_own, key_wide = jax.random.split(key)
        return guide.noise(key_own, wide.num_own), key_wide

    def draw(shared: Shared, noise: tuple[Eps, Array]) -> tuple[Array, Array]:
        z, log_q = draw_own(shared, noise[0])
        place = Place(z.mean(0), root_of_draws(z))
        far = wide.sample(noise[1], shared.theta, place)
        log_q_far = jax.vmap(partial(guide.density, shared.frame, shared.guide))(far)
        z = jnp.concatenate([z, far])
        return z, wide.log_density(jnp.append(log_q, log_q_far), shared.theta, place, z)

    return Proposal(wide.num_own, noise, draw)


@dataclass(frozen=True, eq=False)
class MixtureProposal:
    """Draws from a mixture and from wider parts, and their density, each compiled once."""

    wide: WideParts

    def draw(self, key: Array, theta: Theta, own: Mixture) -> Array:
        """Return draws (n, dim), those from the mixture first."""
        key_own, key_wide = jax.random.split(key)
        n, dim = self.wide.num_own, self.wide.model.dim
        points = StandardPoints.of(key_own, n, dim)
        return self._all_draws(key_wide, theta, own, points)

    @cached_property
    def _all_draws(self) -> Callable[[Array, Theta, Mixture, StandardPoints], Array]:
        @jax.jit
        def all_draws(key: Array, theta: Theta, own: Mixture, points: StandardPoints) -> Array:
            return jnp.concatenate([own.at(points), self.wide.sample(key, theta, own.place)])

        return all_draws

    @cached_property
    def log_density(self) -> Callable[[Theta, Mixture, Array], Array]:
        """Return the function to the log density (m,) at ``z`` (m, dim)."""

        @jax.jit
        def log_density(theta: Theta, own: Mixture, z: Array) -> Array:
            log_own = jax.vmap(own.log_prob)(z)
            return self.wide.log_density(log_own, theta, own.place, z)

        return log_density


def _student(centre: Array, L: Array) -> Part:
    return Part(
        lambda key, n: centre + _standard_student(key, n, len(centre), FREEDOM) @ L.T,
        partial(_log_student, centre, L, FREEDOM),
    )


def _stretched(centre: Array, L: Array, stretch: float) -> Part:
    """Return the part that is as wide as the fit but for one coordinate at a time.

    With :math:`u = L^{-1} (z - m)`, coordinate ``j`` varies along :math:`a_j`, row ``j`` of ``L``
    made a unit vector. Each of these directions is stretched in its turn. In many dimensions a
    distribution that is wide in all of them has next to no density along any of them.
    """
    axes = L / jnp.linalg.norm(L, axis=1, keepdims=True)
    dim = len(centre)

    def sample(key: Array, n: int) -> Array:
        u = _standard_student(key, n, dim, OWN_FREEDOM)
        axis = axes[jnp.arange(n) % dim]
        u = u + (stretch - 1) * (u * axis).sum(1, keepdims=True) * axis
        return centre + u @ L.T

    def log_prob(z: Array) -> Array:
        u = linalg.solve(L, z - centre)
        along = axes @ u
        squared = (u**2).sum() - (1 - stretch**-2) * along**2
        log_p = -(OWN_FREEDOM + dim) / 2 * jnp.log1p(squared / OWN_FREEDOM) - math.log(stretch)
        at_centre = _log_student(centre, L, OWN_FREEDOM, centre)
        return at_centre + jax.nn.logsumexp(log_p) - math.log(dim)

    return Part(sample, log_prob)


def _log_student(centre: Array, L: Array, freedom: float, z: Array) -> Array:
    """Return the log density () of a Student t at ``z`` (dim,)."""
    dim = len(centre)
    at_centre = gammaln((freedom + dim) / 2) - gammaln(freedom / 2)
    at_centre -= dim / 2 * math.log(freedom * math.pi)
    standardised = linalg.solve(L, z - centre)
    log_tail = (freedom + dim) / 2 * jnp.log1p((standardised**2).sum() / freedom)
    return at_centre - jnp.log(jnp.diagonal(L)).sum() - log_tail


def _standard_student(key: Array, n: int, dim: int, freedom: int) -> Array:
    """Return draws (n, dim) of a standard Student t."""
    # Its gamma variate, whose sampler takes seconds to compile, is half a sum of squares where the
    # degrees of freedom are a whole number.
    normal = jax.random.normal(key, (n, dim + freedom))
    return normal[:, :dim] / jnp.sqrt((normal[:, dim:] ** 2).mean(1, keepdims=True))


def _neck(fm: FederatedModel, funnel: Funnel, theta: Theta, centre: Array, L: Array) -> Part:
    """Return the part for one funnel: wide setters, and children from their prior given them."""
    prior = fm.global_prior
    others = np.setdiff1d(np.arange(fm.dim), _coordinates(funnel.children))
    is_setter = np.isin(others, _coordinates(funnel.setters))
    root = linalg.root_of(L[others])
    scales = [jnp.where(is_setter, s, 1.0)[:, None] for s in NECK_SCALES]
    parents = [_student(centre[others], s * root) for s in scales]

    def sample(key: Array, n: int) -> Array:
        key_which, key_children, *keys = jax.random.split(key, 2 + len(parents))
        drawn = [part.sample(key, n) for part, key in zip(parents, keys, strict=True)]
        which = jax.random.randint(key_which, (n,), 0, len(parents))
        values = jnp.stack(drawn)[which, jnp.arange(n)]
        z = jnp.broadcast_to(centre, (n, fm.dim)).at[:, others].set(values)
        draw_children = jax.vmap(lambda key, z: prior.draw(key, theta, z, funnel))
        return draw_children(jax.random.split(key_children, n), z)

    def log_prob(z: Array) -> Array:
        log_densities = jnp.stack([part.log_prob(z[others]) for part in parents])
        log_parents = jax.nn.logsumexp(log_densities) - np.log(len(parents))
        return log_parents + prior.log_density(theta, z, funnel)

    return Part(sample, log_prob)


def _coordinates(sites: Sequence[Site]) -> np.ndarray:
    return np.concatenate([np.arange(s.start, s.stop) for s in sites])


def root_of_draws(z: Array) -> Array:
    """Return a lower triangular root (dim, dim) of the covariance of draws (n, dim).

    It is diagonal for many latents or few draws. It is computed from the draws by QR, not from
    their covariance, which holds no correlation above 1 - 1e-16: wider draws would then leave a
    narrow ridge, such as that of a line over a far covariate, and have no weight.
    """
    n, dim = z.shape
    sd = z.std(0)
    # Ten draws for each latent: with fewer the sample correlations are mostly noise.
    if dim > FULL_UP_TO or n < 10 * dim:
        return jnp.diag(sd)
    L = linalg.root_of(((z - z.mean(0)) / sd).T / math.sqrt(n))
    usable = jnp.isfinite(L).all() & (jnp.diagonal(L) > 0).all()
    return sd[:, None] * jnp.where(usable, L, jnp.eye(dim))


def prior_spread(fm: FederatedModel) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the prior's median and spread (dim,), or None if it cannot be drawn from.

    The spread is half the width of the central 68 %, the sd of a normal. An sd itself may be
    infinite: priors may be Cauchy.
    """
    if not fm.dim:
        return None
    draws = fm.draw_prior(jax.random.key(0), PRIOR_DRAWS)
    if draws is None:
        return None
    # Draws of a vague prior may be infinite, as 1 / 0; the spread is not used then.
    with np.errstate(invalid="ignore"):
        low, middle, high = np.quantile(np.asarray(draws), [0.16, 0.5, 0.84], axis=0)
        spread = (high - low) / 2
    usable = np.isfinite(spread).all() and (spread > 0).all()
    return (middle, spread) if usable else None
