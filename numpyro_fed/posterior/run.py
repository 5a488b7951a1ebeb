"""The result of a run of any method: losses, the last state, and how its silos are asked again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, NonFiniteError
from numpyro_fed.posterior.built import CompiledMethod
from numpyro_fed.posterior.saving import Provenance, SavedRun
from numpyro_fed.rounds.runtime import State
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.rounds.states import Shared
from numpyro_fed.rounds.step import Conversation

# Batches of rounds in each quarter of a run, whose means show how noisy the bound is. Rounds are
# correlated, so that single losses would show too little noise; fewer batches estimate it badly.
NUM_BATCHES = 5


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """The result of a run: losses, the last state, and what can be asked of them."""

    losses: np.ndarray = field(repr=False)
    state: State = field(repr=False)
    _fit: CompiledMethod = field(repr=False)
    _silos: Silos = field(repr=False)
    ended: str = field(default="rounds", kw_only=True)
    start: Any = field(default=None, repr=False, kw_only=True)

    ELSEWHERE: ClassVar[str]  # what to say where a silo's own numbers are not in this process
    PARTY: ClassVar[str] = "silo"

    @property
    def num_silos(self) -> int:
        """Return the number of silos, or of clients that hold columns."""
        return self._fit.plan.num_silos

    @property
    def shared(self) -> Shared:
        """Return the part of the server's state that all parties may know.

        It holds shared parameters, unconstrained, and the guide of the globals.
        """
        return self._fit.algorithm.shared(self.state.server)

    def _hosted(self, silo: int) -> Silos:
        """Return the silos' data; raise an error if silos are in other processes."""
        if self._silos.elsewhere:
            raise DataError(self.ELSEWHERE.format(silo))
        return self._silos

    def _silo_state(self, silo: int) -> Any:
        """Return a silo's state."""
        return self._hosted(silo).at(silo, self.state.silos)

    def _asking(self, key: Array) -> Conversation:
        """Return the function that asks all silos, whose states stay as they are."""
        transport = self._fit.runtime.transport(self._silos.batches)
        return Conversation(transport, key, self.num_silos, self.state.silos)

    def unusable(self, message: str, silos: tuple[int, ...] = ()) -> NonFiniteError:
        """Return the error for numbers that cannot be used, of silos or of the server."""
        where = f"{self.PARTY} {', '.join(map(str, silos))}" if silos else "the server"
        number = int(self.state.round)
        return NonFiniteError(message.format(where), result=self, round=number, silos=silos)

    @property
    def settled(self) -> bool:
        """Whether the bound had stopped rising by the end of this run, as far as its noise shows.

        The last quarter of the rounds gains no more than 0.1 nat on the quarter before, or than
        three standard errors, from means of batches of rounds. Too few rounds to tell are not
        settled.
        """
        quarter = len(self.losses) // 4
        # A batch has at least two rounds, so that 40 rounds are the fewest that can be judged.
        if quarter < 2 * NUM_BATCHES:
            return False
        size = quarter // NUM_BATCHES
        last = np.asarray(self.losses, np.float64)[-2 * NUM_BATCHES * size :]
        previous, after = last.reshape(2, NUM_BATCHES, size).mean(2)
        # At least 0.1 nat: a bound may be so quiet that
        # three of its standard errors are next to nothing.
        error = np.sqrt((previous.var(ddof=1) + after.var(ddof=1)) / NUM_BATCHES)
        return bool(previous.mean() - after.mean() <= max(0.1, 3 * error))

    def _run_summary(self) -> str:
        if self.ended == "converged":
            return f"{len(self.losses)} rounds; the run had come to rest."
        end = "had settled" if self.settled else "was still rising, or they are too few to tell"
        return f"{len(self.losses)} rounds; the bound {end}."

    def saved_run(self) -> SavedRun:
        """Return the run in the form in which a file keeps it."""
        return self._fit.description(), self.losses, self.state

    def provenance(self) -> Provenance | None:
        """Return the fingerprints of model and data; None if silos are in other processes."""
        return None if self._silos.elsewhere else self._fit.provenance(self._silos)
