"""The parts of a method that parties in processes of their own need: facts, plan, algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import ExchangeId, FederatedAlgorithm, Round
from numpyro_fed.model.data import SiloData

AnyAlgorithm = FederatedAlgorithm[Any, Any]
Ids = Sequence[int] | Sequence[str] | np.ndarray | None


class Sendable(Protocol):
    """The facts of a silo, in a form that can be sent."""

    def to_json(self) -> str: ...


class PartyBuilt(Protocol):
    """All that a party has built from the plan: the algorithm, the search, the opening rounds."""

    @property
    def algorithm(self) -> FederatedAlgorithm[Any, Any]: ...

    @property
    def first_algorithm(self) -> FederatedAlgorithm[Any, Any]: ...

    @property
    def opening(self) -> Sequence[Round]: ...

    @property
    def without_start(self) -> Callable[[], tuple[Any, Any]] | None:
        """Return the function that builds the same for a run that has found no mode."""


SiloInput = TypeVar("SiloInput", contravariant=True)  # a silo's rows by name, or columns
Plan = TypeVar("Plan")
Built = TypeVar("Built", bound=PartyBuilt)


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


class Held(NamedTuple):
    """A silo's number, its state at the end of a run, and its data; they never leave it."""

    number: int
    state: Any
    data: SiloData


class PosteriorAtSilo(Protocol):
    """The posterior at one silo, by draws of the globals in a message of the server."""

    def sample_posterior(
        self, key: Array, arrays: Mapping[str, np.ndarray], silo: Held
    ) -> dict[str, Array]:
        """Return all sites at the server's draws."""

    def predict(
        self,
        key: Array,
        arrays: Mapping[str, np.ndarray],
        silo: Held,
        new: Mapping[str, Any] | None,
        *,
        mean: bool,
    ) -> dict[str, Array]:
        """Return predictive draws, or means, for new data or for the silo's own rows."""


@runtime_checkable
class Party(Protocol[SiloInput, Plan, Built]):
    """The part of a method that a node needs; every party has the same text and settings."""

    @property
    def hides_by_noise(self) -> bool:
        """Return whether silos draw noise in order to hide what they send."""

    def describe(self, silo: SiloInput, row_ids: Ids = None) -> Sendable:
        """Return the facts of a silo."""

    def read_plan(self, text: str) -> Plan:
        """Return a plan from JSON."""

    def read_silo(self, silo: SiloInput, plan: Plan | None = None, number: int = 0) -> SiloData:
        """Return a silo's data, checked; with the plan, in the form that the algorithm takes."""

    def check_plan(self, plan: Plan, facts: str, number: int) -> None:
        """Raise an error for a plan that does not come from these facts of silo ``number``."""

    def build(self, plan: Plan) -> Built:
        """Return all that server and silos build from the plan."""

    def round_of(self, built: Built, asked: ExchangeId) -> tuple[Round, AnyAlgorithm]:
        """Return the round that declares an exchange, and the algorithm whose states it has."""

    def check_exchange(self, built: Built, asked: ExchangeId, number: int, data: SiloData) -> None:
        """Raise an error for an exchange that a silo's rows do not allow."""

    def size_of(self, plan: Plan, built: Built, data: SiloData) -> PlanSize:
        """Return how large a plan is, as a silo's owner sees it."""

    def posterior_at(
        self, plan: Plan, built: Built, settings: Mapping[str, Any]
    ) -> PosteriorAtSilo:
        """Return the posterior at a silo, by the settings in a message with draws."""

    def rows_that_count(self, built: Built, data: SiloData) -> int:
        """Return the number of a silo's rows that have an outcome."""

    def sends_unhidden(self, name: str) -> bool:
        """Return whether an exchange sends, without noise, numbers that noise hides in a run."""


class PlanLike(Protocol):
    """The part of a plan that a runtime needs."""

    @property
    def num_silos(self) -> int:
        """Return how many silos there are."""

    def template(self) -> SiloData:
        """Return zeros of the shapes of one silo's data."""
