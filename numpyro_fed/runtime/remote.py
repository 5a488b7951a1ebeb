"""The runtime of a server whose silos are in processes of their own.

The server has a :class:`~numpyro_fed.runtime.channel.Mark` in the place of a silo's state: the run,
and the number of the last message whose reply was used. So a result of such a run can be corrected,
evaluated and continued like one in this process, as long as the silos keep the states that it
refers to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    Down,
    Exchange,
    ExchangeId,
    FederatedAlgorithm,
    Round,
    Up,
)
from numpyro_fed.errors import DataError, ModelError, SiloAwayError, SilosError, SumError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.arrivals import Arrivals
from numpyro_fed.runtime.channel import Channel, Expected, Mark
from numpyro_fed.runtime.host import PlainLoop
from numpyro_fed.runtime.messages import BEGIN
from numpyro_fed.runtime.noise import exchange_key, init_keys, server_key
from numpyro_fed.runtime.stack import (
    Batches,
    EndedError,
    FewerError,
    RunStatus,
    Runtime,
    Schedule,
    ServerData,
    Single,
    Stacks,
    State,
    init_schedule,
)
from numpyro_fed.runtime.step import (
    Answers,
    Transport,
    combine,
    compiled_in_parts,
    declared,
    for_participants,
    message_shapes,
    replayed_part,
)
from numpyro_fed.runtime.sums import LEAST, check_summed
from numpyro_fed.trees import drop_weak_types


class PlanLike(Protocol):
    """The part of a plan that a runtime needs."""

    @property
    def num_silos(self) -> int: ...

    def template(self) -> SiloData:
        """Return zeros of the shapes of one silo's data."""


def remote(
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule | None = None,
    *,
    plan: PlanLike,
    channel: Channel,
    begin: str = BEGIN,
) -> Runtime:
    """Return the runtime of a server whose silos are reached over a channel.

    Each run begins by the message ``begin``.
    """
    silos = _Remote(algorithm, schedule, plan, channel, begin)
    if channel.federation.secure_sum:
        check_sums(algorithm, schedule)
    parts = silos.prepared(algorithm.round), schedule, silos.num_silos, silos.transport_of
    loop = PlainLoop(*parts, algorithm.done, algorithm.away)
    if schedule is not None and schedule.by_arrival:
        loop = ArrivalRounds(*parts, algorithm.done, algorithm.away, silos=silos)
    # One round a call: a chunk that is run again after a failure would ask silos again.
    return Runtime(
        silos.init,
        loop.advance,
        silos.single,
        silos.transport_of,
        1,
        silos.single,
        like=silos.like,
        go_on=silos.go_on,
    )


def check_sums(algorithm: FederatedAlgorithm[Any, Any], schedule: Schedule | None) -> None:
    """Raise an error for an algorithm or a schedule in which replies are not added up."""
    for round_ in (*algorithm.opening, algorithm.round):
        for exchange in round_.exchanges:
            check_summed(exchange)
    if schedule is not None and (schedule.by_arrival or schedule.size < LEAST):
        raise SumError(
            "would be over one silo at a time, which is its reply: with secure_sum=True the "
            "schedule must let two or more take part in each step. Nothing was sent. Take "
            "schedule='synchronous', which all take part in.",
            silos=(),
            exchange=algorithm.round.name,
        )


@dataclass(frozen=True, eq=False)
class _Remote:
    """The parts of the runtime; it finds the expected shapes of replies when needed."""

    algorithm: FederatedAlgorithm[Any, Any]
    schedule: Schedule | None
    plan: PlanLike
    channel: Channel
    begin: str
    rounds: dict[ExchangeId, Round] = field(default_factory=dict)
    expectations: dict[ExchangeId, Expected] = field(default_factory=dict)

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
        return PlainLoop(self.prepared(round_), None, self.num_silos, self.transport_of).single

    def prepared(self, round_: Round) -> Round:
        """Return the round in the form in which the server runs it."""
        if self.channel.federation.secure_sum:
            for exchange in round_.exchanges:
                check_summed(exchange)
        self.rounds.update((exchange.id, round_) for exchange in round_.exchanges)
        if any(exchange.stacked for exchange in round_.exchanges):
            return round_
        return compiled_in_parts(round_)

    @cached_property
    def watch_reply(self) -> Callable[[Any], Any] | None:
        """Return the compiled function that reads the watched part of a state off a reply."""
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)

    def expected(self, asked: ExchangeId) -> Expected:
        """Return shapes and checks of the replies to an exchange of a round."""
        if asked not in self.expectations:
            crossed = message_shapes(self.algorithm, (self.rounds[asked],), self.plan.template())
            for exchange, _, reply in crossed:
                self.expectations[exchange.id] = Expected(reply, jax.jit(exchange.checked))
        return self.expectations[asked]

    def transport(
        self, exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        """Ask all participants at once, and check each reply."""
        asked = exchange.id
        last = self.algorithm.round.exchanges[-1].id
        watch_reply = self.watch_reply if asked == last else None
        numbers = np.asarray(who).tolist()
        downs = [
            drop_weak_types(for_participants(exchange.scatter, down, i))
            for i in range(len(numbers))
        ]
        # The replies to a stacked exchange belong to no round, which says their shapes itself.
        if exchange.stacked and self.channel.federation.secure_sum:
            check_summed(exchange)
        if exchange.stacked and asked not in self.expectations:
            reply = declared(exchange).reply
            self.expectations[asked] = Expected(reply, jax.jit(exchange.checked))
        expected = self.expected(asked)
        question = numbers, exchange, noise, downs, silos[0], expected
        try:
            if self.channel.federation.secure_sum:
                total, ok, mark = self.channel.ask_sum(*question)
                # What is watched is known of the sum alone: the same for all.
                common = [watch_reply(total.up) if watch_reply else ()] * len(numbers)
                return Answers(total, ok, (mark,), stacked(common))
            answers, mark = self.channel.ask(*question)
        except SiloAwayError as error:
            # Later exchanges of a round have begun with all silos.
            first = asked == self.algorithm.round.exchanges[0].id
            without, missing = self.algorithm.without, self.channel.federation.missing
            goes_on = without == "exact" or (without == "scaled" and missing == "reweight")
            present = tuple(j for j in numbers if j not in error.silos)
            if not (first and goes_on):
                raise
            raise FewerError(present) from error
        replies, watched = [], []
        for reply in answers:
            replies.append(jax.tree.map(lambda a: a[None], reply))
            watched.append(watch_reply(reply.up) if watch_reply else ())
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, (mark,), stacked(watched))


