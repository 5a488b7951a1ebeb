"""What comes after a fit, against closed forms: prediction, and what a silo changes."""

import dataclasses

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from cases import slow_but
from numpyro.contrib.control_flow import scan

import numpyro_fed as nf
from numpyro_fed.after.predict import check_means, predictor
from numpyro_fed.basics.errors import DataError, ModelError
from numpyro_fed.data.silo_data import read
from numpyro_fed.text.split import split

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
SIZES = (20, 35, 50)


def model(x, hospital, n_hospitals, y=None):
    """A regression with an effect for each hospital; all variances known."""
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    with nf.silo_plate("hospital", n_hospitals):
        u = numpyro.sample("u", dist.Normal(0, 1.5))
    with nf.silo_plate("patient", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ beta + u[hospital])
        numpyro.sample("y", dist.Normal(mean, 2), obs=y)


@pytest.fixture(scope="module")
def silos():
    r = np.random.default_rng(0)
    found = []
    for size in SIZES:
        x = np.stack([np.ones(size), r.normal(50, 10, size)], 1)
        y = x @ [1.0, 0.2] + r.normal(0, 1.5) + r.normal(0, 2, size)
        found.append(dict(x=x, hospital=np.zeros(size, int), n_hospitals=1, y=y))
    return found


@pytest.fixture(scope="module")
def fitted(silos):
    return nf.fit(KEY, model, silos, **QUIET)


def exact(silos):
    """Mean and covariance of the coefficients and of all hospitals' effects."""
    design = np.zeros((sum(len(s["y"]) for s in silos), 2 + len(silos)))
    row = 0
    for j, s in enumerate(silos):
        rows = slice(row, row := row + len(s["y"]))
        design[rows, :2], design[rows, 2 + j] = s["x"], 1.0
    prior = np.diag([0.01, 0.01, *[1 / 1.5**2] * len(silos)])
    covariance = np.linalg.inv(prior + design.T @ design / 4)
    return covariance @ design.T @ np.concatenate([s["y"] for s in silos]) / 4, covariance


NEW = dict(x=np.array([[1.0, 40.0], [1.0, 70.0]]), hospital=np.zeros(2, int), n_hospitals=1)


def close(draws, mean, variance, margin=0.1):
    """Compare draws (n, rows) with normal distributions."""
    draws = np.asarray(draws)
    assert np.abs(draws.mean(0) - mean).max() < margin * np.sqrt(np.min(variance))
    np.testing.assert_allclose(draws.std(0), np.sqrt(variance), rtol=0.05)


@pytest.mark.slow
def test_a_known_silo_has_its_own_effect(fitted, silos):
    mean, covariance = exact(silos)
    for j in (0, 2):
        at = np.concatenate([NEW["x"], np.eye(3)[[j, j]]], 1)
        variance = np.einsum("ri,ij,rj->r", at, covariance, at)
        found = fitted.predict(jax.random.key(1), NEW, silo=j, n=4_000)
        close(found["y"], at @ mean, variance + 4)
        close(found["mean"], at @ mean, variance)


@pytest.mark.slow
def test_a_new_silo_has_an_effect_from_the_prior(fitted, silos):
    mean, covariance = exact(silos)
    x = NEW["x"]
    variance = np.einsum("ri,ij,rj->r", x, covariance[:2, :2], x) + 1.5**2 + 4
    draws = np.asarray(fitted.predict(jax.random.key(1), NEW, n=4_000)["y"])
    close(draws, x @ mean[:2], variance)
    # Its two patients share one effect.
    shared = x[0] @ covariance[:2, :2] @ x[1] + 1.5**2
    assert np.cov(draws.T)[0, 1] == pytest.approx(shared, abs=0.15 * variance[0])


@pytest.mark.slow
def test_rows_of_the_fit_have_all_latents_of_their_silo(fitted, silos):
    mean, covariance = exact(silos)
    parts = fitted.predict(jax.random.key(1), silo="own rows", n=4_000)
    for j, (part, silo) in enumerate(zip(parts, silos, strict=True)):
        assert part["y"].shape == (4_000, SIZES[j])
        effect = np.tile(np.eye(3)[j], (SIZES[j], 1))
        design = np.concatenate([silo["x"], effect], 1)
        variance = np.einsum("ri,ij,rj->r", design, covariance, design) + 4
        close(part["y"], design @ mean, variance)
    alone = fitted.predict(jax.random.key(1), silo=1, n=50)
    assert alone["y"].shape == (50, SIZES[1])


