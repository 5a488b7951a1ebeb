"""What silos do between messages: every local optimiser, minibatches, conjugacy."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from jax.flatten_util import ravel_pytree
from laid_open import inside, laid_open
from problems import cut, glmm_silos
from pvi_problems import KEY, QUIET, glmm_inside, logistic, logistic_rows
from scipy import optimize

import numpyro_fed as nf
from numpyro_fed import expfam
from numpyro_fed.data.silo_data import read
from numpyro_fed.pvi.silo import Status
from numpyro_fed.text.row_checks import RowChecks
from numpyro_fed.text.split import split

pytestmark = pytest.mark.usefixtures("double")

SOLVERS = {
    "optax": (nf.local.Optax(steps=600), 1e-2),
    "alpha": (nf.local.Optax(steps=600, alpha=0.5, num_particles=64), 3e-2),
    "lbfgs": (nf.local.LBFGS(tolerance=1e-8), 1e-6),
    "natural gradient": (nf.local.NaturalGradient(rate=0.1, num_particles=64), 3e-2),
    "power ep": (nf.local.PowerEP(alpha=0.5, steps=300, num_particles=512), 3e-2),
}


def beside(y, ok):
    """Rows around a mean, with a likelihood that is NaN where ``ok`` is negative."""
    m = numpyro.sample("m", dist.Normal(0.5, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("y", -0.5 * (y - m * jnp.sqrt(ok)) ** 2)


def run_beside(local):
    """One round of a silo of four rows, and of one whose likelihood is NaN."""
    y = np.array([2.0, 3.0, 2.5, 2.2])
    silos = [dict(y=y, ok=np.full(4, sign)) for sign in (1.0, -1.0)]
    with pytest.warns(UserWarning, match="1 non finite"):
        result = nf.PVI(beside, local=local, start_scale=None, start=None).run(
            KEY, 1, silos, **QUIET
        )
    assert result.status[0, 1, 0] == Status.NON_FINITE
    assert float(expfam.inner(*[result.factor(1)] * 2)) == 0
    return result.posterior()["m"]


@pytest.mark.parametrize("name", slow_but(SOLVERS, 0))
def test_every_local_optimiser_finds_the_tilted_distribution_and_takes_no_nan(name):
    """Property 2.1: the local free energy is largest where ``q`` is closest to it.

    Beside a silo whose likelihood is NaN, and which thus changes nothing.
    """
    local, rtol = SOLVERS[name]
    q = run_beside(local)
    precision = 1.0 + 4
    np.testing.assert_allclose(q.mean, (0.5 + 9.7) / precision, rtol=rtol)
    np.testing.assert_allclose(q.variance, 1 / precision, rtol=2 * rtol)


@pytest.mark.slow
def test_a_closed_form_is_the_tilted_distribution():
    def model(y):
        m = numpyro.sample("m", dist.Normal(0.5, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    silos = [dict(y=np.array([2.0, 3.0, 2.5, 2.2]))]
    pvi = nf.PVI(model, local=nf.local.ClosedForm(), start_scale=None, start=None)
    q = pvi.run(KEY, 1, silos, **QUIET).posterior()["m"]
    np.testing.assert_allclose(q.mean, (0.5 + 9.7) / 5, rtol=1e-9)
    np.testing.assert_allclose(q.variance, 1 / 5, rtol=1e-9)


@pytest.mark.slow
def test_a_local_optimiser_with_patience_takes_no_nan():
    run_beside(nf.local.Optax(steps=40, patience=3))


CONFUSION = np.array([[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.0, 0.3, 0.7]])
NOT_CONJUGATE = {
    "gamma": (dist.Gamma(2.0, 1.0), lambda z: dist.Poisson(z + 1), [4, 2, 5, 3, 6, 1, 2, 7]),
    "beta": (
        dist.Beta(2.0, 1.5),
        lambda z: dist.Bernoulli(0.1 + 0.7 * z),
        [1, 0, 1, 1, 1, 0, 1, 1],
    ),
    "dirichlet": (
        dist.Dirichlet(np.array([1.5, 1.0, 2.0])),
        lambda z: dist.Categorical(z @ CONFUSION),
        [0, 2, 1, 1, 2, 0, 1, 1],
    ),
}


def nearest(prior, likelihood, y):
    """The member of the prior's family of least KL to the posterior, by quadrature."""
    to_support = dist.biject_to(prior.support)
    shape, axis = to_support.inverse_shape(prior.event_shape), np.linspace(-15, 15, 601)
    dim = int(np.prod(shape))
    u = np.stack(np.meshgrid(*[axis] * dim), -1).reshape(-1, *shape)
    z = to_support(u)
    weights = jnp.exp(to_support.log_abs_det_jacobian(u, z)) * (axis[1] - axis[0]) ** dim
    target = prior.log_prob(z) + sum(likelihood(z).log_prob(v) for v in y)
    start, build = ravel_pytree([jnp.log(getattr(prior, name)) for name in prior.arg_constraints])

    @jax.jit
    @jax.value_and_grad
    def free_energy(x):
        q = type(prior)(*map(jnp.exp, build(x)))
        log_q = q.log_prob(z)
        return (weights * jnp.exp(log_q) * (log_q - target)).sum()

    best = optimize.minimize(free_energy, start, jac=True)
    return type(prior)(*map(np.exp, build(best.x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_CONJUGATE)
def test_globals_other_than_gaussian_meet_likelihoods_they_are_not_conjugate_to(name):
    """Three silos; the margins are four times the spread over ten keys."""
    prior, likelihood, rows = NOT_CONJUGATE[name]

    def model(y):
        z = numpyro.sample("z", prior)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", likelihood(z), obs=y)

    silos = cut(dict(y=np.array(rows)), (4, 2, 2))
    result = nf.PVI(model, start=None).run(KEY, 4, silos, **QUIET)
    assert not inside(result).factors.conjugate
    q, best = result.posterior()["z"], nearest(prior, likelihood, rows)
    np.testing.assert_allclose(q.mean, best.mean, rtol=0.03)
    np.testing.assert_allclose(q.variance, best.variance, rtol=0.03)


@pytest.mark.slow
def test_a_model_that_is_conjugate_at_some_silos_alone_is_not_taken_for_conjugate():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Poisson(rate * jnp.exp(b * x)), obs=y)

    zero, one = (dict(x=np.full(2, x), y=np.array([2.0, 3.0])) for x in (0.0, 1.0))
    pvi = nf.PVI(model, start=None)
    assert not laid_open(pvi, [zero, one]).factors.conjugate
    other = nf.PVI(model, start=None)
    other.run(KEY, 1, [zero, zero], **QUIET)
    assert not laid_open(other, [zero, one]).factors.conjugate


def test_minibatches_of_a_model_whose_rows_read_each_others_latents_are_refused():
    pvi = nf.PVI(models.coupled(), local=nf.local.Optax(batch_size=2), start=None)
    with pytest.raises(nf.GuideError, match="a minibatch is another model"):
        pvi.run(KEY, 1, [dict(y=np.arange(4.0))] * 2, **QUIET)


def test_minibatches_of_rows_that_read_a_mean_are_refused_where_there_are_many():
    centred = models.coupled(1)

    def plain(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + b, 0.5), obs=y)

    silos = read([{"y": np.zeros(20_001)}])
    stack = jax.tree.map(lambda a: a[None], silos[0])
    found = [
        RowChecks(split(model, silos)).minibatch(("row",), ("y",), stack)
        for model in (centred, plain)
    ]
    assert [bool(same) for same in found] == [False, True]


