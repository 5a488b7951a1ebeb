r"""Newton's method with noise: the posterior from a few sums of clipped numbers.

At a point ``z`` of the globals, in a frame :math:`z + L u`, silos send the sums over their units
(rows with their latents integrated out, or whole silos)

.. math::
    G = \sum_i \mathrm{clip}_C(L' \nabla \ell_i) + N(0, s_G^2), \qquad
    H = \sum_i \mathrm{clip}_{C_H}(L' A_i L) + N(0, s_H^2),

where :math:`A_i` is the negative Hessian of the unit's log likelihood, or for many globals
:math:`\nabla \ell_i \nabla \ell_i'`. All that the server computes from them costs no privacy:

1. Curvature that cannot be told from noise is replaced (``noisy_curvature.py``).
2. A phase is some steps of Newton's method in one frame, whose sums are used together: each gives
   :math:`b = G + A L^{-1}(z_k - z)`. With :math:`b \mid u \sim N(A u, A + S)`, where ``A`` is the
   variance of a gradient and ``S`` that of the noise, the posterior's precision is that of the
   prior and :math:`A (A + S)^{-1} A`: it is wider than the posterior without noise.
3. The next frame is whitened by the curvature. So directions that the first units hide, as an
   intercept beside a covariate far from zero, come out of the noise; and the noise, which is the
   same for all directions of the frame, is small for all of them.
4. The first phases search for the mode until no step of a phase is longer than its own noise, and
   no direction is hidden by noise, or none has come out of it for some phases. The rest of the
   search is then left out, and its budget not spent. The posterior is that of the last phase; it is
   wider where the last step is longer than its noise.

Clipping lengths are from the units' lengths, of which silos send histograms with noise at the
beginning of a phase. The first units of the frame are such quantiles, too, for each coordinate.

Ganesh et al. (2023) have Newton steps under differential privacy for logistic regression, with a
regularised Hessian. Frame, phases, clipping lengths and the posterior are this package's own;
the last is that of Bernstein and Sheldon (2019) for linear regression, at the mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
from numpyro_fed.algorithms.expand import ASIDE
from numpyro_fed.algorithms.noisy_curvature import (
    Spectrum,
    as_symmetric,
    root_of_inverse,
    root_with_prior,
    times_inverse,
)
from numpyro_fed.algorithms.private_schedule import (
    HESSIANS_UP_TO,
    SIZES,
    UNITS,
    Phase,
    Schedule,
    sums_of,
)
from numpyro_fed.algorithms.private_units import (
    UNCLIPPED,
    PrivateUnits,
    best_clip,
    histogram,
    is_coarse,
    quantile,
)
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Gaussian, dot
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite, where

# Of the roots of curvature, for the first units of the frame. A lower one takes the many zeros of a
# column for its scale: with 0.75 the loss of a regression on Adult was 0.01 higher.
UNIT_QUANTILE = 0.95
# Units' lengths up to which gradients, and curvatures, are not clipped. What is clipped moves the
# mode, and with outcomes of which few are ones it moves it far.
GRADIENT_QUANTILE, CURVATURE_QUANTILE = UNCLIPPED, 0.9
# The clipping length of gradients, in root d, where no count stands out. It is long: the posterior
# counts the noise, and cannot count what is cut off. With 1 the posterior of 500 rows with epsilon
# 0.5 was over two sds off in 88 % of the fits, and with 4 in 25 %. Curvature that is cut off makes
# the posterior wider, so that its clip may be short.
UNSEEN = 4.0
# The longest step, in units of the frame, in which a row's gradient is about one long. With 3 a
# regression whose log scale began far too low had not come to rest in one of six private fits, and
# with 30 one of few events in four of ten (docs/results/privacy.md).
LONGEST = 10.0
# And in sds of the prior at the start: noise may hide that a density flattens out, as that of the
# scale of effects does far out.
MOST_PRIOR = 1.0
# A step so long, in sds of the posterior with its noise (the root of their mean square over
# coordinates), may be noise alone.
NEAR = 2.0
# Phases after which a search ends although noise hides as many directions as before: for ten more
# it would drift. With fewer it ended before a frame had shown the slope of a calendar year.
PATIENCE = 3


class Place(NamedTuple):
    """A question to silos: which step, the point ``z`` (d,), the frame ``L`` (d, d), and clips.

    Steps are numbered over all phases; sizes are asked for at the first step of a phase. Noise
    multipliers are not in it: a silo takes those of the phase from the plan, answers each step
    once, and none before one that it has answered. Noise grows with the clipping lengths.
    """

    step: Array
    z: Array
    L: Array
    clip: Array
    clip_curvature: Array


class Asked(NamedTuple):
    """A silo's state: whether it has told units, its next phase for sizes, and step for sums."""

    units: Array
    sizes: Array
    sums: Array


