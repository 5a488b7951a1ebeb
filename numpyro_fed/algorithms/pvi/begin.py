r"""From a mode to PVI's first states: each silo's factor is the parabola of its own likelihood.

With gradient :math:`g_m` and negative Hessian :math:`A_m` of silo ``m``'s log likelihood at the
mode :math:`\hat z`, its own latents integrated by Laplace's method, the factor is

.. math::
    t_m(z) = \exp\big(g_m' (z - \hat z) - \tfrac12 (z - \hat z)' A_m (z - \hat z)\big),

so that the posterior begins as Laplace's approximation of all silos, and each visit puts right what
one parabola is not. A flat prior is zero natural parameters: nothing has to be proper but the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Carry,
    Exchange,
    Info,
    Private,
    Reply,
    Round,
    own_key,
)
from numpyro_fed.algorithms.begin import (
    BEGIN,
    Frame,
    frame_at,
    local_guides,
    whitener_of,
)
from numpyro_fed.algorithms.mode import Search
from numpyro_fed.algorithms.mode import SiloState as Looked
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import Parts, ServerState, Settings, SiloState
from numpyro_fed.expfam.base import Natural
from numpyro_fed.gaussian import as_matrix
from numpyro_fed.local.base import proper_step
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Up(NamedTuple):
    """What a silo sends: its factor."""

    factor: Natural


def _own_factor(parts: Parts, frame: Frame, none: Natural) -> Natural:
    """The server's, at the centre: the parabola of what of the prior is outside of the family."""
    outside = parts.globals.prior_outside
    if outside is None:
        return none

    fm, theta = parts.model, frame.theta

    def rest(z: Array) -> Array:
        return outside(theta, z) + fm.rounded.log_prior(theta, z) - fm.log_prior(theta, z)

    z = frame.centre
    return parts.globals.family.around(z, jax.grad(rest)(z), -jax.hessian(rest)(z))


def pvi_carry(parts: Parts, settings: Settings) -> Carry:
    """How PVI begins at another method's result: the posterior is the normal distribution of that,
    and every silo has an equal share in what it is beyond the prior.
    """
    server_role, silo_role = Server(parts, settings), Silo(parts, settings)
    family = silo_role.family

    def factors(key: Array, frame: Frame) -> tuple[ServerState, Natural, Natural]:
        """The first state, all factors together, and the server's own."""
        begun = server_role.init(key)
        K = as_matrix(frame.whitener)
        posterior = family.around(frame.centre, jnp.zeros_like(frame.centre), K.T @ K)
        total = jax.tree.map(jnp.subtract, posterior, server_role.prior(frame.theta))
        return begun, total, _own_factor(parts, frame, begun.server_factor)

    def server(key: Array, frame: Frame) -> ServerState:
        begun, total, own = factors(key, frame)
        guide = parts.aggregate(server_role.prior(frame.theta), total)
        return begun._replace(
            params={"theta": frame.theta, "guide": guide},
            total=total,
            server_factor=own,
            opt_state=parts.optim.init(frame.theta),
        )

    def silo(key: Array, private: Private, frame: Frame, data: SiloData) -> SiloState:
        _, total, own = factors(key, frame)
        share = jax.tree.map(lambda a, b: (a - b) / settings.num_silos, total, own)
        centre = frame.centre if private.centre is None else private.centre
        params = {"private": private.theta, "guide": private.guide, "centre": centre}
        whitener = whitener_of(private.whitener, parts.model.dim, wide=False)
        return silo_role.init(key, data)._replace(params=params, factor=share, whitener=whitener)

    return Carry(server, silo)


def pvi_from_mode(parts: Parts, settings: Settings) -> Round:
    """Return the round from the states of a search for the mode to those of PVI."""
    server_role, silo_role = Server(parts, settings), Silo(parts, settings)
    fm, family = parts.model, silo_role.family

    def silo(
        noise: Array, down: Frame, state: Looked, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        z_L, place = jax.tree.map(lambda a: a[down.start], (state.z_L, state.place))
        own = len(place.gradient) - fm.dim
        factor = family.around(down.centre, place.gradient[own:], place.curvature[own:, own:])
        factor = jax.tree.map(lambda a: jnp.where(all_finite(factor), a, 0.0), factor)
        eta = local_guides(fm, parts.guide, {**down.theta, **state.private}, down, z_L, data)
        begun = silo_role.init(noise, data)
        params = {"private": state.private, "guide": eta, "centre": down.centre}
        draft = begun._replace(params=params, pending=factor, whitener=down.whitener)
        return Reply(Up(factor), all_finite(eta)), draft

    def commit(draft: SiloState, sent: Up) -> SiloState:
        return draft._replace(pending=sent.factor)

    def run(state: Search, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        frame = frame_at(fm, state)
        replies = ask(BEGIN, frame)
        begun, prior = server_role.init(noise), server_role.prior(frame.theta)
        server_factor = _own_factor(parts, frame, begun.server_factor)
        total = jax.tree.map(jnp.add, replies.up.factor, server_factor)

        def proper(total: Natural) -> Array:
            return family.proper(parts.aggregate(prior, total))

        none = jax.tree.map(jnp.zeros_like, total)
        total, taken = proper_step(proper, none, total, 1.0)
        guide = parts.aggregate(prior, total)
        after = begun._replace(
            params={"theta": frame.theta, "guide": guide},
            total=total,
            server_factor=jax.tree.map(lambda a: taken * a, server_factor),
            opt_state=parts.optim.init(frame.theta),
            taken=jnp.full_like(begun.taken, taken),
        )
        return after, Info(jnp.zeros(()), all_finite(after) & proper(total))

    exchange = Exchange(BEGIN, silo, commit=commit, silo_noise=own_key)
    return Round((exchange,), run, own_key)
