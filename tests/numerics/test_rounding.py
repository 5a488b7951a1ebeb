"""What single precision cannot hold is computed in double, or said; never wrong in silence."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from problems import cut

import numpyro_fed as nf
from numpyro_fed.data.silo_data import read
from numpyro_fed.weigh.element_errors import Rounding, moments

KEY, OTHER_KEY = jax.random.key(0), jax.random.key(7)
QUIET = dict(progress_bar=False)


level = models.level(1e9)


def far(offset, n=60):
    return offset + np.random.default_rng(0).normal(size=n)


def exact(y):
    """Mean and sd of the level's posterior, measured from a number near the mean."""
    origin = np.round(y.mean())
    precision = len(y) + 1e-18
    return origin, ((y - origin).sum() - 1e-18 * origin) / precision, precision**-0.5


@pytest.fixture(scope="module")
def fitted():
    return nf.fit(KEY, level, cut({"y": far(1e8)}, (20, 40)), **QUIET)


@pytest.mark.slow
def test_an_outcome_far_from_zero_is_fitted_right(fitted):
    """In single precision the sd was 0, and trusted."""
    origin, mean, sd = exact(far(1e8))
    draws = fitted.sample_posterior(jax.random.key(1), 20_000)["mu"]
    assert fitted.trusted
    assert isinstance(draws, np.ndarray)
    assert draws.dtype == np.float64
    assert abs((draws - origin).mean() - mean) < 0.1 * sd
    assert abs(draws.std() / sd - 1) < 0.06


def test_all_that_comes_of_such_a_fit_is_in_its_precision(fitted):
    """The process around it is in single precision, which would make all draws equal."""
    assert jnp.result_type(float) == np.float32
    result = fitted.stages[0].result
    again = nf.importance_correct(KEY, result)
    shown = [
        fitted.samples["mu"],
        fitted.corrected.draws["mu"],
        result.sample_posterior(KEY, 100)["mu"],
        again.sample_posterior(KEY, 100)["mu"],
        result.certificate.samples["mu"],
    ]
    for draws in shown:
        assert draws.dtype == np.float64
        assert len(np.unique(draws)) > 50
    assert again.trusted
    assert result.double


def test_a_second_call_compiles_nothing_in_double_precision_either(fitted, compiled):
    nf.fit(OTHER_KEY, level, cut({"y": far(3e7)}, (20, 40)), **QUIET)
    assert compiled == []


@pytest.mark.slow
def test_single_precision_is_not_trusted_with_what_it_cannot_hold():
    """Numbers near 10^5 are 0.008 apart, and the sd is 0.007."""
    silos = cut({"y": far(1e5, 20_000)}, (5_000, 15_000))
    result = nf.PVI(level).run(KEY, 2, silos, **QUIET)
    found = nf.importance_correct(KEY, result)
    assert not found.precise
    assert not found.trusted
    assert not found.fit_trusted
    assert "single precision cannot hold it: 'mu' has an sd of 0" in found.report()
    assert "double precision" in found.report()


@pytest.mark.slow
def test_nuts_does_not_know_what_single_precision_cannot_hold():
    """Sixteen gaps between numbers: the sd comes out some percent off, and was trusted."""
    silos = cut({"y": far(1e5)}, (20, 40))
    with pytest.warns(UserWarning, match="no reference"):
        nuts = nf.run_nuts(
            KEY, level, silos, num_warmup=100, num_samples=500, num_chains=2, progress_bar=False
        )
    assert not nuts.trusted
    assert not nuts.accurate
    assert "single precision cannot hold it" in nuts.report()


def rounding(z, log_weights):
    weights = np.full(len(z), 1 / len(z))
    mean, sd = np.mean(z, 0, float), np.std(z, 0, dtype=float)
    return Rounding.of(jnp.asarray(z), weights, jnp.asarray(log_weights), mean, sd)


def test_an_sd_is_held_against_the_gap_between_numbers():
    z = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
    z[:, 1] = 1e6 + 0.5 * z[:, 1]
    found = rounding(z, np.zeros(500, np.float32))
    assert found.lost.tolist() == [False, True]
    np.testing.assert_allclose(found.gap[1], 0.0625)
    assert rounding(z[:, :1], np.zeros(500, np.float32)).fine


