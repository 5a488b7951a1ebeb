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
from numpyro_fed.algorithms.expand import (
    ROUNDING_UNITS,
    SiloState,
    columns_at_once,
    flat_size,
    prior_of,
    unraveller,
)
from numpyro_fed.algorithms.mode import Search, best_start
from numpyro_fed.gaussian import Curvature
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

# Distances from the mode, in sds by the curvature, at which the density is evaluated when a search
# has ended. At 1 and 3 it must fall as the parabola says. 30 is for directions whose curvature is
# no more than rounding, and which may be flat or only very wide.
CHECK_DISTANCES = (30.0, 3.0, 1.0)
# A density that repeats is the same after one period and two, up to this share of it in units of
# eps, and differs after a PART of one by TELLS times as much. It is tried ASIDE sds off the mode,
# where it has a slope. A PART of a half or a third would miss a density that repeats
# two or three times in a period: it is the same there, too.
SAME, TELLS, ASIDE, PART = 1e4, 10.0, 0.5, 0.382


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
    periods : (n,)
        The shift of a coordinate after which the density is what it was, as of an angle; infinite
        where it does not repeat. It is looked for where a prior is flat: elsewhere copies differ.
    """

    axes: Array
    values: Array
    threshold: Array
    densities: Array
    periods: Array


def parabola(search: Search[Array]) -> tuple[Shape, CheckPoints]:
    """Return the parabola, with densities unknown, and the points at which to evaluate them."""
    i = best_start(search)
    x, curvature = search.best.x[i], search.best.curvature[i]
    scaled = Curvature.of(curvature)
    unit, values, axes = scaled.unit, scaled.values, scaled.vectors
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
    unknown = jnp.full(len(places), jnp.nan)
    shape = Shape(axes, values, jnp.asarray(threshold), unknown, jnp.full(len(x), jnp.inf))
    return shape, CheckPoints(places, i)


class _Repeats(NamedTuple):
    """Shifts of flat coordinates after which the density may be the same.

    Attributes
    ----------
    flat : (f,) int array
        The coordinates.
    shifts : (f, s)
        A turn, in radians, and the distances from the mode to where other starts came to rest.
    places : (1 + 3 f s, n)
        A place near the mode, and the same after a shift, two shifts, and a part of one.
    """

    flat: np.ndarray
    shifts: Array
    places: Array

    @classmethod
    def near(cls, search: Search[Array], flat: np.ndarray) -> _Repeats:
        """Return the shifts to try, around the best place of a search."""
        i = best_start(search)
        x, unit = search.best.x[i], Curvature.of(search.best.curvature[i]).unit
        base = x + ASIDE / unit
        turn = jnp.full((1, len(flat)), 2 * np.pi, x.dtype)
        shifts = jnp.concatenate([turn, jnp.abs(search.best.x[:, flat] - x[flat])]).T
        steps = shifts[:, :, None] * jnp.array([1.0, 2.0, PART])
        shifted = base + steps[..., None] * jnp.eye(len(x))[flat][:, None, None]
        return cls(flat, shifts, jnp.concatenate([base[None], shifted.reshape(-1, len(x))]))

    def periods(self, densities: Array, n: int) -> Array:
        """Return the period (n,) of each coordinate, from the densities at all places.

        A turn counts before shorter periods: what users see of an angle repeats with it.
        """
        base, after = densities[0], densities[1:].reshape(*self.shifts.shape, 3)
        allowed = SAME * jnp.finfo(base.dtype).eps * jnp.maximum(1.0, jnp.abs(base))
        once, twice, part = jnp.moveaxis(jnp.abs(after - base), -1, 0)
        found = (once <= allowed) & (twice <= allowed) & (part > TELLS * allowed)
        periods = jnp.where(found, self.shifts, jnp.inf)
        shortest = jnp.where(found[:, 0], self.shifts[:, 0], periods.min(1, initial=jnp.inf))
        return jnp.full(n, jnp.inf, base.dtype).at[self.flat].set(shortest)


def _flat_coordinates(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates whose prior is flat."""
    sites = [s for s in fm.named("latent") if s.name in fm.improper]
    ranges = [np.arange(s.start, s.stop) for s in sites]
    return flat_size(fm) - fm.dim + np.concatenate([np.zeros(0, int), *ranges])


def curvature_check(fm: FederatedModel, effects: np.ndarray) -> Round:
    """Return the round that leads from the end of a search to the :class:`Shape` of its mode.

    It checks whether the density falls around the mode as the curvature says. A search knows the
    curvature alone. Where a likelihood levels off, as for separable logistic regression, each step
    predicts a small gain, and the search ends as it does at a mode. Where priors are flat, it looks
    for periods as well.
    """
    flat = _flat_coordinates(fm)
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

    def run(state: Search[Array], noise: object, ask: Ask) -> tuple[Shape, Info]:
        shape, points = parabola(state)
        around = len(points.places)
        repeats = _Repeats.near(state, flat) if len(flat) else None
        if repeats is not None:
            points = points._replace(places=jnp.concatenate([points.places, repeats.places]))
        of_effects = state.likelihood[points.start]
        replies = ask("around the mode", points)
        size = len(shape.values)
        prior = jax.lax.map(lambda x: log_prior(of_effects, x)[0], points.places, batch_size=size)
        densities = prior + replies.up
        after = shape._replace(densities=densities[:around])
        if repeats is not None:
            periods = repeats.periods(densities[around:], len(shape.periods))
            after = after._replace(periods=periods)
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange("around the mode", silo, lenient=True),), run)
