r"""Particles that go from a distribution that can be drawn from to the posterior, step by step.

The server holds particles ``z_G`` and moves them through a path of densities,

.. math::
    \log \pi_b(z_G) = (1 - b) \log q(z_G)
    + b \Big(\log p(z_G) + \sum_j \log p(y_j \mid z_G)\Big), \qquad b = 0, \dots, 1 .

The next ``b`` is where half of the draws are still effective: particles are weighed by
:math:`(\pi_{b'} / \pi_b)`, drawn again by their weights, and moved by Hamiltonian trajectories
(Del Moral, Doucet and Jasra 2006). Each leapfrog step of all particles is one exchange: silos reply
with their log likelihood and its gradient at every particle, each row's latents integrated out,
and the sum comes back. Trajectories are those of coordinates in which the particles have the
covariance one. A particle has a step size of its own in each trajectory, a random share of the
common one, so that some steps are short enough for narrow places.

Where a parabola can stand in the place of the likelihoods (:mod:`numpyro_fed.weigh.surrogate`),
trajectories are the server's own, and one exchange accepts or refuses where many of them end. It is
tried anew at each density of the path, and leapfrog steps that ask silos go on where few particles
are accepted.

Particles live on islands: those of one island are weighed and drawn again among themselves, so that
the islands are independent but for the step size, the coordinates and the parabola. How far their
means and spreads differ is the Monte Carlo error. At ``b = 1`` particles are moved on and kept
several times.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import brentq
from scipy.special import logsumexp

from numpyro_fed.basics.errors import NonFiniteError
from numpyro_fed.basics.programs import jit_once, map_in_batches
from numpyro_fed.basics.trees import Numbers, namespace
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import GlobalDraws, Guide
from numpyro_fed.guides.quadrature import NEARBY, RowIntegrals
from numpyro_fed.guides.silo_bounds import QuadratureBound
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.rounds.exchange import AskSilos, Exchange, FederatedAlgorithm
from numpyro_fed.rounds.names import TEMPERED
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.search.expand import shape
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.predictors import Predictors
from numpyro_fed.text.site_table import Theta
from numpyro_fed.weigh.log_likelihoods import at_draws, shape_of_draws, with_globals
from numpyro_fed.weigh.mixture import Mixture, root_of_draws
from numpyro_fed.weigh.surrogate import SHORTEST, OnPath, Parabola, Surrogate

NUM_ISLANDS = 4
KEPT = 8  # times that a run keeps all particles at the posterior
EFFECTIVE = 0.5  # share of effective draws after a step from one density to the next
# Length of a trajectory, in units in which the particles have an sd of one: a quarter of the period
# of a normal distribution is pi / 2, after which a particle has forgotten where it was.
LENGTH = 1.5
MAX_LEAPS = 16  # leapfrog steps in a trajectory, at most
FIRST_STEP = 0.3  # common step size at the beginning
ACCEPTED = 0.75  # share of trajectories that the common step size aims at
# Largest change of the log step size after one trajectory: an acceptance of zero halves the step.
GAIN = 1.0
LOG_STEPS = math.log(1e-4), math.log(2.0)  # the log of the common step size stays between these
# Particles that a silo takes side by side where rows have latents, whose modes are searched for:
# one by one the loop of the search is repeated for each. Without them it is one at a time, since
# XLA:CPU multiplies stacks of matrices by plain loops: a Gaussian process over forty times took
# 0.05 s for a thousand particles, and 1.3 s with 64 at once.
BATCH = 8
# Share of particles that a step by the parabola moves, below which steps ask silos instead; and
# calls of its program before an exchange, until particles have moved: fewer where a call takes
# long, since it factors a matrix for each particle.
LEAST_MOVED, MAX_CALLS, CALLS_WITH_MATRICES = 0.1, 12, 3
# Step size below which trajectories by the parabola lead nowhere: it is too stiff, as where a few
# particles are so far out that their gradients are many powers of ten larger than the others'.
LEAST_STEP = 0.01
LOST = -1e30  # in the place of a log density of minus infinity, which is no number times zero
# Largest correlation of a coordinate with its value some trajectories before, at which particles
# count as moved: on the way, and between those that are kept. And trajectories for that, at most.
MOVED, MOVES = 0.7, 4
MOVED_AT_POSTERIOR, MOVES_AT_POSTERIOR = 0.5, 6
NO_DENSITY = (
    "the log density is not finite at any particle of an island. Begin at a fit (start='fit'), or "
    "look at the data and the supports of the sites there."
)


class AtParticles(NamedTuple):
    """A silo's reply: its log likelihood at each particle (N,), and the gradient (N, dim)."""

    log_likelihood: Numbers
    gradient: Numbers


