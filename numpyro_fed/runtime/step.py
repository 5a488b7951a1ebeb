"""One step of an algorithm: a round that asks, whoever asks the silos and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Replies,
    Reply,
    Round,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.trees import strong


class Answers(NamedTuple):
    """What comes of asking the participants.

    Attributes
    ----------
    replies : Replies
        Put together as the exchange asks.
    ok : (k,) bool
        Whether each participant's reply was good, in the order in which the runtime keeps silos.
    silos : Any
        The silos' states afterwards, in whatever form the runtime keeps them.
    seen : pytree, leaves (k, ...)
        What is watched of the participants' new states.
    """

    replies: Replies
    ok: Array
    silos: Any
    seen: Any = ()


class Reach(Protocol):
    """How a runtime reaches the silos: all that one runtime has of its own."""

    def __call__(
        self, exchange: Exchange, noise: Any, down: Any, who: Array, silos: Any
    ) -> Answers:
        """Send ``down`` to the silos ``who`` (k,); ``noise`` is whatever the runtime draws from."""
        ...


class Noise(NamedTuple):
    """The server's noise in a round, and for each exchange what silos get theirs from."""

    server: Any
    silos: Sequence[Any]


class _Asking:
    """What a round asks by: it holds exchanges to their order, and rounds to what is allowed."""

    def __init__(self, exchanges: Sequence[Exchange], who: Array, server_data: Any):
        self.who, self.server_data = who, server_data
        self.ok: Any = jnp.array(True)
        self._exchanges, self._asked, self._trace = exchanges, 0, _trace()

    def __call__(self, name: str, down: Any) -> Replies:
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

    def replies(self, number: int, exchange: Exchange, down: Any) -> tuple[Replies, Any]:
        """Return replies to an exchange, and whether all of them can be used."""
        raise NotImplementedError

    def finish(self, info: Info) -> Info:
        """Return what a round reports, once it has asked for all of its exchanges."""
        if self._asked < len(self._exchanges):
            missed = self._exchanges[self._asked].name
            raise TypeError(f"a round ends without asking for '{missed}', which it declares.")
        return info._replace(ok=info.ok & self.ok)


class _Live(_Asking):
    """Asks silos, and carries their states from one exchange of a step to the next."""

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        reach: Reach,
        noise: Noise,
        silos: Any,
        who: Array,
        server_data: Any,
    ):
        super().__init__(exchanges, who, server_data)
        self.silos, self.good, self.seen = silos, jnp.ones(jnp.shape(who), bool), ()
        self._reach, self._noise = reach, noise.silos

    def replies(self, number: int, exchange: Exchange, down: Any) -> tuple[Replies, Any]:
        answers = self._reach(exchange, self._noise[number], down, self.who, self.silos)
        self.silos, self.seen = answers.silos, answers.seen
        self.good = self.good & answers.ok
        return answers.replies, answers.ok.all()


def step(
    round_: Round,
    reach: Reach,
    noise: Noise,
    server: Any,
    silos: Any,
    who: Array,
    server_data: Any = None,
) -> tuple[Any, Any, Info, Array, Any]:
    """Run one step.

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
    """Gives a round the replies that are there, and stops it where the next one is missing."""

    def __init__(
        self, exchanges: Sequence[Exchange], given: Sequence[Replies], who: Array, server_data: Any
    ):
        super().__init__(exchanges, who, server_data)
        self._given, self.stopped = given, False

    def replies(self, number: int, exchange: Exchange, down: Any) -> tuple[Replies, Any]:
        if number == len(self._given):
            self.stopped = True
            raise _Asked(down)
        return self._given[number], jnp.asarray(self._given[number].ok).all()


def part(
    round_: Round,
    server: Any,
    noise: Any,
    who: Array,
    server_data: Any = None,
    replies: Sequence[Replies] = (),
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
    def compiled(server: Any, noise: Any, who: Array, server_data: Any, replies: Any) -> Any:
        return part(round_, server, noise, who, server_data, replies)

    def run(state: Any, noise: Any, ask: Ask) -> tuple[Any, Info]:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return round_.run(state, noise, ask)
        replies: list[Replies] = []
        for exchange in round_.exchanges:
            down = compiled(state, noise, ask.who, ask.server_data, replies)
            replies.append(ask(exchange.name, down))
        return compiled(state, noise, ask.who, ask.server_data, replies)

    return replace(round_, run=run, noise=jax.jit(round_.noise))


class Crossed(NamedTuple):
    """Shapes of what one exchange sends down to a silo, and of the silo's reply."""

    exchange: Exchange
    down: Any
    reply: Reply


def crossed(
    algorithm: FederatedAlgorithm,
    rounds: Sequence[Round],
    data: SiloData,
    server_data: Any = None,
) -> list[Crossed]:
    """Return the shapes of all that crosses in rounds with one silo that holds ``data``.

    The rounds follow each other from the algorithm's first states; nothing is computed. The shapes
    of what the server holds are the algorithm's own where ``server_data`` is not given.
    """
    if server_data is None:
        server_data = algorithm.server_like
    exchanges: list[Exchange] = []

    def trace(key: Array, data: SiloData, server_data: Any) -> list[tuple[Any, Reply]]:
        server, silo = algorithm.init_server(key), algorithm.init_silo(key, data)
        found: list[tuple[Any, Reply]] = []

        def reach(exchange: Exchange, noise: Any, down: Any, who: Array, silos: Any) -> Answers:
            sent = slices(exchange.scatter, down, 0)
            reply, after = exchange.visit(exchange.silo_noise(noise, silos), sent, silos, data)
            exchanges.append(exchange)
            found.append((strong(sent), reply))
            stack = jax.tree.map(lambda a: jnp.asarray(a)[None], reply)
            return Answers(combine(exchange.combine, [stack]), stack.ok, after)

        for round_ in rounds:
            noise = Noise(round_.noise(key), [key] * len(round_.exchanges))
            server, silo, *_ = step(round_, reach, noise, server, silo, jnp.arange(1), server_data)
        return found

    shapes = jax.eval_shape(trace, jax.random.key(0), data, server_data)
    return [Crossed(x, *each) for x, each in zip(exchanges, shapes, strict=True)]


def _trace() -> Any:
    """What transformation is being traced, to be compared."""
    return get_opaque_trace_state(convention="nnx")
