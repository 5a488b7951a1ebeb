"""The ladder of ``nf.fit``: its steps in order, from the mode to the posterior.

They are (:func:`run_steps`):

1. The normal approximation at the best of several modes: where SFVI begins, without any round. The
   importance correction, and while it is not good enough what may improve it: more draws of rows'
   latents, more draws, a proposal matched to the weighted draws (:func:`.improve`). If several
   were tried, new draws judge the best; what they doubt is improved once more
   (:func:`.improve_and_confirm`). Then particles that move to the posterior (:func:`.temper`).
2. Rounds of PVI near the mode if it suits the model, with corrections as in step 1,
3. then SFVI in the same way, as long as exchanges are left.
4. The best of those is judged once more by new draws, unless it has been.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from numpyro_fed.basics.errors import GuideError, ModelError, NonFiniteError, RefusedError
from numpyro_fed.fitting.remedies import confirm_by_new_draws, improve_and_confirm, temper
from numpyro_fed.fitting.steps import MIN_FOR_SFVI, FitSteps
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.particles import Particles
from numpyro_fed.posterior.posterior import Posterior
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.search.influence import table_of
from numpyro_fed.search.mode import LocalMode
from numpyro_fed.sfvi.method import SFVI

# Rounds at most; runs end sooner if they come to rest. From the mode PVI was right after
# two or three rounds, SFVI after a thousand (docs/results/six_cities.md, raw_data.md).
MAX_PVI_ROUNDS, MAX_SFVI_ROUNDS = 10, 3_000
MAX_PVI_RUNS = 2  # of so many rounds, each followed by a correction


class Reached(NamedTuple):
    """The last run that counts, and the best correction so far; None before there is any."""

    run: Result | None
    best: Corrected | None


def run_steps(steps: FitSteps) -> Posterior:
    """Return the result of all steps; they go on while more may help and exchanges are left."""
    reached = mode_and_correction(steps)
    reached = rounds_of_pvi(steps, *reached)
    reached = rounds_of_sfvi(steps, *reached)
    return finish(steps, *reached)


def mode_and_correction(steps: FitSteps) -> Reached:
    """Return the normal approximation at the mode, and the best correction of it."""
    run = steps.find_mode() if steps.problem.suits_pvi else None
    # Without a mode the run would begin at zero, where there is nothing to weigh draws around.
    if run is None or run.start is None:
        return Reached(run, None)
    best = improve_and_confirm(steps, steps.correct(run))
    return Reached(run, steps.most_trusted(best, temper(steps, best)))


def rounds_of_pvi(steps: FitSteps, run: Result | None, best: Corrected | None) -> Reached:
    """Return what rounds of PVI near the mode lead to, if there is a mode and they may help."""
    pvi: Result | None = None
    for _ in range(MAX_PVI_RUNS):
        ended = pvi is not None and pvi.ended != "rounds"
        if run is None or ended or not steps.may_go_on(best):
            break
        # Where silos refuse all further rounds, what there is before them stays.
        caught = GuideError, NonFiniteError, ModelError
        pvi = steps.run_rounds(PVI, MAX_PVI_ROUNDS, *caught, before=pvi)
        if pvi is None:
            break
        corrected = improve_and_confirm(steps, steps.correct(pvi))
        run, best = pvi, steps.most_trusted(best, corrected)
    return Reached(run, best)


def rounds_of_sfvi(steps: FitSteps, run: Result | None, best: Corrected | None) -> Reached:
    """Return what rounds of SFVI lead to, if nothing else was possible or they may help."""
    if run is None:
        run = steps.run_rounds(SFVI, MAX_SFVI_ROUNDS)  # it suits every model
        return Reached(run, improve_and_confirm(steps, steps.correct(run)))
    if not steps.may_go_on(best) or steps.account.left <= MIN_FOR_SFVI:
        return Reached(run, best)
    sfvi = steps.run_rounds(SFVI, MAX_SFVI_ROUNDS, NonFiniteError, RefusedError)
    if sfvi is None:
        return Reached(run, best)
    corrected = improve_and_confirm(steps, steps.correct(sfvi))
    best = steps.most_trusted(best, corrected)
    return Reached(sfvi if corrected is not None and best is corrected else run, best)


def finish(steps: FitSteps, run: Result | None, best: Corrected | None) -> Posterior:
    """Return the posterior, with the modes that it misses and the silo that contradicts others."""
    best, mode = confirm_by_new_draws(steps, best), steps.account.mode
    missed = tuple[LocalMode, ...]()
    if best is not None and mode is not None:
        missed = mode.missed(best.z_G, best.weights)
    # Which silo contradicts the others at the mode, if that was seen there.
    contradiction = ""
    if mode is not None and mode.factors is not None:
        rows = [max(size.values()) for size in steps.account.results[0].sizes]
        words = table_of(mode.factors, any(p.dim for p in steps.fm.plates), rows).words
        contradiction = words and f"{words} disagreement() says more."
    return assemble_posterior(steps, run, best, missed, contradiction)


def assemble_posterior(
    steps: FitSteps,
    run: Any,
    best: Corrected | None,
    missed: tuple[LocalMode, ...] = (),
    contradiction: str = "",
    *,
    interrupted: bool = False,
) -> Posterior:
    """Return the correction, if its weights are reliable, else the run, with all steps."""
    record: dict[str, Any] = dict(
        stages=tuple(steps.account.stages),
        _sent=steps.account.spent,
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
    account = steps.account
    if isinstance(partial, Particles):
        account.spend(partial.num_exchanges - steps.sent_by_particles)
    if partial is not None:
        account.record(account.current, "interrupted", partial)
    if not account.results:
        return None
    best = steps.most_trusted(*account.corrections)
    return assemble_posterior(steps, account.results[-1], best, interrupted=True)
