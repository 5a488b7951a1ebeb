"""The base class of methods for vertical models, and the start of their runs at a mode."""

from __future__ import annotations

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from tqdm.auto import tqdm

from numpyro_fed.basics.errors import DataError, ModelError, StartWarning, one_of
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.data.padding import bucket, one_by_one
from numpyro_fed.data.silo_data import SiloData, read_one, signature
from numpyro_fed.guides.guide import Guide
from numpyro_fed.methods.method import (
    RUNTIMES,
    FederatedMethod,
    Outcome,
    PlanSize,
    RunOptions,
    for_silos,
    in_process,
    over_federation,
    recipe,
)
from numpyro_fed.methods.start import Begun
from numpyro_fed.posterior.built import Built, CompiledMethod
from numpyro_fed.rounds.exchange import ExchangeId, FederatedAlgorithm, Round
from numpyro_fed.rounds.federation import Federation
from numpyro_fed.rounds.keys import exchange_key, server_key, typed_key
from numpyro_fed.rounds.messages import SEARCH, Crossings
from numpyro_fed.rounds.names import SAMPLE
from numpyro_fed.rounds.runtime import RunOutcome, Runtime, State
from numpyro_fed.rounds.silos import Batches, Silos, on_device
from numpyro_fed.rounds.step import Conversation
from numpyro_fed.text.clients import (
    LATENT_OF_SUM,
    check_same_digests,
    check_same_ids,
    digest,
    read_ids,
    rows_of,
)
from numpyro_fed.text.fingerprint import SOFTWARE, check_terms, terms_of
from numpyro_fed.text.plan import VERSION, Facts, Plan, facts_of_columns, shared_text
from numpyro_fed.text.values import SupportCheck, as_bucket
from numpyro_fed.text.vertical import Text, VerticalSplit, is_array, split
from numpyro_fed.vertical.algorithm import VFLAlgorithm
from numpyro_fed.vertical.curvature import NoModeError
from numpyro_fed.vertical.parties import VerticalAlgorithm
from numpyro_fed.vertical.result import VerticalResult, VerticalStart
from numpyro_fed.vertical.search import VerticalSearch

# Folded into the key of a run for what comes before its rounds, whose numbers never come to it.
OPENING = 2**31 - 1
OTHER_COLUMNS = (
    "client {} holds columns of another shape or kind than the plan says. The plan must be made "
    "from the facts of this client, as the client of this number."
)


