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
from functools import cached_property
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats
from scipy.linalg import solve_triangular
from scipy.stats import qmc

from numpyro_fed.basics.trees import AnyArray, Numbers, namespace
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import root_of
from numpyro_fed.text.log_density import FederatedModel, Funnel
from numpyro_fed.text.sites import Theta

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


class Place(NamedTuple):
    """The mean (dim,) and a lower triangular root (dim, dim) of the covariance of draws."""

    centre: Numbers
    root: Numbers

    def whitened(self, z: Numbers) -> Numbers:
        """Return the coordinates (n, dim) in which draws (n, dim) are standard."""
        away = (z - self.centre).T
        if isinstance(away, np.ndarray) and isinstance(self.root, np.ndarray):
            return solve_triangular(self.root, away, lower=True, check_finite=False).T
        return linalg.solve(jnp.asarray(self.root), jnp.asarray(away)).T


def standard_points(random: np.random.Generator, n: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points (n, dim) of a standard Student t, and uniform numbers (n,) that choose parts.

    They fill space more evenly than independent ones (Sobol, scrambled). Averages over them have
    smaller errors, which are still zero on average (Owen 1997).
    """
    with warnings.catch_warnings():  # they need not be a power of two
        warnings.simplefilter("ignore", UserWarning)
        u = qmc.Sobol(dim + 2, seed=int(random.integers(2**32))).random(n)
    u = np.clip(u, TINY, 1 - TINY)
    shrunk = np.sqrt(stats.chi2.ppf(u[:, -2], OWN_FREEDOM) / OWN_FREEDOM)
    return stats.norm.ppf(u[:, :dim]) / shrunk[:, None], u[:, -1]


class Bends(NamedTuple):
    r"""Powers that make tails of coordinates normal, one on each side of zero.

    A coordinate ``u`` of width ``s`` on its side becomes
    :math:`v = \pm k\, ((1 + |u| / s)^p - 1)` with :math:`k = 1 / (2^p - 1)`, so that :math:`s` goes
    to one. A tail that falls as an exponential, as that of the log of a scale towards zero, is
    normal after it with ``p`` near a half. With a power and a width of one nothing is bent.

    ``width, power`` (2, dim): Below zero, and above.
    """

    width: Numbers
    power: Numbers

    def straight(self, u: Numbers) -> tuple[Numbers, Numbers]:
        """Return bent coordinates (..., dim) of ``u``, and the log determinant (...)."""
        xp = namespace(u)
        s, p, k = self._on_side_of(u)
        far = xp.log1p(xp.abs(u) / s)
        v = xp.where(p == 1, xp.abs(u) / s, k * xp.expm1(p * far))
        return xp.sign(u) * v, (xp.log(k * p / s) + (p - 1) * far).sum(-1)

    def back(self, v: np.ndarray) -> np.ndarray:
        """Return the coordinates (..., dim) that are bent to ``v``."""
        s, p, k = self._on_side_of(v)
        far = np.where(p == 1, np.abs(v), np.expm1(np.log1p(np.abs(v) / k) / p))
        return np.sign(v) * s * far

    def _on_side_of(self, u: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return width, power and the factor ``k`` on the side of each coordinate (..., dim)."""
        xp = namespace(u)
        s, p = (xp.where(u < 0, of_sides[0], of_sides[1]) for of_sides in self)
        return s, p, 1 / xp.expm1(p * math.log(2))


class Mixture(NamedTuple):
    """A mixture of Student t distributions of bent coordinates, in the place of the guide.

    ``log_shares`` (K,): Minus infinity for a part without weight.
    ``centres`` (K, dim).
    ``roots`` (K, dim, dim): Lower triangular roots of the scale matrices.
    ``frame``: Coordinates are whitened by it before they are bent.
    """

    log_shares: Numbers
    centres: Numbers
    roots: Numbers
    frame: Place
    bends: Bends

    @classmethod
    def of(
        cls, log_shares: np.ndarray, centres: Sequence[np.ndarray], roots: Sequence[np.ndarray]
    ) -> Mixture:
        """Return the mixture of unbent parts, filled up to :data:`NUM_PARTS` without weight."""
        empty, dim = NUM_PARTS - len(centres), len(centres[0])
        log_shares = np.concatenate([log_shares, np.full(empty, -math.inf)])
        ones = np.ones((2, dim))
        return cls(
            log_shares - np.logaddexp.reduce(log_shares),
            np.stack([*centres, *[centres[0]] * empty]),
            np.stack([*roots, *[roots[0]] * empty]),
            Place(np.zeros(dim), np.eye(dim)),
            Bends(ones, ones),
        )

    @property
    def place(self) -> Place:
        """Return the mean of all parts, and a root of their covariance, as if nothing were bent."""
        xp = namespace(self.centres)
        shares = xp.exp(self.log_shares)
        mean = shares @ self.centres
        away = (self.centres - mean)[..., None]
        columns = xp.sqrt(shares)[:, None, None] * xp.concatenate([self.roots, away], -1)
        root = root_of(xp.concatenate(list(columns), -1))
        return Place(self.frame.centre + self.frame.root @ mean, self.frame.root @ root)

    def sample(self, random: np.random.Generator, n: int) -> np.ndarray:
        """Return draws (n, dim), from :func:`standard_points`."""
        eps, uniform = standard_points(random, n, self.centres.shape[1])
        part = np.searchsorted(np.cumsum(np.exp(self.log_shares)), uniform)
        part = np.minimum(part, len(self.log_shares) - 1)
        centres = np.asarray(self.centres)
        bent = centres[part] + (np.asarray(self.roots)[part] @ eps[..., None])[..., 0]
        return np.asarray(self.frame.centre + self.bends.back(bent) @ self.frame.root.T)

    def log_prob(self, z: Numbers) -> Numbers:
        """Return the log density (n,) at ``z`` (n, dim)."""
        xp = namespace(z)
        bent, log_det = self.bends.straight(self.frame.whitened(z))
        places = zip(self.centres, self.roots, strict=True)
        parts = xp.stack([log_student(bent, Place(*one), OWN_FREEDOM) for one in places])
        log_det = log_det - xp.log(xp.diagonal(self.frame.root)).sum()
        return _log_sum_exp(self.log_shares[:, None] + parts) + log_det


def draw_student(random: np.random.Generator, n: int, place: Place, freedom: int) -> np.ndarray:
    """Return draws (n, dim) of a Student t distribution of whole degrees of freedom."""
    return place.centre + _standard_student(random, n, place, freedom) @ np.asarray(place.root).T


def log_student(z: Numbers, place: Place, freedom: int) -> Numbers:
    """Return its log density (n,) at ``z`` (n, dim)."""
    xp, dim = namespace(z), z.shape[-1]
    squared = (place.whitened(z) ** 2).sum(-1)
    return _at_centre(place, freedom, xp) - (freedom + dim) / 2 * xp.log1p(squared / freedom)


@dataclass(frozen=True, eq=False)
class Scaled:
    """A Student t distribution, ``scale`` times as wide as the fit, or around an ``own`` place."""

    scale: float = 1.0
    own: Place | None = None

    def at(self, place: Place) -> Place:
        """Return the place of the part."""
        return Place(place.centre, self.scale * place.root) if self.own is None else self.own

    def sample(self, random: np.random.Generator, n: int, theta: Theta, place: Place) -> np.ndarray:
        return draw_student(random, n, self.at(place), FREEDOM)

    def log_prob(self, z: Numbers, theta: Theta, place: Place) -> Numbers:
        return log_student(z, self.at(place), FREEDOM)


@dataclass(frozen=True, eq=False)
class Stretched:
    """A distribution that is as wide as the fit but for one coordinate at a time.

    With :math:`u = L^{-1} (z - m)`, coordinate ``j`` varies along :math:`a_j`, row ``j`` of ``L``
    made a unit vector. Each of these directions is stretched in its turn. In many dimensions a
    distribution that is wide in all of them has next to no density along any of them.
    """

    stretch: float

    def sample(self, random: np.random.Generator, n: int, theta: Theta, place: Place) -> np.ndarray:
        u = _standard_student(random, n, place, OWN_FREEDOM)
        axis = np.asarray(_axes(place))[np.arange(n) % len(place.centre)]
        u = u + (self.stretch - 1) * (u * axis).sum(1, keepdims=True) * axis
        return place.centre + u @ np.asarray(place.root).T

    def log_prob(self, z: Numbers, theta: Theta, place: Place) -> Numbers:
        xp, dim = namespace(z), z.shape[-1]
        u = place.whitened(z)
        along = u @ _axes(place).T
        squared = (u**2).sum(-1, keepdims=True) - (1 - self.stretch**-2) * along**2
        log_p = -(OWN_FREEDOM + dim) / 2 * xp.log1p(squared / OWN_FREEDOM)
        at_centre = _at_centre(place, OWN_FREEDOM, xp)
        return at_centre + _log_sum_exp(log_p.T) - math.log(dim * self.stretch)


@dataclass(frozen=True, eq=False)
class Neck:
    """The part for one funnel: wide setters, and children from their prior given them.

    Latents that are no setters are as wide as the fit.
    """

    model: FederatedModel
    funnel: Funnel

    @cached_property
    def _programs(self) -> tuple[Callable[..., Array], Callable[..., Array]]:
        """Return ``(seed, theta, z)`` to ``z`` (n, dim) with other children, and their density."""
        prior, children = self.model.global_prior, self.funnel.children

        def draw(seed: Array, theta: Theta, z: Array) -> Array:
            keys = jax.random.split(jax.random.key(seed), len(z))
            return jax.vmap(lambda key, z: prior.draw(key, theta, z, children))(keys, z)

        def log_density(theta: Theta, z: Array) -> Array:
            return jax.vmap(lambda z: prior.log_density(theta, z, children))(z)

        return jax.jit(draw), jax.jit(log_density)

    def _parents(self, place: Place) -> tuple[np.ndarray, list[Place]]:
        """Return the coordinates that are no children, and the places around which they are."""
        funnel, dim = self.funnel, self.model.dim
        below, setters = (
            np.concatenate([np.arange(s.start, s.stop) for s in sites])
            for sites in (funnel.children, funnel.setters)
        )
        others = np.setdiff1d(np.arange(dim), below)
        xp, root = namespace(place.root), root_of(place.root[others])
        scales = [xp.where(np.isin(others, setters), s, 1.0)[:, None] for s in NECK_SCALES]
        return others, [Place(place.centre[others], s * root) for s in scales]

    def sample(self, random: np.random.Generator, n: int, theta: Theta, place: Place) -> np.ndarray:
        others, parents = self._parents(place)
        drawn = np.stack([draw_student(random, n, parent, FREEDOM) for parent in parents])
        z = np.tile(np.asarray(place.centre), (n, 1))
        z[:, others] = drawn[random.integers(len(drawn), size=n), np.arange(n)]
        seed = random.integers(2**32, dtype=np.uint32)  # as an int it may be too large for JAX
        return np.asarray(self._programs[0](seed, theta, z), np.float64)

    def log_prob(self, z: Numbers, theta: Theta, place: Place) -> Numbers:
        xp, (others, parents) = namespace(z), self._parents(place)
        of_parents = xp.stack([log_student(z[:, others], p, FREEDOM) for p in parents])
        of_children = self._programs[1](theta, z)
        log_parents = _log_sum_exp(of_parents) - math.log(len(of_parents))
        return log_parents + (np.asarray(of_children) if xp is np else of_children)


Part = Scaled | Stretched | Neck  # each has draws and densities, given theta and the fit's place


def wider_parts(fm: FederatedModel, draws: np.ndarray | None) -> tuple[Part, ...]:
    """Return the parts of proposals for all fits of a text, with ``draws`` from the prior."""
    if not fm.dim:
        return ()
    spread = spread_of(draws)
    around = [Scaled(own=spread)] if spread is not None else []
    necks = [Neck(fm, funnel) for funnel in fm.global_prior.funnels]
    return (*map(Scaled, SCALES), *map(Stretched, STRETCHES), *around, *necks)


@dataclass(frozen=True, eq=False)
class WideParts:
    """The wider parts of a proposal, and how many draws come from each.

    ``num_own``: The number of draws that are left for what the parts are wider than.
    """

    parts: tuple[Part, ...]
    num_own: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Part, ...], num_draws: int, share: float) -> WideParts:
        """Return the parts of a proposal with so many draws, a ``share`` of them wider."""
        if not share or not parts:
            return cls((), num_draws, ())
        num_necks = sum(isinstance(part, Neck) for part in parts)
        num_wide = len(parts) - num_necks
        numbers = [int(share * num_draws / num_wide)] * num_wide
        numbers += [int(NECKS * share * num_draws / num_necks) for _ in range(num_necks)]
        return cls(parts, num_draws - sum(numbers), tuple(numbers))

    def sample(self, random: np.random.Generator, theta: Theta, place: Place) -> np.ndarray:
        """Return draws of all parts (sum(numbers), dim), part after part."""
        drawn = zip(self.parts, self.numbers, strict=True)
        empty = np.zeros((0, len(place.centre)))
        found = (part.sample(random, n, theta, place) for part, n in drawn if n)
        return np.concatenate([empty, *found])

    def log_density(self, log_own: Numbers, theta: Theta, place: Place, z: Numbers) -> Numbers:
        """Return the log density (m,) of the whole proposal at ``z`` (m, dim).

        ``log_own`` (m,) is that of what the parts are wider than.
        """
        used = [(part, n) for part, n in zip(self.parts, self.numbers, strict=True) if n]
        wide = (part.log_prob(z, theta, place) for part, _ in used)
        densities = namespace(z).stack([log_own, *wide])
        numbers = np.array([self.num_own, *(n for _, n in used)], float)
        with np.errstate(divide="ignore"):  # there may be no draws of its own
            log_shares = np.log(numbers / numbers.sum())
        return _log_sum_exp(log_shares[:, None] + densities)

    def draw_with(self, random: np.random.Generator, theta: Theta, own: Mixture) -> np.ndarray:
        """Return draws (n, dim) of the whole proposal around a mixture, the mixture's first."""
        drawn = own.sample(random, self.num_own)
        return np.concatenate([drawn, self.sample(random, theta, own.place)])

    def log_density_with(self, theta: Theta, own: Mixture, z: Numbers) -> Numbers:
        """Return the log density (m,) of the whole proposal around a mixture, at ``z`` (m, dim)."""
        return self.log_density(own.log_prob(z), theta, own.place, z)


