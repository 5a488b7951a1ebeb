"""How many draws a silo evaluates its likelihood at side by side, and how programs are compiled."""

from __future__ import annotations

import math
from typing import Protocol

from numpyro_fed.algorithms.importance.integration import Integration
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.log_density import FederatedModel

# Numbers of a batch of draws, for each site of the rows: a few arrays of them fit into a core's own
# memory (L2). The six cities took half the time that batches of a megabyte of numbers took.
IN_BATCH = 2**15
# Draws of a batch, at least, if it then has no more numbers than MOST_IN_BATCH. On a CPU, with
# 200,000 logistic rows, a draw in batches of 4 or 8 took half the time that it took alone, and in
# those of 32 more again.
LEAST, MOST_IN_BATCH = 4, 2**23
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
    rows = sum(n for _, n in fit.plan.largest)  # silos are computed one after the other
    numbers = max(rows * integration.terms_at_once(fit.model), 1)
    size = max(IN_BATCH // numbers, min(LEAST, MOST_IN_BATCH // numbers), 1)
    return min(num_draws, 2 ** int(math.log2(size)))


def little_work(fit: Planned, integration: Integration, num_draws: int) -> bool:
    """Return whether draws are evaluated in less time than it takes to optimise their program."""
    rows = sum(n for _, n in fit.plan.total)
    return num_draws * rows * integration.work_of_row(fit.model) <= FEW_TERMS
