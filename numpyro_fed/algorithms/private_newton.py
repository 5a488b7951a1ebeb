r"""Newton's method with noise: the posterior from a few sums of clipped numbers.

At a point ``z`` of the globals, in a frame :math:`z + L u`, silos send the sums over their units
(rows with their latents integrated out, or whole silos)

.. math::
    G = \sum_i \mathrm{clip}_C(L' \nabla \ell_i) + N(0, s_G^2), \qquad
    H = \sum_i \mathrm{clip}_{C_H}(L' A_i L) + N(0, s_H^2),

where :math:`A_i` is the negative Hessian of the unit's log likelihood, or for many globals
:math:`\nabla \ell_i \nabla \ell_i'`. All that the server computes from them costs no privacy:

1. Curvature below the edge of the noise's spectrum, :math:`s_H \sqrt{2d}`, cannot be told from
   noise. There columns count as uncorrelated; above the edge eigenvalues are shrunk as those of a
   matrix with a few large ones (Benaych-Georges and Nadakuditi 2011).
2. A step of Newton's method goes to the next point. Single steps search for the mode until one is
   no longer than its own noise, and no direction is hidden by noise, or none has come out of it for
   some steps. The rest of the search is then left out, and its budget not spent.
3. Between phases the frame is whitened by the curvature. So directions that the first units hide,
   as an intercept beside a covariate far from zero, come out of the noise; and the noise, which is
   the same for all directions of the frame, is small for all of them.
4. In the last phase points are close to each other, and all sums are used: each gives
   :math:`b = G + A L^{-1}(z_k - z)`. With :math:`b \mid u \sim N(A u, A + S)`, where ``A`` is the
   variance of a gradient and ``S`` that of the noise, the posterior's precision is that of the
   prior and :math:`A (A + S)^{-1} A`: it is wider than the posterior without noise.

Clipping lengths are quantiles of the units' lengths, from histograms with noise that silos send
just before. The first units of the frame are such quantiles, too, for each coordinate.

Ganesh et al. (2023) have Newton steps under differential privacy for logistic regression, with a
regularised Hessian. Frame, phases, clipping lengths and the posterior are this package's own;
the last is that of Bernstein and Sheldon (2019) for linear regression, at the mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Shared,
    Up,
)
from numpyro_fed.algorithms.private_units import (
    COUNTS,
    HIGHEST,
    LOWEST,
    UNCLIPPED,
    PrivateUnits,
    best_clip,
    clipped,
    histogram,
    is_coarse,
    quantile,
)
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Gaussian, dot
from numpyro_fed.model.data import SiloData
from numpyro_fed.privacy.budget import Privacy
from numpyro_fed.trees import all_finite, where

UNITS, SIZES, SUMS = "private units", "private sizes", "private sums"
# Of the roots of curvature, for the first units of the frame. A lower one takes the many zeros of a
# column for its scale: with 0.75 the loss of a regression on Adult was 0.01 higher.
UNIT_QUANTILE = 0.95
# Units' lengths up to which gradients, and curvatures, are not clipped. What is clipped moves the
# mode, and with outcomes of which few are ones it moves it far.
GRADIENT_QUANTILE, CURVATURE_QUANTILE = UNCLIPPED, 0.9
# A unit's Hessian has d^2 numbers. For more globals the product of its gradient with itself stands
# in its place, whose length is known, which is the same on average at the truth.
HESSIANS_UP_TO = 20
# The search begins so far from zero in all coordinates: at exactly zero derivatives of abs and max
# are those of neither side, and half of a logistic regression's gradient is lost.
ASIDE = 1e-9
# The longest step, in units of the frame, in which a row's gradient is about one long.
LONGEST = 3.0
# And in sds of the prior at the start: noise may hide that a density flattens out, as that of the
# scale of effects does far out.
MOST_PRIOR = 1.0


class Phase(NamedTuple):
    """Steps in one frame, and the share of the budget that they spend."""

    steps: int
    share: float


# The first steps go far and need little precision, but lengths must be told from the noise of their
# histogram. A log scale that begins far too low rises by a half in a step at most, so that a
# regression of outcomes near 100, whose sd is 12, takes some twenty from 1.
SEARCH, MOST_SEARCH = 0.2, 24  # share of the budget, and steps at most
LATER = (Phase(2, 0.2), Phase(3, 0.55))
CLEAR = 0.1  # share of the units from which a bin of a histogram must be told from noise
# A step so long, in sds of the posterior with its noise (the root of their mean square over
# coordinates), may be noise alone.
NEAR = 2.0
# Steps after which a search ends although noise hides as many directions as before: for twenty more
# it would drift. With fewer it ended before a frame had shown the slope of a calendar year.
PATIENCE = 6
# For many globals noise hides most directions from a small share, and frames by it are poor.
PHASES_OF_MANY = (Phase(2, 0.1), Phase(2, 0.2), Phase(4, 0.65))
UNITS_SHARE = 0.05
SHARES = 0.1, 0.63, 0.27  # of a step's share, for sizes, gradient and curvature
SHARES_OF_MANY = 0.02, 0.69, 0.29


class Step(NamedTuple):
    """The noise multipliers of a step, and whether it begins or ends its phase."""

    sizes: float
    gradient: float
    curvature: float
    first: bool
    last: bool


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: noise multipliers of all releases, in order.

    Attributes
    ----------
    units : float
        That of the first units of the frame.
    steps : tuple of Step
    search : int
        The number of steps, at the beginning, that search for the mode, each in a frame of its own.
        Those that are left when it is found are not made.
    """

    units: float
    steps: tuple[Step, ...]
    search: int = 0

    @classmethod
    def of(cls, privacy: Privacy, dim: int, num_units: int, num_silos: int) -> Schedule:
        """Return the schedule that spends a budget on ``dim`` globals."""
        kinds = SHARES
        phases: tuple[Phase, ...] = PHASES_OF_MANY
        steps = 0
        if dim > HESSIANS_UP_TO:
            kinds = SHARES_OF_MANY
        else:
            # The share from which a histogram shows a bin with a few of the units.
            whole = privacy.multiplier() * privacy.changes * privacy.noise_share(num_silos)
            sd = whole * math.sqrt(2 * num_silos / kinds[0])
            least = (COUNTS * sd / (CLEAR * num_units)) ** 2
            steps = min(max(int(SEARCH / least), 1), MOST_SEARCH)
            phases = (*(Phase(1, SEARCH / steps),) * steps, *LATER)
        each = (p.share / p.steps * kind for p in phases for _ in range(p.steps) for kind in kinds)
        multipliers = privacy.multipliers((UNITS_SHARE, *each))
        places = [(k == 0, k == p.steps - 1) for p in phases for k in range(p.steps)]
        triples = np.reshape(multipliers[1:], (-1, 3)).tolist()
        return cls(
            multipliers[0],
            tuple(
                Step(a, b, c, first, last)
                for (a, b, c), (first, last) in zip(triples, places, strict=True)
            ),
            steps,
        )

    def releases(self, made: Iterable[bool] | None = None) -> tuple[tuple[str, float], ...]:
        """Return the name of the exchange and the noise multiplier of each release.

        ``made`` says of each step whether it was; by default all are.
        """
        steps = self.steps if made is None else compress(self.steps, made)
        each = (((SIZES, s.sizes), (SUMS, s.gradient), (SUMS, s.curvature)) for s in steps)
        return ((UNITS, self.units), *chain.from_iterable(each))

    def column(self, name: str) -> Array:
        """Return one field of all steps."""
        return jnp.array([getattr(step, name) for step in self.steps])


