"""Sums over silos that nobody sees the parts of: their messages, and what the server adds up.

Before the first one silos tell each other public keys through the server. Then a question has
:class:`Terms` in its head, and the reply has, in the place of the numbers of ``Reply.up`` and of
the weight, one array of masked words. ``ok`` stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, ReplyError, SumError
from numpyro_fed.privacy.masks import UNITS, decode
from numpyro_fed.rounds.exchange import Combine, Exchange, Replies, Reply, combine
from numpyro_fed.rounds.messages import pack, read

KEYS = "keys"  # the question for a silo's public keys in a session
PEERS = "peers"  # all silos' public keys
SECURE = "secure_sum"  # the setting that all agree on
SUM = "sum"  # the text in the head of a question to which a masked reply is wanted
MASKED = "masked"  # the array of a masked reply
MIN_SUMMED = 2  # silos of a sum; that of one is its reply
# Silos from which on a sum hides the reply of one from the server and from each of the others.
LEAST_HIDING = 3

HOW_SINGLE = (
    "Three silos or more elsewhere send sums by default: Federation(..., secure_sum=False), or "
    "--no-secure-sum, asks for single replies, if all owners allow it (secure_sum = false in the "
    "policy)."
)


def least_summed(num_silos: int) -> int:
    """Return the least number of silos of a sum, in a plan of so many.

    Sums of the same replies over each two of three silos would tell the reply of each.
    """
    return LEAST_HIDING if num_silos >= LEAST_HIDING else MIN_SUMMED


class SummedGroups:
    """The groups over which a federation and its parts have formed sums of what all were asked.

    What a silo answers may depend on its data and the place asked alone, as in a search or for
    weights. Then a sum over four silos less that over three is the reply of one. So a further group
    is refused if sums over it and those before could be combined to fewer than three silos.

    Groups of rounds that go on without a silo, or that take some silos by a schedule, are not
    counted: each round begins where the last one has led, so that no two ask for the same replies,
    and a fit could not go on. Near the end replies are nearly the same: a silo that comes back to
    others that have settled is seen nearly alone. Its owner forbids that by ``min_silos``.
    """

    def __init__(self, num_silos: int):
        self.num_silos = num_silos
        self._groups = set[frozenset[int]]()

    def add(self, group: Iterable[int]) -> None:
        """Note a group over which a sum is formed."""
        self._groups.add(frozenset(group))

    def hide_with(self, group: Iterable[int]) -> bool:
        """Return whether sums over one more group, with those before, tell of three silos or more.

        Examples
        --------
        >>> from numpyro_fed.rounds.secure_sums import SummedGroups
        >>> groups = SummedGroups(7)
        >>> groups.add([0, 1, 2]), groups.add([3, 4, 5])
        (None, None)
        >>> groups.hide_with([0, 1, 2, 3]), groups.hide_with(range(6)), groups.hide_with(range(7))
        (False, True, False)
        """
        new = frozenset(group)
        if self.num_silos < LEAST_HIDING or new in self._groups:
            return True
        groups = [*self._groups, new]
        member = np.array([[j in one for j in range(self.num_silos)] for one in groups], float)
        rank = np.linalg.matrix_rank(member)
        # A combination of sums is over two silos if without these there is one combination less.
        # Of three silos in the same groups two are never enough.
        _, kind, number = np.unique(member, axis=1, return_inverse=True, return_counts=True)
        rare = np.flatnonzero(number[kind.ravel()] < LEAST_HIDING)
        size = min(len(rare), LEAST_HIDING - 1)
        return all(
            np.linalg.matrix_rank(np.delete(member, few, axis=1)) == rank
            for few in combinations(rare.tolist(), size)
        )


class Terms(NamedTuple):
    """The terms of a sum: whose masks are in it, and which ones."""

    session: str  # the id of the keys, at this silo
    number: int  # in a session numbers grow; a sum that is asked anew has a new one
    group: tuple[int, ...]  # the silos whose replies are added up

    def purpose(self, session: str, exchange: str, asked: str) -> bytes:
        """Return what the masks are for, the same at all silos of the sum.

        ``asked`` is a digest of what all silos are asked alike: masks of silos that were asked
        different things do not cancel. Otherwise a server could ask all silos but one for noise
        that is nearly zero.
        """
        return json.dumps([session, exchange, self.number, self.group, asked]).encode()


def check_summed(exchange: Exchange[Any, Any, Any]) -> None:
    """Raise an error for an exchange whose replies are not added up."""
    if exchange.combine is not Combine.SUM:
        raise SumError(
            "is not enough for it: it needs the reply of each silo by itself, and under secure "
            "sums these are not told. Nothing was sent. Leave it out, or ask for them. "
            f"{HOW_SINGLE}",
            silos=(),
            exchange=exchange.name,
        )


def sum_of(
    answers: Mapping[int, bytes],
    exchange: Exchange[Any, Any, Any],
    shapes: Reply[Any],
    weights: tuple[float, float],
) -> tuple[Replies[Any], Array]:
    """Return the sum of masked replies by silo, of agreed ``shapes``, and each silo's ``ok``.

    The sum of the weights, where the exchange is weighted, must lie in the range ``weights``.
    """
    leaves, who = pack("reply.up", shapes.up), tuple(answers)
    names = sorted(leaves)
    sizes = [int(np.prod(leaves[name].shape)) for name in names]
    size = sum(sizes) + exchange.weighted
    total, ok = np.zeros((size, len(UNITS)), np.uint64), []
    wanted = {MASKED: ((size, len(UNITS)), np.dtype(np.uint64)), "ok": ((), np.dtype(bool))}
    for silo, answer in answers.items():
        wrong = partial(ReplyError, silo=silo, exchange=exchange.name)
        try:
            arrays = read(answer).arrays
        except DataError as error:
            raise wrong(f"is refused: {error}") from error
        came = {name: (a.shape, a.dtype) for name, a in arrays.items()}
        if came != wanted:
            raise wrong(
                f"holds {came}, where {wanted} was agreed for a sum. Both sides must have built "
                "from the same plan, with the same version."
            )
        total += arrays[MASKED]
        ok.append(bool(arrays["ok"]))
    refused = partial(SumError, silos=who, exchange=exchange.name)
    try:
        numbers = decode(total, len(who))
    except DataError as error:
        raise refused(
            f"is refused: {error}. A reply was changed on its way, a silo does not keep to the "
            "protocol, or silos were given different lists of keys, or asked different things."
        ) from error
    weight = float(numbers[-1]) if exchange.weighted else float(len(who))
    if exchange.weighted and not weights[0] <= weight <= weights[1]:
        raise refused(
            f"has weight {weight:g}, where {weights[0]:g} to {weights[1]:g} is allowed by what the "
            "silos have said of their numbers of rows. Their facts must be of the data that they "
            "hold; or use weights='even'."
        )
    # A part of the sum has the shape and dtype that a sum of plain replies has.
    stacks = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), shapes)
    like = jax.eval_shape(lambda stack: combine(Combine.SUM, [stack]), stacks)
    given, found = pack("reply.up", like.up), {}
    parts = np.split(numbers[: sum(sizes)], np.cumsum(sizes)[:-1]) if sizes else []
    for name, part in zip(names, parts, strict=True):
        to = given[name]
        if not jnp.issubdtype(to.dtype, jnp.inexact) and (part != np.rint(part)).any():
            raise refused(
                "has fractions or infinite numbers where whole ones are added up. A silo does not "
                "keep to the protocol."
            )
        found[name] = jnp.asarray(part.reshape(to.shape).astype(to.dtype))
    up = jax.tree.unflatten(jax.tree.structure(like.up), [found[name] for name in given])
    flags = jnp.asarray(ok)
    return Replies(up, flags.all(), jnp.asarray(weight, like.weight.dtype)), flags
