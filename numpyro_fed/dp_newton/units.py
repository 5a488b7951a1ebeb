"""Units of privacy: their gradients, clipped, and sums of them with noise.

A unit is a row with its own latents, which are integrated out, or a whole silo. A sum over units
whose lengths are clipped to ``C`` changes by at most ``C`` where a unit is added or taken away; the
noise is that times a multiplier, which the budget determines (``privacy/budget.py``). Derivatives
of the text are compiled. Units are clipped, summed and hidden by noise in NumPy, in double
precision: a dishonest server may choose places and frames at which rounding in single precision is
far longer than a clip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.laplace import LatentSearch
from numpyro_fed.guides.quadrature import RowIntegrals, silo_integral
from numpyro_fed.privacy.budget import Privacy
from numpyro_fed.rounds.names import PRIVATE_SIZES, PRIVATE_SUMS, PRIVATE_UNITS
from numpyro_fed.rounds.stacks import of_stack
from numpyro_fed.text.log_density import FederatedModel

# Bins of a histogram: powers of two. What is zero, as in rows that only fill up a shape, is not
# counted.
LOWEST, HIGHEST = -100, 100
# Counts below so many sds of their noise are taken as zero. A run looks at some ten thousand bins,
# and one that noise alone lifts above, far from all others, would be taken for a length: with 4.0
# that came to pass in every sixth run.
MIN_SDS_OF_COUNT = 5.5
WITHIN_BIN = 0.625  # the mean length of a bin's units as a share of its end
UNCLIPPED = 0.98  # the share of units that are never clipped
# The share of the units below which bins are not seen: above it clips are a guess. The number of
# units is known up to a half.
MAX_SHARE_HIDDEN = 0.08
# A unit's Hessian has d^2 numbers. For more globals the product of its gradient with itself stands
# in its place, whose length is known, which is the same on average at the truth.
HESSIANS_UP_TO = 20
Noisy = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Gradients (units, d) of units' log likelihoods, and negative Hessians for few globals.
UnitDerivatives = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class PrivateUnits:
    """The units of a model at silos, and the noise that hides each of them."""

    model: FederatedModel  # whose units stand alone
    num_silos: int
    per_silo: bool  # whether a unit is a whole silo
    noise: Noisy  # (total, sd) -> total with noise, in double precision
    noise_share: float = 1.0  # the part of the noise's sd that a silo adds
    changes: float = 1.0  # units' lengths by which a sum may change between neighbouring data
    nodes: int = 0  # of quadrature for rows' latents; 0 without latents

    @property
    def has_products(self) -> bool:
        """Return whether products of gradients stand in the place of units' Hessians."""
        return self.model.dim > HESSIANS_UP_TO

    def log_likelihoods(self, z: Array, data: SiloData) -> Array:
        """Return the log likelihood of each unit (units,), latents integrated out."""
        fm = self.model
        start = {p.name: jnp.zeros((fm.sizes(data)[p.name], p.dim)) for p in fm.plates if p.dim}
        if self.per_silo:
            return silo_integral(fm)({}, z, data, start)[0][None]
        # What a row holds must not change the terms of others, such as the end of their search.
        rows = RowIntegrals(fm, self.nodes or 1, LatentSearch(apart=True))
        near = rows.near({}, z, data, start)
        # The key is for latents of an outer plate, which there are none of here.
        terms = rows.log_rows(jax.random.key(0), {}, z, near, data)
        return jnp.concatenate(list(terms.values()))

    @cached_property
    def _program(self) -> Callable[..., tuple[Array, ...]]:
        def at_silo(
            noise: object, place: tuple[Array, Array], state: object, data: SiloData
        ) -> tuple[Array, ...]:
            (z, L), origin = place, jnp.zeros_like(place[0])

            def gradients(u: Array) -> tuple[Array, Array]:
                g = jax.jacfwd(lambda u: self.log_likelihoods(z + L @ u, data))(u)
                return g, g

            if self.has_products:
                return gradients(origin)[:1]
            hessians, g = jax.jacfwd(gradients, has_aux=True)(origin)
            return g, -hessians

        return of_stack(at_silo, little=False)

    def derivatives(self, z: np.ndarray, L: np.ndarray, data: SiloData) -> UnitDerivatives:
        """Return those of units (silos, units, ...) at ``z``, in the frame ``L``."""
        found = jax.block_until_ready(self._program((), (z, L), (), data))
        g, *hessians = (np.asarray(a, float) for a in found)
        return g, hessians[0] if hessians else None

    def with_noise(self, total: np.ndarray, change: float, multiplier: float) -> np.ndarray:
        """Return a sum with this silo's noise, which a unit changes by at most ``change``."""
        sd = abs(float(change)) * multiplier * self.changes * self.noise_share
        return self.noise(total, np.asarray(sd))

    def noisy_sum(self, units: np.ndarray, clip: float, multiplier: float) -> np.ndarray:
        """Return the sum of units (n, m), none of which is longer than ``clip``, with noise."""
        return self.with_noise(clipped(units, abs(clip)).sum(0), clip, multiplier)

    @property
    def spread(self) -> float:
        """Return the sd of the sum of all silos' noise, for a unit's length of one."""
        return self.changes * self.noise_share * math.sqrt(self.num_silos)


