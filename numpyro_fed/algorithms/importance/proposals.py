r"""Where the importance correction looks for the posterior: the fitted guide, and wider.

A guide that is too narrow, or that sits in one of several modes, gives weights that look perfect at
its own draws. So a fifth of the draws comes from wider distributions, and all are weighed by the
density of the mixture (Hesterberg 1995; Owen and Zhou 2000, "Safe and effective importance
sampling", with fixed numbers of draws from each part)

.. math::
    q_{\text{mix}} = \alpha_0\, q + \sum_{k} \alpha_k\, t_3(\bar m, (s_k L)(s_k L)')
    + \alpha_p\, t_3(m_p, \mathrm{diag}(s_p^2))
    + \sum_{l} \alpha_l\, t_3(\bar m, (s_l L)(s_l L)')_r\, p(z_c \mid z_r),

with the mean and a root of the covariance of ``q``, and median and spread of the prior. No weight
is then larger than where one of the parts meets the posterior, and a mode that the guide never
visits shows in few draws of large weight. The last parts look into the necks of funnels, such as
``beta ~ Normal(0, tau)`` for a small ``tau``: the latents :math:`z_c` whose prior others set come
from this prior, and only the others, :math:`z_r`, from around the guide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_fed.guides.gaussian import GlobalGuide
from numpyro_fed.model.binding import Theta
from numpyro_fed.model.priors import GlobalPrior
from numpyro_fed.model.split import FederatedModel

SHARE = 0.2  # of the draws, from what is wider than the guide
SCALES = (2.5, 8.0, 25.0)  # times the guide's own
NECK_SCALES = (2.5, 8.0)
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
    draw : (theta, eta, noise) -> (z_G, log_density)
        All draws (n, dim), and the log density of the mixture at each (n,).
    """

    own: int
    noise: Callable[[Array], Any]
    draw: Callable[[Theta, Any, Any], tuple[Array, Array]]


class Part(NamedTuple):
    """A wider part of the mixture: one draw by its key, and its log density at a point."""

    sample: Callable[[Array], Array]
    log_prob: Callable[[Array], Array]


def proposal(
    fm: FederatedModel, guide: GlobalGuide, num_draws: int, share: float = SHARE
) -> Proposal:
    """Build the mixture; the guide alone if its density is known at its own draws only."""
    log_density, spread = guide.log_density, prior_spread(fm)
    roots = _roots(fm)
    parts = len(SCALES) + (spread is not None) + (len(NECK_SCALES) if roots is not None else 0)
    each = int(share * num_draws / parts)
    own = num_draws - parts * each

    def draw_own(eta: Any, noise: Any) -> tuple[Array, Array]:
        return jax.vmap(guide.draw, (None, 0))(eta, noise)

    if not each or not fm.dim or log_density is None:
        return Proposal(
            num_draws,
            lambda key: guide.noise(key, num_draws),
            lambda theta, eta, noise: draw_own(eta, noise),
        )

    def noise(key: Array) -> Any:
        key_own, key_wide = jax.random.split(key)
        return guide.noise(key_own, own), jax.random.split(key_wide, parts)

    def wider(theta: Theta, z: Array) -> list[Part]:
        """The other parts of the mixture, around the guide's draws ``z`` (own, dim)."""
        centre, L = z.mean(0), _root(z)
        wide = [_student(centre, s * L) for s in SCALES]
        if spread is not None:
            wide.append(_student(jnp.asarray(spread[0]), jnp.diag(spread[1])))
        if roots is not None:
            wide += [_neck(fm, roots, theta, centre, s * L) for s in NECK_SCALES]
        return wide

    def draw(theta: Theta, eta: Any, noise: Any) -> tuple[Array, Array]:
        z, log_q = draw_own(eta, noise[0])
        others = wider(theta, z)
        far = [
            jax.vmap(part.sample)(jax.random.split(key, each))
            for part, key in zip(others, noise[1], strict=True)
        ]
        log_q_far = [jax.vmap(partial(log_density, eta))(x) for x in far]
        z, log_q = jnp.concatenate([z, *far]), jnp.concatenate([log_q, *log_q_far])
        densities = jnp.stack([log_q, *(jax.vmap(part.log_prob)(z) for part in others)])
        shares = jnp.array([own] + [each] * parts) / num_draws
        return z, jax.nn.logsumexp(jnp.log(shares)[:, None] + densities, axis=0)

    return Proposal(own, noise, draw)


def _student(centre: Array, L: Array) -> Part:
    found = dist.MultivariateStudentT(FREEDOM, centre, L)
    return Part(found.sample, found.log_prob)


def _neck(fm: FederatedModel, roots: np.ndarray, theta: Theta, centre: Array, L: Array) -> Part:
    """The coordinates ``roots`` from around the guide, all others from their prior given these."""
    prior, rows = cast(GlobalPrior, fm.global_prior), L[roots]
    above = _student(centre[roots], jnp.linalg.cholesky(rows @ rows.T))

    def sample(key: Array) -> Array:
        key_above, key_below = jax.random.split(key)
        z = centre.at[roots].set(above.sample(key_above))
        return prior.draw(key_below, theta, z)

    def log_prob(z: Array) -> Array:
        return above.log_prob(z[roots]) + prior.log_density(theta, z)

    return Part(sample, log_prob)


def _roots(fm: FederatedModel) -> np.ndarray | None:
    """The coordinates whose prior no other latent sets; None if that is all, or unknown."""
    prior = fm.global_prior
    if prior is None or not (children := prior.children()):
        return None
    theta = jax.eval_shape(fm.init_theta, jax.random.key(0))
    try:
        jax.eval_shape(prior.draw, jax.random.key(0), theta, jnp.zeros(fm.dim))
    except NotImplementedError:  # a distribution that cannot be drawn from
        return None
    below = np.concatenate([np.arange(s.start, s.stop) for s in children])
    return np.setdiff1d(np.arange(fm.dim), below)


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
