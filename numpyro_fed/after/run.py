"""The run that a posterior rests on, and the names by which its silos are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from numpyro_fed.after.sensitivity import PriorSensitivity
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.padding import Bucket

NEW, OWN_ROWS = "new", "own rows"
ALL = "all"
WhichSilo = int | str | Sequence[int]  # a silo, some of them, or "all"


class Run(Protocol):
    """The run that a posterior rests on: its model, its silos and their states."""

    @property
    def _fit(self) -> Any: ...

    @property
    def num_silos(self) -> int: ...

    @property
    def shared(self) -> Any: ...

    @property
    def data_here(self) -> Sequence[SiloData]:
        """Return the data of all silos; nothing if they are elsewhere."""

    def data_of(self, silo: int) -> SiloData:
        """Return a silo's data; raise an error if they are elsewhere."""

    def sizes_of(self, silo: int) -> Sizes:
        """Return the rows of each plate at a silo; raise an error if they are elsewhere."""

    def bucket_of(self, silo: int) -> Bucket:
        """Return the silos that were padded to one shape with a silo, which is among them."""

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters on their supports, and its guide as ``"guide"``."""


class Correction(Protocol):
    """Weighted draws of a posterior, by which it is judged."""

    @property
    def trusted(self) -> bool:
        """Return whether the draws are right to the accuracy that was asked for."""

    @property
    def figures(self) -> str:
        """Return the numbers that a verdict rests on, in words."""

    @property
    def judged(self) -> str:
        """Return in words whether to trust the draws, as far as these tell."""

    @property
    def left_out(self) -> Any:
        """Return the table of :meth:`Questions.leave_out`."""

    @property
    def rows_left_out(self) -> Any:
        """Return the table of :meth:`Questions.loo`."""

    @property
    def prior_answers(self) -> PriorSensitivity:
        """Return the table of :meth:`Questions.prior_sensitivity`."""

    @property
    def attributes(self) -> dict[str, float | str]:
        """Return what goes with draws into ArviZ."""


def chosen_silos(silo: WhichSilo, number: int) -> list[int]:
    """Return the numbers of the silos that are asked for.

    Raises
    ------
    ValueError
        For another word than ``"all"``, and for no silo.
    """
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


def rows_of(run: Run, fm: FederatedModel, site: str, silo: int) -> int:
    """Return the number of rows of a latent's plate at a silo."""
    plate = next(s.plate for s in fm.sites if s.name == site)
    return 0 if plate is None else run.sizes_of(silo)[plate]


def check_name(silo: str, *others: str) -> None:
    """Raise an error for a name that stands for no silo."""
    known = others or (NEW,)
    if silo not in known:
        raise ValueError(
            f"silo={silo!r}: expected the number of a silo, 'new' for new data, or 'own rows' "
            "without any."
        )
