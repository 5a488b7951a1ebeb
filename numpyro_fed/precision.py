"""Double precision for a while, in a process of single precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Own = TypeVar("Own", bound="HasPrecision")
Args = ParamSpec("Args")
T = TypeVar("T")
Leaf = TypeVar("Leaf")


@contextmanager
def double_precision() -> Iterator[None]:
    """Enter ``jax.enable_x64(True)``, where texts may be traced that were in single precision.

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

    def copy(a: np.ndarray) -> TypedNdArray:
        """Return the copy that lives, which traces know by its identity, or a new one."""
        dtype = canonicalize_dtype(a.dtype)
        key = id(a), dtype
        of, found = copies.get(key, (_nothing, _nothing))
        if of() is a and (known := found()) is not None:
            return known
        made = TypedNdArray(np.asarray(a, dtype))
        copies[key] = weakref.ref(a), weakref.ref(made, lambda dead: forget(key, dead))
        return made

    def forget(key: tuple[int, np.dtype], dead: object) -> None:
        if copies.get(key, (None, None))[1] is dead:
            del copies[key]

    register_canonicalize_value_handler(np.ndarray, copy)
    return True


def _nothing() -> None:
    """Return None, as a dead reference does."""


def is_double() -> bool:
    """Return whether JAX computes in double precision here."""
    return bool(jnp.result_type(float) == np.float64)


def precision(*, double: bool) -> AbstractContextManager[None]:
    """Return the context of double precision, or of the process's own."""
    return double_precision() if double and not is_double() else nullcontext()


def to_current_precision(tree: T) -> T:
    """Return the tree with its floating-point arrays in the precision that holds here."""

    def rounded(leaf: Leaf) -> Leaf | Array:
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, jnp.result_type(float)) if is_float else leaf

    return jax.tree.map(rounded, tree)


class HasPrecision(Protocol):
    """An object whose numbers were computed in one of two precisions."""

    @property
    def double(self) -> bool:
        """Return whether that was double precision."""


def in_precision_of_object(method: Callable[Concatenate[Own, Args], T]) -> Callable[..., T]:
    """Make a method compute in the precision of its object, whatever the process's is.

    What an object of double precision returns to a process of single precision is NumPy arrays:
    JAX would round its own to single precision in the next operation, without a word.
    """

    @wraps(method)
    def call(self: Own, *args: Args.args, **kwargs: Args.kwargs) -> T:
        if not self.double or is_double():
            return method(self, *args, **kwargs)
        with double_precision():
            return jax.tree.map(_on_host, method(self, *args, **kwargs))

    return call


def _on_host(leaf: Leaf) -> Leaf | np.ndarray:
    is_float = isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.asarray(leaf) if is_float else leaf