class Place(NamedTuple):
    """A question to silos: which step, the point ``z`` (d,), the frame ``L`` (d, d), and clips.

    Noise multipliers are not in it: a silo takes those of the step from the plan, answers each step
    once, and none before one that it has answered. Noise grows with the clipping lengths.
    """

    step: Array
    z: Array
    L: Array
    clip: Array
    clip_curvature: Array


class Asked(NamedTuple):
    """A silo's state: whether it has told units, and its next steps for sizes and for sums."""

    units: Array
    sizes: Array
    sums: Array


class Sums(NamedTuple):
    """A silo's sums: gradient (d,), and curvature as a vector (d * (d + 1) / 2,)."""

    gradient: Array
    curvature: Array


class Server(NamedTuple):
    """The state of the server between two steps.

    Attributes
    ----------
    step : () int
        The next step of the schedule.
    z, L : (d,), (d, d)
        Point and frame of the next step.
    sizes : (2, bins)
        Sums of the histograms of this phase.
    at : (d,)
        The point in the frame, from where the phase began.
    gradients, places : (d,)
        Sums over the steps of this phase, in the frame, of gradients and of points.
    variance : ()
        That of the noise of these gradients.
    curvature : (d, d)
        Sum over the steps of this phase, in the frame.
    loc, root : (d,), (d, d)
        Mean and root of the covariance of the posterior.
    narrow : (d, d)
        The root without the variance of the noise.
    undetermined : () int
        Directions whose curvature could not be told from noise.
    coarse : () bool
        Whether many units' lengths are hidden by the noise of their histogram.
    moved : ()
        How long the last step wanted to be, in sds of the posterior, divided by the root of ``d``;
        -1 where nothing finite came of it.
    fewest, waited : () int
        The fewest undetermined directions of a step so far, and the steps since.
    made : (steps,) bool
        The steps of the schedule that were made.
    multiplier : ()
        The noise multiplier of the first release, by which a run knows its budget.
    """

    step: Array
    z: Array
    L: Array
    sizes: Array
    at: Array
    gradients: Array
    places: Array
    variance: Array
    curvature: Array
    loc: Array
    root: Array
    narrow: Array
    undetermined: Array
    coarse: Array
    moved: Array
    fewest: Array
    waited: Array
    made: Array
    multiplier: Array


