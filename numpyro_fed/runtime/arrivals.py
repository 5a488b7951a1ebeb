"""Asynchronous rounds by the real clock: each reply is used as it arrives.

All silos work at the same time. When the reply of one arrives, the server makes a step with it
alone, and sends that silo its next message at once. A step is a round of the algorithm with one
participant, whose message was sent some steps before. A round of the run has as many steps as there
are silos.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from numpyro_fed.errors import SavedStateError, SiloAwayError
from numpyro_fed.runtime.messages import raise_refusal


class Arrival(NamedTuple):
    """A silo's reply to its last message; None if it did not answer within the patience."""

    silo: int
    reply: bytes | None


class AskOne(Protocol):
    """A function that waits for a silo's reply, until a deadline of the monotonic clock."""

    def __call__(self, silo: int, message: bytes, deadline: float) -> bytes | OSError:
        """Return the reply, or the last error."""


class Record(Protocol):
    """The replies that are kept on a disk, in the order in which they came."""

    @property
    def next_silo(self) -> int | None:
        """Return the silo whose reply came next in an earlier process; None at the end."""

    def known(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return replies to messages, by silo, that came in an earlier process."""

    def add(self, pairs: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Add replies to messages, by silo."""


class Arrivals:
    """The messages of an exchange that are under way, and the replies in the order of arrival.

    With a record the replies of an earlier process arrive first, as they did then.

    Parameters
    ----------
    exchange : str
    ask : AskOne
    patience : float
        Seconds to wait for a silo's reply to a message.
    record : Record, optional
    at_once : bool
        Whether silos are asked in threads. If not, :meth:`next` asks the one that has waited
        longest.
    """

    def __init__(
        self, exchange: str, ask: AskOne, patience: float, record: Record | None, at_once: bool
    ):
        self._exchange, self._ask, self._patience = exchange, ask, patience
        self._record, self._at_once = record, at_once
        self._messages = dict[int, bytes]()  # the oldest first
        self._asked, self._away = set[int](), dict[int, str]()
        self._come: queue.SimpleQueue[tuple[int, bytes | OSError]] = queue.SimpleQueue()

    def send(self, silo: int, message: bytes) -> None:
        """Send a message to a silo that has replied to the last one."""
        self._messages[silo] = message
        if self._next_recorded is None:
            self._ask_in_threads()

    def next(self) -> Arrival:
        """Return the next reply of any silo to its last message, once it has arrived.

        Raises
        ------
        SiloAwayError
            If no silo has answered within the patience.
        ModelError, DataError
            With what a silo has refused.
        """
        num_silos = len(self._messages)
        if (silo := self._next_recorded) is not None:
            reply = self._recorded(silo)
        else:
            silo, reply = self._arrived()
            if self._record is not None:
                kept = b"" if isinstance(reply, OSError) else reply
                self._record.add({silo: (self._messages[silo], kept)})
        del self._messages[silo]
        self._asked.discard(silo)
        if isinstance(reply, OSError):
            self._away[silo] = f"{reply}" or type(reply).__name__
            if len(self._away) == num_silos:
                raise SiloAwayError(self._away, self._exchange, self._patience, {})
            return Arrival(silo, None)
        self._away.clear()
        raise_refusal(reply, silo, self._exchange)
        return Arrival(silo, reply)

    @property
    def _next_recorded(self) -> int | None:
        return None if self._record is None else self._record.next_silo

    def _recorded(self, silo: int) -> bytes | OSError:
        """Return the reply of a silo that came next in an earlier process."""
        if self._record is None or silo not in self._messages:
            raise SavedStateError(
                f"the script does not ask silo {silo}, whose reply came next before. Run the same "
                "script with the same versions, or give another folder as state=."
            )
        found = self._record.known({silo: self._messages[silo]})
        return found[silo] or TimeoutError("away then, too")

    def _arrived(self) -> tuple[int, bytes | OSError]:
        """Wait for the next reply, and return the silo and the reply."""
        if not self._at_once:
            silo, message = next(iter(self._messages.items()))
            return silo, self._ask(silo, message, time.monotonic() + self._patience)
        self._ask_in_threads()
        return self._come.get()

    def _ask_in_threads(self) -> None:
        """Ask all silos whose message has not been sent yet, each in a thread."""
        for silo in self._messages.keys() - self._asked if self._at_once else ():
            # A daemon: a script that has ended does not wait for replies that nobody uses.
            pair = silo, self._messages[silo]
            threading.Thread(target=self._wait, args=pair, daemon=True).start()
            self._asked.add(silo)

    def _wait(self, silo: int, message: bytes) -> None:
        reply = self._ask(silo, message, time.monotonic() + self._patience)
        self._come.put((silo, reply))
