r"""SFVI: structured federated variational inference.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 1. Each round, the server draws
the globals, every silo answers with gradients of its own term of the bound and takes a step on its
own parameters, and the server takes a step on the shared ones.

Where this departs from the paper: the server sends the draws ``z_G`` instead of ``eta_G`` and the
noise, with their coordinates for local guides, and a silo answers with the gradient with respect to
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
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import (
    Ask,
    CarriedSilo,
    Exchange,
    FederatedAlgorithm,
    Info,
    OwnParams,
    Reply,
    Round,
    SharedParams,
    WarmStart,
    ascend,
)
from numpyro_fed.algorithms.begin import StartPoint, local_guides_of_result
from numpyro_fed.algorithms.convergence import ConvergenceStats
from numpyro_fed.algorithms.gradients import ByGradients, Start
from numpyro_fed.algorithms.standardise import standardising
from numpyro_fed.frame import Coordinates, Frame
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.minibatch import Noise, draw_minibatch, rows_at
from numpyro_fed.trees import all_finite


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    Shared parameters and those of the globals' guide are both in the ``frame``.
    """

    params: SharedParams
    opt_state: Any
    course: ConvergenceStats[SharedParams]
    frame: Frame


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    The local guides are in the ``frames`` of the rows of each plate, if there are any. ``centre``
    is from where they measure the globals, where a silo may be left out of a round.
    """

    params: OwnParams
    opt_state: Any
    frames: dict[str, Gaussian]
    centre: Array | None = None


class Down(NamedTuple):
    """A message of the server: parameters, and draws of the globals (particles, dim).

    ``seen`` are the draws as local guides measure them, where any guide does.
    """

    theta: dict[str, Any]
    z_G: Array
    seen: Coordinates | tuple[()]


def measured(down: Down) -> Coordinates:
    """Return the draws as local guides measure them; anything, where none does."""
    return down.seen if isinstance(down.seen, Coordinates) else Coordinates(down.z_G, down.z_G[0])


class Up(NamedTuple):
    """A silo's message: its term of the bound, the gradient with respect to what it was sent."""

    bound: Array
    gradient: Down


@dataclass(frozen=True, eq=False)
class StructuredVI(ByGradients[ServerState, SiloState]):
    """The parts of the algorithm.

    Parameters
    ----------
    in_part : bool
        Whether silos may be left out of a step. What those that take part answer is then scaled
        up, and a silo keeps in mind from where its own guide measures the globals.
    """

    in_part: bool = False

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        """Return the algorithm as pure functions."""
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round((self.exchange,), self.round, self.server_noise),
            self.shared,
            self.private,
            done=lambda state: convergence.settled(state.course),
            opening=standardising(self.guide),
            carry=WarmStart(self.server_from, self.carried_silo),
        )

    @cached_property
    def exchange(self) -> Exchange[SiloState, Down, Up]:
        """Return what silos are asked in a step."""
        return Exchange("sfvi", self.silo, silo_noise=self.step_noise)

    def server_at(self, start: Start) -> ServerState:
        params, frame = start
        return ServerState(params, self.optim.init(params), convergence.begin(params), frame)

    def server_from(self, key: Array, begun: StartPoint) -> ServerState:
        """Return the server's state where a run begins."""
        return self.server_at(self.start_at(key, begun))

    def silo_at(self, own: OwnParams, frames: dict[str, Gaussian], start: Start) -> SiloState:
        kept = jnp.zeros(self.model.dim) if self.in_part and self.guide.uses_globals else None
        return SiloState(own, self.optim.init(own), frames, kept)

    def carried_silo(
        self, key: Array, own: CarriedSilo, begun: StartPoint, data: SiloData
    ) -> SiloState:
        """Return a silo's state where it begins at an earlier result of its own."""
        eta = local_guides_of_result(self.guide, own, begun, data)
        return self.silo_from(own.theta, eta, self.start_at(key, begun))

    def server_noise(self, key: Array) -> Array:
        return self.guide.globals.noise(key, self.num_particles)

    def draw(self, params: SharedParams, frame: Frame, eps: Array) -> tuple[Down, Array]:
        """Return what is sent, and the server's own term of the bound."""
        theta = frame.parameters(params.theta)
        seen, z_G, log_q = self.guide.globals.draws(frame.globals, params.guide, eps)
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        down = Down(theta, z_G, seen if self.guide.uses_globals else ())
        return down, jnp.mean(log_prior - log_q)

    def round(self, state: ServerState, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Draw the globals, ask every silo for gradients there, and take a step."""
        (down, value), pull = jax.vjp(
            lambda params: self.draw(params, state.frame, noise), state.params
        )
        replies = ask(self.exchange.name, down)
        times = self.num_silos / len(ask.who)
        up = jax.tree.map(lambda a: times * a, replies.up)
        (gradient,) = pull((up.gradient, jnp.ones_like(value)))
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        total = value + up.bound
        course = convergence.follow(state.course, -total, params, whitened=self.from_mode)
        after = state._replace(params=params, opt_state=opt_state, course=course)
        return after, Info(-total, all_finite((total, gradient)))

    def silo(
        self, noise: Noise, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        if isinstance(down.seen, Coordinates) and state.centre is not None:
            now = down.seen.centre
            params = self.recentred(state, now - state.centre, data)
            state = state._replace(params=params, centre=now)
        here, places = draw_minibatch(self.minibatches, noise.which, data)
        frames = rows_at(state.frames, places)

        def term(down: Down, params: OwnParams) -> Array:
            theta = {**down.theta, **params.private}
            eta = self.guide.placed(frames, rows_at(params.guide, places))

            def at(z_G: Array, u: Array, eps: Rows) -> Array:
                seen = Coordinates(u, centre)
                return self.bound.value(theta, eta, z_G, seen, eps, here)

            u, centre = measured(down)
            return jax.vmap(at, (0, 0, 1))(down.z_G, u, noise.rows).mean()

        value, (g_down, g_params) = jax.value_and_grad(term, (0, 1))(down, state.params)
        params, opt_state = ascend(self.optim, g_params, state.opt_state, state.params)
        reply = Reply(Up(value, g_down), all_finite((value, g_down)))
        return reply, state._replace(params=params, opt_state=opt_state)
