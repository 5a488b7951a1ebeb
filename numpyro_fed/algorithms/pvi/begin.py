r"""From a mode to PVI's first states: each silo's factor is the parabola of its own likelihood.

With gradient :math:`g_m` and negative Hessian :math:`A_m` of silo ``m``'s log likelihood at the
mode :math:`\hat z`, its own latents integrated by Laplace's method, the factor is

.. math::
    t_m(z) = \exp\big(g_m' (z - \hat z) - \tfrac12 (z - \hat z)' A_m (z - \hat z)\big),

so that the posterior begins as Laplace's approximation of all silos, and each visit puts right what
one parabola is not. A flat prior is zero natural parameters: nothing has to be proper but the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies, Reply
from numpyro_fed.algorithms.begin import BEGIN, Frame, local_guides, sending_frame
from numpyro_fed.algorithms.mode import Search
from numpyro_fed.algorithms.mode import SiloState as Looked
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import Parts, ServerState, Settings, SiloState
from numpyro_fed.expfam.base import Natural
from numpyro_fed.local.base import proper_step
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


class Up(NamedTuple):
    """What a silo sends: its factor."""

    factor: Natural


def pvi_from_mode(parts: Parts, settings: Settings) -> Exchange:
    """Build the exchange from the states of a search for the mode to those of PVI."""
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

    def server(
        state: Search, memo: tuple[Array, Frame], replies: Replies[Up], server_data: Any
    ) -> tuple[ServerState, Info]:
        key, frame = memo
        begun = server_role.init(key)
        prior = server_role.prior(frame.theta)
        server_factor = begun.server_factor
        if (outside := parts.globals.prior_outside) is not None:

            def rest(z: Array) -> Array:
                return outside(frame.theta, z)

            z = frame.centre
            server_factor = family.around(z, jax.grad(rest)(z), -jax.hessian(rest)(z))
        total = jax.tree.map(jnp.add, replies.up.factor, server_factor)

        def proper(total: Natural) -> Array:
            return family.proper(parts.aggregate(prior, total))

        none = jax.tree.map(jnp.zeros_like, total)
        total, taken = proper_step(family._replace(proper=proper), none, total, 1.0)
        guide = parts.aggregate(prior, total)
        after = begun._replace(
            params={"theta": frame.theta, "guide": guide},
            total=total,
            server_factor=jax.tree.map(lambda a: taken * a, server_factor),
            opt_state=parts.optim.init(frame.theta),
            taken=jnp.full_like(begun.taken, taken),
        )
        return after, Info(jnp.zeros(()), replies.ok & all_finite(after) & proper(total))

    def own_key(key: Array, state: Any = None) -> Array:
        return key

    return Exchange(
        sending_frame(fm),
        silo,
        server,
        name=BEGIN,
        commit=commit,
        server_noise=own_key,
        silo_noise=own_key,
    )
