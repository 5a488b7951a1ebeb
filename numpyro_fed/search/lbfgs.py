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
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_fed.basics.programs import map_in_batches
from numpyro_fed.basics.trees import Numbers, namespace, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.exchange import AskSilos, Reply
from numpyro_fed.rounds.stacks import of_stack
from numpyro_fed.search.expand import (
    BATCH,
    NUDGE,
    Aux,
    Expansion,
    SearchState,
    SiloExpansion,
    flat_size,
    log_prior_of,
    shape,
    silo_expansion,
)
from numpyro_fed.search.mode_search import Ascent, AscentPhase, ModeSearch, rounding_of
from numpyro_fed.text.site_table import Rows

# Pairs that L-BFGS keeps. An exchange with silos costs far more than the products with the pairs,
# so more than the usual ten; each takes the memory of two vectors of globals at the server.
LBFGS_PAIRS = 30
# Steps after which the diagonal is computed again; then after 16, 32, ... It costs as much as
# ``n`` gradients and empties L-BFGS's memory, so the gaps double.
FIRST_REFRESH = 8
ARMIJO = 1e-4  # share of the predicted gain that a step must reach: Nocedal and Wright's value
# Factor of a step that failed; each try is an exchange, so shorter than the usual half.
BACKTRACK = 0.25
MIN_SHARE = 1e-6  # of a step: below it the direction is given up
MAX_IDLE = 10  # steps in a row that gain little, after which the search is at a mode
MIN_GAIN = 1e-3  # nats: a step that gains less counts as one of these

LBFGS = optax.scale_by_lbfgs(LBFGS_PAIRS)
_lbfgs_update = jax.jit(LBFGS.update)


class PlacesToTry(NamedTuple):
    """A message of the server: a point (n,) for each start, and whether to send the diagonal."""

    place: Numbers
    with_diagonal: Numbers


@dataclass
class LBFGSAscent(Ascent):
    """The search from one place by L-BFGS; its best point has the latest diagonal of the Hessian.

    ``direction`` (n,): The next point is ``best.x + share * direction``.
    ``slope``: The derivative of the density with respect to ``share``.
    ``memory``: The state of L-BFGS, in the coordinates that it scales.
    ``with_diagonal``: Whether silos compute the diagonal at the next point.
    ``steps``: Steps that led up.
    """

    direction: np.ndarray = field(default_factory=lambda: np.zeros(0))
    slope: float = 0.0
    share: float = 1.0
    memory: optax.OptState = None
    with_diagonal: bool = True
    steps: int = 0

    def advance(self, point: Expansion[np.ndarray], max_places: int | None) -> None:
        """Keep the trial if it is better than the best point, and choose the next one."""
        if self.phase is AscentPhase.ENDED:
            return
        finite = all(np.isfinite(a).all() for a in point[1:])
        if self.phase is AscentPhase.GOING_BACK:  # the last exchange was for the diagonal
            if self.best is not None and finite:
                self.best = self.best._replace(curvature=point.curvature)
            self.phase, self.with_diagonal = AscentPhase.ENDED, False
            return
        self.tried += 1
        no_more_places = max_places is not None and self.tried >= max_places
        if self.best is None and not finite:
            self.halve(no_more_places)
            return
        best = point if self.best is None else self.best
        refresh, stuck, rounding = False, False, rounding_of(best.value)
        # Armijo's rule: a share of what the slope predicts.
        least = best.value + ARMIJO * self.share * self.slope - rounding
        if self.with_diagonal and finite:  # the trial was the best point itself
            self._turn(point, forget=True)
        elif self.with_diagonal or not (finite and point.value >= least):
            if self.share > MIN_SHARE or self.with_diagonal:
                self.share *= BACKTRACK
            elif self.memory.count <= 1:  # the direction was the gradient itself
                stuck = True
            else:
                self._turn(best, forget=True)
        else:
            little = point.value - best.value <= max(MIN_GAIN, rounding)
            self.idle = self.idle + 1 if little else 0
            self.steps += 1
            refresh = self.steps >= FIRST_REFRESH and self.steps.bit_count() == 1
            self._turn(point._replace(curvature=best.curvature), forget=False)
        self.at_mode = self.idle >= MAX_IDLE
        ends = self.at_mode or stuck or no_more_places
        self.phase = AscentPhase.GOING_BACK if ends else self.phase
        self.with_diagonal = ends or refresh
        x = point.x if self.best is None else self.best.x
        self.trial = x if self.with_diagonal else x + self.share * self.direction

    def _turn(self, best: Expansion[np.ndarray], *, forget: bool) -> None:
        """Take the best point, and the next direction from there."""
        # It is L-BFGS's, or where that leads down the scaled gradient, at most one unit long.
        x, _, g, diagonal = self.best = best
        unit = np.sqrt(nonzero(diagonal))
        memory = LBFGS.init(jax.device_put(x)) if forget else self.memory
        downhill, self.memory = _lbfgs_update(-g / unit, memory, x * unit)
        direction = -np.asarray(downhill) / unit
        if not (np.isfinite(direction).all() and g @ direction > 0):
            direction = g / unit
            direction = direction / max(float(np.linalg.norm(direction)), 1.0) / unit
        self.direction, self.slope, self.share = direction, float(g @ direction), 1.0


