"""The verdict on a posterior: what speaks against it, in words.

A posterior is trusted where nothing speaks against it, and there are draws enough to tell. What may
is one :class:`Doubt` each: of weighted draws (:func:`doubts_of_draws`) that

- the precision of the computation cannot hold the posterior,
- k-hat of the weights is above the threshold of Vehtari et al. (2024),
- quantiles, or means and sds that exist, have standard errors above :data:`MAX_ERROR`, on the scale
  on which their user sees them, or rest on a few draws far out (:mod:`.element_errors`);

of particles besides (:func:`doubts_of_particles`) that they did not arrive or move, and that their
islands differ; and of any posterior (:func:`with_doubts_of_search`) that the search has found other
modes, or was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from numpyro_fed.text.sites import Site
from numpyro_fed.weigh.element_errors import Rounding

# Draws below which k-hat is not judged: its generalised
# Pareto is fitted to at most a fifth of them.
MIN_DRAWS = 100
# Sds within which a mean is right, and share within which an sd is: the target of all benchmarks.
TOLERANCE = 0.1
# Standard error, as a share of this, up to which means and sds count as known: more than three such
# errors are the tolerance. Half of it needs four times as many draws; with twice of it one mean in
# ten would be off by more.
MAX_ERROR = 0.3
# The same of particles. It is estimated from four islands alone, and the largest of all coordinates
# is looked at, which is about twice the true one. With few coordinates the largest is no larger,
# and it is that of weighted draws: the true error of a mean is then below the accuracy with a
# probability of 97.5 % (Student's t with three degrees of freedom).
MAX_PARTICLE_ERROR, FEW_COORDINATES = 0.5, 2
MAX_COARSE = 0.1  # nats by which a finer quadrature may move particles' log densities
# Nats. A Gaussian process of 43 globals has 0.5; with more than one, islands of particles have
# found other shares of the mass.
MAX_EVIDENCE_ERROR = 1.0
# Memory of particles above which they count as standing still: islands would agree for no good
# reason, as where a posterior's neck is too narrow for their steps.
MAX_MEMORY = 0.5
MIN_KEPT = 3  # times that particles must have been kept
QUANTILES_KNOWN = "Medians and quantiles are known: use these."


Spoils = Literal["all", "details", "spreads"]


class Doubt(NamedTuple):
    """A reason against a posterior, its remedy, and which part of the posterior it spoils."""

    reason: str
    remedy: str = ""
    spoils: Spoils = "all"


@dataclass(frozen=True)
class Verdict:
    """Whether a posterior can be trusted, and why not.

    ``doubts``: The gravest one first, which is the one that is told.
    ``figures``: The numbers that it rests on, in words.
    ``reservation``: Which means and sds do not exist, in words, where quantiles are known.
    ``enough_draws``: Whether there are draws enough to tell.
    """

    doubts: tuple[Doubt, ...]
    figures: str = ""
    reservation: str = ""
    enough_draws: bool = True

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against it, and there are draws enough to tell."""
        return self.enough_draws and not self.doubts

    @property
    def reason(self) -> str:
        """The gravest reason not to trust it; empty where there is none."""
        if self.doubts:
            return self.doubts[0].reason
        return "" if self.enough_draws else "too few draws to tell"

    def with_gravest(self, doubt: Doubt) -> Verdict:
        """Return the verdict with one more doubt, graver than all others."""
        return replace(self, doubts=(doubt, *self.doubts), enough_draws=True)

    def __str__(self) -> str:
        if not self.enough_draws:
            return f"Too few draws to tell: k-hat needs {MIN_DRAWS} or more."
        figures = f" ({self.figures})" if self.figures else ""
        if self.trusted:
            trusted = f"The posterior of the globals can be trusted{figures}"
            but = f", but {self.reservation}: use medians and quantiles there"
            return f"{trusted}{but if self.reservation else ''}."
        reason, remedy, spoils = self.doubts[0]
        do_not = "Do not trust this posterior"
        if spoils != "all":
            do_not = f"Do not rely on the posterior's {spoils}"
        return f"{do_not}: {reason}{figures}. {remedy}".rstrip()


class JudgedDraws(Protocol):
    """The facts that a verdict on draws rests on; see :class:`.WeightedDraws`."""

    @property
    def precise(self) -> bool: ...
    @property
    def reliable(self) -> bool: ...
    @property
    def many_draws_count(self) -> bool: ...
    @property
    def quantiles_known(self) -> bool: ...
    @property
    def moments_known(self) -> bool: ...
    @property
    def monte_carlo_error(self) -> float: ...
    @property
    def reservation(self) -> str: ...
    @property
    def _advice(self) -> str: ...
    @property
    def _rounding(self) -> Rounding: ...
    @property
    def _sites(self) -> tuple[Site, ...]: ...


