"""What may improve a correction of ``nf.fit``, and the new draws that confirm the best of several.

Each remedy is a function of the fit's steps and the best correction so far.
"""

from __future__ import annotations

import math

import numpy as np

from numpyro_fed.fitting.steps import WIDER, WIDER_FOR_TAILS, FitSteps
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE
from numpyro_fed.posterior.particles import Particles
from numpyro_fed.weigh.mixture import matched

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
    for remedy in (more_inner_draws, match, look_farther, draw_enough):
        if best.trusted:
            break
        best = remedy(steps, best)
    return best


def more_inner_draws(steps: FitSteps, best: Corrected) -> Corrected:
    """Return the better of a correction and one with more draws of each row's latents."""
    by_draws = best.integration.by_draws and not (steps.coupled or steps.has_more_inner)
    if best.reliable or not by_draws or steps.account.left <= 0:
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
        if best.trusted or steps.account.left <= 0 or lacks_only_draws:
            break
        too_few = best.pool is None or best.ess <= MIN_DRAWS_PER_GLOBAL * steps.fm.dim
        proposal = None if too_few else matched(np.asarray(best.z_G), best.weights)
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
    if not unsure_of_tails or steps.account.left <= 0:
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
    draws = min(MAX_DRAWS, math.ceil(added / AT_ONCE) * AT_ONCE, steps.account.left * AT_ONCE)
    if draws <= 0:
        return best
    pooled_with = best if best.pool is not None else None
    wider = WIDER if best.reliable and best.moments_known else WIDER_FOR_TAILS
    proposal = best.pool and best.pool.mixtures[0]
    new = steps.correct(best.result, "more draws", draws, proposal, pooled_with, wider)
    return steps.most_trusted(best, new) or best


def confirm_by_new_draws(steps: FitSteps, best: Corrected | None) -> Corrected | None:
    """Return the best of several corrections, judged by draws that did not choose it."""
    judged = any(stage.name == JUDGED and stage.result is best for stage in steps.account.stages)
    # Nothing chose particles, or what judged before.
    if isinstance(best, Particles) or judged:
        return best
    # The best of several k-hats is too good by selection: on one model it was 0.43, and 0.72 on
    # new draws (docs/results/raw_data.md).
    tried = len(steps.account.corrections)
    # Draws that were added to all before them choose less.
    few = TRIES_WITHOUT_JUDGE if best is not None and best.pool is not None else 2
    if best is None or not best.trusted or tried <= few or steps.account.left <= 0:
        return best
    if best.pool is None:
        return steps.correct(best.result, JUDGED, len(best.weights)) or best
    return steps.correct(best.result, JUDGED, pooled_with=best) or best
