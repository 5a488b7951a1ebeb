"""What a silo does with the messages of one method: it answers each from a state of its run.

A message to a silo holds the name of an exchange, the id of the run, two numbers, the key of the
noise and the leaves of ``Down`` (:class:`~numpyro_fed.rounds.messages.Question`). The reply holds
the leaves of ``Reply``. Both sides know the structure of a message, since they have built the same
algorithm from the same plan.

A silo keeps the state before and after the last message of each run, and the reply. So a message
that comes twice is answered twice in the same way and moves nothing; and where the server has not
used a reply, it asks from the state before.
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import Store
from numpyro_fed.basics.programs import is_double
from numpyro_fed.basics.trees import drop_weak_types
from numpyro_fed.data.silo_data import SiloData, signature
from numpyro_fed.methods.method import PlanSize, recipe
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.posterior.at_silo import AtSilo, Held
from numpyro_fed.posterior.built import Built
from numpyro_fed.rounds.exchange import Exchange, ExchangeId, unknown_exchange
from numpyro_fed.rounds.keys import silo_key
from numpyro_fed.rounds.messages import (
    BEGIN,
    BEGINNINGS,
    DRAWS,
    GO_ON,
    SEARCH,
    WITHOUT_START,
    Question,
    message_shapes,
    pack,
    read,
    unpack,
    write,
)
from numpyro_fed.rounds.states import Sampled
from numpyro_fed.text.plan import Plan
from numpyro_fed.vertical.method import VerticalMethod

AnyMethod = RowMethod[Any, Any] | VerticalMethod[Any]
# Compiled exchanges of a plan that are kept. A run has at most ten; a server that asks for
# corrections of ever other settings would otherwise fill the memory.
MAX_PROGRAMS = 32
# Runs whose states a silo keeps. A call of ``nf.fit`` makes some six, of which it may correct any.
# More take more of the silo's disk, two states each.
MAX_RUNS = 16
# Ids of runs that were forgotten, so that a message that comes late does not begin one again.
MAX_FORGOTTEN = 10_000


@dataclass(frozen=True)
class RunStates:
    """A silo's states of one run: those between which the server may still choose."""

    beginning: str  # the message by which the run began; it says which algorithm is run
    # The state after the message of each number: the one from which the last message was answered,
    # and the one after it. If the server never uses the last reply, it goes on from the former.
    states: dict[int, Any]
    number: int = 0  # that of the last message, with its SHA-256 and the reply to it, which a
    digest: str = ""  # message that comes again gets once more
    reply: bytes = b""

    def state_at(self, question: Question) -> Any:
        """Return the state from which the server asks."""
        if question.used not in self.states:
            raise ModelError(
                f"the server asks from the state after message {question.used}, but this silo has "
                f"those after {sorted(self.states)} of this run. Go on from the last result of a "
                "run, or begin again."
            )
        return self.states[question.used]

    def to_bytes(self) -> bytes:
        """Return the run as bytes."""
        # An exchange such as a correction leaves the state as it is: that is written once.
        distinct = {id(state): i for i, state in enumerate(self.states.values())}
        head = {
            "beginning": self.beginning,
            "labels": ",".join(map(str, self.states)),
            "places": ",".join(str(distinct[id(state)]) for state in self.states.values()),
            "number": str(self.number),
            "digest": self.digest,
        }
        arrays: dict[str, ArrayLike] = {"reply": np.frombuffer(self.reply, np.uint8)}
        for i, state in enumerate(self.states.values()):
            if distinct[id(state)] == i:
                arrays |= pack(f"{i}", state)
        return write(arrays, head)

    @classmethod
    def from_bytes(cls, content: bytes, shapes_of: Callable[[str], Sequence[Any]]) -> RunStates:
        """Return the run that was written, with states of one of the shapes for its beginning."""
        head, arrays = read(content)
        labels, places = (list(map(int, head[name].split(","))) for name in ("labels", "places"))
        *others, last = shapes_of(head["beginning"])
        found = {}
        for i in set(places):
            # In the first of the structures that fits.
            for like in others:
                with suppress(DataError):
                    found[i] = unpack(f"{i}", like, arrays)
                    break
            else:
                found[i] = unpack(f"{i}", last, arrays)
        states = {label: found[i] for label, i in zip(labels, places, strict=True)}
        reply = arrays["reply"].tobytes()
        return cls(head["beginning"], states, int(head["number"]), head["digest"], reply)


