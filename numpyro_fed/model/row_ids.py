"""The check that all parties of a vertical model hold the same rows in the same order."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.errors import DataError, DataWarning

ORDER = (
    "Bring the rows of all parties into one order (by numpy.argsort of the ids), and leave out "
    "those that somebody lacks."
)


def read_ids(ids: ArrayLike, rows: int, owner: str) -> np.ndarray:
    """Return the ids of ``rows`` rows as text (rows,), and refuse ids that occur twice.

    The number 7 and the text "7" are the same id.
    """
    given = np.asarray(ids)
    if given.dtype.kind == "f":
        raise DataError(f"the row ids of {owner} are fractions: give integers or text.")
    if given.shape != (rows,):
        raise DataError(
            f"the row ids of {owner} have the shape {given.shape}, expected ({rows},): one for "
            "each row."
        )
    text = np.array([str(value) for value in given.tolist()])
    values, counts = np.unique(text, return_counts=True)
    if len(values) < rows:
        raise DataError(
            f"the row id '{values[counts.argmax()]}' stands {counts.max()} times among those of "
            f"{owner}. Ids must name one row each."
        )
    return text


def check_same_ids(row_ids: Sequence[ArrayLike], rows: int, num_clients: int) -> None:
    """Refuse parties whose rows have other ids or another order than those of client 0.

    ``row_ids`` has the ids of each client, and of the server last if it has ids.
    """
    if len(row_ids) not in (num_clients, num_clients + 1):
        raise DataError(
            f"row_ids has {len(row_ids)} entries, expected {num_clients}, one for each client, and "
            "one more if the server's rows have ids, too."
        )
    owners = [f"client {j}" for j in range(num_clients)] + ["the server"]
    all_ids = [read_ids(ids, rows, owner) for ids, owner in zip(row_ids, owners, strict=False)]
    for ids, owner in zip(all_ids, owners, strict=False):
        if (different := np.flatnonzero(ids != all_ids[0])).size:
            i = different[0]
            raise DataError(
                f"row {i} is '{ids[i]}' at {owner} and '{all_ids[0][i]}' at client 0, and so for "
                f"{different.size} of {rows} rows. {ORDER}"
            )


def digest(ids: np.ndarray) -> str:
    """Return a hash of ids, by which parties compare them."""
    # It has no salt, since parties must arrive at the same hash without a common secret. Whoever
    # can guess the whole list of ids can confirm the guess.
    return hashlib.sha256("\n".join(ids.tolist()).encode()).hexdigest()


def check_same_digests(digests: Mapping[str, str]) -> None:
    """Refuse parties whose row ids have different digests.

    ``digests`` are by owner, and empty for parties without ids. A warning says so if only some of
    the parties have ids.
    """
    given = {owner: text for owner, text in digests.items() if text}
    without = [owner for owner in digests if owner not in given]
    if given and without:
        warnings.warn(
            f"nothing says whether the rows of {', '.join(without)} are those of "
            f"{', '.join(given)}: only the latter have row ids.",
            category=DataWarning,
            stacklevel=3,
        )
    for owner, text in given.items():
        first = next(iter(given))
        if text != given[first]:
            raise DataError(
                f"the rows of {owner} have other ids than those of {first}, or another order. "
                f"{ORDER}"
            )
