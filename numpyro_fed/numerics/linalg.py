r"""Cholesky factors, triangular solves and other decompositions for stacks of matrices.

They replace :mod:`jax.numpy.linalg` wherever a matrix may be one of a stack, as under
:func:`jax.vmap` over silos, rows or draws. jaxlib 0.10 passes a stack to a LAPACK kernel that holds
a thread of XLA's pool while it waits for work that it has queued in the same pool: a few of them
side by side block a small pool for ever. A kernel for a single matrix does not wait. So in this
module

- a single matrix goes to LAPACK,
- a matrix of up to :data:`TINY` dimensions is factored and solved number by number, for the whole
  stack at once,
- a stack of matrices of up to :data:`SMALL` dimensions by loops over columns, and
- any other stack goes to LAPACK matrix by matrix, one after the other.

Accelerators have kernels for whole stacks, and get all of them at once.

:func:`cholesky`, :func:`solve` and :func:`root_of` have derivatives of every order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.scipy.linalg import solve_triangular

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
# The largest dimension for formulas without a loop: a loop in a program, however short, takes
# compiling, and microseconds at each entry. A hospital's two effects have blocks of two.
TINY = 3
# The largest dimension for loops over columns. Each step reads and writes the whole stack, so their
# work grows with the cube of the dimension without LAPACK's blocking.
SMALL = 8

_dot = partial(jnp.matmul, precision="highest")


def _jit(f: Function, static_argnames: str | None = None) -> Function:
    """Return a compiled function, whose code is inlined into programs that call it."""
    # Without compilation, each call outside of a program would compile the loops in it again.
    return cast(Function, jax.jit(f, inline=True, static_argnames=static_argnames))


def _in_turn_on_cpu(f: Function) -> Function:
    """Return a function of one matrix which, mapped over a stack on a CPU, takes each in turn."""
    one_by_one = sequential_vmap(f)
    mapped = custom_vmap(f)

    @mapped.def_vmap
    def of_stack(size: int, batched: list[bool], *args: Array) -> tuple[Any, Any]:
        axes = [0 if one else None for one in batched]
        found = jax.lax.platform_dependent(
            *args, cpu=jax.vmap(one_by_one, axes), default=jax.vmap(f, axes)
        )
        return found, jax.tree.map(lambda _: True, found)

    return cast(Function, mapped)


@_jit
def cholesky(A: Array) -> Array:
    """Return Cholesky factors of symmetric parts (..., d, d); NaN if not positive definite."""
    return _cholesky(0.5 * (A + jnp.swapaxes(A, -1, -2)))


@partial(_jit, static_argnames="transposed")
def solve(L: Array, B: Array, *, transposed: bool = False) -> Array:
    """Return solutions of ``L X = B``, or of ``L' X = B``, for lower triangular matrices ``L``.

    ``L`` is (..., d, d), and entries above its diagonal are not read. ``B`` and ``X`` are (..., d,
    k), columns for each matrix, or one vector (d,).
    """
    if B.ndim == 1:
        return solve(L, B[..., None], transposed=transposed)[..., 0]
    stack = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L, B = (jnp.broadcast_to(a, (*stack, *a.shape[-2:])) for a in (L, B))
    if not B.size:
        return B
    d = L.shape[-1]
    if d <= TINY:
        X: dict[int, Array] = {}
        for i in reversed(range(d)) if transposed else range(d):
            left = B[..., i, :]
            for j, x in X.items():
                left = left - (L[..., j, i] if transposed else L[..., i, j])[..., None] * x
            X[i] = left / L[..., i, i][..., None]
        return jnp.stack([X[i] for i in range(d)], -2)
    lower = jnp.tril(L)
    upper = jnp.swapaxes(lower, -1, -2)

    def by_lower(_: object, B: Array) -> Array:
        return _each(_forward, lower, B)

    def by_upper(_: object, B: Array) -> Array:
        """Return solutions for the transpose: with both axes reversed it is lower triangular."""
        return _each(_forward, upper[..., ::-1, ::-1], B[..., ::-1, :])[..., ::-1, :]

    # custom_linear_solve: derivatives are further solves with the same factor. To differentiate the
    # loop over columns would keep each of its steps.
    if transposed:
        return jax.lax.custom_linear_solve(partial(_dot, upper), B, by_upper, by_lower)
    return jax.lax.custom_linear_solve(partial(_dot, lower), B, by_lower, by_upper)


@_jit
def cholesky_solve(L: Array, B: Array) -> Array:
    """Return solutions of ``L L' X = B``, with shapes as in :func:`solve`."""
    return solve(L, solve(L, B), transposed=True)