class SiloRuns:
    """A silo's part in one method of a server: it answers the messages of its runs.

    ``secret`` and ``row_ids`` are those of :class:`numpyro_fed.Silo`. ``facts`` are JSON; ``size``
    is that of the accepted plan.
    """

    def __init__(
        self,
        method: AnyMethod,
        silo: Mapping[str, Any],
        *,
        secret: Array | str | None = "auto",
        row_ids: ArrayLike | None = None,
        store: Store | None = None,
    ):
        # Of the words of a key, which depends on JAX's generator.
        self._key_shape, self._asked = jax.random.key_data(jax.random.key(0)).shape, 0
        # A server that repeats a key must not get the same noise again, or two replies at two
        # places differ by the predictors alone.
        self._fresh_noise = isinstance(secret, str) and method.hides_by_noise
        if isinstance(secret, str):
            secret = _unknown_key() if self._fresh_noise else None
        self._data = method.read_silo(silo)
        self.facts = method.describe(silo, row_ids).to_json()
        self.method, self._silo, self._secret = method, silo, secret
        self._store = store
        self._accepted: tuple[str, int] | None = None
        self.sampled: Sampled | None = None
        self.size = PlanSize(0, 0, 0)

    def for_other_runs(self, store: Store | None) -> Self:
        """Return the same for another server's runs; one plan is compiled once."""
        other = copy.copy(self)
        other._store, other.sampled = store, None
        other._runs, other._forgotten = OrderedDict(), OrderedDict()
        if self._fresh_noise:
            other._secret = _unknown_key()
        return other

    def accept(self, plan: str, number: int) -> None:
        """Build the algorithm from the agreed plan, as silo ``number`` of all."""
        if (plan, number) != self._accepted:
            agreed = Plan.from_json(plan)
            self.method.check_plan(agreed, self.facts, number)
            data = self.method.read_silo(self._silo, agreed, number)
            programs = shared_programs(self.method, agreed, data)
            size = self.method.size_of(agreed, programs.built, data)
            self._number, self._data, self.size = number, data, size
            self._programs, self._checked = programs, set[tuple[_Programs, ExchangeId]]()
            # The posterior here, by what kind of run has begun and a message's settings.
            self._posterior = lru_cache(MAX_PROGRAMS)(self._posterior_of)
            self._accepted = plan, number
        # No runs but those in the store, which are read when needed. The one that was used least
        # recently stands first.
        self._runs, self._forgotten = OrderedDict[str, RunStates](), OrderedDict[str, None]()

    def rows_that_count(self) -> int:
        """Return the number of the silo's rows that have an outcome, once a plan is accepted."""
        return self.method.rows_that_count(self._programs.built, self._data)

    def rows_of(self, site: str) -> tuple[bool, int]:
        """Return whether other rows share the latents of a site's rows, and how many these are."""
        fm = self._programs.built.model
        plate = next((s.plate for s in fm.sites if s.name == site), None)
        outer = any(p.name == plate and p.outer for p in fm.plates)
        return outer, fm.sizes(self._data).get(plate or "", 0)

    def array(self, name: str) -> np.ndarray:
        """Return an array of the silo's data."""
        return np.asarray(self._data.arrays[name])

    def _known_run(self, run: str) -> RunStates | None:
        """Return the states of a run, in an earlier process too; None if the silo has none."""
        if run not in self._runs and self._store is not None:
            content = self._store.get(run)
            if content is not None:
                self._runs[run] = RunStates.from_bytes(
                    content, lambda name: self._programs_of(name).state_shapes(self._data)
                )
        if run in self._runs:
            self._runs.move_to_end(run)
        return self._runs.get(run)

    def _keep(self, run: str, states: RunStates) -> None:
        """Keep the states of a run, on the disk before this returns; forget the oldest."""
        if run in self._forgotten:
            raise ModelError(
                "a message is of a run that this silo has forgotten: it keeps the states of the "
                f"last {MAX_RUNS} runs. Begin again."
            )
        self._runs[run] = states
        self._runs.move_to_end(run)
        if self._store is not None:
            self._store.put({run: states.to_bytes()})
        for old in list(self._runs)[:-MAX_RUNS]:
            del self._runs[old]
            self._forgotten[old] = None
        if self._store is not None:
            # Those of an earlier process, too, which this one may never have read.
            self._store.trim(MAX_RUNS)
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _programs_of(self, beginning: str) -> _Programs:
        """Return the programs for runs that began by the message ``beginning``."""
        return self._programs.without_start if beginning == WITHOUT_START else self._programs

    def _posterior_of(self, beginning: str, settings: str) -> AtSilo:
        """Return the posterior at this silo, by the settings of a message with draws."""
        programs, asked = self._programs_of(beginning), ExchangeId(DRAWS, settings)
        return self.method.posterior_at(programs.plan, programs.built, asked.read_settings())

    def exchange_of(self, question: Question) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return the exchange of a question, compiled, and the shapes of the server's message."""
        programs = self._programs_of(self._run_of(question).beginning)
        if (programs, question.id) not in self._checked:
            self.method.check_exchange(programs.built, question.id, self._number, self._data)
            if len(self._checked) == MAX_PROGRAMS:
                self._checked.clear()
            self._checked.add((programs, question.id))
        return programs.exchange(question.id, self._data)

    def handle(self, message: bytes, cost: AbstractContextManager[None]) -> bytes:
        """Return the reply to a message; a new one is answered within ``cost``."""
        head, arrays = read(message)
        question, digest = Question.of(head), hashlib.sha256(message).hexdigest()
        run = self._known_run(question.run)
        if run is not None and question.number == run.number and digest == run.digest:
            return run.reply
        with cost:
            if run is not None and question.number < run.number:
                raise ModelError(
                    f"message {question.number} ('{question.exchange}') comes after message "
                    f"{run.number} of the same run was answered. It was sent twice or came late: "
                    "drop it."
                )
            if question.exchange not in (*BEGINNINGS, GO_ON):
                states, reply = self._step(self._run_of(question), question, arrays)
            elif run is None:
                states, reply = self._begin(question, arrays), write({})
            else:
                raise ModelError("this run has begun already, by another message. Begin again.")
            kept = replace(states, number=question.number, digest=digest, reply=reply)
            self._keep(question.run, kept)
            return reply

    def _step(
        self, run: RunStates, question: Question, arrays: Mapping[str, np.ndarray]
    ) -> tuple[RunStates, bytes]:
        """Return a run after the exchange of a question, and the reply."""
        if self.size.multiplier and question.used != run.number:
            raise ModelError(
                f"the server asks from the state after message {question.used}, and silo "
                f"{self._number} has answered message {run.number} of this run. Under differential "
                "privacy a step is answered once, since another answer would spend more than the "
                "budget. Begin again, with a budget of its own."
            )
        before, programs = run.state_at(question), self._programs_of(run.beginning)
        exchange, expected = self.exchange_of(question)
        key, down = silo_key(self._key(arrays), self._number), unpack("down", expected, arrays)
        _refuse_unknown(arrays)
        with programs.one_at_first(question.id):
            noise = exchange.silo_noise(key, before)
            sent, after = exchange.silo(noise, down, before, self._data)
        if isinstance(after, Sampled):
            self.sampled = after
        after = after if question.exchange in programs.stateful else before
        states = {question.used: before, question.number: after}
        return replace(run, states=states), write(pack("reply", sent))

    def _begin(self, question: Question, arrays: Mapping[str, np.ndarray]) -> RunStates:
        """Return a run that begins at a first state, or at a state of another run."""
        if question.exchange == GO_ON:
            _refuse_unknown(arrays)
            if self.size.multiplier:
                raise ModelError(
                    "a run under differential privacy is not gone on with by another run: from one "
                    "state there could be several, each of which would spend. Begin again."
                )
            before = self._known_run(question.settings)
            if before is None:
                raise ModelError(
                    f"silo {self._number} is to go on from a run of which it has no state. Begin "
                    "again."
                )
            return RunStates(before.beginning, {question.number: before.state_at(question)})
        self.sampled = None
        key_silo = jax.random.fold_in(self._key(arrays), self._number)
        _refuse_unknown(arrays)
        programs = self._programs_of(question.exchange)
        with programs.one_at_first(ExchangeId(question.exchange)):
            state = programs.init[question.exchange](key_silo, self._data)
        state = drop_weak_types(state)
        return RunStates(question.exchange, {question.number: state})

    def at(self, draws: bytes) -> tuple[AtSilo, Mapping[str, np.ndarray], Held]:
        """Return the posterior at this silo for a message with draws, its arrays, and the state."""
        head, arrays = read(draws)
        question = Question.of(head)
        if question.exchange != DRAWS:
            raise DataError(
                f"a message of '{question.exchange}' came, where draws of the globals are expected:"
                " draws_for_silo(key, n, silo=...) of the server's result makes them."
            )
        run = self._run_of(question)
        held = Held(self._number, run.state_at(question), self._data)
        return self._posterior(run.beginning, question.settings), arrays, held

    def _run_of(self, question: Question) -> RunStates:
        """Return the states of the run of a message."""
        run = self._known_run(question.run)
        if run is None:
            raise ModelError(
                f"silo {self._number} has no state of this run: it keeps those of the last runs "
                "that have begun here. Begin again."
            )
        return run

    def _key(self, arrays: Mapping[str, np.ndarray]) -> Array:
        """Return the key of a message, mixed with the secret if the silo has one."""
        bits, shape = arrays.get("key"), self._key_shape
        if bits is None or (bits.shape, bits.dtype) != (shape, np.dtype(np.uint32)):
            came = "nothing" if bits is None else f"{bits.dtype}{bits.shape}"
            raise DataError(f"a message holds {came} as its key, where uint32{shape} is expected.")
        if self._secret is None:
            return jax.random.wrap_key_data(jnp.asarray(bits))
        key = self._secret
        for word in bits:
            key = jax.random.fold_in(key, word)
        if self._fresh_noise:
            self._asked += 1
            key = jax.random.fold_in(key, self._asked)
        return key


