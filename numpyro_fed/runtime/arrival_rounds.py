"""The rounds of a server that uses each reply as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Exchange, ExchangeId, FederatedAlgorithm, Reply
from numpyro_fed.errors import DataError, ModelError, SilosError
from numpyro_fed.model.padding import stacked
from numpyro_fed.runtime.arrivals import Arrivals
from numpyro_fed.runtime.channel import Channel, Expected, Mark
from numpyro_fed.runtime.combine import combine, for_participants
from numpyro_fed.runtime.noise import exchange_key, server_key
from numpyro_fed.runtime.stack import Batches, EndedError, RunStatus, ServerData, State
from numpyro_fed.runtime.step import replayed_part
from numpyro_fed.trees import drop_weak_types


class UnderWay(NamedTuple):
    """The messages that are under way.

    Attributes
    ----------
    state : State
        The state of the run after the step that sent the last of them.
    arrivals : Arrivals
    numbers : dict of int to int
        The number of the last message to each silo.
    num_asked : int
        How often the channel has asked anything else.
    """

    state: State
    arrivals: Arrivals
    numbers: dict[int, int]
    num_asked: int


@dataclass(eq=False)
class ArrivalRounds:
    """The function that runs one round, of as many steps as there are silos.

    When the reply of a silo arrives, the server makes a step with it alone, and sends that silo its
    next message at once. Between two rounds of a run messages stay under way. From any other state,
    or once silos were asked anything else, all are asked anew, and replies to earlier messages are
    not used.
    """

    algorithm: FederatedAlgorithm[Any, Any]
    channel: Channel
    expected: Callable[[ExchangeId], Expected]
    under_way: UnderWay | None = field(default=None, init=False)

    def __call__(
        self, key: Array, state: State, batches: Batches, server_data: ServerData
    ) -> tuple[State, float, RunStatus, Any]:
        """Run one round from a state, and return the state after it.

        Raises
        ------
        EndedError
            With the state after the last good step, if it ends before.
        """
        size, exchange = self.channel.num_silos, self.exchange
        first, rows, loss = int(state.round) * size, list[Any](), 0.0
        way, numbers = self._under_way_from(key, state)
        try:
            while len(rows) < size:
                silo, answer = way.next()
                reply = self.channel.read(silo, exchange, answer, self.expected(exchange.id))
                key_step = exchange_key(key, first + len(rows), 0, 1)
                server, info = self._after(state.server, key_step, silo, reply)
                if not (reply.ok and info.ok):
                    raise EndedError(state, () if reply.ok else (silo,))
                mark, (carry, change) = state.silos[0].after(silo, numbers[silo]), state.schedule
                change = change.at[silo].set(info.change)
                state = state._replace(server=server, silos=(mark,), schedule=(carry, change))
                rows.append(self._row(info.report, silo, reply))
                loss += float(info.loss)
                key_next = exchange_key(key, first + len(rows), 0, 1)
                numbers[silo] = self._send(way, silo, key_next, server, mark)
        except SilosError as error:
            raise EndedError(state, error.silos) from error
        except (KeyboardInterrupt, ModelError, DataError) as error:
            raise EndedError(state, ()) from error
        state = state._replace(round=state.round + 1)
        self.under_way = UnderWay(state, way, numbers, self.channel.num_asked)
        return state, loss, RunStatus(True, np.ones(size, bool)), stacked(rows)

    @property
    def exchange(self) -> Exchange[Any, Any, Any]:
        """Return the exchange of a step."""
        (exchange,) = self.algorithm.round.exchanges
        return exchange

    def _under_way_from(self, key: Array, state: State) -> tuple[Arrivals, dict[int, int]]:
        """Return what is under way from this state; if nothing is, ask all silos."""
        before = self.under_way
        if before and before.state is state and before.num_asked == self.channel.num_asked:
            return before.arrivals, before.numbers
        way, silos = self.channel.arrivals(self.exchange.name), range(self.channel.num_silos)
        key_next = exchange_key(key, int(state.round) * len(silos), 0, 1)
        mark = state.silos[0]
        return way, {j: self._send(way, j, key_next, state.server, mark) for j in silos}

    def _send(self, way: Arrivals, silo: int, key: Array, server: Any, mark: Mark) -> int:
        """Send a silo the server's message, and return its number."""
        down = self._replayed(server, self._noise(server_key(key)), jnp.array([silo]), None, ())
        down = drop_weak_types(for_participants(self.exchange.scatter, down, 0))
        return self.channel.send(way, silo, self.exchange, key, down, mark)

    def _after(self, server: Any, key: Array, silo: int, reply: Reply[Any]) -> Any:
        """Return the server's state after a step with one reply, and its report."""
        stack = jax.tree.map(lambda a: a[None], reply)
        replies = (combine(self.exchange.combine, [stack]),)
        noise = self._noise(server_key(key))
        return self._replayed(server, noise, jnp.array([silo]), None, replies)

    def _row(self, report: Any, silo: int, reply: Reply[Any]) -> Any:
        """Return the row of a step in the log of the run."""
        watched = () if self._watched is None else self._watched(reply.up)
        row = report, np.array([silo]), jax.tree.map(lambda a: a[None], watched)
        return jax.tree.map(np.asarray, row)

    @cached_property
    def _replayed(self) -> Callable[..., Any]:
        return jax.jit(partial(replayed_part, self.algorithm.round))

    @cached_property
    def _noise(self) -> Callable[[Array], Any]:
        return jax.jit(self.algorithm.round.noise)

    @cached_property
    def _watched(self) -> Callable[[Any], Any] | None:
        return None if self.algorithm.watch_reply is None else jax.jit(self.algorithm.watch_reply)
