"""Runs that start at the mode: exact where Laplace's method is, and whatever the units."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from apart import Apart
from cases import slow_but
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import cut, raw_rows, regression
from pvi_problems import assert_sum_rule
from scipy import stats

import numpyro_fed as nf
from numpyro_fed import expfam

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
NATS = 0.05  # three times what one draw of many may differ by, where a step would gain 1e-4


def evidence(rows):
    """Of the regression, by the matrices of its coefficients."""
    x, y = rows["x"], rows["y"]
    precision = x.T @ x + 4e-4 * np.eye(3)
    log_det = len(y) * np.log(4) + np.linalg.slogdet(precision * 1e4 / 4)[1]
    left = y @ y - y @ x @ np.linalg.solve(precision, x.T @ y)
    return -0.5 * (len(y) * np.log(2 * np.pi) + log_det + left / 4)


@pytest.mark.slow
def test_sfvi_begins_at_the_posterior_where_that_is_gaussian(double):
    """Every draw then has the same weight: the bound is the log evidence, up to the 1e-4 nats that
    another step of the search would gain.
    """
    rows = raw_rows()
    result = nf.SFVI(regression).run(KEY, 1, cut(rows, (30, 10, 20)), **QUIET)
    np.testing.assert_allclose(-result.losses, evidence(rows), rtol=0, atol=NATS)


def nested(y):
    mu = numpyro.sample("mu", dist.Normal(500, 300))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 40).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(b.sum(-1), 30), obs=y)


@pytest.mark.slow
def test_local_guides_begin_at_the_conditional_posterior(double):
    y = np.random.default_rng(2).normal(1000, 60, 9)
    exact = stats.multivariate_normal(
        np.full(9, 1000.0), 4 * 300.0**2 * np.ones((9, 9)) + (2 * 40**2 + 30**2) * np.eye(9)
    ).logpdf(y)
    silos = cut({"y": y}, (4, 5))
    result = nf.SFVI(nested).run(KEY, 1, silos, **QUIET)
    np.testing.assert_allclose(-result.losses, exact, rtol=0, atol=NATS)
    local = nf.local.Optax(steps=2, tolerance=np.inf)
    # Its loss is an average over draws of the globals, which have noise of their own.
    pvi = nf.PVI(nested, local=local, evidence_draws=1_000).run(KEY, 1, silos, **QUIET)
    np.testing.assert_allclose(-pvi.losses, exact, rtol=0, atol=NATS)


def hospitals(hospital, n_hospitals, y):
    mu = numpyro.sample("mu", dist.Normal(100, 30))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, 9))
    with nf.silo_plate("patient", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(u[hospital], 5))
        numpyro.sample("y", dist.Normal(b, 2), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("locals_", ["auto", "diagonal"])
def test_outer_plates_begin_at_theirs(locals_, double):
    """Patients depend on their hospital; without couplings among hospitals nothing is lost."""
    r = np.random.default_rng(3)
    index = [np.array([0, 0, 1]), np.array([0, 1, 1, 1])]
    silos = [{"hospital": i, "n_hospitals": 2, "y": r.normal(100, 10, len(i))} for i in index]
    y = np.concatenate([s["y"] for s in silos])
    of = np.concatenate([index[0], 2 + index[1]])
    covariance = 900.0 + 81.0 * (of[:, None] == of) + 29.0 * np.eye(7)
    exact = stats.multivariate_normal(np.full(7, 100.0), covariance).logpdf(y)
    guide = nf.guides.Structured(locals=locals_)
    result = nf.SFVI(hospitals, guide=guide).run(KEY, 1, silos, **QUIET)
    np.testing.assert_allclose(-result.losses, exact, rtol=0, atol=NATS)


logistic = models.flat_logistic


def logistic_rows(n=120):
    r = np.random.default_rng(4)
    x = np.stack([np.ones(n), r.normal(size=n)], 1)
    return {"x": x, "y": (r.uniform(size=n) < 1 / (1 + np.exp(-x @ [0.3, 1.0]))) * 1.0}


@pytest.mark.slow
def test_the_factors_add_up_to_the_posterior_from_the_start(double):
    local = nf.local.Optax(steps=5, tolerance=np.inf)
    pvi = nf.PVI(logistic, schedule="synchronous", local=local)
    assert_sum_rule(pvi.run(KEY, 2, cut(logistic_rows(), (60, 20, 40)), **QUIET))


def exact_flat(x, y):
    real = dist.constraints.real_vector
    beta = numpyro.sample("beta", dist.ImproperUniform(real, (), (x.shape[1],)))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 2.0), obs=y)


@pytest.mark.slow
def test_effects_with_their_scale_begin_at_the_search_where_the_density_is_no_peak(double):
    """Of twenty effects with one vague outcome each the joint density has a saddle there."""

    def effects(i, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        b = numpyro.sample("b", dist.Normal(0, scale).expand([20]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.StudentT(30.0, b[i], 2.0), obs=y)

    y = np.where(np.arange(20) % 2, 2.2, -2.2)
    silos = [{"i": np.arange(20)[part], "y": y[part]} for part in (slice(0, 3), slice(3, 20))]
    result = nf.PVI(effects).run(KEY, 0, silos, **QUIET)
    mode = result.start
    draws = np.asarray(result.draw_globals(KEY, 4_000)[0])
    shift = (draws.mean(0) - mode.z_G) / draws.std(0)
    assert np.abs(shift).max() < 4 / np.sqrt(4_000)
    whitened = np.linalg.cholesky(mode.curvature).T @ (draws - mode.z_G).T
    assert np.linalg.eigvalsh(np.cov(whitened)) == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_pvi_with_a_flat_prior_is_least_squares(double):
    rows = raw_rows()
    result = nf.PVI(exact_flat).run(KEY, 1, cut(rows, (1, 39, 20)), **QUIET)
    posterior, (x, y) = result.posterior()["beta"], (rows["x"], rows["y"])
    np.testing.assert_allclose(posterior.mean, np.linalg.lstsq(x, y)[0], rtol=1e-5)
    np.testing.assert_allclose(posterior.covariance_matrix, 4 * np.linalg.inv(x.T @ x), rtol=1e-5)


@pytest.mark.parametrize("method", slow_but([nf.SFVI, nf.PVI], 0))
def test_an_improper_posterior_is_refused_and_its_direction_named(method, double):
    rows = logistic_rows()
    rows["y"] = (rows["x"][:, 1] > 0) * 1.0
    with pytest.raises(nf.ModelError, match=r"improper: .*beta\[1\]"):
        method(logistic).run(KEY, 3, cut(rows, (60, 60)), **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "nats"), [(None, 1e-6), ("mode", 0.05)])
def test_any_partition_begins_and_goes_on_alike(start, nats, double):
    """From zero the numbers are the same; silos' own modes lead to the same mode, up to 1e-4 nats.

    At a hundredth of a standard deviation from it, a single draw's bound may differ by more.
    """
    rows = logistic_rows()
    sfvi = nf.SFVI(logistic, num_particles=2, start=start)
    one, three = (sfvi.run(KEY, 20, cut(rows, s), **QUIET) for s in ((120,), (60, 20, 40)))
    np.testing.assert_allclose(one.losses, three.losses, rtol=0, atol=nats)


SFVI_, PVI_ = nf.SFVI(logistic), nf.PVI(logistic)


def predictor(method, rounds, rows):
    """Mean and sd of the predictor at each row, from the same noise."""
    result = method.run(KEY, rounds, cut(rows, (60, 20, 40)), **QUIET)
    eta = rows["x"] @ np.asarray(result.sample_posterior(KEY, 20_000)["beta"], float).T
    return eta.mean(1), eta.std(1)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rounds"), [(SFVI_, 1_000), (PVI_, 3)], ids=["sfvi", "pvi"])
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_units_of_the_covariates_do_not_matter(method, rounds, data):
    """In single precision: scales from 1e-4 to 1e4, mixed, and the intercept moved."""
    rows = logistic_rows()
    scale = 10.0 ** data.draw(st.floats(-4, 4))
    shift, mix = data.draw(st.floats(-3, 3)), data.draw(st.floats(-2, 2))
    A = np.array([[1.0, shift * scale], [0.0, scale]]) @ np.array([[1.0, 0.0], [mix / scale, 1.0]])
    mean, sd = predictor(method, rounds, rows)
    other, width = predictor(method, rounds, {**rows, "x": (rows["x"] @ A).astype(np.float32)})
    assert (np.abs(other - mean) < 0.05 * sd).all()
    assert (np.abs(width / sd - 1) < 0.05).all()


@pytest.mark.slow
def test_a_run_ends_where_it_has_settled_or_when_it_is_told():
    silos = cut(logistic_rows(), (60, 60))
    sfvi = SFVI_
    ended = sfvi.run(KEY, 3_000, silos, stop="converged", **QUIET)
    assert ended.ended == "converged"
    assert "come to rest" in ended.report(certificate=False)
    assert len(ended.losses) % 50 == 0
    assert len(ended.losses) < 3_000
    seen = []

    def look(result):
        seen.append(int(result.state.round))
        return len(seen) == 3

    told = sfvi.run(KEY, 100, silos, callback=look, every=20, **QUIET)
    assert (told.ended, seen, len(told.losses)) == ("callback", [20, 40, 60], 60)
    np.testing.assert_array_equal(told.losses, ended.losses[:60])
    pvi = PVI_.run(KEY, 20, silos, stop="converged", **QUIET)
    assert pvi.ended == "converged"
    assert len(pvi.losses) < 10


@pytest.mark.slow
def test_a_callback_that_raises_keeps_the_state():
    silos, sfvi = cut(logistic_rows(), (60, 60)), SFVI_

    def fails(result):
        raise RuntimeError("no space left")

    with pytest.raises(nf.CallbackError, match=r"RuntimeError .*round 10: no space") as caught:
        sfvi.run(KEY, 30, silos, callback=fails, every=10, **QUIET)
    rest = sfvi.run(KEY, 20, silos, init_state=caught.value.result.state, **QUIET)
    whole = sfvi.run(KEY, 30, silos, **QUIET)
    np.testing.assert_array_equal(rest.losses, whole.losses[10:])


@pytest.mark.parametrize(
    "method",
    [nf.SFVI(logistic), pytest.param(nf.PVI(logistic), marks=pytest.mark.slow)],
    ids=["sfvi", "pvi"],
)
def test_a_second_run_of_the_same_shapes_compiles_nothing(method, compiled):
    silos, other = cut(logistic_rows(), (60, 60)), jax.random.key(1)
    method.run(KEY, 3, silos, **QUIET)
    assert compiled
    compiled.clear()
    method.run(other, 3, silos, **QUIET)
    assert compiled == []


FAMILIES = {
    "diagonal": expfam.gaussian(2, "diagonal"),
    "full": expfam.gaussian(2, "full"),
    "product": expfam.product(
        {"a": (np.array([1, 2]), expfam.gaussian(2, "full")), "b": (np.array([0]), expfam.gamma())}
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_coordinates_of_a_member_change_no_density(name, double):
    family, r = FAMILIES[name], np.random.default_rng(5)

    def member():
        zeros = jax.eval_shape(lambda: family.ordinary(family.fit(lambda z: -0.5 * z @ z)))
        return jax.tree.map(lambda a: jnp.asarray(0.5 * r.normal(size=a.shape)), zeros)

    psi, step, eta = member(), member(), family.natural(member())
    moved = family.natural(family.composed(psi, step))
    inside = family.to_coordinates_of(psi, moved)
    np.testing.assert_allclose(
        *(
            jnp.concatenate([a.ravel() for a in jax.tree.leaves(x)])
            for x in (inside, family.natural(step))
        ),
        rtol=1e-9,
        atol=1e-9,
    )
    back = family.from_coordinates_of(psi, family.to_coordinates_of(psi, eta))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), back, eta)
    own = family.composed(psi, family.standard(psi))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), own, psi)


@pytest.mark.parametrize(
    "family",
    slow_but([expfam.gaussian(2, "full"), expfam.gamma((2,)), expfam.beta((2,))], 0),
    ids=lambda f: f.name,
)
def test_natural_parameters_around_a_place(family, double):
    """They have the gradient and the curvature that were asked for."""
    z, gradient = jnp.array([0.3, -0.7]), jnp.array([1.5, -0.4])
    curvature = jnp.diag(jnp.array([2.0, 0.7]))
    if family.name == "gaussian":
        curvature += 0.3 * jnp.ones((2, 2))
    eta = family.from_derivatives(z, gradient, curvature)

    def f(z):
        return expfam.inner(eta, family.statistics(z))

    np.testing.assert_allclose(jax.grad(f)(z), gradient, rtol=1e-8)
    np.testing.assert_allclose(-jax.hessian(f)(z), curvature, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_rows_under_a_joint_guide_begin_where_independent_ones_do():
    """Given the globals they are independent: nothing below the diagonal of their covariance."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10.0).expand([2]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, jnp.array([1.0, 3.0])).to_event(1))
            numpyro.sample("y", dist.Normal(b, 2.0).to_event(1), obs=y)

    rows = {"y": np.random.default_rng(0).normal(3, 2, (9, 2))}

    def first_loss(locals):
        guide = nf.guides.Structured(locals=locals)
        return nf.SFVI(model, guide=guide).run(KEY, 1, cut(rows, (5, 4)), **QUIET).losses[0]

    np.testing.assert_allclose(first_loss("joint"), first_loss("full"), rtol=1e-5)


