"""The result of SOUL: Langevin draws of clients' latents."""

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
        """Return the server's latents at their mode (n, dim), and draws of each client's.

        A client's draws are taken from those that it has kept of the second half of all rounds.
        """
        z = jnp.broadcast_to(self.shared.guide["z"], (n, self._fit.built.model.server.dim))
        client_draws = []
        for j in range(len(self._data)):
            noise = jax.random.uniform(jax.random.fold_in(key, j), (n,))
            indices = chosen(noise, self.state.round, self._fit.vertical.num_kept)
            client_draws.append(self.private(j).guide["draws"][indices])
        return z, tuple(client_draws)
