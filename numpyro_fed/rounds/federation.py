"""Silos in processes of their own, in the place of a list of their data."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from numpyro_fed.basics.errors import (
    DataError,
    ModelError,
    ReplyError,
    SiloAwayError,
    one_of,
    positive_int,
    positive_number,
)
from numpyro_fed.basics.files import log_privately
from numpyro_fed.basics.programs import is_double
from numpyro_fed.basics.version import VERSION, libraries
from numpyro_fed.data.silo_data import checked_names, label, names_or_numbers
from numpyro_fed.privacy.masks import MAX_PARTIES
from numpyro_fed.rounds.arrivals import Arrivals
from numpyro_fed.rounds.envelopes import PrivateKey, fingerprint_of, is_sealed
from numpyro_fed.rounds.journal import Journal
from numpyro_fed.rounds.messages import (
    ACCEPT,
    DESCRIBE,
    DESCRIBED,
    VERSIONS,
    Question,
    at_silo,
    is_refusal,
    raise_refusal,
    read,
    write,
)
from numpyro_fed.rounds.secure_sums import KEYS, LEAST_HIDING, PEERS, SECURE, SummedGroups, Terms

# Seconds between two tries to reach a silo: the first is short, since most failures are, and a silo
# that restarts is found within the last.
FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0
# Silos that are asked at once; each takes a thread, which waits for bytes.
MAX_AT_ONCE = 64
MISSING = "wait", "reweight", "leave_out"
LOG = "log.jsonl"
LOGGER = logging.getLogger("numpyro_fed.federation")
STALE = "StaleError"  # the name of the refusal of a message that came after a later one
Cached = TypeVar("Cached")


class Engine(Protocol):
    """A carrier of bytes between the server and silos; it knows nothing of what they say."""

    @property
    def num_silos(self) -> int: ...

    def send(self, silo: int, message: bytes, timeout: float) -> bytes:
        """Return a silo's reply; raise an OSError if there is none within ``timeout`` seconds.

        Then the same message is sent again.
        """


class Federation:
    """Silos in processes of their own, which any method takes in the place of their data.

    All silos of an exchange are asked at once. A silo that does not answer is asked again until
    ``patience`` is over; messages are numbered, so that one that arrives twice moves nothing.

    Parameters
    ----------
    engine : Engine
        It carries bytes: :class:`numpyro_fed.network.Sockets`, or one of your own with
        ``num_silos`` and ``send(silo, message, timeout)``.
    names : dict, optional
        The objects that silos know by name, such as ``{"model": model}``: models, and methods with
        settings that no message can hold (an optimiser). By default a model is named by its
        ``__name__``. ``numpyro-fed run`` passes the variables of the study's file.
    patience : float
        Seconds to wait for a silo in each exchange.
    missing : {"wait", "reweight", "leave_out"}
        What happens without silos that are away once ``patience`` is over. By default a run ends
        with an error, from which the same script goes on. With ``"reweight"`` rounds of SFVI scale
        the sum over the others up. With ``"leave_out"`` :func:`numpyro_fed.fit` begins again with
        the others, if they are more than half: the posterior is that of their data, and its verdict
        says so. With ``privacy=`` it ends with the error, since a budget would be spent twice.
        Where replies are added up, a fit begins again only before the first sum and with three
        silos or more, and later fits of the federation are over the same ones: the difference of
        two sums would be the reply of a silo. Rounds of PVI go on in any case, since the factor of
        a silo that is away stays as it is; under sums while three silos are left.
    state : str or Path, optional
        A folder in which all replies are kept. The same script with the same folder goes on where
        it has ended, in a new process too: it is given the replies so far, and asks silos only for
        what comes after.
    log : str or Path, optional
        A file to which a line of JSON is added for each message: time, silo, exchange, seconds,
        bytes of message and reply, their SHA-256 as in the audit log of the silo, and the error of
        a silo that did not answer in time. By default ``log.jsonl`` in the folder ``state``, if
        there is one.
    at_once : int
        The number of silos that are asked at the same time; each takes a thread.
    silo_names : list of str, optional
        The names of silos, in their order, by which tables, figures and messages call them.
    secure_sum : bool, optional
        Whether silos mask their replies, so that the server learns the sum over all silos of an
        exchange and no reply of one. By default three silos or more do, if they are not in this
        process; above 255, which no sum holds, there is no default. What needs single replies is
        refused: :func:`numpyro_fed.Result.silos`, ``leave_out``, PVI one silo after the other; and
        what would tell them: a fit with a silo more or less (``add``, ``remove``). False asks for
        single replies, which a silo's owner must allow (``Policy(secure_sum=False)``); with True
        questions about data that are told silo by silo, such as :func:`numpyro_fed.levels`, are
        refused, too.
    key : PrivateKey, optional
        The key of who asks (:class:`numpyro_fed.network.PrivateKey`). With it each message is
        signed, and replies are encrypted to it. Silos whose policy has ``requesters`` answer no
        others. ``numpyro-fed run`` takes that of ``numpyro-fed key``.
    study : str
        The hash of the study's files, which silos compare with that of theirs.
    silo_keys : sequence of str, optional
        The fingerprints of the silos' keys, ``"SHA256:..."``, in the order of the silos, as a
        silo's process prints its own (:attr:`numpyro_fed.Silo.fingerprint_of_replies`). Without
        them the key of a silo's first answer is believed, and others are not from then on.

    Raises
    ------
    SiloAwayError
        Naming the silos that did not answer in time.
    ModelError, DataError
        With what a silo has refused, and its number.

    Examples
    --------
    Three silos in this process, with bytes between them:

    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_fed as nf
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with nf.silo_plate("row", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> data = [dict(y=np.array(y)) for y in ([1.0, 2.0], [3.0, 4.0, 5.0], [2.0])]
    >>> small = nf.Policy(min_rows=1, parameters_per_row=1.0)
    >>> silos = [nf.Silo(d, names={"model": model}, policy=small) for d in data]
    >>> federation = nf.Federation(nf.network.InMemory([silo.answer for silo in silos]))
    >>> result = nf.PVI(model).run(jax.random.key(0), 1, federation, progress_bar=False)
    >>> round(float(result.posterior()["mu"].mean), 3)
    2.829
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: Mapping[str, Any] | None = None,
        patience: float = 600.0,
        missing: str = "wait",
        state: str | Path | None = None,
        log: str | Path | None = None,
        at_once: int = MAX_AT_ONCE,
        secure_sum: bool | None = None,
        silo_names: Sequence[str] = (),
        key: PrivateKey | None = None,
        study: str = "",
        silo_keys: Sequence[str] = (),
    ):
        positive_int("at_once", at_once)
        positive_number("patience", patience)
        one_of("missing", missing, *MISSING)
        self.missing = missing
        self._state, self._most_at_once = None if state is None else Path(state), at_once
        self._engine, self.names, self.patience = engine, dict(names or {}), patience
        self.num_silos = engine.num_silos
        # By which the log knows the silos, and the sums of all parts.
        self._numbers: Sequence[int] = range(self.num_silos)
        self._summed = SummedGroups(self.num_silos)
        self._nothing_else = secure_sum is True
        if secure_sum is None:
            elsewhere = not getattr(engine, "in_process", False)
            if elsewhere and self.num_silos > MAX_PARTIES:
                raise ModelError(
                    f"there are {self.num_silos} silos, and a sum that hides their replies holds "
                    f"{MAX_PARTIES}. Join silos, or ask for single replies by Federation(..., "
                    "secure_sum=False), which all owners must allow (secure_sum = false in the "
                    "policy)."
                )
            secure_sum = elsewhere and self.num_silos >= LEAST_HIDING
        self.secure_sum = secure_sum
        self.silo_names = _names_for(self.num_silos, silo_names)
        self._journal = journal = None if state is None else Journal(Path(state), self.num_silos)
        self._log = Path(state) / LOG if log is None and state is not None else log
        self._log_lock, self._key, self._study = threading.Lock(), key, study
        self._last_count, self._silo_keys = 0, dict[int, str]()
        self._expected_keys = tuple(silo_keys)
        if len(self._expected_keys) not in (0, self.num_silos):
            raise DataError(
                f"silo_keys has {len(self._expected_keys)} entries, and there are "
                f"{self.num_silos} silos: give one for each, in their order."
            )
        self._session = secrets.token_bytes(12) if journal is None else journal.session
        if journal is not None:
            self._silo_keys |= journal.silo_keys
        self._num_sums = self._num_parts = self._num_runs = 0
        self._cached = dict[Hashable, Any]()
        # The descriptions of methods that silos have not heard of, by their id.
        self._untold = dict[str, str]()
        self._at_once = min(self.num_silos, at_once)
        # In words, what silos compute with other versions than this process; empty if they do not.
        self.unlike_versions = ""

    def __len__(self) -> int:
        return self.num_silos

    def of(self, silos: Sequence[int]) -> Federation:
        """Return the federation of some of the silos, in this order.

        Its replies are kept in a folder of their own below ``state``.
        """
        numbers, send = tuple(silos), self._engine.send
        # Numbered: the same script makes the same ones again, and each keeps its own replies. By
        # its silos, too: another time other ones may be away.
        self._num_parts += 1
        members = sha256(json.dumps(numbers).encode()).hexdigest()[:8]
        folder = None if self._state is None else self._state / f"part-{self._num_parts}-{members}"
        if self._journal is not None:
            self._journal.add({})  # who was away, from which the part may follow
        engine: Any = SimpleNamespace(
            num_silos=len(numbers), send=lambda silo, *args: send(numbers[silo], *args)
        )
        names, known = names_or_numbers(self.silo_names, self.num_silos), self._silo_keys
        part = Federation(
            engine,
            names=self.names,
            patience=self.patience,
            missing=self.missing,
            state=folder,
            log=self._log,
            at_once=self._most_at_once,
            secure_sum=self.secure_sum,
            silo_names=[names[j] for j in numbers],
            key=self._key,
            study=self._study,
            silo_keys=[self._expected_keys[j] for j in numbers] if self._expected_keys else (),
        )
        part._nothing_else = self._nothing_else
        part._numbers = [self._numbers[j] for j in numbers]
        part._summed = self._summed
        part._silo_keys |= {i: known[j] for i, j in enumerate(numbers) if j in known}
        return part

    def hides_with(self, who: Sequence[int]) -> bool:
        """Return whether a sum over all of some silos tells no reply beside those before it.

        Sums count that this federation, its parts, or that of which it is a part have formed.
        """
        return self._summed.hide_with(self._numbers[j] for j in who)

    def cached(self, name: Hashable, make: Callable[[], Cached]) -> Cached:
        """Return the object of this name, made at its first use."""
        if name not in self._cached:
            self._cached[name] = make()
        return self._cached[name]

    def new_run(self) -> bytes:
        """Return the id of a new run."""
        self._num_runs += 1
        return self._session + self._num_runs.to_bytes(4, "little")

    def describe(
        self, method: Mapping[str, Any], like: Mapping[str, Any] | None = None
    ) -> tuple[str, list[str]]:
        """Return an id for a method, and each silo's facts for it, as JSON.

        ``method`` is what silos need to build the same: ``{"model": "model"}`` alone, or with a
        method's name and settings. Where what was described before is ``like`` it, its facts are
        those: then silos are asked nothing, and hear of the method with its plan.
        """
        settings = self._description(method)
        if ("facts", settings) not in self._cached:
            id_ = f"{self._session.hex()}-{len(self._cached)}"
            known = None if like is None else self._cached.get(("facts", self._description(like)))
            if known is not None:
                self._untold[id_] = settings
                self._cached["facts", settings] = id_, known[1]
                return self._cached["facts", settings]
            answers = self._ask_all(DESCRIBE, [settings] * self.num_silos, id_)
            facts = [_text("facts", answer, j) for j, answer in enumerate(answers)]
            self.unlike_versions = self._unlike(answers)
            self._cached["facts", settings] = id_, facts
        return self._cached["facts", settings]

    def _description(self, method: Mapping[str, Any]) -> str:
        """Return the text by which silos build a method in the precision of this process."""
        asked = {**method, "double": is_double(), "version": VERSION}
        asked |= {SECURE: True} if self.secure_sum else {}
        return json.dumps(asked, sort_keys=True)

    def _unlike(self, descriptions: Sequence[bytes]) -> str:
        """Return in words which silos have other versions of libraries than this process."""
        found, own = list[str](), libraries()
        for j, description in enumerate(descriptions):
            try:
                theirs = json.loads(_text(VERSIONS, description, j))
            except ValueError:
                theirs = None
            if not isinstance(theirs, dict) or not str(theirs).isprintable():
                raise ReplyError("names no versions of libraries", silo=j, exchange=DESCRIBE)
            unlike = [name for name in own if theirs.get(name) != own[name]]
            if unlike:
                each = ", ".join(f"{n} {theirs.get(n)!s:.20} (here {own[n]})" for n in unlike)
                found.append(f"{label(j, self.silo_names)} has {each}")
        return f"{'; '.join(found)}: last digits of results may differ." if found else ""

    def ask_of_data(self, exchange: str, settings: str) -> list[bytes]:
        """Return each silo's reply to a question about its data that needs no model.

        The same question is asked once.
        """
        if self._nothing_else:
            raise ModelError(
                f"'{exchange}' is told silo by silo, and this federation asks for secure sums "
                "alone (secure_sum=True). Ask by a Federation without, if all silos allow it."
            )
        every = [settings] * self.num_silos
        return self.cached((exchange, settings), lambda: self._ask_all(exchange, every))

    def accept(self, method: str, plan: str) -> None:
        """Send the agreed plan of a method to all silos, each with its number."""
        untold = self._untold.get(method)
        told = {} if untold is None else {DESCRIBED: untold}  # first: an owner reads it
        numbers = range(self.num_silos)
        settings = [json.dumps({**told, "plan": plan, "number": j}) for j in numbers]
        self._ask_all(ACCEPT, settings, method)

    def ask(self, who: Sequence[int], messages: Sequence[bytes], exchange: str) -> list[bytes]:
        """Return the reply of each silo of ``who`` to its message; all are asked at once."""
        pairs = dict(zip(who, messages, strict=True))
        known = {} if self._journal is None else self._journal.known(pairs)
        deadline = time.monotonic() + self.patience
        asked = [(j, message, deadline) for j, message in pairs.items() if j not in known]
        replies = {j: reply for j, reply in known.items() if reply}
        away = {j: "away then, too" for j, reply in known.items() if not reply}
        without: dict[int, tuple[bytes, bytes]] = {}
        for j, message, reply in self._as_they_come(exchange, asked):
            if isinstance(reply, OSError):
                away[j] = f"{reply}" or type(reply).__name__
            else:
                replies[j] = reply
            if j in away or is_refusal(replies[j]):
                without[j] = message, replies.get(j, b"")
                if j not in away and len(replies) + len(away) < len(pairs):
                    # By files the replies of the others may take days.
                    words = "%s refuses '%s': an error says why once the others have answered"
                    LOGGER.warning(words, label(j, self.silo_names), exchange)
            elif self._journal is not None:
                # At once: what has come is not asked for again, whatever ends the others.
                self._journal.add({j: (message, replies[j])})
        if self._journal is not None:
            self._journal.add(without)
        if away:
            raise SiloAwayError(away, exchange, self.patience, replies)
        for j in who:
            raise_refusal(replies[j], j, exchange)
        return [replies[j] for j in who]

    def _as_they_come(
        self, exchange: str, asked: Sequence[tuple[int, bytes, float]]
    ) -> Iterator[tuple[int, bytes, bytes | OSError]]:
        """Ask silos, and yield each with its message and its reply, or why there is none."""
        if self._at_once == 1:
            # In this thread, whose settings of JAX a silo in it may need.
            yield from ((j, m, self._one(exchange, j, m, until)) for j, m, until in asked)
            return
        come: queue.Queue[tuple[int, bytes, bytes | Exception]] = queue.Queue()
        free = threading.Semaphore(self._at_once)

        def ask(silo: int, message: bytes, until: float) -> None:
            with free:
                try:
                    come.put((silo, message, self._one(exchange, silo, message, until)))
                except Exception as error:  # raised where the reply is waited for
                    come.put((silo, message, error))

        for one in asked:
            # A daemon: a script that has ended does not wait for replies that nobody uses.
            threading.Thread(target=ask, args=one, daemon=True).start()
        failed: Exception | None = None
        for _ in asked:
            silo, message, reply = come.get()
            if isinstance(reply, bytes | OSError):
                yield silo, message, reply
            else:
                failed = failed or reply
        if failed is not None:
            raise failed

    def sum_terms(self, who: Sequence[int]) -> dict[int, Terms]:
        """Return the terms of a new sum over silos, as each of them is told.

        Before the first one, all silos of the federation tell each other their public keys.
        """
        session = self._session.hex()
        if "keys" not in self._cached:
            named = [{"session": at_silo(session, j), "number": j} for j in range(self.num_silos)]
            answers = self._ask_all(KEYS, [json.dumps(one, sort_keys=True) for one in named])
            keys = [_text("keys", answer, j) for j, answer in enumerate(answers)]
            told = ({**one, "keys": keys} for one in named)
            self._ask_all(PEERS, [json.dumps(one, sort_keys=True) for one in told])
            self._cached["keys"] = keys
        self._num_sums += 1
        if len(who) == self.num_silos:
            self._summed.add(self._numbers)
        return {j: Terms(at_silo(session, j), self._num_sums, tuple(sorted(who))) for j in who}

    def _ask_all(self, exchange: str, settings: Sequence[str], method: str = "") -> list[bytes]:
        """Return all silos' replies to a question before a run, each to its own settings."""
        silos = range(self.num_silos)
        questions = [Question(exchange, settings[j], method=at_silo(method, j)) for j in silos]
        return self.ask(silos, [write({}, q.head()) for q in questions], exchange)

    def arrivals(self, exchange: str) -> Arrivals:
        """Return the messages of an exchange in which each silo is asked by itself."""
        ask = partial(self._one, exchange)
        return Arrivals(exchange, ask, self.patience, self._at_once, self._journal)

    def _one(self, exchange: str, silo: int, message: bytes, deadline: float) -> bytes | OSError:
        """Send a message, and again until the deadline; return the reply or the last error."""
        reply: bytes | OSError | None
        began, wait, reply = time.monotonic(), FIRST_WAIT, None
        while reply is None:
            try:
                reply = self._sent(silo, message, max(deadline - time.monotonic(), 0.001), exchange)
            except OSError as error:
                if time.monotonic() + wait >= deadline:
                    reply = error
                else:
                    time.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT)
        if self._log is not None:
            line = {
                "silo": self._numbers[silo],
                "exchange": exchange,
                "seconds": round(time.monotonic() - began, 4),
                "sent": len(message),
                "message": sha256(message).hexdigest(),
            }
            if isinstance(reply, bytes):
                line |= {"received": len(reply), "reply": sha256(reply).hexdigest()}
            else:
                line["away"] = repr(reply)
            with self._log_lock:
                log_privately(self._log, line)
        return reply

    def _sent(self, silo: int, message: bytes, timeout: float, exchange: str) -> bytes:
        """Return the reply to a message, which is signed and opened where there is a key."""
        if self._key is None:
            return self._engine.send(silo, message, timeout)
        with self._log_lock:  # one number for each try
            count = self._last_count = max(self._last_count + 1, time.time_ns())
        known = self._silo_keys.get(silo, "")
        envelope = self._key.envelope(self._study, self._session.hex(), count, silo, known)
        sealed = self._engine.send(silo, self._key.request(message, envelope), timeout)
        refused = partial(ReplyError, silo=silo, exchange=exchange)
        try:
            head, _ = read(sealed)
            if not is_sealed(sealed):
                words = ascii(head.get("words", "without a reason"))[:500]
                raise DataError(f"the silo, or somebody on the way, says: {words}")
            reply, public = self._key.opened(sealed, envelope, message)
        except DataError as error:
            raise refused(f"is refused: {error}") from error
        self._check_silo(silo, public, refused)
        head, _ = read(reply)
        if head.get("error") == STALE:
            # The clock of this machine may have been set back since.
            with self._log_lock:
                self._last_count = max(self._last_count, int(head["words"].rpartition(" ")[2]))
            raise ConnectionError("the silo has a later number than this one; it is signed again")
        return reply

    def _check_silo(self, silo: int, public: str, refused: Callable[[str], ReplyError]) -> None:
        """Keep the public key of a silo that answers first; raise an error for another one."""
        with self._log_lock:
            is_new = silo not in self._silo_keys
            known = self._silo_keys.setdefault(silo, public)
            expected = self._expected_keys[silo] if self._expected_keys else ""
            if expected and fingerprint_of(public) != expected:
                self._silo_keys.pop(silo)
                raise refused(
                    f"is refused: it is signed by {fingerprint_of(public)}, and silo_keys names "
                    f"{expected}. Ask the site, on another way, which one is its."
                )
            if is_new:
                LOGGER.info("silo %d answers by the key %s", silo, fingerprint_of(public))
                if self._journal is not None:
                    self._journal.keep_silo_keys(self._silo_keys)
        if public != known:
            raise refused(
                "is refused: another silo answers in its place than before, by its key. If its "
                "folder was lost, begin the study again with a new folder state=."
            )


def _names_for(number: int, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of silos; raise an error if there is not one for each."""
    given = [names] if isinstance(names, str) else list(names)
    if given and len(given) != number:
        raise DataError(
            f"silo_names has {len(given)} entries, and there are {number} silos: give a name for "
            "each silo, in their order."
        )
    return checked_names(given)


def _text(name: str, answer: bytes, silo: int) -> str:
    """Return a text in the head of a silo's reply."""
    head, _ = read(answer)
    if name not in head:
        raise DataError(f"the reply of silo {silo} lacks its {name}. Is it of another version?")
    return head[name]
