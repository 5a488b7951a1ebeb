r"""Means and sds of weighted draws, their Monte Carlo errors, and the distance of a fit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Coordinates whose tails are fitted side by side: all of them at once take memory of the order of
# coordinates x draws several times over, one by one the loop is slower.
AT_ONCE = 64
# A log term is cut off so far below the largest. Terms of draws at the mean are log 0, and the fit
# of the tail must see no infinities; e^-100 of the largest is no part of a tail.
FAR = 100.0


class Moments(NamedTuple):
    r"""The weighted moments of each coordinate, from weights ``w`` that sum to one.

    Standard errors are those of self-normalised weights (Owen 2013, "Monte Carlo theory, methods
    and examples", section 9.2): of the mean :math:`\sqrt{\sum_i w_i^2 (z_i - m)^2}`, and of the
    sd, relative, :math:`\sqrt{\sum_i w_i^2 ((z_i - m)^2 - s^2)^2} / 2 s^2`. For the distance of
    the fit, which has weight :math:`u_i`, the same draws serve both, so that :math:`w_i - u_i`
    stands in the place of :math:`w_i`: it is known much better than either.

    Attributes
    ----------
    mean, sd : (dim,)
    error : (2, dim)
        Standard errors of mean and sd, in sds; infinite where all draws that count coincide.
    shift : (2, dim)
        Mean and sd of the fit less these, in sds.
    shift_error : (2, dim)
        Its standard errors.
    tail : float
        Shape of the tail of the terms :math:`w_i (z_i - m)^2` of a variance, the largest: below
        0.5 that has a finite standard error, which the draws can tell (Vehtari et al. 2024,
        section 2.4, on tails of other functions than the weights).
    """

    mean: np.ndarray
    sd: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    shift_error: np.ndarray
    tail: float


def moments(z: np.ndarray, weights: np.ndarray, from_guide: np.ndarray) -> Moments:
    """Return weighted moments of draws (n, dim); ``from_guide`` (n,) marks the guide's."""
    z = np.asarray(z, np.float64)
    # Moments are taken about the guide's mean: about zero, means of 10^8 would cancel.
    centre = z[from_guide].mean(0)
    z = z - centre
    fit_weights = from_guide / from_guide.sum()
    mean = weights @ z
    sd = np.sqrt(weights @ (z - mean) ** 2)
    scale = np.where(sd > 0, sd, 1.0)
    standard = (z - mean) / scale
    first, second = standard, (standard**2 - (sd > 0)) / 2

    def error(w: np.ndarray) -> np.ndarray:
        """Return standard errors (2, dim); infinite if draws coincide or a moment is not finite."""
        found = np.sqrt(np.stack([w**2 @ first**2, w**2 @ second**2]))
        return np.where(np.isfinite(mean) & np.isfinite(sd) & (sd > 0), found, np.inf)

    fit_sd = np.sqrt(fit_weights @ (z - fit_weights @ z) ** 2)
    shift = np.stack([(fit_weights @ z - mean) / scale, (fit_sd - sd) / scale])
    terms = weights[:, None] * standard**2
    tail = float(np.max(_shapes(jnp.log(jnp.asarray(terms.T))), initial=0.0))
    return Moments(mean + centre, sd, error(weights), shift, error(fit_weights - weights), tail)


@jax.jit
def _shapes(log_terms: Array) -> Array:
    """Return the shape of the tail in each row (m,) of ``log_terms`` (m, n); 0 without a tail."""
    from blackjax.diagnostics import psis_weights  # here: its import starts JAX's backend

    log_terms = jnp.maximum(log_terms, log_terms.max(1, keepdims=True) - FAR)
    shapes = jax.lax.map(lambda row: psis_weights(row)[1], log_terms, batch_size=AT_ONCE)
    return jnp.where(jnp.isfinite(shapes), shapes, 0.0)
