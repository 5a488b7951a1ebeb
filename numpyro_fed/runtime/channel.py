"""The server's connection to silos in processes of their own: it numbers and checks messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.algorithms.base import Down, Exchange, Replies, Reply, Up
from numpyro_fed.errors import DataError, ReplyError, SiloAwayError
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.arrivals import Arrivals
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.runtime.messages import GO_ON, Question, at_silo, pack, read, unpack, write
from numpyro_fed.runtime.stack import Batch, Batches
from numpyro_fed.runtime.sums import Terms, check_group, sum_of, with_terms


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

    def run_of(self, silo: int) -> str:
        """Return the id of a silo's run as text."""
        return _id_of(self.run[silo])

    def after(self, silo: int, number: int) -> Mark:
        """Return the references once a silo's reply to a message has been used."""
        used = np.array(self.used)
        used[silo] = number
        return self._replace(used=used)


class Weights(NamedTuple):
    """The range of weights that a silo's replies may have."""

    least: float
    most: float


class Expected(NamedTuple):
    """The shapes of a reply to an exchange, and the exchange's own check of it."""

    shapes: Reply[Any]
    check: Callable[[Reply[Any]], Reply[Any]]


class Unfinished(NamedTuple):
    """An exchange that some silos have not answered; a sum in it cannot be read yet.

    Attributes
    ----------
    contents : dict of int to str
        What each silo was asked, without the number of the message.
    numbers : dict of int to int
        The numbers of the messages.
    terms : dict of int to Terms
        Of a sum.
    replies : dict of int to bytes
        The replies of the others.
    """

    contents: dict[int, str]
    numbers: dict[int, int]
    terms: dict[int, Terms]
    replies: dict[int, bytes]


