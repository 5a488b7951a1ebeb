r"""The first exchange of a search for the mode: each silo climbs to a mode of its own.

Silo ``j`` of ``J`` maximises its share of the posterior,

.. math::
    \ell_j(x) = \log p(y_j \mid x) + \tfrac1J \log p(x),

by Newton's method with a damping (Levenberg and Marquardt), from the place that the server sends.
It replies with the parabola at the place :math:`x_j` where it stops: the negative Hessian
:math:`A_j`, made positive, and :math:`b_j = A_j x_j + \nabla \ell_j(x_j)`. The server adds them up,
and the search goes on from the highest point of the sum,

.. math::
    x = \Big(\sum_j A_j\Big)^{-1} \sum_j b_j .

That is one-shot averaging of the silos' posteriors by their precisions, and where all are normal it
is the mode. Here it is only where the search begins. Steps of a silo cost no exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round
from numpyro_fed.algorithms.mode import (
    Expansion,
    Search,
    SiloState,
    columns_at_once,
    derivatives,
    sequential_map,
    unraveller,
)
from numpyro_fed.algorithms.saddles import kicked
from numpyro_fed.gaussian import Curvature
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.trees import all_finite, where

# Steps of a silo. From zero the six cities take 16. A Poisson rate that is far too high comes down
# by a factor of e in a step, and with raw covariates of 10^5 a search began at e^113.
MAX_STEPS = 150
MIN_GAIN = 1e-2  # predicted gain, in nats, at which a silo stops: the search goes on from there
# Nats for each coordinate that another step may promise where a climb has ended; with more it ended
# somewhere else than at a mode, and its parabola says nothing about the sum's.
MAX_GAIN = 0.5
MIN_SHARE = 0.5  # of the silos that came to a mode from the best start, for another start to go on
DAMPING = 1e-2  # at the start, for curvatures scaled to one
MAX_DAMPING = 1e8  # steps are then too small to be worth trying
# Least eigenvalue of a parabola, of the largest: a direction that a silo knows nothing about still
# has the prior's share, and one that its own rows leave flat must not draw the sum far away.
FLAT = 1e-6


class Parabola(NamedTuple):
    """A silo's message: the negative Hessian (n, n), ``b`` (n,), and 1, for each start.

    All are zero where its climb came to no mode, so that the sum of the last counts silos.
    """

    A: Array
    b: Array
    arrived: Array


class Climb(NamedTuple):
    """The state of a silo's climb."""

    best: Expansion
    z_L: Rows
    damping: Array
    steps: Array
    gain: Array

    @property
    def is_mode(self) -> Array:
        """Return whether it ends at a mode, where another step promises little."""
        best = self.best
        A = Curvature.of(best.curvature).positive(FLAT).matrix()
        promise = 0.5 * best.gradient @ Curvature.of(A).solve(best.gradient)
        return all_finite(best) & (promise <= MAX_GAIN * len(best.x))


def own_modes(fm: FederatedModel, num_silos: int) -> Round:
    """Return the round in which silos climb to modes of their own, from each start of a search.

    It leads from the first states of :func:`numpyro_fed.algorithms.mode.mode` to the same with
    other trial points. A start whose sum is not finite stays where it is.
    """
    integral, unravel = silo_integral(fm), unraveller(fm)
    derive = partial(derivatives, columns_at_once=columns_at_once(fm))

    def silo(
        noise: object, down: Array, state: SiloState, data: SiloData
    ) -> tuple[Reply[Parabola], SiloState]:
        def share_of_prior(x: Array) -> Array:
            return fm.smoothed.log_prior(*unravel(x)) / num_silos

        def expand(x: Array, z_L: Rows) -> tuple[Expansion, Rows]:
            def value(x: Array) -> tuple[Array, Rows]:
                theta, z_G = unravel(x)
                found, modes = integral({**theta, **state.private}, z_G, data, z_L)
                return found + share_of_prior(x), modes

            return derive(value, x)

        def of_start(args: tuple[Array, Rows, Array]) -> tuple[Parabola, Rows, Array]:
            place, z_L, before = args
            up, modes, top = _parabola(expand, (place, z_L))
            likelihood = top.value - share_of_prior(top.x)
            known = (up.arrived > 0) & jnp.isfinite(likelihood)
            return up, modes, jnp.where(known, likelihood, before)

        up, modes, tops = sequential_map(of_start, (down, state.z_L, state.top))
        return Reply(up, jnp.array(True)), state._replace(z_L=modes, top=tops)

    def run(state: Search, noise: object, ask: Ask) -> tuple[Search, Info]:
        total = ask("own modes", state.trial).up
        trial, metric = sequential_map(_highest_of_sum, (state.trial, total))
        # Starts from where only few silos came to a mode are given up, if others led somewhere.
        lost = total.arrived < MIN_SHARE * total.arrived.max()
        state = state._replace(trial=trial, metric=metric, done=lost, left=lost)
        return state, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange("own modes", silo),), run)


Expand = Callable[[Array, Rows], tuple[Expansion, Rows]]


def _parabola(expand: Expand, args: tuple[Array, Rows]) -> tuple[Parabola, Rows, Expansion]:
    """Return the parabola at the silo's own mode, the modes of its locals, and what is there."""
    place, z_L = args
    first, modes = expand(place, z_L)
    top = climb(expand, first, modes)
    A = Curvature.of(top.best.curvature).positive(FLAT).matrix()
    up = Parabola(A, A @ top.best.x + top.best.gradient, jnp.ones(()))
    # A silo that came to no mode says nothing, and the others decide: where nothing is finite, or a
    # likelihood has kinks and so no curvature but the prior's.
    usable = all_finite(up) & top.is_mode
    told, modes = where(usable, (up, top.z_L), (jax.tree.map(jnp.zeros_like, up), z_L))
    return told, modes, top.best


def climb(expand: Expand, first: Expansion, z_L: Rows) -> Climb:
    """Return the end of a damped Newton climb from an expansion, with the locals' modes there."""
    dtype = first.x.dtype
    start = Climb(first, z_L, jnp.array(DAMPING, dtype), jnp.array(0), jnp.array(jnp.inf, dtype))
    return jax.lax.while_loop(_goes_on, partial(_step, expand), start)


def _step(expand: Expand, climb: Climb) -> Climb:
    """Return the climb after a damped step of Newton's method, which is taken if it leads up."""
    best = climb.best
    unit, values, V = Curvature.of(best.curvature)
    pull = kicked(values, V, best.gradient / unit)
    u = pull / (jnp.abs(values) + climb.damping)
    move = V @ u / unit
    trial, modes = expand(best.x + move, climb.z_L)
    better = all_finite((trial, modes)) & (trial.value >= best.value)
    return Climb(
        where(better, trial, best),
        where(better, modes, climb.z_L),
        climb.damping * jnp.where(better, 0.2, 10.0),
        climb.steps + 1,
        pull @ u,
    )


def _goes_on(climb: Climb) -> Array:
    """Return whether another step is worth trying."""
    going = (climb.steps < MAX_STEPS) & (climb.damping < MAX_DAMPING)
    return going & (climb.gain > MIN_GAIN)


def _highest_of_sum(args: tuple[Array, Parabola]) -> tuple[Array, Array]:
    """Return the highest point (n,) of the sum of parabolas, if there is one, and its precision.

    Else it is the place before, and a precision of zero.
    """
    place, total = args
    curvature = Curvature.of(total.A).positive(FLAT)
    x = curvature.solve(total.b)
    found = jnp.isfinite(x).all() & (total.arrived > 0)
    return jnp.where(found, x, place), jnp.where(found, curvature.matrix(), 0.0)
