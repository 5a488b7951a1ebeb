"""The check that observed values, distributions and plates have shapes that fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.primitives import silo_frames


def check_shapes(trace: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Refuse observed sites whose shapes count a row more than once.

    NumPyro broadcasts observed values against their distribution: ``y`` of shape (n, 1) with a
    mean of shape (n,) makes n x n terms of n observations. This refuses values and distributions
    that cannot be broadcast, a broadcast shape larger than the plates that the site is in, and a
    single value that is used for all rows. ``arrays`` are the party's, whose shapes are told,
    for messages.
    """
    data_shapes = {name: a.shape for name, a in arrays.items()}
    for site in trace.values():
        frames = {f.dim: f for f in site.get("cond_indep_stack", ())}
        observed = site["type"] == "sample" and site["is_observed"]
        if not observed or not frames or site["value"] is None:
            continue
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
                f"{lengths(arrays)}Pass as many values as there are rows."
            ) from error
        batch = whole[: len(whole) - fn.event_dim]
        # After a scan its steps are the leftmost axis, for which there is no plate.
        scanned = -len(batch) if site.get("_control_flow_done") else 0
        for dim, size in zip(range(-len(batch), 0), batch, strict=True):
            if size == 1 or dim == scanned or (dim in frames and size == frames[dim].size):
                continue
            here = frames.get(dim)
            which = f"plate '{here.name}' has {here.size}" if here else "no plate"
            raise ModelError(
                f"site '{name}' has {size} entries at dim {dim}, where there is {which}: {shapes}. "
                "Each row would count several times. If values and distribution have the same "
                "numbers in other shapes, make them alike (y.ravel(), or x @ beta with a vector "
                "beta); if one row has several values, put a numpyro.plate around them, or make "
                f"them one event (.to_event(1)). The data are {data_shapes}."
            )
        for frame in silo_frames(site):
            axis = len(value) - fn.event_dim + frame.dim
            if axis >= 0 and value[axis] == 1 < frame.size:
                raise ModelError(
                    f"site '{name}': one observed value stands for all {frame.size} rows of "
                    f"silo_plate '{frame.name}': {shapes}. Pass one value for each row. The data "
                    f"are {data_shapes}."
                )


def lengths(arrays: Mapping[str, Any]) -> str:
    """Return a sentence for messages about arrays of different lengths; empty if all agree."""
    long = {name: a.shape[0] for name, a in arrays.items() if a.shape}
    if len(set(long.values())) < 2:
        return ""
    words = ", ".join(f"'{name}' has {n}" for name, n in long.items())
    return f"The arrays differ in their numbers of rows: {words}. "
