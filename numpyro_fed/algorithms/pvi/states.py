"""What PVI's server and silos keep, what they send, and the settings that make the family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import SharedParams, SiloParams
from numpyro_fed.algorithms.pvi.families import Globals
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural
from numpyro_fed.frame import Coordinates, identity
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.structured import Guide
from numpyro_fed.local.base import Local, Problem, SiloPart, Solution
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.minibatch import Minibatches
from numpyro_fed.objectives import SiloBound


class Status(IntEnum):
    """How a visit ended. From ``NON_FINITE`` on, the change that it sends is zero."""

    CONVERGED = 0
    NOT_CONVERGED = 1
    NON_FINITE = 2
    IMPROPER = 3
    NOT_CONJUGATE = 4


class Progress(NamedTuple):
    """How far the posterior has moved since the round began, and whether the server's own factor
    has converged.

    ``mean`` and ``log_scale`` (dim,) are those of the posterior when the round began, ``steps``
    the steps since then. ``moved`` is the largest move of a mean, in standard deviations, or of a
    log standard deviation; ``refused`` counts visits since then whose change was zero because it
    could not be used.
    """

    mean: Array
    log_scale: Array
    steps: Array
    moved: Array
    own: Array
    refused: Array


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``params`` are shared parameters, and as ``guide`` the posterior's natural parameters.
    ``total`` is the sum of all factors, ``server_factor`` the server's own among them, for what of
    the prior is outside of the family; ``taken`` (silos,) is the factor with which each silo's last
    proposal was taken. Silos' own guides measure the globals in the ``frame``.
    """

    params: SharedParams
    total: Natural
    server_factor: Natural
    opt_state: optax.OptState
    damping: Array
    taken: Array
    progress: Progress
    frame: Gaussian


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    ``centre`` is from where the local guides measure the globals in the ``frame``. ``factor`` has
    been taken by the server, ``pending`` was sent and waits to hear. ``status`` says how the last
    visit ended. ``stale`` is the cavity and the posterior that an asynchronous silo is at work
    from.
    """

    params: SiloParams
    centre: Array
    factor: Natural
    pending: Natural
    visits: Array
    status: Array
    stale: tuple[Natural, Natural] | tuple[()]
    frame: Gaussian

    def coordinates(self, z_G: Array, centre: Array) -> Coordinates:
        """Return the globals as a local guide sees them that measures from ``centre``."""
        return Coordinates(self.frame.standardise(z_G), self.frame.standardise(centre))

    def offset(self, z_G: Array) -> Array:
        """Return how far the globals are from where the local guides measure them."""
        return self.frame.standardise(z_G) - self.centre

    def effective_factor(self, taken: Array) -> Natural:
        """Return the silo's factor, pending part included: these sum to the server's ``total``."""
        return jax.tree.map(lambda a, b: a + taken * b, self.factor, self.pending)


class Down(NamedTuple):
    """A message of the server: shared parameters, the sum of all factors, and with which factor
    it took the silo's last proposal.
    """

    theta: dict[str, Any]
    total: Natural
    taken: Array


VISIT = "pvi"  # the name of the exchange
SCATTERED: Any = (False, False, True)  # of Down, what each participant gets a slice of


class Up(NamedTuple):
    """A silo's message: the change of its factor, the expected log likelihood at the posterior
    that it received with its gradient for the shared parameters, and how the visit ended.
    """

    change: Natural
    log_lik: Array
    theta: dict[str, Any]
    statuses: Array


class Report(NamedTuple):
    """A report of a step: the damping used (0 for a rejected update), how visits ended, and
    whether the server's own factor converged.
    """

    damping: Array
    statuses: Array
    own: Array


class Settings(NamedTuple):
    """The settings that make PVI, and the members of its family, what they are.

    Attributes
    ----------
    num_silos : int
    steps : int
        Server updates in a round.
    participants : int
        Silos that are visited in each of them.
    damping : float
    adaptive : bool
        Whether to lower the damping where an update would be improper, instead of rejecting it.
    deletion : {"own", "none", "average", "prior"}
        What is taken out of the posterior to make the cavity: the silo's own factor; nothing; an
        average factor, the sum over the number of silos; all factors.
    prior_share : float
        The share of the prior that a silo's cavity holds.
    asynchronous : bool
        Whether a silo works from what it was sent at the visit before.
    start_scale : float or None
        The largest standard deviation, of Gaussian globals, at which a silo's first visit starts.
    evidence_draws : int
        Draws for the expected log likelihood.
    share : float
        How much of the way to its optimum a visit goes; 0 where that is not known.
    exact : bool
        Whether a silo's proposal depends on nothing but its own data.
    from_mode : bool
        Whether a run begins at the mode, and a visit near its optimum.
    """

    num_silos: int
    steps: int
    participants: int
    damping: float
    adaptive: bool
    deletion: str = "own"
    prior_share: float = 1.0
    asynchronous: bool = False
    start_scale: float | None = 0.1
    evidence_draws: int = 32
    share: float = 1.0
    exact: bool = False
    from_mode: bool = False

    @property
    def visits(self) -> int:
        """Return how many visits a round has."""
        return self.steps * self.participants


class PVIParts(NamedTuple):
    """The parts that the algorithm is made of.

    ``bound`` is the silo's term of the bound, ``plain_bound`` the same with a plain gradient.
    ``divergence`` is that to the cavity; ``aggregate`` makes a posterior of a prior and a sum of
    factors.
    """

    model: FederatedModel
    globals: Globals
    guide: Guide
    bound: SiloBound
    plain_bound: SiloBound
    local: Local
    prior_local: Local
    conjugate: bool
    optim: optax.GradientTransformation
    minibatches: Minibatches | None
    divergence: Callable[[Natural, Natural], Array] | None
    aggregate: Callable[[Natural, Natural], Natural]


@dataclass(frozen=True)
class Role:
    """A part of the algorithm, the server's or a silo's, with what both have in common."""

    parts: PVIParts
    settings: Settings

    @property
    def family(self) -> Family[Any]:
        """Return the family of the globals."""
        return self.parts.globals.family

    @property
    def model(self) -> FederatedModel:
        """Return the split text."""
        return self.parts.model

    def prior(self, theta: dict[str, Any]) -> Natural:
        """Return natural parameters of the prior, for what of it is in the family."""
        return self.parts.globals.prior(theta)

    def solve(self, local: Local, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Return what a local optimiser makes of the problem; of one near its optimum, in
        coordinates in which the posterior is standard.
        """
        if not (self.settings.from_mode and local.standardises):
            return local.solve(problem, key)
        inside, back = problem.standardised()
        return back(local.solve(inside, key))

    def first_frame(self) -> Gaussian:
        """Return the frame before one is known; of a run from the mode one of its shape."""
        if not self.settings.from_mode:
            return identity((self.model.dim,))
        return Gaussian.of_root(jnp.zeros(self.model.dim), jnp.eye(self.model.dim))
