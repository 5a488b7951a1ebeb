r"""Whether a visit has come to rest, judged where it ended and by fresh noise.

At an optimum of the local free energy a full natural-gradient step, ``eta + delta`` with

.. math::
    \delta = \nabla_\mu \mathcal{F}_m(q) = \eta_{\setminus m}
    + \nabla_\mu \mathbb{E}_q[\log p(y_m \mid z)] - \eta,

stays where it is. It is scaled by the curvature, so that how far it would move each mean, in
standard deviations, and each standard deviation, relatively, says how far away the optimum is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.expfam import Family
from numpyro_fed.local.base import Eta, Noise, Problem, Psi, free_energy

FEW, MANY = 8, 64  # estimates of a step that are averaged: at least, and at most
PARTICLES = 16  # draws in each where no minibatches are asked for; two else, on all rows


def at_rest(
    family: Family, eta: Eta, step: Callable[[Array], Eta], tolerance: float, most: int = MANY
) -> Array:
    """Whether a full natural-gradient step from ``eta`` would move ``q`` by next to nothing.

    Parameters
    ----------
    family : Family
    eta : eta
    step : i -> eta
        An estimate of the step, with noise of its own for each ``i``.
    tolerance : float
        For the move of each mean, in standard deviations, and of each log standard deviation.
        Estimates are averaged until their error is a quarter of that; it must be below a half.
    most : int
        Estimates, at most.
    """

    def spread(eta: Eta) -> Array:
        return jnp.concatenate(location_and_log_scale(family, eta))

    where, move = jax.linearize(spread, eta)
    unit = jnp.concatenate([jnp.exp(where[family.dim :]), jnp.ones(family.dim)])

    def error(carry: tuple) -> Array:
        n, _, squares = carry
        return jnp.sqrt(squares / (n * (n - 1)))

    def go_on(carry: tuple) -> Array:
        n, mean, _ = carry
        far = (jnp.abs(mean) > tolerance + 4 * error(carry)).any()
        close = (error(carry) <= tolerance / 4).all()
        return (n < FEW) | ((n < most) & ~far & ~close)

    def add(carry: tuple) -> tuple:
        n, mean, squares = carry
        x = move(step(n)) / unit
        after = mean + (x - mean) / (n + 1)
        return n + 1, after, squares + (x - mean) * (x - after)

    none = jnp.zeros(2 * family.dim)
    carry = jax.lax.while_loop(go_on, add, (jnp.zeros((), jnp.int32), none, none))
    _, mean, _ = carry
    near = jnp.abs(mean) <= tolerance + 2 * error(carry)
    return (near & (error(carry) <= tolerance / 2)).all()


def location_and_log_scale(family: Family, eta: Eta) -> tuple[Array, Array]:
    """Means and log standard deviations of each number."""
    mean, sd = family.spread(family.ordinary(eta))
    return mean, jnp.log(sd)


def maximised(
    problem: Problem,
    psi: Psi,
    own: Any,
    key: Array,
    tolerance: float,
    *,
    alpha: float = 0.0,
    particles: int = PARTICLES,
    work: float = jnp.inf,
) -> Array:
    """Whether the local free energy is largest at ``psi``, up to ``tolerance``.

    See :func:`at_rest`. ``work`` bounds how often a row is looked at, as far as ``FEW`` estimates
    allow.
    """
    family, eta = problem.family, problem.family.natural(psi)
    each = particles * max(problem.rows, 1)
    most = int(max(FEW, min(MANY, work // each)))

    if problem.divergence is None:
        factor = jax.tree.map(jnp.subtract, eta, problem.cavity)
    else:
        divergence, cavity = problem.divergence, problem.cavity
        factor = family.dual_gradient(lambda psi: divergence(family.natural(psi), cavity), eta)

    def excess(psi: Psi, noise: Noise) -> Array:
        """What the silo's likelihood has more than its factor: nothing, at best."""
        if alpha > 0:
            return free_energy(problem, psi, own, noise, alpha=alpha)[0]
        z, log_lik = problem.log_lik(psi, own, noise, False)
        known = jax.vmap(lambda z: expfam.inner(factor, family.statistics(z)))(z)
        return (log_lik - known).mean()

    def step(i: Array) -> Eta:
        noise = problem.noise(jax.random.fold_in(key, i), particles, None)
        return family.dual_gradient(partial(excess, noise=noise), eta)

    return at_rest(family, eta, step, tolerance, most)
