r"""A silo's log likelihood of the globals, with its own latents integrated by Laplace's method.

With :math:`f(z_L) = \log p(y_j, z_L \mid z_G)`, its mode :math:`\hat z_L` among :math:`D` latents
and :math:`A = -\nabla^2 f(\hat z_L)`,

.. math::
    \log p(y_j \mid z_G) \approx f(\hat z_L) + \tfrac{D}{2} \log 2 \pi - \tfrac12 \log \det A.

Rows are independent given the globals and the latents of outer plates (a hospital above its
patients). So ``A`` is an arrow matrix: a block for each row, and a border for the latents above the
rows. It is solved block by block, as TMB (Kristensen et al. 2016) and INLA (Rue, Martino and Chopin
2009) do it for pooled data. :mod:`numpyro_fed.text.site_table` rounds kinks of densities off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.numerics import linalg
from numpyro_fed.numerics.gaussian import LOG_2PI, Curvature, symmetric
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

START = 1e-2  # the first modes are searched from here: at zero some densities have a kink
MAX_STEPS = 50  # of Newton's method: a bound on the work at a point where rows have no mode
STEP_SIZES = tuple(2.0**-i for i in range(10))  # all are tried side by side, the best is taken
# Largest Newton decrement, in nats, of a point that counts as a mode. The approximation is off by
# about as much as the decrement, and 0.01 nat changes no posterior.
MAX_DECREMENT = 1e-2
TOLERANCE = 1e-6  # the decrement, in nats, at which the search ends; a last step follows (`modes`)
FLAT = 1e-6  # least curvature of a direction, as a share of the largest of its block


@dataclass(frozen=True)
class LatentSearch:
    """The settings of a search for the modes of a silo's latents, by default an exact one.

    It ends where the Newton decrement is at most ``tolerance`` nats, or after so many ``steps``.
    ``step_sizes`` are the shares of each step that are tried. With ``apart``, where no latents are
    above the rows, each row's search ends by itself: what a row holds changes no other row's mode,
    whether it is slow or has none.
    """

    tolerance: float = TOLERANCE
    steps: int = MAX_STEPS
    step_sizes: tuple[float, ...] = STEP_SIZES
    apart: bool = False


EXACT = LatentSearch()


class Arrow(NamedTuple):
    """The gradient and the negative Hessian of a silo's log density in its locals.

    ``g`` {plate: (n, d)} is the gradient, of rows and outer plates, and ``rows`` {plate: (n, d, d)}
    a block for each row. ``border`` {plate: (n, d, o)} has second derivatives between a row and the
    ``o`` latents of all outer plates, ``corner`` (o, o) those among the latter.
    """

    g: Rows
    rows: Rows
    border: Rows
    corner: Array

    def of_rows(self) -> Arrow:
        """Return the arrow without border and corner: outer latents are fixed."""
        g = {p: self.g[p] for p in self.rows}
        border = {p: jnp.zeros((*a.shape, 0)) for p, a in g.items()}
        return Arrow(g, self.rows, border, jnp.zeros((0, 0)))


class Factor(NamedTuple):
    """Cholesky factors of an arrow's blocks, and of the Schur complement of the rows in its corner.

    ``inverse`` (n, d, o) is the inverse of each row's block times its border.
    """

    rows: Rows
    border: Rows
    inverse: Rows
    corner: Array

    @classmethod
    def of(cls, arrow: Arrow, *, positive: bool = False) -> Factor:
        """Return the factors; with ``positive``, the corner's eigenvalues by absolute value."""
        rows = jax.tree.map(linalg.cholesky, arrow.rows)
        inverse = {p: linalg.cholesky_solve(L, arrow.border[p]) for p, L in rows.items()}
        corner = arrow.corner
        for p, B in arrow.border.items():
            corner = corner - jnp.einsum("ndo,ndq->oq", B, inverse[p])
        corner = _positive(corner) if positive and len(corner) else corner
        return cls(rows, arrow.border, inverse, linalg.cholesky(corner))

    def solve(self, g: Rows) -> Rows:
        """Return the inverse of the arrow times ``g``, by plate, for rows and outer plates."""
        # The outer plates, in the order in which their latents are packed.
        outer_plates = sorted(g.keys() - self.rows.keys())
        row_solutions = {
            p: linalg.cholesky_solve(L, g[p][..., None])[..., 0] for p, L in self.rows.items()
        }
        if not outer_plates:
            return row_solutions
        right = jnp.concatenate([g[p].ravel() for p in outer_plates])
        for p, B in self.border.items():
            right = right - jnp.einsum("ndo,nd->o", B, row_solutions[p])
        above = linalg.cholesky_solve(self.corner, right[:, None])[:, 0]
        row_solutions = {p: a - self.inverse[p] @ above for p, a in row_solutions.items()}
        return {**row_solutions, **_unpacked(above, g, outer_plates)}


