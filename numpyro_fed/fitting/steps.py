"""The steps of ``nf.fit``, from the mode to the posterior.

They are (:meth:`FitSteps.run`):

1. The normal approximation at the best of several modes: where SFVI begins, without any round.
2. The importance correction, and while it is not good enough what may improve it: more draws of
   rows' latents, more draws, a proposal matched to the weighted draws (:meth:`FitSteps.improve`).
   If several were tried, new draws judge the best; what they doubt is improved once more
   (:meth:`FitSteps.settle`).
3. Particles that move to the posterior (:meth:`FitSteps.temper`).
4. Rounds of PVI near the mode if it suits the model, then SFVI, each with step 2, as long as
   exchanges are left.
5. The best of those is judged once more by new draws, unless it has been.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    CoupledRowsError,
    FederatedWarning,
    GuideError,
    ModelError,
    NonFiniteError,
    RefusedError,
)
from numpyro_fed.data.silo_data import ReadSilos, SiloData, SiloInput
from numpyro_fed.guides.objectives import ELBO, LocallyEnhanced, default_quadrature
from numpyro_fed.methods.base import method_model
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE, InnerDraws, correct_from, importance_correct
from numpyro_fed.posterior.particles import MIN_EFFECTIVE, Particles, Tempered
from numpyro_fed.posterior.posterior import Posterior, Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.progress import StageBar
from numpyro_fed.rounds.stack import State
from numpyro_fed.search.find_mode import SEARCHED_UP_TO
from numpyro_fed.search.influence import table_of
from numpyro_fed.search.mode import LocalMode, Mode
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.text.facts import Facts, agree, size_class
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.layout import layout_of, read_all
from numpyro_fed.text.split import split
from numpyro_fed.weigh.mixture import FULL_UP_TO, Mixture, around_modes, matched

# Rounds at most; runs end sooner if they come to rest. From the mode PVI was right after
# two or three rounds, SFVI after a thousand (docs/results/six_cities.md, raw_data.md).
MAX_PVI_ROUNDS, MAX_SFVI_ROUNDS = 10, 3_000
MAX_PVI_RUNS = 2  # of so many rounds, each followed by a correction
# Messages that must be left for a try of SFVI: with fewer rounds its bound has not settled, and
# nothing can be said.
MIN_FOR_SFVI = 100
# Exchanges of particles, at most, and at least: a horseshoe took 900, a mean with two signs 60.
# What follows keeps a part of them.
MAX_PARTICLE_EXCHANGES, MIN_FOR_PARTICLES = 1_000, 50
# Times that particles go on by as many exchanges, where they are at the posterior and their islands
# nearly agree. A horseshoe has errors of 0.083 sd after the first, where 0.05 are asked.
MORE_PARTICLES = 2
# Particles: a horseshoe of 102 globals has errors of 0.06 sd with a thousand. From a mixture of
# which some draws count a thousand are enough for sixty.
FEW_PARTICLES, MANY_PARTICLES, FEW_GLOBALS = 1_000, 2_000, 80
# Values of rows' densities that particles may take in all, a quarter of an hour of one core or so.
# A test of 30 items with 400 pupils takes 1e11 in 150 exchanges.
MAX_WORK = 2e11
# Draws of a row's latents in the correction: one for each few rows. The errors of the rows'
# estimates add up, so that for a given noise of the weights draws must grow with the rows.
INNER_RANGE, ROWS_PER_DRAW = (20, 200), 4
# Share of the draws of a correction that look beyond the mixture around the modes.
# Where tails decide, half of the further draws are wider.
WIDER, WIDER_FOR_TAILS = 0.16, 0.5
# Draws of the globals in a correction, at most: sixteen exchanges.
MAX_DRAWS = 64_000
# Times that a proposal is matched to the weighted draws. Matching took
# k-hat from 0.95 to 0.48 and from 0.66 to 0.30 (docs/results/raw_data.md);
# a posterior that three do not fit is not like a Gaussian.
MAX_MATCHES = 3
# Corrections that a fit may try, one after the other, each with the draws of those before, until
# their own k-hat is good: from the next one on new draws judge it.
TRIES_WITHOUT_JUDGE = 3
# Share of effective draws above which another match gains little, and more draws are the remedy.
ENOUGH_COUNT = 0.6
# The name of the stage whose draws judge a correction that was chosen.
JUDGED = "judged by new draws"
# Draws of each row's latents in the bound, and of latents of outer plates. Twenty bring the six
# cities to 0.053 sd of NUTS. Draws at an outer plate multiply those of the rows below, and did not
# pay on three levels (docs/results/importance.md).
ROW_DRAWS, OUTER_DRAWS = 20, 5
# Numbers in all data up to which programs are compiled with few optimisations: steps over them take
# less time than optimising would. A regression with 270 rows took 38 s instead of 73, the six
# cities, which are above, would take 92 instead of 75 (docs/results/compilation.md).
SMALL_DATA = 20_000
# Effective draws for each global, from which on their covariance is a proposal. With one a
# covariance is singular.
MIN_DRAWS_PER_GLOBAL = 3
# Times as many draws where tails decide: each time they look farther out.
TAIL_FACTOR = 2
# Searches for the mode, side by side: the first from zero, the others from the prior. More find
# more modes and take longer, in proportion.
NUM_STARTS = 4
# Methods whose compiled programs are kept for the next call, each for a model and its draws. More
# keep more programs in memory.
MAX_CACHED_METHODS = 8

_method_cache: dict[Any, PVI | SFVI] = {}


class FitSteps:
    """One call of ``fit``: its steps, and their results so far.

    Its searches begin ``near`` the modes of a fit of nearly the same silos, if there is one.
    """

    def __init__(
        self,
        key: Array,
        model: Callable[..., Any],
        silos: Sequence[SiloInput] | Federation,
        accuracy: float,
        max_exchanges: int,
        bar: StageBar,
        near: np.ndarray | None = None,
    ):
        self.silos: ReadSilos | Federation
        shown: Sequence[SiloData]
        if isinstance(silos, Federation):
            _, texts = silos.describe(method_model(model, silos.names))
            plan = agree([Facts.from_json(text) for text in texts])
            self.silos, shown = silos, [plan.template()]
            fm, sizes = split(model, shown), [dict(plan.total)]
            rows = max(sizes[0].values(), default=1)
            # The numbers in all arrays, and the rows of plates with latents of their own.
            self.num_values = rows * sum(math.prod(a.shape) for a in plan.facts.arguments)
        else:
            self.silos = shown = read = read_all(silos, model)
            fm = layout_of(model, read).model
            # Each silo's number of rows is rounded up to a power of two: a silo elsewhere tells no
            # more of it, and a fit must be the same in both cases.
            sizes = [{p: size_class(n) for p, n in fm.sizes(silo).items()} for silo in shown]
            self.num_values = sum(a.size for s in shown for a in s.arrays.values())
        plates = [p.name for p in fm.plates if p.dim and not p.outer]
        self.num_rows = max((sum(s[p] for s in sizes) for p in plates), default=0)
        self.text = fingerprint(fm, shown)
        self.key, self.fm, self.model, self.near = key, fm, model, near
        self.accuracy, self.exchanges_left, self.bar = accuracy, max_exchanges, bar
        self.coupled = self.has_more_inner = False
        quadrature = default_quadrature(fm)
        # The number of draws of each row's latents in a correction.
        self.num_inner = int(
            min(max(self.num_rows / ROWS_PER_DRAW, INNER_RANGE[0]), INNER_RANGE[1])
        )
        self.inner_draws: InnerDraws = quadrature or self.num_inner
        # The number of data of all silos, times the draws of each row's latents.
        data_size = self.num_values * (ROW_DRAWS if any(p.dim for p in fm.plates) else 1)
        self.runtime = "quick" if data_size <= SMALL_DATA else "simulation"
        self.stages, self.warned, self.known_warnings = list[Stage](), list[str](), set[str]()
        self.spent = self.sent_by_particles = self.num_keys = 0
        self.stage_name = ""

    def run(self) -> Posterior:
        """Return the result of all steps; they go on while more may help and exchanges are left."""
        # PVI suits a model with globals, few enough for a full covariance, and without parameters.
        suits = 0 < self.fm.dim <= SEARCHED_UP_TO and not self.fm.named("param")
        result = self.find_mode() if suits else None
        best: Corrected | None = None
        # Without a mode the run would begin at zero, where there is nothing to weigh draws around.
        if result is not None and result.start is not None:
            best = self.settle(self.correct(result))
            best = self.most_trusted(best, self.temper(best))
        pvi: Result | None = None
        for _ in range(MAX_PVI_RUNS):
            ended = pvi is not None and pvi.ended != "rounds"
            if result is None or ended or not self.may_go_on(best):
                break
            # Where silos refuse all further rounds, what there is before them stays.
            caught = GuideError, NonFiniteError, ModelError
            pvi = self.run_rounds(PVI, MAX_PVI_ROUNDS, *caught, before=pvi)
            if pvi is None:
                break
            result, best = pvi, self.most_trusted(best, self.settle(self.correct(pvi)))
        if result is None:
            result = self.run_rounds(SFVI, MAX_SFVI_ROUNDS)  # it suits every model
            best = self.settle(self.correct(result))
        elif self.may_go_on(best) and self.exchanges_left > MIN_FOR_SFVI:
            sfvi = self.run_rounds(SFVI, MAX_SFVI_ROUNDS, NonFiniteError, RefusedError)
            if sfvi is not None:
                corrected = self.settle(self.correct(sfvi))
                best = self.most_trusted(best, corrected)
                result = sfvi if corrected is not None and best is corrected else result
        best = self.judged_anew(best)
        missed = tuple[LocalMode, ...]()
        if best is not None and self.start is not None:
            missed = self.start.missed(best.z_G, best.weights)
        # Which silo contradicts the others at the mode, if that was seen there.
        contradiction = ""
        if self.start is not None and self.start.factors is not None:
            rows = [max(size.values()) for size in self.results()[0].sizes]
            words = table_of(self.start.factors, any(p.dim for p in self.fm.plates), rows).words
            contradiction = words and f"{words} disagreement() says more."
        return self.posterior(result, best, missed=missed, contradiction=contradiction)

    def posterior(self, fit: Result, best: Corrected | None, **more: Any) -> Posterior:
        """Return the correction, if its weights are reliable, else the fit, with all steps."""
        steps = dict(stages=tuple(self.stages), _sent=self.spent, **more)
        checked = None if best is None else replace(best, **steps)
        if checked is not None and checked.reliable:
            return checked
        return replace(fit, _checked=checked or "the fit could not be checked", **steps)

    def reached_so_far(self, partial: Any) -> Posterior | None:
        """Return what was reached when a stage ended by an error with this result, if anything."""
        if isinstance(partial, Particles):
            self.spend(partial.num_exchanges - self.sent_by_particles)
        if partial is not None:
            self.record(self.stage_name, "interrupted", partial)
        if not self.results():
            return None
        corrections = (s.result for s in self.stages if isinstance(s.result, Corrected))
        best = self.most_trusted(*corrections)
        return self.posterior(self.results()[-1], best, interrupted=True)

    def method(self, kind: type[PVI] | type[SFVI]) -> Any:
        """Return a method, with the locally enhanced bound if silos have latents.

        It is that of an earlier call with all that was compiled for it, if there is one.
        """
        plates = [p for p in self.fm.plates if p.dim and not self.coupled]
        below = any(not p.outer for p in plates)
        outer = OUTER_DRAWS if below else ROW_DRAWS
        draws = tuple((p.name, outer if p.outer else ROW_DRAWS) for p in plates)
        model: Any = self.model
        try:
            hash(model)
        except TypeError:
            # An id is safe: the method that is kept keeps the model alive.
            model = id(model)
        # A variable that the model reads from outside may have changed: the text's fingerprint.
        key = (kind, model, self.text, draws)
        method = _method_cache.pop(key, None)
        if method is None:
            while len(_method_cache) >= MAX_CACHED_METHODS:
                _method_cache.pop(next(iter(_method_cache)))
            objective = LocallyEnhanced(draws=dict(draws)) if draws else ELBO()
            method = kind(self.model, objective=objective, starts=NUM_STARTS)
        _method_cache[key] = method  # put back at the end: the least recently used is dropped first
        silos = self.silos
        if isinstance(method, PVI) and isinstance(silos, Federation) and silos.secure_sum:
            # One silo after the other there would be no sum.
            return replace(method, schedule="synchronous")
        return method

    def run_method(
        self,
        kind: type[PVI] | type[SFVI],
        name: str,
        rounds: int,
        begin: State | np.ndarray | None,
        caught: tuple[type[Exception], ...],
    ) -> Any:
        """Return the result of a run that begins at a state, or near a place.

        It is None after one of the errors ``caught``, which a stage records. The run has the plain
        bound if rows read latents of other rows. A silo may refuse further rounds, by its policy:
        then the run ends with those before.
        """
        rounds = min(rounds, max(self.exchanges_left, 0 if not rounds else 1))
        settings = {"stop": "converged", "progress_bar": self.bar, "runtime": self.runtime}
        settings["init_state"], key = begin, self.new_key()
        try:
            with self.stage(name):
                try:
                    result = self.method(kind).run(key, rounds, self.silos, **settings)
                except CoupledRowsError:
                    self.coupled, self.inner_draws = True, 1
                    result = self.method(kind).run(key, rounds, self.silos, **settings)
                except RefusedError as error:
                    if error.result is None or not len(error.result.losses):
                        raise
                    result = error.result
        except caught as error:
            # Each silo had sent so many messages.
            if isinstance(error, NonFiniteError):
                found = error.result
                in_search = not isinstance(found, Result)
                self.spend(error.round if in_search else len(found.losses) + 1 + _opening(found))
            self.record(name, f"not possible ({error})", None)
            return None
        self.spend(len(result.losses) + _opening(result))
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
        if best is None or self.exchanges_left <= 0:
            return self.exchanges_left > 0
        quantiles = best.reliable and best.quantiles_known
        return best.precise and not (best.trusted or quantiles)

    def find_mode(self) -> Result | None:
        """Return the normal approximation at the mode, where SFVI begins; None if it fails."""
        result = self.run_method(SFVI, "mode", 0, self.near, (GuideError, NonFiniteError))
        if result is not None and result.start is not None:
            words = [f"found in {_opening(result)} exchanges", *result.start.repeats]
            self.record("mode", ", ".join(words), result)
        return result

    def run_rounds(
        self,
        kind: type[PVI] | type[SFVI],
        most: int,
        *caught: type[Exception],
        before: Result | None = None,
    ) -> Any:
        """Return the result of rounds, after those of ``before``; None after an error ``caught``.

        The first ones begin at the mode, if there is one.
        """
        at_mode = next((r for r in self.results() if r.start is not None), None)
        begin = self.near if before is None else before.state
        if before is None and at_mode is not None:
            begin = at_mode.state if kind is SFVI else at_mode.start.z_G[None]
        name = kind.__name__
        result = self.run_method(kind, name, most, begin, caught)
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
        own: Mixture | None = None,
        before: Corrected | None = None,
        wider: float = WIDER,
        *,
        judge: bool = False,
    ) -> Corrected | None:
        """Return the importance correction of a result; None if it fails.

        Most draws come from the mixture ``own``, by default around the fit and other modes. Those
        of the correction ``before`` are added to them, or it is those before that new ones from the
        same mixtures ``judge``.
        """
        earlier = 0 if before is None else before.num_exchanges
        try:
            with self.stage(name):
                own = self.around(result) if own is None and not judge else own
                args = self.new_key(), result, draws, self.inner_draws
                accuracy, start = self.accuracy, self.start
                if own is None and not judge:
                    correction = importance_correct(*args, accuracy=accuracy)
                else:
                    copy = None if start is None else start.copy
                    correction = correct_from(
                        *args, own, wider=wider, accuracy=accuracy, earlier=before, copy=copy
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
        short = "" if correction.trusted else f", not enough: {correction.doubt}"
        self.record(name, f"k-hat {correction.pareto_k:.2f}, {share}{short}", correction)
        return correction

    def around(self, result: Result) -> Mixture | None:
        """Return the mixture around a fit and other modes; None where its own guide is better."""
        if not 0 < self.fm.dim <= FULL_UP_TO:
            return None
        z = result.many_draws_of_globals().astype(np.float64)
        start = self.start
        others = () if start is None or start.log_evidence is None else start.others
        first = None if start is None or not others else start.log_evidence
        evidence = [first or 0.0, *(p.log_evidence for p in others)]
        modes = [(p.z_G, p.curvature) for p in others]
        return around_modes(z, modes, np.asarray(evidence)) if np.isfinite(z).all() else None

    def settle(self, correction: Corrected | None) -> Corrected | None:
        """Return the correction after what may improve it, judged by draws that chose nothing."""
        best = self.improve(correction)
        judged = self.judged_anew(best)
        if judged is best or judged is None or judged.trusted:
            return judged
        return self.judged_anew(self.improve(judged))

    def improve(self, correction: Corrected | None) -> Corrected | None:
        """Return the best correction that more draws and better proposals lead to."""
        if correction is None or not correction.precise:
            return correction
        best = correction
        for remedy in (self.more_inner_draws, self.match, self.look_farther, self.draw_enough):
            if best.trusted:
                break
            best = remedy(best)
        return best

    def more_inner_draws(self, best: Corrected) -> Corrected:
        """Return the better of a correction and one with more draws of each row's latents."""
        by_draws = best.integration.by_draws and not (self.coupled or self.has_more_inner)
        if best.reliable or not by_draws or self.exchanges_left <= 0:
            return best
        self.has_more_inner, self.inner_draws = True, 4 * self.num_inner
        own = best.pool and best.pool.mixtures[0]
        new = self.correct(best.result, "more draws of the rows' latents", own=own)
        return self.most_trusted(best, new) or best

    def match(self, best: Corrected) -> Corrected:
        """Return the last of several corrections, each by a proposal matched to those before.

        It lies closer to the posterior. Its draws are added to those before, for the next match.
        """
        for _ in range(MAX_MATCHES):
            lacks_only_draws = best.reliable and best.moments_known and best.share > ENOUGH_COUNT
            if best.trusted or self.exchanges_left <= 0 or lacks_only_draws:
                break
            too_few = best.pool is None or best.ess <= MIN_DRAWS_PER_GLOBAL * self.fm.dim
            own = None if too_few else matched(np.asarray(best.z_G), best.weights)
            if own is None:
                break
            name = "matched to the weighted draws"
            new = self.correct(best.result, name, AT_ONCE, own, best, WIDER_FOR_TAILS)
            if new is None:
                break
            best = new
        return best

    def look_farther(self, best: Corrected) -> Corrected:
        """Return the better of a correction without a mixture and one with more draws."""
        unsure_of_tails = best.pool is None and not best.reliable and best.many_count
        if not unsure_of_tails or self.exchanges_left <= 0:
            return best
        new = self.correct(best.result, "more draws", TAIL_FACTOR * AT_ONCE)
        return self.most_trusted(best, new) or best

    def draw_enough(self, best: Corrected) -> Corrected:
        """Return the better of a correction and one with as many draws as its errors ask for."""
        converges = best.many_count or best.reliable
        if not converges or not math.isfinite(best.monte_carlo_error):
            return best
        # Errors fall as the root of the number of draws. The 1.3 allows for the error of the
        # estimated error, so that one more correction is enough as a rule.
        factor = 1.3 * (best.monte_carlo_error / best.max_error) ** 2
        needed = len(best.weights) * (factor if best.moments_known else max(factor, TAIL_FACTOR))
        added = needed - (len(best.weights) if best.pool is not None else 0)
        draws = min(MAX_DRAWS, math.ceil(added / AT_ONCE) * AT_ONCE, self.exchanges_left * AT_ONCE)
        if draws <= 0:
            return best
        before = best if best.pool is not None else None
        wider = WIDER if best.reliable and best.moments_known else WIDER_FOR_TAILS
        own = best.pool and best.pool.mixtures[0]
        new = self.correct(best.result, "more draws", draws, own, before, wider)
        return self.most_trusted(best, new) or best

    def temper(self, before: Corrected | None) -> Particles | None:
        """Return particles moved to the posterior, if what was reached before is not enough."""
        left = self.exchanges_left - 2 * MIN_FOR_SFVI
        if before is None or not self.may_go_on(before) or left < MIN_FOR_PARTICLES:
            return None
        # Particles from a mixture that is far from the posterior agree on what they found, and may
        # have missed the rest.
        near = before.ess >= MIN_EFFECTIVE or not self.fm.global_prior.drawable
        found = self.particles_from("fit" if near else "prior", before)
        if not near and (found is None or found.reached < 1):
            # They are not to be trusted, and closer than a correction of which few draws count.
            found = self.particles_from("fit", before)
        return found

    def particles_from(self, start: str, before: Corrected) -> Particles | None:
        """Return particles from this start, which go on while they are nearly at the posterior."""
        name = "particles"
        many = self.fm.dim > FEW_GLOBALS and start == "prior"
        tempered = Tempered(num_particles=MANY_PARTICLES if many else FEW_PARTICLES, start=start)
        work = max(self.num_values, 1) * before.integration.work_of_row(self.fm)
        affordable = int(MAX_WORK / (work * tempered.num_particles))
        found: Particles | None = None
        self.sent_by_particles = 0
        for _ in range(1 + MORE_PARTICLES):
            left = min(affordable, self.exchanges_left - 2 * MIN_FOR_SFVI)
            if left < MIN_FOR_PARTICLES:
                if found is None:
                    self.record(name, "not tried, since they would take silos too long", None)
                break
            try:
                with self.stage(name):
                    found = tempered.run(
                        self.new_key(),
                        min(MAX_PARTICLE_EXCHANGES, left),
                        found or before,
                        progress_bar=self.bar,
                        quick=self.runtime == "quick",
                    )
            except (ModelError, NonFiniteError, ValueError) as error:
                self.spend(error.round + 1 if isinstance(error, NonFiniteError) else 0)
                self.record(name, f"not possible ({error})", None)
                break
            self.spend(found.num_exchanges - self.sent_by_particles)
            self.sent_by_particles = found.num_exchanges
            if not found.nearly:
                break
        if found is not None:
            doubt = "" if found.trusted else f", not enough: {found.doubt}"
            self.record(name, f"{found.figures}{doubt}", found)
        return found

    def judged_anew(self, best: Corrected | None) -> Corrected | None:
        """Return the best of several corrections, judged by draws that did not choose it."""
        judged = any(stage.name == JUDGED and stage.result is best for stage in self.stages)
        # Nothing chose particles, or what judged before.
        if isinstance(best, Particles) or judged:
            return best
        # The best of several k-hats is too good by selection: on one model it was 0.43, and 0.72 on
        # new draws (docs/results/raw_data.md).
        tried = sum(isinstance(stage.result, Corrected) for stage in self.stages)
        # Draws that were added to all before them choose less.
        few = TRIES_WITHOUT_JUDGE if best is not None and best.pool is not None else 2
        if best is None or not best.trusted or tried <= few or self.exchanges_left <= 0:
            return best
        if best.pool is None:
            return self.correct(best.result, JUDGED, len(best.weights)) or best
        return self.correct(best.result, JUDGED, before=best, judge=True) or best

    @property
    def start(self) -> Mode | None:
        """Return the mode that the first search has found, if it found one."""
        return next((r.start for r in self.results() if r.start is not None), None)

    def results(self) -> list[Result]:
        """Return the fits of all stages so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Result)]

    def most_trusted(self, *corrections: Corrected | None) -> Corrected | None:
        """Return the correction that is the most trustworthy, if there is one."""
        return max(
            (c for c in corrections if c is not None),
            key=lambda c: (c.trusted, c.reliable, -c.monte_carlo_error),
            default=None,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enter a stage: show its name, and collect its warnings for the verdict, each once."""
        self.stage_name = name
        self.bar.stage(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for w in caught:
            text = str(w.message).removesuffix(".")
            # Deprecations and the like are not about the fit: they are passed on.
            if not issubclass(w.category, FederatedWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
            elif text not in self.known_warnings:
                self.known_warnings.add(text)
                self.warned.append(text)

    def record(self, name: str, words: str, result: Result | Corrected | None) -> None:
        """Add a stage with its outcome in words and its warnings."""
        self.stages.append(Stage(name, " ".join([words, *map("({})".format, self.warned)]), result))
        self.warned = []

    def spend(self, exchanges: int) -> None:
        """Subtract exchanges from those that are left, and show how many there were."""
        self.exchanges_left -= exchanges
        self.spent += exchanges
        self.bar.account(self.spent)


def _opening(result: Result) -> int:
    return 0 if result.start is None else result.start.num_exchanges
