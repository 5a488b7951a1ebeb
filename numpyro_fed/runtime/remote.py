"""The runtime of a server whose silos are in processes of their own.

The server has a :class:`Mark` in the place of a silo's state: the run, and the number of the last
message whose reply was used. So a result of such a run can be corrected, evaluated and continued
like one in this process, as long as the silos keep the states that it refers to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.algorithms.base import (
    Down,
    Exchange,
    ExchangeId,
    FederatedAlgorithm,
    Reply,
    Round,
    Up,
)
from numpyro_fed.errors import DataError, ReplyError, SiloAwayError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.combine import combine, for_participants
from numpyro_fed.runtime.host import round_loop, single_with
from numpyro_fed.runtime.messages import BEGIN, GO_ON, Question, pack, read, unpack, write
from numpyro_fed.runtime.noise import init_keys
from numpyro_fed.runtime.party import PlanLike
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import (
    Batch,
    Batches,
    FewerError,
    Runtime,
    Single,
    Stacks,
    State,
    init_schedule,
)
from numpyro_fed.runtime.step import (
    Answers,
    Transport,
    compiled_in_parts,
    message_shapes,
)
from numpyro_fed.trees import drop_weak_types

Send = Callable[[int, bytes], bytes]


class Carrier(Protocol):
    """The way of messages to silos and back."""

    def ask(self, who: Sequence[int], messages: Sequence[bytes], exchange: str) -> list[bytes]:
        """Return the reply of each silo of ``who`` to its message."""

    def new_run(self) -> bytes:
        """Return the id of a new run, sixteen bytes."""


class Mark(NamedTuple):
    """The server's references to the states of silos.

    Attributes
    ----------
    run : (silos, 4) uint32
        The id of the run.
    used : (silos,) int32
        The number of each silo's last message whose reply was used.
    """

    run: np.ndarray
    used: np.ndarray


class Weights(NamedTuple):
    """The range of weights that a silo's replies may have."""

    least: float
    most: float


