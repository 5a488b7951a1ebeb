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
from jax import Array

from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.numerics.gaussian import identity
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import (
    Ask,
    Exchange,
    Info,
    Reply,
    Round,
    Shared,
    key_as_noise,
)
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.vertical import init_theta
from numpyro_fed.vertical.algorithm import DRAW, STEP, AtServer, Gradients, Stepped
from numpyro_fed.vertical.algorithm import Up as Drawn
from numpyro_fed.vertical.curvature import PartyExpansion, diagonal_curvature, root_of
from numpyro_fed.vertical.parties import (
    ClientParams,
    ClientState,
    Parties,
    PartyParams,
    PartyState,
    ServerParams,
    ServerState,
)

SHOW = "show"  # the name of the exchange in which clients send auxiliary variables

Context = TypeVar("Context")  # arguments of a likelihood besides a client's own predictor


class Chain(NamedTuple):
    """A client's Langevin chain."""

    position: Array  # (dim,) the last draw, in units of ``root``
    root: Array
    kept: Array  # (kept, dim) the last draws of past rounds
    number: Array  # of rounds
    gradient: ClientParams  # the part that a client computes before the server's message


@dataclass(frozen=True, eq=False, kw_only=True)
class Soul(Parties):
    """SOUL for a vertical model, as pure functions for all parties.

    A client's auxiliary variables are parameters: offsets from ``centre``, in units of ``rho``.
    """

    kinds: Mapping[Any, FederatedModel]  # clients' parts, by the signature of their data
    rho: float
    num_steps: int  # Langevin steps in a round
    step_size: float  # in coordinates in which the curvature is one
    num_kept: int  # draws that a client keeps

    @property
    def rounds(self) -> Round:
        """Return the round of a run: clients draw, then take their steps.

        Under the power likelihood all know the sum of the auxiliary variables before they draw.
        """

        def show(
            noise: object, down: object, state: ClientState, data: SiloData
        ) -> tuple[Reply[Array], ClientState]:
            z = self.auxiliary(state)
            return Reply(z, all_finite(z)), state

        shown = (Exchange(SHOW, show),) if self.power else ()
        drawing = Exchange(DRAW, self.draw, silo_noise=key_as_noise)
        return Round((*shown, drawing, Exchange(STEP, self.step)), self.round)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        party_model = self.model.server
        theta = init_theta(party_model, key, self.zeros_at_server(data))
        own = PartyParams(None, {"z": jnp.zeros(party_model.dim)}, theta)
        return self.first_server(ServerParams(own, {}), identity((party_model.dim,)))

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state: at zero, in units of its curvature there."""
        party_model = self.kinds[signature(data)]
        theta, origin = init_theta(party_model, key, data), jnp.zeros(party_model.dim)

        def predict(z: Array) -> Array:
            return self.model.predict(party_model, theta, z, data)[0]

        def own_log_p(z: Array) -> Array:
            return self.model.predict(party_model, theta, z, data)[1]

        centre, root = predict(origin), jnp.zeros((0, 0))
        if party_model.dim:
            # Given its auxiliary variables, a client's posterior has the curvature of N(g, rho^2),
            # and that of its own likelihood under the power model.
            curvature = self.rho**-2 + jnp.zeros_like(centre)
            if self.power:
                server, at_server = self.model.server, SiloData(dict(data.kwargs["shared"]))
                given = self.model.with_total(at_server, centre)
                at_theta = init_theta(server, jax.random.key(0), given)

                def log_p(predictor: Array) -> Array:
                    z = jnp.zeros(server.dim)
                    terms = self.model.log_server(at_theta, z, predictor, at_server)
                    return terms[1] / self.num_clients

                curvature = self.rho**-2 + diagonal_curvature(log_p, centre)
            slope = jnp.zeros_like(centre)
            root = root_of(
                PartyExpansion.at(predict, own_log_p, origin, slope, curvature).curvature
            )
        params = ClientParams(jnp.zeros_like(centre), PartyParams(None, {}, theta))
        kept, number = jnp.zeros((self.num_kept, party_model.dim)), jnp.zeros((), jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ClientState(
            params=params,
            opt_state=self.init_optim(params),
            course=convergence.init(params),
            noise=(),
            rows=None,
            frame=identity(()),
            centre=centre,
            chain=Chain(origin, root, kept, number, zeros),
        )

    def auxiliary(self, state: ClientState) -> Array:
        """Return a client's auxiliary variables."""
        return state.centre + self.rho * state.params.auxiliary

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
        ``context``: means over draws.
        """
        # Here, since its import starts JAX's backend.
        from blackjax.sgmcmc.diffusions import overdamped_langevin

        chain, party_model = state.chain, self.kinds[signature(data)]
        langevin = overdamped_langevin()

        def log_p(u: Array, params: ClientParams, context: Context) -> Array:
            z, theta = chain.root @ u, params.own.theta
            g, own_log_p = self.model.predict(party_model, theta, z, data)
            part = state.centre + self.rho * params.auxiliary
            return (
                own_log_p + dist.Normal(g, self.rho).log_prob(part).sum() + likelihood(g, context)
            )

        def step(u: Array, key: Array) -> tuple[Array, Any]:
            value, (slope, *others) = jax.value_and_grad(log_p, (0, 1, 2))(u, state.params, context)
            return langevin(key, u, slope, self.step_size), (value, others)

        keys = jax.random.split(key, self.num_steps)
        position, outputs = jax.lax.scan(step, chain.position, keys)
        # Fisher's identity: the gradient of the marginal density is the mean of the joint one's.
        value, (gradient, by_context) = jax.tree.map(lambda a: a.mean(0), outputs)
        kept = chain.kept.at[chain.number % self.num_kept].set(chain.root @ position)
        after = Chain(position, chain.root, kept, chain.number + 1, gradient)
        return state._replace(chain=after), value, by_context

    def shared(self, state: ServerState) -> Shared:
        own = state.params.own
        return Shared(own.theta, own.guide, state.frame)

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        """Return a client's parameters and draws, without a frame."""
        return PartyState(state.params.own.theta, {"draws": state.chain.kept}, identity(()))

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        """Return a party's draws or latents, which it has in place of a guide."""
        return party.guide

    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[None, Array]:
        z = state.params.own.guide["z"]
        return None, jnp.broadcast_to(z, (n, *z.shape))

    def client_draws(
        self, key: Array, sent: object, state: ClientState, data: SiloData, n: int
    ) -> tuple[FederatedModel, dict[str, Any], Array]:
        """Return ``n`` of a client's kept draws, those of the last half of all rounds."""
        chosen_ = chosen(jax.random.uniform(key, (n,)), state.chain.number, self.num_kept)
        z = state.chain.kept[chosen_]
        return self.kinds[signature(data)], state.params.own.theta, z

    def draw(
        self, noise: Array, down: Any, state: ClientState, data: SiloData
    ) -> tuple[Reply[Any], ClientState]:
        if not self.power:
            after, own_log_p, _ = self.langevin(noise, state, data, (), lambda g, context: 0.0)
            drawn = Drawn(self.auxiliary(state), own_log_p, None)
            return Reply(drawn, all_finite((drawn, after.chain))), after
        at_server = SiloData(dict(data.kwargs["shared"]))

        def likelihood(g: Array, context: tuple[Any, Array, Array]) -> Array:
            theta, z, others = context
            return self.model.log_server(theta, z, g + others, at_server)[1] / self.num_clients

        context = down.theta, down.z, down.total - self.auxiliary(state)
        after, own_log_p, (theta, z, slope) = self.langevin(noise, state, data, context, likelihood)
        # The server's sum will hold this client's own slope, which is no gradient in its own z: its
        # likelihood depends on the others' z alone. So it is subtracted in advance.
        gradient = after.chain.gradient
        gradient = gradient._replace(auxiliary=gradient.auxiliary - self.rho * slope)
        after = after._replace(chain=after.chain._replace(gradient=gradient))
        up = Gradients(own_log_p, slope, theta, z)
        return Reply(up, all_finite((up, after.chain))), after

    def round(self, state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
        """Ask clients to draw, and send the gradient with respect to the sum."""
        own = state.params.own

        def log_p(own: PartyParams, total: Array) -> Array:
            terms = self.model.log_server(own.theta, own.guide["z"], total, ask.server_data)
            # Under the power likelihood the rows' terms are the clients'.
            return terms[0] if self.power else sum(terms, jnp.zeros(()))

        if self.power:
            up: Any = ask(DRAW, AtServer(ask(SHOW, ()).up, own.theta, own.guide["z"])).up
            value, gradient = jax.value_and_grad(log_p)(own, jnp.zeros(self.model.shape))
            gradient = jax.tree.map(jnp.add, gradient, PartyParams(None, {"z": up.z}, up.theta))
            loss, slope = -(value + up.term), up.slope
        else:
            up = ask(DRAW, ()).up
            value, (gradient, slope) = jax.value_and_grad(log_p, (0, 1))(own, up.part)
            loss = -(value + up.own)
        stepped: Stepped = ask(STEP, slope).up
        after = self.ascend(state, "own", gradient)
        course = convergence.update(state.course, loss, after.params, whitened=False)
        after = after._replace(course=course, resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, slope)))

    def step(
        self, noise: object, down: Array, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        gradient = state.chain.gradient
        after = self.ascend(state, "auxiliary", gradient.auxiliary + self.rho * down)
        after = self.ascend(after, "own", gradient.own)
        course = convergence.update(state.course, jnp.zeros(()), after.params, whitened=False)
        up = Stepped(None, convergence.settled(course).astype(jnp.result_type(float)))
        return Reply(up, all_finite(after.params)), after._replace(course=course)


def chosen(noise: Array, number: Array | int, num_kept: int) -> Array:
    """Return indices (n,) of kept draws, from uniform noise (n,).

    They are draws of the last half of ``number`` rounds; the first half is burn-in.
    """
    num_kept_now = jnp.clip(number - number // 2, 1, num_kept)
    age = jnp.minimum((noise * num_kept_now).astype(jnp.int32), num_kept_now - 1)
    return (jnp.maximum(number, 1) - 1 - age) % num_kept
