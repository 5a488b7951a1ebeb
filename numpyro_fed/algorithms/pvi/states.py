"""The states and messages of PVI, and its parts: model, guides, optimisers and settings."""

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
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.structured import Guide
from numpyro_fed.local.base import Local, Problem, SiloPart, Solution
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.minibatch import Minibatches
from numpyro_fed.objectives import Bound


# The order counts: code compares with ``NON_FINITE``, and messages hold one number for each.
class Status(IntEnum):
    """How a visit ended. From ``NON_FINITE`` on, the change that it sends is zero."""

    CONVERGED = 0
    NOT_CONVERGED = 1
    NON_FINITE = 2
    IMPROPER = 3
    NOT_CONJUGATE = 4
    AWAY = 5  # the silo did not answer: its factor stays


class Movement(NamedTuple):
    """How far the posterior has moved since the round began.

    ``mean`` and ``log_scale`` (dim,) are those of the posterior when the round began. ``steps``
    counts all steps of the run. ``moved`` is the largest move of a mean, in standard deviations, or
    of a log standard deviation. ``own`` says whether the server's own factor has converged.
    ``refused`` counts visits of this round whose change could not be used and was zero.
    """

    mean: Array
    log_scale: Array
    steps: Array
    moved: Array
    own: Array
    refused: Array


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``params`` has the shared parameters and, as ``guide``, the posterior's natural parameters.
    ``total`` is the sum of all factors. ``server_factor`` is the server's own among them, for the
    part of the prior outside of the family. ``taken`` (silos,) is the share of each silo's last
    proposal that was added. Silos' local guides measure the globals in the ``frame``.
    """

    params: SharedParams
    total: Natural
    server_factor: Natural
    opt_state: optax.OptState
    damping: Array
    taken: Array
    progress: Movement
    frame: Gaussian


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    ``centre`` (dim,) is the point of the ``frame`` from which the local guides measure the globals.
    ``factor`` is the part that the server has added; ``pending`` is the last change that was sent,
    of which the silo does not know yet how much was added. ``status`` says how the last visit
    ended. ``stale`` has the cavity and the posterior from which an asynchronous silo works.
    """

    params: SiloParams
    centre: Array
    factor: Natural
    pending: Natural
    visits: Array
    status: Array
    stale: tuple[Natural, Natural] | tuple[()]
    frame: Gaussian

    def effective_factor(self, taken: Array) -> Natural:
        """Return the silo's factor, with the share of its pending change that was added.

        Over all silos these sum to the server's ``total``.
        """
        return jax.tree.map(lambda a, b: a + taken * b, self.factor, self.pending)


class Down(NamedTuple):
    """A message of the server: shared parameters, and the sum of all factors.

    ``taken`` is the share of the silo's last proposal that was added; () in an evaluation.
    """

    theta: dict[str, Any]
    total: Natural
    taken: Array | tuple[()] = ()


class Up(NamedTuple):
    """A silo's message: the change of its factor, and a report of the visit.

    ``log_lik`` is the expected log likelihood at the posterior that the silo received, ``theta``
    its gradient in the shared parameters. ``statuses`` is a one-hot vector: a sum over silos then
    counts how visits ended.
    """

    change: Natural
    log_lik: Array
    theta: dict[str, Any]
    statuses: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class PVIParts:
    """The parts of the algorithm, and the settings that distinguish PVI and its relatives.

    ``bound``: The silo's term of the bound.
    ``conjugate``: Whether the likelihood is conjugate to the family of the globals.
    ``divergence``: The one to the cavity; None for KL.
    ``aggregate``: The function that makes a posterior of a prior and a sum of factors.
    ``steps``: Server updates in a round.
    ``participants``: Silos that are visited in each of them.
    ``adaptive``: Whether to lower the damping where an update would be improper, instead of
        rejecting it.
    ``deletion`` {"own", "none", "average", "prior"}: The factor that is taken out of the posterior
        to make the cavity: the silo's own; none; an average one, which is the sum over the number
        of silos; or all factors.
    ``prior_share``: The share of the prior that a silo's cavity holds.
    ``asynchronous``: Whether silos' proposals are from earlier posteriors than the one that they
        change.
    ``delayed``: Whether a silo works from the message of its visit before, as asynchronous silos of
        one process do: its computation takes so long.
    ``start_scale``: The largest standard deviation, of Gaussian globals, at which a silo's first
        visit starts.
    ``evidence_draws``: Draws for the expected log likelihood.
    ``exact``: Whether a silo's proposal depends on nothing but its own data.
    ``from_mode``: Whether a run begins at the mode, and a visit near its optimum.
    ``has_loss, has_divergence``: Whether a loss stands in the place of the log density, and whether
        any divergence is not KL.
    """

    model: FederatedModel
    globals: Globals
    guide: Guide
    bound: Bound
    local: Local
    prior_local: Local
    conjugate: bool
    optim: optax.GradientTransformation
    minibatches: Minibatches | None
    divergence: Callable[[Natural, Natural], Array] | None
    aggregate: Callable[[Natural, Natural], Natural]
    num_silos: int
    steps: int
    participants: int
    damping: float
    adaptive: bool
    deletion: str
    prior_share: float
    asynchronous: bool
    delayed: bool
    start_scale: float | None
    evidence_draws: int
    exact: bool
    from_mode: bool
    has_loss: bool
    has_divergence: bool

    @property
    def visits(self) -> int:
        """Return how many visits a round has."""
        return self.steps * self.participants

    @property
    def family(self) -> Family[Any]:
        """Return the family of the globals."""
        return self.globals.family

    def solve(self, local: Local, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Return a local optimiser's solution of the problem.

        In a run from the mode, whose start is near the optimum, the optimiser works in coordinates
        in which the start is standard. Its step sizes then fit every model.
        """
        if not (self.from_mode and local.standardises):
            return local.solve(problem, key)
        inside, back_solution = problem.standardised()
        return back_solution(local.solve(inside, key))

    def first_frame(self) -> Gaussian:
        """Return the frame before the start: the identity, or a placeholder of a full one."""
        if not self.from_mode:
            return identity((self.model.dim,))
        return Gaussian.of_root(jnp.zeros(self.model.dim), jnp.eye(self.model.dim))
