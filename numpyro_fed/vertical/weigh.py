r"""The question that weighs draws of all parties' latents by the density of the true model.

Every party draws its latents from its guide. Clients send their predictors at these draws, which
are added up, and their own log densities. The server has the response, and computes the weights:

.. math::
    \log w_s = \log p(z^s) + \sum_j \log p(\theta_j^s) - \log q(z^s, \theta^s)
    + \log p\Big(y \,\Big|\, \sum_j g_j(x_j, \theta_j^s), z^s\Big).

Auxiliary variables do not appear: fits of the augmented or the power-likelihood model are corrected
towards the model as it is written. A fifth of the draws are wider, by the same factor at all
parties, and all are weighed by the density of the mixture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import compiled_method
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.exchange import (
    IMPORTANCE,
    AskSilos,
    Exchange,
    Reply,
    Shared,
    StackedExchange,
    key_as_noise,
    stacked_visit,
)
from numpyro_fed.search.expand import shape
from numpyro_fed.vertical import coupling
from numpyro_fed.vertical.algorithm import Vertical
from numpyro_fed.vertical.coupling import CouplingStats
from numpyro_fed.vertical.parties import ClientState, PartyState, PartyType, ServerState

# Widths of the mixture's parts as multiples of the guides', and their shares of the draws. All
# latents of all parties are scaled at once, so a factor of 8 in many dimensions would leave the
# posterior altogether.
SCALES = (1.0, 1.5, 3.0)
SHARES = (0.8, 0.1, 0.1)


class Up(NamedTuple):
    """A client's message on each draw."""

    predictor: Array  # (draws, rows, ...)
    own: Array  # (draws,) its own log density
    log_q: Array  # (draws, parts) the log density of its draw under each part of the mixture
    tie: Any = None  # its coupling statistics, with ``b`` (draws, parts, rank)


class Down(NamedTuple):
    """A message of the server: the shared noise (draws, rank), and its centre (rank,)."""

    xi: Array | None
    centre_xi: Array | None


# A party's draws (draws, dim), their log density (draws, parts) under each part of the mixture, and
# the coupling statistic (draws, parts, rank).
PartyDraws = tuple[Array, Array, Any]


