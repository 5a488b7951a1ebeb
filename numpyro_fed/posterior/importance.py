"""The importance correction of a fit in one exchange, a certificate without pooled inference.

1. The server draws globals from the guide, and some from wider distributions (the *proposal*).
2. Each silo estimates its log likelihood at each draw, with its own latents integrated out by
   weighted draws. The sum over silos comes back.
3. The weights of the draws are Pareto-smoothed. Without locals, heavy draws whose log density jumps
   between neighbouring numbers lose their weight (:meth:`Weighing._rough_draws`), and step 3 is
   done again.

``nf.fit`` draws from mixtures around modes (:func:`correct_from`), and keeps all draws so far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_fed.basics.errors import ModelError, positive_int
from numpyro_fed.basics.programs import precision
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.objectives import (
    LocallyEnhanced,
    Quadrature,
    check_quadrature,
    default_quadrature,
    draws_by_plate,
)
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.corrected import Corrected, on_supports, sampler_of
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.verdict import TOLERANCE
from numpyro_fed.posterior.weighted_draws import (
    check_accuracy,
    unless_interrupted,
    until_interrupted,
)
from numpyro_fed.rounds.keys import generator
from numpyro_fed.rounds.names import IMPORTANCE
from numpyro_fed.rounds.progress import in_sight
from numpyro_fed.search.expand import prior_draws
from numpyro_fed.search.mode import Mode, OneCopy
from numpyro_fed.text.row_checks import check_rows_apart, coupled_rows
from numpyro_fed.text.values import first_without_density
from numpyro_fed.vertical.correction import VerticalCorrected, vertical_correct
from numpyro_fed.vertical.result import SOULResult, VerticalResult
from numpyro_fed.weigh.element_errors import ElementErrors, Rounding, moments
from numpyro_fed.weigh.integration import Integration
from numpyro_fed.weigh.log_likelihoods import Estimates, LogLikelihoodExchange
from numpyro_fed.weigh.mixture import (
    MIXTURE_FULL_UP_TO,
    LocationScale,
    Mixture,
    matched,
    root_of_draws,
)
from numpyro_fed.weigh.proposals import SHARE, Part, Pool, WideParts, wider_parts
from numpyro_fed.weigh.weights import NO_WEIGHTS, Weights, replace_weightless

InnerDraws = Quadrature | int | Mapping[str, int] | None
# Draws of each row's latents where they are integrated by draws, or drawn from the posterior.
DRAWS = 100
# Draws in an exchange: a compiled program serves any number of draws in multiples of it, and a
# reply stays at 32 kB in double precision. More would need more memory at a silo.
AT_ONCE = 4_000
# Effective draws for each global, from which on their covariance is a proposal. With one a
# covariance is singular.
MIN_DRAWS_PER_GLOBAL = 3
# Times that heavy draws are compared with their neighbours: each costs an exchange, and shows the
# draws that become the heaviest after the last ones have lost their weight.
MAX_CHECKS = 3
# Share of the fit's own draws at which a density may be NaN or infinite: more are mass, and not
# draws so far out that numbers overflow. An inverse gamma prior had 0.7 %.
MAX_WITHOUT_DENSITY = 0.05
# Distance of a draw's neighbours, in sds and in gaps between numbers, the larger one. It must be
# far above rounding of the coordinate, and so short that no true density curves over it.
NEXT_TO, GAPS = 1e-4, 8
# Nats: a second difference over such a step that shows rounding. A normal density has one of 1e-8
# for each coordinate.
JUMP = 3.0


@overload
def importance_correct(
    key: Array,
    result: Result | Corrected,
    num_draws: int = ...,
    inner_draws: InnerDraws = ...,
    *,
    wider: float = ...,
    accuracy: float = ...,
    progress_bar: bool = ...,
) -> Corrected: ...


@overload
def importance_correct(
    key: Array,
    result: VerticalResult,
    num_draws: int = ...,
    *,
    accuracy: float = ...,
    progress_bar: bool = ...,
) -> VerticalCorrected: ...


def importance_correct(
    key: Array,
    result: Result | Corrected | VerticalResult,
    num_draws: int = 4_000,
    inner_draws: InnerDraws = None,
    *,
    wider: float = SHARE,
    accuracy: float = TOLERANCE,
    progress_bar: bool = True,
) -> Corrected | VerticalCorrected:
    r"""Weigh draws of the globals by the joint density of all silos, in one exchange.

    The server sends ``num_draws`` draws of ``z_G``; each silo integrates its own locals by
    quadrature or by weighted draws, and answers with one number a draw; the sum of the answers
    (which secure aggregation may form) gives

    .. math::
        \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

    The weights are Pareto-smoothed (``numpyro_fed.weigh.weights``). Their shape ``k`` says
    whether guide and posterior are close enough to trust, with no pooled run to compare with.
    ``q`` is the guide and, for some of the draws, wider distributions around it and the prior's
    spread (``numpyro_fed.weigh.proposals``), which show what a narrow guide, or
    one in one of several modes, would not. A mode that is narrow and far off, as seen from the
    prior, still hides.

    Parameters
    ----------
    key : jax.Array
    result : Result, Corrected or VerticalResult
        A fit, under any bound; of a correction it is the fit that was corrected. One of
        :func:`numpyro_fed.fit` goes on from the last mixture that was matched to weighted draws,
        and its draws so far count as well, unless ``inner_draws`` says otherwise. Of a vertical one
        the latents of all parties are weighed, towards the model as it is written: clients send
        their predictors at ``num_draws`` draws, and ``inner_draws`` and ``wider`` have no meaning
        there.
    num_draws : int
        Draws of the globals, four thousand in an exchange at most; their number is rounded up to a
        multiple of that.
    inner_draws : Quadrature, int, dict of str to int, or None
        How a silo integrates its own locals: by quadrature, which checks itself with twice the
        nodes and gives way to draws where it is too coarse; or by so many draws of the locals for
        each draw of the globals, an int for the plates of rows, or, where there are outer plates,
        for these, with the square root of it for the rows below; or a dict by plate. None is
        quadrature where a row has one or two latents, with those of its outer plate, and 100 draws
        elsewhere.
    wider : float
        Share of the draws that look beyond the guide; 0 trusts the guide's reach.
    accuracy : float
        The number of sds to which means are to be right, and the share to which sds are. It
        decides whether the correction is ``.trusted``, not how many draws there are.
    progress_bar : bool
        Whether a call of more than two seconds shows that it goes on.

    Returns
    -------
    Corrected or VerticalCorrected

    Raises
    ------
    ValueError
        For a fit under a divergence other than KL: its posterior is not proportional to a density
        that could be weighed.
    ModelError
        If a row's term reads latents of other rows, unless ``inner_draws`` is 1 there.
    NonFiniteError
        If a silo's estimate is NaN, or no draw has any weight.
    Interrupted
        By Ctrl-C after the first of several exchanges: a ``KeyboardInterrupt`` whose ``result`` is
        the correction by the draws so far.

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
    check_accuracy(accuracy)
    before = _of_fit(result)
    if isinstance(result, Corrected):
        result = result.result
    if isinstance(result, SOULResult):
        raise TypeError(
            "what SOUL has drawn has no density by which it could be weighed: correct a fit of "
            "numpyro_fed.VFL."
        )
    if isinstance(result, VerticalResult):
        with in_sight("correction", shown=progress_bar):
            return vertical_correct(key, result, num_draws, accuracy)
    if not 0 <= wider < 1:
        raise ValueError(f"wider must be a share in [0, 1), got {wider!r}.")
    with precision(double=result.double), in_sight("correction", shown=progress_bar):
        check_weighable(result._fit)
        own = None if before is None else _last_mixture(before)
        if before is not None and own is not None:
            earlier = before if inner_draws is None and before.pool is not None else None
            args = key, result, num_draws, inner_draws, own
            return correct_from(*args, wider=wider, accuracy=accuracy, earlier=earlier)
        integration = integration_of(result, inner_draws)
        fit, size = result._fit, min(num_draws, AT_ONCE)
        copy = result.start.copy if isinstance(result.start, Mode) else None
        guide = fit.guide.globals
        share = wider if guide.density_everywhere else 0.0
        wide = WideParts.of(wider_parts_of(fit), size, share)
        weighing = Weighing(result, size, wide.num_own, integration, copy, accuracy)

        def exchange(i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Return draws (n, dim), and their log densities (n,) under the proposal and of all."""
            # The first exchange has the key itself, so that
            # 4,000 draws are the same with and without more.
            key_exchange = random.fold_in(key, i) if i else key
            z_G, log_q = map(np.asarray, result.draw_globals(key_exchange, wide.num_own))
            if wide.numbers:
                theta = result.shared.theta
                around = LocationScale(z_G.mean(0, float), root_of_draws(z_G))
                far = wide.sample(generator(key_exchange), theta, around).astype(z_G.dtype)
                of_far = fit.sampler.log_density(result.shared, jnp.asarray(far))
                z_G, log_own = np.concatenate([z_G, far]), np.append(log_q, of_far)
                log_q = np.asarray(wide.log_density(log_own, theta, around, z_G))
            return z_G, log_q, weighing.log_joint(key_exchange, z_G)

        parts, interrupted = until_interrupted(exchange, -(-num_draws // size))
        z_G, log_q, log_joint = (np.concatenate(part) for part in zip(*parts, strict=True))
        from_guide = np.tile(np.arange(size) < wide.num_own, len(parts))
        log_weights = _log_ratio(log_joint, log_q)
        correction = weighing.correction(key, z_G, log_weights, log_joint, from_guide)
        return unless_interrupted(correction, interrupted, num_draws)


def _of_fit(result: object) -> Corrected | None:
    """Return the correction by which ``nf.fit`` has judged a result; None of another method."""
    found = result._checked if isinstance(result, Result) else result
    return found if isinstance(found, Corrected) and found.stages else None


def _last_mixture(before: Corrected) -> Mixture | None:
    """Return the mixture from which a correction of ``nf.fit`` has drawn, or one like its draws."""
    if before.pool is not None:
        return before.pool.mixtures[0]
    # A file keeps draws and weights alone. Of too few a mixture would be narrower than the guide.
    dim = before.z_G.shape[1]
    many = 0 < dim <= MIXTURE_FULL_UP_TO and before.ess > MIN_DRAWS_PER_GLOBAL * dim
    return matched(np.asarray(before.z_G), before.weights) if many else None


def wider_parts_of(fit: CompiledMethod) -> tuple[Part, ...]:
    """Return the wider parts of proposals for the text of a fit, found once."""
    fm, start = fit.model, fit.built.start
    return fit.cached(
        "of text",
        lambda: wider_parts(fm, prior_draws(fm) if start is None else start.search.prior_draws),
    )


def _log_ratio(log_joint: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return log weights (n,), minus infinity where a density is none or overflows."""
    # Where a draw has no density, the proposal's may be NaN as well.
    with np.errstate(invalid="ignore"):
        ratio = np.asarray(log_joint, np.float64) - log_q
    return np.where(ratio < np.inf, ratio, -np.inf)


@dataclass(eq=False)
class Weighing:
    """The exchanges of a correction, and what follows from them.

    The first ``num_own`` of the ``size`` draws of an exchange are from the fit's guide. Draws
    outside of ``copy`` have no density: one that repeats is weighed once. ``integration`` is finer
    than at the beginning if silos have found it too coarse, and ``sent`` counts exchanges.
    """

    result: Result
    size: int
    num_own: int
    integration: Integration
    copy: OneCopy | None = None
    accuracy: float = TOLERANCE
    sent: int = 0

    def log_joint(self, key: Array, z_G: np.ndarray, *, anywhere: bool = False) -> np.ndarray:
        """Return the log joint density (n,) of all silos at draws (n, dim).

        It takes another exchange if a silo's integrals turn out to be too coarse. Draws that lie
        ``anywhere`` are none of the fit, all of which must have a density.
        """
        while True:
            num_own = 0 if anywhere else self.num_own
            weigh: LogLikelihoodExchange[Any, Any] = self.result._fit.question(
                IMPORTANCE, log_likelihood_exchange, self.integration, self.size, num_own=num_own
            )
            log_prior, down = weigh.of_server(self.result.shared, z_G)
            up: Estimates = self.result.ask_once(weigh.exchange, down, key, NO_WEIGHTS)
            self.sent += 1
            if not self.integration.nodes or not float(up.is_coarse):
                break
            self.integration = self.integration.finer()
        log_joint = weigh.without_overflow(np.asarray(log_prior) + up.log_likelihood)
        if np.isnan(log_joint).any() or not np.isfinite(log_joint).any():
            raise self.result.unusable(NO_WEIGHTS)
        here = True if self.copy is None else self.copy.holds(z_G)
        return np.where(here, log_joint, -np.inf)

    def correction(
        self,
        key: Array,
        z_G: np.ndarray,
        log_weights: np.ndarray,
        log_joint: np.ndarray,
        from_own: np.ndarray,
        pool: Pool | None = None,
    ) -> Corrected:
        """Return the correction by draws (n, dim) with log weights and log joint densities (n,).

        ``from_own`` (n,) marks the draws that are not from wider distributions: those of the fit's
        guide or, with a ``pool``, of mixtures in its place.
        """
        fit, factors = self.result._fit, self.result._fit.built.factors
        weights = Weights.of(log_weights)
        # With locals a silo's estimate may be noisy itself,
        # so that a jump between neighbours shows nothing.
        for _ in range(0 if self.integration.draws else MAX_CHECKS):
            if weights.reliable:
                break
            rough = self._rough_draws(key, z_G, log_weights, from_own)
            if not rough.size:
                break
            log_weights[rough] = -np.inf
            if pool is not None:  # a rough draw has no weight among further draws, either
                pool.log_joint[rough] = -np.inf
            weights = Weights.of(log_weights)
        no_density = self._no_density(z_G, log_joint, from_own)
        z_G = replace_weightless(z_G, weights.values)
        log_evidence = float(np.logaddexp.reduce(log_weights) - np.log(len(z_G)))
        of_fit = None if pool is None else self.result.many_draws_of_globals()
        sampler = sampler_of(fit, self.integration)
        draws = on_supports(sampler, self.result, z_G)
        latents = {s.name for s in fit.model.named("latent")}
        found = moments(z_G, weights.values, from_own, of_fit)
        rounding = Rounding.of(z_G, weights.values, log_weights, found.mean, found.sd)
        return Corrected(
            log_evidence=None if factors and factors.has_loss else log_evidence,
            ess=weights.ess,
            pareto_k=weights.pareto_k,
            weights=weights.values,
            result=self.result,
            _key=random.fold_in(key, 1),
            _moments=found,
            _rounding=rounding._replace(no_density=no_density),
            errors=ElementErrors.of(
                draws, latents, weights.values, labels=fit.model.labels, bounded=fit.model.bounded
            ),
            accuracy=self.accuracy,
            z_G=z_G,
            _sampler=sampler,
            _sent=self.sent,
            integration=self.integration,
            log_weights=log_weights,
            log_joint=np.asarray(log_joint, np.float64),
            pool=pool,
        )

    def _no_density(self, z_G: np.ndarray, log_joint: np.ndarray, from_own: np.ndarray) -> str:
        """Return in words which density is NaN or infinite at many draws of the fit, if any."""
        z, fm = np.asarray(z_G, np.float64), self.result._fit.model
        here = from_own if self.copy is None else from_own & self.copy.holds(z_G)
        here = here & np.isfinite(z).all(1)
        lost = here & (log_joint == -np.inf)
        share = lost.sum() / max(here.sum(), 1)
        if not fm.dim or not share > MAX_WITHOUT_DENSITY:
            return ""
        low, middle, high = np.quantile(z[here], [0.16, 0.5, 0.84], axis=0)
        away = np.abs(z[lost] - middle) / np.maximum(high - low, np.finfo(float).tiny)
        place = z_G[np.flatnonzero(lost)[np.argmin(away.max(1))]]
        silos = enumerate(self.result._silos.data)
        found = first_without_density(fm, self.result.shared.theta, jnp.asarray(place), silos)
        if found is None:
            return ""
        where = "" if found.silo is None else f" (silo {found.silo}, row {found.row})"
        at = ", ".join(f"'{s.name}' {place[s.start]:.3g}" for s in fm.named("latent")[:3])
        return (
            f"the log density of '{found.site}'{where} is NaN or infinite at {share:.0%} of the "
            f"draws near the fit, as at {at} (unconstrained)"
        )

    def _rough_draws(
        self, key: Array, z_G: np.ndarray, log_weights: np.ndarray, from_own: np.ndarray
    ) -> np.ndarray:
        """Return the indices of heavy draws whose weight comes from cancellation."""
        # A log density that rises by the cancellation of large numbers, as far out where the gamma
        # functions of a Beta distribution are subtracted, jumps from one number to the next. So
        # each of these draws is weighed again together with its two neighbours on both sides, a
        # tiny share of an sd away: a second difference of several nats is no curvature there.
        z = np.asarray(z_G, np.float64)
        # A third of an exchange, since each heavy draw takes three places of it.
        heavy = np.argsort(-log_weights)[: self.size // 3]
        gap = np.spacing(np.abs(z_G)[heavy]).astype(np.float64)
        # Neighbours lie along a random diagonal: one step moves all coordinates at once.
        signs = np.where(np.random.default_rng(0).random(z.shape[1]) < 0.5, -1, 1)
        step = signs * np.maximum(NEXT_TO * z[from_own].std(0), GAPS * gap)
        three = [z[heavy] - step, z[heavy], z[heavy] + step]
        # The exchange is compiled for a fixed number of
        # draws; the mean fills the places that are left.
        spare = np.broadcast_to(z[from_own].mean(0), (self.size - 3 * len(heavy), z.shape[1]))
        points = np.concatenate([*three, spare]).astype(z_G.dtype)
        density = np.asarray(self.log_joint(key, points, anywhere=True), np.float64)
        below, at, above = density[: 3 * len(heavy)].reshape(3, -1)
        with np.errstate(invalid="ignore"):  # a neighbour may have no density
            smooth = np.abs(above - 2 * at + below) <= JUMP
        return heavy[~smooth & (log_weights[heavy] > -np.inf)]


def correct_from(
    key: Array,
    result: Result,
    num_draws: int,
    inner_draws: InnerDraws,
    own: Mixture | None,
    *,
    wider: float = 0.0,
    accuracy: float = TOLERANCE,
    earlier: Corrected | None = None,
    copy: OneCopy | None = None,
) -> Corrected:
    r"""Return a correction with draws from a mixture ``own``, in the place of the fit's guide.

    Draws of an ``earlier`` correction by mixtures are added: all draws together count as from the
    mixture of all proposals ``k``, with the numbers :math:`n_k` that came from each,

    .. math::
        \log w_s = \log p(z_G^s, y) - \log \sum_k \tfrac{n_k}{n}\, q_k(z_G^s),

    so that no weight is larger than under the best of them (Owen and Zhou 2000). At draws that a
    mixture was matched to, :math:`q_k` is one matched without them
    (:mod:`numpyro_fed.weigh.mixture`). A density that repeats is weighed in ``copy`` alone, by
    default that of the earlier correction.

    Without ``own`` the new draws judge the earlier correction, since they had no part in the choice
    of a mixture. They come from all its mixtures, in their shares ``n_k / n``, as what they judge
    does: if their own k-hat is larger than that of all draws, it is the correction's.
    """
    fit, size = result._fit, min(num_draws, AT_ONCE)
    check_weighable(fit)
    pool = None if earlier is None else earlier.pool
    if own is None and pool is None:
        raise ValueError("without a mixture there must be a correction by mixtures to judge.")
    with precision(double=result.double):
        dtype, theta = jnp.result_type(float), result.shared.theta
        chosen = integration_of(result, inner_draws) if earlier is None else earlier.integration
        sent = earlier.num_exchanges if earlier is not None and pool is not None else 0
        pool = pool or Pool.empty(fit.model.dim, dtype, copy)
        weighing = Weighing(result, size, 0, chosen, pool.copy, accuracy, sent)
        if own is not None:
            pool, numbers = pool.with_mixture(own, wider), [size]
        else:
            # Whole numbers with the sum ``size`` that are to each other as those so far.
            ends = np.rint(np.cumsum(pool.numbers) * (size / sum(pool.numbers)))
            numbers = np.diff(ends.astype(int), prepend=0).tolist()
        text = wider_parts_of(fit)
        mixtures, proposals = pool.mixtures, [WideParts.of(text, size, w) for w in pool.wider]

        def exchange(i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            random_numbers, drawn, is_own = generator(key, i), [], []
            # With a new mixture the draws are from it alone.
            for mixture, wide, n in zip(mixtures, proposals, numbers, strict=False):
                some = np.sort(random_numbers.permutation(size)[:n])
                drawn.append(wide.draw_with(random_numbers, theta, mixture)[some])
                is_own.append((np.arange(size) < wide.num_own)[some])
            z_G = np.concatenate(drawn).astype(dtype)
            log_joint = weighing.log_joint(random.fold_in(key, i) if i else key, z_G)
            return z_G, log_joint, np.concatenate(is_own)

        parts, interrupted = until_interrupted(exchange, -(-num_draws // size))
        for z_G, log_joint, from_own in reversed(parts):
            pool = pool.with_draws(z_G, log_joint, from_own, numbers)
        shares = np.array(pool.numbers)
        log_q = [
            wide.log_density(log_own, theta, mixture.moments, pool.z_G)
            for log_own, mixture, wide in zip(pool.log_own, mixtures, proposals, strict=True)
        ]
        log_shares = np.log(shares / shares.sum())
        log_pooled = np.logaddexp.reduce(log_shares[:, None] + np.stack(log_q), 0)
        log_weights = _log_ratio(pool.log_joint, log_pooled)
        correction = weighing.correction(
            key, pool.z_G, log_weights, pool.log_joint, pool.from_own, pool
        )
        if own is None:
            # Rough draws have lost their density by then.
            of_new = np.where(pool.log_joint == -np.inf, -np.inf, log_weights)[: size * len(parts)]
            k_of_new = Weights.of(of_new).pareto_k
            correction = replace(correction, pareto_k=max(correction.pareto_k, k_of_new))
        return unless_interrupted(correction, interrupted, num_draws)


def check_weighable(fit: CompiledMethod) -> None:
    """Raise an error for a fit whose posterior is not proportional to a joint density."""
    if fit.built.protected:
        raise ModelError(fit.built.protected)
    if fit.built.factors is not None and fit.built.factors.has_divergence:
        raise ValueError(
            "this fit's divergence is not KL, so that its posterior is no prior times likelihood: "
            "weights would turn it into the ordinary posterior. Correct a fit with "
            "divergence=KL() and prior_divergence=KL(), or judge this one by prediction."
        )


def log_likelihood_exchange(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> LogLikelihoodExchange[Any, Any]:
    """Return the question of a correction, from its settings, at the server or at a silo."""
    integration = Integration.of(settings)
    return LogLikelihoodExchange(
        built.model,
        built.guide,
        integration.likelihood(built.model, built.guide),
        built.algorithm,
        settings["num_draws"],
        settings["num_own"],
        settings["batch_size"],
        json.dumps(dict(settings)),
        little,
    )


def _inner_draws(guide: Guide, inner_draws: int | Mapping[str, int]) -> dict[str, int]:
    if isinstance(inner_draws, Mapping) or not guide.outer_plates:
        return draws_by_plate(LocallyEnhanced(inner_draws), guide)
    # Draws of the rows are nested in those of the outer plates: n and its root, rounded up, instead
    # of n and n, which would be n^2.
    below = math.isqrt(max(inner_draws - 1, 0)) + 1
    split = {p: inner_draws if p in guide.outer_plates else below for p in guide.locals}
    return draws_by_plate(LocallyEnhanced(split), guide)


def integration_of(result: Result, inner_draws: InnerDraws) -> Integration:
    """Return how silos integrate their latents, once it is known that it suits the model."""
    fit, silos = result._fit, result._silos
    buckets, checks = silos.buckets, fit.checks
    if inner_draws is None:
        coupled = coupled_rows(checks, buckets) is not None
        inner_draws = (None if coupled else default_quadrature(fit.model)) or DRAWS
    if isinstance(inner_draws, Quadrature):
        check_quadrature(fit.model)
        integration = Integration(_inner_draws(fit.guide, DRAWS), inner_draws.nodes)
    else:
        integration = Integration(_inner_draws(fit.guide, inner_draws))
    check_rows_apart(checks, integration.draws, buckets)
    return integration
