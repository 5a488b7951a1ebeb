"""Describe and agree for vertical models: the shapes of all parties' data, and the plan, as JSON.

Unlike the facts of a silo these hold exact numbers of rows: every party holds the same rows, and
messages of one number a row show how many there are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from numpyro_fed.errors import ModelError
from numpyro_fed.model.data import SiloData, read_one
from numpyro_fed.model.facts import skeleton, unflatten_skeleton
from numpyro_fed.model.fingerprint import SOFTWARE, Term
from numpyro_fed.model.roles import with_server_data
from numpyro_fed.records import canonical, read_record

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
