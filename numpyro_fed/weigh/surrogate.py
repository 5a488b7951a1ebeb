r"""Steps of particles that cost no exchange, by a parabola in the place of all likelihoods.

Silos tell the gradient of their log likelihood at every particle. By them the server fits

.. math::
    S(z_G) = g' (h(z_G) - h_0) - \tfrac12 (h(z_G) - h_0)' A\, (h(z_G) - h_0)

with the predictors ``h`` of the text (:mod:`numpyro_fed.text.predictors`), and moves particles by
many Hamiltonian trajectories through the path's density with ``S`` in the place of the likelihood,
which leave that density as it is. One exchange then tells the likelihood ``l`` at their ends, and a
particle is accepted with the probability

.. math::
    \min\big(1, \exp\{ b\, (l - S)(z') - b\, (l - S)(z) \}\big),

so that the true density is left as it is, however wrong ``S`` may be (Liu 2001, surrogate
transitions; Christen and Fox 2005). The prior is the true one in all of it: where it has a funnel
or a heavy tail, and silos know their own part as a parabola, hardly a particle is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import jit_once, map_in_batches
from numpyro_fed.numerics import linalg
from numpyro_fed.text.predictors import Predictors
from numpyro_fed.text.site_table import Theta

SHORTEST = 0.2  # share of the common step size, at least, that a particle takes
TRAJECTORIES = 2  # one after the other, in a call of the program
# Particles for each number of the parabola's matrix in a row, at least: with fewer its fit is
# that of their noise.
LEAST_PARTICLES = 3
# Spreads from the median, beyond which a particle counts less in the fit: heavy tails of a prior
# would decide it, and it is to be right where most particles are.
FAR = 4.0
SMALL = 1e-9  # share of a diagonal that is added to it, so that a matrix has an inverse
BATCH = 64  # particles whose predictors are differentiated side by side
Evaluate = Callable[[Array], tuple[Array, Array]]


class Parabola(NamedTuple):
    """The parabola in the place of the likelihood: ``h_0`` (m,), ``g`` (m,) and ``A`` (m, m)."""

    place: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray


class OnPath(NamedTuple):
    """A density of the path, with the parabola in the place of the likelihood.

    ``b`` is its place on the path, and ``root`` (dim, dim) a root of the particles' covariance.
    """

    theta: Theta
    reference: Any
    parabola: Parabola
    b: float
    root: np.ndarray


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The server's programs: the fit of a parabola, and steps of particles by it.

    ``log_prior, log_q``: The log density () of the prior at ``(theta, z_G)``, and of the
        distribution at which the path begins, at ``(theta, reference, z_G)``.
    """

    predictors: Predictors
    log_prior: Callable[[Theta, Array], Array]
    log_q: Callable[[Theta, Any, Array], Array]

    def parabola(self, z: np.ndarray, slopes: np.ndarray) -> Parabola | None:
        """Return the parabola by gradients (N, dim) of the log likelihood at particles (N, dim).

        A particle without a finite gradient does not count. It is None where too few are left.
        """
        h, g = (np.asarray(a, float) for a in self._slopes(z, slopes))
        finite = np.isfinite(h).all(1) & np.isfinite(g).all(1)
        h, g = h[finite], g[finite]
        if len(h) < LEAST_PARTICLES * self.predictors.number:
            return None
        weights = np.minimum(weights_near(h), weights_near(g))
        weights /= weights.sum()
        place, slope = weights @ h, weights @ g
        unit = np.maximum(np.sqrt(weights @ (h - place) ** 2), np.finfo(float).tiny)
        x, y = (h - place) / unit, (g - slope) * unit
        xx = (x * weights[:, None]).T @ x
        found = np.linalg.solve(
            xx + SMALL * len(xx) * np.eye(len(xx)), (x * weights[:, None]).T @ y
        )
        values, axes = np.linalg.eigh(-(found + found.T) / 2)
        curvature = (axes * np.maximum(values, 0.0)) @ axes.T  # a likelihood that has no maximum
        fitted = Parabola(place, slope, curvature / unit[:, None] / unit)
        return fitted if all(np.isfinite(a).all() for a in fitted) else None

    def move(
        self, at: OnPath, z: np.ndarray, step_size: float, leaps: int, random: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """Return where particles (N, dim) end after some trajectories, and the share accepted."""
        key = jax.random.key(random.integers(2**32, dtype=np.uint32))
        found, rate = self._moves(key, at, z, step_size, leaps)
        return np.asarray(found), float(rate)

    def values(self, parabola: Parabola, z: np.ndarray) -> np.ndarray:
        """Return ``S`` (N,) at particles (N, dim)."""
        return np.asarray(self._values(parabola, z), float)

    def _value(self, parabola: Parabola, z: Array) -> Array:
        away: Any = self.predictors(z) - parabola.place
        return parabola.slope @ away - 0.5 * away @ parabola.curvature @ away

    @cached_property
    def _values(self) -> Callable[..., Array]:
        return jit_once(jax.vmap(self._value, (None, 0)))

    @cached_property
    def _slopes(self) -> Callable[..., tuple[Array, Array]]:
        """Return the program of predictors (N, m), and gradients by them from those by globals."""

        def of_one(z: Array, slope: Array) -> tuple[Array, Array]:
            J: Array
            h, J = self.predictors(z), jax.jacfwd(self.predictors)(z)
            # The slope is J' g. Rows of J differ by many powers of ten, and are nearly orthogonal.
            length = jnp.sqrt((J**2).sum(1))
            J = J / length[:, None]
            root = linalg.cholesky(J @ J.T + SMALL * jnp.eye(len(h)))
            return h, linalg.cholesky_solve(root, J @ slope) / length

        def of_all(z: Array, slopes: Array) -> tuple[Array, Array]:
            if self.predictors.program is None:
                return z, slopes
            found: tuple[Array, Array] = map_in_batches(lambda a: of_one(*a), (z, slopes), BATCH)
            return found

        return jit_once(of_all)

    @cached_property
    def _moves(self) -> Callable[..., tuple[Array, Array]]:
        def moves(
            key: Array, at: OnPath, z: Array, step_size: Array, leaps: Array
        ) -> tuple[Array, Array]:
            def density(z: Array) -> Array:
                of_path = (1 - at.b) * self.log_q(at.theta, at.reference, z)
                posterior = self.log_prior(at.theta, z) + self._value(at.parabola, z)
                return of_path + at.b * posterior

            def evaluate(z: Array) -> tuple[Array, Array]:
                # Of a stack of matrices XLA:CPU takes each by plain loops.
                one = jax.value_and_grad(density)
                alone = self.predictors.factors_matrices
                value, slope = jax.lax.map(one, z) if alone else jax.vmap(one)(z)
                return value, jnp.where(jnp.isfinite(slope).all(1)[:, None], slope, 0.0)

            return trajectories_of(evaluate, key, z, jnp.asarray(at.root), step_size, leaps)

        return jax.jit(moves)  # it runs thousands of leapfrog steps


def weights_near(x: np.ndarray) -> np.ndarray:
    """Return weights (N,) of points (N, m) that fall off beyond ``FAR`` spreads of the median."""
    away = np.abs(x - np.median(x, axis=0))
    spread = np.maximum(np.median(away, axis=0), np.finfo(float).tiny)
    farthest: np.ndarray = (away / spread).max(1)
    return (FAR / np.maximum(farthest, FAR)) ** 4


def trajectories_of(
    evaluate: Evaluate, key: Array, z: Array, root: Array, step_size: Array, leaps: Array
) -> tuple[Array, Array]:
    """Return points (N, dim) after some trajectories, and the share accepted.

    ``evaluate`` returns a log density (N,) at points, and its gradient (N, dim).
    """

    def trajectory(carry: Any, key: Array) -> tuple[Any, Array]:
        z, value, slope = carry
        keys = jax.random.split(key, 3)
        momentum = jax.random.normal(keys[0], z.shape, z.dtype)
        step = step_size * jax.random.uniform(keys[1], (len(z), 1), z.dtype, minval=SHORTEST)
        energy = value - 0.5 * (momentum**2).sum(1)

        def leap(_: Any, at: tuple[Array, ...]) -> tuple[Array, ...]:
            z, _, slope, momentum = at
            momentum = momentum + 0.5 * step * (slope @ root)
            z = z + (step * momentum) @ root.T
            value, slope = evaluate(z)
            return z, value, slope, momentum + 0.5 * step * (slope @ root)

        *end, momentum = jax.lax.fori_loop(0, leaps, leap, (z, value, slope, momentum))
        gain = end[1] - 0.5 * (momentum**2).sum(1) - energy
        gain = jnp.where(jnp.isfinite(end[0]).all(1) & ~jnp.isnan(gain), gain, -jnp.inf)
        accepted = jnp.log(jax.random.uniform(keys[2], gain.shape, z.dtype)) < gain
        kept = tuple(
            jnp.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(end, carry, strict=True)
        )
        return kept, jnp.exp(jnp.minimum(gain, 0.0)).mean()

    first: Any = (z, *evaluate(z))
    (z, *_), rates = jax.lax.scan(trajectory, first, jax.random.split(key, TRAJECTORIES))
    return z, rates.mean()
