"""The run that a posterior rests on, and the names by which its silos are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from numpyro_fed.results.base import Silos

NEW, OWN_ROWS = "new", "own rows"
ALL = "all"
WhichSilo = int | str | Sequence[int]  # a silo, some of them, or "all"


class Run(Protocol):
    """The run that a posterior rests on: its model, its silos and their states."""

    @property
    def _fit(self) -> Any: ...

    @property
    def _silos(self) -> Silos: ...

    @property
    def num_silos(self) -> int: ...

    @property
    def shared(self) -> Any: ...

    def _hosted(self, silo: int) -> Silos:
        """Return the silos; raise an error if they are elsewhere."""

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters on their supports, and its guide as ``"guide"``."""


def chosen_silos(silo: WhichSilo, number: int) -> list[int]:
    """Return the numbers of the silos that are asked for."""
    if isinstance(silo, str):
        if silo != ALL:
            raise ValueError(f"silo={silo!r}: expected a number, a list of numbers, or '{ALL}'.")
        return list(range(number))
    silos = [silo_number(j) for j in (silo if isinstance(silo, Sequence) else [silo])]
    if not silos:
        raise ValueError("silo=[]: expected at least one silo.")
    return silos


def silo_number(silo: Any) -> int:
    """Return the number of a silo; raise an error for what is no whole number."""
    if isinstance(silo, bool | np.bool_) or not isinstance(silo, int | np.integer):
        raise ValueError(f"silo={silo!r}: expected a whole number, from 0 on.")
    return int(silo)


def check_name(silo: str, known: str) -> None:
    """Raise an error for another name than the one that is known."""
    if silo != known:
        raise ValueError(
            f"silo={silo!r}: expected the number of a silo, 'new' for new data, or 'own rows' "
            "without any."
        )
