"""Global latents whose prior others set: which they are, drawn anew, and their density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import AffineTransform
from problems import cut
from scipy.stats import multivariate_normal

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.split import split

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


def funnels_of(text):
    found = model_of(text).global_prior.funnels
    return [tuple(sorted(s.name for s in sites) for sites in funnel) for funnel in found]


def test_children_are_those_whose_prior_other_latents_set():
    assert funnels_of(hierarchy) == [(["above", "beta", "walk"], ["mu", "tau"])]


def test_children_with_setters_of_their_own_are_funnels_of_their_own():
    def two(y, x):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        fn = numpyro.sample("fn", dist.HalfNormal(1))  # a name that functions here have, too
        a = numpyro.sample("a", dist.Normal(0, scale))
        b = numpyro.sample("b", dist.Normal(a, 1))
        c = numpyro.sample("c", dist.Normal(0, fn))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b + c, 1), obs=y)

    assert funnels_of(two) == [(["a", "b"], ["scale"]), (["c"], ["fn"])]


def test_without_a_hierarchy_there_are_none():
    def flat(y, x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    assert funnels_of(flat) == []


class Unsampled(dist.Normal):
    """As people write distributions whose draws nobody asks for."""

    def sample(self, key, sample_shape=()):
        return jnp.zeros(sample_shape + self.batch_shape)


@pytest.mark.parametrize(
    ("prior", "found"),
    [
        (lambda tau: dist.Normal(0, tau), 1),
        (lambda tau: Unsampled(0, tau), 0),
        (lambda tau: dist.TransformedDistribution(Unsampled(0, tau), AffineTransform(0.0, 1.0)), 0),
        (lambda tau: dist.Normal(0, tau).mask(False), 0),
    ],
    ids=["NumPyro's", "own", "own inside", "masked"],
)
@pytest.mark.filterwarnings("ignore:the prior of the latent site 'beta' is flat")
def test_what_may_not_be_drawn_is_no_funnel(prior, found):
    def text(y, x):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        beta = numpyro.sample("beta", prior(tau))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + beta, 1), obs=y)

    assert len(funnels_of(text)) == found


def test_a_text_with_a_seed_of_its_own_draws_the_same_for_ever():
    assert funnels_of(numpyro.handlers.seed(hierarchy, 0)) == []


def test_the_density_of_the_children_is_what_they_add_to_the_prior(double):
    fm = model_of(hierarchy)
    (funnel,) = fm.global_prior.funnels
    z_G = jax.random.normal(KEY, (fm.dim,), jnp.float64)
    terms = fm.prior_terms({}, z_G)
    expected = terms["above"] + terms["beta"] + terms["walk"]
    np.testing.assert_allclose(
        fm.global_prior.log_density({}, z_G, funnel.children), expected, rtol=1e-12
    )


@pytest.mark.slow
def test_children_are_drawn_from_their_prior_and_the_others_stay():
    fm = model_of(hierarchy)
    (funnel,) = fm.global_prior.funnels
    z_G = jax.random.normal(KEY, (fm.dim,))
    n = 4_000
    draws = jax.vmap(lambda key: fm.global_prior.draw(key, {}, z_G, funnel.children))(
        jax.random.split(KEY, n)
    )
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


@pytest.mark.parametrize(
    "child",
    [
        lambda tau: dist.Normal(0, tau).expand((3,)).to_event(1),
        lambda tau: dist.Dirichlet(jnp.ones(3) + tau),
        lambda tau: dist.Uniform(-tau, 2 * tau),
        pytest.param(lambda tau: dist.LKJCholesky(3, 1 + tau), marks=pytest.mark.slow),
        lambda tau: dist.GaussianRandomWalk(tau, 3),
        lambda tau: dist.ZeroSumNormal(tau, (4,)),
    ],
    ids=["normal", "Dirichlet", "uniform", "LKJCholesky", "walk", "ZeroSumNormal"],
)
def test_draws_have_the_density_that_is_said(child):
    """A narrow normal density over the children's, at their draws, has the mean one."""

    def text(y, x):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        b = numpyro.sample("b", child(tau))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sum(b), 1), obs=y)

    fm = model_of(text)
    (funnel,) = fm.global_prior.funnels
    prior, n = fm.global_prior, 4_000

    @jax.jit
    def at(key):
        z = prior.draw(key, {}, jnp.full(fm.dim, 0.3), funnel.children)
        return z, prior.log_density({}, z, funnel.children)

    z, log_p = (np.asarray(a, float) for a in jax.vmap(at)(jax.random.split(KEY, n)))
    (b,) = funnel.children
    own = z[:, b.start : b.stop]
    narrow = multivariate_normal(np.median(own, 0), 0.4 * np.atleast_2d(np.cov(own.T)))
    ratio = np.exp(narrow.logpdf(own) - log_p)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / n**0.5
    assert ratio.std() / n**0.5 < 0.1
