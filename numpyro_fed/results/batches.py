"""How many draws a silo evaluates its likelihood at side by side, and how programs are compiled."""

from __future__ import annotations

from typing import Protocol

from numpyro_fed.algorithms.importance.integration import Integration
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.log_density import FederatedModel

# Numbers of a batch of draws, for each site of the rows: 8 MB in double precision. Batches four
# times as large took 1.2 times as long on a CPU, and smaller ones no less.
IN_BATCH = 2**20
# Draws of a batch: in multiples of VECTOR, and at least LEAST if a batch then has no more numbers
# than MOST_IN_BATCH. On a CPU, with 2,000 logistic rows, a draw in batches of 8 to 15 took 4.6
# times as long as in those of 32, and in batches of 22 1.8 times as long.
VECTOR, LEAST, MOST_IN_BATCH = 16, 32, 2**23
# Terms (draws x rows x evaluations) up to which a program is compiled with few optimisations:
# running it takes less time than optimising it would. Half or twice of it only moves that point.
FEW_TERMS = 2e7


class Planned(Protocol):
    """A fit, as far as the number of its rows is asked for."""

    @property
    def plan(self) -> Plan: ...

    @property
    def model(self) -> FederatedModel: ...


def batch_size(fit: Planned, integration: Integration, num_draws: int) -> int:
    """Return how many draws of the globals a silo takes at a time."""
    rows = sum(n for _, n in fit.plan.total)
    numbers = max(rows * integration.terms_of_row(fit.model), 1)
    size = max(IN_BATCH // numbers, min(LEAST, MOST_IN_BATCH // numbers), 1)
    return min(num_draws, size if size < VECTOR else size // VECTOR * VECTOR)


def little_work(fit: Planned, integration: Integration, num_draws: int) -> bool:
    """Return whether draws are evaluated in less time than it takes to optimise their program."""
    rows = sum(n for _, n in fit.plan.total)
    return num_draws * rows * integration.work_of_row(fit.model) <= FEW_TERMS
