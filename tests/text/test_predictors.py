"""The fewest numbers through which likelihoods read the globals."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.basics.programs import precision
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.predictors import Predictors
from numpyro_fed.text.split import split

R = np.random.default_rng(0)
ROWS = dict(x=R.normal(size=(6, 4)), group=np.array([0, 1, 1, 2, 0, 2]), y=R.normal(size=6))


def horseshoe(x, y, group):
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    lam = numpyro.sample("lam", dist.HalfCauchy(1).expand([4]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([4]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ (z * lam * tau), sigma), obs=y)


def groups(x, y, group):
    """No row reads the scale of the effects."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, tau).expand([3]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(b[group], 1), obs=y)


def of_rows(x, y, group):
    """Latents of rows read the scale."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", len(y)):
        u = numpyro.sample("u", dist.Normal(mean.sum(), tau))
        numpyro.sample("y", dist.Normal(u, 1), obs=y)


def plain(x, y, group):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([4]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def process(x, y, group):
    """A Gaussian process at three places, by the root of its covariance."""
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    e = numpyro.sample("e", dist.Normal(0, 1).expand([3]).to_event(1))
    apart = (jnp.arange(3.0)[:, None] - jnp.arange(3.0)) / length
    root = jnp.linalg.cholesky(jnp.exp(-(apart**2)) + 1e-6 * jnp.eye(3))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal((root @ e)[group], 1), obs=y)


def terms(fm, silo, z_G):
    return fm.log_silo({}, z_G, fm.zero_latents(silo), silo)["row"]


@pytest.mark.parametrize(
    ("model", "number", "dim"),
    [(horseshoe, 5, 10), (groups, 3, 4), (of_rows, 2, 3), (plain, 4, 4), (process, 3, 4)],
)
def test_likelihoods_read_the_globals_through_so_many_numbers(model, number, dim):
    with precision(double=True):
        (silo,) = read([ROWS], model)
        fm = split(model, [silo])
        predictors = Predictors.of(fm)
        assert (predictors.number, fm.dim) == (number, dim)
        assert predictors.factors_matrices == (model is process)
        z = jnp.asarray(R.normal(size=dim))
        J, of_terms = jax.jacfwd(predictors)(z), jax.jacfwd(lambda z: terms(fm, silo, z))(z)
        assert J.shape == (number, dim)
        # Where the predictors stay no term changes: rows of the terms' derivatives are theirs.
        along = np.linalg.lstsq(J.T, of_terms.T)[0]
        np.testing.assert_allclose(J.T @ along, of_terms.T, atol=1e-10)


def test_predictors_of_a_horseshoe_are_its_coefficients():
    with precision(double=True):
        (silo,) = read([ROWS], horseshoe)
        fm = split(horseshoe, [silo])
        z = jnp.asarray(R.normal(size=fm.dim))
        at = fm.constrain_global({}, z)
        found = np.sort(Predictors.of(fm)(z))
        expected = np.r_[at["z"] * at["lam"] * at["tau"], jnp.log(at["sigma"])]
        np.testing.assert_allclose(found, np.sort(expected), rtol=1e-12)


def test_predictors_with_a_parameter_are_the_globals():
    def model(x, y, group):
        scale = numpyro.param("scale", 1.0)
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(scale * z.sum(), 1), obs=y)

    fm = split(model, list(read([ROWS], model)))
    assert Predictors.of(fm).program is None
