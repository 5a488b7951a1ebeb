"""Numbers of silos whose sum is exact and which nobody sees: as words, under masks, by keys.

A number is seven words of 64 bits, the digits of a multiple of 2^-180 of up to 2^202. Words of
several parties are added modulo 2^64. The first word has room for two counts of up to 255 parties:
of those whose number is too low or minus infinity, and of those whose number is too high or
infinity; a NaN counts in both. So a sum of words says what the sum of floating numbers would have
said, and rounds less.

Masks belong to pairs of silos: what one adds to its words the other one takes off its own
(Bonawitz et al., 2017, "Practical secure aggregation for privacy-preserving machine learning",
without the shares of secrets by which masks of silos that drop out are taken off: an exchange in
which a silo has dropped out is asked anew, with other masks).

Two silos have a secret in common that comes from a pair of keys that stays, by which others know a
silo, and a fresh one each session (X25519). Whoever knows the fresh ones only, or learns later the
ones that stay, does not know it. Keys come from the operating system.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.basics.errors import DataError

# More parties would carry from one field of a word into the next.
MAX_PARTIES = 255
# A number has seven digits, multiples of these powers of two. Raw columns have room, with squares
# and fourth powers over all rows: milliseconds since 1970 are 10^12, grams may be 10^-15. Words
# hide how large a number is, so all numbers have as many. A digit has 56 bits, so that 255 of them
# fill a word; the first has 48, its sign among them, beside two counts of eight.
DIGIT, WHOLE = 56, 48
UNITS = 156, 100, 44, -12, -68, -124, -180
LARGEST_SUM = 2.0 ** (46 + UNITS[0])  # the half of what fits: most of what is wrong is found
KEY_BYTES = 32
AT_ONCE = 1 << 16  # bytes of a stream that are made at once
PURPOSE = b"numpyro_fed secure sums 1"


def encode(values: ArrayLike, parties: int) -> np.ndarray:
    """Return numbers as words (size, 7), of which those of so many ``parties`` can be added up.

    A number is rounded to the nearest multiple of 2^-180, by 4e-55 at most: from 3e-39 on a number
    of double precision is exact. Above ``LARGEST_SUM / parties``, 2e60 with three, it is sent as
    infinite, like a floating number that overflows.

    Examples
    --------
    >>> from numpyro_fed.privacy.masks import decode, encode
    >>> decode(encode([1.5, -2.0], 2) + encode([0.25, -float("inf")], 2), 2).tolist()
    [1.75, -inf]
    """
    numbers = np.asarray(values).astype(np.float64).ravel()
    most = LARGEST_SUM / parties
    # In this form a NaN is both.
    low, high = ~(numbers >= -most), ~(numbers <= most)
    rest = np.where(low | high, 0.0, numbers)
    digits = np.empty((numbers.size, len(UNITS)), np.int64)
    for i, unit in enumerate(UNITS):
        # Rounded to the nearest, not down: the rest is then exact, for small negative ones too.
        digit = np.rint(rest * 2.0**-unit)
        digits[:, i], rest = digit, rest - digit * 2.0**unit
    words = digits.view(np.uint64)
    words[:, 0] += low.astype(np.uint64) << np.uint64(WHOLE)
    words[:, 0] += high.astype(np.uint64) << np.uint64(WHOLE + 8)
    return words


def decode(words: np.ndarray, parties: int) -> np.ndarray:
    """Return the numbers (size,) of a sum, modulo 2^64, of so many parties' words (size, 7).

    Words that no such sum has are a DataError: one of the parties has sent something else, or has
    used other masks than the others.
    """
    first, rests = words[:, 0], words[:, 1:].view(np.int64)
    bias = np.uint64(1 << (WHOLE - 1))
    whole = ((first + bias) & np.uint64((1 << WHOLE) - 1)).astype(np.int64) - np.int64(bias)
    counts = (first - whole.view(np.uint64)) >> np.uint64(WHOLE)
    low, high = counts & np.uint64(255), counts >> np.uint64(8)
    most = parties << (DIGIT - 1)
    bad = (low > parties) | (high > parties) | (np.abs(whole) > (1 << (WHOLE - 2)) + parties)
    bad |= ((rests > most) | (rests < -most)).any(1)
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {bad.size} numbers are out of the range of sums over {parties} "
            "parties"
        )
    # Carried from the last digit to the first, each is again a digit of one number.
    total, up = np.zeros(len(words)), np.zeros(len(words), np.int64)
    for rest, unit in zip(rests.T[::-1], UNITS[:0:-1], strict=True):
        digit, up = _carried(rest + up)
        total += digit * 2.0**unit
    total += (whole + up) * 2.0 ** UNITS[0]
    total = np.where(low > 0, -np.inf, total)
    total = np.where(high > 0, np.inf, total)
    return np.where((low > 0) & (high > 0), np.nan, total)


def _carried(digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return digits, each within a half of its range around zero, and what is carried."""
    # Nothing is added before the shift, which the largest sum would not survive.
    up = (digits >> DIGIT) + ((digits >> (DIGIT - 1)) & 1)
    return digits - (up << DIGIT), up


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
        return cls(_x25519().X25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> str:
        """Return the public key in hexadecimal digits."""
        key = _x25519().X25519PrivateKey.from_private_bytes(self.private)
        return key.public_key().public_bytes_raw().hex()

    def agree(self, public: str) -> bytes:
        """Return the secret in common with the owner of a public key, 32 bytes."""
        key = _x25519().X25519PrivateKey.from_private_bytes(self.private)
        try:
            return key.exchange(_x25519().X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
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
    >>> from numpyro_fed.privacy.masks import Greeting, KeyPair, pair_keys
    >>> pairs = [(KeyPair.generate(), KeyPair.generate()) for _ in range(3)]
    >>> told = [Greeting(identity.public, fresh.public) for identity, fresh in pairs]
    >>> keys = [pair_keys(*pair, "a session", told, j) for j, pair in enumerate(pairs)]
    >>> keys[0][2] == keys[2][0], keys[0][1] == keys[0][2]
    (True, False)
    """
    hashes, hkdf = _crypto("hashes"), _crypto("kdf.hkdf")
    told = json.dumps([session, *(list(greeting) for greeting in greetings)]).encode()
    salt = sha256(told).digest()

    def key(greeting: Greeting) -> bytes:
        secret = identity.agree(greeting.identity) + fresh.agree(greeting.fresh)
        return hkdf.HKDF(hashes.SHA256(), KEY_BYTES, salt, PURPOSE).derive(secret)

    return {j: key(greeting) for j, greeting in enumerate(greetings) if j != me}


def stream(key: bytes, purpose: bytes, size: int) -> np.ndarray:
    """Return words (size,) that look random to all who do not know the key.

    ``key`` are 32 bytes that two silos have in common. For another ``purpose`` the words are
    others.
    """
    hashes, ciphers = _crypto("hashes"), _crypto("ciphers")
    # A key of its own for each purpose, so that the counter of the cipher can begin at zero.
    own = _crypto("kdf.hkdf").HKDFExpand(hashes.SHA256(), 32, purpose).derive(key)
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(own, bytes(16)), mode=None).encryptor()
    whole, nothing = np.empty(8 * size, np.uint8), bytes(AT_ONCE)
    # In pieces that stay in a cache, which takes a quarter of the time.
    for first in range(0, len(whole), AT_ONCE):
        cipher.update_into(nothing[: len(whole) - first], whole[first:])
    words = whole.view(np.dtype("<u8"))
    return words if sys.byteorder == "little" else words.astype(np.uint64)


def masked(words: np.ndarray, keys: Mapping[int, bytes], me: int, purpose: bytes) -> np.ndarray:
    """Return the words of silo ``me`` under the masks that it has in common with each of others.

    The sum over all of them, modulo 2^64, is the sum of their words. Any fewer of them look random.
    ``keys`` are in common with each of the other silos of the sum; ``purpose`` is the same at all
    of them, and never used with these keys for other words.

    Examples
    --------
    >>> import numpy as np
    >>> from numpyro_fed.privacy.masks import masked
    >>> key, one, two = bytes(32), np.array([3], np.uint64), np.array([4], np.uint64)
    >>> int((masked(one, {1: key}, 0, b"sum 1") + masked(two, {0: key}, 1, b"sum 1"))[0])
    7
    """
    found = words.copy()
    for other, key in keys.items():
        mask = stream(key, purpose, words.size).reshape(words.shape)
        if me < other:
            found += mask
        else:
            found -= mask
    return found


def _crypto(module: str) -> Any:
    """Return a module of the library cryptography, which is imported when it is needed."""
    return import_module(f"cryptography.hazmat.primitives.{module}")


def _x25519() -> Any:
    return _crypto("asymmetric.x25519")
