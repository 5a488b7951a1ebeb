"""A run of any method: losses, the last state, how its silos are asked again, and what it costs.

:class:`Communication` counts the bytes that a run sends, by the types of its messages, and
:class:`Cost` says what one costs before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import DataError, NonFiniteError
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData, Sizes
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.saving import Provenance, SavedRun
from numpyro_fed.rounds.exchange import FederatedAlgorithm
from numpyro_fed.rounds.messages import Crossings
from numpyro_fed.rounds.runtime import State
from numpyro_fed.rounds.silos import Silos
from numpyro_fed.rounds.states import Shared
from numpyro_fed.rounds.step import Conversation

# Batches of rounds in each quarter of a run, whose means show how noisy the bound is. Rounds are
# correlated, so that single losses would show too little noise; fewer batches estimate it badly.
NUM_BATCHES = 5
UNITS = ("B", "kB", "MB", "GB", "TB")
# Copies of the state in memory at once: the old one, the new one and a gradient.
COPIES = 3


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """The result of a run: losses, the last state, and what can be asked of them."""

    losses: np.ndarray = field(repr=False)
    state: State = field(repr=False)
    _fit: CompiledMethod = field(repr=False)
    _silos: Silos = field(repr=False)
    ended: str = field(default="rounds", kw_only=True)
    start: Any = field(default=None, repr=False, kw_only=True)

    ELSEWHERE: ClassVar[str]  # what to say where a silo's own numbers are not in this process
    PARTY: ClassVar[str] = "silo"

    @property
    def num_silos(self) -> int:
        """Return the number of silos, or of clients that hold columns."""
        return self._fit.plan.num_silos

    @property
    def shared(self) -> Shared:
        """Return the part of the server's state that all parties may know.

        It holds shared parameters, unconstrained, and the guide of the globals.
        """
        # Some algorithms compute it; compiled as a whole that is one program. No jit_once, which no
        # outer trace takes: Predictive asks for it inside of one.
        shared = self._fit.cached("shared", lambda: jax.jit(self._fit.algorithm.shared))
        return shared(self.state.server)

    def _hosted(self, silo: int) -> Silos:
        """Return the silos' data; raise an error if silos are in other processes."""
        if self._silos.elsewhere:
            raise DataError(self.ELSEWHERE.format(silo))
        return self._silos

    def _silo_state(self, silo: int) -> Any:
        """Return a silo's state."""
        return self._hosted(silo).at(silo, self.state.silos)

    def _asking(self, key: Array) -> Conversation:
        """Return the function that asks all silos, whose states stay as they are."""
        transport = self._fit.runtime.transport(self._silos.batches)
        return Conversation(transport, key, self.num_silos, self.state.silos)

    def unusable(self, message: str, silos: tuple[int, ...] = ()) -> NonFiniteError:
        """Return the error for numbers that cannot be used, of silos or of the server."""
        where = f"{self.PARTY} {', '.join(map(str, silos))}" if silos else "the server"
        number = int(self.state.round)
        return NonFiniteError(message.format(where), result=self, round=number, silos=silos)

    @property
    def settled(self) -> bool:
        """Whether the bound had stopped rising by the end of this run, as far as its noise shows.

        The last quarter of the rounds gains no more than 0.1 nat on the quarter before, or than
        three standard errors, from means of batches of rounds. Too few rounds to tell are not
        settled.
        """
        quarter = len(self.losses) // 4
        # A batch has at least two rounds, so that 40 rounds are the fewest that can be judged.
        if quarter < 2 * NUM_BATCHES:
            return False
        size = quarter // NUM_BATCHES
        last = np.asarray(self.losses, np.float64)[-2 * NUM_BATCHES * size :]
        previous, after = last.reshape(2, NUM_BATCHES, size).mean(2)
        # At least 0.1 nat: a bound may be so quiet that
        # three of its standard errors are next to nothing.
        error = np.sqrt((previous.var(ddof=1) + after.var(ddof=1)) / NUM_BATCHES)
        return bool(previous.mean() - after.mean() <= max(0.1, 3 * error))

    def _run_summary(self) -> str:
        if self.ended == "converged":
            return f"{len(self.losses)} rounds; the run had come to rest."
        end = "had settled" if self.settled else "was still rising, or they are too few to tell"
        return f"{len(self.losses)} rounds; the bound {end}."

    def saved_run(self) -> SavedRun:
        """Return the run in the form in which a file keeps it."""
        return self._fit.description(), self.losses, self.state

    def provenance(self) -> Provenance | None:
        """Return the fingerprints of model and data; None if silos are in other processes."""
        return None if self._silos.elsewhere else self._fit.provenance(self._silos)


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
    schedule, exchanges = built.schedule, sum(opening.values())
    visits = num_silos if schedule is None else schedule.steps * schedule.size
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
