"""The runtime of a server whose silos are in processes of their own.

The server has a :class:`~numpyro_fed.runtime.channel.Mark` in the place of a silo's state: the run,
and the number of the last message whose reply was used. So a result of such a run can be corrected,
evaluated and continued like one in this process, as long as the silos keep the states that it
refers to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from numpyro_fed.errors import SiloAwayError, SumError
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.arrival_rounds import ArrivalRounds
from numpyro_fed.runtime.channel import Channel, Expected, Mark
from numpyro_fed.runtime.combine import combine, for_participants
from numpyro_fed.runtime.host import round_loop, rounds_of, single_with
from numpyro_fed.runtime.messages import BEGIN
from numpyro_fed.runtime.noise import init_keys
from numpyro_fed.runtime.party import PlanLike
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import (
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
    declared,
    message_shapes,
)
from numpyro_fed.runtime.sums import LEAST, check_summed
from numpyro_fed.trees import drop_weak_types


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

    Raises
    ------
    SumError
        If sums alone are to be told, and a round needs the replies of single silos.
    """
    silos = _Remote(algorithm, schedule, plan, channel, begin)
    if channel.secure_sum:
        check_sums(algorithm, schedule)
    if schedule is not None and schedule.by_arrival:
        silos.prepared(algorithm.round)
        one_round = ArrivalRounds(algorithm, channel, silos.expected)
        advance = rounds_of(one_round, silos.num_silos, algorithm.done, logs_visits=True)
    else:
        advance = round_loop(
            silos.prepared(algorithm.round),
            schedule,
            silos.num_silos,
            silos.transport_of,
            algorithm.done,
            algorithm.away,
        )
    # One round a call: a chunk that is run again after a failure would ask silos again.
    return Runtime(
        silos.init,
        advance,
        silos.single,
        1,
        like=silos.like,
        transport=silos.transport_of,
        go_on=silos.go_on,
    )


def check_sums(algorithm: FederatedAlgorithm[Any, Any], schedule: Schedule[Carry] | None) -> None:
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
    schedule: Schedule[Any] | None
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
        return single_with(self.prepared(round_), self.num_silos, self.transport_of)

    def prepared(self, round_: Round) -> Round:
        """Return the round in the form in which the server runs it."""
        if self.channel.secure_sum:
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

    def expected_of_stacked(self, exchange: Exchange[Any, Any, Any]) -> Expected:
        """Return shapes and checks of the replies to an exchange that belongs to no round."""
        if self.channel.secure_sum:
            check_summed(exchange)
        if exchange.id not in self.expectations:
            _, _, reply = declared(exchange)
            self.expectations[exchange.id] = Expected(reply, jax.jit(exchange.checked))
        return self.expectations[exchange.id]

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
        expected = self.expected_of_stacked(exchange) if exchange.stacked else self.expected(asked)
        question = numbers, exchange, noise, downs, silos[0], expected
        try:
            if self.channel.secure_sum:
                total, ok, mark = self.channel.ask_sum(*question)
                # What is watched is known of the sum alone: the same for all.
                common = [watch_reply(total.up) if watch_reply else ()] * len(numbers)
                return Answers(total, ok, (mark,), stacked(common))
            answers, mark = self.channel.ask(*question)
        except SiloAwayError as error:
            # Later exchanges of a round have begun with all silos.
            first = asked == self.algorithm.round.exchanges[0].id
            present = tuple(j for j in numbers if j not in error.silos)
            if not (first and self.channel.goes_on(self.algorithm.without)):
                raise
            raise FewerError(present) from error
        replies, watched = [], []
        for reply in answers:
            replies.append(jax.tree.map(lambda a: a[None], reply))
            watched.append(watch_reply(reply.up) if watch_reply else ())
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, (mark,), stacked(watched))
