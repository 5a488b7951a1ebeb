"""The result of a run under differential privacy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from numpyro_fed.algorithms.private_newton import NEAR
from numpyro_fed.errors import ModelError
from numpyro_fed.privacy.budget import Spent
from numpyro_fed.results.influence import Factors
from numpyro_fed.results.rows import Result

NOT_PROTECTED = (
    "this would ask silos for numbers without noise, which the privacy of the fit does not cover. "
    "Fit without privacy= to ask for it."
)


@dataclass(frozen=True, eq=False)
class PrivateResult(Result):
    """A posterior that counts the noise which protects the rows, and what was spent for it.

    Its silos answer nothing but the exchanges of the run.

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
    def trusted(self) -> bool:
        """Whether nothing speaks against the posterior, which no exchange has checked."""
        return self.settled

    @property
    def undetermined(self) -> int:
        """Return the number of directions whose curvature could not be told from noise."""
        return int(self.state.server.undetermined)

    @property
    def coarse(self) -> bool:
        """Return whether noise hides how long units' gradients are, so that clips are a guess."""
        return bool(self.state.server.coarse)

    @property
    def num_exchanges(self) -> int:
        """Return the number of exchanges: that of the first units, and those of all rounds."""
        rounds = int(np.sum(self.state.server.made))
        return 1 + rounds * len(self._fit.built.algorithm.round.exchanges)

    @property
    def moved(self) -> float:
        """Return how long the last step wanted to be, in sds with its noise; -1 for no number."""
        return float(self.state.server.moved)

    @property
    def doubt(self) -> str:
        """Return in words why not to rely on the posterior; empty for one that is sound."""
        if self.undetermined:
            return (
                f"in {self.undetermined} of {self.num_globals} directions the data could not be "
                "told from noise, and it rests on the prior there"
            )
        if self.coarse:
            return (
                "noise hides how long the units' gradients are, so that clipping may have moved it"
            )
        # The posterior counts the last noise, and not that a search is still on its way.
        if self.moved < 0:
            return "its last step led to where nothing is finite, and was not taken"
        if not self.moved <= NEAR:
            return f"its last step was {self.moved:.2g} sd long, so that the search had not ended"
        return ""

    @property
    def settled(self) -> bool:
        """Return whether nothing speaks against the posterior."""
        return not self.doubt

    @property
    def judgement(self) -> str:
        """Return in words whether to trust the posterior."""
        budget = self.privacy.budget
        spent = f"epsilon {budget.epsilon:.3g} at delta {budget.delta:g}"
        if self.settled:
            return (
                f"This posterior counts the noise of its privacy ({spent}), and its last step was "
                f"{self.moved:.2g} sd long. It is a normal approximation, which no exchange has "
                "checked."
            )
        return (
            f"Do not rely on this posterior: {self.doubt} ({spent}). More rows, a larger epsilon, "
            "or fewer globals would help."
        )

    @property
    def correction(self) -> str:
        """Return the reason why there is no importance correction."""
        return NOT_PROTECTED

    def factors_at(self, z_G: np.ndarray) -> Factors:
        """Raise an error: silos' parabolas would be told without noise."""
        raise ModelError(NOT_PROTECTED)

    def _account(self) -> str:
        return super()._account() if self.stages else str(self.privacy)
