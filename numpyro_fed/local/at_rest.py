r"""A test of convergence for a visit, at its end point and with fresh noise.

At an optimum of the local free energy a full natural-gradient step, ``eta + delta`` with

.. math::
    \delta = \nabla_\mu \mathcal{F}_m(q) = \eta_{\setminus m}
    + \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z)] - \eta,

is zero. The step is scaled by the curvature. So its move of each mean, in standard deviations, and
of each log standard deviation estimates the distance to the optimum. A gradient would not: its size
depends on units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Ordinary
from numpyro_fed.local.base import LocalNoise, Problem, SiloPart, free_energy

# Estimates of the step that are averaged. With fewer than eight the standard error is itself too
# uncertain; where 64 do not settle it, the answer is no.
MIN_ESTIMATES, MAX_ESTIMATES = 8, 64
PARTICLES = 16  # draws in each estimate; two, on all rows, where the visit used minibatches


class Tally(NamedTuple):
    """Running statistics of estimates of a move: number, mean and squared deviations (2 dim,)."""

    number: Array
    mean: Array
    squares: Array

    @property
    def error(self) -> Array:
        """Return the standard error of the mean."""
        return jnp.sqrt(self.squares / (self.number * (self.number - 1)))


@dataclass(frozen=True)
class AtRest:
    """A sequential test whether a full natural-gradient step from a point is zero.

    ``tolerance`` bounds the move of each mean, in standard deviations, and of each log standard
    deviation. Estimates, ``most`` of them, are averaged until their error is a quarter of it; at
    the end it must be below a half.
    """

    family: Family[Any]
    tolerance: float
    most: int = MAX_ESTIMATES

    def begin(self) -> Tally:
        """Return the statistics of no estimates."""
        none = jnp.zeros(2 * self.family.dim)
        return Tally(jnp.zeros((), jnp.int32), none, none)

    def add(self, tally: Tally, move: Array) -> Tally:
        """Return the statistics with one more estimate (2 dim,), by :attr:`expfam.Family.move`."""
        number = tally.number + 1
        mean = tally.mean + (move - tally.mean) / number
        return Tally(number, mean, tally.squares + (move - tally.mean) * (move - mean))

    def wants_more(self, tally: Tally) -> Array:
        """Return whether another estimate is needed for a decision."""
        # Four errors to stop with a no: the test is repeated at each estimate, and for all numbers.
        is_moving = (jnp.abs(tally.mean) > self.tolerance + 4 * tally.error).any()
        is_precise = (tally.error <= self.tolerance / 4).all()
        return (tally.number < MIN_ESTIMATES) | (
            (tally.number < self.most) & ~is_moving & ~is_precise
        )

    def arrived(self, tally: Tally) -> Array:
        """Return whether a visit may end before its last step.

        It is stricter than :meth:`holds`, which decides once, since it is asked again and again.
        """
        close = jnp.abs(tally.mean) + tally.error <= self.tolerance / 2
        return (tally.number >= MIN_ESTIMATES) & close.all()

    def holds(self, tally: Tally) -> Array:
        """Return the decision of the test: whether the step is zero up to the tolerance."""
        within = jnp.abs(tally.mean) <= self.tolerance + 2 * tally.error
        return (within & (tally.error <= self.tolerance / 2)).all()


def maximised(
    problem: Problem[SiloPart],
    psi: Ordinary,
    silo_part: SiloPart,
    key: Array,
    tolerance: float,
    *,
    alpha: float = 0.0,
    particles: int = PARTICLES,
    work: float = jnp.inf,
) -> Array:
    """Return whether the local free energy has its maximum at ``psi``, up to ``tolerance``.

    See :class:`AtRest`. ``work`` bounds the number of evaluations of rows. If it is too small for
    ``MIN_ESTIMATES`` estimates the answer is no.
    """
    family, eta = problem.family, problem.family.natural(psi)
    most = int(min(MAX_ESTIMATES, work // (particles * max(problem.rows, 1))))
    if most < MIN_ESTIMATES:
        return jnp.array(False)

    if problem.divergence is None:
        factor = jax.tree.map(jnp.subtract, eta, problem.cavity)
    else:
        divergence, cavity = problem.divergence, problem.cavity
        factor = family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)

    def excess(psi: Ordinary, noise: LocalNoise) -> Array:
        """Return the expected log likelihood less the log factor; its gradient is the step."""
        if alpha > 0:
            return free_energy(problem, psi, silo_part, noise, alpha=alpha)[0]
        z, log_lik = problem.log_lik(psi, silo_part, noise, False)
        factor_terms = jax.vmap(lambda z: expfam.inner(factor, family.statistics(z)))(z)
        return (log_lik - factor_terms).mean()

    def move(i: Array) -> Array:
        noise = problem.noise(jax.random.fold_in(key, i), particles, None)
        return family.move(psi, jax.grad(excess)(psi, noise))

    judge = AtRest(family, tolerance, most)
    tally = jax.lax.while_loop(
        judge.wants_more, lambda t: judge.add(t, move(t.number)), judge.begin()
    )
    return judge.holds(tally)
