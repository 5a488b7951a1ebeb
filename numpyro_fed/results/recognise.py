"""Whether a saved fit is given the model and the data that it was made with."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from numpyro_fed.errors import SavedStateError
from numpyro_fed.model.data import SiloData, array_bytes

PACKAGES = "jax", "numpyro"  # which decide how a text is written down as programs


@dataclass(frozen=True)
class Provenance:
    """The text and the data that a fit is made from.

    Attributes
    ----------
    text : callable
        Returns a fingerprint of the text as programs, of which that takes half a second.
    source : str
        A hash of the text's source; empty where that is not known.
    held : dict of str to SiloData
        By ``"silo 0"``, ``"silo 1"``, ..., as it was read.
    """

    text: Callable[[], str]
    source: str
    held: Mapping[str, SiloData]

    def record(self) -> dict[str, Any]:
        """Return what a file keeps: fingerprints, and a digest of each array.

        Digests are keyed by random bytes of the file's own, so that those of two files cannot be
        compared. Whoever has the file and guesses a whole array can find out that it is that.
        """
        salt = secrets.token_bytes(32)
        return {
            "text": self.text(),
            "source": self.source,
            "versions": {name: version(name) for name in PACKAGES},
            "salt": salt.hex(),
            "digests": _digests(self.held, salt),
        }

    def check_order(self, record: Mapping[str, Any]) -> None:
        """Refuse parties that are those of the fit, but in another order."""
        there, here = record["digests"], self._digests(record)
        if set(there) != set(here) or there == here:
            return
        known = [sorted(map(_joined, found.values())) for found in (there, here)]
        if known[0] != known[1]:
            return
        owner = {_joined(found): name for name, found in there.items()}
        moved = {name: owner[_joined(found)] for name, found in here.items()}
        moved = {name: was for name, was in moved.items() if there[name] != here[name]}
        if len(moved) == 2:
            kind, first = next(iter(moved)).rsplit(" ", 1)
            second = list(moved)[1].rsplit(" ", 1)[-1]
            said = f"{kind}s {first} and {second} are swapped"
        else:
            pairs = (f"{name} holds what {was} held" for name, was in moved.items())
            said = f"they are in another order: {', '.join(pairs)}"
        raise SavedStateError(f"{said}. Pass them in the order in which the fit was made.")

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuse other data, by party and array, and another text.

        Where versions of JAX or NumPyro are others, a text is known by its source alone: warn if
        that is another one, too.
        """
        here = self._digests(record)
        for name, there in record["digests"].items():
            found = here.get(name, {})
            if differ := [k for k in sorted({*there, *found}) if there.get(k) != found.get(k)]:
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
            warnings.warn(
                f"the fit was made under {_words(record['versions'])}, and here are {_words(now)}: "
                "whether the model's text is the same cannot be told from its programs, and its "
                "source is another one or not known. Make sure that it says the same.",
                stacklevel=5,
            )

    def _digests(self, record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        return _digests(self.held, bytes.fromhex(record["salt"]))


def _digests(held: Mapping[str, SiloData], salt: bytes) -> dict[str, dict[str, str]]:
    """A digest of each array and plain value of each party, as the fit reads them."""
    return {
        owner: {name: _digest(value, salt) for name, value in data.leaves.items()}
        for owner, data in held.items()
    }


def _digest(value: np.ndarray | bool | int | str | None, salt: bytes) -> str:
    seen = (
        array_bytes(value) if isinstance(value, np.ndarray | np.generic) else repr(value).encode()
    )
    return hashlib.blake2b(seen, key=salt, digest_size=8).hexdigest()


def _joined(found: Mapping[str, str]) -> str:
    return " ".join(f"{name}={digest}" for name, digest in sorted(found.items()))


def _words(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {number}" for name, number in versions.items())
