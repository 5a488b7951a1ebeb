"""Errors of means, sds and quantiles as users see them; moments that do not exist."""

import warnings

import jax
import numpy as np
import pytest
from blackjax.diagnostics import psis_weights
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from numpyro_fed.weigh.element_errors import (
    FINITE_TAIL,
    ElementErrors,
    Rounding,
    disagreement,
    moments,
    tail_shape,
)
from numpyro_fed.weigh.weights import Weights, replace_weightless, smooth_tail

BOUND = 0.03


def even(number):
    return np.full(number, 1 / number)


def errors_of(values, weights=None):
    weights = even(len(values)) if weights is None else weights
    return ElementErrors.of({"t": values}, {"t"}, weights)


def moments_known(found):
    return not found.unknown(BOUND)[:, found.latent].any()


def quantiles_known(found):
    return (found.error[2, found.latent] <= BOUND).all()


def placed(distribution, number=20_000):
    """The quantiles of a distribution at even steps: draws without chance."""
    return distribution.ppf((np.arange(number) + 0.5) / number)


# A posterior in logs, and its index on the user's scale.
TAILS = {
    "half-Cauchy": (lambda z: z - np.logaddexp(0, 2 * z) - 3 * np.logaddexp(0, -z), 1),
    "ratio": (lambda z: 2 * z - 2 * np.logaddexp(0, 2 * z), 2),
    "inverse gamma 1.5": (lambda z: -1.5 * z - np.exp(-z), 1.5),
    "inverse gamma 3": (lambda z: -3 * z - np.exp(-z), 3),
    "inverse gamma 6": (lambda z: -6 * z - np.exp(-z), 6),
    "log-normal": (lambda z: -0.5 * z**2, np.inf),
    "half-normal": (lambda z: z - 0.5 * np.exp(2 * z), np.inf),
    "gamma": (lambda z: 2 * z - np.exp(z), np.inf),
}


