r"""SOUL for vertical models: Langevin draws at clients, and auxiliary variables at their mode.

Appendix A of Hassan, Sutton, Mira and Mengersen 2024 (arXiv 2405.04043), after De Bortoli et al.
2021 (*Statistics and Computing* 31). Client ``j`` draws :math:`\theta_j` by unadjusted Langevin
steps from its posterior given the current :math:`z`. Its auxiliary variables take steps up the
gradient of the marginal density, which is a mean over draws by Fisher's identity (equations 19 and
24):

.. math::
    \nabla_{z_j} \log p(y \mid z) = \nabla_{z_j} \log p\Big(y \,\Big|\, \sum_k z_k\Big)
    + \operatorname{E} \frac{g_j(\theta_j) - z_j}{\rho^2}

in the augmented model. Under the power likelihood the first term is
:math:`\frac{1}{J} \sum_{k \ne j} \operatorname{E} \nabla \log p(y \mid g_k + \sum_{l \ne k} z_l)`.
The server's latents and parameters take steps to their mode as well (A.3). A round consists of each
client's Langevin steps, and one step of each optimiser.

The paper sends every :math:`z_j`; sums over clients are enough. Langevin steps are taken in
coordinates in which a client's curvature under ``rho`` is one, so that one step size fits all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import (
    Ask,
    Exchange,
    FederatedAlgorithm,
    Info,
    Private,
    Reply,
    Round,
    Sampled,
    Shared,
    ascend,
    key_as_noise,
)
from numpyro_fed.algorithms.convergence import ConvergenceStats
from numpyro_fed.algorithms.vertical.base import PartyState
from numpyro_fed.algorithms.vertical.curvature import Local, diagonal_curvature
from numpyro_fed.algorithms.vertical.sample import SAMPLE, sample_settings, values_at
from numpyro_fed.frame import identity
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.vertical import PartyModel, VerticalModel
from numpyro_fed.trees import all_finite

SHOW, DRAW, STEP = "show", "draw", "step"  # the names of the exchanges

Context = TypeVar("Context")  # arguments of a likelihood besides a client's own predictor


class ServerParams(NamedTuple):
    """The server's parameters and latents, which the optimiser moves to their mode."""

    theta: dict[str, Any]
    z: Array


class ClientParams(NamedTuple):
    """A client's parameters, and its auxiliary variables' offsets in units of ``rho``."""

    private: dict[str, Any]
    steps: Array


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``resting`` is the number of clients whose auxiliary variables have converged.
    """

    params: ServerParams
    opt_state: optax.OptState
    course: ConvergenceStats[ServerParams]
    resting: Array


class ClientState(NamedTuple):
    """The state that a client keeps from round to round.

    Offsets of auxiliary variables are measured from ``centre``. ``position`` (dim,) is the last
    Langevin draw, in units of ``root``. ``kept`` (kept, dim) has the last draws of past rounds, and
    ``number`` counts rounds. ``gradient`` is the part of the gradient in ``params`` that the client
    computes by itself, before the server's message.
    """

    params: ClientParams
    opt_state: optax.OptState
    course: ConvergenceStats[ClientParams]
    position: Array
    root: Array
    centre: Array
    kept: Array
    number: Array
    gradient: ClientParams


class Up(NamedTuple):
    """A client's message: its auxiliary variables (rows, ...), and its own mean log density."""

    z: Array
    own: Array


class Down(NamedTuple):
    """A message of the server: the sum of auxiliary variables, its parameters and latents."""

    total: Array
    theta: dict[str, Any]
    z: Array


class Slopes(NamedTuple):
    """A client's message under the power likelihood: its term, and gradients of it.

    ``by_predictor`` is the gradient with respect to the likelihood's argument; ``theta`` and ``z``
    are those with respect to the server's parameters and latents.
    """

    term: Array
    by_predictor: Array
    theta: dict[str, Any]
    z: Array


class Stepped(NamedTuple):
    """A client's message after its step: whether it has converged (0 or 1)."""

    resting: Array


