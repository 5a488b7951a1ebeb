"""A certificate without pooled inference: importance-correct a federated fit in one exchange."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.diagnostics import psis_weights
from jax import Array

from numpyro_fed.algorithms.base import Exchange
from numpyro_fed.algorithms.importance.exchange import importance
from numpyro_fed.algorithms.importance.likelihood import SiloLikelihood
from numpyro_fed.algorithms.importance.proposals import SHARE, Proposal, proposal
from numpyro_fed.errors import NonFiniteError, positive_int
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.verdicts import check_rows_apart
from numpyro_fed.objectives import LocallyEnhanced, draws_by_plate, silo_bound
from numpyro_fed.results.base import Built, Fit, Result
from numpyro_fed.results.moments import Moments, moments
from numpyro_fed.results.posterior import Posterior, posterior
from numpyro_fed.runtime.drive import failed_silos
from numpyro_fed.runtime.stack import Single

AT_ONCE = 4_000  # draws in an exchange
FEW = 100  # draws: with fewer there is no tail to speak of
ERROR = 0.03  # sds: a tenth of an sd is then more than three standard errors
CLOSE = 0.1  # sds
NONE = -100.0  # log weight, less the largest, that counts as none


def importance_correct(
    key: Array,
    result: Result,
    num_draws: int = 4_000,
    inner_draws: int | Mapping[str, int] = 100,
    *,
    wider: float = SHARE,
) -> Corrected:
    r"""Weigh draws of the globals by the joint density of all silos, in one exchange.

    The server sends ``num_draws`` draws of ``z_G``; each silo integrates its own locals by
    ``inner_draws`` weighted draws from its guide and answers with one number a draw; the sum of
    the answers (which secure aggregation may form) gives

    .. math::
        \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

    The weights are Pareto-smoothed (Vehtari et al. 2024, by BlackJAX). Their shape ``k`` says
    whether guide and posterior are close enough to trust, with no pooled run to compare with.
    ``q`` is the guide and, for some of the draws, wider distributions around it and the prior's
    spread (:mod:`numpyro_fed.algorithms.importance.proposals`), which show what a narrow guide, or
    one in one of several modes, would not. A mode that is narrow and far off, as seen from the
    prior, still hides.

    Parameters
    ----------
    key : jax.Array
    result : Result
        A fit, under any bound.
    num_draws : int
        Draws of the globals, four thousand in an exchange at most; their number is rounded up to a
        multiple of that.
    inner_draws : int or dict of str to int
        Draws of the locals for each of them: an int for the plates of rows, or, where there are
        outer plates, for these, with the square root of it for the rows below; or a dict by plate.
    wider : float
        Share of the draws that look beyond the guide; 0 trusts the guide's reach.

    Returns
    -------
    Corrected

    Raises
    ------
    ValueError
        For a fit under a divergence other than KL: its posterior is not proportional to a density
        that could be weighed.
    ModelError
        If a row's term reads latents of other rows, unless ``inner_draws`` is 1 there.
    NonFiniteError
        If a silo's estimate is NaN, or no draw has any weight.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, optax
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         b = numpyro.sample("b", dist.Normal(mu, 1))
    ...         numpyro.sample("y", dist.Normal(b, 1), obs=y)
    >>> silos = [dict(y=np.array([1.0, 2.0])), dict(y=np.array([3.0, 4.0]))]
    >>> fit = nf.SFVI(model, optim=optax.adam(0.05)).run(
    ...     jax.random.key(0), 500, silos, progress_bar=False)
    >>> fixed = nf.importance_correct(jax.random.key(1), fit, num_draws=1_000, inner_draws=20)
    >>> bool(fixed.pareto_k < 0.7), bool(fixed.ess > 500)
    (True, True)
    """
    positive_int("num_draws", num_draws)
    if not 0 <= wider < 1:
        raise ValueError(f"wider must be a share in [0, 1), got {wider!r}.")
    fit, silos, state = result._fit, result._silos, result.state
    batches = () if silos is None else silos.batches
    _check_weighable(fit)
    draws = _inner_draws(fit.guide, inner_draws)
    if silos is not None and fit.checks is not None:
        check_rows_apart(fit.model, fit.checks, draws, silos.buckets)
    size = min(num_draws, AT_ONCE)
    weigh, sampler, proposed = _compiled(fit, draws, size, wider)
    parts, evidence = [], []
    for i in range(-(-num_draws // size)):
        mine = jax.random.fold_in(key, i) if i else key
        weighed, states, info, good = weigh(mine, state.server, state.silos, batches)
        if not bool(info.ok):
            bad = failed_silos(good, states, batches)
            where = f"silo {', '.join(map(str, bad))}" if bad else "the server"
            raise NonFiniteError(
                f"the importance weights are NaN, or all zero, because of {where}. Fit for more "
                "rounds, or look at the data and the supports of the sites there.",
                result=result,
                round=int(state.round),
                silos=bad,
            )
        parts.append(weighed)
        evidence.append(-float(info.loss))
    z_G, log_weights = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    own = np.tile(np.arange(size) < proposed.own, len(parts))
    pareto_k, weights = _weights(log_weights)
    ess = float(1 / (weights**2).sum())
    z_G = _without_the_weightless(z_G, weights)
    log_evidence = float(np.logaddexp.reduce(evidence) - np.log(len(evidence)))
    return Corrected(
        log_evidence=None if fit.factors and fit.factors.loss else log_evidence,
        ess=ess,
        pareto_k=pareto_k,
        weights=weights,
        result=result,
        _key=jax.random.fold_in(key, 1),
        _z_G=z_G,
        _moments=moments(np.asarray(z_G), weights, own),
        _posterior=sampler,
    )


def _without_the_weightless(z_G: Array, weights: np.ndarray) -> Array:
    """Draws (n, dim) that carry weight; others, which may overflow, stand where the heaviest is."""
    return jnp.where(jnp.asarray(weights > 0)[:, None], z_G, z_G[weights.argmax()])


def _check_weighable(fit: Fit) -> None:
    if fit.factors is not None and fit.factors.divergence:
        raise ValueError(
            "this fit's divergence is not KL, so that its posterior is no prior times likelihood: "
            "weights would turn it into the ordinary posterior. Correct a fit with "
            "divergence=KL() and prior_divergence=KL(), or judge this one by prediction."
        )


@dataclass(frozen=True)
class Corrected:
    """An importance-corrected fit.

    Attributes
    ----------
    log_evidence : float or None
        Estimate of ``log p(y)``; None under a loss, where there is none.
    ess : float
        Effective number of draws.
    pareto_k : float
        Shape of the weights' tail: the smaller the better (:attr:`reliable`).
    weights : array (num_draws,)
        Smoothed weights, which sum to one.
    result : Result
        The fit that was corrected.
    """

    log_evidence: float | None
    ess: float
    pareto_k: float
    weights: np.ndarray = field(repr=False)
    result: Result = field(repr=False)
    _key: Array = field(repr=False)
    _z_G: Array = field(repr=False)
    _moments: Moments = field(repr=False)
    _posterior: Posterior = field(repr=False)

    @property
    def threshold(self) -> float:
        """The largest ``pareto_k`` for which this many draws are enough.

        ``min(1 - 1 / log10(S), 0.7)`` (Vehtari et al. 2024, section 3.2.4).
        """
        return _threshold(len(self.weights))

    @property
    def reliable(self) -> bool:
        """Whether the weights' tail lets averages over them converge as they should."""
        return self.pareto_k <= self.threshold

    @property
    def monte_carlo_error(self) -> float:
        """The largest standard error of a global's mean or sd, in posterior sds.

        Of unconstrained coordinates, as all that follows.
        """
        return float(self._moments.error.max(initial=0.0))

    @property
    def trusted(self) -> bool:
        """Whether corrected means and sds are right to a tenth of an sd."""
        return self.reliable and self.monte_carlo_error <= ERROR

    @property
    def fit_error(self) -> dict[str, dict[str, np.ndarray]]:
        """How far the fit is from its correction, ``{site: {"mean_error_sd", "sd_ratio"}}``."""
        shift, sites = self._moments.shift, self.result._fit.model.named("latent")
        return {
            s.name: {
                "mean_error_sd": np.abs(shift[0, s.start : s.stop]).reshape(s.shape),
                "sd_ratio": 1 + shift[1, s.start : s.stop].reshape(s.shape),
            }
            for s in sites
        }

    @property
    def fit_trusted(self) -> bool:
        """Whether the fit's own means and sds are right to a tenth of an sd."""
        off, error = np.abs(self._moments.shift), self._moments.shift_error
        enough = self.reliable and len(self.weights) >= FEW
        return enough and bool((off + 2 * error <= CLOSE).all())

    @cached_property
    def draws(self) -> dict[str, Array]:
        """Draws of the globals on their own supports, to be weighted by ``weights``."""
        theta = self.result.shared.theta
        return self._posterior.constrain_globals(theta, self._z_G)

    @cached_property
    def samples(self) -> dict[str, Array]:
        """As many draws of the globals, resampled by their weights."""
        return self.sample_posterior(self._key, len(self.weights))

    def sample_posterior(self, key: Array, n: int, *, silo: int | None = None) -> dict[str, Array]:
        """Draw from the corrected posterior; with ``silo``, also that silo's locals.

        Globals are resampled by their weights. Locals are drawn anew at them, each from
        ``inner_draws`` draws by weight, which is exact as their number grows.
        """
        chosen = self._z_G[_systematic(jax.random.fold_in(key, 0), jnp.asarray(self.weights), n)]
        return self.result.sites_at(jax.random.fold_in(key, 1), chosen, silo, self._posterior)

    def report(self) -> str:
        """Say in words whether the posterior can be trusted, and whether the fit can."""
        share = self.ess / len(self.weights)
        evidence = "" if self.log_evidence is None else f", log evidence {self.log_evidence:.2f}"
        return (
            f"Pareto k-hat {self.pareto_k:.2f} (at most {self.threshold:.2f} is reliable for "
            f"{len(self.weights)} draws), {self.ess:.0f} effective draws ({share:.0%})"
            f"{evidence}. {self._verdict(share)}"
        )

    def _verdict(self, share: float) -> str:
        if len(self.weights) < FEW:
            return "Too few draws to tell: k-hat needs 100 or more."
        if self.reliable and not self.trusted:
            return (
                f"Means and sds are known to {self.monte_carlo_error:.2g} sd only: take more "
                f"num_draws, or fit for longer. {self._fit_verdict()}"
            )
        if self.reliable:
            return (
                "The corrected posterior of the globals can be trusted: means and sds are known to "
                f"{self.monte_carlo_error:.2g} sd. {self._fit_verdict()}"
            )
        if share > 0.5:
            return (
                "Most draws count, so the corrected means and spreads are about right, but the "
                "posterior's tails reach beyond the guide's: do not trust tail probabilities, and "
                "look at it with other keys and more draws."
            )
        return (
            "Neither the fit nor its correction can be trusted: a few draws carry the weight. "
            "Run more rounds, use a richer guide or LocallyEnhanced, or more inner_draws."
        )

    def _fit_verdict(self) -> str:
        off = np.abs(self._moments.shift)
        if not off.size:
            return "There are no globals to compare."
        which, place = np.unravel_index(off.argmax(), off.shape)
        sites = self.result._fit.model.named("latent")
        name = next(s.name for s in sites if s.start <= place < s.stop)
        worst = f"the {('mean', 'sd')[which]} of '{name}' is {off[which, place]:.2g} sd off"
        if self.fit_trusted:
            also = " as well" if self.trusted else ""
            return f"The globals of the fit can be trusted{also}: at worst {worst}."
        return f"The globals of the fit itself cannot: {worst}. Use the correction."

    def __str__(self) -> str:
        return self.report()


