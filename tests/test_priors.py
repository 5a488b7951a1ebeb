"""Global latents whose prior others set: which they are, drawn anew, and their density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from problems import cut

import numpyro_fed as nf
from numpyro_fed.model.data import read
from numpyro_fed.model.split import split

KEY = jax.random.key(0)
SILOS = cut({"y": np.arange(5.0), "x": np.ones(5)}, (2, 3))


def hierarchy(y, x):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("group", 2):
        beta = numpyro.sample("beta", dist.Normal(mu, tau))
    above = numpyro.sample("above", dist.TruncatedNormal(0, 1, low=mu))
    pair = numpyro.sample("pair", dist.Normal(0, 1), sample_shape=(2,))

    def step(last, _):
        last = numpyro.sample("walk", dist.LogNormal(jnp.log(last), tau))
        return last, last

    _, walk = scan(step, 1.0, None, length=3)
    with nf.silo_plate("row", y.shape[0]):
        mean = beta.sum() + above + walk.sum() + pair.sum() + x
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("y", dist.Normal(mean + b, 1), obs=y)


def model_of(text, silos=SILOS):
    return split(text, read(silos))


def test_children_are_those_whose_prior_other_latents_set():
    found = model_of(hierarchy).global_prior.children()
    assert sorted(s.name for s in found) == ["above", "beta", "walk"]


def test_without_a_hierarchy_there_are_none():
    def flat(y, x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    assert model_of(flat).global_prior.children() == ()


def test_the_density_of_the_children_is_what_they_add_to_the_prior(double):
    fm = model_of(hierarchy)
    z_G = jax.random.normal(KEY, (fm.dim,), jnp.float64)
    terms = fm.prior_terms({}, z_G)
    expected = terms["above"] + terms["beta"] + terms["walk"]
    np.testing.assert_allclose(fm.global_prior.log_density({}, z_G), expected, rtol=1e-12)


def test_children_are_drawn_from_their_prior_and_the_others_stay():
    fm = model_of(hierarchy)
    z_G = jax.random.normal(KEY, (fm.dim,))
    n = 4_000
    draws = jax.vmap(fm.global_prior.draw, (0, None, None))(jax.random.split(KEY, n), {}, z_G)
    at, drawn = (jax.vmap(lambda z: fm.constrain_global({}, z))(z) for z in (z_G[None], draws))
    for name in ("tau", "mu", "pair"):
        np.testing.assert_array_equal(drawn[name], np.repeat(at[name], n, 0))
    tau, mu = (float(at[k][0]) for k in ("tau", "mu"))
    steps = np.diff(np.log(drawn["walk"]), axis=1, prepend=0.0)
    shares = dist.TruncatedNormal(0, 1, low=mu).cdf(drawn["above"])
    for standard, mean, sd in (
        ((drawn["beta"] - mu) / tau, 0, 1),
        (steps / tau, 0, 1),
        (shares, 0.5, 12**-0.5),
    ):
        standard = np.asarray(standard).reshape(n, -1)
        np.testing.assert_allclose(standard.mean(0), mean, atol=4 * sd / n**0.5)
        np.testing.assert_allclose(standard.std(0), sd, rtol=4 / (2 * n) ** 0.5)


@pytest.mark.filterwarnings("ignore:the prior of the latent site 'mu' is flat")
def test_a_prior_that_is_flat_somewhere_is_no_distribution():
    def masked(y, x):
        mu = numpyro.sample("mu", dist.Normal(0, 1).mask(False))
        beta = numpyro.sample("beta", dist.Normal(mu, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(beta, 1), obs=y)

    assert model_of(masked).global_prior is None
