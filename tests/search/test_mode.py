"""The mode of the posterior over silos, locals integrated by Laplace's method."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from problems import cut, grouped, raw_rows, regression
from scipy import optimize, stats

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.laplace import Arrow, Laplace, SearchEnd
from numpyro_fed.text.layout import layout_and_buckets
from numpyro_fed.text.split import split

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def test_a_conjugate_model_takes_a_step_and_its_confirmation(double):
    rows = raw_rows()
    found = nf.find_mode(KEY, regression, cut(rows, (30, 10, 20)))
    precision = rows["x"].T @ rows["x"] / 4 + np.eye(3) / 1e4
    exact = np.linalg.solve(precision, rows["x"].T @ rows["y"] / 4)
    assert found.converged
    assert found.num_exchanges <= 8
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert (np.abs(found.sites["beta"] - exact) < 0.02 * sd).all()
    np.testing.assert_allclose(found.curvature, precision, rtol=1e-8, atol=1e-8)


def test_the_evidence_of_a_conjugate_model_is_exact(double):
    rows = gaussian_rows(30)
    found = nf.find_mode(KEY, regression, cut(rows, (20, 10)))
    covariance = rows["x"] @ rows["x"].T * 1e4 + 4 * np.eye(30)
    evidence = stats.multivariate_normal(np.zeros(30), covariance).logpdf(rows["y"])
    np.testing.assert_allclose(found.log_evidence, evidence, rtol=1e-8)


scaled = models.linear_and_scale()


@pytest.mark.slow
def test_raw_columns_in_single_precision_against_scipy():
    rows = raw_rows(200)
    found = nf.find_mode(KEY, scaled, cut(rows, (120, 30, 50)))

    def loss(z):
        noise = stats.norm(rows["x"] @ (z[:3] / rows["x"].std(0).clip(1)), np.exp(z[3]))
        prior = stats.norm(0, 1000).logpdf(z[:3] / rows["x"].std(0).clip(1)).sum()
        prior += stats.halfcauchy(scale=2.5).logpdf(np.exp(z[3])) + z[3]
        return -(noise.logpdf(rows["y"]).sum() + prior)

    exact = optimize.minimize(loss, [0, 0, 0, np.log(20)], method="BFGS", options={"gtol": 1e-4}).x
    exact[:3] /= rows["x"].std(0).clip(1)
    sd = np.sqrt(np.diag(found.covariance))
    assert found.converged
    assert found.num_exchanges <= 40
    assert (np.abs(found.z_G - exact) < 0.05 * sd).all()
    np.testing.assert_allclose(found.sites["sigma"], np.exp(exact[3]), rtol=0.01)


def mixed(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with nf.silo_plate("row", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, tau).expand([2]).to_event(1))
        loc = x @ beta + b[:, 0] + b[:, 1] * x[:, 1]
        numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


def gaussian_rows(n=13):
    x = np.stack([np.ones(n), RNG.normal(size=n)], 1)
    return {"x": x, "y": x @ [1.0, -0.5] + 0.7 * RNG.normal(size=n)}


def exact_marginal(z, x, y):
    """Of the model ``mixed``, at unconstrained globals."""
    variance = jnp.exp(2 * z[2]) * (1 + x[:, 1] ** 2) + 0.25
    return dist.Normal(x @ z[:2], jnp.sqrt(variance)).log_prob(y).sum()


def hospitals(h, n_hospitals, x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, tau))
    with nf.silo_plate("patient", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(u[h] * x, 0.8))
        numpyro.sample("y", dist.Normal(b + u[h], 0.5), obs=y)


def hospital_silo(sizes, seed=0):
    r = np.random.default_rng(seed)
    h = np.repeat(np.arange(len(sizes)), sizes)
    x = r.normal(size=len(h))
    return {"h": h, "n_hospitals": len(sizes), "x": x, "y": r.normal(size=len(h))}


def exact_hospitals(z, silo):
    """The latents of hospitals and patients integrated by hand: all is one Gaussian."""
    h, x = silo["h"], jnp.asarray(silo["x"])
    member = jnp.asarray(h[:, None] == np.arange(silo["n_hospitals"]), float)
    loading = member * (1 + x)[:, None]
    covariance = jnp.exp(2 * z[1]) * loading @ loading.T + (0.64 + 0.25) * jnp.eye(len(h))
    mean = z[0] * loading.sum(1)
    return dist.MultivariateNormal(mean, covariance).log_prob(jnp.asarray(silo["y"]))


def derivatives(f, z):
    return [np.asarray(d) for d in (f(z), jax.grad(f)(z), jax.hessian(f)(z))]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_gaussian_locals_are_integrated_exactly_with_two_derivatives(padded, double):
    rows = gaussian_rows()
    silos = cut(rows, (9, 4))
    fm, z = split(mixed, read(silos)), jnp.array([0.3, -0.2, 0.4])
    laplace, (_, buckets) = Laplace(fm), layout_and_buckets(mixed, read(silos))
    assert len(buckets) == 1
    data = jax.tree.map(lambda a: jnp.asarray(a)[1], buckets[0].data) if padded else read(silos)[1]
    assert bool(data.masks) == padded

    def ours(z):
        return laplace.differentiable({}, z, data, laplace.start(data))[0]

    x, y = rows["x"][9:], rows["y"][9:]
    for found, exact in zip(
        derivatives(jax.jit(ours), z),
        derivatives(lambda z: exact_marginal(z, x, y), z),
        strict=True,
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_latents_above_others_are_integrated_with_them(double):
    silo = hospital_silo((3, 1, 4))
    (data,) = read([silo])
    laplace, z = Laplace(split(hospitals, [data])), jnp.array([0.3, -0.2])

    def ours(z):
        return laplace.differentiable({}, z, data, laplace.start(data))[0]

    for found, exact in zip(
        derivatives(jax.jit(ours), z),
        derivatives(lambda z: exact_hospitals(z, silo), z),
        strict=True,
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-8, atol=1e-10)


def glmm(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0, 10))
    with nf.silo_plate("child", x.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))
        with numpyro.plate("visit", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + b)), obs=y)


def glmm_rows(n=40):
    r = np.random.default_rng(2)
    x = np.stack([np.ones((n, 4)), r.normal(size=(n, 4))], -1)
    return {"x": x, "y": r.poisson(np.exp(x @ [0.5, 0.3] + 0.7 * r.normal(size=(n, 1))))}


def wards(ward, n_wards, clinic, n_clinics, x, y):
    """Two plates above the rows, and rows with a latent of two dimensions; nothing is Gaussian."""
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    omega = numpyro.sample("omega", dist.Normal(0, 3))
    with nf.silo_plate("ward", n_wards):
        v = numpyro.sample("v", dist.Normal(mu, jnp.exp(omega)).expand([2]).to_event(1))
    with nf.silo_plate("clinic", n_clinics):
        u = numpyro.sample("u", dist.StudentT(4, 0, jnp.exp(omega / 2)))
    with nf.silo_plate("row", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 0.5).expand([2]).to_event(1))
        log_rate = v[ward, 0] + x * v[ward, 1] + u[clinic] + b[:, 0] + x * b[:, 1]
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)


def wards_silo():
    r = np.random.default_rng(3)
    where = dict(ward=np.repeat([0, 1], 4), n_wards=2, clinic=np.tile([0, 1, 2, 1], 2), n_clinics=3)
    return dict(**where, x=r.normal(size=8), y=r.poisson(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "silo", "at"),
    [(glmm, glmm_rows(7), [0.2, 0.1, 0.4]), (wards, wards_silo(), [0.2, -0.3])],
    ids=["rows", "rows below two plates"],
)
def test_derivatives_through_the_modes_are_those_of_the_value(model, silo, at, double):
    (data,) = read([silo])
    laplace, z, h = Laplace(split(model, [data])), np.array(at), 1e-4
    start = laplace.start(data)
    value = jax.jit(lambda z: laplace.differentiable({}, z, data, start)[0])
    slope = jax.jit(jax.grad(lambda z: laplace.differentiable({}, z, data, start)[0]))
    steps = h * np.eye(len(at))
    slopes = [(value(z + e) - value(z - e)) / (2 * h) for e in steps]
    curves = [(slope(z + e) - slope(z - e)) / (2 * h) for e in steps]
    np.testing.assert_allclose(slope(z), slopes, rtol=1e-6)
    np.testing.assert_allclose(jax.jacobian(slope)(z), curves, rtol=1e-5, atol=1e-6)


def test_a_row_without_a_step_moves_no_other():
    z, step = {"row": jnp.ones((3, 1))}, {"row": jnp.array([[0.5], [jnp.nan], [-1.0]])}
    none = Arrow(z, {}, {}, jnp.zeros((0, 0)))
    end = SearchEnd(z, none, step, jnp.array(jnp.nan))
    np.testing.assert_array_equal(end.modes["row"][:, 0], [1.5, 1.0, 0.0])


@pytest.mark.slow
def test_no_partition_matters():
    rows = glmm_rows()
    one, two, many = (
        nf.find_mode(KEY, glmm, cut(rows, sizes)) for sizes in ((40,), (31, 9), (1, 2, 30, 3, 4))
    )
    assert one.converged
    assert one.num_exchanges <= 30
    for other in (two, many):
        np.testing.assert_allclose(other.z_G, one.z_G, atol=1e-3)
        np.testing.assert_allclose(other.log_evidence, one.log_evidence, rtol=1e-4)


@pytest.mark.slow
def test_no_unit_matters(double):
    """An invertible linear map of the columns moves the coefficients, and nothing else."""
    rows = raw_rows(200)

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1e6).expand([3]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.StudentT(5, x @ beta, sigma), obs=y)

    r = np.random.default_rng(3)
    A = np.linalg.qr(r.normal(size=(3, 3)))[0] * 10.0 ** r.uniform(-4, 4, 3)
    mapped = {"x": rows["x"] @ A, "y": rows["y"]}
    plain, other = (nf.find_mode(KEY, model, cut(d, (120, 80))) for d in (rows, mapped))
    predicted = rows["x"] @ plain.sites["beta"]
    spread = np.sqrt(np.einsum("ni,ij,nj->n", rows["x"], plain.covariance[:3, :3], rows["x"]))
    assert plain.converged
    assert other.converged
    assert (np.abs(mapped["x"] @ other.sites["beta"] - predicted) < 0.05 * spread).all()


def link_model(outcome):
    """A regression of rows by the distribution of an outcome with this linear predictor."""

    def model(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", outcome(x @ beta), obs=y)

    return model


@pytest.mark.parametrize("scale", slow_but([1e-6, 1e3, 1e8], 2))
@pytest.mark.parametrize(
    ("outcome", "drawn"),
    slow_but(
        [
            (
                lambda eta: dist.Bernoulli(logits=eta),
                lambda r, eta: r.binomial(1, 1 / (1 + 1 / eta)),
            ),
            (lambda eta: dist.Poisson(jnp.exp(eta)), lambda r, eta: r.poisson(eta)),
            (lambda eta: dist.Gamma(3, 3 * jnp.exp(-eta)), lambda r, eta: r.gamma(3, eta / 3)),
        ],
        1,
    ),
    ids=["logistic", "poisson", "gamma"],
)
def test_counts_of_people_and_seconds_are_no_worse_than_standardised_columns(outcome, drawn, scale):
    """At 0.01 from zero a link would be at its end for all rows, where nothing has curvature."""
    r = np.random.default_rng(3)
    z = r.uniform(0.5, 2, 300)
    x = np.stack([np.ones(300), z], 1)
    y = drawn(r, np.exp(x @ [-0.3, 0.4]))
    model, columns = link_model(outcome), np.array([1, scale])
    one = nf.find_mode(KEY, model, cut({"x": x, "y": y}, (100, 200)))
    found = nf.find_mode(KEY, model, cut({"x": x * columns, "y": y}, (100, 200)))
    assert found.converged
    assert found.num_exchanges <= 8
    # The prior of a slope in small units is another one: of 1e-6 it says all.
    if scale > 1:
        sd = np.sqrt(np.diag(one.covariance))
        assert (np.abs(found.sites["beta"] * columns - one.sites["beta"]) < 0.02 * sd).all()


@pytest.mark.parametrize("rows", [50, 5_000])
def test_a_start_at_a_saddle_is_left(rows):
    """At zero two clusters are one, and a product has no gradient."""

    def clusters(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
        with nf.silo_plate("row", len(y)):
            parts = dist.Categorical(jnp.array([0.5, 0.5])), dist.Normal(mu, 1.0)
            numpyro.sample("y", dist.MixtureSameFamily(*parts), obs=y)

    def product(y):
        a, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in "ab")
        with nf.silo_plate("row", len(y)):
            numpyro.sample("y", dist.Normal(a * b, 1.0), obs=y)

    r = np.random.default_rng(0)
    y = np.concatenate([r.normal(m, 1, rows // 2) for m in (-3, 3)])
    # Of eight silos, all of which leave the saddle to the same side.
    of_clusters = nf.find_mode(KEY, clusters, [dict(y=y[j::8]) for j in range(8)])
    of_product = nf.find_mode(KEY, product, [dict(y=20 + y[j::8]) for j in range(8)])
    assert of_clusters.converged
    np.testing.assert_allclose(np.sort(of_clusters.sites["mu"]), [-3, 3], atol=0.5)
    assert of_product.converged
    assert of_product.sites["a"] * of_product.sites["b"] == pytest.approx(20, abs=0.5)
    assert max(of_clusters.num_exchanges, of_product.num_exchanges) <= 5


def test_several_starts_show_several_modes():
    model = models.squared(4)
    silos = [{"y": np.full(3, 9.0)}, {"y": np.full(4, 9.0)}]
    found = nf.find_mode(KEY, model, silos, starts=8)
    assert found.converged
    assert found.values.shape == (8,)
    np.testing.assert_allclose(found.sites["m"], -2.5, atol=0.05)


def test_what_has_no_mode_is_refused_by_name():
    def private(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            s = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
            numpyro.sample("y", dist.Normal(mu, s), obs=y)

    def nothing(y):
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y)

    silos = [{"y": np.ones(3)}]
    with pytest.raises(nf.ModelError, match=r"'s' .*silo_plate"):
        nf.find_mode(KEY, private, silos)
    with pytest.raises(nf.ModelError, match="nothing"):
        nf.find_mode(KEY, nothing, silos)


def flat(x, y):
    real = dist.constraints.real_vector
    beta = numpyro.sample("beta", dist.ImproperUniform(real, (), (x.shape[1],)))
    sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


@pytest.mark.slow
def test_flat_priors(double):
    """The mode of the least squares; of log sigma, which adds one to the degrees of freedom."""
    rows = gaussian_rows(30)
    silos = cut(rows, (17, 13))
    found = nf.find_mode(KEY, flat, silos)
    beta, (squares,) = np.linalg.lstsq(rows["x"], rows["y"])[:2]
    np.testing.assert_allclose(found.sites["beta"], beta, rtol=1e-3)
    np.testing.assert_allclose(found.sites["sigma"], np.sqrt(squares / 29), rtol=1e-2)
    nuts = nf.run_nuts(KEY, flat, silos, num_samples=300, num_warmup=300, progress_bar=False)
    sd = np.sqrt(np.diag(found.covariance))
    assert (np.abs(nuts.globals["beta"].reshape(-1, 2).mean(0) - beta) < 0.3 * sd[:2]).all()


def test_a_direction_that_is_open_is_named(double):
    rows = gaussian_rows(30)
    rows["x"] = np.column_stack([rows["x"], 1000 * rows["x"][:, 1]])
    with pytest.warns(UserWarning, match=r"does not fall along .*0.71 beta\[1\] .*0.71 beta\[2\]"):
        found = nf.find_mode(KEY, flat, cut(rows, (17, 13)))
    assert len(found.flat) == 1
    assert "sigma" not in found.flat[0]


def test_a_density_that_is_finite_nowhere_is_an_error():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(mu + 1e4)), obs=y)

    with pytest.raises(nf.NonFiniteError, match="no place"):
        nf.find_mode(KEY, model, [{"y": np.ones(3)}, {"y": np.ones(2)}])


def separable(x, y):
    real = dist.constraints.real_vector
    b = numpyro.sample("b", dist.ImproperUniform(real, (), (2,)))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def test_a_direction_that_runs_away_is_named():
    """Far out a separable logistic regression is flat, and every step promises little."""
    x = np.stack([np.ones(20), np.linspace(-2, 2, 20)], 1)
    silos = cut({"x": x, "y": (x[:, 1] > 0).astype(float)}, (7, 13))
    with pytest.warns(UserWarning, match=r"does not fall along .*\+0.71 b\[1\]"):
        found = nf.find_mode(KEY, separable, silos)
    assert not found.converged
    assert found.log_evidence is None


@pytest.mark.slow
def test_a_variance_that_runs_to_zero_is_named():
    """Groups no more unlike than noise, and a flat log scale of theirs: no mode, no posterior."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        t = numpyro.sample("t", dist.ImproperUniform(dist.constraints.real, (), ()))
        with nf.silo_plate("group", y.shape[0], dim=-2):
            u = numpyro.sample("u", dist.Normal(0, jnp.exp(t)))
            with numpyro.plate("row", y.shape[1], dim=-1):
                numpyro.sample("y", dist.Normal(mu + u, 1), obs=y)

    y = np.random.default_rng(4).normal(size=(12, 5))
    y -= 0.95 * y.mean(1, keepdims=True)
    with pytest.warns(UserWarning, match=r"does not fall along .*1.00 t"):
        found = nf.find_mode(KEY, model, cut({"y": y}, (8, 4)))
    assert not found.converged


