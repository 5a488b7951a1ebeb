r"""One exchange that weighs draws from a fitted guide by the joint density of all silos.

The server sends draws :math:`z_G^s \sim q`, silo ``j`` answers with an importance-weighted estimate
:math:`\hat p(y_j \mid z_G^s)` of its own likelihood, and the sum of the logs makes the weights

.. math::
    \log w_s = \log p(z_G^s) - \log q(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s).

Each estimate is unbiased and the silos' are independent, so that the weights are exact up to noise:
importance sampling on an extended space (Andrieu and Roberts 2009; Tran et al. 2013). Here ``q`` is
the guide with some wider draws (:mod:`numpyro_fed.algorithms.importance.proposals`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Info
from numpyro_fed.algorithms.importance.likelihood import SiloLikelihood
from numpyro_fed.algorithms.importance.proposals import Proposal
from numpyro_fed.algorithms.sfvi import Down
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel


class ServerState(NamedTuple):
    """The fit's server parameters, the draws (n, dim) and their log weights (n,)."""

    params: dict[str, Any]
    z_G: Array
    log_weights: Array


class Up(NamedTuple):
    """A silo's log likelihood estimates (n,), and 1 instead if one is NaN or none has weight."""

    log_likelihood: Array
    bad: Array


def importance(
    fm: FederatedModel,
    guide: Guide,
    proposal: Proposal,
    likelihood: SiloLikelihood,
    num_draws: int,
    batch_size: int,
) -> FederatedAlgorithm:
    """Build the exchange. Silo states are those of the fit; ``batch_size`` draws run at a time."""

    def usable(values: Array) -> Array:
        """Far from the guide densities may overflow, which gives a draw no weight."""
        far = jnp.arange(num_draws) >= proposal.own
        return jnp.where(far & ~(values < jnp.inf), -jnp.inf, values)

    def silo_noise(key: Array, state: Any) -> Array:
        return key

    def broadcast(noise: Any, state: ServerState, who: Array) -> tuple[Down, Any]:
        params = state.params
        z_G, log_q = proposal.draw(params["guide"], noise)
        log_prior = jax.vmap(fm.log_prior, (None, 0))(params["theta"], z_G)
        down = Down(params["theta"], z_G, guide.globals.centre(params["guide"]))
        return down, (z_G, usable(log_prior - log_q))

    def silo(key: Array, down: Down, state: Any, data: SiloData) -> tuple[Up, Any]:
        eta = state.params["guide"]
        theta = {**down.theta, **state.params["private"]}
        centre = state.params.get("centre", down.centre)

        def estimate(draw: tuple[Array, Array]) -> Array:
            s, z_G = draw
            mine = jax.random.fold_in(key, s)
            return likelihood.log_estimate(mine, theta, eta, z_G, centre, data)

        draws = (jnp.arange(num_draws), down.z_G)
        values = usable(jax.lax.map(estimate, draws, batch_size=batch_size))
        ok = (values < jnp.inf).all() & (values > -jnp.inf).any()
        up = Up(jnp.where(ok, values, 0.0), (~ok).astype(jnp.int32))
        return up, state._replace(ok=ok)

    def server(state: ServerState, memo: Any, up: Up) -> tuple[ServerState, Info]:
        z_G, own = memo
        log_weights = own + up.log_likelihood
        ok = (up.bad == 0) & ~jnp.isnan(log_weights).any() & jnp.isfinite(log_weights).any()
        evidence = jax.nn.logsumexp(log_weights) - jnp.log(num_draws)
        return ServerState(state.params, z_G, log_weights), Info(-evidence, ok)

    def init_server(key: Array) -> ServerState:
        params = {"theta": fm.init_theta(key), "guide": guide.init_global(key)}
        return start(params, num_draws, fm.dim)

    def init_silo(key: Array, data: SiloData) -> Any:
        raise TypeError("the importance correction starts from a fit's silo states")

    exchange = Exchange(proposal.noise, silo_noise, broadcast, silo, server)
    return FederatedAlgorithm(init_server, init_silo, (exchange,))


def start(params: dict[str, Any], num_draws: int, dim: int) -> ServerState:
    """The server's state before the exchange."""
    return ServerState(params, jnp.zeros((num_draws, dim)), jnp.zeros(num_draws))
