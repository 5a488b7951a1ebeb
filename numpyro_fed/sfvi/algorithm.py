r"""SFVI: structured federated variational inference.

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

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_fed.basics.trees import all_finite, ascend
from numpyro_fed.data.minibatches import MinibatchNoise
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.numerics.gaussian import Coordinates, Frame, Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.convergence import ConvergenceStats
from numpyro_fed.rounds.exchange import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    WhenAway,
)
from numpyro_fed.rounds.names import SFVI_STEP
from numpyro_fed.rounds.states import CarriedSilo, SharedParams, SiloParams, WarmStart
from numpyro_fed.search.start_point import StartPoint, local_guides_of_result
from numpyro_fed.sfvi.base import GradientAlgorithm


class ServerState(NamedTuple):
    """The server's state: shared parameters as coordinates of a ``frame``, and their optimiser."""

    params: SharedParams
    course: ConvergenceStats[SharedParams]
    frame: Frame
    opt_state: optax.OptState


class SiloState(NamedTuple):
    """A silo's state: its parameters, their optimiser, and the frames of its rows, if any.

    Where a silo may be left out of a round, ``centre`` (dim,) is the point from which its local
    guides measure the globals.
    """

    params: SiloParams
    opt_state: optax.OptState
    frames: dict[str, Gaussian]
    centre: Array | None = None


class Up(NamedTuple):
    """A silo's message: its term of the bound, and the gradient with respect to what was sent."""

    bound: Array
    gradient: GlobalDraws


@dataclass(frozen=True, eq=False)
class SFVIAlgorithm(GradientAlgorithm):
    """SFVI as pure functions; parameters as for :class:`GradientAlgorithm`, and one more.

    ``in_part``: Whether silos may be left out of a step. Replies of those that take part are then
        scaled up, and a silo keeps the centre from which its local guide measures the globals.
    ``steps``: Steps in a round of the schedule: several in a sequential one.
    """

    in_part: bool = False
    steps: int = 1

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        step = Exchange(
            SFVI_STEP,
            self.answer,
            silo_noise=lambda key, state: self.step_noise(key, state.params),
        )
        round_ = Round(
            (step,), self.round, lambda key: self.guide.globals.noise(key, self.num_particles)
        )
        warm_start = WarmStart(self.init_server, self.silo_from_result)
        return self.with_round(round_)._replace(
            warm_start=warm_start,
            watch_reply=lambda up: jnp.array(True),  # that of a silo that has answered
            when_away=WhenAway.SCALE,
            watched_away=np.array(False),
        )

    def init_server(self, key: Array, point: StartPoint | None = None) -> ServerState:
        params, frame = self.first_params(key, point)
        return ServerState(params, convergence.init(params), frame, self.optim.init(params))

    def make_silo_state(
        self, params: SiloParams, frames: dict[str, Gaussian], shared: SharedParams, frame: Frame
    ) -> SiloState:
        keeps_centre = self.in_part and self.guide.locals_depend_on_globals
        centre = jnp.zeros(self.model.dim) if keeps_centre else None
        return SiloState(params, self.optim.init(params), frames, centre)

    def draw(self, params: SharedParams, frame: Frame, eps: Array) -> tuple[GlobalDraws, Array]:
        """Return the server's message, and its own term of the bound."""
        theta = frame.parameters(params.theta)
        coordinates, z_G, log_q = self.guide.globals.draws(frame.globals, params.guide, eps)
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        down = GlobalDraws(theta, z_G, coordinates if self.guide.locals_depend_on_globals else ())
        return down, jnp.mean(log_prior - log_q)

    def round(self, state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Draw the globals, ask every silo for gradients there, and take a step."""
        (down, server_term), vjp = jax.vjp(
            lambda params: self.draw(params, state.frame, noise), state.params
        )
        replies = ask(SFVI_STEP, down)
        # The sum over the silos of this round, scaled up, is an unbiased estimate of that over all.
        times = self.num_silos / len(ask.who)
        up = jax.tree.map(lambda a: times * a, replies.up)
        # The chain rule of the module's docstring: silos' gradients with respect to the message,
        # pulled back through the draw to ``theta`` and ``eta_G``.
        (gradient,) = vjp((up.gradient, jnp.ones_like(server_term)))
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        bound = server_term + up.bound
        course = convergence.update(state.course, -bound, params, whitened=self.starts_from_point)
        after = state._replace(params=params, opt_state=opt_state, course=course)
        # A round reports the sum over its steps, and the bound of a round is their mean.
        return after, Info(-bound / self.steps, all_finite((bound, gradient)))

    def answer(
        self, noise: MinibatchNoise, down: GlobalDraws, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        """Send a silo's term of the bound with its gradients, and take a step on its parameters."""
        if isinstance(down.coordinates, Coordinates) and state.centre is not None:
            centre_now = down.coordinates.centre
            # The silo may have missed rounds in which the globals' guide moved.
            offset = centre_now - state.centre
            params = self.recentred(state.params, state.frames, offset, data)
            state = state._replace(params=params, centre=centre_now)
        # One backward pass for the message and for the silo's own parameters.
        value, (g_down, g_params) = jax.value_and_grad(
            lambda down, params: self.mean_bound(params, state.frames, down, noise, data), (0, 1)
        )(down, state.params)
        params, opt_state = ascend(self.optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, state._replace(params=params, opt_state=opt_state)

    def silo_from_result(
        self, key: Array, carried: CarriedSilo, point: StartPoint, data: SiloData
    ) -> SiloState:
        """Return a silo's state at the posterior of another run, with its local guides."""
        eta = local_guides_of_result(self.guide, carried, point, data)
        return self.silo_from_guides(key, carried.theta, eta, point)
