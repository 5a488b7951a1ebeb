"""Silos in processes of their own: a node that answers bytes, and the runtime that asks them.

Down go the number of a step, the name of an exchange and the leaves of ``Down``, up those of
``Reply`` (:mod:`numpyro_fed.runtime.messages`). Both sides know the structure of a message, since
they have built the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Exchange, FederatedAlgorithm, Reply
from numpyro_fed.errors import ModelError
from numpyro_fed.model import data as silo_data
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.facts import Facts, Plan
from numpyro_fed.runtime.combine import combine, slices
from numpyro_fed.runtime.host import compiled, rounds
from numpyro_fed.runtime.messages import pack, read, unpack, write
from numpyro_fed.runtime.noise import exchange_key, init_keys, server_key, silo_key
from numpyro_fed.runtime.schedule import Schedule
from numpyro_fed.runtime.stack import Batch, Runtime, Single, State, chunk_of, init_schedule
from numpyro_fed.runtime.step import Answers, Noise, step
from numpyro_fed.trees import strong

Send = Callable[[int, bytes], bytes]


class Party(Protocol):
    """A method with its text and settings, as every party has it."""

    def describe(self, silo: Mapping[str, Any]) -> Facts:
        """What a silo says of itself."""
        ...

    def build(self, plan: Plan) -> Any:
        """What server and silos make of the plan; it has ``algorithm``."""
        ...

    def exchange(self, built: Any, name: str) -> Exchange:
        """An exchange by its name."""
        ...


class SiloNode:
    """A silo in a process of its own: its data, its private state, and what it answers.

    Parameters
    ----------
    method : SFVI, PVI, ...
        The same text and settings as at the server.
    silo : dict
        The silo's data, which never leave.

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
    ...     node.accept(server.plan, j, jax.random.key(0))
    >>> result = server.run(jax.random.key(0), 1, lambda j, message: nodes[j].handle(message))
    >>> round(float(result.posterior()["mu"].mean), 3)
    2.994
    """

    def __init__(self, method: Party, silo: Mapping[str, Any]):
        (self._data,) = silo_data.read([silo])
        self._method, self._silo = method, silo
        self._exchanges: dict[str, tuple[Exchange, Any]] = {}
        self._built: Any = None

    def facts(self) -> str:
        """What the silo says of itself: JSON."""
        return self._method.describe(self._silo).to_json()

    def accept(self, plan: str, number: int, key: Array) -> None:
        """Build the silo's half from the agreed plan.

        Parameters
        ----------
        plan : str
            JSON, from the server.
        number : int
            The silo's number among all.
        key : jax.Array
            From which the silo draws. With the server's own key all numbers are those of a run in
            one process; nothing else needs the two to be the same.
        """
        self._built = self._method.build(Plan.from_json(plan))
        self._number, self._key = number, key
        init = jax.jit(self._built.algorithm.init_silo)
        key_silo = jax.random.fold_in(init_keys(key)[1], number)
        self._state = strong(init(key_silo, self._data))

    def handle(self, message: bytes) -> bytes:
        """Answer the server's message."""
        if self._built is None:
            raise ModelError("this silo has not accepted a plan: call accept(plan, ...) first.")
        arrays = read(message)
        name, (number, e, exchanges) = str(arrays["exchange"]), arrays["step"]
        exchange, like = self._exchange(name)
        mine = silo_key(exchange_key(self._key, int(number), int(e), int(exchanges)), self._number)
        down = unpack("down", like, arrays)
        noise = exchange.silo_noise(mine, self._state)
        reply, state = exchange.silo(noise, down, self._state, self._data)
        self._state = state
        return write(pack("reply", reply))

    def _exchange(self, name: str) -> tuple[Exchange, Any]:
        """An exchange, compiled, and what the server sends in it."""
        if name not in self._exchanges:
            exchange = self._method.exchange(self._built, name)
            self._exchanges[name] = compiled(exchange), down_like(self._built.algorithm, exchange)
        return self._exchanges[name]


def down_like(algorithm: FederatedAlgorithm, exchange: Exchange) -> Any:
    """Shapes and dtypes of what one silo is sent."""

    def sent(key: Array) -> Any:
        server = algorithm.init_server(key)
        who = jnp.arange(1)
        down, _ = exchange.broadcast(exchange.server_noise(key), server, who, None)
        return strong(slices(exchange.scatter, down, 0))

    return jax.eval_shape(sent, jax.random.key(0))


def reply_like(algorithm: FederatedAlgorithm, exchange: Exchange, template: SiloData) -> Reply:
    """Shapes and dtypes of a reply, which no silo's data decide."""

    def answer(key: Array, data: SiloData) -> Reply:
        state = algorithm.init_silo(key, data)
        down = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), down_like(algorithm, exchange))
        return exchange.visit(exchange.silo_noise(key, state), down, state, data)[0]

    return jax.eval_shape(answer, jax.random.key(0), template)


def remote(
    algorithm: FederatedAlgorithm, schedule: Schedule | None, plan: Plan, send: Send
) -> Runtime:
    """The server's side: a runtime whose silos are asked by ``send(silo, message) -> reply``."""
    init_server, template = jax.jit(algorithm.init_server), plan.template()

    def init(key: Array, batches: tuple[Batch, ...]) -> State:
        server = init_server(init_keys(key)[0])
        carry = init_schedule(schedule, key, plan.num_silos)
        server, carry = strong((server, carry))
        return State(jnp.zeros((), jnp.int32), server, (), carry)

    likes: dict[str, Reply] = {}

    def ask(exchange: Exchange, noise: Any, down: Any, who: Array, silos: Any) -> Answers:
        if exchange.name not in likes:
            likes[exchange.name] = reply_like(algorithm, exchange, template)
        replies = []
        for i, j in enumerate(np.asarray(who).tolist()):
            sent = strong(slices(exchange.scatter, down, i))
            head = {"exchange": np.array(exchange.name), "step": np.array(noise)}
            answer = read(send(j, write({**head, **pack("down", sent)})))
            reply = unpack("reply", likes[exchange.name], answer)
            replies.append(jax.tree.map(lambda a: a[None], reply))
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, silos)

    def noise(exchanges: Any, key: Array, number: Any) -> list[Noise]:
        """The server's noise; silos draw theirs from keys of their own and the step's number."""
        drawn = []
        for e, x in enumerate(exchanges):
            mine = exchange_key(key, number, e, len(exchanges))
            where = (int(number), e, len(exchanges))
            drawn.append(Noise(x.server_noise(server_key(mine)), where))
        return drawn

    def single(exchange: Exchange) -> Single:
        only = server_side(exchange)

        def run(
            key: Array, server: Any, silos: Any, batches: tuple[Batch, ...], server_data: Any = None
        ) -> Any:
            who = jnp.arange(plan.num_silos)
            drawn = noise((only,), key, 0)
            server, silos, info, good, _ = step(
                (only,), ask, drawn, server, silos, who, server_data
            )
            return server, silos, info, good

        return run

    server_side = partial(compiled, silo=False)
    exchanges = tuple(map(server_side, algorithm.exchanges))
    advance = rounds(exchanges, schedule, lambda batches: plan.num_silos, lambda b: ask, noise)
    return Runtime(init, advance, single, chunk_of(schedule))