def test_many_rows_in_single_precision_are_not_taken_for_a_mode_too_soon():
    """Rounding of a large density hides gains of a nat: the gradient has to tell."""
    r, n = np.random.default_rng(5), 300_000
    x = np.stack([np.ones(n), r.normal(100, 15, n)], 1)
    y = x @ [500.0, 3.0] + 1000 * r.normal(size=n)

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1e4).expand([2]).to_event(1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1000), obs=y)

    found = nf.find_mode(KEY, model, cut({"x": x, "y": y}, (200_000, 100_000)))
    precision = x.T @ x / 1e6 + np.eye(2) / 1e8
    exact = np.linalg.solve(precision, x.T @ y / 1e6)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    near = (np.abs(found.sites["beta"] - exact) < 0.15 * sd).all()
    assert near or not found.converged


def effect_rows():
    g = np.tile(np.arange(4), 10)
    return {"g": g, "y": np.array([1.0, 2.5, 4.0, 6.5])[g] + 2 * RNG.normal(size=40)}


@pytest.mark.slow
def test_effects_are_integrated_out_where_their_scale_is_sought(double):
    """Given tau all is Gaussian: the mode of (mu, log tau) by the marginal density, exactly."""
    rows = effect_rows()
    found = nf.find_mode(KEY, grouped(4), cut(rows, (15, 25)))
    x = np.eye(4)[rows["g"]]

    def minus_log_density(z):
        mu, tau = z[0], np.exp(z[1])
        covariance = tau**2 * x @ x.T + 4 * np.eye(40)
        log_lik = stats.multivariate_normal(np.full(40, mu), covariance).logpdf(rows["y"])
        return -log_lik - stats.norm(0, 10).logpdf(mu) - stats.halfnorm(0, 5).logpdf(tau) - z[1]

    exact = optimize.minimize(minus_log_density, [2.0, 0.0], tol=1e-10)
    assert found.converged
    np.testing.assert_allclose(found.z_G[:2], exact.x, atol=0.01)
    np.testing.assert_allclose(found.values.max(), -exact.fun, atol=1e-3)
    h = 1e-3 * np.eye(2)
    hessian = [
        [
            sum(
                s * t * minus_log_density(exact.x + s * a + t * b) for s in (1, -1) for t in (1, -1)
            )
            for b in h
        ]
        for a in h
    ]
    schur = np.linalg.inv(found.covariance[:2, :2])
    np.testing.assert_allclose(schur, np.array(hessian) / 4e-6, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_a_parameter_of_scale_is_the_one_of_empirical_bayes(double):
    """tau maximises the marginal likelihood; together with the effects it would go to zero."""

    def model(g, y):
        tau = numpyro.param("tau", 1.0, constraint=dist.constraints.positive)
        b = numpyro.sample("b", dist.Normal(0, tau).expand([4]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(b[g], 2.0), obs=y)

    rows = effect_rows()
    means = rows["y"].reshape(10, 4).mean(0)
    found = nf.find_mode(KEY, model, cut(rows, (15, 25)))
    np.testing.assert_allclose(found.theta["tau"] ** 2, (means**2).mean() - 0.4, rtol=0.01)


def test_columns_that_are_hardly_apart_are_not_called_improper():
    """A calendar year beside an intercept: single precision cannot tell the curvature, a look
    along it can.
    """

    def model(x, y):
        flat = dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
        beta, sigma = numpyro.sample("beta", flat), numpyro.sample("sigma", dist.HalfCauchy(5.0))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    r = np.random.default_rng(0)
    year = r.integers(2015, 2021, 120).astype(float)
    x = np.stack([np.ones(120), year], 1)
    rows = {"x": x, "y": 3 * (year - 2018) + 50 + 4 * r.normal(size=120)}
    found = nf.find_mode(KEY, model, cut(rows, (50, 30, 40)))
    exact, (squares,) = np.linalg.lstsq(x, rows["y"])[:2]
    sd = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * squares / 117)
    assert found.flat == ()
    # How coarsely sums of residuals times 2,018 are rounded depends on the processor and on XLA's
    # version: 0.2 to 0.9 sd off were seen. The search then says that it has not come to the mode.
    off = 0.3 if found.converged else 1.0
    assert (np.abs(found.sites["beta"] - exact) < off * sd).all()


def wide(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(100.0))
    with numpyro.plate("column", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, 1000.0))
    with nf.silo_plate("row", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, scale), obs=y)


