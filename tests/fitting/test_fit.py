"""One call: a posterior, and a verdict that says what error is left."""

import re
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from problems import cut, grouped

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.fitting import order_of_steps
from numpyro_fed.posterior.importance import correct_from
from numpyro_fed.text.fingerprint import fingerprint
from numpyro_fed.text.split import split
from numpyro_fed.weigh.mixture import around_modes

POSITIVE = dist.constraints.positive
KEY, OTHER_KEY = jax.random.key(0), jax.random.key(5)


raw = models.linear_and_scale()


def raw_silos(n=80):
    r = np.random.default_rng(0)
    x = np.stack([np.ones(n), r.normal(100, 15, n)], 1)
    return cut({"x": x, "y": x @ [30.0, 0.6] + 12 * r.normal(size=n)}, (30, 10, 40))


@pytest.fixture(scope="module")
def fitted():
    return nf.fit(KEY, raw, raw_silos(), progress_bar=False)


@pytest.mark.slow
def test_arviz_gets_what_the_verdict_says(fitted):
    posterior = fitted.to_arviz(KEY, 1_000_000)["posterior"]
    assert posterior["beta"].shape == (1, int(fitted.corrected.ess), 2)
    assert posterior.attrs["verdict"] == fitted.verdict
    assert posterior.attrs["ess"] == fitted.corrected.ess
    assert posterior.attrs["pareto_k"] == fitted.corrected.pareto_k
    steps = dict(stages=fitted.stages, _checked=fitted)
    uncorrected = replace(fitted.result, **steps).to_arviz(KEY, 70)["posterior"]
    assert uncorrected["beta"].shape == (1, 70, 2)
    assert uncorrected.attrs["ess"] == fitted.corrected.ess


