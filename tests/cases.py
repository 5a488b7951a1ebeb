"""Cases of a parametrised test."""

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """The cases, with some of them marked slow; a tuple is a case of several arguments."""
    slow = list(slow)
    return [_slow(case) if case in slow else case for case in cases]


def slow_but(cases: Iterable[Any], *quick: int) -> list[Any]:
    """The cases, all but those at the places ``quick`` marked slow."""
    return [case if i in quick else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
