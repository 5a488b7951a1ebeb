"""Runs over silos in processes of their own: agree on a plan, build, and reach silos by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from numpyro_fed.errors import DataError
from numpyro_fed.methods.recipe import HasSettings, for_silos
from numpyro_fed.model.facts import Facts, Plan
from numpyro_fed.results.base import Silos
from numpyro_fed.results.built import Built
from numpyro_fed.results.rows import Fit, Result
from numpyro_fed.runtime.channel import Channel, Weights
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.runtime.remote import PlanLike, remote
from numpyro_fed.runtime.stack import Runtime

Made = TypeVar("Made")


class Agreed(PlanLike, Protocol):
    """A plan, of rows or of columns."""

    def to_json(self) -> str:
        """Return the plan as JSON text."""


class Agrees(HasSettings, Protocol):
    """A method that makes one plan of all silos' facts, and an algorithm of the plan."""

    def agree(self, facts: Sequence[Facts]) -> Plan: ...

    def build(self, plan: Plan) -> Built: ...


def fit_over(method: Agrees, federation: Federation) -> tuple[Fit, Silos]:
    """Return the fit of a method for the silos of a federation, once all have agreed on a plan."""
    if isinstance(getattr(method, "start", None), Result):
        raise DataError(
            "start= is a result of silos in this process, whose guides it takes over. Over a "
            "Federation begin at the mode (start='mode'), or at none."
        )
    name, texts = federation.describe(for_silos(method, federation.names))
    facts = [Facts.from_json(text) for text in texts]
    # Each time: a variable that the text reads may have changed since the last run.
    plan = method.agree(facts)

    def make(reach: Callable[..., Runtime]) -> Fit:
        built = method.build(plan)
        return Fit(
            plan=plan,
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
        channel = Channel(federation, plan.num_silos, weights, name)
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
