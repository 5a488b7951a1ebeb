"""The base of the vertical algorithms: the parties' parameters, states and draws.

Each client holds some columns of every row, and adds a part to the predictor; the server holds the
response. Parties' guides are independent, or share noise (:mod:`numpyro_fed.guides.coupling`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import FederatedAlgorithm, Private, Round, Shared, ascend
from numpyro_fed.algorithms.convergence import ConvergenceStats
from numpyro_fed.algorithms.expand import shape
from numpyro_fed.algorithms.vertical.sample import OwnDraws, PartyType
from numpyro_fed.gaussian import Gaussian, identity
from numpyro_fed.guides import coupling
from numpyro_fed.guides.auxiliary import AuxiliaryGuide, RowInfo
from numpyro_fed.guides.base import GlobalGuide, GuideParams
from numpyro_fed.guides.coupling import shared_guide
from numpyro_fed.guides.structured import Guide, build_resolved
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.vertical import VerticalModel

# Standard deviation of the first random shares in the shared noise, where a run does not start at
# the mode: small against one, so that parties start almost independent.
COUPLING_SD = 0.1


class PartyParams(NamedTuple):
    """A party's own parameters.

    ``coupling`` (dim, rank) is its share in the shared noise, if there is any. ``guide`` are the
    parameters of its latents' guide, in a frame. ``theta`` are its parameters, unconstrained.
    """

    coupling: Array | None
    guide: GuideParams
    theta: dict[str, Any]


class ServerParams(NamedTuple):
    """The server's own parameters, and those of the shared noise's guide."""

    own: PartyParams
    shared: GuideParams


class ClientParams(NamedTuple):
    """A client's parameters: of its auxiliary variables or their guide, and its own."""

    auxiliary: Any
    own: PartyParams


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``opt_state`` has an entry for each field of ``params``. ``frame`` is the frame of its latents.
    ``resting`` is the number of clients whose guides have converged.
    """

    params: ServerParams
    opt_state: dict[str, optax.OptState]
    course: ConvergenceStats[ServerParams]
    resting: Array
    frame: Gaussian


class ClientState(NamedTuple):
    """A client's parameters, and the values that it keeps between the exchanges of a round.

    ``opt_state`` has an entry for each field of ``params``. ``frame`` is the frame of its latents.
    ``centre`` is the predictor at the frame's centre, from which auxiliary variables are measured.
    ``noise``, ``rows`` and the shared noise ``xi`` belong to the round's draw, and ``slope`` is the
    gradient of the client's own likelihood there. ``chain`` is its Langevin chain, of SOUL.
    """

    params: ClientParams
    opt_state: dict[str, optax.OptState]
    course: ConvergenceStats[Any]
    noise: Any
    rows: Array | None
    frame: Gaussian
    centre: Array
    xi: Array | None = None
    slope: Any = None
    chain: Any = None


State = TypeVar("State", ServerState, ClientState)


class ClientDraw(NamedTuple):
    """The draws of one client in a round.

    ``g`` is its predictor and ``part`` its part of the sum, both (particles, rows, ...). ``own`` is
    its term of the bound, ``b`` (particles, rank) its coupling statistic.
    """

    g: Array
    part: Array
    own: Array
    b: Any = None


class PartyStart(NamedTuple):
    """A party's start: a point, a root of the covariance there, its share in the shared noise."""

    z: Array
    root: Array
    coupling: Array | None = None


class PartyState(NamedTuple):
    """A client's own part, which never leaves it: parameters, guides and its latents' frame."""

    theta: dict[str, Any]
    guide: dict[str, Any]
    frame: Gaussian


class SumMessage(NamedTuple):
    """The sum of all parts and the coupling statistic, or the gradients with respect to both.

    ``part`` is (particles, rows, ...), ``b`` is (particles, rank) or None.
    """

    part: Array
    b: Any


