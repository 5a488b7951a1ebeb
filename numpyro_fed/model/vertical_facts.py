"""Describe and agree for vertical models: the shapes of all parties' data, and the plan, as JSON.

Unlike the facts of a silo these hold exact numbers of rows: every party holds the same rows, and
messages of one number a row show how many there are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.errors import DataError, DataWarning, ModelError
from numpyro_fed.files import canonical, read_record
from numpyro_fed.model.data import SiloData, read_one
from numpyro_fed.model.facts import skeleton, unflatten_skeleton
from numpyro_fed.model.fingerprint import SOFTWARE, Term
from numpyro_fed.model.roles import with_server_data

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


VERSION = 3


@dataclass(frozen=True)
class Shapes:
    """The names, dtypes and shapes of a party's arrays, and its static values."""

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]  # tuple of (name, dtype, shape)
    static: tuple[tuple[str, Any], ...]  # tuple of (name, value)
    tree: str  # the structure of the data, as JSON
    # SHA-256 of the rows' ids in their order, by which parties compare their rows; empty
    # without ids
    ids: str = ""
    # the versions of JAX and NumPyro, on which the form depends in which texts are compared
    software: str = SOFTWARE

    @classmethod
    def of(cls, data: SiloData) -> Shapes:
        """Return the shapes of a party's data."""
        arrays = tuple((n, str(a.dtype), tuple(a.shape)) for n, a in data.arrays.items())
        return cls(arrays, data.static, json.dumps(skeleton(data.named_tree())))

    def to_json(self) -> str:
        """Return the shapes as JSON text, which :meth:`from_json` reads."""
        return canonical({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Shapes:
        """Read shapes from the text that :meth:`to_json` returned."""
        found = json.loads(text)
        if found.pop("version", None) != VERSION:
            raise ModelError(
                "a client's facts were written by another version. All parties must run the same."
            )
        return read_record(cls, json.dumps(found))

    def zeros(self) -> Any:
        """Return a tree of zeros in these shapes."""
        arrays = {n: np.zeros(shape, dtype) for n, dtype, shape in self.arrays}
        return unflatten_skeleton(json.loads(self.tree), {**arrays, **dict(self.static)})


@dataclass(frozen=True)
class VerticalPlan:
    """The plan from which all parties of a vertical model build the same algorithm, as JSON."""

    # the shapes of the model's arguments by name, the clients' columns among them
    arguments: Shapes
    clients: tuple[Shapes, ...]  # the shapes of each client's data
    shared: str  # the server's arrays if clients receive them (share_response); empty otherwise
    # what each client's part adds to the density, site by site, by the server's text
    terms: tuple[tuple[Term, ...], ...]

    @property
    def num_silos(self) -> int:
        """Return the number of clients."""
        return len(self.clients)

    @property
    def by_value(self) -> bool:
        """Return whether terms are values, since not all parties have the same versions."""
        return any(c.software != self.arguments.software for c in self.clients)

    @cached_property
    def shared_text(self) -> dict[str, np.ndarray]:
        """Return the server's arrays that clients receive, by name."""
        found = json.loads(self.shared or "{}")
        return {
            name: np.frombuffer(base64.b64decode(numbers), dtype).reshape(shape)
            for name, (dtype, shape, numbers) in found.items()
        }

    def template(self) -> SiloData:
        """Return zeros of the shapes of the first client, for tracing the text."""
        client = {"columns": self.clients[0].zeros()["columns"], "predictor": 0}
        data = read_one("a client", client)
        return with_server_data(data, self.shared_text) if self.shared else data

    def to_json(self) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads."""
        return canonical(self)

    @classmethod
    def from_json(cls, text: str) -> VerticalPlan:
        """Read a plan from the text that :meth:`to_json` returned."""
        return read_record(cls, text)


def shared_text(arrays: Mapping[str, np.ndarray]) -> str:
    """Return arrays as JSON text, which :attr:`VerticalPlan.shared_text` reads."""
    # Base64 keeps every bit of a float, and is shorter than decimal digits that would.
    return canonical(
        {
            name: [str(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for name, a in arrays.items()
        }
    )
