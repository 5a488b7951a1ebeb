r"""Particles from a fit, or from the prior, to a posterior that is like no Gaussian."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

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
from numpyro_fed.basics.precision import precision
from numpyro_fed.guides.objectives import default_quadrature
from numpyro_fed.guides.quadrature import default_nodes, quadrature_misfit
from numpyro_fed.posterior.corrected import Corrected
from numpyro_fed.posterior.particles import Particles, particles_of
from numpyro_fed.posterior.result import Result
from numpyro_fed.posterior.run import Built, Fit
from numpyro_fed.posterior.verdict import TOLERANCE
from numpyro_fed.posterior.weighing import check_weighable, of_text
from numpyro_fed.rounds.keys import generator, typed_key
from numpyro_fed.rounds.progress import Progress, progress_of
from numpyro_fed.text.row_checks import refuse_coupled_rows
from numpyro_fed.text.sites import Theta
from numpyro_fed.weigh.mixture import around_modes
from numpyro_fed.weigh.proposals import WideParts
from numpyro_fed.weigh.tempered import LOST, NUM_ISLANDS, Swarm, Tempering

STARTS = "fit", "prior"
# Effective draws of a correction from which particles that begin at its mixture can be trusted.
# With 17 a Gaussian process over forty times came to a part of the posterior: islands agreed to
# 0.05 sd, and its length scale was 1.5 sd off. A horseshoe has three, a test of 30 items five.
MIN_EFFECTIVE = 40
WIDER = 0.5  # share of the first particles that come from distributions wider than the fit


@dataclass(frozen=True, kw_only=True)
class Tempered:
    r"""Particles that go from a fit, or from the prior, to a posterior that is like no Gaussian.

    Particles at the server move through

    .. math::
        \pi_b(z_G) \propto q(z_G)^{1 - b} \Big(p(z_G) \prod_j p(y_j \mid z_G)\Big)^b,
        \qquad b = 0, \dots, 1,

    by steps that keep half of the draws effective, each followed by Hamiltonian trajectories whose
    leapfrog steps are one exchange each: silos reply with their log likelihood at every particle
    and its gradient, which are added up. Latents of rows are integrated by quadrature.

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
    Del Moral, Doucet, Jasra (2006), Sequential Monte Carlo samplers.

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
            tempering = self._parts(fit._fit, nodes_for(fit, result), quick)
            before = result._swarm if isinstance(result, Particles) else None
            if before and (before.start, len(before.here.z)) == (self.start, self.num_particles):
                swarm, near = before.copy(), bool(getattr(result, "near", False))
            else:
                swarm = self._begin(key_begin, fit, result)
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
                    tempering.run(ask, swarm, num_exchanges, generator(key_run), shown)
            except KeyboardInterrupt:
                interrupted = True
            except (SilosError, NonFiniteError) as error:
                error.result = fit
                raise
            found = particles_of(key_draws, fit, swarm, near=near, accuracy=accuracy)
        if interrupted:
            raise Interrupted(
                f"interrupted after {found.num_exchanges} exchanges; the particles as they are "
                "then are in the error's .result.",
                result=found,
            )
        return found

    def _parts(self, fit: Fit, nodes: int, quick: bool) -> Tempering:
        number = self.num_particles

        def make() -> Tempering:
            tempering = replace(tempering_of(fit.built, number, nodes), little=quick)
            if self.start == "prior":
                return tempering
            density = WideParts.of(of_text(fit), number, WIDER).log_density_with
            return replace(tempering, log_q=lambda theta, own, z: density(theta, own, z[None])[0])

        return fit.cached(("tempering", number, self.start, nodes, quick), make)

    def _begin(self, key: Array, fit: Result, result: Result | Corrected) -> Swarm:
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
            return Swarm.at(self.start, theta, (), np.asarray(drawn))
        if isinstance(result, Corrected) and result.pool is not None:
            own = result.pool.mixtures[0]  # the latest one
        else:
            z_G = fit.many_draws_of_globals().astype(np.float64)
            own = around_modes(z_G, (), np.zeros(1))
        own = own._replace(log_shares=np.maximum(own.log_shares, LOST))  # of a finite slope
        draws, wide = generator(key), WideParts.of(of_text(fit._fit), self.num_particles, WIDER)
        chosen = wide.draw_with(draws, theta, own)
        # The first draws are of the mixture, the others of wider parts: islands must be alike.
        z: np.ndarray = draws.permutation(chosen).astype(jnp.result_type(float))
        own = jax.tree.map(lambda a: np.asarray(a, z.dtype), own)
        return Swarm.at(self.start, theta, own, z)


def tempering_of(built: Built, num_particles: int, nodes: int) -> Tempering:
    """Return the algorithm of particles from the prior; silos do the same for any reference."""
    fm = built.model

    def log_prior(theta: Theta, parameters: object, z: Array) -> Array:
        # Factors and scaled sites are left out.
        return fm.global_prior.log_density(theta, z, fm.named("latent"))

    return Tempering(fm, built.guide, log_prior, built.algorithm, num_particles, nodes)


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
