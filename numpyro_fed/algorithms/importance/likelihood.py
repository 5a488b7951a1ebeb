r"""Unbiased estimates of a silo's likelihood at a draw of the globals.

A silo integrates its latents by weighted draws. Most of them come from the normal distribution at
the latents' mode given these very globals, with the curvature there, which is sought from where
the guide expects it; from the guide itself where none is found. Even that may be far
from the posterior, and the few draws that count would be missed without a trace. So a quarter of
the draws comes from the latents' own distribution given the globals, and each is weighed by the
density of the mixture: no weight exceeds four times a likelihood.

.. math::
    \hat p(y_i \mid z_G) = \frac1K \sum_{k=1}^K \frac{p(z_i^k, y_i \mid z_G)}
    {\tfrac34\, q(z_i^k \mid z_G) + \tfrac14\, p(z_i^k \mid z_G)}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.begin import outer_precision, where_finite
from numpyro_fed.algorithms.laplace import Laplace
from numpyro_fed.frame import Coordinates
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.federated import FederatedModel
from numpyro_fed.model.priors import LocalPrior

# The search for the modes of a silo's latents, from where a step of Newton's method will do.
NEARBY: dict[str, Any] = dict(tolerance=1.0, steps=10, step_sizes=(1.0, 2.0**-2, 2.0**-4, 2.0**-7))
SHARE = 0.25  # of the draws, from the latents' own distribution


@dataclass(frozen=True)
class SiloLikelihood:
    """The estimate for one model and guide.

    Attributes
    ----------
    model : FederatedModel
    guide : Guide
    draws : dict of str to int
        For each silo plate with latents; outer plates share the largest among them, and so do the
        plates of rows, which are drawn anew for each draw of the outer ones.
    """

    model: FederatedModel
    guide: Guide
    draws: Mapping[str, int]

    def log_estimate(
        self,
        key: Array,
        theta: Theta,
        eta: GuideParams,
        z_G: Array,
        coordinates: Coordinates,
        data: SiloData,
    ) -> Array:
        """Return the log of the estimate at one ``z_G``; ``eta`` are local guides' parameters."""
        guides = self.guide.recentre(eta, coordinates.offset, data)
        guides = {
            p: self.guide.of_rows(p, theta, params, z_G, data) for p, params in guides.items()
        }
        start = {p: guides[p]["loc"] for p in self.guide.locals}
        at_globals = coordinates._replace(centre=coordinates.u)
        at = _At(self, theta, guides, start, z_G, at_globals, data).refined_outer()
        key_outer, key_rows = jax.random.split(key)
        if not self.guide.outer:
            return at.rows({}, key_rows)
        number = max(self.draws[p] for p in self.guide.outer)
        z, log_mixture = at.mixture(self.guide.outer, number, {}, key_outer)
        keys = jax.random.split(key_rows, number)
        terms = jax.vmap(at.rows)(z, keys) - sum(v.sum(1) for v in log_mixture.values())
        return jax.nn.logsumexp(terms) - jnp.log(number)


