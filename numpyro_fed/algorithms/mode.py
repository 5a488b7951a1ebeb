r"""The mode of the joint density, by a damped Newton method over silos.

In exchange the server sends a place ``z_G``; silo ``j`` answers with its log likelihood there,
its own latents integrated by Laplace's method, with gradient and Hessian; the sum of the answers
and of the server's log prior make

.. math::
    \ell(z_G) = \log p(z_G) + \sum_j \log p(y_j \mid z_G), \qquad A = -\nabla^2 \ell,

and the next place is :math:`z_G + D^{-1/2} V (|\Lambda| + \lambda)^{-1} V' D^{-1/2} \nabla \ell`
with :math:`D^{-1/2} A D^{-1/2} = V \Lambda V'` and :math:`D` the curvature of each coordinate,
which shrinks by at most ten in a step: no coordinate's unit matters (Levenberg 1944; Marquardt
1963; absolute eigenvalues lead away from saddles: Dauphin et al. 2014). :math:`\lambda` shrinks
with steps that keep their promise and grows with those that do not.

Of effects and their scale together (``b ~ Normal(mu, tau)``, ``tau ~ HalfNormal(5)``) there is no
mode: the density rises without end as ``tau`` goes to zero. Global latents whose prior depends on
other globals are therefore integrated out as well, at the server, with the silos' Hessian taken as
given (:func:`prior_of`); ``z_G`` holds their own mode given the others.

Several starts run side by side, each as if alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Shared,
)
from numpyro_fed.algorithms.laplace import Laplace
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import LOG_2PI, Curvature
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.programs import jit_once
from numpyro_fed.trees import all_finite, where

CHECK_DISTANCES = (
    30.0,
    3.0,
    1.0,
)  # standard deviations, by the curvature, at which a density is looked at
DAMPING = 1e-2  # at the start; of curvatures scaled to one
SCALE_DECAY = 0.1  # of a coordinate's scale is left where its curvature has become smaller
MIN_DAMPING = 1e-30  # damping: none would never grow again
MAX_DAMPING = 1e8  # damping from which on no step is worth trying
MIN_GAIN = 1e-4  # nats that an undamped step promises, at most, at a mode
NUDGE = 1e-2  # from zero, where some densities have a kink: NumPyro's Bernoulli at a logit of 0
MAX_IDLE = 5  # steps in a row without a gain beyond rounding, after which a search gives up
MAX_HALVINGS = 30  # of a start at which something is not finite
ROUNDING_UNITS = 8  # within which two numbers are alike
BATCH = 16  # columns of a Hessian, or places, that are computed side by side
BATCH_UP_TO_DIM = 4  # dimensions of a row's latents, up to which that is quicker than one by one

In = TypeVar("In")
Out = TypeVar("Out")
Aux = TypeVar("Aux")


class Expansion(NamedTuple):
    """The value of a function at a place (n,), its gradient and its negative Hessian, or of that
    an estimate of the diagonal.
    """

    x: Array
    value: Array
    gradient: Array
    curvature: Array


class Search(NamedTuple):
    """The state of a search.

    ``best`` is the best place so far, if any is ``known`` where all numbers are finite, and
    ``likelihood`` the silos' negative Hessian there among the effects (c, c); ``trial`` is
    the next one to be tried, which promises to gain ``promise`` nats; ``scale`` the
    curvature of each coordinate; ``idle`` counts steps without a gain; ``done`` says whether the
    search has ended, ``rests`` whether it did so at a mode, ``left`` whether every silo has been at
    the best place last.
    """

    best: Expansion
    likelihood: Array
    known: Array
    trial: Array
    promise: Array
    scale: Array
    damping: Array
    idle: Array
    done: Array
    rests: Array
    left: Array
    tried: Array


class Up(NamedTuple):
    """A silo's log likelihood, its gradient and its negative Hessian, for each start."""

    value: Array
    gradient: Array
    curvature: Array


class SiloState(NamedTuple):
    """The modes of a silo's locals where they were looked for last, and what it said of the place
    that it has been to last, for each start; and its private parameters, which stay as they are.
    """

    z_L: Rows
    place: Up
    private: dict[str, Any]


