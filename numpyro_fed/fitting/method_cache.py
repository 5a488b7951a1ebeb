"""Methods of earlier calls of ``nf.fit``, kept with all that was compiled for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from numpyro_fed.pvi.method import PVI
from numpyro_fed.sfvi.method import SFVI

# Methods whose compiled programs are kept for the next call, each for a model and its draws. More
# keep more programs in memory.
MAX_CACHED_METHODS = 8

_methods: dict[Hashable, PVI | SFVI] = {}


def cached_method(key: Hashable, make: Callable[[], PVI | SFVI]) -> PVI | SFVI:
    """Return the method of an earlier call with this key, or else a new one, which is kept."""
    method = _methods.pop(key, None)
    if method is None:
        while len(_methods) >= MAX_CACHED_METHODS:
            _methods.pop(next(iter(_methods)))
        method = make()
    _methods[key] = method  # put back at the end: the least recently used is dropped first
    return method


def key_of_model(model: Callable[..., Any]) -> Hashable:
    """Return what stands for a model in a key: itself, or its id if it has no hash."""
    try:
        hash(model)
    except TypeError:
        # An id is safe: the method that is kept keeps the model alive.
        return id(model)
    return model