class ServerNoise(NamedTuple):
    """The noise of a round: of the server's latents, of the shared noise, and the round's rows."""

    eps: Array
    xi: Array | None
    rows: Array | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Parties(ABC):
    """A vertical model with an algorithm, as pure functions for all parties.

    Attributes
    ----------
    model : VerticalModel
    rho : float or None
        Standard deviation of the auxiliary variables; None for none.
    optim : optax.GradientTransformation
    power : bool
        Whether clients evaluate likelihoods of their own.
    """

    model: VerticalModel
    rho: float | None
    optim: optax.GradientTransformation
    power: bool = False

    @property
    def num_clients(self) -> int:
        """Return how many clients there are."""
        return len(self.model.clients)

    @property
    @abstractmethod
    def rounds(self) -> Round:
        """Return the round of a run."""

    def algorithm(self, server_like: SiloData) -> FederatedAlgorithm[ServerState, ClientState]:
        """Return the algorithm; ``server_like`` has the shapes of the server's data."""
        return FederatedAlgorithm(
            lambda key: self.init_server(key, server_like),
            self.init_client,
            self.rounds,
            self.shared,
            self.private_params,
            done=self.done,
            server_like=server_like,
        )

    @abstractmethod
    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """Return the server's first state; ``data`` has the shapes of its data."""

    @abstractmethod
    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state."""

    @abstractmethod
    def shared(self, state: ServerState) -> Shared:
        """Return the server's parameters and guide."""

    @abstractmethod
    def private_params(self, state: ClientState) -> Private:
        """Return a client's parameters, and what it has in place of a guide."""

    def zeros_at_server(self, data: SiloData) -> SiloData:
        """Return zeros for all that the server holds, the sum among them."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), data)
        return self.model.with_total(zeros, jnp.zeros(self.model.shape, self.model.dtype))

    def init_optim(self, params: ServerParams | ClientParams) -> dict[str, optax.OptState]:
        """Return the optimiser's first state for each field of a party's parameters."""
        return {part: self.optim.init(value) for part, value in params._asdict().items()}

    def first_server(self, params: ServerParams, frame: Gaussian) -> ServerState:
        """Return the server's first state with these parameters."""
        course, zero = convergence.init(params), jnp.zeros(())
        return ServerState(params, self.init_optim(params), course, zero, frame)

    def ascend(self, state: State, part: str, gradient: Any) -> State:
        """Take one step up the bound on one field of a party's parameters."""
        before = getattr(state.params, part)
        after, opt_state = ascend(self.optim, gradient, state.opt_state[part], before)
        return state._replace(
            params=state.params._replace(**{part: after}),
            opt_state={**state.opt_state, part: opt_state},
        )

    def done(self, state: ServerState) -> Array:
        """Return whether the bound and all parties' parameters have converged.

        Guides of auxiliary variables are not checked: one for each row, they are known by the
        bound alone.
        """
        return convergence.settled(state.course) & (state.resting == self.num_clients)


