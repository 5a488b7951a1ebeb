"""The base class of SFVI and SFVI-Avg: their parts, first states, local guides and views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Reply,
    Round,
    Shared,
    SharedParams,
    SiloParams,
    key_as_noise,
)
from numpyro_fed.algorithms.base import Silo as AnySilo
from numpyro_fed.algorithms.begin import (
    FROM_MODE,
    StartMessage,
    StartPoint,
    local_guides_at_mode,
    start_at_mode,
)
from numpyro_fed.algorithms.expand import SiloState as ModeSiloState
from numpyro_fed.algorithms.mode import Search
from numpyro_fed.bounds import Bound
from numpyro_fed.frame import Frame
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.structured import Guide
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.model.minibatch import Minibatches, MinibatchNoise
from numpyro_fed.trees import all_finite


class InputSums(NamedTuple):
    """Sums over a silo's rows: their number (), and a sum (width,) for each input of a network."""

    number: Array
    total: Array


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
        noise: object, down: dict[str, Array], state: AnySilo, data: SiloData
    ) -> tuple[Reply[dict[str, InputSums]], AnySilo]:
        sums: dict[str, InputSums] = {}
        for plate, encoder in guide.encoders.items():
            if encoder.standardises:
                x = encoder.features(data) - down[encoder.name]
                number = data.masked(plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = InputSums(number, data.masked(plate, x**power).sum(0))
        return Reply(sums, all_finite(sums)), state

    def run(state: Any, noise: object, ask: Ask) -> tuple[Any, Info]:
        theta = dict(state.params.theta)
        names = [e.name for e in guide.encoders.values() if e.standardises]
        replies = ask(name, {encoder: theta[encoder]["shift"] for encoder in names})
        for encoder, sums in replies.up.items():
            mean = sums.total / sums.number
            # A constant input has no deviation: it is left in its own units.
            sd = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
            units = {"shift": mean} if power == 1 else {"scale": sd}
            theta[encoder] = theta[encoder] | units
        after = state._replace(params=state.params._replace(theta=theta))
        return after, Info(jnp.zeros(()), jnp.array(True))

    return Round((Exchange(name, silo),), run)


class _Server(Protocol):
    """The state of a server that holds shared parameters and a guide of the globals."""

    @property
    def params(self) -> SharedParams: ...

    @property
    def frame(self) -> Frame: ...


class _Silo(Protocol):
    """The state of a silo that holds private parameters and local guides."""

    @property
    def params(self) -> SiloParams: ...

    @property
    def frames(self) -> dict[str, Gaussian]: ...

    @property
    def centre(self) -> Array | None: ...


class StartParams(NamedTuple):
    """The start of the steps: the server's first parameters, and their frame."""

    params: SharedParams
    frame: Frame


Server = TypeVar("Server", bound=_Server)
Silo = TypeVar("Silo", bound=_Silo)


@dataclass(frozen=True, eq=False)
class ByGradients(ABC, Generic[Server, Silo]):
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
    def algorithm(self) -> FederatedAlgorithm[Server, Silo]:
        """Return the algorithm as pure functions."""

    @abstractmethod
    def server_at(self, start: StartParams) -> Server:
        """Return the server's state before the first step."""

    @abstractmethod
    def silo_at(self, params: SiloParams, frames: dict[str, Gaussian], start: StartParams) -> Silo:
        """Return a silo's state before the first step, with ``frames`` of its local guides."""

    def init_server(self, key: Array) -> Server:
        """Return the first state; of a run from a mode, a placeholder with the same shapes."""
        return self.server_at(self.initial_start(key))

    def init_silo(self, key: Array, data: SiloData) -> Silo:
        """Return a silo's first state, before the mode is known."""
        # A run from the mode replaces these states by :meth:`begin`. They are made all the same:
        # runtimes need their shapes before the search has ended.
        key_private, key_guide = jax.random.split(key)
        private = self.model.init_private(key_private, data)
        eta = self.guide.init_local(key_guide, data)
        if self.from_mode:
            return self.silo_from(private, eta, self.initial_start(key))
        return self.silo_at(SiloParams(eta, private), {}, self.initial_start(key))

    def initial_start(self, key: Array) -> StartParams:
        """Return the start of a run without a mode, or a placeholder for one with it."""
        key_theta, key_guide = jax.random.split(key)
        if self.from_mode:
            theta, dim = self.model.init_theta(key), self.model.dim
            root = jnp.ones(dim) if self.wide else jnp.eye(dim)
            unit = jax.tree.map(jnp.ones_like, theta)
            return self.start_at(key, StartPoint(theta, unit, jnp.zeros(dim), root))
        theta = self.model.init_theta(key_theta)
        params = SharedParams(self.guide.init_global(key_guide), theta)
        return StartParams(params, Frame.identity(self.model.dim))

    def start_at(self, key: Array, point: StartPoint) -> StartParams:
        """Return the start at a point, whose frame makes it zero steps and a standard normal."""
        # The globals' guide has standard deviations of one in the frame: those of the posterior,
        # as far as its curvature tells.
        zeros = jax.tree.map(jnp.zeros_like, point.theta)
        eta = self.guide.globals.init(key, jnp.zeros_like(point.centre), 1.0)
        return StartParams(SharedParams(eta, zeros), point.frame(self.guide.globals))

    def silo_from(self, private: Theta, eta: dict[str, GuideParams], start: StartParams) -> Silo:
        """Return a silo's state with local guides ``eta``, which become the frames of its rows."""
        frames, inside = self.guide.to_frame(eta)
        return self.silo_at(SiloParams(inside, private), frames, start)

    def begin(self) -> Round:
        """Return the round that leads from the states of a search for the mode to those of a run.

        The server sends the start point; silos reply with nothing.
        """

        def silo(
            noise: Array, down: StartMessage, state: ModeSiloState, data: SiloData
        ) -> tuple[Reply[tuple[()]], Silo]:
            eta = local_guides_at_mode(self.model, self.guide, down, state, data)
            after = self.silo_from(state.private, eta, self.start_at(noise, down.point))
            return Reply((), all_finite(eta)), after

        def run(state: Search[Any], noise: Array, ask: Ask) -> tuple[Server, Info]:
            # Silos reply with nothing, but the exchange is needed: each makes its own local guides,
            # from data and modes that never leave it.
            message = start_at_mode(self.model, state)
            ask(FROM_MODE, message)
            after = self.server_at(self.start_at(noise, message.point))
            return after, Info(jnp.zeros(()), all_finite(after))

        return Round((Exchange(FROM_MODE, silo, silo_noise=key_as_noise),), run, key_as_noise)

    def shared(self, state: Server) -> Shared:
        """Return shared parameters and the globals' guide."""
        theta = state.frame.parameters(state.params.theta)
        return Shared(theta, state.params.guide, state.frame.globals)

    def private(self, state: Silo) -> Private:
        """Return a silo's parameters and local guides."""
        eta = self.guide.from_frame(state.frames, state.params.guide)
        return Private(state.params.private, eta, state.centre)

    def step_noise(self, key: Array, state: Silo) -> MinibatchNoise:
        """Return the noise of one step at a silo."""
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params.guide.items()}
        if self.minibatches is None:
            return MinibatchNoise(self.bound.noise(key, sizes, self.num_particles))
        key, key_which = jax.random.split(key)
        rows = self.bound.noise(key, self.minibatches.sizes(sizes), self.num_particles)
        return MinibatchNoise(rows, self.minibatches.noise(key_which))

    def recentred(self, state: Silo, offset: Array, data: SiloData) -> SiloParams:
        """Return a silo's parameters, with local guides measured from a moved centre.

        The distributions stay the same. The centre of the globals' guide has moved by ``offset``
        (dim,) since the silo last took part; means and scales that are read off at the old centre
        would be those of other globals.
        """
        guides = state.params.guide
        centres = self.guide.centres(self.guide.from_frame(state.frames, guides), offset, data)
        moved = {p: self.guide.locals[p].recentre(guides[p], centres[p]) for p in guides}
        return state.params._replace(guide=moved)
