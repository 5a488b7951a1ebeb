r"""Whether a visit has come to rest, judged where it ended and by fresh noise.

At an optimum of the local free energy a full natural-gradient step, ``eta + delta`` with

.. math::
    \delta = \nabla_\mu \mathcal{F}_m(q) = \eta_{\setminus m}
    + \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z)] - \eta,

stays where it is. It is scaled by the curvature, so that how far it would move each mean, in
standard deviations, and each standard deviation, relatively, says how far away the optimum is.
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
from numpyro_fed.local.base import Noise, Problem, SiloPart, free_energy

MIN_ESTIMATES, MAX_ESTIMATES = 8, 64  # estimates of a step that are averaged: at least, and at most
PARTICLES = 16  # draws in each where no minibatches are asked for; two else, on all rows


class Tally(NamedTuple):
    """Estimates of how far a step goes: their number, mean and sum of squares (2 dim,)."""

    number: Array
    mean: Array
    squares: Array

    @property
    def error(self) -> Array:
        """Return the standard error of the mean."""
        return jnp.sqrt(self.squares / (self.number * (self.number - 1)))


@dataclass(frozen=True)
class AtRest:
    """A judge of whether a full natural-gradient step from where a visit ended moves nothing.

    Attributes
    ----------
    family : Family
    tolerance : float
        For the move of each mean, in standard deviations, and of each log standard deviation.
        Estimates are averaged until their error is a quarter of that; it must be below a half.
    most : int
        Estimates, at most.
    """

    family: Family[Any]
    tolerance: float
    most: int = MAX_ESTIMATES

    def begin(self) -> Tally:
        """Return the tally of no estimates."""
        none = jnp.zeros(2 * self.family.dim)
        return Tally(jnp.zeros((), jnp.int32), none, none)

    def add(self, tally: Tally, move: Array) -> Tally:
        """Return the tally with one more estimate (2 dim,), by :attr:`expfam.Family.move`."""
        number = tally.number + 1
        mean = tally.mean + (move - tally.mean) / number
        return Tally(number, mean, tally.squares + (move - tally.mean) * (move - mean))

    def wants_more(self, tally: Tally) -> Array:
        """Return whether it takes another estimate to tell."""
        far = (jnp.abs(tally.mean) > self.tolerance + 4 * tally.error).any()
        close = (tally.error <= self.tolerance / 4).all()
        return (tally.number < MIN_ESTIMATES) | ((tally.number < self.most) & ~far & ~close)

    def arrived(self, tally: Tally) -> Array:
        """Return whether steps on the way may end: four times as strict as the verdict."""
        close = jnp.abs(tally.mean) + tally.error <= self.tolerance / 2
        return (tally.number >= MIN_ESTIMATES) & close.all()

    def holds(self, tally: Tally) -> Array:
        """Return the verdict: whether the step would move nothing."""
        near = jnp.abs(tally.mean) <= self.tolerance + 2 * tally.error
        return (near & (tally.error <= self.tolerance / 2)).all()


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
    """Return whether the local free energy is largest at ``psi``, up to ``tolerance``.

    See :class:`AtRest`. ``work`` bounds how often a row is looked at; where that is too little for
    ``MIN_ESTIMATES`` estimates nobody can know, and the answer is no.
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

    def excess(psi: Ordinary, noise: Noise) -> Array:
        """Return what the silo's likelihood has more than its factor: nothing, at best."""
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