@pytest.mark.slow
def test_a_run_of_visits_that_count_for_nothing_does_not_end_as_converged():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10.0))
        scale = numpyro.sample("scale", dist.HalfCauchy(2.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, mu, scale), obs=y)

    r = np.random.default_rng(0)
    silos = [{"y": r.normal(3, 2, 20)}, {"y": r.normal(3, 2, 30)}]
    broken = nf.PVI(model, local=nf.local.Optax(optim=optax.sgd(1e30), steps=5))
    with pytest.raises(nf.NonFiniteError, match="no update"):
        broken.run(KEY, 3, silos, stop="converged", **QUIET)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_many_globals_begin_near_the_mode_in_their_own_units(double):
    """The bound is as good at once as mean-field can be, up to some nats of the search."""
    r = np.random.default_rng(0)
    unit = 10 ** r.uniform(-2, 2, 310)
    x = r.normal(size=(900, 310)) * unit
    rows = {"x": x, "y": x @ (r.normal(size=310) / unit) + 3 * r.normal(size=900)}

    def model(x, y):
        with numpyro.plate("column", 310):
            beta = numpyro.sample("beta", dist.Normal(0, 1000.0))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 3.0), obs=y)

    guide = nf.guides.Structured(globals="diagonal")
    result = nf.SFVI(model, guide=guide).run(KEY, 20, cut(rows, (500, 400)), **QUIET)
    precision = x.T @ x / 9 + 1e-6 * np.eye(310)
    exact = np.linalg.solve(precision, x.T @ rows["y"] / 9)
    off = result.start.z_G - exact
    assert 0.5 * off @ precision @ off < 1
    log_det = 900 * np.log(2 * np.pi * 9) + np.linalg.slogdet(1e6 * precision)[1]
    log_evidence = -0.5 * (log_det + rows["y"] @ (rows["y"] - x @ exact) / 9)
    gap = 0.5 * (np.log(np.diagonal(precision)).sum() - np.linalg.slogdet(precision)[1])
    assert -log_evidence < result.losses.mean() < -log_evidence + gap + 2


