"""What each step of ``nf.fit`` is made of: a run of a method, and the correction of its result.

:mod:`.ladder` has the order of the steps, :mod:`.remedies` what improves a correction, and
:mod:`.particle_steps` the particles.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    CoupledRowsError,
    GuideError,
    NonFiniteError,
    RefusedError,
)
from numpyro_fed.fitting.account import Account
from numpyro_fed.fitting.problem import FitProblem
from numpyro_fed.guides.objectives import default_quadrature
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.importance import AT_ONCE, InnerDraws, correct_from, importance_correct
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.method import PVI
from numpyro_fed.rounds.runtime import State
from numpyro_fed.sfvi.method import SFVI
from numpyro_fed.weigh.mixture import MIXTURE_FULL_UP_TO, Mixture, around_modes

# Messages that must be left for a try of SFVI: with fewer rounds its bound has not settled, and
# nothing can be said.
MIN_FOR_SFVI = 100
# Draws of a row's latents in the correction: one for each few rows. The errors of the rows'
# estimates add up, so that for a given noise of the weights draws must grow with the rows.
INNER_RANGE, ROWS_PER_DRAW = (20, 200), 4
# Share of the draws of a correction that look beyond the mixture around the modes.
# Where tails decide, half of the further draws are wider.
WIDER, WIDER_FOR_TAILS = 0.16, 0.5


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
            return self.problem.method_for(kind, coupled=self.coupled).run(
                key,
                rounds,
                self.problem.silos,
                init_state=init_state,
                stop="converged",
                progress_bar=self.account.bar,
                runtime=self.problem.runtime_name,
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
                    sent = len(found.losses) + 1 + exchanges_of_search(found)
                self.account.spend(sent)
            self.account.record(name, f"not possible ({error})", None)
            return None
        self.account.spend(len(result.losses) + exchanges_of_search(result))
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
            words = [f"found in {exchanges_of_search(result)} exchanges", *result.start.repeats]
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
        proposal: Mixture | None = None,
        pooled_with: Corrected | None = None,
        wider: float = WIDER,
    ) -> Corrected | None:
        """Return the importance correction of a result; None if it fails.

        Most draws come from the mixture ``proposal``, by default around the fit and other modes.
        Those of the correction ``pooled_with`` are added to them. With it alone, new draws from its
        mixtures judge it.
        """
        earlier = 0 if pooled_with is None else pooled_with.num_exchanges
        try:
            with self.account.stage(name):
                if proposal is None and pooled_with is None:
                    proposal = self.around(result)
                args = self.new_key(), result, draws, self.inner_draws
                accuracy, mode = self.accuracy, self.account.mode
                if proposal is None and pooled_with is None:
                    correction = importance_correct(*args, accuracy=accuracy)
                else:
                    copy = None if mode is None else mode.copy
                    correction = correct_from(
                        *args,
                        proposal,
                        wider=wider,
                        accuracy=accuracy,
                        earlier=pooled_with,
                        copy=copy,
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
        if not 0 < self.fm.dim <= MIXTURE_FULL_UP_TO:
            return None
        z = result.many_draws_of_globals().astype(np.float64)
        mode = self.account.mode
        others = () if mode is None or mode.log_evidence is None else mode.others
        first = None if mode is None or not others else mode.log_evidence
        evidence = [first or 0.0, *(p.log_evidence for p in others)]
        modes = [(p.z_G, p.curvature) for p in others]
        return around_modes(z, modes, np.asarray(evidence)) if np.isfinite(z).all() else None

    def most_trusted(self, *corrections: Corrected | None) -> Corrected | None:
        """Return the correction that is the most trustworthy, if there is one."""
        return max(
            (c for c in corrections if c is not None),
            key=lambda c: (c.trusted, c.reliable, -c.monte_carlo_error),
            default=None,
        )


def exchanges_of_search(result: Result) -> int:
    """Return the exchanges of the search for a mode with which a run began."""
    return 0 if result.start is None else result.start.num_exchanges