@dataclass(frozen=True, eq=False, kw_only=True)
class Vertical(Parties):
    """A vertical model and its guides, as pure functions for all parties.

    Attributes
    ----------
    server : PartyType
    kinds : dict
        Types of clients, by the signature of their data.
    spec : Structured or AutoGuide or None
        The user's guide for clients; ``server_spec`` is the one for the server's latents.
    auxiliary : AuxiliaryGuide or None
    num_particles : int
    batch_size : int or None
        Rows in a round.
    from_start : bool
        Whether a run starts at a point that is searched first, in a frame at that point.
    rank : int
        The dimension of the shared noise: 0 for parties that are independent.
    width : int
        The width of the basis in which the dependence between parties is found.
    local_steps : int
        Steps of a client in a round. After the first, its auxiliary variables stay fixed (section
        5.3).
    """

    server: PartyType
    kinds: Mapping[Any, PartyType]
    spec: Any
    server_spec: Any
    auxiliary: AuxiliaryGuide | None
    num_particles: int = 1
    batch_size: int | None = None
    from_start: bool = False
    rank: int = 0
    width: int = 0
    local_steps: int = 1

    @property
    def rows(self) -> int:
        """Return how many rows take part in a round."""
        return self.batch_size or self.model.rows

    @property
    def dim(self) -> int:
        """Return the number of all parties' latents, without auxiliary variables."""
        return sum(party_model.dim for party_model in (self.model.server, *self.model.clients))

    @property
    def complete(self) -> bool:
        """Return whether the basis spans all directions."""
        return self.width > self.dim

    @property
    def share(self) -> float:
        """Return the weight of rows' terms: all rows over those of a minibatch."""
        return self.model.rows / self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape (particles, rows, ...) of a client's part of the sum."""
        return (self.num_particles, self.rows, *self.model.shape[1:])

    def kind(self, data: SiloData) -> PartyType:
        """Return the type of the clients that hold data of this shape."""
        return self.kinds[signature(data)]

    def guide(self, kind: PartyType, data: SiloData | None = None) -> Guide:
        """Return the guide of a party's latents; its start may depend on the party's data."""
        spec = self.server_spec if kind is self.server else self.spec
        party_model: Any = kind.model._replace(data=data)
        return build_resolved(spec, kind.resolved, party_model)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """Return the server's first state; ``data`` has the shapes of its data."""
        key_theta, key_guide, key_coupling, key_sharing = jax.random.split(key, 4)
        given = self.zeros_at_server(data)
        theta = self.server.model.init_theta(key_theta, given)
        if self.from_start:
            return self.server_at(key_guide, theta)
        eta = self.guide(self.server, given).init_global(key_guide)
        dim = self.server.model.dim
        party_params = PartyParams(self.random_coupling(key_coupling, dim), eta, theta)
        return self._server_state(key_sharing, party_params, identity((dim,)))

    def server_at(
        self, key: Array, theta: dict[str, Any], start: PartyStart | None = None
    ) -> ServerState:
        """Return the server's state at the start of a run, at zero if there is none."""
        key_guide, key_sharing = jax.random.split(key)
        party_params, frame = self._initial_params(key_guide, self.server, theta, start)
        return self._server_state(key_sharing, party_params, frame)

    def _initial_params(
        self, key: Array, kind: PartyType, theta: dict[str, Any], start: PartyStart | None
    ) -> tuple[PartyParams, Gaussian]:
        """Return a party's first parameters, a standard normal in a frame, and the frame."""
        guide, dim = self.guide(kind).globals, kind.model.dim
        coupling = jnp.zeros((dim, self.rank)) if self.rank else None
        start = start or PartyStart(jnp.zeros(dim), jnp.eye(dim), coupling)
        eta = guide.init(key, jnp.zeros(dim), 1.0)
        return PartyParams(start.coupling, eta, theta), guide.frame(start.z, start.root)

    def _server_state(self, key: Array, party_params: PartyParams, frame: Gaussian) -> ServerState:
        zeros = jnp.zeros(self.rank)
        shared = self.sharing.init(key, zeros) if self.rank else {}
        return self.first_server(ServerParams(party_params, shared), frame)

    def random_coupling(self, key: Array, dim: int) -> Array | None:
        """Return a small random share (dim, rank) in the shared noise.

        At zero the gradient would be zero as well, and parties would stay independent.
        """
        return COUPLING_SD * jax.random.normal(key, (dim, self.rank)) if self.rank else None

    @property
    def sharing(self) -> GlobalGuide[Array]:
        """Return the guide of the shared noise."""
        return shared_guide(self.rank)

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state."""
        key_theta, key_guide, key_coupling, key_state = jax.random.split(key, 4)
        kind = self.kind(data)
        theta = kind.model.init_theta(key_theta, data)
        if self.from_start:
            centre = jnp.zeros(self.model.shape)
            return self.client_at(key_guide, data, theta, None, centre)
        eta = self.guide(kind, data).init_global(key_guide)
        dim = kind.model.dim
        party_params = PartyParams(self.random_coupling(key_coupling, dim), eta, theta)
        return self._client_state(key_state, kind, party_params, identity((dim,)), jnp.zeros(()))

    def client_at(
        self,
        key: Array,
        data: SiloData,
        theta: dict[str, Any],
        start: PartyStart | None,
        centre: Array,
    ) -> ClientState:
        """Return a client's state at the start of a run; ``centre`` is its predictor there."""
        kind = self.kind(data)
        key_guide, key_state = jax.random.split(key)
        party_params, frame = self._initial_params(key_guide, kind, theta, start)
        # A centre as long as the rows is kept only by guides that use it.
        centre_or_zero = (
            centre if self.auxiliary is not None and self.auxiliary.centred else jnp.zeros(())
        )
        return self._client_state(key_state, kind, party_params, frame, centre_or_zero)

    def _client_state(
        self,
        key: Array,
        kind: PartyType,
        party_params: PartyParams,
        frame: Gaussian,
        centre: Array,
    ) -> ClientState:
        key_aux, key_noise = jax.random.split(key)
        # A placeholder with the shapes of the noise of a round.
        eps = self.guide(kind).globals.noise(key_noise, self.num_particles)
        psi = {} if self.auxiliary is None else self.auxiliary.init(key_aux)
        params = ClientParams(psi, party_params)
        return ClientState(
            params=params,
            opt_state=self.init_optim(params),
            course=convergence.init(party_params),
            noise=(eps, None if self.auxiliary is None else jnp.zeros(self.shape)),
            rows=None if self.batch_size is None else jnp.zeros(self.rows, jnp.int32),
            xi=jnp.zeros((self.num_particles, self.rank)) if self.rank else None,
            slope=jnp.zeros(self.shape) if self.power else None,
            frame=frame,
            centre=centre,
        )

    def coupling_of(self, kind: PartyType, party_params: PartyParams) -> Array | None:
        """Return the coefficients (dim, rank) of the shared noise in a party's guide, or None."""
        V = party_params.coupling
        # Without a start, V is in units of the standard noise already.
        if V is None or not self.from_start:
            return V
        return coupling.from_frame_units(self.guide(kind).globals, party_params.guide, V)

    def server_noise(self, key: Array) -> ServerNoise:
        """Return the noise of a round: of the server's latents, the shared one, and its rows."""
        key_draw, key_shared, key_rows = jax.random.split(key, 3)
        eps = self.guide(self.server).globals.noise(key_draw, self.num_particles)
        xi = self.sharing.noise(key_shared, self.num_particles) if self.rank else None
        if self.batch_size is None:
            return ServerNoise(eps, xi, None)
        # With replacement, by the server: all parties need the same rows.
        rows = jax.random.randint(key_rows, (self.rows,), 0, self.model.rows, jnp.int32)
        return ServerNoise(eps, xi, rows)

    def xi(self, shared: GuideParams, noise: Array | None) -> Array | None:
        """Return the shared noise, (draws, rank), from standard normals."""
        if noise is None:
            return None
        return jax.vmap(self.sharing.draw, (None, 0))(shared, noise)[0]

    def server_noise_of(self, key: Array, n: int) -> tuple[Array, Array | None]:
        """Return noise for ``n`` draws of the server's latents, and of the shared noise."""
        key_draw, key_shared = jax.random.split(key)
        eps = self.guide(self.server).globals.noise(key_draw, n)
        return eps, self.sharing.noise(key_shared, n) if self.rank else None

    def client_noise_of(self, key: Array, state: ClientState, n: int) -> Array:
        """Return noise for ``n`` draws of a client's latents."""
        return jax.random.normal(key, (n, *state.noise[0].shape[1:]))

    def sent_like(self, n: int) -> Any:
        """Return the shapes of what the server sends where all parties draw."""
        return shape(n, self.rank) if self.rank else None

    def server_draws(self, key: Array, state: ServerState, n: int) -> tuple[Array | None, Array]:
        """Return the shared noise, and ``n`` draws of the server's latents (n, dim)."""
        eps, shared = self.server_noise_of(key, n)
        xi = self.xi(state.params.shared, shared)
        return xi, self._draws(self.server, self.shared(state), eps, xi)

    def client_draws(
        self, key: Array, sent: Array | None, state: ClientState, data: SiloData, n: int
    ) -> OwnDraws:
        """Return ``n`` draws of a client's latents."""
        kind, private = self.kind(data), self.private(state, data)
        z = self._draws(kind, private, self.client_noise_of(key, state, n), sent)
        return OwnDraws(kind.model, private.theta, z)

    def _draws(
        self, kind: PartyType, party: Shared | PartyState, noise: Array, xi: Array | None
    ) -> Array:
        guide, V = party.guide, party.guide.get("coupling")
        draw = partial(coupling.draw_in, party.frame, self.guide(kind).globals, guide["latents"], V)
        return jax.vmap(draw)(noise, xi)[0]

    def noise_of(self, key: Array, state: ClientState) -> tuple[Array, Array | None]:
        """Return new standard normals with the shapes of the noise in a client's state."""
        key_draw, key_z = jax.random.split(key)
        eps, tau = state.noise
        new = jax.random.normal(key_draw, eps.shape)
        return new, None if tau is None else jax.random.normal(key_z, tau.shape)

    def private_params(self, state: ClientState) -> Private:
        """Return a client's parameters, without its guides, which only its data would give."""
        return Private(state.params.own.theta, {})

    def take_rows(self, data: SiloData, rows: Array | None) -> SiloData:
        """Return the data of the round's rows."""
        return data if rows is None else self.model.take(data, rows)

    def draw(
        self, params: ClientParams, xi: Array | None, state: ClientState, data: SiloData
    ) -> ClientDraw:
        """Return a client's draws, from the noise in its state and the shared noise ``xi``."""
        kind, data_here = self.kind(data), self.take_rows(data, state.rows)
        guide = self.guide(kind).globals
        psi, row_info = params.auxiliary, self.row_info(state, data_here)
        eta, V = params.own.guide, self.coupling_of(kind, params.own)
        # Parameters of all rows are the client's state; the round uses those of its rows.
        if self.auxiliary is not None and state.rows is not None:
            psi = self.auxiliary.take_rows(psi, state.rows)

        def one_particle(eps: Array, tau: Array | None, xi: Array | None) -> ClientDraw:
            z, log_q, b = coupling.draw_in(state.frame, guide, eta, V, eps, xi)
            g, log_p = self.model.predict(kind.model, params.own.theta, z, data_here)
            if self.auxiliary is None or tau is None:
                return ClientDraw(g, g, log_p - log_q, b)
            part, log_q_part = self.auxiliary.draw(psi, g, row_info, tau)
            log_ratio = self.log_noise(part, g) - log_q_part
            return ClientDraw(g, part, log_p - log_q + self.share * log_ratio, b)

        eps, tau = state.noise
        drawn = jax.vmap(one_particle)(eps, tau, xi)
        return drawn._replace(own=drawn.own.mean())

    def bound_at_fixed_part(
        self, party_params: PartyParams, eps: Array, part: Array, state: ClientState, data: SiloData
    ) -> Array:
        """Return a client's term of the bound, with its auxiliary variables fixed at ``part``."""
        kind, data_here = self.kind(data), self.take_rows(data, state.rows)
        guide = self.guide(kind).globals

        def one_particle(eps: Array, part: Array) -> Array:
            z, log_q, _ = coupling.draw_in(state.frame, guide, party_params.guide, None, eps, None)
            g, prior = self.model.predict(kind.model, party_params.theta, z, data_here)
            return prior - log_q + self.share * self.log_noise(part, g)

        return jax.vmap(one_particle)(eps, part).mean()

    def log_noise(self, part: Array, g: Array) -> Array:
        """Return the log density of auxiliary variables given the predictor."""
        return dist.Normal(g, self.rho).log_prob(part).sum()

    def row_info(self, state: ClientState, data: SiloData) -> RowInfo:
        """Return the inputs of the auxiliary variables' guide for the round's rows."""
        centre = state.centre
        if state.rows is not None and centre.ndim:
            centre = centre[state.rows]
        return RowInfo(centre, self.response(data))

    def response(self, data: SiloData) -> Array:
        """Return the columns (rows, k) of the response that clients have; k may be 0."""
        shared = data.kwargs.get("shared") or {}
        columns_known = [shared[n] for n in self.model.response if n in shared]
        columns = [y.reshape(len(y), -1) for y in columns_known if jnp.shape(y)[:1] == (self.rows,)]
        return jnp.concatenate([jnp.zeros((self.rows, 0)), *columns], 1)

    def shared(self, state: ServerState) -> Shared:
        """Return the server's parameters and guide."""
        party_params, shared = state.params
        coupled = (
            {"coupling": self.coupling_of(self.server, party_params), "shared": shared}
            if self.rank
            else {}
        )
        return Shared(party_params.theta, {"latents": party_params.guide, **coupled}, state.frame)

    def private(self, state: ClientState, data: SiloData) -> PartyState:
        """Return a client's parameters and guides."""
        psi, party_params = state.params
        coupled = {"coupling": self.coupling_of(self.kind(data), party_params)} if self.rank else {}
        guide = {"latents": party_params.guide, **({"auxiliary": psi} if psi else {}), **coupled}
        return PartyState(party_params.theta, guide, state.frame)

    def in_z(self, party: Shared | PartyState, data: SiloData | None) -> dict[str, Any]:
        """Return a party's guides in units of its latents; ``data`` is None at the server."""
        kind = self.server if data is None else self.kind(data)
        guide, latents = self.guide(kind).globals, party.guide["latents"]
        return {**party.guide, "latents": guide.in_z(party.frame, latents)}
