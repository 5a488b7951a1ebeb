r"""SFVI-Avg: several steps at each silo, then an average of the globals' guides.

Hassan, Salomone and Mengersen 2023, arXiv 2302.03314, Algorithm 2. A silo takes ``local_steps``
stochastic gradient steps on

.. math::
    \mathbb{E}_q\Big[\log p(z_G) - \log q(z_G) + \frac{N}{N_j} \mathcal{L}_j(z_G)\Big],

as if all ``N`` rows were like its own :math:`N_j`. It sends its shared parameters and its guide of
the globals after these steps, and the server replaces its own by an average. Where a run starts at
the mode, steps and average are in coordinates in which the posterior is about standard, so that
units do not matter.

A silo's local guides follow its own guide of the globals, and lag behind the average of all. In
rounds of ``locals_only`` silos take their steps on these alone, and the globals stay.

Two differences from the paper: silos keep the state of their optimiser from round to round, so that
a single silo with one local step is SFVI; and weights may be the silos' numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.trees import Tree, all_finite, ascend
from numpyro_fed.data.minibatches import MinibatchNoise
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.guide import GlobalDraws
from numpyro_fed.numerics import barycenters, linalg
from numpyro_fed.numerics.gaussian import Frame, Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.convergence import ConvergenceStats
from numpyro_fed.rounds.exchange import (
    Ask,
    Combine,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
    key_as_noise,
)
from numpyro_fed.rounds.names import ROWS, SFVI_AVG_ROUND
from numpyro_fed.rounds.states import SharedParams, SiloParams
from numpyro_fed.search.start_point import StartPoint
from numpyro_fed.sfvi.base import GradientAlgorithm


class ServerState(NamedTuple):
    """The server's state: shared parameters as coordinates of a ``frame``.

    ``rows`` is the total weight of all silos.
    """

    params: SharedParams
    course: ConvergenceStats[SharedParams]
    frame: Frame
    rows: Array


class SiloState(NamedTuple):
    """A silo's state: its parameters, the frames of its rows, and the optimisers of its steps.

    ``centre`` (dim,) is the point from which its local guides measure the globals. A silo steps on
    the shared parameters, too, in the ``shared_frame``.
    """

    params: SiloParams
    opt_state: optax.OptState
    frames: dict[str, Gaussian]
    centre: Array
    shared_opt_state: optax.OptState
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
class Aggregation:
    """A rule by which silos' Gaussian guides of the globals are averaged.

    ``name``: ``"average"``: of the parameters as they are. ``"wasserstein"``: the barycenter; of
        independent normals that is the average of means and standard deviations. ``"forward_kl"``:
        the Gaussian with the moments of the mixture of all guides. ``"reverse_kl"``: the weighted
        geometric mean. ``"product"``: the product of all guides, each with its share of the prior.
    ``diagonal``: Whether the guides are diagonal.
    """

    name: str
    diagonal: bool
    num_silos: int

    @property
    def combine(self) -> Combine:
        """Return how messages come: the barycenter of full guides is no function of a sum."""
        gathers = self.name == "wasserstein" and not self.diagonal
        return Combine.GATHER if gathers else Combine.SUM

    def message(self, eta: GuideParams, sent: GuideParams) -> Any:
        """Return a silo's message on its guide ``eta``, given the one that it was sent.

        Moments are measured from the mean that was sent: second moments about zero would cancel
        where it is large.
        """
        if self.name == "average" or self.combine is Combine.GATHER:
            return eta
        q = Gaussian.from_params(eta)
        if self.name == "wasserstein":
            return q.loc, q.scale
        shift = q.loc - sent["loc"]
        if self.name == "forward_kl":
            return shift, q.covariance + _square(shift, q.covariance)
        return q._replace(loc=shift).natural()

    def average(self, message: Any, weights: Array, sent: GuideParams) -> GuideParams:
        """Return the average guide.

        ``message`` is the weighted mean of all messages. Under ``GATHER`` it has all of them along
        a leading axis, with ``weights`` (J,) that sum to one.
        """
        if self.name == "average":
            found: GuideParams = message
            return found
        if self.combine is Combine.GATHER:
            q = Gaussian.from_params(message)
            return Gaussian.of_root(*barycenters.wasserstein_of(q.loc, q.root, weights)).params()
        first, second = message
        if self.name == "wasserstein":
            return Gaussian.of_root(first, second).params()
        if self.name == "forward_kl":
            covariance = second - _square(first, second)
            root = jnp.sqrt(covariance) if covariance.ndim == 1 else linalg.cholesky(covariance)
            return Gaussian.of_root(sent["loc"] + first, root).params()
        if self.name == "product":
            first, second = self.num_silos * first, self.num_silos * second
        q = Gaussian.of_natural(first, second)
        return q._replace(loc=sent["loc"] + q.loc).params()


def _square(shift: Array, like: Array) -> Array:
    """Return ``shift shift'``, or its diagonal where ``like`` is a diagonal."""
    return shift**2 if like.ndim == 1 else jnp.outer(shift, shift)