def histogram(sizes: np.ndarray) -> np.ndarray:
    """Return how many sizes (n,) lie below each power of two and above the one before it."""
    power = np.ceil(np.log2(sizes[np.isfinite(sizes) & (sizes > 0)]))
    place = np.clip(power, LOWEST, HIGHEST).astype(int) - LOWEST
    return np.bincount(place, minlength=HIGHEST - LOWEST + 1).astype(float)


def quantile(counts: np.ndarray, sd: float, q: float) -> float:
    """Return the power of two below which a share ``q`` lies, of counts with noise; 0 if none.

    Where so few units as lie above it cannot be told from noise it is twice as large.
    """
    clear = np.where(counts > MIN_SDS_OF_COUNT * sd, counts, 0.0)
    if not clear.any():
        return 0.0
    share = np.cumsum(clear) / clear.sum()
    found = 2.0 ** (int(np.argmax(share >= q)) + LOWEST)
    return 2 * found if MIN_SDS_OF_COUNT * sd > (1 - q) * clear.sum() else found


def best_clip(counts: np.ndarray, sd: float, noise: float, dim: int) -> float:
    """Return the power of two at which it is best to clip, of counts with noise; 0 if none.

    What is clipped moves the sum of gradients in ``dim`` directions, over which the excesses of the
    units are spread. Noise moves it in each of them by the length times ``noise``. The sum of the
    squares of both is least, among lengths that at most a fiftieth of the units exceeds: a sum of
    which more is cut off has less curvature than its units.
    """
    clear = np.where(counts > MIN_SDS_OF_COUNT * sd, counts, 0.0)
    if not clear.any():
        return 0.0
    top = int(np.flatnonzero(clear).max())
    # In the two bins above the last one that is seen there may be as many as their noisy counts,
    # and one sd more: of few units noise hides a fifth.
    above = slice(top + 1, top + 3)
    clear[above] = np.maximum(counts[above], 0.0)
    share = np.cumsum(clear) / clear.sum()
    clear[top + 1 : top + 2] += sd
    sizes = 2.0 ** np.clip(np.arange(len(counts)) - top, -60, 60)
    excess = np.maximum(WITHIN_BIN * sizes - sizes[:, None], 0.0)
    cost = (excess * clear).sum(1) ** 2 / dim + dim * (noise * sizes) ** 2
    return float(2.0 ** (np.argmin(np.where(share >= UNCLIPPED, cost, np.inf)) + LOWEST))


def clipped(units: np.ndarray, most: np.ndarray | float) -> np.ndarray:
    """Return units (n, m) whose lengths are at most ``most``; 0 for what is not finite."""
    # In units of the largest number, since squares of tiny ones would be lost, and with them the
    # length that is to be cut.
    largest = np.abs(units).max(1, initial=0.0)
    usable = np.isfinite(largest) & (largest > 0)
    scale = np.where(usable, largest, 1.0)
    units = np.where(usable[:, None], units, 0.0)
    length = np.where(usable, scale * np.sqrt(((units / scale[:, None]) ** 2).sum(1)), 1.0)
    return np.asarray(units * np.minimum(1.0, most / length)[:, None])


