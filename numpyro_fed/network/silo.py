"""The process of a silo: it answers a server for any method that its owner allows."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from numpyro_fed.basics.errors import (
    DataError,
    GuideError,
    ModelError,
)
from numpyro_fed.basics.files import FolderLock, Store, read_record
from numpyro_fed.basics.programs import is_double, precision
from numpyro_fed.basics.version import VERSION, libraries
from numpyro_fed.fitting.load import METHODS
from numpyro_fed.methods.method import FederatedMethod, rebuilt
from numpyro_fed.methods.row_method import RowMethod
from numpyro_fed.network.audit import AuditLog
from numpyro_fed.network.engines import MAX_BYTES
from numpyro_fed.network.guarded_data import GuardedData
from numpyro_fed.network.ledger import Ledger, evaluations
from numpyro_fed.network.policy import Policy
from numpyro_fed.network.refusals import refusal_of
from numpyro_fed.network.requesters import Requesters
from numpyro_fed.network.silo_runs import SiloRuns
from numpyro_fed.network.silo_sums import SecureSums, asked_of_all
from numpyro_fed.privacy.budget import PrivacyWarning
from numpyro_fed.privacy.masks import fingerprint
from numpyro_fed.rounds.envelopes import Envelope
from numpyro_fed.rounds.keys import typed_key
from numpyro_fed.rounds.messages import (
    ACCEPT,
    BEGINNINGS,
    DESCRIBE,
    DESCRIBED,
    GO_ON,
    OF_DATA,
    VERSIONS,
    Question,
    read,
    refusal,
    write,
)
from numpyro_fed.rounds.names import AVERAGE, CALIBRATION, LOO, OUTER_LATENTS
from numpyro_fed.rounds.secure_sums import KEYS, PEERS, SECURE, SUM, Terms, check_summed
from numpyro_fed.text.fingerprint import source_hash
from numpyro_fed.text.plan import Facts, describe
from numpyro_fed.vertical.method import VerticalMethod
from numpyro_fed.vertical.soul import SOUL
from numpyro_fed.vertical.vfl import VFL

# Methods that a silo keeps, the one that was used least recently is forgotten first. Each call of
# nf.fit describes three.
MAX_METHODS = 32
# The rooms of a silo's store: of what was agreed on, and, with the id of a method, of its runs.
AGREED, RUNS = "methods", "runs of "
KINDS: dict[str, type[Any]] = {**METHODS, "VFL": VFL, "SOUL": SOUL}
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
    study : str
        The hash of the study's files, as ``numpyro-fed silo`` prints it: requests for another one
        are refused. Empty for silos of one process.

    Examples
    --------
    See :class:`numpyro_fed.Federation`.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        *,
        names: Mapping[str, Any],
        policy: Policy | None = None,
        state: str | Path | None = None,
        secret: Array | str | None = "auto",
        row_ids: Sequence[int] | Sequence[str] | np.ndarray | None = None,
        allow_unhidden: bool = False,
        study: str = "",
    ):
        if isinstance(secret, str) and secret != "auto":
            raise ValueError(f"secret={secret!r}: expected a jax.random.key, 'auto' or None.")
        if not (secret is None or isinstance(secret, str)):
            typed_key(secret)
        self._names, self._policy = dict(names), policy or Policy()
        self._secret, self._row_ids = secret, None if row_ids is None else np.asarray(row_ids)
        self._allow_unhidden = allow_unhidden
        self._state = None if state is None else Path(state)
        self._store = Store(self._state)
        self._table = GuardedData(data, self._policy)
        self._agreed: OrderedDict[str, _Agreement] = OrderedDict()
        self._ledger = Ledger(self._policy, self._store, self._table.num_rows)
        self._use: FolderLock | None = None
        audit = self._policy.audit
        self._audit = None if audit is None else AuditLog(audit, self._store)
        if state is None and (limits := self._policy.limits):
            warnings.warn(
                f"the policy limits what this silo answers in all its life ({', '.join(limits)}), "
                "and without a folder the count ends with the process. Give Silo(state=...).",
                category=PrivacyWarning,
                stacklevel=2,
            )
        self._counts, self._last = {"answered": 0, "refused": 0}, 0.0
        self._sums = SecureSums(self._policy, self._store)
        self._requesters = Requesters(self._policy, self._store, self._sums, study)
        # One message at a time: a silo's state has one next state.
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """Return the digest of the silo's key, by which other silos know it (``Policy.peers``).

        The key stays the same as long as the folder ``state`` does.
        """
        return fingerprint(self._sums.identity.public)

    @property
    def fingerprint_of_replies(self) -> str:
        """Return the digest of the key by which replies are signed (``Federation.silo_keys``)."""
        return self._requesters.key.fingerprint

    @property
    def health(self) -> dict[str, Any]:
        """Return when the last message came, how many were answered, and what is left of limits.

        Times are seconds since 1970; counts are those of this process.
        """
        return {"last_message": self._last or None, **self._counts, "left": self._ledger.left}

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
            self._use = FolderLock(self._state)
            # What another process has counted until now.
            self._ledger = Ledger(self._policy, self._store, self._table.num_rows)
        self._use.check()

    def answer(self, message: bytes, *, again: bool = False) -> bytes:
        """Return the reply to a message; a refusal is a reply with its reason in words.

        The reply to a signed request is encrypted to the requester, a refusal as well. Who is a
        stranger gets a refusal in plain words. ``again`` answers the last request once more, as
        where an owner has lost the file with its reply.
        """
        self._last = time.time()
        with self._lock:
            entry: dict[str, Any] = {}
            envelope, request = None, message
            try:
                self.hold()
                if len(request) > MAX_BYTES:
                    raise DataError(
                        f"a message has {len(request)} bytes, where {MAX_BYTES} are allowed."
                    )
                message, envelope = self._requesters.message_of(request, entry)
                if envelope is not None:
                    entry["study"] = self._requesters.study
                    self._requesters.check_envelope(envelope, message, again=again)
                reply = self._answer(message, entry, envelope)
            except Exception as error:
                reply = refusal_of(error)
            digests = {"message": sha256(message).hexdigest(), "reply": sha256(reply).hexdigest()}
            head, arrays = read(reply)
            sent = {name: list(a.shape) for name, a in arrays.items()}
            told = {"refused": "error" in head, "why": head.get("words", "")}
            self._counts["refused" if told["refused"] else "answered"] += 1
            try:
                if self._audit is not None:
                    self._audit.add(
                        {**entry, "sent": sent, **told, **digests, "left": self._ledger.left}
                    )
            except OSError as error:  # what the audit log does not have is not told
                LOG.error("the audit log cannot be written", exc_info=error)
                words = "the silo's audit log cannot be written, so that the silo refuses."
                reply = refusal(DataError(words))
            if envelope is None:
                return reply
            return self._requesters.key.reply(reply, envelope, message)

    def predict(
        self, key: Array, draws: bytes, new: Mapping[str, Any] | None = None, *, mean: bool = False
    ) -> dict[str, Array]:
        """Return posterior predictive draws at this silo, by its own latents; nothing leaves it.

        It may be another process than the one that has answered the server, with the same
        ``state=``.

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
        >>> silos = [nf.Silo(dict(x=x, y=b * x), names={"model": model}) for b in (2.9, 3.1)]
        >>> federation = nf.Federation(nf.network.InMemory([silo.answer for silo in silos]))
        >>> result = nf.PVI(model).run(jax.random.key(0), 1, federation, progress_bar=False)
        >>> message = result.draws_for_silo(jax.random.key(1), 1_000, silo=1)
        >>> y = silos[1].predict(jax.random.key(1), message, dict(x=np.array([10.0])))["y"]
        >>> y.shape, round(float(y.mean()))
        ((1000, 1), 30)
        """
        with self._lock, self._runs_of(Question.of(read(draws).head).method) as runs:
            posterior, arrays, held = runs.at(draws)
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
        with self._lock, self._runs_of(Question.of(read(draws).head).method) as runs:
            posterior, arrays, held = runs.at(draws)
            return posterior.sample_posterior(typed_key(key), arrays, held)

    def draws(self) -> dict[str, Array]:
        """Return this client's latents at the last draws of all parties, ``{site: (n, ...)}``.

        Sites have the names of the client's part of the text. Parties draw together at
        :meth:`VerticalResult.sample_together` of the server.

        Raises
        ------
        DataError
            If they have not.
        """
        every = [agreed.runs for agreed in reversed(self._agreed.values())]
        sampled = next((n.sampled for n in every if n is not None and n.sampled is not None), None)
        if sampled is None:
            raise DataError(
                "there are no draws here: the server draws, and every client with it, by "
                "sample_together(key, n) of a vertical model's result."
            )
        return sampled.values

    def _answer(self, message: bytes, entry: dict[str, Any], envelope: Envelope | None) -> bytes:
        """Return the reply; ``entry`` gets what the audit log is to say of the message."""
        question = Question.of(read(message).head)
        # Texts of a stranger: no more of them than a name is long.
        entry |= {"exchange": question.exchange[:100], "run": question.run[:32]}
        entry["number"] = question.number
        asker = "" if envelope is None else envelope.fingerprint
        agreed = self._known(question.method) if question.method else None
        if agreed is not None and agreed.asker != asker:
            raise ModelError("another requester has described this method. Begin again.")
        if question.exchange == DESCRIBE:
            agreed = self._described(question.method, question.settings, envelope, entry)
            return write({}, {"facts": agreed.facts, VERSIONS: json.dumps(libraries())})
        described = question.exchange == ACCEPT and _json(question.settings).get(DESCRIBED)
        if described:  # first, so that the study is noted, which is refused there, too
            self._described(question.method, str(described), envelope, entry)
        if question.exchange not in OF_DATA:
            self._requesters.check_approved(envelope)
        if question.exchange == ACCEPT:
            agreed = self._get(question.method)
            if agreed.plan not in ("", question.settings):
                raise ModelError("another plan was accepted for this method. Begin again.")
            self._build(agreed, question.settings)
            self._keep(question.method, agreed)
            return write({})
        if question.exchange == KEYS:
            return write({}, {"keys": self._sums.greet(_json(question.settings))})
        if question.exchange == PEERS:
            self._sums.meet(_json(question.settings))
            return write({})
        if question.exchange in OF_DATA:
            self._policy.check_sums(False)
            self._policy.check_noise(0.0, f"'{question.exchange}' would be told")
            self._table.check_persons()
            told = "counts, means and spreads of columns, none of few rows"
            self._requesters.check_study(envelope, question.exchange, told)
            with self._ledger.spending_evaluations(question.exchange, {}):
                return self._table.reply(question.exchange, _json(question.settings))
        with self._runs_of(question.method) as runs:
            entry["method"] = what_is_asked(_json(self._agreed[question.method].settings))
            return self._reply_of_run(runs, question, message)

    def _described(
        self, method: str, settings: str, envelope: Envelope | None, entry: dict[str, Any]
    ) -> _Agreement:
        """Return the silo's part in a method that a server describes, once its study may ask."""
        entry["method"] = what = what_is_asked(_json(settings))
        agreed = self._known(method) if method else None
        if agreed is None:
            try:
                asker = "" if envelope is None else envelope.fingerprint
                agreed = self._agreement(method, settings, asker)
            except Exception:
                unknown = "the text does not fit the data here: the log says why"
                self._requesters.check_study(envelope, what, unknown)
                raise
        facts = Facts.from_json(agreed.facts)
        self._requesters.check_study(envelope, what, self._cost(facts))
        if agreed.settings != settings:
            raise ModelError("another method was described under this id before. Begin again.")
        self._keep(method, agreed)
        return agreed

    def _cost(self, facts: Facts) -> str:
        """Return in words what may leave this silo in a method with these facts."""
        k = sum(s.stop - s.start for s in facts.sites if s.kind == "latent" and s.plate is None)
        left = self._ledger.left
        return (
            f"gradients of {k} numbers and tables of {k} x {k} at up to {left['places']:,.0f} "
            f"places, log likelihoods at up to {left['draws']:,.0f} draws: each a sum over this "
            f"silo's {self._table.num_rows:,} rows"
        )

    def _reply_of_run(self, runs: SiloRuns, question: Question, message: bytes) -> bytes:
        """Return the reply to a message of a run."""
        agreed, size, (head, arrays) = self._agreed[question.method], runs.size, read(message)
        if question.exchange in (*BEGINNINGS, GO_ON):
            cost = self._ledger.spending_privacy(size.multiplier, size.delta, size.protects)
            return runs.handle(message, cost)
        if question.exchange == OUTER_LATENTS and not self._policy.tell_latents:
            raise ModelError(
                "this silo does not tell the latents that its rows share. Its owner may allow it: "
                "tell_latents = true in the policy."
            )
        if runs.method.sends_unhidden(question.exchange) and not self._allow_unhidden:
            raise ModelError(
                "this silo is asked for predictors without the noise that hides them in a run, and "
                "does not give them: its owner may say so by Silo(..., allow_unhidden=True)."
            )
        if question.exchange == LOO:
            self._policy.check_rows_with_outcome(runs.rows_that_count())
        if question.exchange in (AVERAGE, CALIBRATION):
            about = _json(question.settings)
            by, outer, number = about.get("by"), *runs.rows_of(about["site"])
            if question.exchange == CALIBRATION:
                self._policy.check_rows_with_outcome(runs.rows_that_count())
            self._policy.check_average(number, is_told=not outer or SUM in head)
            self._policy.check_groups(runs.array(by) if by else None, about.get("min_count"))
        cost = self._ledger.spending_evaluations(question.exchange, evaluations(question, arrays))
        if SUM not in head:
            if agreed.secure_sum:
                raise ModelError(
                    "this silo has agreed to send masked replies alone (secure_sum), and is asked "
                    "for a plain one. Begin again."
                )
            return runs.handle(message, cost)
        terms = read_record(Terms, head[SUM])
        self._sums.check(terms, size.num_silos)
        if size.shares_noise and len(terms.group) < size.num_silos:
            raise ModelError(
                f"a sum over {len(terms.group)} of {size.num_silos} silos is asked for, in a run "
                "in which each adds a share of the noise: it would have too little. Begin another "
                "run with those that answer."
            )
        exchange, down = runs.exchange_of(question)
        check_summed(exchange)
        message = write(arrays, {name: text for name, text in head.items() if name != SUM})
        reply = runs.handle(message, cost)
        plan = str(_json(agreed.plan)["plan"])
        asked = asked_of_all(plan, question, arrays, exchange.scatter, down)
        return self._sums.masked(terms, question, message, reply, exchange, asked)

    def _build(self, agreed: _Agreement, settings: str) -> None:
        """Build the algorithm from the agreed plan, if the owner's rules allow it."""
        found, runs = _json(settings), agreed.runs
        plan, number = found.get("plan"), found.get("number")
        if runs is None or not isinstance(plan, str) or not isinstance(number, int):
            raise DataError("a plan and this silo's number were expected. Begin again.")
        with precision(double=agreed.double):
            try:
                runs.accept(plan, number)
            except (ModelError, DataError, GuideError):
                raise
            # A plan is JSON of another party: whatever is wrong in it, it is refused.
            except Exception as error:
                raise DataError(
                    f"the plan cannot be built ({type(error).__name__}). Server and silos must "
                    "run the same version."
                ) from error
        size = runs.size
        self._policy.check_plan(size)
        if agreed.asker and not agreed.secure_sum:
            self._policy.check_single_replies(size)
        self._policy.check_noise(size.multiplier, "a run would be answered")
        if size.shares_noise and not agreed.secure_sum:
            raise ModelError(
                "a silo's replies would have a share of the noise alone (trusted='sum'), and be "
                "sent as they are. Use Federation(..., secure_sum=True), or "
                "Privacy(trusted='silo')."
            )
        agreed.plan = settings

    def _agreement(self, method: str, settings: str, asker: str) -> _Agreement:
        """Return the silo's part in a method, before there is a plan."""
        described = _json(settings)
        double, secure = bool(described.get("double")), bool(described.get(SECURE))
        store = None if self._state is None else self._store.room(RUNS + method)
        with precision(double=double):
            if (version := described.get("version", VERSION)) != VERSION:
                raise ModelError(
                    f"numpyro_fed {version!s:.20} asks, and this silo has {VERSION}: install the "
                    "same version everywhere, since messages change between versions."
                )
            if is_double() != double:
                raise ModelError(
                    "the server computes in single precision and this silo in double. Start the "
                    "silo without JAX_ENABLE_X64."
                )
            built: Any = method_of(described, self._names)
            if "named" in described or "method" in described:
                name = str(described.get("named", described.get("method")))
                if self._policy.methods and name not in self._policy.methods:
                    raise ModelError(f"'{name}' is not among the methods of this silo's policy.")
                self._policy.check_sums(secure)
            if not isinstance(built, RowMethod | VerticalMethod):
                facts = describe(built, self._table.for_model(built))
                self._table.check_reading(names_in(facts))
                return _Agreement(settings, double, facts.to_json(), None, asker=asker)
            # The last one of the same settings has the programs that were compiled.
            same = (a.runs for a in reversed(self._agreed.values()) if a.settings == settings)
            known = next(same, None)
            runs = known and known.for_other_runs(store)
            runs = runs or SiloRuns(
                built,
                self._table.for_model(built.model),
                secret=self._secret,
                row_ids=self._row_ids,
                store=store,
            )
            self._table.check_reading(names_in(Facts.from_json(runs.facts)))
            return _Agreement(settings, double, runs.facts, runs, secure_sum=secure, asker=asker)

    @contextmanager
    def _runs_of(self, method: str) -> Iterator[SiloRuns]:
        """Enter the precision of a method, with the runs of its accepted plan."""
        agreed = self._get(method)
        if agreed.runs is None or not agreed.plan:
            raise ModelError("this silo has not accepted a plan for this method. Begin again.")
        with precision(double=agreed.double):
            yield agreed.runs

    def _get(self, method: str) -> _Agreement:
        """Return what was agreed on for a method."""
        if (known := self._known(method)) is None:
            raise ModelError(
                "this silo has not described its data for this method, or has forgotten it. "
                "Begin again."
            )
        return known

    def _known(self, method: str) -> _Agreement | None:
        """Return what was agreed on for a method, in an earlier process too; None if nothing."""
        if method not in self._agreed:
            content = self._store.room(AGREED).get(method)
            if content is None:
                return None
            stored = json.loads(content)
            agreed = self._agreement(method, stored["settings"], stored["asker"])
            if stored["plan"]:
                self._build(agreed, stored["plan"])
            self._agreed[method] = agreed
        self._agreed.move_to_end(method)
        return self._agreed[method]

    def _keep(self, method: str, agreed: _Agreement) -> None:
        """Keep what was agreed on, in memory and on the disk; forget the oldest."""
        self._agreed[method] = agreed
        self._agreed.move_to_end(method)
        stored = {"settings": agreed.settings, "plan": agreed.plan, "asker": agreed.asker}
        methods = self._store.room(AGREED)
        methods.put({method: json.dumps(stored).encode()})
        while len(self._agreed) > MAX_METHODS:
            self._agreed.popitem(last=False)
        for forgotten in methods.trim(MAX_METHODS):
            self._store.room(RUNS + forgotten).trim(0)


