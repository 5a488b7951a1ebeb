"""Particles at the posterior, and the disagreement of their islands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import NonFiniteError
from numpyro_fed.posterior.corrected import Corrected, on_supports, sampler_of
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.weighing import AT_ONCE, Weighing, integration_of
from numpyro_fed.search.mode import Mode
from numpyro_fed.weigh.element_errors import ElementErrors, Rounding, disagreement, moments
from numpyro_fed.weigh.likelihood import Integration
from numpyro_fed.weigh.tempered import LOST, NUM_ISLANDS, Swarm, log_mean, with_squares

# Standard error, as a share of the accuracy, up to which means and sds count as known. It is
# estimated from four islands alone, and the largest of all coordinates is looked at, which is about
# twice the true one. With few coordinates the largest is no larger, and it is that of weighted
# draws: the true error of a mean is then below the accuracy with a probability of 97.5 % (Student's
# t with three degrees of freedom).
MAX_ERROR, FEW = 0.5, 2
# Nats. A Gaussian process of 43 globals has 0.5; with more than one, islands have found other
# shares of the mass.
MAX_EVIDENCE_ERROR = 1.0
NEARLY = 2.0  # times the largest error: three times as many particles bring it down enough
MAX_COARSE = 0.1  # nats by which a finer quadrature may move log densities
MIN_KEPT = 3  # times that particles must have been kept
# Memory above which they count as standing still: islands would agree for no good reason, as where
# a posterior's neck is too narrow for their steps.
MAX_MEMORY = 0.5
# A gap between particles that separates modes, as a multiple of the spreads on both its sides, and
# the share of the particles on both sides, at least. The largest gap among a thousand draws from a
# normal distribution, without the outer 2 % of them, is a tenth of this.
GAP, MIN_SHARE = 1.0, 0.02
MAX_MODES = 8
# Fields of a file's words.
SAVED = "near", "reached", "num_kept", "memory", "coarse", "evidence_error"


@dataclass(frozen=True, eq=False)
class Particles(Corrected):
    """Particles at the posterior, with the disagreement of their islands.

    Attributes
    ----------
    near : bool
        Whether they began at the prior, or at a mixture that covers the posterior as far as is
        known.
    reached : float
        The power ``b`` of the path of densities: 1 at the posterior.
    num_kept : int
        How often particles were kept there. The second half of these counts.
    memory : float
        How much the first particles that count still have of where they came to the posterior (a
        correlation, of places or of squared distances: 1 for particles that stand still).
    coarse : float
        Sd, in nats, by which a finer quadrature over rows' latents moves log densities.
    evidence_error : float
        Standard error of ``log_evidence``, from the islands.
    """

    near: bool = False
    reached: float = 0.0
    num_kept: int = 0
    memory: float = 1.0
    coarse: float = 0.0
    evidence_error: float = 0.0
    _swarm: Swarm | None = field(default=None, repr=False)

    @property
    def reliable(self) -> bool:
        """Whether particles came to the posterior and moved there, and integrals are right."""
        settled = self._arrived and self.memory <= MAX_MEMORY
        return self.near and settled and self.coarse <= MAX_COARSE

    @property
    def _arrived(self) -> bool:
        return self.reached >= 1 and self.num_kept >= MIN_KEPT

    @property
    def nearly(self) -> bool:
        """Whether particles are at the posterior, and more exchanges are likely to be enough."""
        error = MAX_ERROR * self.accuracy
        close = self.monte_carlo_error <= NEARLY * error and self.coarse <= MAX_COARSE
        more = close or not self._arrived
        return self.near and self.reached >= 1 and not self.trusted and more

    @property
    def max_error(self) -> float:
        """Return the largest standard error, in sds, of a mean, an sd or quantiles that are known.

        It is half of the ``accuracy=`` that was asked for, or 0.3 of it with few globals.
        """
        return super().max_error if self.z_G.shape[1] <= FEW else MAX_ERROR * self.accuracy

    @property
    def monte_carlo_error(self) -> float:
        """The largest standard error of a global's mean, sd or quantiles, from the islands.

        It is infinite for particles that have not come to the posterior.
        """
        return super().monte_carlo_error if self.num_kept else math.inf

    @property
    def sound(self) -> bool:
        """Whether quantiles, and means and sds that exist, are right to the ``accuracy=``."""
        return self.evidence_error <= MAX_EVIDENCE_ERROR and super().sound

    @property
    def _advice(self) -> str:
        return "more max_exchanges, or NUTS on pooled data where that is allowed"

    @property
    def doubt(self) -> str:
        """Return the reason why the particles are not ``trusted``; empty where they are."""
        if self.sound:
            return ""
        if not self.precise:
            return self._rounding.words(self._sites)
        if self.reached < 1:
            return f"the particles came to {self.reached:.2g} of the way to the posterior"
        if not self._arrived or self.memory > MAX_MEMORY:
            return "the particles have not moved enough at the posterior"
        if not self.near:
            return (
                "the particles began at a fit that is not known to cover the posterior, and may "
                "have missed a part of it: give a correction of which draws count, or start='prior'"
            )
        if self.coarse > MAX_COARSE:
            return "the quadrature over rows' latents is too coarse"
        if self.evidence_error > MAX_EVIDENCE_ERROR:
            error = f"{self.evidence_error:.2g}"
            return f"islands of particles differ: the log evidence is known to {error} nats"
        if not self.moments_known and self.quantiles_known:
            return self.reservation
        error = f"{self.monte_carlo_error:.2g}"
        return f"islands of particles differ: means and sds are known to {error} sd"

    @property
    def figures(self) -> str:
        """Return the numbers that a verdict rests on, in words."""
        if not self.num_kept:
            return f"particles that came to {self.reached:.2g} of the way to the posterior"
        return (
            f"{len(self.weights):,} particles, whose {NUM_ISLANDS} islands know means and sds to "
            f"{self.monte_carlo_error:.2g} sd"
        )

    def saved_words(self, draws: int | None = None) -> SavedWords:
        """Return the form in which a file keeps the particles; ``from_file`` reads it."""
        saved = super().saved_words()
        return replace(saved, words={**saved.words, **{k: getattr(self, k) for k in SAVED}})

    @classmethod
    def from_file(
        cls, result: Result, arrays: Mapping[str, np.ndarray], words: Mapping[str, Any]
    ) -> Self:
        """Return the particles of a fit from the arrays of :meth:`saved_words` in a file."""
        made = super().from_file(result, arrays, words)
        return replace(made, **{name: words[name] for name in SAVED})

    def report(self) -> str:
        """Return in words whether to trust the posterior."""
        if self.log_evidence is None:
            return self.judged
        error = f"(+- {self.evidence_error:.2f})"
        return f"{self.judged} Log evidence {self.log_evidence:.2f} {error}."


def particles_of(
    key: Array, fit: Result, swarm: Swarm, *, near: bool, accuracy: float
) -> Particles:
    """Return the particles that were kept, or those on their way, with their quality.

    Where rows have latents it takes an exchange that checks the quadrature.
    """
    key_check, key_draws = jax.random.split(key)
    # The first half still has something of where particles came to the posterior: those from a
    # narrow mixture reach a long tail last.
    num_kept, real = len(swarm.kept), jnp.result_type(float)
    counted = swarm.kept[num_kept // 2 :] or [swarm.here]
    kept, log_p = np.stack([at.z for at in counted]), np.stack([at.log_p for at in counted])
    arrived, dim = swarm.arrived, kept.shape[2]
    if isinstance(fit.start, Mode) and (copy := fit.start.copy) is not None:
        # They pass from one copy of a mode to the next.
        kept, arrived = copy.copy_of(kept), copy.copy_of(arrived)
    z, log_p = kept.reshape(-1, dim).astype(real), log_p.ravel()
    integration, coarse = integration_of(fit, None), 0.0
    if num_kept and integration.nodes:
        integration, coarse, sent = checked(key_check, fit, integration, z, log_p)
        swarm.exchanges += sent
    even = np.full(len(z), 1 / len(z))
    computed = moments(z, even, np.zeros(len(z), bool), fit.many_draws_of_globals())
    sampler = sampler_of(fit._fit, integration)
    draws = on_supports(sampler, fit, z)
    latents = {s.name for s in fit._fit.model.named("latent")}
    index = np.arange(len(z)).reshape(len(kept), NUM_ISLANDS, -1)
    by_islands = index.swapaxes(0, 1).reshape(NUM_ISLANDS, -1)
    errors = ElementErrors.of(draws, latents, even, by_islands)
    shift_error = disagreement(z[by_islands], computed.sd)
    counts = log_p > LOST / 2
    of_islands = swarm.log_evidence
    of_density = swarm.b >= 1 and not (fit._fit.factors and fit._fit.factors.has_loss)
    return Particles(
        log_evidence=float(log_mean(of_islands)) if of_density else None,
        ess=float(min(len(z), 1 / max(shift_error[0].max(initial=0.0), len(z) ** -0.5) ** 2)),
        pareto_k=math.nan,
        weights=even,
        log_weights=np.log(even),
        log_joint=log_p,
        result=fit,
        _key=key_draws,
        accuracy=accuracy,
        _moments=computed._replace(shift_error=shift_error),
        errors=errors,
        _rounding=Rounding.of(z[counts], even[counts], log_p[counts], computed.mean, computed.sd),
        z_G=z,
        _sampler=sampler,
        _sent=swarm.exchanges,
        integration=integration,
        near=near,
        reached=swarm.b,
        num_kept=num_kept,
        memory=memory_of(arrived, kept[0]) if num_kept else 1.0,
        coarse=coarse,
        evidence_error=float(of_islands.std(ddof=1)) / math.sqrt(NUM_ISLANDS),
        _swarm=swarm,
    )


def checked(
    key: Array, fit: Result, integration: Integration, z: np.ndarray, log_p: np.ndarray
) -> tuple[Integration, float, int]:
    """Return how a correction integrates rows' latents at particles ``z`` (n, dim), how it differs.

    That is the sd, in nats, of its log density less ``log_p`` (n,): by so much particles would be
    weighed otherwise. It is infinite where draws take the place of quadrature. The last number is
    that of the exchanges.
    """
    key_points, key_exchange = jax.random.split(key)
    points = np.asarray(jax.random.choice(key_points, len(z), (AT_ONCE,)))
    weighing = Weighing(fit, AT_ONCE, 0, integration)
    try:
        found = weighing.exchange(key_exchange, z[points])
    except NonFiniteError:
        return integration, math.inf, weighing.sent
    coarse = math.inf if weighing.integration.gave_way else float((found - log_p[points]).std())
    return weighing.integration, coarse if math.isfinite(coarse) else math.inf, weighing.sent


def memory_of(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest correlation of a coordinate with its earlier value, within modes.

    Both are (n, dim). Particles do not pass between modes that lie far apart, and need not: their
    numbers there are right by weight. So correlations are those of the distances from the mean of
    each mode, among the particles that were there before, and of the squares of these distances.
    """
    mode_after, mode_before = np.split(modes_apart(np.concatenate([after, before])), 2)
    products = np.zeros((3, 2 * after.shape[1]))
    for mode in np.unique(mode_after):
        stayed = (mode_after == mode) & (mode_before == mode)
        if stayed.any():
            x, y = (with_squares(a[stayed]) for a in (before, after))
            products += np.stack([(x * y).sum(0), (x**2).sum(0), (y**2).sum(0)])
    scale = np.sqrt(products[1] * products[2])
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(scale > 0, products[0] / scale, 1.0).max(initial=0.0))


