"""The message in which a server sends draws of the globals."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.guide import Guide
from numpyro_fed.numerics.gaussian import Coordinates, Gaussian


class GlobalDraws(NamedTuple):
    """A message: shared parameters, draws (n, dim), and these in their frame if needed."""

    theta: dict[str, Any]
    z_G: Array
    coordinates: Coordinates | tuple[()]

    @classmethod
    def of(
        cls, guide: Guide, shared: tuple[dict[str, Any], GuideParams, Gaussian], z_G: Array
    ) -> GlobalDraws:
        """Return the message with draws (n, dim) of the globals, from the shared part of a state.

        ``shared`` has the shared parameters, the globals' guide, and its frame.
        """
        theta, eta, frame = shared
        uses = guide.locals_depend_on_globals
        return cls(theta, z_G, guide.globals.centred_coordinates(frame, eta, z_G) if uses else ())

    @property
    def in_frame(self) -> Coordinates:
        """Return the draws in their frame; placeholders, where no local guide depends on them."""
        if isinstance(self.coordinates, Coordinates):
            return self.coordinates
        return Coordinates(self.z_G, self.z_G[0])
