"""What each step of ``nf.fit`` is made of: a run of a method, and the correction of its result.

A fit begins with its problem: a model on silos' data, how large both are, and the methods for it.
:mod:`.order_of_steps` has the order of the steps, and what improves a correction.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    CoupledRowsError,
    FederatedWarning,
    NonFiniteError,
    RefusedError,
)
from numpyro_fed.data.silo_data import ReadSilos, SilosInput, read_all
from numpyro_fed.guides.objectives import ELBO, LocallyEnhanced, default_quadrature
from numpyro_fed.methods.method import method_model
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE, InnerDraws, correct_from, importance_correct
from numpyro_fed.posterior.posterior import Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.progress import StageBar
from numpyro_fed.rounds.runtime import State
from numpyro_fed.search.mode import Mode
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.text.fingerprint import fingerprint as fingerprint_of
from numpyro_fed.text.layout import layout_of
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.plan import Facts, agree, size_class
from numpyro_fed.text.split import split
from numpyro_fed.weigh.mixture import MIXTURE_FULL_UP_TO, Mixture, around_modes

# Messages that must be left for a try of SFVI: with fewer rounds its bound has not settled, and
# nothing can be said.
MIN_FOR_SFVI = 100
# Draws of a row's latents in the correction: one for each few rows. The errors of the rows'
# estimates add up, so that for a given noise of the weights draws must grow with the rows.
INNER_RANGE, ROWS_PER_DRAW = (20, 200), 4
# Share of the draws of a correction that look beyond the mixture around the modes.
# Where tails decide, half of the further draws are wider.
WIDER, WIDER_FOR_TAILS = 0.16, 0.5
# Draws of each row's latents in the bound, and of latents of outer plates. Twenty bring the six
# cities to 0.053 sd of NUTS. Draws at an outer plate multiply those of the rows below, and did not
# pay on three levels.
ROW_DRAWS, OUTER_DRAWS = 20, 5
# Numbers in all data up to which programs are compiled with few optimisations: steps over them take
# less time than optimising would. A regression with 270 rows took 38 s instead of 73, the six
# cities, which are above, would take 92 instead of 75.
SMALL_DATA = 20_000
# Searches for the mode, side by side: the first from zero, the others from the prior. More find
# more modes and take longer, in proportion.
NUM_STARTS = 4
# Methods whose compiled programs are kept for the next call, each for a model and its draws. More
# keep more programs in memory.
MAX_CACHED_METHODS = 8

_methods: dict[Hashable, PVI | SFVI] = {}


@dataclass(frozen=True, eq=False)
class FitProblem:
    """A model on the data of silos, and how large they are.

    ``num_values``: The numbers in all arrays.
    ``num_rows``: The rows of the longest plate with latents of its own.
    ``fingerprint``: That of the text, in which a variable may have changed since a last call.
    """

    model: Callable[..., Any]
    silos: ReadSilos | Federation
    fm: FederatedModel
    num_values: int
    num_rows: int
    fingerprint: str

    @classmethod
    def of(cls, model: Callable[..., Any], silos: SilosInput | Federation) -> FitProblem:
        """Return the problem, once silos have been read, or have told their facts."""
        known: ReadSilos | Federation
        if isinstance(silos, Federation):
            known, (_, facts_json) = silos, silos.describe(method_model(model, silos.names))
            plan = agree([Facts.from_json(text) for text in facts_json])
            template, sizes = [plan.template()], [dict(plan.total)]
            fm = split(model, template)
            longest = max(sizes[0].values(), default=1)
            num_values = longest * sum(math.prod(a.shape) for a in plan.facts.arguments)
            fingerprint = fingerprint_of(fm, template)
        else:
            known = read = read_all(silos, model)
            fm = layout_of(model, read).model
            # Each silo's number of rows is rounded up to a power of two: a silo elsewhere tells no
            # more of it, and a fit must be the same in both cases.
            sizes = [{p: size_class(n) for p, n in fm.sizes(silo).items()} for silo in read]
            num_values = sum(a.size for silo in read for a in silo.arrays.values())
            fingerprint = fingerprint_of(fm, read)
        num_rows = max((sum(size[p] for size in sizes) for p in fm.row_plates), default=0)
        return cls(model, known, fm, num_values, num_rows, fingerprint)

    @cached_property
    def runtime_name(self) -> str:
        """Return the runtime whose programs take the least time, compiled and run."""
        draws = ROW_DRAWS if any(p.dim for p in self.fm.plates) else 1
        return "quick" if self.num_values * draws <= SMALL_DATA else "simulation"

    def method_for(self, kind: type[PVI] | type[SFVI], *, coupled: bool) -> PVI | SFVI:
        """Return a method, with the locally enhanced bound if silos have latents.

        It has the plain bound where rows are ``coupled``. It is that of an earlier call with all
        that was compiled for it, if there is one.
        """
        plates = [p for p in self.fm.plates if p.dim and not coupled]
        outer = OUTER_DRAWS if self.fm.row_plates else ROW_DRAWS
        above = self.fm.outer_plates
        draws = tuple((p.name, outer if p.name in above else ROW_DRAWS) for p in plates)
        try:
            hash(self.model)
            model: Hashable = self.model
        except TypeError:
            # An id is safe: the method that is kept keeps the model alive.
            model = id(self.model)
        key = (kind, model, self.fingerprint, draws)
        method, silos = _methods.pop(key, None), self.silos
        if method is None:
            while len(_methods) >= MAX_CACHED_METHODS:
                _methods.pop(next(iter(_methods)))
            objective = LocallyEnhanced(draws=dict(draws)) if draws else ELBO()
            method = kind(self.model, objective=objective, starts=NUM_STARTS)
        _methods[key] = method  # put back at the end: the least recently used is dropped first
        if isinstance(method, PVI) and isinstance(silos, Federation) and silos.secure_sum:
            # One silo after the other there would be no sum.
            return replace(method, schedule="synchronous")
        return method


class FitSteps:
    """The steps of one fit, with their stages so far, and how many exchanges each silo sent.

    Its searches begin near ``places`` (k, dim), the modes of a fit of nearly the same silos, if
    there is one.
    """

    def __init__(
        self,
        key: Array,
        problem: FitProblem,
        accuracy: float,
        max_exchanges: int,
        bar: StageBar,
        places: np.ndarray | None,
    ):
        self.key, self.problem, self.fm, self.places = key, problem, problem.fm, places
        self.accuracy, self.bar = accuracy, bar
        self.left, self.spent = max_exchanges, 0  # exchanges
        self.sent_by_particles = 0  # of those that are spent
        self.stages = list[Stage]()  # that have ended
        self.current = ""  # the name of the stage that has not
        self._warned, self._known_warnings = list[str](), set[str]()
        least, most = INNER_RANGE
        self.num_inner = int(min(max(problem.num_rows / ROWS_PER_DRAW, least), most))
        self.inner_draws: InnerDraws = default_quadrature(self.fm) or self.num_inner
        self.has_more_inner = False  # whether more draws of rows' latents have been tried
        self.coupled = False  # whether rows read latents of other rows
        self.num_keys = 0  # that steps have taken

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enter a stage: show its name, and collect its warnings for the verdict, each once."""
        self.current = name
        self.bar.stage(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for w in caught:
            text = str(w.message).removesuffix(".")
            # Deprecations and the like are not about the fit: they are passed on.
            if not issubclass(w.category, FederatedWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
            elif text not in self._known_warnings:
                self._known_warnings.add(text)
                self._warned.append(text)

    def record(self, name: str, words: str, result: Result | Corrected | None) -> None:
        """Add a stage with its outcome in words and its warnings."""
        told = " ".join([words, *map("({})".format, self._warned)])
        self.stages.append(Stage(name, told, result))
        self._warned = []

    def spend(self, exchanges: int) -> None:
        """Subtract exchanges from those that are left, and show how many there were."""
        self.left -= exchanges
        self.spent += exchanges
        self.bar.account(self.spent)

    @property
    def results(self) -> list[Result]:
        """Return the fits of all stages so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Result)]

    @property
    def corrections(self) -> list[Corrected]:
        """Return the corrections of all stages so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Corrected)]

    @property
    def mode(self) -> Mode | None:
        """Return the mode that the first search has found, if it found one."""
        return next((r.start for r in self.results if r.start is not None), None)

    def run_method(
        self,
        kind: type[PVI] | type[SFVI],
        name: str,
        rounds: int,
        init_state: State | np.ndarray | None,
        caught: tuple[type[Exception], ...],
    ) -> Any:
        """Return the result of a run that begins at a state, or near a place.

        It is None after one of the errors ``caught``, which a stage records. The run has the plain
        bound if rows read latents of other rows. A silo may refuse further rounds, by its policy:
        then the run ends with those before.
        """
        rounds = min(rounds, max(self.left, 0 if not rounds else 1))
        key = self.new_key()

        def run() -> Result:
            return self.problem.method_for(kind, coupled=self.coupled).run(
                key,
                rounds,
                self.problem.silos,
                init_state=init_state,
                stop="converged",
                progress_bar=self.bar,
                runtime=self.problem.runtime_name,
            )

        try:
            with self.stage(name):
                try:
                    result = run()
                except CoupledRowsError:
                    self.coupled, self.inner_draws = True, 1
                    result = run()
                except RefusedError as error:
                    if error.result is None or not len(error.result.losses):
                        raise
                    result = error.result
        except caught as error:
            # Each silo had sent so many messages.
            if isinstance(error, NonFiniteError):
                found, sent = error.result, error.round
                if isinstance(found, Result):  # not in the search for the mode
                    sent = len(found.losses) + 1 + exchanges_of_search(found)
                self.spend(sent)
            self.record(name, f"not possible ({error})", None)
            return None
        self.spend(len(result.losses) + exchanges_of_search(result))
        return result

    def new_key(self) -> Array:
        """Return a new key, for one step."""
        self.num_keys += 1
        return jax.random.fold_in(self.key, self.num_keys)

    def may_go_on(self, best: Corrected | None) -> bool:
        """Return whether another method may help, and exchanges are left.

        None does if the precision cannot hold the posterior, or where nothing but some mean or sd
        is unknown, which rests on a heavy tail.
        """
        if best is None or self.left <= 0:
            return self.left > 0
        quantiles = best.reliable and best.quantiles_known
        return best.precise and not (best.trusted or quantiles)

    def run_rounds(
        self,
        kind: type[PVI] | type[SFVI],
        max_rounds: int,
        *caught: type[Exception],
        before: Result | None = None,
    ) -> Any:
        """Return the result of rounds, after those of ``before``; None after an error ``caught``.

        The first ones begin at the mode, if there is one.
        """
        at_mode = next((r for r in self.results if r.start is not None), None)
        init_state = self.places if before is None else before.state
        if before is None and at_mode is not None:
            init_state = at_mode.state if kind is SFVI else at_mode.start.z_G[None]
        name = kind.__name__
        result = self.run_method(kind, name, max_rounds, init_state, caught)
        if result is not None:
            refused = " until a silo refused" if result.ended == "failure" else ""
            rest = ", come to rest" if result.settled else ", not come to rest"
            words = f"{len(result.losses)} rounds{refused}{rest if kind is PVI else ''}"
            self.record(name, words, result)
        return result

    def correct(
        self,
        result: Result,
        name: str = "correction",
        draws: int = AT_ONCE,
        proposal: Mixture | None = None,
        pooled_with: Corrected | None = None,
        wider: float = WIDER,
    ) -> Corrected | None:
        """Return the importance correction of a result; None if it fails.

        Most draws come from the mixture ``proposal``, by default around the fit and other modes.
        Those of the correction ``pooled_with`` are added to them. With it alone, new draws from its
        mixtures judge it.
        """
        earlier = 0 if pooled_with is None else pooled_with.num_exchanges
        try:
            with self.stage(name):
                if proposal is None and pooled_with is None:
                    proposal = self.around(result)
                args = self.new_key(), result, draws, self.inner_draws
                accuracy, mode = self.accuracy, self.mode
                if proposal is None and pooled_with is None:
                    correction = importance_correct(*args, accuracy=accuracy)
                else:
                    copy = None if mode is None else mode.copy
                    correction = correct_from(
                        *args,
                        proposal,
                        wider=wider,
                        accuracy=accuracy,
                        earlier=pooled_with,
                        copy=copy,
                    )
        except (ValueError, NonFiniteError) as error:
            sent = isinstance(error, NonFiniteError)  # the others are found before anything is sent
            self.spend(math.ceil(draws / AT_ONCE) if sent else 0)
            self.record(name, f"not possible ({error})", None)
            return None
        self.spend(correction.num_exchanges - earlier)
        share = f"{correction.ess:,.0f} of {len(correction.weights):,} draws count"
        if correction.integration.gave_way:
            share += f", rows' latents by {correction.integration}"
        short = "" if correction.trusted else f", so far not enough: {correction.doubt}"
        self.record(name, f"k-hat {correction.pareto_k:.2f}, {share}{short}", correction)
        return correction

    def around(self, result: Result) -> Mixture | None:
        """Return the mixture around a fit and other modes; None where its own guide is better."""
        if not 0 < self.fm.dim <= MIXTURE_FULL_UP_TO:
            return None
        z = result.many_draws_of_globals().astype(np.float64)
        mode = self.mode
        others = () if mode is None or mode.log_evidence is None else mode.others
        first = None if mode is None or not others else mode.log_evidence
        evidence = [first or 0.0, *(p.log_evidence for p in others)]
        modes = [(p.z_G, p.curvature) for p in others]
        return around_modes(z, modes, np.asarray(evidence)) if np.isfinite(z).all() else None

    def most_trusted(self, *corrections: Corrected | None) -> Corrected | None:
        """Return the correction that is the most trustworthy, if there is one."""
        return max(
            (c for c in corrections if c is not None),
            key=lambda c: (c.trusted, c.reliable, -c.monte_carlo_error),
            default=None,
        )


def exchanges_of_search(result: Result) -> int:
    """Return the exchanges of the search for a mode with which a run began."""
    return 0 if result.start is None else result.start.num_exchanges
