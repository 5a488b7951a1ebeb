"""Guides of a client's auxiliary variables, given its predictor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.basics.errors import GuideError
from numpyro_fed.guides.global_guides import GuideParams
from numpyro_fed.guides.local_guides import Amortised

HIDDEN = 16  # units by default: the network reads one or two numbers of a row


class RowInfo(NamedTuple):
    """The inputs of the guide besides the predictor.

    ``centre`` (rows, ...) or () is the predictor at the start of the run, from which means are
    measured, and ``response`` (rows, k) the response; k is 0 where clients do not know it.
    """

    centre: Array
    response: Array


@dataclass(frozen=True)
class AuxiliaryGuide:
    """A guide of one client's auxiliary variables: a normal for each, in units of ``rho``.

    ``shape`` is theirs, (rows, ...), and ``rho`` their standard deviation given the predictor. With
    ``hidden`` units it is one network for all rows, with one hidden layer, which reads
    ``num_responses`` besides the predictor: see :class:`Amortised`.
    """

    shape: tuple[int, ...]
    rho: float
    hidden: int = 0
    num_responses: int = 0

    @property
    def centred(self) -> bool:
        """Return whether means are measured from a centre."""
        return not self.hidden

    def init(self, key: Array) -> GuideParams:
        """Return the first parameters."""
        if not self.hidden:
            return {"loc": jnp.zeros(self.shape), "log_scale": jnp.zeros(self.shape)}
        width = math.prod(self.shape[1:])
        inputs, outputs = width + self.num_responses, 2 * width
        return {
            "first": jax.random.normal(key, (inputs, self.hidden)) * inputs**-0.5,
            "bias": jnp.zeros(self.hidden),
            # Zero weights in the last layer: the guide starts at the conditional prior. The random
            # first layer keeps the gradient of these weights from being zero.
            "second": jnp.zeros((self.hidden, outputs)),
            "offset": jnp.zeros(outputs),
        }

    def take_rows(self, psi: GuideParams, rows: Array) -> GuideParams:
        """Return the parameters of the rows with these indices."""
        return psi if self.hidden else jax.tree.map(lambda a: a[rows], psi)

    def distribution(self, psi: GuideParams, g: Array, row_info: RowInfo) -> dist.Normal:
        """Return the distribution (rows, ...) given the predictor ``g`` (rows, ...)."""
        if not self.hidden:
            scale = self.rho * jnp.exp(psi["log_scale"])
            return dist.Normal(row_info.centre + self.rho * psi["loc"], scale)
        width = math.prod(self.shape[1:])
        h = jnp.arcsinh(jnp.concatenate([g.reshape(len(g), width), row_info.response], 1))
        out = jnp.tanh(h @ psi["first"] + psi["bias"]) @ psi["second"] + psi["offset"]
        shift, log_ratio = out[:, :width], out[:, width:]
        scale = self.rho * jnp.exp(log_ratio.reshape(g.shape))
        return dist.Normal(g + self.rho * shift.reshape(g.shape), scale)

    def draw(
        self, psi: GuideParams, g: Array, row_info: RowInfo, noise: Array
    ) -> tuple[Array, Array]:
        """Return a draw (rows, ...) from standard normals of its shape, and its log density ().

        Parameters are stopped in the density, so that its gradient sticks the landing (Roeder, Wu
        and Duvenaud 2017).
        """
        q = self.distribution(psi, g, row_info)
        z = q.loc + q.scale * noise
        return z, self.distribution(stop_gradient(psi), g, row_info).log_prob(z).sum()


def auxiliary_guide(
    spec: str | Amortised, shape: tuple[int, ...], rho: float, num_responses: int
) -> AuxiliaryGuide:
    """Return the guide that ``spec`` asks for: a word, or an :class:`Amortised`."""
    if spec == "mean_field":
        return AuxiliaryGuide(shape, rho)
    if spec == "amortised":
        spec = Amortised()
    if not isinstance(spec, Amortised):
        raise GuideError(
            f"auxiliary={spec!r}: expected 'auto', 'mean_field', 'amortised' or "
            "numpyro_fed.guides.Amortised(...)."
        )
    if spec.encoder is not None:
        raise GuideError(
            "guides.Amortised(encoder=...) is for latents of rows: auxiliary variables have a "
            "network of their own, of which hidden= says the size."
        )
    return AuxiliaryGuide(shape, rho, spec.hidden or HIDDEN, num_responses)
