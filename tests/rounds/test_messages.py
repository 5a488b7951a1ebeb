"""Messages there and back: the same bits, or a refusal in words."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from numpyro_fed.basics.errors import DataError
from numpyro_fed.rounds.messages import pack, read, unpack, write

few = settings(max_examples=60, deadline=None, derandomize=True)
KINDS = ["<f4", "<f8", "<i4", "<i8", "<u4", "|u1", "|b1"]
ARRAYS = st.sampled_from(KINDS).flatmap(
    lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
NAMED = st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4)
HEADS = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4)


def same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()  # NaN with its payload, and minus zero


@few
@given(NAMED, HEADS)
def test_arrays_and_heads_come_back_to_the_bit(arrays, head):
    message = write(arrays, head)
    found = read(message)
    assert found.head == head
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        same_bits(found.arrays[name], array)
    # Equal messages have equal bytes: by them a silo knows what it has answered.
    assert write(found.arrays, dict(reversed(head.items()))) == message
    assert write({n: np.asarray(a, order="F") for n, a in arrays.items()}, head) == message


@few
@given(NAMED, HEADS, st.data())
def test_damaged_bytes_are_refused_in_words_or_are_another_message(arrays, head, data):
    message = bytearray(write(arrays, head))
    at = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        message = message[:at]
    else:
        message[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(message))
    except DataError:  # and no error of another kind
        return
    assert all(isinstance(text, str) for text in found.head.values())
    assert len(message) >= sum(array.nbytes for array in found.arrays.values())


@few
@given(st.lists(st.one_of(ARRAYS, st.lists(ARRAYS, max_size=2)), max_size=3), st.data())
def test_trees_come_back_and_others_are_refused(leaves, data):
    with jax.enable_x64(True):
        tree = {"down": tuple(leaves), "step": np.int32(3)}
        packed = {name: np.asarray(leaf) for name, leaf in pack("down", tree).items()}
        jax.tree.map(same_bits, jax.tree.map(np.asarray, unpack("down", tree, packed)), tree)
        name = data.draw(st.sampled_from(sorted(packed)))
        without = {other: array for other, array in packed.items() if other != name}
        wider = packed | {name: np.stack([packed[name]] * 2)}
        for wrong in (without, wider, packed | {"down['other']": np.zeros(1)}):
            with pytest.raises(DataError, match="agreed"):
                unpack("down", tree, wrong)
