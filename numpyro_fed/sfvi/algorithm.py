r"""SFVI: structured federated variational inference; and the base class of SFVI and SFVI-Avg.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 1. In each round

1. the server draws the globals and sends the draws;
2. every silo replies with the gradients of its own term of the bound, and takes a step on its own
   parameters;
3. the server takes a step on the shared parameters.

One difference from the paper: the server sends the draws ``z_G``, with their coordinates for local
guides, instead of ``eta_G`` and the noise. A silo replies with the gradient with respect to the
draws. The server knows how they depend on ``eta_G``, and applies the chain rule. The numbers are
those of the paper. Messages are smaller, since a full covariance or a flow is never sent, and a
silo's reply does not depend on the family of the guide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.batches import Minibatches, MinibatchNoise, draw_minibatch, rows_at
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.silo_bounds import AtDraw, Bound
from numpyro_fed.guides.structured import Guide
from numpyro_fed.numerics.gaussian import Coordinates, Frame, Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.convergence import ConvergenceStats
from numpyro_fed.rounds.exchange import (
    Ask,
    CarriedSilo,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Reply,
    Round,
    Shared,
    SharedParams,
    SiloParams,
    WarmStart,
    ascend,
    key_as_noise,
)
from numpyro_fed.search.expand import SearchState
from numpyro_fed.search.mode_search import BestPoints
from numpyro_fed.search.start_point import (
    FROM_MODE,
    StartMessage,
    StartPoint,
    local_guides_at_mode,
    local_guides_of_result,
    start_at_mode,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.sites import Rows, Theta


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    Shared parameters, and those of the globals' guide, are coordinates of the ``frame``, which
    silos of SFVI-Avg have too. SFVI has an optimiser, and SFVI-Avg the total weight of all silos,
    their ``rows``.
    """

    params: SharedParams
    course: ConvergenceStats[SharedParams]
    frame: Frame
    opt_state: Any = ()
    rows: Any = ()


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    The local guides are in the ``frames`` of the rows of each plate, if there are any. Where a silo
    may be left out of a round, or takes steps of its own, ``centre`` (dim,) is the point from which
    they measure the globals. ``shared_opt_state`` and ``shared_frame`` belong to steps of SFVI-Avg
    on the shared parameters.
    """

    params: SiloParams
    opt_state: Any
    frames: dict[str, Gaussian]
    centre: Any = None
    shared_opt_state: Any = ()
    shared_frame: Any = ()


# The start of the steps: the server's first parameters, and their frame.
Start = tuple[SharedParams, Frame]


def standardising(guide: Guide) -> tuple[Round, ...]:
    """Return the two opening rounds of a guide with networks, or none.

    In the first, silos send sums of the inputs; in the second, sums of squared deviations from the
    mean of all silos. One round with sums of squares would do, but would lose the variance of
    numbers far from zero to rounding.
    """
    if not any(encoder.standardises for encoder in guide.encoders.values()):
        return ()
    return _round(guide, "means", 1), _round(guide, "deviations", 2)


def _round(guide: Guide, name: str, power: int) -> Round:
    """Return the round for means of a power of the inputs, measured from the shift so far."""

    def silo(
        noise: object, down: dict[str, Array], state: SiloState, data: SiloData
    ) -> tuple[Reply[dict[str, tuple[Array, Array]]], SiloState]:
        sums: dict[str, tuple[Array, Array]] = {}
        for plate, encoder in guide.encoders.items():
            if encoder.standardises:
                x = encoder.features(data) - down[encoder.name]
                number = data.masked(plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = number, data.masked(plate, x**power).sum(0)
        return Reply(sums, all_finite(sums)), state

    def run(state: Any, noise: object, ask: Ask) -> tuple[Any, Info]:
        theta = dict(state.params.theta)
        names = [e.name for e in guide.encoders.values() if e.standardises]
        replies = ask(name, {encoder: theta[encoder]["shift"] for encoder in names})
        for encoder, (number, total) in replies.up.items():
            mean = total / number
            # A constant input has no deviation: it is left in its own units.
            sd = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
            units = {"shift": mean} if power == 1 else {"scale": sd}
            theta[encoder] = theta[encoder] | units
        after = state._replace(params=state.params._replace(theta=theta))
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange(name, silo),), run)


@dataclass(frozen=True, eq=False)
class ByGradients(ABC):
    """The parts of an algorithm that takes stochastic gradient steps at silos.

    ``optim``: The optimiser of the server and of every silo; each has a state of its own.
    ``num_particles``: Draws of the globals in each step.
    ``minibatches``: Minibatches of the rows in a silo's step.
    ``from_mode``: Whether a run starts at the mode, by :meth:`begin`, or at an earlier result.
    ``wide``: Whether the mode is searched by the algorithm for many globals.
    """

    model: FederatedModel
    guide: Guide
    bound: Bound
    optim: optax.GradientTransformation
    num_particles: int
    num_silos: int
    minibatches: Minibatches | None = None
    from_mode: bool = False
    wide: bool = False

    @abstractmethod
    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        """Return the algorithm as pure functions."""

    @abstractmethod
    def server_at(self, params: SharedParams, frame: Frame) -> ServerState:
        """Return the server's state before the first step."""

    @abstractmethod
    def silo_at(self, params: SiloParams, frames: dict[str, Gaussian], start: Start) -> SiloState:
        """Return a silo's state before the first step, with ``frames`` of its local guides."""

    def init_server(self, key: Array) -> ServerState:
        """Return the first state; of a run from a mode, a placeholder with the same shapes."""
        return self.server_at(*self.initial_start(key))

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        """Return a silo's first state, before the mode is known."""
        # A run from the mode replaces these states by :meth:`begin`. They are made all the same:
        # runtimes need their shapes before the search has ended.
        key_private, key_guide = jax.random.split(key)
        private = self.model.init_private(key_private, data)
        eta = self.guide.init_local(key_guide, data)
        if self.from_mode:
            return self.silo_from(private, eta, self.initial_start(key))
        return self.silo_at(SiloParams(eta, private), {}, self.initial_start(key))

    def initial_start(self, key: Array) -> Start:
        """Return the start of a run without a mode, or a placeholder for one with it."""
        key_theta, key_guide = jax.random.split(key)
        if self.from_mode:
            theta, dim = self.model.init_theta(key), self.model.dim
            root = jnp.ones(dim) if self.wide else jnp.eye(dim)
            unit = jax.tree.map(jnp.ones_like, theta)
            return self.start_at(key, StartPoint(theta, unit, jnp.zeros(dim), root))
        theta = self.model.init_theta(key_theta)
        params = SharedParams(self.guide.init_global(key_guide), theta)
        return params, Frame.identity(self.model.dim)

    def start_at(self, key: Array, point: StartPoint) -> Start:
        """Return the start at a point, whose frame makes it zero steps and a standard normal."""
        # The globals' guide has standard deviations of one in the frame: those of the posterior,
        # as far as its curvature tells.
        zeros = jax.tree.map(jnp.zeros_like, point.theta)
        eta = self.guide.globals.init(key, jnp.zeros_like(point.centre), 1.0)
        return SharedParams(eta, zeros), point.frame(self.guide.globals)

    def silo_from(self, private: Theta, eta: dict[str, GuideParams], start: Start) -> SiloState:
        """Return a silo's state with local guides ``eta``, which become the frames of its rows."""
        frames, inside = self.guide.to_frame(eta)
        return self.silo_at(SiloParams(inside, private), frames, start)

    def begin(self) -> Round:
        """Return the round from the states of a search for the mode to those of a run."""

        def silo(
            noise: Array, down: StartMessage, state: SearchState, data: SiloData
        ) -> tuple[Reply[tuple[()]], SiloState]:
            eta = local_guides_at_mode(self.model, self.guide, down, state, data)
            after = self.silo_from(state.private, eta, self.start_at(noise, down.point))
            return Reply((), all_finite(eta)), after

        def run(state: BestPoints[Any], noise: Array, ask: Ask) -> tuple[ServerState, Info]:
            # Silos reply with nothing, but the exchange is needed: each makes its own local guides,
            # from data and modes that never leave it.
            message = start_at_mode(self.model, state)
            ask(FROM_MODE, message)
            after = self.server_at(*self.start_at(noise, message.point))
            return after, Info(jnp.zeros(()), all_finite(after))

        return Round((Exchange(FROM_MODE, silo, silo_noise=key_as_noise),), run, key_as_noise)

    def shared(self, state: ServerState) -> Shared:
        """Return shared parameters and the globals' guide."""
        theta = state.frame.parameters(state.params.theta)
        return Shared(theta, state.params.guide, state.frame.globals)

    def private(self, state: SiloState) -> Private:
        """Return a silo's parameters and local guides."""
        eta = self.guide.from_frame(state.frames, state.params.guide)
        return Private(state.params.private, eta, state.centre)

    def step_noise(self, key: Array, state: SiloState) -> MinibatchNoise:
        """Return the noise of one step at a silo."""
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params.guide.items()}
        if self.minibatches is None:
            return MinibatchNoise(self.bound.noise(key, sizes, self.num_particles))
        key, key_which = jax.random.split(key)
        rows = self.bound.noise(key, self.minibatches.sizes(sizes), self.num_particles)
        return MinibatchNoise(rows, self.minibatches.noise(key_which))

    def mean_bound(
        self,
        theta: Theta,
        params: SiloParams,
        frames: dict[str, Gaussian],
        z_G: Array,
        coordinates: Coordinates,
        noise: MinibatchNoise,
        data: SiloData,
    ) -> Array:
        """Return a silo's term of the bound (), the mean over draws (n, dim) of the globals."""
        batch, indices = draw_minibatch(self.minibatches, noise.which, data)
        eta = self.guide.from_frame(rows_at(frames, indices), rows_at(params.guide, indices))

        def at_draw(z: Array, u: Array, eps: Rows) -> Array:
            at = coordinates._replace(u=u)
            return self.bound.value(AtDraw({**theta, **params.private}, eta, z, at, batch), eps)

        return jax.vmap(at_draw, (0, 0, 1))(z_G, coordinates.u, noise.rows).mean()

    def recentred(self, state: SiloState, offset: Array, data: SiloData) -> SiloParams:
        """Return a silo's parameters, with local guides measured from a moved centre.

        The distributions stay the same. The centre of the globals' guide has moved by ``offset``
        (dim,) since the silo last took part; means and scales that are read off at the old centre
        would be those of other globals.
        """
        guides = state.params.guide
        centres = self.guide.centres(self.guide.from_frame(state.frames, guides), offset, data)
        moved = {p: self.guide.locals[p].recentre(guides[p], centres[p]) for p in guides}
        return state.params._replace(guide=moved)


