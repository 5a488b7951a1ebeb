"""The runtime of a server whose silos are in processes of their own.

The server has a :class:`Mark` in the place of a silo's state: the run, and the number of the last
message whose reply was used. So a result of such a run can be corrected, evaluated and continued
like one in this process, as long as the silos keep the states that it refers to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import (
    DataError,
    ModelError,
    ReplyError,
    SiloAwayError,
    SilosError,
    SumError,
)
from numpyro_fed.basics.files import canonical
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.data.padding import stacked
from numpyro_fed.data.silo_data import SiloData, label
from numpyro_fed.privacy.masks import MAX_PARTIES
from numpyro_fed.rounds.arrivals import Arrivals
from numpyro_fed.rounds.exchange import (
    Down,
    Exchange,
    ExchangeId,
    FederatedAlgorithm,
    Reply,
    Round,
    Up,
    WhenAway,
    combine,
    for_participants,
)
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.keys import exchange_key, init_keys, server_key
from numpyro_fed.rounds.messages import (
    BEGIN,
    GO_ON,
    Question,
    at_silo,
    message_shapes,
    pack,
    read,
    shapes_of_stacked,
    unpack,
    write,
)
from numpyro_fed.rounds.plain_loop import PlainLoop, RoundDone
from numpyro_fed.rounds.runtime import EndedError, RunStatus, Runtime, Single, State
from numpyro_fed.rounds.schedules import Schedule, init_schedule
from numpyro_fed.rounds.secure_sums import (
    HOW_SINGLE,
    SUM,
    Terms,
    check_summed,
    least_summed,
    sum_of,
)
from numpyro_fed.rounds.silos import Batch, Batches, ServerData, Stacks
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.rounds.step import Answers, compiled_in_parts, replayed_part

Weights = tuple[float, float]  # the range of weights that a silo's replies may have
# The shapes of a reply to an exchange, and the exchange's own check of it.
Expected = tuple[Reply[Any], Callable[[Reply[Any]], Reply[Any]]]


class Mark(NamedTuple):
    """The server's references to the states of silos."""

    run: np.ndarray  # (silos, 4) uint32, the id of the run
    used: np.ndarray  # (silos,) int32, the number of each silo's last message whose reply was used

    def run_of(self, silo: int) -> str:
        """Return the id of a silo's run as text."""
        return np.asarray(self.run[silo], np.uint32).tobytes().hex()

    def after(self, numbers: Mapping[int, int]) -> Mark:
        """Return the references once silos' replies to messages of these numbers were used."""
        used = np.array(self.used)
        used[list(numbers)] = list(numbers.values())
        return self._replace(used=used)


