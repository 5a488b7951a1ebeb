"""Whether a posterior can be told from the rounding of the numbers that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from numpyro_fed.model.sites import Site

SPACINGS = 50.0  # an sd of fewer gaps between numbers is made of rounding to a percent or more
FEW = 10.0  # effective draws: the sd of fewer says nothing of rounding
NATS = 0.1  # by which rounding may move a log weight: an sd then stays right to a percent


class Rounding(NamedTuple):
    """A record of what the rounding of one precision leaves of weighted draws.

    Attributes
    ----------
    dtype : str
        Of the numbers in which the draws and their densities were computed.
    mean, sd : (dim,) array
        Of the draws, by coordinate; sds are infinite where too few draws count to tell them.
    nats : float
        About how far rounding moves a log weight: the precision's machine epsilon times the
        largest log density, in size, of a draw that counts.
    """

    dtype: str
    mean: np.ndarray
    sd: np.ndarray
    nats: float

    @classmethod
    def of(
        cls,
        z: Array | np.ndarray,
        weights: np.ndarray,
        log_weights: Array,
        mean: np.ndarray,
        sd: np.ndarray,
    ) -> Rounding:
        """Judge draws ``z`` (n, dim) by their weights, and by their mean and sd (dim,)."""
        dtype = np.dtype(z.dtype)
        known = 1 / (weights**2).sum() >= FEW
        sd = sd if known else np.full_like(sd, np.inf)
        size = np.abs(np.asarray(log_weights, np.float64)[weights > 0])
        nats = float(np.finfo(dtype).eps * size[np.isfinite(size)].max(initial=0.0))
        return cls(str(dtype), mean, sd, nats)

    @property
    def gap(self) -> np.ndarray:
        """The distance from each mean (dim,) to the next number of this precision."""
        return np.spacing(np.abs(self.mean).astype(self.dtype)).astype(np.float64)

    @property
    def lost(self) -> np.ndarray:
        """Whether each coordinate's sd (dim,) is too few gaps to be told from rounding."""
        return ~(self.sd >= SPACINGS * self.gap)

    @property
    def fine(self) -> bool:
        """Whether rounding changes next to nothing."""
        return not self.lost.any() and self.nats <= NATS

    def words(self, sites: Sequence[Site]) -> str:
        """Say what rounding spoils; ``sites`` are the latents by their coordinates."""
        name = {"float32": "single", "float64": "double"}.get(self.dtype, self.dtype)
        if self.lost.any():
            place = int(np.argmin(self.sd / self.gap))
            site = next(s.name for s in sites if s.start <= place < s.stop)
            why = (
                f"'{site}' has an sd of {self.sd[place]:.2g} about {self.mean[place]:.4g} "
                f"(unconstrained), where numbers are {self.gap[place]:.2g} apart"
            )
        else:
            why = f"log densities are so large that rounding moves them by {self.nats:.2g} nats"
        return f"{name} precision cannot hold it: {why}"

    @property
    def remedy(self) -> str:
        """Say what to do about it, as a sentence."""
        double = (
            "Compute in double precision (numpyro_fed.fit does by default, for the rest "
            "jax.config.update('jax_enable_x64', True)), or subtract"
        )
        return (
            f"{double if self.dtype != 'float64' else 'Subtract'} a round number near their mean "
            "from columns and outcomes, the same at every silo, and let parameters measure from "
            "there."
        )
