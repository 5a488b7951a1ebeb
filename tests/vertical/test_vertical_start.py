"""Vertical models: where a run begins."""

import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from laid_open import inside, laid_open_columns
from vertical_problems import (
    KEY,
    data,
    exact_of_known_noise,
    gaussian_data,
    joint_normal,
    known_noise,
    logistic,
    root_of_guide,
)

import numpyro_fed as nf


def begun(vfl, *data):
    """A result of no rounds."""
    return laid_open_columns(vfl, *data).begun(KEY)


@pytest.mark.slow
def test_a_run_begins_at_the_mode_with_each_partys_curvature(double):
    """Of a Gaussian: the exact mode, and the inverse of each diagonal block of the precision."""
    xs, y = gaussian_data()
    mean, _, _ = exact_of_known_noise(xs, y)
    result = begun(nf.VFL(known_noise, rank=0), xs, y)
    assert result.start.num_exchanges < 40
    found, covariance = joint_normal(result)
    np.testing.assert_allclose(found, mean, atol=0.02)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    precision = np.eye(x.shape[1]) + x.T @ x / 0.49
    stop = 0
    for d in (1, *(x.shape[1] for x in xs)):
        block = slice(stop, stop + d)
        inverse = np.linalg.inv(precision[block, block])
        np.testing.assert_allclose(covariance[block, block], inverse, rtol=1e-6)
        stop += d


@pytest.mark.slow
def test_a_run_begins_with_the_covariance_of_all_parties(double):
    xs, y = gaussian_data()
    result = begun(nf.VFL(known_noise), xs, y)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.49)
    np.testing.assert_allclose(joint_normal(result)[1], expected, atol=1e-9)


@pytest.mark.slow
def test_directions_are_found_where_the_basis_does_not_hold_all(double):
    """Two clients, each with a copy of the other's columns but for noise: a few directions in which
    they make up for each other.
    """
    r = np.random.default_rng(2)
    x = r.normal(size=(60, 6))
    xs = [x, x + np.array([0.01, 0.1, 1, 10, 10, 10]) * r.normal(size=x.shape)]
    y = r.normal(size=60)
    result = begun(nf.VFL(known_noise, rank=2), xs, y)
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.49)
    found = joint_normal(result)[1]
    np.testing.assert_allclose(found[1, 1], expected[1, 1], rtol=0.05)
    np.testing.assert_allclose(found[1, 7], expected[1, 7], rtol=0.05)


@pytest.mark.slow
def test_raw_columns_that_parties_share_in_single_precision():
    """An intercept at the server, years at two clients: the exact posterior."""
    r = np.random.default_rng(0)
    year = 2000 + r.uniform(0, 10, 40)
    xs = [year[:, None], np.stack([3 * year + 8 * r.normal(size=40), r.normal(size=40)], 1)]
    y = 0.3 * year + 0.7 * r.normal(size=40)
    vague = models.sum_and_level(0.7, 10)
    # Steps of 0.03 shake means by up to 0.085 sd, with four keys; after 1,000 they have decayed.
    result = nf.VFL(vague).run(KEY, 1_000, xs, y, progress_bar=False)
    x = np.concatenate([np.ones((40, 1)), *xs], 1)
    covariance = np.linalg.inv(np.eye(4) / 100 + x.T @ x / 0.49)
    sd = np.sqrt(np.diag(covariance))
    mean, found = joint_normal(result)
    assert (abs(mean - covariance @ x.T @ y / 0.49) < 0.05 * sd).all()
    np.testing.assert_allclose(np.sqrt(np.diag(found)), sd, rtol=0.07)


@pytest.mark.slow
def test_units_of_columns_do_not_matter():
    """Columns in other units: draws of what they add are the same."""
    (xs, y), units = (
        gaussian_data(),
        [np.array([1e-3, 1.0]), np.array([1e4]), np.array([5.0, 1e-2])],
    )

    def model(xs, units, y):
        def scaled_prior(x):
            x, unit = x
            beta = numpyro.sample("beta", dist.Normal(0, 1 / unit).to_event(1))
            return x @ beta

        b = numpyro.sample("b", dist.Normal(0, 1))
        eta = nf.client_sum("client", scaled_prior, list(zip(xs, units, strict=True)))
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 0.7), obs=y)

    found = []
    for unit in ([np.ones_like(u) for u in units], units):
        scaled_xs = [x * u for x, u in zip(xs, unit, strict=True)]
        fit = nf.VFL(model).run(KEY, 200, scaled_xs, unit, y, progress_bar=False)
        draws = fit.sample_posterior(KEY, 500)
        found.append([draws[f"client_{j}/beta"] * unit[j] for j in range(3)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * np.std(a, 0).max())


def test_with_rho_nothing_is_sent_without_noise_unasked():
    xs, y = data()
    searched = ["try", "turn", "spread", "begin at the mode"]
    for settings, begins in (
        (dict(), searched),
        (dict(rho=1.0), ["begin at zero"]),
        (dict(rho=1.0, start="mode"), searched),
        (dict(rho=1.0, start=None), []),
        (dict(start=None), []),
    ):
        built = laid_open_columns(nf.VFL(logistic, **settings), xs, y).built
        assert [x.name for round_ in built.search_rounds for x in round_.exchanges] == begins


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["augmented", "power"])
def test_with_rho_clients_know_their_units_by_themselves(likelihood, double):
    """The curvature of a linear predictor under its auxiliary variable and prior, whatever units
    its columns have; no party is sent anything of another.
    """
    xs, y = gaussian_data()
    xs = [x * scale for x, scale in zip(xs, (1e-4, 1.0, 1e4), strict=True)]
    vfl = nf.VFL(known_noise, rho=0.5, likelihood=likelihood, share_response=True)
    result = begun(vfl, xs, y)
    assert result.start is None
    for j, x in enumerate(xs):
        root = root_of_guide(result.client_params(j)["guide"]["latents"])
        expected = np.linalg.inv(np.eye(x.shape[1]) + x.T @ x / 0.25)
        np.testing.assert_allclose(root @ root.T, expected, rtol=1e-6)
    at_server = result.params["guide"]["latents"]["loc"]  # the server's mode where the sum is zero
    np.testing.assert_allclose(at_server, y.sum() / (len(y) + 0.49), rtol=1e-6)
    search, told = inside(result).built.search, []
    server = search.algorithm.init_server(KEY)
    search.run(lambda _, down: told.append(down), KEY, server, inside(result).server_data)
    (down,) = told
    assert not down.at_best.slope.any()
    assert (down.at_best.curvature == 4.0).all()


