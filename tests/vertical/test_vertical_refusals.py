"""Vertical models: texts, arguments and settings that cannot be."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from laid_open import laid_open_columns
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal
from vertical_problems import KEY, data, drawn, linear, logistic

import numpyro_fed as nf


def without(xs, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b, 1), obs=y)


def unread(xs, y):
    nf.client_sum("client", linear, xs)
    without(xs, y)


def two(xs, y):
    eta = nf.client_sum("client", linear, xs) + nf.client_sum("other", linear, xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def with_silos(xs, y):
    eta = nf.client_sum("client", linear, xs)
    with nf.silo_plate("row", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def reads_columns(xs, y):
    eta = nf.client_sum("client", linear, xs)
    numpyro.sample("y", dist.Normal(eta + xs[1][:, 0], 1), obs=y)


def reads_latent(xs, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    eta = nf.client_sum("client", lambda x: tau * linear(x), xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def reads_response(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x) * y, xs)
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def columns_of_latents(xs, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    eta = nf.client_sum("client", linear, [tau * x for x in xs])
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def summarised(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x)[:3], xs)
    numpyro.sample("y", dist.Normal(eta.mean(), 1), obs=y)


def response_as_column(xs, y):
    eta = nf.client_sum("client", lambda c: linear(c[0]) + c[1], [(x, y) for x in xs])
    numpyro.sample("y", dist.Normal(eta, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (without, "no client_sum"),
        (unread, "no site .*client_sum"),
        (two, "2 client_sums"),
        (with_silos, "silo_plate 'row'"),
        (reads_columns, "'xs.1' outside"),
        (reads_latent, "latent of the server"),
        (reads_response, "argument 'y'"),
        (columns_of_latents, "client 0 .*latent"),
        (summarised, "given 12 rows"),
        (response_as_column, "columns of client 0"),
    ],
)
def test_texts_that_cannot_be_split(model, words):
    xs, y = data()
    with pytest.raises((nf.ModelError, nf.DataError), match=words):
        nf.VFL(model).run(KEY, 1, xs, y.astype(np.float32), progress_bar=False)


def test_arguments_that_do_not_fit():
    xs, y = data()
    run = nf.VFL(logistic).run
    with pytest.raises(nf.DataError, match=r"client 1 .* 5 .* client 0 .* 12"):
        run(KEY, 1, [xs[0], xs[1][:5]], y)
    with pytest.raises(nf.DataError, match=r"response 'y'"):
        run(KEY, 1, [xs[0], np.column_stack([xs[1], y]).astype(np.float32)], y)
    with pytest.raises(nf.DataError, match="arguments"):
        run(KEY, 1, xs, y, z=3)
    with pytest.raises(nf.DataError, match="NaN"):
        run(KEY, 1, [xs[0] * np.nan], y)
    with pytest.raises(nf.DataError, match="no clients"):
        nf.client_sum("client", linear, [])
    with pytest.raises(nf.DataError, match=r"list .*columns"):
        nf.client_sum("client", linear, xs[0])
    with pytest.raises(nf.ModelError, match="2 predictors for 3 clients"):
        nf.client_sum("client", [linear, linear], xs)
    with pytest.raises(nf.ModelError, match="must be a function"):
        nf.client_sum("client", [linear, 3, linear], xs)


@pytest.mark.parametrize("rho", [0, -1.0, "small", True])
def test_rho_must_be_positive(rho):
    for make in (nf.handlers.augment, nf.handlers.power_likelihood):
        with pytest.raises(ValueError, match="rho=None"):
            make(logistic, rho)
    with pytest.raises(ValueError, match="rho=None"):
        nf.VFL(logistic, rho=rho)


def test_settings_that_do_not_fit():
    for settings, words in (
        (dict(likelihood="power"), "give rho"),
        (dict(local_steps=2), "give rho"),
        (dict(likelihood="power", rho=1.0), "share_response=True"),
        (dict(likelihood="tempered", rho=1.0), "expected 'augmented' or 'power'"),
        (dict(batch_size=0), "batch_size .*positive"),
        (dict(rank=1.5), "rank .*positive"),
        (dict(rho=np.inf), "expected a positive number"),
        (dict(local_steps=2, rho=1.0, auxiliary="amortised"), "auxiliary='mean_field' alone"),
        (dict(local_steps=2, rho=1.0, likelihood="power"), "auxiliary='mean_field' alone"),
        (dict(rank=2, local_steps=2, rho=1.0), "say rank=0"),
        (dict(start="prior"), "expected 'auto', 'mode', 'own' or None"),
        (dict(start="own"), "say start='mode', or give rho"),
    ):
        with pytest.raises(ValueError, match=words):
            nf.VFL(logistic, **settings)
    xs, y = data()
    with pytest.raises(nf.GuideError, match="auxiliary='full'"):
        nf.VFL(logistic, rho=1.0, auxiliary="full").run(KEY, 1, xs, y)
    guide = AutoLowRankMultivariateNormal(logistic)
    with pytest.raises(nf.GuideError, match="rank=2"):
        nf.VFL(logistic, guide=guide, rank=2).run(KEY, 1, xs, y)
    with pytest.raises(ValueError, match="more than the 12 rows"):
        nf.VFL(logistic, batch_size=13).run(KEY, 1, xs, y)


def test_power_likelihood_refuses_latents_of_the_sum():
    def model(xs, y):
        eta = nf.client_sum("client", linear, xs)
        with numpyro.plate("obs", len(y)):
            u = numpyro.sample("u", dist.Normal(eta, 1))
            numpyro.sample("y", dist.Normal(u, 1), obs=y)

    xs, y = data()
    with pytest.raises(nf.ModelError, match=r"'u' .*client_sum"):
        drawn(nf.handlers.power_likelihood(model, 1.0), xs, y)


def test_methods_refuse_latents_of_the_sum_under_the_power_likelihood():
    def model(xs, y):
        eta = nf.client_sum("client", linear, xs)
        level = numpyro.sample("level", dist.Normal(eta.mean(), 0.1))
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta + level, 1), obs=y)

    settings = dict(rho=1.0, likelihood="power", share_response=True)
    for method in (nf.VFL(model, **settings), nf.SOUL(model, **settings)):
        with pytest.raises(nf.ModelError, match=r"'level' .*client_sum"):
            method.run(KEY, 1, *data())


def centred_at_server(xs, y):
    eta = nf.client_sum("client", linear, xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta - eta.mean(), 1), obs=y)


def centred_at_client(xs, y):
    eta = nf.client_sum("client", lambda x: linear(x - x.mean(0)), xs)
    with numpyro.plate("obs", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


@pytest.mark.parametrize("model", [centred_at_server, centred_at_client])
def test_minibatches_of_rows_that_read_others_are_refused(model):
    with pytest.raises(nf.ModelError, match="other rows"):
        nf.VFL(model, batch_size=4).run(KEY, 1, *data())


def test_a_server_is_not_given_what_clients_have_parts_of():
    def model(x, y):
        eta = nf.client_sum("client", linear, [x[:, :2], x[:, 2:]])
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta + x[:, 0], 1), obs=y)

    r = np.random.default_rng(0)
    with pytest.raises(nf.ModelError, match="'x' outside"):
        nf.VFL(model).run(KEY, 1, r.normal(size=(12, 5)), r.normal(size=12))


def test_a_start_that_is_asked_for_and_not_possible_is_said():
    def weights(x):
        return x @ numpyro.param("w", jnp.zeros(x.shape[-1]))

    def model(xs, y):
        eta = nf.client_sum("client", weights, xs)
        with numpyro.plate("obs", len(y)):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    with pytest.warns(UserWarning, match="start='mode'"):
        laid_open_columns(nf.VFL(model, start="mode"), *data(), runtime="host")


def test_handlers_need_a_client_sum():
    for handler in (nf.handlers.augment, nf.handlers.power_likelihood):
        with pytest.raises(nf.ModelError, match="no client_sum"):
            drawn(handler(without, 1.0), *data())


def test_settings_of_soul_that_do_not_fit():
    for settings, words in (
        (dict(rho=0.0), "expected a positive number"),
        (dict(rho=1.0, likelihood="exact"), "expected 'augmented' or 'power'"),
        (dict(rho=1.0, likelihood="power"), "share_response=True"),
        (dict(rho=1.0, step_size=3.0), "stable between 0 and 2"),
        (dict(rho=1.0, num_steps=0), "num_steps .*positive"),
    ):
        with pytest.raises(ValueError, match=words):
            nf.SOUL(logistic, **settings)