class Channel:
    """The server's connection to the silos of one plan: it numbers and checks messages."""

    def __init__(
        self, federation: Federation, num_silos: int, weights: Sequence[Weights] | None, method: str
    ):
        self.federation, self.num_silos, self._method = federation, num_silos, method
        # Of an exchange that some silos have not answered, by silo: digests and numbers of the
        # messages, the terms of a sum, and the replies that came.
        self._unfinished: tuple[
            dict[int, str], dict[int, int], Mapping[int, Terms | None], dict[int, bytes]
        ] = ({}, {}, {}, {})
        self.weights = weights or [(0.0, float(np.finfo(np.float64).max))] * num_silos
        self._numbers: Counter[str] = Counter()
        self.num_asked = 0  # exchanges in which all replies were waited for

    @property
    def batches(self) -> Batches:
        """Return the silos as a batch without data, in whose place their states have marks."""
        return (Batch(jnp.arange(self.num_silos, dtype=jnp.int32), SiloData({}, {}, ())),)

    def begin(
        self, asked: Sequence[tuple[str, str, int]], arrays: Mapping[str, ArrayLike] | None = None
    ) -> Mark:
        """Make every silo begin a new run, and return the marks of its first states.

        ``asked`` is the message by which each begins: its name, settings, and the message used.
        """
        run, size = np.frombuffer(self.federation.new_run(), np.uint32), self.num_silos
        first = Mark(np.tile(run, (size, 1)), np.array([used for *_, used in asked], np.int32))
        id_ = first.run_of(0)
        self._numbers[id_] = int(first.used.max())
        questions = [
            Question(name, settings, id_, used, used, at_silo(self._method, j))
            for j, (name, settings, used) in enumerate(asked)
        ]
        messages = [write(arrays or {}, question.head()) for question in questions]
        self.federation.ask(range(size), messages, asked[0][0])
        return first

    def ask(
        self,
        who: Sequence[int],
        exchange: Exchange[Any, Down, Up],
        key: Array,
        downs: Sequence[Down],
        mark: Mark,
    ) -> tuple[dict[int, bytes], Mark]:
        """Return the silos' answers to an exchange, masked or not, and new marks.

        What silos have answered while others were away is not asked again. A sum that was not
        finished is completed, if the same silos are asked the same again. If there are fewer of
        them, they send the same replies under other masks.
        """
        secure, least = self.federation.secure_sum, least_summed(self.num_silos)
        if secure and not least <= len(who) <= MAX_PARTIES:
            names = self.federation.silo_names
            away = [label(j, names) for j in range(self.num_silos) if j not in who]
            without = f", without {' and '.join(away)}," if 0 < len(away) < 10 else ""
            raise SumError(
                f"would be over {len(who)} silos of {self.num_silos}{without} where secure sums "
                f"are over {least} to {MAX_PARTIES}, so that none tells a reply. Take more into "
                "each step, or wait for those that are away (patience=, or the same script again "
                f"with state=); or ask for single replies. {HOW_SINGLE}",
                silos=tuple(who),
                exchange=exchange.name,
            )
        if secure and len(who) == self.num_silos and not self.federation.hides_with(who):
            raise SumError(
                f"would be over {len(who)} silos: with sums over others, which this federation has "
                "formed before, it would tell the reply of one silo, or the sum over two. Ask the "
                "same silos as before, by Federation.of([...]); or ask for single replies. "
                f"{HOW_SINGLE}",
                silos=tuple(who),
                exchange=exchange.name,
            )
        self.num_asked += 1
        number, (before, sent, sums, come) = self.next_number(who, mark), self._unfinished
        asked = {
            j: partial(self.message, j, exchange, key, down, mark)
            for j, down in zip(who, downs, strict=True)
        }
        contents = {j: sha256(message()).hexdigest() for j, message in asked.items()}
        same = {j for j in who if contents[j] == before.get(j)}
        # Under its old number a silo does not compute the reply a second time.
        numbers = {j: sent[j] if j in same else number for j in who}
        terms: Mapping[int, Terms | None] = {j: sums[j] if j in same else None for j in who}
        answers = {j: come[j] for j in same if j in come}
        if secure and contents != before:
            terms, answers = self.federation.sum_terms(who), {}
        messages = {j: asked[j](numbers[j], terms[j]) for j in who if j not in answers}
        try:
            found = self.federation.ask(list(messages), list(messages.values()), exchange.name)
        except SiloAwayError as error:
            self._unfinished = contents, numbers, terms, answers | error.replies
            raise
        self._unfinished = {}, {}, {}, {}
        answers |= dict(zip(messages, found, strict=True))
        return {j: answers[j] for j in who}, mark.after(numbers)

    def next_number(self, who: Sequence[int], mark: Mark) -> int:
        """Return the number of the next message to silos, above all earlier ones of their runs."""
        runs = {mark.run_of(j) for j in who}
        number = 1 + max(*(self._numbers[run] for run in runs), *(int(mark.used[j]) for j in who))
        for run in runs:
            self._numbers[run] = number
        return number

    def message(
        self,
        silo: int,
        exchange: Exchange[Any, Down, Up],
        key: Array,
        down: Down,
        mark: Mark,
        number: int = 0,
        terms: Terms | None = None,
    ) -> bytes:
        """Return the message to a silo, from the state that it had after the last used reply."""
        arrays = {"key": jax.random.key_data(key), **pack("down", down)}
        run, used = mark.run_of(silo), int(mark.used[silo])
        question = Question(*exchange.id, run, number, used, at_silo(self._method, silo))
        return write(arrays, question.head() | ({SUM: canonical(terms)} if terms else {}))

    def read(
        self, silo: int, exchange: Exchange[Any, Down, Up], answer: bytes, expected: Expected
    ) -> Reply[Up]:
        """Return a silo's reply, once its shapes, dtypes and weight are those that were agreed.

        A silo's own ``ok`` is not trusted: the reply is checked again here.
        """
        shapes, check = expected
        refused = partial(ReplyError, silo=silo, exchange=exchange.name)
        try:
            reply = unpack("reply", shapes, read(answer).arrays)
        except DataError as error:
            raise refused(f"is refused: {error}") from error
        if exchange.weighted:
            (least, most), weight = self.weights[silo], float(np.asarray(reply.weight))
            if not least <= weight <= most:
                raise refused(
                    f"has weight {weight:g}, where {least:g} to {most:g} is allowed by what the "
                    "silo has said of its number of rows. Its facts must be of the data that it "
                    "holds; or use weights='even'."
                )
        return check(reply)


