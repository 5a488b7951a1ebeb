r"""Whether stochastic steps have come to rest: windows of rounds, compared with their noise.

A single bound is too noisy to tell, and so are parameters after a single step. Means over windows
of rounds are not (Dhaka et al. 2020; Welandawe et al. 2022, RABVI, section 4): a run has settled
when, ``QUIET_WINDOWS`` times in a row,

- the bound has not risen by more than twice the standard error of its change,
- parameters do not travel: with :math:`\bar x_w` the mean of a parameter over window ``w`` and
  :math:`\ell_w` the length of its path there, :math:`(\bar x_w - \bar x_{w-1}) / \ell_w`, averaged
  over the last windows, is near one where every step leads the same way, however small the steps
  are, and near zero where they only shake,
- and, in coordinates in which the posterior is about standard, no mean has moved by ``MAX_MOVE``.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.trees import Tree

WINDOW = 50  # rounds
STRIDE = 5  # rounds between looks at the parameters
QUIET_WINDOWS = 2
MIN_WINDOWS = 4  # windows, before travel can be told from shaking
TRAVEL_DECAY = 0.7  # of earlier windows' travel, when the next one comes
MEAN_TRAVEL, MAX_TRAVEL = 0.5, 0.9  # on average over parameters, and of any
MAX_MOVE = 0.03  # standard deviations, and relative changes of them
MIN_GAIN = 0.02  # nats of the bound that do not matter


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


def init(params: Tree) -> ConvergenceStats[Tree]:
    """Return the course before the first round, of which nothing is seen yet."""
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    zeros, largest = jax.tree.map(jnp.zeros_like, params), jnp.array(jnp.finfo(zero.dtype).max)
    return ConvergenceStats(
        none, zero, zero, zeros, params, zeros, zeros, largest, zero, zeros, none
    )


def update(
    stats: ConvergenceStats[Tree], loss: Array, params: Tree, *, whitened: bool
) -> ConvergenceStats[Tree]:
    """Return the course after one more round.

    ``whitened`` says whether the posterior is about standard in the parameters' coordinates.
    """
    # Losses are summed from that of the first round in the window: large ones would cancel.
    first = stats.rounds % WINDOW == 0
    number = (stats.rounds % WINDOW + 1).astype(loss.dtype)
    mean = jnp.where(first, 0.0, stats.loss)
    deviation = loss - mean
    mean = mean + deviation / number
    after = stats._replace(
        rounds=stats.rounds + 1,
        loss=mean,
        squares=jnp.where(first, 0.0, stats.squares) + deviation * (loss - mean),
    )
    at_stride = after.rounds % STRIDE == 0
    return jax.lax.cond(
        at_stride, lambda c: _update_params(c, params, whitened), lambda c: c, after
    )


def _update_params(
    stats: ConvergenceStats[Tree], params: Tree, whitened: bool
) -> ConvergenceStats[Tree]:
    """Return the course after a look at the parameters; and the end of a window, if it is one."""
    first = (stats.rounds - STRIDE) % WINDOW == 0
    share = STRIDE / WINDOW
    mean = jax.tree.map(lambda a, b: jnp.where(first, 0.0, a) + share * b, stats.params, params)
    path = jax.tree.map(
        lambda a, b, c: jnp.where(first, 0.0, a) + jnp.abs(b - c), stats.path, params, stats.last
    )
    after = stats._replace(params=mean, path=path, last=params)
    ends = after.rounds % WINDOW == 0
    return jax.lax.cond(ends, lambda c: _close_window(c, whitened), lambda c: c, after)


def _close_window(stats: ConvergenceStats[Tree], whitened: bool) -> ConvergenceStats[Tree]:
    """Return the course at the end of a window."""
    error = jnp.sqrt(stats.squares / (WINDOW - 1) / WINDOW)
    gain = stats.mean_before - stats.loss
    noise = 2 * jnp.hypot(error, stats.error_before)
    moves = jax.tree.map(jnp.subtract, stats.params, stats.params_before)
    travel = jax.tree.map(_average_travel, stats.travel, moves, stats.path)
    windows = stats.rounds // WINDOW - 1  # with one before
    share = jnp.abs(_flat(travel)) / (1 - TRAVEL_DECAY**windows)
    at_rest = (share.mean() <= MEAN_TRAVEL) & (share.max() <= MAX_TRAVEL) & (windows >= MIN_WINDOWS)
    if whitened:
        at_rest &= jnp.abs(_flat(moves)).max() <= MAX_MOVE
    quiet = (gain <= jnp.maximum(MIN_GAIN, noise)) & at_rest
    return stats._replace(
        travel=jax.tree.map(lambda a: jnp.where(windows > 0, a, 0.0), travel),
        mean_before=stats.loss,
        error_before=error,
        params_before=stats.params,
        calm=jnp.where(quiet, stats.calm + 1, 0),
    )


def _average_travel(travel: Array, change: Array, path: Array) -> Array:
    share = change / jnp.where(path > 0, path, 1.0)
    return TRAVEL_DECAY * travel + (1 - TRAVEL_DECAY) * jnp.where(path > 0, share, 0.0)


def _flat(tree: object) -> Array:
    """Return all numbers of a tree, and a zero."""
    return jnp.concatenate([jnp.zeros(1), *(jnp.ravel(a) for a in jax.tree.leaves(tree))])


def settled(stats: ConvergenceStats[Any]) -> Array:
    """Return whether the last windows were quiet."""
    return stats.calm >= QUIET_WINDOWS