def weighed(log_density, seed):
    """Draws of ``exp(z)`` with weights: from a t at the mode, and half of them from wider ones."""
    r = np.random.default_rng(seed)
    grid, h = np.linspace(-15, 15, 30_001), 1e-3
    with np.errstate(over="ignore"):
        mode = grid[np.argmax(log_density(grid))]
        bend = 2 * log_density(mode) - log_density(mode - h) - log_density(mode + h)
        scale = h / bend**0.5
        wider = [(2.5, 3), (8, 3), (25, 3), (3, 10), (10, 10)]
        parts = [(4_000, stats.t(10, mode, scale))]
        parts += [(800, stats.t(df, mode, width * scale)) for width, df in wider]
        z = np.concatenate([part.rvs(n, r) for n, part in parts])
        log_w = log_density(z) - np.log(sum(n * part.pdf(z) for n, part in parts))
        log_w = np.where(np.isfinite(log_w), log_w, -np.inf)
        w = np.where(log_w > log_w.max() - 100, np.exp(log_w - log_w.max()), 0)
        return np.exp(z), w / w.sum()


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("seed", range(3))
def test_moments_exist_where_the_index_of_the_tail_is_above_their_order(name, seed):
    log_density, index = TAILS[name]
    found = errors_of(*weighed(log_density, seed))
    exists = np.array([index > 1, index > 2])
    np.testing.assert_array_equal(found.infinite[:, 0], ~exists)
    np.testing.assert_array_equal(found.known(BOUND)[exists, 0], True)
    assert quantiles_known(found)
    assert moments_known(found)
    if index < np.inf:
        assert found.tail_index[0] == pytest.approx(index, rel=0.1)
    words = found.words(BOUND)
    if exists.all():
        assert words == ""
    else:
        assert words.startswith(
            f"'t' has no {'sd' if exists[0] else 'mean'} (tails of index {index:.1f}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [stats.lognorm(1), stats.invgamma(3), stats.gamma(0.1)])
@pytest.mark.parametrize("number", [2_000, 16_000])
def test_what_has_an_sd_is_never_said_to_have_none(distribution, number):
    """Neither by even draws, nor by weighed ones of log-normals that reach far (sd of the log)."""
    for seed in range(20):
        r = np.random.default_rng(seed)
        assert not errors_of(distribution.rvs(number, r)).infinite.any()
    for seed in range(5):
        for sd in (2, 3):
            assert not errors_of(
                *weighed(lambda z, sd=sd: -0.5 * (z / sd) ** 2, seed)
            ).infinite.any()


def test_few_draws_of_a_heavy_tail_leave_its_sd_unknown():
    """Of a t distribution with three degrees of freedom: its squares have a tail of shape 2 / 3."""
    found = errors_of(stats.t(3).rvs(4_000, np.random.default_rng(0)))
    assert abs(found.shape[1, 0] - 2 / 3) < 4 * (1 + 2 / 3) / np.sqrt(3 * 4_000**0.5)
    assert found.known(BOUND)[0, 0]
    assert found.unknown(BOUND)[1, 0]
    assert not moments_known(found)
    assert quantiles_known(found)
    assert found.words(BOUND).startswith("the sd of 't' ")


def test_independent_draws_of_a_normal_have_the_errors_of_textbooks():
    found = errors_of(placed(stats.norm(1e6, 3.0)))
    root = 20_000**-0.5
    np.testing.assert_allclose(found.error[:, 0], [root, root / 2**0.5, root], rtol=2e-3)
    assert found.words(BOUND) == ""


def test_the_shape_of_a_tail_is_that_of_pareto_smoothing():
    r = np.random.default_rng(1)
    for index in (1.0, 2.0, 5.0):
        log_terms = np.log(r.pareto(index, 2_000))
        known = float(jax.jit(psis_weights)(log_terms.astype(np.float32))[1])
        assert tail_shape(log_terms) == pytest.approx(known, abs=1e-3)
        assert tail_shape(log_terms + 1e3) == pytest.approx(tail_shape(log_terms))
    assert tail_shape(np.zeros(500)) == 0.0


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("n", [20, 100, 4_000])
def test_weights_are_smoothed_as_by_blackjax(spread, n, double):
    """Light tails, which stay as they are, heavy ones, and too few weights for either."""
    log_w = np.random.default_rng(n).normal(0, spread, n)
    theirs, k = map(np.asarray, jax.jit(psis_weights)(log_w))
    ours, own_k = smooth_tail(log_w)
    assert own_k == pytest.approx(float(k), rel=1e-9)
    np.testing.assert_allclose(ours - np.logaddexp.reduce(ours), theirs, rtol=1e-9, atol=1e-12)


def test_equal_weights_are_not_smoothed():
    assert smooth_tail(np.zeros(500))[1] == 0.0
    assert Weights.of(np.zeros(500)).pareto_k == 0.0


def test_one_large_weight_among_equal_ones_is_not_trusted():
    """The tail of weights that are equal but for one has no Pareto fit: their spread decides."""
    log_weights = np.append(np.zeros(499), 10.0)
    assert np.isnan(smooth_tail(log_weights)[1])
    assert Weights.of(log_weights).pareto_k == np.inf


@given(st.integers(0, 1_000))
def test_errors_of_quantiles_depend_on_ranks_alone(seed):
    r = np.random.default_rng(seed)
    x, w = r.normal(size=50), r.gamma(1.0, size=50)
    w /= w.sum()
    maps = [x, np.exp(x), 1e5 + 3 * x, x**3, np.arctan(x)]
    errors = [errors_of(values, w).error[2, 0] for values in maps]
    np.testing.assert_array_equal(errors, errors[0])


def test_values_that_overflow_belong_to_a_heavy_tail():
    r = np.random.default_rng(0)
    x, w = np.exp(r.normal(size=1_000)), even(1_000)
    x[:150], w[:150] = np.inf, 1e-40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = errors_of(x, w / w.sum())
    assert found.infinite.all()


def test_a_side_may_have_next_to_no_mass():
    """As where the median is the largest value but for a few draws of no weight to speak of."""
    r = np.random.default_rng(0)
    x, w = np.minimum(r.normal(size=4_000), -0.1), even(4_000)
    x[x > -0.5], w[:300] = -0.5, 1e-12
    same = errors_of(x, w / w.sum())
    x[:300] = r.exponential(size=300)
    found = errors_of(x, w / w.sum())
    np.testing.assert_allclose(found.error[:2], same.error[:2], rtol=1e-2)
    assert not found.infinite.any()


def test_one_draw_with_all_the_weight_knows_nothing():
    found = errors_of(np.linspace(-1, 1, 400), np.eye(400)[7])
    assert np.isinf(found.error).all()
    assert not quantiles_known(found)


def test_constants_have_no_errors_and_functions_of_globals_do_not_decide():
    r = np.random.default_rng(0)
    t, rho = stats.t(1).rvs(8_000, r), r.uniform(-1, 1, 8_000)
    L = np.zeros((8_000, 2, 2))
    L[:, 0, 0], L[:, 1, 0], L[:, 1, 1] = 1.0, rho, np.sqrt(1 - rho**2)
    found = ElementErrors.of(
        {"ratio": t, "L": L, "gap": np.sqrt(np.maximum(rho, 0)) + np.where(rho > 0, 0, np.nan)},
        {"L"},
        even(8_000),
    )
    assert found.names == ("L[1, 0]", "L[1, 1]", "ratio", "gap")
    assert found.latent.tolist() == [True, True, False, False]
    assert moments_known(found)
    assert np.where(found.infinite, 0.0, found.error[:2])[:, found.latent].max() < BOUND
    assert "'gap' cannot be computed at some draws" in found.words(BOUND)
    assert "the mean of 'ratio' rests on a few draws far out" in found.words(BOUND)


def test_a_tail_between_bounds_is_that_of_the_weights():
    """A correlation's root, next to 1 at most draws: w (h - m)^2 has no heavier tail than w."""
    r = np.random.default_rng(0)
    h = np.sqrt(1 - np.tanh(0.25 * r.standard_t(4, 4_000)) ** 2)[:, None]
    w = np.exp(r.normal(0, 0.6, 4_000))
    free, within = (
        ElementErrors.of({"h": h, "f": h}, {"h"}, w / w.sum(), bounded=names) for names in ((), "h")
    )
    assert free.shape[1, 0] > FINITE_TAIL > within.shape[1, 0] == tail_shape(np.log(w / w.sum()))
    np.testing.assert_array_equal(within.error, free.error)
    assert within.shape[1, 1] == free.shape[1, 1]  # a function of globals may have any tail


def test_names_of_many_elements_are_shortened():
    x = stats.t(1).rvs((8_000, 6), np.random.default_rng(0))
    words = ElementErrors.of({"u": x}, {"u"}, even(8_000)).words(BOUND)
    assert words == "the mean of 'u[0]', 'u[1]', 'u[2]' and 3 more rests on a few draws far out"


def test_errors_are_those_computed_by_hand():
    """Of the mean and the sd in sds, and the larger one of both of the normal scores."""
    x, w = np.array([3.0, -1.0, 0.5, 7.0, 2.0]), np.array([0.1, 0.3, 0.2, 0.1, 0.3])
    found = ElementErrors.of({"x": x}, {"x"}, w).error[:, 0]
    sd = np.sqrt(w @ (x - w @ x) ** 2)
    standard = (x - w @ x) / sd
    # A draw's score is that of the middle of its share: -1 has the lowest 0.3, 0.5 the next 0.2 ...
    scores = stats.norm.ppf([0.85, 0.15, 0.4, 0.95, 0.65])

    def errors(f):
        return [np.sqrt(w**2 @ f**2), np.sqrt(w**2 @ ((f**2 - 1) / 2) ** 2)]

    np.testing.assert_allclose(found, [*errors(standard), max(errors(scores))], rtol=1e-10)


def test_moments_and_their_distance_to_the_fit_are_those_computed_by_hand():
    z = np.array([[1.0, 1e8], [3.0, 1e8 + 2], [-2.0, 1e8 + 5], [0.5, 1e8 - 1], [9.0, 1e8 + 7]])
    w, guide = np.array([0.1, 0.3, 0.2, 0.4, 0.0]), np.array([True, False, True, True, True])
    found, u = moments(z, w, guide), guide / 4
    centred = z - [0.0, 1e8]
    mean = w @ centred
    sd = np.sqrt(w @ (centred - mean) ** 2)
    np.testing.assert_allclose(found.mean, mean + np.array([0.0, 1e8]), rtol=1e-15)
    np.testing.assert_allclose(found.sd, sd, rtol=1e-12)
    fit_mean = u @ centred
    fit_sd = np.sqrt(u @ (centred - fit_mean) ** 2)
    np.testing.assert_allclose(found.shift, [(fit_mean - mean) / sd, (fit_sd - sd) / sd], rtol=1e-7)
    f = (centred - mean) / sd
    errors = [np.sqrt((u - w) ** 2 @ g**2) for g in (f, (f**2 - 1) / 2)]
    np.testing.assert_allclose(found.shift_error, errors, rtol=1e-7)
    # Further draws of the fit stand beside draws that the guide has nothing of.
    more = moments(z[:3], w[:3] / w[:3].sum(), guide[:3], z[3:])
    both = moments(z, np.append(w[:3] / w[:3].sum(), [0, 0]), np.arange(5) >= 3)
    for one, other in zip(more, both, strict=True):
        np.testing.assert_allclose(one, other)


def test_islands_disagree_by_the_standard_error_of_their_means_in_sds():
    """Means 0, 0, 6 and 6 have the sd sqrt(12), and their mean a half of it; all spreads agree."""
    islands = np.array([0.0, 0.0, 6.0, 6.0])[:, None, None] + np.array([-1.0, 1.0])[:, None]
    found = disagreement(islands, np.array([2.0]))
    np.testing.assert_allclose(found, [[np.sqrt(12) / 2 / 2], [0.0]])


def test_draws_without_weight_are_replaced_by_the_heaviest():
    z, w = np.array([[1.0, 2.0], [np.inf, np.nan], [3.0, 4.0]]), np.array([0.2, 0.0, 0.8])
    assert replace_weightless(z, w).tolist() == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]


def test_rounding_is_that_of_the_largest_log_weight_that_counts():
    weights, log_weights = np.array([0.6, 0.4, 0.0]), np.array([-1e4, 3.0, -1e9])
    z, mean, sd = np.zeros((3, 1), np.float32), np.zeros(1), np.ones(1)
    found = Rounding.of(z, weights, log_weights, mean, sd)
    np.testing.assert_allclose(found.nats, 1e4 * np.finfo(np.float32).eps)
    assert np.isinf(found.sd).all()  # of two draws, which tell none
