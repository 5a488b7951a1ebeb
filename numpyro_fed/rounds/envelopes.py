"""Envelopes: a question that its asker has signed, and a reply that only the asker can read.

A silo that knows nobody by a socket believes a signature (Ed25519). It covers the message, the
study, the session, a number that grows, and the key of the silo that is asked. So what was signed
for one silo, study or moment is no question at another one. Replies are encrypted to the asker
(X25519 with a fresh key each, HKDF, ChaCha20-Poly1305) and signed by the silo: whoever carries them
cannot read them, nor put others in their place.

A silo is known by its key once it has answered. The first message of a session is signed for any
silo; only what spends nothing is answered then.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fed.basics.errors import DataError, ModelError, optional
from numpyro_fed.basics.files import canonical, private_folder, read_record, write_atomically
from numpyro_fed.rounds.messages import read, write

PURPOSE = b"numpyro_fed envelope 1"
ENVELOPE, SIGNATURE, MESSAGE = "envelope", "signature", "message"  # the names in its bytes
SEALED = "sealed"
# Where a user's own key is kept, unless another file is named.
KEY_FILE = Path("~/.config/numpyro-fed/key")


@dataclass(frozen=True)
class Envelope:
    """What a signature binds a message to; texts of keys and hashes are hexadecimal digits."""

    requester: str  # the public key of who asks (Ed25519)
    replies_to: str  # the public key to which the reply is encrypted (X25519)
    study: str  # the hash of the study's files at the analyst; empty without one
    session: str  # of a federation: one number grows within it
    count: int  # it grows with each message, also where one is sent again
    to: str  # the public key of the silo (Ed25519); empty before it has answered

    @property
    def fingerprint(self) -> str:
        """Return the digest by which a policy names the requester."""
        return fingerprint_of(self.requester)


@dataclass(frozen=True)
class PrivateKey:
    """A private key of who asks or answers, from whose 32 bytes all others are derived."""

    private: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> PrivateKey:
        """Return a new key, of random bytes of the operating system."""
        return cls(os.urandom(32))

    @classmethod
    def load(cls, file: Path) -> PrivateKey:
        """Return the key that :meth:`save` has written."""
        try:
            text = file.read_text().split()[-1]
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

    def request(self, message: bytes, study: str, session: str, count: int, to: str) -> bytes:
        """Return a message in a signed envelope, with what :class:`Envelope` says beside it."""
        replies_to = self._opening.public_key().public_bytes_raw().hex()
        text = canonical(Envelope(self.public, replies_to, study, session, count, to))
        signature = self._signing.sign(_signed(text, message)).hex()
        return write(
            {MESSAGE: np.frombuffer(message, np.uint8)}, {ENVELOPE: text, SIGNATURE: signature}
        )

    def reply(self, reply: bytes, envelope: Envelope, message: bytes) -> bytes:
        """Return a silo's reply to a message, signed, which only the requester can read."""
        own = _crypto("asymmetric.x25519").X25519PrivateKey.generate()
        cipher, fresh = _cipher(own, envelope.replies_to, message), own.public_key()
        # Each key encrypts once, so that the number that is used once may be zero.
        sealed = cipher.encrypt(bytes(12), reply, None)
        ephemeral = fresh.public_bytes_raw().hex()
        signature = self._signing.sign(_signed(ephemeral, message + sealed)).hex()
        head = {"silo": self.public, "ephemeral": ephemeral, SIGNATURE: signature}
        return write({SEALED: np.frombuffer(sealed, np.uint8)}, head)

    def opened(self, reply: bytes, message: bytes) -> tuple[bytes, str]:
        """Return what a reply to a message says, and the public key of the silo that says it.

        Raises
        ------
        DataError
            If it is a reply to another message, is encrypted to somebody else, or was changed.
        """
        head, arrays = read(reply)
        try:
            sealed = arrays[SEALED].tobytes()
            said = _signed(head["ephemeral"], message + sealed)
            _verify(head["silo"], head[SIGNATURE], said)
            cipher = _cipher(self._opening, head["ephemeral"], message)
            return cipher.decrypt(bytes(12), sealed, None), head["silo"]
        # The library has an error of its own for each way in which bytes can be wrong.
        except Exception as error:
            raise DataError(
                "a silo's reply is not sealed for the key that asked, or was changed on its way"
            ) from error


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
        _verify(envelope.requester, head[SIGNATURE], _signed(canonical(envelope), message))
    # Other lengths, other digits, another signature: each is an error of another type.
    except Exception as error:
        raise DataError("the signature of the request is not that of its key") from error
    return envelope, message


def fingerprint_of(public: str) -> str:
    """Return the digest of a public key in hexadecimal digits, ``SHA256:`` and 43 letters."""
    digest = base64.b64encode(sha256(bytes.fromhex(public)).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


def _signed(text: str, content: bytes) -> bytes:
    """Return the bytes that are signed for a head and a content."""
    return PURPOSE + sha256(text.encode()).digest() + sha256(content).digest()


def _verify(public: str, signature: str, said: bytes) -> None:
    """Raise an error if a signature is not that of a key."""
    key = _crypto("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key.verify(bytes.fromhex(signature), said)


def _cipher(own: Any, public: str, message: bytes) -> Any:
    """Return the cipher of the two who know one of two keys each, for the reply to a message."""
    other = _crypto("asymmetric.x25519").X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key = _derived(own.exchange(other), sha256(message).digest())
    return _crypto("ciphers.aead").ChaCha20Poly1305(key)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes that are derived from a secret for one purpose."""
    hkdf, hashes = _crypto("kdf.hkdf"), _crypto("hashes")
    return hkdf.HKDF(hashes.SHA256(), 32, None, PURPOSE + purpose).derive(secret)


def _crypto(module: str) -> Any:
    """Return a module of the library cryptography, which the extra ``privacy`` carries."""
    return optional(f"cryptography.hazmat.primitives.{module}", "privacy")
