"""A check, after a search, that the density falls around the mode as its curvature says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import jit_once
from numpyro_fed.basics.trees import Numbers
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics.gaussian import Curvature
from numpyro_fed.rounds.exchange import AskSilos, Exchange
from numpyro_fed.rounds.names import AROUND_MODE
from numpyro_fed.rounds.stacks import StackedExchange, stacked_reply
from numpyro_fed.search.expand import (
    FEW_COORDINATES,
    ROUNDING_UNITS,
    SIDE_BY_SIDE,
    SearchState,
    columns_at_once,
    effects_of,
    flat_size,
    prior_of,
    shape,
    silo_log_likelihood,
)
from numpyro_fed.search.mode_search import BestPoints, best_start
from numpyro_fed.text.log_density import FederatedModel

# Distances from the mode, in sds by the curvature, at which the density is evaluated when a search
# has ended. At 1 and 3 it must fall as the parabola says. 30 is for directions whose curvature is
# no more than rounding, and which may be flat or only very wide.
CHECK_DISTANCES = (30.0, 3.0, 1.0)
# Nats by which a density must have fallen three sds from the mode, where a normal density has
# fallen by 4.5. A heavy tail falls by less than normal; an open direction does not fall at all.
MIN_FALL = 0.1
# A density that repeats is the same after one period and two, up to this share of it in units of
# eps, and differs after a PART of one by TELLS times as much. It is tried ASIDE sds off the mode,
# where it has a slope. A PART of a half or a third would miss a density that repeats
# two or three times in a period: it is the same there, too.
SAME, TELLS, ASIDE, PART = 1e4, 10.0, 0.5, 0.382


class CheckPoints(NamedTuple):
    """Points (k, n) at which the density is evaluated, and the index of the search they belong to.

    A silo starts from the modes of its locals in that search.
    """

    places: Numbers
    start: Numbers


class Profile(NamedTuple):
    """The parabola at the highest point, and the density around it.

    ``axes`` (n, 2 n): Directions in columns, in units of each coordinate's curvature: the
        eigenvectors of the curvature, then the coordinates.
    ``values`` (2 n,): The curvature along each. At ``threshold`` or below it is no more than
        rounding.
    ``threshold`` ().
    ``densities`` (12 n,): Log densities on both sides of the mode along each direction, at 30 sds
        (at the mode itself where the curvature is more than rounding), then 3, then 1.
    ``periods`` (n,): The shift of a coordinate after which the density is what it was, as of an
        angle; infinite where it does not repeat. It is looked for where a prior is flat: elsewhere
        copies differ.
    """

    axes: np.ndarray
    values: np.ndarray
    threshold: float
    densities: np.ndarray
    periods: np.ndarray

    def open_directions(self, value: float, names: Sequence[str]) -> tuple[str, ...]:
        """Return the directions in which the density does not fall, as combinations of ``names``.

        ``value`` is the log density at the mode.
        """
        # A fall within rounding of the density itself is no fall.
        rounding = ROUNDING_UNITS * np.finfo(self.axes.dtype).eps * abs(value)
        least = max(MIN_FALL, rounding)
        drops = value - np.asarray(self.densities)
        farther, far, near = drops.reshape(len(CHECK_DISTANCES), 2, -1)
        # Where the density is not finite at three sds, the
        # fall at one sd decides: of a parabola, a ninth.
        flat = np.where(
            np.isnan(far),
            ~(near >= least * (CHECK_DISTANCES[2] / CHECK_DISTANCES[1]) ** 2),
            far < least,
        )
        # Where the curvature is below what this precision can tell, three of its sds are not far
        # enough, and a direction that falls at 30 is not open.
        flat &= ~((farther >= least) & (self.values <= self.threshold))
        # Along an angle three of its sds may be most of a turn, where the density has risen again.
        angles = np.isfinite(self.periods)
        flat &= ~((np.abs(self.axes[angles]).max(0, initial=0.0) > 0.2) & (near >= least / 9))
        directions = []
        for k, axis in enumerate(self.axes.T):
            if flat[:, k].any():
                signed = -axis if flat[1, k] and not flat[0, k] else axis
                parts = zip(signed, names, strict=True)
                directions.append(" ".join(f"{w:+.2f} {name}" for w, name in parts if abs(w) > 0.2))
        return tuple(directions)


def _flat_coordinates(fm: FederatedModel) -> np.ndarray:
    """Return the coordinates whose prior is flat."""
    sites = [s for s in fm.named("latent") if s.name in fm.improper]
    ranges = [np.arange(s.start, s.stop) for s in sites]
    return flat_size(fm) - fm.dim + np.concatenate([np.zeros(0, int), *ranges])


def shifted_places(
    search: BestPoints[np.ndarray], flat: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return shifts (f, s) of ``flat`` coordinates (f,) after which the density may be the same.

    They are a turn, in radians, and the distances from the mode to where other starts came to rest.
    With them come places (1 + 3 f s, n): one near the mode, and the same after a shift, two shifts,
    and a part of one.
    """
    i = best_start(search)
    x, unit = search.best.x[i], Curvature.of(search.best.curvature[i]).unit
    base = x + ASIDE / unit
    turn = np.full((1, len(flat)), 2 * np.pi, x.dtype)
    shifts = np.concatenate([turn, np.abs(search.best.x[:, flat] - x[flat])]).T
    steps = shifts[:, :, None] * np.array([1.0, 2.0, PART], x.dtype)
    shifted = base + steps[..., None] * np.eye(len(x), dtype=x.dtype)[flat][:, None, None]
    return shifts, np.concatenate([base[None], shifted.reshape(-1, len(x))])


