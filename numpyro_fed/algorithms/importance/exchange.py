r"""The exchange that weighs draws from a fitted guide by the joint density of all silos.

The server sends draws :math:`z_G^s \sim q`. Silo ``j`` replies with an importance-weighted estimate
:math:`\hat p(y_j \mid z_G^s)` of its own likelihood at each. The log weights are

.. math::
    \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

Each estimate is unbiased, and those of different silos are independent. So averages with these
weights are those of exact likelihoods but for more variance: it is importance sampling on an
extended space (Andrieu and Roberts 2009; Tran et al. 2013). The draws are the server's data here.
It makes them from a mixture of the guide, or of what stands in its place, and wider distributions
(:mod:`numpyro_fed.algorithms.importance.proposals`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    IMPORTANCE,
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    Server,
    Silo,
    key_as_noise,
)
from numpyro_fed.algorithms.importance.likelihood import Draws, LikelihoodEstimate
from numpyro_fed.algorithms.sfvi import Down, coordinates_of, down_of
from numpyro_fed.frame import Coordinates
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

MAX_LOST = 0.01  # share of draws near the fit at which a quadrature may fail; as much mass is lost


class Densities(NamedTuple):
    """The log joint density of all silos at draws (n,), and how many silos' integrals are coarse.

    At a wide draw it is minus infinity where it is not finite.
    """

    log_joint: Array
    num_coarse: Array


class Estimates(NamedTuple):
    """A silo's reply: its log likelihood at each draw (n,), and whether integrals are too coarse.

    The second is 0 or 1, so that a sum over silos counts them.
    """

    log_likelihood: Array
    is_coarse: Array


def importance(
    fm: FederatedModel,
    guide: Guide,
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Server, Silo],
    num_draws: int,
    num_own: int,
    batch_size: int,
    settings: str = "",
) -> Round:
    """Return the round that leads from states of the algorithm ``fitted`` to :class:`Densities`.

    The server's data are the draws (n, dim), of which the first ``num_own`` are from the guide. A
    silo sends :class:`Estimates`, and keeps its state. ``batch_size`` draws are computed at a time.
    """

    def without_overflow(values: Array) -> Array:
        """Return log values, minus infinity where one of a wide draw overflowed or is NaN.

        An integral over a silo's latents may fail 25 sds from the guide: that draw has no weight.
        At the guide's own draws it is an error, and is kept. The text's own densities are never
        NaN.
        """
        is_wide = jnp.arange(num_draws) >= num_own
        return jnp.where(is_wide & ~(values < jnp.inf), -jnp.inf, values)

    evaluate = log_likelihoods(likelihood, fitted, num_draws, batch_size)

    def silo(
        noise: Array, down: Down, state: Silo, data: SiloData
    ) -> tuple[Reply[Estimates], Silo]:
        values, coarse = evaluate(noise, down, state, data)
        # Far out a quadrature may be no number, which costs a weight; among the first draws, all
        # close to the fit, that would be mass.
        lost = jnp.isnan(values[: -(-num_draws // 4)]).mean() > MAX_LOST
        too_coarse = coarse | (likelihood.gives_way & lost)
        # Values that are too coarse are not used, and may not be numbers.
        values = jnp.where(too_coarse, 0.0, without_overflow(values))
        up = Estimates(values, too_coarse.astype(values.dtype))
        return Reply(up, jnp.array(True)), state

    def run(state: Server, noise: object, ask: Ask) -> tuple[Densities, Info]:
        shared = fitted.shared(state)
        z_G = jnp.zeros((num_draws, fm.dim)) if ask.server_data is None else ask.server_data
        log_prior = jax.vmap(fm.log_prior, (None, 0))(shared.theta, z_G)
        replies = ask(IMPORTANCE, down_of(guide, shared, z_G))
        log_joint = without_overflow(log_prior + replies.up.log_likelihood)
        usable = ~jnp.isnan(log_joint).any() & jnp.isfinite(log_joint).any()
        densities = Densities(log_joint, replies.up.is_coarse)
        return densities, Info(jnp.zeros(()), usable)

    exchange = Exchange(
        IMPORTANCE, silo, silo_noise=key_as_noise, usable=some_count, settings=settings
    )
    return Round((exchange,), run)


def log_likelihoods(
    likelihood: LikelihoodEstimate,
    fitted: FederatedAlgorithm[Server, Silo],
    num_draws: int,
    batch_size: int,
) -> Callable[[Array, Down, Silo, SiloData], tuple[Array, Array]]:
    """Return the function to a silo's log likelihood at each draw (n,), and if it is too coarse."""

    def evaluate(noise: Array, down: Down, state: Silo, data: SiloData) -> tuple[Array, Array]:
        private = fitted.private(state)
        theta = {**down.theta, **private.theta}
        u, centre = coordinates_of(down)

        def estimate(batch: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            s, z_G, u = batch
            keys = jax.vmap(jax.random.fold_in, (None, 0))(noise, s)
            draws = Draws(keys, z_G, *private.recentred(Coordinates(u, centre)))
            return likelihood.log_estimates(theta, private.guide, draws, data, s[0] == 0)

        # In batches: all draws at once would hold a silo's rows, times inner draws, thousands of
        # times in memory. The last batch is filled up by the first draws: a batch of another size
        # would be compiled once more.
        num_batches = -(-num_draws // batch_size)
        index = jnp.arange(num_batches * -(-num_draws // num_batches)) % num_draws
        batches = index.reshape(num_batches, -1)
        values, coarse = jax.lax.map(estimate, (batches, down.z_G[batches], u[batches]))
        return values.ravel()[:num_draws], coarse.any()

    return evaluate


def some_count(up: Estimates) -> Array:
    """Return whether no log likelihood is NaN or infinite, and some draw has a weight."""
    values = up.log_likelihood
    return (values < jnp.inf).all() & (values > -jnp.inf).any()
