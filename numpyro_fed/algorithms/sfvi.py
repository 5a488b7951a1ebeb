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

from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import (
    Carry,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Replies,
    Reply,
    Shared,
    ascend,
)
from numpyro_fed.algorithms.begin import (
    BEGIN,
    Frame,
    local_guides,
    sending_frame,
    somewhere,
    whitener_of,
)
from numpyro_fed.algorithms.mode import SiloState as Looked
from numpyro_fed.algorithms.settling import Course
from numpyro_fed.guides.gaussian import GuideParams
from numpyro_fed.guides.structured import Guide, Origin
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel, Rows
from numpyro_fed.objectives import SiloBound
from numpyro_fed.trees import all_finite


class Reference(NamedTuple):
    """Where shared parameters and guide began; what is optimised are steps from there, in units in
    which the posterior is about standard. ``unit`` are standard deviations of the parameters.
    """

    theta: dict[str, Any]
    unit: dict[str, Any]
    guide: GuideParams


class ServerState(NamedTuple):
    """``params`` is ``{"theta", "guide"}``: shared parameters and those of the globals' guide,
    or steps from a ``reference``.
    """

    params: dict[str, Any]
    opt_state: Any
    course: Course
    reference: Reference | tuple[()] = ()


class SiloState(NamedTuple):
    """``params`` is ``{"private", "guide"}``: private parameters and those of the local guide, or
    steps of that from a ``reference``. ``whitener`` says in which units it measures the globals.
    """

    params: dict[str, Any]
    opt_state: Any
    reference: dict[str, GuideParams] | tuple[()] = ()
    whitener: Array | None = None


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
    *,
    from_mode: bool = False,
    wide: bool = False,
) -> FederatedAlgorithm:
    """Build the algorithm; the server and every silo use ``optim``, each with its own state.

    ``from_mode`` says that states come from :func:`sfvi_from_mode`, ``wide`` that the search there
    is for many globals.
    """

    def draw(params: dict[str, Any], reference: Any, eps: Any) -> tuple[Down, Array]:
        """What is sent, and the server's own term of the bound."""
        theta, eta = placed(guide, params, reference)
        z_G, log_q = jax.vmap(guide.globals.draw, (None, 0))(eta, eps)
        down = Down(theta, z_G, guide.globals.centre(eta))
        log_prior = jax.vmap(fm.log_prior, (None, 0))(theta, z_G)
        return down, jnp.mean(log_prior - log_q)

    def init_server(key: Array) -> ServerState:
        if from_mode:
            return server_from(fm, guide, optim, key, somewhere(fm, fm.init_theta(key), wide=wide))
        key_theta, key_guide = jax.random.split(key)
        params = {"theta": fm.init_theta(key_theta), "guide": guide.init_global(key_guide)}
        return ServerState(params, optim.init(params), settling.begin(params))

    def init_silo(key: Array, data: SiloData) -> SiloState:
        key_private, key_guide = jax.random.split(key)
        params = {
            "private": fm.init_private(key_private, data),
            "guide": guide.init_local(key_guide, data),
        }
        if from_mode:
            whitener = jnp.ones(fm.dim) if wide else jnp.eye(fm.dim)
            return silo_from(optim, params["private"], params["guide"], whitener)
        return SiloState(params, optim.init(params))

    def server_noise(key: Array) -> Any:
        return guide.globals.noise(key, num_particles)

    def silo_noise(key: Array, state: SiloState) -> Rows:
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params["guide"].items()}
        return bound.noise(key, sizes, num_particles)

    def broadcast(noise: Any, state: ServerState, who: Array, server_data: Any) -> tuple[Down, Any]:
        (down, value), pull = jax.vjp(
            lambda params: draw(params, state.reference, noise), state.params
        )
        return down, (value, pull)

    def silo(
        noise: Rows, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        def term(down: Down, params: dict[str, Any]) -> Array:
            theta, eta = (
                {**down.theta, **params["private"]},
                placed_locals(guide, params, state.reference),
            )
            origin = Origin(down.centre, state.whitener)

            def at(z_G: Array, eps: Rows) -> Array:
                return bound.value(theta, eta, z_G, origin, eps, data)

            return jax.vmap(at, (0, 1))(down.z_G, noise).mean()

        value, (g_down, g_params) = jax.value_and_grad(term, (0, 1))(down, state.params)
        params, opt_state = ascend(optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, state._replace(params=params, opt_state=opt_state)

    def server(
        state: ServerState, memo: Any, replies: Replies[Up], server_data: Any
    ) -> tuple[ServerState, Info]:
        (value, pull), up = memo, replies.up
        (gradient,) = pull((up.gradient, jnp.ones_like(value)))
        params, opt_state = ascend(optim, gradient, state.opt_state, state.params)
        total = value + up.bound
        standard = bool(state.reference)
        course = settling.follow(state.course, -total, params, standard=standard)
        after = state._replace(params=params, opt_state=opt_state, course=course)
        return after, Info(-total, replies.ok & all_finite((total, gradient)))

    def shared(state: ServerState) -> Shared:
        return placed(guide, state.params, state.reference)

    def private(state: SiloState) -> Private:
        eta = placed_locals(guide, state.params, state.reference)
        return Private(state.params["private"], eta, whitener=state.whitener)

    def carried_server(key: Array, frame: Frame) -> ServerState:
        return server_from(fm, guide, optim, key, frame)

    def carried_silo(key: Array, own: Private, frame: Frame, data: SiloData) -> SiloState:
        whitener, eta = whitener_of(own.whitener, fm.dim, wide=wide), own.guide
        if own.centre is not None:
            eta = guide.recentre(eta, Origin(own.centre, whitener), frame.centre, data)
        return silo_from(optim, own.theta, eta, whitener)

    exchange = Exchange(
        broadcast, silo, server, name="sfvi", server_noise=server_noise, silo_noise=silo_noise
    )
    return FederatedAlgorithm(
        init_server,
        init_silo,
        (exchange,),
        shared,
        private,
        done=lambda state: settling.settled(state.course),
        carry=Carry(carried_server, carried_silo),
    )


def placed(guide: Guide, params: dict[str, Any], reference: Reference | tuple[()]) -> Shared:
    """Shared parameters and the globals' guide, from steps if there is a reference."""
    if not reference:
        return Shared(params["theta"], params["guide"])
    theta = jax.tree.map(
        lambda at, unit, step: at + unit * step,
        reference.theta,
        reference.unit,
        params["theta"],
    )
    return Shared(theta, guide.globals.moved(reference.guide, params["guide"]))


def placed_locals(guide: Guide, params: dict[str, Any], reference: Any) -> dict[str, GuideParams]:
    """A silo's local guides, from steps if there is a reference."""
    if not reference:
        return params["guide"]
    return {p: g.moved(reference[p], params["guide"][p]) for p, g in guide.locals.items()}


def server_from(
    fm: FederatedModel, guide: Guide, optim: Any, key: Array, frame: Frame
) -> ServerState:
    """The server's state at a frame: no step from there."""
    eta = guide.globals.around(key, frame.centre, frame.root)
    params = jax.tree.map(jnp.zeros_like, {"theta": frame.theta, "guide": eta})
    reference = Reference(frame.theta, frame.unit, eta)
    return ServerState(params, optim.init(params), settling.begin(params), reference)


def silo_from(
    optim: Any, private: dict[str, Any], eta: dict[str, GuideParams], whitener: Array
) -> SiloState:
    """A silo's state with local guides ``eta``: no step from there."""
    params = {"private": private, "guide": jax.tree.map(jnp.zeros_like, eta)}
    return SiloState(params, optim.init(params), eta, whitener)


def sfvi_from_mode(
    fm: FederatedModel, guide: Guide, optim: optax.GradientTransformation
) -> Exchange:
    """Build the exchange from the states of a search for the mode to those of SFVI.

    The server sends the frame; silos answer with nothing.
    """

    def silo(
        noise: Any, down: Frame, state: Looked, data: SiloData
    ) -> tuple[Reply[tuple[()]], SiloState]:
        z_L = jax.tree.map(lambda a: a[down.start], state.z_L)
        eta = local_guides(fm, guide, {**down.theta, **state.private}, down, z_L, data)
        return Reply((), all_finite(eta)), silo_from(optim, state.private, eta, down.whitener)

    def server(
        state: Any, memo: tuple[Array, Frame], replies: Replies, server_data: Any
    ) -> tuple[ServerState, Info]:
        key, frame = memo
        after = server_from(fm, guide, optim, key, frame)
        return after, Info(jnp.zeros(()), replies.ok & all_finite(after))

    def own_key(key: Array) -> Array:
        return key

    return Exchange(sending_frame(fm), silo, server, name=BEGIN, server_noise=own_key)
