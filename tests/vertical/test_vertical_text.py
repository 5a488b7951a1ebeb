"""Vertical models: the text, its halves, and the handlers that make other models of it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from laid_open import inside
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from vertical_problems import (
    KEY,
    data,
    drawn,
    gaussian,
    gaussian_data,
    known_noise,
    linear,
    log_det,
    logistic,
    overdispersed,
)

import numpyro_fed as nf
from numpyro_fed.text.vertical import Text, split


def unconstrained(half, values):
    at = {s.name: half.structure.supports[s.name] for s in half.named("latent")}
    parts = [
        jnp.ravel(numpyro.distributions.biject_to(support).inv(values[name]))
        for name, support in at.items()
    ]
    return jnp.concatenate([jnp.zeros(0), *parts])


@pytest.mark.slow
def test_latents_of_the_sum_are_fitted():
    result = nf.VFL(overdispersed).run(KEY, 3, *data(), progress_bar=False)
    assert result.start is not None
    assert result.sample_posterior(KEY, 2)["u"].shape == (2, 12)


@pytest.mark.parametrize("model", slow_but([gaussian, logistic, overdispersed], 1))
def test_halves_add_up_to_the_joint_density(model):
    xs, y = data()
    model_, server, clients, _ = split(Text.of(model, (xs, y), {}))
    values = drawn(model, xs, y)
    own, total = 0.0, 0.0
    for j, (half, held) in enumerate(zip(model_.clients, clients, strict=True)):
        mine = {n: values[f"client_{j}/{n}"] for n in (s.name for s in half.named("latent"))}
        z = unconstrained(half, mine)
        g, prior = model_.predict(half, {}, z, held)
        total, own = total + g, own + prior - log_det(half, z)
    z = unconstrained(model_.server, values)
    prior, likelihood = model_.log_server({}, z, total, server)
    found = own + prior + likelihood - log_det(model_.server, z)
    expected = log_density(model, (xs, y), {}, values)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_parties_hold():
    xs, y = data()
    model, server, clients, _ = split(Text.of(gaussian, (xs, y), dict(offset=np.ones(12))))
    assert set(server.arrays) == {"y", "offset"}
    assert [set(c.arrays) for c in clients] == [{"columns"}] * 3
    assert (model.response, model.by_row, model.rows) == (("y",), {"y"}, 12)
    _, _, clients, _ = split(Text.of(gaussian, (xs, y), {}), share_response=True)
    assert set(clients[0].kwargs["shared"]) == {"y"}


@pytest.mark.slow
def test_predictive_for_new_rows():
    xs, y = data()
    vfl = nf.VFL(gaussian, start=None)
    draws = vfl.run(KEY, 5, xs, y, progress_bar=False).sample_posterior(KEY, 7)
    new, _ = data(n=4, seed=1)
    assert Predictive(gaussian, draws)(KEY, new)["y"].shape == (7, 4)


def posterior_of(model, xs, y):
    """Mean and covariance of (b, beta) under a Gaussian model, its auxiliary variables integrated
    out, from the Hessian of its log density.
    """
    names = ["b", *(f"client_{j}/beta" for j in range(len(xs)))]
    sizes = [(), *((x.shape[1],) for x in xs)]
    rest = [f"client_{j}/z" for j in range(len(xs))]
    auxiliary = "client_0/z" in drawn(model, xs, y)
    names, sizes = names + rest * auxiliary, sizes + [y.shape] * (len(xs) * auxiliary)
    ends = np.cumsum([int(np.prod(s)) for s in sizes])

    def log_joint(flat):
        parts = jnp.split(flat, ends[:-1])
        values = {n: p.reshape(s) for n, p, s in zip(names, parts, sizes, strict=True)}
        return log_density(model, (xs, y), {}, values)[0]

    zero = jnp.zeros(ends[-1])
    slope, curvature = jax.grad(log_joint)(zero), jax.hessian(log_joint)(zero)
    covariance = jnp.linalg.inv(-curvature)
    own = sum(x.shape[1] for x in xs) + 1
    return (covariance @ slope)[:own], covariance[:own, :own]


@pytest.mark.slow
def test_augmented_gaussian_has_the_noise_of_the_sum(double):
    """``z_j`` add ``J rho^2`` to the variance of the response."""
    (xs, y), rho = gaussian_data(), 0.6
    mean, covariance = posterior_of(nf.handlers.augment(known_noise, rho), xs, y)

    def wide(xs, y):
        known_noise(xs, y, (0.7**2 + len(xs) * rho**2) ** 0.5)

    expected = posterior_of(wide, xs, y)
    np.testing.assert_allclose(mean, expected[0], atol=1e-8)
    np.testing.assert_allclose(covariance, expected[1], atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("handler", [nf.handlers.augment, nf.handlers.power_likelihood])
def test_models_approach_the_true_one_as_rho_squared(handler, double):
    xs, y = gaussian_data()
    mean, covariance = posterior_of(known_noise, xs, y)
    errors = []
    for rho in (0.08, 0.04, 0.02, 0.01):
        m, c = posterior_of(handler(known_noise, rho), xs, y)
        sd = jnp.sqrt(jnp.diagonal(covariance))
        errors.append(
            [jnp.abs((m - mean) / sd).max(), jnp.abs(jnp.diagonal(c) ** 0.5 / sd - 1).max()]
        )
    errors = np.array(errors)
    orders = np.log2(errors[:-1] / errors[1:])
    assert (abs(orders[-1] - 2) < 0.1).all(), orders
    assert (errors[-1] < 2e-3).all(), errors


@pytest.mark.slow
def test_one_method_runs_in_either_precision():
    """Of yes and no alone the precision is not in the data."""
    xs = [np.random.default_rng(j).integers(0, 2, (12, 2)).astype(bool) for j in range(2)]
    y = np.random.default_rng(2).integers(0, 2, 12).astype(bool)

    def counted(x):
        return linear(jnp.asarray(x, float))

    def model(xs, y):
        eta = nf.client_sum("client", counted, xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    vfl = nf.VFL(model, start=None)
    single = vfl.run(jax.random.key(0), 2, xs, y, progress_bar=False)
    with jax.enable_x64(True):
        double = vfl.run(jax.random.key(0), 2, xs, y, progress_bar=False)
    assert [inside(r).vertical.model.dtype for r in (single, double)] == ["float32", "float64"]


@pytest.mark.slow
def test_plain_arguments_of_the_model_count():
    """A flag changes the text, and so the program."""

    def model(xs, y, precise):
        eta = nf.client_sum("client", linear, xs)
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta, 0.1 if precise else 5.0), obs=y)

    vfl = nf.VFL(model, start=None)
    losses = [vfl.run(KEY, 1, *data(), flag, progress_bar=False).losses[0] for flag in (0, 1)]
    fresh = nf.VFL(model, start=None).run(KEY, 1, *data(), 1, progress_bar=False).losses[0]
    assert losses[1] == fresh != losses[0]
