"""The base class of methods whose silos hold rows: run, load, and a compiled fit for each layout.

In one process ``run`` goes through the three steps of :doc:`/how_it_works`: each silo's facts, one
plan, and the algorithm built from model and plan. What depends on shapes alone is kept for later
runs. What depends on values (are rows independent, is the likelihood conjugate) is asked of each
run's own data.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import DataError, GuideError, ModelError, one_of, positive_int
from numpyro_fed.basics.programs import jit_once
from numpyro_fed.data import silo_data
from numpyro_fed.data.padding import Bucket, one_by_one
from numpyro_fed.data.silo_data import SiloData, SilosInput, read_all, signature
from numpyro_fed.data.tables import SiloInput
from numpyro_fed.methods.method import (
    RUNTIMES,
    FederatedMethod,
    PlanSize,
    RunOptions,
    in_process,
    over_federation,
)
from numpyro_fed.methods.recipe import for_silos, recipe
from numpyro_fed.methods.start import begin_run, with_or_without_start
from numpyro_fed.posterior.at_silo import AtSilo, outer_round, sampler_by
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.communication import COPIES, Cost, cost_of, state_sizes
from numpyro_fed.posterior.importance import log_likelihood_exchange
from numpyro_fed.posterior.leave_out import leave_out_exchange, loo_exchange
from numpyro_fed.posterior.particles import tempering_of
from numpyro_fed.posterior.result import Result
from numpyro_fed.rounds.exchange import AnyAlgorithm, Exchange, ExchangeId, Round
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.keys import typed_key
from numpyro_fed.rounds.names import IMPORTANCE, INFLUENCE, LEAVE_OUT, LOO, OUTER_LATENTS, TEMPERED
from numpyro_fed.rounds.progress import Progress
from numpyro_fed.rounds.runtime import Runtime, State
from numpyro_fed.rounds.silos import Silos, on_device
from numpyro_fed.search.expand import flat_size
from numpyro_fed.search.influence import Influence
from numpyro_fed.search.run_search import coupling_reason
from numpyro_fed.text.facts import Facts, Plan, agree, check_plan, facts_of, with_terms
from numpyro_fed.text.layout import Layout, layout_of
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.row_checks import RowChecks, check_rows_apart, refuse_coupled_rows
from numpyro_fed.text.split import split
from numpyro_fed.weigh.log_likelihoods import rows_that_count

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Found = TypeVar("Found", bound=Result)
Prepared = TypeVar("Prepared")


@dataclass(frozen=True, eq=False)
class LaidOut(Generic[Prepared]):
    """A model laid out over silos of some shapes, with what depends on the shapes alone.

    ``plan`` is without the verdicts on values, and without the method's settings.
    """

    layout: Layout
    plan: Plan
    prepared: Prepared


@dataclass(frozen=True)
class Method(FederatedMethod[Found], Generic[Found, Prepared]):
    """A federated method for silos that hold rows, with its settings in a frozen dataclass.

    A subclass has further settings and builds the algorithm (:meth:`settings_for`,
    :meth:`assemble`). ``Prepared`` is the type of what :meth:`prepare` returns, kept with each
    layout of silos.
    """

    _layouts: dict[Hashable, LaidOut[Prepared]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _split_texts: dict[Hashable, FederatedModel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fits: dict[Hashable, CompiledMethod] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def begins_at(self) -> Result | None:
        """Return the result at whose posterior a run begins; None if it does not begin at one."""
        start = getattr(self, "start", None)
        return start if isinstance(start, Result) else None

    def run(
        self,
        key: Array,
        num_rounds: int,
        silos: SilosInput | Federation,
        *,
        init_state: State | np.ndarray | None = None,
        progress_bar: bool | Progress = True,
        runtime: str = "simulation",
        stop: str | None = None,
        callback: Callable[[Found], object] | None = None,
        every: int = 100,
    ) -> Found:
        """Fit the model to what the silos hold.

        Parameters
        ----------
        key : jax.Array
            From ``jax.random.key`` (or the older ``PRNGKey``). Round ``r`` uses
            ``fold_in(key, r)``.
        num_rounds : int
            Rounds to run, or with ``stop`` or a ``callback`` the most. For SFVI a round is one step
            of the optimiser; for PVI it visits every participant once. With 0 the result is where
            the run begins: the normal approximation at the mode.
        silos : list of dict or DataFrame, or Federation
            The data of each silo, or silos in other processes (:class:`numpyro_fed.Federation`).
            Data are keyword arguments of the model, arrays or trees (dicts, lists,
            tuples) of them. Arrays may differ in size; those that differ beyond the first axis are
            compiled apart, and so are Python ints, bools, strings and None, which are static.
        init_state : State, optional
            Go on from ``result.state``: ``run(key, a)`` and then ``run(key, b, init_state=...)``
            is ``run(key, a + b)``, bit for bit. Or the places (``Mode.places``) at which a new run
            searches first, such as those of a fit of other silos.
        progress_bar : bool
            Show the search for the mode, then rounds and the bound.
        runtime : {"simulation", "quick", "host"}
            One compiled program; the same with few of XLA's optimisations, which is compiled in
            less than half of the time and runs slower, for small data; or a plain loop over silos
            for debugging. The numbers are the same up to rounding.
        stop : {None, "converged"}
            ``"converged"`` ends the run where it has come to rest: for SFVI when neither bound nor
            posterior differ between windows of rounds by more than their noise, for PVI when a
            round moves no mean by a tenth of a standard deviation, and no log standard deviation.
            ``result.ended`` says why a run ended.
        callback : callable, optional
            Called with a result after each ``every`` rounds; True ends the run.
        every : int
            Rounds between calls.

        Returns
        -------
        Result
            A :class:`numpyro_fed.PVIResult` for PVI and its family.

        Raises
        ------
        ModelError, DataError, GuideError
            Before anything is compiled, for input that cannot work.
        NonFiniteError
            If the bound turns NaN or infinite; the error's ``result`` is the last good state.
        CallbackError
            If the callback raised; the error's ``result`` is the callback's argument.
        Interrupted
            By Ctrl-C in its rounds: a ``KeyboardInterrupt`` whose ``result`` is that of the rounds
            that were finished.
        """
        key = typed_key(key)
        options = RunOptions(num_rounds, progress_bar, stop, callback, every)
        fit, hosted = self._compiled_for(silos, runtime)
        begun = begin_run(fit, key, hosted, init_state, self.begins_at, progress_bar)
        self._check_rounds(begun.fit, begun.state, num_rounds)
        return self._run_rounds(begun, hosted, key, options)

    def cost(self, silos: Sequence[SiloInput]) -> Cost:
        """Return the cost of a run with these silos, without running it.

        Parameters
        ----------
        silos : list of dict

        Returns
        -------
        Cost
            Sizes, parameters, memory, and all arrays that cross between the server and a silo;
            prints as text.

        Examples
        --------
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> found = nf.SFVI(model).cost([dict(y=np.zeros(5)), dict(y=np.zeros(7))])
        >>> found.num_globals, found.communication.visit
        (1, (4, 9))
        >>> print(found)  # doctest: +ELLIPSIS
        2 silos with 5 to 7 rows of 'row'
        1 global latents, 0 shared parameters, 0 latents and parameters of a silo's own
        ...
        """
        return cost_of(*self._compiled_for(silos, "simulation"))

    def load(
        self, path: str | Path, silos: Sequence[SiloInput], *, runtime: str = "simulation"
    ) -> Found:
        """Return a fit from a file that :meth:`Result.save` wrote.

        From the file of a correction it is the fit that was corrected. See also
        :func:`numpyro_fed.load`.

        Parameters
        ----------
        path : str or Path
            The same path as was given to ``save``.
        silos : list of dict
            The silos' data, which is never saved.
        runtime : {"simulation", "quick", "host"}
            The runtime of the run that was saved.

        Raises
        ------
        SavedStateError
            If the file is damaged, or belongs to another model, guide, layout of silos or version,
            to other data, or to the same silos in another order.
        """
        return self.load_part(path, silos, runtime, "")

    def load_part(self, path: str | Path, silos: SilosInput, runtime: str, part: str) -> Found:
        """Return the run ``part`` of a file; ``""`` is the main one."""
        fit, hosted = self._compiled_for(silos, runtime)
        result, description = with_or_without_start(
            fit, lambda fit: self._load_run(path, fit, hosted, part)
        )
        return replace(result, _opening_of_file=description.get("before"))

    def _check_rounds(self, fit: CompiledMethod, state: State, num_rounds: int) -> None:
        """Raise an error for a number of rounds that the method cannot run."""

    def _text(self) -> Callable[..., Any]:
        """Return the model in the form in which it is run."""
        return self.model

    @abstractmethod
    def prepare(self, fm: FederatedModel) -> Prepared:
        """Return further parts that depend on shapes alone; they are kept with the layout."""

    def value_checks(
        self, layout: Layout, prepared: Prepared, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return the verdicts about the fit that depend on the silos' values, by name."""
        return ()

    @abstractmethod
    def settings_for(self, fm: FederatedModel, plan: Plan) -> DataclassInstance:
        """Return the method's settings with all defaults resolved, as a dataclass of JSON.

        They become a part of the plan. :meth:`assemble` asks for them, too.
        """

    @abstractmethod
    def assemble(self, fm: FederatedModel, plan: Plan, prepared: Prepared) -> Built:
        """Return the algorithm and the guide, from a split model and a plan."""

    def _build_checked(self, fm: FederatedModel, plan: Plan, prepared: Prepared) -> Built:
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
        return replace(facts, verdicts=self.value_checks(layout, self.prepare(fm), [stack]))

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

    def build(self, plan: Plan) -> Built:
        """Return the algorithm from model and plan, the same at the server and at every silo."""
        fm = self._split(plan)
        return self.elsewhere._build_checked(fm, plan, self.prepare(fm))

    @property
    def elsewhere(self) -> Method[Found, Prepared]:
        """Return the method as parties in processes of their own run it."""
        return self

    def _split(self, plan: Plan) -> FederatedModel:
        """Return the model, split for the shapes of a plan; it is split once for each."""
        key = self._split_key(plan)
        if key not in self._split_texts:
            self._split_texts[key] = split(self._text(), [plan.template()])
        return self._split_texts[key]

    @staticmethod
    def _split_key(plan: Plan) -> Hashable:
        # The precision is a part of the key: constants of a traced model have the dtype of their
        # trace. So are the terms, which a variable that the text reads has changed since.
        return str(jnp.result_type(float)), plan.facts, plan.terms

    def round_of(self, built: Built, asked: ExchangeId) -> tuple[Round, AnyAlgorithm]:
        """Return the round that declares an exchange, and the algorithm whose states it has."""
        questions: dict[str, Callable[..., Exchange[Any, Any, Any]]] = {
            IMPORTANCE: lambda built, settings: log_likelihood_exchange(built, settings).exchange,
            INFLUENCE: lambda built, settings: (
                Influence(built.model, built.algorithm, settings["num_silos"]).exchange
            ),
            LEAVE_OUT: leave_out_exchange,
            LOO: loo_exchange,
            TEMPERED: lambda built, settings: tempering_of(built, **settings).exchange,
        }
        if asked.name in questions:
            question = questions[asked.name](built, asked.read_settings())
            return Round((question,)), built.algorithm
        if asked.name == OUTER_LATENTS:
            return outer_round(built, asked.read_settings()), built.algorithm
        return built.round_of(asked.name)

    def posterior_at(self, plan: Plan, built: Built, settings: Mapping[str, Any]) -> AtSilo:
        """Return the posterior at a silo, by the settings in a message with draws."""
        positive_int("num_draws", number := settings.get("num_draws"))
        return AtSilo(built, plan.facts, sampler_by(built, settings), int(str(number)))

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
        bucket_of_one, checks = [Bucket((number,), ({},), stack)], RowChecks(built.model)
        check_rows_apart(checks, draws, bucket_of_one)
        if asked.name == INFLUENCE:
            refuse_coupled_rows(checks, bucket_of_one, "the influence of silos needs")
        if asked.name in {x.name for r in built.search_rounds for x in r.exchanges}:
            coupled = coupling_reason(checks, bucket_of_one)
            if coupled is not None:
                raise ModelError(f"{coupled}. Use start=None.")

    def _check_facts(self, facts: Sequence[Facts]) -> None:
        """Raise an error for silos that agree with each other, but not with this method."""

    def _resolve_plan(self, fm: FederatedModel, plan: Plan) -> Plan:
        settings = {"method": type(self).__name__, **asdict(self.settings_for(fm, plan))}
        return replace(plan, settings=json.dumps(settings, sort_keys=True))

    def _compiled_for(
        self, silos: SilosInput | Federation, runtime: str
    ) -> tuple[CompiledMethod, Silos]:
        """Return the compiled fit for these silos, that of an earlier run if there is one."""
        one_of("runtime", runtime, *RUNTIMES)
        if isinstance(silos, Federation):
            return self._over(silos)
        read = read_all(silos, self.model)
        shapes = (str(jnp.result_type(float)), tuple(signature(s) for s in read))
        laid_out = self._layouts.get(shapes)
        layout = layout_of(self._text(), read) if laid_out is None else laid_out.layout
        # Refuses data that do not fit, before anything that takes long is compiled.
        buckets = layout.checked_buckets(read)
        if laid_out is None:
            pairs = zip(read, layout.sizes, strict=True)
            facts = [facts_of(layout.model, *pair) for pair in pairs]
            agreed = agree(facts)
            self._check_facts(facts)
            laid_out = LaidOut(layout, agreed, self.prepare(layout.model))
            self._layouts[shapes] = laid_out
        # Another verdict on new values makes another plan, and so another fit for the same shapes.
        verdicts = self.value_checks(layout, laid_out.prepared, [b.data for b in buckets])
        plan = replace(laid_out.plan, facts=replace(laid_out.plan.facts, verdicts=verdicts))
        # Padding is a part of the key: whether rows may
        # be padded is a verdict on this run's values.
        cache_key = (runtime, shapes, any(b.data.masks for b in buckets), plan)
        if cache_key not in self._fits:
            plan = self._resolve_plan(layout.model, plan)
            built = self._build_checked(layout.model, plan, laid_out.prepared)
            # The state, a copy of it and a gradient.
            needed, available = COPIES * sum(state_sizes(built.algorithm, buckets)), _memory()
            if needed > available:
                raise GuideError(
                    f"the guide and the optimiser's state need about {needed / 2**30:.1f} GiB, but "
                    f"this machine has {available / 2**30:.1f} GiB. Use a smaller guide: "
                    "guides.Structured(globals='diagonal', locals='diagonal'), with "
                    "couple_mean=False and couple_scale=False, or guides.MeanField()."
                )
            reach = partial(in_process, runtime)
            self._fits[cache_key] = CompiledMethod(
                plan=plan,
                built=built,
                runtime=reach(built.algorithm, built.schedule),
                reach=reach,
                sizes=layout.sizes,
                checks=layout.checks,
                recipe=recipe(self, runtime),
            )
        fit = self._fits[cache_key]
        check_rows_apart(layout.checks, fit.built.draws, buckets)
        # The host loop visits silos one by one, at their own sizes.
        if runtime == "host":
            buckets = one_by_one(read, layout.sizes)
        return fit, Silos(tuple(read), tuple(buckets), on_device(buckets))

    def _over(self, federation: Federation) -> tuple[CompiledMethod, Silos]:
        """Return the fit for the silos of a federation, once all have agreed on a plan."""
        if self.begins_at is not None:
            raise DataError(
                "start= is a result of silos in this process, whose guides it takes over. Over a "
                "Federation begin at the mode (start='mode'), or at none."
            )
        name, texts = federation.describe(for_silos(self, federation.names))
        facts = [Facts.from_json(text) for text in texts]
        # Each time: a variable that the text reads may have changed since the last run.
        plan = self.agree(facts)

        def make(reach: Callable[..., Runtime]) -> CompiledMethod:
            built = self.build(plan)
            return CompiledMethod(
                plan=plan,
                built=built,
                runtime=reach(built.algorithm, built.schedule),
                reach=reach,
                checks=RowChecks(built.model),
                asked_as=name,
            )

        weights = []
        for told in facts:
            sizes = dict(told.sizes)
            # Facts round a number of rows up to n, a power of two: it is above the half of n.
            rounded = [sizes[plate.name] for plate in told.plates if not plate.outer]
            weights.append((sum(n // 2 + 1 for n in rounded), sum(rounded)))
        return over_federation(federation, name, plan, make, weights)


def _memory() -> float:
    stats = jax.local_devices()[0].memory_stats()
    # An accelerator's own memory; a CPU reports no limit, and there the machine's memory counts.
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
