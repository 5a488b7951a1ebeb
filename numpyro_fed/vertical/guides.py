r"""The coupling of parties' guides by noise that all share, and guides of auxiliary variables.

Party ``p`` draws :math:`z_p = f_p(u_p)`, where

.. math::
    u_p = \varepsilon_p + V_p \xi, \qquad \xi = s + L \xi_0,

with :math:`\varepsilon_p` and :math:`\xi_0` standard normal. The server draws ``xi`` (rank,) and
sends it to all; :math:`V_p` is the party's own. With ``xi`` integrated out,

.. math::
    \log q(z) = \sum_p \log q_p(z_p) + s'b - \tfrac12 s'As
    + \tfrac12 r'(I + L'AL)^{-1} r - \tfrac12 \log |I + L'AL|, \\
    b = \sum_p V_p' u_p, \qquad A = \sum_p V_p' V_p, \qquad r = L'(b - A s),

where :math:`q_p` is the party's guide on its own, with :math:`u_p` standard normal. So the joint
density of all latents needs two sums over parties, of ``rank`` numbers and of a matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.guides.global_guides import GlobalGuide, GuideParams
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import Gaussian


class CouplingStats(NamedTuple):
    """A party's terms of ``b`` (rank,), for a draw, and ``A`` (rank, rank), or sums of these."""

    b: Array
    A: Array


def draw(
    guide: GlobalGuide[Array], eta: GuideParams, V: Array | None, noise: Array, xi: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return coordinates (dim,) of a party's latents, their log density ``log q_p``, and ``b``.

    Without ``V`` the party is independent, and ``b`` is None. Parameters are stopped in the density
    and in ``b``, so that the gradient sticks the landing.
    """
    if V is None or xi is None:
        return *guide.draw(eta, noise), None
    u, log_q = guide.draw(eta, noise + V @ xi)
    return u, log_q, coupling_stat(guide, stop_gradient(eta), stop_gradient(V), u)


def draw_in(
    frame: Gaussian,
    guide: GlobalGuide[Array],
    eta: GuideParams,
    V: Array | None,
    noise: Array,
    xi: Array | None,
) -> tuple[Array, Array, Array | None]:
    """Return the same with the latents themselves, which the frame gives, and their density."""
    u, log_q, b = draw(guide, eta, V, noise, xi)
    return guide.place(frame, u), log_q - frame.log_det, b


def coupling_stat(guide: GlobalGuide[Array], eta: GuideParams, V: Array, u: Array) -> Array:
    """Return the party's term of ``b`` (rank,) at any coordinates ``u`` (dim,)."""
    return V.T @ guide.standard_noise(eta, u)


def log_ratio(shared: GuideParams, b: Array, A: Array) -> Array:
    """Return the log density () of all parties' latents, less the sum of their own ``log q_p``."""
    s, rank = shared["loc"], len(b)
    L = Gaussian.from_params(shared).root
    # Only matrices of the rank are factored, whatever the number of latents (Woodbury).
    r = L.T @ (b - A @ s)
    root = linalg.cholesky(jnp.eye(rank) + L.T @ A @ L)
    half_log_det = jnp.log(jnp.diagonal(root)).sum()
    return s @ b - 0.5 * s @ A @ s + 0.5 * (linalg.solve(root, r) ** 2).sum() - half_log_det


@dataclass(frozen=True)
class AuxiliaryGuide:
    """A guide of one client's auxiliary variables: a normal for each, in units of ``rho``.

    ``shape`` is theirs, (rows, ...), and ``rho`` their standard deviation given the predictor. With
    ``hidden`` units it is one network for all rows, with one hidden layer, which reads
    ``num_responses`` besides the predictor: see :class:`Amortised`.

    Of the rows of a draw it also reads ``known``: their predictor at the start of the run, (rows,
    ...) or (), from which means are measured; or for a network the response (rows, k), where k is 0
    if clients do not know it.
    """

    shape: tuple[int, ...]
    rho: float
    hidden: int = 0
    num_responses: int = 0

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

    def distribution(self, psi: GuideParams, g: Array, known: Array) -> dist.Normal:
        """Return the distribution (rows, ...) given the predictor ``g`` (rows, ...)."""
        if not self.hidden:
            scale = self.rho * jnp.exp(psi["log_scale"])
            return dist.Normal(known + self.rho * psi["loc"], scale)
        width = math.prod(self.shape[1:])
        h = jnp.arcsinh(jnp.concatenate([g.reshape(len(g), width), known], 1))
        out = jnp.tanh(h @ psi["first"] + psi["bias"]) @ psi["second"] + psi["offset"]
        shift, log_ratio = out[:, :width], out[:, width:]
        scale = self.rho * jnp.exp(log_ratio.reshape(g.shape))
        return dist.Normal(g + self.rho * shift.reshape(g.shape), scale)

    def draw(self, psi: GuideParams, g: Array, known: Array, noise: Array) -> tuple[Array, Array]:
        """Return a draw (rows, ...) from standard normals of its shape, and its log density ().

        Parameters are stopped in the density, so that its gradient sticks the landing (Roeder, Wu
        and Duvenaud 2017).
        """
        q = self.distribution(psi, g, known)
        z = q.loc + q.scale * noise
        return z, self.distribution(stop_gradient(psi), g, known).log_prob(z).sum()