def test_one_draw_that_has_all_the_weight_says_nothing_of_rounding():
    """Its sd of 0 is no lost precision: another fit may still do better."""
    z, weights = np.linspace(-1, 1, 400)[:, None], np.eye(400)[7]
    found = moments(z, weights, np.arange(400) < 200)
    assert found.sd == 0
    assert np.isinf(found.shift_error).all()
    assert not Rounding.of(z, weights, jnp.zeros(400), found.mean, found.sd).lost.any()
    even = np.full(400, 1 / 400)
    assert Rounding.of(z, even, jnp.zeros(400), found.mean, found.sd).lost.all()


def test_moments_that_are_not_known_say_nothing_of_units():
    """A weight that was NaN made 'mu' have an sd of inf about nan, and units were to blame."""
    unknown = Rounding("float64", np.array([np.nan, 0.0]), np.array([np.inf, np.nan]), 0.0)
    assert not unknown.lost.any()
    assert unknown.fine
    without = unknown._replace(no_density="the log density of 'y' is NaN")
    assert not without.fine
    assert without.words(()) == "the log density of 'y' is NaN"
    assert "round number" not in without.remedy
    assert "support" in without.remedy


def test_large_log_densities_are_rounded_by_nats():
    """As those of two clusters, 10^4 apart, under an sd of 1."""
    z = np.random.default_rng(0).normal(size=(500, 1)).astype(np.float32)
    assert rounding(z, np.full(500, -1e5, np.float32)).fine
    found = rounding(z, np.full(500, -1e9, np.float32))
    assert not found.fine
    np.testing.assert_allclose(found.nats, 1e9 * 2.0**-23)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (1e8 + np.arange(9.0) / 9, r"silo 1, 'y': values near 1e\+08"),
        (np.stack([np.ones(9), 1.7e9 + np.arange(9)], 1), "silo 1, column 1 of 'y'"),
    ],
)
def test_a_cast_that_loses_a_columns_spread_is_an_error(y, words):
    with pytest.raises(nf.DataError, match=words) as caught:
        read([{"y": np.ones_like(y)}, {"y": y}])
    assert "Subtract one number from this column at every silo" in str(caught.value)
    with jax.enable_x64(True):
        read([{"y": y}])


@pytest.mark.parametrize(
    "y",
    [
        np.full(5, 1e8 + 0.3),  # constant: nothing is lost
        1 + 4e-16 * np.arange(7.0),  # constant, but for the rounding of a computation in double
        1e6 + np.arange(20.0),  # held exactly
        1.7e9 + 1e7 * np.arange(20.0),  # moved by a small share of the spread
        np.zeros((0, 3)),
    ],
)
def test_casts_that_lose_next_to_nothing_pass(y):
    (data,) = read([{"y": y}])
    assert data.arrays["y"].dtype == np.float32


@pytest.mark.slow
def test_times_in_seconds_are_a_covariate_like_any_other():
    """Since 1970, over an hour: the ratio of sds was 0.75."""
    r = np.random.default_rng(1)
    t = 1.7e9 + np.sort(r.uniform(0, 3600, 80))
    y = 5 + 0.01 * (t - 1.7e9) + r.normal(size=80)

    def model(t, y):
        a = numpyro.sample("a", dist.Normal(0, 1e9))
        b = numpyro.sample("b", dist.Normal(0, 10))
        with nf.silo_plate("row", t.shape[0]):
            numpyro.sample("y", dist.Normal(a + b * t, 1.0), obs=y)

    found = nf.fit(KEY, model, cut({"t": t, "y": y}, (30, 50)), **QUIET)
    draws = found.sample_posterior(KEY, 20_000)["b"]
    slope = np.polyfit(t - t.mean(), y, 1)[0]
    sd = 1 / np.sqrt(((t - t.mean()) ** 2).sum())
    assert found.trusted
    assert abs(draws.mean() - slope) < 0.1 * sd
    assert abs(draws.std() / sd - 1) < 0.1


