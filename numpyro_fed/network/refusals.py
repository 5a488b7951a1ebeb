"""The reply of a silo that refuses, in words that tell nothing of its rows and of its machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from numpyro_fed.basics.errors import (
    DataError,
    GuideError,
    MissingExtraError,
    ModelError,
    SavedStateError,
)
from numpyro_fed.network.requesters import StaleError
from numpyro_fed.rounds.messages import refusal, write

LOG = logging.getLogger("numpyro_fed.silo")
# What an error says of this silo's data alone, and what a refusal says in its place: of shapes,
# counts, values, and the silo's own number here.
UNTOLD = (
    (re.compile(r"(?<!to_event)\(\d[\d, ]*\)"), "(...)"),
    (re.compile(r"\b\d[\d,]* of \d[\d,]*(?= values| rows)"), "some of the"),
    (re.compile(r"\brow \d+ went from \S+ to \S+"), "a row changed"),
    (re.compile(r"\bobserved value \S+ of row \d+(, the first of \d+ such values)?"), "outcome"),
    (re.compile(r"\bsilo 0\b"), "this silo"),
)
NUMBER = re.compile(r"(?<![\w.-])\d+(,\d{3})*(?!\w|\.\d)")


def refusal_of(error: Exception, data: object) -> bytes:
    """Return the reply to a message that failed with an error, at a silo with these data."""
    if isinstance(error, MissingExtraError):
        return refusal(ModelError(str(error)))
    if isinstance(error, StaleError):
        return refusal(error)
    cause: BaseException | None = error
    while not (cause is None or isinstance(cause, OSError)):
        cause = cause.__cause__
    if cause is None and isinstance(error, ModelError | DataError | GuideError):
        # Words for this process count its rows, and call it the first of its one silo.
        if (words := told(str(error), data)) != str(error):
            LOG.warning("refused: %s", error)
        return write({}, {"error": type(error).__name__, "words": words})
    # What other errors say may hold data, or a path and in it a user's name: it stays here.
    LOG.error("a message could not be answered", exc_info=error)
    words = f"{type(cause or error).__name__} at the silo, whose log"
    if isinstance(error, SavedStateError):
        words = "this silo cannot use its folder: another process or object may use it. Its log"
    return refusal(ModelError(f"{words} has the rest."))


def told(words: str, data: object) -> str:
    """Return an error's words without values of rows, their numbers, and the lengths of arrays."""
    for pattern, instead in UNTOLD:
        words = pattern.sub(instead, words)
    lengths = {str(n) for n in lengths_in(data) if n > 2}  # 0, 1 and 2 are axes and outcomes
    lengths |= {f"{int(n):,}" for n in lengths}
    return NUMBER.sub(lambda found: "n" if found[0] in lengths else found[0], words)


def lengths_in(data: object) -> Iterator[int]:
    """Yield the lengths of the axes of arrays and tables, which may lie in dicts."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from lengths_in(value)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        yield len(data)
    else:
        yield from getattr(data, "shape", ())
