"""The parts of the states of servers and silos that all algorithms share.

Results read an algorithm's state as :class:`Shared` and :class:`Private`, and a run that goes on
from an earlier one gets :class:`CarriedSilo` at each silo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.numerics.gaussian import Coordinates, Gaussian
from numpyro_fed.text.site_table import Theta


class SharedParams(NamedTuple):
    """The parameters of the globals' guide, and the shared parameters, unconstrained."""

    guide: Any
    theta: Theta


class SiloParams(NamedTuple):
    """The parameters of a silo's local guides, and its private parameters, unconstrained."""

    guide: dict[str, GuideParams]
    private: Theta


class Shared(NamedTuple):
    """The part of a server's state that all parties may know."""

    theta: dict[str, Any]  # shared parameters, unconstrained
    guide: Any  # parameters of the globals' guide, in its frame
    frame: Gaussian


class Private(NamedTuple):
    """The part of a silo's state that never leaves it."""

    theta: dict[str, Any]  # the silo's private parameters, unconstrained
    guide: dict[str, Any]  # parameters of its local guides
    # (dim,): the point of the globals' frame from which the local guides measure. By default it is
    # the centre of the globals' guide. A silo that missed rounds still has an earlier centre.
    centre: Array | None = None

    def recentred(self, coordinates: Coordinates) -> Coordinates:
        """Return coordinates of the globals, measured from the silo's own ``centre``."""
        return coordinates if self.centre is None else coordinates._replace(centre=self.centre)


class CarriedSilo(NamedTuple):
    """A silo's part of an earlier result; its guides measure ``z_G`` from ``centre`` (dim,)."""

    theta: Theta
    guide: dict[str, GuideParams]
    centre: Array


class Sampled(NamedTuple):
    """A silo's draws of its latents on their supports, ``{site: (n, ...)}``; they stay there."""

    values: dict[str, Array]


class WarmStart(NamedTuple):
    """The functions by which an algorithm starts where an earlier run has ended."""

    server: Callable[..., Any]  # (key, StartPoint) -> server_state
    silo: Callable[..., Any]  # (key, CarriedSilo, StartPoint, data) -> silo_state
