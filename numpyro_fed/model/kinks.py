r"""Densities with a kink, rounded off for searches that read curvature.

The log density of :math:`\mathrm{Laplace}(\mu, b)` is straight on both sides of its centre, so that
its second derivative says nothing of how far a posterior reaches. Laplace's method reads instead

.. math::
    -\sqrt{c^2 + (x - \mu)^2 / b^2}, \qquad c = \tfrac12,

which is as steep far out and curves near :math:`\mu`: over rows it has 0.70 of the information
of the kink. No posterior is made of it, only places where searches begin.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

WIDTH = 0.5  # of what is rounded off, in scales
NORM = 0.18848  # what the log density lacks to be one, where both slopes are alike


class _Rounded(dist.AsymmetricLaplace):
    """A Laplace distribution, of the same slope on both sides or not, without its kink."""

    def log_prob(self, value: Array, intermediates: list[Any] | None = None) -> Array:
        z, left, right = value - self.loc, 1 / self.left_scale, 1 / self.right_scale
        size = jnp.sqrt(WIDTH**2 * 4 / (left + right) ** 2 + z**2)
        straight = -0.5 * (size * (left + right) + z * (right - left))
        return straight - jnp.log(self.left_scale + self.right_scale) + NORM


class rounded(Messenger):
    """A text whose Laplace distributions have no kink."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["fn"] = without_kink(msg["fn"])


def without_kink(fn: Distribution) -> Distribution:
    """The distribution with its kink rounded off; itself where it has none."""
    if isinstance(fn, dist.Laplace):
        return _Rounded(fn.loc, fn.scale)
    if isinstance(fn, dist.AsymmetricLaplaceQuantile):
        fn = fn._ald
    if isinstance(fn, dist.AsymmetricLaplace):
        return _Rounded(fn.loc, fn.scale, fn.asymmetry)
    if not isinstance(fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        return fn
    base = without_kink(fn.base_dist)
    if base is fn.base_dist:
        return fn
    if isinstance(fn, dist.Independent):
        return base.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        return base.expand(fn.batch_shape)
    return base.mask(fn._mask)


def has_kink(fn: Distribution) -> bool:
    """Whether a distribution is one of Laplace's, whatever NumPyro has put around it."""
    return without_kink(fn) is not fn
