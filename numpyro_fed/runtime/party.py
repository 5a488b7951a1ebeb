"""The size of a plan, as a silo's owner sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpyro_fed.algorithms.base import FederatedAlgorithm

AnyAlgorithm = FederatedAlgorithm[Any, Any]


class PlanSize(NamedTuple):
    """The size of a plan, as a silo's owner sees it.

    Attributes
    ----------
    num_silos : int
    num_rows : int
        The rows of this silo.
    num_parameters : int
        Globals and shared parameters, or a client's own latents.
    epsilon : float
        The budget of differential privacy that a run may spend; 0 for a method without one.
    delta : float
        The probability with which its bound may fail.
    multiplier : float
        The noise multiplier of a Gaussian release that tells as much as all exchanges of a run; 0
        for a method without a budget.
    protects : str
        The unit that the budget is for, and which data are neighbours: ``"row add"``.
    shares_noise : bool
        Whether a silo's reply has a share of the noise alone, so that it must be seen in a sum over
        all silos.
    """

    num_silos: int
    num_rows: int
    num_parameters: int
    epsilon: float = 0.0
    delta: float = 0.0
    multiplier: float = 0.0
    protects: str = ""
    shares_noise: bool = False
