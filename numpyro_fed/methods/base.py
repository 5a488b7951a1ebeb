"""What all methods share: run, load, and the compiled fit for each layout of silos."""

from __future__ import annotations

import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.algorithms.base import (
    FederatedAlgorithm,
    Round,
    settings_in,
)
from numpyro_fed.algorithms.mode import unravelled
from numpyro_fed.errors import (
    DataError,
    GuideError,
    ModelError,
    SavedStateError,
)
from numpyro_fed.methods.carrying import carried
from numpyro_fed.methods.cost import COPIES, Cost, cost_of, state_sizes
from numpyro_fed.methods.federated import RUNTIMES, SEARCHES, FederatedMethod, RunOptions
from numpyro_fed.methods.mode import SEARCHED_UP_TO, NoStartError, begin, coupling_reason
from numpyro_fed.methods.recipe import recipe
from numpyro_fed.model import data as silo_data
from numpyro_fed.model.data import SiloData, SilosInput, signature
from numpyro_fed.model.facts import Facts, Plan, agree, facts_of, with_globals
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.layout import Layout, layout_of
from numpyro_fed.model.padding import Bucket, one_by_one, padded
from numpyro_fed.model.row_checks import RowChecks, check_rows_apart
from numpyro_fed.model.split import split
from numpyro_fed.results.base import Fit, Result
from numpyro_fed.results.built import Built
from numpyro_fed.results.importance import importance_correct, weighing
from numpyro_fed.results.run import Silos
from numpyro_fed.runtime.noise import typed_key
from numpyro_fed.runtime.progress import Progress
from numpyro_fed.runtime.stack import ServerData, State, on_device

WIDE_UP_TO = 10_000  # by L-BFGS
SEARCHED = "mode", "wide"  # kinds of start


Found = TypeVar("Found", bound=Result)
Shaped = TypeVar("Shaped")
Used = TypeVar("Used")


