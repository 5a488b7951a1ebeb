"""What the vertical algorithms share: the parties' states, and a client's draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

from numpyro_fed.algorithms import convergence
from numpyro_fed.algorithms.base import FederatedAlgorithm, Private, Round, Shared, ascend
from numpyro_fed.algorithms.convergence import ConvergenceStats
from numpyro_fed.frame import identity
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides import coupling
from numpyro_fed.guides.auxiliary import AuxiliaryGuide, Known
from numpyro_fed.guides.base import GlobalGuide, GuideParams
from numpyro_fed.guides.coupling import shared_guide
from numpyro_fed.guides.structured import Guide, GuideConfig, build_resolved
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.vertical import PartyModel, VerticalModel

PRIOR_DRAWS = 500  # from which latents above others have their place
NARROW = 1e-6  # of their guide at the start, at least
LOOSE = 0.1  # of the shared noise, where a run does not begin at the mode


class PartyParams(NamedTuple):
    """A party's own parameters: what it has of the noise that all share (dim, rank), if there is
    any; those of the guide of its latents, in a frame; and its parameters, unconstrained.
    """

    coupling: Array | None
    guide: GuideParams
    theta: dict[str, Any]


class ServerParams(NamedTuple):
    """The server's own parameters, and the guide of the noise that all parties share."""

    own: PartyParams
    shared: GuideParams


class ClientParams(NamedTuple):
    """The guide of a client's auxiliary variables, and its own parameters."""

    auxiliary: GuideParams
    own: PartyParams


class ServerState(NamedTuple):
    """The state that the server keeps from round to round.

    ``opt_state`` is by field of ``params``, ``frame`` is that of the guide of its latents.
    ``resting`` is how many clients say that their guides have come to rest.
    """

    params: ServerParams
    opt_state: dict[str, optax.OptState]
    course: ConvergenceStats[ServerParams]
    resting: Array
    frame: Gaussian


class ClientState(NamedTuple):
    """A client's parameters, and what it keeps from one exchange of a round to the next.

    ``opt_state`` is by field of ``params``, ``frame`` is that of the guide of its latents;
    ``centre`` is the predictor in the middle of that, around which auxiliary variables are
    measured; ``noise``, ``rows`` and the shared noise ``xi`` are of the draw that is on its way,
    ``slope`` is the gradient of the client's likelihood there.
    """

    params: ClientParams
    opt_state: dict[str, optax.OptState]
    course: ConvergenceStats[PartyParams]
    noise: tuple[Array, Array | None]
    rows: Array | None
    frame: Gaussian
    centre: Array
    xi: Array | None = None
    slope: Any = None


State = TypeVar("State", ServerState, ClientState)


class ClientDraw(NamedTuple):
    """A client's draws, one each: its predictor and what it adds to the sum (particles, rows, ...);
    its own term of the bound, their mean; and what ties it to other parties (particles, rank).
    """

    g: Array
    part: Array
    own: Array
    b: Any = None


class Start(NamedTuple):
    """A party's beginning: a point, a root of a covariance there, its part of the shared noise."""

    z: Array
    root: Array
    coupling: Array | None = None


class Party(NamedTuple):
    """A client's own part, which stays there: parameters, guides, and the frame of its latents'."""

    theta: dict[str, Any]
    guide: dict[str, Any]
    frame: Gaussian


class Sent(NamedTuple):
    """A message of the server on a round: the gradient with respect to the sum, or the sum
    itself (particles, rows, ...), and the gradient with respect to what ties parties.
    """

    part: Array
    b: Any


class ServerNoise(NamedTuple):
    """The noise of a round: of the server's latents, what all parties share, and the rows."""

    eps: Array
    xi: Array | None
    rows: Array | None


class PinnedLatents(NamedTuple):
    """A place where latents above others stay while a mode is looked for, unconstrained (dim,): the
    median of their prior; and how wide their guide begins, as wide as the prior and at most one.
    Zero and one for all other latents.
    """

    place: Array
    spread: Array


