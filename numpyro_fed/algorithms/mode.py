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

Several starts run side by side, and do not influence each other.
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
from numpyro_fed.algorithms.saddles import kicked
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import LOG_2PI, Curvature
from numpyro_fed.integrals.laplace import Laplace
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.programs import jit_once
from numpyro_fed.trees import all_finite, where

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
# Distance of the start from zero, where some densities have a kink: derivatives of abs and max are
# those of neither side there, and half of a logistic regression's gradient is lost. Beside a
# covariate that counts people or seconds 0.01 is far: all rows of such a regression are then
# certain of their outcome, and nothing has curvature.
ASIDE = 1e-9
NUDGE = 1e-2  # distance from zero of a general point, and of a search without Hessians
MAX_IDLE = 5  # accepted steps in a row without a gain beyond rounding, after which a search ends
# Standard deviations from a mode at which another start counts as come there, too; modes that are
# to be told apart are three and more away (``results.mode.MODES_APART``).
MERGED = 1.5
# Exchanges after which a start that is still lower than a mode is given up. From zero, and without
# modes of silos' own, the six cities took sixteen; with Poisson counts a start took a hundred where
# another one had come to the mode after forty (docs/results/few_messages.md).
LATE = 20
MAX_HALVINGS = 30  # of a start at which some number is not finite: 2^-30 of it is zero in effect
ROUNDING_UNITS = 8  # eps of a sum, relative: within it two log densities count as equal
# Columns of a Hessian, or points, that silos compute side by side. More use more memory; one by one
# repeats the loop over rows for each of them.
BATCH = 16
# The largest dimension of rows' latents for which that is quicker: beyond it the batched products
# of small matrices run as plain loops on a CPU (see :func:`sequential_map`).
BATCH_UP_TO_DIM = 4

In = TypeVar("In")
Out = TypeVar("Out")
Aux = TypeVar("Aux")


class Expansion(NamedTuple):
    """A function at a point ``x`` (n,): value, gradient (n,) and negative Hessian (n, n).

    The search for many globals has the diagonal (n,) of the Hessian alone.
    """

    x: Array
    value: Array
    gradient: Array
    curvature: Array


