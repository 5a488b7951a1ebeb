"""The bytes that a run sends, by the types of its messages, and its cost before it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.basics import display
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.rounds.exchange import FederatedAlgorithm
from numpyro_fed.rounds.messages import Crossings
from numpyro_fed.rounds.silos import Silos

UNITS = ("B", "kB", "MB", "GB", "TB")
# Copies of the state in memory at once: the old one, the new one and a gradient.
COPIES = 3


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
        return display.html_table(head, lines)


def communication(
    built: Built, data: SiloData, num_silos: int, rounds: int, opening: Mapping[str, int]
) -> Communication:
    """Return the bytes of a run of ``rounds`` rounds.

    ``opening`` counts the exchanges before the first round by name:
    :meth:`Built.opening_exchanges`.
    """
    messages = built.messages(data)
    start_rows = [row for row in messages.rows if row.when == "start"]
    down, up = (
        sum(opening.get(row.exchange, 0) * row.nbytes for row in start_rows if row.up is way)
        for way in (False, True)
    )
    visits, exchanges = built.visits(num_silos), sum(opening.values())
    return Communication(messages, visits, num_silos, rounds, exchanges, (down, up))


def size_in_words(number: float) -> str:
    """Return a number of bytes in words, in the unit that leaves fewer than a thousand."""
    value, unit = float(number), 0
    while value >= 1_000 and unit < len(UNITS) - 1:
        value, unit = value / 1_000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"


@dataclass(frozen=True)
class Cost:
    """The cost of a run; prints as text.

    Attributes
    ----------
    sizes : tuple of dict
        Rows of each silo plate at each silo.
    num_globals, num_shared : int
        Global latents, and shared parameters.
    num_local : tuple of int
        Numbers of each silo's own latents and parameters.
    server, silos : int
        Bytes of the server's state, and of all silos' states, the optimisers' part included.
    data : int
        Bytes of what all silos hold, padded to common shapes.
    memory : int
        Bytes that a run in one process needs, about.
    communication : Communication
        The bytes of one round, without the search for a start. Its ``messages`` list all arrays
        that leave a silo.
    """

    sizes: tuple[Sizes, ...] = field(repr=False)
    num_globals: int
    num_shared: int
    num_local: tuple[int, ...] = field(repr=False)
    server: int
    silos: int
    data: int
    memory: int
    communication: Communication = field(repr=False)

    def _summary(self) -> str:
        """Return all but the messages, as text."""
        plates = ", ".join(
            f"{_range([size[p] for size in self.sizes])} rows of '{p}'" for p in self.sizes[0]
        )
        visit = map(size_in_words, self.communication.visit)
        return "\n".join(
            [
                f"{len(self.sizes):,} silos with {plates}",
                f"{self.num_globals:,} global latents, {self.num_shared:,} shared parameters, "
                f"{_range(self.num_local)} latents and parameters of a silo's own",
                f"state: {size_in_words(self.server)} at the server, {size_in_words(self.silos)} "
                f"at all silos together; data: {size_in_words(self.data)}; a run in one process: "
                f"about {size_in_words(self.memory)}",
                "a round, a silo that takes part: {} down, {} up".format(*visit),
            ]
        )

    def __str__(self) -> str:
        return f"{self._summary()}\n\n{self.communication.messages}"

    def _repr_html_(self) -> str:
        return display.html_words(self._summary()) + self.communication.messages._repr_html_()


def cost_of(fit: CompiledMethod, hosted: Silos) -> Cost:
    """Return the cost of a run of a compiled fit."""
    model, built = fit.model, fit.built
    server, silos = state_sizes(built.algorithm, hosted.buckets)
    data = sum(np.asarray(a).nbytes for b in hosted.buckets for a in jax.tree.leaves(b.data))
    opening = built.opening_exchanges(None)
    messages = communication(built, hosted.data[0], len(hosted.data), 1, opening)
    theta = jax.eval_shape(model.init_theta, jax.random.key(0))
    has_private = any(model.named("param", p.name) for p in model.plates)
    local = []
    for data_of_silo, size in zip(hosted.data, fit.sizes, strict=True):
        latents = sum(size[p.name] * p.dim for p in model.plates)
        # Only private parameters need a trace of the model for each silo.
        if has_private:
            private = jax.eval_shape(model.init_private, jax.random.key(0), data_of_silo)
            latents += _count(private)
        local.append(latents)
    return Cost(
        fit.sizes,
        model.dim,
        _count(theta),
        tuple(local),
        server,
        silos,
        data,
        COPIES * (server + silos) + data,
        messages,
    )


def state_sizes(
    algorithm: FederatedAlgorithm[Any, Any], buckets: Sequence[Bucket]
) -> tuple[int, int]:
    """Return the bytes of the server's state, and of all silos' states."""

    def size(init: Callable[..., Any], *args: SiloData) -> int:
        state = jax.eval_shape(lambda *args: init(jax.random.key(0), *args), *args)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))

    silos = sum(
        size(algorithm.init_silo, jax.tree.map(lambda a: a[0], b.data)) * len(b.silos)
        for b in buckets
    )
    return size(algorithm.init_server), silos


def _count(tree: object) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(tree))


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