def test_minibatches_of_rows_that_share_a_covariance_are_refused():
    guide = nf.guides.Structured(locals="joint")
    pvi = nf.PVI(models.levels(), guide=guide, local=nf.local.Optax(batch_size=2), start=None)
    with pytest.raises(nf.GuideError, match=r"locals='joint' for silo_plate 'row'"):
        pvi.run(KEY, 1, [dict(y=np.arange(4.0))] * 2, **QUIET)


@pytest.mark.slow
def test_minibatches_with_local_latents_come_near_the_posterior_of_all_rows():
    silos = glmm_silos((20, 12))
    fits = [
        nf.PVI(
            glmm_inside,
            local=nf.local.Optax(steps=600, batch_size=batch, num_particles=2),
            evidence_draws=1,
            start=None,
        ).run(KEY, 2, silos, **QUIET)
        for batch in (None, 10)
    ]
    whole, part = (fit.posterior()["beta"] for fit in fits)
    sd = np.sqrt(whole.variance)
    np.testing.assert_allclose(part.mean, whole.mean, atol=0.5 * sd.max())
    np.testing.assert_allclose(np.sqrt(part.variance), sd, rtol=0.2)


@pytest.mark.slow
def test_a_visit_that_has_not_converged_is_reported():
    pvi = nf.PVI(logistic, local=nf.local.LBFGS(steps=1, tolerance=1e-9), start=None)
    with pytest.warns(UserWarning, match="2 not converged"):
        result = pvi.run(KEY, 1, cut(logistic_rows(), (10, 14)), **QUIET)
    assert (result.status == Status.NOT_CONVERGED).all()
    assert "silo 1: the local optimiser had not converged" in result.report(certificate=False)