class UnderWay(NamedTuple):
    """The messages that are under way.

    Attributes
    ----------
    state : State
        The state of the run after the step that sent the last of them.
    arrivals : Arrivals
    numbers : dict of int to int
        The number of the last message to each silo.
    num_asked : int
        How often the channel has asked anything else.
    """

    state: State
    arrivals: Arrivals
    numbers: dict[int, int]
    num_asked: int


@dataclass(eq=False)
class ArrivalRounds(PlainLoop):
    """The loop over rounds of as many steps as there are silos, by the real clock.

    When the reply of a silo arrives, the server makes a step with it alone, and sends that silo its
    next message at once. Between two rounds of a run messages stay under way. From any other state,
    or once silos were asked anything else, all are asked anew, and replies to earlier messages are
    not used.
    """

    silos: _Remote = field(kw_only=True)
    under_way: UnderWay | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        round_ = self.silos.algorithm.round
        (self.exchange,) = round_.exchanges
        self._replayed: Callable[..., Any] = jax.jit(partial(replayed_part, round_))
        self._noise: Callable[[Array], Any] = jax.jit(round_.noise)

    def one_round(
        self, key: Array, state: State, batches: Batches, server_data: ServerData
    ) -> tuple[State, float, RunStatus, Any]:
        """Run one round from a state, and return the state after it."""
        channel, exchange = self.silos.channel, self.exchange
        size, expected = channel.num_silos, self.silos.expected(exchange.id)
        first, rows, loss = int(state.round) * size, list[Any](), 0.0
        before, watch = self.under_way, self.silos.watch_reply
        if before and before.state is state and before.num_asked == channel.num_asked:
            way, numbers = before.arrivals, before.numbers
        else:  # nothing is under way from this state: all are asked
            way, mark = channel.federation.arrivals(exchange.name), state.silos[0]
            key_next = exchange_key(key, first, 0, 1)
            numbers = {j: self._send(way, j, key_next, state.server, mark) for j in range(size)}
        try:
            while len(rows) < size:
                silo, answer = way.next()
                reply = channel.read(silo, exchange, answer, expected)
                stack, who = jax.tree.map(lambda a: a[None], reply), jnp.array([silo])
                noise = self._noise(server_key(exchange_key(key, first + len(rows), 0, 1)))
                replies = (combine(exchange.combine, [stack]),)
                server, info = self._replayed(state.server, noise, who, None, replies)
                if not (reply.ok and info.ok):
                    raise EndedError(state, () if reply.ok else (silo,))
                mark, (carry, change) = state.silos[0].after(silo, numbers[silo]), state.schedule
                change = change.at[silo].set(info.change)
                state = state._replace(server=server, silos=(mark,), schedule=(carry, change))
                watched = () if watch is None else jax.tree.map(lambda a: a[None], watch(reply.up))
                rows.append(jax.tree.map(np.asarray, (info.report, np.array([silo]), watched)))
                loss += float(info.loss)
                key_next = exchange_key(key, first + len(rows), 0, 1)
                numbers[silo] = self._send(way, silo, key_next, server, mark)
        except SilosError as error:
            raise EndedError(state, error.silos) from error
        except (KeyboardInterrupt, ModelError, DataError) as error:
            raise EndedError(state, ()) from error
        state = state._replace(round=state.round + 1)
        self.under_way = UnderWay(state, way, numbers, channel.num_asked)
        return state, loss, RunStatus(True, np.ones(size, bool)), stacked(rows)

    def _send(self, way: Arrivals, silo: int, key: Array, server: Any, mark: Mark) -> int:
        """Send a silo the server's message, and return its number."""
        down = self._replayed(server, self._noise(server_key(key)), jnp.array([silo]), None, ())
        down = drop_weak_types(for_participants(self.exchange.scatter, down, 0))
        return self.silos.channel.send(way, silo, self.exchange, key, down, mark)
