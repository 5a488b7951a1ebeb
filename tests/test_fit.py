"""One call: a posterior, and a verdict that says what error is left."""

import re

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from problems import cut

import numpyro_fed as nf

KEY = jax.random.key(0)


def raw(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1000).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def raw_silos(n=80):
    r = np.random.default_rng(0)
    x = np.stack([np.ones(n), r.normal(100, 15, n)], 1)
    return cut({"x": x, "y": x @ [30.0, 0.6] + 12 * r.normal(size=n)}, (30, 10, 40))


@pytest.fixture(scope="module")
def fitted():
    return nf.fit(KEY, raw, raw_silos(), progress_bar=False)


def test_a_raw_regression_is_right_and_trusted(fitted):
    """Against the t posterior of the coefficients under flat priors, which these nearly are."""
    silos = raw_silos()
    x, y = (np.concatenate([s[k] for s in silos]) for k in ("x", "y"))
    beta, (squares,) = np.linalg.lstsq(x, y)[:2]
    sd = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * squares / (len(y) - 4))
    draws = np.asarray(fitted.sample_posterior(jax.random.key(1), 20_000)["beta"])
    assert fitted.trusted
    assert (np.abs(draws.mean(0) - beta) < 0.08 * sd).all()
    assert (np.abs(draws.std(0) / sd - 1) < 0.06).all()


def test_the_verdict_states_the_error_that_is_left(fitted):
    error = float(re.search(r"sds at most ([\d.e-]+) sd", fitted.verdict).group(1))
    np.testing.assert_allclose(error, fitted.corrected.monte_carlo_error, rtol=0.1)
    assert error < 0.1
    assert fitted.verdict.startswith("The posterior of the globals can be trusted")
    assert [s.name for s in fitted.stages][:2] == ["PVI", "correction"]
    assert str(fitted) == fitted.verdict
    assert np.isfinite(fitted.log_evidence)
    assert fitted.mode.converged


def test_a_second_call_compiles_nothing(fitted, compiled):
    again = nf.fit(jax.random.key(5), raw, raw_silos(), progress_bar=False)
    assert [s.name for s in again.stages] == [s.name for s in fitted.stages]
    assert compiled == []


def test_comparison_with_nuts_takes_it(fitted):
    nuts = nf.run_nuts(
        KEY, raw, raw_silos(), start=fitted.mode, num_samples=2_000, progress_bar=False
    )
    sites = nf.compare(fitted, nuts).to_dict()["sites"]
    assert all((np.ravel(s["mean_error_sd"]) < 0.15).all() for s in sites.values())


def test_parameters_without_a_prior_take_sfvi():
    def model(y):
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(0, 1000))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, scale), obs=y)

    y = np.random.default_rng(1).normal(900, 25, 60)
    found = nf.fit(KEY, model, cut({"y": y}, (20, 40)), progress_bar=False)
    assert found.stages[0].name == "SFVI"
    learned = found.stages[0].result.params["scale"]
    np.testing.assert_allclose(learned, y.std() * np.sqrt(60 / 59), rtol=0.05)
    draws = found.sample_posterior(KEY, 4_000)["mu"]
    assert abs(draws.mean() - y.mean()) < 0.1 * y.std() / 60**0.5


def test_an_improper_posterior_is_an_error():
    def model(x, y):
        real = dist.constraints.real_vector
        beta = numpyro.sample("beta", dist.ImproperUniform(real, (), (2,)))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    x = np.stack([np.ones(40), np.linspace(-1, 1, 40)], 1)
    with pytest.raises(nf.ModelError, match=r"improper.*beta\[1\]"):
        nf.fit(KEY, model, cut({"x": x, "y": (x[:, 1] > 0) * 1.0}, (20, 20)), progress_bar=False)
