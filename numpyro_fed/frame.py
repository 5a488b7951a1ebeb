r"""Frames: where a run measures from, and in which units.

.. math::
    z = m + L u

A frame is a Gaussian: its mean ``m`` is where a run begins, its root ``L`` says how far the
posterior is expected to reach from there. Algorithms move guides of ``u``, in which the posterior
is about standard, whatever the units of the data; a start at the mode and a start at an earlier
result are frames, and nothing else. Where nothing is known the frame is the standard normal, and
``u`` is ``z``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.gaussian import Gaussian

Tree = TypeVar("Tree")


class Frame(NamedTuple):
    """The frames of what silos share.

    Attributes
    ----------
    theta : tree of Gaussian, or ()
        Of the shared parameters, unconstrained: one of independent numbers for each array; or none,
        where they are what they are.
    globals : Gaussian
        Of the globals, in the order of coordinates in which their guide works.
    """

    theta: Any
    globals: Gaussian

    @classmethod
    def identity(cls, dim: int) -> Frame:
        """Return the frame in which all coordinates are what they are, for ``dim`` globals."""
        return cls((), identity((dim,)))

    @classmethod
    def centred_at(cls, theta: Any, unit: Any, globals: Gaussian) -> Frame:
        """Return the frame at shared parameters ``theta`` with standard deviations ``unit``."""
        return cls(jax.tree.map(Gaussian.of_root, theta, unit), globals)

    def parameters(self, steps: Tree) -> Tree:
        """Return the shared parameters at coordinates ``steps``."""
        if self.theta == ():
            return steps
        return jax.tree.map(
            lambda frame, step: frame.draw(step), self.theta, steps, is_leaf=_is_gaussian
        )


class Coordinates(NamedTuple):
    """The globals as local guides see them.

    Attributes
    ----------
    u : (..., dim)
        The globals in their frame.
    centre : (dim,)
        The centre of their guide there, from which local guides measure.
    """

    u: Array
    centre: Array

    @property
    def offset(self) -> Array:
        """How far the globals are from the centre (..., dim)."""
        return self.u - self.centre


def identity(shape: tuple[int, ...]) -> Gaussian:
    """Return independent standard normals of this shape: the frame that changes nothing."""
    return Gaussian(jnp.zeros(shape), jnp.zeros(shape))


def _is_gaussian(value: object) -> bool:
    return isinstance(value, Gaussian)
