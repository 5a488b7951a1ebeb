"""What the vertical algorithms share: the parties' states, and a client's draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax import Array

from numpyro_fed.algorithms import settling
from numpyro_fed.algorithms.base import Private, Shared, ascend
from numpyro_fed.algorithms.settling import Course
from numpyro_fed.guides.auxiliary import AuxiliaryGuide, Known
from numpyro_fed.guides.structured import Resolved, build_resolved
from numpyro_fed.model.data import SiloData, signature
from numpyro_fed.model.vertical import Half, VerticalModel


class ServerState(NamedTuple):
    """The server's parameters, and what it keeps from one exchange of a round to the next.

    ``params`` is ``{"theta", "guide"}``, the guide's steps from a ``reference`` where there is one;
    ``sent`` is what clients wait for: the gradient with respect to the sum, or the sum itself,
    (particles, rows, ...); ``own`` is the clients' own terms of the bound.
    """

    params: dict[str, Any]
    opt_state: Any
    course: Course
    noise: Any
    sent: Array
    own: Array
    reference: Any = ()


class ClientState(NamedTuple):
    """A client's parameters, and what it keeps from one exchange of a round to the next.

    ``params`` is ``{"own": {"private", "guide"}, "auxiliary"}``, the guide's steps from a
    ``reference`` where there is one; ``centre`` is the predictor there, around which auxiliary
    variables are measured; ``noise`` and ``rows`` are of the draw that is on its way, ``slope`` is
    the gradient of the client's likelihood there.
    """

    params: dict[str, Any]
    opt_state: dict[str, Any]
    noise: Any
    rows: Any
    slope: Any = ()
    reference: Any = ()
    centre: Any = 0.0


class Drawn(NamedTuple):
    """Of one client, a draw each: its predictor and what it adds to the sum (particles, rows, ...),
    and its own term of the bound, their mean.
    """

    g: Array
    z: Array
    own: Array


class Kind(NamedTuple):
    """Clients of one shape: their half of the text, and how their guide was resolved."""

    half: Half
    resolved: Resolved


@dataclass(frozen=True)
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
    from_mode : bool
        Whether runs begin at the mode, and guides' parameters are steps from there.
    power : bool
        Whether clients evaluate likelihoods of their own.
    """

    model: VerticalModel
    server: Kind
    kinds: Mapping[Any, Kind]
    spec: Any
    server_spec: Any
    rho: float | None
    auxiliary: AuxiliaryGuide | None
    optim: optax.GradientTransformation
    num_particles: int = 1
    batch_size: int | None = None
    from_mode: bool = False
    power: bool = False

    @property
    def rows(self) -> int:
        """In a round."""
        return self.batch_size or self.model.rows

    @property
    def share(self) -> float:
        """By how much terms of rows count."""
        return self.model.rows / self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what crosses: a number for each particle, row and column of the sum."""
        return (self.num_particles, self.rows, *self.model.shape[1:])

    def kind(self, data: SiloData) -> Kind:
        """What client holds data of this shape."""
        return self.kinds[signature(data)]

    def guide(self, kind: Kind, data: SiloData | None = None) -> Any:
        """The guide of a party's latents; its start may look at the party's data."""
        spec = self.server_spec if kind is self.server else self.spec
        of: Any = kind.half if data is None else kind.half.given(data)
        return build_resolved(spec, kind.resolved, of)

    def init_server(self, key: Array, data: SiloData) -> ServerState:
        """The server's first state; ``data`` are shapes of what it holds."""
        key_theta, key_guide = jax.random.split(key)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), data)
        given = self.model.with_total(zeros, jnp.zeros(self.model.shape, self.model.dtype))
        theta = self.server.half.init_theta(key_theta, given)
        if self.from_mode:
            dim = self.server.half.dim
            return self.server_at(key_guide, theta, jnp.zeros(dim), jnp.eye(dim))
        eta = self.guide(self.server, given).init_global(key_guide)
        return self._server_state(key_guide, {"theta": theta, "guide": eta}, ())

    def server_at(self, key: Array, theta: dict[str, Any], z: Array, root: Array) -> ServerState:
        """The server's state around a point, with a root of a covariance."""
        eta = self.guide(self.server).globals.around(key, z, root)
        step = jax.tree.map(jnp.zeros_like, eta)
        return self._server_state(key, {"theta": theta, "guide": step}, eta)

    def _server_state(self, key: Array, params: dict[str, Any], reference: Any) -> ServerState:
        return ServerState(
            params=params,
            opt_state=self.optim.init(params),
            course=settling.begin(params),
            noise=self.server_noise(key),
            sent=jnp.zeros(self.shape),
            own=jnp.zeros(()),
            reference=reference,
        )

    def init_client(self, key: Array, data: SiloData) -> ClientState:
        """A client's first state."""
        key_theta, key_guide = jax.random.split(key)
        kind = self.kind(data)
        theta = kind.half.init_theta(key_theta, data)
        if self.from_mode:
            dim = kind.half.dim
            centre = jnp.zeros(self.model.shape)
            return self.client_at(key_guide, data, theta, jnp.zeros(dim), jnp.eye(dim), centre)
        eta = self.guide(kind, data).init_global(key_guide)
        return self._client_state(key_guide, kind, {"private": theta, "guide": eta}, (), 0.0)

    def client_at(
        self,
        key: Array,
        data: SiloData,
        theta: dict[str, Any],
        z: Array,
        root: Array,
        centre: Array,
    ) -> ClientState:
        """A client's state around a point, with a root of a covariance and the predictor there."""
        kind = self.kind(data)
        eta = self.guide(kind).globals.around(key, z, root)
        step = jax.tree.map(jnp.zeros_like, eta)
        kept = centre if self.auxiliary is not None and self.auxiliary.centred else 0.0
        return self._client_state(key, kind, {"private": theta, "guide": step}, eta, kept)

    def _client_state(
        self, key: Array, kind: Kind, own: dict[str, Any], reference: Any, centre: Any
    ) -> ClientState:
        key_aux, key_noise = jax.random.split(key)
        psi = {} if self.auxiliary is None else self.auxiliary.init(key_aux)
        params = {"own": own, "auxiliary": psi}
        return ClientState(
            params=params,
            opt_state={part: self.optim.init(value) for part, value in params.items()},
            noise=self.client_noise(key_noise, kind),
            rows=() if self.batch_size is None else jnp.zeros(self.rows, jnp.int32),
            slope=jnp.zeros(self.shape) if self.power else (),
            reference=reference,
            centre=jnp.asarray(centre),
        )

    def placed(self, kind: Kind, step: Any, reference: Any) -> Any:
        """A guide's parameters, from steps where there is a reference."""
        return self.guide(kind).globals.moved(reference, step) if self.from_mode else step

    def server_noise(self, key: Array) -> Any:
        """Of the draws of the server's latents, and which rows take part."""
        key_draw, key_rows = jax.random.split(key)
        eps = self.guide(self.server).globals.noise(key_draw, self.num_particles)
        if self.batch_size is None:
            return eps, ()
        return eps, jax.random.randint(key_rows, (self.rows,), 0, self.model.rows, jnp.int32)

    def client_noise(self, key: Array, kind: Kind) -> Any:
        """Of the draws of a client's latents and auxiliary variables."""
        key_draw, key_z = jax.random.split(key)
        eps = self.guide(kind).globals.noise(key_draw, self.num_particles)
        if self.auxiliary is None:
            return eps, ()
        return eps, jax.random.normal(key_z, self.shape)

    def noise_of(self, key: Array, state: ClientState) -> Any:
        """New noise of the same kind as what a client's state holds."""
        return self.client_noise(key, self.kind_of(state))

    def kind_of(self, state: ClientState) -> Kind:
        """What client draws with noise of this shape."""

        def shapes(kind: Kind) -> Any:
            return jax.eval_shape(lambda: self.client_noise(jax.random.key(0), kind))

        wanted = jax.tree.map(jnp.shape, state.noise)
        alike = (k for k in self.kinds.values() if jax.tree.map(jnp.shape, shapes(k)) == wanted)
        return next(alike)

    def some(self, data: SiloData, rows: Any) -> SiloData:
        """The rows that take part."""
        return data if self.batch_size is None else self.model.take(data, rows)

    def draw(self, params: dict[str, Any], state: ClientState, data: SiloData) -> Drawn:
        """What a client draws with its pending noise."""
        kind, held = self.kind(data), self.some(data, state.rows)
        guide = self.guide(kind).globals
        psi, known = params["auxiliary"], self.known(state, held)
        eta = self.placed(kind, params["own"]["guide"], state.reference)
        if self.auxiliary is not None and self.batch_size is not None:
            psi = self.auxiliary.some(psi, state.rows)

        def one(eps: Any, tau: Any) -> Drawn:
            theta, log_q = guide.draw(eta, eps)
            g, own = self.model.predict(kind.half, params["own"]["private"], theta, held)
            if self.auxiliary is None:
                return Drawn(g, g, own - log_q)
            z, log_q_z = self.auxiliary.draw(psi, g, known, tau)
            return Drawn(g, z, own - log_q + self.share * (self.log_noise(z, g) - log_q_z))

        g, z, own = jax.vmap(one)(*state.noise)
        return Drawn(g, z, own.mean())

    def at_fixed(
        self, own: dict[str, Any], eps: Any, z: Array, state: ClientState, data: SiloData
    ) -> Array:
        """A client's own term where its auxiliary variables stay where they are."""
        kind, held = self.kind(data), self.some(data, state.rows)
        guide = self.guide(kind).globals
        eta = self.placed(kind, own["guide"], state.reference)

        def one(eps: Any, z: Array) -> Array:
            theta, log_q = guide.draw(eta, eps)
            g, prior = self.model.predict(kind.half, own["private"], theta, held)
            return prior - log_q + self.share * self.log_noise(z, g)

        return jax.vmap(one)(eps, z).mean()

    def log_noise(self, z: Array, g: Array) -> Array:
        """Log density of auxiliary variables given the predictor."""
        return dist.Normal(g, self.rho).log_prob(z).sum()

    def known(self, state: ClientState, data: SiloData) -> Known:
        """What a client knows of the rows that take part, for the auxiliary variables' guide."""
        centre = state.centre
        if self.batch_size is not None and centre.ndim:
            centre = centre[state.rows]
        return Known(centre, self.response(data))

    def response(self, data: SiloData) -> Array:
        """What clients know of the response (rows, k)."""
        shared = data.kwargs.get("shared") or {}
        known = [shared[n] for n in self.model.response if n in shared]
        columns = [y.reshape(len(y), -1) for y in known if jnp.shape(y)[:1] == (self.rows,)]
        return jnp.concatenate([jnp.zeros((self.rows, 0)), *columns], 1)

    def ascend(self, state: ClientState, part: str, gradient: Any) -> ClientState:
        """One step of a client up its bound, on a part of its parameters."""
        after, opt_state = ascend(self.optim, gradient, state.opt_state[part], state.params[part])
        return state._replace(
            params={**state.params, part: after}, opt_state={**state.opt_state, part: opt_state}
        )

    def shared(self, state: ServerState) -> Shared:
        """The server's parameters and guide."""
        eta = self.placed(self.server, state.params["guide"], state.reference)
        return Shared(state.params["theta"], eta)

    def private(self, state: ClientState) -> Private:
        """A client's."""
        own, psi = state.params["own"], state.params["auxiliary"]
        eta = self.placed(self.kind_of(state), own["guide"], state.reference)
        return Private(own["private"], {"latents": eta, **({"auxiliary": psi} if psi else {})})