class ClientType(NamedTuple):
    """Clients of one shape: their half of the text, how their guide was resolved, and which
    coordinates are of latents above others, such as the scale of a prior.
    """

    half: PartyModel
    resolved: GuideConfig
    above: tuple[bool, ...]

    def held(self, key: Array, data: SiloData) -> PinnedLatents:
        """Return where latents above others are held; zero if the prior cannot be drawn from."""
        nothing = PinnedLatents(jnp.zeros(self.half.dim), jnp.ones(self.half.dim))
        if not any(self.above):
            return nothing
        keys = jax.random.split(key, PRIOR_DRAWS)
        try:
            draws = jax.vmap(lambda key: self.half.draw_prior(key, data))(keys)
        except NotImplementedError:  # flat priors
            return nothing
        low, place, high = jnp.quantile(draws, jnp.array([0.16, 0.5, 0.84]), axis=0)
        spread = jnp.clip(0.5 * (high - low), NARROW, 1.0)
        use = jnp.array(self.above, bool) & jnp.isfinite(place) & jnp.isfinite(spread)
        return PinnedLatents(
            *(jnp.where(use, a, b) for a, b in zip((place, spread), nothing, strict=True))
        )

    def below(self, z: Array, held: PinnedLatents) -> tuple[Array, Array]:
        """Return a point with latents above others where they are held, and a normal log density of
        these around it: together with others they may have no mode but where scales are zero.
        """
        if not any(self.above):
            return z, jnp.zeros(())
        hidden = jnp.array(self.above, bool)
        off = jnp.where(hidden, (z - held.place) / held.spread, 0.0)
        return jnp.where(hidden, held.place, z), -0.5 * jnp.sum(off**2)