@pytest.mark.parametrize(
    ("private", "words"),
    [
        (False, r"'sigma' is a parameter .*a point estimate .* in \.params, and in no draws\.$"),
        (True, r"'sigma', 'phi' are parameters .* in \.params and \.silo_params\(j\), and in no"),
        (None, "^((?!numpyro.param).)*$"),
    ],
)
def test_parameters_without_a_prior_are_named_and_found(private, words):
    def text(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        sigma = 1.0 if private is None else numpyro.param("sigma", 2.0, constraint=POSITIVE)
        with nf.silo_plate("row", len(y)):
            phi = numpyro.param("phi", 3.0) if private else 0.0
            numpyro.sample("y", dist.Normal(mu + phi, sigma), obs=y)

    data = read([dict(y=np.zeros(3))])
    fm = split(text, data)
    params = {**fm.constrain_theta(fm.init_theta(KEY)), "guide": {}}
    of_silo = {**fm.constrain_theta(fm.init_private(KEY, data[0])), "guide": {}}
    run = SimpleNamespace(
        _fit=SimpleNamespace(model=fm), params=params, silo_params=lambda j: of_silo
    )

    class Reached(nf.Posterior):
        run_behind, correction, trusted = run, "the fit could not be checked", False
        silos = sampler = sample_posterior = unconstrained = None
        log_likelihoods = saved_words = saved_runs = None

    fitted = Reached()
    assert re.search(words, fitted.verdict)
    assert fitted.params == ({} if private is None else {"sigma": 2.0})
    assert fitted.silo_params(0) == ({"phi": 3.0} if private else {})


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_verdict_states_the_error_that_is_left(fitted):
    error = float(re.search(r"quantiles at most ([\d.e-]+) sd", fitted.verdict).group(1))
    np.testing.assert_allclose(error, fitted.corrected.monte_carlo_error, rtol=0.1)
    assert error < 0.1
    assert fitted.verdict.startswith("The posterior of the globals can be trusted")
    assert [s.name for s in fitted.stages][:2] == ["mode", "correction"]
    assert str(fitted) == fitted.verdict
    assert np.isfinite(fitted.log_evidence)
    assert fitted.mode.converged


def test_a_second_call_compiles_nothing(fitted, compiled):
    again = nf.fit(OTHER_KEY, raw, raw_silos(), progress_bar=False)
    assert [s.name for s in again.stages] == [s.name for s in fitted.stages]
    assert compiled == []


@pytest.mark.slow
def test_comparison_with_nuts_takes_it(fitted):
    nuts = nf.run_nuts(
        KEY, raw, raw_silos(), start=fitted.mode, num_samples=2_000, progress_bar=False
    )
    sites = nf.compare(fitted, nuts).to_dict()["sites"]
    assert all((np.ravel(s["mean_error_sd"]) < 0.15).all() for s in sites.values())


def test_more_draws_go_on_from_the_last_mixture_and_count_with_those_before(fitted):
    quiet = dict(progress_bar=False)
    before, few = fitted.corrected, len(fitted.corrected.weights)
    again = nf.importance_correct(OTHER_KEY, fitted, 8_000, **quiet)
    assert len(again.weights) == few + 8_000
    assert again.pool.mixtures == (before.pool.mixtures[0], *before.pool.mixtures)
    np.testing.assert_array_equal(again.pool.z_G[8_000:], before.pool.z_G)
    np.testing.assert_array_equal(again.pool.log_joint[8_000:], before.pool.log_joint)
    assert again.ess > before.ess
    # A fit that was not good enough is its guide, judged by the mixtures.
    run = replace(fitted.result, stages=fitted.stages, _checked=fitted)
    same = nf.importance_correct(OTHER_KEY, run, 8_000, **quiet)
    np.testing.assert_array_equal(same.weights, again.weights)
    # A file keeps no mixtures: one like the draws takes their place.
    loaded = nf.importance_correct(OTHER_KEY, replace(fitted, pool=None), **quiet)
    (own,) = loaded.pool.mixtures
    mean = before.weights @ before.z_G
    np.testing.assert_allclose(own.moments.loc, mean, rtol=1e-3)
    assert len(loaded.weights) == 4_000
    assert loaded.reliable
    # With other integrals the draws before are not weighed alike, and do not count.
    assert len(nf.importance_correct(OTHER_KEY, fitted, 4_000, 1, **quiet).weights) == 4_000


@pytest.mark.slow
def test_parameters_without_a_prior_take_sfvi():
    model = models.level_and_scale(1000)
    y = np.random.default_rng(1).normal(900, 25, 60)
    found = nf.fit(KEY, model, cut({"y": y}, (20, 40)), progress_bar=False)
    assert found.stages[0].name == "SFVI"
    learned = found.stages[0].result.params["scale"]
    np.testing.assert_allclose(learned, y.std() * np.sqrt(60 / 59), rtol=0.05)
    draws = found.sample_posterior(KEY, 4_000)["mu"]
    assert abs(draws.mean() - y.mean()) < 0.1 * y.std() / 60**0.5


@pytest.mark.slow
def test_an_improper_posterior_is_an_error():
    model = models.flat_logistic
    x = np.stack([np.ones(40), np.linspace(-1, 1, 40)], 1)
    with pytest.raises(nf.ModelError, match=r"improper.*beta\[1\]"):
        nf.fit(KEY, model, cut({"x": x, "y": (x[:, 1] > 0) * 1.0}, (20, 20)), progress_bar=False)


@pytest.mark.slow
def test_what_a_text_reads_from_outside_counts(monkeypatch):
    """The same function, after a variable that it reads has changed."""
    silos = [{"y": np.full(3, 5.0)}, {"y": np.full(4, 5.0)}]

    def mean(model):
        fitted = nf.fit(KEY, model, silos, progress_bar=False)
        return float(fitted.sample_posterior(jax.random.key(1), 4_000)["mu"].mean())

    for scale in (0.1, 100.0):
        monkeypatch.setattr("test_fit.SCALE", scale)
        exact = 5.0 * 7 / (7 + scale**-2)
        assert abs(mean(by_global) - exact) < 0.05


SCALE = 1.0


def by_global(y):
    mu = numpyro.sample("mu", dist.Normal(0, SCALE))
    with nf.silo_plate("row", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@dataclass
class Unhashable:
    """A model that cannot be hashed."""

    scale: float

    def __call__(self, y):
        mu = numpyro.sample("mu", dist.Normal(0, self.scale))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_fingerprints_tell_texts_apart():
    rows = read([{"y": np.zeros(3)}])

    def of(model):
        return fingerprint(split(model, rows), rows)

    assert of(Unhashable(1.0)) == of(Unhashable(1.0))
    assert of(Unhashable(1.0)) != of(Unhashable(2.0))


@pytest.mark.slow
def test_one_exchange_makes_a_search_and_a_correction():
    fitted = nf.fit(KEY, by_global, [{"y": np.ones(3)}], max_exchanges=1, progress_bar=False)
    assert [stage.name for stage in fitted.stages] == ["mode", "correction"]
    assert fitted.num_exchanges <= 4
    assert fitted.trusted


@pytest.mark.slow
def test_two_modes_of_one_mass_are_drawn_from_both():
    """y depends on the square of m: half of the mass is on the other side."""
    silos = [{"y": np.full(3, 9.0)}, {"y": np.full(4, 9.0)}]
    fitted = nf.fit(KEY, models.squared(2000.0), silos, progress_bar=False)
    assert fitted.trusted
    assert fitted.missed == ()
    draws = np.asarray(fitted.corrected.z_G)[:, 0]
    below = fitted.corrected.weights @ (draws < 0.5)
    assert abs(below - 0.5) < 0.03


@pytest.mark.slow
def test_a_mode_that_the_draws_do_not_reach_is_said(monkeypatch):
    """The same, from a proposal around the first mode alone."""

    def around_the_first(z, others, log_shares):
        return around_modes(z, [], np.zeros(1))

    monkeypatch.setattr("numpyro_fed.fitting.steps.around_modes", around_the_first)
    monkeypatch.setattr(
        "numpyro_fed.fitting.steps.correct_from",
        lambda *args, wider, **more: correct_from(*args, wider=0.0, **more),
    )
    model = models.squared(2000.0)
    silos = [{"y": np.full(3, 9.0)}, {"y": np.full(4, 9.0)}]
    fitted = nf.fit(KEY, model, silos, progress_bar=False)
    assert len(fitted.missed) == 1
    (there,) = fitted.mode.z_G
    assert sorted([round(float(there), 1), round(float(fitted.missed[0].z_G[0]), 1)]) == [-2.5, 3.5]
    assert not fitted.trusted
    assert "modes" in fitted.verdict


@pytest.mark.slow
def test_spreads_that_hang_on_few_draws_take_more_of_them():
    """Posteriors of coefficients between bounds have tails that 4,000 draws hardly reach."""

    def model(x, y):
        b = numpyro.sample("b", dist.Uniform(-2.0, 3.0).expand([5]).to_event(1))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ b), 1.0), obs=y)

    r = np.random.default_rng(7)
    silos = [
        {"x": np.stack([np.ones(n), *r.normal(size=(4, n))], 1), "y": r.poisson(1.0, n) * 1.0}
        for n in (16, 1, 6)
    ]
    fitted = nf.fit(KEY, model, silos, precision="single", progress_bar=False)  # for these draws
    before, after = (stage.result for stage in fitted.stages[1:3])
    assert not before.moments_known
    assert fitted.stages[2].name == "matched to the weighted draws"
    assert len(after.weights) == 2 * len(before.weights)
    assert after.pareto_k < before.pareto_k
    assert fitted.trusted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_that_read_each_other_are_fitted_under_the_plain_bound():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10.0))
        with nf.silo_plate("row", y.shape[0]):
            e = numpyro.sample("e", dist.Normal(0, 0.3))
            numpyro.sample("y", dist.Normal(mu + e - e.mean(), 1.0), obs=y)

    rows = [{"y": np.array([1.0, 2.0, 3.0])}, {"y": np.array([2.0, 3.0])}]
    fitted = nf.fit(KEY, model, rows, max_exchanges=300, progress_bar=False)
    assert "reads latents of other rows" in fitted.verdict
    draws = np.asarray(fitted.stages[0].result.sample_posterior(KEY, 10_000)["mu"])
    sd = (5 + 0.01) ** -0.5  # the rows' mean does not feel their effects
    assert abs(draws.mean() - 11 / 5.01) < 0.1 * sd
    assert 0.9 < draws.std() / sd < 1.1


