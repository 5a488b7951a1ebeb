r"""Whether stochastic steps have come to rest: windows of rounds, compared with their noise.

A single bound is too noisy to tell, and so are parameters after a single step. Means over windows
of rounds are not (Dhaka et al. 2020; Welandawe et al. 2022, RABVI, section 4): a run has settled
when, ``CALM`` times in a row, the bound has not risen by more than twice the standard error of its
change, and no parameter's mean has moved by ``STILL``, in coordinates in which the posterior is
about standard. Steps that have become small do not look like rest: at most a few hundredths of what
they could move in a window is allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

WINDOW = 50  # rounds
CALM = 2
STILL = 0.03  # standard deviations, and relative changes of them
GAIN = 0.02  # nats of the bound that do not matter


class Course(NamedTuple):
    """Sums over the window so far, means of the one before, quiet windows in a row.

    ``params`` are those that should rest; empty where only the bound is looked at.
    """

    rounds: Array
    loss: Array
    squares: Array
    params: Any
    mean_before: Array
    error_before: Array
    params_before: Any
    calm: Array


def begin(params: Any) -> Course:
    """Nothing seen yet."""
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    still = jax.tree.map(jnp.zeros_like, params)
    return Course(none, zero, zero, still, jnp.array(jnp.finfo(zero.dtype).max), zero, still, none)


def follow(course: Course, loss: Array, params: Any) -> Course:
    """One more round."""
    # Losses are summed from that of the first round in the window: large ones would cancel.
    first = course.rounds % WINDOW == 0
    params = jax.tree.map(lambda a, b: jnp.where(first, 0.0, a) + b / WINDOW, course.params, params)
    number = (course.rounds % WINDOW + 1).astype(loss.dtype)
    mean = jnp.where(first, 0.0, course.loss)
    off = loss - mean
    mean = mean + off / number
    squares = jnp.where(first, 0.0, course.squares) + off * (loss - mean)
    now = course._replace(rounds=course.rounds + 1, loss=mean, squares=squares, params=params)
    ends = now.rounds % WINDOW == 0
    return jax.tree.map(lambda a, b: jnp.where(ends, a, b), _closed(now), now)


def _closed(course: Course) -> Course:
    """The end of a window."""
    error = jnp.sqrt(course.squares / (WINDOW - 1) / WINDOW)
    gain = course.mean_before - course.loss
    noise = 2 * jnp.hypot(error, course.error_before)
    moves = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max(initial=0.0), course.params, course.params_before
    )
    moved = jnp.stack([jnp.zeros(()), *jax.tree.leaves(moves)]).max()
    quiet = (gain <= jnp.maximum(GAIN, noise)) & (moved <= STILL)
    return course._replace(
        mean_before=course.loss,
        error_before=error,
        params_before=course.params,
        calm=jnp.where(quiet, course.calm + 1, 0),
    )


def settled(course: Course) -> Array:
    """Whether the last windows were quiet."""
    return course.calm >= CALM
