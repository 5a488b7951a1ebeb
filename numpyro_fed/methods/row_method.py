"""The base class of methods whose silos hold rows: run, load, and a compiled fit for each layout.

In one process ``run`` goes through the three steps of :doc:`/how_it_works`: each silo's facts, one
plan, and the algorithm built from model and plan. What depends on shapes alone is kept for later
runs. What depends on values (are rows independent, is the likelihood conjugate) is asked of each
run's own data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import DataError, GuideError, one_of
from numpyro_fed.data.padding import Bucket, one_by_one
from numpyro_fed.data.silo_data import SilosInput, by_their_names, read_all, signature
from numpyro_fed.methods.method import (
    RUNTIMES,
    RunOptions,
    for_silos,
    in_process,
    method_model,
    over_federation,
    recipe,
)
from numpyro_fed.methods.party_side import Found, PartySide, Prepared
from numpyro_fed.methods.start import begin_run, with_or_without_start
from numpyro_fed.posterior.built import CompiledMethod
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.run import COPIES, Cost, cost_of, state_sizes
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.keys import typed_key
from numpyro_fed.rounds.progress import Progress
from numpyro_fed.rounds.runtime import Runtime, State
from numpyro_fed.rounds.silos import Silos, on_device
from numpyro_fed.text.layout import Layout, layout_of
from numpyro_fed.text.plan import Facts, Plan, agree, facts_of
from numpyro_fed.text.row_checks import check_rows_apart


class ForShapes(NamedTuple, Generic[Prepared]):
    """The layout, the plan and the method's own parts for silos of certain shapes.

    ``plan`` is without checks of values and without settings, and ``prepared`` are the method's own
    parts that depend on shapes alone.
    """

    layout: Layout
    plan: Plan
    prepared: Prepared


@dataclass(frozen=True)
class RowMethod(PartySide[Found, Prepared], Generic[Found, Prepared]):
    """A federated method for silos that hold rows, with its settings in a frozen dataclass.

    A subclass has further settings and builds the algorithm (:meth:`settings_for`,
    :meth:`assemble`). ``Prepared`` is the type of what :meth:`prepare` returns, kept with each
    layout of silos.
    """

    # Whether a silo's facts for the method are those for its model alone.
    PLAIN_FACTS: ClassVar[bool] = False

    _layouts: dict[Hashable, ForShapes[Prepared]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fits: dict[Hashable, CompiledMethod] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        with by_their_names(silos):
            compiled, hosted = self._compiled_for(silos, runtime)
            start = getattr(self, "start", None)
            begun = begin_run(compiled, key, hosted, init_state, start, progress_bar)
            self._check_rounds(begun.compiled, begun.state, num_rounds)
            return self._run_rounds(begun, hosted, key, options)

    def cost(self, silos: SilosInput) -> Cost:
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

    def load(self, path: str | Path, silos: SilosInput, *, runtime: str = "simulation") -> Found:
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
        compiled, hosted = self._compiled_for(silos, runtime)
        result, description = with_or_without_start(
            compiled, lambda compiled: self._load_run(path, compiled, hosted, part)
        )
        return replace(result, _opening_of_file=description.get("before"))

    def _compiled_for(
        self, silos: SilosInput | Federation, runtime: str
    ) -> tuple[CompiledMethod, Silos]:
        """Return the compiled fit for these silos, that of an earlier run if there is one."""
        one_of("runtime", runtime, *RUNTIMES)
        if isinstance(silos, Federation):
            return self._fit_over_federation(silos)
        read = read_all(silos, self.model)
        shapes = (str(jnp.result_type(float)), tuple(signature(s) for s in read))
        known = self._layouts.get(shapes)
        layout = layout_of(self._text(), read) if known is None else known.layout
        # Refuses data that do not fit, before anything that takes long is compiled.
        buckets = layout.checked_buckets(read)
        if known is None:
            pairs = zip(read, layout.sizes, strict=True)
            facts = [facts_of(layout.model, *pair) for pair in pairs]
            agreed = agree(facts)
            self._check_facts(facts)
            known = ForShapes(layout, agreed, self.prepare(layout.model))
            self._layouts[shapes] = known
        _, plan, prepared = known
        # New values with another answer make another plan, and so another fit for the same shapes.
        checks = self.value_checks(layout, prepared, [b.data for b in buckets])
        plan = replace(plan, facts=replace(plan.facts, value_checks=checks))
        # Padding is a part of the key: whether rows may be padded depends on these values.
        cache_key = (runtime, shapes, any(bucket.data.masks for bucket in buckets), plan)
        if cache_key not in self._fits:
            self._fits[cache_key] = self._fit_of(layout, plan, prepared, buckets, runtime)
        compiled = self._fits[cache_key]
        check_rows_apart(layout.checks, compiled.built.draws, buckets)
        # The host loop visits silos one by one, at their own sizes.
        if runtime == "host":
            buckets = one_by_one(read, layout.sizes)
        return compiled, Silos(tuple(read), tuple(buckets), on_device(buckets), read.names)

    def _fit_of(
        self,
        layout: Layout,
        plan: Plan,
        prepared: Prepared,
        buckets: Sequence[Bucket],
        runtime: str,
    ) -> CompiledMethod:
        """Return the fit of a plan, if this machine has memory for its states."""
        plan = self._resolve_plan(layout.model, plan)
        built = self._assemble_with_fallback(layout.model, plan, prepared)
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
        return CompiledMethod(
            plan=plan,
            built=built,
            runtime=reach(built.algorithm, built.schedule),
            reach=reach,
            sizes=layout.sizes,
            checks=layout.checks,
            recipe=recipe(self, runtime),
        )

    def _fit_over_federation(self, federation: Federation) -> tuple[CompiledMethod, Silos]:
        """Return the fit for the silos of a federation, once all have agreed on a plan."""
        if isinstance(getattr(self, "start", None), Result):
            raise DataError(
                "start= is a result of silos in this process, whose guides it takes over. Over a "
                "Federation begin at the mode (start='mode'), or at none."
            )
        like = method_model(self.model, federation.names) if self.PLAIN_FACTS else None
        name, texts = federation.describe(for_silos(self, federation.names), like)
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
                checks=built.row_checks,
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
    """Return the bytes of memory that the first device has."""
    stats = jax.local_devices()[0].memory_stats()
    # An accelerator's own memory; a CPU reports no limit, and there the machine's memory counts.
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if not hasattr(os, "sysconf"):  # Windows does not tell
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
