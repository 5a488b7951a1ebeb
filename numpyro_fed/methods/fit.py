"""One call: from a model and what silos hold to a posterior, with a verdict in words."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.errors import (
    CoupledRowsError,
    GuideError,
    Interrupted,
    NonFiniteError,
    positive_int,
)
from numpyro_fed.methods.fitted import Fitted, Stage
from numpyro_fed.methods.mode import APART, SEARCHED_UP_TO, LocalMode, distance
from numpyro_fed.methods.pvi import PVI
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.model import data as silo_data
from numpyro_fed.model.data import ReadSilos
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.fingerprint import fingerprint
from numpyro_fed.model.layout import layout_of
from numpyro_fed.objectives import ELBO, LocallyEnhanced
from numpyro_fed.precision import precision as precision_as
from numpyro_fed.results.base import Result
from numpyro_fed.results.importance import AT_ONCE, Corrected, importance_correct
from numpyro_fed.results.pvi import PVIResult
from numpyro_fed.results.rematch import rematched
from numpyro_fed.results.weighted import MAX_ERROR
from numpyro_fed.runtime.noise import typed_key
from numpyro_fed.runtime.progress import StageBar
from numpyro_fed.runtime.stack import State

STARTS = 4  # searches for the mode, side by side
ROUNDS, STEPS = 10, 3_000  # of PVI, of SFVI, at most
ENOUGH_FOR_SFVI = 100  # messages
INNER, ROWS_EACH = (20, 200), 4  # draws of a row's latents in the correction: one for each few rows
DRAWS = 64_000  # of the globals in the correction, at most
AGAIN = 3  # times that a proposal is matched to the weighted draws
ROWS, OUTER = 20, 5  # draws of each row's latents in the bound; of outer plates' above such rows
SMALL = 20_000  # numbers: less time goes into steps over them than into the program for these
KEPT = 8  # methods, each for a model and its draws, whose programs are kept for the next call
KNOWN = 3  # effective draws for each global, from which on their covariance is worth something
RARE = 0.02  # of the mass: a mode with less may be missed
PRECISIONS = ("double", "single")
TAILS = 4  # times as many draws where tails decide


def fit(
    key: Array,
    model: Callable[..., Any],
    silos: Sequence[Mapping[str, Any]],
    *,
    budget: int = 10_000,
    precision: str = "double",
    progress_bar: bool = True,
) -> Fitted:
    r"""Fit a model over silos, check the posterior, and say whether it can be trusted.

    A second call with the same model and silos of the same shapes compiles nothing. Nothing has to
    be scaled, tuned or counted: searches for the mode from several places, :class:`PVI` from the
    best of them (:class:`SFVI` where the globals are too many or have no family), the importance
    correction, and where its verdict is not good what may help: more draws of the rows' latents, a
    proposal matched to the weighted draws, more draws, more rounds, SFVI. What was chosen among
    several corrections is judged by draws of its own.

    The draws are weighed by the joint density of all silos, so that under the conditions that the
    verdict states they are from :math:`p(z_G \mid y)` itself:

    .. math::
        \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

    Parameters
    ----------
    key : jax.Array
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    silos : list of dict
        What each silo holds, as for :meth:`SFVI.run`.
    budget : int
        Messages that each silo sends, at most, about; a search, one round and one correction are
        made in any case.
    precision : {"double", "single"}
        Of all that is computed, whatever the process's default is. Raw data need double: an
        outcome of 10^8 with an sd of 1 is all rounding in single precision. That takes half of the
        memory, and much less time on accelerators that are slow in double precision; the verdict
        says where it does not hold a posterior. Draws of a fit in double precision are NumPy
        arrays where JAX's own would be rounded.
    progress_bar : bool

    Returns
    -------
    Fitted
        With ``.sample_posterior(key, n)`` (each site ``(n, *shape)``), ``.verdict``, ``.trusted``
        and the results of all ``.stages``.

    Raises
    ------
    ModelError, DataError
        For input that cannot work, and an improper posterior.
    NonFiniteError
        Where neither method comes to a finite posterior.
    Interrupted
        By Ctrl-C once something was computed: a ``KeyboardInterrupt`` whose ``result`` has the
        stages so far, and says that it was interrupted.

    References
    ----------
    Ashman et al. (2022), arXiv 2202.12275 (PVI); Vehtari et al. (2024), Pareto smoothed importance
    sampling. Starts, ladder and verdict are this package's own.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 1000))
    ...     sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, sigma), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> silos = [dict(y=rng.normal(1000, 30, n)) for n in (40, 60)]
    >>> fitted = nf.fit(jax.random.key(0), model, silos, progress_bar=False)
    >>> fitted.trusted
    True
    >>> print(fitted.verdict.split(" (")[0])
    The posterior of the globals can be trusted
    """
    positive_int("budget", budget)
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected one of {list(PRECISIONS)}.")
    with precision_as(double=precision == "double"), _ONE, StageBar(progress_bar) as bar:
        read = silo_data.read(silos, model)
        fm = layout_of(model, read).model
        methods = _Methods(model, fingerprint(fm, read))
        fitting = _Fitting(typed_key(key), read, fm, methods, budget, bar)
        try:
            return fitting.run()
        except KeyboardInterrupt as error:
            partly = fitting.interrupted(error)
            if partly is error:
                raise
            raise partly from error


_kept: dict[Any, PVI | SFVI] = {}
_ONE = threading.RLock()  # a thread at a time: warnings that a fit repeats are caught for all


class _Methods(NamedTuple):
    """Methods for a model that says what it said in an earlier call, with all that was compiled."""

    model: Callable[..., Any]
    said: str

    def get(self, kind: type[PVI] | type[SFVI], draws: tuple[tuple[str, int], ...]) -> Any:
        """Return the same object as in the call before, if there was one."""
        who: Any = self.model
        try:
            hash(who)
        except TypeError:
            who = id(who)  # kept alive by the method that is kept
        key = (kind, who, self.said, draws)
        method = _kept.pop(key, None)
        if method is None:
            while len(_kept) >= KEPT:
                _kept.pop(next(iter(_kept)))
            objective = LocallyEnhanced(draws=dict(draws)) if draws else ELBO()
            method = kind(self.model, objective=objective, starts=STARTS)
        _kept[key] = method  # the last used stands last
        return method


class _Fitting:
    """The steps of one call, and what they have led to."""

    def __init__(
        self,
        key: Array,
        silos: ReadSilos,
        fm: FederatedModel,
        methods: _Methods,
        budget: int,
        bar: StageBar,
    ):
        self.key, self.silos, self.fm, self.methods = key, silos, fm, methods
        self.left, self.bar = budget, bar
        self.coupled = self.many = False
        self.inner = self.draws_of_rows()
        self.runtime = "quick" if self.numbers() <= SMALL else "simulation"
        self.stages: list[Stage] = []
        self.warned: list[str] = []
        self.said: set[str] = set()
        self.spent = 0
        self.doing = ""

    def run(self) -> Fitted:
        """Fit, correct, and go on while that may help and the budget lasts."""
        by_pvi = self.by_pvi() if self.suits_pvi() else None
        result = self.by_sfvi() if by_pvi is None else by_pvi
        best = self.improved(self.corrected(result))
        if isinstance(result, PVIResult) and _wants_more(best) and self.left > 0:
            goes_on = result.ended == "rounds" and result.start is not None
            more = self.by_pvi(result) if goes_on else None
            if more is not None:
                best = self.better(best, self.improved(self.corrected(more)))
        if isinstance(result, PVIResult) and _wants_more(best) and self.left > ENOUGH_FOR_SFVI:
            try:
                other = self.by_sfvi()
            except NonFiniteError as error:
                self.spend(_sent_before(error))
                self.tell("SFVI", f"not possible ({error})", None)
            else:
                again = self.improved(self.corrected(other))
                best = self.better(best, again)
                result = other if again is not None and best is again else result
        best = self.confirmed(best)
        reached = result if best is None or not best.reliable else best
        return Fitted(reached, best, tuple(self.stages), self.spent, self.missed(best))

    def interrupted(self, error: KeyboardInterrupt) -> KeyboardInterrupt:
        """Return an error that carries what was reached; the same one if that is nothing."""
        partly = getattr(error, "result", None)
        if partly is not None:
            self.tell(self.doing, "interrupted", partly)
        if not self.results():
            return error
        best: Corrected | None = None
        for stage in self.stages:
            if isinstance(stage.result, Corrected):
                best = self.better(best, stage.result)
        reached = self.results()[-1] if best is None or not best.reliable else best
        found = Fitted(reached, best, tuple(self.stages), self.spent, interrupted=True)
        return Interrupted(
            "interrupted; what the stages so far have reached is in the error's .result: "
            "error.result.save(path) keeps it. The .result of a stage is a fit, whose .state is an "
            "init_state to go on from.",
            result=found,
        )

    def suits_pvi(self) -> bool:
        """Whether there are globals, and not too many for a full covariance."""
        return 0 < self.fm.dim <= SEARCHED_UP_TO and not self.fm.named("param")

    def method(self, kind: type[PVI] | type[SFVI]) -> Any:
        """Return a method, under the locally enhanced bound where silos have latents."""
        plates = [p for p in self.fm.plates if p.dim and not self.coupled]
        below = any(not p.outer for p in plates)
        outer = OUTER if below else ROWS
        return self.methods.get(kind, tuple((p.name, outer if p.outer else ROWS) for p in plates))

    def ran(
        self, kind: type[PVI] | type[SFVI], name: str, rounds: int, before: State | None = None
    ) -> Result:
        """Return the result of a run, under the plain bound where rows read others' latents."""
        rounds = min(rounds, max(self.left, 1))
        settings = dict(stop="converged", progress_bar=self.bar, runtime=self.runtime)
        settings["init_state"] = before
        key = self.new_key()
        with self.stage(name):
            try:
                return self.method(kind).run(key, rounds, self.silos, **settings)
            except CoupledRowsError:
                self.coupled, self.inner = True, 1
                return self.method(kind).run(key, rounds, self.silos, **settings)

    def new_key(self) -> Array:
        """Return a new key, one for each step."""
        self.key, key = jax.random.split(self.key)
        return key

    def draws_of_rows(self) -> int:
        """Return how many draws of each row's latents a correction takes, as noise adds up."""
        rows = [p.name for p in self.fm.plates if p.dim and not p.outer]
        sizes = [self.fm.sizes(silo) for silo in self.silos]
        most = max((sum(size[p] for size in sizes) for p in rows), default=0)
        return int(min(max(most / ROWS_EACH, INNER[0]), INNER[1]))

    def numbers(self) -> int:
        """Return how many numbers all silos hold, as often as a step looks at them."""
        held = sum(a.size for s in self.silos for a in s.arrays.values())
        return held * (ROWS if any(p.dim for p in self.fm.plates) else 1)

    def by_pvi(self, before: Result | None = None) -> Result | None:
        """Return the result of PVI, or of more rounds; None where it cannot be had."""
        name = "PVI" if before is None else "more rounds of PVI"
        try:
            result = self.ran(PVI, name, ROUNDS, None if before is None else before.state)
        except (GuideError, NonFiniteError) as error:
            self.spend(_sent_before(error))
            self.tell(name, f"not possible ({error})", None)
            return None
        self.spend(len(result.losses) + _opening(result))
        at_rest = "come to rest" if result.settled else "not come to rest"
        self.tell(name, f"{len(result.losses)} rounds, {at_rest}", result)
        return result

    def by_sfvi(self) -> Result:
        """Return the result of SFVI, which can always be had."""
        result = self.ran(SFVI, "SFVI", STEPS)
        self.spend(len(result.losses) + _opening(result))
        self.tell("SFVI", f"{len(result.losses)} rounds", result)
        return result

    def corrected(
        self, result: Result, name: str = "correction", draws: int = AT_ONCE
    ) -> Corrected | None:
        """Return the importance correction, or None where there is none."""
        try:
            with self.stage(name):
                found = importance_correct(self.new_key(), result, draws, self.inner)
        except (ValueError, NonFiniteError) as error:
            asked = isinstance(
                error, NonFiniteError
            )  # the others are found before anything is sent
            self.spend(math.ceil(draws / AT_ONCE) if asked else 0)
            self.tell(name, f"not possible ({error})", None)
            return None
        self.spend(math.ceil(draws / AT_ONCE))
        share = f"{found.ess:,.0f} of {len(found.weights):,} draws count"
        short = "" if found.trusted else f", not enough: {found.doubt}"
        self.tell(name, f"k-hat {found.pareto_k:.2f}, {share}{short}", found)
        return found

    def improved(self, found: Corrected | None) -> Corrected | None:
        """Return the best that more draws make of a correction that is not good enough."""
        best = found
        if best is None or best.trusted or not best.precise:
            return best
        rows = any(p.dim for p in self.fm.plates) and not (self.coupled or self.many)
        if not best.reliable and rows and self.left > 0:
            self.many, self.inner = True, 4 * self.inner
            again = self.corrected(best.result, "more draws of the rows' latents")
            best = self.better(best, again) or best
        if not best.reliable and best.many_count and self.left > 0:
            again = self.corrected(best.result, "more draws", TAILS * AT_ONCE)
            best = self.better(best, again) or best
        for _ in range(AGAIN):
            if best.trusted or self.left <= 0:
                break
            if best.reliable and best.many_count:
                break
            proposal = rematched(best) if best.ess > KNOWN * self.fm.dim else None
            if proposal is None:
                break
            name = "matched to the weighted draws"
            again = self.corrected(proposal, name, 2 * AT_ONCE)
            best = self.better(best, again) or best
        if best.reliable and not best.trusted and math.isfinite(best.monte_carlo_error):
            more = 1.3 * (best.monte_carlo_error / MAX_ERROR) ** 2
            needed = len(best.weights) * (more if best.spreads_known else max(more, TAILS))
            draws = min(DRAWS, math.ceil(needed / AT_ONCE) * AT_ONCE, self.left * AT_ONCE)
            if draws > len(best.weights):
                best = self.better(best, self.corrected(best.result, "more draws", draws))
        return best

    def confirmed(self, best: Corrected | None) -> Corrected | None:
        """Return the best of several corrections, judged by draws by which it was not chosen."""
        tried = sum(isinstance(stage.result, Corrected) for stage in self.stages)
        if best is None or not best.trusted or tried <= 2 or self.left <= 0:
            return best
        again = self.corrected(best.result, "judged by new draws", len(best.weights))
        return again if again is not None else best

    def missed(self, best: Corrected | None) -> tuple[LocalMode, ...]:
        """Return other modes of about as much mass that the draws do not reach."""
        start = next((r.start for r in self.results() if r.start is not None), None)
        if best is None or start is None or start.log_evidence is None:
            return ()
        evidence = np.array([start.log_evidence, *(p.log_evidence for p in start.others)])
        if not np.isfinite(evidence.max()):
            return ()
        share = np.exp(evidence - np.logaddexp.reduce(evidence))[1:]
        z, w = np.asarray(best._z_G, float), best.weights
        near = [w @ (distance(p, z) <= APART + math.sqrt(self.fm.dim)) for p in start.others]
        return tuple(
            p
            for p, expected, there in zip(start.others, share, near, strict=True)
            if expected > RARE and there < expected / 3
        )

    def results(self) -> list[Result]:
        """Return the fits so far."""
        return [stage.result for stage in self.stages if isinstance(stage.result, Result)]

    def better(self, one: Corrected | None, other: Corrected | None) -> Corrected | None:
        """Return the one that can be trusted more."""
        known = [c for c in (one, other) if c is not None]
        return max(known, key=_rank, default=None)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show it; what it warns of is for the verdict to say, each once."""
        self.doing = name
        self.bar.stage(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.warned = []
        for w in caught:
            text = str(w.message).removesuffix(".")
            if not issubclass(w.category, UserWarning):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
            elif text not in self.said:
                self.said.add(text)
                self.warned.append(text)

    def tell(self, name: str, words: str, result: Result | Corrected | None) -> None:
        """Note what came of a step."""
        self.stages.append(Stage(name, " ".join([words, *map("({})".format, self.warned)]), result))
        self.warned = []

    def spend(self, exchanges: int) -> None:
        self.left -= exchanges
        self.spent += exchanges
        self.bar.account(self.spent)


def _wants_more(found: Corrected | None) -> bool:
    """Whether more work may help: not where precision does not hold the posterior."""
    return found is None or not (found.trusted or not found.precise)


def _rank(found: Corrected) -> tuple[bool, bool, float]:
    return found.trusted, found.reliable, -found.monte_carlo_error


def _sent_before(error: Exception) -> int:
    """Return how many messages each silo had sent when a run ended by an error."""
    if not isinstance(error, NonFiniteError):
        return 0
    if not isinstance(error.result, Result):  # in the search: its exchanges
        return error.round
    return len(error.result.losses) + 1 + _opening(error.result)


def _opening(result: Result) -> int:
    return 0 if result.start is None else result.start.num_exchanges
