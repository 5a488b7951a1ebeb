r"""The exchange in which silos leave out each of their rows in turn.

The server sends draws :math:`z_G^s` with the weights :math:`w_s` that make them draws of the
posterior. A silo draws the latents :math:`u^s` of its
outer plates (a hospital's effect) given each, and integrates out those of the rows themselves. Row
``i`` takes its own likelihood out of the draws (Vehtari, Gelman and Gabry 2017),

.. math::
    v_s \propto w_s \,/\, p(y_i \mid z_G^s, u^s), \qquad
    p(y_i \mid y_{-i}) = \sum_s v_s \, p(y_i \mid z_G^s, u^s),

and smooths the tail of the ratios. What a silo sends are sums over its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Combine,
    Exchange,
    FederatedAlgorithm,
    key_as_noise,
    stacked_reply,
)
from numpyro_fed.algorithms.expand import shape
from numpyro_fed.algorithms.importance.exchange import log_likelihoods, shape_of_draws
from numpyro_fed.algorithms.importance.likelihood import LikelihoodEstimate
from numpyro_fed.algorithms.sfvi import Down, coordinates_of
from numpyro_fed.gaussian import Coordinates
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel, outcomes_at
from numpyro_fed.objectives import AtDraw

LEAVE_OUT = "leave out"  # the name of the exchange
# Nats below the largest ratio at which another one counts as so small: the exponential of twice as
# much is no zero in single precision.
FAR = 40.0
NOT_KNOWN = 1e3  # the shape of a tail that cannot be fitted: a few ratios, or equal ones


class LeaveOutDown(NamedTuple):
    """The server's message: draws as in a correction, and their log weights (n,)."""

    draws: Down
    log_weights: Array


class LeftOut(NamedTuple):
    """A silo's reply about its rows, given those of all others.

    ``log_density`` (): The log predictive density of its rows.
    ``pareto_k`` (): The shape of the tail of the ratios.
    ``shift`` (): How far the mean of a global moves without the silo, the farthest one, in
        posterior sds.
    """

    log_density: Array
    pareto_k: Array
    shift: Array