def as_vector(matrices: np.ndarray) -> np.ndarray:
    """Return symmetric matrices (..., d, d) as vectors of the same length (Frobenius)."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    scaled: np.ndarray = matrices[..., rows, columns] * np.where(rows == columns, 1.0, 2**0.5)
    return scaled


def as_symmetric(vector: np.ndarray, d: int) -> np.ndarray:
    """Return the matrix (d, d) of :func:`as_vector`."""
    rows, columns = np.triu_indices(d)
    half = np.zeros((d, d))
    half[rows, columns] = vector / np.where(rows == columns, 2.0, 2**0.5)
    return half + half.T


# Shares of the budget: of the first units, of the search, and of the phases after it.
UNITS_SHARE, SEARCH_SHARE, AFTER_SEARCH_SHARES = 0.05, 0.2, (0.2, 0.55)
# The first steps go far and need little precision, but lengths must be told from the noise of their
# histogram. A log scale that begins far too low rises by a half in a step at most, so that a
# regression of outcomes near 100, whose sd is 12, takes some sixteen steps (eight phases) from 1.
MAX_SEARCH_PHASES = 12  # phases
MIN_SHARE_SEEN = 0.1  # share of the units from which a bin of a histogram must be told from noise
# For many globals noise hides most directions from a small share, and frames by it are poor: fewer
# phases of more steps, and no search.
PHASES_OF_MANY = 0.1, 0.25, 0.6
STEPS, STEPS_OF_MANY = 2, 3  # in each phase
# Of a phase's share: for sizes, for all gradients, and for all curvatures.
SHARES, SHARES_OF_MANY = (0.1, 0.63, 0.27), (0.02, 0.69, 0.29)


class Phase(NamedTuple):
    """The noise multipliers of a phase: of its histogram, and of both sums of each step."""

    sizes: float
    gradient: float
    curvature: float


@dataclass(frozen=True)
class Releases:
    """The noise multipliers of all that a private search sends, in order."""

    units: float  # that of the first units of the frame
    phases: tuple[Phase, ...]
    steps: int  # in each phase
    # Phases, at the beginning, that search for the mode. Those left when it is found are not made.
    search: int = 0

    @classmethod
    def of(cls, privacy: Privacy, dim: int, num_units: int, num_silos: int) -> Releases:
        """Return the schedule that spends a budget on ``dim`` globals."""
        if dim > HESSIANS_UP_TO:
            kinds, steps, search = SHARES_OF_MANY, STEPS_OF_MANY, 0
            shares: tuple[float, ...] = PHASES_OF_MANY
        else:
            kinds, steps = SHARES, STEPS
            # The share from which a histogram shows a bin with a few of the units.
            whole = privacy.multiplier() * privacy.changes * privacy.noise_share(num_silos)
            sd = whole * math.sqrt(2 * num_silos / kinds[0])
            least = (MIN_SDS_OF_COUNT * sd / (MIN_SHARE_SEEN * num_units)) ** 2
            search = min(max(int(SEARCH_SHARE / least), 1), MAX_SEARCH_PHASES)
            shares = (*(SEARCH_SHARE / search,) * search, *AFTER_SEARCH_SHARES)
        # A phase's gradients and curvatures are as many as its steps.
        each = [kinds[0], kinds[1] / steps, kinds[2] / steps]
        units, *rest = privacy.multipliers((UNITS_SHARE, *(s * k for s in shares for k in each)))
        phases = tuple(Phase(*rest[i : i + 3]) for i in range(0, len(rest), 3))
        return cls(units, phases, steps, search)

    def releases(self, made: Iterable[bool] | None = None) -> tuple[tuple[str, float], ...]:
        """Return what is sent by kind of exchange, with its noise multiplier, in phases made."""
        releases = [(PRIVATE_UNITS, self.units)]
        was_made = [True] * len(self.phases) if made is None else made
        for phase in itertools.compress(self.phases, was_made):
            sums = (PRIVATE_SUMS, phase.gradient), (PRIVATE_SUMS, phase.curvature)
            releases += [(PRIVATE_SIZES, phase.sizes), *sums * self.steps]
        return tuple(releases)