class Channel:
    """The server's connection to the silos of one plan: it numbers and checks messages.

    It knows the weights that each silo's replies may have.
    """

    def __init__(
        self,
        carrier: Carrier,
        num_silos: int,
        weights: Sequence[Weights] | None = None,
        method: str = "",
        missing: str = "wait",
    ):
        self._carrier, self.num_silos, self._method = carrier, num_silos, method
        self._missing = missing
        # Replies to an exchange in which others were away, by what was asked.
        self._answered: dict[str, tuple[int, bytes]] = {}
        self._weights = weights or [Weights(0.0, np.finfo(np.float64).max)] * num_silos
        self._numbers: Counter[str] = Counter()

    @property
    def batches(self) -> Batches:
        """Return the silos as a batch without data, in whose place their states have marks."""
        return (Batch(jnp.arange(self.num_silos, dtype=jnp.int32), SiloData({}, {}, ())),)

    def begin(self, name: str, key: Array) -> Mark:
        """Make every silo begin a new run, and return the marks of its first states."""
        bits = jax.random.key_data(key)
        return self._begin([(name, "", 0)] * self.num_silos, {"key": bits})

    def go_on(self, mark: Mark) -> Mark:
        """Make every silo begin a new run at a state of an earlier one."""
        runs = [_id_of(run) for run in mark.run]
        return self._begin([(GO_ON, run, int(n)) for run, n in zip(runs, mark.used, strict=True)])

    def _begin(
        self, asked: Sequence[tuple[str, str, int]], arrays: Mapping[str, ArrayLike] | None = None
    ) -> Mark:
        run, size = np.frombuffer(self._carrier.new_run(), np.uint32), self.num_silos
        questions = [
            Question(name, s, _id_of(run), used, used, self._method) for name, s, used in asked
        ]
        self._numbers[_id_of(run)] = max(q.number for q in questions)
        messages = [write(arrays or {}, question.head()) for question in questions]
        self._carrier.ask(range(size), messages, asked[0][0])
        used = np.array([q.number for q in questions], np.int32)
        return Mark(np.tile(run, (size, 1)), used)

    def ask(
        self,
        who: Sequence[int],
        exchange: Exchange[Any, Down, Up],
        key: Array,
        downs: Sequence[Down],
        mark: Mark,
        expected: Reply[Up],
    ) -> tuple[list[Reply[Up]], Mark]:
        """Return silos' replies to an exchange, checked for shapes and weight, and new marks.

        Raises
        ------
        ReplyError
            For a reply of other shapes or dtypes, or with a weight that is not allowed.
        """
        bits, (name, settings) = jax.random.key_data(key), exchange.id
        runs, before = [_id_of(run) for run in np.asarray(mark.run)], np.asarray(mark.used)
        number = 1 + max(*(self._numbers[runs[j]] for j in who), *(int(before[j]) for j in who))
        messages: dict[int, bytes] = {}
        contents: dict[int, str] = {}
        for j, down in zip(who, downs, strict=True):
            arrays = {"key": bits, **pack("down", down)}
            question = Question(name, settings, runs[j], 0, int(before[j]), self._method)
            contents[j] = sha256(write(arrays, question.head())).hexdigest() + f"/{j}"
            messages[j] = write(arrays, question._replace(number=number).head())
            self._numbers[runs[j]] = number
        answered = {j: self._answered[contents[j]] for j in who if contents[j] in self._answered}
        asked = [j for j in who if j not in answered]
        try:
            found = self._carrier.ask(asked, [messages[j] for j in asked], name)
        except SiloAwayError as error:
            self._answered = {contents[j]: (number, r) for j, r in error.replies.items()}
            raise
        self._answered = {}
        answered |= {j: (number, reply) for j, reply in zip(asked, found, strict=True)}
        used = before.copy()
        used[list(who)] = [answered[j][0] for j in who]
        replies = [self._checked(j, exchange, answered[j][1], expected) for j in who]
        return replies, mark._replace(used=used)

    def goes_on(self, without: str) -> bool:
        """Return whether a round is run without silos that do not answer."""
        return without == "exact" or (without == "scaled" and self._missing == "reweight")

    def _checked(
        self, silo: int, exchange: Exchange[Any, Down, Up], answer: bytes, expected: Reply[Up]
    ) -> Reply[Up]:
        """Return a silo's reply, once its shapes, dtypes and weight are those that were agreed."""
        name = exchange.name
        try:
            reply = unpack("reply", expected, read(answer).arrays)
        except DataError as error:
            raise ReplyError(f"is refused: {error}", silo=silo, exchange=name) from error
        if exchange.weighted:
            allowed, weight = self._weights[silo], float(np.asarray(reply.weight))
            if not allowed.least <= weight <= allowed.most:
                raise ReplyError(
                    f"has weight {weight:g}, where {allowed.least:g} to {allowed.most:g} is "
                    "allowed by what the silo has said of its number of rows. Its facts must be "
                    "of the data that it holds; or use weights='even'.",
                    silo=silo,
                    exchange=name,
                )
        return reply


def _id_of(run: np.ndarray) -> str:
    """Return the id of a run as text."""
    return np.asarray(run, np.uint32).tobytes().hex()


def remote(
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule[Carry] | None = None,
    *,
    plan: PlanLike,
    channel: Channel,
    begin: str = BEGIN,
) -> Runtime:
    """Return the runtime of a server whose silos are reached over a channel.

    Each run begins by the message ``begin``.
    """
    silos = _Remote(algorithm, schedule, plan, channel, begin)
    # One round a call: a chunk that is run again after a failure would ask silos again.
    advance = round_loop(
        silos.prepared(algorithm.round),
        schedule,
        silos.num_silos,
        silos.transport_of,
        algorithm.done,
        algorithm.away,
    )
    return Runtime(silos.init, advance, silos.single, 1, like=silos.like, go_on=silos.go_on)