def test_the_best_of_several_corrections_is_judged_by_new_draws(monkeypatch):
    improve = order_of_steps.improve

    def best_of_six(steps, correction):
        for _ in range(5):
            correction = steps.most_trusted(correction, steps.correct(correction.result))
        return improve(steps, correction)

    monkeypatch.setattr(order_of_steps, "improve", best_of_six)
    fitted = nf.fit(KEY, raw, raw_silos(), progress_bar=False)
    assert [s.name for s in fitted.stages][-1] == "judged by new draws"
    assert fitted.z_G is fitted.stages[-1].result.z_G


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_few_draws_far_out_are_met_by_more_draws_and_not_by_rounds(seed):
    r = np.random.default_rng(1)
    b = 3 + np.array([-1.4, -1.0, -0.6, -0.2, 0.3, 0.7, 1.0, 1.3])
    g = np.tile(np.arange(8), 8)
    rows = {"g": g, "y": b[g] + 2 * r.normal(size=64)}
    fitted = nf.fit(jax.random.key(seed), grouped(8), cut(rows, (24, 40)), progress_bar=False)
    assert fitted.trusted
    assert fitted.num_exchanges < 40


@pytest.mark.slow
def test_what_a_step_warns_of_is_in_the_verdict_once_and_the_rest_is_passed_on():
    def model(y):
        warnings.warn("this text has something to say", nf.ModelWarning, stacklevel=2)
        warnings.warn("and is old", DeprecationWarning, stacklevel=2)
        mu = numpyro.sample("mu", dist.Normal(0, 1.0))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = nf.fit(KEY, model, [{"y": np.ones(3)}], max_exchanges=1, progress_bar=False)
    assert found.verdict.count("this text has something to say") == 1
    assert "and is old" in {str(w.message) for w in caught}


