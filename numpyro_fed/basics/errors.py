"""The exceptions and the warnings of the package.

Their messages say what was expected, what came, where (silo and site), and what to do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeGuard

import numpy as np


class FederatedWarning(UserWarning):
    """The base of all warnings of the package, for ``warnings.filterwarnings``."""


class ModelWarning(FederatedWarning):
    """The warning about a model whose posterior may be improper, slow or wider than trained for."""


class DataWarning(FederatedWarning):
    """The warning about data that are unlike others', or that could not be compared with them."""


class StartWarning(FederatedWarning):
    """The warning about a run that does not begin where it was asked to."""


class ConvergenceWarning(FederatedWarning):
    """The warning about a run that ended before its result can be relied on."""


class ModelError(ValueError):
    """The error for a model that cannot be split into a global and a local part."""


class CoupledRowsError(ModelError):
    """The error for rows that read latents of other rows, where each row is weighed by itself."""


class DataError(ValueError):
    """The error for data that do not fit the model or the other silos."""


class GuideError(ValueError):
    """The error for a guide that does not fit the model, the method or the machine."""


class SavedStateError(ValueError):
    """The error for a file of another model, other silos, other data or another version."""


class MissingExtraError(ImportError):
    """The error for an optional dependency that is not installed."""

    def __init__(self, package: str, extra: str):
        super().__init__(
            f"this needs the package '{package}', which is not installed. "
            f"Install the extra that carries it: pip install 'numpyro-fed[{extra}]'"
        )


class NonFiniteError(FloatingPointError):
    """The error for a bound that turned NaN or infinite during a run.

    Attributes
    ----------
    result : Result
        The fit at the last good round, so that nothing that was computed is lost; None if there was
        no good round.
    round : int
        The round that failed, counted from the first round of the state.
    silos : tuple[int, ...]
        The silos whose contribution was not finite. It is empty if the server's part was at fault:
        the prior, or the guide of the globals.
    """

    def __init__(self, message: str, *, result: object, round: int, silos: tuple[int, ...]):
        super().__init__(message)
        self.result: Any = result
        self.round, self.silos = round, silos


class Interrupted(KeyboardInterrupt):
    """The interrupt that ends a run by Ctrl-C, with what was computed until then.

    It is a ``KeyboardInterrupt``, so that a script stops as usual. In an interactive session the
    error is ``sys.last_value``.

    Attributes
    ----------
    result : Posterior, or VerticalResult
        The result of the rounds, draws or stages that were finished; its ``ended`` or its verdict
        says that it was interrupted. ``error.result.save(path)`` keeps it, and a run goes on by
        ``run(..., init_state=error.result.state)``.
    """

    def __init__(self, message: str, *, result: object):
        super().__init__(message)
        self.result: Any = result


class SilosError(Exception):
    """The base of errors of silos in processes of their own, which end a run.

    Attributes
    ----------
    silos : tuple of int
    exchange : str
    result : Result or None
        The fit at the last good round; None outside of a run, and if there is no good round yet.
    """

    silos: tuple[int, ...]
    exchange: str
    result: Any = None


class ReplyError(SilosError, DataError):
    """The error for a silo's reply that was not agreed, raised as the reply arrives.

    Attributes
    ----------
    silo : int
    """

    def __init__(self, message: str, *, silo: int, exchange: str):
        super().__init__(f"the reply of silo {silo} to the exchange '{exchange}' {message}")
        self.silo, self.silos, self.exchange = silo, (silo,), exchange


class SumError(SilosError, DataError):
    """The error for masked replies whose sum is none that the silos can have sent.

    Nobody can tell from the sum whose reply is at fault: ``silos`` are all that were asked.
    """

    def __init__(self, message: str, *, silos: tuple[int, ...], exchange: str):
        super().__init__(f"the sum of the replies to the exchange '{exchange}' {message}")
        self.silos, self.exchange = silos, exchange


class RefusedError(SilosError, ModelError):
    """The error for a silo that does not answer a message, by its policy or for another reason.

    Attributes
    ----------
    silo : int
    """

    def __init__(self, message: str, *, silo: int, exchange: str):
        super().__init__(f"silo {silo} refuses '{exchange}': {message}")
        self.silo, self.silos, self.exchange = silo, (silo,), exchange


class SiloAwayError(SilosError, ConnectionError):
    """The error for silos that did not answer in time.

    Attributes
    ----------
    replies : dict of int to bytes
        What the others have answered.
    """

    def __init__(
        self,
        away: Mapping[int, str],
        exchange: str,
        patience: float,
        replies: Mapping[int, bytes],
    ):
        who = ", ".join(f"{silo} ({why})" for silo, why in sorted(away.items()))
        super().__init__(
            f"no reply to the exchange '{exchange}' within {patience:g} s from silo {who}. The run "
            "waits longer with patience=; the same script with the same state= folder goes on from "
            "the replies so far once the silo is back."
        )
        self.silos, self.exchange = tuple(sorted(away)), exchange
        self.replies = dict(replies)


class CallbackError(Exception):
    """The error for a callback that raised; ``result`` is the argument of the callback."""

    def __init__(self, message: str, *, result: object):
        super().__init__(message)
        self.result: Any = result


def optional(name: str, extra: str = "examples") -> Any:
    """Return a module that an extra carries; raise an error that names it if it is not there."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(name.partition(".")[0].replace("_", "-"), extra) from error


def positive_number(name: str, value: object) -> None:
    """Raise an error unless ``value`` is a positive finite number, named ``name``."""
    if not is_number(value) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number; a bool is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def positive_int(name: str, value: object) -> None:
    """Raise an error unless ``value`` is a positive int; ``name`` is that of the argument."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def one_of(name: str, value: object, *options: object) -> None:
    """Raise an error unless ``value`` is one of the options; ``name`` is that of the argument."""
    if value not in options:
        first = ", ".join(map(repr, options[:-1]))
        raise ValueError(f"{name}={value!r}: expected {first} or {options[-1]!r}.")


def guessed(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'age'?"`` for a name like one of the known, or no words."""
    by_lower = {option.lower(): option for option in known}
    close = get_close_matches(name.lower(), by_lower, 1)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""


def warn_user(words: str, category: type[Warning]) -> None:
    """Warn at the line of the user, however many calls of the package are between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("numpyro_fed."):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category=category, stacklevel=level)
