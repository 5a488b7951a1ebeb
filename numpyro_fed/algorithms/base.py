"""What a federated algorithm is: pure functions, and the messages between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from numpyro_fed.errors import ModelError
from numpyro_fed.frame import Coordinates
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GuideParams
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

Server = TypeVar("Server")
Silo = TypeVar("Silo")
Down = TypeVar("Down")
Up = TypeVar("Up")
Params = TypeVar("Params")
_Noise = TypeVar("_Noise", contravariant=True)
_Down = TypeVar("_Down", contravariant=True)
_State = TypeVar("_State", contravariant=True)
_Sent = TypeVar("_Sent", contravariant=True)


class Combine(Enum):
    """How replies are put together before the server sees them.

    ``SUM`` adds them leaf by leaf, each times its weight where the exchange is weighted, so that
    secure aggregation can be used and the server never sees one silo's reply. ``GATHER`` stacks
    them along a leading axis, in the order of the participants.
    """

    SUM = "sum"
    GATHER = "gather"


class Info(NamedTuple):
    """A report of the server on a round.

    Attributes
    ----------
    loss : ()
        Minus the bound.
    ok : () bool
        Whether the round may be kept, replies apart, of which the runtime knows. It stops before a
        round that may not be kept.
    change : () float
        How far the round moved the server's state; 0 where that is not measured.
    report : pytree of arrays
        Logged for each step.
    """

    loss: Array
    ok: Array
    change: Array | float = 0.0
    report: Any = ()


class Reply(NamedTuple, Generic[Up]):
    """The answer of a silo.

    Attributes
    ----------
    up : pytree of arrays
        What leaves the silo. Its shape depends neither on how many rows or local latents the silo
        has, nor on its data.
    ok : () bool
        Whether the numbers are good; zeros are sent instead of numbers that are not.
    weight : () float, or ()
        By which ``up`` counts in a sum: a silo's number of rows, say. It is sent and read only in
        an exchange that is ``weighted``; in all others each reply counts once, whatever a silo
        would like it to count.
    """

    up: Up
    ok: Array
    weight: Array | float | tuple[()] = ()


class Replies(NamedTuple, Generic[Up]):
    """All replies, as the server sees them.

    Attributes
    ----------
    up : pytree of arrays
        Their weighted sum, or all of them along a leading axis of length k.
    ok : () bool, or (k,)
        Whether all are good, or each.
    weight : (), or (k,)
        The sum of their weights, or all of them; a reply without one counts as 1.
    """

    up: Up
    ok: Array
    weight: Array


class Visit(Protocol[_Noise, _Down, _State, Up]):
    """A silo's part of an exchange: its reply, and a draft of its next state."""

    def __call__(
        self, noise: _Noise, down: _Down, state: _State, data: SiloData
    ) -> tuple[Reply[Up], Any]:
        """Return both; the draft becomes a state by ``commit``, which knows what really left."""
        ...


class Commit(Protocol[_State, _Sent]):
    """A silo's next state, given what of its reply was sent after transforms and checks."""

    def __call__(self, draft: _State, sent: _Sent) -> Any:
        """Return the state; ``sent`` has the structure of ``Reply.up``."""
        ...


def no_noise(*args: object) -> tuple[()]:
    """Return nothing, as the noise of exchanges that draw nothing."""
    return ()


def as_drafted(draft: Silo, sent: object) -> Silo:
    """Return the draft, for a silo whose state does not depend on what was sent."""
    return draft


def settings_in(name: str) -> dict[str, Any]:
    """Return what the name of an exchange says, where it is built when it is asked for."""
    try:
        settings = json.loads(name)
    except json.JSONDecodeError:
        return {}
    return settings if isinstance(settings, dict) else {}


def unknown_exchange(name: str) -> ModelError:
    """Return the error of a party that is asked for an exchange that its method does not have."""
    return ModelError(
        f"there is no exchange '{name}' here. Server and silos must run the same version, with the "
        "same method, text and settings."
    )


