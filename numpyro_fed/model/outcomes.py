"""Which rows of a silo have an outcome, and along which axis rows run in its values."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution

from numpyro_fed.model.binding import run_text, unpack
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel


class Outcome(NamedTuple):
    """An observed site at a silo."""

    plate: str
    value: Array  # with NaN for what is missing
    axis: int  # the axis of the value that runs over rows of the plate
    axes: tuple[str, ...]  # the plate along each axis; empty where there is none
    # (rows,) bool: whether any part of a row's outcome counts: neither missing nor masked
    seen: Array


def outcomes_at(fm: FederatedModel, data: SiloData) -> dict[str, Outcome]:
    """Return the observed sites in silo plates; padded rows count as seen."""
    key = jax.random.key(0)
    theta = {**fm.init_theta(key), **fm.init_private(key, data)}
    # What is observed depends on no latent: a prior that cannot be drawn from is none the worse.
    z_L = fm.init_local(key, data)
    with handlers.block():
        values = unpack(fm.sites, jnp.zeros(fm.dim), z_L)
        trace = run_text(fm.text, values, theta, data)
    found = {}
    for s in fm.sites:
        if s.kind != "observed" or s.plate is None or s.name not in trace:
            continue
        message = trace[s.name]
        value, fn = jnp.asarray(message["value"]), message["fn"]
        frames = {f.name: f.dim for f in message["cond_indep_stack"]}
        batch, seen = value.ndim - fn.event_dim, jnp.ones(value.shape, bool)
        if "missing" in message:
            seen &= ~message["missing"]
            value = jnp.where(message["missing"], jnp.nan, value)
        if isinstance(fn, MaskedDistribution):
            mask = jnp.broadcast_to(jnp.asarray(fn._mask), value.shape[:batch])
            seen &= mask.reshape(mask.shape + (1,) * fn.event_dim)
        axis, named = batch + frames[s.plate], {batch + dim: name for name, dim in frames.items()}
        others = tuple(i for i in range(value.ndim) if i != axis)
        axes = tuple(named.get(i, "") for i in range(value.ndim))
        found[s.name] = Outcome(s.plate, value, axis, axes, seen.any(others))
    return found


def axes_of(fm: FederatedModel, data: SiloData) -> dict[str, tuple[str, ...]]:
    """Return the plate along each axis of each outcome's value; empty where there is none."""
    found: dict[str, tuple[str, ...]] = {}
    jax.eval_shape(
        lambda data: found.update({n: o.axes for n, o in outcomes_at(fm, data).items()}), data
    )
    return found
