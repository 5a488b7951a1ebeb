"""Factors, solves and eigenvalues of stacks: as by ``jnp.linalg``, and without its kernels."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.scipy.linalg import solve_triangular
from kernels import lapack_shapes

from numpyro_fed.numerics import linalg

DIMS = (1, 2, 5, 8, 9)
CASES = settings(max_examples=8, deadline=None)


def stack(seed, shape, d):
    """Positive definite matrices (*shape, d, d) with eigenvalues from 0.5 on."""
    M = np.random.default_rng(seed).normal(size=(*shape, d, d)) / np.sqrt(d)
    return jnp.asarray(M @ np.swapaxes(M, -1, -2) + 0.5 * np.eye(d))


def right(seed, shape, d, k):
    return jnp.asarray(np.random.default_rng(seed + 1).normal(size=(*shape, d, k)))


def lapack_solve(L, B, transposed):
    return solve_triangular(L, B, lower=True, trans="T" if transposed else 0)


shapes = st.sampled_from([(), (1,), (3,), (2, 3)])
seeds = st.integers(0, 2**16)


@CASES
@given(seeds, shapes, st.sampled_from(DIMS))
def test_factors_are_lapacks(seed, shape, d):
    with jax.enable_x64(True):
        A = stack(seed, shape, d)
        found = jax.jit(linalg.cholesky)(A)
        np.testing.assert_allclose(found, np.linalg.cholesky(A), atol=1e-12)


@CASES
@given(seeds, shapes, st.sampled_from(DIMS), st.booleans(), st.integers(1, 3))
def test_solves_are_lapacks(seed, shape, d, transposed, k):
    with jax.enable_x64(True):
        L, B = np.linalg.cholesky(stack(seed, shape, d)), right(seed, shape, d, k)
        noise = np.triu(np.ones((d, d)), 1)  # which is not read
        found = jax.jit(linalg.solve, static_argnames="transposed")(
            L + noise, B, transposed=transposed
        )
        known = np.linalg.solve(np.swapaxes(L, -1, -2) if transposed else L, B)
        np.testing.assert_allclose(found, known, atol=1e-11)


def test_right_sides_go_to_all_matrices_of_a_stack(double):
    """As many matrices as dimensions, so that nothing is taken for vectors of a stack."""
    L, B = np.linalg.cholesky(stack(0, (3,), 3)), right(0, (), 3, 3)
    matrices, vectors = jax.jit(lambda L, B: (linalg.solve(L, B), linalg.solve(L, B[:, 0])))(L, B)
    np.testing.assert_allclose(matrices, np.linalg.solve(L, B), atol=1e-12)
    np.testing.assert_allclose(vectors, matrices[..., 0], atol=1e-12)


@CASES
@given(seeds, shapes, st.sampled_from(DIMS))
def test_eigenvalues_are_lapacks(seed, shape, d):
    with jax.enable_x64(True):
        A = np.asarray(stack(seed, shape, d)) - np.eye(d)
        values, vectors = map(np.asarray, jax.jit(linalg.eigh)(A))
        np.testing.assert_allclose(values, np.linalg.eigvalsh(A), atol=1e-12)
        np.testing.assert_allclose(A @ vectors, vectors * values[..., None, :], atol=1e-12)
        gram = np.swapaxes(vectors, -1, -2) @ vectors
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(d), gram.shape), atol=1e-12)


def of_ours(A, B):
    L = linalg.cholesky(A)
    return jnp.sum(jnp.sin(linalg.solve(L, B))) + jnp.sum(linalg.cholesky_solve(L, B) ** 2)


def of_lapack(A, B):
    L = jnp.linalg.cholesky(A)
    first = lapack_solve(L, B, False)
    return jnp.sum(jnp.sin(first)) + jnp.sum(lapack_solve(L, first, True) ** 2)


@pytest.mark.parametrize(("d", "shape"), slow_but(product([1, 4, 9], [(), (3,)]), 3))
def test_derivatives_up_to_the_second_are_lapacks(d, shape, double):
    A, B = stack(0, shape, d), right(0, shape, d, 2)
    direction = right(1, shape, d, d), right(2, shape, d, 2)

    def everything(f):
        gradient = jax.grad(f, (0, 1))
        value, slope = jax.jvp(f, (A, B), direction)
        forward = jax.jvp(gradient, (A, B), direction)  # forward over reverse
        back = jax.grad(lambda A, B: jax.jvp(f, (A, B), direction)[1], (0, 1))(A, B)
        return value, slope, forward, back

    found, known = jax.jit(lambda: (everything(of_ours), everything(of_lapack)))()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d", [3, 4, 9])
def test_nested_vmaps_of_gradients_are_lapacks(d, double):
    A, B = stack(0, (2, 3), d), right(0, (3,), d, 2)

    def nested(f):
        rows = jax.vmap(jax.grad(f, (0, 1)))
        return jax.vmap(rows, (0, None))(A, B)

    found, known = jax.jit(lambda: (nested(of_ours), nested(of_lapack)))()
    for a, b in zip(found, known, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def kernels_of(f, *args):
    return lapack_shapes(jax.jit(f).lower(*args).as_text())


@pytest.mark.parametrize("d", [3, 4, 9])
def test_columns_of_one_matrix_are_solved_together(d, double):
    """A stack of right sides of one matrix is one solve of as many columns."""
    L, B = jnp.linalg.cholesky(stack(0, (), d)), right(0, (4,), d, 2)
    each = jax.jit(jax.vmap(lambda B: linalg.solve(L, B)))
    np.testing.assert_allclose(each(B), lapack_solve(jnp.broadcast_to(L, (4, d, d)), B, False))
    assert len(kernels_of(each, B)) == (d > linalg.TINY)
    assert "while" not in each.lower(B).as_text()


@pytest.mark.parametrize("d", [1, 2, 5, 9])
def test_what_is_not_positive_definite_is_nan(d):
    A = np.stack([np.eye(d), np.eye(d), np.zeros((d, d)), np.full((d, d), np.nan)])
    A[1, -1, -1] = -1.0
    found, known = jax.jit(lambda A: (linalg.cholesky(A), jnp.linalg.cholesky(A)))(A)
    np.testing.assert_array_equal(found, known)
    assert np.isnan(np.diagonal(found[1:], axis1=1, axis2=2)).all()


@pytest.mark.parametrize("d", [2, 8])
def test_single_precision_is_as_good_as_lapacks(d):
    """Residuals of a factor and of its inverse, for a condition of about 10^4."""
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(200, d, d)))[0]
    A = (Q * np.geomspace(1, 1e4, d)) @ np.swapaxes(Q, -1, -2)
    single = jnp.asarray(A, jnp.float32)

    def worst(cholesky, solve):
        @jax.jit
        def both(A):
            L = cholesky(A)
            return L, solve(L, jnp.broadcast_to(jnp.eye(d), L.shape))

        L, X = (np.asarray(a, float) for a in both(single))
        rebuilt = L @ np.swapaxes(L, -1, -2)
        factor = np.abs(rebuilt - np.asarray(single, float)).max((1, 2)).mean()
        inverse = np.abs(X @ L - np.eye(d)).max((1, 2)).mean()
        return np.array([factor, inverse])

    ours = worst(linalg.cholesky, linalg.solve)
    theirs = worst(jnp.linalg.cholesky, lambda L, B: lapack_solve(L, B, False))
    assert (ours < 2 * theirs).all(), (ours, theirs)


def test_inverses_are_of_their_matrices(double):
    A = np.asarray(stack(0, (3,), 5))
    both = jax.jit(lambda A: (linalg.inverse(A), linalg.cholesky_of_inverse(A)))(A)
    eye, (inverse, K) = np.broadcast_to(np.eye(5), A.shape), map(np.asarray, both)
    np.testing.assert_allclose(inverse @ A, eye, atol=1e-12)
    np.testing.assert_allclose(np.tril(K), K)
    np.testing.assert_allclose(K @ np.swapaxes(K, -1, -2) @ A, eye, atol=1e-12)


def test_roots_are_lower_triangular_with_a_positive_diagonal(double):
    M = np.asarray(right(0, (2,), 4, 6))
    L = np.asarray(jax.jit(jax.vmap(linalg.root_of))(M))
    np.testing.assert_allclose(L @ np.swapaxes(L, -1, -2), M @ np.swapaxes(M, -1, -2))
    assert (np.diagonal(L, axis1=1, axis2=2) > 0).all()
    np.testing.assert_array_equal(np.tril(L), L)


def test_least_squares_of_each_are_lapacks(double):
    A, b = right(0, (3,), 5, 2), right(1, (3,), 5, 1)[..., 0]
    found = jax.jit(jax.vmap(linalg.least_squares))(A, b)
    for x, a, y in zip(found, A, b, strict=True):
        np.testing.assert_allclose(x, np.linalg.lstsq(a, y)[0])


def test_what_is_empty_stays_empty():
    assert linalg.cholesky(jnp.zeros((0, 0))).shape == (0, 0)
    assert linalg.cholesky(jnp.zeros((0, 3, 3))).shape == (0, 3, 3)
    assert linalg.solve(jnp.zeros((0, 0)), jnp.zeros((0, 2))).shape == (0, 2)
    assert linalg.solve(jnp.eye(2), jnp.zeros((2, 0))).shape == (2, 0)
    assert linalg.eigh(jnp.zeros((0, 0)))[1].shape == (0, 0)


@pytest.mark.parametrize(
    "entries",
    [(1e8, 0.0, 1.0), (1.0, 0.0, 1e8), (-1e8, 3.0, 1.0), (4e-20, 0.0, 9.0), (0.0, 0.0, 0.0)],
)
def test_eigenvalues_of_unlike_size_keep_their_digits(entries):
    a, b, c = entries
    A = np.array([[a, b], [b, c]])
    values, vectors = linalg.eigh(jnp.asarray(A, jnp.float32))
    np.testing.assert_allclose(values, np.linalg.eigvalsh(A), rtol=1e-5)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(2), atol=1e-6)
    assert jnp.isnan(linalg.eigh(jnp.full((2, 2), jnp.nan))[0]).all()


@pytest.mark.parametrize("d", slow_but([2, 8, 9, 40], 1, 2))
def test_no_stack_goes_to_lapack(d):
    """A kernel for a single matrix waits for no other thread; one for a stack does."""

    def all_of(A):
        L = linalg.cholesky(A)
        values, _ = linalg.eigh(A)
        others = jax.vmap(linalg.root_of)(A), jax.vmap(linalg.least_squares)(A, A[..., 0])
        return linalg.cholesky_solve(L, A), values, linalg.inverse(A), others

    A = jnp.broadcast_to(jnp.eye(d), (3, d, d))
    assert kernels_of(jnp.linalg.cholesky, A) == [(3, d, d)]  # so that the pattern is right
    for f, x in ((all_of, A), (jax.vmap(all_of), jnp.stack([A, A]))):
        assert all(shape == (d, d) for shape in kernels_of(f, x))
    assert len(kernels_of(lambda A: linalg.cholesky(A), A)) == (d > linalg.SMALL)
