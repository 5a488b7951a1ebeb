r"""The search for the mode of the joint density, by a damped Newton method over silos.

In each exchange the server sends a point ``z_G``. Silo ``j`` integrates its own latents by
quadrature or Laplace's method, and replies with its log likelihood at the point, the gradient and
the Hessian. The sum of the replies and of the server's log prior make

.. math::
    \ell(z_G) = \log p(z_G) + \sum_j \log p(y_j \mid z_G), \qquad A = -\nabla^2 \ell .

The next point is :math:`z_G + D^{-1/2} V (|\Lambda| + \lambda)^{-1} V' D^{-1/2} \nabla \ell` with
:math:`D^{-1/2} A D^{-1/2} = V \Lambda V'`. :math:`D` holds the curvature of each coordinate, and
may shrink by a factor of ten in a step; with it the units of coordinates do not matter (Levenberg
1944; Marquardt 1963). Absolute eigenvalues lead away from saddles (Dauphin et al. 2014). The
damping :math:`\lambda` shrinks after steps whose gain is as predicted, and grows after others.

Effects and their scale together (``b ~ Normal(mu, tau)``, ``tau ~ HalfNormal(5)``) have no mode:
the density rises without bound as ``tau`` goes to zero. So global latents whose prior depends on
other globals are integrated out as well, at the server, with the silos' Hessian held fixed
(:func:`prior_of`). Their coordinates in ``z_G`` hold their mode given the others.

Several starts run side by side, one point of each in every message. The server's part is plain
Python, and so are the steps of a silo's own climb (:mod:`.own_modes`); what depends on the text is
one compiled program, :class:`~.expand.Expand`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.trees import AnyArray, namespace
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.numerics.gaussian import Curvature, identity
from numpyro_fed.rounds.exchange import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Round,
    Shared,
    StackedExchange,
)
from numpyro_fed.search.expand import (
    ASIDE,
    ROUNDING_UNITS,
    SIDE_BY_SIDE,
    Expand,
    Expansion,
    Prior,
    SiloExpansion,
    SiloState,
    flat_size,
    prior_draws,
    shape,
    unraveller,
)
from numpyro_fed.text.log_density import FederatedModel

# The least length of a step along a direction in which the density curves upwards, in sds as if it
# curved downwards as much: from a symmetric point, as equal means of two clusters, a gradient alone
# leads away too slowly. It gains 4 nats, which rounding of a log density of 10^6 does not hide.
KICK = 3.0
LEAST_PROMISE = 1.0  # nats by the gradient alone, below which a point may be a saddle
UPWARDS = 0.1  # of a coordinate's curvature: in a valley along which little changes signs are noise


def kicked(curvature: Curvature[np.ndarray], gradient: np.ndarray) -> np.ndarray:
    """Return the slopes (..., n) along eigenvectors, lengthened at a saddle in upward directions.

    It is a saddle where the gradient (..., n) alone promises less than :data:`LEAST_PROMISE`, and
    directions are upward along which the density clearly curves upwards.
    """
    values, slope = curvature.values, curvature.along(gradient)
    size = np.maximum(np.abs(values), UPWARDS)
    at_rest = 0.5 * (slope**2 / size).sum(-1, keepdims=True) < LEAST_PROMISE
    least = np.where((values < -UPWARDS) & at_rest, KICK * np.sqrt(np.abs(values)), 0.0)
    # The sign of a slope near zero is rounding's. That of a fixed vector is the same at all silos.
    fixed = (1.0 + np.arange(values.shape[-1])) @ curvature.vectors
    side = np.where(np.abs(slope) < least, fixed, slope)
    return np.where(side < 0, -1.0, 1.0) * np.maximum(np.abs(slope), least)


DAMPING = 1e-2  # at the start, for curvatures scaled to one: almost a full Newton step
# Least factor by which a coordinate's scale may change in a step. Without any decay the search took
# 86 exchanges on posteriordb's mesquite, whose curvature at the start is 1e5 times that at the mode
# (docs/results/raw_data.md); with no bound, one step into a flat region would make all units equal.
SCALE_DECAY = 0.1
# Standard deviations, by silos' own modes, that the first step from their sum may be long, and the
# factors of the damping that are tried for it. A scale of effects has little curvature where the
# silos' modes put it, and a full step from there would lead far away, four times in a row.
LONGEST = 2.0
DAMPINGS = np.sqrt(10.0) ** np.arange(25)
MIN_DAMPING = 1e-30  # a damping of zero could never grow again by a factor
MAX_DAMPING = 1e8  # steps are 1e-8 of a unit: rounding decides whether they gain
MIN_GAIN = 1e-4  # predicted gain of an undamped step, in nats, below which a point is a mode
# The same near modes of other data, where every exchange counts. Such a point is a third of an sd
# off, which draws that are weighed do not notice.
MIN_GAIN_NEAR = 0.05
MAX_IDLE = 5  # accepted steps in a row without a gain beyond rounding, after which a search ends
# Standard deviations from a mode at which another start counts as come there, too; modes that are
# to be told apart are three and more away (``search.mode.MODES_APART``).
MERGED = 1.5
# Exchanges after which a start that is still lower than a mode is given up. From zero, and without
# modes of silos' own, the six cities took sixteen; with Poisson counts a start took a hundred where
# another one had come to the mode after forty (docs/results/few_messages.md).
LATE = 20
MAX_HALVINGS = 30  # of a start at which some number is not finite: 2^-30 of it is zero in effect

AStart = TypeVar("AStart", bound="AnyStart")


class Search(NamedTuple, Generic[AnyArray]):
    """The best points of searches from several starts.

    ``best`` Expansion, leaves (starts, ...): At the best point of each.
    ``likelihood`` (starts, c, c): The silos' negative Hessian there, among the effects.
    ``known`` (starts,) bool: Whether some point had finite numbers; without one ``best`` is a
        placeholder.
    ``rests`` (starts,) bool: Whether each ended at a mode.
    """

    best: Expansion[AnyArray]
    likelihood: AnyArray
    known: AnyArray
    rests: AnyArray


@dataclass
class AnyStart:
    """The search from one place, between two exchanges, of either kind.

    ``trial`` (n,): The point to try next.
    ``best``: At the best point so far, or None before some point had finite numbers.
    ``likelihood`` (c, c): The silos' negative Hessian there, among the effects.
    ``idle, tried``: Accepted steps in a row that gained little, and points tried.
    ``done``: Whether the search has ended. Unless it rests at its last trial, one more exchange
        follows, at ``best``.
    ``rests``: Whether it ended at a mode.
    ``left``: Whether the last exchange was at ``best``: silos' own modes are then those there.
    """

    trial: np.ndarray
    best: Expansion[np.ndarray] | None = None
    likelihood: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    idle: int = 0
    tried: int = 0
    done: bool = False
    rests: bool = False
    left: bool = False

    @property
    def height(self) -> float:
        """Return the log density at the best point, minus infinity where there is none."""
        return -math.inf if self.best is None else float(self.best.value)

    def halve(self, ended: bool) -> None:
        """Go halfway back to zero from a start at which something is not finite."""
        self.done = ended or self.tried > MAX_HALVINGS or not self.trial.any()
        self.trial = self.trial if self.done else 0.5 * self.trial


def rounding_of(value: np.ndarray) -> float:
    """Return the nats within which another log density counts as equal to ``value``.

    One of size 1e5 is known to about 0.01 in single precision: without this allowance a search
    would reject steps at the mode, where gains are smaller than that.
    """
    return float(ROUNDING_UNITS * np.finfo(value.dtype).eps * abs(value))


@dataclass
class Start(AnyStart):
    """The search from one place by Newton's method.

    ``promise``: The gain, in nats, that is predicted for the trial.
    ``scale`` (n,): The curvature by which each coordinate is scaled.
    ``metric`` (n, n) or None: The precision that silos' own modes tell of (:mod:`.own_modes`), in
        which the first step is bounded; None where nothing is known, and once a step has led up.
    ``min_gain``: The predicted gain, in nats, below which a point is a mode.
    """

    promise: float = 1.0
    scale: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metric: np.ndarray | None = None
    damping: float = DAMPING
    min_gain: float = MIN_GAIN

    def take(
        self, point: Expansion[np.ndarray], of_effects: np.ndarray, max_places: int | None
    ) -> None:
        """Keep the trial if it is better than the best point, and choose the next one."""
        if self.done:
            self.left = True
            return
        self.tried += 1
        ended = max_places is not None and self.tried >= max_places
        finite = all(np.isfinite(a).all() for a in point[1:])
        if self.best is None:
            better = gained = finite
        else:
            value, rounding = self.best.value, rounding_of(self.best.value)
            better = bool(finite and point.value >= value - rounding)
            gained = bool(point.value > value + rounding)
            # The usual rule of trust regions: ratios of actual to predicted gain of 1/4 and 3/4.
            ratio = (point.value - value + rounding) / self.promise
            if not better:
                self.damping *= 10
            elif ratio > 0.75 and self.metric is not None:
                # The bound on the first step has raised the damping; now it can go.
                self.damping, self.metric = DAMPING, None
            elif ratio > 0.75:
                self.damping /= 10
            elif ratio < 0.25:
                self.damping *= 4
        self.damping = max(self.damping, MIN_DAMPING)
        if better:
            self.idle = 0 if gained else self.idle + 1
            diagonal = np.abs(np.diagonal(point.curvature))
            shrunk = SCALE_DECAY * self.scale if self.best is not None else 0.0
            self.best, self.likelihood = point, of_effects
            self.scale = np.maximum(diagonal, shrunk)
        if self.best is None:
            self.halve(ended)
            return
        best, scale = self.best, self.scale
        curvature = Curvature.of(best.curvature, np.sqrt(np.where(scale > 0, scale, 1.0)))
        values, slope = curvature.values, curvature.along(best.gradient)
        flat = ROUNDING_UNITS * len(scale) * np.finfo(best.gradient.dtype).eps
        size = np.maximum(np.abs(values), flat)
        pull = kicked(curvature, best.gradient)
        # Damped until it is short enough in the metric; where none is, the least damped.
        for times in (*DAMPINGS, 1.0) if self.metric is not None else DAMPINGS[:1]:
            u = pull / (size + self.damping * times)
            move = curvature.across(u)
            if self.metric is None or np.sqrt(move @ self.metric @ move) <= LONGEST:
                break
        self.damping = self.damping * times
        self.promise = float(slope @ u - 0.5 * (values * u**2).sum())
        # The gain of an undamped step, infinite at a saddle, says whether the point is a mode.
        gain = float(0.5 * (slope**2 / size).sum()) if (values > -flat).all() else np.inf
        # Where it rests the trial was the best point, and silos' modes are those there.
        self.rests = self.left = better and gain <= self.min_gain
        stuck = self.damping > MAX_DAMPING or self.idle >= MAX_IDLE
        self.done = self.rests or stuck or ended
        self.trial = best.x if self.done else best.x + move


def without_followers(starts: list[Start]) -> None:
    """End the starts that come to where a better one rests, or lag behind it."""
    first = max((s for s in starts if s.rests), key=lambda start: start.height, default=None)
    if first is None or first.best is None:
        return
    for start in starts:
        if start.rests or start.height > first.height:
            continue
        follows = start.tried > first.tried + LATE
        if start.best is not None:
            away = start.best.x - first.best.x  # in sds by the curvature at the mode
            apart = np.sqrt(np.maximum(away @ first.best.curvature @ away, 0.0))
            follows = follows or apart <= MERGED
        if follows:
            start.done = start.left = True


@dataclass(frozen=True, eq=False)
class AnySearch(ABC, Generic[AStart]):
    """The search of silos and server for the mode, of either kind.

    ``model``: Its parameters inside silo plates keep their first values.
    ``num_starts``: Searches side by side. The first starts from ``init_loc_fn``, or zero in
        unconstrained space; the others from draws of the prior, or standard normals where there are
        none.
    ``effects`` (c,) int array: The coordinates that are integrated out, by :func:`effects_of`.
    ``max_places``: The largest number of points to try. One more exchange follows, at the best of
        them.
    """

    model: FederatedModel
    num_silos: int
    num_starts: int
    init_loc_fn: Callable[..., Any] | None
    effects: np.ndarray
    max_places: int | None
    aside: ClassVar[float]  # the distance of the first start from the model's own
    start: ClassVar[Any]  # the class of the searches from one place

    @cached_property
    def prior_draws(self) -> np.ndarray | None:
        """Return draws (n, dim) of the prior, if it can be drawn from."""
        return prior_draws(self.model)

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos expand their log likelihoods at the starts' points."""
        return StackedExchange("mode", self.reply, lenient=True, messages=self.messages)

    @abstractmethod
    def messages(self) -> tuple[Any, SiloExpansion[Any]]:
        """Return the shapes of the messages."""

    @abstractmethod
    def reply(
        self, noise: object, down: Any, state: SiloState, data: SiloData
    ) -> tuple[Reply[SiloExpansion[np.ndarray]], SiloState]:
        """Return the replies and states of a stack of silos.

        Where a silo's numbers are not finite the reply is NaN, and still ``ok``: the step fails,
        not the exchange.
        """

    @abstractmethod
    def move(self, ask: AskSilos, starts: list[AStart], places: np.ndarray) -> None:
        """Let each of the starts take its place (starts, n), in one exchange."""

    def starts(self, key: Array, random: np.random.Generator) -> list[AStart]:
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
        return [self.start(place) for place in places]

    @np.errstate(all="ignore")  # of points that are too far
    def run(
        self,
        ask: AskSilos,
        starts: list[AStart],
        max_exchanges: int,
        shown: Callable[[float], None] = lambda value: None,
    ) -> Search[Any]:
        """Return where searches from some starts end, after so many exchanges at most."""
        for _ in range(max_exchanges):
            if all(start.left for start in starts):
                break
            places = np.stack([start.trial for start in starts])
            self.move(ask, starts, places.astype(jnp.result_type(float)))
            shown(max(start.height for start in starts))
        (_, like), n, c = self.messages(), flat_size(self.model), len(self.effects)
        unit = np.eye(n) if like.curvature.ndim == 3 else np.ones(n)
        none = Expansion(np.zeros(n), np.zeros(()), np.zeros(n), unit)
        best = [s.best or none._replace(x=s.trial) for s in starts]
        return Search(
            Expansion(*map(np.stack, zip(*best, strict=True))),
            np.stack([s.likelihood if s.best else np.zeros((c, c)) for s in starts]),
            np.array([s.best is not None for s in starts]),
            np.array([s.rests for s in starts]),
        )

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[Search[Any], SiloState]:
        """Return first states and exchanges, as other parties know them.

        The server's state is a placeholder, of the shapes that the search ends with.
        """
        fm, (_, like), c = self.model, self.messages(), len(self.effects)
        unravel = unraveller(fm)

        def no_reply() -> SiloExpansion[Array]:
            zeros: SiloExpansion[Array] = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
            return zeros

        def init_server(key: Array) -> Search[Any]:
            value, x, curvature = no_reply()
            unit = jnp.eye(x.shape[1]) if curvature.ndim == 3 else jnp.ones(x.shape[1])
            best = Expansion(x, value, x, jnp.broadcast_to(unit, curvature.shape))
            no = jnp.zeros(len(x), bool)
            return Search(best, jnp.zeros((len(x), c, c)), no, no)

        def init_silo(key: Array, data: SiloData) -> SiloState:
            none = no_reply()
            z_L = jax.vmap(lambda _: Laplace(fm).start(data))(jnp.arange(len(none.value)))
            unknown = jnp.full_like(none.value, jnp.finfo(none.value.dtype).min)
            return SiloState(z_L, none, fm.init_private(key, data), unknown)

        def shared(state: Search[Any]) -> Shared:
            theta, z_G = unravel(jnp.asarray(state.best.x)[best_start(state)])
            return Shared(theta, {"loc": z_G}, identity(z_G.shape))

        round_ = Round((self.exchange,))
        return FederatedAlgorithm(init_server, init_silo, round_, shared)


