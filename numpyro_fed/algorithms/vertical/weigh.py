r"""One exchange that weighs draws of all parties' latents by the density of the true model.

Every party draws its own latents from its guide; clients send their predictors at these draws,
summed up, and their own log densities; the server, which alone knows the response, weighs:

.. math::
    \log w_s = \log p(z^s) + \sum_j \log p(\theta_j^s) - \log q(z^s, \theta^s)
    + \log p\Big(y \,\Big|\, \sum_j g_j(x_j, \theta_j^s), z^s\Big).

No auxiliary variable is in it, so that a fit of the augmented or of the power-likelihood model is
weighed towards the model as it is written. Of a fifth of the draws, all parties spread theirs
around the centres of their guides, and all are weighed by the density of the mixture.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_fed.algorithms.base import Exchange, Info, Replies, Reply
from numpyro_fed.algorithms.vertical.base import ClientState, Kind, ServerState, Vertical
from numpyro_fed.guides.gaussian import GlobalGuide
from numpyro_fed.model.data import SiloData
from numpyro_fed.trees import all_finite

SCALES = (1.0, 1.5, 3.0)  # of the parts of the mixture, as multiples of the guides
SHARES = (0.8, 0.1, 0.1)


class Up(NamedTuple):
    """What a client sends of each draw: its predictor (draws, rows, ...), its own log density, and
    the log density of its draw under each part of the mixture (draws, parts).
    """

    predictor: Array
    own: Array
    log_q: Array


class Weighed(NamedTuple):
    """The server's draws (n, dim) and the log weights of all draws (n,)."""

    z: Array
    log_weights: Array


def parts(v: Vertical, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The scales of the mixture's parts, and of which of them each draw is (num_draws,).

    The guides alone, if the density of some guide is known at its own draws alone.
    """
    guides = [v.guide(kind).globals for kind in (v.server, *v.kinds.values())]
    if any(guide.log_density is None for guide in guides) or num_draws < 10:
        return np.ones(1), np.zeros(num_draws, int)
    numbers = [int(share * num_draws) for share in SHARES[1:]]
    of = np.repeat(np.arange(len(SCALES)), [num_draws - sum(numbers), *numbers])
    return np.array(SCALES), of


def weigh(v: Vertical, num_draws: int, at_once: int) -> Exchange:
    """Build the exchange, from states of a vertical algorithm to :class:`Weighed` at the server and
    draws (num_draws, dim) at each client; ``at_once`` draws run at a time.
    """
    scales, of = parts(v, num_draws)
    shares = jnp.asarray(np.bincount(of, minlength=len(scales)) / num_draws)

    def place(guide: GlobalGuide, eta: Any, noise: Any) -> tuple[Array, Array]:
        """Draws (n, dim), and their log density under each part (n, parts)."""
        z, log_q = jax.vmap(guide.draw, (None, 0))(eta, noise)
        if len(scales) == 1 or guide.log_density is None:
            return z, log_q[:, None]
        density, centre = guide.log_density, guide.centre(eta)
        z = centre + jnp.asarray(scales)[of][:, None] * (z - centre)

        def under(scale: float) -> Array:
            shrunk = centre + (z - centre) / scale
            return jax.vmap(lambda x: density(eta, x))(shrunk) - z.shape[1] * np.log(scale)

        return z, jnp.stack([under(float(s)) for s in scales], 1)

    def server_noise(key: Array) -> Any:
        return v.guide(v.server).globals.noise(key, num_draws)

    def silo_noise(key: Array, state: ClientState) -> Any:
        return v.guide(v.kind_of(state)).globals.noise(key, num_draws)

    def broadcast(
        noise: Any, state: ServerState, who: Array, server_data: Any
    ) -> tuple[tuple[()], Any]:
        return (), noise

    def silo(noise: Any, down: Any, state: ClientState, data: SiloData) -> tuple[Reply[Up], Array]:
        kind: Kind = v.kind(data)
        private = v.private(state)
        z, log_q = place(v.guide(kind).globals, private.guide["latents"], noise)

        def one(z: Array) -> tuple[Array, Array]:
            return v.model.predict(kind.half, private.theta, z, data)

        g, own = jax.lax.map(one, z, batch_size=at_once)
        up = Up(g, own, log_q)
        return Reply(up, ~jnp.isnan(own).any() & all_finite(log_q)), z

    def server(
        state: ServerState, memo: Any, replies: Replies[Up], server_data: SiloData
    ) -> tuple[Weighed, Info]:
        theta, eta = v.shared(state)
        z, log_q = place(v.guide(v.server).globals, eta, memo)

        def one(at: tuple[Array, Array]) -> Array:
            own, likelihood = v.model.log_server(theta, *at, server_data)
            return own + likelihood

        log_p = jax.lax.map(one, (z, replies.up.predictor), batch_size=at_once)
        log_q = jax.nn.logsumexp(jnp.log(shares) + log_q + replies.up.log_q, axis=1)
        log_w = log_p + replies.up.own - log_q
        # Far from the guides densities may overflow, which gives a draw no weight.
        log_w = jnp.where((of > 0) & ~(log_w < jnp.inf), -jnp.inf, log_w)
        evidence = jax.nn.logsumexp(log_w) - jnp.log(num_draws)
        ok = replies.ok & ~jnp.isnan(log_w).any() & jnp.isfinite(evidence)
        return Weighed(z, log_w), Info(-evidence, ok)

    return Exchange(
        broadcast,
        silo,
        server,
        name=json.dumps({"weigh": num_draws, "at_once": at_once}),
        server_noise=server_noise,
        silo_noise=silo_noise,
    )
