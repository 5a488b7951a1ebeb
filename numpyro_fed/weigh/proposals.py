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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.trees import Numbers, namespace
from numpyro_fed.numerics.gaussian import root_of
from numpyro_fed.search.mode import OneCopy
from numpyro_fed.text.log_density import FederatedModel, Funnel
from numpyro_fed.text.site_table import Theta
from numpyro_fed.weigh.mixture import OWN_FREEDOM, LocationScale, Mixture, log_sum_exp

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


@dataclass(frozen=True, eq=False)
class Scaled:
    """A Student t distribution, ``scale`` times as wide as the fit, or with an ``own`` location."""

    scale: float = 1.0
    own: LocationScale | None = None

    def at(self, around: LocationScale) -> LocationScale:
        """Return location and scale of the part, given those of the fit."""
        return LocationScale(around.loc, self.scale * around.root) if self.own is None else self.own

    def sample(
        self, random: np.random.Generator, n: int, theta: Theta, around: LocationScale
    ) -> np.ndarray:
        return self.at(around).draw_student(random, n, FREEDOM)

    def log_prob(self, z: Numbers, theta: Theta, around: LocationScale) -> Numbers:
        return self.at(around).log_student(z, FREEDOM)


@dataclass(frozen=True, eq=False)
class Stretched:
    """A distribution that is as wide as the fit but for one coordinate at a time.

    With :math:`u = L^{-1} (z - m)`, coordinate ``j`` varies along :math:`a_j`, row ``j`` of ``L``
    made a unit vector. Each of these directions is stretched in its turn. In many dimensions a
    distribution that is wide in all of them has next to no density along any of them.
    """

    stretch: float

    def sample(
        self, random: np.random.Generator, n: int, theta: Theta, around: LocationScale
    ) -> np.ndarray:
        u = around.draw_standard(random, n, OWN_FREEDOM)
        axis = np.asarray(_axes(around))[np.arange(n) % len(around.loc)]
        u = u + (self.stretch - 1) * (u * axis).sum(1, keepdims=True) * axis
        return around.loc + u @ np.asarray(around.root).T

    def log_prob(self, z: Numbers, theta: Theta, around: LocationScale) -> Numbers:
        xp, dim = namespace(z), z.shape[-1]
        u = around.whitened(z)
        along = u @ _axes(around).T
        squared = (u**2).sum(-1, keepdims=True) - (1 - self.stretch**-2) * along**2
        log_p = -(OWN_FREEDOM + dim) / 2 * xp.log1p(squared / OWN_FREEDOM)
        at_centre = around.log_student_at_loc(OWN_FREEDOM, xp)
        return at_centre + log_sum_exp(log_p.T) - math.log(dim * self.stretch)


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

        log_density = jax.vmap(lambda theta, z: prior.log_density(theta, z, children), (None, 0))
        return jax.jit(draw), jax.jit(log_density)

    def _parents(self, around: LocationScale) -> tuple[np.ndarray, list[LocationScale]]:
        """Return the coordinates that are no children, and where their distributions lie."""
        funnel, dim = self.funnel, self.model.dim
        below, setters = (
            np.concatenate([np.arange(s.start, s.stop) for s in sites])
            for sites in (funnel.children, funnel.setters)
        )
        others = np.setdiff1d(np.arange(dim), below)
        xp, root = namespace(around.root), root_of(around.root[others])
        scales = [xp.where(np.isin(others, setters), s, 1.0)[:, None] for s in NECK_SCALES]
        return others, [LocationScale(around.loc[others], s * root) for s in scales]

    def sample(
        self, random: np.random.Generator, n: int, theta: Theta, around: LocationScale
    ) -> np.ndarray:
        others, parents = self._parents(around)
        drawn = np.stack([parent.draw_student(random, n, FREEDOM) for parent in parents])
        z = np.tile(np.asarray(around.loc), (n, 1))
        z[:, others] = drawn[random.integers(len(drawn), size=n), np.arange(n)]
        seed = random.integers(2**32, dtype=np.uint32)  # as an int it may be too large for JAX
        return np.asarray(self._programs[0](seed, theta, z), np.float64)

    def log_prob(self, z: Numbers, theta: Theta, around: LocationScale) -> Numbers:
        xp, (others, parents) = namespace(z), self._parents(around)
        of_parents = xp.stack([p.log_student(z[:, others], FREEDOM) for p in parents])
        of_children = self._programs[1](theta, z)
        log_parents = log_sum_exp(of_parents) - math.log(len(of_parents))
        return log_parents + (np.asarray(of_children) if xp is np else of_children)


Part = Scaled | Stretched | Neck  # given theta, and location and scale of the fit


