"""The results of runs under differential privacy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpyro.distributions as dist

from numpyro_fed.algorithms.influence import Factors
from numpyro_fed.algorithms.private_newton import NEAR
from numpyro_fed.algorithms.pvi.states import ServerState
from numpyro_fed.errors import ModelError
from numpyro_fed.privacy.budget import Spent
from numpyro_fed.results.pvi import PVIResult
from numpyro_fed.results.rows import Result

# Steps after which a twentieth of the distance from the start is left: private_gradients.steps.
ENOUGH_STEPS = 70
NOT_PROTECTED = (
    "this would ask silos for numbers without noise, which the privacy of the fit does not cover. "
    "Fit without privacy= to ask for it."
)


@dataclass(frozen=True, eq=False)
class ProtectedResult(Result):
    """A result whose silos answer nothing but the exchanges of the run.

    Attributes
    ----------
    privacy : Spent
        The epsilon that was spent; prints the assumptions.
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
        return self._doubt_of_steps

    @property
    @abstractmethod
    def _doubt_of_steps(self) -> str:
        """Return in words why the steps may not have come to rest; empty if they have."""

    @property
    @abstractmethod
    def _last_step(self) -> str:
        """Return in words how the run came to rest."""

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
                f"This posterior counts the noise of its privacy ({spent}), and {self._last_step}. "
                "It is a normal approximation, which no exchange has checked."
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


@dataclass(frozen=True, eq=False)
class PrivateResult(ProtectedResult):
    """A posterior that counts the noise which protects the rows, and what was spent for it.

    Attributes
    ----------
    privacy : Spent
        The epsilon that was spent; prints the assumptions.
    undetermined : int
        Directions of the globals whose curvature could not be told from noise. There the posterior
        rests on the prior, and on columns taken as uncorrelated.
    """

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
    def _doubt_of_steps(self) -> str:
        # The posterior counts the last noise, and not that a search is still on its way.
        if 0 <= self.moved <= NEAR:
            return ""
        if self.moved < 0:
            return "its last step led to where nothing is finite, and was not taken"
        return f"its last step was {self.moved:.2g} sd long, so that the search had not ended"

    @property
    def _last_step(self) -> str:
        return f"its last step was {self.moved:.2g} sd long"


@dataclass(frozen=True, eq=False)
class PrivateGradientResult(ProtectedResult):
    """A posterior by private gradients, which counts their noise.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the server's own part of the bound, the distance to the prior: silos' parts are not
        told.
    privacy : Spent
        The epsilon that was spent by the search and by these rounds; prints the assumptions.
    undetermined : int
        Directions in which the search could not tell the data from noise.
    """

    @property
    def undetermined(self) -> int:
        """Return the number of directions in which the search could not tell data from noise."""
        return int(self.state.server.start.undetermined)

    @property
    def _doubt_of_steps(self) -> str:
        chosen = self._fit.plan.chosen
        if not chosen["counts_noise"]:
            return "its spread counts the noise as of the default optimiser, and optim= is another"
        if (steps := int(self.state.round) * chosen["gradients"]) < ENOUGH_STEPS:
            return f"{steps} steps are too few to forget where they began"
        return ""

    @property
    def _last_step(self) -> str:
        return f"{int(self.state.round)} rounds were made"


@dataclass(frozen=True, eq=False)
class PrivatePVIResult(PrivateGradientResult, PVIResult):
    """A posterior of PVI by private gradients, which counts their noise."""

    @property
    def _server(self) -> ServerState:
        return cast(ServerState, self.state.server.inner)

    def _silo_state(self, silo: int) -> Any:
        return super()._silo_state(silo).inner

    def _silo_numbers(self, name: str) -> np.ndarray:
        return self._numbers_from_messages(name)

    def __call__(self) -> dict[str, dist.Distribution]:
        """Return each global site's marginal, with the spread of the noise."""
        return self._factors.globals.marginals(self.shared.guide)

    @property
    def _doubt_of_steps(self) -> str:
        if self.never_visited:
            return f"silos {self.never_visited} were never visited"
        return super()._doubt_of_steps

    @property
    def log_evidence(self) -> np.ndarray:
        """Raise an error: silos' terms of the evidence would be told without noise."""
        raise ModelError(NOT_PROTECTED)
