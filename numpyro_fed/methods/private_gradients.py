"""SFVI, SFVI-Avg and PVI under differential privacy: a private search, then private gradients.

A budget is divided between the search, :class:`~numpyro_fed.DPNewton`, whose posterior is where the
run begins and in whose frame gradients are clipped, a histogram of their lengths, and the gradients
of all rounds in equal parts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import Array

from numpyro_fed.algorithms.base import ExchangeId, FederatedAlgorithm, Round
from numpyro_fed.algorithms.private_gradients import (
    LENGTHS,
    PrivateGradients,
    PrivateStart,
    Server,
    Variance,
)
from numpyro_fed.algorithms.private_schedule import Schedule
from numpyro_fed.bounds import Bound
from numpyro_fed.errors import ModelError, SavedStateError
from numpyro_fed.guides.structured import Guide, Structured
from numpyro_fed.methods.base import RunOptions
from numpyro_fed.methods.private import (
    DPNewton,
    check_model,
    check_rows_apart_for,
    check_trusted,
    num_units_of,
    spending_of,
    units_of,
)
from numpyro_fed.methods.rows import Found, Method, Prepared
from numpyro_fed.model.data import SiloData, SiloInput
from numpyro_fed.model.facts import Plan
from numpyro_fed.model.layout import Layout
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.privacy.budget import Part, Privacy, Spent
from numpyro_fed.results.built import Built
from numpyro_fed.results.mode import Near
from numpyro_fed.results.rows import Fit
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.runtime.party import AnyAlgorithm, PlanSize
from numpyro_fed.runtime.stack import State

# Shares of the budget: of the search, and of the rest for the histogram.
SEARCH, HISTOGRAM = 0.35, 0.03
GRADIENTS = "private gradients"  # their name in the account


def part_of(budget: Privacy) -> Part:
    """Return the part of the gradients; of one round, where no run has planned any yet."""
    return budget if isinstance(budget, Part) else gradients_part(budget, 1)


def gradients_part(budget: Privacy, rounds: int) -> Part:
    """Return the part of a budget that gradients of so many rounds spend."""
    return Part.of(budget, share=1 - SEARCH, rounds=max(rounds, 1))


def check_unused(**settings: bool) -> None:
    """Raise an error for settings, by name and whether they are the default, that have no use."""
    for name in (name for name, is_default in settings.items() if not is_default):
        raise ModelError(
            f"{name}= under privacy=: a run begins at the posterior of a private search, and rows' "
            "latents are integrated out by quadrature. Leave it out."
        )


def check_options(budget: Privacy, guide: object, batch_size: int | None, by_sum: bool) -> None:
    """Raise an error for settings under which no privacy is accounted, or no noise is known."""
    if guide is not None and (
        not isinstance(guide, Structured) or guide.globals not in ("auto", "full")
    ):
        raise ModelError(
            "under privacy= the globals' guide is a Gaussian with a full covariance, whose spread "
            "counts the noise: leave guide= out, or use guides.Structured(globals='full')."
        )
    if batch_size is not None:
        raise ModelError(
            f"batch_size={batch_size} under privacy=: rows that a silo draws by the server's key "
            "are no secret, and protect nothing. Leave it out: all rows in each step have the "
            "least noise for the same budget."
        )
    if budget.trusted == "sum" and not by_sum:
        raise ModelError(
            "trusted='sum' is for replies that are sums with noise in them. Here a silo takes many "
            "steps by itself, and what it sends follows from all of its own noise. Use "
            "Privacy(trusted='silo')."
        )


@dataclass(frozen=True)
class GradientNoise:
    """The noise of a method's gradients.

    Attributes
    ----------
    part : Part
        The part of the budget.
    gradients : int
        Gradients of a silo in each round.
    """

    part: Part
    gradients: int

    @property
    def multipliers(self) -> tuple[float, float]:
        """Return the noise multipliers of the histogram, and of each gradient."""
        lengths, together = self.part.multipliers((HISTOGRAM, 1 - HISTOGRAM))
        return lengths, together * float((self.part.rounds * self.gradients) ** 0.5)

    def settings(self, fm: FederatedModel, plan: Plan) -> dict[str, Any]:
        """Return the settings that parties agree on; raise an error for what is not protected."""
        check_model(fm, self.part)
        units = num_units_of(fm, plan, self.part)
        self.part.check_units(units)
        return {
            "start": "private",
            "privacy": repr(self.part),
            "multipliers": list(self.multipliers),
            "units": units,
        }

    def spent(self, fm: FederatedModel, plan: Plan, rounds: int) -> Spent:
        """Return what the search and so many rounds have spent."""
        budget = Privacy(**{n: getattr(self.part, n) for n in Privacy.__dataclass_fields__})
        search = Part.of(budget, share=SEARCH)
        schedule = Schedule.of(search, fm.dim, num_units_of(fm, plan, budget), plan.num_silos)
        lengths, each = self.multipliers
        own = [(LENGTHS, lengths), *[(GRADIENTS, each)] * (rounds * self.gradients)]
        return Spent.of(budget, [*schedule.releases(), *own])

    def algorithm(
        self,
        build: Callable[[Bound], FederatedAlgorithm[Any, Any]],
        guide: Guide,
        fm: FederatedModel,
        plan: Plan,
        *,
        particles: int,
        steps: int,
        variance: Variance,
        updates: int = 1,
    ) -> FederatedAlgorithm[Any, Any]:
        """Return an algorithm whose gradients have noise."""
        lengths, each = self.multipliers
        return PrivateGradients(
            build=build,
            units=units_of(fm, self.part, plan.num_silos),
            guide=guide,
            lengths=lengths,
            multiplier=each,
            num_units=plan.chosen["units"],
            planned=self.part.rounds,
            particles=particles,
            steps=steps,
            variance=variance,
            updates=updates,
            clip=self.part.clip,
        ).algorithm()


@dataclass(frozen=True)
class ByPrivateGradients(Method[Found, Prepared]):
    """A method by gradients of silos' log likelihoods, which can be run under privacy."""

    privacy: Privacy | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def gradients(self) -> int:
        """Return the number of gradients that a silo takes in each round."""

    @property
    def replies_are_sums(self) -> bool:
        """Return whether a silo's reply is a sum with its noise, and no function of many."""
        return True

    @property
    @abstractmethod
    def has_default_steps(self) -> bool:
        """Return whether steps are those of which it is known how they average noise out."""

    @property
    def noise(self) -> GradientNoise | None:
        """Return the noise of gradients; None without privacy."""
        if self.privacy is None:
            return None
        return GradientNoise(part_of(self.privacy), self.gradients)

    def private_settings(self, fm: FederatedModel, plan: Plan) -> dict[str, Any]:
        """Return what privacy adds to the settings; nothing without it."""
        if self.noise is None:
            return {}
        own = {"gradients": self.gradients, "counts_noise": self.has_default_steps}
        return {**self.noise.settings(fm, plan), **own}

    def check_units_alone(self, layout: Layout, stacks: Sequence[SiloData]) -> None:
        """Raise an error for rows that depend on other rows, if rows are protected."""
        if self.privacy is not None:
            check_rows_apart_for(self.privacy, layout, stacks)

    def size_of(self, plan: Plan, built: Built, data: SiloData) -> PlanSize:
        """Return how large a plan is, and what a run of it may spend."""
        size = super().size_of(plan, built, data)
        return size if self.noise is None else size._replace(**spending_of(self.noise.part))

    def round_of(self, built: Built, asked: ExchangeId) -> tuple[Round, AnyAlgorithm]:
        """Return the round of an exchange; under privacy there are none but those with noise."""
        return super().round_of(built, asked) if self.noise is None else built.round_of(asked.name)

    def _check_rounds(self, fit: Fit, state: State, num_rounds: int) -> None:
        if self.noise is None:
            return
        multiplier = float(state.server.multiplier)
        if not math.isclose(multiplier, self.noise.multipliers[1], rel_tol=1e-5):
            raise SavedStateError(
                "init_state comes from a run with another budget, whose noise is other than this "
                "one's. Go on with the same privacy=."
            )
        planned, done = self.noise.part.rounds, int(state.round)
        if done + num_rounds > planned:
            raise ModelError(
                f"the budget is planned for {planned} rounds, of which {done} were made: "
                f"{num_rounds} more would spend more than epsilon={self.noise.part.epsilon:g}."
            )

    def _run_in_parts(
        self,
        key: Array,
        silos: Sequence[SiloInput] | Federation,
        runtime: str,
        init_state: State | Near | PrivateStart | None,
        options: RunOptions[Found],
    ) -> Found | None:
        if self.privacy is None or isinstance(self.privacy, Part):
            return None
        return run_in_parts(self, self.privacy, key, silos, runtime, init_state, options)


