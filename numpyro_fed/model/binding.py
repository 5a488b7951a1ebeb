"""The text at given latents: values put in place, log densities by site and by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.util import compute_log_probs

from numpyro_fed.errors import ModelError
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.sites import Site

Theta = dict[str, Any]
Rows = dict[str, Array]


def bind(model: Callable, values: dict[str, Array], theta: Theta) -> Callable:
    """The model at given unconstrained latents and parameters, log-determinants as factors."""

    def substitute(site: dict[str, Any]) -> Any:
        name = site["name"]
        if site["type"] == "param" and name in theta:
            return biject_to(site["kwargs"].get("constraint", constraints.real))(theta[name])
        if site["type"] != "sample" or site["is_observed"] or name not in values:
            return None
        bijection, unconstrained = biject_to(site["fn"].support), values[name]
        step = site["infer"].get("_scan_current_index")
        if step is not None:
            unconstrained = of_step(site, bijection, unconstrained[step])
        value = bijection(unconstrained)
        if value is not unconstrained:
            log_det = bijection.log_abs_det_jacobian(unconstrained, value)
            batch_dim = jnp.ndim(value) - len(site["fn"].event_shape)
            log_det = sum_rightmost(log_det, jnp.ndim(log_det) - batch_dim)
            numpyro.factor(f"_{name}_log_det", log_det)
        return value

    return handlers.substitute(model, substitute_fn=substitute)


def of_step(site: dict[str, Any], bijection: Any, unconstrained: Array) -> Array:
    """The value of a site in the body of a scan at one step of it."""
    shape = bijection.inverse_shape(site["kwargs"]["sample_shape"] + tuple(site["fn"].shape()))
    if unconstrained.size != math.prod(shape):
        raise ModelError(
            f"site '{site['name']}' has the shape {unconstrained.shape} at one step of a scan, "
            f"where {shape} was expected. A scan in the body of another one is not supported: "
            "write one of them as a Python loop."
        )
    return unconstrained.reshape(shape)


def sum_rows(value: Array) -> Array:
    """Sum over all axes but the first.

    By a product with ones: XLA's CPU compiler would move densities of rows of a few numbers into
    a loop over a sum, where it computes them one by one instead of a vector at a time.
    """
    flat = value.reshape(len(value), math.prod(value.shape[1:]))
    if flat.shape[1] == 1:
        return flat[:, 0]
    return jnp.dot(flat, jnp.ones(flat.shape[1], flat.dtype), precision="highest")


def unpack(sites: Sequence[Site], z_G: Array, z_L: Rows) -> dict[str, Array]:
    """Unconstrained value of each latent site from the flat globals and the rows of each plate."""
    values = {}
    for s in sites:
        if s.kind == "latent" and s.plate is None:
            values[s.name] = z_G[s.start : s.stop].reshape(s.shape)
        elif s.kind == "latent":
            rows = z_L[str(s.plate)][:, s.start : s.stop]
            values[s.name] = jnp.moveaxis(rows.reshape(len(rows), *s.shape), 0, s.axis or 0)
    return values


def trace_at(
    model: Callable,
    sites: Sequence[Site],
    theta: Theta,
    z_G: Array,
    z_L: Rows,
    data: SiloData,
    key: Array | None = None,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Log probability of each sample site, not summed, and the trace; none depends on the key."""
    text = bind(model, unpack(sites, z_G, z_L), theta)
    seeded = handlers.seed(text, jax.random.key(0) if key is None else key)
    return compute_log_probs(seeded, (), data.kwargs, {}, sum_log_prob=False)


class LocalPrior(NamedTuple):
    """The distribution of a silo's latents given the globals, before its data are looked at.

    Attributes
    ----------
    draw : (key, theta, z_G, z_L, data) -> {plate: (rows, dim)}
        The latents of all silo plates, those in ``z_L`` as they are given.
    log_density : (theta, z_G, z_L, data) -> {plate: (rows,)}
        Of what ``draw`` draws: without the scale or factors that the text puts around it.
    """

    draw: Callable[[Array, Theta, Array, Rows, SiloData], Rows]
    log_density: Callable[[Theta, Array, Rows, SiloData], Rows]


def local_prior(model: Callable, sites: Sequence[Site]) -> LocalPrior:
    """Read the local latents' distributions off the text."""
    local = [s for s in sites if s.kind == "latent" and s.plate is not None]

    def traced(theta: Theta, z_G: Array, z_L: Rows, data: SiloData, key: Array) -> dict[str, Any]:
        given = [s for s in sites if s.plate is None or s.plate in z_L]
        text = bind(model, unpack(given, z_G, z_L), theta)
        return handlers.trace(handlers.seed(text, key)).get_trace(**data.kwargs)

    def rows_of(s: Site, value: Array) -> Array:
        moved = jnp.moveaxis(value, s.axis or 0, 0)
        return moved.reshape(len(moved), -1)

    def draw(key: Array, theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        trace = traced(theta, z_G, z_L, data, key)
        drawn: dict[str, list[Array]] = {}
        for s in local:
            if s.plate not in z_L:
                site = trace[s.name]
                unconstrained = biject_to(site["fn"].support).inv(site["value"])
                drawn.setdefault(str(s.plate), []).append(rows_of(s, unconstrained))
        return {**z_L, **{plate: jnp.concatenate(parts, 1) for plate, parts in drawn.items()}}

    def log_density(theta: Theta, z_G: Array, z_L: Rows, data: SiloData) -> Rows:
        trace = traced(theta, z_G, z_L, data, jax.random.key(0))
        at, total = unpack(local, z_G, z_L), dict[str, Array]()
        for s in local:
            fn, value = trace[s.name]["fn"], trace[s.name]["value"]
            batch = jnp.ndim(value) - fn.event_dim
            log_det = biject_to(fn.support).log_abs_det_jacobian(at[s.name], value)
            log_p = fn.log_prob(value) + sum_rightmost(log_det, jnp.ndim(log_det) - batch)
            rows = sum_rows(rows_of(s, jnp.broadcast_to(log_p, jnp.shape(value)[:batch])))
            total[str(s.plate)] = total.get(str(s.plate), 0.0) + rows
        return {plate: data.keep(plate, rows) for plate, rows in total.items()}

    return LocalPrior(draw, log_density)
