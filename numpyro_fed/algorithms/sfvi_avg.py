r"""SFVI-Avg: several steps at each silo, then an average of the globals' guides.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 2. A silo takes ``local_steps``
stochastic gradient steps on

.. math::
    \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G) + \frac{N}{N_j} \mathcal{L}_j(z_G)\Big],

as if all ``N`` rows were like its own :math:`N_j`. It sends its shared parameters and its guide of
the globals after these steps, and the server replaces its own by an average. Where a run starts at
the mode, steps and average are in coordinates in which the posterior is about standard, so that
units do not matter.

Two differences from the paper: silos keep the state of their optimiser from round to round, so that
a single silo with one local step is SFVI; and weights may be the silos' numbers of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import barycenters, linalg
from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import (
    Ask,
    Combine,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    SharedParams,
    SiloParams,
    ascend,
    key_as_noise,
)
from numpyro_fed.algorithms.convergence import ConvergenceStats
from numpyro_fed.algorithms.sfvi_base import ByGradients, StartParams
from numpyro_fed.algorithms.standardise import standardising
from numpyro_fed.bounds import Given
from numpyro_fed.frame import Frame
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.model.binding import Rows
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.minibatch import MinibatchNoise, draw_minibatch, rows_at
from numpyro_fed.trees import Tree, all_finite

COUNT = "rows"  # the name of the exchange that adds them up

Message = TypeVar("Message")
Pair = tuple[Array, Array]


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``params`` are coordinates of a ``frame`` that silos have too. ``rows`` is the total weight of
    all silos.
    """

    params: SharedParams
    course: ConvergenceStats[SharedParams]
    rows: Array
    frame: Frame


class SiloState(NamedTuple):
    """The state that a silo keeps from round to round.

    ``params``, ``opt_state`` and ``frames`` are those of SFVI. ``shared_opt_state`` belongs to the
    silo's steps on the shared parameters, and ``shared_frame`` is the server's frame. The local
    guide measures the globals from ``centre`` (dim,), where the silo's own steps ended. The average
    that the next message brings has another centre.
    """

    params: SiloParams
    opt_state: Any
    shared_opt_state: Any
    centre: Array
    frames: dict[str, Gaussian]
    shared_frame: Frame


class Down(NamedTuple):
    """A message of the server: its parameters, and the total weight of all silos."""

    params: SharedParams
    rows: Array


class Up(NamedTuple):
    """A silo's message after its steps.

    ``bound`` is its estimate of the whole bound at the start of the round, ``theta`` are the shared
    parameters, and ``guide`` is the message of the :class:`Aggregation`.
    """

    bound: Array
    theta: dict[str, Any]
    guide: Any


@dataclass(frozen=True)
class Aggregation(ABC, Generic[Message]):
    """A rule by which silos' Gaussian guides of the globals are averaged.

    Attributes
    ----------
    combine : Combine
    scaled : bool
        Whether a silo's term is scaled up as if its data were all. If not, each silo counts a share
        of the prior instead, and the guides are multiplied.
    """

    combine: ClassVar[Combine] = Combine.SUM
    scaled: ClassVar[bool] = True

    @abstractmethod
    def message(self, eta: GuideParams, sent: GuideParams) -> Message:
        """Return a silo's message on its guide ``eta``, given the one that it was sent."""

    @abstractmethod
    def average(self, message: Message, weights: Array, sent: GuideParams) -> GuideParams:
        """Return the average guide.

        ``message`` is the weighted mean of all messages. Under ``GATHER`` it has all of them along
        a leading axis, with ``weights`` (J,) that sum to one.
        """


class AverageOfParameters(Aggregation[GuideParams]):
    """The rule that averages the guides' parameters as they are."""

    def message(self, eta: GuideParams, sent: GuideParams) -> GuideParams:
        return eta

    def average(self, message: GuideParams, weights: Array, sent: GuideParams) -> GuideParams:
        return message


class DiagonalWasserstein(Aggregation[Pair]):
    """The Wasserstein barycenter of independent normals: average means and standard deviations."""

    def message(self, eta: GuideParams, sent: GuideParams) -> Pair:
        q = Gaussian.from_params(eta)
        return q.loc, q.scale

    def average(self, message: Pair, weights: Array, sent: GuideParams) -> GuideParams:
        return Gaussian.of_root(*message).params()


class Wasserstein(Aggregation[GuideParams]):
    """The Wasserstein barycenter of full Gaussians.

    It is not a function of a sum over silos, so the server receives each silo's guide.
    """

    combine = Combine.GATHER

    def message(self, eta: GuideParams, sent: GuideParams) -> GuideParams:
        return eta

    def average(self, message: GuideParams, weights: Array, sent: GuideParams) -> GuideParams:
        q = Gaussian.from_params(message)
        return Gaussian.of_root(*barycenters.wasserstein_of(q.loc, q.root, weights)).params()


