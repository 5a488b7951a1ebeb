"""What a vertical fit returns."""

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
from numpyro_fed.algorithms.vertical.base import ClientType, Party
from numpyro_fed.errors import positive_int
from numpyro_fed.guides import coupling
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.fingerprint import vertical_fingerprint
from numpyro_fed.model.observed import Supports
from numpyro_fed.model.sites import Site
from numpyro_fed.model.vertical import VerticalModel
from numpyro_fed.results.recognise import Provenance
from numpyro_fed.results.run import BuiltRun, CompiledMethod, FederatedRun, Silos
from numpyro_fed.runtime.crossing import Crossings


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalBuilt(BuiltRun):
    """All that a method makes of a text whose clients hold columns.

    Attributes
    ----------
    vertical : Vertical or Soul
        The model and how it is approximated.
    sampling : n -> Round
        All parties draw so often, and keep what they draw.
    search : FederatedAlgorithm or None
    static : tuple
        Plain values among the arguments of the model.
    begins : tuple of Round
        What leads from the states of the search to those of a run.
    """

    vertical: Any
    sampling: Callable[[int], Round]
    search: FederatedAlgorithm[Any, Any] | None = None
    static: tuple[Any, ...] = ()
    begins: tuple[Round, ...] = ()

    @property
    def model(self) -> VerticalModel:
        """Return the text, split over server and clients."""
        return self.vertical.model

    @property
    def first(self) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose states come first."""
        return self.algorithm if self.search is None else self.search

    @property
    def searching(self) -> tuple[Round, ...]:
        """Return the rounds that find where to start."""
        if self.search is None:
            return ()
        searching = (self.search.round,) if len(self.begins) > 1 else ()
        return (*searching, *self.begins)


class VerticalStart(NamedTuple):
    """The mode at which a run began: the log density of all parties' latents there, in
    unconstrained space, and the exchanges that it took to get there.
    """

    log_density: float
    num_exchanges: int


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalFit(CompiledMethod[VerticalBuilt]):
    """A vertical method that was built for a model's arguments of certain shapes.

    ``said`` is what a saved state must agree with, ``source`` a hash of the source of the text.
    """

    said: dict[str, Any]
    server_data: SiloData
    supports: Supports
    source: str = ""

    @property
    def vertical(self) -> Any:
        """Return the model and how it is approximated."""
        return self.built.vertical

    def messages(self, held: Silos) -> Crossings:
        """Return all that crosses between the server and the first client."""
        return self.built.messages(held.data[0], self.server_data, silo="client")

    def description(self) -> dict[str, Any]:
        """Return what a saved state must agree with."""
        return self.said

    def made(self, held: Silos) -> Provenance:
        """Return by what model and data are recognised in a file."""

        def text() -> str:
            def found() -> str:
                return vertical_fingerprint(self.built.model, self.server_data, held.data)

            return self.cached("text", found)

        clients = {f"client {j}": data for j, data in enumerate(held.data)}
        return Provenance(text, self.source, {**clients, "the server": self.server_data})


@dataclass(frozen=True, eq=False)
class VerticalRun(FederatedRun[VerticalFit]):
    """The result of a method for vertical models; each says what its numbers are."""

    start: VerticalStart | None = field(default=None, kw_only=True)

    ELSEWHERE = (
        "clients hold their own latents and parameters, and the server knows nothing of them. Ask "
        "there, or run all parties in one process."
    )
    PARTY = "client"

    @property
    def num_clients(self) -> int:
        """Return how many clients took part."""
        return len(self._fit.vertical.model.clients)

    @property
    def num_parties(self) -> int:
        """Return the number of clients."""
        return self.num_clients

    @property
    def _data(self) -> tuple[SiloData, ...]:
        """Return what clients of this process hold."""
        return () if self._silos is None else self._silos.data

    @property
    def sites(self) -> tuple[Site, ...]:
        """All latents under the names that they have in the model, and their places among the
        coordinates of all parties: the server's first, then each client's.
        """
        model, found, start = self._fit.vertical.model, list[Site](), 0
        for j, half in enumerate([model.server, *(model.clients if self._silos else ())]):
            for s in half.named("latent"):
                (name,) = model.scoped(j - 1, {s.name: None}) if j else (s.name,)
                found.append(s._replace(name=name, start=start + s.start, stop=start + s.stop))
            start += half.dim
        return tuple(found)

    @property
    def params(self) -> dict[str, Any]:
        """The server's parameters on their own supports; its guides as ``"guide"``."""
        shared, v = self.shared, self._fit.vertical
        guide = v.in_z(shared, None)
        return {**v.model.server.constrain_theta(shared.theta), "guide": guide}

    def client_params(self, client: int) -> dict[str, Any]:
        """Client ``j``'s parameters on their own supports, and its guides as ``"guide"``."""
        private, v = self.private(client), self._fit.vertical
        guide = v.in_z(private, self._held(client).data[client])
        return {**v.model.clients[client].constrain_theta(private.theta), "guide": guide}

    def private(self, client: int) -> Party:
        """Client ``j``'s parameters, unconstrained, and guides."""
        data = self._held(client).data[client]
        return self._fit.vertical.private(self._silo_state(client), data)

    @abstractmethod
    def unconstrained(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...]]:
        """Unconstrained draws of the server's latents (n, dim) and of each client's."""

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
        """Draw from the fitted posterior by one more exchange among the parties, of which each
        client that is elsewhere keeps its own latents (:meth:`SiloNode.draws`).

        Draw ``s`` here and draw ``s`` at any client belong together. Down goes the noise that all
        parties share; nothing comes back.

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
            Where a draw is NaN or infinite.
        """
        fit = self._fit
        positive_int("n", n)
        words = "a draw of the posterior is NaN or infinite: see the losses of the run."
        sampling = fit.compiled_round(fit.built.sampling(n))
        z, sampled, _ = self._asked(sampling, key, words, fit.server_data)
        sites = self.sites_at(z, ())
        for j in range(len(self._data)):
            values = self._held(j).at(j, [stack.values for stack in sampled])
            sites |= fit.vertical.model.scoped(j, values)
        return sites

    def sites_at(self, z: Array, own: tuple[Array, ...]) -> dict[str, Array]:
        """Latents on their own supports, at unconstrained draws of all parties."""
        model, theta = self._fit.vertical.model, self.shared.theta
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
        """Unconstrained draws of the server's latents (n, dim) and of each client's."""
        return self.draw(key, n)[:2]

    def draw(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...], Array]:
        """Unconstrained draws of the server's latents (n, dim) and of each client's, and their log
        density (n,) under the guides.
        """
        v, server = self._fit.vertical, self.shared
        parties: list[tuple[ClientType, Shared | Party]] = [(v.server, server)]
        for j, data in enumerate(self._data):
            parties.append((v.kind(data), self.private(j)))
        xi: Array | None = None
        if v.rank:
            noise = v.sharing.noise(jax.random.fold_in(key, len(parties)), n)
            xi = v.xi(server.guide["shared"], noise)
        found = []
        for j, (kind, party) in enumerate(parties):
            guide, mine = v.guide(kind).globals, jax.random.fold_in(key, j)
            eta, V = party.guide["latents"], party.guide.get("coupling")
            draw = partial(coupling.draw_in, party.frame, guide, eta, V)
            found.append(jax.vmap(draw)(guide.noise(mine, n), xi))
        z, log_qs, bs = zip(*found, strict=True)
        log_q = sum(log_qs[1:], log_qs[0])
        if v.rank:
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
