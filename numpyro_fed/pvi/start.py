r"""The start of PVI at a mode, or at the result of another method.

With gradient :math:`g_m` and negative Hessian :math:`A_m` of silo ``m``'s log likelihood at the
mode :math:`\\hat z`, its own latents integrated by Laplace's method, its factor is

.. math::
    t_m(z) = \\exp\big(g_m' (z - \\hat z) - \tfrac12 (z - \\hat z)' A_m (z - \\hat z)\big),

so that the first posterior is Laplace's approximation of the joint one, and visits improve on the
parabolas. A flat prior has natural parameters of zero: only the sum has to be proper.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.basics.trees import all_finite, where
from numpyro_fed.data.silo_data import SiloData
from numpyro_fed.local.problem import proper_step
from numpyro_fed.numerics.expfam.family import Natural
from numpyro_fed.numerics.gaussian import Gaussian
from numpyro_fed.pvi.server import PartitionedVI
from numpyro_fed.pvi.silo import ServerState, SiloState
from numpyro_fed.rounds.exchange import Ask, Exchange, Info, Reply, Round, key_as_noise
from numpyro_fed.rounds.names import FROM_MODE
from numpyro_fed.rounds.states import CarriedSilo, SharedParams, SiloParams, WarmStart
from numpyro_fed.search.expand import SearchState as ModeSiloState
from numpyro_fed.search.mode_search import BestPoints
from numpyro_fed.search.start_point import (
    StartMessage,
    StartPoint,
    local_guides_at_mode,
    local_guides_of_result,
    start_at_mode,
)


def at_mode(pvi: PartitionedVI) -> Round:
    """Return the round that leads from the states of a search for the mode to those of PVI."""
    fm, family = pvi.model, pvi.family

    def silo_factor(
        noise: Array, down: StartMessage, state: ModeSiloState, data: SiloData
    ) -> tuple[Reply[Natural], SiloState]:
        point, place = down.point, jax.tree.map(lambda a: a[down.start], state.place)
        num_theta = len(place.gradient) - fm.dim
        factor = family.from_derivatives(
            point.centre, place.gradient[num_theta:], place.curvature[num_theta:, num_theta:]
        )
        # A silo without a parabola starts with no factor, as in the paper.
        factor = jax.tree.map(lambda a: jnp.where(all_finite(factor), a, 0.0), factor)
        eta = local_guides_at_mode(fm, pvi.guide, down, state, data)
        params, frame = SiloParams(eta, state.private), _frame_at(pvi, point)
        first = pvi.init_silo(noise, data)
        draft = first._replace(params=params, pending=factor, frame=frame)
        return Reply(factor, all_finite(eta)), draft

    def run(state: BestPoints[Array], noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        message = start_at_mode(fm, state)
        point, replies = message.point, ask(FROM_MODE, message)
        first, prior = pvi.init_server(noise), pvi.globals.prior(point.theta)
        server_factor = _server_factor_at(pvi, point, first.server_factor)
        total = jax.tree.map(jnp.add, replies.up, server_factor)

        is_proper = partial(pvi.is_proper, prior)
        if pvi.globals.prior_outside is not None:
            # Effects and their scale together (both globals) need not be at a peak of the
            # joint density where the search is, since it has integrated the effects. Then the
            # server's factor makes the posterior that of the search, until a round renews it.
            posterior = _posterior_at(pvi, point)
            needed = jax.tree.map(lambda q, p, t: q - p - t, posterior, prior, replies.up)
            server_factor = where(is_proper(total), server_factor, needed)
            total = jax.tree.map(jnp.add, replies.up, server_factor)
        none = jax.tree.map(jnp.zeros_like, total)
        # A silo's own parabola may be concave upwards, and so may the family's diagonal of the
        # sum. A smaller share of all factors is then proper under a proper prior.
        total, damping = proper_step(is_proper, none, total, 1.0)
        server_factor = jax.tree.map(lambda a: damping * a, server_factor)
        after = _server_at(pvi, first, point, total, server_factor)
        after = after._replace(taken=jnp.full_like(first.taken, damping))
        return after, Info(jnp.zeros(()), all_finite(after) & is_proper(total))

    exchange = Exchange(
        FROM_MODE,
        silo_factor,
        commit=lambda draft, sent: draft._replace(pending=sent),
        silo_noise=key_as_noise,
    )
    return Round((exchange,), run, key_as_noise)


def at_result(pvi: PartitionedVI) -> WarmStart:
    """Return the functions by which PVI starts at the result of another method.

    The first posterior is the normal distribution of that result. The silos have equal shares
    of its difference from the prior: it does not say how much each of them contributed.
    """

    def begin_server(key: Array, point: StartPoint) -> ServerState:
        first, prior = pvi.init_server(key), pvi.globals.prior(point.theta)
        total = jax.tree.map(jnp.subtract, _posterior_at(pvi, point), prior)
        server_factor = _server_factor_at(pvi, point, first.server_factor)
        return _server_at(pvi, first, point, total, server_factor)

    def begin_silo(
        key: Array, carried: CarriedSilo, point: StartPoint, data: SiloData
    ) -> SiloState:
        server = begin_server(key, point)
        share = jax.tree.map(
            lambda a, b: (a - b) / pvi.num_silos, server.total, server.server_factor
        )
        eta = local_guides_of_result(pvi.guide, carried, point, data)
        params = SiloParams(eta, carried.theta)
        return pvi.init_silo(key, data)._replace(params=params, factor=share, frame=server.frame)

    return WarmStart(begin_server, begin_silo)


def _frame_at(pvi: PartitionedVI, point: StartPoint) -> Gaussian:
    """Return the frame in which silos' local guides measure the globals."""
    return point.frame(pvi.guide.globals).globals


def _posterior_at(pvi: PartitionedVI, point: StartPoint) -> Natural:
    """Return the posterior whose frame a start has told."""
    # K'K is the precision of the frame, without inverting its covariance.
    K = _frame_at(pvi, point).inverse_root()
    return pvi.family.from_derivatives(point.centre, jnp.zeros_like(point.centre), K.T @ K)


def _server_factor_at(pvi: PartitionedVI, point: StartPoint, none: Natural) -> Natural:
    """Return the parabola of the prior's part outside of the family, or no factor."""
    fm, log_outside, theta = pvi.model, pvi.globals.prior_outside, point.theta
    if log_outside is None:
        return none

    # The search for the mode rounds off the kinks of priors. A parabola of the kink itself
    # would have the curvature of zero or infinity, so the smooth version replaces it here, too.
    def remainder(z: Array) -> Array:
        return log_outside(theta, z) + fm.smoothed.log_prior(theta, z) - fm.log_prior(theta, z)

    z = point.centre
    return pvi.family.from_derivatives(z, jax.grad(remainder)(z), -jax.hessian(remainder)(z))


def _server_at(
    pvi: PartitionedVI,
    first: ServerState,
    point: StartPoint,
    total: Natural,
    server_factor: Natural,
) -> ServerState:
    """Return the server's first state at a point, with a sum of factors."""
    posterior = pvi.aggregate(pvi.globals.prior(point.theta), total)
    return first._replace(
        params=SharedParams(posterior, point.theta),
        total=total,
        server_factor=server_factor,
        opt_state=pvi.optim.init(point.theta),
        frame=_frame_at(pvi, point),
    )