@pytest.mark.slow
def test_scales_of_priors_are_held_where_a_run_begins(double):
    """Coefficients begin at the mode that they have where their scale is at the median of its
    prior, with the curvature that they have there; the log scale, of which a joint mode would be at
    minus infinity, at that median, as wide as its prior.
    """

    def hierarchical(x):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        beta = numpyro.sample("beta", dist.Normal(0, tau).expand([x.shape[-1]]).to_event(1))
        return x @ beta

    def model(xs, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        eta = nf.client_sum("client", hierarchical, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 0.7), obs=y)

    xs, y = gaussian_data()
    result = begun(nf.VFL(model), xs, y)
    found, spread = map(np.asarray, joint_normal(result))
    places = {s.name: s.start for s in result.sites}
    scales = [places[f"client_{j}/tau"] for j in range(3)]
    rest = np.setdiff1d(np.arange(len(found)), scales)
    low, median, high = np.log([0.2019, 0.6745, 1.4051])  # quantiles of a half-normal variable
    np.testing.assert_allclose(found[scales], median, atol=4.5 * 1.25 / 500**0.5)
    sd = np.sqrt(np.diag(spread)[scales])
    np.testing.assert_allclose(sd, (high - low) / 2, atol=4.5 * 1.5 / 500**0.5)
    assert (sd <= 1 + 1e-6).all()
    x = np.concatenate([np.ones((len(y), 1)), *xs], 1)
    taus = np.repeat(np.exp(found[scales]), [a.shape[1] for a in xs])
    precision = np.diag(np.concatenate([[1.0], taus**-2.0]))
    covariance = np.linalg.inv(precision + x.T @ x / 0.49)
    mean = covariance @ x.T @ y / 0.49
    np.testing.assert_allclose(found[rest], mean, atol=0.02)
    np.testing.assert_allclose(spread[np.ix_(rest, rest)], covariance, atol=1e-7)


@pytest.mark.slow
def test_where_there_is_no_mode_to_begin_at_runs_begin_at_zero():
    def weights(x):
        return x @ numpyro.param("w", jnp.zeros(x.shape[-1]))

    def model(xs, y):
        eta = nf.client_sum("client", weights, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    xs, y = data()
    result = nf.VFL(model).run(KEY, 2, xs, y, progress_bar=False)
    assert result.start is None
    assert np.isfinite(result.losses).all()


@pytest.mark.slow
def test_latents_above_others_begin_at_the_median_of_their_prior():
    """A mean near 1,000 under a prior that says so, at the server and at clients."""

    def predictor(x):
        mu = numpyro.sample("mu", dist.Normal(1_000, 50))
        tau = numpyro.sample("tau", dist.LogNormal(-3, 0.1))
        beta = numpyro.sample("beta", dist.Normal(mu, tau).expand([x.shape[1]]).to_event(1))
        return x @ beta

    def model(xs, y=None):
        top = numpyro.sample("top", dist.Normal(-200, 0.5))
        b = numpyro.sample("b", dist.Normal(top, 1))
        eta = nf.client_sum("client", predictor, xs)
        with numpyro.plate("row", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, 1), obs=y)

    r = np.random.default_rng(0)
    xs = [r.normal(size=(40, p)) for p in (2, 3)]
    y = -200 + 1_000 * sum(x.sum(1) for x in xs) + r.normal(size=40)
    result = nf.VFL(model).run(KEY, 1, xs, y, progress_bar=False)
    draws = result.sample_posterior(KEY, 500)
    for name, place, of_prior, sd in (
        ("client_0/mu", 1_000, 50, 1.0),  # one at most
        ("client_1/tau", np.exp(-3), 0.1 * np.exp(-3), 0.1 * np.exp(-3)),
        ("top", -200, 0.5, 0.5),
    ):
        error = 1.25 * np.hypot(of_prior, sd) / np.sqrt(500)  # of two medians of 500 draws
        assert abs(np.median(draws[name]) - place) < 4.5 * error, name
        assert 0.7 * sd < np.std(draws[name]) < 1.4 * sd, name
    off = draws["client_1/beta"].mean(0) - np.median(draws["client_1/mu"])
    assert (abs(off) < 1).all()
