"""The exchange in which each silo tells the shape of its own log likelihood at one place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_fed.algorithms.base import (
    Ask,
    Combine,
    Exchange,
    FederatedAlgorithm,
    Info,
    Reply,
    Round,
)
from numpyro_fed.algorithms.mode import columns_at_once, derivatives
from numpyro_fed.algorithms.own_start import climb
from numpyro_fed.integrals.laplace import Laplace
from numpyro_fed.integrals.quadrature import silo_integral
from numpyro_fed.model.binding import Rows, Theta
from numpyro_fed.model.data import SiloData
from numpyro_fed.model.log_density import FederatedModel

INFLUENCE = "influence"  # the name of the exchange
MOST_GLOBALS = 300  # as in the search for the mode: silos send Hessians


class Place(NamedTuple):
    """The server's message: shared parameters, and a place of the globals (n,)."""

    theta: Theta
    z_G: Array


class Up(NamedTuple):
    """A silo's message about its log likelihood.

    Attributes
    ----------
    gradient : (n,)
    curvature : (n, n)
        Minus the Hessian.
    gain : ()
        How much higher the log likelihood is at the silo's own mode; -1 where it came to none.
    """

    gradient: Array
    curvature: Array
    gain: Array


class Factors(NamedTuple):
    """The messages of all silos, with a leading axis, and the prior's gradient and curvature."""

    silos: Up
    prior_gradient: Array
    prior_curvature: Array


def influence(fm: FederatedModel, algorithm: FederatedAlgorithm[Any, Any], num_silos: int) -> Round:
    """Return the round that leads from a run's state to the :class:`Factors` at a place.

    The place is the server's data. Silos integrate their own latents as in the search for the mode.
    """
    integral, columns = silo_integral(fm), columns_at_once(fm)

    def silo(noise: object, down: Place, state: object, data: SiloData) -> tuple[Reply[Up], object]:
        theta = {**down.theta, **algorithm.private(state).theta}

        def share_of_prior(z_G: Array) -> Array:
            return fm.smoothed.log_prior(down.theta, z_G) / num_silos

        def expand(z_G: Array, z_L: Rows, more: Callable[[Array], Array]) -> tuple[Any, Rows]:
            def value(z_G: Array) -> tuple[Array, Rows]:
                found, modes = integral(theta, z_G, data, z_L)
                return found + more(z_G), modes

            return derivatives(value, z_G, columns_at_once=columns)

        z_G = down.z_G
        here, modes = expand(z_G, Laplace(fm).start(data), lambda z: jnp.zeros(()))
        # With its share of the prior, as in the first exchange of a search, so that there is a mode
        # in directions of which the silo knows nothing.
        first, _ = expand(z_G, modes, share_of_prior)
        top = climb(lambda z, z_L: expand(z, z_L, share_of_prior), first, modes)
        gain = top.best.value - share_of_prior(top.best.x) - here.value
        gain = jnp.where(top.is_mode & jnp.isfinite(gain), jnp.maximum(gain, 0.0), -1.0)
        return Reply(Up(here.gradient, here.curvature, gain), jnp.array(True)), state

    def run(state: object, noise: object, ask: Ask) -> tuple[Factors, Info]:
        theta = algorithm.shared(state).theta
        z_G = jnp.zeros(fm.dim) if ask.server_data is None else ask.server_data
        replies = ask(INFLUENCE, Place(theta, z_G))
        prior, _ = derivatives(lambda z: (fm.smoothed.log_prior(theta, z), ()), z_G)
        after = Factors(replies.up, prior.gradient, prior.curvature)
        return after, Info(jnp.zeros(()), jnp.array(True))

    settings = json.dumps({"num_silos": num_silos})
    exchange = Exchange(INFLUENCE, silo, combine=Combine.GATHER, settings=settings)
    return Round((exchange,), run)
