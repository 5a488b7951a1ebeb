"""The type of a federated algorithm: pure functions, and the messages between them.

A round (:class:`Round`) is the server's part of a step. It asks silos by exchanges
(:class:`Exchange`): one message down, one reply up. A runtime supplies the function ``ask``, and
so decides how messages travel; an algorithm does not know. Three rules follow from that:

- everything is traced by JAX, so shapes never depend on values;
- noise is an argument, so that every runtime computes the same numbers from the same key;
- ``Reply.up`` is all that leaves a silo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.trees import Numbers, all_finite, namespace
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.states import Private, Shared, WarmStart

Server = TypeVar("Server")
Silo = TypeVar("Silo")
Down = TypeVar("Down")
Up = TypeVar("Up")


class Combine(Enum):
    """How replies are put together before the server sees them.

    ``SUM`` adds them leaf by leaf, each times its weight where the exchange is weighted, so that
    secure aggregation can be used and the server never sees one silo's reply. ``GATHER`` stacks
    them along a leading axis, in the order of the participants.
    """

    SUM = "sum"
    GATHER = "gather"


class Info(NamedTuple):
    """The server's report on a round."""

    loss: Array  # (): minus the bound
    # () bool: whether the server's numbers allow the round to be kept. The runtime checks the
    # replies by itself. A run stops before a round that may not be kept.
    ok: Array
    report: Any = ()  # logged for each step


class Reply(NamedTuple, Generic[Up]):
    """The reply of a silo in an exchange."""

    # What leaves the silo. Its shape depends neither on how many rows or local latents the silo
    # has, nor on its data.
    up: Up
    # () bool: whether the numbers can be used. Where they cannot, zeros are sent in their place.
    ok: Numbers
    # () float, or (): the weight of ``up`` in a sum, such as a silo's number of rows. It is sent
    # and read only in an exchange that is ``weighted``. In all others each reply counts once, so
    # that a silo cannot give itself more weight.
    weight: Array | float | tuple[()] = ()


class Replies(NamedTuple, Generic[Up]):
    """All replies to one question, combined as the server receives them."""

    up: Up  # the weighted sum of all ``Reply.up``, or all of them along a leading axis of length k
    ok: Array  # () bool, or (k,): whether all replies can be used, or one value for each
    # (), or (k,): the sum of the weights, or all of them. A reply without a weight counts as 1.
    weight: Array


# A silo's part of an exchange: (noise, down, state, data) to its reply, and a draft of its state.
Visit = Callable[[Any, Down, Silo, SiloData], tuple[Reply[Up], Any]]


def no_noise(*args: object) -> tuple[()]:
    """Return nothing, as the noise of exchanges that draw nothing."""
    return ()


def key_as_noise(key: Array, state: object = None) -> Array:
    """Return the key itself, as the noise of a function that draws from it later."""
    return key


def as_drafted(draft: Silo, sent: object) -> Silo:
    """Return the draft, for a silo whose state does not depend on what was sent."""
    return draft


class ExchangeId(NamedTuple):
    """The record by which a party in another process knows an exchange, and can build it."""

    name: str
    # JSON, such as the number of draws of a correction. It is empty for an exchange of a run, whose
    # settings are those of the method.
    settings: str = ""

    def read_settings(self) -> dict[str, Any]:
        """Return the settings as a dict."""
        try:
            return dict(json.loads(self.settings or "{}"))
        except (TypeError, ValueError) as error:
            raise unknown_exchange(self.name) from error


def unknown_exchange(name: str) -> ModelError:
    """Return the error for a name of an exchange that the party's method does not have."""
    return ModelError(
        f"there is no exchange '{name}' here. Server and silos must run the same version, with the "
        "same method, text and settings."
    )


