"""A vertical model as pure functions: the server's half, and each client's."""

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
from numpyro_fed.model.feasible import feasible
from numpyro_fed.model.sites import Site, Structure
from numpyro_fed.tracing import TRACING

TOTAL = "the sum over clients"  # the name under which the server's text is given it
PREDICTOR = "_predictor"  # the site at which a client's text shows its predictor


class PartyModel(NamedTuple):
    """One party's latents and parameters, and its part of the text."""

    text: Callable[..., Any]  # of what the party holds, as keyword arguments
    found: Structure  # its sites and their supports
    dim: int  # length of the flat vector of its latents

    @property
    def sites(self) -> tuple[Site, ...]:
        """The site table of this party."""
        return self.found.sites

    @property
    def supports(self) -> dict[str, Any]:
        """The support of each latent and the constraint of each parameter."""
        return self.found.supports

    @property
    def plates(self) -> tuple[()]:
        """No silo plates: what a party holds is not split further."""
        return ()

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """The sites of one kind."""
        return tuple(s for s in self.sites if s.kind == kind)

    def log_probs(
        self, theta: Theta, z: Array, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Log probability of each site, log-determinants as sites of their own, and the trace."""
        return trace_at(self.text, self.sites, theta, z, {}, data)

    def values(self, theta: Theta, z: Array, data: SiloData) -> dict[str, Array]:
        """Latents on their own supports."""
        trace = self.log_probs(theta, z, data)[1]
        return {s.name: trace[s.name]["value"] for s in self.named("latent")}

    def init_theta(self, key: Array, data: SiloData) -> Theta:
        """Initial values of the parameters, unconstrained."""
        names = [s.name for s in self.named("param")]
        if not names:
            return {}
        with TRACING, feasible():
            trace = handlers.trace(handlers.seed(self.text, key)).get_trace(**data.kwargs)
        return {n: biject_to(self.supports[n]).inv(trace[n]["value"]) for n in names}

    def draw_prior(self, key: Array, data: SiloData) -> Array:
        """A draw of the latents from their prior, unconstrained (dim,)."""
        with TRACING:
            return self.flat(handlers.trace(handlers.seed(self.text, key)).get_trace(**data.kwargs))

    def flat(self, trace: Mapping[str, Any]) -> Array:
        """The latents of a trace, unconstrained, in one vector."""
        sites = [trace[s.name] for s in self.named("latent")]
        values = [biject_to(s["fn"].support).inv(s["value"]) for s in sites]
        return jnp.concatenate([jnp.zeros(0), *map(jnp.ravel, values)])

    def constrain_theta(self, theta: Theta) -> Theta:
        """Parameters on their own supports."""
        return {n: biject_to(self.supports[n])(value) for n, value in theta.items()}

    def given(self, data: SiloData) -> Given:
        """The half with what the party holds, for guides that ask where to begin."""
        return Given(self, data)


class Given(NamedTuple):
    """A half and its data, as a guide sees them."""

    half: PartyModel
    data: SiloData

    @property
    def dim(self) -> int:
        """Length of the flat vector of latents."""
        return self.half.dim

    @property
    def supports(self) -> dict[str, Any]:
        """The support of each latent."""
        return self.half.supports

    @property
    def plates(self) -> tuple[()]:
        """No silo plates: what a party holds is not split further."""
        return ()

    def named(self, kind: str, plate: str | None = None) -> tuple[Site, ...]:
        """The sites of one kind."""
        return self.half.named(kind, plate)

    def init_global(self, key: Array, init_loc_fn: Callable[..., Any] | None) -> Array:
        """A starting point by one of NumPyro's ``init_to_...`` functions; zeros when None."""
        if init_loc_fn is None or not self.dim:
            return jnp.zeros(self.dim)
        text = handlers.substitute(handlers.seed(self.half.text, key), substitute_fn=init_loc_fn)
        with TRACING:
            return self.half.flat(handlers.trace(text).get_trace(**self.data.kwargs))


class VerticalModel(NamedTuple):
    """A vertical text, split."""

    name: str  # of the client_sum
    shape: tuple[int, ...]  # of the sum; its first axis runs over rows
    dtype: str
    server: PartyModel  # of the server's arrays by name, and the sum as TOTAL
    clients: tuple[PartyModel, ...]  # the halves of clients of one shape are alike
    by_row: frozenset[str]  # the server's observed sites that have a term for each row
    response: tuple[str, ...]  # the server's arrays that are observed
    below: tuple[str, ...] = ()  # the server's latents whose distribution depends on the sum

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.shape[0]

    def scoped(self, j: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """A client's values under the names that they have in the model."""
        return {f"{self.name}_{j}/{name}": value for name, value in values.items()}

    def predict(
        self, client: PartyModel, theta: Theta, z: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """A client's predictor (rows, ...) and its own log density, all latents' priors in it."""
        log_probs, trace = client.log_probs(theta, z, data)
        own = sum((p.sum() for p in log_probs.values()), jnp.zeros(()))
        return trace[PREDICTOR]["value"], own

    def log_server(
        self, theta: Theta, z: Array, total: Array, data: SiloData
    ) -> tuple[Array, Array]:
        """The server's own log density, and the log likelihood of the rows at their sum."""
        log_probs, _ = self.server.log_probs(theta, z, self.with_total(data, total))
        terms: tuple[list[Array], list[Array]] = ([], [])
        for name, value in log_probs.items():
            terms[name in self.by_row].append(value.sum())
        own, rows = (sum(part, jnp.zeros(())) for part in terms)
        return own, rows

    def with_total(self, data: SiloData, total: Array) -> SiloData:
        """Return what the server holds, and the sum."""
        return replace(data, arrays={**data.arrays, TOTAL: total})

    def take(self, data: SiloData, rows: Array) -> SiloData:
        """Some rows of what a party holds: of each array whose first axis runs over them."""
        arrays = {
            name: a[rows] if jnp.shape(a)[:1] == (self.rows,) else a
            for name, a in data.arrays.items()
        }
        return replace(data, arrays=arrays)
