"""Messages of sums that nobody sees: the server learns the sum of replies, and no reply.

Before the first sum, silos tell each other public keys through the server (:data:`KEYS`,
:data:`PEERS`). Then a question has :class:`Terms` in its head, and the reply has, in the place of
the numbers of ``Reply.up`` and of the weight, one array of masked words. ``ok`` stays as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Combine, Exchange, Replies, Reply
from numpyro_fed.errors import DataError, ReplyError, SumError
from numpyro_fed.privacy.fixed_point import MAX_PARTIES, decode, encode
from numpyro_fed.records import canonical
from numpyro_fed.runtime.messages import Question, pack, read, write
from numpyro_fed.runtime.step import combine

KEYS = "keys"  # the question for a silo's public keys in a session
PEERS = "peers"  # all silos' public keys
SECURE = "secure_sum"  # the setting that all agree on
SUM = "sum"  # the text in the head of a question to which a masked reply is wanted
MASKED = "masked"  # the array of a masked reply
LEAST = 2  # silos of a sum; that of one is its reply


class Terms(NamedTuple):
    """The terms of a sum: whose masks are in it, and which ones.

    Attributes
    ----------
    session : str
        The id of the keys, at this silo.
    number : int
        The number of the sum. In a session numbers grow; a sum that is asked anew has a new one.
    group : tuple of int
        The silos whose replies are added up.
    """

    session: str
    number: int
    group: tuple[int, ...]

    def purpose(self, session: str, exchange: str, asked: str) -> bytes:
        """Return what the masks are for, the same at all silos of the sum.

        ``asked`` is :func:`asked_of_all`: masks of silos that were asked different things do not
        cancel. Otherwise a server could ask all silos but one for noise that is nearly zero.
        """
        return json.dumps([session, exchange, self.number, self.group, asked]).encode()


def asked_of_all(
    plan: str, question: Question, message: bytes, scatter: object, down: object
) -> str:
    """Return a digest of all that the silos of a sum are asked alike.

    It is of the accepted plan, the question, and the arrays of ``message`` that do not differ
    between silos (``scatter``); ``down`` are the shapes of all arrays.
    """
    differs = jax.tree.map(lambda own, part: jax.tree.map(lambda _: own, part), scatter, down)
    own = {name for name, is_own in pack("down", differs).items() if is_own}
    digest = hashlib.sha256(json.dumps([plan, question.exchange, question.settings]).encode())
    for name, array in sorted(read(message).arrays.items()):
        if name not in own:
            digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def with_terms(message: bytes, terms: Terms) -> bytes:
    """Return a question with the terms of a sum in its head."""
    head, arrays = read(message)
    return write(arrays, {**head, SUM: canonical(terms)})


def without_terms(head: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the question as it is asked without a sum."""
    return write(arrays, {name: text for name, text in head.items() if name != SUM})


def masked_reply(
    reply: bytes, parties: int, weighted: bool, mask: Callable[[np.ndarray], np.ndarray]
) -> bytes:
    """Return a silo's reply in the form in which it leaves the silo: its numbers under masks.

    ``reply`` is the one to the question without a sum, of which ``parties`` are added up. Where
    replies are ``weighted``, real numbers are multiplied by the weight, which is added up as well.
    """
    _, arrays = read(reply)
    names = sorted(name for name in arrays if name.startswith("reply.up"))
    # In double precision, in which a product is not rounded.
    given = (arrays[name] for name in names)
    parts = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in given]
    if weighted:
        weight = arrays["reply.weight"].astype(np.float64)
        parts = [a * weight if a.dtype.kind == "f" else a for a in parts]
        parts.append(weight)
    numbers = np.concatenate([np.zeros(0), *map(np.ravel, parts)])
    return write({MASKED: mask(encode(numbers, parties)), "ok": arrays["reply.ok"]})


def check_group(who: Sequence[int], exchange: str) -> None:
    """Raise an error for too few or too many silos of a sum."""
    if not LEAST <= len(who) <= MAX_PARTIES:
        raise SumError(
            f"would be over {len(who)} silos, where sums over {LEAST} to {MAX_PARTIES} are formed "
            "under secure_sum=True. Take more silos into each step, or wait for those that are "
            "away.",
            silos=tuple(who),
            exchange=exchange,
        )


