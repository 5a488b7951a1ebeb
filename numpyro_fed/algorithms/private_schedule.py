"""The schedule of a private search: its phases, and how they divide a budget.

A phase is one histogram of units' lengths, and some steps of Newton's method in the same frame. The
first phases search for the mode; the last ones have most of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from numpyro_fed.algorithms.private_units import COUNTS, HESSIANS_UP_TO
from numpyro_fed.privacy.budget import Privacy

UNITS, SIZES, SUMS = "private units", "private sizes", "private sums"
# Shares of the budget: of the first units, of the search, and of the phases after it.
UNITS_SHARE, SEARCH, LATER = 0.05, 0.2, (0.2, 0.55)
# The first steps go far and need little precision, but lengths must be told from the noise of their
# histogram. A log scale that begins far too low rises by a half in a step at most, so that a
# regression of outcomes near 100, whose sd is 12, takes some sixteen steps (eight phases) from 1.
MOST_SEARCH = 12  # phases
CLEAR = 0.1  # share of the units from which a bin of a histogram must be told from noise
# For many globals noise hides most directions from a small share, and frames by it are poor: fewer
# phases of more steps, and no search.
PHASES_OF_MANY = 0.1, 0.25, 0.6
STEPS, STEPS_OF_MANY = 2, 3  # in each phase
# Of a phase's share: for sizes, for all gradients, and for all curvatures.
SHARES, SHARES_OF_MANY = (0.1, 0.63, 0.27), (0.02, 0.69, 0.29)


def sums_of(step: int) -> str:
    """Return the name of the exchange of a step in its phase."""
    return f"{SUMS} {step + 1}"


class Phase(NamedTuple):
    """The noise multipliers of a phase: of its histogram, and of both sums of each step."""

    sizes: float
    gradient: float
    curvature: float


@dataclass(frozen=True)
class Schedule:
    """The noise multipliers of all that a private search sends, in order.

    ``units``: That of the first units of the frame.
    ``steps``: The number of steps in each phase.
    ``search``: The number of phases, at the beginning, that search for the mode. Those that are
        left when it is found are not made.
    """

    units: float
    phases: tuple[Phase, ...]
    steps: int
    search: int = 0

    @classmethod
    def of(cls, privacy: Privacy, dim: int, num_units: int, num_silos: int) -> Schedule:
        """Return the schedule that spends a budget on ``dim`` globals."""
        if dim > HESSIANS_UP_TO:
            kinds, steps, search = SHARES_OF_MANY, STEPS_OF_MANY, 0
            shares: tuple[float, ...] = PHASES_OF_MANY
        else:
            kinds, steps = SHARES, STEPS
            # The share from which a histogram shows a bin with a few of the units.
            whole = privacy.multiplier() * privacy.changes * privacy.noise_share(num_silos)
            sd = whole * math.sqrt(2 * num_silos / kinds[0])
            least = (COUNTS * sd / (CLEAR * num_units)) ** 2
            search = min(max(int(SEARCH / least), 1), MOST_SEARCH)
            shares = (*(SEARCH / search,) * search, *LATER)
        # A phase's gradients and curvatures are as many as its steps.
        each = [kinds[0], kinds[1] / steps, kinds[2] / steps]
        units, *rest = privacy.multipliers((UNITS_SHARE, *(s * k for s in shares for k in each)))
        phases = tuple(Phase(*rest[i : i + 3]) for i in range(0, len(rest), 3))
        return cls(units, phases, steps, search)

    def releases(self, made: Iterable[bool] | None = None) -> tuple[tuple[str, float], ...]:
        """Return what is sent, by kind of exchange, and the noise multiplier of each release.

        ``made`` says of each phase whether it was; by default all are.
        """
        releases = [(UNITS, self.units)]
        was_made = [True] * len(self.phases) if made is None else made
        for phase in (p for p, was in zip(self.phases, was_made, strict=True) if was):
            sums = (SUMS, phase.gradient), (SUMS, phase.curvature)
            releases += [(SIZES, phase.sizes), *sums * self.steps]
        return tuple(releases)
