r"""SFVI-Avg: several steps at each silo, then an average of the globals' guides.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 2. A silo takes ``local_steps``
stochastic gradient steps on

.. math::
    \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G) + \frac{N}{N_j} \mathcal{L}_j(z_G)\Big],

as if all data were like its own, and sends where its shared parameters and its guide of the globals
have come to; the server puts an average in their place. Where a run starts at the mode, all of this
is in coordinates in which the posterior is about standard, and so is the average: units do not
matter.

Where this departs from the paper: silos keep the state of their optimiser from round to round, so
that a single silo with one local step is SFVI, and weights may be the silos' numbers of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed import barycenters, linalg
from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import (
    Ask,
    Combine,
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
from numpyro_fed.algorithms.begin import BEGIN, Frame, frame_at, local_guides, somewhere
from numpyro_fed.algorithms.mode import SiloState as Looked
from numpyro_fed.algorithms.settling import Course
from numpyro_fed.algorithms.sfvi import Reference, noise_of, placed, placed_locals, recentred
from numpyro_fed.algorithms.standardise import standardising
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.guides.structured import Guide, Origin
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.minibatch import Minibatches, Noise, drawn, rows_at
from numpyro_fed.model.split import FederatedModel, Rows
from numpyro_fed.objectives import SiloBound
from numpyro_fed.trees import all_finite

COUNT = "rows"  # the name of the exchange that adds them up


class ServerState(NamedTuple):
    """``params`` is ``{"theta", "guide"}``, or steps from a ``reference`` that silos have too;
    ``rows`` is the weight of all silos together.
    """

    params: dict[str, Any]
    course: Course
    rows: Array
    reference: Reference | tuple[()] = ()


class SiloState(NamedTuple):
    """``params`` is ``{"private", "guide"}``, of the local guide; ``opt_state`` that of its
    optimiser, ``shared_opt_state`` that of the shared parameters' here. ``reference`` and
    ``whitener`` are as in SFVI, ``shared_reference`` is the server's. The local guide measures the
    globals from ``centre``, where the silo's own steps have led: an average is elsewhere.
    """

    params: dict[str, Any]
    opt_state: Any
    shared_opt_state: Any
    centre: Array
    reference: dict[str, GuideParams] | tuple[()] = ()
    shared_reference: Reference | tuple[()] = ()
    whitener: Array | None = None


class Down(NamedTuple):
    """What the server sends: shared parameters with those of the globals' guide, and the weight of
    all silos together.
    """

    params: dict[str, Any]
    rows: Array


class Up(NamedTuple):
    """What a silo sends: the bound as it sees it where the round began, its shared parameters, and
    what the average takes of its guide.
    """

    bound: Array
    theta: dict[str, Any]
    guide: Any


@dataclass(frozen=True)
class Aggregation(ABC):
    """How silos' Gaussian guides of the globals are averaged.

    Attributes
    ----------
    combine : Combine
    scaled : bool
        Whether a silo weighs its data as if they were all; if not, the prior counts for its share.
    """

    combine: ClassVar[Combine] = Combine.SUM
    scaled: ClassVar[bool] = True

    @abstractmethod
    def message(self, eta: GuideParams, sent: GuideParams) -> Any:
        """Return what a silo sends of its guide, given the one that it was sent."""

    @abstractmethod
    def average(self, message: Any, weights: Array, sent: GuideParams) -> GuideParams:
        """Return the average guide.

        From the weighted mean of all messages; or from them all, gathered, and weights (J,) that
        sum to one.
        """


class AverageOfParameters(Aggregation):
    """The average of the guides' parameters, whatever they are."""

    def message(self, eta: GuideParams, sent: GuideParams) -> GuideParams:
        return eta

    def average(self, message: GuideParams, weights: Array, sent: GuideParams) -> GuideParams:
        return message


class DiagonalWasserstein(Aggregation):
    """The Wasserstein barycenter of independent normals: average means and standard deviations."""

    def message(self, eta: GuideParams, sent: GuideParams) -> tuple[Array, Array]:
        q = Gaussian.of(eta)
        return q.loc, q.scale

    def average(
        self, message: tuple[Array, Array], weights: Array, sent: GuideParams
    ) -> GuideParams:
        return Gaussian.of_root(*message).params()