@dataclass(frozen=True, eq=False)
class ModeSearch(AnySearch[Start]):
    """The search by Newton's method."""

    aside = ASIDE
    start = Start

    @cached_property
    def expand(self) -> Expand:
        """Return a silo's program."""
        return Expand(self.model)

    @cached_property
    def prior(self) -> Prior:
        """Return the server's program."""
        side_by_side = self.num_silos * self.num_starts
        return Prior(self.model, self.effects, min(side_by_side, SIDE_BY_SIDE))

    def messages(self) -> tuple[Any, SiloExpansion[Any]]:
        k, n = self.num_starts, flat_size(self.model)
        return shape(k, n), SiloExpansion(shape(k), shape(k, n), shape(k, n, n))

    def reply(
        self, noise: object, down: np.ndarray, state: SiloState, data: SiloData
    ) -> tuple[Reply[SiloExpansion[np.ndarray]], SiloState]:
        size = len(state.top)
        everywhere = np.broadcast_to(down, (size, *down.shape))
        never = np.full(everywhere.shape[:2], -np.inf, down.dtype)
        up, modes = self.expand(everywhere, never, state, data)
        finite = np.isfinite(up.value)

        def kept(new: np.ndarray, old: Array) -> np.ndarray:
            return np.where(finite.reshape(*finite.shape, *[1] * (new.ndim - 2)), new, old)

        place = jax.tree.map(kept, up, state.place)
        return Reply(up, np.ones(size, bool)), state._replace(z_L=modes, place=place)

    def move(self, ask: AskSilos, starts: list[Start], places: np.ndarray) -> None:
        up = ask(self.exchange, places)
        # The prior's integral over the effects needs the silos' curvature at the same point, so
        # the server's part is computed after the replies.
        of_effects = up.curvature[np.ix_(np.arange(len(starts)), self.effects, self.effects)]
        prior = self.prior(of_effects, places)
        for i, start in enumerate(starts):
            total = (a[i] + b[i] for a, b in zip(prior[1:], up, strict=True))
            start.take(Expansion(places[i], *total), of_effects[i], self.max_places)
        without_followers(starts)


def best_start(state: Search[Any]) -> Any:
    """Return the index () of the search whose best point is highest."""
    xp = namespace(state.known)
    return xp.argmax(xp.where(state.known, state.best.value, -xp.inf))
