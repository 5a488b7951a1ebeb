"""What server and silos in processes of their own ask of a method whose silos hold rows.

Each of them has the method, and makes the same of it: a silo's facts, the plan that they agree on,
and the algorithm built from model and plan. Then a silo asks for the round of each exchange.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import DataError, GuideError, ModelError, positive_int
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data import silo_data
from numpyro_fed.data.minibatches import Minibatches
from numpyro_fed.data.padding import Bucket
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import Guide
from numpyro_fed.methods.method import FederatedMethod, PlanSize
from numpyro_fed.posterior.at_silo import AtSilo, outer_round
from numpyro_fed.posterior.averages import average_exchange
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.calibration import calibration_exchange
from numpyro_fed.posterior.importance import log_likelihood_exchange
from numpyro_fed.posterior.leave_out import leave_out_exchange, loo_exchange
from numpyro_fed.posterior.particles import tempering_of
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.exchange import AnyAlgorithm, ExchangeId, Round
from numpyro_fed.rounds.names import (
    AVERAGE,
    CALIBRATION,
    IMPORTANCE,
    INFLUENCE,
    LEAVE_OUT,
    LOO,
    OUTER_LATENTS,
    TEMPERED,
)
from numpyro_fed.rounds.runtime import State
from numpyro_fed.search.expand import flat_size
from numpyro_fed.search.influence import Influence
from numpyro_fed.search.run_search import coupling_reason
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.jaxprs import calls_back
from numpyro_fed.text.layout import WHOLE, Layout, layout_of, minibatches_of_plates
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts, Plan, agree, check_plan, facts_of, with_terms
from numpyro_fed.text.row_checks import check_rows_apart, refuse_coupled_rows
from numpyro_fed.text.split import split
from numpyro_fed.weigh.log_likelihoods import rows_that_count

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Found = TypeVar("Found", bound=Result)
Prepared = TypeVar("Prepared")

# Exchanges after a run, by name: functions of what was built and the exchange's settings.
AFTER_RUN: dict[str, Callable[[Built, dict[str, Any]], Round]] = {
    IMPORTANCE: lambda built, told: Round((log_likelihood_exchange(built, told).exchange,)),
    INFLUENCE: lambda built, told: Round(
        (Influence(built.model, built.algorithm, told["num_silos"]).exchange,)
    ),
    LEAVE_OUT: lambda built, told: Round((leave_out_exchange(built, told),)),
    LOO: lambda built, told: Round((loo_exchange(built, told),)),
    AVERAGE: lambda built, told: Round((average_exchange(built, told),)),
    CALIBRATION: lambda built, told: Round((calibration_exchange(built, told),)),
    TEMPERED: lambda built, told: Round((tempering_of(built, **told).exchange,)),
    OUTER_LATENTS: outer_round,
}


@dataclass(frozen=True)
class PartySide(FederatedMethod[Found], Generic[Found, Prepared]):
    """The part of a method that each party has: server, and silos that hold rows.

    ``Prepared`` is the type of what :meth:`prepare` returns.
    """

    _split_texts: dict[Hashable, FederatedModel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # A subclass fills these in: settings_for and assemble always, the others where they apply.

    @abstractmethod
    def prepare(self, fm: FederatedModel) -> Prepared:
        """Return further parts that depend on shapes alone; they are kept with the layout."""

    @abstractmethod
    def settings_for(self, fm: FederatedModel, plan: Plan) -> DataclassInstance:
        """Return the method's settings with all defaults resolved, as a dataclass of JSON.

        They become a part of the plan. :meth:`assemble` asks for them, too.
        """

    @abstractmethod
    def assemble(self, fm: FederatedModel, plan: Plan, prepared: Prepared) -> Built:
        """Return the algorithm and the guide, from a split model and a plan."""

    def _text(self) -> Callable[..., Any]:
        """Return the model in the form in which it is run."""
        return self.model

    def value_checks(
        self, layout: Layout, prepared: Prepared, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return what of the fit depends on the silos' values, as answers by name."""
        return ()

    def _check_facts(self, facts: Sequence[Facts]) -> None:
        """Raise an error for silos that agree with each other, but not with this method."""

    def _check_rounds(self, compiled: CompiledMethod, state: State, num_rounds: int) -> None:
        """Raise an error for a number of rounds that the method cannot run."""

    @property
    def as_remote(self) -> PartySide[Found, Prepared]:
        """Return the method as parties in processes of their own run it."""
        return self

    # What the parties ask for, from the first message on.

    def describe(self, silo: Mapping[str, Any], row_ids: ArrayLike | None = None) -> Facts:
        """Return the facts of a silo for this method, from its own data alone.

        :class:`numpyro_fed.Facts` lists what they reveal.
        """
        if row_ids is not None:
            raise DataError(
                "row_ids are of clients that hold columns of the same rows (a client_sum); silos "
                "have rows of their own."
            )
        (data,) = silo_data.read([silo], self.model)
        layout = layout_of(self._text(), [data])
        layout.checked_buckets([data])
        fm = layout.model
        facts = facts_of(fm, data, layout.sizes[0], with_globals=True)
        stack = jax.tree.map(lambda a: np.asarray(a)[None], data)
        return replace(facts, value_checks=self.value_checks(layout, self.prepare(fm), [stack]))

    def agree(self, facts: Sequence[Facts]) -> Plan:
        """Return the plan that the facts of all silos agree on.

        Raises
        ------
        ModelError
            Naming the silo that does not fit together with the others.
        """
        plan = agree(facts)
        self._check_facts(facts)
        is_new = self._split_key(plan) not in self._split_texts
        fm = self._split(plan)
        agreed = with_terms(self._resolve_plan(fm, plan), fm, facts)
        if is_new:  # for build; an older one may be of a text whose variables have changed since
            self._split_texts[self._split_key(agreed)] = fm
        return agreed

    def read_silo(
        self, silo: Mapping[str, Any], plan: Plan | None = None, number: int = 0
    ) -> SiloData:
        """Return a silo's data, checked."""
        return silo_data.read([silo], self.model)[0]

    def check_plan(self, plan: Plan, facts: str, number: int) -> None:
        """Raise an error for a plan that does not come from these facts of silo ``number``."""
        own, fm = Facts.from_json(facts), self._split(plan)
        check_plan(plan, own, fm, number)
        # A plan has the settings that its method resolves for it, and no others.
        if self._resolve_plan(fm, plan).settings != plan.settings:
            raise ModelError(
                "the plan has other settings than this silo's method resolves for it. All parties "
                "must have the same method and version."
            )

    def fingerprint(self, plan: Plan, data: SiloData) -> str | None:
        """Return a hash of the model at a plan's and a silo's shapes, with what it reads.

        None where functions that a program calls back decide what it computes.
        """
        fm = self._split(plan)
        if calls_back(fm.traces.at(data).program):
            return None
        return fingerprint(fm, [plan.template(), data])

    def build(self, plan: Plan) -> Built:
        """Return the algorithm from model and plan, the same at the server and at every silo."""
        fm = self._split(plan)
        return self.as_remote._assemble_with_fallback(fm, plan, self.prepare(fm))

    def round_of(self, built: Built, asked: ExchangeId) -> tuple[Round, AnyAlgorithm]:
        """Return the round that declares an exchange, and the algorithm whose states it has."""
        if asked.name in AFTER_RUN:
            return AFTER_RUN[asked.name](built, asked.read_settings()), built.algorithm
        return built.round_of(asked.name)

    def posterior_at(self, plan: Plan, built: Built, settings: Mapping[str, Any]) -> AtSilo:
        """Return the posterior at a silo, by the settings in a message with draws."""
        positive_int("num_draws", number := settings.get("num_draws"))
        return AtSilo(built, plan.facts, built.sampler(settings), int(str(number)))

    def size_of(self, plan: Plan, built: Built, data: SiloData) -> PlanSize:
        """Return how large a plan is, as a silo's owner sees it."""
        fm = built.model
        rows = sum(fm.sizes(data)[p.name] for p in fm.plates if not p.outer)
        return PlanSize(plan.num_silos, rows, flat_size(fm))

    def rows_that_count(self, built: Built, data: SiloData) -> int:
        """Return the number of a silo's rows that have an outcome."""
        return int(jit_once(partial(rows_that_count, built.model))(data).sum())

    def check_exchange(self, built: Built, asked: ExchangeId, number: int, data: SiloData) -> None:
        """Raise an error for an exchange that needs independent rows if a silo's are coupled."""
        draws = asked.read_settings().get("inner_draws", built.draws)
        stack = jax.tree.map(lambda a: np.asarray(a)[None], data)
        bucket_of_one, checks = [Bucket((number,), ({},), stack)], built.row_checks
        check_rows_apart(checks, draws, bucket_of_one)
        if asked.name == INFLUENCE:
            refuse_coupled_rows(checks, bucket_of_one, "the influence of silos needs")
        if asked.name in {x.name for r in built.search_rounds for x in r.exchanges}:
            coupled = coupling_reason(checks, bucket_of_one)
            if coupled is not None:
                raise ModelError(f"{coupled}. Use start=None.")

    def _split(self, plan: Plan) -> FederatedModel:
        """Return the model, split for the shapes of a plan; it is split once for each."""
        key = self._split_key(plan)
        if key not in self._split_texts:
            self._split_texts[key] = split(self._text(), [plan.template()])
        return self._split_texts[key]

    @staticmethod
    def _split_key(plan: Plan) -> Hashable:
        """Return what a split model depends on."""
        # The precision is a part of the key: constants of a traced model have the dtype of their
        # trace. So are the terms, which a variable that the text reads has changed since.
        return str(jnp.result_type(float)), plan.facts, plan.terms

    def _resolve_plan(self, fm: FederatedModel, plan: Plan) -> Plan:
        """Return the plan with the settings that the method resolves for it."""
        settings = {"method": type(self).__name__, **asdict(self.settings_for(fm, plan))}
        return replace(plan, settings=json.dumps(settings, sort_keys=True))

    def _assemble_with_fallback(self, fm: FederatedModel, plan: Plan, prepared: Prepared) -> Built:
        """Return :meth:`assemble`'s, with a way to build the same for a run without a start."""
        built = self.assemble(fm, plan, prepared)
        if built.start is None:
            return built

        @cache
        def without_start() -> tuple[Plan, Built]:
            settings: dict[str, Any] = {"start": None}
            other = replace(self, **settings)
            agreed = other._resolve_plan(fm, plan)
            return agreed, other.assemble(fm, agreed, prepared)

        return replace(built, without_start=without_start)


