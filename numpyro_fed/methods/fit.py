"""One call: from a model and what silos hold to a posterior, with a verdict in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from tqdm.auto import tqdm

from numpyro_fed.errors import GuideError, NonFiniteError, positive_int
from numpyro_fed.methods.base import _one_key
from numpyro_fed.methods.mode import SEARCHED_UP_TO, Mode
from numpyro_fed.methods.pvi import PVI
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.model import data as silo_data
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.split import FederatedModel, split
from numpyro_fed.objectives import ELBO, LocallyEnhanced
from numpyro_fed.results.base import Result, to_arviz
from numpyro_fed.results.importance import AT_ONCE, ERROR, Corrected, importance_correct
from numpyro_fed.results.pvi import PVIResult
from numpyro_fed.results.rematch import rematched

ROUNDS, STEPS = 10, 3_000  # of PVI, of SFVI, at most
INNER, ROWS_EACH = (20, 200), 4  # draws of a row's latents in the correction: one for each few rows
DRAWS = 64_000  # of the globals in the correction, at most
AGAIN = 3  # times that a proposal is matched to the weighted draws
ROWS, OUTER = 20, 5  # draws of each row's latents in the bound; of outer plates' above such rows
KEPT = 8  # models whose compiled programs are kept for the next call
KNOWN = 3  # effective draws for each global, from which on their covariance is worth something
ENOUGH = 0.3  # of the draws count: a better proposal would help less than more of them


class Stage(NamedTuple):
    """A step that was taken: its name, what came of it in words, and its result."""

    name: str
    words: str
    result: Any


@dataclass(frozen=True)
class Fitted:
    """What :func:`numpyro_fed.fit` returns.

    Attributes
    ----------
    best : Corrected or Result
        The best that was reached: the correction, if its weights are reliable, else the fit.
    corrected : Corrected or None
        The correction by which the fit is judged, if there is one.
    stages : tuple of Stage
        All steps that were taken, with their results.
    num_exchanges : int
        Messages that each silo sent, about.
    """

    best: Corrected | Result
    corrected: Corrected | None = field(repr=False)
    stages: tuple[Stage, ...] = field(repr=False)
    num_exchanges: int

    @property
    def mode(self) -> Mode | None:
        """Where the search began to sample, if it did at a mode."""
        fits = [s.result for s in self.stages if isinstance(s.result, Result)]
        return fits[0].start if fits else None

    @property
    def trusted(self) -> bool:
        """Whether means and sds of the globals are right to a tenth of a posterior sd."""
        return self.corrected is not None and self.corrected.trusted

    @property
    def log_evidence(self) -> float | None:
        """Estimate of ``log p(y)``; None where no correction gives one."""
        return None if self.corrected is None else self.corrected.log_evidence

    @property
    def verdict(self) -> str:
        """In words: whether to trust the posterior, what error is left, what was done."""
        return f"{self._judgement()} {self._account()}"

    def _judgement(self) -> str:
        found = self.corrected
        if found is None:
            return "Do not trust this posterior: it could not be checked."
        known = (
            f"{found.ess:,.0f} effective draws, Pareto k-hat {found.pareto_k:.2f}, Monte Carlo "
            f"error of means and sds at most {found.monte_carlo_error:.2g} sd"
        )
        if self.trusted:
            return f"The posterior of the globals can be trusted ({known})."
        if found.reliable:
            return f"Do not rely on the posterior's details: too few draws count ({known})."
        return f"Do not trust this posterior: a few draws carry the weight ({known})."

    def _account(self) -> str:
        taken = "; ".join(f"{stage.name}: {stage.words}" for stage in self.stages)
        return f"{self.num_exchanges} exchanges. {taken}."

    def sample_posterior(self, key: Array, n: int, *, silo: int | None = None) -> dict[str, Array]:
        """Draw from the best posterior that was reached; see :meth:`Result.sample_posterior`."""
        return self.best.sample_posterior(key, n, silo=silo)

    def to_arviz(self, key: Array | None = None, num_samples: int = 1_000) -> Any:
        """Posterior draws as ArviZ ``InferenceData`` (needs the extra ``examples``)."""
        return to_arviz(self.sample_posterior, key, num_samples)

    def __str__(self) -> str:
        return self.verdict


def fit(
    key: Array,
    model: Callable,
    silos: Sequence[Mapping[str, Any]],
    *,
    budget: int = 10_000,
    progress_bar: bool = True,
) -> Fitted:
    """Fit a model over silos, check the posterior, and say whether it can be trusted.

    A second call with the same model and silos of the same shapes compiles nothing. Nothing has to
    be scaled, tuned or counted: the search for the mode, :class:`PVI` from there
    (:class:`SFVI` where the globals are too many or have no family), the importance correction,
    and where its verdict is not good what may help: more draws, a proposal matched to the weighted
    draws, more draws of the rows' latents, SFVI.

    Parameters
    ----------
    key : jax.Array
    model : callable
        A NumPyro model with :class:`~numpyro_fed.silo_plate`.
    silos : list of dict
        What each silo holds, as for :meth:`SFVI.run`.
    budget : int
        Messages that each silo sends, at most, about.
    progress_bar : bool

    Returns
    -------
    Fitted
        With ``.sample_posterior``, ``.verdict``, ``.trusted`` and the results of all ``.stages``.

    Raises
    ------
    ModelError, DataError
        For input that cannot work, and an improper posterior.
    NonFiniteError
        Where neither method comes to a finite posterior.

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
    fm = _split(model, silo_data.read(silos))
    with tqdm(total=3, disable=not progress_bar) as bar:
        return _Fitting(_one_key(key), model, silos, fm, budget, bar).run()