def leave_out(
    fm: FederatedModel,
    guide: Guide,
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Any, Any],
    num_draws: int,
    batch_size: int,
    settings: str,
    *,
    little: bool,
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which each silo tells what the others say of it (:class:`LeftOut`)."""
    evaluate = log_likelihoods(likelihood, fitted, num_draws, batch_size)

    def silo(noise: Array, down: LeaveOutDown, state: Any, data: SiloData) -> LeftOut:
        z_G, values = down.draws.z_G, evaluate(noise, down.draws, state, data)
        log_v, density, k = without(down.log_weights, values)
        w, v = jax.nn.softmax(down.log_weights), jnp.exp(log_v)
        mean = w @ z_G
        sd = jnp.sqrt(w @ jnp.square(z_G - mean))
        shift = jnp.abs(v @ z_G - mean) / jnp.where(sd > 0, sd, 1.0)
        return LeftOut(density, k, shift.max(initial=0.0))

    return Exchange(
        LEAVE_OUT,
        stacked_reply(silo, little=little),
        combine=Combine.GATHER,
        silo_noise=key_as_noise,
        settings=settings,
        like=lambda: (
            LeaveOutDown(shape_of_draws(guide, fitted, (num_draws, fm.dim)), shape(num_draws)),
            LeftOut(shape(), shape(), shape()),
        ),
    )


def without(log_weights: Array, values: Array) -> tuple[Array, Array, Array]:
    """Return what remains of draws once a part of the likelihood is taken out of their weights.

    ``log_weights`` (n,) are those of the draws, and ``values`` (n,) the log likelihood of the part.

    Returns
    -------
    log_v : (n,)
        The log weights without the part, their tail smoothed; they sum to one.
    log_density : ()
        The log predictive density of the part.
    pareto_k : ()
    """
    from blackjax.diagnostics import psis_weights  # here: its import starts JAX's backend

    counts = (log_weights > -jnp.inf) & (values > -jnp.inf)
    ratios = jnp.where(counts, log_weights - values, -jnp.inf)
    # The exponentials of a tail must be numbers. Ratios far below the largest hardly count, but
    # they stand where the silo's own likelihood may be e^1000 times as large.
    near = jnp.maximum(ratios, ratios.max() - FAR)
    smoothed, k = psis_weights(near)
    known = jnp.isfinite(k) & jnp.isfinite(smoothed).all()
    log_v = jax.nn.log_softmax(jnp.where(known, smoothed, near)) + (ratios - near)
    density = jax.nn.logsumexp(jnp.where(counts, log_v + values, -jnp.inf))
    return log_v, density, jnp.where(known, k, NOT_KNOWN)


LOO = "loo"  # the name of the exchange
MAX_K = 0.7  # shape of a tail above which ratios are not known (Vehtari et al. 2024)


class RowScores(NamedTuple):
    """The rows of a silo, each given all others; all plates of rows after another.

    ``log_density`` (rows,): The log predictive density of a row.
    ``pareto_k`` (rows,): The shape of the tail of its ratios.
    ``of_fit`` (rows,): The log of its mean likelihood under the posterior, which has seen it.
    ``counts`` (rows,) bool: False in padded rows, and in rows whose outcome is missing.
    """

    log_density: Array
    pareto_k: Array
    of_fit: Array
    counts: Array


class RowSums(NamedTuple):
    """A silo's reply: sums over its rows.

    ``log_density, squares`` (): Log predictive densities, and their squares.
    ``of_fit`` (): Logs of mean likelihoods under the posterior.
    ``num_bad`` (): The number of rows whose density is not known.
    ``num_rows`` ().
    """

    log_density: Array
    squares: Array
    of_fit: Array
    num_bad: Array
    num_rows: Array

    @classmethod
    def of(cls, scores: RowScores) -> RowSums:
        """Return the sums over the rows of a silo."""

        def total(values: Array) -> Array:
            return jnp.where(scores.counts, values, 0.0).sum()

        bad = ~(scores.pareto_k <= MAX_K)
        return cls(
            total(scores.log_density),
            total(scores.log_density**2),
            total(scores.of_fit),
            total(bad.astype(scores.of_fit.dtype)),
            total(jnp.ones_like(scores.of_fit)),
        )


Scores = Callable[[Array, LeaveOutDown, Any, SiloData], RowScores]


def row_scores(
    fm: FederatedModel,
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Any, Any],
    batch_size: int,
) -> Scores:
    """Return the function ``(key, down, silo_state, data)`` to the scores of a silo's rows.

    ``batch_size`` draws are computed at a time.
    """
    row_values = log_likelihoods_of_rows(fm, likelihood, fitted, batch_size)

    def scores(key: Array, down: LeaveOutDown, state: Any, data: SiloData) -> RowScores:
        values, counts = row_values(key, down.draws, state, data)
        _, density, k = jax.vmap(without, (None, 1))(down.log_weights, values)
        log_w = jax.nn.log_softmax(down.log_weights)
        of_fit = jax.nn.logsumexp(values + log_w[:, None], 0)
        return RowScores(density, k, of_fit, counts)

    return scores


def plates_of_rows(fm: FederatedModel) -> list[str]:
    """Return the plates whose rows have a likelihood of their own, in the order of the scores.

    Rows of a plate whose latents other rows share (of a hospital) are none.
    """
    with_terms = {s.plate for s in fm.sites if s.kind in ("observed", "factor")}
    return [p.name for p in fm.plates if p.name in with_terms and not (p.outer and p.dim)]


def rows_that_count(fm: FederatedModel, data: SiloData) -> Array:
    """Return which rows have an outcome (rows,) bool, all plates of rows after another."""
    sizes, found = fm.sizes(data), outcomes_at(fm, data).values()
    counts = [jnp.zeros(0)]
    for p in plates_of_rows(fm):
        # Rows whose outcomes are all missing are no rows to predict.
        seen = [outcome.seen for outcome in found if outcome.plate == p]
        counts.append(data.masked(p, jnp.ones(sizes[p]) * (sum(seen) > 0 if seen else 1.0)))
    return jnp.concatenate(counts) > 0


def log_likelihoods_of_rows(
    fm: FederatedModel,
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Any, Any],
    batch_size: int,
) -> Callable[[Array, Down, Any, SiloData], tuple[Array, Array]]:
    """Return the function to log likelihoods (draws, rows), and whether rows count (rows,).

    It takes ``(key, down, silo_state, data)``, and computes ``batch_size`` draws at a time.
    """
    plates = plates_of_rows(fm)

    def values_of(key: Array, down: Down, state: Any, data: SiloData) -> tuple[Array, Array]:
        private = fitted.private(state)
        theta = {**down.theta, **private.theta}
        u, centre = coordinates_of(down)
        counts = rows_that_count(fm, data)

        def rows_at(draw: tuple[Array, Array, Array]) -> Array:
            s, z_G, u = draw
            coordinates = private.recentred(Coordinates(u, centre))
            given = AtDraw(theta, private.guide, z_G, coordinates, data)
            rows = likelihood.log_rows(jax.random.fold_in(key, s), given)
            return jnp.concatenate([jnp.zeros(0), *(rows[p] for p in plates)])

        index = jnp.arange(len(down.z_G))
        values = jax.lax.map(rows_at, (index, down.z_G, u), batch_size=batch_size)
        return values, counts

    return values_of


def loo(
    fm: FederatedModel,
    guide: Guide,
    scores: Scores,
    fitted: FederatedAlgorithm[Any, Any],
    num_draws: int,
    settings: str,
) -> Exchange[Any, Any, Any]:
    """Return the exchange in which silos tell the sums of their rows' scores (:class:`RowSums`)."""

    return Exchange(
        LOO,
        stacked_reply(lambda *of_silo: RowSums.of(scores(*of_silo)), little=True),
        silo_noise=key_as_noise,
        settings=settings,
        like=lambda: (
            LeaveOutDown(shape_of_draws(guide, fitted, (num_draws, fm.dim)), shape(num_draws)),
            RowSums(*[shape()] * len(RowSums._fields)),
        ),
    )