@dataclass
class _Agreement:
    """A silo's part in one method of a server: its facts, and its runs."""

    settings: str  # the message of the server, as it came
    double: bool  # whether the method computes in double precision
    facts: str
    runs: SiloRuns | None  # None where only facts were asked for
    plan: str = ""  # the message with the plan, as it came
    secure_sum: bool = False  # whether replies leave the silo under masks alone
    asker: str = ""  # the fingerprint of who has described it, and may ask by it


def names_in(facts: Facts) -> list[str]:
    """Return the names of all arguments that facts tell of."""
    return [a.name for a in facts.arguments] + [name for name, _ in facts.static]


def what_is_asked(described: Mapping[str, Any]) -> str:
    """Return in words the method and the model of a server's description."""
    name = described.get("named", described.get("method", "facts"))
    return f"{name!s:.50} of {described.get('model')!s:.50}"


def _json(text: str) -> dict[str, Any]:
    """Return the object in a JSON text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError("a message has something else than JSON in its settings.") from error
    if not isinstance(found, dict):
        raise DataError("a message has something else than an object in its settings.")
    return found


def method_of(described: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Return the method of a server's description, or the model where only facts are asked for."""

    def known(name: object, what: str) -> Any:
        if not isinstance(name, str) or name not in names:
            raise ModelError(
                f"this silo knows no {what} {name!r:.100}: it knows {sorted(names)}. The study's "
                "file must have it as a variable, or Silo(names={...})."
            )
        return names[name]

    model = known(described.get("model"), "model")
    source = source_hash(model)
    if source and described.get("source") and described["source"] != source:
        raise ModelError(
            f"the text of '{described['model']}' differs between server and silo: all parties must "
            "have the same file."
        )
    if "named" in described:
        named = known(described["named"], "method")
        if not isinstance(named, FederatedMethod):
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
        words = f"the settings of {described['method']} cannot be used: {error}"
        raise ModelError(words) from error
