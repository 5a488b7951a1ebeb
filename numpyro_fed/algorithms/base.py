"""What a federated algorithm is: pure functions, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from jax import Array


class Combine(Enum):
    """How a runtime puts the silos' replies together before the server sees them.

    ``SUM`` adds them leaf by leaf, so that secure aggregation can be used and the server never
    sees one silo's reply. ``GATHER`` stacks them along a leading axis, in the order of the
    participants that ``broadcast`` was given.
    """

    SUM = "sum"
    GATHER = "gather"


class Info(NamedTuple):
    """What a step reports.

    Attributes
    ----------
    loss : ()
        Minus the bound.
    ok : () bool
        Whether the round may be kept. A runtime stops before a round that is not.
    change : () float
        How far the step moved the server's state; 0 where that is not measured.
    report : pytree of arrays
        Logged for each step.
    """

    loss: Array
    ok: Array
    change: Array | float = 0.0
    report: Any = ()


class Exchange(NamedTuple):
    """One message down to the silos and one up to the server.

    Randomness is an argument: a runtime turns keys into noise by the first two functions, for
    many rounds at once where that pays, and the others are deterministic.

    Attributes
    ----------
    server_noise : key -> noise
    silo_noise : (key, silo_state) -> noise
        Depends on the shapes of the state alone.
    broadcast : (noise, server_state, who) -> (Down, memo)
        What the server sends, and what it keeps in mind until the replies are there. ``who`` (k,)
        holds the numbers of the silos that take part; of all of them, in order, if all do.
    silo : (noise, Down, silo_state, data) -> (Up, silo_state)
        What a silo does. Only ``Up`` leaves it; its shape depends neither on how many rows or
        local latents the silo has, nor on its data.
    server : (server_state, memo, combined Up) -> (server_state, Info)
        What the server does with the replies.
    combine : Combine
    scatter : bool, or a pytree of bools
        Which leaves of ``Down`` have a leading axis of length k, in the order of ``who``, of which
        each participant gets its own slice: one answer for all, or a prefix of ``Down``'s tree,
        such as ``Down(eta=False, factor=True)``.
    """

    server_noise: Callable[[Array], Any]
    silo_noise: Callable[[Array, Any], Any]
    broadcast: Callable[[Any, Any, Array], tuple[Any, Any]]
    silo: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    server: Callable[[Any, Any, Any], tuple[Any, Info]]
    combine: Combine = Combine.SUM
    scatter: Any = False


class FederatedAlgorithm(NamedTuple):
    """An algorithm as pure functions; the loop lives in a runtime.

    Attributes
    ----------
    init_server : key -> server_state
    init_silo : (key, data) -> silo_state
        Private: it never leaves the silo. It has a boolean ``ok``, which says whether the silo's
        last reply was finite.
    exchanges : tuple of Exchange
        The exchanges of one step, in order. A round has one step, or as many as its schedule says.
    watch : silo_state -> pytree of scalars, optional
        Logged for each visit of a silo, for the user of a simulation; not a message.
    """

    init_server: Callable[[Array], Any]
    init_silo: Callable[[Array, Any], Any]
    exchanges: tuple[Exchange, ...]
    watch: Callable[[Any], Any] | None = None
