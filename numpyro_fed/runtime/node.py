"""The node of a silo in a process of its own, which answers the server's messages.

A message to a silo holds the name of an exchange, the id of the run, two numbers, the key of the
noise and the leaves of ``Down`` (:class:`~numpyro_fed.runtime.messages.Question`). The reply holds
the leaves of ``Reply``. Both sides know the structure of a message, since they have built the same
algorithm from the same plan.

A silo keeps the state before and after the last message of each run, and the reply. So a message
that comes twice is answered twice in the same way and moves nothing; and where the server has not
used a reply, it asks from the state before.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any, Generic, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import (
    OUTER_LATENTS,
    Exchange,
    ExchangeId,
    Sampled,
    unknown_exchange,
)
from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.data import SiloData
from numpyro_fed.runtime.host import compile_visit
from numpyro_fed.runtime.kept import KeptRuns, RunStates, Store, shapes_of_states
from numpyro_fed.runtime.messages import (
    BEGIN,
    BEGINNINGS,
    DRAWS,
    GO_ON,
    SEARCH,
    WITHOUT_START,
    Question,
    pack,
    read,
    unpack,
    write,
)
from numpyro_fed.runtime.noise import silo_key, typed_key
from numpyro_fed.runtime.party import (
    Built,
    Held,
    Ids,
    Party,
    Plan,
    PlanSize,
    PosteriorAtSilo,
    SiloInput,
)
from numpyro_fed.runtime.step import MessageShapes, message_shapes
from numpyro_fed.trees import drop_weak_types

# Compiled exchanges that a silo keeps. A run has at most ten; a server that asks for corrections of
# ever other settings would otherwise fill the silo's memory.
MAX_PROGRAMS = 32


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
    tell_latents : bool
        Whether to tell the server draws of the latents that the silo's rows share, such as a
        hospital's effect: ``sample_posterior(silo="all")`` of its result asks for them.
    store : Store, optional
        A place on the disk for the states of runs, so that a new process goes on where the last one
        has ended. By default they end with the process.

    Raises
    ------
    ModelError
        At a message before a plan was accepted, at one that comes late, at one from a state that
        the silo does not have any more, and for an exchange that is not known, not allowed, or that
        the silo's rows do not allow.
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
        tell_latents: bool = False,
        store: Store | None = None,
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
        self._allow_unhidden, self._store = allow_unhidden, store
        self._tell_latents = tell_latents
        self._programs: dict[bool, _Programs[SiloInput, Plan, Built]] = {}
        self._accepted: tuple[str, int] | None = None
        self._sampled: Sampled | None = None
        self.size = PlanSize(0, 0, 0)

    def facts(self) -> str:
        """Return the silo's facts as JSON."""
        return self._facts

    def for_other_runs(self, store: Store | None) -> Self:
        """Return a node for the runs of another server, which has nothing of the runs of this one.

        Where it accepts the same plan, it compiles nothing again.
        """
        other = copy.copy(self)
        other._store, other._sampled = store, None
        other._runs = other._no_runs()
        if self._fresh_noise:
            other._secret = _unknown_key()
        return other

    def accept(self, plan: str, number: int) -> None:
        """Build the algorithm from the agreed plan, as silo ``number`` of all."""
        if (plan, number) != self._accepted:
            agreed = self._method.read_plan(plan)
            self._method.check_plan(agreed, self._facts, number)
            built = self._method.build(agreed)
            data = self._method.read_silo(self._silo, agreed, number)
            size = self._method.size_of(agreed, built, data)
            self._number, self._data, self.size = number, data, size
            self._programs = {False: _Programs(self._method, agreed, built, data)}
            self._accepted = plan, number
        self._runs = self._no_runs()

    def rows_that_count(self) -> int:
        """Return the number of the silo's rows that have an outcome, once a plan is accepted."""
        programs = self._programs[False]
        return self._method.rows_that_count(programs.built, self._data)

    def _no_runs(self) -> KeptRuns:
        """Return the runs that are in the store, of which none was read yet."""
        return KeptRuns(self._store, lambda name: self._programs_of(name).state_shapes)

    def _programs_of(self, beginning: str) -> _Programs[SiloInput, Plan, Built]:
        """Return the programs for runs that began by the message ``beginning``."""
        without = beginning == WITHOUT_START
        if without not in self._programs:
            build = self._programs[False].built.without_start
            if build is None:
                return self._programs[False]
            self._programs[True] = _Programs(self._method, *build(), self._data)
        return self._programs[without]

    def has_answered(self, message: bytes, question: Question) -> bool:
        """Return whether a message is the last one of its run, which has been answered."""
        run = self._runs.get(question.run) if self._programs else None
        return run is not None and run.digest == hashlib.sha256(message).hexdigest()

    def exchange_of(self, question: Question) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return the exchange of a question, as this silo has built it, and the question's shapes.

        Raises
        ------
        ModelError
            For a run of which the silo has no state, and for an exchange that it does not know.
        """
        run = self._runs.get(question.run) if self._programs else None
        if run is None:
            raise ModelError("this silo has no state of this run. Begin again.")
        programs = self._programs_of(run.beginning)
        return programs.exchange(question.id, self._number)

    def handle(self, message: bytes) -> bytes:
        """Return the reply to a message of the server, as bytes."""
        if not self._programs:
            raise ModelError("this silo has not accepted a plan: call accept(plan, ...) first.")
        head, arrays = read(message)
        question, digest = Question.of(head), hashlib.sha256(message).hexdigest()
        run = self._runs.get(question.run)
        if run is not None and (reply := run.answered(question, digest)) is not None:
            return reply
        if question.exchange in (*BEGINNINGS, GO_ON):
            if run is not None:
                raise ModelError("this run has begun already, by another message. Begin again.")
            return self._begin(question, digest, arrays)
        run = self._run_of(question)
        if self.size.epsilon and question.used != run.number:
            raise ModelError(
                f"the server asks from the state after message {question.used}, and silo "
                f"{self._number} has answered message {run.number} of this run. Under differential "
                "privacy a step is answered once, since another answer would spend more than the "
                "budget. Begin again, with a budget of its own."
            )
        before, programs = run.state_at(question), self._programs_of(run.beginning)
        if self._method.sends_unhidden(question.exchange) and not self._allow_unhidden:
            raise ModelError(
                f"silo {self._number} is asked for predictors without the noise that hides "
                "them in a run, and does not give them: its owner may say so by "
                "SiloNode(..., allow_unhidden=True)."
            )
        if question.exchange == OUTER_LATENTS and not self._tell_latents:
            raise ModelError(
                f"silo {self._number} does not tell the latents that its rows share. Its owner may "
                "allow it: tell_latents = true in the policy, or SiloNode(..., tell_latents=True)."
            )
        exchange, expected = programs.exchange(question.id, self._number)
        key = self._key(arrays)
        noise = exchange.silo_noise(silo_key(key, self._number), before)
        down = unpack("down", expected, arrays)
        _refuse_unknown(arrays)
        sent, after = exchange.silo(noise, down, before, self._data)
        if isinstance(after, Sampled):
            self._sampled = after
        reply = write(pack("reply", sent))
        stateful = question.exchange in programs.stateful
        run = run.step(question, digest, reply, after if stateful else before)
        self._runs.put(question.run, run)
        return reply

    def _begin(self, question: Question, digest: str, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Begin a run, at a first state or at a state of another run."""
        reply = write({})
        if question.exchange == GO_ON:
            _refuse_unknown(arrays)
            if self.size.epsilon:
                raise ModelError(
                    "a run under differential privacy is not gone on with by another run: from one "
                    "state there could be several, each of which would spend. Begin again."
                )
            before = self._runs.get(question.settings)
            if before is None:
                raise ModelError(
                    f"silo {self._number} is to go on from a run of which it has no state. Begin "
                    "again."
                )
            beginning, state = before.beginning, before.state_at(question)
        else:
            beginning, self._sampled = question.exchange, None
            key_silo = jax.random.fold_in(self._key(arrays), self._number)
            _refuse_unknown(arrays)
            init = self._programs_of(beginning).init[beginning]
            state = drop_weak_types(init(key_silo, self._data))
        run = RunStates(beginning, {question.number: state}, question.number, digest, reply)
        self._runs.put(question.run, run)
        return reply

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

    def predict(
        self, key: Array, draws: bytes, new: Mapping[str, Any] | None = None, *, mean: bool = False
    ) -> dict[str, Array]:
        """Return posterior predictive draws at this silo, by its own latents; nothing leaves it.

        Parameters
        ----------
        key : jax.Array
            With the key that the server has given to ``draws_for_silo`` the numbers are those of
            ``fitted.predict(key, new, silo=j, n=n)`` in one process.
        draws : bytes
            The message that ``draws_for_silo`` of the server's result has made for this silo.
        new : dict or DataFrame, optional
            The data to predict for, without outcomes; outcomes in it are not used. Latents of the
            silo's outer plates (a hospital's effect) are drawn from their posterior, and those of
            new rows from their prior. None for the silo's own rows, by all their latents.
        mean : bool
            Whether to return the mean of an outcome's distribution at each draw of the latents, in
            the place of a drawn outcome, as :meth:`numpyro_fed.Posterior.predict` does.

        Returns
        -------
        dict of str to array
            Outcomes and deterministic sites, each ``(n, *shape)``.

        Raises
        ------
        DataError
            For new data that :meth:`numpyro_fed.Posterior.predict` refuses; for another message.
        ModelError
            If the silo has no state of that run any more: it keeps those of the last 16.

        Examples
        --------
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as nf
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 10))
        ...     with nf.silo_plate("row", len(x)):
        ...         numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)
        >>> x = np.arange(1.0, 9)
        >>> pvi = nf.PVI(model)
        >>> nodes = [nf.SiloNode(pvi, dict(x=x, y=slope * x)) for slope in (2.9, 3.1)]
        >>> server = nf.ServerNode(pvi, [node.facts() for node in nodes])
        >>> for j, node in enumerate(nodes):
        ...     node.accept(server.plan, j)
        >>> result = server.run(jax.random.key(0), 1, lambda j, message: nodes[j].handle(message))
        >>> message = result.draws_for_silo(jax.random.key(1), 1_000, silo=1)
        >>> y = nodes[1].predict(jax.random.key(1), message, dict(x=np.array([10.0])))["y"]
        >>> y.shape, round(float(y.mean()))
        ((1000, 1), 30)
        """
        posterior, arrays, held = self._at(draws)
        return posterior.predict(typed_key(key), arrays, held, new, mean=mean)

    def sample_posterior(self, key: Array, draws: bytes) -> dict[str, Array]:
        """Return draws of the globals and of this silo's own latents; nothing leaves it.

        Parameters
        ----------
        key : jax.Array
        draws : bytes
            As for :meth:`predict`.

        Returns
        -------
        dict of str to array
            Latent and deterministic sites, each ``(n, *shape)``. With the server's key they are
            those of ``fitted.sample_posterior(key, n, silo=j)`` in one process.

        Raises
        ------
        DataError, ModelError
            As for :meth:`predict`.
        """
        posterior, arrays, held = self._at(draws)
        return posterior.sample_posterior(typed_key(key), arrays, held)

    def _at(self, draws: bytes) -> tuple[PosteriorAtSilo, Mapping[str, np.ndarray], Held]:
        """Return the posterior at this silo for a message with draws, its arrays, and the state."""
        if not self._programs:
            raise ModelError("this silo has not accepted a plan: call accept(plan, ...) first.")
        head, arrays = read(draws)
        question = Question.of(head)
        if question.exchange != DRAWS:
            raise DataError(
                f"a message of '{question.exchange}' came, where draws of the globals are expected:"
                " draws_for_silo(key, n, silo=...) of the server's result makes them."
            )
        run = self._run_of(question)
        held = Held(self._number, run.state_at(question), self._data)
        return self._programs_of(run.beginning).posterior(question.id), arrays, held

    def _run_of(self, question: Question) -> RunStates:
        """Return the states of the run of a message."""
        run = self._runs.get(question.run)
        if run is None:
            raise ModelError(
                f"silo {self._number} has no state of this run: it keeps those of the last runs "
                "that have begun here. Begin again."
            )
        return run

    def _key(self, arrays: Mapping[str, np.ndarray]) -> Array:
        """Return the key of a message, mixed with the secret if the silo has one."""
        bits = arrays.get("key")
        if bits is None or (bits.shape, bits.dtype) != (_key_shape(), np.dtype(np.uint32)):
            raise DataError(
                f"a message holds {'nothing' if bits is None else f'{bits.dtype}{bits.shape}'} as "
                f"its key, where uint32{_key_shape()} is expected."
            )
        if self._secret is None:
            return jax.random.wrap_key_data(jnp.asarray(bits))
        key = self._secret
        for word in bits:
            key = jax.random.fold_in(key, word)
        if self._fresh_noise:
            self._asked += 1
            key = jax.random.fold_in(key, self._asked)
        return key