def check_summed(exchange: Exchange[Any, Any, Any]) -> None:
    """Raise an error for an exchange whose replies are not added up."""
    if exchange.combine is not Combine.SUM:
        raise SumError(
            "is not enough for it: it needs the reply of each silo by itself, and with "
            "secure_sum=True sums alone are told. Nothing was sent. Leave it out, or ask it over a "
            "Federation without secure_sum, if the silos' owners agree.",
            silos=(),
            exchange=exchange.name,
        )


def sum_of(
    answers: Mapping[int, bytes],
    exchange: Exchange[Any, Any, Any],
    shapes: Reply[Any],
    weights: tuple[float, float],
) -> tuple[Replies[Any], Array]:
    """Return the sum of masked replies, and each silo's ``ok``.

    Parameters
    ----------
    answers : dict of int to bytes
        The masked replies by silo, in the order of the participants.
    exchange : Exchange
    shapes : Reply
        The agreed shapes and dtypes of one reply.
    weights : (float, float)
        The range of the sum of the weights, where the exchange is weighted.
    """
    leaves = pack("reply.up", shapes.up)
    names = sorted(leaves)
    sizes = [int(np.prod(leaves[name].shape)) for name in names]
    size, who = sum(sizes) + exchange.weighted, tuple(answers)
    total, ok = np.zeros((size, 2), np.uint64), []
    for silo, answer in answers.items():
        words, good = _read_masked(answer, size, silo, exchange.name)
        total += words
        ok.append(good)
    try:
        numbers = decode(total, len(who))
    except DataError as error:
        raise SumError(
            f"is refused: {error}. A reply was changed on its way, a silo does not keep to the "
            "protocol, or silos were given different lists of keys, or asked different things.",
            silos=who,
            exchange=exchange.name,
        ) from error
    weight = float(numbers[-1]) if exchange.weighted else float(len(who))
    if exchange.weighted and not weights[0] <= weight <= weights[1]:
        raise SumError(
            f"has weight {weight:g}, where {weights[0]:g} to {weights[1]:g} is allowed by what the "
            "silos have said of their numbers of rows. Their facts must be of the data that they "
            "hold; or use weights='even'.",
            silos=who,
            exchange=exchange.name,
        )
    # A part of the sum has the shape and dtype that a sum of plain replies has.
    stacks = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), shapes)
    like = jax.eval_shape(lambda stack: combine(Combine.SUM, [stack]), stacks)
    given = pack("reply.up", like.up)
    parts = np.split(numbers[: sum(sizes)], np.cumsum(sizes)[:-1]) if sizes else []
    found = {}
    for name, part in zip(names, parts, strict=True):
        to = given[name]
        if not jnp.issubdtype(to.dtype, jnp.inexact) and (part != np.rint(part)).any():
            raise SumError(
                "has fractions or infinite numbers where whole ones are added up. A silo does not "
                "keep to the protocol.",
                silos=who,
                exchange=exchange.name,
            )
        found[name] = jnp.asarray(part.reshape(to.shape).astype(to.dtype))
    up = jax.tree.unflatten(jax.tree.structure(like.up), [found[name] for name in given])
    flags = jnp.asarray(ok)
    return Replies(up, flags.all(), jnp.asarray(weight, like.weight.dtype)), flags


def _read_masked(answer: bytes, size: int, silo: int, exchange: str) -> tuple[np.ndarray, bool]:
    """Return the words of a masked reply, and whether its numbers can be used."""
    try:
        arrays = read(answer).arrays
    except DataError as error:
        raise ReplyError(f"is refused: {error}", silo=silo, exchange=exchange) from error
    came = {name: (a.shape, a.dtype) for name, a in arrays.items()}
    wanted = {MASKED: ((size, 2), np.dtype(np.uint64)), "ok": ((), np.dtype(bool))}
    if came != wanted:
        raise ReplyError(
            f"holds {came}, where {wanted} was agreed for a sum. Both sides must have built from "
            "the same plan, with the same version.",
            silo=silo,
            exchange=exchange,
        )
    return arrays[MASKED], bool(arrays["ok"])
