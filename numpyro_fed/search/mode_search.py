"""The search for the mode of the joint density, one exchange after the other: what all have.

:class:`~.newton.NewtonSearch` takes steps by silos' Hessians, :class:`~.lbfgs.LBFGSSearch` by their
gradients, where the globals are many. Several ascents run side by side, one place of each in every
message, from several starts. The server's part is plain Python; what depends on the text is a
compiled program (:mod:`.expand`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.trees import AnyArray, namespace
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.numerics.gaussian import identity
from numpyro_fed.rounds.exchange import AskSilos, Exchange, FederatedAlgorithm, Reply, Round
from numpyro_fed.rounds.names import MODE
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.expand import (
    ROUNDING_UNITS,
    Expansion,
    SearchState,
    SiloExpansion,
    flat_size,
    prior_draws,
    unravelled,
)
from numpyro_fed.text.log_density import FederatedModel

MAX_HALVINGS = 30  # of a start at which some number is not finite: 2^-30 of it is zero in effect

AnyAscent = TypeVar("AnyAscent", bound="Ascent")
Message = TypeVar("Message")


@dataclass(frozen=True, eq=False)
class ModeSearch(ABC, Generic[AnyAscent, Message]):
    """The search of silos and server for the mode, whatever its steps are.

    ``model``: Its parameters inside silo plates keep their first values.
    ``num_starts``: Searches side by side. The first starts from ``init_loc_fn``, or zero in
        unconstrained space; the others from draws of the prior, or standard normals where there are
        none.
    ``max_places``: The largest number of points to try. One more exchange follows, at the best of
        them.
    """

    model: FederatedModel
    num_silos: int
    num_starts: int
    init_loc_fn: Callable[..., Any] | None
    max_places: int | None
    aside: ClassVar[float]  # the distance of the first start from the model's own
    ascent: ClassVar[type[Any]]  # that from one place (n,)

    @property
    def effects(self) -> np.ndarray:
        """Return the coordinates (c,) that are integrated out."""
        return np.zeros(0, int)

    @cached_property
    def prior_draws(self) -> np.ndarray | None:
        """Return draws (n, dim) of the prior, if it can be drawn from."""
        return prior_draws(self.model)

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos expand their log likelihoods at the starts' points."""
        return StackedExchange(MODE, self.answer_mode, lenient=True, messages=self.messages)

    @property
    def opening_exchanges(self) -> tuple[Exchange[Any, Any, Any], ...]:
        """Return the exchanges before the first place."""
        return ()

    @abstractmethod
    def messages(self) -> tuple[Message, SiloExpansion[Any]]:
        """Return the shapes of the messages."""

    @abstractmethod
    def answer_mode(
        self, noise: object, down: Message, state: SearchState, data: SiloData
    ) -> tuple[Reply[SiloExpansion[np.ndarray]], SearchState]:
        """Return the replies and states of a stack of silos.

        Where a silo's numbers are not finite the reply is NaN, and still ``ok``: the step fails,
        not the exchange.
        """

    @abstractmethod
    def ask_and_advance(self, ask: AskSilos, ascents: list[AnyAscent], places: np.ndarray) -> None:
        """Ask silos at the places (starts, n), and let each ascent choose its next one."""

    def first_ascents(self, key: Array, random: np.random.Generator) -> list[AnyAscent]:
        """Return the searches at their first places: shared parameters and globals as one vector.

        The first one is close to the model's own; the others are among draws of the prior, or
        standard normals.
        """
        fm, real = self.model, jnp.result_type(float)
        theta = [np.ravel(a) for a in jax.tree.leaves(fm.init_theta(key))]
        flat_theta = np.concatenate([np.zeros(0), *theta])
        draws = self.prior_draws if self.num_starts > 1 else None
        z_G = random.standard_normal((self.num_starts, fm.dim))
        if draws is not None:
            z_G = random.choice(draws, self.num_starts)
        own = self.init_loc_fn and fm.init_global(key, self.init_loc_fn)
        first = np.zeros(fm.dim) if own is None else np.asarray(own, float)
        least = np.maximum(self.aside, ROUNDING_UNITS * np.finfo(real).eps * np.abs(first))
        z_G[0] = first + least * random.standard_normal(fm.dim)
        jitter = random.standard_normal((self.num_starts, len(flat_theta)))
        jitter[0] = 0.0
        places = np.nan_to_num(np.concatenate([flat_theta + jitter, z_G], 1).astype(real))
        return [self.ascent(place) for place in places]

    @np.errstate(all="ignore")  # of points that are too far
    def run(
        self,
        ask: AskSilos,
        ascents: list[AnyAscent],
        max_exchanges: int,
        shown: Callable[[float], None],
    ) -> BestPoints[Any]:
        """Return where ascents end, after so many exchanges at most."""
        for _ in range(max_exchanges):
            if all(ascent.phase is AscentPhase.ENDED for ascent in ascents):
                break
            places = np.stack([ascent.trial for ascent in ascents])
            self.ask_and_advance(ask, ascents, places.astype(jnp.result_type(float)))
            shown(max(ascent.height for ascent in ascents))
        (_, like), n, c = self.messages(), flat_size(self.model), len(self.effects)
        unit = np.eye(n) if like.curvature.ndim == 3 else np.ones(n)
        none = Expansion(np.zeros(n), np.zeros(()), np.zeros(n), unit)
        best = [a.best or none._replace(x=a.trial) for a in ascents]
        return BestPoints(
            Expansion(*map(np.stack, zip(*best, strict=True))),
            np.stack([a.effects_curvature if a.best else np.zeros((c, c)) for a in ascents]),
            np.array([a.best is not None for a in ascents]),
            np.array([a.at_mode for a in ascents]),
        )

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[BestPoints[Any], SearchState]:
        """Return first states and exchanges, as other parties know them.

        The server's state is a placeholder, of the shapes that the search ends with.
        """
        fm, (_, like), c = self.model, self.messages(), len(self.effects)
        no_reply = partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype), like)

        def init_server(key: Array) -> BestPoints[Any]:
            value, x, curvature = no_reply()
            unit = jnp.eye(x.shape[1]) if curvature.ndim == 3 else jnp.ones(x.shape[1])
            best = Expansion(x, value, x, jnp.broadcast_to(unit, curvature.shape))
            no = jnp.zeros(len(x), bool)
            return BestPoints(best, jnp.zeros((len(x), c, c)), no, no)

        def init_silo(key: Array, data: SiloData) -> SearchState:
            none = no_reply()
            z_L = jax.vmap(lambda _: Laplace(fm).start(data))(jnp.arange(len(none.value)))
            unknown = jnp.full_like(none.value, jnp.finfo(none.value.dtype).min)
            return SearchState(z_L, none, fm.init_private(key, data), unknown)

        def shared(state: BestPoints[Any]) -> Shared:
            theta, z_G = unravelled(fm, jnp.asarray(state.best.x)[best_start(state)])
            return Shared(theta, {"loc": z_G}, identity(z_G.shape))

        round_ = Round((self.exchange,))
        opening = tuple(Round((first,)) for first in self.opening_exchanges)
        return FederatedAlgorithm(init_server, init_silo, round_, shared, opening=opening)


