"""What PVI may not get wrong in silence: conjugacy, convergence, fixed points, precision."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import mark_slow, slow_but
from laid_open import put_in_place
from problems import cut
from pvi_problems import KEY, QUIET, logistic, logistic_rows, mean

import numpyro_fed as nf
from numpyro_fed import expfam
from numpyro_fed.data.silo_data import SiloData, read
from numpyro_fed.local import LBFGS
from numpyro_fed.local.natural import FixedPoint
from numpyro_fed.local.problem import LocalNoise, Problem
from numpyro_fed.pvi.families import conjugacy, globals_of
from numpyro_fed.pvi.silo import Status
from numpyro_fed.text.split import split


def location(prior, likelihood, unit=1.0):
    def model(y):
        m = numpyro.sample("m", prior)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", likelihood(m * unit), obs=y)

    return model


def normal(m):
    return dist.Normal(m, 3.0)


def stack(*silos):
    return jax.tree.map(lambda *a: np.stack(a), *(SiloData(dict(s)) for s in silos))


def two(*weighted):
    weights, parts = zip(*weighted, strict=True)
    return dist.MixtureGeneral(dist.Categorical(probs=jnp.array(weights)), list(parts))


OUTSIDE = {
    "mixture": two((0.5, dist.Normal(0, 1)), (0.5, dist.Normal(20, 1))),
    "spike": two((0.5, dist.Normal(0, 1)), (0.5, dist.Normal(3.3, 1e-4))),
    "laplace": dist.Laplace(50.0, 1.0),
    "student": dist.StudentT(3.0, 0.0, 1000.0),
}


@pytest.mark.parametrize("name", mark_slow(OUTSIDE, ["mixture"]))
def test_a_prior_that_is_gaussian_around_zero_alone_is_refused_by_name(name):
    fm = split(location(OUTSIDE[name], normal), read([dict(y=np.zeros(2))]))
    with pytest.raises(nf.ModelError, match=r"'m'.*outside"):
        globals_of(fm, "auto")


def regression(likelihood, scale):
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", likelihood(x @ b), obs=y)

    return model


def raw(offset, columns=2, n=20):
    """Covariates around 100, outcomes around ``offset``."""
    r = np.random.default_rng(0)
    x = np.column_stack([np.ones(n), r.normal(100, 15, (n, columns - 1))])
    return dict(x=x, y=offset + x @ r.normal(size=columns) + r.laplace(size=n))


@pytest.mark.parametrize(
    ("likelihood", "scale", "offset", "columns", "expected"),
    slow_but(
        [
            (dist.Normal, 1e6, 1e4, 2, True),
            (dist.Normal, 1e3, 1e8, 120, True),
            (dist.Laplace, 100.0, 50.0, 2, False),
            (lambda m, s: dist.StudentT(3, m, 50 * s), 1e3, 1e3, 2, False),
        ],
        0,
        2,
    ),
    ids=["normal", "normal of 120", "laplace", "student"],
)
def test_a_likelihood_is_conjugate_only_if_it_is_so_far_away(
    likelihood, scale, offset, columns, expected
):
    """Wide priors, and data far from zero."""
    rows = raw(offset, columns)
    model = regression(lambda m: likelihood(m, 1.0), scale)
    fm = split(model, read([rows]))
    assert conjugacy(fm, globals_of(fm, "auto"))([stack(rows)]) is expected


def test_a_likelihood_that_is_impossible_far_away_is_not_conjugate():
    def model(y):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", jnp.where(jnp.abs(m) < 1e3, -((y - m) ** 2), -jnp.inf))

    fm = split(model, read([dict(y=np.zeros(2))]))
    assert not conjugacy(fm, globals_of(fm, "auto"))([stack(dict(y=np.zeros(2)))])


def test_conjugacy_is_judged_by_each_datas_values_and_compiled_once(compiled):
    def model(x, y):
        m = numpyro.sample("m", dist.Normal(0.0, 2.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m + x * jnp.abs(m), 1.0), obs=y)

    line, bent = (dict(x=np.array([0.0, x]), y=np.array([1.0, 2.0])) for x in (0.0, 0.5))
    fm = split(model, read([line]))
    verdict = conjugacy(fm, globals_of(fm, "auto"))
    assert verdict([stack(line, line)])
    before = len(compiled)
    assert not verdict([stack(line, bent)])
    assert verdict([stack(line, line)])
    assert len(compiled) == before


def believed(monkeypatch):
    """A verdict that is wrong: the guard at run time is all that is left."""
    import numpyro_fed.pvi.method as module

    monkeypatch.setattr(module, "conjugacy", lambda fm, chosen: lambda stacks: True)


@pytest.mark.slow
def test_the_closed_form_is_guarded_in_nats_where_it_leads(monkeypatch):
    believed(monkeypatch)
    r = np.random.default_rng(0)
    x = np.column_stack([np.ones(40), r.normal(size=40)])
    rows = dict(x=x, y=x @ [50.0, 5.0] + r.laplace(size=40))
    pvi = nf.PVI(regression(lambda m: dist.Laplace(m, 1.0), 100.0), start=None)
    with pytest.raises(nf.NonFiniteError, match="not conjugate") as e:
        pvi.run(KEY, 1, cut(rows, (20, 20)), **QUIET)
    np.testing.assert_allclose(e.value.result.posterior()["b"].variance, 1e4, rtol=1e-5)


@pytest.mark.slow
def test_the_guard_takes_no_rounding_in_single_precision_for_a_misfit():
    y = (3e4 + np.random.default_rng(0).normal(size=2_000)).astype(np.float32)
    pvi = nf.PVI(location(dist.Normal(0, 1e5), lambda m: dist.Normal(m, 1.0)), start=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pvi.run(KEY, 1, cut(dict(y=y), (1_500, 500)), **QUIET)
    assert (result.status == Status.CONVERGED).all()


@pytest.mark.slow
def test_a_visit_that_stops_far_from_its_optimum_has_not_converged():
    """Adam at 0.05 cannot travel a thousand, and its steps end all the same."""
    y = 1000 + 50 * np.random.default_rng(0).standard_t(3, 10)
    model = location(dist.Normal(0, 1000), lambda m: dist.StudentT(3, m, 50.0))
    pvi = nf.PVI(model, local=nf.local.Optax(steps=200), start=None)
    with pytest.warns(UserWarning, match="not converged at silos? 0"):
        result = pvi.run(KEY, 1, cut(dict(y=y), (5, 5)), **QUIET)
    assert result.status[0, 0] == Status.NOT_CONVERGED
    assert not result.settled
    assert "Not at rest" in result.report(certificate=False)


@pytest.mark.slow
def test_a_run_says_whether_its_rounds_have_come_to_rest():
    pvi = nf.PVI(logistic, local=LBFGS(num_particles=256), start=None)
    silos = cut(logistic_rows(), (12, 12))
    with pytest.warns(UserWarning, match="still moved"):
        first = pvi.run(KEY, 1, silos, **QUIET)
    assert not first.settled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last = pvi.run(KEY, 3, silos, init_state=first.state, **QUIET)
    assert last.settled, last.report(certificate=False)


@pytest.mark.slow
def test_conjugate_rounds_are_exact_at_once_unless_they_are_damped():
    model, rows, _ = mean()
    silos = cut(rows, (5, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nf.PVI(model, start=None).run(KEY, 1, silos, **QUIET).settled
    with pytest.warns(UserWarning, match="still moved"):
        damped = nf.PVI(model, damping=0.5, start=None).run(KEY, 1, silos, **QUIET)
    assert "with about" in damped.report(certificate=False)


@pytest.mark.slow
def test_one_silo_that_was_visited_is_at_its_fixed_point():
    pvi = nf.PVI(logistic, local=LBFGS(num_particles=256), start=None)
    assert pvi.run(KEY, 1, [logistic_rows()], **QUIET).settled


@pytest.mark.slow
def test_rounding_that_moves_the_posterior_is_said():
    """In single precision natural parameters hold no mean a million deviations from zero."""
    y = 1e6 + np.random.default_rng(0).normal(size=400)
    pvi = nf.PVI(location(dist.Normal(0, 1e7), lambda m: dist.Normal(m, 1.0)), start=None)
    with pytest.warns(UserWarning, match="rounding"):
        result = pvi.run(KEY, 1, cut(dict(y=y), (300, 100)), **QUIET)
    assert not result.settled
    assert not result.trusted


@pytest.mark.slow
def test_a_run_that_overflows_ends_in_an_error_that_says_so():
    """The prior's precision is zero in single precision."""
    pvi = nf.PVI(location(dist.Normal(0, 1e23), normal, unit=1e-26), start=None)
    with pytest.raises(nf.NonFiniteError, match="no update"):
        pvi.run(KEY, 1, [dict(y=np.ones(2))], **QUIET)


