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
is the mode. Here it is only where the search begins. Steps of a silo cost no exchange. Silos of one
process climb side by side, so that a step of all of them is one call of the search's program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.rounds.exchange import AskSilos, Exchange, Reply, StackedExchange
from numpyro_fed.search.expand import Expand, Expansion, Prior, SiloState, flat_size, shape
from numpyro_fed.search.newton import ModeSearch, Start, kicked
from numpyro_fed.text.binding import Rows

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

    A: np.ndarray
    b: np.ndarray
    arrived: np.ndarray


def climb(
    expand: Expand,
    prior: Prior,
    share: float,
    places: np.ndarray,
    state: SiloState,
    data: SiloData,
    *,
    fixed: int = 0,
) -> tuple[Expansion[np.ndarray], np.ndarray, Rows, np.ndarray]:
    """Return where damped Newton climbs of silos end, from places (silos, starts, n).

    It is the silo's share of the posterior there, its log likelihood (silos, starts), the modes of
    its rows, and whether the end is a mode, where another step promises little.
    ``share`` is a silo's of the ``prior``, which has no effects. The ``fixed`` first coordinates
    stay as they are.
    """
    side, n = places.shape[:2], places.shape[-1]

    def at(
        places: np.ndarray, least: np.ndarray | float, state: SiloState
    ) -> tuple[Expansion[np.ndarray], np.ndarray, Rows]:
        """Return the silos' shares of the posterior, their log likelihoods, and the rows' modes."""
        # Modes move where the share is ``least`` or above.
        none = np.zeros((len(places) * side[1], 0, 0), places.dtype)
        all_of_prior = prior(none, places.reshape(-1, n))
        of_prior = [share * a.reshape(*side, *a.shape[1:]) for a in all_of_prior[1:]]
        needed = (least - of_prior[0]).astype(places.dtype)
        up, modes = expand(places, needed, state, data)
        value, g, A = (a + b for a, b in zip(up, of_prior, strict=True))
        g[..., :fixed] = A[..., :fixed] = A[..., :fixed, :] = 0.0
        return Expansion(places, value, g, A), up.value, modes

    place, likelihood, z_L = at(places, -np.inf, state)
    damping, going = np.full(side, DAMPING), np.ones(side, bool)
    for _ in range(MAX_STEPS):
        curvature = Curvature.of(place.curvature)
        pull = kicked(curvature, place.gradient)
        u = pull / (np.abs(curvature.values) + damping[..., None])
        moved = place.x + curvature.across(u) * going[..., None]
        least = np.where(going, place.value, np.inf)
        trial, of_rows, z_L = at(moved.astype(places.dtype), least, state._replace(z_L=z_L))
        better = going & _finite(trial) & (trial.value >= place.value)
        place = Expansion(*(_where(better, a, b) for a, b in zip(trial, place, strict=True)))
        likelihood = np.where(better, of_rows, likelihood)
        damping = damping * np.where(better, 0.2, 10.0)
        going = going & (damping < MAX_DAMPING) & ((pull * u).sum(-1) > MIN_GAIN)
        if not going.any():
            break
    A = Curvature.of(place.curvature).positive(FLAT).matrix()
    promise = 0.5 * (place.gradient * Curvature.of(A).solve(place.gradient)).sum(-1)
    return place, likelihood, z_L, _finite(place) & (promise <= MAX_GAIN * n)


@dataclass(frozen=True, eq=False)
class OwnModes:
    """The exchange in which silos climb to modes of their own, from each start of a search."""

    search: ModeSearch

    @property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell their parabolas."""
        k, n = self.search.num_starts, flat_size(self.search.model)
        return StackedExchange(
            "own modes",
            self.reply,
            messages=lambda: (shape(k, n), Parabola(shape(k, n, n), shape(k, n), shape(k))),
        )

    @np.errstate(all="ignore")
    def reply(
        self, noise: object, down: np.ndarray, state: SiloState, data: SiloData
    ) -> tuple[Reply[Parabola], SiloState]:
        """Return the replies and states of a stack of silos, from places (starts, n)."""
        size = len(state.top)
        search, places = self.search, np.broadcast_to(down, (size, *down.shape))
        place, likelihood, modes, arrived = climb(
            search.expand, search.prior, 1 / search.num_silos, places, state, data
        )
        A = Curvature.of(place.curvature).positive(FLAT).matrix()
        b = (A @ place.x[..., None])[..., 0] + place.gradient
        # A silo that came to no mode says nothing, and the others decide: where nothing is finite,
        # or a likelihood has kinks and so no curvature but the prior's.
        known = arrived & np.isfinite(likelihood)
        up = Parabola(_where(arrived, A, 0.0), _where(arrived, b, 0.0), arrived.astype(A.dtype))
        z_L = {p: _where(arrived, new, state.z_L[p]) for p, new in modes.items()}
        tops = np.where(known, likelihood, state.top).astype(down.dtype)
        return Reply(up, np.ones(size, bool)), state._replace(z_L=z_L, top=tops)

    @np.errstate(all="ignore")
    def begin(self, ask: AskSilos, starts: list[Start]) -> None:
        """Let all starts begin at the highest point of the sum of the silos' parabolas.

        A start whose sum is not finite stays where it is. Starts from where only few silos came to
        a mode are given up, if others led somewhere.
        """
        total = ask(self.exchange, np.stack([start.trial for start in starts]))
        for i, start in enumerate(starts):
            curvature = Curvature.of(total.A[i]).positive(FLAT)
            x = curvature.solve(total.b[i])
            if total.arrived[i] > 0 and np.isfinite(x).all():
                start.trial, start.metric = x, curvature.matrix()
            if total.arrived[i] < MIN_SHARE * total.arrived.max():
                start.done = start.left = True


def _finite(place: Expansion[np.ndarray]) -> np.ndarray:
    """Return whether all numbers of expansions (silos, starts, ...) are finite."""
    flat = [np.isfinite(a).reshape(*place.value.shape, -1).all(-1) for a in place]
    return np.asarray(np.logical_and.reduce(flat))


def _where(condition: np.ndarray, one: Any, other: Any) -> np.ndarray:
    """Return one or the other array (silos, starts, ...) by a condition (silos, starts)."""
    return np.where(condition.reshape(*condition.shape, *[1] * (np.ndim(one) - 2)), one, other)
