"""Whether the numbers of a computation can hold a posterior: their precision, and their range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from numpyro_fed.model.sites import Site

# Gaps between neighbouring numbers that an sd must have: with fewer, rounding
# makes a percent of it or more. With it none of 500 models with offsets and
# scales up to 1e9 is wrong in silence (docs/results/never_wrong.md).
SPACINGS = 50.0
# Effective draws below which an sd is not judged: it may be small by chance.
FEW = 10.0
# Nats by which rounding may move a log weight, so that an sd stays right to a percent.
NATS = 0.1


class Rounding(NamedTuple):
    """The size of rounding errors in weighted draws.

    ``dtype`` is the precision in which the draws and their densities were computed. ``mean`` and
    ``sd`` (dim,) are moments of the draws, sds infinite with too few effective ones. Rounding moves
    a log weight by about ``nats``: the precision's machine epsilon times the largest log density,
    in size, of a draw that counts. ``no_density`` says in words which density is NaN or infinite at
    many draws of the fit.
    """

    dtype: str
    mean: np.ndarray
    sd: np.ndarray
    nats: float
    no_density: str = ""

    @classmethod
    def of(
        cls,
        z: Array | np.ndarray,
        weights: np.ndarray,
        log_weights: np.ndarray,
        mean: np.ndarray,
        sd: np.ndarray,
    ) -> Rounding:
        """Return the rounding of draws ``z`` (n, dim), from their weights, mean and sd (dim,)."""
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
        """Whether each coordinate's sd (dim,) is too few gaps wide; no where it is not known."""
        return self.sd < SPACINGS * self.gap

    @property
    def fine(self) -> bool:
        """Whether rounding changes neither draws nor weights by more than a percent of an sd.

        And draws of the fit have densities, with few exceptions.
        """
        return not self.lost.any() and self.nats <= NATS and not self.no_density

    def words(self, sites: Sequence[Site]) -> str:
        """Return in words what rounding spoils; ``sites`` name the coordinates."""
        if self.no_density:
            return self.no_density
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
        """Return the remedy, as a sentence."""
        if self.no_density:
            return (
                "Look at what the text computes there, as the logarithm, the root or the rate of a "
                "number below zero: give the latent a support on which all of it is defined, or "
                "compute it on the log scale."
            )
        double = (
            "Compute in double precision (numpyro_fed.fit does by default, for the rest "
            "jax.config.update('jax_enable_x64', True)), or subtract"
        )
        return (
            f"{double if self.dtype != 'float64' else 'Subtract'} a round number near their mean "
            "from columns and outcomes, the same at every silo, and let parameters measure from "
            "there."
        )
