"""Models of which PVI is known to be exact or checked in parts, and what holds at every fit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
from laid_open import inside
from problems import jitter

import numpyro_fed as nf

KEY = jax.random.key(0)
QUIET = dict(progress_bar=False)


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


logistic = models.logistic(2)


def logistic_rows(n=24, d=2, seed=5):
    r = np.random.default_rng(seed)
    x = r.normal(size=(n, d))
    return dict(x=x, y=r.binomial(1, 1 / (1 + np.exp(-x @ np.arange(1.0, d + 1)))).astype(float))


def glmm_inside(x, y=None):
    """As ``glmm``, with a prior inside of the family."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[-1]]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, scale))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


QUICK = nf.local.Optax(steps=10, tolerance=np.inf)


def total_of_factors(result):
    return jax.tree.map(
        lambda *leaves: sum(leaves), *[result.factor(j) for j in range(result.num_silos)]
    )


def assert_sum_rule(result):
    server = result.state.server
    prior = inside(result).factors.globals.prior(server.params.theta)
    factors = total_of_factors(result)

    def equal(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(equal, factors, server.total)
    jax.tree.map(lambda p, f, q: equal(p + f, q), prior, factors, server.params.guide)


def fixed_noise(monkeypatch, points=32):
    """Expectations over ``points`` fixed nodes, whatever the key: PVI without Monte Carlo noise."""
    import numpyro_fed.pvi.method as module

    find = module.globals_of

    def globals_of(*args):
        chosen = find(*args)
        dim = chosen.family.dim
        nodes = jitter(jnp.zeros((points, dim)), 1.0)
        nodes = (nodes - nodes.mean(0)) @ jnp.linalg.inv(jnp.linalg.cholesky(jnp.cov(nodes.T)).T)
        names = list(chosen.family.fit(lambda z: z.sum()))
        assert names == ["gaussian"]

        class OnNodes(type(chosen.family)):
            of_normals = False

            def noise(self, key, n):
                return {"gaussian": nodes}

        family = OnNodes(dim, chosen.family.members)
        return chosen._replace(family=family)

    monkeypatch.setattr(module, "globals_of", globals_of)


def eta_of(result):
    return result.natural_parameters()["gaussian"]


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)
