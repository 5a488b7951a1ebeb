r"""Mixtures of Student t distributions as proposals of a correction, made at the server.

The first one is at the modes that a search has found (:func:`around_modes`). Draws from it, once
weighed, show what the posterior is like, and :func:`matched` fits the next mixture to them by the
EM algorithm with weights :math:`w_i`:

.. math::
    r_{ik} \propto w_i\, \pi_k\, N(z_i \mid m_k, C_k), \qquad
    \pi_k = \sum_i r_{ik}, \quad m_k = \sum_i r_{ik} z_i / \pi_k, \quad
    C_k = \frac{n_k S_k + n_0 C}{n_k + n_0},

with the weighted covariance :math:`S_k` of a part, and the share :math:`n_k` of the effective draws
in it. :math:`C` is the covariance of all draws, reduced to the size of a part; :math:`n_0` counts
as many draws of it as a covariance has rows, and two (Fraley and Raftery 2007). Parts are fitted
as normal distributions, and drawn from with heavier tails.

Whitened coordinates whose weighted draws reach farther than a normal distribution does are bent
first (:class:`.proposals.Bends`): logs of scales have tails that fall as exponentials. Of a
logistic regression with correlated effects of six hospitals and ten globals, a mixture matched to
2,700 effective draws had 9 % of effective draws by itself, and with two to four bends 43 %.

Draws that are weighed by a mixture which was fitted to them weigh too little where they are dense
by chance, and too much where they are not: sds came out 4 % too small, and the far quantile of a
scale by 0.13 sd. So each draw is weighed by the density of a mixture fitted without its fold
(``log_left_out``), as one judges a prediction by data that were not fitted. Draws from the mixture
itself have had no part in it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats
from scipy.linalg import solve_triangular
from scipy.optimize import brentq
from scipy.stats import norm, qmc

from numpyro_fed.basics.trees import AnyArray, Numbers, namespace
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import root_of

# Degrees of freedom of the parts of a mixture. On a registry of four hospitals k-hat of the first
# weighing was 0.4 to 0.8 with eight, and 0.8 with a normal distribution; fewer lose more effective
# draws, the more dimensions there are.
OWN_FREEDOM = 10
TINY = 1e-12  # from zero and one, where quantiles are infinite
NUM_PARTS = 4  # of a mixture: with eight, k-hat came out larger, with two fewer draws counted
MIXTURE_FULL_UP_TO = 100  # latents; beyond it the covariance of the draws is taken as diagonal
ITERATIONS = 50  # of EM; the proposal need not be the best fit
MIN_PART = 1e-3  # share of a part, at least: an empty part has no mean
# Effective draws in a part, for each dimension: with fewer its covariance is mostly noise.
DRAWS_OF_PART = 10
# Effective draws beyond the quantile at which a tail is looked at, its least and largest
# probability, and how much farther than a normal one it must reach there to be bent.
BEYOND, FARTHEST, NEAREST, REACHES = 10, 0.005, 0.05, 1.15
# Folds of draws: with two and with ten errors came out the same, and ten cost five times as much.
FOLDS = 3
LEAST_POWER = 0.05
SMALL = 1e-12  # least squared distance, in sds, from the other parts' first centres


class LocationScale(NamedTuple):
    """The mean (dim,) and a lower triangular root (dim, dim) of the covariance of draws."""

    loc: Numbers
    root: Numbers

    def whitened(self, z: Numbers) -> Numbers:
        """Return the coordinates (n, dim) in which draws (n, dim) are standard."""
        away = (z - self.loc).T
        if isinstance(away, np.ndarray) and isinstance(self.root, np.ndarray):
            return solve_triangular(self.root, away, lower=True, check_finite=False).T
        return linalg.solve(jnp.asarray(self.root), jnp.asarray(away)).T

    def draw_standard(self, random: np.random.Generator, n: int, freedom: int) -> np.ndarray:
        """Return draws (n, dim) of a standard Student t distribution, whitened."""
        normal = random.standard_normal((n, len(self.loc)))
        return normal / np.sqrt(random.chisquare(freedom, (n, 1)) / freedom)

    def draw_student(self, random: np.random.Generator, n: int, freedom: int) -> np.ndarray:
        """Return draws (n, dim) of a Student t distribution of whole degrees of freedom."""
        return self.loc + self.draw_standard(random, n, freedom) @ np.asarray(self.root).T

    def log_student(self, z: Numbers, freedom: int) -> Numbers:
        """Return its log density (n,) at ``z`` (n, dim)."""
        xp, dim = namespace(z), z.shape[-1]
        squared = (self.whitened(z) ** 2).sum(-1)
        at_loc = self.log_student_at_loc(freedom, xp)
        return at_loc - (freedom + dim) / 2 * xp.log1p(squared / freedom)

    def log_student_at_loc(self, freedom: int, xp: ModuleType) -> Numbers:
        """Return the log density () of a Student t distribution at its centre."""
        dim = len(self.loc)
        constant = math.lgamma((freedom + dim) / 2) - math.lgamma(freedom / 2)
        constant -= dim / 2 * math.log(freedom * math.pi)
        return constant - xp.log(xp.diagonal(self.root)).sum()


def root_of_draws(z: AnyArray) -> AnyArray:
    """Return a lower triangular root (dim, dim) of the covariance of draws (n, dim).

    It is diagonal for many latents or few draws. It is computed from the draws by QR, not from
    their covariance, which holds no correlation above 1 - 1e-16: wider draws would then leave a
    narrow ridge, such as that of a line over a far covariate, and have no weight.
    """
    xp, (n, dim) = namespace(z), z.shape
    sd = z.std(0)
    # Ten draws for each latent: with fewer the sample correlations are mostly noise.
    if dim > MIXTURE_FULL_UP_TO or n < 10 * dim:
        return xp.diag(sd)
    L = root_of(((z - z.mean(0)) / sd).T / math.sqrt(n))
    usable = xp.isfinite(L).all() & (xp.diagonal(L) > 0).all()
    return sd[:, None] * xp.where(usable, L, xp.eye(dim))


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
    ``log_left_out`` (n,): The log densities at draws that it was matched to, each by a mixture
        matched without this draw's fold. None if it was not matched to draws.
    """

    log_shares: Numbers
    centres: Numbers
    roots: Numbers
    frame: LocationScale
    bends: Bends
    log_left_out: np.ndarray | None = None

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
            LocationScale(np.zeros(dim), np.eye(dim)),
            Bends(ones, ones),
        )

    @property
    def moments(self) -> LocationScale:
        """Return the mean of all parts, and a root of their covariance, as if nothing were bent."""
        xp = namespace(self.centres)
        shares = xp.exp(self.log_shares)
        mean = shares @ self.centres
        away = (self.centres - mean)[..., None]
        columns = xp.sqrt(shares)[:, None, None] * xp.concatenate([self.roots, away], -1)
        root = root_of(xp.concatenate(list(columns), -1))
        return LocationScale(self.frame.loc + self.frame.root @ mean, self.frame.root @ root)

    def sample(self, random: np.random.Generator, n: int) -> np.ndarray:
        """Return draws (n, dim), from :func:`standard_points`."""
        eps, uniform = standard_points(random, n, self.centres.shape[1])
        part = np.searchsorted(np.cumsum(np.exp(self.log_shares)), uniform)
        part = np.minimum(part, len(self.log_shares) - 1)
        centres = np.asarray(self.centres)
        bent = centres[part] + (np.asarray(self.roots)[part] @ eps[..., None])[..., 0]
        return np.asarray(self.frame.loc + self.bends.back(bent) @ self.frame.root.T)

    def log_prob(self, z: Numbers) -> Numbers:
        """Return the log density (n,) at ``z`` (n, dim)."""
        xp = namespace(z)
        bent, log_det = self.bends.straight(self.frame.whitened(z))
        parts = zip(self.centres, self.roots, strict=True)
        log_parts = xp.stack(
            [LocationScale(*part).log_student(bent, OWN_FREEDOM) for part in parts]
        )
        log_det = log_det - xp.log(xp.diagonal(self.frame.root)).sum()
        return log_sum_exp(self.log_shares[:, None] + log_parts) + log_det