@pytest.mark.slow
def test_means_of_outcomes_have_none_of_their_noise(fitted):
    """The mean of a normal outcome is its location, at the draws of the same key."""
    for silo, numbers in ((0, [2]), ("new", [2]), ("own rows", SIZES)):
        new = (NEW,) if silo != "own rows" else ()
        found = fitted.predict(jax.random.key(1), *new, silo=silo, n=64, mean=True)
        found = [found] if new else found
        assert [part["y"].shape for part in found] == [(64, number) for number in numbers]
        for part in found:
            np.testing.assert_allclose(part["y"], part["mean"], rtol=1e-6)
    drawn = fitted.predict(jax.random.key(1), NEW, silo="new", n=64)["mean"]
    mean = fitted.predict(jax.random.key(1), NEW, silo="new", n=64, mean=True)["y"]
    np.testing.assert_allclose(drawn, mean, rtol=1e-6)


def by_steps(mu, y):
    def step(before, now):
        with nf.silo_plate("row", 3):
            numpyro.sample("y", dist.Normal(mu * before + 1, 1), obs=now)
        return before + 1, None

    scan(step, 0.0, y, length=4)


OUTCOMES = {
    "normal": (lambda mu: dist.Normal(mu, 1), lambda mu: mu),
    "yes or no": (lambda mu: dist.Bernoulli(logits=mu), lambda mu: 1 / (1 + np.exp(-mu))),
    "counts": (lambda mu: dist.NegativeBinomial2(np.e**mu, 5.0), np.exp),
    "of ten": (lambda mu: dist.Binomial(10, logits=mu), lambda mu: 10 / (1 + np.exp(-mu))),
    "zeros": (
        lambda mu: dist.ZeroInflatedPoisson(0.25, rate=np.e**mu),
        lambda mu: 0.75 * np.exp(mu),
    ),
    "times": (lambda mu: dist.LogNormal(mu, 0.5), lambda mu: np.exp(mu + 0.125)),
    "masked": (lambda mu: dist.Poisson(np.e**mu).mask(np.arange(3) > 0), np.exp),
    "several": (
        lambda mu: dist.Normal(np.arange(2.0) * mu, 1).to_event(1),
        lambda mu: np.arange(2.0) * mu,
    ),
    "loss": (lambda mu: dist.Gamma(2.0, np.e**-mu), lambda mu: 2 * np.exp(mu)),
}


def of_rows(outcome):
    """Return a text of three rows, and its split."""

    def text(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with nf.silo_plate("row", len(y)):
            numpyro.deterministic("twice", 2 * mu + 0 * y.reshape(3, -1)[:, 0])
            numpyro.sample("y", outcome(mu), obs=y)

    kind = int if outcome(0.0).is_discrete else float
    y = np.ones((3, 2) if outcome(0.0).event_shape else 3, kind)
    data = read([dict(y=y)])
    return split(text, data), data[0]


@pytest.mark.parametrize("kind", slow_but(OUTCOMES, 1, 2))
def test_the_mean_is_what_draws_of_an_outcome_tend_to(kind):
    outcome, expected = OUTCOMES[kind]
    fm, data = of_rows(outcome)
    mu = np.repeat([-0.5, 0.25], 4_000)
    mean = predictor(fm, mean=True).many(KEY, {}, dict(mu=mu[::4_000]), data)
    drawn = np.asarray(predictor(fm).many(KEY, {}, dict(mu=mu), data)["y"])
    for i, value in enumerate((-0.5, 0.25)):
        y = drawn[4_000 * i :][:4_000]
        np.testing.assert_allclose(mean["twice"][i], 2 * value)
        np.testing.assert_allclose(
            mean["y"][i], np.broadcast_to(expected(value), y.shape[1:]), rtol=1e-5
        )
        assert np.all(np.abs(y.mean(0) - mean["y"][i]) < 5 * y.std(0) / np.sqrt(4_000))


def test_the_mean_of_steps_of_a_scan_has_all_of_them():
    def text(y):
        by_steps(numpyro.sample("mu", dist.Normal(0, 1)), y)

    data = read([dict(y=np.ones((4, 3)))])
    fm = split(text, data)
    found = predictor(fm, mean=True).many(KEY, {}, dict(mu=np.array([2.0])), data[0])["y"]
    np.testing.assert_allclose(found[0], np.repeat([[1], [3], [5], [7]], 3, 1))


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (lambda mu: dist.Cauchy(mu, 1), "outcome 'y' has no mean, as a Cauchy.*deterministic"),
        (lambda mu: dist.Categorical(logits=np.arange(3) * mu), "outcome 'y' has no mean"),
        (
            lambda mu: dist.TransformedDistribution(
                dist.Normal(mu, 1), dist.transforms.SoftplusTransform()
            ).mask(True),
            r"no mean of the outcome 'y' \(TransformedDistribution\)\. Predict without",
        ),
    ],
)
def test_an_outcome_without_a_mean_says_so(outcome, words):
    fm, data = of_rows(outcome)
    with pytest.raises(ModelError, match=words):
        check_means(fm, predictor(fm, mean=True).many(KEY, {}, dict(mu=np.zeros(2)), data))