def test_a_line_over_a_covariate_far_from_zero_is_as_wide_as_it_is():
    """Correlated by all but 10^-14: the draws of a start that is too narrow miss the ridge."""

    def line(x, y):
        a = numpyro.sample("a", dist.Normal(0, 1e18))
        b = numpyro.sample("b", dist.Normal(0, 1e12))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b * x, 1.0), obs=y)

    rng = np.random.default_rng(0)
    x = -0.84 + 3.6e-7 * rng.uniform(size=12)
    own = x - x.mean()
    y = 3 + 2 / 3.6e-7 * own + rng.normal(size=12)
    fitted = nf.fit(KEY, line, [{"x": x[:5], "y": y[:5]}, {"x": x[5:], "y": y[5:]}], **QUIET)
    b = np.asarray(fitted.sample_posterior(OTHER_KEY, 4_000)["b"], float)
    sd = (own**2).sum() ** -0.5
    assert fitted.trusted, fitted.verdict
    assert abs(b.mean() - (own * y).sum() * sd**2) < 0.1 * sd
    assert abs(b.std() / sd - 1) < 0.1


def test_a_text_for_single_precision_alone_is_refused_in_words():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        total, _ = jax.lax.scan(lambda c, m: (c + m, None), jnp.float32(0), jnp.full(2, mu / 2))
        with nf.silo_plate("row", y.shape[0]):
            numpyro.sample("y", dist.Normal(total, 1.0), obs=y)

    with pytest.raises(nf.ModelError, match=r"(?s)raised TypeError at silo 0.*float32"):
        nf.fit(KEY, model, [{"y": far(3.0)}], **QUIET)


def test_a_precision_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="precision='half': expected 'double' or 'single'"):
        nf.fit(KEY, level, [{"y": far(0.0)}], precision="half")


@pytest.mark.slow
def test_a_density_that_rises_by_rounding_does_not_decide():
    """Far out a difference of large numbers jumps by hundreds of nats."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        noise = 300 * jnp.sin(1e7 * mu) * (jnp.abs(mu) > 4)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", -0.5 * (y - mu) ** 2 + noise / y.shape[0])

    y = far(0.5)
    method = nf.SFVI(model, start=None, optim=optax.adam(0.03))
    result = method.run(KEY, 1_000, cut({"y": y}, (20, 40)), **QUIET)
    found = nf.importance_correct(KEY, result)
    assert found.trusted
    draws = found.sample_posterior(KEY, 20_000)["mu"]
    assert abs(draws.mean() - y.mean()) < 0.1 * 60**-0.5
    assert abs(draws.std() * 60**0.5 - 1) < 0.06


@pytest.mark.slow
def test_a_smooth_mode_far_out_decides():
    """The same place, but with a density that a neighbour of a draw shares."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        bump = 60 * jnp.exp(-0.5 * ((mu - 4) / 0.3) ** 2)
        with nf.silo_plate("row", y.shape[0]):
            numpyro.factor("y", -0.05 * (y - mu) ** 2 + bump / y.shape[0])

    start = nf.SFVI(model, start=None)
    result = start.run(KEY, 2_000, [{"y": np.full(60, 0.0)}], **QUIET)
    found = nf.importance_correct(KEY, result)
    assert not found.fit_trusted
    assert found.sample_posterior(KEY, 1_000)["mu"].mean() > 2


@pytest.mark.slow
def test_precision_of_gamma_functions_does_not_spoil_a_beta_regression():
    """One draw of a huge phi took all weight in single precision, with a log evidence of 5e11."""
    r = np.random.default_rng(0)
    y = r.beta(3.0, 7.0, 80)

    def model(y):
        m = numpyro.sample("m", dist.Normal(0, 2))
        phi = numpyro.sample("phi", dist.Gamma(2, 0.1))
        with nf.silo_plate("row", y.shape[0]):
            mean = jax.nn.sigmoid(m)
            numpyro.sample("y", dist.Beta(mean * phi, (1 - mean) * phi), obs=y)

    found = nf.fit(KEY, model, cut({"y": y}, (30, 50)), **QUIET)
    assert found.trusted
    assert abs(found.log_evidence) < 100
