"""Corrections by several exchanges that Ctrl-C may end: they keep the exchanges before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numpyro_fed.basics.errors import Interrupted
from numpyro_fed.posterior.weighted_draws import WeightedDraws

Answer = TypeVar("Answer")
Weighted = TypeVar("Weighted", bound=WeightedDraws[Any])


def until_interrupted(exchange: Callable[[int], Answer], number: int) -> tuple[list[Answer], bool]:
    """Return the results of ``number`` exchanges, or those before Ctrl-C, and whether it came."""
    results: list[Answer] = []
    try:
        for i in range(number):
            results.append(exchange(i))
    except KeyboardInterrupt:
        if not results:
            raise
        return results, True
    return results, False


def unless_interrupted(correction: Weighted, interrupted: bool, num_draws: int) -> Weighted:
    """Return the correction, or raise ``Interrupted`` that carries it."""
    if not interrupted:
        return correction
    raise Interrupted(
        f"interrupted after {len(correction.weights):,} of {num_draws:,} draws: the correction by "
        "these is in the error's .result, and error.result.save(path) keeps it.",
        result=correction,
    )
