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
Python, and so are the steps of a silo's own climb (:mod:`.own_start`); what depends on the text is
one compiled program, :class:`~.expand.Expand`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Round,
    Shared,
    asked_directly,
)
from numpyro_fed.algorithms.expand import (
    ASIDE,
    ROUNDING_UNITS,
    SIDE_BY_SIDE,
    Expand,
    Expansion,
    Prior,
    SiloState,
    Up,
    first_silo_state,
    flat_size,
    prior_draws,
    shape,
    unraveller,
)
from numpyro_fed.algorithms.saddles import kicked
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Curvature
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.trees import AnyArray, namespace

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
# to be told apart are three and more away (``results.mode.MODES_APART``).
MERGED = 1.5
# Exchanges after which a start that is still lower than a mode is given up. From zero, and without
# modes of silos' own, the six cities took sixteen; with Poisson counts a start took a hundred where
# another one had come to the mode after forty (docs/results/few_messages.md).
LATE = 20
MAX_HALVINGS = 30  # of a start at which some number is not finite: 2^-30 of it is zero in effect


class Search(NamedTuple, Generic[AnyArray]):
    """The best points of searches from several starts.

    Attributes
    ----------
    best : Expansion, leaves (starts, ...)
        At the best point of each.
    likelihood : (starts, c, c)
        The silos' negative Hessian there, among the effects.
    known : (starts,) bool
        Whether some point had finite numbers; without one ``best`` is a placeholder.
    rests : (starts,) bool
        Whether each ended at a mode.
    """

    best: Expansion[AnyArray]
    likelihood: AnyArray
    known: AnyArray
    rests: AnyArray


@dataclass
class Start:
    """The search from one place, between two exchanges.

    Attributes
    ----------
    trial : (n,)
        The point to try next.
    best : Expansion or None
        At the best point so far, or None before some point had finite numbers.
    likelihood : (c, c)
        The silos' negative Hessian there, among the effects.
    promise : float
        The gain, in nats, that is predicted for the trial.
    scale : (n,)
        The curvature by which each coordinate is scaled.
    metric : (n, n) or None
        The precision that silos' own modes tell of (:mod:`.own_start`), in which the first step is
        bounded; None where nothing is known, and once a step has led up.
    damping : float
    idle : int
        Accepted steps in a row without a gain.
    done : bool
        Whether the search has ended. Unless it rests at its last trial, one more exchange follows,
        at ``best``.
    rests : bool
        Whether it ended at a mode.
    left : bool
        Whether the last exchange was at ``best``: silos' own modes are then those there.
    tried : int
        Points tried.
    min_gain : float
        The predicted gain, in nats, below which a point is a mode.
    """

    trial: np.ndarray
    best: Expansion[np.ndarray] | None = None
    likelihood: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    promise: float = 1.0
    scale: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metric: np.ndarray | None = None
    damping: float = DAMPING
    idle: int = 0
    done: bool = False
    rests: bool = False
    left: bool = False
    tried: int = 0
    min_gain: float = MIN_GAIN

    @property
    def height(self) -> float:
        """Return the log density at the best point, minus infinity where there is none."""
        return -math.inf if self.best is None else float(self.best.value)

    def give_up(self) -> None:
        """End the search where it is."""
        self.done = self.left = True

    def take(
        self, point: Expansion[np.ndarray], of_effects: np.ndarray, max_places: int | None
    ) -> None:
        """Keep the trial if it is better than the best point, and choose the next one."""
        if self.done:
            self.left = True
            return
        self.tried += 1
        ended = max_places is not None and self.tried >= max_places
        better = self._accept(point, of_effects)
        if self.best is None:
            # From a start at which something is not finite, halfway back to zero.
            lost = self.tried > MAX_HALVINGS or not self.trial.any()
            self.done = lost or ended
            self.trial = self.trial if self.done else 0.5 * self.trial
            return
        step = _newton_step(self.best, self.scale, self.damping, self.metric)
        self.damping, self.promise = step.damping, step.promise
        # Where it rests the trial was the best point, and silos' modes are those there.
        self.rests = self.left = better and step.undamped_gain <= self.min_gain
        stuck = self.damping > MAX_DAMPING or self.idle >= MAX_IDLE
        self.done = self.rests or stuck or ended
        self.trial = self.best.x if self.done else self.best.x + step.move

    def _accept(self, point: Expansion[np.ndarray], of_effects: np.ndarray) -> bool:
        """Return whether the trial is better than the best point; it is the best one then."""
        finite = all(np.isfinite(a).all() for a in point[1:])
        if self.best is None:
            better = gained = finite
        else:
            # A log density of size 1e5 is known to about 0.01 in single precision. Without this
            # allowance a search would reject steps at the mode, where gains are smaller than that.
            value = self.best.value
            rounding = ROUNDING_UNITS * np.finfo(point.value.dtype).eps * abs(value)
            better = finite and point.value >= value - rounding
            gained = point.value > value + rounding
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
            curvature = np.abs(np.diagonal(point.curvature))
            shrunk = SCALE_DECAY * self.scale if self.best is not None else 0.0
            self.best, self.likelihood = point, of_effects
            self.scale = np.maximum(curvature, shrunk)
        return better


