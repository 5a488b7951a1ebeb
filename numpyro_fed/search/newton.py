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
(:func:`.expand.log_prior_of`). Their coordinates in ``z_G`` hold their mode given the others.

Several starts run side by side, one point of each in every message. The server's part is plain
Python, and so are the steps of a silo's own climb (:mod:`.own_modes`); what depends on the text is
one compiled program, :class:`~.expand.Expand`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.rounds.exchange import AskSilos, Exchange, Reply
from numpyro_fed.rounds.names import OWN_MODES
from numpyro_fed.rounds.stacks import StackedExchange
from numpyro_fed.search.expand import (
    ASIDE,
    ROUNDING_UNITS,
    SIDE_BY_SIDE,
    Expand,
    Expansion,
    Prior,
    SearchState,
    SiloExpansion,
    effects_of,
    flat_size,
    shape,
)
from numpyro_fed.search.mode_search import Ascent, AscentPhase, ModeSearch, rounding_of
from numpyro_fed.search.own_modes import (
    DAMPING,
    MAX_DAMPING,
    MIN_EIGENVALUE,
    AtOwnModes,
    climb_to_own_modes,
    slopes_off_saddles,
    where_at,
)

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
MIN_SHARE = 0.5  # of the silos that came to a mode from the best start, for another start to go on


@dataclass
class NewtonAscent(Ascent):
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

    def advance(
        self, point: Expansion[np.ndarray], of_effects: np.ndarray, max_places: int | None
    ) -> None:
        """Keep the trial if it is better than the best point, and choose the next one."""
        if self.phase is not AscentPhase.CLIMBING:
            self.phase = AscentPhase.ENDED
            return
        self.tried += 1
        no_more_places = max_places is not None and self.tried >= max_places
        better = self._keep_if_better(point, of_effects)
        if self.best is None:
            self.halve(no_more_places)
            return
        best = self.best
        unit = np.sqrt(np.where(self.scale > 0, self.scale, 1.0))
        curvature = Curvature.of(best.curvature, unit)
        values, slope = curvature.values, curvature.along(best.gradient)
        flat = ROUNDING_UNITS * len(unit) * np.finfo(best.gradient.dtype).eps
        size = np.maximum(np.abs(values), flat)
        pull = slopes_off_saddles(curvature, best.gradient)
        # Damped until it is short enough in the metric; where none is, the least damped.
        for times in (*DAMPINGS, 1.0) if self.metric is not None else DAMPINGS[:1]:
            along = pull / (size + self.damping * times)
            move = curvature.across(along)
            if self.metric is None or np.sqrt(move @ self.metric @ move) <= LONGEST:
                break
        self.damping *= times
        self.promise = float(slope @ along - 0.5 * (values * along**2).sum())
        # What an undamped step would gain, in nats; at a saddle there is no mode.
        at_peak = (values > -flat).all()
        gain = float(0.5 * (slope**2 / size).sum()) if at_peak else np.inf
        self.at_mode = better and gain <= self.min_gain
        stuck = self.damping > MAX_DAMPING or self.idle >= MAX_IDLE
        if self.at_mode:  # the trial was the best point, and silos' modes are those there
            self.phase = AscentPhase.ENDED
        elif stuck or no_more_places:
            self.phase = AscentPhase.GOING_BACK
        self.trial = best.x + move if self.phase is AscentPhase.CLIMBING else best.x

    def _keep_if_better(self, point: Expansion[np.ndarray], of_effects: np.ndarray) -> bool:
        """Keep the point if it is better than the best one, adapt the damping; return whether."""
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
            self.best, self.effects_curvature = point, of_effects
            self.scale = np.maximum(diagonal, shrunk)
        return better


