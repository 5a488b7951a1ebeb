"""Silos in processes of their own: a node that answers bytes, and the runtime that asks them.

Down go the name of an exchange, the key of its noise and the leaves of ``Down``, up those of
``Reply`` (:mod:`numpyro_fed.runtime.messages`). Both sides know the structure of a message, since
they have built the same algorithm. A run begins with a message that makes every silo start anew;
all others name the run that they belong to, so that no silo answers for another one.
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
    FederatedAlgorithm,
    Reply,
    Round,
    Sampled,
    Up,
)
from numpyro_fed.errors import DataError, ModelError, ReplyError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.runtime.host import alone, compiled_visit, rounds
from numpyro_fed.runtime.messages import pack, read, unpack, write
from numpyro_fed.runtime.noise import init_keys, one_key, silo_key
from numpyro_fed.runtime.schedule import Carry, Schedule
from numpyro_fed.runtime.stack import Batches, Runtime, Single, Stacks, State, init_schedule
from numpyro_fed.runtime.step import Answers, MessageShapes, Transport, in_parts, message_shapes
from numpyro_fed.trees import drop_weak_types

Send = Callable[[int, bytes], bytes]
Ids = Sequence[int] | Sequence[str] | np.ndarray | None
BEGIN = "begin"  # the message with which a run starts at the algorithm's own first state
SEARCH = "begin the search"  # and the one with which it starts by a search for the mode
WITHOUT_START = "begin without a start"  # at the first state of the algorithm that needs no mode


class Sendable(Protocol):
    """A record of what a silo says of itself, in a form that can be sent."""

    def to_json(self) -> str: ...


class PartyBuilt(Protocol):
    """A party's half of a run: its algorithm, the first one, a search maybe, and the opening."""

    @property
    def algorithm(self) -> FederatedAlgorithm[Any, Any]: ...

    @property
    def first(self) -> FederatedAlgorithm[Any, Any]: ...

    @property
    def opening(self) -> Sequence[Round]: ...

    @property
    def without_start(self) -> Callable[[], tuple[Any, Any]] | None:
        """Return what builds the half of a run that has no mode to begin at."""

    def sender(self, round_: Round) -> FederatedAlgorithm[Any, Any]:
        """Return the algorithm whose server sends in a round."""


Holds = TypeVar("Holds", contravariant=True)  # a silo's rows by name, or a client's columns
Plan = TypeVar("Plan")
Built = TypeVar("Built", bound=PartyBuilt)


class Party(Protocol[Holds, Plan, Built]):
    """A method with its text and settings, as every party has it."""

    @property
    def hides_by_noise(self) -> bool:
        """Return whether noise that a silo draws is there to hide what it sends."""

    def describe(self, silo: Holds, row_ids: Ids = None) -> Sendable:
        """Return what a silo says of itself."""

    def read_plan(self, text: str) -> Plan:
        """Return a plan from JSON."""

    def hold(self, silo: Holds, plan: Plan | None = None, number: int = 0) -> SiloData:
        """Return what a silo holds, checked; with the plan, as the algorithm takes it."""

    def build(self, plan: Plan) -> Built:
        """Return what server and silos make of the plan."""

    def round_of(self, built: Built, name: str) -> Round:
        """Return the round that has the exchange of this name."""

    def admit(self, built: Built, name: str, number: int, data: SiloData) -> None:
        """Refuse an exchange that a silo's rows do not allow."""

    def unhides(self, name: str) -> bool:
        """Return whether an exchange sends without noise what noise hides elsewhere."""


class Agreed(Protocol):
    """A plan, as a runtime sees it."""

    @property
    def num_silos(self) -> int:
        """Return how many silos there are."""

    def template(self) -> SiloData:
        """Return zeros of the shapes of some silo."""