@dataclass(frozen=True)
class VerticalMethod(FederatedMethod[Outcome]):
    """A method for models whose clients hold some columns of every row.

    Parameters
    ----------
    model : callable
        A NumPyro model with one :func:`~numpyro_fed.client_sum`.
    likelihood : {"augmented", "power"}
    share_response : bool
        Whether clients know the response and the rest of the server's data.
    rho : float, optional
        Standard deviation of the auxiliary variables; None for none.
    """

    result_class: ClassVar[type[VerticalResult]] = VerticalResult

    likelihood: str = field(default="augmented", kw_only=True)
    share_response: bool = field(default=False, kw_only=True)
    rho: float | None = field(default=None, kw_only=True)
    _fits: dict[Hashable, CompiledMethod] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.likelihood not in ("augmented", "power"):
            raise ValueError(f"likelihood={self.likelihood!r}: expected 'augmented' or 'power'.")
        if self.likelihood == "power" and not self.share_response:
            raise ValueError(
                "under the power likelihood every client evaluates the likelihood itself, for "
                "which it must know the response: say share_response=True, or use the augmented "
                "model."
            )

    @property
    def hides_by_noise(self) -> bool:
        return self.rho is not None

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
            The arguments of the model: clients' columns, the response, and others. A
            :class:`numpyro_fed.Federation` in the place of the columns stands for clients in other
            processes.
        row_ids : sequence of arrays of int or str, optional
            The ids of each client's rows, and last those of the server if it has ids. All must have
            the same rows in the same order. Clients in other processes have theirs there, and the
            last ones here are the server's.
        init_state, progress_bar, runtime, stop, callback, every
            As for :meth:`SFVI.run`.

        Raises
        ------
        ModelError, DataError, GuideError
            Before anything is compiled, for input that cannot work.
        NonFiniteError
            If the bound turns NaN or infinite; the error's ``result`` is the last good state.
        CallbackError
            If the callback raised; the error's ``result`` is the callback's argument.
        Interrupted
            By Ctrl-C, as in :meth:`SFVI.run`.
        """
        key = typed_key(key)
        options = RunOptions(num_rounds, progress_bar, stop, callback, every)
        fit, hosted = self._compiled_for(args, kwargs, runtime, row_ids)
        if progress_bar:
            tqdm.write(str(_crossings(fit, hosted)))
        if init_state is None:
            state, start = begin(fit, key, hosted.batches)
        else:
            state, start = fit.runtime.go_on(fit.check_state(init_state, hosted)), None
        return self._run_rounds(Begun(fit, state, start), hosted, key, options)

    def messages(self, *args: object, **kwargs: object) -> Crossings:
        """Return all arrays that cross between server and clients, with their shapes.

        They cross before the first round, as often as ``VerticalResult.start`` says, and in each
        round.

        A client's ``part`` has a number for each row. In the exact split it is the predictor, and
        many draws of it reveal the client's columns up to what the predictor does with them: a
        linear predictor of ``p`` columns spans their column space in about ``p`` rounds
        (``benchmarks/vertical_reveals.py``). A sum over clients reveals as much about the sum of
        predictors alone, but with two clients each can subtract its own part.

        With ``rho`` of :class:`VFL` every number is sent with noise of that standard deviation,
        drawn anew in each round. The mean over ``T`` rounds is then known up to ``rho / sqrt(T)``
        and the spread of the posterior: noise hides single draws, and not what many rounds have in
        common. Amortised auxiliary variables follow the predictor from draw to draw, so that after
        one or two thousand rounds they reveal the columns as the exact split does, up to a linear
        map. Mean-field ones reveal little but the mean predictor: choose them if columns are to be
        hidden. Noise hides nothing from a server that knows its key, which is why a
        :class:`Silo` draws it with a key that only the client knows.

        The server sends the gradient of the log likelihood for each row. It is not the response,
        but for many likelihoods reveals it: the sign of the gradient is a Bernoulli response.

        Examples
        --------
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def predictor(x):
        ...     return x * numpyro.sample("slope", dist.Normal(0, 1))
        >>> def model(xs, y=None):
        ...     eta = nf.client_sum("client", predictor, xs)
        ...     with numpyro.plate("row", eta.shape[0]):
        ...         numpyro.sample("y", dist.Normal(eta, 1), obs=y)
        >>> print(nf.VFL(model, rho=1.0).messages([np.ones(3), np.ones(3)], np.zeros(3)))
        when   exchange       from    to      array              shape   dtype
        start  begin at zero  server  client  at_best.better     ()      bool
        start  begin at zero  server  client  at_best.slope      (3,)    float32
        start  begin at zero  server  client  at_best.curvature  (3,)    float32
        start  begin at zero  server  client  tau                ()      float32
        start  begin at zero  client  server  ok                 ()      bool     summed
        round  draw           client  server  part               (1, 3)  float32  summed
        round  draw           client  server  term               ()      float32  summed
        round  draw           client  server  ok                 ()      bool     summed
        round  step           server  client  part               (1, 3)  float32
        round  step           client  server  resting            ()      float32  summed
        round  step           client  server  ok                 ()      bool     summed
        """
        return _crossings(*self._compiled_for(args, kwargs, "simulation"))

    def load(
        self, path: str | Path, *args: object, runtime: str = "simulation", **kwargs: object
    ) -> Outcome:
        """Return a fit from a file of :meth:`VerticalResult.save` and the model's arguments.

        Raises
        ------
        SavedStateError
            If the file is damaged, or belongs to another model, guide or version, or other data.
        """
        fit, hosted = self._compiled_for(args, kwargs, runtime)
        return self._load_run(path, fit, hosted)[0]

    def _compiled_for(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runtime: str,
        row_ids: Sequence[ArrayLike] | None = None,
    ) -> tuple[CompiledMethod, Silos]:
        one_of("runtime", runtime, *RUNTIMES)
        inputs = (*args, *kwargs.values())
        clients = next((a for a in inputs if isinstance(a, Federation)), None)
        if clients is not None:
            own = None if row_ids is None else row_ids[-1]
            return self._over(clients, args, kwargs, own)
        whole = Text.of(self.model, args, kwargs)
        parts = split(whole, share_response=self.share_response)
        if row_ids is not None:
            check_same_ids(row_ids, parts.model.rows, len(parts.clients))
        precision = str(jnp.result_type(float))
        cache_key = (runtime, precision, parts.arguments, *map(signature, parts.clients))
        if cache_key not in self._fits:
            plan = Plan(facts_of_columns(whole.data), len(parts.clients), (), ())
            compiled = self._compiled(parts, plan, partial(in_process, runtime))
            self._fits[cache_key] = replace(compiled, recipe=recipe(self, runtime))
        fit = replace(self._fits[cache_key], server_data=parts.server)
        # At every run, since the response's values may be other ones than at the first.
        checks = fit.cached("supports", lambda: SupportCheck.of_server(parts.model))
        checks.check(as_bucket(parts.server))
        sizes: list[dict[str, int]] = [{} for _ in parts.clients]
        buckets = (
            one_by_one(parts.clients, sizes)
            if runtime == "host"
            else bucket(parts.clients, sizes, may_pad=False)
        )
        return fit, Silos(parts.clients, tuple(buckets), on_device(buckets))

    def _over(
        self,
        federation: Federation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        row_ids: ArrayLike | None,
    ) -> tuple[CompiledMethod, Silos]:
        """Return the fit for clients that a federation stands for among the model's arguments."""
        bound = inspect.signature(self.model).bind(*args, **kwargs).arguments

        def arguments(columns: list[Any]) -> dict[str, Any]:
            return {k: columns if a is federation else a for k, a in bound.items()}

        name, facts = federation.describe(for_silos(self, federation.names))
        plan, parts = self.agree(tuple(map(Facts.from_json, facts)), arguments, row_ids)
        make = partial(self._compiled, parts, plan)
        fit, hosted = over_federation(federation, name, plan, make)
        # The server's data may be others than at an earlier run.
        return replace(fit, server_data=parts.server), hosted

    def _compiled(
        self, parts: VerticalSplit, plan: Plan, reach: Callable[..., Runtime]
    ) -> CompiledMethod:
        """Return the fit without the server's data."""
        built = self.assemble(parts)
        return CompiledMethod(
            built=built,
            runtime=reach(built.algorithm),
            plan=plan,
            reach=reach,
            checks=built.row_checks,
        )

    def agree(
        self,
        clients: tuple[Facts, ...],
        arguments: Callable[[list[Any]], Mapping[str, Any]],
        row_ids: ArrayLike | None = None,
    ) -> tuple[Plan, VerticalSplit]:
        """Return the plan of clients with these facts, and the server's part in it.

        ``arguments(columns)`` returns the model's arguments by name; it is called with zeros.
        """
        if any(client.version != VERSION for client in clients):
            raise ModelError(
                "a client's facts were written by another version. All parties must run the same."
            )
        digests = {f"client {j}": client.ids for j, client in enumerate(clients)}
        # The plan goes to all clients, whom the digests of others do not concern.
        clients = tuple(replace(client, ids="") for client in clients)
        zeros = [client.zeros()["columns"] for client in clients]
        # Only the predictor is run at a client, on the columns as the client holds them: a model
        # must not change them. Numbers that are all different show a permutation or a product.
        numbered = jax.tree.map(
            lambda a: (
                np.arange(1, a.size + 1).reshape(a.shape).astype(a.dtype) if is_array(a) else a
            ),
            zeros,
        )
        text = Text.of(self.model, (), dict(arguments(numbered)))
        received = text.columns(text.data.arrays, jax.random.key(0)).columns
        for j, (sent, arrived) in enumerate(zip(numbered, received, strict=True)):
            pairs = (list(filter(is_array, jax.tree.leaves(tree))) for tree in (sent, arrived))
            forms: list[Any] = [jax.tree.structure(tree) for tree in (sent, arrived)]
            if forms[0] != forms[1] or not all(map(np.array_equal, *pairs)):
                raise ModelError(
                    f"the model gives the predictor of client {j} something else than the columns "
                    "that the client holds, and nothing of the model but the predictor is run "
                    "there. Compute it in the predictor, or before the client describes its "
                    "columns."
                )
        given = dict(arguments(zeros))
        parts = split(Text.of(self.model, (), given), share_response=self.share_response)
        SupportCheck.of_server(parts.model).check(as_bucket(parts.server))
        shared = shared_text(parts.server.arrays) if self.share_response else ""
        if row_ids is not None:
            digests["the server"] = digest(read_ids(row_ids, parts.model.rows, "the server"))
        check_same_digests(digests)
        facts = facts_of_columns(read_one("the server", given))
        software = SOFTWARE if all(c.software == SOFTWARE for c in clients) else ""
        clients_data = zip(parts.model.clients, parts.clients, strict=True)
        terms = tuple(terms_of(p.traces, data, by_value=not software) for p, data in clients_data)
        plan = Plan(facts, len(clients), (), (), "{}", terms, software, clients, shared)
        return plan, parts

    def describe(self, silo: object, row_ids: ArrayLike | None = None) -> Facts:
        """Return the facts of a client's columns: shapes, dtypes, plain values, digest of ids."""
        facts = facts_of_columns(self.read_silo(silo))
        if row_ids is None:
            return facts
        rows = rows_of(silo) or np.shape(row_ids)[0]
        return replace(facts, ids=digest(read_ids(row_ids, rows, "this client")))

    def read_silo(self, silo: object, plan: Plan | None = None, number: int = 0) -> SiloData:
        """Return a client's columns, checked; with the plan, as the algorithm takes them."""
        if plan is None:
            return read_one("a client", {"columns": silo})
        expected = self._split(plan).clients[number]
        own = {"columns": silo, "predictor": expected.kwargs["predictor"]}
        data = plan.client_data(own, f"client {number}")
        if signature(data) != signature(expected):
            raise DataError(OTHER_COLUMNS.format(number))
        return data

    def check_plan(self, plan: Plan, facts: str, number: int) -> None:
        """Raise an error for a plan that does not come from these facts of client ``number``."""
        own = replace(Facts.from_json(facts), ids="")
        if not 0 <= number < plan.num_silos or plan.clients[number] != own:
            raise DataError(OTHER_COLUMNS.format(number))
        parts, by_value = self._split(plan), not plan.software
        traces = parts.model.clients[number].traces
        mine = terms_of(traces, parts.clients[number], by_value=by_value)
        check_terms(plan.terms[number], mine, f"client {number}", by_value=by_value)

    @abstractmethod
    def assemble(self, parts: VerticalSplit) -> Built:
        """Return the algorithm for a model that is split over its parties."""

    def built(
        self, parts: VerticalSplit, v: VerticalAlgorithm, guide: Guide, settings: dict[str, Any]
    ) -> Built:
        """Return an algorithm with the server's guide, and settings of which saved states hold."""
        if self.likelihood == "power" and parts.model.below:
            raise ModelError(LATENT_OF_SUM.format(parts.model.below[0]))
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), parts.server)
        searches = isinstance(v, VFLAlgorithm) and v.from_start
        return Built(
            model=parts.model.server,
            guide=guide,
            algorithm=v.algorithm(like),
            parties=v,
            settings={"method": type(self).__name__, **settings},
            search=VerticalSearch(cast(VFLAlgorithm, v), like) if searches else None,
        )

    def result_of(
        self, run: RunOutcome, compiled: CompiledMethod, hosted: Silos, *, quiet: bool = False
    ) -> Any:
        return self.result_class(run.losses, run.state, compiled, hosted)

    def build(self, plan: Plan) -> Built:
        """Return the algorithm from model and plan, the same at every party."""
        return self.assemble(self._split(plan))

    def round_of(
        self, built: Built, asked: ExchangeId
    ) -> tuple[Round, FederatedAlgorithm[Any, Any]]:
        """Return the round that declares an exchange, and the algorithm whose states it has.

        It is one of a run, or the one in which all draw.
        """
        if asked.name == SAMPLE:
            number = asked.read_settings()["num_draws"]
            question, _ = _algorithm(built).sampling(number)
            return Round((question,)), built.algorithm
        return built.round_of(asked.name)

    def size_of(self, plan: Plan, built: Built, data: SiloData) -> PlanSize:
        """Return how large a plan is, as a client's owner sees it."""
        model = _algorithm(built).model
        return PlanSize(plan.num_silos, model.rows, max(party.dim for party in model.clients))

    def rows_that_count(self, built: Built, data: SiloData) -> int:
        """Return the number of rows, whose outcomes a client does not know."""
        return _algorithm(built).model.rows

    def check_exchange(self, built: Built, asked: ExchangeId, number: int, data: SiloData) -> None:
        """Do nothing: any exchange suits any client."""
        return

    def _split(self, plan: Plan) -> VerticalSplit:
        text = Text.of(self.model, (), plan.facts.zeros())
        return split(text, share_response=self.share_response)


