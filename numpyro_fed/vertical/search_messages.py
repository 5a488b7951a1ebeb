"""The state of a party in the search for the mode, and the messages of the search."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeAlias

import numpy as np
from jax import Array

from numpyro_fed.basics.trees import AnyArray
from numpyro_fed.vertical.parties import PinnedLatents


class PartySearch(NamedTuple, Generic[AnyArray]):
    """A party's state of the search: arrays of NumPy at the server, of JAX at a client."""

    theta: dict[str, Any]
    pinned: PinnedLatents
    z: AnyArray  # the best point so far
    direction: AnyArray  # with ``last`` it spans the plane of the next step
    last: AnyArray
    step: AnyArray  # leads to the point that is tried
    basis: AnyArray  # (dim, width) its rows of a basis for directions of all parties' latents
    directions: AnyArray  # the same in the latents' own units
    anchor: AnyArray  # (dim, rank) the first columns of the first basis


ServerSearch: TypeAlias = PartySearch[np.ndarray]
ClientSearch: TypeAlias = PartySearch[Array]


class Trial(NamedTuple, Generic[AnyArray]):
    """The point to try: coordinates in the plane (2,), and a step along the basis (width,)."""

    ab: AnyArray
    newton: AnyArray


def moved(state: PartySearch[AnyArray], trial: Trial[AnyArray]) -> PartySearch[AnyArray]:
    """Return the party with its own step (dim,) from the best point to the trial point."""
    plane = trial.ab[0] * state.direction + trial.ab[1] * state.last
    return state._replace(step=plane + state.directions @ trial.newton)


def accepted(state: PartySearch[AnyArray]) -> PartySearch[AnyArray]:
    """Return the party with the trial point as its best one."""
    return state._replace(z=state.z + state.step, last=state.step)


class TrialReply(NamedTuple, Generic[AnyArray]):
    """A client's message on a trial point: its predictor, and its own log density."""

    predictor: AnyArray
    log_p: AnyArray


class Slopes(NamedTuple, Generic[AnyArray]):
    """A message of the server: whether the trial was accepted, slope and curvature in the sum.

    Where the basis is improved, ``ritz`` has the findings on it (:class:`RitzValues`).
    """

    better: AnyArray  # () bool
    slope: AnyArray
    curvature: AnyArray
    ritz: Any = ()


class Along(NamedTuple, Generic[AnyArray]):
    """A client's message on some directions: the two of its plane, or those of its basis."""

    predictor: AnyArray  # (k, rows, ...) the change of its predictor along each
    slope: AnyArray  # (k,) of its own log density
    curvature: AnyArray  # (k, k)
    gram: Any = ()  # (k, k) products of its rows of a basis
    anchor: Any = ()  # (k, rank) those with its rows of the anchor


class RitzValues(NamedTuple, Generic[AnyArray]):
    """The server's findings on the basis, which it sends."""

    looks: AnyArray  # counts exchanges
    combine: AnyArray  # (width, width) combinations of the basis
    curvatures: AnyArray  # (width,) along these, smallest first
    # (width, rows, ...) minus the change of the slope with respect to the sum along each; empty if
    # the basis spans all directions
    pull: AnyArray


class BeginMessage(NamedTuple, Generic[AnyArray]):
    """A message of the server at the start of a run."""

    at_best: Slopes[AnyArray]
    combine: Any  # (width, rank) makes the shares in the shared noise of the basis
    tau: AnyArray


class JointCurvature(NamedTuple):
    """The server's findings on the basis, besides those that it sends (``ritz``)."""

    ritz: RitzValues[np.ndarray]
    turned: np.ndarray  # (dim, width) its own rows of the curvature times the directions
    newton: np.ndarray  # (width,) a step along them to try, whose gain is ``gain`` nats
    angles: np.ndarray  # (rank, rank) products of the best directions with the anchor
    gain: float
