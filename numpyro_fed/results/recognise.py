"""Provenance: whether a saved fit is loaded with the model and the data that made it.

A file keeps a fingerprint of the model as programs, a hash of its source, and a keyed digest of
each array. Programs differ between versions of JAX and NumPyro; there the source alone decides.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from numpyro_fed.errors import DataWarning, SavedStateError
from numpyro_fed.model.data import SiloData, array_bytes

PACKAGES = "jax", "numpyro"  # their versions decide what a model's programs look like


@dataclass(frozen=True)
class Provenance:
    """The text and the data that a fit is made from.

    ``text`` returns a fingerprint of the model's programs, which takes half a second. ``source`` is
    a hash of the model's source; empty where that is not known. ``parties`` has the data of each
    party as read, by ``"silo 0"``, ``"silo 1"``, ...
    """

    text: Callable[[], str]
    source: str
    parties: Mapping[str, SiloData]

    def record(self) -> dict[str, Any]:
        """Return the entries of a file: fingerprints, and a digest of each array.

        Digests are keyed by random bytes of each file, so that those of two files cannot be
        compared. Who has the file and guesses a whole array can check the guess.
        """
        salt = secrets.token_bytes(32).hex()
        return {
            "text": self.text(),
            "source": self.source,
            "versions": {name: version(name) for name in PACKAGES},
            "salt": salt,
            "digests": self._digests(salt),
        }

    def check_order(self, record: Mapping[str, Any]) -> None:
        """Raise an error if the parties are those of the fit in another order."""
        saved, present = record["digests"], self._digests(record["salt"])
        if set(saved) != set(present) or saved == present:
            return
        sorted_digests = [sorted(map(_joined, digests.values())) for digests in (saved, present)]
        if sorted_digests[0] != sorted_digests[1]:
            return
        owner = {_joined(digests): name for name, digests in saved.items()}
        moved = {name: owner[_joined(digests)] for name, digests in present.items()}
        moved = {name: was for name, was in moved.items() if saved[name] != present[name]}
        if len(moved) == 2:
            kind, first = next(iter(moved)).rsplit(" ", 1)
            second = list(moved)[1].rsplit(" ", 1)[-1]
            message = f"{kind}s {first} and {second} are swapped"
        else:
            pairs = (f"{name} holds what {was} held" for name, was in moved.items())
            message = f"they are in another order: {', '.join(pairs)}"
        raise SavedStateError(f"{message}. Pass them in the order in which the fit was made.")

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise an error for other data, by party and array, and for another model.

        With other versions of JAX or NumPyro a model is recognised by its source alone; if that
        differs, too, there is a warning.
        """
        present = self._digests(record["salt"])
        for name, saved in record["digests"].items():
            digests = present.get(name, {})
            if differ := [k for k in sorted({*saved, *digests}) if saved.get(k) != digests.get(k)]:
                raise SavedStateError(
                    f"{name}, {', '.join(map(repr, differ))}: not the data that the fit was made "
                    "with. Pass these (the same rows in the same order), or run the fit again on "
                    "the new ones, from init_state=result.state if that is to go on."
                )
        if record["text"] == self.text():
            return
        now = {name: version(name) for name in PACKAGES}
        if record["versions"] == now:
            raise SavedStateError(
                "the model's text is another than that of the fit, or a variable that it reads "
                "from outside has changed: priors, likelihood or deterministic sites are not the "
                "same programs. Pass the model that the fit was made with."
            )
        if not self.source or record["source"] != self.source:
            there, here = (
                " and ".join(f"{name} {number}" for name, number in versions.items())
                for versions in (record["versions"], now)
            )
            warnings.warn(
                f"the fit was made under {there}, and here are {here}: "
                "whether the model's text is the same cannot be told from its programs, and its "
                "source is another one or not known. Make sure that it says the same.",
                category=DataWarning,
                stacklevel=5,
            )

    def _digests(self, salt: str) -> dict[str, dict[str, str]]:
        """Return a digest of each array and plain value of each party."""
        found: dict[str, dict[str, str]] = {}
        for owner, data in self.parties.items():
            found[owner] = {}
            for name, value in data.leaves.items():
                is_array = isinstance(value, np.ndarray | np.generic)
                raw = array_bytes(np.asarray(value)) if is_array else repr(value).encode()
                # Eight bytes: two arrays of one fit collide by chance once in 10^19, and a file
                # stays small.
                digest = hashlib.blake2b(raw, key=bytes.fromhex(salt), digest_size=8)
                found[owner][name] = digest.hexdigest()
        return found


def _joined(digests: Mapping[str, str]) -> str:
    return " ".join(f"{name}={digest}" for name, digest in sorted(digests.items()))
