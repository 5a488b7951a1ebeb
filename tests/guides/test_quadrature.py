"""Integrals over rows' latents against closed forms and adaptive integrals in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from cases import slow_but
from scipy import integrate, special, stats

import numpyro_fed as nf
from numpyro_fed.basics.errors import StartWarning
from numpyro_fed.data.silo_data import read
from numpyro_fed.guides.laplace import Laplace
from numpyro_fed.guides.quadrature import RowIntegrals
from numpyro_fed.text.split import split


def likelihood(model, silo, at, nodes=11, derivatives=False):
    """A silo's log likelihood at a vector of one number, with its two derivatives there."""
    (data,) = read([silo])
    fm = split(model, [data])

    @jax.jit
    def found(at):
        start = Laplace(fm).start(data)

        def value(z_G):
            return RowIntegrals(fm, nodes).log_likelihood({}, z_G, data, start)[0]

        if not derivatives:
            return value(at)
        first, second = jax.jvp(jax.value_and_grad(value), (at,), (jnp.ones(1),))
        return first[0], first[1][0], second[1][0]

    return found(jnp.array([at]))


def normal_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(mu, 1.5))
        with numpyro.plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(b, 0.5), obs=y)


def test_normal_rows_are_integrated_exactly(double):
    y = np.random.default_rng(0).normal(1, 2, (7, 3))
    value, first, second = likelihood(normal_rows, {"y": y}, 0.7, nodes=3, derivatives=True)
    cov = 0.25 * np.eye(3) + 1.5**2
    exact = stats.multivariate_normal(np.full(3, 0.7), cov).logpdf(y).sum()
    precision = np.linalg.inv(cov)
    np.testing.assert_allclose(value, exact, rtol=1e-12)
    np.testing.assert_allclose(first, (precision @ (y - 0.7).T).sum(), rtol=1e-6)
    np.testing.assert_allclose(second, -7 * precision.sum(), rtol=1e-5)


def hospitals(hospital, n_hospitals, y, latents):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(mu, 1.2))
    with nf.silo_plate("patient", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(u[hospital], 0.8)) if latents else u[hospital]
        numpyro.sample("y", dist.Normal(b, 0.5), obs=y)


@pytest.mark.parametrize(
    ("number", "latents"),
    [
        (1, False),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_effects_of_hospitals_above_patients_are_integrated_exactly(number, latents, double):
    r = np.random.default_rng(1)
    hospital = np.sort(r.integers(0, number, 9))[r.permutation(9)]
    y = r.normal(size=9)
    silo = dict(hospital=hospital, n_hospitals=number, y=y, latents=latents)
    value, first, _ = likelihood(hospitals, silo, 0.3, nodes=5, derivatives=True)
    same = (hospital[:, None] == hospital) * 1.2**2
    cov = same + (0.25 + (0.64 if latents else 0)) * np.eye(9)
    exact = stats.multivariate_normal(np.full(9, 0.3), cov).logpdf(y)
    np.testing.assert_allclose(value, exact, rtol=1e-11)
    np.testing.assert_allclose(first, np.linalg.solve(cov, y - 0.3).sum(), rtol=1e-6)


def counts(y, sd):
    a = numpyro.sample("a", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, sd))
        with numpyro.plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + b)), obs=y)


def answers(y, sd):
    a = numpyro.sample("a", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(0, sd))
        with numpyro.plate("visit", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=a + b), obs=y)


def log_pmf_of_counts(y, eta):
    return y * eta - np.exp(eta) - special.gammaln(y + 1)


def log_pmf_of_answers(y, eta):
    return -np.log1p(np.exp((1 - 2 * y) * eta))


def by_scipy(log_pmf, y, a, sd):
    def one(row):
        def f(b):
            return np.exp(log_pmf(row, a + b).sum() - 0.5 * (b / sd) ** 2)

        found = integrate.quad(f, -12 * sd, 12 * sd, epsabs=0, epsrel=1e-12, limit=500)[0]
        return np.log(found / sd) - 0.5 * np.log(2 * np.pi)

    return sum(map(one, y))