class Wasserstein(Aggregation):
    """The Wasserstein barycenter of full Gaussians, for which the server sees each guide."""

    combine = Combine.GATHER

    def message(self, eta: GuideParams, sent: GuideParams) -> GuideParams:
        return eta

    def average(self, message: GuideParams, weights: Array, sent: GuideParams) -> GuideParams:
        q = Gaussian.of(message)
        return Gaussian.of_root(*barycenters.wasserstein_of(q.loc, q.root, weights)).params()


class ForwardKL(Aggregation):
    """The Gaussian with the moments of the mixture, measured from the guide that was sent."""

    def message(self, eta: GuideParams, sent: GuideParams) -> tuple[Array, Array]:
        q = Gaussian.of(eta)
        off = q.loc - sent["loc"]
        return off, q.covariance + _square(off, q.covariance)

    def average(
        self, message: tuple[Array, Array], weights: Array, sent: GuideParams
    ) -> GuideParams:
        off, second = message
        covariance = second - _square(off, second)
        root = jnp.sqrt(covariance) if covariance.ndim == 1 else linalg.cholesky(covariance)
        return Gaussian.of_root(sent["loc"] + off, root).params()


class ReverseKL(Aggregation):
    """The weighted geometric mean of the guides, measured from the guide that was sent."""

    def message(self, eta: GuideParams, sent: GuideParams) -> tuple[Array, Array]:
        q = Gaussian.of(eta)
        return q._replace(loc=q.loc - sent["loc"]).natural()

    def average(
        self, message: tuple[Array, Array], weights: Array, sent: GuideParams
    ) -> GuideParams:
        q = Gaussian.of_natural(*message)
        return q._replace(loc=sent["loc"] + q.loc).params()


@dataclass(frozen=True)
class ProductOfGuides(ReverseKL):
    """The product of the guides of ``num_silos`` silos, each with its share of the prior."""

    num_silos: int
    scaled = False

    def average(
        self, message: tuple[Array, Array], weights: Array, sent: GuideParams
    ) -> GuideParams:
        first, second = (self.num_silos * part for part in message)
        return super().average((first, second), weights, sent)


def aggregation(name: str, kind: str, num_silos: int) -> Aggregation:
    """Return an aggregation by its name, for a diagonal or a full family."""
    if name == "wasserstein":
        return DiagonalWasserstein() if kind == "diagonal" else Wasserstein()
    if name == "product":
        return ProductOfGuides(num_silos)
    others: dict[str, Aggregation] = {
        "average": AverageOfParameters(),
        "forward_kl": ForwardKL(),
        "reverse_kl": ReverseKL(),
    }
    return others[name]


def _square(off: Array, like: Array) -> Array:
    """Return ``off off'``, or its diagonal where that is what ``like`` is."""
    return off**2 if like.ndim == 1 else jnp.outer(off, off)


