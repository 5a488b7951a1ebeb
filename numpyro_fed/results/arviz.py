"""Posterior draws as ArviZ holds them, for its versions before 1 and since."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_fed.errors import MissingExtraError


def to_arviz(
    sample: Callable[[Array, int], Mapping[str, Any]],
    key: Array | None,
    num_samples: int,
    *,
    worth: float = math.inf,
    attributes: Mapping[str, float | str] | None = None,
) -> Any:
    """Draws as ArviZ's ``DataTree``, or its ``InferenceData`` before ArviZ 1, with one chain.

    Draws that are resampled by weights repeat, and ArviZ takes a draw that repeats for as many: of
    a thousand that stand for sixty it would report an effective size of a thousand. So there are
    at most as many as the weighted draws are worth: what ``arviz.ess`` and ``arviz.summary`` say of
    them is about true.

    Parameters
    ----------
    sample : callable
        ``(key, n) -> {site: (n, *shape)}``.
    key : jax.Array or None
        None for ``jax.random.key(0)``.
    num_samples : int
        How many draws, at most.
    worth : float
        The effective number of weighted draws, where ``sample`` resamples these.
    attributes : mapping, optional
        Attributes of the group ``posterior``.

    Raises
    ------
    MissingExtraError
        Where ArviZ is not installed.
    """
    try:
        import arviz
    except ImportError as error:
        raise MissingExtraError("arviz", "examples") from error
    n = max(1, int(min(num_samples, worth)))
    draws = sample(jax.random.key(0) if key is None else key, n)
    posterior = {name: np.asarray(value)[None] for name, value in draws.items()}
    if arviz.__version__.startswith("0."):
        data = arviz.from_dict(posterior=posterior)
    else:
        data = arviz.from_dict({"posterior": posterior})
    data["posterior"].attrs.update(attributes or {})
    return data
