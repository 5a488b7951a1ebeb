r"""The mode of the joint density where the globals are many: L-BFGS over silos.

Each exchange the server sends a place; silo ``j`` answers with its log likelihood there, its own
latents integrated by Laplace's method, with the gradient and, where it is asked to look closer, the
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
    HALVINGS,
    ROUNDINGS,
    TOGETHER,
    More,
    Place,
    SiloState,
    Up,
    first_silo_state,
    highest,
    reply_at,
    search_algorithm,
    starting_places,
    unravelled,
    unraveller,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.trees import all_finite, where

MEMORY = 30  # pairs of L-BFGS
AFRESH = 8  # steps after which the diagonal is looked at again; then 16, 32, ...
RISE = 1e-4  # of what the slope promises is asked for
SHORTER = 0.25
SHORTEST = 1e-6  # share of a step
IDLE = 10  # such steps in a row
GAIN = 1e-3  # nats that a step gains, at most, at a mode


class Down(NamedTuple):
    """A place (n,) for each start, and whether to look at the diagonal there."""

    place: Array
    closer: Array


class WideState(NamedTuple):
    """The state of a search; see :class:`numpyro_fed.algorithms.mode.Search`.

    The next place is ``best.x + share * direction``, where the density rises by ``slope`` a unit
    of ``share``; ``best.curvature`` is the diagonal as it was seen last, ``memory`` that of L-BFGS
    in the coordinates that it scales; ``closer`` asks to see it at the next place.
    """

    best: Place
    known: Array
    trial: Array
    direction: Array
    slope: Array
    share: Array
    memory: optax.ScaleByLBFGSState
    closer: Array
    steps: Array
    idle: Array
    done: Array
    rests: Array
    left: Array
    tried: Array


def wide_mode(
    fm: FederatedModel,
    number: int = 1,
    init_loc_fn: Callable[..., Any] | None = None,
    *,
    most: int | None = None,
) -> FederatedAlgorithm[Any, SiloState]:
    """Return the algorithm; arguments as for :func:`numpyro_fed.algorithms.mode.mode`."""
    search = WideSearch(fm, number, init_loc_fn, most)
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
        n = unravelled(self.model)

        def begin(x: Array) -> WideState:
            zero, none, no = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.array(False)
            here, still = Place(x, zero, jnp.zeros(n), jnp.ones(n)), jnp.zeros(n)
            one, yes, memory = jnp.ones(()), jnp.array(True), _lbfgs().init(x)
            return WideState(
                here, no, x, still, zero, one, memory, yes, none, none, no, no, no, none
            )

        return jax.vmap(begin)(starting_places(self.model, key, self.number, self.init_loc_fn))

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        number, n = self.number, unravelled(self.model)
        nothing = Up(jnp.zeros(number), jnp.zeros((number, n)), jnp.zeros((number, n)))
        return first_silo_state(self.model, key, data, nothing)

    def silo(
        self, noise: object, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        derive = partial(sloped, closer=down.closer)
        return reply_at(self.model, derive, down.place, state, data)

    def round(self, state: WideState, noise: object, ask: Ask) -> tuple[WideState, Info]:
        """Ask for the density at a place for each start, and choose the next one."""
        closer, unravel = state.closer.any(), unraveller(self.model)
        replies = ask("mode", Down(state.trial, closer))

        def log_prior(x: Array) -> tuple[Array, tuple[()]]:
            return self.model.smoothed.log_prior(*unravel(x)), ()

        def one(climb: WideState, up: Up) -> WideState:
            prior, _ = sloped(log_prior, climb.trial, closer)
            here = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _judged(climb, Place(climb.trial, *here), self.most)

        after = jax.vmap(one)(state, replies.up)
        return after, Info(-after.best.value[highest(after)], jnp.array(True))


def sloped(f: Callable[[Array], tuple[Array, More]], x: Array, closer: Array) -> tuple[Place, More]:
    """Return ``f(x) = (value, more)`` at a place: with its gradient and, where one should look
    ``closer``, the diagonal of its negative Hessian; else zeros.
    """
    (value, more), g = jax.value_and_grad(f, has_aux=True)(x)

    def diagonal() -> Array:
        _, column = jax.linearize(jax.grad(lambda x: f(x)[0]), x)

        def own(i: Array) -> Array:
            return -column(jnp.zeros_like(x).at[i].set(1.0))[i]

        return jax.lax.map(own, jnp.arange(len(x)), batch_size=min(TOGETHER, len(x)))

    return Place(x, value, g, jax.lax.cond(closer, diagonal, lambda: jnp.zeros_like(x))), more


def _lbfgs() -> optax.GradientTransformation:
    return optax.scale_by_lbfgs(MEMORY)


def _judged(climb: WideState, here: Place, most: int | None) -> WideState:
    """Keep what was tried if it is better, and choose what to try next."""
    best, known, looked = climb.best, climb.known, climb.closer
    near = ROUNDINGS * jnp.finfo(here.value.dtype).eps * jnp.abs(best.value)
    fine = all_finite(here[1:])
    asked_for = best.value + RISE * climb.share * climb.slope - near
    better = fine & (~known | looked | (here.value >= asked_for))
    at = where(better, here, best)
    at = at._replace(curvature=jnp.where(fine & looked, here.curvature, best.curvature))
    stepped = better & known & ~looked
    gain = here.value - best.value
    idle = jnp.where(
        stepped, jnp.where(gain <= jnp.maximum(GAIN, near), climb.idle + 1, 0), climb.idle
    )
    steps = climb.steps + stepped

    failed = known & ~better & (climb.share <= SHORTEST)
    unit = jnp.sqrt(positive(at.curvature))
    memory = where(looked | failed, _lbfgs().init(at.x), climb.memory)
    ahead, slope, after = _ahead(at, unit, memory)
    turned = better | failed
    direction, slope = where(turned, (ahead, slope), (climb.direction, climb.slope))
    share = jnp.where(turned, 1.0, SHORTER * climb.share)

    stuck = failed & (climb.memory.count <= 1)
    lost = ~known & ~fine & ((climb.tried >= HALVINGS) | (climb.trial == 0).all())
    done = (idle >= IDLE) | stuck | lost
    if most is not None:
        done |= climb.tried + 1 >= most
    afresh = stepped & (steps >= AFRESH) & (jnp.bitwise_count(steps) == 1)
    found = known | fine
    closer = ~found | done | afresh
    # From a start at which something is not finite, halfway back to zero.
    trial = jnp.where(found, at.x + share * direction, 0.5 * climb.trial)
    trial = jnp.where(found & closer, at.x, trial)
    memory = where(turned, after, memory)
    rests, no, tried = idle >= IDLE, climb.left, climb.tried + 1
    after = WideState(
        at,
        found,
        trial,
        direction,
        slope,
        share,
        memory,
        closer,
        steps,
        idle,
        done,
        rests,
        no,
        tried,
    )
    curvature = jnp.where(fine, here.curvature, best.curvature)
    over = climb._replace(best=best._replace(curvature=curvature), left=jnp.array(True))
    return where(climb.done, where(climb.left, climb, over), after)


def _ahead(
    at: Place, unit: Array, memory: optax.ScaleByLBFGSState
) -> tuple[Array, Array, optax.OptState]:
    """Return the direction to go on in, the slope along it, and L-BFGS's memory after it."""
    downhill, after = _lbfgs().update(-at.gradient / unit, memory, at.x * unit)
    ahead = -downhill / unit
    plain = at.gradient / unit
    plain = plain / jnp.maximum(jnp.linalg.norm(plain), 1.0) / unit
    uphill = all_finite(ahead) & (at.gradient @ ahead > 0)
    ahead = jnp.where(uphill, ahead, plain)
    return ahead, at.gradient @ ahead, after


def positive(diagonal: Array) -> Array:
    """Return curvatures of coordinates, none of them zero."""
    size = jnp.abs(diagonal)
    return jnp.where(size > 0, size, 1.0)