def mode(
    fm: FederatedModel,
    num_starts: int = 1,
    init_loc_fn: Callable[..., Any] | None = None,
    *,
    effects: np.ndarray,
    max_places: int | None = None,
) -> FederatedAlgorithm[Any, SiloState]:
    """Return the search as an algorithm.

    Parameters
    ----------
    fm : FederatedModel
        Its parameters inside silo plates stay where they begin.
    number : int
        Searches side by side: the first from ``init_loc_fn``, or zero in unconstrained space, the
        others from draws of the prior, or standard normals where it cannot be drawn from.
    effects : (c,) int array
        :func:`effects_of` the model.
    most : int, optional
        Places that are tried, at most; one more exchange goes to the best of them.
    """
    n = flat_size(fm)
    log_prior = prior_of(fm, effects)
    derive = partial(derivatives, columns_at_once=columns_at_once(fm))

    def init_server(key: Array) -> Search:
        def initial_search(x: Array) -> Search:
            no_expansion = Expansion(x, jnp.zeros(()), jnp.zeros(n), jnp.eye(n))
            no, never = jnp.array(False), jnp.zeros((), jnp.int32)
            damping = jnp.array(DAMPING)
            one, none = jnp.ones(()), jnp.zeros(n)
            zeros_effects = jnp.zeros((len(effects), len(effects)))
            return Search(
                no_expansion, zeros_effects, no, x, one, none, damping, never, no, no, no, never
            )

        return jax.vmap(initial_search)(starting_places(fm, key, num_starts, init_loc_fn))

    def init_silo(key: Array, data: SiloData) -> SiloState:
        no_reply = Up(
            jnp.zeros(num_starts), jnp.zeros((num_starts, n)), jnp.zeros((num_starts, n, n))
        )
        return first_silo_state(fm, key, data, no_reply)

    def silo(
        noise: object, down: Array, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        return reply_at(fm, derive, down, state, data)

    def run(state: Search, noise: object, ask: Ask) -> tuple[Search, Info]:
        replies = ask("mode", state.trial)

        def update_one(pair: tuple[Search, Up]) -> Search:
            search, up = pair
            of_effects = up.curvature[effects[:, None], effects]
            prior, _ = derivatives(partial(log_prior, of_effects), search.trial)
            total = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _accept_or_reject(
                search, Expansion(search.trial, *total), of_effects, max_places
            )

        after = sequential_map(update_one, (state, replies.up))
        return after, Info(-after.best.value[best_start(after)], jnp.array(True))

    round_ = Round((Exchange("mode", silo, lenient=True),), run)
    return search_algorithm(fm, init_server, init_silo, round_)


def effects_of(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates of global latents whose prior depends on other globals or parameters.

    Of such an effect and its scale together the density rises without end where the scale goes to
    zero.
    """
    latents, unravel, n = fm.named("latent"), unraveller(fm), flat_size(fm)
    num_theta = n - fm.dim

    def terms(x: Array) -> Array:
        found = fm.prior_terms(*unravel(x))
        return jnp.stack([found[s.name] for s in latents])

    if not latents:
        return np.zeros(0, int)
    point = NUDGE * (1.0 + np.arange(n) % 7)
    nonzero = np.asarray(jit_once(jax.jacrev(terms))(jnp.asarray(point))) != 0
    depends = [
        nonzero[i].sum() > nonzero[i, num_theta + s.start : num_theta + s.stop].sum()
        for i, s in enumerate(latents)
    ]
    found = [np.arange(s.start, s.stop) for s, d in zip(latents, depends, strict=True) if d]
    return num_theta + np.concatenate([np.zeros(0, int), *found])


def prior_of(
    fm: FederatedModel, effects: np.ndarray
) -> Callable[[Array, Array], tuple[Array, tuple[()]]]:
    r"""Return the log prior (own, x) -> (value, ()), effects integrated out by Laplace's method.

    With the silos' negative Hessian ``own`` among the ``c`` effects ``b``, taken as given,

    .. math::
        \log p(z_G) + \tfrac c2 \log 2\pi - \tfrac12 \log\det(-\nabla_b^2 \log p(z_G) + A_b).
    """
    unravel = unraveller(fm)

    def joint(x: Array) -> Array:
        return fm.smoothed.log_prior(*unravel(x))

    def value(silo_precision: Array, x: Array) -> tuple[Array, tuple[()]]:
        if not len(effects):
            return joint(x), ()
        precision = silo_precision - jax.hessian(lambda b: joint(x.at[effects].set(b)))(x[effects])
        log_det = 2 * jnp.log(jnp.diagonal(linalg.cholesky(precision))).sum()
        return joint(x) + 0.5 * (len(effects) * LOG_2PI - log_det), ()

    return value


def starting_places(
    fm: FederatedModel, key: Array, num_starts: int, init_loc_fn: Callable[..., Any] | None
) -> Array:
    """Return where to begin (number, n): shared parameters and globals as one vector."""
    theta = fm.init_theta(key)
    flat_theta = jnp.concatenate([jnp.zeros(0), *(jnp.ravel(a) for a in jax.tree.leaves(theta))])
    drawn = fm.draw_prior(key, num_starts) if fm.dim and num_starts > 1 else None
    if drawn is None:
        drawn = jax.random.normal(key, (num_starts, fm.dim))
    first = fm.init_global(key, init_loc_fn) + NUDGE * jax.random.normal(key, (fm.dim,))
    z_G = jnp.nan_to_num(drawn).at[0].set(first)
    jitter = (
        jax.random.normal(jax.random.fold_in(key, 1), (num_starts, len(flat_theta))).at[0].set(0.0)
    )
    return jnp.concatenate([flat_theta + jitter, z_G], 1)


def first_silo_state(fm: FederatedModel, key: Array, data: SiloData, no_reply: Up) -> SiloState:
    """Return a silo's state before the first place; ``nothing`` has the shapes of its replies."""
    starts = jnp.arange(len(no_reply.value))
    z_L = jax.vmap(lambda _: Laplace(fm).start(data))(starts)
    return SiloState(z_L, no_reply, fm.init_private(key, data))


def reply_at(
    fm: FederatedModel,
    derive: Callable[[Callable[[Array], tuple[Array, Rows]], Array], tuple[Expansion, Rows]],
    places: Array,
    state: SiloState,
    data: SiloData,
) -> tuple[Reply[Up], SiloState]:
    """Return what a silo says of a place (n,) for each start: ``derive(f, place)`` of its ``f``.

    A place that is too far for a silo is a step that fails, not a reply that does: NaN.
    """
    laplace, unravel = Laplace(fm), unraveller(fm)

    def at_start(args: tuple[Array, Rows, Up]) -> tuple[Up, tuple[Rows, Up]]:
        x, z_L, before = args

        def value(x: Array) -> tuple[Array, Rows]:
            theta, z_G = unravel(x)
            return laplace.differentiable({**theta, **state.private}, z_G, data, z_L)

        place, modes = derive(value, x)
        found = Up(*place[1:])
        finite = all_finite((found, modes))
        up = jax.tree.map(lambda a: jnp.where(finite, a, jnp.nan), found)
        return up, where(finite, (modes, found), (z_L, before))

    up, (modes, place) = sequential_map(at_start, (places, state.z_L, state.place))
    return Reply(up, jnp.array(True)), SiloState(modes, place, state.private)


def sequential_map(f: Callable[[In], Out], args: In) -> Out:
    """Return ``f`` of each start, in turns: stacks of stacks of matrices XLA:CPU multiplies by
    plain loops, which takes hundreds of times as long.
    """
    return jax.lax.map(f, args)


def columns_at_once(fm: FederatedModel) -> int:
    """Return how many places, or columns of a Hessian, silos look at side by side."""
    return BATCH if all(p.dim <= BATCH_UP_TO_DIM for p in fm.plates) else 1


def search_algorithm(
    fm: FederatedModel,
    init_server: Callable[[Array], Any],
    init_silo: Callable[[Array, SiloData], SiloState],
    round_: Round,
) -> FederatedAlgorithm[Any, SiloState]:
    """Return the algorithm of a search; it ends where every silo has been at the best place."""
    unravel = unraveller(fm)

    def shared(state: SearchState) -> Shared:
        theta, z_G = unravel(state.best.x[best_start(state)])
        return Shared(theta, {"loc": z_G}, identity(z_G.shape))

    def done(state: SearchState) -> Array:
        return state.left.all()

    return FederatedAlgorithm(init_server, init_silo, round_, shared, done=done)


class CheckPoints(NamedTuple):
    """Places (k, n) at which the density is looked at, and the start whose locals are near."""

    places: Array
    start: Array


class Shape(NamedTuple):
    """The parabola at the highest place.

    Its axes and the coordinates' own (n, 2 n), in units of each coordinate's own curvature; the
    curvature along them (2 n,), unsure from ``threshold`` on down; and the log densities at places
    on both sides of each, farther (where the curvature is sure, here), far and near (12 n,).
    """

    axes: Array
    values: Array
    threshold: Array
    densities: Array


def parabola(search: Search) -> tuple[Shape, CheckPoints]:
    """Return the parabola, densities unknown, and the places at which to look at them."""
    i = best_start(search)
    x, curvature = search.best.x[i], search.best.curvature[i]
    unit, values, axes = Curvature.of(curvature)
    threshold = ROUNDING_UNITS * len(x) * jnp.finfo(x.dtype).eps
    axes = jnp.concatenate([axes, jnp.eye(len(x))], 1)
    values = jnp.concatenate([values, jnp.ones(len(x))])
    offsets = (axes / jnp.sqrt(jnp.maximum(values, threshold)) / unit[:, None]).T
    unsure = jnp.where(values <= threshold, offsets.T, 0.0).T
    directions = (unsure, offsets, offsets)
    sides = [
        (s * distance, direction)
        for distance, direction in zip(CHECK_DISTANCES, directions, strict=True)
        for s in (1, -1)
    ]
    places = x + jnp.concatenate([share * direction for share, direction in sides])
    shape = Shape(axes, values, jnp.asarray(threshold), jnp.full(len(places), jnp.nan))
    return shape, CheckPoints(places, i)


def curvature_check(fm: FederatedModel, effects: np.ndarray) -> Round:
    """Return the round from a search that has ended to the :class:`Shape` of what it found.

    It shows whether the density falls as the curvature at a mode says. A parabola is all that a
    search sees: where a likelihood levels off, as that of a separable logistic regression does far
    out, each step promises little, too.
    """
    laplace, unravel, log_prior = Laplace(fm), unraveller(fm), prior_of(fm, effects)

    def silo(
        noise: object, down: CheckPoints, state: SiloState, data: SiloData
    ) -> tuple[Reply[Array], SiloState]:
        z_L = jax.tree.map(lambda a: a[down.start], state.z_L)

        def value(x: Array) -> Array:
            theta, z_G = unravel(x)
            return laplace.log_likelihood({**theta, **state.private}, z_G, data, z_L)[0]

        size = min(columns_at_once(fm), len(down.places))
        values = jax.lax.map(value, down.places, batch_size=size)
        return Reply(values, jnp.array(True)), state

    def run(state: Search, noise: object, ask: Ask) -> tuple[Shape, Info]:
        shape, points = parabola(state)
        of_effects = state.likelihood[points.start]
        replies = ask("around the mode", points)
        size = len(shape.values)
        prior = jax.lax.map(lambda x: log_prior(of_effects, x)[0], points.places, batch_size=size)
        after = shape._replace(densities=prior + replies.up)
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange("around the mode", silo, lenient=True),), run)


