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

The server's part is plain Python, and so are a silo's clips and noise; compiled are derivatives of
the text alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.linalg import solve_triangular

from numpyro_fed.algorithms.base import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Round,
    Shared,
    asked_directly,
)
from numpyro_fed.algorithms.expand import ASIDE, shape
from numpyro_fed.algorithms.noisy_curvature import (
    Spectrum,
    as_symmetric,
    as_vector,
    root_with_prior,
    times_inverse,
)
from numpyro_fed.algorithms.private_schedule import SIZES, UNITS, Phase, Schedule, sums_of
from numpyro_fed.algorithms.private_units import (
    HIGHEST,
    LOWEST,
    UNCLIPPED,
    PrivateUnits,
    best_clip,
    histogram,
    is_coarse,
    quantile,
)
from numpyro_fed.errors import NonFiniteError
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Gaussian, root_of
from numpyro_fed.model.data import SiloData
from numpyro_fed.programs import jit_once
from numpyro_fed.trees import Numbers

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

    step: np.ndarray
    z: np.ndarray
    L: np.ndarray
    clip: np.ndarray
    clip_curvature: np.ndarray


class Asked(NamedTuple):
    """A silo's state: whether it has told units, its next phase for sizes, and step for sums."""

    units: Numbers
    sizes: Numbers
    sums: Numbers


class Sums(NamedTuple):
    """A silo's sums: gradient (d,), and curvature as a vector (d * (d + 1) / 2,)."""

    gradient: np.ndarray
    curvature: np.ndarray


class Server(NamedTuple):
    """The state of the server between two phases.

    Attributes
    ----------
    phase : () int
        The next phase of the schedule; -1 before the first units of the frame are known.
    z, L : (d,), (d, d)
        Point and frame of the next step.
    loc, root : (d,), (d, d)
        Mean of the posterior, and root of its covariance.
    undetermined : () int
        Directions whose curvature could not be told from noise.
    coarse : () bool
        Whether many units' lengths are hidden by the noise of their histogram.
    moved : ()
        How long the last step wanted to be, in sds of the posterior without its excess, divided by
        the root of ``d``; -1 where nothing finite came of it.
    fewest, waited : () int
        The fewest undetermined directions of a phase so far, and the phases since.
    made : (phases,) bool
        The phases of the schedule that were made.
    multiplier : ()
        The noise multiplier of the first release, by which a run knows its budget.
    """

    phase: Numbers
    z: Numbers
    L: Numbers
    loc: Numbers
    root: Numbers
    undetermined: Numbers
    coarse: Numbers
    moved: Numbers
    fewest: Numbers
    waited: Numbers
    made: Numbers
    multiplier: Numbers

    @property
    def loss(self) -> float:
        """Return the gain of the last step that a parabola would promise, in nats."""
        return 0.5 * len(self.z) * float(self.moved) ** 2


