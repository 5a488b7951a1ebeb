r"""The start of PVI at a mode: each silo's factor is the parabola of its own likelihood.

With gradient :math:`g_m` and negative Hessian :math:`A_m` of silo ``m``'s log likelihood at the
mode :math:`\hat z`, its own latents integrated by Laplace's method, the factor is

.. math::
    t_m(z) = \exp\big(g_m' (z - \hat z) - \tfrac12 (z - \hat z)' A_m (z - \hat z)\big),

so that the first posterior is Laplace's approximation of the joint one, and visits improve on the
parabolas. A flat prior has natural parameters of zero: only the sum has to be proper.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    CarriedSilo,
    Exchange,
    Info,
    Reply,
    Round,
    SharedParams,
    SiloParams,
    WarmStart,
    key_as_noise,
)
from numpyro_fed.algorithms.begin import (
    FROM_MODE,
    StartMessage,
    StartPoint,
    local_guides_at_mode,
    local_guides_of_result,
    start_at_mode,
)
from numpyro_fed.algorithms.expand import SiloState as ModeSiloState
from numpyro_fed.algorithms.mode import Search
from numpyro_fed.algorithms.pvi.server import Server
from numpyro_fed.algorithms.pvi.silo import Silo
from numpyro_fed.algorithms.pvi.states import PVIParts, ServerState, SiloState
from numpyro_fed.expfam.base import Natural
from numpyro_fed.gaussian import Gaussian
from numpyro_fed.local.base import proper_step
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite


def _server_factor(parts: PVIParts, point: StartPoint, none: Natural) -> Natural:
    """Return the server's own factor: the parabola of the prior's part outside of the family."""
    log_outside = parts.globals.prior_outside
    if log_outside is None:
        return none

    fm, theta = parts.model, point.theta

    # The search for the mode rounds off the kinks of priors. A parabola of the kink itself would
    # have the curvature of zero or infinity, so the smooth version replaces it here, too.
    def remainder(z: Array) -> Array:
        return log_outside(theta, z) + fm.smoothed.log_prior(theta, z) - fm.log_prior(theta, z)

    z = point.centre
    return parts.globals.family.around(z, jax.grad(remainder)(z), -jax.hessian(remainder)(z))


def frame_of(parts: PVIParts, point: StartPoint) -> Gaussian:
    """Return the frame in which silos' local guides measure the globals."""
    return point.frame(parts.guide.globals).globals


def _of_frame(parts: PVIParts, point: StartPoint) -> Natural:
    """Return the posterior whose frame a start has told."""
    # K'K is the precision of the frame, without inverting its covariance.
    K = frame_of(parts, point).inverse_root()
    return parts.globals.family.around(point.centre, jnp.zeros_like(point.centre), K.T @ K)


def pvi_carry(server: Server, silo: Silo) -> WarmStart:
    """Return the functions by which PVI starts at the result of another method.

    The first posterior is the normal distribution of that result. The silos have equal shares of
    its difference from the prior: the result does not say how much each of them contributed.
    """
    parts = server.parts

    def factors(key: Array, point: StartPoint) -> tuple[ServerState, Natural, Natural]:
        """Return the server's first state, the sum of all factors, and the server's own factor."""
        first = server.init(key)
        total = jax.tree.map(jnp.subtract, _of_frame(parts, point), server.prior(point.theta))
        return first, total, _server_factor(parts, point, first.server_factor)

    def begin_server(key: Array, point: StartPoint) -> ServerState:
        first, total, server_factor = factors(key, point)
        guide = parts.aggregate(server.prior(point.theta), total)
        return first._replace(
            params=SharedParams(guide, point.theta),
            total=total,
            server_factor=server_factor,
            opt_state=parts.optim.init(point.theta),
            frame=frame_of(parts, point),
        )

    def begin_silo(
        key: Array, carried: CarriedSilo, point: StartPoint, data: SiloData
    ) -> SiloState:
        _, total, server_factor = factors(key, point)
        share = jax.tree.map(lambda a, b: (a - b) / server.settings.num_silos, total, server_factor)
        eta = local_guides_of_result(parts.guide, carried, point, data)
        first, params = silo.init(key, data), SiloParams(eta, carried.theta)
        return first._replace(params=params, factor=share, frame=frame_of(parts, point))

    return WarmStart(begin_server, begin_silo)


def pvi_from_mode(server: Server, silo: Silo) -> Round:
    """Return the round that leads from the states of a search for the mode to those of PVI."""
    parts, fm, family = server.parts, server.model, server.family

    def silo_factor(
        noise: Array, down: StartMessage, state: ModeSiloState, data: SiloData
    ) -> tuple[Reply[Natural], SiloState]:
        point, place = down.point, jax.tree.map(lambda a: a[down.start], state.place)
        num_theta = len(place.gradient) - fm.dim
        factor = family.around(
            point.centre, place.gradient[num_theta:], place.curvature[num_theta:, num_theta:]
        )
        # A silo without a parabola starts with no factor, as in the paper.
        factor = jax.tree.map(lambda a: jnp.where(all_finite(factor), a, 0.0), factor)
        eta = local_guides_at_mode(fm, parts.guide, down, state, data)
        params = SiloParams(eta, state.private)
        first, frame = silo.init(noise, data), frame_of(parts, point)
        draft = first._replace(params=params, pending=factor, frame=frame)
        return Reply(factor, all_finite(eta)), draft

    def run(state: Search[Array], noise: Array, ask: Ask) -> tuple[ServerState, Info]:
        message = start_at_mode(fm, state)
        point, replies = message.point, ask(FROM_MODE, message)
        first, prior = server.init(noise), server.prior(point.theta)
        server_factor = _server_factor(parts, point, first.server_factor)
        total = jax.tree.map(jnp.add, replies.up, server_factor)

        def proper(total: Natural) -> Array:
            return family.proper(parts.aggregate(prior, total))

        if parts.globals.prior_outside is not None:
            # Effects and their scale together (both globals) need not be at a peak of the joint
            # density where the search is, since it has integrated the effects. Then the server's
            # factor makes the posterior that of the search, until a round renews it.
            posterior = _of_frame(parts, point)
            needed = jax.tree.map(lambda q, p, t: q - p - t, posterior, prior, replies.up)
            peak = proper(total)
            server_factor = jax.tree.map(lambda a, b: jnp.where(peak, a, b), server_factor, needed)
            total = jax.tree.map(jnp.add, replies.up, server_factor)
        none = jax.tree.map(jnp.zeros_like, total)
        # A silo's own parabola may be concave upwards, and so may the family's diagonal of the
        # sum. A smaller share of all factors is then proper under a proper prior.
        total, taken = proper_step(proper, none, total, 1.0)
        guide = parts.aggregate(prior, total)
        after = first._replace(
            params=SharedParams(guide, point.theta),
            total=total,
            server_factor=jax.tree.map(lambda a: taken * a, server_factor),
            opt_state=parts.optim.init(point.theta),
            taken=jnp.full_like(first.taken, taken),
            frame=frame_of(parts, point),
        )
        return after, Info(jnp.zeros(()), all_finite(after) & proper(total))

    exchange = Exchange(
        FROM_MODE,
        silo_factor,
        commit=lambda draft, sent: draft._replace(pending=sent),
        silo_noise=key_as_noise,
    )
    return Round((exchange,), run, key_as_noise)
