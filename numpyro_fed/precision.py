"""Double precision for a while, in a process of single precision."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np


@contextmanager
def double_precision() -> Iterator[None]:
    """``jax.enable_x64(True)``, in which a text may be traced that was traced in single precision.

    Texts read NumPy arrays from outside (an index of groups, a basis). JAX takes such an array
    for the copy that it made of it first, as long as that copy lives, whatever the precision is by
    then: such a text could be traced in one precision only. From here on copies of each precision
    are kept apart.
    """
    copies_by_precision()
    with jax.enable_x64(True):
        yield


@cache
def copies_by_precision() -> bool:
    """Have JAX tell its copies of NumPy arrays apart by precision; whether this version can."""
    try:
        from jax._src.dtypes import canonicalize_dtype, register_canonicalize_value_handler
        from jax._src.literals import TypedNdArray
    except ImportError:
        return False
    copies: dict[tuple[int, np.dtype], tuple[Any, Any]] = {}

    def copy(a: np.ndarray) -> Any:
        """The copy that lives, which traces know by its identity, or a new one."""
        dtype = canonicalize_dtype(a.dtype)
        key = id(a), dtype
        of, found = copies.get(key, (_nothing, _nothing))
        if of() is a and (known := found()) is not None:
            return known
        made = TypedNdArray(np.asarray(a, dtype))
        copies[key] = weakref.ref(a), weakref.ref(made, lambda dead: forget(key, dead))
        return made

    def forget(key: tuple[int, np.dtype], dead: Any) -> None:
        if copies.get(key, (None, None))[1] is dead:
            del copies[key]

    register_canonicalize_value_handler(np.ndarray, copy)
    return True


def _nothing() -> None:
    """What a dead reference returns."""
