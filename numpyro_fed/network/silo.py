"""The process of a silo: it answers a server for any method that its owner allows."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import IMPORTANCE, OUTER_LATENTS, Exchange
from numpyro_fed.algorithms.importance.leave_out import LEAVE_OUT
from numpyro_fed.algorithms.importance.loo import LOO
from numpyro_fed.algorithms.tempered import TEMPERED
from numpyro_fed.errors import (
    DataError,
    GuideError,
    MissingExtraError,
    ModelError,
    SavedStateError,
)
from numpyro_fed.files import Use
from numpyro_fed.methods.load import METHODS
from numpyro_fed.methods.of_data import COLUMNS, moments_reply, names_reply
from numpyro_fed.methods.recipe import rebuilt
from numpyro_fed.methods.soul import SOUL
from numpyro_fed.methods.vfl import VFL
from numpyro_fed.model.facts import describe
from numpyro_fed.model.fingerprint import source_hash
from numpyro_fed.model.levels import OTHER, level_counts
from numpyro_fed.model.scaling import numbers_of
from numpyro_fed.network.policy import Ledger, Policy
from numpyro_fed.network.sums import Sums
from numpyro_fed.precision import is_double, precision
from numpyro_fed.privacy.budget import PrivacyWarning
from numpyro_fed.runtime.kept import Folder, Memory, Store
from numpyro_fed.runtime.messages import (
    ACCEPT,
    BEGINNINGS,
    DESCRIBE,
    GO_ON,
    LEVELS,
    OF_DATA,
    Question,
    read,
    refusal,
    write,
)
from numpyro_fed.runtime.node import SiloNode
from numpyro_fed.runtime.party import Ids, Party
from numpyro_fed.runtime.sums import (
    KEYS,
    PEERS,
    SECURE,
    SUM,
    Terms,
    asked_of_all,
    check_summed,
    without_terms,
)

KINDS: dict[str, type[Any]] = {**METHODS, "VFL": VFL, "SOUL": SOUL}
# Methods that a silo keeps, the one that was used least recently is forgotten first. Each call of
# nf.fit describes three.
MAX_METHODS = 32
# Bytes of a message at most, unless the owner says otherwise: larger ones are refused unread.
MAX_BYTES = 512 << 20
NOT_ACCEPTED = "this silo has not accepted a plan for this method. Begin again."
FOLDER_UNUSABLE = (
    "this silo cannot use its folder, as where another process or object uses it. Its log has the "
    "rest."
)
LOG = logging.getLogger("numpyro_fed.silo")


class Silo:
    """A silo that answers the messages of a :class:`numpyro_fed.Federation`.

    Parameters
    ----------
    data : dict
        The silo's data, which never leave it.
    names : dict
        The models and methods that the silo knows, by name. A server can ask for nothing else: no
        code comes with a message.
    policy : Policy, optional
        The rules by which the silo answers or refuses; by default those of :class:`Policy` itself.
    state : str or Path, optional
        A folder for the states of runs and for what was asked so far, so that a new process goes on
        where the last one has ended. Only its owner can open it, and one process answers with it.
        By default all ends with the process, the policy's limits as well: a warning says so where
        the owner has set some.
    secret, row_ids, allow_unhidden
        As for :class:`numpyro_fed.SiloNode`.
    max_bytes : int
        Longer messages are refused unread.

    Examples
    --------
    See :class:`numpyro_fed.Federation`.
    """

    def __init__(
        self,
        data: Any,
        *,
        names: Mapping[str, Any],
        policy: Policy | None = None,
        state: str | Path | None = None,
        secret: Array | str | None = "auto",
        row_ids: Ids = None,
        allow_unhidden: bool = False,
        max_bytes: int = MAX_BYTES,
    ):
        self._data, self._names, self._max_bytes = data, dict(names), max_bytes
        self._policy = policy or Policy()
        self._options: dict[str, Any] = dict(
            secret=secret,
            row_ids=row_ids,
            allow_unhidden=allow_unhidden,
            tell_latents=self._policy.tell_latents,
        )
        self._state = None if state is None else Path(state)
        self._methods: Store = Memory() if state is None else Folder(Path(state) / "methods")
        self._agreed: OrderedDict[str, _Agreement] = OrderedDict()
        # The last node of each method, by its settings: it has the programs that were compiled.
        self._nodes: OrderedDict[str, SiloNode[Any, Any, Any]] = OrderedDict()
        self._ledger = Ledger(self._policy, Memory() if state is None else Folder(Path(state)))
        self._use: Use | None = None
        if state is None and (limits := self._policy.limits):
            warnings.warn(
                f"the policy limits what this silo answers in all its life ({', '.join(limits)}), "
                "and without a folder the count ends with the process. Give Silo(state=...).",
                category=PrivacyWarning,
                stacklevel=2,
            )
        stores = (Memory(), Memory()) if state is None else _stores_of_sums(Path(state))
        self._sums = Sums(self._policy, *stores)
        # One message at a time: a silo's state has one next state.
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """Return the digest of the silo's key, by which other silos know it (``Policy.peers``).

        The key stays the same as long as the folder ``state`` does.

        Raises
        ------
        MissingExtraError
            Without the extra ``privacy``.
        """
        from numpyro_fed.privacy.keys import fingerprint

        return fingerprint(self._sums.identity.public)

    def hold(self) -> None:
        """Take the folder ``state`` for this silo alone, as its first answer does.

        Raises
        ------
        SavedStateError
            If another process answers with the same folder, or another silo of this process has
            taken it over: each would allow what is left of the limits.
        """
        if self._state is None:
            return
        if self._use is None:
            self._use = Use(self._state)
            # What another process has counted until now.
            self._ledger = Ledger(self._policy, Folder(self._state))
        self._use.check()

    def answer(self, message: bytes) -> bytes:
        """Return the reply to a message; a refusal is a reply with its reason in words."""
        with self._lock:
            entry: dict[str, Any] = {}
            try:
                self.hold()
                reply = self._answer(message, entry)
            except Exception as error:
                reply = _refusal(error)
            return self._logged(entry, message, reply)

    def predict(
        self, key: Array, draws: bytes, new: Mapping[str, Any] | None = None, *, mean: bool = False
    ) -> dict[str, Array]:
        """Return posterior predictive draws at this silo, by its own latents; nothing leaves it.

        It may be another process than the one that has answered the server, with the same
        ``state=``. For arguments, numbers and errors see :meth:`numpyro_fed.SiloNode.predict`.

        Parameters
        ----------
        key : jax.Array
        draws : bytes
            The message that ``draws_for_silo`` of the server's result has made for this silo.
        new : dict or DataFrame, optional
            The data to predict for, without outcomes; None for the silo's own rows.
        mean : bool
            Whether to return the mean of an outcome's distribution at each draw of the latents.

        Returns
        -------
        dict of str to array
            Outcomes and deterministic sites, each ``(n, *shape)``.
        """
        return self._at_home(draws, lambda node: node.predict(key, draws, new, mean=mean))

    def sample_posterior(self, key: Array, draws: bytes) -> dict[str, Array]:
        """Return draws of the globals and of this silo's own latents; nothing leaves it.

        See :meth:`numpyro_fed.SiloNode.sample_posterior`, and :meth:`predict` for the arguments.
        """
        return self._at_home(draws, lambda node: node.sample_posterior(key, draws))

    def draws(self) -> dict[str, Array]:
        """Return this client's latents at the last draws of all parties, ``{site: (n, ...)}``.

        Clients hold columns (:class:`numpyro_fed.VFL`), and draw together at ``sample_together`` of
        the server's result. Sites have the names of the client's part of the text.
        """
        with self._lock:
            if not self._nodes:
                raise DataError("there are no draws here: no server has asked for any.")
            return next(reversed(self._nodes.values())).draws()

    def _at_home(
        self, draws: bytes, ask: Callable[[SiloNode[Any, Any, Any]], dict[str, Array]]
    ) -> dict[str, Array]:
        """Return what the node answers that has agreed on the method of a message with draws."""
        with self._lock:
            agreed = self._get(Question.of(read(draws).head).method)
            with precision(double=agreed.double):
                return ask(agreed.ready)

    def _logged(self, entry: dict[str, Any], message: bytes, reply: bytes) -> bytes:
        """Return the reply once the audit log has it; if it cannot be written, a refusal."""
        digests = {"message": sha256(message).hexdigest(), "reply": sha256(reply).hexdigest()}
        head, arrays = read(reply)
        sent = {name: list(a.shape) for name, a in arrays.items()}
        try:
            self._ledger.log({**entry, "sent": sent, "refused": "error" in head, **digests})
        except DataError as error:
            return refusal(error)
        return reply

    def _answer(self, message: bytes, entry: dict[str, Any]) -> bytes:
        """Return the reply; ``entry`` gets what the audit log is to say of the message."""
        if len(message) > self._max_bytes:
            raise DataError(
                f"a message has {len(message)} bytes, where {self._max_bytes} are allowed "
                "(Silo(max_bytes=))."
            )
        head, arrays = read(message)
        question = Question.of(head)
        # Texts of a stranger: no more of them than a name is long.
        entry |= {"exchange": question.exchange[:100], "run": question.run[:32]}
        entry["number"] = question.number
        if question.exchange == DESCRIBE:
            return self._describe(question)
        if question.exchange == ACCEPT:
            return self._accept(question)
        if question.exchange == KEYS:
            return write({}, {"keys": self._sums.greet(_json(question.settings))})
        if question.exchange == PEERS:
            self._sums.meet(_json(question.settings))
            return write({})
        if question.exchange in OF_DATA:
            self._policy.check_sums(False)
            self._policy.check_noise(0.0, f"'{question.exchange}' would be told")
            with self._ledger.spending(question.exchange, {}):
                return self._of_data(question.exchange, _json(question.settings))
        agreed = self._get(question.method)
        if question.exchange in (*BEGINNINGS, GO_ON):
            if agreed.answered(message, question):
                return agreed.handle(message)
            with self._ledger.beginning(*agreed.budget):
                return agreed.handle(message)
        if question.exchange == LOO:
            self._policy.check_rows(agreed.rows_that_count())
        if SUM in head:
            terms = Terms.from_json(head[SUM])
            return self._masked(agreed, question, terms, without_terms(head, arrays))
        if agreed.secure_sum:
            raise ModelError(
                "this silo has agreed to send masked replies alone (secure_sum), and is asked for "
                "a plain one. Begin again."
            )
        return self._plain(agreed, question, message)

    def _plain(self, agreed: _Agreement, question: Question, message: bytes) -> bytes:
        """Return the reply to a question, at the cost of its places and draws if it is new."""
        if agreed.answered(message, question):
            return agreed.handle(message)
        with self._ledger.spending(question.exchange, evaluations(question, read(message).arrays)):
            return agreed.handle(message)

    def _masked(
        self, agreed: _Agreement, question: Question, terms: Terms, message: bytes
    ) -> bytes:
        """Return the reply to a question under the masks of a sum."""
        self._sums.check(terms)
        agreed.check_group(terms.group)
        exchange, down = agreed.exchange_of(question)
        check_summed(exchange)
        reply = self._plain(agreed, question, message)
        plan = str(_json(agreed.plan)["plan"])
        asked = asked_of_all(plan, question, message, exchange.scatter, down)
        return self._sums.masked(terms, question, message, reply, exchange.weighted, asked)

    def _of_data(self, exchange: str, asked: Mapping[str, Any]) -> bytes:
        """Return the names of the data's levels, or the moments of its columns."""
        columns, arguments = _names(asked, COLUMNS), _names(asked, "arguments")
        min_count, other = asked.get("min_count", 1), str(asked.get("other", OTHER))
        if type(min_count) is not int or (exchange == LEVELS and columns is None):
            raise DataError("a question about data names columns. Is it of another version?")
        try:
            if columns is not None and exchange == LEVELS:
                counts = level_counts(self._data, columns)
                num_rows = min((found.total() for found in counts.values()), default=0)
                self._policy.check_levels(num_rows, min_count)
                return names_reply(self._data, columns, min_count, other)
            for name, rows in numbers_of("the silo", self._data, arguments).items():
                self._policy.check_numbers(name, rows)
            return moments_reply(self._data, arguments)
        except DataError as error:
            # Its words may hold a value of the column that the server has named.
            LOG.warning("'%s' could not be answered: %s", exchange, error)
            known = "strings, categories, booleans or whole numbers, and none that is missing"
            what = known if exchange == LEVELS else "numbers"
            raise DataError(
                f"a column of {columns or arguments or 'the data'} is not there, or holds "
                f"something else than {what}. The silo's log has the rest."
            ) from error

    def _describe(self, question: Question) -> bytes:
        """Return the facts of the silo's data for a method or a model."""
        known = self._known(question.method)
        if known is not None and known.settings != question.settings:
            raise ModelError("another method was described under this id before. Begin again.")
        if known is None:
            known = self._agreement(question.method, question.settings)
            self._keep(question.method, known)
        return write({}, {"facts": known.facts})

    def _accept(self, question: Question) -> bytes:
        """Build a method from the plan that all have agreed on."""
        agreed = self._get(question.method)
        if agreed.plan not in ("", question.settings):
            raise ModelError("another plan was accepted for this method. Begin again.")
        agreed.accept(question.settings, self._policy)
        self._keep(question.method, agreed)
        if agreed.node is not None:
            self._nodes[agreed.settings] = agreed.node
        return write({})

    def _agreement(self, method: str, settings: str) -> _Agreement:
        """Return the silo's part in a method, before there is a plan."""
        described = _json(settings)
        double, secure = bool(described.get("double")), bool(described.get(SECURE))
        store = None if self._state is None else Folder(self._state / f"runs-{_file_name(method)}")
        with precision(double=double):
            if is_double() != double:
                raise ModelError(
                    "the server computes in single precision and this silo in double. Start the "
                    "silo without JAX_ENABLE_X64."
                )
            built: Any = _method_of(described, self._names)
            if "named" in described or "method" in described:
                self._policy.check_method(str(described.get("named", described.get("method"))))
                self._policy.check_sums(secure)
            if not isinstance(built, Party):
                return _Agreement(settings, double, describe(built, self._data).to_json(), None)
            if settings in self._nodes:
                node = self._nodes[settings].for_other_runs(store)
            else:
                node = SiloNode(built, self._data, store=store, **self._options)
            self._nodes[settings] = node
            self._nodes.move_to_end(settings)
            while len(self._nodes) > MAX_METHODS:
                self._nodes.popitem(last=False)
            return _Agreement(settings, double, node.facts(), node, secure_sum=secure)

    def _get(self, method: str) -> _Agreement:
        """Return what was agreed on for a method."""
        known = self._known(method)
        if known is None:
            raise ModelError(
                "this silo has not described its data for this method, or has forgotten it. "
                "Begin again."
            )
        return known

    def _known(self, method: str) -> _Agreement | None:
        """Return what was agreed on for a method, in an earlier process too; None if nothing."""
        if method not in self._agreed:
            content = self._methods.get(_file_name(method))
            if content is None:
                return None
            stored = json.loads(content)
            agreed = self._agreement(method, stored["settings"])
            if stored["plan"]:
                agreed.accept(stored["plan"], self._policy)
            self._agreed[method] = agreed
        self._agreed.move_to_end(method)
        return self._agreed[method]

    def _keep(self, method: str, agreed: _Agreement) -> None:
        """Keep what was agreed on, in memory and on the disk; forget the oldest."""
        self._agreed[method] = agreed
        self._agreed.move_to_end(method)
        stored = {"settings": agreed.settings, "plan": agreed.plan}
        self._methods.put(_file_name(method), json.dumps(stored).encode())
        while len(self._agreed) > MAX_METHODS:
            self._agreed.popitem(last=False)
        for name in list(self._methods.names())[:-MAX_METHODS]:
            self._methods.drop(name)
            if self._state is not None:
                shutil.rmtree(self._state / f"runs-{name}", ignore_errors=True)