_smooth = jax.jit(psis_weights)  # a hundred small programs otherwise


def _weights(log_weights: Array) -> tuple[float, np.ndarray]:
    """k-hat and normalised weights: smoothed, but as they are where k-hat is too large for that.

    Few large weights among equal ones, those of a mode that the guide has missed, would be lost.
    """
    smoothed, k = _smooth(log_weights)
    for found in (smoothed, log_weights):
        log_w = np.array(found, np.float64)
        log_w -= log_w.max()
        weights = np.where(log_w > NONE, np.exp(log_w), 0.0)
        weights = weights / weights.sum()
        share = float(1 / (weights**2).sum() / len(weights))
        pareto_k = _tail(float(k), share)
        if pareto_k <= _threshold(len(weights)):
            break
    return pareto_k, weights


def _threshold(num_draws: int) -> float:
    return min(1 - 1 / math.log10(max(num_draws, 11)), 0.7)


def weighing(built: Built, name: str) -> tuple[Exchange, Proposal]:
    """The exchange, from the name that says all of its settings, and its proposal."""
    settings = json.loads(name)
    draws, num_draws = settings["inner_draws"], settings["num_draws"]
    fm, guide = built.model, built.guide
    proposed = proposal(fm, guide.globals, num_draws, settings["wider"])
    likelihood, batch = SiloLikelihood(fm, guide, draws), settings["batch_size"]
    exchange = importance(fm, guide, proposed, likelihood, built.algorithm, num_draws, batch, name)
    return exchange, proposed


