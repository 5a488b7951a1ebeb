"""The fit of a model whose clients hold columns, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import IMPORTANCE, FederatedAlgorithm, Round
from numpyro_fed.algorithms.vertical.base import PartyState
from numpyro_fed.algorithms.vertical.sample import SAMPLE, Sampling
from numpyro_fed.algorithms.vertical.search import VerticalSearch
from numpyro_fed.algorithms.vertical.weigh import Weighing, WeightedDraws
from numpyro_fed.errors import ModelError, positive_int
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.fingerprint import vertical_fingerprint
from numpyro_fed.model.sites import Site
from numpyro_fed.model.values import Supports
from numpyro_fed.model.vertical import VerticalModel
from numpyro_fed.model.vertical_facts import VerticalPlan
from numpyro_fed.results.arviz import Coords, Dims, Labels, to_arviz
from numpyro_fed.results.base import BuiltRun, CompiledMethod, FederatedRun, Silos
from numpyro_fed.results.saving import Provenance, save
from numpyro_fed.results.weighted import (
    NO_WEIGHTS,
    Weighted,
    quality_fields,
    replace_weightless,
    systematic,
    unless_interrupted,
    until_interrupted,
    weights_of,
)
from numpyro_fed.runtime.messages import Crossings
from numpyro_fed.runtime.noise import exchange_key, server_key
from numpyro_fed.runtime.stack import Runtime

TOGETHER = (
    "A row's predictor is the sum of what all clients compute on their columns: bring the draws of "
    "all parties together (sample_together(), where each client keeps its own), and "
)


def _refusal(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a question, whatever its arguments are."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(f"clients hold columns: {what}. {instead}")

    refuse.__doc__ = f"Refuse, since {what}."
    return refuse


class ColumnsAfterFit:
    """The questions of fits of rows, which fits of columns refuse with what to do instead.

    Raises
    ------
    ModelError
        By each method, whatever its arguments are.
    """

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


@dataclass(frozen=True, eq=False, kw_only=True)
class VerticalBuilt(BuiltRun):
    """All that a method builds from a model whose clients hold columns.

    Attributes
    ----------
    vertical : Vertical or Soul
        The model and the guides that approximate it.
    settings : dict
        The settings that a saved state must agree with.
    static : tuple
        Plain values among the arguments of the model.
    search : VerticalSearch or None
    """

    vertical: Any
    settings: dict[str, Any]
    static: tuple[Any, ...] = ()
    search: VerticalSearch | None = None

    def sampling(self, n: int) -> Sampling:
        """Return the question by which all parties draw ``n`` times and keep their own draws."""
        return Sampling(self.vertical, n)

    @property
    def model(self) -> VerticalModel:
        """Return the model, split over server and clients."""
        return self.vertical.model

    @cached_property
    def supports(self) -> Supports:
        """Return the check of the server's response."""
        return Supports.of_server(self.model)

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

    ``source`` is a hash of the model's source. For clients in other processes ``plan`` is what all
    have agreed on, and ``reach`` makes runtimes.
    """

    server_data: SiloData
    source: str = ""
    plan: VerticalPlan | None = None
    reach: Callable[..., Runtime] | None = None

    @property
    def vertical(self) -> Any:
        """Return the model and the guides that approximate it."""
        return self.built.vertical

    def messages(self, hosted: Silos) -> Crossings:
        """Return all arrays that cross between the server and the first client."""
        data = hosted.data[0] if self.plan is None else self.plan.template()
        return self.built.messages(data, self.server_data, silo="client")

    def description(self) -> dict[str, Any]:
        """Return the settings and sites that a saved state must agree with."""
        model = self.built.model
        sites = {s.name: s for s in model.server.sites}
        for j, client in enumerate(model.clients):
            sites |= model.scoped(j, {s.name: s for s in client.sites})
        return {
            "settings": self.built.settings,
            "sites": {name: [s.kind, list(s.shape), s.support] for name, s in sites.items()},
            "rows": model.rows,
            "static": [repr(value) for value in self.built.static],
        }

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
class VerticalResult(ColumnsAfterFit, FederatedRun[VerticalFit]):
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

    def _drawn(self, key: Array, n: int, alone: bool) -> tuple[dict[str, Array], tuple[int, ...]]:
        """Return all draws in this process, and clients at fault; the server may draw alone."""
        fit, state, ask = self._fit, self.state.server, self._asking(key)
        positive_int("n", n)
        sampling: Sampling = fit.cached((SAMPLE, n), lambda: fit.built.sampling(n))
        key_server = server_key(exchange_key(key, 0, 0, 1))
        if alone:
            return self.sites_at(sampling.of_server(key_server, state)[1], ()), ()
        sites = self.sites_at(sampling.run(ask, key_server, state, fit.server_data), ())
        for j in range(len(self._data)):
            values = self._hosted(j).at(j, [stack.values for stack in ask.silos])
            sites |= fit.vertical.model.scoped(j, values)
        return sites, ask.unusable

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


class SOULResult(VerticalResult):
    """Draws of the clients' latents given the mode of auxiliary variables and of the server's.

    ``losses`` are minus the log density of latents, auxiliary variables and response, its mean over
    draws. A client's draws are taken from those that it has kept of the second half of all rounds.
    """


@partial(jax.jit, static_argnums=0)
def _values(
    values: Callable[[Theta, Array, SiloData], dict[str, Array]],
    theta: Theta,
    z: Array,
    data: SiloData,
) -> dict[str, Array]:
    return jax.lax.map(lambda z: values(theta, z, data), z, batch_size=64)


# Draws in an exchange, as for silos with rows: more make replies larger, fewer more exchanges.
AT_ONCE = 4_000
# Numbers in a client's reply, one for each draw and row: 64 MB in single precision. With more rows
# an exchange has fewer draws, and there are more exchanges.
NUMBERS = 2**24
# Numbers (draws x rows) that a party computes side by side, which bounds its memory.
SIDE_BY_SIDE = 2**20


@dataclass(frozen=True, eq=False)
class VerticalCorrected(ColumnsAfterFit, Weighted[VerticalResult]):
    """An importance-corrected vertical fit: the posterior of the model as it is written.

    Attributes
    ----------
    log_evidence : float
        Estimate of ``log p(y)``.
    ess : float
        Effective number of draws.
    pareto_k : float
        Shape of the weights' tail: the smaller the better (:attr:`numpyro_fed.Corrected.reliable`).
    weights : array (num_draws,)
        Smoothed weights, which sum to one.
    result : VerticalResult
        The fit that was corrected.
    """

    _z: Array = field(repr=False)  # the server's draws
    _own: tuple[Array, ...] = field(repr=False)  # the clients'

    @property
    def _sites(self) -> tuple[Site, ...]:
        return self.result.sites

    @cached_property
    def draws(self) -> dict[str, Array]:
        """Return draws of all latents on their supports, to be weighted by ``weights``."""
        return self.result.sites_at(self._z, self._own)

    def sample_posterior(self, key: Array, n: int) -> dict[str, Array]:
        """Draw from the corrected posterior: latents of all parties, resampled by their weights."""
        chosen = systematic(key, self.weights, n)
        return self.result.sites_at(self._z[chosen], tuple(z[chosen] for z in self._own))

    def save(self, path: str | Path) -> None:
        """Write draws, weights, the verdict and the fit that was corrected to ``path.npz``.

        No data and no pickle; the file is whole or not there. :func:`numpyro_fed.load` reads it.

        Parameters
        ----------
        path : str or Path
            The name of the file without ``.npz``.
        """
        save(path, self.saved_words(), self.result.saved_run(), self.result.provenance())

    def to_arviz(
        self,
        key: Array | None = None,
        num_samples: int = 1_000,
        *,
        coords: Coords | None = None,
        dims: Dims | None = None,
    ) -> Any:
        """Return corrected draws as an ArviZ object; see :meth:`numpyro_fed.Corrected.to_arviz`."""
        return to_arviz(
            self.sample_posterior,
            key,
            num_samples,
            worth=self.ess,
            attributes=self.attributes,
            labels=Labels.of(coords, dims),
        )


def vertical_correct(
    key: Array, result: VerticalResult, num_draws: int, accuracy: float
) -> VerticalCorrected:
    """Return the correction of a vertical fit: draws of all parties' latents, weighed.

    See :func:`numpyro_fed.importance_correct`.
    """
    fit, hosted = result._fit, result._silos
    v = fit.vertical
    row_numbers = int(np.prod(v.model.shape))
    size = max(1, min(num_draws, AT_ONCE, NUMBERS // row_numbers))
    at_once = max(1, min(size, SIDE_BY_SIDE // row_numbers))
    weighing: Weighing = fit.cached((IMPORTANCE, size), lambda: Weighing(v, size, at_once))

    def exchange(i: int) -> tuple[WeightedDraws, list[Any], float]:
        """Return the server's draws with weights, the clients' draws, and the log evidence."""
        key_exchange = jax.random.fold_in(key, i)
        ask, key_server = (
            result._asking(key_exchange),
            server_key(exchange_key(key_exchange, 0, 0, 1)),
        )
        weighed = weighing.run(ask, key_server, result.state.server, fit.server_data)
        log_weights = np.asarray(weighed.log_weights, np.float64)
        evidence = float(np.logaddexp.reduce(log_weights) - np.log(size))
        if ask.unusable or not np.isfinite(evidence):
            raise result.unusable(NO_WEIGHTS, ask.unusable)
        own = (
            [] if hosted.elsewhere else [hosted.at(j, ask.silos) for j in range(result.num_clients)]
        )
        return weighed, own, evidence

    weighed, interrupted = until_interrupted(exchange, -(-num_draws // size))
    server, own, evidence = zip(*weighed, strict=True)
    z, log_w = (jnp.concatenate(part) for part in zip(*server, strict=True))
    log_weights = np.asarray(log_w, np.float64)
    draws = tuple(jnp.concatenate(part) for part in zip(*own, strict=True))
    tail_and_weights = weights_of(log_weights)
    z, *client_draws = (replace_weightless(a, tail_and_weights[1]) for a in (z, *draws))
    own_draws = tuple(client_draws)
    on_supports, latents = result.sites_at(z, own_draws), {s.name for s in result.sites}
    from_guide = np.tile(weighing.parts[1] == 0, len(server))
    all_draws = np.concatenate([np.asarray(a) for a in (z, *client_draws)], 1)
    corrected = VerticalCorrected(
        log_evidence=float(np.logaddexp.reduce(evidence) - np.log(len(evidence))),
        result=result,
        _key=key,
        accuracy=accuracy,
        **quality_fields(
            all_draws, from_guide, log_weights, tail_and_weights, on_supports, latents
        ),
        _z=z,
        _own=own_draws,
    )
    return unless_interrupted(corrected, interrupted, num_draws)