@pytest.mark.slow
def test_a_cholesky_factor_of_correlations_can_be_read_and_drawn():
    def model(y):
        L = numpyro.sample("L", dist.LKJCholesky(3, 2.0).expand([2]))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(3), scale_tril=L[0]), obs=y)

    chosen = globals_of(split(model, read([dict(y=np.zeros((2, 3)))])), "auto", "factor")
    eta = chosen.family.fit(lambda z: -0.5 * (z**2).sum())
    q = chosen.marginals(eta)["L"]
    L = q.sample(KEY, (5,))
    assert L.shape == (5, 2, 3, 3)
    np.testing.assert_allclose((L**2).sum(-1), 1.0, rtol=1e-5)
    assert np.isfinite(q.log_prob(L)).all()


def by_quadrature(x, y):
    """The exact means and standard deviations of ``tau`` and of ``b``."""
    tau, K, d = np.linspace(0.02, 3, 300), x @ x.T, x.shape[1]
    V = tau[:, None, None] ** 2 * K + np.eye(len(y))
    residual = np.linalg.solve(V, np.broadcast_to(y, (300, len(y)))[..., None])[..., 0]
    log_p = -0.5 * (np.linalg.slogdet(V)[1] + residual @ y + tau**2)
    w = np.exp(log_p - log_p.max())
    w, first, second = w / w.sum(), np.zeros(d), np.zeros(d)
    for p, t in zip(w, tau, strict=True):
        C = np.linalg.inv(x.T @ x + np.eye(d) / t**2)
        m = C @ x.T @ y
        first, second = first + p * m, second + p * (np.diag(C) + m**2)
    mean = (w * tau).sum()
    return mean, np.sqrt((w * tau**2).sum() - mean**2), first, np.sqrt(second - first**2)


