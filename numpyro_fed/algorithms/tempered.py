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

Particles live on islands: those of one island are weighed and drawn again among themselves, so
that the islands are independent but for the step size and the coordinates. How far their means and
spreads differ is the Monte Carlo error. At ``b = 1`` particles are moved on and kept several times.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Shared,
    Silo,
    key_as_noise,
)
from numpyro_fed.algorithms.importance.proposals import root_of_draws
from numpyro_fed.algorithms.sfvi import Down, coordinates_of
from numpyro_fed.bounds import Given, QuadratureBound
from numpyro_fed.frame import Coordinates, identity
from numpyro_fed.guides.structured import Guide
from numpyro_fed.integrals.quadrature import NEARBY, RowIntegrals
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

TEMPERED = "tempered"  # the name of the exchange
NUM_ISLANDS = 4
KEPT = 8  # times that all particles are kept at the posterior
EFFECTIVE = 0.5  # share of effective draws after a step from one density to the next
# Length of a trajectory, in units in which the particles have an sd of one: a quarter of the period
# of a normal distribution is pi / 2, after which a particle has forgotten where it was.
LENGTH = 1.5
MAX_LEAPS = 16  # leapfrog steps in a trajectory, at most
FIRST_STEP = 0.3  # common step size at the beginning
SHORTEST = 0.2  # share of the common step size, at least, that a particle takes
ACCEPTED = 0.75  # share of trajectories that the common step size aims at
# Largest change of the log step size after one trajectory: an acceptance of zero halves the step.
GAIN = 1.0
LOG_STEPS = math.log(1e-4), math.log(2.0)  # the log of the common step size stays between these
# Particles that a silo takes side by side where rows have latents, whose modes are searched for:
# one by one the loop of the search is repeated for each. Without them it is one at a time, since
# XLA:CPU multiplies stacks of matrices by plain loops: a Gaussian process over forty times took
# 0.05 s for a thousand particles, and 1.3 s with 64 at once.
BATCH = 8
LOST = -1e30  # in the place of a log density of minus infinity: states must be finite
# Largest correlation of a coordinate with its value some trajectories before, at which particles
# count as moved: on the way, and between those that are kept. And trajectories for that, at most.
MOVED, MOVES = 0.7, 4
MOVED_AT_POSTERIOR, MOVES_AT_POSTERIOR = 0.5, 6


A = TypeVar("A", Array, np.ndarray)


class Reference(Protocol):
    """The distribution at which the particles begin."""

    def log_density(self, theta: Theta, parameters: Any, z: Array) -> Array:
        """Return the log density () at ``z`` (dim,)."""
        ...

    def standard(self, dim: int) -> Any:
        """Return some parameters, for the shapes of a state."""
        ...


class Slopes(NamedTuple):
    """A silo's reply: its log likelihood at each particle (N,), and the gradient (N, dim)."""

    log_likelihood: Array
    gradient: Array


class Places(NamedTuple):
    """Particles with the log densities of the path's ends, and their gradients.

    Attributes
    ----------
    z : (N, dim)
    log_q, log_p : (N,)
        Of the reference and of the joint density; :data:`LOST` where a number is not finite.
    slope_q, slope_p : (N, dim)
    """

    z: Array
    log_q: Array
    log_p: Array
    slope_q: Array
    slope_p: Array

    def log_density(self, b: Array) -> Array:
        """Return the log density (N,) of the path at ``b``."""
        return (1 - b) * self.log_q + b * self.log_p

    def slope(self, b: Array) -> Array:
        """Return its gradient (N, dim)."""
        return (1 - b) * self.slope_q + b * self.slope_p

    @property
    def found(self) -> Array:
        """Return whether all numbers of each particle are finite (N,)."""
        return self.log_p > LOST / 2

    def at(self, index: Array) -> Places:
        """Return the particles of these numbers."""
        return jax.tree.map(lambda a: a[index], self)


