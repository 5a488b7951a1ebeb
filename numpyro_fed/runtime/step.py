"""One step of an algorithm: a round that asks, whoever asks the silos and how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from numpyro_fed.algorithms.base import (
    Ask,
    Down,
    Exchange,
    FederatedAlgorithm,
    Info,
    Replies,
    Reply,
    Round,
    Silo,
    Up,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.runtime.stack import ServerData
from numpyro_fed.trees import drop_weak_types

Source = TypeVar("Source", contravariant=True)  # what a runtime draws silos' noise from
Drawn = TypeVar("Drawn")  # the same, where it is kept
Silos = TypeVar("Silos")  # all silos' states, in the form in which a runtime keeps them
Exchanges = Sequence[Exchange[Any, Any, Any]]


class Answers(NamedTuple, Generic[Silos]):
    """A record of what comes of asking the participants.

    Attributes
    ----------
    replies : Replies
        Put together as the exchange asks.
    ok : (k,) bool
        Whether each participant's reply was good, in the order in which the runtime keeps silos.
    silos : Silos
        The silos' states afterwards, in whatever form the runtime keeps them.
    seen : pytree, leaves (k, ...)
        What is watched of the participants' new states.
    """

    replies: Replies[Any]
    ok: Array
    silos: Silos
    seen: Any = ()


class Transport(Protocol[Source, Silos]):
    """A way to reach the silos: all that one runtime has of its own."""

    def __call__(
        self, exchange: Exchange[Any, Down, Up], noise: Source, down: Down, who: Array, silos: Silos
    ) -> Answers[Silos]:
        """Send ``down`` to the silos ``who`` (k,); ``noise`` is whatever the runtime draws from."""


class Noise(NamedTuple, Generic[Drawn]):
    """The server's noise in a round, and for each exchange what silos get theirs from."""

    server: Any
    silos: Sequence[Drawn]


class _Asking(ABC):
    """A party that a round asks: it holds exchanges to their order, and rounds to the rules."""

    def __init__(self, exchanges: Exchanges, who: Array, server_data: ServerData):
        self.who, self.server_data = who, server_data
        self.ok: Array = jnp.array(True)
        self._exchanges, self._asked, self._trace = exchanges, 0, _trace()

    def __call__(self, name: str, down: object) -> Replies[Any]:
        number, names = self._asked, [x.name for x in self._exchanges]
        if names[number : number + 1] != [name]:
            raise TypeError(
                f"a round asks for '{name}' after {number} of its exchanges, which are {names}: "
                "ask for each of them once, in their order."
            )
        if _trace() != self._trace:
            raise TypeError(
                f"a round asks for '{name}' inside of a transformation (cond, scan, grad, vmap or "
                "jit). Silos answer outside of these: ask first, and transform what is done with "
                "the replies; for gradients, pull the replies back by jax.vjp of what is sent."
            )
        self._asked = number + 1
        exchange = self._exchanges[number]
        replies, ok = self.replies(number, exchange, down)
        if not exchange.lenient:
            self.ok = self.ok & ok
        return replies

    @abstractmethod
    def replies(
        self, number: int, exchange: Exchange[Silo, Down, Up], down: Down
    ) -> tuple[Replies[Any], Array]:
        """Return replies to an exchange, and whether all of them can be used."""

    def finish(self, info: Info) -> Info:
        """Return what a round reports, once it has asked for all of its exchanges."""
        if self._asked < len(self._exchanges):
            missed = self._exchanges[self._asked].name
            raise TypeError(f"a round ends without asking for '{missed}', which it declares.")
        return info._replace(ok=info.ok & self.ok)


class _Live(_Asking, Generic[Drawn, Silos]):
    """A party that asks silos, and carries their states from one exchange of a step to the next."""

    def __init__(
        self,
        exchanges: Exchanges,
        reach: Transport[Drawn, Silos],
        noise: Noise[Drawn],
        silos: Silos,
        who: Array,
        server_data: ServerData,
    ):
        super().__init__(exchanges, who, server_data)
        self.silos, self.good, self.seen = silos, jnp.ones(jnp.shape(who), bool), ()
        self._reach, self._noise = reach, noise.silos

    def replies(
        self, number: int, exchange: Exchange[Silo, Down, Up], down: Down
    ) -> tuple[Replies[Any], Array]:
        answers = self._reach(exchange, self._noise[number], down, self.who, self.silos)
        self.silos, self.seen = answers.silos, answers.seen
        self.good = self.good & answers.ok
        return answers.replies, answers.ok.all()


