"""Parties of a vertical model: guides, parameters, states, messages; the base of algorithms.

Each client holds some columns of every row, and adds a part to the predictor; the server holds the
response. Parties' guides are independent, or share noise (:mod:`numpyro_fed.vertical.guides`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.basics.programs import map_in_batches
from numpyro_fed.basics.trees import all_finite, ascend, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GlobalGuide, GuideParams
from numpyro_fed.guides.guide import Guide
from numpyro_fed.guides.structured import GuideConfig, Spec, build_guide
from numpyro_fed.numerics.gaussian import Gaussian
from numpyro_fed.rounds import convergence
from numpyro_fed.rounds.convergence import ConvergenceStats
from numpyro_fed.rounds.exchange import Exchange, FederatedAlgorithm, Reply, Round, key_as_noise
from numpyro_fed.rounds.names import SAMPLE
from numpyro_fed.rounds.stacks import StackedExchange, stacked_visit
from numpyro_fed.rounds.states import Private, Sampled, Shared
from numpyro_fed.search.expand import shape
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Theta
from numpyro_fed.text.vertical import VerticalModel, latents_of, prior_draw
from numpyro_fed.vertical.guides import CouplingStats

AT_ONCE = 64  # draws whose values are computed side by side; more of them use more memory
PRIOR_DRAWS = 500  # for the median and sd of hyperparameters
# Least sd with which their guide starts: a prior of a single value would have none, and its log
# would be infinite.
MIN_SD = 1e-6


class PinnedLatents(NamedTuple):
    """Fixed values (dim,) of hyperparameters, unconstrained, during the search for a mode."""

    value: Array  # the median of their prior; zero for other latents
    sd: Array  # of the prior, at most one, with which their guide starts; one for others


@dataclass(frozen=True, eq=False)
class PartyType:
    """The server, or the clients of one shape: their part of the model, and their guide."""

    model: FederatedModel
    guide_spec: Spec | None  # as the user gave it
    guide_config: GuideConfig  # with a choice for each "auto"
    hyperparameters: tuple[bool, ...]  # the coordinates on which priors of other latents depend

    def guide_at(self, data: SiloData | None) -> Guide:
        """Return the party's guide, whose first parameters may depend on the party's data."""
        model = self.model if data is None else replace(self.model, silo=data)
        return build_guide(self.guide_spec, self.guide_config, model)

    @cached_property
    def guide(self) -> GlobalGuide[Array]:
        """Return the guide of the party's latents."""
        return self.guide_at(None).globals

    def standard_normal(
        self, key: Array, theta: Theta, loc: Array, root: Array, coupling: Array | None
    ) -> tuple[PartyParams, Gaussian]:
        """Return first parameters for which the guide is a standard normal in a frame, and that.

        ``root`` (dim, dim) is of the covariance, and ``coupling`` (dim, rank) are the coefficients
        of the shared noise.
        """
        eta = self.guide.init(key, jnp.zeros(self.model.dim), 1.0)
        return PartyParams(coupling, eta, theta), self.guide.frame(loc, root)

    def pin(self, key: Array, data: SiloData) -> PinnedLatents:
        """Return the fixed values of hyperparameters; zeros if the prior has no draws."""
        unpinned = PinnedLatents(jnp.zeros(self.model.dim), jnp.ones(self.model.dim))
        if not any(self.hyperparameters):
            return unpinned
        keys = jax.random.split(key, PRIOR_DRAWS)
        try:
            draws = jax.vmap(lambda key: prior_draw(self.model, key, data))(keys)
        except NotImplementedError:  # flat priors
            return unpinned
        low, median, high = jnp.quantile(draws, jnp.array([0.16, 0.5, 0.84]), axis=0)
        sd = jnp.clip(0.5 * (high - low), MIN_SD, 1.0)
        is_pinned = jnp.array(self.hyperparameters) & jnp.isfinite(median) & jnp.isfinite(sd)
        return where(is_pinned, PinnedLatents(median, sd), unpinned)

    def at_pinned(self, z: Array, pinned: PinnedLatents) -> tuple[Array, Array]:
        """Return a point with hyperparameters at their fixed values, and a normal log density."""
        # It takes the place of these latents' own density: a scale and the effects under it have no
        # joint mode but where the scale is zero.
        # Static: clients without such latents have a smaller program.
        if not any(self.hyperparameters):
            return z, jnp.zeros(())
        is_pinned = jnp.array(self.hyperparameters)
        standardised = jnp.where(is_pinned, (z - pinned.value) / pinned.sd, 0.0)
        return jnp.where(is_pinned, pinned.value, z), -0.5 * jnp.sum(standardised**2)


