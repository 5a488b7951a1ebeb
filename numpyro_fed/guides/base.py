"""The interface of a guide of the globals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import jax
from jax import Array

from numpyro_fed.expfam.base import Eps
from numpyro_fed.frame import Coordinates
from numpyro_fed.gaussian import Gaussian, as_matrix

GuideParams = dict[str, Any]  # eta: arrays by name


@dataclass(frozen=True, eq=False)
class GlobalGuide(ABC, Generic[Eps]):
    """A guide of the flat vector ``z_G``, as functions of parameters ``eta`` and explicit noise.

    It acts on coordinates ``u`` of a frame, and the frame places these: :mod:`numpyro_fed.frame`.

    Attributes
    ----------
    dim : int
        Length of ``z_G``.
    density_everywhere : bool
        Whether the log density is known at any point; of most flows it is at their own draws alone.
    has_standard_noise : bool
        Whether noise is one standard normal for each latent, and can be found from a draw.
    """

    dim: int
    density_everywhere: ClassVar[bool] = False
    has_standard_noise: ClassVar[bool] = False

    @abstractmethod
    def noise(self, key: Array, n: int) -> Eps:
        """Return what ``n`` draws take, along a leading axis of every leaf."""

    @abstractmethod
    def init(self, key: Array, loc: Array, scale: float | None = None) -> GuideParams:
        """Return parameters for a start at ``loc`` (dim,), about as wide as ``scale``.

        By default as wide as the guide was told to begin.
        """

    @abstractmethod
    def draw(self, eta: GuideParams, noise: Eps) -> tuple[Array, Array]:
        """Return a draw (dim,) from the noise of one, and its log density."""

    @abstractmethod
    def centre(self, eta: GuideParams) -> Array:
        """Return where the guide is centred (dim,); local guides measure the globals from there."""

    def log_density(self, eta: GuideParams, u: Array) -> Array:
        """Return the log density at any point, where :attr:`density_everywhere`."""
        raise NotImplementedError(f"{type(self).__name__} knows its density at its draws alone.")

    def standard_noise(self, eta: GuideParams, u: Array) -> Array:
        """Return the noise (dim,) of which ``u`` is the draw, where :attr:`has_standard_noise`."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell noise from a draw.")

    def frame(self, loc: Array, root: Array) -> Gaussian:
        """Return the frame in which the guide is to work around a normal distribution.

        With mean ``loc`` (dim,) and as ``root`` the Cholesky factor of its covariance (dim, dim),
        or standard deviations (dim,).
        """
        return Gaussian.of_root(loc, as_matrix(root))

    def place(self, frame: Gaussian, u: Array) -> Array:
        """Return ``z_G`` (dim,) at coordinates ``u`` of a frame."""
        return frame.draw(u)

    def coordinates(self, frame: Gaussian, z_G: Array) -> Array:
        """Return the coordinates of ``z_G`` (dim,) in a frame."""
        return frame.standardise(z_G)

    def in_z(self, frame: Gaussian, eta: GuideParams) -> GuideParams:
        """Return what there is to say of the guide in ``z_G``, for a user to look at."""
        return eta

    def draws(
        self, frame: Gaussian, eta: GuideParams, noise: Eps
    ) -> tuple[Coordinates, Array, Array]:
        """Return draws from the noise of many.

        Their coordinates, ``z_G`` (n, dim) itself, and its log density (n,).
        """
        u, log_q = jax.vmap(self.draw, (None, 0))(eta, noise)
        z_G = jax.vmap(self.place, (None, 0))(frame, u)
        return Coordinates(u, self.centre(eta)), z_G, log_q - frame.log_det

    def centred_coordinates(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Coordinates:
        """Return the coordinates of any ``z_G`` (n, dim), and of the guide's centre."""
        u = jax.vmap(self.coordinates, (None, 0))(frame, z_G)
        return Coordinates(u, self.centre(eta))

    def density(self, frame: Gaussian, eta: GuideParams, z_G: Array) -> Array:
        """Return the log density at any ``z_G`` (dim,), where :attr:`density_everywhere`."""
        return self.log_density(eta, self.coordinates(frame, z_G)) - frame.log_det