@dataclass(frozen=True, eq=False)
class NewtonSearch(ModeSearch[NewtonAscent, np.ndarray]):
    """The search by Newton's method, which begins at the sum of silos' own modes."""

    aside = ASIDE
    ascent = NewtonAscent

    @cached_property
    def effects(self) -> np.ndarray:
        return effects_of(self.model)

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
    def opening_exchanges(self) -> tuple[Exchange[Any, Any, Any], ...]:
        """Return the exchange in which silos tell the parabolas at their own modes."""
        # Effects and their scale together have no mode that a silo could climb to.
        if len(self.effects):
            return ()
        k, n = self.num_starts, flat_size(self.model)
        return (
            StackedExchange(
                OWN_MODES,
                self.answer_own_modes,
                messages=lambda: (shape(k, n), AtOwnModes(shape(k, n, n), shape(k, n), shape(k))),
            ),
        )

    @np.errstate(all="ignore")
    def answer_own_modes(
        self, noise: object, down: np.ndarray, state: SearchState, data: SiloData
    ) -> tuple[Reply[AtOwnModes], SearchState]:
        """Return the replies and states of a stack of silos, from places (starts, n)."""
        size = len(state.top)
        places = np.broadcast_to(down, (size, *down.shape))
        prior_share = 1 / self.num_silos
        told, log_likelihood, modes = climb_to_own_modes(
            self.expand, self.prior, prior_share, places, state, data
        )
        # A silo that came to no mode says nothing, and the others decide: where nothing is finite,
        # or a likelihood has kinks and so no curvature but the prior's.
        arrived = told.arrived > 0
        known = arrived & np.isfinite(log_likelihood)
        z_L = {p: where_at(arrived, new, state.z_L[p]) for p, new in modes.items()}
        tops = np.where(known, log_likelihood, state.top).astype(down.dtype)
        return Reply(told, np.ones(size, bool)), state._replace(z_L=z_L, top=tops)

    @np.errstate(all="ignore")
    def begin_at_own_modes(
        self, ask: AskSilos, ascents: list[NewtonAscent], places: np.ndarray | None = None
    ) -> None:
        """Let all ascents begin at the highest point of the sum of the silos' parabolas.

        One whose sum is not finite stays where it is. Those from where only few silos came to a
        mode are given up, if others led somewhere. If there are ``places`` (k, n), modes of nearly
        the same data, half of the ascents begin there.
        """
        for exchange in self.opening_exchanges:
            total = ask(exchange, np.stack([ascent.trial for ascent in ascents]))
            for i, ascent in enumerate(ascents):
                curvature = Curvature.of(total.A[i]).positive(MIN_EIGENVALUE)
                x = curvature.solve(total.b[i])
                if total.arrived[i] > 0 and np.isfinite(x).all():
                    ascent.trial, ascent.metric = x, curvature.matrix()
                if total.arrived[i] < MIN_SHARE * total.arrived.max():
                    ascent.phase = AscentPhase.ENDED
        if places is None:
            return
        for ascent in ascents:
            ascent.min_gain = MIN_GAIN_NEAR
        # The other half begins where it did: other data may have modes where there were none.
        for ascent, place in zip(ascents[: -(-len(ascents) // 2)], places, strict=False):
            ascent.trial, ascent.metric = np.asarray(place, ascent.trial.dtype), None
            ascent.phase = AscentPhase.CLIMBING

    def messages(self) -> tuple[Any, SiloExpansion[Any]]:
        k, n = self.num_starts, flat_size(self.model)
        return shape(k, n), SiloExpansion(shape(k), shape(k, n), shape(k, n, n))

    def answer_mode(
        self, noise: object, down: np.ndarray, state: SearchState, data: SiloData
    ) -> tuple[Reply[SiloExpansion[np.ndarray]], SearchState]:
        size = len(state.top)
        everywhere = np.broadcast_to(down, (size, *down.shape))
        never = np.full(everywhere.shape[:2], -np.inf, down.dtype)
        up, modes = self.expand(everywhere, never, state, data)
        place = jax.tree.map(partial(where_at, np.isfinite(up.value)), up, state.place)
        return Reply(up, np.ones(size, bool)), state._replace(z_L=modes, place=place)

    def ask_and_advance(
        self, ask: AskSilos, ascents: list[NewtonAscent], places: np.ndarray
    ) -> None:
        up = ask(self.exchange, places)
        # The prior's integral over the effects needs the silos' curvature at the same point, so
        # the server's part is computed after the replies.
        of_effects = up.curvature[np.ix_(np.arange(len(ascents)), self.effects, self.effects)]
        prior = self.prior(of_effects, places)
        for i, ascent in enumerate(ascents):
            total = (a[i] + b[i] for a, b in zip(prior[1:], up, strict=True))
            ascent.advance(Expansion(places[i], *total), of_effects[i], self.max_places)
        stop_followers(ascents)


def stop_followers(ascents: list[NewtonAscent]) -> None:
    """Stop the ascents that come to where a better one is at a mode, or lag behind it."""
    first = max((a for a in ascents if a.at_mode), key=lambda a: a.height, default=None)
    if first is None or first.best is None:
        return
    for ascent in ascents:
        if ascent.at_mode or ascent.height > first.height:
            continue
        follows = ascent.tried > first.tried + LATE
        if ascent.best is not None:
            away = ascent.best.x - first.best.x  # in sds by the curvature at the mode
            apart = np.sqrt(np.maximum(away @ first.best.curvature @ away, 0.0))
            follows = follows or apart <= MERGED
        if follows:
            ascent.phase = AscentPhase.ENDED
