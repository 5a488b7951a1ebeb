"""One step of an algorithm, with any way to reach the silos.

A round is a function of the server that calls ``ask`` for each of its exchanges. :func:`step` lets
it reach silos through a runtime's :class:`Transport` and carries their states.
:func:`replayed_part` replays replies that are known and stops the round where the next one is
missing: so a round can be compiled although its silos are outside of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import get_opaque_trace_state

from numpyro_fed.basics.trees import Numbers
from numpyro_fed.rounds.exchange import Ask, Down, Exchange, Info, Replies, Round, Up, combine
from numpyro_fed.rounds.keys import exchange_key, silo_key
from numpyro_fed.rounds.silos import Batches, ServerData, Stacks
from numpyro_fed.rounds.stacks import StackedExchange

Source = TypeVar("Source")  # silos' noise, or keys that it is drawn from
States = TypeVar("States")  # all silos' states, in the form in which a runtime keeps them
Exchanges = Sequence[Exchange[Any, Any, Any]]
# Returns a token of the transformation that is being traced; equal tokens, the same one.
_trace_state = partial(get_opaque_trace_state, convention="nnx")


class Answers(NamedTuple, Generic[States]):
    """The replies of one exchange, and the silos' states after it."""

    replies: Replies[Any]  # added up or stacked, as the exchange declares
    ok: Numbers  # (k,) bool, in the order in which the runtime keeps silos
    silos: States  # the silos' states afterwards, in whatever form the runtime keeps them
    watched: Any = ()  # (k, ...): ``FederatedAlgorithm.watch`` of the participants' new states


# A way to send a message to silos and get replies: the only part in which runtimes differ. It is
# given the exchange, silos' noise or keys to draw it from, the message, participants (k,), and all
# silos' states.
Transport = Callable[[Exchange[Any, Any, Any], Source, Any, Array, States], Answers[States]]
# The server's noise in a round, and for each exchange the silos' noise or the keys of it.
RoundNoise = tuple[Any, Sequence[Any]]


class _Asker:
    """The function ``ask`` of a round; it refuses exchanges out of order or in a transformation."""

    def __init__(
        self,
        exchanges: Exchanges,
        who: Array,
        server_data: ServerData,
        answer: Callable[[int, Exchange[Any, Any, Any], Any], Replies[Any]],
    ):
        self.who, self.server_data, self._answer = who, server_data, answer
        self.ok: Array = jnp.array(True)
        self._exchanges, self._num_asked, self._trace_state = exchanges, 0, _trace_state()

    def __call__(self, name: str, down: object) -> Replies[Any]:
        number, names = self._num_asked, [x.name for x in self._exchanges]
        if names[number : number + 1] != [name]:
            raise TypeError(
                f"a round asks for '{name}' after {number} of its exchanges, which are {names}: "
                "ask for each of them once, in their order."
            )
        # Under cond, scan or grad a message would be a tracer of that transformation, which cannot
        # leave the program; and a scan would ask once for all of its steps.
        if _trace_state() != self._trace_state:
            raise TypeError(
                f"a round asks for '{name}' inside of a transformation (cond, scan, grad, vmap or "
                "jit). Silos answer outside of these: ask first, and transform what is done with "
                "the replies; for gradients, pull the replies back by jax.vjp of what is sent."
            )
        self._num_asked = number + 1
        exchange = self._exchanges[number]
        replies = self._answer(number, exchange, down)
        if not exchange.lenient:
            self.ok = self.ok & jnp.asarray(replies.ok).all()
        return replies

    def finish(self, info: Info) -> Info:
        """Return a round's report, with ``ok`` of its replies; refuse a missing exchange."""
        if self._num_asked < len(self._exchanges):
            missed = self._exchanges[self._num_asked].name
            raise TypeError(f"a round ends without asking for '{missed}', which it declares.")
        return info._replace(ok=info.ok & self.ok)


class StepDone(NamedTuple, Generic[States]):
    """The outcome of one step.

    ``info.ok`` is true only if all replies were good. ``good`` (k,) says of which participants they
    were in all exchanges, in the runtime's order.
    """

    server: Any
    silos: States
    info: Info
    good: Array
    watched: Any = ()  # (k, ...): as in ``Answers``


