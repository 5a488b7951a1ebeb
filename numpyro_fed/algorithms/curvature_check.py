"""A check, after a search, that the density falls around the mode as its curvature says."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    Info,
    Reply,
    Round,
)
from numpyro_fed.algorithms.mode import (
    ROUNDING_UNITS,
    Search,
    SiloState,
    best_start,
    columns_at_once,
    prior_of,
    unraveller,
)
from numpyro_fed.gaussian import Curvature
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

# Distances from the mode, in sds by the curvature, at which the density is evaluated when a search
# has ended. At 1 and 3 it must fall as the parabola says. 30 is for directions whose curvature is
# no more than rounding, and which may be flat or only very wide.
CHECK_DISTANCES = (30.0, 3.0, 1.0)


class CheckPoints(NamedTuple):
    """Points (k, n) at which the density is evaluated, and the index of the search they belong to.

    A silo starts from the modes of its locals in that search.
    """

    places: Array
    start: Array


class Shape(NamedTuple):
    """The parabola at the highest point, and the density around it.

    Attributes
    ----------
    axes : (n, 2 n)
        Directions in columns, in units of each coordinate's curvature: the eigenvectors of the
        curvature, then the coordinates.
    values : (2 n,)
        The curvature along each. At ``threshold`` or below it is no more than rounding.
    threshold : ()
    densities : (12 n,)
        Log densities on both sides of the mode along each direction, at 30 sds (at the mode itself
        where the curvature is more than rounding), then 3, then 1.
    """

    axes: Array
    values: Array
    threshold: Array
    densities: Array


def parabola(search: Search) -> tuple[Shape, CheckPoints]:
    """Return the parabola, with densities unknown, and the points at which to evaluate them."""
    i = best_start(search)
    x, curvature = search.best.x[i], search.best.curvature[i]
    unit, values, axes = Curvature.of(curvature)
    threshold = ROUNDING_UNITS * len(x) * jnp.finfo(x.dtype).eps
    axes = jnp.concatenate([axes, jnp.eye(len(x))], 1)
    values = jnp.concatenate([values, jnp.ones(len(x))])
    offsets = (axes / jnp.sqrt(jnp.maximum(values, threshold)) / unit[:, None]).T
    unsure = jnp.where(values <= threshold, offsets.T, 0.0).T
    directions = (unsure, offsets, offsets)
    sides = [
        (s * distance, direction)
        for distance, direction in zip(CHECK_DISTANCES, directions, strict=True)
        for s in (1, -1)
    ]
    places = x + jnp.concatenate([share * direction for share, direction in sides])
    shape = Shape(axes, values, jnp.asarray(threshold), jnp.full(len(places), jnp.nan))
    return shape, CheckPoints(places, i)


def curvature_check(fm: FederatedModel, effects: np.ndarray) -> Round:
    """Return the round that leads from the end of a search to the :class:`Shape` of its mode.

    It checks whether the density falls around the mode as the curvature says. A search knows the
    curvature alone. Where a likelihood levels off, as for separable logistic regression, each step
    predicts a small gain, and the search ends as it does at a mode.
    """
    integral, unravel, log_prior = silo_integral(fm), unraveller(fm), prior_of(fm, effects)

    def silo(
        noise: object, down: CheckPoints, state: SiloState, data: SiloData
    ) -> tuple[Reply[Array], SiloState]:
        z_L = jax.tree.map(lambda a: a[down.start], state.z_L)

        def value(x: Array) -> Array:
            theta, z_G = unravel(x)
            return integral({**theta, **state.private}, z_G, data, z_L)[0]

        size = min(columns_at_once(fm), len(down.places))
        values = jax.lax.map(value, down.places, batch_size=size)
        return Reply(values, jnp.array(True)), state

    def run(state: Search, noise: object, ask: Ask) -> tuple[Shape, Info]:
        shape, points = parabola(state)
        of_effects = state.likelihood[points.start]
        replies = ask("around the mode", points)
        size = len(shape.values)
        prior = jax.lax.map(lambda x: log_prior(of_effects, x)[0], points.places, batch_size=size)
        after = shape._replace(densities=prior + replies.up)
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange("around the mode", silo, lenient=True),), run)