@dataclass(frozen=True, eq=False)
class Soul:
    """SOUL for a vertical model, as pure functions for all parties.

    Attributes
    ----------
    model : VerticalModel
    kinds : dict
        Clients' halves of the model, by the signature of their data.
    rho : float
        Standard deviation of the auxiliary variables.
    optim : optax.GradientTransformation
    num_steps : int
        Langevin steps in a round.
    step_size : float
        The size of a Langevin step, in coordinates in which the curvature is one.
    num_kept : int
        Draws that a client keeps.
    power : bool
        Whether clients evaluate likelihoods of their own.
    """

    model: VerticalModel
    kinds: Mapping[Any, PartyModel]
    rho: float
    optim: optax.GradientTransformation
    num_steps: int
    step_size: float
    num_kept: int
    power: bool = False

    @property
    def num_clients(self) -> int:
        """Return how many clients there are."""
        return len(self.model.clients)

    def party_model(self, data: SiloData) -> PartyModel:
        """Return the model of the client that holds data of this shape."""
        return self.kinds[signature(data)]

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """Return the server's first state; ``data`` has the shapes of its data."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), data)
        party_model, total = self.model.server, jnp.zeros(self.model.shape)
        theta = party_model.init_theta(key, self.model.with_total(zeros, total))
        params = ServerParams(theta, jnp.zeros(party_model.dim))
        course, none_resting = convergence.init(params), jnp.zeros(())
        return ServerState(params, self.optim.init(params), course, none_resting)

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state: at zero, in units of its curvature there."""
        party_model = self.party_model(data)
        theta, origin = party_model.init_theta(key, data), jnp.zeros(party_model.dim)

        def predict(z: Array) -> Array:
            return self.model.predict(party_model, theta, z, data)[0]

        def own_log_p(z: Array) -> Array:
            return self.model.predict(party_model, theta, z, data)[1]

        centre, root = predict(origin), jnp.zeros((0, 0))
        if party_model.dim:
            # Given its auxiliary variables, a client's posterior has the curvature of N(g, rho^2),
            # and that of its own likelihood under the power model.
            curvature = self.rho**-2 + self.likelihood_curvature(centre, data)
            root = Local.at(predict, own_log_p, origin, jnp.zeros_like(centre), curvature).root()
        params = ClientParams(theta, jnp.zeros_like(centre))
        return ClientState(
            params=params,
            opt_state=self.optim.init(params),
            course=convergence.init(params),
            position=origin,
            root=root,
            centre=centre,
            kept=jnp.zeros((self.num_kept, party_model.dim)),
            number=jnp.zeros((), jnp.int32),
            gradient=jax.tree.map(jnp.zeros_like, params),
        )

    def likelihood_curvature(self, centre: Array, data: SiloData) -> Array:
        """Return the curvature (rows, ...) of a client's likelihood under the power model, or 0."""
        if not self.power:
            return jnp.zeros_like(centre)
        server = self.model.server
        at_server = SiloData(dict(data.kwargs["shared"]))
        theta = server.init_theta(jax.random.key(0), self.model.with_total(at_server, centre))

        def log_p(predictor: Array) -> Array:
            z = jnp.zeros(server.dim)
            return self.model.log_server(theta, z, predictor, at_server)[1] / self.num_clients

        return diagonal_curvature(log_p, centre)

    def auxiliary(self, state: ClientState) -> Array:
        """Return a client's auxiliary variables."""
        return state.centre + self.rho * state.params.steps

    def langevin(
        self,
        key: Array,
        state: ClientState,
        data: SiloData,
        context: Context,
        likelihood: Callable[[Array, Context], Array | float],
    ) -> tuple[ClientState, Array, Context]:
        """Take a round's Langevin steps at a client.

        ``likelihood(g, context)`` is added to its own log density. Returns the state, with the
        gradient of its parameters in it, the mean log density, and the gradient with respect to
        ``seen``: means over draws.
        """
        # Here, since its import starts JAX's backend.
        from blackjax.sgmcmc.diffusions import overdamped_langevin

        party_model, langevin = self.party_model(data), overdamped_langevin()

        def log_p(u: Array, params: ClientParams, context: Context) -> Array:
            g, own_log_p = self.model.predict(party_model, params.private, state.root @ u, data)
            z = state.centre + self.rho * params.steps
            return own_log_p + dist.Normal(g, self.rho).log_prob(z).sum() + likelihood(g, context)

        def step(u: Array, key: Array) -> tuple[Array, Any]:
            value, (slope, *others) = jax.value_and_grad(log_p, (0, 1, 2))(u, state.params, context)
            return langevin(key, u, slope, self.step_size), (value, others)

        position, outputs = jax.lax.scan(
            step, state.position, jax.random.split(key, self.num_steps)
        )
        # Fisher's identity: the gradient of the marginal density is the mean of the joint one's.
        value, (gradient, by_context) = jax.tree.map(lambda a: a.mean(0), outputs)
        after = state._replace(
            position=position,
            kept=state.kept.at[state.number % self.num_kept].set(state.root @ position),
            number=state.number + 1,
            gradient=gradient,
        )
        return after, value, by_context

    def shared(self, state: ServerState) -> Shared:
        """Return the server's parameters, and the current values of its latents."""
        z = state.params.z
        return Shared(state.params.theta, {"z": z}, identity(z.shape))

    def private_params(self, state: ClientState) -> Private:
        """Return a client's parameters, and the draws that it has kept."""
        return Private(state.params.private, {"draws": state.kept})

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        """Return the same as :meth:`private_params`, as a :class:`Party` without a frame."""
        return PartyState(*self.private_params(state)[:2], identity(()))

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        """Return a party's draws or latents, which it has in place of a guide."""
        return party.guide

    def client_step(self, state: ClientState, slope: Array) -> ClientState:
        """Take a client's step, given the server's part of the gradient in auxiliary variables."""
        gradient = state.gradient._replace(steps=state.gradient.steps + self.rho * slope)
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        course = convergence.update(state.course, jnp.zeros(()), params, whitened=False)
        return state._replace(params=params, opt_state=opt_state, course=course)

    def done(self, state: ServerState) -> Array:
        """Return whether all parties' modes have converged."""
        return convergence.settled(state.course) & (state.resting == self.num_clients)

    def server_step(self, state: ServerState, gradient: ServerParams, loss: Array) -> ServerState:
        """Take the server's step up the gradient."""
        params, opt_state = ascend(self.optim, gradient, state.opt_state, state.params)
        course = convergence.update(state.course, loss, params, whitened=False)
        return state._replace(params=params, opt_state=opt_state, course=course)


