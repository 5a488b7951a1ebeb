"""The search for many globals, step by step on functions that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.rounds.stacks import of_stack
from numpyro_fed.search.expand import Expansion
from numpyro_fed.search.lbfgs import BACKTRACK, MAX_IDLE, LBFGSAscent
from numpyro_fed.search.mode_search import AscentPhase

SCALES = np.array([1.0, 1e4, 1e-3])


def bowl(x, with_diagonal=True):
    """A Gaussian of unlike scales, about 1, 2, 3; without the diagonal it has zeros, as silos'."""
    away = x - [1.0, 2.0, 3.0]
    value = np.asarray(-0.5 * (SCALES * away**2).sum())
    return Expansion(x, value, -SCALES * away, SCALES if with_diagonal else np.zeros(3))


def climb(start, f=bowl, exchanges=60):
    """Take exchanges until the search is left; return which of them had the diagonal."""
    asked = []
    for _ in range(exchanges):
        if start.phase is AscentPhase.ENDED:
            break
        asked.append(start.with_diagonal)
        start.advance(f(start.trial, start.with_diagonal), None)
    return asked


def test_a_gaussian_of_unlike_scales_is_found_at_once(double):
    start = LBFGSAscent(np.zeros(3))
    asked = climb(start)
    assert start.at_mode
    assert start.phase is AscentPhase.ENDED
    np.testing.assert_allclose(start.best.x, [1, 2, 3], rtol=1e-9)
    np.testing.assert_array_equal(start.best.curvature, SCALES)
    # At first and at the end, and after eight steps; never by a start that has left.
    assert [i for i, yes in enumerate(asked) if yes] == [0, 9, len(asked) - 1]
    assert not start.with_diagonal
    before = start.best
    start.advance(bowl(start.trial, with_diagonal=False), None)
    assert start.best is before


def test_a_step_that_fails_is_shortened_and_its_point_is_not_taken(double):
    start = LBFGSAscent(np.zeros(3))
    start.advance(bowl(start.trial), None)
    first, trial = start.best, start.trial
    start.advance(bowl(trial)._replace(value=np.asarray(np.nan)), None)
    assert start.best is first
    assert start.share == BACKTRACK
    np.testing.assert_allclose(start.trial, BACKTRACK * trial)


def test_from_where_nothing_is_finite_it_goes_halfway_to_zero(double):
    start = LBFGSAscent(np.full(3, 8.0))
    lost = Expansion(start.trial, *[np.asarray(np.nan)] * 3)
    start.advance(lost, None)
    np.testing.assert_array_equal(start.trial, 4.0)
    assert start.best is None
    assert start.with_diagonal
    start.advance(lost, max_places=2)
    start.advance(lost, max_places=2)
    assert start.phase is AscentPhase.ENDED
    assert start.best is None
    assert start.height == -np.inf


@pytest.mark.parametrize("most", [1, 4])
def test_it_ends_after_so_many_places_at_the_best(double, most):
    start = LBFGSAscent(np.zeros(3))
    while start.phase is not AscentPhase.ENDED:
        start.advance(bowl(start.trial, start.with_diagonal), most)
    assert start.tried == most < MAX_IDLE
    np.testing.assert_array_equal(start.best.curvature, SCALES)


def test_a_direction_along_which_nothing_rises_is_given_up(double):
    start = LBFGSAscent(np.zeros(3))
    start.advance(bowl(start.trial), None)
    for _ in range(30):
        start.advance(bowl(start.trial)._replace(value=np.asarray(-1e9)), None)
    assert start.phase is AscentPhase.ENDED
    assert not start.at_mode


def test_silos_in_turn_have_the_numbers_of_silos_side_by_side(monkeypatch, double):
    def f(noise, down, state, data):
        return {"sum": (data * down).sum() + state, "noise": noise}

    data, state = jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0)
    args = jnp.arange(4), jnp.array([1.0, 2.0, 3.0]), state, data
    in_turn = of_stack(f, little=False)(*args)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    side_by_side = of_stack(f, little=False)(*args)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), in_turn, side_by_side))
    np.testing.assert_allclose(in_turn["sum"], data @ args[1] + state)
