"""FedLap rests at the pooled mode, and FedLap-Cov at Laplace's approximation there."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pvi_problems as p
import pytest
from apart import Apart
from cases import slow_but
from laid_open import inside
from problems import cut, glmm

import numpyro_fed as nf

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore::numpyro_fed.ConvergenceWarning"),
]
KEY, QUIET = p.KEY, dict(progress_bar=False, runtime="quick")


def pooled_mode(rows, prior_sd=2.0):
    """The mode of the logistic regression and the negative Hessian there, by Newton's method."""

    def minus_log_density(w):
        logits = rows["x"] @ w
        log_lik = jnp.sum(rows["y"] * logits - jnp.logaddexp(0.0, logits))
        return 0.5 * jnp.sum(w**2) / prior_sd**2 - log_lik

    w = jnp.zeros(rows["x"].shape[1])
    for _ in range(30):
        A = jax.hessian(minus_log_density)(w)
        w = w - jnp.linalg.solve(A, jax.grad(minus_log_density)(w))
    return w, A


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 4, 3), (12,), (1, 11)])
def test_an_undamped_round_is_exact_on_gaussian_models(sizes):
    model, rows, exact = p.linear_regression()
    result = nf.FedLap(model, rho=1.0).run(KEY, 1, cut(rows, sizes), **QUIET)
    p.assert_exact(result, exact, rtol=1e-10)


@pytest.mark.parametrize("sizes", slow_but([[10, 8, 6], [4, 20], [12, 12]], 0))
def test_it_rests_at_laplace_of_pooled_rows(sizes):
    rows = p.logistic_rows()
    w, A = pooled_mode(rows)
    result = nf.FedLap(p.logistic).run(KEY, 80, cut(rows, sizes), **QUIET)
    assert result.settled
    q = result.posterior()["w"]
    np.testing.assert_allclose(q.mean, w, atol=1e-6)
    np.testing.assert_allclose(q.covariance_matrix, jnp.linalg.inv(A), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["full", "diagonal", "fixed"])
def test_one_silo_is_laplace_of_pooled_rows_after_one_round(covariance):
    rows = p.logistic_rows()
    w, A = pooled_mode(rows)
    q = nf.FedLap(p.logistic, covariance=covariance).run(KEY, 1, [rows], **QUIET).posterior()["w"]
    precision = jnp.eye(2) / 4 if covariance == "fixed" else jnp.diag(jnp.diagonal(A))
    precision = A if covariance == "full" else precision
    np.testing.assert_allclose(q.mean, w, atol=1e-5)
    np.testing.assert_allclose(q.variance, jnp.diagonal(jnp.linalg.inv(precision)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diagonal", "fixed"])
def test_the_pooled_mode_is_where_other_covariances_rest_too(covariance):
    rows = p.logistic_rows()
    w, A = pooled_mode(rows)
    fedlap = nf.FedLap(p.logistic, covariance=covariance)
    result = fedlap.run(KEY, 400, cut(rows, (10, 8, 6)), **QUIET)
    q = result.posterior()["w"]
    np.testing.assert_allclose(q.mean, w, atol=1e-4)
    if covariance == "diagonal":
        np.testing.assert_allclose(q.variance, 1 / jnp.diagonal(A), rtol=1e-4)
    assert result.settled == (covariance == "diagonal")  # of "fixed" nobody can tell


@pytest.mark.slow
def test_some_silos_in_a_round_saved_and_loaded(tmp_path):
    silos = cut(p.logistic_rows(), (8, 8, 8))
    fedlap = nf.FedLap(p.logistic, schedule=nf.schedules.Random(2), evidence_draws=4)
    whole = fedlap.run(KEY, 6, silos, **QUIET)
    part = fedlap.run(KEY, 4, silos, **QUIET)
    part.save(tmp_path / "part")
    loaded = nf.load(tmp_path / "part", p.logistic, silos)
    rest = fedlap.run(KEY, 2, silos, init_state=loaded.state, **QUIET)
    p.assert_close(p.eta_of(rest), p.eta_of(whole), rtol=0)
    p.assert_sum_rule(whole)
    assert loaded.plan.chosen["method"] == "FedLap"


@pytest.mark.slow
def test_silos_elsewhere_send_the_same_numbers():
    model, rows, exact = p.linear_regression()
    apart = Apart(nf.FedLap(model, rho=1.0), cut(rows, (5, 4, 3))).run(KEY, 1)
    p.assert_exact(apart, exact, rtol=1e-10)
    assert nf.importance_correct(KEY, apart, num_draws=500, progress_bar=False).pareto_k < 0.1


@pytest.mark.slow
def test_a_prior_outside_of_the_family_is_approximated_by_the_same_method():
    """Without a start, too: the scale of the noise has a half-Cauchy prior."""
    r = np.random.default_rng(0)
    x = r.normal(size=(90, 2))
    silos = cut(dict(x=x, y=x @ [1.0, -0.5] + 0.7 * r.normal(size=90)), (20, 30, 40))
    model = models.linear_and_scale(10.0)
    mode = nf.find_mode(KEY, model, silos, progress_bar=False)
    result = nf.FedLap(model, rho=1.0).run(KEY, 30, silos, **QUIET)
    family = inside(result).factors.family
    mean, sd = family.mean_and_sd(family.ordinary(result.natural_parameters()))
    np.testing.assert_allclose(mean, mode.z_G, atol=1e-5)
    np.testing.assert_allclose(sd, np.sqrt(np.diagonal(np.linalg.inv(mode.curvature))), rtol=1e-3)


def laplace_prior(x, y):
    b = numpyro.sample("b", dist.Laplace(0, 1).expand([2]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 0.7), obs=y)


def effects_and_their_scale(x, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, tau).expand([2]).to_event(1))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 0.7), obs=y)


