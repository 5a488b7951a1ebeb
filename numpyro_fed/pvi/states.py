"""What server and silos of PVI keep from round to round, and the messages between them.

Names of fields are those in saved files and in messages.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from numpyro_fed.numerics.expfam.family import Natural
from numpyro_fed.numerics.gaussian import Gaussian
from numpyro_fed.rounds.states import SharedParams, SiloParams


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
        """Return the factor with the share of its pending change that was added."""
        return jax.tree.map(lambda a, b: a + taken * b, self.factor, self.pending)


class Down(NamedTuple):
    """A message: shared parameters, sum of factors, share of the last proposal that was added."""

    theta: dict[str, Any]
    total: Natural
    taken: Any = ()


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
