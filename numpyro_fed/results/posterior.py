"""Sampling functions of a fitted guide: globals need no data, locals are drawn at their silo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Private, Shared
from numpyro_fed.algorithms.importance.integration import Integration
from numpyro_fed.bounds import Bound
from numpyro_fed.frame import Coordinates
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.programs import jit_once

# Draws x rows up to which silos' latents are drawn by a program with few optimisations: running it
# takes less time than more of them would.
FEW_DRAWN = 1e6


class Posterior(NamedTuple):
    """The compiled sampling functions of a fit; draws run along the leading axis.

    Attributes
    ----------
    draw_globals : (key, Shared, n) -> (z_G, log_q)
        Draws (n, dim) and their log densities (n,), from the shared part of the server's state.
    log_density : (Shared, z_G) -> (n,)
        The guide's log density at any draws (n, dim), where it is known everywhere.
    coordinates : (Shared, z_G) -> Coordinates
        The coordinates of draws (n, dim) in the frame of the run, with one centre.
    constrain_globals : (theta, z_G) -> {site: value}
    draw_locals : (key, theta, eta, z_G, coords, data) -> z_L
        One draw of a silo's locals, {plate: (n, rows, dim)}, for each draw of the globals.
    constrain_locals : (theta, z_G, z_L, data) -> {site: value}
    draw_silos : (keys, theta, privates, z_G, coords, data) -> {site: value}
        Local sites of silos whose private parts and data are stacked, (silos, n, ...), padded rows
        included.
    integration : Integration or None
        How a correction integrates locals; None for a fit, which draws them by its own bound.
    """

    draw_globals: Callable[..., tuple[Array, Array]]
    log_density: Callable[[Shared, Array], Array]
    coordinates: Callable[[Shared, Array], Coordinates]
    constrain_globals: Callable[..., dict[str, Array]]
    draw_locals: Callable[..., Rows]
    constrain_locals: Callable[..., dict[str, Array]]
    draw_silos: Callable[..., dict[str, Array]]
    integration: Integration | None = None


def posterior(
    fm: FederatedModel, guide: Guide, bound: Bound, integration: Integration | None = None
) -> Posterior:
    """Return the sampling functions of a fit, or with an ``integration`` those of a correction."""

    @partial(jit_once, static_argnums=2)
    def draw_globals(key: Array, shared: Shared, n: int) -> tuple[Array, Array]:
        noise = guide.globals.noise(key, n)
        return guide.globals.draws(shared.frame, shared.guide, noise)[1:]

    @jax.jit
    def log_density(shared: Shared, z_G: Array) -> Array:
        return jax.vmap(partial(guide.globals.density, shared.frame, shared.guide))(z_G)

    @jax.jit
    def coordinates(shared: Shared, z_G: Array) -> Coordinates:
        return guide.globals.centred_coordinates(shared.frame, shared.guide, z_G)

    @jax.jit
    def constrain_globals(theta: dict[str, Any], z_G: Array) -> dict[str, Array]:
        return jax.vmap(fm.constrain_global, (None, 0))(theta, z_G)

    @jax.jit
    def draw_locals(
        key: Array, theta: Theta, eta: GuideParams, z_G: Array, coords: Coordinates, data: SiloData
    ) -> Rows:
        def draw_one(draw: tuple[Array, Array, Array]) -> Rows:
            i, z, u = draw
            at_draw = coords._replace(u=u)
            return bound.sample(jax.random.fold_in(key, i), theta, eta, z, at_draw, data)

        # Batches of 64 draws bound the memory, whatever
        # n is: rows x draws x inner draws stand at once.
        return jax.lax.map(draw_one, (jnp.arange(len(z_G)), z_G, coords.u), batch_size=64)

    @jax.jit
    def constrain_locals(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> dict[str, Array]:
        return jax.vmap(fm.constrain_local, (None, 0, 0, None))(theta, z_G, z_L, data)

    draw_silos = SilosSampler(fm, draw_locals, constrain_locals)
    return Posterior(
        draw_globals,
        log_density,
        coordinates,
        constrain_globals,
        draw_locals,
        constrain_locals,
        draw_silos,
        integration,
    )


@dataclass(frozen=True, eq=False)
class SilosSampler:
    """The sampler of several silos' own latents, one silo after the other in one program."""

    model: FederatedModel
    draw_locals: Callable[..., Rows]
    constrain_locals: Callable[..., dict[str, Array]]

    def __call__(
        self,
        keys: Array,
        theta: Theta,
        privates: Private,
        z_G: Array,
        coords: Coordinates,
        data: SiloData,
    ) -> dict[str, Array]:
        """Return local sites (silos, n, ...); keys, private parts and data are stacked."""
        rows = sum(self.model.sizes(jax.tree.map(lambda a: a[0], data)).values())
        few = len(keys) * len(z_G) * rows <= FEW_DRAWN
        program = self._quick if few else self._optimised
        return program(keys, theta, privates, z_G, coords, data)

    @cached_property
    def _quick(self) -> Callable[..., dict[str, Array]]:
        return jit_once(self._draw)

    @cached_property
    def _optimised(self) -> Callable[..., dict[str, Array]]:
        return jax.jit(self._draw)

    def _draw(
        self,
        keys: Array,
        theta: Theta,
        privates: Private,
        z_G: Array,
        coords: Coordinates,
        data: SiloData,
    ) -> dict[str, Array]:
        def draw_one(one: tuple[Array, Private, SiloData]) -> dict[str, Array]:
            key, private, silo = one
            own = {**theta, **private.theta}
            here = private.recentred(coords)
            z_L = self.draw_locals(key, own, private.guide, z_G, here, silo)
            z_L = real_rows(z_L, self.model.sizes(silo), len(z_G))
            return self.constrain_locals(own, z_G, z_L, silo)

        return jax.lax.map(draw_one, (keys, privates, data))


def real_rows(z_L: Rows, size: Sizes, n: int) -> Rows:
    """Return ``n`` draws (n, rows, dim) without padded rows; plates without latents have dim 0."""
    return {
        p: z_L[p][:, :rows] if p in z_L else jnp.zeros((n, rows, 0)) for p, rows in size.items()
    }
