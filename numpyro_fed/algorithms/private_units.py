"""Units of privacy: their gradients, clipped, and sums of them with noise.

A unit is a row with its own latents, which are integrated out, or a whole silo. A sum over units
whose lengths are clipped to ``C`` changes by at most ``C`` where a unit is added or taken away; the
noise is that times a multiplier, which the budget determines (``privacy/budget.py``). Units are
clipped, summed and hidden by noise on the host, in double precision: a dishonest server may choose
places and frames at which rounding in single precision is far longer than a clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.noisy_curvature import as_vector
from numpyro_fed.integrals.quadrature import RowIntegrals, silo_integral
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.privacy.noise import in_double

# Bins of a histogram: powers of two. What is zero, as in rows that only fill up a shape, is not
# counted.
LOWEST, HIGHEST = -100, 100
# Counts below so many sds of their noise are taken as zero. A run looks at some ten thousand bins,
# and one that noise alone lifts above, far from all others, would be taken for a length: with 4.0
# that came to pass in every sixth run.
COUNTS = 5.5
WITHIN_BIN = 0.625  # the mean length of a bin's units as a share of its end
UNCLIPPED = 0.98  # the share of units that are never clipped
# The share of the units below which bins are not seen: above it clips are a guess. The number of
# units is known up to a half.
COARSE = 0.08
Noisy = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class PrivateUnits:
    """The units of a model at silos, and the noise that hides each of them.

    Parameters
    ----------
    model : FederatedModel
        A model whose units stand alone.
    num_silos : int
    per_silo : bool
        Whether a unit is a whole silo.
    noise : (total, sd) -> total with noise
        On the host, in double precision.
    noise_share : float
        The part of the noise's sd that a silo adds.
    changes : float
        Units' lengths by which a sum may change between neighbouring data.
    nodes : int
        Nodes of quadrature for rows' latents; 0 without latents.
    """

    model: FederatedModel
    num_silos: int
    per_silo: bool
    noise: Noisy
    noise_share: float = 1.0
    changes: float = 1.0
    nodes: int = 0

    def log_likelihoods(self, z: Array, data: SiloData) -> Array:
        """Return the log likelihood of each unit (units,), latents integrated out."""
        fm = self.model
        start = {p.name: jnp.zeros((fm.sizes(data)[p.name], p.dim)) for p in fm.plates if p.dim}
        if self.per_silo:
            return silo_integral(fm)({}, z, data, start)[0][None]
        # What a row holds must not change the terms of others, such as the end of their search.
        rows = RowIntegrals(fm, self.nodes or 1, {"apart": True})
        near = rows.near({}, z, data, start)
        # The key is for latents of an outer plate, which there are none of here.
        terms = rows.log_rows(jax.random.key(0), {}, z, near, data)
        return jnp.concatenate(list(terms.values()))

    def gradients(self, z: Array, L: Array, data: SiloData) -> Array:
        """Return the gradient of each unit (units, d) at ``z``, in the frame ``L`` (d, d)."""
        return jax.jacfwd(lambda u: self.log_likelihoods(z + L @ u, data))(jnp.zeros_like(z))

    def curvatures(self, z: Array, L: Array, data: SiloData) -> Array:
        """Return the negative Hessian of each unit (units, d, d) at ``z``, in the frame ``L``."""
        return -jax.jacfwd(jax.jacfwd(lambda u: self.log_likelihoods(z + L @ u, data)))(
            jnp.zeros_like(z)
        )

    def added(self, counts: Array, change: Array, multiplier: Array) -> Array:
        """Return counts with this silo's noise, which a unit changes by at most ``change``."""
        return in_double(self.noise, _like(counts), counts, self._sd(change, multiplier))

    def sum_of(self, units: Array, clip: Array, multiplier: Array) -> Array:
        """Return the sum of units (n, m), none of which is longer than ``clip``, with noise."""

        def on_host(units: np.ndarray, clip: np.ndarray, sd: np.ndarray) -> np.ndarray:
            return self.noise(clipped(units, clip).sum(0), sd)

        sd = self._sd(clip, multiplier)
        return in_double(on_host, _like(units[0]), units, jnp.abs(clip), sd)

    def sum_of_curvatures(self, C: Array, clip: Array, multiplier: Array) -> Array:
        """Return :meth:`sum_of` symmetric matrices (n, d, d) as vectors (d * (d + 1) / 2,)."""
        return self.sum_of(jax.vmap(as_vector)(C), clip, multiplier)

    def sum_of_products(
        self, g: Array, clip: Array, clip_product: Array, multiplier: Array
    ) -> Array:
        """Return the sum of products ``g g'`` of clipped units (n, d) as a vector, with noise.

        None of them is longer than ``clip_product``.
        """
        d = g.shape[1]
        rows, columns = np.triu_indices(d)
        scale = np.where(rows == columns, 1.0, math.sqrt(2))  # as in as_vector

        def on_host(
            g: np.ndarray, clip: np.ndarray, clip_product: np.ndarray, sd: np.ndarray
        ) -> np.ndarray:
            g = clipped(g, clip)
            length = np.maximum((g**2).sum(1), 1e-300)  # of g g'
            product = (g * np.minimum(1.0, clip_product / length)[:, None]).T @ g
            return self.noise(product[rows, columns] * scale, sd)

        like = jax.ShapeDtypeStruct((len(rows),), g.dtype)
        clips = jnp.abs(clip), jnp.abs(clip_product)
        return in_double(on_host, like, g, *clips, self._sd(clip_product, multiplier))

    def _sd(self, change: Array, multiplier: Array) -> Array:
        """Return the sd of this silo's noise, where a unit changes a sum by at most ``change``."""
        return jnp.abs(change) * multiplier * self.changes * self.noise_share

    @property
    def spread(self) -> float:
        """Return the sd of the sum of all silos' noise, for a unit's length of one."""
        return self.changes * self.noise_share * math.sqrt(self.num_silos)