class ForwardKL(Aggregation[Pair]):
    """The Gaussian with the moments of the mixture of all guides.

    Moments are measured from the guide that was sent: second moments about zero would cancel where
    the mean is large.
    """

    def message(self, eta: GuideParams, sent: GuideParams) -> Pair:
        q = Gaussian.from_params(eta)
        shift = q.loc - sent["loc"]
        return shift, q.covariance + _square(shift, q.covariance)

    def average(self, message: Pair, weights: Array, sent: GuideParams) -> GuideParams:
        shift, second = message
        covariance = second - _square(shift, second)
        root = jnp.sqrt(covariance) if covariance.ndim == 1 else linalg.cholesky(covariance)
        return Gaussian.of_root(sent["loc"] + shift, root).params()


class ReverseKL(Aggregation[Pair]):
    """The weighted geometric mean of the guides, measured from the mean of the guide sent down."""

    def message(self, eta: GuideParams, sent: GuideParams) -> Pair:
        q = Gaussian.from_params(eta)
        return q._replace(loc=q.loc - sent["loc"]).natural()

    def average(self, message: Pair, weights: Array, sent: GuideParams) -> GuideParams:
        q = Gaussian.of_natural(*message)
        return q._replace(loc=sent["loc"] + q.loc).params()


@dataclass(frozen=True)
class ProductOfGuides(ReverseKL):
    """The product of the guides of ``num_silos`` silos, each with its share of the prior."""

    num_silos: int
    scaled = False

    def average(self, message: Pair, weights: Array, sent: GuideParams) -> GuideParams:
        first, second = (self.num_silos * part for part in message)
        return super().average((first, second), weights, sent)


def aggregation(name: str, kind: str, num_silos: int) -> Aggregation[Any]:
    """Return the aggregation of this name, for a diagonal or a full guide."""
    if name == "wasserstein":
        return DiagonalWasserstein() if kind == "diagonal" else Wasserstein()
    if name == "product":
        return ProductOfGuides(num_silos)
    others: dict[str, Aggregation[Any]] = {
        "average": AverageOfParameters(),
        "forward_kl": ForwardKL(),
        "reverse_kl": ReverseKL(),
    }
    return others[name]


def _square(shift: Array, like: Array) -> Array:
    """Return ``shift shift'``, or its diagonal where ``like`` is a diagonal."""
    return shift**2 if like.ndim == 1 else jnp.outer(shift, shift)