@dataclass(frozen=True, eq=False)
class _Remote:
    """The parts of the runtime; it finds the expected shapes of replies when needed."""

    algorithm: FederatedAlgorithm[Any, Any]
    schedule: Schedule[Any] | None
    plan: PlanLike
    channel: Channel
    begin: str
    rounds: dict[ExchangeId, Round] = field(default_factory=dict)
    reply_shapes: dict[ExchangeId, Reply[Any]] = field(default_factory=dict)
    reply_checks: dict[ExchangeId, Callable[[Reply[Any]], Reply[Any]]] = field(default_factory=dict)

    def init(self, key: Array, batches: Batches) -> State:
        """Return the first state of a run, which silos begin with it."""
        key_server, key_silos = init_keys(key)
        server = jax.jit(self.algorithm.init_server)(key_server)
        return self._state(key, server, self.channel.begin(self.begin, key_silos))

    def like(self, key: Array, batches: Batches) -> State:
        """Return a state for its shapes alone; silos begin nothing."""
        size = self.plan.num_silos
        mark = Mark(np.zeros((size, 4), np.uint32), np.zeros(size, np.int32))
        return self._state(key, self.algorithm.init_server(init_keys(key)[0]), mark)

    def _state(self, key: Array, server: object, mark: Mark) -> State:
        carry = init_schedule(self.schedule, key, self.plan.num_silos)
        server, carry = drop_weak_types((server, carry))
        return State(jnp.zeros((), jnp.int32), server, (mark,), carry)

    def go_on(self, before: State) -> State:
        """Return the state of a new run that goes on where another one has ended."""
        return before._replace(silos=(self.channel.go_on(before.silos[0]),))

    def num_silos(self, batches: Batches) -> int:
        """Return the number of silos."""
        return self.plan.num_silos

    def transport_of(self, batches: Batches) -> Transport[Array, Stacks]:
        """Return the transport over the channel."""
        return self.transport

    def single(self, round_: Round) -> Single:
        """Return a single round with all silos."""
        return single_with(self.prepared(round_), self.num_silos, self.transport_of)

    def prepared(self, round_: Round) -> Round:
        """Return the round in the form in which the server runs it."""
        self.rounds.update((exchange.id, round_) for exchange in round_.exchanges)
        return compiled_in_parts(round_)

    @cached_property
    def watch_reply(self) -> Callable[[Any], Any] | None:
        """Return the compiled function that reads the watched part of a state off a reply."""
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)

    def trace_replies(self, asked: ExchangeId) -> None:
        """Trace the round of this exchange, for the shapes and the checks of its replies."""
        crossed = message_shapes(self.algorithm, (self.rounds[asked],), self.plan.template())
        for exchange, _, reply in crossed:
            self.reply_shapes[exchange.id] = reply
            self.reply_checks[exchange.id] = jax.jit(exchange.checked)

    def transport(
        self, exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        """Ask all participants at once, and check each reply.

        A silo's own ``ok`` is not trusted: the reply is checked again here.
        """
        asked = exchange.id
        if asked not in self.reply_shapes:
            self.trace_replies(asked)
        expected, check = self.reply_shapes[asked], self.reply_checks[asked]
        last = self.algorithm.round.exchanges[-1].id
        watch_reply = self.watch_reply if asked == last else None
        numbers = np.asarray(who).tolist()
        downs = [
            drop_weak_types(for_participants(exchange.scatter, down, i))
            for i in range(len(numbers))
        ]
        try:
            answers, mark = self.channel.ask(numbers, exchange, noise, downs, silos[0], expected)
        except SiloAwayError as error:
            # Later exchanges of a round have begun with all silos.
            first = asked == self.algorithm.round.exchanges[0].id
            present = tuple(j for j in numbers if j not in error.silos)
            if not (first and self.channel.goes_on(self.algorithm.without)):
                raise
            raise FewerError(present) from error
        replies, watched = [], []
        for reply in map(check, answers):
            replies.append(jax.tree.map(lambda a: a[None], reply))
            watched.append(watch_reply(reply.up) if watch_reply else ())
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, (mark,), stacked(watched))