class Estimate(NamedTuple):
    """A posterior, and the next step of Newton's method, from the sums of a phase so far.

    Attributes
    ----------
    loc, root : (d,), (d, d)
        As in :class:`Server`.
    undetermined : int
    step : (d,)
        In the frame.
    moved : float
        How long the step wanted to be; see :class:`Server`.
    whitened : (d, d)
        The frame that is whitened by the curvature.
    """

    loc: np.ndarray
    root: np.ndarray
    undetermined: int
    step: np.ndarray
    moved: float
    whitened: np.ndarray


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

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[Server, Asked]:
        """Return first states and exchanges, as other parties know them."""
        return FederatedAlgorithm(
            init_server=self._init_server,
            init_silo=lambda key, data: Asked(*jnp.zeros((3,), jnp.int32)),
            round=Round((self._sizes, *self._sums), asked_directly),
            shared=lambda server: Shared(
                {}, Gaussian.of_root(server.loc, server.root).params(), identity(server.loc.shape)
            ),
            opening=(Round((self._units,), asked_directly),),
        )

    def _init_server(self, key: Array) -> Server:
        d, zero = self.units.model.dim, jnp.zeros((), jnp.int32)
        z, eye = jnp.full(d, ASIDE), jnp.eye(d)
        return Server(
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

    # At silos.

    @cached_property
    def _units(self) -> Exchange[Any, Any, Any]:
        bins = shape(self.units.model.dim, HIGHEST - LOWEST + 1)
        return self._exchange(UNITS, "units", self._tell_units, bins)

    @cached_property
    def _sizes(self) -> Exchange[Any, Any, Any]:
        return self._exchange(SIZES, "sizes", self._tell_sizes, shape(2, HIGHEST - LOWEST + 1))

    @cached_property
    def _sums(self) -> tuple[Exchange[Any, Any, Any], ...]:
        d, names = self.units.model.dim, map(sums_of, range(self.schedule.steps))
        up = Sums(shape(d), shape(d * (d + 1) // 2))
        return tuple(self._exchange(name, "sums", self._tell_sums, up) for name in names)

    def _exchange(
        self, name: str, counter: str, tell: Callable[..., Any], up: Any
    ) -> Exchange[Any, Any, Any]:
        """Return an exchange whose replies ``up`` are counted by a field of a silo's state."""
        d, step = self.units.model.dim, jax.ShapeDtypeStruct((), jnp.int32)
        down = (step, shape(d), shape(d, d), shape(), shape())

        def reply(
            noise: object, down: Place, state: Asked, data: SiloData
        ) -> tuple[Reply[Any], Asked]:
            number, most = self._number(counter, int(down.step))
            before = np.asarray(getattr(state, counter))
            planned = (before <= number) & (number < most)
            found = self.units.derivatives(down.z, down.L, data)
            # Zeros, which cannot be used, where the budget is not planned for an answer.
            nothing = jax.tree.map(lambda a: np.zeros(a.shape), up)
            ups = [
                tell(down, *(a[i] for a in found)) if can else nothing
                for i, can in enumerate(planned)
            ]
            after = np.where(planned, number + 1, before).astype(np.int32)
            stack = jax.tree.map(lambda *parts: np.stack(parts), *ups)
            return Reply(stack, planned), state._replace(**{counter: after})

        return Exchange(name, reply, stacked=True, like=lambda: (Place(*down), up))

    def _number(self, counter: str, step: int) -> tuple[int, int]:
        """Return the number of an answer of this kind at a step, and how many are planned."""
        steps, phases = self.schedule.steps, len(self.schedule.phases)
        numbers = {
            "units": (0, 1),
            "sizes": (step // steps, phases),
            "sums": (step, steps * phases),
        }
        return numbers[counter]

    def _tell_units(self, down: Place, g: np.ndarray, C: np.ndarray | None = None) -> np.ndarray:
        """Return how many units' roots of curvature are of each power of two, by coordinate."""
        sizes = np.abs(g) if C is None else np.sqrt(np.abs(np.diagonal(C, axis1=1, axis2=2)))
        counts = np.stack([histogram(column) for column in sizes.T])
        change = math.sqrt(self.units.model.dim)  # one count in each coordinate
        return self.units.added(counts, change, self.schedule.units)

    def _tell_sizes(self, down: Place, g: np.ndarray, C: np.ndarray | None = None) -> np.ndarray:
        """Return how many gradients, and curvatures, have a length of each power of two."""
        lengths = np.linalg.norm(g, axis=1)
        curved = lengths**2 if C is None else np.linalg.norm(C, axis=(1, 2))
        counts = np.stack([histogram(lengths), histogram(curved)])
        return self.units.added(counts, math.sqrt(2.0), self._phase_at(down.step).sizes)

    def _tell_sums(self, down: Place, g: np.ndarray, C: np.ndarray | None = None) -> Sums:
        """Return the sums of the units' clipped gradients and curvatures."""
        phase, clip, of_curvature = self._phase_at(down.step), *map(float, down[-2:])
        gradient = self.units.sum_of(g, clip, phase.gradient)
        if C is None:
            clips = clip, of_curvature
            return Sums(gradient, self.units.sum_of_products(g, *clips, phase.curvature))
        return Sums(gradient, self.units.sum_of(as_vector(C), of_curvature, phase.curvature))

    def _phase_at(self, step: Numbers) -> Phase:
        return self.schedule.phases[int(step) // self.schedule.steps]

    # At the server.

    def begin(self, ask: AskSilos, server: Server) -> Server:
        """Return the state with the first units of the frame."""
        place = _place(0, np.asarray(server.z), np.asarray(server.L))
        counts, d = ask(self._units, place), self.units.model.dim
        sd = math.sqrt(d) * self.schedule.units * self.units.spread
        sizes = np.array([quantile(of_coordinate, sd, UNIT_QUANTILE) for of_coordinate in counts])
        # No unit is longer than the prior's, which it is where no count stands out of the noise.
        L = np.diag(np.minimum(1 / np.maximum(sizes, 1e-30), self._prior_sd))
        if not np.isfinite(L).all():
            raise NonFiniteError(
                "the curvature of the prior is not finite close to zero in unconstrained space: "
                "look at the priors' scales.",
                result=None,
                round=0,
                silos=(),
            )
        return _in_precision(server._replace(phase=np.zeros((), np.int32), L=L))

    def left(self, server: Server) -> int:
        """Return the number of phases that are planned and left."""
        return len(self.schedule.phases) - int(server.phase)

    @np.errstate(all="ignore")  # of steps to nowhere
    def phase(self, ask: AskSilos, server: Server) -> Server:
        """Return the state after the next phase: a histogram of lengths, and some steps."""
        k = int(server.phase)
        made = np.asarray(server.made) | (np.arange(len(server.made)) == k)
        try:
            after = _in_precision(self._steps(ask, server._replace(made=made), k))
        except np.linalg.LinAlgError:
            after = server._replace(moved=np.array(np.nan))
        if all(np.isfinite(a).all() for a in after):
            return after
        # A phase that led to where nothing is finite is left, and no more is lost than its budget.
        return _in_precision(server._replace(phase=k + 1, moved=-1.0, made=made))

    def _steps(self, ask: AskSilos, server: Server, k: int) -> Server:
        d, steps, spread = self.units.model.dim, self.schedule.steps, self.units.spread
        noise, z, L = self.schedule.phases[k], *(np.asarray(a, float) for a in (server.z, server.L))

        counts, sd = ask(self._sizes, _place(k * steps, z, L)), math.sqrt(2) * noise.sizes * spread
        clip, of_curvature = self._clips(counts, sd, noise.gradient * spread / math.sqrt(steps), k)

        at, moved = np.zeros(d), []
        gradients, curvatures, places = [], [], []
        for i, exchange in enumerate(self._sums):
            here = z + L @ at
            sums: Sums = ask(exchange, _place(k * steps + i, here, L, clip, of_curvature))
            gradients.append(sums.gradient.astype(float))
            curvatures.append(as_symmetric(sums.curvature.astype(float), d))
            places.append(at)
            g, H, place = (np.mean(a, 0) for a in (gradients, curvatures, places))
            n = i + 1
            edge = of_curvature * noise.curvature * spread * math.sqrt(2 * d / n)
            variance = (clip * noise.gradient * spread) ** 2 / n
            found = self._estimate(g, Spectrum.of(H, edge), variance, place - at, here, L)
            at = at + found.step
            moved.append(found.moved)

        undetermined = found.undetermined
        waited = 0 if undetermined < server.fewest else int(server.waited) + 1
        hidden = undetermined > 0 and waited < PATIENCE
        # Each step, since clips are long far from the mode, and beside their noise a step is short.
        ended = max(moved) <= NEAR and not hidden
        # Where the curvature changes on the way, a step may end as far from the mode as it is long:
        # without its excess one in twenty fits of 2,000 rows with epsilon 0.5 was five sds off.
        excess = max(1 - NEAR / max(found.moved, 1e-30), 0.0) * (L @ found.step)
        return Server(
            phase=max(k + 1, self.schedule.search) if ended else k + 1,
            z=z + L @ at,
            L=found.whitened,
            loc=found.loc,
            root=root_of(np.column_stack([found.root, excess])),
            undetermined=undetermined,
            coarse=is_coarse(sd, self.num_units),
            moved=found.moved,
            fewest=min(undetermined, int(server.fewest)),
            waited=waited,
            made=server.made,
            multiplier=server.multiplier,
        )

    def _clips(self, counts: np.ndarray, sd: float, noise: float, k: int) -> tuple[float, float]:
        """Return the clipping lengths of gradients and curvatures, from histograms with noise.

        ``noise`` is the sd of the noise in the mean of a phase's gradients, of clips of one.
        """
        d = self.units.model.dim
        # The posterior must not be moved by what is clipped. A search takes its way in any case.
        if self.clip is not None:
            C = self.clip
        elif k < self.schedule.search:
            C = quantile(counts[0], sd, GRADIENT_QUANTILE)
        else:
            C = best_clip(counts[0], sd, noise, d)
        q = CURVATURE_QUANTILE if self.units.has_products else GRADIENT_QUANTILE
        # If no count stands out there are too few units; one whitened unit is some sqrt(d) long.
        return C or UNSEEN * math.sqrt(d), quantile(counts[1], sd, q) or 1.0 * d

    def _estimate(
        self,
        g: np.ndarray,
        spectrum: Spectrum,
        variance: float,
        away: np.ndarray,
        z: np.ndarray,
        L: np.ndarray,
    ) -> Estimate:
        """Return posterior and step at the place ``z`` (d,), in the frame ``L`` (d, d).

        ``g`` (d,) is the mean of the gradients, as of a place ``away`` (d,) from here in the frame,
        and ``variance`` that of the noise in each of its numbers.
        """
        slope, P = self._prior(z)
        slope, P = L.T @ slope, L.T @ P
        V, curved, damped, undetermined = spectrum
        b = g + V @ (curved * (V.T @ away))
        # The posterior, with the variance of the noise.
        known = curved / (curved + variance)
        precision = root_with_prior(V, known * curved, P)
        # The step, damped where curvature is not known.
        step = times_inverse(root_with_prior(V, damped, P), b + slope)
        return Estimate(
            loc=z + L @ times_inverse(precision, V @ (known * (V.T @ b)) + slope),
            root=solve_triangular(precision, L.T, lower=True, check_finite=False).T,
            undetermined=undetermined,
            step=self._cut(step, L),
            moved=float(np.linalg.norm(precision.T @ step)) / math.sqrt(len(z)),
            whitened=L @ (V * np.sqrt(self.num_units / damped)) @ V.T,
        )

    def _cut(self, step: np.ndarray, L: np.ndarray) -> np.ndarray:
        """Return a step (d,) in the frame that is not too long; none if it is not finite."""
        longest = LONGEST * math.sqrt(len(step) * self.rows_in_unit)
        away = np.abs(L @ step) / self._prior_sd
        share = min(longest / np.linalg.norm(step), MOST_PRIOR / away.max())
        cut = step * min(1.0, share)
        return cut if np.isfinite(cut).all() else np.zeros_like(step)

    def _prior(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient (d,) of the prior, and a root (d, d) of its negative Hessian.

        Where the density curves upwards it counts as flat.
        """
        g, H = (np.asarray(a, float) for a in self._derivatives_of_prior(z))
        e, V = np.linalg.eigh(-H)
        return g, V * np.sqrt(np.maximum(e, 0.0))

    @cached_property
    def _derivatives_of_prior(self) -> Callable[[np.ndarray], tuple[Array, Array]]:
        def log_prior(z: Array) -> Array:
            return self.units.model.smoothed.log_prior({}, z)

        return jit_once(lambda z: (jax.grad(log_prior)(z), jax.hessian(log_prior)(z)))

    @cached_property
    def _prior_sd(self) -> np.ndarray:
        """Return the prior's standard deviations (d,) by its curvature where searches begin."""
        _, P = self._prior(np.full(self.units.model.dim, ASIDE))
        return 1 / np.sqrt(np.maximum((P**2).sum(1), 1e-12))


def _place(
    step: int, z: np.ndarray, L: np.ndarray, clip: float = 0.0, clip_curvature: float = 0.0
) -> Place:
    real = jnp.result_type(float)
    numbers = (np.asarray(a, real) for a in (z, L, clip, clip_curvature))
    return Place(np.asarray(step, np.int32), *numbers)


def _in_precision(server: Server) -> Server:
    """Return the state in the types of the first one, in which it is saved."""
    kinds = {"f": jnp.result_type(float), "i": np.int32, "b": np.bool_}
    arrays = map(np.asarray, server)
    return Server(*(a.astype(kinds[a.dtype.kind]) for a in arrays))
