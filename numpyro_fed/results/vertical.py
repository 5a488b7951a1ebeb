"""What a vertical fit returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round, Shared
from numpyro_fed.algorithms.vertical.base import Kind, Party
from numpyro_fed.errors import DataError, NonFiniteError, positive_int
from numpyro_fed.guides import coupling
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.fingerprint import vertical_fingerprint
from numpyro_fed.model.observed import Supports
from numpyro_fed.model.sites import Site
from numpyro_fed.model.vertical import VerticalModel
from numpyro_fed.results.arviz import to_arviz
from numpyro_fed.results.base import Silos, bound_settled, check_state
from numpyro_fed.results.recognise import Made
from numpyro_fed.results.saving import SavedRun, Told, save
from numpyro_fed.runtime.stack import Runtime, State


class VerticalBuilt(NamedTuple):
    """What a method makes of a text and a plan: pure functions, and nobody's data."""

    vertical: Any  # the model and how it is approximated
    algorithm: FederatedAlgorithm
    sampling: Callable[[int], Round]  # all parties draw so often, and keep what they draw
    search: FederatedAlgorithm | None = None
    static: tuple = ()  # plain values among the arguments of the model
    begins: tuple[Round, ...] = ()  # what leads from the states of the search to those of a run

    @property
    def model(self) -> VerticalModel:
        """The split text."""
        return self.vertical.model

    @property
    def first(self) -> FederatedAlgorithm:
        """The algorithm whose states come first."""
        return self.algorithm if self.search is None else self.search

    @property
    def opening(self) -> tuple[Round, ...]:
        """The rounds before the algorithm's own first one."""
        if self.search is None:
            return ()
        searching = (self.search.round,) if len(self.begins) > 1 else ()
        return (*searching, *self.begins)

    def sender(self, round_: Round) -> FederatedAlgorithm:
        """Return the algorithm from whose states a round starts."""
        opening = round_.name in {x.name for x in self.opening}
        return self.first if opening else self.algorithm


class VerticalStart(NamedTuple):
    """Where a run began: the log density of all parties' latents there, in unconstrained space, and
    the exchanges that it took to get there.
    """

    log_density: float
    num_exchanges: int


class VerticalFit(NamedTuple):
    """What was built for arguments of these shapes, ready to run."""

    built: VerticalBuilt
    runtime: Runtime
    description: dict[str, Any]
    compiled: dict[str, Any]
    server_data: SiloData
    supports: Supports
    source: str = ""  # a hash of that of the text

    @property
    def vertical(self) -> Any:
        """The model and how it is approximated."""
        return self.built.vertical

    @property
    def algorithm(self) -> FederatedAlgorithm:
        """The algorithm."""
        return self.built.algorithm

    def made(self, held: Silos) -> Made:
        """By what model and data are recognised in a file."""

        def text() -> str:
            if "text" not in self.compiled:
                found = vertical_fingerprint(self.built.model, self.server_data, held.data)
                self.compiled["text"] = found
            return self.compiled["text"]

        clients = {f"client {j}": data for j, data in enumerate(held.data)}
        return Made(text, self.source, {**clients, "the server": self.server_data})

    def check_state(self, state: Any, held: Silos) -> State:
        """``state`` itself, if it is one of this fit."""
        key = jax.random.key(0)
        return check_state(state, jax.eval_shape(self.runtime.init, key, held.batches))


