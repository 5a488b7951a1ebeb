r"""A silo's log likelihood of the globals, its own latents integrated by Gauss-Hermite quadrature.

Rows are independent given the globals and the latents of an outer plate (a hospital above its
patients), so that each row is an integral of its own over one or two latents. With the conditional
mode :math:`\hat z_i` of row ``i``, the negative Hessian :math:`A_i = C_i C_i'` there, and the nodes
:math:`t_k` and weights :math:`w_k` of Gauss and Hermite in ``d`` dimensions,

.. math::
    \log p(y_i \mid z_G) \approx
    \log \sum_k w_k e^{|t_k|^2} p(y_i, \hat z_i + \sqrt2\, C_i^{-\top} t_k \mid z_G)
    + \tfrac d2 \log 2 - \log\det C_i .

This is adaptive quadrature (Pinheiro and Bates 1995; ``nAGQ`` of lme4). One node is Laplace's
method, and the sum is exact where the integrand is a normal density times a polynomial of degree
below ``2 K``.
Modes and curvatures only say where the nodes stand. They are constants under differentiation: the
derivatives of the sum are those of the integral, up to the quadrature's own error.

An outer plate's latents are integrated in the same tangent around the sum of what their rows say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.guides.laplace import EXACT, Laplace, LatentSearch, SearchEnd
from numpyro_fed.numerics import linalg
from numpyro_fed.text.log_density import FederatedModel
from numpyro_fed.text.site_table import Rows, Theta

NODES = 11  # in each dimension: 2e-4 nats off for four binary visits and an effect of sd 2.2
# Latents of an outer plate alone, such as one for a hospital, are few at a silo, and many rows say
# what each is: seven nodes are off by 1e-8 then, and by 5e-3 nats at most, as eleven are, for a
# hospital with 5 to 100 patients and no event.
NODES_OF_OUTER = 7
# The same for rows with two latents, those of an outer plate included. Their number is squared
# there; where it is too small, a correction's own check doubles it.
NODES_OF_PAIR = 7
# Settings of the search for the modes of a silo's latents. It runs at every draw of the globals, so
# it ends within one nat, and few step sizes are tried: the mode is a proposal, not the answer.
# Without a line search (full Newton steps) it overshot far from the guide, and likelihoods came out
# too small in the tail (docs/results/never_wrong.md).
NEARBY = LatentSearch(tolerance=1.0, steps=10, step_sizes=(1.0, 2.0**-2, 2.0**-4, 2.0**-7))
# Cells from which a row's latents are drawn, and how far they reach on both sides of its mode, in
# standard deviations by the curvature there. Of a normal conditional an even point of a cell makes
# the sd 0.15 % too large with one latent, and 0.6 % with two.
CELLS, REACH = 64, 6.0
CELLS_OF_PAIR, REACH_OF_PAIR = 24, 4.5
# Points in each dimension at which the rows below an outer plate are asked, few and then more. A
# polynomial through these serves for all cells where its terms of the highest degree are this
# small, in nats. What 10,000 binary rows say of their hospital differs from a cubic by 5e-4 nats or
# so, and what 20 say from a polynomial of degree 12 by 1e-4.
FEW_POINTS, SMALL_TERM = (5, 13), 1e-3
FARTHEST = 2.0  # decrement, in nats, at which a Newton step still leads close to a mode
# Differences of derivatives that count as none: of a row's own, and of the largest of all rows.
SAME, ROUNDING = 1e-2, 1e-4
SIDE_BY_SIDE = 100_000  # nodes of an outer plate times rows, at most, that are taken side by side
WIDEST = 2  # latents of a row, at most: the number of nodes grows as a power of it


def quadrature_misfit(fm: FederatedModel) -> str | None:
    """Return in words why quadrature cannot integrate a model's local latents; None if it can."""
    with_latents = [p for p in fm.plates if p.dim]
    outer = fm.outer_plates
    wide = [p for p in with_latents if p.dim > WIDEST]
    if not with_latents:
        return "no silo_plate has latents"
    if wide:
        return f"a row of '{wide[0].name}' has {wide[0].dim} latents, and {WIDEST} are the most"
    if len(outer) > 1:
        return f"'{outer[0]}' and '{outer[1]}' are both outer plates with latents"
    return None


