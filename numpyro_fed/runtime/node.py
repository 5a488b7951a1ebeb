"""Silos in processes of their own: the node at a silo, and the runtime of the server.

A message to a silo holds the name of an exchange, the id of the run, the key of the noise and the
leaves of ``Down``. The reply holds the leaves of ``Reply`` (:mod:`numpyro_fed.runtime.messages`).
Both sides know the structure of a message, since they have built the same algorithm from the same
plan. A run begins with a message that makes every silo take its first state. All others name the
run, so that no silo answers with the state of another one.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.algorithms.base import (
    Down,
    Exchange,
    ExchangeId,
    FederatedAlgorithm,
    Reply,
    Round,
    Sampled,
    Up,
    unknown_exchange,
)
from numpyro_fed.errors import DataError, ModelError, ReplyError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.combine import combine, for_participants
from numpyro_fed.runtime.host import compile_visit, round_loop, single_with
from numpyro_fed.runtime.messages import pack, read, unpack, write
from numpyro_fed.runtime.noise import init_keys, silo_key, typed_key
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import Batches, Runtime, Single, Stacks, State, init_schedule
from numpyro_fed.runtime.step import (
    Answers,
    MessageShapes,
    Transport,
    compiled_in_parts,
    message_shapes,
)
from numpyro_fed.trees import drop_weak_types

Send = Callable[[int, bytes], bytes]
Ids = Sequence[int] | Sequence[str] | np.ndarray | None
# The three messages that begin a run. They stand on the wire: both sides must be of one version.
BEGIN = "begin"  # at the first state of the algorithm that is run
SEARCH = "begin the search"  # at the first state of the search for the mode
WITHOUT_START = "begin without a start"  # of the algorithm for runs that have found no mode


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

    def sender(self, round_: Round) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm to whose states a round belongs."""


SiloInput = TypeVar("SiloInput", contravariant=True)  # a silo's rows by name, or columns
Plan = TypeVar("Plan")
Built = TypeVar("Built", bound=PartyBuilt)


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

    def build(self, plan: Plan) -> Built:
        """Return all that server and silos build from the plan."""

    def round_of(self, built: Built, asked: ExchangeId) -> Round:
        """Return the round that declares an exchange."""

    def check_exchange(self, built: Built, asked: ExchangeId, number: int, data: SiloData) -> None:
        """Raise an error for an exchange that a silo's rows do not allow."""

    def sends_unhidden(self, name: str) -> bool:
        """Return whether an exchange sends, without noise, numbers that noise hides in a run."""


class PlanLike(Protocol):
    """The part of a plan that a runtime needs."""

    @property
    def num_silos(self) -> int:
        """Return how many silos there are."""

    def template(self) -> SiloData:
        """Return zeros of the shapes of one silo's data."""