def minibatches_of(
    fm: FederatedModel,
    plates_of: Mapping[str, tuple[str, ...]],
    size: int | None,
    guide: Guide,
    draws: Mapping[str, int],
) -> Minibatches | None:
    """Return the rule by which rows are drawn, or None without minibatches.

    Guides and bounds that cannot be cut are refused.
    """
    if size is None:
        return None
    minibatches = minibatches_of_plates(fm, plates_of, size)
    words = f"batch_size={size} cannot go with"
    if joint := [p for p in minibatches.plates if p in guide.locals and guide.locals[p].joint]:
        raise GuideError(
            f"{words} locals='joint' for silo_plate '{joint[0]}': one covariance over all rows has "
            f"no part for a minibatch. Use locals='full' or 'diagonal'. {WHOLE}"
        )
    if weighted := [p for p in guide.locals if draws[p] > 1 and p in fm.outer]:
        raise GuideError(
            f"{words} {draws[weighted[0]]} draws at silo_plate '{weighted[0]}', above the rows of "
            "others: these are weighed together, of which some say nothing without bias. Use one "
            f"draw there. {WHOLE}"
        )
    return minibatches


def check_rows_alone(layout: Layout, size: int | None, stacks: Sequence[SiloData]) -> None:
    """Raise an error if a row's log density changes when other rows are left out."""
    if size is None:
        return
    for rows in minibatches_of_plates(layout.model, layout.possible_plates, size).cut:
        try:
            alone = all(bool(layout.checks.minibatch(*rows, stack)) for stack in stacks)
        # A model may fail on fewer rows than it has lengths for, which is an answer, too.
        except (TypeError, ValueError, IndexError):
            alone = False
        if not alone:
            raise GuideError(
                f"batch_size={size}: the log density of a row of '{rows.plates[0]}' changes when "
                f"other rows are left out of {list(rows.arrays)}, so that a minibatch is another "
                "model. Compute what sums up rows (x.mean(0), say) before the run and pass it as "
                f"data, or put plates that share rows into one. {WHOLE}"
            )
