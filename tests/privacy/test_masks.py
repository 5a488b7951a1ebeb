"""Sums of masked numbers: exact, and nothing else can be read off what is sent."""

from fractions import Fraction

import numpy as np
import pytest
from sent_otherwise import chi_squared

from numpyro_fed.basics.errors import DataError
from numpyro_fed.privacy.masks import (
    LARGEST_SUM,
    Greeting,
    KeyPair,
    decode,
    encode,
    fingerprint,
    masked,
    pair_keys,
    stream,
)


def words_of(rows):
    return [encode(row, len(rows)) for row in rows]


def total(words):
    with np.errstate(over="ignore"):
        return np.sum(words, axis=0, dtype=np.uint64)


def keys_of(size, session="s"):
    pairs = [(KeyPair.generate(), KeyPair.generate()) for _ in range(size)]
    told = [Greeting(identity.public, fresh.public) for identity, fresh in pairs]
    return [pair_keys(*pair, session, told, j) for j, pair in enumerate(pairs)]


# --- fixed point -----------------------------------------------------------------------------


@pytest.mark.parametrize("parties", [2, 3, 10, 255])
def test_sums_are_exact_to_the_rounding(parties):
    r = np.random.default_rng(parties)
    size = 10.0 ** r.uniform(-50, 59, 200)
    rows = r.normal(size=(parties, 200)) * size * (1 if parties < 100 else 0.001)
    found = decode(total(words_of(rows)), parties)
    # Fractions of Python do not round.
    exact = [sum(Fraction(v) for v in column) for column in rows.T.tolist()]
    for one, true in zip(found.tolist(), exact, strict=True):
        assert abs(Fraction(one) - true) <= parties * Fraction(2) ** -181 + abs(true) * 2.0**-51


@pytest.mark.parametrize("size", [1e-37, 1e-14, 1.0, 2e12, 1e50])
def test_doubles_of_any_size_that_data_have_are_not_rounded(size):
    """Squares of 1e-14, and fourth powers of milliseconds since 1970, 2e12."""
    numbers = np.random.default_rng(0).normal(size=50) * size
    zeros = [0 * numbers] * 3
    np.testing.assert_array_equal(decode(total(words_of([numbers, *zeros])), 4), numbers)
    # What cancels leaves no trace, and what is left is exact.
    left = decode(total(words_of([numbers, -numbers, zeros[0], zeros[0] + 1e-30])), 4)
    np.testing.assert_array_equal(left, 1e-30)


def test_as_many_halves_of_a_digit_as_a_word_holds_are_added():
    for value in (2.0**99, -(2.0**43), 2.0**-13):
        assert decode(total(words_of([[value]] * 255)), 255).tolist() == [255 * value]


def test_what_is_not_finite_adds_up_as_floating_numbers_do():
    inf, nan = np.inf, np.nan
    rows = np.array([[1.0, -inf, inf, -inf, nan, -1.0], [2.0, 3.0, 4.0, inf, 1.0, -inf]])
    rows = np.append(rows, np.tile([-inf, inf, nan], (2, 1)), axis=1)  # of all parties
    np.testing.assert_array_equal(decode(total(words_of(rows)), 2), rows.sum(0))


def test_numbers_beyond_the_range_are_infinite():
    most = LARGEST_SUM / 2
    rows = [[most, -most, 1.01 * most, -1.01 * most], [most, -most, 0.0, 0.0]]
    assert decode(total(words_of(rows)), 2).tolist() == [2 * most, -2 * most, np.inf, -np.inf]


def test_whole_numbers_and_booleans_are_exact():
    assert decode(encode(np.array([3, -(2**40)]), 2), 2).tolist() == [3, -(2**40)]
    assert decode(total(words_of([[True, False], [True, True]])), 2).tolist() == [2, 1]


def test_a_sum_that_is_random_is_out_of_range():
    r = np.random.default_rng(0)
    words = r.integers(0, 2**64, (5_000, 7), dtype=np.uint64)
    passed = 0
    for pair in words:
        try:
            decode(pair[None], 10)
            passed += 1
        except DataError:
            pass
    assert passed <= 3
    with pytest.raises(DataError, match="of 5000 numbers are out of the range"):
        decode(words, 3)


# --- keys ------------------------------------------------------------------------------------


def test_two_silos_have_one_key_in_common_and_no_third_has_it():
    keys = keys_of(4)
    for i in range(4):
        assert set(keys[i]) == set(range(4)) - {i}
        for j in keys[i]:
            assert keys[i][j] == keys[j][i]
    assert len({key for own in keys for key in own.values()}) == 6


