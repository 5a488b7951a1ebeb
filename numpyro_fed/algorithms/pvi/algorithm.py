r"""PVI: partitioned variational inference, and its relatives.

Ashman, Bui, Nguyen, Markou, Weller, Swaroop and Turner 2022, arXiv 2202.12275, Algorithm 1. The
posterior is the prior times one factor for each silo, all in natural parameters of one exponential
family,

.. math::
    q(z_G) \propto p(z_G) \prod_m t_m(z_G), \qquad
    \eta = \eta_0 + \sum_m \lambda_m .

In a visit, a silo

1. takes its factor out of the posterior, which leaves the cavity;
2. maximises its local free energy on its own data;
3. replies with the change of its factor. Only that change leaves it.

Where rows have latents, the silo's local guide is part of what it optimises, and never leaves.

Two differences from the paper. The server sends the sum of the factors; a silo forms the posterior
from that and the prior, which all parties know. And a silo's proposal stays pending until the
server's next message states the share (the damping) with which it was taken. So the silos' factors
always sum to the server's total, also if an update was rejected.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Round, key_as_noise
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import (
    SCATTERED,
    VISIT,
    Down,
    ServerState,
    SiloState,
    Status,
    Up,
)
from numpyro_fed.trees import all_finite


def pvi(server: Server, silo: Silo) -> FederatedAlgorithm[ServerState, SiloState]:
    """Return PVI, or one of its relatives, as pure functions."""
    exchange = Exchange(
        VISIT,
        silo.visit,
        commit=lambda draft, sent: draft._replace(pending=sent.change),
        silo_noise=key_as_noise,
        scatter=Down(*SCATTERED),
        # Not the default, all_finite: an expected log likelihood of minus infinity is allowed.
        usable=usable,
    )
    return FederatedAlgorithm(
        server.init,
        silo.init,
        Round((exchange,), server.round, key_as_noise),
        server.view,
        silo.view,
        watch=lambda state: state.status,
        watch_reply=lambda up: worst(up.statuses),
        done=server.done,
        # A factor that is not renewed stays in the posterior as it is.
        without="exact",
        away=jnp.int32(Status.AWAY),
    )


def worst(statuses: Array) -> Array:
    """Return the last status that a visit ended by; of one visit, the one that it ended by.

    ``statuses`` counts how visits ended. Where silos' replies are told as a sum alone, nobody knows
    whose visit ended badly, and all of them are doubted.
    """
    return jnp.max(jnp.where(statuses > 0, jnp.arange(len(statuses)), 0))


def usable(up: Up) -> Array:
    """Return whether the server can use a proposal.

    The expected log likelihood may be minus infinity: at a vague prior it is, and nothing is wrong.
    Exactly one status must be set.
    """
    counted = (up.statuses >= 0).all() & (up.statuses.sum() == 1)
    return all_finite((up.change, up.theta)) & (up.log_lik < jnp.inf) & counted
