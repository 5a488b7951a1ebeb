r"""Particles that go to a posterior that is like no Gaussian, and what their islands know of it.

:class:`Tempered` moves them (:mod:`numpyro_fed.weigh.smc`), and :class:`Particles` is the posterior
that they are: like weighted draws, with even weights and an error from the disagreement of islands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    Interrupted,
    ModelError,
    NonFiniteError,
    SilosError,
    one_of,
    positive_int,
)
from numpyro_fed.basics.programs import precision
from numpyro_fed.guides.objectives import default_quadrature
from numpyro_fed.guides.quadrature import default_nodes, quadrature_misfit
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.posterior.corrected import Corrected, on_supports, sampler_of
from numpyro_fed.posterior.importance import (
    AT_ONCE,
    Weighing,
    check_weighable,
    integration_of,
    wider_parts_of,
)
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.saving import SavedWords
from numpyro_fed.posterior.verdict import QUANTILES_KNOWN, TOLERANCE, Doubt, Spoils
from numpyro_fed.rounds.keys import generator, typed_key
from numpyro_fed.rounds.progress import Progress, progress_of
from numpyro_fed.search.mode import Mode
from numpyro_fed.text.row_checks import refuse_coupled_rows
from numpyro_fed.text.site_table import Theta
from numpyro_fed.weigh.element_errors import ElementErrors, Rounding, disagreement, moments
from numpyro_fed.weigh.integration import Integration
from numpyro_fed.weigh.mixture import around_modes
from numpyro_fed.weigh.proposals import WideParts
from numpyro_fed.weigh.smc import LOST, NUM_ISLANDS, SMCState, TemperedSMC, log_mean, with_squares

STARTS = "fit", "prior"
# Effective draws of a correction from which particles that begin at its mixture can be trusted.
# With 17 a Gaussian process over forty times came to a part of the posterior: islands agreed to
# 0.05 sd, and its length scale was 1.5 sd off. A horseshoe has three, a test of 30 items five.
MIN_EFFECTIVE = 40
WIDER = 0.5  # share of the first particles that come from distributions wider than the fit
NEARLY = 2.0  # times the largest error: three times as many particles bring it down enough
# A gap between particles that separates modes, as a multiple of the spreads on both its sides, and
# the share of the particles on both sides, at least. The largest gap among a thousand draws from a
# normal distribution, without the outer 2 % of them, is a tenth of this.
GAP, MIN_SHARE = 1.0, 0.02
MAX_MODES = 8
# The share of particles; MAX_ERROR is that of weighted draws. It is estimated from four islands
# alone, and the largest of all coordinates is looked at, which is about twice the true one. With
# few coordinates the largest is no larger, and it is that of weighted draws: the true error of a
# mean is then below the accuracy with a probability of 97.5 % (Student's t, 3 degrees of freedom).
MAX_PARTICLE_ERROR, FEW_COORDINATES = 0.5, 2
MAX_COARSE = 0.1  # nats by which a finer quadrature may move particles' log densities
# Nats. A Gaussian process of 43 globals has 0.5; with more than one, islands of particles have
# found other shares of the mass.
MAX_EVIDENCE_ERROR = 1.0
# Memory of particles above which they count as standing still: islands would agree for no good
# reason, as where a posterior's neck is too narrow for their steps.
MAX_MEMORY = 0.5
MIN_KEPT = 3  # times that particles must have been kept
# Fields of a file's words.
SAVED = "near", "reached", "num_kept", "memory", "coarse", "evidence_error"


@dataclass(frozen=True, kw_only=True)
class Tempered:
    r"""Particles that go from a fit, or from the prior, to a posterior that is like no Gaussian.

    Particles at the server move through

    .. math::
        \pi_b(z_G) \propto q(z_G)^{1 - b} \Big(p(z_G) \prod_j p(y_j \mid z_G)\Big)^b,
        \qquad b = 0, \dots, 1,

    by steps that keep half of the draws effective, each followed by Hamiltonian trajectories.
    Silos reply with their log likelihood at every particle and its gradient, which are added up;
    latents of rows are integrated by quadrature. By the gradients the server fits a parabola to the
    likelihood, in the fewest numbers through which the text reads the globals, and makes
    trajectories with it. One exchange accepts where they end, or does not, so that the density is
    the true one however wrong the parabola is. Where few are accepted, each leapfrog step asks
    silos.

    Parameters
    ----------
    num_particles : int
        Their number, a multiple of four: they live on four islands, whose disagreement is the
        Monte Carlo error.
    start : {"fit", "prior"}
        Where particles begin: at the mixture around a fit, or that of its latest correction, with
        wider distributions around it; or at the prior. From a fit they are trusted only where a
        correction of it is given of which forty draws count: else they may miss a part of the
        posterior, and their islands agree all the same.

    References
    ----------
    Del Moral, Doucet, Jasra (2006), Sequential Monte Carlo samplers. Liu (2001), Monte Carlo
    strategies in scientific computing, for transitions by a surrogate; the parabola in a text's
    predictors is this package's own.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     rate = numpyro.sample("rate", dist.HalfCauchy(5))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> silos = [dict(y=np.array([3, 0])), dict(y=np.array([1, 0, 2]))]
    >>> fit = nf.PVI(model).run(jax.random.key(0), 0, silos, progress_bar=False)
    >>> tempered = nf.Tempered(start="prior")
    >>> particles = tempered.run(jax.random.key(1), 300, fit, progress_bar=False)
    >>> particles.trusted
    True
    """

    num_particles: int = 1_000
    start: str = "fit"

    def __post_init__(self) -> None:
        positive_int("num_particles", self.num_particles)
        if self.num_particles % NUM_ISLANDS:
            raise ValueError(
                f"num_particles={self.num_particles}: expected a multiple of {NUM_ISLANDS}, since "
                f"particles live on {NUM_ISLANDS} islands."
            )
        one_of("start", self.start, *STARTS)

    def run(
        self,
        key: Array,
        num_exchanges: int,
        result: Result | Corrected,
        *,
        progress_bar: bool | Progress = True,
        quick: bool = False,
    ) -> Particles:
        """Move particles to the posterior of a fit's model.

        Parameters
        ----------
        key : jax.Array
        num_exchanges : int
            Exchanges, at most.
        result : Result, Corrected or Particles
            A fit, or a correction of one. From particles of an earlier run with the same settings
            it goes on, and adds what it keeps; from others it begins anew at their fit.
        progress_bar : bool
        quick : bool
            Compile with few of XLA's optimisations, for small data.

        Returns
        -------
        Particles
            Like a correction, with even weights.

        Raises
        ------
        ModelError
            For rows of three and more latents, rows that read each other's latents, and latents for
            which quadrature is too coarse.
        ValueError
            For a fit under a divergence other than KL.
        NonFiniteError
            If the density is not finite at any particle of an island.
        """
        positive_int("num_exchanges", num_exchanges)
        fit = result.result if isinstance(result, Corrected) else result
        accuracy = result.accuracy if isinstance(result, Corrected) else TOLERANCE
        key = typed_key(key)
        with precision(double=fit.double):
            check_weighable(fit._fit)
            key_begin, key_run, key_draws = jax.random.split(key, 3)
            smc = self._parts(fit._fit, nodes_for(fit, result), quick)
            reached = result._state if isinstance(result, Particles) else None
            settings = self.start, self.num_particles
            if reached and (reached.begun_at, len(reached.particles.z)) == settings:
                state, near = reached.copy(), isinstance(result, Particles) and result.near
            else:
                state = self._begin(key_begin, fit, result)
                near = self.start == "prior"
                # Particles of another run are not known to cover the posterior.
                if isinstance(result, Corrected) and not isinstance(result, Particles):
                    near = near or result.ess >= MIN_EFFECTIVE
            words = "log likelihoods at particles, or their gradients, are not finite at {}."
            ask = partial(fit.ask_once, key=key_run, message=words)
            interrupted, progress = False, progress_of(progress_bar)
            try:
                with progress.under_way(False, num_exchanges):
                    shown = partial(progress.step, 1)
                    smc.run(ask, state, num_exchanges, generator(key_run), shown)
            except KeyboardInterrupt:
                interrupted = True
            except (SilosError, NonFiniteError) as error:
                error.result = fit
                raise
            found = particles_of(key_draws, fit, state, near=near, accuracy=accuracy)
        if interrupted:
            raise Interrupted(
                f"interrupted after {found.num_exchanges} exchanges; the particles as they are "
                "then are in the error's .result.",
                result=found,
            )
        return found

    def _parts(self, fit: CompiledMethod, nodes: int, quick: bool) -> TemperedSMC:
        number = self.num_particles

        def make() -> TemperedSMC:
            smc = replace(tempering_of(fit.built, number, nodes), little=quick)
            if self.start == "prior":
                return smc
            density = WideParts.of(wider_parts_of(fit), number, WIDER).log_density_with
            return replace(smc, log_q=lambda theta, own, z: density(theta, own, z[None])[0])

        return fit.cached(("tempering", number, self.start, nodes, quick), make)

    def _begin(self, key: Array, fit: Result, result: Result | Corrected) -> SMCState:
        """Return the particles before the first exchange: draws of the reference."""
        theta, fm = fit.shared.theta, fit._fit.model
        if self.start == "prior":
            prior = fm.global_prior
            if not prior.drawable:
                raise ModelError(
                    "start='prior': some global cannot be drawn from its prior. Use start='fit'."
                )
            keys = jax.random.split(key, self.num_particles)
            zeros = jnp.zeros(fm.dim)
            latents = fm.named("latent")
            drawn = jax.vmap(lambda key: prior.draw(key, theta, zeros, latents))(keys)
            return SMCState.at(self.start, theta, (), np.asarray(drawn))
        if isinstance(result, Corrected) and result.pool is not None:
            own = result.pool.mixtures[0]  # the latest one
        else:
            z_G = fit.many_draws_of_globals().astype(np.float64)
            own = around_modes(z_G, (), np.zeros(1))
        # Of a finite slope, and without what is known of draws that it was matched to.
        own = own._replace(log_shares=np.maximum(own.log_shares, LOST), log_left_out=None)
        draws = generator(key)
        wide = WideParts.of(wider_parts_of(fit._fit), self.num_particles, WIDER)
        chosen = wide.draw_with(draws, theta, own)
        # The first draws are of the mixture, the others of wider parts: islands must be alike.
        z: np.ndarray = draws.permutation(chosen).astype(jnp.result_type(float))
        own = jax.tree.map(lambda a: np.asarray(a, z.dtype), own)
        return SMCState.at(self.start, theta, own, z)


def tempering_of(built: Built, num_particles: int, nodes: int) -> TemperedSMC:
    """Return the algorithm of particles from the prior; silos do the same for any reference."""
    fm = built.model

    def log_prior(theta: Theta, parameters: object, z: Array) -> Array:
        # Factors and scaled sites are left out.
        return fm.global_prior.log_density(theta, z, fm.named("latent"))

    return TemperedSMC(fm, built.guide, log_prior, built.algorithm, num_particles, nodes)


def nodes_for(fit: Result, result: Result | Corrected) -> int:
    """Return the nodes of the quadrature: more where a correction has found the default too few.

    A model is refused whose silos cannot reply with gradients of their likelihood.
    """
    fm = fit._fit.model
    nodes = default_nodes(fm)
    if not fm.dim:
        raise ModelError("there are no global latents that particles could move.")
    if any(p.dim for p in fm.plates) and (why := quadrature_misfit(fm)) is not None:
        raise ModelError(f"particles need rows' latents integrated by quadrature, but {why}.")
    if any(p.dim for p in fm.plates) and not nodes:
        raise ModelError("particles need rows of at most two latents, with those of outer plates.")
    refuse_coupled_rows(fit._fit.checks, fit._silos.buckets, "particles need")
    if not isinstance(result, Corrected) or not nodes:
        return nodes
    if result.integration.gave_way:
        raise ModelError(
            "particles need rows' latents integrated by quadrature, and a correction has found it "
            "too coarse."
        )
    usual = default_quadrature(fm)
    more = usual is not None and result.integration.nodes > usual.nodes
    return result.integration.nodes if more else nodes


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
    _state: SMCState | None = field(default=None, repr=False)

    @property
    def reliable(self) -> bool:
        """Whether particles came to the posterior and moved there, and integrals are right."""
        settled = self._arrived and self.memory <= MAX_MEMORY
        return self.near and settled and self.coarse <= MAX_COARSE

    @property
    def _arrived(self) -> bool:
        """Return whether particles came to the posterior, and were kept there often enough."""
        return self.reached >= 1 and self.num_kept >= MIN_KEPT

    @property
    def nearly(self) -> bool:
        """Whether particles are at the posterior, and more exchanges are likely to be enough."""
        error = MAX_PARTICLE_ERROR * self.accuracy
        close = self.monte_carlo_error <= NEARLY * error and self.coarse <= MAX_COARSE
        more = close or not self._arrived
        return self.near and self.reached >= 1 and not self.trusted and more

    @property
    def max_error(self) -> float:
        """Return the largest standard error, in sds, of a mean, an sd or quantiles that are known.

        It is half of the ``accuracy=`` that was asked for, or 0.3 of it with few globals.
        """
        return (
            super().max_error
            if self.z_G.shape[1] <= FEW_COORDINATES
            else MAX_PARTICLE_ERROR * self.accuracy
        )

    @property
    def monte_carlo_error(self) -> float:
        """The largest standard error of a global's mean, sd or quantiles, from the islands.

        It is infinite for particles that have not come to the posterior.
        """
        return super().monte_carlo_error if self.num_kept else math.inf

    @property
    def _advice(self) -> str:
        return "more max_exchanges, or NUTS on pooled data where that is allowed"

    def doubts(self) -> Iterator[Doubt]:
        """Yield all that speaks against the particles, the gravest first."""
        remedy = f"Try {self._advice}."
        spoils: Spoils = "details" if self.many_draws_count else "all"
        if not self.precise:
            yield Doubt(self._rounding.words(self._sites), self._rounding.remedy)
        if self.reached < 1:
            came = f"the particles came to {self.reached:.2g} of the way to the posterior"
            yield Doubt(came, remedy, spoils)
        elif not (self._arrived and self.memory <= MAX_MEMORY):
            yield Doubt("the particles have not moved enough at the posterior", remedy, spoils)
        if not self.near:
            why = (
                "the particles began at a fit that is not known to cover the posterior, and may "
                "have missed a part of it: give a correction of which draws count, or start='prior'"
            )
            yield Doubt(why, remedy, spoils)
        if not self.coarse <= MAX_COARSE:
            yield Doubt("the quadrature over rows' latents is too coarse", remedy, spoils)
        spoils = "details" if self.moments_known else "spreads"
        if self.quantiles_known:
            remedy = f"{QUANTILES_KNOWN} {remedy}"
        if not self.evidence_error <= MAX_EVIDENCE_ERROR:
            error = f"{self.evidence_error:.2g}"
            why = f"islands of particles differ: the log evidence is known to {error} nats"
            yield Doubt(why, remedy, spoils)
        if not self.quantiles_known:
            error = f"{self.monte_carlo_error:.2g}"
            why = f"islands of particles differ: means and sds are known to {error} sd"
            yield Doubt(why, remedy, spoils)
        elif not self.moments_known:
            yield Doubt(self.reservation, remedy, spoils)

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
            return str(self.draws_verdict)
        error = f"(+- {self.evidence_error:.2f})"
        return f"{self.draws_verdict} Log evidence {self.log_evidence:.2f} {error}."


def particles_of(
    key: Array, fit: Result, state: SMCState, *, near: bool, accuracy: float
) -> Particles:
    """Return the particles that were kept, or those on their way, with their quality.

    Where rows have latents it takes an exchange that checks the quadrature.
    """
    key_check, key_draws = jax.random.split(key)
    # The first half still has something of where particles came to the posterior: those from a
    # narrow mixture reach a long tail last.
    num_kept, real = len(state.kept), jnp.result_type(float)
    counted = state.kept[num_kept // 2 :] or [state.particles]
    kept, log_p = np.stack([at.z for at in counted]), np.stack([at.log_p for at in counted])
    arrived, dim = state.arrived, kept.shape[2]
    if isinstance(fit.start, Mode) and (copy := fit.start.copy) is not None:
        # They pass from one copy of a mode to the next.
        kept, arrived = copy.copy_of(kept), copy.copy_of(arrived)
    z, log_p = kept.reshape(-1, dim).astype(real), log_p.ravel()
    integration, coarse = integration_of(fit, None), 0.0
    if num_kept and integration.nodes:
        integration, coarse, exchanges = checked(key_check, fit, integration, z, log_p)
        state.exchanges += exchanges
    even = np.full(len(z), 1 / len(z))
    computed = moments(z, even, np.zeros(len(z), bool), fit.many_draws_of_globals())
    sampler = sampler_of(fit._fit, integration)
    draws = on_supports(sampler, fit, z)
    latents = {s.name for s in fit._fit.model.named("latent")}
    index = np.arange(len(z)).reshape(len(kept), NUM_ISLANDS, -1)
    by_islands = index.swapaxes(0, 1).reshape(NUM_ISLANDS, -1)
    errors = ElementErrors.of(
        draws, latents, even, by_islands, fit._fit.model.labels, fit._fit.model.bounded
    )
    shift_error = disagreement(z[by_islands], computed.sd)
    counts = log_p > LOST / 2
    of_islands, factors = state.log_evidence, fit._fit.built.factors
    of_density = state.b >= 1 and not (factors and factors.has_loss)
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
        _sent=state.exchanges,
        integration=integration,
        near=near,
        reached=state.b,
        num_kept=num_kept,
        memory=memory_of(arrived, kept[0]) if num_kept else 1.0,
        coarse=coarse,
        evidence_error=float(of_islands.std(ddof=1)) / math.sqrt(NUM_ISLANDS),
        _state=state,
    )


def checked(
    key: Array, fit: Result, integration: Integration, z: np.ndarray, log_p: np.ndarray
) -> tuple[Integration, float, int]:
    """Return how a correction integrates at particles (n, dim), how far that differs, exchanges.

    The second is the sd, in nats, by which it moves their log densities (n,): by so much particles
    would be weighed otherwise. It is infinite where draws take the place of quadrature.
    """
    key_points, key_exchange = jax.random.split(key)
    points = np.asarray(jax.random.choice(key_points, len(z), (AT_ONCE,)))
    weighing = Weighing(fit, AT_ONCE, 0, integration)
    try:
        found = weighing.log_joint(key_exchange, z[points])
    except NonFiniteError:
        return integration, math.inf, weighing.sent
    coarse = math.inf if weighing.integration.gave_way else float((found - log_p[points]).std())
    coarse = coarse if math.isfinite(coarse) else math.inf
    return weighing.integration, coarse, weighing.sent


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
        widest, beyond = GAP, None
        for inside in (modes == mode for mode in range(new)):
            ordered = np.sort(z[inside], axis=0)
            places = np.arange(least, len(ordered) - least + 1)  # particles on the left of a gap
            for coordinate in range(z.shape[1] if len(places) else 0):
                x = ordered[:, coordinate]
                i = places[np.argmax(x[places] - x[places - 1])]
                spread = x[:i].std() + x[i:].std()
                width = float((x[i] - x[i - 1]) / spread) if spread > 0 else 0.0
                if width > widest:
                    middle = float(x[i - 1] + x[i]) / 2
                    widest, beyond = width, inside & (z[:, coordinate] > middle)
        if beyond is None:
            break
        modes[beyond] = new
    return modes
