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

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import (
    Ask,
    Carry,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Reply,
    Round,
    Shared,
    ascend,
    own_key,
)
from numpyro_fed.algorithms.begin import (
    BEGIN,
    Frame,
    frame_at,
    local_guides,
    somewhere,
    whitener_of,
)
from numpyro_fed.algorithms.mode import SiloState as Looked
from numpyro_fed.algorithms.settling import Course
from numpyro_fed.algorithms.standardise import standardising
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.structured import Guide, Origin
from numpyro_fed.model.data import SiloData, Sizes
from numpyro_fed.model.minibatch import Minibatches, Noise, drawn, rows_at
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
    steps of that from a ``reference``. ``whitener`` says in which units it measures the globals,
    ``centre`` from where, if that is kept.
    """

    params: dict[str, Any]
    opt_state: Any
    reference: dict[str, GuideParams] | tuple[()] = ()
    whitener: Array | None = None
    centre: Array | None = None


class Down(NamedTuple):
    """What the server sends: parameters, draws of the globals (particles, dim), their centre."""

    theta: dict[str, Any]
    z_G: Array
    centre: Array


class Up(NamedTuple):
    """What a silo sends: its term of the bound, the gradient with respect to what it was sent."""

    bound: Array
    gradient: Down


@dataclass(frozen=True, eq=False)
class StructuredVI:
    """The parts of the algorithm; the server and every silo use ``optim``, each with its own state.

    Parameters
    ----------
    model : FederatedModel
    guide : Guide
    bound : SiloBound
    optim : optax.GradientTransformation
    num_particles : int
        Draws of the globals in each step.
    num_silos : int
    in_part : bool
        Whether silos may be left out of a step. What those that take part answer is then scaled
        up, and a silo keeps in mind from where its own guide measures the globals.
    minibatches : Minibatches, optional
        Of the rows in a silo's step.
    from_mode : bool
        Whether states come from :meth:`begin`.
    wide : bool
        Whether the search there is for many globals.
    """

    model: FederatedModel
    guide: Guide
    bound: SiloBound
    optim: optax.GradientTransformation
    num_particles: int
    num_silos: int
    in_part: bool = False
    minibatches: Minibatches | None = None
    from_mode: bool = False
    wide: bool = False

    def algorithm(self) -> FederatedAlgorithm:
        """As pure functions."""
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round((self.exchange,), self.round, self.server_noise),
            self.shared,
            self.private,
            done=lambda state: settling.settled(state.course),
            opening=standardising(self.guide),
            carry=Carry(self.carried_server, self.carried_silo),
        )

    @cached_property
    def exchange(self) -> Exchange:
        """What silos are asked in a step."""
        return Exchange("sfvi", self.silo, silo_noise=self.silo_noise)

    def init_server(self, key: Array) -> ServerState:
        if self.from_mode:
            frame = somewhere(self.model, self.model.init_theta(key), wide=self.wide)
            return self.server_from(key, frame)
        key_theta, key_guide = jax.random.split(key)
        theta = self.model.init_theta(key_theta)
        params = {"theta": theta, "guide": self.guide.init_global(key_guide)}
        return ServerState(params, self.optim.init(params), settling.begin(params))

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        key_private, key_guide = jax.random.split(key)
        private = self.model.init_private(key_private, data)
        eta = self.guide.init_local(key_guide, data)
        nowhere = jnp.zeros(self.model.dim)
        if self.from_mode:
            whitener = jnp.ones(self.model.dim) if self.wide else jnp.eye(self.model.dim)
            return self.silo_from(private, eta, Origin(nowhere, whitener))
        params = {"private": private, "guide": eta}
        return SiloState(params, self.optim.init(params), **self.kept(Origin(nowhere)))

    def kept(self, origin: Origin) -> dict[str, Any]:
        """What a silo keeps of where its own guide, if it has one, measures the globals from."""
        if not self.guide.locals:
            return {}
        return {"whitener": origin.whitener, "centre": origin.centre if self.in_part else None}

    def server_noise(self, key: Array) -> Any:
        return self.guide.globals.noise(key, self.num_particles)

    def silo_noise(self, key: Array, state: SiloState) -> Noise:
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params["guide"].items()}
        return noise_of(self.bound, self.minibatches, key, sizes, self.num_particles)

    def draw(self, params: dict[str, Any], reference: Any, eps: Any) -> tuple[Down, Array]:
        """What is sent, and the server's own term of the bound."""
        theta, eta = placed(self.guide, params, reference)
        z_G, log_q = jax.vmap(self.guide.globals.draw, (None, 0))(eta, eps)
        down = Down(theta, z_G, self.guide.globals.centre(eta))
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        return down, jnp.mean(log_prior - log_q)

    def round(self, state: ServerState, noise: Any, ask: Ask) -> tuple[ServerState, Info]:
        """Draw the globals, ask every silo for gradients there, and take a step."""
        (down, value), pull = jax.vjp(
            lambda params: self.draw(params, state.reference, noise), state.params
        )
        replies = ask(self.exchange.name, down)
        times = self.num_silos / len(ask.who)
        up = jax.tree.map(lambda a: times * a, replies.up)
        (gradient,) = pull((up.gradient, jnp.ones_like(value)))
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        total = value + up.bound
        standard = bool(state.reference)
        course = settling.follow(state.course, -total, params, standard=standard)
        after = state._replace(params=params, opt_state=opt_state, course=course)
        return after, Info(-total, all_finite((total, gradient)))

    def silo(
        self, noise: Noise, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        if self.in_part and self.guide.locals:
            state = recentred(self.guide, state, down.centre, data)
        here, places = drawn(self.minibatches, noise.which, data)

        def term(down: Down, params: dict[str, Any]) -> Array:
            theta = {**down.theta, **params["private"]}
            eta = rows_at(placed_locals(self.guide, params, state.reference), places)
            origin = Origin(down.centre, state.whitener)

            def at(z_G: Array, eps: Rows) -> Array:
                return self.bound.value(theta, eta, z_G, origin, eps, here)

            return jax.vmap(at, (0, 1))(down.z_G, noise.rows).mean()

        value, (g_down, g_params) = jax.value_and_grad(term, (0, 1))(down, state.params)
        params, opt_state = ascend(self.optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, state._replace(params=params, opt_state=opt_state)

    def shared(self, state: ServerState) -> Shared:
        return placed(self.guide, state.params, state.reference)

    def private(self, state: SiloState) -> Private:
        eta = placed_locals(self.guide, state.params, state.reference)
        return Private(state.params["private"], eta, state.centre, state.whitener)

    def server_from(self, key: Array, frame: Frame) -> ServerState:
        """The server's state at a frame: no step from there."""
        eta = self.guide.globals.around(key, frame.centre, frame.root)
        params = jax.tree.map(jnp.zeros_like, {"theta": frame.theta, "guide": eta})
        reference = Reference(frame.theta, frame.unit, eta)
        return ServerState(params, self.optim.init(params), settling.begin(params), reference)

    def silo_from(
        self, private: dict[str, Any], eta: dict[str, GuideParams], origin: Origin
    ) -> SiloState:
        """A silo's state with local guides ``eta``: no step from there."""
        params = {"private": private, "guide": jax.tree.map(jnp.zeros_like, eta)}
        return SiloState(params, self.optim.init(params), eta, **self.kept(origin))

    def carried_server(self, key: Array, frame: Frame) -> ServerState:
        return self.server_from(key, frame)

    def carried_silo(self, key: Array, own: Private, frame: Frame, data: SiloData) -> SiloState:
        whitener, eta = whitener_of(own.whitener, self.model.dim, wide=self.wide), own.guide
        if own.centre is not None:
            eta = self.guide.recentre(eta, Origin(own.centre, whitener), frame.centre, data)
        return self.silo_from(own.theta, eta, Origin(frame.centre, whitener))

    def begin(self) -> Round:
        """Return the round from the states of a search for the mode.

        The server sends the frame; silos answer with nothing.
        """

        def silo(
            noise: Any, down: Frame, state: Looked, data: SiloData
        ) -> tuple[Reply[tuple[()]], SiloState]:
            z_L = jax.tree.map(lambda a: a[down.start], state.z_L)
            held = {**down.theta, **state.private}
            eta = local_guides(self.model, self.guide, held, down, z_L, data)
            after = self.silo_from(state.private, eta, Origin(down.centre, down.whitener))
            return Reply((), all_finite(eta)), after

        def run(state: Any, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
            frame = frame_at(self.model, state)
            ask(BEGIN, frame)
            after = self.server_from(noise, frame)
            return after, Info(jnp.zeros(()), all_finite(after))

        return Round((Exchange(BEGIN, silo),), run, own_key)


def noise_of(
    bound: SiloBound, minibatches: Minibatches | None, key: Array, sizes: Sizes, particles: int
) -> Noise:
    """The noise of one step at a silo with so many rows of each silo plate."""
    if minibatches is None:
        return Noise(bound.noise(key, sizes, particles))
    key, key_which = jax.random.split(key)
    rows = bound.noise(key, minibatches.sizes(sizes), particles)
    return Noise(rows, minibatches.noise(key_which))


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


def recentred(guide: Guide, state: Any, centre: Array, data: SiloData) -> Any:
    """A silo's state with the same local guides, which measure the globals from another centre:
    theirs may be far from where it was when the silo was last asked.
    """
    eta = placed_locals(guide, state.params, state.reference)
    there = guide.recentre(eta, Origin(state.centre, state.whitener), centre, data)
    own, reference = state.params["guide"], state.reference
    for p in (p for p in eta if p not in guide.encoders):
        off = {name: there[p][name] - eta[p][name] for name in ("loc", "log_scale")}
        # A step's mean is in units of the reference: that is shifted, and not the step.
        held = reference if reference else own
        shifted = {**held[p], "loc": held[p]["loc"] + off["loc"]}
        if reference:
            reference = {**reference, p: shifted}
        else:
            own = {**own, p: shifted}
        own = {**own, p: {**own[p], "log_scale": own[p]["log_scale"] + off["log_scale"]}}
    params = {**state.params, "guide": own}
    return state._replace(params=params, reference=reference, centre=centre)
