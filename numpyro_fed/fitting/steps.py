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
from collections.abc import Iterator
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
from numpyro_fed.fitting.problem import FitProblem
from numpyro_fed.guides.objectives import default_quadrature
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE, InnerDraws, correct_from, importance_correct
from numpyro_fed.posterior.particles import MIN_EFFECTIVE, Particles, Tempered
from numpyro_fed.posterior.posterior import Posterior, Stage
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.rounds.progress import StageBar
from numpyro_fed.rounds.runtime import State
from numpyro_fed.search.influence import table_of
from numpyro_fed.search.mode import LocalMode, Mode
from numpyro_fed.sfvi.method import SFVI
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
# Effective draws for each global, from which on their covariance is a proposal. With one a
# covariance is singular.
MIN_DRAWS_PER_GLOBAL = 3
# Times as many draws where tails decide: each time they look farther out.
TAIL_FACTOR = 2


class FitSteps:
    """The steps of one fit, with their results so far.

    Its searches begin near ``places`` (k, dim), the modes of a fit of nearly the same silos, if
    there is one.
    """

    def __init__(
        self,
        key: Array,
        problem: FitProblem,
        accuracy: float,
        account: Account,
        places: np.ndarray | None = None,
    ):
        self.key, self.problem, self.fm, self.places = key, problem, problem.fm, places
        self.accuracy, self.account = accuracy, account
        least, most = INNER_RANGE
        self.num_inner = int(min(max(problem.num_rows / ROWS_PER_DRAW, least), most))
        self.inner_draws: InnerDraws = default_quadrature(self.fm) or self.num_inner
        self.has_more_inner = self.coupled = False
        self.num_keys = self.sent_by_particles = 0

    def run(self) -> Posterior:
        """Return the result of all steps; they go on while more may help and exchanges are left."""
        result = self.find_mode() if self.problem.suits_pvi else None
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
        elif self.may_go_on(best) and self.account.left > MIN_FOR_SFVI:
            sfvi = self.run_rounds(SFVI, MAX_SFVI_ROUNDS, NonFiniteError, RefusedError)
            if sfvi is not None:
                corrected = self.settle(self.correct(sfvi))
                best = self.most_trusted(best, corrected)
                result = sfvi if corrected is not None and best is corrected else result
        best, mode = self.judged_anew(best), self.account.mode
        missed = tuple[LocalMode, ...]()
        if best is not None and mode is not None:
            missed = mode.missed(best.z_G, best.weights)
        # Which silo contradicts the others at the mode, if that was seen there.
        contradiction = ""
        if mode is not None and mode.factors is not None:
            rows = [max(size.values()) for size in self.account.results[0].sizes]
            words = table_of(mode.factors, any(p.dim for p in self.fm.plates), rows).words
            contradiction = words and f"{words} disagreement() says more."
        return self.posterior(result, best, missed, contradiction)

    def posterior(
        self,
        fit: Result,
        best: Corrected | None,
        missed: tuple[LocalMode, ...] = (),
        contradiction: str = "",
        *,
        interrupted: bool = False,
    ) -> Posterior:
        """Return the correction, if its weights are reliable, else the fit, with all steps."""
        steps: dict[str, Any] = dict(
            stages=tuple(self.account.stages),
            _sent=self.account.spent,
            missed=missed,
            contradiction=contradiction,
            interrupted=interrupted,
        )
        checked = None if best is None else replace(best, **steps)
        if checked is not None and checked.reliable:
            return checked
        return replace(fit, _checked=checked or "the fit could not be checked", **steps)

    def reached_so_far(self, partial: Result | Corrected | None) -> Posterior | None:
        """Return what was reached when a stage ended by an error with this result, if anything."""
        if isinstance(partial, Particles):
            self.account.spend(partial.num_exchanges - self.sent_by_particles)
        if partial is not None:
            self.account.record(self.account.current, "interrupted", partial)
        if not self.account.results:
            return None
        best = self.most_trusted(*self.account.corrections)
        return self.posterior(self.account.results[-1], best, interrupted=True)

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
        rounds = min(rounds, max(self.account.left, 0 if not rounds else 1))
        key = self.new_key()

        def run() -> Result:
            return self.problem.method(kind, coupled=self.coupled).run(
                key,
                rounds,
                self.problem.silos,
                init_state=init_state,
                stop="converged",
                progress_bar=self.account.bar,
                runtime=self.problem.runtime,
            )

        try:
            with self.account.stage(name):
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
                    sent = len(found.losses) + 1 + _opening(found)
                self.account.spend(sent)
            self.account.record(name, f"not possible ({error})", None)
            return None
        self.account.spend(len(result.losses) + _opening(result))
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
        if best is None or self.account.left <= 0:
            return self.account.left > 0
        quantiles = best.reliable and best.quantiles_known
        return best.precise and not (best.trusted or quantiles)

    def find_mode(self) -> Result | None:
        """Return the normal approximation at the mode, where SFVI begins; None if it fails."""
        result = self.run_method(SFVI, "mode", 0, self.places, (GuideError, NonFiniteError))
        if result is not None and result.start is not None:
            words = [f"found in {_opening(result)} exchanges", *result.start.repeats]
            self.account.record("mode", ", ".join(words), result)
        return result

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
        at_mode = next((r for r in self.account.results if r.start is not None), None)
        init_state = self.places if before is None else before.state
        if before is None and at_mode is not None:
            init_state = at_mode.state if kind is SFVI else at_mode.start.z_G[None]
        name = kind.__name__
        result = self.run_method(kind, name, max_rounds, init_state, caught)
        if result is not None:
            refused = " until a silo refused" if result.ended == "failure" else ""
            rest = ", come to rest" if result.settled else ", not come to rest"
            words = f"{len(result.losses)} rounds{refused}{rest if kind is PVI else ''}"
            self.account.record(name, words, result)
        return result

    def correct(
        self,
        result: Result,
        name: str = "correction",
        draws: int = AT_ONCE,
        own: Mixture | None = None,
        before: Corrected | None = None,
        wider: float = WIDER,
    ) -> Corrected | None:
        """Return the importance correction of a result; None if it fails.

        Most draws come from the mixture ``own``, by default around the fit and other modes. Those
        of the correction ``before`` are added to them. With it alone, new draws from its mixtures
        judge it.
        """
        earlier = 0 if before is None else before.num_exchanges
        try:
            with self.account.stage(name):
                if own is None and before is None:
                    own = self.around(result)
                args = self.new_key(), result, draws, self.inner_draws
                accuracy, mode = self.accuracy, self.account.mode
                if own is None and before is None:
                    correction = importance_correct(*args, accuracy=accuracy)
                else:
                    copy = None if mode is None else mode.copy
                    correction = correct_from(
                        *args, own, wider=wider, accuracy=accuracy, earlier=before, copy=copy
                    )
        except (ValueError, NonFiniteError) as error:
            sent = isinstance(error, NonFiniteError)  # the others are found before anything is sent
            self.account.spend(math.ceil(draws / AT_ONCE) if sent else 0)
            self.account.record(name, f"not possible ({error})", None)
            return None
        self.account.spend(correction.num_exchanges - earlier)
        share = f"{correction.ess:,.0f} of {len(correction.weights):,} draws count"
        if correction.integration.gave_way:
            share += f", rows' latents by {correction.integration}"
        short = "" if correction.trusted else f", not enough: {correction.doubt}"
        self.account.record(name, f"k-hat {correction.pareto_k:.2f}, {share}{short}", correction)
        return correction

    def around(self, result: Result) -> Mixture | None:
        """Return the mixture around a fit and other modes; None where its own guide is better."""
        if not 0 < self.fm.dim <= FULL_UP_TO:
            return None
        z = result.many_draws_of_globals().astype(np.float64)
        mode = self.account.mode
        others = () if mode is None or mode.log_evidence is None else mode.others
        first = None if mode is None or not others else mode.log_evidence
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
        if best.reliable or not by_draws or self.account.left <= 0:
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
            if best.trusted or self.account.left <= 0 or lacks_only_draws:
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
        if not unsure_of_tails or self.account.left <= 0:
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
        draws = min(MAX_DRAWS, math.ceil(added / AT_ONCE) * AT_ONCE, self.account.left * AT_ONCE)
        if draws <= 0:
            return best
        before = best if best.pool is not None else None
        wider = WIDER if best.reliable and best.moments_known else WIDER_FOR_TAILS
        own = best.pool and best.pool.mixtures[0]
        new = self.correct(best.result, "more draws", draws, own, before, wider)
        return self.most_trusted(best, new) or best

    def temper(self, before: Corrected | None) -> Particles | None:
        """Return particles moved to the posterior, if what was reached before is not enough."""
        left = self.account.left - 2 * MIN_FOR_SFVI
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
        work = max(self.problem.num_values, 1) * before.integration.work_of_row(self.fm)
        affordable = int(MAX_WORK / (work * tempered.num_particles))
        found: Particles | None = None
        self.sent_by_particles = 0
        for _ in range(1 + MORE_PARTICLES):
            left = min(affordable, self.account.left - 2 * MIN_FOR_SFVI)
            if left < MIN_FOR_PARTICLES:
                if found is None:
                    self.account.record(
                        name, "not tried, since they would take silos too long", None
                    )
                break
            try:
                with self.account.stage(name):
                    found = tempered.run(
                        self.new_key(),
                        min(MAX_PARTICLE_EXCHANGES, left),
                        found or before,
                        progress_bar=self.account.bar,
                        quick=self.problem.runtime == "quick",
                    )
            except (ModelError, NonFiniteError, ValueError) as error:
                self.account.spend(error.round + 1 if isinstance(error, NonFiniteError) else 0)
                self.account.record(name, f"not possible ({error})", None)
                break
            self.account.spend(found.num_exchanges - self.sent_by_particles)
            self.sent_by_particles = found.num_exchanges
            if not found.nearly:
                break
        if found is not None:
            doubt = "" if found.trusted else f", not enough: {found.doubt}"
            self.account.record(name, f"{found.figures}{doubt}", found)
        return found

    def judged_anew(self, best: Corrected | None) -> Corrected | None:
        """Return the best of several corrections, judged by draws that did not choose it."""
        judged = any(stage.name == JUDGED and stage.result is best for stage in self.account.stages)
        # Nothing chose particles, or what judged before.
        if isinstance(best, Particles) or judged:
            return best
        # The best of several k-hats is too good by selection: on one model it was 0.43, and 0.72 on
        # new draws (docs/results/raw_data.md).
        tried = len(self.account.corrections)
        # Draws that were added to all before them choose less.
        few = TRIES_WITHOUT_JUDGE if best is not None and best.pool is not None else 2
        if best is None or not best.trusted or tried <= few or self.account.left <= 0:
            return best
        if best.pool is None:
            return self.correct(best.result, JUDGED, len(best.weights)) or best
        return self.correct(best.result, JUDGED, before=best) or best

    def most_trusted(self, *corrections: Corrected | None) -> Corrected | None:
        """Return the correction that is the most trustworthy, if there is one."""
        return max(
            (c for c in corrections if c is not None),
            key=lambda c: (c.trusted, c.reliable, -c.monte_carlo_error),
            default=None,
        )


class Account:
    """The stages of a fit so far, which its bar shows, and how many exchanges each silo sent."""

    def __init__(self, max_exchanges: int, bar: StageBar):
        self.left, self.spent, self.bar = max_exchanges, 0, bar
        self.stages, self.current = list[Stage](), ""
        self._warned, self._known_warnings = list[str](), set[str]()

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


def _opening(result: Result) -> int:
    return 0 if result.start is None else result.start.num_exchanges
