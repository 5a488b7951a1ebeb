"""Guides of a client's auxiliary variables, given its predictor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.errors import GuideError
from numpyro_fed.guides.amortised import Amortised
from numpyro_fed.guides.gaussian import GuideParams

HIDDEN = 16  # units, where it is not said


class Known(NamedTuple):
    """What a client knows of its rows besides their predictor.

    Attributes
    ----------
    centre : (rows, ...) or ()
        Around which means are measured: the predictor where a run began.
    response : (rows, k)
        Without columns where clients do not know it.
    """

    centre: Array
    response: Array


class AuxiliaryGuide(NamedTuple):
    """A guide of one client's auxiliary variables (rows, ...).

    Attributes
    ----------
    init : key -> psi
    some : (psi, rows) -> psi
        The parameters of some rows.
    draw : (psi, g, known, noise) -> (z, log_q)
        One draw from standard normals of its shape, and its log density, which sticks the landing.
    centred : bool
        Whether means are measured from a centre.
    """

    init: Callable[[Array], GuideParams]
    some: Callable[[GuideParams, Array], GuideParams]
    draw: Callable[[GuideParams, Array, Known, Array], tuple[Array, Array]]
    centred: bool


def auxiliary_guide(
    spec: str | Amortised, shape: tuple[int, ...], rho: float, num_responses: int
) -> AuxiliaryGuide:
    """Build what was asked for: ``"mean_field"``, ``"amortised"`` or :class:`Amortised`."""
    if spec == "mean_field":
        return _mean_field(shape, rho)
    if spec == "amortised":
        spec = Amortised()
    if not isinstance(spec, Amortised):
        raise GuideError(
            f"auxiliary={spec!r}: expected 'auto', 'mean_field', 'amortised' or "
            "numpyro_fed.guides.Amortised(...)."
        )
    return _amortised(spec, shape, rho, num_responses)


def _mean_field(shape: tuple[int, ...], rho: float) -> AuxiliaryGuide:
    """A normal for each, in units of ``rho``."""

    def init(key: Array) -> GuideParams:
        return {"loc": jnp.zeros(shape), "log_scale": jnp.zeros(shape)}

    def some(psi: GuideParams, rows: Array) -> GuideParams:
        return jax.tree.map(lambda a: a[rows], psi)

    def given(psi: GuideParams, known: Known) -> dist.Normal:
        return dist.Normal(known.centre + rho * psi["loc"], rho * jnp.exp(psi["log_scale"]))

    def draw(psi: GuideParams, g: Array, known: Known, noise: Array) -> tuple[Array, Array]:
        q = given(psi, known)
        z = q.loc + q.scale * noise
        return z, given(stop_gradient(psi), known).log_prob(z).sum()

    return AuxiliaryGuide(init, some, draw, True)


def _amortised(
    spec: Amortised, shape: tuple[int, ...], rho: float, num_responses: int
) -> AuxiliaryGuide:
    if spec.encoder is not None:
        raise GuideError(
            "guides.Amortised(encoder=...) is for latents of rows: auxiliary variables have a "
            "network of their own, of which hidden= says the size."
        )
    width, hidden = math.prod(shape[1:]), spec.hidden or HIDDEN
    inputs = width + num_responses

    def init(key: Array) -> GuideParams:
        first = jax.random.normal(key, (inputs, hidden)) * inputs**-0.5
        return {
            "first": first,
            "bias": jnp.zeros(hidden),
            "second": jnp.zeros((hidden, 2 * width)),
            "offset": jnp.zeros(2 * width),
        }

    def given(psi: GuideParams, g: Array, response: Array) -> dist.Normal:
        flat = g.reshape(len(g), width)
        h = jnp.arcsinh(jnp.concatenate([flat, response], 1))
        out = jnp.tanh(h @ psi["first"] + psi["bias"]) @ psi["second"] + psi["offset"]
        shift, log_ratio = out[:, :width], out[:, width:]
        scale = rho * jnp.exp(log_ratio.reshape(g.shape))
        return dist.Normal(g + rho * shift.reshape(g.shape), scale)

    def draw(psi: GuideParams, g: Array, known: Known, noise: Array) -> tuple[Array, Array]:
        q = given(psi, g, known.response)
        z = q.loc + q.scale * noise
        return z, given(stop_gradient(psi), g, known.response).log_prob(z).sum()

    return AuxiliaryGuide(init, lambda psi, rows: psi, draw, False)
