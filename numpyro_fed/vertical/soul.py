r"""The method ``SOUL`` for vertical models, and its algorithm.

Clients draw by Langevin steps, and auxiliary variables are at their mode:
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

from numpyro_fed.basics.errors import positive_int
from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.guides.structured import build_guide, resolve_guide
from numpyro_fed.numerics.gaussian import identity
from numpyro_fed.posterior.built import Built
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply, Round, key_as_noise
from numpyro_fed.rounds.names import DRAW, SHOW, STEP
from numpyro_fed.sfvi.method import default_optimiser
from numpyro_fed.text.clients import positive_rho
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.vertical import VerticalSplit, init_theta
from numpyro_fed.vertical.curvature import PartyExpansion, diagonal_curvature, root_of
from numpyro_fed.vertical.method import VerticalMethod
from numpyro_fed.vertical.parties import (
    AtServer,
    ClientParams,
    ClientState,
    Gradients,
    PartyParams,
    PartyState,
    ServerParams,
    ServerState,
    Stepped,
    Up,
    VerticalAlgorithm,
    server_arrays,
)
from numpyro_fed.vertical.result import SOULResult, VerticalResult

Context = TypeVar("Context")  # arguments of a likelihood besides a client's own predictor


class Chain(NamedTuple):
    """A client's Langevin chain."""

    position: Array  # (dim,) the last draw, in units of ``root``
    root: Array
    kept: Array  # (kept, dim) the last draws of past rounds
    number: Array  # of rounds
    gradient: ClientParams  # the part that a client computes before the server's message


