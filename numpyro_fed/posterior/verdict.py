"""The verdict on a posterior: whether it can be trusted, and what speaks against it, in words.

A posterior is trusted where nothing speaks against it, and there are draws enough to tell. What may
is one :class:`Doubt` each: of weighted draws (:meth:`.WeightedDraws.doubts`) that

- the precision of the computation cannot hold the posterior,
- k-hat of the weights is above the threshold of Vehtari et al. (2024),
- quantiles, or means and sds that exist, have standard errors above :data:`MAX_ERROR`, on the scale
  on which their user sees them, or rest on a few draws far out (:mod:`.element_errors`); up to
  twice that error nothing is wrong, and the words say so;

of particles besides (:meth:`.Particles.doubts`) that they did not arrive or move, and that their
islands differ; and of any posterior (:class:`.Posterior`) that the search has found other modes, or
was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# Draws below which k-hat is not judged: its generalised
# Pareto is fitted to at most a fifth of them.
MIN_DRAWS = 100
# Sds within which a mean is right, and share within which an sd is: the target of all benchmarks.
TOLERANCE = 0.1
# Standard error, as a share of this, up to which means and sds count as known: more than three such
# errors are the tolerance. Half of it needs four times as many draws; with twice of it one mean in
# ten would be off by more.
MAX_ERROR = 0.3
QUANTILES_KNOWN = "Medians and quantiles are known: use these."
NEARLY = 2.0  # times the error up to which a posterior is not known as well as usual, and no worse
Spoils = Literal["all", "details", "spreads", "sureness"]


class Doubt(NamedTuple):
    """A reason against a posterior, its remedy, and which part of the posterior it spoils.

    With ``"sureness"`` it is none: the posterior is right, and not as sure as asked for.
    """

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

    def __str__(self) -> str:
        figures = f" ({self.figures})" if self.figures else ""
        if not self.doubts and not self.enough_draws:
            return f"Too few draws to tell: k-hat needs {MIN_DRAWS} or more."
        if not self.doubts:
            trusted = f"The posterior of the globals can be trusted{figures}"
            but = f", but {self.reservation}: use medians and quantiles there"
            return f"{trusted}{but if self.reservation else ''}."
        reason, remedy, spoils = self.doubts[0]
        if spoils == "sureness":
            return f"The posterior is not as sure as asked for: {reason}{figures}. {remedy}"
        do_not = "Do not trust this posterior"
        if spoils != "all":
            do_not = f"Do not rely on the posterior's {spoils}"
        return f"{do_not}: {reason}{figures}. {remedy}".rstrip()
