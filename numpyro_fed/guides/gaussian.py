"""Gaussian guides as functions of their parameters and explicit standard noise.

Covariances are written ``S = L L'`` with ``L = T diag(exp(s))``: ``T`` is unit lower triangular and
``s`` holds log-scales (Hassan et al. 2023, section 3; Tan, Bhaskaran and Nott 2020). The
parameters of ``T`` are scaled as in :mod:`numpyro_fed.expfam.gaussian`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed import linalg
from numpyro_fed.expfam.gaussian import (
    cholesky_parts,
    moved_full,
    solve_unit,
    unit_lower,
)

GuideParams = dict[str, Any]
_LOG_2PI = 1.8378770664093453


class GlobalGuide(NamedTuple):
    """A guide for the flat vector ``z_G``.

    Attributes
    ----------
    noise : (key, n) -> pytree
        What ``n`` draws take, along a leading axis of every leaf: standard normals (n, dim) for
        Gaussian guides.
    init : (key, loc) -> eta
        Parameters for a start at ``loc``.
    draw : (eta, noise) -> (z_G, log_q)
        One draw, from the noise of one, and its log density. Gaussian guides stick the landing: in
        ``log_q`` the parameters are stopped (Roeder, Wu and Duvenaud 2017), which leaves the value
        alone.
    centre : eta -> (dim,)
        Where the guide is centred; local guides measure ``z_G`` from there.
    around : (key, loc, root) -> eta
        The normal distribution with this mean and Cholesky factor of the covariance (dim, dim), or
        standard deviations (dim,), or what comes near it.
    moved : (eta, step) -> eta
        The guide after a step in coordinates in which it is about standard: ``step`` has the
        structure of ``eta``, and is zero for no move.
    log_density : (eta, z_G) -> (), optional
        At any point; None where it is known at the guide's own draws alone, as of most flows.
    standard : (eta, z_G) -> (dim,), optional
        The noise of which ``z_G`` is the draw; None where that is not one standard normal for each
        latent, or not known.
    """

    noise: Callable[[Array, int], Any]
    init: Callable[[Array, Array], GuideParams]
    draw: Callable[[GuideParams, Any], tuple[Array, Array]]
    centre: Callable[[GuideParams], Array]
    around: Callable[[Array, Array, Array], GuideParams]
    moved: Callable[[GuideParams, GuideParams], GuideParams]
    log_density: Callable[[GuideParams, Array], Array] | None = None
    standard: Callable[[GuideParams, Array], Array] | None = None


class LocalGuide(NamedTuple):
    r"""A conditional guide for the rows of one silo plate.

    For row ``i``, with ``a`` what stands above the rows (globals and latents of outer plates,
    measured from the centres of their guides),

    .. math::
        q(z_i \mid a) = N\big(m_i + C_i a,\; T_i\, \mathrm{diag}(e^{2(s_i + D_i a)})\, T_i'\big).

    Attributes
    ----------
    init : (loc, width) -> eta
        Parameters for a start at ``loc`` (rows, dim) under ``width`` numbers above.
    draw : (eta, a, noise) -> z
        One draw for every row: ``noise`` and ``z`` are (rows, dim).
    log_q : (eta, a, z) -> (rows,)
        Log density, one number a row.
    recentre : (eta, a) -> eta
        The parameters of the same guide when what stands above is measured from ``a``.
    around : (mode, precision) -> eta
        The normal distribution with this mode (rows, dim) and precision: a matrix for each row
        (rows, dim, dim), or one for all where the guide is joint. Without couplings.
    moved : (eta, step) -> eta
        The guide after a step in coordinates in which it is about standard.
    joint : bool
        Whether a row's density is given the rows before it, not on its own.
    """

    init: Callable[[Array, int], GuideParams]
    draw: Callable[[GuideParams, Array, Array], Array]
    log_q: Callable[[GuideParams, Array, Array], Array]
    recentre: Callable[[GuideParams, Array], GuideParams]
    around: Callable[[Array, Array], GuideParams]
    moved: Callable[[GuideParams, GuideParams], GuideParams]
    joint: bool = False


def standard_normals(dim: int) -> Callable[[Array, int], Array]:
    """The noise of a Gaussian guide that takes ``dim`` numbers a draw."""
    return lambda key, n: jax.random.normal(key, (n, dim))


def diagonal(dim: int, init_scale: float) -> GlobalGuide:
    """Independent normals."""

    def init(key: Array, loc: Array) -> GuideParams:
        return {"loc": loc, "log_scale": jnp.full(dim, jnp.log(init_scale))}

    def place(eta: GuideParams, noise: Array) -> Array:
        return eta["loc"] + jnp.exp(eta["log_scale"]) * noise

    def standard(eta: GuideParams, z: Array) -> Array:
        return (z - eta["loc"]) / jnp.exp(eta["log_scale"])

    def log_density(eta: GuideParams, z: Array) -> Array:
        return _standard_normal(standard(eta, z)).sum() - eta["log_scale"].sum()

    def around(key: Array, loc: Array, root: Array) -> GuideParams:
        return {"loc": loc, "log_scale": _conditional_log_scale(root)}

    def moved(eta: GuideParams, step: GuideParams) -> GuideParams:
        loc = eta["loc"] + jnp.exp(eta["log_scale"]) * step["loc"]
        return {"loc": loc, "log_scale": eta["log_scale"] + step["log_scale"]}

    return _sticking(dim, init, place, log_density, around, moved, standard)


def full(dim: int, init_scale: float) -> GlobalGuide:
    """A full covariance: unit lower triangular times scale."""

    def init(key: Array, loc: Array) -> GuideParams:
        below = jnp.zeros(dim * (dim - 1) // 2)
        return {"loc": loc, "log_scale": jnp.full(dim, jnp.log(init_scale)), "below": below}

    def place(eta: GuideParams, noise: Array) -> Array:
        return eta["loc"] + unit_lower(eta["below"], dim) @ (jnp.exp(eta["log_scale"]) * noise)

    def standard(eta: GuideParams, z: Array) -> Array:
        scaled = solve_unit(unit_lower(eta["below"], dim), z - eta["loc"])
        return scaled / jnp.exp(eta["log_scale"])

    def log_density(eta: GuideParams, z: Array) -> Array:
        return _standard_normal(standard(eta, z)).sum() - eta["log_scale"].sum()

    def around(key: Array, loc: Array, root: Array) -> GuideParams:
        return {"loc": loc, **cholesky_parts(as_matrix(root))}

    return _sticking(dim, init, place, log_density, around, moved_full, standard)


def skewed(dim: int, order: np.ndarray, init_scale: float) -> GlobalGuide:
    r"""A full covariance whose scales depend on the coordinates before them, in an ``order``.

    With :math:`\varepsilon` standard normal and ``P`` the permutation to that order,

    .. math::
        P z = P m + T \big(e^{s + D \varepsilon / \sqrt{d - 1}} \odot \varepsilon\big),

    ``T`` unit lower triangular and ``D`` strictly lower triangular: coefficients that spread as a
    scale does, and effects under theirs. With ``D = 0`` it is :func:`full`.
    """
    back, share = np.argsort(order), max(dim - 1, 1) ** -0.5

    def coupling(eta: GuideParams) -> Array:
        return share * jnp.tril(eta["scale_coupling"], -1)

    def init(key: Array, loc: Array) -> GuideParams:
        below, D = jnp.zeros(dim * (dim - 1) // 2), jnp.zeros((dim, dim))
        scale = jnp.full(dim, jnp.log(init_scale))
        return {"loc": loc, "log_scale": scale, "below": below, "scale_coupling": D}

    def place(eta: GuideParams, noise: Array) -> Array:
        scale = jnp.exp(eta["log_scale"] + coupling(eta) @ noise)
        return eta["loc"] + (unit_lower(eta["below"], dim) @ (scale * noise))[back]

    def inverted(eta: GuideParams, z: Array) -> tuple[Array, Array]:
        """The noise, and log-scales given it."""
        scaled = solve_unit(unit_lower(eta["below"], dim), (z - eta["loc"])[order])
        D = coupling(eta)

        def one(noise: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
            i, x, s, D_i = row
            log_scale = s + D_i @ noise
            return noise.at[i].set(x * jnp.exp(-log_scale)), log_scale

        rows = (jnp.arange(dim), scaled, eta["log_scale"], D)
        return jax.lax.scan(one, jnp.zeros_like(z), rows)

    def standard(eta: GuideParams, z: Array) -> Array:
        return inverted(eta, z)[0]

    def log_density(eta: GuideParams, z: Array) -> Array:
        noise, log_scales = inverted(eta, z)
        return _standard_normal(noise).sum() - log_scales.sum()

    def around(key: Array, loc: Array, root: Array) -> GuideParams:
        parts = cholesky_parts(linalg.root_of(as_matrix(root)[order]))
        return {"loc": loc, **parts, "scale_coupling": jnp.zeros((dim, dim))}

    def moved(eta: GuideParams, step: GuideParams) -> GuideParams:
        ordered = {**eta, "loc": eta["loc"][order]}
        after = moved_full(ordered, {**step, "loc": step["loc"][order]})
        D = eta["scale_coupling"] + step["scale_coupling"]
        return {**after, "loc": after["loc"][back], "scale_coupling": D}

    def draw(eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        """Sticking the landing: the noise as a function of ``z`` alone, by its derivative there."""
        z, fixed = place(eta, noise), stop_gradient(eta)
        D, T = coupling(fixed), unit_lower(fixed["below"], dim)
        scale = jnp.exp(fixed["log_scale"] + D @ noise)
        slope = T @ (scale[:, None] * (jnp.eye(dim) + noise[:, None] * D))
        moved = linalg.solve(slope, (z - stop_gradient(z))[order])
        at = noise + moved
        return z, _standard_normal(at).sum() - (fixed["log_scale"] + D @ at).sum()

    centre = itemgetter("loc")
    noise = standard_normals(dim)
    return GlobalGuide(noise, init, draw, centre, around, moved, log_density, standard)


def low_rank(dim: int, rank: int, init_scale: float) -> GlobalGuide:
    """Covariance ``W W' + diag(exp(2 s))`` with ``W`` of ``rank`` columns."""

    def init(key: Array, loc: Array) -> GuideParams:
        factor = 0.1 * init_scale * jax.random.normal(key, (dim, rank))
        return {"loc": loc, "log_scale": jnp.full(dim, jnp.log(init_scale)), "factor": factor}

    def place(eta: GuideParams, noise: Array) -> Array:
        own, shared = noise[:dim], noise[dim:]
        return eta["loc"] + jnp.exp(eta["log_scale"]) * own + eta["factor"] @ shared

    def log_density(eta: GuideParams, z: Array) -> Array:
        """By Woodbury's formula, with :math:`L L' = I + W' e^{-2 s} W`."""
        scale = jnp.exp(eta["log_scale"])
        off, W = (z - eta["loc"]) / scale, eta["factor"] / scale[:, None]
        L = linalg.cholesky(jnp.eye(rank) + W.T @ W)
        shared = linalg.solve(L, W.T @ off)
        log_det = eta["log_scale"].sum() + jnp.log(jnp.diagonal(L)).sum()
        return _standard_normal(off).sum() + 0.5 * (shared**2).sum() - log_det

    def around(key: Array, loc: Array, root: Array) -> GuideParams:
        log_scale = _conditional_log_scale(root)
        factor = 0.1 * jnp.exp(log_scale)[:, None] * jax.random.normal(key, (dim, rank))
        return {"loc": loc, "log_scale": log_scale, "factor": factor}

    def moved(eta: GuideParams, step: GuideParams) -> GuideParams:
        scale = jnp.exp(eta["log_scale"])
        return {
            "loc": eta["loc"] + scale * step["loc"],
            "log_scale": eta["log_scale"] + step["log_scale"],
            "factor": eta["factor"] + scale[:, None] * step["factor"],
        }

    return _sticking(dim + rank, init, place, log_density, around, moved)


def as_matrix(root: Array) -> Array:
    """A Cholesky factor, from one or from standard deviations."""
    return jnp.diag(root) if root.ndim == 1 else root


def _conditional_log_scale(root: Array) -> Array:
    """Of each number given all others, from a Cholesky factor of the covariance, or from them."""
    if root.ndim == 1:
        return jnp.log(root)
    inverse = linalg.solve(root, jnp.eye(len(root)))
    return -0.5 * jnp.log((inverse**2).sum(0))


def _sticking(
    numbers: int,
    init: Callable[[Array, Array], GuideParams],
    place: Callable[[GuideParams, Array], Array],
    log_density: Callable[[GuideParams, Array], Array],
    around: Callable[[Array, Array, Array], GuideParams],
    moved: Callable[[GuideParams, GuideParams], GuideParams],
    standard: Callable[[GuideParams, Array], Array] | None = None,
) -> GlobalGuide:
    """A Gaussian guide whose draws take ``numbers`` normals and are put in ``place``."""

    def draw(eta: GuideParams, noise: Array) -> tuple[Array, Array]:
        z = place(eta, noise)
        return z, log_density(stop_gradient(eta), z)

    noise = standard_normals(numbers)
    centre = itemgetter("loc")
    return GlobalGuide(noise, init, draw, centre, around, moved, log_density, standard)


def local(
    dim: int, covariance: str, couple_mean: bool, couple_scale: bool, init_scale: float
) -> LocalGuide:
    """A Gaussian for the rows of a silo plate.

    Parameters
    ----------
    dim : int
        Latent dimension of one row.
    covariance : {"diagonal", "full", "joint"}
        Independent latents; a full covariance within each row; or one full covariance over all
        rows of the plate at a silo, for plates of few rows.
    couple_mean, couple_scale : bool
        Whether ``C_i`` and ``D_i`` are there.
    init_scale : float
        Standard deviation at the start.
    """

    def init(loc: Array, width: int) -> GuideParams:
        rows = len(loc)
        eta: GuideParams = {"loc": loc, "log_scale": jnp.full((rows, dim), jnp.log(init_scale))}
        if covariance == "full" and dim > 1:
            eta["below"] = jnp.zeros((rows, dim * (dim - 1) // 2))
        if covariance == "joint":
            eta["below"] = jnp.zeros((rows, dim, rows, dim))
        if couple_mean:
            eta["mean_coupling"] = jnp.zeros((rows, dim, width))
        if couple_scale:
            eta["scale_coupling"] = jnp.zeros((rows, dim, width))
        return eta

    def mean(eta: GuideParams, above: Array) -> Array:
        return eta["loc"] + (eta["mean_coupling"] @ above if couple_mean else 0.0)

    def log_scale(eta: GuideParams, above: Array) -> Array:
        return eta["log_scale"] + (eta["scale_coupling"] @ above if couple_scale else 0.0)

    def lower(eta: GuideParams) -> Array | None:
        if covariance == "joint":
            size = eta["loc"].size
            return jnp.tril(eta["below"].reshape(size, size), -1) + jnp.eye(size)
        return unit_lower(eta["below"], dim) if "below" in eta else None

    def draw(eta: GuideParams, above: Array, noise: Array) -> Array:
        scaled = jnp.exp(log_scale(eta, above)) * noise
        T = lower(eta)
        if T is not None:
            vectors = scaled.reshape(T.shape[:-1])
            scaled = jnp.einsum("...ij,...j->...i", T, vectors).reshape(noise.shape)
        return mean(eta, above) + scaled

    def log_q(eta: GuideParams, above: Array, z: Array) -> Array:
        scaled = z - mean(eta, above)
        T = lower(eta)
        if T is not None:
            scaled = solve_unit(T, scaled.reshape(T.shape[:-1])).reshape(z.shape)
        s = log_scale(eta, above)
        return (_standard_normal(scaled / jnp.exp(s)) - s).sum(-1)

    def recentre(eta: GuideParams, above: Array) -> GuideParams:
        return {**eta, "loc": mean(eta, above), "log_scale": log_scale(eta, above)}

    def factor(eta: GuideParams) -> Array:
        """Cholesky factors of the covariance, (rows, dim, dim) or (rows dim, rows dim)."""
        T, scale = lower(eta), jnp.exp(eta["log_scale"])
        if T is None:
            return scale[..., None] * jnp.eye(dim)
        return T * scale.reshape(*T.shape[:-2], 1, T.shape[-1])

    def of_factor(loc: Array, L: Array) -> GuideParams:
        scale = jnp.diagonal(L, axis1=-2, axis2=-1)
        eta: GuideParams = {"loc": loc, "log_scale": jnp.log(scale).reshape(loc.shape)}
        if covariance == "joint":
            eta["below"] = jnp.tril(L / scale, -1).reshape(*loc.shape, *loc.shape)
        elif covariance == "full" and dim > 1:
            eta["below"] = cholesky_parts(L)["below"]
        return eta

    def around(mode: Array, precision: Array) -> GuideParams:
        if covariance != "diagonal":
            return of_factor(mode, linalg.cholesky_of_inverse(precision))
        return {"loc": mode, "log_scale": -0.5 * jnp.log(jnp.diagonal(precision, 0, -2, -1))}

    def moved(eta: GuideParams, step: GuideParams) -> GuideParams:
        independent = lower(eta) is None

        def scaled(change: Array) -> Array:
            """A change (rows, dim, k) in units of the guide's own spread, in the latents' own."""
            if independent:
                return jnp.exp(eta["log_scale"])[..., None] * change
            L = factor(eta)
            return (L @ change.reshape(*L.shape[:-1], -1)).reshape(change.shape)

        loc = eta["loc"] + scaled(step["loc"][..., None])[..., 0]
        if independent:
            after: GuideParams = {"loc": loc, "log_scale": eta["log_scale"] + step["log_scale"]}
        else:
            after = of_factor(loc, factor(eta) @ factor(step))
        if couple_mean:
            after["mean_coupling"] = eta["mean_coupling"] + scaled(step["mean_coupling"])
        if couple_scale:
            after["scale_coupling"] = eta["scale_coupling"] + step["scale_coupling"]
        return after

    return LocalGuide(init, draw, log_q, recentre, around, moved, covariance == "joint")


def _standard_normal(x: Array) -> Array:
    return -0.5 * (x * x + _LOG_2PI)
