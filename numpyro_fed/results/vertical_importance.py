"""The importance correction of a vertical fit, towards the model as it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import IMPORTANCE
from numpyro_fed.algorithms.vertical.weigh import Weighing, WeightedDraws
from numpyro_fed.model.sites import Site
from numpyro_fed.results.arviz import Coords, Dims, Labels, to_arviz
from numpyro_fed.results.saving import save
from numpyro_fed.results.vertical import ColumnsAfterFit, VerticalResult
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
from numpyro_fed.runtime.noise import exchange_key, server_key

# Draws in an exchange, as for silos with rows: more make replies larger, fewer more exchanges.
AT_ONCE = 4_000
# Numbers in a client's reply, one for each draw and row: 64 MB in single precision. With more rows
# an exchange has fewer draws, and there are more exchanges.
NUMBERS = 2**24
# Numbers (draws x rows) that a party computes side by side, which bounds its memory.
TOGETHER = 2**20


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
    at_once = max(1, min(size, TOGETHER // row_numbers))
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