@dataclass(frozen=True, eq=False)
class LBFGSSearch(ModeSearch[LBFGSAscent, PlacesToTry]):
    """The search by L-BFGS; it integrates no effects out."""

    aside = NUDGE
    ascent = LBFGSAscent

    def messages(self) -> tuple[PlacesToTry, SiloExpansion[Any]]:
        k, n = self.num_starts, flat_size(self.model)
        yes: Any = jax.ShapeDtypeStruct((), bool)
        return PlacesToTry(shape(k, n), yes), SiloExpansion(shape(k), shape(k, n), shape(k, n))

    @cached_property
    def _at_silos(self) -> Callable[..., tuple[SiloExpansion[Array], Any]]:
        """Return the silos' program: replies, and modes and last finite replies, for each start."""

        def at_silo(noise: object, down: PlacesToTry, state: SearchState, data: SiloData) -> Any:
            derive = partial(with_slope, with_diagonal=jnp.asarray(down.with_diagonal))

            def at_start(args: tuple[Array, Rows, SiloExpansion[Array]]) -> Any:
                x, z_L, before = args
                up, modes, finite = silo_expansion(derive, self.model, state.private, data, z_L, x)
                # The modes of a failed point are no start for the next search.
                return up, where(finite, (modes, up), (z_L, before))

            z_L: Rows = jax.tree.map(jnp.asarray, state.z_L)
            # Not side by side: SIDE_BY_SIDE.
            return jax.lax.map(at_start, (jnp.asarray(down.place), z_L, state.place))

        return of_stack(at_silo, little=False)

    def answer_mode(
        self, noise: object, down: PlacesToTry, state: SearchState, data: SiloData
    ) -> tuple[Reply[SiloExpansion[np.ndarray]], SearchState]:
        up, (modes, place) = jax.block_until_ready(self._at_silos((), down, state, data))
        told: SiloExpansion[np.ndarray] = jax.tree.map(np.asarray, up)
        return Reply(told, np.ones(len(told.value), bool)), state._replace(z_L=modes, place=place)

    @cached_property
    def _prior(self) -> Callable[[Numbers, Numbers], Expansion[Array]]:
        """Return the server's program: ``(places, with_diagonal)`` to expansions (starts, ...)."""
        log_prior = partial(log_prior_of, self.model, self.effects, np.zeros((0, 0)))
        return jax.jit(
            lambda places, with_diagonal: jax.lax.map(
                lambda x: with_slope(log_prior, x, jnp.asarray(with_diagonal))[0],
                jnp.asarray(places),
            )
        )

    def ask_and_advance(
        self, ask: AskSilos, ascents: list[LBFGSAscent], places: np.ndarray
    ) -> None:
        diagonal = np.asarray(any(ascent.with_diagonal for ascent in ascents))
        up = ask(self.exchange, PlacesToTry(places, diagonal))
        prior = jax.block_until_ready(self._prior(places, diagonal))
        for i, ascent in enumerate(ascents):
            total = (np.asarray(a)[i] + b[i] for a, b in zip(prior[1:], up, strict=True))
            ascent.advance(Expansion(places[i], *total), self.max_places)


def with_slope(
    f: Callable[[Array], tuple[Array, Aux]], x: Array, with_diagonal: Array
) -> tuple[Expansion[Array], Aux]:
    """Return the expansion of ``f``, whose curvature is the diagonal or zeros, and ``aux``."""
    (value, aux), g = jax.value_and_grad(f, has_aux=True)(x)

    def diagonal() -> Array:
        _, column = jax.linearize(jax.grad(lambda x: f(x)[0]), x)

        return map_in_batches(
            lambda i: -column(jnp.zeros_like(x).at[i].set(1.0))[i], jnp.arange(len(x)), BATCH
        )

    return Expansion(
        x, value, g, jax.lax.cond(with_diagonal, diagonal, lambda: jnp.zeros_like(x))
    ), aux


def nonzero(diagonal: Numbers) -> Numbers:
    """Return absolute curvatures (n,), and one where they are zero."""
    xp = namespace(diagonal)
    size = xp.abs(diagonal)
    return xp.where(size > 0, size, 1.0)