class SiloNode(Generic[SiloInput, Plan, Built]):
    """A silo in a process of its own, which answers the server's messages.

    Parameters
    ----------
    method : SFVI, PVI, ...
        The same text and settings as at the server.
    silo : dict
        The silo's data, which never leave it; for a client of :class:`numpyro_fed.VFL` its columns.
    secret : jax.Array, "auto" or None
        A key that only the silo knows, mixed into the keys of its noise. ``"auto"`` is a
        new one from the operating system wherever noise hides what a silo sends (vertical models
        with ``rho``), else none. With None all numbers are those of a run in one process, and a
        server that keeps the keys of a run can take the noise off again; with a key of yours, a
        server that sends the same key twice gets the same noise twice.
    row_ids : array of int or str, optional
        The ids of a client's rows. They do not leave it; the facts hold their SHA-256, by which the
        server finds out whether all parties have the same rows in the same order.
    allow_unhidden : bool
        Whether to answer an exchange that sends, without noise, numbers that the method hides by
        noise: the importance correction of a vertical model with ``rho``, which takes predictors.

    Raises
    ------
    ModelError
        At a message before a plan was accepted, at one of a run that is not this silo's last, and
        for an exchange that is not known, not allowed, or that the silo's rows do not allow.
    DataError
        At a message of another kind than was agreed.

    Examples
    --------
    Server and silos in one process, with bytes between them:

    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> pvi = nf.PVI(model)
    >>> nodes = [nf.SiloNode(pvi, dict(y=np.array(y))) for y in ([1.0, 2.0], [3.0, 4.0, 5.0])]
    >>> server = nf.ServerNode(pvi, [node.facts() for node in nodes])
    >>> for j, node in enumerate(nodes):
    ...     node.accept(server.plan, j)
    >>> result = server.run(jax.random.key(0), 1, lambda j, message: nodes[j].handle(message))
    >>> round(float(result.posterior()["mu"].mean), 3)
    2.994
    """

    def __init__(
        self,
        method: Party[SiloInput, Plan, Built],
        silo: SiloInput,
        *,
        secret: Array | str | None = "auto",
        row_ids: Ids = None,
        allow_unhidden: bool = False,
    ):
        self._fresh_noise, self._asked = False, 0
        if not (secret is None or isinstance(secret, str)):
            typed_key(secret)
        if isinstance(secret, str):
            if secret != "auto":
                raise ValueError(f"secret={secret!r}: expected a jax.random.key, 'auto' or None.")
            secret = _unknown_key() if method.hides_by_noise else None
            # A server that repeats a key must not get the same noise again, or two replies at two
            # places differ by the predictors alone.
            self._fresh_noise = secret is not None
        self._data = method.read_silo(silo)
        self._facts = method.describe(silo, row_ids).to_json()
        self._method, self._silo, self._secret = method, silo, secret
        self._allow_unhidden = allow_unhidden
        self._built: Built | None = None
        self._sampled: Sampled | None = None

    def facts(self) -> str:
        """Return the silo's facts as JSON."""
        return self._facts

    def accept(self, plan: str, number: int) -> None:
        """Build the algorithm from the agreed plan, as silo ``number`` of all."""
        agreed = self._method.read_plan(plan)
        self._accepted = self._method.build(agreed)
        self._number = number
        self._data = self._method.read_silo(self._silo, agreed, number)
        self._state, self._run = None, np.zeros(0)
        self._use(self._accepted)

    def _use(self, built: Built) -> None:
        """Answer from now on by the algorithm of ``built``."""
        self._built = built
        self._init = {
            BEGIN: jax.jit(built.algorithm.init_silo),
            SEARCH: jax.jit(built.first_algorithm.init_silo),
            WITHOUT_START: jax.jit(built.algorithm.init_silo),
        }
        self._exchanges: dict[ExchangeId, tuple[Exchange[Any, Any, Any], Any]] = {}
        self._message_shapes: dict[ExchangeId, list[MessageShapes]] = {}
        run_rounds = (*built.opening, built.algorithm.round)
        # All other exchanges (an evaluation, a correction) leave the silo's state as it is.
        self._stateful = {exchange.name for round_ in run_rounds for exchange in round_.exchanges}

    def _built_for(self, beginning: str) -> Built:
        """Return what was built for runs that begin by the message ``beginning``."""
        build = self._accepted.without_start
        if beginning != WITHOUT_START or build is None:
            return self._accepted
        chosen: Built = build()[1]
        return chosen

    def handle(self, message: bytes) -> bytes:
        """Return the reply to a message of the server, as bytes."""
        if (built := self._built) is None:
            raise ModelError("this silo has not accepted a plan: call accept(plan, ...) first.")
        arrays = read(message)
        if not {"exchange", "settings", "run", "key"} <= arrays.keys():
            raise DataError(
                "a message to a silo names the exchange, its settings, the run and a key, but this "
                f"one holds {sorted(arrays)}. ServerNode makes them."
            )
        name, key = str(arrays["exchange"]), self._key(arrays["key"])
        asked = ExchangeId(name, str(arrays["settings"]))
        if name in self._init:
            if (chosen := self._built_for(name)) is not built:
                self._use(chosen)
            self._run, key_silo = arrays["run"], jax.random.fold_in(key, self._number)
            self._sampled = None
            self._state = drop_weak_types(self._init[name](key_silo, self._data))
            return write({})
        if not np.array_equal(arrays["run"], self._run):
            raise ModelError(
                f"silo {self._number} has begun another run since, and holds the local latents of "
                "that one. Correct or evaluate a result before the next run begins."
            )
        exchange, expected = self._exchange(built, asked)
        noise = exchange.silo_noise(silo_key(key, self._number), self._state)
        down = unpack("down", expected, arrays)
        reply, after = exchange.silo(noise, down, self._state, self._data)
        if name in self._stateful:
            self._state = after
        elif isinstance(after, Sampled):
            self._sampled = after
        return write(pack("reply", reply))

    def draws(self) -> dict[str, Array]:
        """Return this client's latents at the last draws of all parties, ``{site: (n, ...)}``.

        Sites have the names of the client's part of the text. Parties draw together at
        :meth:`VerticalResult.sample_together` of the server.
        """
        if self._sampled is None:
            raise DataError(
                "there are no draws here: the server draws, and every client with it, by "
                "sample_together(key, n) of a vertical model's result."
            )
        return self._sampled.values

    def _key(self, bits: np.ndarray) -> Array:
        """Return the key of a message, mixed with the secret if the silo has one."""
        if self._secret is None:
            return jax.random.wrap_key_data(jnp.asarray(bits))
        key = self._secret
        for word in bits:
            key = jax.random.fold_in(key, word)
        if self._fresh_noise:
            self._asked += 1
            key = jax.random.fold_in(key, self._asked)
        return key

    def _exchange(self, built: Built, asked: ExchangeId) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return an exchange, compiled, and the shapes of the server's message in it."""
        if asked not in self._exchanges:
            if self._method.sends_unhidden(asked.name) and not self._allow_unhidden:
                raise ModelError(
                    f"silo {self._number} is asked for predictors without the noise that hides "
                    "them in a run, and does not give them: its owner may say so by "
                    "SiloNode(..., allow_unhidden=True)."
                )
            self._method.check_exchange(built, asked, self._number, self._data)
            round_ = self._method.round_of(built, asked)
            if round_.id not in self._message_shapes:
                sender = built.sender(round_)
                self._message_shapes[round_.id] = message_shapes(sender, (round_,), self._data)
            shapes = self._message_shapes[round_.id]
            known = {crossed.exchange.id: crossed for crossed in shapes}
            if asked not in known:
                raise unknown_exchange(asked.name)
            exchange, down, _ = known[asked]
            self._exchanges[asked] = compile_visit(exchange), down
        return self._exchanges[asked]


