r"""The mode of the joint density where the globals are many: L-BFGS over silos.

Each exchange the server sends a place and a few vectors of signs ``v``; silo ``j`` answers with its
log likelihood there, the gradient, and an estimate of the negative Hessian's diagonal,

.. math::
    \mathrm{diag}(A_j) \approx \tfrac1P \sum_p (A_j v_p) / v_p, \qquad
    v_p = r_p / \sqrt{d}, \quad r_p \in \{-1, 1\}^n,

(Bekas, Kokiopoulou and Saad 2007) whose noise does not depend on units once ``d`` is near the
diagonal itself: the first exchanges stay where they are and settle it. Steps are those of Optax's
L-BFGS in the coordinates that ``d`` scales, shortened until the density rises as promised (Armijo).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info, Replies, Reply, Shared
from numpyro_fed.algorithms.mode import (
    FORGET,
    HALVINGS,
    IDLE,
    ROUNDINGS,
    Place,
    SiloState,
    Up,
    asked,
    highest,
    nothing_private,
    nowhere,
    starting_places,
    unravelled,
    unraveller,
)
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel
from numpyro_fed.trees import all_finite

PROBES = 4  # vectors of signs in each exchange
SETTLING = 8  # exchanges at the start, for the diagonal
KEEP = 0.8  # of an estimate of the diagonal, when the next one comes
MEMORY = 20  # pairs of L-BFGS
AFRESH = 16  # steps after which the memory begins anew with the present diagonal; then 32, 64, ...
RISE = 1e-4  # of what the slope promises is asked for
SHORTER = 0.25
SHORTEST = 1e-6  # share of a step
GAIN_EACH = 1e-3  # nats for each coordinate that a step promises, at most, at a mode


class Climb(NamedTuple):
    """Where a search is; see :class:`numpyro_fed.algorithms.mode.Search`.

    The next place is ``best.x + share * direction``, where the density rises by ``slope`` a unit
    of ``share``; ``scale`` is the diagonal whose coordinates ``memory`` is in, for ``steps`` so far.
    """

    best: Place
    known: Array
    trial: Array
    direction: Array
    slope: Array
    share: Array
    scale: Array
    memory: Any
    steps: Array
    idle: Array
    done: Array
    rests: Array
    left: Array
    tried: Array


def wide_mode(
    fm: FederatedModel, number: int = 1, init_loc_fn: Callable | None = None
) -> FederatedAlgorithm:
    """Build the algorithm; arguments as for :func:`numpyro_fed.algorithms.mode.mode`."""
    unravel, n = unraveller(fm), unravelled(fm)

    def log_prior(x: Array) -> tuple[Array, tuple[()]]:
        return fm.log_prior(*unravel(x)), ()

    def init_server(key: Array) -> Climb:
        def begin(x: Array) -> Climb:
            zero, none, no = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.array(False)
            nothing, ones = Place(x, zero, jnp.zeros(n), jnp.ones(n)), jnp.ones(n)
            memory, one = _lbfgs().init(x), jnp.ones(())
            return Climb(
                nothing, no, x, 0 * x, zero, one, ones, memory, none, none, no, no, no, none
            )

        return jax.vmap(begin)(starting_places(fm, key, number, init_loc_fn))

    def init_silo(key: Array, data: SiloData) -> SiloState:
        nothing = Up(jnp.zeros(number), jnp.zeros((number, n)), jnp.zeros((number, n)))
        return nowhere(fm, key, data, nothing)

    def server_noise(key: Array) -> Array:
        return jax.random.rademacher(key, (number, PROBES, n), jnp.result_type(float))

    def broadcast(
        noise: Array, state: Climb, who: Array, server_data: Any
    ) -> tuple[tuple[Array, Array], Array]:
        probes = noise / jnp.sqrt(state.scale)[:, None]
        return (state.trial, probes), probes

    def silo(
        noise: Any, down: tuple[Array, Array], state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        return asked(fm, probed, down, state, data)

    def server(
        state: Climb, probes: Array, replies: Replies[Up], server_data: Any
    ) -> tuple[Climb, Info]:
        def one(climb: Climb, probes: Array, up: Up) -> Climb:
            prior, _ = probed(log_prior, climb.trial, probes)
            here = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _judged(climb, Place(climb.trial, *here))

        after = jax.vmap(one)(state, probes, replies.up)
        return after, Info(-after.best.value[highest(after)], jnp.array(True))

    def shared(state: Climb) -> Shared:
        theta, z_G = unravel(state.best.x[highest(state)])
        return Shared(theta, {"loc": z_G})

    return FederatedAlgorithm(
        init_server,
        init_silo,
        (Exchange(broadcast, silo, server, name="mode", server_noise=server_noise),),
        shared,
        nothing_private,
        done=lambda state: state.left.all(),
    )


def probed(f: Any, x: Array, probes: Array) -> tuple[Place, Any]:
    """A function ``x -> (value, more)`` at a place: with its gradient and, by ``probes`` (P, n), an
    estimate of the diagonal of its negative Hessian.
    """
    gradient = jax.value_and_grad(f, has_aux=True)
    (value, more), g = gradient(x)

    def along(v: Array) -> Array:
        return -jax.jvp(lambda x: gradient(x)[1], (x,), (v,))[1] / v

    return Place(x, value, g, jax.lax.map(along, probes).mean(0)), more


def _lbfgs() -> optax.GradientTransformation:
    return optax.scale_by_lbfgs(MEMORY)


def _judged(climb: Climb, here: Place) -> Climb:
    """Keep what was tried if it is better, and choose what to try next."""
    best, known, settling = climb.best, climb.known, climb.tried < SETTLING
    near = ROUNDINGS * jnp.finfo(here.value.dtype).eps * jnp.abs(best.value)
    fine = all_finite(here[1:])
    asked_for = best.value + RISE * climb.share * climb.slope - near
    better = fine & (~known | settling | (here.value >= asked_for))
    gained = better & (~known | (here.value > best.value + near))
    idle = jnp.where(gained | settling, 0, climb.idle + better)
    settled = jnp.maximum(jnp.abs(here.curvature), FORGET * climb.scale)
    mean = KEEP * best.curvature + (1 - KEEP) * here.curvature
    seen = jnp.where(settling, jnp.where(fine, settled, climb.scale), mean)
    curvature = jnp.where(fine, seen, best.curvature)
    at = jax.tree.map(lambda new, old: jnp.where(better, new, old), here, best)
    at = at._replace(curvature=curvature)

    steps = climb.steps + (better & ~settling)
    fresh = settling | (better & (steps >= AFRESH) & (jnp.bitwise_count(steps) == 1))
    scale = jnp.where(fresh, _positive(curvature), climb.scale)
    failing = ~better & known & (climb.share <= SHORTEST)
    anew = fresh | failing
    memory = jax.tree.map(
        lambda new, old: jnp.where(anew, new, old), _lbfgs().init(at.x), climb.memory
    )
    unit = jnp.sqrt(scale)
    downhill, after = _lbfgs().update(-at.gradient / unit, memory, at.x * unit)
    ahead = -downhill / unit
    slope = at.gradient @ ahead
    uphill = all_finite(ahead) & (slope > 0)
    plain = at.gradient / scale
    ahead = jnp.where(uphill, ahead, plain / jnp.maximum(jnp.linalg.norm(plain * unit), 1.0))
    moved = better | failing
    direction = jnp.where(moved, ahead, climb.direction)
    slope = jnp.where(moved, at.gradient @ ahead, climb.slope)
    memory = jax.tree.map(lambda new, old: jnp.where(moved, new, old), after, memory)

    share = jnp.where(moved, 1.0, SHORTER * climb.share)
    gain = 0.5 * jnp.minimum(at.gradient**2 / scale, jnp.inf).sum()
    rests = better & ~settling & (gain <= GAIN_EACH * len(scale))
    stuck = failing & (climb.steps == climb.memory.count)
    lost = ~known & ~fine & ((climb.tried >= HALVINGS) | (climb.trial == 0).all())
    done = rests | stuck | (idle >= IDLE) | lost
    # From a start at which something is not finite, halfway back to zero.
    trial = jnp.where(known | fine, at.x + share * direction, 0.5 * climb.trial)
    trial = jnp.where(done | (climb.tried + 1 < SETTLING) & (known | fine), at.x, trial)
    after = Climb(
        at,
        known | fine,
        trial,
        direction,
        slope,
        share,
        scale,
        memory,
        steps,
        idle,
        done,
        rests,
        climb.left,
        climb.tried + 1,
    )
    over = climb._replace(left=jnp.array(True))
    return jax.tree.map(lambda new, old: jnp.where(climb.done, old, new), after, over)


def _positive(diagonal: Array) -> Array:
    """Curvatures of coordinates, none of them zero."""
    size = jnp.abs(diagonal)
    return jnp.where(size > 0, size, 1.0)