class Swarm(NamedTuple):
    """The server's state: particles, their trajectories, and what was kept of them.

    Attributes
    ----------
    theta : dict
        Shared parameters, held fixed.
    reference : pytree
        Parameters of the distribution at ``b = 0``.
    here : Places
        The particles at the start of their trajectories.
    trial : (N, dim)
        Where the next exchange evaluates the densities.
    momentum : (N, dim)
        Half a step ahead of ``trial``.
    step_sizes : (N,)
    energy : (N,)
        Log density at the start of the trajectory, of the momentum as well.
    alive : (N,) bool
        Whether all numbers of the trajectory were finite.
    leaps : int
        Leapfrog steps to come in this trajectory.
    root : (dim, dim)
        A root of the particles' covariance.
    log_step : ()
        The log of the common step size.
    b : ()
    moves : int
        Trajectories since ``before``.
    before : (N, dim)
        The particles when they were last drawn again, or kept.
    log_evidence : (4,)
        Of each island.
    kept : (KEPT, N, dim)
    kept_log_p : (KEPT, N)
        The joint log density at these.
    num_kept : int
    arrived : (N, dim)
        The particles when they came to the posterior.
    exchanges : int
    """

    theta: Theta
    reference: Any
    here: Places
    trial: Array
    momentum: Array
    step_sizes: Array
    energy: Array
    alive: Array
    leaps: Array
    root: Array
    log_step: Array
    b: Array
    moves: Array
    before: Array
    log_evidence: Array
    kept: Array
    kept_log_p: Array
    num_kept: Array
    arrived: Array
    exchanges: Array


