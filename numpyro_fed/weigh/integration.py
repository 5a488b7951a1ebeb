r"""A silo's likelihood at a draw of the globals: by quadrature, or unbiased estimates by draws.

Quadrature (``silo_bounds.QuadratureBound``) is for rows with one or two latents. By
:class:`SiloLikelihood` a silo integrates its latents by weighted draws. Three quarters of them come
from the normal distribution at the latents' mode given these globals, with the curvature at the
mode. The mode is searched from the guide's mean; where none is found, the draws come from the
guide. Both may be far from the posterior of the latents, and the estimate would then be too small
without any sign of it. So a quarter of the draws comes from the latents' prior given the globals,
and each draw is weighed by the density of the mixture. No weight then exceeds four times a
likelihood.

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

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.guides.quadrature import NEARBY
from numpyro_fed.guides.silo_bounds import AtDraw, Bound, QuadratureBound, SiloBound
from numpyro_fed.numerics.gaussian import Coordinates
from numpyro_fed.search.start_point import outer_precision, where_finite
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

# Share of the draws from the latents' prior. It bounds weights by 1 / SHARE times a likelihood. A
# smaller one bounds them less; a larger one takes draws from the mode, where most of the mass is.
SHARE = 0.25


@dataclass(frozen=True)
class SiloLikelihood:
    """The estimator of a silo's likelihood, for one model and guide.

    ``draws``: Number of draws for each silo plate with latents. All outer plates use the largest
        number among them, and so do all plates of rows. Rows are drawn again for each draw of the
        latents above them.
    """

    model: FederatedModel
    guide: Guide
    draws: Mapping[str, int]

    def log_estimate(self, key: Array, given: AtDraw) -> Array:
        """Return the log of the estimate () at one draw of the globals, which is unbiased."""
        latents, key_outer, key_rows = self._latents_at(key, given)
        if not self.guide.outer_plates:
            return latents.log_likelihood({}, key_rows)
        *_, terms = self._outer_terms(latents, key_outer, key_rows)
        return jax.nn.logsumexp(terms) - jnp.log(len(terms))

    def _latents_at(self, key: Array, given: AtDraw) -> tuple[_LatentsAt, Array, Array]:
        """Return the latents at one draw of the globals, and keys for outer plates and for rows."""
        # At one ``z_G`` the couplings to the globals are constants, and go into the means. So the
        # guides below depend on the latents above the rows only.
        theta, eta, z_G, coordinates, data, _ = given
        guides = self.guide.at_globals(eta, theta, z_G, coordinates.offset, data)
        start = {p: guides[p]["loc"] for p in self.guide.locals}
        at_globals = coordinates._replace(centre=coordinates.u)
        latents = _LatentsAt(self, theta, guides, start, z_G, at_globals, data)
        if self.guide.outer_plates:
            laplace = Laplace(self.model)
            z = laplace.search(theta, z_G, data, start, NEARBY).modes
            found = laplace.outer_given(theta, z_G, z, data)
            precisions = {
                p: outer_precision(self.guide, p, *found[p]) for p in self.guide.outer_plates
            }
            latents = replace(latents.with_modes(precisions), start=z)
        return (latents, *jax.random.split(key))

    def _outer_terms(
        self, latents: _LatentsAt, key: Array, key_rows: Array
    ) -> tuple[Rows, Array, Array]:
        """Return draws of outer plates' latents, a key for the rows of each, and log weights."""
        number = max(self.draws[p] for p in self.guide.outer_plates)
        z, log_mixture = latents.mixture(self.guide.outer_plates, number, {}, key)
        keys = jax.random.split(key_rows, number)
        log_q = sum(v.sum(1) for v in log_mixture.values())
        return z, keys, jax.vmap(latents.log_likelihood)(z, keys) - log_q

    def log_rows(self, key: Array, given: AtDraw) -> Rows:
        """Return each row's log likelihood, latents that rows share drawn by their weights."""
        latents, key_outer, key_rows = self._latents_at(key, given)
        z_outer: Rows = {}
        if self.guide.outer_plates:
            key_outer, key_choice = jax.random.split(key_outer)
            z, keys, terms = self._outer_terms(latents, key_outer, key_rows)
            chosen = jax.random.categorical(key_choice, terms)
            z_outer, key_rows = {p: a[chosen] for p, a in z.items()}, keys[chosen]
        key_rows, key_choice = jax.random.split(key_rows)
        z_rows, weights, others = latents.weighed_rows(z_outer, key_rows)
        below, shared = self.model.below, {*self.guide.outer_plates, *self.model.below.values()}
        found = {p: rows for p, rows in {**others, **_means(weights)}.items() if p not in shared}
        if below:
            latent = {**z_outer, **_drawn(key_choice, z_rows, weights)}
            each = self.model.log_silo(given.theta, given.z_G, latent, given.data)
            found |= {p: each[p] for p in below}
        return found


