r"""Newton's method with noise: the posterior from a few sums of clipped numbers.

At a point ``z`` of the globals, in a frame :math:`z + L u`, silos send the sums over their units
(rows with their latents integrated out, or whole silos)

.. math::
    G = \sum_i \mathrm{clip}_C(L' \nabla \ell_i) + N(0, s_G^2), \qquad
    H = \sum_i \mathrm{clip}_{C_H}(L' A_i L) + N(0, s_H^2),

where :math:`A_i` is the negative Hessian of the unit's log likelihood, or for many globals
:math:`\nabla \ell_i \nabla \ell_i'`. All that the server computes from them costs no privacy:

1. Curvature that cannot be told from noise is replaced. The spectrum of a symmetric matrix of noise
   with sd :math:`s` ends at :math:`s \sqrt{2d}`. Eigenvalues below this edge cannot be told from
   noise; there columns count as uncorrelated. Above the edge they are shrunk as those of a matrix
   with a few large ones (Benaych-Georges and Nadakuditi 2011).
2. A phase is some steps of Newton's method in one frame, whose sums are used together: each gives
   :math:`b = G + A L^{-1}(z_k - z)`. With :math:`b \mid u \sim N(A u, A + S)`, where ``A`` is the
   variance of a gradient and ``S`` that of the noise, the posterior's precision is that of the
   prior and :math:`A (A + S)^{-1} A`: it is wider than the posterior without noise.
3. The next frame is whitened by the curvature. So directions that the first units hide, as an
   intercept beside a covariate far from zero, come out of the noise; and the noise, which is the
   same for all directions of the frame, is small for all of them.
4. The search begins at the medians of the prior, where it says something of the place, which costs
   nothing: a residual's sd of 12 is far from 1, and near to what the prior says of it.
5. The first phases search for the mode until no step of a phase is longer than its own noise, and
   no direction is hidden by noise, or none has come out of it for some phases. The rest of the
   search is then left out, and its budget not spent. The posterior is that of the last phase; it is
   wider where the last step is longer than its noise.

Clipping lengths are from the units' lengths, of which silos send histograms with noise at the
beginning of a phase. The first units of the frame are such quantiles, too, for each coordinate.

Ganesh et al. (2023) have Newton steps under differential privacy for logistic regression, with a
regularised Hessian. Frame, phases, clipping lengths and the posterior are this package's own;
the last is that of Bernstein and Sheldon (2019) for linear regression, at the mode.

The server's part is plain Python, and so are a silo's clips and noise; compiled are derivatives of
the text alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.linalg import solve_triangular

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.trees import Numbers
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.dp_newton.units import (
    HIGHEST,
    LOWEST,
    MAX_SHARE_HIDDEN,
    MIN_SDS_OF_COUNT,
    UNCLIPPED,
    Phase,
    PrivateUnits,
    Releases,
    UnitDerivatives,
    as_symmetric,
    as_vector,
    best_clip,
    clipped,
    histogram,
    quantile,
)
from numpyro_fed.numerics.gaussian import Gaussian, identity, root_of
from numpyro_fed.rounds.exchange import AskSilos, Exchange, FederatedAlgorithm, Reply, Round
from numpyro_fed.rounds.names import PRIVATE_SIZES, PRIVATE_SUMS, PRIVATE_UNITS
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.expand import ASIDE, Prior, prior_draws, shape

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
CLIP_IF_UNSEEN = 4.0
# The longest step, in units of the frame, in which a row's gradient is about one long. With 3 a
# regression whose log scale began far too low had not come to rest in one of six private fits, and
# with 30 one of few events in four of ten (docs/results/privacy.md).
LONGEST = 10.0
# And in sds of the prior at the start: noise may hide that a density flattens out, as that of the
# scale of effects does far out.
LONGEST_IN_PRIOR = 1.0
# A step so long, in sds of the posterior with its noise (the root of their mean square over
# coordinates), may be noise alone.
NEAR = 2.0
# Noise alone moves one of a hundred coordinates by four sds in one of two hundred steps, which is
# then as near as NEAR. The mean square over a hundred would hide one that is ten sds away.
ONE_OF_MANY = 2.0
# Phases after which a search ends although noise hides as many directions as before: for ten more
# it would drift. With fewer it ended before a frame had shown the slope of a calendar year.
PATIENCE = 3


class NewtonQuestion(NamedTuple):
    """A question to silos: which step, the point ``z`` (d,), the frame ``L`` (d, d), and clips.

    Steps are numbered over all phases; sizes are asked for at the first step of a phase. Noise
    multipliers are not in it: a silo takes those of the phase from the plan, answers each step
    once, and none before one that it has answered. Noise grows with the clipping lengths.
    """

    step: np.ndarray
    z: np.ndarray
    L: np.ndarray
    clip: np.ndarray
    clip_curvature: np.ndarray


class Answered(NamedTuple):
    """A silo's state: whether it has told units, its next phase for sizes, and step for sums."""

    units: Numbers
    sizes: Numbers
    sums: Numbers