class SearchEnd(NamedTuple):
    """The locals at the end of a search for their modes, with the derivatives there.

    ``z`` {plate: (n, d)} are close to their modes, and ``step`` leads to these for all latents that
    are not held fixed. ``decrement`` () is the largest Newton decrement, twice the nats that the
    step promises; NaN where there is no step.
    """

    z: Rows
    arrow: Arrow
    step: Rows
    decrement: Array

    @property
    def modes(self) -> Rows:
        """Return the locals after the step, which doubles the number of correct digits.

        A row that has no step stays, and so do latents of outer plates where some row has none.
        """
        steps = {p: jnp.where(jnp.isfinite(step), step, 0.0) for p, step in self.step.items()}
        return {**self.z, **{p: self.z[p] + step for p, step in steps.items()}}

    def rows_to_move(self, tolerance: float, *, apart: bool) -> Rows:
        """Return which rows a search goes on with, {plate: (n,)}: all, or those ``apart``."""
        finite = {p: jnp.isfinite(self.arrow.g[p]).all(-1) for p in self.step}
        if apart:
            gain = {p: jnp.sum(self.arrow.g[p] * step, -1) for p, step in self.step.items()}
            return {p: finite[p] & ~((gain[p] >= 0) & (gain[p] <= tolerance)) for p in gain}
        stops = jnp.stack([~a.all() for a in finite.values()]).any()
        stops |= (self.decrement >= 0) & (self.decrement <= tolerance)
        return {p: jnp.broadcast_to(~stops, a.shape) for p, a in finite.items()}