def step(
    round_: Round,
    reach: Transport[Drawn, Silos],
    noise: Noise[Drawn],
    server: object,
    silos: Silos,
    who: Array,
    server_data: ServerData = None,
) -> tuple[Any, Silos, Info, Array, Any]:
    """Run one step of an algorithm.

    Returns
    -------
    server, silos, Info, (k,) bool, seen
        States afterwards; what is reported, ``ok`` only if all replies were; which of the
        participants' replies were good in all exchanges, as the runtime tells it; and what was
        watched after the last.
    """
    ask = _Live(round_.exchanges, reach, noise, silos, who, server_data)
    server, info = round_.run(server, noise.server, ask)
    return server, ask.silos, ask.finish(info), ask.good, ask.seen


class _Asked(BaseException):
    """Carries out of a round what it sends; nothing that ``run`` may catch on its way."""


class _Replay(_Asking):
    """A party that gives a round the replies that are there, and stops it where one is missing."""

    def __init__(
        self,
        exchanges: Exchanges,
        given: Sequence[Replies[Any]],
        who: Array,
        server_data: ServerData,
    ):
        super().__init__(exchanges, who, server_data)
        self._given, self.stopped = given, False

    def replies(
        self, number: int, exchange: Exchange[Silo, Down, Up], down: Down
    ) -> tuple[Replies[Any], Array]:
        if number == len(self._given):
            self.stopped = True
            raise _Asked(down)
        return self._given[number], jnp.asarray(self._given[number].ok).all()


def replayed_part(
    round_: Round,
    server: object,
    noise: object,
    who: Array,
    server_data: ServerData = None,
    replies: Sequence[Replies[Any]] = (),
) -> Any:
    """Run a round on replies that are given: up to the first exchange without, or to its end.

    Returns
    -------
    Down, or (server_state, Info)
        What is sent in that exchange; or what the round returns.
    """
    ask = _Replay(round_.exchanges, replies, who, server_data)
    try:
        after, info = round_.run(server, noise, ask)
    except _Asked as asked:
        return asked.args[0]
    if ask.stopped:  # what it returns must not be taken for a message
        raise TypeError("a round catches every exception around a question: let them pass.")
    return after, ask.finish(info)


def in_parts(round_: Round) -> Round:
    """Return the same round, compiled up to each of its questions.

    For silos that are outside of the program: it is run anew, on the replies so far, for each
    message and for the state afterwards.
    """

    @jax.jit
    def compiled(
        server: object,
        noise: object,
        who: Array,
        server_data: ServerData,
        replies: Sequence[Replies[Any]],
    ) -> Any:
        return replayed_part(round_, server, noise, who, server_data, replies)

    def run(state: object, noise: object, ask: Ask) -> tuple[Any, Info]:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return round_.run(state, noise, ask)
        replies: list[Replies[Any]] = []
        for exchange in round_.exchanges:
            down = compiled(state, noise, ask.who, ask.server_data, replies)
            replies.append(ask(exchange.name, down))
        return compiled(state, noise, ask.who, ask.server_data, replies)

    return replace(round_, run=run, noise=jax.jit(round_.noise))


class MessageShapes(NamedTuple):
    """The shapes of what one exchange sends down to a silo, and of the silo's reply."""

    exchange: Exchange[Any, Any, Any]
    down: Any
    reply: Reply[Any]


def message_shapes(
    algorithm: FederatedAlgorithm[Any, Any],
    rounds: Sequence[Round],
    data: SiloData,
    server_data: ServerData = None,
) -> list[MessageShapes]:
    """Return the shapes of all that crosses in rounds with one silo that holds ``data``.

    The rounds follow each other from the algorithm's first states; nothing is computed. The shapes
    of what the server holds are the algorithm's own where ``server_data`` is not given.
    """
    if server_data is None:
        server_data = algorithm.server_like
    exchanges: list[Exchange[Any, Any, Any]] = []

    def trace(key: Array, data: SiloData, server_data: ServerData) -> list[tuple[Any, Reply[Any]]]:
        server, silo = algorithm.init_server(key), algorithm.init_silo(key, data)
        found: list[tuple[Any, Reply[Any]]] = []

        def reach(
            exchange: Exchange[Silo, Down, Up], noise: Array, down: Down, who: Array, silos: Silo
        ) -> Answers[Silo]:
            sent = slices(exchange.scatter, down, 0)
            reply, after = exchange.visit(exchange.silo_noise(noise, silos), sent, silos, data)
            exchanges.append(exchange)
            found.append((drop_weak_types(sent), reply))
            stack = jax.tree.map(lambda a: jnp.asarray(a)[None], reply)
            return Answers(combine(exchange.combine, [stack]), stack.ok, after)

        for round_ in rounds:
            noise = Noise(round_.noise(key), [key] * len(round_.exchanges))
            server, silo, *_ = step(round_, reach, noise, server, silo, jnp.arange(1), server_data)
        return found

    shapes = jax.eval_shape(trace, jax.random.key(0), data, server_data)
    return [MessageShapes(x, *each) for x, each in zip(exchanges, shapes, strict=True)]


def _trace() -> object:
    """Return what transformation is being traced, to be compared."""
    return get_opaque_trace_state(convention="nnx")
