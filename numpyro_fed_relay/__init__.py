"""What the NVFLARE of a hospital or of the server runs for numpyro_fed: it carries bytes, no more.

It imports nothing but the standard library and NVFLARE, so that its processes start without JAX,
and whoever allows it can read all of it. Over a Unix socket a message is its length in eight bytes
and then its bytes, and so is the reply.
"""

from __future__ import annotations

import socket
from pathlib import Path

LENGTH = 8  # bytes of the length before a message
CHUNK = 1 << 20


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
