"""The result of SOUL."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.vertical.soul import chosen
from numpyro_fed.results.vertical import VerticalRun


@dataclass(frozen=True, eq=False)
class SOULResult(VerticalRun):
    """Draws of the clients' latents given the mode of auxiliary variables and of the server's.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the log density of latents, auxiliary variables and response, its mean over draws.
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    ended : {"rounds", "converged", "callback", "failure", "interrupted"}
        Why there are no more rounds.
    """

    def unconstrained(self, key: Array, n: int) -> tuple[Array, tuple[Array, ...]]:
        """The server's latents at their mode (n, dim), and draws of each client's: of those of the
        second half of all rounds that clients have kept.
        """
        z = jnp.broadcast_to(self.shared.guide["z"], (n, self._fit.built.model.server.dim))
        own = []
        for j in range(len(self._data)):
            noise = jax.random.uniform(jax.random.fold_in(key, j), (n,))
            places = chosen(noise, self.state.round, self._fit.vertical.num_kept)
            own.append(self.private(j).guide["draws"][places])
        return z, tuple(own)