def median(y, sd):
    """Mean and sd of ``mu ~ Normal(0, sd)`` under ``y ~ Laplace(mu, 3)``, by quadrature."""
    mu = np.median(y) + np.linspace(-9, 9, 20_001)
    log_p = -(mu**2) / sd**2 / 2 - np.abs(y[:, None] - mu).sum(0) / 3
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    return p @ mu, np.sqrt(p @ (mu - p @ mu) ** 2)


def assert_at(result, mean, sd):
    draws = np.asarray(result.sample_posterior(jax.random.key(1), 20_000)["mu"])
    assert abs(draws.mean() - mean) < 0.1 * sd
    assert 0.9 < draws.std() / sd < 1.1


@pytest.mark.slow
def test_a_likelihood_with_a_kink_has_no_curvature_to_start_from():
    model = models.kinked()
    y = np.random.default_rng(0).laplace(4.0, 3.0, 20)
    with pytest.warns(UserWarning, match="kink"):
        result = nf.PVI(model).run(KEY, 3, cut({"y": y}, (12, 8)), **QUIET)
    assert result.start is None
    assert_at(result, *median(y, 10.0))


kinked = models.kinked()


def kinked_silos():
    return cut({"y": np.random.default_rng(0).laplace(4.0, 3.0, 20)}, (12, 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no mode to start from")
@pytest.mark.parametrize(
    "method",
    [pytest.param(nf.PVI, marks=pytest.mark.slow), nf.SFVI],
    ids=["PVI", "SFVI"],
)
def test_a_run_without_a_mode_can_be_gone_on_from_and_loaded(method, tmp_path):
    sfvi, silos = method(kinked), kinked_silos()
    once = sfvi.run(KEY, 5, silos, **QUIET)
    first = sfvi.run(KEY, 3, silos, **QUIET)
    assert first.start is None
    then = sfvi.run(KEY, 2, silos, init_state=first.state, **QUIET)
    np.testing.assert_array_equal([*first.losses, *then.losses], once.losses)
    without = method(kinked, start=None).run(KEY, 5, silos, **QUIET)
    np.testing.assert_array_equal(without.losses, once.losses)
    first.save(tmp_path / "fit")
    for loaded in (
        sfvi.load(tmp_path / "fit", silos),
        nf.load(tmp_path / "fit", kinked, silos),
    ):
        again = sfvi.run(KEY, 2, silos, init_state=loaded.state, **QUIET)
        np.testing.assert_array_equal(again.losses, then.losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no mode to start from")
@pytest.mark.parametrize(
    "method",
    [pytest.param(nf.PVI, marks=pytest.mark.slow), nf.SFVI],
    ids=["PVI", "SFVI"],
)
def test_nodes_begin_as_one_process_does_where_there_is_no_mode(method):
    fit, silos = method(kinked), kinked_silos()
    there = Apart(fit, silos)
    apart = there.run(KEY, 3)
    assert apart.start is None
    together = fit.run(KEY, 3, silos, **QUIET)
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-4)
    again = there.run(KEY, 3)
    np.testing.assert_array_equal(again.losses, apart.losses)
    evidence = [nf.importance_correct(KEY, r, 100).log_evidence for r in (again, together)]
    np.testing.assert_allclose(*evidence, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.PVI, nf.SFVI], ids=["PVI", "SFVI"])
def test_a_laplace_likelihood_far_from_zero_is_started_without_its_kink(method):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1e4))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Laplace(mu, 3.0), obs=y)

    y = np.random.default_rng(0).laplace(2_000.0, 3.0, 20)
    rounds = 3 if method is nf.PVI else 1_000
    result = method(model).run(KEY, rounds, cut({"y": y}, (12, 8)), **QUIET)
    mean, sd = median(y, 1e4)
    assert abs(result.start.z_G[0] - mean) < 0.5 * sd
    assert 0.7 < result.start.covariance[0, 0] ** 0.5 / sd < 1.6
    assert_at(result, mean, sd)


@pytest.mark.slow
def test_many_effects_under_a_scale_have_no_mode_to_start_from():
    def model(g, y):
        tau = numpyro.sample("tau", dist.HalfNormal(5.0))
        b = numpyro.sample("b", dist.Normal(0, tau).expand([310]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(b[g], 1.0), obs=y)

    g = np.arange(620) % 310
    silos = cut({"g": g, "y": np.random.default_rng(0).normal(size=620)}, (310, 310))
    with pytest.warns(UserWarning, match="not integrated"):
        assert nf.SFVI(model).run(KEY, 2, silos, **QUIET).start is None
    with pytest.raises(nf.ModelError, match="not integrated"):
        nf.find_mode(KEY, model, silos)