@pytest.mark.parametrize(
    ("changes", "why", "remedy"),
    [
        (dict(pareto_k=2.0, ess=10.0), "a few draws carry the weight", "NUTS on pooled data"),
        (dict(pareto_k=2.0, ess=3_900.0), "tails reach beyond", "num_draws=100_000"),
    ],
)
def test_a_verdict_that_is_not_good_says_why_and_what_to_try(fitted, changes, why, remedy):
    verdict = replace(fitted, **changes).verdict
    assert why in verdict
    assert remedy in verdict
    assert "not enough" not in fitted.verdict


def test_a_fit_can_be_shown_and_be_a_key(fitted):
    assert {fitted: 1}[fitted] == 1
    assert {fitted.corrected: 1, fitted.stages[0].result: 2}
    assert "\n" not in repr(fitted)
    assert len(repr(fitted)) < 200
    assert repr(fitted.stages[0]).startswith("Stage(name='mode', words='")
    assert len(repr(fitted.stages)) < 400


def test_messages_of_a_step_that_fails_are_counted(monkeypatch):
    silos = [{"y": np.zeros(3)}, {"y": np.ones(4)}]
    model = models.level(1)

    def fails(*args, **kwargs):
        raise nf.NonFiniteError("nothing is finite", result=None, round=0, silos=())

    good = nf.fit(KEY, model, silos, max_exchanges=1, progress_bar=False)
    monkeypatch.setattr("numpyro_fed.fitting.steps.correct_from", fails)
    bad = nf.fit(KEY, model, silos, max_exchanges=1, progress_bar=False)
    assert not bad.trusted
    assert bad.num_exchanges == good.num_exchanges > 2


def test_particles_take_over_where_no_correction_is_enough(monkeypatch, tmp_path):
    y = np.array([0.4, 1.1, -0.3, 0.8])
    silos = [{"y": y[:1]}, {"y": y[1:]}]
    monkeypatch.setattr(
        "numpyro_fed.fitting.order_of_steps.improve_and_confirm",
        lambda steps, found: replace(found, pareto_k=2.0),
    )
    fitted = nf.fit(KEY, models.level(1), silos, max_exchanges=400, progress_bar=False)
    assert fitted.stages[-1].name == "particles", fitted.verdict
    assert fitted.trusted
    assert isinstance(fitted, nf.Particles)
    fitted.save(tmp_path / "fitted")
    again = nf.load(tmp_path / "fitted", models.level(1), silos)
    assert again.verdict == fitted.verdict
    np.testing.assert_array_equal(again.z_G, fitted.z_G)


@pytest.mark.slow
def test_a_posterior_unlike_its_first_mixture_is_right_after_matches_and_judges(double):
    """A Gaussian process of five places, seen through counts, against NUTS."""
    places = np.linspace(-1, 1, 5)

    def rates(place, y=None):
        length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        e = numpyro.sample("e", dist.Normal(0, 1).expand([5]).to_event(1))
        distance = (places[:, None] - places) / length
        K = amplitude**2 * jnp.exp(-0.5 * distance**2) + 1e-6 * jnp.eye(5)
        f = numpyro.deterministic("f", jnp.linalg.cholesky(K) @ e)
        with nf.silo_plate("row", place.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f[place])), obs=y)

    r = np.random.default_rng(0)
    place = r.integers(0, 5, 20)
    y = r.poisson(np.exp(np.sin(3 * places))[place])
    silos = cut(dict(place=place, y=y), (7, 13))
    fitted = nf.fit(KEY, rates, silos, progress_bar=False)
    assert fitted.trusted, fitted.verdict
    settings = dict(num_warmup=500, num_samples=2_500, progress_bar=False)
    nuts = nf.run_nuts(OTHER_KEY, rates, silos, target_accept_prob=0.95, **settings)
    # Monte Carlo errors of both are about 0.03.
    for name, site in nf.compare(fitted, nuts).to_dict()["sites"].items():
        assert np.max(site["mean_error_sd"]) < 0.12, name
        assert 0.88 < np.min(site["sd_ratio"]) <= np.max(site["sd_ratio"]) < 1.12, name
    short = nf.fit(KEY, rates, silos, max_exchanges=7, progress_bar=False)
    assert not short.trusted
