"""The model text at given latents and parameters, which are substituted.

Latents are given in unconstrained space. The log-determinant of each bijection is added to the text
as a ``numpyro.factor`` named ``_{site}_log_det``, in the silo plate of its site, so that it is
counted in the rows that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost

from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import TRACING
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.text.sites import Site

Theta = dict[str, Any]
Rows = dict[str, Array]


def bind(model: Callable[..., Any], values: dict[str, Array], theta: Theta) -> Callable[..., Any]:
    """Return the model at unconstrained latents, whose log-determinants become factors."""

    def substitute(site: dict[str, Any]) -> Any:
        name = site["name"]
        if site["type"] == "param" and name in theta:
            return biject_to(site["kwargs"].get("constraint", constraints.real))(theta[name])
        if site["type"] != "sample" or site["is_observed"] or name not in values:
            return None
        return constrained(site, values[name])

    return handlers.substitute(model, substitute_fn=substitute)


def constrained(site: dict[str, Any], unconstrained: Array) -> Array:
    """Return a latent's value, whose log-determinant becomes a factor of the text that runs."""
    bijection = biject_to(site["fn"].support)
    # NumPyro asks for one step's value in the body of a scan; ours are stacked over all steps.
    step = site["infer"].get("_scan_current_index")
    if step is not None:
        unconstrained = unconstrained[step]
        shape = bijection.inverse_shape(site["kwargs"]["sample_shape"] + tuple(site["fn"].shape()))
        if unconstrained.size != math.prod(shape):
            raise ModelError(
                f"site '{site['name']}' has the shape {unconstrained.shape} at one step of a scan, "
                f"where {shape} was expected. A scan in the body of another one is not supported: "
                "write one of them as a Python loop."
            )
        unconstrained = unconstrained.reshape(shape)
    value = bijection(unconstrained)
    # The identity returns its argument itself, and needs no factor.
    if value is not unconstrained:
        log_det = bijection.log_abs_det_jacobian(unconstrained, value)
        batch_dim = jnp.ndim(value) - len(site["fn"].event_shape)
        # One number for each element of the batch, as log_prob has: rows must not be summed.
        log_det = sum_rightmost(log_det, jnp.ndim(log_det) - batch_dim)
        numpyro.factor(f"_{site['name']}_log_det", log_det)
    return value


def sum_rows(value: Array) -> Array:
    """Return the sum over all axes but the first, (rows,)."""
    flat = value.reshape(len(value), math.prod(value.shape[1:]))
    if flat.shape[1] == 1:
        return flat[:, 0]
    # A product with ones instead of a sum: XLA's CPU compiler would fuse the densities of rows of
    # a few numbers into the loop of the sum, where it computes them one by one instead of a vector
    # at a time. The precision is for accelerators, whose products round their operands otherwise.
    return jnp.dot(flat, jnp.ones(flat.shape[1], flat.dtype), precision="highest")


def unpack(sites: Sequence[Site], z_G: Array, z_L: Rows) -> dict[str, Array]:
    """Return each latent's value from ``z_G`` (dim,) and ``z_L`` {plate: (rows, dim)}."""
    values = {}
    for s in sites:
        if s.kind == "latent" and s.plate is None:
            values[s.name] = z_G[s.start : s.stop].reshape(s.shape)
        elif s.kind == "latent":
            rows = z_L[str(s.plate)][:, s.start : s.stop]
            values[s.name] = jnp.moveaxis(rows.reshape(len(rows), *s.shape), 0, s.axis or 0)
    return values


def run_text(
    model: Callable[..., Any],
    values: dict[str, Array],
    theta: Theta,
    data: SiloData,
    key: Array | None = None,
) -> dict[str, Any]:
    """Return the trace of a text at these latents and parameters; others come from the key."""
    text = handlers.seed(bind(model, values, theta), jax.random.key(0) if key is None else key)
    with TRACING:
        trace: dict[str, Any] = handlers.trace(text).get_trace(**data.kwargs)
    return trace
