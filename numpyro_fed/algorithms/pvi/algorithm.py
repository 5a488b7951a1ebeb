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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import expfam
from numpyro_fed.algorithms.base import (
    AskSilos,
    Exchange,
    FederatedAlgorithm,
    Round,
    key_as_noise,
    stacked_reply,
)
from numpyro_fed.algorithms.expand import shape
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
from numpyro_fed.divergences import KL, WeightedKL
from numpyro_fed.expfam import Family
from numpyro_fed.expfam.base import Natural, Ordinary
from numpyro_fed.local.base import minimise
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.programs import jit_once
from numpyro_fed.trees import all_finite

EVALUATION = "evaluation"  # the name of the exchange


class Posterior(NamedTuple):
    """The server's message: shared parameters, and the sum of all factors."""

    theta: Theta
    total: Natural


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The question to silos for their expected log likelihoods, and the free energy by it."""

    server: Server
    silo: Silo

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange."""

        def expect(noise: Array, down: Posterior, state: SiloState, data: SiloData) -> Array:
            # As in a visit; the silo's own state may be older.
            silo = self.silo
            posterior = silo.parts.aggregate(silo.prior(down.theta), down.total)
            return silo.expected_log_lik(noise, down.theta, posterior, state, data)[0]

        def messages() -> tuple[Posterior, Any]:
            first = jax.eval_shape(self.server.init, jax.random.key(0))
            return Posterior(first.params.theta, first.total), shape()

        return Exchange(
            EVALUATION,
            stacked_reply(expect, little=True),
            silo_noise=key_as_noise,
            stacked=True,
            like=messages,
        )

    def free_energy(self, ask: AskSilos, key: Array, state: ServerState) -> float:
        """Return the free energy of the posterior, in one exchange."""
        log_lik = ask(self.exchange, Posterior(state.params.theta, state.total))
        kl = jit_once(self.server.kl_to_prior)(key, state.params.theta, state.params.guide)
        return float(log_lik) - float(kl)


STEPS = 200  # of L-BFGS, at most
TOLERANCE = 1e-5  # the largest slope at which it ends
# The largest slope, relative to the largest coefficient, that counts as a minimum. Where these are
# large the absolute tolerance is out of reach in single precision; without a minimum the slope
# stays of their size.
ENOUGH = 1e-3


def aggregate(
    family: Family[Any], divergence: Callable[..., Array]
) -> Callable[[Natural, Natural], Natural]:
    """Return the function ``(prior, total) -> eta`` for a divergence ``(family, eta_q, eta_p)``.

    Where no minimum is found, ``eta`` is NaN, which counts as improper.
    """
    if isinstance(divergence, KL | WeightedKL):
        weight = divergence.weight if isinstance(divergence, WeightedKL) else 1.0
        return lambda prior, total: jax.tree.map(lambda a, b: a + b / weight, prior, total)

    def solve(prior: Natural, total: Natural) -> Natural:
        def objective(psi: Ordinary) -> Array:
            gain = expfam.inner(total, family.moments(psi))
            return divergence(family, family.natural(psi), prior) - gain

        summed = jax.tree.map(jnp.add, prior, total)
        proper = family.proper(summed)
        start = jax.tree.map(lambda a, b: jnp.where(proper, a, b), summed, prior)
        psi, _, slope = minimise(objective, family.ordinary(start), STEPS, TOLERANCE)
        scale = 1 + jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(total)]).max()
        converged = slope <= ENOUGH * scale
        return jax.tree.map(lambda a: jnp.where(converged, a, jnp.nan), family.natural(psi))

    return solve


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
