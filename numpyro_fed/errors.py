"""The exceptions of the package: what was expected, what came, where, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np


class Savable(Protocol):
    """A fit, whatever its method, that can be written to a file."""

    def save(self, path: str | Path) -> None: ...


class ModelError(ValueError):
    """The model text cannot be split into a global and a local part."""


class CoupledRowsError(ModelError):
    """Rows of a silo plate read each other's latents, where each is to be weighed on its own."""


class DataError(ValueError):
    """A silo holds what does not fit the model or the other silos."""


class GuideError(ValueError):
    """The guide does not fit the model, the method or the machine."""


class SavedStateError(ValueError):
    """A saved fit belongs to another model, another layout of silos or another version."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str):
        super().__init__(
            f"this needs the package '{package}', which is not installed. "
            f"Install the extra that carries it: pip install 'numpyro-fed[{extra}]'"
        )


class NonFiniteError(FloatingPointError):
    """The bound turned NaN or infinite during a run.

    Attributes
    ----------
    result : Result
        The fit at the last good round, so that nothing that was computed is lost; None where there
        is none.
    round : int
        The round that failed, counted from the first round of the state.
    silos : tuple[int, ...]
        The silos whose own contribution was not finite. Empty when the prior or the global
        part of the guide, which live at the server, were at fault.
    """

    def __init__(self, message: str, *, result: Savable | None, round: int, silos: tuple[int, ...]):
        super().__init__(message)
        self.result: Any = result
        self.round, self.silos = round, silos


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run, and what was computed until then is here.

    A script stops as by any ``KeyboardInterrupt``, which this is one of. In an interactive session
    the error is ``sys.last_value``.

    Attributes
    ----------
    result : Result, Corrected or Fitted
        Of the rounds, draws or stages that were finished, with ``ended="interrupted"`` or a verdict
        that says so: ``error.result.save(path)`` keeps it, and a run goes on by
        ``run(..., init_state=error.result.state)``.
    """

    def __init__(self, message: str, *, result: Savable | None):
        super().__init__(message)
        self.result: Any = result


class ReplyError(DataError):
    """A silo's reply is not one that was agreed: it is refused as it arrives.

    Attributes
    ----------
    silo : int
    exchange : str
    result : Result or None
        The fit at the last good round; None where there is none yet.
    """

    def __init__(self, message: str, *, silo: int, exchange: str):
        super().__init__(f"the reply of silo {silo} to the exchange '{exchange}' {message}")
        self.silo, self.exchange = silo, exchange
        self.result: Savable | None = None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, and not a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def positive_int(name: str, value: object) -> None:
    """Refuse what is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")


class CallbackError(Exception):
    """A callback has raised an exception; ``result`` is what it was shown."""

    def __init__(self, message: str, *, result: Savable | None):
        super().__init__(message)
        self.result: Any = result
