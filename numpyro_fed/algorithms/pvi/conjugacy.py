"""Tests whether silos' likelihoods are conjugate to the family of the globals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.pvi.families import Globals, affine_at, departure, generic_parameters
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural, Ordinary
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.precision import double_precision
from numpyro_fed.programs import jit_double
from numpyro_fed.trees import double

# Rounding errors, in units of eps times the size of all terms, that a likelihood of few rows may
# have. Of many rows they add up as a random walk, by the square root of the number.
ROUNDINGS = 8


def conjugacy(fm: FederatedModel, chosen: Globals) -> Callable[[Sequence[SiloData]], bool]:
    """Return a function of silos' data that says whether all their likelihoods are conjugate.

    Silos come in stacks of one shape. Programs are compiled once for each shape, and the answer is
    computed from the values each time. Parameters without a prior have general values.
    """
    # Latents of rows, and private parameters, would have to be integrated out or fitted first.
    if any(p.dim for p in fm.plates) or any(s.kind == "param" and s.plate for s in fm.sites):
        return lambda stacks: False
    family, points_near = chosen.family, chosen.places.near
    theta = generic_parameters(fm)

    @jit_double
    def all_affine(stack: SiloData, points: Array) -> Array:
        prior = chosen.prior(theta)

        def one_silo(data: SiloData) -> Array:
            rows = row_terms(fm, theta, data)
            eta = family.fit(lambda z: rows(z).sum())
            centre, points_close = points_near(jax.tree.map(jnp.add, prior, eta), 16)
            return affine_at(rows, family, eta, centre, jnp.concatenate([points, points_close]))

        return jax.vmap(one_silo)(stack).all()

    def verdict(stacks: Sequence[SiloData]) -> bool:
        with double_precision():
            return all(all_affine(double(stack), chosen.places.points) for stack in stacks)

    return verdict


def row_terms(fm: FederatedModel, theta: Theta, data: SiloData) -> Callable[[Array], Array]:
    """Return the rows' log likelihoods (n,) as a function of the globals, without locals."""
    z_L = {plate: jnp.zeros((size, 0)) for plate, size in fm.sizes(data).items()}

    def rows(z: Array) -> Array:
        values = fm.log_silo(theta, z, z_L, data)
        return jnp.concatenate([jnp.zeros(0), *values.values()])

    return rows


def misfit(
    rows: Callable[[Array], Array],
    family: Family[Any],
    eta: Natural,
    start: Ordinary,
    num_rows: int,
    psi: Ordinary,
) -> Array:
    """Return the largest departure of a likelihood from ``<eta, T>``, in nats, beyond rounding.

    It is measured between the centre of ``psi`` and draws from ``psi`` and ``start``.
    """
    centre = family.centre(psi)
    draws = jax.vmap(family.draw, (None, 0))
    z = draws(psi, family.noise(jax.random.key(0), 8))
    start_draws = draws(start, family.noise(jax.random.key(1), 4))
    start_draws = jnp.where(jnp.isfinite(start_draws), start_draws, centre)  # a prior may be flat
    departure_at = partial(departure, rows, family, eta, centre)
    nats, size = jax.vmap(departure_at)(jnp.concatenate([z, start_draws]))
    # Rounding within a row is about as large as the effect of rounding the globals.
    within_rows = jnp.linalg.norm(jax.jvp(rows, (centre,), (centre,))[1])
    eps = max(ROUNDINGS, 2 * math.sqrt(num_rows)) * jnp.finfo(centre.dtype).eps
    rounding = eps * (size + within_rows)
    return (jnp.abs(nats) - rounding).max()
