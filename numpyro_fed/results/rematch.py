"""A better proposal for the correction: the guide's Gaussian, matched to weighted draws."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithms.pvi.families import GAUSSIAN
from numpyro_fed.results.importance import Corrected
from numpyro_fed.results.rows import Result

# The proposal's sds, in sds of the weighted draws. A proposal that is narrower than its target has
# weights with a heavy tail; one that is wider costs effective draws, in each dimension.
WIDER = 1.1


def rematched(corrected: Corrected) -> Result | None:
    """Return the corrected fit with the weighted draws' mean and covariance in its guide.

    It is None unless the fit is by PVI and its globals are one full Gaussian. Silos' states stay.
    """
    result = corrected.result
    factors, eta = result._fit.factors, result.shared.guide
    if factors is None or set(eta) != {GAUSSIAN} or eta[GAUSSIAN]["second"].ndim != 2:
        return None
    z, w = np.asarray(corrected._z_G, np.float64), corrected.weights
    mean = w @ z
    covariance = WIDER**2 * (z - mean).T @ ((z - mean) * w[:, None])
    scale = np.sqrt(np.diagonal(covariance))
    if not (scale > 0).all() or not np.isfinite(scale).all():
        return None
    # A covariance from as many effective draws as dimensions is nearly singular: correlations are
    # shrunk to zero by dimensions over effective draws.
    shrinkage = min(1.0, len(mean) / corrected.ess)
    correlation = (1 - shrinkage) * covariance / np.outer(scale, scale) + shrinkage * np.eye(
        len(mean)
    )
    precision = np.linalg.inv(correlation) / np.outer(scale, scale)
    dtype = eta[GAUSSIAN]["first"].dtype
    matched = {GAUSSIAN: {"first": precision @ mean, "second": -0.5 * precision}}
    guide = jax.tree.map(lambda a: jnp.asarray(a, dtype), matched)
    server = result.state.server
    params = server.params._replace(guide=guide)
    return replace(result, state=result.state._replace(server=server._replace(params=params)))
