r"""A posterior, or a cavity, from a prior and a sum of factors, under any divergence to the prior.

.. math::
    q = \arg\min_q \; -\mathbb{E}_q\big[\langle \lambda, T(z) \rangle\big] + D(q \,\|\, p)

Under KL this is the sum of natural parameters. Under other divergences it is found by optimisation,
for which ``lambda``, the sum of the silos' coefficients, is enough (Patel and Damoulas 2024,
sections 2.1, 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.divergences import KL, WeightedKL
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural, Ordinary
from numpyro_fed.local.base import minimise

STEPS = 200  # of L-BFGS, at most
TOLERANCE = 1e-5  # the largest slope at which it ends
# The largest slope, relative to the largest coefficient, that counts as a minimum. Where these are
# large the absolute tolerance is out of reach in single precision; without a minimum the slope
# stays of their size.
ENOUGH = 1e-3


def aggregate(
    family: Family[Any], divergence: Callable[..., Array]
) -> Callable[[Natural, Natural], Natural]:
    """Return the function ``(prior, total) -> eta`` for a divergence ``(family, eta_q, eta_p)``.

    Where no minimum is found, ``eta`` is NaN, which counts as improper.
    """
    if isinstance(divergence, KL | WeightedKL):
        weight = divergence.weight if isinstance(divergence, WeightedKL) else 1.0
        return lambda prior, total: jax.tree.map(lambda a, b: a + b / weight, prior, total)

    def solve(prior: Natural, total: Natural) -> Natural:
        def objective(psi: Ordinary) -> Array:
            gain = expfam.inner(total, family.moments(psi))
            return divergence(family, family.natural(psi), prior) - gain

        summed = jax.tree.map(jnp.add, prior, total)
        proper = family.proper(summed)
        start = jax.tree.map(lambda a, b: jnp.where(proper, a, b), summed, prior)
        psi, _, slope = minimise(objective, family.ordinary(start), STEPS, TOLERANCE)
        scale = 1 + jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(total)]).max()
        converged = slope <= ENOUGH * scale
        return jax.tree.map(lambda a: jnp.where(converged, a, jnp.nan), family.natural(psi))

    return solve
