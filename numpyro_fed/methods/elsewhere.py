"""Runs over silos in processes of their own: agree on a plan, build, and reach silos by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from numpyro_fed.methods.recipe import HasSettings, for_silos
from numpyro_fed.model.facts import Facts, Plan
from numpyro_fed.results.base import Silos
from numpyro_fed.results.built import Built
from numpyro_fed.results.importance import correct_from, importance_correct
from numpyro_fed.results.rows import Fit
from numpyro_fed.runtime.channel import Channel, Send, Weights
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.runtime.messages import DESCRIBE, Question, read, write
from numpyro_fed.runtime.party import PlanLike, Sendable
from numpyro_fed.runtime.remote import remote
from numpyro_fed.runtime.stack import Runtime

Made = TypeVar("Made")


class Agreed(PlanLike, Sendable, Protocol):
    """A plan, of rows or of columns."""


class Agrees(HasSettings, Protocol):
    """A method that makes one plan of all silos' facts, and an algorithm of the plan."""

    def agree(self, facts: Sequence[Facts]) -> Plan: ...

    def build(self, plan: Plan) -> Built: ...


def fit_over(method: Agrees, federation: Federation) -> tuple[Fit, Silos]:
    """Return the fit of a method for the silos of a federation, once all have agreed on a plan."""
    name, texts = federation.describe(for_silos(method, federation.names))
    facts = [Facts.from_json(text) for text in texts]
    # Each time: a variable that the text reads may have changed since the last run.
    plan = method.agree(facts)

    def make(reach: Callable[..., Runtime]) -> Fit:
        built = method.build(plan)
        return Fit(
            plan=plan,
            certify=importance_correct,
            correct_from=correct_from,
            built=built,
            runtime=reach(built.algorithm, built.schedule),
            reach=reach,
            asked_as=name,
        )

    return reached(federation, name, plan, make, [rows_of(f) for f in facts])


def reached(
    federation: Federation,
    name: str,
    plan: Agreed,
    make: Callable[[Callable[..., Runtime]], Made],
    weights: Sequence[Weights] | None = None,
) -> tuple[Made, Silos]:
    """Return the fit of a plan that silos know by a name, made at its first use.

    ``make`` is given the function that makes runtimes, ``weights`` how many rows silos have.
    """

    def made() -> tuple[Made, Silos]:
        channel = Channel(federation, plan.num_silos, weights, name, federation.missing)
        fit = make(partial(remote, plan=plan, channel=channel))
        # Once all is built: where that is refused, silos have built nothing.
        federation.accept(name, plan.to_json())
        return fit, Silos((), (), channel.batches)

    return federation.cached(("fit", name, plan.to_json()), made)


def rows_of(facts: Facts) -> Weights:
    """Return the range in which a silo's number of rows is, by its facts.

    Facts have the number of each plate's rows rounded up to a power of two.
    """
    sizes = dict(facts.sizes)
    rounded = [sizes[plate.name] for plate in facts.plates if not plate.outer]
    # A number that is rounded up to n, a power of two, is above the half of n.
    return Weights(sum(n // 2 + 1 for n in rounded), sum(rounded))


class AgreedAlready:
    """An engine for silos whose facts are known and that have accepted the plan.

    All other messages are carried by ``send(silo, message) -> reply``.
    """

    def __init__(self, facts: Sequence[str], send: Send):
        self._facts, self._send = facts, send

    @property
    def num_silos(self) -> int:
        """Return the number of silos."""
        return len(self._facts)

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply to a message."""
        question = Question.of(read(message).head)
        if question.method and not question.run:
            facts = {"facts": self._facts[silo]} if question.exchange == DESCRIBE else {}
            return write({}, facts)
        return self._send(silo, message)


def agreed_already(method: HasSettings, facts: Sequence[str], send: Send) -> Federation:
    """Return the federation of silos that have a method and its plan, asked one after the other."""
    # No patience: whoever carries bytes himself knows best what to do about those that are lost.
    engine, names = AgreedAlready(facts, send), {"method": method}
    return Federation(engine, names=names, patience=1e-3, at_once=1)
