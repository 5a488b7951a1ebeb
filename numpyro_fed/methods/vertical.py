"""What the methods for vertical models have in common: who holds what, runs, saved fits."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from tqdm.auto import tqdm

from numpyro_fed.algorithms.base import FederatedAlgorithm, Round, settings_in
from numpyro_fed.algorithms.vertical.begin import looks
from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.methods.federated import RUNTIMES, SEARCHES, FederatedMethod, Outcome, RunOptions
from numpyro_fed.methods.mode import SEARCH
from numpyro_fed.model.clients import LATENT_OF_SUM, rows_of
from numpyro_fed.model.data import SiloData, read_one, signature
from numpyro_fed.model.fingerprint import source_hash
from numpyro_fed.model.observed import Supports, as_bucket
from numpyro_fed.model.padding import bucket, one_by_one
from numpyro_fed.model.roles import Text, VerticalSplit, split, split_vertical, with_server_data
from numpyro_fed.model.row_ids import check_same_ids, digest, read_ids
from numpyro_fed.model.vertical import VerticalModel
from numpyro_fed.model.vertical_facts import Shapes, VerticalPlan
from numpyro_fed.results.run import Silos
from numpyro_fed.results.vertical import VerticalBuilt, VerticalFit, VerticalStart
from numpyro_fed.runtime.crossing import Crossings
from numpyro_fed.runtime.drive import drive
from numpyro_fed.runtime.noise import one_key
from numpyro_fed.runtime.stack import Batches, Runtime, Single, State, on_device
from numpyro_fed.trees import drop_weak_types

MOST = 60  # rounds of the search
CYCLES = 5  # of the search, each but the first from a Newton step of all parties
CLOSE = 1e-3  # nats that such a step promises, where the search is at its end
OPENING = 2**31 - 1  # folded into the key of a run, for what comes before its rounds
NEEDS_RESPONSE = (
    "under the power likelihood every client evaluates the likelihood itself, for which it must "
    "know the response: say share_response=True, or use the augmented model."
)


@dataclass(frozen=True)
class VerticalMethod(FederatedMethod[VerticalFit, Outcome]):
    """A model whose clients hold some columns of every row, and how to fit it.

    Parameters
    ----------
    model : callable
        A NumPyro model with one :func:`~numpyro_fed.client_sum`.
    share_response : bool
        Whether clients know the response and what else the server holds.
    """

    model: Callable[..., Any]
    share_response: bool = field(default=False, kw_only=True)
    _fits: dict[Hashable, VerticalFit] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @abstractmethod
    def assemble(self, roles: VerticalSplit) -> VerticalBuilt:
        """Return the algorithm for a text that is split over clients."""

    @abstractmethod
    def _settings(self, built: VerticalBuilt) -> dict[str, Any]:
        """Return what a saved state must agree with, besides sites and rows."""

    def run(
        self,
        key: Array,
        num_rounds: int,
        *args: object,
        init_state: State | None = None,
        progress_bar: bool = True,
        runtime: str = "simulation",
        row_ids: Sequence[ArrayLike] | None = None,
        stop: str | None = None,
        callback: Callable[[Outcome], object] | None = None,
        every: int = 100,
        **kwargs: object,
    ) -> Outcome:
        """Fit the model to its arguments.

        Parameters
        ----------
        key : jax.Array
            Round ``r`` uses ``fold_in(key, r)``.
        num_rounds : int
            Steps of the optimiser.
        *args, **kwargs
            Of the model: clients' columns, the response, whatever it takes.
        row_ids : sequence of arrays of int or str, optional
            What each client, and last the server if it has ids, calls its rows: refused unless all
            have the same rows in the same order.
        init_state, progress_bar, runtime, stop, callback, every
            As for :meth:`SFVI.run`.

        Raises
        ------
        ModelError, DataError, GuideError
            Before anything is compiled, for input that cannot work.
        NonFiniteError
            If the bound turns NaN or infinite; the error's ``result`` is the last good state.
        CallbackError
            If the callback raised; the error's ``result`` is what it was shown.
        Interrupted
            By Ctrl-C, as in :meth:`SFVI.run`.
        """
        key = one_key(key)
        course = RunOptions(num_rounds, None, progress_bar, stop, callback, every)
        fit, held = self._compiled_for(args, kwargs, runtime)
        if row_ids is not None:
            model = fit.built.model
            check_same_ids(row_ids, model.rows, len(model.clients))
        if progress_bar:
            tqdm.write(str(fit.messages(held)))
        if init_state is None:
            state, start = begin(fit, key, held.batches, SEARCHES[runtime])
        else:
            state, start = fit.check_state(init_state, held), None
        course = replace(course, server_data=fit.server_data)
        return self._driven(fit, held, key, state, start, course)

    def messages(self, *args: object, **kwargs: object) -> Crossings:
        """Return what each party sees: all arrays that cross, with their shapes, before the
        first round (as often as ``VerticalResult.start`` says) and in each round.
        """
        fit, held = self._compiled_for(args, kwargs, "simulation")
        return fit.messages(held)

    def load(
        self, path: str | Path, *args: object, runtime: str = "simulation", **kwargs: object
    ) -> Outcome:
        """Rebuild a fit from what :meth:`VerticalResult.save` wrote, and the model's arguments.

        Raises
        ------
        SavedStateError
            If the file is damaged, or belongs to another model, guide or version, or other data.
        """
        fit, held = self._compiled_for(args, kwargs, runtime)
        return self._loaded(path, fit, held)[0]

    def _compiled_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], runtime: str
    ) -> tuple[VerticalFit, Silos]:
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime={runtime!r}: expected one of {sorted(RUNTIMES)}.")
        roles = split_vertical(self.model, args, kwargs, share_response=self.share_response)
        held = _held(roles, runtime)
        precision = str(jnp.result_type(float))
        known = (runtime, precision, roles.arguments, *map(signature, roles.clients))
        if known not in self._fits:
            built = self.assemble(roles)
            self._fits[known] = VerticalFit(
                built=built,
                runtime=RUNTIMES[runtime](built.algorithm, None),
                said=self._description(built),
                server_data=roles.server,
                supports=Supports.of_server(roles.model),
                source=source_hash(self.model),
            )
        fit = self._fits[known]
        fit.supports.check(as_bucket(roles.server))
        return replace(fit, server_data=roles.server), held

    def describe(self, silo: object, row_ids: ArrayLike | None = None) -> Shapes:
        """Return what a client says of its columns: shapes, dtypes and plain values, and by which
        digest its rows' ids are known.
        """
        shapes = Shapes.of(self.hold(silo))
        if row_ids is None:
            return shapes
        rows = rows_of(silo) or np.shape(row_ids)[0]
        return replace(shapes, ids=digest(read_ids(row_ids, rows, "this client")))

    def read_plan(self, text: str) -> VerticalPlan:
        """Return a plan from JSON."""
        return VerticalPlan.from_json(text)

    def hold(self, silo: object, plan: VerticalPlan | None = None, number: int = 0) -> SiloData:
        """Return a client's columns, checked; with the plan, as the algorithm takes them."""
        if plan is None:
            return read_one("a client", {"columns": silo})
        expected = self._roles(plan).clients[number]
        predictor = expected.kwargs["predictor"]
        data = read_one(f"client {number}", {"columns": silo, "predictor": predictor})
        data = with_server_data(data, plan.shared_text) if self.share_response else data
        if signature(data) != signature(expected):
            raise DataError(
                f"client {number} holds columns of another shape or kind than the plan says. The "
                "plan must be made from the facts of this client, as the client of this number."
            )
        return data

    def build(self, plan: VerticalPlan) -> VerticalBuilt:
        """Return the algorithm, from text and plan: the same at every party."""
        return self.assemble(self._roles(plan))

    def round_of(self, built: VerticalBuilt, name: str) -> Round:
        """Return the round that has this exchange: of a run, or in which all parties draw."""
        if "sample" in (asked := settings_in(name)):
            return built.sampling(asked["sample"])
        return built.round_of(name)

    def admit(self, built: VerticalBuilt, name: str, number: int, data: SiloData) -> None:
        """Refuse nothing: any exchange suits any client."""
        return

    def _roles(self, plan: VerticalPlan) -> VerticalSplit:
        text = Text.of(self.model, (), plan.arguments.zeros())
        return split(text, share_response=self.share_response)

    def _description(self, built: VerticalBuilt) -> dict[str, Any]:
        model = built.model
        clients = {
            scoped: [s.kind, list(s.shape), s.support]
            for j, half in enumerate(model.clients)
            for s in half.sites
            for scoped in model.scoped(j, {s.name: None})
        }
        server = {s.name: [s.kind, list(s.shape), s.support] for s in model.server.sites}
        return {
            "settings": {"method": type(self).__name__, **self._settings(built)},
            "sites": clients | server,
            "rows": model.rows,
            "static": [repr(value) for value in built.static],
        }


