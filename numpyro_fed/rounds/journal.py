"""The replies of silos that a script keeps on disk, so that it goes on where it was stopped."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from numpyro_fed.basics.errors import SavedStateError
from numpyro_fed.basics.files import FolderLock, Store
from numpyro_fed.rounds.messages import is_refusal

# What a journal keeps.
SESSION, REPLIES, SILO_KEYS = "session", "replies", "silo keys"


class Journal:
    """All replies so far, in the order in which they came."""

    def __init__(self, folder: Path, num_silos: int):
        self._folder, self._use, store = folder, FolderLock(folder), Store(folder)
        self.session = store.get(SESSION) or secrets.token_bytes(12)
        store.put({SESSION: self.session})
        self._all = store
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
    def silo_keys(self) -> dict[int, str]:
        """Return the public keys of the silos that have answered, by their number."""
        kept = json.loads(self._all.get(SILO_KEYS) or b"{}")
        return {int(silo): public for silo, public in kept.items()}

    def keep_silo_keys(self, keys: Mapping[int, str]) -> None:
        """Keep the public keys of silos."""
        self._all.put({SILO_KEYS: json.dumps(dict(keys)).encode()})

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
        records, self._refusals = self._refusals, []
        for silo, (message, reply) in pairs.items():
            told = self._refusals if not reply or is_refusal(reply) else records
            told.append((silo, message, reply))
        self._use.check()
        kept = {
            f"{number}/{silo}/{sha256(message).hexdigest()}": reply
            for number, (silo, message, reply) in enumerate(records, self._num_kept)
        }
        self._num_kept += len(records)
        self._store.put(kept)
