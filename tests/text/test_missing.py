"""Covariates that are missing: latents of rows by ``obs_mask``, and NaN that reaches nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import stats
from scipy.integrate import quad

import numpyro_fed as nf
from numpyro_fed.basics.errors import DataError
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.laplace import EXACT
from numpyro_fed.guides.quadrature import RowIntegrals
from numpyro_fed.text.handlers import with_missing
from numpyro_fed.text.split import split

pytestmark = pytest.mark.usefixtures("double")

GONE = jnp.array([True, False, False, True])  # of a user, who masks something else

ASKED = {
    "nan to num": jnp.nan_to_num,
    "where": lambda x: jnp.where(jnp.isnan(x), 0.0, x),
    "where not": lambda x: jnp.where(~jnp.isnan(x), x, 0.0),
    "after": lambda x: jnp.where(jnp.isnan(x), 0.0, jnp.exp(2 * x)),
    "fewer": lambda x: jnp.where(~jnp.isnan(x) & GONE, x, 0.0),
    "more": lambda x: jnp.where(jnp.isnan(x) | GONE, 0.0, x),
    "columns": lambda x: jnp.where(jnp.isnan(x)[:, None], 0.0, x[:, None] * jnp.ones(3)).sum(1),
    "columns first": lambda x: jnp.where(jnp.isnan(x[:, None]), 0.0, x[:, None]).sum(1),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "an indicator": lambda x: jnp.isnan(x) * 1.0 + jnp.nan_to_num(x),
    "a mean of the others": lambda x: jnp.where(jnp.isnan(x), jnp.nanmean(x), x),
}
NOT_ASKED = {
    "itself": lambda x: x,
    "a comparison": lambda x: jnp.where(x > 3, 1.0, 0.0),
    "the wrong way": lambda x: jnp.where(jnp.isnan(x), x, 0.0),
    "other rows": lambda x: jnp.where(jnp.isnan(x[::-1]), 0.0, x),
    "another order": lambda x: jnp.where(
        jnp.isnan(x.reshape(2, 2).T.reshape(4)), 0.0, x.reshape(2, 2).reshape(4)
    ),
    "a sum": lambda x: jnp.where(jnp.isnan(x), 0.0, x.sum()),
    "some of them": lambda x: jnp.where(jnp.isnan(x) & GONE, 0.0, x),
    "something else": lambda x: jnp.where(jnp.isnan(jnp.log(x)), 0.0, x),
    "of a comparison": lambda x: jnp.isnan(jnp.where(x > 3, 1.0, 0.0)) * 1.0,
    "whole numbers": lambda x: x.astype(int) * 1.0,
    "a product": lambda x: x * ~jnp.isnan(x),
}


def reading(of_x):
    def text(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(b + of_x(x), 1), obs=y)

    return text


X = np.array([1.0, np.nan, 2.0, np.nan])
SILOS = [dict(x=X, y=np.zeros(4))]


@pytest.mark.parametrize("how", ASKED)
def test_a_text_may_ask_where_values_are_missing(how):
    split(reading(ASKED[how]), read(SILOS))


def test_what_obs_mask_adds_is_no_latent_without_a_prior(recwarn):
    split(imputing, read(SILOS))
    assert not recwarn.list


@pytest.mark.parametrize("how", NOT_ASKED)
def test_nan_that_is_not_asked_for_is_refused(how):
    with pytest.raises(DataError, match=r"silo 0, 'x': 2 of 4 .* site 'y' reads 'x'.*obs_mask="):
        split(reading(NOT_ASKED[how]), read(SILOS))


def imputing(x, y=None):
    """A covariate and an outcome, each with an error of sd 1."""
    m = numpyro.sample("m", dist.Normal(0, 10))
    with nf.silo_plate("row", x.shape[0]):
        x = numpyro.sample("x", dist.Normal(m, 1), obs=x, obs_mask=~jnp.isnan(x))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)


def test_what_obs_mask_adds_has_its_prior_at_all_rows():
    def traced(text):
        seeded = handlers.seed(text, 0)
        return handlers.trace(seeded).get_trace(x=X, y=np.zeros(4))

    site = traced(with_missing(imputing, ["x"]))["x_unobserved"]
    plain = dist.Normal(site["fn"].base_dist.loc, 1)  # expanded by its plate
    assert site["fn"].batch_shape == (4,)
    np.testing.assert_allclose(site["fn"].log_prob(site["value"]), plain.log_prob(site["value"]))

    def by_hand(x, y):
        with nf.silo_plate("row", 4), handlers.mask(mask=GONE):
            numpyro.sample("b_unobserved", dist.Normal(0, 1))

    kept = traced(with_missing(by_hand, ["x"]))["b_unobserved"]
    assert (kept["fn"].log_prob(kept["value"]) == 0).tolist() == (~GONE).tolist()


def positive(x, y=None):
    m, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in "mb")
    with nf.silo_plate("row", x.shape[0]):
        x = numpyro.sample("x", dist.LogNormal(m, 0.6), obs=x, obs_mask=~jnp.isnan(x))
        numpyro.sample("y", dist.Normal(b * x, 10), obs=y)


@pytest.mark.parametrize("x", [[np.nan, np.nan], [3.0, 8.0], [np.nan, 5.0]], ids=str)
@pytest.mark.parametrize("m", [1.5, -3.0])
def test_a_positive_covariate_has_its_likelihood_where_it_is_seen_and_where_not(x, m, double):
    """By SciPy's integrals. A seen row's latent integrates to one, with its log determinant."""
    y, b, expected = [4.0, 7.0], 0.7, 0.0
    for one, outcome in zip(x, y, strict=True):
        if np.isnan(one):
            expected += np.log(
                quad(
                    lambda u, outcome=outcome: (
                        stats.norm.pdf(u) * stats.norm.pdf(outcome, b * np.exp(m + 0.6 * u), 10)
                    ),
                    -10,
                    10,
                )[0]
            )
        else:
            expected += stats.lognorm.logpdf(one, 0.6, scale=np.exp(m))
            expected += stats.norm.logpdf(outcome, b * one, 10)
    (silo,) = read([dict(x=np.array(x), y=np.array(y))])
    fm = split(positive, [silo])
    z = jnp.array([{"m": m, "b": b}[s.name] for s in fm.named("latent")])
    found, _ = RowIntegrals(fm, 21, EXACT).log_likelihood({}, z, silo, fm.zero_latents(silo))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_the_text_falls_apart_into_silos():
    silos = [dict(x=X, y=np.ones(4)), dict(x=np.full(2, np.nan), y=np.zeros(2))]
    nf.check_decomposition(imputing, silos)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "federation"])
def test_a_missing_covariate_is_a_latent_of_its_row(where):
    """A row without x tells of m through y alone, with precision 1/2; one silo has no x at all."""
    rng = np.random.default_rng(1)
    silos, precision, weighed = [], 1 / 100, 0.0
    for n in (30, 14, 8):
        x = rng.normal(3, 1, n)
        y = rng.normal(x, 1)
        gone = rng.uniform(size=n) < (1.1 if n == 8 else 0.4)
        precision += (~gone).sum() + gone.sum() / 2
        weighed += x[~gone].sum() + y[gone].sum() / 2
        silos.append(dict(x=np.where(gone, np.nan, x), y=y))
    held = silos
    if where == "federation":
        parties = [nf.Silo(one, names={"model": imputing}) for one in silos]
        engine = nf.network.InMemory([party.answer for party in parties])
        held = nf.Federation(engine, names={"model": imputing})
    fitted = nf.fit(jax.random.key(0), imputing, held, progress_bar=False)
    assert fitted.trusted
    m = np.asarray(fitted.sample_posterior(jax.random.key(1), 8_000)["m"])
    sd = precision**-0.5
    assert abs(m.mean() - weighed / precision) < 0.06 * sd
    assert abs(m.std() / sd - 1) < 0.05
    if where == "federation":
        return
    # What was seen stays as it is; what was not lies between the mean and the row's outcome.
    drawn = np.asarray(fitted.sample_posterior(jax.random.key(2), 4_000, silo=0)["x_unobserved"])
    x, y = silos[0]["x"], silos[0]["y"]
    gone = np.isnan(x)
    expected = (weighed / precision + y[gone]) / 2
    np.testing.assert_allclose(drawn[:, gone].mean(0), expected, atol=5 / np.sqrt(4_000))
    new = dict(x=np.array([np.nan, 7.0]))
    y = np.asarray(fitted.predict(jax.random.key(3), new, n=4_000)["y"])
    np.testing.assert_allclose(y.mean(0), [weighed / precision, 7.0], atol=0.12)
    np.testing.assert_allclose(y.std(0), [np.sqrt(2 + sd**2), 1.0], rtol=0.08)
