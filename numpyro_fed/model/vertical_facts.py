"""Describe, agree, for vertical models: the shapes that all parties build from, as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from numpyro_fed.errors import ModelError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.facts import canonical, grown, skeleton

VERSION = 2


@dataclass(frozen=True)
class Shapes:
    """The shapes of a party's data: names, dtypes, plain values, too; no number of an array.

    Attributes
    ----------
    arrays : tuple of (name, dtype, shape)
    static : tuple of (name, value)
    tree : str
        JSON: how they are put together.
    ids : str
        SHA-256 of the rows' ids in their order, by which parties compare them; empty without ids.
    """

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    static: tuple[tuple[str, Any], ...]
    tree: str
    ids: str = ""

    @classmethod
    def of(cls, data: SiloData) -> Shapes:
        """Read off what a party holds."""
        arrays = tuple((n, str(a.dtype), tuple(a.shape)) for n, a in data.arrays.items())
        return cls(arrays, data.static, json.dumps(skeleton(data.named_tree())))

    def to_json(self) -> str:
        """Return it as text, which :meth:`from_json` reads."""
        return canonical({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Shapes:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        if found.pop("version", None) != VERSION:
            raise ModelError(
                "a client's facts were written by another version. All parties must run the same."
            )
        arrays = tuple((n, dtype, tuple(shape)) for n, dtype, shape in found["arrays"])
        static = tuple((n, v) for n, v in found["static"])
        return cls(arrays, static, found["tree"], found["ids"])

    def zeros(self) -> Any:
        """The same tree, of zeros."""
        arrays = {n: np.zeros(shape, dtype) for n, dtype, shape in self.arrays}
        return grown(json.loads(self.tree), {**arrays, **dict(self.static)})


@dataclass(frozen=True)
class VerticalPlan:
    """The plan from which all parties of a vertical model build: JSON.

    Attributes
    ----------
    arguments : Shapes
        Of the model's arguments by name, clients' columns among them.
    clients : tuple of Shapes
        Of what each client holds.
    shared : str
        The server's arrays, where clients are told them (``share_response``); else empty.
    """

    arguments: Shapes
    clients: tuple[Shapes, ...]
    shared: str = ""

    @property
    def num_silos(self) -> int:
        """How many clients there are."""
        return len(self.clients)

    @cached_property
    def shared_text(self) -> dict[str, np.ndarray]:
        """The server's arrays that clients are told."""
        found = json.loads(self.shared or "{}")
        return {
            name: np.frombuffer(base64.b64decode(numbers), dtype).reshape(shape)
            for name, (dtype, shape, numbers) in found.items()
        }

    def to_json(self) -> str:
        """Return it as text, which :meth:`from_json` reads."""
        parts = [self.arguments.to_json(), [c.to_json() for c in self.clients], self.shared]
        return canonical(parts)

    @classmethod
    def from_json(cls, text: str) -> VerticalPlan:
        """Read what :meth:`to_json` wrote."""
        arguments, clients, shared = json.loads(text)
        return cls(Shapes.from_json(arguments), tuple(map(Shapes.from_json, clients)), shared)


def shared_text(arrays: Mapping[str, np.ndarray]) -> str:
    """The arrays as a text of JSON."""
    return canonical(
        {
            name: [str(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for name, a in arrays.items()
        }
    )