def _unknown_key() -> Array:
    """Return a key of 128 random bits from the operating system."""
    # jax.random.key takes 32 bits of a seed, which could
    # be tried one by one: fold in three more words.
    words = np.frombuffer(secrets.token_bytes(16), np.uint32)
    key = jax.random.key(words[0])
    for word in words[1:]:
        key = jax.random.fold_in(key, word)
    return key


class Weights(NamedTuple):
    """The range of weights that a silo's replies may have."""

    least: float
    most: float


class Channel:
    """The server's connection to the silos, by a function ``send(silo, message) -> reply``.

    It knows the id of the present run, and the weights that each silo's replies may have.
    """

    def __init__(self, send: Send, num_silos: int, weights: Sequence[Weights] | None = None):
        self._send, self.num_silos, self._run = send, num_silos, np.zeros(0)
        self._weights = weights or [Weights(0.0, np.finfo(np.float64).max)] * num_silos

    def begin(self, name: str, key: Array) -> None:
        """Make every silo begin a new run, with a new id."""
        self._run = np.frombuffer(uuid.uuid4().bytes, np.uint32)
        for j in range(self.num_silos):
            self.send(j, ExchangeId(name), key, {})

    def send(
        self, silo: int, asked: ExchangeId, key: Array, arrays: Mapping[str, ArrayLike]
    ) -> bytes:
        """Send the arrays of an exchange to a silo, and return its reply as bytes."""
        bits = jax.random.key_data(key)
        head: dict[str, ArrayLike] = {
            "exchange": np.array(asked.name),
            "settings": np.array(asked.settings),
            "run": self._run,
            "key": bits,
        }
        return self._send(silo, write({**head, **arrays}))

    def ask(
        self,
        silo: int,
        exchange: Exchange[Any, Down, Up],
        key: Array,
        down: Down,
        expected: Reply[Up],
    ) -> Reply[Up]:
        """Return a silo's reply to an exchange, checked for its shapes and weight.

        Raises
        ------
        ReplyError
            For a reply of other shapes or dtypes, or with a weight that is not allowed.
        """
        name = exchange.name
        answer = self.send(silo, exchange.id, key, pack("down", down))
        try:
            reply = unpack("reply", expected, read(answer))
        except DataError as error:
            raise ReplyError(f"is refused: {error}", silo=silo, exchange=name) from error
        if exchange.weighted:
            allowed, weight = self._weights[silo], float(np.asarray(reply.weight))
            if not allowed.least <= weight <= allowed.most:
                raise ReplyError(
                    f"has weight {weight:g}, where {allowed.least:g} to {allowed.most:g} is "
                    "allowed by what the silo has said of its number of rows. Its facts must be "
                    "of the data that it holds; or use weights='even'.",
                    silo=silo,
                    exchange=name,
                )
        return reply


