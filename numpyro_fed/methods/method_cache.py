"""Methods of earlier calls of ``nf.fit``, with what was compiled for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro_fed.methods.pvi import PVI
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.objectives import ELBO, LocallyEnhanced

# Searches for the mode, side by side: the first from zero, the others from the prior. More find
# more modes and take longer, in proportion.
NUM_STARTS = 4
# Methods whose compiled programs are kept for the next call, each for a model and its draws. More
# keep more programs in memory.
MAX_CACHED_METHODS = 8

_method_cache: dict[Any, PVI | SFVI] = {}


class MethodCache(NamedTuple):
    """The methods of earlier calls with the same model, with all that was compiled for them.

    ``fingerprint`` is that of the model's programs: a variable that the model reads from outside
    may have changed between two calls.
    """

    model: Callable[..., Any]
    fingerprint: str

    def get(self, kind: type[PVI] | type[SFVI], draws: tuple[tuple[str, int], ...]) -> Any:
        """Return the method object of an earlier call, or a new one."""
        model_key: Any = self.model
        try:
            hash(model_key)
        except TypeError:
            # An id is safe: the cached method keeps the
            # model alive, so that no other object gets it.
            model_key = id(model_key)
        key = (kind, model_key, self.fingerprint, draws)
        method = _method_cache.pop(key, None)
        if method is None:
            while len(_method_cache) >= MAX_CACHED_METHODS:
                _method_cache.pop(next(iter(_method_cache)))
            objective = LocallyEnhanced(draws=dict(draws)) if draws else ELBO()
            method = kind(self.model, objective=objective, starts=NUM_STARTS)
        _method_cache[key] = method  # put back at the end: the least recently used is dropped first
        return method
