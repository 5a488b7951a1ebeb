r"""Frames: the origin and the units of the coordinates in which a run works.

.. math::
    z = m + L u

A frame is a Gaussian. Its mean ``m`` is the start of a run, and its root ``L`` the spread of the
posterior that is expected there. Algorithms work with guides of ``u``, in which the posterior is
about standard, whatever the units of the data. A start at the mode and a start at an earlier result
differ in their frames only. Without a start the frame is the standard normal, and ``u`` is ``z``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.gaussian import Gaussian

Tree = TypeVar("Tree")


class Frame(NamedTuple):
    """The frames of the shared parameters and of the globals.

    ``theta`` has independent normals for each array of the shared parameters, unconstrained; it is
    ``()`` without a frame, where coordinates are the parameters themselves. ``globals`` is in the
    order of coordinates in which the globals' guide works.
    """

    theta: Any
    globals: Gaussian

    @classmethod
    def identity(cls, dim: int) -> Frame:
        """Return the frame that changes no coordinate, for ``dim`` globals."""
        return cls((), identity((dim,)))

    def parameters(self, steps: Tree) -> Tree:
        """Return the shared parameters at coordinates ``steps``."""
        # Without a frame there is nothing to map over: ``()`` does not match the parameters' tree.
        if self.theta == ():
            return steps
        return jax.tree.map(
            lambda frame, step: frame.draw(step),
            self.theta,
            steps,
            is_leaf=lambda leaf: isinstance(leaf, Gaussian),
        )


class Coordinates(NamedTuple):
    """The globals ``u`` (..., dim) in their frame, for local guides that depend on them.

    ``centre`` (dim,) is that of the globals' guide in the frame, from which local guides measure.
    """

    u: Array
    centre: Array

    @property
    def offset(self) -> Array:
        """The offset (..., dim) of the globals from the centre."""
        return self.u - self.centre


def identity(shape: tuple[int, ...]) -> Gaussian:
    """Return the frame that changes nothing: independent standard normals of this shape."""
    return Gaussian(jnp.zeros(shape), jnp.zeros(shape))