@dataclass(frozen=True, eq=False)
class Tempering:
    """The parts of the algorithm, for one model.

    Attributes
    ----------
    model : FederatedModel
    guide : Guide
        Its local means are where searches for modes of rows begin.
    reference : Reference
    fitted : FederatedAlgorithm
        The algorithm of the fit whose silo states are used, and stay as they are.
    num_particles : int
        A multiple of the number of islands.
    nodes : int
        Nodes of the quadrature over rows' latents, in each dimension; 0 where there are none.
    """

    model: FederatedModel
    guide: Guide
    reference: Reference
    fitted: FederatedAlgorithm[Any, Any]
    num_particles: int
    nodes: int

    def algorithm(self) -> FederatedAlgorithm[Swarm, Any]:
        """Return the algorithm; it ends once particles were kept often enough."""
        return FederatedAlgorithm(
            init_server=lambda key: self.begin(
                self.model.init_theta(key),
                self.reference.standard(self.model.dim),
                jnp.zeros((self.num_particles, self.model.dim)),
            ),
            init_silo=self.fitted.init_silo,
            round=self.round(),
            shared=lambda swarm: Shared(swarm.theta, {}, identity((self.model.dim,))),
            done=lambda swarm: swarm.num_kept >= KEPT,
        )

    def round(self) -> Round:
        """Return the round: one exchange, a leapfrog step of all particles."""
        settings = json.dumps({"num_particles": self.num_particles, "nodes": self.nodes})
        exchange = Exchange(TEMPERED, self.silo, usable=no_nan, settings=settings)
        return Round((exchange,), self.run, key_as_noise)

    def silo(
        self, noise: object, down: Down, state: Silo, data: SiloData
    ) -> tuple[Reply[Slopes], Silo]:
        """Return a silo's reply, and its state as it was."""
        private = self.fitted.private(state)
        theta = {**down.theta, **private.theta}
        u, centre = coordinates_of(down)
        bound = QuadratureBound(self.model, self.guide, self.nodes)
        integrals = RowIntegrals(self.model, self.nodes, NEARBY)

        def log_likelihood(z_G: Array, u: Array) -> Array:
            at = private.recentred(Coordinates(u, centre))
            start = bound.start(Given(theta, private.guide, z_G, at, data))
            return integrals.log_likelihood(theta, z_G, data, start)[0]

        def slopes(batch: tuple[Array, Array]) -> Slopes:
            return Slopes(*jax.value_and_grad(log_likelihood)(*batch))

        size = BATCH if any(p.dim for p in self.model.plates) else 1
        found = jax.lax.map(slopes, (down.z_G, u), batch_size=size)
        # A particle that is too far away for one silo is lost, and the others go on.
        finite = jnp.isfinite(found.log_likelihood)
        value = jnp.where(finite, found.log_likelihood, -jnp.inf)
        gradient = jnp.where(finite[:, None], or_zero(found.gradient), 0.0)
        return Reply(Slopes(value, gradient), jnp.array(True)), state

    def run(self, state: Swarm, noise: Array, ask: Ask) -> tuple[Swarm, Info]:
        """Take one leapfrog step; at the end of a trajectory accept it, and begin the next."""
        places = self.places(state, ask(TEMPERED, self.message(state)).up)
        slope = places.slope(state.b) @ state.root
        swarm = state._replace(
            momentum=state.momentum + 0.5 * state.step_sizes[:, None] * slope,
            alive=state.alive & places.found,
            leaps=state.leaps - 1,
            exchanges=state.exchanges + 1,
        )

        def on(swarm: Swarm) -> Swarm:
            return self._leap(swarm, places.z, slope)

        def end(swarm: Swarm) -> Swarm:
            key_accept, key_stage, key_begin = jax.random.split(noise, 3)
            swarm = self._next_stage(key_stage, self._accepted(key_accept, swarm, places))
            return self._first_leap(key_begin, swarm)

        after = jax.lax.cond(swarm.leaps > 0, on, end, swarm)
        some = after.here.found.reshape(NUM_ISLANDS, -1).any(1).all()
        return after, Info(-log_mean(after.log_evidence), some, report=after.b)

    def begin(self, theta: Theta, reference: Any, z: Array) -> Swarm:
        """Return the state before the first exchange, at draws ``z`` (N, dim) of the reference."""
        n, dim = z.shape
        zero, no, zeros = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(n)
        return Swarm(
            theta=theta,
            reference=reference,
            here=Places(z, zeros, jnp.full(n, LOST), jnp.zeros((n, dim)), jnp.zeros((n, dim))),
            trial=z,
            momentum=jnp.zeros((n, dim)),
            step_sizes=zeros,
            energy=jnp.full(n, LOST),  # the first trial is where the particles are
            alive=jnp.ones(n, bool),
            leaps=no,
            root=jnp.eye(dim),
            log_step=jnp.log(FIRST_STEP),
            b=zero,
            moves=jnp.full((), MOVES, jnp.int32),
            before=z,
            log_evidence=jnp.zeros(NUM_ISLANDS),
            kept=jnp.zeros((KEPT, n, dim)),
            kept_log_p=jnp.zeros((KEPT, n)),
            num_kept=no,
            arrived=z,
            exchanges=no,
        )

    def message(self, swarm: Swarm) -> Down:
        """Return the message to the silos: the points to evaluate."""
        guide, z = self.guide, swarm.trial
        if not guide.uses_globals:
            return Down(swarm.theta, z, ())
        # Local guides give the places where searches begin, at the centre of the globals' guide.
        return Down(swarm.theta, z, Coordinates(jnp.zeros_like(z), jnp.zeros(z.shape[1])))

    def places(self, swarm: Swarm, up: Slopes) -> Places:
        """Return the trial points with all densities, from the sum of the silos' replies."""
        z = swarm.trial

        def prior(z: Array) -> Array:
            return self.model.log_prior(swarm.theta, z)

        def log_q(z: Array) -> Array:
            return self.reference.log_density(swarm.theta, swarm.reference, z)

        log_prior, slope_prior = jax.vmap(jax.value_and_grad(prior))(z)
        of_reference, slope_q = jax.vmap(jax.value_and_grad(log_q))(z)
        log_p, slope_p = log_prior + up.log_likelihood, slope_prior + up.gradient
        finite = jnp.isfinite(log_p) & jnp.isfinite(of_reference)
        return Places(
            z,
            jnp.where(finite, of_reference, 0.0),
            jnp.where(finite, log_p, LOST),
            jnp.where(finite[:, None], or_zero(slope_q), 0.0),
            jnp.where(finite[:, None], or_zero(slope_p), 0.0),
        )

    def _leap(self, swarm: Swarm, z: Array, slope: Array) -> Swarm:
        """Return the state half a step of the momentum and a step of the particles later."""
        step = swarm.step_sizes[:, None]
        momentum = swarm.momentum + 0.5 * step * slope
        trial = z + (step * momentum) @ swarm.root.T
        usable = swarm.alive & jnp.isfinite(trial).all(1)
        return swarm._replace(
            momentum=jnp.where(usable[:, None], momentum, 0.0),
            trial=jnp.where(usable[:, None], trial, swarm.here.z),
            alive=usable,
        )

    def _first_leap(self, key: Array, swarm: Swarm) -> Swarm:
        """Return the state at the beginning of a trajectory, with new momenta and step sizes."""
        here = swarm.here
        key_momentum, key_step = jax.random.split(key)
        momentum = jax.random.normal(key_momentum, here.z.shape)
        common = jnp.exp(swarm.log_step)
        share = jax.random.uniform(key_step, (len(here.z),), minval=SHORTEST, maxval=1.0)
        leaps = jnp.clip(jnp.ceil(LENGTH / common), 1, MAX_LEAPS).astype(jnp.int32)
        swarm = swarm._replace(
            momentum=momentum,
            step_sizes=common * share,
            energy=here.log_density(swarm.b) - 0.5 * (momentum**2).sum(1),
            alive=here.found,
            leaps=leaps,
        )
        return self._leap(swarm, here.z, here.slope(swarm.b) @ swarm.root)

    def _accepted(self, key: Array, swarm: Swarm, places: Places) -> Swarm:
        """Return the state after a trajectory that ends at ``places``."""
        energy = places.log_density(swarm.b) - 0.5 * (swarm.momentum**2).sum(1)
        gain = jnp.where(swarm.alive, energy - swarm.energy, -jnp.inf)
        gain = jnp.where(jnp.isnan(gain), -jnp.inf, gain)
        accepted = jnp.log(jax.random.uniform(key, gain.shape)) < gain
        here = jax.tree.map(
            lambda new, old: jnp.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old),
            places,
            swarm.here,
        )
        rate = jnp.exp(jnp.minimum(gain, 0.0)).mean()
        first = swarm.exchanges == 1
        log_step = jnp.clip(swarm.log_step + GAIN * (rate - ACCEPTED), *LOG_STEPS)
        log_step = jnp.where(first, swarm.log_step, log_step)
        moves = swarm.moves + 1
        return swarm._replace(here=here, log_step=log_step, moves=moves)

    def _next_stage(self, key: Array, swarm: Swarm) -> Swarm:
        """Return the state with the next density, or with particles kept, if they have moved."""
        at_posterior = swarm.b >= 1
        limit = jnp.where(at_posterior, MOVED_AT_POSTERIOR, MOVED)
        most = jnp.where(at_posterior, MOVES_AT_POSTERIOR, MOVES)
        moved = (correlation(swarm.here.z, swarm.before) <= limit) | (swarm.moves >= most)

        def stay(swarm: Swarm) -> Swarm:
            return swarm

        def keep(swarm: Swarm) -> Swarm:
            i = swarm.num_kept
            return swarm._replace(
                kept=swarm.kept.at[i].set(swarm.here.z),
                kept_log_p=swarm.kept_log_p.at[i].set(swarm.here.log_p),
                num_kept=swarm.num_kept + 1,
                root=root_of_draws(swarm.here.z),
                before=swarm.here.z,
                moves=jnp.zeros_like(swarm.moves),
            )

        def temper(swarm: Swarm) -> Swarm:
            return self._resampled(key, swarm)

        what = jnp.where(~moved, 0, jnp.where(at_posterior, 1, 2))
        return jax.lax.switch(what, [stay, keep, temper], swarm)

    def _resampled(self, key: Array, swarm: Swarm) -> Swarm:
        """Return the state at the next density of the path, particles drawn again by weight."""
        from blackjax.smc import ess, resampling, solver  # here: its import starts JAX's backend

        here, n = swarm.here, self.num_particles
        change = here.log_p - here.log_q

        def weights_after(delta: Array) -> Array:
            return jnp.where(here.found, delta * change, -jnp.inf)

        def effective(delta: Array) -> Array:
            # Of the particles that count at all, so that lost ones do not stop the path.
            return ess.ess(weights_after(delta)) / n - EFFECTIVE * here.found.mean()

        most = 1 - swarm.b
        delta = solver.dichotomy(effective, jnp.zeros(()), most)
        b = jnp.where(effective(most) > 0, 1.0, swarm.b + jnp.clip(delta, 0.0, most))
        delta = b - swarm.b  # as it is after rounding
        log_weights = weights_after(delta).reshape(NUM_ISLANDS, -1)
        size = log_weights.shape[1]
        weights = jax.nn.softmax(log_weights, axis=1)
        keys = jax.random.split(key, NUM_ISLANDS)
        chosen = jax.vmap(lambda key, w: resampling.systematic(key, w, size))(keys, weights)
        # Rounding of a sum of weights may choose a last particle that has none.
        heaviest = weights.argmax(1)[:, None]
        chosen = jnp.where(jnp.take_along_axis(weights, chosen, 1) > 0, chosen, heaviest)
        chosen = (chosen + size * jnp.arange(NUM_ISLANDS)[:, None]).ravel()
        here = here.at(chosen)
        return swarm._replace(
            here=here,
            b=b,
            root=root_of_draws(here.z),
            before=here.z,
            arrived=here.z,
            moves=jnp.zeros_like(swarm.moves),
            log_evidence=swarm.log_evidence + jax.vmap(log_mean)(log_weights),
        )


