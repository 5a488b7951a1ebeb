"""What a run costs in bytes, read off the types of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpyro_fed import html
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.crossing import Crossings, crossings

UNITS = ("B", "kB", "MB", "GB", "TB")


class Communication(NamedTuple):
    """Bytes that cross between the server and silos; prints as a table.

    Numbers are of the arrays in messages, not of what a network puts around them.

    Attributes
    ----------
    messages : Crossings
        Each array: what it is, where it goes, its shape.
    visits : int
        Of silos in a round, all together.
    num_silos, rounds : int
    start_exchanges : int
        Before the first round, with each silo.
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
        """Bytes down and up, of a silo that takes part once."""
        return self.messages.nbytes("round", up=False), self.messages.nbytes("round", up=True)

    @property
    def total(self) -> tuple[int, int]:
        """Bytes down and up, of the whole run and all silos."""
        times = self.rounds * self.visits
        down, up = (
            self.num_silos * start + times * visit
            for start, visit in zip(self.start, self.visit, strict=True)
        )
        return down, up

    def _cells(self) -> list[tuple[str, ...]]:
        """The table: names of columns, and rows."""
        each = "" if self.visits == self.num_silos else f", {self.visits} in a round"
        rows = (
            (f"before the first round, a silo ({self.start_exchanges} exchanges)", *self.start),
            (f"a round, a silo that takes part{each}", *self.visit),
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
    built: Any, data: SiloData, *, num_silos: int, rounds: int, before: Mapping[str, int]
) -> Communication:
    """Of so many rounds of what a method has built.

    ``before`` is how often each exchange took place before them: see :func:`exchanged_before`.
    """
    schedule = built.schedule
    visits = num_silos if schedule is None else schedule.steps * schedule.size
    found = messages(built, data)
    exchanged = [row for row in found.rows if row.when == "start"]
    down, up = (
        sum(before.get(row.exchange, 0) * row.nbytes for row in exchanged if row.up is way)
        for way in (False, True)
    )
    return Communication(found, visits, num_silos, rounds, sum(before.values()), (down, up))


def messages(built: Any, data: SiloData) -> Crossings:
    """All arrays that cross between the server and a silo, of one exchange of each kind."""
    rows: tuple = ()
    if built.start is not None:
        search, around, begin, _ = built.start
        path = (search.round, begin, *built.algorithm.opening)
        rows += crossings("start", search, path, data, None).rows
        if around is not None and built.model.flat:
            rows += crossings("start", search, (around,), data, None).rows
    elif built.algorithm.opening:
        rows += crossings("start", built.algorithm, built.algorithm.opening, data, None).rows
    here = crossings("round", built.algorithm, (built.algorithm.round,), data, None)
    return here._replace(rows=rows + here.rows)


def exchanged_before(built: Any, start: Any) -> dict[str, int]:
    """How often each exchange took place before the first round of a run that began at ``start``,
    and not at the state of another run.
    """
    times = {round_.name: 1 for round_ in built.algorithm.opening}
    number = getattr(start, "num_exchanges", None)
    if built.start is None or number is None:
        searched = [] if built.start is None else built.searching
        return {x.name: 0 for x in searched} | times
    search, around, begin, _ = built.start
    looked = around is not None and bool(built.model.flat) and start.converged
    times |= {begin.name: 1}
    if around is not None:
        times |= {around.name: int(looked)}
    return times | {x.name: number - 1 - int(looked) for x in search.round.exchanges}


def size_in_words(number: float) -> str:
    """Bytes in units of which there are fewer than a thousand."""
    value, unit = float(number), 0
    while value >= 1_000 and unit < len(UNITS) - 1:
        value, unit = value / 1_000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"