class Evaluated(NamedTuple):
    """Particles with the log densities of the path's ends, and their gradients.

    ``z`` (N, dim).
    ``log_q, log_p`` (N,): Of the reference and of the joint density; :data:`LOST` where a number is
        not finite.
    ``slope_q, slope_p`` (N, dim).
    ``log_l`` (N,), ``slope_l`` (N, dim): Of the log likelihood of all silos, a part of ``log_p``.
    """

    z: np.ndarray
    log_q: np.ndarray
    log_p: np.ndarray
    log_l: np.ndarray
    slope_q: np.ndarray
    slope_p: np.ndarray
    slope_l: np.ndarray

    def log_density(self, b: float) -> np.ndarray:
        """Return the log density (N,) of the path at ``b``."""
        return (1 - b) * self.log_q + b * self.log_p

    def slope(self, b: float) -> np.ndarray:
        """Return its gradient (N, dim)."""
        return (1 - b) * self.slope_q + b * self.slope_p

    def where(self, accepted: np.ndarray, other: Evaluated) -> Evaluated:
        """Return these particles where a move to them is accepted (N,), others where it is not."""
        return Evaluated(
            *(
                np.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(self, other, strict=True)
            )
        )

    @property
    def found(self) -> np.ndarray:
        """Return whether all numbers of each particle are finite (N,)."""
        return np.asarray(self.log_p > LOST / 2)


@dataclass
class SMCState:
    """Particles between two trajectories, and what was kept of them.

    ``begun_at``: Where they began: :class:`numpyro_fed.Tempered`.
    ``theta``: Shared parameters, held fixed.
    ``reference``: Parameters of the distribution at ``b = 0``.
    ``b``: At zero the densities of ``particles`` are not known yet.
    ``log_step``: The log of the common step size.
    ``root`` (dim, dim): A root of the particles' covariance.
    ``moved_from`` (N, dim): The particles when they were last drawn again, or kept.
    ``moves``: The steps by the parabola since; once these are given up, the trajectories since.
    ``by_parabola``: Whether steps are by the parabola; at ``log_inner`` is the log of their step
        size, and ``parabola`` the last one.
    ``arrived`` (N, dim): The particles when they came to the posterior.
    ``log_evidence`` (NUM_ISLANDS,).
    ``kept``: The particles each time that they were kept at the posterior.
    """

    begun_at: str
    theta: Theta
    reference: Mixture | tuple[()]
    particles: Evaluated
    exchanges: int = 0
    b: float = 0.0
    log_step: float = math.log(FIRST_STEP)
    root: np.ndarray = field(init=False)
    moved_from: np.ndarray = field(init=False)
    moves: int = 0
    by_parabola: bool = True
    log_inner: float = math.log(FIRST_STEP)
    parabola: Parabola | None = None
    arrived: np.ndarray = field(init=False)
    log_evidence: np.ndarray = field(default_factory=lambda: np.zeros(NUM_ISLANDS))
    kept: list[Evaluated] = field(default_factory=list)

    @classmethod
    def at(
        cls, begun_at: str, theta: Theta, reference: Mixture | tuple[()], z: np.ndarray
    ) -> SMCState:
        """Return particles at draws (N, dim) of the reference."""
        zeros = np.zeros(len(z))
        at = Evaluated(z, *[zeros] * 3, *[0 * z] * 3)
        state = cls(begun_at, theta, reference, at)
        state.arrived = z
        state.measure_moves()
        return state

    def copy(self) -> SMCState:
        """Return the same particles, to move on with; arrays are never written to."""
        other = copy.copy(self)
        other.kept = list(self.kept)
        return other

    def measure_moves(self) -> None:
        """Measure from here how far particles move, in units of their spread."""
        z = self.particles.z
        self.moved_from, self.moves, self.root = z, 0, root_of_draws(z)