class PartyParams(NamedTuple):
    """A party's own parameters."""

    coupling: Array | None  # (dim, rank) its share in the shared noise, if there is any
    guide: GuideParams  # of its latents' guide, in a frame
    theta: dict[str, Any]  # unconstrained


class ServerParams(NamedTuple):
    """The server's own parameters, and those of the shared noise's guide."""

    own: PartyParams
    shared: GuideParams


class ClientParams(NamedTuple):
    """A client's parameters: of its auxiliary variables or their guide, and its own."""

    auxiliary: Any
    own: PartyParams


class ServerState(NamedTuple):
    """The state that the server keeps from round to round."""

    params: ServerParams
    opt_state: dict[str, optax.OptState]  # for each field of ``params``
    course: ConvergenceStats[ServerParams]
    resting: Array  # the number of clients whose guides have converged
    frame: Gaussian  # of its latents


class ClientState(NamedTuple):
    """A client's parameters, and the values that it keeps between the exchanges of a round."""

    params: ClientParams
    opt_state: dict[str, optax.OptState]  # for each field of ``params``
    course: ConvergenceStats[Any]
    noise: Any  # of the round's draw, as are ``rows`` and ``xi``
    rows: Array | None
    frame: Gaussian  # of its latents
    # The predictor at the frame's centre, from which auxiliary variables are measured.
    centre: Array
    xi: Array | None = None  # the shared noise
    slope: Any = None  # the gradient of the client's own likelihood at the round's draw
    chain: Any = None  # its Langevin chain, of SOUL


State = TypeVar("State", ServerState, ClientState)
Params = TypeVar("Params")


class ClientDraw(NamedTuple):
    """The draws of one client in a round."""

    g: Array  # (particles, rows, ...) its predictor
    part: Array  # (particles, rows, ...) its part of the sum
    term: Array  # its term of the bound
    coupling_stat: Array | None = None  # (particles, rank)


def server_arrays(data: SiloData) -> dict[str, Array]:
    """Return the arrays of the server that a client knows, from the client's data."""
    return dict(data.kwargs.get("shared") or {})


class PartyState(NamedTuple):
    """A client's own part, which never leaves it: parameters, guides and its latents' frame."""

    theta: dict[str, Any]
    guide: dict[str, Any]
    frame: Gaussian


class ServerNoise(NamedTuple):
    """The noise of a round: of the server's latents, of the shared noise, and the round's rows."""

    eps: Array
    xi: Array | None
    rows: Array | None


class Down(NamedTuple):
    """A message of the server for a draw: the shared noise, and the indices of the round's rows."""

    xi: Array | None
    rows: Array | None


class Up(NamedTuple):
    """A client's message: its part of the sum, and its term of the bound."""

    part: Array
    term: Array
    coupling: CouplingStats | None  # None where parties are independent


class Sums(NamedTuple):
    """The sums of all parts and of the coupling statistic, or the gradients in these, as sent."""

    part: Array  # (particles, rows, ...)
    b: Array | None  # (particles, rank)


class Stepped(NamedTuple):
    """A client's message after its step."""

    by_xi: Array | None  # the gradient with respect to the shared noise
    resting: Array  # whether its guide has converged (0 or 1): the sum over clients counts them


class AtServer(NamedTuple):
    """A message of the server: the sum of auxiliary variables, its parameters and latents."""

    total: Array
    theta: dict[str, Any]
    z: Array


