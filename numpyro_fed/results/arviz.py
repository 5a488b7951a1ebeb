"""Posterior draws as ArviZ objects, for its versions before 1 and since."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_fed.errors import MissingExtraError

POSTERIOR = "posterior"
ROW = "row"  # the name of the axis of rows
OF_DATA = "observed_data", "constant_data"  # groups without draws


class Named(NamedTuple):
    """Values of a variable of a group, with the names of their axes after that of draws.

    Attributes
    ----------
    values : array
    axes : tuple of str
        ArviZ names those that are not there.
    """

    values: np.ndarray
    axes: tuple[str, ...] = ()


def to_arviz(
    sample: Callable[[Array, int], Mapping[str, Any]],
    key: Array | None,
    num_samples: int,
    *,
    worth: float = math.inf,
    attributes: Mapping[str, float | str] | None = None,
    more: Callable[[Array, int], Mapping[str, Mapping[str, Named]]] | None = None,
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
    more : callable, optional
        ``(key, n) -> {group: {name: values}}``: further groups.

    Raises
    ------
    MissingExtraError
        If ArviZ is not installed.
    """
    n = max(1, int(min(num_samples, worth)))
    key = jax.random.key(0) if key is None else key
    draws = sample(key, n)
    groups = {
        group: values
        if group in OF_DATA
        else {k: v._replace(values=v.values[None]) for k, v in values.items()}
        for group, values in ({} if more is None else more(key, n)).items()
    }
    data = chains_to_arviz({k: np.asarray(v)[None] for k, v in draws.items()}, groups)
    data[POSTERIOR].attrs.update(attributes or {})
    return data


def chains_to_arviz(
    draws: Mapping[str, np.ndarray], more: Mapping[str, Mapping[str, Named]] | None = None
) -> Any:
    """Return draws (chains, n, ...) as an ArviZ object, with ``more`` groups of the same draws.

    Raises
    ------
    MissingExtraError
        If ArviZ is not installed.
    """
    try:
        import arviz
    except ImportError as error:
        raise MissingExtraError("arviz", "examples") from error
    early = arviz.__version__.startswith("0.")
    # ArviZ 1 takes a dict of groups, and keyword arguments no longer.
    data = arviz.from_dict(posterior=dict(draws)) if early else arviz.from_dict({POSTERIOR: draws})
    for group, values in (more or {}).items():
        whole = {k: v.values for k, v in values.items()}
        # One group at a time: a variable has other axes in each.
        dims = {name: list(v.axes) for name, v in values.items() if v.axes}
        if not early:
            data[group] = arviz.from_dict({group: whole}, dims=dims)[group]
        elif group == "log_prior":  # a group that from_dict does not know there
            data.add_groups({group: whole}, dims=dims)
        else:
            arguments: dict[str, Any] = {group: whole, "dims": dims}
            data.extend(arviz.from_dict(**arguments))
    return data


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
