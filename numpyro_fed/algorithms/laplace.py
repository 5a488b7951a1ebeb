r"""A silo's log likelihood of the globals, with its own latents integrated by Laplace's method.

With :math:`f(z_L) = \log p(y_j, z_L \mid z_G)`, its mode :math:`\hat z_L` among :math:`D` latents
and :math:`A = -\nabla^2 f(\hat z_L)`,

.. math::
    \log p(y_j \mid z_G) \approx f(\hat z_L) + \tfrac{D}{2} \log 2 \pi - \tfrac12 \log \det A.

Rows are independent given the globals and the latents of outer plates (a hospital above its
patients): ``A`` is an arrow, a block for each row and a border for what stands above them, and is
solved block by block, as TMB (Kristensen et al. 2016) and INLA (Rue, Martino and Chopin 2009) do it
for pooled data. Kinks of densities are rounded off (:mod:`numpyro_fed.model.kinks`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_fed.model.data import SiloData
from numpyro_fed.model.split import FederatedModel, Rows, Theta

NEAR = 1e-2  # where the search for the first modes begins
STEPS = 50  # of Newton's method, at most
SHARES = tuple(2.0**-i for i in range(10))  # of a step that are tried
AT_MODE = 1e-2  # nats that a step promises, at most, where Laplace's method may be used
PROMISED = 1e-6  # nats that a step promises, at most, where the search ends
FLAT = 1e-6  # of the largest curvature of a block: with less, a direction counts as flat
LOG_2PI = math.log(2 * math.pi)


class Arrow(NamedTuple):
    """Gradient and negative Hessian of a silo's log density in its locals.

    Attributes
    ----------
    g_rows, rows : {plate: (n, d)}, {plate: (n, d, d)}
    border : {plate: (n, d, o)}
    g_outer, outer : (o,), (o, o)
        Of the ``o`` latents of all outer plates together.
    """

    g_rows: Rows
    rows: Rows
    border: Rows
    g_outer: Array
    outer: Array

    def of_rows(self) -> Arrow:
        """Without what stands above the rows."""
        border = {p: jnp.zeros((*g.shape, 0)) for p, g in self.g_rows.items()}
        return Arrow(self.g_rows, self.rows, border, jnp.zeros(0), jnp.zeros((0, 0)))


class _Move(NamedTuple):
    """A step of the search, the shares of it that are tried, and whether outer latents stay."""

    direction: Rows
    shares: Array
    held: bool


@dataclass(frozen=True)
class Laplace:
    """Laplace's method for the locals of a split text."""

    model: FederatedModel

    def start(self, data: SiloData) -> Rows:
        """Locals next to zero, {plate: (rows, dim)}: at it some densities have a kink."""
        sizes = self.model.sizes(data)
        shapes = {p.name: (sizes[p.name], p.dim) for p in self.model.plates if p.dim}
        return {name: jnp.full(shape, NEAR) for name, shape in shapes.items()}

    def log_likelihood(
        self, theta: Theta, z_G: Array, data: SiloData, start: Rows
    ) -> tuple[Array, Rows]:
        """The silo's log likelihood, and the modes of its locals.

        It may be differentiated twice: two steps of Newton's method from the modes, taken as given,
        move with ``theta`` and ``z_G`` as the modes do, up to third derivatives.
        """
        if not start:
            return self._total(theta, z_G, start, data), start
        z = self.modes(*jax.lax.stop_gradient((theta, z_G)), data, start)
        for _ in range(2):
            z = self.stepped(theta, z_G, z, data)
        arrow = self._arrow(theta, z_G, z, data)
        step, log_det = _newton(arrow, z)
        log_det = jnp.where(_promised(arrow, step, self._outer) < AT_MODE, log_det, jnp.nan)
        number = sum(jnp.sum(self._real(p, z, data)) * z[p].shape[1] for p in z)
        value = self._total(theta, z_G, z, data) + 0.5 * (number * LOG_2PI - log_det)
        return value, jax.lax.stop_gradient(z)

    def stepped(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Rows:
        """The locals after a plain step of Newton's method."""
        step, _ = _newton(self._arrow(theta, z_G, z, data), z)
        return jax.tree.map(jnp.add, z, step)

    def outer_given(
        self, theta: Theta, z_G: Array, z: Rows, data: SiloData
    ) -> dict[str, tuple[Array, Array]]:
        """Mode and covariance of each outer plate's latents, {plate: (n, d), (n d, n d)}.

        ``z`` are the modes at a place nearby. With one derivative, as all modes here.
        """
        z = self.stepped(theta, z_G, z, data)
        covariance = jnp.linalg.inv(_corner(self._arrow(theta, z_G, z, data)))
        found, start = {}, 0
        for p in self._outer:
            own = slice(start, start := start + z[p].size)
            found[p] = z[p], covariance[own, own]
        return found

    def rows_given(
        self, theta: Theta, z_G: Array, outer: Array, z: Rows, data: SiloData
    ) -> dict[str, tuple[Array, Array]]:
        """Modes (n, d) and precisions (n, d, d) of the rows, given all latents of outer plates."""
        z = {**z, **_unpacked(outer, z, self._outer)}
        arrow = self._arrow(theta, z_G, z, data)
        for p, A in arrow.rows.items():
            L = jnp.linalg.cholesky(A)
            z = {**z, p: z[p] + _solved(L, arrow.g_rows[p][..., None])[..., 0]}
        arrow = self._arrow(theta, z_G, z, data)
        return {p: (z[p], A) for p, A in arrow.rows.items()}

    def modes(
        self,
        theta: Theta,
        z_G: Array,
        data: SiloData,
        start: Rows,
        *,
        held: bool = False,
        within: float = PROMISED,
        steps: int = STEPS,
        shares: tuple[float, ...] = SHARES,
    ) -> Rows:
        """By steps of Newton's method, of which no row takes one that leads down.

        With ``held`` latents of outer plates stay. The search ends ``within`` so many nats, and
        tries these ``shares`` of each step.
        """

        def step(carry: tuple[Array, Rows, Array]) -> tuple[Array, Rows, Array]:
            i, z, _ = carry
            arrow = self._arrow(theta, z_G, z, data)
            arrow = arrow.of_rows() if held else arrow
            moving = {p: v for p, v in z.items() if p in arrow.rows or not held}
            uphill = arrow._replace(rows={p: _positive(A) for p, A in arrow.rows.items()})
            direction, _ = _newton(uphill, moving, positive=True)
            promised = _promised(arrow, direction, () if held else self._outer)
            direction = {**jax.tree.map(jnp.zeros_like, z), **direction}
            move = _Move(direction, jnp.array([*shares, 0.0]), held)
            return i + 1, self._searched(theta, z_G, z, move, data), promised

        def go_on(carry: tuple[Array, Rows, Array]) -> Array:
            i, _, promised = carry
            return (i < steps) & (promised > within)

        none, far = jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, jnp.result_type(float))
        return jax.lax.while_loop(go_on, step, (none, start, far))[1]

    def _searched(self, theta: Theta, z_G: Array, z: Rows, move: _Move, data: SiloData) -> Rows:
        """The best of some shares of a step: for each row, or for all where a plate moves above."""
        direction, shares, held = move

        def at(share: Array) -> Rows:
            moved = jax.tree.map(lambda a, b: a + share * b, z, direction)
            return self._terms(theta, z_G, moved, data)

        terms = jax.lax.map(at, shares)
        if self._outer and not held:
            total = sum(t.sum(1) for t in terms.values())
            best = shares[jnp.argmax(jnp.where(jnp.isnan(total), -jnp.inf, total))]
            return jax.tree.map(lambda a, b: a + best * b, z, direction)
        moved = dict(z)
        for p in [p for p in z if p not in self._outer]:
            values = jnp.where(jnp.isnan(terms[p]), -jnp.inf, terms[p])
            moved[p] = z[p] + shares[jnp.argmax(values, 0)][:, None] * direction[p]
        return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), moved, z)

    @property
    def _outer(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.model.plates if p.dim and p.outer)

    def _terms(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Rows:
        sizes = self.model.sizes(data)
        none = {p.name: jnp.zeros((sizes[p.name], 0)) for p in self.model.plates if not p.dim}
        return self.model.rounded.log_silo(theta, z_G, {**none, **z}, data)

    def _total(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Array:
        terms = self._terms(theta, z_G, z, data)
        return sum((rows.sum() for rows in terms.values()), jnp.zeros(()))

    def _real(self, plate: str, z: Rows, data: SiloData) -> Array:
        return data.masks.get(plate, jnp.ones(len(z[plate]), bool))

    def _arrow(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Arrow:
        """Derivatives in the locals; padded rows have a curvature of one, and no slope."""
        gradient = jax.grad(lambda z: self._total(theta, z_G, z, data))
        nowhere, outer = jax.tree.map(jnp.zeros_like, z), self._outer

        def along(direction: Rows) -> Rows:
            return jax.jvp(gradient, (z,), ({**nowhere, **direction},))[1]

        def block(p: str) -> Array:
            n, d = z[p].shape
            columns = jax.vmap(lambda e: along({p: jnp.broadcast_to(e, (n, d))})[p])(jnp.eye(d))
            real = self._real(p, z, data)[:, None, None]
            return jnp.where(real, -jnp.moveaxis(columns, 0, -1), jnp.eye(d))

        g, rows = gradient(z), [p for p in z if p not in outer]
        blocks = {p: block(p) for p in rows}
        size = sum(z[p].size for p in outer)
        if not size:
            return Arrow(g, blocks, {}, jnp.zeros(0), jnp.zeros((0, 0))).of_rows()
        columns = jax.vmap(lambda e: along(_unpacked(e, z, outer)))(jnp.eye(size))
        real = [jnp.repeat(self._real(p, z, data), z[p].shape[1]) for p in outer]
        corner = -jnp.concatenate([columns[p].reshape(size, -1) for p in outer], 1)
        return Arrow(
            {p: g[p] for p in rows},
            blocks,
            {p: -jnp.moveaxis(columns[p], 0, -1) for p in rows},
            jnp.concatenate([g[p].ravel() for p in outer]),
            corner + jnp.diag(jnp.where(jnp.concatenate(real), 0.0, 1.0)),
        )


def _corner(arrow: Arrow) -> Array:
    """The precision of the latents of outer plates, those of the rows integrated out."""
    corner = arrow.outer
    for p, A in arrow.rows.items():
        inverse = _solved(jnp.linalg.cholesky(A), arrow.border[p])
        corner = corner - jnp.einsum("ndo,ndq->oq", arrow.border[p], inverse)
    return corner


def _newton(arrow: Arrow, z: Rows, *, positive: bool = False) -> tuple[Rows, Array]:
    """The step to the top of the parabola, and the log determinant of ``A``.

    ``positive`` turns what is concave upwards among the latents of outer plates around.
    """
    step, inverse = {}, {}
    log_det, corner, right = jnp.zeros(()), arrow.outer, arrow.g_outer
    for p, A in arrow.rows.items():
        L = jnp.linalg.cholesky(A)
        step[p] = _solved(L, arrow.g_rows[p][..., None])[..., 0]
        inverse[p] = _solved(L, arrow.border[p])
        corner = corner - jnp.einsum("ndo,ndq->oq", arrow.border[p], inverse[p])
        right = right - jnp.einsum("ndo,nd->o", arrow.border[p], step[p])
        log_det += 2 * jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)).sum()
    outer = [p for p in z if p not in arrow.rows]
    if not outer:
        return step, log_det
    L = jnp.linalg.cholesky(_positive(corner) if positive else corner)
    above = _solved(L, right[:, None])[:, 0]
    step = {p: own - inverse[p] @ above for p, own in step.items()}
    return {**step, **_unpacked(above, z, outer)}, log_det + 2 * jnp.log(jnp.diagonal(L)).sum()


def _promised(arrow: Arrow, step: Rows, outer: tuple[str, ...]) -> Array:
    """What a step promises to gain, twice, in the row where that is most."""
    rows = [jnp.sum(g * step[p], -1) for p, g in arrow.g_rows.items()]
    above = jnp.concatenate([jnp.zeros(0), *(step[p].ravel() for p in outer)])
    return jnp.concatenate([*rows, jnp.atleast_1d(arrow.g_outer @ above)]).max()


def _solved(L: Array, right: Array) -> Array:
    """``(L L')^{-1} right``, block by block."""
    half = solve_triangular(L, right, lower=True)
    return solve_triangular(jnp.swapaxes(L, -1, -2), half, lower=False)


def _unpacked(vector: Array, z: Rows, plates: tuple[str, ...] | list[str]) -> Rows:
    """One vector as the latents of some plates, one after the other."""
    parts, start = {}, 0
    for p in plates:
        parts[p] = vector[start : start + z[p].size].reshape(z[p].shape)
        start += z[p].size
    return parts


def _positive(A: Array) -> Array:
    """Symmetric blocks with the absolute values of their eigenvalues, none of them next to zero."""
    if A.shape[-1] == 1:
        size = jnp.where(jnp.isfinite(A), jnp.abs(A), 0.0)
        return jnp.maximum(size, jnp.maximum(FLAT * size.max(), jnp.finfo(A.dtype).tiny))
    A = jnp.where(jnp.isfinite(A), A, 0.0)
    values, vectors = jnp.linalg.eigh(0.5 * (A + jnp.swapaxes(A, -1, -2)))
    size = jnp.abs(values)
    size = jnp.maximum(size, jnp.maximum(FLAT * size.max(-1, keepdims=True), FLAT))
    return (vectors * size[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)
