r"""Particles from a fit, or from the prior, to a posterior that is like no Gaussian."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.importance.proposals import (
    Mixture,
    MixtureProposal,
    WideParts,
)
from numpyro_fed.algorithms.tempered import (
    KEPT,
    LOST,
    NUM_ISLANDS,
    Reference,
    Swarm,
    Tempering,
)
from numpyro_fed.errors import (
    CoupledRowsError,
    Interrupted,
    ModelError,
    NonFiniteError,
    positive_int,
)
from numpyro_fed.integrals.quadrature import default_nodes, quadrature_misfit
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.row_checks import coupled_rows
from numpyro_fed.precision import precision
from numpyro_fed.results.built import Built
from numpyro_fed.results.corrected import Corrected
from numpyro_fed.results.mixture import around_modes
from numpyro_fed.results.particles import Particles, particles_of
from numpyro_fed.results.rows import Fit, Result
from numpyro_fed.runtime.noise import typed_key
from numpyro_fed.runtime.progress import Progress
from numpyro_fed.runtime.simulation import simulation
from numpyro_fed.runtime.stack import State
from numpyro_fed.runtime.supervise import drive, failed_silos

STARTS = "fit", "prior"
NO_DENSITY = (
    "the log density is not finite at any particle of an island. Begin at a fit (start='fit'), or "
    "look at the data and the supports of the sites there."
)
WIDER = 0.5  # share of the first particles that come from distributions wider than the fit
# Numbers of a batch of particles, for each site of the rows.
IN_BATCH = 2**18


@dataclass(frozen=True)
class PriorReference:
    """The prior as the distribution at which the particles begin."""

    model: FederatedModel

    def log_density(self, theta: Theta, parameters: tuple[()], z: Array) -> Array:
        """Return the log density () at ``z`` (dim,)."""
        return self.model.log_prior(theta, z)


@dataclass(frozen=True)
class MixtureReference:
    """A mixture with wider parts as the distribution at which the particles begin."""

    wide: WideParts

    def log_density(self, theta: Theta, parameters: Mixture, z: Array) -> Array:
        """Return the log density () at ``z`` (dim,)."""
        own = parameters.log_prob(z)[None]
        return self.wide.log_density(own, theta, parameters.place, z[None])[0]


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
        wider distributions around it; or at the prior.

    References
    ----------
    Del Moral, Doucet, Jasra (2006), Sequential Monte Carlo samplers. Weights and resampling are
    BlackJAX's; the trajectories are this package's own, since each gradient is an exchange.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu**2, 1), obs=y)  # two modes
    >>> silos = [dict(y=np.array([3.8, 4.1])), dict(y=np.array([4.4, 3.9, 4.0]))]
    >>> fit = nf.PVI(model).run(jax.random.key(0), 0, silos, progress_bar=False)
    >>> particles = nf.Tempered().run(jax.random.key(1), 300, fit, progress_bar=False)
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
        if self.start not in STARTS:
            raise ValueError(f"start={self.start!r}: expected one of {list(STARTS)}.")

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
        result : Result or Corrected
            A fit, or a correction of one.
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
            For rows of three and more latents, or rows that read each other's latents.
        NonFiniteError
            If the density is not finite at any particle of an island.
        """
        positive_int("num_exchanges", num_exchanges)
        fit = result.result if isinstance(result, Corrected) else result
        key = typed_key(key)
        with precision(double=fit.double):
            check_temperable(fit)
            key_begin, key_run = jax.random.split(key)
            tempering = self._parts(fit._fit)
            swarm = self._begin(key_begin, tempering, fit, result)
            return self._moved(key_run, num_exchanges, tempering, swarm, fit, progress_bar, quick)

    def _settings(self, fit: Fit) -> dict[str, Any]:
        rows = sum(n for _, n in fit.plan.total)
        nodes = max(default_nodes(fit.model), 1)
        batch = max(1, min(self.num_particles, IN_BATCH // max(rows * nodes, 1)))
        return {"num_particles": self.num_particles, "start": self.start, "batch_size": batch}

    def _parts(self, fit: Fit) -> Tempering:
        settings = self._settings(fit)
        text = json.dumps(settings)
        return fit.cached(("tempering", text), lambda: tempering_of(fit.built, settings))

    def _begin(
        self, key: Array, tempering: Tempering, fit: Result, result: Result | Corrected
    ) -> Swarm:
        """Return the first state: draws of the reference."""
        theta, fm = fit.shared.theta, fit._fit.model
        if self.start == "prior":
            z = None if fm.improper else fm.draw_prior(key, self.num_particles)
            if z is None:
                raise ModelError(
                    "start='prior': some distribution of the prior cannot be drawn from. Use "
                    "start='fit'."
                )
            return tempering.begin(theta, (), z)
        own = mixture_of(fit, result)
        own = own._replace(log_shares=jnp.maximum(own.log_shares, LOST))  # states must be finite
        propose = fit._fit.cached(
            ("particles", self.num_particles),
            lambda: MixtureProposal(WideParts.of(fm, self.num_particles, WIDER)),
        )
        key_draw, key_order = jax.random.split(key)
        z = propose.draw(key_draw, theta, own)
        # The first draws are of the mixture, the others of wider parts: islands must be alike.
        return tempering.begin(theta, own, jax.random.permutation(key_order, z))

    def _moved(
        self,
        key: Array,
        num_exchanges: int,
        tempering: Tempering,
        swarm: Swarm,
        fit: Result,
        progress_bar: bool | Progress,
        quick: bool,
    ) -> Particles:
        """Return the particles after the exchanges."""
        if fit._silos is None:
            return self._moved_elsewhere(key, num_exchanges, tempering, swarm, fit)
        algorithm = tempering.algorithm()
        runtime = fit._fit.cached(
            ("tempered", tempering.settings, quick), lambda: simulation(algorithm, quick=quick)
        )
        state = State(jnp.zeros((), jnp.int32), swarm, fit.state.silos, ())
        run = drive(
            runtime, key, state, fit._batches, num_exchanges, progress_bar, stop=True, keep=True
        )
        if run.refused is not None:
            raise run.refused
        after: Swarm = run.state.server
        if run.failure is not None:
            raise NonFiniteError(
                NO_DENSITY, result=fit, round=run.failure.round, silos=run.failure.silos
            )
        found = particles_of(key, fit, after)
        if run.ended == "interrupted":
            raise Interrupted(
                f"interrupted after {int(after.exchanges)} exchanges; the particles as they are "
                "then are in the error's .result.",
                result=found,
            )
        return found

    def _moved_elsewhere(
        self, key: Array, num_exchanges: int, tempering: Tempering, swarm: Swarm, fit: Result
    ) -> Particles:
        """Return the particles after the exchanges, with silos in other processes."""
        once = fit._fit.quick_round(tempering.round())
        for i in range(num_exchanges):
            key_round = jax.random.fold_in(key, i)
            swarm, _, info, good = once(key_round, swarm, fit.state.silos, ())
            if not bool(info.ok):
                bad = failed_silos(good, (), ())
                raise NonFiniteError(NO_DENSITY, result=fit, round=i, silos=bad)
            if int(swarm.num_kept) >= KEPT:
                break
        return particles_of(key, fit, swarm)


def tempering_of(built: Built, settings: Mapping[str, Any]) -> Tempering:
    """Return the parts of the algorithm, the same at the server and at every silo."""
    fm, number = built.model, settings["num_particles"]
    reference: Reference = PriorReference(fm)
    if settings["start"] == "fit":
        reference = MixtureReference(WideParts.of(fm, number, WIDER))
    return Tempering(
        fm,
        built.guide,
        reference,
        built.algorithm,
        number,
        settings["batch_size"],
        json.dumps(dict(settings)),
    )


def check_temperable(fit: Result) -> None:
    """Raise an error for a model whose silos cannot reply with gradients of their likelihood."""
    fm = fit._fit.model
    if not fm.dim:
        raise ModelError("there are no global latents that particles could move.")
    if any(p.dim for p in fm.plates) and (why := quadrature_misfit(fm)) is not None:
        raise ModelError(f"particles need rows' latents integrated by quadrature, but {why}.")
    if any(p.dim for p in fm.plates) and not default_nodes(fm):
        raise ModelError("particles need rows of at most two latents, with those of outer plates.")
    silos = fit._silos
    if silos is not None and fit._fit.checks is not None:
        rows = coupled_rows(fit._fit.checks, silos.buckets)
        if rows is not None:
            raise CoupledRowsError(
                f"{rows.words()} reads latents of other rows, so that they cannot be integrated "
                "row by row, which particles need."
            )


def mixture_of(fit: Result, result: Result | Corrected) -> Mixture:
    """Return the mixture around a fit, or the latest one of a correction."""
    if isinstance(result, Corrected) and result.pool is not None:
        return result.pool.mixtures[0]
    z = np.asarray(fit.draw_globals(jax.random.key(0), 4_000)[0], np.float64)
    return around_modes(z, (), np.zeros(1))
