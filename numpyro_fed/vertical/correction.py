r"""The importance correction of a vertical fit: draws of all parties, weighed by the true model.

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
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.basics.programs import compiled_method, map_in_batches
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.global_guides import GlobalGuide
from numpyro_fed.posterior.weighted_draws import (
    WeightedDraws,
    unless_interrupted,
    until_interrupted,
)
from numpyro_fed.rounds.exchange import AskSilos, Exchange, Reply, key_as_noise
from numpyro_fed.rounds.keys import exchange_key, server_key
from numpyro_fed.rounds.names import IMPORTANCE
from numpyro_fed.rounds.stacks import StackedExchange, stacked_visit
from numpyro_fed.rounds.states import Shared
from numpyro_fed.search.expand import shape
from numpyro_fed.text.site_table import Site
from numpyro_fed.vertical.algorithm import VFLAlgorithm
from numpyro_fed.vertical.guides import CouplingStats, coupling_stat, draw, log_ratio
from numpyro_fed.vertical.parties import ClientState, PartyState, ServerState
from numpyro_fed.vertical.result import ColumnsAfterFit, VerticalResult
from numpyro_fed.weigh.element_errors import ElementErrors, Rounding, moments
from numpyro_fed.weigh.weights import NO_WEIGHTS, Weights, replace_weightless, systematic_resample

# Draws in an exchange, as for silos with rows: more make replies larger, fewer more exchanges.
AT_ONCE = 4_000
# Numbers in a client's reply, one for each draw and row: 64 MB in single precision. With more rows
# an exchange has fewer draws, and there are more exchanges.
NUMBERS = 2**24
# Numbers (draws x rows) that a party computes side by side, which bounds its memory.
SIDE_BY_SIDE = 2**20
# Widths of the mixture's components as multiples of the guides', and their shares of the draws. All
# latents of all parties are scaled at once, so a factor of 8 in many dimensions would leave the
# posterior altogether.
SCALES = (1.0, 1.5, 3.0)
SHARES = (0.8, 0.1, 0.1)


def vertical_correct(
    key: Array, result: VerticalResult, num_draws: int, accuracy: float
) -> VerticalCorrected:
    """Return the correction of a vertical fit: draws of all parties' latents, weighed.

    See :func:`numpyro_fed.importance_correct`.
    """
    fit, hosted = result._fit, result._silos
    v, server_data = cast(VFLAlgorithm, result.algorithm), cast(SiloData, fit.server_data)
    row_numbers = int(np.prod(v.model.shape))
    size = max(1, min(num_draws, AT_ONCE, NUMBERS // row_numbers))
    at_once = max(1, min(size, SIDE_BY_SIDE // row_numbers))
    weighing: WeighParties = fit.cached((IMPORTANCE, size), lambda: WeighParties(v, size, at_once))

    def weigh(i: int) -> tuple[tuple[Array, ...], np.ndarray, float]:
        """Return all parties' draws of an exchange, their log weights and the log evidence."""
        key_exchange = jax.random.fold_in(key, i)
        ask = result._asking(key_exchange)
        key_server = server_key(exchange_key(key_exchange, 0, 0, 1))
        z, log_w = weighing.run(ask, key_server, result.state.server, server_data)
        log_weights = np.asarray(log_w, np.float64)
        evidence = float(np.logaddexp.reduce(log_weights) - np.log(size))
        if ask.unusable or not np.isfinite(evidence):
            raise result.unusable(NO_WEIGHTS, ask.unusable)
        return (
            (z, *(hosted.at(j, ask.silos) for j in range(len(hosted.data)))),
            log_weights,
            evidence,
        )

    exchanges, interrupted = until_interrupted(weigh, -(-num_draws // size))
    draws, log_ws, evidences = zip(*exchanges, strict=True)
    log_weights = np.concatenate(log_ws)
    weights = Weights.of(log_weights)
    by_party = map(jnp.concatenate, zip(*draws, strict=True))
    z, *own = (replace_weightless(party, weights.values) for party in by_party)
    all_draws = np.concatenate([np.asarray(a) for a in (z, *own)], 1)
    from_guide = np.tile(weighing.mixture[1] == 0, len(exchanges))
    found = moments(all_draws, weights.values, from_guide)
    on_supports, latents = result.sites_at(z, tuple(own)), {s.name for s in result.sites}
    corrected = VerticalCorrected(
        ess=weights.ess,
        pareto_k=weights.pareto_k,
        weights=weights.values,
        _moments=found,
        _rounding=Rounding.of(all_draws, weights.values, log_weights, found.mean, found.sd),
        errors=ElementErrors.of(on_supports, latents, weights.values),
        log_evidence=float(np.logaddexp.reduce(evidences) - np.log(len(evidences))),
        result=result,
        _key=key,
        accuracy=accuracy,
        _z=z,
        _own=tuple(own),
    )
    return unless_interrupted(corrected, interrupted, num_draws)


@dataclass(frozen=True, eq=False)
class VerticalCorrected(WeightedDraws[VerticalResult], ColumnsAfterFit):
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
        chosen = systematic_resample(key, self.weights, n)
        return self.result.sites_at(self._z[chosen], tuple(z[chosen] for z in self._own))

    @property
    def run_behind(self) -> VerticalResult:
        """Return the fit that was corrected."""
        return self.result

    @property
    def _for_arviz(self) -> tuple[float, dict[str, float | str]]:
        return self.ess, self.attributes


class Down(NamedTuple):
    """A message of the server: the shared noise (draws, rank), and its centre (rank,)."""

    xi: Array | None
    centre_xi: Array | None


class Up(NamedTuple):
    """A client's message on each draw."""

    predictor: Array  # (draws, rows, ...)
    log_p: Array  # (draws,) its own log density
    log_q: Array  # (draws, components) the log density of its draw under each of the mixture
    coupling: CouplingStats | None = None  # with ``b`` (draws, components, rank)


# A party's draws from the mixture (draws, dim), their log densities (draws, components), and the
# coupling statistic (draws, components, rank).
PartyDraws = tuple[Array, Array, Array | None]


@dataclass(frozen=True, eq=False)
class WeighParties:
    """The question to clients for their predictors at draws of all parties' latents.

    Each client keeps its draws (num_draws, dim).
    """

    vertical: VFLAlgorithm
    num_draws: int
    at_once: int  # draws that run at a time

    @cached_property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange in which clients tell their predictors at all draws."""
        v, n, components = self.vertical, self.num_draws, len(self.mixture[0])
        down, stats = Down(None, None), None
        if v.rank:
            down = Down(shape(n, v.rank), shape(v.rank))
            stats = CouplingStats(shape(n, components, v.rank), shape(v.rank, v.rank))
        up = Up(shape(n, *v.model.shape), shape(n), shape(n, components), stats)
        return StackedExchange(
            IMPORTANCE,
            stacked_visit(self.silo, little=False),
            silo_noise=key_as_noise,
            usable=self.usable,
            settings=json.dumps({"num_draws": n, "at_once": self.at_once}),
            messages=lambda: (down, up),
        )

    @cached_property
    def mixture(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scales of the mixture's components, and the component of each draw.

        The guides are the only one if the density of some guide is known at its own draws only.
        """
        n, guides = self.num_draws, [party.guide for party in self.vertical.all_types]
        if not all(guide.density_everywhere for guide in guides) or n < 10:
            return np.ones(1), np.zeros(n, int)
        numbers = [int(share * n) for share in SHARES[1:]]
        of_draw = np.repeat(np.arange(len(SCALES)), [n - sum(numbers), *numbers])
        return np.array(SCALES), of_draw

    def draw(
        self,
        guide: GlobalGuide[Array],
        party: Shared | PartyState,
        noise: Array,
        down: Down,
    ) -> PartyDraws:
        """Return a party's draws, from its own noise and that of a message."""
        (scales, of_draw), frame = self.mixture, party.frame
        eta, V = party.guide["latents"], party.guide.get("coupling")
        u, log_q, b = jax.vmap(partial(draw, guide), (None, None, 0, 0))(eta, V, noise, down.xi)
        place = jax.vmap(partial(guide.place, frame))
        if len(scales) == 1 or not guide.density_everywhere:
            b = None if b is None else b[:, None]
            return place(u), log_q[:, None] - frame.log_det, b
        centre = guide.centre(eta) if V is None else guide.draw(eta, V @ down.centre_xi)[0]
        # Wider draws are spread around the centre given the centre of the shared noise: then all
        # parties' draws are those of one widened joint distribution.
        u = centre + jnp.asarray(scales)[of_draw][:, None] * (u - centre)

        def log_q_at_scale(scale: float) -> tuple[Array, Array | None]:
            shrunk = centre + (u - centre) / scale
            widened = frame.log_det + u.shape[1] * np.log(scale)
            log_q = jax.vmap(partial(guide.log_density, eta))(shrunk) - widened
            if V is None:
                return log_q, None
            return log_q, jax.vmap(partial(coupling_stat, guide, eta, V))(shrunk)

        densities = [log_q_at_scale(float(s)) for s in scales]
        return place(u), *jax.tree.map(lambda *a: jnp.stack(a, 1), *densities)

    def silo(
        self, noise: Array, down: Down, state: ClientState, data: SiloData
    ) -> tuple[Reply[Up], Array]:
        """Draw a client's latents, and send its predictors and densities there."""
        v, party = self.vertical, self.vertical.type_of(data)
        private = v.private(state, data)
        eps = v.client_noise(noise, state, self.num_draws)
        z, log_q, b = self.draw(party.guide, private, eps, down)
        g, log_p = map_in_batches(
            lambda z: v.model.predict(party.model, private.theta, z, data), z, self.at_once
        )
        V = private.guide.get("coupling")
        stats = None if b is None or V is None else CouplingStats(b, V.T @ V)
        return Reply(Up(g, log_p, log_q, stats), jnp.array(True)), z

    def usable(self, up: Up) -> Any:
        """Return whether a message can be used; predictors of wide draws may overflow."""
        # The guides' own draws must be numbers; wider ones may overflow, and then have no weight.
        of_guides = up.predictor[self.mixture[1] == 0]
        numbers = [(a == a).all() for a in (of_guides, up.log_p)]
        finite = [(abs(a) < np.inf).all() for a in jax.tree.leaves((up.log_q, up.coupling))]
        return reduce(and_, numbers + finite)

    @compiled_method()
    def _drawn(self, key: Array, state: ServerState) -> tuple[Down, PartyDraws]:
        """Return the server's message, and its own draws."""
        v = self.vertical
        eps, xi = v.server_noise(key, state, self.num_draws)
        down = Down(xi, v.shared_noise_guide.centre(state.params.shared) if v.rank else None)
        return down, self.draw(v.server.guide, v.shared(state), eps, down)

    @compiled_method()
    def _log_weights(self, state: ServerState, drawn: PartyDraws, up: Up, data: SiloData) -> Array:
        """Return the log weights (n,) of all draws."""
        v, (scales, of_draw), (z, log_q, b) = self.vertical, self.mixture, drawn
        shares = jnp.asarray(np.bincount(of_draw, minlength=len(scales)) / self.num_draws)
        theta, params, _ = v.shared(state)

        log_p = map_in_batches(
            lambda at: sum(v.model.log_server(theta, at[0], at[1], data), jnp.zeros(())),
            (z, up.predictor),
            self.at_once,
        )
        log_q = log_q + up.log_q
        if up.coupling is not None and b is not None:
            V = params["coupling"]
            ratio = partial(log_ratio, params["shared"], A=up.coupling.A + V.T @ V)
            log_q += jax.vmap(jax.vmap(ratio))(b + up.coupling.b)
        log_w = log_p + up.log_p - jax.nn.logsumexp(jnp.log(shares) + log_q, axis=1)
        # Far from the guides a density may overflow; that draw has no weight.
        return jnp.where((of_draw > 0) & ~(log_w < jnp.inf), -jnp.inf, log_w)

    def run(
        self, ask: AskSilos, key: Array, state: ServerState, data: SiloData
    ) -> tuple[Array, Array]:
        """Return the server's draws (n, dim), and the log weights (n,) of all parties' draws."""
        down, drawn = self._drawn(key, state)
        up: Up = ask(self.exchange, down)
        return drawn[0], self._log_weights(state, drawn, up, data)