class AscentPhase(Enum):
    """The phase of an ascent on its way to a mode.

    ``GOING_BACK``: It takes no more steps; one more exchange follows, at its best point.
    ``ENDED``: The last exchange was at its best point, and the modes that silos keep of their
        latents are those there; or it was given up.
    """

    CLIMBING = auto()
    GOING_BACK = auto()
    ENDED = auto()


@dataclass
class Ascent:
    """The search from one place, between two exchanges.

    ``trial`` (n,): The point to try next.
    ``best``: At the best point so far, or None before some point had finite numbers.
    ``effects_curvature`` (c, c): The silos' negative Hessian there, among the effects.
    ``idle, tried``: Accepted steps in a row that gained little, and points tried.
    ``phase``: Whether it still climbs.
    ``at_mode``: Whether its best point is a mode.
    """

    trial: np.ndarray
    best: Expansion[np.ndarray] | None = None
    effects_curvature: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    idle: int = 0
    tried: int = 0
    phase: AscentPhase = AscentPhase.CLIMBING
    at_mode: bool = False

    @property
    def height(self) -> float:
        """Return the log density at the best point, minus infinity where there is none."""
        return -math.inf if self.best is None else float(self.best.value)

    def halve(self, no_more_places: bool) -> None:
        """Go halfway back to zero from a start at which something is not finite."""
        if no_more_places or self.tried > MAX_HALVINGS or not self.trial.any():
            self.phase = AscentPhase.GOING_BACK
        else:
            self.trial = 0.5 * self.trial


def rounding_of(value: np.ndarray) -> float:
    """Return the nats within which another log density counts as equal to ``value``.

    One of size 1e5 is known to about 0.01 in single precision: without this allowance a search
    would reject steps at the mode, where gains are smaller than that.
    """
    return float(ROUNDING_UNITS * np.finfo(value.dtype).eps * abs(value))


class BestPoints(NamedTuple, Generic[AnyArray]):
    """The best points of searches from several starts.

    ``best`` Expansion, leaves (starts, ...): At the best point of each.
    ``effects_curvature`` (starts, c, c): The silos' negative Hessian there, among the effects.
    ``known`` (starts,) bool: Whether some point had finite numbers; without one ``best`` is a
        placeholder.
    ``at_mode`` (starts,) bool: Whether each ended at a mode.
    """

    best: Expansion[AnyArray]
    effects_curvature: AnyArray
    known: AnyArray
    at_mode: AnyArray


def best_start(state: BestPoints[Any]) -> Any:
    """Return the index () of the search whose best point is highest."""
    xp = namespace(state.known)
    return xp.argmax(xp.where(state.known, state.best.value, -xp.inf))


# Shared parameters and globals, up to which silos send Hessians, of 300 x 300 numbers at most. The
# same limit holds for full covariances of the globals.
SEARCHED_UP_TO = 300
MANY_EFFECTS = (
    f"above {SEARCHED_UP_TO} globals effects are not integrated out, and together with a scale "
    "that is a global, too, they have no mode"
)
# Nats for each coordinate that another Newton step may promise where a climb or a search has ended.
# A place half a nat off is one sd off, from where a run finds its way; farther off the curvature
# may be that of another region: a silo's parabola there says nothing about the sum's.
MAX_PROMISE_PER_DIM = 0.5
