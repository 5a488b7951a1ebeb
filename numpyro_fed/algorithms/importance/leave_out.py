r"""The exchange in which each silo tells how well the others predict its rows.

The server sends draws :math:`z_G^s` with the weights :math:`w_s` that make them draws of the
posterior. Silo ``j`` takes its own likelihood out of the weights,

.. math::
    v_s \propto w_s \,/\, p(y_j \mid z_G^s), \qquad
    p(y_j \mid y_{-j}) = \sum_s v_s \, p(y_j \mid z_G^s),

smooths the tail of the ratios (Vehtari, Gelman and Gabry 2017, by silo instead of by row), and
replies with the log of that density, the shape of the tail, and how far the mean of a global moves.
Where a silo integrates its latents by draws, its likelihood here has other noise than in the
weights, and densities come out too small: by 0.15 nats for 80 rows of three latents and 20 draws.
"""

from __future__ import annotations

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
from numpyro_fed.algorithms.sfvi import Down
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

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
        stacked=True,
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