@_jit
def cholesky_of_inverse(A: Array) -> Array:
    """Return Cholesky factors (..., d, d) of the inverses of positive definite matrices."""
    flipped = cholesky(A[..., ::-1, ::-1])[..., ::-1, ::-1]  # A = U U' with U upper triangular
    eye = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return solve(jnp.swapaxes(flipped, -1, -2), eye)


@_jit
def inverse(A: Array) -> Array:
    """Return the inverses of positive definite matrices (..., d, d)."""
    K = cholesky_of_inverse(A)
    return _dot(K, jnp.swapaxes(K, -1, -2))


@_jit
def eigh(A: Array) -> tuple[Array, Array]:
    """Return ascending eigenvalues (..., d), eigenvectors in columns; it has no derivatives."""
    if A.shape[-1] < 2:
        return A.sum(-1), jnp.ones_like(A)
    if A.shape[-1] > 2:
        return _each(_in_turn_on_cpu(lambda A: tuple(jnp.linalg.eigh(A))), A)
    a, b, c = A[..., 0, 0], A[..., 1, 0], A[..., 1, 1]
    half, r = 0.5 * (a - c), jnp.hypot(0.5 * (a - c), b)
    # Of cosine and sine of the larger one's angle, the one that is not small is a root, and the
    # other follows from their product, b / (2 r).
    large = jnp.sqrt(jnp.where(r > 0, 0.5 * (1 + jnp.abs(half) / jnp.where(r > 0, r, 1.0)), 1.0))
    small = jnp.where(r > 0, b / jnp.where(r > 0, 2 * r * large, 1.0), 0.0)
    cosine, sine = (jnp.where(half >= 0, x, y) for x, y in ((large, small), (small, large)))
    # The eigenvalue of less size follows from the determinant, as in LAPACK: a difference would
    # lose its digits.
    middle = 0.5 * (a + c)
    far = jnp.where(middle < 0, middle - r, middle + r)
    more, less = (jnp.where(jnp.abs(a) >= jnp.abs(c), x, y) for x, y in ((a, c), (c, a)))
    safe = jnp.where(far == 0, 1.0, far)
    near = jnp.where(far == 0, 0.0, (more / safe) * less - (b / safe) * b)
    values = jnp.sort(jnp.stack([near, far], -1), -1)
    return values, _matrix([[-sine, cosine], [cosine, sine]])


@_jit
def root_of(M: Array) -> Array:
    """Return the Cholesky factor (d, d) of ``M M'``, for ``M`` (d, k) with ``k`` at least ``d``.

    It is computed by a QR decomposition, without ``M M'``, whose condition number is the square of
    that of ``M``.
    """
    return _root_of(M)


@_jit
@_in_turn_on_cpu
def svd(A: Array) -> tuple[Array, Array, Array]:
    """Return ``U`` (n, r), singular values (r,) and ``V'`` (r, k); it has no derivatives."""
    return tuple(jnp.linalg.svd(A, full_matrices=False))


@_jit
@_in_turn_on_cpu
def least_squares(A: Array, b: Array) -> Array:
    """Return the shortest ``x`` that minimises ``|A x - b|``, for ``A`` (n, k)."""
    return jnp.linalg.lstsq(A, b)[0]


def _matrix(rows: list[list[Array]]) -> Array:
    """Return matrices (..., d, d) from their entries."""
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def _each(f: Callable[..., Result], *stacks: Array) -> Result:
    """Return ``f`` of each matrix of the stacks, by nested ``vmap``."""
    for _ in range(stacks[0].ndim - 2):
        f = jax.vmap(f)
    return f(*stacks)


@jax.custom_jvp
def _cholesky(A: Array) -> Array:
    if not A.size:
        return A
    d = A.shape[-1]
    if d > TINY:
        return _each(_factor, A)
    zero = jnp.zeros_like(A[..., 0, 0])
    L, positive = [[zero] * d for _ in range(d)], jnp.ones(zero.shape, bool)
    for j in range(d):
        pivot = A[..., j, j] - sum(L[j][k] ** 2 for k in range(j))
        positive &= pivot > 0
        L[j][j] = jnp.sqrt(jnp.where(pivot > 0, pivot, 1.0))
        for i in range(j + 1, d):
            L[i][j] = (A[..., i, j] - sum(L[i][k] * L[j][k] for k in range(j))) / L[j][j]
    return jnp.tril(jnp.where(positive[..., None, None], _matrix(L), jnp.nan))


