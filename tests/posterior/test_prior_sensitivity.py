"""Power-scaling of prior and likelihood: against closed forms and ArviZ's numbers."""

import arviz
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.after.sensitivity import log_prior_on_supports, slopes
from numpyro_fed.basics.errors import ModelError
from numpyro_fed.basics.programs import precision

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, s).expand([2]).to_event(1))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu + b[0], s), obs=y)


@pytest.fixture(scope="module")
def silos():
    return [dict(y=np.random.default_rng(j).normal(5, 2, 10)) for j in range(2)]


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, model, silos, **QUIET)


@pytest.mark.slow
def test_a_prior_far_from_the_data_is_told(fitted):
    table = fitted.prior_sensitivity()
    assert table.names == ("b[0]", "b[1]", "mu", "s")
    of = dict(zip(table.names, table.diagnosis, strict=True))
    assert of["mu"] in ("strong prior or weak data", "prior and data in conflict")
    assert of["b[1]"] == ""  # no row tells anything of it
    assert str(table).count("\n") == 4
    assert table.to_frame().loc["s", "prior"] == table.prior[3]


@pytest.mark.slow
def test_densities_are_those_on_the_supports(fitted, silos):
    """The prior at the top alone, and the likelihood of all silos."""
    correction = fitted.corrected
    counts = correction.weights > 0
    draws = {k: np.asarray(v, float)[counts] for k, v in correction.draws.items()}
    fm = fitted.run_behind._fit.model
    with precision(double=True):
        found = log_prior_on_supports(fm, {}, correction.z_G)[counts]
        whole = np.asarray(jax.vmap(fm.log_prior, (None, 0))({}, correction.z_G))[counts]
        top = dist.Normal(0, 1).log_prob(draws["mu"]) + dist.HalfNormal(1).log_prob(draws["s"])
        at = (draws["mu"] + draws["b"][:, 0])[:, None], draws["s"][:, None]
        likelihood = sum(dist.Normal(*at).log_prob(silo["y"]).sum(1) for silo in silos)
    np.testing.assert_allclose(found, top, atol=1e-10)
    np.testing.assert_allclose(correction.log_joint[counts] - whole, likelihood, atol=1e-8)


def test_slopes_of_a_normal_posterior():
    """Scaling by a constant moves nothing; the sign of a draw does not matter; twice is more."""
    x = np.random.default_rng(0).normal(size=(4_000, 1))
    part = -0.5 * (x[:, 0] - 3) ** 2
    assert slopes(x, np.zeros(4_000))[0] < 1e-6
    assert slopes(x, part)[0] == pytest.approx(slopes(-x, part)[0], rel=1e-6)
    assert slopes(x, part + 7.0)[0] == pytest.approx(slopes(x, part)[0], rel=1e-6)
    assert slopes(x, 2 * part)[0] == pytest.approx(2 * slopes(x, part)[0], rel=0.05)


@pytest.mark.skipif(
    arviz.__version__.startswith("0."), reason="ArviZ has psense from its version 1 on"
)
def test_slopes_are_those_of_arviz(fitted):
    from arviz_stats import psense

    draws = fitted.sample_posterior(jax.random.key(3), 2_000)
    x = {k: np.asarray(v, float) for k, v in draws.items()}
    with precision(double=True):
        part = dist.Normal(0, 1).log_prob(x["mu"]) + dist.HalfNormal(1).log_prob(x["s"])
    part = np.asarray(part)
    data = arviz.from_dict(
        {"posterior": {k: v[None] for k, v in x.items()}, "log_prior": {"p": part[None]}}
    )
    found = psense(data, group="prior")
    for name in ("mu", "s"):
        assert slopes(x[name][:, None], part)[0] == pytest.approx(float(found[name]), abs=0.02)


@pytest.mark.slow
def test_a_loaded_fit_answers_alike(fitted, silos, tmp_path):
    fitted.save(tmp_path / "fit")
    again = nf.load(tmp_path / "fit", model, silos)
    np.testing.assert_allclose(
        again.prior_sensitivity().prior, fitted.prior_sensitivity().prior, rtol=1e-6
    )


@pytest.mark.slow
def test_particles_answer_too():
    silos = [dict(y=np.random.default_rng(j).normal(4, 1, 20)) for j in range(3)]

    def level(y):
        mu = numpyro.sample("mu", dist.Normal(0, 0.3))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    run = nf.SFVI(level).run(KEY, 0, silos, **QUIET)
    particles = nf.Tempered(num_particles=800).run(KEY, 60, run, **QUIET)
    assert particles.prior_sensitivity().diagnosis == ("prior and data in conflict",)


def test_other_priors_give_the_exact_posterior_or_a_verdict_that_they_do_not():
    def text(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        numpyro.sample("sd", dist.HalfNormal(1))
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 2), obs=y)

    silos = [dict(y=np.array([1.0, 4.0, 2.0])), dict(y=np.array([3.0, 6.0]))]
    fitted = nf.fit(jax.random.key(0), text, silos, progress_bar=False)
    other = fitted.with_priors({"mu": dist.Normal(2, 1), "sd": dist.Gamma(3.0, 4.0)})
    precision = 1 + 5 / 4
    mean = (2 + 16 / 4) / precision
    draws, w = other.draws, other.weights
    assert other.trusted
    assert abs(w @ draws["mu"] - mean) < 0.1 * precision**-0.5
    assert abs((w @ (draws["mu"] - mean) ** 2) ** 0.5 * precision**0.5 - 1) < 0.1
    assert abs(w @ draws["sd"] - 0.75) < 0.05  # of the prior: no row reads it
    assert "other priors of ['mu', 'sd']" in other.verdict
    far = fitted.with_priors({"mu": dist.Normal(-9, 0.1)})
    assert not far.trusted
    with pytest.raises(ModelError, match="'x' is no global"):
        fitted.with_priors({"x": dist.Normal()})
    with pytest.raises(ModelError, match=r"shape \(\), and the prior"):
        fitted.with_priors({"mu": dist.Normal(np.zeros(2), 1).to_event(1)})
    with pytest.raises(ModelError, match="other priors than the text"):
        other.prior_sensitivity()
