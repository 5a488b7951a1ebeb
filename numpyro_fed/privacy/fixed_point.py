"""Real numbers as whole ones modulo 2^64, whose sums are exact and can be masked.

A number ``v`` is two words of 64 bits: the nearest whole number to ``v``, and what is left as a
multiple of 2^-56. Words of several parties are added modulo 2^64. The word of the whole number has
room for two counts of up to 255 parties: of those whose number is too low or minus infinity, and
of those whose number is too high or infinity; a NaN counts in both. So a sum of words says what
the sum of floating numbers would have said.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from numpyro_fed.errors import DataError

# More parties would carry from one field of a word into the next.
MAX_PARTIES = 255
FRACTION = 56  # bits after the point
WHOLE = 48  # bits of the whole number, its sign among them; the two counts have eight each
LARGEST_SUM = 2.0**46  # the half of what fits, so that most of what is wrong is found
ROUNDING = 2.0 ** -(FRACTION + 1)


def encode(values: ArrayLike, parties: int) -> np.ndarray:
    """Return numbers as words (size, 2), of which those of so many ``parties`` can be added up.

    A number is rounded to the nearest multiple of 2^-56, by 7e-18 at most. Above ``LARGEST_SUM /
    parties`` it is sent as infinite, like a floating number that overflows.

    Examples
    --------
    >>> from numpyro_fed.privacy.fixed_point import decode, encode
    >>> decode(encode([1.5, -2.0], 2) + encode([0.25, -float("inf")], 2), 2).tolist()
    [1.75, -inf]
    """
    numbers = np.asarray(values).astype(np.float64).ravel()
    most = LARGEST_SUM / parties
    # In this form a NaN is both.
    low, high = ~(numbers >= -most), ~(numbers <= most)
    numbers = np.where(low | high, 0.0, numbers)
    # Rounded to the nearest, not down: the difference is then exact, for small negative ones too.
    whole = np.rint(numbers)
    part = np.rint(np.ldexp(numbers - whole, FRACTION))
    words = np.empty((numbers.size, 2), np.int64)
    words[:, 0] = part
    words[:, 1] = whole
    words = words.view(np.uint64)
    words[:, 1] += low.astype(np.uint64) << np.uint64(WHOLE)
    words[:, 1] += high.astype(np.uint64) << np.uint64(WHOLE + 8)
    return words


def decode(words: np.ndarray, parties: int) -> np.ndarray:
    """Return the numbers (size,) of a sum, modulo 2^64, of so many parties' words (size, 2).

    Words that no such sum has are a DataError: one of the parties has sent something else, or has
    used other masks than the others.
    """
    left, right = words[:, 0].view(np.int64), words[:, 1]
    bias = np.uint64(1 << (WHOLE - 1))
    whole = ((right + bias) & np.uint64((1 << WHOLE) - 1)).astype(np.int64) - np.int64(bias)
    counts = (right - whole.view(np.uint64)) >> np.uint64(WHOLE)
    low, high = counts & np.uint64(255), counts >> np.uint64(8)
    most_left, most_whole = parties << (FRACTION - 1), int(LARGEST_SUM) + parties
    bad = (low > parties) | (high > parties) | (np.abs(whole) > most_whole)
    bad |= (left > most_left) | (left < -most_left)
    if bad.any():
        raise DataError(
            f"{int(bad.sum())} of {bad.size} numbers are out of the range of sums over {parties} "
            "parties"
        )
    carried = left >> FRACTION
    rest = left - (carried << FRACTION)
    up = rest >= 1 << (FRACTION - 1)
    rest = np.where(up, rest - (1 << FRACTION), rest)
    total = (whole + carried + up).astype(np.float64) + np.ldexp(rest.astype(np.float64), -FRACTION)
    total = np.where(low > 0, -np.inf, total)
    total = np.where(high > 0, np.inf, total)
    return np.where((low > 0) & (high > 0), np.nan, total)
