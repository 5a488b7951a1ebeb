"""Means and sds of weighted draws by coordinate, and the distance of a fit from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    r"""The weighted moments of each unconstrained coordinate, from weights ``w`` that sum to one.

    The same draws serve for the fit, which has weight :math:`u_i`, so that the standard errors of
    its distance are those of self-normalised weights with :math:`w_i - u_i` in the place of
    :math:`w_i` (:mod:`.element_errors`): it is known much better than either.

    Attributes
    ----------
    mean, sd : (dim,)
    shift : (2, dim)
        Mean and sd of the fit less these, in sds.
    shift_error : (2, dim)
        Its standard errors; infinite where all draws that count coincide.
    """

    mean: np.ndarray
    sd: np.ndarray
    shift: np.ndarray
    shift_error: np.ndarray


def moments(z: np.ndarray, weights: np.ndarray, from_guide: np.ndarray) -> Moments:
    """Return weighted moments of draws (n, dim); ``from_guide`` (n,) marks the guide's."""
    z = np.asarray(z, np.float64)
    # Moments are taken about the guide's mean: about zero, means of 10^8 would cancel.
    centre = z[from_guide].mean(0)
    z = z - centre
    fit_weights = from_guide / from_guide.sum()
    with np.errstate(all="ignore"):  # a draw of no weight may be infinite
        mean = weights @ z
        sd = np.sqrt(weights @ (z - mean) ** 2)
        scale = np.where(sd > 0, sd, 1.0)
        standard = (z - mean) / scale
        fit_sd = np.sqrt(fit_weights @ (z - fit_weights @ z) ** 2)
        shift = np.stack([(fit_weights @ z - mean) / scale, (fit_sd - sd) / scale])
        terms = np.stack([standard, (standard**2 - (sd > 0)) / 2])
        error = np.sqrt(np.einsum("n,mnd->md", (fit_weights - weights) ** 2, terms**2))
    known = np.isfinite(mean) & np.isfinite(sd) & (sd > 0)
    return Moments(mean + centre, sd, shift, np.where(known, error, np.inf))