def log_sum_exp(a: Numbers) -> Numbers:
    """Return the log of the sum of exponentials over the first axis."""
    xp = namespace(a)
    if xp is jnp:
        return jax.nn.logsumexp(a, axis=0)
    return np.logaddexp.reduce(a, axis=0)


def around_modes(
    z: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]], log_shares: np.ndarray
) -> Mixture:
    """Return the mixture around a fit with draws ``z`` (n, dim), and around other modes.

    ``others`` has the point (dim,) and the negative Hessian (dim, dim) of each, and ``log_shares``
    the log of the mass at all, the fit first.
    """
    centres, roots = [z.mean(0)], [root_of_draws(z)]
    kept = [0]
    for i, (mode, curvature) in enumerate(others[: NUM_PARTS - 1]):
        unit = np.sqrt(np.maximum(np.diagonal(curvature), np.finfo(float).tiny))
        scaled = curvature / unit / unit[:, None]
        values, axes = np.linalg.eigh(scaled)
        if np.isfinite(values).all() and values.min() > 0:
            centres.append(mode)
            covariance = (axes / values) @ axes.T
            roots.append(np.linalg.cholesky(covariance) / unit[:, None])
            kept.append(1 + i)
    return Mixture.of(log_shares[kept], centres, roots)


def mixture_at(centres: Sequence[np.ndarray], covariances: Sequence[np.ndarray]) -> Mixture:
    """Return the mixture of equal parts with these means (dim,) and covariances (dim, dim)."""
    roots = []
    for covariance in covariances:
        unit = np.sqrt(np.diagonal(covariance))
        roots.append(unit[:, None] * np.linalg.cholesky(covariance / np.outer(unit, unit)))
    return Mixture.of(np.zeros(len(centres)), centres, roots)