class Sums(NamedTuple):
    """A silo's sums: gradient (d,), and curvature as a vector (d * (d + 1) / 2,)."""

    gradient: Array
    curvature: Array


class Server(NamedTuple):
    """The state of the server between two phases.

    Attributes
    ----------
    phase : () int
        The next phase of the schedule.
    z, L : (d,), (d, d)
        Point and frame of the next step.
    loc, root : (d,), (d, d)
        Mean of the posterior, and root of its covariance without ``excess``.
    narrow : (d, d)
        The root without the variance of the noise, too.
    undetermined : () int
        Directions whose curvature could not be told from noise.
    coarse : () bool
        Whether many units' lengths are hidden by the noise of their histogram.
    moved : ()
        How long the last step wanted to be, in sds of the posterior, divided by the root of ``d``;
        -1 where nothing finite came of it.
    excess : (d,)
        The part of the last step that noise does not explain; zero if it is near.
    fewest, waited : () int
        The fewest undetermined directions of a phase so far, and the phases since.
    made : (phases,) bool
        The phases of the schedule that were made.
    multiplier : ()
        The noise multiplier of the first release, by which a run knows its budget.
    """

    phase: Array
    z: Array
    L: Array
    loc: Array
    root: Array
    narrow: Array
    undetermined: Array
    coarse: Array
    moved: Array
    excess: Array
    fewest: Array
    waited: Array
    made: Array
    multiplier: Array

    @property
    def posterior(self) -> Gaussian:
        """Return the posterior, which is wider where the search was still on its way.

        Where the curvature changes on the way, a step of Newton's method may end as far from the
        mode as it is long: without its excess one in twenty fits of 2,000 rows with epsilon 0.5 was
        five sds off.
        """
        columns = jnp.concatenate([self.root, self.excess[:, None]], axis=1)
        return Gaussian.of_root(self.loc, linalg.root_of(columns))


class Means(NamedTuple):
    """Means over the steps of a phase, in its frame, and the noise in them.

    Attributes
    ----------
    gradient, place : (d,)
    curvature : (d, d)
    variance : ()
        That of the noise in each number of the gradient.
    edge : ()
        Where the spectrum of the noise in the curvature ends.
    """

    gradient: Array
    place: Array
    curvature: Array
    variance: Array
    edge: Array