def periods_of(shifts: np.ndarray, densities: np.ndarray) -> np.ndarray:
    """Return the period (f,) of each flat coordinate, from the densities at all places.

    A turn counts before shorter periods: what users see of an angle repeats with it.
    """
    base, after = densities[0], densities[1:].reshape(*shifts.shape, 3)
    allowed = SAME * np.finfo(base.dtype).eps * max(1.0, abs(base))
    once, twice, part = np.moveaxis(np.abs(after - base), -1, 0)
    found = (once <= allowed) & (twice <= allowed) & (part > TELLS * allowed)
    shortest = np.where(found, shifts, np.inf).min(1, initial=np.inf)
    return np.where(found[:, 0], shifts[:, 0], shortest)


@dataclass(frozen=True, eq=False)
class CurvatureCheck:
    """The question to silos how the density falls around the mode that a search has found.

    A search knows the curvature alone. Where a likelihood levels off, as for separable logistic
    regression, each step predicts a small gain, and the search ends as it does at a mode. Where
    priors are flat, the density may repeat: periods are looked for as well.

    ``num_starts``: Searches side by side.
    """

    model: FederatedModel
    num_starts: int

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which silos tell their log likelihoods around the mode."""
        fm = self.model
        n, f = flat_size(fm), len(_flat_coordinates(fm))
        size = 4 * n * len(CHECK_DISTANCES) + (1 + 3 * f * (1 + self.num_starts) if f else 0)
        start: Any = jax.ShapeDtypeStruct((), np.int32)

        def values(noise: object, down: CheckPoints, state: SearchState, data: SiloData) -> Array:
            z_L = jax.tree.map(lambda a: a[down.start], state.z_L)
            of_silo = silo_log_likelihood(fm, state.private, data, z_L)
            side_by_side = min(columns_at_once(fm), len(down.places))
            return jax.lax.map(lambda x: of_silo(x)[0], down.places, batch_size=side_by_side)

        return StackedExchange(
            AROUND_MODE,
            stacked_reply(values, little=n <= FEW_COORDINATES),
            lenient=True,
            messages=lambda: (CheckPoints(shape(size, n), start), shape(size)),
        )

    @cached_property
    def _log_prior(self) -> Callable[[Numbers, Numbers], Array]:
        """Return the server's program: ``(A_b, places)`` to log priors at the places."""
        log_prior = prior_of(self.model, effects_of(self.model))

        def program(of_effects: Numbers, places: Numbers) -> Array:
            size = min(SIDE_BY_SIDE, len(places))
            return jax.lax.map(
                lambda x: log_prior(jnp.asarray(of_effects), x)[0],
                jnp.asarray(places),
                batch_size=size,
            )

        return jit_once(program)

    @np.errstate(all="ignore")
    def ask(self, ask: AskSilos, search: BestPoints[np.ndarray]) -> Profile:
        """Return the profile of the density at the best place of a search, in one exchange."""
        i = best_start(search)
        x, curvature = search.best.x[i], Curvature.of(search.best.curvature[i])
        threshold = ROUNDING_UNITS * len(x) * np.finfo(x.dtype).eps
        axes = np.concatenate([curvature.vectors, np.eye(len(x), dtype=x.dtype)], 1)
        values = np.concatenate([curvature.values, np.ones(len(x), x.dtype)])
        # A direction whose curvature is no more than rounding is looked at farther out.
        sds = (axes / np.sqrt(np.maximum(values, threshold)) / curvature.unit[:, None]).T
        unsure = np.where((values <= threshold)[:, None], sds, 0.0)
        offsets = [
            side * distance * (unsure if distance == CHECK_DISTANCES[0] else sds)
            for distance in CHECK_DISTANCES
            for side in (1, -1)
        ]
        places, around = x + np.concatenate(offsets), len(offsets) * len(sds)
        if len(flat := _flat_coordinates(self.model)):
            shifts, shifted = shifted_places(search, flat)
            places = np.concatenate([places, shifted])
        places = places.astype(x.dtype)
        of_silos = ask(self.exchange, CheckPoints(places, np.asarray(i, np.int32)))
        of_prior = jax.block_until_ready(self._log_prior(search.effects_curvature[i], places))
        densities, periods = of_silos + np.asarray(of_prior), np.full(len(x), np.inf)
        if len(flat):
            periods = periods.astype(densities.dtype)
            periods[flat] = periods_of(shifts, densities[around:])
        return Profile(axes, values, threshold, densities[:around], periods)