@dataclass
class _Agreement:
    """A silo's part in one method of a server: its facts, and the node once there is a plan.

    Attributes
    ----------
    settings, plan : str
        The messages of the server, as they came.
    double : bool
        Whether the method computes in double precision.
    facts : str
    node : SiloNode or None
        None where only facts were asked for.
    secure_sum : bool
        Whether replies leave the silo under masks alone.
    """

    settings: str
    double: bool
    facts: str
    node: SiloNode[Any, Any, Any] | None
    plan: str = ""
    secure_sum: bool = False

    def accept(self, settings: str, policy: Policy) -> None:
        """Build the algorithm from the agreed plan, if the owner's rules allow it.

        Raises
        ------
        ModelError
            For a plan that is not one of this silo's facts.
        """
        found = _json(settings)
        plan, number = found.get("plan"), found.get("number")
        if self.node is None or not isinstance(plan, str) or not isinstance(number, int):
            raise DataError("a plan and this silo's number were expected. Begin again.")
        with precision(double=self.double):
            try:
                self.node.accept(plan, number)
            except (ModelError, DataError, GuideError):
                raise
            # A plan is JSON of another party: whatever is wrong in it, it is refused.
            except Exception as error:
                raise DataError(
                    f"the plan cannot be built ({type(error).__name__}). Server and silos must "
                    "run the same version."
                ) from error
        size = self.node.size
        policy.check_plan(size.num_silos, size.num_rows, size.num_parameters)
        policy.check_noise(size.multiplier, "a run would be answered")
        if size.shares_noise and not self.secure_sum:
            raise ModelError(
                "a silo's replies would have a share of the noise alone (trusted='sum'), and be "
                "sent as they are. Use Federation(..., secure_sum=True), or "
                "Privacy(trusted='silo')."
            )
        self.plan = settings

    def rows_that_count(self) -> int:
        """Return the number of the silo's rows that have an outcome."""
        if self.node is None or not self.plan:
            raise ModelError(NOT_ACCEPTED)
        with precision(double=self.double):
            return self.node.rows_that_count()

    @property
    def budget(self) -> tuple[float, float, str]:
        """Return noise multiplier, delta and what is protected; 0 for a method without a budget."""
        size = None if self.node is None else self.node.size
        return (0.0, 0.0, "") if size is None else (size.multiplier, size.delta, size.protects)

    def check_group(self, group: Sequence[int]) -> None:
        """Raise an error for a sum over too few silos to hold all shares of the noise."""
        size = None if self.node is None else self.node.size
        if size is not None and size.shares_noise and len(group) < size.num_silos:
            raise ModelError(
                f"a sum over {len(group)} of {size.num_silos} silos is asked for, in a run in "
                "which each adds a share of the noise: it would have too little. Begin another "
                "run with those that answer."
            )

    def answered(self, message: bytes, question: Question) -> bool:
        """Return whether the message has been answered before, so that it tells nothing new."""
        return self.node is not None and self.node.has_answered(message, question)

    def exchange_of(self, question: Question) -> tuple[Exchange[Any, Any, Any], Any]:
        """Return the exchange of a question, as it is built here, and the question's shapes."""
        with precision(double=self.double):
            return self.ready.exchange_of(question)

    def handle(self, message: bytes) -> bytes:
        """Return the reply to a message of a run."""
        with precision(double=self.double):
            return self.ready.handle(message)

    @property
    def ready(self) -> SiloNode[Any, Any, Any]:
        """Return the node; raise an error if there is no plan yet."""
        if self.node is None or not self.plan:
            raise ModelError(NOT_ACCEPTED)
        return self.node


