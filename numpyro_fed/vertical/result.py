"""The result of a run over clients that hold columns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.after.arviz import Coords, Dims, Labels, to_arviz
from numpyro_fed.basics.errors import ModelError, positive_int
from numpyro_fed.basics.programs import map_in_batches
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.posterior.run import FederatedRun
from numpyro_fed.posterior.saving import SavedWords, save
from numpyro_fed.rounds.keys import exchange_key, server_key
from numpyro_fed.rounds.names import SAMPLE
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Site, Theta
from numpyro_fed.text.vertical import latents_of
from numpyro_fed.vertical.parties import PartyState, VerticalAlgorithm

TOGETHER = (
    "A row's predictor is the sum of what all clients compute on their columns: bring the draws of "
    "all parties together (sample_together(), where each client keeps its own), and "
)


def _refusal(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a question, whatever its arguments are."""

    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise ModelError(f"clients hold columns: {what}. {instead}")

    refuse.__doc__ = f"Refuse, since {what}."
    return refuse


class ColumnsAfterFit(ABC):
    """All that fits of columns answer alike, and the questions of rows that they refuse.

    Raises
    ------
    ModelError
        By each question of rows, whatever its arguments are, with what to do instead.
    """

    @property
    @abstractmethod
    def run_behind(self) -> VerticalResult:
        """Return the run that the posterior rests on."""

    @abstractmethod
    def sample_posterior(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the posterior."""

    @abstractmethod
    def saved_words(self, draws: int) -> SavedWords:
        """Return the form in which a file keeps the verdict, and so many draws."""

    @property
    def _for_arviz(self) -> tuple[float, dict[str, float | str] | None]:
        """Return how many independent draws it is worth, at most, and attributes for ArviZ."""
        return math.inf, None

    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return posterior draws as an ArviZ object.

        It is a ``DataTree``, or an ``InferenceData`` before ArviZ 1. ``dims`` and ``coords`` name
        axes and their elements, as for ``arviz.from_numpyro``. Corrected draws are at most as many
        as they are worth. Needs the extra ``examples``.
        """
        worth, attributes = self._for_arviz
        return to_arviz(
            self.sample_posterior,
            key,
            num_samples,
            worth=worth,
            attributes=attributes,
            labels=Labels.of(coords, dims),
        )

    def save(self, path: str | Path, *, draws: int = 0) -> None:
        """Write the fit to ``path.npz``: its state and a description, no data and no pickle.

        The file is whole or not there: a save that is cut short leaves the one before as it is.
        Read it back with the method's ``load`` or :func:`numpyro_fed.load`, which refuse
        another model and other data; for that the file has a digest of each silo's arrays, keyed
        by random bytes of its own. It also holds what silos keep to themselves, of a run in one
        process: give it to nobody who may not see that.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        draws : int
            The number of draws that go into the file, for readers who have neither the model nor
            the data. Weighted draws are all in it.
        """
        run = self.run_behind
        save(path, self.saved_words(draws), run.saved_run(), run.provenance())

    predict = _refusal(
        "outcomes are not predicted",
        f"{TOGETHER}run the model at them on the new columns of all clients "
        "(numpyro.infer.Predictive).",
    )
    prior_predict = _refusal(
        "outcomes are not predicted from the prior",
        "Run the model without its response on the columns of all clients, where they may be in "
        "one place (numpyro.infer.Predictive).",
    )
    loo = _refusal(
        "rows are not left out, since each client holds a part of every row",
        f"{TOGETHER}give the log likelihoods of the rows there to arviz.loo. importance_correct "
        "has the log evidence, by which models are compared as well.",
    )
    leave_out = _refusal(
        "a client has no rows of its own that could be left out",
        "Fit the model without its columns, and compare log_evidence of importance_correct.",
    )
    average = _refusal(
        "rows are not averaged over, since each client holds a part of every row",
        f"{TOGETHER}run the model at them on the changed columns of all clients.",
    )
    calibration = _refusal(
        "outcomes are not predicted",
        f"{TOGETHER}run the model at them, and compare with the response.",
    )
    quantity = _refusal(
        "there is no table of all parties' latents", "Compute it of the draws of to_arviz()."
    )
    ranks = _refusal(
        "clients have latents of different columns, of which none is before another",
        "Take to_arviz() and ArviZ's plots.",
    )
    add = _refusal(
        "no client can be added to a fit", "Run the method anew, with its columns in xs."
    )
    remove = _refusal(
        "no client can be removed from a fit", "Run the method anew, without its columns in xs."
    )
    disagreement = _refusal(
        "clients cannot disagree, since none of them has a likelihood of its own",
        "Look at the posterior of each client's latents (sample_posterior, to_arviz).",
    )
    prior_sensitivity = _refusal(
        "prior and likelihood are not weighed against each other",
        "Run the method anew with a wider prior, and compare the draws.",
    )
    summary = _refusal(
        "there is no table of all parties' latents", "Take to_arviz() and ArviZ's summary."
    )
    to_frame = _refusal(
        "there is no table of all parties' latents", "Take to_arviz(), whose draws have names."
    )
    plot = _refusal(
        "there is no plot of all parties' latents", "Take to_arviz() and ArviZ's plots."
    )
    plot_silos = _refusal(
        "clients have latents of different columns, which do not stand side by side",
        "Take to_arviz() and ArviZ's plots.",
    )
    plot_check = _refusal(
        "outcomes are not predicted",
        f"{TOGETHER}run the model at them on the columns of all clients "
        "(numpyro.infer.Predictive), and compare with the response.",
    )


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


@dataclass(frozen=True, eq=False)
class VerticalResult(FederatedRun, ColumnsAfterFit):
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

    start: VerticalStart | None = field(default=None, kw_only=True)

    ELSEWHERE = (
        "clients hold their own latents and parameters, and the server knows nothing of them. Ask "
        "there, or run all parties in one process."
    )
    PARTY = "client"

    @property
    def run_behind(self) -> VerticalResult:
        """Return the run itself."""
        return self

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return self.num_silos

    @property
    def algorithm(self) -> VerticalAlgorithm:
        """Return the algorithm, with the model of all parties."""
        return cast(VerticalAlgorithm, self._fit.built.parties)

    @property
    def sites(self) -> tuple[Site, ...]:
        """All latents by their names in the model, with their slices of the coordinates.

        The coordinates are those of all parties: the server's first, then each client's.
        """
        model = self.algorithm.model
        sites = model.server.sites if self._silos.elsewhere else model.sites.values()
        return tuple(s for s in sites if s.kind == "latent")

    @property
    def params(self) -> dict[str, Any]:
        """Return the server's parameters on their supports; its guides as ``"guide"``."""
        shared, v = self.shared, self.algorithm
        guide = v.in_z(shared, None)
        return {**v.model.server.constrain_theta(shared.theta), "guide": guide}

    def client_params(self, client: int) -> dict[str, Any]:
        """Return a client's parameters on their supports, and its guides as ``"guide"``."""
        private, v = self.private(client), self.algorithm
        guide = v.in_z(private, self._hosted(client).data[client])
        return {**v.model.clients[client].constrain_theta(private.theta), "guide": guide}

    def private(self, client: int) -> PartyState:
        """Return a client's parameters, unconstrained, and its guides."""
        data = self._hosted(client).data[client]
        return self.algorithm.private(self._silo_state(client), data)

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
        return self._drawn(key, n, self._silos.elsewhere)[0]

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
        sites, unusable = self._drawn(key, n, alone=False)
        if unusable or not all(np.isfinite(values).all() for values in sites.values()):
            words = "a draw of the posterior is NaN or infinite: see the losses of the run."
            raise self.unusable(words, unusable)
        return sites

    def saved_words(self, draws: int) -> SavedWords:
        """Return the form in which a file keeps the verdict, and so many draws."""
        words = {"ended": self.ended, "verdict": self._run_summary(), "trusted": None}
        drawn = self.sample_posterior(jax.random.key(0), draws) if draws else {}
        return SavedWords(type(self).__name__, words, drawn)

    def _drawn(self, key: Array, n: int, alone: bool) -> tuple[dict[str, Array], tuple[int, ...]]:
        """Return all draws in this process, and clients at fault; the server may draw alone."""
        ask = self._asking(key)
        positive_int("n", n)
        exchange, draw = self._fit.cached((SAMPLE, n), lambda: self.algorithm.sampling(n))
        sent, z = draw(server_key(exchange_key(key, 0, 0, 1)), self.state.server)
        sites = self.sites_at(z, ())
        if alone:
            return sites, ()
        ask(exchange, sent)
        for j in range(len(self._silos.data)):
            values = self._hosted(j).at(j, [stack.values for stack in ask.silos])
            sites |= self.algorithm.model.scoped(j, values)
        return sites, ask.unusable

    def sites_at(self, z: Array, own: tuple[Array, ...]) -> dict[str, Array]:
        """Return latents on their supports at unconstrained draws ``z``, ``own`` (n, dim)."""
        model, theta = self.algorithm.model, self.shared.theta
        # Latents at given draws do not read the sum of the predictors: zeros stand in for it.
        total = jnp.zeros(model.shape, model.dtype)
        server = model.with_total(cast(SiloData, self._fit.server_data), total)
        sites = dict(_values(model.server, theta, z, server))
        for j, data in enumerate(self._silos.data if own else ()):
            values = _values(model.clients[j], self.private(j).theta, own[j], data)
            sites |= model.scoped(j, values)
        return sites


class SOULResult(VerticalResult):
    """Draws of the clients' latents given the mode of auxiliary variables and of the server's.

    ``losses`` are minus the log density of latents, auxiliary variables and response, its mean over
    draws. A client's draws are taken from those that it has kept of the second half of all rounds.
    """


@partial(jax.jit, static_argnums=0)
def _values(party: FederatedModel, theta: Theta, z: Array, data: SiloData) -> dict[str, Array]:
    return map_in_batches(lambda z: latents_of(party, theta, z, data), z, 64)
