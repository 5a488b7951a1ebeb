"""How silos integrate their own latents in a correction: by quadrature, or by weighted draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from numpyro_fed.algorithms.importance.likelihood import (
    LikelihoodEstimate,
    QuadratureLikelihood,
    SiloLikelihood,
)
from numpyro_fed.bounds import Bound, QuadratureBound, SiloBound
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.log_density import FederatedModel

# Nodes in each dimension, at most. An integral that so many do not reach has two modes or a kink.
MAX_NODES = 46
TO_MODE = 50  # evaluations of a row's density, about, that the search for its mode takes


@dataclass(frozen=True)
class Integration:
    """How silos integrate their own latents.

    ``draws``: Number of draws of the locals for each silo plate that has latents. Under quadrature
        they are those that would take its place.
    ``nodes``: Nodes of the quadrature in each dimension; 0 for integration by draws.
    ``gave_way``: Whether draws took the place of a quadrature that was too coarse.
    """

    draws: Mapping[str, int]
    nodes: int = 0
    gave_way: bool = False

    @property
    def by_draws(self) -> bool:
        """Return whether integrals have the noise of draws."""
        return bool(self.draws) and not self.nodes

    def likelihood(self, fm: FederatedModel, guide: Guide) -> LikelihoodEstimate:
        """Return the estimator of a silo's likelihood."""
        if self.nodes:
            return QuadratureLikelihood(fm, guide, self.nodes)
        return SiloLikelihood(fm, guide, self.draws)

    def bound(self, fm: FederatedModel, guide: Guide) -> Bound:
        """Return the bound by which locals are drawn from the posterior."""
        if self.nodes:
            return QuadratureBound(fm, guide, self.nodes)
        return SiloBound(fm, guide, self.draws)

    def finer(self) -> Integration:
        """Return the integration to try where this quadrature is too coarse."""
        nodes = self.nodes + -(-self.nodes // 2)  # a row with two latents has 49, 121 or 289
        if nodes <= MAX_NODES:
            return Integration(self.draws, nodes)
        return Integration(self.draws, gave_way=True)

    def terms_at_once(self, fm: FederatedModel) -> int:
        """Return how many values of a row's density stand in memory at one draw of the globals."""
        # The nodes of an outer plate are taken one after the other.
        outer = 1 if self.nodes else self._terms(fm, outer=True)
        return outer * self._terms(fm, outer=False)

    def work_of_row(self, fm: FederatedModel) -> int:
        """Return how often a row's density is evaluated at one draw, that for its mode included."""
        terms = self._terms(fm, outer=True) * self._terms(fm, outer=False)
        return terms + (TO_MODE if any(p.dim for p in fm.plates) else 0)

    def _terms(self, fm: FederatedModel, *, outer: bool) -> int:
        """Return the number of nodes or draws of the latents of outer plates, or of rows."""
        plates = [p for p in fm.plates if p.dim and p.outer == outer]
        numbers = (self.nodes**p.dim if self.nodes else self.draws.get(p.name, 1) for p in plates)
        return max(numbers, default=1)

    def __str__(self) -> str:
        if self.nodes:
            return f"quadrature with {self.nodes} nodes"
        numbers = ", ".join(f"{k} of '{p}'" for p, k in self.draws.items())
        why = ", since quadrature was too coarse" if self.gave_way else ""
        return f"draws ({numbers}{why})" if numbers else "nothing to integrate"
