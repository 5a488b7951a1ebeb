"""Whether the rows of all parties of a vertical model are the same, in the same order."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.errors import DataError

ORDER = (
    "Bring the rows of all parties into one order (by numpy.argsort of the ids), and leave out "
    "those that somebody lacks."
)


def read_ids(ids: ArrayLike, rows: int, owner: str) -> np.ndarray:
    """Ids of ``rows`` rows, each once, as text: the number 7 and the text "7" are one id."""
    found = np.asarray(ids)
    if found.dtype.kind == "f":
        raise DataError(f"the row ids of {owner} are fractions: give integers or text.")
    if found.shape != (rows,):
        raise DataError(
            f"the row ids of {owner} have the shape {found.shape}, expected ({rows},): one for "
            "each row."
        )
    found = np.array([str(value) for value in found.tolist()])
    values, counts = np.unique(found, return_counts=True)
    if len(values) < rows:
        raise DataError(
            f"the row id '{values[counts.argmax()]}' stands {counts.max()} times among those of "
            f"{owner}. Ids must name one row each."
        )
    return found


def check_same_ids(row_ids: Sequence[ArrayLike], rows: int, num_clients: int) -> None:
    """Refuse rows in different orders, given the ids of each client and, last, of the server where
    these are there, too.
    """
    if len(row_ids) not in (num_clients, num_clients + 1):
        raise DataError(
            f"row_ids has {len(row_ids)} entries, expected {num_clients}, one for each client, and "
            "one more if the server's rows have ids, too."
        )
    owners = [f"client {j}" for j in range(num_clients)] + ["the server"]
    known = [read_ids(ids, rows, owner) for ids, owner in zip(row_ids, owners, strict=False)]
    for ids, owner in zip(known, owners, strict=False):
        if (other := np.flatnonzero(ids != known[0])).size:
            i = other[0]
            raise DataError(
                f"row {i} is '{ids[i]}' at {owner} and '{known[0][i]}' at client 0, and so for "
                f"{other.size} of {rows} rows. {ORDER}"
            )


def digest(ids: np.ndarray) -> str:
    """A hash by which ids are compared; whoever can guess the whole list can confirm the guess."""
    return hashlib.sha256("\n".join(ids.tolist()).encode()).hexdigest()


def check_same_digests(digests: Mapping[str, str]) -> None:
    """Refuse rows that are not the same; ``digests`` by owner, empty where there are no ids.

    Warns if some parties have ids and nobody else has them to compare with.
    """
    given = {owner: text for owner, text in digests.items() if text}
    without = [owner for owner in digests if owner not in given]
    if given and without:
        warnings.warn(
            f"nothing says whether the rows of {', '.join(without)} are those of "
            f"{', '.join(given)}: only the latter have row ids.",
            stacklevel=3,
        )
    for owner, text in given.items():
        first = next(iter(given))
        if text != given[first]:
            raise DataError(
                f"the rows of {owner} have other ids than those of {first}, or another order. "
                f"{ORDER}"
            )
