"""One step of an algorithm: its exchanges, one after the other, whoever asks the silos and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies


class Answers(NamedTuple):
    """What comes of asking the participants.

    Attributes
    ----------
    replies : Replies
        Put together as the exchange asks.
    ok : (k,) bool
        Whether each participant's reply was good, in the order in which ``ask`` keeps silos.
    silos : Any
        The silos' states afterwards, in whatever form ``ask`` keeps them.
    seen : pytree, leaves (k, ...)
        What is watched of the participants' new states.
    """

    replies: Replies
    ok: Array
    silos: Any
    seen: Any = ()


class Ask(Protocol):
    """How a runtime reaches the silos: all that one runtime has of its own."""

    def __call__(
        self, exchange: Exchange, noise: Any, down: Any, who: Array, silos: Any
    ) -> Answers:
        """Send ``down`` to the silos ``who`` (k,); ``noise`` is whatever the runtime draws from."""
        ...


class Noise(NamedTuple):
    """For one exchange: the server's noise, and what silos get theirs from."""

    server: Any
    silos: Any


def step(
    exchanges: Sequence[Exchange],
    ask: Ask,
    noise: Sequence[Noise],
    server: Any,
    silos: Any,
    who: Array,
    server_data: Any = None,
) -> tuple[Any, Any, Info, Array, Any]:
    """Run the exchanges of one step.

    Returns
    -------
    server, silos, Info, (k,) bool, seen
        States afterwards, what the exchanges report together (:func:`fold`), which of the
        participants' replies were good in all of them, as ``ask`` tells it, and what was watched
        after the last.
    """
    infos, good, seen = [], jnp.ones(jnp.shape(who), bool), ()
    for exchange, drawn in zip(exchanges, noise, strict=True):
        down, memo = exchange.broadcast(drawn.server, server, who, server_data)
        answers = ask(exchange, drawn.silos, down, who, silos)
        server, info = exchange.server(server, memo, answers.replies, server_data)
        if not exchange.lenient:
            info = info._replace(ok=info.ok & answers.ok.all())
        silos, seen, good = answers.silos, answers.seen, good & answers.ok
        infos.append(info)
    return server, silos, fold(infos), good, seen


def fold(infos: Sequence[Info]) -> Info:
    """What the exchanges of one step report, as one: it may be kept if each of them may.

    Losses and changes add up; reports are a tuple by exchange where there are several.
    """
    if len(infos) == 1:
        return infos[0]
    loss = sum((info.loss for info in infos[1:]), infos[0].loss)
    change = sum((info.change for info in infos[1:]), infos[0].change)
    ok = jnp.stack([jnp.asarray(info.ok) for info in infos]).all()
    return Info(loss, ok, change, tuple(info.report for info in infos))
