"""Barycenters of Gaussians: what defines them, and the values that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ott.geometry.costs import Bures

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError
from numpyro_fed.numerics.barycenters import forward_kl, reverse_kl, wasserstein

ALL = [wasserstein, forward_kl, reverse_kl]
COMPILED = {barycenter: jax.jit(barycenter) for barycenter in ALL}
SEEDS = st.integers(0, 10_000)
SHAPES = st.sampled_from([(1, 3), (2, 1), (3, 4)])  # number and dimension, each a program


def gaussians(seed, number, dim, spread=1.0):
    """Means, covariances and weights."""
    r = np.random.default_rng(seed)
    a, s = r.normal(size=(number, dim, dim)), np.exp(r.uniform(-spread, spread, dim))
    covs = (a @ a.transpose(0, 2, 1) + 0.1 * np.eye(dim)) * s * s[:, None]
    return r.normal(size=(number, dim)), covs, r.dirichlet(np.ones(number))


def of(barycenter, *args):
    """As one program. Step by step they are called where errors are, and compared with this."""
    return tuple(map(np.asarray, COMPILED[barycenter](*args)))


def root(S):
    variances, axes = np.linalg.eigh(S)
    return (axes * np.sqrt(variances)) @ axes.T


@pytest.mark.slow
@given(SEEDS, st.sampled_from([(1, 4), (2, 1), (4, 3), (6, 7)]))
@settings(deadline=None, max_examples=30)
def test_the_wasserstein_barycenter_solves_its_equation(seed, shape):
    locs, covs, w = gaussians(seed, *shape)
    with jax.enable_x64(True):
        loc, S = (np.asarray(a) for a in wasserstein(locs, covs, w))
    half = root(S)
    right = sum(wj * root(half @ cov @ half) for wj, cov in zip(w, covs, strict=True))
    np.testing.assert_allclose(right, S, atol=1e-12 * abs(S).max())
    np.testing.assert_allclose(loc, w @ locs, rtol=1e-10)


def test_it_is_that_of_ott():
    """OTT's loop ends after five steps unless it is told how many to take."""
    number = 3
    locs, covs, w = gaussians(1, number, 4)
    steps = dict.fromkeys(("min_iterations", "max_iterations", "inner_iterations"), 60)
    exact = dict(threshold=1e-16, regularization=0.0, inner_iterations=1)
    with jax.enable_x64(True):
        loc, S = of(wasserstein, locs, covs, w)
        points = np.concatenate([locs, covs.reshape(number, -1)], 1)
        bures = Bures(4, exact)
        found = jax.jit(lambda w, points: bures.barycenter(w, points, **steps)[0])(w, points)
    np.testing.assert_allclose(found[:4], loc, rtol=1e-12)
    np.testing.assert_allclose(found[4:].reshape(4, 4), S, atol=1e-10 * abs(S).max())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("power", [0, 4])
def test_each_coordinate_keeps_its_digits_in_any_units_and_order(power, double):
    """Pairs of coordinates of one unit each: every pair is a problem of its own."""
    r = np.random.default_rng(0)
    _, covs, w = gaussians(2, 3, 2)
    units = 10.0 ** np.linspace(-power, power, 3)
    blocks = np.einsum("u,jab,v->juavb", units, covs, units) * np.eye(3)[:, None, :, None]
    order = r.permutation(6)
    wide = blocks.reshape(3, 6, 6)[:, order][:, :, order]
    with jax.enable_x64(True):
        expected = of(wasserstein, np.zeros((3, 2)), covs, w)[1]
    with jax.enable_x64(double):
        found = of(wasserstein, np.zeros((3, 6)), wide, w)[1].astype(float)
    sds = np.repeat(units, 2)[order]
    found = (found / sds / sds[:, None])[np.argsort(order)][:, np.argsort(order)]
    atol = (1e-12 if double else 1e-5) * abs(expected).max()
    np.testing.assert_allclose(found, np.kron(np.eye(3), expected), atol=atol)