@dataclass(frozen=True, eq=False, kw_only=True)
class SOULAlgorithm(VerticalAlgorithm):
    """SOUL for a vertical model, as pure functions for all parties.

    A client's auxiliary variables are parameters: offsets from ``centre``, in units of ``rho``.
    """

    client_models: Mapping[Any, FederatedModel]  # by the signature of a client's data
    rho: float
    num_steps: int  # Langevin steps in a round
    step_size: float  # in coordinates in which the curvature is one
    num_kept: int  # draws that a client keeps

    @property
    def round(self) -> Round:
        """Return the round of a run: clients draw, then take their steps.

        Under the power likelihood all know the sum of the auxiliary variables before they draw.
        """
        drawing = Exchange(DRAW, self.answer_draw, silo_noise=key_as_noise)
        stepping = Exchange(STEP, self.answer_step)
        if not self.power:
            return Round((drawing, stepping), self.server_round)
        return Round((Exchange(SHOW, self.answer_show), drawing, stepping), self.server_round)

    def answer_show(
        self, noise: object, down: object, state: ClientState, data: SiloData
    ) -> tuple[Reply[Array], ClientState]:
        """Send a client's auxiliary variables."""
        z = self.auxiliary(state)
        return Reply(z, all_finite(z)), state

    def answer_draw(
        self, noise: Array, down: AtServer | tuple[()], state: ClientState, data: SiloData
    ) -> tuple[Reply[Up | Gradients], ClientState]:
        """Take a client's Langevin steps, and send its auxiliary variables or its likelihood."""
        if not self.power:
            after, own_log_p, _ = self.langevin(noise, state, data, (), lambda g, context: 0.0)
            drawn = Up(self.auxiliary(state), own_log_p, None)
            return Reply(drawn, all_finite((drawn, after.chain))), after
        at_server, down = SiloData(server_arrays(data)), cast(AtServer, down)

        def likelihood(g: Array, context: tuple[Any, Array, Array]) -> Array:
            theta, z, others = context
            of_rows = self.model.log_server(theta, z, g + others, at_server)[1]
            return of_rows / len(self.model.clients)

        context = down.theta, down.z, down.total - self.auxiliary(state)
        after, own_log_p, (theta, z, slope) = self.langevin(noise, state, data, context, likelihood)
        # The server's sum will hold this client's own slope, which is no gradient in its own z: its
        # likelihood depends on the others' z alone. So it is subtracted in advance.
        gradient = after.chain.gradient
        gradient = gradient._replace(auxiliary=gradient.auxiliary - self.rho * slope)
        after = after._replace(chain=after.chain._replace(gradient=gradient))
        up = Gradients(own_log_p, slope, theta, z)
        return Reply(up, all_finite((up, after.chain))), after

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

        chain, party_model = state.chain, self.client_models[signature(data)]
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

    def server_round(self, state: ServerState, noise: object, ask: Ask) -> tuple[ServerState, Info]:
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
            loss = -(value + up.term)
        stepped: Stepped = ask(STEP, slope).up
        after = self.ascend(state, "own", gradient)
        course = convergence.update(state.course, loss, after.params, whitened=False)
        after = after._replace(course=course, resting=stepped.resting)
        return after, Info(loss, all_finite((loss, gradient, slope)))

    def answer_step(
        self, noise: object, down: Array, state: ClientState, data: SiloData
    ) -> tuple[Reply[Stepped], ClientState]:
        """Take a client's steps, given the gradient with respect to the sum."""
        gradient = state.chain.gradient
        after = self.ascend(state, "auxiliary", gradient.auxiliary + self.rho * down)
        after = self.ascend(after, "own", gradient.own)
        course = convergence.update(state.course, jnp.zeros(()), after.params, whitened=False)
        up = Stepped(None, convergence.settled(course).astype(jnp.result_type(float)))
        return Reply(up, all_finite(after.params)), after._replace(course=course)

    def auxiliary(self, state: ClientState) -> Array:
        """Return a client's auxiliary variables."""
        return state.centre + self.rho * state.params.auxiliary

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        party_model = self.model.server
        theta = init_theta(party_model, key, self.zeros_at_server(data))
        own = PartyParams(None, {"z": jnp.zeros(party_model.dim)}, theta)
        return self.first_server(ServerParams(own, {}), identity((party_model.dim,)))

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state: at zero, in units of its curvature there."""
        party_model = self.client_models[signature(data)]
        theta, origin = init_theta(party_model, key, data), jnp.zeros(party_model.dim)

        def density(z: Array) -> tuple[Array, Array]:
            return self.model.predict(party_model, theta, z, data)

        centre, root = density(origin)[0], jnp.zeros((0, 0))
        if party_model.dim:
            # Given its auxiliary variables, a client's posterior has the curvature of N(g, rho^2),
            # and that of its own likelihood under the power model.
            curvature = self.rho**-2 + jnp.zeros_like(centre)
            if self.power:
                server, at_server = self.model.server, SiloData(server_arrays(data))
                given = self.model.with_total(at_server, centre)
                at_theta = init_theta(server, jax.random.key(0), given)

                at_zero = partial(self.model.log_server, at_theta, jnp.zeros(server.dim))
                curvature += diagonal_curvature(
                    lambda g: at_zero(g, at_server)[1] / len(self.model.clients), centre
                )
            slope = jnp.zeros_like(centre)
            root = root_of(PartyExpansion.at(density, origin, slope, curvature).curvature)
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

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        return PartyState(state.params.own.theta, {"draws": state.chain.kept}, identity(()))

    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[None, Array]:
        z = state.params.own.guide["z"]
        return None, jnp.broadcast_to(z, (n, *z.shape))

    def client_draws(
        self, key: Array, sent: object, state: ClientState, data: SiloData, n: int
    ) -> tuple[FederatedModel, dict[str, Any], Array]:
        """Return ``n`` of a client's kept draws: of the last half of all rounds, after burn-in."""
        number = state.chain.number
        num_kept_now = jnp.clip(number - number // 2, 1, self.num_kept)
        ages = (jax.random.uniform(key, (n,)) * num_kept_now).astype(jnp.int32)
        latest = jnp.maximum(number, 1) - 1
        z = state.chain.kept[(latest - jnp.minimum(ages, num_kept_now - 1)) % self.num_kept]
        return self.client_models[signature(data)], state.params.own.theta, z


@dataclass(frozen=True)
class SOUL(VerticalMethod[SOULResult]):
    r"""Langevin draws of clients' latents, with auxiliary variables at their mode (SOUL).

    .. math::
        \hat z = \arg\max_z \log p(y, z), \qquad
        \theta_j \sim p(\theta_j \mid \hat z, y)

    for the augmented model, or with ``likelihood="power"`` the other one
    (:class:`~numpyro_fed.VFL`). The server's latents and parameters are at their mode, too. Since
    ``z`` is fixed, posteriors are narrower than those of the model: given ``z``, a linear predictor
    with ``n`` rows has a variance of the order of :math:`\rho^2 / n`, whatever the response says.

    A client sends its mode :math:`\hat z_j` without added noise: it is the predictor at the
    client's draws, moved by up to some :math:`\rho` towards the response. The draws are made with a
    key that only the client knows. Do not count on ``rho`` to hide a predictor here.

    Parameters
    ----------
    model : callable
        A NumPyro model with one :func:`~numpyro_fed.client_sum`.
    rho : float
        Standard deviation of the auxiliary variables, in the units of the predictor.
    likelihood : {"augmented", "power"}
    share_response : bool
        Whether clients know the response and what else the server holds.
    optim : optax.GradientTransformation, optional
        The optimiser of auxiliary variables, in units of ``rho``, and of the server. By default
        Adam whose step decays from 0.03.
    num_steps : int
        Langevin steps of each client in a round.
    step_size : float
        The size of a Langevin step, in coordinates in which a client's curvature under ``rho`` is
        one. Variances come out too large by half of it.
    num_kept : int
        The number of draws that a client keeps, the last ones, one of each round.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, Appendix A; De Bortoli, Durmus,
    Pereyra, Vidal (2021), Statistics and Computing 31. Unlike there, the server sees sums over
    clients instead of each client's part.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def predictor(x):
    ...     beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    ...     return x @ beta
    >>> def model(xs, y=None):
    ...     eta = nf.client_sum("client", predictor, xs)
    ...     with numpyro.plate("row", eta.shape[0]):
    ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> xs = [rng.normal(size=(200, 1)), rng.normal(size=(200, 2))]
    >>> y = 2 * xs[0][:, 0] + rng.normal(size=200)
    >>> result = nf.SOUL(model, rho=1.0).run(jax.random.key(0), 1_000, xs, y, progress_bar=False)
    >>> draws = result.sample_posterior(jax.random.key(1), 500)
    >>> bool(abs(draws["client_0/beta"].mean() - 2) < 0.3), draws["client_1/beta"].shape
    (True, (500, 2))
    """

    result_class: ClassVar[type[VerticalResult]] = SOULResult

    rho: float = field(kw_only=True)
    optim: optax.GradientTransformation | None = field(default=None, kw_only=True)
    num_steps: int = field(default=20, kw_only=True)
    step_size: float = field(default=0.05, kw_only=True)
    num_kept: int = field(default=1_000, kw_only=True)

    def __post_init__(self) -> None:
        positive_rho(self.rho)
        positive_int("num_steps", self.num_steps)
        positive_int("num_kept", self.num_kept)
        if not 0 < self.step_size < 2:
            raise ValueError(
                f"step_size={self.step_size!r}: Langevin steps are stable between 0 and 2, and "
                "nearly right below 0.2."
            )
        super().__post_init__()

    def assemble(self, parts: VerticalSplit) -> Built:
        pairs, server = zip(parts.model.clients, parts.clients, strict=True), parts.model.server
        v = SOULAlgorithm(
            model=parts.model,
            client_models={signature(data): party_model for party_model, data in pairs},
            rho=self.rho,
            optim=self.optim or default_optimiser(),
            num_steps=self.num_steps,
            step_size=self.step_size,
            num_kept=self.num_kept,
            power=self.likelihood == "power",
        )
        guide = build_guide(None, resolve_guide(None, server, {}, {}), server)  # not used
        names = "rho", "likelihood", "num_steps", "step_size", "num_kept"
        return self.built(parts, v, guide, {name: getattr(self, name) for name in names})