def remote(
    algorithm: FederatedAlgorithm[Any, Any],
    schedule: Schedule[Carry] | None,
    plan: PlanLike,
    channel: Channel,
    *,
    begin: str = BEGIN,
) -> Runtime:
    """Return the runtime of a server whose silos are reached over a channel.

    Each run begins by the message ``begin``.
    """
    silos = _Remote(algorithm, plan, channel)
    init_server = jax.jit(algorithm.init_server)

    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)
        server = init_server(key_server)
        carry = init_schedule(schedule, key, plan.num_silos)
        channel.begin(begin, key_silos)
        server, carry = drop_weak_types((server, carry))
        return State(jnp.zeros((), jnp.int32), server, (), carry)

    def num_silos(batches: Batches) -> int:
        return plan.num_silos

    def transport_of(batches: Batches) -> Transport[Array, Stacks]:
        return silos.transport

    def single(round_: Round) -> Single:
        return single_with(silos.prepared(round_), num_silos, transport_of)

    # One round a call. The driver runs a chunk again after a failure, and silos in other processes
    # have moved on by then: their states cannot be taken back.
    main = silos.prepared(algorithm.round)
    advance = round_loop(main, schedule, num_silos, transport_of, algorithm.done)
    return Runtime(init, advance, single, chunk=1)


@dataclass(frozen=True, eq=False)
class _Remote:
    """The transport over a channel; it finds the expected shapes of replies when needed."""

    algorithm: FederatedAlgorithm[Any, Any]
    plan: PlanLike
    channel: Channel
    rounds: dict[ExchangeId, Round] = field(default_factory=dict)
    reply_shapes: dict[ExchangeId, Reply[Any]] = field(default_factory=dict)
    reply_checks: dict[ExchangeId, Callable[[Reply[Any]], Reply[Any]]] = field(default_factory=dict)

    def prepared(self, round_: Round) -> Round:
        """Return the round in the form in which the server runs it."""
        self.rounds.update((exchange.id, round_) for exchange in round_.exchanges)
        return compiled_in_parts(round_)

    @cached_property
    def watch_reply(self) -> Callable[[Any], Any] | None:
        """Return the compiled function that reads the watched part of a state off a reply."""
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)

    def trace_replies(self, asked: ExchangeId) -> None:
        """Trace the round of this exchange, for the shapes and the checks of its replies."""
        crossed = message_shapes(self.algorithm, (self.rounds[asked],), self.plan.template())
        for exchange, _, reply in crossed:
            self.reply_shapes[exchange.id] = reply
            self.reply_checks[exchange.id] = jax.jit(exchange.checked)

    def transport(
        self, exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        """Ask participants one after the other, and check each reply.

        A silo's own ``ok`` is not trusted: the reply is checked again here.
        """
        asked = exchange.id
        if asked not in self.reply_shapes:
            self.trace_replies(asked)
        expected, check = self.reply_shapes[asked], self.reply_checks[asked]
        last = self.algorithm.round.exchanges[-1].id
        watch_reply = self.watch_reply if asked == last else None
        replies, watched = [], []
        for i, j in enumerate(np.asarray(who).tolist()):
            sent = drop_weak_types(for_participants(exchange.scatter, down, i))
            reply = check(self.channel.ask(j, exchange, noise, sent, expected))
            replies.append(jax.tree.map(lambda a: a[None], reply))
            watched.append(watch_reply(reply.up) if watch_reply else ())
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, silos, stacked(watched))
