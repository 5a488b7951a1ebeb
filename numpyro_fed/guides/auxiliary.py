"""Guides of a client's auxiliary variables, given its predictor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.errors import GuideError, positive_int
from numpyro_fed.guides.gaussian import GuideParams


@dataclass(frozen=True, kw_only=True)
class Amortised:
    r"""Auxiliary variables as one small function of the predictor, the same for all rows.

    .. math::
        q(z_{ij} \mid \theta_j)
        = N\big(g_{ij} + \rho\, m(h_{ij}),\; \rho^2 e^{2 s(h_{ij})}\big)

    with ``(m, s)`` a network of one hidden layer and :math:`h_{ij}` the predictor and, where
    clients know the response, that: both on a scale on which large numbers stay small (asinh). At
    the start ``m = s = 0``, the conditional prior. How many parameters there are does not depend on
    the number of rows.

    Parameters
    ----------
    hidden : int
        Units of the hidden layer.

    References
    ----------
    Hassan, Sutton, Mira, Mengersen (2024), arXiv 2405.04043, section 4.1, equation 9. The paper's
    network gives mean and scale themselves; here they are measured from the conditional prior.

    Examples
    --------
    >>> import numpyro_fed as nf
    >>> nf.guides.Amortised(hidden=8).hidden
    8
    """

    hidden: int = 16

    def __post_init__(self) -> None:
        positive_int("hidden", self.hidden)


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
    width = math.prod(shape[1:])
    inputs = width + num_responses

    def init(key: Array) -> GuideParams:
        first = jax.random.normal(key, (inputs, spec.hidden)) * inputs**-0.5
        return {
            "first": first,
            "bias": jnp.zeros(spec.hidden),
            "second": jnp.zeros((spec.hidden, 2 * width)),
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
