r"""FedLap and FedLap-Cov: the work of a silo. The server is that of PVI.

Swaroop, Khan and Doshi-Velez 2025, arXiv 2501.17325. Silo ``k`` has a factor with dual variables
:math:`v_k` and :math:`V_k`,

.. math::
    t_k(w) = \exp\big(v_k' w - \tfrac12 w' V_k w\big),

and the server a normal posterior with mean :math:`w_g` and precision :math:`S_g`. The silo takes
its factor out, and approximates the local free energy of PVI by the delta method,
:math:`\mathbb{E}_q[\ell_k] \approx \ell_k` at the mean:

.. math::
    w_k &= \arg\max_w \; \ell_k(w) - v_k' w + \tfrac12 w' V_k w
    - \tfrac12 (w - w_g)' S_g (w - w_g), \\
    S_k &= S_g - V_k - \nabla^2 \ell_k(w_k) \;\;\text{(FedLap-Cov)}, \qquad
    S_k = S_g \;\;\text{(FedLap)}, \\
    v_k &\leftarrow v_k + \rho\, (S_k w_k - S_g w_g), \qquad
    V_k \leftarrow V_k + \rho\, (S_k - S_g).

The server has :math:`S_g = S_0 + \sum_k V_k` and :math:`S_g w_g = S_0 w_0 + \sum_k v_k`, with the
prior's :math:`w_0` and :math:`S_0`. At rest all :math:`w_k` are the mode of the pooled posterior,
and in FedLap-Cov :math:`S_g` is its negative Hessian there: Laplace's method.

(The paper minimises losses, and its :math:`v_k` multiplies ``w`` with the same sign.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.local.natural import FixedPoint
from numpyro_fed.local.problem import AT_REST, Local, Problem, SiloPart, Solution, proper_step
from numpyro_fed.numerics import expfam
from numpyro_fed.numerics.gaussian import Curvature, symmetric
from numpyro_fed.pvi.server import PartitionedVI
from numpyro_fed.pvi.silo import ServerState
from numpyro_fed.search.expand import derivatives

MAX_STEPS = 100  # of Newton's method: a logistic regression takes some ten from a vague prior
# Squared length of a step, in sds, at which the search ends: rounding in single precision.
SHORT = 1e-6
LEAST_EIGENVALUE = 1e-6  # of the largest: directions that neither silo nor cavity knows


@dataclass(frozen=True)
class LaplaceAtSilo(Local):
    """The mode of the silo's likelihood times the cavity, and with ``curvature`` its Hessian.

    Without it the precision stays that of the posterior from which the silo starts.
    """

    curvature: bool = True

    @property
    def share(self) -> float:
        """Return 1, or 0 without curvature: rounds then go a share that is not known."""
        return 1.0 if self.curvature else 0.0

    def solve(self, problem: Problem[SiloPart], key: Array) -> Solution[SiloPart]:
        """Climb by Newton's method with a line search; see the module."""
        family, silo_part = problem.family, problem.silo_part
        noise = problem.noise(key, 1, None)
        at_mean = noise._replace(globals=jax.tree.map(jnp.zeros_like, noise.globals))
        start, unit = problem.start, jnp.eye(family.dim)

        def objective(w: Array) -> Array:
            psi = family.ordinary(family.from_derivatives(w, jnp.zeros_like(w), unit))
            _, values = problem.log_lik(psi, silo_part, at_mean, True)
            return values.sum() + expfam.inner(problem.cavity, family.statistics(w))

        def expand(w: Array) -> tuple[Array, Array, Array]:
            found, _ = derivatives(lambda w: (objective(w), ()), w)
            return found.value, found.gradient, found.curvature

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, w, (value, g, A), _ = state
            # Absolute eigenvalues lead uphill from where the function curves upwards.
            direction = Curvature.of(A).positive(LEAST_EIGENVALUE).solve(g)
            least = value - jnp.finfo(value.dtype).eps * jnp.abs(value)
            moved, _ = proper_step(lambda at: objective(at) >= least, w, w + direction, 1.0)
            return number + 1, moved, expand(moved), g @ direction

        # Steps so far, place, derivatives there, and squared length of the last step.
        w: Array = family.centre(start)
        first = jnp.zeros((), jnp.int32), w, expand(w), jnp.asarray(jnp.inf, w.dtype)
        _, w, (_, g, A), length = jax.lax.while_loop(
            lambda state: (state[0] < MAX_STEPS) & (state[3] > SHORT), step, first
        )
        if not self.curvature:
            log_q = jax.jacfwd(
                jax.grad(lambda w: expfam.inner(family.natural(start), family.statistics(w)))
            )
            g, A = jnp.zeros_like(g), -symmetric(log_q(w))
        return Solution(
            family.from_derivatives(w, g, A), silo_part, length <= AT_REST**2, all_finite((g, A))
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class FedLapRounds(PartitionedVI):
    """The rounds of FedLap: those of PVI, with another first factor for the prior."""

    remedy: ClassVar[str] = "start='mode', or a smaller rho"

    def init_server(self, key: Array) -> ServerState:
        # Before any silo has answered the prior may have no mode, or no curvature beside a kink.
        by_draws = replace(self, prior_local=FixedPoint())
        return super(FedLapRounds, by_draws).init_server(key)
