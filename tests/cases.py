"""Cases of a parametrised test."""

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """The cases, with some of them marked slow; a tuple is a case of several arguments."""
    slow = list(slow)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        if case in slow
        else case
        for case in cases
    ]
