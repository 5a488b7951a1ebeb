"""Which rows of a silo have an outcome, and along which axis rows run in its values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution

from numpyro_fed.model.binding import trace_at
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.tracing import TRACING


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
    key, sizes = jax.random.key(0), fm.sizes(data)
    theta = {**fm.init_theta(key), **fm.init_private(key, data)}
    # What is observed depends on no latent: a prior that cannot be drawn from is none the worse.
    z_L = {p.name: jnp.zeros((sizes[p.name], p.dim)) for p in fm.plates}
    with TRACING, handlers.block():
        _, trace = trace_at(fm.text, fm.sites, theta, jnp.zeros(fm.dim), z_L, data)
    sites = [s for s in fm.sites if s.kind == "observed" and s.plate is not None]
    return {s.name: _outcome(trace[s.name], s.plate or "") for s in sites if s.name in trace}


def axes_of(fm: FederatedModel, data: SiloData) -> dict[str, tuple[str, ...]]:
    """Return the plate along each axis of each outcome's value; empty where there is none."""
    found: dict[str, tuple[str, ...]] = {}

    def run(data: SiloData) -> None:
        found.update({name: outcome.axes for name, outcome in outcomes_at(fm, data).items()})

    jax.eval_shape(run, data)
    return found


def _outcome(message: dict[str, Any], plate: str) -> Outcome:
    value, fn = jnp.asarray(message["value"]), message["fn"]
    frames = {f.name: f.dim for f in message["cond_indep_stack"]}
    batch = value.ndim - fn.event_dim
    seen = jnp.ones(value.shape, bool)
    if "missing" in message:
        seen &= ~message["missing"]
        value = jnp.where(message["missing"], jnp.nan, value)
    if isinstance(fn, MaskedDistribution):
        mask = jnp.broadcast_to(jnp.asarray(fn._mask), value.shape[:batch])
        seen &= mask.reshape(mask.shape + (1,) * fn.event_dim)
    axis = batch + frames[plate]
    others = tuple(i for i in range(value.ndim) if i != axis)
    named = {batch + dim: name for name, dim in frames.items()}
    axes = tuple(named.get(i, "") for i in range(value.ndim))
    return Outcome(plate, value, axis, axes, seen.any(others))