def _refusal(error: Exception) -> bytes:
    """Return the reply that refuses, in words that tell nothing of this machine."""
    if isinstance(error, MissingExtraError):
        return refusal(ModelError(str(error)))
    cause: BaseException | None = error
    while not (cause is None or isinstance(cause, OSError)):
        cause = cause.__cause__
    if cause is None and isinstance(error, ModelError | DataError | GuideError):
        return refusal(error)
    # What other errors say may hold data, or a path and in it a user's name: it stays here.
    LOG.error("a message could not be answered", exc_info=error)
    if isinstance(error, SavedStateError):
        return refusal(ModelError(FOLDER_UNUSABLE))
    words = f"{type(cause or error).__name__} at the silo, whose log has the rest."
    return refusal(ModelError(words))


def evaluations(question: Question, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return at how many places and draws a silo evaluates its likelihood for a reply.

    A search gets gradient and curvature at each of its places, particles a gradient at each, a
    correction the log likelihood at each draw, latents are told at each draw, and a round counts as
    one place.
    """
    # Counted on the arrays, whose shapes must be those of the exchange.
    downs = [len(a) for name, a in arrays.items() if name.startswith("down") and a.ndim]
    most = max([1, *downs])
    if question.exchange in (IMPORTANCE, LEAVE_OUT, LOO, OUTER_LATENTS):
        return {"draws": most}
    return {"places": most if question.exchange in ("mode", TEMPERED) else 1}


def _method_of(described: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Return the method of a server's description, or the model where only facts are asked for.

    Raises
    ------
    ModelError
        For a name that the silo does not know, or another text under the same name.
    """
    model = _known(described.get("model"), names, "model")
    source = source_hash(model)
    if source and described.get("source") and described["source"] != source:
        raise ModelError(
            f"the text of '{described['model']}' differs between server and silo: all parties must "
            "have the same file."
        )
    if "named" in described:
        named = _known(described["named"], names, "method")
        if not isinstance(named, Party):
            raise ModelError(f"'{described['named']}' is no method at this silo.")
        return named
    if "method" not in described:
        return model
    kind = KINDS.get(str(described["method"]))
    if kind is None:
        raise ModelError(f"there is no method '{described['method']}': known are {sorted(KINDS)}.")
    try:
        return rebuilt(kind, model, dict(described["settings"]))
    except Exception as error:
        raise ModelError(
            f"the settings of {described['method']} cannot be used: {error}"
        ) from error


def _known(name: object, names: Mapping[str, Any], what: str) -> Any:
    if not isinstance(name, str) or name not in names:
        raise ModelError(
            f"this silo knows no {what} {name!r:.100}: it knows {sorted(names)}. The study's file "
            "must have it as a variable, or Silo(names={...})."
        )
    return names[name]


def _names(asked: Mapping[str, Any], what: str) -> list[str] | None:
    """Return the names in a question; None if it has none."""
    names = asked.get(what)
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not (listed or names is None):
        raise DataError("a question about data names columns. Is it of another version?")
    return names


def _json(text: str) -> dict[str, Any]:
    """Return the object in a JSON text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError("a message has something else than JSON in its settings.") from error
    if not isinstance(found, dict):
        raise DataError("a message has something else than an object in its settings.")
    return found


def _stores_of_sums(state: Path) -> tuple[Folder, Folder]:
    """Return the places of a silo's keys, and of those of sessions, in its folder."""
    return Folder(state / "keys"), Folder(state / "keys" / "sessions")


def _file_name(method: str) -> str:
    # Ids come from the server: a digest of one is a safe name of a file.
    return sha256(method.encode()).hexdigest()[:32]
