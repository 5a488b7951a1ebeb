"""An exponential family as the guide of the globals."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from numpyro_fed.expfam.base import Family, Natural, Tree
from numpyro_fed.guides.base import GlobalGuide


@dataclass(frozen=True)
class FamilyGuide(GlobalGuide):
    """A guide whose parameters are natural ones: PVI finds them, and no optimiser moves them."""

    family: Family
    density_everywhere = True

    def noise(self, key: Array, n: int) -> Tree:
        return self.family.noise(key, n)

    def draw(self, eta: Natural, noise: Tree) -> tuple[Array, Array]:
        z = self.family.draw(self.family.ordinary(eta), noise)
        return z, self.family.log_density(eta, z)

    def centre(self, eta: Natural) -> Array:
        return self.family.centre(self.family.ordinary(eta))

    def log_density(self, eta: Natural, z: Array) -> Array:
        return self.family.log_density(eta, z)

    def init(self, key: Array, loc: Array) -> Natural:
        raise NotImplementedError("natural parameters begin at the prior.")

    def around(self, key: Array, loc: Array, root: Array) -> Natural:
        raise NotImplementedError("natural parameters begin at the prior, or as silos' factors.")

    def moved(self, eta: Natural, step: Natural) -> Natural:
        raise NotImplementedError("natural parameters take no steps in a guide's coordinates.")