@pytest.mark.parametrize(
    ("model", "log_pmf", "sd", "nodes", "error"),
    [
        (counts, log_pmf_of_counts, 0.8, 11, 3e-6),
        (answers, log_pmf_of_answers, 2.2, 11, 2e-4),
        (answers, log_pmf_of_answers, 2.2, 25, 2e-6),
    ],
    ids=["counts", "answers", "answers-25"],
)
def test_rows_that_are_not_normal(model, log_pmf, sd, nodes, error, double):
    """The worst of 15 rows, in nats; what has been reached before."""
    r = np.random.default_rng(2)
    y = r.integers(0, 2, (15, 4)) if model is answers else r.poisson(2.0, (15, 4))
    silos = read([{"y": row[None], "sd": sd} for row in y])
    fm = split(model, silos[:1])

    @jax.jit
    def value(data):
        start = Laplace(fm).start(data)
        return RowIntegrals(fm, nodes).log_likelihood({}, jnp.array([0.4]), data, start)[0]

    off = [
        abs(float(value(data)) - by_scipy(log_pmf, row[None], 0.4, sd))
        for row, data in zip(y, silos, strict=True)
    ]
    assert max(off) < error


def drawn(model, silo, z_G, n):
    """Draws of a silo's latents given the globals."""
    (data,) = read([silo])
    fm = split(model, [data])
    integrals = RowIntegrals(fm)

    @jax.jit
    def draws(z_G):
        near = integrals.near({}, z_G, data, Laplace(fm).start(data))
        keys = jax.random.split(jax.random.key(0), n)
        return jax.vmap(lambda key: integrals.sample(key, {}, z_G, near, data))(keys)

    return jax.tree.map(np.asarray, draws(z_G))


@pytest.mark.slow
def test_latents_of_hospitals_and_patients_are_drawn_together(double):
    """Means and covariances of normal latents given the data, in closed form."""
    n, hospital = 20_000, np.array([0, 1, 0, 1, 1])
    y = np.array([1.0, -0.5, 0.3, 2.0, 0.1])
    silo = dict(hospital=hospital, n_hospitals=2, y=y, latents=True)
    z = drawn(hospitals, silo, jnp.array([0.3]), n)
    both = np.concatenate([z["hospital"][..., 0], z["patient"][..., 0]], 1)
    U = 1.44 * np.eye(2)
    B = U[hospital][:, hospital] + 0.64 * np.eye(5)
    cov = np.block([[U, U[:, hospital]], [U[hospital], B]])
    gain = np.linalg.solve(B + 0.25 * np.eye(5), cov[2:]).T
    mean, cov = 0.3 + gain @ (y - 0.3), cov - gain @ cov[2:]
    sd = np.sqrt(np.diagonal(cov))
    assert (np.abs(both.mean(0) - mean) < 4 * sd / np.sqrt(n)).all()
    error = 5 / np.sqrt(n) + 0.004  # of an even point of a cell
    assert (np.abs(np.cov(both.T) - cov) < error * np.outer(sd, sd)).all()


def test_a_skewed_latent_is_drawn_from_its_conditional(double):
    """Four answers, all yes, under an effect of sd 3: the mean and sd by an integral."""
    n, sd = 20_000, 3.0
    z = drawn(answers, {"y": np.ones((1, 4)), "sd": sd}, jnp.array([0.4]), n)["row"][:, 0, 0]
    b = np.linspace(-30, 30, 20_001)
    p = stats.norm.pdf(b, 0, sd) / (1 + np.exp(-0.4 - b)) ** 4
    mean = (p @ b) / p.sum()
    spread = np.sqrt(p @ (b - mean) ** 2 / p.sum())
    assert abs(z.mean() - mean) < 4 * spread / np.sqrt(n)
    assert abs(z.std() / spread - 1) < 4 / np.sqrt(n)