def _compiled(
    fit: Fit, draws: dict[str, int], num_draws: int, wider: float
) -> tuple[Single, Posterior, Proposal]:
    """The exchange and the sampling functions for these numbers of draws, compiled once a fit."""
    settings = dict(
        importance=True,
        inner_draws=draws,
        num_draws=num_draws,
        wider=wider,
        batch_size=_batch_size(fit, draws, num_draws),
    )
    name = json.dumps(settings)
    if name not in fit.compiled:
        exchange, proposed = weighing(fit.built, name)
        sampler = posterior(fit.model, fit.guide, silo_bound(fit.model, fit.guide, draws))
        fit.compiled[name] = fit.runtime.single(exchange), sampler, proposed
    return fit.compiled[name]


def _tail(pareto_k: float, share: float) -> float:
    """``k`` where there is no tail to fit: weights equal up to rounding, or a few that are all."""
    if not math.isnan(pareto_k):
        return pareto_k
    return 0.0 if share > 0.99 else math.inf


def _inner_draws(guide: Guide, inner_draws: int | Mapping[str, int]) -> dict[str, int]:
    if isinstance(inner_draws, Mapping) or not guide.outer:
        return draws_by_plate(LocallyEnhanced(inner_draws), guide)
    below = math.isqrt(max(inner_draws - 1, 0)) + 1
    split = {p: inner_draws if p in guide.outer else below for p in guide.locals}
    return draws_by_plate(LocallyEnhanced(split), guide)


def _batch_size(fit: Fit, draws: Mapping[str, int], num_draws: int) -> int:
    """Draws of the globals at a time, for about 16 MB a site."""
    rows = sum(n for _, n in fit.plan.total)
    inner = math.prod(
        max([k for p, k in draws.items() if (p in fit.guide.outer) == outer] or [1])
        for outer in (True, False)
    )
    return max(1, min(num_draws, 2**22 // max(rows * inner, 1)))


def _systematic(key: Array, weights: Array, n: int) -> Array:
    """Indices of ``n`` draws resampled systematically, in random order."""
    key_start, key_order = jax.random.split(key)
    points = (jnp.arange(n) + jax.random.uniform(key_start)) / n
    chosen = jnp.searchsorted(jnp.cumsum(weights), points * weights.sum())
    return jax.random.permutation(key_order, jnp.clip(chosen, 0, len(weights) - 1))