@pytest.mark.parametrize("model", slow_but([laplace_prior, effects_and_their_scale]))
def test_a_prior_without_curvature_or_mode_of_its_own_is_no_obstacle_to_a_start_at_it(model):
    r = np.random.default_rng(0)
    x = r.normal(size=(90, 2))
    y = x @ [1.0, -0.5] + 0.7 * r.normal(size=90)
    silos = cut(dict(x=x, y=y), (30, 30, 30))
    result = nf.FedLap(model, rho=1.0, evidence_draws=1).run(KEY, 10, silos, **QUIET)
    assert result.settled
    # Beside the kink the prior pulls towards zero, with a slope of one, and adds no curvature.
    precision = x.T @ x / 0.49
    mean = np.linalg.solve(precision, x.T @ y / 0.49 - [1, -1])
    q = result.posterior()["b"]
    if model is laplace_prior:
        np.testing.assert_allclose(q.mean, mean, atol=1e-6)
        np.testing.assert_allclose(q.precision_matrix, precision, rtol=1e-6)
    else:
        np.testing.assert_allclose(q.mean, mean, atol=0.02)


@pytest.mark.slow
def test_rows_with_a_latent_are_integrated_and_a_scale_has_a_factor_of_the_servers():
    """Where a search for the mode leads, a round changes nothing."""
    r = np.random.default_rng(0)
    rows = dict(x=r.normal(size=(60, 4, 2)), y=r.binomial(1, 0.5, (60, 4)).astype(float))
    rows["y"][:30] = r.binomial(1, 0.9, (30, 4))
    silos = cut(rows, (20, 40))
    mode = nf.find_mode(KEY, glmm, silos, progress_bar=False)
    result = nf.FedLap(glmm, start="mode").run(KEY, 10, silos, **QUIET)
    sd = np.sqrt(np.diagonal(np.linalg.inv(mode.curvature)))
    family = inside(result).factors.family
    centre = family.centre(family.ordinary(result.natural_parameters()))
    np.testing.assert_array_less(np.abs(centre - mode.z_G), 0.1 * sd)


def with_parameter(y):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def test_what_it_does_not_take_is_refused_by_name():
    for rho in ("mean", 2.0, 0.0, 1e-320, np.nan):
        with pytest.raises(ValueError, match="rho must be 'auto' or a number from 1e-6 to 1, got"):
            nf.FedLap(p.logistic, rho=rho)
    with pytest.raises(ValueError, match=r"'asynchronous'.*nf\.PVI"):
        nf.FedLap(p.logistic, schedule="asynchronous")
    model, rows, _ = p.gamma_poisson()
    with pytest.raises(nf.ModelError, match="'rate' is not Gaussian"):
        nf.FedLap(model).run(KEY, 1, [rows], **QUIET)
    rows = {"x": np.zeros((3, 4, 2)), "y": np.zeros((3, 4))}
    many = (models.logistic(301), dict(x=np.zeros((3, 301)), y=np.zeros(3)))
    with pytest.raises(nf.ModelError, match=r"up to 300 globals.*has 301\. Use nf\.PVI"):
        nf.FedLap(many[0]).run(KEY, 1, [many[1]], **QUIET)
    fixed = dict(covariance="fixed")
    with pytest.raises(nf.ModelError, match=r"parameter 'scale' is learnt from the spread"):
        nf.FedLap(with_parameter, **fixed).run(KEY, 1, [dict(y=np.zeros(3))], **QUIET)
    two = dict(x=np.zeros((3, 2)), y=np.zeros(3))
    with pytest.raises(nf.ModelError, match=r"prior is not Gaussian.*no precision is fixed"):
        nf.FedLap(laplace_prior, **fixed).run(KEY, 1, [two], **QUIET)
    with pytest.raises(nf.ModelError, match=r"'child' has parameters or latents.*start='mode'"):
        nf.FedLap(p.glmm_inside).run(KEY, 1, [rows], **QUIET)
