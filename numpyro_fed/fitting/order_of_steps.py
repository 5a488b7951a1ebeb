"""The steps of ``nf.fit`` in their order, and what may improve a correction on the way.

They are (:func:`run_steps`):

1. The normal approximation at the best of several modes: where SFVI begins, without any round. The
   importance correction, and while it is not good enough what may improve it: more draws of rows'
   latents, more draws, a proposal matched to the weighted draws (:func:`improve`). If several
   were tried, new draws judge the best; what they doubt is improved once more
   (:func:`improve_and_confirm`). Then particles that move to the posterior (:func:`temper`).
2. Rounds of PVI near the mode if it suits the model, with corrections as in step 1,
3. then SFVI in the same way, as long as exchanges are left.
4. The best of those is judged once more by new draws, unless it has been.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from numpyro_fed.basics.errors import GuideError, ModelError, NonFiniteError, RefusedError
from numpyro_fed.fitting.steps import (
    MIN_FOR_SFVI,
    WIDER,
    WIDER_FOR_TAILS,
    FitSteps,
    exchanges_of_search,
)
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE, MIN_DRAWS_PER_GLOBAL
from numpyro_fed.posterior.particles import MIN_EFFECTIVE, Particles, Tempered
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.search.influence import table_of
from numpyro_fed.search.mode import LocalMode
from numpyro_fed.search.mode_search import SEARCHED_UP_TO
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.weigh.mixture import matched

# Rounds at most; runs end sooner if they come to rest. From the mode PVI was right after
# two or three rounds, SFVI after a thousand (docs/results/six_cities.md, raw_data.md).
MAX_PVI_ROUNDS, MAX_SFVI_ROUNDS = 10, 3_000
MAX_PVI_RUNS = 2  # of so many rounds, each followed by a correction
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
# Times as many draws where tails decide: each time they look farther out.
TAIL_FACTOR = 2


def run_steps(steps: FitSteps) -> Posterior:
    """Return the result of all steps; they go on while more may help and exchanges are left.

    It says which modes the posterior misses, and which silo contradicts the others.
    """
    run: Any = None  # the last result of a method that counts
    best: Corrected | None = None
    # PVI takes globals that are few enough for a full covariance, and no parameters.
    if 0 < steps.fm.dim <= SEARCHED_UP_TO and not steps.fm.named("param"):
        run = steps.run_method(SFVI, "mode", 0, steps.places, (GuideError, NonFiniteError))
    # Without a mode the run would begin at zero, where there is nothing to weigh draws around.
    if run is not None and run.start is not None:
        words = [f"found in {exchanges_of_search(run)} exchanges", *run.start.repeats]
        steps.record("mode", ", ".join(words), run)
        best = improve_and_confirm(steps, steps.correct(run))
        best = steps.most_trusted(best, temper(steps, best))

    if run is not None:
        run, best = rounds_of_pvi(steps, run, best)
    if run is None:
        run = steps.run_rounds(SFVI, MAX_SFVI_ROUNDS)  # it suits every model
        best = improve_and_confirm(steps, steps.correct(run))
    elif steps.may_go_on(best) and steps.left > MIN_FOR_SFVI:
        sfvi = steps.run_rounds(SFVI, MAX_SFVI_ROUNDS, NonFiniteError, RefusedError)
        corrected = None if sfvi is None else improve_and_confirm(steps, steps.correct(sfvi))
        best = steps.most_trusted(best, corrected)
        run = sfvi if corrected is not None and best is corrected else run

    best, mode = confirm_by_new_draws(steps, best), steps.mode
    missed = mode.missed(best.z_G, best.weights) if best is not None and mode is not None else ()
    return assemble_posterior(steps, run, best, missed, contradiction_at_mode(steps))


def rounds_of_pvi(
    steps: FitSteps, run: Result, best: Corrected | None
) -> tuple[Result, Corrected | None]:
    """Return the last run and the best correction, after rounds of PVI as long as they may help."""
    pvi: Result | None = None
    for _ in range(MAX_PVI_RUNS):
        if (pvi is not None and pvi.ended != "rounds") or not steps.may_go_on(best):
            break
        # Where silos refuse all further rounds, what there is before them stays.
        caught = GuideError, NonFiniteError, ModelError
        pvi = steps.run_rounds(PVI, MAX_PVI_ROUNDS, *caught, before=pvi)
        if pvi is None:
            break
        run = pvi
        best = steps.most_trusted(best, improve_and_confirm(steps, steps.correct(pvi)))
    return run, best


def contradiction_at_mode(steps: FitSteps) -> str:
    """Return in words which silo contradicts the others at the mode, if that was seen there."""
    mode = steps.mode
    if mode is None or mode.factors is None:
        return ""
    rows = [max(size.values()) for size in steps.results[0].sizes]
    table = table_of(mode.factors, any(p.dim for p in steps.fm.plates), rows)
    accused = replace(table, names=steps.results[0]._silos.names).words
    return accused and f"{accused} disagreement() says more."


def assemble_posterior(
    steps: FitSteps,
    run: Result,
    best: Corrected | None,
    missed: tuple[LocalMode, ...] = (),
    contradiction: str = "",
    *,
    interrupted: bool = False,
) -> Posterior:
    """Return the correction, if its weights are reliable, else the run, with all steps."""
    record: dict[str, Any] = dict(
        stages=tuple(steps.stages),
        _sent=steps.spent,
        missed=missed,
        contradiction=contradiction,
        interrupted=interrupted,
    )
    checked = None if best is None else replace(best, **record)
    if checked is not None and checked.reliable:
        return checked
    return replace(run, _checked=checked or "the fit could not be checked", **record)


def reached_so_far(steps: FitSteps, partial: Result | Corrected | None) -> Posterior | None:
    """Return what was reached when a stage ended by an error with this result, if anything."""
    if isinstance(partial, Particles):
        steps.spend(partial.num_exchanges - steps.sent_by_particles)
    if partial is not None:
        steps.record(steps.current, "interrupted", partial)
    if not steps.results:
        return None
    best = steps.most_trusted(*steps.corrections)
    return assemble_posterior(steps, steps.results[-1], best, interrupted=True)


def improve_and_confirm(steps: FitSteps, correction: Corrected | None) -> Corrected | None:
    """Return the correction after what may improve it, judged by draws that chose nothing."""
    best = improve(steps, correction)
    judged = confirm_by_new_draws(steps, best)
    if judged is best or judged is None or judged.trusted:
        return judged
    return confirm_by_new_draws(steps, improve(steps, judged))


def improve(steps: FitSteps, correction: Corrected | None) -> Corrected | None:
    """Return the best correction that more draws and better proposals lead to."""
    if correction is None or not correction.precise:
        return correction
    best = correction
    # More draws twice: an sd under a tail that falls as a power may rest on few of the first ones.
    for remedy in (more_inner_draws, match, look_farther, draw_enough, draw_enough):
        if best.trusted:
            break
        best = remedy(steps, best)
    return best


def more_inner_draws(steps: FitSteps, best: Corrected) -> Corrected:
    """Return the better of a correction and one with more draws of each row's latents."""
    has_noise = best.integration.draws and not best.integration.nodes
    enough = best.reliable or steps.coupled or steps.has_more_inner
    if enough or not has_noise or steps.left <= 0:
        return best
    steps.has_more_inner, steps.inner_draws = True, 4 * steps.num_inner
    proposal = best.pool and best.pool.mixtures[0]
    new = steps.correct(best.result, "more draws of the rows' latents", proposal=proposal)
    return steps.most_trusted(best, new) or best


