"""Tests at points whether a function is affine in the statistics of an exponential family.

A log prior that is affine is in the family, and a log likelihood that is affine is conjugate to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural

# The largest departure from an affine function, in nats: an absolute part and one relative to the
# size of the terms. Double precision leaves some 1e-15 of that size for each operation; a function
# that is affine up to 1e-6 nats gives the same posterior.
NATS = 1e-6
ROUNDING = 1e-10


def departure(
    rows: Callable[[Array], Array], family: Family[Any], eta: Natural, centre: Array, z: Array
) -> tuple[Array, Array]:
    """Return the departure of a sum of ``rows`` from ``<eta, T>`` between two points, in nats.

    The second value is the size of the terms, for an allowance for rounding. Differences are taken
    row by row, so that little cancels where the two points are close.
    """
    at_z, at_centre = rows(z), rows(centre)
    linear = jax.tree.map(jnp.multiply, eta, family.increment(centre, z - centre))
    linear_terms = [part.ravel() for part in jax.tree.leaves(linear)]
    size = sum(jnp.abs(part).sum() for part in [at_z, at_centre, *linear_terms])
    return (at_z - at_centre).sum() - sum(part.sum() for part in linear_terms), jnp.asarray(size)


def affine_at(
    rows: Callable[[Array], Array], family: Family[Any], eta: Natural, centre: Array, z: Array
) -> Array:
    """Return whether a sum of ``rows`` is ``<eta, T(z)>`` plus a constant, in double precision.

    A few points at every scale are enough: a term that is not affine either grows with the
    distance, or shows close to the prior or the posterior.
    """
    nats, size = jax.lax.map(partial(departure, rows, family, eta, centre), z, batch_size=4)
    return (jnp.isfinite(nats) & (jnp.abs(nats) <= NATS + ROUNDING * size)).all()
