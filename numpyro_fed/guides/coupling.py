r"""What ties the guides of several parties together: noise that all of them share.

Party ``p`` draws :math:`z_p = f_p(u_p)`, where

.. math::
    u_p = \varepsilon_p + V_p \xi, \qquad \xi = s + L \xi_0,

with :math:`\varepsilon_p` and :math:`\xi_0` standard normal: ``xi`` (rank,) is the server's and
known to all, :math:`V_p` the party's own. With ``xi`` integrated out,

.. math::
    \log q(z) = \sum_p \log q_p(z_p) + s'b - \tfrac12 s'As
    + \tfrac12 r'(I + L'AL)^{-1} r - \tfrac12 \log |I + L'AL|, \\
    b = \sum_p V_p' u_p, \qquad A = \sum_p V_p' V_p, \qquad r = L'(b - A s),

where :math:`q_p` is the party's own guide, of standard normal :math:`u_p`. So two sums over
parties, of ``rank`` numbers and of a matrix, are all that is needed to know the density of all
latents.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed import linalg
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.guides.base import GlobalGuide, GuideParams
from numpyro_fed.guides.gaussian import Full


class CouplingStats(NamedTuple):
    """A party's part, or their sum: ``b`` (rank,) of a draw, ``A`` (rank, rank) of its guide."""

    b: Array
    A: Array


def shared_guide(rank: int) -> GlobalGuide[Array]:
    """Return the guide of ``xi``; it begins as a standard normal."""
    return Full(rank, 1.0)


def draw(
    guide: GlobalGuide[Array], eta: GuideParams, V: Array | None, noise: Array, xi: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return coordinates of a party's latents, their log density under its own guide, and ``b``.

    Without ``V`` there is no tie. Parameters are stopped in densities and in ``b``.
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
    """Return the same of the latents themselves, which a frame places."""
    u, log_q, b = draw(guide, eta, V, noise, xi)
    return guide.place(frame, u), log_q - frame.log_det, b


def at(guide: GlobalGuide[Array], eta: GuideParams, V: Array, u: Array) -> Array:
    """Return ``b`` at any point."""
    return V.T @ guide.standard_noise(eta, u)


def from_frame_units(guide: GlobalGuide[Array], eta: GuideParams, V: Array) -> Array:
    """Return what of the shared noise enters a guide's own, where ``V`` is in units of the frame.

    The guide may change its own spread, and what it shares with others stays.
    """
    centre = guide.draw(eta, jnp.zeros(len(V)))[0]

    def transformed_column(v: Array) -> Array:
        return jax.jvp(lambda u: guide.standard_noise(eta, u), (centre,), (v,))[1]

    return jax.vmap(transformed_column, 1, 1)(V)


def log_ratio(shared: GuideParams, b: Array, A: Array) -> Array:
    """Return the log density of all parties' latents, less that of their guides on their own."""
    s, rank = shared["loc"], len(b)
    L = Gaussian.from_params(shared).root
    r = L.T @ (b - A @ s)
    root = linalg.cholesky(jnp.eye(rank) + L.T @ A @ L)
    half_log_det = jnp.log(jnp.diagonal(root)).sum()
    return s @ b - 0.5 * s @ A @ s + 0.5 * (linalg.solve(root, r) ** 2).sum() - half_log_det
