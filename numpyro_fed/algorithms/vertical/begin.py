r"""From the mode to a run: the curvature of each party, and how parties depend on each other.

In coordinates in which each party's own curvature is one, that of the joint density is

.. math::
    P = \sum_p T_p' (-\nabla^2 \log p_p) T_p
    + \Big(\sum_p J_p T_p\Big)' \mathrm{diag}(h) \Big(\sum_p J_p T_p\Big),

``T_p`` a root of the party's own covariance and ``J_p`` the Jacobian of its predictor. Directions
of little curvature are those in which parties make up for each other. They are found as a locally
optimal block method does (Knyazev 2001): every party holds its rows of a random basis and sends how
its predictor changes along it, summed up over parties; the server, which sees sums alone, solves
the small problem and says how to combine the basis; where that does not hold all directions,
residuals become its other half, and for these the server says how the slope of the likelihood
changes along each direction: a client can tell from it which columns the others' predictors span.

With eigenvalues :math:`\lambda` and vectors ``U``, all parties' covariance is
:math:`\tau T (I + V V') T'`, :math:`V = U\, \mathrm{diag}(\sqrt{1 / (\tau \lambda) - 1})`:
``tau`` is one over the largest eigenvalue where all are known, and one otherwise.
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
from numpyro_fed.algorithms.vertical.base import ClientState, ServerState, Start, Vertical
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

COMPLETE, OTHERWISE = 3, 10  # times that the basis is looked at: if it holds all directions, if not
PARALLEL = 1e-5  # of a combination of the basis, relative: there is nothing of it
SPREAD = "spread"  # the name of the exchange
SPARE = 5  # columns of a basis beyond all directions: square random ones may be nearly singular


class Down(NamedTuple):
    """A message of the server on its point, and on the basis."""

    slope: SlopeMessage
    ritz: RitzValues


class Along(NamedTuple):
    """A client's message on its basis: how its predictor changes along it (width, rows, ...), the
    products of its rows and its own curvature (width, width), its own slope (width,), and the
    products with its rows of the anchor (width, rank).
    """

    predictor: Array
    gram: Array
    own: Array
    slope: Array
    anchor: Array


class CouplingInGuide(NamedTuple):
    """A message of the server where a run begins: its point, how to combine the basis into what
    parties share (width, rank), and ``tau``.
    """

    slope: SlopeMessage
    combine: Array | None
    tau: Array


def width_of(dim: int, rank: int, most: int) -> int:
    """Return the width of the basis, at most ``most``: for all directions, or twice the rank."""
    return min(dim + SPARE, max(2 * rank, 1), most)


def num_looks(v: Vertical) -> int:
    """Return how often parties are asked how they depend on each other."""
    return COMPLETE if v.complete else OTHERWISE


def spread(v: Vertical) -> Round:
    """Return the round, on the states of the search."""

    def next_basis(basis: Array, ritz: RitzValues, rows: Callable[[Array], Array]) -> Array:
        """Return the next basis; ``rows`` are the party's of ``P`` times a basis."""
        new = basis @ ritz.combine
        if not v.complete:
            half = v.width // 2
            residual = rows(new) - new * ritz.curvatures
            new = jnp.concatenate([new[:, : v.width - half], residual[:, :half]], 1)
        return jnp.where(ritz.looks == 0, basis, new)

    def silo(
        noise: object, down: Down, state: Client, data: SiloData
    ) -> tuple[Reply[Along], Client]:
        predict, own = client_functions(v, state, data)
        local = Local.at(predict, own, state.z, down.slope.slope, down.slope.curvature)
        T = local.root()
        curvature = -T.T @ local.own_hessian @ T

        def rows(basis: Array) -> Array:
            _, back = jax.vjp(predict, state.z)
            pulled = jax.vmap(lambda pull: back(pull)[0])(down.ritz.pull)
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
            """Return minus the change of both slopes, along a direction."""
            ritz_after = jax.jvp(slopes, (state.z, state.total), (by_z, by_total))[1]
            return jax.tree.map(jnp.negative, ritz_after)

        directions = T @ basis
        by_z, by_total = slopes(state.z, state.total)
        of_z, of_total = jax.vmap(change)(directions.T, up.predictor)
        curvature = (of_z @ directions).T + up.own + _products(up.predictor, of_total)
        slope = directions.T @ by_z + up.slope + _products(up.predictor, by_total[None])[:, 0]
        combine, curvatures = _directions(up.gram + basis.T @ basis, curvature)
        along = combine.T @ slope
        newton = along / _positive(curvatures)
        ritz_after = RitzValues(
            looks=ritz.looks + 1,
            combine=combine,
            curvatures=curvatures,
            pull=jnp.tensordot(combine.T[: len(ritz.pull)], of_total, 1),
            gain=0.5 * along @ newton,
        )
        after = state._replace(
            ab=jnp.zeros(2),
            quiet=jnp.zeros_like(state.quiet),
            basis=Basis(basis, directions, anchor),
            spread=Spread(
                ritz_after,
                turned=T.T @ of_z.T @ combine,
                newton=combine @ newton,
                angles=(combine.T @ (basis.T @ anchor + up.anchor))[: v.rank],
            ),
        )
        return after, Info(jnp.zeros(()), all_finite(ritz_after))

    return Round((Exchange(SPREAD, silo),), run)


