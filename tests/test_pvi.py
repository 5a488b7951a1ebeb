"""PVI: exact on conjugate models, the sum rule, its properties, and what happens to bad replies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from problems import cut, glmm, glmm_silos, jitter

import numpyro_fed as nf
from numpyro_fed import expfam
from numpyro_fed.algorithms.pvi import Status, effective_factor

KEY = jax.random.key(0)
QUIET = dict(progress_bar=False)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Conjugate(NamedTuple):
    """A model, its rows, and the exact posterior: ``{site: {moment: value}}``."""

    model: Any
    rows: dict[str, np.ndarray]
    exact: dict[str, dict[str, Any]]


def mean():
    def model(y):
        m = numpyro.sample("m", dist.Normal(1.0, 2.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 0.5), obs=y)

    y = np.random.default_rng(0).normal(size=12)
    precision = 1 / 4 + len(y) * 4
    exact = dict(mean=(1 / 4 + 4 * y.sum()) / precision, variance=1 / precision)
    return Conjugate(model, dict(y=y), {"m": exact})


def linear_regression():
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0.5, 2.0))
        b = numpyro.sample("b", dist.Normal(a, 1.0).expand([2]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, 0.7), obs=y)

    r = np.random.default_rng(1)
    x, y = r.normal(size=(12, 2)), r.normal(size=12)
    design = np.column_stack([np.ones(12), x])
    to_a = np.array([[-1.0, 1, 0], [-1, 0, 1]])
    precision = np.diag([1 / 4, 0, 0]) + to_a.T @ to_a + design.T @ design / 0.49
    covariance = np.linalg.inv(precision)
    m = covariance @ (np.array([0.5 / 4, 0, 0]) + design.T @ y / 0.49)
    return Conjugate(
        model,
        dict(x=x, y=y),
        {
            "a": dict(mean=m[0], variance=covariance[0, 0]),
            "b": dict(mean=m[1:], covariance_matrix=covariance[1:, 1:]),
        },
    )


def beta_bernoulli():
    def model(y):
        p = numpyro.sample("p", dist.Beta(2.0, 0.7).expand([2]))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(p).to_event(1), obs=y)

    y = np.random.default_rng(2).binomial(1, [0.3, 0.9], (12, 2)).astype(float)
    exact = dist.Beta(2 + y.sum(0), 0.7 + (1 - y).sum(0))
    return Conjugate(model, dict(y=y), {"p": dict(mean=exact.mean, variance=exact.variance)})


def gamma_poisson():
    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 0.5))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    y = np.random.default_rng(3).poisson(4.0, 12)
    exact = dist.Gamma(3.0 + y.sum(), 0.5 + len(y))
    return Conjugate(model, dict(y=y), {"rate": dict(mean=exact.mean, variance=exact.variance)})


def dirichlet_categorical():
    def model(y):
        p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.5, 0.6, 2.0])))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Categorical(p), obs=y)

    y = np.random.default_rng(4).integers(0, 3, 12)
    exact = dist.Dirichlet(np.array([1.5, 0.6, 2.0]) + np.bincount(y, minlength=3))
    return Conjugate(model, dict(y=y), {"p": dict(mean=exact.mean, variance=exact.variance)})


CONJUGATE = [mean, linear_regression, beta_bernoulli, gamma_poisson, dirichlet_categorical]


def assert_exact(result, exact, rtol=1e-6):
    posterior = result.posterior()
    for site, moments in exact.items():
        for name, value in moments.items():
            np.testing.assert_allclose(getattr(posterior[site], name), value, rtol=rtol)


@pytest.mark.parametrize("problem", CONJUGATE)
@pytest.mark.parametrize("sizes", [(5, 3, 4), (1,) * 12])
def test_one_pass_is_exact_on_conjugate_models(problem, sizes):
    model, rows, exact = problem()
    result = nf.PVI(model).run(KEY, 1, cut(rows, sizes), **QUIET)
    assert_exact(result, exact)
    assert result.communications == len(sizes)


@pytest.mark.parametrize("problem", [mean, gamma_poisson])
def test_one_undamped_synchronous_round_is_exact_on_conjugate_models(problem):
    model, rows, exact = problem()
    pvi = nf.PVI(model, schedule="synchronous", damping=1.0)
    assert_exact(pvi.run(KEY, 1, cut(rows, (5, 3, 4)), **QUIET), exact)


def test_the_evidence_of_a_conjugate_model_is_exact():
    model, rows, _ = mean()
    result = nf.PVI(model).run(KEY, 2, cut(rows, (5, 7)), **QUIET)
    y = rows["y"]
    covariance = 4.0 * np.ones((12, 12)) + 0.25 * np.eye(12)
    exact = dist.MultivariateNormal(np.ones(12), covariance).log_prob(y)
    np.testing.assert_allclose(result.log_evidence, [exact, exact], rtol=1e-6)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def logistic_rows(n=24, d=2, seed=5):
    r = np.random.default_rng(seed)
    x = r.normal(size=(n, d))
    return dict(x=x, y=r.binomial(1, 1 / (1 + np.exp(-x @ np.arange(1.0, d + 1)))).astype(float))


QUICK = nf.local.LBFGS(steps=20, num_particles=8)
SCHEDULES = {
    "sequential": nf.schedules.Sequential("random"),
    "synchronous": nf.schedules.Synchronous(),
    "random": nf.schedules.Random(2),
    "asynchronous": nf.schedules.Asynchronous([1.0, 1.0, 3.0]),
}


def total_of_factors(result):
    return jax.tree.map(
        lambda *leaves: sum(leaves), *[result.factor(j) for j in range(result.num_silos)]
    )


def assert_sum_rule(result):
    server = result.state.server
    prior = result._fit.factors.globals.prior(server.params["theta"])
    factors = total_of_factors(result)

    def equal(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(equal, factors, server.total)
    jax.tree.map(lambda p, f, q: equal(p + f, q), prior, factors, server.params["guide"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_posterior_is_the_prior_plus_all_factors_at_every_round(name):
    pvi = nf.PVI(logistic, schedule=SCHEDULES[name], local=QUICK)
    silos, state = cut(logistic_rows(), (10, 8, 6)), None
    for _ in range(3):
        result = pvi.run(KEY, 1, silos, init_state=state, **QUIET)
        state = result.state
        assert_sum_rule(result)
        assert float(expfam.inner(*[total_of_factors(result)] * 2)) > 0