@dataclass(frozen=True, eq=False)
class Vertical:
    """A vertical model and how it is approximated, as pure functions for all parties.

    Attributes
    ----------
    model : VerticalModel
    server : Kind
    kinds : dict
        By the signature of what a client holds.
    spec : Structured or AutoGuide or None
        The clients' guide, as asked for; ``server_spec`` that of the server's latents.
    rho : float or None
        Standard deviation of the auxiliary variables; None for none.
    auxiliary : AuxiliaryGuide or None
    optim : optax.GradientTransformation
    num_particles : int
    batch_size : int or None
        Rows in a round.
    from_start : bool
        Whether runs begin at a place that is found first, in a frame around it.
    power : bool
        Whether clients evaluate likelihoods of their own.
    rank : int
        How much noise all parties share: 0 for parties that are independent.
    width : int
        Of the basis in which it is found how parties depend on each other.
    """

    model: VerticalModel
    server: ClientType
    kinds: Mapping[Any, ClientType]
    spec: Any
    server_spec: Any
    rho: float | None
    auxiliary: AuxiliaryGuide | None
    optim: optax.GradientTransformation
    num_particles: int = 1
    batch_size: int | None = None
    from_start: bool = False
    power: bool = False
    rank: int = 0
    width: int = 0

    def algorithm(
        self, round_: Round, server_like: SiloData
    ) -> FederatedAlgorithm[ServerState, ClientState]:
        """Return the algorithm of this round; ``server_like`` are shapes of the server's data."""
        return FederatedAlgorithm(
            lambda key: self.init_server(key, server_like),
            self.init_client,
            round_,
            self.shared,
            self.own,
            done=self.done,
            server_like=server_like,
        )

    @property
    def rows(self) -> int:
        """Return how many rows take part in a round."""
        return self.batch_size or self.model.rows

    @property
    def dim(self) -> int:
        """Return how many latents all parties have, auxiliary variables apart."""
        return sum(half.dim for half in (self.model.server, *self.model.clients))

    @property
    def complete(self) -> bool:
        """Return whether that basis holds all directions."""
        return self.width > self.dim

    @property
    def share(self) -> float:
        """Return by how much terms of rows count."""
        return self.model.rows / self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what crosses: one number a particle, row and column of the sum."""
        return (self.num_particles, self.rows, *self.model.shape[1:])

    def kind(self, data: SiloData) -> ClientType:
        """Return the kind of client that holds data of this shape."""
        return self.kinds[signature(data)]

    def guide(self, kind: ClientType, data: SiloData | None = None) -> Guide:
        """Return the guide of a party's latents; its start may look at the party's data."""
        spec = self.server_spec if kind is self.server else self.spec
        of: Any = kind.half if data is None else kind.half.with_data(data)
        return build_resolved(spec, kind.resolved, of)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """Return the server's first state; ``data`` are shapes of what it holds."""
        key_theta, key_guide = jax.random.split(key)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), data)
        given = self.model.with_total(zeros, jnp.zeros(self.model.shape, self.model.dtype))
        theta = self.server.half.init_theta(key_theta, given)
        if self.from_start:
            return self.server_at(key_guide, theta, self.nowhere(self.server))
        eta = self.guide(self.server, given).init_global(key_guide)
        dim = self.server.half.dim
        own = PartyParams(self.loosely(key_guide, dim), eta, theta)
        return self._server_state(key_guide, own, identity((dim,)))

    def server_at(self, key: Array, theta: dict[str, Any], start: Start) -> ServerState:
        """Return the server's state where a run begins."""
        return self._server_state(key, *self._begun(key, self.server, theta, start))

    def _begun(
        self, key: Array, kind: ClientType, theta: dict[str, Any], start: Start
    ) -> tuple[PartyParams, Gaussian]:
        """Return a party's parameters where a run begins, with a standard normal in a frame."""
        guide = self.guide(kind).globals
        eta = guide.init(key, jnp.zeros_like(start.z), 1.0)
        return PartyParams(start.coupling, eta, theta), guide.frame(start.z, start.root)

    def _server_state(self, key: Array, own: PartyParams, frame: Gaussian) -> ServerState:
        zeros = jnp.zeros(self.rank)
        params = ServerParams(own, self.sharing.init(key, zeros) if self.rank else {})
        return ServerState(
            params=params,
            opt_state={part: self.optim.init(value) for part, value in params._asdict().items()},
            course=convergence.begin(params),
            resting=jnp.zeros(()),
            frame=frame,
        )

    def nowhere(self, kind: ClientType) -> Start:
        """Return a start of the right shapes, before there is one."""
        dim = kind.half.dim
        coupling = jnp.zeros((dim, self.rank)) if self.rank else None
        return Start(jnp.zeros(dim), jnp.eye(dim), coupling)

    def loosely(self, key: Array, dim: int) -> Array | None:
        """Return a little of the shared noise: with none at all its gradient would be zero."""
        return LOOSE * jax.random.normal(key, (dim, self.rank)) if self.rank else None

    @property
    def sharing(self) -> GlobalGuide[Array]:
        """Return the guide of the noise that parties share."""
        return shared_guide(self.rank)

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """Return a client's first state."""
        key_theta, key_guide = jax.random.split(key)
        kind = self.kind(data)
        theta = kind.half.init_theta(key_theta, data)
        if self.from_start:
            centre = jnp.zeros(self.model.shape)
            return self.client_at(key_guide, data, theta, self.nowhere(kind), centre)
        eta = self.guide(kind, data).init_global(key_guide)
        dim = kind.half.dim
        own = PartyParams(self.loosely(key_guide, dim), eta, theta)
        return self._client_state(key_guide, kind, own, identity((dim,)), jnp.zeros(()))

    def client_at(
        self, key: Array, data: SiloData, theta: dict[str, Any], start: Start, centre: Array
    ) -> ClientState:
        """Return a client's state where a run begins; ``centre`` is its predictor there."""
        kind = self.kind(data)
        own, frame = self._begun(key, kind, theta, start)
        kept = centre if self.auxiliary is not None and self.auxiliary.centred else jnp.zeros(())
        return self._client_state(key, kind, own, frame, kept)

    def _client_state(
        self, key: Array, kind: ClientType, own: PartyParams, frame: Gaussian, centre: Array
    ) -> ClientState:
        key_aux, key_noise = jax.random.split(key)
        psi = {} if self.auxiliary is None else self.auxiliary.init(key_aux)
        params = ClientParams(psi, own)
        return ClientState(
            params=params,
            opt_state={part: self.optim.init(value) for part, value in params._asdict().items()},
            course=convergence.begin(own),
            noise=self.client_noise(key_noise, kind),
            rows=None if self.batch_size is None else jnp.zeros(self.rows, jnp.int32),
            xi=jnp.zeros((self.num_particles, self.rank)) if self.rank else None,
            slope=jnp.zeros(self.shape) if self.power else None,
            frame=frame,
            centre=centre,
        )

    def tied(self, kind: ClientType, own: PartyParams) -> Array | None:
        """Return what of the shared noise enters a party's guide (dim, rank), or None."""
        V = own.coupling
        if V is None or not self.from_start:
            return V
        return coupling.carried(self.guide(kind).globals, own.guide, V)

    def server_noise(self, key: Array) -> ServerNoise:
        """Return the noise of the server's latents and of what is shared, and the round's rows."""
        key_draw, key_rows = jax.random.split(key)
        eps = self.guide(self.server).globals.noise(key_draw, self.num_particles)
        xi: Array | None = None
        if self.rank:
            xi = self.sharing.noise(jax.random.fold_in(key, 2), self.num_particles)
        if self.batch_size is None:
            return ServerNoise(eps, xi, None)
        rows = jax.random.randint(key_rows, (self.rows,), 0, self.model.rows, jnp.int32)
        return ServerNoise(eps, xi, rows)

    def xi(self, shared: GuideParams, noise: Array | None) -> Array | None:
        """Return the shared noise, (draws, rank), from standard normals."""
        if noise is None:
            return None
        return jax.vmap(self.sharing.draw, (None, 0))(shared, noise)[0]

    def client_noise(self, key: Array, kind: ClientType) -> tuple[Array, Array | None]:
        """Return the noise of a client's latents and auxiliary variables."""
        key_draw, key_z = jax.random.split(key)
        eps = self.guide(kind).globals.noise(key_draw, self.num_particles)
        if self.auxiliary is None:
            return eps, None
        return eps, jax.random.normal(key_z, self.shape)

    def server_draws(self, key: Array, n: int) -> tuple[Array, Array | None]:
        """Return noise for ``n`` draws of the server's latents, and of what is shared."""
        own = self.guide(self.server).globals.noise(key, n)
        return own, self.sharing.noise(jax.random.fold_in(key, 1), n) if self.rank else None

    def client_draws(self, key: Array, state: ClientState, n: int) -> Array:
        """Return noise for ``n`` draws of a client's latents."""
        return jax.random.normal(key, (n, *state.noise[0].shape[1:]))

    def noise_of(self, key: Array, state: ClientState) -> tuple[Array, Array | None]:
        """Return new noise of the shapes of what a client's state holds, which are normals."""
        key_draw, key_z = jax.random.split(key)
        eps, tau = state.noise
        new = jax.random.normal(key_draw, eps.shape)
        return new, None if tau is None else jax.random.normal(key_z, tau.shape)

    def own(self, state: ClientState) -> Private:
        """Return a client's parameters, without guides, for which its data would be needed."""
        return Private(state.params.own.theta, {})

    def some(self, data: SiloData, rows: Array | None) -> SiloData:
        """Return the rows that take part."""
        return data if rows is None else self.model.take(data, rows)

    def draw(
        self, params: ClientParams, xi: Array | None, state: ClientState, data: SiloData
    ) -> ClientDraw:
        """Return what a client draws with its pending noise, and the shared one."""
        kind, held = self.kind(data), self.some(data, state.rows)
        guide = self.guide(kind).globals
        psi, known = params.auxiliary, self.known(state, held)
        eta, V = params.own.guide, self.tied(kind, params.own)
        if self.auxiliary is not None and state.rows is not None:
            psi = self.auxiliary.some(psi, state.rows)

        def one(eps: Array, tau: Array | None, xi: Array | None) -> ClientDraw:
            z, log_q, b = coupling.draw_in(state.frame, guide, eta, V, eps, xi)
            g, own = self.model.predict(kind.half, params.own.theta, z, held)
            if self.auxiliary is None or tau is None:
                return ClientDraw(g, g, own - log_q, b)
            part, log_q_part = self.auxiliary.draw(psi, g, known, tau)
            log_ratio = self.log_noise(part, g) - log_q_part
            return ClientDraw(g, part, own - log_q + self.share * log_ratio, b)

        eps, tau = state.noise
        drawn = jax.vmap(one)(eps, tau, xi)
        return drawn._replace(own=drawn.own.mean())

    def at_fixed(
        self, own: PartyParams, eps: Array, part: Array, state: ClientState, data: SiloData
    ) -> Array:
        """Return a client's own term where its auxiliary variables stay at ``part``."""
        kind, held = self.kind(data), self.some(data, state.rows)
        guide = self.guide(kind).globals

        def one(eps: Array, part: Array) -> Array:
            z, log_q, _ = coupling.draw_in(state.frame, guide, own.guide, None, eps, None)
            g, prior = self.model.predict(kind.half, own.theta, z, held)
            return prior - log_q + self.share * self.log_noise(part, g)

        return jax.vmap(one)(eps, part).mean()

    def log_noise(self, part: Array, g: Array) -> Array:
        """Return the log density of auxiliary variables given the predictor."""
        return dist.Normal(g, self.rho).log_prob(part).sum()

    def known(self, state: ClientState, data: SiloData) -> Known:
        """Return what a client knows of the round's rows, for the auxiliary variables' guide."""
        centre = state.centre
        if state.rows is not None and centre.ndim:
            centre = centre[state.rows]
        return Known(centre, self.response(data))

    def response(self, data: SiloData) -> Array:
        """Return what clients know of the response (rows, k)."""
        shared = data.kwargs.get("shared") or {}
        known = [shared[n] for n in self.model.response if n in shared]
        columns = [y.reshape(len(y), -1) for y in known if jnp.shape(y)[:1] == (self.rows,)]
        return jnp.concatenate([jnp.zeros((self.rows, 0)), *columns], 1)

    def ascend(self, state: State, part: str, gradient: PartyParams | GuideParams) -> State:
        """Take one step of a party up the bound, on a part of its parameters."""
        before = getattr(state.params, part)
        after, opt_state = ascend(self.optim, gradient, state.opt_state[part], before)
        return state._replace(
            params=state.params._replace(**{part: after}),
            opt_state={**state.opt_state, part: opt_state},
        )

    def done(self, state: ServerState) -> Array:
        """Return whether the bound and all parties' own guides have come to rest; those of
        auxiliary variables apart, of which the bound alone tells.
        """
        return convergence.settled(state.course) & (state.resting == len(self.model.clients))

    def shared(self, state: ServerState) -> Shared:
        """Return the server's parameters and guide."""
        own, shared = state.params
        tied = {"coupling": self.tied(self.server, own), "shared": shared} if self.rank else {}
        return Shared(own.theta, {"latents": own.guide, **tied}, state.frame)

    def private(self, state: ClientState, data: SiloData) -> Party:
        """Return a client's parameters and guides."""
        psi, own = state.params
        tied = {"coupling": self.tied(self.kind(data), own)} if self.rank else {}
        guide = {"latents": own.guide, **({"auxiliary": psi} if psi else {}), **tied}
        return Party(own.theta, guide, state.frame)

    def in_z(self, party: Shared | Party, data: SiloData | None) -> dict[str, Any]:
        """Return a party's guides for a user to look at; ``data`` is None at the server."""
        kind = self.server if data is None else self.kind(data)
        guide, latents = self.guide(kind).globals, party.guide["latents"]
        return {**party.guide, "latents": guide.in_z(party.frame, latents)}