class JudgedParticles(JudgedDraws, Protocol):
    """The facts that a verdict on particles rests on; see :class:`.Particles`."""

    @property
    def near(self) -> bool: ...
    @property
    def reached(self) -> float: ...
    @property
    def num_kept(self) -> int: ...
    @property
    def memory(self) -> float: ...
    @property
    def coarse(self) -> float: ...
    @property
    def evidence_error(self) -> float: ...


def doubts_of_draws(draws: JudgedDraws) -> Iterator[Doubt]:
    """Yield all that speaks against weighted draws, the gravest first."""
    remedy = f"Try {draws._advice}."
    if not draws.precise:
        yield Doubt(draws._rounding.words(draws._sites), draws._rounding.remedy)
    if not draws.reliable and draws.many_draws_count:
        yield Doubt("its tails reach beyond what was drawn", remedy, "details")
    elif not draws.reliable:
        yield Doubt("a few draws carry the weight", remedy)
    if not draws.quantiles_known:
        error = f"{draws.monte_carlo_error:.2g}"
        what = f"means, sds and quantiles are known to {error} sd only"
        yield Doubt(what, remedy, "details" if draws.moments_known else "spreads")
    if not draws.moments_known:
        yield Doubt(draws.reservation, f"{QUANTILES_KNOWN} {remedy}", "spreads")


def particles_arrived(particles: JudgedParticles) -> bool:
    """Return whether particles came to the posterior, and were kept there often enough."""
    return particles.reached >= 1 and particles.num_kept >= MIN_KEPT


def particles_reliable(particles: JudgedParticles) -> bool:
    """Return whether particles came to the posterior and moved there, and integrals are right."""
    settled = particles_arrived(particles) and particles.memory <= MAX_MEMORY
    return particles.near and settled and particles.coarse <= MAX_COARSE


def doubts_of_particles(particles: JudgedParticles) -> Iterator[Doubt]:
    """Yield all that speaks against the particles, the gravest first."""
    remedy = f"Try {particles._advice}."
    spoils: Spoils = "details" if particles.many_draws_count else "all"
    if not particles.precise:
        yield Doubt(particles._rounding.words(particles._sites), particles._rounding.remedy)
    if particles.reached < 1:
        came = f"the particles came to {particles.reached:.2g} of the way to the posterior"
        yield Doubt(came, remedy, spoils)
    elif not (particles_arrived(particles) and particles.memory <= MAX_MEMORY):
        yield Doubt("the particles have not moved enough at the posterior", remedy, spoils)
    if not particles.near:
        why = (
            "the particles began at a fit that is not known to cover the posterior, and may "
            "have missed a part of it: give a correction of which draws count, or start='prior'"
        )
        yield Doubt(why, remedy, spoils)
    if not particles.coarse <= MAX_COARSE:
        yield Doubt("the quadrature over rows' latents is too coarse", remedy, spoils)
    spoils = "details" if particles.moments_known else "spreads"
    if particles.quantiles_known:
        remedy = f"{QUANTILES_KNOWN} {remedy}"
    if not particles.evidence_error <= MAX_EVIDENCE_ERROR:
        error = f"{particles.evidence_error:.2g}"
        why = f"islands of particles differ: the log evidence is known to {error} nats"
        yield Doubt(why, remedy, spoils)
    if not particles.quantiles_known:
        error = f"{particles.monte_carlo_error:.2g}"
        why = f"islands of particles differ: means and sds are known to {error} sd"
        yield Doubt(why, remedy, spoils)
    elif not particles.moments_known:
        yield Doubt(particles.reservation, remedy, spoils)


def unchecked(*, interrupted: bool) -> Verdict:
    """Return the verdict on a posterior without weighted draws by which to judge it."""
    why = "the fit was interrupted" if interrupted else "it could not be checked"
    more = "NUTS on pooled data (run_nuts), where that is allowed, would show it."
    return Verdict((Doubt(why, f"What follows says more; {more}"),))


def with_doubts_of_search(verdict: Verdict, *, num_missed: int, interrupted: bool) -> Verdict:
    """Return the verdict with what speaks against the search: modes missed, or an interruption."""
    if interrupted:
        return verdict.with_gravest(Doubt("the fit was interrupted before its check was done"))
    if num_missed:
        why = (
            f"it is that around one of {1 + num_missed} modes that the search has found, "
            "and others hold about as much of the mass"
        )
        remedy = (
            "A prior or a constraint that tells them apart (a sign, an order) leaves one; "
            ".missed has the others."
        )
        return verdict.with_gravest(Doubt(why, remedy))
    return verdict


def check_accuracy(accuracy: float) -> None:
    """Raise an error for an accuracy that is no share of an sd."""
    if not 0 < accuracy < 1:
        raise ValueError(
            f"accuracy={accuracy!r}: expected a number of posterior sds between 0 and 1, such as "
            "0.1 (the default) or 0.2 for a first look."
        )
