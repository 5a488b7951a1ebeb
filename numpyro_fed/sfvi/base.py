"""The base class of SFVI and SFVI-Avg: their first states, and a silo's term of the bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.minibatches import Minibatches, MinibatchNoise, draw_minibatch, rows_at
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.guide import GlobalDraws, Guide
from numpyro_fed.guides.silo_bounds import AtDraw, Bound
from numpyro_fed.numerics.gaussian import Frame, Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    key_as_noise,
)
from numpyro_fed.rounds.names import DEVIATIONS, FROM_MODE, MEANS
from numpyro_fed.rounds.states import Private, Shared, SharedParams, SiloParams
from numpyro_fed.search.expand import SearchState as ModeSiloState
from numpyro_fed.search.mode_search import BestPoints
from numpyro_fed.search.start_point import (
    StartMessage,
    StartPoint,
    local_guides_at_mode,
    start_at_mode,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta


@dataclass(frozen=True, eq=False)
class GradientAlgorithm(ABC):
    """The parts of an algorithm that takes stochastic gradient steps at silos.

    ``optim``: The optimiser of the server and of every silo; each has a state of its own.
    ``num_particles``: Draws of the globals in each step.
    ``minibatches``: Minibatches of the rows in a silo's step.
    ``starts_from_point``: Whether a run starts at the mode (:meth:`round_from_mode`), or at an
        earlier result.
    ``many_globals``: Whether there are too many for a full covariance at that point.
    """

    model: FederatedModel
    guide: Guide
    bound: Bound
    optim: optax.GradientTransformation
    num_particles: int
    num_silos: int
    minibatches: Minibatches | None = None
    starts_from_point: bool = False
    many_globals: bool = False

    @abstractmethod
    def algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm as pure functions."""

    @abstractmethod
    def init_server(self, key: Array, point: StartPoint | None = None) -> Any:
        """Return the server's first state, at a point or without one."""

    @abstractmethod
    def make_silo_state(
        self, params: SiloParams, frames: dict[str, Gaussian], shared: SharedParams, frame: Frame
    ) -> Any:
        """Return a silo's first state, with ``frames`` of its local guides.

        ``shared`` are the first shared parameters, in their ``frame``.
        """

    def init_silo(self, key: Array, data: SiloData) -> Any:
        """Return a silo's first state, before the mode is known."""
        # A run from the mode replaces these states (:meth:`round_from_mode`). They are made all the
        # same: runtimes need their shapes before the search has ended.
        key_private, key_guide = jax.random.split(key)
        private = self.model.init_private(key_private, data)
        eta = self.guide.init_local(key_guide, data)
        # The silo keeps no shared parameters: the frame and the optimiser's first state do not
        # depend on their values, so the key may be used again.
        return self.silo_from_guides(key, private, eta)

    def silo_from_guides(
        self,
        key: Array,
        private: Theta,
        eta: dict[str, GuideParams],
        point: StartPoint | None = None,
    ) -> Any:
        """Return a silo's first state with local guides, the frames of its rows from a mode on."""
        frames, inside = self.guide.to_frame(eta) if self.starts_from_point else ({}, eta)
        first = self.first_params(key, point)
        return self.make_silo_state(SiloParams(inside, private), frames, *first)

    def first_params(
        self, key: Array, point: StartPoint | None = None
    ) -> tuple[SharedParams, Frame]:
        """Return the first shared parameters and their frame; at a point, zero and standard in it.

        Where the point is not known yet they are a placeholder of these shapes.
        """
        if point is None and not self.starts_from_point:
            key_theta, key_guide = jax.random.split(key)
            theta = self.model.init_theta(key_theta)
            params = SharedParams(self.guide.init_global(key_guide), theta)
            return params, Frame.identity(self.model.dim)
        if point is None:
            theta, dim = self.model.init_theta(key), self.model.dim
            root = jnp.ones(dim) if self.many_globals else jnp.eye(dim)
            point = StartPoint(theta, jax.tree.map(jnp.ones_like, theta), jnp.zeros(dim), root)
        # The globals' guide has standard deviations of one in the frame: those of the posterior,
        # as far as its curvature tells.
        zeros = jax.tree.map(jnp.zeros_like, point.theta)
        eta = self.guide.globals.init(key, jnp.zeros_like(point.centre), 1.0)
        return SharedParams(eta, zeros), point.frame(self.guide.globals)

    def round_from_mode(self) -> Round:
        """Return the round from the states of a search for the mode to those of a run."""

        def silo(
            key: Array, down: StartMessage, state: ModeSiloState, data: SiloData
        ) -> tuple[Reply[tuple[()]], Any]:
            eta = local_guides_at_mode(self.model, self.guide, down, state, data)
            after = self.silo_from_guides(key, state.private, eta, down.point)
            return Reply((), all_finite(eta)), after

        def run(state: BestPoints[Any], key: Array, ask: Ask) -> tuple[Any, Info]:
            # Silos reply with nothing, but the exchange is needed: each makes its own local guides,
            # from data and modes that never leave it.
            message = start_at_mode(self.model, state)
            ask(FROM_MODE, message)
            after = self.init_server(key, message.point)
            return after, Info(jnp.zeros(()), all_finite(after))

        return Round((Exchange(FROM_MODE, silo, silo_noise=key_as_noise),), run, key_as_noise)

    def with_round(self, round_: Round, *opening: Round) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm of this round, and of opening rounds beside those of networks."""
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            round_,
            lambda state: Shared(
                state.frame.parameters(state.params.theta), state.params.guide, state.frame.globals
            ),
            lambda state: Private(
                state.params.private,
                self.guide.from_frame(state.frames, state.params.guide),
                state.centre,
            ),
            done=lambda state: convergence.settled(state.course),
            opening=(*standardising_rounds(self.guide), *opening),
        )

    def step_noise(self, key: Array, params: SiloParams) -> MinibatchNoise:
        """Return the noise of one step at a silo."""
        sizes = {plate: len(eta["loc"]) for plate, eta in params.guide.items()}
        if self.minibatches is None:
            return MinibatchNoise(self.bound.noise(key, sizes, self.num_particles))
        key, key_which = jax.random.split(key)
        rows = self.bound.noise(key, self.minibatches.sizes(sizes), self.num_particles)
        return MinibatchNoise(rows, self.minibatches.noise(key_which))

    def mean_bound(
        self,
        params: SiloParams,
        frames: dict[str, Gaussian],
        draws: GlobalDraws,
        noise: MinibatchNoise,
        data: SiloData,
    ) -> Array:
        """Return a silo's term of the bound (), the mean over draws of the globals."""
        coordinates, theta = draws.in_frame, {**draws.theta, **params.private}
        batch, indices = draw_minibatch(self.minibatches, noise.which, data)
        eta = self.guide.from_frame(rows_at(frames, indices), rows_at(params.guide, indices))

        def at_draw(z: Array, u: Array, eps: Rows) -> Array:
            at = AtDraw(theta, eta, z, coordinates._replace(u=u), batch)
            return self.bound.value(at, eps)

        return jax.vmap(at_draw, (0, 0, 1))(draws.z_G, coordinates.u, noise.rows).mean()

    def recentred(
        self, params: SiloParams, frames: dict[str, Gaussian], offset: Array, data: SiloData
    ) -> SiloParams:
        """Return a silo's parameters, with local guides measured from a moved centre.

        The distributions stay the same. The centre of the globals' guide has moved by ``offset``
        (dim,) since the silo last took part; means and scales that are read off at the old centre
        would be those of other globals.
        """
        guides = params.guide
        in_z = self.guide.from_frame(frames, guides)
        offsets = self.guide.offsets_by_plate(in_z, offset, data)
        moved = {p: self.guide.locals[p].recentre(guides[p], offsets[p]) for p in guides}
        return params._replace(guide=moved)


