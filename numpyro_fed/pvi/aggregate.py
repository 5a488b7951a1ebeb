r"""The posterior that a prior and the sum of all factors make, for any divergence to the prior.

It is the minimum over the family of

.. math::
    D(q, p) - \langle \lambda, \mathbb{E}_q[T] \rangle

for the prior ``p``, the sum :math:`\lambda` of the factors' natural parameters and the statistics
``T``. With the KL divergence the minimum is the sum of natural parameters itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.local.problem import minimise
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.divergences import KL, WeightedKL
from numpyro_fed.numerics.expfam import Family
from numpyro_fed.numerics.expfam.family import Natural, Ordinary

MAX_LBFGS_STEPS = 200
MAX_SLOPE = 1e-5  # at which L-BFGS ends
# The largest slope, relative to the largest coefficient, that counts as a minimum. Where these are
# large the absolute tolerance is out of reach in single precision; without a minimum the slope
# stays of their size.
MAX_RELATIVE_SLOPE = 1e-3


def aggregation(
    family: Family[Any], divergence: Callable[..., Array]
) -> Callable[[Natural, Natural], Natural]:
    """Return ``(prior, total) -> eta`` for a divergence; NaN where no minimum is found."""
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
        psi, _, slope = minimise(objective, family.ordinary(start), MAX_LBFGS_STEPS, MAX_SLOPE)
        scale = 1 + jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(total)]).max()
        converged = slope <= MAX_RELATIVE_SLOPE * scale
        return jax.tree.map(lambda a: jnp.where(converged, a, jnp.nan), family.natural(psi))

    return solve