class PrivateSums(NamedTuple):
    """A silo's sums: gradient (d,), and curvature as a vector (d * (d + 1) / 2,)."""

    gradient: np.ndarray
    curvature: np.ndarray


class NewtonServer(NamedTuple):
    """The state of the server between two phases.

    ``moved`` is how long the last step wanted to be, in sds of the posterior without its excess,
    divided by the root of ``d``, or how far it moved one coordinate, divided by
    :data:`ONE_OF_MANY`, if that is more; -1 where nothing finite came of it.
    """

    phase: Numbers | float  # the next one; -1 before the first units of the frame are known
    z: Numbers  # (d,), the point of the next step
    L: Numbers  # (d, d), its frame
    loc: Numbers  # (d,), the mean of the posterior
    root: Numbers  # (d, d), of its covariance
    undetermined: Numbers | float  # directions whose curvature could not be told from noise
    coarse: Numbers | float  # whether many units' lengths are hidden by their histogram's noise
    moved: Numbers | float
    fewest: Numbers | float  # undetermined directions of a phase so far
    waited: Numbers | float  # phases since
    made: Numbers  # (phases,) bool
    multiplier: Numbers | float  # of the first release, by which a run knows its budget


@dataclass(frozen=True, eq=False)
class PrivateNewton:
    """The parts of the method."""

    units: PrivateUnits  # what is protected, in a model whose units stand alone
    schedule: Releases
    num_units: int  # rows or silos, about: it scales the frame
    clip: float | None = None  # of gradients, in the place of a quantile
    # The mean number of rows in a unit. The frame of many rows is the narrower, and steps in it may
    # be the longer.
    rows_in_unit: float = 1.0

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[NewtonServer, Answered]:
        """Return first states and exchanges, as other parties know them."""

        def init_server(key: Array) -> NewtonServer:
            d, zero = self.units.model.dim, jnp.zeros((), jnp.int32)
            z, eye = jnp.full(d, ASIDE), jnp.eye(d)
            return NewtonServer(
                phase=zero - 1,
                z=z,
                L=eye,
                loc=z,
                root=eye,
                undetermined=zero,
                coarse=jnp.array(True),
                moved=jnp.array(-1.0),
                fewest=zero + d,
                waited=zero,
                made=jnp.zeros(len(self.schedule.phases), bool),
                multiplier=jnp.asarray(self.schedule.units, jnp.result_type(float)),
            )

        return FederatedAlgorithm(
            init_server=init_server,
            init_silo=lambda key, data: Answered(*jnp.zeros((3,), jnp.int32)),
            round=Round(self.exchanges[1:]),
            shared=lambda server: Shared(
                {},
                Gaussian.of_root(jnp.asarray(server.loc), jnp.asarray(server.root)).params(),
                identity(server.loc.shape),
            ),
            opening=(Round(self.exchanges[:1]),),
        )

    # At silos.

    @cached_property
    def exchanges(self) -> tuple[Exchange[Any, Any, Any], ...]:
        """Return those that tell units, and lengths and sums of each step of a phase."""
        d, bins, steps = self.units.model.dim, HIGHEST - LOWEST + 1, self.schedule.steps
        num_steps = steps * len(self.schedule.phases)
        sums = PrivateSums(shape(d), shape(d * (d + 1) // 2))
        return (
            self._exchange(PRIVATE_UNITS, "units", num_steps, self._tell_units, shape(d, bins)),
            self._exchange(PRIVATE_SIZES, "sizes", steps, self._tell_sizes, shape(2, bins)),
            *(
                self._exchange(f"{PRIVATE_SUMS} {i + 1}", "sums", 1, self._tell_sums, sums)
                for i in range(steps)
            ),
        )

    def _exchange(
        self, name: str, counter: str, steps: int, tell: Callable[..., Any], up: object
    ) -> Exchange[Any, Any, Any]:
        """Return the exchange in which a silo tells ``up`` once in so many steps."""
        # ``counter`` is the field of the silo's state that counts its answers.
        d, each, phases = self.units.model.dim, self.schedule.steps, self.schedule.phases
        step: Any = jax.ShapeDtypeStruct((), jnp.int32)
        asked = NewtonQuestion(step, shape(d), shape(d, d), shape(), shape())

        def reply(
            noise: object, down: NewtonQuestion, state: Answered, data: SiloData
        ) -> tuple[Reply[Any], Answered]:
            number, k = int(down.step) // steps, int(down.step) // each
            before = np.asarray(getattr(state, counter))
            planned = (before <= number) & (k < len(phases))
            found = self.units.derivatives(down.z, down.L, data)
            # Zeros, which cannot be used, where the budget is not planned for an answer.
            nothing = jax.tree.map(lambda a: np.zeros(a.shape), up)
            ups = [
                tell(down, phases[k], jax.tree.map(lambda a, i=i: a[i], found)) if can else nothing
                for i, can in enumerate(planned)
            ]
            after = np.where(planned, number + 1, before).astype(np.int32)
            stack = jax.tree.map(lambda *parts: np.stack(parts), *ups)
            return Reply(stack, planned), state._replace(**{counter: after})

        return StackedExchange(name, reply, messages=lambda: (asked, up))

    def _tell_units(self, down: NewtonQuestion, phase: Phase, units: UnitDerivatives) -> np.ndarray:
        """Return how many units' roots of curvature are of each power of two, by coordinate."""
        sizes, hessians = np.abs(units[0]), units[1]
        if hessians is not None:
            sizes = np.sqrt(np.abs(np.diagonal(hessians, axis1=1, axis2=2)))
        counts = np.stack([histogram(column) for column in sizes.T])
        change = math.sqrt(self.units.model.dim)  # one count in each coordinate
        return self.units.with_noise(counts, change, self.schedule.units)

    def _tell_sizes(self, down: NewtonQuestion, phase: Phase, units: UnitDerivatives) -> np.ndarray:
        """Return how many gradients, and curvatures, have a length of each power of two."""
        g, hessians = units
        lengths = np.linalg.norm(g, axis=1)
        curved = lengths**2 if hessians is None else np.linalg.norm(hessians, axis=(1, 2))
        counts = np.stack([histogram(lengths), histogram(curved)])
        return self.units.with_noise(counts, math.sqrt(2.0), phase.sizes)

    def _tell_sums(self, down: NewtonQuestion, phase: Phase, units: UnitDerivatives) -> PrivateSums:
        """Return the sums of the units' clipped gradients and curvatures."""
        clip, clip_curvature = float(down.clip), float(down.clip_curvature)
        g, C = units
        gradient = self.units.noisy_sum(g, clip, phase.gradient)
        if C is not None:
            curvature = self.units.noisy_sum(as_vector(C), clip_curvature, phase.curvature)
            return PrivateSums(gradient, curvature)
        g = clipped(g, abs(clip))
        length = np.maximum((g**2).sum(1), 1e-300)  # of g g'
        total = (g * np.minimum(1.0, abs(clip_curvature) / length)[:, None]).T @ g
        hidden = self.units.with_noise(as_vector(total), clip_curvature, phase.curvature)
        return PrivateSums(gradient, hidden)

    # At the server.

    @np.errstate(all="ignore")  # of steps to nowhere
    def phase(self, ask: AskSilos, server: NewtonServer) -> NewtonServer:
        """Return the state after the next phase: a histogram of lengths, and some steps."""
        if server.phase < 0:  # the first units of the frame are not known yet
            server = server._replace(z=self._start)
            counts, d = ask(self.exchanges[0], _place(0, server.z, server.L)), len(server.z)
            sd = math.sqrt(d) * self.schedule.units * self.units.spread
            sizes = np.array([quantile(column, sd, UNIT_QUANTILE) for column in counts])
            # No unit is longer than the prior's, which it is where no count stands out of the
            # noise.
            L = np.diag(np.minimum(1 / np.maximum(sizes, 1e-30), self._prior_sd))
            if not np.isfinite(L).all():
                raise ModelError(
                    "the curvature of the prior is not finite where the search begins: at its "
                    "medians, or close to zero, in unconstrained space. Look at its scales there."
                )
            server = server._replace(phase=0, L=L)
        k = int(server.phase)
        # A phase that leads to where nothing is finite loses no more than its budget.
        lost = server._replace(
            phase=k + 1,
            moved=-1.0,
            made=np.asarray(server.made) | (np.arange(len(server.made)) == k),
        )
        try:
            after = _in_precision(self._steps(ask, lost, k))
        except np.linalg.LinAlgError:
            return _in_precision(lost)
        return after if all(np.isfinite(a).all() for a in after) else _in_precision(lost)

    def _steps(self, ask: AskSilos, server: NewtonServer, k: int) -> NewtonServer:
        d, steps, spread = self.units.model.dim, self.schedule.steps, self.units.spread
        noise, z, L = self.schedule.phases[k], *(np.asarray(a, float) for a in (server.z, server.L))
        _, lengths, *sums = self.exchanges

        counts, sd = ask(lengths, _place(k * steps, z, L)), math.sqrt(2) * noise.sizes * spread
        # The posterior must not be moved by what is clipped. A search takes its way in any case.
        if self.clip is not None:
            clip = self.clip
        elif k < self.schedule.search:
            clip = quantile(counts[0], sd, GRADIENT_QUANTILE)
        else:  # by the noise in the mean of a phase's gradients, of clips of one
            clip = best_clip(counts[0], sd, noise.gradient * spread / math.sqrt(steps), d)
        q = CURVATURE_QUANTILE if self.units.has_products else GRADIENT_QUANTILE
        # If no count stands out there are too few units; one whitened unit is some sqrt(d) long.
        clip = clip or CLIP_IF_UNSEEN * math.sqrt(d)
        clip_curvature = quantile(counts[1], sd, q) or 1.0 * d
        at, moved, told = np.zeros(d), [], []
        for i, exchange in enumerate(sums):
            here = z + L @ at
            up: PrivateSums = ask(exchange, _place(k * steps + i, here, L, clip, clip_curvature))
            told.append(
                (up.gradient.astype(float), as_symmetric(up.curvature.astype(float), d), at)
            )
            g, H, place = (np.mean(a, 0) for a in zip(*told, strict=True))
            edge = clip_curvature * noise.curvature * spread * math.sqrt(2 * d / (i + 1))
            variance = (clip * noise.gradient * spread) ** 2 / (i + 1)
            found, step = self._estimate(g, H, edge, variance, place - at, here, server)
            at = at + step
            moved.append(found.moved)

        waited = 0 if found.undetermined < server.fewest else int(server.waited) + 1
        hidden = found.undetermined > 0 and waited < PATIENCE
        # Each step, since clips are long far from the mode, and beside their noise a step is short.
        ended = max(moved) <= NEAR and not hidden
        # Where the curvature changes on the way, a step may end as far from the mode as it is long:
        # without its excess one in twenty fits of 2,000 rows with epsilon 0.5 was five sds off.
        excess = max(1 - NEAR / max(found.moved, 1e-30), 0.0) * (L @ step)
        return found._replace(
            phase=max(k + 1, self.schedule.search) if ended else k + 1,
            z=z + L @ at,
            root=root_of(np.column_stack([found.root, excess])),
            coarse=bool(MIN_SDS_OF_COUNT * sd > MAX_SHARE_HIDDEN * self.num_units),
            fewest=min(int(found.undetermined), int(server.fewest)),
            waited=waited,
        )

    def _estimate(
        self,
        g: np.ndarray,
        H: np.ndarray,
        edge: float,
        variance: float,
        away: np.ndarray,
        z: np.ndarray,
        server: NewtonServer,
    ) -> tuple[NewtonServer, np.ndarray]:
        """Return the posterior and the next frame at a place ``z`` (d,), and the step from it."""
        # ``g`` (d,) is the mean of the gradients, as of a place ``away`` (d,) from here in the
        # frame, and ``variance`` that of the noise in each of its numbers; ``H`` (d, d) is the mean
        # of the curvatures, whose noise has a spectrum that ends at ``edge``.
        e, V = np.linalg.eigh(H)
        above = np.where(e > edge, 0.5 * (e + np.sqrt(np.maximum(e**2 - edge**2, 0.0))), 0.0)
        apart = (V**2 * np.maximum(np.diagonal(H), 0.0)[:, None]).sum(0)
        curved = np.maximum(above, np.minimum(edge / 2, apart))  # as of the matrix without noise
        # The same for a step: positive, and not below what noise may hide. Where the density curves
        # upwards, a step as long as if it curved as much downwards.
        damped = np.maximum(np.where(e < -edge, -e, above), edge / 2)
        L, (slope, P) = np.asarray(server.L, float), self._prior(z)
        slope, P = L.T @ slope, L.T @ P
        b = g + V @ (curved * (V.T @ away))
        # The posterior, with the variance of the noise.
        known = curved / (curved + variance)
        precision = root_with_prior(V, known * curved, P)
        # The step, damped where curvature is not known.
        step = times_inverse(root_with_prior(V, damped, P), b + slope)
        root = solve_triangular(precision, L.T, lower=True, check_finite=False).T
        alone = np.abs(L @ step) / np.linalg.norm(root, axis=1)
        moved = np.linalg.norm(precision.T @ step) / math.sqrt(len(z))
        posterior = server._replace(
            L=L @ (V * np.sqrt(self.num_units / damped)) @ V.T,
            loc=z + L @ times_inverse(precision, V @ (known * (V.T @ b)) + slope),
            root=root,
            undetermined=int((e <= edge).sum()),
            moved=float(max(moved, alone.max() / ONE_OF_MANY)),
        )
        return posterior, self._cut(step, L)

    def _cut(self, step: np.ndarray, L: np.ndarray) -> np.ndarray:
        """Return a step (d,) in the frame that is not too long; none if it is not finite."""
        longest = LONGEST * math.sqrt(len(step) * self.rows_in_unit)
        away = np.abs(L @ step) / self._prior_sd
        share = min(longest / np.linalg.norm(step), LONGEST_IN_PRIOR / away.max())
        cut = step * min(1.0, share)
        return cut if np.isfinite(cut).all() else np.zeros_like(step)

    def _prior(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient (d,) of the prior, and a root (d, d) of its negative Hessian."""
        # Where the density curves upwards it counts as flat.
        place = z[None].astype(jnp.result_type(float))
        _, _, g, curvature = self._log_prior(np.zeros((1, 0, 0), place.dtype), place)
        e, V = np.linalg.eigh(curvature[0].astype(float))
        return g[0].astype(float), V * np.sqrt(np.maximum(e, 0.0))

    @cached_property
    def _log_prior(self) -> Prior:
        return Prior(self.units.model, np.zeros(0, int))

    @cached_property
    def _prior_sd(self) -> np.ndarray:
        """Return the prior's standard deviations (d,) by its curvature where searches begin."""
        _, P = self._prior(self._start)
        return 1 / np.sqrt(np.maximum((P**2).sum(1), 1e-12))

    @cached_property
    def _start(self) -> np.ndarray:
        """Return the medians (d,) of the prior; close to zero where it says little of the place.

        It does where the middle half of the prior is wider than zero is far from the median, as
        for the log of a vague Gamma, whose median is -60.
        """
        draws, aside = prior_draws(self.units.model), np.full(self.units.model.dim, ASIDE)
        if draws is None:
            return aside
        with np.errstate(invalid="ignore"):  # of infinite draws
            low, median, high = np.quantile(draws.astype(float), (0.25, 0.5, 0.75), axis=0)
            return np.where(np.abs(median) > high - low, median, aside)


def root_with_prior(V: np.ndarray, curved: np.ndarray, P: np.ndarray) -> np.ndarray:
    """Return the root (d, d) of the precision ``V diag(curved) V' + P P'``.

    Directions may differ by more than a sum of matrices keeps apart, which then has no root: an
    effect under a small scale beside one that neither data nor prior know.
    """
    return root_of(np.column_stack([V * np.sqrt(curved), P]))


def times_inverse(root: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the inverse of ``root root'`` times a vector (d,), for lower triangular ``root``."""
    solve = partial(solve_triangular, root, lower=True, check_finite=False)
    found: np.ndarray = solve(solve(g), trans=1)
    return found


def _place(
    step: int, z: Numbers, L: Numbers, clip: float = 0.0, clip_curvature: float = 0.0
) -> NewtonQuestion:
    real = jnp.result_type(float)
    numbers = (np.asarray(a, real) for a in (z, L, clip, clip_curvature))
    return NewtonQuestion(np.asarray(step, np.int32), *numbers)


def _in_precision(server: NewtonServer) -> NewtonServer:
    """Return the state in the types of the first one, in which it is saved."""
    kinds: dict[str, Any] = {"f": jnp.result_type(float), "i": np.int32, "b": np.bool_}
    arrays = map(np.asarray, server)
    return NewtonServer(*(a.astype(kinds[a.dtype.kind]) for a in arrays))
