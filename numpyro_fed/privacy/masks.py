"""Masks of pairs of silos: what one adds to its numbers the other one takes off its own.

Bonawitz et al., 2017, "Practical secure aggregation for privacy-preserving machine learning",
without the shares of secrets by which masks of silos that drop out are taken off. Here an exchange
in which a silo has dropped out is asked anew, with other masks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np

from numpyro_fed.errors import MissingExtraError

try:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
except ImportError as error:
    raise MissingExtraError("cryptography", "privacy") from error


def stream(key: bytes, purpose: bytes, size: int) -> np.ndarray:
    """Return words (size,) that look random to all who do not know the key.

    ``key`` are 32 bytes that two silos have in common. For another ``purpose`` the words are
    others.
    """
    # A key of its own for each purpose, so that the counter of the cipher can begin at zero.
    own = HKDFExpand(hashes.SHA256(), 32, purpose).derive(key)
    cipher = Cipher(ChaCha20(own, bytes(16)), mode=None).encryptor()
    words = np.frombuffer(cipher.update(bytes(8 * size)), np.dtype("<u8"))
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
