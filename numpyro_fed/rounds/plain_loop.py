"""The plain runtime: a Python loop over rounds and silos, for debugging and as the reference.

:class:`PlainLoop` takes any transport: that to silos elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed.basics.errors import SiloAwayError
from numpyro_fed.basics.trees import Tree, drop_weak_types
from numpyro_fed.data.padding import stacked
from numpyro_fed.rounds.exchange import (
    Down,
    Exchange,
    FederatedAlgorithm,
    Reply,
    Round,
    Server,
    Silo,
    Up,
    combine,
    for_participants,
)
from numpyro_fed.rounds.keys import exchange_key, init_keys, server_key, silo_key
from numpyro_fed.rounds.runtime import Log, RunStatus, Runtime, State
from numpyro_fed.rounds.schedules import Schedule, chunk_of, init_schedule, visits
from numpyro_fed.rounds.silos import Batches, ServerData, Stacks, Watch, num_silos
from numpyro_fed.rounds.step import (
    Answers,
    StepDone,
    Transport,
    compiled_in_parts,
    step,
    transport_of_stacks,
)


def plain_runtime(
    algorithm: FederatedAlgorithm[Server, Silo], schedule: Schedule | None = None
) -> Runtime:
    """Return the runtime that visits silos one after the other from Python, without padding.

    Every function is compiled on its own; under ``jax.disable_jit()`` all of it is ordinary
    Python, in which a debugger can stop. It expects one silo in each batch.
    """
    init_server, init_silo = jax.jit(algorithm.init_server), jax.jit(algorithm.init_silo)
    watch = jax.jit(algorithm.watch or (lambda state: ()))

    def init(key: Array, batches: Batches) -> State:
        key_server, key_silos = init_keys(key)
        silos = tuple(
            _as_stack(init_silo(jax.random.fold_in(key_silos, silo), data))
            for silo, data in map(_first, batches)
        )
        carry = init_schedule(schedule, key, len(batches))
        return drop_weak_types(
            State(jnp.zeros((), jnp.int32), init_server(key_server), silos, carry)
        )

    def loop(round_: Round, watch: Watch, schedule: Schedule | None = None) -> PlainLoop:
        transport_of = partial(_transport_one_by_one, watch=watch)
        exchanges = tuple(exchange.compiled() for exchange in round_.exchanges)
        compiled = replace(compiled_in_parts(round_), exchanges=exchanges)
        return PlainLoop(compiled, schedule, transport_of, algorithm.done)

    return Runtime(
        init,
        loop(algorithm.round, watch, schedule).advance,
        lambda round_: loop(round_, lambda state: ()).single,
        transport_of_stacks,
        chunk_of(schedule),
    )


# The state after a round, its loss, whether it may be kept, and its row of the log.
RoundDone = tuple[State, float, RunStatus, Any]


@dataclass(eq=False)
class PlainLoop:
    """A Python loop over rounds and their steps, with any transport to the silos.

    ``away`` is logged in the place of the watched numbers of a silo that did not answer, if rounds
    go on (``goes_on``) without silos that did not answer in their first exchange.
    """

    round_: Round
    schedule: Schedule | None
    transport_of: Callable[[Batches], Transport[Array, Stacks]]
    done: Callable[[Any], Array] | None = None
    away: object = ()
    goes_on: bool = False

    def advance(
        self,
        key: Array,
        state: State,
        batches: Batches,
        n: int,
        server_data: ServerData = None,
        stop: bool = False,
    ) -> tuple[State, Log, RunStatus]:
        """Run up to ``n`` rounds, as :class:`Runtime` says."""
        losses, logged = list[float](), list[Any]()
        status = RunStatus(True, np.ones(num_silos(batches), bool))
        while len(logged) < n and status.ok:
            if stop and self.done and self.done(state.server):
                break
            state, loss, status, row = self.one_round(key, state, batches, server_data)
            losses.append(loss)
            logged.append(row)
        reports, visited, watched = stacked(logged) if logged else ((), (), ())
        log = Log(np.array(losses), reports, () if self.schedule is None else visited, watched)
        return state, log, status

    def one_round(
        self, key: Array, state: State, batches: Batches, server_data: ServerData
    ) -> RoundDone:
        """Run one round from a state."""
        size = num_silos(batches)
        steps, carry = np.arange(size)[None], state.schedule
        if self.schedule is not None:
            who_when, carry = self._who_when(key, state.round, state.schedule)
            steps = np.asarray(who_when)
        loss, ok, good, rows = 0.0, True, np.ones(size, bool), list[Any]()
        server, silos, transport = state.server, state.silos, self.transport_of(batches)
        for s, who in enumerate(steps):
            # Numbered as in the compiled loop, so that both draw the same noise.
            noise = _noise(self.round_, key, state.round * len(steps) + s)
            present, after = who, None
            while len(present) and after is None:
                taking = jnp.asarray(present, jnp.int32)
                try:
                    after = step(self.round_, transport, noise, server, silos, taking, server_data)
                except SiloAwayError as error:
                    # Later exchanges of a round have begun with all silos.
                    first = error.exchange == self.round_.name
                    if not (self.goes_on and first and set(error.silos) & set(present.tolist())):
                        raise
                    present = np.array([j for j in present if j not in error.silos], int)
            if after is None:  # nobody answers
                rows.append(None)
                continue
            server, silos, info, good[present] = after.server, after.silos, after.info, after.good
            watched = _with_missing(after.watched, self.away, who, present)
            rows.append(jax.tree.map(np.asarray, (info.report, who, watched)))
            loss, ok = loss + float(info.loss), bool(info.ok)
            # The loop around drops a round that is not ok, and its row of the log with it. The row
            # is filled up only so that all rows of this call have one shape and can be stacked.
            if not ok:
                rows += rows[-1:] * (len(steps) - len(rows))
                break
        known = [row for row in rows if row is not None]
        if not known:
            nobody = dict.fromkeys(np.ravel(steps).tolist(), "nobody answers")
            raise SiloAwayError(nobody, "of a round", 0.0, {})
        if len(known) < len(rows):  # in some steps nobody has answered
            report, _, watched = known[0]
            nobody = jax.tree.map(lambda a, none: np.full_like(a, none), watched, self.away)
            pairs = zip(rows, steps, strict=True)
            rows = [(report, who, nobody) if row is None else row for row, who in pairs]
        after_it = State(state.round + 1, server, silos, carry)
        return after_it, loss, RunStatus(ok, good), stacked(rows)

    @cached_property
    def _who_when(self) -> Callable[..., Any]:
        return jax.jit(partial(visits, cast(Schedule, self.schedule)))

    def single(
        self,
        key: Array,
        server: object,
        silos: Stacks,
        batches: Batches,
        server_data: ServerData = None,
    ) -> StepDone[Stacks]:
        """Run one round with all silos, as :class:`Runtime` says."""
        noise, who = _noise(self.round_, key, 0), jnp.arange(num_silos(batches))
        transport = self.transport_of(batches)
        return step(self.round_, transport, noise, server, silos, who, server_data)


def _with_missing(watched: object, away: object, who: np.ndarray, present: np.ndarray) -> Any:
    """Return the watched numbers of silos ``who``, of whom those ``present`` have answered."""
    if len(who) == len(present):
        return watched
    answered = np.isin(who, present)

    def filled(found: Array, missing: ArrayLike) -> np.ndarray:
        rows = np.broadcast_to(np.asarray(missing), (len(who), *np.shape(found)[1:])).copy()
        rows[answered] = np.asarray(found)
        return rows

    return jax.tree.map(filled, watched, away)


def _noise(round_: Round, key: Array, number: Array | int) -> tuple[Any, list[Array]]:
    """Return the server's noise, and for each exchange the key from which silos draw theirs."""
    size = len(round_.exchanges)
    keys = [exchange_key(key, number, e, size) for e in range(size)]
    return round_.noise(server_key(keys[0])), keys


def _transport_one_by_one(batches: Batches, watch: Watch) -> Transport[Array, Stacks]:
    """Return the transport that visits participants one by one; its noise is the exchange's key."""
    bucket_of = {int(b.silos[0]): i for i, b in enumerate(batches)}

    def transport(
        exchange: Exchange[Silo, Down, Up], noise: Array, down: Down, who: Array, silos: Stacks
    ) -> Answers[Stacks]:
        after, replies, watched = list(silos), list[Reply[Up]](), []
        for i, j in enumerate(np.asarray(who).tolist()):
            silo, data = _first(batches[bucket_of[j]])
            before = _first(silos[bucket_of[j]])
            eps = exchange.silo_noise(silo_key(noise, silo), before)
            sent = for_participants(exchange.scatter, down, i)
            reply, state = exchange.silo(eps, sent, before, data)
            replies.append(_as_stack(reply))
            watched.append(watch(state))
            after[bucket_of[j]] = _as_stack(state)
        ok = jnp.concatenate([reply.ok for reply in replies])
        return Answers(combine(exchange.combine, replies), ok, tuple(after), stacked(watched))

    return transport


def _first(stack: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], stack)


def _as_stack(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)
