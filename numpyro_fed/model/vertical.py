"""A vertical model as pure functions: the server's part of the model and each client's.

Each party has a text of its own, made from the model by :mod:`numpyro_fed.model.roles`. The
clients' texts return predictors, and the server's text reads their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_fed.model.binding import Theta, trace_at
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.primitives import feasible
from numpyro_fed.model.sites import Site, Structure
from numpyro_fed.model.traces import Traces
from numpyro_fed.programs import TRACING

TOTAL = "the sum over clients"  # the argument of the server's text that holds the sum
PREDICTOR = "_predictor"  # the deterministic site of a client's text that holds its predictor


class PartyModel(NamedTuple):
    """One party's part of the model: its text, its sites and the dimension of its latents."""

    text: Callable[..., Any]  # takes the party's data as keyword arguments
    structure: Structure  # its sites and their supports
    dim: int  # length of the flat vector of its latents
    data: SiloData | None = None  # its data, where a guide chooses starting values by them

    @classmethod
    def of(cls, text: Callable[..., Any], data: SiloData, owner: str) -> PartyModel:
        """Return the part of the party ``owner`` with this text, at the shapes of its data."""
        structure = Traces(text, split=False).at(data, owner).structure
        dim = max([s.stop for s in structure.sites if s.kind == "latent"], default=0)
        return cls(text, structure, dim)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the site table of this party."""
        return self.structure.sites

    @property
    def plates(self) -> tuple[()]:
        """Return no silo plates: a party's rows are not split further."""
        return ()

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """Return the sites of one kind. ``plate`` is there for the protocol of silos' models."""
        return tuple(s for s in self.sites if s.kind == kind)

    def log_probs(
        self, theta: Theta, z: Array, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the log probability of each site, not summed, and the trace.

        Log-determinants are sites of their own.
        """
        return trace_at(self.text, self.sites, theta, z, {}, data)

    def values(self, theta: Theta, z: Array, data: SiloData) -> dict[str, Array]:
        """Return the latents on their own supports, by site."""
        trace = self.log_probs(theta, z, data)[1]
        return {s.name: trace[s.name]["value"] for s in self.named("latent")}

    def init_theta(self, key: Array, data: SiloData) -> Theta:
        """Return initial values of the parameters, unconstrained."""
        names = [s.name for s in self.named("param")]
        if not names:
            return {}
        with TRACING, feasible():
            trace = handlers.trace(handlers.seed(self.text, key)).get_trace(**data.kwargs)
        return {n: biject_to(self.structure.supports[n]).inv(trace[n]["value"]) for n in names}

    def draw_prior(self, key: Array, data: SiloData) -> Array:
        """Return a draw of the latents from their prior, unconstrained (dim,)."""
        with TRACING:
            return self.flat(handlers.trace(handlers.seed(self.text, key)).get_trace(**data.kwargs))

    def flat(self, trace: Mapping[str, Any]) -> Array:
        """Return the latents of a trace, unconstrained, in one vector."""
        sites = [trace[s.name] for s in self.named("latent")]
        values = [biject_to(s["fn"].support).inv(s["value"]) for s in sites]
        return jnp.concatenate([jnp.zeros(0), *map(jnp.ravel, values)])

    def constrain_theta(self, theta: Theta) -> Theta:
        """Return the parameters on their own supports."""
        return {n: biject_to(self.structure.supports[n])(value) for n, value in theta.items()}

    def init_global(self, key: Array, init_loc_fn: Callable[..., Any] | None) -> Array:
        """Return a starting point (dim,) by a NumPyro ``init_to_...`` function, zeros if None."""
        if init_loc_fn is None or not self.dim or self.data is None:
            return jnp.zeros(self.dim)
        text = handlers.substitute(handlers.seed(self.text, key), substitute_fn=init_loc_fn)
        with TRACING:
            return self.flat(handlers.trace(text).get_trace(**self.data.kwargs))


class VerticalModel(NamedTuple):
    """A vertical model, split into the server's part and the clients' parts."""

    name: str  # the name of the client_sum
    shape: tuple[int, ...]  # the shape of the sum; its first axis runs over rows
    dtype: str  # the dtype of the sum
    server: PartyModel  # takes the server's arrays by name, and the sum as TOTAL
    clients: tuple[PartyModel, ...]  # clients with the same predictor and sites share one object
    by_row: frozenset[str]  # the server's observed sites that have a term for each row
    response: tuple[str, ...]  # the server's arrays that are observed
    below: tuple[str, ...] = ()  # the server's latents whose distribution depends on the sum

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def scoped(self, j: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of client ``j`` under their names in the whole model."""
        return {f"{self.name}_{j}/{name}": value for name, value in values.items()}

    def predict(
        self, client: PartyModel, theta: Theta, z: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return a client's predictor (rows, ...) and its log density (), which has all priors."""
        log_probs, trace = client.log_probs(theta, z, data)
        log_density = sum((p.sum() for p in log_probs.values()), jnp.zeros(()))
        return trace[PREDICTOR]["value"], log_density

    def log_server(
        self, theta: Theta, z: Array, total: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """Return the log density of the server's other sites (), and the rows' log likelihood ().

        The likelihood is that of the sites in ``by_row``. It alone is scaled up in minibatches.
        """
        log_probs, _ = self.server.log_probs(theta, z, self.with_total(data, total))
        terms: tuple[list[Array], list[Array]] = ([], [])
        for name, value in log_probs.items():
            terms[name in self.by_row].append(value.sum())
        own, rows = (sum(part, jnp.zeros(())) for part in terms)
        return own, rows

    def with_total(self, data: SiloData, total: Array) -> SiloData:
        """Return the server's data with the sum added as ``TOTAL``."""
        return replace(data, arrays={**data.arrays, TOTAL: total})

    def take(self, data: SiloData, rows: Array) -> SiloData:
        """Return a party's data at some rows, of each array whose first axis runs over rows."""
        arrays = {
            name: a[rows] if jnp.shape(a)[:1] == (self.rows,) else a
            for name, a in data.arrays.items()
        }
        return replace(data, arrays=arrays)
