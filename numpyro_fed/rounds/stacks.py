"""Exchanges with stacks of silos of one shape, asked one by one by a plain program.

A search or a correction asks silos from a loop in Python. Its part at silos is compiled for a whole
stack of them, by :func:`stacked_reply` or :func:`stacked_visit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.basics.programs import jit_once, readable
from numpyro_fed.basics.trees import all_finite
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.rounds.exchange import Down, Exchange, Reply, Silo, Up, Visit

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class StackedExchange(Exchange[Silo, Down, Up]):
    """An exchange that a plain program at the server asks, with silos of one shape as a stack.

    ``silo`` is a plain function of a stack of silos (silos, ...), which cannot be traced and
    compiles by itself what depends on the text. Its noise is none, or a key for each silo, and its
    reply is of NumPy arrays.

    Attributes
    ----------
    messages : () -> (down, up)
        The shapes of the messages.
    """

    messages: Callable[[], tuple[Any, Any]] = field(kw_only=True)

    def checked_stack(self, reply: Reply[Up]) -> Reply[Up]:
        """Return the replies of a stack, each as :meth:`Exchange.checked` returns it.

        Numbers are sent in the precision of this moment, whatever a silo has computed in.
        """
        real = jnp.result_type(float)
        as_agreed = jax.tree.map(lambda a: a.astype(real) if a.dtype.kind == "f" else a, reply.up)
        reply = reply._replace(up=as_agreed)
        if self.usable is all_finite:
            leaves = [np.isfinite(a).reshape(len(a), -1).all(1) for a in jax.tree.leaves(reply.up)]
            usable = np.logical_and.reduce(leaves)
        else:
            silos = range(len(np.asarray(reply.ok)))
            each = (jax.tree.map(lambda a, i=i: a[i], reply.up) for i in silos)
            usable = np.array([bool(self.usable(up)) for up in each])
        ok: np.ndarray = np.asarray(reply.ok) & usable
        if self.lenient:
            return reply._replace(ok=ok)
        zeroed = jax.tree.map(
            lambda a: np.where(ok.reshape(-1, *[1] * (a.ndim - 1)), a, np.zeros_like(a)), reply.up
        )
        return reply._replace(up=zeroed, ok=ok)

    def compiled(self) -> Exchange[Silo, Down, Up]:
        """Return the same exchange for a single silo, which is a stack of one."""

        def alone(noise: object, down: Down, state: Silo, data: SiloData) -> tuple[Reply[Up], Silo]:
            here = jax.tree.map(lambda a: np.asarray(a)[None], (state, data))
            keys = noise if isinstance(noise, tuple) else jnp.reshape(jnp.asarray(noise), (1,))
            reply, after = self.silo(keys, jax.tree.map(np.asarray, down), *here)
            found: tuple[Reply[Up], Silo] = jax.tree.map(
                lambda a: np.asarray(a)[0], (self.checked_stack(reply), after)
            )
            return found

        return replace(self, silo=alone)


def of_stack(
    f: Callable[[Any, Down, Silo, SiloData], Found], *, little: bool
) -> Callable[[Any, Down, Silo, SiloData], Found]:
    """Return a silo's function ``(noise, down, state, data)`` for a stack of silos, compiled.

    ``down`` is one for all silos. With ``little`` work it is compiled quickly.
    """

    def of_silos(noise: object, down: Down, states: Silo, data: SiloData) -> Found:
        def of_silo(one: tuple[Any, Silo, SiloData]) -> Found:
            return f(one[0], down, *one[1:])

        # On one CPU one silo after the other: side by side all would wait where one searches for
        # modes, and their numbers would not fit into a core's own memory. Several devices have
        # silos of their own.
        if jax.default_backend() == "cpu" and len(jax.devices()) == 1:
            return jax.lax.map(of_silo, (noise, states, data))
        return readable(jax.vmap(of_silo)((noise, states, data)))

    return jit_once(of_silos) if little else jax.jit(of_silos)


def stacked_reply(
    f: Callable[[Any, Down, Silo, SiloData], Up], *, little: bool
) -> Visit[Down, Silo, Up]:
    """Return the part of a stack of silos in an exchange that leaves their states as they are.

    ``f`` is what one silo tells: ``(noise, down, state, data) -> up``.
    """
    compiled = of_stack(f, little=little)

    def reply(noise: object, down: Down, state: Silo, data: SiloData) -> tuple[Reply[Up], Silo]:
        # Waited for in a way that Ctrl-C can end.
        told = jax.block_until_ready(compiled(noise, down, state, data))
        up: Up = jax.tree.map(np.asarray, told)
        return Reply(up, np.ones(len(jax.tree.leaves(up)[0]), bool)), state

    return reply


def stacked_visit(visit: Visit[Down, Silo, Up], *, little: bool) -> Visit[Down, Silo, Up]:
    """Return a silo's part of an exchange for a stack of silos, compiled, as of NumPy arrays."""
    compiled = of_stack(visit, little=little)

    def reply(noise: object, down: Down, state: Silo, data: SiloData) -> tuple[Reply[Up], Any]:
        # Waited for in a way that Ctrl-C can end.
        told, after = jax.block_until_ready(compiled(noise, down, state, data))
        found: Reply[Up] = jax.tree.map(np.asarray, told)
        return found, after

    return reply