@dataclass(frozen=True, eq=False)
class TemperedSMC:
    """The parts of the algorithm, for one model.

    ``guide``: Its local means are where searches for modes of rows begin.
    ``log_q``: The log density () of the distribution at which particles begin, of ``theta``, its
        parameters and a point (dim,).
    ``fitted``: The algorithm of the fit whose silo states are used, and stay as they are.
    ``num_particles``: A multiple of the number of islands.
    ``nodes``: Nodes of the quadrature over rows' latents, in each dimension; 0 where there are
        none.
    ``little``: Whether a silo's program is compiled with few of XLA's optimisations.
    """

    model: FederatedModel
    guide: Guide
    log_q: Callable[[Theta, Any, Array], Array]
    fitted: FederatedAlgorithm[Any, Any]
    num_particles: int
    nodes: int
    little: bool = False

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell their densities at all particles."""
        n, dim = self.num_particles, self.model.dim
        return StackedExchange(
            TEMPERED,
            stacked_reply(self.at_silo, little=self.little),
            # No log likelihood is NaN or infinite above, and all gradients are finite.
            usable=lambda up: (
                (up.log_likelihood < np.inf).all()
                & namespace(up.gradient).isfinite(up.gradient).all()
            ),
            settings=json.dumps({"num_particles": n, "nodes": self.nodes}),
            messages=lambda: (
                shape_of_draws(self.guide, self.fitted, (n, dim)),
                AtParticles(shape(n), shape(n, dim)),
            ),
        )

    def at_silo(
        self, noise: object, down: GlobalDraws, state: object, data: SiloData
    ) -> AtParticles:
        """Return what a silo tells."""
        given = at_draws(self.fitted, down, state, data)
        bound = QuadratureBound(self.model, self.guide, self.nodes)
        integrals = RowIntegrals(self.model, self.nodes, NEARBY)

        def log_likelihood(z_G: Array, u: Array) -> Array:
            modes_near = bound.start(with_globals(given, z_G, u))
            return integrals.log_likelihood(given.theta, z_G, data, modes_near)[0]

        size = BATCH if any(p.dim for p in self.model.plates) else 1
        found = AtParticles(
            *map_in_batches(
                lambda draw: jax.value_and_grad(log_likelihood)(*draw),
                (given.z_G, given.coordinates.u),
                size,
            )
        )
        # A particle that is too far away for one silo is lost, and the others go on.
        finite = jnp.isfinite(found.log_likelihood)
        value = jnp.where(finite, found.log_likelihood, -jnp.inf)
        return AtParticles(value, jnp.where(finite[:, None], or_zero(found.gradient), 0.0))

    @np.errstate(all="ignore")  # of particles too far away
    def run(
        self,
        ask: AskSilos,
        state: SMCState,
        max_exchanges: int,
        random: np.random.Generator,
        shown: Callable[[float], None],
    ) -> None:
        """Move particles until they were kept often enough, or for ``max_exchanges``.

        The last trajectory is as short as the exchanges that are left. ``shown`` is told the log
        evidence so far after each exchange.

        Raises
        ------
        NonFiniteError
            If the density is not finite at any particle of an island.
        """

        def evaluate(z: np.ndarray) -> Evaluated:
            down = self.message(state.theta, z)
            up: AtParticles = ask(self.exchange, down)
            ends = self._ends(state.theta, state.reference, down.z_G)
            log_prior, slope_prior, log_q, slope_q = (np.asarray(a, float) for a in ends)
            log_p, slope_p = log_prior + up.log_likelihood, slope_prior + up.gradient
            finite = np.isfinite(log_p) & np.isfinite(log_q)
            state.exchanges += 1
            shown(float(log_mean(state.log_evidence)))
            values = (log_q, 0.0), (log_p, LOST), (up.log_likelihood, LOST)
            slopes = slope_q, slope_p, up.gradient
            return Evaluated(
                np.asarray(down.z_G),
                *(np.where(finite, value, lost) for value, lost in values),
                *(np.where(finite[:, None], or_zero(slope), 0.0) for slope in slopes),
            )

        last, goal = state.exchanges + max_exchanges, len(state.kept) + KEPT
        if not state.b:
            state.particles = evaluate(state.particles.z)
            if not state.particles.found.reshape(NUM_ISLANDS, -1).any(1).all():
                raise NonFiniteError(NO_DENSITY, result=None, round=0, silos=())
            temper(state, random)
        while len(state.kept) < goal and state.exchanges < last:
            end = self._by_parabola(evaluate, state, random) if state.by_parabola else None
            if end is not None:
                state.particles = end
            else:
                step_size = math.exp(state.log_step)
                leaps = min(leaps_of(step_size), last - state.exchanges)
                end, gain = trajectories(evaluate, state, step_size, leaps, random)
                accepted = np.log(random.uniform(size=len(gain))) < gain
                state.particles = end.where(accepted, state.particles)
                rate = float(np.exp(np.minimum(gain, 0.0)).mean())
                state.log_step = next_step(state.log_step, rate)
            state.moves += 1
            at_posterior = state.b >= 1
            enough = MOVED_AT_POSTERIOR if at_posterior else MOVED
            if correlation(state.particles.z, state.moved_from) > enough:
                # The parabola has as many exchanges as a trajectory that asks silos: far out, where
                # it is wrong, particles may stand still.
                if state.by_parabola and state.moves >= leaps_of(math.exp(state.log_step)):
                    state.by_parabola, state.moves = False, 0
                longest = MOVES_AT_POSTERIOR if at_posterior else MOVES
                if state.by_parabola or state.moves < longest:
                    continue
            if at_posterior:
                state.kept.append(state.particles)
                state.measure_moves()
            else:
                temper(state, random)

    def _by_parabola(
        self,
        evaluate: Callable[[np.ndarray], Evaluated],
        state: SMCState,
        random: np.random.Generator,
    ) -> Evaluated | None:
        """Return particles after a step by the parabola, in one exchange; None without one."""
        here, surrogate = state.particles, self.surrogate
        # Particles that count have been moved by one and the same parabola.
        if state.parabola is None or not state.kept:
            known = np.where(here.found[:, None], here.slope_l, np.nan)
            state.parabola = surrogate.parabola(here.z, known)
        if state.parabola is None:
            state.by_parabola = False
            return None
        path = OnPath(state.theta, state.reference, state.parabola, state.b, state.root)
        z = here.z
        most = CALLS_WITH_MATRICES if surrogate.predictors.factors_matrices else MAX_CALLS
        for _ in range(most):
            step_size = math.exp(state.log_inner)
            leaps = leaps_of(step_size)
            z, rate = surrogate.move(path, z, step_size, leaps, random)
            state.log_inner = next_step(state.log_inner, rate)
            if state.log_inner < math.log(LEAST_STEP):
                state.by_parabola, state.log_inner = False, math.log(FIRST_STEP)
                return None
            if correlation(z, here.z) <= (MOVED_AT_POSTERIOR if state.b >= 1 else MOVED):
                break
        end = evaluate(np.where(np.isfinite(z).all(1)[:, None], z, here.z))
        moved, stayed = (at.log_l - surrogate.values(state.parabola, at.z) for at in (end, here))
        gain = np.where(end.found & here.found, state.b * (moved - stayed), -np.inf)
        gain = np.where(here.found, gain, np.where(end.found, np.inf, -np.inf))
        accepted = np.log(random.uniform(size=len(gain))) < gain
        went = (end.z != here.z).any(1)  # others are where they were, and so are accepted
        state.by_parabola = bool((accepted & went).mean() >= LEAST_MOVED)
        return end.where(accepted, here)

    @cached_property
    def surrogate(self) -> Surrogate:
        """Return the server's programs for steps that cost no exchange."""
        return Surrogate(Predictors.of(self.model), self.model.log_prior, self.log_q)

    def message(self, theta: Theta, z: np.ndarray) -> GlobalDraws:
        """Return the message to the silos: the points (N, dim) to evaluate."""
        at: Any = np.asarray(z, jnp.result_type(float))
        # Local guides say where searches begin, at the centre of the globals' guide.
        centre: Any = Coordinates(np.zeros_like(at), np.zeros_like(at[0]))
        return GlobalDraws(theta, at, centre if self.guide.locals_depend_on_globals else ())

    @cached_property
    def _ends(self) -> Callable[[Theta, Any, Any], tuple[Array, ...]]:
        """Return the server's program: prior and reference, each with its gradient."""
        return jit_once(
            lambda theta, reference, z: (
                *jax.vmap(jax.value_and_grad(partial(self.model.log_prior, theta)))(z),
                *jax.vmap(jax.value_and_grad(partial(self.log_q, theta, reference)))(z),
            )
        )


