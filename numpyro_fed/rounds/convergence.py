r"""A test of convergence for stochastic steps: windows of rounds, compared with their noise.

A single value of the bound is too noisy, and so are parameters after a single step. Means over
windows of rounds are not (Dhaka et al. 2020; Welandawe et al. 2022, RABVI, section 4). A run has
settled when ``QUIET_WINDOWS`` windows in a row are quiet. A window is quiet when

- the bound has not risen by more than twice the standard error of its change,
- parameters do not travel. Let :math:`\bar x_w` be the mean of a parameter over window ``w`` and
  :math:`\ell_w` the length of its path in that window. Then
  :math:`(\bar x_w - \bar x_{w-1}) / \ell_w`, averaged over the last windows, is near one where
  every step leads the same way, however small, and near zero where steps only fluctuate,
- and, in coordinates in which the posterior is about standard, no mean has moved by ``MAX_MOVE``.

The second condition is there for small steps: Adam at 1e-3, ten sds away from the optimum, changes
the bound by less than its noise and no mean by much in one window.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import Tree

# Rounds in a window. Shorter windows have noisier means and end a run by chance; longer ones cost
# as many rounds at the end of each run, since two quiet windows are needed.
WINDOW = 50
# Rounds between two readings of the parameters. Reading them each round would add a pass over all
# parameters to every step; ten readings are enough for the mean of a window.
STRIDE = 5
QUIET_WINDOWS = 2  # in a row: one may be quiet by chance
MIN_WINDOWS = 4  # the average travel of fewer windows is mostly its first terms
# Weight of earlier windows in the average travel. A larger one averages more noise away and reacts
# later: 0.7 is an average over some three windows.
TRAVEL_DECAY = 0.7
# Bounds on the travel: on its mean over all parameters, and on the largest. With thousands of
# parameters some travel by chance, so the second is close to one.
MEAN_TRAVEL, MAX_TRAVEL = 0.5, 0.9
# Bound on the move of a mean from window to window, in sds: a tenth of an sd is the error that a
# fit is allowed, and the run may still have several such moves before it.
MAX_MOVE = 0.03
MIN_GAIN = 0.02  # nats: a smaller gain of the bound does not matter, whatever its noise


class ConvergenceStats(NamedTuple, Generic[Tree]):
    """Running statistics: of this window, of the one before, and the number of quiet windows.

    ``loss`` and ``squares`` are the mean of the losses in this window and their sum of squared
    deviations; ``params`` is the mean of the parameters. ``last`` holds the parameters at the last
    reading, ``path`` the length of their path in this window, and ``travel`` the share of the path
    that was net movement, averaged over windows. ``calm`` counts quiet windows in a row.
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
    """Return the statistics before the first round."""
    # The mean before is the largest number, not infinity: infinity minus a loss is no finite gain,
    # and a state that is not finite cannot be kept or saved.
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    zeros, largest = jax.tree.map(jnp.zeros_like, params), jnp.array(jnp.finfo(zero.dtype).max)
    return ConvergenceStats(
        none, zero, zero, zeros, params, zeros, zeros, largest, zero, zeros, none
    )


def update(
    stats: ConvergenceStats[Tree], loss: Array, params: Tree, *, whitened: bool
) -> ConvergenceStats[Tree]:
    """Return the statistics after a round; ``whitened``, the posterior is about standard."""
    # Welford's recursion: a sum of squares less a squared mean would cancel in single precision,
    # where a loss of 1e5 varies by a few nats.
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

    def read(stats: ConvergenceStats[Tree]) -> ConvergenceStats[Tree]:
        """Return the statistics after a reading, with a window closed that is full."""
        first = (stats.rounds - STRIDE) % WINDOW == 0
        share = STRIDE / WINDOW
        mean = jax.tree.map(lambda a, b: jnp.where(first, 0.0, a) + share * b, stats.params, params)
        path = jax.tree.map(
            lambda a, b, c: jnp.where(first, 0.0, a) + jnp.abs(b - c),
            stats.path,
            params,
            stats.last,
        )
        after = stats._replace(params=mean, path=path, last=params)
        ends = after.rounds % WINDOW == 0
        return jax.lax.cond(ends, lambda c: _close_window(c, whitened), lambda c: c, after)

    return jax.lax.cond(after.rounds % STRIDE == 0, read, lambda c: c, after)


def _close_window(stats: ConvergenceStats[Tree], whitened: bool) -> ConvergenceStats[Tree]:
    """Return the statistics at the end of a window, in which it counts as quiet or not."""
    error = jnp.sqrt(stats.squares / (WINDOW - 1) / WINDOW)
    gain = stats.mean_before - stats.loss
    noise = 2 * jnp.hypot(error, stats.error_before)
    moves = jax.tree.map(jnp.subtract, stats.params, stats.params_before)
    travel = jax.tree.map(
        lambda before, move, path: (
            TRAVEL_DECAY * before
            + (1 - TRAVEL_DECAY) * jnp.where(path > 0, move / jnp.where(path > 0, path, 1.0), 0.0)
        ),
        stats.travel,
        moves,
        stats.path,
    )
    windows = stats.rounds // WINDOW - 1  # that have a window before them
    # The average starts at zero; this divides by the sum of its weights, as Adam does.
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


def _flat(tree: object) -> Array:
    """Return all numbers of a tree as one vector, and a zero, so that it is never empty."""
    return jnp.concatenate([jnp.zeros(1), *(jnp.ravel(a) for a in jax.tree.leaves(tree))])


def settled(stats: ConvergenceStats[Any]) -> Array:
    """Return whether the last ``QUIET_WINDOWS`` windows were quiet."""
    return stats.calm >= QUIET_WINDOWS