def step(
    round_: Round,
    transport: Transport[Any, States],
    noise: RoundNoise,
    server: object,
    silos: States,
    who: Array,
    server_data: ServerData = None,
) -> StepDone[States]:
    """Run one step of the server with the silos ``who`` (k,)."""
    good: Any = jnp.ones(jnp.shape(who), bool)
    watched: Any = ()

    def answer(number: int, exchange: Exchange[Any, Down, Up], down: Down) -> Replies[Any]:
        nonlocal silos, good, watched
        answers = transport(exchange, noise[1][number], down, who, silos)
        silos, watched, good = answers.silos, answers.watched, good & answers.ok
        return answers.replies

    ask = _Asker(round_.exchanges, who, server_data, answer)
    server, info = round_.run(server, noise[0], ask)
    return StepDone(server, silos, ask.finish(info), good, watched)


class _MessageReady(BaseException):
    """The carrier of a message out of a round; no ``Exception``, which a round may catch."""


def replayed_part(
    round_: Round,
    server: object,
    noise: object,
    who: Array,
    server_data: ServerData = None,
    replies: Sequence[Replies[Any]] = (),
) -> Any:
    """Run a round on known replies, up to the first exchange that has none, or to the end.

    Returns the message of that exchange; or, if no reply is missing, what the round returns.
    """
    stopped = False

    def answer(number: int, exchange: Exchange[Any, Down, Up], down: Down) -> Replies[Any]:
        nonlocal stopped
        if number == len(replies):
            stopped = True
            raise _MessageReady(down)
        return replies[number]

    ask = _Asker(round_.exchanges, who, server_data, answer)
    try:
        after, info = round_.run(server, noise, ask)
    except _MessageReady as ready:
        return ready.args[0]
    # A bare ``except:`` in the round has swallowed the message, and what it returned instead must
    # not be taken for one.
    if stopped:
        raise TypeError("a round catches every exception around a question: let them pass.")
    return after, ask.finish(info)


def compiled_in_parts(round_: Round) -> Round:
    """Return the same round, compiled up to each of its exchanges.

    This is for silos that are outside of the program. A compiled program cannot wait for a reply,
    so the round is run from its beginning for each message, on the replies so far, and once more
    for the new state. Rounds are pure, so that every run computes the same numbers.
    """
    # jit has one program for each number of replies: n exchanges make n + 1 of them.
    compiled: Callable[..., Any] = jax.jit(partial(replayed_part, round_))

    def run(state: object, noise: object, ask: Ask) -> tuple[Any, Info]:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return round_.run(state, noise, ask)
        replies: list[Replies[Any]] = []
        for exchange in round_.exchanges:
            down = compiled(state, noise, ask.who, ask.server_data, replies)
            replies.append(ask(exchange.name, down))
        return compiled(state, noise, ask.who, ask.server_data, replies)

    return replace(round_, run=run, noise=jax.jit(round_.noise))


class Conversation:
    """A plain program's questions to all silos, their states so far, and who was unusable last."""

    def __init__(
        self, transport: Transport[Array, Stacks], key: Array, num_silos: int, silos: Stacks
    ):
        self._transport, self._key = transport, key
        self._who: Any = np.arange(num_silos)
        self.silos, self.number, self.unusable = silos, 0, tuple[int, ...]()

    def __call__(self, exchange: Exchange[Any, Down, Up], down: Down) -> Up:
        """Return the replies' ``up`` as NumPy arrays, added up or gathered."""
        key = exchange_key(self._key, self.number, 0, 1)
        answers = self._transport(exchange, key, down, self._who, self.silos)
        self.silos = answers.silos
        self.number += 1
        self.unusable = tuple(np.flatnonzero(~np.asarray(answers.ok)).tolist())
        up: Up = jax.tree.map(np.asarray, answers.replies.up)
        return up


# The keys (n,) of silos in an exchange, from its key and their numbers.
_keys_of = jax.jit(jax.vmap(silo_key, (None, 0)))


def transport_of_stacks(batches: Batches) -> Transport[Any, Stacks]:
    """Return the transport to silos of this process, whose part of the exchange is stacked."""
    numbers = np.concatenate([np.asarray(b.silos) for b in batches])

    def transport(
        exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        stacked = cast(StackedExchange[Any, Any, Any], exchange)
        replies, after = [], []
        for batch, states in zip(batches, silos, strict=True):
            states = batch.padded(states)
            keys = exchange.silo_noise(noise, states)
            if not isinstance(keys, tuple):
                keys = _keys_of(noise, batch.padded(np.asarray(batch.silos)))
            answer = exchange.silo(keys, down, states, batch.data)
            reply, states = batch.real(answer)
            replies.append(stacked.checked_stack(reply))
            after.append(states)
        order = np.argsort(numbers)
        ok = np.concatenate([reply.ok for reply in replies])[order]
        return Answers(combine(exchange.combine, replies, order), ok, tuple(after))

    return transport