@dataclass(frozen=True, eq=False, kw_only=True)
class Averaging(ByGradients[ServerState, SiloState]):
    """SFVI-Avg as pure functions; parameters as for :class:`ByGradients`, and three more.

    Parameters
    ----------
    aggregation : Aggregation
    local_steps : int
    by_rows : bool
        Whether a silo's weight is its number of rows, or one.
    """

    aggregation: Aggregation[Any]
    local_steps: int
    by_rows: bool

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round((self.exchange,), self.round),
            self.shared,
            self.private,
            done=lambda state: convergence.settled(state.course),
            opening=(*standardising(self.guide), *((self.count,) if self.by_rows else ())),
        )

    @cached_property
    def exchange(self) -> Exchange[SiloState, Down, Up]:
        """Return the exchange of a round."""
        combine = self.aggregation.combine
        return Exchange(
            "sfvi_avg", self.silo, silo_noise=key_as_noise, combine=combine, weighted=self.by_rows
        )

    @cached_property
    def count(self) -> Round:
        """Return the round that adds up all silos' rows, once before the first one."""

        def silo(
            noise: object, down: object, state: SiloState, data: SiloData
        ) -> tuple[Reply[tuple[()]], SiloState]:
            return Reply((), jnp.array(True), self.weight(data)), state

        def run(state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
            rows = ask(COUNT, ()).weight
            return state._replace(rows=rows), Info(jnp.zeros(()), jnp.array(True))

        return Round((Exchange(COUNT, silo, weighted=True),), run)

    def weight(self, data: SiloData) -> Array:
        """Return the weight of a silo: its number of rows, or one."""
        if not self.by_rows:
            return jnp.ones(())
        # Padded rows are not counted, nor those of outer plates: a hospital is no observation.
        sizes = self.model.sizes(data)
        rows = (
            data.masked(p.name, jnp.ones(sizes[p.name])) for p in self.model.plates if not p.outer
        )
        return sum((r.sum() for r in rows), jnp.zeros(()))

    def server_at(self, start: StartParams) -> ServerState:
        params, frame = start
        return ServerState(params, convergence.init(params), self.total, frame)

    @property
    def total(self) -> Array:
        """Return the total weight of all silos; 0 until the opening round has counted rows."""
        return jnp.array(0.0 if self.by_rows else float(self.num_silos))

    def silo_at(
        self, params: SiloParams, frames: dict[str, Gaussian], start: StartParams
    ) -> SiloState:
        opt_state, shared_opt_state = self.optim.init(params), self.optim.init(start.params)
        return SiloState(
            params, opt_state, shared_opt_state, jnp.zeros(self.model.dim), frames, start.frame
        )

    def round(self, state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
        """Send the guide, and replace it by an average of the silos' guides."""
        replies = ask(self.exchange.name, Down(state.params, state.rows))
        gathered = self.aggregation.combine is Combine.GATHER
        weights = replies.weight / replies.weight.sum()

        def mean(tree: Tree) -> Tree:
            if gathered:
                return jax.tree.map(lambda a: jnp.tensordot(weights, a, 1), tree)
            return jax.tree.map(lambda a: a / replies.weight, tree)

        guide = replies.up.guide if gathered else mean(replies.up.guide)
        eta = self.aggregation.average(guide, weights, state.params.guide)
        params = SharedParams(eta, mean(replies.up.theta))
        loss = -mean(replies.up.bound)
        course = convergence.update(state.course, loss, params, whitened=self.from_mode)
        after = state._replace(params=params, course=course)
        return after, Info(loss, all_finite((loss, params)))

    def noise(self, key: Array, i: Array, state: SiloState) -> tuple[Array, MinibatchNoise]:
        """Return the noise of a local step, for the globals and the rows."""
        key_global, key_rows = jax.random.split(jax.random.fold_in(key, i))
        eps = self.guide.globals.noise(key_global, self.num_particles)
        return eps, self.step_noise(key_rows, state)

    def terms(
        self,
        shared: SharedParams,
        silo_params: SiloParams,
        noise: tuple[Array, MinibatchNoise],
        state: SiloState,
        data: SiloData,
    ) -> tuple[Array, Array, Array]:
        """Return means over particles of the log prior, ``log q`` and the silo's own bound."""
        frame = state.shared_frame
        theta = frame.parameters(shared.theta)
        coordinates, z_G, log_q = self.guide.globals.draws(frame.globals, shared.guide, noise[0])
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        batch, indices = draw_minibatch(self.minibatches, noise[1].which, data)
        local = self.guide.from_frame(
            rows_at(state.frames, indices), rows_at(silo_params.guide, indices)
        )
        all_theta = {**theta, **silo_params.private}

        def at_draw(z: Array, u: Array, eps: Rows) -> Array:
            given = Given(all_theta, local, z, coordinates._replace(u=u), batch)
            return self.bound.value(given, eps)

        bound = jax.vmap(at_draw, (0, 0, 1))(z_G, coordinates.u, noise[1].rows)
        return log_prior.mean(), log_q.mean(), bound.mean()

    def silo(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        weight = self.weight(data)
        scale = down.rows / weight  # N / N_j of the module's docstring
        # The average has another centre than the silo's own guide after its steps. Local guides
        # measured from the wrong one would start the round as guides of other globals.
        start = self.recentred(state, self.centre(down.params) - state.centre, data)

        def objective(
            shared: SharedParams, silo_params: SiloParams, eps: tuple[Array, MinibatchNoise]
        ) -> tuple[Array, Array]:
            log_prior, log_q, bound = self.terms(shared, silo_params, eps, state, data)
            value = log_prior - log_q + scale * bound
            if self.aggregation.scaled:
                return value, value
            # The bound is reported on the same scale for every rule, whatever is maximised.
            return log_prior / self.num_silos - log_q + bound, value

        def step(carry: tuple[Any, ...], i: Array) -> tuple[tuple[Any, ...], Array]:
            shared, shared_opt, silo_params, silo_opt = carry
            eps = self.noise(noise, i, state)
            pair, value = jax.grad(objective, (0, 1), has_aux=True)(shared, silo_params, eps)
            shared, shared_opt = ascend(self.optim, pair[0], shared_opt, shared)
            silo_params, silo_opt = ascend(self.optim, pair[1], silo_opt, silo_params)
            return (shared, shared_opt, silo_params, silo_opt), value

        carry = (down.params, state.shared_opt_state, start, state.opt_state)
        steps = jnp.arange(self.local_steps)
        (shared, shared_opt, silo_params, silo_opt), value = jax.lax.scan(step, carry, steps)
        message = self.aggregation.message(shared.guide, down.params.guide)
        up = Up(value[0], shared.theta, message)
        after = state._replace(
            params=silo_params,
            opt_state=silo_opt,
            shared_opt_state=shared_opt,
            centre=self.centre(shared),
        )
        return Reply(up, all_finite((up, silo_params)), weight), after

    def centre(self, shared: SharedParams) -> Array:
        """Return the centre of the globals' guide in its frame."""
        return self.guide.globals.centre(shared.guide)