@dataclass(frozen=True)
class Laplace:
    """Laplace's method for the local latents of one model, as pure functions of a silo's data."""

    model: FederatedModel

    def start(self, data: SiloData) -> Rows:
        """Return locals close to zero, {plate: (rows, dim)}."""
        sizes = self.model.sizes(data)
        shapes = {p.name: (sizes[p.name], p.dim) for p in self.model.plates if p.dim}
        return {name: jnp.full(shape, START) for name, shape in shapes.items()}

    def differentiable(
        self, theta: Theta, z_G: Array, data: SiloData, start: Rows
    ) -> tuple[Array, Rows]:
        r"""Return the log likelihood (), and the modes of the locals.

        It has derivatives up to the second in ``theta`` and ``z_G``, together ``x``. The modes and
        the factors of ``A`` are found once, and held fixed: no derivative goes through the search.
        With the step
        :math:`z(x) = \hat z + A^{-1} \partial_z f(x, \hat z)` and
        :math:`w = A^{-1} \partial_z \log \det A`,

        .. math::
            f(x, z(x)) - \tfrac12 \log \det A(x, z(x)) - \tfrac12 w' (\partial_z f)(x, z(x))

        has the same value and the same first two derivatives as Laplace's method at the modes of
        each ``x``. ``z(x)`` agrees with these modes to first order. The second-order difference
        enters by the last two terms, where it cancels.
        """
        if not start:
            return self._total(theta, z_G, start, data), start
        fixed = jax.lax.stop_gradient((theta, z_G))
        z = self.search(*fixed, data, start).modes
        at_mode = self._arrow(*fixed, z, data)
        factor = Factor.of(at_mode)
        w = factor.solve(jax.grad(lambda z: _log_det(self._arrow(*fixed, z, data)))(z))
        step = factor.solve(jax.grad(self._total, 2)(theta, z_G, z, data))
        moving = jax.tree.map(jnp.add, z, step)
        arrow = self._arrow(theta, z_G, moving, data)
        correction = sum(jnp.vdot(w[p], g) for p, g in arrow.g.items())
        # Laplace's method off the mode is finite and wrong; NaN makes the caller's step a failed
        # one.
        at_rest = _newton_decrement(at_mode, factor.solve(at_mode.g)) < MAX_DECREMENT
        log_det = jnp.where(at_rest, _log_det(arrow), jnp.nan)
        total = self._total(theta, z_G, moving, data) - 0.5 * correction
        number = sum(jnp.sum(self._real(p, z, data)) * z[p].shape[1] for p in z)
        return total + 0.5 * (number * LOG_2PI - log_det), z

    def outer_given(
        self, theta: Theta, z_G: Array, z: Rows, data: SiloData
    ) -> dict[str, tuple[Array, Array]]:
        """Return mode (n, d) and covariance of each outer plate; ``z`` is near."""
        z = self.near(theta, z_G, z, data).modes
        return self.outer_at(z, self._arrow(theta, z_G, z, data))

    def outer_at(self, z: Rows, arrow: Arrow) -> dict[str, tuple[Array, Array]]:
        """Return each outer plate's latents, and their covariance by these derivatives."""
        factor = Factor.of(arrow)
        covariance = linalg.cholesky_solve(factor.corner, jnp.eye(len(factor.corner)))
        found, start = {}, 0
        for p in sorted(self.outer_plates):
            place = slice(start, start := start + z[p].size)
            found[p] = z[p], covariance[place, place]
        return found

    def rows_given(
        self, theta: Theta, z_G: Array, outer: Array, z: Rows, data: SiloData
    ) -> dict[str, tuple[Array, Array]]:
        """Return modes (n, d) and precisions (n, d, d) of rows given the outer latents."""
        z = {**z, **_unpacked(outer, z, self.outer_plates)}
        z = self.near(theta, z_G, z, data, fix_outer=True).modes
        arrow = self._arrow(theta, z_G, z, data)
        return {p: (z[p], A) for p, A in arrow.rows.items()}

    def near(
        self, theta: Theta, z_G: Array, z: Rows, data: SiloData, *, fix_outer: bool = False
    ) -> SearchEnd:
        """Return locals with their derivatives and Newton's step, of all or of rows alone."""
        arrow = self._arrow(theta, z_G, z, data)
        arrow = arrow.of_rows() if fix_outer else arrow
        step = Factor.of(arrow).solve(arrow.g)
        return SearchEnd(z, arrow, step, _newton_decrement(arrow, step))

    def search(
        self,
        theta: Theta,
        z_G: Array,
        data: SiloData,
        start: Rows,
        settings: LatentSearch = EXACT,
        *,
        fix_outer: bool = False,
    ) -> SearchEnd:
        """Return locals close to their modes, by Newton's method with a line search.

        No row's log density decreases. With ``fix_outer`` the latents of outer plates stay as they
        are in ``start``.
        """
        tolerance, apart = settings.tolerance, settings.apart
        if apart and self.outer_plates:
            raise ValueError("rows below the latents of an outer plate have no modes of their own.")

        def step(carry: tuple[Array, SearchEnd]) -> tuple[Array, SearchEnd]:
            i, near = carry
            uphill = near.arrow._replace(rows=jax.tree.map(_positive, near.arrow.rows))
            # Away from the mode a block may be indefinite. With absolute eigenvalues the direction
            # leads uphill all the same (Dauphin et al. 2014).
            direction = Factor.of(uphill, positive=True).solve(near.arrow.g)
            direction = {**jax.tree.map(jnp.zeros_like, near.z), **direction}
            # A size of zero is always among those tried: a row that no step improves stays.
            sizes = jnp.array([*settings.step_sizes, 0.0])
            terms = jax.lax.map(
                lambda size: self.model.smoothed.log_grouped(
                    theta,
                    z_G,
                    jax.tree.map(lambda a, b: a + size * b, near.z, direction),
                    data,
                ),
                sizes,
            )
            # The best size is chosen for each row, or for all rows together. Rows choose each for
            # itself only where nothing above them moves: their terms are then independent.
            z = dict(near.z)
            if self.outer_plates and not fix_outer:
                total = sum(t.sum(1) for t in terms.values())
                best = sizes[jnp.argmax(jnp.where(jnp.isnan(total), -jnp.inf, total))]
                z = jax.tree.map(lambda a, b: a + best * b, near.z, direction)
            else:
                for p in [p for p in z if p not in self.outer_plates]:
                    values = jnp.where(jnp.isnan(terms[p]), -jnp.inf, terms[p])
                    z[p] = z[p] + sizes[jnp.argmax(values, 0)][:, None] * direction[p]
                z = jax.tree.map(lambda a, old: jnp.where(jnp.isfinite(a), a, old), z, near.z)
            if apart:
                on = near.rows_to_move(tolerance, apart=True)
                z = {p: jnp.where(on[p][:, None], z[p], near.z[p]) for p in z}
            return i + 1, self.near(theta, z_G, z, data, fix_outer=fix_outer)

        def goes_on(carry: tuple[Array, SearchEnd]) -> Array:
            i, near = carry
            on = near.rows_to_move(tolerance, apart=apart)
            return (i < settings.steps) & jnp.stack([rows.any() for rows in on.values()]).any()

        first = self.near(theta, z_G, start, data, fix_outer=fix_outer)
        if not first.step:
            return first
        return jax.lax.while_loop(goes_on, step, (jnp.zeros((), jnp.int32), first))[1]

    @property
    def outer_plates(self) -> tuple[str, ...]:
        return self.model.outer_plates

    def _total(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Array:
        terms = self.model.smoothed.log_grouped(theta, z_G, z, data)
        return sum((rows.sum() for rows in terms.values()), jnp.zeros(()))

    def _real(self, plate: str, z: Rows, data: SiloData) -> Array:
        return data.masks.get(plate, jnp.ones(len(z[plate]), bool))

    def _arrow(self, theta: Theta, z_G: Array, z: Rows, data: SiloData) -> Arrow:
        """Return first and second derivatives in the locals."""
        # Padded rows have a gradient of zero and a curvature of one: their steps are zero, and
        # their log determinants add nothing.
        zeros, outer = jax.tree.map(jnp.zeros_like, z), sorted(self.outer_plates)
        gradient = jax.grad(lambda z: self._total(theta, z_G, z, data))

        def times_hessian(direction: Rows) -> Rows:
            return jax.jvp(gradient, (z,), ({**zeros, **direction},))[1]

        g, rows, blocks = gradient(z), [p for p in z if p not in outer], {}
        for p in rows:
            # Rows do not interact, so one product with the Hessian along coordinate ``e`` of all
            # rows at once gives that column of every row's block: d products, whatever the number
            # of rows.
            d = z[p].shape[1]
            columns = jax.vmap(
                lambda e, p=p: times_hessian({p: jnp.broadcast_to(e, z[p].shape)})[p]
            )(jnp.eye(d))
            real_row = self._real(p, z, data)[:, None, None]
            blocks[p] = jnp.where(real_row, -jnp.moveaxis(columns, 0, -1), jnp.eye(d))
        size = sum(z[p].size for p in outer)
        if not size:
            return Arrow(g, blocks, {}, jnp.zeros((0, 0))).of_rows()
        across = jax.vmap(lambda e: times_hessian(_unpacked(e, z, outer)))(jnp.eye(size))
        real = [jnp.repeat(self._real(p, z, data), z[p].shape[1]) for p in outer]
        corner = -jnp.concatenate([across[p].reshape(size, -1) for p in outer], 1)
        corner = corner + jnp.diag(jnp.where(jnp.concatenate(real), 0.0, 1.0))
        return Arrow(g, blocks, {p: -jnp.moveaxis(across[p], 0, -1) for p in rows}, corner)


def _log_det(arrow: Arrow) -> Array:
    r"""Return the log determinant of an arrow, with derivatives up to the second.

    Of blocks :math:`A = A_0 + \Delta` the value :math:`A_0` is held fixed, with ``P`` its inverse,
    so that :math:`\Delta` is zero and only its derivatives count. The series

    :math:`A^{-1} = P - P \Delta P + P \Delta P \Delta P` and
    :math:`\log\det A = \log\det A_0 + \mathrm{tr} P \Delta - \tfrac12 \mathrm{tr} (P \Delta)^2`
    have the derivatives of inverse and log determinant up to the second, for the cost of products
    of matrices. Differentiating a Cholesky factor twice takes twice as long for a row with twenty
    latents.
    """

    def series(A: Array) -> tuple[Array, Array, Array]:
        fixed = jax.lax.stop_gradient(A)
        L, delta = linalg.cholesky(fixed), A - fixed
        P = linalg.cholesky_solve(L, jnp.broadcast_to(jnp.eye(A.shape[-1]), A.shape))
        E = P @ delta
        first = jnp.trace(E, axis1=-2, axis2=-1).sum()
        at_fixed = 2 * jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)).sum()
        return at_fixed + first - 0.5 * (E * jnp.swapaxes(E, -1, -2)).sum(), P, delta

    corner, found = arrow.corner, jnp.zeros(())
    for p, A in arrow.rows.items():
        log_det, P, delta = series(A)
        found += log_det
        if len(corner):
            B = arrow.border[p]
            first = P @ B
            second = P @ (delta @ first)
            solved = first - second + P @ (delta @ second)
            corner = corner - jnp.einsum("ndo,ndq->oq", B, solved)
    return found + series(corner)[0] if len(corner) else found