@dataclass(frozen=True, eq=False)
class Exchange(Generic[Silo, Down, Up]):
    """A question to a silo: one message down to it, and one reply up from it.

    Randomness is an argument: a runtime turns keys into noise by ``silo_noise``, for many rounds
    at once where that is faster, and the rest is deterministic.

    Attributes
    ----------
    name : str
        The name by which a round asks.
    silo : (noise, Down, silo_state, data) -> (Reply, draft)
        The silo's function. Only ``Reply`` leaves the silo.
    commit : (draft, sent) -> silo_state
        The function that makes the next state of the draft, given ``Reply.up`` as it was really
        sent: transforms (clipping, rounding) and checks may have changed it on its way out.
    silo_noise : (key, silo_state) -> noise
        The silo's noise. It may depend on the shapes of the state, not on its values.
    combine : Combine
    scatter : bool, or a pytree of bools
        The leaves of ``Down`` that have a leading axis of length k, in the order of ``who``: each
        participant receives its own slice of these. A prefix of ``Down``'s tree, such as
        ``Down(eta=False, factor=True)``, or one bool for all leaves.
    weighted : bool
        Whether replies have weights.
    usable : up -> () bool
        Whether a reply can be used. The silo checks this before it sends; a server whose silos are
        in other processes checks each reply once more.
    lenient : bool
        Whether a reply that cannot be used is handed on to the round. A search sets it: a point
        too far away for a silo is a failed step, and the round is kept. A round of any other
        exchange is not kept if a reply cannot be used.
    settings : str
        JSON, from which a silo in another process builds an exchange that belongs to no run.
    """

    name: str
    silo: Visit[Down, Silo, Up]
    # Two functions and not one: between them a reply that cannot be used becomes zeros.
    commit: Callable[[Any, Up], Any] = as_drafted
    silo_noise: Callable[[Array, Any], Any] = no_noise
    combine: Combine = Combine.SUM  # by default the one that secure aggregation can compute
    scatter: Any = False
    weighted: bool = False
    usable: Callable[[Any], Array] = all_finite
    lenient: bool = False
    settings: str = ""

    @property
    def id(self) -> ExchangeId:
        """Return the record by which other parties know the exchange."""
        return ExchangeId(self.name, self.settings)

    def visit(
        self, noise: object, down: Down, state: Silo, data: SiloData
    ) -> tuple[Reply[Up], Any]:
        """Return a silo's reply, with zeros in place of unusable numbers, and its next state."""
        reply, draft = self.silo(noise, down, state, data)
        # A weight outside of a weighted exchange is dropped here, at the silo: it would be one
        # more number that leaves it.
        weight = jnp.asarray(reply.weight, jnp.result_type(float)) if self.weighted else ()
        reply = self.checked(reply._replace(weight=weight))
        return reply, self.commit(draft, reply.up)

    def checked(self, reply: Reply[Up]) -> Reply[Up]:
        """Return the reply with ``ok`` as found, and zeros where it cannot be used."""
        ok = jnp.asarray(reply.ok) & self.usable(reply.up)
        if self.lenient:
            return reply._replace(ok=ok)
        # A NaN would make the sum over all silos NaN, and nobody could tell whose it was. Zeros
        # keep the sum finite, and ``ok`` says that the round must not be kept.
        up = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), reply.up)
        return reply._replace(up=up, ok=ok)

    def compiled(self) -> Exchange[Silo, Down, Up]:
        """Return the same exchange for a single silo, whose part is compiled.

        Its ``silo`` is the whole visit: the reply that it returns is checked, and its draft is the
        silo's next state, so that nothing is left to commit.
        """
        visit, noise = jax.jit(self.visit), jax.jit(self.silo_noise)
        return replace(self, silo=visit, commit=as_drafted, silo_noise=noise)


class Ask(Protocol):
    """The function by which a round asks silos; each runtime has its own.

    Attributes
    ----------
    who : (k,) int
        The indices of the silos that take part.
    server_data : pytree
        The server's data, in a vertical model.
    """

    @property
    def who(self) -> Array: ...

    @property
    def server_data(self) -> Any: ...

    def __call__(self, name: str, down: object) -> Replies[Any]:
        """Send ``down`` to silos in the exchange of this name, and return their replies."""
        ...


# The function by which a plain program at the server asks all silos: an exchange and the message,
# to the sum of the silos' replies, or all of them, as NumPy arrays.
AskSilos = Callable[[Exchange[Any, Any, Any], Any], Any]


def _no_round(state: object, noise: object, ask: Ask) -> tuple[Any, Info]:
    """Refuse to run exchanges that a plain program at the server asks one by one."""
    raise TypeError("these exchanges belong to no round: a search asks them by itself.")


@dataclass(frozen=True, eq=False)
class Round:
    """One step of the server, and the exchanges that it makes with silos.

    ``run`` reads from top to bottom as the algorithm does in its paper. It asks for each exchange
    once, in the order in which they are declared, and outside of ``cond``, ``scan`` and ``grad``:
    ``replies = ask("draw", Down(...))``. It must be a pure function of its arguments and of the
    replies. Where silos are in other processes, ``run`` is called again from its beginning after
    each exchange, with the replies so far, and computes the earlier messages once more.

    Attributes
    ----------
    exchanges : tuple of Exchange
    run : (server_state, noise, ask) -> (server_state, Info), optional
        There is none for exchanges that a plain program at the server asks one by one.
    noise : key -> noise
        The server's noise.
    """

    exchanges: tuple[Exchange[Any, Any, Any], ...]
    run: Callable[[Any, Any, Ask], tuple[Any, Info]] = _no_round
    noise: Callable[[Array], Any] = no_noise

    def __post_init__(self) -> None:
        names = [exchange.name for exchange in self.exchanges]
        # A silo in another process knows an exchange by its name alone.
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"a round's exchanges are {names}: expected at least one, each with a name of its "
                "own, by which silos are asked."
            )

    @property
    def is_run(self) -> bool:
        """Return whether a runtime runs the round; else a plain program asks its exchanges."""
        return self.run is not _no_round

    @property
    def name(self) -> str:
        """Return the name of the first exchange, by which the round is known."""
        return self.exchanges[0].name


