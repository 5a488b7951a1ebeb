r"""A posterior, or a cavity, from a prior and a sum of factors under any divergence to the prior.

.. math::
    q = \arg\min_q \; -\mathbb{E}_q\big[\langle \lambda, T(z) \rangle\big] + D(q \,\|\, p)

Under KL this is the sum of natural parameters. Otherwise it is found by optimisation from
``lambda``, the sum of the silos' coefficients, alone (Patel and Damoulas 2024, sections 2.1, 2.2).
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
from numpyro_fed.local.base import minimise

STEPS = 200
TOLERANCE = 1e-4

Eta = Any


def aggregate(family: Family, divergence: Callable[..., Array]) -> Callable[[Eta, Eta], Eta]:
    """``(prior, total) -> eta`` for one divergence ``(family, eta_q, eta_p) -> ()``."""
    if isinstance(divergence, KL | WeightedKL):
        weight = getattr(divergence, "weight", 1.0)
        return lambda prior, total: jax.tree.map(lambda a, b: a + b / weight, prior, total)

    def found(prior: Eta, total: Eta) -> Eta:
        def objective(psi: Any) -> Array:
            gain = expfam.inner(total, family.moments(psi))
            return divergence(family, family.natural(psi), prior) - gain

        summed = jax.tree.map(jnp.add, prior, total)
        fine = family.proper(summed)
        start = jax.tree.map(lambda a, b: jnp.where(fine, a, b), summed, prior)
        psi, _ = minimise(objective, family.ordinary(start), STEPS, TOLERANCE)
        return family.natural(psi)

    return found
