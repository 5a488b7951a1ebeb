"""Whether the shapes of sites and of what is observed there fit their plates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from numpyro_fed.errors import DataError, ModelError
from numpyro_fed.model.primitives import silo_frames


def check_shapes(trace: Mapping[str, Any], held: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse observed sites that count a row more than once, or that no plate speaks for.

    NumPyro broadcasts observed values against their distribution: ``y`` of shape (n, 1) under a
    mean of shape (n,) makes n x n terms of n observations. Refused are values and distributions
    that cannot be broadcast, the two together where they are larger than the plates around the
    site, and one value that stands for all rows. ``held`` has the shapes of what a party holds.
    """
    for site in trace.values():
        frames = site.get("cond_indep_stack", ())
        observed = site["type"] == "sample" and site["is_observed"]
        if observed and frames and site["value"] is not None:
            _check_site(site, {f.dim: f for f in frames}, held)


def _check_site(
    site: dict[str, Any], frames: Mapping[int, Any], held: Mapping[str, tuple[int, ...]]
) -> None:
    name, fn = site["name"], site["fn"]
    value, own = jnp.shape(site["value"]), tuple(fn.batch_shape + fn.event_shape)
    sizes = ", ".join(f"'{f.name}' of {f.size} at dim {d}" for d, f in sorted(frames.items()))
    found = (
        f"its observed values have the shape {value}, its distribution has {own}, and the plates "
        f"around it are {sizes}"
    )
    try:
        whole = jnp.broadcast_shapes(value, own)
    except ValueError as error:
        raise DataError(
            f"site '{name}': what is observed does not fit its distribution: {found}. "
            f"{lengths(held)}Pass as many values as there are rows."
        ) from error
    batch = whole[: len(whole) - fn.event_dim]
    scanned = -len(batch) if site.get("_control_flow_done") else 0
    for dim, size in zip(range(-len(batch), 0), batch, strict=True):
        if size == 1 or dim == scanned or (dim in frames and size == frames[dim].size):
            continue
        which = (
            f"plate '{frames[dim].name}' has {frames[dim].size}" if dim in frames else "no plate"
        )
        raise ModelError(
            f"site '{name}' has {size} entries at dim {dim}, where there is {which}: {found}. "
            "Each row would count several times. If values and distribution have the same numbers "
            "in other shapes, make them alike (y.ravel(), or x @ beta with a vector beta); if one "
            "row has several values, put a numpyro.plate around them, or make them one event "
            f"(.to_event(1)). The data are {dict(held)}."
        )
    for frame in silo_frames(site):
        place = len(value) - fn.event_dim + frame.dim
        if place >= 0 and value[place] == 1 < frame.size:
            raise ModelError(
                f"site '{name}': one observed value stands for all {frame.size} rows of "
                f"silo_plate '{frame.name}': {found}. Pass one value for each row. The data are "
                f"{dict(held)}."
            )


def lengths(held: Mapping[str, tuple[int, ...]]) -> str:
    """A sentence on arrays of different lengths, for a message; nothing where there are none."""
    long = {k: shape[0] for k, shape in held.items() if shape}
    if len(set(long.values())) < 2:
        return ""
    said = ", ".join(f"'{name}' has {n}" for name, n in long.items())
    return f"The arrays differ in their numbers of rows: {said}. "
