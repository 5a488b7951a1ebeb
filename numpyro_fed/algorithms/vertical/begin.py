r"""The start of a vertical run: each party's curvature, and the dependence between parties.

In coordinates in which each party's own curvature is one, the curvature of the joint density is

.. math::
    P = \sum_p T_p' (-\nabla^2 \log p_p) T_p
    + \Big(\sum_p J_p T_p\Big)' \mathrm{diag}(h) \Big(\sum_p J_p T_p\Big),

with ``T_p`` a root of the party's own covariance and ``J_p`` the Jacobian of its predictor. Along
directions of small curvature, changes of one party are compensated by others. They are found by a
locally optimal block method (Knyazev 2001):

1. every party holds its rows of a random basis, and sends the change of its predictor along each
   basis vector; the server receives the sum over parties;
2. the server solves the small eigenvalue problem, and sends the combinations of the basis;
3. where the basis does not span all directions, residuals become its other half. For these the
   server sends the change of the likelihood's slope along each direction. A client can infer from
   it which columns the others' predictors span.

With eigenvalues :math:`\lambda` and eigenvectors ``U``, the joint covariance is
:math:`\tau T (I + V V') T'` with :math:`V = U\, \mathrm{diag}(\sqrt{1 / (\tau \lambda) - 1})`.
``tau`` is one over the largest eigenvalue if all are known, and one otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed import linalg
from numpyro_fed.algorithms.base import Ask, Exchange, Info, Reply, Round, key_as_noise
from numpyro_fed.algorithms.vertical.base import ClientState, PartyStart, ServerState, Vertical
from numpyro_fed.algorithms.vertical.curvature import Local, at_point, mode_of, root_of
from numpyro_fed.algorithms.vertical.search import (
    Basis,
    Client,
    RitzValues,
    Server,
    SlopeMessage,
    Spread,
    client_functions,
    server_density,
    slope_message,
)
from numpyro_fed.gaussian import Curvature
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

# Exchanges for the basis: if it spans all directions, and if not. A complete basis needs one, and
# two more refine the Rayleigh quotients; the block method converges over several.
COMPLETE, OTHERWISE = 3, 10
PARALLEL = 1e-5  # relative Gram eigenvalue below which basis vectors count as dependent
SPREAD = "spread"  # the name of the exchange
SPARE = 5  # columns of a basis beyond all directions: square random ones may be nearly singular


class Down(NamedTuple):
    """A message of the server: the slope at the best point, and its findings on the basis."""

    at_best: SlopeMessage
    ritz: RitzValues


class Along(NamedTuple):
    """A client's message on its basis vectors.

    ``predictor`` (width, rows, ...) is the change of its predictor along each. ``gram`` and ``own``
    (width, width) are the products of its rows, and its own curvature. ``slope`` (width,) is its
    own slope, and ``anchor`` (width, rank) the products with its rows of the anchor.
    """

    predictor: Array
    gram: Array
    own: Array
    slope: Array
    anchor: Array


class CouplingInGuide(NamedTuple):
    """A message of the server at the start of a run.

    It has the slope at the best point, ``combine`` (width, rank), which makes the shares in the
    shared noise of the basis, and ``tau``.
    """

    at_best: SlopeMessage
    combine: Array | None
    tau: Array


def width_of(dim: int, rank: int, most: int) -> int:
    """Return the width of the basis: for all directions or twice the rank, at most ``most``."""
    return min(dim + SPARE, max(2 * rank, 1), most)


def num_looks(v: Vertical) -> int:
    """Return the number of exchanges for the dependence between parties."""
    return COMPLETE if v.complete else OTHERWISE


def spread(v: Vertical) -> Round:
    """Return the round that improves the basis, on the states of the search."""

    def next_basis(basis: Array, ritz: RitzValues, rows: Callable[[Array], Array]) -> Array:
        """Return a party's rows of the next basis.

        ``rows`` gives the party's rows of ``P`` times a basis.
        """
        new = basis @ ritz.combine
        if not v.complete:
            half = v.width // 2
            residual = rows(new) - new * ritz.curvatures
            new = jnp.concatenate([new[:, : v.width - half], residual[:, :half]], 1)
        return jnp.where(ritz.looks == 0, basis, new)

    def silo(
        noise: object, down: Down, state: Client, data: SiloData
    ) -> tuple[Reply[Along], Client]:
        predict, own_log_p = client_functions(v, state, data)
        local = Local.at(predict, own_log_p, state.z, down.at_best.slope, down.at_best.curvature)
        T = local.root()
        curvature = -T.T @ local.own_hessian @ T

        def rows(basis: Array) -> Array:
            _, vjp = jax.vjp(predict, state.z)
            pulled = jax.vmap(lambda pull: vjp(pull)[0])(down.ritz.pull)
            return (pulled @ T).T + curvature @ basis

        basis = next_basis(state.basis.rows, down.ritz, rows)
        directions = T @ basis
        along = jax.vmap(lambda d: jax.jvp(predict, (state.z,), (d,))[1])(directions.T)
        up = Along(
            along,
            basis.T @ basis,
            basis.T @ curvature @ basis,
            directions.T @ local.own_slope,
            basis.T @ state.basis.anchor,
        )
        after = state.basis._replace(rows=basis, directions=directions)
        return Reply(up, all_finite(up)), state._replace(basis=after)

    def run(state: Server, noise: object, ask: Ask) -> tuple[Server, Info]:
        ritz, anchor = state.spread.ritz, state.basis.anchor
        up: Along = ask(SPREAD, Down(slope_message(state), ritz)).up
        log_p = server_density(v, state, ask.server_data)
        T = root_of(at_point(lambda z: log_p(z, state.total), state.z)[1])
        basis = next_basis(state.basis.rows, ritz, lambda new: state.spread.turned)
        slopes = jax.grad(log_p, (0, 1))

        def change(by_z: Array, by_total: Array) -> tuple[Array, Array]:
            """Return minus the change of both slopes along a direction."""
            changes = jax.jvp(slopes, (state.z, state.total), (by_z, by_total))[1]
            return jax.tree.map(jnp.negative, changes)

        directions = T @ basis
        slope_z, slope_total = slopes(state.z, state.total)
        change_z, change_total = jax.vmap(change)(directions.T, up.predictor)
        curvature = (change_z @ directions).T + up.own + _products(up.predictor, change_total)
        slope = directions.T @ slope_z + up.slope + _products(up.predictor, slope_total[None])[:, 0]
        combine, curvatures = _directions(up.gram + basis.T @ basis, curvature)
        along = combine.T @ slope
        newton = along / _positive(curvatures)
        ritz_after = RitzValues(
            looks=ritz.looks + 1,
            combine=combine,
            curvatures=curvatures,
            pull=jnp.tensordot(combine.T[: len(ritz.pull)], change_total, 1),
            gain=0.5 * along @ newton,
        )
        after = state._replace(
            ab=jnp.zeros(2),
            quiet=jnp.zeros_like(state.quiet),
            basis=Basis(basis, directions, anchor),
            spread=Spread(
                ritz_after,
                turned=T.T @ change_z.T @ combine,
                newton=combine @ newton,
                angles=(combine.T @ (basis.T @ anchor + up.anchor))[: v.rank],
            ),
        )
        return after, Info(jnp.zeros(()), all_finite(ritz_after))

    return Round((Exchange(SPREAD, silo),), run)


@dataclass(frozen=True, eq=False)
class Beginning:
    """The round that leads from the states of the search to those of a run."""

    vertical: Vertical

    def as_round(self) -> Round:
        """Return it as a round."""
        return Round(
            (Exchange(self.name, self.silo, silo_noise=key_as_noise),), self.run, key_as_noise
        )

    @property
    def name(self) -> str:
        """Return the name of the exchange."""
        return "begin at the mode" if self.vertical.width else "begin at zero"

    def coupling_and_tau(self, state: Server) -> tuple[Array | None, Array]:
        """Return the combination (width, rank) of the basis, or None, and ``tau``."""
        v = self.vertical
        if not (v.rank and v.width):
            return None, jnp.ones(())
        curvatures = _positive(state.spread.ritz.curvatures)
        # A rank of one less than the number of latents is enough: the direction of the largest
        # eigenvalue has no share in the shared noise, since tau is one over that eigenvalue.
        all_known = v.complete and v.rank >= v.dim - 1
        tau = 1 / curvatures.max() if all_known else jnp.ones(())
        size = jnp.sqrt(jnp.maximum(1 / (tau * curvatures) - 1, 0.0))[: v.rank]
        # The shared noise may be rotated without changing the guide. This rotation brings V close
        # to the anchor (a Procrustes problem): eigenvectors of nearly equal eigenvalues depend on
        # rounding, and without it so would the draws.
        left, _, right = linalg.svd(size[:, None] * state.spread.angles)
        return state.spread.ritz.combine[:, : v.rank] * size @ (left @ right), tau

    def start(
        self, z: Array, root: Array, basis: Array, combine: Array | None, tau: Array, key: Array
    ) -> PartyStart:
        """Return the start of a party's guide."""
        v = self.vertical
        if not v.rank:
            return PartyStart(z, root)
        coupling = basis @ combine if combine is not None else v.random_coupling(key, len(z))
        return PartyStart(z, jnp.sqrt(tau) * root, coupling)

    def silo(
        self, noise: Array, down: CouplingInGuide, state: Client, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        predict, own_log_p = client_functions(self.vertical, state, data)
        local = Local.at(predict, own_log_p, state.z, down.at_best.slope, down.at_best.curvature)
        start = self.start(state.z, local.root(), state.basis.rows, down.combine, down.tau, noise)
        after = self.vertical.client_at(noise, data, state.theta, start, predict(state.z))
        return Reply((), all_finite(after)), after

    def run(self, state: Server, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Send the start to clients, and return the server's own first state."""
        v, (combine, tau) = self.vertical, self.coupling_and_tau(state)
        ask(self.name, CouplingInGuide(slope_message(state), combine, tau))

        def log_p(z: Array) -> Array:
            return server_density(v, state, ask.server_data)(z, state.total)

        # Without a search (a run with ``rho``) clients start at zero, and the server at its own
        # mode.
        z = state.z if v.width else mode_of(log_p, state.z)
        root = root_of(at_point(log_p, z)[1])
        start = self.start(z, root, state.basis.rows, combine, tau, noise)
        after = v.server_at(noise, state.theta, start)
        return after, Info(-state.value, all_finite(after))


def _positive(curvatures: Array) -> Array:
    """Return absolute curvatures, at least eps, so that they can be divided by."""
    return jnp.maximum(jnp.abs(curvatures), jnp.finfo(curvatures.dtype).eps)


def _products(a: Array, b: Array) -> Array:
    """Return the inner products (n, m) of all pairs of ``a`` (n, ...) and ``b`` (m, ...)."""
    return a.reshape(len(a), -1) @ b.reshape(len(b), -1).T


def _directions(gram: Array, curvature: Array) -> tuple[Array, Array]:
    """Return the Ritz vectors of a basis, as combinations (width, width), and their curvatures.

    They are orthonormal, smallest curvature first. Columns beyond the rank of the basis are zero,
    with a curvature of one.
    """
    own = Curvature.of(gram)
    independent = own.values > PARALLEL * own.values.max()
    shrink = jnp.where(independent, jax.lax.rsqrt(own.values), 0.0)
    whiten = own.vectors / own.unit[:, None] * shrink
    projected = whiten.T @ curvature @ whiten
    # Dependent basis vectors get a curvature above all real ones, so that eigh sorts them last.
    last = 10 * (1 + jnp.abs(projected).max())
    projected = 0.5 * (projected + projected.T) + jnp.diag(jnp.where(independent, 0.0, last))
    curvatures, rotation = linalg.eigh(projected)
    combine, is_real = whiten @ rotation, curvatures < 0.9 * last
    # Rayleigh quotients: eigh's small eigenvalues have the rounding errors of the largest.
    size = jnp.where(is_real, ((gram @ combine) * combine).sum(0), 1.0)
    return combine, jnp.where(is_real, ((curvature @ combine) * combine).sum(0) / size, 1.0)
