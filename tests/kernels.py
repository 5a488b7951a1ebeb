"""What programs hand to LAPACK."""

import math
import re

CALL = re.compile(r"custom_call @lapack_\w+\(.*? : \(tensor<((?:\d+x)*)[a-z]")


def lapack_shapes(text):
    """The shape of the first operand of each LAPACK call in the text of a lowered program."""
    return [tuple(map(int, found.split("x")[:-1])) for found in CALL.findall(text)]


def stacks(text):
    """The shapes among them of more than one matrix, which wait for threads of XLA's pool."""
    return [shape for shape in lapack_shapes(text) if math.prod(shape[:-2]) > 1]
