"""The count of what a silo has told in all its life, and what its owner's rules leave of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import Store
from numpyro_fed.network.policy import Policy
from numpyro_fed.privacy.budget import epsilon_of
from numpyro_fed.rounds import names
from numpyro_fed.rounds.messages import Question

LEDGER = "ledger"  # the name under which a silo keeps what has been asked
# A run that may spend the whole budget does so up to rounding.
ROUNDED = 1 + 1e-5
# The exchanges that tell the likelihood at each draw of a message, and those that tell it at one
# place, whatever is in the message. All others count by the places in their message.
AT_DRAWS = {
    *(names.IMPORTANCE, names.LEAVE_OUT, names.LOO, names.OUTER_LATENTS, names.AROUND_MODE),
    *(names.AVERAGE, names.CALIBRATION),
}
AT_ONE_PLACE = {
    *(names.SFVI_STEP, names.SFVI_AVG_ROUND, names.PVI_ROUND, names.EVALUATION, names.FROM_MODE),
    *(names.ROWS, names.MEANS, names.DEVIATIONS, names.PRIVATE_UNITS, names.PRIVATE_SIZES),
    *(names.DRAW, names.LIKELIHOOD, names.STEP, names.SHOW, names.TRY, names.TURN, names.SPREAD),
    *(names.BEGIN_AT_MODE, names.BEGIN_AT_ZERO, names.SAMPLE, names.INFLUENCE),
}


@dataclass
class Ledger:
    """The count of places and draws at which a silo has evaluated its likelihood for others."""

    policy: Policy
    store: Store
    num_rows: int = 0  # of the silo, on which the policy's delta depends
    # What the store keeps: ``places`` and ``draws`` so far; ``stage``, the exchange farthest down
    # the policy's list that was answered; and ``noise``, the sum of inverse squared noise
    # multipliers, by which Gaussian releases compose, of the runs that protect the same:
    # ``{"row add": 0.02}``.
    kept: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        nothing: dict[str, Any] = {"places": 0, "draws": 0, "noise": {}, "stage": ""}
        self.kept = nothing | json.loads(self.store.get(LEDGER) or b"{}")
        if set(self.kept) != set(nothing):
            raise DataError(
                f"the silo's ledger has {sorted(self.kept)}, where {sorted(nothing)} were "
                "expected: another version has written it. Keep that file, and begin with an empty "
                "folder of states and a policy that allows what is left."
            )

    @property
    def left(self) -> dict[str, float]:
        """Return what is left of the budget."""
        policy = self.policy
        return {
            "places": policy.max_places - self.kept["places"],
            "draws": policy.max_draws - self.kept["draws"],
            "epsilon": policy.epsilon - self._epsilon_of(self.kept["noise"]),
        }

    def _epsilon_of(self, inverse_squares: Mapping[str, float]) -> float:
        """Return the epsilon of releases by their sums of inverse squared multipliers."""
        # One row less and another one more are two changes of one row, as far as a silo's clip may
        # be: so releases that protect different things count four times.
        total = sum(inverse_squares.values()) * (1 if len(inverse_squares) < 2 else 4)
        return _epsilon(total**-0.5, self.delta) if total else 0.0

    @property
    def delta(self) -> float:
        """Return the delta of all runs together."""
        return self.policy.delta(self.num_rows)

    @contextmanager
    def spending_evaluations(self, exchange: str, numbers: Mapping[str, float]) -> Iterator[None]:
        """Enter the answer to an exchange that costs so many places or draws.

        They are counted before anything is computed, and given back if the question is refused.
        """
        self.policy.check_exchange(exchange, self.kept["stage"])
        for what, number in numbers.items():
            if not 0 < number <= self.left[what]:
                raise ModelError(
                    f"this silo's policy allows {self.left[what]} more {what} (max_{what}), and "
                    f"{number} are asked for. Its owner may raise the limit."
                )
        after = {what: self.kept[what] + number for what, number in numbers.items()}
        with self._counted({**after, "stage": self.policy.later(exchange, self.kept["stage"])}):
            yield

    @contextmanager
    def spending_privacy(self, multiplier: float, delta: float, protects: str) -> Iterator[None]:
        """Enter the beginning of a run with a noise multiplier; 0 for one without a budget."""
        policy, after = self.policy, dict(self.kept["noise"])
        if multiplier:
            if delta > self.delta:
                raise ModelError(
                    f"this silo's policy allows a delta of {self.delta:.3g} (max_delta), and "
                    f"the plan has {delta:g}. Its owner may raise the limit."
                )
            after[protects] = after.get(protects, 0.0) + multiplier**-2
            together = self._epsilon_of(after)
            if together > policy.epsilon * ROUNDED:
                raise ModelError(
                    f"this silo's policy allows an epsilon of {policy.epsilon:g} at delta "
                    f"{self.delta:.3g} for all runs together (max_epsilon), and with this one "
                    f"it would be {together:.3g}. Its owner may raise the limit."
                )
        with self._counted({"noise": after}):
            yield

    @contextmanager
    def _counted(self, after: Mapping[str, Any]) -> Iterator[None]:
        """Keep what is counted before anything is computed; undo it after an error."""
        before = self.kept
        self._keep({**before, **after})
        try:
            yield
        except BaseException:
            self._keep(before)
            raise

    def _keep(self, counted: dict[str, Any]) -> None:
        self.kept = counted
        self.store.put({LEDGER: json.dumps(counted).encode()})


@lru_cache
def _epsilon(multiplier: float, delta: float) -> float:
    """Return the epsilon of one release, which is asked for at each message."""
    return epsilon_of((multiplier,), delta)


def evaluations(question: Question, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return at how many places and draws a silo evaluates its likelihood for a reply.

    A search gets gradient and curvature at each of its places, or from each at the silo's own mode,
    and particles a gradient at each. A correction gets the log likelihood at each draw, and the
    check of a mode at each point around it; latents are told at each draw. A round of a method
    counts as one place, and an exchange that is not known by name as many as its message may ask.
    """
    # Counted on the arrays, whose shapes must be those of the exchange.
    downs = [len(a) for name, a in arrays.items() if name.startswith("down") and a.ndim]
    most = max([1, *downs])
    if question.exchange in AT_DRAWS:
        return {"draws": most}
    at_one = question.exchange in AT_ONE_PLACE or question.exchange.startswith(names.PRIVATE_SUMS)
    return {"places": 1 if at_one else most}
