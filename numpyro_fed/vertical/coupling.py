r"""The coupling of several parties' guides, by noise that all of them share.

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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    return u, log_q, at(guide, stop_gradient(eta), stop_gradient(V), u)


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


def at(guide: GlobalGuide[Array], eta: GuideParams, V: Array, u: Array) -> Array:
    """Return the party's term of ``b`` (rank,) at any coordinates ``u`` (dim,)."""
    return V.T @ guide.standard_noise(eta, u)


def from_frame_units(guide: GlobalGuide[Array], eta: GuideParams, V: Array) -> Array:
    """Return the coefficients (dim, rank) of the shared noise in a guide's standard noise.

    ``V`` is in units of the frame. So the guide may change its own spread without changing the
    covariance that it has with others.
    """
    centre = guide.draw(eta, jnp.zeros(len(V)))[0]
    push = partial(jax.jvp, lambda u: guide.standard_noise(eta, u), (centre,))
    return jax.vmap(lambda v: push((v,))[1], 1, 1)(V)


def log_ratio(shared: GuideParams, b: Array, A: Array) -> Array:
    """Return the log density () of all parties' latents, less the sum of their own ``log q_p``."""
    s, rank = shared["loc"], len(b)
    L = Gaussian.from_params(shared).root
    # Only matrices of the rank are factored, whatever the number of latents (Woodbury).
    r = L.T @ (b - A @ s)
    root = linalg.cholesky(jnp.eye(rank) + L.T @ A @ L)
    half_log_det = jnp.log(jnp.diagonal(root)).sum()
    return s @ b - 0.5 * s @ A @ s + 0.5 * (linalg.solve(root, r) ** 2).sum() - half_log_det
