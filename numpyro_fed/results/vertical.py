"""The fit of a model whose clients hold columns, and its result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round, Shared
from numpyro_fed.algorithms.vertical.base import PartyState, PartyType
from numpyro_fed.algorithms.vertical.search import VerticalSearch
from numpyro_fed.errors import positive_int
from numpyro_fed.guides import coupling
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.fingerprint import vertical_fingerprint
from numpyro_fed.model.observed import Supports
from numpyro_fed.model.sites import Site
from numpyro_fed.model.vertical import VerticalModel
from numpyro_fed.results.base import BuiltRun, CompiledMethod, FederatedRun, Silos
from numpyro_fed.results.recognise import Provenance
from numpyro_fed.results.vertical_after import ColumnsAfterFit
from numpyro_fed.runtime.crossing import Crossings
from numpyro_fed.runtime.stack import Runtime


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalBuilt(BuiltRun):
    """All that a method builds from a model whose clients hold columns.

    Attributes
    ----------
    vertical : Vertical or Soul
        The model and the guides that approximate it.
    sampling : n -> Round
        The round in which all parties draw ``n`` times and keep their own draws.
    search : VerticalSearch or None
    static : tuple
        Plain values among the arguments of the model.
    """

    vertical: Any
    sampling: Callable[[int], Round]
    search: VerticalSearch | None = None
    static: tuple[Any, ...] = ()

    @property
    def model(self) -> VerticalModel:
        """Return the model, split over server and clients."""
        return self.vertical.model

    @property
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states a run begins with."""
        return self.algorithm if self.search is None else self.search.algorithm

    @property
    def search_rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the search for a start."""
        return () if self.search is None else (self.search.algorithm.round,)


class VerticalStart(NamedTuple):
    """The mode at which a run began.

    Attributes
    ----------
    log_density : float
        The log density of all parties' latents there, in unconstrained space.
    num_exchanges : int
        The exchanges of the search.
    """

    log_density: float
    num_exchanges: int


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalFit(CompiledMethod[VerticalBuilt]):
    """A vertical method that was built for a model's arguments of certain shapes.

    ``saved_description`` is what a saved state must agree with, ``source`` a hash of the model's
    source. For clients in other processes ``first_client`` has zeros of the shapes of the first
    one, and ``reach`` makes runtimes.
    """

    saved_description: dict[str, Any]
    server_data: SiloData
    supports: Supports
    source: str = ""
    first_client: SiloData | None = None
    reach: Callable[..., Runtime] | None = None

    @property
    def vertical(self) -> Any:
        """Return the model and the guides that approximate it."""
        return self.built.vertical

    def messages(self, hosted: Silos) -> Crossings:
        """Return all arrays that cross between the server and the first client."""
        data = hosted.data[0] if self.first_client is None else self.first_client
        return self.built.messages(data, self.server_data, silo="client")

    def description(self) -> dict[str, Any]:
        """Return the settings and sites that a saved state must agree with."""
        return self.saved_description

    def provenance(self, hosted: Silos) -> Provenance:
        """Return the fingerprints by which a file recognises model and data."""

        def text() -> str:
            def make() -> str:
                return vertical_fingerprint(self.built.model, self.server_data, hosted.data)

            # Half a second of tracing, needed once for a fit whose arguments keep their shapes.
            return self.cached("text", make)

        clients = {f"client {j}": data for j, data in enumerate(hosted.data)}
        return Provenance(text, self.source, {**clients, "the server": self.server_data})


@dataclass(frozen=True, eq=False)
class VerticalRun(ColumnsAfterFit, FederatedRun[VerticalFit]):
    """The result of a method for vertical models."""

    start: VerticalStart | None = field(default=None, kw_only=True)

    ELSEWHERE = (
        "clients hold their own latents and parameters, and the server knows nothing of them. Ask "
        "there, or run all parties in one process."
    )
    PARTY = "client"

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self._fit.vertical.model.clients)

    @property
    def num_parties(self) -> int:
        """Return the number of clients."""
        return self.num_clients

    @property
    def _data(self) -> tuple[SiloData, ...]:
        """Return the data of clients in this process; empty if they are in other processes."""
        return self._silos.data

    @property
    def sites(self) -> tuple[Site, ...]:
        """All latents by their names in the model, with their slices of the coordinates.

        The coordinates are those of all parties: the server's first, then each client's.
        """
        model, sites, start = self._fit.vertical.model, list[Site](), 0
        clients = () if self._silos.elsewhere else model.clients
        for j, party_model in enumerate([model.server, *clients]):
            for s in party_model.named("latent"):
                (name,) = model.scoped(j - 1, {s.name: None}) if j else (s.name,)
                sites.append(s._replace(name=name, start=start + s.start, stop=start + s.stop))
            start += party_model.dim
        return tuple(sites)

    @property
    def params(self) -> dict[str, Any]:
        """Return the server's parameters on their supports; its guides as ``"guide"``."""
        shared, v = self.shared, self._fit.vertical
        guide = v.in_z(shared, None)
        return {**v.model.server.constrain_theta(shared.theta), "guide": guide}

    def client_params(self, client: int) -> dict[str, Any]:
        """Return a client's parameters on their supports, and its guides as ``"guide"``."""
        private, v = self.private(client), self._fit.vertical
        guide = v.in_z(private, self._hosted(client).data[client])
        return {**v.model.clients[client].constrain_theta(private.theta), "guide": guide}

    def private(self, client: int) -> PartyState:
        """Return a client's parameters, unconstrained, and its guides."""
        data = self._hosted(client).data[client]
        return self._fit.vertical.private(self._silo_state(client), data)

    @abstractmethod
    def unconstrained(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...]]:
        """Return unconstrained draws (n, dim) of the server's latents and of each client's."""

    def sample_posterior(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the fitted posterior.

        Parameters
        ----------
        key : jax.Array
        n : int
            Number of draws, the leading axis of every site.

        Returns
        -------
        dict of str to array
            The latents of the server and of all clients on their own supports, under the names
            that they have in the model; the server's alone where clients are elsewhere. Auxiliary
            variables are left out: to predict, run the model itself at these draws
            (``numpyro.infer.Predictive``).
        """
        return self.sites_at(*self.unconstrained(key, n))

    def sample_together(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the fitted posterior at all parties, by one more exchange.

        Each client in another process keeps the draws of its own latents (:meth:`Silo.draws`).
        Draw ``s`` of the server and draw ``s`` of any client belong together. The server sends the
        noise that all parties share; nothing comes back.

        Parameters
        ----------
        key : jax.Array
        n : int
            Number of draws.

        Returns
        -------
        dict of str to array
            The server's latents, and those of clients that are in this process, as by
            :meth:`sample_posterior`.

        Raises
        ------
        NonFiniteError
            If a draw is NaN or infinite.
        """
        fit = self._fit
        positive_int("n", n)
        words = "a draw of the posterior is NaN or infinite: see the losses of the run."
        sampling = fit.compiled_round(fit.built.sampling(n))
        z, sampled, _ = self._run_round_once(sampling, key, words, fit.server_data)
        sites = self.sites_at(z, ())
        for j in range(len(self._data)):
            values = self._hosted(j).at(j, [stack.values for stack in sampled])
            sites |= fit.vertical.model.scoped(j, values)
        return sites

    def sites_at(self, z: Array, own: tuple[Array, ...]) -> dict[str, Array]:
        """Return latents on their supports at unconstrained draws ``z``, ``own`` (n, dim)."""
        model, theta = self._fit.vertical.model, self.shared.theta
        # Latents at given draws do not read the sum of the predictors: zeros stand in for it.
        total = jnp.zeros(model.shape, model.dtype)
        server = model.with_total(self._fit.server_data, total)
        sites = dict(_values(model.server.values, theta, z, server))
        for j, data in enumerate(self._data if own else ()):
            values = _values(model.clients[j].values, self.private(j).theta, own[j], data)
            sites |= model.scoped(j, values)
        return sites


@dataclass(frozen=True, eq=False)
class VerticalResult(VerticalRun):
    """A vertical fit by variational inference.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the bound, one number for each round of this run.
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    ended : {"rounds", "converged", "callback", "failure", "interrupted"}
        Why there are no more rounds.
    start : VerticalStart or None
        The mode at which the run began, if it did.
    """

    def unconstrained(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...]]:
        """Return unconstrained draws (n, dim) of the server's latents and of each client's."""
        return self.draw(key, n)[:2]

    def draw(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...], Array]:
        """Return unconstrained draws (n, dim) of each party's latents, and their log density (n,).

        The density is that under the guides.
        """
        v, server = self._fit.vertical, self.shared
        parties: list[tuple[PartyType, Shared | PartyState]] = [(v.server, server)]
        for j, data in enumerate(self._data):
            parties.append((v.kind(data), self.private(j)))
        xi: Array | None = None
        if v.rank:
            noise = v.sharing.noise(jax.random.fold_in(key, len(parties)), n)
            xi = v.xi(server.guide["shared"], noise)
        drawn = []
        for j, (kind, party) in enumerate(parties):
            guide, key_party = v.guide(kind).globals, jax.random.fold_in(key, j)
            eta, V = party.guide["latents"], party.guide.get("coupling")
            draw = partial(coupling.draw_in, party.frame, guide, eta, V)
            drawn.append(jax.vmap(draw)(guide.noise(key_party, n), xi))
        z, log_qs, bs = zip(*drawn, strict=True)
        log_q = sum(log_qs[1:], log_qs[0])
        if v.rank:
            # Shared noise makes parties dependent: their densities
            # multiply up to this ratio (numpyro_fed.guides.coupling).
            A = sum(p.guide["coupling"].T @ p.guide["coupling"] for _, p in parties)
            ratio = partial(coupling.log_ratio, server.guide["shared"], A=A)
            log_q += jax.vmap(ratio)(sum(bs[1:], bs[0]))
        return z[0], z[1:], log_q


@partial(jax.jit, static_argnums=0)
def _values(
    values: Callable[[Theta, Array, SiloData], dict[str, Array]],
    theta: Theta,
    z: Array,
    data: SiloData,
) -> dict[str, Array]:
    return jax.lax.map(lambda z: values(theta, z, data), z, batch_size=64)