def test_another_session_or_another_list_gives_other_keys():
    pairs = [(KeyPair.generate(), KeyPair.generate()) for _ in range(3)]
    told = [Greeting(identity.public, fresh.public) for identity, fresh in pairs]
    other = KeyPair.generate().public
    lists = [("s", told), ("t", told), ("s", [*told[:2], Greeting(other, told[2].fresh)])]
    lists.append(("s", [*told[:2], Greeting(told[2].identity, other)]))
    found = {pair_keys(*pairs[0], session, known, 0)[1] for session, known in lists}
    assert len(found) == 4


@pytest.mark.parametrize("public", ["", "zz", "00" * 31, "00" * 32])
def test_what_is_no_public_key_is_refused(public):
    with pytest.raises(DataError, match="no public key"):
        KeyPair.generate().agree(public)


def test_a_private_key_is_not_printed():
    pair = KeyPair.generate()
    assert pair.private.hex() not in repr(pair)
    assert repr(pair.private) not in repr(pair)
    assert KeyPair(pair.private).public == pair.public
    assert len(fingerprint(pair.public)) == 64


# --- masks -----------------------------------------------------------------------------------


def sent(rows, keys, purpose=b"sum 1"):
    return [masked(words, keys[j], j, purpose) for j, words in enumerate(words_of(rows))]


@pytest.mark.parametrize("size", [2, 3, 10])
def test_masks_cancel_in_the_sum_of_all(size):
    rows = np.random.default_rng(size).normal(size=(size, 7)) * 1e5
    messages = sent(rows, keys_of(size))
    np.testing.assert_array_equal(total(messages), total(words_of(rows)))
    with pytest.raises(DataError):
        decode(total(messages[1:]), size)


def test_the_message_is_the_value_plus_a_stream_that_does_not_depend_on_it():
    """Under the same masks, which no silo ever uses twice, messages differ by the values alone."""
    rows = np.random.default_rng(0).normal(size=(2, 3, 50))
    keys = keys_of(3)
    one, two = (sent(r, keys)[1] for r in rows)
    plain_one, plain_two = (encode(r[1], 3) for r in rows)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(one - two, plain_one - plain_two)
        np.testing.assert_array_equal(
            one,
            plain_one
            - stream(keys[1][0], b"sum 1", 350).reshape(50, 7)
            + stream(keys[1][2], b"sum 1", 350).reshape(50, 7),
        )


def test_a_stream_is_the_same_in_pieces():
    whole = stream(bytes(32), b"sum 1", 20_000)
    assert len(np.unique(whole)) == 20_000
    for size in (0, 1, 8_192, 8_193):
        np.testing.assert_array_equal(stream(bytes(32), b"sum 1", size), whole[:size])


@pytest.mark.parametrize("value", [0.0, 1e-8, 12345.678])
def test_bytes_of_a_message_are_uniform_whatever_the_value_is(value):
    keys = keys_of(3)
    message = masked(encode(np.full(10_000, value), 3), keys[0], 0, b"sum 1").tobytes()
    assert abs(chi_squared(message)) < 6
    assert chi_squared(encode(np.full(10_000, value), 3).tobytes()) > 1_000


def test_two_messages_of_one_reply_have_bytes_in_common_by_chance_alone():
    words = encode(np.random.default_rng(0).normal(size=10_000), 3)
    keys = keys_of(3)
    one = masked(words, keys[0], 0, b"sum 1")
    for two in (masked(words, keys[0], 0, b"sum 2"), masked(words, keys_of(3)[0], 0, b"sum 1")):
        same = (one.view(np.uint8) == two.view(np.uint8)).mean()
        assert abs(same - 1 / 256) < 6 * np.sqrt(1 / 256 / one.nbytes)
        # Nor does their difference, in which the reply cancels, have any structure.
        with np.errstate(over="ignore"):
            assert abs(chi_squared((one - two).tobytes())) < 6


def test_what_all_but_two_know_does_not_take_off_the_mask_of_these():
    """The server and one of three silos together: a mask is left that neither of them knows."""
    keys = keys_of(3)
    rows = np.zeros((3, 10_000))
    message = sent(rows, keys)[0]
    with np.errstate(over="ignore"):
        left = message - stream(keys[2][0], b"sum 1", message.size).reshape(message.shape)
    assert abs(chi_squared(left.tobytes())) < 6
