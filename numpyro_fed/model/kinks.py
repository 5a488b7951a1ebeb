r"""Laplace densities with their kink rounded off, for searches that use curvature.

The log density of :math:`\mathrm{Laplace}(\mu, b)` is linear on both sides of its centre, so that
its second derivative does not tell how wide a posterior is. Laplace's method uses instead

.. math::
    -\sqrt{c^2 + (x - \mu)^2 / b^2}, \qquad c = \tfrac12,

which has the same slope far out and is curved near :math:`\mu`. Its curvature, averaged over rows,
is 0.70 of the Fisher information of the Laplace density. It is used for starting points only, never
for a posterior.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

# c, in scales. Half of it would have 0.82 of the information instead of 0.70, but curvature in
# fewer rows, so that Newton's steps depend on few of them. Twice as much would have 0.54.
WIDTH = 0.5
# The normalising constant for c = 1/2 and equal slopes, -log of the integral of exp(-sqrt(c^2 +
# z^2)) over 2: scales are estimated by it as well.
NORM = 0.18848


class _Rounded(dist.AsymmetricLaplace):
    """A symmetric or asymmetric Laplace distribution with its kink rounded off."""

    def log_prob(self, value: Array, intermediates: list[Any] | None = None) -> Array:
        z, left, right = value - self.loc, 1 / self.left_scale, 1 / self.right_scale
        size = jnp.sqrt(WIDTH**2 * 4 / (left + right) ** 2 + z**2)
        straight = -0.5 * (size * (left + right) + z * (right - left))
        return straight - jnp.log(self.left_scale + self.right_scale) + NORM


class rounded(Messenger):
    """Round off the kinks of all Laplace distributions in a model."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["fn"] = without_kink(msg["fn"])


def without_kink(fn: Distribution) -> Distribution:
    """Return a distribution with its kink rounded off; the same object if it has none."""
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