def _changed(L: Array, change: Array) -> Array:
    r"""Return how ``L`` changes as :math:`A = L L'` does: :math:`L \Phi(L^{-1} \dot A L^{-T})`."""
    # Phi keeps the entries of a matrix below the diagonal, and half of its diagonal.
    inner = solve(L, jnp.swapaxes(solve(L, change), -1, -2))
    return _dot(L, jnp.tril(inner) * (1 - 0.5 * jnp.eye(L.shape[-1], dtype=L.dtype)))


_cholesky.defjvps(lambda change, L, A: _changed(L, change))


@jax.custom_jvp
@_in_turn_on_cpu
def _root_of(M: Array) -> Array:
    # R' is a root with diagonal entries of either sign; a Cholesky factor has positive ones.
    R = jnp.linalg.qr(M.T, mode="r")
    return R.T * jnp.where(jnp.diagonal(R) < 0, -1.0, 1.0)


_root_of.defjvps(
    lambda change, L, M: _changed(L, (across := _dot(change, M.T)) + across.T),
)


@custom_vmap
def _factor(A: Array) -> Array:
    return jnp.linalg.cholesky(A, symmetrize_input=False)


@_factor.def_vmap
def _factors(size: int, batched: list[bool], A: Array) -> tuple[Array, bool]:
    on_cpu = _factors_by_columns if A.shape[-1] <= SMALL else partial(jax.lax.map, _factor)
    all_at_once = partial(jnp.linalg.cholesky, symmetrize_input=False)
    return jax.lax.platform_dependent(A, cpu=on_cpu, default=all_at_once), True


def _factors_by_columns(A: Array) -> Array:
    """Return the factors of a stack (n, d, d), column by column (right-looking)."""
    d = A.shape[-1]
    place = jnp.arange(d)

    def step(j: Array, A: Array) -> Array:
        """Return the stack with column ``j`` of the factors, and those to its right reduced."""
        column = jax.lax.dynamic_index_in_dim(A, j, -1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(column, j, -1)
        column = jnp.where(place >= j, column / jnp.sqrt(pivot), 0.0)
        right = jnp.where(place > j, column, 0.0)
        return jnp.where(place == j, column[..., None], A - column[..., None] * right[..., None, :])

    L = jax.lax.fori_loop(0, d, step, A)
    # A negative pivot gives NaN in its own column only; LAPACK's kernel fills the whole matrix.
    positive = (jnp.diagonal(L, axis1=-2, axis2=-1) > 0).all(-1)
    return jnp.tril(jnp.where(positive[..., None, None], L, jnp.nan))


@custom_vmap
def _forward(L: Array, B: Array) -> Array:
    return solve_triangular(L, B, lower=True)


@_forward.def_vmap
def _forwards(size: int, batched: list[bool], L: Array, B: Array) -> tuple[Array, bool]:
    # One matrix for the whole stack: all right sides become columns of a single solve.
    if not batched[0]:
        d, k = B.shape[1:]
        X = _forward(L, jnp.moveaxis(B, 0, 1).reshape(d, size * k))
        return jnp.moveaxis(X.reshape(d, size, k), 1, 0), True
    if not batched[1]:
        B = jnp.broadcast_to(B, (size, *B.shape))
    all_at_once = partial(solve_triangular, lower=True)
    if L.shape[-1] <= SMALL:
        return jax.lax.platform_dependent(L, B, cpu=_solve_by_rows, default=all_at_once), True
    found = jax.lax.platform_dependent(
        *(L, B),
        cpu=lambda L, B: jax.lax.map(lambda one: _forward(*one), (L, B)),
        default=all_at_once,
    )
    return found, True


def _solve_by_rows(L: Array, B: Array) -> Array:
    """Return the solutions (n, d, k) for a stack of small lower triangular matrices."""
    d = L.shape[-1]
    place = jnp.arange(d)

    def step(j: Array, X: Array) -> Array:
        """Return the stack with row ``j`` of the solutions, and the right sides below reduced."""
        column = jax.lax.dynamic_index_in_dim(L, j, -1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(column, j, -1)
        row = jax.lax.dynamic_index_in_dim(X, j, -2, keepdims=False) / pivot
        below = jnp.where(place > j, column, 0.0)
        remainder = X - below[..., None] * row[..., None, :]
        return jnp.where((place == j)[:, None], row[..., None, :], remainder)

    return jax.lax.fori_loop(0, d, step, B)
