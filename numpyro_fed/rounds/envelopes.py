"""Envelopes: a question that its asker has signed, and a reply that only the asker can read.

A silo that knows nobody by a socket believes a signature (Ed25519). It covers the message, the
study, the session, a number that grows, and the key of the silo that is asked. So what was signed
for one silo, study or moment is no question at another one. Replies are encrypted to the asker
(X25519 with a fresh key each, HKDF, ChaCha20-Poly1305) and signed by the silo: whoever carries them
cannot read them, nor put others in their place.

A silo is known by its key once it has answered, or by its fingerprint where the asker was told that
before. The first message of a session is signed for a number of a silo alone; only what spends
nothing is answered then.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.basics.files import canonical, private_folder, read_record, write_atomically
from numpyro_fed.rounds.messages import read, write

PURPOSE, KEY_BYTES = b"numpyro_fed envelope 1", 32
ENVELOPE, SIGNATURE, MESSAGE = "envelope", "signature", "message"  # the names in its bytes
SEALED = "sealed"
# Where a user's own key is kept, unless another file is named.
KEY_FILE = Path("~/.config/numpyro-fed/key")


@dataclass(frozen=True)
class Envelope:
    """The record to which a signature binds a message; keys and hashes are hexadecimal digits."""

    requester: str  # the public key of who asks (Ed25519)
    replies_to: str  # the public key to which the reply is encrypted (X25519)
    study: str  # the hash of the study's files at the analyst; empty without one
    session: str  # of a federation: one number grows within it
    count: int  # it grows with each message, also where one is sent again
    silo: int  # the number of the silo that is asked
    to: str  # the public key of that silo (Ed25519); empty before it has answered

    @property
    def fingerprint(self) -> str:
        """Return the digest by which a policy names the requester."""
        return fingerprint_of(self.requester)

    def asked(self, message: bytes) -> bytes:
        """Return a digest of what is asked, of whom and when: the same where it is asked again."""
        whom = canonical([self.requester, self.replies_to, self.session, self.silo])
        return _joined(whom.encode(), message)


@dataclass(frozen=True)
class PrivateKey:
    """A private key of who asks or answers, from whose 32 bytes all others are derived."""

    private: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.private) != KEY_BYTES:
            raise ModelError(f"a key has {KEY_BYTES} bytes, and this one {len(self.private)}.")

    @classmethod
    def generate(cls) -> PrivateKey:
        """Return a new key, of random bytes of the operating system."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load(cls, file: Path) -> PrivateKey:
        """Return the key that :meth:`save` has written."""
        try:
            text = file.read_text(encoding="utf-8").split()[-1]
            if file.stat().st_mode & 0o077 and os.name == "posix":
                raise ModelError(
                    f"others on this machine can open the key {file}. Run 'chmod 600 {file}'; if "
                    "they may have read it, make another one by numpyro-fed key."
                )
            return cls(bytes.fromhex(text))
        except (OSError, IndexError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"{file} is no key: make one by 'numpyro-fed key --file {file}'."
            ) from error

    def save(self, file: Path) -> None:
        """Write the key to a file that only its owner can read."""
        if not file.parent.exists():
            private_folder(file.parent)
        text = f"numpyro-fed-private-key {self.private.hex()}\n".encode()
        write_atomically(file, lambda stream: stream.write(text))

    @property
    def public(self) -> str:
        """Return the public key by which signatures are checked, in hexadecimal digits."""
        return self._signing.public_key().public_bytes_raw().hex()

    @property
    def fingerprint(self) -> str:
        """Return the digest of the public key, ``SHA256:`` and 43 letters, as policies name it."""
        return fingerprint_of(self.public)

    @cached_property
    def _signing(self) -> Any:
        return _crypto("asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(
            _derived(self.private, b"signatures")
        )

    @cached_property
    def _opening(self) -> Any:
        return _crypto("asymmetric.x25519").X25519PrivateKey.from_private_bytes(
            _derived(self.private, b"replies")
        )

    def request(self, message: bytes, envelope: Envelope) -> bytes:
        """Return a message in an envelope, signed; the keys in it are those of this key."""
        text = canonical(envelope)
        signature = self._signing.sign(_joined(text.encode(), message)).hex()
        head = {ENVELOPE: text, SIGNATURE: signature}
        return write({MESSAGE: np.frombuffer(message, np.uint8)}, head)

    def envelope(self, study: str, session: str, count: int, silo: int, to: str) -> Envelope:
        """Return an envelope of this key, with what :class:`Envelope` says."""
        return Envelope(self.public, self._replies_to, study, session, count, silo, to)

    def reply(self, reply: bytes, envelope: Envelope, message: bytes) -> bytes:
        """Return a silo's reply to a message, signed, which only the requester can read."""
        own = _crypto("asymmetric.x25519").X25519PrivateKey.generate()
        ephemeral = own.public_key().public_bytes_raw().hex()
        asked = envelope.asked(message)
        # Each key encrypts once, so that the number that is used once may be zero.
        sealed = _cipher(own, envelope.replies_to, ephemeral, asked).encrypt(bytes(12), reply, None)
        signature = self._signing.sign(_joined(ephemeral.encode(), asked, sealed)).hex()
        head = {"silo": self.public, "ephemeral": ephemeral, SIGNATURE: signature}
        return write({SEALED: np.frombuffer(sealed, np.uint8)}, head)

    def opened(self, reply: bytes, envelope: Envelope, message: bytes) -> tuple[bytes, str]:
        """Return what a reply to a message says, and the public key of the silo that says it.

        Raises
        ------
        DataError
            If it is a reply to another message, session or silo, is encrypted to somebody else, or
            was changed.
        """
        head, arrays = read(reply)
        try:
            sealed, ephemeral, asked = arrays[SEALED], head["ephemeral"], envelope.asked(message)
            said = _joined(ephemeral.encode(), asked, sealed.tobytes())
            _verify(head["silo"], head[SIGNATURE], said)
            cipher = _cipher(self._opening, ephemeral, ephemeral, asked)
            return cipher.decrypt(bytes(12), sealed.tobytes(), None), head["silo"]
        # The library has an error of its own for each way in which bytes can be wrong.
        except Exception as error:
            raise DataError(
                "a silo's reply is not sealed for the key that asked, or was changed on its way"
            ) from error

    def can_seal(self, envelope: Envelope) -> bool:
        """Return whether a reply can be encrypted to the key of an envelope."""
        try:
            _cipher(self._opening, envelope.replies_to, "", b"")
        except ValueError:  # other digits, other lengths, and points that give all the same secret
            return False
        return True

    @cached_property
    def _replies_to(self) -> str:
        return self._opening.public_key().public_bytes_raw().hex()