def unraveller(fm: FederatedModel) -> Callable[[Array], tuple[Theta, Array]]:
    """Return the function from one vector to shared parameters and globals."""
    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (theta, jnp.zeros(fm.dim)))
    return ravel_pytree(zeros)[1]


def flat_size(fm: FederatedModel) -> int:
    """Return how many numbers shared parameters and globals are."""
    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    return sum(math.prod(a.shape) for a in jax.tree.leaves(theta)) + fm.dim


def derivatives(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, *, columns_at_once: int = BATCH
) -> tuple[Expansion, Aux]:
    """Return ``f(x) = (value, aux)`` at a place: with its gradient and negative Hessian."""

    def gradient(x: Array) -> tuple[Array, tuple[Array, Aux]]:
        (value, aux), g = jax.value_and_grad(f, has_aux=True)(x)
        return g, (value, aux)

    g, column, (value, aux) = jax.linearize(gradient, x, has_aux=True)
    H = jax.lax.map(column, jnp.eye(len(x)), batch_size=min(columns_at_once, max(len(x), 1)))
    return Expansion(x, value, g, -0.5 * (H + H.T)), aux


class SearchState(Protocol):
    """The part of a search's state that all kinds of searches have."""

    @property
    def best(self) -> Expansion: ...

    @property
    def known(self) -> Array: ...

    @property
    def rests(self) -> Array: ...

    @property
    def left(self) -> Array: ...