@pytest.mark.slow
def test_all_results_predict_alike(fitted):
    """The correction, and the run behind it, by the same draws of what is new."""
    draws = [
        np.asarray(of.predict(KEY, NEW, silo=1, n=2_000)["mean"])
        for of in (fitted, fitted.corrected, fitted.run_behind)
    ]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(draws[2].mean(0) - draws[0].mean(0)).max() < 0.1


def test_outcomes_in_new_data_are_not_used(fitted):
    given = fitted.predict(KEY, {**NEW, "y": np.array([1e6, -1e6])}, n=20)["y"]
    np.testing.assert_array_equal(given, fitted.predict(KEY, NEW, n=20)["y"])


@pytest.mark.parametrize(
    ("new", "silo", "words"),
    [
        ({"hospital": NEW["hospital"], "n_hospitals": 1}, "new", "'x'"),
        ({**NEW, "age": np.ones(2)}, "new", "'age'"),
        ({**NEW, "hospital": np.array([0, 3])}, "new", r"(?s)new data.*hospital"),
        (
            {**NEW, "hospital": np.array([0, 1]), "n_hospitals": 2},
            1,
            "2 of 'hospital'.* silo 1 has 1",
        ),
        ([1, 2], "new", "dict"),
    ],
)
def test_new_data_that_do_not_fit_are_refused(fitted, new, silo, words):
    with pytest.raises(DataError, match=words):
        fitted.predict(KEY, new, silo=silo, n=10)


def test_silos_that_do_not_exist_are_refused(fitted):
    with pytest.raises(IndexError, match="no silo 3"):
        fitted.predict(KEY, NEW, silo=3)
    with pytest.raises(ValueError, match="'old'"):
        fitted.predict(KEY, NEW, silo="old")
    with pytest.raises(ValueError, match="pass new data"):
        fitted.predict(KEY)
    with pytest.raises(ValueError, match="no new data"):
        fitted.predict(KEY, NEW, silo="own rows")


def predictive_density(silos, j):
    """Log density of silo j's rows given those of the others, and the means of coefficients."""
    others = [s for i, s in enumerate(silos) if i != j]
    mean, covariance = exact(others)
    x, y = silos[j]["x"], silos[j]["y"]
    r = y - x @ mean[:2]
    total = x @ covariance[:2, :2] @ x.T + 1.5**2 + 4 * np.eye(len(y))
    logdet = np.linalg.slogdet(2 * np.pi * total)[1]
    return -0.5 * (r @ np.linalg.solve(total, r) + logdet), mean[:2]


def check_left_out(table, silos):
    mean, covariance = exact(silos)
    for j in range(len(silos)):
        density, without = predictive_density(silos, j)
        assert table.log_density[j] == pytest.approx(density, abs=0.1)
        shift = np.max(np.abs(without - mean[:2]) / np.sqrt(np.diag(covariance)[:2]))
        assert table.shift[j] == pytest.approx(shift, abs=0.1, rel=0.02)


def test_silos_left_out_have_their_predictive_density(fitted, silos):
    table = fitted.leave_out()
    check_left_out(table, silos)
    assert table.pareto_k.max() < 0.7
    assert table.num_exchanges == 1
    assert table.total == pytest.approx(table.log_density.sum())
    assert str(table).splitlines()[-1].split() == ["total", f"{table.total:.2f}"]
    odd = dataclasses.replace(table, pareto_k=np.array([0.1, 0.9, np.nan]))
    assert str(odd).splitlines()[-1].endswith("not known, for it counts silo 1, 2")
    assert odd.to_frame()["known"].tolist() == [True, False, False]
    assert table.to_frame().loc[1, "log_density"] == table.log_density[1]


@pytest.mark.slow
def test_a_silo_with_most_of_the_rows_is_left_out_by_draws_without_it(silos):
    """Draws of the posterior say nothing of the posterior without it; others are weighed."""
    r = np.random.default_rng(5)
    x = np.stack([np.ones(200), r.normal(50, 10, 200)], 1)
    y = x @ [4.0, 0.3] + r.normal(0, 2, 200)
    large = dict(x=x, hospital=np.zeros(200, int), n_hospitals=1, y=y)
    fitted = nf.fit(KEY, model, [silos[0], large], **QUIET)
    assert 1 in fitted.corrected._left_out_by(fitted.corrected._number_left_out).unknown
    table = fitted.leave_out()
    assert not table.unknown
    check_left_out(table, [silos[0], large])
    assert table.num_exchanges == 4  # the silos' parabolas, draws, and twice the densities


