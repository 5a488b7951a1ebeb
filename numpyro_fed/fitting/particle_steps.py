"""Particles of ``nf.fit``, which move to the posterior where a correction is not enough."""

from __future__ import annotations

from numpyro_fed.basics.errors import ModelError, NonFiniteError
from numpyro_fed.fitting.steps import MIN_FOR_SFVI, FitSteps
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.particles import MIN_EFFECTIVE, Particles, Tempered

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
    left = steps.account.left - 2 * MIN_FOR_SFVI
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
        left = min(affordable, steps.account.left - 2 * MIN_FOR_SFVI)
        if left < MIN_FOR_PARTICLES:
            if found is None:
                steps.account.record(name, "not tried, since they would take silos too long", None)
            break
        try:
            with steps.account.stage(name):
                found = tempered.run(
                    steps.new_key(),
                    min(MAX_PARTICLE_EXCHANGES, left),
                    found or before,
                    progress_bar=steps.account.bar,
                    quick=steps.problem.runtime_name == "quick",
                )
        except (ModelError, NonFiniteError, ValueError) as error:
            steps.account.spend(error.round + 1 if isinstance(error, NonFiniteError) else 0)
            steps.account.record(name, f"not possible ({error})", None)
            break
        steps.account.spend(found.num_exchanges - steps.sent_by_particles)
        steps.sent_by_particles = found.num_exchanges
        if not found.nearly:
            break
    if found is not None:
        doubt = "" if found.trusted else f", not enough: {found.doubt}"
        steps.account.record(name, f"{found.figures}{doubt}", found)
    return found
