"""An exponential family as a guide of the globals."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from numpyro_fed.expfam.base import Eps, Family, Natural
from numpyro_fed.frame import Coordinates
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GlobalGuide


@dataclass(frozen=True)
class FamilyGuide(GlobalGuide[Eps]):
    """A guide with natural parameters, which PVI computes; no optimiser changes them.

    They are those of ``z_G`` itself: only the silos' local guides use the frame.
    """

    family: Family[Eps]
    density_everywhere = True

    def noise(self, key: Array, n: int) -> Eps:
        return self.family.noise(key, n)

    def draw(self, eta: Natural, noise: Eps) -> tuple[Array, Array]:
        z = self.family.draw(self.family.ordinary(eta), noise)
        return z, self.family.log_density(eta, z)

    def centre(self, eta: Natural) -> Array:
        return self.family.centre(self.family.ordinary(eta))

    def log_density(self, eta: Natural, z: Array) -> Array:
        return self.family.log_density(eta, z)

    def init(self, key: Array, loc: Array, scale: float | None = None) -> Natural:
        # PVI's first state is its server's; a call of this is a mistake in the package.
        raise NotImplementedError("natural parameters begin at the prior, or as silos' factors.")

    def draws(self, frame: Gaussian, eta: Natural, noise: Eps) -> tuple[Coordinates, Array, Array]:
        z_G, log_q = jax.vmap(self.draw, (None, 0))(eta, noise)
        return self.centred_coordinates(frame, eta, z_G), z_G, log_q

    def centred_coordinates(self, frame: Gaussian, eta: Natural, z_G: Array) -> Coordinates:
        return Coordinates(frame.standardise(z_G), frame.standardise(self.centre(eta)))

    def density(self, frame: Gaussian, eta: Natural, z_G: Array) -> Array:
        return self.log_density(eta, z_G)