def remote_runtime(
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule | None = None,
    *,
    template: Callable[[], SiloData],
    channel: Channel,
    begin: str = BEGIN,
) -> Runtime:
    """Return the runtime of a server whose silos are reached over a channel.

    ``template`` returns zeros of the shapes of one silo's data. Each run begins by the message
    ``begin``.
    """
    silos, federation = _Remote(algorithm, schedule, template, channel, begin), channel.federation
    for round_ in (*algorithm.opening, algorithm.round):
        prepared = silos.prepared(round_)
    least = least_summed(channel.num_silos)
    at_once = least if schedule is None else 1 if schedule.by_arrival else schedule.size
    if federation.secure_sum and at_once < least:
        few = "one silo" if at_once == 1 else f"{at_once} silos"
        raise SumError(
            f"would be over {few} at a time: under secure sums {least} or more must take part in "
            "each step, so that none tells a reply. Nothing was sent. Take schedule='synchronous', "
            f"which all take part in; or ask for single replies. {HOW_SINGLE}",
            silos=(),
            exchange=algorithm.round.name,
        )
    goes_on = algorithm.when_away is WhenAway.GO_ON
    if algorithm.when_away is WhenAway.SCALE:
        goes_on = federation.missing == "reweight"
    parts = prepared, schedule, silos.transport_of, algorithm.done, algorithm.watched_away
    loop = PlainLoop(*parts, goes_on)
    if schedule is not None and schedule.by_arrival:
        loop = ArrivalRounds(*parts, silos=silos)
    # One round a call: a chunk that is run again after a failure would ask silos again.
    return Runtime(
        silos.init,
        loop.advance,
        silos.single,
        silos.transport_of,
        1,
        like=silos.like,
        go_on=silos.go_on,
    )


@dataclass(frozen=True, eq=False)
class _Remote:
    """The parts of the runtime; it finds the expected shapes of replies when needed."""

    algorithm: FederatedAlgorithm[Any, Any]
    schedule: Schedule | None
    template: Callable[[], SiloData]
    channel: Channel
    begin: str
    rounds: dict[ExchangeId, Round] = field(default_factory=dict)
    expectations: dict[ExchangeId, Expected] = field(default_factory=dict)

    def init(self, key: Array, batches: Batches) -> State:
        """Return the first state of a run, which silos begin with it."""
        state, bits = self.like(key, batches), jax.random.key_data(init_keys(key)[1])
        asked = [(self.begin, "", 0)] * self.channel.num_silos
        return state._replace(silos=(self.channel.begin(asked, {"key": bits}),))

    def like(self, key: Array, batches: Batches) -> State:
        """Return a state for its shapes alone; silos begin nothing."""
        size = self.channel.num_silos
        mark = Mark(np.zeros((size, 4), np.uint32), np.zeros(size, np.int32))
        server = jax.jit(self.algorithm.init_server)(init_keys(key)[0])
        carry = init_schedule(self.schedule, key, size)
        server, carry = drop_weak_types((server, carry))
        return State(jnp.zeros((), jnp.int32), server, (mark,), carry)

    def go_on(self, before: State) -> State:
        """Return the state of a new run that goes on where another one has ended."""
        mark = before.silos[0]
        asked = [(GO_ON, mark.run_of(j), int(used)) for j, used in enumerate(mark.used)]
        return before._replace(silos=(self.channel.begin(asked),))

    def transport_of(self, batches: Batches) -> Callable[..., Answers[Stacks]]:
        """Return the transport over the channel."""
        return self.transport

    def single(self, round_: Round) -> Single:
        """Return a single round with all silos."""
        return PlainLoop(self.prepared(round_), None, self.transport_of).single

    def prepared(self, round_: Round) -> Round:
        """Return the round in the form in which the server runs it."""
        if self.channel.federation.secure_sum:
            for exchange in round_.exchanges:
                check_summed(exchange)
        self.rounds.update((exchange.id, round_) for exchange in round_.exchanges)
        return compiled_in_parts(round_) if round_.is_run else round_

    @cached_property
    def watch_reply(self) -> Callable[[Any], Any] | None:
        """Return the compiled function that reads the watched part of a state off a reply."""
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)

    def expected(self, exchange: Exchange[Any, Any, Any]) -> Expected:
        """Return shapes and checks of the replies to an exchange, of a round or a stacked one."""
        asked = exchange.id
        if asked not in self.expectations:
            # The replies to a stacked exchange belong to no round, which says their shapes itself.
            if isinstance(exchange, StackedExchange):
                crossed = [shapes_of_stacked(exchange)]
            else:
                crossed = message_shapes(self.algorithm, (self.rounds[asked],), self.template())
            for one, _, reply in crossed:
                self.expectations[one.id] = reply, jax.jit(one.checked)
        return self.expectations[asked]

    def transport(
        self, exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        """Ask all participants at once, and check each reply."""
        last = exchange.id == self.algorithm.round.exchanges[-1].id
        watch = self.watch_reply if last else None
        secure, numbers = self.channel.federation.secure_sum, np.asarray(who).tolist()
        if isinstance(exchange, StackedExchange) and secure:
            check_summed(exchange)
        downs = [
            drop_weak_types(for_participants(exchange.scatter, down, i))
            for i in range(len(numbers))
        ]
        expected = self.expected(exchange)
        answers, mark = self.channel.ask(numbers, exchange, noise, downs, silos[0])
        if secure:
            least, most = map(sum, zip(*(self.channel.weights[j] for j in numbers), strict=True))
            total, ok = sum_of(answers, exchange, expected[0], (least, most))
            # What is watched is known of the sum alone: the same for all.
            watched = [watch(total.up) if watch else ()] * len(numbers)
            return Answers(total, ok, (mark,), stacked(watched))
        each = [self.channel.read(j, exchange, answers[j], expected) for j in numbers]
        watched = [watch(reply.up) if watch else () for reply in each]
        replies = [jax.tree.map(lambda a: a[None], reply) for reply in each]
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, (mark,), stacked(watched))