class _Step(NamedTuple):
    """A damped step (n,), its predicted gain, that of an undamped step, and the damping.

    The gain of the undamped step, infinite at a saddle, says whether the point is a mode.
    """

    move: np.ndarray
    promise: float
    undamped_gain: float
    damping: float


def _newton_step(
    best: Expansion[np.ndarray], scale: np.ndarray, damping: float, metric: np.ndarray | None
) -> _Step:
    """Return the step from the best point; it is damped until it is short enough in the metric."""
    curvature = Curvature.of(best.curvature, np.sqrt(np.where(scale > 0, scale, 1.0)))
    values, slope = curvature.values, curvature.along(best.gradient)
    flat = ROUNDING_UNITS * len(scale) * np.finfo(best.gradient.dtype).eps
    size = np.maximum(np.abs(values), flat)
    pull = kicked(curvature, best.gradient)
    for times in DAMPINGS if metric is not None else DAMPINGS[:1]:
        u = pull / (size + damping * times)
        move = curvature.across(u)
        if metric is None or np.sqrt(move @ metric @ move) <= LONGEST:
            break
    else:  # where none is short enough the least damped
        times = 1.0
        u = pull / (size + damping)
        move = curvature.across(u)
    promise = float(slope @ u - 0.5 * (values * u**2).sum())
    gain = 0.5 * (slope**2 / size).sum() if (values > -flat).all() else np.inf
    return _Step(move, promise, float(gain), damping * times)


def without_followers(starts: list[Start]) -> None:
    """End the starts that come to where a better one rests, or lag behind it.

    A start lags that is still lower :data:`LATE` exchanges after the best one has come to rest.
    """
    first = max((s for s in starts if s.rests), key=lambda start: start.height, default=None)
    if first is None or first.best is None:
        return
    for start in starts:
        if start.rests or start.height > first.height:
            continue
        late = start.tried > first.tried + LATE
        if late or (start.best is not None and _distance(start.best, first.best) <= MERGED):
            start.give_up()


def _distance(one: Expansion[np.ndarray], mode: Expansion[np.ndarray]) -> float:
    """Return the distance of a point from a mode, in sds by the curvature there."""
    away = one.x - mode.x
    return float(np.sqrt(np.maximum(away @ mode.curvature @ away, 0.0)))


@dataclass(frozen=True, eq=False)
class ModeSearch:
    """The search of silos and server for the mode.

    Attributes
    ----------
    model : FederatedModel
        Its parameters inside silo plates keep their first values.
    num_silos : int
    num_starts : int
        Searches side by side. The first starts from ``init_loc_fn``, or zero in unconstrained
        space; the others from draws of the prior, or standard normals where there are none.
    init_loc_fn : callable or None
    effects : (c,) int array
        The coordinates that are integrated out, by :func:`effects_of`.
    max_places : int or None
        The largest number of points to try. One more exchange follows, at the best of them.
    """

    model: FederatedModel
    num_silos: int
    num_starts: int
    init_loc_fn: Callable[..., Any] | None
    effects: np.ndarray
    max_places: int | None

    @cached_property
    def expand(self) -> Expand:
        """Return a silo's program."""
        return Expand(self.model)

    @cached_property
    def prior(self) -> Prior:
        """Return the server's program."""
        side_by_side = self.num_silos * self.num_starts
        return Prior(self.model, self.effects, min(side_by_side, SIDE_BY_SIDE))

    @cached_property
    def algorithm(self) -> FederatedAlgorithm[Any, SiloState]:
        """Return first states and exchanges, as other parties know them."""
        return search_algorithm(self.model, self.exchange, self._messages()[1], len(self.effects))

    @cached_property
    def prior_draws(self) -> np.ndarray | None:
        """Return draws (n, dim) of the prior, if it can be drawn from."""
        return prior_draws(self.model)

    def starts(self, key: Array, random: np.random.Generator) -> list[Start]:
        """Return the searches at their first places. The first one is close to the model's own."""
        draws = self.prior_draws if self.num_starts > 1 else None
        places = first_places(
            self.model, key, random, self.num_starts, self.init_loc_fn, ASIDE, draws
        )
        return [Start(place) for place in places]

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos expand their log likelihoods at the starts' points."""
        return Exchange("mode", self.reply, lenient=True, stacked=True, like=self._messages)

    def _messages(self) -> tuple[Any, Up[Any]]:
        k, n = self.num_starts, flat_size(self.model)
        return shape(k, n), Up(shape(k), shape(k, n), shape(k, n, n))

    def reply(
        self, noise: object, down: np.ndarray, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up[np.ndarray]], SiloState]:
        """Return the replies and states of a stack of silos, at places (starts, n).

        Where a silo's numbers are not finite the reply is NaN, and still ``ok``: the step fails,
        not the exchange.
        """
        size = len(state.top)
        everywhere = np.broadcast_to(down, (size, *down.shape))
        never = np.full(everywhere.shape[:2], -np.inf, down.dtype)
        up, modes = self.expand(everywhere, never, state, data)
        finite = np.isfinite(up.value)

        def kept(new: np.ndarray, old: Array) -> np.ndarray:
            return np.where(finite.reshape(*finite.shape, *[1] * (new.ndim - 2)), new, old)

        place = jax.tree.map(kept, up, state.place)
        return Reply(up, np.ones(size, bool)), state._replace(z_L=modes, place=place)

    @np.errstate(all="ignore")  # of points that are too far
    def run(
        self,
        ask: AskSilos,
        starts: list[Start],
        max_exchanges: int,
        shown: Callable[[float], None] = lambda value: None,
    ) -> Search[Any]:
        """Return where searches from some starts end, after so many exchanges at most.

        ``shown`` is told the highest log density after each exchange.
        """
        c, real = np.ix_(np.arange(len(starts)), self.effects, self.effects), jnp.result_type(float)
        for _ in range(max_exchanges):
            if all(start.left for start in starts):
                break
            places = np.stack([start.trial for start in starts]).astype(real)
            up = ask(self.exchange, places)
            # The prior's integral over the effects needs the silos' curvature at the same point,
            # so the server's part is computed after the replies.
            of_effects = up.curvature[c]
            prior = self.prior(of_effects, places)
            for i, start in enumerate(starts):
                total = (a[i] + b[i] for a, b in zip(prior[1:], up, strict=True))
                start.take(Expansion(places[i], *total), of_effects[i], self.max_places)
            without_followers(starts)
            shown(max(start.height for start in starts))
        return self.ended(starts)

    def ended(self, starts: list[Start]) -> Search[Any]:
        """Return what the starts have found."""
        n, c = flat_size(self.model), len(self.effects)
        none = Expansion(np.zeros(n), np.zeros(()), np.zeros(n), np.eye(n))
        best = [s.best or none._replace(x=s.trial) for s in starts]
        likelihood = [s.likelihood if s.best else np.zeros((c, c)) for s in starts]
        return Search(
            Expansion(*map(np.stack, zip(*best, strict=True))),
            np.stack(likelihood),
            np.array([s.best is not None for s in starts]),
            np.array([s.rests for s in starts]),
        )