class Spectrum(NamedTuple):
    """The eigenvectors ``V`` (d, d) of a curvature with noise, and its eigenvalues without.

    Attributes
    ----------
    V : (d, d)
    curved : (d,)
        Eigenvalues as of the matrix without noise.
    damped : (d,)
        The same for a step: positive, and not below what noise may hide.
    undetermined : () int
        The number of directions whose curvature could not be told from noise.
    """

    V: Array
    curved: Array
    damped: Array
    undetermined: Array

    @classmethod
    def of(cls, H: Array, edge: Array) -> Spectrum:
        """Return the spectrum of ``H`` (d, d), where that of the noise ends at ``edge``."""
        e, V = linalg.eigh(H)
        above = jnp.where(e > edge, 0.5 * (e + jnp.sqrt(jnp.maximum(e**2 - edge**2, 0.0))), 0.0)
        apart = (V**2 * jnp.maximum(jnp.diagonal(H), 0.0)[:, None]).sum(0)
        curved = jnp.maximum(above, jnp.minimum(edge / 2, apart))
        # Where the density curves upwards, a step as long as if it curved as much downwards.
        damped = jnp.maximum(jnp.where(e < -edge, -e, above), edge / 2)
        return cls(V, curved, damped, (e <= edge).sum().astype(jnp.int32))


