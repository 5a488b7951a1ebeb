r"""Gaussians by their natural parameters.

Covariances are written ``S = L L'`` with ``L = T diag(exp(s))``, ``T`` unit lower triangular, as in
the guides. What stands below its diagonal is a parameter divided by ``sqrt(dim - 1)``: optimisers
like Adam move every parameter by as much, and the inverse of a triangular matrix of hundreds of
such moves would not be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.util import vec_to_tril_matrix

from numpyro_fed import linalg
from numpyro_fed.expfam.base import Family, Index, Tree, usable
from numpyro_fed.trees import all_finite

_LOG_2PI = 1.8378770664093453
_dot = partial(jnp.matmul, precision="highest")


def gaussian(dim: int, covariance: str = "diagonal") -> Family:
    r"""Gaussians with a diagonal or a full covariance.

    .. math::
        T(z) = (z, z z'), \quad \eta = (\Lambda m, -\tfrac12 \Lambda), \quad h = 1

    Parameters
    ----------
    dim : int
    covariance : {"diagonal", "full"}
        ``eta`` is ``{"first": (dim,), "second": (dim,) or (dim, dim)}``; the diagonal family has
        the squares of ``z`` and the diagonal of ``-Lambda / 2``. ``psi`` is ``{"loc": (dim,),
        "log_scale": (dim,)}`` and, where full, ``"below"``, the ``dim * (dim - 1) / 2`` numbers
        below the diagonal of ``T`` row by row, times ``sqrt(dim - 1)``.

    Returns
    -------
    Family

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from numpyro_fed import expfam
    >>> family = expfam.gaussian(2)
    >>> eta = family.fit(lambda z: -jnp.sum((z - 3.0) ** 2))
    >>> eta["second"]
    Array([-1., -1.], dtype=float32)
    >>> family.ordinary(eta)["loc"]
    Array([3., 3.], dtype=float32)
    """
    if covariance == "diagonal":
        return _diagonal(dim)
    if covariance == "full":
        return _full(dim)
    raise ValueError(f"covariance must be 'diagonal' or 'full', got {covariance!r}.")


def rounding(eta: Tree) -> float:
    """How far rounding its natural parameters moves a Gaussian, in standard deviations.

    The largest of a few random roundings of each number by one unit in the last place, in a mean or
    a log standard deviation. What many sums and factors have lost is several times as much.
    """
    eps = jnp.finfo(eta["first"].dtype).eps
    first, second = (np.asarray(eta[name], float) for name in ("first", "second"))
    r, worst = np.random.default_rng(0), 0.0
    try:
        covariance = None if second.ndim == 1 else np.linalg.inv(-(second + second.T))
    except np.linalg.LinAlgError:
        return np.inf
    for _ in range(8):
        by_first = eps * r.choice([-1.0, 1.0], first.shape) * first
        by_second = eps * r.choice([-1.0, 1.0], second.shape) * second
        if covariance is None:
            variance = -0.5 / second
            moved = variance * (by_first + 2 * by_second * variance * first)
            widened = variance * by_second
        else:
            variance, mean = np.diagonal(covariance), covariance @ first
            change = by_second + by_second.T
            moved = covariance @ (by_first + change @ mean)
            widened = 0.5 * ((covariance @ change) * covariance).sum(1) / variance
        worst = max(worst, np.abs(moved / np.sqrt(np.abs(variance))).max(), np.abs(widened).max())
    return float(worst)


def unit_lower(below: Array, dim: int) -> Array:
    """Unit lower triangular matrices with ``below / sqrt(dim - 1)`` below the diagonal.

    ``below`` is (..., dim * (dim - 1) / 2).
    """
    if dim < 2:
        return jnp.broadcast_to(jnp.eye(dim), (*below.shape[:-1], dim, dim))
    return vec_to_tril_matrix(below / math.sqrt(dim - 1), diagonal=-1) + jnp.eye(dim)


def solve_unit(T: Array, vector: Array) -> Array:
    """Solve ``T x = vector`` with ``T`` unit lower triangular (..., dim, dim)."""
    return linalg.solve(T, vector[..., None])[..., 0]


def _diagonal(dim: int) -> Family:
    def normal(eta: Tree) -> dist.Normal:
        psi = ordinary(eta)
        return dist.Normal(psi["loc"], jnp.exp(psi["log_scale"]))

    def log_partition(eta: Tree) -> Array:
        precision = -2 * eta["second"]
        return 0.5 * jnp.sum(eta["first"] ** 2 / precision - jnp.log(precision) + _LOG_2PI)

    def ordinary(eta: Tree) -> Tree:
        precision = -2 * eta["second"]
        return {"loc": eta["first"] / precision, "log_scale": -0.5 * jnp.log(precision)}

    def natural(psi: Tree) -> Tree:
        precision = jnp.exp(-2 * psi["log_scale"])
        return {"first": precision * psi["loc"], "second": -0.5 * precision}

    def moments(psi: Tree) -> Tree:
        return {"first": psi["loc"], "second": psi["loc"] ** 2 + jnp.exp(2 * psi["log_scale"])}

    def spread(psi: Tree) -> tuple[Array, Array]:
        return psi["loc"], jnp.exp(psi["log_scale"])

    def from_mean(mu: Tree) -> Tree:
        precision = 1 / (mu["second"] - mu["first"] ** 2)
        return {"first": precision * mu["first"], "second": -0.5 * precision}

    def fit(f: Callable[[Array], Array]) -> Tree:
        zero, one = jnp.zeros(dim), jnp.ones(dim)
        gradient, curvature = jax.jvp(jax.grad(f), (zero,), (one,))
        return {"first": gradient, "second": 0.5 * curvature}

    def dual_gradient(f: Callable[[Tree], Array], eta: Tree) -> Tree:
        psi = ordinary(eta)
        g = jax.grad(f)(psi)
        by_variance = 0.5 * g["log_scale"] * jnp.exp(-2 * psi["log_scale"])
        return {"first": g["loc"] - 2 * by_variance * psi["loc"], "second": by_variance}

    def move(psi: Tree, gradient: Tree) -> Array:
        by_mean = gradient["loc"] * jnp.exp(psi["log_scale"])
        return jnp.concatenate([by_mean, 0.5 * gradient["log_scale"]])

    def moved(psi: Tree, step: Tree) -> Tree:
        loc = psi["loc"] + jnp.exp(psi["log_scale"]) * step["loc"]
        return {"loc": loc, "log_scale": psi["log_scale"] + step["log_scale"]}

    def into(psi: Tree, eta: Tree) -> Tree:
        scale = jnp.exp(psi["log_scale"])
        slope = eta["first"] + 2 * eta["second"] * psi["loc"]
        return {"first": scale * slope, "second": scale**2 * eta["second"]}

    def out_of(psi: Tree, eta: Tree) -> Tree:
        scale = jnp.exp(psi["log_scale"])
        second = eta["second"] / scale**2
        return {"first": eta["first"] / scale - 2 * second * psi["loc"], "second": second}

    def marginal(eta: Tree, index: Index, shape: tuple[int, ...], event_dim: int) -> dist.Normal:
        q = normal({name: leaf[index].reshape(shape) for name, leaf in eta.items()})
        return q.to_event(event_dim)

    return Family(
        name="gaussian",
        dim=dim,
        statistics=lambda z: {"first": z, "second": z**2},
        increment=lambda z, u: {"first": u, "second": u * (2 * z + u)},
        log_base=lambda z: jnp.zeros(()),
        log_partition=log_partition,
        ordinary=ordinary,
        natural=natural,
        moments=moments,
        from_mean=from_mean,
        entropy=lambda psi: _entropy(psi, dim),
        noise=lambda key, n: jax.random.normal(key, (n, dim)),
        from_normals=lambda normals: normals,
        draw=lambda psi, noise: psi["loc"] + jnp.exp(psi["log_scale"]) * noise,
        centre=lambda psi: psi["loc"],
        spread=spread,
        proper=lambda eta: all_finite(eta) & usable(*spread(ordinary(eta))),
        fit=fit,
        dual_gradient=dual_gradient,
        move=move,
        log_density=lambda eta, z: normal(eta).log_prob(z).sum(),
        kl=lambda q, p: dist.kl_divergence(normal(q), normal(p)).sum(),
        marginal=marginal,
        around=lambda z, gradient, curvature: {
            "first": gradient + jnp.diagonal(curvature) * z,
            "second": -0.5 * jnp.diagonal(curvature),
        },
        standard=lambda psi: jax.tree.map(jnp.zeros_like, psi),
        moved=moved,
        into=into,
        out_of=out_of,
    )


def _full(dim: int) -> Family:
    def root(eta: Tree) -> Array:
        """``R`` with ``Lambda = R R'``, lower triangular."""
        return linalg.cholesky(_precision(eta))

    def log_partition(eta: Tree) -> Array:
        R = root(eta)
        w = linalg.solve(R, eta["first"])  # R^{-1} Lambda m
        return 0.5 * (jnp.sum(w**2) + dim * _LOG_2PI) - jnp.log(jnp.diagonal(R)).sum()

    def log_density(eta: Tree, z: Array) -> Array:
        psi = ordinary(eta)  # by which it is drawn
        L = cholesky_factor(psi, dim)
        residual = linalg.solve(L, z - psi["loc"])
        return -psi["log_scale"].sum() - 0.5 * (jnp.sum(residual**2) + dim * _LOG_2PI)

    def kl(eta_q: Tree, eta_p: Tree) -> Array:
        R = root(eta_p)
        psi = ordinary(eta_q)
        away = psi["loc"] - ordinary(eta_p)["loc"]
        spread, shift = _dot(R.T, cholesky_factor(psi, dim)), _dot(away, R)
        log_ratio = -(jnp.log(jnp.diagonal(R)) + psi["log_scale"])
        diagonal = jnp.diagonal(spread) ** 2
        off = jnp.sum(spread**2) - jnp.sum(diagonal)
        return jnp.sum(log_ratio + 0.5 * (diagonal - 1)) + 0.5 * (off + jnp.sum(shift**2))

    def ordinary(eta: Tree) -> Tree:
        L = linalg.cholesky_of_inverse(_precision(eta))
        return {"loc": _dot(L, _dot(eta["first"], L)), **cholesky_parts(L)}

    def natural(psi: Tree) -> Tree:
        return _from_factor(psi["loc"], cholesky_factor(psi, dim))

    def moments(psi: Tree) -> Tree:
        L = cholesky_factor(psi, dim)
        return {"first": psi["loc"], "second": _dot(L, L.T) + jnp.outer(psi["loc"], psi["loc"])}

    def spread(psi: Tree) -> tuple[Array, Array]:
        return psi["loc"], jnp.linalg.norm(cholesky_factor(psi, dim), axis=-1)

    def proper(eta: Tree) -> Array:
        factor = linalg.cholesky(_precision(eta))
        return all_finite((eta, factor)) & usable(*spread(ordinary(eta)))

    def increment(z: Array, u: Array) -> Tree:
        across = jnp.outer(u, z + 0.5 * u)
        return {"first": u, "second": across + across.T}

    def from_mean(mu: Tree) -> Tree:
        covariance = _symmetric(mu["second"]) - jnp.outer(mu["first"], mu["first"])
        return _from_factor(mu["first"], linalg.cholesky(covariance))

    def fit(f: Callable[[Array], Array]) -> Tree:
        def gradient(z: Array) -> tuple[Array, Array]:
            return (g := jax.grad(f)(z)), g

        curvature, first = jax.jacfwd(gradient, has_aux=True)(jnp.zeros(dim))
        return {"first": first, "second": 0.5 * _symmetric(curvature)}

    def dual_gradient(f: Callable[[Tree], Array], eta: Tree) -> Tree:
        psi = ordinary(eta)
        g, L = jax.grad(f)(psi), cholesky_factor(psi, dim)
        slope = _by_covariance(L, _by_factor(psi, g, dim))
        half = linalg.solve(L, slope, transposed=True)
        by_covariance = _symmetric(linalg.solve(L, half.T, transposed=True))
        return {"first": g["loc"] - 2 * _dot(by_covariance, psi["loc"]), "second": by_covariance}

    def move(psi: Tree, gradient: Tree) -> Array:
        L, G = cholesky_factor(psi, dim), _by_factor(psi, gradient, dim)
        variance = jnp.sum(L**2, -1)
        mean = _dot(L, _dot(gradient["loc"], L))
        widened = jnp.sum(_dot(L, _by_covariance(L, G)) * L, -1)
        return jnp.concatenate([mean / jnp.sqrt(variance), widened / variance])

    def into(psi: Tree, eta: Tree) -> Tree:
        L, second = cholesky_factor(psi, dim), _symmetric(eta["second"])
        slope = eta["first"] + 2 * _dot(second, psi["loc"])
        return {"first": _dot(slope, L), "second": _symmetric(_dot(L.T, _dot(second, L)))}

    def out_of(psi: Tree, eta: Tree) -> Tree:
        L = cholesky_factor(psi, dim)
        K = linalg.solve(L, jnp.eye(dim))
        second = _symmetric(_dot(K.T, _dot(eta["second"], K)))
        return {"first": _dot(eta["first"], K) - 2 * _dot(second, psi["loc"]), "second": second}

    def marginal(
        eta: Tree, index: Index, shape: tuple[int, ...], event_dim: int
    ) -> dist.Distribution:
        psi = ordinary(eta)
        loc, rows = psi["loc"][index].reshape(shape), cholesky_factor(psi, dim)[index]
        if event_dim == 0:
            return dist.Normal(loc, jnp.linalg.norm(rows, axis=-1).reshape(shape))
        blocks = rows.reshape(*shape, dim)
        covariance = _dot(blocks, jnp.swapaxes(blocks, -1, -2))
        return dist.MultivariateNormal(loc, covariance).to_event(event_dim - 1)

    return Family(
        name="gaussian",
        dim=dim,
        statistics=lambda z: {"first": z, "second": jnp.outer(z, z)},
        increment=increment,
        log_base=lambda z: jnp.zeros(()),
        log_partition=log_partition,
        ordinary=ordinary,
        natural=natural,
        moments=moments,
        from_mean=from_mean,
        entropy=lambda psi: _entropy(psi, dim),
        noise=lambda key, n: jax.random.normal(key, (n, dim)),
        from_normals=lambda normals: normals,
        draw=lambda psi, noise: psi["loc"] + _dot(cholesky_factor(psi, dim), noise),
        centre=lambda psi: psi["loc"],
        spread=spread,
        proper=proper,
        fit=fit,
        dual_gradient=dual_gradient,
        move=move,
        log_density=log_density,
        kl=kl,
        marginal=marginal,
        around=lambda z, gradient, curvature: {
            "first": gradient + _dot(_symmetric(curvature), z),
            "second": -0.5 * _symmetric(curvature),
        },
        standard=lambda psi: jax.tree.map(jnp.zeros_like, psi),
        moved=moved_full,
        into=into,
        out_of=out_of,
    )


def moved_full(psi: Tree, step: Tree) -> Tree:
    """The mean ``m + L d`` and the root ``L L_d``; of many Gaussians at once (..., dim)."""
    dim = psi["loc"].shape[-1]
    L, L_step = cholesky_factor(psi, dim), cholesky_factor(step, dim)
    loc = psi["loc"] + jnp.einsum("...ij,...j->...i", L, step["loc"], precision="highest")
    return {"loc": loc, **cholesky_parts(_dot(L, L_step))}


def _entropy(psi: Tree, dim: int) -> Array:
    return psi["log_scale"].sum() + 0.5 * dim * (1 + _LOG_2PI)


def _symmetric(matrix: Array) -> Array:
    return 0.5 * (matrix + matrix.T)


def _precision(eta: Tree) -> Array:
    return -2 * _symmetric(eta["second"])


def cholesky_factor(psi: Tree, dim: int) -> Array:
    """``L`` of the covariance, from its parameters."""
    scale = jnp.exp(psi["log_scale"])
    return unit_lower(psi["below"], dim) * scale[..., None, :]


def cholesky_parts(L: Array) -> Tree:
    """The parameters of Cholesky factors (..., dim, dim)."""
    scale, dim = jnp.diagonal(L, axis1=-2, axis2=-1), L.shape[-1]
    rows, columns = np.tril_indices(dim, -1)
    below = (L / scale[..., None, :])[..., rows, columns] * math.sqrt(max(dim - 1, 1))
    return {"log_scale": jnp.log(scale), "below": below}


def _from_factor(loc: Array, L: Array) -> Tree:
    """Natural parameters from the mean and a Cholesky factor of the covariance."""
    K = linalg.solve(L, jnp.eye(len(L)))
    return {"first": _dot(_dot(K, loc), K), "second": -0.5 * _symmetric(_dot(K.T, K))}


def _by_factor(psi: Tree, gradient: Tree, dim: int) -> Array:
    """The gradient in ``L``, from that in ``psi``."""
    scale = jnp.exp(psi["log_scale"])
    if dim < 2:
        return jnp.diag(gradient["log_scale"] / scale)
    below = vec_to_tril_matrix(gradient["below"], diagonal=-1) * math.sqrt(dim - 1) / scale
    own = gradient["log_scale"] - jnp.sum(below * cholesky_factor(psi, dim), 0)
    return below + jnp.diag(own / scale)


def _by_covariance(L: Array, by_factor: Array) -> Array:
    """``L' G L`` for the gradient ``G`` in the covariance, from that in ``L``.

    By ``L`` as it is (Murray 2016, "Differentiation of the Cholesky decomposition", section 4): a
    second factorisation would lose in single precision what the condition number costs.
    """
    P = jnp.tril(_dot(L.T, by_factor))
    return 0.5 * (P + P.T - jnp.diag(jnp.diagonal(P)))
