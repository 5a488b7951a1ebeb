r"""BayesADMM: the alternating direction method of multipliers for posteriors.

Möllenhoff, Swaroop, Doshi-Velez and Khan 2025, arXiv 2506.13150. The posterior is a member of an
exponential family with natural parameters :math:`\eta`, and the prior is :math:`\eta_0`. Each of
``J`` silos has a log likelihood :math:`\ell_j` and a multiplier :math:`\lambda_j`, at first zero;
the server has :math:`\eta_s`, at first the prior. In a round

.. math::
    q_j &= \arg\max_q \; \mathbb{E}_q[\ell_j] - \langle \lambda_j, \mathbb{E}_q[T] \rangle
    - \rho\, \mathrm{KL}(q \,\|\, q_s), \\
    \lambda_j &\leftarrow \lambda_j + \rho\, (\eta_j - \eta_s), \\
    \eta_s &\leftarrow (1 - a)\, \tfrac1J \textstyle\sum_j \eta_j
    + a\, \big(\eta_0 + \sum_j \lambda_j\big), \qquad a = \tfrac{1}{1 + J \rho}.

**A silo's problem is that of PVI.** Divided by :math:`\rho` it is
:math:`\mathbb{E}_q[\ell_j / \rho] - \mathrm{KL}(q \,\|\, c_j)` with the cavity
:math:`c_j = \eta_s - \lambda_j / \rho`, and the next multiplier is :math:`\rho\,(\eta_j - c_j)`. At
the optimum it is the natural gradient of :math:`\mathbb{E}_q[\ell_j]`, as PVI's factor is.

**The server is that of PVI**, which adds up changes. Since :math:`(1 - a) / J = a \rho`,

.. math::
    \eta_s = \eta_0 + \sum_j f_j, \qquad
    f_j = a\, \big(\lambda_j + \rho\, (\eta_j - \eta_0)\big).

A silo sends the change of :math:`f_j`, so that a silo that is left out of a round keeps its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import Array

from numpyro_fed.basics.trees import where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.local.problem import LocalNoise, Problem
from numpyro_fed.numerics.expfam.family import Natural, Ordinary
from numpyro_fed.pvi.server import PartitionedVI
from numpyro_fed.pvi.silo import Down, SiloState, Up
from numpyro_fed.rounds.exchange import Reply
from numpyro_fed.rounds.states import SiloParams
from numpyro_fed.text.site_table import Theta


@dataclass(frozen=True, eq=False, kw_only=True)
class ADMM(PartitionedVI):
    """BayesADMM as pure functions: PVI with another problem and another factor at the silos."""

    rho: float
    remedy: ClassVar[str] = "a larger rho"
    if_unsettled: ClassVar[str] = ": a larger rho may help"

    @property
    def share(self) -> float:
        """Return ``a`` of the module's docstring."""
        return 1 / (1 + self.num_silos * self.rho)

    @property
    def pace(self) -> float:
        """Return the share of the way that a round goes, by that of a conjugate model."""
        return super().pace * self.share

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        state = super().init_silo(key, data)
        return state._replace(multiplier=state.factor)

    def exact_after(self, steps: int, away: bool) -> bool:
        """Return whether the steps were one round of all silos from the prior, with rho 1 / J.

        What a silo sends depends on the posterior that it was sent. The first round of a conjugate
        model is exact nevertheless, for this rho alone.
        """
        everyone = steps == self.steps == 1 and self.visits == self.num_silos and not away
        first = self.exact and not self.from_mode and everyone
        return first and math.isclose(self.rho * self.num_silos, 1)

    def visit(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        """Visit as PVI does. The first multiplier is the factor at which a run has begun."""
        factor = state.effective_factor(down.taken)
        multiplier = where(state.visits == 0, factor, state.multiplier)
        return super().visit(noise, down, state._replace(multiplier=multiplier), data)

    def removed(self, factor: Natural, total: Natural, state: SiloState) -> Natural:
        """Return the part of the posterior that the cavity is without: the multiplier, over rho."""
        return jax.tree.map(lambda m: m / self.rho, state.multiplier)

    def proposal(
        self, found: Natural, eta: Natural, prior: Natural
    ) -> tuple[Natural, Natural | tuple[()]]:
        """Return the next factor and multiplier; ``found`` is the multiplier over rho."""
        multiplier = jax.tree.map(lambda f: self.rho * f, found)

        def factor(m: Array, own: Array, prior: Array) -> Array:
            return self.share * (m + self.rho * (own - prior))

        return jax.tree.map(factor, multiplier, eta, prior), multiplier

    def _problem(
        self, theta: Theta, cavity: Natural, start: Ordinary, state: SiloState, data: SiloData
    ) -> Problem[SiloParams]:
        """Return the silo's problem over rho: PVI's, with the likelihood to the power 1 / rho."""
        problem = super()._problem(theta, cavity, start, state, data)

        def log_lik(
            psi: Ordinary, silo_part: SiloParams, noise: LocalNoise, plain: bool
        ) -> tuple[Array, Array]:
            z, values = problem.log_lik(psi, silo_part, noise, plain)
            return z, values / self.rho

        def likelihood() -> tuple[Natural, Callable[[Ordinary], Array]]:
            eta, misfit = problem.likelihood()
            return jax.tree.map(lambda a: a / self.rho, eta), misfit

        return problem._replace(log_lik=log_lik, likelihood=likelihood)
