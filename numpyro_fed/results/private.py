"""The result of a run under differential privacy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from numpyro_fed import html
from numpyro_fed.algorithms.influence import Factors
from numpyro_fed.errors import ModelError
from numpyro_fed.privacy.budget import Spent
from numpyro_fed.results.rows import Result

# Sds of the posterior, the root of their mean square over coordinates, that the last step may
# move: the posterior counts the last noise, and not that a search is still on its way.
FAR = 2.0
NOT_PROTECTED = (
    "this would ask silos for numbers without noise, which the privacy of the fit does not cover. "
    "Fit without privacy= to ask for it."
)


@dataclass(frozen=True, eq=False)
class PrivateResult(Result):
    """A posterior that counts the noise which protects the rows, and what was spent for it.

    Attributes
    ----------
    privacy : Spent
        The epsilon that was spent; prints the assumptions.
    undetermined : int
        Directions of the globals whose curvature could not be told from noise. There the posterior
        rests on the prior, and on columns taken as uncorrelated.
    """

    privacy: Spent = field(kw_only=True)

    @property
    def undetermined(self) -> int:
        """Return the number of directions whose curvature could not be told from noise."""
        return int(self.state.server.undetermined)

    @property
    def coarse(self) -> bool:
        """Return whether noise hides how long units' gradients are, so that clips are a guess."""
        return bool(self.state.server.coarse)

    @property
    def moved(self) -> float:
        """Return how far the last step moved, in sds of the posterior."""
        return float(self.state.server.moved)

    @property
    def settled(self) -> bool:
        """Return whether the last step was no longer than noise explains, in all directions."""
        ended = bool(np.isfinite(self.moved)) and self.moved <= FAR
        return ended and not (self.undetermined or self.coarse)

    @property
    def judgement(self) -> str:
        """Return in words whether to trust the posterior."""
        spent = f"epsilon {self.privacy.epsilon:.3g} at delta {self.privacy.budget.delta:g}"
        if self.settled:
            return (
                f"This posterior counts the noise of its privacy ({spent}), and its last step was "
                f"{self.moved:.2g} sd long. It is a normal approximation, which no exchange has "
                "checked."
            )
        if self.undetermined:
            why = (
                f"in {self.undetermined} of {self.num_globals} directions the data could not be "
                "told from noise, and it rests on the prior there"
            )
        elif self.coarse:
            why = (
                "noise hides how long the units' gradients are, so that clipping may have moved it"
            )
        else:
            why = f"its last step was {self.moved:.2g} sd long, so that the search had not ended"
        return (
            f"Do not rely on this posterior: {why} ({spent}). More rows, a larger epsilon, or "
            "fewer globals would help."
        )

    @property
    def correction_behind(self) -> str:
        """Return the reason why there is no importance correction."""
        return NOT_PROTECTED

    def factors_at(self, z_G: np.ndarray) -> Factors:
        """Raise an error: silos' parabolas would be told without noise."""
        raise ModelError(NOT_PROTECTED)

    def __str__(self) -> str:
        return f"{self.judgement} {self.privacy}"

    def _repr_html_(self) -> str:
        return html.words(str(self))