def soul(v: Soul, server_like: SiloData) -> FederatedAlgorithm[ServerState, ClientState]:
    """Return the algorithm; ``server_like`` has the shapes of the server's data."""
    return FederatedAlgorithm(
        lambda key: v.init_server(key, server_like),
        v.init_client,
        _power(v) if v.power else _augmented(v),
        v.shared,
        v.private_params,
        done=v.done,
        server_like=server_like,
    )


def _augmented(v: Soul) -> Round:
    """Return the round of the augmented model: clients draw, and send auxiliary variables."""

    def silo(
        noise: Array, down: object, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], ClientState]:
        after, own_log_p, _ = v.langevin(noise, state, data, (), lambda g, context: 0.0)
        up = Up(v.auxiliary(state), own_log_p)
        return Reply(up, all_finite((up, after.gradient, after.position))), after

    def run(state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
        up: Up = ask(DRAW, ()).up

        def log_p(params: ServerParams, total: Array) -> Array:
            own_log_p, rows = v.model.log_server(params.theta, params.z, total, ask.server_data)
            return own_log_p + rows

        value, (gradient, slope) = jax.value_and_grad(log_p, (0, 1))(state.params, up.z)
        loss = -(value + up.own)
        stepped: Stepped = ask(STEP, slope).up
        after = v.server_step(state, gradient, loss)._replace(resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, slope)))

    return Round((Exchange(DRAW, silo, silo_noise=key_as_noise), _step_exchange(v)), run)


