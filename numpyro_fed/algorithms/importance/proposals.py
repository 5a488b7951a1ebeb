r"""Where the importance correction looks for the posterior: the fitted guide, and wider.

A guide that is too narrow, or that sits in one of several modes, gives weights that look perfect at
its own draws. So a fifth of the draws comes from wider distributions, and all are weighed by the
density of the mixture (Hesterberg 1995; Owen and Zhou 2000, "Safe and effective importance
sampling", with fixed numbers of draws from each part)

.. math::
    q_{\text{mix}} = \alpha_0\, q + \sum_{k} \alpha_k\, t_3(\bar m, (s_k L)(s_k L)')
    + \alpha_p\, t_3(m_p, \mathrm{diag}(s_p^2)),

with the mean and a root of the covariance of ``q``, and median and spread of the prior. No weight
is then larger than where one of the parts meets the posterior, and a mode that the guide never
visits shows in few draws of large weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.guides.gaussian import GlobalGuide
from numpyro_fed.model.split import FederatedModel

SHARE = 0.2  # of the draws, from what is wider than the guide
SCALES = (2.5, 8.0, 25.0)  # times the guide's own
FREEDOM = 3.0  # of the t distributions
FULL_UP_TO = 100
PRIOR_DRAWS = 512


class Proposal(NamedTuple):
    """A mixture around a guide.

    Attributes
    ----------
    own : int
        How many draws, the first ones, are the guide's.
    noise : key -> noise
    draw : (eta, noise) -> (z_G, log_density)
        All draws (n, dim), and the log density of the mixture at each (n,).
    """

    own: int
    noise: Callable[[Array], Any]
    draw: Callable[[Any, Any], tuple[Array, Array]]


def proposal(
    fm: FederatedModel, guide: GlobalGuide, num_draws: int, share: float = SHARE
) -> Proposal:
    """Build the mixture; the guide alone if its density is known at its own draws only."""
    log_density, spread = guide.log_density, prior_spread(fm)
    parts = len(SCALES) + (spread is not None)
    each = int(share * num_draws / parts)
    own = num_draws - parts * each

    def draw_own(eta: Any, noise: Any) -> tuple[Array, Array]:
        return jax.vmap(guide.draw, (None, 0))(eta, noise)

    if not each or not fm.dim or log_density is None:
        return Proposal(num_draws, lambda key: guide.noise(key, num_draws), draw_own)

    def noise(key: Array) -> Any:
        key_own, key_wide = jax.random.split(key)
        return guide.noise(key_own, own), jax.random.split(key_wide, parts)

    def wider(z: Array) -> list[dist.Distribution]:
        """The other parts of the mixture, around the guide's draws ``z`` (own, dim)."""
        centre, L = z.mean(0), _root(z)
        t = partial(dist.MultivariateStudentT, FREEDOM)
        wide = [t(centre, s * L) for s in SCALES]
        return wide if spread is None else [*wide, t(spread[0], jnp.diag(spread[1]))]

    def draw(eta: Any, noise: Any) -> tuple[Array, Array]:
        z, log_q = draw_own(eta, noise[0])
        others = wider(z)
        far = [d.sample(key, (each,)) for d, key in zip(others, noise[1], strict=True)]
        log_q_far = [jax.vmap(partial(log_density, eta))(x) for x in far]
        z, log_q = jnp.concatenate([z, *far]), jnp.concatenate([log_q, *log_q_far])
        densities = jnp.stack([log_q, *(d.log_prob(z) for d in others)])
        shares = jnp.array([own] + [each] * parts) / num_draws
        return z, jax.nn.logsumexp(jnp.log(shares)[:, None] + densities, axis=0)

    return Proposal(own, noise, draw)


def _root(z: Array) -> Array:
    """A lower triangular root of the covariance of draws (n, dim); of its diagonal for many."""
    n, dim = z.shape
    sd = z.std(0)
    if dim > FULL_UP_TO or n < 10 * dim:
        return jnp.diag(sd)
    standard = (z - z.mean(0)) / sd
    L = jnp.linalg.cholesky(standard.T @ standard / n + 1e-4 * jnp.eye(dim))
    return sd[:, None] * jnp.where(jnp.isfinite(L).all(), L, jnp.eye(dim))


def prior_spread(fm: FederatedModel) -> tuple[np.ndarray, np.ndarray] | None:
    """Median and half the central 68 % of prior draws (dim,); None where it cannot be drawn."""
    if not fm.dim:
        return None
    draws = fm.draw_prior(jax.random.key(0), PRIOR_DRAWS)
    if draws is None:
        return None
    low, middle, high = np.quantile(np.asarray(draws), [0.16, 0.5, 0.84], axis=0)
    spread = (high - low) / 2
    known = np.isfinite(spread).all() and (spread > 0).all()
    return (middle, spread) if known else None