def histogram(sizes: Array) -> Array:
    """Return how many sizes (n,) lie below each power of two and above the one before it.

    What is zero or not finite is not counted.
    """
    power = jnp.ceil(jnp.log2(jnp.where(sizes > 0, sizes, 1.0)))
    place = jnp.clip(power, LOWEST, HIGHEST).astype(jnp.int32) - LOWEST
    counted = jnp.isfinite(sizes) & (sizes > 0)
    bins = jnp.zeros(HIGHEST - LOWEST + 1)
    return bins.at[place].add(jnp.where(counted, 1.0, 0.0))


def quantile(counts: Array, sd: Array, q: float) -> Array:
    """Return the power of two below which a share ``q`` lies, of counts with noise; 0 if none.

    Where so few units as lie above it cannot be told from noise it is twice as large.
    """
    clear = jnp.where(counts > COUNTS * sd, counts, 0.0)
    share = jnp.cumsum(clear) / jnp.maximum(clear.sum(), 1e-30)
    found = 2.0 ** (jnp.argmax(share >= q) + LOWEST)
    hidden = COUNTS * sd > (1 - q) * clear.sum()
    return jnp.where(clear.sum() > 0, jnp.where(hidden, 2 * found, found), 0.0)


def best_clip(counts: Array, sd: Array, noise: Array, dim: int) -> Array:
    """Return the power of two at which it is best to clip, of counts with noise; 0 if none.

    What is clipped moves the sum of gradients in ``dim`` directions, over which the excesses of the
    units are spread. Noise moves it in each of them by the length times ``noise``. The sum of the
    squares of both is least, among lengths that at most a fiftieth of the units exceeds: a sum of
    which more is cut off has less curvature than its units.
    """
    clear = jnp.where(counts > COUNTS * sd, counts, 0.0)
    places = jnp.arange(len(counts))
    top = jnp.argmax(jnp.where(clear > 0, places, -1))
    seen = clear.sum() > 0
    # In the two bins above the last one that is seen there may be as many as their noisy counts,
    # and one sd more: of few units noise hides a fifth.
    above = (places > top) & (places <= top + 2)
    clear = jnp.where(above, jnp.maximum(counts, 0.0), clear)
    share = jnp.cumsum(clear) / jnp.maximum(clear.sum(), 1e-30)
    clear = jnp.where(places == top + 1, clear + sd, clear)
    sizes = 2.0 ** jnp.clip(places - top, -60, 60)
    excess = jnp.maximum(WITHIN_BIN * sizes - sizes[:, None], 0.0)
    cost = (excess * clear).sum(1) ** 2 / dim + dim * (noise * sizes) ** 2
    cost = jnp.where(share >= UNCLIPPED, cost, jnp.inf)
    found = 2.0 ** (jnp.argmin(cost) + LOWEST).astype(counts.dtype)
    return jnp.where(seen, found, 0.0)


def is_coarse(sd: Array, num_units: Array | int) -> Array:
    """Return whether noise of this sd hides bins with many of so many units."""
    return COUNTS * sd > COARSE * num_units


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


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
