"""What the NVFLARE of a hospital or of the server runs for numpyro_fed: it carries bytes, no more.

It imports nothing but the standard library and NVFLARE, so that its processes start without JAX,
and whoever allows it can read all of it. Over a Unix socket a message is its length in eight bytes
and then its bytes, and so is the reply.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import TypedDict

LENGTH = 8  # bytes of the length before a message
CHUNK = 1 << 20
# Seconds that a call waits for an answer before it returns that there is none yet.
HOLD = 5.0


def relay(path: str | Path, message: bytes, timeout: float) -> bytes:
    """Return the reply to a message from the process that listens at a socket.

    Raises
    ------
    OSError
        If nobody listens there, or no reply comes in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(len(message).to_bytes(LENGTH, "little"))
        connection.sendall(message)
        length = int.from_bytes(receive(connection, LENGTH), "little")
        return receive(connection, length)


def receive(connection: socket.socket, length: int) -> bytes:
    """Return so many bytes of a connection."""
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(CHUNK, length - len(received)))
        if not part:
            raise ConnectionResetError("the connection ended within a message")
        received += part
    return bytes(received)


class Found(TypedDict, total=False):
    """What is said to whoever asks: a reply, or why there is none."""

    reply: bytes
    computes: bool  # there is none yet: ask again by the ticket
    away: str  # why the silo's process cannot be asked
    lost: str  # why nobody knows of the message
    silent: float  # seconds since the site was last heard of, where it is lost


class Pending:
    """Answers that take longer than a call may last, each made in a thread of its own, by ticket.

    Who asks has a ticket, and asks again with it.

    Parameters
    ----------
    most : int
        Answers that are kept. Of those for which nobody comes the oldest is forgotten first.
    """

    def __init__(self, most: int):
        # Some may wait for a process that hangs.
        self._most, self._pool = most, ThreadPoolExecutor(4 * most, "numpyro-fed")
        self._lock = threading.Lock()
        self._made: OrderedDict[str, Future[Found]] = OrderedDict()

    def answer(self, ticket: str, make: Callable[[], Found] | None) -> Found:
        """Return the answer for a ticket, ``{"computes": True}`` while there is none.

        ``make`` makes the answer, if that has not begun. None stands for a ticket that was shown
        before; if it is not known, the process that knew it has gone: ``{"lost": why}``.
        """
        with self._lock:
            if ticket not in self._made and make is not None:
                self._made[ticket] = self._pool.submit(make)
                while len(self._made) > self._most:
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