class Channel:
    """The server's connection to the silos of one plan: it numbers and checks messages.

    It knows the weights that each silo's replies may have.
    """

    def __init__(
        self,
        federation: Federation,
        num_silos: int,
        weights: Sequence[Weights] | None = None,
        method: str = "",
    ):
        self.federation, self.num_silos, self._method = federation, num_silos, method
        self._unfinished = Unfinished({}, {}, {}, {})
        self._weights = weights or [Weights(0.0, np.finfo(np.float64).max)] * num_silos
        self._numbers: Counter[str] = Counter()
        self.num_asked = 0  # exchanges in which all replies were waited for

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
        run, size = np.frombuffer(self.federation.new_run(), np.uint32), self.num_silos
        questions = [
            Question(name, s, _id_of(run), used, used, at_silo(self._method, j))
            for j, (name, s, used) in enumerate(asked)
        ]
        self._numbers[_id_of(run)] = max(q.number for q in questions)
        messages = [write(arrays or {}, question.head()) for question in questions]
        self.federation.ask(range(size), messages, asked[0][0])
        used = np.array([q.number for q in questions], np.int32)
        return Mark(np.tile(run, (size, 1)), used)

    def ask(
        self,
        who: Sequence[int],
        exchange: Exchange[Any, Down, Up],
        key: Array,
        downs: Sequence[Down],
        mark: Mark,
        expected: Expected,
    ) -> tuple[list[Reply[Up]], Mark]:
        """Return silos' replies to an exchange, checked for shapes and weight, and new marks."""
        answers, mark = self._answers(who, exchange, key, downs, mark)
        return [self.read(j, exchange, answers[j], expected) for j in who], mark

    def ask_sum(
        self,
        who: Sequence[int],
        exchange: Exchange[Any, Down, Up],
        key: Array,
        downs: Sequence[Down],
        mark: Mark,
        expected: Expected,
    ) -> tuple[Replies[Up], Array, Mark]:
        """Return the sum of silos' masked replies to an exchange, each ``ok``, and new marks.

        A sum that was not finished is completed, if the same silos are asked the same again. If
        there are fewer of them, they send the same replies under other masks.
        """
        check_group(who, exchange.name)
        answers, mark = self._answers(who, exchange, key, downs, mark)
        allowed = [self._weights[j] for j in who]
        weights = sum(w.least for w in allowed), sum(w.most for w in allowed)
        replies, ok = sum_of(answers, exchange, expected.shapes, weights)
        return replies, ok, mark

    def _answers(
        self,
        who: Sequence[int],
        exchange: Exchange[Any, Down, Up],
        key: Array,
        downs: Sequence[Down],
        mark: Mark,
    ) -> tuple[dict[int, bytes], Mark]:
        """Return the silos' answers to an exchange, masked or not, and new marks.

        What silos have answered while others were away is not asked again.
        """
        self.num_asked += 1
        number, last = self._next_number(who, mark), self._unfinished
        asked = dict(zip(who, downs, strict=True))
        contents = {
            j: sha256(self._message(j, exchange, key, down, mark, 0)).hexdigest()
            for j, down in asked.items()
        }
        same = {j for j in who if contents[j] == last.contents.get(j)}
        # Under its old number a silo does not compute the reply a second time.
        numbers = {j: last.numbers[j] if j in same else number for j in who}
        terms, answers = last.terms, {j: last.replies[j] for j in same if j in last.replies}
        if self.federation.secure_sum and contents != last.contents:
            terms, answers = self.federation.sum_terms(who), {}
        messages = {
            j: self._message(j, exchange, key, down, mark, numbers[j])
            for j, down in asked.items()
            if j not in answers
        }
        if self.federation.secure_sum:
            messages = {j: with_terms(message, terms[j]) for j, message in messages.items()}
        try:
            found = self.federation.ask(list(messages), list(messages.values()), exchange.name)
        except SiloAwayError as error:
            self._unfinished = Unfinished(contents, numbers, terms, answers | error.replies)
            raise
        self._unfinished = Unfinished({}, {}, {}, {})
        answers |= dict(zip(messages, found, strict=True))
        used = np.array(mark.used)
        used[list(who)] = [numbers[j] for j in who]
        return {j: answers[j] for j in who}, mark._replace(used=used)

    def send(
        self,
        way: Arrivals,
        silo: int,
        exchange: Exchange[Any, Down, Up],
        key: Array,
        down: Down,
        mark: Mark,
    ) -> int:
        """Send a silo a message whose reply is used when it arrives, and return its number."""
        number = self._next_number([silo], mark)
        way.send(silo, self._message(silo, exchange, key, down, mark, number))
        return number

    def _next_number(self, who: Sequence[int], mark: Mark) -> int:
        """Return the number of the next message to silos, above all earlier ones of their runs."""
        runs = {_id_of(mark.run[j]) for j in who}
        number = 1 + max(*(self._numbers[run] for run in runs), *(int(mark.used[j]) for j in who))
        for run in runs:
            self._numbers[run] = number
        return number

    def _message(
        self,
        silo: int,
        exchange: Exchange[Any, Down, Up],
        key: Array,
        down: Down,
        mark: Mark,
        number: int,
    ) -> bytes:
        """Return the message to a silo, from the state that it had after the last used reply."""
        arrays = {"key": jax.random.key_data(key), **pack("down", down)}
        run, used = _id_of(mark.run[silo]), int(mark.used[silo])
        question = Question(*exchange.id, run, number, used, at_silo(self._method, silo))
        return write(arrays, question.head())

    def read(
        self, silo: int, exchange: Exchange[Any, Down, Up], answer: bytes, expected: Expected
    ) -> Reply[Up]:
        """Return a silo's reply, once its shapes, dtypes and weight are those that were agreed.

        A silo's own ``ok`` is not trusted: the reply is checked again here.
        """
        name = exchange.name
        try:
            reply = unpack("reply", expected.shapes, read(answer).arrays)
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
        return expected.check(reply)


def _id_of(run: np.ndarray) -> str:
    """Return the id of a run as text."""
    return np.asarray(run, np.uint32).tobytes().hex()
