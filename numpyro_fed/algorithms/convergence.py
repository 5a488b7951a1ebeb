r"""Whether stochastic steps have come to rest: windows of rounds, compared with their noise.

A single bound is too noisy to tell, and so are parameters after a single step. Means over windows
of rounds are not (Dhaka et al. 2020; Welandawe et al. 2022, RABVI, section 4): a run has settled
when, ``CALM`` times in a row,

- the bound has not risen by more than twice the standard error of its change,
- parameters do not travel: with :math:`\bar x_w` the mean of a parameter over window ``w`` and
  :math:`\ell_w` the length of its path there, :math:`(\bar x_w - \bar x_{w-1}) / \ell_w`, averaged
  over the last windows, is near one where every step leads the same way, however small the steps
  are, and near zero where they only shake,
- and, in coordinates in which the posterior is about standard, no mean has moved by ``STILL``.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.trees import Tree

WINDOW = 50  # rounds
STRIDE = 5  # rounds between looks at the parameters
CALM = 2
LEAST = 4  # windows, before travel can be told from shaking
MEMORY = 0.7  # of earlier windows' travel, when the next one comes
TRAVEL, FARTHEST = 0.5, 0.9  # on average over parameters, and of any
STILL = 0.03  # standard deviations, and relative changes of them
GAIN = 0.02  # nats of the bound that do not matter


class ConvergenceStats(NamedTuple, Generic[Tree]):
    """Sums over the window so far, means of the one before, quiet windows in a row.

    ``last`` are the parameters at the last look, ``path`` how far they have gone in this window,
    and ``travel`` averages what share of that led anywhere, over windows.
    """

    rounds: Array
    loss: Array
    squares: Array
    params: Tree
    last: Tree
    path: Tree
    travel: Tree
    mean_before: Array
    error_before: Array
    params_before: Tree
    calm: Array


def begin(params: Tree) -> ConvergenceStats[Tree]:
    """Return the course before the first round, of which nothing is seen yet."""
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    still, far = jax.tree.map(jnp.zeros_like, params), jnp.array(jnp.finfo(zero.dtype).max)
    return ConvergenceStats(none, zero, zero, still, params, still, still, far, zero, still, none)


def follow(
    course: ConvergenceStats[Tree], loss: Array, params: Tree, *, whitened: bool
) -> ConvergenceStats[Tree]:
    """Return the course after one more round.

    ``whitened`` says whether the posterior is about standard in the parameters' coordinates.
    """
    # Losses are summed from that of the first round in the window: large ones would cancel.
    first = course.rounds % WINDOW == 0
    number = (course.rounds % WINDOW + 1).astype(loss.dtype)
    mean = jnp.where(first, 0.0, course.loss)
    off = loss - mean
    mean = mean + off / number
    now = course._replace(
        rounds=course.rounds + 1,
        loss=mean,
        squares=jnp.where(first, 0.0, course.squares) + off * (loss - mean),
    )
    looks = now.rounds % STRIDE == 0
    return jax.lax.cond(looks, lambda c: _looked(c, params, whitened), lambda c: c, now)


def _looked(course: ConvergenceStats[Tree], params: Tree, whitened: bool) -> ConvergenceStats[Tree]:
    """Return the course after a look at the parameters; and the end of a window, if it is one."""
    first = (course.rounds - STRIDE) % WINDOW == 0
    share = STRIDE / WINDOW
    mean = jax.tree.map(lambda a, b: jnp.where(first, 0.0, a) + share * b, course.params, params)
    path = jax.tree.map(
        lambda a, b, c: jnp.where(first, 0.0, a) + jnp.abs(b - c), course.path, params, course.last
    )
    now = course._replace(params=mean, path=path, last=params)
    ends = now.rounds % WINDOW == 0
    return jax.lax.cond(ends, lambda c: _closed(c, whitened), lambda c: c, now)


def _closed(course: ConvergenceStats[Tree], whitened: bool) -> ConvergenceStats[Tree]:
    """Return the course at the end of a window."""
    error = jnp.sqrt(course.squares / (WINDOW - 1) / WINDOW)
    gain = course.mean_before - course.loss
    noise = 2 * jnp.hypot(error, course.error_before)
    moves = jax.tree.map(jnp.subtract, course.params, course.params_before)
    travel = jax.tree.map(_averaged, course.travel, moves, course.path)
    windows = course.rounds // WINDOW - 1  # with one before
    share = jnp.abs(_flat(travel)) / (1 - MEMORY**windows)
    still = (share.mean() <= TRAVEL) & (share.max() <= FARTHEST) & (windows >= LEAST)
    if whitened:
        still &= jnp.abs(_flat(moves)).max() <= STILL
    quiet = (gain <= jnp.maximum(GAIN, noise)) & still
    return course._replace(
        travel=jax.tree.map(lambda a: jnp.where(windows > 0, a, 0.0), travel),
        mean_before=course.loss,
        error_before=error,
        params_before=course.params,
        calm=jnp.where(quiet, course.calm + 1, 0),
    )


def _averaged(travel: Array, move: Array, path: Array) -> Array:
    share = move / jnp.where(path > 0, path, 1.0)
    return MEMORY * travel + (1 - MEMORY) * jnp.where(path > 0, share, 0.0)


def _flat(tree: object) -> Array:
    """Return all numbers of a tree, and a zero."""
    return jnp.concatenate([jnp.zeros(1), *(jnp.ravel(a) for a in jax.tree.leaves(tree))])


def settled(course: ConvergenceStats[Any]) -> Array:
    """Return whether the last windows were quiet."""
    return course.calm >= CALM