def default_nodes(fm: FederatedModel) -> int:
    """Return the number of nodes in each dimension where none is chosen; 0 for no quadrature."""
    dims = [
        max([p.dim for p in fm.plates if p.name in plates], default=0)
        for plates in (fm.row_plates, fm.outer_plates)
    ]
    if sum(dims) > WIDEST or quadrature_misfit(fm) is not None:
        return 0
    if sum(dims) > 1:
        return NODES_OF_PAIR
    return NODES if dims[0] else NODES_OF_OUTER


def silo_integral(
    fm: FederatedModel,
) -> Callable[[Theta, Array, SiloData, Rows], tuple[Array, Rows]]:
    """Return ``(theta, z_G, data, start) -> (value, modes)``, by quadrature or by Laplace."""
    nodes = default_nodes(fm)
    if not nodes:
        return Laplace(fm).differentiable
    return RowIntegrals(fm, nodes, NEARBY, few_places=True).log_likelihood


def hermite(nodes: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the nodes (K, dim) in ``dim`` dimensions, and :math:`\log w_k + |t_k|^2` (K,)."""
    t, w = np.polynomial.hermite.hermgauss(nodes)
    grid = np.stack(np.meshgrid(*[t] * dim, indexing="ij"), -1).reshape(-1, dim)
    log_w = np.stack(np.meshgrid(*[np.log(w)] * dim, indexing="ij"), -1).reshape(-1, dim)
    return grid, log_w.sum(1) + (grid**2).sum(1)


@dataclass(frozen=True)
class RowIntegrals:
    """The integrals over the latents of a silo's rows, below one outer plate at most.

    There are ``nodes`` in each dimension. ``search`` is how conditional modes are found: they only
    place the nodes, after one more step of Newton's method. With ``few_places`` the integrals are
    evaluated at a few places, so that compiling counts: nodes of an outer plate are then taken side
    by side. A loop over them has less in memory, and its second derivatives take half as long again
    to compile.
    """

    model: FederatedModel
    nodes: int = NODES
    search: LatentSearch = EXACT
    few_places: bool = False

    def log_likelihood(
        self, theta: Theta, z_G: Array, data: SiloData, start: Rows
    ) -> tuple[Array, Rows]:
        """Return the log likelihood, NaN where no mode is near, and the conditional modes."""
        near = self.near(theta, z_G, data, start)
        value = self.at(theta, z_G, near, data)
        reached = (near.decrement <= FARTHEST) & jnp.isfinite(value)
        return jnp.where(reached, value, jnp.nan), near.modes

    def near(self, theta: Theta, z_G: Array, data: SiloData, start: Rows) -> SearchEnd:
        """Return where the nodes stand: close to the conditional modes, held constant."""
        return Laplace(self.model).search(*stop_gradient((theta, z_G)), data, start, self.search)

    def at(self, theta: Theta, z_G: Array, near: SearchEnd, data: SiloData) -> Array:
        """Return the log likelihood () by nodes that stand ``near`` the conditional modes."""
        outer = Laplace(self.model).outer_plates
        if not outer:
            return data.total(self._terms(theta, z_G, {}, near, data))
        mode, root, terms = self._outer_integrand(theta, z_G, near, data)
        d = mode.shape[1]
        t, log_w = (jnp.asarray(a, mode.dtype) for a in hermite(self.nodes, d))

        def at(node: Array) -> Array:
            own, below = terms(mode + jnp.sqrt(2.0) * (root @ node))
            return own + below

        rows = sum(self.model.sizes(data).values())
        few = self.few_places and rows * len(t) <= SIDE_BY_SIDE
        each = jax.vmap(at)(t) if few else jax.lax.map(at, t)
        log_det = jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)).sum(-1)
        value = jax.nn.logsumexp(each + log_w[:, None], 0) + 0.5 * d * jnp.log(2.0) + log_det
        return data.masked(outer[0], value).sum()

    def sample(self, key: Array, theta: Theta, z_G: Array, near: SearchEnd, data: SiloData) -> Rows:
        """Return a draw of all latents given the globals, {plate: (rows, dim)}.

        Around each row's mode, :data:`REACH` standard deviations of its curvature on both sides
        are cut into cells. A cell is drawn by the density at its middle, and a point of it evenly.
        """
        key_outer, key_rows = jax.random.split(key)
        drawn = self._drawn_outer(key_outer, theta, z_G, near, data)
        return self._with_drawn_rows(key_rows, theta, z_G, drawn, near, data)

    def _with_drawn_rows(
        self, key: Array, theta: Theta, z_G: Array, outer: Rows, near: SearchEnd, data: SiloData
    ) -> Rows:
        """Return latents of outer plates with a draw of those of rows."""
        drawn, latents = dict(outer), {**near.z, **outer}
        for i, (plate, (mode, precision)) in enumerate(
            self._places(theta, z_G, outer, near, data).items()
        ):
            cells, width = _cells(mode.shape[1])
            root = linalg.cholesky(precision)
            steps = jnp.broadcast_to(cells.T, (*mode.shape, len(cells)))
            steps = jnp.moveaxis(linalg.solve(root, steps, transposed=True), -1, 0)
            z = {p: jnp.broadcast_to(a, (len(cells), *a.shape)) for p, a in latents.items()}
            z[plate] = mode + steps
            log_p = jax.vmap(lambda z, p=plate: self.model.log_grouped(theta, z_G, z, data)[p])(z)
            cell = _drawn_cell(jax.random.fold_in(key, i), log_p, cells, width)
            drawn[plate] = mode + linalg.solve(root, cell[..., None], transposed=True)[..., 0]
        return drawn

    def log_rows(
        self, key: Array, theta: Theta, z_G: Array, near: SearchEnd, data: SiloData
    ) -> Rows:
        """Return each row's log likelihood, {plate: (rows,)}, at a draw of latents that rows share.

        Those are the latents of outer plates, and of rows to which others belong.
        """
        key_outer, key_rows = jax.random.split(key)
        outer, below = self._drawn_outer(key_outer, theta, z_G, near, data), self.model.below
        terms = self._terms(theta, z_G, outer, near, data)
        found = {p: rows for p, rows in terms.items() if p not in (*outer, *below.values())}
        if below:
            z = self._with_drawn_rows(key_rows, theta, z_G, outer, near, data)
            rows = self.model.log_silo(theta, z_G, z, data)
            found |= {p: rows[p] for p in below}
        return found

    def _drawn_outer(
        self, key: Array, theta: Theta, z_G: Array, near: SearchEnd, data: SiloData
    ) -> Rows:
        """Return a draw of the outer plate's latents given the globals, if there is one.

        Cells differ by the outer plate's own density, and by what the rows below say. Many rows say
        nearly a cubic, and then a few points tell it at all cells. Loops of no steps are what is
        not needed: a condition would take both ways where draws are side by side.
        """
        outer = Laplace(self.model).outer_plates
        if not outer:
            return {}
        mode, root, terms = self._outer_integrand(theta, z_G, near, data)
        cells, width = _cells(mode.shape[1])

        def below(places: np.ndarray, known: Array) -> Array:
            """Return what rows say at places (M, d), (M, n), unless it is known."""
            return jax.lax.fori_loop(
                jnp.where(known, len(places), 0),
                len(places),
                lambda i, found: found.at[i].set(terms(mode + root @ jnp.asarray(places)[i])[1]),
                jnp.zeros((len(places), len(mode)), mode.dtype),
            )

        known, log_p = jnp.array(False), jnp.zeros((len(cells), len(mode)), mode.dtype)
        for number in FEW_POINTS:
            points, to_cells, highest = _polynomial(number, mode.shape[1])
            at_points = below(points, known)
            log_p = jnp.where(known, log_p, to_cells @ at_points)
            allowed = SMALL_TERM + jnp.finfo(mode.dtype).eps * jnp.abs(at_points).max()
            known |= (jnp.abs(highest @ at_points) < allowed).all()
        log_p = jnp.where(known, log_p, below(cells, known))
        log_p += jax.lax.map(lambda cell: terms(mode + root @ cell)[0], cells)
        cell = _drawn_cell(key, log_p, cells, width)
        return {outer[0]: mode + (root @ cell[..., None])[..., 0]}

    def _outer_integrand(
        self, theta: Theta, z_G: Array, near: SearchEnd, data: SiloData
    ) -> tuple[Array, Array, Callable[[Array], tuple[Array, Array]]]:
        """Return mode and root of each row of the outer plate, and what is integrated over it.

        There must be an outer plate. Mode (n, d) and root (n, d, d), of the covariance, are of its
        rows. The third returns two log densities (n,) at latents (n, d): the outer plate's own, and
        that of the rows below. Where a row reads several rows of the outer plate, these have no
        integrals of their own, and both are NaN.
        """
        laplace = Laplace(self.model)
        (plate,) = laplace.outer_plates
        mode, covariance = laplace.outer_at(near.modes, near.arrow)[plate]
        n, d = mode.shape
        own = jnp.arange(n * d).reshape(n, d)
        # Each row of the outer plate has its own block; what ties these rows is in the terms.
        root = linalg.cholesky(covariance[own[:, :, None], own[:, None, :]])
        member, apart = self._members(theta, z_G, near.z, data, plate)

        def terms(z: Array) -> tuple[Array, Array]:
            found = self._terms(theta, z_G, {plate: z}, near, data)
            below = [
                # A scatter takes each row by itself.
                rows.sum(keepdims=True) if n == 1 else jax.ops.segment_sum(rows, member[p], n)
                for p, rows in found.items()
                if p != plate
            ]
            own_and_below = found[plate], sum(below, jnp.zeros(n))
            return jax.tree.map(lambda a: jnp.where(apart, a, jnp.nan), own_and_below)

        return mode, root, terms

    def _terms(
        self, theta: Theta, z_G: Array, z_outer: Rows, near: SearchEnd, data: SiloData
    ) -> Rows:
        """Return the log likelihood of each row, and of the outer plate the log density."""
        latents = {**near.z, **z_outer}
        terms = self.model.log_grouped(theta, z_G, latents, data)
        for plate, (mode, precision) in self._places(theta, z_G, z_outer, near, data).items():
            d = mode.shape[1]
            root = linalg.cholesky(precision)
            t, log_w = (jnp.asarray(a, mode.dtype) for a in hermite(self.nodes, d))
            nodes = jnp.broadcast_to(t.T, (*mode.shape, len(t)))
            steps = jnp.sqrt(2.0) * linalg.solve(root, nodes, transposed=True)  # (rows, d, K)
            log_p = jax.vmap(
                lambda step, p=plate, mode=mode: self.model.log_grouped(
                    theta, z_G, {**latents, p: mode + step}, data
                )[p]
            )(jnp.moveaxis(steps, -1, 0))
            each = log_p + log_w[:, None]
            log_det = jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)).sum(-1)
            value = jax.nn.logsumexp(each, 0) + 0.5 * d * jnp.log(2.0) - log_det
            terms[plate] = data.masked(plate, value)
        return terms

    def _places(
        self, theta: Theta, z_G: Array, z_outer: Rows, near: SearchEnd, data: SiloData
    ) -> dict[str, tuple[Array, Array]]:
        """Return modes (n, d) and precisions (n, d, d) of rows given the outer plate's latents."""
        if z_outer and near.arrow.rows:
            fixed = stop_gradient((theta, z_G))
            start = {**near.z, **stop_gradient(z_outer)}
            laplace = Laplace(self.model)
            near = laplace.search(*fixed, data, start, self.search, fix_outer=True)
        return {p: (near.modes[p], precision) for p, precision in near.arrow.rows.items()}

    def _members(
        self, theta: Theta, z_G: Array, modes: Rows, data: SiloData, outer: str
    ) -> tuple[dict[str, Array], Array]:
        """Return which row of the outer plate each row of the others reads, {plate: (rows,)}.

        And whether () each reads one at most, and a row of the outer plate none but itself. A row's
        log density moves with the latents that it reads alone. Along tangents of ``1``, ``i`` and
        ``i^2`` at the outer plate's row ``i``, its derivatives are in the ratio of ``1``, ``i`` and
        ``i^2``; those of a row that reads ``i`` and ``k`` are not.
        """
        fm, sizes = self.model, self.model.sizes(data)
        n, d = modes[outer].shape
        others = [p.name for p in fm.plates if p.name != outer and p.name not in fm.below]
        if n == 1:
            return {p: jnp.zeros(sizes[p], int) for p in others}, jnp.array(True)
        index = jnp.arange(1.0, n + 1)
        # Away from the modes, where derivatives may vanish by chance.
        point = jax.tree.map(
            lambda z: z + 0.5 + 0.1 * jnp.cos(jnp.arange(z.size)).reshape(z.shape), modes
        )
        powers = jnp.stack([jnp.ones(n), index, index**2])
        tangents = powers[:, None, :, None] * jnp.eye(d)[:, None, :]  # (3, d, n, d)

        def rows(z: Array) -> Rows:
            terms = fm.log_grouped(theta, z_G, {**point, outer: z}, data)
            return {p: data.masked(p, terms[p]) for p in (*others, outer)}

        along = jax.vmap(lambda tangent: jax.jvp(rows, (point[outer],), (tangent,))[1])
        slopes = jax.vmap(along)(tangents)
        members, apart = {}, jnp.array(True)
        for p, (one, first, second) in stop_gradient(slopes).items():  # (d, rows) each
            steepest = jnp.abs(one).argmax(0)[None]
            top, ratio = (jnp.take_along_axis(s, steepest, 0)[0] for s in (one, first))
            ratio = jnp.where(top == 0, 1.0, ratio / top)
            at = index if p == outer else jnp.clip(jnp.round(ratio), 1, n)
            members[p] = at.astype(int) - 1
            # Derivatives that nearly vanish are known less well, and matter as little.
            scale = jnp.maximum(jnp.abs(one).max(), jnp.abs(first).max() / n)
            off = jnp.maximum(jnp.abs(first - at * one) * at, jnp.abs(second - at**2 * one))
            apart &= (off <= at**2 * (SAME * jnp.abs(top) + ROUNDING * scale)).all()
        members.pop(outer)
        return members, apart


def _cells(dim: int) -> tuple[np.ndarray, float]:
    """Return the middles (M, dim) of the cells of a draw, in sds, and their width."""
    number, reach = (CELLS, REACH) if dim == 1 else (CELLS_OF_PAIR, REACH_OF_PAIR)
    width = 2 * reach / number
    middles = -reach + width * (np.arange(number) + 0.5)
    grid = np.stack(np.meshgrid(*[middles] * dim, indexing="ij"), -1)
    return grid.reshape(-1, dim), width


def _polynomial(number: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points (P, dim) of a polynomial, in sds, and two matrices for values there (P,).

    There are ``number`` in each dimension. The first matrix makes of them values at all
    :func:`_cells`, by the polynomial through the points. The second makes those coefficients, in
    Chebyshev's basis, that have the highest degree.
    """
    degree, (cells, _) = number - 1, _cells(dim)
    reach, basis = REACH if dim == 1 else REACH_OF_PAIR, np.polynomial.chebyshev.chebvander
    points = -np.cos(np.pi * np.arange(number) / degree)
    fit = np.linalg.inv(basis(points, degree))
    to_cells, to_coefficients = np.ones((len(cells), 1)), np.ones((1, 1))
    for x in cells.T / reach:  # a factor for each dimension; the last one moves fastest
        factor = basis(x, degree) @ fit
        to_cells = (to_cells[:, :, None] * factor[:, None, :]).reshape(len(cells), -1)
        to_coefficients = np.kron(to_coefficients, fit)
    degrees = np.indices((number,) * dim).max(0).ravel()
    grid = np.stack(np.meshgrid(*[points] * dim, indexing="ij"), -1).reshape(-1, dim)
    return reach * grid, to_cells, to_coefficients[degrees == degree]


def _drawn_cell(key: Array, log_p: Array, cells: np.ndarray, width: float) -> Array:
    """Return a point (rows, dim) for each row, from cells with log densities (M, rows)."""
    key_cell, key_point = jax.random.split(key)
    # Rows first: padded rows, which come last, then change no other number.
    chosen = jnp.asarray(cells)[jax.random.categorical(key_cell, log_p.T, axis=1)]
    return chosen + width * (jax.random.uniform(key_point, chosen.shape) - 0.5)
