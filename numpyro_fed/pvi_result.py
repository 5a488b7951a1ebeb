"""What a fit by partitioned variational inference returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_fed.algorithms.pvi import Settings, Status, effective_factor
from numpyro_fed.errors import NonFiniteError
from numpyro_fed.result import Factors, Result


@dataclass(frozen=True)
class PVIResult(Result):
    """A fit by :class:`numpyro_fed.PVI` or a member of its family.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the free energy: each silo's term at the posterior that it received, so that round
        ``i`` shows where round ``i - 1`` led (:attr:`log_evidence` puts that right).
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    visits : array (rounds, steps, participants)
        Who took part in each update of the server, in order.
    damping : array (rounds, steps)
        The share of each proposed change that was taken; 0 where the update was rejected.
    status : array (rounds, steps, participants)
        How each visit ended, as :class:`numpyro_fed.algorithms.pvi.Status`.
    """

    visits: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1), int), repr=False)
    damping: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)), repr=False)
    status: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1), int), repr=False)

    @property
    def _factors(self) -> Factors:
        return cast(Factors, self._fit.factors)

    def posterior(self) -> dict[str, dist.Distribution]:
        """Each global site's marginal, as a NumPyro distribution on its own support."""
        return self._factors.globals.marginals(self.state.server.params["guide"])

    def natural_parameters(self) -> Any:
        """Natural parameters of the posterior: the prior's, and all factors."""
        return self.state.server.params["guide"]

    def factor(self, silo: int) -> Any:
        """Natural parameters of a silo's factor; these sum to what the silos add to the prior.

        Known to the silo alone, or to a simulation.
        """
        b, i = self._silos.place(silo)
        state = jax.tree.map(lambda a: a[i], self.state.silos[b])
        return effective_factor(state, self.state.server.taken[silo])

    @property
    def communications(self) -> int:
        """Replies that silos have sent in this run."""
        return int(self.visits.size)

    @cached_property
    def log_evidence(self) -> np.ndarray:
        r"""Estimates of ``log p(y)`` (rounds,), one for the posterior after each round.

        .. math::
            \sum_m \mathbb{E}_q[\log p(y_m \mid z_G)] - \mathrm{KL}(q \,\|\, p)

        The sum of the local free energies at a fixed point, and a lower bound (Ashman et al.
        2022, Property 2.2(a)), where the messages have the silos' terms at the posteriors that they
        received. In a synchronous round these are all the posterior after the round before; in a
        sequential pass they are so at the fixed point. The last round's is evaluated at every
        silo. Where not every silo takes part in each round only that one is known: shape (1,).

        Raises
        ------
        ValueError
            Under a loss, or a divergence other than KL: ``losses`` then holds minus an objective
            that bounds no evidence.
        NonFiniteError
            If some silo's data are impossible under the posterior.
        """
        if self._factors.loss or self._factors.divergence:
            raise ValueError(
                "there is no evidence under a loss, or under a divergence other than KL. What was "
                "maximised is in .losses, with its sign turned."
            )
        silos = self._silos
        state = self.state._replace(round=jnp.zeros((), jnp.int32), schedule=())
        _, log, ok = self._factors.evaluation.advance(jax.random.key(0), state, silos.batches, 1)
        if not bool(ok):
            raise NonFiniteError(
                "the expected log likelihood at the posterior is not finite at some silo. Look at "
                "the supports of the sites, or run more rounds.",
                result=self,
                round=int(self.state.round),
                silos=(),
            )
        last = -np.asarray(log.losses)[:1]
        settings: Settings = self._factors.settings
        if settings.visits != settings.num_silos or settings.asynchronous:
            return last
        return np.concatenate([-self.losses[1:], last])

    @property
    def rejections(self) -> dict[str, int]:
        """How many updates and visits of this run went wrong, by what happened."""
        counts = Counter(Status(s).name.lower() for s in self.status.ravel())
        counts.pop("converged", None)
        never = {"never_visited": len(self.never_visited)}
        return {"rejected_updates": int((self.damping == 0).sum()), **never, **counts}

    @property
    def never_visited(self) -> list[int]:
        """Silos that have not replied yet: their data count for nothing."""
        visits = [
            (j, int(n))
            for batch, silos in zip(self._silos.batches, self.state.silos, strict=True)
            for j, n in zip(batch.silos.tolist(), silos.visits, strict=True)
        ]
        return sorted(j for j, n in visits if n == 0)

    def report(self) -> str:
        """Say in words what was taken and what was not, silo by silo and round by round."""
        rounds = len(self.damping)
        if not rounds:
            return "Loaded: what its rounds reported is not kept."
        lines = [
            f"{rounds} rounds, {self.communications} replies; damping "
            f"{self.damping.min():.3g} to {self.damping.max():.3g}."
        ]
        if self.never_visited:
            lines.append(f"never visited yet: silos {', '.join(map(str, self.never_visited))}.")
        first = int(self.state.round) - rounds
        for r, s in np.argwhere(self.damping == 0):
            silos = ", ".join(map(str, self.visits[r, s]))
            lines.append(f"round {first + r}: the update of silo {silos} was rejected.")
        for status in Status:
            if status is Status.CONVERGED:
                continue
            for j in np.unique(self.visits[self.status == status]):
                at = np.argwhere((self.visits == j) & (self.status == status))[:, 0] + first
                rounds_ = ", ".join(map(str, at[:5])) + (", ..." if len(at) > 5 else "")
                lines.append(f"silo {j}: {_WORDS[status]} in {len(at)} visits, rounds {rounds_}.")
        return "\n".join(lines)


_WORDS = {
    Status.NOT_CONVERGED: "the local optimiser had not converged",
    Status.NON_FINITE: "its reply was not finite and counted for nothing",
    Status.IMPROPER: "its proposal was improper and counted for nothing",
    Status.NOT_CONJUGATE: (
        "its likelihood is not conjugate, as it was with the data that the model was first run on, "
        "and counted for nothing: pass local=numpyro_fed.local.Optax()"
    ),
}
