"""The sampling functions of a fit: globals need no data, locals are drawn at their silo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import (
    compiled_method,
    filled,
    first_draws,
    is_traced,
    jit_once,
    map_in_batches,
    shared_number,
)
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.silo_bounds import AtDraw, Bound
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.rounds.states import Private, Shared
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

# Draws x rows up to which silos' latents are drawn by a program with few optimisations: running it
# takes less time than more of them would.
FEW_DRAWN = 2e5
# Draws that are computed side by side, which bounds the memory that rows times draws of their
# integrals take.
DRAWS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Sampler:
    """The compiled sampling functions of a fit; draws run along the leading axis.

    A silo's locals are drawn by ``bound``. ``settings``, as JSON, are those of a correction, from
    which a silo elsewhere makes the same functions; empty for a fit.
    """

    model: FederatedModel
    guide: Guide
    bound: Bound
    settings: Mapping[str, Any] = field(default_factory=dict)

    @compiled_method(jit_once, static_argnums=2)
    def draw_globals(self, key: Array, shared: Shared, n: int) -> tuple[Array, Array]:
        """Return draws (n, dim) and their log densities (n,), from what all parties know."""
        noise = self.guide.globals.noise(key, n)
        return self.guide.globals.draws(shared.frame, shared.guide, noise)[1:]

    @compiled_method()
    def log_density(self, shared: Shared, z_G: Array) -> Array:
        """Return the guide's log density (n,) at any draws (n, dim), where it is known."""
        density = self.guide.globals.density
        return jax.vmap(lambda z: density(shared.frame, shared.guide, z))(z_G)

    @compiled_method()
    def coordinates(self, shared: Shared, z_G: Array) -> Coordinates:
        """Return the coordinates of draws (n, dim) in the frame of the run, with one centre."""
        return self.guide.globals.centred_coordinates(shared.frame, shared.guide, z_G)

    @compiled_method()
    def constrain_globals(self, theta: Theta, z_G: Array) -> dict[str, Array]:
        """Return global sites on their supports at draws (n, dim)."""
        return jax.vmap(self.model.constrain_global, (None, 0))(theta, z_G)

    def draw_locals(
        self,
        key: Array,
        theta: Theta,
        eta: GuideParams,
        z_G: Array,
        coords: Coordinates,
        data: SiloData,
    ) -> Rows:
        """Return a draw of a silo's locals, {plate: (n, rows, dim)}, for each of the globals."""

        def draw_one(draw: tuple[Array, Array, Array]) -> Rows:
            i, z, u = draw
            given = AtDraw(theta, eta, z, coords._replace(u=u), data)
            return self.bound.sample(jax.random.fold_in(key, i), given)

        return map_in_batches(draw_one, (jnp.arange(len(z_G)), z_G, coords.u), DRAWS_AT_ONCE)

    _draw_quickly = compiled_method(jit_once)(draw_locals)
    _draw_well = compiled_method()(draw_locals)

    def draw_silo(
        self,
        key: Array,
        theta: Theta,
        private: Private,
        z_G: Array,
        coords: Coordinates,
        data: SiloData,
        unpadded: tuple[Theta, SiloData] | None = None,
    ) -> dict[str, Array]:
        """Return local sites (n, ...) of a silo at draws of the globals, padded rows included.

        With ``unpadded`` parameters and data they are those of its own rows alone.
        """
        n, rows = len(z_G), sum(self.model.sizes(data).values())
        own, here = {**theta, **private.theta}, private.recentred(coords)
        traced = is_traced((key, z_G))
        few = not traced and shared_number(n) * rows <= FEW_DRAWN
        if few:
            z_G, u = filled((z_G, here.u))
            here = here._replace(u=u)
        draw = self._draw_quickly if few else self._draw_well
        z_L = jax.block_until_ready(draw(key, own, private.guide, z_G, here, data))
        own, data = (own, data) if unpadded is None else unpadded
        if not traced:  # NumPy cuts rows without a program for each number of them
            z_L = {plate: np.asarray(values) for plate, values in z_L.items()}
        of_rows = real_rows(z_L, self.model.sizes(data), len(z_G))
        discrete = key if self.model.discrete else None
        sites = jax.block_until_ready(self.constrain_locals(own, z_G, of_rows, data, discrete))
        return first_draws(sites, n)

    @compiled_method()
    def constrain_locals(
        self, theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array | None
    ) -> dict[str, Array]:
        """Return a silo's local sites on their supports, discrete ones drawn by the key."""
        keys = None if key is None else draw_keys(key, len(z_G))
        constrain = self.model.constrain_local
        return jax.vmap(constrain, (None, 0, 0, None, 0))(theta, z_G, z_L, data, keys)


def draw_keys(key: Array, n: int) -> Array:
    """Return a key for the discrete latents of each of ``n`` draws."""
    return jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, 3)))(jnp.arange(n))


def real_rows(z_L: Rows, size: Sizes, n: int) -> Rows:
    """Return ``n`` draws (n, rows, dim) without padded rows; plates without latents have dim 0."""
    return {
        p: z_L[p][:, :rows] if p in z_L else jnp.zeros((n, rows, 0)) for p, rows in size.items()
    }
