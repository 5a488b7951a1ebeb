"""A line of the doctor: what was looked at, and what was found."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

OK, WARNING, WRONG = "ok", "warning", "wrong"
Checks: TypeAlias = "Generator[Check, None, None]"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Check:
    """The result of one check, in words: what was found, and what to do.

    ``state`` is "ok", "warning" or "wrong".
    """

    name: str
    state: str
    words: str

    def __str__(self) -> str:
        return f"{self.state:8}{self.name}: {self.words}"


def guarded(
    name: str, checks: Generator[Check, None, Found]
) -> Generator[Check, None, Found | None]:
    """Yield the lines of checks, and one that says where they broke; return what they return."""
    try:
        return (yield from checks)
    # Of whatever kind: the other checks go on.
    except Exception as error:
        yield Check(name, WRONG, f"cannot be looked at: {place_of(error)}.")
        return None


def place_of(error: BaseException) -> str:
    """Return the type of an error and its line of code; its words may have values of rows."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}, line {frame.lineno}"