class Estimate(NamedTuple):
    """A posterior, and the next step of Newton's method, from the sums of a phase so far.

    Attributes
    ----------
    loc, root, narrow, undetermined
        As in :class:`Server`.
    step : (d,)
        In the frame.
    moved : ()
        How long the step wanted to be; see :class:`Server`.
    whitened : (d, d)
        The frame that is whitened by the curvature.
    """

    loc: Array
    root: Array
    narrow: Array
    undetermined: Array
    step: Array
    moved: Array
    whitened: Array


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
        """Return the algorithm: first the units of the frame, then a phase in each round."""
        units = Exchange(UNITS, self._units_of_silo)
        sizes = Exchange(SIZES, self._sizes_of_silo)
        sums = [Exchange(sums_of(i), self._sums_of_silo) for i in range(self.schedule.steps)]
        return FederatedAlgorithm(
            init_server=self._init_server,
            init_silo=lambda key, data: Asked(*jnp.zeros((3,), jnp.int32)),
            round=Round((sizes, *sums), self._run),
            shared=lambda server: Shared({}, server.posterior.params(), identity(server.loc.shape)),
            done=lambda server: server.phase >= len(self.schedule.phases),
            opening=(Round((units,), self._begin),),
        )

    def _init_server(self, key: Array) -> Server:
        d = self.units.model.dim
        z = self.units.model.init_global(key, None) + ASIDE
        none = jnp.zeros((), jnp.int32)
        return Server(
            phase=none,
            z=z,
            L=jnp.eye(d),
            loc=z,
            root=jnp.eye(d),
            narrow=jnp.eye(d),
            undetermined=none,
            coarse=jnp.array(True),
            moved=jnp.array(-1.0),
            excess=jnp.zeros(d),
            fewest=jnp.array(d, jnp.int32),
            waited=none,
            made=jnp.zeros(len(self.schedule.phases), bool),
            multiplier=jnp.asarray(self.schedule.units, jnp.result_type(float)),
        )

    # At a silo.

    def _phase_of(self, step: Array) -> tuple[Array, Phase[Array]]:
        """Return the number of the phase of a step, and its noise multipliers."""
        k = step // self.schedule.steps
        return k, self.schedule.phase_at(k)

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
        k, phase = self._phase_of(down.step)
        up = self.units.added(counts, jnp.sqrt(2.0), phase.sizes)
        planned = (k >= state.sizes) & (k < len(self.schedule.phases))
        after = jnp.where(planned, k + 1, state.sizes)
        return self._reply(up, planned), state._replace(sizes=after)

    def _sums_of_silo(
        self, noise: object, down: Place, state: Asked, data: SiloData
    ) -> tuple[Reply[Sums], Asked]:
        """Add up the units' clipped gradients and curvatures."""
        units, (k, phase) = self.units, self._phase_of(down.step)
        g = units.gradients(down.z, down.L, data)
        gradient = units.sum_of(g, down.clip, phase.gradient)
        if self.has_products:
            C = units.sum_of_products(g, down.clip, down.clip_curvature, phase.curvature)
        else:
            each = units.curvatures(down.z, down.L, data)
            C = units.sum_of_curvatures(each, down.clip_curvature, phase.curvature)
        planned = (down.step >= state.sums) & (k < len(self.schedule.phases))
        after = jnp.where(planned, down.step + 1, state.sums)
        return self._reply(Sums(gradient, C), planned), state._replace(sums=after)

    def _reply(self, up: Up, planned: Array) -> Reply[Up]:
        """Return a reply: zeros, which cannot be used, where the budget is not planned for it."""
        return Reply(jax.tree.map(lambda a: jnp.where(planned, a, 0.0), up), planned)

    # At the server.

    def _begin(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        zero = jnp.zeros(())
        counts = ask(UNITS, Place(state.phase, state.z, state.L, zero, zero)).up
        sd = jnp.sqrt(1.0 * self.units.model.dim) * self.schedule.units * self.units.spread
        size = jax.vmap(lambda c: quantile(c, sd, UNIT_QUANTILE))(counts)
        # No unit is longer than the prior's, which it is where no count stands out of the noise.
        L = jnp.diag(jnp.minimum(1 / jnp.maximum(size, 1e-30), self._prior_sd(state.z)))
        return state._replace(L=L), Info(zero, jnp.isfinite(L).all())

    def _run(self, state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        d, steps, spread = self.units.model.dim, self.schedule.steps, self.units.spread
        k = jnp.minimum(state.phase, len(self.schedule.phases) - 1)
        phase, z, L = self.schedule.phase_at(k), state.z, state.L

        down = Place(k * steps, z, L, jnp.zeros(()), jnp.zeros(()))
        counts, sd = ask(SIZES, down).up, math.sqrt(2.0) * phase.sizes * spread
        C, CH = self._clips(counts, sd, phase.gradient * spread / math.sqrt(steps), k)

        at = place = gradient = jnp.zeros(d)
        curvature, longest = jnp.zeros((d, d)), jnp.zeros(())
        for i in range(steps):
            sums = ask(sums_of(i), Place(k * steps + i, z + L @ at, L, C, CH)).up
            n = i + 1
            place = place + at
            gradient = gradient + sums.gradient
            curvature = curvature + as_symmetric(sums.curvature, d)
            means = Means(
                gradient / n,
                place / n,
                curvature / n,
                (C * phase.gradient * spread) ** 2 / n,
                CH * phase.curvature * spread * jnp.sqrt(2.0 * d / n),
            )
            found = self._estimate(means, at, z + L @ at, L)
            at = at + found.step
            longest = jnp.maximum(longest, found.moved)

        waited = jnp.where(found.undetermined < state.fewest, 0, state.waited + 1)
        hidden = (found.undetermined > 0) & (waited < PATIENCE)
        # Each step, since clips are long far from the mode, and beside their noise a step is short.
        ended = (longest <= NEAR) & ~hidden
        made = state.made.at[k].set(True)
        new = Server(
            phase=jnp.where(ended, jnp.maximum(k + 1, self.schedule.search), k + 1),
            z=z + L @ at,
            L=found.whitened,
            loc=found.loc,
            root=found.root,
            narrow=found.narrow,
            undetermined=found.undetermined,
            coarse=is_coarse(sd, self.num_units),
            moved=found.moved,
            excess=jnp.maximum(1 - NEAR / found.moved, 0.0) * (L @ found.step),
            fewest=jnp.minimum(found.undetermined, state.fewest),
            waited=waited.astype(jnp.int32),
            made=made,
            multiplier=state.multiplier,
        )
        planned = state.phase < len(self.schedule.phases)
        # A phase that led to where nothing is finite is left, and no more is lost than its budget.
        left = state._replace(phase=k + 1, moved=jnp.array(-1.0), made=made)
        after = where(all_finite(new), new, left)
        return after, Info(0.5 * d * after.moved**2, planned, after.moved)

    def _clips(self, counts: Array, sd: Array, noise: Array, k: Array) -> tuple[Array, Array]:
        """Return the clipping lengths of gradients and curvatures, from histograms with noise.

        ``noise`` is the sd of the noise in the mean of a phase's gradients, of clips of one.
        """
        d = self.units.model.dim
        # The posterior must not be moved by what is clipped. A search takes its way in any case.
        C = jnp.where(
            k < self.schedule.search,
            quantile(counts[0], sd, GRADIENT_QUANTILE),
            best_clip(counts[0], sd, noise, d),
        )
        CH = quantile(counts[1], sd, CURVATURE_QUANTILE if self.has_products else GRADIENT_QUANTILE)
        # If no count stands out there are too few units; one whitened unit is some sqrt(d) long.
        C = (
            jnp.where(C > 0, C, UNSEEN * math.sqrt(d))
            if self.clip is None
            else jnp.array(self.clip)
        )
        CH = jnp.where(CH > 0, CH, 1.0 * d)
        return C, CH

    def _estimate(self, means: Means, at: Array, z: Array, L: Array) -> Estimate:
        """Return posterior and step at the place ``at`` (d,) in the frame, which is ``z``."""
        slope, P = self._prior(z)
        slope, P = L.T @ slope, dot(L.T, P)
        V, curved, damped, undetermined = Spectrum.of(means.curvature, means.edge)
        b = means.gradient + V @ (curved * (V.T @ (means.place - at)))
        # The posterior, with the variance of the noise.
        known = curved / (curved + means.variance)
        precision = root_with_prior(V, known * curved, P)
        loc = z + L @ times_inverse(precision, V @ (known * (V.T @ b)) + slope)
        # The step, damped where curvature is not known.
        step = times_inverse(root_with_prior(V, damped, P), b + slope)
        moved = jnp.linalg.norm(precision.T @ step) / math.sqrt(len(z))
        return Estimate(
            loc=loc,
            root=root_of_inverse(precision, L),
            narrow=root_of_inverse(root_with_prior(V, curved, P), L),
            undetermined=undetermined,
            step=self._cut(step, L),
            moved=moved,
            whitened=dot(L, dot(V * jnp.sqrt(self.num_units / damped), V.T)),
        )

    def _cut(self, step: Array, L: Array) -> Array:
        """Return a step (d,) in the frame that is not too long; none if it is not finite."""
        longest = LONGEST * math.sqrt(len(step) * self.rows_in_unit)
        away = jnp.abs(L @ step) / self._prior_sd(jnp.full(len(step), ASIDE))
        share = jnp.minimum(longest / jnp.linalg.norm(step), MOST_PRIOR / away.max())
        cut = step * jnp.minimum(1.0, share)
        return jnp.where(jnp.isfinite(cut).all(), cut, 0.0)

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