class Down(NamedTuple):
    """A message: shared parameters, draws (particles, dim), and these in their frame if needed."""

    theta: dict[str, Any]
    z_G: Array
    coordinates: Coordinates | tuple[()]


def down_of(guide: Guide, shared: Shared, z_G: Array) -> Down:
    """Return the message with draws (n, dim) of the globals, from the shared part of a state."""
    theta, eta, frame = shared
    uses = guide.uses_globals
    return Down(theta, z_G, guide.globals.centred_coordinates(frame, eta, z_G) if uses else ())


def coordinates_of(down: Down) -> Coordinates:
    """Return the draws in their frame; placeholders, where no local guide depends on them."""
    if isinstance(down.coordinates, Coordinates):
        return down.coordinates
    return Coordinates(down.z_G, down.z_G[0])


class Up(NamedTuple):
    """A silo's message: its term of the bound, and the gradient with respect to ``Down``."""

    bound: Array
    gradient: Down


@dataclass(frozen=True, eq=False)
class StructuredVI(ByGradients):
    """SFVI as pure functions; parameters as for :class:`ByGradients`, and one more.

    ``in_part``: Whether silos may be left out of a step. Replies of those that take part are then
        scaled up, and a silo keeps the centre from which its local guide measures the globals.
    ``steps``: Steps in a round of the schedule: several in a sequential one.
    """

    in_part: bool = False
    steps: int = 1

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round(
                (self.exchange,),
                self.round,
                lambda key: self.guide.globals.noise(key, self.num_particles),
            ),
            self.shared,
            self.private,
            done=lambda state: convergence.settled(state.course),
            opening=standardising(self.guide),
            carry=WarmStart(
                lambda key, point: self.server_at(*self.start_at(key, point)), self.carried_silo
            ),
            without="scaled",
        )

    @cached_property
    def exchange(self) -> Exchange[SiloState, Down, Up]:
        """Return the exchange of a step."""
        return Exchange("sfvi", self.silo, silo_noise=self.step_noise)

    def carried_silo(
        self, key: Array, carried: CarriedSilo, point: StartPoint, data: SiloData
    ) -> SiloState:
        """Return a silo's state at the posterior of another run, with its local guides."""
        eta = local_guides_of_result(self.guide, carried, point, data)
        return self.silo_from(carried.theta, eta, self.start_at(key, point))

    def server_at(self, params: SharedParams, frame: Frame) -> ServerState:
        return ServerState(params, convergence.init(params), frame, self.optim.init(params))

    def silo_at(self, params: SiloParams, frames: dict[str, Gaussian], start: Start) -> SiloState:
        centre = jnp.zeros(self.model.dim) if self.in_part and self.guide.uses_globals else None
        return SiloState(params, self.optim.init(params), frames, centre)

    def draw(self, params: SharedParams, frame: Frame, eps: Array) -> tuple[Down, Array]:
        """Return the server's message, and its own term of the bound."""
        theta = frame.parameters(params.theta)
        coordinates, z_G, log_q = self.guide.globals.draws(frame.globals, params.guide, eps)
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        down = Down(theta, z_G, coordinates if self.guide.uses_globals else ())
        return down, jnp.mean(log_prior - log_q)

    def round(self, state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Draw the globals, ask every silo for gradients there, and take a step."""
        (down, value), vjp = jax.vjp(
            lambda params: self.draw(params, state.frame, noise), state.params
        )
        replies = ask(self.exchange.name, down)
        # The sum over the silos of this round, scaled up, is an unbiased estimate of that over all.
        times = self.num_silos / len(ask.who)
        up = jax.tree.map(lambda a: times * a, replies.up)
        # The chain rule of the module's docstring: silos' gradients with respect to the message,
        # pulled back through the draw to ``theta`` and ``eta_G``.
        (gradient,) = vjp((up.gradient, jnp.ones_like(value)))
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        total = value + up.bound
        course = convergence.update(state.course, -total, params, whitened=self.from_mode)
        after = state._replace(params=params, opt_state=opt_state, course=course)
        # A round reports the sum over its steps, and the bound of a round is their mean.
        return after, Info(-total / self.steps, all_finite((total, gradient)))

    def silo(
        self, noise: MinibatchNoise, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        if isinstance(down.coordinates, Coordinates) and state.centre is not None:
            centre_now = down.coordinates.centre
            # The silo may have missed rounds in which the globals' guide moved.
            params = self.recentred(state, centre_now - state.centre, data)
            state = state._replace(params=params, centre=centre_now)

        def term(down: Down, params: SiloParams) -> Array:
            at = down.z_G, coordinates_of(down)
            return self.mean_bound(down.theta, params, state.frames, *at, noise, data)

        # One backward pass for the message and for the silo's own parameters.
        value, (g_down, g_params) = jax.value_and_grad(term, (0, 1))(down, state.params)
        params, opt_state = ascend(self.optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, state._replace(params=params, opt_state=opt_state)
