"""The local optimiser by L-BFGS, on fixed noise."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.errors import positive_int
from numpyro_fed.expfam.base import Ordinary
from numpyro_fed.local.at_rest import maximised
from numpyro_fed.local.base import (
    AT_REST,
    Problem,
    SiloPart,
    Solution,
    free_energy,
    minimise,
)


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Optax's L-BFGS on fixed noise: deterministic, and quick for few parameters.

    Parameters
    ----------
    steps : int
        The largest number of steps.
    num_particles : int
        Draws of the globals, the same in every step. Their number sets the error of the optimum.
        With more draws than dimensions, standard normal noise is standardised, so that the optimum
        is exact for a Gaussian. With twice as many, draws come in pairs of opposite sign. With
        fewer draws than dimensions, a full covariance is fitted to the draws.
    tolerance : float
        The search ends when no component of the gradient is larger. Convergence of the visit is
        then checked as for :class:`Optax`, by fresh draws, with a tolerance of a tenth of a
        standard deviation.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.local.LBFGS(num_particles=256).steps
    200
    """

    steps: int = 200
    num_particles: int = 64
    tolerance: float = 1e-3
    batch_size: None = None
    share = 1.0
    closed_form = False
    any_divergence = True
    standardises = True

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        positive_int("num_particles", self.num_particles)

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Run L-BFGS; see the class."""
        # Fresh draws for the check: at those of the fit the gradient vanishes whatever they are.
        key_fit, key_judge = jax.random.split(key)
        noise = problem.noise(key_fit, self.num_particles, None)
        noise = noise._replace(globals=jax.tree.map(standardised, noise.globals))

        def loss(params: tuple[Ordinary, SiloPart]) -> Array:
            return -free_energy(problem, *params, noise, plain=True)[0]

        start = (problem.start, problem.silo_part)
        (psi, silo_part), value, _ = minimise(loss, start, self.steps, self.tolerance)
        converged = maximised(problem, psi, silo_part, key_judge, AT_REST)
        return Solution(problem.family.natural(psi), silo_part, converged, jnp.isfinite(value))


def standardised(noise: Array) -> Array:
    """Return normal noise (n, dim) with sample mean zero and, for enough draws, covariance one.

    With more than two draws for each dimension, they come in pairs of opposite sign, and all odd
    moments vanish.
    """
    # The noise of Gamma and other families is keys, which are no floats.
    if not jnp.issubdtype(noise.dtype, jnp.floating):
        return noise
    n, dim = noise.shape
    if n % 2 == 0 and n > 2 * dim:
        noise = jnp.concatenate([noise[: n // 2], -noise[: n // 2]])
    centred = noise - noise.mean(0)
    if n <= dim + 1:
        return centred / jnp.maximum(centred.std(0), 1e-3) if n > 2 else noise
    L = linalg.cholesky(centred.T @ centred / len(noise))
    return linalg.solve(L, centred.T).T
