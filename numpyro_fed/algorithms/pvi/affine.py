"""Whether a function is affine in the statistics of a family, at points, in nats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural

NATS = 1e-6  # what may be left of an affine function in double precision, and besides
ROUNDING = 1e-10  # of the size of the terms at that point


def departure(
    rows: Callable[[Array], Array], family: Family[Any], eta: Natural, centre: Array, z: Array
) -> tuple[Array, Array]:
    """Return how far a sum of ``rows`` is from ``<eta, T>`` between two points, the terms' size.

    In nats, from differences, so that little cancels where the two points are close.
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

    A few points of every scale do: what is left over grows with the distance, or stands where the
    prior or the posterior is.
    """
    nats, size = jax.lax.map(partial(departure, rows, family, eta, centre), z, batch_size=4)
    return (jnp.isfinite(nats) & (jnp.abs(nats) <= NATS + ROUNDING * size)).all()