def _newton_decrement(arrow: Arrow, step: Rows) -> Array:
    """Return the largest decrement g' A^-1 g of any row, and of all outer latents together."""
    rows = [jnp.sum(arrow.g[p] * step[p], -1) for p in arrow.rows]
    outer = sorted(arrow.g.keys() - arrow.rows.keys())
    above = sum((jnp.vdot(arrow.g[p], step[p]) for p in outer), jnp.zeros(()))
    return jnp.concatenate([*rows, above[None]]).max()


def _unpacked(vector: Array, z: Rows, plates: tuple[str, ...] | list[str]) -> Rows:
    """Return the latents of ``plates`` from one vector; ``z`` has their shapes."""
    parts, start = {}, 0
    for p in plates:
        parts[p] = vector[start : start + z[p].size].reshape(z[p].shape)
        start += z[p].size
    return parts


def _positive(A: Array) -> Array:
    """Return symmetric blocks (..., d, d) with absolute eigenvalues, none of them near zero."""
    # One latent in a row is the common case: no eigendecomposition of a thousand 1 x 1 matrices.
    if A.shape[-1] == 1:
        size = jnp.where(jnp.isfinite(A), jnp.abs(A), 0.0)
        return jnp.maximum(size, jnp.maximum(FLAT * size.max(), jnp.finfo(A.dtype).tiny))
    A = symmetric(jnp.where(jnp.isfinite(A), A, 0.0))
    return Curvature.of(A, jnp.ones(A.shape[:-1])).positive(FLAT).matrix()