class _Programs(Generic[SiloInput, Plan, Built]):
    """The compiled functions of a silo, for one algorithm and its search."""

    def __init__(
        self, method: Party[SiloInput, Plan, Built], plan: Plan, built: Built, data: SiloData
    ):
        self.plan, self.built = plan, built
        self._posteriors = OrderedDict[str, PosteriorAtSilo]()
        self._method, self._data = method, data
        inits = {BEGIN: built.algorithm.init_silo, SEARCH: built.first_algorithm.init_silo}
        inits[WITHOUT_START] = inits[BEGIN]
        self.init = {name: jax.jit(init) for name, init in inits.items()}
        self.state_shapes = shapes_of_states([inits[SEARCH], inits[BEGIN]], data)
        run_rounds = (*built.opening, built.algorithm.round)
        # All other exchanges (an evaluation, a correction) leave the silo's state as it is.
        self.stateful = {exchange.name for round_ in run_rounds for exchange in round_.exchanges}
        self._exchanges: OrderedDict[ExchangeId, tuple[Exchange[Any, Any, Any], Any]]
        self._exchanges = OrderedDict()
        self._shapes: OrderedDict[ExchangeId, list[MessageShapes]] = OrderedDict()

    def posterior(self, asked: ExchangeId) -> PosteriorAtSilo:
        """Return the posterior at the silo, by the settings of a message with draws."""
        if asked.settings not in self._posteriors:
            made = self._method.posterior_at(self.plan, self.built, asked.read_settings())
            self._posteriors[asked.settings] = made
            while len(self._posteriors) > MAX_PROGRAMS:
                self._posteriors.popitem(last=False)
        return self._posteriors[asked.settings]

    def exchange(self, asked: ExchangeId, number: int) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return an exchange, compiled, and the shapes of the server's message in it."""
        if asked not in self._exchanges:
            self._method.check_exchange(self.built, asked, number, self._data)
            round_, sender = self._method.round_of(self.built, asked)
            if round_.id not in self._shapes:
                self._shapes[round_.id] = message_shapes(sender, (round_,), self._data)
            known = {crossed.exchange.id: crossed for crossed in self._shapes[round_.id]}
            if asked not in known:
                raise unknown_exchange(asked.name)
            exchange, down, _ = known[asked]
            self._exchanges[asked] = compile_visit(exchange), down
            for kept in (self._exchanges, self._shapes):
                while len(kept) > MAX_PROGRAMS:
                    kept.popitem(last=False)
        self._exchanges.move_to_end(asked)
        return self._exchanges[asked]


@cache
def _key_shape() -> tuple[int, ...]:
    """Return the shape of the words of a key, which depends on JAX's generator."""
    return jax.random.key_data(jax.random.key(0)).shape


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