@dataclass(frozen=True, eq=False)
class PrivateNewton:
    """The parts of the method.

    Parameters
    ----------
    units : PrivateUnits
        What is protected, in a model whose units stand alone.
    schedule : Schedule
    num_units : int
        The number of rows or silos, about: it scales the frame.
    clip : float, optional
        The clipping length of gradients, in the place of a quantile.
    rows_in_unit : float
        The mean number of rows in a unit. The frame of many rows is the narrower, and steps in it
        may be the longer.
    """

    units: PrivateUnits
    schedule: Schedule
    num_units: int
    clip: float | None = None
    rows_in_unit: float = 1.0

    @property
    def has_products(self) -> bool:
        """Return whether products of gradients stand in the place of units' Hessians."""
        return self.units.model.dim > HESSIANS_UP_TO

    def algorithm(self) -> FederatedAlgorithm[Server, Asked]:
        """Return the algorithm: first the units of the frame, then a step in each round."""
        units = Exchange(UNITS, self._units_of_silo)
        sizes = Exchange(SIZES, self._sizes_of_silo)
        sums = Exchange(SUMS, self._sums_of_silo)
        return FederatedAlgorithm(
            init_server=self._init_server,
            init_silo=lambda key, data: Asked(*jnp.zeros((3,), jnp.int32)),
            round=Round((sizes, sums), self._run),
            shared=lambda server: Shared(
                {}, Gaussian.of_root(server.loc, server.root).params(), identity(server.loc.shape)
            ),
            done=lambda server: server.step >= len(self.schedule.steps),
            opening=(Round((units,), self._begin),),
        )

    def _init_server(self, key: Array) -> Server:
        d = self.units.model.dim
        z = self.units.model.init_global(key, None) + ASIDE
        zeros, square, eye = jnp.zeros(d), jnp.zeros((d, d)), jnp.eye(d)
        bins = jnp.zeros((2, HIGHEST - LOWEST + 1))
        none = jnp.zeros((), jnp.int32)
        return Server(
            step=none,
            z=z,
            L=eye,
            sizes=bins,
            at=zeros,
            gradients=zeros,
            places=zeros,
            variance=jnp.zeros(()),
            curvature=square,
            loc=z,
            root=eye,
            narrow=eye,
            undetermined=none,
            coarse=jnp.array(True),
            moved=jnp.array(-1.0),
            fewest=jnp.array(d, jnp.int32),
            waited=none,
            made=jnp.zeros(len(self.schedule.steps), bool),
            multiplier=jnp.asarray(self.schedule.units, jnp.result_type(float)),
        )

    # At a silo.

    def _multiplier(self, name: str, step: Array) -> Array:
        """Return a noise multiplier of a step."""
        return self.schedule.column(name)[jnp.clip(step, 0, len(self.schedule.steps) - 1)]

    def _planned(self, step: Array, first: Array) -> Array:
        """Return whether the budget is planned for a step, of which ``first`` is the next."""
        return (step >= first) & (step < len(self.schedule.steps))

    def _units_of_silo(
        self, noise: object, down: Place, state: Asked, data: SiloData
    ) -> tuple[Reply[Array], Asked]:
        """Count units by the power of two of each coordinate's root of curvature."""
        if self.has_products:
            sizes = jnp.abs(self.units.gradients(down.z, down.L, data))
        else:
            C = self.units.curvatures(down.z, down.L, data)
            sizes = jnp.sqrt(jnp.abs(jnp.diagonal(C, axis1=1, axis2=2)))
        counts = jax.vmap(histogram, in_axes=1)(sizes)
        change = jnp.sqrt(1.0 * self.units.model.dim)  # one count in each coordinate
        up = self.units.added(counts, change, jnp.array(self.schedule.units))
        return self._reply(up, state.units < 1), state._replace(units=state.units + 1)

    def _sizes_of_silo(
        self, noise: object, down: Place, state: Asked, data: SiloData
    ) -> tuple[Reply[Array], Asked]:
        """Count units by the power of two of their gradients' and curvatures' lengths."""
        lengths = jnp.linalg.norm(self.units.gradients(down.z, down.L, data), axis=1)
        curved = lengths**2
        if not self.has_products:
            curved = jnp.linalg.norm(self.units.curvatures(down.z, down.L, data), axis=(1, 2))
        counts = jnp.stack([histogram(lengths), histogram(curved)])
        up = self.units.added(counts, jnp.sqrt(2.0), self._multiplier("sizes", down.step))
        planned = self._planned(down.step, state.sizes)
        after = jnp.where(planned, down.step + 1, state.sizes)
        return self._reply(up, planned), state._replace(sizes=after)

    def _sums_of_silo(
        self, noise: object, down: Place, state: Asked, data: SiloData
    ) -> tuple[Reply[Sums], Asked]:
        """Add up the units' clipped gradients and curvatures."""
        g = clipped(self.units.gradients(down.z, down.L, data), down.clip)
        if self.has_products:
            length = jnp.maximum((g**2).sum(1), 1e-30)  # of g g'
            C = dot((g * jnp.minimum(1.0, down.clip_curvature / length)[:, None]).T, g)
        else:
            C = clipped(self.units.curvatures(down.z, down.L, data), down.clip_curvature).sum(0)
        gradient, curvature = (self._multiplier(n, down.step) for n in ("gradient", "curvature"))
        up = Sums(
            self.units.added(g.sum(0), down.clip, gradient),
            self.units.added(_as_vector(C), down.clip_curvature, curvature),
        )
        planned = self._planned(down.step, state.sums)
        after = jnp.where(planned, down.step + 1, state.sums)
        return self._reply(up, planned), state._replace(sums=after)

    def _reply(self, up: Up, planned: Array) -> Reply[Up]:
        """Return a reply: zeros, which cannot be used, where the budget is not planned for it."""
        return Reply(jax.tree.map(lambda a: jnp.where(planned, a, 0.0), up), planned)

    # At the server.

    def _begin(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        zero = jnp.zeros(())
        counts = ask(UNITS, Place(state.step, state.z, state.L, zero, zero)).up
        sd = jnp.sqrt(1.0 * self.units.model.dim) * self.schedule.units * self.units.spread
        size = jax.vmap(lambda c: quantile(c, sd, UNIT_QUANTILE))(counts)
        # No unit is longer than the prior's, which it is where no count stands out of the noise.
        L = jnp.diag(jnp.minimum(1 / jnp.maximum(size, 1e-30), self._prior_sd(state.z)))
        return state._replace(L=L), Info(zero, jnp.isfinite(L).all())

    def _prior(self, z: Array) -> tuple[Array, Array]:
        """Return the gradient (d,) of the prior, and a root (d, d) of its negative Hessian.

        Where the density curves upwards it counts as flat.
        """
        log_prior = lambda z: self.units.model.smoothed.log_prior({}, z)  # noqa: E731
        e, V = linalg.eigh(-jax.hessian(log_prior)(z))
        return jax.grad(log_prior)(z), V * jnp.sqrt(jnp.maximum(e, 0.0))

    def _prior_sd(self, z: Array) -> Array:
        """Return the prior's standard deviations (d,) by its curvature at a point."""
        return 1 / jnp.sqrt(jnp.maximum((self._prior(z)[1] ** 2).sum(1), 1e-12))

    def _clips(self, counts: Array, sd: Array, gradient: Array, k: Array) -> tuple[Array, Array]:
        """Return the clipping lengths of gradients and curvatures, from histograms with noise."""
        d = self.units.model.dim
        # The posterior is from all steps of a phase, and it must not be moved by what is clipped. A
        # search takes its way in any case.
        together = gradient * self.units.spread / jnp.sqrt(self._lengths[k])
        C = jnp.where(
            self._lengths[k] > 1,
            best_clip(counts[0], sd, together, d),
            quantile(counts[0], sd, GRADIENT_QUANTILE),
        )
        CH = quantile(counts[1], sd, CURVATURE_QUANTILE if self.has_products else GRADIENT_QUANTILE)
        # If no count stands out there are too few units: one whitened unit is sqrt(d) long.
        C = jnp.where(C > 0, C, jnp.sqrt(1.0 * d)) if self.clip is None else jnp.array(self.clip)
        CH = jnp.where(CH > 0, CH, 1.0 * d)
        return C, CH

    def _run(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        d, k = self.units.model.dim, jnp.minimum(state.step, len(self.schedule.steps) - 1)
        sizes, gradient, curvature, first, last = (
            self.schedule.column(name)[k] for name in Step._fields
        )
        zero = jnp.zeros(())
        counts = ask(SIZES, Place(state.step, state.z, state.L, zero, zero)).up

        fresh = lambda a: jnp.where(first, jnp.zeros_like(a), a)  # noqa: E731
        number = (k - self._starts[k] + 1).astype(state.z.dtype)  # of this step in its phase
        counts = fresh(state.sizes) + counts
        sd = jnp.sqrt(2.0 * number) * sizes * self.units.spread
        C, CH = self._clips(counts, sd, gradient, k)
        sums = ask(SUMS, Place(state.step, state.z, state.L, C, CH)).up
        gradients = fresh(state.gradients) + sums.gradient
        at = fresh(state.at)
        places = fresh(state.places) + at
        total = fresh(state.curvature) + _as_symmetric(sums.curvature, d)

        H = total / number
        edge = CH * curvature * self.units.spread * jnp.sqrt(2.0 * d / number)
        # Clips differ between the steps of a phase.
        variances = fresh(state.variance) + (C * gradient * self.units.spread) ** 2
        variance = variances / number**2
        V, curved, damped, undetermined = Spectrum.of(H, edge)

        slope, P = self._prior(state.z)
        slope, P = state.L.T @ slope, dot(state.L.T, P)
        b = gradients / number + V @ (curved * (V.T @ (places / number - at)))
        # The posterior, with the variance of the noise.
        known = curved / (curved + variance)
        precision = _root_with_prior(V, known * curved, P)
        loc = state.z + state.L @ _times_inverse(precision, V @ (known * (V.T @ b)) + slope)
        # The step, damped where curvature is not known.
        step = _times_inverse(_root_with_prior(V, damped, P), b + slope)
        longest = LONGEST * math.sqrt(d * self.rows_in_unit)
        away = jnp.abs(state.L @ step) / self._prior_sd(jnp.full(d, ASIDE))
        share = jnp.minimum(longest / jnp.linalg.norm(step), MOST_PRIOR / away.max())
        moved = jnp.linalg.norm(precision.T @ step) / jnp.sqrt(1.0 * d)
        step = step * jnp.minimum(1.0, share)
        waited = jnp.where(undetermined < state.fewest, 0, state.waited + 1)
        found = (moved <= NEAR) & ((undetermined == 0) | (waited >= PATIENCE))

        made = state.made.at[k].set(True)
        white = dot(state.L, dot(V * jnp.sqrt(self.num_units / damped), V.T))
        new = Server(
            step=jnp.where(found, jnp.maximum(k + 1, self.schedule.search), k + 1),
            z=state.z + state.L @ step,
            L=jnp.where(last, white, state.L),
            sizes=counts,
            at=at + step,
            gradients=gradients,
            places=places,
            variance=variances,
            curvature=total,
            loc=loc,
            root=_root_of_inverse(precision, state.L),
            narrow=_root_of_inverse(_root_with_prior(V, curved, P), state.L),
            coarse=fresh(state.coarse) | is_coarse(sd, self.num_units * number),
            undetermined=undetermined,
            moved=moved,
            fewest=jnp.minimum(undetermined, state.fewest),
            waited=waited.astype(jnp.int32),
            made=made,
            multiplier=state.multiplier,
        )
        planned = state.step < len(self.schedule.steps)
        # A step to where nothing is finite is not taken, and no more is lost than its budget.
        fine = all_finite(new)
        after = where(fine, new, state._replace(step=k + 1, moved=jnp.array(-1.0), made=made))
        return after, Info(0.5 * d * after.moved**2, planned, after.moved)

    @property
    def _lengths(self) -> Array:
        """Return for each step the number of steps of its phase."""
        starts = np.flatnonzero([s.first for s in self.schedule.steps])
        ends = np.append(starts[1:], len(self.schedule.steps))
        return jnp.asarray(np.repeat(ends - starts, ends - starts), float)

    @property
    def _starts(self) -> Array:
        """Return for each step the number of the first step of its phase."""
        starts = np.maximum.accumulate([i * s.first for i, s in enumerate(self.schedule.steps)])
        return jnp.asarray(starts)


def _root_with_prior(V: Array, curved: Array, P: Array) -> Array:
    """Return the root (d, d) of the precision ``V diag(curved) V' + P P'``.

    Directions may differ by more than single precision tells apart in the sum itself, which then
    has no root: an effect under a small scale beside one that neither data nor prior know.
    """
    return linalg.root_of(jnp.concatenate([V * jnp.sqrt(curved), P], axis=1))


def _times_inverse(root: Array, g: Array) -> Array:
    """Return the inverse of ``root root'`` times a vector (d,), for lower triangular ``root``."""
    return linalg.solve(root, linalg.solve(root, g), transposed=True)


def _root_of_inverse(root: Array, L: Array) -> Array:
    """Return the root of the covariance in the frame ``L`` (d, d) of a precision's root (d, d)."""
    return linalg.root_of(linalg.solve(root, L.T).T)


def _as_vector(matrix: Array) -> Array:
    """Return a symmetric matrix as a vector of the same length (Frobenius)."""
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))


def _as_symmetric(vector: Array, d: int) -> Array:
    """Return the matrix (d, d) of :func:`_as_vector`."""
    rows, columns = np.triu_indices(d)
    halved = vector / np.where(rows == columns, 2.0, math.sqrt(2))
    half = jnp.zeros((d, d)).at[rows, columns].set(halved)
    return half + half.T
