"""Keys of silos: a pair that stays, by which others know a silo, and a fresh one each session.

Two silos have a secret in common that comes from both pairs (X25519). Whoever knows the fresh ones
only, or learns later the ones that stay, does not know it. Keys come from the operating system.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from numpyro_fed.errors import DataError, MissingExtraError

try:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtraError("cryptography", "privacy") from error

KEY_BYTES = 32
PURPOSE = b"numpyro_fed secure sums 1"


class Greeting(NamedTuple):
    """The public keys of a silo in a session, in hexadecimal digits: one stays, one is fresh."""

    identity: str
    fresh: str

    @property
    def fingerprint(self) -> str:
        """Return the digest of the key that stays, by which a silo is known to others."""
        return fingerprint(self.identity)


@dataclass(frozen=True)
class KeyPair:
    """A private key, 32 bytes that never leave the silo, and the public one that belongs to it."""

    private: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """Return a new pair, of random bytes of the operating system."""
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> str:
        """Return the public key in hexadecimal digits."""
        key = X25519PrivateKey.from_private_bytes(self.private)
        return key.public_key().public_bytes_raw().hex()

    def agree(self, public: str) -> bytes:
        """Return the secret in common with the owner of a public key, 32 bytes."""
        key = X25519PrivateKey.from_private_bytes(self.private)
        try:
            return key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        # Other lengths, other digits, and points that give everybody the same secret.
        except ValueError as error:
            raise DataError(
                f"{public!r:.80} is no public key of X25519: 64 hexadecimal digits were expected."
            ) from error


def fingerprint(public: str) -> str:
    """Return the SHA-256 of a public key, both in hexadecimal digits."""
    try:
        return sha256(bytes.fromhex(public)).hexdigest()
    except ValueError as error:
        raise DataError(f"{public!r:.80} is no key in hexadecimal digits.") from error


def pair_keys(
    identity: KeyPair, fresh: KeyPair, session: str, greetings: Sequence[Greeting], me: int
) -> dict[int, bytes]:
    """Return the key that silo ``me`` has in common with each of the others, 32 bytes each.

    It depends on the keys of all silos of the session, which ``greetings`` has in their order:
    silos to whom a server has given different lists have different keys, and their masks do not
    cancel.

    Examples
    --------
    >>> from numpyro_fed.privacy.keys import Greeting, KeyPair, pair_keys
    >>> pairs = [(KeyPair.generate(), KeyPair.generate()) for _ in range(3)]
    >>> told = [Greeting(identity.public, fresh.public) for identity, fresh in pairs]
    >>> keys = [pair_keys(*pair, "a session", told, j) for j, pair in enumerate(pairs)]
    >>> keys[0][2] == keys[2][0], keys[0][1] == keys[0][2]
    (True, False)
    """
    told = json.dumps([session, *(list(greeting) for greeting in greetings)]).encode()
    salt = sha256(told).digest()

    def key(greeting: Greeting) -> bytes:
        secret = identity.agree(greeting.identity) + fresh.agree(greeting.fresh)
        return HKDF(hashes.SHA256(), KEY_BYTES, salt, PURPOSE).derive(secret)

    return {j: key(greeting) for j, greeting in enumerate(greetings) if j != me}
