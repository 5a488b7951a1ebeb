"""The words on weighted draws: whether to trust them and the fit, and what to try where not."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from jax import Array

from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.verdict import MIN_DRAWS, JudgedDraws, Verdict
from numpyro_fed.weigh.element_errors import ORDERS, ElementErrors, Moments


class WordedDraws(JudgedDraws, Protocol):
    """The facts that the words are about; :class:`.WeightedDraws` says what each of it is."""

    @property
    def log_evidence(self) -> float | None: ...
    @property
    def ess(self) -> float: ...
    @property
    def pareto_k(self) -> float: ...
    @property
    def weights(self) -> np.ndarray: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def errors(self) -> ElementErrors: ...
    @property
    def _moments(self) -> Moments: ...
    @property
    def draws(self) -> dict[str, Array]: ...
    @property
    def trusted(self) -> bool: ...
    @property
    def fit_trusted(self) -> bool: ...
    @property
    def draws_verdict(self) -> Verdict: ...
    def report(self) -> str: ...


def report(correction: WordedDraws) -> str:
    """Return in words whether to trust the corrected posterior, and the fit."""
    parts = [str(correction.draws_verdict)]
    if correction.log_evidence is not None:
        parts.append(f"Log evidence {correction.log_evidence:.2f}.")
    if correction.reliable and correction.precise and len(correction.weights) >= MIN_DRAWS:
        parts.append(words_of_fit(correction))
    return " ".join(filter(None, parts))


def words_of_fit(correction: WordedDraws) -> str:
    """Return in words whether to trust the fit that was corrected."""
    shift = np.abs(correction._moments.shift)
    if not shift.size:
        return "There are no globals to compare."
    moment, coordinate = np.unravel_index(shift.argmax(), shift.shape)
    name = next(s.name for s in correction._sites if s.start <= coordinate < s.stop)
    worst = f"the {('mean', 'sd')[moment]} of '{name}' is {shift[moment, coordinate]:.2g} sd off"
    if correction.fit_trusted:
        also = " as well" if correction.trusted else ""
        return f"The globals of the fit can be trusted{also}: at worst {worst}."
    if (shift + 2 * correction._moments.shift_error <= correction.accuracy).all():
        return ""  # the fit is as close as can be told: what is unknown is not its fault
    return f"The globals of the fit itself cannot: {worst}. Use the correction."


def advice(correction: WordedDraws) -> str:
    """Return in words what to try where the draws are not to be trusted."""
    if correction.reliable:
        return "more num_draws, or a longer fit"
    if correction.many_draws_count:
        return "more num_draws"
    return "more rounds, a richer guide or LocallyEnhanced, or more inner_draws"


def figures(correction: WordedDraws) -> str:
    """Return the numbers that a verdict rests on, in words."""
    return (
        f"{correction.ess:,.0f} effective draws, Pareto k-hat {correction.pareto_k:.2f}, "
        "Monte Carlo error of means, sds and quantiles at most "
        f"{correction.monte_carlo_error:.2g} sd"
    )


def attributes(correction: WordedDraws) -> dict[str, float | str]:
    """Return the attributes that go with the draws into ArviZ."""
    found = dict[str, float | str](ess=correction.ess)
    if not math.isnan(correction.pareto_k):  # particles have none
        found["pareto_k"] = correction.pareto_k
    found["verdict"] = correction.report()
    for order, infinite in zip(ORDERS, correction.errors.infinite, strict=True):
        names = [n for n, no in zip(correction.errors.names, infinite, strict=True) if no]
        if names:
            found[f"no_{order}"] = ", ".join(names)
    return found


def saved_words(correction: WordedDraws) -> SavedWords:
    """Return the correction in the form in which a file keeps it, with all of its draws."""
    words = {
        "verdict": correction.report(),
        "trusted": correction.trusted,
        "log_evidence": correction.log_evidence,
        "ess": correction.ess,
        "pareto_k": correction.pareto_k,
        "accuracy": correction.accuracy,
    }
    return SavedWords(type(correction).__name__, words, correction.draws, correction.weights)