def wide_rows(n=900, p=310):
    r = np.random.default_rng(0)
    x = (r.normal(size=(n, p)) + r.uniform(-2, 2, p)) * 10 ** r.uniform(-2, 2, p)
    return {"x": x, "y": x @ (r.normal(size=p) / x.std(0)) + 3 * r.normal(size=n)}


@pytest.mark.slow
def test_many_globals_are_found_by_gradients(double):
    rows = wide_rows()
    x, y = rows["x"], rows["y"]
    found = nf.find_mode(KEY, wide, cut(rows, (500, 400)), max_exchanges=1_000)
    sigma2 = float(found.sites["scale"]) ** 2
    precision = x.T @ x / sigma2 + 1e-6 * np.eye(x.shape[1])
    exact = np.linalg.solve(precision, x.T @ y / sigma2)
    off = found.sites["beta"] - exact
    assert found.converged
    assert 0.5 * off @ precision @ off < 0.1  # nats
    np.testing.assert_allclose(found.curvature[1:], np.diag(precision), rtol=1e-6)


def test_several_modes_are_told(double):
    def model(y):
        m = numpyro.sample("m", dist.Normal(0, 5.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(m**2, 1.0), obs=y)

    found = nf.find_mode(KEY, model, [{"y": np.full(9, 4.0)}, {"y": np.full(3, 4.0)}], starts=8)
    (other,) = found.others
    np.testing.assert_allclose(other.z_G, -found.z_G, atol=0.01)
    np.testing.assert_allclose(other.log_evidence, found.log_evidence, atol=0.01)