class Search(NamedTuple):
    """The server's state of a search.

    Attributes
    ----------
    best : Expansion
        At the best point so far.
    likelihood : (c, c)
        The silos' negative Hessian there, among the effects.
    known : bool
        Whether some point had finite numbers; before that ``best`` is a placeholder.
    trial : (n,)
        The point to try next.
    promise : ()
        The gain, in nats, that is predicted for it.
    scale : (n,)
        The curvature by which each coordinate is scaled.
    metric : (n, n)
        The precision that silos' own modes tell of (:mod:`.own_start`), in which the first step is
        bounded; zero where nothing is known, and once a step has led up.
    damping : ()
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
    min_gain : ()
        The predicted gain, in nats, below which a point is a mode.
    """

    best: Expansion
    likelihood: Array
    known: Array
    trial: Array
    promise: Array
    scale: Array
    metric: Array
    damping: Array
    idle: Array
    done: Array
    rests: Array
    left: Array
    tried: Array
    min_gain: Array

    def beginning_at(self, places: np.ndarray) -> Search:
        """Return the state of several searches, half of which try some places (k, n) first.

        The others begin where they did: other data may have modes where there were none before.
        """
        k = min(len(places), -(-len(self.trial) // 2))
        first = jnp.asarray(places[:k], self.trial.dtype)
        no = jnp.zeros(k, bool)
        return self._replace(
            trial=self.trial.at[:k].set(first),
            metric=self.metric.at[:k].set(0.0),
            min_gain=jnp.full_like(self.min_gain, MIN_GAIN_NEAR),
            done=self.done.at[:k].set(no),
            left=self.left.at[:k].set(no),
        )


class Up(NamedTuple):
    """A silo's message: log likelihood, gradient and negative Hessian, for each start."""

    value: Array
    gradient: Array
    curvature: Array


class SiloState(NamedTuple):
    """A silo's state: modes of its locals, its last reply, for each start, and private parameters.

    The modes are the start of the next search for them. The private parameters stay as they are.
    ``top`` (num_starts,) is the log likelihood at the silo's own mode. Where its climb has ended
    at no mode, it is the lowest number of the dtype (``jnp.finfo(dtype).min``).
    """

    z_L: Rows
    place: Up
    private: dict[str, Any]
    top: Array


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
        Its parameters inside silo plates keep their first values.
    num_starts : int
        Searches side by side. The first starts from ``init_loc_fn``, or zero in unconstrained
        space; the others from draws of the prior, or standard normals where there are none.
    effects : (c,) int array
        The coordinates that are integrated out, by :func:`effects_of`.
    max_places : int, optional
        The largest number of points to try. One more exchange follows, at the best of them.
    """
    n = flat_size(fm)
    log_prior = prior_of(fm, effects)
    derive = partial(derivatives, columns_at_once=columns_at_once(fm))

    def init_server(key: Array) -> Search:
        def initial_search(x: Array) -> Search:
            no_expansion = Expansion(x, jnp.zeros(()), jnp.zeros(n), jnp.eye(n))
            no, never = jnp.array(False), jnp.zeros((), jnp.int32)
            damping = jnp.array(DAMPING)
            unit, none = jnp.ones(()), jnp.zeros(n)
            zeros_effects = jnp.zeros((len(effects), len(effects)))
            return Search(
                no_expansion,
                zeros_effects,
                no,
                x,
                unit,
                none,
                jnp.zeros((n, n)),
                damping,
                never,
                no,
                no,
                no,
                never,
                jnp.array(MIN_GAIN),
            )

        return jax.vmap(initial_search)(starting_places(fm, key, num_starts, init_loc_fn, ASIDE))

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
            # The prior's integral over the effects needs the silos' curvature at the same point,
            # so the server's part is computed after the replies.
            of_effects = up.curvature[effects[:, None], effects]
            prior, _ = derivatives(partial(log_prior, of_effects), search.trial)
            total = jax.tree.map(jnp.add, Up(*prior[1:]), up)
            return _accept_or_reject(
                search, Expansion(search.trial, *total), of_effects, max_places
            )

        after = _without_followers(sequential_map(update_one, (state, replies.up)))
        return after, Info(-after.best.value[best_start(after)], jnp.array(True))

    round_ = Round((Exchange("mode", silo, lenient=True),), run)
    return search_algorithm(fm, init_server, init_silo, round_)


def effects_of(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates (c,) of global latents whose prior depends on other globals or theta.

    The joint density of such an effect and its scale rises without bound as the scale goes to
    zero.
    """
    latents, unravel, n = fm.named("latent"), unraveller(fm), flat_size(fm)
    num_theta = n - fm.dim

    def terms(x: Array) -> Array:
        found = fm.prior_terms(*unravel(x))
        return jnp.stack([found[s.name] for s in latents])

    if not latents:
        return np.zeros(0, int)
    # A general point: at zero, or where all numbers are equal, a derivative may vanish by chance.
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
    r"""Return the log prior ``(A_b, x) -> (value, ())``, effects integrated by Laplace's method.

    ``A_b`` (c, c) is the silos' negative Hessian among the ``c`` effects ``b``, held fixed:

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


def first_silo_state(fm: FederatedModel, key: Array, data: SiloData, no_reply: Up) -> SiloState:
    """Return a silo's state before the first point; ``no_reply`` has the shapes of its replies."""
    starts = jnp.arange(len(no_reply.value))
    z_L = jax.vmap(lambda _: Laplace(fm).start(data))(starts)
    unknown = jnp.full_like(no_reply.value, jnp.finfo(no_reply.value.dtype).min)
    return SiloState(z_L, no_reply, fm.init_private(key, data), unknown)


def reply_at(
    fm: FederatedModel,
    derive: Callable[[Callable[[Array], tuple[Array, Rows]], Array], tuple[Expansion, Rows]],
    places: Array,
    state: SiloState,
    data: SiloData,
) -> tuple[Reply[Up], SiloState]:
    """Return a silo's reply and state: ``derive(f, place)`` of its log likelihood, for each start.

    ``places`` is (num_starts, n). At a point too far for a silo the reply is NaN, and still ``ok``:
    the step fails, not the exchange.
    """
    integral, unravel = silo_integral(fm), unraveller(fm)

    def at_start(args: tuple[Array, Rows, Up]) -> tuple[Up, tuple[Rows, Up]]:
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

    up, (modes, place) = sequential_map(at_start, (places, state.z_L, state.place))
    return Reply(up, jnp.array(True)), state._replace(z_L=modes, place=place)


def sequential_map(f: Callable[[In], Out], args: In) -> Out:
    """Return ``f`` of each start, one after the other.

    Under ``vmap``, stacks of matrices become stacks of stacks. XLA:CPU multiplies these by plain
    loops, which takes hundreds of times as long: four searches with a hundred effects took more
    than four minutes an exchange (docs/results/raw_data.md).
    """
    return jax.lax.map(f, args)


def columns_at_once(fm: FederatedModel) -> int:
    """Return how many points, or columns of a Hessian, silos compute side by side."""
    return BATCH if all(p.dim <= BATCH_UP_TO_DIM for p in fm.plates) else 1


def search_algorithm(
    fm: FederatedModel,
    init_server: Callable[[Array], Any],
    init_silo: Callable[[Array, SiloData], SiloState],
    round_: Round,
) -> FederatedAlgorithm[Any, SiloState]:
    """Return the algorithm of a search; it ends once silos have replied at the best point."""
    unravel = unraveller(fm)

    def shared(state: SearchState) -> Shared:
        theta, z_G = unravel(state.best.x[best_start(state)])
        return Shared(theta, {"loc": z_G}, identity(z_G.shape))

    def done(state: SearchState) -> Array:
        return state.left.all()

    return FederatedAlgorithm(init_server, init_silo, round_, shared, done=done)


def unraveller(fm: FederatedModel) -> Callable[[Array], tuple[Theta, Array]]:
    """Return the function from one vector to shared parameters and globals."""
    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (theta, jnp.zeros(fm.dim)))
    return ravel_pytree(zeros)[1]


def flat_size(fm: FederatedModel) -> int:
    """Return the length of the vector of shared parameters and globals."""
    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    return sum(math.prod(a.shape) for a in jax.tree.leaves(theta)) + fm.dim


def derivatives(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, *, columns_at_once: int = BATCH
) -> tuple[Expansion, Aux]:
    """Return the expansion of ``f`` at ``x`` (n,), and ``aux``, for ``f(x) = (value, aux)``."""

    def gradient(x: Array) -> tuple[Array, tuple[Array, Aux]]:
        (value, aux), g = jax.value_and_grad(f, has_aux=True)(x)
        return g, (value, aux)

    # linearize: ``f``, and a silo's search for its modes in it, is evaluated once for all columns.
    g, column, (value, aux) = jax.linearize(gradient, x, has_aux=True)
    H = jax.lax.map(column, jnp.eye(len(x)), batch_size=min(columns_at_once, max(len(x), 1)))
    return Expansion(x, value, g, -0.5 * (H + H.T)), aux


class SearchState(Protocol):
    """The fields that the states of both kinds of searches have."""

    @property
    def best(self) -> Expansion: ...

    @property
    def known(self) -> Array: ...

    @property
    def rests(self) -> Array: ...

    @property
    def left(self) -> Array: ...


def best_start(state: SearchState) -> Array:
    """Return the index of the search whose best point is highest."""
    return jnp.argmax(jnp.where(state.known, state.best.value, -jnp.inf))


def _accept_or_reject(
    search: Search, trial_point: Expansion, of_effects: Array, max_places: int | None
) -> Search:
    """Return the state after a trial: the better point is kept, and the next one chosen."""
    best, known = search.best, search.known
    # A log density of size 1e5 is known to about 0.01 in single precision. Without this allowance
    # a search would reject steps at the mode, where gains are smaller than that.
    rounding = ROUNDING_UNITS * jnp.finfo(trial_point.value.dtype).eps * jnp.abs(best.value)
    finite = all_finite(trial_point[1:])
    better = finite & (~known | (trial_point.value >= best.value - rounding))
    # The usual rule of trust regions: ratios of actual to predicted gain of 1/4 and 3/4.
    ratio = (trial_point.value - best.value + rounding) / search.promise
    after_success = jnp.where(ratio > 0.75, search.damping / 10, search.damping)
    after_success = jnp.where(ratio < 0.25, 4 * search.damping, after_success)
    # The bound on the first step has raised the damping; once that step has served it can go.
    served = known & (ratio > 0.75) & better & (search.metric != 0).any()
    after_success = jnp.where(served, DAMPING, after_success)
    after_success = jnp.where(known, after_success, search.damping)
    damping = jnp.where(better, after_success, jnp.where(known, 10, 1) * search.damping)
    damping = jnp.maximum(damping, MIN_DAMPING)
    metric = jnp.where(served, 0.0, search.metric)
    gained = better & (~known | (trial_point.value > best.value + rounding))
    idle = jnp.where(gained, 0, search.idle + better)
    best_after = where(better, trial_point, best)
    curvature = jnp.abs(jnp.diagonal(best_after.curvature))
    scale = jnp.where(better, jnp.maximum(curvature, SCALE_DECAY * search.scale), search.scale)
    step = _newton_step(best_after, scale, damping, metric)
    damping = step.damping
    rests = better & (step.undamped_gain <= search.min_gain)
    lost = ~known & ~finite & ((search.tried >= MAX_HALVINGS) | (search.trial == 0).all())
    done = rests | (damping > MAX_DAMPING) | (idle >= MAX_IDLE) | lost
    if max_places is not None:
        done |= search.tried + 1 >= max_places
    # From a start at which something is not finite, halfway back to zero.
    trial = jnp.where(known | finite, best_after.x + step.move, 0.5 * search.trial)
    trial = jnp.where(done, best_after.x, trial)
    tried = search.tried + 1
    after = Search(
        best_after,
        jnp.where(better, of_effects, search.likelihood),
        known | finite,
        trial,
        step.promise,
        scale,
        metric,
        damping,
        idle,
        done,
        rests,
        rests,  # the trial is the best point, and silos' modes are those there
        tried,
        search.min_gain,
    )
    left = search._replace(left=jnp.array(True))
    return where(search.done, left, after)


def _without_followers(search: Search) -> Search:
    """Return the state without the starts that come to where a better one rests, or lag behind it.

    A start lags that is still lower :data:`LATE` exchanges after the best one has come to rest.
    """
    first = jnp.argmax(jnp.where(search.rests, search.best.value, -jnp.inf))
    away = search.best.x - search.best.x[first]
    squared = jnp.einsum("si,ij,sj->s", away, search.best.curvature[first], away)
    same = (squared <= MERGED**2) & (search.best.value <= search.best.value[first])
    lower = ~search.known | (search.best.value <= search.best.value[first])
    late = search.tried > search.tried[first] + LATE
    gone = search.rests[first] & ~search.rests & ((same & search.known) | (late & lower))
    return search._replace(done=search.done | gone, left=search.left | gone)


class _Step(NamedTuple):
    """A damped step (n,), its predicted gain, that of an undamped step, and the damping.

    The gain of the undamped step, infinite at a saddle, says whether the point is a mode.
    """

    move: Array
    promise: Array
    undamped_gain: Array
    damping: Array


def _newton_step(best: Expansion, scale: Array, damping: Array, metric: Array) -> _Step:
    """Return the step from the best point; it is damped until it is short enough in the metric."""
    unit = jnp.sqrt(jnp.where(scale > 0, scale, 1.0))
    _, values, V = Curvature.of(best.curvature, unit)
    slope = V.T @ (best.gradient / unit)
    flat = ROUNDING_UNITS * len(scale) * jnp.finfo(scale.dtype).eps
    size = jnp.maximum(jnp.abs(values), flat)
    dampings = damping * DAMPINGS
    pull = kicked(values, V, best.gradient / unit)
    moves = (pull / (size + dampings[:, None])) @ V.T / unit
    lengths = jnp.sqrt(jnp.einsum("ki,ij,kj->k", moves, metric, moves))
    k = jnp.argmax(lengths <= LONGEST)  # the first; where none is short enough the least damped
    u = pull / (size + dampings[k])
    promise = slope @ u - 0.5 * (values * u**2).sum()
    gain = jnp.where((values > -flat).all(), 0.5 * (slope**2 / size).sum(), jnp.inf)
    return _Step(moves[k], promise, gain, dampings[k])