class Gradients(NamedTuple):
    """A client's message: its likelihood term, and gradients of it."""

    term: Array
    slope: Array  # with respect to the likelihood's argument
    theta: dict[str, Any]  # with respect to the server's parameters, and to its draws
    z: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalAlgorithm(ABC):
    """An algorithm for a vertical model, as pure functions for all parties."""

    model: VerticalModel
    rho: float | None  # standard deviation of the auxiliary variables; None for none
    optim: optax.GradientTransformation
    power: bool = False  # whether clients evaluate likelihoods of their own
    rank: int = 0  # the dimension of the shared noise: 0 for parties that are independent

    @property
    @abstractmethod
    def round(self) -> Round:
        """Return the round of a run."""

    def algorithm(self, server_like: SiloData) -> FederatedAlgorithm[ServerState, ClientState]:
        """Return the algorithm; ``server_like`` has the shapes of the server's data."""
        return FederatedAlgorithm(
            lambda key: self.init_server(key, server_like),
            self.init_client,
            self.round,
            self.shared,
            lambda state: Private(state.params.own.theta, {}),
            # Guides of auxiliary variables are not checked: one for each row, they are known by the
            # bound alone.
            done=lambda state: (
                convergence.settled(state.course) & (state.resting == len(self.model.clients))
            ),
            server_like=server_like,
        )

    @abstractmethod
    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """Return the server's first state; ``data`` has the shapes of its data."""

    @abstractmethod
    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state."""

    def shared(self, state: ServerState) -> Shared:
        """Return the server's parameters and guide."""
        own = state.params.own
        return Shared(own.theta, own.guide, state.frame)

    @abstractmethod
    def private(self, state: ClientState, data: SiloData) -> PartyState:
        """Return a client's parameters, and its guides or draws."""

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        """Return a party's guides in units of its latents; ``data`` is None at the server."""
        return party.guide

    @abstractmethod
    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[Array | None, Array]:
        """Return the shared noise, and ``n`` draws of the server's latents (n, dim)."""

    @abstractmethod
    def client_draws(
        self, key: Array, sent: Array | None, state: ClientState, data: SiloData, n: int
    ) -> tuple[FederatedModel, dict[str, Any], Array]:
        """Return a client's part of the model, its parameters, and ``n`` draws (n, dim)."""

    def zeros_at_server(self, data: SiloData) -> SiloData:
        """Return zeros for all that the server holds, the sum among them."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), data)
        return self.model.with_total(zeros, jnp.zeros(self.model.shape, self.model.dtype))

    def init_optim(self, params: ServerParams | ClientParams) -> dict[str, optax.OptState]:
        """Return the optimiser's first state for each field of a party's parameters."""
        return {name: self.optim.init(value) for name, value in params._asdict().items()}

    def first_server(self, params: ServerParams, frame: Gaussian) -> ServerState:
        """Return the server's first state with these parameters."""
        course, zero = convergence.init(params), jnp.zeros(())
        return ServerState(params, self.init_optim(params), course, zero, frame)

    def ascend(self, state: State, name: str, gradient: Params) -> State:
        """Take one step up the bound on the field ``name`` of a party's parameters."""
        current = getattr(state.params, name)
        stepped, opt_state = ascend(self.optim, gradient, state.opt_state[name], current)
        return state._replace(
            params=state.params._replace(**{name: stepped}),
            opt_state={**state.opt_state, name: opt_state},
        )

    def sampling(
        self, n: int
    ) -> tuple[Exchange[Any, Any, Any], Callable[[Array, Any], tuple[Any, Array]]]:
        """Return the exchange in which clients draw ``n`` times, and how the server draws.

        From a key and its state the server has the noise that it sends, and its own draws
        (n, dim), unconstrained. Clients keep theirs (:class:`Sampled`).
        """

        def silo(
            noise: Array, down: Array | None, state: ClientState, data: SiloData
        ) -> tuple[Reply[tuple[()]], Sampled]:
            model, theta, z = self.client_draws(noise, down, state, data, n)
            values = map_in_batches(lambda z: latents_of(model, theta, z, data), z, AT_ONCE)
            return Reply((), all_finite(values)), Sampled(values)

        exchange = StackedExchange(
            SAMPLE,
            stacked_visit(silo, little=True),
            silo_noise=key_as_noise,
            settings=json.dumps({"num_draws": n}),
            messages=lambda: (shape(n, self.rank) if self.rank else None, ()),
        )
        return exchange, jax.jit(lambda key, state: self.server_draws(key, state, n))