def shares(y, total, sd):
    with nf.silo_plate("hospital", 1):
        u = numpyro.sample("u", dist.Normal(0, sd))
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Binomial(total, logits=mu + u[0]), obs=y)


@pytest.mark.parametrize(
    ("yes", "of"), [(4.0, 4.0), (0.0, 1e5), (7e4, 1e5)], ids=["few", "rare", "nearly a cubic"]
)
def test_an_effect_of_a_hospital_is_drawn_whatever_its_rows_say(yes, of, double):
    """Rows that a polynomial through five points describes, and others: moments by an integral."""
    n, sd, mu = 20_000, 2.0, 0.4
    silo = {"y": np.array([yes]), "total": np.array([of]), "sd": sd}
    z = drawn(shares, silo, jnp.array([mu]), n)["hospital"][:, 0, 0]
    u = np.linspace(-25, 15, 400_001)
    log_p = yes * (mu + u) - of * np.logaddexp(0, mu + u) + stats.norm.logpdf(u, 0, sd)
    p = np.exp(log_p - log_p.max())
    mean = (p @ u) / p.sum()
    spread = np.sqrt(p @ (u - mean) ** 2 / p.sum())
    assert abs(z.mean() - mean) < 4 * spread / np.sqrt(n)
    assert abs(z.std() / spread - 1) < 4 / np.sqrt(n)


def lines_of_hospitals(x, y):
    s = numpyro.sample("s", dist.HalfNormal(2))
    with nf.silo_plate("hospital", 1):
        line = numpyro.sample("line", dist.Normal(0, 1.5).expand([2]).to_event(1))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(line[0, 0] + line[0, 1] * x, s), obs=y)


def test_intercept_and_slope_of_a_hospital_are_drawn_together(double):
    n, r = 20_000, np.random.default_rng(0)
    x = r.uniform(1, 3, 12)
    y = 1 - 0.5 * x + r.normal(size=12)
    z = drawn(lines_of_hospitals, {"x": x, "y": y}, jnp.array([0.0]), n)["hospital"][:, 0]
    X = np.stack([np.ones(12), x], 1)
    cov = np.linalg.inv(X.T @ X + np.eye(2) / 1.5**2)
    mean, sd = cov @ X.T @ y, np.sqrt(np.diagonal(cov))
    assert (np.abs(z.mean(0) - mean) < 4 * sd / np.sqrt(n)).all()
    assert (np.abs(np.cov(z.T) - cov) < (5 / np.sqrt(n) + 0.015) * np.outer(sd, sd)).all()


S = np.array([[1, 0.5], [0.5, 1]])


def pairs(x, y):
    a = numpyro.sample("a", dist.Normal(0, 2))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample(
            "b", dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1, 0.5], [0.5, 1]]))
        )
        numpyro.sample("y", dist.Normal(a + (x * b[:, None]).sum(-1), 0.5).to_event(1), obs=y)


@pytest.mark.slow
def test_a_pair_of_latents_is_integrated_and_drawn_in_its_own_frame(double):
    r = np.random.default_rng(3)
    x, y = r.normal(size=(4, 3, 2)), r.normal(size=(4, 3))
    value = likelihood(pairs, {"x": x, "y": y}, 0.7, nodes=5)
    exact = [
        stats.multivariate_normal(np.full(3, 0.7), xi @ S @ xi.T + 0.25 * np.eye(3)).logpdf(yi)
        for xi, yi in zip(x, y, strict=True)
    ]
    np.testing.assert_allclose(value, sum(exact), rtol=1e-11)
    n = 4_000
    z = drawn(pairs, {"x": x, "y": y}, jnp.array([0.7]), n)["row"]
    for i in range(4):
        precision = np.linalg.inv(S) + x[i].T @ x[i] / 0.25
        cov = np.linalg.inv(precision)
        mean, sd = cov @ x[i].T @ (y[i] - 0.7) / 0.25, np.sqrt(np.diagonal(cov))
        assert (np.abs(z[:, i].mean(0) - mean) < 4 * sd / np.sqrt(n)).all()
        error = 5 / np.sqrt(n) + 0.015
        assert (np.abs(np.cov(z[:, i].T) - cov) < error * np.outer(sd, sd)).all()


