"""Models that several test files share; a test whose point is its model has one of its own.

Each function returns a model; the same one for the same numbers, so that it is compiled once.
"""

from functools import cache

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

REAL, POSITIVE = dist.constraints.real_vector, dist.constraints.positive


# --- one number for all rows -----------------------------------------------------------------


@cache
def level(prior_sd=10, sd=1, prior_mean=0):
    """A mean of normal rows, with a normal prior."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(prior_mean, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sd), obs=y)

    return model


@cache
def level_and_scale(prior_sd=10):
    """A mean with a prior, and a scale without one."""

    def model(y):
        scale = numpyro.param("scale", 1.0, constraint=POSITIVE)
        mu = numpyro.sample("mu", dist.Normal(0, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, scale), obs=y)

    return model


@cache
def squared(prior_sd, centre=0.5, sd=1):
    """A mean that is a square: two modes, as far from ``centre`` on either side."""

    def model(y):
        m = numpyro.sample("m", dist.Normal(0, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal((m - centre) ** 2, sd), obs=y)

    return model


@cache
def kinked(prior_sd=10.0, scale=3):
    """A Laplace likelihood as a factor, whose slope jumps at each row."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", -jnp.abs(y - mu) / scale)

    return model


# --- latents of rows -------------------------------------------------------------------------


@cache
def levels(prior_sd=1, row_sd=1, sd=1):
    """A mean of the rows' own means."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, row_sd))
            numpyro.sample("y", dist.Normal(b, sd), obs=y)

    return model


@cache
def rows_alone(row_sd=1, sd=0.5):
    """Latents of rows, and no globals."""

    def model(y):
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, row_sd))
            numpyro.sample("y", dist.Normal(b, sd), obs=y)

    return model


@cache
def coupled(prior_sd=5, sd=0.5):
    """Rows that read each other's latents: these are centred."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, prior_sd))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + b - b.mean(), sd), obs=y)

    return model


@cache
def wards(top_sd=1.0, row_sd=0.5, sd=0.5):
    """Three levels: rows in wards, which a silo holds whole."""

    def model(ward, size, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("ward", size.shape[0]):
            u = numpyro.sample("u", dist.Normal(mu, top_sd))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(u[ward], row_sd))
            numpyro.sample("y", dist.Normal(b, sd), obs=y)

    return model


# --- columns of a table ----------------------------------------------------------------------


@cache
def linear(prior_sd, sd):
    """A linear regression whose noise is known."""

    def model(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, prior_sd).expand([x.shape[1]]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, sd), obs=y)

    return model


@cache
def logistic(prior_sd):
    """A logistic regression."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, prior_sd).expand([x.shape[1]]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    return model


@cache
def linear_and_scale(prior_sd=1000, scale=2.5):
    """A linear regression whose noise is not known."""

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, prior_sd).expand([x.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(scale))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return model


def flat_logistic(x, y):
    """A logistic regression under a flat prior."""
    beta = numpyro.sample("beta", dist.ImproperUniform(REAL, (), (x.shape[1],)))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


# --- columns split over clients --------------------------------------------------------------


@cache
def slopes(prior_sd=1):
    """A client's linear predictor."""

    def predictor(x):
        beta = numpyro.sample("beta", dist.Normal(0, prior_sd).expand([x.shape[-1]]).to_event(1))
        return x @ beta

    return predictor


@cache
def sum_of_clients(sd=1, prior_sd=1):
    """A normal response around the sum of the clients' predictors."""

    def model(xs, y=None):
        eta = nf.client_sum("client", slopes(prior_sd), xs)
        with numpyro.plate("row", eta.shape[0]):
            numpyro.sample("y", dist.Normal(eta, sd), obs=y)

    return model


@cache
def sum_and_level(sd=0.7, prior_sd=1):
    """The same with a latent at the server."""

    def model(xs, y=None):
        b = numpyro.sample("b", dist.Normal(0, prior_sd))
        eta = nf.client_sum("client", slopes(prior_sd), xs)
        with numpyro.plate("obs", eta.shape[0]):
            numpyro.sample("y", dist.Normal(b + eta, sd), obs=y)

    return model


# --- what cannot be split over silos ---------------------------------------------------------


def no_silo_plate(y):
    """Rows in an ordinary plate."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def observed_outside(y):
    """Something observed outside of the silos."""
    numpyro.sample("y", dist.Normal(0, 1), obs=y[0])
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("b", dist.Normal(0, 1))


def global_on_local(y):
    """A global around the rows' latents."""
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)
    numpyro.sample("mu", dist.Normal(b.sum(), 1))


def global_on_data(y):
    """A prior that reads the data."""
    mu = numpyro.sample("mu", dist.Normal(y.mean(), 1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def discrete(y):
    """A count that nobody has seen, whose values have no end."""
    with nf.silo_plate("row", y.shape[0]):
        k = numpyro.sample("k", dist.Poisson(0.5))
        numpyro.sample("y", dist.Normal(1.0 * k, 1), obs=y)