class SiloNode(Generic[Holds, Plan, Built]):
    """A silo in a process of its own: its data, its private state, and what it answers.

    Parameters
    ----------
    method : SFVI, PVI, ...
        The same text and settings as at the server.
    silo : dict
        The silo's data, which never leave; of a client of :class:`numpyro_fed.VFL` its columns.
    secret : jax.Array, "auto" or None
        A key of the silo's own, from which it draws what the server cannot know. ``"auto"`` is a
        new one from the operating system wherever noise hides what a silo sends (vertical models
        with ``rho``), else none. With None all numbers are those of a run in one process, and a
        server that keeps the keys of a run can take the noise off again; with a key of yours, a
        server that sends the same key twice gets the same noise twice.
    row_ids : array of int or str, optional
        Of a client's rows. They do not leave it; the facts say their SHA-256, by which the server
        finds out whether all parties have the same rows in the same order.
    allow_unhidden : bool
        Whether to answer an exchange that sends without noise what the method hides by noise: the
        importance correction of a vertical model with ``rho``, in which predictors are sent.

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
        method: Party[Holds, Plan, Built],
        silo: Holds,
        *,
        secret: Array | str | None = "auto",
        row_ids: Ids = None,
        allow_unhidden: bool = False,
    ):
        self._never_again, self._asked = False, 0
        if not (secret is None or isinstance(secret, str)):
            one_key(secret)
        if isinstance(secret, str):
            if secret != "auto":
                raise ValueError(f"secret={secret!r}: expected a jax.random.key, 'auto' or None.")
            secret = _unknown_key() if method.hides_by_noise else None
            # A server that repeats a key must not get the same noise again.
            self._never_again = secret is not None
        self._data = method.hold(silo)
        self._facts = method.describe(silo, row_ids).to_json()
        self._method, self._silo, self._secret = method, silo, secret
        self._allow_unhidden = allow_unhidden
        self._built: Built | None = None
        self._aside: Sampled | None = None

    def facts(self) -> str:
        """Return what the silo says of itself: JSON."""
        return self._facts

    def accept(self, plan: str, number: int) -> None:
        """Build the silo's half from the agreed plan, as silo ``number`` of all."""
        agreed = self._method.read_plan(plan)
        self._accepted = self._method.build(agreed)
        self._number = number
        self._data = self._method.hold(self._silo, agreed, number)
        self._state, self._run = None, np.zeros(0)
        self._use(self._accepted)

    def _use(self, built: Built) -> None:
        """Answer from now on as a half of a run says."""
        self._built = built
        self._init = {
            BEGIN: jax.jit(built.algorithm.init_silo),
            SEARCH: jax.jit(built.first.init_silo),
            WITHOUT_START: jax.jit(built.algorithm.init_silo),
        }
        self._exchanges: dict[str, tuple[Exchange[Any, Any, Any], Any]] = {}
        self._crossed: dict[str, list[MessageShapes]] = {}
        own = (*built.opening, built.algorithm.round)
        # All other exchanges leave the state as it is.
        self._own = {exchange.name for round_ in own for exchange in round_.exchanges}

    def _half(self, beginning: str) -> Built:
        """Return the half of a run that begins in this way."""
        build = self._accepted.without_start
        if beginning != WITHOUT_START or build is None:
            return self._accepted
        half: Built = build()[1]
        return half

    def handle(self, message: bytes) -> bytes:
        """Answer the server's message."""
        if (built := self._built) is None:
            raise ModelError("this silo has not accepted a plan: call accept(plan, ...) first.")
        arrays = read(message)
        if not {"exchange", "run", "key"} <= arrays.keys():
            raise DataError(
                f"a message to a silo names the exchange, the run and a key, but this one holds "
                f"{sorted(arrays)}. ServerNode makes them."
            )
        name, key = str(arrays["exchange"]), self._key(arrays["key"])
        if name in self._init:
            if (half := self._half(name)) is not built:
                self._use(half)
            self._run, mine = arrays["run"], jax.random.fold_in(key, self._number)
            self._aside = None
            self._state = drop_weak_types(self._init[name](mine, self._data))
            return write({})
        if not np.array_equal(arrays["run"], self._run):
            raise ModelError(
                f"silo {self._number} has begun another run since, and holds the local latents of "
                "that one. Correct or evaluate a result before the next run begins."
            )
        exchange, like = self._exchange(built, name)
        noise = exchange.silo_noise(silo_key(key, self._number), self._state)
        down = unpack("down", like, arrays)
        reply, after = exchange.silo(noise, down, self._state, self._data)
        if name in self._own:
            self._state = after
        elif isinstance(after, Sampled):
            self._aside = after
        return write(pack("reply", reply))

    def draws(self) -> dict[str, Array]:
        """Return this party's latents at the last draws of all parties, ``{site: (n, ...)}``.

        The names are those of its part of the text. Parties draw together at
        :meth:`VerticalResult.sample_together` of the server.
        """
        if self._aside is None:
            raise DataError(
                "there are no draws here: the server draws, and every client with it, by "
                "sample_together(key, n) of a vertical model's result."
            )
        return self._aside.values

    def _key(self, bits: np.ndarray) -> Array:
        """Return the key of a message, and with a secret one that only the silo knows."""
        if self._secret is None:
            return jax.random.wrap_key_data(jnp.asarray(bits))
        key = self._secret
        for word in bits:
            key = jax.random.fold_in(key, word)
        if self._never_again:
            self._asked += 1
            key = jax.random.fold_in(key, self._asked)
        return key

    def _exchange(self, built: Built, name: str) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return an exchange, compiled, and what the server sends in it."""
        if name not in self._exchanges:
            if self._method.unhides(name) and not self._allow_unhidden:
                raise ModelError(
                    f"silo {self._number} is asked for predictors without the noise that hides "
                    "them in a run, and does not give them: its owner may say so by "
                    "SiloNode(..., allow_unhidden=True)."
                )
            self._method.admit(built, name, self._number, self._data)
            round_ = self._method.round_of(built, name)
            if round_.name not in self._crossed:
                sender = built.sender(round_)
                self._crossed[round_.name] = message_shapes(sender, (round_,), self._data)
            every = self._crossed[round_.name]
            exchange, down, _ = next(found for found in every if found.exchange.name == name)
            self._exchanges[name] = compiled_visit(exchange), down
        return self._exchanges[name]


def _unknown_key() -> Array:
    """Return a key that nobody else knows."""
    words = np.frombuffer(secrets.token_bytes(16), np.uint32)
    key = jax.random.key(words[0])
    for word in words[1:]:
        key = jax.random.fold_in(key, word)
    return key


class Weights(NamedTuple):
    """The least and the largest weight that a silo's replies may have."""

    least: float
    most: float


