r"""PVI: partitioned variational inference and its family.

Ashman, Bui, Nguyen, Markou, Weller, Swaroop and Turner 2022, arXiv 2202.12275, Algorithm 1. The
posterior is the prior times one factor for each silo, all in natural parameters of one exponential
family,

.. math::
    q(z_G) \propto p(z_G) \prod_m t_m(z_G), \qquad
    \eta = \eta_0 + \sum_m \lambda_m .

A visit: the silo takes its factor out of the posterior, works on its own data until it is content,
and answers with the change of its factor. Only that change leaves it. Where rows have latents, the
silo's own local guide is part of what it optimises and never leaves.

Where this departs from the paper: the server sends the sum of the factors, from which (and from
the prior, which everybody knows) a silo forms the posterior; and a silo's proposal stays pending
until the server's next message names the factor with which it was taken, so that the sum of the
silos' factors is always the server's.
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
    Up,
)
from numpyro_fed.trees import all_finite


def pvi(server: Server, silo: Silo) -> FederatedAlgorithm[ServerState, SiloState]:
    """Return PVI, or a member of its family, as an algorithm."""
    exchange = Exchange(
        VISIT,
        silo.visit,
        commit=silo.commit,
        silo_noise=key_as_noise,
        scatter=Down(*SCATTERED),
        usable=usable,
    )
    return FederatedAlgorithm(
        server.init,
        silo.init,
        Round((exchange,), server.round, key_as_noise),
        server.view,
        silo.view,
        watch=lambda state: state.status,
        watch_reply=lambda up: jnp.argmax(up.statuses),
        done=server.done,
    )


def usable(up: Up) -> Array:
    """Return whether the server can use a proposal: the expected log likelihood may be minus
    infinity, at a vague prior, and a visit ends in one way.
    """
    counted = (up.statuses >= 0).all() & (up.statuses.sum() == 1)
    return all_finite((up.change, up.theta)) & (up.log_lik < jnp.inf) & counted