@dataclass(frozen=True, eq=False)
class Beginning:
    """The way from the states of the search to those of a run, in one round."""

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
        """Return how to combine the basis, and ``tau``."""
        v = self.vertical
        if not (v.rank and v.width):
            return None, jnp.ones(())
        curvatures = _positive(state.spread.ritz.curvatures)
        all_known = v.complete and v.rank >= v.dim - 1
        tau = 1 / curvatures.max() if all_known else jnp.ones(())
        size = jnp.sqrt(jnp.maximum(1 / (tau * curvatures) - 1, 0.0))[: v.rank]
        # Of all rotations of the shared noise the one that brings V next to the anchor: directions
        # of about the same curvature are as rounding has it, and what comes of them is not.
        left, _, right = linalg.svd(size[:, None] * state.spread.angles)
        return state.spread.ritz.combine[:, : v.rank] * size @ (left @ right), tau

    def start(
        self, z: Array, root: Array, basis: Array, combine: Array | None, tau: Array, key: Array
    ) -> Start:
        """Return where a party's guide begins."""
        v = self.vertical
        if not v.rank:
            return Start(z, root)
        coupling = basis @ combine if combine is not None else v.random_coupling(key, len(z))
        return Start(z, jnp.sqrt(tau) * root, coupling)

    def silo(
        self, noise: Array, down: CouplingInGuide, state: Client, data: SiloData
    ) -> tuple[Reply[tuple[()]], ClientState]:
        predict, own = client_functions(self.vertical, state, data)
        local = Local.at(predict, own, state.z, down.slope.slope, down.slope.curvature)
        start = self.start(state.z, local.root(), state.basis.rows, down.combine, down.tau, noise)
        after = self.vertical.client_at(noise, data, state.theta, start, predict(state.z))
        return Reply((), all_finite(after)), after

    def run(self, state: Server, noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        """Say where clients begin, and begin there."""
        v, (combine, tau) = self.vertical, self.coupling_and_tau(state)
        ask(self.name, CouplingInGuide(slope_message(state), combine, tau))

        def log_p(z: Array) -> Array:
            return server_density(v, state, ask.server_data)(z, state.total)

        z = state.z if v.width else mode_of(log_p, state.z)
        root = root_of(at_point(log_p, z)[1])
        start = self.start(z, root, state.basis.rows, combine, tau, noise)
        after = v.server_at(noise, state.theta, start)
        return after, Info(-state.value, all_finite(after))


def _positive(curvatures: Array) -> Array:
    """Return the sizes of curvatures, none so small that one may not divide by it."""
    return jnp.maximum(jnp.abs(curvatures), jnp.finfo(curvatures.dtype).eps)


def _products(a: Array, b: Array) -> Array:
    """Return the inner products of all pairs along the first axis."""
    return a.reshape(len(a), -1) @ b.reshape(len(b), -1).T


def _directions(gram: Array, curvature: Array) -> tuple[Array, Array]:
    """Return combinations of a basis that are orthonormal and have no curvature in common, with
    their curvatures, smallest first; columns are zero where the basis holds no more directions.
    """
    unit, values, vectors = Curvature.of(gram)
    independent = values > PARALLEL * values.max()
    whiten = vectors / unit[:, None] * jnp.where(independent, jax.lax.rsqrt(values), 0.0)
    projected = whiten.T @ curvature @ whiten
    last = 10 * (1 + jnp.abs(projected).max())
    projected = 0.5 * (projected + projected.T) + jnp.diag(jnp.where(independent, 0.0, last))
    curvatures, rotation = linalg.eigh(projected)
    combine, known = whiten @ rotation, curvatures < 0.9 * last
    # Rayleigh quotients: small ones are more exact than those of eigh, once the basis is good.
    size = jnp.where(known, ((gram @ combine) * combine).sum(0), 1.0)
    return combine, jnp.where(known, ((curvature @ combine) * combine).sum(0) / size, 1.0)
