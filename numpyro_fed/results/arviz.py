"""Posterior draws as ArviZ objects, for its versions before 1 and since."""

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
    """Return draws as ArviZ's ``DataTree``, or its ``InferenceData`` before ArviZ 1, in one chain.

    Draws that are resampled by weights repeat, and ArviZ counts a repeated draw as several: for a
    thousand draws that are worth sixty it would report an effective size of a thousand. So there
    are at most as many draws as the weighted ones are worth, and ``arviz.ess`` and
    ``arviz.summary`` are about true.

    Parameters
    ----------
    sample : callable
        ``(key, n) -> {site: (n, *shape)}``.
    key : jax.Array or None
        None for ``jax.random.key(0)``.
    num_samples : int
        The number of draws, at most.
    worth : float
        The effective number of weighted draws, where ``sample`` resamples these.
    attributes : mapping, optional
        Attributes of the group ``posterior``.

    Raises
    ------
    MissingExtraError
        If ArviZ is not installed.
    """
    n = max(1, int(min(num_samples, worth)))
    draws = sample(jax.random.key(0) if key is None else key, n)
    data = chains_to_arviz({name: np.asarray(value)[None] for name, value in draws.items()})
    data["posterior"].attrs.update(attributes or {})
    return data


def chains_to_arviz(draws: Mapping[str, np.ndarray]) -> Any:
    """Return draws (chains, n, ...) as an ArviZ object.

    Raises
    ------
    MissingExtraError
        If ArviZ is not installed.
    """
    try:
        import arviz
    except ImportError as error:
        raise MissingExtraError("arviz", "examples") from error
    # ArviZ 1 takes a dict of groups, and keyword arguments no longer.
    if arviz.__version__.startswith("0."):
        return arviz.from_dict(posterior=dict(draws))
    return arviz.from_dict({"posterior": dict(draws)})


def elpd_data(values: np.ndarray, k: np.ndarray, *, p: float, num_draws: int) -> Any:
    """Return log predictive densities (n,) of parts of the data as ArviZ's ``ELPDData``.

    ``k`` (n,) are the shapes of tails, and ``p`` is the effective number of parameters.

    Raises
    ------
    MissingExtraError
        If ArviZ is not installed.
    """
    try:
        import arviz
        import xarray
    except ImportError as error:
        raise MissingExtraError("arviz", "examples") from error
    n, good_k = len(values), 0.7
    pointwise, tails = (
        xarray.DataArray(a, dims="row", coords={"row": np.arange(n)}, name=name)
        for a, name in ((values, "loo_i"), (k, "pareto_k"))
    )
    elpd, se = float(values.sum()), float(np.sqrt(n * np.var(values)))
    heavy = bool((k > good_k).any())
    if arviz.__version__.startswith("0."):
        # Its printing goes by the order.
        fields = dict(
            elpd_loo=elpd,
            se=se,
            p_loo=p,
            n_samples=num_draws,
            n_data_points=n,
            warning=heavy,
            loo_i=pointwise,
            pareto_k=tails,
            scale="log",
            good_k=good_k,
        )
        return arviz.ELPDData(data=list(fields.values()), index=list(fields))
    from arviz_stats.utils import ELPDDataLOO

    return ELPDDataLOO(
        elpd=elpd,
        se=se,
        p=p,
        n_samples=num_draws,
        n_data_points=n,
        scale="log",
        warning=heavy,
        good_k=good_k,
        elpd_i=pointwise,
        pareto_k=tails,
    )
