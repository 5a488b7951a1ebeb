"""Draws with importance weights: effective draws, Monte Carlo errors, and what speaks against them.

Corrections of fits over rows and over columns share this module.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from jax import Array

from numpyro_fed.basics import display
from numpyro_fed.basics.errors import Interrupted
from numpyro_fed.posterior.run import FederatedRun
from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.verdict import (
    MAX_ERROR,
    MIN_DRAWS,
    NEARLY,
    QUANTILES_KNOWN,
    TOLERANCE,
    Doubt,
    Verdict,
)
from numpyro_fed.text.site_table import Site
from numpyro_fed.weigh.element_errors import ORDERS, ElementErrors, Moments, Rounding
from numpyro_fed.weigh.weights import max_k_hat

# Share of effective draws above which only tails are unsure:
# nf.fit then tries more draws before a better proposal.
MANY_SHARE = 0.3
CorrectedRun = TypeVar("CorrectedRun", bound=FederatedRun)


@dataclass(frozen=True, eq=False)
class WeightedDraws(ABC, Generic[CorrectedRun]):
    """Draws of latents that all parties share, with importance weights (:class:`.Corrected`).

    ``errors`` are those of each element of the globals, as users see them, and ``accuracy`` is the
    number of sds to which means are to be right, and the share to which sds are.
    """

    log_evidence: float | None
    ess: float
    pareto_k: float
    weights: np.ndarray = field(repr=False)
    result: CorrectedRun = field(repr=False)
    _key: Array = field(repr=False)
    _moments: Moments = field(repr=False)
    _rounding: Rounding = field(repr=False)
    errors: ElementErrors = field(repr=False)
    accuracy: float = field(default=TOLERANCE, repr=False, kw_only=True)

    @property
    @abstractmethod
    def _sites(self) -> tuple[Site, ...]:
        """Return the latents with their slices of the vector of coordinates."""

    @property
    @abstractmethod
    def draws(self) -> dict[str, Array]:
        """Draws on their supports, to be weighted by ``weights``."""

    @property
    def threshold(self) -> float:
        """Return the largest ``pareto_k`` for which this many draws are enough.

        ``min(1 - 1 / log10(S), 0.7)`` (Vehtari et al. 2024, section 3.2.4).
        """
        return max_k_hat(len(self.weights))

    @property
    def reliable(self) -> bool:
        """Whether the weights' tail lets averages over them converge as they should."""
        return self.pareto_k <= self.threshold

    @property
    def max_error(self) -> float:
        """Return the largest standard error, in sds, of a mean, an sd or quantiles that are known.

        It is 0.3 times the ``accuracy=`` that was asked for.
        """
        return MAX_ERROR * self.accuracy

    @property
    def moments_known(self) -> bool:
        """Whether every global's mean and sd that exist are known, on the user's scale.

        They are not where they rest on a few draws far out, which another sample might show more
        of.
        """
        return not self.errors.unknown(self.max_error)[:, self.errors.latent].any()

    @property
    def quantiles_known(self) -> bool:
        """Whether every global's quantiles are known, on the user's scale."""
        return bool((self.errors.error[2, self.errors.latent] <= self.max_error).all())

    @property
    def nearly_known(self) -> bool:
        """Whether nothing is wrong with the draws, and errors are less than twice too large."""
        limit, errors = NEARLY * self.max_error, self.errors
        lacks = errors.lacks_draws(self.max_error, limit)
        worse = (errors.unknown(self.max_error) & ~lacks) | errors.infinite
        close = bool((errors.error[2, errors.latent] <= limit).all())
        close = close and not worse[:, errors.latent].any()
        known = self.moments_known and self.quantiles_known
        return close and not known and self.reliable and self.precise

    @property
    def reservation(self) -> str:
        """Return in words which means and sds do not exist or are not known; empty where all are.

        Quantiles are known all the same where the correction is :attr:`trusted`.
        """
        return self.errors.words(self.max_error)

    @property
    def effective_share(self) -> float:
        """The effective draws as a share of all."""
        return self.ess / len(self.weights)

    @property
    def many_draws_count(self) -> bool:
        """Whether many draws share the weight, so that only tails are unsure."""
        return self.effective_share > MANY_SHARE

    @property
    def monte_carlo_error(self) -> float:
        """The largest standard error of a global's mean, sd or quantiles, in posterior sds.

        It is that of the elements of latents as their user sees them. Means and sds that do not
        exist do not count. Errors of quantiles are those of normal scores, which are sds where the
        posterior is normal.
        """
        error, infinite = self.errors.error, self.errors.infinite
        there = np.concatenate([np.where(infinite, 0.0, error[:2]), error[2:]])
        return float(there[:, self.errors.latent].max(initial=0.0))

    @property
    def precise(self) -> bool:
        """Whether the precision of the computation can hold the posterior.

        If an sd is less than fifty gaps between numbers at its mean, or the rounding of a log
        density moves it by a tenth of a nat, draws and weights are made of rounding.
        """
        return self._rounding.fine

    @property
    def fit_error(self) -> dict[str, dict[str, np.ndarray]]:
        """The errors of the fit by site, each with ``"mean_error_sd"`` and ``"sd_ratio"``.

        They are those of unconstrained coordinates, in which guides are fitted.
        """
        shift = self._moments.shift
        return {
            s.name: {
                "mean_error_sd": np.abs(shift[0, s.start : s.stop]).reshape(s.shape),
                "sd_ratio": 1 + shift[1, s.start : s.stop].reshape(s.shape),
            }
            for s in self._sites
        }

    @property
    def draws_verdict(self) -> Verdict:
        """Return the verdict, as far as the draws and their weights tell."""
        enough = len(self.weights) >= MIN_DRAWS
        return Verdict(tuple(self.doubts()), self.figures, self.reservation, enough)

    def doubts(self) -> Iterator[Doubt]:
        """Yield all that speaks against the draws, the gravest first."""
        remedy = f"Try {self._advice}."
        if not self.precise:
            yield Doubt(self._rounding.words(self._sites), self._rounding.remedy)
        if not self.reliable and self.many_draws_count:
            yield Doubt("its tails reach beyond what was drawn", remedy, "details")
        elif not self.reliable:
            yield Doubt("a few draws carry the weight", remedy)
        error = f"{self.monte_carlo_error:.2g}"
        if self.nearly_known:
            what = self.reservation if self.quantiles_known else f"all is known to {error} sd only"
            more = f"More draws make it so: {self._advice}."
            yield Doubt(f"{what}, where {self.max_error:.2g} is asked", more, "sureness")
            return
        if not self.quantiles_known:
            what = f"means, sds and quantiles are known to {error} sd only"
            yield Doubt(what, remedy, "details" if self.moments_known else "spreads")
        if not self.moments_known:
            yield Doubt(self.reservation, f"{QUANTILES_KNOWN} {remedy}", "spreads")

    @property
    def trusted(self) -> bool:
        """Whether quantiles, and means and sds that exist, are right to the ``accuracy=``.

        That is as far as the weights tell.
        """
        return self.draws_verdict.trusted

    @property
    def doubt(self) -> str:
        """Return the gravest reason why the draws are not to be trusted; empty if there is none."""
        return self.draws_verdict.reason

    @property
    def fit_trusted(self) -> bool:
        """Whether the fit's own means and sds are right to the ``accuracy=``.

        They are those of unconstrained coordinates. The correction has to know all moments that
        exist on the user's scale, besides: where it does not, its own errors look too small.
        """
        shift, error = np.abs(self._moments.shift), self._moments.shift_error
        enough = self.reliable and self.moments_known and len(self.weights) >= MIN_DRAWS
        return enough and self.precise and bool((shift + 2 * error <= self.accuracy).all())

    @property
    def figures(self) -> str:
        """Return the numbers that a verdict rests on, in words."""
        return (
            f"{self.ess:,.0f} effective draws, Pareto k-hat {self.pareto_k:.2f}, "
            "Monte Carlo error of means, sds and quantiles at most "
            f"{self.monte_carlo_error:.2g} sd"
        )

    @property
    def _advice(self) -> str:
        """Return in words what to try where the draws are not to be trusted."""
        if self.reliable:
            return "more num_draws, or a longer fit"
        if self.many_draws_count:
            return "more num_draws"
        return "more rounds, a richer guide or LocallyEnhanced, or more inner_draws"

    def report(self) -> str:
        """Return in words whether to trust the corrected posterior, and the fit."""
        parts = [str(self.draws_verdict)]
        if self.log_evidence is not None:
            parts.append(f"Log evidence {self.log_evidence:.2f}.")
        shift = np.abs(self._moments.shift)
        judged = self.reliable and self.precise and len(self.weights) >= MIN_DRAWS
        if judged and not shift.size:
            parts.append("There are no globals to compare.")
        elif judged:
            moment, coordinate = np.unravel_index(shift.argmax(), shift.shape)
            name = next(s.name for s in self._sites if s.start <= coordinate < s.stop)
            off = f"{shift[moment, coordinate]:.2g} sd off"
            worst = f"the {('mean', 'sd')[moment]} of '{name}' is {off}"
            # Where the fit is as close as can be told, what is unknown is not its fault.
            close = (shift + 2 * self._moments.shift_error <= self.accuracy).all()
            if self.fit_trusted:
                also = " as well" if self.trusted else ""
                parts.append(f"The globals of the fit can be trusted{also}: at worst {worst}.")
            elif not close:
                parts.append(f"The globals of the fit itself cannot: {worst}. Use the correction.")
        return " ".join(parts)

    @property
    def attributes(self) -> dict[str, float | str]:
        """Return the attributes that go with the draws into ArviZ."""
        found = dict[str, float | str](ess=self.ess)
        if not math.isnan(self.pareto_k):  # particles have none
            found["pareto_k"] = self.pareto_k
        found["verdict"] = self.report()
        for order, infinite in zip(ORDERS, self.errors.infinite, strict=True):
            names = [n for n, no in zip(self.errors.names, infinite, strict=True) if no]
            if names:
                found[f"no_{order}"] = ", ".join(names)
        return found

    def saved_words(self, draws: int | None = None) -> SavedWords:
        """Return the correction in the form in which a file keeps it, with all of its draws."""
        words = {
            "verdict": self.report(),
            "trusted": self.trusted,
            "log_evidence": self.log_evidence,
            "ess": self.ess,
            "pareto_k": self.pareto_k,
            "accuracy": self.accuracy,
        }
        return SavedWords(type(self).__name__, words, self.draws, self.weights)

    def __str__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        return display.html_words(self.report())


Answer = TypeVar("Answer")
Weighted = TypeVar("Weighted", bound=WeightedDraws[Any])


def until_interrupted(exchange: Callable[[int], Answer], number: int) -> tuple[list[Answer], bool]:
    """Return the results of ``number`` exchanges, or those before Ctrl-C, and whether it came."""
    results: list[Answer] = []
    try:
        for i in range(number):
            results.append(exchange(i))
    except KeyboardInterrupt:
        if not results:
            raise
        return results, True
    return results, False


def unless_interrupted(correction: Weighted, interrupted: bool, num_draws: int) -> Weighted:
    """Return the correction, or raise ``Interrupted`` that carries it."""
    if not interrupted:
        return correction
    raise Interrupted(
        f"interrupted after {len(correction.weights):,} of {num_draws:,} draws: the correction by "
        "these is in the error's .result, and error.result.save(path) keeps it.",
        result=correction,
    )


def check_accuracy(accuracy: float) -> None:
    """Raise an error for an accuracy that is no share of an sd."""
    if not 0 < accuracy < 1:
        raise ValueError(
            f"accuracy={accuracy!r}: expected a number of posterior sds between 0 and 1, such as "
            "0.1 (the default) or 0.2 for a first look."
        )