def run_in_parts(
    method: Method[Found, Any],
    budget: Privacy,
    key: Array,
    silos: Sequence[SiloInput] | Federation,
    runtime: str,
    init_state: State | Near | PrivateStart | None,
    options: RunOptions[Found],
) -> Found:
    """Return the result of a private search, and of rounds with private gradients after it.

    The noise follows from the number of rounds, which is all that the budget is planned for. A run
    that goes on from a state has the plan of the first one.
    """
    if options.stop is not None:
        raise ValueError(
            "stop='converged' under privacy=: the bound that would tell is not sent. Choose the "
            "number of rounds, for which the noise is planned."
        )
    check_trusted(budget, silos)
    rounds = options.num_rounds
    if isinstance(init_state, State) and isinstance(init_state.server, Server):
        rounds = int(init_state.server.planned)
    settings: dict[str, Any] = {"privacy": gradients_part(budget, rounds)}
    planned = method.kept(rounds, lambda: replace(method, **settings))
    if not isinstance(init_state, State):
        search = method.kept("search", lambda: _search(method.model, budget))
        key_search, bar = jax.random.fold_in(key, 1), options.progress_bar
        found = search.run(key_search, silos=silos, runtime=runtime, progress_bar=bar)
        init_state = PrivateStart.of(found.state.server)
    return planned.run(
        key,
        options.num_rounds,
        silos,
        init_state=init_state,
        progress_bar=options.progress_bar,
        runtime=runtime,
        callback=options.callback,
        every=options.every,
    )


def _search(model: Callable[..., Any], budget: Privacy) -> DPNewton:
    return DPNewton(model, privacy=Part.of(budget, share=SEARCH))