def far(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with nf.silo_plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["double", "single"])
def test_silos_that_are_thousands_of_nats_apart_are_left_out(precision):
    r = np.random.default_rng(0)
    silos = [dict(y=r.normal(m, 1, 1_000)) for m in (0.0, 0.0, 3.0)]
    fitted = nf.fit(KEY, far, silos, precision=precision, **QUIET)
    table = fitted.leave_out()
    assert table.shift.argmax() == 2
    for j in range(3):
        if j in table.unknown:
            continue
        others = np.concatenate([s["y"] for i, s in enumerate(silos) if i != j])
        variance = 1 / (0.01 + len(others))
        mean, r = variance * others.sum(), silos[j]["y"]
        # Rows share the mean, so that their covariance is the identity and a number everywhere.
        off, more = r - mean, 1 + 1_000 * variance
        square = off @ off - variance * off.sum() ** 2 / more
        density = -0.5 * (square + 1_000 * np.log(2 * np.pi) + np.log(more))
        margin = 0.1 if precision == "double" else 1.0
        assert table.log_density[j] == pytest.approx(density, abs=margin)


@pytest.mark.slow
def test_particles_are_left_out_by_their_own_weights():
    silos = [dict(y=np.random.default_rng(j).normal(1, 1, 20)) for j in range(3)]
    run = nf.SFVI(far).run(KEY, 0, silos, **QUIET)
    particles = nf.Tempered(num_particles=800).run(KEY, 60, run, **QUIET)
    expected = nf.importance_correct(KEY, run).leave_out()
    np.testing.assert_allclose(particles.leave_out().log_density, expected.log_density, atol=0.3)


