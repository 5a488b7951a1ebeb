"""The replies of silos that work at the same time, in the order in which they arrive."""

from __future__ import annotations

import queue
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from numpyro_fed.errors import ConvergenceWarning, SavedStateError, SiloAwayError
from numpyro_fed.files import Store, Use
from numpyro_fed.runtime.messages import is_refusal, raise_refusal

SESSION, REPLIES = "session", "replies"


class Journal:
    """All replies so far, in the order in which they came.

    Attributes
    ----------
    session : bytes
        Twelve random bytes, of which the ids of runs are made, the same when a script goes on.
    """

    def __init__(self, folder: Path, num_silos: int):
        self._folder, self._use, store = folder, Use(folder), Store(folder)
        self.session = store.get(SESSION) or secrets.token_bytes(12)
        store.put({SESSION: self.session})
        self._store = store.room(REPLIES)
        # Of each silo the replies that the script has not asked for yet: their names.
        self._waiting: list[deque[str]] = [deque() for _ in range(num_silos)]
        names = self._store.names()
        for name in names:
            silo = int(name.split("/")[1])
            if silo >= num_silos:
                raise SavedStateError(
                    f"{folder} has a reply of silo {silo}, but there are {num_silos} silos now. "
                    "Give another folder as state=."
                )
            self._waiting[silo].append(name)
        self._num_kept, self._refusals = len(names), list[tuple[int, bytes, bytes]]()

    @property
    def next_silo(self) -> int | None:
        """Return the silo whose reply came next in an earlier process; None at the end."""
        waiting = [(int(kept[0].split("/")[0]), j) for j, kept in enumerate(self._waiting) if kept]
        return min(waiting)[1] if waiting else None

    def known(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the replies to messages, by silo, that came in an earlier process."""
        found: dict[int, bytes] = {}
        for silo, message in messages.items():
            if not self._waiting[silo]:
                continue
            name = self._waiting[silo][0]
            if name.split("/")[2] != sha256(message).hexdigest():
                raise SavedStateError(
                    f"the script asks silo {silo} something else than it did before with the "
                    f"replies in {self._folder}. Run the same script with the same versions, or "
                    "give another folder as state=."
                )
            found[silo] = self._store.get(self._waiting[silo].popleft()) or b""
        return found

    def add(self, pairs: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Add replies to messages, by silo; they are on the disk before this returns.

        An empty reply is that of a silo that was away. It and a refusal are written with the next
        replies: a script that they end asks once more when it is run again, for the silo may have
        been mended.
        """
        records, refusals = self._refusals, list[tuple[int, bytes, bytes]]()
        for silo, (message, reply) in pairs.items():
            told = refusals if not reply or is_refusal(reply) else records
            told.append((silo, message, reply))
        self._refusals = refusals
        self._use.check()
        kept = dict[str, bytes]()
        for silo, message, reply in records:
            kept[f"{self._num_kept}/{silo}/{sha256(message).hexdigest()}"] = reply
            self._num_kept += 1
        self._store.put(kept)


class Arrivals:
    """The messages of an exchange that are under way, and the replies in the order of arrival.

    A silo that does not answer within the patience gets the same message again, and the others go
    on. With a journal the replies of an earlier process arrive first, as they did then.
    ``at_once`` silos are asked at the same time, each in a thread. With 1 there is no thread:
    :meth:`next` asks the silo that has waited longest.
    """

    def __init__(
        self,
        exchange: str,
        # Waits for a silo's reply until a deadline of the monotonic clock, and returns the reply or
        # the last error.
        ask: Callable[[int, bytes, float], bytes | OSError],
        patience: float,  # seconds
        journal: Journal | None,
        at_once: int,
    ):
        self._exchange, self._ask, self._patience = exchange, ask, patience
        self._journal, self._at_once = journal, at_once
        self._messages = dict[int, bytes]()  # the oldest first
        self._asked, self._away = set[int](), dict[int, str]()
        self._come: queue.SimpleQueue[tuple[int, bytes | Exception]] = queue.SimpleQueue()

    def send(self, silo: int, message: bytes) -> None:
        """Send a message to a silo that has replied to the last one."""
        self._messages[silo] = message
        if self._journal is None or self._journal.next_silo is None:
            self._ask_in_threads()

    def next(self) -> tuple[int, bytes]:
        """Return the next silo whose reply to its last message has arrived, and the reply."""
        journal = self._journal
        if journal is not None and (silo := journal.next_silo) is not None:
            if silo not in self._messages:
                raise SavedStateError(
                    f"the script does not ask silo {silo}, whose reply came next before. Run the "
                    "same script with the same versions, or give another folder as state=."
                )
            reply = journal.known({silo: self._messages[silo]})[silo]
        else:
            silo, reply = self._arrived()
            if journal is not None:
                journal.add({silo: (self._messages[silo], reply)})
        del self._messages[silo]
        self._away.clear()
        raise_refusal(reply, silo, self._exchange)
        return silo, reply

    def _arrived(self) -> tuple[int, bytes]:
        """Wait for the next reply, and return the silo and the reply."""
        reply: bytes | Exception
        while True:
            if self._at_once > 1:
                self._ask_in_threads()
                silo, reply = self._come.get()
            else:
                silo, message = next(iter(self._messages.items()))
                reply = self._ask(silo, message, time.monotonic() + self._patience)
            self._asked.discard(silo)
            if isinstance(reply, bytes):
                return silo, reply
            if not isinstance(reply, OSError):
                raise reply
            # The same message: one that is still at work on it need not begin again.
            self._messages[silo] = self._messages.pop(silo)
            self._away[silo] = f"{reply}" or type(reply).__name__
            if self._away.keys() >= self._messages.keys():
                raise SiloAwayError(self._away, self._exchange, self._patience, {})
            warnings.warn(
                f"no reply to the exchange '{self._exchange}' within {self._patience:g} s from "
                f"silo {silo} ({self._away[silo]}). The others go on, and it is asked again.",
                category=ConvergenceWarning,
                stacklevel=2,
            )

    def _ask_in_threads(self) -> None:
        """Ask silos whose message has not been sent yet, as many as may be asked at once."""
        if self._at_once == 1:
            return
        for silo in [j for j in self._messages if j not in self._asked]:
            if len(self._asked) == self._at_once:
                return
            # A daemon: a script that has ended does not wait for replies that nobody uses.
            pair = silo, self._messages[silo]
            threading.Thread(target=self._wait, args=pair, daemon=True).start()
            self._asked.add(silo)

    def _wait(self, silo: int, message: bytes) -> None:
        reply: bytes | Exception
        try:
            reply = self._ask(silo, message, time.monotonic() + self._patience)
        except Exception as error:  # raised where the reply is waited for
            reply = error
        self._come.put((silo, reply))