def test_covariances_with_the_same_axes_have_the_square_of_the_mean_root():
    r = np.random.default_rng(0)
    Q, variances, w = (
        np.linalg.qr(r.normal(size=(5, 5)))[0],
        r.gamma(1, size=(4, 5)),
        r.dirichlet(np.ones(4)),
    )
    with jax.enable_x64(True):
        S = of(wasserstein, np.zeros((4, 5)), Q * variances[:, None] @ Q.T, w)[1]
    expected = Q * (w @ np.sqrt(variances)) ** 2 @ Q.T
    np.testing.assert_allclose(S, expected, atol=1e-13 * abs(expected).max())


@given(SEEDS, SHAPES)
@settings(deadline=None, max_examples=20)
def test_similar_maps_move_the_wasserstein_barycenter_with_them(seed, shape):
    """Rotations, shifts and one scale for all: maps that keep the ratios of distances."""
    locs, covs, w = gaussians(seed, *shape)
    dim = shape[1]
    r = np.random.default_rng(seed + 1)
    A, b = 3.7 * np.linalg.qr(r.normal(size=(dim, dim)))[0], r.normal(size=dim)
    with jax.enable_x64(True):
        loc, S = of(wasserstein, locs, covs, w)
        moved = of(wasserstein, locs @ A.T + b, A @ covs @ A.T, w)
    np.testing.assert_allclose(moved[0], A @ loc + b, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(moved[1], A @ S @ A.T, atol=1e-8 * abs(A @ S @ A.T).max())


@pytest.mark.parametrize("barycenter", [forward_kl, reverse_kl])
@given(seed=SEEDS, shape=SHAPES)
@settings(deadline=None, max_examples=15)
def test_affine_maps_move_those_of_kl_with_them(barycenter, seed, shape):
    locs, covs, w = gaussians(seed, *shape)
    dim = shape[1]
    r = np.random.default_rng(seed + 1)
    A, b = r.normal(size=(dim, dim)) + 2 * np.eye(dim), r.normal(size=dim)
    with jax.enable_x64(True):
        loc, S = of(barycenter, locs, covs, w)
        moved = of(barycenter, locs @ A.T + b, A @ covs @ A.T, w)
    scale = np.linalg.cond(A) ** 2
    np.testing.assert_allclose(moved[0], A @ loc + b, rtol=1e-9 * scale, atol=1e-9 * scale)
    top = abs(A @ S @ A.T).max()
    np.testing.assert_allclose(moved[1], A @ S @ A.T, atol=1e-10 * scale * top)


@given(SEEDS, SHAPES)
@settings(deadline=None, max_examples=20)
def test_diagonal_ones_are_exact_under_any_units(seed, shape):
    locs, covs, w = gaussians(seed, *shape)
    dim = shape[1]
    variances = np.diagonal(covs, axis1=1, axis2=2)
    units = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, dim)
    with jax.enable_x64(True):
        loc, found = of(wasserstein, units * locs, units**2 * variances, w)
        full = of(wasserstein, locs, variances[:, None] * np.eye(dim), w)[1]
    expected = (w @ np.sqrt(variances)) ** 2
    np.testing.assert_allclose(found, units**2 * expected, rtol=1e-12)
    np.testing.assert_allclose(loc, units * (w @ locs), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(full, np.diag(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("barycenter", ALL)
@pytest.mark.parametrize("full", [False, True])
def test_of_equal_gaussians_it_is_that_gaussian(barycenter, full):
    locs, covs, w = gaussians(3, 4, 5)
    cov = covs[0] if full else np.diagonal(covs[0])
    loc, found = of(barycenter, np.stack([locs[0]] * 4), np.stack([cov] * 4), w)
    np.testing.assert_allclose(loc, locs[0], rtol=1e-5)
    np.testing.assert_allclose(found, cov, rtol=1e-3, atol=1e-4 * abs(cov).max())


@pytest.mark.parametrize("full", [False, True])
def test_those_of_kl_are_least(full):
    """Their summed divergence grows whichever way mean and covariance are moved."""
    locs, covs, w = gaussians(5, 3, 3)
    held = covs if full else np.diagonal(covs, axis1=1, axis2=2)
    whole = covs if full else held[:, None] * np.eye(3)

    def kl(m, S, n, R):
        inside = jnp.linalg.solve(R, S)
        off = n - m
        logs = jnp.linalg.slogdet(R)[1] - jnp.linalg.slogdet(S)[1]
        return 0.5 * (jnp.trace(inside) + off @ jnp.linalg.solve(R, off) - 3 + logs)

    def summed(forward, m, S):
        S = S if full else jnp.diag(S)
        each = [
            kl(mj, Sj, m, S) if forward else kl(m, S, mj, Sj)
            for mj, Sj in zip(locs, whole, strict=True)
        ]
        return w @ jnp.stack(each)

    with jax.enable_x64(True):
        for forward, barycenter in ((True, forward_kl), (False, reverse_kl)):
            at = of(barycenter, locs, held, w)
            slopes = jax.jit(jax.grad(lambda m, S, f=forward: summed(f, m, S), (0, 1)))(*at)
            for slope in slopes:
                np.testing.assert_allclose(slope, 0, atol=1e-9)


def test_it_goes_through_jit():
    locs, covs, w = gaussians(3, 3, 4)
    for a, b in zip(of(wasserstein, locs, covs, w), wasserstein(locs, covs, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("barycenter", ALL)
def test_bad_input_is_named(barycenter):
    locs, covs, w = gaussians(0, 3, 2)
    with pytest.raises(DataError, match=r"covariance 1 .*definite"):
        barycenter(locs, [covs[0], -covs[1], covs[2]], w)
    with pytest.raises(DataError, match=r"covariance 2 .*symmetric"):
        barycenter(locs, [covs[0], covs[1], [[1.0, 0.5], [0.0, 1.0]]], w)
    with pytest.raises(DataError, match=r"variance of 0\.0"):
        barycenter(locs, [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]], w)
    with pytest.raises(DataError, match="weights must be positive"):
        barycenter(locs, covs, [0.5, 0.7, -0.2])
    with pytest.raises(DataError, match="NaN"):
        barycenter(locs * np.nan, covs, w)
    with pytest.raises(DataError, match=r"got \(3, 2\), \(3, 3\)"):
        barycenter(locs, np.ones((3, 3)), w)
    with pytest.raises(DataError, match="at least one"):
        barycenter(np.zeros((0, 3)), np.zeros((0, 3)), None)


@pytest.mark.parametrize("barycenter", ALL)
def test_singular_to_the_digits_is_refused_or_right_in_single_precision(barycenter):
    r, refused = np.random.default_rng(0), 0
    for eps in np.repeat([1e-8, 1e-7, 1e-6, 1e-5], 10):
        v = r.normal(size=(10, 3))
        cov = np.asarray(v @ v.T + eps * np.eye(10), np.float32)
        locs = np.tile(np.asarray(r.normal(size=10), np.float32), (2, 1))
        try:
            loc, S = barycenter(locs, np.stack([cov, cov]), None)
        except DataError:
            refused += 1
            continue
        np.testing.assert_allclose(S, cov, atol=1e-3 * np.abs(cov).max())
        # What rounding may move the solution of least squares by, from their condition.
        condition = np.linalg.cond(np.linalg.cholesky(cov))
        moved = np.finfo(np.float32).eps * condition * np.linalg.norm(locs[0])
        np.testing.assert_allclose(loc, locs[0], rtol=0, atol=max(moved, 1e-3))
    assert 0 < refused < 40


def test_it_is_in_the_front_door():
    assert nf.barycenters.wasserstein is wasserstein
