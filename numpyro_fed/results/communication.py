"""The bytes that a run sends, read off the types of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpyro_fed import html
from numpyro_fed.model.data import SiloData
from numpyro_fed.results.base import Built
from numpyro_fed.runtime.messages import Crossings

UNITS = ("B", "kB", "MB", "GB", "TB")


class Communication(NamedTuple):
    """Bytes that cross between the server and silos; prints as a table.

    The arrays in messages are counted, not what a network puts around them.

    Attributes
    ----------
    messages : Crossings
        Each array with its name, direction and shape.
    visits : int
        Visits in a round, over all silos.
    num_silos, rounds : int
    start_exchanges : int
        Exchanges with each silo before the first round.
    start : (int, int)
        Bytes down to one silo and up from it before the first round, all exchanges together.
    """

    messages: Crossings
    visits: int
    num_silos: int
    rounds: int
    start_exchanges: int
    start: tuple[int, int]

    @property
    def visit(self) -> tuple[int, int]:
        """Return the bytes down to a silo and up from it when it takes part once."""
        return self.messages.nbytes("round", up=False), self.messages.nbytes("round", up=True)

    @property
    def total(self) -> tuple[int, int]:
        """Return the bytes down and up of the whole run and all silos."""
        times = self.rounds * self.visits
        down, up = (
            self.num_silos * start + times * visit
            for start, visit in zip(self.start, self.visit, strict=True)
        )
        return down, up

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the names of the columns, then the rows."""
        participants = "" if self.visits == self.num_silos else f", {self.visits} in a round"
        rows = (
            (f"before the first round, a silo ({self.start_exchanges} exchanges)", *self.start),
            (f"a round, a silo that takes part{participants}", *self.visit),
            (f"this run ({self.rounds} rounds, {self.num_silos} silos)", *self.total),
        )
        return [("", "down", "up"), *((name, *map(size_in_words, n)) for name, *n in rows)]

    def __str__(self) -> str:
        lines = self._cells()
        width = max(len(name) for name, *_ in lines)
        return "\n".join(f"{name:{width}}  {down:>10}  {up:>10}" for name, down, up in lines)

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        return html.table(head, lines)


def communication(
    built: Built, data: SiloData, num_silos: int, rounds: int, before: Mapping[str, int]
) -> Communication:
    """Return the bytes of a run of ``rounds`` rounds.

    ``before`` counts the exchanges before the first round by name: :meth:`Built.exchanged_before`.
    """
    messages = built.messages(data)
    start_rows = [row for row in messages.rows if row.when == "start"]
    down, up = (
        sum(before.get(row.exchange, 0) * row.nbytes for row in start_rows if row.up is way)
        for way in (False, True)
    )
    visits, exchanges = built.visits(num_silos), sum(before.values())
    return Communication(messages, visits, num_silos, rounds, exchanges, (down, up))


def size_in_words(number: float) -> str:
    """Return a number of bytes in words, in the unit that leaves fewer than a thousand."""
    value, unit = float(number), 0
    while value >= 1_000 and unit < len(UNITS) - 1:
        value, unit = value / 1_000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"