def test_parameters_of_silos_are_not_made_up_for_new_rows():
    def shifted(y, n=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with nf.silo_plate("row", n or len(y)):
            a = numpyro.param("a", np.zeros(n or len(y)))
            numpyro.sample("y", dist.Normal(mu + a, 1), obs=y)

    data = [dict(y=np.arange(3.0)), dict(y=np.arange(3.0))]
    run = nf.SFVI(shifted, start=None).run(KEY, 0, data, **QUIET)
    with pytest.raises(ModelError, match="'a' is a parameter"):
        run.predict(KEY, dict(y=None, n=4))


@pytest.mark.slow
def test_outcomes_of_yes_or_no_are_predicted_for_a_known_silo():
    """Without its outcome in the data the site has no observed value, and is no latent either."""

    def visits(hospital, n_hospitals, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with nf.silo_plate("hospital", n_hospitals):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with nf.silo_plate("patient", len(hospital)):
            numpyro.sample("y", dist.Bernoulli(logits=mu + u[hospital]), obs=y)

    silos = [
        dict(hospital=np.zeros(60, int), n_hospitals=1, y=np.arange(60) % 10 < k) for k in (2, 8)
    ]
    sfvi = nf.SFVI(visits, optim=optax.adam(0.03), start=None)
    fitted = sfvi.run(KEY, 1_000, silos, **QUIET)
    new = dict(hospital=np.zeros(3, int), n_hospitals=1)
    for j, share in enumerate((0.2, 0.8)):
        y = np.asarray(fitted.predict(KEY, new, silo=j, n=2_000)["y"])
        assert y.mean() == pytest.approx(share, abs=0.06)
    with pytest.raises(DataError, match="2 of 'hospital'"):
        fitted.predict(KEY, dict(hospital=np.arange(2), n_hospitals=2), silo=0)


def test_new_data_that_lack_a_column_are_refused():
    def weighted(x, y, z=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with nf.silo_plate("row", len(x)):
            mean = (x * b).sum(-1) + (0.0 if z is None else z)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    r = np.random.default_rng(0)
    silos = [dict(x=r.normal(size=(9, 2)), z=r.normal(size=9), y=r.normal(size=9))] * 2
    fitted = nf.SFVI(weighted, start=None).run(KEY, 0, silos, **QUIET)
    y = np.zeros(1)
    with pytest.raises(DataError, match=r"rows of the shape \(1,\), where the fit had \(2,\)"):
        fitted.predict(KEY, dict(x=np.ones((1, 1)), z=np.zeros(1), y=y))
    with pytest.raises(DataError, match="lack 'z'"):
        fitted.predict(KEY, dict(x=np.ones((1, 2)), y=y))
    new = dict(x=np.ones((1, 2)), z=np.zeros(1), y=y)
    assert fitted.predict(KEY, new, n=5)["y"].shape == (5, 1)
    # One row without the axis of rows; but not beside arguments that have it.
    one = dict(x=np.ones(2), z=0, y=0.0)
    found, expected = (fitted.predict(KEY, data, n=5)["y"] for data in (one, new))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(DataError, match=r"'x' has the shape \(2,\), with 1 axes"):
        fitted.predict(KEY, dict(x=np.ones(2), z=np.zeros(1), y=y))


@pytest.mark.slow
def test_entries_of_a_substituted_prior_are_predicted_at_their_silo():
    edges = np.eye(4, k=1) + np.eye(4, k=-1)

    def areas(area, y=None):
        theta = numpyro.sample("theta", dist.CAR(0.0, 0.9, 1.0, edges))
        with nf.silo_plate("row", area.shape[0]):
            numpyro.sample("y", dist.Normal(theta[area], 0.1), obs=y)

    outcomes = (([0, 1, 1], [1.0, 2.0, 2.0]), ([2, 3], [3.0, 4.0]))
    silos = [dict(area=np.array(a), y=np.array(y)) for a, y in outcomes]
    prior = nf.SeparatorPrior.fit(areas, "theta", [[0, 1], [2, 3]], model_kwargs=silos[0])
    federated = nf.handlers.substitute_prior(areas, {"theta": prior})
    run = nf.SFVI(federated).run(KEY, 100, silos, **QUIET)
    for j, area, expected in ((0, [1, 0], [2, 1]), (1, [3], [4])):
        y = run.predict(KEY, dict(area=np.array(area)), silo=j, n=400)["y"]
        np.testing.assert_allclose(np.asarray(y).mean(0), expected, atol=0.15)
    with pytest.raises(DataError, match=r"silo 1 reads the entries 0 of 'theta'.*blocks 0, 1"):
        run.predict(KEY, dict(area=np.array([0])), silo=1)
    for ask in (run.predict, run.prior_predict):
        with pytest.raises(ModelError, match=r"none for a new silo.*silo=j"):
            ask(KEY, dict(area=np.array([0])))


@pytest.mark.slow
def test_new_data_have_fractions_where_the_fit_had_whole_numbers():
    def text(days, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with nf.silo_plate("row", days.shape[0]):
            numpyro.deterministic("mean", a * days)
            numpyro.sample("y", dist.Normal(a * days, 1), obs=y)

    days = np.array([1, 4, 2])
    sfvi = nf.SFVI(text, start=None)
    fitted = sfvi.run(KEY, 0, [dict(days=days, y=2.0 * days)] * 2, **QUIET)
    mean = {d: fitted.predict(KEY, dict(days=np.array([d])), n=5)["mean"] for d in (1, 2.5)}
    np.testing.assert_allclose(mean[2.5], 2.5 * mean[1], rtol=1e-6)


@pytest.mark.parametrize(
    "effect",
    [
        lambda e, g: e[g.astype(int)],
        lambda e, g: jax.nn.one_hot(g, 3) @ e,
        lambda e, g: jax.numpy.where(g == 1, e[1], e[0]),
        lambda e, g: e[g],
    ],
    ids=["cast", "one hot", "equal", "index"],
)
def test_fractions_of_what_the_text_takes_for_an_index_are_refused(effect):
    def text(g, y=None):
        e = numpyro.sample("e", dist.Normal(0, 1).expand([3]).to_event(1))
        with nf.silo_plate("row", g.shape[0]):
            numpyro.sample("y", dist.Normal(effect(e, g), 1), obs=y)

    silo = dict(g=np.array([0, 1, 2]), y=np.ones(3))
    fitted = nf.SFVI(text, start=None).run(KEY, 0, [silo] * 2, **QUIET)
    with pytest.raises(DataError, match=r"fractions in \['g'\].*An index must be a whole number"):
        fitted.predict(KEY, dict(g=np.array([1.5])), n=5)


def test_a_single_value_beside_rows_is_refused_as_what_it_is():
    def text(x, days, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with nf.silo_plate("row", x.shape[0]):
            numpyro.sample("y", dist.Normal(a * x * days, 1), obs=y)

    silo = dict(x=np.ones(3), days=np.array([1, 4, 2]), y=np.ones(3))
    fitted = nf.SFVI(text, start=None).run(KEY, 0, [silo] * 2, **QUIET)
    with pytest.raises(DataError, match=r"'days' is a single value \(3\)"):
        fitted.predict(KEY, dict(x=np.ones(2), days=3))
