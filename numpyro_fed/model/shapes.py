"""The check that observed values, distributions and plates have shapes that fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.primitives import silo_frames


def check_shapes(trace: Mapping[str, Any], data_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse observed sites whose shapes count a row more than once.

    NumPyro broadcasts observed values against their distribution: ``y`` of shape (n, 1) with a
    mean of shape (n,) makes n x n terms of n observations. This refuses values and distributions
    that cannot be broadcast, a broadcast shape larger than the plates that the site is in, and a
    single value that is used for all rows. ``data_shapes`` has the shapes of the party's arrays,
    for messages.
    """
    for site in trace.values():
        frames = site.get("cond_indep_stack", ())
        observed = site["type"] == "sample" and site["is_observed"]
        if observed and frames and site["value"] is not None:
            _check_site(site, {f.dim: f for f in frames}, data_shapes)


def _check_site(
    site: dict[str, Any], frames: Mapping[int, Any], data_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    name, fn = site["name"], site["fn"]
    value, expected = jnp.shape(site["value"]), tuple(fn.batch_shape + fn.event_shape)
    sizes = ", ".join(f"'{f.name}' of {f.size} at dim {d}" for d, f in sorted(frames.items()))
    shapes = (
        f"its observed values have the shape {value}, its distribution has {expected}, and the "
        f"plates around it are {sizes}"
    )
    try:
        whole = jnp.broadcast_shapes(value, expected)
    except ValueError as error:
        raise DataError(
            f"site '{name}': what is observed does not fit its distribution: {shapes}. "
            f"{lengths(data_shapes)}Pass as many values as there are rows."
        ) from error
    batch = whole[: len(whole) - fn.event_dim]
    # After a scan its steps are the leftmost axis, for which there is no plate.
    scanned = -len(batch) if site.get("_control_flow_done") else 0
    for dim, size in zip(range(-len(batch), 0), batch, strict=True):
        if size == 1 or dim == scanned or (dim in frames and size == frames[dim].size):
            continue
        which = (
            f"plate '{frames[dim].name}' has {frames[dim].size}" if dim in frames else "no plate"
        )
        raise ModelError(
            f"site '{name}' has {size} entries at dim {dim}, where there is {which}: {shapes}. "
            "Each row would count several times. If values and distribution have the same numbers "
            "in other shapes, make them alike (y.ravel(), or x @ beta with a vector beta); if one "
            "row has several values, put a numpyro.plate around them, or make them one event "
            f"(.to_event(1)). The data are {dict(data_shapes)}."
        )
    for frame in silo_frames(site):
        axis = len(value) - fn.event_dim + frame.dim
        if axis >= 0 and value[axis] == 1 < frame.size:
            raise ModelError(
                f"site '{name}': one observed value stands for all {frame.size} rows of "
                f"silo_plate '{frame.name}': {shapes}. Pass one value for each row. The data are "
                f"{dict(data_shapes)}."
            )


def lengths(data_shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a sentence for messages about arrays of different lengths; empty if all agree."""
    long = {k: shape[0] for k, shape in data_shapes.items() if shape}
    if len(set(long.values())) < 2:
        return ""
    words = ", ".join(f"'{name}' has {n}" for name, n in long.items())
    return f"The arrays differ in their numbers of rows: {words}. "