class WhenAway(Enum):
    """The way of a round without silos that do not answer.

    It waits for them (``WAIT``). Or it is run with the others, and is as exact as with all
    (``GO_ON``). Or it scales up the sum over the others, which is right on average over the silos
    that are missing (``SCALE``).
    """

    WAIT = "wait"
    GO_ON = "go on"
    SCALE = "scale"


class FederatedAlgorithm(NamedTuple, Generic[Server, Silo]):
    """An algorithm as pure functions; a runtime has the loop.

    Replies are added up over the silos that take part in a round, not over all. Where a schedule
    leaves silos out, let silos send changes, and keep the total at the server.

    Attributes
    ----------
    init_server : key -> server_state
    init_silo : (key, data) -> silo_state
        It never leaves the silo.
    round : Round
        One step. A schedule may have several steps in what users call a round.
    shared : server_state -> Shared
    private : silo_state -> Private
        By default a silo has neither parameters nor guides of its own.
    watch : silo_state -> pytree of scalars, optional
        Numbers that are logged for each visit of a silo, for the user of a simulation. They are
        not a message.
    watch_reply : up -> pytree of scalars, optional
        The same numbers, read off a silo's reply, for a server whose silos are elsewhere.
    done : server_state -> () bool, optional
        Whether the algorithm has converged. No round follows after that.
    opening : tuple of Round
        Rounds that are run once, from the first states, before the first round.
    warm_start : WarmStart, optional
    server_like : pytree
        Shapes of the server's data, in a vertical model.
    when_away : WhenAway
    watched_away : pytree, optional
        The watched numbers of a silo that did not answer.
    """

    init_server: Callable[[Array], Server]
    init_silo: Callable[[Array, SiloData], Silo]
    round: Round
    # Results read states through these two functions only, so that states may differ by algorithm.
    shared: Callable[[Server], Shared]
    private: Callable[[Silo], Private] = lambda state: Private({}, {})
    watch: Callable[[Silo], Any] | None = None
    watch_reply: Callable[[Any], Any] | None = None
    done: Callable[[Server], Array] | None = None
    opening: tuple[Round, ...] = ()
    warm_start: WarmStart | None = None
    server_like: Any = None
    when_away: WhenAway = WhenAway.WAIT
    watched_away: Any = ()


AnyAlgorithm = FederatedAlgorithm[Any, Any]


def combine(how: Combine, stacks: Sequence[Reply[Up]], order: Numbers | None = None) -> Replies[Up]:
    """Return the replies of all stacks as one: summed, or gathered in ``order``.

    Leaves of ``stacks`` are (n, ...) for a bucket of n participants; ``order`` (k,) lists positions
    in their concatenation. Of NumPy's arrays it is computed by NumPy.
    """
    # A reply without a weight counts as 1.
    weights: list[Any] = [
        namespace(reply.ok).ones(jnp.shape(reply.ok))
        if isinstance(reply.weight, tuple)
        else jnp.asarray(reply.weight)
        for reply in stacks
    ]
    if how is Combine.GATHER:
        index = slice(None) if order is None else order
        triples = [(reply.up, reply.ok, w) for reply, w in zip(stacks, weights, strict=True)]
        return Replies(*jax.tree.map(lambda *a: namespace(a[0]).concatenate(a)[index], *triples))

    def total(reply: Reply[Up], weight: Array) -> Up:
        def weighted(a: Array) -> Array:
            # Integers count something, silos or rows, and add up without weights.
            if isinstance(reply.weight, tuple) or not jnp.issubdtype(a.dtype, jnp.inexact):
                return a.sum(0)
            return (a * jnp.expand_dims(weight.astype(a.dtype), range(1, a.ndim))).sum(0)

        return jax.tree.map(weighted, reply.up)

    totals = [total(*pair) for pair in zip(stacks, weights, strict=True)]
    sums = [weight.sum() for weight in weights]
    up = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals)
    weight = sum(sums[1:], sums[0])
    # A number as the others, so that over several devices one sum carries all of them.
    bad = sum(
        (namespace(reply.ok).sum(~reply.ok, dtype=weight.dtype) for reply in stacks), 0 * weight
    )
    return Replies(up, bad == 0, weight)


def for_participants(scatter: object, down: Down, index: Array | int) -> Down:
    """Return the message for participants ``index``: leaves marked in ``scatter`` are indexed."""
    one = partial(jax.tree.map, lambda a: a[index])
    return jax.tree.map(lambda scattered, all_: one(all_) if scattered else all_, scatter, down)
