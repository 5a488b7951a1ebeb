"""How well the others predict each silo's rows, from the weighted draws that there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Exchange
from numpyro_fed.algorithms.importance.likelihood import Integration
from numpyro_fed.algorithms.importance.loo import LeaveOutDown, LeftOut, leave_out
from numpyro_fed.algorithms.sfvi import down_of
from numpyro_fed.errors import optional
from numpyro_fed.results.built import Built
from numpyro_fed.results.rows import Result

# Shape of a tail above which ratios are not known by so many draws (Vehtari et al. 2024).
MAX_K = 0.7
MESSAGE = "the log predictive density is not finite at {}."


@dataclass(frozen=True, eq=False)
class LeaveOut:
    """A table of what the others say of each silo; it prints as one.

    Attributes
    ----------
    log_density : array (num_silos,)
        The log predictive density of a silo's rows given those of all others,
        ``log p(y_j | y_-j)``.
    pareto_k : array (num_silos,)
        The shape of the tail of the ratios; above 0.7 the other two numbers are not known.
    shift : array (num_silos,)
        How far the mean of a global moves when the silo is left out, the farthest one, in posterior
        standard deviations.
    num_exchanges : int
    reason : str
        Why no further draws could be made where a row is not known; empty if there is no reason.
    """

    log_density: np.ndarray
    pareto_k: np.ndarray
    shift: np.ndarray
    num_exchanges: int = 1
    reason: str = ""

    @property
    def total(self) -> float:
        """The sum of all log densities, by which models are compared; not known if one is not."""
        return float(self.log_density.sum())

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the silos whose numbers are not known, since a few draws carry the ratios."""
        return tuple(np.flatnonzero(~(self.pareto_k <= MAX_K)).tolist())

    def better_of(self, other: LeaveOut, silos: Sequence[int]) -> LeaveOut:
        """Return the table with some silos' rows from another one, where its tails are lighter.

        The exchanges of both count.
        """
        taken = np.isin(np.arange(len(self.pareto_k)), silos) & ~(self.pareto_k <= other.pareto_k)
        return LeaveOut(
            np.where(taken, other.log_density, self.log_density),
            np.where(taken, other.pareto_k, self.pareto_k),
            np.where(taken, other.shift, self.shift),
            self.num_exchanges + other.num_exchanges,
        )

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame, a row for each silo."""
        columns = {name: getattr(self, name) for name in ("log_density", "pareto_k", "shift")}
        columns["known"] = self.pareto_k <= MAX_K
        return optional("pandas").DataFrame(columns).rename_axis("silo")

    def __str__(self) -> str:
        lines = [f"{'silo':>6} {'log density':>12} {'k-hat':>7} {'shift':>7}"]
        for j, (density, k, shift) in enumerate(
            zip(self.log_density, self.pareto_k, self.shift, strict=True)
        ):
            mark = "  not known" if j in self.unknown else ""
            lines.append(f"{j:6d} {density:12.2f} {k:7.2f} {shift:7.2f}{mark}")
        unknown = ", ".join(str(j) for j in self.unknown)
        mark = f"  not known, for it counts silo {unknown}" if unknown else ""
        lines.append(f"{'total':>6} {self.total:12.2f}{mark}")
        return "\n".join(lines)

    __repr__ = __str__


def leaving_out(
    built: Built, settings: Mapping[str, Any], *, little: bool = False
) -> Exchange[Any, Any, Any]:
    """Return the exchange that leaves silos out, which silos elsewhere build from its settings."""
    integration = Integration(settings["inner_draws"], settings["nodes"])
    fm, guide = built.model, built.guide
    return leave_out(
        fm,
        guide,
        integration.likelihood(fm, guide),
        built.algorithm,
        settings["num_draws"],
        settings["batch_size"],
        json.dumps(dict(settings)),
        little=little,
    )


def table_of(
    key: Array, result: Result, integration: Integration, z_G: np.ndarray, log_weights: np.ndarray
) -> LeaveOut:
    """Return the table by draws (n, dim) with log weights (n,), in one exchange."""
    fit, n = result._fit, len(log_weights)
    question = fit.question("leave out", leaving_out, integration, n)
    draws = down_of(fit.guide, result.shared, jnp.asarray(z_G))
    found: LeftOut = result.ask_once(
        question, LeaveOutDown(draws, jnp.asarray(log_weights)), key, MESSAGE
    )
    density, k, shift = (np.asarray(a, np.float64) for a in found)
    return LeaveOut(density, k, shift)
