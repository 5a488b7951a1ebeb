r"""Means and sds of weighted draws, their Monte Carlo errors, and how far a fit is from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    r"""Of each coordinate, from weights ``w`` that sum to one.

    Standard errors are those of self-normalised weights (Owen 2013, "Monte Carlo theory, methods
    and examples", section 9.2): of the mean :math:`\sqrt{\sum_i w_i^2 (z_i - m)^2}`, and of the
    sd, relative, :math:`\sqrt{\sum_i w_i^2 ((z_i - m)^2 - s^2)^2} / 2 s^2`. For the distance of
    the fit, which has weight :math:`u_i`, the same draws serve both, so that :math:`w_i - u_i`
    stands in the place of :math:`w_i`: it is known much better than either.

    Attributes
    ----------
    mean, sd : (dim,)
    error : (2, dim)
        Standard errors of mean and sd, in sds.
    shift : (2, dim)
        Mean and sd of the fit less these, in sds.
    shift_error : (2, dim)
        Its standard errors.
    """

    mean: np.ndarray
    sd: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    shift_error: np.ndarray


def moments(z: np.ndarray, weights: np.ndarray, own: np.ndarray) -> Moments:
    """Weighted moments of draws (n, dim); ``own`` (n,) says which of them are the fit's."""
    z = np.asarray(z, np.float64)
    centre = z[own].mean(0)
    z = z - centre
    fit = own / own.sum()
    mean = weights @ z
    sd = np.sqrt(weights @ (z - mean) ** 2)
    scale = np.where(sd > 0, sd, 1.0)
    standard = (z - mean) / scale
    first, second = standard, (standard**2 - (sd > 0)) / 2

    def error(w: np.ndarray) -> np.ndarray:
        """Infinite where a mean or an sd is not finite: nothing is known there."""
        found = np.sqrt(np.stack([w**2 @ first**2, w**2 @ second**2]))
        return np.where(np.isfinite(mean) & np.isfinite(sd), found, np.inf)

    fit_sd = np.sqrt(fit @ (z - fit @ z) ** 2)
    shift = np.stack([(fit @ z - mean) / scale, (fit_sd - sd) / scale])
    return Moments(mean + centre, sd, error(weights), shift, error(fit - weights))