def or_zero(slopes: Array) -> Array:
    """Return the gradients (N, dim), zero where one is not finite, as on a kink with a root.

    Any function of the place alone may stand in for the gradient of a trajectory: it stays
    reversible, and the densities decide whether its end is accepted.
    """
    return jnp.where(jnp.isfinite(slopes).all(1)[:, None], slopes, 0.0)


def log_mean(log_values: Array) -> Array:
    """Return the log of the mean () of numbers whose logs are given (n,)."""
    return jax.nn.logsumexp(log_values) - math.log(len(log_values))


def correlation(first: Array, second: Array) -> Array:
    """Return the largest correlation () between coordinates of particles (N, dim), by coordinate.

    Those of their squared distances from the mean count as well: particles may move to and fro and
    not yet reach a long tail. One is returned where it is unknown.
    """
    first, second = with_squares(first), with_squares(second)
    products = (first * second).sum(0)
    scale = jnp.sqrt((first**2).sum(0) * (second**2).sum(0))
    return jnp.max(jnp.where(scale > 0, products / scale, 1.0), initial=0.0)


def with_squares(z: A) -> A:
    """Return particles (N, dim) less their mean, and squares of these less theirs, (N, 2 dim)."""
    away = z - z.mean(0)
    squares = away**2
    together = [away, squares - squares.mean(0)]
    return (
        np.concatenate(together, 1) if isinstance(z, np.ndarray) else jnp.concatenate(together, 1)
    )


def no_nan(up: Slopes) -> Array:
    """Return whether no log likelihood is NaN or infinite above, and all gradients are finite."""
    return (up.log_likelihood < jnp.inf).all() & jnp.isfinite(up.gradient).all()