def wider_parts(fm: FederatedModel, draws: np.ndarray | None) -> tuple[Part, ...]:
    """Return the parts of proposals for all fits of a text, with ``draws`` from the prior."""
    if not fm.dim:
        return ()
    spread = spread_of(draws)
    of_prior = [Scaled(own=spread)] if spread is not None else []
    necks = [Neck(fm, funnel) for funnel in fm.global_prior.funnels]
    return (*map(Scaled, SCALES), *map(Stretched, STRETCHES), *of_prior, *necks)


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

    def sample(
        self, random: np.random.Generator, theta: Theta, around: LocationScale
    ) -> np.ndarray:
        """Return draws of all parts (sum(numbers), dim), part after part."""
        drawn = zip(self.parts, self.numbers, strict=True)
        empty = np.zeros((0, len(around.loc)))
        found = (part.sample(random, n, theta, around) for part, n in drawn if n)
        return np.concatenate([empty, *found])

    def log_density(
        self, log_own: Numbers, theta: Theta, around: LocationScale, z: Numbers
    ) -> Numbers:
        """Return the log density (m,) of the whole proposal at ``z`` (m, dim).

        ``log_own`` (m,) is that of what the parts are wider than.
        """
        used = [(part, n) for part, n in zip(self.parts, self.numbers, strict=True) if n]
        wide = (part.log_prob(z, theta, around) for part, _ in used)
        densities = namespace(z).stack([log_own, *wide])
        numbers = np.array([self.num_own, *(n for _, n in used)], float)
        with np.errstate(divide="ignore"):  # there may be no draws of its own
            log_shares = np.log(numbers / numbers.sum())
        return log_sum_exp(log_shares[:, None] + densities)

    def draw_with(self, random: np.random.Generator, theta: Theta, own: Mixture) -> np.ndarray:
        """Return draws (n, dim) of the whole proposal around a mixture, the mixture's first."""
        drawn = own.sample(random, self.num_own)
        return np.concatenate([drawn, self.sample(random, theta, own.moments)])

    def log_density_with(self, theta: Theta, own: Mixture, z: Numbers) -> Numbers:
        """Return the log density (m,) of the whole proposal around a mixture, at ``z`` (m, dim)."""
        return self.log_density(own.log_prob(z), theta, own.moments, z)


class Pool(NamedTuple):
    """Draws from mixtures as they were weighed, to which further draws can be added.

    ``z_G`` (n, dim): As they were weighed; a correction has others in the place of draws without
        weight.
    ``log_joint`` (n,): The log joint density of all silos there, locals integrated out.
    ``from_own`` (n,) bool: Whether a draw is from a mixture, and not from the parts around it.
    ``log_own`` (K, n): The log density of each mixture there, without the parts around it. At draws
        that the mixture was matched to it is that of a mixture matched without them.
    ``mixtures, wider, numbers``: Each mixture, the share of wider parts, the number of its draws.
    ``copy``: Where a density that repeats was weighed.
    """

    z_G: np.ndarray
    log_joint: np.ndarray
    from_own: np.ndarray
    log_own: np.ndarray
    mixtures: tuple[Mixture, ...]
    wider: tuple[float, ...]
    numbers: tuple[int, ...]
    copy: OneCopy | None = None

    @classmethod
    def empty(cls, dim: int, dtype: np.dtype[Any], copy: OneCopy | None) -> Pool:
        """Return a pool without draws."""
        none = np.zeros(0, dtype)
        return cls(
            np.zeros((0, dim), dtype), none, np.zeros(0, bool), np.zeros((0, 0)), (), (), (), copy
        )

    def with_mixture(self, mixture: Mixture, wider: float) -> Pool:
        """Return the pool with one more mixture, the first one, of which there are no draws yet."""
        same = [row for row, m in zip(self.log_own, self.mixtures, strict=True) if m is mixture]
        row = same[0] if same else mixture.log_left_out
        if row is None or not self.mixtures:
            row = np.asarray(mixture.log_prob(self.z_G))
        return self._replace(
            log_own=np.stack([row, *self.log_own]),
            mixtures=(mixture, *self.mixtures),
            wider=(wider, *self.wider),
            numbers=(0, *self.numbers),
        )

    def with_draws(
        self,
        z_G: np.ndarray,
        log_joint: np.ndarray,
        from_own: np.ndarray,
        numbers: Sequence[int],
    ) -> Pool:
        """Return the pool with further draws before the others, by how many of each mixture."""
        more = [*numbers, *[0] * (len(self.numbers) - len(numbers))]
        return self._replace(
            z_G=np.concatenate([z_G, self.z_G]),
            log_joint=np.concatenate([log_joint, self.log_joint]),
            from_own=np.concatenate([from_own, self.from_own]),
            log_own=np.concatenate([[m.log_prob(z_G) for m in self.mixtures], self.log_own], 1),
            numbers=tuple(n + m for n, m in zip(self.numbers, more, strict=True)),
        )


def spread_of(draws: np.ndarray | None) -> LocationScale | None:
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
    return LocationScale(middle, np.diag(spread)) if usable else None


def _axes(around: LocationScale) -> Numbers:
    return around.root / ((around.root**2).sum(1) ** 0.5)[:, None]