class _Programs:
    """The algorithm of a plan with its compiled programs, for silos whose data have one shape."""

    def __init__(self, method: AnyMethod, plan: Plan, built: Built):
        self.plan, self.built, self._method = plan, built, method
        begin, search = built.algorithm.init_silo, built.first_algorithm.init_silo
        self.init = {
            name: jax.jit(search if name == SEARCH else begin)
            for name in (BEGIN, SEARCH, WITHOUT_START)
        }
        run_rounds = (*built.opening, built.algorithm.round)
        # All other exchanges (an evaluation, a correction) leave the silo's state as it is.
        self.stateful = {exchange.name for round_ in run_rounds for exchange in round_.exchanges}
        # Exchanges, compiled, each with the shapes of the server's message.
        self._exchanges: dict[ExchangeId, tuple[Exchange[Any, Any, Any], Any]] = {}
        # Those that have run once, and locks for the others.
        self._have_run, self._locks = set[ExchangeId](), defaultdict[ExchangeId, Lock](Lock)
        self._building = Lock()
        self._without_start: _Programs | None = None

    @property
    def without_start(self) -> _Programs:
        """Return the programs of the same method for a run without a start."""
        if self.built.without_start is None:
            return self
        with self._building:
            if self._without_start is None:
                self._without_start = _Programs(self._method, *self.built.without_start())
            return self._without_start

    def state_shapes(self, data: SiloData) -> list[Any]:
        """Return the structures of the states that a silo with these data may have."""
        return [jax.eval_shape(self.init[n], jax.random.key(0), data) for n in (SEARCH, BEGIN)]

    def exchange(self, asked: ExchangeId, data: SiloData) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return an exchange, compiled, and the shapes of the server's message."""
        if (found := self._exchanges.get(asked)) is not None:
            return found
        with self._building:
            if asked not in self._exchanges:
                if len(self._exchanges) >= MAX_PROGRAMS:
                    self._exchanges.clear()
                    self._have_run.clear()
                    self._locks.clear()
                round_, sender = self._method.round_of(self.built, asked)
                for exchange, down, _ in message_shapes(sender, (round_,), data):
                    self._exchanges.setdefault(exchange.id, (exchange.compiled(), down))
            if (found := self._exchanges.get(asked)) is None:
                raise unknown_exchange(asked.name)
            return found

    @contextmanager
    def one_at_first(self, asked: ExchangeId) -> Iterator[None]:
        """Let one silo at a time run a program for the first time, so that one compiles it."""
        if asked not in self._have_run:
            with self._locks[asked]:
                if asked not in self._have_run:
                    yield
                    self._have_run.add(asked)
                    return
        yield


