"""A fit's Gaussian matched to weighted draws, as a better proposal for the next ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithms.pvi.families import GAUSSIAN
from numpyro_fed.results.base import Result
from numpyro_fed.results.importance import Corrected

WIDER = 1.1  # than the draws: an importance proposal should not be narrower than its target


def rematched(found: Corrected) -> Result | None:
    """The corrected fit with mean and covariance of the weighted draws in the globals' guide.

    For a fit by factors whose globals are one Gaussian; None for others. Silos' states stay.
    """
    result = found.result
    factors, eta = result._fit.factors, result.shared.guide
    if factors is None or set(eta) != {GAUSSIAN} or eta[GAUSSIAN]["second"].ndim != 2:
        return None
    z, w = np.asarray(found._z_G, np.float64), found.weights
    mean = w @ z
    covariance = WIDER**2 * (z - mean).T @ ((z - mean) * w[:, None])
    scale = np.sqrt(np.diagonal(covariance))
    if not (scale > 0).all() or not np.isfinite(scale).all():
        return None
    few = min(1.0, len(mean) / found.ess)  # of a few draws the covariance is shrunk to its diagonal
    correlation = (1 - few) * covariance / np.outer(scale, scale) + few * np.eye(len(mean))
    precision = np.linalg.inv(correlation) / np.outer(scale, scale)
    dtype = eta[GAUSSIAN]["first"].dtype
    matched = {GAUSSIAN: {"first": precision @ mean, "second": -0.5 * precision}}
    guide = jax.tree.map(lambda a: jnp.asarray(a, dtype), matched)
    server = result.state.server
    params = server.params._replace(guide=guide)
    return replace(result, state=result.state._replace(server=server._replace(params=params)))
