"""The result of ``nf.fit``: the posterior, and a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np
from jax import Array

from numpyro_fed import html
from numpyro_fed.after.base import AfterFit
from numpyro_fed.after.run import WhichSilo, silo_number
from numpyro_fed.errors import DataError
from numpyro_fed.privacy.budget import Spent
from numpyro_fed.results.arviz import Coords, Dims, Labels
from numpyro_fed.results.corrected import Corrected
from numpyro_fed.results.groups import groups_to_arviz, log_likelihood
from numpyro_fed.results.influence import SiloTable
from numpyro_fed.results.mode import LocalMode, Mode, Near
from numpyro_fed.results.particles import Particles
from numpyro_fed.results.private import NOT_PROTECTED, PrivateResult
from numpyro_fed.results.rows import Result
from numpyro_fed.results.saving import SavedWords, save
from numpyro_fed.runtime.federation import Federation
from numpyro_fed.waiting import shows

# Draws of a fit without a reliable correction that a file keeps, as many as a correction has: the
# sd of a mean is then 1.6 % of an sd.
KEPT_DRAWS = 4_000


class Call(Protocol):
    """The call that made a fit, to be made again with other silos."""

    @property
    def progress_bar(self) -> bool:
        """Return whether it shows that it goes on."""

    def with_silo(self, silo: Any) -> Self:
        """Return the call with one silo more."""

    def without_silo(self, j: int) -> Self:
        """Return the call without a silo."""

    def run(self, key: Array, near: Near | None = None) -> Fitted:
        """Return the fit, whose search begins near some places."""


class Stage(NamedTuple):
    """A step of a call: its name, its outcome in words, and its result."""

    name: str
    words: str
    result: Any

    def __repr__(self) -> str:
        return f"Stage(name={self.name!r}, words={self.words!r})"


@dataclass(frozen=True, eq=False)
class Fitted(AfterFit):
    """The result of :func:`numpyro_fed.fit`: a posterior, and whether to trust it.

    Attributes
    ----------
    best : Corrected or Result
        The best that was reached: the correction, if its weights are reliable, else the fit.
    corrected : Corrected or None
        The correction by which the fit is judged, if there is one.
    stages : tuple of Stage
        All steps with their results.
    num_exchanges : int
        The number of messages that each silo sent, about.
    missed : tuple of LocalMode
        Other modes that the search has found, with a share of the mass, which the draws do not
        reach.
    contradiction : str
        Which silo contradicts the others, in words, if that was seen at the mode: of silos in this
        process, with more than twice as many rows as globals.
    interrupted : bool
        Whether Ctrl-C has ended the call; then this holds what was reached by then.
    call : FitCall or None
        The call that made it; None for a fit that was loaded without its data.
    """

    best: Corrected | Result
    corrected: Corrected | None = field(repr=False)
    stages: tuple[Stage, ...] = field(repr=False)
    num_exchanges: int
    missed: tuple[LocalMode, ...] = field(default=(), repr=False)
    contradiction: str = field(default="", repr=False)
    interrupted: bool = field(default=False, repr=False)
    call: Call | None = field(default=None, repr=False)

    @property
    def run_behind(self) -> Result:
        """Return the run that the best posterior rests on."""
        return self.best.run_behind

    @property
    def shows_progress(self) -> bool:
        """Return whether calls show that they go on, as the fit did."""
        return self.call is None or self.call.progress_bar

    @property
    def doubt_of_all(self) -> str:
        """Return the verdict's judgement if it is not to trust the posterior."""
        return "" if self.trusted else self._judgement()

    @property
    def correction_behind(self) -> Corrected | str:
        """Return the correction by which the fit is judged, or why there is none."""
        if isinstance(self.best, PrivateResult):
            return NOT_PROTECTED
        return self.corrected or "the fit could not be checked"

    @property
    def mode(self) -> Mode | None:
        """Return the mode at which the first fit began, if it began at one."""
        fits = (s.result for s in self.stages if isinstance(s.result, Result))
        return next((fit.start for fit in fits if fit.start is not None), None)

    @property
    def trusted(self) -> bool:
        """Whether the globals, as their user sees them, are right to the accuracy asked for.

        That holds for quantiles, and for means and sds that exist; :attr:`verdict` names those that
        do not.
        """
        if isinstance(self.best, PrivateResult):
            return self.best.settled
        correction = self.corrected
        return (
            correction is not None and correction.trusted and not (self.missed or self.interrupted)
        )

    @property
    def privacy(self) -> Spent | None:
        """Return what was spent of a budget of differential privacy; None without one."""
        return self.best.privacy if isinstance(self.best, PrivateResult) else None

    @property
    def log_evidence(self) -> float | None:
        """The estimate of ``log p(y)``; None if no correction gives one."""
        return None if self.corrected is None else self.corrected.log_evidence

    @property
    def silos(self) -> SiloTable:
        """Return how far each silo moves the posterior, as :attr:`numpyro_fed.Result.silos` does.

        It takes one exchange.
        """
        return self.best.silos

    @property
    def verdict(self) -> str:
        """Return in words whether to trust the posterior, what error is left, and what was done."""
        return " ".join(filter(None, (self._judgement(), self.contradiction, self._account())))

    def _judgement(self) -> str:
        if isinstance(self.best, PrivateResult):
            return self.best.judgement
        correction = self.corrected
        if correction is None:
            why = "the fit was interrupted" if self.interrupted else "it could not be checked"
            return (
                f"Do not trust this posterior: {why}. What follows says more; "
                "NUTS on pooled data (run_nuts), where that is allowed, would show it."
            )
        figures = correction.figures
        if self.interrupted:
            return (
                "Do not trust this posterior: the fit was interrupted before its check was done "
                f"({figures})."
            )
        if self.missed:
            return (
                "Do not trust this posterior: it is that around one of "
                f"{1 + len(self.missed)} modes"
                " that the search has found, and others hold about as much of the mass "
                f"({figures}). A prior or a constraint that tells them apart (a sign, an order) "
                "leaves one; .missed has the others."
            )
        if self.trusted:
            return f"The posterior of the globals can be trusted ({figures}){correction._but}."
        if not correction.precise:
            remedy = correction._rounding.remedy
            return f"Do not trust this posterior: {correction.doubt} ({figures}). {remedy}"
        if isinstance(correction, Particles):
            return (
                f"Do not trust this posterior: {correction.doubt} ({figures}). Try more "
                "max_exchanges, or NUTS on pooled data where that is allowed."
            )
        if correction.reliable:
            part = "details" if correction.moments_known else "spreads"
            known = (
                " Medians and quantiles are known: use these." if correction.quantiles_known else ""
            )
            return (
                f"Do not rely on the posterior's {part}: {correction.doubt} ({figures}).{known} "
                "Try importance_correct(key, fitted.corrected.result, num_draws=100_000), or more "
                "max_exchanges."
            )
        if correction.many_count:
            return (
                f"Do not rely on the posterior's details: {correction.doubt} ({figures}). Try "
                "importance_correct(key, fitted.corrected.result, num_draws=100_000)."
            )
        return (
            f"Do not trust this posterior: {correction.doubt} ({figures}). Try effects as "
            "scale times a standard normal or the other way round, a prior that holds what the "
            "data leave open, more max_exchanges, or NUTS on pooled data where that is allowed."
        )

    def _account(self) -> str:
        taken = "; ".join(f"{stage.name}: {stage.words}" for stage in self.stages)
        return f"{self.num_exchanges} exchanges. {taken}.{self._of_parameters()}"

    def _of_parameters(self) -> str:
        """Return in words which sites are in no draws, and where they are."""
        found = [s for s in self.run_behind._fit.model.sites if s.kind == "param"]
        if not found:
            return ""
        names = ", ".join(f"'{s.name}'" for s in found)
        where = dict.fromkeys(".params" if s.plate is None else ".silo_params(j)" for s in found)
        one, several = ("is a parameter", "a point estimate"), ("are parameters", "point estimates")
        kind, estimate = one if len(found) == 1 else several
        return (
            f" {names} {kind} without a prior (numpyro.param): {estimate} without uncertainty, in "
            f"{' and '.join(where)}, and in no draws."
        )

    @property
    def params(self) -> dict[str, Any]:
        """Return parameters without a prior (``numpyro.param``), on their supports.

        They are point estimates that all silos share, and are in no draws; the posterior is that
        at these values.
        """
        return {name: value for name, value in self.run_behind.params.items() if name != "guide"}

    def silo_params(self, silo: int) -> dict[str, Any]:
        """Return a silo's private parameters without a prior, on their supports.

        Raises
        ------
        DataError
            For a silo in another process, whose parameters are its own.
        """
        found = self.run_behind.silo_params(silo)
        return {name: value for name, value in found.items() if name != "guide"}

    @shows("draw")
    def sample_posterior(
        self, key: Array, n: int, *, silo: WhichSilo | None = None
    ) -> dict[str, Array]:
        """Draw from the best posterior that was reached; see :meth:`Result.sample_posterior`.

        Parameters without a prior are in no draws: see :attr:`params`.
        """
        return self.best.sample_posterior(key, n, silo=silo)

    def draws_for_silo(self, key: Array, n: int, *, silo: int) -> bytes:
        """Return draws of the globals for a silo; see :meth:`Corrected.draws_for_silo`."""
        return self.best.draws_for_silo(key, n, silo=silo)

    def add(self, key: Array, silo: Mapping[str, Any] | Federation) -> Fitted:
        """Return a fit of these silos and one more, with a verdict of its own.

        Half of the searches for the mode begin at the modes of this fit, and everything else is
        done anew: it is the posterior of all rows, and no approximate update of this one.

        Parameters
        ----------
        key : jax.Array
        silo : dict, or Federation
            The data of the new silo. For silos in other processes a :class:`Federation` of these,
            in the same order, and of the new one after them.

        Raises
        ------
        DataError
            If the silo's data do not suit the model, or the fit has no data (loaded without them).

        Notes
        -----
        Each silo answers as in :func:`fit`, in fewer exchanges. What leaves it is the same.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mu, 2), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> silos = [dict(y=rng.normal(m, 2, 20)) for m in (3.0, 3.0, 9.0)]
        >>> fitted = nf.fit(jax.random.key(0), model, silos[:2], progress_bar=False)
        >>> more = fitted.add(jax.random.key(1), silos[2])
        >>> fewer = more.remove(jax.random.key(2), 2)
        >>> [round(float(f.sample_posterior(jax.random.key(3), 4_000)["mu"].mean()))
        ...  for f in (fitted, more, fewer)]
        [3, 5, 3]
        """
        return self._made_again(key, lambda call: call.with_silo(silo))

    def remove(self, key: Array, silo: int) -> Fitted:
        """Return a fit without a silo, as if it had never taken part.

        Nothing of the silo is in the new fit: neither its factor nor its likelihood in weights and
        evidence, and the draws are new ones, weighed by the joint density of the others. Only
        half of the searches for the mode begin at the modes of this fit. The silo itself is not
        asked.

        Parameters
        ----------
        key : jax.Array
        silo : int
            The number of the silo. Those after it move up by one.

        Raises
        ------
        DataError
            If there is no such silo, or no other one; or if the fit was loaded without data.
        """
        silo, number = silo_number(silo), self.run_behind.num_silos
        if not 0 <= silo < number:
            raise DataError(f"there is no silo {silo}: the fit has {number}, from 0 on.")
        if number == 1:
            raise DataError("the only silo cannot be removed: nothing but the prior would be left.")
        return self._made_again(key, lambda call: call.without_silo(silo))

    def _made_again(self, key: Array, other: Callable[[Call], Call]) -> Fitted:
        """Return the fit of another call, from the modes of this one."""
        if self.privacy is not None:
            raise DataError(
                "a fit under differential privacy is not made again: that would spend another "
                "budget on the same silos. Call fit(..., privacy=) with the silos that you want, "
                "and add up what both have spent."
            )
        if self.call is None:
            raise DataError(
                "this fit was loaded without its data: use nf.load(path, model, silos) to add or "
                "remove silos."
            )
        near = None if self.mode is None else self.mode.places
        return other(self.call).run(key, near)

    @shows("draw")
    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        silo: WhichSilo | None = None,
        groups: Sequence[str] | str = (),
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as an ArviZ object.

        It is a ``DataTree``, or an ``InferenceData`` before ArviZ 1. There are at most as many
        draws as the weighted draws are worth, so that ``arviz.ess`` is about true. The group
        ``posterior`` has the attributes ``verdict``, and ``ess`` and ``pareto_k`` of the
        correction. Needs the extra ``examples``.

        Parameters
        ----------
        key : jax.Array, optional
        num_samples : int
        silo : int, list of int, or "all", optional
            As in :meth:`sample_posterior`.
        groups, coords, dims : optional
            Further groups, and names, as :meth:`Corrected.to_arviz` has them.
        """
        # Draws of a fit without a reliable correction are independent, and worth their number.
        of_correction = {} if self.corrected is None else self.corrected._attributes
        worth = self.best.ess if isinstance(self.best, Corrected) else math.inf
        attributes = {**of_correction, "verdict": self.verdict}
        return groups_to_arviz(
            self,
            self.best,
            partial(log_likelihood, self.best),
            key,
            num_samples,
            silo=silo,
            groups=groups,
            labels=Labels.of(coords, dims),
            worth=worth,
            attributes=attributes,
        )

    def save(self, path: str | Path) -> None:
        """Write draws, weights, the verdict and the fit behind it to ``path.npz``.

        The file has no data and no pickle, and is whole or not there. :func:`numpyro_fed.load`
        reads it: without model and data to draw from the posterior, with them to go on. It keeps
        the names and words of the ``stages``, and the fits that ``best`` and ``corrected`` rest on.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        """
        correction, best = self.corrected, self.best
        checked: Result = best if isinstance(best, Result) else best.result
        saved, others = SavedWords("", {}), {}
        if correction is not None:
            saved, checked = correction.saved_words(), correction.result
        if isinstance(best, Result):
            saved = replace(saved, draws=best.sample_posterior(jax.random.key(0), KEPT_DRAWS))
            saved = replace(saved, weights=None)
            # The correction rests on another fit than the best one: the file keeps both.
            others = {} if best is checked else {"best": best.saved_run()}
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        words = {
            **saved.words,
            "verdict": self.verdict,
            "report": saved.words.get("verdict", self.verdict),
            "trusted": self.trusted,
            "stages": [[stage.name, stage.words] for stage in self.stages],
            "is_best": correction is not None and best is correction,
            "fields": {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str)},
        }
        missed = {
            f"missed/{i}/{name}": np.asarray(value)
            for i, peak in enumerate(self.missed)
            for name, value in peak._asdict().items()
        }
        arrays = {**saved.arrays, **missed}
        saved = replace(saved, kind=type(self).__name__, words=words, arrays=arrays)
        save(path, saved, checked.saved_run(), checked.provenance(), others)

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        return html.words(self.verdict)
