"""Bad replies, improper updates and settings: counted, reported, refused, never taken."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from problems import cut
from pvi_problems import KEY, QUIET, assert_sum_rule, logistic, logistic_rows, mean

import numpyro_fed as nf

pytestmark = pytest.mark.usefixtures("double")


def with_scale(y, s):
    m = numpyro.sample("m", dist.Normal(1.0, 2.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("y", -0.5 * ((y - m) / s) ** 2)


@pytest.mark.slow
def test_silos_that_have_not_been_visited_are_named():
    model, rows, _ = mean()
    pvi = nf.PVI(model, schedule=nf.schedules.Random(1), start=None)
    with pytest.warns(UserWarning, match="2 never visited"):
        result = pvi.run(KEY, 1, cut(rows, (4, 4, 4)), **QUIET)
    assert len(result.never_visited) == 2
    assert "never visited yet: silos" in result.report(certificate=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sequential", "synchronous"])
def test_a_silo_whose_reply_is_not_finite_counts_for_nothing_and_is_reported(schedule):
    good = [dict(y=np.array([y]), s=np.ones(1)) for y in (1.0, 2.5)]
    bad = dict(y=np.array([3.0]), s=np.zeros(1))
    pvi = nf.PVI(with_scale, schedule=schedule, damping=1.0, start=None)
    with pytest.warns(UserWarning, match="2 non finite"):
        result = pvi.run(KEY, 2, [good[0], bad, good[1]], **QUIET)
    precision = 1 / 4 + 2
    np.testing.assert_allclose(result.posterior()["m"].mean, (1 / 4 + 3.5) / precision, rtol=1e-9)
    assert result.rejections["non_finite"] == 2
    assert "silo 1: its reply was not finite" in result.report(certificate=False)
    assert_sum_rule(result)
    with pytest.raises(nf.NonFiniteError, match="silo"):
        _ = result.log_evidence


@pytest.mark.slow
def test_a_prior_at_which_the_data_are_impossible_is_no_obstacle():
    """The expected log likelihood at the first posterior may be minus infinity."""

    def model(y):
        m = numpyro.sample("m", dist.Normal(0.0, 400.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(m)), obs=y)

    silos = [dict(y=np.array([3.0, 5.0])), dict(y=np.array([4.0, 4.0]))]
    pvi = nf.PVI(model, local=nf.local.LBFGS(tolerance=1e-6), start=None)
    result = pvi.run(KEY, 2, silos, **QUIET)
    assert result.losses[0] == np.inf
    np.testing.assert_allclose(result.posterior()["m"].mean, np.log(4.0), atol=0.1)
    assert np.isfinite(result.log_evidence[-1])


def two_sided(x, y):
    """A likelihood that some silos bend the wrong way: ``x`` is the curvature they report."""
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.factor("y", -0.5 * x * (m - y) ** 2)


EVERYONE = nf.schedules.Synchronous()


def bent(last=0.2):
    return [dict(x=np.array([c]), y=np.array([0.3])) for c in (0.5, -0.9, -0.9, last)]


@pytest.mark.slow
def test_an_improper_update_is_rejected():
    fixed = nf.PVI(two_sided, schedule=EVERYONE, damping=1.0, start=None)
    with pytest.raises(nf.NonFiniteError, match="no update") as error:
        fixed.run(KEY, 2, bent(), **QUIET)
    result = error.value.result
    assert (result.damping == 0).all()
    assert_sum_rule(result)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1.0)
    assert "rejected" in result.report(certificate=False)


@pytest.mark.slow
def test_an_improper_update_is_damped_until_it_is_proper_and_the_damping_recovers():
    damping = nf.schedules.Adaptive(1.0)
    damped = nf.PVI(two_sided, schedule=EVERYONE, damping=damping, start=None)
    result = damped.run(KEY, 1, bent(-0.9), runtime="quick", **QUIET)
    assert result.damping[0, 0] == 0.25
    assert result.state.server.damping == 0.5
    assert_sum_rule(result)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1 / (1 - 0.25 * 2.2))


@pytest.mark.slow
def test_an_improper_proposal_counts_for_nothing_and_is_reported():
    silos = [dict(x=np.array([c]), y=np.array([0.3])) for c in (0.5, -2.0)]
    with pytest.warns(UserWarning, match="1 improper"):
        result = nf.PVI(two_sided, start=None).run(KEY, 1, silos, **QUIET)
    np.testing.assert_allclose(result.posterior()["m"].variance, 1 / 1.5)
    assert "silo 1: its proposal was improper" in result.report(certificate=False)


@pytest.mark.slow
def test_one_class_at_each_silo_runs_to_the_end():
    rows = logistic_rows(40)
    order = np.argsort(rows["y"], kind="stable")
    silos = cut({k: v[order] for k, v in rows.items()}, (2,) * 20)
    pvi = nf.PVI(
        logistic,
        schedule="synchronous",
        local=nf.local.LBFGS(steps=10, num_particles=8),
        start=None,
    )
    result = pvi.run(KEY, 5, silos, **QUIET)
    assert np.isfinite(result.losses).all()
    assert all(np.isfinite(q.variance).all() for q in result.posterior().values())
    assert_sum_rule(result)


@pytest.mark.slow
def test_a_bad_setting_is_refused_by_name():
    model, rows, _ = mean()
    silos = cut(rows, (5, 7))
    for wrong in (0.0, 1.5, "half"):
        with pytest.raises(ValueError, match="damping"):
            nf.PVI(model, damping=wrong, start=None)
    with pytest.raises(ValueError, match="schedule"):
        nf.PVI(model, schedule="sometimes", start=None)
    with pytest.raises(ValueError, match="3"):
        nf.PVI(model, schedule=nf.schedules.Random(3), start=None).run(KEY, 1, silos, **QUIET)
    with pytest.raises(ValueError, match="1"):
        nf.PVI(model, schedule=nf.schedules.Sequential([0]), start=None).run(KEY, 1, silos, **QUIET)
    pvi = nf.PVI(logistic, local=nf.local.ClosedForm(), start=None)
    with pytest.raises(nf.GuideError, match="conjugate"):
        pvi.run(KEY, 1, cut(logistic_rows(), (24,)), **QUIET)
    with pytest.raises(ValueError, match="deletion"):
        nf.PVI(model, deletion="all", start=None)
    with pytest.raises(TypeError, match="local"):
        nf.PVI(model, local=optax.adam(0.1), start=None)