def match(steps: FitSteps, best: Corrected) -> Corrected:
    """Return the last of several corrections, each by a proposal matched to those before.

    It lies closer to the posterior. Its draws are added to those before, for the next match.
    """
    for _ in range(MAX_MATCHES):
        lacks_only_draws = (
            best.reliable and best.moments_known and best.effective_share > ENOUGH_COUNT
        )
        if best.trusted or steps.left <= 0 or lacks_only_draws:
            break
        pool, too_few = best.pool, best.ess <= MIN_DRAWS_PER_GLOBAL * steps.fm.dim
        proposal = None if pool is None or too_few else matched(pool.z_G, best.weights)
        if proposal is None:
            break
        name = "matched to the weighted draws"
        new = steps.correct(best.result, name, AT_ONCE, proposal, best, WIDER_FOR_TAILS)
        if new is None:
            break
        best = new
    return best


def look_farther(steps: FitSteps, best: Corrected) -> Corrected:
    """Return the better of a correction without a mixture and one with more draws."""
    unsure_of_tails = best.pool is None and not best.reliable and best.many_draws_count
    if not unsure_of_tails or steps.left <= 0:
        return best
    new = steps.correct(best.result, "more draws", TAIL_FACTOR * AT_ONCE)
    return steps.most_trusted(best, new) or best