@dataclass(frozen=True)
class Method(FederatedMethod[Fit, Found], Generic[Found, Shaped]):
    """A federated method: settings in a frozen dataclass, ``run`` and ``load`` from here.

    A subclass has further settings, and says how its fit is built. ``Shaped`` is what it keeps
    with a layout of silos.
    """

    model: Callable[..., Any]
    _layouts: dict[Hashable, tuple[Layout, Plan, Shaped]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _texts: dict[Hashable, FederatedModel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fits: dict[Hashable, Fit] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def hides_by_noise(self) -> bool:
        """Return False, since silos' noise is that of their own latents and hides nothing."""
        return False

    def run(
        self,
        key: Array,
        num_rounds: int,
        silos: Sequence[Mapping[str, Any]],
        *,
        init_state: State | None = None,
        progress_bar: bool | Progress = True,
        runtime: str = "simulation",
        server_data: ServerData = None,
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
            of the optimiser; for PVI it visits every participant once.
        silos : list of dict
            What each silo holds: keyword arguments of the model, arrays or trees (dicts, lists,
            tuples) of them. Arrays may differ in size; those that differ beyond the first axis are
            compiled apart, and so are Python ints, bools, strings and None, which are static.
        init_state : State, optional
            Go on from ``result.state``: ``run(key, a)`` and then ``run(key, b, init_state=...)``
            is ``run(key, a + b)``, bit for bit.
        progress_bar : bool
            Show the search for the mode, then rounds and the bound.
        runtime : {"simulation", "quick", "host"}
            One compiled program; the same with few of XLA's optimisations, which is compiled in
            less than half of the time and runs slower, for small data; or a plain loop over silos
            for debugging. The numbers are the same up to rounding.
        server_data : pytree, optional
            What the server itself holds, for algorithms that use it; it is never saved.
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
            If the callback raised; the error's ``result`` is what it was shown.
        Interrupted
            By Ctrl-C in its rounds: a ``KeyboardInterrupt`` whose ``result`` is that of the rounds
            that were finished.
        """
        key = typed_key(key)
        course = RunOptions(num_rounds, server_data, progress_bar, stop, callback, every)
        fit, hosted = self._compiled_for(silos, runtime)
        try:
            earlier = getattr(self, "start", None)
            start: object
            if init_state is None and isinstance(earlier, Result):
                state, start = carried(fit, key, hosted, earlier)
            elif init_state is None:
                search = SEARCHES[runtime]
                state, start = begin(fit, key, hosted.batches, search, hosted.buckets, progress_bar)
            else:
                fit, state = _with_or_without_start(
                    fit, runtime, lambda fit: (fit, fit.check_state(init_state, hosted))
                )
                start = None
        except NoStartError as error:
            warnings.warn(error.warning, stacklevel=2)
            fit = _without_start(fit, runtime) or fit
            state, start = begin(fit, key, hosted.batches, SEARCHES[runtime])
        self._check_rounds(state, num_rounds)

        return self._run_rounds(fit, hosted, key, state, start, course)

    @cached_property
    def _from_zero(self) -> Method[Found, Shaped]:
        """Return the same method without a start at the mode."""
        settings: dict[str, Any] = {"start": None}
        return replace(self, **settings)

    def cost(self, silos: Sequence[Mapping[str, Any]]) -> Cost:
        """Return what a run with these silos will cost, without running it.

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
        self,
        path: str | Path,
        silos: Sequence[Mapping[str, Any]],
        *,
        runtime: str = "simulation",
    ) -> Found:
        """Rebuild a fit from what :meth:`Result.save` wrote; or from the file of a correction the
        fit that was corrected. See also :func:`numpyro_fed.load`.

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
        """Return one of the runs of a file, by its name there."""
        fit, hosted = self._compiled_for(silos, runtime)
        result, said = _with_or_without_start(
            fit, runtime, lambda fit: self._loaded(path, fit, hosted, part)
        )
        return replace(result, _before=said.get("before"))

    def _check_rounds(self, state: State, num_rounds: int) -> None:
        """Refuse a number of rounds that the method cannot run."""

    def _text(self) -> Callable[..., Any]:
        """Return the model's text as it is run."""
        return self.model

    @abstractmethod
    def prepare(self, fm: FederatedModel) -> Shaped:
        """Return what else depends on the shapes alone: kept with the layout, for these."""

    def value_checks(
        self, layout: Layout, shaped: Shaped, stacks: Sequence[SiloData]
    ) -> tuple[tuple[str, bool], ...]:
        """Return what the silos' values decide about the fit, by functions compiled once."""
        return ()

    @abstractmethod
    def settings_for(self, fm: FederatedModel, plan: Plan) -> dict[str, Any]:
        """Return the method's settings with nothing left open; JSON."""

    @abstractmethod
    def assemble(self, fm: FederatedModel, plan: Plan, shaped: Shaped) -> Built:
        """Return what the method makes of a split text and a plan."""

    def _built(self, fm: FederatedModel, plan: Plan, shaped: Shaped) -> Built:
        """Return what the method makes of a split text and a plan, with or without a start."""
        built = self.assemble(fm, plan, shaped)
        if built.start is None:
            return built

        @cache
        def without_start() -> tuple[Plan, Built]:
            other = self._from_zero
            agreed = other._planned(fm, plan)
            return agreed, other.assemble(fm, agreed, shaped)

        return replace(built, without_start=without_start)

    def describe(self, silo: Mapping[str, Any], row_ids: ArrayLike | None = None) -> Facts:
        """Return what a silo says of itself for this method, from its own data alone.

        See :class:`numpyro_fed.Facts` for what they reveal.
        """
        if row_ids is not None:
            raise DataError(
                "row_ids are of clients that hold columns of the same rows (a client_sum); silos "
                "have rows of their own."
            )
        (data,) = silo_data.read([silo], self.model)
        layout = layout_of(self._text(), [data])
        layout.arrange([data])
        fm, sizes = layout.model, layout.sizes[0]
        facts = with_globals(facts_of(fm, data, sizes), fm, data, sizes)
        stack = jax.tree.map(lambda a: np.asarray(a)[None], data)
        return replace(facts, verdicts=self.value_checks(layout, self.prepare(fm), [stack]))

    def agree(self, facts: Sequence[Facts]) -> Plan:
        """Return the plan of all silos that have described themselves.

        Raises
        ------
        ModelError
            Naming the silo that does not fit together with the others.
        """
        plan = self._agreed(facts)
        return self._planned(self._split(plan), plan)

    def read_plan(self, text: str) -> Plan:
        """Return a plan from JSON."""
        return Plan.from_json(text)

    def read_silo(
        self, silo: Mapping[str, Any], plan: Plan | None = None, number: int = 0
    ) -> SiloData:
        """Return what a silo holds, checked."""
        return silo_data.read([silo], self.model)[0]

    def build(self, plan: Plan) -> Built:
        """Return the algorithm, from text and plan: the same at the server and at every silo."""
        fm = self._split(plan)
        return self._built(fm, plan, self.prepare(fm))

    def _split(self, plan: Plan) -> FederatedModel:
        """Return the text, split for the shapes that a plan tells; once for each."""
        key = str(jnp.result_type(float)), plan.facts
        if key not in self._texts:
            self._texts[key] = split(self._text(), [plan.template()])
        return self._texts[key]

    def round_of(self, built: Built, name: str) -> Round:
        """Return the round that has this exchange: of a run, the evaluation, the correction."""
        if "importance" in settings_in(name):
            return weighing(built, name)[0]
        return built.round_of(name)

    def check_exchange(self, built: Built, name: str, number: int, data: SiloData) -> None:
        """Refuse an exchange that treats rows one by one where a silo's rows are coupled."""
        draws = settings_in(name).get("inner_draws", built.draws)
        stack = jax.tree.map(lambda a: np.asarray(a)[None], data)
        alone, asks = [Bucket((number,), ({},), stack)], RowChecks(built.model)
        check_rows_apart(built.model, asks, draws, alone)
        searches = name in {x.name for r in built.search_rounds for x in r.exchanges}
        if searches and (coupled := coupling_reason(built.model, asks, alone)) is not None:
            raise ModelError(f"{coupled}. Use start=None.")

    def _agreed(self, facts: Sequence[Facts]) -> Plan:
        plan = agree(facts)
        self._check_facts(facts)
        return plan

    def _check_facts(self, facts: Sequence[Facts]) -> None:
        """Refuse silos that fit together, but not under this method."""

    def _planned(self, fm: FederatedModel, plan: Plan) -> Plan:
        return replace(plan, settings=json.dumps(self.settings_for(fm, plan), sort_keys=True))

    def _compiled_for(self, silos: SilosInput, runtime: str) -> tuple[Fit, Silos]:
        """Return the compiled fit for these silos, from an earlier run where there was one.

        What depends on shapes is kept; what depends on values is asked of each run's own.
        """
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r}: expected one of {sorted(RUNTIMES)}.")
        read = silo_data.read(silos, self.model)
        shapes = (str(jnp.result_type(float)), tuple(signature(s) for s in read))
        known_layout = self._layouts.get(shapes)
        layout = layout_of(self._text(), read) if known_layout is None else known_layout[0]
        buckets = layout.arrange(read)  # refuses, before anything else is compiled
        if known_layout is None:
            facts = [
                facts_of(layout.model, data, size)
                for data, size in zip(read, layout.sizes, strict=True)
            ]
            self._layouts[shapes] = layout, self._agreed(facts), self.prepare(layout.model)
        layout, agreed, shaped = self._layouts[shapes]
        verdicts = self.value_checks(layout, shaped, [b.data for b in buckets])
        plan = replace(agreed, facts=replace(agreed.facts, verdicts=verdicts))
        known = (runtime, shapes, padded(buckets), plan)
        if known not in self._fits:
            plan = self._planned(layout.model, plan)
            built = self._built(layout.model, plan, shaped)
            check_memory(built.algorithm, buckets)
            self._fits[known] = Fit(
                plan=plan,
                certify=importance_correct,
                built=built,
                runtime=RUNTIMES[runtime](built.algorithm, built.schedule),
                sizes=layout.sizes,
                checks=layout.checks,
                recipe=recipe(self, runtime),
            )
        fit = self._fits[known]
        check_rows_apart(fit.model, layout.checks, fit.draws, buckets)
        if runtime == "host":
            buckets = one_by_one(read, layout.sizes)
        return fit, Silos(tuple(read), tuple(buckets), on_device(buckets))


def _without_start(fit: Fit, runtime: str) -> Fit | None:
    """Return the fit of runs in this process for which no mode was found to begin at."""
    return fit.without_start(RUNTIMES[runtime])


def _with_or_without_start(fit: Fit, runtime: str, use: Callable[[Fit], Used]) -> Used:
    """Return what comes of a state or a file that was made with a start at the mode, or without
    one, where a search had found none.
    """
    try:
        return use(fit)
    except SavedStateError as error:
        other = _without_start(fit, runtime)
        if other is None:
            raise
        try:
            return use(other)
        except SavedStateError:
            raise error from None


def check_start(start: object) -> None:
    """Refuse what is no place to begin at."""
    if start not in ("mode", None) and not isinstance(start, Result):
        raise ValueError(f"start={start!r:.200}: expected 'mode', None or a result.")


def is_wide(kind: str | None, fm: FederatedModel) -> bool:
    """Whether globals are too many for a matrix of them."""
    return kind == "wide" or (kind == "result" and fm.dim > SEARCHED_UP_TO)


def start_of(asked: str | Result | None, fm: FederatedModel, *, wide: bool = False) -> str | None:
    """Return where a run begins: at the mode, if what is searched over is there and not too much.

    ``"wide"`` is a search by L-BFGS, for those who can begin there; ``"result"`` no search at all.
    """
    if isinstance(asked, Result):
        return "result"
    number = unravelled(fm)
    if asked is None or not number:
        return None
    if number <= SEARCHED_UP_TO:
        return asked
    return "wide" if wide and number <= WIDE_UP_TO else None


def check_memory(algorithm: FederatedAlgorithm[Any, Any], buckets: Sequence[Bucket]) -> None:
    """Refuse what cannot fit: the state, a copy of it, and a gradient."""
    needed = COPIES * sum(state_sizes(algorithm, buckets))
    available = _memory()
    if needed > available:
        raise GuideError(
            f"the guide and the optimiser's state need about {needed / 2**30:.1f} GiB, but "
            f"this machine has {available / 2**30:.1f} GiB. Use a smaller guide: "
            "guides.Structured(globals='diagonal', locals='diagonal'), with couple_mean=False and "
            "couple_scale=False, or guides.MeanField()."
        )


def _memory() -> float:
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
