"""Messages to silos that are under way, whose replies are taken as they arrive."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from numpyro_fed.basics.errors import ConvergenceWarning, SavedStateError, SiloAwayError
from numpyro_fed.rounds.journal import Journal
from numpyro_fed.rounds.messages import raise_refusal


@dataclass(eq=False)
class Arrivals:
    """The messages of an exchange that are under way, and the replies in the order of arrival.

    A silo that does not answer within the patience gets the same message again, and the others go
    on. With a journal the replies of an earlier process arrive first, as they did then.
    ``ask(silo, message, deadline)`` returns the reply, or why there is none. ``at_once`` silos are
    asked at the same time, each in a thread. With 1 there is no thread: :meth:`next` asks the silo
    that has waited longest.
    """

    exchange: str
    ask: Callable[[int, bytes, float], bytes | OSError]
    patience: float
    at_once: int
    journal: Journal | None
    _messages: dict[int, bytes] = field(default_factory=dict, init=False)  # the oldest first
    _asked: set[int] = field(default_factory=set, init=False)
    _away: dict[int, str] = field(default_factory=dict, init=False)
    _come: queue.SimpleQueue[tuple[int, bytes | Exception]] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    def send(self, silo: int, message: bytes) -> None:
        """Send a message to a silo that has replied to the last one."""
        self._messages[silo] = message
        if self.journal is None or self.journal.next_silo is None:
            self._ask_in_threads()

    def next(self) -> tuple[int, bytes]:
        """Return the next silo whose reply to its last message has arrived, and the reply."""
        journal = self.journal
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
        raise_refusal(reply, silo, self.exchange)
        return silo, reply

    def _arrived(self) -> tuple[int, bytes]:
        """Wait for the next reply, and return the silo and the reply."""
        reply: bytes | Exception
        while True:
            if self.at_once > 1:
                self._ask_in_threads()
                silo, reply = self._come.get()
            else:
                silo, message = next(iter(self._messages.items()))
                reply = self.ask(silo, message, time.monotonic() + self.patience)
            self._asked.discard(silo)
            if isinstance(reply, bytes):
                return silo, reply
            if not isinstance(reply, OSError):
                raise reply
            # The same message: one that is still at work on it need not begin again.
            self._messages[silo] = self._messages.pop(silo)
            self._away[silo] = f"{reply}" or type(reply).__name__
            if self._away.keys() >= self._messages.keys():
                raise SiloAwayError(self._away, self.exchange, self.patience, {})
            warnings.warn(
                f"no reply to the exchange '{self.exchange}' within {self.patience:g} s from "
                f"silo {silo} ({self._away[silo]}). The others go on, and it is asked again.",
                category=ConvergenceWarning,
                stacklevel=2,
            )

    def _ask_in_threads(self) -> None:
        """Ask silos whose message has not been sent yet, as many as may be asked at once."""
        if self.at_once == 1:
            return
        for silo in [j for j in self._messages if j not in self._asked]:
            if len(self._asked) == self.at_once:
                return
            # A daemon: a script that has ended does not wait for replies that nobody uses.
            pair = silo, self._messages[silo]
            threading.Thread(target=self._wait, args=pair, daemon=True).start()
            self._asked.add(silo)

    def _wait(self, silo: int, message: bytes) -> None:
        try:
            self._come.put((silo, self.ask(silo, message, time.monotonic() + self.patience)))
        except Exception as error:  # raised where the reply is waited for
            self._come.put((silo, error))