@pytest.mark.slow
def test_the_servers_factor_has_draws_enough_for_many_globals():
    """Regression with 70 slopes whose scale is a global; what the silos know is a Gaussian."""
    r = np.random.default_rng(0)
    x = r.normal(size=(30, 70))
    y = x @ (0.5 * r.normal(size=70)) + r.normal(size=30)
    tau, tau_sd, b, b_sd = by_quadrature(x, y)
    family = expfam.gaussian(71, "full")
    cavity = family.fit(lambda z: -0.5 * ((y - x @ z[1:]) ** 2).sum())

    def log_lik(psi, own, noise, plain):
        z = jax.vmap(family.draw, (None, 0))(psi, noise.globals)
        scale = jnp.exp(z[:, :1])
        prior = dist.Normal(0, scale).log_prob(z[:, 1:]).sum(1)
        return z, prior + dist.HalfNormal(1.0).log_prob(scale[:, 0]) + z[:, 0]

    def noise(key, n, batch):
        return LocalNoise(family.noise(key, n), {}, None)

    start = family.ordinary(family.fit(lambda z: -2 * z @ z))
    problem = Problem(family, cavity, start, (), noise, log_lik, None, 0, None)
    found = jax.jit(lambda key: FixedPoint().solve(problem, key))(KEY)
    mean, sd = family.mean_and_sd(family.ordinary(found.eta))
    assert found.converged
    np.testing.assert_allclose(np.exp(mean[0] + sd[0] ** 2 / 2), tau, atol=0.3 * tau_sd)
    np.testing.assert_allclose((mean[1:] - b) / b_sd, 0.0, atol=0.1)
    np.testing.assert_allclose(sd[1:] / b_sd, 1.0, atol=0.1)


@pytest.mark.parametrize(("covariance", "draws"), [("full", 132), ("diagonal", 64)])
def test_a_fixed_point_draws_enough_for_the_family(covariance, draws):
    """Four for each statistic of a coordinate: too few have a singular covariance."""
    family, asked = expfam.gaussian(32, covariance), []

    def noise(key, n, batch):
        asked.append(n)
        return LocalNoise(family.noise(key, n), {}, None)

    def log_lik(psi, own, noise, plain):
        z = jax.vmap(family.draw, (None, 0))(psi, noise.globals)
        return z, -(z**2).sum(1)

    cavity = family.fit(lambda z: -0.5 * z @ z)
    start = family.ordinary(cavity)
    problem = Problem(family, cavity, start, (), noise, log_lik, None, 0, None)
    jax.eval_shape(lambda key: FixedPoint().solve(problem, key), KEY)
    assert asked[0] == draws


@pytest.mark.slow
def test_a_factor_of_the_servers_that_has_not_converged_is_reported(monkeypatch):
    put_in_place(monkeypatch, "factor_for_the_prior", lambda: LBFGS(steps=1))
    model = location(dist.StudentT(3.0, 0.0, 1.0), normal)
    with pytest.warns(UserWarning, match="server's own factor"):
        result = nf.PVI(model, prior="factor", start=None).run(
            KEY, 1, [dict(y=np.full(3, 9.0))], **QUIET
        )
    assert result.rejections["server_not_converged"] == 1
    assert not result.settled
    assert "server: its own factor" in result.report(certificate=False)


@pytest.mark.slow
def test_a_raw_regression_is_not_taken_for_one_that_is_not_conjugate():
    """Sums over thousands of raw rows lose digits in single precision; that is said, no more."""
    r = np.random.default_rng(0)
    x = np.stack([np.ones(20_000), r.normal(50, 10, 20_000)], 1)
    rows = dict(x=x, y=x @ [100.0, 3.0] + r.normal(0, 5, 20_000))
    pvi = nf.PVI(regression(lambda m: dist.Normal(m, 5.0), 1e3), start=None)
    with pytest.warns(UserWarning, match="rounding"):
        result = pvi.run(KEY, 2, cut(rows, (10_000, 10_000)), **QUIET)
    assert (result.status == Status.CONVERGED).all()


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["exact", "factor"])
def test_a_second_run_compiles_nothing_at_all(prior, compiled):
    pvi = nf.PVI(logistic, prior=prior, local=LBFGS(steps=3, num_particles=4), start=None)
    silos = cut(logistic_rows(), (12, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pvi.run(KEY, 1, silos, **QUIET)
        before = len(compiled)
        pvi.run(KEY, 1, silos, **QUIET)
    assert compiled[before:] == []