def leaps_of(step_size: float) -> int:
    """Return the number of leapfrog steps of a trajectory."""
    return int(np.clip(math.ceil(LENGTH / step_size), 1, MAX_LEAPS))


def next_step(log_step: float, rate: float) -> float:
    """Return the log of the next step size, from the share of trajectories accepted by this one."""
    return float(np.clip(log_step + GAIN * (rate - ACCEPTED), *LOG_STEPS))


def trajectories(
    evaluate: Callable[[np.ndarray], Evaluated],
    state: SMCState,
    step_size: float,
    leaps: int,
    random: np.random.Generator,
) -> tuple[Evaluated, np.ndarray]:
    """Return where trajectories end, and the gain of each (N,) in log density."""
    at, b, root = state.particles, state.b, state.root
    momentum = random.standard_normal(at.z.shape)
    step = step_size * random.uniform(SHORTEST, 1.0, (len(at.z), 1))
    energy = at.log_density(b) - 0.5 * (momentum**2).sum(1)
    alive = at.found  # all numbers of the trajectory are finite
    for _ in range(leaps):
        momentum = momentum + 0.5 * step * (at.slope(b) @ root)
        z = at.z + (step * momentum) @ root.T
        alive = alive & np.isfinite(z).all(1)
        at = evaluate(np.where(alive[:, None], z, state.particles.z))
        alive = alive & at.found
        momentum = momentum + 0.5 * step * (at.slope(b) @ root)
    gain = at.log_density(b) - 0.5 * (momentum**2).sum(1) - energy
    return at, np.where(alive & ~np.isnan(gain), gain, -np.inf)