@dataclass(frozen=True)
class _At:
    """A silo's latents at one draw of the globals; ``start`` is where their modes may be."""

    of: SiloLikelihood
    theta: Theta
    eta: dict[str, Any]
    start: Rows
    z_G: Array
    coordinates: Coordinates
    data: SiloData

    def refined_outer(self) -> _At:
        """Return the same with the guides of outer plates at the modes of their latents."""
        guide, laplace = self.of.guide, Laplace(self.of.model)
        if not guide.outer:
            return self
        z = laplace.modes(self.theta, self.z_G, self.data, self.start, **NEARBY)
        found = laplace.outer_given(self.theta, self.z_G, z, self.data)
        better = {
            p: guide.locals[p].from_mode(*outer_precision(guide, p, *found[p])) for p in guide.outer
        }
        return replace(self._with(better), start=z)

    def refined_rows(self, z_outer: Rows) -> _At:
        """Return the same with rows' guides at the modes of their latents, given those above."""
        guide, laplace = self.of.guide, Laplace(self.of.model)
        plates = [p for p in guide.rows if not guide.locals[p].joint]
        if not plates:
            return self
        outer = jnp.concatenate([jnp.zeros(0), *(z_outer[p].ravel() for p in guide.outer)])
        z = laplace.modes(
            self.theta, self.z_G, self.data, {**self.start, **z_outer}, fix_outer=True, **NEARBY
        )
        found = laplace.rows_given(self.theta, self.z_G, outer, z, self.data)
        return self._with({p: guide.locals[p].from_mode(*found[p]) for p in plates})

    def _with(self, better: dict[str, Any]) -> _At:
        """Return the same with better guides, uncoupled, for rows where these are finite."""
        eta = dict(self.eta)
        for p, params in better.items():
            before = eta[p]
            uncoupled = {k: jnp.zeros_like(a) for k, a in before.items() if k not in params}
            eta[p] = where_finite({**params, **uncoupled}, before)
        return replace(self, eta=eta)

    def rows(self, z_outer: Rows, key: Array) -> Array:
        """Return the log likelihood given the outer latents, whose own densities are in it."""
        return self.refined_rows(z_outer)._rows(z_outer, key)

    def _rows(self, z_outer: Rows, key: Array) -> Array:
        plates, fm = self.of.guide.rows, self.of.model
        sizes = fm.sizes(self.data)
        empty = {p.name: jnp.zeros((sizes[p.name], 0)) for p in fm.plates if not p.dim}

        def joint(z: Rows) -> Rows:
            return fm.log_silo(self.theta, self.z_G, {**empty, **z_outer, **z}, self.data)

        if not plates:
            return sum((v.sum() for v in joint({}).values()), jnp.zeros(()))
        number = max(self.of.draws[p] for p in plates)
        z, log_mixture = self.mixture(plates, number, z_outer, key)
        terms, total = jax.vmap(joint)(z), jnp.zeros(())
        for plate, rows in terms.items():
            if plate in log_mixture:
                row_terms = jax.nn.logsumexp(rows - log_mixture[plate], axis=0) - jnp.log(number)
            else:
                row_terms = rows[0]
            total += row_terms.sum()
        return total

    def mixture(
        self, plates: tuple[str, ...], number: int, z_outer: Rows, key: Array
    ) -> tuple[Rows, Rows]:
        """Return draws of plates {plate: (K, rows, dim)}, the mixture's log density (K, rows).

        Outer plates are drawn together, and have one density, under an empty name (K, 1).
        """
        guide, prior = self.of.guide, self.of.model.local_prior
        key_guide, key_prior = jax.random.split(key)
        from_prior = int(SHARE * number) if self._separable(plates) else 0
        z = jax.vmap(lambda key: self._guided(plates, z_outer, key))(
            jax.random.split(key_guide, number - from_prior)
        )
        log_q = jax.vmap(lambda z: self._log_q(plates, z_outer, z))
        if not from_prior or prior is None:
            return z, log_q(z)
        drawn = jax.vmap(lambda key: self._drawn(prior, z_outer, key))(
            jax.random.split(key_prior, from_prior)
        )
        z = {p: jnp.concatenate([z[p], drawn[p]]) for p in plates}
        log_p = jax.vmap(lambda z: self._log_prior(prior, plates, z_outer, z))(z)
        share = from_prior / number
        both = {p: (log_q(z)[p], log_p[p]) for p in plates}
        if plates == guide.outer:
            both = _together(both)
        mixed = {
            p: jnp.logaddexp(jnp.log1p(-share) + q, jnp.log(share) + p_density)
            for p, (q, p_density) in both.items()
        }
        return z, mixed

    def _separable(self, plates: tuple[str, ...]) -> bool:
        """Return whether each row has a density of its own; outer plates are one in any case."""
        guide = self.of.guide
        return plates == guide.outer or not any(guide.locals[p].joint for p in plates)

    def _above(self, plate: str, z_outer: Rows) -> Array:
        guide = self.of.guide
        return guide.above(plate, self.eta, self.coordinates.offset, z_outer, self.data)

    def _guided(self, plates: tuple[str, ...], z_outer: Rows, key: Array) -> Rows:
        drawn = {}
        for i, plate in enumerate(plates):
            local, eta = self.of.guide.locals[plate], self.eta[plate]
            noise = jax.random.normal(jax.random.fold_in(key, i), eta["loc"].shape)
            drawn[plate] = local.draw(eta, self._above(plate, z_outer), noise)
        return drawn

    def _log_q(self, plates: tuple[str, ...], z_outer: Rows, z: Rows) -> Rows:
        locals_ = self.of.guide.locals
        rows = {p: locals_[p].log_q(self.eta[p], self._above(p, z_outer), z[p]) for p in plates}
        return {p: self.data.masked(p, v) for p, v in rows.items()}

    def _drawn(self, prior: LocalPrior, z_outer: Rows, key: Array) -> Rows:
        return prior.draw(key, self.theta, self.z_G, z_outer, self.data)

    def _log_prior(
        self, prior: LocalPrior, plates: tuple[str, ...], z_outer: Rows, z: Rows
    ) -> Rows:
        sizes = self.of.model.sizes(self.data)
        others = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in self.of.model.plates}
        found = prior.log_density(self.theta, self.z_G, {**others, **z_outer, **z}, self.data)
        return {p: found[p] for p in plates}


def _together(both: Mapping[str, tuple[Array, Array]]) -> dict[str, tuple[Array, Array]]:
    """Return densities (K, rows) of plates drawn as one: their sum, as a row of one plate."""
    log_q, log_p = (sum(pair[i].sum(1, keepdims=True) for pair in both.values()) for i in (0, 1))
    return {"": (jnp.asarray(log_q), jnp.asarray(log_p))}
