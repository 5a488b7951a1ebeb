"""The journal of a federation: all replies of silos, in a file that outlives the process.

A script that is run again asks the same questions, since it draws the same random numbers. The
journal gives the replies that came before, in their order, and so the script goes on where it had
ended: bit for bit, whatever the script does with them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from numpyro_fed.errors import SavedStateError
from numpyro_fed.files import Use, append_privately, write_atomically
from numpyro_fed.runtime.messages import is_refusal

SESSION, REPLIES = "session", "replies"
DIGEST = 32  # bytes of a SHA-256
HEADER = 4 + 8 + 2 * DIGEST  # silo, length, digest of the message, digest of the reply


class Journal:
    """All replies so far, in the order in which they came.

    Attributes
    ----------
    session : bytes
        Twelve random bytes, of which the ids of runs are made, the same when a script goes on.
    """

    def __init__(self, folder: Path, num_silos: int):
        self._use = Use(folder)
        name = folder / SESSION
        if not name.exists():
            write_atomically(name, lambda stream: stream.write(secrets.token_bytes(12)))
        self.session = name.read_bytes()
        self._file = folder / REPLIES
        self._waiting: list[deque[tuple[bytes, int, int]]] = [deque() for _ in range(num_silos)]
        whole = self._read(num_silos)
        self._refusals: list[bytes] = []
        # What a process that was killed has written of its last reply is asked for again.
        if self._file.exists():
            os.truncate(self._file, whole)

    def _read(self, num_silos: int) -> int:
        """Find the replies in the file, and return how many of its bytes are whole."""
        if not self._file.exists():
            return 0
        whole, size = 0, self._file.stat().st_size
        with open(self._file, "rb") as stream:
            while whole + HEADER <= size:
                stream.seek(whole)
                head = stream.read(HEADER)
                silo, length = (
                    int.from_bytes(head[:4], "little"),
                    int.from_bytes(head[4:12], "little"),
                )
                end = whole + HEADER + length
                if end > size:
                    break
                if silo >= num_silos:
                    raise SavedStateError(
                        f"{self._file} has a reply of silo {silo}, but there are {num_silos} silos "
                        "now. Give another folder as state=."
                    )
                if hashlib.sha256(stream.read(length)).digest() != head[12 + DIGEST :]:
                    break
                self._waiting[silo].append((head[12 : 12 + DIGEST], whole + HEADER, length))
                whole = end
        return whole

    @property
    def next_silo(self) -> int | None:
        """Return the silo whose reply came next in an earlier process; None at the end."""
        waiting = [(kept[0][1], j) for j, kept in enumerate(self._waiting) if kept]
        return min(waiting)[1] if waiting else None

    def known(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the replies to messages, by silo, that came in an earlier process.

        Raises
        ------
        SavedStateError
            If the script asks something else than it did then.
        """
        found: dict[int, bytes] = {}
        for silo, message in messages.items():
            if not self._waiting[silo]:
                continue
            digest, start, length = self._waiting[silo][0]
            if digest != hashlib.sha256(message).digest():
                raise SavedStateError(
                    f"the script asks silo {silo} something else than it did before with the "
                    f"replies in {self._file}. Run the same script with the same versions, or "
                    "give another folder as state=."
                )
            self._waiting[silo].popleft()
            with open(self._file, "rb") as stream:
                stream.seek(start)
                found[silo] = stream.read(length)
        return found

    def add(self, pairs: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Add replies to messages, by silo; they are on the disk before this returns.

        An empty reply is that of a silo that was away. It and a refusal are written with the next
        replies: a script that they end asks once more when it is run again, for the silo may have
        been mended.
        """
        records, refusals = self._refusals, list[bytes]()
        for silo, (message, reply) in pairs.items():
            digests = hashlib.sha256(message).digest() + hashlib.sha256(reply).digest()
            sizes = silo.to_bytes(4, "little") + len(reply).to_bytes(8, "little")
            (refusals if not reply or is_refusal(reply) else records).append(
                sizes + digests + reply
            )
        self._refusals = refusals
        self._use.check()
        with append_privately(self._file) as stream:
            stream.writelines(records)
            stream.flush()
            os.fsync(stream.fileno())