def _algorithm(built: Built) -> VerticalAlgorithm:
    return cast(VerticalAlgorithm, built.parties)


def _crossings(fit: CompiledMethod, hosted: Silos) -> Crossings:
    """Return all arrays that cross between the server and the first client."""
    data = fit.plan.template() if hosted.elsewhere else hosted.data[0]
    return fit.built.messages(data, fit.server_data, silo="client")


def begin(fit: CompiledMethod, key: Array, batches: Batches) -> tuple[State, VerticalStart | None]:
    """Return the first state of a run, and the mode if the run starts at one."""
    search = fit.built.search
    if search is None:
        return fit.runtime.init(key, batches), None
    runtime = fit.cached(SEARCH, lambda: fit.reach(search.algorithm, begin=SEARCH))
    key_search = jax.random.fold_in(key, OPENING)
    first = runtime.init(key_search, batches)
    ask = Conversation(runtime.transport(batches), key_search, fit.plan.num_silos, first.silos)
    key_server = server_key(exchange_key(key_search, 0, 0, 1))
    try:
        server, log_density = search.run(
            ask, key_server, first.server, cast(SiloData, fit.server_data)
        )
    except NoModeError:
        log_density = np.nan
    if ask.unusable or np.isnan(log_density):
        warnings.warn(
            "no start was found where the log density and its derivatives are finite: the run "
            "starts at zero in unconstrained space. Double precision may help.",
            category=StartWarning,
            stacklevel=3,
        )
        return fit.runtime.init(key, batches), None
    state = drop_weak_types(State(jnp.zeros((), jnp.int32), server, ask.silos))
    return state, VerticalStart(log_density, ask.number) if search.vertical.basis_width else None
