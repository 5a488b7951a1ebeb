r"""The search for the mode of the joint density where the globals are many: L-BFGS over silos.

In each exchange the server sends a point. Silo ``j`` integrates its own latents by Laplace's
method, and replies with its log likelihood at the point, the gradient and, if asked, the diagonal
:math:`d_j` of its negative Hessian. Steps are those of Optax's L-BFGS in coordinates scaled by
:math:`\sqrt{d}`, so that units do not matter. A step is shortened until the density rises by a
share of what its slope predicts (Armijo's rule).

Silos compute the diagonal at the first point, after 8, 16, 32, ... steps, and at the end.
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
from numpyro_fed.algorithms.expand import (
    BATCH,
    NUDGE,
    ROUNDING_UNITS,
    Aux,
    Expansion,
    SiloState,
    Up,
    first_silo_state,
    flat_size,
    sequential_map,
    unraveller,
)
from numpyro_fed.algorithms.mode import MAX_HALVINGS, best_start, search_algorithm
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.trees import all_finite, where

# Pairs that L-BFGS keeps. An exchange with silos costs far more than the products with the pairs,
# so more than the usual ten; each takes the memory of two vectors of globals at the server.
LBFGS_PAIRS = 30
# Steps after which the diagonal is computed again; then after 16, 32, ... It costs as much as
# ``n`` gradients and empties L-BFGS's memory, so the gaps double.
FIRST_REFRESH = 8
ARMIJO = 1e-4  # share of the predicted gain that a step must reach: Nocedal and Wright's value
BACKTRACK = (
    0.25  # factor of a step that failed; each try is an exchange, so shorter than the usual half
)
MIN_SHARE = 1e-6  # of a step: below it the direction is given up
MAX_IDLE = 10  # steps in a row that gain little, after which the search has arrived
MIN_GAIN = 1e-3  # nats: a step that gains less counts as one of these


class Down(NamedTuple):
    """A message of the server: a point (n,) for each start, and whether to send the diagonal."""

    place: Array
    with_diagonal: Array


class WideState(NamedTuple):
    """The server's state of a search; fields as in :class:`numpyro_fed.algorithms.mode.Search`.

    The next point is ``best.x + share * direction``; ``slope`` is the derivative of the density
    with respect to ``share``. ``best.curvature`` (n,) is the latest diagonal, and ``memory`` the
    state of L-BFGS in the coordinates that it scales. ``with_diagonal`` says whether silos compute
    the diagonal at the next point.
    """

    best: Expansion[Array]
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
    return search_algorithm(
        fm, search.init_server, search.init_silo, round_, lambda state: state.left.all()
    )


@dataclass(frozen=True, eq=False)
class WideSearch:
    """The functions of the algorithm; see :func:`wide_mode`."""

    model: FederatedModel
    number: int
    init_loc_fn: Callable[..., Any] | None
    most: int | None

    def init_server(self, key: Array) -> WideState:
        n = flat_size(self.model)

        def initial_search(x: Array) -> WideState:
            zero, none, no = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.array(False)
            at_start, zeros = Expansion(x, zero, jnp.zeros(n), jnp.ones(n)), jnp.zeros(n)
            full_step, yes, memory = jnp.ones(()), jnp.array(True), _lbfgs().init(x)
            return WideState(
                at_start, no, x, zeros, zero, full_step, memory, yes, none, none, no, no, no, none
            )

        return jax.vmap(initial_search)(
            starting_places(self.model, key, self.number, self.init_loc_fn, NUDGE)
        )

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        number, n = self.number, flat_size(self.model)
        no_reply = Up(jnp.zeros(number), jnp.zeros((number, n)), jnp.zeros((number, n)))
        return first_silo_state(self.model, key, data, no_reply)

    def silo(
        self, noise: object, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up[Array]], SiloState]:
        derive = partial(with_slope, with_diagonal=down.with_diagonal)
        return reply_at(self.model, derive, down.place, state, data)

    def round(self, state: WideState, noise: object, ask: Ask) -> tuple[WideState, Info]:
        """Ask for the density at the point of each start, and choose the next points."""
        with_diagonal, unravel = state.with_diagonal.any(), unraveller(self.model)
        replies = ask("mode", Down(state.trial, with_diagonal))

        def log_prior(x: Array) -> tuple[Array, tuple[()]]:
            return self.model.smoothed.log_prior(*unravel(x)), ()

        def update_one(climb: WideState, up: Up[Array]) -> WideState:
            prior, _ = with_slope(log_prior, climb.trial, with_diagonal)
            total = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _accept_or_reject(climb, Expansion(climb.trial, *total), self.most)

        after = jax.vmap(update_one)(state, replies.up)
        return after, Info(-after.best.value[best_start(after)], jnp.array(True))


def starting_places(
    fm: FederatedModel,
    key: Array,
    num_starts: int,
    init_loc_fn: Callable[..., Any] | None,
    aside: float,
) -> Array:
    """Return the first points (num_starts, n): shared parameters and globals as one vector.

    The first of them is about ``aside`` from the model's own.
    """
    key_theta, key_jitter, key_prior, key_first, key_nudge = jax.random.split(key, 5)
    theta = fm.init_theta(key_theta)
    flat_theta = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(a) for a in jax.tree.leaves(theta))])
    drawn = fm.draw_prior(key_prior, num_starts) if fm.dim and num_starts > 1 else None
    if drawn is None:
        drawn = jax.random.normal(key_prior, (num_starts, fm.dim))
    first = fm.init_global(key_first, init_loc_fn)
    least = jnp.maximum(aside, ROUNDING_UNITS * jnp.finfo(first.dtype).eps * jnp.abs(first))
    first = first + least * jax.random.normal(key_nudge, (fm.dim,))
    z_G = jnp.nan_to_num(drawn).at[0].set(first)
    jitter = jax.random.normal(key_jitter, (num_starts, len(flat_theta))).at[0].set(0.0)
    return jnp.concatenate([flat_theta + jitter, z_G], 1)


def reply_at(
    fm: FederatedModel,
    derive: Callable[[Callable[[Array], tuple[Array, Rows]], Array], tuple[Expansion[Array], Rows]],
    places: Array,
    state: SiloState,
    data: SiloData,
) -> tuple[Reply[Up[Array]], SiloState]:
    """Return a silo's reply and state: ``derive(f, place)`` of its log likelihood, for each start.

    ``places`` is (num_starts, n). At a point too far for a silo the reply is NaN, and still ``ok``:
    the step fails, not the exchange.
    """
    integral, unravel = silo_integral(fm), unraveller(fm)

    def at_start(args: tuple[Array, Rows, Up[Array]]) -> tuple[Up[Array], tuple[Rows, Up[Array]]]:
        x, z_L, before = args

        def value(x: Array) -> tuple[Array, Rows]:
            theta, z_G = unravel(x)
            return integral({**theta, **state.private}, z_G, data, z_L)

        place, modes = derive(value, x)
        found = Up(*place[1:])
        finite = all_finite((found, modes))
        up = jax.tree.map(lambda a: jnp.where(finite, a, jnp.nan), found)
        # The modes of a failed point are no start for the next search.
        return up, where(finite, (modes, found), (z_L, before))

    z_L: Rows = jax.tree.map(jnp.asarray, state.z_L)
    up, (modes, place) = sequential_map(at_start, (places, z_L, state.place))
    return Reply(up, jnp.array(True)), state._replace(z_L=modes, place=place)


def with_slope(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, with_diagonal: Array
) -> tuple[Expansion[Array], Aux]:
    """Return the expansion of ``f`` at ``x`` (n,), and ``aux``, for ``f(x) = (value, aux)``.

    In place of the Hessian it has its negative diagonal, or zeros unless ``with_diagonal``.
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
    climb: WideState, trial_point: Expansion[Array], max_places: int | None
) -> WideState:
    """Return the state after a trial: the better point is kept, and the next one chosen."""
    best, known, had_diagonal = climb.best, climb.known, climb.with_diagonal
    rounding = ROUNDING_UNITS * jnp.finfo(trial_point.value.dtype).eps * jnp.abs(best.value)
    finite = all_finite(trial_point[1:])
    armijo_bound = best.value + ARMIJO * climb.share * climb.slope - rounding
    better = finite & (~known | had_diagonal | (trial_point.value >= armijo_bound))
    best_after = where(better, trial_point, best)
    best_after = best_after._replace(
        curvature=jnp.where(finite & had_diagonal, trial_point.curvature, best.curvature)
    )
    stepped = better & known & ~had_diagonal
    gain = trial_point.value - best.value
    idle = jnp.where(
        stepped, jnp.where(gain <= jnp.maximum(MIN_GAIN, rounding), climb.idle + 1, 0), climb.idle
    )
    steps = climb.steps + stepped

    # A direction along which no step size works is dropped with L-BFGS's memory. If the memory was
    # empty already, the direction was the gradient itself, and the search is stuck.
    failed = known & ~better & (climb.share <= MIN_SHARE)
    unit = jnp.sqrt(nonzero(best_after.curvature))
    memory = where(had_diagonal | failed, _lbfgs().init(best_after.x), climb.memory)
    new_direction, slope, after = _lbfgs_direction(best_after, unit, memory)
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
    trial = jnp.where(found, best_after.x + share * direction, 0.5 * climb.trial)
    trial = jnp.where(found & with_diagonal, best_after.x, trial)
    memory = where(turn, after, memory)
    rests, no, tried = idle >= MAX_IDLE, climb.left, climb.tried + 1
    after = WideState(
        best_after,
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
    best: Expansion[Array], unit: Array, memory: optax.ScaleByLBFGSState
) -> tuple[Array, Array, optax.OptState]:
    """Return the next direction (n,), the slope along it, and the new state of L-BFGS.

    It is the scaled gradient, at most one unit long, where L-BFGS's direction does not lead uphill.
    """
    downhill, after = _lbfgs().update(-best.gradient / unit, memory, best.x * unit)
    direction = -downhill / unit
    gradient_step = best.gradient / unit
    gradient_step = gradient_step / jnp.maximum(jnp.linalg.norm(gradient_step), 1.0) / unit
    uphill = all_finite(direction) & (best.gradient @ direction > 0)
    direction = jnp.where(uphill, direction, gradient_step)
    return direction, best.gradient @ direction, after


def nonzero(diagonal: Array) -> Array:
    """Return absolute curvatures (n,), and one where they are zero."""
    size = jnp.abs(diagonal)
    return jnp.where(size > 0, size, 1.0)