def standardising_rounds(guide: Guide) -> tuple[Round, ...]:
    """Return the two opening rounds of a guide with networks, or none.

    In the first, silos send sums of the inputs; in the second, sums of squared deviations from the
    mean of all silos. One round with sums of squares would do, but would lose the variance of
    numbers far from zero to rounding.
    """
    encoders = [e for e in guide.encoders.values() if e.hidden]

    def round_of(name: str, power: int) -> Round:
        """Return the round for means of a power of the inputs, measured from the shift so far."""

        def silo(
            noise: object, down: dict[str, Array], state: object, data: SiloData
        ) -> tuple[Reply[dict[str, tuple[Array, Array]]], object]:
            sums: dict[str, tuple[Array, Array]] = {}
            for encoder in encoders:
                x = encoder.features(data) - down[encoder.name]
                number = data.masked(encoder.plate, jnp.ones(len(x))).sum()
                sums[encoder.name] = number, data.masked(encoder.plate, x**power).sum(0)
            return Reply(sums, all_finite(sums)), state

        def run(state: Any, noise: object, ask: Ask) -> tuple[Any, Info]:
            theta = dict(state.params.theta)
            replies = ask(name, {e.name: theta[e.name]["shift"] for e in encoders})
            for encoder, (number, total) in replies.up.items():
                mean = total / number
                # A constant input has no deviation: it is left in its own units.
                sd = jnp.where(mean > 0, jnp.sqrt(jnp.abs(mean)), 1.0)
                theta[encoder] = theta[encoder] | ({"shift": mean} if power == 1 else {"scale": sd})
            after = state._replace(params=state.params._replace(theta=theta))
            return after, Info(jnp.zeros(()), jnp.array(True))

        return Round((Exchange(name, silo),), run)

    return (round_of(MEANS, 1), round_of(DEVIATIONS, 2)) if encoders else ()
