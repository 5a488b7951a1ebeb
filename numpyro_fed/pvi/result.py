"""The result of a fit by partitioned variational inference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
import numpyro.distributions as dist

from numpyro_fed.after.own_rows import silo_number
from numpyro_fed.basics.programs import in_precision_of_object, jit_once
from numpyro_fed.data.silo_data import label
from numpyro_fed.numerics.expfam.gaussian_family import rounding
from numpyro_fed.posterior.result import Result
from numpyro_fed.pvi.families import GAUSSIAN
from numpyro_fed.pvi.server import PartitionedVI
from numpyro_fed.pvi.silo import Down, ServerState, Status


@dataclass(frozen=True, eq=False)
class PVIResult(Result):
    """A fit by :class:`numpyro_fed.PVI` or a member of its family.

    Attributes
    ----------
    losses : array (rounds,)
        Minus the free energy. Each silo's term is at the posterior that it received, so that round
        ``i`` shows where round ``i - 1`` led; :attr:`log_evidence` shifts them.
    state : State
        Everything that a run needs to go on: ``run(..., init_state=result.state)``.
    visits : array (rounds, steps, participants)
        Who took part in each update of the server, in order.
    damping : array (rounds, steps)
        The share of each proposed change that was taken; 0 where the update was rejected.
    status : array (rounds, steps, participants)
        How each visit ended, as ``numpyro_fed.pvi.silo.Status``.
    own : array (rounds, steps)
        Whether the server's own factor converged; true where it has none.
    """

    visits: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1), int), repr=False)
    damping: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)), repr=False)
    status: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 1), int), repr=False)
    own: np.ndarray = field(default_factory=lambda: np.ones((0, 1), bool), repr=False)

    @property
    def _pvi(self) -> PartitionedVI:
        return cast(PartitionedVI, self._fit.built.factors)

    @property
    def _server(self) -> ServerState:
        """Return the server's state."""
        return cast(ServerState, self.state.server)

    @in_precision_of_object
    def __call__(self) -> dict[str, dist.Distribution]:
        """Return each global site's marginal; it is ``result.posterior()``."""
        return self._pvi.globals.marginals(self._server.params.guide)

    @in_precision_of_object
    def natural_parameters(self) -> Any:
        """Return the natural parameters of the posterior: those of the prior plus all factors."""
        return self._server.params.guide

    @in_precision_of_object
    def factor(self, silo: int | str) -> Any:
        """Return the natural parameters of a silo's factor; prior and factors sum to the posterior.

        They are known to the silo alone, or to a run in one process.
        """
        silo = silo_number(silo, self)
        state = self._silo_state(silo)
        return state.effective_factor(self._server.taken[silo])

    @property
    def communications(self) -> int:
        """The number of replies that silos have sent in this run."""
        return int(self.visits.size)

    @cached_property
    @in_precision_of_object
    def log_evidence(self) -> Any:
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
        if self.stages:  # of nf.fit, which has a correction
            return super().log_evidence
        pvi, server = self._pvi, self._server
        if pvi.has_loss or pvi.has_divergence:
            raise ValueError(
                "there is no evidence under a loss, or under a divergence other than KL. What was "
                "maximised is in .losses, with its sign turned."
            )
        key = jax.random.key(0)
        words = (
            "the expected log likelihood at the posterior is not finite at {}. Look at the "
            "supports of the sites, or run more rounds."
        )
        theta, eta = server.params.theta, server.params.guide
        asked = Down(theta, server.total)
        log_lik = self.ask_once(pvi.evaluation, asked, key=key, message=words)
        kl = jit_once(pvi.kl_to_prior)(key, theta, eta)
        last = np.array([float(log_lik) - float(kl)])
        if not np.isfinite(last).all():
            raise self.unusable(words)
        if pvi.visits != pvi.num_silos or pvi.asynchronous:
            return last
        return np.concatenate([-self.losses[1:], last])

    @property
    def rejections(self) -> dict[str, int]:
        """The number of updates and visits of this run that went wrong, by what happened."""
        counts = Counter(Status(s).name.lower() for s in self.status.ravel())
        counts.pop("converged", None)
        if not self.own.all():
            counts["server_not_converged"] = int((~self.own).sum())
        never = {"never_visited": len(self.never_visited)}
        return {"rejected_updates": int((self.damping == 0).sum()), **never, **counts}

    @property
    def nothing_accepted(self) -> bool:
        """Whether no visit of this run, nor of those before it, has changed the posterior."""
        taken = (self.status < Status.NON_FINITE) & (self.damping[..., None] > 0)
        if not len(taken) or taken.any():
            return False
        if self._pvi.from_mode:  # factors begin as parabolas
            return int(self.state.round) == len(self.losses)
        factors = (self._server.total, self._server.server_factor)
        changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), *factors)
        return not any(jax.tree.leaves(changed))

    def _silo_numbers(self, name: str) -> np.ndarray:
        """Return the field ``name`` of each silo's state (num_silos,)."""
        found = np.zeros(self.num_silos, int)
        if self._silos.elsewhere:  # from this run's messages
            for who, status in zip(self.visits.ravel(), self.status.ravel(), strict=True):
                found[who] = status if name == "status" else found[who] + 1
            return found
        for batch, silos in zip(self._silos.batches, self.state.silos, strict=True):
            found[np.asarray(batch.silos)] = np.asarray(getattr(silos, name))
        return found

    @property
    def never_visited(self) -> list[int]:
        """The silos that have not replied yet, so that their data count for nothing."""
        return np.flatnonzero(self._silo_numbers("visits") == 0).tolist()

    @property
    def remaining(self) -> float:
        """The estimated distance from the posterior to the fixed point of the rounds.

        It is in standard deviations, for the mean or the log standard deviation of the global that
        has furthest to go: the movement of the last round, divided by the share of the whole way
        that its damping and its visits took. It is zero where factors depend on the silos' own data
        alone and were taken in full, and with one silo; infinite where it cannot be known.
        """
        server, pvi = self._server, self._pvi
        taken = np.asarray(server.taken)
        damping_used = taken[taken > 0].min(initial=1.0)
        moved = float(server.progress.moved)
        if pvi.deletion in ("none", "prior"):
            return 0.0
        away = bool((self.status == Status.AWAY).any())
        if pvi.exact_after(int(server.progress.steps), away):
            return moved * (1 - damping_used) / damping_used
        # The server has a factor for the prior, or learns parameters.
        server_learns = pvi.globals.prior_outside is not None or bool(self.shared.theta)
        in_full = damping_used == 1 and pvi.pace == 1
        if pvi.num_silos == 1 and in_full and not server_learns:
            return 0.0
        pace = damping_used * pvi.pace
        return moved / pace if pace > 0 else np.inf

    @property
    def doubts(self) -> list[str]:
        """The reasons, in words, why the posterior is not at rest yet; empty for a good run.

        They are about the last visit of each silo and the last round, not about earlier ones.
        """
        server = self._server
        visited, status = self._silo_numbers("visits") > 0, self._silo_numbers("status")
        found = []
        if unvisited := self.never_visited:
            found.append(f"{_silos(unvisited)} never visited")
        for value, (words, _) in _WORDS.items():
            if len(silos := np.flatnonzero(visited & (status == value))):
                unsettled = value in (Status.NOT_CONVERGED, Status.IMPROPER)
                advice = self._pvi.if_unsettled if unsettled else ""
                found.append(f"{words} at {_silos(silos)}{advice}")
        refused = visited & (status < Status.NON_FINITE) & (np.asarray(server.taken) == 0)
        if refused.any():
            found.append(f"the last update of {_silos(np.flatnonzero(refused))} was rejected")
        if not bool(server.progress.own):
            found.append("the server's own factor, for the prior, had not converged")
        if visited.any() and not np.isfinite(self.remaining):
            found.append("such rounds do not tell whether the posterior has come to rest")
        elif visited.any() and self.remaining > MAX_REMAINING:
            found.append(
                f"the last round still moved the posterior, by {float(server.progress.moved):.2g} "
                f"standard deviations with about {self.remaining:.2g} to go: run more rounds"
            )
        if self._rounding > MAX_ROUNDING:
            dtype = jax.tree.leaves(self.natural_parameters())[0].dtype
            found.append(
                f"in {dtype} rounding alone moves the posterior by about "
                f"{self._rounding:.2g} standard deviations: centre and scale covariates and "
                "outcomes, or use double precision"
            )
        return found

    @property
    def trusted(self) -> bool:
        """Whether the certificate trusts the fit, and rounding moves nothing by a tenth of an sd.

        The certificate is computed in the same precision, and may not show rounding.
        """
        return self._rounding <= MAX_ROUNDING and super().trusted

    @cached_property
    @in_precision_of_object
    def _rounding(self) -> float:
        """The error of rounding in the posterior, in standard deviations, about."""
        eta, rows = self.natural_parameters(), max(n for _, n in self._fit.plan.largest)
        # In units of one rounding, measured on conjugate regressions. Errors of a sum over rows
        # grow like the square root of their number; without that term the loss on 20,000 raw rows
        # was said to be fifteen times smaller than it is.
        lost = max(5.0, 0.3 * math.sqrt(rows))
        return lost * rounding(eta[GAUSSIAN]) if GAUSSIAN in eta else 0.0

    def warning(self) -> str:
        """Return the warning after a run; empty if all that went wrong mended itself."""
        # Visits that did not converge are no reason to warn if the posterior has come to rest.
        wrong = {name.replace("_", " "): n for name, n in self.rejections.items() if n}
        if not self.doubts and set(wrong) <= {"not converged", "server not converged"}:
            return ""
        parts = [f"{n} {name}" for name, n in wrong.items()]
        parts += [f"not at rest yet: {'; '.join(self.doubts)}"] if self.doubts else []
        return f"{', '.join(parts)}: see result.report()."

    @property
    def settled(self) -> bool:
        """Whether the run has come to rest.

        That is: all silos were visited, their last visits converged and were taken, the server's
        own factor converged, and the last round moved nothing.
        """
        return not self.doubts

    def _run_summary(self) -> str:
        """Return in words which updates were taken and which not, by silo and round."""
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
                last = self._silo_numbers("status")[j] == status
                when = "" if last else ", but not in the last"
                words = _WORDS[status][1]
                who = label(j, self._silos.names)
                lines.append(f"{who}: {words} in {len(at)} visits{when}, rounds {rounds_}.")
        if not self.own.all():
            lines.append(
                f"server: its own factor, for the prior, had not converged in {(~self.own).sum()} "
                f"of {self.own.size} updates."
            )
        if self.doubts:
            lines.append(f"Not at rest: {'; '.join(self.doubts)}.")
        else:
            lines.append("The rounds have come to rest.")
        return "\n".join(lines)


def _silos(numbers: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"silo {shown}" if len(numbers) == 1 else f"silos {shown}"


# Standard deviations by which rounding may move the posterior: the tolerance of all verdicts.
MAX_ROUNDING = 0.1
# Standard deviations that may be left to go. Visits by gradients are noisy: at the fixed point a
# round still moves the posterior, and dividing by the share of the way magnifies that.
MAX_REMAINING = 0.2

# How a visit ended, in words: of the last one, and of any.
_WORDS = {
    Status.AWAY: ("no reply in the last round", "no reply"),
    Status.NOT_CONVERGED: (
        "the last visit had not converged",
        "the local optimiser had not converged",
    ),
    Status.NON_FINITE: (
        "the last reply was not finite and counted for nothing",
        "its reply was not finite and counted for nothing",
    ),
    Status.IMPROPER: (
        "the last proposal was improper and counted for nothing",
        "its proposal was improper and counted for nothing",
    ),
    Status.NOT_CONJUGATE: (
        "the likelihood is not conjugate and counted for nothing",
        "its likelihood was not conjugate around where the visit led, and counted for nothing: "
        "pass local=numpyro_fed.local.Optax()",
    ),
}