def _means(log_weights: Rows) -> Rows:
    """Return the log means over draws of weights {plate: (K, rows)}."""
    return {p: jax.nn.logsumexp(w, axis=0) - jnp.log(len(w)) for p, w in log_weights.items()}


def _drawn(key: Array, z: Rows, log_weights: Rows) -> Rows:
    """Return one of the draws {plate: (K, rows, dim)} of each row, by its weights."""
    found = {}
    for i, p in enumerate(sorted(z)):
        # Rows first: padded rows, which come last, then change no other number.
        chosen = jax.random.categorical(jax.random.fold_in(key, i), log_weights[p].T, axis=1)
        found[p] = z[p][chosen, jnp.arange(len(chosen))]
    return found


@dataclass(frozen=True)
class _LatentsAt:
    """A silo's latents at one draw of the globals, with guides and starts for their modes."""

    likelihood: SiloLikelihood
    theta: Theta
    eta: dict[str, Any]
    start: Rows
    z_G: Array
    coordinates: Coordinates
    data: SiloData

    def with_modes(self, found: Mapping[str, tuple[Array, Array]]) -> _LatentsAt:
        """Return a copy with uncoupled guides at modes with precisions, where these are finite."""
        eta = dict(self.eta)
        for p, mode in found.items():
            params, fitted = self.likelihood.guide.locals[p].from_mode(*mode), eta[p]
            uncoupled = {k: jnp.zeros_like(a) for k, a in fitted.items() if k not in params}
            eta[p] = where_finite({**params, **uncoupled}, fitted)
        return replace(self, eta=eta)

    def log_likelihood(self, z_outer: Rows, key: Array) -> Array:
        """Return the log likelihood () given the outer latents, plus the log prior of these."""
        terms = self.row_terms(z_outer, key).values()
        return sum((rows.sum() for rows in terms), jnp.zeros(()))

    def row_terms(self, z_outer: Rows, key: Array) -> Rows:
        """Return what each row adds to the log likelihood given the outer latents."""
        _, weights, terms = self.weighed_rows(z_outer, key)
        return {**terms, **_means(weights)}

    def weighed_rows(self, z_outer: Rows, key: Array) -> tuple[Rows, Rows, Rows]:
        """Return draws of rows' latents, their log weights, and the terms of other plates.

        Draws are {plate: (K, rows, dim)}, and log weights {plate: (K, rows)}.
        """
        guide, fm = self.likelihood.guide, self.likelihood.model

        def joint(z: Rows) -> Rows:
            return fm.log_grouped(self.theta, self.z_G, {**z_outer, **z}, self.data)

        if not guide.row_plates:
            return {}, {}, joint({})
        refined = self
        if plates := [p for p in guide.row_plates if not guide.locals[p].joint]:
            # Guides of rows go to the modes given the latents above them.
            above = (z_outer[p].ravel() for p in guide.outer_plates)
            laplace, start = Laplace(fm), {**self.start, **z_outer}
            z = laplace.search(self.theta, self.z_G, self.data, start, NEARBY, fix_outer=True).modes
            outer = jnp.concatenate([jnp.zeros(0), *above])
            found = laplace.rows_given(self.theta, self.z_G, outer, z, self.data)
            refined = self.with_modes({p: found[p] for p in plates})
        number = max(self.likelihood.draws[p] for p in guide.row_plates)
        z, log_mixture = refined.mixture(guide.row_plates, number, z_outer, key)
        weights, terms = Rows(), Rows()
        for plate, rows in jax.vmap(joint)(z).items():
            if plate in log_mixture:
                # Draws of the prior may be infinite, where the mixture has no density, either.
                finite = rows - log_mixture[plate]
                weights[plate] = jnp.where(rows == -jnp.inf, -jnp.inf, finite)
            else:
                terms[plate] = rows[0]
        return z, weights, terms

    def mixture(
        self, plates: tuple[str, ...], number: int, z_outer: Rows, key: Array
    ) -> tuple[Rows, Rows]:
        """Return draws {plate: (K, rows, dim)}, and the mixture's log density {plate: (K, rows)}.

        Outer plates are drawn together, and have one density, under an empty name (K, 1).
        """
        guide, fm, data = self.likelihood.guide, self.likelihood.model, self.data
        locals_ = guide.locals
        offset = self.coordinates.offset
        above = {p: guide.offset_of_plate(p, self.eta, offset, z_outer, data) for p in plates}
        key_guide, key_prior = jax.random.split(key)
        # Rows of a joint guide share one density, so that they cannot be mixed row by row. Outer
        # plates are mixed as a whole.
        separable = plates == guide.outer_plates or not any(locals_[p].joint for p in plates)
        from_prior = int(SHARE * number) if separable else 0

        def draw_guide(key: Array) -> Rows:
            drawn = {}
            for i, p in enumerate(plates):
                noise = jax.random.normal(jax.random.fold_in(key, i), self.eta[p]["loc"].shape)
                drawn[p] = locals_[p].draw(self.eta[p], above[p], noise)
            return drawn

        def log_guide(z: Rows) -> Rows:
            rows = {p: locals_[p].log_q(self.eta[p], above[p], z[p]) for p in plates}
            return {p: data.masked(p, v) for p, v in rows.items()}

        z = jax.vmap(draw_guide)(jax.random.split(key_guide, number - from_prior))
        if not from_prior or not fm.draws_local:
            return z, jax.vmap(log_guide)(z)
        # The first draws are the guide's, the last ones the prior's: fixed numbers of each, which
        # has less variance than to choose at random (Hesterberg 1995).
        drawn = jax.vmap(lambda key: fm.draw_local(key, self.theta, self.z_G, z_outer, data))(
            jax.random.split(key_prior, from_prior)
        )
        z = {p: jnp.concatenate([z[p], drawn[p]]) for p in plates}
        others = {p.name: jnp.zeros((fm.sizes(data)[p.name], p.dim)) for p in fm.plates} | z_outer
        log_p = jax.vmap(
            lambda z: fm.log_prior_of_local(self.theta, self.z_G, {**others, **z}, data)
        )(z)
        log_q, share = jax.vmap(log_guide)(z), from_prior / number
        densities = {p: (log_q[p], log_p[p]) for p in plates}
        if plates == guide.outer_plates:  # drawn together
            q, p = (sum(d[i].sum(1, keepdims=True) for d in densities.values()) for i in (0, 1))
            densities = {"": (jnp.asarray(q), jnp.asarray(p))}
        mixed = {
            p: jnp.logaddexp(jnp.log1p(-share) + q, jnp.log(share) + p_density)
            for p, (q, p_density) in densities.items()
        }
        return z, mixed


LikelihoodEstimate = QuadratureBound | SiloLikelihood


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

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Integration:
        """Return the integration of :attr:`settings`, such as those of a question."""
        return cls(dict(settings["inner_draws"]), settings["nodes"])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings from which a silo elsewhere, or a file's reader, makes the same."""
        return {"inner_draws": dict(self.draws), "nodes": self.nodes}

    def likelihood(self, fm: FederatedModel, guide: Guide) -> LikelihoodEstimate:
        """Return the estimator of a silo's likelihood."""
        if self.nodes:
            return QuadratureBound(fm, guide, self.nodes)
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
        names = fm.outer_plates if outer else fm.row_plates
        plates = [p for p in fm.plates if p.name in names]
        numbers = (self.nodes**p.dim if self.nodes else self.draws.get(p.name, 1) for p in plates)
        return max(numbers, default=1)

    def __str__(self) -> str:
        if self.nodes:
            return f"quadrature with {self.nodes} nodes"
        numbers = ", ".join(f"{k} of '{p}'" for p, k in self.draws.items())
        why = ", since quadrature was too coarse" if self.gave_way else ""
        return f"draws ({numbers}{why})" if numbers else "nothing to integrate"