class Channel:
    """The server's line to the silos: ``send(silo, message) -> reply``, and the run that is on.

    ``weights`` says for each silo what its replies may count, as far as that is known.
    """

    def __init__(self, send: Send, num_silos: int, weights: Sequence[Weights] | None = None):
        self._send, self.num_silos, self._run = send, num_silos, np.zeros(0)
        self._weights = weights or [Weights(0.0, np.finfo(np.float64).max)] * num_silos

    def begin(self, name: str, key: Array) -> None:
        """Tell every silo to begin a new run."""
        self._run = np.frombuffer(uuid.uuid4().bytes, np.uint32)
        for j in range(self.num_silos):
            self.send(j, name, key, {})

    def send(self, silo: int, name: str, key: Array, arrays: Mapping[str, ArrayLike]) -> bytes:
        """Send what an exchange takes, and get the reply."""
        bits = jax.random.key_data(key)
        head: dict[str, ArrayLike] = {"exchange": np.array(name), "run": self._run, "key": bits}
        return self._send(silo, write({**head, **arrays}))

    def ask(
        self, silo: int, exchange: Exchange[Any, Down, Up], key: Array, down: Down, like: Reply[Up]
    ) -> Reply[Up]:
        """Return a silo's reply to an exchange, of the agreed shapes and with an allowed weight.

        Raises
        ------
        ReplyError
            For any other reply.
        """
        name = exchange.name
        answer = self.send(silo, name, key, pack("down", down))
        try:
            reply = unpack("reply", like, read(answer))
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
    plan: Agreed,
    line: Channel,
    *,
    begin: str = BEGIN,
) -> Runtime:
    """Return the server's side: a runtime whose silos are asked over a line."""
    silos = _Remote(algorithm, plan, line)
    init_server = jax.jit(algorithm.init_server)

    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)
        server = init_server(key_server)
        carry = init_schedule(schedule, key, plan.num_silos)
        line.begin(begin, key_silos)
        server, carry = drop_weak_types((server, carry))
        return State(jnp.zeros((), jnp.int32), server, (), carry)

    def num_silos(batches: Batches) -> int:
        return plan.num_silos

    def reach_of(batches: Batches) -> Transport[Array, Stacks]:
        return silos.reach

    def single(round_: Round) -> Single:
        return alone(silos.prepared(round_), num_silos, reach_of)

    # One round a call: what silos have done cannot be taken back, as a longer call might want to.
    main = silos.prepared(algorithm.round)
    advance = rounds(main, schedule, num_silos, reach_of, algorithm.done)
    return Runtime(init, advance, single, chunk=1)


@dataclass(frozen=True, eq=False)
class _Remote:
    """Silos over a line, and what each of them has to reply, found out when it is first asked."""

    algorithm: FederatedAlgorithm[Any, Any]
    plan: Agreed
    line: Channel
    rounds: dict[str, Round] = field(default_factory=dict)  # by the names of their exchanges
    likes: dict[str, Reply[Any]] = field(default_factory=dict)
    checks: dict[str, Callable[[Reply[Any]], Reply[Any]]] = field(default_factory=dict)

    def prepared(self, round_: Round) -> Round:
        """Return the round as the server runs it."""
        self.rounds.update((exchange.name, round_) for exchange in round_.exchanges)
        return in_parts(round_)

    @cached_property
    def told(self) -> Callable[[Any], Any] | None:
        """Return what a reply tells of a silo's state, compiled."""
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)

    def learn(self, name: str) -> None:
        """Find out what silos reply in the round that has this exchange."""
        found = message_shapes(self.algorithm, (self.rounds[name],), self.plan.template())
        for exchange, _, reply in found:
            self.likes[exchange.name] = reply
            self.checks[exchange.name] = jax.jit(exchange.checked)

    def reach(
        self, exchange: Exchange[Any, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        """Ask participants one after the other; a silo's own ``ok`` is only its word."""
        name = exchange.name
        if name not in self.likes:
            self.learn(name)
        like, check = self.likes[name], self.checks[name]
        told = self.told if name == self.algorithm.round.exchanges[-1].name else None
        replies, seen = [], []
        for i, j in enumerate(np.asarray(who).tolist()):
            sent = drop_weak_types(slices(exchange.scatter, down, i))
            reply = check(self.line.ask(j, exchange, noise, sent, like))
            replies.append(jax.tree.map(lambda a: a[None], reply))
            seen.append(told(reply.up) if told else ())
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, silos, stacked(seen))
