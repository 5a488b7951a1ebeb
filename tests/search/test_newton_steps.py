"""Newton's method between two exchanges: plain NumPy, on functions whose modes are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_fed.search.expand import Expansion
from numpyro_fed.search.mode_search import AscentPhase
from numpyro_fed.search.newton import DAMPING, NewtonAscent

NONE = np.zeros((0, 0))


def quadratic(x):
    """Return a log density with its mode at (1, 2) as value, gradient and negative Hessian."""
    root = np.array([[2.0, 0.3], [0.0, 1e-3]])
    away = x - [1.0, 2.0]
    precision = root.T @ root
    return -0.5 * away @ precision @ away, -precision @ away, precision


def cauchy(x):
    """Return a log density that is convex away from its mode at zero."""
    curvature = np.diag((2 - 2 * x**2) / (1 + x**2) ** 2)
    return -np.log1p(x**2).sum(), -2 * x / (1 + x**2), curvature


def poisson(x):
    """Return a log density that falls exponentially on one side of its mode at log 3."""
    rate = np.exp(x)
    return (3 * x - rate).sum(), 3 - rate, np.diag(rate)


MODES = {quadratic: [1.0, 2.0], cauchy: [0.0, 0.0], poisson: [np.log(3.0)] * 2}


def at(density, x):
    with np.errstate(all="ignore"):
        return Expansion(x, *map(np.asarray, density(x)))


def climb(ascent, density, places=None, steps=200):
    """Take steps until the search ends; return the values of its best point after each."""
    heights = []
    while ascent.phase is not AscentPhase.ENDED and len(heights) < steps:
        ascent.advance(at(density, ascent.trial), NONE, places)
        heights.append(ascent.height)
    return heights


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(MODES, key=str)), st.tuples(*[st.floats(-8, 8)] * 2))
def test_a_search_never_goes_down_and_ends_at_the_mode(density, start):
    ascent = NewtonAscent(np.array(start))
    heights = climb(ascent, density)
    assert ascent.at_mode
    assert (np.diff(heights) >= -1e-9 * np.abs([*heights[-1:], 1.0]).max()).all()
    precision = at(density, np.array(MODES[density])).curvature
    away = ascent.best.x - MODES[density]
    assert np.sqrt(away @ precision @ away) < 0.1  # sds


def test_a_step_on_a_quadratic_leads_to_its_mode_and_the_next_confirms_it():
    ascent = NewtonAscent(np.array([40.0, -3.0]), damping=1e-12)
    ascent.advance(at(quadratic, ascent.trial), NONE, None)
    np.testing.assert_allclose(ascent.trial, [1.0, 2.0], atol=1e-3)
    value = quadratic(np.array([40.0, -3.0]))[0]
    assert ascent.promise == pytest.approx(quadratic(ascent.trial)[0] - value, rel=1e-3)
    assert len(climb(ascent, quadratic)) <= 2


def test_damping_follows_the_ratio_of_gains():
    def after(value, promise=4.0, metric=None):
        """Return the damping and whether a trial of this value is kept, over a best of -10."""
        ascent = NewtonAscent(np.zeros(2), promise=promise, scale=np.zeros(2), metric=metric)
        ascent.best = Expansion(np.zeros(2), np.array(-10.0), np.ones(2), np.eye(2))
        trial = Expansion(np.ones(2), np.array(value), np.ones(2), np.eye(2))
        before = ascent.damping
        with np.errstate(all="ignore"):
            kept = ascent._keep_if_better(trial, NONE)
        return ascent.damping / before, kept, ascent.metric is None

    assert after(-11.0) == (pytest.approx(10.0), False, True)
    assert after(np.nan)[:2] == (pytest.approx(10.0), False)
    assert after(np.inf)[:2] == (pytest.approx(10.0), False)
    assert after(-6.5) == (pytest.approx(0.1), True, True)  # 0.9 of what was promised
    assert after(-8.0) == (1.0, True, True)  # half of it
    assert after(-9.5) == (pytest.approx(4.0), True, True)  # an eighth
    assert after(-6.5, metric=np.eye(2)) == (1.0, True, True)
    assert after(-8.0, metric=np.eye(2)) == (1.0, True, False)


def test_a_first_step_is_at_most_two_sds_of_the_silos_own_modes_long():
    metric = np.diag([4.0, 0.25])
    ascent = NewtonAscent(np.array([40.0, -3.0]), metric=metric)
    ascent.advance(at(quadratic, ascent.trial), NONE, None)
    move = ascent.trial - ascent.best.x
    assert 0.5 < np.sqrt(move @ metric @ move) <= 2.0
    assert ascent.damping > DAMPING


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_search_tries_no_more_places_than_it_may_and_goes_back_to_the_best(places):
    ascent = NewtonAscent(np.array([25.0, -25.0]))
    heights = climb(ascent, cauchy, places)
    assert len(heights) == places + 1  # the last one at the best point
    assert ascent.tried == places
    np.testing.assert_array_equal(ascent.trial, ascent.best.x)
    assert not ascent.at_mode


def test_a_start_that_is_not_finite_is_left_for_zero_by_halves():
    def only_near(x):
        return cauchy(x) if np.abs(x).max() < 5 else (np.nan, x, np.eye(2))

    ascent = NewtonAscent(np.array([32.0, 0.0]))
    climb(ascent, only_near)
    assert ascent.at_mode
    nowhere = NewtonAscent(np.array([32.0, 0.0]))
    climb(nowhere, lambda x: (np.nan, x, np.eye(2)))
    assert nowhere.best is None
    assert nowhere.height == -np.inf