def matched(z: np.ndarray, weights: np.ndarray) -> Mixture | None:
    """Return the mixture fitted to draws ``z`` (n, dim) with weights (n,); None without spread."""
    whole = _fitted(z, weights)
    if whole is None:
        return None
    log_left_out = np.empty(len(z))
    fold = np.random.default_rng(0).permutation(len(z)) % FOLDS
    for left_out in (fold == i for i in range(FOLDS)):
        rest = _fitted(z[~left_out], weights[~left_out]) or whole
        log_left_out[left_out] = rest.log_prob(z[left_out])
    return whole._replace(log_left_out=log_left_out)


def _fitted(z: np.ndarray, weights: np.ndarray) -> Mixture | None:
    """Return the mixture fitted to all these draws; None without spread."""
    counts = weights > 0
    z, weights = np.asarray(z, np.float64)[counts], weights[counts] / weights[counts].sum()
    mean = weights @ z
    sd = np.sqrt(weights @ (z - mean) ** 2)
    if not (np.isfinite(sd) & (sd > 4 * np.spacing(np.abs(mean)))).all():
        return None
    dim, ess = z.shape[1], 1 / (weights**2).sum()
    # From the draws and not from their covariance, which holds no correlation above 1 - 1e-16.
    _, R = np.linalg.qr((z - mean) / sd * np.sqrt(weights)[:, None])
    root = sd[:, None] * (R.T * np.where(np.diagonal(R) < 0, -1.0, 1.0))
    if not (np.abs(np.diagonal(R)) > 0).all():
        return None
    u = np.linalg.solve(root / sd[:, None], ((z - mean) / sd).T).T
    number = int(np.clip(ess // (DRAWS_OF_PART * dim), 1, NUM_PARTS))
    bends = _bends_of(u, weights)
    if (bends.power == 1).all():
        shares, centres, covariances = _em(u, weights, number, ess)
        return Mixture.of(
            np.log(shares),
            [mean + root @ centre for centre in centres],
            [root @ np.linalg.cholesky(C) for C in covariances],
        )
    bent = np.asarray(bends.straight(u)[0])
    shares, centres, covariances = _em(bent, weights, number, ess)
    found = Mixture.of(np.log(shares), list(centres), list(np.linalg.cholesky(covariances)))
    return found._replace(frame=LocationScale(mean, root), bends=bends)


def _bends_of(u: np.ndarray, weights: np.ndarray) -> Bends:
    """Return the powers that make the tails of whitened draws (n, dim) normal."""
    tail = np.clip(BEYOND * (weights**2).sum(), FARTHEST, NEAREST)
    one, far = norm.ppf([norm.cdf(1), 1 - tail])
    width, power = np.ones((2, 2, u.shape[1]))
    for j, x in enumerate(u.T):
        for side, distance in enumerate((-x, x)):
            order = np.argsort(distance)
            mass = np.cumsum(weights[order])
            at = np.searchsorted(mass, norm.cdf([one, far])).clip(max=len(x) - 1)
            s, reach = distance[order[at]]
            if s > 0 and reach > REACHES * far * s:
                # The power that brings the distance in widths to that of a normal distribution.
                log_reach = np.log1p(reach / s)

                def excess(p: float, log_reach: float = log_reach) -> float:
                    return float(np.expm1(p * log_reach) / np.expm1(p * np.log(2)) - far)

                width[side, j], power[side, j] = s, LEAST_POWER
                if excess(LEAST_POWER) <= 0:
                    power[side, j] = brentq(excess, LEAST_POWER, 1.0)
    return Bends(width, power)


def _em(
    u: np.ndarray, weights: np.ndarray, number: int, ess: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return shares, means and covariances of ``number`` parts, from whitened draws ``u``."""
    dim = u.shape[1]
    part = np.eye(dim) / number ** (2 / dim)  # the covariance of all, reduced to a part
    shares, covariances = np.full(number, 1 / number), np.stack([part] * number)
    # The first centres are draws far from each other, as in k-means++.
    random = np.random.default_rng(0)
    chosen = [u[random.choice(len(u), p=weights)]]
    while len(chosen) < number:
        away = np.min([((u - c) ** 2).sum(1) for c in chosen], axis=0)
        mass = weights * np.maximum(away, SMALL)
        chosen.append(u[random.choice(len(u), p=mass / mass.sum())])
    centres = np.stack(chosen)
    prior = dim + 2
    for _ in range(ITERATIONS):
        log_p, scatter = np.empty((number, len(u))), np.empty_like(covariances)
        for k, inverse in enumerate(np.linalg.inv(np.linalg.cholesky(covariances))):
            standard = (u - centres[k]) @ inverse.T
            log_p[k] = np.log(np.diagonal(inverse)).sum() - 0.5 * (standard**2).sum(1)
        log_p += np.log(shares)[:, None]
        r = np.exp(log_p - log_p.max(0))
        r *= weights / r.sum(0)
        shares = np.maximum(r.sum(1), MIN_PART)
        centres = (r @ u) / shares[:, None]
        for k, centre in enumerate(centres):
            scatter[k] = (r[k, :, None] * (u - centre)).T @ (u - centre)
        covariances = (ess * scatter + prior * part) / (ess * shares + prior)[:, None, None]
        shares = shares / shares.sum()
    return shares, centres, covariances