def squares(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with nf.silo_plate("row", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b**2, 0.3), obs=y)


@pytest.mark.slow
def test_rows_with_two_modes_far_apart_are_integrated_by_draws(double):
    """Twice the nodes would stand around the same mode."""
    y = np.array([4.0, 3.0, 5.0, 6.0, 4.5])
    silos = [{"y": y[:3]}, {"y": y[3:]}]
    fit = nf.SFVI(squares, start=None).run(jax.random.key(0), 50, silos, progress_bar=False)
    # A twentieth of the draws counts, so that four thousand have a standard error of 0.07.
    found = nf.importance_correct(jax.random.key(1), fit, num_draws=16_000)
    assert found.integration.gave_way
    mu, b = np.linspace(-6, 6, 241), np.linspace(-6, 6, 4_001)
    log_p = stats.norm.logpdf(mu)
    for v in y:
        joint = stats.norm.pdf(b, mu[:, None], 1) * stats.norm.pdf(v, b**2, 0.3)
        log_p = log_p + np.log(joint.sum(1) * (b[1] - b[0]))
    evidence = np.log(np.exp(log_p).sum() * (mu[1] - mu[0]))
    assert abs(found.log_evidence - evidence) < 0.1


def effects_of_rows(y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    with nf.silo_plate("row", y.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + u)), obs=y)


def silos_with_effects():
    rng = np.random.default_rng(2)
    y = rng.poisson(np.exp(0.3 + rng.normal(size=30)))
    return y, [dict(y=y[:15]), dict(y=y[15:])]


@pytest.fixture(scope="module")
def by_sfvi():
    _, silos = silos_with_effects()
    return nf.SFVI(effects_of_rows).run(jax.random.key(0), 1_500, silos, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["SFVI", "PVI"], 0))
def test_methods_integrate_effects_of_rows_by_default(method, by_sfvi):
    (y, silos), result = silos_with_effects(), by_sfvi
    if method == "PVI":
        result = nf.PVI(effects_of_rows).run(jax.random.key(0), 4, silos, progress_bar=False)
    a = np.linspace(-1.5, 1.8, 400)
    u = np.linspace(-6, 6, 801)
    # The same integral on a grid: nothing is shared with the code above.
    pmf = stats.poisson.pmf(y[:, None, None], np.exp(a[:, None] + u))
    rows = np.log((pmf * stats.norm.pdf(u)).sum(-1) * (u[1] - u[0])).sum(0)
    weights = np.exp((log := rows + stats.norm.logpdf(a, 0, 5)) - log.max())
    mean = np.average(a, weights=weights)
    sd = np.average((a - mean) ** 2, weights=weights) ** 0.5
    draws = result.sample_posterior(jax.random.key(1), 20_000)["a"]
    assert abs(draws.mean() - mean) < 0.08 * sd
    assert 0.94 < draws.std() / sd < 1.06  # 0.8 by the ELBO


@pytest.mark.slow
def test_the_objective_is_the_papers_where_a_guide_of_the_locals_is_chosen():
    silos = [dict(y=np.array([0, 3])), dict(y=np.array([1, 2, 2]))]

    def objective(**settings):
        method = nf.SFVI(effects_of_rows, **settings)
        return method.run(jax.random.key(0), 1, silos, progress_bar=False)._fit.built.objective

    assert objective() == nf.Quadrature(11)
    assert objective(guide=nf.guides.Structured(globals="full")) == nf.Quadrature(11)
    for settings in (
        dict(start=None),
        dict(guide=nf.guides.MeanField()),
        dict(guide=nf.guides.Structured(couple_scale=False)),
        dict(batch_size=2),
        dict(objective=nf.ELBO()),
    ):
        assert objective(**settings) == nf.ELBO()