@dataclass(frozen=True, eq=False)
class WeighParties:
    """The question to clients for their predictors at draws of all parties' latents.

    Each client keeps its draws (num_draws, dim).
    """

    vertical: Vertical
    num_draws: int
    at_once: int  # draws that run at a time

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which clients tell their predictors at all draws."""
        v, n, parts = self.vertical, self.num_draws, len(self.parts[0])
        down, tie = Down(None, None), None
        if v.rank:
            down = Down(shape(n, v.rank), shape(v.rank))
            tie = CouplingStats(shape(n, parts, v.rank), shape(v.rank, v.rank))
        up = Up(shape(n, *v.model.shape), shape(n), shape(n, parts), tie)
        return StackedExchange(
            IMPORTANCE,
            stacked_visit(self.silo, little=False),
            silo_noise=key_as_noise,
            usable=self.usable,
            settings=json.dumps({"num_draws": n, "at_once": self.at_once}),
            messages=lambda: (down, up),
        )

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales of the mixture's parts, and the part of each draw (num_draws,).

        The guides are the only part if the density of some guide is known at its own draws only.
        """
        v, n = self.vertical, self.num_draws
        guides = [v.guide(kind).globals for kind in (v.server, *v.kinds.values())]
        if not all(guide.density_everywhere for guide in guides) or n < 10:
            return np.ones(1), np.zeros(n, int)
        numbers = [int(share * n) for share in SHARES[1:]]
        part_of_draw = np.repeat(np.arange(len(SCALES)), [n - sum(numbers), *numbers])
        return np.array(SCALES), part_of_draw

    def draw(
        self,
        kind: PartyType,
        party: Shared | PartyState,
        noise: Array,
        xi: Array | None,
        centre_xi: Array | None,
    ) -> PartyDraws:
        """Return a party's draws; ``centre_xi`` (rank,) is the centre of the shared noise."""
        scales, part_of_draw = self.parts
        guide, frame = self.vertical.guide(kind).globals, party.frame
        eta, V = party.guide["latents"], party.guide.get("coupling")
        draw = partial(coupling.draw, guide)
        u, log_q, b = jax.vmap(draw, (None, None, 0, 0))(eta, V, noise, xi)
        place = jax.vmap(partial(guide.place, frame))
        if len(scales) == 1 or not guide.density_everywhere:
            return place(u), log_q[:, None] - frame.log_det, None if b is None else b[:, None]
        centre = guide.centre(eta) if V is None else guide.draw(eta, V @ centre_xi)[0]
        # Wider draws are spread around the centre given the centre of the shared noise: then all
        # parties' draws are those of one widened joint distribution.
        u = centre + jnp.asarray(scales)[part_of_draw][:, None] * (u - centre)

        def log_q_at_scale(scale: float) -> tuple[Array, Array | None]:
            shrunk = centre + (u - centre) / scale
            widened = frame.log_det + u.shape[1] * np.log(scale)
            log_q = jax.vmap(partial(guide.log_density, eta))(shrunk) - widened
            if V is None:
                return log_q, None
            return log_q, jax.vmap(partial(coupling.at, guide, eta, V))(shrunk)

        densities = [log_q_at_scale(float(s)) for s in scales]
        log_q, b = jax.tree.map(lambda *parts: jnp.stack(parts, 1), *densities)
        return place(u), log_q, b

    def silo(
        self, noise: Array, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], Array]:
        v = self.vertical
        kind: PartyType = v.kind(data)
        private, eps = v.private(state, data), v.client_noise_of(noise, state, self.num_draws)
        z, log_q, b = self.draw(kind, private, eps, down.xi, down.centre_xi)

        def predict_at(z: Array) -> tuple[Array, Array]:
            return v.model.predict(kind.model, private.theta, z, data)

        g, own_log_p = jax.lax.map(predict_at, z, batch_size=self.at_once)
        tie = CouplingStats(b, _products(private.guide)) if v.rank else None
        return Reply(Up(g, own_log_p, log_q, tie), jnp.array(True)), z

    def usable(self, up: Up) -> Any:
        """Return whether a message can be used; predictors of wide draws may overflow."""
        # The guides' own draws must be numbers; wider ones may overflow, and then have no weight.
        near = up.predictor[self.parts[1] == 0]
        fine = [(a == a).all() for a in (near, up.own)]
        return reduce(
            and_, fine + [(abs(a) < np.inf).all() for a in jax.tree.leaves((up.log_q, up.tie))]
        )

    @compiled_method()
    def _drawn(self, key: Array, state: ServerState) -> tuple[Down, PartyDraws]:
        """Return the server's message, and its own draws."""
        v = self.vertical
        eps, shared = v.server_noise_of(key, self.num_draws)
        centre_xi = v.sharing.centre(state.params.shared) if v.rank else None
        xi = v.xi(state.params.shared, shared)
        return Down(xi, centre_xi), self.draw(v.server, v.shared(state), eps, xi, centre_xi)

    @compiled_method()
    def _log_weights(self, state: ServerState, drawn: PartyDraws, up: Up, data: SiloData) -> Array:
        """Return the log weights (n,) of all draws."""
        v = self.vertical
        (scales, part_of_draw), (z, own_log_q, b) = self.parts, drawn
        shares = jnp.asarray(np.bincount(part_of_draw, minlength=len(scales)) / self.num_draws)
        theta, params, _ = v.shared(state)

        def log_joint(at: tuple[Array, Array]) -> Array:
            return sum(v.model.log_server(theta, *at, data), jnp.zeros(()))

        log_p = jax.lax.map(log_joint, (z, up.predictor), batch_size=self.at_once)
        log_q = own_log_q + up.log_q
        if v.rank:
            ratio = partial(coupling.log_ratio, params["shared"], A=up.tie.A + _products(params))
            log_q += jax.vmap(jax.vmap(ratio))(b + up.tie.b)
        log_w = log_p + up.own - jax.nn.logsumexp(jnp.log(shares) + log_q, axis=1)
        # Far from the guides a density may overflow; that draw has no weight.
        return jnp.where((part_of_draw > 0) & ~(log_w < jnp.inf), -jnp.inf, log_w)

    def run(
        self, ask: AskSilos, key: Array, state: ServerState, data: SiloData
    ) -> tuple[Array, Array]:
        """Return the server's draws (n, dim), and the log weights (n,) of all parties' draws."""
        down, drawn = self._drawn(key, state)
        up: Up = ask(self.exchange, down)
        return drawn[0], self._log_weights(state, drawn, up, data)


def _products(params: dict[str, Any]) -> Array:
    """Return ``V' V`` of a party's part in the shared noise."""
    return params["coupling"].T @ params["coupling"]