@dataclass(frozen=True, eq=False, kw_only=True)
class Averaging(GradientAlgorithm):
    """SFVI-Avg as pure functions; ``by_rows``, a silo's weight is its number of rows."""

    aggregation: Aggregation
    local_steps: int
    by_rows: bool
    locals_only: bool = False

    def algorithm(self) -> FederatedAlgorithm[ServerState, SiloState]:
        exchange = Exchange(
            SFVI_AVG_ROUND,
            self.answer,
            silo_noise=key_as_noise,
            combine=self.aggregation.combine,
            weighted=self.by_rows,
        )
        opening = (self._count(),) if self.by_rows else ()
        return self.with_round(Round((exchange,), self.round), *opening)

    def _count(self) -> Round:
        """Return the round that adds up all silos' rows, once before the first one."""

        def run(state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
            rows = ask(ROWS, ()).weight
            return state._replace(rows=rows), Info(jnp.zeros(()), jnp.array(True))

        exchange: Exchange[SiloState, Any, tuple[()]] = Exchange(
            ROWS,
            lambda noise, down, state, data: (Reply((), jnp.array(True), self.weight(data)), state),
            weighted=True,
        )
        return Round((exchange,), run)

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

    def init_server(self, key: Array, point: StartPoint | None = None) -> ServerState:
        params, frame = self.first_params(key, point)
        # No rows until the opening round has counted them.
        total = jnp.array(0.0 if self.by_rows else float(self.num_silos))
        return ServerState(params, convergence.init(params), frame, total)

    def make_silo_state(
        self, params: SiloParams, frames: dict[str, Gaussian], shared: SharedParams, frame: Frame
    ) -> SiloState:
        opt_state, centre = self.optim.init(params), jnp.zeros(self.model.dim)
        return SiloState(params, opt_state, frames, centre, self.optim.init(shared), frame)

    def round(self, state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
        """Send the guide, and replace it by an average of the silos' guides."""
        replies = ask(SFVI_AVG_ROUND, Down(state.params, state.rows))
        gathered = self.aggregation.combine is Combine.GATHER
        weights = replies.weight / replies.weight.sum()

        def mean(tree: Tree) -> Tree:
            if gathered:
                return jax.tree.map(lambda a: jnp.tensordot(weights, a, 1), tree)
            return jax.tree.map(lambda a: a / replies.weight, tree)

        guide = replies.up.guide if gathered else mean(replies.up.guide)
        eta = self.aggregation.average(guide, weights, state.params.guide)
        params = SharedParams(eta, mean(replies.up.theta))
        if self.locals_only:
            params = state.params  # as all silos have sent them back, but for rounding
        loss = -mean(replies.up.bound)
        course = convergence.update(state.course, loss, params, whitened=self.starts_from_point)
        after = state._replace(params=params, course=course)
        return after, Info(loss, all_finite((loss, params)))

    def answer(
        self, noise: Array, down: Down, state: SiloState, data: SiloData
    ) -> tuple[Reply[Up], SiloState]:
        weight, centre_of = self.weight(data), self.guide.globals.centre
        scale = down.rows / weight  # N / N_j of the module's docstring
        # The average has another centre than the silo's own guide after its steps. Local guides
        # measured from the wrong one would start the round as guides of other globals.
        offset = centre_of(down.params.guide) - state.centre
        start = self.recentred(state.params, state.frames, offset, data)

        def objective(
            shared: SharedParams, silo_params: SiloParams, eps: tuple[Array, MinibatchNoise]
        ) -> tuple[Array, Array]:
            theta = state.shared_frame.parameters(shared.theta)
            coordinates, draws, log_q = self.guide.globals.draws(
                state.shared_frame.globals, shared.guide, eps[0]
            )
            log_prior = jax.vmap(self.model.log_prior, (None, 0))(theta, draws)
            message = GlobalDraws(theta, draws, coordinates)
            bound = self.mean_bound(silo_params, state.frames, message, eps[1], data)
            log_prior, log_q = log_prior.mean(), log_q.mean()
            value = log_prior - log_q + scale * bound
            if self.aggregation.name != "product":
                return value, value
            # Guides are multiplied: each silo counts a share of the prior. The bound is reported
            # on the same scale for every rule, whatever is maximised.
            return log_prior / self.num_silos - log_q + bound, value

        def step(carry: tuple[Any, ...], i: Array) -> tuple[tuple[Any, ...], Array]:
            shared, shared_opt, silo_params, silo_opt = carry
            key_global, key_rows = jax.random.split(jax.random.fold_in(noise, i))
            eps = (
                self.guide.globals.noise(key_global, self.num_particles),
                self.step_noise(key_rows, start),
            )
            pair, value = jax.grad(objective, (0, 1), has_aux=True)(shared, silo_params, eps)
            if not self.locals_only:
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
            centre=centre_of(shared.guide),
        )
        return Reply(up, all_finite((up, silo_params)), weight), after