def duels(a, b, n_players, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with nf.silo_plate("player", n_players):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("match", a.shape[0]):
        numpyro.sample("y", dist.Normal(u[a] - u[b], 1), obs=y)


def duel_silo(n, m, seed):
    r = np.random.default_rng(seed)
    a = r.integers(0, n, m)
    b = (a + 1 + r.integers(0, n - 1, m)) % n
    u = r.normal(0, 1.5, n)
    return dict(a=a, b=b, n_players=n, y=u[a] - u[b] + r.normal(size=m))


@pytest.mark.slow
def test_rows_that_read_two_rows_of_an_outer_plate_are_not_integrated_row_by_row(double):
    silo = duel_silo(8, 60, 0)
    assert np.isnan(likelihood(duels, silo, 0.3))
    # One that meets itself alone, and a match of two of two players.
    assert np.isnan(likelihood(duels, duel_silo(2, 5, 1), 0.3))


def won_duels(a, b, n_players, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with nf.silo_plate("player", n_players):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with nf.silo_plate("match", a.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=u[a] - u[b]), obs=y)


@pytest.mark.slow
def test_a_posterior_of_duels_is_that_of_integrals_over_all_players():
    r, silos = np.random.default_rng(0), []
    for _ in range(8):
        a = r.integers(0, 3, 25)
        b = (a + 1 + r.integers(0, 2, 25)) % 3
        u = r.normal(0, 1.5, 3)
        y = (r.random(25) < 1 / (1 + np.exp(u[b] - u[a]))).astype(int)
        silos.append(dict(a=a, b=b, n_players=3, y=y))
    result = nf.fit(jax.random.key(0), won_duels, silos, progress_bar=False)

    t = np.linspace(0.02, 7, 350)
    nodes, w = np.polynomial.hermite_e.hermegauss(24)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    log_w = np.log(w / np.sqrt(2 * np.pi))
    log_w = np.add.outer(np.add.outer(log_w, log_w), log_w).ravel()
    log = stats.halfnorm.logpdf(t, scale=2)
    for s in silos:
        sign = 2 * s["y"] - 1
        for i, tau in enumerate(t):
            logits = tau * (grid[:, s["a"]] - grid[:, s["b"]]) * sign
            log[i] += special.logsumexp(log_w - np.logaddexp(0, -logits).sum(1))
    weights = np.exp(log - log.max())
    mean = np.average(t, weights=weights)
    sd = np.average((t - mean) ** 2, weights=weights) ** 0.5
    tau = result.sample_posterior(jax.random.key(1), 20_000)["tau"]
    assert result.trusted
    assert abs(tau.mean() - mean) < 0.1 * sd
    assert 0.92 < tau.std() / sd < 1.08


@pytest.mark.slow
def test_rows_that_read_each_other_go_on_by_the_papers_bound():
    def walk(y):
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        with nf.silo_plate("time", y.shape[0]):
            u = numpyro.sample("u", dist.Normal(0, tau))
            numpyro.sample("y", dist.Normal(jnp.cumsum(u), 0.5), obs=y)

    silos = [dict(y=np.arange(6.0)), dict(y=-np.arange(6.0))]
    with pytest.warns(StartWarning, match="reads latents of other rows"):
        result = nf.SFVI(walk).run(jax.random.key(0), 5, silos, progress_bar=False)
    assert result._fit.built.objective == nf.ELBO()


@pytest.mark.slow
def test_a_run_goes_on_from_one_by_quadrature(by_sfvi):
    _, silos = silos_with_effects()
    second = nf.SFVI(effects_of_rows, start=by_sfvi)
    result = second.run(jax.random.key(1), 20, silos, progress_bar=False)
    assert result._fit.built.objective == nf.Quadrature(11)
    assert np.isfinite(result.losses).all()