# Programs of this process's silos, by all that they depend on, for as long as a silo has them.
_SHARED: WeakValueDictionary[Hashable, _Programs] = WeakValueDictionary()
_BUILDING = Lock()


def shared_programs(method: AnyMethod, plan: Plan, data: SiloData) -> _Programs:
    """Return the programs of a plan; silos with one text and data of one shape share them."""
    made = recipe(method, "")
    # Clients that hold columns differ in them.
    text = method.fingerprint(plan, data) if isinstance(method, RowMethod) else None
    if text is None or made.lost:  # it cannot be told whether another silo's are the same
        return _Programs(method, plan, method.build(plan))
    # The programs hold their method and its model, so that no other model gets this id. The plan as
    # JSON, since it may hold NaN, which is not equal to itself.
    what = type(method), json.dumps(made.settings), id(method.model), text, plan.to_json()
    key = what, signature(data), is_double()
    with _BUILDING:
        if (found := _SHARED.get(key)) is None:
            found = _SHARED[key] = _Programs(method, plan, method.build(plan))
        return found


def _refuse_unknown(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise an error for an array of a message that is neither its key nor a part of ``Down``."""
    if unknown := sorted(name for name in arrays if name != "key" and not name.startswith("down")):
        raise DataError(f"a message holds '{unknown[0]}', which was not agreed.")


def _unknown_key() -> Array:
    """Return a key of 128 random bits from the operating system."""
    # jax.random.key takes 32 bits of a seed, which could
    # be tried one by one: fold in three more words.
    words = np.frombuffer(secrets.token_bytes(16), np.uint32)
    key = jax.random.key(words[0])
    for word in words[1:]:
        key = jax.random.fold_in(key, word)
    return key