def modes_apart(z: np.ndarray) -> np.ndarray:
    """Return a number for the mode of each particle (n,), by gaps along coordinates."""
    modes = np.zeros(len(z), int)
    least = max(int(MIN_SHARE * len(z)), 2)
    for new in range(1, MAX_MODES):
        gaps = [_widest_gap(z, modes == mode, least) for mode in range(new)]
        width, coordinate, place, inside = max(gaps, key=lambda gap: gap[0])
        if width <= GAP:
            break
        modes[inside & (z[:, coordinate] > place)] = new
    return modes


def _widest_gap(
    z: np.ndarray, inside: np.ndarray, least: int
) -> tuple[float, int, float, np.ndarray]:
    """Return the widest gap, ``least`` particles on each side: width, coordinate, place, them."""
    widest = 0.0, 0, 0.0, inside
    if inside.sum() < 2 * least:
        return widest
    ordered = np.sort(z[inside], axis=0)
    number = len(ordered)
    places = np.arange(least, number - least + 1)  # particles on the left of each gap
    for coordinate in range(z.shape[1]):
        x = ordered[:, coordinate]
        i = places[np.argmax(x[places] - x[places - 1])] if len(places) else 0
        spread = x[:i].std() + x[i:].std()
        width = (x[i] - x[i - 1]) / spread if spread > 0 else 0.0
        if width > widest[0]:
            widest = float(width), coordinate, float(x[i - 1] + x[i]) / 2, inside
    return widest
