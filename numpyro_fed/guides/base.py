"""The interface of a guide of the globals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array

GuideParams = dict[str, Any]  # eta: arrays by name


@dataclass(frozen=True, eq=False)
class GlobalGuide(ABC):
    """A guide of the flat vector ``z_G``, as functions of parameters ``eta`` and explicit noise.

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
    def noise(self, key: Array, n: int) -> Any:
        """Return what ``n`` draws take, along a leading axis of every leaf."""

    @abstractmethod
    def init(self, key: Array, loc: Array) -> GuideParams:
        """Return parameters for a start at ``loc`` (dim,)."""

    @abstractmethod
    def draw(self, eta: GuideParams, noise: Any) -> tuple[Array, Array]:
        """Return a draw ``z_G`` (dim,) from the noise of one, and its log density."""

    @abstractmethod
    def centre(self, eta: GuideParams) -> Array:
        """Return where the guide is centred (dim,); local guides measure ``z_G`` from there."""

    @abstractmethod
    def around(self, key: Array, loc: Array, root: Array) -> GuideParams:
        """Return the parameters of a normal distribution, or of what comes near it.

        With mean ``loc`` (dim,) and as ``root`` the Cholesky factor of its covariance (dim, dim),
        or standard deviations (dim,).
        """

    @abstractmethod
    def moved(self, eta: GuideParams, step: GuideParams) -> GuideParams:
        """Return the guide after a step in coordinates in which it is about standard.

        ``step`` has the structure of ``eta``, and is zero for no move.
        """

    def log_density(self, eta: GuideParams, z: Array) -> Array:
        """Return the log density at any point, where :attr:`density_everywhere`."""
        raise NotImplementedError(f"{type(self).__name__} knows its density at its draws alone.")

    def standard_noise(self, eta: GuideParams, z: Array) -> Array:
        """Return the noise (dim,) of which ``z`` is the draw, where :attr:`has_standard_noise`."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell noise from a draw.")
