"""The list of all arrays that cross between server and silos, read off the exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from numpyro_fed import html
from numpyro_fed.algorithms.base import Combine, Exchange, FederatedAlgorithm, Round
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.stack import ServerData
from numpyro_fed.runtime.step import message_shapes


class Crossing(NamedTuple):
    """One array of a message between server and silo.

    Attributes
    ----------
    when : {"start", "round"}
        ``"start"``: before the first round, as often as the start takes. ``"round"``: in each
        round.
    exchange, array : str
    up : bool
        From a silo to the server, or down to all silos.
    shape : tuple of int
    dtype : str
    summed : bool
        Whether the server needs the sum over silos alone, which secure aggregation may form.
    nbytes : int
    """

    when: str
    exchange: str
    array: str
    up: bool
    shape: tuple[int, ...]
    dtype: str
    summed: bool
    nbytes: int


class Crossings(NamedTuple):
    """All arrays that cross between the server and one silo; prints as a table."""

    rows: tuple[Crossing, ...]
    parties: tuple[str, str] = ("server", "silo")

    def nbytes(self, when: str, *, up: bool) -> int:
        """Return how many bytes cross, up or down, if each exchange takes place once."""
        return sum(row.nbytes for row in self.rows if row.when == when and row.up is up)

    def _cells(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the columns, then a row for each array."""
        server, silo = self.parties
        head = ("when", "exchange", "from", "to", "array", "shape", "dtype", "")
        lines = (
            (
                row.when,
                row.exchange,
                silo if row.up else server,
                server if row.up else silo,
                row.array,
                str(row.shape),
                row.dtype,
                "summed" if row.up and row.summed else "",
            )
            for row in self.rows
        )
        return head, *lines

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        return html.table(head, lines)


def crossings(
    when: str,
    algorithm: FederatedAlgorithm[Any, Any],
    rounds: Sequence[Round],
    data: SiloData,
    server_data: ServerData,
    *,
    silo: str = "silo",
) -> Crossings:
    """Return all arrays that cross in ``rounds``, from an algorithm's first states on.

    The silo holds ``data``. Shapes are found by tracing; nothing is computed.
    """
    rows: list[Crossing] = []
    for exchange, down, reply in message_shapes(algorithm, rounds, data, server_data):
        # Shown by their names in ``Reply``: they leave the silo, too, beside ``up``.
        sent = {"ok": reply.ok, "weight": reply.weight}
        rows.extend(_rows(when, exchange, down, False))
        rows.extend(_rows(when, exchange, reply.up, True) + _rows(when, exchange, sent, True))
    return Crossings(tuple(rows), ("server", silo))


def _rows(when: str, exchange: Exchange[Any, Any, Any], tree: object, up: bool) -> list[Crossing]:
    summed = exchange.combine is Combine.SUM
    return [
        Crossing(
            when,
            exchange.name,
            jax.tree_util.keystr(path, simple=True, separator=".") or "message",
            up,
            tuple(leaf.shape),
            str(leaf.dtype),
            summed,
            leaf.size * leaf.dtype.itemsize,
        )
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
