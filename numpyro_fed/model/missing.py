"""Outcomes that are missing: the handler that leaves them out of a model's density.

An outcome is missing where an argument of the model has NaN and the text passes that argument as it
is to ``obs=``. Such a site becomes what a user would write by hand,

    with numpyro.handlers.mask(mask=~jnp.isnan(y)):
        numpyro.sample("y", ..., obs=jnp.where(jnp.isnan(y), 0, y))

Only NaN of the data counts: one that the text computes (the log of a negative) is an error as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.tree_util import keystr
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

from numpyro_fed.errors import ModelError
from numpyro_fed.model.data import is_leaf


class leave_out_missing(Messenger):
    """Leave out of the density what is missing in the arguments ``names`` of a model.

    These are arguments, or leaves of arguments, in which NaN stands for a missing outcome. If
    ``blind``, observed sites get zeros in the place of these: what still depends on them then reads
    them for something else than an outcome.
    """

    def __init__(self, fn: Callable[..., Any], names: Sequence[str], *, blind: bool = False):
        self.names, self.blind = tuple(names), blind
        self._outcomes: list[Any] = []
        super().__init__(fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leaves = jax.tree.leaves_with_path(dict(kwargs), is_leaf=is_leaf)
        named = {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        self._outcomes = [named[name] for name in self.names if name in named]
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._outcomes = []  # traced values must not outlive their trace

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        # By identity: a value that is computed of the argument may have NaN of its own.
        if not any(msg["value"] is outcome for outcome in self._outcomes):
            return
        value = jnp.asarray(msg["value"])
        if self.blind:
            nothing = jnp.zeros(value.shape, value.dtype)
            msg["value"] = _filled(msg["fn"], nothing, nothing == 0)
        elif value.dtype.kind == "f":
            seen = ~jnp.isnan(value)
            msg["value"] = _filled(msg["fn"], value, seen)
            msg["fn"] = _masked(msg["fn"], seen, msg["name"])
            msg["missing"] = ~seen  # for whoever reads the values off the trace


def leaving_out_missing(
    model: Callable[..., Any], missing: Sequence[str], *, blind: bool = False
) -> Callable[..., Any]:
    """Return the model without what is missing; the model itself where nothing is."""
    return leave_out_missing(model, missing, blind=blind) if missing else model


def _filled(fn: Distribution, value: Array, seen: Array) -> Array:
    """Return observed values with a number in the place of what is missing."""
    value = jnp.where(seen, value, 0.0)
    # Whole numbers were floats beside NaN only; categories are indices.
    return (
        value.astype(jnp.result_type(int)) if getattr(fn.support, "is_discrete", False) else value
    )


def _masked(fn: Distribution, seen: Array, site: str) -> Distribution:
    """Return a distribution whose density counts what is seen alone, element by element."""
    if fn.event_dim == 0:
        return fn.mask(seen)
    if isinstance(fn, dist.Independent):
        return _masked(fn.base_dist, seen, site).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        inside = _masked(fn.base_dist, seen, site)
        return inside.expand(jnp.broadcast_shapes(inside.batch_shape, fn.batch_shape))
    if isinstance(fn, dist.MaskedDistribution):
        return _masked(fn.base_dist, seen, site).mask(fn._mask)
    raise ModelError(
        f"site '{site}': outcomes are missing (NaN), but {type(fn).__name__} counts the "
        f"{fn.event_shape} numbers of a row as one, so that no part of it can be left out. Leave "
        "these rows out of the data, or pass them with any finite number and a boolean array, and "
        "write `with numpyro.handlers.mask(mask=seen):` around the site."
    )


def missing_names(silos: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the arguments that have NaN at some silo; values that are traced are not looked at."""
    names: set[str] = set()
    for silo in silos:
        for path, leaf in jax.tree.leaves_with_path(dict(silo), is_leaf=is_leaf):
            floats = isinstance(leaf, np.ndarray | Array) and jnp.issubdtype(
                leaf.dtype, jnp.floating
            )
            if floats and not isinstance(leaf, jax.core.Tracer) and np.isnan(leaf).any():
                names.add(keystr(path, simple=True, separator="."))
    return tuple(sorted(names))