def first_places(
    fm: FederatedModel,
    key: Array,
    random: np.random.Generator,
    num_starts: int,
    init_loc_fn: Callable[..., Any] | None,
    aside: float,
    draws: np.ndarray | None,
) -> np.ndarray:
    """Return the first points (num_starts, n): shared parameters and globals as one vector.

    The first of them is about ``aside`` from the model's own; the others are among ``draws`` of the
    prior, or standard normals.
    """
    real = jnp.result_type(float)
    theta = [np.ravel(a) for a in jax.tree.leaves(fm.init_theta(key))]
    flat_theta = np.concatenate([np.zeros(0), *theta])
    z_G = random.standard_normal((num_starts, fm.dim))
    if draws is not None:
        z_G = random.choice(draws, num_starts)
    own = init_loc_fn and fm.init_global(key, init_loc_fn)
    first = np.zeros(fm.dim) if own is None else np.asarray(own, float)
    least = np.maximum(aside, ROUNDING_UNITS * np.finfo(real).eps * np.abs(first))
    z_G[0] = first + least * random.standard_normal(fm.dim)
    jitter = random.standard_normal((num_starts, len(flat_theta)))
    jitter[0] = 0.0
    places: np.ndarray = np.concatenate([flat_theta + jitter, z_G], 1)
    return np.nan_to_num(places.astype(real))


def search_algorithm(
    fm: FederatedModel, exchange: Exchange[Any, Any, Any], like: Up[Any], num_effects: int
) -> FederatedAlgorithm[Any, SiloState]:
    """Return first states and exchange of a search, as other parties know them.

    ``like`` has the shapes of a reply. The server's state is a placeholder, of the shapes that the
    search ends with.
    """
    unravel, c = unraveller(fm), num_effects

    def no_reply() -> Up[Array]:
        zeros: Up[Array] = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        return zeros

    def init_server(key: Array) -> Search[Any]:
        value, x, curvature = no_reply()
        unit = jnp.eye(x.shape[1]) if curvature.ndim == 3 else jnp.ones(x.shape[1])
        best = Expansion(x, value, x, jnp.broadcast_to(unit, curvature.shape))
        no = jnp.zeros(len(x), bool)
        return Search(best, jnp.zeros((len(x), c, c)), no, no)

    def init_silo(key: Array, data: SiloData) -> SiloState:
        return first_silo_state(fm, key, data, no_reply())

    def shared(state: Search[Any]) -> Shared:
        theta, z_G = unravel(jnp.asarray(state.best.x)[best_start(state)])
        return Shared(theta, {"loc": z_G}, identity(z_G.shape))

    return FederatedAlgorithm(init_server, init_silo, Round((exchange,), asked_directly), shared)


def best_start(state: Search[Any]) -> Any:
    """Return the index () of the search whose best point is highest."""
    xp = namespace(state.known)
    return xp.argmax(xp.where(state.known, state.best.value, -xp.inf))
