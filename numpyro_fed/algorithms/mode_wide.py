r"""The mode of the joint density where the globals are many: L-BFGS over silos.

Each exchange the server sends a place; silo ``j`` answers with its log likelihood there, its own
latents integrated by Laplace's method, with the gradient and, where it is asked to look with_diagonal, the
diagonal :math:`d_j` of its negative Hessian. Steps are those of Optax's L-BFGS in the coordinates
that :math:`\sqrt{d}` scales, so that units do not matter; each is shortened until the density rises
by a share of what its slope promises (Armijo).

The diagonal is looked at where the search begins, after 8, 16, 32, ... steps, and at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import Ask, Exchange, FederatedAlgorithm, Info, Reply, Round
from numpyro_fed.algorithms.mode import (
    BATCH,
    MAX_HALVINGS,
    ROUNDING_UNITS,
    Aux,
    Expansion,
    SiloState,
    Up,
    best_start,
    first_silo_state,
    flat_size,
    reply_at,
    search_algorithm,
    starting_places,
    unraveller,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.trees import all_finite, where

LBFGS_PAIRS = 30  # pairs of L-BFGS
FIRST_REFRESH = 8  # steps after which the diagonal is looked at again; then 16, 32, ...
ARMIJO = 1e-4  # of what the slope promises is asked for
BACKTRACK = 0.25
MIN_SHARE = 1e-6  # share of a step
MAX_IDLE = 10  # such steps in a row
MIN_GAIN = 1e-3  # nats that a step gains, at most, at a mode


class Down(NamedTuple):
    """A place (n,) for each start, and whether to look at the diagonal there."""

    place: Array
    with_diagonal: Array


class WideState(NamedTuple):
    """The state of a search; see :class:`numpyro_fed.algorithms.mode.Search`.

    The next place is ``best.x + share * direction``, where the density rises by ``slope`` a unit
    of ``share``; ``best.curvature`` is the diagonal as it was seen last, ``memory`` that of L-BFGS
    in the coordinates that it scales; ``with_diagonal`` asks to see it at the next place.
    """

    best: Expansion
    known: Array
    trial: Array
    direction: Array
    slope: Array
    share: Array
    memory: optax.ScaleByLBFGSState
    with_diagonal: Array
    steps: Array
    idle: Array
    done: Array
    rests: Array
    left: Array
    tried: Array


def wide_mode(
    fm: FederatedModel,
    num_starts: int = 1,
    init_loc_fn: Callable[..., Any] | None = None,
    *,
    max_places: int | None = None,
) -> FederatedAlgorithm[Any, SiloState]:
    """Return the algorithm; arguments as for :func:`numpyro_fed.algorithms.mode.mode`."""
    search = WideSearch(fm, num_starts, init_loc_fn, max_places)
    round_ = Round((Exchange("mode", search.silo, lenient=True),), search.round)
    return search_algorithm(fm, search.init_server, search.init_silo, round_)


@dataclass(frozen=True, eq=False)
class WideSearch:
    """The parts of the algorithm; see :func:`wide_mode`."""

    model: FederatedModel
    number: int
    init_loc_fn: Callable[..., Any] | None
    most: int | None

    def init_server(self, key: Array) -> WideState:
        n = flat_size(self.model)

        def initial_search(x: Array) -> WideState:
            zero, none, no = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.array(False)
            at_start, zeros = Expansion(x, zero, jnp.zeros(n), jnp.ones(n)), jnp.zeros(n)
            one, yes, memory = jnp.ones(()), jnp.array(True), _lbfgs().init(x)
            return WideState(
                at_start, no, x, zeros, zero, one, memory, yes, none, none, no, no, no, none
            )

        return jax.vmap(initial_search)(
            starting_places(self.model, key, self.number, self.init_loc_fn)
        )

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        number, n = self.number, flat_size(self.model)
        no_reply = Up(jnp.zeros(number), jnp.zeros((number, n)), jnp.zeros((number, n)))
        return first_silo_state(self.model, key, data, no_reply)

    def silo(
        self, noise: object, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        derive = partial(with_slope, with_diagonal=down.with_diagonal)
        return reply_at(self.model, derive, down.place, state, data)

    def round(self, state: WideState, noise: object, ask: Ask) -> tuple[WideState, Info]:
        """Ask for the density at a place for each start, and choose the next one."""
        with_diagonal, unravel = state.with_diagonal.any(), unraveller(self.model)
        replies = ask("mode", Down(state.trial, with_diagonal))

        def log_prior(x: Array) -> tuple[Array, tuple[()]]:
            return self.model.smoothed.log_prior(*unravel(x)), ()

        def update_one(climb: WideState, up: Up) -> WideState:
            prior, _ = with_slope(log_prior, climb.trial, with_diagonal)
            total = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _accept_or_reject(climb, Expansion(climb.trial, *total), self.most)

        after = jax.vmap(update_one)(state, replies.up)
        return after, Info(-after.best.value[best_start(after)], jnp.array(True))


def with_slope(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, with_diagonal: Array
) -> tuple[Expansion, Aux]:
    """Return ``f(x) = (value, aux)`` at a place: with its gradient and, where one should look
    ``with_diagonal``, the diagonal of its negative Hessian; else zeros.
    """
    (value, aux), g = jax.value_and_grad(f, has_aux=True)(x)

    def diagonal() -> Array:
        _, column = jax.linearize(jax.grad(lambda x: f(x)[0]), x)

        def entry(i: Array) -> Array:
            return -column(jnp.zeros_like(x).at[i].set(1.0))[i]

        return jax.lax.map(entry, jnp.arange(len(x)), batch_size=min(BATCH, len(x)))

    return Expansion(
        x, value, g, jax.lax.cond(with_diagonal, diagonal, lambda: jnp.zeros_like(x))
    ), aux


def _lbfgs() -> optax.GradientTransformation:
    return optax.scale_by_lbfgs(LBFGS_PAIRS)


def _accept_or_reject(
    climb: WideState, trial_point: Expansion, max_places: int | None
) -> WideState:
    """Keep what was tried if it is better, and choose what to try next."""
    best, known, had_diagonal = climb.best, climb.known, climb.with_diagonal
    rounding = ROUNDING_UNITS * jnp.finfo(trial_point.value.dtype).eps * jnp.abs(best.value)
    finite = all_finite(trial_point[1:])
    armijo_bound = best.value + ARMIJO * climb.share * climb.slope - rounding
    better = finite & (~known | had_diagonal | (trial_point.value >= armijo_bound))
    at = where(better, trial_point, best)
    at = at._replace(
        curvature=jnp.where(finite & had_diagonal, trial_point.curvature, best.curvature)
    )
    stepped = better & known & ~had_diagonal
    gain = trial_point.value - best.value
    idle = jnp.where(
        stepped, jnp.where(gain <= jnp.maximum(MIN_GAIN, rounding), climb.idle + 1, 0), climb.idle
    )
    steps = climb.steps + stepped

    failed = known & ~better & (climb.share <= MIN_SHARE)
    unit = jnp.sqrt(nonzero(at.curvature))
    memory = where(had_diagonal | failed, _lbfgs().init(at.x), climb.memory)
    new_direction, slope, after = _lbfgs_direction(at, unit, memory)
    turn = better | failed
    direction, slope = where(turn, (new_direction, slope), (climb.direction, climb.slope))
    share = jnp.where(turn, 1.0, BACKTRACK * climb.share)

    stuck = failed & (climb.memory.count <= 1)
    lost = ~known & ~finite & ((climb.tried >= MAX_HALVINGS) | (climb.trial == 0).all())
    done = (idle >= MAX_IDLE) | stuck | lost
    if max_places is not None:
        done |= climb.tried + 1 >= max_places
    refresh = stepped & (steps >= FIRST_REFRESH) & (jnp.bitwise_count(steps) == 1)
    found = known | finite
    with_diagonal = ~found | done | refresh
    # From a start at which something is not finite, halfway back to zero.
    trial = jnp.where(found, at.x + share * direction, 0.5 * climb.trial)
    trial = jnp.where(found & with_diagonal, at.x, trial)
    memory = where(turn, after, memory)
    rests, no, tried = idle >= MAX_IDLE, climb.left, climb.tried + 1
    after = WideState(
        at,
        found,
        trial,
        direction,
        slope,
        share,
        memory,
        with_diagonal,
        steps,
        idle,
        done,
        rests,
        no,
        tried,
    )
    curvature = jnp.where(finite, trial_point.curvature, best.curvature)
    left = climb._replace(best=best._replace(curvature=curvature), left=jnp.array(True))
    return where(climb.done, where(climb.left, climb, left), after)


def _lbfgs_direction(
    at: Expansion, unit: Array, memory: optax.ScaleByLBFGSState
) -> tuple[Array, Array, optax.OptState]:
    """Return the direction to go on in, the slope along it, and L-BFGS's memory after it."""
    downhill, after = _lbfgs().update(-at.gradient / unit, memory, at.x * unit)
    direction = -downhill / unit
    gradient_step = at.gradient / unit
    gradient_step = gradient_step / jnp.maximum(jnp.linalg.norm(gradient_step), 1.0) / unit
    uphill = all_finite(direction) & (at.gradient @ direction > 0)
    direction = jnp.where(uphill, direction, gradient_step)
    return direction, at.gradient @ direction, after


def nonzero(diagonal: Array) -> Array:
    """Return curvatures of coordinates, none of them zero."""
    size = jnp.abs(diagonal)
    return jnp.where(size > 0, size, 1.0)