def draw_enough(steps: FitSteps, best: Corrected) -> Corrected:
    """Return the better of a correction and one with as many draws as its errors ask for."""
    converges = best.many_draws_count or best.reliable
    if not converges or not math.isfinite(best.monte_carlo_error):
        return best
    # Errors fall as the root of the number of draws. The 1.3 allows for the error of the
    # estimated error, so that one more correction is enough as a rule.
    factor = 1.3 * (best.monte_carlo_error / best.max_error) ** 2
    needed = len(best.weights) * (factor if best.moments_known else max(factor, TAIL_FACTOR))
    added = needed - (len(best.weights) if best.pool is not None else 0)
    draws = min(MAX_DRAWS, math.ceil(added / AT_ONCE) * AT_ONCE, steps.left * AT_ONCE)
    if draws <= 0:
        return best
    pooled_with = best if best.pool is not None else None
    wider = WIDER if best.reliable and best.moments_known else WIDER_FOR_TAILS
    proposal = best.pool and best.pool.mixtures[0]
    new = steps.correct(best.result, "more draws", draws, proposal, pooled_with, wider)
    return steps.most_trusted(best, new) or best


def confirm_by_new_draws(steps: FitSteps, best: Corrected | None) -> Corrected | None:
    """Return the best of several corrections, judged by draws that did not choose it."""
    judged = any(stage.name == JUDGED and stage.result is best for stage in steps.stages)
    # Nothing chose particles, or what judged before.
    if isinstance(best, Particles) or judged:
        return best
    # The best of several k-hats is too good by selection: on one model it was 0.43, and 0.72 on
    # new draws (docs/results/raw_data.md).
    tried = len(steps.corrections)
    # Draws that were added to all before them choose less.
    few = TRIES_WITHOUT_JUDGE if best is not None and best.pool is not None else 2
    if best is None or not best.trusted or tried <= few or steps.left <= 0:
        return best
    if best.pool is None:
        return steps.correct(best.result, JUDGED, len(best.weights)) or best
    return steps.correct(best.result, JUDGED, pooled_with=best) or best


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


def temper(steps: FitSteps, before: Corrected | None) -> Particles | None:
    """Return particles moved to the posterior, if what was reached before is not enough."""
    left = steps.left - 2 * MIN_FOR_SFVI
    if before is None or not steps.may_go_on(before) or left < MIN_FOR_PARTICLES:
        return None
    # Particles from a mixture that is far from the posterior agree on what they found, and may
    # have missed the rest.
    near = before.ess >= MIN_EFFECTIVE or not steps.fm.global_prior.drawable
    found = particles_from(steps, "fit" if near else "prior", before)
    if not near and (found is None or found.reached < 1):
        # They are not to be trusted, and closer than a correction of which few draws count.
        found = particles_from(steps, "fit", before)
    return found


def particles_from(steps: FitSteps, start: str, before: Corrected) -> Particles | None:
    """Return particles from this start, which go on while they are nearly at the posterior."""
    name = "particles"
    many = steps.fm.dim > FEW_GLOBALS and start == "prior"
    tempered = Tempered(num_particles=MANY_PARTICLES if many else FEW_PARTICLES, start=start)
    work = max(steps.problem.num_values, 1) * before.integration.work_of_row(steps.fm)
    affordable = int(MAX_WORK / (work * tempered.num_particles))
    found: Particles | None = None
    steps.sent_by_particles = 0
    for _ in range(1 + MORE_PARTICLES):
        left = min(affordable, steps.left - 2 * MIN_FOR_SFVI)
        if left < MIN_FOR_PARTICLES:
            if found is None:
                steps.record(name, "not tried, since they would take silos too long", None)
            break
        try:
            with steps.stage(name):
                found = tempered.run(
                    steps.new_key(),
                    min(MAX_PARTICLE_EXCHANGES, left),
                    found or before,
                    progress_bar=steps.bar,
                    quick=steps.problem.runtime_name == "quick",
                )
        except (ModelError, NonFiniteError, ValueError) as error:
            steps.spend(error.round + 1 if isinstance(error, NonFiniteError) else 0)
            steps.record(name, f"not possible ({error})", None)
            break
        steps.spend(found.num_exchanges - steps.sent_by_particles)
        steps.sent_by_particles = found.num_exchanges
        if not found.nearly:
            break
    if found is not None:
        doubt = "" if found.trusted else f", so far not enough: {found.doubt}"
        steps.record(name, f"{found.figures}{doubt}", found)
    return found
