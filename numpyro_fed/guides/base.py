"""The interface of a guide of the globals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import jax
from jax import Array

from numpyro_fed.expfam.base import Eps, Family, Natural
from numpyro_fed.frame import Coordinates
from numpyro_fed.gaussian import Gaussian, as_matrix

GuideParams = dict[str, Any]  # eta: arrays by name


@dataclass(frozen=True, eq=False)
class GlobalGuide(ABC, Generic[Eps]):
    """A guide of the flat vector ``z_G``, as functions of parameters ``eta`` and explicit noise.

    It is a distribution of coordinates ``u``; a frame maps these to ``z_G``
    (:mod:`numpyro_fed.frame`).

    Attributes
    ----------
    dim : int
        Length of ``z_G``.
    density_everywhere : bool
        Whether the log density is known at any point. Most flows know it at their own draws only.
    has_standard_noise : bool
        Whether the noise is one standard normal for each latent, and can be computed from a draw.
    """

    dim: int
    density_everywhere: ClassVar[bool] = False
    has_standard_noise: ClassVar[bool] = False

    @abstractmethod
    def noise(self, key: Array, n: int) -> Eps:
        """Return the noise of ``n`` draws, along a leading axis of every leaf."""

    @abstractmethod
    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        """Return parameters for a start at ``loc`` (dim,), with sds of about ``scale``.

        By default these are the guide's own setting.
        """

    @abstractmethod
    def draw(self, eta: GuideParams, noise: Eps) -> tuple[Array, Array]:
        """Return one draw (dim,) from its noise, and the log density () there."""

    @abstractmethod
    def centre(self, eta: GuideParams) -> Array:
        """Return the guide's centre (dim,), from which local guides measure the globals."""

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        """Return the log density at any point, where :attr:`density_everywhere`."""
        raise NotImplementedError(f"{type(self).__name__} knows its density at its draws alone.")

    def standard_noise(self, eta: GuideParams, u: Array) -> Array:
        """Return the noise (dim,) of which ``u`` is the draw, where :attr:`has_standard_noise`."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell noise from a draw.")

    def frame(self, loc: Array, root: Array) -> Gaussian:
        """Return the frame in which a normal distribution is standard, as the guide can have it.

        The distribution has the mean ``loc`` (dim,) and, as ``root``, a Cholesky factor of its
        covariance (dim, dim), or standard deviations (dim,).
        """
        return Gaussian.of_root(loc, as_matrix(root))

    def place(self, frame: Gaussian, u: Array) -> Array:
        """Return ``z_G`` (dim,) at coordinates ``u`` of a frame."""
        return frame.draw(u)

    def coordinates(self, frame: Gaussian, z_G: Array) -> Array:
        """Return the coordinates of ``z_G`` (dim,) in a frame."""
        return frame.standardise(z_G)

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        """Return the guide's parameters in units of ``z_G``, for users to read."""
        return eta

    def draws(
        self, frame: Gaussian, eta: GuideParams, noise: Eps
    ) -> tuple[Coordinates, Array, Array]:
        """Return n draws: coordinates (n, dim), ``z_G`` (n, dim), and its log density (n,)."""
        u, log_q = jax.vmap(self.draw, (None, 0))(eta, noise)
        z_G = jax.vmap(self.place, (None, 0))(frame, u)
        return Coordinates(u, self.centre(eta)), z_G, log_q - frame.log_det

    def centred_coordinates(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Coordinates:
        """Return the coordinates of any ``z_G`` (n, dim), with the guide's centre."""
        u = jax.vmap(self.coordinates, (None, 0))(frame, z_G)
        return Coordinates(u, self.centre(eta))

    def density(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Array:
        """Return the log density () at any ``z_G`` (dim,), where :attr:`density_everywhere`."""
        return self.log_density(eta, self.coordinates(frame, z_G)) - frame.log_det


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