class Exchange(NamedTuple, Generic[Silo, Down, Up]):
    """A question to a silo: one message down to it, and one up from it.

    Randomness is an argument: a runtime turns keys into noise by ``silo_noise``, for many rounds
    at once where that pays, and the rest is deterministic.

    Attributes
    ----------
    name : str
        By which a round asks, and from which a silo in another process builds the same exchange.
    silo : (noise, Down, silo_state, data) -> (Reply, draft)
        Only ``Reply`` leaves the silo.
    commit : (draft, sent) -> silo_state
    silo_noise : (key, silo_state) -> noise
        Depends on the shapes of the state alone.
    combine : Combine
    scatter : bool, or a pytree of bools
        Which leaves of ``Down`` have a leading axis of length k, in the order of ``who``, of which
        each participant gets its own slice: one answer for all, or a prefix of ``Down``'s tree,
        such as ``Down(eta=False, factor=True)``.
    weighted : bool
        Whether replies have weights.
    usable : up -> () bool
        Whether what a silo sends can be used. The silo asks this before it sends, and a server
        whose silos are elsewhere once more, of each reply by itself.
    lenient : bool
        Whether what cannot be used is handed on all the same: in a search, a place that is too far
        for a silo is a step that fails, and the round is kept. A round with any other exchange is
        not kept where a reply cannot be used.
    """

    name: str
    silo: Visit[Any, Down, Silo, Up]
    commit: Commit[Any, Up] = as_drafted
    silo_noise: Callable[[Array, Any], Any] = no_noise
    combine: Combine = Combine.SUM
    scatter: Any = False
    weighted: bool = False
    usable: Callable[[Any], Array] = all_finite
    lenient: bool = False

    def visit(
        self, noise: object, down: Down, state: Silo, data: SiloData
    ) -> tuple[Reply[Up], Any]:
        """Return what a silo sends, with zeros for what is not good, and its next state."""
        reply, draft = self.silo(noise, down, state, data)
        weight = jnp.asarray(reply.weight, jnp.result_type(float)) if self.weighted else ()
        reply = self.checked(reply._replace(weight=weight))
        return reply, self.commit(draft, reply.up)

    def checked(self, reply: Reply[Up]) -> Reply[Up]:
        """Return a reply with zeros for what cannot be used, and ``ok`` only if it can."""
        ok = jnp.asarray(reply.ok) & self.usable(reply.up)
        if self.lenient:
            return reply._replace(ok=ok)
        up = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), reply.up)
        return reply._replace(up=up, ok=ok)


class Ask(Protocol):
    """A way for a round to ask silos.

    Attributes
    ----------
    who : (k,) int
        The numbers of the silos that take part: all of them, if all do.
    server_data : pytree
        What the server holds, of a vertical model.
    """

    @property
    def who(self) -> Array: ...

    @property
    def server_data(self) -> Any: ...

    def __call__(self, name: str, down: object) -> Replies[Any]:
        """Return what the silos reply in the exchange of this name, when they are sent ``down``."""
        ...


class Run(Protocol[_State, _Noise]):
    """The server's part of a round."""

    def __call__(self, state: _State, noise: _Noise, ask: Ask) -> tuple[Any, Info]:
        """Return the server's next state, and what it reports."""
        ...


@dataclass(frozen=True, eq=False)
class Round:
    """The server's way from one state to the next, and what it asks silos on it.

    ``run`` reads from top to bottom as the algorithm does in its paper. It asks for each exchange
    once, in the order in which they are declared, and outside of ``cond``, ``scan`` and ``grad``:
    ``replies = ask("draw", Down(...))``. It must be a pure function of its arguments and of the
    replies: where silos are outside of the program, it is run anew for each question, and what was
    sent is computed once more.

    Attributes
    ----------
    exchanges : tuple of Exchange
    run : (server_state, noise, ask) -> (server_state, Info)
    noise : key -> noise
        The server's.
    """

    exchanges: tuple[Exchange[Any, Any, Any], ...]
    run: Run[Any, Any]
    noise: Callable[[Array], Any] = no_noise

    def __post_init__(self) -> None:
        names = [exchange.name for exchange in self.exchanges]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"a round's exchanges are {names}: expected at least one, each with a name of its "
                "own, by which silos are asked."
            )

    @property
    def name(self) -> str:
        """Return the name of its only exchange, or of the first one."""
        return self.exchanges[0].name