def best_start(state: SearchState) -> Array:
    """Return the start that has come highest."""
    return jnp.argmax(jnp.where(state.known, state.best.value, -jnp.inf))


def _accept_or_reject(
    search: Search, trial_point: Expansion, of_effects: Array, max_places: int | None
) -> Search:
    """Keep what was tried if it is better, and choose what to try next."""
    best, known = search.best, search.known
    rounding = ROUNDING_UNITS * jnp.finfo(trial_point.value.dtype).eps * jnp.abs(best.value)
    finite = all_finite(trial_point[1:])
    better = finite & (~known | (trial_point.value >= best.value - rounding))
    ratio = (trial_point.value - best.value + rounding) / search.promise
    after_success = jnp.where(ratio > 0.75, search.damping / 10, search.damping)
    after_success = jnp.where(ratio < 0.25, 4 * search.damping, after_success)
    after_success = jnp.where(known, after_success, search.damping)
    damping = jnp.where(better, after_success, jnp.where(known, 10, 1) * search.damping)
    damping = jnp.maximum(damping, MIN_DAMPING)
    gained = better & (~known | (trial_point.value > best.value + rounding))
    idle = jnp.where(gained, 0, search.idle + better)
    at = where(better, trial_point, best)
    curvature = jnp.abs(jnp.diagonal(at.curvature))
    scale = jnp.where(better, jnp.maximum(curvature, SCALE_DECAY * search.scale), search.scale)
    step, promise, gain = _newton_step(at, scale, damping)
    rests = better & (gain <= MIN_GAIN)
    lost = ~known & ~finite & ((search.tried >= MAX_HALVINGS) | (search.trial == 0).all())
    done = rests | (damping > MAX_DAMPING) | (idle >= MAX_IDLE) | lost
    if max_places is not None:
        done |= search.tried + 1 >= max_places
    # From a start at which something is not finite, halfway back to zero.
    trial = jnp.where(known | finite, at.x + step, 0.5 * search.trial)
    trial = jnp.where(done, at.x, trial)
    no, tried = search.left, search.tried + 1
    after = Search(
        at,
        jnp.where(better, of_effects, search.likelihood),
        known | finite,
        trial,
        promise,
        scale,
        damping,
        idle,
        done,
        rests,
        no,
        tried,
    )
    left = search._replace(left=jnp.array(True))
    return where(search.done, left, after)


def _newton_step(at: Expansion, scale: Array, damping: Array) -> tuple[Array, Array, Array]:
    """Return a damped step, what it promises, and what an undamped one would: much, at a saddle."""
    unit = jnp.sqrt(jnp.where(scale > 0, scale, 1.0))
    _, values, V = Curvature.of(at.curvature, unit)
    slope = V.T @ (at.gradient / unit)
    flat = ROUNDING_UNITS * len(scale) * jnp.finfo(scale.dtype).eps
    size = jnp.maximum(jnp.abs(values), flat)
    u = slope / (size + damping)
    promise = slope @ u - 0.5 * (values * u**2).sum()
    gain = jnp.where((values > -flat).all(), 0.5 * (slope**2 / size).sum(), jnp.inf)
    return V @ u / unit, promise, gain