def temper(state: SMCState, random: np.random.Generator) -> None:
    """Take the next density of the path, and draw particles again by their weights."""
    here, n = state.particles, len(state.particles.z)
    change = here.log_p - here.log_q

    def effective(delta: float) -> float:
        log_w = np.where(here.found, delta * change, -np.inf)
        # Of the particles that count at all, so that lost ones do not stop the path.
        ess = np.exp(2 * logsumexp(log_w) - logsumexp(2 * log_w))
        return float(ess / n - EFFECTIVE * here.found.mean())

    most = 1 - state.b
    b = 1.0 if effective(most) > 0 else state.b + float(brentq(effective, 0.0, most))
    log_weights = np.where(here.found, (b - state.b) * change, -np.inf)
    log_weights = log_weights.reshape(NUM_ISLANDS, -1)
    size = log_weights.shape[1]
    weights = np.exp(log_weights - logsumexp(log_weights, axis=1, keepdims=True))
    chosen = []
    for island, w in enumerate(weights):
        # One uniform number for all of an island (Kitagawa 1996). Rounding of a sum of weights may
        # choose a last particle that has none.
        points = (np.arange(size) + random.uniform()) / size
        drawn = np.searchsorted(np.cumsum(w), points).clip(max=size - 1)
        chosen.append(size * island + np.where(w[drawn] > 0, drawn, w.argmax()))
    index = np.concatenate(chosen)
    state.b, state.particles = b, Evaluated(*(a[index] for a in here))
    state.arrived, state.by_parabola = state.particles.z, True
    state.log_evidence = state.log_evidence + log_mean(log_weights)
    state.measure_moves()


def or_zero(slopes: Numbers) -> Numbers:
    """Return the gradients (N, dim), zero where one is not finite, as on a kink with a root.

    Any function of the place alone may stand in for the gradient of a trajectory: it stays
    reversible, and the densities decide whether its end is accepted.
    """
    xp = namespace(slopes)
    return xp.where(xp.isfinite(slopes).all(1)[:, None], slopes, 0.0)


def log_mean(log_values: np.ndarray) -> np.ndarray:
    """Return the log of the mean over the last axis of numbers whose logs are given."""
    return np.asarray(logsumexp(log_values, axis=-1) - math.log(log_values.shape[-1]))


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the largest correlation between coordinates of particles (N, dim), by coordinate.

    Those of their squared distances from the mean count as well: particles may move to and fro and
    not yet reach a long tail. One is returned where it is unknown.
    """
    first, second = with_squares(first), with_squares(second)
    scale = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    with np.errstate(all="ignore"):
        return float(np.where(scale > 0, (first * second).sum(0) / scale, 1.0).max(initial=0.0))


def with_squares(z: np.ndarray) -> np.ndarray:
    """Return particles (N, dim) less their mean, and squares of these less theirs, (N, 2 dim)."""
    away = z - z.mean(0)
    squares = away**2
    return np.concatenate([away, squares - squares.mean(0)], 1)