def key_as_noise(key: Array, state: object = None) -> Array:
    """Return the key itself, as the noise of what draws as it goes."""
    return key


class SharedParams(NamedTuple):
    """The parameters of the globals' guide, and the shared ones, unconstrained."""

    guide: Any
    theta: Theta


class SiloParams(NamedTuple):
    """The parameters of a silo's local guides, and its private ones, unconstrained."""

    guide: dict[str, GuideParams]
    private: Theta


class Shared(NamedTuple):
    """The part of a server's state that everybody may know.

    Attributes
    ----------
    theta : dict
        Shared parameters, unconstrained.
    guide : dict
        Parameters of the globals' guide, in its frame.
    frame : Gaussian
    """

    theta: dict[str, Any]
    guide: Any
    frame: Gaussian


class Private(NamedTuple):
    """The part of a silo's state that never leaves it.

    Attributes
    ----------
    theta : dict
        Its parameters, unconstrained.
    guide : dict
        Parameters of its own guides.
    centre : (dim,), optional
        From where these measure the globals in their frame, if not from the centre of their guide.
    """

    theta: dict[str, Any]
    guide: dict[str, Any]
    centre: Array | None = None

    def recentred(self, coordinates: Coordinates) -> Coordinates:
        """Return coordinates of the globals as the silo's own guides measure them."""
        return coordinates if self.centre is None else coordinates._replace(centre=self.centre)


class CarriedSilo(NamedTuple):
    """A silo's own part of an earlier result: its parameters, unconstrained, and guides that
    measure the globals ``z_G`` themselves, without a frame, from ``centre`` (dim,).
    """

    theta: Theta
    guide: dict[str, GuideParams]
    centre: Array


class Sampled(NamedTuple):
    """A silo's draws of its latents on their supports, ``{site: (n, ...)}``: they stay there."""

    values: dict[str, Array]


class WarmStart(NamedTuple):
    """How an algorithm begins where another one has ended.

    Attributes
    ----------
    server : (key, Begun) -> server_state
    silo : (key, CarriedSilo, Begun, data) -> silo_state
    """

    server: Callable[..., Any]
    silo: Callable[..., Any]


def nothing_private(state: object) -> Private:
    """Return no parameters and no guides, of a silo that has none of its own."""
    return Private({}, {})


class FederatedAlgorithm(NamedTuple, Generic[Server, Silo]):
    """An algorithm as pure functions; the loop lives in a runtime.

    Replies are added up over the silos that take part in a round, not over all. Where a schedule
    leaves silos out, let them send changes, and keep the total at the server.

    Attributes
    ----------
    init_server : key -> server_state
    init_silo : (key, data) -> silo_state
        It never leaves the silo.
    round : Round
        One step. A schedule may have several of them in what users call a round.
    shared : server_state -> Shared
    private : silo_state -> Private
        By default a silo has neither parameters nor guides of its own.
    watch : silo_state -> pytree of scalars, optional
        Logged for each visit of a silo, for the user of a simulation; not a message.
    watch_reply : up -> pytree of scalars, optional
        The same, as far as a silo's reply tells it, for a server whose silos are elsewhere.
    done : server_state -> () bool, optional
        Whether it has come to its end by itself; no round is begun after that.
    opening : tuple of Round
        Run once, from the first states, before the first round.
    carry : Carry, optional
    server_like : pytree
        Shapes of what the server holds, of a vertical model.
    """

    init_server: Callable[[Array], Server]
    init_silo: Callable[[Array, SiloData], Silo]
    round: Round
    shared: Callable[[Server], Shared]
    private: Callable[[Silo], Private] = nothing_private
    watch: Callable[[Silo], Any] | None = None
    watch_reply: Callable[[Any], Any] | None = None
    done: Callable[[Server], Array] | None = None
    opening: tuple[Round, ...] = ()
    carry: WarmStart | None = None
    server_like: Any = None


def ascend(
    optim: optax.GradientTransformation, gradient: Params, opt_state: optax.OptState, params: Params
) -> tuple[Params, optax.OptState]:
    """Take one optimiser step up the bound; Optax steps down a loss."""
    descent = jax.tree.map(jnp.negative, gradient)
    updates, opt_state = optim.update(descent, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