def is_sealed(reply: bytes) -> bool:
    """Return whether a reply is one of :meth:`PrivateKey.reply`; refusals of strangers are not."""
    return SEALED in read(reply).arrays


def signed_message(request: bytes) -> tuple[Envelope, bytes] | None:
    """Return the envelope and the message of a request, None for a message without an envelope.

    Raises
    ------
    DataError
        If the signature is not that of its key, or covers something else.
    """
    head, arrays = read(request)
    if ENVELOPE not in head:
        return None
    envelope = read_record(Envelope, head[ENVELOPE])
    message = arrays[MESSAGE].tobytes() if MESSAGE in arrays else b""
    try:
        _verify(envelope.requester, head[SIGNATURE], _joined(canonical(envelope).encode(), message))
    # Other lengths, other digits, another signature: each is an error of another type.
    except Exception as error:
        raise DataError("the signature of the request is not that of its key") from error
    return envelope, message


def fingerprint_of(public: str) -> str:
    """Return the digest of a public key in hexadecimal digits, ``SHA256:`` and 43 letters."""
    digest = base64.b64encode(sha256(bytes.fromhex(public)).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


def _joined(*parts: bytes) -> bytes:
    """Return bytes that stand for several parts, and for no others."""
    return PURPOSE + b"".join(sha256(part).digest() for part in parts)


def _verify(public: str, signature: str, said: bytes) -> None:
    """Raise an error if a signature is not that of a key."""
    key = _crypto("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key.verify(bytes.fromhex(signature), said)


def _cipher(own: Any, other: str, ephemeral: str, asked: bytes) -> Any:
    """Return the cipher of the two who know one of two private keys each, for one reply."""
    key = _crypto("asymmetric.x25519").X25519PublicKey.from_public_bytes(bytes.fromhex(other))
    secret = _derived(own.exchange(key), _joined(ephemeral.encode(), asked))
    return _crypto("ciphers.aead").ChaCha20Poly1305(secret)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes that are derived from a secret for one purpose."""
    hkdf, hashes = _crypto("kdf.hkdf"), _crypto("hashes")
    return hkdf.HKDF(hashes.SHA256(), 32, None, PURPOSE + purpose).derive(secret)


def _crypto(module: str) -> Any:
    """Return a module of the library cryptography, which is imported where there are keys."""
    return import_module(f"cryptography.hazmat.primitives.{module}")
