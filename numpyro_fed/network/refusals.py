"""The reply of a silo that refuses, in words that tell nothing of its rows and of its machine."""

from __future__ import annotations

import logging
import re
import traceback
from pathlib import Path

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
# Any other number, with the letters that touch it (12kg), but for 0, 1 and 2 (codes of outcomes,
# and axes) and the place of an axis. Names (x12) begin with a letter, and stay.
NUMBER = re.compile(
    r"(?<!\w)(?<!\w\.)(?<!dim )(?<!dim -)-?\.?\d\w*([.,]\d\w*)*((?<=[eE])[+-]\d\w*)?"
)
KNOWN = "0", "1", "2"
HERE = Path(__file__).parent


def refusal_of(error: Exception) -> bytes:
    """Return the reply to a message that failed with an error."""
    if isinstance(error, MissingExtraError):
        return refusal(ModelError(str(error)))
    if isinstance(error, StaleError):
        return refusal(error)
    cause: BaseException | None = error
    while not (cause is None or isinstance(cause, OSError)):
        cause = cause.__cause__
    if cause is None and isinstance(error, ModelError | DataError | GuideError):
        # The owner's rules have words for whoever asks. Others are for this process: they count its
        # rows, and call it the first of its one silo.
        words = str(error) if is_of_rules(error) else told(str(error))
        if words != str(error):
            LOG.warning("refused: %s", error)
        return write({}, {"error": type(error).__name__, "words": words})
    # What other errors say may hold data, or a path and in it a user's name: it stays here.
    LOG.error("a message could not be answered", exc_info=error)
    words = f"{type(cause or error).__name__} at the silo, whose log"
    if isinstance(error, SavedStateError):
        words = "this silo cannot use its folder: another process or object may use it. Its log"
    return refusal(ModelError(f"{words} has the rest."))


def is_of_rules(error: Exception) -> bool:
    """Return whether an error comes from this folder, whose words have nothing of the data."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parent == HERE


def told(words: str) -> str:
    """Return an error's words without values of rows, their numbers, and the lengths of arrays."""
    for pattern, instead in UNTOLD:
        words = pattern.sub(instead, words)
    return NUMBER.sub(lambda found: found[0] if found[0] in KNOWN else "n", words)
