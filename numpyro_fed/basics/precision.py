"""Double precision for a part of a process that computes in single precision."""

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

Object = TypeVar("Object", bound="HasPrecision")
Args = ParamSpec("Args")
T = TypeVar("T")
Leaf = TypeVar("Leaf")


@contextmanager
def double_precision() -> Iterator[None]:
    """Enter double precision, in which models may be traced that were traced in single before."""
    # Models read NumPy arrays from outside (an index of groups, a basis). JAX keeps its first copy
    # of such an array and uses it in every later trace, whatever the precision is by then: without
    # the separate copies a model could be traced in one precision only.
    copies_by_precision()
    with jax.enable_x64(True):
        yield


@cache
def copies_by_precision() -> bool:
    """Make JAX keep its copies of NumPy arrays by precision; return whether this version can."""
    try:
        from jax._src.dtypes import canonicalize_dtype, register_canonicalize_value_handler
        from jax._src.literals import TypedNdArray
    except ImportError:
        return False
    copies: dict[tuple[int, np.dtype], tuple[Any, Any]] = {}

    def copy(a: np.ndarray) -> TypedNdArray:
        """Return the copy of this precision if it is still alive, or a new one."""
        # Traces know a copy by its identity, so that it must be the same object.
        dtype = canonicalize_dtype(a.dtype)
        key = id(a), dtype
        array_of, copy_of = copies.get(key, (lambda: None, lambda: None))
        if array_of() is a and (alive := copy_of()) is not None:
            return alive
        new_copy = TypedNdArray(np.asarray(a, dtype))
        # Weak references: an entry disappears with its copy. The array is compared, too, since the
        # id of one that died may belong to another by now.
        copies[key] = weakref.ref(a), weakref.ref(new_copy, lambda dead: forget(key, dead))
        return new_copy

    def forget(key: tuple[int, np.dtype], dead: object) -> None:
        if copies.get(key, (None, None))[1] is dead:
            del copies[key]

    register_canonicalize_value_handler(np.ndarray, copy)
    return True


def is_double() -> bool:
    """Return whether JAX computes in double precision at this point."""
    return bool(jnp.result_type(float) == np.float64)


def precision(*, double: bool) -> AbstractContextManager[None]:
    """Return a context of double precision, or one that changes nothing."""
    return double_precision() if double and not is_double() else nullcontext()


def to_current_precision(tree: T) -> T:
    """Return the tree with its floating-point arrays in the current precision."""

    def cast(leaf: Leaf) -> Leaf | Array:
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, jnp.result_type(float)) if is_float else leaf

    return jax.tree.map(cast, tree)


class HasPrecision(Protocol):
    """An object whose numbers were computed in single or in double precision."""

    @property
    def double(self) -> bool:
        """Return whether that was double precision."""


def in_precision_of_object(method: Callable[Concatenate[Object, Args], T]) -> Callable[..., T]:
    """Return the method, computing in the precision of its object, whatever the process's is.

    In a process of single precision an object of double precision returns NumPy arrays: JAX would
    round its own arrays to single precision in the next operation, without a word.
    """

    def on_host(leaf: Leaf) -> Leaf | np.ndarray:
        is_number = isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jnp.number)
        return np.asarray(leaf) if is_number else leaf

    @wraps(method)
    def call(self: Object, *args: Args.args, **kwargs: Args.kwargs) -> T:
        if not self.double or is_double():
            return method(self, *args, **kwargs)
        with double_precision():
            found = jax.block_until_ready(method(self, *args, **kwargs))  # which Ctrl-C can end
            return jax.tree.map(on_host, found)

    return call
