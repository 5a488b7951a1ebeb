"""Vertical models: the importance correction of a fit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from laid_open import asking, inside
from numpyro.infer.util import log_density
from vertical_problems import (
    KEY,
    data,
    exact_of_known_noise,
    gaussian_data,
    joint_normal,
    known_noise,
    log_det,
    logistic,
)

import numpyro_fed as nf
from numpyro_fed.vertical.correction import WeighParties


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rho=0.7), dict(), dict(rank=3, start=None)])
def test_weights_are_those_of_the_joint_density(settings):
    """Log weights by hand, from NumPyro's density of the text and that of the guide."""
    xs, y = data()
    vfl = nf.VFL(logistic, **settings)
    fit = vfl.run(KEY, 20, xs, y, progress_bar=False)
    opened = inside(fit)
    v = opened.vertical
    weighing, ask = WeighParties(v, 40, 7), asking(fit, KEY)
    at_server, log_weights = weighing.run(ask, KEY, fit.state.server, opened.server_data)
    own = opened.one_by_one(ask.silos)
    scales, of = weighing.mixture
    assert list(np.bincount(of)) == [32, 4, 4]
    mean, covariance = joint_normal(fit)
    for s in range(0, 40, 3):
        values = {n: a[s] for n, a in fit.sites_at(at_server, tuple(own)).items()}
        draws = [at_server[s], *(z[s] for z in own)]
        halves = [v.model.server, *v.model.clients]
        log_p = log_density(logistic, (xs, y), {}, values)[0]
        log_p += sum(log_det(half, z) for half, z in zip(halves, draws, strict=True))
        z = jnp.concatenate(draws)
        under = [dist.MultivariateNormal(mean, covariance * s**2).log_prob(z) for s in scales]
        log_q = jax.nn.logsumexp(jnp.array(under), b=jnp.array([0.8, 0.1, 0.1]))
        np.testing.assert_allclose(log_weights[s], log_p - log_q, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(rank=0), dict(rho=0.3, auxiliary="amortised")])
def test_a_corrected_fit_is_the_posterior_of_the_text(settings):
    """Of the exact split, which leaves out correlations, and of the augmented model."""
    xs, y = gaussian_data()
    xs, y = [x.astype(np.float32) for x in xs], y.astype(np.float32)
    mean, sd, evidence = exact_of_known_noise(xs, y)
    optim = optax.adam(optax.cosine_decay_schedule(0.05, 1_000))
    fit = nf.VFL(known_noise, optim=optim, **settings).run(KEY, 1_000, xs, y, progress_bar=False)
    fixed = nf.importance_correct(KEY, fit, 20_000)
    assert fixed.reliable
    assert fixed.to_arviz(KEY, 10**6)["posterior"]["b"].shape[1] == int(fixed.ess)
    draws = fixed.sample_posterior(KEY, 20_000)
    found = np.column_stack([draws["b"], *(draws[f"client_{j}/beta"] for j in range(3))])
    error = fixed.monte_carlo_error + 20_000**-0.5
    assert (abs(found.mean(0) - mean) / sd < 4 * error).all()
    assert (abs(found.std(0) / sd - 1) < 4 * error).all()
    assert abs(fixed.log_evidence - evidence) < 4 * error
    assert "client" in fixed.report() or "'b'" in fixed.report()
    if "rank" in settings:  # what is left out shows: the fit's sds are too small
        assert not fixed.fit_trusted