@dataclass(frozen=True, eq=False)
class VerticalRun(ABC):
    """What the methods for vertical models return; each says what its numbers are."""

    losses: np.ndarray = field(repr=False)
    state: State = field(repr=False)
    _fit: VerticalFit = field(repr=False)
    _held: Silos | None = field(default=None, repr=False)  # of a run in one process
    ended: str = field(default="rounds", kw_only=True)
    start: VerticalStart | None = field(default=None, kw_only=True)

    @property
    def num_clients(self) -> int:
        """How many clients took part."""
        return len(self._fit.vertical.model.clients)

    def _clients(self) -> Silos:
        """What clients hold, if it is in this process."""
        if self._held is None:
            raise DataError(
                "clients hold their own latents and parameters, and the server knows nothing of "
                "them. Ask there, or run all parties in one process."
            )
        return self._held

    @property
    def settled(self) -> bool:
        """Whether the bound had stopped rising by the end of this run; see
        :attr:`Result.settled`.
        """
        return bound_settled(self.losses)

    @property
    def sites(self) -> tuple[Site, ...]:
        """All latents under the names that they have in the model, and their places among the
        coordinates of all parties: the server's first, then each client's.
        """
        model, found, start = self._fit.vertical.model, list[Site](), 0
        for j, half in enumerate([model.server, *(model.clients if self._held else ())]):
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

    @property
    def shared(self) -> Shared:
        """The server's parameters, unconstrained, and guide."""
        return self._fit.algorithm.shared(self.state.server)

    def client_params(self, client: int) -> dict[str, Any]:
        """Client ``j``'s parameters on their own supports, and its guides as ``"guide"``."""
        private, v = self.private(client), self._fit.vertical
        guide = v.in_z(private, self._clients().data[client])
        return {**v.model.clients[client].constrain_theta(private.theta), "guide": guide}

    def private(self, client: int) -> Party:
        """Client ``j``'s parameters, unconstrained, and guides."""
        held = self._clients()
        b, i = held.place(client)
        state = jax.tree.map(lambda a: a[i], self.state.silos[b])
        return self._fit.vertical.private(state, held.data[client])

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
        fit, batches = self._fit, () if self._held is None else self._held.batches
        positive_int("n", n)
        together = fit.built.sampling(n)
        if together.name not in fit.compiled:
            fit.compiled[together.name] = fit.runtime.single(together)
        state = self.state
        z, sampled, info, good = fit.compiled[together.name](
            key, state.server, state.silos, batches, fit.server_data
        )
        if not bool(info.ok):
            raise NonFiniteError(
                "a draw of the posterior is NaN or infinite: see the losses of the run.",
                result=self,
                round=int(state.round),
                silos=tuple(np.flatnonzero(~np.asarray(good)).tolist()),
            )
        sites = self.sites_at(z, ())
        for j in range(self.num_clients if self._held else 0):
            b, i = self._clients().place(j)
            values = jax.tree.map(lambda a, i=i: a[i], sampled[b].values)
            sites |= fit.vertical.model.scoped(j, values)
        return sites

    def sites_at(self, z: Array, own: tuple[Array, ...]) -> dict[str, Array]:
        """Latents on their own supports, at unconstrained draws of all parties."""
        model, theta = self._fit.vertical.model, self.shared.theta
        total = jnp.zeros(model.shape, model.dtype)
        server = model.with_total(self._fit.server_data, total)
        sites = dict(_values(model.server.values, theta, z, server))
        for j, data in enumerate(self._held.data if self._held and own else ()):
            values = _values(model.clients[j].values, self.private(j).theta, own[j], data)
            sites |= model.scoped(j, values)
        return sites

    def to_arviz(self, key: Array | None = None, num_samples: int = 1_000) -> Any:
        """Posterior draws for ArviZ: a ``DataTree``, or ``InferenceData`` before ArviZ 1.

        Needs the extra ``examples``.
        """
        return to_arviz(self.sample_posterior, key, num_samples)

    def save(self, path: str | Path, *, draws: int = 0) -> None:
        """Write the fit to ``path.npz``: its state and a description, no data and no pickle.

        Read it back with the ``load`` of the method; see :meth:`Result.save`.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        draws : int
            Draws that go into the file, for those who have neither the model nor the data.
        """
        words = {"ended": self.ended, "verdict": self._course(), "trusted": None}
        drawn = self.sample_posterior(jax.random.key(0), draws) if draws else {}
        save(path, Told(type(self).__name__, words, drawn), self.saved_run(), self.made())

    def _course(self) -> str:
        end = "had settled" if self.settled else "was still rising, or they are too few to tell"
        return f"{len(self.losses)} rounds; the bound {end}."

    def saved_run(self) -> SavedRun:
        """The run as it goes into a file."""
        return SavedRun(self._fit.description, self.losses, self.state)

    def made(self) -> Made | None:
        """By what model and data are recognised; None where clients are elsewhere."""
        return None if self._held is None else self._fit.made(self._held)


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
        parties: list[tuple[Kind, Shared | Party]] = [(v.server, server)]
        for j, data in enumerate(self._held.data if self._held else ()):
            parties.append((v.kind(data), self.private(j)))
        xi: Any = ()
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
def _values(values: Callable, theta: Any, z: Array, data: SiloData) -> dict[str, Array]:
    return jax.lax.map(lambda z: values(theta, z, data), z, batch_size=64)