def _power(v: Soul) -> Round:
    """Return the round of the power likelihood: clients send ``z``, draw, and send slopes."""

    def show(
        noise: object, down: object, state: ClientState, data: SiloData
    ) -> tuple[Reply[Array], ClientState]:
        z = v.auxiliary(state)
        return Reply(z, all_finite(z)), state

    def draw(
        noise: Array, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Slopes], ClientState]:
        at_server = SiloData(dict(data.kwargs["shared"]))

        def likelihood(g: Array, context: tuple[Any, Array, Array]) -> Array:
            theta, z, others = context
            return v.model.log_server(theta, z, g + others, at_server)[1] / v.num_clients

        context = down.theta, down.z, down.total - v.auxiliary(state)
        after, own_log_p, (theta, z, slope) = v.langevin(noise, state, data, context, likelihood)
        # The server's sum will hold this client's own slope, which is no gradient in its own z:
        # its likelihood depends on the others' z alone. So it is subtracted in advance.
        steps = after.gradient.steps - v.rho * slope
        after = after._replace(gradient=after.gradient._replace(steps=steps))
        up = Slopes(own_log_p, slope, theta, z)
        return Reply(up, all_finite((up, after.gradient, after.position))), after

    def run(state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
        total: Array = ask(SHOW, ()).up
        up: Slopes = ask(DRAW, Down(total, state.params.theta, state.params.z)).up

        def log_p(params: ServerParams) -> Array:
            nothing = jnp.zeros(v.model.shape)
            return v.model.log_server(params.theta, params.z, nothing, ask.server_data)[0]

        value, gradient = jax.value_and_grad(log_p)(state.params)
        gradient = jax.tree.map(jnp.add, gradient, ServerParams(up.theta, up.z))
        loss = -(value + up.term)
        stepped: Stepped = ask(STEP, up.by_predictor).up
        after = v.server_step(state, gradient, loss)._replace(resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, up.by_predictor)))

    exchanges = (
        Exchange(SHOW, show),
        Exchange(DRAW, draw, silo_noise=key_as_noise),
        _step_exchange(v),
    )
    return Round(exchanges, run)


def _step_exchange(v: Soul) -> Exchange[ClientState, Array, Stepped]:
    """Return the exchange in which clients take their steps.

    The server sends the gradient with respect to the sum; clients reply whether they have converged
    (0 or 1).
    """

    def silo(
        noise: object, down: Array, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        after = v.client_step(state, down)
        resting = convergence.settled(after.course).astype(jnp.result_type(float))
        return Reply(Stepped(resting), all_finite(after.params)), after

    return Exchange(STEP, silo)


def sample(v: Soul, n: int) -> Round:
    """Return the round in which clients choose ``n`` of their kept draws.

    All draws of the server's latents are their mode.
    """

    def silo_noise(key: Array, state: ClientState) -> Array:
        return jax.random.uniform(key, (n,))

    def silo(
        noise: Array, down: object, state: ClientState, data: SiloData
    ) -> tuple[Reply[tuple[()]], Sampled]:
        z = state.kept[chosen(noise, state.number, v.num_kept)]
        sampled = values_at(v.party_model(data), state.params.private, z, data)
        return Reply((), all_finite(sampled)), sampled

    def run(state: ServerState, noise: object, ask: Ask) -> tuple[Array, Info]:
        ask(SAMPLE, ())
        z = state.params.z
        return jnp.broadcast_to(z, (n, *z.shape)), Info(jnp.zeros(()), jnp.array(True))

    exchange = Exchange(SAMPLE, silo, silo_noise=silo_noise, settings=sample_settings(n))
    return Round((exchange,), run)


def chosen(noise: Array, number: Array | int, num_kept: int) -> Array:
    """Return indices (n,) of kept draws, from uniform noise (n,).

    They are draws of the last half of ``number`` rounds; the first half is burn-in.
    """
    num_kept_now = jnp.clip(number - number // 2, 1, num_kept)
    age = jnp.minimum((noise * num_kept_now).astype(jnp.int32), num_kept_now - 1)
    return (jnp.maximum(number, 1) - 1 - age) % num_kept
