r"""SFVI: structured federated variational inference.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 1. Each round, the server draws
the globals, every silo answers with gradients of its own term of the bound and takes a step on its
own parameters, and the server takes a step on the shared ones.

Where this departs from the paper: the server sends the draws ``z_G`` and the centre of their
guide instead of ``eta_G`` and the noise, and a silo answers with the gradient with respect to
*these*. The server, which knows how they came from ``eta_G``, applies the chain rule. The numbers
are those of the paper; messages are smaller (a full covariance or a flow never travels), and a
silo's reply does not depend on the family of the guide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import (
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Replies,
    Reply,
    Shared,
)
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel, Rows
from numpyro_fed.objectives import SiloBound
from numpyro_fed.trees import all_finite


class ServerState(NamedTuple):
    """``params`` is ``{"theta", "guide"}``: shared parameters and those of the globals' guide."""

    params: dict[str, Any]
    opt_state: Any


class SiloState(NamedTuple):
    """``params`` is ``{"private", "guide"}``: private parameters and those of the local guide."""

    params: dict[str, Any]
    opt_state: Any


class Down(NamedTuple):
    """What the server sends: parameters, draws of the globals (particles, dim), their centre."""

    theta: dict[str, Any]
    z_G: Array
    centre: Array


class Up(NamedTuple):
    """What a silo sends: its term of the bound, the gradient with respect to what it was sent."""

    bound: Array
    gradient: Down


def sfvi(
    fm: FederatedModel,
    guide: Guide,
    bound: SiloBound,
    optim: optax.GradientTransformation,
    num_particles: int,
) -> FederatedAlgorithm:
    """Build the algorithm; the server and every silo use ``optim``, each with its own state."""

    def draw(params: dict[str, Any], eps: Any) -> tuple[Down, Array]:
        """What is sent, and the server's own term of the bound."""
        z_G, log_q = jax.vmap(guide.globals.draw, (None, 0))(params["guide"], eps)
        down = Down(params["theta"], z_G, guide.globals.centre(params["guide"]))
        log_prior = jax.vmap(fm.log_prior, (None, 0))(params["theta"], z_G)
        return down, jnp.mean(log_prior - log_q)

    def init_server(key: Array) -> ServerState:
        key_theta, key_guide = jax.random.split(key)
        params = {"theta": fm.init_theta(key_theta), "guide": guide.init_global(key_guide)}
        return ServerState(params, optim.init(params))

    def init_silo(key: Array, data: SiloData) -> SiloState:
        key_private, key_guide = jax.random.split(key)
        params = {
            "private": fm.init_private(key_private, data),
            "guide": guide.init_local(key_guide, data),
        }
        return SiloState(params, optim.init(params))

    def server_noise(key: Array) -> Any:
        return guide.globals.noise(key, num_particles)

    def silo_noise(key: Array, state: SiloState) -> Rows:
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params["guide"].items()}
        return bound.noise(key, sizes, num_particles)

    def broadcast(noise: Any, state: ServerState, who: Array, server_data: Any) -> tuple[Down, Any]:
        (down, value), pull = jax.vjp(lambda params: draw(params, noise), state.params)
        return down, (value, pull)

    def silo(
        noise: Rows, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        def term(down: Down, params: dict[str, Any]) -> Array:
            theta = {**down.theta, **params["private"]}

            def at(z_G: Array, eps: Rows) -> Array:
                return bound.value(theta, params["guide"], z_G, down.centre, eps, data)

            return jax.vmap(at, (0, 1))(down.z_G, noise).mean()

        value, (g_down, g_params) = jax.value_and_grad(term, (0, 1))(down, state.params)
        params, opt_state = _ascend(optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, SiloState(params, opt_state)

    def server(
        state: ServerState, memo: Any, replies: Replies[Up], server_data: Any
    ) -> tuple[ServerState, Info]:
        (value, pull), up = memo, replies.up
        (gradient,) = pull((up.gradient, jnp.ones_like(value)))
        params, opt_state = _ascend(optim, gradient, state.opt_state, state.params)
        total = value + up.bound
        return ServerState(params, opt_state), Info(
            -total, replies.ok & all_finite((total, gradient))
        )

    def shared(state: ServerState) -> Shared:
        return Shared(state.params["theta"], state.params["guide"])

    def private(state: SiloState) -> Private:
        return Private(state.params["private"], state.params["guide"])

    exchange = Exchange(
        broadcast, silo, server, name="sfvi", server_noise=server_noise, silo_noise=silo_noise
    )
    return FederatedAlgorithm(init_server, init_silo, (exchange,), shared, private)


def _ascend(optim: Any, gradient: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """One optimiser step up the bound; Optax steps down a loss."""
    descent = jax.tree.map(jnp.negative, gradient)
    updates, opt_state = optim.update(descent, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