def _held(roles: VerticalSplit, runtime: str) -> Silos:
    sizes: list[dict[str, int]] = [{} for _ in roles.clients]
    if runtime == "host":
        buckets = one_by_one(roles.clients, sizes)
    else:
        buckets = bucket(roles.clients, sizes, may_pad=False)
    return Silos(roles.clients, tuple(buckets), on_device(buckets))


def check_power(model: VerticalModel) -> None:
    """Refuse latents whose distribution depends on the sum."""
    for name in model.below:
        raise ModelError(LATENT_OF_SUM.format(name))


def begin(
    fit: VerticalFit,
    key: Array,
    batches: Batches,
    runtime_of: Callable[[FederatedAlgorithm[Any, Any]], Runtime],
) -> tuple[State, VerticalStart | None]:
    """Return the first state of a run, and the mode if it is there."""
    built = fit.built
    if built.search is None:
        return fit.runtime.init(key, batches), None
    search = built.search
    runtime = fit.cached(SEARCH, lambda: runtime_of(search))
    *spreads, beginning = (fit.quick_round(x, runtime) for x in built.begins)
    mine = jax.random.fold_in(key, OPENING)
    found: State | None = runtime.init(mine, batches)
    exchanges = 0
    if found is not None and spreads:
        found, exchanges = _searched(fit, mine, found, batches, runtime, spreads[0])
    if found is not None:
        server, silos, info, _ = beginning(
            mine, found.server, found.silos, batches, fit.server_data
        )
        if info.ok:
            state = drop_weak_types(State(jnp.zeros((), jnp.int32), server, silos))
            start = VerticalStart(-float(info.loss), exchanges + 1) if spreads else None
            return state, start
    warnings.warn(
        "no start was found where the log density and its derivatives are finite: the run starts "
        "at zero in unconstrained space. Double precision may help.",
        stacklevel=3,
    )
    return fit.runtime.init(key, batches), None


def _searched(
    fit: VerticalFit,
    key: Array,
    state: State,
    batches: Batches,
    runtime: Runtime,
    spread: Single,
) -> tuple[State | None, int]:
    """Return the search at the mode, None if it fails, and how many exchanges it took."""
    asked = 0
    for cycle in range(CYCLES):
        run = drive(runtime, key, state, batches, MOST, False, fit.server_data, stop=True)
        if run.refused is not None:
            raise run.refused
        if run.failure is not None:
            return None, 0
        state = run.state
        for _ in range(1 if cycle else looks(fit.vertical)):
            server, silos, info, _ = spread(
                key, state.server, state.silos, batches, fit.server_data
            )
            if not info.ok:
                return None, 0
            state, asked = state._replace(server=server, silos=silos), asked + 1
        if state.server.spread.ritz.gain <= CLOSE:
            break
    return state, 2 * int(state.round) + asked