@dataclass(eq=False)
class ArrivalRounds(PlainLoop):
    """The loop over rounds of as many steps as there are silos, by the real clock.

    When the reply of a silo arrives, the server makes a step with it alone, and sends that silo its
    next message at once. Between two rounds of a run messages stay under way. From any other state,
    or once silos were asked anything else, all are asked anew, and replies to earlier messages are
    not used.
    """

    silos: _Remote = field(kw_only=True)
    # Between two rounds: the state after the step that sent the last message, how often the channel
    # had asked anything else, the messages under way, and the number of the last to each silo.
    under_way: tuple[State, int, Arrivals, dict[int, int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        round_ = self.silos.algorithm.round
        (self.exchange,) = round_.exchanges
        self._replayed: Callable[..., Any] = jax.jit(partial(replayed_part, round_))
        self._noise: Callable[[Array], Any] = jax.jit(round_.noise)

    def one_round(
        self, key: Array, state: State, batches: Batches, server_data: ServerData
    ) -> RoundDone:
        """Run one round from a state, as replies arrive."""
        channel, exchange = self.silos.channel, self.exchange
        size, expected = channel.num_silos, self.silos.expected(exchange)
        first, rows, loss = int(state.round) * size, list[Any](), 0.0
        before, watch = self.under_way, self.silos.watch_reply
        key_step = exchange_key(key, first, 0, 1)
        if before and before[0] is state and before[1] == channel.num_asked:
            way, numbers = before[2:]
        else:  # nothing is under way from this state: all are asked
            way, mark = channel.federation.arrivals(exchange.name), state.silos[0]
            numbers = {j: self._send(way, j, key_step, state.server, mark) for j in range(size)}
        try:
            while len(rows) < size:
                silo, answer = way.next()
                reply = channel.read(silo, exchange, answer, expected)
                stack, who = jax.tree.map(lambda a: a[None], reply), jnp.array([silo])
                noise = self._noise(server_key(key_step))
                replies = (combine(exchange.combine, [stack]),)
                server, info = self._replayed(state.server, noise, who, None, replies)
                if not (reply.ok and info.ok):
                    raise EndedError(state, () if reply.ok else (silo,))
                mark = state.silos[0].after({silo: numbers[silo]})
                state = state._replace(server=server, silos=(mark,))
                watched = () if watch is None else jax.tree.map(lambda a: a[None], watch(reply.up))
                rows.append(jax.tree.map(np.asarray, (info.report, np.array([silo]), watched)))
                loss += float(info.loss)
                key_step = exchange_key(key, first + len(rows), 0, 1)
                numbers[silo] = self._send(way, silo, key_step, server, mark)
        except SilosError as error:
            raise EndedError(state, error.silos) from error
        except (KeyboardInterrupt, ModelError, DataError) as error:
            raise EndedError(state, ()) from error
        state = state._replace(round=state.round + 1)
        self.under_way = state, channel.num_asked, way, numbers
        return state, loss, RunStatus(True, np.ones(size, bool)), stacked(rows)

    def _send(self, way: Arrivals, silo: int, key: Array, server: object, mark: Mark) -> int:
        """Send a silo the server's message, and return its number."""
        exchange, channel = self.exchange, self.silos.channel
        down = self._replayed(server, self._noise(server_key(key)), jnp.array([silo]), None, ())
        down = drop_weak_types(for_participants(exchange.scatter, down, 0))
        number = channel.next_number([silo], mark)
        way.send(silo, channel.message(silo, exchange, key, down, mark, number))
        return number