@dataclass(frozen=True, eq=False)
class Averaging:
    """The parts of the algorithm.

    Parameters
    ----------
    model, guide, bound, optim, num_particles
        As for SFVI.
    aggregation : Aggregation
    local_steps : int
    num_silos : int
    by_rows : bool
        Whether a silo's weight is its number of rows, or one.
    minibatches, from_mode, wide
        As for SFVI.
    """

    model: FederatedModel
    guide: Guide
    bound: SiloBound
    optim: optax.GradientTransformation
    num_particles: int
    aggregation: Aggregation
    local_steps: int
    num_silos: int
    by_rows: bool
    minibatches: Minibatches | None = None
    from_mode: bool = False
    wide: bool = False

    def algorithm(self) -> FederatedAlgorithm:
        """As pure functions."""
        return FederatedAlgorithm(
            self.init_server,
            self.init_silo,
            Round((self.exchange,), self.round),
            self.shared,
            self.private,
            done=lambda state: settling.settled(state.course),
            opening=(*standardising(self.guide), *((self.count,) if self.by_rows else ())),
        )

    @cached_property
    def exchange(self) -> Exchange:
        """What silos are asked in a round."""
        combine = self.aggregation.combine
        return Exchange(
            "sfvi_avg", self.silo, silo_noise=own_key, combine=combine, weighted=self.by_rows
        )

    @cached_property
    def count(self) -> Round:
        """All silos' rows, added up once before the first round."""

        def silo(noise: Any, down: tuple, state: SiloState, data: SiloData) -> tuple[Reply, Any]:
            return Reply((), jnp.array(True), self.weight(data)), state

        def run(state: ServerState, noise: Any, ask: Ask) -> tuple[ServerState, Info]:
            rows = ask(COUNT, ()).weight
            return state._replace(rows=rows), Info(jnp.zeros(()), jnp.array(True))

        return Round((Exchange(COUNT, silo, weighted=True),), run)

    def weight(self, data: SiloData) -> Array:
        """Of a silo: its rows, or one."""
        if not self.by_rows:
            return jnp.ones(())
        sizes = self.model.sizes(data)
        rows = (
            data.keep(p.name, jnp.ones(sizes[p.name])) for p in self.model.plates if not p.outer
        )
        return sum((r.sum() for r in rows), jnp.zeros(()))

    def init_server(self, key: Array) -> ServerState:
        if self.from_mode:
            theta = self.model.init_theta(key)
            return self.server_from(key, somewhere(self.model, theta, wide=self.wide))
        key_theta, key_guide = jax.random.split(key)
        theta = self.model.init_theta(key_theta)
        params = {"theta": theta, "guide": self.guide.init_global(key_guide)}
        return ServerState(params, settling.begin(params), self.total)

    @property
    def total(self) -> Array:
        """The weight of all silos, where it is known without asking."""
        return jnp.array(0.0 if self.by_rows else float(self.num_silos))

    def init_silo(self, key: Array, data: SiloData) -> SiloState:
        key_private, key_guide = jax.random.split(key)
        private = self.model.init_private(key_private, data)
        eta = self.guide.init_local(key_guide, data)
        if self.from_mode:
            theta = self.model.init_theta(key)
            frame = somewhere(self.model, theta, wide=self.wide)
            return self.silo_from(key, private, eta, frame)
        params = {"private": private, "guide": eta}
        like = jax.eval_shape(self.init_server, key).params
        shared = self.optim.init(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like))
        return SiloState(params, self.optim.init(params), shared, jnp.zeros(self.model.dim))

    def round(self, state: ServerState, noise: Any, ask: Ask) -> tuple[ServerState, Info]:
        """Send the guide, and put an average of the silos' guides in its place."""
        replies = ask(self.exchange.name, Down(state.params, state.rows))
        gathered = self.aggregation.combine is Combine.GATHER
        weights = replies.weight / replies.weight.sum()

        def mean(tree: Any) -> Any:
            if gathered:
                return jax.tree.map(lambda a: jnp.tensordot(weights, a, 1), tree)
            return jax.tree.map(lambda a: a / replies.weight, tree)

        guide = replies.up.guide if gathered else mean(replies.up.guide)
        eta = self.aggregation.average(guide, weights, state.params["guide"])
        params = {"theta": mean(replies.up.theta), "guide": eta}
        loss = -mean(replies.up.bound)
        course = settling.follow(state.course, loss, params, standard=bool(state.reference))
        after = state._replace(params=params, course=course)
        return after, Info(loss, all_finite((loss, params)))

    def noise(self, key: Array, i: Array, state: SiloState) -> tuple[Any, Noise]:
        """Of a local step, for the globals and the rows."""
        key_global, key_rows = jax.random.split(jax.random.fold_in(key, i))
        sizes = {plate: len(eta["loc"]) for plate, eta in state.params["guide"].items()}
        eps = self.guide.globals.noise(key_global, self.num_particles)
        return eps, noise_of(self.bound, self.minibatches, key_rows, sizes, self.num_particles)

    def terms(
        self,
        shared: dict[str, Any],
        own: dict[str, Any],
        noise: tuple[Any, Noise],
        state: SiloState,
        data: SiloData,
    ) -> tuple[Array, Array, Array]:
        """Means over particles of the log prior, of ``log q`` and of the silo's own bound."""
        theta, eta = placed(self.guide, shared, state.shared_reference)
        z_G, log_q = jax.vmap(self.guide.globals.draw, (None, 0))(eta, noise[0])
        log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, z_G)
        origin = Origin(self.guide.globals.centre(eta), state.whitener)
        here, places = drawn(self.minibatches, noise[1].which, data)
        local = rows_at(placed_locals(self.guide, own, state.reference), places)
        held = {**theta, **own["private"]}

        def at(z: Array, eps: Rows) -> Array:
            return self.bound.value(held, local, z, origin, eps, here)

        return log_prior.mean(), log_q.mean(), jax.vmap(at, (0, 1))(z_G, noise[1].rows).mean()

    def silo(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        weight = self.weight(data)
        scale = down.rows / weight
        state = recentred(self.guide, state, self.centre(down.params, state), data)

        def objective(shared: dict[str, Any], own: dict[str, Any], eps: Any) -> tuple[Array, Array]:
            log_prior, log_q, bound = self.terms(shared, own, eps, state, data)
            seen = log_prior - log_q + scale * bound
            if self.aggregation.scaled:
                return seen, seen
            return log_prior / self.num_silos - log_q + bound, seen

        def step(carry: tuple, i: Array) -> tuple[tuple, Array]:
            shared, shared_opt, own, own_opt = carry
            eps = self.noise(noise, i, state)
            pair, seen = jax.grad(objective, (0, 1), has_aux=True)(shared, own, eps)
            shared, shared_opt = ascend(self.optim, pair[0], shared_opt, shared)
            own, own_opt = ascend(self.optim, pair[1], own_opt, own)
            return (shared, shared_opt, own, own_opt), seen

        begun = (down.params, state.shared_opt_state, state.params, state.opt_state)
        steps = jnp.arange(self.local_steps)
        (shared, shared_opt, own, own_opt), seen = jax.lax.scan(step, begun, steps)
        message = self.aggregation.message(shared["guide"], down.params["guide"])
        up = Up(seen[0], shared["theta"], message)
        after = state._replace(
            params=own,
            opt_state=own_opt,
            shared_opt_state=shared_opt,
            centre=self.centre(shared, state),
        )
        return Reply(up, all_finite((up, own)), weight), after

    def centre(self, shared: dict[str, Any], state: SiloState) -> Array:
        """Of the globals' guide, as the silo places it."""
        return self.guide.globals.centre(placed(self.guide, shared, state.shared_reference).guide)

    def shared(self, state: ServerState) -> Shared:
        return placed(self.guide, state.params, state.reference)

    def private(self, state: SiloState) -> Private:
        eta = placed_locals(self.guide, state.params, state.reference)
        return Private(state.params["private"], eta, state.centre, state.whitener)

    def reference(self, key: Array, frame: Frame) -> Reference:
        """What shared parameters are steps from: the same at the server and at every silo."""
        eta = self.guide.globals.around(key, frame.centre, frame.root)
        return Reference(frame.theta, frame.unit, eta)

    def server_from(self, key: Array, frame: Frame) -> ServerState:
        reference = self.reference(key, frame)
        params = _nothing(reference)
        return ServerState(params, settling.begin(params), self.total, reference)

    def silo_from(
        self, key: Array, private: dict[str, Any], eta: dict[str, GuideParams], frame: Frame
    ) -> SiloState:
        reference = self.reference(key, frame)
        params = {"private": private, "guide": jax.tree.map(jnp.zeros_like, eta)}
        shared = self.optim.init(_nothing(reference))
        own = self.optim.init(params)
        return SiloState(params, own, shared, frame.centre, eta, reference, frame.whitener)

    def begin(self) -> Round:
        """Return the round from the states of a search for the mode; silos answer with nothing."""

        def silo(
            noise: Array, down: Frame, state: Looked, data: SiloData
        ) -> tuple[Reply[tuple[()]], SiloState]:
            z_L = jax.tree.map(lambda a: a[down.start], state.z_L)
            held = {**down.theta, **state.private}
            eta = local_guides(self.model, self.guide, held, down, z_L, data)
            return Reply((), all_finite(eta)), self.silo_from(noise, state.private, eta, down)

        def run(state: Any, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
            frame = frame_at(self.model, state)
            ask(BEGIN, frame)
            after = self.server_from(noise, frame)
            return after, Info(jnp.zeros(()), all_finite(after))

        return Round((Exchange(BEGIN, silo, silo_noise=own_key),), run, own_key)


def _nothing(reference: Reference) -> dict[str, Any]:
    """No step from a reference."""
    here = {"theta": reference.theta, "guide": reference.guide}
    return jax.tree.map(jnp.zeros_like, here)
