"""The server for silos in processes of their own."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic

from jax import Array

from numpyro_fed.errors import DataError, StartWarning
from numpyro_fed.methods.base import FederatedMethod, Outcome, RunOptions
from numpyro_fed.methods.mode import NoStartError, begin
from numpyro_fed.methods.rows import Method
from numpyro_fed.model.facts import Facts, Plan
from numpyro_fed.results.base import BuiltRun, Ready
from numpyro_fed.results.built import Built
from numpyro_fed.results.importance import importance_correct
from numpyro_fed.results.mode import Mode
from numpyro_fed.results.rows import Fit, Result
from numpyro_fed.runtime.node import (
    SEARCH,
    WITHOUT_START,
    Channel,
    PlanLike,
    Send,
    Weights,
    remote,
)
from numpyro_fed.runtime.noise import typed_key
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import Runtime, ServerData, State

MakeRuntime = Callable[..., Runtime]  # (algorithm, schedule, begin) -> Runtime


class PartyServer(ABC, Generic[Ready, Outcome]):
    """A server whose silos or clients are in processes of their own."""

    _method: FederatedMethod[Ready, Outcome]
    _built: BuiltRun

    @property
    @abstractmethod
    def _parties(self) -> PlanLike:
        """Return the number of parties, with the shapes of the first one's data."""

    @abstractmethod
    def _fit(self, runtime: Runtime) -> Ready:
        """Return the compiled fit, with a runtime that reaches the parties."""

    @abstractmethod
    def _begin(
        self,
        fit: Ready,
        key: Array,
        make_runtime: MakeRuntime,
        progress_bar: bool,
    ) -> tuple[Ready, State, object]:
        """Return the fit that is run, its first state, and the mode at which it begins.

        ``make_runtime`` makes runtimes that reach the parties.
        """

    def _start_run(
        self,
        key: Array,
        send: Send,
        progress_bar: bool,
        weights: Sequence[Weights] | None = None,
        schedule: Schedule[Any] | None = None,
    ) -> tuple[Ready, None, Array, State, object]:
        """Return the arguments of ``_run_rounds``: fit, no data, key, first state and start."""
        key, agreed = typed_key(key), self._parties
        channel = Channel(send, agreed.num_silos, weights)
        make_runtime: MakeRuntime = partial(remote, plan=agreed, channel=channel)
        fit = self._fit(make_runtime(self._built.algorithm, schedule))
        fit, state, start = self._begin(fit, key, make_runtime, progress_bar)
        return fit, None, key, state, start


class ServerNode(PartyServer[Fit, Result]):
    """A server whose silos are in processes of their own (:class:`numpyro_fed.SiloNode`).

    It knows the silos' facts and their messages, and nothing else.

    Parameters
    ----------
    method : SFVI, PVI, ...
    facts : sequence of str
        The facts of each silo, JSON.

    Attributes
    ----------
    plan : str
        JSON, for every silo to accept.

    Raises
    ------
    ModelError
        Naming a silo that does not fit together with the others.
    """

    def __init__(self, method: Method[Any, Any], facts: Sequence[str]):
        if isinstance(getattr(method, "start", None), Result):
            raise DataError(
                "start= is a result of silos in this process, whose guides it takes over. Over "
                "nodes begin at the mode (start='mode'), or at none."
            )
        self._method: Method[Any, Any] = method
        all_facts = [Facts.from_json(f) for f in facts]
        self._plan = method.agree(all_facts)
        self._rows = [rows_of(f) for f in all_facts]
        self._built: Built = method.build(self._plan)
        self.plan = self._plan.to_json()

    @property
    def _parties(self) -> Plan:
        return self._plan

    def _fit(self, runtime: Runtime) -> Fit:
        return Fit(plan=self._plan, certify=importance_correct, built=self._built, runtime=runtime)

    def _begin(
        self,
        fit: Fit,
        key: Array,
        make_runtime: MakeRuntime,
        progress_bar: bool,
    ) -> tuple[Fit, State, Mode | None]:
        search = partial(make_runtime, schedule=None, begin=SEARCH)
        try:
            return fit, *begin(fit, key, (), search, progress_bar=progress_bar)
        except NoStartError as error:
            warnings.warn(error.warning, category=StartWarning, stacklevel=4)
            fit = fit.without_start(partial(make_runtime, begin=WITHOUT_START)) or fit
            return fit, *begin(fit, key, (), search)

    def run(
        self,
        key: Array,
        num_rounds: int,
        send: Send,
        *,
        server_data: ServerData = None,
        progress_bar: bool = False,
        stop: str | None = None,
    ) -> Result:
        """Run rounds; ``send(silo, message) -> reply`` carries bytes.

        The result is what the server knows: the posterior of the globals, losses, the evidence,
        :func:`numpyro_fed.importance_correct` (which asks the silos once more). A silo's latents
        stay there.
        """
        options: RunOptions[Result] = RunOptions(num_rounds, server_data, progress_bar, stop)
        started = self._start_run(key, send, progress_bar, self._rows, self._built.schedule)
        return self._method._run_rounds(*started, options)


def rows_of(facts: Facts) -> Weights:
    """Return the range in which a silo's number of rows is, by its facts.

    Facts have the number of each plate's rows rounded up to a power of two.
    """
    sizes = dict(facts.sizes)
    rounded = [sizes[plate.name] for plate in facts.plates if not plate.outer]
    # A number that is rounded up to n, a power of two, is above the half of n.
    return Weights(sum(n // 2 + 1 for n in rounded), sum(rounded))
