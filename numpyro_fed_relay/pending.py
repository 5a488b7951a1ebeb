"""Answers that take longer than a call may last: who asks is given a ticket, and asks again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

# Seconds that a call waits for an answer before it returns that there is none yet.
HOLD = 5.0
# Tickets that are remembered. One for whose answer nobody comes is forgotten, the oldest first.
MAX_TICKETS = 256

Found = dict[str, Any]


class Pending:
    """Answers that are being made, each in a thread of its own, by ticket.

    Parameters
    ----------
    name : str
        Of the threads.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(MAX_TICKETS, name)
        self._lock = threading.Lock()
        self._made: OrderedDict[str, Future[Found]] = OrderedDict()

    def answer(self, ticket: str, make: Callable[[], Found] | None) -> Found:
        """Return the answer for a ticket, ``{"computes": True}`` while there is none.

        ``make`` makes the answer of a new ticket. None stands for a ticket that has been given
        before; if it is not known, the process that gave it has gone: ``{"lost": why}``.
        """
        with self._lock:
            if ticket not in self._made and make is not None:
                self._made[ticket] = self._pool.submit(make)
                while len(self._made) > MAX_TICKETS:
                    self._made.popitem(last=False)[1].cancel()
            future = self._made.get(ticket)
        if future is None:
            return {"lost": "the message has not arrived, or its process has gone"}
        try:
            found = future.result(HOLD)
        except NotYet:
            return {"computes": True}
        with self._lock:
            self._made.pop(ticket, None)
        return found