_splits: dict[Any, FederatedModel] = {}


def _split(model: Callable, silos: Sequence[SiloData]) -> FederatedModel:
    """The split text, the same for silos of the same shapes in the next call."""
    key = (model, str(jnp.result_type(float)), tuple(map(signature, silos)))
    if key not in _splits:
        while len(_splits) >= KEPT:
            _splits.pop(next(iter(_splits)))
        _splits[key] = split(model, silos)
    return _splits[key]


@lru_cache(maxsize=KEPT)
def _kept(
    kind: type[PVI] | type[SFVI], model: Callable, draws: tuple[tuple[str, int], ...]
) -> PVI | SFVI:
    """The same object in the next call, with all that it has compiled."""
    return kind(model, objective=LocallyEnhanced(draws=dict(draws)) if draws else ELBO())


class _Fitting:
    """The steps of one call, and what they have led to."""

    def __init__(
        self, key: Array, model: Callable, silos: Any, fm: FederatedModel, budget: int, bar: tqdm
    ):
        self.key, self.model, self.silos, self.fm = key, model, silos, fm
        self.left, self.bar = budget, bar
        self.stages: list[Stage] = []
        self.spent = 0

    def run(self) -> Fitted:
        """Fit, correct, and go on while that may help and the budget lasts."""
        result = self.by_pvi() if self.suits_pvi() else None
        result = self.by_sfvi() if result is None else result
        best = self.corrected(result)
        if best is not None and not best.trusted:
            best = self.improved(best)
        if (best is None or not best.trusted) and isinstance(result, PVIResult) and self.left > 100:
            other = self.by_sfvi()
            again = self.improved(self.corrected(other))
            best = self.better(best, again)
            result = other if again is not None and best is again else result
        reached = result if best is None or not best.reliable else best
        return Fitted(reached, best, tuple(self.stages), self.spent)

    def suits_pvi(self) -> bool:
        """Whether there are globals, and not too many for a full covariance."""
        return 0 < self.fm.dim <= SEARCHED_UP_TO and not self.fm.named("param")

    def method(self, kind: type[PVI] | type[SFVI]) -> PVI | SFVI:
        """A method under the locally enhanced bound, where silos have latents of their own."""
        plates = [p for p in self.fm.plates if p.dim]
        below = any(not p.outer for p in plates)
        outer = OUTER if below else ROWS
        return _kept(kind, self.model, tuple((p.name, outer if p.outer else ROWS) for p in plates))

    @property
    def inner(self) -> int:
        """Draws of each row's latents in the correction: the noise of all rows adds up."""
        rows = [p.name for p in self.fm.plates if p.dim and not p.outer]
        sizes = [self.fm.sizes(silo) for silo in silo_data.read(self.silos)]
        most = max((sum(size[p] for size in sizes) for p in rows), default=0)
        return int(min(max(most / ROWS_EACH, INNER[0]), INNER[1]))

    def by_pvi(self) -> Result | None:
        """PVI, or None where it cannot be had."""
        method = self.method(PVI)
        try:
            with self.stage("PVI"):
                rounds = min(ROUNDS, max(self.left, 1))
                result = method.run(
                    self.key, rounds, self.silos, stop="converged", progress_bar=False
                )
        except (GuideError, NonFiniteError) as error:
            self.tell("PVI", f"not possible ({error})", None)
            return None
        self.spend(len(result.losses) + _opening(result))
        at_rest = "come to rest" if result.settled else "not come to rest"
        self.tell("PVI", f"{len(result.losses)} rounds, {at_rest}", result)
        return result

    def by_sfvi(self) -> Result:
        """SFVI."""
        with self.stage("SFVI"):
            rounds = min(STEPS, max(self.left, 1))
            method = self.method(SFVI)
            result = method.run(self.key, rounds, self.silos, stop="converged", progress_bar=False)
        self.spend(len(result.losses) + _opening(result))
        self.tell("SFVI", f"{len(result.losses)} rounds", result)
        return result

    def corrected(
        self,
        result: Result,
        name: str = "correction",
        draws: int = AT_ONCE,
        inner: int | None = None,
    ) -> Corrected | None:
        """The importance correction, or None where there is none."""
        key = jax.random.fold_in(self.key, len(self.stages))
        try:
            with self.stage(name):
                found = importance_correct(key, result, draws, inner or self.inner)
        except (ValueError, NonFiniteError) as error:
            self.tell(name, f"not possible ({error})", None)
            return None
        self.spend(math.ceil(draws / AT_ONCE))
        share = f"{found.ess:,.0f} of {len(found.weights):,} draws count"
        self.tell(name, f"k-hat {found.pareto_k:.2f}, {share}", found)
        return found

    def improved(self, found: Corrected | None) -> Corrected | None:
        """What more draws make of a correction that is not good enough."""
        best, inner = found, self.inner
        if best is None:
            return None
        if not best.reliable and any(p.dim for p in self.fm.plates):
            inner = 4 * self.inner
            again = self.corrected(best.result, "more draws of the rows' latents", inner=inner)
            best = self.better(best, again) or best
        for _ in range(AGAIN):
            if best.trusted or self.left <= 0:
                break
            if best.reliable and best.ess > ENOUGH * len(best.weights):
                break
            proposal = rematched(best) if best.ess > KNOWN * self.fm.dim else None
            if proposal is None:
                break
            name = "matched to the weighted draws"
            again = self.corrected(proposal, name, 2 * AT_ONCE, inner)
            best = self.better(best, again) or best
        if best.reliable and not best.trusted:
            needed = 1.3 * len(best.weights) * (best.monte_carlo_error / ERROR) ** 2
            draws = min(DRAWS, math.ceil(needed / AT_ONCE) * AT_ONCE, self.left * AT_ONCE)
            if draws > len(best.weights):
                best = self.better(best, self.corrected(best.result, "more draws", draws, inner))
        return best

    def better(self, one: Corrected | None, other: Corrected | None) -> Corrected | None:
        """The one that can be trusted more."""
        known = [c for c in (one, other) if c is not None]
        return max(known, key=_rank, default=None)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show it; its warnings are for the verdict to say."""
        self.bar.set_description(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield

    def tell(self, name: str, words: str, result: Any) -> None:
        """Note what came of a step."""
        self.stages.append(Stage(name, words, result))
        self.bar.total = max(self.bar.total, len(self.stages))
        self.bar.update()

    def spend(self, exchanges: int) -> None:
        self.left -= exchanges
        self.spent += exchanges


def _rank(found: Corrected) -> tuple[bool, bool, float]:
    return found.trusted, found.reliable, -found.monte_carlo_error


def _opening(result: Result) -> int:
    return 0 if result.start is None else result.start.num_exchanges