def _log_sum_exp(a: Numbers) -> Numbers:
    """Return the log of the sum of exponentials over the first axis."""
    xp = namespace(a)
    if xp is jnp:
        return jax.nn.logsumexp(a, axis=0)
    return np.logaddexp.reduce(a, axis=0)


def _standard_student(
    random: np.random.Generator, n: int, place: Place, freedom: int
) -> np.ndarray:
    """Return draws (n, dim) of a standard Student t."""
    normal = random.standard_normal((n, len(place.centre)))
    return normal / np.sqrt(random.chisquare(freedom, (n, 1)) / freedom)


def _at_centre(place: Place, freedom: int, xp: ModuleType) -> Numbers:
    """Return the log density () of a Student t at its centre."""
    dim = len(place.centre)
    constant = math.lgamma((freedom + dim) / 2) - math.lgamma(freedom / 2)
    constant -= dim / 2 * math.log(freedom * math.pi)
    return constant - xp.log(xp.diagonal(place.root)).sum()


def _axes(place: Place) -> Numbers:
    return place.root / ((place.root**2).sum(1) ** 0.5)[:, None]


def root_of_draws(z: AnyArray) -> AnyArray:
    """Return a lower triangular root (dim, dim) of the covariance of draws (n, dim).

    It is diagonal for many latents or few draws. It is computed from the draws by QR, not from
    their covariance, which holds no correlation above 1 - 1e-16: wider draws would then leave a
    narrow ridge, such as that of a line over a far covariate, and have no weight.
    """
    xp, (n, dim) = namespace(z), z.shape
    sd = z.std(0)
    # Ten draws for each latent: with fewer the sample correlations are mostly noise.
    if dim > FULL_UP_TO or n < 10 * dim:
        return xp.diag(sd)
    L = root_of(((z - z.mean(0)) / sd).T / math.sqrt(n))
    usable = xp.isfinite(L).all() & (xp.diagonal(L) > 0).all()
    return sd[:, None] * xp.where(usable, L, xp.eye(dim))


def spread_of(draws: np.ndarray | None) -> Place | None:
    """Return the prior's median, and as a root its spread, by draws (n, dim); None without any.

    The spread is half the width of the central 68 %, the sd of a normal. An sd itself may be
    infinite: priors may be Cauchy.
    """
    if draws is None:
        return None
    # Draws of a vague prior may be infinite, as 1 / 0; the spread is not used then.
    with np.errstate(invalid="ignore"):
        low, middle, high = np.quantile(np.asarray(draws, float), [0.16, 0.5, 0.84], axis=0)
        spread = (high - low) / 2
    usable = np.isfinite(spread).all() and (spread > 0).all()
    return Place(middle, np.diag(spread)) if usable else None
