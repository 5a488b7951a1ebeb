"""Which rows of a silo have an outcome, and along which axis rows run in its values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.distributions import MaskedDistribution

from numpyro_fed.model.binding import Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel
from numpyro_fed.tracing import TRACING


class Outcome(NamedTuple):
    """An observed site at a silo.

    Attributes
    ----------
    plate : str
    value : array
    axis : int
        The axis of the value that runs over rows of the plate.
    seen : (rows,) bool
        Whether any part of a row's outcome counts: neither missing nor masked.
    """

    plate: str
    value: Array
    axis: int
    seen: Array


def outcomes_at(fm: FederatedModel, data: SiloData) -> dict[str, Outcome]:
    """Return the observed sites in silo plates; padded rows count as seen."""
    private: Theta = fm.constrain_theta(
        {**fm.init_theta(jax.random.key(0)), **fm.init_private(jax.random.key(0), data)}
    )
    text = handlers.seed(handlers.substitute(fm.text, data=private), jax.random.key(0))
    with TRACING, handlers.block():
        trace = handlers.trace(text).get_trace(**data.kwargs)
    sites = [s for s in fm.sites if s.kind == "observed" and s.plate is not None]
    return {s.name: _outcome(trace[s.name], s.plate or "") for s in sites if s.name in trace}


def _outcome(message: dict[str, Any], plate: str) -> Outcome:
    value, fn = jnp.asarray(message["value"]), message["fn"]
    frame = next(f for f in message["cond_indep_stack"] if f.name == plate)
    batch = value.ndim - fn.event_dim
    axis = batch + frame.dim
    seen = jnp.ones(value.shape, bool)
    if "missing" in message:
        seen &= ~message["missing"]
    if isinstance(fn, MaskedDistribution):
        mask = jnp.broadcast_to(jnp.asarray(fn._mask), value.shape[:batch])
        seen &= mask.reshape(mask.shape + (1,) * fn.event_dim)
    others = tuple(i for i in range(value.ndim) if i != axis)
    return Outcome(plate, value, axis, seen.any(others))
